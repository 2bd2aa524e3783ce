"""The forms of a loss; state of frameworks in losses and parameters is refused with the remedy."""

import dataclasses
import functools
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdp
from jaxdp.clipping import losses
from jaxdp.clipping.losses import form_of
from tests.mechanisms import sgd_of
from tests.refusing import all_refused, refused

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
    summed = jaxdp.clipped_grad(loss_fn, RULE, **options)(W, batch, "all", rng)
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
STATIC = lambda p, x, y, train=True: of_two(p, x, y)  # noqa: E731
AFTER_A_NUMBER = lambda one, p, x, y: one * of_two(p, x, y)  # noqa: E731
FORMS = {
    "whole": (of_pair, (X, Y), [X, Y]),
    "whole dict": (lambda p, b: of_pair(p, (b["x"], b["y"])), {"x": X, "y": Y}),
    "taken apart": (of_two, (X, Y), [X, Y], NAMED),
    "options": (with_options, (X, Y)),
    "an option beside the whole": (lambda p, b, y=1.0: of_pair(p, (b[0], b[1] * y)), (X, Y)),
    "args": (lambda *args: of_pair(*args), (X, Y)),
    "args, kwargs": (lambda *args, **kwargs: of_pair(*args, **kwargs), (X, Y)),
    "params, args": (lambda params, *args: of_pair(params, *args), (X, Y)),
    "partial by name": (functools.partial(of_three, v=1.0), NAMED),
    "partial by place": (functools.partial(AFTER_A_NUMBER, 1.0), (X, Y)),
    "bound": (Model().loss, (X, Y)),
    "static": (Model.static, (X, Y)),
    "jit": (jax.jit(of_two), (X, Y)),
    "jit, static": (jax.jit(STATIC, static_argnames="train"), (X, Y)),
    "checkpoint": (jax.checkpoint(of_two), (X, Y)),
    "no signature": (Opaque(), (X, Y)),
}


def test_every_form_takes_its_examples():
    for name, (loss, *batches) in FORMS.items():
        for batch in batches:
            same(value(loss, batch), expected(), name, type(batch))
    assert form_of(Opaque()).names == ("example",)
    for batch in ((X, Y, V), [X, Y, V], ALL_NAMED):
        same(value(of_three, batch), expected(V), type(batch))
    alone = value(lambda p, x: of_pair(p, (x, 1.0)), X)
    same(value(lambda p, b: of_pair(p, (*b, 1.0)), (X,)), alone)


def test_examples_of_another_form_are_refused_with_the_arguments():
    takes = r"loss_fn takes \(x, y\) besides the parameters, so an ex"
    rows = (
        (takes, of_two, (X, Y, V)),
        (takes, of_two, X),
        (rf"{takes}.* got {{v: float32\[\], x: float32\[3\], y: fl", of_two, ALL_NAMED),
        (rf"{takes}.* got {{x: float32\[3\], z: float32\[\]}}", of_two, {"x": X, "z": Y}),
        (r"got \(float32\[3\], float32\[\], float32\[\]\)", with_options, (X, Y, V)),
    )
    all_refused((words, functools.partial(value, loss, batch)) for words, loss, batch in rows)


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
    same(value(lambda p, x, y, rng=KEY: noisy(p, x, y, rng), (X, Y), KEY), each_of_the_key())
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
    refusals = [
        (r"rng_name .* got 'dropout' for \(params, x", loss, {"rng_name": "dropout"}),
        (r"rng_name must say which of \(rng, key\)", lambda p, x, rng, key: 0.0, {}),
    ]
    rows = [
        (words, functools.partial(jaxdp.clipped_grad, f, RULE, **o)) for words, f, o in refusals
    ]
    no_key = "rng must be None, since loss_fn takes no key"
    rows.append((no_key, functools.partial(grad_fn, W, (X, Y), "all", KEY)))
    rows.append((r"takes \(x, dropout\)", functools.partial(grad_fn, W, X, "all")))
    all_refused(rows)


