"""The protocol of noise, and the link that adds it: from a clipped sum to a private gradient.

``privatize`` is the first link of an optax chain, whatever the noise: float32 Gaussians that are
independent (here) or correlated over the steps (``correlated``), or integers of a cryptographic
generator (``grid``).
"""

import abc
import dataclasses
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp import arguments
from jaxdp.devices import shards
from jaxdp.ledger import links
from jaxdp.ledger.tickets import NoiseKey, Ticket
from jaxdp.noise.normals import add_normals
from jaxdp.schedules import NoiseSchedule
from jaxdp.types import ExtraArgument, PyTree, Summed

_FAST = re.compile(r"--xla_cpu_enable_fast_math\b(\S*)")
_OFF = ("false", "0")


class PrivatizeState(NamedTuple):
    """State of ``privatize``. It holds nothing secret: keys come with the tickets.

    Attributes:
        last: uint32 [2], the tag of the last key that was used: the same key in two updates in a
            row gives NaN, also inside ``jit``.
        leaves: int32 scalar; how many parameters it was made for, to tell frozen ones apart.
    """

    last: jax.Array
    leaves: jax.Array


class Axes(NamedTuple):
    """The mesh axes around an update, as ``privatize`` takes them."""

    sharded_over: tuple[str, ...] = ()
    replicated_over: tuple[str, ...] = ()


class NoiseRequest(NamedTuple):
    """A release whose ticket is spent, as ``Noise.add`` takes it.

    Attributes:
        summed: the clipped sum.
        key: the noise key of its step.
        words: uint32 [2], the threefry key of the part.
        multiplier: float32 scalar, of the step; NaN inside ``jit`` if another one was charged.
        axes: of the mesh around the update.
    """

    summed: Summed
    key: NoiseKey
    words: jax.Array
    multiplier: jax.Array
    axes: Axes


@dataclasses.dataclass(frozen=True)
class Noise(abc.ABC):
    """Noise for a clipped sum: what is added, how large it is and what it costs.

    A kind of noise is a subclass: ``jaxdp.privatize(noise, expected_batch_size)`` adds it. Its
    constructor refuses numbers that no proof covers. The events that a ledger is charged are those
    of jaxdp's own kinds, which a ``Mechanism`` takes; a kind of yours may add their noise in
    another way, and the ledger says that this was not verified.

    Attributes:
        noise_multiplier: standard deviation over ``l2`` of what the key of a step makes, at least
            0; or one a step.
        part: the name of the noisy sum among the parts of a step's event.
    """

    noise_multiplier: float | NoiseSchedule

    def __post_init__(self) -> None:
        refuse_injected(noise_multiplier=self.noise_multiplier)
        if not isinstance(self.noise_multiplier, NoiseSchedule):
            arguments.fields(self, noise_multiplier=arguments.non_negative)

    @property
    @abc.abstractmethod
    def part(self) -> str:
        """The name of the noisy sum among the parts of a step's event."""

    @abc.abstractmethod
    def init(self, params: PyTree) -> PyTree:
        """The state before the first step; ValueError for parameters it has no room for.

        It is a pytree with ``leaves``, the number of arrays that it was made for.
        """

    def check(self, summed: Summed, state: PyTree, axes: Axes) -> None:  # noqa: B027
        """Raises ValueError for a sum that it cannot be added to, before the ticket is spent."""

    @abc.abstractmethod
    def add(self, state: PyTree, request: NoiseRequest) -> tuple[PyTree, PyTree]:
        """Returns (the noisy sum, the next state)."""

    @abc.abstractmethod
    def std(self, params: PyTree, l2: float, step: int | jax.Array) -> float | jax.Array:
        """Standard deviation on the sum, of shapes ``params`` and sensitivity ``l2``; public."""

    def description(self, parameters: int) -> str:
        """A sentence on the noise of so many parameters, for reports; "" where none is needed."""
        return ""

    def multiplier(self, step: int) -> float:
        """The noise multiplier of a step."""
        given = self.noise_multiplier
        return given(step) if isinstance(given, NoiseSchedule) else given

    def multiplier_at(self, step: int | jax.Array) -> float | jax.Array:
        """The noise multiplier of a step that may be traced: float32 of a schedule, NaN past it."""
        given = self.noise_multiplier
        if not isinstance(given, NoiseSchedule):
            return given
        return jnp.take(given.table(), jnp.asarray(step), mode="fill", fill_value=jnp.nan)


