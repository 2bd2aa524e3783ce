"""Microbatches, frozen parameters, auxiliary outputs, and refusals."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdp
from jaxdp.clipping import options, rounding
from jaxdp.types import Draw
from tests.clipping.architectures import ARCHITECTURES, opened
from tests.clipping.test_ghost import gap
from tests.compiling import with_flags


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_microbatches_change_nothing(size):
    params, loss_fn, batch = ARCHITECTURES["mlp"]()
    at_once = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.5)))
    cut = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.5), microbatch_size=size))
    (whole, info), (found, again) = (run(params, batch) for run in (at_once, cut))
    assert gap(found, whole) < 1e-6
    np.testing.assert_allclose(again.norms, info.norms, rtol=1e-6)
    np.testing.assert_array_equal(again.clipped, info.clipped)
    mask = jnp.asarray([True, True, False, True, True])
    assert gap(cut(params, batch, mask)[0], at_once(params, batch, mask)[0]) < 1e-6


def test_microbatches_bound_the_memory():
    params, batch = {"w": jnp.zeros((300, 200))}, jnp.ones((256, 300))

    def temporary(size):
        grad_fn = jaxdp.clipped_grad(
            lambda p, x: jnp.sum(jnp.sin(x @ p["w"])), jaxdp.clip(1.0), "vmap", microbatch_size=size
        )
        compiled = (
            jax.jit(lambda p, b: grad_fn(p, b, "all")[0].value).lower(params, batch).compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(16) < 0.2 * temporary(None)


def test_a_million_aligned_gradients_are_added_without_drift():
    # One after another in float32 they would lose 5 %.
    passes, rows = 4096, 256
    draw = Draw(np.zeros((passes, rows), np.int32), np.ones((passes, rows), bool), 0, 1)
    grad_fn = jaxdp.clipped_grad(
        lambda p, x: jnp.sum(p["w"] * x), jaxdp.clip(0.1), most_records=2**20
    )
    total = grad_fn.sum({"w": jnp.zeros(2)}, jnp.asarray([[0.3, 0.4]]), draw)[0].value["w"]
    aimed = 0.1 * (1 - rounding.MARGIN) * passes * rows
    np.testing.assert_allclose(np.linalg.norm(np.asarray(total, np.float64)), aimed, rtol=3e-6)


@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_frozen_parameters_get_no_gradient_no_norm_and_no_noise(engine):
    params, loss_fn, batch = ARCHITECTURES["low_rank"]()
    choices = [
        lambda path: "frozen" not in path,
        {"frozen": False, "down": True, "up": True},
    ]
    for choice in choices:
        grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.3), engine, trainable=choice)
        value, info = opened(grad_fn)(params, batch)
        assert value["frozen"] is None
        moving = {name: params[name] for name in ("down", "up")}
        alone = jaxdp.clipped_grad(
            lambda p, x: loss_fn({**p, "frozen": params["frozen"]}, x), jaxdp.clip(0.3), "vmap"
        )
        expected, reference = opened(alone)(moving, batch)
        np.testing.assert_allclose(info.norms, reference.norms, rtol=1e-5)
        assert gap(value, expected) < 1e-5
        engines = {leaf.path: leaf.engine for leaf in grad_fn.plan(params, batch)}
        assert engines["['frozen']"] == "frozen"


def test_training_with_frozen_parameters_moves_the_others_only():
    params, loss_fn, batch = ARCHITECTURES["low_rank"]()
    mech = jaxdp.dp_sgd(1.0, 0.3, 5, 5, sampling="full_batch")
    grad_fn = mech.clipped_grad(loss_fn, trainable=lambda path: "frozen" not in path)
    tx = optax.chain(mech.privatize(), optax.sgd(0.1, momentum=0.9))
    state = tx.init(grad_fn.trained(params))
    update = jaxdp.compile_update(tx)
    before, keys = params, jax.random.split(jax.random.key(0), 2)
    for key in keys:
        summed, key = grad_fn(params, batch, "all")[0], mech.simulated_key(key)
        params, state, info = update(params, state, summed, key=key)
    np.testing.assert_array_equal(params["frozen"], before["frozen"])
    assert all(np.abs(params[n] - before[n]).min() > 0 for n in ("down", "up"))
    assert info.update_norm > 0


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


class WithBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=False)(x))


def test_batch_statistics_are_refused_in_words():
    module = WithBatchNorm()
    variables = module.init(jax.random.key(0), jnp.ones((1, 3)))
    stats = variables["batch_stats"]
    unaware = lambda p, x: module.apply({"params": p, "batch_stats": stats}, x[None]).sum()  # noqa: E731

    def aware(p, x):
        out, new = module.apply(
            {"params": p, "batch_stats": stats}, x[None], mutable=["batch_stats"]
        )
        return out.sum(), new

    for loss_fn in (unaware, aware):
        with pytest.raises(ValueError, match="batch statistics"):
            jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))(
                variables["params"], jnp.ones((4, 3)), "all"
            )
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    loss_fn = lambda p, x: jnp.sum(norm(x[None]) * p["w"])  # noqa: E731
    with pytest.raises(ValueError, match="batch statistics"):
        jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))({"w": jnp.ones(3)}, jnp.ones((4, 3)), "all")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "fast"}, "engine must be one of"),
        ({"microbatch_size": 0}, "microbatch_size must be"),
        ({"microbatch_size": 2.5}, "microbatch_size must be"),
        ({"trainable": {"down": 1}}, "trainable must be a tree of bool"),
        ({"trainable": {}}, "trainable must be a tree of bool"),
        ({"trainable": {"up": True}}, "trainable must be a prefix"),
        ({"trainable": lambda path: False}, "trainable must let at least one"),
    ],
)
def test_bad_options(options, message):
    params, loss_fn, batch = ARCHITECTURES["low_rank"]()
    with pytest.raises(ValueError, match=message):
        jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), **options)(params, batch, "all")


def test_bad_scales_bounds_and_integer_parameters():
    params, loss_fn, batch = ARCHITECTURES["low_rank"]()
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))
    with pytest.raises(ValueError, match="scale must be shaped like"):
        grad_fn(params, batch, "all", scale={"up": jnp.ones((2, 5))})
    whole = {**params, "frozen": jnp.ones((6, 5), jnp.int32)}
    with pytest.raises(ValueError, match=r"floating-point .* int32 at \['frozen'\]"):
        grad_fn(whole, batch, "all")
    boxed = jaxdp.clipped_grad(loss_fn, jaxdp.coordinate_box(1.0))
    with pytest.raises(ValueError, match="bound must be None"):
        boxed(params, batch, "all", bound=jnp.float32(1.0))


def test_a_sharded_batch_and_one_device_give_the_same_sum():
    """Eight devices on one processor, in a process of their own."""
    import subprocess
    import sys

    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jaxdp
mesh = Mesh(np.array(jax.devices()), ("x",))
params = {"w": jax.random.normal(jax.random.key(0), (6, 4)), "e": jnp.ones((5, 6))}
loss = lambda p, ex: jnp.sum(jnp.sin((ex[0] + p["e"][ex[1]]) @ p["w"]))
batch = (jax.random.normal(jax.random.key(1), (32, 3, 6)),
         jax.random.randint(jax.random.key(2), (32, 3), 0, 5))
for engine in ("auto", "ghost", "vmap"):
    grad_fn = jaxdp.clipped_grad(loss, jaxdp.clip(0.5), engine)
    def total(p, b, m): return grad_fn(p, b, m)[0].value
    mask = jnp.arange(32) % 3 != 0
    one = jax.jit(total)(params, batch, mask)
    rows = NamedSharding(mesh, P("x"))
    spread = jax.jit(total)(params, jax.device_put(batch, rows), jax.device_put(mask, rows))
    by_hand = jax.shard_map(
        lambda p, b, m: jax.lax.psum(total(p, b, m), "x"),
        mesh=mesh, in_specs=(P(), P("x"), P("x")), out_specs=P(), check_vma=False)
    for other in (spread, jax.jit(by_hand)(params, batch, mask)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)
print(len(jax.devices()))
"""
    env = with_flags("--xla_force_host_platform_device_count=8")
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "8"


