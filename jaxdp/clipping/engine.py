"""The clipped-gradient function: per-example gradients by vmap (the reference), clipped, summed."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.clipping import _batch, reduce
from jaxdp.clipping.rules import Rule
from jaxdp.types import ClipInfo, Draw, PyTree, Summed


def clipped_grad(loss_fn: Callable[..., jax.Array], rule: Rule) -> "ClippedGrad":
    """The function that computes the sum of ``loss_fn``'s clipped per-example gradients.

    Args:
        loss_fn: ``(params, example) -> scalar`` or ``(params, example, rng) -> scalar`` for **one**
            example, so that no layer can couple a batch; ``rng`` feeds dropout and augmentation.
        rule: the clipping rule, such as ``jaxdp.clip(0.1)``.

    Returns:
        ``(params, batch, mask=None, rng=None) -> (Summed, ClipInfo)``; see :class:`ClippedGrad`.

    Raises:
        ValueError: ``loss_fn`` is not callable or takes the wrong number of arguments, or ``rule``
            is not a rule.
    """
    if not callable(loss_fn):
        raise ValueError(f"loss_fn must be a function (params, example), got {loss_fn!r}")
    if not hasattr(rule, "factors") or not hasattr(rule, "l2"):
        raise ValueError(f"rule must be a clipping rule such as jaxdp.clip(0.1), got {rule!r}")
    return ClippedGrad(loss_fn, rule, _takes_rng(loss_fn))


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
    """Sums clipped per-example gradients; made by :func:`clipped_grad`.

    Formal guarantee: the returned ``Summed.value`` changes by at most ``rule.l2`` in the Euclidean
    norm when one record enters or leaves the batch. Masked rows, and examples with a non-finite
    gradient, contribute exactly zero; an empty batch gives zero.
    """

    loss_fn: Callable[..., jax.Array]
    rule: Rule
    takes_rng: bool

    def __call__(
        self, params: PyTree, batch: PyTree, mask: Any = None, rng: jax.Array | None = None
    ) -> tuple[Summed, ClipInfo]:
        """The clipped sum over one physical batch; pure, to be called inside ``jit``.

        Args:
            params: pytree of floating-point arrays.
            batch: pytree of arrays [m, ...], one row an example.
            mask: bool [m]; False rows are padding. None: all rows count.
            rng: a key, where ``loss_fn`` takes one; row i gets the i-th of its parts. It must be
                secret and used once: the guarantee averages over it, since a record that leaves
                moves the others to other rows. (:meth:`sum` gives each record its own.)

        Returns:
            The ``Summed``, and a sensitive ``ClipInfo``.

        Raises:
            ValueError: the loss is not a scalar, the batch is ragged, the mask has another shape or
                dtype, or ``rng`` is missing or not wanted.
        """
        size = _batch.rows("batch", batch)
        self._check_rng(rng)
        keys = None if rng is None else jax.random.split(rng, size)
        return self._over_rows(params, batch, _batch.checked_mask(mask, size), keys)

    def _over_rows(
        self, params: PyTree, batch: PyTree, mask: jax.Array, keys: jax.Array | None
    ) -> tuple[Summed, ClipInfo]:
        grad_fn = jax.value_and_grad(_scalar_loss(self.loss_fn))
        axes = (None, 0) if keys is None else (None, 0, 0)
        args = (params, batch) if keys is None else (params, batch, keys)
        losses, grads = jax.vmap(grad_fn, in_axes=axes)(*args)
        total, norms, clipped = reduce.clipped_sum(self.rule, grads, mask)
        return Summed(total, self.rule.l2), ClipInfo(norms, losses, clipped, mask)

    def sum(
        self, params: PyTree, data: PyTree, draw: Draw, rng: jax.Array | None = None
    ) -> tuple[Summed, list[ClipInfo]]:
        """The clipped sum over one draw, pass by pass, each gathered on the device.

        One compiled pass serves draws of every size. The loop runs on the host: inside ``jit`` a
        ``scan`` over the passes took twice as long on a CPU, and unrolling recompiles.

        Args:
            params: pytree of floating-point arrays.
            data: pytree of arrays [N, ...], all records, already on the device.
            draw: which of them take part, from ``Sampler.draw``.
            rng: a key, where ``loss_fn`` takes one; every record gets its own part, whoever else
                is drawn.

        Returns:
            The ``Summed`` over all passes (a record is in one of them only, so the sensitivity is
            that of one pass), and a sensitive ``ClipInfo`` for each.

        Raises:
            ValueError: as ``__call__``, or ``data`` does not hold the records that were drawn from.
        """
        self._check_rng(rng)
        _check_records(data, draw)
        total = _zeros(params)
        infos = []
        for indices, mask in zip(draw.indices, draw.mask, strict=True):
            total, info = _add_pass(self, total, params, data, indices, mask, rng)
            infos.append(info)
        return Summed(total, self.rule.l2), infos

    def _check_rng(self, rng: jax.Array | None) -> None:
        if self.takes_rng and rng is None:
            raise ValueError("rng must be a key, since loss_fn takes one; got None")
        if rng is not None and not self.takes_rng:
            raise ValueError("rng must be None, since loss_fn takes (params, example); got a key")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _add_pass(
    grad_fn: ClippedGrad,
    total: PyTree,
    params: PyTree,
    data: PyTree,
    indices: jax.Array,
    mask: jax.Array,
    rng: jax.Array | None,
) -> tuple[PyTree, ClipInfo]:
    batch = jax.tree.map(lambda rows: rows[indices], data)
    keys = None if rng is None else jax.vmap(jax.random.fold_in, (None, 0))(rng, indices)
    summed, info = grad_fn._over_rows(params, batch, mask, keys)
    return jax.tree.map(jnp.add, total, summed.value), info


def _check_records(data: PyTree, draw: Draw) -> None:
    rows = _batch.rows("data", data)
    # A gather beyond the end would count the last record again and again.
    if rows != draw.num_records:
        raise ValueError(
            f"data must hold the {draw.num_records} records that the sampler draws from, got {rows}"
        )


@jax.jit
def _zeros(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)


def _scalar_loss(loss_fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def checked(*args: Any) -> jax.Array:
        loss = loss_fn(*args)
        if not hasattr(loss, "shape") or loss.shape != ():
            shape = getattr(loss, "shape", type(loss).__name__)
            raise ValueError(
                f"loss_fn must return a scalar for one example, got shape {shape}: "
                "it sees one example without a batch axis"
            )
        return loss

    return checked


def _takes_rng(loss_fn: Callable[..., jax.Array]) -> bool:
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in kinds]
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    if len(required) > 3 or len(positional) < 2:
        raise ValueError(
            "loss_fn must take (params, example) or (params, example, rng), "
            f"got the arguments ({', '.join(p.name for p in positional)})"
        )
    return len(positional) >= 3
