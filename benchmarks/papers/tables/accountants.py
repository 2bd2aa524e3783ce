"""Every accountant on SA-DPSGD's MNIST run, and the papers' formulas against the truth."""

import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.papers import queue
from benchmarks.papers.tables import rows, style
from benchmarks.papers.tables.page import Page, Plot, Section, TextTable
from benchmarks.papers.tables.rows import Results
from jaxdp import __version__
from jaxdp import accounting as acc
from jaxdp.papers import claims

FILE = "accountants.json"
Q, NOISE, DELTA = 512 / 60_000, 1.23, 1e-5
# 4,698 steps are what the paper's formula affords at epsilon 3; 7,245 what is proven.
TOLD = (100, 1_000, 4_698, 7_245)
_COLUMNS = {
    "exact": "exact",
    "rdp": "rdp",
    "clt": "GDP by the central limit theorem",
}
_PAPER = "SA-DPSGD Theorem 1"
_CLAIM_Q, _CLAIM_NOISES = 0.01, (1.0, 2.0)


def work(results: Path, folder: Path, runs: int) -> None:
    """Asks every accountant; rows that ``results`` holds already are left alone."""
    asked: dict[str, tuple[Any, ...]]
    asked = {
        _run_name(accountant, n): (_ask, accountant, n)
        for n in _steps()
        for accountant in (*_COLUMNS, _PAPER)
    }
    asked |= {_claims_name(z, n): (_claim, z, n) for z in _CLAIM_NOISES for n in _claim_steps()}
    queue.work_through(asked, folder, results, lambda row, _: row[0](*row[1:]), runs, indent=None)


def _ask(accountant: str, steps: int) -> dict[str, Any]:
    run = acc.Repeated(acc.PoissonSampled(acc.Gaussian(NOISE), Q), steps)
    began = time.perf_counter()
    if accountant == _PAPER:
        lower, estimate, upper = (
            0.0,
            claims.sa_dpsgd_theorem_1(Q, NOISE, steps, DELTA).value,
            math.inf,
        )
    else:
        bound = acc.epsilon(run, DELTA, accountant=accountant)
        lower, upper = bound.lower, bound.upper
        estimate = upper if bound.estimate is None else bound.estimate
    seconds = time.perf_counter() - began
    return {
        "name": _run_name(accountant, steps),
        "accountant": accountant,
        "steps": steps,
        "delta": DELTA,
        "sampling_prob": Q,
        "noise_multiplier": NOISE,
        "lower": lower,
        "estimate": estimate,
        "upper": upper if math.isfinite(upper) else "inf",
        **_where(seconds),
    }


def _claim(noise: float, steps: int) -> dict[str, Any]:
    run = acc.Repeated(acc.PoissonSampled(acc.Gaussian(noise), _CLAIM_Q), steps)
    began = time.perf_counter()
    bound = acc.epsilon(run, DELTA)
    seconds = time.perf_counter() - began
    found = claims.all_claims(_CLAIM_Q, noise, steps, DELTA)
    return {
        "name": _claims_name(noise, steps),
        "steps": steps,
        "delta": DELTA,
        "sampling_prob": _CLAIM_Q,
        "noise_multiplier": noise,
        "lower": bound.lower,
        "upper": bound.upper,
        "claims": {c.name: c.value for c in found},
        **_where(seconds),
    }


def _where(seconds: float) -> dict[str, Any]:
    return {
        "seconds": round(seconds, 4),
        "machine": f"{os.cpu_count()} cores, cpu",
        "jaxdp": __version__,
    }


def _run_name(accountant: str, steps: int) -> str:
    return f"accountants-{accountant.replace(' ', '-').lower()}-{steps}"


def _claims_name(noise: float, steps: int) -> str:
    return f"claims-noise-{noise:g}-{steps}"


def _steps() -> list[int]:
    return sorted({*np.unique(np.geomspace(100, 8_000, 24).astype(int)).tolist(), *TOLD})


def _claim_steps() -> list[int]:
    return [int(n) for n in np.unique(np.geomspace(2, 40_000, 30).astype(int))]


def _lines(results: Results) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in results.read(FILE) or []}


def page(results: Results) -> Page:
    """Tables of both plots."""
    return Page(
        "Accountants",
        (
            f"SA-DPSGD's run on MNIST: sampling probability 512/60,000, noise multiplier {NOISE}, "
            "delta 1e-5, one record added or removed. Accuracy plays no part here, and nothing is "
            "audited: the columns are what a formula claims, what is proven, and how long the "
            "answer took (the first of a process includes its warming up).",
        ),
        (
            Plot(
                "accountants.png",
                "Epsilon at delta 1e-5 after so many steps of SA-DPSGD's MNIST "
                "run, by every accountant. The dashed line runs below the truth: it promises too "
                "much.",
            ),
            Plot(
                "claims_over_truth.png",
                "What the papers' formulas claim of a DP-SGD run, divided by the true epsilon "
                "(shaded: below the truth, a false promise), against the number of steps; log "
                "scales; sampling probability 0.01, delta 1e-5.",
            ),
        ),
        (_run_section(results), *(_claims_section(results, z) for z in _CLAIM_NOISES)),
        "jaxdp reproduce accountants",
    )


