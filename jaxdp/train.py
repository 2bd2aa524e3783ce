"""A private training step, one line an arrow: sampling, ledger, clipping, noise, optax."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.clipping import ClippedGrad
from jaxdp.sampling import Sampler
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
    """

    grad_fn: ClippedGrad
    tx: optax.GradientTransformation
    sampler: Sampler
    rng: jax.Array | None = None

    def init(self, params: PyTree) -> TrainState:
        """The state before the first step. The trainer owns a copy of the parameters."""
        params = jax.tree.map(jnp.array, params)
        return TrainState(params, self.tx.init(self.grad_fn.trained(params)), 0)

    def step(self, state: TrainState, data: PyTree) -> tuple[TrainState, StepInfo, list[ClipInfo]]:
        """One private step.

        Args:
            state: the state; its memory is reused, so it must not be used afterwards.
            data: pytree of arrays [N, ...], all records, on the device.

        Returns:
            The next state; what may be logged; and the **sensitive** clipping information.
        """
        rng = None if self.rng is None else jax.random.fold_in(self.rng, state.step)
        draw = self.sampler.draw()
        summed, sensitive = self.grad_fn.sum(state.params, data, draw, rng)
        params, opt_state, info = self._apply(state.params, state.opt_state, summed)
        return TrainState(params, opt_state, state.step + 1), info, sensitive

    @functools.cached_property
    def _apply(self) -> Callable[..., Any]:
        return compile_update(self.tx, donate=True)


def compile_update(tx: optax.GradientTransformation, *, donate: bool = False) -> Callable[..., Any]:
    """A compiled ``(params, opt_state, summed) -> (params, opt_state, StepInfo)``.

    ``Summed`` is not a pytree, so ``jax.jit(tx.update)`` cannot take one; this passes its parts
    through ``jit`` and puts it together again inside, where the noise is added.

    Args:
        tx: an optax chain, ``privatize`` first.
        donate: reuse the memory of ``params`` and ``opt_state``, which are then gone.
    """

    def apply(
        params: PyTree, opt_state: PyTree, value: PyTree, l2: Any, unscale: PyTree | None
    ) -> tuple[PyTree, PyTree, StepInfo]:
        trained = _like(value, params)
        updates, opt_state = tx.update(Summed(value, l2, unscale), opt_state, trained)
        info = StepInfo(update_norm=optax.tree.norm(updates))
        moved = optax.apply_updates(trained, updates)
        return _filled(moved, params), opt_state, info

    compiled = jax.jit(apply, donate_argnums=(0, 1) if donate else ())

    def update(
        params: PyTree, opt_state: PyTree, summed: Summed
    ) -> tuple[PyTree, PyTree, StepInfo]:
        if not isinstance(summed, Summed):
            raise TypeError(f"summed must be a Summed from clipping, got {type(summed).__name__}")
        l2 = jnp.asarray(summed.l2, jnp.float32)
        return compiled(params, opt_state, summed.value, l2, summed.unscale)

    return update


def _like(value: PyTree, params: PyTree) -> PyTree:
    """The parameters with None where the sum has none: frozen."""
    structure = jax.tree.structure(params)
    found = structure.flatten_up_to(value)
    leaves = [
        None if v is None else leaf for v, leaf in zip(found, jax.tree.leaves(params), strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def _filled(moved: PyTree, params: PyTree) -> PyTree:
    """The moved parameters, and the frozen ones where they are None."""
    structure = jax.tree.structure(params)
    found = structure.flatten_up_to(moved)
    leaves = [
        leaf if m is None else m for m, leaf in zip(found, jax.tree.leaves(params), strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)
