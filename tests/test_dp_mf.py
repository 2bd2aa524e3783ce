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
from jaxdp.ledger.entries import event_counts
from jaxdp.ledger.seeds import Secret
from jaxdp.noise import Toeplitz, strategies
from jaxdp.sampling import CyclicAllocation, CyclicPoisson, FixedOrder, Sampler
from tests.mechanisms import mf_of
from tests.refusing import all_refused, refused

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
    return jaxdp.dp_mf(noise_multiplier=noise, bands=bands, **{**NUMBERS, **changed})


@functools.cache
def in_order(noise=1.0, strategy="buffered", **changed):
    numbers = {**NUMBERS, "sampling": "fixed_order", "strategy": strategy, **changed}
    return jaxdp.dp_mf(noise_multiplier=noise, **numbers)


def allocated(noise=1.0, bands=3, **changed):
    return amplified(noise, bands, sampling="cyclic_allocation", **changed)


BOTH = pytest.mark.parametrize(
    "make", [amplified, allocated, in_order], ids=["amplified", "allocated", "in order"]
)


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
    again = trainer_of(mechanism, ledger=ledger, another=True)
    (batch,) = again.batches(1)
    refused("after 18 steps for the draw of step 0", again.step, state, batch)
    again.step(again.init(PARAMS), batch)
    twice = acc.epsilon(acc.Repeated(mechanism.event, 2), 1e-5, ZERO_OUT).upper
    assert ledger.epsilon(1e-5, ZERO_OUT).upper == twice > whole


@BOTH
def test_noise_is_calibrated_to_the_budget(make):
    mechanism = make(None, epsilon=2.0, delta=1e-5)
    assert 1.999 < mechanism.epsilon(STEPS, 1e-5, ZERO_OUT).upper <= 2.0
    assert (mechanism.steps, mechanism.delta) == (STEPS, 1e-5)
    several = make(None, epsilon=2.0, delta=1e-5, models=3)
    assert 1.999 < acc.epsilon(acc.Repeated(several.event, 3), 1e-5, ZERO_OUT).upper <= 2.0
    assert several.models == 3
    if make is amplified:  # it costs what Poisson samples of a group cost
        event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(2.0), 3 * BATCH / N), 6)
        assert make(2.0).epsilon(STEPS, 1e-5).upper == acc.epsilon(event, 1e-5).upper
        return
    if make is allocated:  # what two epochs of a group's four slots cost; the last is cut short
        epochs = [acc.Repeated(acc.RandomAllocation(acc.Gaussian(2.0), 4), n) for n in (1, 2)]
        one, two = (acc.epsilon(each, 1e-5).upper for each in epochs)
        found = make(2.0).epsilon(STEPS, 1e-5)
        assert found.upper == pytest.approx(two, rel=1e-4)
        assert found.lower <= one
        return
    refused("shifts every position", make().epsilon, STEPS, 1e-5, acc.Relation.ADD_OR_REMOVE_ONE)
    assert make().epsilon(STEPS, 1e-5).relation is ZERO_OUT


