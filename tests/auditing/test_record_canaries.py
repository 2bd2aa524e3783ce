"""Canaries that are records: how they enter, what is kept of them, and what is guessed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import models
from jaxdp import optimizers as opt
from jaxdp.auditing.one_run import audit_canaries
from jaxdp.auditing.record_canaries import (
    PARTS,
    check,
    last_scores,
    parts,
    record_canaries,
    scores,
)
from jaxdp.optimizers import registry
from jaxdp.sources import as_source
from jaxdp.types import Summed

MODEL = models.build("mlp", num_classes=3, example_shape=(4,), hidden=(5,))
PARAMS = models.init(MODEL, jax.random.key(0), (4,))
LOSS = models.cross_entropy(MODEL)
RNG = np.random.default_rng(0)
X, Y = RNG.random((6, 4), np.float32), np.array([0, 1, 2, 0, 1, 2], np.int32)
# More than are differentiated at a time.
CX, CY = RNG.normal(size=(70, 4)).astype(np.float32), RNG.integers(0, 3, 70).astype(np.int32)
ALGORITHM = opt.sgd(jaxdp.dp_sgd(0.7, 0.3, 2, 6), 0.1)


def found(records=(CX, CY), loss=LOSS, params=PARAMS, source=(X, Y)):
    return record_canaries(records, loss, params, as_source(source))


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_records_and_canaries_are_gathered_alike_from_host_and_device():
    coins = np.arange(70) % 2 == 0
    host = found().entered(as_source((X, Y)), coins)
    device = found().entered(as_source((jnp.asarray(X), jnp.asarray(Y))), coins)
    assert len(host) == len(device) == 6 + 35
    indices, mask = np.array([9, 0, 40, 6, 3]), np.array([True, True, True, True, False])
    one, other = host.gather(indices, mask), device.gather(indices, mask)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    np.testing.assert_array_equal(one[0][:4], np.stack([CX[6], X[0], CX[68], CX[0]]))
    np.testing.assert_array_equal(one[1][:4], [CY[6], Y[0], CY[68], CY[0]])
    assert (host.on_device, device.on_device) == (False, True)
    with pytest.raises(ValueError, match=r"coins must be bool \[70\], got int"):
        found().entered(as_source((X, Y)), np.ones(70, int))


def test_what_is_kept_is_the_noisy_sum_along_each_clipped_gradient():
    """Against the gradients of the candidates one by one; and watching moves no parameter."""
    kept = found()
    ends = []
    for algorithm in (ALGORITHM, kept.watched(ALGORITHM)):
        chain = algorithm.chain()
        key = ALGORITHM.mechanism.simulated_key(jax.random.key(2), 0)
        summed = Summed(jax.tree.map(jnp.ones_like, PARAMS), ALGORITHM.mechanism.l2(PARAMS))
        updates, state = chain.update(summed, chain.init(PARAMS), PARAMS, key=key)
        ends.append((flat(updates), state))
    np.testing.assert_array_equal(ends[0][0], ends[1][0])
    unit = ALGORITHM.mechanism.l2(PARAMS)
    noisy = ends[0][0] / -0.1 * 2 / unit  # the sum: the rate and the batch are taken back
    along, size, losses = parts(np.asarray(ends[1][1][1].seen)[None])
    moved = optax.apply_updates(PARAMS, jax.tree.unflatten(
        jax.tree.structure(PARAMS),
        [jnp.asarray(u) for u in _cut(ends[0][0])],
    ))  # fmt: skip
    for k in (0, 1, 63, 64, 69):
        record = (jnp.asarray(CX[k]), jnp.asarray(CY[k]))
        gradient = flat(jax.grad(LOSS)(PARAMS, record))
        length = np.linalg.norm(gradient)
        assert along[0, k] == pytest.approx(noisy @ gradient / length, rel=1e-3, abs=1e-3)
        assert size[0, k] == pytest.approx(min(0.3, length) / unit, rel=5e-3)
        assert losses[0, k] == pytest.approx(float(LOSS(moved, record)), rel=1e-4)


def _cut(whole):
    leaves = jax.tree.leaves(PARAMS)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    cut = zip(np.split(whole, ends), leaves, strict=True)
    return [part.reshape(leaf.shape) for part, leaf in cut]


class Handed:
    """A source that hands out the very arrays it keeps, and lets nobody write them."""

    on_device = False
    example = jax.ShapeDtypeStruct((4,), np.float32), jax.ShapeDtypeStruct((), np.int32)

    def __init__(self):
        self.kept = X.copy(), Y.copy()
        for rows in self.kept:
            rows.flags.writeable = False

    def __len__(self):
        return len(X)

    def gather(self, indices, mask):
        return self.kept


def test_a_source_keeps_its_records_where_canaries_are_drawn():
    source = found().entered(Handed(), np.arange(70) < 10)
    indices = np.array([0, 1, 8, 3, 4, 5])
    x, y = source.gather(indices, np.ones(6, bool))
    np.testing.assert_array_equal(x[2], CX[2])
    np.testing.assert_array_equal(np.delete(x, 2, axis=0), np.delete(X, 2, axis=0))
    np.testing.assert_array_equal(y, [Y[0], Y[1], CY[2], *Y[3:]])
    np.testing.assert_array_equal(source.real.kept[0], X)


def test_of_frozen_parameters_nothing_is_followed_and_they_are_where_they_were():
    """Against gradients by hand, of the trained leaves alone, at all parameters."""
    kept = found()
    frozen = lambda path: "Dense_0" not in str(path)  # noqa: E731
    flags = jax.tree_util.tree_map_with_path(lambda path, _: frozen(path), PARAMS)
    assert 0 < sum(jax.tree.leaves(flags)) < len(jax.tree.leaves(flags))
    whole = (np.concatenate([X, CX[:35]]), np.concatenate([Y, CY[:35]]))
    mechanism = jaxdp.dp_sgd(0.7, 0.3, 20, 41)
    trainer = jaxdp.Trainer(
        LOSS, kept.watched(opt.sgd(mechanism, 0.1)), source=whole, trainable=flags
    )
    first = state = trainer.init(jax.tree.map(jnp.copy, PARAMS))
    first = jax.tree.map(np.array, first.params)
    for batch in trainer.batches(1):
        state, _ = trainer.step(state, batch)
    moved = jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, first)
    assert jax.tree.map(lambda m: bool(np.abs(m).max() > 0), moved) == flags
    only = jax.tree.map(lambda leaf, f: leaf if f else 0 * leaf, moved, flags)
    trained = jax.tree.map(lambda leaf, f: leaf if f else None, first, flags)
    unit = mechanism.l2(trained)
    along, size, losses = parts(np.asarray(state.opt_state[1].seen)[None])
    for k in (0, 1, 69):
        record = (jnp.asarray(CX[k]), jnp.asarray(CY[k]))
        gradient = jax.grad(LOSS)(first, record)
        gradient = flat(jax.tree.map(lambda leaf, f: leaf if f else 0 * leaf, gradient, flags))
        length = np.linalg.norm(gradient)
        noisy = flat(only) / -0.1 * 20 / unit
        assert along[0, k] == pytest.approx(noisy @ gradient / length, rel=1e-3, abs=1e-2)
        assert size[0, k] == pytest.approx(min(0.3, length) / unit, rel=5e-3)
        assert losses[0, k] == pytest.approx(float(LOSS(state.params, record)), rel=1e-4)


def test_a_gradient_that_is_not_finite_tells_nothing():
    kept = found(loss=lambda p, x, y: LOSS(p, (x, y)) / x[0], records=(CX * (CX > 0), CY))
    chain = kept.watched(ALGORITHM).chain()
    key = ALGORITHM.mechanism.simulated_key(jax.random.key(2), 0)
    summed = Summed(jax.tree.map(jnp.ones_like, PARAMS), ALGORITHM.mechanism.l2(PARAMS))
    seen = np.asarray(chain.update(summed, chain.init(PARAMS), PARAMS, key=key)[1][1].seen)
    along, size = seen[:70], seen[70:140]
    broken = CX[:, 0] <= 0
    np.testing.assert_array_equal(along[broken], 0)
    np.testing.assert_array_equal(size[broken], 0)
    assert np.all(size[~broken] > 0)
    assert np.isfinite(scores(np.stack([seen, seen]), ALGORITHM)).all()


def released(coins, real, rate, steps, rng, last=0.0):
    """What a run would release whose candidates' gradients are orthogonal."""
    m = len(coins)
    drawn = (rng.random((steps, m)) < rate) & coins
    along = drawn + real * rng.normal(size=(steps, m))
    losses = 2 + rng.normal(size=(steps, m)) - last * coins
    return np.concatenate([along, np.ones((steps, m)), losses], axis=1)


