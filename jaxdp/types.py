"""Data types that jaxdp's modules exchange: clipped sums, batches, draws, step information."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import arguments
from jaxdp.ledger.tickets import NoiseKey, Ticket

PyTree = Any
# The loss of one example: (params, example) or (params, *example), with a key by name if it likes.
LossFn = Callable[..., jax.Array]
# A compiled step gathers by indices of 32 bits. Floating-point numbers count to 2^53.
MOST_ON_DEVICE, MOST_RECORDS = 2**31 - 1, 2**53
OTHER_RECORDS = "data must hold the records that the sampler draws from, got another number of them"

_NEVER_FLATTENED = (
    "Summed holds an un-noised sum, which nothing but privatize may open. Put privatize (or "
    "mechanism.privatize()) first in the optax chain, before scale, clip, MultiSteps, masked, "
    "multi_transform and apply_if_finite, and hand the chain the Summed itself, outside jit: "
    "jaxdp.compile_update(tx) compiles what comes after. In a step that you compile yourself call "
    "the gradient and tx.update inside it, with key=draw.key() as an argument. Flax's "
    "TrainState.apply_gradients, nnx.Optimizer.update and wrappers of optax take what is noised: "
    "noisy, noise_state = mechanism.privatize().update(summed, noise_state)"
)


@dataclasses.dataclass(frozen=True, eq=False)
class OfTicket:
    """Base of draws, batches and sums: each carries its draw's ticket as long as it is unchanged.

    Attributes:
        ticket: the right to release the draw once. None for what was made by hand or inside
            ``jit``, rebuilt with other fields (``dataclasses.replace``), or has another array in
            place of one that it was made with.
    """

    __match_args__: ClassVar[tuple[str, ...]]
    _made: tuple[Ticket, list[Any]] | None = dataclasses.field(default=None, init=False, repr=False)

    @property
    def ticket(self) -> Ticket | None:
        """The right to release the draw once; None where an array or a field was exchanged."""
        if self._made is None:
            return None
        ticket, arrays = self._made
        given = [getattr(self, name) for name in self.__match_args__]
        return ticket if same(arrays, given) else None

    def carrying(self, ticket: Ticket | None, **more: Any) -> Self:
        """A copy that carries a ticket; the caller has seen that it is made of that ticket's draw.

        Args:
            ticket: the draw's ticket.
            more: values of other fields that the constructor does not take.
        """
        made = dataclasses.replace(self)
        # Dataclasses keep the names of what their constructor takes.
        leaves = jax.tree.leaves([getattr(made, name) for name in self.__match_args__])
        more["_made"] = None if ticket is None else (ticket, leaves)
        for name, value in more.items():
            object.__setattr__(made, name, value)
        return made


class ExtraArgument:
    """An extra argument of an optax update whose cost or assumptions jaxdp knows.

    An update calls these methods on the host, in this order. What is no ``ExtraArgument`` is
    assumed public, and the ledger says so.
    """

    def check(self, ticket: Ticket) -> None:
        """Raises ValueError if it was charged to another ledger than the update's ticket."""

    def blank(self) -> Self:
        """Returns itself with the types that ``take`` returns, to trace an update; spends none."""
        return self

    def note(self, ticket: Ticket) -> None:
        """Tells the ledger of the update's ticket what it assumes."""

    def take(self) -> Self:
        """Returns itself as the one compiled update gets it; its own ticket, if any, is spent."""
        return self


