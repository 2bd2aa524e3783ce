"""A loss sees one example: what it could learn of others by is refused, or named."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback

import jaxdp
from jaxdp.types import Draw
from tests.compiling import with_flags

RULE = jaxdp.clip(1.0)
PARAMS = {"w": jnp.full((3,), 0.1)}
ROWS = jax.random.normal(jax.random.key(0), (16, 3))
STRETCH = jnp.asarray([[1.0, 2.0, 3.0], [0.0, 1.0, 0.5]])
TRACED = "loss_fn must not capture a traced array"
HOLDS = "loss_fn must not capture an array that may hold the records"


def plain(params, x):
    return jnp.vdot(params["w"], x)


def centred(mean, x, params):
    return jnp.vdot(params["w"], x - mean)


def total(loss_fn, rows=ROWS, params=PARAMS, **options):
    return jaxdp.clipped_grad(loss_fn, RULE, **options)(params, rows, "all")[0].value


# Every way in which a loss of one example can be made of an array around it.
def by_scan(outer, params, x):
    return jax.lax.scan(lambda c, _: (c + outer.mean(), None), plain(params, x), None, length=2)[0]


def by_cond(outer, params, x):
    return jax.lax.cond(x[0] > 0, lambda v: v * outer.mean(), lambda v: v, plain(params, x))


def by_while(outer, params, x):
    more = lambda c: c[0] < 2  # noqa: E731
    return jax.lax.while_loop(more, lambda c: (c[0] + 1, outer.mean()), (0, 0.0))[1] * plain(
        params, x
    )


def by_jit(outer, params, x):
    return jax.jit(lambda v: v * outer.mean())(plain(params, x))


def by_checkpoint(outer, params, x):
    return jax.checkpoint(lambda v: v * outer.mean())(plain(params, x))


def by_custom_vjp(outer, params, x):
    scaled = jax.custom_vjp(lambda v: v)
    scaled.defvjp(lambda v: (v, None), lambda _, g: (g * outer.mean(),))
    return scaled(plain(params, x))


def by_custom_jvp(outer, params, x):
    scaled = jax.custom_jvp(lambda v: v)
    scaled.defjvp(lambda v, t: (scaled(*v), t[0] * outer.mean()))
    return scaled(plain(params, x))


WAYS = {
    "outright": lambda outer, params, x: jnp.vdot(params["w"], x - outer.mean(0)),
    "scan": by_scan,
    "cond": by_cond,
    "while": by_while,
    "jit": by_jit,
    "checkpoint": by_checkpoint,
    "custom_vjp": by_custom_vjp,
    "custom_jvp": by_custom_jvp,
}
TRACES = {
    "jit": lambda f: jax.jit(f)(ROWS),
    "vmap": lambda f: jax.vmap(f)(ROWS[None]),
    "grad": lambda f: jax.grad(lambda rows: jnp.sum(f(rows)["w"]))(ROWS),
    "scan": lambda f: jax.lax.scan(lambda c, rows: (c, f(rows)), 0, ROWS[None]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_over_the_batch_that_is_traced_around_it_is_refused(way):
    def step(rows):
        return total(lambda p, x: WAYS[way](rows, p, x), rows)

    with pytest.raises(ValueError, match=rf"{TRACED}, got float32 \[16, 3\].*trainable="):
        jax.jit(step)(ROWS)


@pytest.mark.parametrize("trace", TRACES)
def test_under_every_transformation_a_captured_tracer_is_refused(trace):
    def step(rows):
        mean = rows.mean(0)
        return total(lambda p, x: centred(mean, x, p), rows)

    with pytest.raises(ValueError, match=rf"{TRACED}, got float32 \[3\]"):
        TRACES[trace](step)


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_over_the_whole_concrete_batch_is_refused_until_declared(way):
    loss_fn = lambda p, x: WAYS[way](ROWS, p, x)  # noqa: E731
    with pytest.raises(ValueError, match=rf"{HOLDS}, got .* float32 \[16, 3\].*constants="):
        total(loss_fn)
    with pytest.raises(ValueError, match=HOLDS):
        jaxdp.clipped_grad(loss_fn, RULE).plan(PARAMS, ROWS)
    if way != "while":  # of which JAX takes no gradient
        total(loss_fn, constants={"table": ROWS})


def times(array):
    return lambda p, x: plain(p, x) * jnp.sum(array)


def test_as_many_rows_as_a_batch_or_a_microbatch_are_refused():
    few = jnp.ones((4, 3))
    for array, options in ((few, {"microbatch_size": 4}), (ROWS[:, 0], {})):
        with pytest.raises(ValueError, match=HOLDS):
            total(times(array), **options)
    total(times(few))


def test_an_axis_as_long_as_the_data_set_is_refused_without_its_length():
    # The number of records is private: neither an error nor a ledger may tell it.
    data, draw = jnp.ones((40, 3)), Draw(np.zeros((1, 8), np.int32), np.ones((1, 8), bool), 0, 40)
    for array in (jnp.ones((40, 3)), jnp.ones((3, 40)), jnp.ones(40)):
        with pytest.raises(ValueError, match=HOLDS) as error:
            jaxdp.clipped_grad(times(array), RULE).sum(PARAMS, data, draw)
        assert "40" not in str(error.value)
        jaxdp.clipped_grad(times(array), RULE, constants=array).sum(PARAMS, data, draw)
    with pytest.raises(ValueError, match=rf"{HOLDS}, got .* float32 \[8\] where a batch has 8"):
        jaxdp.clipped_grad(times(jnp.ones(8)), RULE).sum(PARAMS, data, draw)


def test_captured_arrays_are_listed_by_shape_after_the_parameters():
    key, scalar = jax.random.key(1), jnp.float32(2.0)
    table = np.arange(10.0).reshape(2, 5)  # float64, of which JAX makes float32

    def loss_fn(params, x):
        noise = jax.random.normal(key, (3,))
        used = jnp.sum(STRETCH @ x) + jnp.sum(jnp.asarray(table)) + jnp.sum(STRETCH)
        return scalar * jnp.vdot(params["w"], x + noise) * used

    def entries(**options):
        grad_fn = jaxdp.clipped_grad(loss_fn, RULE, **options)
        found = grad_fn.plan(PARAMS, ROWS)
        assert grad_fn(PARAMS, ROWS, "all")[1].plan == found
        assert [leaf.path for leaf in found[:1]] == ["['w']"]
        assert {leaf.engine for leaf in found[1:]} == {"constant"}
        return {leaf.reason: leaf.assumed for leaf in found[1:]}

    words = ["float32 [2, 3]", "float32 [2, 5]", "float32 []", "key<fry> []"]
    assert entries() == {f"{w}, assumed public": f"a captured array {w}" for w in words}
    declared = entries(constants=(STRETCH, {"table": table}, key, scalar))
    assert declared == {f"{w}, declared public": "" for w in words}
    mixed = entries(constants=[table])
    assert mixed["float32 [2, 5], declared public"] == ""
    assert "float32 [2, 3], assumed public" in mixed


def test_constants_must_be_concrete_arrays():
    for bad in (3, {"a": 2.0}, "table"):
        with pytest.raises(ValueError, match="constants must be a pytree of concrete arrays"):
            jaxdp.clipped_grad(plain, RULE, constants=bad)
    with pytest.raises(ValueError, match=r"constants must be .* got a traced array"):
        jax.jit(lambda rows: total(plain, rows, constants=rows))(ROWS)


def test_equal_declarations_compile_once():
    one, other = (jaxdp.clipped_grad(plain, RULE, constants=[STRETCH]) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != jaxdp.clipped_grad(plain, RULE, constants=[STRETCH + 1.0])


def test_a_mutable_array_is_refused():
    memory = jax.new_ref(jnp.zeros(3))

    def loss_fn(params, x):
        return jnp.vdot(params["w"], x - memory[...])

    with pytest.raises(ValueError, match=r"mutable array \(jax.Ref\), got one of float32 \[3\]"):
        total(loss_fn)


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


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_over_a_vmapped_axis_are_refused(name, place):
    def loss_fn(params, x):
        return jnp.vdot(params["w"], x - PLACES[place](COLLECTIVES[name], x))

    with pytest.raises(ValueError, match=r"must not communicate over .* got \w+ over \['i'\]"):
        over_an_axis(loss_fn)


def test_collectives_in_a_gradient_rule_alone_are_refused():
    def loss_fn(params, x):
        scaled = jax.custom_vjp(lambda v: v)
        scaled.defvjp(lambda v: (v, None), lambda _, g: (jax.lax.psum(g, "i"),))
        return scaled(plain(params, x))

    with pytest.raises(ValueError, match=r"must not communicate over .* got psum"):
        over_an_axis(loss_fn)


def test_an_axis_of_the_loss_itself_and_the_index_of_a_shard_are_harmless():
    def loss_fn(params, x):
        views = jax.vmap(lambda v: v - jax.lax.pmean(v, "own"), axis_name="own")(x[:, None])
        shift = jax.lax.axis_index("i").astype(jnp.float32)
        return jnp.vdot(params["w"], x + jnp.sum(views) + shift)

    assert over_an_axis(loss_fn)["w"].shape == (2, 3)


def called_back(params, x):
    seen = jax.pure_callback(
        lambda v: v - v.mean(0),
        jax.ShapeDtypeStruct((3,), jnp.float32),
        x,
        vmap_method="expand_dims",
    )
    return jnp.vdot(params["w"], seen)


def called_out(params, x):
    seen = io_callback(lambda v: v, jax.ShapeDtypeStruct((3,), jnp.float32), x)
    return jnp.vdot(params["w"], seen)


def batched_by_hand(params, x):
    @custom_vmap
    def own(x):
        return x

    @own.def_vmap
    def of_all(size, batched, rows):
        return rows - rows.mean(0), True

    return jnp.vdot(params["w"], own(x))


def foreign(params, x):
    call = jax.ffi.ffi_call(
        "none", jax.ShapeDtypeStruct((3,), jnp.float32), vmap_method="broadcast_all"
    )
    return jnp.vdot(params["w"], call(x))


@pytest.mark.parametrize(
    ("loss_fn", "name"),
    [
        (called_back, "pure_callback"),
        (called_out, "io_callback"),
        (batched_by_hand, "custom_vmap"),
        (foreign, "ffi"),
    ],
)
def test_code_that_may_see_the_whole_batch_is_refused(loss_fn, name):
    for inside in (loss_fn, lambda p, x: jax.jit(loss_fn)(p, x)):
        with pytest.raises(ValueError, match=f"must not use {name}, .* may see the whole batch"):
            total(inside)


def test_printing_changes_no_sum_and_is_allowed(capsys):
    def loss_fn(params, x):
        jax.debug.print("seen")
        jax.debug.callback(lambda: None)
        return plain(params, x)

    np.testing.assert_array_equal(total(loss_fn)["w"], total(plain)["w"])
    jax.effects_barrier()
    assert "seen" in capsys.readouterr().out


def test_on_a_mesh_collectives_are_refused_with_and_without_check_vma():
    """Eight devices on one processor, in a process of their own."""
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import jaxdp
mesh = Mesh(np.array(jax.devices()), ("x",))
params, rows = {"w": jnp.ones(3)}, jax.random.normal(jax.random.key(0), (32, 3))
losses = {
    "pmean": lambda p, e: jnp.vdot(p["w"], e - jax.lax.pmean(e, "x")),
    "none": lambda p, e: jnp.vdot(p["w"], e),
    "index": lambda p, e: jnp.vdot(p["w"], e) * (1 + jax.lax.axis_index("x")),
    "own": lambda p, e: jnp.vdot(p["w"], jax.shard_map(
        lambda v: jax.lax.psum(v, "own"), mesh=Mesh(np.array(jax.devices()[:1]), ("own",)),
        in_specs=P("own"), out_specs=P())(e)),
}
def found(name, check_vma):
    grad_fn = jaxdp.clipped_grad(losses[name], jaxdp.clip(1.0))
    part = lambda p, b: jax.lax.psum(grad_fn(p, b, "all")[0].value["w"], "x")
    whole = jax.shard_map(part, mesh=mesh, in_specs=(P(), P("x")), out_specs=P(),
                          check_vma=check_vma)
    try:
        return jax.jit(whole)(params, rows)
    except ValueError as error:
        return str(error)
for check_vma in (False, True):
    print(found("pmean", check_vma)[:90])
one = jaxdp.clipped_grad(losses["none"], jaxdp.clip(1.0))(params, rows, "all")[0].value["w"]
for check_vma in (False, True):
    np.testing.assert_allclose(found("none", check_vma), one, rtol=1e-5)
    assert found("index", check_vma).shape == (3,)
grad_fn = jaxdp.clipped_grad(losses["own"], jaxdp.clip(1.0))
np.testing.assert_allclose(grad_fn(params, rows, "all")[0].value["w"], one, rtol=1e-5)
"""
    env = with_flags("--xla_force_host_platform_device_count=8")
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    mean, invariant = done.stdout.splitlines()
    assert "must not communicate over a mesh or vmap axis" in mean
    assert "must not communicate over a mesh or vmap axis" in invariant