def algorithm(noise, rate):
    sampling = "full_batch" if rate == 1 else "poisson"
    return opt.sgd(jaxdp.dp_sgd(noise, 1.0, round(1000 * rate), 1000, sampling), 0.1)


def audited(real, charged, rate, steps, seed, m=600, last=0.0, coins=None):
    rng = np.random.default_rng(seed)
    coins = rng.random(m) < 0.5 if coins is None else coins
    made = algorithm(charged, rate)
    seen = released(coins, real, rate, steps, rng, last)
    return audit_canaries(seen, coins, made, made.total(steps), 1e-5, records=True)


def test_a_right_run_is_not_accused_and_a_broken_one_is():
    right = [audited(0.6, 0.6, 0.02, 60, seed) for seed in range(3)]
    assert not any(a.broken for a in right)
    assert np.median([a.audited.epsilon for a in right]) > 0.2
    assert right[0].profile is None
    row = right[0].to_dict()
    assert "their own gradients" in row["adversary"]
    assert row["last_of"] == "the losses of the last iterate alone"
    assert audited(0.1, 2.0, 0.02, 60, 0).broken


def test_the_last_iterate_is_heard_where_its_losses_tell():
    """A Gaussian of epsilon 8: the losses differ by as much as the sum of all steps could."""
    mu = 1.666
    heard = [
        audited(np.sqrt(20) / mu, np.sqrt(20) / mu, 1.0, 20, seed, last=mu) for seed in range(4)
    ]
    assert all(2.0 < a.last.epsilon < a.proven for a in heard)
    ceiling = heard[0].reachable
    assert np.mean([a.last.epsilon for a in heard]) > 0.85 * ceiling


