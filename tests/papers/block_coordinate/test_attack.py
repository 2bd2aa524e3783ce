"""Attacks on block coordinate descent: records beyond float32's squares, runs of odd settings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxdp import accounting as acc
from jaxdp.papers.block_coordinate import forms, hidden, training
from jaxdp.papers.block_coordinate.command import configured, train_blocks
from jaxdp.papers.block_coordinate.hidden import HiddenBlocks, train_hidden
from jaxdp.papers.block_coordinate.network import Lifted, Network
from jaxdp.papers.block_coordinate.proximal import Proximal
from jaxdp.papers.block_coordinate.released import compiled_sweep
from jaxdp.papers.block_coordinate.run import BlockRun, command_of
from jaxdp.papers.block_coordinate.schedules import SweepSchedule
from jaxdp.papers.block_coordinate.settings import records
from jaxdp.papers.block_coordinate.sweep import clipped_sum
from jaxdp.runs import RunDirectory
from jaxdp.seeds import Secret
from tests.laws import is_gaussian
from tests.runs.small import dataset, ignore

SMALL = {"batch_size": 40, "dataset_size": 200, "noise_multiplier": 1.0}


@jax.jit
def _added(residuals, v, l2_clip_norm, convex):
    mask = jnp.ones(len(residuals), bool)
    ways = [clipped_sum(residuals, v, mask, l2_clip_norm, way) for way in (True, False)]
    return jnp.where(convex, *ways)


def norm_of(residuals, v, l2_clip_norm, convex=False):
    parts = (jnp.asarray(part, jnp.float32)[None] for part in (residuals, v))
    total = _added(*parts, np.float32(l2_clip_norm), convex)
    return np.linalg.norm(np.asarray(total, np.float64))


@pytest.mark.parametrize(
    ("residual", "v", "l2_clip_norm"),
    [
        (np.full(256, 0.9e-19), np.full(4, 4.9e9), 1e-10),  # the residual's squares are zero
        (np.full(4, 1e18), np.full(784, 0.9e-19), 0.05),  # the input's are
        (np.full(4, 1e37), np.full(784, 1e-36), 0.05),
        (np.full(4, 1e20), np.full(4, 1e-10), 1e9),  # the residual's are infinite
    ],
)
@pytest.mark.parametrize("convex", [False, True])
def test_no_record_adds_more_than_the_clip_norm_or_falls_out(residual, v, l2_clip_norm, convex):
    added = norm_of(residual, v, l2_clip_norm, convex)
    # One that is dropped where its neighbours are shortened would make a hidden step expand.
    assert 0.99 * l2_clip_norm < added <= l2_clip_norm


def test_positions_of_tiny_inputs_add_no_more_than_the_clip_norm():
    residuals, v = np.full(9 * 2, 1e18), np.full((9, 4), 0.9e-19)
    for convex in (False, True):
        assert 0 < norm_of(residuals, v, 0.05, convex) <= 0.05


def test_huge_and_tiny_inputs_are_shortened_to_the_ball():
    for value in (1e-38, 1e-25, 1.0, 1e25, 1e33):
        for shape in ((300,), (20, 15)):
            short = forms.clip_to_ball(jnp.full(shape, value, jnp.float32), 1e-3)
            norm = np.linalg.norm(np.asarray(short, np.float64))
            assert norm == pytest.approx(min(1e-3, value * 300**0.5), rel=3e-3)


def test_noise_below_the_rounding_of_weights_is_no_hidden_chain():
    # One record among 1,000, batches of one, 20 epochs: the sign of its gradient was seen in 62 %
    # of 200 runs and never wrongly; at delta 0.05 the event says 1.73, and that is 3.5 at least.
    with pytest.raises(ValueError, match=r"lost in the rounding of the weights"):
        HiddenBlocks(Network((1, 1), 1.0), 0.3, 0.33 * 2.0**-23, 1.0, 1, 1000, 20, average=True)
    with pytest.raises(ValueError, match=r"in block 1, .* lost in the rounding"):
        configured("sbcd-hidden", "digits", SMALL | {"hidden": 4, "settings": {"bound": 1e-6}})


def grown(noise_multiplier=1e-3, epochs=4_000):
    """A layer whose records pull at it with all that the clip norm allows, until its end."""
    return HiddenBlocks(
        Network((1, 1), 1.0), noise_multiplier, 0.5, 1.0, 8, 8, epochs, average=True, direct=True
    )


def test_weights_that_grow_do_not_outgrow_their_noise():
    m = grown()
    std = 1.0 * 1e-3 * 0.5 / 8
    assert 4_000 * 0.5 / std > 2.0**24  # without a bound, float32 would hold none of the noise
    x, y = np.full((8, 1), 0.9, np.float32), np.full((8, 1), 1e30, np.float32)
    (weights,) = train_hidden(m, (x, y), secret=Secret.from_seed(1))
    assert float(weights[0, 0]) == pytest.approx(m.largest(0), rel=1e-6)
    assert float(jnp.spacing(2 * weights[0, 0])) <= std / 8
    # Below the bound a weight moves by whole gradients and all of the noise.
    near = jnp.full((1, 400), m.largest(0) / 2 / 400**0.5)
    none = Network((400, 1), 1.0)
    frozen = Lifted(jnp.zeros((1, 8, 400)), jnp.zeros((1, 8, 1)))
    end = hidden._inner_loop(
        none, 0, Proximal(), 1.0, 8.0, near, frozen, jnp.ones((1, 8), bool), np.float32(0.5),
        np.float32(m.largest(0)), np.full(1, 8 * std, np.float32), np.arange(1), jax.random.key(0),
    )  # fmt: skip
    assert is_gaussian([end - near], std)


def one_step(w, v, u, largest, clip=1e9, proximal=Proximal()):  # noqa: B008
    """A hidden step of size 1 without noise on one record."""
    frozen = Lifted(jnp.asarray(v)[None, None], jnp.asarray(u)[None, None])
    return hidden._inner_loop(
        Network((len(v), len(u)), 1.0), 0, proximal, 1.0, 1.0, jnp.asarray(w), frozen,
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
        w = np.asarray(hidden.held(jnp.asarray(rows, jnp.float32), largest), np.float64)
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


@pytest.mark.parametrize("radius", [None, 1.0])
def test_no_product_of_a_hidden_step_is_left_to_units_of_fewer_digits(radius):
    """TF32 has 10 binary digits: weights of 2^19 noises would be rounded to 2^8 of them."""
    proximal = Proximal(spectral_radius=radius)
    step = jax.make_jaxpr(lambda w: one_step(w, np.ones(4), np.ones(3), 1.0, proximal=proximal))
    found = list(_products(step(jnp.ones((3, 4))).jaxpr))
    assert len(found) >= 2
    for product in found:
        assert product.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


def test_every_row_starts_and_stays_in_its_ball_and_the_ball_brings_none_apart():
    rng = np.random.default_rng(1)
    one = rng.normal(size=(200, 30)) * 10 ** rng.uniform(-2, 2, (200, 1))
    other = one + rng.normal(size=one.shape) * 10 ** rng.uniform(-4, 2, (200, 1))
    for scale in (1e-20, 1.0, 1e25):
        ends = [np.asarray(hidden.held(jnp.asarray(w * scale, jnp.float32), scale), np.float64)
                for w in (one, other)]  # fmt: skip
        assert all(np.max(np.linalg.norm(w, axis=1)) <= scale * (1 + 1e-6) for w in ends)
        gaps = [np.linalg.norm(a - b, axis=1) for a, b in (ends, (one * scale, other * scale))]
        assert np.all(gaps[0] <= gaps[1] + 1e-5 * scale)
    blocks = HiddenBlocks(Network((400, 30, 3), 1.0), 1.0, 2.0**-14, 1.0, 8, 80, 1)
    for block, w in enumerate(blocks.init(jax.random.key(0))):
        norms = np.linalg.norm(w, axis=1)
        assert np.max(norms) <= blocks.largest(block) * (1 + 1e-6)


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


def test_a_step_or_a_ball_that_noise_is_lost_in_is_refused():
    with pytest.raises(ValueError, match="lost in the rounding of the weights"):
        grown(noise_multiplier=1e-6)  # 8 / 1e-6 of them in one step
    with pytest.raises(ValueError, match="lost in the rounding of the weights"):
        dataclasses.replace(grown(), proximal=Proximal(spectral_radius=1e6))
    with pytest.raises(ValueError, match="lost in the rounding of the weights"):
        dataclasses.replace(grown(), step_size=1e-35)  # zero in float32
    for algorithm in ("sbcd-hidden", "sbcd-one-layer"):
        blocks = configured(algorithm, "mnist", {}).blocks()
        assert blocks.largest(0) > 50  # beyond what 2,000 steps of the recipe could reach


@pytest.mark.parametrize("labels", [[-17], [37], [5.5]])
def test_labels_that_are_no_classes_are_refused_before_anything_is_written(tmp_path, labels):
    rows = dataset()
    odd = np.concatenate([np.asarray(rows.train_y)[:-1], labels])
    odd = odd.astype(np.asarray(labels).dtype)
    rows = dataclasses.replace(rows, train_y=odd)
    config = configured("sbcd", "digits", SMALL | {"hidden": 4})
    with pytest.raises(ValueError, match="train_y must be") as error:
        BlockRun(config, RunDirectory(tmp_path / "run"), rows, Secret.new(), ignore)
    assert str(labels[0]) not in str(error.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="train_y must be"):
        records(config, rows)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hidden": 4, "settings": {"channels": 1_000_000_000}}, "channels must make at most"),
        ({"hidden": 4, "settings": {"layers": 1_000_000_000}}, "layers must be at most 1,000"),
        ({"hidden": 1_000_000_000}, "hidden, layers and channels must make at most"),
        ({"hidden": 4, "settings": {"kernel": 3}}, "kernel must not be set without channels"),
        (
            {"hidden": 4, "settings": {"stride": 1, "channels": 0}},
            "stride must not be set without channels",
        ),
    ],
)
def test_sizes_beyond_memory_and_settings_that_are_not_read_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        configured("sbcd", "digits", SMALL | given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"learning_rate": 1e30}, "learning_rate must be at most 1e"),
        ({"learning_rate": -1.0}, "learning_rate must be a finite number above 0"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be a finite number above 0"),
        ({"l2_clip_norm": 0.0}, "l2_clip_norm must be a finite number above 0"),
    ],
)
def test_values_are_refused_by_the_names_that_they_were_given(given, words):
    with pytest.raises(ValueError, match=words):
        configured("sbcd", "digits", SMALL | {"hidden": 4} | given)


def test_a_long_run_is_charged_without_counting_its_steps():
    schedule = SweepSchedule((1.0, 0.5, 1.0), steps_each=2)
    blocks = configured("sbcd", "digits", SMALL | {"hidden": 4}).blocks()
    blocks = dataclasses.replace(blocks, schedule=schedule)
    for steps in range(9):
        each = [blocks.event(step) for step in range(steps)]
        parts = blocks.events(steps).events
        assert {part.event: part.count for part in parts} == {e: each.count(e) for e in each}
    assert sum(part.count for part in blocks.events(10**12).events) == 10**12


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
    network = Network((6, 5, 3), 1.5, loss=loss)
    weights = tuple(w * grown for w in network.init(jax.random.key(1)))
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(16, 6)).astype(np.float32),
        np.eye(3, dtype=np.float32)[np.zeros(16, int)],
    )
    x[:, 1], x[2:6] = 0, x[1]  # a column of zeros, duplicates, one class alone
    norms, stds = np.full(2, 0.1, np.float32), np.full(2, 0.01, np.float32)

    def moved(x, y, there):
        new = compiled_sweep(
            network, Proximal(), None, 5.0, 4.0, weights, x, y, there, norms, stds,
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


def test_a_hidden_run_has_one_step():
    with pytest.raises(ValueError, match=r"steps of a hidden run must be 1"):
        configured("sbcd-hidden", "digits", SMALL | {"hidden": 4, "steps": 3})


@pytest.mark.parametrize("given", [{"hidden": 64}, {"l2_clip_norm": 1e-3}])
def test_what_one_layer_would_not_read_is_refused(tmp_path, given):
    options = {"algorithm": "sbcd-one-layer", "dataset": "digits", **SMALL, **given}
    folder = RunDirectory(tmp_path / "run")
    with pytest.raises(ValueError, match=f"{next(iter(given))} must not be given"):
        train_blocks(folder, None, options, given, None, Secret.new(), None, False, None)
    command = command_of(configured("sbcd-one-layer", "digits", SMALL))
    assert "--hidden" not in command
    assert "--l2-clip-norm" not in command
    assert not (tmp_path / "run").exists()


@pytest.fixture
def partitions(monkeypatch):
    """What every secret partition began with."""
    found, partition = [], training.secret_partition

    def watched(data, batch_size, rng):
        batches = partition(data, batch_size, rng)
        found.append(np.asarray(batches[0])[0].tobytes())
        return batches

    monkeypatch.setattr(training, "secret_partition", watched)
    return found


def begun(folder, secret, **settings):
    config = configured("sbcd-one-layer", "digits", SMALL | {"settings": settings})
    return BlockRun(config, RunDirectory(folder), dataset(), secret, ignore)


def test_two_runs_of_one_seed_and_other_settings_share_no_partition(tmp_path, partitions):
    # An average over the partition is taken once: two events over one would be charged too little.
    for epochs in (1, 2):
        begun(tmp_path / str(epochs), Secret.from_seed(3), epochs=epochs).result()
    assert len(set(partitions)) == 2


def test_a_hidden_run_that_is_fitted_for_longer_is_charged_and_trained_for_each(
    tmp_path, partitions
):
    run = begun(tmp_path / "run", Secret.new(), epochs=1)
    run.fit(2)
    assert len(set(partitions)) == 2
    moved = [row["update_norm"] for row in run.history]
    assert len(moved) == 2
    assert min(moved) > 0
    said = acc.epsilon(run.algorithm.total(2), 1e-5, acc.Relation.REPLACE_ONE).upper
    assert said == pytest.approx(run.epsilon(1e-5).upper)
    assert said > acc.epsilon(run.algorithm.total(1), 1e-5, acc.Relation.REPLACE_ONE).upper
