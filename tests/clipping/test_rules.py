"""Attacks on the stated bound: no record may move the clipped sum by more than the rule's own."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdp
from jaxdp.clipping import reduce, rounding
from jaxdp.clipping.ghost.leaves import Arrays
from jaxdp.clipping.rules import CoordinateBox, limit_of
from jaxdp.mechanism import with_rule
from tests.compiling import AS_USERS
from tests.refusing import all_refused, refused

# Clipping aims at the bound less its margin, to a few roundings.
AIM = (1.0 - rounding.MARGIN) * (1.0 - 1e-6)


def norm64(tree):
    return np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)))


def contribution(rule, grad, **options):
    """What one record with this gradient adds to the sum."""
    return clipped(rule, jax.tree.map(lambda g: jnp.asarray(g)[None], grad), **options).total


def clipped(rule, rows, mask=None, **options):
    leaves, structure = jax.tree.flatten(rows)
    mask = jnp.ones(leaves[0].shape[0], bool) if mask is None else mask
    options["limit"] = limit_of(rule, jax.tree.map(lambda x: x[0], rows), options.get("bound"))
    return reduce.clipped_sum(rule, [Arrays(x) for x in leaves], structure, mask, **options)


@functools.cache
def compiled(rule):
    """As ``contribution``, in one program for all gradients of a shape."""

    @functools.partial(jax.jit, compiler_options=AS_USERS)
    def run(grad, scale):
        return clipped(rule, jax.tree.map(lambda g: g[None], grad), scale=scale).total

    return run


@dataclasses.dataclass(frozen=True)
class Told:
    """A rule of the user's: its own factors, which need not keep its bound."""

    factor: Callable
    bound: float = 0.3

    def l2(self, params):
        return self.bound

    def factors(self, square_norms, bound=None):
        return self.factor(square_norms)


def huge(squares):
    return {"a": jnp.full_like(squares["a"], 3.0), "b": jnp.full_like(squares["b"], -1e8)}


def of_all_records(squares):
    return jax.tree.map(lambda s: 1 / jnp.sqrt(jnp.max(s)), squares)


PARAMS = {"a": np.zeros((30, 2), np.float32), "b": np.zeros(20, np.float32)}
RULES = {
    "clip": jaxdp.clip(0.1),
    "auto_s": jaxdp.auto_s(0.7, 1e-3),
    "normalize": jaxdp.normalize(3.0),
    "per_layer": jaxdp.per_layer({"a": 0.3, "b": 0.4}),
    "coordinate_box": jaxdp.coordinate_box(0.2),
    "of the user's, too long": Told(huge),
    "of the user's, of records together": Told(of_all_records),
}


@pytest.mark.parametrize("name", RULES)
def test_the_worst_neighbour_found_by_search_comes_to_the_bound_and_not_beyond(name):
    rule = RULES[name]
    rng = np.random.default_rng(0)
    worst = 0.0
    normal, signs = lambda p: rng.normal(size=p.shape), lambda p: rng.integers(-1, 2, p.shape)
    kinds = [np.ones_like, normal, signs]
    for _ in range(60):
        size, kind = 10.0 ** rng.uniform(-4, 9, 2), kinds[rng.integers(3)]
        each = zip(PARAMS.items(), size, strict=True)
        grad = {name: (kind(p) * by).astype(np.float32) for (name, p), by in each}
        worst = max(worst, norm64(compiled(rule)(grad, None)))
    bound = rule.l2(PARAMS)
    assert 0.99 * bound <= worst <= bound


@given(st.sampled_from(sorted(RULES)), st.floats(-14, 12), st.integers(0, 2**31 - 1))
def test_no_gradient_exceeds_any_rule_s_bound(name, magnitude, seed):
    rng = np.random.default_rng(seed)
    scale = {n: 10.0 ** rng.uniform(-3, 3, p.shape).astype(np.float32) for n, p in PARAMS.items()}
    grad = {n: np.float32(rng.normal(size=p.shape) * 10.0**magnitude) for n, p in PARAMS.items()}
    for divisor in (None, jax.tree.leaves(scale)):
        assert norm64(compiled(RULES[name])(grad, divisor)) <= RULES[name].l2(PARAMS)


