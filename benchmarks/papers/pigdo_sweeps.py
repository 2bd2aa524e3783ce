"""PIGDO's Figure 7, small: one parameter moved at a time on MNIST, five epochs."""

from typing import Any

from benchmarks.papers.row import Row

ALGORITHMS = {"piadam": "PIAdam", "pirmsprop": "PIRMSprop", "piadagrad": "PIAdagrad"}
EPOCHS = 5
# Section 5.2's default values; the figure's range of the hidden units is stated, the others' not.
BASE: dict[str, Any] = {
    "hidden": 1_000,
    "l2_clip_norm": 4.0,
    "batch_size": 600,
    "noise_multiplier": 4.0,
}
VALUES: dict[str, tuple[float, ...]] = {
    "hidden": (200, 400, 1_000, 1_600),
    "l2_clip_norm": (1.0, 2.0, 4.0, 8.0),
    "batch_size": (300, 600, 1_200),
    "noise_multiplier": (2.0, 4.0, 8.0),
}
SHOWN = {
    "hidden": "hidden units",
    "l2_clip_norm": "clipping norm C",
    "batch_size": "lot size",
    "noise_multiplier": "noise multiplier σ",
}
_SLUGS = {
    "hidden": "hidden",
    "l2_clip_norm": "clip",
    "batch_size": "lot",
    "noise_multiplier": "noise",
}


def row_name(algorithm: str, parameter: str, value: float) -> str:
    """The row in which a parameter has a value; the same for the default value of each."""
    base = f"mnist-mlp-{algorithm}-figure-7"
    return base if value == BASE[parameter] else f"{base}-{_SLUGS[parameter]}-{value:g}"


def _row(algorithm: str, parameter: str, value: float) -> Row:
    given = {
        "algorithm": algorithm,
        "model": "mlp",
        "activation": "relu",
        "learning_rate": 0.001,
        **BASE,
        parameter: value,
    }
    # The same number of epochs: a larger lot means fewer steps.
    given["steps"] = round(EPOCHS * 60_000 / given["batch_size"])
    return Row(row_name(algorithm, parameter, value), "mnist", given)


_FOUND = [
    _row(algorithm, parameter, value)
    for algorithm in ALGORITHMS
    for parameter, values in VALUES.items()
    for value in values
]
ROWS = tuple({row.name: row for row in _FOUND}.values())
