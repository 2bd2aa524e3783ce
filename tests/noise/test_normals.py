"""Normals of a key: their law, their independence, and the words that they are made of."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from jaxdp.noise import normals as module
from jaxdp.noise.normals import add_normals
from tests.compiling import AS_USERS
from tests.laws import are_uncorrelated, is_gaussian
from tests.refusing import all_refused

WORDS = jnp.asarray([0x12345678, 0x9ABCDEF0], jnp.uint32)
SHAPES = [(), (1,), (0,), (5,), (3, 7), (0, 4), (4, 0), (2, 3, 5), (4_001,)]


def drawn(shapes, words=WORDS):
    return add_normals([jnp.zeros(shape) for shape in shapes], 1.0, words)


def test_they_are_normal_and_nothing_else():
    for shape in ((100_001,), (7, 11, 1_301)):
        (values,) = drawn([shape])
        assert values.shape == shape
        assert values.dtype == jnp.float32
        assert is_gaussian(values, 1.0)
        for wrong, std in ((values, 1.03), (values + 0.03, 1.0), (np.abs(values), 1.0)):
            assert not is_gaussian(wrong, std)
    (values,) = drawn([(4_000_000,)])  # the tails are there and finite
    assert np.isfinite(values).all()
    for bound, expected in [(4.0, 6.334e-5), (4.75, 2.034e-6)]:
        found, mean = int((np.abs(values) > bound).sum()), expected * 4e6
        assert abs(found - mean) < 6 * np.sqrt(mean)
    for word in (0, 0xFFFFFFFF):  # every word of the generator gives a finite number
        assert np.isfinite(module._from_bits(jnp.full((3,), word, jnp.uint32))).all()


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


def test_an_element_depends_on_key_leaf_and_place_alone_and_none_comes_twice():
    """Not on what other leaves there are, nor on compiling."""
    shapes = [(9,), (64, 33), (70_000,)]
    whole = drawn(shapes)
    other = drawn([(2, 2), (64, 33), (70_000,), (5,)])
    for n in (1, 2):
        np.testing.assert_array_equal(whole[n], other[n])
    compiled = jax.jit(lambda words: drawn(shapes, words), compiler_options=AS_USERS)(WORDS)
    for one, two in zip(whole, compiled, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)
    sizes = (1, 2, 3, 100)
    leaves = drawn([shape for n in sizes for shape in ((n,), (n, 3), (3, n))])
    for at, size in enumerate(sizes):
        values = np.concatenate([np.ravel(leaf) for leaf in leaves[3 * at : 3 * at + 3]])
        assert len(np.unique(values)) == 7 * size, size
    scalars = [float(leaf) for leaf in drawn([()] * 150)]
    assert is_gaussian(scalars, 1.0)
    assert len(set(scalars)) == 150
    (alone,) = drawn([()])
    assert float(alone) == scalars[0]


def test_noise_is_added_to_every_coordinate_of_every_kind_of_leaf():
    tree = {str(shape): jnp.full(shape, 7.0) for shape in SHAPES}
    noisy = add_normals(tree, 0.5, WORDS)
    for name, leaf in tree.items():
        assert noisy[name].shape == leaf.shape
        assert noisy[name].dtype == jnp.float32
        assert (np.asarray(noisy[name]) != 7.0).all()
    assert is_gaussian(noisy["(4001,)"] - 7.0, 0.5)
    assert add_normals({}, 1.0, WORDS) == {}
    assert add_normals({"a": jnp.zeros((0, 3))}, 1.0, WORDS)["a"].shape == (0, 3)
    # Leaves of low precision get float32 noise, and none where the deviation is zero.
    full = add_normals({"w": jnp.zeros(4_000)}, 1.0, WORDS)["w"]
    assert is_gaussian(full, 1.0)
    for dtype in (jnp.bfloat16, jnp.float16):
        low = add_normals({"w": jnp.zeros(4_000, dtype)}, 1.0, WORDS)["w"]
        np.testing.assert_array_equal(low, full)
        assert low.dtype == jnp.float32
    np.testing.assert_array_equal(add_normals(jnp.ones(50), 0.0, WORDS), np.ones(50))


def test_no_two_elements_share_a_word_of_a_counter_and_a_leaf_beyond_it_is_refused():
    for shape in [(5,), (4, 3), (7, 2, 3), ()]:
        counters, second = (np.ravel(part) for part in module._counters(shape))
        half = (counters.size // (shape or (1,))[0]) * -(-(shape or (1,))[0] // 2)
        assert len({*zip(counters, second, strict=True)}) == counters.size
        assert counters.max() < half

    def of(*shape):
        return lambda: jax.eval_shape(lambda: drawn([shape]))

    rows = r"fewer than 2\*\*32 rows"  # their numbers would wrap
    elements = r"must have fewer than 2\*\*33 elements"
    all_refused([(elements, of(2**17, 2**16)), (rows, of(2**32))])
    of(2**17, 2**16 - 1)()


def test_the_words_are_those_of_the_library_and_grouping_changes_no_value(monkeypatch):
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
    # Grouping changes no value.
    alone = [np.asarray(leaf) for leaf in drawn(SHAPES)]
    for small in (-1, 5, 2**30):
        monkeypatch.setattr(module, "_SMALL", small)
        for shape, one, other in zip(SHAPES, alone, drawn(SHAPES), strict=True):
            assert one.shape == other.shape == shape
            np.testing.assert_array_equal(one, other, err_msg=f"{small}")


def test_noise_is_made_once_leaf_by_leaf_and_none_of_a_deviation_that_is_not_a_number(monkeypatch):
    """Where an optimizer reads it more than once, and no copy of all parameters is held for it."""
    monkeypatch.setattr(module, "_SMALL", 100)
    tree = {str(n): jnp.zeros((100, 50)) for n in range(6)}

    def moments(tree, words):
        noisy = add_normals(tree, 0.5, words)
        return [jax.tree.map(f, noisy) for f in (jnp.sin, jnp.square, jnp.abs)]

    def temporary(function):
        compiled = jax.jit(function).lower(tree, WORDS).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    size = 4 * 100 * 50
    assert temporary(moments) <= len(tree) * size + 4096
    assert temporary(lambda tree, words: add_normals(tree, 0.5, words)) < size
    monkeypatch.setattr(module, "_SMALL", 100)
    noisy = add_normals(
        {"a": jnp.ones((30, 7)), "b": jnp.ones(5), "c": jnp.ones(3)}, jnp.nan, WORDS
    )
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(noisy))
