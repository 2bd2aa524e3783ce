"""R2 and R3: the loop is the chain that is charged, and only its last iterate leaves it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.papers import block_coordinate as bc
from jaxdp.papers.block_coordinate import hidden
from jaxdp.papers.block_coordinate.partition import secret_partition
from jaxdp.report import words
from tests.laws import are_uncorrelated, is_gaussian
from tests.papers.block_coordinate.test_released import data

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


@pytest.mark.parametrize("proximal", [bc.Proximal(), bc.Proximal(0.5, 0.1, 1.0)])
def test_the_loop_brings_starts_together_and_a_record_moves_it_no_further_than_charged(proximal):
    weights, frozen = frozen_problem()
    near, far = weights[1], weights[1] + 0.7 * jax.random.normal(jax.random.key(4), (3, 5))
    ends = [inner(w, frozen, 0.5, 4, proximal) for w in (near, far)]
    assert float(jnp.linalg.norm(ends[0] - ends[1])) <= float(jnp.linalg.norm(near - far)) * (
        1 + 1e-5
    )
    # The record of batch 3, replaced by its most different neighbour: the same noise, other sums.
    other = frozen._replace(
        v=frozen.v.at[3, 0].set(-frozen.v[3, 0]), u=frozen.u.at[3, 0].set(1e3 * jnp.ones(3))
    )
    mine = frozen._replace(u=frozen.u.at[3, 0].set(1e3 * jnp.ones(3)))
    for epochs in (1, 4):
        gap = jnp.linalg.norm(
            inner(near, mine, 0.5, epochs, proximal) - inner(near, other, 0.5, epochs, proximal)
        )
        assert float(gap) <= epochs * 2 * 0.8 * 0.3 / 8 * (1 + 1e-4)
        if proximal == bc.Proximal() and epochs == 1:
            assert float(gap) > 0.99 * 2 * 0.8 * 0.3 / 8


def test_the_noise_of_the_loop_has_the_charged_variance():
    """Without records the last iterate is a sum of the steps' noise."""
    _, frozen = frozen_problem()
    frozen = jax.tree.map(lambda t: jnp.tile(t, (1, 1, 8)), frozen)
    none = jnp.zeros(frozen.v.shape[:2], bool)
    ends = [inner(jnp.zeros((24, 40)), frozen, 0.6, 5, key=k, mask=none) for k in range(4)]
    std = np.sqrt(20) * 0.8 / 8 * 0.6
    assert is_gaussian(ends, std)
    assert not is_gaussian(ends, 1.08 * std)


def test_every_record_is_in_one_batch_and_padding_counts_for_nothing():
    x = jnp.arange(11.0)[:, None] + 1
    rng = np.random.default_rng
    bx, by, mask = secret_partition((x, -x), 4, rng(1))
    assert bx.shape == (3, 4, 1)
    np.testing.assert_array_equal(np.sort(bx[mask].ravel()), np.arange(1, 12))
    np.testing.assert_array_equal(bx, -by)
    assert not np.any(bx[~mask])
    assert not np.array_equal(bx, secret_partition((x, -x), 4, rng(2))[0])
    # A record's batch is uniform.
    first = [
        int(jnp.argwhere(secret_partition((x, x), 4, rng(s))[0][:, :, 0] == 1)[0, 0])
        for s in range(60)
    ]
    assert abs(np.mean(np.array(first) == 0) - 4 / 11) < 0.3


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
    assert "lost" in words.describe(watched.event)
    assert "lost" not in words.describe(quiet.event)
    composed = acc.Repeated(acc.Gaussian(2.0), 3 * 4)
    assert high.upper == pytest.approx(acc.epsilon(composed, 1e-5, REPLACE).upper, rel=1e-6)


def test_no_other_relation_is_answered():
    ledger = jaxdp.Ledger()
    bc.train_hidden(algorithm(sweeps=1, inner_epochs=1), data(32), ledger=ledger)
    with pytest.raises(acc.UnsupportedEventError, match="HiddenState"):
        ledger.epsilon(1e-5)


def test_the_average_is_asked_for_with_equal_batches():
    worst, mean = (
        acc.epsilon(algorithm(average=a).event(), 1e-5, REPLACE).upper for a in (False, True)
    )
    assert mean < worst


def test_the_convex_case_learns():
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


def test_blocks_learn_one_after_the_other():
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


def test_as_published_has_a_claim_and_no_guarantee():
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


def test_as_published_adds_the_noise_it_says():
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


@pytest.mark.parametrize("seeded", [True, False])
def test_two_trainings_with_one_secret_share_neither_partition_nor_noise(seeded):
    """One ledger; of a secret from the operating system also with two."""
    secret = jaxdp.Secret.from_seed(3) if seeded else jaxdp.Secret.new()
    one, drawn = jaxdp.Ledger(), []

    def kept(data, size, rng):
        found = secret_partition(data, size, rng)
        drawn.append(np.asarray(found[0]))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden, "secret_partition", kept)
        ends = [
            bc.train_hidden(algorithm(sweeps=1), data(32), secret=secret, ledger=ledger)[1]
            for ledger in (one, one, one if seeded else jaxdp.Ledger())
        ]
    assert len({end.tobytes() for end in map(np.asarray, ends)}) == 3
    assert len({part.tobytes() for part in drawn}) == 3
    assert one.steps == (3 if seeded else 2)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: algorithm(step_size=0.9), "step_size"),
        (lambda: algorithm(noise_multiplier=0.0), "noise_multiplier"),
        (lambda: algorithm(l2_clip_norms=(1.0, 1.0, 1.0)), "l2_clip_norms"),
        (lambda: algorithm(l2_clip_norms=(1.0, 1e11)), "l2_clip_norms must be in"),
        (lambda: algorithm(batch_size=33), "batch_size"),
        (lambda: algorithm(batch_size=5, average=True), "batch_size"),
        (lambda: algorithm(inner_epochs=0), "inner_epochs"),
        (lambda: algorithm(direct=True), "direct"),
        (lambda: bc.train_hidden(algorithm(), data(31)), "dataset_size"),
        (lambda: published(noise_std=-1.0), "noise_std"),
        (lambda: published(epochs=0), "epochs"),
        (lambda: published().claim(0.0, 1e-5), "sensitivity"),
    ],
)
def test_bad_input_is_named(build, name):
    with pytest.raises(ValueError, match=name):
        build()