def privatize(
    noise: float | NoiseSchedule | Noise,
    expected_batch_size: float,
    *,
    sharded_over: tuple[str, ...] = (),
    replicated_over: tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    """Adds N(0, (noise · l2)²) to a ``Summed``, or another noise; divides by the batch size.

    Formal guarantee: one update releases a Gaussian mechanism with multiplier ``noise`` relative to
    the largest contribution ``l2`` of one record (Abadi et al. 2016, arXiv:1607.00133,
    Algorithm 1), under every relation. The divisor is a public constant, so dividing is
    post-processing; a realised batch size would not be. Noise is float32 whatever the dtype of the
    parameters, independent in every coordinate, leaf and update, also when the batch is empty. For
    another noise the guarantee is what its class says (``jaxdp.noise``).

    The noise key is the ticket's of the draw: the ``Summed`` brings it, and it is spent here. In a
    function that the caller compiles it is the extra argument ``key``, from ``draw.key()``.

    Args:
        noise: the noise multiplier, standard deviation over ``l2``, the one that the ticket was
            charged for; 0 adds none (epsilon is then infinite), a ``NoiseSchedule`` one a step; or
            a ``jaxdp.noise.Noise``, such as ``jaxdp.noise.IntegerNoise(1.0)``.
        expected_batch_size: the public divisor, sampling_prob · dataset_size.
        sharded_over: inside ``shard_map`` without ``check_vma``, or ``pmap``: the mesh axes over
            which the sum is cut, each device holding another part: each gets other noise.
        replicated_over: the axes over which every device holds the same sum (after ``psum``): all
            get the same noise.

    Returns:
        A transformation whose ``update`` takes a ``Summed`` and returns a plain pytree with the
        parameters' dtypes. Put it first in a chain.

    Raises:
        ValueError: a negative multiplier or a non-positive batch size; at update: no ticket and no
            key, one that was spent or charged for another multiplier; shapes that differ from the
            parameters'; members of a ``vmap`` with one key; a mesh axis that is neither sharded nor
            replicated; ``grad`` or ``value_fn`` (what a line search asks for is computed from
            data, and releasing it is another event; a ``value`` is assumed public, and the ledger
            says so); XLA's fast math is switched on.
        TypeError: at update, when handed anything but a ``Summed``.

    Example:
        >>> data = {"x": jnp.ones((100, 3)), "y": jnp.ones(100)}
        >>> mechanism = jaxdp.dp_sgd(
        ...     noise_multiplier=1.0, l2_clip_norm=0.1, batch_size=10, dataset_size=100
        ... )
        >>> loss_fn = lambda w, example: (example["x"] @ w - example["y"]) ** 2
        >>> grad_fn = mechanism.clipped_grad(loss_fn)
        >>> sampler = mechanism.sampler(100)
        >>> tx = optax.chain(jaxdp.privatize(1.0, expected_batch_size=10), optax.adam(1e-3))
        >>> params = jnp.zeros(3)
        >>> opt_state = tx.init(params)
        >>> summed = grad_fn(params, data, sampler.draw())
        >>> updates, opt_state = tx.update(summed, opt_state, params)
        >>> updates.shape
        (3,)
    """
    refuse_injected(noise_multiplier=noise, expected_batch_size=expected_batch_size)
    check_arithmetic()
    adds = noise if isinstance(noise, Noise) else IndependentNoise(noise)
    divisor = arguments.positive("expected_batch_size", expected_batch_size)
    axes = Axes(sharded_over, replicated_over)
    # A subclass of the user's own adds what it likes: it is watched, as a link of the user's own.
    trusted = links.is_own(type(adds))

    def init(params: PyTree) -> PyTree:
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                name = jax.tree_util.keystr(path)
                raise ValueError(
                    f"params must be floating-point arrays, got {jnp.result_type(leaf)} at {name}"
                )
        return adds.init(params)

    def update(
        updates: Summed,
        state: PyTree,
        params: PyTree | None = None,
        *,
        key: NoiseKey | None = None,
        **extra: PyTree,
    ) -> tuple[PyTree, PyTree]:
        # Whatever can be refused is refused before the ticket is spent; the states of the other
        # links, too, would not fit a sum of other leaves.
        check_update(updates, params, extra)
        leaves = len(jax.tree.leaves(updates.value))
        if not isinstance(state.leaves, jax.core.Tracer) and int(state.leaves) != leaves:
            raise ValueError(
                "state must be made for the parameters that are trained, "
                "tx.init(grad_fn.trained(params)), with None at frozen ones; got one of "
                f"{int(state.leaves)} arrays for a sum of {leaves}"
            )
        adds.check(updates, state, axes)
        if key is None and updates.ticket is not None:
            found = links.ChainRecord(multipliers={adds.part: adds.multiplier})
            found.require_charged(updates.ticket.step, updates.ticket.multipliers)
            if not trusted:
                updates.ticket.note("trusted", links.OTHERS)

        # The multiplier is the one that was charged: an error, or NaN inside jit.
        key = noise_key(updates, key, (state, params))
        words, charged = key.part(adds.part)
        links.record_noise(adds.part, adds.multiplier)
        multiplier = jnp.asarray(adds.multiplier_at(key.step), jnp.float32)
        same = multiplier == charged
        if not isinstance(same, jax.core.Tracer) and not bool(same):
            raise ValueError(
                f"noise_multiplier must be the one that the step was charged for, {charged}, got "
                f"{multiplier}: take mechanism.privatize() of the mechanism that drew"
            )
        agreed = jnp.where(same, multiplier, jnp.nan)

        # The noisy mean, unscaled, with the parameters' dtypes.
        noisy, state = adds.add(state, NoiseRequest(updates, key, words, agreed, axes))
        mean = jax.tree.map(lambda leaf: leaf / divisor, noisy)
        if updates.unscale is not None:
            mean = jax.tree.map(jnp.multiply, mean, updates.unscale)
        like = updates.value if params is None else params
        return jax.tree.map(lambda leaf, param: leaf.astype(param.dtype), mean, like), state

    return optax.GradientTransformationExtraArgs(
        init, links.trusted_link(update) if trusted else update
    )


class IndependentNoise(Noise):
    """Float32 Gaussian noise, independent in every coordinate and step: that of ``privatize``."""

    part = "gradient"

    def init(self, params: PyTree) -> PrivatizeState:
        """A state that no update has used."""
        leaves = jnp.asarray(len(jax.tree.leaves(params)), jnp.int32)
        return PrivatizeState(jnp.zeros(2, jnp.uint32), leaves)

    def add(self, state: PrivatizeState, request: NoiseRequest) -> tuple[PyTree, PrivatizeState]:
        """Returns (the noisy sum, the next state); NaN for the key of the step before."""
        tag, summed = jnp.asarray(request.key.tag), request.summed
        std = request.multiplier * summed.l2 * jnp.where(jnp.all(tag == state.last), jnp.nan, 1.0)
        noisy = add_normals(summed.value, std, request.words, *request.axes)
        return noisy, PrivatizeState(tag, state.leaves)

    def std(self, params: PyTree, l2: float, step: int | jax.Array) -> float | jax.Array:
        """The multiplier times ``l2``."""
        return l2 * self.multiplier_at(step)


LEAKED = (
    "a sum came with un-noised means, by clipping that is not jaxdp's own: that a record adds at "
    "most l2 to it was not verified, and nothing covers what is computed from the means"
)


def noise_key(summed: Summed, key: NoiseKey | None, *around: PyTree) -> NoiseKey:
    """The noise key of a sum: the one given, or that of its ticket, which is spent.

    Args:
        summed: the sum.
        key: of a compiled update, or None.
        around: what else the update works on, which tells whether ``jit`` is around it.

    Raises:
        ValueError: there is neither, or both; a ticket inside ``jit``, where its key would be
            compiled in and used again by every call; a sum of one process among several.
    """
    ticket = summed.ticket  # asked once: it compares the sum's arrays
    if key is not None:
        if not isinstance(key, NoiseKey):
            raise ValueError(
                f"key must be the noise key of a draw, from draw.key(), got {type(key).__name__}"
            )
        if ticket is not None:
            raise ValueError("key must not be given with a Summed that brings its own ticket")
        return key
    if ticket is None:
        raise ValueError(
            "key must be given to an update that you compile yourself: make it outside jit with "
            "draw.key(), one for every call, pass it in as an argument and on as "
            "tx.update(..., key=key). Outside jit sum with grad_fn(params, data, draw), or "
            "over draw.batches(data): the draw brings its ticket, to a sum of these batches that "
            "nobody changed. Got a sum without one"
        )
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((summed.value, around))):
        raise ValueError(
            "draw must not be used inside jit: its noise key would be compiled in, and every call "
            "would add the same noise. Pass draw.key() in as an argument (key=)"
        )
    shards.check_shared(summed.value)
    if summed.leaked is not None:
        ticket.note("trusted", LEAKED)
    return ticket.spend("an update", verified=True)


