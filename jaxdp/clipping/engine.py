"""The clipped-gradient function: per-example gradients, clipped and summed."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import _rows, _validate
from jaxdp.clipping import _batch, captured, coupling, forms, frameworks, options, reduce, rounding
from jaxdp.clipping.ghost import program, run, uses
from jaxdp.clipping.ghost.plan import Plan, plan
from jaxdp.clipping.passes import accumulated, add_pass, compensated, nothing
from jaxdp.clipping.rules import Rule
from jaxdp.types import Batch, ClipInfo, Draw, PyTree, Summed


def clipped_grad(
    loss_fn: Callable[..., Any],
    rule: Rule,
    engine: str = "auto",
    microbatch_size: int | None = None,
    trainable: Any = None,
    constants: PyTree = None,
    most_records: int = 2**14,
    rng_name: str | tuple[str, ...] | None = forms.KEY_NAMES,
) -> "ClippedGrad":
    """A function that computes the sum of ``loss_fn``'s clipped per-example gradients.

    ================================  ===========================================================
    form of the loss                  what it is handed of one example
    ================================  ===========================================================
    ``(params, example)``             the example whole, whatever pytree it is
    ``(params, x, y)``, and so on     a tuple or list example of that length, taken apart; a dict
                                      with exactly these keys, by name
    ``(params, *, x, y)``             a dict with exactly these keys
    ``(params, x, train=True)``       optional arguments are left alone
    ``(params, batch=None)``          the first one takes the example where nothing is required
    ``(params, x, rng)``, ``key``,    by that name, wherever it stands, the key of the example;
    ``(params, x, *, rng=None)``      ``rng_name="dropout_key"`` for another name, None for no key
    ``(params, *args, **kwargs)``     the example whole as one argument; a key only by ``rng_name``
    ``functools.partial``             as what is left of it; a key that it has already stays
    bound methods, callable objects   as their signature without ``self``; Equinox modules too
    ``jax.jit(loss)``                 as the function inside
    no signature                      as ``(params, example)``
    ================================  ===========================================================

    Args:
        loss_fn: a scalar for **one** example, so that no layer can couple a batch, in one of the
            forms above; the key feeds dropout and augmentation. It may return ``(scalar, aux)``;
            aux is per example and as sensitive as the example.
        rule: the clipping rule, such as ``jaxdp.clip(0.1)``.
        engine: how gradient norms are computed, the same to rounding. "vmap": from per-example
            gradients by automatic differentiation, the reference. "ghost": without them, wherever
            the parameter is used in a way that allows it. "auto": whatever costs least, for every
            parameter by itself; ``ClippedGrad.plan`` says what that is.
        microbatch_size: rows worked on at a time inside one call, to bound the memory; None: all.
        trainable: what to train: a tree of bool (a prefix of the parameters) or a function of a
            leaf's path. Other leaves are frozen: no gradient, no norm, None in the sum. None trains
            everything. Frozen leaves are **assumed public**, computed from no record.
        constants: pytree of arrays that ``loss_fn`` captures, declared **public** (JAX's by
            identity, NumPy's by content). Others are assumed public, and named so by the plan and
            the ledger; one with as many rows as a batch is refused.
        most_records: the largest number of records of one draw, public: the rounding of the sum is
            bounded for so many, and counts in ``Summed.l2``. A Mechanism gives its own.
        rng_name: the argument that takes a key, or names to look for; None for none.

    Returns:
        ``(params, batch, mask, rng=None) -> (Summed, ClipInfo)``, the mask only where the batch is
        no ``Batch``; see ``ClippedGrad``.

    Raises:
        ValueError: an argument is not what it should be, named with its value.

    Example:
        >>> loss_fn = lambda w, x, y: (x @ w - y) ** 2
        >>> grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.1))
        >>> batch = (jnp.ones((8, 3)), jnp.ones(8))
        >>> summed, info = grad_fn(jnp.zeros(3), batch, mask="all")
        >>> print(f"{summed.l2:.3f}")  # the clip norm, and a share of it for rounding
        0.104
        >>> info.norms.shape
        (8,)
    """
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn must be a function (params, example), got {_validate.described(loss_fn)}"
        )
    if not callable(getattr(rule, "factors", None)) or not callable(getattr(rule, "l2", None)):
        raise ValueError(f"rule must be a clipping rule such as jaxdp.clip(0.1), got {rule!r}")
    _validate.one_of("engine", engine, ("auto", "ghost", "vmap"))
    if microbatch_size is not None:
        microbatch_size = _validate.integer("microbatch_size", microbatch_size, least=1)
    most_records = _validate.integer("most_records", most_records, least=1)
    chosen = options.trainable(trainable)
    form = forms.form_of(loss_fn, rng_name)
    public = captured.declared(constants, loss_fn)
    loss_fn = forms.hashable(loss_fn)
    return ClippedGrad(loss_fn, rule, engine, microbatch_size, chosen, form, public, most_records)


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
    """Sums clipped per-example gradients; ``clipped_grad`` makes it.

    Formal guarantee: the returned ``Summed.value`` changes by at most ``Summed.l2`` in the
    Euclidean norm when one record enters or leaves the batch, rounding included: what the record
    adds is at most the rule's bound C, and ``l2`` is C and the share of it by which the record
    moves the rounding of the other rows' sum (docs/clip_bound.md has the proof). Masked rows, and
    examples with a non-finite gradient, contribute exactly zero; an empty batch gives zero.
    Assumed, since it cannot be seen: frozen parameters and captured arrays are public
    (``plan`` names them).
    """

    loss_fn: Callable[..., Any]
    rule: Rule
    engine: str
    microbatch_size: int | None
    trainable: options.Prefix | options.ByPath | None
    form: forms.Form
    constants: captured.Declared
    most_records: int = 2**14

    @property
    def takes_rng(self) -> bool:
        """True if the loss takes a key."""
        return self.form.rng is not None

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
            batch: a ``Batch``, such as ``draw.batches(data)`` yields, or a pytree of arrays
                [m, ...], one row an example. Without rows (m = 0) the sum is zero.
            mask: bool [m]; False rows are padding. "all": every row is a record. It must be given
                with a pytree, and must not be with a ``Batch``, which holds its own.
            rng: a key, where ``loss_fn`` takes one; row i gets the i-th of its parts. It must be
                secret and used once: the guarantee averages over it, since a record that leaves
                moves the others to other rows. (``sum`` gives each record its own.)
            scale: pytree shaped like the parameters, positive: every per-example gradient is
                divided by it before it is clipped, and the noise is multiplied by it afterwards.
                It must be public, or computed from noisy releases only; jaxdp cannot see that.
            bound: scalar that takes the place of the norm given to ``jaxdp.clip``, for bounds that
                change from step to step. The same holds for it. Inside ``jit`` a value that is NaN
                or below 1e-10 counts as 1e-10, one beyond 1e10 as 1e10.

        Returns:
            The ``Summed``, and a sensitive ``ClipInfo``.

        Raises:
            ValueError: the loss is not a scalar, ignores the example, or could reach other examples
                (it captures a traced array or one with the batch's rows, communicates over an axis,
                calls back to Python, or uses ``custom_vmap``); the batch is ragged; the mask is
                missing or has another shape or dtype; ``rng`` is missing or not wanted; a bound is
                not a number in [1e-10, 1e10]; ``shard_map`` around it has ``check_vma=True``.
        """
        frameworks.check_arrays(params)
        origin = batch.origin if isinstance(batch, Batch) else None
        data, keep = _batch.opened(batch, mask)
        options.check_rng(rng, self.form.rng)
        data = jax.tree.map(jnp.asarray, data)
        bound, scale = options.checked_bound(bound), options.checked_scale(scale)
        size = keep.shape[0]
        rounding.check_records(size, self.most_records)
        keys = None if rng is None else jax.random.split(rng, size)
        clipped, info = self._over_rows(params, (data, keys), keep, scale, bound)
        captured.check_rows(info.plan, self._row_counts(size))
        summed = self._summed(params, clipped.total, clipped.votes, scale, bound)
        if origin is None:
            return summed, info
        ticket, number = origin
        captured.report(ticket, info.plan)
        return summed.of_draw(ticket, [number], known=batch.untouched), info

    def sum(
        self,
        params: PyTree,
        data: PyTree,
        draw: Draw,
        rng: jax.Array | None = None,
        *,
        scale: PyTree | None = None,
        bound: jax.Array | None = None,
        told: bool = False,
    ) -> tuple[Summed, list[ClipInfo]]:
        """The clipped sum over one draw, one physical batch at a time, gathered on the device.

        One compiled pass serves draws of every size; the loop runs on the host, for inside ``jit``
        a ``scan`` over the passes took twice as long on a CPU, and unrolling recompiles.

        Args:
            params: pytree of floating-point arrays.
            data: pytree of arrays [N, ...], all records, already on the device.
            draw: from ``Sampler.draw``; its ledger is told what is assumed public.
            rng: a key, where ``loss_fn`` takes one; each record has its part, whoever is drawn.
            scale: as for ``__call__``.
            bound: likewise.
            told: True keeps the sensitive ``ClipInfo`` of every pass.

        Returns:
            The ``Summed`` over all passes (a record is in one of them only, so the sensitivity is
            that of one pass), and a ``ClipInfo`` for each where ``told``; else [].

        Raises:
            ValueError: as ``__call__``; ``data`` does not hold the records that were drawn from;
                the loss captures an array with an axis as long as ``data``.
        """
        _batch.check_records(data, draw.num_records)
        return self.sum_passes(
            params, itertools.repeat(data), draw, rng, scale=scale, bound=bound, told=told
        )

    def sum_passes(
        self,
        params: PyTree,
        passes: Iterable[PyTree],
        draw: Draw,
        rng: jax.Array | None = None,
        *,
        gathered: bool = False,
        scale: PyTree | None = None,
        bound: jax.Array | None = None,
        told: bool = False,
    ) -> tuple[Summed, list[ClipInfo]]:
        """As ``sum``, with the data of each physical batch given separately.

        Args:
            params: as for ``sum``.
            passes: for each physical batch of the draw all records or, if ``gathered``, its rows.
            draw: as for ``sum``.
            rng: as for ``sum``.
            gathered: True if ``passes`` holds the rows that ``draw.indices`` names.
            scale: as for ``__call__``.
            bound: as for ``__call__``.
            told: likewise.
        """
        frameworks.check_arrays(params)
        options.check_rng(rng, self.form.rng)
        rounding.check_records(int(np.count_nonzero(draw.mask)), self.most_records)
        bound, scale = options.checked_bound(bound), options.checked_scale(scale)
        totals, plan = nothing(self, params), ()
        infos: list[ClipInfo] = []
        for piece in zip(passes, draw.positions(gathered), draw.mask, strict=False):
            rows = (params, *piece, rng, scale, bound)
            totals, info = add_pass(self, gathered, told, totals, *rows)
            plan = info.plan
            infos += [info] if told else []
        captured.check_rows(plan, (), records=draw.num_records)
        captured.report(draw.ticket, plan)
        total, lost, votes = totals
        summed = self._summed(params, compensated(total, lost), votes, scale, bound)
        # Rows that the caller gathered are not seen to be those of the draw.
        known = draw.untouched and not gathered
        return summed.of_draw(draw.ticket, range(len(draw.indices)), known=known), infos

    def one_pass(
        self,
        params: PyTree,
        data: PyTree,
        indices: jax.Array,
        mask: jax.Array,
        rng: jax.Array | None,
        *,
        gathered: bool = False,
        scale: PyTree = None,
        bound: Any = None,
    ) -> tuple[reduce.Clipped, ClipInfo]:
        """The clipped sum of one physical batch of a draw, to be called inside ``jit``."""
        batch = data if gathered else jax.tree.map(lambda rows: rows[indices], data)
        keys = None if rng is None else _rows.folded(rng, indices)
        result = self._over_rows(params, (batch, keys), mask, scale, bound)
        records = None if gathered else _batch.rows("data", data)
        captured.check_rows(result[1].plan, self._row_counts(mask.shape[0]), records=records)
        return result

    def plan(self, params: PyTree, batch: PyTree) -> Plan:
        """The engine of each parameter for batches of this shape, and why; printed, a table.

        Args:
            params: pytree of floating-point arrays.
            batch: a ``Batch`` or a pytree of arrays [m, ...]; only its shapes matter.

        Returns:
            An entry for every parameter; then one for every array that the loss captured, with
            its shape and the engine "constant". ``assumed`` says what is assumed public.

        Raises:
            ValueError: as ``__call__``, where the loss is the reason.
        """
        frameworks.check_arrays(params)
        data = batch.data if isinstance(batch, Batch) else batch
        size = _batch.rows("batch", data)
        key = jax.eval_shape(lambda: jax.random.key(0)) if self.takes_rng else None
        decided = self._planned(params, (_batch.example(data), key), self._rows_at_once(size))[2]
        captured.check_rows(decided, self._row_counts(size))
        return decided

    def trained(self, params: PyTree) -> PyTree:
        """The parameters with None at frozen leaves, as the optimizer sees them."""
        leaves, structure = jax.tree.flatten(params)
        flags = self._flags(params)
        kept = [leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)]
        return jax.tree.unflatten(structure, kept)

    def _over_rows(
        self, params: PyTree, rows: PyTree, mask: jax.Array, scale: PyTree, bound: Any
    ) -> tuple[reduce.Clipped, ClipInfo]:
        size, chunk = mask.shape[0], self._rows_at_once(mask.shape[0])
        one = functools.partial(self._at_once, params, scale=scale, bound=bound)
        if size == 0:
            return _batch.of_none(one, rows)
        if chunk == size:
            return one(rows, mask)
        chunks = jax.tree.map(functools.partial(_batch.cut, size=chunk), (rows, mask))
        totals, infos = jax.lax.scan(
            lambda totals, piece: accumulated(totals, one(*piece)), nothing(self, params), chunks
        )
        info = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:size], infos)
        total, lost, votes = totals
        return reduce.Clipped(compensated(total, lost), info.norms, info.clipped, votes), info

    def _at_once(
        self, params: PyTree, rows: PyTree, mask: jax.Array, scale: PyTree, bound: Any
    ) -> tuple[reduce.Clipped, ClipInfo]:
        example = _batch.example(rows)
        traced, found, decided = self._planned(params, example, mask.shape[0])
        coupling.refuse_varying(params, rows)
        leaves, structure = jax.tree.flatten(params)
        losses, rest, grads = run.gradients(traced, found, decided, leaves, jax.tree.leaves(rows))
        scales = None if scale is None else self._flat_scale(params, scale)
        clipped = reduce.clipped_sum(self.rule, grads, structure, mask, scales, bound)
        aux = jax.tree.unflatten(traced.out_tree, [losses, *rest])[1]
        info = ClipInfo(clipped.norms, losses, clipped.clipped, mask, aux, decided)
        return clipped, info

    def _planned(self, params: PyTree, rows: PyTree, size: int) -> tuple[Any, Any, Any]:
        """The traced loss of one example, its uses of parameters, and the engine of each."""
        example, key = rows
        flags = self._flags(params)
        options.check_params(params, flags)
        args = (example,) if key is None else (example, key)

        def loss(params: PyTree, *args: PyTree) -> tuple[jax.Array, Any]:
            try:
                result = frameworks.called(self.form, self.loss_fn, params, *args)
            except Exception as error:
                error.add_note(f"jaxdp handed the loss one example: {options.shapes(args[0])}")
                raise
            return options.checked_result(result)

        traced = program.trace(loss, params, *args)
        constants = captured.found(traced.closed, self.constants, loss, flags, params, args)
        if traced.ignores_example():
            raise ValueError("loss_fn must depend on its example, but its result does not")
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
        found = uses.find(traced, shapes)
        decided = plan(options.paths(params), shapes, flags, found, size, self.engine)
        return traced, found, Plan((*decided, *constants))

    def _flags(self, params: PyTree) -> list[bool]:
        if self.trainable is None:
            return [True] * len(jax.tree.leaves(params))
        return self.trainable(params)

    def _flat_scale(self, params: PyTree, scale: PyTree) -> list[jax.Array | None]:
        each = iter(options.scales(scale, self.trained(params)))
        return [next(each) if flag else None for flag in self._flags(params)]

    def summed(
        self, params: PyTree, clipped: reduce.Clipped, scale: PyTree = None, bound: Any = None
    ) -> Summed:
        """The ``Summed`` of one physical batch's result."""
        return self._summed(params, clipped.total, clipped.votes, scale, bound)

    def _summed(
        self, params: PyTree, total: PyTree, votes: jax.Array, scale: PyTree, bound: Any
    ) -> Summed:
        l2 = self.rule.l2(self.trained(params)) if bound is None else bound
        l2 = l2 * (1.0 + rounding.of_sum(self.most_records))
        return Summed(total, l2, scale, None if bound is None else votes)

    def _rows_at_once(self, size: int) -> int:
        return size if self.microbatch_size is None else min(size, self.microbatch_size)

    def _row_counts(self, size: int) -> set[int]:
        return {size, self._rows_at_once(size)}
