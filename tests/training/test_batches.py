"""Batches of a loop: each step once, whoever asks for it, and only what is handed out costs."""

import contextlib
import dataclasses
import gc
import itertools
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Ledger
from jaxdp import accounting as acc
from jaxdp.sampling import as_source
from jaxdp.training.batches import Batches
from tests.laws import is_binomial, is_uniform
from tests.ledger.small import at_once, reserved
from tests.mechanisms import mf_of, sgd_of
from tests.refusing import all_refused, refused

N = 60
SOURCE = as_source(jnp.zeros(N))
BROKEN = OSError("record 7 is gone")


def sampler(path=None, sampling="poisson", batch=20, **options):
    ledger = options.pop("ledger", None) or Ledger(path)
    return sgd_of(1.0, 1.0, batch, N, sampling).sampler(N, ledger=ledger, **options)


def batches(drawn_by, steps):
    return Batches(drawn_by, SOURCE, drawn_by.step + steps)


def breaking(drawn_by, *steps, error=BROKEN):
    """The draws of these steps cannot be made; returns a list of all that was asked for."""
    drawn, asked = drawn_by.drawn, []

    def failing(step):
        asked.append(step)
        if step in steps:
            raise error
        return drawn(step)

    drawn_by.drawn = failing
    return asked


def records(draw):
    return draw.indices[draw.mask].tolist()


def are_their_own(drawn_by, found):
    """Every batch has the draw of its ticket, and no ticket is in two of them."""
    assert len({id(batch.draw.ticket) for batch in found}) == len(found)
    for batch in found:
        assert batch.draw.ticket.step == batch.step
        assert records(batch.draw) == records(drawn_by.drawn(batch.step))


def end_of(path, stream):
    """The step after the last that a file holds of a stream."""
    return max((e.end for e in Ledger(path).entries if e.stream == stream), default=0)


def test_two_iterators_and_one_that_was_left_have_each_step_once_and_end_at_their_own_last():
    source = sampler(reserve=4)
    one, two = batches(source, 6), batches(source, 9)
    found = [next(each) for each in (one, two, two, one, one)]
    assert (len(one), len(two)) == (1, 4)
    found += [batch for _, batch in zip(range(2), two, strict=False)]  # left
    assert list(one) == []  # it had the steps 0 to 5
    found += two
    assert [batch.step for batch in found] == list(range(9))
    are_their_own(source, found)
    assert [next(each, "end") for each in (one, two)] == ["end", "end"]
    # One that others have left far behind draws no step between.
    asked = breaking(source)
    behind, ahead = batches(source, 400), batches(source, 400)
    assert next(behind).step == 9
    assert [batch.step for batch in itertools.islice(ahead, 300)] == list(range(10, 310))
    asked.clear()
    assert next(behind).step == 310
    assert min(asked) >= 309
    for each in (behind, ahead):
        each.close()
        assert (list(each), len(each)) == ([], 0)


@pytest.mark.parametrize("shared", [True, False], ids=["one iterator", "one each"])
def test_eight_threads_get_every_step_once_each_with_the_draw_of_its_ticket(shared):
    source, found, before = sampler(reserve=3), [], sys.getswitchinterval()
    of_all = batches(source, 200)
    own = [of_all if shared else batches(source, 200) for _ in range(8)]
    sys.setswitchinterval(1e-6)
    try:
        at_once(8, lambda: found.extend(own.pop()))
    finally:
        sys.setswitchinterval(before)
    assert sorted(batch.step for batch in found) == list(range(200))
    are_their_own(source, found)
    assert source.ledger.steps == 200
    assert next(of_all, "end") == "end"


PACKAGE = Path(jaxdp.__file__).parent
TRACED = [
    str(PACKAGE / name)
    for name in (
        "training/batches.py",
        "sampling/prefetching.py",
        "ledger/tickets.py",
        "ledger/ledger.py",
    )
]


@contextlib.contextmanager
def at_line(number, deed):
    """Does a deed at the ``number``-th line of batches and ledger in this thread; yields the lines."""
    count, before, reached = itertools.count(1), sys.gettrace(), []

    def trace(frame, event, arg):
        code = frame.f_code
        if code.co_filename not in TRACED or code.co_name == "__del__":
            return None
        if event == "line" and next(count) == number:
            reached.append(frame.f_lineno)
            deed()
        return trace

    # What other tests left is not collected in between: an interrupt of a finalizer is dropped. Nor
    # before each of some hundred lines, which would go through all that they left each time.
    gc.disable()
    sys.settrace(trace)
    try:
        yield reached
    finally:
        sys.settrace(before)
        gc.enable()


def interrupt():
    raise KeyboardInterrupt


