"""A release is spent once, whatever state, sum, record or loss is kept, copied or changed.

Above some tests: what an attack did before it was mended, or "held" where it never worked.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from tests.laws import are_uncorrelated, is_gaussian
from tests.ledger.small import N, P, X, at_once, loss_fn, mechanism, trained, trainer, whole

SIZE = 4_000
MECH = mechanism()
DATA = jnp.zeros(N)
STD = MECH.l2(None) / 20
CLIPPED = MECH.clipped_grad(loss_fn)


def flat(params, x):
    """Without a gradient: an update is its noise."""
    return 0.0 * jnp.sum(params["w"]) * x


GRAD_FN = MECH.clipped_grad(flat)
TX = optax.chain(MECH.privatize(), optax.scale(-1.0))
TRACE = optax.chain(MECH.privatize(), optax.trace(0.9))
UPDATE = jaxdp.compile_update(TX)


def start():
    params = {"w": jnp.zeros(SIZE)}
    return params, TX.init(params)


def summed_of(sampler, params=None):
    return GRAD_FN.sum(params or start()[0], DATA, sampler.draw())[0]


def step(sampler, params, opt_state):
    return UPDATE(params, opt_state, summed_of(sampler, params))[:2]


def moved(before, after):
    return np.asarray(after["w"] - before["w"])


def are_fresh(noises):
    assert all(is_gaussian(noise, STD) for noise in noises)
    assert all(are_uncorrelated(a, b) for a, b in itertools.combinations(noises, 2))


@pytest.mark.parametrize("seed", [None, 3], ids=["new", "seed"])
def test_a_program_that_resumes_repeats_no_noise(tmp_path, seed):
    """A checkpoint after 5 of 8 steps: steps 5, 6 and 7 are done twice."""
    path = tmp_path / "ledger.jsonl"
    secret = jaxdp.Secret.new() if seed is None else jaxdp.Secret.from_seed(seed)

    def run(count, params, opt_state, first_step):
        ledger = jaxdp.Ledger(path)
        sampler = MECH.sampler(N, ledger=ledger, secret=secret, first_step=first_step)
        seen, saved = [], None
        for n in range(count):
            before = params
            params, opt_state = step(sampler, params, opt_state)
            seen.append(moved(before, params))
            if n == 4:
                saved = jax.tree.map(np.asarray, (params, opt_state))
        ledger.close()
        return seen, saved, ledger

    first, saved, _ = run(8, *start(), 0)
    again, _, ledger = run(3, *jax.tree.map(jnp.asarray, saved), 5)
    are_fresh(first + again)
    assert ledger.steps == jaxdp.Ledger(path).steps == 11
    assert ledger.epsilon(1e-5).upper == MECH.epsilon(11, 1e-5).upper


def test_a_state_that_is_not_carried_on_or_is_in_two_updates_repeats_no_noise():
    params, opt_state = start()
    samplers = [MECH.sampler(N), MECH.sampler(N)]
    are_fresh([moved(params, step(s, *start())[0]) for s in samplers[:1] * 4])
    are_fresh([moved(params, step(s, params, opt_state)[0]) for s in samplers * 2])


def test_a_draw_from_outside_the_loop_is_refused():
    params, opt_state = start()
    draw = MECH.sampler(N).draw()
    summed, _ = GRAD_FN.sum(params, DATA, draw)
    UPDATE(params, opt_state, summed)
    again, _ = GRAD_FN.sum(params, DATA, draw)
    for way in (
        lambda: UPDATE(params, opt_state, summed),
        lambda: UPDATE(params, opt_state, again),
        lambda: TX.update(again, opt_state, params),
        draw.key,
    ):
        with pytest.raises(ValueError, match="two releases with one noise subtract to none"):
            way()


# Held: a draw that was given back to the ledger cannot be released.
def test_a_draw_that_was_given_back_is_released_by_nobody():
    params, opt_state = start()
    sampler = MECH.sampler(N)
    draw = sampler.draw()
    sampler.close(1)
    assert sampler.ledger.steps == 0
    for release in (
        draw.key,
        lambda: UPDATE(params, opt_state, GRAD_FN.sum(params, DATA, draw)[0]),
        lambda: TX.update(GRAD_FN.sum(params, DATA, draw)[0], opt_state, params),
    ):
        with pytest.raises(ValueError, match="was given back"):
            release()


def test_the_parts_of_a_draw_are_released_together_or_not():
    params, opt_state = start()
    draw = MECH.sampler(N, physical_batch_size=4).draw()
    parts = [GRAD_FN(params, batch)[0] for batch in draw.batches(DATA)]
    UPDATE(params, opt_state, parts[0])
    with pytest.raises(ValueError, match="must be spent once"):
        UPDATE(params, opt_state, parts[-1])


# Held: one of them steps, the others are refused.
def test_threads_with_one_batch_release_it_once():
    train = trainer()
    (batch,) = train.batches(1)
    states = [train.init(P) for _ in range(4)]
    stepped = at_once(4, lambda: train.step(states.pop(), batch))
    assert (len(stepped), stepped.count(None)) == (4, 3)
    train.close()


def test_a_sum_inside_jit_brings_no_ticket_of_its_own():
    params, opt_state = start()
    draw = MECH.sampler(N, physical_batch_size=N).draw()
    (batch,) = draw.batches(DATA)

    def inside(batch):
        summed, _ = GRAD_FN(params, batch)
        return TX.update(summed, opt_state, params)[0]

    with pytest.raises(ValueError, match="key must be given to an update that you compile"):
        jax.jit(inside)(batch)
    with pytest.raises(ValueError, match="draw must not be used inside jit"):
        jax.jit(lambda: inside(batch))()
    assert not draw.ticket.spent


def test_a_key_with_a_sum_that_has_its_ticket_is_refused():
    sampler = MECH.sampler(N)
    summed = summed_of(sampler)
    with pytest.raises(ValueError, match="key must not be given with a Summed that brings"):
        UPDATE(*start(), summed, key=sampler.draw().key())


def test_the_noise_is_that_of_the_mechanism_that_was_charged():
    """A sampler of noise 10 and an update that adds 0.1: epsilon would be of the other."""
    params, _ = start()
    loud, quiet = jaxdp.dp_sgd(10.0, 1.0, 20, N), jaxdp.privatize(0.1, 20)
    sampler = loud.sampler(N)
    summed = summed_of(sampler)
    for update in (
        lambda: quiet.update(summed, quiet.init(params), params),
        lambda: jaxdp.compile_update(quiet)(params, quiet.init(params), summed),  # before: NaN
    ):
        with pytest.raises(ValueError, match=r"the one that the step was charged for, 10.0"):
            update()
        assert not summed.ticket.spent  # before: spent by the refused update
    right = jaxdp.compile_update(loud.privatize())
    assert np.isfinite(right(params, loud.privatize().init(params), summed)[0]["w"]).all()
    wrong = jax.jit(
        lambda key: quiet.update(jaxdp.Summed(params, 1.0), quiet.init(params), params, key=key)[0]
    )(sampler.draw().key())
    assert np.isnan(wrong["w"]).all()  # in a function of one's own nobody can raise


def test_a_wrong_state_leaves_the_ticket_unspent():
    """Before: the ticket was spent, and the remedy met "must be spent once"."""
    params, right = start()
    summed, tx = summed_of(MECH.sampler(N)), TRACE
    update = jaxdp.compile_update(tx)
    for wrong in (right, tx.init({"w": jnp.zeros(3)}), tx.init({**params, "b": jnp.zeros(3)})):
        with pytest.raises(ValueError, match="opt_state must be made for the trained parameters"):
            update(params, wrong, summed)
        assert not summed.ticket.spent
    update(params, tx.init(params), summed)
    assert summed.ticket.spent


def test_an_update_that_reuses_memory_says_what_it_took_and_spends_nothing():
    update, sampler = jaxdp.compile_update(TRACE, donate=True), MECH.sampler(N)
    params, _ = start()
    opt_state = TRACE.init(params)
    kept = jax.tree.map(jnp.copy, (params, opt_state))
    moved, _, _ = update(params, opt_state, summed_of(sampler, params))
    assert params["w"].is_deleted()
    draw = sampler.draw()
    with pytest.raises(ValueError, match=r"params must be those that the last update returned"):
        GRAD_FN.sum(params, DATA, draw)  # before: "Array has been deleted"
    summed, _ = GRAD_FN.sum(moved, DATA, draw)
    for again in ((params, kept[1]), (kept[0], opt_state)):
        with pytest.raises(ValueError, match=r"write params, opt_state, info = update\(params"):
            update(*again, summed)
    twice = (kept[1][0], kept[1][1]._replace(trace=kept[0]))
    with pytest.raises(ValueError, match=r"not share an array .* params, opt_state = jax.tree"):
        jaxdp.compile_update(TRACE, donate=True)(kept[0], twice, summed)
    assert not summed.ticket.spent
    update(*kept, summed)


def test_a_correct_program_has_nothing_to_take_on_trust(tmp_path):
    ledger = jaxdp.Ledger(tmp_path / "ledger.jsonl")
    sampler = MECH.sampler(N, ledger=ledger)
    params, opt_state = start()
    for _ in range(3):
        params, opt_state = step(sampler, params, opt_state)
    summed = [GRAD_FN(params, b)[0] for b in sampler.draw().batches(DATA)]
    UPDATE(params, opt_state, summed[0] if len(summed) == 1 else sum(summed[1:], summed[0]))
    assert ledger.unverified() == []
    ledger.close()
    assert jaxdp.Ledger(tmp_path / "ledger.jsonl").unverified() == []


def test_an_update_of_ones_own_is_told():
    sampler = MECH.sampler(N)
    params, opt_state = start()
    own = jax.jit(lambda key: TX.update(jaxdp.Summed(params, 1.0), opt_state, params, key=key)[0])
    own(sampler.draw().key())
    (said,) = sampler.ledger.unverified()
    assert said.startswith("1 of 1 steps: the noise key went to an update that the caller compiled")


def told_of(make):
    """What the ledger takes on trust after one update by the sum that ``make`` makes of a draw."""
    sampler = MECH.sampler(N, physical_batch_size=8)
    UPDATE(P, TX.init(P), make(CLIPPED, sampler.draw()))
    return sampler.ledger.unverified()


def in_parts(grad_fn, draw):
    first, *rest = (grad_fn(P, batch)[0] for batch in draw.batches(X))
    return sum(rest, first)


def test_an_honest_sum_is_verified():
    for make in (whole, in_parts):
        assert told_of(make) == [], make


def changed(one, **fields):
    return dataclasses.replace(one, **fields)


def one_record_twice(grad_fn, draw):
    one, other = next(draw.batches(X)), list(draw.batches(np.roll(X, 1, axis=0)))[1]
    return grad_fn(P, one)[0] + grad_fn(P, other)[0]


def own_rows(grad_fn, draw):
    rows = [X[i] - X[i].mean(0) for i in draw.indices]
    return grad_fn.sum_passes(P, rows, draw, gathered=True)[0]


def unmasked(grad_fn, draw):
    *_, last = draw.batches(X)
    return grad_fn(P, changed(last, mask=np.ones_like(last.mask)))[0]


def normalised(grad_fn, draw):
    first = next(draw.batches(X))
    return grad_fn(P, changed(first, data=first.data - first.data.mean(0)))[0]


def other_draw(grad_fn, draw):
    indices, mask = np.zeros_like(draw.indices), np.ones_like(draw.mask)
    return whole(grad_fn, changed(draw, indices=indices, mask=mask))


def amplified(grad_fn, draw):
    summed = whole(grad_fn, draw)
    return changed(summed, value=jax.tree.map(lambda v: 100 * v, summed.value))


def quieter(grad_fn, draw):
    return changed(whole(grad_fn, draw), l2=1e-6)


# Before: unverified() == []. A changed mask counts record 0 over and over (k * C, noise for C); rows
# that are normalised by each other couple records; a sum times 100 or with a smaller l2 has too
# little noise; in data of another order one record is in two batches (2 * C).
def test_what_was_changed_on_its_way_is_told(subtests):
    changes = (unmasked, normalised, other_draw, amplified, quieter, one_record_twice, own_rows)
    for make in changes:
        with subtests.test(make.__name__):
            (told,) = told_of(make)
            assert "does not see that the sum was clipped record by record" in told


# Before: the arrays of a draw and of its batches could be written to.
def test_draws_and_their_batches_cannot_be_written_to():
    draw = MECH.sampler(N).draw()
    batch = next(draw.batches(X))
    for array in (draw.indices, draw.mask, batch.data, batch.mask):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 1


def test_an_entry_of_a_batch_that_was_replaced_in_place_is_told():
    def make(grad_fn, draw):
        batch = next(draw.batches({"x": X}))
        batch.data["x"] = batch.data["x"] - batch.data["x"].mean(0)
        return jaxdp.clipped_grad(lambda p, e: loss_fn(p, e["x"]), grad_fn.rule)(P, batch)[0]

    assert told_of(make)


class Records:
    """A source that stays on the host and is read one by one."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


