"""What eight devices add, and what a loss may not say to the others: checks of on_mesh.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.ledger.tickets import simulated_key
from jaxdp.noise import MatrixNoise, identity, square_root
from tests.laws import are_uncorrelated, is_gaussian
from tests.refusing import refused

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
ALL = P(("x", "y"))
KEY = simulated_key(jax.random.key(5), {"gradient": 1.0})
ROWS = jnp.zeros((8, 2_000))


def noisy(value, key, **options):
    tx = jaxdp.privatize(1.0, 1.0, **options)
    params = {"w": value}
    return tx.update(jaxdp.Summed(params, 1.0), tx.init(params), params, key=key)[0]["w"]


def are_independent(rows):
    rows = np.asarray(rows)
    assert all(is_gaussian(row, 1.0) for row in rows)
    assert all(are_uncorrelated(rows[i], rows[j]) for i in range(len(rows)) for j in range(i))


def automatic():
    """Under jit a sharded sum gets the very noise of one device."""
    tx = jaxdp.privatize(1.0, 1.0)
    update, params = jaxdp.compile_update(tx, donate=False), {"w": jnp.zeros(16_000)}
    sharded = jax.device_put(params, NamedSharding(MESH, ALL))
    one, many = (
        update(each, tx.init(each), jaxdp.Summed(each, 1.0), key=KEY)[0]["w"]
        for each in (params, sharded)
    )
    assert len(many.sharding.device_set) == 8
    np.testing.assert_array_equal(one, many)
    are_independent(np.asarray(many).reshape(8, -1))


def mapped(check_vma, spec, **options):
    """[8, 2000]: what each device adds to its row."""
    one, specs = functools.partial(noisy, **options), {"in_specs": (spec, P()), "out_specs": ALL}
    each = jax.shard_map(one, mesh=MESH, check_vma=check_vma, **specs)
    return jax.jit(each)(ROWS if spec != P() else ROWS[:1], KEY)


def shards():
    """Every shard its own noise, whichever way JAX is told."""
    whole, typed = mapped(False, ALL, sharded_over=("x", "y")), mapped(True, ALL)
    are_independent(whole)
    np.testing.assert_allclose(whole, typed, rtol=1e-6)


def replicas():
    """Where the value is the same on devices, so is its noise."""
    found = np.asarray(mapped(False, P(), replicated_over=("x", "y")))
    assert (found == found[0]).all()
    assert is_gaussian(found[0], 1.0)
    mixed = mapped(False, ALL, sharded_over=("x",), replicated_over=("y",))
    mixed = np.asarray(mixed).reshape(4, 2, -1)
    assert (mixed[:, 0] == mixed[:, 1]).all()
    are_independent(mixed[:, 0])
    typed = jax.shard_map(noisy, mesh=MESH, in_specs=(P(), P()), out_specs=P())
    np.testing.assert_allclose(jax.jit(typed)(ROWS[:1], KEY)[0], found[0], rtol=1e-6)


def summed_over_devices():
    """The usual step: rows are sharded, their sum is replicated, and has one noise."""

    def step(rows, key):
        total = jax.lax.psum(rows.sum(0), ("x", "y"))
        return noisy(total, key), noisy(rows[0], key)

    specs = {"mesh": MESH, "in_specs": (ALL, P()), "out_specs": (P(), ALL)}
    total, parts = jax.jit(jax.shard_map(step, **specs))(ROWS, KEY)
    assert is_gaussian(total, 1.0)
    are_independent([total, *parts.reshape(8, -1)])


def pmapped():
    """The same under pmap, by the axis's name; axes of which nothing is known are refused."""

    def each(name="d", **options):
        one = functools.partial(noisy, **options)
        return np.asarray(jax.pmap(one, axis_name=name, in_axes=(0, None))(ROWS, KEY))

    are_independent(each(sharded_over=("d",)))
    same = each(replicated_over=("d",))
    assert (same == same[0]).all()
    refused("sharded_over or replicated_over must name every mesh axis", each)
    refused("got none for ['x', 'y']", mapped, False, ALL)
    refused("got none for ['y']", mapped, False, ALL, sharded_over=("x",))
    try:
        found = each(name=None)  # nothing can be said of it, so nothing is shared
    except ValueError:
        return
    are_independent(found)


