"""Warnings where the guarantee of a run is weak, whatever else the report says."""

import math
from typing import Any

from jaxdp.report.words import show_factor

LITTLE, NONE = 10.0, 50.0  # above these an epsilon is said to give little, and no, protection


def cautions(epsilon: float, delta: float, dataset_size: int) -> list[dict[str, str]]:
    """[{"about": "epsilon" or "delta", "text": ...}], empty where there is nothing to warn of."""
    found = []
    if text := _of_epsilon(epsilon):
        found.append({"about": "epsilon", "text": text})
    if delta * dataset_size >= 1:
        found.append(
            {
                "about": "delta",
                "text": f"Delta ({delta:.3g}) is not below 1 / {dataset_size:,} = "
                f"{1 / dataset_size:.3g}, one over the number of records: such a guarantee would "
                "also be met by publishing a record picked at random. Choose a delta well below "
                "that.",
            }
        )
    return found


def _of_epsilon(epsilon: float) -> str:
    if math.isinf(epsilon):
        return (
            "Nothing is proven (epsilon is infinite): this run must not be called differentially "
            "private."
        )
    if epsilon > NONE:
        return (
            f"Epsilon is above {NONE:g}: no meaningful protection. One record may change the "
            f"probability of what is seen by a factor of up to {show_factor(epsilon)}."
        )
    if epsilon > LITTLE:
        return (
            f"Epsilon is above {LITTLE:g}: this gives little protection. One record may change "
            f"the probability of what is seen by a factor of up to {show_factor(epsilon)}."
        )
    return ""


def shown(report: dict[str, Any]) -> list[str]:
    """All warnings of a finished report in words, a chosen seed's and an audit's among them."""
    texts = [row["text"] for row in report.get("warnings", ())]
    if report["label"]:
        texts.append(report["label"])
    audited = report.get("audited") or {}
    if audited.get("noise_refuted"):
        tests = audited["noise"].removeprefix("noise: REFUTED: ")
        texts.insert(0, f"The audit refutes the noise that was charged ({tests}).")
    if audited.get("broken"):
        texts.insert(0, f"The audit contradicts the guarantee. {audited['verdict']}")
    return texts
