"""PUMS at epsilon 1: private against non-private against the majority class.

`python -m benchmarks.pums --data-dir DIR` prints the table, medians of five runs.
"""

import argparse
import statistics

import jax
import numpy as np
import optax

from jaxdp import data, models, runs
from jaxdp.runs import assemble
from jaxdp.seeds import Secret

RUNS = 5
RATES = {"logistic": 1.0, "mlp": 3.0}


def private(dataset: data.Dataset, model: str, secret: Secret) -> float:
    """Test accuracy of one run at a proven (1, 1e-5)."""
    config = runs.resolve(
        runs.recipe("pums", model=model, epsilon=1.0, learning_rate=RATES[model])
    )
    assert config.mechanism().epsilon(config.steps, config.delta).upper <= 1.0
    trainer = assemble.trainer_of(config, dataset, secret)
    state = assemble.fresh_state(trainer, config, secret)
    train = jax.device_put((dataset.train_x, dataset.train_y))
    for _ in range(config.steps):
        state, _, _ = trainer.step(state, train)
    accuracy = assemble.evaluator(assemble.model_of(config), dataset.test_x, dataset.test_y)
    return accuracy(state.params)


def non_private(dataset: data.Dataset, model_name: str, secret: Secret) -> float:
    """Test accuracy of the same model by Adam on ordinary batches of 1,024."""
    model = models.build(model_name, num_classes=2, example_shape=dataset.spec.example_shape)
    loss_fn, tx = models.cross_entropy(model), optax.adam(3e-3)
    params = models.init(model, secret.jax_key("init"), dataset.spec.example_shape)
    opt_state, rng = tx.init(params), secret.philox("sampling", 0)
    x, y = jax.device_put((dataset.train_x, dataset.train_y))

    @jax.jit
    def step(params, opt_state, indices):
        def mean_loss(params):
            return jax.vmap(loss_fn, (None, 0))(params, (x[indices], y[indices])).mean()

        updates, opt_state = tx.update(jax.grad(mean_loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(2_000):
        params, opt_state = step(params, opt_state, rng.integers(0, len(y), 1_024))
    return assemble.evaluator(model, dataset.test_x, dataset.test_y)(params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    dataset = data.load("pums", parser.parse_args().data_dir)
    majority = np.bincount(dataset.test_y).max() / len(dataset.test_y)
    print(f"majority class {majority:.2%}")
    print("| model | epsilon 1 | non-private |\n|---|---|---|")
    for model in ("logistic", "mlp"):
        columns = []
        for train in (private, non_private):
            found = [train(dataset, model, Secret.from_seed(i)) for i in range(RUNS)]
            columns.append(
                f"{statistics.median(found):.2%} ({min(found):.2%} to {max(found):.2%})"
            )
        print(f"| {model} | {columns[0]} | {columns[1]} |")


if __name__ == "__main__":
    main()
