"""Mechanisms: their events and charges, budgets, relations, and parts that must agree."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import norm

import jaxdp
from jaxdp import accounting as acc
from jaxdp.mechanism import Mechanism
from jaxdp.noise import NOISES, IndependentNoise, MatrixNoise, NoiseKind
from jaxdp.sampling import FixedSize, FullBatch, Poisson, Sampler
from tests.mechanisms import mf_of, sgd_of
from tests.refusing import all_refused

GOOD = {"rule": jaxdp.clip(0.1), "noise_multiplier": 1.0, "sampling": Poisson(0.25)}
GOOD |= {"batch_size": 2, "dataset_size": 8}
NAN = float("nan")
SCHEDULE = jaxdp.schedules.from_multipliers([1.0, 2.0])

RULE, FINITE, NUMBER, WHOLE, DIVIDED = (
    *("rule must be a clipping rule", "noise_multiplier must be a finite number"),
    *("noise_multiplier must be a", "must be a whole number", r"sampling_prob \* dataset_size = "),
)
PARTS = {"noise_multiplier": SCHEDULE, "count_noise_multiplier": 2.0}
# fmt: off
BAD = [
    ({"rule": 0.1}, RULE), ({"rule": jaxdp.clip}, RULE), ({"rule": type(jaxdp.clip(0.1))}, RULE),
    ({"noise_multiplier": NAN}, FINITE), ({"noise_multiplier": -1.0}, FINITE),
    ({"noise_multiplier": "1"}, f"{NUMBER} number"), ({"noise_multiplier": None}, f"{NUMBER} number"),
    ({"noise_multiplier": True}, f"{NUMBER} number"),
    ({"noise_multiplier": np.True_}, f"{NUMBER} number"),
    ({"noise_multiplier": np.complex128(1 + 2j)}, f"{NUMBER} number"),
    ({"noise_multiplier": np.ones(2)}, f"{NUMBER} single number"),
    ({"noise_multiplier": jnp.float32(1.0)}, f"{NUMBER} Python number"),
    ({"noise_multiplier": np.array(1.0)}, f"{NUMBER} Python number"),
    ({"count_noise_multiplier": np.array(9.0)}, "count_noise_multiplier must be a Python number"),
    ({"sampling": Poisson(np.array(0.5))}, "sampling_prob must be a Python number"),
    ({"sampling": "poisson"}, "sampling must be such as"),
    ({"sampling": Poisson}, "sampling must be such as"),
    ({"rule": SimpleNamespace(l2=1.0, factors=1.0)}, RULE),
    ({"sampling": SimpleNamespace(choose=3, event=len, check=len)}, "sampling must be such as"),
    ({"batch_size": 0}, f"batch_size {WHOLE}"), ({"batch_size": 2.0}, f"batch_size {WHOLE}"),
    ({"batch_size": 9}, "batch_size must be at most dataset_size"),
    ({"dataset_size": NAN}, f"dataset_size {WHOLE}"), ({"leak": None}, "leak must be a string"),
    ({"count_noise_multiplier": NAN}, "count_noise_multiplier must be"),
    ({"count_noise_multiplier": 0.5}, "count_noise_multiplier must be above"),
    ({"steps": 0}, f"steps {WHOLE}"), ({"steps": 1.5}, f"steps {WHOLE}"),
    ({"delta": 0.0}, "delta must be"), ({"delta": 1.0}, "delta must be"),
    ({"batch_size": 1}, f"batch_size must be {DIVIDED}2, rounded, got 1"),
    ({"batch_size": 4}, f"{DIVIDED}2, rounded, got 4"),
    ({"sampling": Poisson(0.5)}, f"{DIVIDED}4, rounded, got 2"),
    ({"sampling": FixedSize(3)}, "batch_size must be 3 with sampling fixed_size of 8 records, got 2"),
    ({"sampling": FullBatch()}, "batch_size must be 8 with sampling full_batch of 8 records, got 2"),
    (PARTS, "one number with count_noise_multiplier"),
]
# fmt: on


def test_the_event_says_what_is_done():
    mech = sgd_of(1.23, 0.1, 512, 60_000)
    assert mech.event == acc.PoissonSampled(acc.Gaussian(1.23), 512 / 60_000)
    assert mech.sampler(50_000).sampling.sampling_prob == 512 / 60_000
    fixed = sgd_of(1.0, 0.1, 5, 50, sampling="fixed_size")
    assert fixed.event == acc.FixedSizeSampled(acc.Gaussian(1.0), 50, 5)
    assert sgd_of(1.0, 0.1, 50, 50, sampling="full_batch").event == acc.Gaussian(1.0)


def test_noise_follows_the_mechanism_whatever_the_sum():
    mech = sgd_of(3.0, 0.2, 10, 100)
    params = {"w": jnp.zeros(20_000)}
    tx, key = mech.privatize(), mech.sampler(100).draw().key()
    summed = jaxdp.Summed(params, mech.rule.l2(params))
    update, _ = tx.update(summed, tx.init(params), params, key=key)
    np.testing.assert_allclose(np.std(update["w"]), 3.0 * 0.2 / 10, rtol=0.03)
    assert mech.noise_std(params) == pytest.approx(3.0 * mech.l2(params) / 10)
    assert 0.2 < mech.l2(params) < 0.205


def test_a_step_is_charged_before_it_is_drawn_and_two_samplers_of_one_secret_apart():
    mech, ledger = sgd_of(1.0, 0.1, 5, 50), jaxdp.Ledger()
    sampler = mech.sampler(50, ledger=ledger)
    for _ in range(3):
        sampler.draw()
    assert ledger.steps == 3
    assert ledger.epsilon(1e-5).upper == mech.epsilon(3, 1e-5).upper
    (said,) = ledger.unverified()
    assert said.startswith("3 of 3 steps: drawn, but that jaxdp added their noise")
    mech.sampler(50, ledger=ledger).draw()  # a second run
    assert ledger.steps == 4
    one, two = mech.sampler(50), mech.sampler(50)  # without a ledger: one of its own
    one.draw()
    assert one.ledger.epsilon(1e-5).upper == mech.epsilon(1, 1e-5).upper
    assert two.ledger is not one.ledger
    # Two samplers of one secret are charged apart and draw apart.
    mech, ledger, secret = sgd_of(1.0, 0.1, 25, 50), jaxdp.Ledger(), jaxdp.Secret.new()
    one, two = (mech.sampler(50, ledger=ledger, secret=secret) for _ in range(2))
    first, second = one.draw(), two.draw()
    assert ledger.steps == 2
    assert len({entry.stream for entry in ledger.entries}) == 2
    assert not np.array_equal(first.indices, second.indices)
    assert not np.array_equal(first.key().words, second.key().words)
    with pytest.raises(AttributeError):
        one.step = 0  # nothing goes back


def test_end_to_end_epsilon_is_that_of_the_steps_taken(linear):
    params, batch, loss_fn = linear
    mech, ledger = sgd_of(1.0, 0.1, 5, 50), jaxdp.Ledger()
    tx = optax.chain(mech.privatize(), optax.sgd(0.1, momentum=0.9))
    update, state = jaxdp.compile_update(tx, donate=False), tx.init(params)
    sampler, grad_fn, data = mech.sampler(50, ledger=ledger), mech.clipped_grad(loss_fn), batch(50)
    for _ in range(6):
        summed = grad_fn(params, data, sampler.draw())
        params, state, info = update(params, state, summed)
        assert info.update_norm > 0
    assert ledger.epsilon(1e-5).upper == mech.epsilon(6, 1e-5).upper
    assert ledger.unverified() == []


def test_bad_parts_are_refused():
    good, rows = Mechanism(**GOOD), []
    for changes, words in BAD:
        rows.append((words, partial(Mechanism, **{**GOOD, **changes}), changes))
        rows.append((words, partial(dataclasses.replace, good, **changes), changes))
    numbers = {"noise_multiplier": 1.0, "l2_clip_norm": 1.0, "batch_size": 10, "dataset_size": 100}
    for words, changes in (
        ("noise_multiplier must be", {"noise_multiplier": -0.1}),
        ("l2_clip_norm must be", {"l2_clip_norm": 0.0}),
        ("got inf: to clip nothing, .* such as 1e6", {"l2_clip_norm": np.inf}),
        ("batch_size must be a whole number of at least 1, got 0", {"batch_size": 0}),
        (r"batch_size must be at most dataset_size \(100\), got 101", {"batch_size": 101}),
        ("must be one of poisson, fixed_size, full_batch", {"sampling": "shuffled"}),
        ("batch_size must be .* with sampling full_batch", {"sampling": "full_batch"}),
    ):
        rows.append((words, partial(jaxdp.dp_sgd, **{**numbers, **changes}), changes))
    all_refused(rows)
    good_too = (
        *({}, {"noise_multiplier": 0.0}, {"noise_multiplier": np.float64(1.0)}),
        *({"noise_multiplier": 1}, {"sampling": FixedSize(2)}, {"steps": 3, "delta": 1e-5}),
        *({"sampling": FullBatch(), "batch_size": 8}, {"batch_size": np.int64(2)}),
        # 2.4 records expected: no whole number says so exactly
        *({"sampling": Poisson(0.3)}, {"sampling": Poisson(0.01), "batch_size": 1}),
        {"count_noise_multiplier": 2.0},
    )
    for changes in good_too:
        assert Mechanism(**{**GOOD, **changes}).event is not None, changes
    Mechanism(**{**GOOD, "noise_multiplier": SCHEDULE})


# Before: full batches were charged as Poisson draws of a third; unverified() == [].
def test_a_sampler_draws_as_it_is_charged_and_of_as_many_records_as_were_declared():
    mech = sgd_of(1.0, 1.0, 20, 60)
    fixed = sgd_of(1.0, 0.1, 5, 50, sampling="fixed_size")
    charged = "sampling must be the one that the issuer charges"
    all_refused(
        [
            (charged, lambda: Sampler(FullBatch(), 60, 60, mech.sampler(60).issuer)),
            ("dataset_size must be the number of records", lambda: fixed.sampler(49)),
            ("ledger must be a jaxdp.Ledger", lambda: fixed.sampler(50, ledger="ledger.jsonl")),
        ]
    )


# Before: a tenth of the noise that was charged, and unverified() == [].
def test_a_kind_of_noise_makes_the_noise_that_it_is_charged_as(monkeypatch):
    kinds = {
        "tenth": NoiseKind(
            lambda z: IndependentNoise(z / 10), lambda z, rows: MatrixNoise(z / 10, rows)
        ),
        "votes": NoiseKind(type("Votes", (IndependentNoise,), {"part": "votes"})),
    }
    for name, kind in kinds.items():
        monkeypatch.setitem(NOISES, name, kind)
    sampler = sgd_of(1.0, 1.0, 5, 50, noise="tenth").sampler(50)
    in_order = mf_of(1.0, 1.0, 5, 50, "fixed_order", steps=4, strategy="identity", noise="tenth")
    votes = sgd_of(1.0, 1.0, 5, 50, noise="votes")
    all_refused(
        [
            ("noise must be of a kind that makes noise of the multiplier 1.0", sampler.draw),
            ("noise must be of a kind that makes noise of", lambda: in_order.multipliers(0)),
            (
                "noise must be of another part",
                lambda: dataclasses.replace(votes, count_noise_multiplier=3.0),
            ),
        ]
    )
    assert not sampler.ledger.entries
    assert votes.multipliers(0) == {"votes": 1.0}


def gaussian_delta(mu, eps):
    return norm.cdf(mu / 2 - eps / mu) - np.exp(eps) * norm.cdf(-mu / 2 - eps / mu)


def calibrated(eps, delta, steps, **numbers):
    numbers = {"l2_clip_norm": 1.0, "epsilon": eps, "delta": delta, "steps": steps, **numbers}
    return jaxdp.dp_sgd(**numbers).noise_multiplier


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_full_batches_meet_the_budget_and_no_more(relation):
    """Against the closed form of Balle and Wang 2018."""
    full = {"batch_size": 9, "dataset_size": 9, "sampling": "full_batch", "relation": relation}
    far = 2 if relation == "replace_one" else 1
    for eps, delta, steps in ((0.5, 1e-6, 4), (50.0, 0.4, 3), (1e-2, 1e-9, 1)):
        multiplier = calibrated(eps, delta, steps, **full)
        found = gaussian_delta(far * np.sqrt(steps) / multiplier, eps)
        assert 0.98 * delta <= found <= delta * (1 + 1e-6), eps


def test_one_sampled_step_meets_the_budget_and_no_more():
    for q, eps, delta in ((1e-6, 0.01, 1e-9), (0.5, 1.0, 1e-5), (0.9, 3.0, 0.01)):
        mu = 1 / calibrated(eps, delta, 1, batch_size=round(q * 10**6), dataset_size=10**6)
        removed = q * gaussian_delta(mu, np.log1p(np.expm1(eps) / q))
        inside = 1 + np.expm1(-eps) / q  # of one added: H(N(0) || mixture)
        added = 0.0
        if inside > 0:
            e = -np.log(inside)
            added = np.exp(eps) * q * np.exp(-e) * gaussian_delta(mu, e)
        assert max(removed, added) <= delta * (1 + 1e-6), q
        assert 0.98 * delta <= removed, q


@pytest.mark.parametrize("relation", [None, "replace_one"])
def test_a_mechanism_keeps_the_relation_of_its_budget(relation):
    budget = {"epsilon": 3.0, "delta": 1e-3, "steps": 8, "batch_size": 8, "dataset_size": 32}
    mech = jaxdp.dp_sgd(**budget, relation=relation, l2_clip_norm=1.0)
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


def test_a_trainer_tells_the_epsilon_of_the_budget_by_the_relation_of_its_sampling_or_order():
    loss = lambda params, x: jnp.sum((params * x) ** 2)  # noqa: E731
    records = np.ones((32, 2), np.float32)
    given = {"l2_clip_norm": 1.0, "batch_size": 8, "dataset_size": 32}
    replaced = acc.Relation.REPLACE_ONE
    for mech in (
        jaxdp.dp_sgd(epsilon=3.0, delta=1e-3, steps=2, relation=replaced, **given),
        jaxdp.dp_sgd(epsilon=3.0, delta=1e-3, steps=2, sampling="fixed_size", **given),
    ):
        trainer = jaxdp.Trainer(loss, mech, optax.sgd(0.1), records)
        assert len(list(trainer.batches(2))) == 2
        bound = trainer.epsilon()
        assert (bound.relation, mech.neighbours) == (replaced, replaced)
        assert 2.9 < bound.upper <= 3.0
    fixed = sgd_of(1.0, 0.1, 5, 50, sampling="fixed_size")
    assert fixed.neighbours is acc.Relation.REPLACE_ONE
    assert fixed.epsilon(3, 1e-3).relation is acc.Relation.REPLACE_ONE
    in_order = partial(mf_of, 2.0, 1.0, 5, 50, "fixed_order", steps=10, strategy="identity")
    ordered, strict = in_order(), in_order(relation="replace_one")
    assert ordered.neighbours is acc.Relation.REPLACE_SPECIAL
    assert strict.epsilon(10, 1e-3).upper > ordered.epsilon(10, 1e-3).upper


# Names that other libraries have, and what is said of each.
PEERS = [
    ({"max_grad_norm": 1.0}, "has no argument max_grad_norm; here it is l2_clip_norm"),
    ({"epochs": 20}, r"steps=4688, which is epochs \* dataset_size / batch_size"),
    ({"epochs": "20"}, r"; steps is epochs \* dataset_size"),
    ({"noise_std": 3.0}, r"noise_multiplier=6, which is noise_std / l2_clip_norm"),
    ({"sample_rate": 0.01}, r"batch_size=600, which is sample_rate \* dataset_size"),
    ({"target_epsilon": 3.0}, "here it is epsilon"),
    ({"target_delta": 1e-5}, "here it is delta"),
    ({"num_examples": 9}, "here it is dataset_size"),
    ({"lr": 0.1}, r"belongs to jaxdp\.Trainer\(loss_fn, mechanism, optax"),
    ({"step": 10}, "did you mean steps"),
    ({"quite_another": 10}, "no argument quite_another. It takes noise_multiplier, "),
]


def test_what_other_libraries_call_otherwise_is_told():
    given = {"batch_size": 256, "dataset_size": 60_000, "l2_clip_norm": 0.5}
    all_refused(
        [(words, lambda more=more: jaxdp.dp_sgd(**given, **more)) for more, words in PEERS]
        + [
            (r"by name, got 3\.0, 1e-05, 10: an epsilon", lambda: jaxdp.dp_sgd(3.0, 1e-5, 10)),
            (r"by name, got 3\.0: .*dp_mf\(epsilon", lambda: jaxdp.dp_mf(3.0)),
        ],
        TypeError,
    )
    infinite = {"epsilon": float("inf"), "delta": 1e-5, "steps": 3, **given}
    without = r"got inf\. .*dp_sgd\(noise_multiplier=0"
    all_refused(
        [
            (without, lambda: jaxdp.dp_sgd(**infinite)),
            (without, lambda: jaxdp.dp_mf(**infinite), "correlated"),
            ("models must be a whole", lambda: jaxdp.dp_sgd(**{**infinite, "epsilon": 3.0}, models=0)),
            ("models .* belong to a budget", lambda: jaxdp.dp_sgd(noise_multiplier=1.0, **given, models=2)),
        ]
    )  # fmt: skip
