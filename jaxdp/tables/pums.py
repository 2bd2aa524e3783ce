"""Unemployment from census columns: accuracy, calibration, and what the noise does to groups."""

import statistics
from collections.abc import Sequence
from typing import Any

from scipy.stats import binomtest

from jaxdp.tables import rows
from jaxdp.tables.page import Page, Plot, Section, Table
from jaxdp.tables.rows import Results

FILE = "pums.json"
MODELS = {"logistic": "logistic regression", "mlp": "MLP, 64 hidden units"}
BUDGETS = ("epsilon-0.5", "epsilon-1", "epsilon-3", "not-private")
TIGHT = "epsilon-1-tight"
SHOWN = {
    "epsilon-0.5": "ε 0.5",
    "epsilon-1": "ε 1",
    "epsilon-3": "ε 3",
    "not-private": "not private",
    TIGHT: "ε 1, clipped to 0.5",
}
Lines = Sequence[dict[str, Any]]


def found(results: Results, model: str, budget: str) -> Lines:
    """The runs of one setting, in order."""
    name = f"pums-{model}-{budget}"
    lines = [line for line in results.read(FILE) or [] if line["name"] == name]
    return sorted(lines, key=lambda line: line["run"])


def page(results: Results) -> Page:
    """Two tables of the models, two of groups, and what they say."""
    return Page(
        "Unemployment from census columns (PUMS)",
        (
            "The slides' task: who is not employed, from nine binary columns (sex, married, black, "
            "asian, college degree, military service, citizen, disability, English) of 25,766 "
            "adults of Fulton County, Georgia; 20,612 to train on, 5,154 to test. DP-SGD, batch "
            "1,024, 200 steps, momentum 0.9, rate 0.1. Gradients are clipped to 4.5 (logistic "
            "regression, where none is longer) and 6 (MLP). *Not private* is the same training "
            "without noise and without clipping: **no guarantee at all**. Rates and clipping "
            "were chosen by looking at a few test results at epsilon 1.",
            "Everything is measured on the test records, which are assumed public. The errors by "
            "group are computed from test records too: publishing them says something about the "
            "people in a small group of the test set, and no guarantee here covers those.",
            rows.LEGEND,
        ),
        (
            Plot(
                "pums.png",
                "Above: accuracy and AUC (every dot a run) and calibration of the MLP (mean "
                "of the runs; ECE: expected calibration error). Below: share of wrong predictions "
                "of "
                "the MLP by group of test records; thick bars: spread (one standard deviation) "
                "between runs; thin bars: 95 % interval for so few people (Wilson).",
            ),
        ),
        (
            *(_models(results, model) for model in MODELS),
            *(_groups(results, model) for model in MODELS),
        ),
        "jaxdp reproduce pums",
    )


def _models(results: Results, model: str) -> Section:
    body = []
    for budget in (*BUDGETS, TIGHT):
        lines, name = found(results, model, budget), f"`pums-{model}-{budget}`"
        if not lines:
            body.append([SHOWN[budget], name, rows.MISSING, *[""] * 8])
            continue
        body.append(
            [
                SHOWN[budget],
                name,
                spread([line["test_accuracy"] for line in lines]),
                spread([line["auc"] for line in lines], percent=False),
                spread([line["calibration_error"] for line in lines], percent=False),
                "–",
                rows.shown_epsilon(max((line["proven_epsilon"] for line in lines), key=float)),
                "–",
                f"{statistics.median(line['seconds'] for line in lines):.1f}",
                _numbers([line["run"] for line in lines]),
                _machines(lines),
            ]
        )
    headers = (
        "budget",
        "row",
        "test accuracy",
        "AUC",
        "calibration error",
        "claimed ε",
        "proven ε",
        "audited ε",
        "seconds",
        "run",
        "machine",
    )
    notes = []
    if model == "logistic" and found(results, model, TIGHT):
        notes.append(_about_clipping(results))
    return Section(
        MODELS[model][0].upper() + MODELS[model][1:],
        ("Mean ± standard deviation over the runs; seconds: the median.",),
        Table(headers, body),
        notes,
    )


def _about_clipping(results: Results) -> str:
    loose, tight = (
        {
            model: statistics.mean(
                line["calibration_error"] for line in found(results, model, budget)
            )
            for model in MODELS
            if found(results, model, budget)
        }
        for budget in ("epsilon-1", TIGHT)
    )
    parts = [
        f"{loose[m]:.3f} to {tight[m]:.3f} ({MODELS[m]})"
        for m in MODELS
        if m in loose and m in tight
    ]
    return (
        "**It is clipping, not noise, that spoils the calibration.** At epsilon 1, gradients "
        "clipped to 0.5, "
        "as in the recipe of `jaxdp train`, move the expected calibration error from "
        + " and from ".join(parts)
        + ", at much the same AUC: what is clipped is the pull of "
        "the people that the model is wrong about, so that it becomes too sure of itself."
    )