def check_update(updates: PyTree, params: PyTree | None, extra: dict[str, PyTree]) -> None:
    """Raises TypeError for what is no ``Summed``, ValueError for what is computed from data."""
    if not isinstance(updates, Summed):
        raise TypeError(
            "privatize must come first in the chain and take the Summed that clipping returns, "
            f"got {type(updates).__name__}: gradients such as jax.grad's are not clipped example "
            "by example, and have no known sensitivity. Take jaxdp.clipped_grad(loss_fn, rule) in "
            "place of jax.grad, or put mechanism.clip_and_sum() before privatize, for per-example "
            "gradients"
        )
    if updates.ticket is not None:
        note_extra_args(updates.ticket, extra)
    for name in ("grad", "value_fn"):
        if extra.get(name) is not None:
            raise ValueError(
                f"{name} must not be passed to a private chain: it is computed from data without "
                "noise, and no event is charged for it"
            )
    if params is None:
        return
    trained: Any = jax.tree.structure(params)
    if trained != jax.tree.structure(updates.value):
        raise ValueError(
            "params must have the structure of the sum. With frozen parameters call "
            "tx.init(grad_fn.trained(params)) and tx.update(..., grad_fn.trained(params)); "
            f"jaxdp.compile_update does the latter; got {jax.tree.structure(params)} for a sum of "
            f"{jax.tree.structure(updates.value)}"
        )
    wanted = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), summed in zip(wanted, jax.tree.leaves(updates.value), strict=True):
        if jnp.shape(leaf) != jnp.shape(summed):
            raise ValueError(
                f"the sum must have the parameters' shapes, {list(jnp.shape(leaf))} at "
                f"{jax.tree_util.keystr(path) or 'the root'}, got {list(jnp.shape(summed))}"
            )


