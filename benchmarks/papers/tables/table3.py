"""SA-DPSGD's Table 3: the epsilon at which a run first reaches an accuracy."""

import statistics
from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.row import ResultRow
from benchmarks.papers.rows import ROWS
from benchmarks.papers.tables import gaps, rows, style
from benchmarks.papers.tables.page import Page, Plot, Section, TextTable
from benchmarks.papers.tables.rows import Results
from jaxdp.data.specs import spec
from jaxdp.papers import claims

LEVELS = {"mnist": (94, 96, 98), "fashion_mnist": (82, 84, 86), "cifar10": (52, 55, 58)}
COLUMNS = {
    "dp-sgd-relu": "DP-SGD, ReLU",
    "dp-sgd-tanh": "DP-SGD, tanh",
    "auto-s": "AUTO-S",
    "sa-dpsgd": "SA-DPSGD, repaired",
    "sa-dpsgd-momentum": "SA-DPSGD, repaired, momentum 0.9",
    "sa-dpsgd-as-published": "SA-DPSGD, as published",
    "sa-dpsgd-as-published-momentum": "SA-DPSGD, as published, momentum 0.9",
    "piadam": "PIAdam, repaired",
    "adadp": "AdaDp, repaired",
}
# Charged from the first step for the most candidates that they may take: only in the tables.
ACCEPTED = {
    "sa-dpsgd-until-accepted": "SA-DPSGD, repaired, until accepted",
    "sa-dpsgd-as-published-until-accepted": "SA-DPSGD, as published, until accepted",
    "sa-dpsgd-as-published-momentum-until-accepted": (
        "SA-DPSGD, as published, momentum 0.9, until accepted"
    ),
}
# What its accountant, Theorem 1, is about: steps of one sampled Gaussian each.
_CHARGED = ("dp-sgd", "auto-s")
# ε_D, ε_H, ε_A, ε_S: averages of five runs by the paper's accountant; None: not within epsilon 6.
PAPER: dict[str, dict[str, tuple[float | None, ...]]] = {
    "mnist": {
        "dp-sgd-relu": (1.64, 2.47, None),
        "dp-sgd-tanh": (1.23, 1.47, 2.92),
        "auto-s": (1.22, 1.47, 2.91),
        "sa-dpsgd-as-published": (1.21, 1.46, 2.53),
    },
    "fashion_mnist": {
        "dp-sgd-relu": (2.20, 2.88, 5.86),
        "dp-sgd-tanh": (1.73, 2.08, 2.96),
        "auto-s": (1.64, 2.07, 2.92),
        "sa-dpsgd-as-published": (1.52, 1.86, 2.51),
    },
    "cifar10": {
        "dp-sgd-relu": (2.99, 3.68, 4.54),
        "dp-sgd-tanh": (2.15, 2.39, 2.83),
        "auto-s": (2.05, 2.36, 2.80),
        "sa-dpsgd-as-published": (1.93, 2.27, 2.57),
    },
}


def columns(dataset: str) -> dict[str, str]:
    """The algorithms that are run on a data set, and how they are written."""
    every = {**COLUMNS, **ACCEPTED}
    return {a: shown for a, shown in every.items() if f"{dataset}-{a}" in ROWS}


NAMES = tuple(f"{dataset}-{algorithm}" for dataset in LEVELS for algorithm in columns(dataset))
# In the table's place where a long row is missing: other noise, a few epochs.
SHORT = "-short"


def page(results: Results) -> Page:
    """One table a data set."""
    return Page(
        "Table 3: the epsilon that an accuracy takes",
        (
            "SA-DPSGD's Table 3. Ours: the proven epsilon of everything released up to the first "
            "evaluation that reached the accuracy; runs are evaluated twenty times, evenly "
            "spaced, so that the figure is up to one twentieth of a run late. The paper's: "
            "averages of five runs by its own accountant, for SA-DPSGD of accepted steps alone. "
            "*By its accountant*: Theorem 1, with the logarithm, at our noise and for our steps up "
            "to there, for SA-DPSGD the accepted ones alone, as the paper charges: this is what "
            "compares with its figures. The rows *until accepted* have its noise too; they are "
            "charged from the first step for the most candidates that they may take.",
            "Where one stops is chosen here by looking at accuracies on the test set. The epsilon "
            "is that of a run whose number of steps was fixed beforehand; to stop a run that way "
            "needs a privacy filter (`acc.RenyiFilter`), which costs some more.",
            "*Short* rows stand in where the 40-epoch row has not been run or its curve was not "
            "kept: about five epochs with less noise, so that their epsilon rises faster.",
            f"{rows.LEGEND} {rows.SUMMED_LEGEND} *Reached at*, *by its accountant* and *proven* "
            "are then of the runs that reached the accuracy.",
        ),
        (
            Plot(
                "table3.png",
                "Proven epsilon (delta 1e-5) when a test accuracy was first reached: "
                "ours (filled; a faint mark is a short run) and the paper's claims (hollow). "
                "Lower is better; what is missing was not reached or not run.",
            ),
            Plot(
                "figure3.png",
                "SA-DPSGD's Figure 3: test accuracy and test loss against proven epsilon, one run "
                "of each. The curves of a data set are of as many epochs, which its title says; "
                "rows that ran before losses were kept have none.",
            ),
        ),
        (*(_section(results, dataset) for dataset in LEVELS), _at_its_noise(results)),
        "jaxdp reproduce table3",
    )


