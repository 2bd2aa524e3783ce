"""Correlated noise by the front doors: one event, the records in turn, and what is refused."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Ledger
from jaxdp import accounting as acc
from jaxdp import optimizers as opt
from jaxdp._entries import event_counts
from jaxdp.noise import Toeplitz, strategies
from jaxdp.sampling import CyclicPoisson, FixedOrder, Sampler
from jaxdp.seeds import Secret
from tests.noise.refusals import assert_refused

N, BATCH, STEPS = 120, 10, 18
RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(N, 3)).astype(np.float32), "y": np.ones(N, np.float32)}
NUMBERS = {"l2_clip_norm": 1.0, "batch_size": BATCH, "dataset_size": N, "steps": STEPS}
PARAMS = jnp.zeros(3)
ZERO_OUT = acc.Relation.REPLACE_SPECIAL


def loss_fn(w, example):
    """Some records have no finite gradient: what is released does not depend on that."""
    broken = jnp.where(example["x"][0] > 2.0, jnp.nan, 1.0)
    return broken * (example["x"] @ w - example["y"]) ** 2


def amplified(noise=1.0, bands=3, **changed):
    return jaxdp.dp_mf(noise, bands=bands, **{**NUMBERS, **changed})


@functools.cache
def in_order(noise=1.0, strategy="buffered", **changed):
    numbers = {**NUMBERS, "sampling": "fixed_order", "strategy": strategy, **changed}
    return jaxdp.dp_mf(noise, **numbers)


BOTH = pytest.mark.parametrize("make", [amplified, in_order], ids=["amplified", "in order"])


def trainer_of(mechanism, **options):
    return jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), DATA, **options)


def trained(trainer, steps=None, state=None):
    state = trainer.init(PARAMS) if state is None else state
    for batch in trainer.batches(steps):
        state, _ = trainer.step(state, batch)
    return state


@BOTH
def test_a_run_is_one_event_charged_whole_at_its_first_step_and_another_one_as_much_again(make):
    mechanism, ledger = make(), Ledger()
    assert mechanism.total(1) == mechanism.total(STEPS)
    trainer = trainer_of(mechanism, ledger=ledger)
    (batch, *_) = trainer.batches(1)
    whole = mechanism.epsilon(STEPS, 1e-5, ZERO_OUT).upper
    assert trainer.epsilon(1e-5, ZERO_OUT).upper == whole
    state, _ = trainer.step(trainer.init(PARAMS), batch)
    state = trained(trainer, STEPS - 1, state)
    assert trainer.epsilon(1e-5, ZERO_OUT).upper == whole
    assert np.isfinite(state.params).all()
    assert trainer.unverified() == []
    again = trainer_of(mechanism, ledger=ledger)
    with pytest.warns(UserWarning, match="no step is left"):
        assert list(again.batches()) == []
    (batch,) = again.batches(1, beyond=True)
    with pytest.raises(ValueError, match="after 18 steps for the draw of step 0"):
        again.step(state, batch)
    again.step(again.init(PARAMS), batch)
    twice = acc.epsilon(acc.Repeated(mechanism.event, 2), 1e-5, ZERO_OUT).upper
    assert ledger.epsilon(1e-5, ZERO_OUT).upper == twice > whole


def test_amplified_noise_costs_what_poisson_samples_of_a_group_cost():
    mechanism = amplified(2.0, bands=3)
    event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(2.0), 3 * BATCH / N), 6)
    assert mechanism.epsilon(STEPS, 1e-5).upper == acc.epsilon(event, 1e-5).upper


@BOTH
def test_noise_is_calibrated_to_the_budget(make):
    mechanism = make(None, epsilon=2.0, delta=1e-5)
    assert 1.999 < mechanism.epsilon(STEPS, 1e-5, ZERO_OUT).upper <= 2.0
    assert (mechanism.steps, mechanism.delta) == (STEPS, 1e-5)


def test_adding_or_removing_is_refused_where_records_go_by_their_position():
    with pytest.raises(ValueError, match="shifts every position"):
        in_order().epsilon(STEPS, 1e-5, acc.Relation.ADD_OR_REMOVE_ONE)
    assert in_order().epsilon(STEPS, 1e-5).relation is ZERO_OUT


@BOTH
def test_more_steps_than_the_strategy_has_are_refused_before_a_charge(make):
    trainer, sampler = trainer_of(make()), make().sampler(N, identities=range(N))
    for _ in range(STEPS):
        sampler.draw()
    beyond = "steps must be within the 18 of the strategy"
    assert_refused(
        [
            (lambda: trainer.batches(STEPS + 1), "steps must be at most 18"),
            (lambda: list(trainer.batches(STEPS + 1, beyond=True)), beyond),
            (sampler.draw, "within the 18"),
        ]
    )
    assert sampler.ledger.steps == STEPS


def test_a_state_of_another_step_is_refused_in_words_and_that_of_the_noise_alone_gives_nan():
    trainer, words = trainer_of(in_order()), "state must be that of the step before"
    batches = trainer.batches()
    state, _ = trainer.step(trainer.init(PARAMS), next(batches))
    old = jax.tree.map(jnp.copy, state)
    kept = next(batches)  # of a loop that was left: it can still be taken
    batches.close()
    (later,) = trainer.batches(1)
    assert_refused([(lambda: trainer.step(state, later), words)])  # a step left out
    state, _ = trainer.step(state, kept)
    assert_refused([(lambda: trainer.step(old, later), words)])
    state, _ = trainer.step(state, later)
    assert np.isfinite(state.params).all()
    (batch,) = trainer.batches(1)
    state = state._replace(opt_state=(old.opt_state[0], *state.opt_state[1:]))
    state, _ = trainer.step(state, batch)
    assert np.isnan(state.params).all()


def test_a_loop_of_ones_own_goes_through_the_chain_in_order_alone():
    mechanism = amplified()
    grad_fn, tx = mechanism.clipped_grad(loss_fn), mechanism.privatize()
    sampler = mechanism.sampler(N, identities=range(N))
    update, params, data = jaxdp.compile_update(tx), PARAMS, jax.tree.map(jnp.asarray, DATA)
    first = state = tx.init(params)
    for _ in range(STEPS - 1):
        summed, _ = grad_fn.sum(params, data, sampler.draw())
        params, state, _ = update(params, state, summed)
    assert np.isfinite(params).all()
    assert sampler.ledger.unverified() == []
    summed, _ = grad_fn.sum(params, data, sampler.draw())
    assert np.isnan(update(params, first, summed)[0]).all()


def test_parts_of_one_draw_cannot_be_released_one_by_one():
    mechanism = amplified()
    tx, secret = mechanism.privatize(), Secret.from_seed(0)  # a draw of more than one batch
    sampler = mechanism.sampler(N, secret=secret, identities=range(N), physical_batch_size=4)
    grad_fn, start = mechanism.clipped_grad(loss_fn), tx.init(PARAMS)
    one, two, *_ = (grad_fn(PARAMS, batch)[0] for batch in sampler.draw().batches(DATA))
    _, state = tx.update(one, start, PARAMS)
    again = (lambda: tx.update(two, state, PARAMS)), (lambda: tx.update(two, start, PARAMS))
    assert_refused(zip(again, (r"state must be|spent once", "spent once"), strict=True))


def test_a_filter_spends_a_whole_run_at_its_first_step():
    mechanism, ledger = amplified(2.0), Ledger(budget=acc.RenyiFilter(6.0, 1e-5))

    def draw():
        mechanism.sampler(N, identities=range(N), ledger=ledger).draw()

    draw()
    assert event_counts(ledger.entries) == {mechanism.event: 1}
    with pytest.raises(acc.BudgetExceededError):
        all(draw() is None for _ in range(100))
    assert ledger.epsilon(1e-5).upper <= 6.0


def test_a_record_of_a_fixed_order_comes_once_in_a_pass_also_at_the_seam():
    sampler = jaxdp.dp_mf(1.0, 1.0, 7, 40, "fixed_order", steps=23, strategy="identity").sampler(40)
    draws = [d.indices[d.mask] for d in (sampler.draw() for _ in range(23))]
    at = {r: [i for i, d in enumerate(draws) if r in d] for r in range(40)}
    assert {b - a for steps in at.values() for a, b in itertools.pairwise(steps)} == {6}
    assert {len(steps) for steps in at.values()} == {3, 4}
    assert {len(d) for d in draws} == {7, 5}


def test_groups_are_used_in_turn_and_follow_from_the_record_alone():
    secret = Secret.new()

    def groups(data):
        rule = CyclicPoisson(1.0, 3, 6)
        mechanism = jaxdp.Mechanism(
            jaxdp.clip(1.0), 1.0, rule, 40, N, strategy=Toeplitz((1.0, 0.5, 0.2), 6)
        )
        trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), data, secret=secret)
        trainer._sampler._issuer._draws = "the same run"
        found = []
        for batch in trainer.batches(6):
            chosen = batch.draw.indices[batch.draw.mask]
            found.append({float(data["x"][i, 0]) for i in chosen})
        assert found[:3] == found[3:]
        assert len(set.union(*found)) == sum(map(len, found[:3])) == len(data["x"])
        return found[:3]

    fewer = {name: np.delete(leaf, 17, axis=0) for name, leaf in DATA.items()}
    gone = {float(DATA["x"][17, 0])}
    assert [group - gone for group in groups(DATA)] == groups(fewer)


def test_identities_must_be_given_where_records_are_not_seen():
    mechanism = amplified()
    assert_refused(
        [
            (lambda g=given: mechanism.sampler(N, **g).draw(), f"identities must be {words}")
            for given, words in (
                ({}, "given"),
                ({"identities": range(N - 1)}, "as many as the records"),
                ({"identities": [None] * N}, "integers, strings or bytes"),
            )
        ]
    )
    assert mechanism.sampler(N, identities=[f"user {i}" for i in range(N)]).draw().step == 0
    sampler = amplified(bands=1).sampler(N)
    assert sampler.draw().step == 0
    assert sampler.ledger.steps == 1


def test_the_records_of_a_run_and_their_groups_are_those_of_its_first_sampler():
    fixed, cyclic = in_order(strategy="identity"), amplified(batch_size=40)
    sampler = cyclic.sampler(N, identities=range(N))
    sampler.draw()
    names = [f"u{i}" for i in range(N)]
    other = Sampler(cyclic.sampling, N, 64, sampler.issuer, lambda: names)
    assert_refused(
        [
            (other.draw, "sampler must be the only one of a run with correlated noise"),
            (
                lambda: Sampler(fixed.sampling, 20, 16, fixed.sampler(N).issuer),
                r"dataset_size must be the number of records \(20\)",
            ),
        ]
    )


def test_wrong_arguments_are_named():
    unbanded = "strategies without bands need sampling='fixed_order'"
    made = strategies.square_root(STEPS)
    rows = [
        (lambda c=changed: jaxdp.dp_mf(1.0, **{**NUMBERS, "bands": 2, **c}), words)
        for changed, words in (
            ({"sampling": "poisson"}, "sampling"),
            ({"strategy": "buffered", "bands": 2}, unbanded),
            ({"strategy": "square_root"}, unbanded),
            ({"strategy": made, "bands": None}, "bands must be at most dataset_size"),
            ({"strategy": np.eye(STEPS)}, "strategy must be a name, or a strategy such as"),
            ({"bands": None}, "bands must be given with noise_multiplier"),
            ({"bands": 13}, "bands must be at most"),
            ({"bands": 0}, "bands must be a whole number of at least 1"),
            ({"steps": 0}, "steps"),
            ({"strategy": "best"}, "strategy"),
            ({"error": "mean"}, "error"),
            ({"epsilon": 1.0, "delta": 1e-5}, "give noise_multiplier, or a budget"),
            ({"delta": 1e-5}, "delta must be given with epsilon"),
            ({"relation": "replace"}, "replace"),
        )
    ]
    numbers = {name: value for name, value in NUMBERS.items() if name != "steps"}
    independent = lambda: jaxdp.dp_sgd(1.0, sampling="cyclic_poisson", **numbers)  # noqa: E731
    assert_refused([*rows, (independent, "got 'cyclic_poisson': correlated noise, jaxdp.dp_mf")])


def test_strategy_and_sampling_belong_together():
    banded, share, once = Toeplitz((1.0, 0.5), STEPS), BATCH / N, FixedOrder(BATCH, STEPS)

    def made(rule, strategy, **changed):
        return lambda: jaxdp.Mechanism(
            jaxdp.clip(1.0), 1.0, rule, BATCH, N, strategy=strategy, **changed
        )

    def copied(**changed):
        return lambda: dataclasses.replace(amplified(), **changed)

    four = Toeplitz((1.0, 0.9, 0.8, 0.7), STEPS)
    assert_refused(
        [
            (made(jaxdp.sampling.Poisson(share), banded), "strategy must be given with Cyclic"),
            (made(once, None), "strategy must be given with CyclicPoisson"),
            (made(FixedOrder(BATCH, STEPS - 1), banded), "steps must be those of the sampling"),
            (made(CyclicPoisson(share, 1, STEPS), banded), "bands"),
            # Its epsilon was a number, for what has no bound.
            (made(CyclicPoisson(0.25, 3, STEPS), four), "bands"),
            (made(once, banded, records_per_user=2), "records_per_user must be None"),
            (copied(sampling=CyclicPoisson(0.25, 3, STEPS + 1)), "steps must be those"),
            (copied(strategy=None), "strategy must be given"),
            (copied(records_per_user=2), "records_per_user must be None"),
            (copied(dataset_size=60), "batch_size must be"),
        ]
    )


def test_what_follows_earlier_releases_before_the_noise_is_refused():
    mechanism = amplified()
    boxed = amplified(rule=jaxdp.coordinate_box(1.0), l2_clip_norm=None)
    annealed = "strategy must be None for annealing"
    assert_refused(
        [
            (lambda: opt.sa_dpsgd(mechanism, 0.1, jax.random.key(0)), annealed),
            (lambda: opt.adadp(boxed, 0.1, bound=1.0), "scale must be None with correlated noise"),
        ]
    )
    adam = opt.dp_adam_bc(mechanism, 0.01)
    state = trained(jaxdp.Trainer(loss_fn, adam, None, DATA))
    assert np.isfinite(state.params).all()


@BOTH
def test_the_noise_is_never_less_than_was_charged(make):
    """Of the largest move of any record, by brute force over the steps that it takes part in."""
    for noise in (0.3, 1.0, 1.7, 2.00001):
        mechanism = dataclasses.replace(make(), noise_multiplier=noise)
        (std,) = mechanism.multipliers(0).values()
        matrix = mechanism.strategy.matrix()
        if isinstance(mechanism.sampling, CyclicPoisson):
            moves = [np.linalg.norm(matrix[:, i]) for i in range(STEPS)]
        else:
            moves = [np.linalg.norm(matrix[:, i::12].sum(axis=1)) for i in range(12)]
        assert std == np.float32(std)
        assert noise * max(moves) <= std <= noise * max(moves) * (1 + 1e-6), noise