@pytest.mark.parametrize("of", [scores, last_scores])
def test_coins_that_never_mattered_prove_nothing(of):
    made, above = algorithm(1.0, 0.02), 0
    for seed in range(40):
        rng = np.random.default_rng([9, seed])
        seen = released(np.zeros(300, bool), 1.0, 0.02, 30, rng)
        found = jaxdp.auditing.audit_guesses(of(seen, made), rng.random(300) < 0.5, 1e-5)
        above += found.epsilon > 0
    assert above <= 6  # a 95 % bound may: 7 of 40 has probability 0.3 %


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda seen: np.zeros_like(seen),
        lambda seen: np.full_like(seen, np.nan),
        lambda seen: np.full_like(seen, np.inf),
        lambda seen: np.repeat(seen[:, ::300], 300, axis=1),
    ],
    ids=["ties", "NaN", "infinite", "one record, many times"],
)
def test_candidates_that_are_alike_prove_nothing_however_they_are_listed(spoilt):
    """The coins lie in order: a place among equal scores would tell all of them."""
    coins = np.arange(300) < 150
    seen = spoilt(released(coins, 0.1, 0.5, 20, np.random.default_rng(1)))
    made = algorithm(0.5, 0.2)
    for order in (coins, ~coins):
        found = audit_canaries(seen, order, made, made.total(20), 1e-5, records=True)
        assert (found.audited.epsilon, found.last.epsilon) == (0.0, 0.0)
        assert not found.broken


@pytest.mark.parametrize("side", [True, False])
def test_coins_that_all_fell_alike_are_no_error(side):
    """Of few canaries: there honest coins may do so, and then honest scores are all right."""
    coins = np.full(20, side)
    assert np.isfinite(audited(1.0, 1.0, 0.02, 20, 3, m=20, coins=coins).audited.epsilon)


def test_scores_see_no_coins_and_other_shapes_are_refused():
    made = algorithm(1.0, 0.02)
    with pytest.raises(ValueError, match=r"seen must be \[steps, 3 m\]"):
        audit_canaries(np.zeros((3, 4)), np.ones(4, bool), made, made.total(3), 1e-5, records=True)
    with pytest.raises(ValueError, match=r"seen must be \[steps, 3 m\] of records"):
        parts(np.zeros((3, 4)))
    assert PARTS == 3


def test_bad_input():
    for records in ((CX[:, :3], CY), (CX.astype(np.float16), CY), {"x": CX, "y": CY}):
        with pytest.raises(ValueError, match="canaries must be records like"):
            found(records)
    check(ALGORITHM)
    for name in ("piadam", "adadp"):
        numbers = registry.Numbers(1.0, 0.5, 2, 6, 0.1, key=jax.random.key(1))
        with pytest.raises(ValueError, match="canaries must be"):
            check(registry.build(name, numbers))
