"""Tickets: the right to release one charged step, once. Draws and noise keys derive from them.

Keys are derived from (secret, configuration, incarnation, step, part) by a keyed hash. Wherever a
sampler is made the incarnation is fresh randomness of the operating system, so that a restored
state, a repeated step or a second process gets another draw and other noise. (With a seed that a
person chose it is a place in the ledger, so that a run can be repeated; the ledger notes it.) The
draw of an epoch that is one event comes from (secret, stream, epoch): a run that was interrupted
keeps it.
"""

import contextlib
import copy
import functools
import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.devices import processes
from jaxdp.ledger import links
from jaxdp.ledger.entries import SEEDED, Entry
from jaxdp.ledger.ledger import Ledger, alone, this_process
from jaxdp.ledger.seeds import Secret

# The part of a step's event whose noise is on an integer grid (``jaxdp.noise.grid``). Its key is
# long, and it has no other: nothing else can be taken for its noise. With correlated noise the name
# of the part begins so.
ON_GRID = "gradient on an integer grid"
# So begins the name of a part whose noise takes back that of the step before by making it again.
AGAIN = "correlated with the step before, made again,"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words", "multipliers", "tag", "step", "previous_tag", "long", "before"],
    meta_fields=["parts"],
)
@dataclass(frozen=True, eq=False)
class NoiseKey:
    """The noise key of one step, to be handed to a compiled update as ``key``. **Secret**.

    Attributes:
        words: uint32 [parts, 2]; a threefry key for every part.
        multipliers: float32 [parts]; the noise multiplier that was charged for it.
        tag: uint32 [2]; a name of the key that does not reveal it.
        step: int32 scalar; the step of the noise schedule.
        previous_tag: uint32 [2]; the tag of the step before, which correlated noise goes on from;
            zeros for the first step that an issuer hands out, unless it knows who took that one.
        parts: names of the parts, such as ("gradient",).
        long: uint32 [8], a ChaCha20 key; None where no part's noise is on an integer grid.
        before: uint32 [2], the threefry key of the step before, to make its noise again and take it
            back; None where no part does so.
    """

    words: Any
    multipliers: Any
    tag: Any
    step: Any
    previous_tag: Any
    parts: tuple[str, ...] = ("gradient",)
    long: Any = None
    before: Any = None

    def __repr__(self) -> str:
        return f"NoiseKey(<secret>, parts={self.parts})"

    def part(self, name: str) -> tuple[jax.Array, jax.Array]:
        """The key (uint32 [2]) and the charged noise multiplier of one part.

        Raises:
            ValueError: the event of this key's step has no such part.
        """
        if name not in self.parts:
            raise ValueError(
                f"part must be among those that the step was charged for, {self.parts}, got "
                f"{name!r}: it is a release that no event covers"
            )
        links.record_key_use()
        index = self.parts.index(name)
        return jnp.asarray(self.words)[index], jnp.asarray(self.multipliers)[index]


def simulated_key(
    key: jax.Array, multipliers: Mapping[str, Any], step: Any = 0, before: jax.Array | None = None
) -> NoiseKey:
    """A noise key from a JAX key, for simulations and tests: **nothing is charged**.

    Args:
        key: a threefry key; every run and step needs another one.
        multipliers: the noise multiplier of each part, such as ``{"gradient": 1.0}``.
        step: the step of the noise schedule.
        before: the key of the step before, which noise that makes that step's again needs.
    """

    def split_of(key: jax.Array) -> jax.Array:
        """uint32 [1 + parts, 2]: the tag of a key, and those of its parts."""
        data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
        wrapped = jax.random.wrap_key_data(data, impl="threefry2x32")
        return jax.random.key_data(jax.random.split(wrapped, len(multipliers) + 1))

    split = split_of(key)
    stds = jnp.asarray(list(multipliers.values()), jnp.float32)
    step, previous = jnp.asarray(step, jnp.int32), jnp.zeros(2, jnp.uint32)
    parts, long = tuple(multipliers), None
    if any(part.startswith(ON_GRID) for part in parts):
        last = jax.random.wrap_key_data(split[-1], impl="threefry2x32")
        long = jax.random.bits(last, (8,), jnp.uint32)  # 64 bits where x64 is on, if not said
    again = [number for number, part in enumerate(parts, 1) if part.startswith(AGAIN)]
    taken = previous if again else None
    if again and before is not None:
        of_part = jnp.asarray([0, again[0]])
        previous, taken = jnp.where(step == 0, jnp.uint32(0), split_of(before)[of_part])
    return NoiseKey(split[1:], stds, split[0], step, previous, parts, long, taken)


