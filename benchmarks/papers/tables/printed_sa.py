"""Printed figures of SA-DPSGD, beside the rows that answer them."""

from collections.abc import Sequence

from benchmarks.papers.not_private import PAPER as NOT_PRIVATE
from benchmarks.papers.rows import PAPER
from benchmarks.papers.tables.cells import REASONING, UNDEFINED, Cell, Holds, Run
from jaxdp.data.specs import spec

_MOMENTUM = (
    "[its protocol, accepted steps alone charged](accepted.md), and a momentum of 0.9, which its "
    "text does not have"
)
_NOISE = "our noise is smaller, for our accountant is tighter; the paper's, as many steps"
_COLUMNS = {
    "dp-sgd-relu": "DP-SGD, ReLU",
    "dp-sgd-tanh": "DP-SGD, tanh",
    "auto-s": "AUTO-S",
    "sa-dpsgd-as-published": "SA-DPSGD",
}
# Table 2's, for as many steps (``python -m benchmarks.printed_gaps``).
_AT_ITS_NOISE = {
    *("mnist-dp-sgd-tanh-noise-1.23", "mnist-auto-s-noise-1.23"),
    *(f"fashion_mnist-{name}-noise-2.15" for name in ("dp-sgd-relu", "dp-sgd-tanh", "auto-s")),
}
# Of CIFAR-10, so far with tanh alone.
_STANDARDIZED = "cifar10-dp-sgd-tanh-standardized"
_IMAGES = (
    "[images standardised](../papers.md#cifar-10s-images), as in the program of the work that the "
    f"paper cites: {{{_STANDARDIZED}}} after half of the steps, ours in [0, 1] then 46.46 %"
)
# Of Table 1, after the slash: adjusted freely.
SLASH = {"fashion_mnist": 88.50, "cifar10": 64.17}


def _table_1(dataset: str) -> list[Cell]:
    """The columns with privacy, before the slash."""
    cells = []
    for name, shown in _COLUMNS.items():
        row, printed = f"{dataset}-{name}", PAPER[dataset][name]
        what = f"Table 1, {spec(dataset).title}: {shown}"
        if name.startswith("sa-") and dataset != "cifar10":
            cells.append(_annealed(what, dataset, printed))
            continue
        if row == "cifar10-dp-sgd-tanh":
            half = [Run("images standardised, half of the steps", _STANDARDIZED)]
            of = (printed, [Run("", row)], half, _IMAGES, REASONING)
            cells.append(Cell(what, f"{printed:.2f} %", *of))
            continue
        noisy = next((gap for gap in _AT_ITS_NOISE if gap.startswith(f"{row}-noise")), None)
        tried = [Run("at the paper's noise", noisy)] if noisy else []
        why = _NOISE if noisy else ""
        cells.append(Cell(what, f"{printed:.2f} %", printed, [Run("", row)], tried, why))
    return cells


def _annealed(what: str, dataset: str, printed: float) -> Cell:
    row = f"{dataset}-sa-dpsgd-as-published"
    ours = [
        Run("at a proven 3", row),
        Run("by its protocol", f"{row}-until-accepted"),
        Run("repaired", f"{dataset}-sa-dpsgd"),
    ]
    tried = [
        Run("momentum 0.9, at a proven 3", f"{row}-momentum"),
        Run("momentum 0.9, by its protocol", f"{row}-momentum-until-accepted"),
        Run("momentum 0.9, repaired", f"{dataset}-sa-dpsgd-momentum"),
    ]
    return Cell(what, f"{printed:.2f} %", printed, ours, tried, _MOMENTUM)


def _slash(dataset: str, name: str) -> Cell:
    printed = SLASH[dataset]
    return Cell(
        f"Table 1, {spec(dataset).title}: SA-DPSGD, after the slash",
        f"{printed:.2f} %",
        printed,
        [Run("the nearest of ours", name)],
        (),
        'of "freely adjusted hyperparameters" none is stated',
        UNDEFINED,
    )


def _without_privacy(dataset: str) -> Cell:
    names = [f"{dataset}-{activation}-not-private" for activation in ("relu", "tanh")]
    ours = [Run(name.split("-")[1], name) for name in names]
    printed = NOT_PRIVATE[dataset]
    why = "[ten epochs](not_private.md); the paper states neither optimizer nor number of epochs"
    what = f"Table 1, {spec(dataset).title}: without privacy"
    if dataset != "cifar10":
        return Cell(what, f"{printed:.2f} %", printed, ours)
    return Cell(what, f"{printed:.2f} %", printed, ours, (), why, REASONING)


