import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from jaxdp import normals as module
from jaxdp.normals import noised, normals
from tests.compiling import AS_USERS
from tests.laws import are_uncorrelated, is_gaussian

WORDS = jnp.asarray([0x12345678, 0x9ABCDEF0], jnp.uint32)
SHAPES = [(), (1,), (0,), (5,), (3, 7), (0, 4), (4, 0), (64, 33), (2, 3, 5), (4_001,)]


def drawn(shapes, words=WORDS):
    return normals(jnp.broadcast_to(words, (len(shapes), 2)), shapes)


@pytest.mark.parametrize(
    "shape", [(100_001,), (317, 311), (2, 50_000), (1, 99_999), (7, 11, 1_301)]
)
def test_they_are_normal_and_nothing_else(shape):
    (values,) = drawn([shape])
    assert values.shape == shape
    assert values.dtype == jnp.float32
    assert is_gaussian(values, 1.0)
    assert not is_gaussian(values, 1.03)
    assert not is_gaussian(values + 0.03, 1.0)
    assert not is_gaussian(np.abs(values), 1.0)


def test_the_tails_are_there_and_finite():
    (values,) = drawn([(4_000_000,)])
    assert np.isfinite(values).all()
    for bound, expected in [(4.0, 6.334e-5), (4.75, 2.034e-6)]:
        found, mean = int((np.abs(values) > bound).sum()), expected * 4e6
        assert abs(found - mean) < 6 * np.sqrt(mean)


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_every_word_of_the_generator_gives_a_finite_number(word):
    bits = jnp.full((3,), word, jnp.uint32)
    assert np.isfinite(module._from_bits(bits)).all()


def test_leaves_halves_rows_and_steps_are_independent():
    keys = [WORDS, WORDS + jnp.asarray([1, 0], jnp.uint32), WORDS + jnp.asarray([0, 1], jnp.uint32)]
    each = [leaf for words in keys for leaf in drawn([(20_000,), (20_000,), (100, 200)], words)]
    for n, one in enumerate(each):
        assert are_uncorrelated(np.ravel(one)[:10_000], np.ravel(one)[10_000:])
        assert are_uncorrelated(np.ravel(one)[:-1], np.ravel(one)[1:])
        assert are_uncorrelated(np.ravel(one)[::2], np.ravel(one)[1::2])
        for other in each[:n]:
            assert are_uncorrelated(one, other)
            assert are_uncorrelated(np.square(one), np.square(other))
            assert len(np.intersect1d(one, other)) < 100  # of 2**23 values
    assert not are_uncorrelated(each[0], each[0] + each[1])  # the test can fail
    for row in each[2][1:4]:
        assert are_uncorrelated(each[2][0], row)


@pytest.mark.parametrize("small", [-1, 5, 2**30])
def test_grouping_changes_no_value(monkeypatch, small):
    alone = [np.asarray(leaf) for leaf in drawn(SHAPES)]
    monkeypatch.setattr(module, "_SMALL", small)
    for shape, one, other in zip(SHAPES, alone, drawn(SHAPES), strict=True):
        assert one.shape == other.shape == shape
        np.testing.assert_array_equal(one, other)


def test_an_element_depends_on_key_leaf_and_place_alone():
    """Not on what other leaves there are, nor on compiling."""
    whole = drawn([(9,), (64, 33), (70_000,)])
    other = drawn([(2, 2), (64, 33), (70_000,), (5,)])
    for n in (1, 2):
        np.testing.assert_array_equal(whole[n], other[n])
    compiled = jax.jit(
        lambda words: drawn([(9,), (64, 33), (70_000,)], words), compiler_options=AS_USERS
    )(WORDS)
    for one, two in zip(whole, compiled, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 99, 100, 101])
def test_odd_sizes_repeat_nothing(size):
    values = np.concatenate([np.ravel(leaf) for leaf in drawn([(size,), (size, 3), (3, size)])])
    assert len(np.unique(values)) == 7 * size


def test_zero_dimensional_leaves_have_each_their_own():
    values = [float(leaf) for leaf in drawn([()] * 150)]
    assert is_gaussian(values, 1.0)
    assert len(set(values)) == 150
    (alone,) = drawn([()])
    assert float(alone) == values[0]


