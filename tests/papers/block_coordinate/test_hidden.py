"""R2 and R3: the loop is the chain that is charged, only its last iterate leaves it, and no rounding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxdp
from benchmarks.auditing_hidden import ALGORITHMS, as_gaussian, first_weights, worlds
from jaxdp import accounting as acc
from jaxdp.audit import audit_event, two_worlds
from jaxdp.papers import block_coordinate as bc
from jaxdp.papers.block_coordinate import forms, hidden
from jaxdp.papers.block_coordinate.audit import hidden_run
from jaxdp.papers.block_coordinate.hidden import secret_partition
from jaxdp.papers.block_coordinate.network import Lifted
from jaxdp.papers.block_coordinate.settings import configured
from jaxdp.papers.block_coordinate.sweep import clipped_sum
from tests.laws import are_uncorrelated, is_gaussian
from tests.papers.block_coordinate import test_forms
from tests.papers.block_coordinate.test_forms import SOFTMAX, data, normal
from tests.refusing import refused

NET = bc.Network((6, 5, 3), 1.5)
REPLACE = acc.Relation.REPLACE_ONE


def algorithm(**changes):
    options = {
        "network": NET, "noise_multiplier": 2.0, "l2_clip_norms": 0.3, "step_size": 0.8,
        "batch_size": 8, "dataset_size": 32, "inner_epochs": 3, "sweeps": 2,
    }  # fmt: skip
    return bc.HiddenBlocks(**{**options, **changes})


def test_the_event_is_the_chain_that_runs():
    m = algorithm(
        l2_clip_norms=(0.3, 0.2), schedule=bc.linear(2.0, 1.0, 3),
        proximal=bc.Proximal(weight_decay=0.5, spectral_radius=1.0),
    )  # fmt: skip
    event = m.event()
    assert len(event.blocks) == 4
    for block, clip in ((0, 0.3), (1, 0.2)):
        chain = m.chain(block)
        assert (chain.batches, chain.epochs) == (4, 3)
        assert chain.contributions == pytest.approx((0.8 * clip / 8,))
        stds = [0.8 / 8 * clip * z for z in (4.0, 3.0, 2.0)]
        assert np.sqrt(chain.variances) == pytest.approx(stds)
        assert chain.proximal == pytest.approx((1 / 1.4,))
        assert chain.diameter == pytest.approx(2 * np.sqrt(min(NET.shape(block))), rel=1e-3)
        assert event.blocks.count(chain) == 2
    # The average is asked for with equal batches.
    worst, mean = (
        acc.epsilon(algorithm(average=a).event(), 1e-5, REPLACE).upper for a in (False, True)
    )
    assert mean < worst
    # Every record is in one batch, and padding counts for nothing.
    x = jnp.arange(11.0)[:, None] + 1
    rng = np.random.default_rng
    bx, by, mask = secret_partition((x, -x), 4, rng(1))
    assert bx.shape == (3, 4, 1)
    np.testing.assert_array_equal(np.sort(bx[mask].ravel()), np.arange(1, 12))
    np.testing.assert_array_equal(bx, -by)
    assert not np.any(bx[~mask])
    assert not np.array_equal(bx, secret_partition((x, -x), 4, rng(2))[0])
    # A record's batch is uniform.
    drawn = [np.asarray(secret_partition((x, x), 4, rng(s))[0]) for s in range(60)]
    first = [np.argwhere(batches[:, :, 0] == 1)[0, 0] for batches in drawn]
    assert abs(np.mean(np.array(first) == 0) - 4 / 11) < 0.3


def frozen_problem(rows=32, seed=0):
    x, y = data(rows, seed)
    weights = NET.init(jax.random.key(2))
    return weights, hidden._lift(NET, 1, False, weights, x.reshape(-1, 8, 6), y.reshape(-1, 8, 3))


def inner(w, frozen, std, epochs=1, proximal=bc.Proximal(), key=0, clip=0.3, mask=None):  # noqa: B008
    rows = jnp.ones(frozen.v.shape[:2], bool) if mask is None else mask
    return hidden._inner_loop(
        NET, 1, proximal, 0.8, 8.0, w, frozen, rows, np.float32(clip),
        np.float32(np.inf), np.full(epochs, std, np.float32), np.arange(epochs), jax.random.key(key),
    )  # fmt: skip


def test_the_loop_brings_starts_together_and_a_record_moves_it_no_further_than_charged():
    weights, frozen = frozen_problem()
    near, far = weights[1], weights[1] + 0.7 * jax.random.normal(jax.random.key(4), (3, 5))
    apart, most = float(jnp.linalg.norm(near - far)), 2 * 0.8 * 0.3 / 8
    # The record of batch 3, and its most different neighbour: the same noise, other sums.
    mine = frozen._replace(u=frozen.u.at[3, 0].set(1e3 * jnp.ones(3)))
    other = mine._replace(v=frozen.v.at[3, 0].set(-frozen.v[3, 0]))
    for proximal in (bc.Proximal(), bc.Proximal(0.5, 0.1, 1.0)):
        ends = [inner(w, frozen, 0.5, 4, proximal) for w in (near, far)]
        assert float(jnp.linalg.norm(ends[0] - ends[1])) <= apart * (1 + 1e-5)
        for epochs in (1, 4):
            ends = [inner(near, each, 0.5, epochs, proximal) for each in (mine, other)]
            gap = float(jnp.linalg.norm(ends[0] - ends[1]))
            assert gap <= epochs * most * (1 + 1e-4)
            assert gap > 0.99 * most or proximal != bc.Proximal() or epochs > 1
    # The noise has the charged variance: without records the last iterate is a sum of the steps'.
    frozen = jax.tree.map(lambda t: jnp.tile(t, (1, 1, 8)), frozen)
    none = jnp.zeros(frozen.v.shape[:2], bool)
    ends = [inner(jnp.zeros((24, 40)), frozen, 0.6, 5, key=k, mask=none) for k in range(4)]
    std = np.sqrt(20) * 0.8 / 8 * 0.6
    assert is_gaussian(ends, std)
    assert not is_gaussian(ends, 1.08 * std)


def test_the_whole_run_is_charged_before_it_starts_and_watching_costs_the_number():
    quiet, watched, seen = jaxdp.Ledger(), jaxdp.Ledger(), []
    secret = jaxdp.Secret.from_seed(3)
    one = bc.train_hidden(
        algorithm(), data(32), secret=secret, ledger=quiet,
        on_release=lambda s, b, w: seen.append((s, b, quiet.steps)),
    )  # fmt: skip
    assert seen == [(0, 1, 1), (0, 0, 1), (1, 1, 1), (1, 0, 1)]
    epochs = []
    two = bc.train_hidden(
        algorithm(), data(32), secret=secret, ledger=watched,
        watch=lambda s, b, w: epochs.append((s, b)),
    )  # fmt: skip
    assert len(epochs) == 2 * 2 * 3
    # Another event, other noise: the two releases of one seed must not subtract.
    assert not any(np.allclose(a, b, atol=1e-3) for a, b in zip(one, two, strict=True))
    low, high = (ledger.epsilon(1e-5, REPLACE) for ledger in (quiet, watched))
    assert low.upper < 0.9 * high.upper
    assert "lost" in high.note
    assert "lost" in watched.event.describe()
    assert "lost" not in quiet.event.describe()
    composed = acc.Repeated(acc.Gaussian(2.0), 3 * 4)
    assert high.upper == pytest.approx(acc.epsilon(composed, 1e-5, REPLACE).upper, rel=1e-6)
    # No other relation is answered.
    refused("HiddenState", quiet.epsilon, 1e-5, error=acc.UnsupportedEventError)


def test_the_convex_case_learns_and_so_do_blocks_one_after_the_other():
    x, y = data(512)
    m = algorithm(
        network=bc.Network((6, 3), 1.5), direct=True, dataset_size=512, batch_size=16,
        inner_epochs=30, sweeps=1, noise_multiplier=1.0,
    )  # fmt: skip
    weights = bc.train_hidden(m, (x, y), secret=jaxdp.Secret.from_seed(0))
    right = np.mean(np.argmax(m.network.apply(weights, x), 1) == np.argmax(y, 1))
    assert right > 0.8
    hidden_eps, exposed = (acc.epsilon(m.event(why), 1e-5, REPLACE).upper for why in ("", "seen"))
    assert hidden_eps < 0.6 * exposed
    m = algorithm(noise_multiplier=1e-3, l2_clip_norms=1.0, inner_epochs=10, sweeps=20)
    x, y = data(32)
    weights = bc.train_hidden(m, (x, y), secret=jaxdp.Secret.from_seed(0))
    assert np.mean(np.argmax(NET.apply(weights, x), 1) == np.argmax(y, 1)) > 0.8


def published(**changes):
    options = {
        "network": NET, "noise_std": 0.01, "step_size": 0.5, "batch_size": 8, "dataset_size": 30,
        "epochs": 3, "rescale": bc.Rescale(1.0),
    }  # fmt: skip
    return bc.AsPublished(**{**options, **changes})


def test_as_published_has_a_claim_no_guarantee_and_the_noise_it_says():
    ledger, done = jaxdp.Ledger(), []
    m = published(proximal=bc.Proximal(weight_decay=1.0), schedule=bc.linear(2.0, 1.0, 3))
    bc.train_as_published(m, data(30), ledger=ledger, on_epoch=lambda e, w: done.append(e))
    assert done == [1, 2, 3]
    assert ledger.epsilon(1e-5).upper == np.inf
    claim = m.claim(0.5, 1e-5)
    assert np.isfinite(claim.value)
    assert not any(claim.holds)
    chain = m.chains(0.5)[0]
    assert 2 * chain.contributions[0] == pytest.approx(0.5 * 0.5 / 8)
    assert np.sqrt(chain.variances) == pytest.approx([0.02, 0.015, 0.01])
    assert m.claim(0.5, 1e-5, order=claim.order).value < claim.value
    net = bc.Network((200, 200), 1.0)
    m = published(network=net, batch_size=5, dataset_size=5, epochs=3, rescale=None)
    # Wanted outputs equal to the outputs: no gradient.
    x, seen = jnp.zeros((5, 200)), []
    bc.train_as_published(m, (x, jnp.zeros((5, 200))), on_epoch=lambda e, w: seen.append(w[0]))
    moves = [seen[1] - seen[0], seen[2] - seen[1]]
    for move in moves:
        assert is_gaussian(move, 0.01)
        assert not is_gaussian(move, 0.011)
    assert are_uncorrelated(*moves)


def test_two_trainings_with_one_secret_share_neither_partition_nor_noise(monkeypatch):
    """One ledger; of a secret from the operating system also with two."""
    drawn, m = [], algorithm(sweeps=1)

    def kept(data, size, rng):
        found = secret_partition(data, size, rng)
        drawn.append(np.asarray(found[0]).tobytes())
        return found

    monkeypatch.setattr(hidden, "secret_partition", kept)
    for secret in (jaxdp.Secret.from_seed(3), jaxdp.Secret.new()):
        one, seeded = jaxdp.Ledger(), secret.reproducible
        ledgers = (one, one, one if seeded else jaxdp.Ledger())
        ends = [bc.train_hidden(m, data(32), secret=secret, ledger=each)[1] for each in ledgers]
        assert len({np.asarray(end).tobytes() for end in ends}) == 3
        assert one.steps == (3 if seeded else 2)
    assert len(set(drawn)) == 6


# Steps that do not expand
def expansion(network, v, u):
    """Of 60 pairs, the most by one gradient step of the first block on one record, as the loop's."""

    def gap(keys, near, step, clip, size):
        shape = network.shape(0)
        a = size * jax.random.normal(keys[0], shape)
        b = a + near * jax.random.normal(keys[1], shape)

        def taken(w):
            r = network.residual(0, (v @ w.T).reshape(u.shape), u, u)
            return w - step * clipped_sum(r, v, jnp.ones(1, bool), clip, convex=True)

        return jnp.linalg.norm(taken(a) - taken(b)) / jnp.linalg.norm(a - b)

    gaps = jax.jit(jax.vmap(gap, (0, 0, None, None, None)))
    keys, near = jax.random.split(jax.random.key(0), (60, 2)), 10.0 ** -(jnp.arange(60.0) % 4)
    return lambda *numbers: float(jnp.max(gaps(keys, near, *map(jnp.float32, numbers))))


