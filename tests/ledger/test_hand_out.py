"""Whatever comes between, each ticket that was made has its step in the ledger, and no other has it."""

import contextlib
import errno
import gc
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.ledger import tickets
from jaxdp.ledger.durable import StorageError
from jaxdp.ledger.tickets import Issuer, Ticket, issuer_of
from tests.ledger.small import STEP, at_once
from tests.ledger.test_faults import Disk, failing
from tests.refusing import refused

REFUSED = "must not be used by a signal handler or a finalizer"
ROOM = str(Path(tickets.__file__).parent)
EPOCH = acc.CorrelatedNoise(acc.Gaussian(2.0), steps=4)  # four steps that are one event


class Mechanism:
    """Its steps have one event, or those of a block together; and the tickets that were made."""

    def __init__(self, event):
        self.event, self.made = event, []

    def stretch(self, step):
        return self.event, {"gradient": 1.0}, 1_000_000

    def __repr__(self):
        return f"Mechanism({self.event})"


class World:
    """A ledger, an issuer, and what is known of the two from outside.

    Attributes:
        made: the steps of all tickets that were ever made.
        most: no step from this one on may count.
        hand: charges by hand.
    """

    def __init__(self, path=None, event=STEP, reserve=3):
        self.path, self.ahead, self.most, self.hand = path, reserve, 0, 0
        self.ledger, mechanism = jaxdp.Ledger(path), Mechanism(event)
        self.issuer = issuer_of(mechanism, self.ledger, reserve=reserve)
        self.made = mechanism.made

    def take(self):
        self.most = max(self.most, self.issuer.next + self.ahead)
        return self.issuer.take()

    def reserve(self):
        self.most = max(self.most, self.issuer.next + 5)
        self.issuer.reserve(self.issuer.next + 5)

    def close(self):
        self.issuer.close()

    def charge(self):
        self.ledger.charge(STEP)
        self.hand += 1

    def note(self):
        self.ledger.assume(f"that {len(self.ledger.unverified())} notes are enough")

    def show(self):
        self.ledger.show("another", self.issuer.next)

    def begin(self):
        self.ledger.new_stream()

    def read(self):
        known = len(self.made) + self.hand  # a handler may come while it reads
        assert self.ledger.steps >= known
        assert jaxdp.Ledger.from_json(self.ledger.to_json()).steps >= known

    def check(self):
        """All that was made counts, whoever asks: the ledger that lives, and the file."""
        assert len(set(self.made)) == len(self.made)
        rows = [(e.stream, e.first_step, e.end) for e in self.ledger.entries]
        self.check_held(*self._held(rows), self.made, self.hand)
        if self.path is not None:
            self.check_file(self.path.read_bytes(), self.made, self.hand)

    def check_file(self, content, made, hand=0):
        """The file holds the steps of these tickets, by whole lines that nothing took out."""
        rows = []
        for line in content.splitlines(keepends=True):
            row = json.loads(line) if line.endswith(b"\n") else {}
            if "event" in row:
                rows.append((row["stream"], row["first_step"], row["first_step"] + row["steps"]))
                assert acc.events.from_dict(row["event"]) in (STEP, self.issuer.mechanism.event)
            elif "ended" in row:
                rows = [(s, f, min(e, row["ended"]) if s else e) for s, f, e in rows]
        self.check_held(*self._held(rows), made, hand)

    def _held(self, rows):
        steps = {step for stream, first, end in rows if stream for step in range(first, end)}
        return steps, sum(end - first for stream, first, end in rows if stream is None)

    def check_held(self, steps, by_hand, made, hand):
        assert steps >= set(made)
        assert steps <= set(range(self.most))
        assert by_hand >= hand

    def goes_on(self):
        """The next ticket is of the next step, nothing but what was handed out counts at the end."""
        self.check()
        step = self.issuer.next
        assert self.take().step == step
        self.check()
        self.close()
        assert sum(e.steps for e in self.ledger.entries if e.stream) == step + 1
        self.ledger.close()
        if self.path is not None:
            other = jaxdp.Ledger(self.path)
            assert other.to_json() == self.ledger.to_json()
            other.charge(STEP)
            other.close()