def test_a_rule_of_the_user_s_keeps_its_bound_sees_one_record_and_is_followed_within():
    rows = {n: np.full((3, *p.shape), 1e-3, np.float32) for n, p in PARAMS.items()}
    longer = {n: np.concatenate([x[:1], 1e6 * x[1:2], x[2:]]) for n, x in rows.items()}
    keep = jnp.asarray([True, False, True])
    for rule in (
        Told(of_all_records),
        Told(huge),
    ):  # of the others the same, whoever is beside them
        found = [clipped(rule, x, keep).total for x in (rows, longer)]
        jax.tree.map(np.testing.assert_array_equal, *found)
        both = clipped(rule, longer).total
        assert norm64(jax.tree.map(np.subtract, both, found[0])) <= 0.3
    half = clipped(Told(lambda s: jax.tree.map(lambda _: jnp.float32(0.5), s)), rows).total
    jax.tree.map(lambda h, x: np.testing.assert_allclose(h, 0.5 * x.sum(0), rtol=1e-6), half, rows)
    for factor in (lambda s: jnp.float32(1.0), lambda s: jax.tree.map(lambda _: jnp.ones(3), s)):
        with pytest.raises(ValueError, match=r"Told\.factors must return a tree like square_norms"):
            clipped(Told(factor), rows)
    number = Told(lambda s: jax.tree.map(lambda _: 0.5, s))
    jax.tree.map(np.testing.assert_array_equal, clipped(number, rows).total, half)
    short = Told(lambda s: jax.tree.map(lambda _: jnp.bfloat16(0.5), s))
    jax.tree.map(np.testing.assert_array_equal, clipped(short, rows).total, half)
    with pytest.raises(ValueError, match="l2 of Told must be in"):
        clipped(Told(huge, 1e11), rows)
    # A trainer finds what is wrong with a rule before a step is charged.
    loss = lambda p, x: sum(jnp.vdot(p[n], x[n]) for n in p)  # noqa: E731
    for rule in (Told(lambda s: jnp.float32(1.0)), Told(huge, 1e11)):
        train = jaxdp.Trainer(loss, with_rule(rule, 1.0, 3, 3, "full_batch"), optax.sgd(0.1), rows)
        with pytest.raises(ValueError, match=r"Told"):
            train.init(PARAMS)
        assert train.ledger.entries == ()


class Moved:
    """A rule of the user's whose bound is another one each time that it is asked."""

    def __init__(self, *bounds):
        self.bounds = itertools.cycle(bounds)

    def l2(self, params):
        return next(self.bounds)

    def factors(self, square_norms, bound=None):
        return jax.tree.map(lambda s: jnp.float32(1e6), square_norms)


@dataclasses.dataclass(frozen=True)
class SmallBox(CoordinateBox):
    """A box that says less than its coordinates may add."""

    def l2(self, params):
        return 1e-3


def of_the_batch(call):
    """Factors by a function that sees the norms of all records where ``vmap`` calls it."""
    return lambda squares: jax.tree.map(call, squares)


@jax.custom_batching.custom_vmap
def of_all(square):
    return square


of_all.def_vmap(lambda size, batched, s: (jnp.where((s > 0).all(), 1.0, -1.0) + 0 * s, True))


def test_the_bound_of_a_rule_of_the_user_s_is_asked_once_and_other_records_are_out_of_reach():
    """Before: sums were of records of norm 1 or 100, and said that they were of 0.01."""
    data, params = np.full((4, 3), 5.0, np.float32), jnp.zeros(3)
    mechanism = jaxdp.dp_sgd(
        noise_multiplier=1.0, batch_size=4, dataset_size=4, rule=Moved(1.0, 0.01)
    )
    grad_fn, sampler = mechanism.clipped_grad(lambda w, x: jnp.vdot(w, x)), mechanism.sampler(4)
    sums = [grad_fn(params, data, sampler.draw()) for _ in range(4)]
    sums += [grad_fn(params, data, "all") for _ in range(2)]
    for summed in sums:
        assert norm64(summed.value) <= 4 * summed.l2
    assert len({float(summed.l2) for summed in sums}) == 2
    transform = jaxdp.clip_and_sum(Moved(1.0, 0.01))
    summed, _ = transform.update(jnp.asarray(data), transform.init(params), params, mask="all")
    assert norm64(summed.value) <= 4 * summed.l2
    rows = {n: np.ones((3, *p.shape), np.float32) for n, p in PARAMS.items()}
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    called = lambda s: jax.pure_callback(lambda v: v, shape, s, vmap_method="expand_dims")  # noqa: E731
    for call, words in (
        (called, "not use pure_callback"),
        (of_all, "not use custom_vmap"),
        (lambda s: jax.lax.complex(s, s), "a real number"),
    ):
        with pytest.raises(ValueError, match=rf"Told\.factors must.*{words}"):
            clipped(Told(of_the_batch(call)), rows)
    captured = lambda x: clipped(Told(lambda s: jax.tree.map(lambda _: x, s)), rows).total  # noqa: E731
    with pytest.raises(ValueError, match=r"Told\.factors must not capture a traced array"):
        jax.jit(captured)(jnp.float32(1.0))
    with pytest.raises(ValueError, match="coordinate_box has no factors"):
        clipped(SmallBox(1.0), rows)


