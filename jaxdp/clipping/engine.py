"""The clipped-gradient function: clipped, summed, and not held."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp import _validate
from jaxdp.clipping import _batch, options, reduce
from jaxdp.clipping.ghost import program, run, uses
from jaxdp.clipping.ghost.plan import LeafPlan, plan
from jaxdp.clipping.rules import Rule
from jaxdp.types import ClipInfo, Draw, PyTree, Summed


def clipped_grad(
    loss_fn: Callable[..., Any],
    rule: Rule,
    method: str = "auto",
    microbatch_size: int | None = None,
    trainable: Any = None,
) -> "ClippedGrad":
    """The function that computes the sum of ``loss_fn``'s clipped per-example gradients.

    Args:
        loss_fn: ``(params, example) -> scalar`` or ``(params, example, rng) -> scalar`` for **one**
            example, so that no layer can couple a batch; ``rng`` feeds dropout and augmentation. It
            may return ``(scalar, aux)``; aux is per example and as sensitive as the example.
        rule: the clipping rule, such as ``jaxdp.clip(0.1)``.
        method: how gradient norms are computed, the same to rounding. "vmap": from per-example
            gradients by automatic differentiation, the reference. "ghost": without them, wherever
            the parameter is used in a way that allows it. "auto": whatever costs least, for every
            parameter by itself; ``ClippedGrad.plan`` says what that is.
        microbatch_size: rows that are worked on at a time inside one call. It bounds the memory and
            changes nothing else but the order of summation. None: all at once.
        trainable: what to train: a tree of bool (a prefix of the parameters) or a function of a
            leaf's path. Other leaves are frozen: no gradient, no norm, None in the sum. None trains
            everything.

    Returns:
        ``(params, batch, mask=None, rng=None) -> (Summed, ClipInfo)``; see :class:`ClippedGrad`.

    Raises:
        ValueError: an argument is not what it should be, named with its value.
    """
    if not callable(loss_fn):
        raise ValueError(f"loss_fn must be a function (params, example), got {loss_fn!r}")
    if not callable(getattr(rule, "factors", None)) or not callable(getattr(rule, "l2", None)):
        raise ValueError(f"rule must be a clipping rule such as jaxdp.clip(0.1), got {rule!r}")
    _validate.one_of("method", method, ("auto", "ghost", "vmap"))
    if microbatch_size is not None:
        microbatch_size = _validate.integer("microbatch_size", microbatch_size, least=1)
    chosen = options.trainable(trainable)
    takes_rng = options.takes_rng(loss_fn)
    return ClippedGrad(loss_fn, rule, method, microbatch_size, chosen, takes_rng)


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
    """Sums clipped per-example gradients; made by :func:`clipped_grad`.

    Formal guarantee: the returned ``Summed.value`` changes by at most ``Summed.l2`` in the
    Euclidean norm when one record enters or leaves the batch. Masked rows, and examples with a
    non-finite gradient, contribute exactly zero; an empty batch gives zero.
    """

    loss_fn: Callable[..., Any]
    rule: Rule
    method: str
    microbatch_size: int | None
    trainable: options.Prefix | options.ByPath | None
    takes_rng: bool

    def __call__(
        self,
        params: PyTree,
        batch: PyTree,
        mask: Any = None,
        rng: jax.Array | None = None,
        *,
        scale: PyTree | None = None,
        bound: jax.Array | None = None,
    ) -> tuple[Summed, ClipInfo]:
        """The clipped sum over one physical batch; pure, to be called inside ``jit``.

        Args:
            params: pytree of floating-point arrays.
            batch: pytree of arrays [m, ...], one row an example.
            mask: bool [m]; False rows are padding. None: all rows count.
            rng: a key, where ``loss_fn`` takes one; row i gets the i-th of its parts. It must be
                secret and used once: the guarantee averages over it, since a record that leaves
                moves the others to other rows. (:meth:`sum` gives each record its own.)
            scale: pytree shaped like the parameters, positive: every per-example gradient is
                divided by it before it is clipped, and the noise is multiplied by it afterwards.
                It must be public, or computed from noisy releases only; jaxdp cannot see that.
            bound: scalar that takes the place of the norm given to ``jaxdp.clip``, for bounds that
                change from step to step. The same holds for it. Inside ``jit`` a value that is NaN
                or below 1e-10 counts as 1e-10, one beyond 1e10 as 1e10.

        Returns:
            The ``Summed``, and a sensitive ``ClipInfo``.

        Raises:
            ValueError: the loss is not a scalar or ignores the example, the batch is ragged, the
                mask has another shape or dtype, ``rng`` is missing or not wanted, or a bound is not
                a number in [1e-10, 1e10].
        """
        size = _batch.rows("batch", batch)
        self._check_rng(rng)
        batch = jax.tree.map(jnp.asarray, batch)
        bound = options.checked_bound(bound)
        keys = None if rng is None else jax.random.split(rng, size)
        checked = _batch.checked_mask(mask, size)
        clipped, info = self._over_rows(params, (batch, keys), checked, scale, bound)
        return self._summed(params, clipped.total, clipped.votes, scale, bound), info

    def sum(
        self,
        params: PyTree,
        data: PyTree,
        draw: Draw,
        rng: jax.Array | None = None,
        *,
        scale: PyTree | None = None,
        bound: jax.Array | None = None,
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
            scale: as for ``__call__``.
            bound: as for ``__call__``.

        Returns:
            The ``Summed`` over all passes (a record is in one of them only, so the sensitivity is
            that of one pass), and a sensitive ``ClipInfo`` for each.

        Raises:
            ValueError: as ``__call__``, or ``data`` does not hold the records that were drawn from.
        """
        self._check_rng(rng)
        _check_records(data, draw)
        bound = options.checked_bound(bound)
        totals = _zeros(self, params)
        infos = []
        for indices, mask in zip(draw.indices, draw.mask, strict=True):
            totals, info = _add_pass(self, totals, params, data, indices, mask, rng, scale, bound)
            infos.append(info)
        total, votes = _settled(totals)
        return self._summed(params, total, votes, scale, bound), infos

    def plan(self, params: PyTree, batch: PyTree) -> tuple[LeafPlan, ...]:
        """How every parameter's gradient is handled for a physical batch of this shape."""
        rows = self._rows_at_once(_batch.rows("batch", batch))
        key = jax.eval_shape(lambda: jax.random.key(0)) if self.takes_rng else None
        example = jax.eval_shape(lambda batch: jax.tree.map(lambda leaf: leaf[0], batch), batch)
        return self._planned(params, (example, key), rows)[2]

    def trained(self, params: PyTree) -> PyTree:
        """The parameters with None at frozen leaves: what the optimizer works on."""
        leaves, structure = jax.tree.flatten(params)
        flags = self._flags(params)
        kept = [leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)]
        return jax.tree.unflatten(structure, kept)

    def _over_rows(
        self, params: PyTree, rows: PyTree, mask: jax.Array, scale: PyTree, bound: Any
    ) -> tuple[reduce.Clipped, ClipInfo]:
        size, chunk = mask.shape[0], self._rows_at_once(mask.shape[0])
        one = functools.partial(self._at_once, params, scale=scale, bound=bound)
        if chunk == size:
            return one(rows, mask)
        chunks = jax.tree.map(functools.partial(_batch.cut, size=chunk), (rows, mask))
        totals, infos = jax.lax.scan(
            lambda totals, piece: _folded(totals, one(*piece)), _zeros(self, params), chunks
        )
        info = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:size], infos)
        total, votes = _settled(totals)
        return reduce.Clipped(total, info.norms, info.clipped, votes), info

    def _at_once(
        self, params: PyTree, rows: PyTree, mask: jax.Array, scale: PyTree, bound: Any
    ) -> tuple[reduce.Clipped, ClipInfo]:
        example = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
        traced, found, decided = self._planned(params, example, mask.shape[0])
        leaves, structure = jax.tree.flatten(params)
        losses, rest, grads = run.gradients(traced, found, decided, leaves, jax.tree.leaves(rows))
        scales = None if scale is None else self._flat_scale(params, scale)
        clipped = reduce.clipped_sum(self.rule, grads, structure, mask, scales, bound)
        aux = jax.tree.unflatten(traced.out_tree, [losses, *rest])[1]
        info = ClipInfo(clipped.norms, losses, clipped.clipped, mask, aux, decided)
        return clipped, info

    def _planned(self, params: PyTree, rows: PyTree, size: int) -> tuple[Any, Any, Any]:
        """The traced loss of one example, where it uses parameters, and the engine of each."""
        example, key = rows
        flags = self._flags(params)
        options.check_params(params, flags)
        keys = () if key is None else (key,)
        traced = program.trace(
            lambda params, example, *key: options.checked_result(
                options.called(self.loss_fn, params, example, *key)
            ),
            params,
            example,
            *keys,
        )
        if traced.ignores_example():
            raise ValueError("loss_fn must depend on its example, but its result does not")
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
        found = uses.find(traced, shapes)
        return traced, found, plan(options.paths(params), flags, found, size, self.method)

    def _flags(self, params: PyTree) -> list[bool]:
        if self.trainable is None:
            return [True] * len(jax.tree.leaves(params))
        return self.trainable(params)

    def _flat_scale(self, params: PyTree, scale: PyTree) -> list[jax.Array | None]:
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(self.trained(params))]
        found = jax.tree.leaves(scale)
        if [jnp.shape(leaf) for leaf in found] != shapes:
            raise ValueError(
                f"scale must be shaped like the trained parameters {shapes}, "
                f"got {[jnp.shape(leaf) for leaf in found]}"
            )
        each = iter(found)
        return [
            jnp.asarray(next(each), jnp.float32) if flag else None for flag in self._flags(params)
        ]

    def _summed(
        self, params: PyTree, total: PyTree, votes: jax.Array, scale: PyTree, bound: Any
    ) -> Summed:
        l2 = self.rule.l2(self.trained(params)) if bound is None else bound
        return Summed(total, l2, scale, None if bound is None else votes)

    def _rows_at_once(self, size: int) -> int:
        return size if self.microbatch_size is None else min(size, self.microbatch_size)

    def _check_rng(self, rng: jax.Array | None) -> None:
        if self.takes_rng and rng is None:
            raise ValueError("rng must be a key, since loss_fn takes one; got None")
        if rng is not None and not self.takes_rng:
            raise ValueError("rng must be None, since loss_fn takes (params, example); got a key")


