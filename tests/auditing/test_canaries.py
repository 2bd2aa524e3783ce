"""Canaries of a real run: records in the clipped sum, and what is guessed about their coins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp import models
from jaxdp import optimizers as opt
from jaxdp.auditing.canaries import candidates, check, scores
from jaxdp.auditing.guessed import audit_one_run
from jaxdp.auditing.one_run import audit_canaries
from jaxdp.clipping import rounding
from jaxdp.mechanism import with_rule
from jaxdp.optimizers import registry
from jaxdp.sources import as_source
from jaxdp.types import Summed

MODEL = models.build("mlp", num_classes=3, example_shape=(4,), hidden=(5,))
PARAMS = models.init(MODEL, jax.random.key(0), (4,))
LOSS = models.cross_entropy(MODEL)
X = np.random.default_rng(0).random((6, 4), np.float32)
Y = np.array([0, 1, 2, 0, 1, 2], np.int32)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def flat_of(tree):
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_records_and_canaries_are_gathered_alike_from_host_and_device():
    coins = np.arange(7) % 2 == 0
    host = candidates(7, PARAMS).entered(as_source((X, Y)), coins)
    device = candidates(7, PARAMS).entered(as_source((jnp.asarray(X), jnp.asarray(Y))), coins)
    indices, mask = np.array([9, 0, 5, 6, 3]), np.array([True, True, True, True, False])
    (one, places), (other, others) = host.gather(indices, mask), device.gather(indices, mask)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    np.testing.assert_array_equal(places[:4], [6, -1, -1, 0])
    np.testing.assert_array_equal(places[:4], others[:4])
    np.testing.assert_array_equal(one[0][[0, 3]], np.zeros((2, 4)))
    np.testing.assert_array_equal(one[0][1:3], X[[0, 5]])
    assert (host.on_device, device.on_device) == (False, True)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, x, y: LOSS(params, (x, y)),
        lambda params, x, y: (LOSS(params, (x, y)), x),
        lambda params, example, rng: LOSS(params, example) * jax.random.uniform(rng, ()),
    ],
    ids=["two arguments", "aux", "rng"],
)
def test_every_form_of_a_loss_takes_canaries(loss_fn):
    found = candidates(7, PARAMS)
    grad = jaxdp.clipped_grad(found.loss(loss_fn), jaxdp.clip(0.3), "vmap")
    source = found.entered(as_source((X, Y)), np.ones(7, bool))
    batch = source.gather(np.arange(6, 13), np.ones(7, bool))
    key = jax.random.key(3) if grad.takes_rng else None
    value = flat(grad(PARAMS, batch, "all", key)[0].value)
    assert np.count_nonzero(np.abs(value + 0.3) < 1e-3) == 7


def test_a_real_record_keeps_its_loss_and_gradient():
    found = candidates(7, PARAMS)
    for x, y in zip(X[:2], Y[:2], strict=True):
        one = jax.value_and_grad(LOSS)(PARAMS, (x, y))
        two = jax.value_and_grad(found.loss(LOSS))(PARAMS, ((x, y), np.int32(-1)))
        np.testing.assert_array_equal(one[0], two[0])
        np.testing.assert_array_equal(flat(one[1]), flat(two[1]))


def test_a_candidate_adds_one_clipped_record_in_its_own_coordinate():
    found, coins = candidates(7, PARAMS), np.arange(7) % 2 == 0
    source = found.entered(as_source((X, Y)), coins)
    assert len(source) == len(Y) + coins.sum()
    batch = source.gather(np.arange(len(source)), np.ones(len(source), bool))
    grad = jaxdp.clipped_grad(found.loss(LOSS), jaxdp.clip(0.3), "auto")
    plain = jaxdp.clipped_grad(LOSS, jaxdp.clip(0.3), "vmap")
    both, real = grad(PARAMS, batch, "all")[0].value, plain(PARAMS, (X, Y), "all")[0].value
    added = jax.tree.leaves(jax.tree.map(jnp.subtract, both, real))
    expected = [np.zeros(leaf.shape) for leaf in added]
    expected[found.leaf].ravel()[found.places[coins]] = -0.3 * (1.0 - rounding.MARGIN)
    for mine, wanted in zip(added, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-4)


def test_candidates_have_coordinates_of_their_own_and_always_the_same():
    found = candidates(20, PARAMS)
    assert jax.tree.leaves(PARAMS)[found.leaf].size == 20
    assert sorted(found.places) == list(range(20))
    np.testing.assert_array_equal(found.places[:7], candidates(7, PARAMS).places)


@pytest.mark.parametrize("name", ["piadam", "sa-dpsgd"])
def test_watching_changes_nothing_and_sees_the_noisy_sum(name):
    """Two updates; of the second, PIAdam's gradients are divided by a scale that is not one."""
    energy = opt.PublicEnergy(LOSS, (jnp.asarray(X), jnp.asarray(Y)))
    extra = {"energy": energy} if name == "sa-dpsgd" else {}
    numbers = registry.Numbers(1.0, 0.5, 2, 6, 0.1, key=jax.random.key(1))
    plain = registry.build(name, numbers)
    l2 = plain.mechanism.l2(PARAMS)
    found = candidates(7, PARAMS)
    watched = found.watched(plain)
    keys = [plain.mechanism.simulated_key(jax.random.key(2 + i), i) for i in range(2)]
    ends = []
    for algorithm in (plain, watched):
        chain, params = algorithm.chain(), PARAMS
        state = chain.init(params)
        for key in keys:
            scale = algorithm.context(state).get("scale")
            value = jax.tree.map(jnp.zeros_like, params)
            updates, state = chain.update(Summed(value, l2, scale), state, params, key=key, **extra)
            params = jax.tree.map(jnp.add, params, updates)
        ends.append((flat(params), state))
        assert set(algorithm.counts_of(state)) == set(plain.counts_of(ends[0][1]))
    np.testing.assert_array_equal(ends[0][0], ends[1][0])
    # The sum was zero: what is seen is the noise, in units of one clipped record, downhill.
    noise = plain.mechanism.privatize()
    zero = Summed(jax.tree.map(jnp.zeros_like, PARAMS), l2)
    drawn, _ = noise.update(zero, noise.init(PARAMS), key=keys[1])
    expected = np.ravel(jax.tree.leaves(drawn)[found.leaf])[found.places] * -2 / l2
    np.testing.assert_allclose(ends[1][1][1].seen, expected, rtol=1e-5)