def _groups(results: Results, model: str) -> Section:
    everyone = {budget: found(results, model, budget) for budget in BUDGETS}
    any_lines = next((lines for lines in everyone.values() if lines), ())
    body = []
    for place, group in enumerate(any_lines[0]["groups"] if any_lines else ()):
        cells = [
            group["group"],
            f"{group['size']:,}",
            f"{100 * group['unemployed'] / group['size']:.1f} %",
        ]
        for lines in everyone.values():
            cells.append(_error_cell([line["groups"][place] for line in lines]))
        body.append(cells)
    headers = ("group", "test records", "not employed", *(f"error, {SHOWN[b]}" for b in BUDGETS))
    notes = (small_groups(results, model),) if all(everyone.values()) else ()
    return Section(
        f"Errors by group: {MODELS[model]}",
        (
            "Share of wrong predictions: mean ± standard deviation between runs, and in brackets "
            "the "
            "95 % interval (Wilson) of the mean, for so few test records. A few people are both "
            "Black "
            "and Asian and count in both groups.",
        ),
        Table(headers, body or [[rows.MISSING, *[""] * 6]]),
        notes,
    )


def _error_cell(groups: Lines) -> str:
    if not groups:
        return rows.MISSING
    low, high = interval(groups)
    return f"{spread(errors(groups), digits=1)} ({100 * low:.1f} to {100 * high:.1f})"


def errors(groups: Lines) -> list[float]:
    """The error of one group, run by run."""
    return [group["errors"] / group["size"] for group in groups]


def interval(groups: Lines) -> tuple[float, float]:
    """Wilson's 95 % interval of the mean error, for the number of test records alone."""
    size = groups[0]["size"]
    mean = round(statistics.mean(group["errors"] for group in groups))
    bounds = binomtest(mean, size).proportion_ci(0.95, method="wilson")
    return bounds.low, bounds.high


def small_groups(results: Results, model: str) -> str:
    """What the noise does to small groups, in the figures of the runs."""
    strict, free = (
        by_group(found(results, model, budget)) for budget in ("epsilon-0.5", "not-private")
    )
    pairs = [name for name in strict if "," in name]
    small = sorted(pairs, key=lambda name: strict[name][0]["size"])[:2]
    large = sorted(pairs, key=lambda name: strict[name][0]["size"])[-2:]
    return (
        f"What the noise does to small groups ({MODELS[model]}). Two numbers must be kept apart: "
        "by how much "
        "a group's error moves from run to run, and how well so few test records can tell it. From "
        f"run to run, {_moves(small, strict, free)}, against {_moves(large, strict, free)} for the "
        f"two largest of the six groups. The mean error moves too: "
        f"{_shifts(small + large, strict, free)}. "
        f"The interval of {_width(small[0], strict)}, of {_width(large[-1], strict)}: "
        f"{_verdict(small, strict, free)}"
    )


def by_group(lines: Lines) -> dict[str, Lines]:
    """Every group's counts, run by run."""
    names = [group["group"] for group in lines[0]["groups"]]
    return {name: [line["groups"][i] for line in lines] for i, name in enumerate(names)}


def _moves(names: Sequence[str], strict: dict[str, Lines], free: dict[str, Lines]) -> str:
    return " and ".join(
        f"{name} ({strict[name][0]['size']:,}): ± "
        f"{100 * statistics.stdev(errors(strict[name])):.1f} "
        f"points at epsilon 0.5, ± {100 * statistics.stdev(errors(free[name])):.1f} without privacy"
        for name in names
    )


def _shifts(names: Sequence[str], strict: dict[str, Lines], free: dict[str, Lines]) -> str:
    shifts = {
        name: 100 * (statistics.mean(errors(strict[name])) - statistics.mean(errors(free[name])))
        for name in names
    }
    return ", ".join(f"{name} {shift:+.1f} points" for name, shift in shifts.items())


def _width(name: str, strict: dict[str, Lines]) -> str:
    low, high = interval(strict[name])
    return f"{name} is {100 * (high - low):.0f} points wide"


def _verdict(names: Sequence[str], strict: dict[str, Lines], free: dict[str, Lines]) -> str:
    """Whether the intervals of the small groups can tell private from not private."""
    apart = [
        name
        for name in names
        if interval(strict[name])[0] > interval(free[name])[1]
        or interval(strict[name])[1] < interval(free[name])[0]
    ]
    if not apart:
        return (
            "for neither of the small groups can these test records tell the error at epsilon 0.5 "
            "from the one without privacy. What does grow is chance: whose "
            "predictions are wrong depends more on the noise drawn, the smaller the group."
            if _noisier(names, strict, free)
            else "for neither of the small groups can these test records tell the error at "
            "epsilon 0.5 "
            "from the one without privacy."
        )
    return f"for {' and '.join(apart)} the test records do tell epsilon 0.5 from no privacy."


def _noisier(names: Sequence[str], strict: dict[str, Lines], free: dict[str, Lines]) -> bool:
    return all(
        statistics.stdev(errors(strict[n])) > 1.5 * statistics.stdev(errors(free[n])) for n in names
    )


def spread(values: Sequence[float], percent: bool = True, digits: int = 2) -> str:
    """Mean ± standard deviation; of one value, the value."""
    scale, unit = (100, " %") if percent else (1, "")
    digits = digits if percent else 3
    mean = f"{scale * statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean + unit
    return f"{mean} ± {scale * statistics.stdev(values):.{digits}f}{unit}"


def _numbers(runs: Sequence[int]) -> str:
    whole = list(range(1, len(runs) + 1)) == list(runs)
    return f"1 to {len(runs)}" if whole and len(runs) > 1 else ", ".join(map(str, runs))


def _machines(lines: Lines) -> str:
    return ", ".join(dict.fromkeys(line["machine"] for line in lines))
