"""Canaries of a real run: how they enter, what is kept of them, and what is guessed of their coins.

They pull along coordinates of their own, or are records.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import jaxdp
from jaxdp import models
from jaxdp import optimizers as opt
from jaxdp.accounting import Relation
from jaxdp.audit import canaries
from jaxdp.audit.canaries import Canaries, dirac_canaries, split_parts
from jaxdp.audit.guesses import audit_one_run
from jaxdp.audit.one_run import audit_canaries
from jaxdp.clipping import rounding
from jaxdp.clipping.options import paths
from jaxdp.mechanism import with_rule
from jaxdp.optimizers import registry
from jaxdp.runs.canaries import found
from jaxdp.sampling import as_source, bucketed_text, padded_text
from jaxdp.types import Summed
from tests.clipping.architectures import opened
from tests.mechanisms import sgd_of
from tests.refusing import all_refused

MODEL = models.build("mlp", num_classes=3, example_shape=(4,), hidden=(5,))
PARAMS = models.init(MODEL, jax.random.key(0), (4,))
LOSS = models.cross_entropy(MODEL)
RNG = np.random.default_rng(0)
X, Y = RNG.random((6, 4), np.float32), np.array([0, 1, 2, 0, 1, 2], np.int32)
DATA = (X, Y)
# More than are differentiated at a time.
CX, CY = RNG.normal(size=(70, 4)).astype(np.float32), RNG.integers(0, 3, 70).astype(np.int32)
ALGORITHM = opt.sgd(sgd_of(0.7, 0.3, 2, 6), 0.1)
SEVEN = dirac_canaries(7, PARAMS)


def kept_records(records=(CX, CY), loss=LOSS, **given):
    return Canaries(records, loss_fn=loss, params=PARAMS, **given)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_records_and_canaries_are_gathered_alike_from_host_and_device():
    def gathered(kept, coins, indices):
        sources = [as_source(DATA), as_source(jax.tree.map(jnp.asarray, DATA))]
        host, device = (kept.entered(source, coins) for source in sources)
        assert len(host) == len(device) == len(Y) + coins.sum()
        assert (host.on_device, device.on_device) == (False, True)
        mask = np.array([True, True, True, True, False])
        one, other = (source.gather(np.array(indices), mask) for source in (host, device))
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:4], b[:4]), one, other)
        return one

    (x, _), places = gathered(SEVEN, np.arange(7) % 2 == 0, [9, 0, 5, 6, 3])
    np.testing.assert_array_equal(places[:4], [6, -1, -1, 0])
    np.testing.assert_array_equal(x[:4], [0 * X[0], X[0], X[5], 0 * X[0]])
    x, y = gathered(kept_records(), np.arange(70) % 2 == 0, [9, 0, 40, 6, 3])
    np.testing.assert_array_equal(x[:4], np.stack([CX[6], X[0], CX[68], CX[0]]))
    np.testing.assert_array_equal(y[:4], [CY[6], Y[0], CY[68], CY[0]])


FORMS = {
    "arguments": lambda params, x, y: LOSS(params, (x, y)),
    "aux": lambda params, x, y: (LOSS(params, (x, y)), x),
    "keyed": lambda params, example, rng: LOSS(params, example) * jax.random.uniform(rng, ()),
}


@pytest.mark.parametrize("loss_fn", FORMS.values(), ids=FORMS)
def test_every_form_of_a_loss_takes_canaries(loss_fn):
    grad = jaxdp.clipped_grad(SEVEN.loss(loss_fn), jaxdp.clip(0.3), "vmap")
    source = SEVEN.entered(as_source(DATA), np.ones(7, bool))
    batch = source.gather(np.arange(6, 13), np.ones(7, bool))
    key = jax.random.key(3) if grad.takes_rng else None
    value = flat(opened(grad)(PARAMS, batch, rng=key)[0])
    assert np.count_nonzero(np.abs(value + 0.3) < 1e-3) == 7


def test_a_candidate_adds_one_clipped_record_in_a_coordinate_of_its_own():
    found = dirac_canaries(20, PARAMS)
    assert found._leaf_of(PARAMS).size == 20
    assert sorted(found.rows) == list(range(20))
    np.testing.assert_array_equal(found.rows[:7], dirac_canaries(7, PARAMS).rows)
    # A real record keeps its loss and gradient.
    plain, entered = (jax.jit(jax.value_and_grad(f)) for f in (LOSS, SEVEN.loss(LOSS)))
    for record in zip(X[:2], Y[:2], strict=True):
        one, two = plain(PARAMS, record), entered(PARAMS, (record, np.int32(-1)))
        np.testing.assert_array_equal(one[0], two[0])
        np.testing.assert_array_equal(flat(one[1]), flat(two[1]))
    found, coins = SEVEN, np.arange(7) % 2 == 0
    source = found.entered(as_source(DATA), coins)
    batch = source.gather(np.arange(len(source)), np.ones(len(source), bool))
    grad = jaxdp.clipped_grad(found.loss(LOSS), jaxdp.clip(0.3), "auto")
    plain = jaxdp.clipped_grad(LOSS, jaxdp.clip(0.3), "vmap")
    both, real = opened(grad)(PARAMS, batch)[0], opened(plain)(PARAMS, DATA)[0]
    added = jax.tree.leaves(jax.tree.map(jnp.subtract, both, real))
    expected = [np.zeros(leaf.shape) for leaf in added]
    expected[paths(PARAMS).index(found.leaf)].ravel()[found.rows[coins]] = -0.3 * (
        1.0 - rounding.MARGIN
    )
    for mine, wanted in zip(added, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-4)


@pytest.mark.parametrize("name", ["piadam", "sa-dpsgd"])
def test_watching_changes_nothing_and_sees_the_noisy_sum(name):
    """Two updates; of the second, PIAdam's gradients are divided by a scale that is not one."""
    energy = opt.PublicEnergy(LOSS, (jnp.asarray(X), jnp.asarray(Y)))
    extra = {"energy": energy} if name == "sa-dpsgd" else {}
    numbers = registry.Numbers(1.0, 0.5, 2, 6, 0.1, key=jax.random.key(1))
    plain = registry.build(name, numbers)
    l2 = plain.mechanism.l2(PARAMS)
    watched = SEVEN.watched(plain)
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
    expected = SEVEN._leaf_of(drawn)[SEVEN.rows] * -2 / l2
    np.testing.assert_allclose(ends[1][1][1].seen, expected, rtol=1e-5)