def test_steps_of_convolutions_and_of_softmax_do_not_expand_nor_is_softmax_clipped():
    """At the largest step size allowed; at five times that they do."""
    net, patches = test_forms.CONV, test_forms.PATCHES
    v = forms.clip_to_ball(normal(3, patches.positions, patches.numbers), 1.5)[None]
    most, found = 2 / net.smoothness_of(0), expansion(net, v, normal(4, 1, patches.outputs))
    for clip in (0.3, 100.0):
        assert found(most, clip, 1.0) <= 1 + 1e-4
    assert found(5 * most, 100.0, 1.0) > 1.05
    # Nor do those of a softmax block, which are never clipped.
    net, u = bc.Network((4, 3), 1.5, loss="softmax"), jnp.eye(3)[:1]
    v = forms.clip_to_ball(10 * normal(5, 4), 1.5)[None]
    clip, most = np.sqrt(2) * 1.5 * (1 + 2**-20), 2 / net.smoothness_of(0)
    found = expansion(net, v, u)
    assert most == pytest.approx(4 / 1.5**2)
    for size in (0.1, 1.0, 10.0):
        assert found(most, clip, size) <= 1 + 1e-4
    assert found(8 * most, clip, 0.1) > 1.05
    wrong = net.residual(0, jnp.array([[-50.0, 50.0, 0.0]]), u, u)
    whole = clipped_sum(wrong, v, jnp.ones(1, bool), jnp.float32(clip), convex=True)
    np.testing.assert_allclose(whole, np.outer(wrong, v), atol=2e-3 * clip)
    given, words = {"batch_size": 4, "dataset_size": 16, "inner_epochs": 2}, "at least sqrt(2) B"
    refused(f"softmax block must be {words}", bc.HiddenBlocks, SOFTMAX, 2.0, 0.3, 0.5, **given)
    made = bc.HiddenBlocks(SOFTMAX, 2.0, (0.3, 2.2), 0.5, **given)
    assert made.chain(0).contributions != made.chain(1).contributions


