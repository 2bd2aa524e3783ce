"""Noise on an integer grid from a cryptographic generator.

The sum is rounded to integers, a discrete Gaussian integer is added to each, and all that follows
is computed from the noisy integers: no bit of the result knows the magnitude of the sum.
docs/proofs/grid_noise.md has the theorem and its proof.

Correlated noise takes back that of the steps before in integers, N_i = round(Z_i - sum_j c_j
N_(i-j)), and the sum rounded to integers S_i is released as S_i + N_i. That is a function of the
integers C S + Z released so far, because rounding after S_i is added is adding S_i after rounding:
Theorem 5.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxdp import arguments
from jaxdp.clipping import rounding
from jaxdp.devices import placement
from jaxdp.ledger.tickets import ON_GRID
from jaxdp.noise._integers import IntegerLaw, derive_key, integers, summation_error
from jaxdp.noise.correlated import (
    CorrelatedState,
    Recurrence,
    check_stable,
    check_sum_follows,
    follows_state,
    initial_state,
    row_norm,
)
from jaxdp.noise.gaussian import Axes, Noise, NoiseRequest, PrivatizeState
from jaxdp.noise.normals import over_vmap, sharded_axes
from jaxdp.noise.strategies import Strategy, Toeplitz
from jaxdp.schedules import NoiseSchedule
from jaxdp.types import PyTree, Summed

# Noisy sums of more coordinates are refused: those that every step is charged for.
COORDINATES = 2**32
# What a step is charged for all of them: at least ``COORDINATES`` times ``distance()``.
DISTANCE = 2.0**-78
# A discrete Gaussian is post-processing of a continuous one whose variance is less by r^2.
_JOINT = 2.0
# Rounding may cost the noise this share, or in the end the other, before it is refused.
_SHARE, _MOST = 2.0**-8, 2.0**-2
# A correlated row has less than this, in cells, beside its integers: its finer draw, a rounding.
_FINE = 2**8
# From the least noise to the most; the last has its largest integer below 2^31.
_LAWS = (
    *(IntegerLaw((factor,)) for factor in (204, 511, 1250)),
    *(IntegerLaw((1250, 2**n)) for n in range(1, 6)),
)
# Every value of these is a float32.
_EXACT = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
# The scale's own rounding: a few operations in float32, and the multiplier's.
_SLACK = 1 - 2.0**-18
# Integers before the noise end here: a clip of every coordinate, far from overflow.
LARGEST = 2**30
# Keeps 12 digits of a float32: products of two such are exact.
_UPPER = np.uint32(0xFFFFF000)
# Binary digits behind the point of a strategy's coefficient: rounded to as many, optimal strategies
# of 2 to 64 bands have errors that differ by a few 1e-4 of themselves at most.
DIGITS = 8
# The magnitudes of all coefficients but the first together, so that the past stays within 32 bits.
_MOST_WEIGHTS = 2**14
# Of no step: what goes on from a wrong state is refused for good.
_NEVER = -1
Groups = tuple[tuple[str, ...], ...]  # of each leaf, the mesh axes over which devices hold parts


class IntegerNoise(Noise):
    """Discrete Gaussian noise on an integer grid, independent in every coordinate and step.

    Formal guarantee: one update is, but for a total-variation distance below 2^-78,
    post-processing of a Gaussian mechanism with multiplier ``noise_multiplier`` relative to the
    largest contribution ``l2`` of one record, in the arithmetic that the device really has
    (docs/proofs/grid_noise.md). ``jaxdp.accounting.GridNoise`` charges both. Integers come from
    ChaCha20 with a key of 256 bits, derived from the ticket.

    Coordinates of the sum beyond ``grid_range`` are clipped. The noise is larger by what rounding
    may move the sum, at most 0.4 % for up to 1.6 10^11 coordinates times squared multiplier.

    Raises:
        ValueError: a noise multiplier outside [1e-6, 1e6]; at ``init`` too many coordinates for it;
            at an update a sum that float32 would round once more, such as one of float64.
    """

    part = ON_GRID

    def __post_init__(self) -> None:
        super().__post_init__()
        largest, least = _largest_and_least(self.noise_multiplier)
        if not 1e-6 <= least <= largest <= 1e6:
            raise ValueError(
                "noise_multiplier must be in [1e-6, 1e6] for noise on a grid, got "
                f"{self.noise_multiplier}"
            )

    def init(self, params: PyTree) -> PyTree:
        """A state that no update has used."""
        leaves = jax.tree.leaves(params)
        self.law(sum(leaf.size for leaf in leaves))
        return PrivatizeState(jnp.zeros(2, jnp.uint32), jnp.asarray(len(leaves), jnp.int32))

    def check(self, summed: Summed, state: PyTree, axes: Axes) -> None:
        """Raises ValueError for a sum of too many coordinates, or that float32 does not hold."""
        for leaf in jax.tree.leaves(summed.value):
            if (found := np.dtype(leaf.dtype)) not in _EXACT:
                raise ValueError(
                    f"the sum must be of {', '.join(map(str, _EXACT))} for noise on a grid, got "
                    f"{found}: rounding it to float32 would move it farther than l2 says"
                )
        self.law(sharding_and_size(summed.value, axes)[1])

    def add(self, state: PyTree, request: NoiseRequest) -> tuple[PyTree, PyTree]:
        """Returns (the noisy sum, the next state); NaN for the key of the step before."""
        # The law and the cells for so many coordinates; a key that was used before has no scale.
        cuts, count = sharding_and_size(request.summed.value, request.axes)
        law, tag = self.law(count), jnp.asarray(request.key.tag)
        fresh = jnp.where(jnp.all(tag == state.last), jnp.nan, 1.0)
        scale = grid_scale(law, request.multiplier, count, request.summed.l2) * fresh
        key = jnp.asarray(request.key.long)
        noisy, _ = add_integers(request.summed.value, scale, key, law, cuts)
        return noisy, PrivatizeState(tag, state.leaves)

    def std(self, params: PyTree, l2: float, step: int | jax.Array) -> jax.Array:
        """That of the integers, over the scale: at least the multiplier times ``l2``."""
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        law = self.law(count)
        return np.float32(law.std) / grid_scale(law, self.multiplier_at(step), count, l2)

    def description(self, parameters: int) -> str:
        """A sentence on the grid: its widest cell, gamma, and the inequality that it follows from.

        Args:
            parameters: the number of coordinates of the sum.
        """
        (largest, _), law = _largest_and_least(self.noise_multiplier), self.law(parameters)
        cell = 1 / float(grid_scale(law, np.float32(largest), parameters, 1.0))
        most = grid_range(self.noise_multiplier, parameters, self.growth)
        return (
            f"discrete Gaussian integers of s = {law.std:,.0f} from ChaCha20, added to the sum "
            f"rounded to cells of gamma = {cell:.3g} clip norms: z (1 / gamma + sqrt(d) (1 + "
            f"2^-22)) <= sqrt(s^2 - 4) with z = {largest:.5g} and d = {parameters:,}, so that "
            f"rounding takes {largest * math.sqrt(parameters) / law.std:.2g} of the noise; "
            f"coordinates of the sum beyond {most:,.0f} clip norms are clipped"
        )

    @property
    def growth(self) -> float:
        """The most by which an integer grows over the steps; see ``integer_law``."""
        return 1.0

    def law(self, count: int) -> IntegerLaw:
        """The law of the integers for so many coordinates; ValueError where there is none."""
        return integer_law(_largest_and_least(self.noise_multiplier)[0], count, self.growth)


@dataclasses.dataclass(frozen=True)
class IntegerMatrixNoise(IntegerNoise):
    """Noise that is correlated over the steps, in integers of a grid.

    ``MatrixNoise`` with the integers of ``IntegerNoise``; one band is that.

    Formal guarantee: but for a total-variation distance below 2^-78 a step, the updates of all
    steps are post-processing of one Gaussian mechanism with multiplier noise_multiplier / s, where
    s is the strategy's sensitivity under the participation of a record, in the arithmetic that the
    device really has (docs/proofs/grid_noise.md, Theorem 5). Take ``mechanism.privatize()`` of
    ``jaxdp.dp_mf(..., noise="grid")``, which sets the one by the other and charges both.

    Attributes:
        strategy: ``Toeplitz`` with coefficients of 8 binary digits, such as ``dyadic`` makes.

    Raises:
        ValueError: as ``IntegerNoise``; another strategy.
    """

    strategy: Strategy

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("noise_multiplier", self.noise_multiplier)  # one for all steps
        check_dyadic(self.strategy)

    @property
    def part(self) -> str:  # type: ignore[override]
        """Names the strategy: another one's noise is another part."""
        return f"{ON_GRID}, correlated by {self.strategy!r}"

    def init(self, params: PyTree) -> CorrelatedState:
        """A state without past: buffers of zeros, int32, sharded as the parameters are."""
        super().init(params)  # refuses too many coordinates
        return initial_state(params, self._rows.size, jnp.int32)

    def check(self, summed: Summed, state: CorrelatedState, axes: Axes) -> None:
        """Raises ValueError for a sum of another step, of another precision, or too large."""
        check_sum_follows(summed, state)
        super().check(summed, state, axes)

    def add(self, state: CorrelatedState, request: NoiseRequest) -> tuple[PyTree, CorrelatedState]:
        """Returns (the noisy sum, the next state); NaN where the state is not the key's."""
        # As of independent noise; a state that the ticket does not go on from has no scale.
        cuts, count = sharding_and_size(request.summed.value, request.axes)
        law, goes_on = self.law(count), follows_state(state, request.key, self.strategy.steps)
        one, rows = jnp.where(goes_on, 1.0, jnp.nan), self._rows
        scale = grid_scale(law, request.multiplier, count, request.summed.l2) * one

        # The sum of c_j N_(i-j) in cells of 2^-8, as 2^16 high + low; none for one band.
        past = None
        if rows.size:
            weights, _ = rows.weights(state.step)

            def weighed(kept: jax.Array) -> jax.Array:
                """The weighted sum of a leaf's buffers, int32: exact."""
                each = weights.reshape(-1, *(1,) * (kept.ndim - 1)) * kept
                return jnp.sum(each, axis=0, dtype=jnp.int32)

            high = jax.tree.map(lambda kept: weighed(kept >> np.int32(16)), state.buffers)
            low = jax.tree.map(lambda kept: weighed(kept & np.int32(0xFFFF)), state.buffers)
            past = high, low

        key = jnp.asarray(request.key.long)
        noisy, noise = add_integers(request.summed.value, scale, key, law, cuts, past)
        buffers = state.buffers
        if noise is not None:
            following = functools.partial(rows.next_buffers, step=state.step)
            buffers = jax.tree.map(following, buffers, noise)
        # Integers have no NaN: the step says that a state is refused from now on.
        step = jnp.where(goes_on, state.step + 1, _NEVER)
        return noisy, CorrelatedState(jnp.asarray(request.key.tag), state.leaves, step, buffers)

    def std(self, params: PyTree, l2: float, step: int | jax.Array) -> jax.Array:
        """That of a row of C⁻¹Z, in integers over the scale."""
        return super().std(params, l2, step) * row_norm(self.strategy, step)

    def description(self, parameters: int) -> str:
        """A sentence on the grid for so many parameters: cell and inequality."""
        found = super().description(parameters)
        return f"{found}; what a step takes back of earlier noise is an integer too"

    @functools.cached_property
    def growth(self) -> float:
        return growth(self.strategy)

    @functools.cached_property
    def _rows(self) -> Recurrence:
        """Of the integers by which the last steps were noised, in whole digits of the weights."""
        whole = check_dyadic(self.strategy)
        return Recurrence(len(whole) - 1, whole[None].astype(np.int32))