def test_frozen_statistics_are_named_and_told_to_the_ledger(tmp_path):
    data = jax.random.normal(jax.random.key(2), (50, 3))
    params = {"w": jnp.zeros(3), "mean": data.mean(0)}

    def loss_fn(params, x):
        return jnp.vdot(params["w"], (x - params["mean"]) * STRETCH[0]) * jnp.sum(STRETCH[1])

    mech, path = jaxdp.dp_sgd(1.0, 1.0, 10, 50), tmp_path / "ledger.jsonl"
    grad_fn = mech.clipped_grad(loss_fn, trainable={"w": True, "mean": False})
    ledger = jaxdp.Ledger(path)
    sampler = mech.sampler(50, ledger=ledger)
    before = ledger.unverified()
    for _ in range(3):
        grad_fn.sum(params, data, sampler.draw())
    said = [
        "assumed to be public, computed from no record: a captured array float32 [2, 3]",
        "assumed to be public, computed from no record: the frozen parameter ['mean']",
    ]
    assert before == []
    unseen, *assumed = ledger.unverified()
    assert unseen.startswith("3 of 3 steps: drawn, but that jaxdp added their noise")
    assert assumed == said
    assert sum(b"assumed" in line for line in path.read_bytes().splitlines()) == 2
    ledger.close()
    again = jaxdp.Ledger(path)
    assert again.unverified()[-2:] == said
    assert again.steps == 3
    assert jaxdp.Ledger.from_json(again.to_json()).unverified()[-2:] == said
    # Of the plain call, whose ledger jaxdp does not know, the plan says the same.
    words = [
        f"assumed to be public, computed from no record: {row.assumed}"
        for row in grad_fn.plan(params, data[:7])
        if row.assumed
    ]
    assert sorted(words) == said