def test_an_interrupt_at_any_line_loses_at_most_a_step_which_counts(tmp_path):
    number, reached = 0, [0]
    while reached:
        number, path = number + 1, tmp_path / f"{number}.jsonl"
        source, found, told = sampler(path, reserve=2), [], []
        breaking(source, 0)
        each = batches(source, 2)
        with at_line(number, interrupt) as reached:
            while True:
                expected = source.step
                try:
                    batch = next(each)
                except StopIteration:
                    break
                except (OSError, KeyboardInterrupt) as error:
                    told.append(type(error).__name__)
                else:
                    assert batch.draw.step == expected
                    found.append(batch)
        are_their_own(source, found)
        assert 0 not in [batch.step for batch in found]
        assert told.count("OSError") <= 1
        assert len(found) + len(told) >= 2  # none is lost without a word
        assert len(set(told)) == len(told)
        assert end_of(path, source.issuer.stream) == source.step == 2
        assert Ledger(path).reserved == source.ledger.reserved
        each.close()
        source.ledger.close()
    assert number > 100


@pytest.mark.parametrize("deed", ["next", "close"])
def test_a_handler_inside_is_refused_and_nothing_is_lost(deed):
    """What a signal handler, or a finalizer, does at any line of ``next``."""
    number, reached, refusals = 0, [0], 0
    while reached:
        number, said = number + 3, []
        source = sampler(reserve=2)
        each = batches(source, 3)

        def handled(each=each, said=said):
            try:
                said.append(next(each, None) if deed == "next" else each.close())
            except ValueError as error:
                said.append(str(error))

        with at_line(number, handled) as reached:
            found = list(each)
        found += [made for made in said if isinstance(made, jaxdp.training.batches.ChargedBatch)]
        are_their_own(source, found)
        steps = sorted(batch.step for batch in found)
        # Between two steps it may be closed.
        assert steps == list(range(len(steps) if said == [None] else 3)), number
        words = [made for made in said if isinstance(made, str)]
        assert all("by a signal handler or a finalizer that interrupts" in w for w in words)
        assert len(said) == len(reached)
        refusals += len(words)
    assert refusals > 10


ERRORS = {
    "its own": (BROKEN, OSError, "record 7 is gone"),
    "memory": (MemoryError("short"), MemoryError, "short"),
    "an end of the program": (SystemExit("enough"), SystemExit, "enough"),
    "an end of the loop": (StopIteration(), RuntimeError, "StopIteration"),
}


@pytest.mark.parametrize("row", ERRORS)
def test_a_batch_that_cannot_be_made_is_told_at_its_turn_alone_once_and_counts(row, tmp_path):
    error, kind, words = ERRORS[row]
    path = tmp_path / "ledger.jsonl"
    source = sampler(path)
    breaking(source, 2, error=error)
    one, two = batches(source, 5), batches(source, 5)
    assert [next(each).step for each in (one, two)] == [0, 1]
    refused(words, next, one, error=kind)
    assert end_of(path, source.issuer.stream) == 3 == source.step
    assert [batch.step for batch in (*two, *one)] == [3, 4]
    assert source.ledger.steps == 5
    counted = [line[:13] for line in source.ledger.unverified()]
    assert counted == ["4 of 5 steps:"]  # nobody took them; of the other nothing was drawn


def test_a_batch_that_cannot_be_made_and_whose_turn_never_comes_is_told_by_nobody(tmp_path):
    path = tmp_path / "ledger.jsonl"
    source = sampler(path, reserve=8)
    breaking(source, 2)
    left, forgotten = batches(source, 5), batches(source, 5)
    for each in (left, forgotten):
        next(each)
        each._made._lane.thread.join()  # all five are made
    left.close()
    del forgotten, each
    gc.collect()
    source.close()
    source.ledger.close()
    assert source.ledger.steps == Ledger(path).steps == 2
    assert source.step == 2


