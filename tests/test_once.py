"""A release is spent once: whatever state is restored, kept, copied or dropped."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from tests.laws import are_uncorrelated, is_gaussian

SIZE, N = 4_000, 60
MECH = jaxdp.dp_sgd(1.0, 1.0, 20, N)
DATA = jnp.zeros(N)
STD = MECH.l2(None) / 20


def loss_fn(params, x):
    """Without a gradient: an update is its noise."""
    return 0.0 * jnp.sum(params["w"]) * x


GRAD_FN = MECH.clipped_grad(loss_fn)
TX = optax.chain(MECH.privatize(), optax.scale(-1.0))
UPDATE = jaxdp.compile_update(TX)


def start():
    params = {"w": jnp.zeros(SIZE)}
    return params, TX.init(params)


def step(sampler, params, opt_state):
    summed, _ = GRAD_FN.sum(params, DATA, sampler.draw())
    return UPDATE(params, opt_state, summed)[:2]


def moved(before, after):
    return np.asarray(after["w"] - before["w"])


def are_fresh(noises):
    assert all(is_gaussian(noise, STD) for noise in noises)
    assert all(are_uncorrelated(a, b) for a, b in itertools.combinations(noises, 2))


@pytest.mark.parametrize(
    "secret", [jaxdp.Secret.new(), jaxdp.Secret.from_seed(3)], ids=["new", "seed"]
)
def test_a_program_that_resumes_repeats_no_noise(tmp_path, secret):
    """A checkpoint after 5 of 8 steps: steps 5, 6 and 7 are done twice."""
    path = tmp_path / "ledger.jsonl"

    def run(count, params, opt_state, first_step):
        ledger = jaxdp.Ledger(path)
        sampler = MECH.sampler(N, ledger=ledger, secret=secret, first_step=first_step)
        seen = []
        for n in range(count):
            before = params
            params, opt_state = step(sampler, params, opt_state)
            seen.append(moved(before, params))
            if n == 4:
                saved = jax.tree.map(np.asarray, (params, opt_state))
        ledger.close()
        return seen, saved if count > 4 else None, ledger

    first, saved, _ = run(8, *start(), 0)
    again, _, ledger = run(3, *jax.tree.map(jnp.asarray, saved), 5)
    are_fresh(first + again)
    assert ledger.steps == jaxdp.Ledger(path).steps == 11
    assert ledger.epsilon(1e-5).upper == MECH.epsilon(11, 1e-5).upper


def test_an_optimizer_state_that_is_not_carried_on_repeats_no_noise():
    sampler, noises = MECH.sampler(N), []
    for _ in range(4):
        params, opt_state = start()
        noises.append(moved(params, step(sampler, params, opt_state)[0]))
    are_fresh(noises)


def test_one_state_in_two_updates_repeats_no_noise():
    params, opt_state = start()
    samplers = [MECH.sampler(N), MECH.sampler(N)]
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


def test_the_parts_of_a_draw_are_released_together_or_not():
    params, opt_state = start()
    draw = MECH.sampler(N, physical_batch_size=4).draw()
    parts = [GRAD_FN(params, batch)[0] for batch in draw.batches(DATA)]
    UPDATE(params, opt_state, parts[0])
    with pytest.raises(ValueError, match="must be spent once"):
        UPDATE(params, opt_state, parts[-1])


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
    params, opt_state = start()
    sampler = MECH.sampler(N)
    summed, _ = GRAD_FN.sum(params, DATA, sampler.draw())
    with pytest.raises(ValueError, match="key must not be given with a Summed that brings"):
        UPDATE(params, opt_state, summed, key=sampler.draw().key())


def test_the_noise_is_that_of_the_mechanism_that_was_charged():
    """A sampler of noise 10 and an update that adds 0.1: epsilon would be of the other."""
    params, _ = start()
    loud, quiet = jaxdp.dp_sgd(10.0, 1.0, 20, N), jaxdp.privatize(0.1, 20)
    sampler = loud.sampler(N)
    summed, _ = GRAD_FN.sum(params, DATA, sampler.draw())
    with pytest.raises(ValueError, match=r"must be the one that the step was charged for, 10.0"):
        quiet.update(summed, quiet.init(params), params)
    with pytest.raises(ValueError, match=r"must be the one that the step was charged for, 10.0"):
        jaxdp.compile_update(quiet)(params, quiet.init(params), summed)  # before: NaN parameters
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
    summed, _ = GRAD_FN.sum(params, DATA, MECH.sampler(N).draw())
    tx = optax.chain(MECH.privatize(), optax.trace(0.9))
    update = jaxdp.compile_update(tx)
    for wrong in (right, tx.init({"w": jnp.zeros(3)}), tx.init({**params, "b": jnp.zeros(3)})):
        with pytest.raises(ValueError, match="opt_state must be made for the trained parameters"):
            update(params, wrong, summed)
        assert not summed.ticket.spent
    update(params, tx.init(params), summed)
    assert summed.ticket.spent


def test_an_update_that_reuses_memory_says_what_it_took_and_spends_nothing():
    tx = optax.chain(MECH.privatize(), optax.trace(0.9))
    update, sampler = jaxdp.compile_update(tx, donate=True), MECH.sampler(N)
    params = {"w": jnp.zeros(SIZE)}
    opt_state = tx.init(params)
    kept = jax.tree.map(jnp.copy, (params, opt_state))
    summed, _ = GRAD_FN.sum(params, DATA, sampler.draw())
    moved, _, _ = update(params, opt_state, summed)
    assert params["w"].is_deleted()
    draw = sampler.draw()
    with pytest.raises(ValueError, match=r"params must be those that the last update returned"):
        GRAD_FN.sum(params, DATA, draw)  # before: "Array has been deleted"
    summed, _ = GRAD_FN.sum(moved, DATA, draw)
    for again in ((params, kept[1]), (kept[0], opt_state)):
        with pytest.raises(ValueError, match=r"write params, opt_state, info = update\(params"):
            update(*again, summed)
    twice = (kept[1][0], kept[1][1]._replace(trace=kept[0]))
    with pytest.raises(
        ValueError, match=r"must not share an array .* params, opt_state = jax.tree"
    ):
        jaxdp.compile_update(tx, donate=True)(kept[0], twice, summed)
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