# Noise that rounding must not swallow
def grown(noise_multiplier=1e-3, epochs=4_000):
    """A layer whose records pull at it with all that the clip norm allows, until its end."""
    one = bc.Network((1, 1), 1.0)
    return bc.HiddenBlocks(one, noise_multiplier, 0.5, 1.0, 8, 8, epochs, average=True, direct=True)


def test_noise_below_the_rounding_of_weights_is_no_hidden_chain():
    one, changed = bc.Network((1, 1), 1.0), dataclasses.replace
    for lost in (
        # One record among 1,000, batches of one, 20 epochs: the sign of its gradient was seen in
        # 62 % of 200 runs and never wrongly; at delta 0.05 the event says 1.73, and that is 3.5.
        lambda: bc.HiddenBlocks(one, 0.3, 0.33 * 2.0**-23, 1.0, 1, 1000, 20, average=True),
        lambda: grown(noise_multiplier=1e-6),  # 8 / 1e-6 of them in one step
        lambda: changed(grown(), proximal=bc.Proximal(spectral_radius=1e6)),
        lambda: changed(grown(), step_size=1e-35),  # zero in float32
    ):
        with pytest.raises(ValueError, match="lost in the rounding of the weights"):
            pytest.fail(f"not refused: {lost()}")
    for algorithm in ("sbcd-hidden", "sbcd-one-layer"):
        blocks = configured(algorithm, "mnist", {}).blocks()
        assert blocks.largest(0) > 50  # beyond what 2,000 steps of the recipe could reach


