"""A private training loop: ``init``, ``batches``, ``step``."""

import contextlib
import dataclasses
import functools
import math
import os
import secrets
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.accounting.events import of_users
from jaxdp.clipping import ClippedGrad, losses
from jaxdp.clipping.across import with_mesh
from jaxdp.clipping.options import ClippingOptions, check_arrays, check_option_names, is_donated
from jaxdp.devices import processes, shards
from jaxdp.devices.placement import placement, resolve_placement, using_mesh
from jaxdp.ledger import Ledger
from jaxdp.ledger.entries import event_counts
from jaxdp.ledger.ledger import this_process
from jaxdp.ledger.links import is_own
from jaxdp.ledger.returned import copy_past, record_returned
from jaxdp.ledger.seeds import Secret
from jaxdp.ledger.tickets import Issuer, issuer_of
from jaxdp.mechanism import Mechanism
from jaxdp.noise.gaussian import note_extra_args
from jaxdp.optimizers.algorithm import Algorithm, StepHook, as_algorithm
from jaxdp.sampling import Sampler, Source, as_source, fingerprint
from jaxdp.sampling.hashes import identities
from jaxdp.sampling.source import TOGETHER, ArraySource, Wrong, holds, named
from jaxdp.sampling.users import UserExamples, Users
from jaxdp.training.batches import Batches, ChargedBatch, charged, check_batch, placed
from jaxdp.training.batches import steps_left as left_of
from jaxdp.training.physical_batch import (
    default_rows,
    rows_for_most_draws,
    rows_of_least_work,
    rows_that_fit,
)
from jaxdp.training.start import Guard, inspect_loss
from jaxdp.training.state import (
    STARTED_AGAIN,
    TrainState,
    agree_on_layout,
    check_state,
    describe_replaced,
    unknown_arrays,
)
from jaxdp.training.step import PrivateStep
from jaxdp.types import ClipInfo, LossFn, PyTree, StepInfo

__all__ = ["TrainState", "Trainer"]


_MANY = 2**31  # numbers, beyond which it says that it looks through them


