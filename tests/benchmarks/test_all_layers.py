"""All layers from filters that are nobody's: small, on images of noise."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from benchmarks import all_layers
from jaxdp import accounting as acc
from jaxdp.recipes import features, two_layers


def images(count, seed=1):
    """Bytes, and labels that follow from them."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 10, count, np.int32)
    x = rng.integers(0, 256, (count, 32, 32, 3), np.uint8)
    x[..., 0] = (x[..., 0] // 2 + 12 * y[:, None, None]).astype(np.uint8)
    return x, y


@pytest.fixture
def standard_promotion():
    """optax's schedules divide whole numbers."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "data.npz"
    (x, y), (tx, ty) = images(300), images(40, 2)
    np.savez(path, train_x=x, train_y=y, test_x=tx, test_y=ty)
    return path


def parsed(records, out, *more):
    paths = f"--data={records}", f"--out={out}"
    return all_layers.parsed([*paths, "--small", "--records=200", "--steps=5", *more])


def with_head(params, seed=3):
    key = jax.random.key(seed)
    kernel = 0.1 * jax.random.normal(key, params["head"]["kernel"].shape)
    return params | {"head": params["head"] | {"kernel": kernel}}


def test_both_phases_keep_to_one_budget_and_the_second_begins_where_the_first_ended(
    records, tmp_path, monkeypatch, standard_promotion
):
    given, starts, released = parsed(records, tmp_path / "out"), [], []
    fit, first = jaxdp.Run.fit, jaxdp.Run._first

    def watched_fit(run, steps):
        released.append(fit(run, steps))
        return released[-1]

    def watched_first(run, *args):
        found = first(run, *args)
        starts.append(jax.tree.map(np.array, found[0]))  # a step takes the memory
        return found

    monkeypatch.setattr(jaxdp.Run, "fit", watched_fit)
    monkeypatch.setattr(jaxdp.Run, "_first", watched_first)
    told = all_layers.trained(given)
    head, everything = released

    # One ledger of all steps, by the noise that was calibrated.
    ledger = jaxdp.Ledger(tmp_path / "out/ledger.jsonl")
    noise = told["noise_multiplier"]
    step = acc.PoissonSampled(acc.Gaussian(noise), sampling_prob=64 / 200)
    charged = acc.epsilon(acc.Repeated(step, 5), 1e-5).upper
    assert told["epsilon"] == pytest.approx(charged, rel=1e-6)
    assert ledger.epsilon(1e-5).upper == told["epsilon"] <= 3.0
    assert ledger.steps == 5

    # The head alone is trained, then all; the second phase begins with the first's logits.
    begun = starts[0]
    assert_same(head, begun, but=("head",))
    (x, _), network = images(5, 4), all_layers.Network()
    second = next(first for first in starts[1:] if not same(first["head"], begun["head"]))
    before, after = (jax.vmap(lambda i, p=p: network.logits(p, i))(x) for p in (head, second))
    np.testing.assert_allclose(before, after, rtol=1e-5)
    assert_same(everything, head, but=("first", "second", "head"))
    assert json.loads((tmp_path / "out/told.json").read_text())["epsilon"] == told["epsilon"]

    # What is finished is read, and costs nothing.
    again = all_layers.trained(given)
    assert again["epsilon"] == told["epsilon"]
    assert again["all layers"] == told["all layers"]


def same(one, other):
    return all(
        np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True)
    )


def assert_same(one, other, but):
    """All leaves of the named parts differ, and no others."""
    for name in one:
        for a, b in zip(jax.tree.leaves(one[name]), jax.tree.leaves(other[name]), strict=True):
            assert np.array_equal(a, b) != (name in but), name


def test_features_are_at_first_those_of_the_library():
    network, (x, _) = all_layers.Network(), images(2)
    params = all_layers.first_params()
    found = jax.jit(jax.vmap(lambda image: network.features(params, image)))(x)
    x = x.astype(np.float32) / 255
    assert np.square(found - jaxdp.features.two_layers(x)).mean() < 0.01**2
    # The rest is that filters stored in 16 bits have a sum, which centred patches do not see.
    weights = two_layers.of_stored(features.arrays_of("scenes_3"))
    first, second = weights.layers
    first = first._replace(kernel=first.kernel - first.kernel.mean((1, 2, 3), keepdims=True))
    weights = weights._replace(layers=two_layers.ready((first, second)))
    np.testing.assert_allclose(found, two_layers.encoded(weights, x, False), atol=2e-4)


def test_gradients_of_views_are_clipped_without_being_held():
    params, batch = with_head(all_layers.first_params(small=True)), images(4)

    def gradient(engine, dtype=jnp.float32):
        loss = jaxdp.augmented(all_layers.Network(dtype).loss, all_layers.view, 2)
        kept = {"trainable": lambda path: "fixed" not in path}
        return jaxdp.clipped_grad(loss, jaxdp.clip(0.5), engine, **kept)

    for dtype in (jnp.float32, jnp.bfloat16):
        engines = {leaf.path: leaf.engine for leaf in gradient("auto", dtype).plan(params, batch)}
        kernels = {path: engine for path, engine in engines.items() if "kernel" in path}
        assert len(kernels) == 3
        assert set(kernels.values()) <= {"layer", "ghost"}, engines
    fast, slow, key = gradient("auto"), gradient("vmap"), jax.random.key(5)
    (total, info), (wanted, reference) = (
        of.with_info(params, batch, np.ones(4, bool), rng=key) for of in (fast, slow)
    )
    np.testing.assert_allclose(info.norms, reference.norms, rtol=1e-4)
    assert np.min(reference.norms) > 0.5  # clipped, all of them
    ends = [jax.tree.leaves(of.value) for of in (total, wanted)]
    for one, other in zip(*ends, strict=True):
        assert np.linalg.norm(np.subtract(one, other)) < 1e-4 * np.linalg.norm(other)

    # One record, of two views, adds the bound at most: they are averaged before.
    alone = slow.with_info(params, batch, np.arange(4) == 2, rng=key)[0]
    norm = np.sqrt(
        sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(alone.value))
    )
    assert 0.49 < norm <= 0.5


def test_steps_that_fit_into_the_minutes_are_counted_without_a_record(
    records, tmp_path, monkeypatch, standard_promotion
):
    given, sources = parsed(records, tmp_path / "out", "--minutes=10"), []
    network, trainer = all_layers.Network(), jaxdp.Trainer

    def watched(**given):
        sources.append(given["source"])
        return trainer(**given)

    monkeypatch.setattr(jaxdp, "Trainer", watched)
    params = all_layers.first_params(small=True)
    seconds = all_layers.seconds_a_step(given, network, params, 200)
    assert set(seconds) == {"head", "all layers"}
    assert min(seconds.values()) > 0
    ours = images(300)[0]
    assert all(source[0].shape == (200, 32, 32, 3) for source in sources)
    assert len(sources) == 2
    assert not any(np.array_equal(x, y) for source in sources for x in source[0] for y in ours)

    known = {"head": 1.0, "all layers": 2.0}
    assert all_layers.affordable(given, known, 100.0) == 5
    given.steps = 1_000
    assert all_layers.affordable(given, known, 100.0) == 208
    with pytest.raises(SystemExit, match=r"enough for 2 steps of 1\.9 s"):
        all_layers.affordable(given, known, 590.0)
