"""AdaDp's Table I (the epsilon that an accuracy takes), and its Figures 3 and 4 (CIFAR-10)."""

import dataclasses
from collections.abc import Callable

from matplotlib.figure import Figure

from benchmarks.papers import adadp_rows as adadp
from benchmarks.papers.row import ResultRow
from benchmarks.papers.tables import phases, rows, style
from benchmarks.papers.tables.page import Page, Plot, Section, TextTable
from benchmarks.papers.tables.rows import Results
from benchmarks.papers.tables.table3 import crossing
from jaxdp.papers import claims

TABLE_1 = {
    "dp-sgd": "DP-SGD",
    "adadp": "AdaDp, repaired",
    "adadp-as-published": "AdaDp, as published",
}
# At noise 8; the first and the last are rows of Figure 2 (a).
CURVES = {
    "dp-sgd": "DP-SGD",
    "adadp-step-only": "AdaL, the step alone",
    "adadp-noise-only": "AdaN, the noise alone, repaired",
    "adadp-noise-only-as-published": "AdaN, the noise alone, as published",
    "adadp": "AdaDp, repaired",
}
# Of CIFAR-10 the repaired form alone: as published its network's steps take hours.
ON_FEATURES = {"dp-sgd": "DP-SGD", "adadp": "AdaDp, repaired"}
NAMES = (
    *map(adadp.table_1_name, TABLE_1),
    *map(adadp.ablation_name, CURVES),
    *map(adadp.figure_3_name, CURVES),
    *(adadp.figure_3_name(algorithm, adadp.NOISE_CIFAR) for algorithm in ON_FEATURES),
)


def page(results: Results) -> Page:
    """Both tables."""
    return Page(
        "AdaDp: the epsilon that an accuracy takes, its two components, and CIFAR-10",
        (
            "MNIST, DP-PCA-60-1000-10, lot size 600, clipping norm 4, the paper's rates. *Proven* "
            "holds for everything released up to there, DP-PCA included; *Theorem 1* is the "
            "paper's formula for the same number of steps, which leaves DP-PCA out. ∞: AdaDp as "
            "published proves nothing. Poisson sampling, one record added or removed. Machines "
            "were shared with other work: seconds say little.",
        ),
        (
            Plot(
                "adadp.png",
                "Left: the epsilon at which an accuracy was first reached, by Theorem 1: ours "
                "(filled) and printed (hollow); lower is better, what is missing was not reached "
                "or not run. Right: test accuracy by epochs at noise 8.",
            ),
        ),
        (
            _table_1(results),
            _ablations(results),
            _on_features(results),
            _table_1_cifar(results),
            phases.section(results, NAMES),
        ),
        "jaxdp reproduce adadp",
    )


@dataclasses.dataclass(frozen=True)
class _Half:
    """One data set's half of Table I."""

    printed: dict[int, tuple[float, float]]
    algorithms: dict[str, str]
    name: Callable[[str], str]
    sampling_prob: float
    noise: float

    def theorem_1(self, steps: int) -> float:
        """The epsilon that the paper's formula gives for so many steps."""
        found = claims.adadp_theorem_1(self.sampling_prob, self.noise, steps, adadp.DELTA)
        return found.value

    def body(self, results: Results) -> list[list[str]]:
        """A line for each accuracy, algorithm and run."""
        body = []
        for level, (sgd, published) in self.printed.items():
            for algorithm, shown in self.algorithms.items():
                name = self.name(algorithm)
                # The paper's AdaDp is the published one.
                paper = {"dp-sgd": f"{sgd:.2f}", "adadp-as-published": f"{published:.2f}"}
                first = [f"{level} %", shown, paper.get(algorithm, "–"), f"`{name}`"]
                found = results.runs(name)
                body += [[*first, *_reached(self, line, level)] for line in found]
                if not found:
                    body.append([*first, rows.status(name), *[""] * 6])
        return body


_HEADERS = (
    "accuracy",
    "algorithm",
    "printed ε",
    "row",
    "reached at",
    "test accuracy at the end",
    "Theorem 1's ε",
    "proven ε",
    "seconds",
    "run",
    "machine",
)
MNIST = _Half(adadp.PRINTED, TABLE_1, adadp.table_1_name, 600 / 60_000, adadp.NOISE)
CIFAR_10 = _Half(
    adadp.PRINTED_CIFAR,
    ON_FEATURES,
    lambda algorithm: adadp.figure_3_name(algorithm, adadp.NOISE_CIFAR),
    2_000 / 50_000,
    adadp.NOISE_CIFAR,
)


def _table_1(results: Results) -> Section:
    return Section(
        f"Table I, MNIST: noise {adadp.NOISE:g}, DP-PCA {adadp.PCA_NOISE:g}, delta {adadp.DELTA:g}",
        (
            "Runs are evaluated after every epoch. The number of epochs is ours: the paper states "
            "none. Where one stops is chosen by looking at the test set, and epsilon is that of a "
            "run whose number of steps was fixed beforehand. " + _affordable(),
        ),
        TextTable(_HEADERS, MNIST.body(results)),
    )