def test_what_is_no_loss_is_refused_with_its_arguments():
    no_loss = r"loss_fn must take \(params, example\), or .* got the arg"
    named = r"loss_fn must take .* got the arguments \(p, \*\*batch\)"
    rows = (
        *((no_loss, loss) for loss in (lambda: 0.0, lambda p: 0.0, lambda p, rng: 0.0)),
        (no_loss, lambda key, p, x: 0.0),
        (named, lambda p, **batch: 0.0),
        (no_loss, lambda p, batch=None: 0.0),
        (no_loss, lambda p, *, x, y: 0.0),
        (no_loss, lambda p, x, *, y: 0.0),
        (r"loss_fn must be a function .* got a tuple", (X, Y)),  # and no record is in it
    )
    make = functools.partial(jaxdp.clipped_grad, rule=RULE)
    all_refused((words, functools.partial(make, f), at) for at, (words, f) in enumerate(rows))


@dataclasses.dataclass
class Unhashable:
    weights: jax.Array

    def __call__(self, params, x, y):
        return of_two(params, x, y) * jnp.sum(self.weights)


MECHANISM = sgd_of(1.0, 1e6, 5, 5, "full_batch")


def summed_of_a_draw(grad_fn):
    return grad_fn(W, (X, Y), MECHANISM.sampler(5).draw()).value["w"]


def test_callable_objects_that_cannot_be_hashed():
    loss, other = (Unhashable(jnp.asarray([0.5, 0.5])) for _ in range(2))
    with pytest.raises(TypeError):
        hash(loss)
    grad_fn = MECHANISM.clipped_grad(loss)
    same(summed_of_a_draw(grad_fn), expected())
    assert hash(grad_fn) == hash(MECHANISM.clipped_grad(loss))
    assert grad_fn != MECHANISM.clipped_grad(other)


def test_augmentation_and_a_trainer_take_pairs_and_every_step_has_its_keys():
    views = jaxdp.clipping.augmented(noisy, lambda pair, key: pair, 2)
    assert np.isfinite(value(views, (X, Y), KEY)).all()
    paired = jaxdp.clipping.augmented(noisy, lambda x, key: (x, jnp.zeros(())), 2)  # of a record x
    assert np.array_equal(value(paired, X, KEY), value(views, (X, jnp.zeros(len(X))), KEY))
    mech = sgd_of(1e-6, 1e3, 5, 5, "full_batch")
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


# State of Flax and Equinox in losses and parameters: refused with the remedy, and the remedy. -------


class Linen(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x, train=None):
        train = self.train if train is None else train
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(x))


MODULE = Linen()
VARIABLES = MODULE.init(jax.random.key(0), jnp.ones((1, 3)))
STATS = {"batch_stats": VARIABLES["batch_stats"]}


def grads(loss_fn, params, **options):
    return jaxdp.clipped_grad(loss_fn, RULE, **options)(params, X, "all").value


def applied(params, x, *train, module=MODULE, **options):
    return module.apply({"params": params, **STATS}, x[None], *train, **options)


class Centred(nn.Module):
    """Statistics of the user's own."""

    @nn.compact
    def __call__(self, x):
        mean = self.variable("batch_stats", "mean", jnp.zeros, (3,))
        mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
        return nn.Dense(2)(x - mean.value[None])


OWN = Centred().init(jax.random.key(0), X)


def test_linen_statistics_that_are_dropped_are_refused_however_they_are_used():
    params, changed = VARIABLES["params"], {"mutable": ["batch_stats"]}
    dropped = lambda p, x: jnp.sum(applied(p, x, **changed)[0])  # noqa: E731
    by_argument = lambda p, x: applied(p, x, True, module=Linen(False), **changed)  # noqa: E731
    own = lambda p, x: Centred().apply({**OWN, "params": p}, x[None], **changed)  # noqa: E731

    def handed_on(params, x):
        out, new = applied(params, x, **changed)
        return jnp.sum(out), new

    remedy = r"batch statistics.*BatchNorm\(use_running_average=True\)"
    rows = []
    for loss in (dropped, jax.jit(dropped), jax.checkpoint(jax.jit(dropped))):
        loss(params, X[0])  # a jit that was traced before is looked at all the same
        rows.append((remedy, loss, params))
    words = "must not use batch statistics"
    rows += [
        (words, lambda p, x: jnp.sum(applied(p, x)), params),
        (words, lambda p, x: jnp.sum(by_argument(p, x)[0]), params),
        (words, handed_on, params),
        (words, lambda p, x: jnp.sum(own(p, x)[0]), OWN["params"]),
    ]
    all_refused((words, functools.partial(grads, loss, params)) for words, loss, params in rows)


