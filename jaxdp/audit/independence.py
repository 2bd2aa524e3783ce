"""Tests of gradients by numbers: the same example alone, with others, elsewhere, and again."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit import neighbours as near
from jaxdp.audit.findings import Finding, line_in
from jaxdp.clipping import ClippedGrad
from jaxdp.types import PyTree

_ROUNDING = 1e-3  # of the clip bound; a record that sees others is off by far more
_COUPLED = r"\.(mean|std|var|sum|max|min|median)\(|[Bb]atch_?[Nn]orm|axis=0"


def of_clipped(grad_fn: ClippedGrad, params: PyTree, rows: PyTree) -> Finding | None:
    """Finds a record that adds other numbers in other company, or more than l2.

    Args:
        grad_fn: the clipped gradient.
        params: the parameters.
        rows: pytree of NumPy arrays [m, ...], m >= 2.
    """
    size = near.count(rows)
    key = jax.random.key(0, impl="threefry2x32") if grad_fn.takes_rng else None

    @jax.jit
    def summed(rows: PyTree, mask: np.ndarray) -> tuple[jax.Array, jax.Array]:
        found, _ = grad_fn(params, rows, mask, key)
        leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(found.value)]
        return jnp.concatenate([leaf.astype(jnp.float32) for leaf in leaves]), jnp.asarray(found.l2)

    whole, l2 = (np.asarray(v, np.float64) for v in summed(rows, np.ones(size, bool)))
    for at in sorted({0, size // 2, size - 1}):
        alone = np.arange(size) == at
        one, again, without = (
            np.asarray(summed(data, mask)[0], np.float64)
            for data, mask in ((rows, alone), (_with_others(rows, at), alone), (rows, ~alone))
        )
        at_line = line_in(grad_fn.loss_fn, _COUPLED)
        if _far(one, again, l2):
            return _coupled("what a record adds changes when the other rows change", at_line)
        if _far(whole - without, one, l2):
            return _coupled("what a record adds changes when others take part", at_line)
        if (moved := float(np.linalg.norm(whole - without))) > float(l2) * (1 + _ROUNDING):
            return Finding(
                "sensitivity",
                f"one record moves the clipped sum by {moved:.4g}, more than its bound "
                f"{float(l2):.4g}",
                "the noise is scaled to the bound",
                line_in(grad_fn.loss_fn),
                "report it: jaxdp's own clipping should not allow it",
            )
    return None


def of_gradients(
    function: Callable[[PyTree, PyTree], PyTree], params: PyTree, rows: PyTree
) -> Finding | None:
    """Finds a row of a user's own per-example gradients that sees other rows.

    Args:
        function: ``(params, rows) -> gradients`` [m, ...].
        params: the parameters.
        rows: pytree of NumPy arrays [m, ...], m >= 2.
    """
    size, at = near.count(rows), line_in(function, _COUPLED)

    def grads(rows: PyTree) -> np.ndarray:
        """[m, d]; [0, 0] where the gradients have no axis of examples."""
        leaves = jax.tree.leaves(function(params, jax.tree.map(jnp.asarray, rows)))
        count = near.count(rows)
        if {np.shape(leaf)[:1] for leaf in leaves} != {(count,)}:
            return np.zeros((0, 0))
        flat = [np.reshape(np.asarray(v, np.float64), (count, -1)) for v in leaves]
        return np.concatenate(flat, axis=1)

    first, again = grads(rows), grads(rows)
    if not len(first) or not len(again):
        return Finding(
            "company",
            f"gradients have first axes that differ from {size}: not one row for each example",
            "a mean over the batch cannot be clipped example by example: one record can move "
            "all of it",
            at,
            "take jax.vmap(jax.grad(loss), (None, 0)), or jaxdp.clipped_grad",
        )
    scale = max(float(np.max(np.linalg.norm(first, axis=1))), 1e-30)
    if _far(first, again, scale):
        words = "gradients change when they are computed a second time"
        return _coupled(words, at, "state")
    for place in sorted({0, size - 1}):
        if _far(first[place], grads(_with_others(rows, place))[place], scale):
            return _coupled("the gradient of a row changes when the other rows change", at)

    # Fewer rows: all may change in proportion, or some in another way.
    half = max(1, size // 2)
    fewer = grads(jax.tree.map(lambda leaf: np.asarray(leaf)[:half], rows))
    if _far(first[:half], fewer, scale):
        before = float(np.linalg.norm(first[:half]))
        ratio = float(np.linalg.norm(fewer)) / max(before, 1e-30)
        if before < _ROUNDING * scale or _far(ratio * first[:half], fewer, ratio * scale):
            return _coupled("the gradient of a row changes when other rows are left out", at)
        return Finding(
            "divisor",
            f"gradients of {half} rows are {ratio:.3g} times those of the same among {size}",
            "the number of records drawn is private under Poisson sampling, and one record "
            "changes it, and with it what all others add",
            line_in(function, r"len\(|\.shape\[0\]|\.size|mean\("),
            "divide by the public expected batch size, after the noise (jaxdp.privatize does)",
        )
    order = np.roll(np.arange(size), 1)
    if _far(first[order], grads(jax.tree.map(lambda leaf: np.asarray(leaf)[order], rows)), scale):
        words = "the gradient of a row changes with its place"
        return _coupled(words, line_in(function, r"random\.|key"))
    return None


def _with_others(rows: PyTree, at: int) -> PyTree:
    """The rows, all but one of them replaced by the next one's, numbers made 3 times larger."""
    others = near.take(rows, np.roll(np.arange(near.count(rows)), 1))
    return near.put(near.scaled(others, 3), at, near.record(rows, at))


def _far(one: np.ndarray, two: np.ndarray, scale: float | np.ndarray) -> bool:
    """True if two vectors differ by more than rounding; what is not finite is not compared."""
    if not (np.all(np.isfinite(one)) and np.all(np.isfinite(two))):
        return False
    return bool(np.max(np.abs(one - two), initial=0.0) > _ROUNDING * float(scale))


def _coupled(words: str, at: str, kind: str = "company") -> Finding:
    return Finding(
        kind,
        words,
        "one record moves what all others add, so that clipping each of them bounds nothing",
        at,
        "compute a gradient from its own example: jaxdp.clipped_grad(loss_fn, rule) with the loss "
        "of one example; GroupNorm or LayerNorm in place of batch statistics",
    )
