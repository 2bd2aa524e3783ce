"""Sums of clipped per-example gradients: the function of a loss and a rule that computes them."""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxdp import _rows, arguments
from jaxdp.clipping import across, losses, options, reduce, rounding
from jaxdp.clipping.ghost import program, run
from jaxdp.clipping.ghost.plan import Plan, Uses, find_uses, plan_leaves
from jaxdp.clipping.rules import Rule
from jaxdp.devices import placement
from jaxdp.devices.placement import Placement
from jaxdp.types import Batch, ClipInfo, Draw, PyTree, Summed

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
    moves the rounding of the other rows' sum (docs/clip_bound.md has the proof). Masked rows, and
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
        batch: PyTree,
        mask: ArrayLike | str | None = None,
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
                (it captures a traced array, rows of the batch or a statistic of them, communicates
                over an axis, calls back to Python, or uses ``custom_vmap``); the batch is ragged;
                the mask is missing or has another shape or dtype; ``rng`` is missing or not wanted;
                a bound is not a number in [1e-10, 1e10]; the rows are no multiple of the mesh's
                devices.
        """
        options.check_arrays(params)
        data, keep = options.rows_and_mask(batch, mask)
        options.check_rng(rng, self.form.rng)
        data, size = jax.tree.map(jnp.asarray, data), keep.shape[0]
        given = scale, bound
        bound, scale = options.checked_bound(bound), options.checked_scale(scale)
        rounding.check_records(size, self.most_records)
        rows = data, None if rng is None else jax.random.split(rng, size)
        with losses.comparing(data):
            if size:
                clipped, info = self.one_pass(
                    params, rows, None, keep, None, gathered=True, scale=scale, bound=bound
                )
            else:
                clipped, info = self._of_no_rows(params, rows, scale, bound)
        summed = self.summed(params, clipped.total, clipped.votes, scale, bound, drawn=False)
        if not isinstance(batch, Batch) or (ticket := batch.ticket) is None:
            return summed, info
        losses.note_assumed(ticket, info.plan)
        options.note_given(ticket, lambda: self.rule.l2(self.trained(params)), *given)
        return summed.carrying(ticket, passes=frozenset([batch.number])), info

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
                the loss captures records of ``data`` or a statistic of them.
        """
        _rows.check_records(data, draw.num_records)
        grad_fn, (_, data) = self.placed(params, data)
        return grad_fn.sum_passes(
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
        """As ``sum``, with the data of each physical batch of the draw given separately.

        These are all records each time or, if ``gathered``, the rows that ``draw.indices`` names,
        whose sum brings no ticket.
        """
        options.check_arrays(params)
        options.check_rng(rng, self.form.rng)
        rounding.check_records(int(np.count_nonzero(draw.mask)), self.most_records)
        given = scale, bound
        bound, scale = options.checked_bound(bound), options.checked_scale(scale)
        grad_fn, (there,) = self.placed(params)
        place = grad_fn.placement
        with placement.using_mesh(place.mesh if place else None):
            totals, plan = nothing(grad_fn, there), ()
        infos: list[ClipInfo] = []
        for data, *rows in zip(passes, draw.positions(gathered), draw.mask, strict=False):
            if not gathered and place is not None:
                rows = place.pad(*rows)
            with placement.using_mesh(place.mesh if place else None), losses.comparing(data):
                totals, info = add_pass(
                    grad_fn, gathered, told, totals, there, data, *rows, rng, scale, bound
                )
            plan = info.plan
            infos += [info] if told else []
        losses.note_assumed(draw.ticket, plan)
        options.note_given(draw.ticket, lambda: self.rule.l2(self.trained(params)), *given)
        total, lost, votes = totals
        with placement.using_mesh(place.mesh if place else None):
            total = _compensated(total, lost)
        total = placement.sharded_like(total, params)
        drawn = not gathered or (place is not None and place.from_trainer)
        summed = grad_fn.summed(params, total, votes, scale, bound, drawn)
        if gathered:  # elsewhere: that these are the rows of the draw is not seen
            return summed, infos
        return summed.carrying(draw.ticket, passes=frozenset(range(len(draw.indices)))), infos

    def one_pass(
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
    ) -> tuple[reduce.Clipped, ClipInfo]:
        """The clipped sum of one physical batch, to be called inside ``jit``.

        ``data`` are all records or, if ``gathered``, the rows at ``indices``; without ``indices``
        the pair of the rows and their keys [m], or None.
        """
        place = self.placement
        on_mesh = across.is_around(place)
        if place is not None and on_mesh and place.records and not gathered:
            assert indices is not None
            data, gathered = across.gathered(place, data, indices), True

        def of_device(params: PyTree, rows: PyTree, shared: PyTree) -> PyTree:
            (indices, mask, own), (whole, scale, bound, rng) = rows, shared
            if indices is None:
                batch, keys = own
            else:
                batch = own if gathered else jax.tree.map(lambda rows: rows[indices], whole)
                keys = None if rng is None else _rows.folded(rng, indices)
            return self._of_rows(params, (batch, keys), mask, scale, bound)

        own, whole = (data, None) if gathered else (None, data)
        rows, shared = (indices, mask, own), (whole, scale, bound, rng)
        if place is not None and on_mesh:
            return across.over_devices(place, of_device, params, rows, shared)
        return across.untyped(of_device, params, rows, shared)

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
        size = _rows.rows("batch", data)
        key = (
            jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
            if self.takes_rng
            else None
        )
        rows = self._rows_at_once(-(-size // self._devices))
        with losses.comparing(data):
            return self._planned(params, (options.example_shapes(data), key), rows)[2]

    def trained(self, params: PyTree) -> PyTree:
        """The parameters with None at frozen leaves, as the optimizer sees them."""
        leaves, structure = jax.tree.flatten(params)
        flags = options.trained_flags(self.trainable, params)
        kept = [leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)]
        return jax.tree.unflatten(structure, kept)

    def placed(self, *trees: PyTree) -> tuple["ClippedGrad", tuple[PyTree, ...]]:
        """The gradient for parameters (and records) where they lie, and these on one mesh."""
        place = placement.resolve_placement(self.placement, *trees)
        if place is None:
            return self, trees
        return dataclasses.replace(self, placement=place), tuple(map(place.put, trees))

    def summed(
        self,
        params: PyTree,
        total: PyTree,
        votes: jax.Array,
        scale: PyTree = None,
        bound: jax.Array | None = None,
        drawn: bool = True,
    ) -> Summed:
        """The ``Summed`` of a clipped sum; ``drawn`` as for ``rounding.error_of_sum``."""
        l2 = self.rule.l2(self.trained(params)) if bound is None else bound
        l2 = l2 * (1.0 + rounding.error_of_sum(self.most_records, self._devices, drawn))
        return Summed(total, l2, scale, None if bound is None else votes)

    def _of_no_rows(
        self, params: PyTree, rows: PyTree, scale: PyTree, bound: jax.Array | None
    ) -> tuple[reduce.Clipped, ClipInfo]:
        """Zeros, and leaves [0, ...], by the shapes of one row: JAX refuses empty arrays."""
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), rows)
        of_rows = functools.partial(self._of_rows, params, scale=scale, bound=bound)
        clipped, info = jax.eval_shape(of_rows, one, jax.ShapeDtypeStruct((1,), jnp.bool_))
        none = jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape[1:]), leaf.dtype), info)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), clipped)
        return zeros._replace(norms=none.norms, clipped=none.clipped), none

    def _of_rows(
        self, params: PyTree, rows: PyTree, mask: jax.Array, scale: PyTree, bound: jax.Array | None
    ) -> tuple[reduce.Clipped, ClipInfo]:
        """The clipped sum over rows [m, ...] of one device, by microbatches; to be traced."""

        def microbatch(rows: PyTree, mask: jax.Array) -> tuple[reduce.Clipped, ClipInfo]:
            # The plan, then every row's gradients in the form that it says, then their sum.
            loss, found, decided = self._planned(
                params, options.example_shapes(rows), mask.shape[0]
            )
            leaves, structure = jax.tree.flatten(params)
            losses, rest, grads = run.per_example_gradients(
                loss, found, decided, leaves, jax.tree.leaves(rows), across.cuts(self.placement)
            )
            scales: list[jax.Array | None] | None = None
            if scale is not None:
                each = iter(options.scale_leaves(scale, self.trained(params)))
                flags = options.trained_flags(self.trainable, params)
                scales = [next(each) if flag else None for flag in flags]
            clipped = reduce.clipped_sum(self.rule, grads, structure, mask, scales, bound)
            aux = jax.tree.unflatten(loss.out_tree, [losses, *rest])[1]
            return clipped, ClipInfo(clipped.norms, losses, clipped.clipped, mask, aux, decided)

        size, chunk = mask.shape[0], self._rows_at_once(mask.shape[0])
        if chunk == size:
            return microbatch(rows, mask)
        # The last is filled up with a record that the mask leaves out: a loss may know no zeros.
        if missing := -size % chunk:
            rows = jax.tree.map(lambda leaf: jnp.concatenate([leaf, *[leaf[:1]] * missing]), rows)
            mask = jnp.concatenate([mask, jnp.zeros(missing, bool)])
        chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), (rows, mask))

        def add(totals: Totals, chunk: tuple[PyTree, jax.Array]) -> tuple[Totals, ClipInfo]:
            clipped, info = microbatch(*chunk)
            return _accumulated(totals, clipped), info

        (total, lost, votes), infos = jax.lax.scan(add, nothing(self, params), chunks)
        info = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:size], infos)
        return reduce.Clipped(_compensated(total, lost), info.norms, info.clipped, votes), info

    def _planned(
        self, params: PyTree, rows: PyTree, size: int
    ) -> tuple[program.Traced, Uses, Plan]:
        """The traced loss of one example, its uses of parameters, and the engine of each.

        Args:
            params: the parameters.
            rows: shapes of one example and of its key, or None.
            size: rows that are worked on together.

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
                error.add_note(
                    f"jaxdp handed the loss one example: {options.describe_shapes(args[0])}"
                )
                raise
            return options.checked_result(result)

        traced = program.trace(loss, params, *args)
        constants = losses.inspect_loss(traced.closed, self.constants, loss, flags, params, args)
        if not program.depends(traced.program.outs[0], traced.of_example):
            raise ValueError("loss_fn must depend on its example, but its result does not")
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
        used = Uses() if self.engine == "vmap" else find_uses(traced, shapes)
        each = plan_leaves(options.paths(params), shapes, flags, used, size, self.engine)
        return traced, used, Plan((*each, *constants))

    def _rows_at_once(self, size: int) -> int:
        """Rows of one microbatch of a device that has ``size`` rows."""
        if self.microbatch_size is None:
            return size
        return min(size, -(-self.microbatch_size // self._devices))

    @property
    def _devices(self) -> int:
        return 1 if self.placement is None else self.placement.devices


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
        microbatch_size: rows worked on at a time inside one call, to bound the memory; None: all.
        trainable: what to train: a tree of bool (a prefix of the parameters) or a function of a
            leaf's path. Other leaves are frozen: no gradient, no norm, None in the sum. None trains
            everything. Frozen leaves are **assumed public**, computed from no record.
        constants: pytree of arrays and numbers that ``loss_fn`` captures, declared **public**
            (JAX's by identity, NumPy's by content, numbers by value). Others are assumed public,
            and named so by the plan and the ledger; one that holds the batch's rows, or a statistic
            of them, is refused.
        most_records: the largest number of records of one draw, public: the rounding of the sum is
            bounded for so many, and counts in ``Summed.l2``. A Mechanism gives its own.
        rng_name: the argument that takes a key, or names to look for; None for none.
        mesh: its devices share the rows of every batch: each clips its own, and the sums are added.
            None: where ``sum`` is given arrays that lie on a mesh, that one.
        data_axes: the axes of the mesh that rows are cut over; None takes "data", else the first.

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


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def add_pass(
    grad_fn: ClippedGrad,
    gathered: bool,
    told: bool,
    totals: Totals,
    params: PyTree,
    data: PyTree,
    indices: jax.Array,
    mask: jax.Array,
    rng: jax.Array | None,
    scale: PyTree,
    bound: jax.Array | None,
) -> tuple[Totals, ClipInfo]:
    """The totals with one physical batch of a draw added, compiled once for all.

    The ``ClipInfo`` holds its plan alone unless ``told``.
    """
    clipped, info = grad_fn.one_pass(
        params, data, indices, mask, rng, gathered=gathered, scale=scale, bound=bound
    )
    if not told:
        info = jax.tree.map(lambda leaf: None, info)
    total, lost, votes = _accumulated(totals, clipped)
    return (_held(grad_fn, total), _held(grad_fn, lost), votes), info


def _accumulated(totals: Totals, clipped: reduce.Clipped) -> Totals:
    """The totals and one more sum; compensated, so rounding does not grow with their number."""
    total, lost, votes = totals
    return *rounding.add_compensated(total, lost, clipped.total), votes + clipped.votes


@functools.partial(jax.jit, static_argnums=0)
def nothing(grad_fn: ClippedGrad, params: PyTree) -> Totals:
    """The totals before the first physical batch."""
    trained = grad_fn.trained(params)
    start, again = (
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained) for _ in range(2)
    )
    return _held(grad_fn, start), _held(grad_fn, again), jnp.zeros([], jnp.float32)


def _held(grad_fn: ClippedGrad, total: PyTree) -> PyTree:
    """The sum, cut as the parameters are."""
    if grad_fn.placement is None:
        return total
    leaves, structure = jax.tree.flatten(total, is_leaf=lambda leaf: leaf is None)
    return jax.tree.unflatten(structure, grad_fn.placement.with_sharding(leaves))
