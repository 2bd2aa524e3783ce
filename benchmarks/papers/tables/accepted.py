"""SA-DPSGD by its paper's protocol: ended by the accepted steps, beside Table 1's rows."""

from matplotlib.figure import Figure

from benchmarks.papers import accepted
from benchmarks.papers.row import ResultRow
from benchmarks.papers.rows import PAPER, ROWS
from benchmarks.papers.tables import rows, style
from benchmarks.papers.tables.page import Page, Plot, Section, TextTable
from benchmarks.papers.tables.rows import Results
from jaxdp import accounting as acc
from jaxdp.data.specs import spec

NAMES = tuple(row.name for row in accepted.ROWS)
SHOWN = {
    "sa-dpsgd": "repaired",
    "sa-dpsgd-as-published": "as published",
    "sa-dpsgd-as-published-momentum": "as published, momentum 0.9",
}
HEADERS = (
    "SA-DPSGD",
    "paper",
    "Table 1's row",
    "row",
    "test accuracy",
    "accepted / proposed",
    "claimed ε",
    "ε of the steps taken",
    "proven ε",
    "seconds",
    "run",
    "machine",
)


def page(results: Results) -> Page:
    """The rows of both data sets."""
    return Page(
        "SA-DPSGD until the accepted steps claim epsilon 3",
        (
            "[Table 1](table1.md) gives every algorithm noise and steps that *prove* (3, 1e-5); "
            "there SA-DPSGD's rejected candidates leave fewer accepted steps. The paper charges "
            "accepted steps alone. These rows do as it did: the noise of its Table 2, and "
            "candidates until the accepted ones claim (3, 1e-5) by its Theorem 1, with the "
            "logarithm that equation (4) lacks.",
            "*Claimed*: by Theorem 1, of the accepted steps; runs end with a block, so that it is "
            "a little over 3. *ε of the steps taken*: the exact epsilon of as many steps, rejected "
            "ones included, **had their number been fixed beforehand**. It was not: it follows "
            "from which candidates were accepted, so it is a release itself, and ordinary "
            "accounting does not cover a number of steps that releases decide. *Proven*: all that "
            "a run may take, μ0 + 1 candidates for every accepted one, which the ledger is charged "
            "for before the first step. All at delta 1e-5, one record added or removed.",
            "What ends a run is computed from releases: noisy gradients, and an energy on public "
            "examples. *As published* these are the test examples of which the accuracy is told; "
            "*repaired*, half of them (at most 5,000), and accuracy is told of the rest. "
            "*Table 1's row*: the same algorithm at a proven epsilon of 3. *Paper*: its Table 1, "
            "the average of five runs; its Algorithm 2 has no momentum, the authors' later code "
            "has 0.9. Machines were shared with other work: seconds say little.",
        ),
        (
            Plot(
                "accepted.png",
                "Test accuracy of SA-DPSGD against the number of candidates, rejected ones "
                "included; the thin line is the paper's accuracy. An arrow: the curve comes from "
                "below the axis. A panel without curves has no run.",
            ),
        ),
        tuple(_section(results, dataset) for dataset in accepted.NOISE),
        "jaxdp reproduce accepted",
    )


def _section(results: Results, dataset: str) -> Section:
    number = accepted.affordable(accepted.EPSILON, dataset)
    printed = accepted.affordable(accepted.EPSILON, dataset, printed=True)
    text = (
        f"σ {accepted.NOISE[dataset]:g}: {number:,} accepted steps claim epsilon 3 (equation (4) "
        f"as printed: {printed}); a run may take {(accepted.MAX_REJECTIONS + 1) * number:,}."
    )
    shown = [name for name in SHOWN if f"{dataset}-{name}-until-accepted" in ROWS]
    body = [cells for name in shown for cells in _lines(results, dataset, name)]
    return Section(spec(dataset).title, (text,), TextTable(HEADERS, body))


def _lines(results: Results, dataset: str, name: str) -> list[list[str]]:
    """The runs of an algorithm; without one, a line that says so."""
    paper = PAPER[dataset].get(name)
    before = rows.accuracies(results, f"{dataset}-{name}")
    shared = [
        SHOWN[name],
        f"{paper:.2f} %" if paper else "–",
        rows.mean_and_spread(before)[0] if before else rows.status(f"{dataset}-{name}"),
    ]
    row = f"{dataset}-{name}-until-accepted"
    found = results.runs(row)
    if not found:
        return [[*shared, f"`{row}`", rows.status(row), *[""] * (len(HEADERS) - 5)]]
    return [[*shared, *_cells(line, dataset)] for line in found]


def _cells(line: ResultRow, dataset: str) -> list[str]:
    number = ROWS[line["name"]].accepted or 0
    reached = "" if line["accepted"] >= number else f", of {number:,} to reach"
    return [
        f"`{line['name']}`",
        rows.percent(line["test_accuracy"]),
        f"{line['accepted']:,} / {line['steps']:,}{reached}",
        rows.shown_epsilon(accepted.claimed(line["accepted"], dataset)),
        rows.shown_epsilon(_of_steps_taken(line)),
        rows.shown_epsilon(line["proven_epsilon"]),
        rows.shown_seconds(line),
        str(line.get("run", 1)),
        line["machine"],
    ]


def _of_steps_taken(line: ResultRow) -> float:
    """The epsilon of as many steps, had their number been fixed."""
    total = ROWS[line["name"]].config().total(line["steps"])
    return acc.epsilon(total, accepted.DELTA).upper


def figure(results: Results) -> Figure:
    """Accuracy against candidates, a curve for each run."""
    drawn, axes = style.panels(1, 2, (12, 5.6))
    for panel, dataset in zip(axes, accepted.NOISE, strict=True):
        for name, shown in SHOWN.items():
            for line in results.runs(f"{dataset}-{name}-until-accepted"):
                points = [(step, 100 * share) for step, _, share in line["curve"]]
                style.curve(panel, points, name, shown)
        if not panel.lines:
            panel.text(0.5, 0.5, rows.MISSING, ha="center", transform=panel.transAxes)
        paper = PAPER[dataset]["sa-dpsgd-as-published"]
        panel.axhline(paper, color=style.BLACK, linewidth=1.2, label="the paper, as published")
        style.from_below(panel)
        panel.set_xlabel("candidates")
        panel.set_ylabel("test accuracy (%)")
        style.title(panel, f"SA-DPSGD, {spec(dataset).title}")
    style.legend(drawn, axes, 3)
    return drawn