# A running sum, what rounding took from it, and the votes.
_Totals = tuple[PyTree, PyTree, jax.Array]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _add_pass(
    grad_fn: ClippedGrad,
    totals: _Totals,
    params: PyTree,
    data: PyTree,
    indices: jax.Array,
    mask: jax.Array,
    rng: jax.Array | None,
    scale: PyTree,
    bound: Any,
) -> tuple[_Totals, ClipInfo]:
    batch = jax.tree.map(lambda rows: rows[indices], data)
    keys = None if rng is None else jax.vmap(jax.random.fold_in, (None, 0))(rng, indices)
    return _folded(totals, grad_fn._over_rows(params, (batch, keys), mask, scale, bound))


def _folded(totals: _Totals, result: tuple[reduce.Clipped, ClipInfo]) -> tuple[_Totals, ClipInfo]:
    """Compensated addition (Kahan 1965): rounding does not grow with the number of passes."""
    (total, lost, votes), (clipped, info) = totals, result
    wanted = jax.tree.map(jnp.subtract, clipped.total, lost)
    larger = jax.tree.map(jnp.add, total, wanted)
    lost = jax.tree.map(lambda new, old, add: (new - old) - add, larger, total, wanted)
    return (larger, lost, votes + clipped.votes), info


@jax.jit
def _settled(totals: _Totals) -> tuple[PyTree, jax.Array]:
    total, lost, votes = totals
    return jax.tree.map(jnp.subtract, total, lost), votes


@functools.partial(jax.jit, static_argnums=0)
def _zeros(grad_fn: ClippedGrad, params: PyTree) -> _Totals:
    trained = grad_fn.trained(params)
    zeros, again = (
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained) for _ in range(2)
    )
    return zeros, again, jnp.zeros([], jnp.float32)


def _check_records(data: PyTree, draw: Draw) -> None:
    rows = _batch.rows("data", data)
    # A gather beyond the end would count the last record again and again.
    if rows != draw.num_records:
        # Without the numbers: they are private.
        raise ValueError(
            "data must hold the records that the sampler draws from, got another number of them"
        )
