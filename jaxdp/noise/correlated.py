"""Correlated Gaussian noise on clipped sums: the matrix mechanism.

Over n steps the sums G get the noise C⁻¹Z, with C lower triangular and Z independent normals, so
that what they have in common cancels in the steps to come. Releasing G + C⁻¹Z is releasing CG + Z
(Denisov et al. 2022, arXiv:2202.08312, Section 2), one Gaussian mechanism for the whole run.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import arguments
from jaxdp.ledger.tickets import AGAIN, NoiseKey
from jaxdp.noise.gaussian import Axes, Noise, NoiseRequest
from jaxdp.noise.normals import add_normals
from jaxdp.noise.strategies import BandedInverse, Buffered, Dense, MadeAgain, Strategy, Toeplitz
from jaxdp.types import PyTree, Summed

_MOST_CANCELLED = 2.0**12
_LARGEST_DIAGONAL = 2.0**30  # and its inverse: further off, float32 flushes rows of noise to none


@dataclasses.dataclass(frozen=True, eq=False)
class Recurrence:
    """Rows of C⁻¹Z, one a step: scale · (weights · buffers + z), of which buffers hold the past.

    For C the buffers are the noise y of the last m steps, y_i = (z_i - Σ_j C_(i,i-j) y_(i-j)) /
    C_ii; for a banded inverse their normals z, y_i = Σ_j d_j z_(i-j); that of step i lies at i mod
    m. Of a buffered strategy they are its sums: y_i = z_i - Σ_k ω_k s_k, then s_k ← θ_k s_k + y_i.
    Of what is made again there are none.
    """

    size: int  # the number m of buffers
    # float32 [n or 1, 1 + m], the diagonal and the weights of the steps before; the one row is that
    # of all steps.
    table: np.ndarray
    keeps_inputs: bool = False  # True if buffers hold the normals z; else they follow the noise y
    decays: np.ndarray | None = None  # float32 [m], θ of sums; None for the rows of the last steps

    def weights(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(float32 [m], the weight of each buffer; scalar scale) of a step."""
        row = jnp.asarray(self.table[0])
        if len(self.table) > 1:
            row = jnp.take(jnp.asarray(self.table), step, axis=0, mode="clip")
        if self.decays is not None:
            return row[1:], 1 / row[0]
        # How many steps ago the row of each buffer was made, in 1..m.
        lags = jnp.mod(step - 1 - jnp.arange(self.size), max(self.size, 1)) + 1
        return jnp.take(row, lags), 1 / row[0]

    def next_buffers(self, buffers: jax.Array, row: jax.Array, step: jax.Array) -> jax.Array:
        """The buffers [m, ...] after a step whose row (y, or z) is [...]."""
        if self.decays is not None:
            decays = jnp.asarray(self.decays.reshape(-1, *(1,) * row.ndim))
            return decays * buffers + row[None]
        if not self.size:
            return buffers
        # In place, where the memory of the state is reused.
        place = jnp.mod(step, self.size)
        return jax.lax.dynamic_update_index_in_dim(buffers, row, place, axis=0)


def check_stable(strategy: Strategy) -> None:
    """Raises ValueError where float32 would round a step's own normals away.

    Row i of C times the noise is z_i and what is rounded: at most 2^-24 of sum_j |C_ij y_j|, where
    y_j has the standard deviation of row j of the inverse. 2^-12 of z_i is let pass; the square
    root of the prefix sums stays below that for millions of steps.

    Raises:
        ValueError: it is refused.
    """
    if isinstance(strategy, Dense):
        diagonal = strategy.matrix().diagonal()
        if not 1 / _LARGEST_DIAGONAL <= diagonal.min() <= diagonal.max() <= _LARGEST_DIAGONAL:
            raise ValueError(
                "strategy must have a diagonal between 1e-9 and 1e9, got one from "
                f"{diagonal.min():.3g} to {diagonal.max():.3g}: a common factor changes nothing"
            )
    found = strategy.cancelled()
    if not found <= _MOST_CANCELLED:
        raise ValueError(
            f"strategy must have an inverse that stays within float32, got {strategy!r}, whose "
            f"noise of earlier steps is {found:.3g} times that of a step and would round it away: "
            f"at most {_MOST_CANCELLED:g}. Take one whose inverse decays, such as "
            "jaxdp.noise.optimal_banded makes"
        )