class Ticket:
    """The right to release one charged step, once. It cannot be copied, saved or sent.

    Args:
        issuer: that hands it out.
        step: the step of the noise schedule, counted from 0.
        multipliers: noise multiplier of every part of the step's event.
        first: True if it is the first that its issuer hands out.
    """

    def __init__(self, issuer: "Issuer", step: int, multipliers: dict[str, float], first: bool):
        self.issuer, self.step, self.first = issuer, step, first
        self.multipliers = dict(multipliers)
        self._process = issuer.guard.process  # not a fork that goes on with what it was making
        self._right = [True]  # taken out by whoever spends it, which needs no lock
        self._by = ""

    @property
    def spent(self) -> bool:
        """True if its noise key was taken."""
        return not self._right

    @property
    def usable(self) -> bool:
        """True if it can still be spent in this process."""
        return bool(self._right) and this_process() == self._process

    @property
    def tag(self) -> np.ndarray:
        """A public name [2] of the draw and the noise key, uint32, which does not reveal them."""
        return self._words("tag")

    def key(self) -> NoiseKey:
        """Spends the ticket and returns its noise key, for an update that the caller compiles.

        Raises:
            ValueError: the ticket was spent before, or belongs to another process.
        """
        return self.spend("the caller's own compiled update")

    def spend(self, by: str, *, verified: bool = False) -> NoiseKey:
        """Spends the ticket and returns its noise key.

        Args:
            by: who spends it, in words, for the error message of a second use.
            verified: True if jaxdp clipped the sum record by record, from this ticket's draw.

        Raises:
            ValueError: as ``key``.
        """
        # Taking the only element needs no lock: of two threads one finds the list empty.
        self.check()
        try:
            self._right.pop()
        except IndexError:  # another thread was faster
            self.check()
        self._by = by
        self.issuer.ledger._count(self.issuer.stream, verified=verified)

        # A key for every part that the event has, by its name; nothing else can be noised.
        words = [self._words(f"noise {part}") for part in self.multipliers]
        long = None
        if any(part.startswith(ON_GRID) for part in self.multipliers):
            name = f"noise {ON_GRID}|{self.issuer.label}|{self.step}"
            long = np.frombuffer(self.issuer.secret.key(name), dtype="<u4")

        # The step before was this issuer's; before its first, that of the start which the state
        # names, or nobody's.
        label = self.issuer.before if self.first else self.issuer.label
        names = ["tag", *(f"noise {part}" for part in self.multipliers if part.startswith(AGAIN))]
        previous, *again = (
            self._words(name, self.step - 1, label) if label else np.zeros(2, np.uint32)
            for name in names
        )
        return NoiseKey(
            np.array(words),
            np.asarray(list(self.multipliers.values()), np.float32),
            self.tag,
            np.int32(self.step),
            previous,
            tuple(self.multipliers),
            long,
            again[0] if again else None,
        )

    def check(self) -> None:
        """Raises ValueError if the ticket can no longer be spent in this process."""
        if this_process() != self._process:
            raise ValueError(
                "ticket must be spent by the process that drew it, got a forked one: both would "
                "add the same noise. Draw in the process that trains"
            )
        self.issuer.ledger._check_processes()  # else nobody sees what the others add its noise to
        if not self._right:
            raise ValueError(
                f"ticket must be spent once, but that of step {self.step} was spent by "
                f"{self._by or 'another thread'}: two releases with one noise subtract to none. "
                "Draw anew for every update: call sampler.draw() (or take the next batch) inside "
                "the loop"
            )

    def rng(self, name: str) -> jax.Array:
        """A JAX key for randomness that is not noise, such as dropout and augmentation."""
        words = jnp.asarray(self._words(f"use {name}"))
        return jax.random.wrap_key_data(words, impl="threefry2x32")

    def blank(self) -> NoiseKey:
        """A noise key of zeros with this ticket's shapes, to trace an update; nothing is spent."""
        count = len(self.multipliers)
        is_long = any(part.startswith(ON_GRID) for part in self.multipliers)
        is_again = any(part.startswith(AGAIN) for part in self.multipliers)
        return NoiseKey(
            np.zeros((count, 2), np.uint32),
            np.zeros(count, np.float32),
            np.zeros(2, np.uint32),
            np.int32(0),
            np.zeros(2, np.uint32),
            tuple(self.multipliers),
            np.zeros(8, np.uint32) if is_long else None,
            np.zeros(2, np.uint32) if is_again else None,
        )

    def note(self, kind: str, what: str) -> None:
        """Writes into the ledger what this release rests on; see ``Ledger.note``."""
        self.issuer.ledger.note(kind, what)

    def _words(self, name: str, step: int | None = None, label: str = "") -> np.ndarray:
        """uint32 [2] of the pseudorandom stream of a name, for this step and issuer or another."""
        step = self.step if step is None else step
        return self.issuer.words(name, step, label or self.issuer.label)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a batch, draw or sum (its ticket) cannot be copied, pickled or sent to another "
            "process: its noise would be used twice. Take batches where the step is taken"
        )

    def __copy__(self) -> Any:
        return self.__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()

    def __repr__(self) -> str:
        return f"Ticket(step={self.step}, spent={self.spent})"