def test_per_layer_keeps_every_group_s_bound_and_refuses_another_tree():
    grad = {n: np.full(p.shape, 9.0, np.float32) for n, p in PARAMS.items()}
    total = contribution(RULES["per_layer"], grad)
    assert 0.297 <= norm64(total["a"]) <= 0.3
    assert 0.396 <= norm64(total["b"]) <= 0.4
    assert RULES["per_layer"].l2({"a": PARAMS["a"], "b": None}) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="bounds must be a prefix"):
        contribution(RULES["per_layer"], {"a": grad["a"], "c": grad["b"]})


def test_auto_s_and_normalize_rescale_as_published():
    grad, aimed = np.float32([3.0, 4.0]), 2.0 * (1.0 - rounding.MARGIN)
    for rule, length in ((jaxdp.auto_s(2.0, 0.5), 5.5), (jaxdp.normalize(2.0), 5.0)):
        np.testing.assert_allclose(contribution(rule, grad), grad * aimed / length, rtol=1e-6)
    # Where squares underflow, the direction cannot be trusted.
    for grad in (np.zeros(3, np.float32), np.full(3, 1e-20, np.float32)):
        assert norm64(contribution(jaxdp.normalize(2.0), grad)) == 0.0


def test_a_scale_of_zero_tells_nothing_about_who_has_a_gradient_there():
    rows = np.float32([[0.0, 3.0], [1.0, -3.0]])
    scale = [jnp.float32([0.0, 1.0])]
    for keep in ([True, False], [False, True], [True, True]):
        total = clipped(jaxdp.coordinate_box(0.5), rows, jnp.asarray(keep), scale=scale).total
        assert np.isfinite(total).all()


def test_votes_count_the_norms_within_the_bound():
    rows = np.float32([[1.0], [3.0], [5.0], [np.nan], [0.5]])
    mask = jnp.asarray([True, True, True, True, False])
    found = clipped(jaxdp.clip(1.0), rows, mask, bound=jnp.float32(4.0))
    assert found.votes == 0.5 + 0.5 - 0.5 - 0.5
    found = clipped(jaxdp.clip(1.0), rows[:3], jnp.ones(3, bool), bound=jnp.float32(6.0))
    assert found.votes == 1.5  # one record moves it by ½
    total = clipped(jaxdp.clip(1.0), rows[2:3], bound=jnp.float32(4.0)).total
    assert 4.0 * AIM <= total <= 4.0
    refused("bound must be None for auto_s", clipped, jaxdp.auto_s(), rows, bound=jnp.float32(4.0))


# Few sizes, for every one is compiled: on either side of a group of 32, and of several.
SIZES = [1, 2, 31, 32, 33, 100, 257, 400]


@given(st.floats(1e-6, 1e6), st.floats(-12, 12), st.sampled_from(SIZES), st.integers(0, 2**31 - 1))
def test_no_record_exceeds_the_bound(bound, magnitude, size, seed):
    rng = np.random.default_rng(seed)
    spread = 10.0 ** (magnitude + rng.uniform(-3, 3, size))
    grad = {"a": (rng.normal(size=size) * spread).astype(np.float32), "b": np.float32([1e-3])}
    assert norm64(contribution(jaxdp.clip(bound), grad)) <= bound


def test_rounding_of_many_equal_squares_stays_below_the_bound():
    # The worst neighbour for float32 norms: every partial sum rounds the same way.
    values = (1.0, 1 / 3, 0.1, 1.0000001, 0.99999994)
    for size, value in itertools.product((1_000, 200_000), values):
        grad = np.full(size, value, np.float32)
        for ratio in (0.5, 0.999, 1 - 2e-7, 1.0, 1 + 2e-7, 1.001, 100.0):
            bound = float(norm64(grad) / ratio)
            assert norm64(contribution(jaxdp.clip(bound), grad)) <= bound, (size, value, ratio)


