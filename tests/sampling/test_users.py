"""Users as the privacy unit: sources, losses, and what is charged."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.clipping import user_loss
from jaxdp.sampling import User, users
from tests.laws import is_uniform
from tests.ledger.small import trained
from tests.mechanisms import sgd_of
from tests.refusing import refused
from tests.sampling.fakes import ask

IDS = np.array(["b", "a", "b", "c", "b", "a", "b", "b"])
DATA = {
    "x": np.arange(24, dtype=np.float32).reshape(8, 3) / 24,
    "y": np.arange(8, dtype=np.float32),
}


def loss_fn(params, record):
    hidden = jnp.tanh(record["x"] @ params["w"] + params["b"])
    return jnp.square(hidden @ params["v"] - record["y"])


def params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"w": (3, 4), "b": (4,), "v": (4,)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def test_a_row_is_a_user_with_her_own_records_alone():
    source = users(DATA, IDS, 3)
    assert (len(source), source.records_per_user) == (3, 3)
    rows = ask(source, 0, 1, 2)
    for row, name in enumerate("abc"):
        own, kept = set(np.flatnonzero(name == IDS)), rows.records["y"][row]
        found = kept[rows.present[row]].tolist()
        assert len(set(found)) == len(found) == min(3, len(own))
        assert set(kept.tolist()) <= own  # also where it is padding
        np.testing.assert_array_equal(rows.records["x"][row], DATA["x"][kept.astype(int)])
    assert {leaf.shape for leaf in jax.tree.leaves(source.example)} == {(3, 3), (3,)}
    # Masked users are empty.
    rows = users(DATA, IDS, 2).gather(np.array([1, 0]), np.array([False, True]))
    assert not rows.present[0].any()
    assert not rows.records["x"][0].any()
    assert rows.present[1].all()


class Frame:
    """A table as pandas has it."""

    iloc = columns = to_numpy = None


def test_the_column_of_the_users_is_named_and_leaves_the_records():
    table = DATA | {"patient": IDS}
    by_name, by_ids = users(table, "patient", 3), users(DATA, IDS, 3)
    assert list(by_name.example.records) == ["x", "y"]
    one, two = (ask(source, 0, 1, 2) for source in (by_name, by_ids))
    chex.assert_trees_all_equal(one, two)
    for text in (object, np.dtypes.StringDType()):
        of_text = users(table | {"patient": IDS.astype(text)}, "patient", 3)
        chex.assert_trees_all_equal(ask(of_text, 0, 1, 2), two)
    numbers = DATA | {"patient": np.unique(IDS, return_inverse=True)[1]}
    kept = ask(users(numbers, "patient", 3, keep_ids=True), 0, 1, 2).records["patient"]
    assert kept.tolist() == [[0] * 3, [1] * 3, [2] * 3]
    assert set(table) == {"x", "y", "patient"}
    words = "user_ids must be an array with the user of each record, or the name of a column"
    refused(f"{words}.*got 'nobody' for", users, table, "nobody", 3)
    refused(f"{words}.*got 'patient' for list", users, [{"x": 1.0}], "patient", 3)
    refused("give frame.to_numpy", users, Frame(), "patient", 3)
    refused("must be integers or strings", users, DATA, np.array(["a", None] * 4), 3)


def test_whose_records_are_kept_depends_on_their_number_alone():
    ids = np.repeat(np.arange(5), 6)
    alone = users({"y": np.arange(6)}, ids[:6], 2)
    many = users({"y": np.arange(30)}, ids, 2)
    places = ask(alone, 0).records["y"][0]
    shuffled = np.random.default_rng(0).permutation(30)
    other = users({"y": np.arange(30)[shuffled]}, ids[shuffled], 2)
    for user in range(5):
        np.testing.assert_array_equal(ask(many, user).records["y"][0] - 6 * user, places)
        own = shuffled[ids[shuffled] == user]  # ... the n-th of hers
        np.testing.assert_array_equal(ask(other, user).records["y"][0], own[places])
    # All records of a user are as likely to be kept.
    ids, counts = np.zeros(5, int), np.zeros((5, 5))
    for seed in range(2_000):
        one, two = ask(users({"y": np.arange(5)}, ids, 2, seed=seed), 0).records["y"][0]
        counts[min(one, two), max(one, two)] += 1
    assert is_uniform(counts[np.triu_indices(5, 1)])


def test_a_user_makes_one_gradient_which_is_clipped_once_and_each_record_has_a_key():
    source, weights = users(DATA, IDS, 4), params()
    rows = ask(source, 0, 1, 2)
    each = jax.vmap(jax.vmap(jax.grad(loss_fn), (None, 0)), (None, 0))
    each = jax.tree.map(np.asarray, jax.jit(each)(weights, rows.records))
    for reduce, engine in (("mean", "vmap"), ("sum", "auto")):
        grad_fn = jaxdp.clipped_grad(user_loss(loss_fn, reduce), jaxdp.clip(0.05), engine=engine)
        found, info = grad_fn.with_info(weights, rows, jnp.ones(3, bool))
        share = rows.present / (rows.present.sum(1, keepdims=True) if reduce == "mean" else 1)
        own = jax.tree.map(lambda g, s=share: np.einsum("ur,ur...->u...", s, g), each)
        flat = np.concatenate([g.reshape(3, -1) for g in jax.tree.leaves(own)], axis=1)
        norms = np.linalg.norm(flat, axis=1)
        np.testing.assert_allclose(info.norms, norms, rtol=1e-2, err_msg=reduce)
        factors = np.minimum(1.0, 0.05 / norms)
        expected = jax.tree.map(lambda g, f=factors: np.tensordot(f, g, 1), own)
        chex.assert_trees_all_close(found.value, expected, rtol=6e-3, atol=1e-5)

    def noisy(w, x, rng):
        return w * x * jax.random.normal(rng)

    rows, key = User(jnp.ones(2), jnp.array([True, True])), jax.random.key(0)
    keyed = [noisy(1.0, 1.0, k) for k in jax.random.split(key, 2)]
    np.testing.assert_allclose(user_loss(noisy)(1.0, rows, key), np.mean(keyed), rtol=1e-6)


def trainer(source, **options):
    mechanism = sgd_of(1.0, 1.0, 10, 40, **options)
    return jaxdp.Trainer(user_loss(loss_fn), mechanism, optax.sgd(0.1), source)


@pytest.mark.parametrize("sampling", ["poisson", "allocation"])
def test_training_charges_users(sampling):
    rng = np.random.default_rng(0)
    ids = np.concatenate([np.arange(40), rng.integers(0, 40, 60)])
    data = {"x": rng.normal(size=(100, 3)).astype(np.float32), "y": np.ones(100, np.float32)}
    one = trainer(users(data, ids, 3), records_per_user=3, sampling=sampling)
    state = trained(one, 3, params=params())
    (entry,) = one.ledger.entries
    assert isinstance(entry.event, acc.PerUser)
    assert entry.event.records == 3
    assert entry.event.block == (4 if sampling == "allocation" else 1)
    chex.assert_tree_all_finite(state.params)
    words = "records_per_user must be that of the source"
    refused(words, trainer, users(data, ids, 2), records_per_user=3)
    refused("expected 3, got None", trainer, users(data, ids, 3))
    for bad, k, message in (
        (IDS[:-1], 2, "user_ids must name one user for each record"),
        (np.zeros(8), 2, "user_ids must be integers or strings"),
        (np.zeros((8, 2), int), 2, "with 2 axes"),
        (np.ma.masked_array(IDS, IDS[0] == IDS), 2, "got a masked array with some missing"),
        (IDS, 0, "records_per_user must be a whole number of at least 1"),
    ):
        refused(message, users, DATA, bad, k)
    refused("reduce must be one of mean, sum", user_loss, loss_fn, "max")


def test_a_run_and_its_report_name_the_user(tmp_path):
    ids = np.arange(100) % 40
    data = {"x": np.ones((100, 3), np.float32), "y": np.ones(100, np.float32)}
    mechanism = sgd_of(2.0, 1.0, 10, 40, records_per_user=2)
    options = {"params": params(), "delta": 1e-3, "every": 3}
    loss, source = user_loss(loss_fn), users(data, ids, 2)
    run = jaxdp.Run(tmp_path / "r", loss, mechanism, optax.sgd(0.1), source, **options)
    run.fit(3)
    page = (tmp_path / "r/report.md").read_text()
    assert "one user, of whom at most 2 records enter a step" in page
    assert "| Number of users | 40, declared and public |" in page
    assert "10 of 40 users expected a step" in page
    assert "More than one record per person" not in page
    assert run.unverified() == []
    assert run.epsilon() == mechanism.epsilon(3, 1e-3)
    given = (tmp_path / "s", loss_fn, mechanism, optax.sgd(0.1), data)
    refused("expected None, got 2", jaxdp.Run, *given, **options)
