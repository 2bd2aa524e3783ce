"""Weighted Poisson sampling: laws of its draws, what it costs, and audits of either class."""

import dataclasses
import hashlib
import itertools
import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import jaxdp
from benchmarks.sampling_audit import Case, audited, record_less, record_more
from jaxdp import accounting as acc
from jaxdp.devices import processes
from jaxdp.sampling import WeightedPoisson, as_source
from tests.laws import is_binomial
from tests.refusing import refused

N, LARGEST, DRAWS = 60, 0.4, 4_000
ADD, REPLACE, ZEROED = acc.Relation
LABELS = (np.arange(N) % 3).astype(np.int32)
RATES = np.array([0.05, 0.4, 0.13])


def by_label(record):
    return RATES[record["y"]]


RULE = WeightedPoisson(by_label, LARGEST)
DATA = {"y": LABELS, "x": np.ones((N, 2), np.float32)}


def mechanism(rule=RULE, batch_size=12, **options):
    return jaxdp.dp_sgd(
        noise_multiplier=1.5,
        l2_clip_norm=1.0,
        batch_size=batch_size,
        dataset_size=N,
        sampling=rule,
        **options,
    )


def loss_fn(params, example):
    return params @ example["x"]


def test_every_record_has_its_own_rate_and_no_other_whoever_stands_beside_it():
    source = as_source(DATA)
    shares = RULE.read(source, 12)
    taken, first = np.zeros((DRAWS, N), bool), np.zeros(N)
    for key in range(DRAWS):
        rng = np.random.Generator(np.random.Philox(key=[5, key]))
        chosen = RULE.choose(rng, N, shares)
        assert len(np.unique(chosen)) == len(chosen)
        taken[key, chosen] = True
        first[chosen[:1]] += 1
    for label, rate in enumerate(RATES):
        count = taken[:, label == LABELS].sum()
        assert is_binomial(count, DRAWS * N // 3, rate)
        assert not is_binomial(count, DRAWS * N // 3, RATES.mean())
    assert all(
        is_binomial(count, DRAWS, RATES[label])
        for count, label in zip(taken.sum(0), LABELS, strict=True)
    )
    # Pairs are independent, and within a class everyone is as likely to stand first.
    for i, j in ((1, 4), (0, 1), (2, 58)):
        both = RATES[LABELS[i]] * RATES[LABELS[j]]
        assert is_binomial((taken[:, i] & taken[:, j]).sum(), DRAWS, both)
    for label in range(3):
        assert stats.chisquare(first[label == LABELS]).pvalue > 1e-6


def test_a_probability_is_rounded_down_and_what_is_none_is_clipped_to_the_range():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.random(200) * 0.3, 2.0 ** -rng.integers(1, 90, 50), [0.3]])

    def of(value):
        (share,) = WeightedPoisson(lambda _: value, 0.3, "p").read(as_source(np.ones(1)), None)
        return int(share)

    for value in values:
        exact = Fraction(float(value)) / Fraction(0.3)
        below = min(exact, Fraction(1)) - Fraction(of(value), 2**63)
        assert 0 <= below < Fraction(1, 2**63)
    assert [of(p) for p in (math.nan, -1.0, 0.0, -math.inf)] == [0] * 4
    assert [of(p) for p in (0.3, 0.4, 7, math.inf, np.float32(1))] == [2**63] * 5


def test_each_record_is_read_by_itself_before_anything_is_charged():
    seen = []

    def watched(record):
        seen.append((record["x"].shape, int(record["y"])))
        if fails:
            raise KeyError("no such class")
        return RATES[record["y"]]

    for fails in (True, False):
        made = jaxdp.Trainer(
            loss_fn, mechanism(WeightedPoisson(watched, 0.4)), optax.sgd(1.0), DATA
        )
        state = made.init(jnp.zeros(2))
        if fails:
            refused("no such class", made.batches, 2, error=KeyError)
            assert made.ledger.steps == 0
    seen.clear()
    for batch in made.batches(3):
        state, _ = made.step(state, batch)
    assert seen[:N] == [((2,), int(label)) for label in LABELS]
    assert seen[N:] == seen[:N][::-1]  # once more, the other way round
    assert any("probability of a record, watched" in line for line in made.unverified())
    assert any("and stays the same, was not verified" in line for line in made.unverified())
    # A divisor that is not that of the draws: loudly, and before the first one.
    for size in (5, 30):
        wrong = jaxdp.Trainer(loss_fn, mechanism(batch_size=size), optax.sgd(1.0), DATA)
        wrong.init(jnp.zeros(2))
        refused("batch_size must be the expected number", wrong.batches, 1)
        assert wrong.ledger.steps == 0
    # In a loop of one's own.
    sampler = mechanism().sampler(N, source=as_source(DATA))
    assert sampler.draw().mask.sum() == len(set(sampler.drawn(0).indices[sampler.drawn(0).mask]))
    refused("source must be the records", mechanism().sampler, N)
    refused("source must be the records", mechanism().sampler, N, source=as_source(np.ones(3)))