def _best(value: float) -> dict[str, str]:
    """The rates of the small sweep, that which the words name first."""
    names = {rate: f"-learning-rate-{rate:g}" for rate in (0.1, 0.25, 1.0, 1.5, 2.0)} | {0.5: ""}
    order = sorted(names, key=lambda rate: (rate != value, rate))
    return {f"mnist-mlp-64-sa-dpsgd{names[rate]}": f"{rate:g}" for rate in order}


def first_is_best(shares: Sequence[float], room: float) -> bool:
    """True if nothing is above the first by more than the margin."""
    return shares[0] >= max(shares) - room


_BATCHES = {256: "-batch-256", 384: "-batch-384", 512: "", 768: "-batch-768", 1_024: "-batch-1024"}
_SMALL = "MLP of 64, ε 1, momentum 0.9"
SA: tuple[Cell, ...] = (
    *_table_1("mnist"),
    Cell(
        "the same after the slash, and Figure 4 (b): batch 256 (Section 4.4)",
        "98.89 %",
        98.89,
        [Run("", "mnist-sa-dpsgd-as-published-batch-256")],
        [Run("momentum 0.9", "mnist-sa-dpsgd-as-published-batch-256-momentum")],
        "momentum again, which its text does not have",
    ),
    _without_privacy("mnist"),
    *_table_1("fashion_mnist"),
    _slash("fashion_mnist", "fashion_mnist-sa-dpsgd-as-published-momentum-until-accepted"),
    _without_privacy("fashion_mnist"),
    *_table_1("cifar10"),
    _slash("cifar10", "cifar10-sa-dpsgd-as-published"),
    _without_privacy("cifar10"),
    Cell(
        "Figure 4 (a): rate 1.5",
        "98.81 %",
        98.81,
        [Run("repaired", "mnist-sa-dpsgd-learning-rate-1.5")],
        [Run("momentum 0.9, repaired", "mnist-sa-dpsgd-momentum-rate-1.5")],
        "without momentum, as Algorithm 2, rate 0.5 has {mnist-sa-dpsgd}, with it "
        "{mnist-sa-dpsgd-momentum}",
    ),
    Cell(
        "Figure 4 (a): at every rate from 0.1 to 2",
        "above 96.5 %",
        ours=[
            Holds(
                "rate",
                {
                    "mnist-sa-dpsgd-learning-rate-0.1": "0.1",
                    "mnist-sa-dpsgd": "0.5",
                    "mnist-sa-dpsgd-learning-rate-1.5": "1.5",
                },
                lambda shares, _: min(shares) > 96.5,
            )
        ],
        tried=[
            Holds(
                "momentum 0.9, rate",
                {
                    "mnist-sa-dpsgd-momentum-rate-0.1": "0.1",
                    "mnist-sa-dpsgd-momentum": "0.5",
                    "mnist-sa-dpsgd-momentum-rate-1.5": "1.5",
                },
                lambda shares, _: min(shares) > 96.5,
            )
        ],
        why="momentum makes ten times the step of a small rate",
        tag=REASONING,
    ),
    Cell(
        "Figure 4 (a): best at a rate of 1.5",
        "in words",
        ours=[Holds(f"{_SMALL}, rate", _best(1.5), first_is_best)],
        tried=[
            Holds(
                "CNN, no momentum, rate",
                {
                    "mnist-sa-dpsgd-learning-rate-1.5": "1.5",
                    "mnist-sa-dpsgd-learning-rate-0.1": "0.1",
                    "mnist-sa-dpsgd": "0.5",
                },
                first_is_best,
            )
        ],
        why="of the rates that were run on its network; in the small sweep 2 is as good",
    ),
    Cell(
        "Figure 4 (b): best at a batch of 256",
        "in words",
        ours=[
            Holds(
                f"{_SMALL}, batch",
                {f"mnist-mlp-64-sa-dpsgd{tail}": f"{size}" for size, tail in _BATCHES.items()},
                first_is_best,
            )
        ],
        why="256 is the least that was run",
    ),
    Cell(
        "Figure 4 (c): no significant difference where Q0 > 1",
        "in words",
        ours=[
            Holds(
                f"{_SMALL}, Q0",
                {
                    "mnist-mlp-64-sa-dpsgd": "10",
                    "mnist-mlp-64-sa-dpsgd-temperature-100": "100",
                },
                lambda shares, room: max(shares) - min(shares) <= room,
            )
        ],
    ),
    Cell(
        "Figure 4 (d): the same from μ0 = 5 on",
        "in words",
        ours=[
            Holds(
                f"{_SMALL}, μ0",
                {
                    "mnist-mlp-64-sa-dpsgd": "10",
                    "mnist-mlp-64-sa-dpsgd-max-rejections-30": "30",
                },
                lambda shares, room: max(shares) - min(shares) <= room,
            )
        ],
    ),
)
