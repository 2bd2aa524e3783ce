"""Checks that what is committed agrees: pages with their rows, figures in texts with their runs.

`python -m benchmarks.release` runs every check of ``CHECKS``, prints what differs, and ends with 1
where anything does. Each check yields a line for a difference. The tests keep what renders pages
and makes rows, on small rows; these compare files that a change of code leaves as they are.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imread

from benchmarks import (
    accuracy_page,
    gpu_page,
    language_model,
    printed_gaps,
    release_words,
    true_batch_audit,
)
from benchmarks.illnesses import __main__ as planted
from benchmarks.illnesses import noise, stories
from benchmarks.papers import adadp_gradients, adadp_noise, census, cost, repeats, tables
from benchmarks.papers.rows import ROWS
from benchmarks.papers.tables import pareto, printed, pums_feature, pums_groups, rows

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = DOCS / "results"
STORED = ROOT / "benchmarks" / "results"
RESULTS = tables.Results(STORED)

Differences = Iterator[str]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _kept(file: str) -> Any:
    return json.loads(_text(STORED / file))


def pages() -> Differences:
    """Every page of the papers is what the rows give, and its plots are not blank."""
    for name, target in tables.TARGETS.items():
        if _text(PAGES / f"{name}.md") != tables.to_markdown(target.page(RESULTS)):
            yield f"docs/results/{name}.md; run: jaxdp reproduce {name} --render-only"
        for file in target.figures:
            picture = np.round(255 * imread(PAGES / file)).astype(np.uint8)
            colours, counts = np.unique(picture.view(np.uint32), return_counts=True)
            # Letters and marks have soft edges.
            drawn = len(colours) > 100 and counts.max() < 0.98 * counts.sum()
            if min(picture.shape[:2]) <= 400 or not drawn:
                yield f"docs/results/{file} is small or blank"


def marks() -> Differences:
    """No mark of the plot of claims lies beyond its panel."""
    (draw,) = tables.TARGETS["claims"].figures.values()
    for panel in draw(RESULTS).axes:
        low, high = panel.get_xlim()
        found = [float(x) for mark in panel.lines for x in np.asarray(mark.get_xdata())]
        if not found or not low < min(found) <= max(found) < high:
            yield f"claims: marks {found} in a panel from {low} to {high}"


def _names(value: Any) -> Iterator[str]:
    """Every name of a value of JSON, at any depth."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for inside in value:
            yield from _names(inside)


def seeds() -> Differences:
    """No page and no row holds a seed."""
    for page in PAGES.glob("*.md"):
        if re.search(r"\bseeds?\b", _text(page)):
            yield f"docs/results/{page.name} holds a seed"
    for file in ("papers.json", "pums.json", "accountants.json"):
        rows = RESULTS.read(file)
        if not rows or {"seed", "secret", "entropy"} & set(_names(rows)):
            yield f"{file} holds no rows, or a seed"


def configurations() -> Differences:
    """Rows of SA-DPSGD ran with the momentum, and repeats with the rate, of their names."""
    for line in RESULTS.read("papers.json"):
        name = line["name"]
        if "sa-dpsgd" in name and line["config"]["momentum"] != ROWS[name].config().momentum:
            yield f"papers.json: {name} ran with another momentum"
    for name in pareto.NAMES:
        for line in RESULTS.runs(name):
            command = f"jaxdp reproduce run {name} --runs {line['run']}"
            dated = re.fullmatch(r"\d{4}-\d\d-\d\d", line["date"])
            rate = ROWS[name].given["learning_rate"]
            if not dated or (line["command"], line["config"]["learning_rate"]) != (command, rate):
                yield f"papers.json: {name}, run {line['run']}: date, command or rate"