_, unflattened = ravel_pytree(PARAMS)
GRADIENT = jax.jit(jax.grad(LOSS))


def is_followed(seen, gradient_of, moved, noisy, unit, rounded=1e-3):
    """What was kept of some candidates, against their own gradients, one by one."""
    along, size, losses = split_parts(np.asarray(seen)[None])
    for k in (0, 1, 63, 64, 69):
        record = (jnp.asarray(CX[k]), jnp.asarray(CY[k]))
        gradient = gradient_of(record)
        length = np.linalg.norm(gradient)
        assert along[0, k] == pytest.approx(noisy @ gradient / length, rel=1e-3, abs=rounded)
        assert size[0, k] == pytest.approx(min(0.3, length) / unit, rel=5e-3)
        assert losses[0, k] == pytest.approx(float(LOSS(moved, record)), rel=1e-4)


def updated(made):
    """One update of an algorithm by a sum of ones, and the state after it."""
    chain, key = made.chain(), ALGORITHM.mechanism.simulated_key(jax.random.key(2), 0)
    summed = Summed(jax.tree.map(jnp.ones_like, PARAMS), ALGORITHM.mechanism.l2(PARAMS))
    updates, state = chain.update(summed, chain.init(PARAMS), PARAMS, key=key)
    return flat(updates), state


def test_what_is_kept_is_the_noisy_sum_along_each_clipped_gradient_that_is_finite():
    """Against the gradients of the candidates one by one; and watching moves no parameter."""
    ends = [updated(made) for made in (ALGORITHM, kept_records().watched(ALGORITHM))]
    np.testing.assert_array_equal(ends[0][0], ends[1][0])
    unit = ALGORITHM.mechanism.l2(PARAMS)
    noisy = ends[0][0] / -0.1 * 2 / unit  # the sum: the rate and the batch are taken back
    moved = optax.apply_updates(PARAMS, unflattened(ends[0][0]))
    gradient = lambda record: flat(GRADIENT(PARAMS, record))  # noqa: E731
    is_followed(ends[1][1][1].seen, gradient, moved, noisy, unit)
    # One that is not finite tells nothing.
    kept = kept_records(loss=lambda p, x, y: LOSS(p, (x, y)) / x[0], records=(CX * (CX > 0), CY))
    seen = np.asarray(updated(kept.watched(ALGORITHM))[1][1].seen)
    along, size = seen[:70], seen[70:140]
    broken = CX[:, 0] <= 0
    np.testing.assert_array_equal(along[broken], 0)
    np.testing.assert_array_equal(size[broken], 0)
    assert np.all(size[~broken] > 0)
    assert np.isfinite(canaries.log_odds(np.stack([seen, seen]), ALGORITHM, records=True)).all()


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
    source = kept_records().entered(Handed(), np.arange(70) < 10)
    indices = np.array([0, 1, 8, 3, 4, 5])
    x, y = source.gather(indices, np.ones(6, bool))
    np.testing.assert_array_equal(x[2], CX[2])
    np.testing.assert_array_equal(np.delete(x, 2, axis=0), np.delete(X, 2, axis=0))
    np.testing.assert_array_equal(y, [Y[0], Y[1], CY[2], *Y[3:]])
    np.testing.assert_array_equal(source.real.kept[0], X)