def members_on_devices():
    """A vmap inside of a shard_map: members and shards are all apart."""
    many = jax.random.split(jax.random.key(1), 3)
    keys = jax.vmap(lambda s: simulated_key(s, {"gradient": 1.0}))(many)
    for check in (False, True):
        options = {} if check else {"sharded_over": ("x", "y")}
        inner = jax.vmap(functools.partial(noisy, **options))
        specs = {"in_specs": (P(None, ("x", "y")), P()), "out_specs": P(None, ("x", "y"))}
        each = jax.shard_map(inner, mesh=MESH, check_vma=check, **specs)
        found = jax.jit(each)(jnp.zeros((3, 8, 2_000)), keys)
        are_independent(np.asarray(found).reshape(24, -1))


def correlated():
    """Correlated noise likewise, with buffers and without, from one state on all devices."""
    for strategy in (square_root(18), identity(18)):
        tx = jaxdp.privatize(adds := MatrixNoise(1.0, strategy), 1.0)
        key = simulated_key(jax.random.key(0), {adds.part: 1.0})
        state = tx.init(ROWS[:1])  # of the shape that a device holds

        def update(value, state, tx=tx, key=key):
            return tx.update(jaxdp.Summed(value, 1.0), state, value, key=key)[0]

        specs = {"in_specs": (P(("x", "y")), P()), "out_specs": P(("x", "y"))}
        are_independent(jax.jit(jax.shard_map(update, mesh=MESH, **specs))(ROWS, state))


def collectives():
    """Refused with and without ``check_vma``; an index, and an axis of the loss, are not."""
    params, rows = {"w": jnp.ones(3)}, jax.random.normal(jax.random.key(0), (32, 3))
    mesh, alone = (Mesh(np.array(jax.devices()[:n]), (name,)) for n, name in ((8, "x"), (1, "own")))
    over_own = lambda v: jax.lax.psum(v, "own")  # noqa: E731
    own = jax.shard_map(over_own, mesh=alone, in_specs=P("own"), out_specs=P())
    losses = {
        "pmean": lambda p, e: jnp.vdot(p["w"], e - jax.lax.pmean(e, "x")),
        "none": lambda p, e: jnp.vdot(p["w"], e),
        "index": lambda p, e: jnp.vdot(p["w"], e) * (1 + jax.lax.axis_index("x")),
        "own": lambda p, e: jnp.vdot(p["w"], own(e)),
    }
    summed = {name: jaxdp.clipped_grad(loss, jaxdp.clip(1.0)) for name, loss in losses.items()}

    def found(name, check_vma):
        part = lambda p, b: jax.lax.psum(summed[name](p, b, "all").value["w"], "x")  # noqa: E731
        specs = {"in_specs": (P(), P("x")), "out_specs": P(), "check_vma": check_vma}
        return jax.jit(jax.shard_map(part, mesh=mesh, **specs))(params, rows)

    one = summed["none"](params, rows, "all").value["w"]
    for check_vma in (False, True):
        refused("not communicate over a mesh or vmap axis", found, "pmean", check_vma)
        np.testing.assert_allclose(found("none", check_vma), one, rtol=1e-5)
        assert found("index", check_vma).shape == (3,)
    own_sum = summed["own"](params, rows, "all").value["w"]
    np.testing.assert_allclose(own_sum, one, rtol=1e-5)


CHECKS = (
    automatic, shards, replicas, summed_over_devices, pmapped, members_on_devices, correlated,
    collectives,
)  # fmt: skip
