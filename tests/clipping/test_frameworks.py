"""State of Flax and Equinox in losses and parameters: refused with the remedy, and the remedy."""

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
from jaxdp.clipping import frameworks
from tests.clipping.test_losses import RULE, W, X, same
from tests.refusing import all_refused


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
    return jaxdp.clipped_grad(loss_fn, RULE, **options)(params, X, "all")[0].value


def dropped(params, x):
    out, _ = MODULE.apply({"params": params, **STATS}, x[None], mutable=["batch_stats"])
    return jnp.sum(out)


def unaware(params, x):
    return jnp.sum(MODULE.apply({"params": params, **STATS}, x[None]))


def by_argument(params, x):
    variables = {"params": params, **STATS}
    return jnp.sum(Linen(False).apply(variables, x[None], True, mutable=["batch_stats"])[0])


def handed_on(params, x):
    out, new = MODULE.apply({"params": params, **STATS}, x[None], mutable=["batch_stats"])
    return jnp.sum(out), new


class Centred(nn.Module):
    """Statistics of the user's own."""

    @nn.compact
    def __call__(self, x):
        mean = self.variable("batch_stats", "mean", jnp.zeros, (3,))
        mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
        return nn.Dense(2)(x - mean.value[None])


OWN = Centred().init(jax.random.key(0), X)


def of_another_module(params, x):
    given = {**OWN, "params": params}
    return jnp.sum(Centred().apply(given, x[None], mutable=["batch_stats"])[0])


def test_linen_statistics_that_are_dropped_are_refused_however_they_are_used():
    params = VARIABLES["params"]
    remedy = r"batch statistics.*BatchNorm\(use_running_average=True\)"
    rows = []
    for loss in (dropped, jax.jit(dropped), jax.checkpoint(jax.jit(dropped))):
        loss(params, X[0])  # a jit that was traced before is looked at all the same
        rows.append((remedy, functools.partial(grads, loss, params)))
    words = "must not use batch statistics"
    rows += [
        (words, functools.partial(grads, f, params)) for f in (unaware, by_argument, handed_on)
    ]
    rows.append((words, functools.partial(grads, of_another_module, OWN["params"])))
    all_refused(rows)


def test_linen_statistics_that_stay_fixed_are_taken():
    for mutable in (False, ["batch_stats"], True):

        def loss(params, x, mutable=mutable):
            out = MODULE.apply({"params": params, **STATS}, x[None], False, mutable=mutable)
            return jnp.sum(out[0] if mutable else out)

        assert np.isfinite(grads(loss, VARIABLES["params"])["Dense_0"]["kernel"]).all()


def test_statistics_are_not_trained():
    def loss(variables, x):
        return jnp.sum(MODULE.apply(variables, x[None], False))

    with pytest.raises(
        ValueError, match=r"batch statistics where they are trained, got \['batch_st"
    ):
        grads(loss, VARIABLES)
    found = grads(loss, VARIABLES, trainable=lambda path: "batch_stats" not in path)
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


def of_a_captured_model(model, params):
    def loss(params, x):
        nnx.update(model, params)
        return jnp.sum(model(x[None]))

    return loss, params


def test_nnx_state_of_the_batch_is_refused_with_the_remedy():
    captured, norm = Nnx(), nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    statistics = r"batch statistics.*model.eval\(\)"
    dropout = r"dropout .* nnx.reseed\(model, default=rng\)"
    changed = r"captured module .*nnx.merge\(graphdef, params, rest"
    cases = [
        ("batch statistics", lambda p, x: jnp.sum(norm(x[None]) * p["w"]), W),
        (changed, *of_a_captured_model(captured, nnx.state(captured, nnx.Param))),
    ]
    for copy in (False, True):
        loss, params = merged(copy, norm=True)
        cases += [(statistics, loss, params), (statistics, jax.jit(loss), params)]
        cases.append((dropout, *merged(copy, dropout=True)))
    no_param = r"must be nnx.Param .*nnx.split\(model, nnx.Param, ...\)"
    for options in ({"norm": True}, {"dropout": True}):
        for form in (lambda m: m, nnx.state):
            cases.append((no_param, lambda m, x: jnp.sum(x) * 0.0, form(Nnx(**options))))
    all_refused((words, functools.partial(grads, loss, params)) for words, loss, params in cases)