def dyadic(strategy: Strategy) -> Toeplitz:
    """A banded Toeplitz strategy with its coefficients rounded to 8 binary digits.

    Those are what noise on an integer grid takes. It is another strategy, with a sensitivity and
    errors of its own; those of an optimal one of up to 64 bands are within 4e-4 of what they were.
    A coefficient below 1 stays below it, so that the inverse decays.

    Args:
        strategy: a ``Toeplitz``, such as ``optimal_banded`` makes.

    Raises:
        ValueError: another kind, or coefficients that are too large.

    Example:
        >>> from jaxdp.noise import dyadic
        >>> from jaxdp.noise.strategies import Toeplitz
        >>> dyadic(Toeplitz((1.0, 0.41, 0.2), steps=10)).coefficients
        (1.0, 0.41015625, 0.19921875)
    """
    exact = _whole_coefficients(strategy)
    whole = np.round(exact)
    below = np.abs(exact) < 2**DIGITS
    whole = np.where(below, np.clip(whole, 1 - 2**DIGITS, 2**DIGITS - 1), whole)
    made = Toeplitz(tuple((whole / 2**DIGITS).tolist()), strategy.steps)
    check_dyadic(made)
    return made


def check_dyadic(strategy: Strategy) -> np.ndarray:
    """Returns float64 [b], the coefficients in units of the last digit: whole numbers.

    Raises:
        ValueError: a strategy that noise on an integer grid does not take.
    """
    whole = _whole_coefficients(strategy)
    if (whole != np.round(whole)).any():
        raise ValueError(
            f"strategy must have coefficients of {DIGITS} binary digits for noise on a grid, got "
            f"{strategy!r}: take jaxdp.noise.dyadic(strategy), which rounds them"
        )
    if np.abs(whole[1:]).sum() > _MOST_WEIGHTS:
        raise ValueError(
            f"strategy must have coefficients that add up to at most {_MOST_WEIGHTS / 2**DIGITS:g} "
            f"in magnitude beside the first for noise on a grid, got {strategy!r}: take fewer bands"
        )
    integer_law(1e-6, 1, growth(strategy))
    return whole