def estimates() -> Differences:
    """Estimated minutes are of the size of what was measured.

    The machine was shared for most rows and idle for others, so that single rows differ by more.
    They are estimates for two cores, of which a row from a GPU tells nothing.
    """
    lines = [x for x in RESULTS.read("papers.json") if x["steps_timed"] == x["steps"] > 1_000]
    lines = [x for x in lines if rows.on_cpu(x) and x["name"] in ROWS]
    ratios = sorted(60 * cost.minutes(ROWS[x["name"]]) / x["seconds"] for x in lines)
    low, middle, high = (
        ratios[at] for at in (len(ratios) // 10, len(ratios) // 2, -len(ratios) // 10)
    )
    if not (len(ratios) > 20 and low > 0.25 and 0.6 < middle < 2.0 and high < 6):
        yield f"estimated over measured time of {len(ratios)} rows: {low}, {middle}, {high}"


def plot_of_repeats() -> Differences:
    """Every point was run, at the best rate on public data, and its page tells the same of it."""
    if len(pareto.drawn(RESULTS)["dp-sgd-tanh"]) != len(repeats.EPSILONS):
        yield "pareto: DP-SGD lacks a point"
    if pareto.caption(RESULTS) not in _text(PAGES / "pareto.md"):
        yield "docs/results/pareto.md has another caption"
    for algorithm, rates in repeats.TRIED.items():
        found = {rate: RESULTS.runs(repeats.rate_name(algorithm, rate)) for rate in rates}
        accuracy = {rate: lines[0]["test_accuracy"] for rate, lines in found.items()}
        best = max(accuracy, key=lambda rate: accuracy[rate])
        if best != repeats.CHOSEN[algorithm] or not min(accuracy) < best < max(accuracy):
            yield f"repeats: the best rate of {algorithm} is {best}, or one at an edge"


def census_rows() -> Differences:
    """Ten runs of every setting on the census, each what its row says."""
    for model in (*pums_groups.MODELS, pums_feature.MODEL):
        tight = () if model == pums_feature.MODEL else (pums_groups.TIGHT,)
        for budget in (*pums_groups.BUDGETS, *tight):
            lines = pums_groups.found(RESULTS, model, budget)
            if [line["run"] for line in lines] != list(range(1, 11)):
                yield f"pums.json: {model}, {budget}: not ten runs"
            for line in lines:
                least = census.ROWS[line["name"]].epsilon
                everybody = line["groups"][0]
                right = 1 - everybody["errors"] / 5_154
                if not (
                    line["private"] == (least is not None)
                    and float(line["proven_epsilon"]) <= (least or np.inf)
                    and everybody["size"] == 5_154
                    and np.isclose(line["test_accuracy"], right, rtol=1e-6)
                ):
                    yield f"pums.json: {line['name']}, run {line['run']}"
    if "**no guarantee at all**" not in _text(PAGES / "pums.md"):
        yield "docs/results/pums.md does not say which rows have no guarantee"


def quoted() -> Differences:
    """Every experiment and row that a text names can be run, and the figures told are the kept."""
    entries = [cell for of in printed.PAPERS.values() for cell in of]
    names = {name for cell in entries for name in re.findall(r"\{([\w.-]+)\}", cell.why)}
    for name in sorted(names - {*printed_gaps.GAPS, *ROWS}):
        yield f"printed names {name}, which is no experiment and no row"
    rows = re.findall(r"`((?:mnist|fashion_mnist|cifar10)-[\w.-]+)`", _text(DOCS / "papers.md"))
    for name in sorted(set(rows) - set(ROWS)):
        yield f"docs/papers.md names {name}, which is no row"
    told = " ".join(
        one.told(RESULTS)
        for cell in entries
        if cell.what.startswith("Table II, MNIST")
        for one in cell.ours
    )
    kept = _kept("adadp_cost.json")["rows"]
    times = {line["algorithm"]: f"{line['milliseconds']:.1f}" for line in kept}
    shown = re.findall(r"[\d.]+", told)
    if shown != [times[name] for name in ("adadp-as-published", "adadp", "dp-sgd", "agd")]:
        yield f"printed: milliseconds of AdaDp's Table II are {times}, told {shown}"


def noise_of_adadp() -> Differences:
    """At noise 8 the noise of a coordinate follows noise alone; the page has the stored shares."""
    kept = _kept(adadp_noise.FILE)
    size = 60 * 1_000 + 1_000 + 1_000 * 10 + 10
    alone = adadp_noise.shares(adadp_noise.histogram(adadp_noise.noise_alone(size, 100)))
    for at in kept["histograms"]:
        near = np.allclose(adadp_noise.shares(at), alone, rtol=0, atol=0.5)
        if not (near and sum(at["counts"]) == size and at["under_10"] > 0.9):
            yield f"{adadp_noise.FILE}: shares {adadp_noise.shares(at)}, of noise alone {alone}"
    if kept["row"] != adadp_noise.ROW:
        yield f"{adadp_noise.FILE} is of row {kept['row']}"
    for at in _kept(adadp_gradients.FILE)["at"]:
        low, middle, high = adadp_noise.shares(at["noise"])
        cells = f"| {low:.1f} % | {middle:.1f} % | {high:.1f} %, also above 32 |"
        if cells not in _text(DOCS / "algorithms.md"):
            yield f"docs/algorithms.md lacks {cells}"


def accuracies() -> Differences:
    """The accuracies that the README and the how-to tell are those of the runs."""
    how_to = _text(DOCS / "howto" / "accuracy.md")
    readme = _text(ROOT / "README.md").replace(" \\* |", " |")  # a footnote's mark
    if "\n".join(accuracy_page.table()) not in how_to:
        yield "docs/howto/accuracy.md has another table"
    if "\n".join(accuracy_page.beside()) not in how_to:
        yield "docs/howto/accuracy.md tells other published figures than published.json"
    for dataset, title in accuracy_page.SHOWN.items():
        runs = accuracy_page.rows(dataset)[0][3]
        mean = accuracy_page.shown(runs)
        theirs = accuracy_page.published(dataset)
        (printed,) = (row["accuracy"] for row in theirs if row["epsilon"] == 3)
        if f"| {title} | **{mean} %** | {printed} % |" not in readme:
            yield f"README.md tells another accuracy of {title} than {mean} %, or than {printed} %"
        for row in theirs:
            ours = statistics.mean(accuracy_page.rows(dataset)[0].get(row["epsilon"], [100.0]))
            told = f"{row['accuracy']:.2f}" in readme and f"(here {ours:.2f})" in readme
            if row["runs"] and row["accuracy"] > ours and not told:
                yield f"README.md does not tell that {row['method']} is ahead on {title}"
        lines = [x for x in how_to.splitlines() if re.match(rf"\| {title} \| \w+ \|", x)]
        told = [float(x) for x in lines[0].split("|")[4].split(",")] if len(lines) == 1 else []
        if len(runs) != 5 or told != runs or f"**{mean} %**" not in lines[0]:
            yield f"docs/howto/accuracy.md tells other runs of {title} than {runs}"


def times() -> Differences:
    """The milliseconds that the README tells stand in the comparison."""
    (rows,) = re.findall(
        r"^\| milliseconds .*?\n\n", _text(ROOT / "README.md"), re.DOTALL | re.MULTILINE
    )
    there = set(re.findall(r"\d+\.?\d*", _text(DOCS / "comparison.md").split("## Measured")[1]))
    for row in rows.split("\n")[2:-2]:
        cells = re.findall(r"(?:\| |[0-9]: )(\d+\.?\d*)(?= |;)", row)
        if not cells or not set(cells) <= there:
            yield f"README.md: {row}: not all in docs/comparison.md"


def illnesses() -> Differences:
    """The pages of planted illnesses, of real stories and of noise are what the rows give."""
    for file, made in (("illnesses", planted.page), ("illnesses_stories", stories.page)):
        if _text(PAGES / f"{file}.md") != made(_kept(f"{file}.json")):
            yield f"docs/results/{file}.md has other rows than {file}.json"
    if noise.table(_kept("illnesses_noise.json")) not in _text(DOCS / "howto/does_not_learn.md"):
        yield "docs/howto/does_not_learn.md has another table than illnesses_noise.json"


def divisors() -> Differences:
    """The page of the divisor has the stored rows; jaxdp stays below, each mistake is found."""
    rows = _kept("true_batch_audit.json")
    if true_batch_audit.table(rows) not in _text(DOCS / "howto/divisor.md"):
        yield "docs/howto/divisor.md has another table than true_batch_audit.json"
    for kind in true_batch_audit.DIVISORS.values():
        above = any(line["audited"][kind] > line["claimed"] for line in rows)
        if above == (kind == "declared"):
            yield f"true_batch_audit.json: divided by what is {kind}, above its claim: {above}"


def language_models() -> Differences:
    """The page of a language model has the tables that its rows give."""
    rows, page = _kept("language_model.json"), _text(DOCS / "howto/language_model.md")
    for made in (language_model.table, language_model.of_large_batches, language_model.extracted):
        if made(rows) not in page:
            yield "docs/howto/language_model.md has other tables than language_model.json"


def accelerators() -> Differences:
    """The page of accelerators is what was measured on them."""
    if _text(DOCS / "gpu.md") != gpu_page.page(gpu_page.stored()):
        yield "docs/gpu.md; run: python -m benchmarks.gpu --page"


CHECKS: tuple[Callable[[], Iterable[str]], ...] = (
    pages,
    marks,
    seeds,
    configurations,
    estimates,
    plot_of_repeats,
    census_rows,
    quoted,
    noise_of_adadp,
    accuracies,
    times,
    illnesses,
    divisors,
    language_models,
    accelerators,
    *release_words.CHECKS,
)


def main() -> int:
    """Prints every difference; 1 where there is one."""
    found = [f"{check.__name__}: {line}" for check in CHECKS for line in check()]
    print("\n".join(found) or f"{len(CHECKS)} checks: what is committed agrees")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
