"""The softmax and the convolutional block: sensitivity, and steps that do not expand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.auditing import audit_event, two_worlds
from jaxdp.papers import block_coordinate as bc
from jaxdp.papers.block_coordinate import audit, forms, sweep
from jaxdp.papers.block_coordinate.patches import Patches
from jaxdp.papers.block_coordinate.sweep import clipped_sum

PATCHES = Patches((6, 6, 2), 3, 2, 4)
NET = bc.Network((72, PATCHES.outputs, 3), 1.5, patches=PATCHES)
SOFTMAX = bc.Network((5, 4, 3), 1.5, loss="softmax")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def test_the_convolution_is_that_of_lax():
    x, (w, *_) = normal(0, 72) / 9, NET.init(jax.random.key(1))
    product = NET.forward((w,), x)[1][0]
    kernel = w.reshape(4, 3, 3, 2).transpose(1, 2, 3, 0)
    wanted = jax.lax.conv_general_dilated(
        x.reshape(1, 6, 6, 2), kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    length = float(forms.length(PATCHES.cut(x)))
    assert length < 1.5
    np.testing.assert_allclose(product, np.ravel(wanted), atol=1e-5)


def test_length_is_between_the_spectral_and_the_frobenius_norm():
    for seed in range(20):
        v = normal(seed, 7, 5) * 10.0 ** (seed - 10)
        spectral, frobenius = np.linalg.norm(v, 2), np.linalg.norm(v)
        assert spectral * (1 - 1e-5) <= float(forms.length(v)) <= frobenius * (1 + 1e-5)
    assert float(forms.length(jnp.ones(4))) == pytest.approx(2.0)
    assert not np.any(forms.clip_to_ball(jnp.full((3, 2), jnp.nan), 1.0))


@pytest.mark.parametrize("convex", [False, True])
def test_a_convolution_is_clipped_over_all_positions_together(convex):
    v, r = normal(1, 9, 4, 18), normal(2, 9, 16)
    r = r.at[0].multiply(1e6).at[1].set(jnp.nan).at[2].multiply(1e-6)
    grads = np.einsum("mtp,mtq->mpq", r.reshape(9, 4, 4), v)
    mask = jnp.arange(9) != 3
    total = clipped_sum(r, v, mask, jnp.float32(0.5), convex)
    parts = []
    for i in range(9):
        one = clipped_sum(r, v, jnp.arange(9) == i, jnp.float32(0.5), convex)
        parts.append(np.asarray(one))
        length = np.linalg.norm(one)
        assert length <= 0.5
        if i == 1:
            assert not length
            continue
        # In the gradient's own direction; without convexity as long as the bound allows.
        assert np.sum(one * grads[i]) == pytest.approx(length * np.linalg.norm(grads[i]), rel=1e-3)
        if not convex:
            wanted = min(0.5, np.linalg.norm(grads[i]))
            assert length == pytest.approx(wanted, rel=3e-3)
    np.testing.assert_allclose(total, sum(parts) - parts[3], atol=1e-5)


def step_map(network, block, v, u, step, clip):
    """One gradient step on one record, as the hidden loop takes it."""

    def step_of(w):
        r = network.residual(block, (v @ w.T).reshape(u.shape), u, u)
        return w - step * clipped_sum(r, v, jnp.ones(1, bool), jnp.float32(clip), convex=True)

    return jax.jit(step_of)


def most_expansion(network, block, v, u, step, clip, size):
    take, worst = step_map(network, block, v, u, step, clip), 0.0
    for seed in range(60):
        a = size * normal(seed, *network.shape(block))
        b = a + 10.0 ** (-(seed % 4)) * normal(seed + 100, *network.shape(block))
        moved = jnp.linalg.norm(take(a) - take(b)) / jnp.linalg.norm(a - b)
        worst = max(worst, float(moved))
    return worst


def test_steps_of_a_convolutional_block_do_not_expand():
    """At the largest step size allowed; at five times that they do."""
    v = forms.clip_to_ball(normal(3, PATCHES.positions, PATCHES.numbers), 1.5)[None]
    u = normal(4, 1, PATCHES.outputs)
    most = 2 / NET.smoothness_of(0)
    for clip in (0.3, 100.0):
        assert most_expansion(NET, 0, v, u, most, clip, 1.0) <= 1 + 1e-4
    assert most_expansion(NET, 0, v, u, 5 * most, 100.0, 1.0) > 1.05


def test_steps_of_a_softmax_block_do_not_expand_and_are_never_clipped():
    net = bc.Network((4, 3), 1.5, loss="softmax")
    v = forms.clip_to_ball(10 * normal(5, 4), 1.5)[None]
    u = jnp.eye(3)[:1]
    clip = np.sqrt(2) * 1.5 * (1 + 2**-20)
    most = 2 / net.smoothness_of(0)
    assert most == pytest.approx(4 / 1.5**2)
    for size in (0.1, 1.0, 10.0):
        assert most_expansion(net, 0, v, u, most, clip, size) <= 1 + 1e-4
    assert most_expansion(net, 0, v, u, 8 * most, clip, 0.1) > 1.05
    wrong = net.residual(0, jnp.array([[-50.0, 50.0, 0.0]]), u, u)
    whole = clipped_sum(wrong, v, jnp.ones(1, bool), jnp.float32(clip), convex=True)
    np.testing.assert_allclose(whole, np.outer(wrong, v), atol=2e-3 * clip)


def test_a_hidden_softmax_block_must_not_be_clipped():
    given = {"batch_size": 4, "dataset_size": 16, "inner_epochs": 2}
    with pytest.raises(ValueError, match=r"softmax block must be at least sqrt\(2\) B"):
        bc.HiddenBlocks(SOFTMAX, 2.0, 0.3, 0.5, **given)
    made = bc.HiddenBlocks(SOFTMAX, 2.0, (0.3, 2.2), 0.5, **given)
    assert made.chain(0).contributions != made.chain(1).contributions


def test_the_last_u_of_cross_entropy_is_stationary():
    y = forms.one_hot(jnp.array([0.1, 0.7, 0.2]))
    np.testing.assert_array_equal(y, [0, 1, 0])
    for gamma in (0.5, 1.0, 4.0):
        product = 3 * normal(6, 3)
        u = forms.softmax_u(y, product, gamma)
        np.testing.assert_allclose(
            jax.nn.softmax(u) - y + gamma * (u - product), np.zeros(3), atol=1e-3
        )


def test_labels_that_are_no_classes_count_as_the_largest():
    """So that no label makes a softmax gradient longer than sqrt(2) B."""
    wild = jnp.array([[1e30, -5.0, jnp.inf], [0.2, 0.2, 0.1]])
    r = SOFTMAX.residual(1, jnp.zeros((2, 3)), wild, wild)
    assert float(jnp.max(jnp.linalg.norm(r, axis=1))) <= np.sqrt(2)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (lambda: bc.Network((72, 9, 3), 1.0, patches=PATCHES), "widths must begin with 72 and 16"),
        (lambda: bc.Network((4, 3), 1.0, loss="hinge"), "loss must be one of squared, softmax"),
        (lambda: Patches((6, 6, 1), 7, 1, 1), "kernel must be within an image"),
        (lambda: Patches((6, 6), 2, 1, 1), "shape must be"),
        (lambda: Patches((6, 6, 1), 2, 0, 1), "stride must be"),
    ],
)
def test_bad_input(network, words):
    with pytest.raises(ValueError, match=words):
        network()


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
    added = sweep.noised
    monkeypatch.setattr(sweep, "noised", lambda tree, std, words: added(tree, std / 3, words))
    small, (inside, outside) = scores(R1)
    assert audit_event(inside, outside, small.events(3)).refuted


def test_the_sums_of_a_sweep_are_those_that_an_audit_computes_again():
    """Without noise: what moved the weights is what ``sums_given`` says, block by block."""
    x, y = normal(8, 6, 5) / 3, jnp.eye(3)[jnp.arange(6) % 3]
    old, clips, mask = SOFTMAX.init(jax.random.key(2)), jnp.full(2, 0.1), jnp.arange(6) < 5
    new = sweep.sweep(
        SOFTMAX, bc.Proximal(), None, 0.5, 4.0, old, x, y, mask, clips, jnp.zeros(2),
        jax.random.key(0),
    )  # fmt: skip
    sums = sweep.sums_given(SOFTMAX, old, new, x, y, mask, clips)
    for before, after, total in zip(old, new, sums, strict=True):
        np.testing.assert_allclose((before - after) * 4 / 0.5, total, atol=1e-5)


def test_the_audit_refuses_what_its_score_does_not_fit():
    data = audit._alone(audit.tiny(R1))
    with pytest.raises(ValueError, match="must not rescale"):
        audit.released_run(dataclasses.replace(R1, rescale=bc.Rescale(1.0)), data, 2)
