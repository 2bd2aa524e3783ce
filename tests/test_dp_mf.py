"""Correlated noise by the front doors: one event, the records in turn, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Ledger
from jaxdp import accounting as acc
from jaxdp import optimizers as opt
from jaxdp.noise import strategies
from jaxdp.sampling import CyclicPoisson, FixedOrder
from jaxdp.seeds import Secret

N, BATCH, STEPS = 120, 10, 18
RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(N, 3)).astype(np.float32), "y": np.ones(N, np.float32)}
NUMBERS = {"l2_clip_norm": 1.0, "batch_size": BATCH, "dataset_size": N, "steps": STEPS}
PARAMS = jnp.zeros(3)


def loss_fn(w, example):
    return (example["x"] @ w - example["y"]) ** 2


def amplified(noise=1.0, bands=3, **changed):
    return jaxdp.dp_mf(noise, bands=bands, **{**NUMBERS, **changed})


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
def test_a_run_is_one_event_charged_whole_at_its_first_step(make):
    mechanism = make()
    trainer = trainer_of(mechanism)
    (batch, *_) = trainer.batches(1)
    relation = acc.Relation.REPLACE_SPECIAL
    whole = mechanism.epsilon(STEPS, 1e-5, relation).upper
    assert trainer.epsilon(1e-5, relation).upper == whole
    state, _ = trainer.step(trainer.init(PARAMS), batch)
    state = trained(trainer, STEPS - 1, state)
    assert trainer.epsilon(1e-5, relation).upper == whole
    assert np.isfinite(state.params).all()
    assert trainer.unverified() == []
    assert mechanism.total(1) == mechanism.total(STEPS)


def test_amplified_noise_costs_what_poisson_samples_of_a_group_cost():
    mechanism = amplified(2.0, bands=3)
    event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(2.0), 3 * BATCH / N), 6)
    assert mechanism.epsilon(STEPS, 1e-5).upper == acc.epsilon(event, 1e-5).upper


@BOTH
def test_noise_is_calibrated_to_the_budget(make):
    mechanism = make(None, epsilon=2.0, delta=1e-5)
    relation = list(acc.Relation)[2]
    found = mechanism.epsilon(STEPS, 1e-5, relation).upper
    assert 1.999 < found <= 2.0
    assert (mechanism.steps, mechanism.delta) == (STEPS, 1e-5)


def test_adding_or_removing_is_refused_where_records_go_by_their_position():
    with pytest.raises(ValueError, match="shifts every position"):
        in_order().epsilon(STEPS, 1e-5, acc.Relation.ADD_OR_REMOVE_ONE)
    assert in_order().epsilon(STEPS, 1e-5).relation is acc.Relation.REPLACE_SPECIAL


@BOTH
def test_more_steps_than_the_strategy_has_are_refused_before_a_charge(make):
    trainer = trainer_of(make())
    with pytest.raises(ValueError, match="steps must be at most 18"):
        trainer.batches(STEPS + 1)
    with pytest.raises(ValueError, match="steps must be within the 18 of the strategy"):
        list(trainer.batches(STEPS + 1, beyond=True))
    sampler = make().sampler(N, identities=range(N))
    for _ in range(STEPS):
        sampler.draw()
    with pytest.raises(ValueError, match="within the 18"):
        sampler.draw()


def test_a_step_that_was_left_out_is_refused_in_words():
    trainer = trainer_of(amplified())
    state = trainer.init(PARAMS)
    first, second = trainer.batches(2)
    del first
    with pytest.raises(ValueError, match="state must be that of the step before"):
        trainer.step(state, second)


def test_an_older_state_is_refused_in_words():
    trainer = trainer_of(in_order())
    old = trained(trainer, 2)
    kept = jax.tree.map(jnp.copy, old)
    trained(trainer, 2, old)
    (batch,) = trainer.batches(1)
    with pytest.raises(ValueError, match="state must be that of the step before"):
        trainer.step(kept, batch)


def test_an_older_state_of_the_noise_alone_gives_nan():
    trainer = trainer_of(in_order())
    old = trained(trainer, 2)
    noise = jax.tree.map(jnp.copy, old.opt_state[0])
    new = trained(trainer, 1, old)
    new = new._replace(opt_state=(noise, *new.opt_state[1:]))
    (batch,) = trainer.batches(1)
    state, _ = trainer.step(new, batch)
    assert np.isnan(state.params).all()


@BOTH
def test_another_trainer_on_the_ledger_begins_another_run_which_costs_as_much_again(make):
    ledger, relation = Ledger(), acc.Relation.REPLACE_SPECIAL
    state = trained(trainer_of(make(), ledger=ledger), 3)
    once = ledger.epsilon(1e-5, relation).upper
    again = trainer_of(make(), ledger=ledger)
    with pytest.warns(UserWarning, match="no step is left"):
        assert list(again.batches()) == []
    (batch,) = again.batches(1, beyond=True)
    with pytest.raises(ValueError, match="after 3 steps for the draw of step 0"):
        again.step(state, batch)
    again.step(again.init(PARAMS), batch)
    twice = acc.Repeated(make().event, 2)
    assert ledger.epsilon(1e-5, relation).upper == acc.epsilon(twice, 1e-5, relation).upper > once


def test_every_record_of_a_fixed_order_comes_once_in_a_pass_at_one_place():
    trainer = trainer_of(in_order())
    draws = [b.draw for b in trainer.batches(STEPS)]
    passes = [np.concatenate([d.indices[d.mask] for d in draws[i : i + 12]]) for i in (0,)]
    assert sorted(passes[0]) == list(range(N))
    for step in range(STEPS - 12):
        one, two = (set(draws[i].indices[draws[i].mask]) for i in (step, step + 12))
        assert one == two


def test_groups_are_used_in_turn_and_follow_from_the_record_alone():
    secret = Secret.new()

    def groups(data):
        rule = CyclicPoisson(1.0, 3, 6)
        mechanism = jaxdp.Mechanism(
            jaxdp.clip(1.0), 1.0, rule, 40, N, strategy=strategies.Toeplitz((1.0, 0.5, 0.2), 6)
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
    with pytest.raises(ValueError, match="identities must be given"):
        mechanism.sampler(N).draw()
    with pytest.raises(ValueError, match="identities must be as many as the records"):
        mechanism.sampler(N, identities=range(N - 1)).draw()
    with pytest.raises(ValueError, match="identities must be integers, strings or bytes"):
        mechanism.sampler(N, identities=[None] * N).draw()
    assert mechanism.sampler(N, identities=[f"user {i}" for i in range(N)]).draw().step == 0
    sampler = amplified(bands=1).sampler(N)
    assert sampler.draw().step == 0
    assert sampler.ledger.steps == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sampling": "poisson"}, "sampling"),
        ({"strategy": "buffered", "bands": 2}, "strategies without bands need sampling='fixed"),
        ({"strategy": "square_root"}, "strategies without bands need sampling='fixed_order'"),
        (
            {"strategy": strategies.square_root(STEPS), "bands": None},
            "bands must be at most dataset_size",
        ),
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
    ],
)
def test_wrong_arguments_are_named(changed, words):
    with pytest.raises(ValueError, match=words):
        jaxdp.dp_mf(1.0, **{**NUMBERS, "bands": 2, **changed})


def test_dp_sgd_says_which_function_correlates_noise():
    numbers = {name: value for name, value in NUMBERS.items() if name != "steps"}
    with pytest.raises(ValueError, match=r"got 'cyclic_poisson': correlated noise, jaxdp.dp_mf"):
        jaxdp.dp_sgd(1.0, sampling="cyclic_poisson", **numbers)


def test_strategy_and_sampling_belong_together():
    banded = strategies.Toeplitz((1.0, 0.5), STEPS)
    numbers = {"batch_size": BATCH, "dataset_size": N}
    for rule, strategy in [
        (jaxdp.sampling.Poisson(BATCH / N), banded),
        (FixedOrder(BATCH, STEPS), None),
        (FixedOrder(BATCH, STEPS - 1), banded),
        (CyclicPoisson(BATCH / N, 1, STEPS), banded),
    ]:
        with pytest.raises(ValueError, match=r"strategy|bands|steps"):
            jaxdp.Mechanism(jaxdp.clip(1.0), 1.0, rule, strategy=strategy, **numbers).privatize()
    with pytest.raises(ValueError, match="records_per_user must be None"):
        jaxdp.Mechanism(
            jaxdp.clip(1.0),
            1.0,
            FixedOrder(BATCH, STEPS),
            strategy=banded,
            records_per_user=2,
            **numbers,
        )


def test_what_follows_earlier_releases_before_the_noise_is_refused():
    mechanism = amplified()
    with pytest.raises(ValueError, match="strategy must be None for annealing"):
        opt.sa_dpsgd(mechanism, 0.1, jax.random.key(0))
    boxed = amplified(rule=jaxdp.coordinate_box(1.0), l2_clip_norm=None)
    with pytest.raises(ValueError, match="scale must be None with correlated noise"):
        opt.adadp(boxed, 0.1, bound=1.0)
    adam = opt.dp_adam_bc(mechanism, 0.01)
    state = trained(jaxdp.Trainer(loss_fn, adam, None, DATA))
    assert np.isfinite(state.params).all()


def test_independent_noise_is_refused_for_its_tickets():
    mechanism = amplified()
    grad_fn = mechanism.clipped_grad(loss_fn)
    sampler = mechanism.sampler(N, identities=range(N))
    update = jaxdp.compile_update(optax.chain(jaxdp.privatize(1.0, BATCH), optax.sgd(0.1)))
    state = optax.chain(jaxdp.privatize(1.0, BATCH), optax.sgd(0.1)).init(PARAMS)
    summed, _ = grad_fn.sum(PARAMS, jax.tree.map(jnp.asarray, DATA), sampler.draw())
    with pytest.raises(ValueError, match="part must be among"):
        update(PARAMS, state, summed)


def test_a_loop_of_ones_own_goes_through_the_chain():
    mechanism = amplified()
    grad_fn = mechanism.clipped_grad(loss_fn)
    sampler = mechanism.sampler(N, identities=range(N))
    tx = optax.chain(mechanism.privatize(), optax.sgd(0.1))
    update, params, data = jaxdp.compile_update(tx), PARAMS, jax.tree.map(jnp.asarray, DATA)
    state = tx.init(params)
    for _ in range(STEPS):
        summed, _ = grad_fn.sum(params, data, sampler.draw())
        params, state, _ = update(params, state, summed)
    assert np.isfinite(params).all()
    assert sampler.ledger.unverified() == []


@pytest.mark.parametrize("make", [amplified, in_order], ids=["amplified", "in order"])
@pytest.mark.parametrize("noise", [0.3, 1.0, 1.7, 2.00001])
def test_the_noise_is_never_less_than_was_charged(make, noise):
    """Of the largest move of any record, by brute force over the steps that it takes part in."""
    mechanism = make(noise)
    (std,) = mechanism.multipliers(0).values()
    matrix = mechanism.strategy.matrix()
    if isinstance(mechanism.sampling, CyclicPoisson):
        moves = [np.linalg.norm(matrix[:, i]) for i in range(STEPS)]
    else:
        moves = [np.linalg.norm(matrix[:, i::12].sum(axis=1)) for i in range(12)]
    assert std == np.float32(std)
    assert noise * max(moves) <= std <= noise * max(moves) * (1 + 1e-6)