def _whole_coefficients(strategy: Strategy) -> np.ndarray:
    """float64 [b]: the coefficients in units of the last digit, exactly; ValueError without any."""
    if not isinstance(strategy, Toeplitz):
        raise ValueError(
            "strategy must be a banded Toeplitz one for noise on a grid, 'banded', 'square_root', "
            f"'identity' or jaxdp.noise.Toeplitz, got {strategy!r}: the rows of others are no "
            "integers of 32 bits. Take strategy='banded', or noise='gaussian'"
        )
    return np.asarray(strategy.coefficients) * 2**DIGITS


def growth(strategy: Strategy) -> float:
    """At least sum_i |(C^-1)_i0|: the most by which the largest integer grows over the steps.

    The computed column d has C d = (1, 0, ...) + e with every |e_i| at most (b + 3) roundings of
    sum_j |c_j d_(i-j)|, which ``check_stable`` keeps below 2^12; so the true sum is at most that of
    d over 1 - n max |e_i|.

    Raises:
        ValueError: its inverse grows too far, or over too many steps to be known.
    """
    assert isinstance(strategy, Toeplitz)
    check_stable(strategy)
    off = strategy.steps * (strategy.bands + 4) * 2.0**-41
    if off > 0.5:
        raise ValueError(f"strategy must have fewer steps for noise on a grid, got {strategy!r}")
    return float(np.abs(strategy.first_inverse_column()).sum()) / (1 - off) * (1 + 2.0**-30)


