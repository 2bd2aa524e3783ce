"""The private step, behind every door: clipping, noise, optax. Written once, compiled once."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.clipping import ClippedGrad
from jaxdp.noise import opened
from jaxdp.optimizers.as_published import LeakySum
from jaxdp.optimizers.energy import DrawnEnergy
from jaxdp.tickets import NoiseKey, parts_taken
from jaxdp.types import ClipInfo, PyTree, StepInfo, Summed

State = tuple[PyTree, PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateStep:
    """The links of one step, as pure functions: what the trainer compiles and auditors repeat.

    Attributes:
        grad_fn: the clipped per-example gradients.
        noise: the transformation that takes a ``Summed``, such as ``mechanism.privatize()``.
        after: the optax chain that the noisy gradient goes into.
        context: from the optimizer state to what the next gradient is clipped by; None for nothing.
    """

    grad_fn: Any
    noise: optax.GradientTransformation
    after: optax.GradientTransformation
    context: Callable[[PyTree], dict[str, PyTree]] | None = None

    def init(self, params: PyTree) -> State:
        """The optimizer state before the first step: (noise, after)."""
        trained = self.grad_fn.trained(params)
        return self.noise.init(trained), self.after.init(trained)

    def clipped_by(self, opt_state: State) -> dict[str, PyTree]:
        """The arguments of clipping of the next gradient, from the optimizer state."""
        return {} if self.context is None else self.context(opt_state)

    def release(
        self, params: PyTree, opt_state: State, summed: Summed, key: NoiseKey, **extra: Any
    ) -> tuple[PyTree, State, PyTree, PyTree]:
        """(params, opt_state, noisy gradient, updates) after one release; to be compiled."""
        first, last = opt_state
        trained = _like(summed.value, params)
        if isinstance(summed, LeakySum):
            extra["leaked"] = summed.leaked
        noise, after = (optax.with_extra_args_support(t) for t in (self.noise, self.after))
        with _noise_asked_for():
            noisy, first = noise.update(summed, first, trained, key=key)
        updates, last = after.update(noisy, last, trained, **extra)
        moved = _filled(optax.apply_updates(trained, updates), params)
        return moved, (first, last), noisy, updates

    @functools.cached_property
    def compiled_context(self) -> Callable[[State], dict[str, PyTree]]:
        """:meth:`clipped_by`, compiled."""
        return (lambda _: {}) if self.context is None else jax.jit(self.context)

    @functools.cached_property
    def update(self) -> Callable[..., Any]:
        """(params, opt_state, summed, **extra) -> (params, opt_state, StepInfo), from the host.

        Spends the ticket of the sum. The memory of ``params`` and ``opt_state`` is reused.
        """

        def inside(
            params: PyTree, opt_state: State, summed: Summed, key: NoiseKey, extra: dict[str, Any]
        ) -> Any:
            params, opt_state, _, updates = self.release(params, opt_state, summed, key, **extra)
            return params, opt_state, StepInfo(optax.tree.norm(updates))

        return _across_jit(inside, donate=True)

    @functools.cached_property
    def whole(self) -> Callable[..., Any]:
        """The step in one compiled function, where the draw fits one pass.

        (params, opt_state, data, indices, mask, key, rng, extra, gathered) -> (params, opt_state,
        StepInfo, ClipInfo). The memory of ``params`` and ``opt_state`` is reused.
        """
        assert isinstance(self.grad_fn, ClippedGrad)
        return jax.jit(self._whole, static_argnames=("gathered", "told"), donate_argnums=(0, 1))

    def _whole(
        self, params: PyTree, opt_state: State, data: PyTree, indices: jax.Array, mask: jax.Array,
        key: NoiseKey, rng: jax.Array | None, extra: dict[str, Any], *, gathered: bool, told: bool,
    ) -> tuple[PyTree, State, StepInfo, ClipInfo | None]:
        context = self.clipped_by(opt_state)
        clipped, info = self.grad_fn.one_pass(
            params, data, indices, mask, rng, gathered=gathered, **context
        )
        summed = self.grad_fn.summed(params, clipped, **context)
        params, opt_state, _, updates = self.release(params, opt_state, summed, key, **extra)
        return params, opt_state, StepInfo(optax.tree.norm(updates)), info if told else None


def compile_update(tx: optax.GradientTransformation, *, donate: bool = False) -> Callable[..., Any]:
    """A compiled ``(params, opt_state, summed, **extra) -> (params, opt_state, StepInfo)``.

    ``Summed`` cannot pass through ``jit``; this spends its ticket, passes its parts, and puts it
    together again inside, where the noise is added.

    Args:
        tx: an optax chain, ``privatize`` first. Extra arguments reach its ``update``.
        donate: reuse the memory of ``params`` and ``opt_state``, which are then gone.
    """
    chain = optax.with_extra_args_support(tx)

    def inside(
        params: PyTree, opt_state: PyTree, summed: Summed, key: NoiseKey, extra: dict[str, Any]
    ) -> Any:
        trained = _like(summed.value, params)
        before: Any = jax.tree.structure(opt_state)
        try:
            with _noise_asked_for():
                updates, after = chain.update(summed, opt_state, trained, key=key, **extra)
        except (TypeError, ValueError) as error:
            _explain(error, chain, trained, before)
            raise
        if before != jax.tree.structure(after):
            _explain(None, chain, trained, before)
        moved = _filled(optax.apply_updates(trained, updates), params)
        return moved, after, StepInfo(update_norm=optax.tree.norm(updates))

    return _across_jit(inside, donate)


@contextlib.contextmanager
def _noise_asked_for() -> Iterator[None]:
    """Refuses, while it is traced, an update that takes a sum and never looks at the noise key."""
    before = parts_taken()
    yield
    if parts_taken() == before:
        raise ValueError(
            "the first link of the chain must add the noise of the key, as jaxdp.privatize does, "
            "got one that opens the Summed and releases it without: put mechanism.privatize() first"
        )


def _explain(error: Exception | None, chain: Any, trained: PyTree, found: Any) -> None:
    """Words for an optimizer state that was made for other parameters than are trained."""
    if found != jax.tree.structure(jax.eval_shape(chain.init, trained)):
        raise ValueError(
            "opt_state must be made for the trained parameters, tx.init(grad_fn.trained(params)), "
            "which has None at frozen leaves; got a state of another structure"
        ) from error


def _across_jit(inside: Callable[..., Any], donate: bool) -> Callable[..., Any]:
    """The one place where a ``Summed`` is taken apart, to pass through ``jit``."""

    def put_together(
        params: PyTree, opt_state: PyTree, parts: tuple[Any, ...], leaked: PyTree, key: NoiseKey,
        extra: dict[str, Any],
    ) -> Any:
        summed = Summed(*parts)
        if leaked is not None:
            value, l2, unscale, votes = parts
            summed = LeakySum(value, l2, unscale, votes, leaked=leaked)
        return inside(params, opt_state, summed, key, extra)

    compiled = jax.jit(put_together, donate_argnums=(0, 1) if donate else ())

    def update(
        params: PyTree, opt_state: PyTree, summed: Summed, *, key: NoiseKey | None = None,
        **extra: Any,
    ) -> Any:
        if not isinstance(summed, Summed):
            raise TypeError(f"summed must be a Summed from clipping, got {type(summed).__name__}")
        extra = taken_apart(extra)
        key = opened(summed, key)
        l2 = jnp.asarray(summed.l2, jnp.float32)
        parts = (summed.value, l2, summed.unscale, summed.votes)
        leaked = summed.leaked if isinstance(summed, LeakySum) else None
        return compiled(params, opt_state, parts, leaked, key, extra)

    return update


def taken_apart(extra: dict[str, Any]) -> dict[str, Any]:
    """Extra arguments of an update as they pass through ``jit``; a drawn energy is spent."""
    energy = extra.get("energy")
    if not isinstance(energy, DrawnEnergy):
        return extra
    return {**extra, "energy": energy.spent(verified=True)}


def holds_reused(tree: PyTree) -> bool:
    """True where an array's memory was reused, as a step does with the state it is given."""
    for leaf in jax.tree.leaves(tree):
        # At every step: isinstance(leaf, jax.Array) would take longer than the question itself.
        deleted = getattr(leaf, "is_deleted", None)
        if deleted is not None and deleted():
            return True
    return False


def _like(value: PyTree, params: PyTree) -> PyTree:
    """The parameters with None where the sum has none: frozen."""
    return _leafwise(lambda v, leaf: None if v is None else leaf, value, params)


def _filled(moved: PyTree, params: PyTree) -> PyTree:
    """The moved parameters, and the frozen ones where they are None."""
    return _leafwise(lambda m, leaf: leaf if m is None else m, moved, params)


def _leafwise(choose: Callable[[Any, Any], Any], tree: PyTree, params: PyTree) -> PyTree:
    """``choose`` of every leaf of a tree, which may be None, and the parameter there."""
    structure: Any = jax.tree.structure(params)
    found = zip(structure.flatten_up_to(tree), jax.tree.leaves(params), strict=True)
    return jax.tree.unflatten(structure, [choose(*pair) for pair in found])
