"""Microbatches, frozen parameters, auxiliary outputs, augmentation, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp.clipping import options, rounding
from jaxdp.types import Draw
from tests.clipping.architectures import ARCHITECTURES, opened
from tests.clipping.references import gap
from tests.refusing import all_refused


def test_microbatches_change_nothing():
    params, loss_fn, batch = ARCHITECTURES["mlp"]()
    masks = jnp.asarray([[True] * 5, [True, True, False, True, True]])

    def both(size=None):
        grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.5), microbatch_size=size)
        return jax.vmap(opened(grad_fn), (None, None, 0))(params, batch, masks)

    whole, info = both()
    for size in (1, 2, 5, 9):
        found, again = both(size)
        assert gap(found, whole) < 1e-6, size
        np.testing.assert_allclose(again.norms, info.norms, rtol=1e-6)
        np.testing.assert_array_equal(again.clipped, info.clipped)


def test_microbatches_bound_the_memory():
    params, batch = {"w": jnp.zeros((300, 200))}, jnp.ones((256, 300))
    loss_fn = lambda p, x: jnp.sum(jnp.sin(x @ p["w"]))  # noqa: E731

    def temporary(size):
        grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), "vmap", microbatch_size=size)
        run = jax.jit(lambda p, b: grad_fn(p, b, "all")[0].value)
        return run.lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    assert temporary(16) < 0.2 * temporary(None)


def test_a_million_aligned_gradients_are_added_without_drift():
    # One after another in float32 they would lose 5 %.
    passes, rows = 4096, 256
    draw = Draw(np.zeros((passes, rows), np.int32), np.ones((passes, rows), bool), 0, 1)
    loss_fn = lambda p, x: jnp.sum(p["w"] * x)  # noqa: E731
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.1), most_records=2**20)
    total = grad_fn.sum({"w": jnp.zeros(2)}, jnp.asarray([[0.3, 0.4]]), draw)[0].value["w"]
    aimed = 0.1 * (1 - rounding.MARGIN) * passes * rows
    np.testing.assert_allclose(np.linalg.norm(np.asarray(total, np.float64)), aimed, rtol=3e-6)


def test_frozen_parameters_get_no_gradient_no_norm_and_no_noise():
    params, loss_fn, batch = ARCHITECTURES["low_rank"]()
    moving = {name: params[name] for name in ("down", "up")}
    alone = lambda p, x: loss_fn({**p, "frozen": params["frozen"]}, x)  # noqa: E731
    reference = opened(jaxdp.clipped_grad(alone, jaxdp.clip(0.3), "vmap"))(moving, batch)
    flags = {"frozen": False, "down": True, "up": True}
    for engine, choice in (("auto", flags), ("vmap", lambda path: "frozen" not in path)):
        grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.3), engine, trainable=choice)
        value, info = opened(grad_fn)(params, batch)
        assert value["frozen"] is None
        np.testing.assert_allclose(info.norms, reference[1].norms, rtol=1e-5)
        assert gap(value, reference[0]) < 1e-5
        engines = {leaf.path: leaf.engine for leaf in grad_fn.plan(params, batch)}
        assert engines["['frozen']"] == "frozen"


def test_auxiliary_outputs_are_handed_on_for_every_example():
    params, loss_fn, batch = ARCHITECTURES["mlp"]()

    def with_aux(params, example):
        return loss_fn(params, example), {"label": example[1], "double": 2.0 * example[0]}

    for size in (None, 2):
        grad_fn = jaxdp.clipped_grad(with_aux, jaxdp.clip(1.0), microbatch_size=size)
        _, info = opened(grad_fn)(params, batch)
        np.testing.assert_array_equal(info.aux["label"], batch[1])
        np.testing.assert_array_equal(info.aux["double"], 2.0 * batch[0])
        assert len(info.plan) == len(jax.tree.leaves(params))
    assert "norms" not in repr(info)


RULE, MADE_WITH = jaxdp.clip(1.0), {"engine", "microbatch_size", "trainable"}


def test_bad_options_scales_bounds_and_parameters_are_refused():
    params, loss_fn, batch = ARCHITECTURES["low_rank"]()

    def of(params=params, rule=RULE, **given):
        made = {name: given.pop(name) for name in MADE_WITH & given.keys()}
        grad_fn = jaxdp.clipped_grad(loss_fn, rule, **made)
        return grad_fn(params, batch, "all", **given)

    whole = {**params, "frozen": jnp.ones((6, 5), jnp.int32)}
    rows = [
        ("engine must be one of", {"engine": "fast"}),
        ("microbatch_size must be", {"microbatch_size": 0}),
        ("microbatch_size must be", {"microbatch_size": 2.5}),
        ("trainable must be a tree of bool", {"trainable": {"down": 1}}),
        ("trainable must be a tree of bool", {"trainable": {}}),
        ("trainable must be a prefix", {"trainable": {"up": True}}),
        ("trainable must let at least one", {"trainable": lambda path: False}),
        ("scale must be shaped like", {"scale": {"up": jnp.ones((2, 5))}}),
        (r"floating-point .* int32 at \['frozen'\]", {"params": whole}),
        ("bound must be None", {"rule": jaxdp.coordinate_box(1.0), "bound": jnp.float32(1.0)}),
    ]
    for no_number in ("a", object(), 1j, np.array("a")):
        rows.append(("scale must be a pytree of positive numbers", {"scale": no_number}))
    all_refused((words, functools.partial(of, **given), str(given)) for words, given in rows)
    views = functools.partial(jaxdp.augmented, loss_fn)
    all_refused([("augment must be a function", lambda: views(None, 2))])
    all_refused([("multiplicity must be", lambda: views(lambda x, key: x, 0))])


def augmented(multiplicity, engine="auto", bound=0.5):
    params = {"w": jax.random.normal(jax.random.key(0), (4, 3))}
    loss_fn = lambda p, x: jnp.sum(jnp.sin(x @ p["w"]))  # noqa: E731
    augment = lambda x, key: x + jax.random.normal(key, x.shape)  # noqa: E731
    mean_loss = jaxdp.augmented(loss_fn, augment, multiplicity)
    batch = jax.random.normal(jax.random.key(1), (6, 4))
    return params, jaxdp.clipped_grad(mean_loss, jaxdp.clip(bound), engine), batch


def test_a_record_contributes_one_clipped_mean_however_many_views():
    key = jax.random.key(3)
    for views in (1, 5):
        params, grad_fn, batch = augmented(views)
        assert [leaf.engine for leaf in grad_fn.plan(params, batch)] != ["vmap"]
        run = opened(grad_fn)
        total, info = run(params, batch, np.ones(6, bool), key)
        reference, again = opened(augmented(views, "vmap")[1])(params, batch, rng=key)
        np.testing.assert_allclose(info.norms, again.norms, rtol=1e-5)
        assert gap(total, reference) < 1e-5, views
        one = run(params, batch, np.arange(6) == 2, key)[0]["w"]
        assert np.linalg.norm(np.asarray(one, np.float64)) <= 0.5, views


def test_views_are_different_and_their_mean_steadies_the_gradient():
    keys = jax.random.split(jax.random.key(9), 40)

    def spread(multiplicity):
        params, grad_fn, batch = augmented(multiplicity, bound=1e3)
        run = opened(grad_fn)
        totals = jax.vmap(lambda k: run(params, batch, rng=k)[0]["w"])(keys)
        return float(jnp.mean(jnp.var(totals, axis=0)))

    ratio = spread(1) / spread(8)
    assert 5.0 < ratio < 13.0  # 8 up to the noise of 40 runs


def test_bounds_and_scales_of_a_compiled_step_are_made_safe():
    for given, safe in ((np.nan, 1e-10), (0.0, 1e-10), (-1.0, 1e-10), (np.inf, 1e10), (2.0, 2.0)):
        value = jnp.float32(given)
        assert float(options.checked_bound(value)) == np.float32(safe)
        assert float(options.checked_scale({"w": value})["w"]) == np.float32(safe)


def given(**options):
    """What the ledger of a draw is told where its records are clipped by something given."""
    mechanism = jaxdp.dp_sgd(1.0, 0.5, 8, 16)
    grad_fn = mechanism.clipped_grad(jnp.vdot)
    records, said = jnp.ones((16, 3)), []
    for by_batch in (False, True):
        sampler = mechanism.sampler(16, physical_batch_size=16)
        draw = sampler.draw()
        if by_batch:
            grad_fn(jnp.zeros(3), next(draw.batches(records)), **options)
        else:
            grad_fn.sum(jnp.zeros(3), records, draw, **options)
        said.append([line for line in sampler.ledger.unverified() if "of a step" in line])
    assert said[0] == said[1]
    return said[0]


def of_a_trainer(array):
    """An array of the caller's that a trainer returned, as the parameters before the first step."""
    mechanism = jaxdp.dp_sgd(1.0, 0.5, 8, 16)
    loss_fn = lambda w, x: jnp.sum(w) * x  # noqa: E731
    return jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), jnp.ones(16)).init(array).params


def test_what_the_caller_gives_to_clip_by_is_on_the_list():
    """Before: an empty list, where the bound told whether the largest record had been drawn."""
    bound, scale = ["the clip bound (bound=)"], ["the scale (scale=)"]
    rows = (
        ({"bound": np.float32(7.0)}, bound),
        ({"bound": jnp.float32(7.0)}, bound),
        ({"bound": of_a_trainer(jnp.float32(7.0))}, bound),
        ({"scale": jnp.full(3, 2.0)}, scale),
        ({"scale": of_a_trainer(jnp.ones(3))}, scale),
        ({"scale": np.full(3, 2.0), "bound": 0.5}, scale),
        ({"bound": 0.5}, []),  # the rule's own
        ({}, []),
    )
    words = "of a step was given by the caller: assumed public, or computed from noisy"
    for by, named in rows:
        found = given(**by)
        assert [line.split(" of a step")[0] for line in found] == named, by
        assert all(words in line for line in found), by