def test_of_frozen_parameters_nothing_is_followed_and_they_are_where_they_were():
    """Against gradients by hand, of the trained leaves alone, at all parameters."""
    kept = kept_records()
    frozen = lambda path: "Dense_0" not in str(path)  # noqa: E731
    flags = jax.tree_util.tree_map_with_path(lambda path, _: frozen(path), PARAMS)
    assert 0 < sum(jax.tree.leaves(flags)) < len(jax.tree.leaves(flags))
    whole = (np.concatenate([X, CX[:35]]), np.concatenate([Y, CY[:35]]))
    mechanism = sgd_of(0.7, 0.3, 20, 41)
    watched = kept.watched(opt.sgd(mechanism, 0.1))
    trainer = jaxdp.Trainer(LOSS, watched, source=whole, trainable=flags)
    state = trainer.init(jax.tree.map(jnp.copy, PARAMS))
    first = jax.tree.map(np.array, state.params)
    state, _ = trainer.step(state, next(trainer.batches(1)))
    moved = jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, first)
    assert jax.tree.map(lambda m: bool(np.abs(m).max() > 0), moved) == flags
    only = jax.tree.map(lambda leaf, f: leaf if f else 0 * leaf, moved, flags)
    trained = jax.tree.map(lambda leaf, f: leaf if f else None, first, flags)
    unit = mechanism.l2(trained)
    noisy = flat(only) / -0.1 * 20 / unit

    def gradient(record):
        whole = GRADIENT(first, record)
        return flat(jax.tree.map(lambda leaf, f: leaf if f else 0 * leaf, whole, flags))

    is_followed(state.opt_state[1].seen, gradient, state.params, noisy, unit, rounded=1e-2)


def algorithm(noise, rate):
    sampling = "full_batch" if rate == 1 else "poisson"
    return opt.sgd(sgd_of(noise, 1.0, round(1000 * rate), 1000, sampling), 0.1)


def simulated(coins, noise, rate, steps, rng, records=False, last=0.0):
    """What a run would release whose candidates' gradients are orthogonal."""
    drawn = (rng.random((steps, len(coins))) < rate) & coins
    along = drawn + noise * rng.normal(size=drawn.shape)
    if not records:
        return along
    losses = 2 + rng.normal(size=drawn.shape) - last * coins
    return np.concatenate([along, np.ones(drawn.shape), losses], axis=1)


def audited(real, charged, rate, steps, seed, m=600, records=True, last=0.0, coins=None):
    rng = np.random.default_rng(seed)
    coins = rng.random(m) < 0.5 if coins is None else coins
    seen = simulated(coins, real, rate, steps, rng, records, last)
    made = algorithm(charged, rate)
    return audit_canaries(seen, coins, made, made.total(steps), 1e-5, records=records)