def recurrence(strategy: Strategy) -> Recurrence:
    """The recurrence of a strategy.

    Raises:
        ValueError: one of another kind, or whose noise float32 does not hold.
    """
    check_stable(strategy)
    if isinstance(strategy, MadeAgain):
        return Recurrence(0, np.ones((1, 1), np.float32))
    if isinstance(strategy, Buffered):
        table = np.asarray([[1.0, *(-scale for scale in strategy.scales)]])
        decays = np.asarray(strategy.decays, np.float32)
        return Recurrence(len(decays), table.astype(np.float32), decays=decays)
    if isinstance(strategy, Dense):
        # Of each row the entries of the bands, from the diagonal back.
        places = np.arange(strategy.steps)[:, None] - np.arange(strategy.bands)
        table = np.take_along_axis(strategy.matrix(), np.maximum(places, 0), axis=1)
        table = np.where(places >= 0, table, 0)
    elif isinstance(strategy, Toeplitz | BandedInverse):
        table = np.asarray([strategy.coefficients])
    else:
        raise ValueError(f"strategy must be one of jaxdp.noise, got {strategy!r}")
    inverse = isinstance(strategy, BandedInverse)
    table[:, 1:] *= 1 if inverse else -1
    return Recurrence(table.shape[1] - 1, table.astype(np.float32), keeps_inputs=inverse)


_LEAST = 1e-30  # a standard deviation below would be flushed to none


class CorrelatedState(NamedTuple):
    """State of correlated noise. **Secret** where it has buffers: with the updates they give sums.

    Attributes:
        last: uint32 [2], the tag of the last key that was used.
        leaves: int32 scalar; how many parameters it was made for, to recognise frozen ones.
        step: int32 scalar; the step that comes next. Without buffers, and on a grid, -1 after a
            refused one.
        buffers: pytree like the parameters, float32 [m, ...], on an integer grid int32: of the
            noise so far, what the noise to come depends on.
    """

    last: jax.Array
    leaves: jax.Array
    step: jax.Array
    buffers: PyTree


@dataclasses.dataclass(frozen=True)
class MatrixNoise(Noise):
    """Float32 Gaussian noise that is correlated over the steps.

    Step i adds noise_multiplier · l2 · (C⁻¹Z)_i, where Z are independent standard normals, a row a
    step, and C is the strategy. The rows before are kept in the state, as far as the strategy looks
    back; the row of the step comes from the key of its ticket.

    Formal guarantee: the updates of all steps are one Gaussian mechanism with multiplier
    noise_multiplier / s, where s is the strategy's sensitivity under the participation of a record
    (``jaxdp.noise.sensitivity``): docs/proofs/correlated_noise.md. Take ``mechanism.privatize()``
    of ``jaxdp.dp_mf``, which sets the one by the other.

    Each update goes on from the state of the step before it. A state of another step, or of other
    releases, gives NaN; ``jaxdp.Trainer`` refuses it in words.

    Of a ``MadeAgain`` strategy the state keeps no row, and nothing secret: the key of the step
    before comes with the ticket, and its normals are made again.

    Attributes:
        strategy: of as many steps as there are to be.
    """

    strategy: Strategy

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.non_negative("noise_multiplier", self.noise_multiplier)  # one for all steps
        _ = self._rows  # refuses a strategy whose rows float32 would round away

    @property
    def part(self) -> str:
        """Names the strategy: another one's noise is another part."""
        again = isinstance(self.strategy, MadeAgain)
        return f"{AGAIN if again else 'correlated'} by {self.strategy!r}"

    def init(self, params: PyTree) -> CorrelatedState:
        """A state without past: buffers of zeros, sharded as the parameters are."""
        return initial_state(params, self._rows.size, jnp.float32)

    def check(self, summed: Summed, state: CorrelatedState, axes: Axes) -> None:
        """Raises ValueError for the sum of another step than the state's next, or other leaves."""
        check_sum_follows(summed, state)
        # Buffers without rows would let it pass: normals of another leaf would be taken back.
        value, kept = jax.tree.structure(summed.value), jax.tree.structure(state.buffers)
        given = list(map(jnp.shape, jax.tree.leaves(summed.value)))
        made = [jnp.shape(leaf)[1:] for leaf in jax.tree.leaves(state.buffers)]
        if (value, given) != (kept, made):
            raise ValueError(
                "the sum must have the leaves that the state was made for, whose noise it takes "
                f"back: {kept} of shapes {made}, got {value} of shapes {given}"
            )

    def add(self, state: CorrelatedState, request: NoiseRequest) -> tuple[PyTree, CorrelatedState]:
        """Returns (the noisy sum, the next state); NaN where the state is not the key's."""
        value, l2 = request.summed.value, jnp.asarray(request.summed.l2, jnp.float32)
        rows, step = self._rows, state.step
        weights, scale = rows.weights(step)
        goes_on = follows_state(state, request.key, self.strategy.steps)

        # Scaled by l2 only where it is added, for it may differ from step to step. Below _LEAST
        # float32 would flush noise to none.
        std = request.multiplier * l2
        std = jnp.where((std < _LEAST) & (request.multiplier > 0), jnp.nan, std)

        # Of the step before nothing was kept but the tag of its key, which this one must name: then
        # the normals that are taken back are those that were added.
        if isinstance(self.strategy, MadeAgain):
            named = (step == 0) | jnp.any(jnp.asarray(request.key.previous_tag) != 0)
            std = jnp.where(goes_on & named, std, jnp.nan)
            weight = np.float32(self.strategy.coefficients[1])
            past = jnp.where(step == 0, np.float32(0), weight), jnp.asarray(request.key.before)
            noisy = add_normals(value, std, request.words, *request.axes, before=past)
            # No buffer keeps what was refused: a step of -1, which no key has, does.
            tag, after = jnp.asarray(request.key.tag), jnp.where(goes_on & named, step + 1, -1)
            return noisy, CorrelatedState(tag, state.leaves, after, state.buffers)

        # The part of C⁻¹Z that follows from the rows before.
        def from_past(kept: jax.Array, leaf: jax.Array) -> jax.Array:
            """The weighted sum of a leaf's buffers."""
            # Zero, but with a lane for every sum (and sensitivity) of a vmap, and a part for every
            # shard of a mesh: each needs normals of its own, also where the past is one for all.
            zero = jnp.where(jnp.zeros(leaf.shape, bool), leaf + l2, 0.0).astype(jnp.float32)
            if not rows.size:
                return zero
            # In full: accelerators would round the noise of earlier steps, which then does not
            # cancel.
            full = jax.lax.Precision.HIGHEST
            return zero + jnp.tensordot(weights, kept, axes=1, precision=full)

        past = jax.tree.map(from_past, state.buffers, value)

        # The step's own normals on top. Where the state is not that of the step before, the noise
        # itself is NaN, and so is all that goes on from it.
        one = jnp.where(goes_on, 1.0, jnp.nan)
        noise = add_normals(past, one, request.words, *request.axes)
        noise = jax.tree.map(lambda row: row * scale, noise)

        # What later steps need: the noise, or its normals. These are what the noise has beyond the
        # past: generated by themselves they would not wait for the past to be read, and XLA would
        # copy all buffers before one of them is written.
        kept = jax.tree.map(jnp.subtract, noise, past) if rows.keeps_inputs else noise
        buffers = jax.tree.map(lambda b, row: rows.next_buffers(b, row, step), state.buffers, kept)

        noisy = jax.tree.map(lambda value, row: value + std * row, value, noise)
        return noisy, CorrelatedState(jnp.asarray(request.key.tag), state.leaves, step + 1, buffers)

    def std(self, params: PyTree, l2: float, step: int | jax.Array) -> jax.Array:
        """That of a row of C⁻¹Z, times the multiplier and ``l2``."""
        return self.multiplier(0) * l2 * row_norm(self.strategy, step)

    @functools.cached_property
    def _rows(self) -> Recurrence:
        """The recurrence by which a row of the noise follows from those before."""
        return recurrence(self.strategy)


