"""A diagnosis names mistakes, and numbers where their price is paid: public, charged or looked at."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

import jaxdp
from jaxdp import accounting as acc
from jaxdp.audit import Diagnosis, charged, diagnosis
from jaxdp.audit.examined import Examined
from jaxdp.audit.findings import Finding
from jaxdp.audit.gradient_numbers import norm_bins
from jaxdp.clipping.losses import user_loss
from jaxdp.sampling import as_source, users
from tests.refusing import all_refused, refused

X, Y = load_digits(return_X_y=True)
DATA = {"x": (X / 16).astype(np.float32), "y": Y.astype(np.int32)}
SIZE, DELTA = len(X), 1e-5
PARAMS = {"w": np.full((64, 10), 0.01, np.float32)}
MECHANISM = jaxdp.dp_sgd(
    epsilon=3.0, delta=DELTA, steps=20, l2_clip_norm=1.0, batch_size=200, dataset_size=SIZE
)


def loss_fn(params, example):
    logits = example["x"] @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])


def label(record):
    return int(record["y"])


diagnose = functools.partial(jaxdp.diagnose, loss_fn, PARAMS, DATA, MECHANISM, optax.sgd(0.5))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Parts that have tests of their own: what a diagnosis does with them is looked at here."""
    found = [Finding("zero", "gradients are zero", "model.py:1", count=(3, 512), weight=0.5)]
    monkeypatch.setattr(diagnosis, "find_broken", lambda e: found)
    monkeypatch.setattr(diagnosis, "find_copies", lambda *args: [])
    monkeypatch.setattr(diagnosis, "rehearse", lambda e: "trained")
    monkeypatch.setattr(diagnosis, "find_in_rehearsal", lambda r: [])


def test_without_consent_there_are_mistakes_and_no_number():
    found = diagnose()
    assert [(f.kind, f.count, f.weight) for f in found.broken] == [("zero", None, 0.0)]
    assert found.numbers == ""
    assert not found.ok
    for page in (str(found), repr(found)):
        assert page.startswith("SENSITIVE: for the owner of the records. 1 broken")
        assert "BROKEN, zero (model.py:1)" in page
        assert "512" not in page
        assert "No numbers" in page


def test_public_records_give_numbers_and_cost_nothing():
    found = diagnose(public={"x": DATA["x"][:200], "y": DATA["y"][:200]})
    assert "gradients of 200 records" in found.numbers
    assert "cost nothing" in found.cost
    assert found.broken[0].count is None  # it was seen in the private ones


def test_looking_is_said_for_good_before_anything_is_seen(tmp_path):
    path = tmp_path / "ledger.jsonl"

    def stops(params, example):
        assert jaxdp.Ledger(path).unverified() == [diagnosis.LOOKED]
        raise KeyError("the user's own")

    with pytest.raises(KeyError):
        jaxdp.diagnose(stops, PARAMS, DATA, MECHANISM, ledger=path, look=True)
    assert jaxdp.Ledger(path).unverified() == [diagnosis.LOOKED]
    ledger = jaxdp.Ledger(path)
    found = diagnose(ledger=ledger, look=True)
    assert found.broken[0].count == (3, 512)
    assert "in 3 of the 512" in str(found)
    assert f"gradients of {512} records" in found.numbers
    assert not ledger.entries
    ledger.close()


def test_a_charged_diagnosis_costs_what_it_says():
    ledger = jaxdp.Ledger()
    found = diagnose(ledger=ledger, groups=10)
    (entry,) = ledger.entries
    assert (entry.steps, entry.source, entry.note) == (1, "sampler", charged.NOTE)
    assert ledger.unverified() == []
    alone = ledger.epsilon(DELTA).upper
    assert 0.099 < alone <= 0.1
    # The steps that are planned are counted with it.
    both = acc.Composed((MECHANISM.total(20), entry.event))
    before, after = MECHANISM.epsilon(20, DELTA).upper, acc.epsilon(both, DELTA).upper
    assert f"epsilon {alone:.3g} alone" in found.cost
    assert f"{before:.3f} becomes {after:.3f}" in found.cost
    assert "about" in found.numbers
    # What is broken has no number of the records: it was seen without noise.
    assert found.broken[0].count is None
    # On a ledger that was charged, these are what it holds.
    release = charged.plan(MECHANISM, ledger, 512, 0.1)
    twice = acc.Composed((entry.event, entry.event))
    assert (release.before, release.after) == (alone, acc.epsilon(twice, DELTA).upper)


