"""One parameter moved at a time: SA-DPSGD's Figure 4 and AdaDp's Figure 5, small and full size."""

import dataclasses
from typing import Any

from benchmarks.papers.row import Row

# From a parameter's value to what it changes in the base row; nothing for the base row itself.
Values = dict[float, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Rows that differ in one parameter.

    Attributes:
        algorithm: as people write it.
        parameter: its name and symbol.
        setting: what the rows share, in words.
        rows: from the parameter's value to the name of a row; one of them may be shared by sweeps.
    """

    algorithm: str
    parameter: str
    setting: str
    rows: dict[float, str]


def _annealing(base: Row, setting: str) -> list[tuple[Sweep, list[Row]]]:
    """The four sweeps of SA-DPSGD, which all cost as much."""
    lots: Values = {float(v): {"batch_size": v} for v in (256, 384, 768, 1_024)}
    rates: Values = {v: {"learning_rate": v} for v in (0.1, 0.25, 1.0, 1.5, 2.0)}
    heats = _settings("temperature", 0.1, 1.0, 100.0)
    rejections = _settings("max_rejections", 1, 3, 30)
    return [
        _swept("SA-DPSGD", parameter, setting, base, slug, {**values, ours: {}})
        for parameter, slug, ours, values in (
            ("learning rate η", "learning-rate", 0.5, rates),
            ("batch size B", "batch", 512.0, lots),
            ("initial temperature Q0", "temperature", 10.0, heats),
            ("rejection threshold μ0", "max-rejections", 10.0, rejections),
        )
    ]


def _adadp(
    base: Row, setting: str, lots: tuple[int, ...], noises: tuple[float, ...]
) -> list[tuple[Sweep, list[Row]]]:
    """The four sweeps of AdaDp; its rate is fixed, Figure 5 (a) moves it from 0.0008 to 0.005."""
    noise = base.given["noise_multiplier"]
    rates: Values = {v: {"learning_rate": v} for v in (0.0008, 0.0014, 0.003, 0.005)}
    return [
        _swept("AdaDp", parameter, setting, base, slug, {**values, ours: {}})
        for parameter, slug, ours, values in (
            ("learning rate η", "learning-rate", 0.002, rates),
            ("local clipping factor β", "beta", 1.2, _settings("beta", 0.4, 0.8, 2.0, 4.0)),
            ("lot size L", "lot", 600.0, {float(v): {"batch_size": v} for v in lots}),
            ("noise multiplier σ*", "noise", noise, {v: {"noise_multiplier": v} for v in noises}),
        )
    ]


def _settings(name: str, *values: float) -> Values:
    return {float(value): {"settings": {name: value}} for value in values}


def _swept(
    algorithm: str, parameter: str, setting: str, base: Row, slug: str, values: Values
) -> tuple[Sweep, list[Row]]:
    rows = {
        value: dataclasses.replace(
            base,
            name=f"{base.name}-{slug}-{value:g}" if changes else base.name,
            given={**base.given, **changes},
        )
        for value, changes in sorted(values.items())
    }
    names = {value: row.name for value, row in rows.items()}
    return Sweep(algorithm, parameter, setting, names), [base, *rows.values()]


def _private_mlp(hidden: int, epsilon: float, noise: float) -> Row:
    """AdaDp on 60 components of a private analysis."""
    return Row(
        f"mnist-mlp-{hidden}-adadp",
        "mnist",
        {
            "algorithm": "adadp",
            "model": "mlp",
            "hidden": hidden,
            "activation": "relu",
            "batch_size": 600,
            "epsilon": epsilon,
            "noise_multiplier": noise,
            "l2_clip_norm": 4.0,
            "pca_dimensions": 60,
            "pca_noise_multiplier": 16.0,
        },
    )


_FOUND = [
    *_annealing(
        Row(
            "mnist-mlp-64-sa-dpsgd",
            "mnist",
            {
                "algorithm": "sa-dpsgd",
                "model": "mlp",
                "epsilon": 1.0,
                "noise_multiplier": 1.23,
                "momentum": 0.9,
            },
        ),
        "MLP of 64, epsilon 1, noise multiplier 1.23, momentum 0.9",
    ),
    # The base row itself is one of Table 1. The rates that were run, and no more: what the paper
    # prints takes a momentum, which Algorithm 2 and these rows lack.
    _swept(
        "SA-DPSGD",
        "learning rate η",
        "CNN, epsilon 3, 40 epochs",
        Row(
            "mnist-sa-dpsgd",
            "mnist",
            {"algorithm": "sa-dpsgd", "epsilon": 3.0, "steps": 4_700},
        ),
        "learning-rate",
        {0.1: {"learning_rate": 0.1}, 0.5: {}, 1.5: {"learning_rate": 1.5}},
    ),
    *_adadp(
        _private_mlp(64, 1.0, 1.5),
        "MLP of 64 on 60 private components, epsilon 1, noise multiplier 1.5",
        (300, 450, 900, 1_200),
        (1.0, 2.0, 3.0),
    ),
    *_adadp(
        _private_mlp(1_000, 0.5, 8.0),
        "MLP of 1,000 on 60 private components, epsilon 0.5, noise multiplier 8",
        (300, 450, 800, 1_200),
        (4.0, 6.0, 7.0, 10.0),
    ),
]
SWEEPS = tuple(sweep for sweep, _ in _FOUND)
ROWS = tuple({row.name: row for _, rows in _FOUND for row in rows}.values())