def test_linen_statistics_that_stay_fixed_are_taken_and_not_trained():
    for mutable in (False, ["batch_stats"], True):

        def loss(params, x, mutable=mutable):
            out = applied(params, x, False, mutable=mutable)
            return jnp.sum(out[0] if mutable else out)

        assert np.isfinite(grads(loss, VARIABLES["params"])["Dense_0"]["kernel"]).all()
    of_all = lambda variables, x: jnp.sum(MODULE.apply(variables, x[None], False))  # noqa: E731
    words = r"batch statistics where they are trained, got \['batch_st"
    refused(words, grads, of_all, VARIABLES)
    found = grads(of_all, VARIABLES, trainable=lambda path: "batch_stats" not in path)
    assert jax.tree.leaves(found["batch_stats"]) == []


class Nnx(nnx.Module):
    def __init__(self, norm=False, dropout=False):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(0.5, rngs=rngs) if dropout else None

    def __call__(self, x):
        x = x if self.norm is None else self.norm(x)
        x = x if self.dropout is None else self.dropout(x)
        return self.linear(x)


def split(**options):
    return nnx.split(Nnx(**options), nnx.Param, ...)


def merged(copy, **options):
    """A loss of the module's parameters, and the parameters."""
    graphdef, params, rest = split(**options)
    return lambda p, x: jnp.sum(nnx.merge(graphdef, p, rest, copy=copy)(x[None])), params


def test_nnx_state_of_the_batch_is_refused_with_the_remedy():
    captured, norm = Nnx(), nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def of_a_captured_model(params, x):
        nnx.update(captured, params)
        return jnp.sum(captured(x[None]))

    statistics = r"batch statistics.*model.eval\(\)"
    dropout = r"dropout .* nnx.reseed\(model, default=rng\)"
    changed = r"captured module .*nnx.merge\(graphdef, params, rest"
    no_param = r"must be nnx.Param .*nnx.split\(model, nnx.Param, ...\)"
    cases = [
        ("batch statistics", lambda p, x: jnp.sum(norm(x[None]) * p["w"]), W),
        (changed, of_a_captured_model, nnx.state(captured, nnx.Param)),
    ]
    for copy in (False, True):
        loss, params = merged(copy, norm=True)
        cases += [(statistics, loss, params), (statistics, jax.jit(loss), params)]
        cases.append((dropout, *merged(copy, dropout=True)))
    for options in ({"norm": True}, {"dropout": True}):
        cases.append((no_param, lambda m, x: jnp.sum(x) * 0.0, nnx.state(Nnx(**options))))
    cases.append(("got a module, Nnx.*nnx.split", lambda m, x: jnp.sum(m["m"](x)), {"m": Nnx()}))
    all_refused((words, functools.partial(grads, loss, params)) for words, loss, params in cases)


def test_nnx_lora_is_split_by_type_and_frozen_keys_are_no_keys_of_an_example():
    graphdef, lora, base = nnx.split(Nnx(dropout=True), nnx.Param, ...)
    params, loss = (
        {"lora": lora, "base": base},
        lambda p, x: jnp.sum(nnx.merge(graphdef, p["lora"], p["base"], copy=True)(x[None])),
    )
    words = "trainable must be .* got the class LoRAParam.* nnx.split"
    refused(words, grads, loss, params, trainable=nnx.LoRAParam)
    trainable = {"lora": True, "base": False}
    refused("keys are not the example's", grads, loss, params, trainable=trainable)