def test_a_failure_whose_ticket_cannot_be_taken_is_kept_and_so_is_a_batch(monkeypatch):
    source = sampler()
    asked = breaking(source, 0)
    each = batches(source, 2)
    each._made._lane.thread.join()
    del source.drawn  # it could be drawn now
    for error, words, result in ((OSError, "record 7 is gone", 1), (OSError, "no room", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(source.ledger, "_reserve", lambda entry: exec("raise OSError('no room')"))
            refused("no room", next, each, error=OSError)
            refused("no room", next, each, error=OSError)
        assert source.step == source.ledger.steps == result - 1
        if result == 1:
            refused(words, next, each, error=error)
        else:
            assert next(each).step == 1
        assert source.step == source.ledger.steps == result
    assert asked == [0, 1]


def test_what_reads_all_records_fails_before_anything_is_drawn_or_charged():
    class Unreadable:
        on_device, example = False, jnp.zeros(())
        drawn = 0

        def __len__(self):
            return N

        @property
        def identities(self):
            raise OSError("no identities")

        def gather(self, indices, mask):
            self.drawn += 1

    mechanism = mf_of(1.0, 1.0, 20, N, "cyclic_poisson", steps=4, bands=2, strategy="banded")
    source = Unreadable()
    drawn_by = mechanism.sampler(N)
    drawn_by._identities = lambda: source.identities
    for deed in (lambda: Batches(drawn_by, source, 4), drawn_by.draw):
        refused("no identities", deed, error=OSError)
    assert (drawn_by.step, drawn_by.ledger.steps, source.drawn) == (0, 0, 0)


def test_a_step_that_was_drawn_ahead_is_drawn_again_with_the_same_records_here_alone():
    secret, ledger = jaxdp.Secret.new(), Ledger()
    source = sampler(secret=secret)
    first = batches(source, 6)
    ahead = [records(source.drawn(step)) for step in range(6)]  # as its thread did
    found = [next(first), next(first)]
    first.close()
    found += batches(source, 4)
    assert [records(batch.draw) for batch in found] == ahead
    # Another process, or another sampler, draws others for the same steps.
    for other in (sampler(secret=secret), sampler(ledger=ledger, secret=secret)):
        assert not any(records(b.draw) in ahead for b in batches(other, 6))


def test_loops_that_are_left_at_random_do_not_change_the_law_of_draws():
    source, rng = sampler(batch=12), np.random.default_rng(0)
    counts, sizes, steps = np.zeros(N), [], 0
    while steps < 4_000:
        loop = batches(source, 60)
        for batch in itertools.islice(loop, int(rng.integers(0, 50))):
            counts[records(batch.draw)] += 1
            sizes.append(int(batch.draw.mask.sum()))
        steps = source.step
    assert len(sizes) == steps
    assert is_binomial(sum(sizes), steps * N, 12 / N)
    assert is_uniform(counts)
    assert 0.85 < np.var(sizes) / (N * 0.2 * 0.8) < 1.15


def loss_fn(params, x):
    return jnp.vdot(params, x)


DATA = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)


def trainer(mechanism, ledger, **options):
    return jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), DATA, ledger=ledger, **options)


def planned(sampling="poisson", steps=24):
    found = sgd_of(3.0, 1.0, 15, N, sampling)
    return dataclasses.replace(found, steps=steps, delta=1e-5)


def correlated(steps=24):
    return mf_of(3.0, 1.0, 15, N, "fixed_order", steps=steps, strategy="identity")


# The mechanism, how many of reservations of six were taken, how it ended, where another begins,
# and how many steps are then left.
AFTER = {
    "closed": (planned(), 2, "closed", 2, 22),
    "killed": (planned(), 2, "killed", 6, 18),
    "live": (planned(), 2, "live", 6, 18),
    "closed in an epoch": (planned("allocation"), 2, "closed", 4, 20),
    "killed in an epoch": (planned("allocation"), 2, "killed", 8, 16),
    "live in an epoch": (planned("allocation"), 2, "live", 8, 16),
    "killed in a third epoch": (planned("allocation"), 9, "killed", 12, 12),
    "correlated, closed": (correlated(), 2, "closed", 0, 24),
    "correlated, killed": (correlated(), 2, "killed", 0, 24),
    "correlated, live": (correlated(), 2, "live", 0, 24),
}


