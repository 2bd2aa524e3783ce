"""One object that makes the sampler, the clipped sum, the noise and the ledger event together."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import optax

from jaxdp import _validate
from jaxdp import accounting as acc
from jaxdp.clipping import ClippedGrad, Rule, clip, clipped_grad
from jaxdp.noise import privatize
from jaxdp.sampling import FixedSize, FullBatch, Poisson, Sampler, Sampling
from jaxdp.seeds import Secret

if TYPE_CHECKING:
    from jaxdp.ledger import Ledger


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A private training step: how records are drawn, clipped and noised, and what that costs.

    Formal guarantee: a step that draws with :meth:`sampler`, sums with :meth:`clipped_grad` (or any
    sum that carries its own sensitivity) and passes through :meth:`privatize` satisfies what
    :attr:`event` says, under the relations that the event supports.

    Attributes:
        rule: the clipping rule.
        noise_multiplier: standard deviation of the noise over one record's largest contribution.
        sampling: how each step's records are drawn.
        batch_size: the expected batch size, the public divisor.
        dataset_size: the declared public number of records; never computed from private data.
    """

    rule: Rule
    noise_multiplier: float
    sampling: Sampling
    batch_size: int
    dataset_size: int

    @property
    def event(self) -> acc.Event:
        """The accounting event of one step."""
        return self.sampling.event(acc.Gaussian(self.noise_multiplier), self.dataset_size)

    def clipped_grad(self, loss_fn: Callable[..., Any], **options: Any) -> ClippedGrad:
        """``jaxdp.clipped_grad(loss_fn, self.rule, **options)``."""
        return clipped_grad(loss_fn, self.rule, **options)

    def privatize(self, key: jax.Array | None = None) -> optax.GradientTransformation:
        """The noise, to be put first in an optax chain; see :func:`jaxdp.privatize`."""
        return privatize(self.noise_multiplier, self.batch_size, key)

    def sampler(
        self,
        num_records: int,
        *,
        ledger: "Ledger | None" = None,
        secret: Secret | None = None,
        physical_batch_size: int | None = None,
    ) -> Sampler:
        """Draws for every step; with a ledger, each draw is charged before it is made.

        Args:
            num_records: how many records are at hand (under Poisson sampling it need not equal
                ``dataset_size``, and is itself private).
            ledger: where every draw is charged.
            secret: the randomness; None takes it from the operating system.
            physical_batch_size: rows of one compiled pass; None chooses for the device.

        Raises:
            ValueError: the records cannot be drawn from like this; at a draw, the ledger already
                holds that step of the same secret (to go on after a crash, take a new secret).
        """
        self.sampling.check(num_records, self.dataset_size)
        secret = secret or Secret.new()
        charge = None if ledger is None else self._charger(ledger, secret)
        if physical_batch_size is None:
            physical_batch_size = default_physical_batch_size(self.batch_size)
        return Sampler(self.sampling, num_records, physical_batch_size, secret, 0, charge)

    def _charger(self, ledger: "Ledger", secret: Secret) -> Callable[[int], None]:
        stream, event = secret.identifier(), self.event

        def charge(step: int) -> None:
            ledger.charge(event, stream=stream, first_step=step, source="sampler")

        return charge

    def epsilon(
        self,
        steps: int,
        delta: float,
        relation: acc.Relation = acc.Relation.ADD_OR_REMOVE_ONE,
    ) -> acc.Bound:
        """Bounds on epsilon after ``steps`` steps at ``delta``."""
        return acc.epsilon(acc.Repeated(self.event, steps), delta, relation=relation)


def dp_sgd(
    noise_multiplier: float,
    l2_clip_norm: float,
    batch_size: int,
    dataset_size: int,
    sampling: str = "poisson",
) -> Mechanism:
    """DP-SGD (Abadi et al. 2016, arXiv:1607.00133v2, Algorithm 1): flat clipping, Gaussian noise.

    Args:
        noise_multiplier: noise standard deviation over ``l2_clip_norm``, on the sum.
        l2_clip_norm: the norm to which every per-example gradient is clipped.
        batch_size: the expected number of records of a step.
        dataset_size: the number of records, a declared public constant.
        sampling: "poisson" (each record with probability batch_size / dataset_size), "fixed_size"
            (exactly batch_size, without replacement) or "full_batch" (needs batch_size =
            dataset_size).

    Raises:
        ValueError: an argument is out of its range, named with its value.
    """
    _validate.non_negative("noise_multiplier", noise_multiplier)
    batch_size = _validate.integer("batch_size", batch_size, least=1)
    dataset_size = _validate.integer("dataset_size", dataset_size, least=1)
    if batch_size > dataset_size:
        raise ValueError(
            f"batch_size must be at most dataset_size ({dataset_size}), got {batch_size}"
        )
    _validate.one_of("sampling", sampling, ("poisson", "fixed_size", "full_batch"))
    if sampling == "full_batch" and batch_size != dataset_size:
        raise ValueError(
            f"batch_size must be dataset_size ({dataset_size}) for full_batch, got {batch_size}"
        )
    draws: dict[str, Sampling] = {
        "poisson": Poisson(batch_size / dataset_size),
        "fixed_size": FixedSize(batch_size),
        "full_batch": FullBatch(),
    }
    rule = clip(l2_clip_norm)
    return Mechanism(rule, noise_multiplier, draws[sampling], batch_size, dataset_size)


def default_physical_batch_size(batch_size: int) -> int:
    """Rows of one compiled pass: 64 on a CPU (fastest as measured), 1,024 on an accelerator."""
    return min(batch_size, 64 if jax.default_backend() == "cpu" else 1024)
