"""DP-SBCD as its paper states it: no clipping, a claimed figure, and no guarantee."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.ledger.seeds import Secret
from jaxdp.ledger.tickets import released_once
from jaxdp.papers import claims, hidden_state
from jaxdp.papers.block_coordinate.hidden import HiddenBlocks, secret_partition
from jaxdp.papers.block_coordinate.network import Network, Weights
from jaxdp.papers.block_coordinate.proximal import NO_PROXIMAL, Proximal, Rescale
from jaxdp.papers.block_coordinate.released import ReleasedBlocks, check_data, compiled_sweep
from jaxdp.papers.block_coordinate.schedules import CONSTANT, SweepSchedule

if TYPE_CHECKING:
    from jaxdp.ledger import Ledger

REASON = (
    "DP-SBCD as published: the sensitivity of a gradient is assumed and not enforced, the blocks "
    "are coupled through un-noised U and V, and rescaling a hidden iterate is not a contraction"
)


@dataclasses.dataclass(frozen=True)
class AsPublished:
    """DP-SBCD's Algorithm 2 (rebuilt from its prose; its formulas are lost in the text at hand).

    U and V come from a forward pass in every sweep: whether the paper keeps them is lost as well.

    No guarantee: the event is non-private. ``claim`` gives the figure of Theorem 4.6.

    Attributes:
        network: the network.
        noise_std: standard deviation of the noise ADDED TO W at each update, before the schedule.
        step_size: eta.
        batch_size: b of the fixed batches.
        dataset_size: N.
        epochs: K.
        proximal: regulariser; a projection here is not the paper's.
        rescale: equation (2), by power iteration.
        schedule: factors on the noise, by epoch.
    """

    network: Network
    noise_std: float
    step_size: float
    batch_size: int
    dataset_size: int
    epochs: int
    proximal: Proximal = NO_PROXIMAL
    rescale: Rescale | None = None
    schedule: SweepSchedule = CONSTANT

    def __post_init__(self) -> None:
        arguments.non_negative("noise_std", self.noise_std)
        arguments.positive("step_size", self.step_size)
        for name in ("batch_size", "dataset_size", "epochs"):
            arguments.integer(name, getattr(self, name), least=1)

    @property
    def event(self) -> acc.NonPrivate:
        """The event that the ledger is charged for."""
        return acc.NonPrivate(REASON)

    def chains(self, sensitivity: float) -> tuple[hidden_state.NoisyChain, ...]:
        """One chain for each layer, as Theorem 4.6 imagines them.

        Args:
            sensitivity: S_g of Assumption 4.4: how far replacing a record moves a batch's total
                gradient. Assumed; nothing enforces it.
        """
        arguments.positive("sensitivity", sensitivity)
        noise = tuple((self.noise_std * f) ** 2 for f in self.schedule.over(self.epochs))
        chain = hidden_state.NoisyChain(
            batches=-(-self.dataset_size // self.batch_size),
            epochs=self.epochs,
            contributions=(self.step_size * sensitivity / (2 * self.batch_size),),
            variances=noise,
            proximal=(1 / (1 + self.step_size * self.proximal.weight_decay),),
        )
        return (chain,) * self.network.blocks

    def claim(self, sensitivity: float, delta: float, order: float | None = None) -> acc.Claim:
        """Theorem 4.6's figure for the run; see ``jaxdp.papers.claims.dp_sbcd_theorem_4_6``."""
        return claims.dp_sbcd_theorem_4_6(self.chains(sensitivity), delta, order)


def claimed_for(made: ReleasedBlocks | HiddenBlocks, steps: int, delta: float) -> acc.Claim:
    """Theorem 4.6's figure for a run of R1, R2 or R3, had it been one of the paper's.

    A replaced record moves a batch's clipped total by at most twice the clip norm. Under R1 each
    sweep is a step of every block's chain over fixed batches; R2 and R3 have their own chains.

    Args:
        made: R1, R2 or R3.
        steps: sweeps of R1; not read for the others.
        delta: in (0, 1).
    """
    if not isinstance(made, ReleasedBlocks):
        chains = [made.chain(block) for _, block in made.order]
        return claims.dp_sbcd_theorem_4_6(chains, delta)
    batches = -(-made.dataset_size // made.batch_size)
    chains = [
        hidden_state.NoisyChain(
            batches=batches,
            epochs=-(-steps // batches),
            contributions=(made.step_size * norm / made.batch_size,),
            variances=((made.step_size * z * norm / made.batch_size) ** 2,),
            proximal=(1 / (1 + made.step_size * made.proximal.weight_decay),),
        )
        for z, norm in zip(made.noise_multipliers, made.l2_clip_norms, strict=True)
    ]
    return claims.dp_sbcd_theorem_4_6(chains, delta)


def train_as_published(
    algorithm: AsPublished,
    data: tuple[jax.Array, jax.Array],
    *,
    secret: Secret | None = None,
    ledger: "Ledger | None" = None,
    on_epoch: Callable[[int, Weights], None] | None = None,
) -> Weights:
    """Trains over one fixed partition; the ledger is charged as non-private first."""
    data = check_data(algorithm.network, data)
    secret = released_once(algorithm.event, repr(algorithm), ledger, secret, source="by hand")
    rng = secret.philox("partition", 0)
    x, y, mask = secret_partition(data, algorithm.batch_size, rng)
    weights, key = algorithm.network.init(secret.jax_key("init")), secret.jax_key("noise")
    unclipped = np.full(algorithm.network.blocks, np.inf, np.float32)
    on_sum = algorithm.batch_size / algorithm.step_size * algorithm.noise_std
    for epoch, factor in enumerate(algorithm.schedule.over(algorithm.epochs)):
        stds = np.full(algorithm.network.blocks, on_sum * factor, np.float32)
        for j in range(len(x)):
            weights = compiled_sweep(
                algorithm.network, algorithm.proximal, algorithm.rescale,
                float(algorithm.step_size),
                float(algorithm.batch_size), weights, x[j], y[j], mask[j], unclipped, stds,
                jax.random.fold_in(key, epoch * len(x) + j),
            )  # fmt: skip
        if on_epoch is not None:
            on_epoch(epoch + 1, weights)
    return weights