def nearly_exact(mechanism=MECHANISM, data=DATA, group=label, groups=10, loss=loss_fn, **options):
    """The numbers of a release of all records with next to no noise."""
    ledger, source = jaxdp.Ledger(), as_source(data)
    release = charged.plan(mechanism, ledger, len(source), 0.1)
    one = dataclasses.replace(release.mechanism, noise_multiplier=1e-4)
    e = Examined(mechanism.clipped_grad(loss), PARAMS, mechanism, None, None)
    release = dataclasses.replace(release, mechanism=one)
    return charged.measure_noisily(release, e, source, ledger, group, groups, options)


def test_the_release_is_of_the_clipped_gradients_and_their_norms():
    found = nearly_exact()
    grads = jax.vmap(jax.grad(loss_fn), (None, 0))(PARAMS, jax.tree.map(jnp.asarray, DATA))["w"]
    norms = jnp.linalg.norm(grads.reshape(SIZE, -1), axis=1)
    wanted = np.zeros_like(found.counts)
    np.add.at(wanted, (DATA["y"], np.asarray(norm_bins(norms, found.edges))), 1)
    np.testing.assert_allclose(found.counts, wanted, atol=0.1)
    clipped = grads * jnp.minimum(1.0, 1.0 / norms)[:, None, None]
    own = float(jnp.sum(clipped**2)) / SIZE**2  # each record with itself
    wanted = (float(jnp.sum(clipped.mean(0) ** 2)) - own) ** 0.5
    assert found.mean.norm == pytest.approx(wanted, abs=5e-4)
    assert found.mean.parameters == 640


def test_a_record_adds_at_most_the_clip_norm_whatever_the_histogram_is(monkeypatch):
    some = {"x": DATA["x"][:100], "y": DATA["y"][:100]}
    mechanism = jaxdp.dp_sgd(
        noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=100, dataset_size=100
    )
    mechanism = dataclasses.replace(mechanism, delta=DELTA)
    monkeypatch.setattr(charged, "_HALF", 70.0)  # a hundred times too long
    found = nearly_exact(mechanism, some, None, 1)
    assert 0.5 * 100 < found.counts.sum() * 70 <= 100


def test_records_without_a_group_or_a_gradient_stop_nothing():
    data = {"x": DATA["x"][:300].copy(), "y": DATA["y"][:300]}
    data["x"][:30] = np.nan
    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=DELTA, steps=20, l2_clip_norm=1.0, batch_size=100, dataset_size=300
    )

    def group(record):
        if record["y"] == 3:
            raise RuntimeError("a record that stops its reader")
        return int(record["y"])  # of which 5 and more are no group

    found = nearly_exact(mechanism, data, group, 5)
    assert found.counts.sum(1) == pytest.approx(
        [np.sum(data["y"] == each) * (each != 3) for each in range(5)], abs=0.1
    )
    kept = np.isin(data["y"][:30], [0, 1, 2, 4])
    assert found.counts[:, 0].sum() == pytest.approx(kept.sum(), abs=0.1)