def test_a_leaking_run_is_seen_a_right_one_is_not_accused_and_the_last_iterate_is_heard():
    right = audited(0.6, 0.6, 0.02, 100, 0, 1000, records=False)
    assert not right.broken
    assert right.audited.epsilon > 0.3
    assert "BROKEN" not in right.in_words()
    assert 0.4 * right.proven < right.profile.epsilon < right.proven
    assert "independent runs" in right.to_dict()["profile_assumes"]
    broken = audited(0.1, 2.0, 0.02, 100, 0, 1000, records=False)
    assert broken.broken
    assert "BROKEN" in broken.in_words()
    assert broken.to_dict()["runs"] == 1
    # And of records.
    right = [audited(0.6, 0.6, 0.02, 60, seed) for seed in range(2)]
    assert not any(a.broken for a in right)
    assert min(a.audited.epsilon for a in right) > 0.2
    assert right[0].profile is None
    row = right[0].to_dict()
    assert "their own gradients" in row["adversary"]
    assert row["last_of"] == "the losses of the last iterate alone"
    assert audited(0.1, 2.0, 0.02, 60, 0).broken
    for side in (True, False):  # of few canaries honest coins may all fall alike: no error
        found = audited(1.0, 1.0, 0.02, 20, 3, m=20, coins=np.full(20, side))
        assert np.isfinite(found.audited.epsilon)
    # A Gaussian of epsilon 8: the losses differ by as much as the sum of all steps could.
    mu, noise = 1.666, np.sqrt(20) / 1.666
    heard = [audited(noise, noise, 1.0, 20, seed, last=mu) for seed in range(3)]
    assert all(2.0 < a.last.epsilon < a.proven for a in heard)
    assert np.mean([a.last.epsilon for a in heard]) > 0.85 * heard[0].reachable


def test_of_the_last_iterate_the_losses_before_and_after_are_compared():
    rng, made = np.random.default_rng(0), algorithm(1.0, 0.02)
    record = lambda k: float(LOSS(PARAMS, (CX[k], CY[k])))  # noqa: E731
    np.testing.assert_allclose(kept_records().losses(PARAMS)[[0, 69]], [record(0), record(69)])
    assert kept_records(last=True).watched(ALGORITHM) is ALGORITHM

    def seen(fall, coins):
        before = rng.normal(size=len(coins)) * 5
        return np.stack([before, before - fall * coins + 0.1 * rng.normal(size=len(coins))])

    coins = rng.random(300) < 0.5
    found = audit_canaries(seen(1.0, coins), coins, made, made.total(30), 1e-5, steps=30)
    assert (found.steps, found.canaries, found.last) == (30, 300, None)
    assert found.audited.epsilon == found.all_right > found.proven
    assert found.broken
    assert "before the first step and after the last" in found.adversary
    # What is not finite stands in the middle.
    spoilt = np.array([[np.inf, 5.0, 4.0, 3.0, np.nan], [1.0, 1.0, 1.0, 1.0, 1.0]])
    np.testing.assert_array_equal(canaries.loss_falls(spoilt), [3, 4, 3, 2, 3])
    np.testing.assert_array_equal(canaries.loss_falls(np.full((2, 3), np.nan)), 0)
    with pytest.raises(ValueError, match=r"seen must be \[2, m\] for coins \[m\], got \(3, 300\)"):
        audit_canaries(np.zeros((3, 300)), coins, made, made.total(30), 1e-5, steps=30)


def test_texts_in_buckets_take_canaries_each_in_the_bucket_of_its_length():
    texts = [np.full(n, n) for n in (1, 2, 3, 4, 5, 6, 7, 8)]
    source = bucketed_text(texts, {4: 8, 8: 8})
    added = padded_text([np.full(n, 10 + n) for n in (7, 2, 3)], 8)
    rows = as_source(added).gather(np.arange(3), np.ones(3, bool))
    entered = Canaries(rows, loss_fn=LOSS, last=True).entered(source, np.array([True, True, False]))
    assert (len(entered), entered.example) == (10, source.example)
    _, mask, found = entered.passes(np.array([8, 0, 9, 7]), 2)
    drawn = {
        (part["tokens"].shape[1], int(row[0]))
        for part, here in zip(found, mask, strict=True)
        for row in part["tokens"][here]
    }
    assert drawn == {(4, 1), (4, 12), (8, 17), (8, 8)}


ALONG = {
    "coordinates": lambda seen, made: canaries.log_odds(seen[:, :300], made),
    "gradients": functools.partial(canaries.log_odds, records=True),
    "losses before and after": lambda seen, _: canaries.loss_falls(split_parts(seen)[2][[0, -1]]),
    "the last losses": functools.partial(canaries.last_log_odds, records=True),
}


@pytest.mark.parametrize("kind", ALONG)
def test_coins_that_never_mattered_prove_nothing(kind):
    made, above = algorithm(1.0, 0.02), 0
    for seed in range(40):
        rng = np.random.default_rng([9, seed])
        seen = simulated(np.zeros(300, bool), 1.0, 0.02, 30, rng, records=True)
        coins, odds = rng.random(300) < 0.5, ALONG[kind](seen, made)
        above += audit_one_run(odds, coins, 1e-5, log_odds=kind != "coordinates").epsilon > 0
    assert above <= 6  # a 95 % bound may: 7 of 40 has probability 0.3 %