def test_weights_that_grow_do_not_outgrow_their_noise():
    m = grown()
    std = 1.0 * 1e-3 * 0.5 / 8
    assert 4_000 * 0.5 / std > 2.0**24  # without a bound, float32 would hold none of the noise
    x, y = np.full((8, 1), 0.9, np.float32), np.full((8, 1), 1e30, np.float32)
    (weights,) = bc.train_hidden(m, (x, y), secret=jaxdp.Secret.from_seed(1))
    assert float(weights[0, 0]) == pytest.approx(m.largest(0), rel=1e-6)
    assert float(jnp.spacing(2 * weights[0, 0])) <= std / 8
    # Below the bound a weight moves by whole gradients and all of the noise.
    near = jnp.full((1, 400), m.largest(0) / 2 / 400**0.5)
    none = bc.Network((400, 1), 1.0)
    frozen = Lifted(jnp.zeros((1, 8, 400)), jnp.zeros((1, 8, 1)))
    end = hidden._inner_loop(
        none, 0, bc.Proximal(), 1.0, 8.0, near, frozen, jnp.ones((1, 8), bool), np.float32(0.5),
        np.float32(m.largest(0)), np.full(1, 8 * std, np.float32), np.arange(1), jax.random.key(0),
    )  # fmt: skip
    assert is_gaussian([end - near], std)
    # Every row starts and stays in its ball, and the ball brings none apart.
    rng = np.random.default_rng(1)
    one = rng.normal(size=(200, 30)) * 10 ** rng.uniform(-2, 2, (200, 1))
    other = one + rng.normal(size=one.shape) * 10 ** rng.uniform(-4, 2, (200, 1))
    for scale in (1e-20, 1.0, 1e25):
        ends = [np.asarray(hidden.limit_rows(jnp.asarray(w * scale, jnp.float32), scale), np.float64)
                for w in (one, other)]  # fmt: skip
        assert all(np.max(np.linalg.norm(w, axis=1)) <= scale * (1 + 1e-6) for w in ends)
        gaps = [np.linalg.norm(a - b, axis=1) for a, b in (ends, (one * scale, other * scale))]
        assert np.all(gaps[0] <= gaps[1] + 1e-5 * scale)
    blocks = bc.HiddenBlocks(bc.Network((400, 30, 3), 1.0), 1.0, 2.0**-14, 1.0, 8, 80, 1)
    for block, w in enumerate(blocks.init(jax.random.key(0))):
        norms = np.linalg.norm(w, axis=1)
        assert np.max(norms) <= blocks.largest(block) * (1 + 1e-6)