@BOTH
def test_more_steps_than_the_strategy_has_are_refused_before_a_charge(make):
    trainer, sampler = trainer_of(make()), make().sampler(N, identities=range(N))
    for _ in range(STEPS):
        sampler.draw()
    beyond = "steps must be within the 18 of the strategy"
    all_refused(
        [
            ("steps must be at most 18", lambda: trainer.batches(STEPS + 1)),
            (beyond, lambda: list(trainer.batches(STEPS + 1, beyond=True))),
            ("within the 18", sampler.draw),
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
    all_refused([(words, lambda: trainer.step(state, later))])  # a step left out
    state, _ = trainer.step(state, kept)
    all_refused([(words, lambda: trainer.step(old, later))])
    state, _ = trainer.step(state, later)
    assert np.isfinite(state.params).all()
    (batch,) = trainer.batches(1)
    state = state._replace(opt_state=(old.opt_state[0], *state.opt_state[1:]))
    state, _ = trainer.step(state, batch)
    assert np.isnan(state.params).all()
    # A step whose batch cannot be made counts, and ends the run.
    trainer = trainer_of(in_order())
    drawn = trainer._sampler.drawn
    trainer._sampler.drawn = lambda step: (
        drawn(step) if step != 1 else exec("raise OSError('gone')")
    )
    batches, state = trainer.batches(3), trainer.init(PARAMS)
    state, _ = trainer.step(state, next(batches))
    all_refused([("gone", lambda: next(batches))], OSError)
    last = next(batches)
    all_refused([(words, lambda: trainer.step(state, last))])
    assert not last.draw.ticket.spent


def test_a_loop_of_ones_own_goes_through_the_chain_in_order_alone():
    mechanism, names = amplified(), range(N)
    grad_fn, tx = mechanism.clipped_grad(loss_fn), mechanism.privatize()
    sampler = mechanism.sampler(N, identities=names)
    update, params, data = (
        jaxdp.compile_update(tx, donate=False),
        PARAMS,
        jax.tree.map(jnp.asarray, DATA),
    )
    first = state = tx.init(params)
    for _ in range(STEPS - 1):
        summed = grad_fn(params, data, sampler.draw())
        params, state, _ = update(params, state, summed)
    assert np.isfinite(params).all()
    assert sampler.ledger.unverified() == []
    summed = grad_fn(params, data, sampler.draw())
    assert np.isnan(update(params, first, summed)[0]).all()
    # Parts of one draw, of more than one batch, cannot be released one by one.
    secret = Secret.from_seed(0)
    sampler = mechanism.sampler(N, secret=secret, identities=names, physical_batch_size=4)
    one, two, *_ = (grad_fn(PARAMS, batch) for batch in sampler.draw().batches(DATA))
    _, state = tx.update(one, first, PARAMS)
    again = (lambda: tx.update(two, state, PARAMS)), (lambda: tx.update(two, first, PARAMS))
    all_refused(zip((r"state must be|spent once", "spent once"), again, strict=True))


def test_a_filter_spends_a_whole_run_at_its_first_step():
    mechanism, ledger = amplified(2.0), Ledger(budget=acc.RenyiFilter(6.0, 1e-5))

    def draw():
        mechanism.sampler(N, identities=range(N), ledger=ledger).draw()

    draw()
    assert event_counts(ledger.entries) == {mechanism.event: 1}
    with pytest.raises(acc.BudgetExceededError):
        all(draw() is None for _ in range(100))
    assert ledger.epsilon(1e-5).upper <= 6.0


def test_groups_and_a_fixed_order_are_used_in_turn_and_groups_follow_from_the_record_alone():
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
    # A record of a fixed order comes once in a pass, also at the seam.
    sampler = mf_of(1.0, 1.0, 7, 40, "fixed_order", steps=23, strategy="identity").sampler(40)
    draws = [d.indices[d.mask] for d in (sampler.draw() for _ in range(23))]
    at = {r: [i for i, d in enumerate(draws) if r in d] for r in range(40)}
    assert {b - a for steps in at.values() for a, b in itertools.pairwise(steps)} == {6}
    assert {len(steps) for steps in at.values()} == {3, 4}
    assert {len(d) for d in draws} == {7, 5}


def test_identities_must_be_given_and_are_those_of_the_first_sampler():
    mechanism = amplified()
    all_refused(
        (f"identities must be {words}", lambda g=given: mechanism.sampler(N, **g).draw())
        for words, given in (
            ("given", {}),
            ("as many as the records", {"identities": range(N - 1)}),
            ("integers, strings or bytes", {"identities": [None] * N}),
        )
    )
    assert mechanism.sampler(N, identities=[f"user {i}" for i in range(N)]).draw().step == 0
    sampler = amplified(bands=1).sampler(N)
    assert (sampler.draw().step, sampler.ledger.steps) == (0, 1)
    fixed, cyclic = in_order(strategy="identity"), amplified(batch_size=40)
    sampler, issuer = cyclic.sampler(N, identities=range(N)), fixed.sampler(N).issuer
    sampler.draw()
    other = Sampler(cyclic.sampling, N, 64, sampler.issuer, lambda: [f"u{i}" for i in range(N)])
    only = "sampler must be the only one of a run with correlated noise"
    size = r"dataset_size must be the number of records \(20\)"
    all_refused([(only, other.draw), (size, lambda: Sampler(fixed.sampling, 20, 16, issuer))])


def test_strategy_and_sampling_belong_together_and_wrong_arguments_are_named():
    banded, share, once = Toeplitz((1.0, 0.5), STEPS), BATCH / N, FixedOrder(BATCH, STEPS)

    def made(rule, strategy, **changed):
        return lambda: jaxdp.Mechanism(
            jaxdp.clip(1.0), 1.0, rule, BATCH, N, strategy=strategy, **changed
        )

    def copied(**changed):
        return lambda: dataclasses.replace(amplified(), **changed)

    four = Toeplitz((1.0, 0.9, 0.8, 0.7), STEPS)
    all_refused(
        [
            ("strategy must be given with Cyclic", made(jaxdp.sampling.Poisson(share), banded)),
            ("strategy must be given with CyclicPoisson", made(once, None)),
            ("steps must be those of the sampling", made(FixedOrder(BATCH, STEPS - 1), banded)),
            ("bands", made(CyclicPoisson(share, 1, STEPS), banded)),
            # Its epsilon was a number, for what has no bound.
            ("bands", made(CyclicPoisson(0.25, 3, STEPS), four)),
            ("records_per_user must be None", made(once, banded, records_per_user=2)),
            ("steps must be those", copied(sampling=CyclicPoisson(0.25, 3, STEPS + 1))),
            ("strategy must be given", copied(strategy=None)),
            ("records_per_user must be None", copied(records_per_user=2)),
            ("batch_size must be", copied(dataset_size=60)),
        ]
    )
    unbanded = "strategies without bands need sampling='fixed_order'"
    made = strategies.square_root(STEPS)
    rows = [
        (words, lambda c=changed: jaxdp.dp_mf(noise_multiplier=1.0, **{**NUMBERS, "bands": 2, **c}))
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
    independent = lambda: jaxdp.dp_sgd(noise_multiplier=1.0, sampling="cyclic_poisson", **numbers)  # noqa: E731
    all_refused([*rows, ("got 'cyclic_poisson': correlated noise, jaxdp.dp_mf", independent)])


def test_what_follows_earlier_releases_before_the_noise_is_refused():
    mechanism, key = amplified(), jax.random.key(0)
    boxed = amplified(rule=jaxdp.coordinate_box(1.0), l2_clip_norm=None)
    scaled = "scale must be None with correlated noise"
    all_refused(
        [
            ("strategy must be None for annealing", lambda: opt.sa_dpsgd(mechanism, 0.1, key)),
            (scaled, lambda: opt.adadp(boxed, 0.1, bound=1.0)),
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
        if isinstance(mechanism.sampling, CyclicPoisson | CyclicAllocation):
            moves = [np.linalg.norm(matrix[:, i]) for i in range(STEPS)]
        else:
            moves = [np.linalg.norm(matrix[:, i::12].sum(axis=1)) for i in range(12)]
        assert std == np.float32(std)
        assert noise * max(moves) <= std <= noise * max(moves) * (1 + 1e-6), noise
