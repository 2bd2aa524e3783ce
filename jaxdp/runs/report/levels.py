"""Accuracies to compare a run's with: of guessing, and of training without privacy."""

import numpy as np

from jaxdp.runs.report.schema import Levels, NotPrivate, Report

# Only what is committed on the page; a test compares them.
NOT_PRIVATE = {
    ("pums", "logistic"): NotPrivate(0.67173, 10, "docs/results/pums.md"),
    ("pums", "mlp"): NotPrivate(0.67293, 10, "docs/results/pums.md"),
}


def levels(
    dataset: str, model: str, num_classes: int, test_labels: np.ndarray | None = None
) -> Levels:
    """Accuracy of guessing, and of the same model without privacy where it was measured.

    Args:
        dataset: name of the data set.
        model: name of the model.
        num_classes: number of labels, public.
        test_labels: int [n] of the test examples, public; None leaves out the commonest class.
            Labels of training records are private, and are not to be given here.
    """
    majority = None
    if test_labels is not None and len(test_labels):
        majority = float(np.bincount(np.asarray(test_labels)).max() / len(test_labels))
    return Levels(1 / num_classes, majority, NOT_PRIVATE.get((dataset, model)))


def best_guess(report: Report) -> float | None:
    """The higher accuracy of guessing and of the commonest class; None if not known."""
    found = (report.levels.chance, report.levels.majority)
    return max((share for share in found if share is not None), default=None)


def describe_levels(report: Report) -> list[str]:
    """Sentences on the accuracies to compare the measured one with."""
    found, texts = report.levels, []
    if found.chance is not None:
        texts.append(
            f"Guessing a class at random is right for {found.chance:.2%} of the test records"
            + (
                f"; always answering their commonest class, for {found.majority:.2%}."
                if found.majority is not None
                else "."
            )
        )
    if other := found.not_private:
        texts.append(
            f"This model without privacy: {other.accuracy:.2%}, mean of {other.runs} runs "
            f"({other.source})."
        )
    return texts