def row_norm(strategy: Strategy, step: int | jax.Array) -> jax.Array:
    """The norm of the step's row of C⁻¹; NaN beyond the last."""
    rows = jnp.asarray(strategy.inverse_row_norms(), jnp.float32)
    return jnp.take(rows, jnp.asarray(step), mode="fill", fill_value=jnp.nan)


def initial_state(params: PyTree, size: int, dtype: type) -> CorrelatedState:
    """The state before the first step: buffers of zeros [size, ...], sharded as the parameters."""

    def zeros(param: jax.typing.ArrayLike) -> jax.Array:
        """The buffers of one parameter."""
        like = jnp.zeros_like(param, dtype=dtype)
        return jnp.broadcast_to(like[None], (size, *like.shape))

    leaves = jnp.asarray(len(jax.tree.leaves(params)), jnp.int32)
    nothing = jnp.zeros(2, jnp.uint32), leaves, jnp.zeros((), jnp.int32)
    return CorrelatedState(*nothing, jax.tree.map(zeros, params))


def follows_state(state: CorrelatedState, key: NoiseKey, steps: int) -> jax.Array:
    """bool scalar: True if the key is of the step after the state's, and no more than there are."""
    # A first step has a tag of zeros before it; any other must be the ticket after the state's.
    before = jnp.asarray(key.previous_tag)
    follows = jnp.all(before == 0) | jnp.all(before == state.last)
    return (jnp.asarray(key.step) == state.step) & follows & (state.step < steps)


def check_sum_follows(summed: Summed, state: CorrelatedState) -> None:
    """Refuses, where it can be seen, a state that the ticket does not go on from."""
    if summed.ticket is not None and not isinstance(state.step, jax.core.Tracer):
        check_step_follows(summed.ticket.step, int(state.step))


def check_step_follows(ticket: int, state: int) -> None:
    """Raises ValueError if a step with correlated noise does not go on from the state.

    Args:
        ticket: the step that was drawn.
        state: the steps that the state has behind it.

    Raises:
        ValueError: they differ.
    """
    if ticket != state:
        raise ValueError(
            f"state must be that of the step before for correlated noise, got one after {state} "
            f"steps for the draw of step {ticket}, counted from 0: the noise of a step cancels "
            "that of the steps before it, so that none can be left out, repeated or taken in "
            "another order. Take every batch, in order, each with the state that the step before "
            "returned; jaxdp.Run goes on after an interruption"
        )
