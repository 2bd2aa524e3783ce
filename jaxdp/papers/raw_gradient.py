"""Clipping by un-noised moments, as AdaDp and PIGDO were published; no guarantee allows it.

Nothing here is private. An algorithm that uses it is charged as ``NonPrivate``; it exists to
reproduce the papers' tables and to show what they leak.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxdp.clipping import options
from jaxdp.clipping.losses import form_of
from jaxdp.sampling.source import ArraySource, Source
from jaxdp.types import ClipInfo, Draw, PyTree, Summed, check_records

# From one example's gradient: its contribution, and what is averaged raw.
Contribution = Callable[[PyTree], tuple[PyTree, PyTree]]
# With more parameters the gradients of a batch fit no cache: one example after the other, dense
# networks of 71,010 and 795,010 parameters are several times as fast; a CNN of 26,010 is slower.
_TOGETHER = 50_000


@dataclasses.dataclass(frozen=True, eq=False)
class RawGradient:
    """Per-example contributions that depend on un-noised moments; called as ``ClippedGrad``.

    Attributes:
        loss_fn: ``(params, example) -> scalar``.
        contribution: from the moments to the function of one example, whose norm is at most ``l2``
            for **given** moments.
        l2: from the parameters' shapes to the bound on one contribution.
        unscale: from the moments to the diagonal by which contributions were divided; or None.
        batch_size: divisor of the leaked means.
    """

    loss_fn: Callable[..., jax.Array]
    contribution: Callable[[PyTree], Contribution]
    l2: Callable[[PyTree], float]
    unscale: Callable[[PyTree], PyTree] | None
    batch_size: int

    def __call__(
        self,
        params: PyTree,
        data: PyTree,
        draw: Draw | ArrayLike | str | None = None,
        rng: jax.Array | None = None,
        *,
        raw: PyTree,
    ) -> Summed:
        """The sum over a draw, or over one physical batch, given as for ``ClippedGrad``."""
        return self.with_info(params, data, draw, rng, raw=raw)[0]

    def with_info(
        self,
        params: PyTree,
        data: PyTree,
        draw: Draw | ArrayLike | str | None = None,
        rng: jax.Array | None = None,
        *,
        raw: PyTree,
    ) -> tuple[Summed, ClipInfo | list[ClipInfo]]:
        """As a call, and returns the **sensitive** ``ClipInfo``; of a draw a list."""
        if isinstance(draw, Draw):
            return self.sum_draw(params, data, draw, rng, raw=raw)
        batch, mask = options.rows_and_mask(data, draw)
        rows = functools.partial(self._rows, params, self.contribution(raw))
        if sum(leaf.size for leaf in _leaves(params)) <= _TOGETHER:
            (total, leaked), info = rows(batch, mask)
        else:
            (total, leaked), info = _one_by_one(rows, params, batch, mask)
        leaked = jax.tree.map(lambda g: g / self.batch_size, leaked)
        unscale = None if self.unscale is None else self.unscale(raw)
        return Summed(total, self.l2(params), unscale, leaked=leaked), info

    def sum_draw(
        self,
        params: PyTree,
        data: PyTree,
        draw: Draw,
        rng: jax.Array | None = None,
        *,
        gathered: bool = False,
        return_info: bool = True,
        raw: PyTree,
    ) -> tuple[Summed, list[ClipInfo]]:
        """The sum over a draw, one physical batch after another; as that of ``ClippedGrad``."""
        del rng
        if isinstance(data, ArraySource) and data.on_device:
            data = data.arrays
        source = data if isinstance(data, Source) else None
        if not gathered and source is None:
            options.require_no_batch(data)
            check_records(data, draw.num_records)
        parts, infos = [], []
        each = data if gathered else itertools.repeat(data, len(draw.indices))
        for rows, indices, mask in zip(each, draw.indices, draw.mask, strict=True):
            if source is not None:
                rows = source.gather(indices, mask)
            at = None if gathered or source is not None else indices
            value, leaked, info = _physical_batch(self, params, rows, at, mask, raw)
            parts.append((value, leaked))
            infos += [info] if return_info else []
        value, leaked = jax.tree.map(lambda *leaves: sum(leaves), *parts)
        unscale = None if self.unscale is None else self.unscale(raw)
        summed = Summed(value, self.l2(params), unscale, leaked=leaked)
        if gathered:
            return summed, infos
        return summed.carrying(draw.ticket, passes=frozenset(range(len(parts)))), infos

    def _rows(
        self, params: PyTree, contribution: Contribution, batch: PyTree, mask: jax.Array
    ) -> tuple[tuple[PyTree, PyTree], ClipInfo]:
        """The sums of contributions and of what leaks, from gradients that are there together."""
        loss = functools.partial(form_of(self.loss_fn), self.loss_fn)
        losses, grads = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, batch)
        squares = [jnp.sum(jnp.square(g), axis=tuple(range(1, g.ndim))) for g in _leaves(grads)]
        norms = jnp.sqrt(sum(squares))
        keep = mask & jnp.isfinite(norms)
        both = jax.vmap(contribution)(grads)
        return jax.tree.map(lambda g: _sum(g, keep), both), ClipInfo(norms, losses, keep, mask)

    def trained(self, params: PyTree) -> PyTree:
        """All parameters: none can be frozen."""
        return params


@functools.partial(jax.jit, static_argnums=0)
def _physical_batch(
    grad_fn: RawGradient,
    params: PyTree,
    data: PyTree,
    indices: jax.Array | None,
    mask: jax.Array,
    raw: PyTree,
) -> tuple[PyTree, PyTree, ClipInfo]:
    rows = data if indices is None else jax.tree.map(lambda leaf: leaf[indices], data)
    summed, info = grad_fn.with_info(params, rows, mask, raw=raw)
    assert isinstance(info, ClipInfo)
    return summed.value, summed.leaked, info


def _one_by_one(
    rows: Callable[..., tuple[PyTree, ClipInfo]], params: PyTree, batch: PyTree, mask: jax.Array
) -> tuple[tuple[PyTree, PyTree], ClipInfo]:
    """The sums of ``rows``, with the gradient of one example there at a time."""

    def add(sums: PyTree, one: PyTree) -> tuple[PyTree, ClipInfo]:
        more, info = rows(*jax.tree.map(lambda leaf: leaf[None], one))
        return jax.tree.map(jnp.add, sums, more), info

    nothing = 0.0 * jnp.sum(mask, dtype=jnp.float32)  # each device's own, where rows are shared
    zeros = jax.tree.map(lambda leaf: jnp.full(leaf.shape, nothing), params)
    sums, infos = jax.lax.scan(add, (zeros, zeros), (batch, mask))
    return sums, jax.tree.map(lambda leaf: leaf[:, 0], infos)


def flat_clip(tree: PyTree, norm: float) -> PyTree:
    """The tree shortened to ``norm``."""
    length = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in _leaves(tree)))
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(1.0, length / norm), tree)


def _leaves(tree: PyTree) -> list[jax.Array]:
    return jax.tree.leaves(tree)


def _sum(rows: jax.Array, keep: jax.Array) -> jax.Array:
    column = keep.reshape(keep.shape + (1,) * (rows.ndim - 1))
    return jnp.sum(jnp.where(column, rows.astype(jnp.float32), 0.0), axis=0)
