"""SA-DPSGD's and AdaDp's parameters varied: their Figures 4 and 5, small and at full size."""

import bisect
import statistics
import textwrap
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers.row import ResultRow
from benchmarks.papers.rows import ROWS
from benchmarks.papers.sweeps import SWEEPS, Sweep
from benchmarks.papers.tables import phases, rows, style
from benchmarks.papers.tables.page import Page, Plot, Section, TextTable
from benchmarks.papers.tables.rows import Results
from jaxdp.accounting.events import Claim
from jaxdp.papers import claims

NAMES = tuple(dict.fromkeys(name for sweep in SWEEPS for name in sweep.rows.values()))

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
                "Test accuracy in percent against one parameter, whose values stand at equal "
                "distances, of every sweep that is complete; the papers' value is filled. Above "
                "each mark: the number of steps that the budget affords where it varies, for Q0 "
                "and μ0 the share of candidates accepted. Below, what the paper says of its own "
                "figure, at its size.",
            ),
        ),
        (*(_section(results, sweep) for sweep in SWEEPS), phases.section(results, NAMES)),
        "jaxdp reproduce parameters",
    )


def _at_the_papers_size(results: Results) -> str:
    """AdaDp's large sweeps: the steps beside those of its theorem, and how far they are behind."""
    sweeps = [s for s in SWEEPS if s.algorithm == "AdaDp" and "1,000" in s.setting]
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
    """The sweeps of which every row has run: a panel each, a row of panels for each setting."""
    complete: dict[tuple[str, str], list[Sweep]] = {}
    for sweep in SWEEPS:
        if all(map(results.runs, sweep.rows.values())):
            complete.setdefault((sweep.algorithm, sweep.setting), []).append(sweep)
    drawn, axes = style.panels(max(len(complete), 1), 4, (12, 3.9 * max(len(complete), 1)))
    for panel in axes:
        panel.set_axis_off()
    for place, ((algorithm, setting), sweeps) in enumerate(complete.items()):
        beside = axes[4 * place : 4 * place + len(sweeps)]
        for panel, sweep in zip(beside, sweeps, strict=True):
            panel.set_axis_on()
            _draw(panel, results, sweep)
        # Over all panels, of which the layout must not make the first one wider.
        style.title(beside[0], " ")
        whole = beside[0].text(0, 1.02, f"{algorithm}: {setting}", transform=beside[0].transAxes)
        whole.set(fontsize=14, fontweight="bold", in_layout=False)
        beside[0].set_ylabel("test accuracy (%)")
        limits = [panel.get_ylim() for panel in beside]
        low, high = min(at for at, _ in limits), max(at for _, at in limits)
        # Room for words, and no scale so fine that chance between two runs looks like an effect.
        room = max(0.25 * (high - low), (3 - (high - low)) / 2)
        for panel in beside:
            panel.set_ylim(low - 1.8 * room, high + room)
            panel.tick_params(labelleft=panel is beside[0])
    if not complete:
        axes[0].set_axis_on()
        style.nothing_yet(axes[0])
    return drawn


def _draw(panel: Axes, results: Results, sweep: Sweep) -> None:
    base = min(sweep.rows, key=lambda value: len(sweep.rows[value]))  # the base row's name
    algorithm = sweep.algorithm.lower()
    means = []
    for place, (value, name) in enumerate(sweep.rows.items()):
        look = {**style.mark(algorithm, printed=value != base), "marker": "o"}
        for line in results.runs(name):
            at = (place, 100 * line["test_accuracy"])
            panel.plot(*at, **look)
            beside: dict[str, Any] = {
                "xytext": (0, 9),
                "textcoords": "offset points",
                "ha": "center",
            }
            panel.annotate(_beside(line, sweep), at, fontsize=11, color="0.25", **beside)
        means.append(100 * statistics.mean(rows.accuracies(results, name)))
    panel.plot(range(len(means)), means, color=look["color"], alpha=0.6)
    told = textwrap.fill(f"Paper: {PRINTED[sweep.algorithm, sweep.parameter]}", 25)
    panel.text(0.04, 0.03, told, transform=panel.transAxes, fontsize=11, color="0.35")
    panel.set_xlabel(sweep.parameter)
    ticks = [f"{value:g}".lstrip("0") for value in sweep.rows]  # .0014, not to touch the next
    panel.set_xticks(range(len(means)), ticks, fontsize=11)
    panel.margins(x=0.15)


def _beside(line: ResultRow, sweep: Sweep) -> str:
    """The other numbers that move with the parameter."""
    if "Q0" in sweep.parameter or "μ0" in sweep.parameter:
        return f"{100 * line['acceptance_rate']:.0f} %"
    moving = ("batch size", "lot size", "noise")
    return f"{line['steps']:,}" if sweep.parameter.startswith(moving) else ""