def test_noise_is_added_to_every_coordinate_of_every_kind_of_leaf():
    tree = {str(shape): jnp.full(shape, 7.0) for shape in SHAPES}
    noisy = noised(tree, 0.5, WORDS)
    for name, leaf in tree.items():
        assert noisy[name].shape == leaf.shape
        assert noisy[name].dtype == jnp.float32
        assert (np.asarray(noisy[name]) != 7.0).all()
    assert is_gaussian(noisy["(4001,)"] - 7.0, 0.5)
    assert noised({}, 1.0, WORDS) == {}
    empty = noised({"a": jnp.zeros((0, 3))}, 1.0, WORDS)
    assert empty["a"].shape == (0, 3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_leaves_of_low_precision_get_float32_noise(dtype):
    low = noised({"w": jnp.zeros(4_000, dtype)}, 1.0, WORDS)["w"]
    np.testing.assert_array_equal(low, noised({"w": jnp.zeros(4_000)}, 1.0, WORDS)["w"])
    assert low.dtype == jnp.float32
    assert is_gaussian(low, 1.0)


def test_no_noise_where_the_deviation_is_zero():
    np.testing.assert_array_equal(noised(jnp.ones(50), 0.0, WORDS), np.ones(50))


def test_a_leaf_beyond_the_counter_is_refused():
    with pytest.raises(ValueError, match=r"must have fewer than 2\*\*33 elements"):
        jax.eval_shape(lambda: drawn([(2**17, 2**16)]))
    jax.eval_shape(lambda: drawn([(2**17, 2**16 - 1)]))
    with pytest.raises(ValueError, match=r"fewer than 2\*\*32 rows"):  # their numbers would wrap
        jax.eval_shape(lambda: drawn([(2**32,)]))


def test_no_two_elements_share_a_word_of_a_counter():
    for shape in [(5,), (4, 3), (7, 2, 3), ()]:
        counters, second = (np.ravel(part) for part in module._counters(shape))
        half = (counters.size // (shape or (1,))[0]) * -(-(shape or (1,))[0] // 2)
        assert len({*zip(counters, second, strict=True)}) == counters.size
        assert counters.max() < half


def test_the_words_are_those_of_the_library():
    """Every round by hand, against JAX's primitive; so the noise of a key stays what it was."""
    rng = np.random.default_rng(0)
    words = [jnp.asarray(rng.integers(0, 2**32, 500, np.uint32)) for _ in range(4)]
    for mine, theirs in zip(module._threefry(*words), threefry2x32_p.bind(*words), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for shape in [(5,), (4, 3), (7, 2, 3)]:
        half = (-(-shape[0] // 2), *shape[1:])
        counters = jnp.arange(np.prod(half), dtype=jnp.uint32).reshape(half)
        leaf = jnp.full(half, 1, jnp.uint32)
        pair = threefry2x32_p.bind(*(jnp.broadcast_to(w, half) for w in WORDS), leaf, counters)
        bits = jnp.concatenate(pair)[: shape[0]]
        (_, found) = drawn([(), shape])
        np.testing.assert_array_equal(found, module._from_bits(bits))


def test_noise_is_made_once_and_leaf_by_leaf(monkeypatch):
    """Where an optimizer reads it more than once, and no copy of all parameters is held for it."""
    monkeypatch.setattr(module, "_SMALL", 100)
    tree = {str(n): jnp.zeros((100, 50)) for n in range(6)}

    def moments(tree, words):
        noisy = noised(tree, 0.5, words)
        return [jax.tree.map(f, noisy) for f in (jnp.sin, jnp.square, jnp.abs)]

    compiled = jax.jit(moments).lower(tree, WORDS).compile()
    size = 4 * 100 * 50
    assert compiled.memory_analysis().temp_size_in_bytes <= len(tree) * size + 4096
    alone = jax.jit(lambda tree, words: noised(tree, 0.5, words)).lower(tree, WORDS).compile()
    assert alone.memory_analysis().temp_size_in_bytes < size


def test_a_deviation_that_is_not_a_number_leaves_no_value(monkeypatch):
    monkeypatch.setattr(module, "_SMALL", 100)
    noisy = noised({"a": jnp.ones((30, 7)), "b": jnp.ones(5), "c": jnp.ones(3)}, jnp.nan, WORDS)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(noisy))