_ENDLESS = 10**18  # the end of a stretch that has none
Stretch = tuple[acc.Event, dict[str, float], int]


class Chargeable(Protocol):
    """A mechanism, or an algorithm with noise of its own, whose steps an issuer charges."""

    def stretch(self, step: int) -> Stretch:
        """(event, multipliers, end) of a step; they are those of all steps before the end.

        The event is what a step releases, or the block that it is in; the multipliers are the noise
        multiplier of every part of the release.
        """


class Issuer:
    """Hands out the tickets of one stream, each step once; docs/proofs/releases.md has the proof.

    Args:
        mechanism: its ``repr`` is the configuration that goes into every key.
        ledger: where steps are charged; nobody else charges the stream.
        secret: the randomness.
        stream: its name in the ledger; see ``Ledger.new_stream``.
        incarnation: goes into every key besides the mechanism and the step; another one for every
            stream and every start of a run.
        first_step: the step of the first ticket.
        reserve: steps reserved by one line of the ledger, so that not every one waits for the disk.
            A crash counts so many too many at most; ``close`` says where it ended.
        source: as for ``Entry``.
        note: as for ``Entry``.
        resumed: True for a run, whose later starts do steps again within their reservation:
            ``close`` takes nothing out.
        draws: goes into the randomness of a block of steps that are drawn together (an epoch), in
            place of mechanism and incarnation: what is the same at every start of a run keeps the
            draw of an epoch that an interruption cut in two, which is one event.
        passed_over: steps whose batch an earlier start of a run could not make: nobody is drawn.
        pass_over: writes durably that a step is one of them; None where no start does it again.
    """

    def __init__(
        self,
        mechanism: Chargeable,
        ledger: Ledger,
        secret: Secret,
        stream: str,
        *,
        incarnation: str = "",
        first_step: int = 0,
        reserve: int = 1,
        source: str = "sampler",
        note: str = "",
        resumed: bool = False,
        draws: str = "",
        passed_over: Collection[int] = (),
        pass_over: Callable[[int], None] | None = None,
    ):
        self.mechanism, self.ledger, self.secret, self.stream = mechanism, ledger, secret, stream
        self.guard = ledger.guard
        # The step that is handed out next, and the end of what this issuer has reserved: between
        # them lie steps that are charged and that nobody has.
        self.next = self._end = self.first = arguments.integer("first_step", first_step, least=0)
        self._ahead = arguments.integer("reserve", reserve, least=1)
        self.label = self._label(incarnation)
        self.before: str | None = None  # the label of the step before the first, if it was asked
        self._draws = draws or self.label
        self._kind, self._resumed = (source, note), resumed
        self.passed_over, self._pass_over = passed_over, pass_over
        self.run_order: Any = None  # of a run with correlated noise: the sampler, and its records
        # The stretch that was asked for last, and its first step.
        self._known: tuple[int, Stretch] | None = None
        ledger._register(stream, self)
        if (part := getattr(mechanism, "part", None)) is not None:  # jaxdp.sampling.parts
            for what in part.trusted():
                ledger.trust(what)
        # The event is written as text, and read, here already: the first step waits for less.
        with contextlib.suppress(ValueError):  # what is wrong is said where the step is taken
            event, _, _ = self._stretch(self.next)
            Entry.from_dict(Entry(event, self.next, 1, stream, *self._kind).to_dict())

    @alone
    def take(
        self, step: int | None = None, until: int | None = None, failed: bool = False
    ) -> Ticket | None:
        """Hands out the ticket of a step, once; None if it is not the next one.

        Args:
            step: None takes the next one.
            until: steps from this one on are not reserved.
            failed: True where its batch could not be made, which a run writes down first.

        Raises:
            ValueError: as ``Ledger.charge``; nothing is handed out then.
            BudgetExceededError: the ledger's budget does not admit the step.
        """
        if self.ledger.closed:
            raise ValueError("ledger must be open to hand out a step, got one that was closed")
        if self.ledger._issuers.get(self.stream) is not self:  # another start does its steps again
            raise ValueError(
                "steps must be handed out by a start of the run that goes on, got one before"
            )
        self.ledger._check_processes()
        if step is not None and step != self.next:
            return None
        step = self.next
        _, multipliers, _ = self._stretch(step)  # what can fail, fails before the charge
        if step == self._end:
            ahead = step + self._ahead
            self._charge(ahead if until is None else min(ahead, max(until, step + 1)), until)
        if failed and self._pass_over is not None:
            self._pass_over(step)
        self.next = step + 1  # from here on the step counts, whatever becomes of the ticket
        return Ticket(self, step, multipliers, first=step == self.first)

    @alone
    def begin_at(self, step: int) -> None:
        """Makes this the first step; nothing may be reserved yet."""
        assert self.next == self._end == self.first
        self.next = self._end = self.first = step

    def go_on_from(self, tag: np.ndarray, incarnations: Collection[str]) -> None:
        """Finds the start whose noise the first step takes back, by the tag [2] in the state.

        Raises:
            ValueError: it is none of these.
        """
        labels, before = list(map(self._label, incarnations)), self.first - 1
        of = [each for each in labels if (self.words("tag", before, each) == np.asarray(tag)).all()]
        if not of:
            raise ValueError(
                f"the run's starts must hold the one that took step {before}, whose noise the next "
                f"step takes back, but the state names none of the {len(labels)} that are known: "
                "put back all of the folder secret/ as it was with this checkpoint, or begin "
                "another run, whose cost adds to this one's"
            )
        self.before = of[0]

    def words(self, name: str, step: int, label: str) -> np.ndarray:
        """uint32 [2] of the pseudorandom stream of a name, for a step and an issuer's label."""
        found = self.secret.stream(f"{name}|{label}|{step}")
        return np.frombuffer(found[:8], dtype=np.uint32)

    def _label(self, incarnation: str) -> str:
        """The hash of mechanism and incarnation that goes into every key."""
        named = f"{self.mechanism!r}|{incarnation}".encode()
        return hashlib.blake2b(named, digest_size=16).hexdigest()

    @alone
    def reserve(self, until: int, whole: bool = False) -> None:
        """Reserves the steps before this one now, unless they are reserved.

        Args:
            until: the step.
            whole: releases decide how many of them are taken: all count, for good.
        """
        if until > self._end:
            self._charge(until, until, whole)

    @alone
    def room(self, first: int | None = None) -> int:
        """The number of steps from one on that the budget, which the ledger must have, admits.

        Args:
            first: the step, where nothing is reserved yet; None takes the next one.
        """
        return self._room(first)

    def _room(self, first: int | None = None) -> int:
        # Of a copy, which is charged what the steps behind the reservation would cost.
        budget, step = copy.copy(self.ledger._budget), self._end
        if first is not None and self.next == self._end:
            step = first
        start = step - (self._end - self.next)
        end = step
        while step == end < _ENDLESS:
            try:
                event, _, end = self._stretch(step)
            except ValueError:  # the end of a schedule, or of a strategy
                break
            step += self.ledger._fits(Entry(event, step, end - step, self.stream), budget)
        return step - start

    def _charge(self, until: int, asked: int | None, whole: bool = False) -> None:
        """Reserves the steps from the end on, as many as the budget admits: all, where ``whole``.

        Args:
            until: the step.
            asked: the end of the loop that asks, for the words; None where it has none.
            whole: as for ``reserve``.

        Raises:
            BudgetExceededError: not one fits, or, where ``whole``, not all do.
            ValueError: as ``Ledger.charge``.
        """
        first = start = self._end
        budget = self.ledger._budget
        if whole and budget is not None and (room := self._room()) < until - self.next:
            raise acc.BudgetExceededError(
                f"all {until - self.next} steps must fit the budget {budget}, for releases decide "
                f"how many of them are taken, but {room} do"
            )
        # A schedule may change the event on the way, and each stretch of one event has its line.
        while start < until:
            try:
                event, _, end = self._stretch(start)
            except ValueError:  # the end of a schedule, or of a strategy
                if start == first:
                    raise
                break
            entry = Entry(event, start, min(end, until) - start, self.stream, *self._kind, whole)
            fit = entry.steps if budget is None else self.ledger._fits(entry)
            if fit:
                partly = fit < entry.steps
                self.ledger._reserve(entry.between(start, start + fit) if partly else entry)
            start += fit
            if fit < entry.steps:
                break
        if start == first and budget is not None:
            # A run asks block by block; how many of it fit is counted from its beginning.
            of = "" if asked is None or self._resumed else f" of {asked - self.first}"
            taken = first - (0 if self._resumed else self.first)
            raise acc.BudgetExceededError(
                f"{taken}{of} steps fit the budget, and no further one: "
                + budget.refusal(event, 0, 1)
            )
        self._end = start

    def _stretch(self, step: int) -> Stretch:
        """As ``Chargeable.stretch``; asked anew where it is one step, which releases may decide."""
        if self._known is not None and self._known[0] <= step < self._known[1][2]:
            return self._known[1]
        found = self.mechanism.stretch(step)
        if found[2] > step + 1:
            self._known = step, found
        return found

    def unused(self) -> tuple[int, int]:
        """[first, end) of the steps that are reserved and were not handed out."""
        return self.next, max(self.next, self._end)

    @alone
    def close(self) -> None:
        """Takes out of the ledger what was reserved and not handed out.

        Not in a run, nor where releases decide the number of steps. Whoever draws afterwards
        reserves anew. Where the ledger was closed before, what is reserved stays.
        """
        if self._resumed or self.ledger.closed or self.ledger.counts_whole(self.stream):
            return
        self._end = self.next  # before the line: whatever becomes of it, no ticket lies behind it
        self.ledger._end_stream(self.stream, self.next)

    def generator(self, step: int, block: int = 0) -> np.random.Generator:
        """NumPy's 64-bit Philox generator for a step's draw; it charges nothing.

        Args:
            step: the step.
            block: steps that are drawn together; the generator is then that of the block which the
                step is in. 0 for a step by itself.
        """
        name = f"epoch|{self._draws}|{block}|{step // block}" if block else None
        key = self.secret.stream(name or f"draw|{self.label}|{step}")
        return np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)))

    def __reduce__(self) -> Any:
        raise TypeError(
            "a trainer or sampler cannot be copied, pickled or sent to another process: both would "
            "hand out the same draws and noise. Make another one, with a ledger of its own, or "
            "with the same one after close()"
        )

    def __copy__(self) -> Any:
        return self.__reduce__()