def crossing(line: ResultRow, level: float) -> tuple[int, float | str] | None:
    """Step and proven epsilon of the first known evaluation at or above ``level`` percent."""
    for step, epsilon, accuracy in curve_of(line):
        if 100 * accuracy >= level:
            return step, epsilon
    return None


def curve_of(line: ResultRow) -> list[Any]:
    """Step, proven epsilon and accuracy of every evaluation; where none was kept, of the last."""
    return line.get("curve") or [[line["steps"], line["proven_epsilon"], line["test_accuracy"]]]


def with_curve(results: Results, name: str) -> list[ResultRow]:
    """The runs of a row that kept their curve; else of its short form; else those without one."""
    every = [results.runs(candidate) for candidate in (name, name + SHORT)]
    kept = [[line for line in lines if line.get("curve")] for lines in every]
    return next((lines for lines in (*kept, *every) if lines), [])


def _section(results: Results, dataset: str) -> Section:
    body = []
    for place, level in enumerate(LEVELS[dataset]):
        for algorithm, shown in columns(dataset).items():
            name = f"{dataset}-{algorithm}"
            paper = PAPER[dataset].get(_printed_as(algorithm))
            printed = (
                "–" if paper is None else "> 6" if paper[place] is None else f"{paper[place]:.2f}"
            )
            found = with_curve(results, name)
            if found:
                body.append([f"{level} %", shown, printed, *_reached(found, level)])
            else:
                empty = [""] * len(rows.COLUMNS)
                body.append([f"{level} %", shown, printed, f"`{name}`", rows.status(name), *empty])
    headers = (
        "accuracy",
        "algorithm",
        "paper's ε",
        rows.SUMMED[0],
        "reached at",
        rows.SUMMED[1],
        "by its accountant",
        *rows.SUMMED[2:],
    )
    return Section(
        spec(dataset).title,
        (
            "*Proven* is of the steps up to there, of rows *until accepted* of the whole run; "
            "*seconds* and *claimed* are of the whole run.",
        ),
        TextTable(headers, body),
    )


def _printed_as(algorithm: str) -> str:
    """The paper's own, for what goes on until enough candidates are accepted."""
    until = algorithm in ACCEPTED and "as-published" in algorithm
    return "sa-dpsgd-as-published" if until else algorithm


def _reached(found: list[ResultRow], level: float) -> list[str]:
    """The cells of a row's runs; where some of several reached the level, means of these."""
    cells = rows.sum_of(found)
    reached = [(line, *at) for line in found if (at := crossing(line, level))]
    kept = found[0].get("curve")
    if not reached:
        why = "not reached" if kept else "not at its end; curve not kept"
        return [cells[0], why, cells[1], "–", cells[2], "–", *cells[4:]]
    first, last = min(step for _, step, _ in reached), max(step for _, step, _ in reached)
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    often = f", {len(reached)} of {len(found)} runs" if len(found) > 1 else ""
    ends = [next(a for s, _, a in curve_of(line) if s == step) for line, step, _ in reached]
    return [
        cells[0],
        f"{steps} of {found[0]['steps']:,}{'' if kept else ' or before; curve not kept'}{often}",
        rows.mean_and_spread(ends)[0],
        _mean([by_its_accountant(line, step) for line, step, _ in reached]),
        cells[2],
        _mean([float(epsilon) for _, _, epsilon in reached]),
        *cells[4:],
    ]


def _mean(found: list[float | str]) -> str:
    """Of epsilons, with their standard deviation; the word of one that is no number."""
    numbers = [each for each in found if not isinstance(each, str)]
    if not numbers:
        return str(found[0])
    shown = rows.shown_epsilon(statistics.mean(numbers))
    return f"{shown} ± {statistics.stdev(numbers):.3f}" if len(numbers) > 1 else shown


