"""One ledger of two processes: what is handed out is on disk, whatever stops either of them.

The processes are threads here, of one coordination service whose clock goes on when all wait, so
that every moment can be tried. ``tests/test_processes.py`` has real ones.
"""

import itertools
import json
import sys
import threading
import types
from collections import defaultdict

import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.devices import processes
from jaxdp.ledger import durable, entries, shared, tickets
from tests.refusing import refused

STOPPED_IN = {"Issuer.take", "Issuer._charge", "Issuer.close"}  # and all of shared.py


class Service:
    """The coordination service of JAX, for threads; who ends, or is killed, is known to be gone."""

    def __init__(self, count):
        self.count, self.told, self.changed = count, {}, threading.Condition()
        self.now, self.waiting, self.gone = 0.0, {}, set()
        self.here = threading.local()

    def state(self):
        """``processes._state`` of this thread."""
        client = self if getattr(self.here, "joined", False) else None
        index = self.here.index if client else None
        return types.SimpleNamespace(client=client, num_processes=self.count, process_id=index)

    def joined(self):
        """``processes.count`` of this thread."""
        return self.count if getattr(self.here, "joined", False) else 1

    def key_value_set(self, key, text, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.told
            self.told[key] = text
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            until = self.now + milliseconds / 1_000
            self.waiting[self.here.index] = key, until
            try:
                while key not in self.told:
                    if 0 in self.gone or len(self.gone) == self.count - 1:
                        raise RuntimeError("UNAVAILABLE: a process has ended")
                    vain = [until for key, until in self.waiting.values() if key not in self.told]
                    if len(vain) + len(self.gone) == self.count and self.now < until:
                        self.now = max(self.now, min(vain))  # all wait
                        self.changed.notify_all()
                    if self.now >= until:
                        raise RuntimeError("DEADLINE_EXCEEDED")
                    self.changed.wait(1)
                return self.told[key]
            finally:
                del self.waiting[self.here.index]

    def shutdown(self):
        self.here.joined = False

    def leave(self):
        with self.changed:
            self.gone.add(self.here.index)
            self.changed.notify_all()


class Own:
    """A counter, or counters by name, of each thread."""

    def __init__(self, service, make):
        self._all, self._service = defaultdict(make), service

    def __next__(self):
        return next(self._all[self._service.here.index])

    def __getitem__(self, name):
        return self._all[self._service.here.index][name]


@pytest.fixture
def together(monkeypatch):
    """``together(program)`` runs ``program(index)`` in so many processes.

    Returns what each returned or raised, and what ``look()`` returns at that moment, when who was
    killed has done nothing more.
    """
    monkeypatch.setattr(durable, "sync", lambda handle: None)
    monkeypatch.setattr(processes, "PATIENCE", 30.0)

    def run(program, count=2, faults=None, look=lambda: None):
        service, over = Service(count), threading.Event()
        out = [None] * count
        monkeypatch.setattr(processes, "_state", service.state)
        monkeypatch.setattr(processes, "count", service.joined)
        monkeypatch.setattr(processes, "_asked", Own(service, itertools.count))
        monkeypatch.setattr(shared, "_named", Own(service, lambda: defaultdict(itertools.count)))
        time = types.SimpleNamespace(monotonic=lambda: service.now)
        monkeypatch.setattr(processes, "time", time)

        def killed():
            service.leave()
            over.wait()
            raise SystemExit

        def process(index):
            service.here.index, service.here.joined = index, True
            try:
                if faults is not None and index in faults:
                    sys.settrace(faults[index](killed))
                out[index] = program(index)
            except BaseException as error:
                out[index] = error
            sys.settrace(None)
            service.leave()

        threads = [threading.Thread(target=process, args=(n,), daemon=True) for n in range(count)]
        for thread in threads:
            thread.start()
        with service.changed:
            assert service.changed.wait_for(lambda: len(service.gone) == count, 60), "it hangs"
        seen = look()
        over.set()
        for thread in threads:
            thread.join(10)
        return out, seen

    return run


class Steps:
    """A mechanism of six steps, of which the last two have another event."""

    def stretch(self, step):
        if step >= 6:
            raise ValueError("step must be below 6")
        return acc.Gaussian(1.0 + step // 4), {}, 4 if step < 4 else 6

    def __repr__(self):
        return "Steps()"


def issuer(ledger, **options):
    name, _ = ledger.new_stream("a")
    return tickets.Issuer(Steps(), ledger, jaxdp.Secret.from_seed(1), name, **options)


def held(path, stream="a"):
    """The steps that the file holds, by its lines."""
    steps = set()
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if row.get("stream") == stream:
            first = row["ended"] if "ended" in row else row["first_step"]
            these = range(first, first + row.get("steps", 100))
            steps = steps - set(these) if "ended" in row else steps | set(these)
    return steps


def at_line(number, what):
    """A trace that does ``what`` at so many lines of the ledger's code, and then nothing more."""

    def fault(killed):
        left = [number]
        fault.done = False

        def local(frame, event, arg):
            if event == "line":
                left[0] -= 1
                if left[0] == 0:
                    sys.settrace(None)
                    fault.done = True
                    killed() if what == "killed" else interrupted()
            return local

        def called(frame, event, arg):
            code = frame.f_code
            is_looked_at = code.co_filename == shared.__file__ or code.co_qualname in STOPPED_IN
            return local if is_looked_at else None

        return called

    return fault


def interrupted():
    raise KeyboardInterrupt


def used(path, handed):
    """Takes steps, closes and goes on; after an interrupt, or where process 0 failed, again."""

    def again(call):
        while True:
            try:
                return call()
            except (KeyboardInterrupt, durable.StorageError):
                continue

    ledger = again(lambda: jaxdp.Ledger(path))
    again(lambda: ledger.new_stream("a"))
    source = tickets.Issuer(Steps(), ledger, jaxdp.Secret.from_seed(1), "a", reserve=2)
    for count in (3, 1):
        for _ in range(count):
            handed.append(again(source.take).step)
            assert handed[-1] in held(path)
        again(source.close)
    again(ledger.close)


def test_whatever_stops_one_of_two_what_is_handed_out_is_on_disk(together, tmp_path):
    """At every other line; where one was interrupted, both most often go on with the same steps."""
    alike = defaultdict(int)
    for index, what in itertools.product(range(2), ("killed", "interrupted")):
        for number in itertools.count(1, 2):
            path, handed = tmp_path / f"{index}-{what}-{number}.jsonl", [[], []]
            fault = at_line(number, what)
            out, kept = together(
                lambda n, path=path, handed=handed: used(path, handed[n]),
                faults={index: fault},
                look=lambda path=path: held(path),
            )
            case = (index, what, number, handed, kept, out)
            assert all(set(each) <= kept and len(each) == len(set(each)) for each in handed), case
            assert all(each is None or isinstance(each, ValueError | SystemExit) for each in out), (
                case
            )
            alike[index, what] += handed == [[0, 1, 2, 3]] * 2 and out == [None, None]
            if not fault.done:
                break
        alike[index, what] /= number / 2
    assert min(alike[0, "interrupted"], alike[1, "interrupted"]) > 0.6, alike


def test_rows_that_differ_end_all_in_words_and_hand_out_nothing(together, tmp_path):
    rows = {  # what process 1 does otherwise
        "another event": lambda source, ledger: ledger.charge(acc.Gaussian(3.0), stream="b"),
        "another end": lambda source, ledger: source.take(until=1),
        "another line": lambda source, ledger: ledger.show("a", 1),
    }
    for name, otherwise in rows.items():
        path, handed = tmp_path / f"{name}.jsonl", []

        def program(index, path=path, otherwise=otherwise, handed=handed):
            ledger = jaxdp.Ledger(path)
            source = issuer(ledger, reserve=2)
            handed.append((otherwise(source, ledger) if index else source.take()).step)

        out, _ = together(program, 3)
        assert all("every process must charge the same" in str(each) for each in out), (name, out)
        assert handed == [], name


def test_who_was_interrupted_is_answered_but_not_for_another_row(together, tmp_path, monkeypatch):
    hear, armed = processes.receive, []

    def interrupted_once(key, patience=None):
        if armed and processes.index() == 1:
            armed.clear()
            raise KeyboardInterrupt
        return hear(key, patience)

    monkeypatch.setattr(processes, "receive", interrupted_once)
    for until in (1, 2):

        def program(index, until=until):
            source = issuer(jaxdp.Ledger(tmp_path / f"{until}.jsonl"), reserve=2)
            if index:
                armed.append(index)
                with pytest.raises(KeyboardInterrupt):
                    source.take(until=1)
                processes.receive("written")
            step = source.take(until=until if index else 1).step
            processes.send("written", "")
            return step

        (first, second), _ = together(program)
        assert first == 0
        assert second == 0 if until == 1 else "another row in process 0" in str(second)


def test_what_process_0_cannot_write_nobody_is_handed_and_then_there_is_room(
    together, tmp_path, monkeypatch
):
    write, full = durable.append_line, []

    def append(file, line):
        if full:
            raise OSError(28, "No space left on device")
        write(file, line)

    monkeypatch.setattr(durable, "append_line", append)

    def program(index):
        ledger = jaxdp.Ledger(tmp_path / "ledger.jsonl")
        source = issuer(ledger, reserve=2)
        full.append(index)
        processes.agree(full=1)
        refused("No space left", source.take)
        processes.agree(full=2)
        full.clear()
        processes.agree(full=3)
        return [source.take().step for _ in range(3)], ledger.head, ledger.steps

    (first, second), _ = together(program)
    assert first == second
    assert first[0] == [0, 1, 2]


def test_a_close_takes_out_what_no_process_was_handed(together, tmp_path):
    """(steps handed out in each, who closes, what the file then holds), of 4 reserved."""
    for taken, closes, kept in (
        ((1, 3), (0, 1), 3),
        ((3, 1), (0, 1), 3),
        ((1, 1, 2), (0, 1, 2), 2),
        ((4, 1), (0, 1), 4),
        ((1, 4), (0, 1), 4),
        ((1, 3), (0,), 4),
        ((1, 3), (1,), 4),
        ((1, 2, 2), (0, 1), 4),
        ((0, 0), (0, 1), 0),
    ):
        path = tmp_path / f"{taken}{closes}.jsonl"

        def program(index, path=path, taken=taken, closes=closes):
            ledger = jaxdp.Ledger(path)
            source = issuer(ledger, reserve=4)
            source.reserve(4)
            for _ in range(taken[index]):
                source.take()
            assert ledger.steps == 4  # also what another process was not handed
            if index in closes:
                source.close()
            processes.agree(all=1)
            return ledger.steps, jaxdp.Ledger(path).steps

        out, _ = together(program, len(taken))
        assert held(path) == set(range(kept)), (taken, closes, out)
        assert out == [(kept, kept)] * len(taken), (taken, closes, out)


def test_what_was_said_at_an_earlier_close_is_not_heard_at_a_later_one(together, tmp_path):
    path = tmp_path / "ledger.jsonl"

    def program(index):
        ledger = jaxdp.Ledger(path)
        source = issuer(ledger, reserve=3)
        source.take()
        for closes in (0, 1):  # not at one time: in vain
            if index == closes:
                source.close()
            processes.agree(closed=closes)
        taken = [source.take().step for _ in range(1 + index)]
        if index == 0:
            source.close()
        processes.agree(closed=2)
        return taken

    out, _ = together(program)
    assert out == [[1], [1, 2]]
    assert held(path) == {0, 1, 2, 3}


def test_a_ledger_is_written_to_by_as_many_processes_as_it_was_made_in(together, tmp_path):
    path, early = tmp_path / "ledger.jsonl", jaxdp.Ledger()

    def program(index):
        refused("made after jax.distributed.initialize", early.charge, acc.Gaussian(1.0))
        ledger = jaxdp.Ledger(path)
        source = issuer(ledger, reserve=4)
        for _ in range(1 + 2 * index):
            ticket = source.take()
        processes.agree(all=1)
        processes._state().client.shutdown()
        for release in (ticket.key, source.take):  # both would add one noise to sums of their own
            refused("closed before shutdown", release)
        refused("closed before shutdown", source.close)
        ledger.close()
        return ledger.steps

    out, _ = together(program)
    assert out == [4, 4]
    assert held(path) == {0, 1, 2, 3}


def test_all_have_the_rows_notes_and_heads_of_process_0(together, tmp_path):
    """Of a long file of before, and of what one process alone has noted, and in memory."""
    path = tmp_path / "long.jsonl"
    with path.open("w", encoding="utf-8") as file:  # of the format before there was a chain
        for step in range(1_200):
            row = entries.Entry(acc.Gaussian(1.0 + step % 2), step, 1, "old").to_dict()
            file.write(json.dumps(row) + "\n")
    in_memory = jaxdp.Ledger()
    in_memory.charge(acc.Gaussian(2.0), 4)
    text = in_memory.to_json()

    def program(index):
        found = []
        for ledger in (jaxdp.Ledger(path), jaxdp.Ledger(), jaxdp.Ledger.from_json(text)):
            ledger.trust(f"said by {index}")
            if index == 0:
                ledger.assume("by process 0")
            found.append(ledger.head)  # the last that all have
            assert ledger.holds(found[-1])
            ledger.charge(acc.Gaussian(3.0))
            ledger.trust("said by all")
            if index:
                ledger.assume("late")
            found += [ledger.steps, ledger.epsilon(1e-5), ledger.head, ledger.begun]
            ledger.close()
        return found

    def later(index):
        ledger = jaxdp.Ledger(path)
        ledger.join()
        return [ledger.holds(head) for head in (first[0], first[3], b"another")]

    (first, second), _ = together(program)
    assert first == second
    assert [first[n] for n in (1, 6, 11)] == [1_201, 1, 5]
    assert together(later)[0] == [[True, True, False]] * 2
    said = jaxdp.Ledger(path).unverified()
    for what in ("said by 0", "said by 1", "said by all", "by process 0", "late"):
        assert sum(what in each for each in said) == 1, what


def test_nothing_is_shown_before_process_0_has_written_it_down(together, tmp_path):
    path = tmp_path / "ledger.jsonl"

    def program(index):
        ledger = jaxdp.Ledger(path)
        ledger.new_stream("a")
        ledger.show("a", 3, b"past")
        assert path.read_text().count("shown") == 1
        if index == 0:
            raise RuntimeError("it ends here")
        ledger.show("a", 4, b"later")

    (_, other), _ = together(program)
    assert isinstance(other, processes.LostError)
    assert path.read_text().count("shown") == 1
