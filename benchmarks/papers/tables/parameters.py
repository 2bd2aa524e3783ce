"""SA-DPSGD's and AdaDp's parameters varied: their Figures 4 and 5, small and at full size."""

import bisect
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.papers.row import ResultRow
from benchmarks.papers.rows import ROWS
from benchmarks.papers.sweeps import SWEEPS, Sweep
from benchmarks.papers.tables import phases, rows, style
from benchmarks.papers.tables.page import Page, Plot, Section, TextTable
from benchmarks.papers.tables.rows import Results
from jaxdp.accounting.events import Claim
from jaxdp.papers import claims

NAMES = tuple(dict.fromkeys(name for sweep in SWEEPS for name in sweep.rows.values()))
SMALL = tuple(sweep for sweep in SWEEPS if "64" in sweep.setting)

# The papers' words on their own figures: SA-DPSGD, Section 4.4, and AdaDp, Section IV-F.
PRINTED = {
    ("SA-DPSGD", "learning rate η"): "above 96.5 % from 0.1 to 2, best at 1.5 with 98.81 %",
    ("SA-DPSGD", "batch size B"): "best at 256 with 98.89 %",
    ("SA-DPSGD", "initial temperature Q0"): "no significant difference above 1",
    ("SA-DPSGD", "rejection threshold μ0"): "basically the same from 5 on",
    ("AdaDp", "learning rate η"): "above 93 % from 0.0008 to 0.005",
    ("AdaDp", "local clipping factor β"): "relatively resistant, slightly above 1 is reasonable",
    ("AdaDp", "lot size L"): "best at 800",
    ("AdaDp", "noise multiplier σ*"): "best at 7",
}


def page(results: Results) -> Page:
    """One table a sweep."""
    return Page(
        "Parameters of SA-DPSGD and AdaDp",
        (
            "SA-DPSGD's Figure 4 and AdaDp's Figure 5, on MNIST, one parameter moved at a time "
            "from the papers' values. In the small sweeps (an MLP of 64 hidden units, epsilon 1) "
            "and in AdaDp's large ones noise and budget are fixed, as in the papers, and the "
            "number of steps follows: a larger batch or less noise means fewer steps.",
            "SA-DPSGD's large one, of three rates, keeps 40 epochs, has no momentum, as its "
            "Algorithm 2, and takes the noise that the budget asks for. 13 more such rows (rates, "
            "batches, Q0, μ0; an estimated 5 hours of two cores) were taken out of the queue: "
            "what the paper prints takes [a momentum](accepted.md) that its text does not have, so "
            "that without it they would tell nothing of its figures. Its best rate and its best "
            "batch stand [with momentum](table1.md) instead.",
            _at_the_papers_size(results),
            "Choosing parameters by looking at such tables costs privacy that no column counts.",
            rows.LEGEND,
        ),
        (
            Plot(
                "parameters.png",
                "Test accuracy in percent of the small sweeps against one parameter (log scales; "
                "the papers' value is filled); above each mark the number of steps that the "
                "budget affords where it varies, for Q0 and μ0 the share of candidates accepted.",
            ),
        ),
        (*(_section(results, sweep) for sweep in SWEEPS), phases.section(results, NAMES)),
        "jaxdp reproduce parameters",
    )