def by_its_accountant(line: ResultRow, step: int) -> float | str:
    """The epsilon that Theorem 1 gives up to a step; of an annealed run, of its accepted steps.

    A word where there is none.
    """
    name, charged = line.get("algorithm", ""), step
    if name.startswith("sa-dpsgd"):
        counts = line.get("accepted_by")
        if not counts:
            return "counts not kept"
        charged = next(n for at, n in zip(line["curve"], counts, strict=True) if at[0] == step)
    elif name not in _CHARGED:
        return "–"
    config = ROWS[line["name"]].config()
    rate, noise = config.batch_size / config.dataset_size, line["noise_multiplier"]
    claim = claims.sa_dpsgd_theorem_1(rate, noise, charged, config.delta)
    return claim.value


def _at_its_noise(results: Results) -> Section:
    """DP-SGD and AUTO-S at the noise of the paper's Table 2, from the experiments' curves."""
    body = []
    for line in results.read(gaps.FILE) or []:
        base, _, noise = line["name"].partition("-noise-")
        if base not in ROWS or line["algorithm"] not in _CHARGED or not noise:
            continue
        dataset, config = line["dataset"], ROWS[base].config()
        algorithm, rate = base.removeprefix(f"{dataset}-"), config.batch_size / config.dataset_size
        for level, paper in zip(LEVELS[dataset], PAPER[dataset][algorithm], strict=True):
            step = next((s for s, accuracy in line["curve"] if 100 * accuracy >= level), None)
            claim = "not reached"
            if step is not None:
                of = claims.sa_dpsgd_theorem_1(rate, float(noise), step, config.delta)
                claim = f"{rows.shown_epsilon(of.value)} at step {step:,} of {line['steps']:,}"
            printed = "> 6" if paper is None else f"{paper:.2f}"
            title = spec(dataset).title
            body.append([title, COLUMNS[algorithm], noise, f"{level} %", printed, claim])
    return Section(
        "At the paper's noise",
        (
            "The rows above prove 3 by less noise than the paper's, for our accountant is tighter. "
            "These have its noise, 1.23 and 2.15, one run each (`python -m "
            "benchmarks.printed_gaps`): what is left of the difference is the run's.",
        ),
        TextTable(
            ("data set", "algorithm", "noise", "accuracy", "paper's ε", "by Theorem 1"), body
        ),
    )


def figure(results: Results) -> Figure:
    """Epsilon over accuracy, one panel a data set."""
    drawn, axes = style.panels(1, 3, (12, 5.6))
    for panel, dataset in zip(axes, LEVELS, strict=True):
        found = {name: marks for name in COLUMNS if (marks := _marks(results, dataset, name))}
        for i, (algorithm, marks) in enumerate(found.items()):
            shift = 0.8 * ((i + 0.5) / len(found) - 0.5)
            for place, epsilon, look in marks:
                panel.plot(place + shift, epsilon, label=COLUMNS[algorithm], **look)
        style.title(panel, spec(dataset).title)
        panel.set_xticks(range(3), [f"{level} %" for level in LEVELS[dataset]])
        panel.set_xlim(-0.5, 2.5)
        panel.grid(visible=False, axis="x")
        for edge in (0.5, 1.5):
            panel.axvline(edge, color="0.8", linewidth=1)
        panel.margins(y=0.08)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("test accuracy first reached")
    axes[0].set_ylabel("epsilon at delta 1e-5")
    style.key(axes[-1], filled="ours, proven", hollow="the paper's claim")
    style.legend(drawn, axes, 3)
    return drawn


def _marks(
    results: Results, dataset: str, algorithm: str
) -> list[tuple[int, float, dict[str, Any]]]:
    """Level, epsilon and look of what was reached and of what the paper claims, in this order."""
    marks = []
    for line in with_curve(results, f"{dataset}-{algorithm}"):
        look = {**style.mark(algorithm), "alpha": 0.45 if line["name"].endswith(SHORT) else 1}
        for place, level in enumerate(LEVELS[dataset]):
            at = crossing(line, level)
            if at and at[1] != "inf" and line.get("curve"):
                marks.append((place, float(at[1]), look))
    look = {**style.mark(algorithm, printed=True), "markersize": 10, "zorder": 3}
    claimed = PAPER[dataset].get(algorithm, ())
    return marks + [(place, value, look) for place, value in enumerate(claimed) if value]
