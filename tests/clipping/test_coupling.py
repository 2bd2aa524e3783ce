"""A loss sees one example: it may not communicate, nor hand the batch to code of its own."""

import functools
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback

import jaxdp
from tests.clipping.test_captured import HOLDS, PARAMS, ROWS, centred, plain, total
from tests.compiling import with_flags
from tests.refusing import all_refused

COLLECTIVES = {
    "pmean": lambda x: jax.lax.pmean(x, "i"),
    "psum": lambda x: jax.lax.psum(x, "i"),
    "pmax": lambda x: jax.lax.pmax(x, "i"),
    "pmin": lambda x: jax.lax.pmin(x, "i"),
    "all_gather": lambda x: jnp.sum(jax.lax.all_gather(x, "i"), 0),
    "ppermute": lambda x: jax.lax.ppermute(x, "i", [(0, 1), (1, 0)]),
    "all_to_all": lambda x: jnp.sum(jax.lax.all_to_all(jnp.stack([x, x]), "i", 0, 0), 0),
    "psum_scatter": lambda x: jax.lax.psum_scatter(jnp.stack([x, x]), "i"),
}
PLACES = {
    "outright": lambda f, x: f(x),
    "scan": lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "jit": lambda f, x: jax.jit(f)(x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
}


def over_an_axis(loss_fn):
    two = ROWS.reshape(2, 8, 3)
    return jax.vmap(lambda rows: total(loss_fn, rows), axis_name="i")(two)


def rule_alone(params, x):
    scaled = jax.custom_vjp(lambda v: v)
    scaled.defvjp(lambda v: (v, None), lambda _, g: (jax.lax.psum(g, "i"),))
    return scaled(plain(params, x))


def test_collectives_over_a_vmapped_axis_are_refused_also_in_a_gradient_rule_alone():
    words = "must not communicate over .* got "
    rows = [(f"{words}psum", functools.partial(over_an_axis, rule_alone))]
    for name, place in itertools.product(COLLECTIVES, PLACES):

        def loss_fn(params, x, name=name, place=place):
            return jnp.vdot(params["w"], x - PLACES[place](COLLECTIVES[name], x))

        found = rf"{words}\w+ over \['i'\]"
        rows.append((found, functools.partial(over_an_axis, loss_fn), name, place))
    all_refused(rows)


def test_an_axis_of_the_loss_itself_and_the_index_of_a_shard_are_harmless():
    def loss_fn(params, x):
        views = jax.vmap(lambda v: v - jax.lax.pmean(v, "own"), axis_name="own")(x[:, None])
        shift = jax.lax.axis_index("i").astype(jnp.float32)
        return jnp.vdot(params["w"], x + jnp.sum(views) + shift)

    assert over_an_axis(loss_fn)["w"].shape == (2, 3)


ROW = jax.ShapeDtypeStruct((3,), jnp.float32)


def called_back(params, x):
    seen = jax.pure_callback(lambda v: v - v.mean(0), ROW, x, vmap_method="expand_dims")
    return jnp.vdot(params["w"], seen)


def called_out(params, x):
    return jnp.vdot(params["w"], io_callback(lambda v: v, ROW, x))


def batched_by_hand(params, x):
    @custom_vmap
    def own(x):
        return x

    @own.def_vmap
    def of_all(size, batched, rows):
        return rows - rows.mean(0), True

    return jnp.vdot(params["w"], own(x))


def foreign(params, x):
    return jnp.vdot(params["w"], jax.ffi.ffi_call("none", ROW, vmap_method="broadcast_all")(x))


def test_code_that_may_see_the_whole_batch_is_refused():
    rows = []
    for loss_fn, name in (
        (called_back, "pure_callback"),
        (called_out, "io_callback"),
        (batched_by_hand, "custom_vmap"),
        (foreign, "ffi"),
    ):
        words = f"must not use {name}, .* may see the whole batch"
        rows += [(words, functools.partial(total, f)) for f in (loss_fn, jax.jit(loss_fn))]
    all_refused(rows)


def test_printing_changes_no_sum_and_is_allowed(capsys):
    def loss_fn(params, x):
        jax.debug.print("seen")
        jax.debug.callback(lambda: None)
        return plain(params, x)

    np.testing.assert_array_equal(total(loss_fn)["w"], total(plain)["w"])
    jax.effects_barrier()
    assert "seen" in capsys.readouterr().out


EIGHT_DEVICES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jaxdp
mesh, all_close = Mesh(np.array(jax.devices()), ("x",)), np.testing.assert_allclose

# Collectives are refused with and without check_vma; an index, and an axis of the loss, are not.
params, rows = {"w": jnp.ones(3)}, jax.random.normal(jax.random.key(0), (32, 3))
alone = Mesh(np.array(jax.devices()[:1]), ("own",))
def own(v): return jax.lax.psum(v, "own")
losses = {
    "pmean": lambda p, e: jnp.vdot(p["w"], e - jax.lax.pmean(e, "x")),
    "none": lambda p, e: jnp.vdot(p["w"], e),
    "index": lambda p, e: jnp.vdot(p["w"], e) * (1 + jax.lax.axis_index("x")),
    "own": lambda p, e: jnp.vdot(
        p["w"], jax.shard_map(own, mesh=alone, in_specs=P("own"), out_specs=P())(e)),
}
def summed(name): return jaxdp.clipped_grad(losses[name], jaxdp.clip(1.0))
def found(name, check_vma):
    part = lambda p, b: jax.lax.psum(summed(name)(p, b, "all")[0].value["w"], "x")
    whole = jax.shard_map(part, mesh=mesh, in_specs=(P(), P("x")), out_specs=P(),
                          check_vma=check_vma)
    return jax.jit(whole)(params, rows)
one = summed("none")(params, rows, "all")[0].value["w"]
for check_vma in (False, True):
    try: raise SystemExit(f"not refused: {found('pmean', check_vma)}")
    except ValueError as error: assert "not communicate over a mesh or vmap axis" in str(error)
    all_close(found("none", check_vma), one, rtol=1e-5)
    assert found("index", check_vma).shape == (3,)
all_close(summed("own")(params, rows, "all")[0].value["w"], one, rtol=1e-5)

# A sharded batch and one device give the same sum.
params = {"w": jax.random.normal(jax.random.key(0), (6, 4)), "e": jnp.ones((5, 6))}
loss = lambda p, ex: jnp.sum(jnp.sin((ex[0] + p["e"][ex[1]]) @ p["w"]))
batch = (jax.random.normal(jax.random.key(1), (32, 3, 6)),
         jax.random.randint(jax.random.key(2), (32, 3), 0, 5))
mask, rows = jnp.arange(32) % 3 != 0, NamedSharding(mesh, P("x"))
for engine in ("auto", "ghost", "vmap"):
    grad_fn = jaxdp.clipped_grad(loss, jaxdp.clip(0.5), engine)
    def total(p, b, m): return grad_fn(p, b, m)[0].value
    one = jax.jit(total)(params, batch, mask)
    spread = jax.jit(total)(params, jax.device_put(batch, rows), jax.device_put(mask, rows))
    by_hand = jax.shard_map(lambda p, b, m: jax.lax.psum(total(p, b, m), "x"), mesh=mesh,
                            in_specs=(P(), P("x"), P("x")), out_specs=P(), check_vma=False)
    for other in (spread, jax.jit(by_hand)(params, batch, mask)):
        jax.tree.map(lambda a, b: all_close(a, b, rtol=1e-5, atol=1e-6), one, other)

# Clipping imports neither Flax nor Equinox.
def frameworks(): return [m for m in sys.modules if m.split(".")[0] in ("flax", "equinox")]
for name in frameworks(): del sys.modules[name]
jaxdp.clipped_grad(lambda p, x: jnp.sum(p["w"] * x), jaxdp.clip(1.0))(
    {"w": jnp.ones(2)}, jnp.ones((3, 2)), "all")
assert not frameworks()
print(len(jax.devices()))
"""


def test_on_eight_devices_collectives_are_refused_and_sums_are_those_of_one():
    """On one processor, in a process of their own, where also no framework is imported."""
    done = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES],
        env=with_flags("--xla_force_host_platform_device_count=8"),
        **{"capture_output": True, "text": True, "timeout": 300},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "8"


def test_a_private_energy_that_closes_over_the_records_is_refused():
    from jaxdp.optimizers.energy import PrivateEnergy, energy_mechanism

    mech, data = energy_mechanism(1.0, 1.0, 10, 50), jax.random.normal(jax.random.key(3), (50, 3))

    def prepared(loss_fn):
        sampler = mech.sampler(50, physical_batch_size=16)
        return PrivateEnergy(loss_fn, data, mech, sampler).prepare().spent()

    with pytest.raises(ValueError, match=HOLDS):
        prepared(lambda p, x: centred(data.mean(0), x, p)).clipped_sum(PARAMS, PARAMS)
    with pytest.raises(ValueError, match="must not use custom_vmap"):
        prepared(batched_by_hand).clipped_sum(PARAMS, PARAMS)
    assert prepared(plain).clipped_sum(PARAMS, PARAMS) == 0.0


def test_keys_of_another_generator_are_named():
    """Before: "must not use jit", where the key's use was inside one."""

    def loss_fn(params, x):
        key = jax.random.key(0, impl="rbg")
        return jnp.vdot(params["w"], x * jax.random.normal(key, x.shape))

    with pytest.raises(ValueError, match=r"generator than threefry, got .* rbg"):
        total(loss_fn)


def test_dropout_works_whatever_generator_jax_takes_by_default():
    """Before: the loss was looked at with a key of that generator, and refused."""

    def loss_fn(params, x, rng):
        return jnp.vdot(params["w"], jnp.where(jax.random.bernoulli(rng, 0.5, x.shape), x, 0.0))

    found = []
    for generator in ("threefry2x32", "rbg"):
        with jax.default_prng_impl(generator):
            mechanism = jaxdp.dp_sgd(1.0, 1.0, 8, 16)
            trainer = jaxdp.Trainer(
                loss_fn, mechanism, optax.sgd(0.1), ROWS, secret=jaxdp.Secret.from_seed(1)
            )
            state = trainer.init(PARAMS)
            for batch in trainer.batches(2):
                state, _ = trainer.step(state, batch)
            found.append(state.params["w"])
    np.testing.assert_array_equal(*found)