PROGRAM = "read take take take take close charge take reserve read take close take".split()


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Tickets are written down where they are made, whoever loses them; a disk without waiting."""

    def made(issuer, step, *more, **options):
        issuer.mechanism.made.append(step)
        return Ticket(issuer, step, *more, **options)

    monkeypatch.setattr(tickets, "Ticket", made)
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def traced(world, deeds, at_line, last=None):
    """Does the deeds, each until Ctrl-C; calls ``at_line(n, *place)`` before the room's n-th line.

    Behind line ``last`` it is called no more, and what is left of the deeds is not traced.
    """
    number = itertools.count()

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        if event == "line":
            n = next(number)
            if n == last:
                sys.settrace(None)
                sys.setprofile(None)
            at_line(n, deed, frame.f_code, frame.f_lineno)
        return trace

    def again(frame, event, arg):
        """Python forgets a trace that raises."""
        if sys.gettrace() is None:
            while frame is not None:
                frame.f_trace, frame = trace, frame.f_back
            sys.settrace(trace)

    def done():  # a generator: what a trace has raised would stay behind as being handled
        nonlocal deed
        for deed in deeds:
            with contextlib.suppress(KeyboardInterrupt):
                getattr(world, deed)()
            yield

    deed, before = "", (sys.gettrace(), sys.getprofile())
    sys.settrace(trace)
    sys.setprofile(again)
    try:
        list(done())
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])


def lines(world, deeds, every=False):
    """The numbers of the lines at which a deed is, for the first and the last time, or all."""
    seen = {}
    traced(world, deeds, lambda number, *place: seen.setdefault(place, []).append(number))
    return sorted({n for at in seen.values() for n in (at if every else (at[0], at[-1]))})


# Two worlds, of unlike kinds in all respects.
WORLDS = {"in a file": (STEP, "l.jsonl"), "in memory, epochs": (EPOCH, None)}


@pytest.fixture(params=WORLDS)
def new_world(request, tmp_path):
    event, name = WORLDS[request.param]
    number = itertools.count()
    return lambda: World(name and tmp_path / f"{next(number)}-{name}", event)


def interrupt():
    raise KeyboardInterrupt


def handler(world):
    """A signal handler, or a finalizer: what it may not do is refused in words, and all is counted."""
    for deed in "take close charge note show begin reserve read check".split():
        try:
            getattr(world, deed)()
        except ValueError as error:
            assert REFUSED in str(error)  # noqa: PT017


@pytest.mark.parametrize("come", ["Ctrl-C", "a handler"])
def test_what_comes_at_any_line_loses_no_charge_and_hands_out_no_step_twice(new_world, come):
    for at in lines(new_world(), PROGRAM):
        world = new_world()
        deed = interrupt if come == "Ctrl-C" else lambda world=world: handler(world)
        traced(world, PROGRAM, lambda n, *_, at=at, deed=deed: n == at and deed(), last=at)
        world.goes_on()


def test_two_interrupts_of_a_close_leave_no_ticket_without_a_line(new_world):
    program, seen = "take close take".split(), []
    traced(new_world(), program, lambda n, deed, *_: deed == "close" and seen.append(n))
    for first, more in itertools.product(seen, (1, 2, 3, 4, 8, 16, 32, 64)):
        if more < 5 or first % 5 == 0:  # all pairs were tried once
            world, at = new_world(), (first, first + more)
            traced(world, program, lambda n, *_, at=at: n in at and interrupt(), last=at[1])
            world.goes_on()


def test_a_kill_at_any_line_leaves_a_file_that_holds_all_tickets_and_opens(tmp_path, monkeypatch):
    write, left = os.write, {}
    monkeypatch.setattr(os, "write", lambda handle, text: write(handle, text[:50]))
    world = World(path := tmp_path / "l.jsonl")

    def killed(*line):
        left[path.read_bytes()] = tuple(world.made), world.hand  # those of a later line

    traced(world, PROGRAM, killed)
    assert len(left) > 30
    for content, known in left.items():
        world.check_file(content, *known)
        (copy := tmp_path / "copy.jsonl").write_bytes(content)
        ledger = jaxdp.Ledger(copy)
        assert ledger.steps <= world.most + world.hand
        ledger.charge(STEP)
        ledger.close()


class LosingDisk(Disk):
    """A page whose fsync failed never reaches it, though the system remembers what was written."""

    def __init__(self, patch, path, *fails):
        super().__init__(patch, path, *fails)
        self.durable, self.lost = path.read_bytes(), []

    def call(self, real, *given):
        try:
            return super().call(real, *given)
        except BaseException:
            if real == self.sync:
                self.lost.append((len(self.durable), self.path.stat().st_size))
            raise
        finally:
            size = self.path.stat().st_size
            self.lost = [(start, min(end, size)) for start, end in self.lost if start < size]

    def check_after_a_power_failure(self, made):
        """What is left is refused in words, or holds all tickets."""
        left = bytearray(self.durable)
        for start, end in self.lost:
            left[start:end] = bytes(len(left[start:end]))
        (copy := self.path.with_name("copy.jsonl")).write_bytes(left)
        with contextlib.suppress(ValueError):
            entries = jaxdp.Ledger(copy).entries
            assert {s for e in entries for s in range(e.first_step, e.end)} >= set(made)


ERRORS = {"full": failing(errno.ENOSPC), "io": failing(errno.EIO), "Ctrl-C": KeyboardInterrupt()}


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("fault", ERRORS)
def test_whatever_call_of_the_disk_fails_every_ticket_is_on_it(tmp_path, monkeypatch, fault, lasts):
    at, calls = 0, 1
    while at < calls:
        at += 1
        world = World(tmp_path / f"{at}.jsonl", reserve=2)
        with monkeypatch.context() as patch:
            disk = LosingDisk(patch, world.path, at, ERRORS[fault], lasts)
            for deed in "take take take close take close take".split():
                for _ in range(2):
                    try:
                        getattr(world, deed)()
                        break
                    except (StorageError, KeyboardInterrupt):
                        assert jaxdp.Ledger(world.path).to_json() == world.ledger.to_json()
                        disk.make_room()
                    finally:
                        world.check()
                        disk.check_after_a_power_failure(world.made)
            calls = disk.calls
            disk.make_room()
            world.goes_on()
    assert at > 15


# Before: [t, e) stood in the file as the system remembers it, so that the retry wrote nothing, and
# the ticket's line never reached the disk.
@pytest.mark.parametrize("deed", ["take", "close"])
def test_a_line_that_may_be_lost_permits_nothing(tmp_path, monkeypatch, deed):
    world = World(tmp_path / "l.jsonl")
    world.take()
    if deed == "take":
        world.take(), world.take()
    fails = failing(errno.EIO)
    with monkeypatch.context() as patch:
        for name in ("fsync", "ftruncate"):
            patch.setattr(os, name, lambda *of: (_ for _ in ()).throw(fails))
        refused("could not be removed and counts", getattr(world, deed), error=StorageError)
    before = world.path.read_bytes()
    world.take()
    line = json.loads(world.path.read_bytes()[len(before) :])
    assert (line["first_step"], line["steps"]) == (world.made[-1], 3)
    world.goes_on()


def test_a_line_that_was_torn_was_never_followed_by_what_it_permits(tmp_path):
    """So the beginning of a reservation counts nothing, and that of "ended" takes nothing out."""
    world, lengths = World(path := tmp_path / "l.jsonl"), []
    for deed in ("take", "close"):
        lengths.append(path.stat().st_size)
        getattr(world, deed)()
    whole = path.read_bytes()
    for size in range(lengths[0], len(whole) + 1):
        torn, of = whole[:size], size - lengths[1]
        at_all = size >= lengths[1] - 1  # a line counts without its newline
        steps = 0 if not at_all else 3 if size < len(whole) - 1 else 1
        for rest in (b"", bytes(20)):
            path.write_bytes(torn + rest)
            assert jaxdp.Ledger(path).steps == steps, (of, rest)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def replaced(path):
    path.rename(path.with_name("old.jsonl"))
    path.write_bytes(path.with_name("old.jsonl").read_bytes())


def longer(path):
    with path.open("a") as file:
        file.write("{}\n")


@pytest.mark.parametrize("how", [cut, replaced, longer, Path.unlink])
def test_a_file_that_is_changed_under_a_reservation_gets_no_other(tmp_path, how):
    world = World(tmp_path / "l.jsonl")
    world.take()
    how(world.path)
    world.take(), world.take()  # of steps that it held
    for deed in (world.take, world.close, world.charge):
        refused("must stay where it is", deed)
    assert world.made == [0, 1, 2]
    assert world.ledger.steps == 3


def test_a_step_that_is_not_the_next_one_is_not_handed_out_and_threads_share_them(tmp_path):
    world = World(tmp_path / "l.jsonl")
    world.take()
    before = world.path.read_bytes()
    assert [world.issuer.take(step) for step in (0, 2, 10)] == [None] * 3
    assert (world.issuer.next, world.path.read_bytes()) == (1, before)
    world.most = 100

    def asks():
        """Every second one asks for what it believes to be next."""
        found = [world.issuer.take(), *map(world.issuer.take, range(60)), world.issuer.take()]
        return [ticket.step for ticket in found if ticket is not None]

    found = sorted(itertools.chain(*at_once(8, asks)))
    assert found == world.made[1:] == list(range(1, len(found) + 1))
    assert len(found) > 60
    world.goes_on()


# Before: it wrote what it had seen half-way, or hung.
def test_a_finalizer_that_the_collector_runs_inside_is_refused(tmp_path, monkeypatch):
    class Closes:
        def __init__(self, world):
            self.itself, self.world = self, world

        def __del__(self):
            self.world.close()

    said = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: said.append(str(found.exc_value)))
    for path in (None, tmp_path / "l.jsonl"):
        world = World(path)
        append = world.ledger._rows.append

        def collects(row, world=world, append=append):
            Closes(world)
            gc.collect()
            append(row)

        monkeypatch.setattr(world.ledger._rows, "append", collects)
        world.take()
        monkeypatch.undo() if path else monkeypatch.setattr(world.ledger._rows, "append", append)
        assert len(said) == 1
        assert REFUSED in said.pop()
        assert [e.end for e in world.ledger.entries] == [1]
        world.goes_on()


# Before: of a stream that held them all already nothing said so, and what was not handed out did
# not count though releases decided when to stop.
def test_steps_that_releases_decide_about_count_also_where_the_stream_held_them(tmp_path):
    path, ledger = tmp_path / "l.jsonl", None
    for whole in (False, True, False):
        ledger and ledger.close()
        ledger = jaxdp.Ledger(path)
        options = {"first_step": ledger.steps and 1, "reserve": 4, "resumed": True}
        issuer = Issuer(Mechanism(STEP), ledger, jaxdp.Secret.new(), "s", **options)
        if whole or ledger.counts_whole("s"):
            issuer.reserve(4, whole=True)
        issuer.take()
        assert ledger.steps == (4 if ledger.counts_whole("s") else 1)
    assert ledger.counts_whole("s")
    issuer.close()
    assert ledger.steps == jaxdp.Ledger(path).steps == 4


FORKED = """
import gc, os, signal, sys, threading
import jaxdp
from tests.ledger.small import P, mechanism, trainer
number = os.getpid()
os.getpid = lambda: number  # as every namespace has a number 1
def in_a_fork(deeds):
    if not os.fork():
        signal.alarm(10)
        for deed in deeds:
            try:
                print(deed(), flush=True)
            except ValueError as error:
                print("refused" if "fork" in str(error) else error, flush=True)
        os._exit(0)
    os.wait()
