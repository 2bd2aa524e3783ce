"""Scores for audits: features of what a run released, to tell the two worlds apart."""

import numpy as np

from jaxdp import arguments
from jaxdp.auditing.scores import split


def expand(released: np.ndarray, steps: int = 1) -> np.ndarray:
    """Scores [n, k'] for threshold tests, from released numbers [n, k].

    Each number and its size, differences between neighbours and between steps (noise used twice
    subtracts away), whether anything is not a number, and the norm of everything.

    Args:
        released: one row for each run.
        steps: the number of steps whose numbers are in a row, equally many of each.
    """
    steps = arguments.integer("steps", steps, least=1)
    broken = ~np.isfinite(released)
    plain = np.where(broken, 0.0, released)
    blocks, width = [plain], plain.shape[1] // steps
    for lag in sorted({1, 2, 3, width, 2 * width, 3 * width} - {0}):
        if lag < plain.shape[1]:
            blocks.append(plain[:, lag:] - plain[:, :-lag])
    plain = np.concatenate(blocks, axis=1)
    logs = np.log10(np.abs(plain) + 1e-12)
    norm = np.linalg.norm(released * ~broken, axis=1, keepdims=True)
    return np.concatenate([plain, logs, norm, broken.any(axis=1, keepdims=True)], axis=1)


def discriminant(
    with_record: np.ndarray,
    without: np.ndarray,
    *,
    held_out: float = 0.3,
    seed: int = 0,
    keep: int = 12,
) -> tuple[np.ndarray, np.ndarray]:
    """The ``keep`` columns that separate best, and their linear discriminant, of both worlds.

    Fitted on the very part that ``jaxdp.auditing.audit_scores`` sets aside for the same
    ``held_out`` and ``seed``, so the runs that are tested stay untouched.

    Args:
        with_record: scores [n, k].
        without: scores [n', k].
        held_out: fraction on which it is fitted.
        seed: of that part.
        keep: columns that are kept as they are.
    """
    keep = arguments.integer("keep", keep, least=1)
    (x, y), _ = split(with_record, without, held_out, seed)
    middle, spread = np.mean(np.r_[x, y], 0), np.std(np.r_[x, y], 0) + 1e-12
    x, y = (x - middle) / spread, (y - middle) / spread
    rows = np.c_[np.r_[x, y], np.ones(len(x) + len(y))]
    labels = np.r_[np.ones(len(x)), -np.ones(len(y))]
    ridge = 1e-3 * len(rows) * np.eye(rows.shape[1])
    line = np.linalg.solve(rows.T @ rows + ridge, rows.T @ labels)[:-1]
    cuts = np.quantile(np.r_[x, y], (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98), axis=0)
    apart = np.max([np.abs(np.mean(x > t, 0) - np.mean(y > t, 0)) for t in cuts], axis=0)
    best = np.argsort(-apart)[:keep]
    scaled = ((scores - middle) / spread for scores in (with_record, without))
    first, second = (np.c_[s[:, best], s @ line] for s in scaled)
    return first, second
