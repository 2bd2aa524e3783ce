"""The trainer's own look at what enters a loss, before anything is charged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from benchmarks.planted_pipelines import MECHANISM, PARAMS, X, Y, loss_fn
from tests.mechanisms import sgd_of
from tests.refusing import all_refused, refused

BANK = np.concatenate([np.random.default_rng(1).normal(size=(40, 6)), X[:3]]).astype(np.float32)
# Of each kind one; the others are told and left alone in clipping/test_statistics.py.
MADE = {
    "mean": X.mean(0),
    "inverse deviation": 1 / X.std(0),
    "means by class": np.stack([X[np.equal(Y, k)].mean(0) for k in (0, 1)]),
    "logarithm of the class ratio": np.log(Y.mean(dtype=np.float32) / (1 - Y.mean())),
    "one record": X[17],
    "three records in a bank": BANK,
}
PUBLIC = {
    "zeros": np.zeros(6),
    "a rotation": np.linalg.qr(np.random.default_rng(2).normal(size=(6, 6)))[0],
    "three decimals": np.array([0.485, 0.456, 0.406, 0.229, 0.224, 0.225]),
    "as long as the data": np.random.default_rng(3).normal(size=(len(X), 6)),
    "as long as a batch": np.random.default_rng(4).normal(size=(12, 6)),
}


def captured(array):
    return (lambda p, x, y: loss_fn(p, x, y) + 0 * jnp.sum(array)), PARAMS, {}


def frozen(array):
    trainable = {"w": True, "b": True, "v": False}
    return *first_value(array)[:2], {"trainable": trainable}


def first_value(array):
    return (lambda p, x, y: loss_fn(p, x, y) + jnp.sum(p["v"])), PARAMS | {"v": array}, {}


DOORS = [captured, frozen, first_value]


def started(door, array, data=(X, Y), **options):
    loss, params, more = door(jnp.asarray(array, jnp.float32))
    trainer = jaxdp.Trainer(loss, MECHANISM, optax.sgd(0.1), data, **more, **options)
    try:
        trainer.init(params)
    finally:
        assert not trainer.ledger.entries
        trainer.close()


def stepped(trainer, params, **options):
    """The state after one step from these parameters."""
    state = trainer.init(params)
    (batch,) = trainer.batches(1, **options)
    return trainer.step(state, batch)[0]


def checked(door, array):
    loss, params, more = door(jnp.asarray(array, jnp.float32))
    return jaxdp.check(loss, params, (X, Y), MECHANISM, **more)


@pytest.mark.parametrize("door", DOORS)
def test_what_was_computed_from_records_is_refused_at_every_door(door, subtests):
    for name, array in MADE.items():
        words = "what was computed from the records, got: "
        with subtests.test(name), pytest.raises(ValueError, match=words) as error:
            started(door, array)
        said = str(error.value)
        assert "constants=array" in said, name
        for value in np.ravel(array)[:9]:  # private
            assert f"{value:.4f}" not in said, name


@pytest.mark.parametrize("door", DOORS)
def test_what_is_public_or_declared_passes_at_every_door_and_check_asks_the_same(door):
    for array in PUBLIC.values():
        started(door, array)
    mean = jnp.asarray(X).mean(0)
    started(door, mean, constants={"centre": mean})
    (broken,) = checked(door, X.mean(0)).broken
    assert "the records' mean" in broken.what
    assert broken.where.startswith("audit/test_start.py:")
    assert checked(door, PUBLIC["a rotation"]).findings == ()


def test_a_statistic_of_the_records_is_refused_at_its_line():
    words = r"computed from the records, got: .* the records' mean \(audit/test_start.py:\d+\)"
    rows = (
        (words, captured, X.mean(0)),
        (words, captured, X.mean(0), jax.tree.map(jnp.asarray, (X, Y))),
        (r"the frozen parameter \['v'\] \[6\] is the records' mean", frozen, X.mean(0)),
        (r"the first value of the parameter \['v'\] \[6\] is one of", first_value, X[3]),
    )
    all_refused((words, functools.partial(started, *given)) for words, *given in rows)


@pytest.mark.parametrize("size", [64, 100])
def test_as_many_frozen_statistics_as_a_batch_has_rows_are_listed(size):
    """Before: refused for these batch sizes, after the draw was charged."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(1_000, 3)).astype(np.float32)
    moving = jnp.asarray(rng.normal(size=64), jnp.float32)

    def loss(params, x):
        return jnp.sum(((x @ params - moving) / jnp.sqrt(jnp.abs(moving) + 1e-5)) ** 2)

    mechanism = sgd_of(1.0, 1.0, size, len(x))
    trainer = jaxdp.Trainer(loss, mechanism, optax.sgd(0.1), x, physical_batch_size=64)
    stepped(trainer, jnp.ones((3, 64)) / 8)
    assert any("captured array float32 [64]" in line for line in trainer.unverified())
    trainer.close()