def _table_1_cifar(results: Results) -> Section:
    theirs = [f"{published:g}" for _, published in adadp.PRINTED_CIFAR.values()]
    return Section(
        f"Table I, CIFAR-10, another experiment: fixed features, noise {adadp.NOISE_CIFAR:g}, "
        f"delta {adadp.DELTA:g}",
        (
            "The network, lot and rates of the section before; the accuracies are the paper's, "
            "whose convolutions were trained on CIFAR-100. What an accuracy costs follows the "
            f"features first. For AdaDp it prints {', '.join(theirs)}.",
        ),
        TextTable(_HEADERS, CIFAR_10.body(results)),
    )


def _affordable() -> str:
    """A sentence: the epochs for which Theorem 1 gives what the table prints for AdaDp."""
    parts = []
    for level, (_, epsilon) in adadp.PRINTED.items():
        epochs = next((e for e in range(1, 500) if MNIST.theorem_1(100 * e) > epsilon), 500) - 1
        parts.append(f"{epochs} for {level} %")
    return f"Theorem 1 gives what is printed for AdaDp after these epochs: {', '.join(parts)}."


def _reached(half: _Half, line: ResultRow, level: float) -> list[str]:
    at = crossing(line, level)
    last = [rows.shown_seconds(line), str(line.get("run", 1)), line["machine"]]
    ends = rows.percent(line["test_accuracy"])
    if at is None:
        return ["not reached", ends, "–", "–", *last]
    step, proven = at
    claimed = rows.shown_epsilon(half.theorem_1(step))
    told = f"step {step:,} of {line['steps']:,}"
    return [told, ends, claimed, rows.shown_epsilon(proven), *last]


def _ablations(results: Results) -> Section:
    body = [
        [shown, *line]
        for algorithm, shown in CURVES.items()
        for line in rows.lines(results, adadp.ablation_name(algorithm))
    ]
    return Section(
        "Figure 4 (a): noise 8, DP-PCA 16, 30 epochs, delta 1e-5",
        (
            "The paper's text: AdaN is more accurate than AdaL; it prints no figures. Rates 0.001 "
            "(AdaL), 0.1 (AdaN, DP-SGD) and 0.002 (AdaDp).",
        ),
        TextTable(("algorithm", *rows.COLUMNS), body),
    )


def _on_features(results: Results) -> Section:
    body = [
        [shown, *line]
        for algorithm, shown in CURVES.items()
        for line in rows.lines(results, adadp.figure_3_name(algorithm))
    ]
    return Section(
        "Figures 3 and 4 (b), another experiment: CIFAR-10 on fixed features, noise 6",
        (
            "The paper keeps convolutions that were trained on CIFAR-100, and trains two dense "
            "layers and a softmax layer privately. Here these stand on jaxdp's own pre-trained "
            "features (`--features pretrained`: filters learnt from dead leaves, random "
            "images that are nobody's), which CIFAR-100's would beat. Of the paper: noise 6, lot "
            "2,000, rates 0.052 (DP-SGD, as in its last two experiments), 0.001 (AdaDp, AdaL) and "
            "0.05 (AdaN). It states neither widths nor epochs nor what tells its three privacy "
            "levels apart: 256 units a layer, 30 epochs, one level are ours. It bounds dense "
            "layers by 3 and the softmax layer by 6; here one bound of √45 = 6.7 holds for all. "
            "The paper: AdaDp is 3.2, 5.3 and 4.8 points ahead of DpSgd, and AdaN above AdaL.",
        ),
        TextTable(("algorithm", *rows.COLUMNS), body),
    )


def figure(results: Results) -> Figure:
    """Epsilon by accuracy, and curves at noise 8."""
    drawn, (left, right) = style.panels(1, 2, (12, 5.6))
    levels = list(adadp.PRINTED)
    for algorithm, shown in TABLE_1.items():
        for line in results.runs(adadp.table_1_name(algorithm)):
            for place, level in enumerate(levels):
                if at := crossing(line, level):
                    look = style.mark(algorithm)
                    left.plot(place, MNIST.theorem_1(at[0]), label=shown, **look)
    for algorithm, column in (("dp-sgd", 0), ("adadp-as-published", 1)):
        printed = [pair[column] for pair in adadp.PRINTED.values()]
        look = style.mark(algorithm, printed=True)
        left.plot(range(len(levels)), printed, label=TABLE_1[algorithm], **look)
    style.key(left, filled="ours", hollow="printed")
    left.set_xticks(range(len(levels)), [f"{level} %" for level in levels])
    left.set(xlabel="test accuracy first reached", ylabel="epsilon by Theorem 1", xlim=(-0.5, 3.5))
    left.set_ylim(bottom=0)
    style.title(left, "Table I, noise 3, delta 1e-4")
    for algorithm, shown in CURVES.items():
        for line in results.runs(adadp.ablation_name(algorithm)):
            points = [(step / 100, 100 * share) for step, _, share in line["curve"]]
            style.curve(right, points, algorithm, shown)
    right.set(xlabel="epochs", ylabel="test accuracy (%)")
    style.title(right, "Figure 4 (a), noise 8")
    if not right.lines:
        style.nothing_yet(right)
    style.legend(drawn, (left, right), 4)
    return drawn