def sharding_and_size(tree: PyTree, axes: Axes) -> tuple[list[list[str]], int]:
    """(the mesh axes over which devices hold other parts of each leaf, coordinates on all)."""
    leaves, sizes = jax.tree.leaves(tree), dict(jax.sharding.get_abstract_mesh().shape)
    cuts = [sharded_axes(leaf, *axes) for leaf in leaves]
    each = (math.prod(sizes[axis] for axis in cut) for cut in cuts)
    return cuts, sum(leaf.size * parts for leaf, parts in zip(leaves, each, strict=True))


def integer_law(multiplier: float, coordinates: int, growth: float = 1.0) -> IntegerLaw:
    """The law of the integers: the least noise, in grid cells, beside which rounding is small.

    Args:
        multiplier: the largest noise multiplier.
        coordinates: of the whole sum.
        growth: the most by which noise grows over the steps, sum_i |(C^-1)_i0|; 1 where every
            step has its own.

    Raises:
        ValueError: there are too many of them.
    """
    # Rounding moves two sums apart by up to sqrt(d) cells: the law has to be wide beside that.
    moved = math.sqrt(coordinates) * multiplier
    laws = [law for law in _LAWS if growth * (law.largest + _FINE) < 2**31]
    if not laws:
        raise ValueError(
            "strategy must have an inverse whose first column adds up, in magnitude, to at most "
            f"{2**31 // (_LAWS[0].largest + _FINE)}, got {growth:.4g}: its noise would leave the "
            "32 bits of the grid. Take more bands, or noise='gaussian'"
        )
    if moved > _MOST * laws[-1].std or coordinates > COORDINATES:
        raise ValueError(
            f"params must have at most {COORDINATES} coordinates for noise on a grid, and their "
            f"root times noise_multiplier at most {_MOST * laws[-1].std:.3g}, got {coordinates} "
            f"and {moved:.3g}: take noise='gaussian'"
        )
    return next((law for law in laws if moved <= _SHARE * law.std), laws[-1])