def one_step(w, v, u, largest, clip=1e9, proximal=bc.Proximal()):  # noqa: B008
    """A hidden step of size 1 without noise on one record."""
    frozen = Lifted(jnp.asarray(v)[None, None], jnp.asarray(u)[None, None])
    return hidden._inner_loop(
        bc.Network((len(v), len(u)), 1.0), 0, proximal, 1.0, 1.0, jnp.asarray(w), frozen,
        jnp.ones((1, 1), bool), np.float32(clip), np.float32(largest), np.zeros(1, np.float32),
        np.arange(1), jax.random.key(0),
    )  # fmt: skip


@pytest.mark.parametrize("width", [784, 2**14])
def test_rounding_inside_a_step_stays_below_its_noise_where_weights_are_largest(width):
    """W v has as many terms as inputs: of a box for every weight, it would lose whole noises."""
    largest, rng, errors = 2.0**19, np.random.default_rng(0), []  # the noise is 1
    v = np.full(width, (1 - 2.0**-8) / np.sqrt(width), np.float32)
    for _ in range(8):
        rows = largest * rng.uniform(0.9, 1.0, (1, width)) + rng.normal(size=(1, width))
        w = np.asarray(hidden.limit_rows(jnp.asarray(rows, jnp.float32), largest), np.float64)
        u = np.float32(w @ v)
        moved = one_step(np.float32(w), v, u, largest)
        errors.append(np.linalg.norm(moved - (w - ((w @ v) - u)[:, None] * v)))
    assert max(errors) < 0.25