def _run_section(results: Results) -> Section:
    lines, body = _lines(results), []
    for steps in TOLD:
        for accountant in (*_COLUMNS, _PAPER):
            line = lines.get(_run_name(accountant, steps))
            if line is None:
                body.append([f"{steps:,}", accountant, rows.MISSING, "", "", "", "", ""])
                continue
            proven = line["upper"] != "inf"
            body.append(
                [
                    f"{steps:,}",
                    _COLUMNS.get(accountant, accountant),
                    "–" if proven else f"{line['estimate']:.3f}",
                    rows.shown_epsilon(line["upper"]) if proven else "–",
                    f"{line['lower']:.3f}" if proven and line["lower"] else "–",
                    f"{line['seconds']:.3f}",
                    str(line["run"]),
                    line["machine"],
                ]
            )
    headers = (
        "steps",
        "accountant",
        "claimed ε",
        "proven ε",
        "true ε at least",
        "seconds",
        "run",
        "machine",
    )
    note = (
        "The paper's formula (integer-order RDP of accepted steps, Mironov's conversion) is above "
        "the exact value for plain DP-SGD; for SA-DPSGD, whose accepted candidates are selected, "
        "it proves nothing."
    )
    return Section("The run", (), TextTable(headers, body), (note,))


def _claims_section(results: Results, noise: float) -> Section:
    lines, body = _lines(results), []
    steps = _claim_steps()
    for n in (steps[0], steps[len(steps) // 3], steps[2 * len(steps) // 3], steps[-1]):
        line = lines.get(_claims_name(noise, n))
        if line is None:
            body.append([f"{n:,}", rows.MISSING, *[""] * 6])
            continue
        for name, value in line["claims"].items():
            if "printed" not in name:
                body.append(
                    [
                        f"{n:,}",
                        name,
                        f"{value:.3f}",
                        rows.shown_epsilon(line["upper"]),
                        f"{value / line['lower']:.2f}" if line["lower"] else "–",
                        f"{line['seconds']:.3f}",
                        str(line["run"]),
                        line["machine"],
                    ]
                )
    headers = (
        "steps",
        "formula",
        "claimed ε",
        "proven ε",
        "claimed / true",
        "seconds",
        "run",
        "machine",
    )
    return Section(
        f"Formulas against the truth, noise multiplier {noise:g}", (), TextTable(headers, body)
    )


def run_figure(results: Results) -> Figure:
    """Epsilon over steps."""
    drawn, (axes,) = style.panels(1, 1, (9, 5.6))
    by_accountant: dict[str, list[tuple[int, float]]] = {}
    for line in _lines(results).values():
        if "accountant" in line:
            value = line["estimate"] if line["upper"] == "inf" else line["upper"]
            by_accountant.setdefault(line["accountant"], []).append((line["steps"], value))
    looks: dict[str, tuple[str, dict[str, Any]]] = {
        _PAPER: ("SA-DPSGD Theorem 1 (RDP, integer orders)", style.FORMULAS["SA-DPSGD Theorem 1"]),
        "rdp": ("rdp", style.FORMULAS["rdp"]),
        "exact": ("exact", style.FORMULAS["exact"]),
        "pld": ("pld (certified)", style.mark("dp-adam", printed=True) | {"marker": "o"}),
        "clt": ("GDP by the central limit (no bound)", style.FORMULAS["central limit"]),
    }
    for accountant, (label, look) in looks.items():
        points = sorted(by_accountant.get(accountant, []))[:: 3 if "marker" in look else 1]
        if points:
            axes.plot(*zip(*points, strict=True), linewidth=2.2, label=label, **look)
    axes.axhline(3, color="0.5", linewidth=0.9)
    axes.annotate("SA-DPSGD's budget of 3", (80, 3.05), color="0.4", fontsize=12)
    axes.set_xlim(0, 8_100)
    axes.set_ylim(0, 4)
    axes.set_xlabel("steps")
    axes.set_ylabel("epsilon at delta 1e-5")
    style.title(axes, f"q = 512/60,000, noise multiplier {NOISE}")
    axes.legend(loc="lower right", fontsize=12) if by_accountant else style.nothing_yet(axes)
    return drawn


def claims_figure(results: Results) -> Figure:
    """Claimed over true epsilon."""
    drawn, axes = style.panels(1, 2, (12, 5.6), sharey=True)
    for panel, noise in zip(axes, _CLAIM_NOISES, strict=True):
        curves: dict[str, list[tuple[int, float]]] = {}
        for line in _lines(results).values():
            if line["noise_multiplier"] == noise and line.get("claims") and line["lower"]:
                for name, value in line["claims"].items():
                    if "printed" not in name:
                        curves.setdefault(name, []).append((line["steps"], value / line["lower"]))
        for name, points in curves.items():
            look = style.FORMULAS[name]
            panel.plot(*zip(*sorted(points), strict=True), label=name, linewidth=2.2, **look)
        panel.axhline(1, color="black", linewidth=1)
        panel.axhspan(0.04, 1, color="0.5", alpha=0.12)
        panel.annotate("claims less than the truth", (0.97, 0.04), ha="right", color="0.35",
                       xycoords="axes fraction", fontsize=12)  # fmt: skip
        panel.set(xscale="log", yscale="log", ylim=(0.04, 20), xlabel="steps (log scale)")
        panel.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
        style.title(panel, f"q = {_CLAIM_Q}, noise multiplier {noise:g}")
    axes[0].set_ylabel("claimed / true epsilon")
    style.legend(drawn, axes, 3)
    return drawn