def test_the_charge_holds_under_the_mechanisms_relation_and_for_users():
    fixed = jaxdp.dp_sgd(
        noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=200, dataset_size=SIZE,
        sampling="fixed_size",
    )  # fmt: skip
    fixed = dataclasses.replace(fixed, delta=DELTA)
    one = charged.plan(fixed, jaxdp.Ledger(), 512, 0.1).mechanism
    assert one.neighbours is acc.Relation.REPLACE_ONE
    assert acc.epsilon(one.event, DELTA, acc.Relation.REPLACE_ONE).upper <= 0.1

    some = {"x": DATA["x"][:300], "y": DATA["y"][:300]}
    source = users(some, np.arange(300) // 3, 2)
    of_users = jaxdp.dp_sgd(
        noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=20, dataset_size=100, records_per_user=2
    )
    of_users = dataclasses.replace(of_users, delta=DELTA)
    ledger = jaxdp.Ledger()
    found = jaxdp.diagnose(user_loss(loss_fn), PARAMS, source, of_users, ledger=ledger, epsilon=1.0)
    assert isinstance(ledger.entries[0].event, acc.PerUser)
    assert "about" in found.numbers
    refused("got one with records beside users", diagnose, ledger=ledger)


def test_refusals_come_before_anything_is_charged():
    ledger, other = jaxdp.Ledger(), jaxdp.dp_sgd(
        noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=200, dataset_size=SIZE
    )  # fmt: skip

    def secretive(record):
        raise RuntimeError(f"record {record}")

    calls = itertools.count()
    words = "whichever records it was asked before"
    refused(words, diagnose, ledger=ledger, group=lambda record: next(calls) % 2, groups=2)
    words = "^group must return an integer for every record, got a RuntimeError$"
    refused(words, diagnose, ledger=ledger, group=secretive, groups=10)
    spent = jaxdp.Ledger(budget=acc.Budget(3.0, DELTA, plan=MECHANISM))
    refused(
        "the ledger's budget has room for", diagnose, ledger=spent, error=acc.BudgetExceededError
    )
    all_refused(
        [
            ("nowhere to say", lambda: diagnose(look=True)),
            ("ledger must be a jaxdp.Ledger or a path, got 3", lambda: diagnose(ledger=3)),
            (
                "at least 2 records, got 1",
                lambda: diagnose(public=jax.tree.map(lambda x: x[:1], DATA)),
            ),
            ("public must hold records like", lambda: diagnose(public=DATA | {"y": DATA["y"] / 2})),
            ("groups must be at most 1,000", lambda: diagnose(ledger=ledger, groups=10**7)),
            ("at least one parameter through", lambda: diagnose(trainable=False)),
            ("public must be given without ledger", lambda: diagnose(public=DATA, ledger=ledger)),
            (
                "public must be given without",
                lambda: diagnose(public=DATA, look=True, ledger=ledger),
            ),
            ("public must hold records like", lambda: diagnose(public=DATA["x"])),
            ("look must be True or False", lambda: diagnose(look=1, ledger=ledger)),
            ("records must be", lambda: diagnose(ledger=ledger, records=1)),
            ("groups must be", lambda: diagnose(ledger=ledger, groups=0)),
            ("group must be a function", lambda: diagnose(ledger=ledger, group="y")),
            ("same must be a function", lambda: diagnose(ledger=ledger, same="y")),
            ("epsilon must be", lambda: diagnose(ledger=ledger, epsilon=-1)),
            ("clip_norm must be an argument of jaxdp.diagnose", lambda: diagnose(clip_norm=1)),
            (
                "delta must be known to charge",
                lambda: jaxdp.diagnose(loss_fn, PARAMS, DATA, other, ledger=ledger),
            ),
            ("mechanism must", lambda: jaxdp.diagnose(loss_fn, PARAMS, DATA, 1.0)),
            ("loss_fn must", lambda: jaxdp.diagnose(None, PARAMS, DATA, MECHANISM)),
            ("optimizer must", lambda: jaxdp.diagnose(loss_fn, PARAMS, DATA, MECHANISM, 0.1)),
        ]
    )
    assert not ledger.entries
    assert not ledger.unverified()
    assert not spent.entries


@pytest.mark.parametrize("weight", [0.1, 0.9])
def test_the_place_of_a_suspicion_in_private_records_tells_no_weight(monkeypatch, weight):
    seen = [Finding("inputs", "far above 1", "", certain=False, weight=weight)]
    advice = [Finding("clip", "too large", "", certain=False, weight=0.5)]
    monkeypatch.setattr(diagnosis, "find_broken", lambda e: seen)
    monkeypatch.setattr(diagnosis, "find_in_numbers", lambda numbers: advice)
    found = diagnose(ledger=jaxdp.Ledger(), epsilon=1.0).findings
    assert [(f.kind, f.weight) for f in found] == [("inputs", 0.0), ("clip", 0.5)]


def test_the_page_tells_the_worst_first_and_each_kind_once():
    found = Diagnosis(tuple(Finding("rate", str(at), "", False) for at in range(9)), cost="free")
    assert str(found).count("advice, rate") == 6
    assert "and less: rate, rate, rate" in str(found)
    assert len(str(found).splitlines()) <= 40
    assert str(found).endswith("free")


def run(folder, mechanism=MECHANISM, rate=0.5, **options):
    return jaxdp.Run(
        folder, loss_fn, mechanism, optax.sgd(rate), DATA, params=PARAMS,
        progress=lambda step, row: None, every=10, **options,
    )  # fmt: skip


def test_a_run_keeps_what_was_looked_at_or_charged_before_its_first_step(tmp_path):
    folder = tmp_path / "before"
    assert run(folder).diagnose().numbers == ""
    assert not folder.exists()
    assert run(folder).diagnose(look=True).numbers
    assert run(folder).unverified() == [diagnosis.LOOKED]
    # A ledger that is cut off before the note is refused.
    whole = (folder / "ledger.jsonl").read_text()
    (folder / "ledger.jsonl").write_text(whole.splitlines(keepends=True)[0])
    refused("lines are missing", run(folder).unverified)
    (folder / "ledger.jsonl").write_text(whole)
    refused("ledger must be left to the run", run(folder).diagnose, ledger=jaxdp.Ledger())
    cost = run(folder).diagnose(epsilon=0.1, groups=10).cost
    # What it told may change the run, in the same folder.
    other = dataclasses.replace(MECHANISM, rule=jaxdp.clip(0.5))
    changed = run(folder, other, 0.1)
    changed.fit()
    assert diagnosis.LOOKED in changed.unverified()
    assert diagnosis.LOOKED in page(folder)
    assert f"becomes {changed.epsilon().upper:.3f}" in cost
    assert len(changed.directory.checked_ledger().entries) == 2
    # The page is the last part's.
    further = run(folder, other, 0.1, extend="more")
    refused("extend must be None", further.diagnose, look=True)
    further.fit(2)
    refused("extend must be 'more'", changed.diagnose, look=True)


def test_a_diagnosis_of_records_is_not_counted_for_users(tmp_path):
    run(tmp_path / "run").diagnose(epsilon=0.1)
    some = {"x": DATA["x"][:300], "y": DATA["y"][:300]}
    of_users = jaxdp.dp_sgd(
        epsilon=1.0, delta=DELTA, steps=2, l2_clip_norm=1.0, batch_size=20, dataset_size=100,
        records_per_user=3,
    )  # fmt: skip
    source = users(some, np.arange(300) // 3, 3)
    other = jaxdp.Run(
        tmp_path / "run", user_loss(loss_fn), of_users, optax.sgd(0.5), source, params=PARAMS
    )
    refused("must be one whose privacy unit is a user", other.fit)


def test_nobody_begins_where_a_diagnosis_reads_the_folder(tmp_path):
    one = run(tmp_path / "run")
    read = one._kept_state

    def kept():
        found = read()
        refused("in use by another process", run(tmp_path / "run").fit)
        return found

    one._kept_state = kept
    assert one.diagnose(look=True).numbers
    assert run(tmp_path / "run").unverified() == [diagnosis.LOOKED]


def test_a_run_that_is_finished_or_has_no_budget_left_says_it_on_its_page(tmp_path):
    ledger = jaxdp.Ledger(tmp_path / "shared.jsonl", budget=acc.Budget(3.0, DELTA, plan=MECHANISM))
    finished = run(tmp_path / "run", ledger=ledger)
    finished.fit()
    assert finished.unverified() == []
    assert diagnosis.LOOKED not in page(finished.path)
    refused("budget has room", finished.diagnose, epsilon=0.1, error=acc.BudgetExceededError)
    finished.diagnose(look=True)
    assert finished.unverified() == [diagnosis.LOOKED] == jaxdp.Run.open(finished.path).unverified()
    assert diagnosis.LOOKED in page(finished.path)
    finished.fit()
    assert diagnosis.LOOKED in page(finished.path)
    early = run(tmp_path / "early", ledger=jaxdp.Ledger(tmp_path / "open.jsonl"))
    early.diagnose(epsilon=0.1)
    assert early.unverified() == []  # also while the ledger is open
    canaries = run(tmp_path / "canaries", canaries=10)
    refused("canaries must be 0 to charge", canaries.diagnose, epsilon=0.1)


def page(folder):
    return (folder / "report.html").read_text()