def test_short_gradients_pass_unchanged_and_low_precision_ones_keep_the_bound():
    grad = np.float32([0.03, -0.04])
    np.testing.assert_array_equal(contribution(jaxdp.clip(0.1), grad), grad)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        grad = jnp.asarray(np.random.default_rng(1).normal(size=5_000), dtype)
        total = contribution(jaxdp.clip(1.0), grad)
        assert total.dtype == jnp.float32
        assert 0.99 <= norm64(total) <= 1.0, dtype


def test_a_broken_example_contributes_exactly_zero():
    keep = jnp.asarray([True, False, True])
    for rule in (jaxdp.clip(1.0), jaxdp.auto_s(), jaxdp.normalize(), jaxdp.coordinate_box(0.1)):
        for bad in (np.nan, np.inf, -np.inf, 3e38):
            rows = {"w": jnp.asarray([[1.0, 2.0], [bad, bad], [3.0, 4.0]]), "b": jnp.ones((3, 1))}
            zeroed = jax.tree.map(lambda r: jnp.where(keep[:, None], r, 0.0), rows)
            found, without = clipped(rule, rows), clipped(rule, zeroed, keep)
            jax.tree.map(np.testing.assert_array_equal, found.total, without.total)
            assert not (found.clipped & ~keep).any(), (rule, bad)


def test_bounds_that_are_no_numbers_within_reach_are_refused():
    rows = []
    for bad in (0, -1, float("nan"), float("inf"), 1e-11, 1e11, "0.1", True):
        rows += [
            ("l2_clip_norm", functools.partial(jaxdp.clip, bad), bad),
            ("bounds", functools.partial(jaxdp.per_layer, {"a": 1.0, "b": bad}), bad),
        ]
        for make in (jaxdp.auto_s, jaxdp.normalize, jaxdp.coordinate_box):
            rows.append((r"radius|bound", functools.partial(make, bad), make, bad))
    all_refused(rows)


def test_gradients_around_the_bound_are_shortened_to_it_and_no_further():
    norms = jnp.asarray([0.0, 0.5, 0.99, 1.0, 1.001, 1.01, 1.5, 1.9, 2.1, 50.0])
    wanted = np.minimum(norms, 1.0)
    most = 1.0 - rounding.MARGIN / 2  # the other half is for the rounding of what follows
    for rule, ones in ((jaxdp.clip(1.0), 1), (jaxdp.per_layer({"a": 1.0, "b": 1.0}), 2)):
        squares = {name: jnp.square(norms) for name in "ab"[:ones]}
        for factors in jax.tree.leaves(rule.factors(squares)):
            found = np.asarray(factors * norms)
            assert (found <= most).all()
            np.testing.assert_allclose(found, wanted, rtol=3e-3)
    for rule in (jaxdp.normalize(1.0), jaxdp.auto_s(1.0, 0.01)):
        for unit in (0.02, 1e3):  # of the size of AUTO-S's stability, and far above it
            found = np.asarray(rule.factors({"a": jnp.square(norms * unit)})["a"] * norms * unit)
            assert (found <= most).all()
        np.testing.assert_allclose(found[1:], 1.0, rtol=3e-3)
    tiny = jaxdp.normalize(1.0).factors({"a": jnp.asarray([0.0, 1e-30])})["a"]
    np.testing.assert_array_equal(tiny, 0.0)


def test_the_bound_of_layers_is_that_of_the_trained_ones_together():
    rule = jaxdp.per_layer({"a": 1.0, "b": 2.0, "c": 2.0})
    params = {"a": jnp.zeros(2), "b": {"w": jnp.zeros(2)}, "c": jnp.zeros(1)}
    assert rule.l2(params) == pytest.approx(3.0)
    assert rule.l2({**params, "c": None}) == pytest.approx(np.sqrt(5.0))


def test_a_scale_divides_the_gradient_before_it_is_clipped_and_in_the_sum():
    rows, scale = np.float32([[4.0, 6.0], [3.0, -9.0]]), [jnp.asarray([2.0, 3.0])]
    whole = clipped(jaxdp.clip(100.0), rows, scale=scale)
    np.testing.assert_allclose(whole.total, [3.5, -1.0], rtol=1e-5)
    np.testing.assert_allclose(whole.norms, [np.sqrt(8.0), np.sqrt(11.25)], rtol=1e-5)
    short = clipped(jaxdp.clip(1.0), rows[:1], scale=scale)
    np.testing.assert_allclose(short.total, [np.sqrt(0.5)] * 2, rtol=3e-3)