def distance(digits: int = 0) -> float:
    """A proven bound on the total variation between one coordinate's integer and the theorem's.

    That of the sums of draws from the discrete Gaussian, and of that from post-processing of a
    continuous one.

    Args:
        digits: of a correlated strategy, whose integers have one draw more; 0 for none.
    """
    each = [IntegerLaw((2**digits, *law.factors)) if digits else law for law in _LAWS]
    return max(law.distance for law in each) + 2 * summation_error(_JOINT)


def grid_scale(
    law: IntegerLaw, multiplier: ArrayLike, coordinates: int, l2: ArrayLike
) -> jax.Array:
    """c, grid cells for one unit of the sum: float32 with 12 digits, never above the theorem's.

    multiplier · (c · l2 + sqrt(coordinates) (1 + 2^-22)) <= sqrt(s^2 - r^2). NaN outside of
    [2^-100, 2^100].
    """
    # Each number is rounded towards more noise; the slack covers what float32 does to the others.
    std = np.float32(math.sqrt(law.std**2 - _JOINT**2) * (1 - 2.0**-22))
    rounding = np.float32(math.sqrt(coordinates) * (1 + 2.0**-21))
    moved = std / jnp.asarray(multiplier, jnp.float32) - rounding
    exact = moved / jnp.asarray(l2, jnp.float32) * np.float32(_SLACK)
    scale = with_12_digits(exact)
    return jnp.where((scale >= 2.0**-100) & (scale <= 2.0**100), scale, jnp.nan)


def grid_range(
    noise_multiplier: float | NoiseSchedule, coordinates: int, growth: float = 1.0
) -> float:
    """The number of clip norms that a coordinate of the sum may have; beyond, it is clipped.

    Args:
        noise_multiplier: as for ``IntegerNoise``, or ``Mechanism.fresh`` of correlated noise.
        coordinates: of the whole sum.
        growth: as for ``integer_law``.
    """
    largest, least = _largest_and_least(noise_multiplier)
    return LARGEST * least / integer_law(largest, coordinates, growth).std


def _largest_and_least(given: float | NoiseSchedule) -> tuple[float, float]:
    """The largest and the least noise multiplier."""
    if not isinstance(given, NoiseSchedule):
        number = arguments.positive("noise_multiplier", given)
        return number, number
    levels = [float(level) for level, _ in given.levels]
    return max(levels), min(levels)


def to_grid(value: jax.Array, scale: jax.Array) -> jax.Array:
    """``value`` · ``scale``, rounded to int32; off by at most 1/2 + 2^-23, whatever the value.

    Coordinates beyond 2^30 / scale are clipped to it first. Both factors of every product have 12
    digits, so that float32 rounds none of them; see docs/proofs/grid_noise.md. NaN is 0.
    """
    limit = jnp.minimum(np.float32(LARGEST) / scale, np.finfo(np.float32).max)
    value = jnp.clip(jnp.where(jnp.isnan(value), 0.0, value), -limit, limit)
    upper = with_12_digits(value)
    parts = upper * scale, (value - upper) * scale
    whole = [jnp.round(part) for part in parts]
    rest = (parts[0] - whole[0]) + (parts[1] - whole[1])
    first, second, third = (each.astype(jnp.int32) for each in (*whole, jnp.round(rest)))
    return first + second + third


