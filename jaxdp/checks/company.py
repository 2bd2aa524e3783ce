"""Tests of gradients by numbers: the same example alone, with others, elsewhere, and again."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.checks import where
from jaxdp.checks.findings import Finding
from jaxdp.clipping import ClippedGrad
from jaxdp.types import PyTree

_ROUNDING = 1e-3  # of the clip bound; a record that sees others is off by far more
_COUPLED = r"\.(mean|std|var|sum|max|min|median)\(|[Bb]atch_?[Nn]orm|axis=0"
_PLACE = r"random\.|key"
_LENGTH = r"len\(|\.shape\[0\]|\.size|mean\("


def clipped(grad_fn: ClippedGrad, params: PyTree, rows: PyTree) -> list[Finding]:
    """Findings where a record adds other numbers in other company, or more than l2.

    Args:
        grad_fn: the clipped gradient.
        params: the parameters.
        rows: pytree of NumPy arrays [m, ...], m >= 2.
    """
    size = len(jax.tree.leaves(rows)[0])
    key = jax.random.key(0, impl="threefry2x32") if grad_fn.takes_rng else None

    @jax.jit
    def summed(rows: PyTree, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        found, _ = grad_fn(params, rows, mask, key)
        leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(found.value)]
        return jnp.concatenate([leaf.astype(jnp.float32) for leaf in leaves]), jnp.asarray(found.l2)

    everyone = np.ones(size, bool)
    whole, l2 = (np.asarray(v, np.float64) for v in summed(rows, everyone))
    for at in sorted({0, size // 2, size - 1}):
        alone = np.arange(size) == at
        one = np.asarray(summed(rows, alone)[0], np.float64)
        others = _with_others(rows, at)
        again = np.asarray(summed(others, alone)[0], np.float64)
        if _far(one, again, l2):
            return [_coupled("what a record adds changes when the other rows change", grad_fn)]
        without = np.asarray(summed(rows, ~alone)[0], np.float64)
        if _far(whole - without, one, l2):
            return [_coupled("what a record adds changes when others take part", grad_fn)]
        moved = float(np.linalg.norm(whole - without))
        if moved > float(l2) * (1 + _ROUNDING):
            return [_sensitive(moved, float(l2), grad_fn)]
    return []


def per_example(
    function: Callable[..., Any], params: PyTree, rows: PyTree, key: Any = None
) -> list[Finding]:
    """Findings where a row of a user's own per-example gradients sees other rows.

    Args:
        function: ``(params, rows) -> gradients`` [m, ...], or with a key as third argument.
        params: the parameters.
        rows: pytree of NumPy arrays [m, ...], m >= 2.
        key: handed on where it is given.
    """
    size = len(jax.tree.leaves(rows)[0])
    extra = () if key is None else (key,)
    at = where.of_function(function, _COUPLED)

    def grads(rows: PyTree) -> np.ndarray:
        leaves = jax.tree.leaves(function(params, jax.tree.map(jnp.asarray, rows), *extra))
        lengths = {np.shape(leaf)[:1] for leaf in leaves}
        count = len(jax.tree.leaves(rows)[0])
        if lengths != {(count,)}:
            raise _NotByExample(lengths)
        return np.concatenate(
            [np.reshape(np.asarray(v, np.float64), (count, -1)) for v in leaves], 1
        )

    try:
        first, again = grads(rows), grads(rows)
    except _NotByExample as error:
        return [_averaged(error, at)]
    scale = max(float(np.max(np.linalg.norm(first, axis=1))), 1e-30)
    if _far(first, again, scale):
        return [_row("gradients change when they are computed a second time", at, "state")]
    for place in sorted({0, size - 1}):
        other = grads(_with_others(rows, place))
        if _far(first[place], other[place], scale):
            words = "the gradient of a row changes when the other rows change"
            return [_row(words, at, "company")]
    if key is None and (found := _with_fewer(grads, rows, first, function)):
        return found
    if key is None:
        order = np.roll(np.arange(size), 1)
        moved = grads(jax.tree.map(lambda leaf: np.asarray(leaf)[order], rows))
        if _far(first[order], moved, scale):
            words = "the gradient of a row changes with its place"
            return [_row(words, where.of_function(function, _PLACE), "company")]
    return []


def _with_fewer(
    grads: Callable[..., np.ndarray], rows: PyTree, first: np.ndarray, function: Any
) -> list[Finding]:
    """A finding where rows change when there are fewer of them: all in proportion, or not."""
    half = max(1, len(first) // 2)
    fewer = grads(jax.tree.map(lambda leaf: np.asarray(leaf)[:half], rows))
    scale = float(np.max(np.linalg.norm(first, axis=1)))
    if not _far(first[:half], fewer, scale):
        return []
    before = float(np.linalg.norm(first[:half]))
    ratio = float(np.linalg.norm(fewer)) / max(before, 1e-30)
    if before < _ROUNDING * scale or _far(ratio * first[:half], fewer, ratio * scale):
        at = where.of_function(function, _COUPLED)
        return [_row("the gradient of a row changes when other rows are left out", at, "company")]
    return [
        Finding(
            "divisor",
            f"gradients of {half} rows are {ratio:.3g} times those of the same among {len(first)}",
            "the number of records drawn is private under Poisson sampling, and one record changes "
            "it, and with it what all others add",
            where.of_function(function, _LENGTH),
            "divide by the public expected batch size, after the noise (jaxdp.privatize does)",
        )
    ]


class _NotByExample(Exception):
    """Gradients that have no axis of examples."""


def _with_others(rows: PyTree, at: int) -> PyTree:
    """The rows, all but one of them replaced by the next one's, numbers made 3 times larger."""

    def other(leaf: Any) -> Any:
        leaf = np.asarray(leaf)
        changed = np.roll(leaf, 1, axis=0)
        if changed.dtype.kind == "f":
            changed = changed * changed.dtype.type(3)
        changed[at] = leaf[at]
        return changed

    return jax.tree.map(other, rows)


def _far(one: np.ndarray, two: np.ndarray, scale: Any) -> bool:
    """True if two vectors differ by more than rounding; what is not finite is not compared."""
    if not (np.all(np.isfinite(one)) and np.all(np.isfinite(two))):
        return False
    return bool(np.max(np.abs(one - two), initial=0.0) > _ROUNDING * float(scale))


def _coupled(words: str, grad_fn: ClippedGrad) -> Finding:
    return _row(words, where.of_function(grad_fn.loss_fn, _COUPLED), "company")


def _row(words: str, at: str, kind: str) -> Finding:
    return Finding(
        kind,
        words,
        "one record moves what all others add, so that clipping each of them bounds nothing",
        at,
        "compute a gradient from its own example: jaxdp.clipped_grad(loss_fn, rule) with the loss "
        "of one example; GroupNorm or LayerNorm in place of batch statistics",
    )


def _sensitive(moved: float, l2: float, grad_fn: ClippedGrad) -> Finding:
    return Finding(
        "sensitivity",
        f"one record moves the clipped sum by {moved:.4g}, more than its bound {l2:.4g}",
        "the noise is scaled to the bound",
        where.of_function(grad_fn.loss_fn),
        "report it: jaxdp's own clipping should not allow it",
    )


def _averaged(error: _NotByExample, at: str) -> Finding:
    return Finding(
        "company",
        f"gradients have first axes {sorted(error.args[0])}, not one row for each example",
        "a mean over the batch cannot be clipped example by example: one record can move all of it",
        at,
        "take jax.vmap(jax.grad(loss), (None, 0)), or jaxdp.clipped_grad",
    )
