"""A private training step, one line an arrow: sampling, ledger, clipping, noise, optax."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.clipping import ClippedGrad
from jaxdp.ledger import Ledger
from jaxdp.mechanism import Charge, default_physical_batch_size
from jaxdp.optimizers.as_published import LeakySum, RawGradient
from jaxdp.optimizers.energy import PrivateEnergy, PublicEnergy
from jaxdp.optimizers.method import Method
from jaxdp.sampling import Sampler
from jaxdp.seeds import Secret
from jaxdp.types import ClipInfo, PyTree, StepInfo, Summed


class TrainState(NamedTuple):
    """The state of training. **Secret** as a whole: ``opt_state`` holds the noise key.

    Attributes:
        params: pytree of parameters: the released model.
        opt_state: state of the optax chain, noise key included.
        step: how many steps were taken.
    """

    params: PyTree
    opt_state: PyTree
    step: int


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains with a chain whose first transformation is ``mechanism.privatize()``.

    Attributes:
        grad_fn: the clipped per-example gradients.
        tx: the optax chain, privatize first.
        sampler: the draws; made with a ledger, it charges each before drawing.
        rng: key of dropout and augmentation, where the loss takes one.
        context: from the optimizer state to further arguments of ``grad_fn.sum``, such as the
            public diagonal ``scale`` by which gradients are divided before clipping.
        energy: what judges candidates, where the chain is annealed.
    """

    grad_fn: ClippedGrad
    tx: optax.GradientTransformation
    sampler: Sampler
    rng: jax.Array | None = None
    context: Callable[[PyTree], dict[str, PyTree]] | None = None
    energy: PublicEnergy | PrivateEnergy | None = None

    def __post_init__(self) -> None:
        energy, charge = self.energy, self.sampler.on_draw
        leaks = isinstance(self.grad_fn, RawGradient)
        if leaks and isinstance(charge, Charge) and not charge.mechanism.leak:
            raise ValueError(
                "sampler must be that of the method's own mechanism, which names its leak, for an "
                f"algorithm as published; got one that charges {charge.mechanism}"
            )
        if isinstance(energy, PrivateEnergy) and energy.sampler.secret == self.sampler.secret:
            raise ValueError(
                "energy must be drawn with a secret of its own, such as secret.child('energy'), "
                "got that of the gradient's sampler: both would draw the same records, which two "
                "events do not cover"
            )

    def seek(self, step: int) -> None:
        """Sets every sampler to ``step``, for a resumed run."""
        self.sampler.step = step
        if isinstance(self.energy, PrivateEnergy):
            self.energy.sampler.step = step

    def init(self, params: PyTree) -> TrainState:
        """The state before the first step. The trainer owns a copy of the parameters."""
        params = jax.tree.map(jnp.array, params)
        state = self.tx.init(self.grad_fn.trained(params))
        # Copied too: parts that share a buffer, such as one zero, could not all be donated.
        return TrainState(params, jax.tree.map(jnp.array, state), 0)

    def step(self, state: TrainState, data: PyTree) -> tuple[TrainState, StepInfo, list[ClipInfo]]:
        """One private step.

        Args:
            state: the state; its memory is reused, so it must not be used afterwards.
            data: pytree of arrays [N, ...], all records, on the device.

        Returns:
            The next state; what may be logged; and the **sensitive** clipping information.

        Raises:
            ValueError: the state is not the one that the samplers are at, as after stepping from an
                old state or from a second ``init``: its noise was used before.
        """
        self._check_position(state)
        rng = None if self.rng is None else jax.random.fold_in(self.rng, state.step)
        draw = self.sampler.draw()
        context = self._context(state.opt_state)
        summed, sensitive = self.grad_fn.sum(state.params, data, draw, rng, **context)
        extra = self._extra(summed)
        params, opt_state, info = self._apply(state.params, state.opt_state, summed, **extra)
        return TrainState(params, opt_state, state.step + 1), info, sensitive

    def _check_position(self, state: TrainState) -> None:
        samplers = [self.sampler]
        if isinstance(self.energy, PrivateEnergy):
            samplers.append(self.energy.sampler)
        for sampler in samplers:
            if sampler.step != state.step:
                raise ValueError(
                    f"state must be that of step {sampler.step}, which the sampler draws next, got "
                    f"one of step {state.step}: noise or draws would be used twice. Make a new "
                    "trainer for a new run; for one restored from a checkpoint call seek(step)"
                )

    def _extra(self, summed: Summed) -> dict[str, Any]:
        extra = {} if self.energy is None else {"energy": self.energy.prepare()}
        return {**extra, "leaked": summed.leaked} if isinstance(summed, LeakySum) else extra

    @functools.cached_property
    def _context(self) -> Callable[[PyTree], dict[str, PyTree]]:
        return (lambda _: {}) if self.context is None else jax.jit(self.context)

    @functools.cached_property
    def _apply(self) -> Callable[..., Any]:
        return compile_update(self.tx, donate=True)


