"""Unemployment from census columns: accuracy, calibration, and what the noise does to groups."""

import statistics
from collections.abc import Sequence

from benchmarks.papers.tables import pums_feature, rows
from benchmarks.papers.tables.page import Page, Plot, Section, TextTable
from benchmarks.papers.tables.pums_groups import (
    BUDGETS,
    MODELS,
    SHOWN,
    TIGHT,
    Lines,
    by_group,
    errors,
    found,
    interval,
    shift,
    shift_cell,
    spread,
)
from benchmarks.papers.tables.rows import Results


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
            rows.EPSILONS_LEGEND,
        ),
        (
            Plot(
                "pums.png",
                "Above: accuracy and AUC (every dot a run) and calibration of the MLP (mean of "
                "the runs; ECE: expected calibration error). Below: share of wrong predictions of "
                "the MLP by group of test records; thick bars: spread (one standard deviation) "
                "between runs; thin bars: 95 % interval for so few people (Wilson).",
            ),
        ),
        (
            *(_models(results, model) for model in (*MODELS, pums_feature.MODEL)),
            pums_feature.section(results),
            *(_groups(results, model) for model in MODELS),
        ),
        "jaxdp reproduce pums",
    )


def _models(results: Results, model: str) -> Section:
    body = []
    with_tight = (TIGHT,) if model in MODELS else ()
    for budget in (*BUDGETS, *with_tight):
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
    notes = [_majority(results, model)]
    if model == "logistic" and found(results, model, TIGHT):
        notes.append(_about_clipping(results))
    title = MODELS.get(model, "logistic regression with `blackfemale`")
    return Section(
        title[0].upper() + title[1:],
        ("Mean ± standard deviation over the runs; seconds: the median.",),
        TextTable(headers, body),
        notes,
    )


def _majority(results: Results, model: str) -> str:
    lines = next((x for x in (found(results, model, b) for b in BUDGETS) if x), ())
    if not lines:
        return "Nothing has been run."
    everyone = lines[0]["groups"][0]
    share = 1 - everyone["unemployed"] / everyone["size"]
    return f"To call everybody employed is right for {rows.percent(share)} of the test records."


def _about_clipping(results: Results) -> str:
    parts = []
    for model, shown in MODELS.items():
        loose, tight = (found(results, model, budget) for budget in ("epsilon-1", TIGHT))
        if loose and tight:
            error = [statistics.mean(x["calibration_error"] for x in y) for y in (loose, tight)]
            auc = [statistics.mean(x["auc"] for x in y) for y in (loose, tight)]
            parts.append(
                f"{shown}: from {error[0]:.3f} to {error[1]:.3f}, while the AUC goes from "
                f"{auc[0]:.3f} to {auc[1]:.3f}"
            )
    return (
        "**Tight clipping spoils the calibration.** The last row clips to 0.5, with the larger "
        "rate that goes with it (1 and 3), as the recipe of `jaxdp train` does. At equal epsilon "
        f"the calibration error rises ({'; '.join(parts)}): what is clipped is the pull of the "
        "people that the model is wrong about, so that it becomes too sure of itself. Accuracy "
        "alone does not show it."
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
        cells.append(
            shift_cell(
                *(
                    [line["groups"][place] for line in everyone[budget]]
                    for budget in (BUDGETS[0], BUDGETS[-1])
                )
            )
        )
        body.append(cells)
    headers = (
        "group",
        "test records",
        "not employed",
        *(f"error, {SHOWN[b]}" for b in BUDGETS),
        "points, ε 0.5 over not private",
    )
    notes = (small_groups(results, model),) if all(len(x) > 1 for x in everyone.values()) else ()
    return Section(
        f"Errors by group: {MODELS[model]}",
        (
            "Share of wrong predictions: mean ± standard deviation between runs, and in brackets "
            "the 95 % interval (Wilson) of the mean, for so few test records. A few people are "
            "both Black and Asian and count in both groups.",
        ),
        TextTable(headers, body or [[rows.MISSING, *[""] * 7]]),
        notes,
    )


def _error_cell(groups: Lines) -> str:
    if not groups:
        return rows.MISSING
    low, high = interval(groups)
    return f"{spread(errors(groups), digits=1)} ({100 * low:.1f} to {100 * high:.1f})"


def small_groups(results: Results, model: str) -> str:
    """Sentences on the noise and small groups, in the figures of the runs."""
    strict, free = (by_group(found(results, model, budget)) for budget in (BUDGETS[0], BUDGETS[-1]))
    pairs = sorted((name for name in strict if "," in name), key=lambda n: strict[n][0]["size"])
    smallest, largest = pairs[0], pairs[-1]
    return (
        "**What the noise does to small groups.** "
        f"{_about(smallest, strict, free)} {_about(largest, strict, free)} "
        "The noise of a step is the same for everybody; a small group has fewer gradients to set "
        "against it. The brackets of the last column hold for these very test records (the chance "
        "of noise, draws and starting weights), each group by itself; how the error would be among "
        f"other people of the group is known as well as so few records allow: for "
        f"{_plain(smallest)} within {_width(strict[smallest])} points, for {_plain(largest)} "
        f"within {_width(strict[largest])}."
    )


def _about(name: str, strict: dict[str, Lines], free: dict[str, Lines]) -> str:
    mean, low, high = shift(strict[name], free[name])
    told = (
        "more than chance between runs"
        if low > 0
        else "less than without privacy"
        if high < 0
        else "which chance between runs explains"
    )
    private, plain = (100 * statistics.stdev(errors(groups[name])) for groups in (strict, free))
    who = _plain(name)[0].upper() + _plain(name)[1:]
    return (
        f"{who} ({strict[name][0]['size']:,} test records): at epsilon 0.5 the error moves by "
        f"± {private:.1f} points from run to run (± {plain:.1f} without privacy), and its mean by "
        f"{mean:+.1f} ({low:+.1f} to {high:+.1f}), {told}."
    )


def _plain(name: str) -> str:
    """As in "Asian women"."""
    race, who = name.split(", ")
    return f"{race} {who}" if race != "neither" else f"{who} who are neither Black nor Asian"


def _width(groups: Lines) -> str:
    low, high = interval(groups)
    return f"{100 * (high - low):.0f}"


def _numbers(runs: Sequence[int]) -> str:
    whole = list(range(1, len(runs) + 1)) == list(runs)
    return f"1 to {len(runs)}" if whole and len(runs) > 1 else ", ".join(map(str, runs))


def _machines(lines: Lines) -> str:
    return ", ".join(dict.fromkeys(line["machine"] for line in lines))