@pytest.mark.parametrize("kind", ["counts", "draws", "one over the class's count"])
def test_a_probability_that_sees_other_records_is_refused_before_a_charge(kind):
    rng, seen = np.random.default_rng(0), []

    def probability(record):
        seen.append(int(record["y"]))
        record["x"][:] = np.nan  # its own copy: the source keeps what it has
        count = {"counts": len(seen), "draws": rng.random() * 9}.get(kind, seen.count(seen[-1]))
        return 0.4 / (1 + count)

    made = jaxdp.Trainer(
        loss_fn, mechanism(WeightedPoisson(probability, 0.4), 2), optax.sgd(1.0), DATA
    )
    made.init(jnp.zeros(2))
    refused("follow from the record alone", made.batches, 2)
    assert made.ledger.steps == 0
    assert (DATA["x"] == 1).all()


def test_a_run_that_is_refused_has_charged_nothing(tmp_path):
    def fails(record):
        raise KeyError("no such class")

    for name, rule in {"divisor": RULE, "function": WeightedPoisson(fails, 0.4)}.items():
        run = jaxdp.Run(
            tmp_path / name,
            loss_fn,
            mechanism(rule, batch_size=30),
            optax.sgd(1.0),
            DATA,
            params=jnp.zeros(2),
        )
        refused("Nothing was drawn|no such class", run.fit, 4, error=(ValueError, KeyError))
        assert '"event"' not in (tmp_path / name / "ledger.jsonl").read_text()


def test_processes_that_disagree_do_not_tell_what_they_read(monkeypatch):
    said = []
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "index", lambda: 1)
    monkeypatch.setattr(processes, "send", lambda key, text: said.append(text))
    monkeypatch.setattr(processes, "receive", lambda key: "probabilities must be the same")
    digest = hashlib.blake2b(RULE.read(as_source(DATA), 12).tobytes()).hexdigest()
    # Which classes all have is a function of the records: no message holds a hash without a key.
    with pytest.raises(ValueError, match=r"must be the same.*not told") as found:
        processes.agree(probabilities=lambda: digest)
    assert digest not in f"{found.value}{said}"


def test_the_words_that_keep_a_record_are_compared_exactly():
    class Words:
        """Draws all records in order, and hands out these words."""

        words = np.array([0, 1, 2, 3, 2**63, 2**64 - 2, 2**64 - 1], np.uint64)
        bit_generator = property(lambda self: self)

        def random_raw(self, size):
            return self.words[:size]

        def permutation(self, size):
            return np.arange(size)

    rule = WeightedPoisson(by_label, 1.0)
    for share, kept in {0: 0, 1: 2, 2: 4, 2**63 - 1: 5, 2**63: 7}.items():
        assert len(rule.choose(Words(), 7, np.full(7, share, np.uint64))) == kept
    # Of a largest that is no float, or a subnormal one, no share is above all.
    for largest in (np.float32(0.1), np.float16(0.1), Fraction(1, 3), 1, 5e-324, 1e-310):
        for value in (largest, float(largest) * (1 + 2e-8), np.nextafter(float(largest), 2), 1e300):
            rule = WeightedPoisson(lambda _, value=value: value, largest, "p")
            assert int(rule.read(as_source(np.ones(1)), None)[0]) == 2**63
            assert rule.event(acc.Gaussian(1.0), 1).sampling_prob == rule.largest


def test_a_user_is_one_record():
    ids, seen = np.arange(N) // 2, []

    def of_user(user):
        seen.append(user.present.shape)
        return 0.4 if (user.records["y"][user.present] == 1).any() else 0.1

    users = jaxdp.sampling.users(DATA, ids, records_per_user=3)
    made = jaxdp.dp_sgd(
        noise_multiplier=1.0,
        l2_clip_norm=1.0,
        batch_size=9,
        dataset_size=30,
        records_per_user=3,
        sampling=WeightedPoisson(of_user, 0.4),
    )
    trainer = jaxdp.Trainer(jaxdp.clipping.user_loss(loss_fn), made, optax.sgd(1.0), users)
    trainer.step(trainer.init(jnp.zeros(2)), next(trainer.batches(1)))
    assert seen == [(3,)] * 60
    assert trainer.ledger.reserved[0].event == acc.PerUser(
        acc.WeightedPoissonSampled(acc.Gaussian(1.0), 0.4), 3
    )


def test_what_it_is_named_and_what_is_refused():
    assert repr(RULE) == "WeightedPoisson(largest=0.4, label='by_label')"
    assert WeightedPoisson(lambda _: 0.1, 0.4, "a") != WeightedPoisson(lambda _: 0.1, 0.4, "b")
    refused("with a label", WeightedPoisson, lambda _: 0.1, 0.4)
    refused("probability must be a function", WeightedPoisson, 0.1, 0.4)
    refused("largest must be", WeightedPoisson, by_label, 1.5)
    refused("largest must be", WeightedPoisson, by_label, 0.0)
    given = {"strategy": jaxdp.noise.identity(4)}
    refused("CyclicPoisson or FixedOrder", dataclasses.replace, mechanism(), **given)