def note_extra_args(ticket: Ticket, extra: dict[str, PyTree]) -> None:
    """Tells the ledger of arguments that the caller handed to the links after the noise.

    Args:
        ticket: of the step.
        extra: the arguments; an ``ExtraArgument`` of jaxdp's own says all that it assumes.
    """
    for name, value in extra.items():
        if isinstance(value, ExtraArgument):
            value.note(ticket)
            if not links.is_own(type(value)):
                ticket.note(
                    "trusted",
                    f"the optimizer was handed {name}=, of a class of the caller's: that it costs "
                    "and assumes what it says was not verified",
                )
        elif value is not None:
            ticket.note(
                "trusted",
                f"the optimizer was handed {name}=: assumed public, computed from released "
                "parameters and public examples alone",
            )


def refuse_injected(**numbers: Any) -> None:
    """Raises ValueError for a number that is an array, which the ledger could not follow."""
    for name, value in numbers.items():
        if isinstance(value, jax.Array):
            raise ValueError(
                f"{name} must be a Python number, public and fixed, got a jax array: it is not "
                "injectable, for the ledger could not follow it"
            )


def check_arithmetic() -> None:
    """Raises ValueError where XLA is told to compute with other roundings than float32's.

    Every bound on a sum counts on float32, rounded to nearest. One flag that switches it on is
    enough: which of several XLA follows is not looked at.

    Raises:
        ValueError: it is.
    """
    # The flags of the environment, or of the file that it names in their place.
    flags = os.environ.get("XLA_FLAGS", "")
    if flags.strip() and not flags.lstrip().startswith("-"):
        try:
            flags = pathlib.Path(flags).read_text(encoding="utf-8", errors="replace")
        except OSError:  # XLA has none of it, either
            flags = ""
    found = [value.strip("=\"'").lower() for value in _FAST.findall(flags)]
    if any(value not in _OFF for value in found):
        raise ValueError(
            "XLA_FLAGS must not have xla_cpu_enable_fast_math: float32 then has other roundings "
            "than what one record adds is bounded with (sums on a grid were 63 cells from where "
            "they should be, in place of 1/2); got it switched on"
        )