@dataclasses.dataclass(frozen=True, eq=False)
class Summed(OfTicket):
    """The sum of one draw's clipped per-example gradients, with its own sensitivity.

    Formal guarantee: adding one record to the draw, or removing one, changes ``value`` by at most
    ``l2`` in the Euclidean norm over all leaves together. Replacing a record changes it by a pair
    of such contributions; the accountant, not this class, applies the relation. The rounding of the
    float32 sum is included (docs/proofs/clip_bound.md).

    It cannot be flattened: whatever flattens it as a pytree (``jit``, ``optax.scale`` or
    ``optax.clip`` before the noise) raises an error that names the remedy. Only
    ``jaxdp.privatize``, first in a chain, opens it. Sums over disjoint parts of one draw can be
    added with ``+``.

    Attributes:
        value: pytree shaped like the parameters, float32: the **un-noised** sum. Sensitive.
        l2: scalar; the largest norm by which one record can change ``value``: the rule's bound, and
            the share of it by which a record moves the rounding of the others.
        unscale: pytree shaped like the parameters, or None: the public diagonal by which the
            gradients were divided before clipping, multiplied back after the noise.
        votes: scalar, or None: a sum of ½ for every record whose gradient is within ``l2`` and -½
            for every other, **un-noised**. One record adds at most ½ in absolute value.
        leaked: **un-noised** means that set later clip bounds, as some papers have it; None in
            whatever has a guarantee (a mechanism that names its ``leak`` has none).
        ticket: the draw's, where jaxdp saw that its records were clipped one by one.
        passes: which physical batches of the draw are in it.
        undeclared: (clip bound, rows) of a sum whose largest number of records nobody declared.
        lost: of a sum of parts, what rounding took from ``value``.
    """

    value: PyTree
    l2: float | jax.Array
    unscale: PyTree | None = None
    votes: jax.Array | None = None
    leaked: PyTree = None
    passes: frozenset[int] = dataclasses.field(default=frozenset(), init=False)
    undeclared: tuple[float | jax.Array, int] | None = dataclasses.field(default=None, init=False)
    lost: PyTree = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.l2, jax.Array):
            arguments.positive("l2", self.l2)

    def __add__(self, other: Any) -> "Summed":
        """The sum over two parts of one draw; a record is in one part only, so l2 stays."""
        if not isinstance(other, Summed):
            raise TypeError(f"a Summed can be added to a Summed only, got {type(other).__name__}")
        _check_parts(self, other)
        mine, others = self.votes, other.votes
        votes = None if mine is None or others is None else mine + others
        zeros = jax.tree.map(lambda leaf: 0.0, self.value)
        parts = ((x.value, zeros if x.lost is None else x.lost) for x in (self, other))
        value, lost = _add_pairs(*parts)
        added = dataclasses.replace(self, value=value, votes=votes)
        return added.carrying(self.ticket, passes=self.passes | other.passes, lost=lost)

    def __contains__(self, key: Any) -> bool:
        """False: it has no keys; Flax's TrainState looks for one of its own."""
        return False

    def __repr__(self) -> str:
        # The value is un-noised: a stray print or log line must not release it.
        return f"Summed(value=<sensitive>, l2={self.l2!r}, unscale={self.unscale is not None})"


def never_flattened(cls: type) -> type:
    """Registers a class as a pytree whose flattening raises an error that names the remedy."""

    def refuse(*_: Any) -> Any:
        raise TypeError(_NEVER_FLATTENED)

    jax.tree_util.register_pytree_node(cls, refuse, refuse)
    for name in ("__iter__", "__getitem__", "__mul__", "__rmul__", "__truediv__", "__sub__"):
        setattr(cls, name, refuse)
    return cls


never_flattened(Summed)


def same(some: PyTree, others: PyTree) -> bool:
    """True for two trees of the very same arrays."""
    one, two = jax.tree.leaves(some), jax.tree.leaves(others)
    return len(one) == len(two) and all(a is b for a, b in zip(one, two, strict=True))


