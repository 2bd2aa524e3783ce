"""The private step, behind every door: clipping, noise, optax. Written once, compiled once."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp._links import OTHERS, Seen, read, watching
from jaxdp.clipping import ClippedGrad
from jaxdp.noise import opened
from jaxdp.optimizers.energy import DrawnEnergy, OpenEnergy
from jaxdp.tickets import NoiseKey, Ticket
from jaxdp.types import ClipInfo, PyTree, StepInfo, Summed, never_flattened

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

    @functools.cached_property
    def links(self) -> Seen:
        """Notes of the links, taken while they were traced."""
        return Seen()

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
        if summed.leaked is not None:
            extra["leaked"] = summed.leaked
        summed = _handed(summed)
        noise, after = (optax.with_extra_args_support(t) for t in (self.noise, self.after))
        with _noise_asked_for(self.links):
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

        return _across_jit(inside, self.links, donate=True)

    def at_once(
        self,
        ticket: Ticket,
        params: PyTree,
        opt_state: PyTree,
        data: PyTree,
        indices: Any,
        mask: Any,
        rng: jax.Array | None,
        extra: dict[str, Any],
        *,
        gathered: bool,
        told: bool,
    ) -> Any:
        """:attr:`whole`, from the host. Spends the ticket, unless the step is refused."""
        whole: Any = self.whole
        if not self.links.parts:
            whole.eval_shape(
                params,
                opt_state,
                data,
                indices,
                mask,
                ticket.blank(),
                rng,
                _blank(extra),
                gathered=gathered,
                told=told,
            )
            self.links.agree(ticket.step, ticket.multipliers)
        if self.links.others:
            ticket.trust(OTHERS)
        key = ticket.spend("a step of the trainer", verified=True)
        return whole(
            params,
            opt_state,
            data,
            indices,
            mask,
            key,
            rng,
            taken_apart(extra),
            gathered=gathered,
            told=told,
        )

    @functools.cached_property
    def whole(self) -> Callable[..., Any]:
        """The step in one compiled function, where the draw fits one pass.

        (params, opt_state, data, indices, mask, key, rng, extra, gathered) -> (params, opt_state,
        StepInfo, ClipInfo). The memory of ``params`` and ``opt_state`` is reused.
        """
        assert isinstance(self.grad_fn, ClippedGrad)
        return jax.jit(self._whole, static_argnames=("gathered", "told"), donate_argnums=(0, 1))

    def _whole(
        self,
        params: PyTree,
        opt_state: State,
        data: PyTree,
        indices: jax.Array,
        mask: jax.Array,
        key: NoiseKey,
        rng: jax.Array | None,
        extra: dict[str, Any],
        *,
        gathered: bool,
        told: bool,
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
    chain, links = optax.with_extra_args_support(tx), Seen()

    def inside(
        params: PyTree, opt_state: PyTree, summed: Summed, key: NoiseKey, extra: dict[str, Any]
    ) -> Any:
        trained = _like(summed.value, params)
        before: Any = jax.tree.structure(opt_state)
        try:
            with _noise_asked_for(links):
                updates, after = chain.update(_handed(summed), opt_state, trained, key=key, **extra)
        except Exception as error:  # a link may raise anything where the state is another's
            _explain(error, chain, trained, opt_state)
            raise
        if before != jax.tree.structure(after):
            _explain(None, chain, trained, opt_state)
        moved = _filled(optax.apply_updates(trained, updates), params)
        return moved, after, StepInfo(update_norm=optax.tree.norm(updates))

    return _across_jit(inside, links, donate)


class _Handed(Summed):
    """A sum inside a compiled update, which notes where it is opened."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("value", "votes"):
            read()
        return super().__getattribute__(name)


never_flattened(_Handed)


def _handed(summed: Summed) -> Summed:
    return _Handed(summed.value, summed.l2, summed.unscale, summed.votes, summed.ticket)


@contextlib.contextmanager
def _noise_asked_for(links: Seen) -> Iterator[None]:
    """Refuses, while it is traced, an update that takes a sum and never looks at the noise key."""
    before = links.parts
    with watching(links):
        yield
    if links.parts == before:
        raise ValueError(
            "the first link of the chain must add the noise of the key, as jaxdp.privatize does, "
            "got one that opens the Summed and releases it without: put mechanism.privatize() first"
        )


def _explain(error: Exception | None, chain: Any, trained: PyTree, found: Any) -> None:
    """Words for an optimizer state that was made for other parameters than are trained."""
    wanted = jax.eval_shape(chain.init, trained)
    one, other = (
        (jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (found, wanted)
    )
    if one != other:
        raise ValueError(
            "opt_state must be made for the trained parameters, tx.init(grad_fn.trained(params)), "
            "which has None at frozen leaves; got a state of another structure or other shapes"
        ) from error


def _across_jit(inside: Callable[..., Any], links: Seen, donate: bool) -> Callable[..., Any]:
    """The one place where a ``Summed`` is taken apart, to pass through ``jit``."""

    def put_together(
        params: PyTree,
        opt_state: PyTree,
        parts: dict[str, Any],
        key: NoiseKey,
        extra: dict[str, Any],
    ) -> Any:
        summed = Summed(**parts)
        return inside(params, opt_state, summed, key, extra)

    compiled = jax.jit(put_together, donate_argnums=(0, 1) if donate else ())
    known: set[Any] = set()

    def update(
        params: PyTree,
        opt_state: PyTree,
        summed: Summed,
        *,
        key: NoiseKey | None = None,
        **extra: Any,
    ) -> Any:
        if not isinstance(summed, Summed):
            raise TypeError(f"summed must be a Summed from clipping, got {type(summed).__name__}")
        _check_key(summed, key)
        l2 = jnp.asarray(summed.l2, jnp.float32)
        named = ("value", "unscale", "votes", "leaked")
        parts = {"l2": l2, **{name: getattr(summed, name) for name in named}}
        ticket = summed.ticket
        kind = _kind((params, opt_state, parts, extra))
        if kind not in known:  # traced, and refused, before anything is spent
            blank = ticket.blank() if key is None and ticket is not None else key
            compiled.eval_shape(params, opt_state, parts, blank, _blank(extra))
            known.add(kind)
        if key is None and ticket is not None:
            links.agree(ticket.step, ticket.multipliers)
            if links.others:
                ticket.trust(OTHERS)
        return compiled(params, opt_state, parts, opened(summed, key), taken_apart(extra))

    return update


def _check_key(summed: Summed, key: NoiseKey | None) -> None:
    """Refuses a sum without a key, or whose ticket was spent; spends nothing."""
    if summed.ticket is None or key is not None:
        opened(summed, key)
    else:
        summed.ticket.check()


def _kind(tree: PyTree) -> Any:
    """The structure, shapes and dtypes of what an update is given: what it is compiled for."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, DrawnEnergy))
    each = ((getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves)
    return structure, *each


def _blank(extra: dict[str, Any]) -> dict[str, Any]:
    """Extra arguments shaped as :func:`taken_apart` returns them; nothing is spent."""
    energy = extra.get("energy")
    return {**extra, "energy": energy.blank()} if isinstance(energy, DrawnEnergy) else extra


def taken_apart(extra: dict[str, Any]) -> dict[str, Any]:
    """Extra arguments of an update as they pass through ``jit``; a drawn energy is spent."""
    energy = extra.get("energy")
    if isinstance(energy, OpenEnergy):
        energy.once()
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
