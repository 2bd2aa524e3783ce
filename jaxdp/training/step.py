"""The private step of every front end: gather, gradient, clip, sum, noise, optax, accept."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.clipping import losses, rounding
from jaxdp.clipping.options import REUSED, is_donated
from jaxdp.devices import shards
from jaxdp.devices.placement import Placement, place_on_mesh, using_mesh, with_sharding
from jaxdp.ledger.links import OTHERS, ChainRecord, is_own, record_opened, recording
from jaxdp.ledger.returned import copy_past, record_returned
from jaxdp.ledger.tickets import NoiseKey, Ticket
from jaxdp.noise.gaussian import noise_key, note_extra_args
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.training.batches import ChargedBatch
from jaxdp.types import (
    ClipInfo,
    ExtraArgument,
    LossFn,
    PyTree,
    StepInfo,
    Summed,
    filled,
    like,
    never_flattened,
    positions_for_device,
)

State = tuple[PyTree, PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateStep:
    """One private training step: called by the trainer, and as pure functions by audits.

    Attributes:
        grad_fn: the clipped per-example gradients.
        noise: the transformation that takes a ``Summed``, such as ``mechanism.privatize()``.
        after: the optax chain that the noisy gradient goes into.
        context: from the optimizer state to what the next gradient is clipped by; None for nothing.
        leak: what the gradient releases without noise, as in ``Mechanism.leak``; "" for nothing.
        shardings: of parameters and optimizer state on a mesh; None for one device.
        chain_record: which links of the chain opened the sum and its key while it was traced.
    """

    grad_fn: Any
    noise: optax.GradientTransformation
    after: optax.GradientTransformation
    context: Callable[[PyTree], dict[str, PyTree]] | None = None
    leak: str = ""
    shardings: tuple[PyTree, PyTree] | None = None
    chain_record: ChainRecord = dataclasses.field(default_factory=ChainRecord, init=False)

    @classmethod
    def of(cls, algorithm: Algorithm, loss_fn: LossFn, **options: Any) -> "PrivateStep":
        """The private step of an algorithm and a loss; options as for ``clipped_grad``."""
        grad_fn, leak = algorithm.clipped_grad(loss_fn, **options), algorithm.mechanism.leak
        read = algorithm.scale, algorithm.raw, algorithm.bound, algorithm.direction
        reads = any(each is not None for each in read)
        context = algorithm.context if reads else None
        return cls(grad_fn, algorithm.noise_link(), algorithm.after_noise, context, leak)

    def init(self, params: PyTree) -> State:
        """The optimizer state before the first step: (state of the noise, state of ``after``)."""
        trained = self.grad_fn.trained(params)
        return self.noise.init(trained), self.after.init(trained)

    def clipped_by(self, opt_state: State) -> dict[str, PyTree]:
        """The keyword arguments of the next clipped gradient, from the optimizer state."""
        return {} if self.context is None else self.context(opt_state)

    def __call__(
        self,
        ticket: Ticket,
        params: PyTree,
        opt_state: State,
        batch: ChargedBatch,
        data: PyTree,
        rng: jax.Array | None,
        extra: dict[str, PyTree],
        *,
        fused: bool,
        return_info: bool = False,
    ) -> tuple[PyTree, State, StepInfo, list[ClipInfo]]:
        """Takes the step from the host, and spends the ticket once nothing can be refused.

        The memory of ``params`` and ``opt_state`` is reused.

        Args:
            ticket: of the batch.
            params: the parameters.
            opt_state: from ``init`` or the step before.
            batch: the records drawn, in one or several physical batches.
            data: all records on the device; None where the batch holds the rows.
            rng: a key, where the loss takes one.
            extra: extra arguments of the optax chain.
            fused: one program takes the step, of one physical batch. Otherwise one program adds
                each physical batch to a sum and another does the rest. All steps of a trainer must
                be taken alike: two programs round a record's gradient differently, and which one
                it is must not depend on who else is drawn.
            return_info: return the **sensitive** ``ClipInfo`` of each physical batch, else [].

        Raises:
            ValueError: the gradient or the chain cannot be used; more records than are bounded for.
        """
        draw, gathered = batch.draw, batch.rows is not None
        if fused and len(draw.indices) == 1:
            rounding.check_records(int(np.count_nonzero(draw.mask)), self.grad_fn.most_records)
            rows = data if batch.rows is None else batch.rows[0]
            indices = positions_for_device(draw.indices[0], draw.num_records, gathered)
            given: PyTree = (rows, indices, draw.mask[0], rng)
            spend = functools.partial(ticket.spend, "a step of the trainer", verified=True)
        else:
            # Gather, gradient, clip, sum: all of it is bounded, and may be refused, before the
            # ticket is spent.
            context = {} if self.context is None else self._compiled_context(opt_state)
            record_returned(context)  # read from a state that the trainer has looked at
            rows = data if batch.rows is None else batch.rows
            summed, infos = self.grad_fn.sum_draw(
                params, rows, draw, rng, gathered=gathered, return_info=return_info, **context
            )
            if batch.rows is not None and is_own(
                type(self.grad_fn)
            ):  # of rows that the trainer itself gathered
                summed = summed.carrying(ticket, passes=frozenset(range(len(batch.rows))))
            if summed.ticket not in (None, ticket):
                raise ValueError(
                    "gradient must return the sum of the draw that it is given, got that of another"
                )
            if summed.leaked is not None and not self.leak:
                raise ValueError(
                    "mechanism must name its leak for a gradient that hands on un-noised means, "
                    "got an empty one"
                )
            given, spend = _parts(summed), functools.partial(noise_key, summed, None)
        options = {"gathered": gathered, "return_info": return_info}
        params, opt_state, info, clip_info = self.compiled(
            ticket, spend, params, opt_state, given, extra, **options
        )
        if isinstance(given, tuple):
            infos = [clip_info] if return_info else []
        return params, opt_state, info, infos

    @functools.cached_property
    def compiled(self) -> "CompiledUpdate":
        """``_traced``, which is compiled once for each of its forms."""
        return CompiledUpdate(self._traced, self.chain_record, ("gathered", "return_info"))

    @functools.cached_property
    def _compiled_context(self) -> Callable[[State], dict[str, PyTree]]:
        return jax.jit(self.clipped_by)

    def _traced(
        self,
        params: PyTree,
        opt_state: State,
        given: PyTree,
        key: NoiseKey,
        extra: dict[str, PyTree],
        tags: jax.Array | None,
        *,
        gathered: bool,
        return_info: bool,
    ) -> tuple[PyTree, State, StepInfo, ClipInfo | None]:
        """The step inside ``jit``.

        Args:
            params: the parameters.
            opt_state: the optimizer state.
            given: of one physical batch (data, indices, mask, rng); of several the parts of their
                ``Summed``.
            key: of the noise.
            extra: extra arguments of the optax chain.
            tags: of the ticket in each process, or None.
            gathered: True if ``data`` are the rows at ``indices``, not all records.
            return_info: return the ``ClipInfo`` of the physical batch; else its plan alone.
        """
        # Gather, gradient, clip, sum. Of several physical batches another program, the same for
        # all of them, has done it.
        info: ClipInfo | None = None
        if isinstance(given, dict):
            summed = Summed(**given)
        else:
            summed, info = self.grad_fn.clip_physical_batch(
                params, *given, gathered=gathered, **self.clipped_by(opt_state)
            )
            if not return_info:
                info = jax.tree.map(lambda leaf: None, info)
        if tags is not None:
            summed = nan_unless_same_step(summed, tags)
        place = getattr(self.grad_fn, "placement", None)
        with using_mesh(None if place is None else place.mesh, override=False):
            params, opt_state, _, updates = self.release(params, opt_state, summed, key, **extra)
        if self.shardings is not None:
            params, opt_state = jax.lax.with_sharding_constraint(
                (params, opt_state), self.shardings
            )
        return params, opt_state, StepInfo(optax.tree.norm(updates)), info

    def release(
        self, params: PyTree, opt_state: State, summed: Summed, key: NoiseKey, **extra: PyTree
    ) -> tuple[PyTree, State, PyTree, PyTree]:
        """(params, opt_state, noisy gradient, updates) after one release; to be compiled.

        Raises:
            ValueError: the chain adds no noise, asks for what no event covers, or was made for
                other parameters.
        """
        # The sum tells which are trained where it has their structure, and no other gradient does.
        if self.grad_fn is not None:
            trained = self.grad_fn.trained(params)
        else:
            try:
                trained = like(summed.value, params)
            except ValueError as error:
                raise ValueError(
                    "summed must have the structure of params for jaxdp.compile_update, got "
                    f"{type(summed.value).__name__} for {type(params).__name__}: of an algorithm "
                    "with a sum of its own (dp_adafest, dp_zo) take jaxdp.Trainer or jaxdp.Run"
                ) from error
        first, last = opt_state
        if summed.leaked is not None:
            extra["leaked"] = summed.leaked

        # Noise. Whoever opens the sum without asking for its key releases it un-noised.
        watched = _WatchedSum(summed.value, summed.l2, summed.unscale, summed.votes, summed.leaked)
        before = self.chain_record.parts
        try:
            with recording(self.chain_record):
                noise = optax.with_extra_args_support(self.noise)
                noisy, moved_first = noise.update(watched, first, trained, key=key, **extra)
        except Exception as error:  # a link may raise anything where the state is another's
            self._require_state_of(trained, opt_state, error)
            _explain_missing(error)
            raise
        if self.chain_record.parts == before:
            raise ValueError(
                "the first link of the chain must add the noise of the key, as jaxdp.privatize "
                "does, got one that opens the Summed and releases it without: put "
                "mechanism.privatize() first"
            )
        if jax.tree.structure(first) != jax.tree.structure(moved_first):  # type: ignore[operator]
            self._require_state_of(trained, opt_state, None)

        # Optax: post-processing, in which a candidate may be accepted or rejected.
        updates, last = self._after(noisy, last, trained, extra)

        # Accept: what is frozen stays.
        moved = filled(optax.apply_updates(trained, updates), params)
        return moved, (moved_first, last), noisy, updates

    def _after(
        self, noisy: PyTree, last: PyTree, trained: PyTree, extra: dict[str, PyTree]
    ) -> tuple[PyTree, PyTree]:
        try:
            return optax.with_extra_args_support(self.after).update(noisy, last, trained, **extra)
        except Exception as error:
            _explain_missing(error)
            raise

    def _require_state_of(self, trained: PyTree, found: State, error: Exception | None) -> None:
        """Raises ValueError for an optimizer state that was made for other parameters."""
        wanted = tuple(jax.eval_shape(link.init, trained) for link in (self.noise, self.after))
        one, other = (
            (jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)])
            for tree in (found, wanted)
        )
        if one != other:
            raise ValueError(
                "opt_state must be made for the trained parameters, "
                "tx.init(grad_fn.trained(params)), which has None at frozen leaves; got a state of "
                "another structure or other shapes"
            ) from error

    def check_after(self, params: PyTree, opt_state: State, extra: dict[str, PyTree]) -> None:
        """Tries the chain after the noise on shapes alone, before anything is charged.

        Args:
            params: the parameters.
            opt_state: the state of the step.
            extra: extra arguments that a step passes to the chain.

        Raises:
            ValueError: the chain cannot take what a step passes to it.
        """
        trained = self.grad_fn.trained(params)
        try:
            jax.eval_shape(
                lambda noisy, last, extra: self._after(noisy, last, noisy, extra),
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

    def sharded_as(self, params: PyTree, place: Placement) -> "PrivateStep":
        """The step for parameters where they are placed, and for a state that is placed alike."""
        params_at = place.shardings_like(params, params)
        trained = self.grad_fn.trained(params)
        state_at = place.shardings_like(trained, jax.eval_shape(self.init, params))
        return dataclasses.replace(self, shardings=(params_at, state_at))


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """The parameters, moved; as ``optax.apply_updates``, but frozen ones stay as they are.

    For an update that you compile yourself: the sum, and so the updates, have None at frozen
    leaves, where ``optax.apply_updates`` returns None.

    Args:
        params: pytree of all parameters.
        updates: of the trained ones; None where a leaf is frozen.
    """
    return filled(optax.apply_updates(like(updates, params), updates), params)


def compile_update(tx: optax.GradientTransformation, *, donate: bool = True) -> Callable[..., Any]:
    """A compiled ``(params, opt_state, summed, **extra) -> (params, opt_state, StepInfo)``.

    A ``Summed`` cannot pass through ``jit``. The compiled function spends its ticket on the host,
    passes its parts, and puts them together inside, where the noise is added.

    It reuses the memory of ``params`` and ``opt_state``: with Adam the update of n parameters of
    float32 needs about 21·n bytes, not 32·n. The arrays that it was given are then gone; to keep
    some, copy them first, ``jax.tree.map(jnp.copy, params)``, or take ``donate=False``.

    Args:
        tx: an optax chain, ``privatize`` first. Extra arguments reach its ``update``: they must
            be public, and the ledger names them as assumed, such as the ``value`` that
            ``optax.contrib.reduce_on_plateau`` asks for, of a loss on public examples.
        donate: False leaves ``params`` and ``opt_state`` as they are.

    Raises:
        ValueError: at an update, before anything is spent: what an update before reused, a state of
            other parameters, a sum without noise.

    Example:
        >>> data = {"x": jnp.ones((100, 3)), "y": jnp.ones(100)}
        >>> mechanism = jaxdp.dp_sgd(
        ...     noise_multiplier=1.0, l2_clip_norm=0.1, batch_size=10, dataset_size=100
        ... )
        >>> loss_fn = lambda w, example: (example["x"] @ w - example["y"]) ** 2
        >>> grad_fn, sampler = mechanism.clipped_grad(loss_fn), mechanism.sampler(100)
        >>> tx = optax.chain(mechanism.privatize(), optax.adam(1e-3))
        >>> update = jaxdp.compile_update(tx)
        >>> params = jnp.zeros(3)
        >>> opt_state = tx.init(params)
        >>> for _ in range(3):
        ...     summed = grad_fn(params, data, sampler.draw())
        ...     params, opt_state, info = update(params, opt_state, summed)
        >>> sampler.ledger.steps
        3
    """
    # The whole chain stands where a trainer has its noise; nothing comes after.
    step = PrivateStep(None, tx, optax.identity())

    def traced(
        params: PyTree,
        opt_state: PyTree,
        given: dict[str, PyTree],
        key: NoiseKey,
        extra: dict[str, PyTree],
        tags: jax.Array | None,
        *,
        held: Any,
    ) -> tuple[PyTree, PyTree, StepInfo, None]:
        summed = Summed(**given)
        if tags is not None:
            summed = nan_unless_same_step(summed, tags)
        with using_mesh(held[0].mesh if held else None, override=False):
            params, (opt_state, _), _, updates = step.release(
                params, (opt_state, optax.EmptyState()), summed, key, **extra
            )
        params, opt_state = with_sharding((params, opt_state), held)
        return params, opt_state, StepInfo(optax.tree.norm(updates)), None

    compiled = CompiledUpdate(traced, step.chain_record, ("held",), donate)

    def update(
        params: PyTree,
        opt_state: PyTree,
        summed: Summed,
        *,
        key: NoiseKey | None = None,
        **extra: PyTree,
    ) -> tuple[PyTree, PyTree, StepInfo]:
        # Refused before anything is computed: no sum, no key, a ticket that was spent, memory that
        # an update has reused.
        if not isinstance(summed, Summed):
            raise TypeError(f"summed must be a Summed from clipping, got {type(summed).__name__}")
        ticket = summed.ticket
        if ticket is None or key is not None:
            noise_key(summed, key)  # the caller's, or an error: nothing is spent
        else:
            ticket.check()
        if is_donated((params, opt_state)):
            raise ValueError(
                "params and opt_state must be those that the update before returned, got some "
                "whose memory that update has reused: write params, opt_state, info = "
                "update(params, opt_state, summed). To keep some for later copy them first, "
                "jax.tree.map(jnp.copy, params), or take jaxdp.compile_update(tx, donate=False)"
            )
        for name, value in extra.items():
            if is_donated(value):
                raise ValueError(
                    f"{name} must hold arrays that are there, got some whose memory an update has "
                    "reused: copy them before that update, jax.tree.map(jnp.copy, params)"
                )

        def spend() -> NoiseKey:
            if ticket is not None:
                note_extra_args(ticket, extra)
            return noise_key(summed, key)

        # On the mesh of the parameters, if they are on one.
        params, opt_state, given, held = place_on_mesh(params, opt_state, _parts(summed))
        with using_mesh(held[0].mesh if held else None):
            moved, state, info, _ = compiled(
                ticket, spend, params, opt_state, given, extra, held=held
            )
        copy_past(opt_state, state)
        return moved, state, info

    return update


class CompiledUpdate:
    """A compiled update that is traced, and so refused, before the ticket of its step is spent.

    Args:
        traced: ``(params, opt_state, given, key, extra, tags, **options)``, which returns params,
            opt_state, a ``StepInfo``, and a ``ClipInfo`` or None.
        chain_record: of the links that ``traced`` calls.
        options: names of arguments that it is compiled anew for.
        donate: reuse the memory of ``params`` and ``opt_state``.
    """

    def __init__(
        self,
        traced: Callable[..., Any],
        chain_record: ChainRecord,
        options: tuple[str, ...],
        donate: bool = True,
    ):
        donated = (0, 1) if donate else ()
        self.jitted = jax.jit(traced, static_argnames=options, donate_argnums=donated)
        self._record, self._donate = chain_record, donate
        # The arguments' types of each program, and what its loss assumes.
        self._programs: list[tuple[Any, tuple[Any, ...]]] = []

    def __call__(
        self,
        ticket: Ticket | None,
        spend: Callable[[], NoiseKey],
        params: PyTree,
        opt_state: PyTree,
        given: PyTree,
        extra: dict[str, PyTree],
        **options: Any,
    ) -> Any:
        """Calls the program once, with the key that ``spend`` returns.

        Args:
            ticket: that ``spend`` spends; None where the caller has spent it.
            spend: returns the noise key.
            params: the parameters.
            opt_state: the optimizer state.
            given: what ``traced`` takes besides.
            extra: extra arguments of the optax chain.
            options: those that ``traced`` is compiled anew for.

        Raises:
            ValueError: nothing is spent then, but where an array that the program captured is gone.
            RuntimeError: the device failed.
        """
        # Traced with a key of zeros where the types are new. Arrays that one program returned have
        # the very same ``aval``, so that comparing is fast.
        tags = shards.ticket_tags(ticket, params)
        for value in extra.values():
            if ticket is not None and isinstance(value, ExtraArgument):
                value.check(ticket)  # that it was not charged elsewhere
        blank = {
            name: value.blank() if isinstance(value, ExtraArgument) else value
            for name, value in extra.items()
        }
        leaves, structure = jax.tree.flatten((params, opt_state, given, blank, tags))
        types = [
            getattr(x, "aval", None) or (getattr(x, "shape", ()), getattr(x, "dtype", type(x)))
            for x in leaves
        ]
        kind = options, structure, types
        plan = next((plan for known, plan in self._programs if known == kind), None)
        if plan is None:
            key = spend() if ticket is None else ticket.blank()
            shapes = self.jitted.eval_shape(params, opt_state, given, key, blank, tags, **options)
            plan = () if shapes[-1] is None else shapes[-1].plan
            self._programs.append((kind, plan))

        # Arrays that are there twice; told by their number, since an update returns none.
        if self._donate and len({id(leaf) for leaf in leaves}) < len(leaves):
            params, opt_state = _apart(params, opt_state, (given, blank))

        # The ledger of every ticket is told what was seen while the program was traced.
        if ticket is not None:
            self._record.require_charged(ticket.step, ticket.multipliers)
            losses.note_assumed(ticket, plan, params)
            if self._record.others:
                ticket.note("trusted", OTHERS)

        # Spent: from here on the step counts, whatever becomes of it.
        key = spend()
        taken = {
            name: value.take() if isinstance(value, ExtraArgument) else value
            for name, value in extra.items()
        }
        try:
            return self.jitted(params, opt_state, given, key, taken, tags, **options)
        except RuntimeError as error:
            if "has been deleted" in str(error):
                raise ValueError(REUSED) from error
            raise error


def nan_unless_same_step(summed: Summed, tags: jax.Array) -> Summed:
    """The sum; NaN where processes are at different tickets.

    One of them may have lost a step, by an error that its own loop went on after. It would add
    other noise to one sum, or one noise to sums of other draws, which subtracts away.

    Args:
        summed: the sum.
        tags: uint32 [devices, 2], of each device's process.
    """
    same = jnp.all(jnp.max(tags, axis=0) == jnp.min(tags, axis=0))
    parts = jax.tree.map(lambda x: jnp.where(same, x, jnp.nan), _parts(summed))
    return Summed(**{**parts, "unscale": summed.unscale})


def _parts(summed: Summed) -> dict[str, PyTree]:
    """The fields of a ``Summed``, to pass through ``jit``; it is taken apart here alone."""
    named = ("value", "unscale", "votes", "leaked")
    parts = {name: getattr(summed, name) for name in named}
    l2 = summed.l2 if isinstance(summed.l2, jax.Array) else np.float32(summed.l2)
    return {"l2": l2, **parts}


class _WatchedSum(Summed):
    """A sum inside a compiled update, which records where it is opened."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("value", "votes"):
            record_opened()
        return super().__getattribute__(name)