def test_a_table_that_is_looked_up_by_a_records_number_is_a_suspicion():
    """It was refused, and so were 64 random features beside the records 0, 1, ... 63."""
    numbers, table = np.arange(len(X)), jnp.asarray(X)
    loss = lambda p, i, y: loss_fn(p, table[i], y)  # noqa: E731
    jaxdp.Trainer(loss, MECHANISM, optax.sgd(0.1), (numbers, Y)).init(PARAMS)
    found = jaxdp.check(loss, PARAMS, (numbers, Y), MECHANISM)
    (suspicion,) = found.suspicions
    assert "captured an array [N, 6], and looks it up by a number" in suspicion.what
    assert not found.broken
    of_own = lambda p, i, y: loss_fn(p, p["own"][i], y)  # noqa: E731
    own = jaxdp.Trainer(of_own, MECHANISM, optax.sgd(0.1), (numbers, Y))
    own.init(PARAMS | {"own": jax.random.normal(jax.random.key(0), X.shape)})


NODES, LABELS = np.random.default_rng(6).permutation(300)[:120].astype(np.int32), Y
FEATURES = jax.random.normal(jax.random.key(8), (300, 6))
NEAR = jnp.asarray(np.random.default_rng(9).random((300, 300)) < 0.02, jnp.float32)
TOKENS = np.random.default_rng(10).integers(0, 300, 120).astype(np.int32)
# (loss of a number and a label, numbers, True where they name their records).
LOOKED_UP = {
    "a node beside its neighbours": (lambda p, i, y: loss_fn(p, (NEAR @ FEATURES)[i], y), True),
    "by jnp.take in a scan": (
        lambda p, i, y: jax.lax.scan(
            lambda c, _: (c + loss_fn(p, jnp.take(FEATURES, i, axis=0), y), None), 0.0, None, 2
        )[0],
        True,
    ),
    "a frozen part": (lambda p, i, y: loss_fn(p, p["v"][i], y), True),
    "a table that is trained": (lambda p, i, y: loss_fn(p, p["w300"][i], y), False),
    "a number that is only added": (
        lambda p, i, y: loss_fn(p, FEATURES[0] * jnp.float32(i), y),
        False,
    ),
}


def test_nodes_of_a_graph_that_read_others_are_a_suspicion_and_token_ids_are_none():
    params = PARAMS | {"v": FEATURES, "w300": FEATURES + 1}
    trained = {"trainable": {"w": True, "b": True, "v": False, "w300": True}}

    def suspected(loss, numbers):  # that a loss leaves a leaf unused is another finding
        found = jaxdp.check(loss, params, (numbers, LABELS), MECHANISM, **trained)
        return [f.remedy for f in found.findings if f.kind == "captured"]

    for name, (loss, expected) in LOOKED_UP.items():
        found = suspected(loss, NODES)
        assert len(found) == expected, name
        assert all("let a whole graph be a record" in remedy for remedy in found), name
        assert suspected(loss, TOKENS) == [], name
    nodes, declared = LOOKED_UP["a node beside its neighbours"][0], {"constants": FEATURES}
    assert jaxdp.check(nodes, PARAMS, (NODES, LABELS), MECHANISM, **declared).findings


def test_an_array_that_holds_the_records_is_never_to_be_declared():
    """The remedy was to declare it public: the features of all nodes."""
    x = np.asarray(FEATURES)[NODES]
    doors = (
        (lambda p, x, y: loss_fn(p, x + (NEAR @ FEATURES)[0], y), PARAMS, {}),
        (lambda p, x, y: loss_fn(p, x + p["v"][0], y), PARAMS | {"v": FEATURES}, {}),
    )
    for loss, params, options in doors:
        trainer = jaxdp.Trainer(loss, MECHANISM, optax.sgd(0.1), (x, Y), **options)
        with pytest.raises(ValueError, match="make what belongs to a record a leaf") as error:
            trainer.init(params)
        assert "constants=" not in str(error.value)
        (broken,) = jaxdp.check(loss, params, (x, Y), MECHANISM).broken
        assert "make what belongs to a record a leaf" in broken.remedy


