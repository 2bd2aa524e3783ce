"""R2 and R3: one block at a time on frozen variables, whose last iterate alone is released."""

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
from jaxdp.ledger.seeds import Secret
from jaxdp.ledger.tickets import released_once
from jaxdp.noise.normals import add_normals
from jaxdp.papers import hidden_state
from jaxdp.papers.block_coordinate.network import SOFTMAX_RESIDUAL, Lifted, Network, Weights
from jaxdp.papers.block_coordinate.proximal import NO_PROXIMAL, Proximal
from jaxdp.papers.block_coordinate.released import check_data, clip_norms, noise_share
from jaxdp.papers.block_coordinate.schedules import CONSTANT, SweepSchedule
from jaxdp.papers.block_coordinate.sweep import clipped_sum

if TYPE_CHECKING:
    from jaxdp.ledger import Ledger

WATCHED = "the parameters of a block in training were handed out after every epoch"
# Standard deviations of a step's noise that a weight may hold, and the least such deviation.
_SPACINGS, _FLOOR = 2.0**19, 2.0**-100
Batches = tuple[jax.Array, jax.Array, jax.Array]


def secret_partition(
    data: tuple[jax.Array, jax.Array], batch_size: int, rng: np.random.Generator
) -> Batches:
    """Puts every record into one batch, uniformly at random and without looking at it.

    Args:
        data: (x [N, d_0], y [N, d_L]).
        batch_size: b.
        rng: where the permutation comes from; secret.

    Returns:
        x [l, b, d_0], y [l, b, d_L], mask [l, b]; the last batch is padded with rows of zeros.
    """
    records = data[0].shape[0]
    order = rng.permutation(records)
    batches = -(-records // batch_size)
    padding = batches * batch_size - records
    order = np.concatenate([order, np.zeros(padding, order.dtype)]).reshape(batches, batch_size)
    mask = (np.arange(batches * batch_size) < records).reshape(batches, batch_size)
    x, y = (jnp.where(mask[:, :, None], part[order], 0.0) for part in data)
    return x, y, jnp.asarray(mask)


@dataclasses.dataclass(frozen=True)
class HiddenBlocks:
    """Sequential hidden-state DP-SBCD (variants R2 and R3; docs/hidden_state.md).

    Formal guarantee: replace-one alone, over one secret, fixed partition. For every sweep and every
    block, last first: U and V of each record are computed ONCE from released weights; then K epochs
    of proximal gradient descent, clipped record by record and noised, run in one compiled loop that
    returns nothing but its last iterate. Each step is 1-Lipschitz because a clipped block loss is
    convex and gamma B^2-smooth, B enforced by clipping, and the step size is at most
    2/(gamma B^2). ``event`` charges each block as such a chain; releases compose. Every row is kept
    in a public ball, ``largest``, so that no rounding swallows noise, however weights grow.

    Attributes:
        network: the network.
        noise_multiplier: z before the schedule, noise on the sum of a batch over the clip norm.
        l2_clip_norms: C_i of each block. One number: the same for all.
        step_size: eta, at most 2/(gamma B^2).
        batch_size: b, the divisor of every batch.
        dataset_size: N, public; the data must hold exactly so many records.
        inner_epochs: K, public: epochs over the partition for each block.
        sweeps: public: how often every block is trained.
        proximal: regulariser or projection after each step, all of them 1-Lipschitz.
        schedule: factors on the noise multiplier, by inner epoch.
        average: charge the average over the record's batch instead of the worst batch; needs
            batches of equal size.
        direct: R3, the convex case: the single layer is fitted to the wanted outputs themselves.
    """

    network: Network
    noise_multiplier: float
    l2_clip_norms: tuple[float, ...]
    step_size: float
    batch_size: int
    dataset_size: int
    inner_epochs: int
    sweeps: int = 1
    proximal: Proximal = NO_PROXIMAL
    schedule: SweepSchedule = CONSTANT
    average: bool = False
    direct: bool = False

    def __post_init__(self) -> None:
        arguments.positive("noise_multiplier", self.noise_multiplier)
        norms = clip_norms(self.l2_clip_norms, self.network.blocks)
        object.__setattr__(self, "l2_clip_norms", norms)
        self._check_softmax()
        step, most = arguments.positive("step_size", self.step_size), 2 / self.network.smoothness
        if step > most:
            raise ValueError(
                f"step_size must be at most 2/(gamma B^2) = {most:g}, beyond which a step expands "
                f"distances, got {step!r}"
            )
        for name in ("batch_size", "dataset_size", "inner_epochs", "sweeps"):
            arguments.integer(name, getattr(self, name), least=1)
        if self.batch_size > self.dataset_size:
            raise ValueError(
                f"batch_size must be at most dataset_size ({self.dataset_size}), got "
                f"{self.batch_size}"
            )
        if self.average and self.dataset_size % self.batch_size:
            raise ValueError(
                f"batch_size must divide dataset_size ({self.dataset_size}) for an average over "
                f"equal batches, got {self.batch_size}"
            )
        if self.direct and self.network.blocks > 1:
            raise ValueError(f"direct must be False for {self.network.blocks} layers, got True")
        self._check_noise()

    def _check_softmax(self) -> None:
        """A clipped cross-entropy is no convex loss: its clip norm must be beyond any gradient."""
        network, norm = self.network, self.l2_clip_norms[-1]
        least = SOFTMAX_RESIDUAL * network.activation_bound
        if network.loss == "softmax" and norm < least:
            raise ValueError(
                f"l2_clip_norms of a softmax block must be at least sqrt(2) B = {least:.7g}, which "
                f"no gradient exceeds: clipped it would be the gradient of no convex loss; got "
                f"{norm!r}"
            )

    def _check_noise(self) -> None:
        """Noise that rounding swallows does not blur what a hidden chain counts on it to blur.

        The ball must hold a usual row before the first step, of N(0, 1/fan_in), a step of all
        records of a batch, and the ball of a projection, whose rounding is of its radius.
        """
        for block, norm in enumerate(self.l2_clip_norms):
            # R3 begins with zeros.
            start = 0.0 if self.direct else 1.0
            sizes = (start, self.step_size * norm, self.proximal.spectral_radius or 0.0)
            noise, least = self._noise(block), max(_FLOOR, max(sizes) / _SPACINGS)
            if not noise >= least:
                raise ValueError(
                    "step_size * noise_multiplier * l2_clip_norm / batch_size must be at least "
                    f"{least:.3g} in block {block}, below which noise is lost in the rounding of "
                    f"the weights that it is added to, got {noise:.3g}"
                )

    def _noise(self, block: int) -> float:
        """The least standard deviation of the noise of a step on a weight."""
        scale = self.step_size * self.l2_clip_norms[block] / self.batch_size
        return scale * min(self.multipliers())

    def largest(self, block: int) -> float:
        """The bound on the norm of every row, public: 2^19 standard deviations of a step's noise.

        A step starts and moves within it, so the noise is at least 8 of float32's spacings at the
        sum of both, 2^20. So it is in the products W v, whose every partial sum is at most B times
        this. Projection on the balls is 1-Lipschitz, as every one on a convex set.
        """
        # Products beyond float32 would be dropped where those of a neighbour are shortened.
        finite = 1e30 / (self.network.activation_bound * self.network.shape(block)[1])
        return min(_SPACINGS * self._noise(block), finite)

    @property
    def order(self) -> list[tuple[int, int]]:
        """(sweep, block) of every training of a block: last block first, in every sweep."""
        blocks = range(self.network.blocks - 1, -1, -1)
        return [(sweep, block) for sweep in range(self.sweeps) for block in blocks]

    def init(self, key: jax.Array) -> Weights:
        """The weights before the first step, of the key alone; zeros for R3."""
        weights = self.network.init(key)
        if self.direct:
            return (jnp.zeros_like(weights[0]),)
        return tuple(limit_rows(w, self.largest(block)) for block, w in enumerate(weights))

    def multipliers(self) -> tuple[float, ...]:
        """z of each inner epoch."""
        return tuple(self.noise_multiplier * f for f in self.schedule.over(self.inner_epochs))

    def chain(self, block: int) -> hidden_state.NoisyChain:
        """The steps of one block's training, as the accountant reads them."""
        return hidden_state.clipped_gradient_chain(
            epochs=self.inner_epochs,
            dataset_size=self.dataset_size,
            batch_size=self.batch_size,
            step_sizes=self.step_size,
            noise_multipliers=self.multipliers(),
            l2_clip_norm=self.l2_clip_norms[block],
            smoothness=self.network.smoothness_of(block),
            weight_decay=self.proximal.certain_decay(self.step_size),
            diameter=self.proximal.diameter(self.network.shape(block)),
        )

    def event(self, exposed: str = "") -> hidden_state.HiddenState:
        """Everything that the whole run releases, as one event: all blocks share the partition.

        Args:
            exposed: what else left a block's loop, if anything: it costs the hidden-state number.
        """
        chains = [self.chain(i) for i in range(self.network.blocks)]
        return hidden_state.HiddenState(tuple(chains * self.sweeps), self.average, exposed)


@dataclasses.dataclass(frozen=True)
class ChargedWhole:
    """The one event of a whole hidden run, and its noise, for an issuer."""

    algorithm: HiddenBlocks

    def stretch(self, step: int) -> tuple[acc.Event, dict[str, float], int]:
        """The event of the whole run, for its one step, and the noise multiplier of every sum."""
        return self.algorithm.event(), {"run": self.algorithm.noise_multiplier}, step + 1


def train_hidden(
    algorithm: HiddenBlocks,
    data: tuple[jax.Array, jax.Array],
    *,
    secret: Secret | None = None,
    ledger: "Ledger | None" = None,
    on_release: Callable[[int, int, Weights], None] | None = None,
    watch: Callable[[int, int, Weights], None] | None = None,
) -> Weights:
    """Trains all blocks; the whole run is charged before the first record is read.

    Args:
        algorithm: what to do.
        data: (x [N, d_0], y [N, d_L]) float32, N the declared size.
        secret: the randomness, partition included; None takes it from the operating system.
        ledger: where the run is charged.
        on_release: called with (sweep, block, weights) after each block: they are released anyway.
        watch: called with (sweep, block, weights) after every INNER epoch. The inner iterates then
            leave the loop, so the run is charged for all of them and says so.

    Returns:
        The released weights.
    """
    data = check_data(algorithm.network, data)
    if data[0].shape[0] != algorithm.dataset_size:
        raise ValueError(
            f"dataset_size must be the number of records ({data[0].shape[0]}) for a fixed "
            f"partition, got {algorithm.dataset_size}"
        )
    event = algorithm.event(WATCHED if watch is not None else "")
    secret = released_once(event, repr(algorithm), ledger, secret)
    rng = secret.philox("partition", 0)
    batches = secret_partition(data, algorithm.batch_size, rng)
    weights, key = algorithm.init(secret.jax_key("init")), secret.jax_key("noise")
    for sweep, block in algorithm.order:
        one = jax.random.fold_in(jax.random.fold_in(key, sweep), block)
        weights = train_block(algorithm, block, weights, batches, one, sweep, watch)
        if on_release is not None:
            on_release(sweep, block, weights)
    return weights


def train_block(
    algorithm: HiddenBlocks, block: int, weights: Weights, batches: Batches, key: jax.Array,
    sweep: int, watch: Callable[[int, int, Weights], None] | None,
) -> Weights:  # fmt: skip
    """The weights with one block trained; all its epochs in one compiled loop, if unwatched."""
    x, y, mask = batches
    frozen = _lift(algorithm.network, block, algorithm.direct, weights, x, y)
    stds = np.asarray(algorithm.multipliers(), np.float32) * np.float32(
        algorithm.l2_clip_norms[block]
    )
    stds *= noise_share(algorithm.batch_size)
    epochs = np.arange(algorithm.inner_epochs)
    each = 1 if watch is not None else algorithm.inner_epochs
    for at in range(0, algorithm.inner_epochs, each):
        now = slice(at, at + each)
        new = _inner_loop(
            algorithm.network, block, algorithm.proximal, float(algorithm.step_size),
            float(algorithm.batch_size), weights[block], frozen, mask,
            np.float32(algorithm.l2_clip_norms[block]), np.float32(algorithm.largest(block)),
            stds[now], epochs[now], key,
        )  # fmt: skip
        weights = (*weights[:block], new, *weights[block + 1 :])
        if watch is not None:
            watch(sweep, block, weights)
    return weights


def limit_rows(w: jax.Array, largest: float | jax.Array) -> jax.Array:
    """The weights [d_out, d_in], every row shortened to a norm of at most ``largest``."""
    # Divided first: squares of large weights would overflow.
    norms = jnp.linalg.norm(w / largest, axis=1, keepdims=True)
    return jnp.where(norms > 1, w / jnp.maximum(norms, 1.0), w)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _lift(
    network: Network, block: int, direct: bool, weights: Weights, x: jax.Array, y: jax.Array
) -> Lifted:
    """Each record's frozen V and U, [l, b, ...]; batch by batch, to hold little at a time."""

    def one(batch: tuple[jax.Array, jax.Array]) -> Lifted:
        lifted = network.lift(block, weights, *batch)
        keep = not direct or network.is_softmax(block)
        return lifted if keep else lifted._replace(u=batch[1])

    lifted: Lifted = jax.lax.map(one, (x, y))
    return lifted


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _inner_loop(
    network: Network, block: int, proximal: Proximal, step_size: float, divisor: float,
    w: jax.Array, frozen: Lifted, mask: jax.Array, l2_clip_norm: jax.Array, largest: jax.Array,
    stds: jax.Array, epochs: jax.Array, key: jax.Array,
) -> jax.Array:  # fmt: skip
    """The last iterate of noisy proximal gradient descent on one block; nothing else leaves.

    Args:
        network: gives the block's loss.
        block: i.
        proximal: P.
        step_size: eta.
        divisor: b.
        w: the block's released weights [d_i, d_{i-1}].
        frozen: V [l, b, d_{i-1}] and U [l, b, d_i].
        mask: bool [l, b].
        l2_clip_norm: C.
        largest: every row of weights is shortened to this norm.
        stds: float32 [K], noise on the sum in each epoch.
        epochs: int [K], their numbers, which with the key give the noise.
        key: secret, one for each block and sweep.
    """

    def step(w: jax.Array, batch: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        v, u, rows, std, noise_key = batch
        products = rounding.exact_einsum("...i,oi->...o", v, w).reshape(u.shape)
        residuals = network.residual(block, products, u, u)
        total = clipped_sum(residuals, v, rows, l2_clip_norm, convex=True)
        noisy = add_normals(total, std, jax.random.key_data(noise_key))
        moved = proximal(w - step_size / divisor * noisy, step_size)
        return limit_rows(moved, largest), None

    def epoch(w: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        std, number = now
        count = mask.shape[0]
        keys = jax.random.split(jax.random.fold_in(key, number), count)
        batches = (frozen.v, frozen.u, mask, jnp.broadcast_to(std, (count,)), keys)
        return jax.lax.scan(step, w, batches)[0], None

    return jax.lax.scan(epoch, w, (stds, epochs))[0]
