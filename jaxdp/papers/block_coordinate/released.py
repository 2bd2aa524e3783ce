"""R1, released-state block coordinate descent: every block update is a Gaussian mechanism."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.clipping import rounding
from jaxdp.devices import processes
from jaxdp.ledger.seeds import Secret
from jaxdp.ledger.tickets import issuer_of
from jaxdp.papers.block_coordinate.network import Network, Weights, in_float32
from jaxdp.papers.block_coordinate.proximal import NO_PROXIMAL, Proximal, Rescale
from jaxdp.papers.block_coordinate.schedules import CONSTANT, SweepSchedule
from jaxdp.papers.block_coordinate.sweep import sweep
from jaxdp.sampling import Poisson, Sampler
from jaxdp.types import Draw, positions_for_device

if TYPE_CHECKING:
    from jaxdp.ledger import Ledger


@dataclasses.dataclass(frozen=True)
class ReleasedBlocks:
    """DP-SBCD with every block update released (variant R1; docs/hidden_state.md).

    Formal guarantee: the updates of all blocks in one sweep use ONE Poisson draw. Given the draw,
    block i releases a sum of per-record gradients of norm at most C_i with noise z_i C_i; a
    record's splitting variables are functions of that record and of released weights alone. So the
    sweep is one Poisson-sampled Gaussian with 1/z^2 = sum_i 1/z_i^2 (contract: one draw, one
    event), under every relation. Proximal steps, rescaling and the schedule are post-processing.

    Attributes:
        network: the network.
        noise_multipliers: z_i of each block before the schedule, noise on the sum over C_i. One
            number: the same for all.
        l2_clip_norms: C_i of each block. One number: the same for all.
        step_size: eta.
        batch_size: the expected batch size, the public divisor.
        dataset_size: the declared public number of records.
        proximal: regulariser or projection after each update.
        rescale: the published normalisation; None for none.
        schedule: factors on the noise multipliers, by step.
    """

    network: Network
    noise_multipliers: tuple[float, ...]
    l2_clip_norms: tuple[float, ...]
    step_size: float
    batch_size: int
    dataset_size: int
    proximal: Proximal = NO_PROXIMAL
    rescale: Rescale | None = None
    schedule: SweepSchedule = CONSTANT

    def __post_init__(self) -> None:
        multipliers = per_block("noise_multipliers", self.noise_multipliers, self.network.blocks)
        multipliers = tuple(arguments.non_negative("noise_multipliers", z) for z in multipliers)
        object.__setattr__(self, "noise_multipliers", multipliers)
        norms = clip_norms(self.l2_clip_norms, self.network.blocks)
        object.__setattr__(self, "l2_clip_norms", norms)
        arguments.positive("step_size", self.step_size)
        size = arguments.integer("dataset_size", self.dataset_size, least=1)
        if arguments.integer("batch_size", self.batch_size, least=1) > size:
            raise ValueError(
                f"batch_size must be at most dataset_size ({size}), got {self.batch_size}"
            )

    @property
    def sampling(self) -> Poisson:
        """Every record with probability batch_size / dataset_size."""
        return Poisson(self.batch_size / self.dataset_size)

    def multipliers(self, step: int) -> tuple[float, ...]:
        """z_i of each block at a step."""
        return tuple(z * self.schedule.at(step) for z in self.noise_multipliers)

    def init(self, key: jax.Array) -> Weights:
        """The weights before the first step, of the key alone."""
        return self.network.init(key)

    def event(self, step: int = 0) -> acc.Event:
        """The accounting event of one sweep."""
        joint = acc.events.joint_gaussian(self.multipliers(step))
        return self.sampling.event(joint, self.dataset_size)

    def events(self, steps: int) -> acc.Event:
        """Everything that the first ``steps`` sweeps release, equal events counted together."""
        counts: dict[acc.Event, int] = {}
        for first, number in self.schedule.stages(arguments.integer("steps", steps, least=0)):
            counts[self.event(first)] = counts.get(self.event(first), 0) + number
        return acc.Composed(tuple(acc.Repeated(event, n) for event, n in counts.items()))

    def sampler(
        self, num_records: int, *, ledger: "Ledger | None" = None, secret: Secret | None = None
    ) -> Sampler:
        """Draws for every sweep, each charged before it is made.

        A draw almost always fits one physical batch; a larger one compiles again, and is never
        truncated.
        """
        processes.require_single_process("a sweep")
        self.sampling.check(num_records, self.dataset_size)
        issuer = issuer_of(Charged(self), ledger, secret)
        return Sampler(self.sampling, num_records, self.physical_batch_size, issuer)

    @property
    def physical_batch_size(self) -> int:
        """Rows of one physical batch, which almost every draw fits."""
        rows = self.batch_size + 6 * int(np.ceil(np.sqrt(self.batch_size))) + 8
        return -(-rows // 8) * 8

    def step(self, weights: Weights, data: tuple[jax.Array, jax.Array], draw: Draw) -> Weights:
        """One compiled sweep over the records of a draw.

        Args:
            weights: the released weights.
            data: (x [N, d_0], y [N, d_L]) float32, all records, on the device.
            draw: from ``sampler``, which charged it; its ticket is spent.
        """
        if data[0].shape[0] != draw.num_records:
            raise ValueError(
                f"data must hold the {draw.num_records} records that the sampler draws from, got "
                f"{data[0].shape[0]}"
            )
        count, most = int(np.count_nonzero(draw.mask)), rounding.most_records(self.batch_size)
        rounding.check_records(count, most)  # the noise covers the rounding of so many
        if draw.ticket is None:
            raise ValueError("draw must come from sampler(), which charges it, got one by hand")
        words = draw.ticket.spend("a sweep", verified=True).words[0]
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        z = np.asarray(self.multipliers(draw.step), np.float32)
        clips = np.asarray(self.l2_clip_norms, np.float32)
        return _step(
            self.network, self.proximal, self.rescale, float(self.step_size),
            float(self.batch_size), weights, data,
            positions_for_device(draw.indices, draw.num_records, False).reshape(-1),
            draw.mask.reshape(-1), clips, z * clips * noise_share(self.batch_size), key,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Charged:
    """The events and the noise of sweeps, for an issuer."""

    algorithm: ReleasedBlocks

    def stretch(self, step: int) -> tuple[acc.Event, dict[str, float], int]:
        """A sweep's event, the noise multiplier of all its blocks together, and up to where."""
        joint = acc.events.joint_gaussian(self.algorithm.multipliers(step))
        multipliers = {"sweep": float(joint.noise_multiplier)}
        return self.algorithm.event(step), multipliers, self.algorithm.schedule.end(step)


