import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc


def test_the_event_says_what_is_done():
    mech = jaxdp.dp_sgd(1.23, 0.1, 512, 60_000)
    assert mech.event == acc.PoissonSampled(acc.Gaussian(1.23), 512 / 60_000)
    assert mech.sampler(50_000).sampling.sampling_prob == 512 / 60_000
    fixed = jaxdp.dp_sgd(1.0, 0.1, 5, 50, sampling="fixed_size")
    assert fixed.event == acc.FixedSizeSampled(acc.Gaussian(1.0), 50, 5)
    assert jaxdp.dp_sgd(1.0, 0.1, 50, 50, sampling="full_batch").event == acc.Gaussian(1.0)


def test_noise_follows_the_mechanism_whatever_the_sum():
    mech = jaxdp.dp_sgd(3.0, 0.2, 10, 100)
    params = {"w": jnp.zeros(20_000)}
    tx, key = mech.privatize(), mech.sampler(100).draw().key()
    summed = jaxdp.Summed(params, mech.rule.l2(params))
    update, _ = tx.update(summed, tx.init(params), params, key=key)
    np.testing.assert_allclose(np.std(update["w"]), 3.0 * 0.2 / 10, rtol=0.03)
    assert mech.noise_std(params) == pytest.approx(3.0 * mech.l2(params) / 10)
    assert 0.2 < mech.l2(params) < 0.205


def test_a_step_is_charged_before_it_is_drawn():
    mech, ledger = jaxdp.dp_sgd(1.0, 0.1, 5, 50), jaxdp.Ledger()
    sampler = mech.sampler(50, ledger=ledger)
    for _ in range(3):
        sampler.draw()
    assert ledger.steps == 3
    assert ledger.epsilon(1e-5).upper == mech.epsilon(3, 1e-5).upper
    (said,) = ledger.unverified()
    assert said.startswith("3 of 3 steps: drawn, but that jaxdp added their noise")


def test_a_second_run_is_charged_again():
    mech, ledger = jaxdp.dp_sgd(1.0, 0.1, 5, 50), jaxdp.Ledger()
    for _ in range(2):
        sampler = mech.sampler(50, ledger=ledger)
        for _ in range(4):
            sampler.draw()
    assert ledger.steps == 8


def test_two_samplers_of_one_secret_are_charged_apart_and_draw_apart():
    mech, ledger = jaxdp.dp_sgd(1.0, 0.1, 25, 50), jaxdp.Ledger()
    secret = jaxdp.Secret.new()
    one, two = (mech.sampler(50, ledger=ledger, secret=secret) for _ in range(2))
    first, second = one.draw(), two.draw()
    assert ledger.steps == 2
    assert len({entry.stream for entry in ledger.entries}) == 2
    assert not np.array_equal(first.indices, second.indices)
    assert not np.array_equal(first.key().words, second.key().words)
    with pytest.raises(AttributeError):
        one.step = 0  # nothing goes back


def test_a_sampler_without_a_ledger_has_one():
    mech = jaxdp.dp_sgd(1.0, 0.1, 5, 50)
    one, two = mech.sampler(50), mech.sampler(50)
    one.draw()
    assert one.ledger.epsilon(1e-5).upper == mech.epsilon(1, 1e-5).upper
    assert two.ledger is not one.ledger
    with pytest.raises(ValueError, match=r"ledger must be a jaxdp.Ledger, got str"):
        mech.sampler(50, ledger="ledger.jsonl")


def test_count_and_gradient_are_two_parts_of_one_event():
    mech = dataclasses.replace(jaxdp.dp_sgd(1.0, 0.1, 5, 50), count_noise_multiplier=10.0)
    parts = mech.multipliers(0)
    assert sorted(parts) == ["gradient", "votes"]
    assert parts["gradient"] ** -2 + parts["votes"] ** -2 <= 1.0
    assert parts["gradient"] == pytest.approx((1 - 1e-2) ** -0.5)
    sampler = mech.sampler(50)
    key = sampler.draw().key()
    assert key.parts == ("gradient", "votes")
    assert not np.array_equal(*key.words)
    assert sampler.ledger.event == acc.Composed((acc.Repeated(mech.event, 1),))


def test_end_to_end_epsilon_is_that_of_the_steps_taken(linear):
    params, batch, loss_fn = linear
    mech, ledger = jaxdp.dp_sgd(1.0, 0.1, 5, 50), jaxdp.Ledger()
    tx = optax.chain(mech.privatize(), optax.sgd(0.1, momentum=0.9))
    update, state = jaxdp.compile_update(tx), tx.init(params)
    sampler, grad_fn, data = mech.sampler(50, ledger=ledger), mech.clipped_grad(loss_fn), batch(50)
    for _ in range(6):
        summed, _ = grad_fn.sum(params, data, sampler.draw())
        params, state, info = update(params, state, summed)
        assert info.update_norm > 0
    assert ledger.epsilon(1e-5).upper == mech.epsilon(6, 1e-5).upper
    assert ledger.unverified() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": -0.1}, "noise_multiplier must be"),
        ({"l2_clip_norm": 0.0}, "l2_clip_norm must be"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": 1.5}, "batch_size must be a whole number"),
        ({"batch_size": 101}, r"batch_size must be at most dataset_size \(100\), got 101"),
        ({"dataset_size": -3}, "dataset_size must be"),
        ({"sampling": "shuffled"}, "sampling must be one of poisson, fixed_size, full_batch"),
        ({"sampling": "full_batch"}, "batch_size must be dataset_size"),
    ],
)
def test_bad_input(changes, message):
    good = {"noise_multiplier": 1.0, "l2_clip_norm": 1.0, "batch_size": 10, "dataset_size": 100}
    with pytest.raises(ValueError, match=message):
        jaxdp.dp_sgd(**{**good, **changes})