def test_nnx_statistics_that_stay_fixed_are_taken():
    graphdef, params, rest = split(norm=True)

    def evaluated(params, x):
        model = nnx.merge(graphdef, params, rest, copy=True)
        model.eval()
        return jnp.sum(model(x[None]))

    assert np.isfinite(grads(evaluated, params)["linear"]["kernel"][...]).all()


def test_nnx_dropout_by_the_remedy_differs_between_examples_and_steps():
    graphdef, params, rest = split(dropout=True)

    def reseeded(params, x, rng):
        model = nnx.merge(graphdef, params, rest, copy=True)
        nnx.reseed(model, default=rng)
        return jnp.sum(model(x[None]))

    def by_argument(params, x, rng):
        model = nnx.merge(graphdef, params, rest, copy=True)
        return jnp.sum(model.linear(model.dropout(x[None], rngs=nnx.Rngs(rng))))

    for loss in (reseeded, by_argument):
        grad_fn = jaxdp.clipped_grad(loss, RULE)
        run = jax.jit(lambda key, f=grad_fn: f(params, jnp.ones((200, 3)), "all", key).value)
        sums = [run(jax.random.key(i)) for i in (0, 1)]
        first, second = (np.asarray(s["linear"]["kernel"][...]) for s in sums)
        # Kept with probability ½ and doubled: 200 ± 14 each; one mask for all would give 0 or 400.
        assert (np.abs(first - 200) < 85).all()
        assert (first != second).any()


class Fake:
    """A module whose activation is a leaf, as Equinox has them."""

    def __init__(self, weight, activation):
        self.weight, self.activation = weight, activation


jax.tree_util.register_pytree_node(
    Fake, lambda f: ((f.weight, f.activation), None), lambda _, parts: Fake(*parts)
)


def test_functions_among_the_parameters_are_refused_with_the_remedy():
    module, words = (
        Fake(jnp.ones(3), jax.nn.relu),
        "must be a pytree of arrays, got .* eqx.partition",
    )
    loss = lambda m, x: m.activation(x @ m.weight)  # noqa: E731
    mech = sgd_of(1.0, 1.0, 5, 5)
    grad_fn, draw = mech.clipped_grad(loss), mech.sampler(5).draw()
    few = mech.clipped_grad(loss, microbatch_size=2)
    some = mech.clipped_grad(loss, trainable=lambda path: True)
    calls = [functools.partial(each, module, X, "all") for each in (grad_fn, few, some)]
    calls += [lambda: grad_fn(module, X, draw), lambda: grad_fn.plan(module, X)]
    calls.append(lambda: jaxdp.Trainer(loss, mech, optax.sgd(0.1), X).init(module))
    all_refused((words, call, place) for place, call in enumerate(calls))


def test_equinox_by_the_remedy():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
    refused(r"of a MLP. .*eqx.partition", grads, lambda m, x: m(x), model)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    found = grads(lambda p, x: eqx.combine(p, static)(x), params)
    wanted = jax.grad(lambda p: jnp.sum(jax.vmap(eqx.combine(p, static))(X)))(params)
    jax.tree.map(lambda a, b: same(a, b), found, wanted)

    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    refused("axis that is not its own", grads, lambda p, x: jnp.sum(norm(x * p["w"], state)[0]), W)


def test_nothing_of_flax_stays_changed_and_other_threads_are_let_be():
    calls = (nnx.BatchNorm.__call__, nnx.Dropout.__call__)
    model, found = Nnx(norm=True), []
    with losses._checking_nnx(nnx, {}):
        assert nnx.BatchNorm.__call__ is not calls[0]
        thread = threading.Thread(target=lambda: found.append(model(X)))
        thread.start()
        thread.join()
        refused("batch statistics", model, X)
    assert (nnx.BatchNorm.__call__, nnx.Dropout.__call__) == calls
    assert len(found) == 1
    assert model(X).shape == (5, 2)
