"""The forms of a loss, one row of a table each."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.clipping.forms import form_of
from tests.refusing import all_refused

RULE = jaxdp.clip(1e6)
W = {"w": jnp.asarray([0.5, -1.0, 2.0])}
X = jax.random.normal(jax.random.key(0), (5, 3))
Y = jax.random.normal(jax.random.key(1), (5,))
V = jax.random.uniform(jax.random.key(2), (5,))
KEY = jax.random.key(3)
NAMED, ALL_NAMED = {"y": Y, "x": X}, {"v": V, "y": Y, "x": X}  # JAX sorts the keys of a dict


def of_pair(params, pair):
    return jnp.square(pair[0] @ params["w"] - pair[1])


def of_two(params, x, y):
    return of_pair(params, (x, y))


def of_three(params, x, y, v):
    return v * of_pair(params, (x, y))


def noisy(params, x, y, rng):
    return of_two(params, x, y) * jax.random.uniform(rng)


def value(loss_fn, batch, rng=None, **options):
    summed, _ = jaxdp.clipped_grad(loss_fn, RULE, **options)(W, batch, "all", rng)
    return summed.value["w"]


@functools.cache
def gradients():
    return jax.vmap(jax.grad(of_pair), (None, 0))(W, (X, Y))["w"]


def expected(weights=None):
    return jnp.sum(gradients() if weights is None else weights[:, None] * gradients(), 0)


def same(found, wanted, *row):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5, err_msg=str(row))


def with_options(params, x, y, train=True, scale=2.0):
    assert train is True
    assert scale == 2.0
    return of_two(params, x, y)


class Model:
    def loss(self, params, x, y):
        return of_two(params, x, y)

    def __call__(self, params, x, y, *, rng):
        return noisy(params, x, y, rng)

    @staticmethod
    def static(params, x, y):
        return of_two(params, x, y)


class Opaque:
    """Without a signature."""

    __signature__ = "none"

    def __call__(self, params, example):
        return of_pair(params, example)


# A loss and the batches that it takes; what it is worth is of_pair's at every example.
FORMS = {
    "whole": (of_pair, (X, Y), [X, Y]),
    "whole dict": (lambda p, b: of_pair(p, (b["x"], b["y"])), {"x": X, "y": Y}),
    "taken apart": (of_two, (X, Y), [X, Y], NAMED),
    "keywords": (lambda p, *, x, y: of_two(p, x, y), NAMED),
    "a keyword": (lambda p, x, *, y: of_two(p, x, y), NAMED),
    "options": (with_options, (X, Y)),
    "an option beside the whole": (lambda p, b, y=1.0: of_pair(p, (b[0], b[1] * y)), (X, Y)),
    "nothing required": (lambda p, batch=None, train=True: of_pair(p, batch), (X, Y)),
    "args": (lambda *args: of_pair(*args), (X, Y)),
    "args, kwargs": (lambda *args, **kwargs: of_pair(*args, **kwargs), (X, Y)),
    "params, args": (lambda params, *args: of_pair(params, *args), (X, Y)),
    "partial by name": (functools.partial(of_three, v=1.0), NAMED),
    "partial by place": (
        functools.partial(lambda one, p, x, y: one * of_two(p, x, y), 1.0),
        (X, Y),
    ),
    "bound": (Model().loss, (X, Y)),
    "static": (Model.static, (X, Y)),
    "jit": (jax.jit(of_two), (X, Y)),
    "jit, static": (
        jax.jit(lambda p, x, y, train=True: of_two(p, x, y), static_argnames="train"),
        (X, Y),
    ),
    "checkpoint": (jax.checkpoint(of_two), (X, Y)),
    "no signature": (Opaque(), (X, Y)),
}


def test_every_form_takes_its_examples():
    for name, (loss, *batches) in FORMS.items():
        for batch in batches:
            same(value(loss, batch), expected(), name, type(batch))
    assert form_of(Opaque()).data == ("example",)
    for batch in ((X, Y, V), [X, Y, V], ALL_NAMED):
        same(value(of_three, batch), expected(V), type(batch))
    alone = value(lambda p, x: of_pair(p, (x, 1.0)), X)
    same(value(lambda p, b: of_pair(p, (*b, 1.0)), (X,)), alone)


def test_examples_of_another_form_are_refused_with_the_arguments():
    by_name = lambda p, *, x, y: of_two(p, x, y)  # noqa: E731
    by_place = lambda p, a, b, /: of_two(p, a, b)  # noqa: E731
    takes = r"loss_fn takes \(x, y\) besides the parameters, so an ex"
    all_refused(
        (words, functools.partial(value, loss, batch))
        for words, loss, batch in (
            (takes, of_two, (X, Y, V)),
            (takes, of_two, X),
            (rf"{takes}.* got a dict with the keys \(v, x, y\)", of_two, ALL_NAMED),
            (rf"{takes}.* got a dict with the keys \(x, z\)", of_two, {"x": X, "z": Y}),
            ("must be a tuple or list of 2; got a dict", by_place, {"a": X, "b": Y}),
            (r"a dict with the keys \(x, y\); got a tuple of 2", by_name, (X, Y)),
            ("got a tuple of 3", with_options, (X, Y, V)),
        )
    )


KEYED = {
    "rng": noisy,
    "key": lambda params, x, y, key: noisy(params, x, y, key),
    "second": lambda params, rng, x, y: noisy(params, x, y, rng),
    "between": lambda params, x, key, y: noisy(params, x, y, key),
    "keyword": lambda params, x, y, *, rng: noisy(params, x, y, rng),
    "default": lambda params, x, y, rng=None: noisy(params, x, y, rng),
    "after an option": lambda params, x, y, train=True, rng=None: noisy(params, x, y, rng),
    "keyword default": lambda params, x, y, *, train=True, key=None: noisy(params, x, y, key),
    "jit": jax.jit(noisy),
    "called": Model(),
    "partial": functools.partial(lambda p, x, y, train, rng: noisy(p, x, y, rng), train=True),
}
WHOLE_KEYED = {
    "positional": lambda params, x, y, rng, /: noisy(params, x, y, rng),
    "whole": lambda params, pair, rng: noisy(params, *pair, rng),
    "option whole": lambda params, pair, train=True, *, key: noisy(params, *pair, key),
}


def each_of_the_key():
    return expected(jax.vmap(jax.random.uniform)(jax.random.split(KEY, 5)))


def test_the_key_goes_by_its_name():
    words = "rng must be a key, since loss_fn takes one"
    forms = {**KEYED, **WHOLE_KEYED}
    for name, loss in forms.items():
        same(value(loss, (X, Y), KEY), each_of_the_key(), name)
        if name in KEYED and name != "partial":
            same(value(loss, NAMED, KEY), each_of_the_key(), name)
    all_refused((words, functools.partial(value, loss, (X, Y)), n) for n, loss in forms.items())
    fixed = functools.partial(noisy, rng=KEY)
    for loss in (fixed, jax.jit(fixed)):
        same(value(loss, (X, Y)), expected() * jax.random.uniform(KEY))


def test_a_key_of_another_name_is_named():
    loss = lambda params, x, y, dropout_key=None: noisy(params, x, y, dropout_key)  # noqa: E731
    free = lambda params, x, y, **kw: noisy(params, x, y, kw["dropout_key"])  # noqa: E731
    for each in (loss, free):
        same(value(each, (X, Y), KEY, rng_name="dropout_key"), each_of_the_key())
    star = lambda *args, **kw: noisy(args[0], *args[1], kw["rng"])  # noqa: E731
    same(value(star, (X, Y), KEY, rng_name="rng"), each_of_the_key())
    attention = lambda params, query, key: of_two(params, query, key)  # noqa: E731
    same(value(attention, (X, Y), rng_name=None), expected())
    grad_fn = jaxdp.clipped_grad(lambda p, x, dropout: 0.0 * x, RULE)  # no key by its place
    assert not grad_fn.takes_rng
    of = lambda loss, **options: lambda: jaxdp.clipped_grad(loss, RULE, **options)  # noqa: E731
    all_refused(
        [
            (
                r"rng_name .* got 'dropout' for the arguments \(params, x",
                of(loss, rng_name="dropout"),
            ),
            ("rng_name must be the name", of(loss, rng_name=(1,))),
            (r"rng_name must say which of \(rng, key\)", of(lambda p, x, rng, key: 0.0)),
            (r"takes \(x, dropout\)", lambda: grad_fn(W, X, "all")),
            (
                "rng must be None, since loss_fn takes no key",
                lambda: grad_fn(W, (X, Y), "all", KEY),
            ),
        ]
    )


def test_what_is_no_loss_is_refused_with_its_arguments():
    no_loss = r"loss_fn must take \(params, example\), or .* got the arg"
    all_refused(
        (words, functools.partial(jaxdp.clipped_grad, loss, RULE), i)
        for i, (words, loss) in enumerate(
            (
                (no_loss, lambda: 0.0),
                (no_loss, lambda p: 0.0),
                (no_loss, lambda p, rng: 0.0),
                (no_loss, lambda key, p, x: 0.0),
                (
                    r"loss_fn must take .* got the arguments \(p, \*\*batch\)",
                    lambda p, **batch: 0.0,
                ),
                ("must let rng be given by its name", lambda p, x, train=True, rng=None, /: 0.0),
                (r"loss_fn must be a function .* got a tuple", (X, Y)),  # and no record is in it
            )
        )
    )


@dataclasses.dataclass
class Unhashable:
    weights: jax.Array

    def __call__(self, params, x, y):
        return of_two(params, x, y) * jnp.sum(self.weights)


MECHANISM = jaxdp.dp_sgd(1.0, 1e6, 5, 5, "full_batch")


def summed_of_a_draw(grad_fn):
    return grad_fn.sum(W, (X, Y), MECHANISM.sampler(5).draw())[0].value["w"]


def test_callable_objects_that_cannot_be_hashed():
    loss = Unhashable(jnp.asarray([0.5, 0.5]))
    with pytest.raises(TypeError):
        hash(loss)
    grad_fn = MECHANISM.clipped_grad(loss)
    same(summed_of_a_draw(grad_fn), expected())
    assert hash(grad_fn) == hash(MECHANISM.clipped_grad(loss))
    assert grad_fn != MECHANISM.clipped_grad(Unhashable(jnp.asarray([0.5, 0.5])))


def test_augmentation_takes_the_same_forms():
    views = jaxdp.clipping.augmented(noisy, lambda pair, key: pair, 2)
    assert np.isfinite(value(views, (X, Y), KEY)).all()


def test_a_trainer_takes_pairs_and_gives_every_step_its_keys():
    mech = jaxdp.dp_sgd(1e-6, 1e3, 5, 5, "full_batch")
    trainer = jaxdp.Trainer(KEYED["keyword default"], mech, optax.sgd(1.0), (X, Y))
    state, sums = trainer.init(W), []
    for batch in trainer.batches(2):
        state, _ = trainer.step(state._replace(params=jax.tree.map(jnp.array, W)), batch)
        sums.append(5 * np.asarray(W["w"] - state.params["w"]))
    assert np.abs(sums[0] - sums[1]).max() > 0.1


def test_equinox_modules_as_losses():
    eqx = pytest.importorskip("equinox")

    class Loss(eqx.Module):
        weight: jax.Array

        def __call__(self, params, x, y):
            return of_two(params, x, y) * jnp.sum(self.weight)

        def keyed(self, params, x, y, *, key):
            return noisy(params, x, y, key)

    loss = Loss(jnp.asarray([0.5, 0.5]))
    for form in (loss, eqx.filter_jit(loss)):
        same(value(form, (X, Y)), expected())
    same(value(loss.keyed, (X, Y), KEY), each_of_the_key())
    same(summed_of_a_draw(MECHANISM.clipped_grad(loss)), expected())
