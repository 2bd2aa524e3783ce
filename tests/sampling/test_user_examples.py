"""Users whose records are drawn one by one: the source, what is charged, and an audit of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.accounting.events import of_users as of_users_alone
from jaxdp.audit import advice, charged
from jaxdp.audit.bounds import ErrorCounts, epsilon_bound
from jaxdp.audit.copies import find_copies
from jaxdp.clipping import user_loss
from jaxdp.optimizers.algorithm import as_algorithm
from jaxdp.sampling import ExampleLevel, Poisson, user_examples, users
from tests.laws import is_binomial
from tests.ledger.small import trained
from tests.mechanisms import sgd_of
from tests.refusing import refused
from tests.sampling.fakes import ask

IDS = np.array(["b", "a", "b", "c", "b", "a", "b", "b"])
DATA = {"x": np.arange(8, dtype=np.float32)}
RNG = np.random.default_rng(0)
N, K = 150, 3  # records that are kept, at most so many of one of 50 users
OWNERS = np.repeat(np.arange(50), 5)
TABLE = {"x": RNG.normal(size=(250, 3)).astype(np.float32)}


def loss_fn(w, record):
    return jnp.square(record["x"] @ w - 1.0)


class Wrapped:
    """A source around another, that passes on how many records of a user an index holds."""

    on_device = False

    def __init__(self, source):
        self.source, self.gather, self.example = source, source.gather, source.example
        self.records_per_user = getattr(source, "records_per_user", None)

    def __len__(self):
        return len(self.source)


def of_users(batch=30, noise=1.0, **options):
    return sgd_of(noise, 1.0, batch, N, ExampleLevel(batch / N, K), **options)


def test_of_every_user_the_same_records_are_kept_as_for_whole_users_and_by_these_alone():
    source = user_examples(DATA, IDS, 3)
    assert (len(source), source.examples_per_user) == (6, 3)
    found = ask(source, *range(6))["x"].astype(int)
    whole = users(DATA, IDS, 3)
    rows = ask(whole, 0, 1, 2)
    assert sorted(found) == sorted(rows.records["x"][rows.present].astype(int))
    assert IDS[found].tolist() == sorted(IDS[found])
    assert IDS[ask(source.one_of_each(), 0, 1, 2)["x"].astype(int)].tolist() == ["a", "b", "c"]
    # Other users change nothing: neither which are kept, nor of whom.
    for others in ("b", "bc"):
        here = np.isin(IDS, list(others))
        alone = user_examples({"x": DATA["x"][here]}, IDS[here], 3)
        kept = ask(alone, *range(len(alone)))["x"].astype(int)
        assert kept.tolist() == [i for i in found if IDS[i] in others]
    masked = source.gather(np.array([5, 0]), np.array([False, True]))["x"]
    assert masked.tolist() == [0.0, float(found[0])]
    named = user_examples({**DATA, "who": IDS}, "who", 3)
    assert list(named.example) == ["x"]
    refused("indices must lie within", source.gather, np.array([6]), np.array([True]))
    refused("records_per_user must be a whole number", user_examples, DATA, IDS, 0)
    refused("user_ids must name one user for each record", user_examples, DATA, IDS[:-1], 2)


def test_training_charges_users_and_another_unit_is_refused():
    source = user_examples(TABLE, OWNERS, K)
    mechanism = of_users()
    assert mechanism.records_per_user == K
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), source)
    trained(trainer, 4, params=jnp.zeros(3))
    (entry,) = trainer.ledger.entries
    assert entry.event == acc.ExamplesPerUser(acc.Gaussian(1.0), 0.2, K)
    assert trainer.ledger.unverified() == []
    told = trainer.epsilon(1e-5).upper
    record = sgd_of(1.0, 1.0, 30, N).epsilon(4, 1e-5).upper
    assert record < told < acc.group_epsilon(acc.Repeated(acc.Gaussian(1.0), 4), 1e-5, K).upper
    gridded = dataclasses.replace(mechanism, noise="grid")
    assert gridded.event.event == entry.event
    budget = {"epsilon": 2.0, "delta": 1e-5, "steps": 20, "l2_clip_norm": 1.0}
    sizes = {"batch_size": 30, "dataset_size": N}
    made = jaxdp.dp_sgd(**budget, **sizes, sampling=ExampleLevel(0.2, K))
    assert 1.9 < made.epsilon(20, 1e-5).upper <= 2.0

    def on(source, mechanism, loss=loss_fn):
        return jaxdp.Trainer(loss, mechanism, optax.sgd(0.1), source)

    # A unit that is not the one charged for, in every direction.
    whole = sgd_of(1.0, 1.0, 10, 50, records_per_user=K)
    unlike = "sampling must be jaxdp.sampling.ExampleLevel for jaxdp.sampling.user_examples"
    refused(unlike, on, source, sgd_of(1.0, 1.0, 30, N, records_per_user=K))
    refused(unlike, on, users(TABLE, OWNERS, K), of_users(), user_loss(loss_fn))
    on(users(TABLE, OWNERS, K), whole, user_loss(loss_fn))
    wrapped = Wrapped(source)  # what knows no better is a source of records
    for one in (sgd_of(1.0, 1.0, 30, N, records_per_user=K), mechanism):
        refused("expected None, got 3", on, wrapped, one)
    refused("expected 3, got None", on, source, sgd_of(1.0, 1.0, 30, N))
    refused("expected 2, got 3", on, user_examples(TABLE, OWNERS, 2), mechanism)
    refused("expected None, got 3", on, TABLE, mechanism)
    refused("that of the sampling", of_users, records_per_user=2)
    with pytest.raises(acc.UnsupportedEventError, match="two users point apart"):
        mechanism.epsilon(4, 1e-5, acc.Relation.REPLACE_ONE)
    made, change = as_algorithm(mechanism, optax.sgd(0.1)), dataclasses.replace
    refused("energy must be None", change, made, energy=sgd_of(1.0, 1.0, 2, N))
    mf = jaxdp.dp_mf(noise_multiplier=1.0, l2_clip_norm=1.0, **sizes, steps=4, bands=1)
    sampled = {"sampling": ExampleLevel(0.2, K)}
    refused("strategy must be given with", dataclasses.replace, mf, **sampled)


def test_a_ledger_with_releases_of_records_tells_no_epsilon_of_a_user():
    source, book = user_examples(TABLE, OWNERS, K), jaxdp.Ledger()
    records = {"x": TABLE["x"][source.indices]}

    def trainer(mechanism, data):
        return jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), data, ledger=book)

    user = trainer(of_users(), source)
    trained(user, 1, params=jnp.zeros(3))
    assert user.epsilon(1e-5).upper < np.inf
    one = trainer(sgd_of(1.0, 1.0, 30, N), records)
    trained(one, 1, params=jnp.zeros(3))
    assert one.epsilon(1e-5).upper < np.inf  # what a user's releases say of a record is no more
    refused("whose privacy unit is a user", user.epsilon, 1e-5)
    release, mine = acc.PoissonSampled(acc.Gaussian(1.0), 0.2), of_users().event
    hidden = acc.Composed((mine, acc.Repeated(release, 2)))
    parts = acc.Parallel(mine, {"a": release})
    told = {mine: True, acc.PerUser(release, 2): True, release: False, hidden: False, parts: False}
    told[acc.GridNoise(mine, 1e-9)] = told[acc.NonPrivate("a leak")] = True
    assert {each: of_users_alone(each) for each in told} == told


def test_a_run_a_check_a_diagnosis_and_advice_keep_the_user(tmp_path):
    source, options = user_examples(TABLE, OWNERS, K), {"params": jnp.zeros(3), "delta": 1e-3}
    run = jaxdp.Run(tmp_path / "r", loss_fn, of_users(), optax.sgd(0.1), source, **options)
    run.fit(3)
    page = (tmp_path / "r/report.md").read_text()
    assert "one user, of whom at most 3 records are in the data" in page
    assert "With one user added or removed, the probability" in page
    assert "30 of 150 records expected a step" in page
    assert "More than one record per person" not in page
    for words in (
        "of the users that were not used",
        "Telling whether a user was used",
        "how far, at most, one user can move",
        "for a person who is k users in the data, epsilon is k times",
    ):
        assert words in page
        assert words in (tmp_path / "r/report.html").read_text()
    assert run.unverified() == []
    # Alike records of one user are the user's, of two users not.
    whose = {"who": OWNERS.astype(np.int32)}
    same = lambda record: int(record["who"])  # noqa: E731
    assert find_copies(user_examples(whose, OWNERS, K), same) == []
    assert find_copies(user_examples(whose, np.arange(250), K), same) != []
    budget = {"epsilon": 2.0, "delta": 1e-3, "steps": 20, "l2_clip_norm": 1.0}
    mechanism = jaxdp.dp_sgd(**budget, batch_size=30, dataset_size=N, sampling=ExampleLevel(0.2, K))
    larger = advice.with_budget(mechanism, batch_size=60)
    assert larger.sampling == ExampleLevel(0.4, K)
    assert not [each for each in advice.outlooks(mechanism) if "dp_mf" in str(each)]
    release = charged.plan(mechanism, jaxdp.Ledger(), 60, 1.0)
    assert release.mechanism.sampling == ExampleLevel(0.4, K)
    assert acc.epsilon(release.mechanism.event, 1e-3).upper <= 1.0


def test_a_user_of_aligned_records_is_found_out_nearly_as_often_as_the_bound_allows():
    """Two worlds, by jaxdp's own draws, clipping and noise: near the bound, never above it."""
    k, rate, steps, z, runs, others = 4, 0.3, 2, 2.5, 40_000, 12
    count = others + k
    rule = ExampleLevel(rate, k)
    mechanism = sgd_of(z, 1.0, round(rate * count), count, rule)
    chain = optax.chain(mechanism.clip_and_sum(), mechanism.privatize())
    # The user's lie last, in one direction, longer than the clip norm; the others' are zero.
    records = jnp.concatenate([jnp.zeros(others), jnp.full(k, 7.0)])

    def released(mask, key):
        grads = {"w": jnp.where(mask, records, 0.0)[:, None]}
        params, of_step = {"w": jnp.zeros(1)}, mechanism.simulated_key(key)
        found, _ = chain.update(grads, chain.init(params), params, mask=mask, key=of_step)
        return found["w"][0] * mechanism.batch_size

    rng, law = np.random.default_rng(20_261_127), mechanism.event._mixture
    shifts, chances = np.array(law.sensitivities), np.array(law.probabilities)
    scores, drawn = [], 0
    for there in (False, True):
        masks = np.zeros((runs * steps, count), bool)
        for row in masks:
            row[rule.choose(rng, others + k * there)] = True
        drawn += masks[:, others:].sum()
        keys = jax.random.split(jax.random.key(7_301 + there), runs * steps)
        sums = np.asarray(jax.jit(jax.vmap(released))(masks, keys), np.float64)
        loss = np.log(np.exp((sums[:, None] * shifts - shifts**2 / 2) / z**2) @ chances)
        scores.append(loss.reshape(runs, steps).sum(axis=1))
    assert is_binomial(drawn, runs * steps * k, rate)
    # One threshold of the losses, for a seed that was not tried before: nothing to correct.
    delta = 1e-2
    alarms, hits = (int(np.sum(each > 1.7)) for each in scores)
    most = epsilon_bound(ErrorCounts(alarms, runs, runs - hits, runs), delta, 0.95)
    upper = mechanism.epsilon(steps, delta).upper
    assert 0.75 * upper < most <= upper, (most, upper)
    # What is told of a record, or of whole users at the same noise, is another number.
    assert (
        most
        > sgd_of(z, 1.0, mechanism.batch_size, count, Poisson(rate)).epsilon(steps, delta).upper
    )