for path in (None, sys.argv[1]):
    ledger = jaxdp.Ledger(path)
    sampler = mechanism().sampler(60, ledger=ledger, reserve=3)
    drawn = sampler.draw()
    inside, goes = threading.Event(), threading.Event()
    def holds():
        with ledger.guard.lock:
            inside.set()
            goes.wait()
    thread = threading.Thread(target=holds)
    thread.start()
    inside.wait()
    in_a_fork((drawn.key, sampler.draw, sampler.close, ledger.new_stream, ledger.close,
        lambda: sampler.issuer.reserve(9), lambda: ledger.charge(mechanism().event),
        lambda: ledger.assume("a"), lambda: ledger.show("a", 1),
        lambda: mechanism().sampler(60, ledger=ledger),
        lambda: ledger.steps, lambda: len(ledger.reserved), lambda: jaxdp.Ledger.from_json(ledger.to_json()).steps))
    goes.set()
    sampler.draw(), sampler.draw()
    reserve, made = ledger._reserve, []
    def forks(entry):  # as a signal handler that comes in between
        reserve(entry)
        in_a_fork((lambda: mechanism().sampler(60, ledger=ledger),))
        made.append(os.fork())
    ledger._reserve = forks
    ticket = sampler.draw().ticket
    if not made[0]:
        print("usable" if ticket.usable else "refused", flush=True)
        os._exit(0)
    os.wait()
    drawn.key(), ticket.key()  # the parent goes on
    del ledger._reserve
train = trainer(ledger=ledger, reserve=4)
batches = [train.batches(4, state=train.init(P)), train.batches(4)]
next(batches[0]), next(batches[1])
batches.pop(0)
gc.collect()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forks_are_refused_and_neither_a_collector_nor_an_exit_ends_a_reservation(tmp_path):
    path = tmp_path / "l.jsonl"
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(path)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert "the state is from init, and the ledger holds 6 steps" in done.stderr
    assert done.stdout.split() == [*["refused"] * 10, "3", "1", "3", "refused", "refused"] * 2
    assert b"ended" not in path.read_bytes()
    assert jaxdp.Ledger(path).steps == 6 + 4