def with_12_digits(value: jax.Array) -> jax.Array:
    """``value`` towards zero with 12 digits in place of 24."""
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32) & _UPPER
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def add_integers(
    tree: PyTree,
    scale: jax.Array,
    key: jax.Array,
    law: IntegerLaw,
    cuts: list[list[str]],
    past: tuple[PyTree, PyTree] | None = None,
) -> tuple[PyTree, PyTree]:
    """(the sum with its noise, float32: integers over the scale; the noise, int32, with a past).

    Args:
        tree: the sum.
        scale: cells for one unit of it; NaN makes all NaN.
        key: uint32 [8].
        law: of the integers; with a past, of those before one more draw refines them.
        cuts: for each leaf the axes of a ``shard_map`` over which devices hold other parts.
        past: what the noise of a step takes back, (high, low) int32: 2^16 high + low in cells of
            2^-8, low less than 2^31 - 2^15 in magnitude; None for none.

    Raises:
        ValueError: members of a ``vmap`` share the key (two equal keys give NaN).
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree, None if past is None else tree
    axes = sorted(jax.sharding.get_abstract_mesh().manual_axes)
    # Devices that hold other parts of a leaf have other keys.
    keys = []
    for cut in cuts:
        own = key
        for axis in cut:
            own = derive_key(own, jax.lax.axis_index(axis), axes.index(axis))
        keys.append(own)
    values = [jnp.asarray(leaf, jnp.float32) for leaf in leaves]
    groups = tuple(map(tuple, cuts))
    mesh = placement.current_mesh(values)
    with placement.using_mesh(mesh, override=False):
        add = _compiled_add(law, past is not None, groups, mesh)
        found = add(keys, scale, *values, *jax.tree.leaves(past))
    noisy, noise = found[: len(leaves)], found[len(leaves) :]
    unflatten = functools.partial(jax.tree.unflatten, structure)
    return unflatten(noisy), unflatten(noise) if noise else None


@functools.lru_cache(maxsize=64)
def _compiled_add(
    law: IntegerLaw, fine: bool, groups: Groups, mesh: jax.sharding.Mesh | None
) -> Callable[..., list[jax.Array]]:
    """The addition, compiled as a whole also where nothing is around it: for one ``mesh``."""
    added: Callable[..., list[jax.Array]] = functools.partial(_add_integers, law, fine, groups)
    return jax.jit(over_vmap(added))


def _add_integers(
    law: IntegerLaw,
    fine: bool,
    groups: Groups,
    keys: list[jax.Array],
    scale: jax.Array,
    *leaves: jax.Array,
) -> list[jax.Array]:
    """Each leaf with its noise. Leaves that are sharded alike share a key and its stream."""
    count = len(groups)
    # Both halves of a number are of one and the same: docs/proofs/clip_bound.md, assumption 3.
    values = tuple(rounding.materialized(leaves[:count]))
    # One stream for all leaves of a key, taken in their order.
    found: dict[int, jax.Array] = {}
    for group in dict.fromkeys(groups):
        members = [n for n, own in enumerate(groups) if own == group]
        ends = np.cumsum([values[n].size for n in members])
        drawn = integers(keys[members[0]], int(ends[-1]), law, fine)
        parts = [jnp.split(part, ends[:-1]) for part in drawn]
        for place, n in enumerate(members):
            own = [part[place].reshape(values[n].shape) for part in parts]
            found[n] = _correlated_row(own, leaves[n + count :: count]) if fine else own[0]
    # Integers to integers; the floats that leave are functions of the noisy integers alone.
    noisy = [to_grid(values[n], scale) + found[n] for n in range(count)]
    floats = [cells.astype(jnp.float32) * (1 / scale) for cells in noisy]
    return floats + [found[n] for n in range(count)] if fine else floats


def _correlated_row(own: list[jax.Array], past: tuple[jax.Array, ...]) -> jax.Array:
    """The noise of a step, int32: (its own - the past) / 2^8, rounded to the nearest cell.

    Exact modulo 2^32: of the past only the low part is divided, and what is divided fits in int32.
    """
    (coarse, fine), (high, low) = own, past
    half = np.int32(2**DIGITS // 2)
    rest = jnp.right_shift(fine - low + half, np.int32(DIGITS))
    return coarse - jnp.left_shift(high, np.int32(16 - DIGITS)) + rest