def trainer_of(
    method: Method,
    loss_fn: Callable[..., jax.Array],
    num_records: int,
    *,
    secret: Secret | None = None,
    ledger: Ledger | None = None,
    energy: PublicEnergy | PrivateEnergy | None = None,
    physical_batch_size: int | None = None,
    rng: jax.Array | None = None,
) -> Trainer:
    """The trainer of a method, its sampler and noise from one secret.

    Args:
        method: such as ``jaxdp.optimizers.adadp(...)``.
        loss_fn: ``(params, example) -> scalar`` for one example.
        num_records: how many records are at hand.
        secret: the randomness; None takes it from the operating system.
        ledger: where every step is charged.
        energy: what judges the candidates of an annealed method.
        physical_batch_size: rows of one compiled pass; None chooses for the device.
        rng: key of dropout and augmentation.

    Raises:
        ValueError: a private energy that the method does not charge, or the other way round, or
            that is drawn with the gradient's secret; with a ledger, an energy whose draws it is not
            charged for.
    """
    _check_energy(method, energy, ledger)
    secret = secret or Secret.new()
    rows = physical_batch_size or default_physical_batch_size(method.mechanism.batch_size)
    sampler = method.mechanism.sampler(
        num_records, ledger=ledger, secret=secret, physical_batch_size=rows
    )
    tx = method.chain(secret.jax_key("noise"))
    context = method.context if method.scale or method.raw else None
    return Trainer(method.clipped_grad(loss_fn), tx, sampler, rng, context, energy)


def _check_energy(
    method: Method, energy: PublicEnergy | PrivateEnergy | None, ledger: Ledger | None
) -> None:
    charged = energy.mechanism if isinstance(energy, PrivateEnergy) else None
    if charged != method.energy:
        raise ValueError(
            "energy must be the one that the method charges: the method's energy mechanism is "
            f"{method.energy}, that of the energy {charged}"
        )
    if isinstance(energy, PrivateEnergy) and ledger is not None:
        charge = energy.sampler.on_draw
        if not isinstance(charge, Charge) or charge.ledger is not ledger:
            raise ValueError(
                "energy must be drawn by a sampler with a ledger, that of the gradient: make it by "
                "mechanism.sampler(..., ledger=ledger), got one that charges nothing to it"
            )


def compile_update(tx: optax.GradientTransformation, *, donate: bool = False) -> Callable[..., Any]:
    """A compiled ``(params, opt_state, summed, **extra) -> (params, opt_state, StepInfo)``.

    ``Summed`` is not a pytree, so ``jax.jit(tx.update)`` cannot take one; this passes its parts
    through ``jit`` and puts it together again inside, where the noise is added.

    Args:
        tx: an optax chain, ``privatize`` first. Extra arguments reach its ``update``.
        donate: reuse the memory of ``params`` and ``opt_state``, which are then gone.
    """
    chain = optax.with_extra_args_support(tx)

    def apply(
        params: PyTree, opt_state: PyTree, value: PyTree, l2: Any, unscale: PyTree | None,
        votes: jax.Array | None,
        extra: dict[str, Any],
    ) -> tuple[PyTree, PyTree, StepInfo]:
        trained = _like(value, params)
        summed = Summed(value, l2, unscale, votes)
        updates, opt_state = chain.update(summed, opt_state, trained, **extra)
        info = StepInfo(update_norm=optax.tree.norm(updates))
        moved = optax.apply_updates(trained, updates)
        return _filled(moved, params), opt_state, info

    compiled = jax.jit(apply, donate_argnums=(0, 1) if donate else ())

    def update(
        params: PyTree, opt_state: PyTree, summed: Summed, **extra: Any
    ) -> tuple[PyTree, PyTree, StepInfo]:
        if not isinstance(summed, Summed):
            raise TypeError(f"summed must be a Summed from clipping, got {type(summed).__name__}")
        l2 = jnp.asarray(summed.l2, jnp.float32)
        return compiled(params, opt_state, summed.value, l2, summed.unscale, summed.votes, extra)

    return update


def _like(value: PyTree, params: PyTree) -> PyTree:
    """The parameters with None where the sum has none: frozen."""
    structure: Any = jax.tree.structure(params)
    found = structure.flatten_up_to(value)
    leaves = [
        None if v is None else leaf for v, leaf in zip(found, jax.tree.leaves(params), strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def _filled(moved: PyTree, params: PyTree) -> PyTree:
    """The moved parameters, and the frozen ones where they are None."""
    structure: Any = jax.tree.structure(params)
    found = structure.flatten_up_to(moved)
    leaves = [
        leaf if m is None else m for m, leaf in zip(found, jax.tree.leaves(params), strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)
