"""Tests of the noise: releases minus the sums of a trusted computation."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxdp import arguments
from jaxdp.auditing import normality
from jaxdp.auditing.normality import Residuals
from jaxdp.types import PyTree

MOST = 2**22  # numbers: with more, the float32 generator's own grid would be seen
_ROUNDING = 2.0**-22  # of the greatest numbers involved: a few roundings of float32
_SHIFT = 0.05  # standard deviations by which rounding may move a test statistic
_SHARE = 0.95  # of the error goes to the tests, the rest to rounding
_SLACK = 1 + 1e-6  # a sensitivity is carried in float32


@dataclasses.dataclass(frozen=True)
class ResidualVerdict:
    """The result of testing the noise of many releases against the charged noise.

    Attributes:
        p_values: of every test, by its name in words; the list depends on what was handed over, not
            on its values. Empty where float32 is too coarse to test.
        confidence: of the verdict.
        runs: the number of runs tested, of both worlds together.
        steps: the steps of every run.
        resolution: the greatest rounding error of a residual, in standard deviations, about.
    """

    p_values: Mapping[str, float]
    confidence: float
    runs: int
    steps: int
    resolution: float

    @property
    def p_value(self) -> float:
        """The p-value of "the noise is as charged" over all tests (Bonferroni), with rounding."""
        least = min(self.p_values.values(), default=1.0)
        return min(1.0, max(1, len(self.p_values)) * least / _SHARE)

    @property
    def refuted(self) -> bool:
        """True if ``p_value`` is at most 1 - ``confidence``."""
        return self.p_value <= 1 - self.confidence

    @property
    def findings(self) -> tuple[str, ...]:
        """The tests that refute by themselves (Bonferroni), smallest p-value first."""
        level = _SHARE * (1 - self.confidence) / max(1, len(self.p_values))
        found = [(p, i, name) for i, (name, p) in enumerate(self.p_values.items()) if p <= level]
        return tuple(name for _, _, name in sorted(found))

    def in_words(self) -> str:
        """The verdict on one line."""
        if not self.p_values:
            return f"noise: not tested, for float32 rounds it to {self.resolution:.1g} of itself"
        count = len(self.p_values)
        name = min(self.p_values, key=lambda n: self.p_values[n])
        if self.refuted:
            p = self.p_values[name]
            shown = f"p {p:.1g}" if p > 1e-300 else "p below 1e-300"
            return f"noise: REFUTED: {name} ({shown}; {len(self.findings)} of {count} tests refute)"
        return (
            f"noise: as charged ({count} tests, smallest p {self.p_values[name]:.2g}; "
            f"{_SHARE * (1 - self.confidence) / count:.2g} would refute)"
        )


def audit_residuals(
    released: PyTree,
    unnoised: PyTree,
    std: Any,
    *,
    confidence: float = 0.95,
    known: Mapping[str, PyTree] | None = None,
    drawn: Any = None,
    norms: Any = None,
    l2: Any = None,
) -> ResidualVerdict:
    """Tests whether (released - unnoised) / std are independent standard normals.

    Formal guarantee: where they are, and no record's norm exceeds ``l2``, the verdict is refuted
    with probability at most 1 - ``confidence``. The tests are a fixed list, see
    ``jaxdp.auditing.normality``; each has an exact or conservative p-value, and the error is
    divided among them (Bonferroni). Rounding of float32 is no part of that: a twentieth of the
    error is set aside for it, and nothing is tested where its sum over all numbers could move a
    statistic by more than 0.05 standard deviations. A step's ``unnoised`` and ``known`` must not
    depend on the noise of that step or of later ones, ``drawn`` on none.

    Args:
        released: pytree of [runs, steps, ...], the noisy **sums**, before any other processing. At
            most 2**22 numbers are tested, those of the first runs. At least float32: what was cast
            below it lies on a grid, harmless or not.
        unnoised: the same without noise, from a trusted computation, float64 where possible.
        std: standard deviation that is charged, a scalar or [runs, steps]: the noise multiplier
            times the sensitivity that was carried.
        confidence: in (0, 1).
        known: name in words -> pytree shaped like ``released``, such as the parameters that entered
            the step: what the noise must not depend on.
        drawn: bool [runs, steps, n]; which records took part.
        norms: [runs, steps, n]; norms of the records' contributions. Needs ``l2``.
        l2: scalar or [runs, steps]; the sensitivity that was carried.

    Raises:
        ValueError: shapes or precision do not fit, ``std`` or ``l2`` is not positive, there are
            fewer than two runs.
    """
    check_confidence(confidence)
    _check_precision(released)
    noisy, sizes = _joined("released", released)
    shape = noisy.shape[:2]
    clean = _like("unnoised", unnoised, noisy, sizes)
    scale = _positive("std", std, shape)
    before = {"the un-noised sum": clean}
    before |= {name: _like("known", tree, noisy, sizes) for name, tree in (known or {}).items()}
    masks = None if drawn is None else _per_record("drawn", drawn, shape, bool)
    ratio = _ratio(norms, l2, shape)
    runs = min(shape[0], MOST // noisy[0].size)
    if runs < 2:
        raise ValueError(
            f"released must be at least 2 runs of at most {MOST // 2} numbers, got {noisy.shape}"
        )
    noisy, clean, scale = noisy[:runs], clean[:runs], scale[:runs]
    with np.errstate(invalid="ignore", over="ignore"):
        r = (noisy - clean) / scale[..., None]
    finite = np.isfinite(r)
    p_values = {"numbers that are not finite": 1.0 if finite.all() else 0.0}
    if ratio is not None:
        p_values["a record's norm above the sensitivity"] = 1.0 if ratio <= _SLACK else 0.0
    resolution = _resolution(noisy, clean, scale, finite)
    if np.sqrt(r.size) * resolution <= _SHIFT:
        p_values |= _tested(Residuals(np.where(finite, r, 0.0), sizes), before, masks)
    elif min(p_values.values()) == 1.0:
        p_values = {}
    return ResidualVerdict(p_values, confidence, runs, shape[1], resolution)


def _tested(
    r: Residuals, known: Mapping[str, np.ndarray], drawn: np.ndarray | None
) -> dict[str, float]:
    """The p-values of every statistical test, by its name."""
    runs = len(r.values)
    found = normality.law(r) | normality.independence(r)
    for name, vectors in known.items():
        found[f"dependence on {name}"] = normality.dependence(r.values, vectors[:runs])
    if drawn is not None:
        found["dependence on who took part"] = normality.by_record(r, drawn[:runs])
    return found


def check_confidence(confidence: float) -> None:
    """Raises ValueError unless the confidence is in (0, 1)."""
    if not 0 < arguments.positive("confidence", confidence) < 1:
        raise ValueError(f"confidence must be above 0 and below 1, got {confidence!r}")


def _check_precision(released: PyTree) -> None:
    for leaf in jax.tree.leaves(released):
        dtype = np.asarray(leaf).dtype
        if dtype not in (np.float32, np.float64):
            raise ValueError(f"released must be float32 or float64, got {dtype}")


def _resolution(noisy: Any, clean: Any, scale: Any, finite: np.ndarray) -> float:
    largest = np.where(finite, np.maximum(np.abs(noisy), np.abs(clean)) / scale[..., None], 0.0)
    return float(_ROUNDING * np.max(largest))


def _joined(name: str, tree: PyTree) -> tuple[np.ndarray, tuple[int, ...]]:
    """Leaves as one float64 [runs, steps, coordinates], and the coordinates of each."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    leads = {leaf.shape[:2] for leaf in leaves}
    if len(leads) != 1 or any(leaf.ndim < 2 or not leaf.size for leaf in leaves):
        raise ValueError(
            f"{name} must be a pytree of arrays [runs, steps, ...] with the same runs and steps, "
            f"got {[leaf.shape for leaf in leaves]}"
        )
    flat = [leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves]
    return np.concatenate(flat, axis=2), tuple(leaf.shape[2] for leaf in flat)


