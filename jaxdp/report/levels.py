"""Levels to compare an accuracy with: guessing, and training without privacy."""

from typing import Any

import numpy as np

# Mean test accuracy, number of runs, where they are written down. Nothing that is not committed
# there; a test compares them.
NOT_PRIVATE = {
    ("pums", "logistic"): (0.67173, 10, "docs/results/pums.md"),
    ("pums", "mlp"): (0.67293, 10, "docs/results/pums.md"),
}


def levels(dataset: str, model: str, num_classes: int, test_labels: Any = None) -> dict[str, Any]:
    """Accuracy of guessing, and of the same model without privacy where it was measured.

    Args:
        dataset: name of the data set.
        model: name of the model.
        num_classes: number of labels, public.
        test_labels: int [n] of the test examples, public; None leaves out the commonest class.
            Labels of training records are private, and are not to be given here.
    """
    found: dict[str, Any] = {"chance": 1 / num_classes}
    if test_labels is not None and len(test_labels):
        found["majority"] = float(np.bincount(np.asarray(test_labels)).max() / len(test_labels))
    if (dataset, model) in NOT_PRIVATE:
        accuracy, runs, source = NOT_PRIVATE[dataset, model]
        found["not_private"] = {"accuracy": accuracy, "runs": runs, "source": source}
    return found


def guessing(report: dict[str, Any]) -> float | None:
    """Accuracy of whoever always answers the commonest class, or guesses; None if not known."""
    found = report.get("levels") or {}
    return max((found[name] for name in ("chance", "majority") if name in found), default=None)


def sentences(report: dict[str, Any]) -> list[str]:
    """Words for the levels to compare the accuracy with."""
    found = report.get("levels") or {}
    texts = []
    if "chance" in found:
        texts.append(
            f"Guessing a class at random is right for {found['chance']:.2%} of the test records"
            + (
                f"; always answering their commonest class, for {found['majority']:.2%}."
                if "majority" in found
                else "."
            )
        )
    if other := found.get("not_private"):
        texts.append(
            f"This model without privacy: {other['accuracy']:.2%}, mean of {other['runs']} runs "
            f"({other['source']})."
        )
    return texts
