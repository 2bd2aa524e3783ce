"""The papers' rows: one run each, by name, in the order of the queue."""

import dataclasses
from typing import Any

from jaxdp.runs.config import RunConfig, recipe, resolve


@dataclasses.dataclass(frozen=True)
class Row:
    """One run of a table.

    Attributes:
        name: of the row.
        dataset: of the run.
        given: what differs from the data set's recipe.
        paper: the paper's accuracy and where it stands, or "".
        needs_gpu: whether the run takes hours on two cores, so that the queue waits for a GPU.
    """

    name: str
    dataset: str
    given: dict[str, Any]
    paper: str = ""
    needs_gpu: bool = False

    def config(self) -> RunConfig:
        """The resolved configuration."""
        return resolve(recipe(self.dataset, **self.given))


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Rows that differ in one parameter.

    Attributes:
        method: as people write it.
        parameter: its name and symbol.
        setting: what the rows share, in words.
        rows: from the parameter's value to the name of a row; one of them may be shared by sweeps.
    """

    method: str
    parameter: str
    setting: str
    rows: dict[float, str]


_CNN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp-sgd-tanh", {}),
    ("dp-sgd-relu", {"activation": "relu"}),
    ("auto-s", {"method": "auto-s"}),
    ("sa-dpsgd", {"method": "sa-dpsgd"}),
    ("adadp", {"method": "adadp", "l2_clip_norm": 1.0}),
    ("piadam", {"method": "piadam"}),
    ("dp-adam", {"method": "dp-adam"}),
    ("tempered-sigmoid", {"activation": "tempered_sigmoid"}),
    ("sa-dpsgd-as-published", {"method": "sa-dpsgd-as-published"}),
    ("exp", {"noise_schedule": "exponential:0.01:118"}),
)
_PAPER = {
    ("mnist", "dp-sgd-relu"): "96.73 %", ("mnist", "dp-sgd-tanh"): "98.05 %",
    ("mnist", "auto-s"): "98.12 %", ("mnist", "sa-dpsgd"): "98.35 %",
    ("fashion_mnist", "dp-sgd-relu"): "84.42 %", ("fashion_mnist", "dp-sgd-tanh"): "86.03 %",
    ("fashion_mnist", "auto-s"): "86.33 %", ("fashion_mnist", "sa-dpsgd"): "87.41 %",
}
PARETO = ("dp-sgd-tanh", "dp-adam", "piadam", "adadp", "auto-s", "sa-dpsgd")
PARETO_EPSILONS = (0.5, 1.0, 2.0, 8.0)
CLAIMS = (
    "dp-sgd", "sa-dpsgd-as-published", "sa-dpsgd-as-published-train", "sa-dpsgd",
    "adadp-as-published", "adadp", "piadam-as-published", "piadam", "pirmsprop-as-published",
    "pirmsprop", "piadagrad-as-published", "piadagrad",
)


def _table_1(dataset: str, suffix: str, needs_gpu: bool = False, **changes: Any) -> list[Row]:
    rows = []
    for name, given in _CNN:
        paper = _PAPER.get((dataset, name), "")
        source = f"{paper} (SA-DPSGD, Table 1)" if paper and not suffix else ""
        given = {**given, **changes}
        rows.append(Row(f"{dataset}-{name}{suffix}", dataset, given, source, needs_gpu))
    return rows


def _pareto() -> list[Row]:
    return [
        Row(f"mnist-{name}-short-epsilon-{epsilon:g}", "mnist",
            {**given, "epsilon": epsilon, "steps": 600})
        for name, given in _CNN if name in PARETO for epsilon in PARETO_EPSILONS
    ]


def _claims() -> list[Row]:
    """One small setting for every algorithm as published and its repair."""
    shared = {"model": "mlp", "noise_multiplier": 1.23, "steps": 300}
    return [Row(f"mnist-mlp-64-{name}-claims", "mnist", {"method": name, **shared})
            for name in CLAIMS]


def _mlp() -> list[Row]:
    rows = []
    for noise, pca, epochs in ((8.0, 16.0, 30), (4.0, 7.0, 100), (2.0, 4.0, 260)):
        for name in ("adadp", "dp-sgd", "adadp-as-published"):
            given = {
                "method": name, "model": "mlp", "hidden": 1_000, "activation": "relu",
                "batch_size": 600, "noise_multiplier": noise, "steps": 100 * epochs,
                "l2_clip_norm": 4.0, "pca_dimensions": 60, "pca_noise_multiplier": pca,
                **({"learning_rate": 0.1, "momentum": 0.0} if name == "dp-sgd" else {}),
            }
            rows.append(Row(f"mnist-mlp-pca-{name}-noise-{noise:g}", "mnist", given))
        for name in ("piadam", "dpgdo", "piadam-as-published"):
            given = {
                "method": name, "model": "mlp", "hidden": 1_000, "activation": "relu",
                "batch_size": 600, "noise_multiplier": noise, "steps": 100 * epochs,
                "l2_clip_norm": 4.0, "learning_rate": 0.001,
            }
            rows.append(Row(f"mnist-mlp-{name}-noise-{noise:g}", "mnist", given))
    return rows


def _sweeps() -> tuple[tuple[Sweep, ...], list[Row]]:
    """The sweeps of SA-DPSGD's Figure 4 and AdaDp's Figure 5, small and at the papers' size."""
    sweeps: list[Sweep] = []
    rows: dict[str, Row] = {}

    def sweep(
        method: str, base: Row, setting: str, parameter: str, slug: str,
        values: dict[float, dict[str, Any]],
    ) -> None:
        rows[base.name] = base
        names = {}
        for value, changes in sorted(values.items()):
            name = f"{base.name}-{slug}-{value:g}" if changes else base.name
            names[value] = name
            given = {**base.given, **changes}
            settings = {**base.given.get("settings", {}), **changes.get("settings", {})}
            given.update({"settings": settings} if settings else {})
            rows[name] = Row(name, base.dataset, given, "", base.needs_gpu)
        sweeps.append(Sweep(method, parameter, setting, names))

    def settings(name: str, *values: float) -> dict[float, dict[str, Any]]:
        return {value: {"settings": {name: value}} for value in values}

    small = Row("mnist-mlp-64-sa-dpsgd", "mnist", {
        "method": "sa-dpsgd", "model": "mlp", "epsilon": 1.0, "noise_multiplier": 1.23,
    })
    full = Row("mnist-sa-dpsgd", "mnist", {"method": "sa-dpsgd", "epsilon": 3.0, "steps": 4_700})
    for base, setting, records in (
        (small, "MLP of 64, epsilon 1, noise multiplier 1.23", None),
        (full, "CNN, epsilon 3, 40 epochs", 4_700 * 512),
    ):
        gpu = dataclasses.replace(base, needs_gpu=base is full)
        rates = {v: {"learning_rate": v} for v in (0.1, 0.25, 1.0, 2.0)}
        lots = {
            float(v): {"batch_size": v, **({"steps": round(records / v)} if records else {})}
            for v in (256, 384, 768, 1_024)
        }
        heats = settings("temperature", 0.1, 1.0, 100.0)
        rejections = {float(v): {"settings": {"max_rejections": v}} for v in (1, 3, 30)}
        for parameter, slug, ours, values in (
            ("learning rate η", "learning-rate", 0.5, rates),
            ("batch size B", "batch", 512.0, lots),
            ("initial temperature Q0", "temperature", 10.0, heats),
            ("rejection threshold μ0", "max-rejections", 10.0, rejections),
        ):
            sweep("SA-DPSGD", gpu, setting, parameter, slug, {**values, ours: {}})

    for hidden, budget, noise, lots_, noises, words in (
        (64, 1.0, 1.5, (300, 450, 900, 1_200), (1.0, 2.0, 3.0),
         "MLP of 64 on 60 private components, epsilon 1, noise multiplier 1.5"),
        (1_000, 0.5, 8.0, (300, 450, 800, 1_200), (4.0, 6.0, 10.0),
         "MLP of 1,000 on 60 private components, epsilon 0.5, noise multiplier 8"),
    ):
        base = Row(f"mnist-mlp-{hidden}-adadp", "mnist", {
            "method": "adadp", "model": "mlp", "hidden": hidden, "activation": "relu",
            "batch_size": 600, "epsilon": budget, "noise_multiplier": noise,
            "l2_clip_norm": 4.0, "pca_dimensions": 60, "pca_noise_multiplier": 16.0,
        }, needs_gpu=hidden > 64)
        for parameter, slug, ours, values in (
            ("local clipping factor β", "beta", 1.2, settings("beta", 0.4, 0.8, 2.0, 4.0)),
            ("lot size L", "lot", 600.0, {float(v): {"batch_size": v} for v in lots_}),
            ("noise multiplier σ*", "noise", noise, {v: {"noise_multiplier": v} for v in noises}),
        ):
            sweep("AdaDp", base, words, parameter, slug, {**values, ours: {}})
    return tuple(sweeps), list(rows.values())


SWEEPS, _SWEPT = _sweeps()

# MNIST first; "short" rows take a few epochs and hence less noise at the same proven epsilon.
ROWS: dict[str, Row] = {}
for _row in (
    *_table_1("mnist", "-short", epsilon=3.0, steps=600),
    *_table_1("fashion_mnist", "-short", epsilon=3.0, steps=150),
    *_table_1("mnist", "", epsilon=3.0, steps=4_700),
    *_table_1("fashion_mnist", "", epsilon=3.0, steps=1_172),
    *_pareto(),
    *_mlp(),
    *_SWEPT,
    *_claims(),
    *_table_1("cifar10", "", needs_gpu=True, epsilon=3.0, steps=1_465),
):
    ROWS.setdefault(_row.name, _row)