def test_epsilon_is_that_of_the_largest_and_by_class_stands_beside_it():
    made = jaxdp.dp_sgd(
        noise_multiplier=1.5,
        l2_clip_norm=1.0,
        batch_size=390,
        dataset_size=20_000,
        sampling=WeightedPoisson(by_label, 0.2),
    )
    # Of dp_accounting 0.6.0, PLDAccountant, ADD_OR_REMOVE_ONE and (the last) REPLACE_ONE.
    of_peer = {"the run": 14.102323, "rare": 14.102323, "common": 0.496036, "mean": 1.027654}
    classes = {"rare": 0.2, "common": 0.01, "mean": 0.0195}
    for relation in (None, ADD, ZEROED):
        found = made.epsilon_by_class(300, 1e-5, classes, relation)
        assert list(found) == list(of_peer)
        for name, peer in of_peer.items():
            assert found[name].upper == pytest.approx(peer, rel=1e-4)
            assert found[name].lower <= peer
    assert made.epsilon(300, 1e-5) == found["the run"]
    assert made.epsilon(300, 1e-5, REPLACE).upper == pytest.approx(28.660796, rel=1e-4)
    event = made.total(300)
    assert acc.events.from_dict(acc.events.to_dict(event)) == event
    assert "of its own, at most 0.2" in event.describe()
    plain = acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.5), 0.2), 300)
    for relation in acc.Relation:
        assert acc.epsilon(event, 1e-5, relation, "rdp") == acc.epsilon(
            plain, 1e-5, relation, "rdp"
        )
    assert acc.group_epsilon(event, 1e-5, 2) == acc.group_epsilon(plain, 1e-5, 2)
    refused("by class is defined for", made.epsilon_by_class, 9, 1e-5, classes, REPLACE)
    refused("at most largest", made.epsilon_by_class, 9, 1e-5, {"a": 0.3})
    refused("each of a class of its own", made.epsilon_by_class, 9, 1e-5, {"the run": 0.1})
    plain = dataclasses.replace(made, sampling=jaxdp.sampling.Poisson(0.0195))
    refused("by class is defined for", plain.epsilon_by_class, 9, 1e-5, classes)


def test_the_largest_probability_dominates_all_smaller_ones_by_brute_force():
    """H_γ of one step on the line, by integration, for two records of unlike probabilities."""
    z, largest, x = 0.8, 0.4, np.linspace(-9.0, 9.0, 20_001)
    width = x[1] - x[0]

    def law(q, c):
        return (1 - q) * stats.norm.pdf(x, 0, z) + q * stats.norm.pdf(x, c, z)

    event = acc.WeightedPoissonSampled(acc.Gaussian(z), largest)
    rates, means = (0.0, 0.1, 0.3, 0.4), (-1.0, -0.4, 0.0, 0.7, 1.0)
    worst = dict.fromkeys(itertools.product((ADD, REPLACE), (0.05, 0.3, 1.0)), 0.0)
    for q, c, other, d in itertools.product(rates, means, rates, means):
        one, two = law(q, c), law(other, d)
        for relation, epsilon in worst:
            if relation is ADD and other:
                continue
            for p, r in ((one, two), (two, one)):
                found = width * np.maximum(p - math.exp(epsilon) * r, 0).sum()
                worst[relation, epsilon] = max(worst[relation, epsilon], found)
    for (relation, epsilon), found in worst.items():
        bound = acc.delta(event, epsilon, relation)
        assert found <= bound.upper * (1 + 1e-6)
        assert found >= bound.lower * (1 - 1e-6)  # and the largest attains it
    # Which class she is of is a replacement, and costs more than what is told of adding one.
    moved = width * np.maximum(law(largest, 1.0) - math.exp(0.3) * law(0.1, -1.0), 0).sum()
    assert acc.delta(event, 0.3, ADD).upper < moved <= acc.delta(event, 0.3, REPLACE).upper
    # A person of a class has her own rate's, and at the mean rate's it would be too low.
    for q in rates[1:]:
        own = acc.delta(acc.PoissonSampled(acc.Gaussian(z), q), 0.3).upper
        found = width * np.maximum(law(q, 1.0) - math.exp(0.3) * law(0, 0), 0).sum()
        assert found == pytest.approx(own, rel=1e-5)


SMALL = {"steps": 5, "delta": 0.01, "runs": 150, "records": 20, "rows": 20}


def test_audited_a_record_of_the_largest_class_has_more_than_the_mean_rate_would_say():
    case = Case(WeightedPoisson(record_more, 0.9), 1.2, threshold=1.0, batch=2, **SMALL)
    proven = case.mechanism().epsilon(case.steps, case.delta).upper
    mean = acc.epsilon(case.poisson(), case.delta).upper
    assert mean < audited(case) <= proven


def test_audited_a_record_of_a_small_class_keeps_its_own_epsilon():
    case = Case(WeightedPoisson(record_less, 0.9), 0.5, threshold=0.5, batch=17, **SMALL)
    found = case.mechanism().epsilon_by_class(case.steps, case.delta, {"own": 0.1})
    assert 0.3 < audited(case) <= found["own"].upper < found["the run"].upper / 2