never_flattened(_WatchedSum)


def _explain_missing(error: Exception) -> None:
    """Raises ValueError where a link asks for what jaxdp does not pass to it.

    Args:
        error: of the link.

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
        "Where it is public, such as the loss on public examples, pass it on: jaxdp.Trainer has "
        "trainer.init(params, public_value=value) and trainer.step(state, batch, "
        "public_value=value), a compiled update update(params, opt_state, summed, value=value). "
        "Else take optax.sgd or adam with a schedule of the step"
        if names == ["value"]
        else "Take optax.sgd or adam with a schedule of the step in place of a line search"
    )
    raise ValueError(
        f"optimizer must work on noisy updates, got one that asks for {', '.join(names)} besides "
        "(as reduce_on_plateau, polyak_sgd and line searches do): computed from records without "
        f"noise it is a release that no event covers. {remedy}"
    ) from error


def _apart(params: PyTree, opt_state: PyTree, rest: PyTree) -> tuple[PyTree, PyTree]:
    """Parameters and state with a copy of each array that is there twice, or that ``rest`` holds.

    XLA could not reuse its memory, and would say so once the ticket is spent. Optimizers that begin
    at the parameters themselves, such as ``optax.contrib.dog``, have such a state.
    """
    seen = {id(leaf) for leaf in jax.tree.leaves(rest)}

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    apart: tuple[PyTree, PyTree] = jax.tree.map(own, (params, opt_state))
    return apart