def _products(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for each in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns"):
                yield from _products(inner)


def test_no_product_of_a_hidden_step_is_left_to_units_of_fewer_digits():
    """TF32 has 10 binary digits: weights of 2^19 noises would be rounded to 2^8 of them."""
    for proximal in (bc.Proximal(), bc.Proximal(spectral_radius=1.0)):
        step = lambda w, p=proximal: one_step(w, np.ones(4), np.ones(3), 1.0, proximal=p)  # noqa: E731
        found = list(_products(jax.make_jaxpr(step)(jnp.ones((3, 4))).jaxpr))
        assert len(found) >= 2
        for product in found:
            assert product.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


def rounded_delta(std, shift, steps, epsilon):
    """Delta of a whole number that a record moves in the first of so many noisy, rounded steps."""
    half = int(12 * std * np.sqrt(steps)) + 50
    edges = np.arange(-half, half + 2) - 0.5
    size = 1 << int(np.ceil(np.log2(4 * half + 4)))

    def law(mean):
        return np.fft.rfft(np.diff(scipy.stats.norm.cdf(edges, mean, std)), size)

    turned = law(0.0) * np.exp(2j * np.pi * np.arange(size // 2 + 1) * half / size)
    p, q = (np.fft.irfft(law(m) * turned ** (steps - 1), size).clip(0) for m in (0.0, shift))
    grown = np.exp(epsilon)
    return max(np.maximum(p - grown * q, 0).sum(), np.maximum(q - grown * p, 0).sum())


def excess(std):
    """The most that such a chain's delta is above that of real numbers, as a factor."""
    found = []
    for steps in (1, 2, 20, 400):
        for shift in (0.3 * std, std, 3 * std, 0.51):
            mu = shift / (std * np.sqrt(steps))
            for epsilon in (0.0, mu, 3 * mu):
                exact = acc.delta(acc.Gaussian(1 / mu), epsilon).upper
                found.append(rounded_delta(std, shift, steps, epsilon) / exact)
    return max(found)


def test_noise_of_eight_spacings_hides_a_step_as_real_numbers_would():
    least = 1 / (2.0**-23 * 2 * hidden._SPACINGS)  # in spacings of the largest sum
    assert least == 8
    assert excess(least) <= 1
    assert excess(0.25) > 10  # where a quarter of a spacing would not


# Under audit: the last iterate alone
FIXED = "R3, two batches in a fixed order, weight decay"


def audited():
    """Scores of 1,500 runs with each of two records, and whether they refute the event."""
    algorithm = ALGORITHMS[FIXED]
    run = hidden_run(algorithm, *worlds(algorithm), partition=False, score=first_weights)
    found = two_worlds(run, 1500, seed=1)
    return found, audit_event(*found, algorithm.event(), relation=REPLACE).refuted


@pytest.mark.slow
def test_a_right_loop_stays_below_what_is_proven_and_above_what_is_published(monkeypatch):
    found, refuted = audited()
    assert not refuted
    row = as_gaussian(*found, ALGORITHMS[FIXED].chain(0))
    assert row["published_s"] < row["audited_s"] < row["proven_s"]
    # Half the noise is caught.
    added = hidden.add_normals
    monkeypatch.setattr(hidden, "add_normals", lambda tree, std, words: added(tree, std / 2, words))
    hidden._inner_loop.clear_cache()
    try:
        assert audited()[1]
    finally:
        hidden._inner_loop.clear_cache()


def test_an_audited_run_is_that_of_training_and_what_does_not_fit_is_refused():
    """With the same start and next to no noise, the audited loop ends where training ends."""
    quiet = bc.HiddenBlocks(bc.Network((2, 1), 1.0), 1e-5, 1.0, 1.0, 4, 4, 5, direct=True)
    data, other = worlds(quiet)
    run, key = jax.jit(hidden_run(quiet, data, other)), jax.random.key_data(jax.random.key(0))
    mine, gone = (run(key, jnp.asarray(member)) for member in (True, False))
    (trained,) = bc.train_hidden(quiet, data, secret=jaxdp.Secret.from_seed(1))
    np.testing.assert_allclose(mine, np.ravel(trained), atol=1e-4)
    assert float(mine[0]) > 1
    assert float(gone[0]) == pytest.approx(-float(mine[0]), abs=1e-4)
    algorithm = ALGORITHMS[FIXED]
    data, other = worlds(algorithm)
    fewer = (data[0][:3], data[1][:3])
    refused("data must hold the declared 4 records", hidden_run, algorithm, fewer, other)
    averaged = ALGORITHMS["R3, two batches in a secret order, averaged"]
    refused("partition must be True", hidden_run, averaged, data, other, partition=False)
