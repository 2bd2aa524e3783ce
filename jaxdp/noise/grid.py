"""Noise on an integer grid from a cryptographic generator.

The sum is rounded to integers, a discrete Gaussian integer is added to each, and all that follows
is computed from the noisy integers: no bit of the result knows the magnitude of the sum.
docs/grid_noise.md has the theorem and its proof.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.noise._cells import LARGEST, coordinates, noised, shortened
from jaxdp.noise._integers import Sum, gap
from jaxdp.noise.gaussian import Axes, Noise, Paid, PrivatizeState
from jaxdp.normals import cut_over
from jaxdp.schedules import NoiseSchedule
from jaxdp.tickets import ON_GRID
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
    *(Sum((factor,)) for factor in (204, 511, 1250)),
    *(Sum((1250, 2**n)) for n in range(1, 6)),
)
# Every value of these is a float32.
_EXACT = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
# The scale's own rounding: a few operations in float32, and the multiplier's.
_SLACK = 1 - 2.0**-18


class IntegerNoise(Noise):
    """Discrete Gaussian noise on an integer grid, independent in every coordinate and step.

    Formal guarantee: one update is, but for a total-variation distance below 2^-78,
    post-processing of a Gaussian mechanism with multiplier ``noise_multiplier`` relative to the
    largest contribution ``l2`` of one record, in the arithmetic that the device really has
    (docs/grid_noise.md). ``jaxdp.accounting.GridNoise`` charges both. Integers come from ChaCha20
    with a key of 256 bits, derived from the ticket.

    Coordinates of the sum beyond ``grid_range`` are clipped. The noise is larger by what rounding
    may move the sum, at most 0.4 % for up to 1.6 10^11 coordinates times squared multiplier.

    Raises:
        ValueError: a noise multiplier outside [1e-6, 1e6]; at ``init`` too many coordinates for it;
            at an update a sum that float32 would round once more, such as one of float64.
    """

    part = ON_GRID

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range(self.noise_multiplier)

    def init(self, params: PyTree) -> PrivatizeState:
        """A state that no update has used."""
        leaves = jax.tree.leaves(params)
        self._law(sum(leaf.size for leaf in leaves))
        return PrivatizeState(jnp.zeros(2, jnp.uint32), jnp.asarray(len(leaves), jnp.int32))

    def check(self, summed: Summed, state: PrivatizeState, axes: Axes) -> None:
        """Raises ValueError for a sum of another precision, or of too many coordinates."""
        check_exact(summed.value)
        self._law(coordinates(summed.value, cuts_of(summed.value, axes)))

    def add(self, state: PrivatizeState, paid: Paid) -> tuple[PyTree, PrivatizeState]:
        """Returns (the noisy sum, the next state); NaN for the key of the step before."""
        value, cuts = paid.summed.value, cuts_of(paid.summed.value, paid.axes)
        count, tag = coordinates(value, cuts), jnp.asarray(paid.key.tag)
        law = self._law(count)
        fresh = jnp.where(jnp.all(tag == state.last), jnp.nan, 1.0)
        scale = grid_scale(law, paid.multiplier, count, paid.summed.l2) * fresh
        noisy, _ = noised(value, scale, jnp.asarray(paid.key.long), law, cuts)
        return noisy, PrivatizeState(tag, state.leaves)

    def std(self, params: PyTree, l2: float, step: int | jax.Array) -> jax.Array:
        """That of the integers, over the scale."""
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        return grid_std(self._law(count), self.level(step), count, l2)

    @staticmethod
    def event(gaussian: acc.Event) -> acc.Event:
        """The event, and the distance of the integers from the theorem's in each of its steps."""
        return acc.GridNoise(gaussian, gaussian.block * DISTANCE)

    def in_words(self, parameters: int) -> str:
        """A sentence on the grid for so many parameters: cell and inequality."""
        return grid_in_words(self.noise_multiplier, parameters)

    def _law(self, count: int) -> Sum:
        return law_for(_extremes(self.noise_multiplier)[0], count)


def require_range(given: float | NoiseSchedule) -> None:
    """Raises ValueError unless every noise multiplier is one that the grid has integers for."""
    largest, least = _extremes(given)
    if not 1e-6 <= least <= largest <= 1e6:
        raise ValueError(
            f"noise_multiplier must be in [1e-6, 1e6] for noise on a grid, got {given}"
        )


def cuts_of(tree: PyTree, axes: Axes) -> list[list[str]]:
    """For each leaf of a sum the mesh axes over which devices hold other parts of it."""
    return [cut_over(leaf, *axes) for leaf in jax.tree.leaves(tree)]