def train(
    algorithm: ReleasedBlocks,
    data: tuple[jax.Array, jax.Array],
    steps: int,
    *,
    secret: Secret | None = None,
    ledger: "Ledger | None" = None,
    on_step: Callable[[int, Weights], None] | None = None,
) -> Weights:
    """Trains for ``steps`` sweeps; the ledger is charged before each draw.

    Args:
        algorithm: what to do.
        data: (x [N, d_0], y [N, d_L]) float32.
        steps: how many sweeps, public.
        secret: the randomness; None takes it from the operating system.
        ledger: where each sweep is charged.
        on_step: called with the number of sweeps done and the weights: they are released anyway.
    """
    secret = secret or Secret.new()
    data = jax.device_put(check_data(algorithm.network, data))
    weights = algorithm.init(secret.jax_key("init"))
    sampler = algorithm.sampler(data[0].shape[0], ledger=ledger, secret=secret)
    for step in range(arguments.integer("steps", steps, least=0)):
        weights = algorithm.step(weights, data, sampler.draw())
        if on_step is not None:
            on_step(step + 1, weights)
    return weights


def noise_share(batch_size: int) -> np.float32:
    """By how much noise is larger than for clip norms alone: the rounding of a sum is covered."""
    return np.float32(1.0 + rounding.error_of_sum(rounding.most_records(batch_size)))


# One number, or one for each block.
Norms = float | tuple[float, ...] | list[float]


def per_block(name: str, given: Norms, blocks: int) -> tuple[float, ...]:
    """One number for each block; a single one is repeated."""
    values = tuple(given) if isinstance(given, tuple | list) else (given,) * blocks
    if len(values) != blocks:
        raise ValueError(f"{name} must hold one number or {blocks}, one a block; got {given!r}")
    return values


def clip_norms(given: Norms, blocks: int) -> tuple[float, ...]:
    """C of each block, in [1e-10, 1e10] as for every clipping rule."""
    values = per_block("l2_clip_norms", given, blocks)
    return tuple(in_float32("l2_clip_norms", value) for value in values)


def check_data(network: Network, data: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The data as float32 arrays of the network's shapes."""
    x, y = (jnp.asarray(part, jnp.float32) for part in data)
    wanted = (network.widths[0], network.widths[-1])
    if x.ndim != 2 or y.ndim != 2 or (x.shape[1], y.shape[1]) != wanted or len(x) != len(y):
        raise ValueError(
            f"data must be x [N, {wanted[0]}] and y [N, {wanted[1]}], got {x.shape} and {y.shape}"
        )
    return x, y


compiled_sweep = jax.jit(sweep, static_argnums=(0, 1, 2, 3, 4))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _step(
    network: Network, proximal: Proximal, rescale: Rescale | None, step_size: float,
    divisor: float, weights: Weights, data: tuple[jax.Array, jax.Array], indices: jax.Array,
    mask: jax.Array, clips: jax.Array, stds: jax.Array, key: jax.Array,
) -> Weights:  # fmt: skip
    x, y = data[0][indices], data[1][indices]
    return sweep(
        network, proximal, rescale, step_size, divisor, weights, x, y, mask, clips, stds, key
    )