# Before: trained on the changed rows, unverified() == [].
@pytest.mark.parametrize("rows", [8, None])
def test_a_trainer_takes_its_own_rows_alone(rows):
    train = trainer(source=Records(X), physical_batch_size=rows)

    def change(batch):
        return dataclasses.replace(batch, rows=[r - r.mean(0) for r in batch.rows])

    with pytest.raises(ValueError, match=r"as trainer\.batches"):
        trained(train, change=change)
    assert trained(train)
    assert not any("compiled" in told for told in train.unverified())
    train.close()


# Before: silent, with batches 42 times the size that was asked for, or a fourteenth of it.
@pytest.mark.parametrize("records", [6_000, 100])
def test_a_data_set_of_quite_another_size_is_refused(records):
    mech, data = jaxdp.dp_sgd(1.0, 1.0, 20, 1_437), np.zeros((records, 4), np.float32)
    for make in (
        lambda: jaxdp.Trainer(loss_fn, mech, optax.sgd(1.0), data),
        lambda: mech.sampler(records),
    ):
        with pytest.raises(ValueError, match="to a factor of 2, got 1437") as error:
            make()
        assert str(records) not in str(error.value)  # it is private
    mech.sampler(2_874)
    mech.sampler(719)


# Before: what was captured was named in several passes alone, not where a draw fits one; the data
# set was taken with a source on the host, and the ledger told the private number of records.
@pytest.mark.parametrize("rows", [8, None])
@pytest.mark.parametrize("source", [X, Records(X)])
def test_what_a_loss_captured_is_named_and_the_data_set_refused(rows, source):
    public, data = jnp.asarray([0.1, 0.2, 0.3, 0.4]), jnp.asarray(X)
    train = trainer(lambda p, x: loss_fn(p, x - public), source, physical_batch_size=rows)
    trained(train)
    assert train.unverified() == [
        "assumed to be public, computed from no record: a captured array float32 [4]"
    ]
    train.close()
    train = trainer(lambda p, x: loss_fn(p, x - data.mean(0)), source, physical_batch_size=rows)
    with pytest.raises(ValueError, match=r"may hold the records|of the records"):
        trained(train)
    assert str(N) not in "".join(train.unverified())
    train.close()


# Before: one pass took more records than the rounding in l2 is bounded for.
def test_a_draw_beyond_most_records_is_refused_in_one_pass_too(monkeypatch):
    monkeypatch.setattr("jaxdp.clipping.rounding.most_records", lambda batch_size: 1)
    train = trainer(physical_batch_size=64)
    with pytest.raises(ValueError, match="most_records"):
        trained(train)
    train.close()


# Held: an average of two states, or a state from elsewhere, has no past.
def test_states_that_were_averaged_have_no_past():
    train = trainer()
    one = trained(train)
    two = jax.tree.map(lambda leaf: (leaf * 3) // 2, one)
    with pytest.raises(ValueError, match="past the ledger holds"):
        train.step(two, next(train.batches(1)))
    train.close()