def test_what_was_declared_is_not_told_to_the_ledger():
    mech, ledger = jaxdp.dp_sgd(1.0, 1.0, 10, 50), jaxdp.Ledger()
    loss_fn = lambda p, x: plain(p, x) * jnp.sum(STRETCH)  # noqa: E731
    grad_fn = mech.clipped_grad(loss_fn, constants=STRETCH)
    grad_fn.sum(PARAMS, jnp.ones((50, 3)), mech.sampler(50, ledger=ledger).draw())
    assert not any("assumed" in line for line in ledger.unverified())
    mech.clipped_grad(loss_fn).sum(PARAMS, jnp.ones((50, 3)), mech.sampler(50).draw())


def test_what_is_assumed_is_on_disk_before_the_sum_is_handed_on(tmp_path):
    mech, ledger = jaxdp.dp_sgd(1.0, 1.0, 10, 50), jaxdp.Ledger(tmp_path / "ledger.jsonl")
    draw = mech.sampler(50, ledger=ledger).draw()
    ledger.close()
    grad_fn = mech.clipped_grad(lambda p, x: plain(p, x) * jnp.sum(STRETCH))
    with pytest.raises(ValueError, match="ledger must be open"):
        grad_fn.sum(PARAMS, jnp.ones((50, 3)), draw)


def test_losses_of_jaxdp_declare_what_they_capture_themselves():
    from jaxdp.auditing.adversaries import dense
    from jaxdp.auditing.canaries import candidates

    params = {"w": jnp.zeros((4, 3))}
    rows = ((jnp.ones((4, 3)), jnp.arange(4)), -jnp.ones(4, jnp.int32))  # records and their places
    labelled = lambda p, example: jnp.sum(p["w"] @ example[0])  # noqa: E731
    entered = candidates(4, params).loss(labelled)  # an array of 4 places, for a batch of 4
    both = dense(params).worlds(entered, params, jax.tree.map(lambda leaf: leaf[:3], rows))
    viewed = jaxdp.augmented(both.loss_fn, lambda x, key: x, 2)
    plan = jaxdp.clipped_grad(viewed, RULE).plan(params, both.records)
    assert [row.assumed for row in plan] == [""] * 3
    assert all(row.shape[0] == 4 for row in plan[1:])


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
