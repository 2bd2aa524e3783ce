"""Estimated minutes of a row: its steps times the measured seconds of a step like its own.

Measured on two cores that other work shared, from stored rows and from short runs. So they are
cautious: 204 later runs, a core each, took 0.14 to 1.8 times their estimate, half of them less
than a third. Rows from a GPU are no measure of them.
"""

import functools

from benchmarks.papers import accepted
from benchmarks.papers.row import Row
from jaxdp import accounting as acc
from jaxdp.data.specs import spec
from jaxdp.runs.config import RunConfig
from jaxdp.runs.recipes import recipe

# From so many minutes on, a row runs on a CPU only when it is named.
LONG = 180.0
# Starting, compiling, twenty evaluations, and the audit of the finished run.
_ONCE = {"mnist-cnn": 40.0, "cifar-cnn": 240.0, "mlp": 20.0, "dense-top": 90.0}
# Milliseconds for each record of a batch, by network; for an MLP of 1,000 units on 784 pixels, and
# on 60 components ("mlp, few").
_RECORD = {
    "mnist-cnn": {"dp-sgd": 0.25, "adadp": 0.45, "piadam": 0.40, "dp-adam-bc": 0.35},
    "cifar-cnn": {"dp-sgd": 7.0},
    "mlp": {
        **{"dp-sgd": 0.05, "dp-adam": 0.10, "adadp": 0.28, "piadam": 0.17, "pirmsprop": 0.09},
        **{"piadagrad": 0.10, "piadam-as-published": 0.9},
    },
    "mlp, few": {
        **{"dp-sgd": 0.02, "adadp": 0.08, "adadp-step-only": 0.02, "adadp-noise-only": 0.065},
        **{"adadp-as-published": 0.2, "adadp-noise-only-as-published": 0.2},
    },
    "dense-top": {
        **{"dp-sgd": 0.15, "adadp": 0.65, "adadp-noise-only": 0.65},
        **{"adadp-noise-only-as-published": 6.0},  # of 4.3 million parameters each
    },
}
# Milliseconds of a forward pass over one public example, of an energy.
_JUDGED = {"mnist-cnn": 0.03, "cifar-cnn": 0.8, "mlp": 0.002}
# A step takes at least so long, whatever its batch.
_LEAST = 0.01


def minutes(row: Row) -> float:
    """Estimated minutes on two cores.

    Args:
        row: of the queue.
    """
    config = recipe(row.dataset, **row.given)
    seconds = _steps(row, config) * _of_a_step(config) + _ONCE[config.model]
    return seconds / 60


def shown(row: Row) -> str:
    """As in "7 min", or "1.3 h" from two hours on."""
    found = minutes(row)
    return f"{found / 60:.1f} h" if found >= 120 else f"{max(1, round(found))} min"


def long(row: Row) -> bool:
    """True if it must be named to run without a GPU."""
    return minutes(row) >= LONG


def _steps(row: Row, config: RunConfig) -> float:
    if row.accepted is not None:
        return row.accepted / accepted.EXPECTED[row.dataset]
    if config.steps is not None:
        return config.steps
    assert config.epsilon is not None
    assert config.noise_multiplier is not None
    rate = config.batch_size / config.dataset_size
    return _affordable(config.epsilon, config.delta, config.noise_multiplier, rate)


@functools.cache
def _affordable(epsilon: float, delta: float, noise: float, rate: float) -> int:
    """About the steps that a budget buys: by Rényi accounting, which is quick, without DP-PCA."""
    step = acc.PoissonSampled(acc.Gaussian(noise), rate)
    make = functools.partial(acc.Repeated, step)
    return acc.queries.calibrate_count(make, epsilon, delta, accountant="rdp")


def _of_a_step(config: RunConfig) -> float:
    """Seconds."""
    name = "mlp, few" if config.model == "mlp" and config.pca_dimensions else config.model
    rates = _RECORD[name]
    algorithm = config.algorithm
    # What is built on SGD costs as much; of what was not measured, DP-SGD's is taken.
    record = rates.get(algorithm, rates.get(algorithm.removesuffix("-as-published"), 0.0))
    record = record or rates["dp-sgd"]
    width = config.hidden / 1_000 if config.model == "mlp" else 1.0
    judged = 0
    if algorithm.startswith("sa-dpsgd"):
        whole = spec(config.dataset).test_size
        judged = whole if "as-published" in algorithm else min(5_000, whole // 2)
    energy = judged * _JUDGED.get(config.model, 0.0)
    return max(_LEAST, (config.batch_size * record * width + energy * width) / 1_000)