def test_fixed_size_needs_the_declared_number_of_records():
    mech = jaxdp.dp_sgd(1.0, 0.1, 5, 50, sampling="fixed_size")
    with pytest.raises(ValueError, match="dataset_size must be the number of records"):
        mech.sampler(49)


def test_the_divisor_is_the_expected_batch_size():
    for size in (8, 12):
        with pytest.raises(ValueError, match=r"batch_size must be sampling_prob \* dataset_size"):
            jaxdp.Mechanism(jaxdp.clip(1.0), 1.0, jaxdp.sampling.Poisson(0.1), size, 100)
    with pytest.raises(ValueError, match="batch_size must be that of the sampling"):
        jaxdp.Mechanism(jaxdp.clip(1.0), 1.0, jaxdp.sampling.FixedSize(10), 9, 100)
    with pytest.raises(ValueError, match="batch_size must be dataset_size"):
        jaxdp.Mechanism(jaxdp.clip(1.0), 1.0, jaxdp.sampling.FullBatch(), 99, 100)
    assert (
        jaxdp.Mechanism(jaxdp.clip(1.0), 1.0, jaxdp.sampling.Poisson(0.096), 10, 100).batch_size
        == 10
    )


@pytest.mark.parametrize("relation", [None, "replace_one"])
def test_a_mechanism_keeps_the_relation_of_its_budget(relation):
    budget = {"epsilon": 3.0, "delta": 1e-3, "steps": 8}
    mech = jaxdp.dp_sgd(
        **budget, relation=relation, l2_clip_norm=1.0, batch_size=8, dataset_size=32
    )
    kept = acc.Relation(relation or "add_or_remove_one")
    bound = mech.epsilon(8, 1e-3)
    assert (mech.neighbours, bound.relation) == (kept, kept)
    assert 2.99 < bound.upper <= 3.0
    assert kept.value in str(bound)
    # An explicit one still decides.
    other = mech.epsilon(8, 1e-3, acc.Relation.REPLACE_SPECIAL)
    assert other.relation is acc.Relation.REPLACE_SPECIAL
    assert (other.upper < 2.5) == (relation is not None)
    # Keys and run folders know a mechanism by its text, which is as before.
    assert repr(mech) == repr(dataclasses.replace(mech, relation=None))
    assert jaxdp.Algorithm(mech, optax.sgd(0.1)).epsilon(8, 1e-3).upper == bound.upper


def test_a_trainer_tells_the_epsilon_of_the_budget():
    loss = lambda params, x: jnp.sum((params * x) ** 2)  # noqa: E731
    records = np.ones((32, 2), np.float32)
    given = {"l2_clip_norm": 1.0, "batch_size": 8, "dataset_size": 32}
    replaced = acc.Relation.REPLACE_ONE
    for mech in (
        jaxdp.dp_sgd(epsilon=3.0, delta=1e-3, steps=2, relation=replaced, **given),
        jaxdp.dp_sgd(epsilon=3.0, delta=1e-3, steps=2, sampling="fixed_size", **given),
    ):
        trainer = jaxdp.Trainer(loss, mech, optax.sgd(0.1), records)
        state = trainer.init(jnp.ones(2))
        for batch in trainer.batches(2):
            state, _ = trainer.step(state, batch)
        bound = trainer.epsilon()
        assert (bound.relation, mech.neighbours) == (replaced, replaced)
        assert 2.9 < bound.upper <= 3.0


def test_the_relation_of_sampling_or_order_where_none_is_given():
    fixed = jaxdp.dp_sgd(1.0, 0.1, 5, 50, sampling="fixed_size")
    assert fixed.neighbours is acc.Relation.REPLACE_ONE
    assert fixed.epsilon(3, 1e-3).relation is acc.Relation.REPLACE_ONE
    given = {"l2_clip_norm": 1.0, "steps": 10, "batch_size": 5, "dataset_size": 50}
    ordered = jaxdp.dp_mf(noise_multiplier=2.0, sampling="fixed_order", **given)
    assert ordered.neighbours is acc.Relation.REPLACE_SPECIAL
    strict = jaxdp.dp_mf(
        noise_multiplier=2.0, sampling="fixed_order", relation="replace_one", **given
    )
    assert strict.epsilon(10, 1e-3).upper > ordered.epsilon(10, 1e-3).upper