def law_for(multiplier: float, coordinates: int, carried: float = 1.0) -> Sum:
    """The law of the integers: the least noise, in grid cells, beside which rounding is small.

    Args:
        multiplier: the largest noise multiplier.
        coordinates: of the whole sum.
        carried: the most by which noise grows over the steps, sum_i |(C^-1)_i0|; 1 where every
            step has its own.

    Raises:
        ValueError: there are too many of them.
    """
    moved = math.sqrt(coordinates) * multiplier
    laws = [law for law in _LAWS if carried * (law.most + _FINE) < 2**31]
    if not laws:
        raise ValueError(
            "strategy must have an inverse whose first column adds up, in magnitude, to at most "
            f"{2**31 // (_LAWS[0].most + _FINE)}, got {carried:.4g}: its noise would leave the 32 "
            "bits of the grid. Take more bands, or noise='gaussian'"
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
    each = [Sum((2**digits, *law.factors)) if digits else law for law in _LAWS]
    return max(law.distance for law in each) + 2 * gap(_JOINT)


def grid_scale(law: Sum, multiplier: Any, coordinates: int, l2: Any) -> jax.Array:
    """c, grid cells for one unit of the sum: float32 with 12 digits, never above the theorem's.

    multiplier · (c · l2 + sqrt(coordinates) (1 + 2^-22)) <= sqrt(s^2 - r^2). NaN outside of
    [2^-100, 2^100].
    """
    std = np.float32(math.sqrt(law.std**2 - _JOINT**2) * (1 - 2.0**-22))
    rounding = np.float32(math.sqrt(coordinates) * (1 + 2.0**-21))
    moved = std / jnp.asarray(multiplier, jnp.float32) - rounding
    exact = moved / jnp.asarray(l2, jnp.float32) * np.float32(_SLACK)
    scale = shortened(exact)
    return jnp.where((scale >= 2.0**-100) & (scale <= 2.0**100), scale, jnp.nan)


def grid_std(law: Sum, multiplier: Any, coordinates: int, l2: Any) -> jax.Array:
    """Standard deviation of the noise on the sum; public, and at least ``multiplier`` times l2."""
    return np.float32(law.std) / grid_scale(law, multiplier, coordinates, l2)


def grid_range(
    noise_multiplier: float | NoiseSchedule, coordinates: int, carried: float = 1.0
) -> float:
    """The number of clip norms that a coordinate of the sum may have; beyond, it is clipped.

    Args:
        noise_multiplier: as for ``IntegerNoise``, or ``Mechanism.fresh`` of correlated noise.
        coordinates: of the whole sum.
        carried: as for ``law_for``.
    """
    largest, least = _extremes(noise_multiplier)
    return LARGEST * least / law_for(largest, coordinates, carried).std


def grid_in_words(
    noise_multiplier: float | NoiseSchedule, coordinates: int, carried: float = 1.0
) -> str:
    """The grid of a sum: its widest cell, gamma, and the inequality that it follows from.

    Args:
        noise_multiplier: as for ``grid_range``.
        coordinates: likewise.
        carried: likewise.
    """
    largest, _ = _extremes(noise_multiplier)
    law = law_for(largest, coordinates, carried)
    cell = 1 / float(grid_scale(law, np.float32(largest), coordinates, 1.0))
    most = grid_range(noise_multiplier, coordinates, carried)
    return (
        f"discrete Gaussian integers of s = {law.std:,.0f} from ChaCha20, added to the sum rounded "
        f"to cells of gamma = {cell:.3g} clip norms: z (1 / gamma + sqrt(d) (1 + 2^-22)) <= "
        f"sqrt(s^2 - 4) with z = {largest:.5g} and d = {coordinates:,}, so that rounding takes "
        f"{largest * math.sqrt(coordinates) / law.std:.2g} of the noise; coordinates of the sum "
        f"beyond {most:,.0f} clip norms are clipped"
    )


def _extremes(given: float | NoiseSchedule) -> tuple[float, float]:
    """The largest and the least noise multiplier."""
    if not isinstance(given, NoiseSchedule):
        number = arguments.positive("noise_multiplier", given)
        return number, number
    levels = [float(level) for level, _ in given.levels]
    return max(levels), min(levels)


def check_exact(tree: PyTree) -> None:
    """Raises ValueError for a sum that float32 does not hold: rounding it is in no sensitivity."""
    for leaf in jax.tree.leaves(tree):
        if (found := np.dtype(leaf.dtype)) not in _EXACT:
            raise ValueError(
                f"the sum must be of {', '.join(map(str, _EXACT))} for noise on a grid, got "
                f"{found}: rounding it to float32 would move it farther than l2 says"
            )