def test_bounds_and_scales_of_a_compiled_step_are_made_safe():
    for given, safe in ((np.nan, 1e-10), (0.0, 1e-10), (-1.0, 1e-10), (np.inf, 1e10), (2.0, 2.0)):
        value = jnp.float32(given)
        assert float(options.checked_bound(value)) == np.float32(safe)
        assert float(options.checked_scale({"w": value})["w"]) == np.float32(safe)


def given(**options):
    """What the ledger of a draw is told where its records are clipped by something given."""
    mechanism = jaxdp.dp_sgd(1.0, 0.5, 8, 16)
    grad_fn = mechanism.clipped_grad(lambda w, x: jnp.vdot(w, x))
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


BY_THE_CALLER = "of a step was given by the caller: assumed public, or computed from noisy"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bound": 0.25}, ["the clip bound (bound=)"]),
        ({"bound": np.float32(7.0)}, ["the clip bound (bound=)"]),
        ({"bound": jnp.float32(7.0)}, ["the clip bound (bound=)"]),
        ({"scale": jnp.full(3, 2.0)}, ["the scale (scale=)"]),
        ({"bound": of_a_trainer(jnp.float32(7.0))}, ["the clip bound (bound=)"]),
        ({"scale": of_a_trainer(jnp.ones(3))}, ["the scale (scale=)"]),
        ({"scale": np.full(3, 2.0), "bound": 0.5}, ["the scale (scale=)"]),
        ({"bound": 0.5}, []),  # the rule's own
        ({}, []),
    ],
)
def test_what_the_caller_gives_to_clip_by_is_on_the_list(options, named):
    """Before: an empty list, where the bound told whether the largest record had been drawn."""
    found = given(**options)
    assert [line.split(" of a step")[0] for line in found] == named
    assert all(BY_THE_CALLER in line for line in found)


@pytest.mark.parametrize("wrong", ["a", object(), 1j, np.array("a")])
def test_a_scale_that_is_no_number_is_told_as_such(wrong):
    grad_fn = jaxdp.clipped_grad(lambda p, x: jnp.sum(p * x), jaxdp.clip(1.0))
    with pytest.raises(ValueError, match="scale must be a pytree of positive numbers"):
        grad_fn(jnp.ones(3), jnp.ones((2, 3)), "all", scale=wrong)