class Trainer:
    """Trains a model with differential privacy, in a loop of your own.

    Each step is charged to a ledger, drawn, clipped, noised once and applied.

    Formal guarantee: the parameters (all iterates) satisfy ``epsilon(delta)`` under the relation
    asked for, where a record is one element of ``source``, by the argument of ``Mechanism`` for
    every step; what was noticed of assumptions is in ``unverified()``.

    Args:
        loss_fn: the loss of **one** example, ``(params, example)`` or ``(params, x, y)``, a scalar
            or (scalar, aux); an argument called ``rng`` or ``key`` receives a key.
        mechanism: from ``jaxdp.dp_sgd``; or a ``jaxdp.Algorithm``, which has its own optimizer.
        optimizer: any optax optimizer; None for an ``Algorithm``.
        source: the records: a pytree of arrays [N, ...], a memory map, or anything with ``len`` and
            ``[index]``; see ``jaxdp.sampling.as_source``.
        ledger: a ``jaxdp.Ledger`` or a path for one; None keeps it in memory.
        another: True trains a new model on a ledger that other models were charged to, from a state
            that ``init`` returned. It has all steps of the mechanism, and costs as much again; what
            the ledger then holds is said on stderr before the first step.
        secret: the randomness; None takes it from the operating system.
        trainable: what to train, as for ``jaxdp.clipped_grad``.
        constants: arrays that the loss captures, or that are among the parameters, declared public.
        energy: the ``PublicEnergy`` or ``PrivateEnergy`` of an annealed algorithm.
        physical_batch_size: rows of one physical batch; None takes the number whose expected work
            is least, "auto" as many as the device's memory holds, up to a whole draw, once ``init``
            has seen the parameters; rounded up to a multiple of the devices that share them.
        mesh: a ``jax.sharding.Mesh`` whose devices share the rows of every step. None: the one that
            the arrays of ``source``, or the parameters given to ``init``, lie on, if any.
            Parameters keep their own sharding; what lies elsewhere goes whole to all devices.
        data_axes: the axes of the mesh that rows are cut over; None takes those that the records
            are cut over, else the one called "data", else the first.
        reserve: steps that are charged at a time; see ``jaxdp.ledger.tickets.Issuer``.
        average: decay of an average of the iterates, which ``released`` returns; None for none.
        missing_values: True if the loss expects NaN in records, for values that are missing. False
            refuses records in memory or a memory map with NaN, before the first step of a model;
            infinite numbers are refused either way. Other sources are not read for it.
        issuer: for ``jaxdp.Run``, which issues its tickets itself; None makes one.
        clipping: further options of ``jaxdp.clipped_grad``: ``engine``, ``microbatch_size``,
            ``rng_name``.

    Raises:
        ValueError: an argument is not what it should be, named with its value.

    Example:
        >>> data = {"x": jnp.ones((1_000, 3)), "y": jnp.ones(1_000)}
        >>> loss_fn = lambda w, example: (example["x"] @ w - example["y"]) ** 2
        >>> mechanism = jaxdp.dp_sgd(
        ...     epsilon=3.0, delta=1e-5, steps=5,
        ...     l2_clip_norm=1.0, batch_size=100, dataset_size=1_000,
        ... )
        >>> trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(1e-3), data)
        >>> state = trainer.init(jnp.zeros(3))
        >>> for batch in trainer.batches(5):
        ...     state, info = trainer.step(state, batch)
        >>> trainer.epsilon(delta=1e-5).upper <= 3.0
        True
    """

    _plan: tuple[Any, ...] | None
    _guard: Guard

    def __init__(
        self,
        loss_fn: LossFn,
        mechanism: Mechanism | Algorithm,
        optimizer: optax.GradientTransformation | None = None,
        source: Any = None,
        *,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        another: bool = False,
        secret: Secret | None = None,
        trainable: Any = None,
        constants: PyTree = None,
        energy: StepHook | None = None,
        physical_batch_size: int | Literal["auto"] | None = None,
        mesh: jax.sharding.Mesh | None = None,
        data_axes: Sequence[str] | None = None,
        reserve: int | None = None,
        average: float | None = None,
        missing_values: bool = False,
        issuer: Issuer | None = None,
        **clipping: Unpack[ClippingOptions],
    ):
        check_option_names("jaxdp.Trainer", clipping)
        self._to_fit, self._by_work = physical_batch_size == "auto", physical_batch_size is None
        given: Any = None if self._to_fit else physical_batch_size
        if given is not None:
            given = arguments.integer("physical_batch_size", given, least=1)
        algorithm = as_algorithm(mechanism, optimizer, average)
        self.source: Source = as_source(source)
        algorithm = algorithm.on(self.source)
        self.algorithm, self.mechanism = algorithm, algorithm.mechanism
        self._on_trust = algorithm.on_trust()
        self.ledger = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        given_source = self.source
        self._place = None if mesh is None else placement(mesh, data_axes)
        self._secret = Secret.of_all_processes(secret)
        processes.agree(source=lambda: fingerprint(self.source, self._secret))
        self._step = PrivateStep.of(
            algorithm, loss_fn, trainable=trainable, constants=constants, **clipping
        )
        self._grad_fn = self._step.grad_fn
        self._plan = None
        # Of the parameters that it was given, and whether a step was taken.
        self._start, self._stepped = secrets.token_bytes(8), False
        self._tried: set[bool] = set()  # the optimizer, without and with a public value
        self._settled = self._place_on_mesh(None)
        self._hook = algorithm.hook(energy, self.ledger)
        if not is_own(type(self._hook)):
            self._on_trust.append(_HOOK)
        self._takes_rng = bool(getattr(self._grad_fn, "takes_rng", False))
        # The streams of this trainer in a ledger that others may charge too, the events of its
        # steps, and the model that they belong to; none in a run, which has looked at its records
        # before audit canaries came to them.
        self._own: tuple[str, ...] = ()
        self._events: set[acc.Event] = set()
        self._model: str | None = None
        self._another = arguments.boolean("another", another)
        if another and ledger is None:
            raise ValueError(
                "ledger must be that of the models before where another=True, got None: with a "
                "ledger of its own this model would count alone, and what both cost nowhere. Give "
                "ledger=trainer.ledger, or a file that all of them are charged to"
            )
        if issuer is None:
            self.mechanism.check_source(given_source)
            noise = self.mechanism.noise_multiplier
            length = 1 if isinstance(noise, (int, float)) else noise.steps
            self._events = {event for event, _, _ in self.mechanism.events(0, length)}
            # Before a model's first step alone: of one that was charged nothing may follow from
            # the numbers of a record. As they were given, for a copy to a device takes its time.
            held = (entry.event in self._events for entry in self.ledger.reserved)
            if processes.from_process_0(lambda: str(another or not any(held))) == "True":
                look_through(given_source, missing_values)
            self.ledger.join()
            usual = max(1, min(64, (self.mechanism.steps or 1_000) // 50))
            reserve = usual if reserve is None else reserve
            issuer = issuer_of(self.mechanism, self.ledger, self._secret, reserve=reserve)
            self._own = issuer.stream, *self._hook.streams  # whose events may be the same
        self._issuer = issuer
        rows = given or default_rows(self.mechanism, self.source)
        rows = self._place.round_up(rows) if self._place else rows
        known = functools.partial(identities, self.source)
        sampling, size = self.mechanism.sampling, len(self.source)
        self._sampler = Sampler(sampling, size, rows, issuer, known, self.source)

    @property
    def clipped_grad(self) -> Any:
        """The clipped per-example gradients."""
        return self._grad_fn

    @property
    def physical_batch_size(self) -> int:
        """Rows of one physical batch; of public numbers, shapes and the device alone."""
        return self._sampler.physical_batch_size

    def choose_physical_batch_size(self, params: PyTree) -> None:
        """Chooses the physical batch for "auto"; ``init`` calls it, before anything is charged."""
        if self._to_fit:
            fit = rows_that_fit(self._step, params, self.source, self.mechanism)
            # Of process 0: devices of other processes may hold more or less.
            self._sampler.set_physical_batch_size(int(processes.from_process_0(lambda: str(fit))))
            self._to_fit = False

    def init(self, params: PyTree, *, public_value: ArrayLike | None = None) -> TrainState:
        """The state before the first step. The trainer owns a copy of the parameters.

        Args:
            params: computed from no record, or from what this trainer's ledger holds.
            public_value: for an optimizer that asks for ``value``, as for ``step``.

        Raises:
            ValueError: the loss cannot be used with these parameters and records, what it captured
                or begins with was computed from the records or is NaN, or the optimizer asks for
                what it is not given; nothing is charged by then.
        """
        check_arrays(params)
        given = params
        self._settled = self._place_on_mesh(params)
        params = jax.tree.map(jnp.array, params)
        params = self._place.put(params) if self._place else params
        copy_past(given, params)
        self.choose_physical_batch_size(params)
        self._plan = None
        self.inspect_loss(params, first=True)
        # What was refused did not start it. The ledger is told of parameters from elsewhere, where
        # steps were taken before; a release stays one.
        unknown = unknown_arrays(given, self.ledger, self._start)
        if self._stepped and unknown:
            self.ledger.trust(STARTED_AGAIN)
        record_returned(unknown, self._start)
        with using_mesh(self._place.mesh if self._place else None):
            # Copied too: parts that share a buffer, such as one zero, could not all be donated.
            opt_state = jax.tree.map(jnp.array, self._step.init(params))
        valued = {} if public_value is None else _valued(public_value)
        self._check_optimizer(params, opt_state, valued)
        past = np.frombuffer(self.ledger.last_head(*self._own), np.uint32)
        state = self._placed(TrainState(params, opt_state, 0, past))
        own: PyTree = (state.params, state.opt_state)
        record_returned(unknown_arrays(own, self.ledger, self._start), self._start)
        return state

    def inspect_loss(self, params: PyTree, first: bool = False, resumed: bool = False) -> None:
        """Refuses a loss that cannot be used, once; ``init`` does it, before anything is charged.

        Args:
            params: the parameters.
            first: True if they are those before the first step, and no releases.
            resumed: True if nothing was drawn yet, as before the first step.

        Raises:
            ValueError: as ``init``.
        """
        if self._plan is not None:
            return
        with using_mesh(self._place.mesh if self._place else None):
            size = self._sampler.physical_batch_size
            self._plan, work, self._guard = inspect_loss(
                self._grad_fn, params, self.source, size, first, self.ledger
            )
        if self._by_work and (first or resumed) and isinstance(self._grad_fn, ClippedGrad):
            trained, place = self._grad_fn.trained(params), self._place
            devices = 1 if place is None else place.devices
            rows = rows_of_least_work(self.mechanism, self.source, work, trained, devices)
            # Of process 0: other processes' devices may hold more or less.
            rows = int(processes.from_process_0(lambda: str(rows)))
            self._sampler.set_physical_batch_size(rows if place is None else place.round_up(rows))
        # One program takes every step where one physical batch holds every draw, however many
        # records there are of the declared number: that of the records is private.
        mechanism, enough = self.mechanism, rows_for_most_draws(self.mechanism, any_number=True)
        if mechanism.sampling.largest_size(mechanism.dataset_size) is not None:
            enough = min(enough, mechanism.dataset_size)
        elif self.algorithm.direction is not None:
            # What two programs round differently, differences along a line magnify without bound:
            # not even a draw that hardly ever comes is taken by the other.
            enough = min(mechanism.most_records, 2 * mechanism.dataset_size)
        one = self._sampler.physical_batch_size >= enough
        self._fused = one and isinstance(self._grad_fn, ClippedGrad)

    def batches(
        self,
        steps: int | None = None,
        *,
        epochs: float | None = None,
        beyond: bool = False,
        state: TrainState | None = None,
    ) -> Batches:
        """Returns an iterator over charged batches, drawn and gathered ahead of time.

        A step is charged when its batch is handed out. What was drawn ahead and never handed out,
        as when the loop is left early, costs nothing; ``close`` says so in the ledger's file.

        Args:
            steps: the number of batches, 0 for none; None takes all that are left of those that the
                noise was calibrated for, and of these what the ledger's budget admits. A number is
                taken as far as the budget goes; the batch after that raises, and says how many fit.
            epochs: in place of ``steps``: passes over the data set at the expected batch size.
            beyond: True goes on after the steps that the noise was calibrated for; epsilon grows.
            state: where training begins or goes on: from ``init``, or restored. It must be given
                where the ledger holds steps of this mechanism already, as after a crash: what is
                left is what nobody charged to that state's model. See ``another``.

        Raises:
            ValueError: more steps than are left, unless ``beyond``; a ledger that holds steps of
                this mechanism, and neither ``state`` nor ``another``; a state of another model;
                nothing is charged. Processes that are at different steps.
        """
        if self._to_fit:
            known = "call trainer.init(params), which chooses, or give the number that was chosen"
            raise ValueError(f'physical_batch_size must be known to draw, got "auto": {known}')
        issuer, ledger, mechanism = self._issuer, self.ledger, self.mechanism
        if not self._own:  # a run's
            room = issuer.room() if ledger.has_budget else None
            count = left_of(mechanism, issuer.next, steps, epochs, beyond, room)
            processes.agree(step=issuer.next, steps=count)
            return Batches(self._sampler, self.source, issuer.next + count, self._place)

        if this_process() != ledger.guard.process:
            issuer.room()  # refused: a fork may never get the lock
        with ledger.guard.lock:  # of two threads one is first
            # What others took, by model: asked for at every call, for they may go on meanwhile.
            # A loop of theirs that has not handed out a batch has begun, too.
            others = charged(ledger, self._events, self._own)
            loops = [
                (loop, of)
                for loop, of in tuple(_loops.items())
                if of is not self and of.ledger is ledger and of._events & self._events
                if len(loop)
            ]
            others = {of._model or "": 0 for _, of in loops} | others

            # Whose steps these are: this trainer's own, a new model's, or those of the state.
            stream = self._own[0]
            if state is not None:
                check_state(state, ledger)
                stream = ledger.last_stream(np.asarray(state.past, np.uint32).tobytes())
            from_init, of_state = stream in self._own, ledger.model_of(stream)
            model, begins, line = self._model, self._model is None, ""
            if model is not None:
                if not from_init and of_state != model:
                    raise ValueError(
                        "state must be of the model that this trainer trains, got one of another "
                        "model on its ledger: make another trainer, and take its "
                        "trainer.batches(state=state)"
                    )
            elif self._another:
                if not from_init:
                    raise ValueError(_NOT_FROM_INIT)
                model = self._own[0]
            elif not others:
                model = ""  # the first
            elif mechanism.strategy is not None:
                raise ValueError(
                    "another must be True where the ledger holds a run of this mechanism already: "
                    "correlated noise goes on from that of the step before, which no ledger holds, "
                    "so that the run begins anew, and costs as much again: "
                    "jaxdp.Trainer(..., ledger=ledger, another=True). jaxdp.Run goes on after an "
                    "interruption"
                )
            elif state is None:
                left = "" if mechanism.steps is None else f" of {mechanism.steps} steps"
                raise ValueError(
                    "state must be given where the ledger holds steps of this mechanism already "
                    f"({sum(others.values())}), got none. Training that goes on, as after a crash: "
                    "trainer.batches(state=state) with the state that training returned, restored "
                    f"from your checkpoint; it has what is left{left}. A new model, which costs "
                    "as much again: jaxdp.Trainer(..., ledger=ledger, another=True)"
                )
            elif of_state in others and not from_init:
                model = of_state
            elif len(others) == 1:
                model = next(iter(others))
            else:
                raise ValueError(
                    "state must be one that training returned, where the ledger holds "
                    f"{len(others)} models of this mechanism, got one of which nobody knows whose "
                    "it is, as before a first step. A new model: "
                    "jaxdp.Trainer(..., ledger=ledger, another=True)"
                )
            taken = others.get(model, 0) + issuer.next - issuer.first
            first = taken if begins else issuer.next

            room = issuer.room(first) if ledger.has_budget else None
            count = left_of(mechanism, taken, steps, epochs, beyond, room)
            processes.agree(step=first, steps=count, model=model)
            if begins:
                for name in self._own if model else ():
                    ledger.assign_model(name, model)
                if first:
                    issuer.begin_at(first)
                self._model = model
            planned = mechanism.steps
            ahead = sum(len(loop) for loop, of in loops if (of._model or "") == model)
            if begins and self._another:
                line = f"another model on this ledger, {self._described_end(others, count)}"
            elif count and ahead and (planned is None or taken + count + ahead > planned):
                line = (
                    f"the loop of another trainer has {ahead} steps of this model to come, "
                    f"besides these {count}: on this ledger, "
                    f"{self._described_end(others, count)}. Close that loop, or make this a "
                    "new model, jaxdp.Trainer(..., ledger=ledger, another=True)"
                )
            elif begins and not from_init and not any(others.values()):
                line = (  # such as noise that was calibrated anew
                    "the state was trained with another mechanism, whose steps are no steps "
                    f"of this one: on this ledger, {self._described_end(others, count)}"
                )
            elif begins and from_init and first:
                line = (
                    f"the state is from init, and the ledger holds {first} steps of its model: "
                    f"{count} are taken. A new model has all its steps: "
                    "jaxdp.Trainer(..., ledger=ledger, another=True)"
                )
            if line and processes.index() == 0:
                print(f"jaxdp: {line}", file=sys.stderr)
            found = Batches(self._sampler, self.source, first + count, self._place)
            _loops[found] = self
        return found

    def _described_end(self, models: Iterable[str], count: int) -> str:
        """Words on what the ledger holds once this trainer, and others that live, are done."""
        ledger, mechanism, counts = self.ledger, self.mechanism, event_counts(self.ledger.reserved)
        others = [(of, len(loop)) for loop, of in tuple(_loops.items()) if of.ledger is ledger]
        for of, steps in [(self, count), *(each for each in others if each[0] is not self)]:
            at, start = of._issuer.unused()  # up to start they are reserved, and counted
            made = of.mechanism.events(start, at + steps - start) if at + steps > start else []
            if steps and (charges := of._hook.charges) is not None:
                made += charges.events(0, steps)
            for event, first, n in made:
                # A block that is begun is counted, too.
                new = -(-(first + n) // event.block) - -(-first // event.block)
                counts[event] = counts.get(event, 0) + new
        total = sum(n * event.block for event, n in counts.items())
        words = f"which holds {total} steps in the end"
        if mechanism.delta is not None and counts:
            event = acc.Composed(tuple(acc.Repeated(each, n) for each, n in counts.items()))
            found = acc.epsilon(event, mechanism.delta, mechanism.neighbours).upper
            words += f": epsilon {found:.2f} at delta {mechanism.delta:g}"
        number = len({*models, self._model})
        if mechanism.steps is not None and number > mechanism.models:
            words += (
                f". The noise is for {mechanism.models}, these are {number}: "
                f"jaxdp.dp_sgd(..., models={number}) keeps to the budget"
            )
        return words

    def step(
        self, state: TrainState, batch: ChargedBatch, *, public_value: ArrayLike | None = None
    ) -> tuple[TrainState, StepInfo]:
        """Takes one private step.

        Args:
            state: the state; its memory is reused, so it must not be used afterwards.
            batch: from ``batches``; it can be used once.
            public_value: a number, handed to the optimizer as ``value``, which
                ``optax.contrib.reduce_on_plateau`` asks for. It must be **public**, such as the
                loss on public examples: the ledger names it as assumed.

        Returns:
            The next state, and a ``StepInfo`` that may be logged.

        Raises:
            ValueError: a batch that was used before, or is another trainer's; a state whose past
                this trainer's ledger does not hold, or that is no new model's (``another``).
        """
        return self.step_with_info(state, batch, return_info=False, public_value=public_value)[:2]

    def step_with_info(
        self,
        state: TrainState,
        batch: ChargedBatch,
        return_info: bool = True,
        *,
        public_value: ArrayLike | None = None,
    ) -> tuple[TrainState, StepInfo, list[ClipInfo]]:
        """As ``step``, and returns the **sensitive** ``ClipInfo``, which no epsilon covers.

        Args:
            state: as for ``step``.
            batch: as for ``step``.
            return_info: False returns none of it.
            public_value: as for ``step``.

        Raises:
            ValueError: as ``step``.
        """
        # Refused before anything is spent: a batch that is not this trainer's, or was used; a state
        # whose past its ledger does not hold; a loss or an optimizer that cannot be used with it.
        valued = {} if public_value is None else _valued(public_value)
        ticket, mechanism = check_batch(batch, self._issuer), self.mechanism
        check_state(state, self.ledger, batch.draw.step if mechanism.strategy else None)
        if self._another:
            past = np.asarray(state.past, np.uint32).tobytes()
            if self.ledger.last_stream(past) not in self._own:
                raise ValueError(_NOT_FROM_INIT)
        if bool(valued) not in self._tried:
            self._check_optimizer(state.params, state.opt_state, valued)
        # Arrays that no step returned are told by identity, so before they are placed anew.
        replaced = describe_replaced(state, self.ledger, self._start, self._grad_fn.trained)
        if self._place is not None or not self._settled:
            state = self._placed(state)
        if self._plan is None:
            self.inspect_loss(state.params)

        # What the optimizer is passed besides the noisy gradient may be charged, too. The ledger
        # is told what this release takes on trust; a leak says more than any assumption.
        more = self._hook.prepare_step()
        for what in (*replaced, *self._on_trust):
            ticket.note("trusted", what)
        noted = {} if mechanism.leak else more
        note_extra_args(ticket, {"public_value": public_value, **noted})

        # The step itself. What the loss captures may by now be another array than when it was
        # inspected, so that it is looked at again wherever the loss is traced.
        rng = ticket.rng("examples") if self._takes_rng else None
        with (
            using_mesh(self._place.mesh if self._place else None),
            losses.inspecting(lambda traced, public, loss: self._guard.look(traced, public)),
        ):
            params, opt_state, info, infos = self._step(
                ticket,
                state.params,
                state.opt_state,
                batch,
                self._data,
                rng,
                valued | more,
                fused=self._fused,
                return_info=return_info,
            )
        self._stepped = True
        past = self.ledger.last_head(*self._own)
        record_returned(params, past)  # as what the releases in the ledger led to
        record_returned(opt_state, past, of_optimizer=True)
        moved = TrainState(params, opt_state, state.step + 1, np.frombuffer(past, np.uint32))
        return moved, info, infos

    def resume(self, state: TrainState) -> None:
        """Takes a state as one that a step returned; for ``jaxdp.Run``, which has kept it itself.

        Raises:
            ValueError: as ``init``.
        """
        # What is restored was released.
        self.inspect_loss(state.params, first=state.step == 0, resumed=True)
        self._check_optimizer(state.params, state.opt_state, {})
        past = np.asarray(state.past, np.uint32).tobytes()
        # What is frozen is the user's, and was released by no step.
        record_returned(state.params, self._start)
        record_returned(self._grad_fn.trained(state.params), past)
        record_returned(state.opt_state, past, of_optimizer=True)

    def released(self, state: TrainState) -> PyTree:
        """The parameters to evaluate and publish: the average where there is one, else the last."""
        if is_donated(state):
            raise ValueError(
                "state must be the last one, got one whose memory a step has reused: write "
                "state, info = trainer.step(state, batch)"
            )
        return self.algorithm.released(state.params, state.opt_state)

    def epsilon(
        self,
        delta: float | None = None,
        relation: acc.Relation | None = None,
    ) -> acc.Bound:
        """Bounds on epsilon for everything charged so far; the guarantee is ``.upper``.

        Args:
            delta: None takes the one that the noise was calibrated for.
            relation: the neighbouring relation of everything in the ledger; None takes this
                mechanism's (``Mechanism.neighbours``), also for what others charged.

        Raises:
            ValueError: nothing was charged; no ``delta``, and the noise was not calibrated for one;
                the privacy unit is a user, and others charged releases of records.
        """
        delta = self.mechanism.delta if delta is None else delta
        if delta is None:
            raise ValueError("delta must be given: the noise was not calibrated for one; got None")
        if not self.ledger.entries:
            raise ValueError(
                "ledger must hold a charge to have an epsilon, got an empty one: no step was "
                "taken yet. Take batches from trainer.batches() first"
            )
        others = {entry.event for entry in self.ledger.reserved} - self._events
        if self.mechanism.records_per_user and not all(map(of_users, others)):
            raise ValueError(
                "ledger must hold releases whose privacy unit is a user, as here, got one with "
                "releases of records besides: what these say of a user is not known. What was of "
                "users and charged by hand is jaxdp.accounting.PerUser(event, records)"
            )
        relation = self.mechanism.covered(relation) or self.mechanism.neighbours
        return self.ledger.epsilon(delta, relation)

    def unverified(self) -> list[str]:
        """The assumptions that jaxdp could not verify, one sentence each; [] if there is none."""
        return self.ledger.unverified()

    def close(self) -> None:
        """Ends the ledger where the last batch was handed out, and releases its file."""
        with contextlib.ExitStack() as rest:  # done also where one of them fails, as on a full disk
            rest.callback(self.ledger.close)
            rest.callback(self._hook.close)
            self._sampler.close()

    def _check_optimizer(
        self, params: PyTree, opt_state: PyTree, valued: dict[str, PyTree]
    ) -> None:
        """Tries the optimizer on shapes; raises ValueError where it asks for more than it gets."""
        # What is charged when it is prepared is not tried; a gradient of its own may pass on means.
        if self._hook.charges is None and self.algorithm.gradient is None:
            with using_mesh(self._place.mesh if self._place else None):
                extra = valued | self._hook.prepare_step()
                self._step.check_after(params, opt_state, extra)
        self._tried.add(bool(valued))

    def _place_on_mesh(self, params: PyTree) -> bool:
        """Spreads the step over the mesh asked for, or that records or parameters lie on.

        Returns:
            True if the parameters were known.
        """
        place = resolve_placement(self._place, params, getattr(self.source, "arrays", ()))
        if params is not None:
            agree_on_layout(
                params, self._grad_fn, place, self._to_fit or self._sampler.physical_batch_size
            )
        if params is not None or place is not None:
            shards.check_mesh(None if place is None else place.mesh)
        self.source = placed(self.source, place)
        self._data = None
        if isinstance(self.source, ArraySource) and self.source.on_device:
            self._data = self.source.arrays
        if place is None:
            return params is not None
        place = place if self._data is None else place.with_records(self._data)
        self._place = dataclasses.replace(place, from_trainer=True)
        self._grad_fn = with_mesh(self._grad_fn, self._place)
        self._step = dataclasses.replace(self._step, grad_fn=self._grad_fn)
        if params is not None:
            self._step = self._step.sharded_as(params, self._place)
            self._sampler.set_physical_batch_size(
                self._place.round_up(self._sampler.physical_batch_size)
            )
        return params is not None

    def _placed(self, state: TrainState) -> TrainState:
        """The state, on the mesh if there is one: it may have been restored elsewhere."""
        self._settled = self._settled or self._place_on_mesh(state.params)
        own: PyTree = (state.params, state.opt_state)
        if self._place is None or self._place.is_home_of(own):
            return state
        params, opt_state = shards.put(own, self._step.shardings)
        return state._replace(params=params, opt_state=opt_state)


# The loops that live, each with its trainer.
_loops: "weakref.WeakKeyDictionary[Batches, Trainer]" = weakref.WeakKeyDictionary()


def look_through(source: Source, missing_values: bool = False, everything: bool = False) -> None:
    """Raises ValueError where a record holds a number that is not finite, before any is drawn.

    Such a record adds nothing, and costs what all cost. Before the first step it can be refused;
    later nothing may follow from it: a stop at the step that drew it would tell that it is there.

    Arrays in memory, on devices and in memory maps are read, in pieces; what can hold whole numbers
    only costs nothing. Numbers count as a step gets them: float64 as float32. In several processes
    each reads what it holds, and all raise where one does.

    Args:
        source: the records.
        missing_values: True lets NaN pass, and refuses infinity alone.
        everything: True reads other sources too, record by record, so that one that cannot be read
            is found as well.

    Raises:
        ValueError: no message tells a value, an index or a count.
    """
    missing = arguments.boolean("missing_values", missing_values)
    wrong: Wrong = "infinity" if missing else "NaN or infinity"
    source = source.source if isinstance(source, Users | UserExamples) else source
    likes = jax.tree_util.tree_leaves_with_path(source.example)
    arrays = jax.tree.leaves(source.arrays) if isinstance(source, ArraySource) else []
    here = [
        (path, like, leaf)
        for (path, like), leaf in zip(likes, arrays, strict=False)
        if isinstance(leaf, np.ndarray | jax.Array)
    ]
    parts, one_by_one = iter(here), everything and len(here) < len(likes)
    if one_by_one:  # each process its share
        first, end = (len(source) * (processes.index() + i) // processes.count() for i in (0, 1))
        some = max(1, TOGETHER // max(1, sum(math.prod(like.shape) for _, like in likes)))
        rows = (np.arange(i, min(i + some, end)) for i in range(first, end, some))
        read = (jax.tree.leaves(source.gather(each, np.ones(len(each), bool))) for each in rows)
        parts = ((*like, x) for each in read for like, x in zip(likes, each, strict=True))
    floats = (leaf.size for _, _, leaf in here if jnp.issubdtype(leaf.dtype, np.inexact))
    if one_by_one or sum(floats) > _MANY:
        print("jaxdp: looking through all records, once, before a first step", file=sys.stderr)
    found = (named(at) for at, like, leaf in parts if holds(leaf, wrong, like.dtype, named(at)))
    if where := processes.first_said(lambda: next(found, "")):
        option = "where the loss expects NaN as missing values, say so: missing_values=True"
        raise ValueError(
            f"source must hold finite numbers{' or NaN' * missing}, got {wrong} in {where}: the "
            "gradient of such a record is not finite, so that it counts as zeros, and the model "
            "learns nothing from it. Mend what wrote it, fill it with a public constant, or leave "
            "the record out beforehand; scale by a public constant what float32 cannot hold; "
            f"{'missing_values=True is for NaN' if missing else option}. Nothing was charged. That "
            "it was refused tells something of the records: it is for their owner, and not to be "
            "published"
        )


_NOT_FROM_INIT = (
    "state must be one that trainer.init(params) returned, for a trainer of a new model "
    "(another=True), got one that other training on this ledger returned. To go on with it make "
    "the trainer without another=True, and take trainer.batches(state=state)"
)
_HOOK = (
    "what the optimizer is passed in each step comes from a hook of the caller's (energy=): that "
    "it charges what it releases was not verified"
)


def _valued(public_value: Any) -> dict[str, Any]:
    """The extra argument by which the optimizer is passed a public value, once it is checked."""
    if is_donated(public_value):
        raise ValueError(
            "public_value must be a number that is there, got an array whose memory a step has "
            "reused: compute it from the state that the last step returned"
        )
    kind = getattr(public_value, "dtype", type(public_value))
    is_real = jnp.issubdtype(kind, np.floating) or jnp.issubdtype(kind, np.integer)
    if np.shape(public_value) or not is_real:
        raise ValueError(
            "public_value must be a number, such as the loss on public examples, got "
            f"{arguments.described(public_value)}"
        )
    if isinstance(public_value, int) and abs(public_value) > float(jnp.finfo(jnp.float32).max):
        raise ValueError(
            "public_value must be a number that float32 can hold, got a whole number of "
            f"{public_value.bit_length()} bits"
        )
    if processes.count() > 1:  # one for all, or their parameters would part
        public_value = float(processes.from_process_0(lambda: str(float(public_value))))
    return {"value": jnp.asarray(public_value, jnp.float32)}
