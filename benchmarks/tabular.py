"""Private linear models of tables: one release against DP-SGD, and the same without privacy.

python -m benchmarks.tabular TABLE --source ORIGINALS --data-dir PREPARED [--runs 5]

Nothing is chosen by a result: the ridge, the row norm and DP-SGD's numbers are fixed below.
"""

import argparse
import json
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.metrics import roc_auc_score

import jaxdp
from jaxdp import accounting as acc
from jaxdp import data, linear
from jaxdp.recipes.preprocess import shortened

RESULTS = Path(__file__).parent / "results" / "tabular.json"
DELTA, EPSILONS = 1e-5, (0.5, 1.0, 3.0)
# A tenth of epsilon for the curvature: a rule of thumb, fixed before the first run.
SHARE = 0.1
# The numbers of `jaxdp train --dataset pums`, for every table.
CLIP, RATE, MOMENTUM, STEPS, BATCH = 0.5, 1.0, 0.9, 200, 1_024
MARRIED = {  # columns and public constants that they are divided by
    "sex": 1, "age": 100, "educ": 16, "latino": 1, "black": 1, "asian": 1, "uscitizen": 1,
    "children": 1, "disability": 1, "militaryservice": 1, "employed": 1, "englishability": 1,
}  # fmt: skip


def built_in(name: str, prepared: Path) -> tuple:
    """A table as ``jaxdp train --dataset`` has it, columns in [-1, 1]; its labels as -1 and 1."""
    table = data.load(name, prepared)
    labels = (np.where(y == 1, 1.0, -1.0) for y in (table.train_y, table.test_y))
    (a, b), (train, test) = labels, (table.train_x, table.test_x)
    return train, a, test, b


def married(source: Path) -> tuple:
    """Married or not from twelve columns and the logarithm of income, scaled to [-1, 1]."""
    lines = (source / "pums" / "FultonPUMS5full.csv").read_text(encoding="utf-8").splitlines()
    names = [name.strip('"') for name in lines[0].split(",")]
    table = np.asarray([line.split(",") for line in lines[1:]], np.float64)
    columns = dict(zip(names, table.T, strict=True))
    x = [np.clip(columns[name] / by, 0, 1) for name, by in MARRIED.items()]
    x.append(np.clip(np.log10(np.maximum(columns["income"], 0) + 1) / 6, 0, 1))
    return split(2 * np.stack(x, axis=1) - 1, 2 * columns["married"] - 1)


def split(x: np.ndarray, y: np.ndarray) -> tuple:
    order = np.random.Generator(np.random.Philox(key=2021)).permutation(len(y))
    cut = len(y) * 4 // 5
    return x[order[:cut]], y[order[:cut]], x[order[cut:]], y[order[cut:]]


def with_constant(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def least_squares(x: np.ndarray, y: np.ndarray, epsilon: float) -> tuple:
    noise = acc.calibrate(acc.Gaussian, epsilon, DELTA)
    found = linear.dp_least_squares(x, y, noise, row_norm=math.sqrt(x.shape[1]))
    return found, acc.epsilon(acc.Gaussian(noise), DELTA).upper


def objective(x: np.ndarray, y: np.ndarray, epsilon: float) -> tuple:
    norm = math.sqrt(x.shape[1])
    ridge = norm**2 / 4 / math.expm1(SHARE * epsilon)
    noise = acc.calibrate(lambda z: linear.logistic_event(z, ridge, norm), epsilon, DELTA)
    found = linear.dp_logistic(x, y, noise, ridge=ridge, row_norm=norm)
    return found, acc.epsilon(linear.logistic_event(noise, ridge, norm), DELTA).upper


def dp_sgd(x: np.ndarray, y: np.ndarray, epsilon: float) -> tuple:
    mechanism = jaxdp.dp_sgd(
        epsilon=epsilon,
        delta=DELTA,
        steps=STEPS,
        l2_clip_norm=CLIP,
        batch_size=min(BATCH, len(x) // 8),
        dataset_size=len(x),
    )
    source = tuple(np.asarray(a, np.float32) for a in (x, y))
    loss = lambda w, a, b: jax.nn.softplus(-b * jnp.vdot(a, w))  # noqa: E731
    trainer = jaxdp.Trainer(
        loss, mechanism, optax.sgd(RATE, momentum=MOMENTUM), source, physical_batch_size=1_152
    )
    state = trainer.init(jnp.zeros(x.shape[1]))
    for batch in trainer.batches():
        state, _ = trainer.step(state, batch)
    return np.asarray(state.params, np.float64), trainer.epsilon().upper


def not_private(x: np.ndarray, y: np.ndarray, epsilon: float) -> tuple:
    rows = shortened(x, math.sqrt(x.shape[1])) * y[:, None]
    return linear._minimum(rows, np.zeros(x.shape[1]), 1.0, 1e-3, math.sqrt(x.shape[1])), None


METHODS = {"objective": objective, "least_squares": least_squares, "dp_sgd": dp_sgd}


def measured(method, table: tuple, epsilon: float) -> dict:
    x, y, test_x, test_y = table
    began = time.perf_counter()
    weights, proven = method(with_constant(x), y, epsilon)
    seconds = time.perf_counter() - began
    margin = with_constant(test_x) @ weights
    return {
        "auc": round(float(roc_auc_score(test_y, margin)), 5),
        "accuracy": round(float(np.mean((margin > 0) == (test_y > 0))), 5),
        "proven_epsilon": proven,
        "seconds": round(seconds, 2),
    }


def row(name: str, method: str, epsilon: float | None, lines: list) -> dict:
    kept = {"table": name, "method": method, "epsilon": epsilon, "delta": DELTA, "runs": len(lines)}
    for key in ("auc", "accuracy", "seconds"):
        kept[key] = [line[key] for line in lines]
    kept["proven_epsilon"] = lines[0]["proven_epsilon"]
    return kept


def main() -> None:
    """Writes one row of a table for each method and epsilon; other tables' rows stay."""
    parser = argparse.ArgumentParser()
    parser.add_argument("table", choices=("pums", "married", "madelon"))
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    name = given.table
    table = married(given.source) if name == "married" else built_in(name, given.data_dir)
    rows = [row(name, "not private", None, [measured(not_private, table, math.inf)])]
    for method, run in METHODS.items():
        for epsilon in EPSILONS:
            lines = [measured(run, table, epsilon) for _ in range(given.runs)]
            rows.append(row(name, method, epsilon, lines))
            mean = {key: float(np.mean(rows[-1][key])) for key in ("auc", "accuracy", "seconds")}
            print(name, method, epsilon, {k: round(v, 4) for k, v in mean.items()}, flush=True)
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    rows = [r for r in kept if r["table"] != name] + rows
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
