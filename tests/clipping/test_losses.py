"""The forms of a loss, one test a row of the table."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.clipping.forms import form_of

RULE = jaxdp.clip(1e6)
W = {"w": jnp.asarray([0.5, -1.0, 2.0])}
X = jax.random.normal(jax.random.key(0), (5, 3))
Y = jax.random.normal(jax.random.key(1), (5,))
V = jax.random.uniform(jax.random.key(2), (5,))
KEY = jax.random.key(3)


def of_pair(params, pair):
    return jnp.square(pair[0] @ params["w"] - pair[1])


def of_two(params, x, y):
    return of_pair(params, (x, y))


def of_three(params, x, y, v):
    return v * of_pair(params, (x, y))


def value(loss_fn, batch, rng=None, **options):
    summed, _ = jaxdp.clipped_grad(loss_fn, RULE, **options)(W, batch, "all", rng)
    return summed.value["w"]


def expected(weights=None):
    weights = jnp.ones(5) if weights is None else weights
    return sum(v * jax.grad(of_pair)(W, (x, y))["w"] for x, y, v in zip(X, Y, weights, strict=True))


def same(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [(X, Y), [X, Y]])
def test_an_example_goes_whole_into_one_argument(batch):
    same(value(of_pair, batch), expected())
    same(value(lambda p, b: of_pair(p, (b["x"], b["y"])), {"x": X, "y": Y}), expected())
    same(
        value(lambda p, b: of_pair(p, (*b, 1.0)), (X,)), value(lambda p, x: of_pair(p, (x, 1.0)), X)
    )


@pytest.mark.parametrize("kind", [tuple, list])
def test_tuples_and_lists_are_taken_apart_into_several_arguments(kind):
    same(value(of_two, kind((X, Y))), expected())
    same(value(of_three, kind((X, Y, V))), expected(V))


def test_a_dict_is_taken_apart_by_exactly_its_names():
    same(value(of_two, {"y": Y, "x": X}), expected())  # JAX sorts the keys of a dict
    same(value(of_three, {"v": V, "y": Y, "x": X}), expected(V))
    with pytest.raises(ValueError, match=r"takes \(x, y\) .* got a dict with the keys \(x, z\)"):
        value(of_two, {"x": X, "z": Y})
    with pytest.raises(ValueError, match=r"got a dict with the keys \(v, x, y\)"):
        value(of_two, {"x": X, "y": Y, "v": V})
    with pytest.raises(ValueError, match="must be a tuple or list of 2; got a dict"):
        value(lambda p, a, b, /: of_two(p, a, b), {"a": X, "b": Y})


def test_keyword_only_arguments_take_a_dict():
    same(value(lambda p, *, x, y: of_two(p, x, y), {"x": X, "y": Y}), expected())
    same(value(lambda p, x, *, y: of_two(p, x, y), {"x": X, "y": Y}), expected())
    with pytest.raises(ValueError, match=r"a dict with the keys \(x, y\); got a tuple of 2"):
        value(lambda p, *, x, y: of_two(p, x, y), (X, Y))


@pytest.mark.parametrize("batch", [(X, Y, V), X, {"x": X, "y": Y, "v": V}])
def test_other_numbers_of_arguments_are_refused_with_their_names(batch):
    with pytest.raises(
        ValueError, match=r"loss_fn takes \(x, y\) besides the parameters, so an ex"
    ):
        value(of_two, batch)


def test_optional_arguments_are_left_alone():
    def loss(params, x, y, train=True, scale=2.0):
        assert train is True
        assert scale == 2.0
        return of_two(params, x, y)

    same(value(loss, (X, Y)), expected())
    with pytest.raises(ValueError, match="got a tuple of 3"):
        value(loss, (X, Y, V))
    one = lambda p, b, y=1.0: of_pair(p, (b[0], b[1] * y))  # noqa: E731
    same(value(one, (X, Y)), expected())


def test_where_nothing_is_required_the_first_argument_takes_the_example():
    same(value(lambda p, batch=None, train=True: of_pair(p, batch), (X, Y)), expected())


def noisy(params, x, y, rng):
    return of_two(params, x, y) * jax.random.uniform(rng)


KEYED = {
    "rng": noisy,
    "key": lambda params, x, y, key: noisy(params, x, y, key),
    "second": lambda params, rng, x, y: noisy(params, x, y, rng),
    "between": lambda params, x, key, y: noisy(params, x, y, key),
    "keyword": lambda params, x, y, *, rng: noisy(params, x, y, rng),
    "default": lambda params, x, y, rng=None: noisy(params, x, y, rng),
    "after an option": lambda params, x, y, train=True, rng=None: noisy(params, x, y, rng),
    "keyword default": lambda params, x, y, *, train=True, key=None: noisy(params, x, y, key),
    "positional": lambda params, x, y, rng, /: noisy(params, x, y, rng),
    "whole": lambda params, pair, rng: noisy(params, *pair, rng),
    "option whole": lambda params, pair, train=True, *, key: noisy(params, *pair, key),
}


@pytest.mark.parametrize("form", KEYED)
def test_the_key_goes_by_its_name(form):
    keys = jax.random.split(KEY, 5)
    wanted = expected(jax.vmap(jax.random.uniform)(keys))
    same(value(KEYED[form], (X, Y), KEY), wanted)
    with pytest.raises(ValueError, match="rng must be a key, since loss_fn takes one"):
        value(KEYED[form], (X, Y))
    if form not in ("whole", "option whole", "positional"):
        same(value(KEYED[form], {"x": X, "y": Y}, KEY), wanted)


def test_a_key_of_another_name_is_named():
    loss = lambda params, x, y, dropout_key=None: noisy(params, x, y, dropout_key)  # noqa: E731
    wanted = value(noisy, (X, Y), KEY)
    same(value(loss, (X, Y), KEY, rng_name="dropout_key"), wanted)
    free = lambda params, x, y, **kw: noisy(params, x, y, kw["dropout_key"])  # noqa: E731
    same(value(free, (X, Y), KEY, rng_name="dropout_key"), wanted)
    with pytest.raises(
        ValueError, match=r"rng_name .* got 'dropout' for the arguments \(params, x"
    ):
        jaxdp.clipped_grad(loss, RULE, rng_name="dropout")
    with pytest.raises(ValueError, match="rng_name must be the name"):
        jaxdp.clipped_grad(loss, RULE, rng_name=(1,))
    with pytest.raises(ValueError, match=r"rng_name must say which of \(rng, key\)"):
        jaxdp.clipped_grad(lambda p, x, rng, key: 0.0, RULE)
    attention = lambda params, query, key: of_two(params, query, key)  # noqa: E731
    same(value(attention, (X, Y), rng_name=None), expected())


def test_a_third_argument_is_no_key_by_its_place():
    grad_fn = jaxdp.clipped_grad(lambda p, x, dropout: 0.0 * x, RULE)
    assert not grad_fn.takes_rng
    with pytest.raises(ValueError, match=r"takes \(x, dropout\)"):
        grad_fn(W, X, "all")
    with pytest.raises(ValueError, match="rng must be None, since loss_fn takes no key"):
        grad_fn(W, (X, Y), "all", KEY)


def test_args_and_kwargs_take_the_example_whole():
    same(value(lambda *args: of_pair(*args), (X, Y)), expected())
    same(value(lambda *args, **kwargs: of_pair(*args, **kwargs), (X, Y)), expected())
    same(value(lambda params, *args: of_pair(params, *args), (X, Y)), expected())
    loss = lambda *args, **kw: noisy(args[0], *args[1], kw["rng"])  # noqa: E731
    same(value(loss, (X, Y), KEY, rng_name="rng"), value(noisy, (X, Y), KEY))
    with pytest.raises(
        ValueError, match=r"loss_fn must take .* got the arguments \(p, \*\*batch\)"
    ):
        jaxdp.clipped_grad(lambda p, **batch: 0.0, RULE)


def test_partials_take_what_is_left_and_keep_their_key():
    same(value(functools.partial(of_three, v=1.0), {"x": X, "y": Y}), expected())
    bound = functools.partial(lambda factor, p, x, y: factor * of_two(p, x, y), 1.0)
    same(value(bound, (X, Y)), expected())
    fixed = functools.partial(noisy, rng=KEY)
    same(value(fixed, (X, Y)), expected() * jax.random.uniform(KEY))
    same(value(jax.jit(fixed), (X, Y)), expected() * jax.random.uniform(KEY))
    left = functools.partial(lambda p, x, y, train, rng: noisy(p, x, y, rng), train=True)
    same(value(left, (X, Y), KEY), value(noisy, (X, Y), KEY))


class Model:
    def loss(self, params, x, y):
        return of_two(params, x, y)

    def __call__(self, params, x, y, *, rng):
        return noisy(params, x, y, rng)

    @staticmethod
    def static(params, x, y):
        return of_two(params, x, y)


@dataclasses.dataclass
class Unhashable:
    weights: jax.Array

    def __call__(self, params, x, y):
        return of_two(params, x, y) * jnp.sum(self.weights)


def test_bound_methods_and_callable_objects():
    for loss in (Model().loss, Model.static):
        same(value(loss, (X, Y)), expected())
    same(value(Model(), (X, Y), KEY), value(noisy, (X, Y), KEY))


def test_callable_objects_that_cannot_be_hashed():
    loss = Unhashable(jnp.asarray([0.5, 0.5]))
    with pytest.raises(TypeError):
        hash(loss)
    mech = jaxdp.dp_sgd(1.0, 1e6, 5, 5, "full_batch")
    grad_fn = mech.clipped_grad(loss)
    draw = mech.sampler(5).draw()
    same(grad_fn.sum(W, (X, Y), draw)[0].value["w"], expected())
    assert hash(grad_fn) == hash(mech.clipped_grad(loss))
    assert grad_fn != mech.clipped_grad(Unhashable(jnp.asarray([0.5, 0.5])))


def test_jitted_losses_are_as_the_function_inside():
    same(value(jax.jit(of_two), (X, Y)), expected())
    same(value(jax.jit(noisy), (X, Y), KEY), value(noisy, (X, Y), KEY))
    option = jax.jit(lambda p, x, y, train=True: of_two(p, x, y), static_argnames="train")
    same(value(option, (X, Y)), expected())
    same(value(jax.checkpoint(of_two), (X, Y)), expected())


def test_without_a_signature_a_loss_takes_an_example():
    class Opaque:
        __signature__ = "none"

        def __call__(self, params, example):
            return of_pair(params, example)

    assert form_of(Opaque()).data == ("example",)
    same(value(Opaque(), (X, Y)), expected())


@pytest.mark.parametrize(
    "loss_fn", [lambda: 0.0, lambda p: 0.0, lambda p, rng: 0.0, lambda key, p, x: 0.0]
)
def test_what_is_no_loss_is_refused_with_its_arguments(loss_fn):
    with pytest.raises(
        ValueError, match=r"loss_fn must take \(params, example\), or .* got the arg"
    ):
        jaxdp.clipped_grad(loss_fn, RULE)
    with pytest.raises(ValueError, match="must let rng be given by its name"):
        jaxdp.clipped_grad(lambda p, x, train=True, rng=None, /: 0.0, RULE)


def test_augmentation_takes_the_same_forms():
    views = jaxdp.clipping.augmented(noisy, lambda pair, key: pair, 2)
    assert np.isfinite(value(views, (X, Y), KEY)).all()


@pytest.mark.parametrize(("loss", "keyed"), [(of_two, False), (KEYED["keyword default"], True)])
def test_a_trainer_takes_pairs_and_gives_every_step_its_keys(loss, keyed):
    mech = jaxdp.dp_sgd(1e-6, 1e3, 5, 5, "full_batch")
    trainer = jaxdp.Trainer(loss, mech, optax.sgd(1.0), (X, Y))
    state, sums = trainer.init(W), []
    for batch in trainer.batches(2):
        state, _ = trainer.step(state._replace(params=jax.tree.map(jnp.array, W)), batch)
        sums.append(5 * np.asarray(W["w"] - state.params["w"]))
    if keyed:
        assert np.abs(sums[0] - sums[1]).max() > 0.1
        return
    for found in sums:
        np.testing.assert_allclose(found, expected(), atol=0.02)


def test_equinox_modules_as_losses():
    eqx = pytest.importorskip("equinox")

    class Loss(eqx.Module):
        weight: jax.Array

        def __call__(self, params, x, y):
            return of_two(params, x, y) * jnp.sum(self.weight)

        def keyed(self, params, x, y, *, key):
            return noisy(params, x, y, key)

    loss = Loss(jnp.asarray([0.5, 0.5]))
    same(value(loss, (X, Y)), expected())
    same(value(eqx.filter_jit(loss), (X, Y)), expected())
    same(value(loss.keyed, (X, Y), KEY), value(noisy, (X, Y), KEY))
    mech = jaxdp.dp_sgd(1.0, 1e6, 5, 5, "full_batch")
    summed, _ = mech.clipped_grad(loss).sum(W, (X, Y), mech.sampler(5).draw())
    same(summed.value["w"], expected())
