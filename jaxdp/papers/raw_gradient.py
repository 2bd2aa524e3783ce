"""Clipping and noise to the papers' letter, also by un-noised moments; no guarantee allows them.

Nothing here is private. An algorithm that uses it is charged as ``NonPrivate``; it exists to
reproduce the papers' tables and to show what they leak.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxdp import accounting as acc
from jaxdp.clipping import options, rounding
from jaxdp.clipping.losses import form_of
from jaxdp.mechanism import Mechanism
from jaxdp.sampling.source import ArraySource, Source
from jaxdp.types import ClipInfo, Draw, PyTree, Summed, check_records

# From one example's gradient: its contribution, and what is averaged raw.
Contribution = Callable[[PyTree], tuple[PyTree, PyTree]]
# With more parameters the gradients of a batch fit no CPU's cache: one example after the other,
# dense networks of 71,010 and 795,010 parameters are several times as fast; a CNN of 26,010 is
# slower. On an accelerator each turn of a loop is started by itself, and numbers of all examples'
# gradients up to the second are there together, which with what is made of them fit its memory.
_TOGETHER, _NUMBERS_ON_ACCELERATOR = 50_000, 1.5e9


@dataclasses.dataclass(frozen=True)
class ToTheLetter(Mechanism):
    """A mechanism whose noise is a paper's σC to the number. It has no guarantee.

    Noise is measured in ``l2``. Every other mechanism's holds the share by which one record moves
    the rounding of the others' sum; here it is the rule's bound alone, which no proof covers. So it
    cannot be made without a leak, every step is a ``NonPrivate`` event, and without its leak
    (``with_leak("")``) it is another mechanism, with that share.

    Raises:
        ValueError: an empty leak.
    """

    def __post_init__(self) -> None:
        if not self.leak:
            raise ValueError(
                "leak must say why nothing is proven of noise without a share for rounding, got an "
                "empty one"
            )
        super().__post_init__()

    @classmethod
    def of(cls, mechanism: Mechanism, leak: str) -> "ToTheLetter":
        """The mechanism with the paper's noise, and what it reveals beyond its noisy sum."""
        return cls(**{**_fields(mechanism), "leak": leak})

    def with_leak(self, reason: str) -> Mechanism:
        """A copy that reveals this; for "" one that reveals nothing more, with all margins."""
        return (type(self) if reason else Mechanism)(**{**_fields(self), "leak": reason})

    def l2(self, params: PyTree) -> float:
        """The paper's C, or what its noise multiplier is relative to."""
        return self.rule.l2(params)


def _fields(mechanism: Mechanism) -> dict[str, Any]:
    return {each.name: getattr(mechanism, each.name) for each in dataclasses.fields(Mechanism)}


@dataclasses.dataclass(frozen=True, eq=False)
class RawGradient:
    """Per-example contributions clipped to the letter; called as ``ClippedGrad``.

    They may depend on un-noised moments. What is clipped has the bound but for rounding in float32.

    Attributes:
        loss_fn: ``(params, example) -> scalar``.
        mechanism: whose ``l2`` bounds one contribution, and whose ``batch_size`` divides the leaked
            means.
        contribution: from the moments to the function of one example, whose norm is at most ``l2``
            for **given** moments.
        unscale: from the moments to the diagonal by which contributions were divided; or None.

    Raises:
        ValueError: the mechanism could be charged as private; at a sum, the draw was.
    """

    loss_fn: Callable[..., jax.Array]
    mechanism: ToTheLetter
    contribution: Callable[[PyTree], Contribution]
    unscale: Callable[[PyTree], PyTree] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, ToTheLetter):
            raise ValueError(
                "mechanism must be ToTheLetter, which nothing is proven of, for sums without a "
                f"margin for rounding, got {self.mechanism}"
            )

    def __call__(
        self,
        params: PyTree,
        data: PyTree,
        draw: Draw | ArrayLike | str | None = None,
        rng: jax.Array | None = None,
        *,
        raw: PyTree = None,
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
        raw: PyTree = None,
    ) -> tuple[Summed, ClipInfo | list[ClipInfo]]:
        """As a call, and returns the **sensitive** ``ClipInfo``; of a draw a list."""
        if isinstance(draw, Draw):
            return self.sum_draw(params, data, draw, rng, raw=raw)
        batch, mask = options.rows_and_mask(data, draw)
        rows = functools.partial(self._rows, params, self.contribution(raw))
        size = _rows_at_once(mask.shape[0], sum(leaf.size for leaf in _leaves(params)))
        if size == mask.shape[0]:
            (total, leaked), info = rows(batch, mask)
        else:
            (total, leaked), info = _in_blocks(rows, batch, mask, size)
        leaked = jax.tree.map(lambda g: g / self.mechanism.batch_size, leaked)
        unscale = None if self.unscale is None else self.unscale(raw)
        return Summed(total, self.mechanism.l2(params), unscale, leaked=leaked), info

    def sum_draw(
        self,
        params: PyTree,
        data: PyTree,
        draw: Draw,
        rng: jax.Array | None = None,
        *,
        gathered: bool = False,
        return_info: bool = True,
        raw: PyTree = None,
    ) -> tuple[Summed, list[ClipInfo]]:
        """The sum over a draw, one physical batch after another; as that of ``ClippedGrad``."""
        del rng
        if (ticket := draw.ticket) is not None:
            event, _, _ = ticket.issuer.mechanism.stretch(ticket.step)
            if not isinstance(event, acc.NonPrivate):
                raise ValueError(
                    "mechanism must name its leak for a sum without a margin for rounding, got a "
                    f"draw that is charged as {event}"
                )
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
        summed = Summed(value, self.mechanism.l2(params), unscale, leaked=leaked)
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


def _rows_at_once(rows: int, parameters: int) -> int:
    """The number of rows whose gradients, of so many numbers each, are there together."""
    if jax.default_backend() == "cpu":
        return rows if parameters <= _TOGETHER else 1
    return rounding.even_size(rows, max(1, int(_NUMBERS_ON_ACCELERATOR / parameters)))


def _in_blocks(
    rows: Callable[..., tuple[PyTree, ClipInfo]], batch: PyTree, mask: jax.Array, size: int
) -> tuple[tuple[PyTree, PyTree], ClipInfo]:
    """The sums of ``rows``, with the gradients of ``size`` examples there at a time."""
    blocks = rounding.into_blocks((batch, mask), size)

    def add(sums: PyTree, block: PyTree) -> tuple[PyTree, ClipInfo]:
        more, info = rows(*block)
        return jax.tree.map(jnp.add, sums, more), info

    shapes, _ = jax.eval_shape(rows, *jax.tree.map(lambda leaf: leaf[0], blocks))
    nothing = 0.0 * jnp.sum(mask, dtype=jnp.float32)  # each device's own, where rows are shared
    zeros = jax.tree.map(lambda leaf: jnp.full(leaf.shape, nothing), shapes)
    sums, infos = jax.lax.scan(add, zeros, blocks)
    return sums, jax.tree.map(lambda leaf: leaf.reshape(-1)[: mask.shape[0]], infos)


def flat_clip(tree: PyTree, norm: float) -> PyTree:
    """The tree shortened to ``norm``."""
    length = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in _leaves(tree)))
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(1.0, length / norm), tree)


def _leaves(tree: PyTree) -> list[jax.Array]:
    return jax.tree.leaves(tree)


def _sum(rows: jax.Array, keep: jax.Array) -> jax.Array:
    column = keep.reshape(keep.shape + (1,) * (rows.ndim - 1))
    return jnp.sum(jnp.where(column, rows.astype(jnp.float32), 0.0), axis=0)