def simulated(coins, noise, rate, steps, rng):
    drawn = rng.random((steps, len(coins))) < rate
    return drawn * coins + noise * rng.normal(size=drawn.shape)


def audited(real, charged, rate, steps, seed, m=1000):
    rng = np.random.default_rng(seed)
    coins = rng.random(m) < 0.5
    algorithm = opt.sgd(jaxdp.dp_sgd(charged, 1.0, round(1000 * rate), 1000), 0.1)
    seen = simulated(coins, real, rate, steps, rng)
    return audit_canaries(seen, coins, algorithm, algorithm.total(steps), 1e-5)


def test_a_leaking_run_is_seen_and_a_right_one_is_not_accused():
    right = [audited(0.6, 0.6, 0.02, 100, seed) for seed in range(4)]
    assert sum(a.broken for a in right) == 0
    assert np.median([a.audited.epsilon for a in right]) > 0.3
    assert not any("BROKEN" in a.in_words() for a in right)
    profiles = np.array([a.profile.epsilon for a in right])
    assert np.all(profiles < right[0].proven)
    assert np.median(profiles) > 0.4 * right[0].proven
    assert "independent runs" in right[0].to_dict()["profile_assumes"]
    broken = audited(0.1, 2.0, 0.02, 100, 0)
    assert broken.broken
    assert "BROKEN" in broken.in_words()
    assert broken.to_dict()["runs"] == 1


def test_scores_of_coins_that_never_mattered_prove_nothing():
    rng = np.random.default_rng(3)
    algorithm = opt.sgd(jaxdp.dp_sgd(1.0, 1.0, 20, 1000), 0.1)
    found = []
    for _ in range(40):
        seen = rng.normal(size=(50, 400))
        coins = rng.random(400) < 0.5
        found.append(audit_one_run(scores(seen, algorithm), coins, 1e-5).epsilon)
    assert np.sum(np.array(found) > 0) <= 6  # a 95 % bound may: 7 of 40 has probability 0.3 %


@pytest.mark.parametrize("rate", [0.02, 1.0])
def test_scores_order_the_candidates_also_where_others_are_at_work(rate):
    rng = np.random.default_rng(4)
    coins = rng.random(300) < 0.5
    sampling = "full_batch" if rate == 1 else "poisson"
    algorithm = opt.sgd(jaxdp.dp_sgd(0.5, 1.0, round(1000 * rate), 1000, sampling), 0.1)
    seen = simulated(coins, 0.5, rate, 200, rng)
    drift = 0.0 if rate == 1 else 2 * rng.normal(size=300)
    value = scores(seen + drift, algorithm)
    assert np.mean(value[coins]) > np.mean(value[~coins]) + 0.5 * np.std(value)
    broken = scores(np.where(rng.random(seen.shape) < 0.01, np.nan, seen), algorithm)
    assert np.isfinite(broken).all()


def test_bad_input():
    found = candidates(7, PARAMS)
    with pytest.raises(ValueError, match="canaries must be at most the 20 coordinates"):
        candidates(21, PARAMS)
    with pytest.raises(ValueError, match="canaries must be a whole number"):
        candidates(0, PARAMS)
    with pytest.raises(ValueError, match=r"coins must be bool \[7\], got int"):
        found.entered(as_source((X, Y)), np.ones(7, int))
    with pytest.raises(ValueError, match="gradient at a record of zeros is not finite, got 7"):
        found.require_finite(lambda p, x, y: jnp.sum(flat_of(p)) / jnp.sum(x), PARAMS, (X[0], Y[0]))
    found.require_finite(LOSS, PARAMS, (X[0], Y[0]))
    algorithm = opt.sgd(jaxdp.dp_sgd(1.0, 1.0, 2, 6), 0.1)
    with pytest.raises(ValueError, match=r"seen must be \[steps, m\]"):
        audit_canaries(np.zeros((3, 2)), np.ones(3, bool), algorithm, acc.Gaussian(1.0), 1e-5)
    with pytest.raises(ValueError, match="delta must be a finite number above 0"):
        audit_canaries(np.zeros((3, 2)), np.ones(2, bool), algorithm, acc.Gaussian(1.0), 0.0)
    box = with_rule(jaxdp.coordinate_box(1.0), 1.0, 2, 6)
    with pytest.raises(ValueError, match="clips every coordinate by itself"):
        check(opt.sgd(box, 0.1))
    for name in ("fixed_size", "shuffle", "truncated_poisson"):
        with pytest.raises(ValueError, match=f"canaries must be 0 for {name} sampling"):
            check(opt.sgd(jaxdp.dp_sgd(1.0, 1.0, 2, 6, name), 0.1))
    with pytest.raises(ValueError, match="where a user is the privacy unit"):
        check(opt.sgd(jaxdp.dp_sgd(1.0, 1.0, 2, 6, records_per_user=2), 0.1))
    check(opt.sgd(jaxdp.dp_sgd(1.0, 1.0, 2, 6, "allocation"), 0.1))