@pytest.mark.parametrize(
    ("mechanism", "taken", "ended", "begins", "left"), AFTER.values(), ids=AFTER
)
def test_another_trainer_begins_after_what_is_reserved_at_the_next_block(
    tmp_path, mechanism, taken, ended, begins, left
):
    path = tmp_path / "ledger.jsonl"
    first = trainer(mechanism, path, reserve=6)
    state = first.init(jnp.zeros(3))
    own = list(itertools.islice(first.batches(24), taken))
    if ended == "closed":
        first.close()
    if ended == "killed":
        path = shutil.copy(path, tmp_path / "copy.jsonl")
    ledger = first.ledger if ended == "live" else Ledger(path)
    second = trainer(mechanism, ledger, reserve=6)
    if mechanism.strategy is not None:  # whose noise goes on from what no ledger holds
        refused("another must be True .* begins anew", second.batches, state=state)
        second, state = trainer(mechanism, second.ledger, reserve=6, another=True), None
    assert len(second.batches(state=state)) == left
    words = rf"steps must be at most {left}, what is left of the 24 .* got {left + 1}"
    refused(words, second.batches, left + 1)
    batch = next(second.batches(6))
    assert batch.step == begins
    theirs = {batch.draw.ticket.tag.tobytes() for batch in own}
    assert batch.draw.ticket.tag.tobytes() not in theirs
    # All others count what both have reserved, and so at least what both have handed out.
    assert reserved(ledger).steps == (taken if ended == "closed" else -(-taken // 6) * 6) + 6
    event, asked = acc.Composed((mechanism.total(taken), mechanism.total(1))), mechanism.neighbours
    bounds = [
        acc.epsilon(event, 1e-5, relation=asked).upper,
        second.epsilon(1e-5, asked).upper,
        Ledger(path).epsilon(1e-5, asked).upper,
    ]
    assert bounds == sorted(bounds)
    second.close()


def test_trainers_that_live_together_are_each_charged_and_take_no_more_than_was_planned():
    mechanism, ledger = planned(steps=6), Ledger()
    one = trainer(mechanism, ledger, reserve=1)
    state, taken = one.init(jnp.zeros(3)), list(one.batches(2))
    two = trainer(mechanism, ledger, reserve=2)
    taken += itertools.islice(two.batches(4, state=state), 3)
    # One step is left, but two has reserved it.
    refused("steps must be at most 0, what is left of the 6 .* got 1", one.batches, 1)
    assert len(two.batches()) == 1
    two._sampler.close()
    taken += one.batches()
    for each in (one, two):
        refused("what is left of the 6 that the noise was calibrated for", each.batches, 1)
        with pytest.warns(UserWarning, match="the ledger holds all 6"):
            assert len(each.batches()) == 0
    assert len({batch.draw.ticket.tag.tobytes() for batch in taken}) == ledger.steps == 6
    taken += one.batches(1, beyond=True)
    assert ledger.steps == len(taken) == 7
    assert ledger.epsilon(1e-5).upper == mechanism.epsilon(7, 1e-5).upper


def test_what_is_handed_out_is_in_epsilon_and_what_is_reserved_in_the_file(tmp_path):
    path = tmp_path / "ledger.jsonl"
    train = trainer(sgd_of(1.0, 1.0, 20, N), path, reserve=5)
    state = train.init(jnp.zeros(3))
    for n, batch in zip(range(1, 8), train.batches(50), strict=False):
        state, _ = train.step(state, batch)
        assert train.epsilon(1e-5).upper == train.mechanism.epsilon(n, 1e-5).upper
        assert train.unverified() == []
        assert Ledger(path).steps == -(-n // 5) * 5
    # Left, forgotten, and collected: nobody but `close` writes that it ended.
    del batch
    gc.collect()
    assert train.ledger.steps == 7
    assert Ledger(path).steps == 10
    train.close()
    train.close()
    assert train.ledger.steps == Ledger(path).steps == 7
    assert train.unverified() == Ledger(path).unverified() == []
    refused("ledger must be open", next, train.batches(1))
    # Closed by hand first: what is reserved stays.
    train = trainer(sgd_of(1.0, 1.0, 20, N), None, reserve=5)
    next(train.batches(5))
    train.ledger.close()
    train.close()
    refused("ledger must be open", next, train.batches(1))


def test_a_step_that_was_moved_out_of_the_loop_takes_one_batch_and_the_rest_are_told():
    train = trainer(sgd_of(1.0, 1.0, 20, N), None)
    state = train.init(jnp.zeros(3))
    assert list(train.batches(0)) == []
    assert train.ledger.steps == 0
    kept = None
    for batch in train.batches(3):
        kept = kept or batch
    state, _ = train.step(state, batch)
    words = "batch must be one that .* just handed out, .* that a step used before"
    refused(words, train.step, state, batch)
    assert train.ledger.steps == 3
    assert [line[:13] for line in train.unverified()] == ["2 of 3 steps:"]
    state, _ = train.step(state, kept)  # kept for later: its own step, once
    other = dataclasses.replace(next(train.batches(1)), draw=kept.draw)
    ahead = jaxdp.training.batches.ChargedBatch(train._sampler.draw())
    changed = dataclasses.replace(next(train.batches(1)), rows=[DATA])
    widened = next(train.batches(1))  # the batch is the same, and its draw is not
    object.__setattr__(widened.draw, "mask", np.ones_like(widened.draw.mask))
    theirs = next(trainer(train.mechanism, train.ledger, another=True).batches(1))
    forked = next(train.batches(1))
    forked.draw.ticket._process = (0, 0)
    all_refused(
        (words, lambda batch=batch: train.step(state, batch))
        for words, batch in (
            ("a step used before", kept),
            ("as trainer.batches.. handed it out, got one with other records or rows", other),
            ("as trainer.batches.. handed it out, got one with other records or rows", ahead),
            ("as trainer.batches.. handed it out, got one with other records or rows", changed),
            ("as trainer.batches.. handed it out, got one with other records or rows", widened),
            ("batch must be of this trainer, got one of another trainer", theirs),
            ("of the process that was forked", forked),
            ("batch must be one that trainer.batches.. hands out", DATA),
        )
    )
    assert not changed.draw.ticket.spent