def test_nnx_statistics_that_stay_fixed_are_taken():
    graphdef, params, rest = split(norm=True)

    def evaluated(params, x):
        model = nnx.merge(graphdef, params, rest, copy=True)
        model.eval()
        return jnp.sum(model(x[None]))

    assert np.isfinite(grads(evaluated, params)["linear"]["kernel"][...]).all()


def test_nnx_dropout_by_the_remedy_differs_between_examples_and_steps():
    graphdef, params, rest = split(dropout=True)

    def loss(params, x, rng):
        model = nnx.merge(graphdef, params, rest, copy=True)
        nnx.reseed(model, default=rng)
        return jnp.sum(model(x[None]))

    def by_argument(params, x, rng):
        model = nnx.merge(graphdef, params, rest, copy=True)
        return jnp.sum(model.linear(model.dropout(x[None], rngs=nnx.Rngs(rng))))

    ones = jnp.ones((200, 3))
    for each in (loss, by_argument):
        grad_fn = jaxdp.clipped_grad(each, RULE)
        run = jax.jit(lambda key, grad_fn=grad_fn: grad_fn(params, ones, "all", key)[0].value)
        sums = [run(jax.random.key(i)) for i in (0, 1)]
        first, second = (np.asarray(s["linear"]["kernel"][...]) for s in sums)
        # Kept with probability ½ and doubled: 200 ± 14 each; one mask for all would give 0 or 400.
        assert (np.abs(first - 200) < 85).all()
        assert (first != second).any()


def test_an_nnx_module_of_parameters_alone_is_taken():
    found = grads(lambda m, x: jnp.sum(m(x[None])), Nnx())
    assert np.isfinite(found.linear.kernel[...]).all()


class Fake:
    """A module whose activation is a leaf, as Equinox has them."""

    def __init__(self, weight, activation):
        self.weight, self.activation = weight, activation


jax.tree_util.register_pytree_node(
    Fake, lambda f: ((f.weight, f.activation), None), lambda _, parts: Fake(*parts)
)


def test_functions_among_the_parameters_are_refused_with_the_remedy():
    module = Fake(jnp.ones(3), jax.nn.relu)
    loss = lambda m, x: m.activation(x @ m.weight)  # noqa: E731
    mech = jaxdp.dp_sgd(1.0, 1.0, 5, 5)
    grad_fn, draw = mech.clipped_grad(loss), mech.sampler(5).draw()
    trainer = jaxdp.Trainer(loss, mech, optax.sgd(0.1), X)
    calls = (
        lambda: grad_fn(module, X, "all"),
        lambda: grad_fn.sum(module, X, draw),
        lambda: grad_fn.plan(module, X),
        lambda: trainer.init(module),
        lambda: mech.clipped_grad(loss, microbatch_size=2)(module, X, "all"),
        lambda: mech.clipped_grad(loss, trainable=lambda path: True)(module, X, "all"),
    )
    words = "must be a pytree of arrays, got .* eqx.partition"
    all_refused((words, call, place) for place, call in enumerate(calls))


def test_equinox_by_the_remedy():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"of a MLP. .*eqx.partition"):
        grads(lambda m, x: m(x), model)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    found = grads(lambda p, x: eqx.combine(p, static)(x), params)
    wanted = jax.grad(lambda p: jnp.sum(jax.vmap(eqx.combine(p, static))(X)))(params)
    jax.tree.map(lambda a, b: same(a, b), found, wanted)

    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    with pytest.raises(ValueError, match="axis that is not its own"):
        grads(lambda p, x: jnp.sum(norm(x * p["w"], state)[0]), W)


def test_nothing_of_flax_stays_changed_and_other_threads_are_let_be():
    calls = (nnx.BatchNorm.__call__, nnx.Dropout.__call__)
    model, found = Nnx(norm=True), []
    with frameworks._flax_watched():
        assert nnx.BatchNorm.__call__ is not calls[0]
        thread = threading.Thread(target=lambda: found.append(model(X)))
        thread.start()
        thread.join()
        with pytest.raises(ValueError, match="batch statistics"):
            model(X)
    assert (nnx.BatchNorm.__call__, nnx.Dropout.__call__) == calls
    assert len(found) == 1
    assert model(X).shape == (5, 2)