def frozen(tree: PyTree) -> PyTree:
    """Makes the NumPy arrays of a tree read-only, and returns the tree."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, np.ndarray):
            leaf.flags.writeable = False
    return tree


def like(value: PyTree, params: PyTree) -> PyTree:
    """The parameters, with None where the sum has None (frozen)."""
    structure: Any = jax.tree.structure(params)
    both = zip(structure.flatten_up_to(value), jax.tree.leaves(params), strict=True)
    return jax.tree.unflatten(structure, [None if v is None else leaf for v, leaf in both])


def filled(moved: PyTree, params: PyTree) -> PyTree:
    """The moved parameters, and the frozen ones where they are None."""
    structure: Any = jax.tree.structure(params)
    both = zip(structure.flatten_up_to(moved), jax.tree.leaves(params), strict=True)
    return jax.tree.unflatten(structure, [leaf if m is None else m for m, leaf in both])


def count_rows(name: str, tree: Any) -> int:
    """The common length m of the first axis of all leaves."""
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(tree)]
    sizes = {shape[0] if shape else -1 for shape in shapes}
    if len(sizes) != 1 or -1 in sizes:
        raise ValueError(
            f"{name} must hold arrays [m, ...] with one and the same m, got shapes {shapes}"
        )
    return int(sizes.pop())


def check_mask(mask: Any, size: int) -> None:
    """Raises ValueError unless the mask is bool [size]."""
    shape, dtype = getattr(mask, "shape", None), getattr(mask, "dtype", type(mask).__name__)
    if shape != (size,) or str(dtype) != "bool":
        found = f"{dtype} {list(shape)}" if shape is not None else dtype
        raise ValueError(f"mask must be bool [{size}], got {found}")


def check_records(data: Any, num_records: int) -> None:
    """Raises ValueError unless the data hold ``num_records`` records."""
    # A gather beyond the end would count the last record again and again.
    if count_rows("data", data) != num_records:
        # Without the numbers: they are private.
        raise ValueError(OTHER_RECORDS)
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(data)):
        require_gatherable(num_records)


def require_gatherable(num_records: int) -> None:
    """Raises ValueError for more records than can be gathered on the device."""
    if num_records > MOST_ON_DEVICE:
        raise ValueError(
            "data on the device must hold fewer than 2**31 records, got more: keep them on the "
            "host, in NumPy arrays, memory maps or a reader, so that a draw's rows are gathered "
            "there"
        )


def positions_for_device(indices: np.ndarray, num_records: int, gathered: bool) -> np.ndarray:
    """Positions [..., m] as a compiled function takes them: int32 [..., m].

    From 2^31 records on uint32 [..., m, 2], the low and the high halves, of which a record's
    randomness is made.

    Args:
        indices: integer [..., m].
        num_records: how many records they were drawn from.
        gathered: False if the function itself is to gather the rows.

    Raises:
        ValueError: it is, and 32 bits do not reach every record.
    """
    if num_records <= MOST_ON_DEVICE:
        return indices
    if not gathered:
        require_gatherable(num_records)
    # Without 64-bit numbers JAX would drop the high halves silently.
    whole = indices.astype(np.uint64)
    halves = (whole & np.uint64(2**32 - 1), whole >> np.uint64(32))
    return np.stack(halves, axis=-1).astype(np.uint32)


def record_keys(rng: jax.Array, indices: jax.Array) -> jax.Array:
    """A JAX key [m] for each record, from its position [m], or [m, 2] of ``positions_for_device``.

    Each position has its own: ``fold_in`` of its low half, and of the high one where it is not 0.
    """
    if indices.ndim == 1:
        return jax.vmap(jax.random.fold_in, (None, 0))(rng, indices)

    def of_one(halves: jax.Array) -> jax.Array:
        low = jax.random.fold_in(rng, halves[0])
        return jnp.where(halves[1] == 0, low, jax.random.fold_in(low, halves[1]))

    return jax.vmap(of_one)(indices)


def _check_parts(one: Summed, other: Summed) -> None:
    """Raises ValueError unless two sums are disjoint parts of one draw."""
    if one.ticket is None or one.ticket is not other.ticket:
        raise ValueError(
            "sums can be added only where they are known to be parts of one draw: those of the "
            "batches of draw.batches(data), outside jit. Got sums of two draws, or of batches made "
            "by hand, changed or gathered from other data: one noise does not cover them"
        )
    if both := one.passes & other.passes:
        raise ValueError(
            f"a physical batch can be in a sum once, got batch {min(both)} of the draw twice: its "
            "records would add more than the clip bound"
        )
    if one.leaked is not None or other.leaked is not None:
        raise ValueError("sums must carry nothing un-noised besides to be added, got leaked means")
    scaled = one.unscale is not None or other.unscale is not None
    if one.l2 is not other.l2 and float(one.l2) != float(other.l2):
        raise ValueError(f"sums must have one l2 to be added, got {one.l2} and {other.l2}")
    if scaled and one.unscale is not other.unscale:
        raise ValueError("sums must have one scale to be added, got two")


@jax.jit
def _add_pairs(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """The sum of two (value, lost) as such a pair: value is rounded once in all.

    Knuth's two-sum (The Art of Computer Programming, vol. 2, 4.2.2, Theorem B): exact in any order
    of the two, so that parts may be added one by one, by halves or from the other end. (The
    engine's ``add_compensated`` takes a small array into a large total alone.)
    """
    both = jax.tree.map(_two_sum, one[0], other[0])
    total, rounded = (jax.tree.map(lambda _, pair, i=i: pair[i], one[0], both) for i in (0, 1))
    lost = jax.tree.map(lambda a, b, c: a + b + c, one[1], other[1], rounded)
    pairs = jax.tree.map(_two_sum, total, lost)
    first, second = (jax.tree.map(lambda _, pair, i=i: pair[i], total, pairs) for i in (0, 1))
    return first, second


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[Any, Any]:
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


@dataclasses.dataclass(frozen=True, eq=False)
class Batch(OfTicket):
    """One physical batch: its rows, and which of them are records. **Sensitive**.

    A pytree, to be passed through ``jit`` as one argument, so that the rows and their mask cannot
    part: a padded row that is taken for a record counts record 0 over and over.
    ``Draw.batches`` makes them.

    Attributes:
        data: pytree of arrays [m, ...], one row an example.
        mask: bool [m]; False marks padding, which contributes nothing.
        number: of the batch in its draw.
        ticket: the draw's, where ``Draw.batches`` gathered it.

    Raises:
        ValueError: the leaves have unequal numbers of rows, or the mask has another shape or dtype.
            (Not checked where JAX itself rebuilds a batch, as in ``vmap``, or where the leaves are
            no arrays, as in ``in_axes``; it is checked again when the batch is summed.)
    """

    data: PyTree
    mask: Any
    number: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        if any(hasattr(leaf, "shape") for leaf in jax.tree.leaves((self.data, self.mask))):
            check_mask(self.mask, count_rows("data", self.data))

    def __repr__(self) -> str:
        # Records: a stray print or log line must not show them.
        return "Batch(data=<sensitive>, mask=<sensitive>)"


def _rebuilt(_: None, parts: Any) -> Batch:
    """A batch of whatever JAX puts in: arrays with more axes, tracers, None or placeholders."""
    batch = object.__new__(Batch)
    object.__setattr__(batch, "data", parts[0])
    object.__setattr__(batch, "mask", parts[1])
    return batch


jax.tree_util.register_pytree_with_keys(
    Batch,
    lambda batch: (
        (
            (jax.tree_util.GetAttrKey("data"), batch.data),
            (jax.tree_util.GetAttrKey("mask"), batch.mask),
        ),
        None,
    ),
    _rebuilt,
    lambda batch: ((batch.data, batch.mask), None),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Draw(OfTicket):
    """The records of one step, in physical batches of one fixed shape.

    ``indices`` alone do not say which rows count: take ``batches``, or hand the draw to
    the gradient, ``grad_fn(params, data, draw)``.

    Attributes:
        indices: int32 [passes, physical_batch_size], int64 from 2^31 records on; padding points at
            record 0.
        mask: bool [passes, physical_batch_size]; False marks padding.
        step: the step that this draw belongs to.
        num_records: how many records it was drawn from. Sensitive under add-or-remove-one.
        ticket: the right to release it once, charged to the ledger. To the sum of a draw that has
            none jaxdp adds no noise.
    """

    indices: np.ndarray = dataclasses.field(repr=False)
    mask: np.ndarray = dataclasses.field(repr=False)
    step: int
    num_records: int = dataclasses.field(repr=False)
    # What its batches are gathered from: one for a draw and its copies (``copy.copy``).
    _data: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def key(self) -> NoiseKey:
        """Spends the draw's ticket: the noise key, for an update that the caller compiles.

        Raises:
            ValueError: there is no ticket, or it was spent before.
        """
        if self.ticket is None:
            raise ValueError("draw must come from a sampler to have a noise key, got one by hand")
        return self.ticket.key()

    def batches(self, data: PyTree) -> Iterator[Batch]:
        """Returns the physical batches of the draw, gathered from ``data``, each with its mask.

        Args:
            data: pytree of arrays [N, ...], NumPy's or JAX's: all records.

        Returns:
            An iterator of ``Batch``, with leaves [physical_batch_size, ...].

        Raises:
            ValueError: ``data`` does not hold the records that were drawn from.
        """
        check_records(data, self.num_records)
        return self._gathered(data)

    def _gathered(self, data: PyTree) -> Iterator[Batch]:
        # In other data, or in another order, a record could be in two batches.
        first = self._data.setdefault("first", jax.tree.leaves(data))
        ticket = self.ticket if same(first, data) else None
        for number, (rows, mask) in enumerate(zip(self.indices, self.mask, strict=True)):
            batch = Batch(frozen(jax.tree.map(lambda leaf, rows=rows: leaf[rows], data)), mask)
            yield batch.carrying(ticket, number=number)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["norms", "losses", "clipped", "mask", "aux"],
    meta_fields=["plan"],
)
@dataclasses.dataclass(frozen=True)
class ClipInfo:
    """Norms and losses of a clipped batch. **Sensitive**: un-noised, never part of a release.

    Attributes:
        norms: float32 [physical_batch_size]; per-example gradient norms before clipping.
        losses: [physical_batch_size]; per-example losses.
        clipped: bool [physical_batch_size]; True where clipping shortened the gradient.
        mask: bool [physical_batch_size]; True in the rows that hold an example.
        aux: the loss's auxiliary output, a pytree of [physical_batch_size, ...], or None.
        plan: how each parameter's gradient was handled, and which arrays the loss captured; the
            one attribute that is public.
    """

    norms: jax.Array = dataclasses.field(repr=False)
    losses: jax.Array = dataclasses.field(repr=False)
    clipped: jax.Array = dataclasses.field(repr=False)
    mask: jax.Array = dataclasses.field(repr=False)
    aux: PyTree = dataclasses.field(default=None, repr=False)
    plan: tuple[Any, ...] = ()


class StepInfo(NamedTuple):
    """Metrics of a step for logging, computed from noisy releases only.

    Attributes:
        update_norm: float32 scalar; norm of the change that the step made to the parameters.
    """

    update_norm: jax.Array