def issuer_of(
    mechanism: Any, ledger: Ledger | None = None, secret: Secret | None = None, **options: Any
) -> Issuer:
    """The issuer of a mechanism's tickets, on a new stream of the ledger.

    A secret from the operating system gives other keys to every stream; a seed that a person chose
    gives them by the number of streams before, so that a figure can be made again. Several
    processes get one secret and one stream.

    Raises:
        ValueError: the ledger is no ``Ledger``; processes disagree.
    """
    ledger = Ledger() if ledger is None else ledger
    if not isinstance(ledger, Ledger):
        raise ValueError(f"ledger must be a jaxdp.Ledger, got {type(ledger).__name__}")
    secret = Secret.of_all_processes(secret)
    processes.agree(
        mechanism=mechanism, options=sorted(options.items()), versions=processes.versions
    )
    stream, place = ledger.new_stream()
    if secret.reproducible:
        options = {"incarnation": str(place), "note": SEEDED, **options}
    return Issuer(mechanism, ledger, secret, stream, **{"incarnation": stream, **options})


def released_once(
    event: acc.Event,
    configuration: str,
    ledger: Ledger | None = None,
    secret: Secret | None = None,
    source: str = "mechanism",
) -> Secret:
    """Charges a whole computation as one release, and returns the secret of its randomness.

    Args:
        event: what is released.
        configuration: names the computation and its public numbers; goes into the randomness, as
            the event does.
        ledger: the ledger that is charged; None makes one that is then dropped.
        secret: None takes one from the operating system.
        source: as for ``Entry``.
    """
    # On a stream of its own, whose name goes into the randomness: no other release has it.
    processes.require_single_process("a release of a whole computation")
    ledger = Ledger() if ledger is None else ledger
    secret = Secret.of_all_processes(secret)
    stream, place = ledger.new_stream()
    note = SEEDED if secret.reproducible else ""
    ledger.charge(event, stream=stream, source=source, note=note)
    named = f"{f'{event!r}|{configuration}'!r}|{place if secret.reproducible else stream}"
    return secret.child(hashlib.blake2b(named.encode(), digest_size=16).hexdigest())
