"""R1: sensitivity by neighbours, noise by statistics, one draw one event, one compiled sweep."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.auditing import audit_event, two_worlds
from jaxdp.papers import block_coordinate as bc
from jaxdp.papers.block_coordinate import audit, released
from jaxdp.papers.block_coordinate import sweep as sweeping
from jaxdp.papers.block_coordinate.sweep import clipped_sum
from tests.laws import are_uncorrelated, is_gaussian

NET = bc.Network((6, 8, 3), 1.5)
SOFTMAX = bc.Network((5, 4, 3), 1.5, loss="softmax")
DEEP = bc.Network((6, 5, 7, 3), 1.5)  # both branches of the ridge solve


def data(rows, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6))
    y = np.eye(3)[np.argmax(x[:, :3], axis=1)]
    return jnp.asarray(x / np.sqrt(6), jnp.float32), jnp.asarray(y, jnp.float32)


def algorithm(z=2.0, clip=0.3, net=NET, **options):
    return bc.ReleasedBlocks(net, z, clip, 0.5, 16, 64, **options)


lift = jax.jit(bc.Network.lift, static_argnums=(0, 1))
total = jax.jit(clipped_sum)


def sweep(m, weights, x, y, mask, z=0.0, key=0):
    clips = jnp.asarray(m.l2_clip_norms, jnp.float32)
    return released.compiled_sweep(
        m.network, m.proximal, m.rescale, m.step_size, float(m.batch_size), weights, x, y,
        jnp.asarray(mask), clips, z * clips, jax.random.key(key),
    )  # fmt: skip


WEIRD = {
    "ordinary": (1.0, 1.0), "huge input": (1e6, 1.0), "huge label": (1.0, 1e6),
    "nan input": (np.nan, 1.0), "inf label": (1.0, np.inf), "overflow": (1e30, 1e30),
}  # fmt: skip


def test_one_record_moves_each_block_by_at_most_its_clip_norm():
    """Given what was released before it: the last block, then every block on frozen later ones."""
    m, weights = algorithm(clip=(0.3, 0.1)), NET.init(jax.random.key(1))
    there, gone = jnp.ones(16, bool), jnp.arange(16) > 0
    for name, record in WEIRD.items():
        x, y = data(16)
        x, y = x.at[0].multiply(record[0]), y.at[0].multiply(record[1])
        for block, clip in enumerate(m.l2_clip_norms):
            frozen = lift(NET, block, weights, x, y)
            residuals = frozen.v @ weights[block].T - frozen.u
            moved = [total(residuals, frozen.v, mask, clip) for mask in (there, gone)]
            assert float(jnp.linalg.norm(moved[0] - moved[1])) <= clip, (name, block)
        last = [sweep(m, weights, x, y, mask)[1] for mask in (there, gone)]
        gap = float(jnp.linalg.norm(last[0] - last[1])) * m.batch_size / m.step_size
        assert gap <= 0.1 * (1 + 1e-4), name
        assert gap > 0.0997 or name != "huge label"


def test_the_splitting_variables_of_a_record_are_functions_of_it_alone():
    weights = NET.init(jax.random.key(1))
    x, y = data(16)
    other_x, other_y = data(16, seed=9)
    for block in range(2):
        mine = lift(NET, block, weights, x, y)
        among_others = lift(NET, block, weights, other_x.at[2].set(x[2]), other_y.at[2].set(y[2]))
        for a, b in zip(mine, among_others, strict=True):
            np.testing.assert_array_equal(a[2], b[2])
            assert not np.array_equal(a[3], b[3])


def test_a_sweep_is_the_forms_in_order():
    """Against a loop over records and blocks, written from the formulas in NumPy."""
    m = algorithm(clip=0.2, net=DEEP)
    weights = DEEP.init(jax.random.key(3))
    x, y = data(5)
    new = [np.float64(w) for w in weights]
    rows = []
    for record in np.float64(x):
        vs, us = [], []
        for i, w in enumerate(new):
            v = record if i == 0 else np.maximum(us[-1], 0)
            vs.append(v * min(1, 1.5 / np.linalg.norm(v)))
            us.append(w @ vs[-1])
        rows.append((vs, us))
    targets = [None] * 5
    for i in (2, 1, 0):
        gradient = np.zeros_like(new[i])
        for n, (vs, us) in enumerate(rows):
            if i == 2:
                u = ((np.float64(y[n]) + us[2]) / 2 + us[2]) / 2
            else:
                w = new[i + 1]
                v = np.linalg.solve(
                    np.eye(len(w.T)) + w.T @ w, np.maximum(us[i], 0) + w.T @ targets[n]
                )
                v = v * min(1, 1.5 / np.linalg.norm(v))
                plus, minus = np.maximum((v + us[i]) / 2, 0), np.minimum(us[i], 0)
                cost = lambda t, v=v, b=us[i]: (np.maximum(t, 0) - v) ** 2 + (t - b) ** 2  # noqa: E731
                u = np.where(cost(plus) <= cost(minus), plus, minus)
            targets[n] = u
            r = us[i] - u
            gradient += np.outer(
                r * min(1, 0.2 / (np.linalg.norm(r) * np.linalg.norm(vs[i]))), vs[i]
            )
        new[i] = new[i] - 0.5 / 16 * gradient
    found = sweep(m, weights, x, y, np.ones(5, bool))
    for a, b in zip(found, new, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_noise_has_the_stated_scale_in_every_block_and_is_never_used_twice():
    net = bc.Network((60, 50, 40), 1.0)
    m = bc.ReleasedBlocks(net, (2.0, 3.0), (0.3, 0.1), 0.5, 16, 64)
    weights = tuple(jnp.zeros(net.shape(i)) for i in range(2))
    x, y = jnp.zeros((64, 60)), jnp.zeros((64, 40))
    ledger, secret = jaxdp.Ledger(), jaxdp.Secret.new()
    samplers = [m.sampler(64, ledger=ledger, secret=secret) for _ in range(2)]
    draws = [samplers[0].draw(), samplers[0].draw(), samplers[1].draw()]
    first, second, other = (
        m.step(weights, (x, y), dataclasses.replace(d, mask=np.zeros_like(d.mask))) for d in draws
    )
    for i, std in enumerate((2.0 * 0.3, 3.0 * 0.1)):
        std *= released.noise_share(m.batch_size)
        assert is_gaussian(first[i], std * 0.5 / 16)
        assert not is_gaussian(first[i], 1.2 * std * 0.5 / 16)
    assert are_uncorrelated(first[0], second[0])
    assert are_uncorrelated(first[0], other[0])  # another sampler of the same secret
    assert are_uncorrelated(first[0].ravel()[:2000], first[1].ravel()[:2000])
    with pytest.raises(ValueError, match="ticket must be spent once"):
        m.step(weights, (x, y), draws[0])
    by_hand = jaxdp.types.Draw(draws[0].indices, draws[0].mask, 0, 64)
    with pytest.raises(ValueError, match="draw must come from sampler"):
        m.step(weights, (x, y), by_hand)
    assert ledger.steps == 3
    assert ledger.unverified() == []


def test_one_sweep_is_one_event():
    m = algorithm(z=(2.0, 4.0))
    assert m.event() == acc.PoissonSampled(acc.events.joint_gaussian([2.0, 4.0]), 16 / 64)
    apart = acc.Composed([acc.PoissonSampled(acc.Gaussian(z), 0.25) for z in (2.0, 4.0)])
    together = acc.epsilon(acc.Repeated(m.event(), 50), 1e-5).upper
    assert together > acc.epsilon(acc.Repeated(apart, 50), 1e-5).upper


def test_the_ledger_is_charged_for_each_sweep_before_its_draw_with_its_own_noise():
    ledger, seen = jaxdp.Ledger(), []
    m = algorithm(schedule=bc.linear(2.0, 1.0, 2, steps_each=2))

    def look(step, weights):
        seen.append((step, ledger.steps))

    bc.train(m, data(64), 3, ledger=ledger, on_step=look)
    assert ledger.unverified() == []
    assert seen == [(1, 1), (2, 2), (3, 3)]
    assert [e.event for e in ledger.entries] == [m.event(0), m.event(2)]
    assert m.event(0).event.noise_multiplier == pytest.approx(2 * 2.0 / np.sqrt(2))
    assert ledger.epsilon(1e-5).upper == pytest.approx(acc.epsilon(m.events(3), 1e-5).upper)


def test_a_run_is_a_function_of_its_secret_and_compiles_once():
    before = released._step._cache_size()
    m = algorithm(schedule=bc.linear(2.0, 1.0, 4))
    runs = [bc.train(m, data(64), 4, secret=jaxdp.Secret.from_seed(s)) for s in (1, 1, 2)]
    jax.tree.map(np.testing.assert_array_equal, runs[0], runs[1])
    assert not np.array_equal(runs[0][0], runs[2][0])
    assert released._step._cache_size() - before <= 1
    secret, ledger = jaxdp.Secret.from_seed(1), jaxdp.Ledger()
    again = [bc.train(m, data(64), 4, secret=secret, ledger=ledger) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, runs[0], again[0])
    assert not np.array_equal(again[0][0], again[1][0])


def test_larger_draws_are_not_cut():
    m = algorithm(z=0.0)
    weights, data_ = NET.init(jax.random.key(1)), data(64)
    indices, mask = np.arange(16, dtype=np.int32).reshape(2, 8), np.ones((2, 8), bool)
    both = m.step(
        weights, data_, dataclasses.replace(m.sampler(64).draw(), indices=indices, mask=mask)
    )
    exact = sweep(m, weights, *data_, np.arange(64) < 16)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), both, exact)


def test_it_learns_without_noise_and_projection_keeps_it_lipschitz():
    x, y = data(64)
    m = algorithm(z=0.0, clip=1.0, proximal=bc.Proximal(spectral_radius=1.0))
    weights = bc.train(m, (x, y), 150, secret=jaxdp.Secret.from_seed(0))
    assert np.mean(np.argmax(NET.apply(weights, x), 1) == np.argmax(y, 1)) > 0.7
    assert max(np.linalg.norm(w, 2) for w in weights) < 1.001


EVIL = {
    "nan": np.full(6, np.nan),
    "one nan": np.array([np.nan, 1, 1, 1, 1, 1]),
    "inf": np.array([np.inf, -np.inf, 1, 1, 1, 1]),
    "largest": np.full(6, 3e38),
    "signs": np.array([1e37, -1e37, 1e37, 1e37, -1e37, -1e37]),
    "the others": np.array([-1e37, 1e37, -1e37, -1e37, 1e37, 1e37]),
    "far apart": np.array([3e38, 1e-38, 1e-38, 0, 0, 0]),
    "denormal": np.full(6, 1e-40),
    "zero": np.zeros(6),
}


@pytest.mark.parametrize("loss", ["squared", "softmax"])
@pytest.mark.parametrize("grown", [1.0, 1e4])
def test_no_record_whatever_it_holds_moves_a_release_by_more_than_its_clip_norm(loss, grown):
    network = bc.Network((6, 5, 3), 1.5, loss=loss)
    weights = tuple(w * grown for w in network.init(jax.random.key(1)))
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(16, 6)).astype(np.float32),
        np.eye(3, dtype=np.float32)[np.zeros(16, int)],
    )
    x[:, 1], x[2:6] = 0, x[1]  # a column of zeros, duplicates, one class alone
    norms, stds = np.full(2, 0.1, np.float32), np.full(2, 0.01, np.float32)

    def moved(x, y, there):
        new = released.compiled_sweep(
            network, bc.Proximal(), None, 5.0, 4.0, weights, x, y, there, norms, stds,
            jax.random.key(3),
        )  # fmt: skip
        assert all(np.isfinite(np.asarray(w)).all() for w in new)
        return np.asarray(new[-1], np.float64)

    far = 0.0
    for record in EVIL.values():
        for wanted in ([0, 0, 1], [np.nan, 0, 0], [np.inf, 0, 0], [3e38, -3e38, 0]):
            rows, labels = x.copy(), y.copy()
            rows[7], labels[7] = record, wanted
            for others in (np.ones(16, bool), np.zeros(16, bool)):  # an empty lot
                with_it, without = others.copy(), others.copy()
                with_it[7], without[7] = True, False
                gap = moved(rows, labels, with_it) - moved(rows, labels, without)
                far = max(far, float(np.linalg.norm(gap)))
    assert 0.1 * 5 / 4 * 0.5 < far <= 0.1 * 5 / 4 + 3e-6 * grown


def test_labels_that_are_no_classes_count_as_the_largest():
    """So that no label makes a softmax gradient longer than sqrt(2) B."""
    wild = jnp.array([[1e30, -5.0, jnp.inf], [0.2, 0.2, 0.1]])
    r = SOFTMAX.residual(1, jnp.zeros((2, 3)), wild, wild)
    assert float(jnp.max(jnp.linalg.norm(r, axis=1))) <= np.sqrt(2)


R1 = bc.ReleasedBlocks(SOFTMAX, 2.5, 0.05, 1.0, 1, 4)


def scores(algorithm, count=1200):
    small = audit.tiny(algorithm)
    run = audit.released_run(small, audit._alone(small), 3)
    return small, two_worlds(run, count, seed=3)


def test_the_softmax_block_in_two_worlds():
    small, (inside, outside) = scores(R1)
    assert not audit_event(inside, outside, small.events(3)).refuted
    # The attack is worth its name: the score tells the worlds apart.
    assert np.mean(inside) > np.mean(outside) + 0.2 * np.std(outside)


def test_half_the_noise_in_a_softmax_sweep_is_caught(monkeypatch):
    added = sweeping.noised
    monkeypatch.setattr(sweeping, "noised", lambda tree, std, words: added(tree, std / 3, words))
    small, (inside, outside) = scores(R1)
    assert audit_event(inside, outside, small.events(3)).refuted


def test_the_sums_of_a_sweep_are_those_that_an_audit_computes_again():
    """Without noise: what moved the weights is what ``sums_given`` says, block by block."""
    x, y = jax.random.normal(jax.random.key(8), (6, 5)) / 3, jnp.eye(3)[jnp.arange(6) % 3]
    old, clips, mask = SOFTMAX.init(jax.random.key(2)), jnp.full(2, 0.1), jnp.arange(6) < 5
    new = released.compiled_sweep(
        SOFTMAX, bc.Proximal(), None, 0.5, 4.0, old, x, y, mask, clips, jnp.zeros(2),
        jax.random.key(0),
    )  # fmt: skip
    sums = sweeping.sums_given(SOFTMAX, old, new, x, y, mask, clips)
    for before, after, total in zip(old, new, sums, strict=True):
        np.testing.assert_allclose((before - after) * 4 / 0.5, total, atol=1e-5)


def test_the_audit_refuses_what_its_score_does_not_fit():
    data = audit._alone(audit.tiny(R1))
    with pytest.raises(ValueError, match="must not rescale"):
        audit.released_run(dataclasses.replace(R1, rescale=bc.Rescale(1.0)), data, 2)