def _at_the_papers_size(results: Results) -> str:
    """AdaDp's large sweeps: the steps beside those of its theorem, and how far they are behind."""
    sweeps = [s for s in SWEEPS if s.algorithm == "AdaDp" and s not in SMALL]
    base = ROWS["mnist-mlp-1000-adadp"].config()
    epsilon = base.epsilon
    assert epsilon is not None
    assert base.noise_multiplier is not None
    of = (base.batch_size / base.dataset_size, base.noise_multiplier)

    def affords(formula: Callable[[float, float, int, float], Claim]) -> int:
        return bisect.bisect_right(
            range(1, 100_000), epsilon, key=lambda n: formula(*of, n, base.delta).value
        )

    steps = {line["steps"] for line in results.runs("mnist-mlp-1000-adadp")}
    taken = " or ".join(f"{n:,}" for n in sorted(steps)) or rows.MISSING
    best = [
        max(((rows.accuracies(results, name), value) for value, name in sweep.rows.items()))
        for sweep in sweeps
    ]
    found = [
        f"{sweep.parameter} {value:g} ({rows.mean_and_spread(shares)[0]})"
        for sweep, (shares, value) in zip(sweeps, best, strict=True)
        if shares
    ]
    highest = max((share for shares, _ in best for share in shares), default=None)
    behind = rows.MISSING if highest is None else f"{93 - 100 * highest:.1f} points below"
    return (
        "AdaDp's large sweeps, of the repaired form, do not tell what the small ones do. The best: "
        f"{', '.join(found) or rows.MISSING}, single runs. At noise {of[1]:g} and a proven epsilon "
        f"of {epsilon:g} they take {taken} steps; AdaDp's own Theorem 1 affords "
        f"{affords(claims.adadp_theorem_1):,}, and the bound of Poisson sampling, by which the "
        f"example after that theorem was computed, {affords(claims.sa_dpsgd_theorem_1):,}. The "
        f"best of all is {behind} the 93 % that the paper prints for every rate."
    )


def _section(results: Results, sweep: Sweep) -> Section:
    body = []
    for value, name in sweep.rows.items():
        found = results.runs(name)
        for i, line in enumerate(rows.lines(results, name)):
            steps = f"{found[i]['steps']:,}" if found else ""
            body.append([f"{value:g}", *line, steps])
    headers = (sweep.parameter, *rows.COLUMNS, "steps")
    return Section(
        f"{sweep.algorithm}: {sweep.parameter} ({sweep.setting})",
        (f"The paper, at its own size: {PRINTED[sweep.algorithm, sweep.parameter]}.",),
        TextTable(headers, body),
    )


def figure(results: Results) -> Figure:
    """The small sweeps, a panel each; those of one algorithm share their scale."""
    drawn, axes = style.panels(2, 4, (14, 7.6), sharey="row")
    place = {"SA-DPSGD": 0, "AdaDp": 4}
    for sweep in SMALL:
        _draw(axes[place[sweep.algorithm]], results, sweep)
        place[sweep.algorithm] += 1
    for panel in (axes[0], axes[4]):
        panel.set_ylabel("test accuracy (%)")
        panel.margins(y=0.2)
        low, high = panel.get_ylim()
        # No scale so fine that the chance between two runs looks like an effect.
        room = max(0.0, 3 - (high - low)) / 2
        panel.set_ylim(low - room, high + room)
    return drawn


def _draw(panel: Axes, results: Results, sweep: Sweep) -> None:
    base = min(sweep.rows, key=lambda value: len(sweep.rows[value]))  # the base row's name
    points = []
    for value, name in sweep.rows.items():
        for line in results.runs(name):
            points.append((value, 100 * line["test_accuracy"]))
            panel.plot(
                *points[-1],
                "o",
                color=style.BLUE,
                markersize=8.5,
                markeredgewidth=1.6,
                fillstyle="full" if value == base else "none",
            )
            panel.annotate(
                _beside(line, sweep),
                points[-1],
                xytext=(0, 9),
                ha="center",
                textcoords="offset points",
                fontsize=11,
                color="0.25",
            )
    style.title(panel, sweep.algorithm)
    panel.set_xlabel(sweep.parameter)
    if not points:
        style.nothing_yet(panel)
        return
    panel.plot(*zip(*sorted(points), strict=True), "-", color=style.BLUE, linewidth=1.2, alpha=0.5)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(FixedLocator(list(sweep.rows)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticklabels([f"{value:g}" for value in sweep.rows], fontsize=11)
    low, high = min(sweep.rows), max(sweep.rows)
    room = (high / low) ** 0.12
    panel.set_xlim(low / room, high * room)


def _beside(line: ResultRow, sweep: Sweep) -> str:
    """The other numbers that move with the parameter."""
    if "Q0" in sweep.parameter or "μ0" in sweep.parameter:
        return f"{100 * line['acceptance_rate']:.0f} %"
    moving = ("batch size", "lot size", "noise")
    return f"{line['steps']:,}" if sweep.parameter.startswith(moving) else ""
