"""Un-noised means beside a sum: told, or refused where the mechanism names no leak."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.optimizers import Algorithm, registry, sa_dpsgd
from jaxdp.papers.raw_gradient import RawGradient

DATA = {"x": np.ones((100, 3), np.float32), "y": np.ones(100, np.float32)}


def loss_fn(w, example):
    return (example["x"] @ w - example["y"]) ** 2


def mechanism():
    return jaxdp.dp_sgd(noise_multiplier=1.0, l2_clip_norm=0.1, batch_size=10, dataset_size=100)


def a_thousand_gradients(loss_fn, made=RawGradient):
    """Nothing sees that these contributions stay within l2."""
    return made(loss_fn, lambda raw: lambda g: (g * 1000, g), lambda p: 0.1, None, 10)


def test_a_sum_beside_un_noised_means_is_never_without_a_word():
    grad_fn, params = a_thousand_gradients(loss_fn), jnp.zeros(3)
    for compiled in (False, True):
        sampler, tx = mechanism().sampler(100), optax.chain(mechanism().privatize())
        summed, _ = grad_fn.sum(params, DATA, sampler.draw(), raw=jnp.zeros(3))
        if compiled:
            jaxdp.compile_update(tx)(params, tx.init(params), summed)
        else:
            tx.update(summed, tx.init(params), params)
        assert any("un-noised means" in said for said in sampler.ledger.unverified()), compiled


class Leaky(RawGradient):
    def sum(self, params, data, draw, rng=None):
        return super().sum(params, data, draw, raw=params)

    def sum_passes(self, params, passes, draw, rng=None, **options):
        return super().sum(params, DATA, draw, raw=params)


class Rows:
    """Records by position, on the host."""

    def __len__(self):
        return 100

    def __getitem__(self, indices):
        return {name: leaf[indices] for name, leaf in DATA.items()}


@pytest.mark.parametrize("source", [DATA, Rows()], ids=["arrays", "on the host"])
def test_a_trainer_refuses_un_noised_means_where_no_leak_is_named(source):
    def update(updates, state, params=None, *, leaked, **extra):
        return leaked, state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    algorithm = Algorithm(
        mechanism(), tx, gradient=lambda loss_fn: a_thousand_gradients(loss_fn, Leaky)
    )
    trainer = jaxdp.Trainer(loss_fn, algorithm, source=source)
    state = trainer.init(jnp.zeros(3))
    batch = next(iter(trainer.batches(1)))
    with pytest.raises(ValueError, match="mechanism must name its leak"):
        trainer.step(state, batch)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(registry, "ALGORITHMS", dict(registry.ALGORITHMS))
    return registry.register


def test_un_noised_training_records_judge_only_where_the_mechanism_names_it(registered):
    def build(n, temperature=10.0):
        return sa_dpsgd(n.mechanism(), n.learning_rate, n.coin(), temperature=temperature)

    registered("judged-by-train", registry.Entry(build, energy="train"))
    numbers = registry.Numbers(1.0, 0.1, 10, 100, 0.1, key=jaxdp.Secret.new().jax_key("coin"))
    with pytest.raises(ValueError, match="must name its leak"):
        registry.build("judged-by-train", numbers)


def test_the_numbers_of_an_algorithm_may_have_any_name(registered):
    def build(numbers, rate=1.0):
        return Algorithm(numbers.mechanism(), optax.sgd(rate))

    registered("any-name", registry.Entry(build))
    assert registry.settings_of("any-name") == ("rate",)
    with pytest.raises(ValueError, match="entry must be"):
        registered("no-entry", build)
