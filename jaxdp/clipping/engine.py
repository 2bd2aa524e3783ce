"""Sums of clipped per-example gradients: the function of a loss and a rule that computes them."""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxdp import arguments
from jaxdp.clipping import across, losses, options, reduce, rounding
from jaxdp.clipping.ghost import program, run, stacks
from jaxdp.clipping.ghost.plan import (
    LeafPlan,
    Plan,
    Uses,
    find_uses,
    plan_leaves,
    rows_together,
)
from jaxdp.clipping.rules import Rule, limit_of
from jaxdp.devices import placement, shards
from jaxdp.devices.placement import Placement
from jaxdp.sampling.source import ArraySource, Source
from jaxdp.types import (
    OTHER_RECORDS,
    Batch,
    ClipInfo,
    Draw,
    PyTree,
    Summed,
    check_records,
    count_rows,
    positions_for_device,
    record_keys,
)

# A running sum, what rounding took from it, and the votes.
Totals = tuple[PyTree, PyTree, jax.Array]
# Of a running sum the total, in its own memory.
_compensated = jax.jit(rounding.compensated, donate_argnums=0)


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
    """Sums clipped per-example gradients; ``clipped_grad`` makes it.

    Formal guarantee: the returned ``Summed.value`` changes by at most ``Summed.l2`` in the
    Euclidean norm when one record enters or leaves the batch, rounding included: what the record
    adds is at most the rule's bound C, and ``l2`` is C and the share of it by which the record
    moves the rounding of the other rows' sum (proof: docs/proofs/clip_bound.md). Masked rows, and
    examples with a non-finite gradient, contribute exactly zero; an empty batch gives zero.
    Assumed, since it cannot be seen: frozen parameters and captured arrays are public
    (``plan`` names them).
    """

    loss_fn: Callable[..., PyTree]
    rule: Rule
    engine: str
    microbatch_size: int | None
    trainable: options.Trainable
    form: losses.Form
    constants: losses.Constants
    most_records: int = 2**14
    placement: Placement | None = None

    @property
    def takes_rng(self) -> bool:
        """True if the loss takes a key."""
        return self.form.rng is not None

    def __call__(
        self,
        params: PyTree,
        data: PyTree,
        draw: Draw | ArrayLike | str | None = None,
        rng: jax.Array | None = None,
        *,
        scale: PyTree | None = None,
        bound: jax.Array | None = None,
    ) -> Summed:
        """The clipped sum over a draw, or over one physical batch.

        ====================  ======================================================================
        ``draw``              ``data``
        ====================  ======================================================================
        a ``Draw``            all records: a pytree of arrays [N, ...], best on the device, or a
                              ``Source``. Its physical batches are gathered and clipped one after
                              another, by one compiled program; a loop of the host, not for ``jit``
        bool [m], or "all"    the rows of one physical batch: a pytree of arrays [m, ...]. False
                              rows are padding; "all": every row is a record. Pure, for ``jit``
        left out              a ``Batch``, such as ``draw.batches(data)`` yields: it holds its mask
        ====================  ======================================================================

        Args:
            params: pytree of floating-point arrays.
            data: records or rows, one row an example. Without rows (m = 0) the sum is zero.
            draw: from ``Sampler.draw``, whose ledger records what is assumed public; or a mask.
            rng: a key, where ``loss_fn`` takes one. Of a draw each record has its part, whoever
                else is drawn. Of a physical batch row i gets the i-th part: the key must be secret
                and used once, for the guarantee averages over it, since a record that leaves moves
                the others to other rows.
            scale: pytree shaped like the parameters, positive: every per-example gradient is
                divided by it before it is clipped, and the noise is multiplied by it afterwards.
                It must be public, or computed from noisy releases only; jaxdp cannot see that.
            bound: scalar that takes the place of the norm given to ``jaxdp.clip``, for bounds that
                change from step to step. The same holds for it. Inside ``jit`` a value that is NaN
                or below 1e-10 counts as 1e-10, one beyond 1e10 as 1e10.

        Returns:
            The ``Summed``. Over all physical batches of a draw the sensitivity is that of one: a
            record is in one of them only.

        Raises:
            ValueError: the loss is not a scalar, ignores the example, or could reach other examples
                (it captures a traced array, records or a statistic of them, communicates over an
                axis, calls back to Python, or uses ``custom_vmap``); the data are ragged, or do not
                hold the records that were drawn from; ``draw`` is none of these; ``rng`` is missing
                or not wanted; a bound is not a number in [1e-10, 1e10]; the rows of a batch are no
                multiple of the mesh's devices.
        """
        if isinstance(draw, Draw):
            return self.sum_draw(params, data, draw, rng, scale=scale, bound=bound)[0]
        return self.with_info(params, data, draw, rng, scale=scale, bound=bound)[0]

    @overload
    def with_info(
        self,
        params: PyTree,
        data: PyTree,
        draw: Draw,
        rng: jax.Array | None = None,
        *,
        scale: PyTree | None = None,
        bound: jax.Array | None = None,
    ) -> tuple[Summed, list[ClipInfo]]: ...

    @overload
    def with_info(
        self,
        params: PyTree,
        data: PyTree,
        draw: ArrayLike | str | None = None,
        rng: jax.Array | None = None,
        *,
        scale: PyTree | None = None,
        bound: jax.Array | None = None,
    ) -> tuple[Summed, ClipInfo]: ...

    def with_info(
        self,
        params: PyTree,
        data: PyTree,
        draw: Draw | ArrayLike | str | None = None,
        rng: jax.Array | None = None,
        *,
        scale: PyTree | None = None,
        bound: jax.Array | None = None,
    ) -> tuple[Summed, ClipInfo | list[ClipInfo]]:
        """As a call, and returns the **sensitive** ``ClipInfo``, which no epsilon covers.

        Of a draw it is a list, with one for each physical batch.
        """
        if isinstance(draw, Draw):
            return self.sum_draw(
                params, data, draw, rng, return_info=True, scale=scale, bound=bound
            )
        options.check_arrays(params)
        rows, mask = options.rows_and_mask(data, draw)
        options.check_rng(rng, self.form.rng)
        rounding.check_records(size := mask.shape[0], self.most_records)
        rows = jax.tree.map(jnp.asarray, rows)
        keys = None if rng is None else jax.random.split(rng, size)
        given = scale, bound
        scale, bound = options.checked_scale(scale), options.checked_bound(bound)
        with losses.comparing(rows):
            summed, info = self.clip_physical_batch(
                params, (rows, keys), None, mask, None, gathered=True, scale=scale, bound=bound
            )
        if not isinstance(data, Batch) or (ticket := data.ticket) is None:
            return summed, info
        losses.note_assumed(ticket, info.plan, params)
        options.note_given(ticket, lambda: self.rule.l2(self.trained(params)), *given)
        return summed.carrying(ticket, passes=frozenset([data.number])), info

    def sum_draw(
        self,
        params: PyTree,
        data: PyTree,
        draw: Draw,
        rng: jax.Array | None = None,
        *,
        gathered: bool = False,
        return_info: bool = False,
        scale: PyTree | None = None,
        bound: jax.Array | None = None,
    ) -> tuple[Summed, list[ClipInfo]]:
        """As a call with a ``Draw``; for a trainer, which gathers rows ahead of time.

        One compiled program serves draws of every size. The loop runs on the host: inside one of
        ``jit`` XLA's CPU backend takes eight times as long for convolutions (jax 0.10).

        Args:
            params: as for a call.
            data: as for a call; or, if ``gathered``, the rows of each physical batch.
            draw: the draw.
            rng: as for a call.
            gathered: True for rows that the caller gathered. The sum brings no ticket then.
            return_info: True returns the sensitive ``ClipInfo`` of every physical batch, else [].
            scale: as for a call.
            bound: as for a call.

        Raises:
            ValueError: as for a call.
        """
        # What can be refused is refused before a row is read.
        options.check_arrays(params)
        options.check_rng(rng, self.form.rng)
        rounding.check_records(int(np.count_nonzero(draw.mask)), self.most_records)
        given = scale, bound
        scale, bound = options.checked_scale(scale), options.checked_bound(bound)
        limit = limit_of(self.rule, self.trained(params), bound)
        if isinstance(data, ArraySource) and data.on_device:
            data = data.arrays
        # Asking a protocol takes a while.
        plain = type(data) in (dict, tuple, list) or isinstance(data, jax.Array)
        source = data if not plain and isinstance(data, Source) else None
        on_device = source is None and not gathered
        if on_device:
            options.require_no_batch(data)
            check_records(data, draw.num_records)
        elif source is not None and len(source) != draw.num_records:
            raise ValueError(OTHER_RECORDS)

        # Parameters and records stay where they are; where that is a mesh, its devices share the
        # rows of each physical batch.
        place = placement.resolve_placement(self.placement, params, *([data] if on_device else []))
        mesh = None if place is None else place.mesh
        grad_fn, there = self, params
        if place is not None:
            grad_fn, there = dataclasses.replace(self, placement=place), place.put(params)
            data = place.put(data) if on_device else data

        # Each physical batch: rows gathered by the program from records on the device, else here.
        # The first one's sum is what those of the others, if there are any, are added to.
        infos: list[ClipInfo] = []
        engines: tuple[LeafPlan, ...] = ()
        totals: tuple[PyTree, jax.Array | None] | None = None
        lost: PyTree = None
        each = data if gathered else itertools.repeat(data, len(draw.indices))
        for rows, indices, mask in zip(each, draw.indices, draw.mask, strict=True):
            if place is not None and not gathered:
                indices, mask = place.pad(indices, mask)
            if source is not None and place is None:
                rows = source.gather(indices, mask)
            elif source is not None and place is not None:
                rows = shards.gather_sharded(source.gather, indices, mask, place.row_sharding)
            positions = positions_for_device(indices, draw.num_records, not on_device)
            with placement.using_mesh(mesh), losses.comparing(rows):
                kinds = grad_fn, not on_device, return_info
                found, info = sum_physical_batch(
                    *kinds, there, rows, positions, mask, rng, scale, bound, limit
                )
                if totals is None:
                    totals = found
                else:
                    lost = _zeros(grad_fn, found[0]) if lost is None else lost
                    totals, lost = _add(grad_fn, totals, lost, found)
            engines = info.plan
            infos += [info] if return_info else []

        # The ledger records what the guarantee assumes: captured arrays, a bound of the caller's.
        ticket = draw.ticket
        losses.note_assumed(ticket, engines, params)
        options.note_given(ticket, lambda: self.rule.l2(self.trained(params)), *given)
        if totals is None:  # a draw without physical batches
            none = None if bound is None else jnp.zeros([], jnp.float32)
            totals = _zeros(grad_fn, grad_fn.trained(there)), none
        total, votes = totals
        if lost is not None:
            with placement.using_mesh(mesh):
                total = _compensated(total, lost)
        if place is not None:
            total = placement.sharded_like(total, params)
        l2 = grad_fn._l2(limit, drawn=not gathered or (place is not None and place.from_trainer))
        summed = Summed(total, l2, scale, votes)
        if gathered:  # by somebody else: that these are the rows of the draw is not seen here
            return summed, infos
        return summed.carrying(ticket, passes=frozenset(range(len(draw.indices)))), infos

    def clip_physical_batch(
        self,
        params: PyTree,
        data: PyTree,
        indices: jax.Array | None,
        mask: jax.Array,
        rng: jax.Array | None,
        *,
        gathered: bool = False,
        scale: PyTree = None,
        bound: jax.Array | None = None,
        limit: float | jax.Array | None = None,
    ) -> tuple[Summed, ClipInfo]:
        """The clipped sum of one physical batch, without a ticket; to be called inside ``jit``.

        Args:
            params: pytree of floating-point arrays.
            data: all records or, if ``gathered``, the rows at ``indices``; without ``indices`` the
                pair of the rows and their keys [m], or None.
            indices: int32 [m], positions in the records; uint32 [m, 2] where 32 bits do not reach.
            mask: bool [m].
            rng: the key of the draw, of which each record gets its part by its position.
            gathered: True if ``data`` are rows.
            scale: checked, as for a call.
            bound: checked, as for a call.
            limit: what the rule, or the bound, lets a record add, where the caller has asked.

        Raises:
            ValueError: the rows are not as many as the mask says.
        """
        if gathered and indices is not None and count_rows("data", data) != mask.shape[0]:
            raise ValueError(
                f"data must hold a row for each of the {mask.shape[0]} positions of a physical "
                f"batch, got {count_rows('data', data)}: one would count as several records"
            )
        # Asked once: the rule of a user's may answer otherwise the next time.
        if limit is None:
            limit = limit_of(self.rule, self.trained(params), bound)
        # Where the rows are still to be shared by the devices of a mesh (inside a shard_map over
        # the same axes they are already), each record goes to the device that will work on it.
        place, over = self.placement, None
        known, count = place and place.leaves, len(jax.tree.leaves(params))
        if known and len(known) != count:
            raise ValueError(
                f"params must hold the {len(known)} arrays that sharded_as was given, got {count}"
            )
        if place is not None and place.devices > 1:
            around = jax.sharding.get_abstract_mesh().manual_axes
            over = None if set(place.rows) & set(around) else place
        drawn = indices is not None and (not gathered or (place is not None and place.from_trainer))
        if over is not None and over.records and not gathered:
            assert indices is not None
            data, gathered = across.gather_to_devices(over, data, indices), True

        structure: Any = jax.tree.structure(params)
        avals = jax.eval_shape(lambda params: params, params)  # weak types are kept

        def of_device(
            params: PyTree, rows: PyTree, shared: PyTree
        ) -> tuple[reduce.Clipped, ClipInfo]:
            # One device's rows, each with a key of its own.
            (indices, mask, own), (records, scale, bound, most, rng) = rows, shared
            if indices is None:
                batch = own
            else:
                examples = own if gathered else jax.tree.map(lambda leaf: leaf[indices], records)
                batch = examples, None if rng is None else record_keys(rng, indices)

            # The plan: the engine of each parameter, and how many rows are worked on together. Of
            # parameters in parts all is gathered but the stacks of which layer by layer will do.
            size = mask.shape[0]
            parts = jax.tree.leaves(params, is_leaf=stacks.is_shard)
            sharded = any(map(stacks.is_shard, parts))
            loss, uses, engines = self._planned(
                avals if sharded else params, options.example_shapes(batch), size
            )
            together = engines.together
            sliced = stacks.sliced_leaves(loss, engines) if sharded and scale is None else set()
            by_layers = {n: found for n in sliced if (found := parts[n].by_layers()) is not None}
            leaves = [by_layers.get(n) or stacks.whole(x) for n, x in enumerate(parts)]

            def over_devices(total: PyTree) -> PyTree:
                """The sum over the devices, in parts as the parameters are."""
                summed = structure.flatten_up_to(total)
                for n, part in enumerate(parts):
                    if summed[n] is not None and stacks.is_shard(part):
                        stack = by_layers.get(n)
                        one = part.added if stack is None else functools.partial(stack.like, part)
                        summed[n] = one(summed[n])
                return jax.tree.unflatten(structure, summed)

            def microbatch(rows: PyTree, mask: jax.Array) -> tuple[reduce.Clipped, ClipInfo]:
                # Every row's gradients in the form that the plan says, then their clipped sum.
                cuts = {} if place is None else across.sharded_leaves(place)
                values, rest, grads = run.per_example_gradients(
                    loss, uses, engines, leaves, jax.tree.leaves(rows), cuts
                )
                scales: list[jax.Array | None] | None = None
                if scale is not None:
                    each = iter(options.scale_leaves(scale, self.trained(avals)))
                    flags = options.trained_flags(self.trainable, avals)
                    scales = [next(each) if flag else None for flag in flags]
                clipped = reduce.clipped_sum(self.rule, grads, structure, mask, scales, bound, most)
                aux = jax.tree.unflatten(loss.out_tree, [values, *rest])[1]
                return clipped, ClipInfo(clipped.norms, values, clipped.clipped, mask, aux, engines)

            if together == size:
                clipped, info = microbatch(batch, mask)
                return clipped._replace(total=over_devices(clipped.total)), info
            # Microbatches one after another. The last is filled up with a record that the mask
            # leaves out: a loss may not be defined at zeros.
            if missing := -size % together:
                batch = jax.tree.map(
                    lambda leaf: jnp.concatenate([leaf, *[leaf[:1]] * missing]), batch
                )
                mask = jnp.concatenate([mask, jnp.zeros(missing, bool)])
            microbatches = jax.tree.map(
                lambda leaf: leaf.reshape(-1, together, *leaf.shape[1:]), (batch, mask)
            )

            def add(totals: Totals, rows: tuple[PyTree, jax.Array]) -> tuple[Totals, ClipInfo]:
                (total, lost, votes), (clipped, info) = totals, microbatch(*rows)
                more = rounding.add_compensated(total, lost, clipped.total)
                return (*more, votes + clipped.votes), info

            arrays = [x.part if isinstance(x, stacks.Shard) else x for x in leaves]
            zeros = _zeros(self, self.trained(jax.tree.unflatten(structure, arrays)))
            start = zeros, zeros, jnp.zeros([], jnp.float32)
            (total, lost, votes), infos = jax.lax.scan(add, start, microbatches)
            info = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:size], infos)
            total = over_devices(_compensated(total, lost))
            return reduce.Clipped(total, info.norms, info.clipped, votes), info

        own, records = (data, None) if gathered else (None, data)
        most = jnp.asarray(limit, jnp.float32)
        rows, shared = (indices, mask, own), (records, scale, bound, most, rng)
        if mask.shape[0] == 0:
            # JAX refuses empty arrays: zeros, and leaves [0, ...], by the shapes of one row.
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), rows)
            shapes, info = jax.eval_shape(of_device, params, one, shared)
            clipped = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            info = jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape[1:]), leaf.dtype), info)
        elif over is not None:
            clipped, info = across.sum_over_devices(over, of_device, params, rows, shared)
        else:
            clipped, info = across.without_mesh_types(of_device, params, rows, shared)
        votes = None if bound is None else clipped.votes
        return Summed(clipped.total, self._l2(limit, drawn), scale, votes), info

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
        options.check_arrays(params)
        data = batch.data if isinstance(batch, Batch) else batch
        size = count_rows("batch", data)
        key = (
            jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
            if self.takes_rng
            else None
        )
        devices = 1 if self.placement is None else self.placement.devices
        rows = -(-size // devices)
        with losses.comparing(data):
            return self._planned(params, (options.example_shapes(data), key), rows)[2]

    def trained(self, params: PyTree) -> PyTree:
        """The parameters with None at frozen leaves, as the optimizer sees them."""
        leaves, structure = jax.tree.flatten(params)
        flags = options.trained_flags(self.trainable, params)
        kept = [leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)]
        return jax.tree.unflatten(structure, kept)

    def sharded_as(self, params: PyTree) -> "ClippedGrad":
        """The function for parameters that are sharded as these are, for a ``jit`` of your own.

        Inside ``jit`` an array on automatic axes does not say how it is sharded. Without this the
        parameters are gathered before the sum, and the sum is whole on every device.

        Args:
            params: pytree of arrays, or of ``jax.ShapeDtypeStruct`` with a sharding.

        Raises:
            ValueError: they are on another mesh than was asked for, or on none.
        """
        place = placement.resolve_placement(self.placement, params)
        if place is None:
            raise ValueError("params must lie on a mesh, got arrays of one device or of none")
        return dataclasses.replace(self, placement=place)

    def _l2(self, limit: float | jax.Array, drawn: bool) -> float | jax.Array:
        """The sensitivity of a sum: what a record adds, and a share of it for rounding.

        ``limit`` of ``limit_of``, ``drawn`` as for ``rounding.error_of_sum``.
        """
        devices = 1 if self.placement is None else self.placement.devices
        return limit * (1.0 + rounding.error_of_sum(self.most_records, devices, drawn))

    def _planned(
        self, params: PyTree, rows: PyTree, size: int
    ) -> tuple[program.Traced, Uses, Plan]:
        """The traced loss of one example, its uses of parameters, and the engine of each.

        Args:
            params: the parameters.
            rows: shapes of one example and of its key, or None.
            size: the rows of one device.

        Raises:
            ValueError: the loss cannot be used with these arguments.
        """
        flags = options.trained_flags(self.trainable, params)
        options.check_params(params, flags)
        args = rows if rows[1] is not None else rows[:1]

        def loss(params: PyTree, *args: PyTree) -> tuple[jax.Array, PyTree]:
            try:
                result = losses.call(self.form, self.loss_fn, params, *args)
            except Exception as error:
                shapes = options.describe_shapes(args[0])
                error.add_note(f"jaxdp called the loss with one example: {shapes}")
                raise
            return options.checked_result(result)

        traced = program.trace(loss, params, *args)
        constants = losses.inspect_loss(traced.closed, self.constants, loss, flags, params, args)
        if not program.depends(traced.program.outs[0], traced.of_example):
            raise ValueError("loss_fn must depend on its example, but its result does not")
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
        used = Uses() if self.engine == "vmap" else find_uses(traced, shapes)
        frozen = [""] * len(flags) if all(flags) else options.describe_frozen(params, flags)

        def planned(together: int) -> tuple[LeafPlan, ...]:
            return plan_leaves(options.paths(params), shapes, frozen, used, together, self.engine)

        # The rows that are worked on together: as asked, or as the plan of all of them says.
        why = ""
        if self.microbatch_size is None:
            together, why = rows_together(traced, used, planned(size), shapes, size)
        else:
            devices = 1 if self.placement is None else self.placement.devices
            together = min(size, -(-self.microbatch_size // devices))
        return traced, used, Plan((*planned(together), *constants), together, why)


def clipped_grad(
    loss_fn: Callable[..., PyTree],
    rule: Rule,
    engine: str = "auto",
    microbatch_size: int | None = None,
    trainable: PyTree | Callable[[str], bool] = None,
    constants: PyTree = None,
    most_records: int = 2**14,
    rng_name: str | Sequence[str] | None = losses.KEY_NAMES,
    mesh: jax.sharding.Mesh | None = None,
    data_axes: Sequence[str] | None = None,
) -> ClippedGrad:
    """A function that computes the sum of ``loss_fn``'s clipped per-example gradients.

    ================================  ===========================================================
    form of the loss                  what it is handed of one example
    ================================  ===========================================================
    ``(params, example)``             the example whole, whatever pytree it is
    ``(params, x, y)``, and so on     a tuple or list example of that length, taken apart; a dict
                                      with exactly these keys, by name
    ``(params, x, rng)``, ``key``,    by that name, wherever it stands, the key of the example;
    ``(params, x, *, rng=None)``      ``rng_name="dropout_key"`` for another name, None for no key
    ================================  ===========================================================

    Other arguments must have defaults, which stay. ``functools.partial``, ``jax.jit``, bound
    methods and callable objects (Equinox modules too) count by the signature that is left of them;
    one without a signature, or with ``*args`` alone, takes the example whole.

    Args:
        loss_fn: a scalar for **one** example, so that no layer can couple a batch, in one of the
            forms above; the key feeds dropout and augmentation. It may return ``(scalar, aux)``;
            aux is per example and as sensitive as the example.
        rule: the clipping rule, such as ``jaxdp.clip(0.1)``.
        engine: how gradient norms are computed, the same to rounding. "vmap": from per-example
            gradients by automatic differentiation, the reference. "ghost": without them, wherever
            the parameter is used in a way that allows it. "auto": whatever costs least, for every
            parameter by itself; ``ClippedGrad.plan`` says what that is.
        microbatch_size: rows worked on at a time inside one call, to bound the memory. None: all,
            or of a loss with ``jax.checkpoint`` as many as ``ClippedGrad.plan`` says.
        trainable: what to train: a tree of bool (a prefix of the parameters) or a function of a
            leaf's path. Other leaves are frozen: no gradient, no norm, None in the sum. None trains
            everything. Frozen leaves are **assumed public**, or made from noisy releases.
        constants: pytree of arrays and numbers that ``loss_fn`` captures, declared **public**
            (JAX's by identity, NumPy's by content, numbers by value). Others are assumed public,
            and named so by the plan and the ledger; one that holds the batch's rows, or a statistic
            of them, is refused.
        most_records: the largest number of records of one draw, public: the rounding of the sum is
            bounded for so many, and counts in ``Summed.l2``. A Mechanism gives its own.
        rng_name: the argument that takes a key, or names to look for; None for none.
        mesh: its devices share the rows of every batch: each clips its own, and the sums are added.
            None: the mesh of the records and parameters of a draw, if any.
        data_axes: the axes of the mesh that rows are sharded over; None: "data", else the first.

    Returns:
        ``(params, data, draw, rng=None) -> Summed``, where ``draw`` may be a mask, and is left out
        where the data are a ``Batch``; see ``ClippedGrad``.

    Raises:
        ValueError: an argument is not what it should be, named with its value.

    Example:
        >>> loss_fn = lambda w, x, y: (x @ w - y) ** 2
        >>> grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.1))
        >>> batch = (jnp.ones((8, 3)), jnp.ones(8))
        >>> summed, info = grad_fn.with_info(jnp.zeros(3), batch, "all")
        >>> print(f"{summed.l2:.3f}")  # the clip norm, and a share of it for rounding
        0.104
        >>> info.norms.shape
        (8,)
    """
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn must be a function (params, example), got {arguments.described(loss_fn)}"
        )
    if not callable(getattr(rule, "factors", None)) or not callable(getattr(rule, "l2", None)):
        raise ValueError(f"rule must be a clipping rule such as jaxdp.clip(0.1), got {rule!r}")
    arguments.one_of("engine", engine, ("auto", "ghost", "vmap"))
    if microbatch_size is not None:
        microbatch_size = arguments.integer("microbatch_size", microbatch_size, least=1)
    most = arguments.integer("most_records", most_records, least=1)
    chosen = options.checked_trainable(trainable)
    form, public = losses.form_of(loss_fn, rng_name), losses.declared_constants(constants, loss_fn)
    try:
        hash(loss_fn)
    except TypeError:  # such as a module with arrays; a bound method is told by its object
        loss_fn = types.MethodType(type(loss_fn).__call__, loss_fn)
    found = None if mesh is None else placement.placement(mesh, data_axes)
    return ClippedGrad(loss_fn, rule, engine, microbatch_size, chosen, form, public, most, found)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def sum_physical_batch(
    grad_fn: ClippedGrad,
    gathered: bool,
    return_info: bool,
    params: PyTree,
    data: PyTree,
    indices: jax.Array,
    mask: jax.Array,
    rng: jax.Array | None,
    scale: PyTree,
    bound: jax.Array | None,
    limit: float | jax.Array,
) -> tuple[tuple[PyTree, jax.Array | None], ClipInfo]:
    """The (sum, votes) of one physical batch of a draw, compiled once for all.

    The ``ClipInfo`` holds its plan alone unless ``return_info``.
    """
    summed, info = grad_fn.clip_physical_batch(
        params,
        data,
        indices,
        mask,
        rng,
        gathered=gathered,
        scale=scale,
        bound=bound,
        limit=limit,
    )
    if not return_info:
        info = jax.tree.map(lambda leaf: None, info)
    return (_sharded(grad_fn, summed.value), summed.votes), info


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _add(
    grad_fn: ClippedGrad, totals: tuple[PyTree, jax.Array | None], lost: PyTree, more: PyTree
) -> tuple[PyTree, PyTree]:
    """The totals with the sum and votes of a further physical batch, and what rounding took.

    Compensated, so that rounding does not grow with the number of physical batches.
    """
    total, lost = rounding.add_compensated(totals[0], lost, more[0])
    votes = None if totals[1] is None else totals[1] + more[1]
    return (_sharded(grad_fn, total), votes), _sharded(grad_fn, lost)


@functools.partial(jax.jit, static_argnums=0)
def _zeros(grad_fn: ClippedGrad, total: PyTree) -> PyTree:
    return _sharded(grad_fn, jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), total))


def _sharded(grad_fn: ClippedGrad, total: PyTree) -> PyTree:
    """The sum, sharded as the parameters are."""
    if grad_fn.placement is None:
        return total
    leaves, structure = jax.tree.flatten(total, is_leaf=lambda leaf: leaf is None)
    return jax.tree.unflatten(structure, grad_fn.placement.with_sharding(leaves))