def test_scores_order_the_candidates_also_where_others_are_at_work():
    for rate in (0.02, 1.0):
        rng = np.random.default_rng(4)
        coins = rng.random(300) < 0.5
        seen = simulated(coins, 0.5, rate, 200, rng)
        drift = 0.0 if rate == 1 else 2 * rng.normal(size=300)
        value = canaries.log_odds(seen + drift, algorithm(0.5, rate))
        assert np.mean(value[coins]) > np.mean(value[~coins]) + 0.5 * np.std(value)
        broken = np.where(rng.random(seen.shape) < 0.01, np.nan, seen)
        assert np.isfinite(canaries.log_odds(broken, algorithm(0.5, rate))).all()


def test_candidates_that_are_alike_prove_nothing_however_they_are_listed():
    """The coins lie in order: a place among equal scores would tell all of them."""
    coins, made = np.arange(300) < 150, algorithm(0.5, 0.2)
    honest = simulated(coins, 0.1, 0.5, 20, np.random.default_rng(1), records=True)
    spoilt = {str(value): np.full_like(honest, value) for value in (0.0, np.nan, np.inf)}
    spoilt["one record, many times"] = np.repeat(honest[:, ::300], 300, axis=1)
    for name, seen in spoilt.items():
        for order in (coins, ~coins):
            found = audit_canaries(seen, order, made, made.total(20), 1e-5, records=True, seed=0)
            assert (found.audited.epsilon, found.last.epsilon) == (0.0, 0.0), name
            assert not found.broken, name


def test_what_cannot_be_a_canary_or_be_watched_is_refused():
    source = as_source(DATA)
    zero_over_zero = lambda p, x, y: jnp.sum(ravel_pytree(p)[0]) / jnp.sum(x)  # noqa: E731
    records = PARAMS, source, None
    asked = lambda given, loss: found(  # noqa: E731
        given, Relation.ADD_OR_REMOVE_ONE, ALGORITHM, loss, ALGORITHM.clipped_grad(loss), *records
    )
    np.testing.assert_array_equal(asked(7, LOSS).rows, SEVEN.rows)
    np.testing.assert_array_equal(asked((CX, CY), LOSS).rows[0], CX)
    canaries.require_auditable(opt.sgd(sgd_of(1.0, 1.0, 2, 6, "allocation"), 0.1))
    canaries.require_auditable(ALGORITHM, records=True)
    box = opt.sgd(with_rule(jaxdp.coordinate_box(1.0), 1.0, 2, 6), 0.1)
    users = opt.sgd(sgd_of(1.0, 1.0, 2, 6, records_per_user=2), 0.1)
    numbers = registry.Numbers(1.0, 0.5, 2, 6, 0.1, key=jax.random.key(1))
    rows = [
        ("canaries must be at most the 20 coordinates", lambda: dirac_canaries(21, PARAMS)),
        ("canaries must be a whole number", lambda: dirac_canaries(0, PARAMS)),
        (r"coins must be bool \[7\], got int", lambda: SEVEN.entered(source, np.ones(7, int))),
        (r"coins must be bool \[70\], got int", lambda: kept_records().entered(source, CY)),
        ("a record of zeros is not finite, got 7", lambda: asked(7, zero_over_zero)),
        ("clips every coordinate by itself", lambda: canaries.require_auditable(box)),
        ("where a user is the privacy unit", lambda: canaries.require_auditable(users)),
    ]
    for name in ("fixed_size", "shuffle", "truncated_poisson"):
        other = opt.sgd(sgd_of(1.0, 1.0, 2, 6, name), 0.1)
        words = f"canaries must be 0 for {name} sampling"
        rows.append((words, functools.partial(canaries.require_auditable, other)))
    for given in ((CX[:, :3], CY), (CX.astype(np.float16), CY), {"x": CX, "y": CY}):
        rows.append(("canaries must be records like", functools.partial(asked, given, LOSS)))
    for name in ("piadam", "adadp"):
        made = registry.build(name, numbers)
        refused = functools.partial(canaries.require_auditable, made, records=True)
        rows.append(("canaries must be", refused, name))
    all_refused(rows)