def _like(name: str, tree: PyTree, noisy: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    found, widths = _joined(name, tree)
    if found.shape != noisy.shape or widths != sizes:
        raise ValueError(
            f"{name} must be shaped like released, {noisy.shape[:2]} and leaves of {sizes} numbers,"
            f" got {found.shape[:2]} and {widths}"
        )
    return found


def _positive(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    found = np.asarray(value, np.float64)
    if found.shape not in ((), shape):
        raise ValueError(f"{name} must be a number or {shape}, got shape {found.shape}")
    if not (np.all(np.isfinite(found)) and np.all(found > 0)):
        raise ValueError(f"{name} must be finite and above 0, got {np.min(found)!r} as its least")
    return np.broadcast_to(found, shape)


def _per_record(name: str, value: Any, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    found = np.asarray(value)
    if found.ndim != 3 or found.shape[:2] != shape or (dtype is bool and found.dtype != bool):
        raise ValueError(
            f"{name} must be {dtype.__name__} {[*shape, 'records']}, got {found.dtype} "
            f"{found.shape}"
        )
    return found.astype(dtype)


def _ratio(norms: Any, l2: Any, shape: tuple[int, ...]) -> float | None:
    """The largest ratio of a norm to the sensitivity."""
    if (norms is None) != (l2 is None):
        raise ValueError(f"norms and l2 must be given together, got {norms!r} and {l2!r}")
    if norms is None:
        return None
    lengths = _per_record("norms", norms, shape, float)
    return float(np.max(lengths / _positive("l2", l2, shape)[..., None], initial=0.0))
