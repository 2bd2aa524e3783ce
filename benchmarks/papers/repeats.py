"""Rows that are repeated: accuracy against epsilon, at rates chosen on another data set."""

from typing import Any

from benchmarks.papers.row import Row

EPSILONS = (0.5, 1.0, 2.0, 3.0, 8.0)
# Fewer runs of a point say nothing of chance: such a point is not drawn.
LEAST_RUNS = 3
REPEATED: dict[str, dict[str, Any]] = {
    "dp-sgd-tanh": {},
    "dp-adam-bc": {"algorithm": "dp-adam-bc"},
    "piadam": {"algorithm": "piadam"},
    # The box of its first steps, as in the single rows.
    "adadp": {"algorithm": "adadp", "l2_clip_norm": 1.0},
    "auto-s": {"algorithm": "auto-s"},
    "sa-dpsgd-momentum": {"algorithm": "sa-dpsgd", "momentum": 0.9},
}
_SHARED: dict[str, Any] = {
    "batch_size": 512,
    "steps": 300,
    "l2_clip_norm": 0.1,
    "eval_every": 300,
}
# Learning rates tried on Fashion-MNIST, which is public and holds no record of MNIST.
TRIED = {
    "dp-sgd-tanh": (2.0, 4.0, 8.0, 16.0),
    "dp-adam-bc": (0.002, 0.004, 0.008),
    "piadam": (0.002, 0.004, 0.008),
    "adadp": (0.004, 0.008, 0.016),
    "auto-s": (2.0, 4.0, 8.0, 16.0),
}
TRIED_AT = 2.0
# The best of each; the same at every budget. SA-DPSGD has DP-SGD's: its paper compares the
# two at equal hyper-parameters.
CHOSEN = {
    "dp-sgd-tanh": 8.0,
    "dp-adam-bc": 0.004,
    "piadam": 0.004,
    "adadp": 0.008,
    "auto-s": 4.0,
    "sa-dpsgd-momentum": 8.0,
}


def rate_name(algorithm: str, rate: float) -> str:
    """The row of a learning rate on the public data set."""
    return f"fashion_mnist-{algorithm}-rate-{rate:g}"


def row_name(algorithm: str, epsilon: float) -> str:
    """The row of an algorithm at a budget."""
    return f"mnist-{algorithm}-repeated-epsilon-{epsilon:g}"


def _row(
    name: str, dataset: str, algorithm: str, rate: float, epsilon: float, runs: int = 1
) -> Row:
    return Row(
        name,
        dataset,
        {
            **_SHARED,
            **REPEATED[algorithm],
            "learning_rate": rate,
            "epsilon": epsilon,
        },
        runs=runs,
    )


RATES = tuple(
    _row(rate_name(algorithm, rate), "fashion_mnist", algorithm, rate, TRIED_AT)
    for algorithm, rates in TRIED.items()
    for rate in rates
)
ROWS = tuple(
    _row(row_name(algorithm, epsilon), "mnist", algorithm, CHOSEN[algorithm], epsilon, LEAST_RUNS)
    for algorithm in REPEATED
    for epsilon in EPSILONS
)
