"""Trains and diagnoses the planted illnesses and the healthy programs, and writes their table.

python -m benchmarks.illnesses [known|blind] [NAME ...] [--page]

For each program: its score trained as it is and with its cure, then the first two findings of
``jaxdp.diagnose(public=...)``. The first answer of the diagnosis to a program is kept for good in
``benchmarks/results/illnesses.json``; later ones stand beside it. ``--page`` only renders
``docs/results/illnesses.md``. MNIST is read by ``jaxdp.data.load`` (set ``TFDS_DATA_DIR``), other
originals from ``JAXDP_ORIGINALS``.
"""

import argparse
import importlib
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxdp
from benchmarks.illnesses import Case, Parts

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "illnesses.json"
PAGE = ROOT / "docs" / "results" / "illnesses.md"
SETS = {
    "known": "written by those who wrote the diagnosis",
    "blind": "written by somebody who had not seen it",
}


def trained(parts: Parts) -> float:
    """The score of the last iterate."""
    options = {"mechanism": parts.mechanism, "optimizer": parts.optimizer, **parts.options}
    trainer = jaxdp.Trainer(parts.loss_fn, source=parts.data, **options)
    state = trainer.init(parts.params)
    for batch in trainer.batches(parts.steps):
        state, _ = trainer.step(state, batch)
    return round(parts.score(state.params), 3)


def answer(make: Callable[[], Any]) -> Any:
    """What is made, or the words of a refusal."""
    try:
        return make()
    except ValueError as error:
        return f"refused: {error}"


def diagnosed(parts: Parts) -> list[dict[str, Any]]:
    """The findings of a diagnosis on public records, worst first."""
    found = jaxdp.diagnose(
        parts.loss_fn, parts.params, parts.data, parts.mechanism, parts.optimizer,
        public=parts.public, **parts.options, **parts.diagnose,
    )  # fmt: skip
    fields = ("kind", "certain", "where", "what", "remedy")
    return [{name: getattr(finding, name) for name in fields} for finding in found.findings]


def row(case: Case, former: dict[str, Any]) -> dict[str, Any]:
    """The line of a program; what the diagnosis first said of it stays."""
    parts = case.make()
    found = {"name": case.name, "illness": case.illness, "cure": case.cure}
    found["untrained"] = round(parts.score(parts.params), 3)
    found["score"] = answer(lambda: trained(parts))
    found["cured"] = answer(lambda: trained(case.cured())) if case.cured else None
    began = time.perf_counter()
    now = answer(lambda: diagnosed(parts))
    found["seconds"] = round(time.perf_counter() - began, 1)
    return found | {"first": former.get("first", now), "now": now}


def said(findings: Any) -> list[str]:
    """The first two findings, in words."""
    if isinstance(findings, str):
        return [findings]
    return [
        f"{each['kind']}{each['where'] and ' (' + each['where'] + ')'}: {each['what']}"
        for each in findings[:2]
    ]


def is_named(findings: Any, kinds: list[str]) -> bool:
    """True if one of the first two findings is of these kinds, or a refusal says "refused"."""
    if isinstance(findings, str):
        return "refused" in kinds
    return any(each["kind"] in kinds for each in findings[:2])


def page(rows: dict[str, list[dict[str, Any]]]) -> str:
    """The page of all rows."""
    lines = [
        "# Planted illnesses",
        "",
        "Does `jaxdp.diagnose(public=...)` name what is wrong, and is it silent where nothing is?",
        "`python -m benchmarks.illnesses` trains each program and its cure, then asks for a",
        "diagnosis. An illness is **named** where one of the first two findings is it. The first",
        'answer counts; what was mended after it stands under "now".',
        "",
        "| programs | ill: named at first | now | healthy: with a finding at first | now |",
        "|---|---|---|---|---|",
    ]
    sets = {group: words for group, words in SETS.items() if rows.get(group)}
    for group, words in sets.items():
        ill = [line for line in rows[group] if line["illness"]]
        healthy = [line for line in rows[group] if not line["illness"]]
        named, alarms = (
            [f"{sum(map(count, lines))} of {len(lines)}" for count in counts]
            for lines, counts in (
                (ill, [lambda x, at=at: is_named(x[at], x["kinds"]) for at in ("first", "now")]),
                (healthy, [lambda x, at=at: bool(x[at]) for at in ("first", "now")]),
            )
        )
        lines.append(f"| {words} | {named[0]} | {named[1]} | {alarms[0]} | {alarms[1]} |")
    for group, words in sets.items():
        lines += ["", f"## The programs {words}", ""]
        lines += ["| program | untrained, as it is, cured | first findings at first | now |"]
        lines += ["|---|---|---|---|"]
        for line in rows[group]:
            scores = [line["untrained"], line["score"], line["cured"]]
            shown = ", ".join(
                "refused" if isinstance(x, str) else f"{x:.2f}" for x in scores if x is not None
            )
            cells = []
            for at in ("first", "now"):
                mark = (
                    ("**named**: " if is_named(line[at], line["kinds"]) else "missed: ")
                    if line["illness"]
                    else ""
                )
                text = "; ".join(said(line[at])) or "nothing"
                cells.append(
                    mark + text.replace("|", "\\|").replace("][", "]\\[").replace("\n", " ")
                )
            same = (
                "the same"
                if [f["kind"] for f in line["first"][:2]] == [f["kind"] for f in line["now"][:2]]
                else cells[1]
            )
            what = f": {line['illness']}" if line["illness"] else " (healthy)"
            lines.append(f"| {line['name']}{what} | {shown} | {cells[0]} | {same} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs what is asked for, prints a line each, and writes results and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="known, blind, or names of programs")
    parser.add_argument("--page", action="store_true", help="only render the page")
    given = parser.parse_args()
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for group in SETS:
        if importlib.util.find_spec(f"benchmarks.illnesses.{group}") is None:
            continue
        cases = importlib.import_module(f"benchmarks.illnesses.{group}").CASES
        former = {line["name"]: line for line in rows.get(group, [])}
        chosen = set(given.names) - set(SETS)
        for case in cases:
            asked = case.name in chosen or (not chosen and group in (set(given.names) or SETS))
            if asked and not given.page:
                line = former[case.name] = row(case, former.get(case.name, {}))
                print(f"{group} {case.name}: {case.illness or 'healthy'}")
                print(
                    f"  score {line['untrained']} untrained, {line['score']}, cured {line['cured']}"
                )
                print(*(f"  {text}" for text in said(line["now"])), sep="\n", flush=True)
            if case.name in former:
                former[case.name]["kinds"] = list(case.kinds)
        rows[group] = [former[case.name] for case in cases if case.name in former]
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