class Lazy:
    """Records that count how often they are read."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.read += 1
        return X[index], Y[index]


def test_records_that_are_read_one_by_one_are_read_for_arrays_as_long_as_they_are_many():
    lazy = Lazy()
    started(captured, X.mean(0), lazy)
    assert lazy.read <= 1  # the example
    refused("several of the records", started, captured, X, lazy)
    started(captured, PUBLIC["as long as the data"], lazy)


def test_records_of_users_are_looked_at():
    source = jaxdp.sampling.users((X, Y), np.arange(len(X)) // 2, 2)
    mechanism = sgd_of(1.0, 1.0, 12, len(X) // 2, records_per_user=2)
    loss = jaxdp.clipping.user_loss(lambda p, r: loss_fn(p, *r) + jnp.sum(p["v"]))
    trainer = jaxdp.Trainer(loss, mechanism, optax.sgd(0.1), source)
    refused("the records' mean", trainer.init, PARAMS | {"v": jnp.asarray(X.mean(0))})


def run(folder, array, **options):
    loss, params, _ = first_value(np.asarray(array, np.float32))
    options = {"params": params, "report": False, "every": 1, **options}
    return jaxdp.Run(folder, loss, MECHANISM, optax.sgd(0.1), (X, Y), **options)


def test_a_run_refuses_them_before_its_first_charge_and_takes_what_is_declared(tmp_path):
    mean = X.mean(0)
    refused("the records' mean", run(tmp_path / "a", mean).fit, 1)
    assert not run(tmp_path / "a", mean).directory.checked_ledger().entries
    run(tmp_path / "b", mean, constants=mean).fit(1)
    with pytest.raises(ValueError, match="constants must be a pytree of concrete arrays"):
        run(tmp_path / "c", mean, constants="mean")


def test_what_a_run_restores_was_released_and_is_not_asked(tmp_path, monkeypatch):
    run(tmp_path / "a", np.zeros(6)).fit(1)
    asked = []
    note = lambda value, *_, **__: asked.append(np.shape(value))  # noqa: E731
    monkeypatch.setattr("jaxdp.clipping.statistics.match_statistic", note)
    run(tmp_path / "a", np.zeros(6)).fit(2)
    assert (6, 2) not in asked  # w
    run(tmp_path / "b", np.zeros(6)).fit(1)
    assert (6, 2) in asked


def estimate(params, x):
    return 0.5 * jnp.sum((params - x) ** 2)


def released(records=200):
    """A trainer whose parameters were trained to the mean nearly exactly; and the records."""
    rng = np.random.default_rng(6)
    x = (rng.normal(size=(records, 4)) * np.geomspace(1, 3, 4) + 20).astype(np.float32)
    mechanism = sgd_of(1e-4, 100.0, records, records, "full_batch")
    trainer = jaxdp.Trainer(estimate, mechanism, optax.sgd(1.0), x)
    state = stepped(trainer, jnp.zeros(4))
    np.testing.assert_allclose(state.params, x.mean(0), rtol=1e-5)
    return trainer, state, x


def another(x, ledger, loss=estimate):
    mechanism = sgd_of(1.0, 1.0, 20, len(x))
    return jaxdp.Trainer(loss, mechanism, optax.sgd(0.1), x, ledger=ledger, another=True)


def test_releases_that_the_ledger_holds_are_no_statistics():
    trainer, state, x = released()
    again = trainer.init(trainer.init(state.params).params)
    stepped(trainer, again.params, beyond=True)
    stepped(another(x, trainer.ledger), again.params)
    minus = another(x, trainer.ledger, lambda w, x: estimate(w, x - again.params))
    stepped(minus, jnp.zeros(4))
    listed = [line for line in trainer.unverified() if "captured array float32 [4]" not in line]
    assert listed == []


def test_copies_of_a_release_and_those_of_another_ledger_are_compared():
    trainer, state, x = released()
    same, other = another(x, trainer.ledger), another(x, jaxdp.Ledger())
    copied = r"the records' mean.*declare them: constants=array"
    all_refused(
        [
            (r"release of this ledger; .* copy of a release", lambda: other.init(state.params)),
            (copied, lambda: same.init(np.asarray(state.params)), "NumPy"),
            (copied, lambda: same.init(state.params + 0.0), "computed"),
        ]
    )
