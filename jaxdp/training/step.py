"""The private step that all front ends share: clipping, noise, optax update."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.clipping import ClippedGrad, losses
from jaxdp.clipping.options import is_donated
from jaxdp.devices import shards
from jaxdp.devices.placement import Placement, Shardings, place_on_mesh, using_mesh, with_sharding
from jaxdp.ledger.links import OTHERS, Seen, give_out, hand_on, read, watching
from jaxdp.ledger.tickets import NoiseKey, Ticket
from jaxdp.noise.gaussian import if_alike, opened, tell_handed
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.energy import PublicEnergy, blanked, check_judged, taken_apart
from jaxdp.types import ClipInfo, LossFn, PyTree, StepInfo, Summed, filled, like, never_flattened

State = tuple[PyTree, PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateStep:
    """One private training step as pure functions, compiled by the trainer and run by audits.

    Attributes:
        grad_fn: the clipped per-example gradients.
        noise: the transformation that takes a ``Summed``, such as ``mechanism.privatize()``.
        after: the optax chain that the noisy gradient goes into.
        context: from the optimizer state to what the next gradient is clipped by; None for nothing.
        held: shardings of parameters and optimizer state on a mesh; None for one device.
    """

    grad_fn: Any
    noise: optax.GradientTransformation
    after: optax.GradientTransformation
    context: Callable[[PyTree], dict[str, PyTree]] | None = None
    held: tuple[PyTree, PyTree] | None = None

    @classmethod
    def of(cls, algorithm: Algorithm, loss_fn: LossFn, **options: Any) -> "PrivateStep":
        """The private step of an algorithm and a loss; options as for ``clipped_grad``."""
        grad_fn = algorithm.clipped_grad(loss_fn, **options)
        return cls(grad_fn, algorithm.noise_link(), algorithm.after_noise, algorithm.reads)

    @functools.cached_property
    def links(self) -> Seen:
        """Observations of the chain's links, made while they were traced."""
        return Seen()

    def init(self, params: PyTree) -> State:
        """The optimizer state before the first step: (state of the noise, state of ``after``)."""
        trained = self.grad_fn.trained(params)
        return self.noise.init(trained), self.after.init(trained)

    def clipped_by(self, opt_state: State) -> dict[str, PyTree]:
        """The keyword arguments of the next clipped gradient, from the optimizer state."""
        return {} if self.context is None else self.context(opt_state)

    def release(
        self, params: PyTree, opt_state: State, summed: Summed, key: NoiseKey, **extra: Any
    ) -> tuple[PyTree, State, PyTree, PyTree]:
        """(params, opt_state, noisy gradient, updates) after one release; to be compiled."""
        first, last = opt_state
        trained = like(summed.value, params)
        if summed.leaked is not None:
            extra["leaked"] = summed.leaked
        summed = _handed(summed)
        noise = optax.with_extra_args_support(self.noise)
        mesh = None if self.held is None else self.grad_fn.placement.mesh
        with _noise_asked_for(self.links), using_mesh(mesh, override=False):
            noisy, first = noise.update(summed, first, trained, key=key)
        updates, last = self.followed(noisy, last, trained, **extra)
        moved = filled(optax.apply_updates(trained, updates), params)
        state = moved, (first, last)
        if self.held is not None:
            state = jax.lax.with_sharding_constraint(state, self.held)
        return *state, noisy, updates

    def followed(
        self, noisy: PyTree, last: PyTree, trained: PyTree, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """(updates, state of ``after``) that the chain after the noise makes of a noisy gradient.

        Raises:
            ValueError: it asks for more than it is given, such as the value of the loss.
        """
        try:
            return optax.with_extra_args_support(self.after).update(noisy, last, trained, **extra)
        except Exception as error:
            _in_words(
                error,
                "jaxdp.Trainer has trainer.init(params, public_value=value) and "
                "trainer.step(state, batch, public_value=value)",
            )
            raise

    def check_after(self, params: PyTree, opt_state: State, extra: dict[str, PyTree]) -> None:
        """Tries the chain after the noise on shapes alone, before anything is charged.

        Args:
            params: the parameters.
            opt_state: the state of the step.
            extra: what a step hands the chain besides.

        Raises:
            ValueError: the chain cannot take what a step hands it.
        """
        trained = self.grad_fn.trained(params)
        try:
            jax.eval_shape(
                lambda noisy, last, extra: self.followed(noisy, last, noisy, **extra),
                trained,
                opt_state[1],
                extra,
            )
        except ValueError:
            raise
        except Exception as error:  # a link may raise anything
            raise ValueError(
                "optimizer must take noisy updates, its state and the parameters, "
                f"tx.update(updates, state, params), got one that raises {type(error).__name__}: "
                f"{error}"
            ) from error

    def held_for(self, params: PyTree, place: Placement) -> "PrivateStep":
        """The step for parameters where they lie on a mesh, and for a state that lies alike."""
        params_at = place.shardings_like(params, params)
        trained = self.grad_fn.trained(params)
        state_at = place.shardings_like(trained, jax.eval_shape(self.init, params))
        return dataclasses.replace(self, held=(params_at, state_at))

    @functools.cached_property
    def compiled_context(self) -> Callable[[State], dict[str, PyTree]]:
        """``clipped_by``, compiled."""
        if self.context is None:
            return lambda _: {}
        compiled = jax.jit(self.context)

        def of(opt_state: State) -> dict[str, PyTree]:
            context = compiled(opt_state)
            give_out(context)  # of a state that the trainer has looked at
            return context

        return of

    @functools.cached_property
    def update(self) -> Callable[..., Any]:
        """The compiled ``(params, opt_state, summed, **extra) -> (params, opt_state, StepInfo)``.

        Spends the ticket of the sum. The memory of ``params`` and ``opt_state`` is reused.
        """

        def inside(
            params: PyTree,
            opt_state: State,
            summed: Summed,
            key: NoiseKey,
            extra: dict[str, PyTree],
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
        extra: dict[str, PyTree],
        *,
        gathered: bool,
        told: bool,
    ) -> Any:
        """Runs ``whole`` from the host; spends the ticket, unless the step is refused."""
        whole: Any = functools.partial(self.whole, gathered=gathered, told=told)
        met = shards.ticket_tags(ticket, params)
        rows = (data, indices, mask)
        kind = gathered, told, _kind(blanked(extra)), *_types((params, opt_state, rows, rng, met))
        plan = next((plan for known, plan in self._programs if known == kind), None)
        if plan is None:  # traced, and refused, before anything is spent
            blank = ticket.blank(), rng, blanked(extra), met
            shapes = self.whole.eval_shape(
                params, opt_state, *rows, *blank, gathered=gathered, told=told
            )
            self.links.agree(ticket.step, ticket.multipliers)
            plan = shapes[-1].plan
            self._programs.append((kind, plan))
        losses.note_assumed(ticket, plan)
        if self.links.others:
            ticket.note("trusted", OTHERS)
        key = ticket.spend("a step of the trainer", verified=True)
        return whole(params, opt_state, *rows, key, rng, taken_apart(extra), met)

    @functools.cached_property
    def _programs(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """The types of arguments that each program of ``whole`` was traced for, and its plan."""
        return []

    @functools.cached_property
    def whole(self) -> Any:
        """The whole step as one compiled function, for a draw of one physical batch.

        (params, opt_state, data, indices, mask, key, rng, extra, gathered) -> (params, opt_state,
        StepInfo, ClipInfo). The memory of ``params`` and ``opt_state`` is reused. The ``ClipInfo``
        holds its plan alone unless ``told``.
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
        extra: dict[str, PyTree],
        met: jax.Array | None = None,
        *,
        gathered: bool,
        told: bool,
    ) -> tuple[PyTree, State, StepInfo, ClipInfo]:
        context = self.clipped_by(opt_state)
        clipped, info = self.grad_fn.one_pass(
            params, data, indices, mask, rng, gathered=gathered, **context
        )
        summed = if_alike(self.grad_fn.summed(params, clipped.total, clipped.votes, **context), met)
        params, opt_state, _, updates = self.release(params, opt_state, summed, key, **extra)
        if not told:
            info = jax.tree.map(lambda leaf: None, info)
        return params, opt_state, StepInfo(optax.tree.norm(updates)), info


def compile_update(tx: optax.GradientTransformation, *, donate: bool = False) -> Callable[..., Any]:
    """A compiled ``(params, opt_state, summed, **extra) -> (params, opt_state, StepInfo)``.

    A ``Summed`` cannot pass through ``jit``. The compiled function spends its ticket on the host,
    passes its parts, and puts them together inside, where the noise is added.

    Args:
        tx: an optax chain, ``privatize`` first. Extra arguments reach its ``update``: they must
            be public, and the ledger names them as assumed, such as the ``value`` that
            ``optax.contrib.reduce_on_plateau`` asks for, of a loss on public examples.
        donate: reuse the memory of ``params`` and ``opt_state``, which are then gone: with Adam
            the update of n parameters of float32 needs about 21·n bytes, not 32·n.

    Raises:
        ValueError: at an update, before anything is spent: what the update before reused, arrays
            that could not all be reused, a state of other parameters, a sum without noise.

    Example:
        >>> data = {"x": jnp.ones((100, 3)), "y": jnp.ones(100)}
        >>> mechanism = jaxdp.dp_sgd(
        ...     noise_multiplier=1.0, l2_clip_norm=0.1, batch_size=10, dataset_size=100
        ... )
        >>> loss_fn = lambda w, example: (example["x"] @ w - example["y"]) ** 2
        >>> grad_fn, sampler = mechanism.clipped_grad(loss_fn), mechanism.sampler(100)
        >>> tx = optax.chain(mechanism.privatize(), optax.adam(1e-3))
        >>> update = jaxdp.compile_update(tx, donate=True)
        >>> params = jnp.zeros(3)
        >>> opt_state = tx.init(params)
        >>> for _ in range(3):
        ...     summed, _ = grad_fn.sum(params, data, sampler.draw())
        ...     params, opt_state, info = update(params, opt_state, summed)
        >>> sampler.ledger.steps
        3
    """
    chain, links = optax.with_extra_args_support(tx), Seen()

    def inside(
        params: PyTree, opt_state: PyTree, summed: Summed, key: NoiseKey, extra: dict[str, PyTree]
    ) -> Any:
        trained = like(summed.value, params)
        before: Any = jax.tree.structure(opt_state)
        try:
            with _noise_asked_for(links):
                updates, after = chain.update(_handed(summed), opt_state, trained, key=key, **extra)
        except Exception as error:  # a link may raise anything where the state is another's
            _explain(error, chain, trained, opt_state)
            _in_words(error, "update(params, opt_state, summed, value=value)")
            raise
        if before != jax.tree.structure(after):
            _explain(None, chain, trained, opt_state)
        moved = filled(optax.apply_updates(trained, updates), params)
        return moved, after, StepInfo(update_norm=optax.tree.norm(updates))

    return _across_jit(inside, links, donate, assuming=True)


class _Handed(Summed):
    """A sum inside a compiled update, which notes where it is opened."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("value", "votes"):
            read()
        return super().__getattribute__(name)


never_flattened(_Handed)


def _handed(summed: Summed) -> Summed:
    return _Handed(summed.value, summed.l2, summed.unscale, summed.votes)


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


def _across_jit(
    inside: Callable[..., Any], links: Seen, donate: bool, assuming: bool = False
) -> Callable[..., Any]:
    """Compiles ``inside``, which takes a ``Summed``; the one place where a sum is taken apart.

    ``assuming``: tells the ledger that a ``PublicEnergy``, or what else the chain is handed, is
    assumed public; a trainer does itself.
    """

    def put_together(
        params: PyTree,
        opt_state: PyTree,
        parts: dict[str, PyTree],
        key: NoiseKey,
        extra: dict[str, PyTree],
        met: jax.Array | None = None,
        *,
        held: Shardings | None,
    ) -> Any:
        summed = if_alike(Summed(**parts), met)
        with using_mesh(held[0].mesh if held else None, override=False):
            *state, info = inside(params, opt_state, summed, key, extra)
        return *with_sharding(state, held), info

    donated = (0, 1) if donate else ()
    compiled = jax.jit(put_together, static_argnames="held", donate_argnums=donated)
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
        check_judged(summed.ticket, extra.get("energy"))
        _check_reused(params, opt_state)
        l2 = jnp.asarray(summed.l2, jnp.float32)
        named = ("value", "unscale", "votes", "leaked")
        parts = {"l2": l2, **{name: getattr(summed, name) for name in named}}
        params, opt_state, parts, held = place_on_mesh(params, opt_state, parts)
        kind, ticket = (_kind((params, opt_state, parts, blanked(extra))), held), summed.ticket
        met = None if key is not None else shards.ticket_tags(ticket, params)
        if kind not in known:  # traced, and refused, before anything is spent
            blank = ticket.blank() if key is None and ticket is not None else key
            with using_mesh(held[0].mesh if held else None):
                compiled.eval_shape(params, opt_state, parts, blank, blanked(extra), met, held=held)
            if donate:
                _check_apart(params, opt_state)
            known.add(kind)
        if key is None and ticket is not None:
            links.agree(ticket.step, ticket.multipliers)
            if links.others:
                ticket.note("trusted", OTHERS)
            if assuming and isinstance(extra.get("energy"), PublicEnergy):
                ticket.note("assumed", PublicEnergy.ASSUMED)
            if assuming:
                tell_handed(ticket, extra)
        once = opened(summed, key), taken_apart(extra), met
        with using_mesh(held[0].mesh if held else None):
            result = compiled(params, opt_state, parts, *once, held=held)
        if assuming:
            hand_on(opt_state, result[1])
        return result

    return update


def _in_words(error: Exception, how: str) -> None:
    """Raises ValueError where a link asks for what jaxdp does not hand it.

    Args:
        error: of the link.
        how: to hand over a public value.

    Raises:
        ValueError: with what it asks for, and the remedy.
    """
    if isinstance(error, AttributeError) and "fast" in str(error):
        raise ValueError(
            "optimizer must take parameters as they are, got optax.lookahead, which keeps two "
            "sets of them in a form of its own. An average of the parameters is jaxdp.Trainer(..., "
            "average=0.99), or optax.ema of what updates release"
        ) from error
    lacks = re.search(r"missing \d+ required keyword-only arguments?: (.*)", str(error))
    if not isinstance(error, TypeError) or lacks is None:
        return
    names = re.findall(r"'(\w+)'", lacks[1])
    remedy = (
        f"Where it is public, such as the loss on public examples, hand it over: {how}. Else take "
        "optax.sgd or adam with a schedule of the step"
        if names == ["value"]
        else "Take optax.sgd or adam with a schedule of the step in place of a line search"
    )
    raise ValueError(
        f"optimizer must work on noisy updates, got one that asks for {', '.join(names)} besides "
        "(as reduce_on_plateau, polyak_sgd and line searches do): computed from records without "
        f"noise it is a release that no event covers. {remedy}"
    ) from error


def _check_key(summed: Summed, key: NoiseKey | None) -> None:
    """Refuses a sum without a key, or whose ticket was spent; spends nothing."""
    if summed.ticket is None or key is not None:
        opened(summed, key)
    else:
        summed.ticket.check()


def _check_reused(params: PyTree, opt_state: PyTree) -> None:
    if is_donated((params, opt_state)):
        raise ValueError(
            "params and opt_state must be those that the update before returned, got some whose "
            "memory that update has reused (donate=True): write params, opt_state, info = "
            "update(params, opt_state, summed). To keep some for later copy them first, "
            "jax.tree.map(jnp.copy, params)"
        )


def _check_apart(params: PyTree, opt_state: PyTree) -> None:
    """Refuses what XLA could not reuse, before anything is spent."""
    arrays = [leaf for leaf in jax.tree.leaves((params, opt_state)) if isinstance(leaf, jax.Array)]
    if len({id(leaf) for leaf in arrays}) < len(arrays):
        raise ValueError(
            "params and opt_state must not share an array for their memory to be reused "
            "(donate=True), got one that is in them twice: copy them when you make them, "
            "params, opt_state = jax.tree.map(jnp.copy, (params, tx.init(params)))"
        )


def _kind(tree: PyTree) -> Any:
    """The structure, shapes and dtypes of what an update is given: what it is compiled for."""
    leaves, structure = jax.tree.flatten(tree)
    each = ((getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves)
    return structure, *each


def _types(tree: PyTree) -> tuple[Any, list[Any]]:
    """As ``_kind``, of arrays: those that one program returned have the same types, told fast."""
    leaves, structure = jax.tree.flatten(tree)
    each = [getattr(x, "aval", None) or (jnp.shape(x), jnp.result_type(x)) for x in leaves]
    return structure, each
