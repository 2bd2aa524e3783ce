"""A loss sees one example: arrays around it that may hold others are refused, or named.

Nor may it communicate, or hand the batch to code of its own.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback

import jaxdp
from jaxdp.types import Draw
from tests.ledger.small import trained
from tests.mechanisms import sgd_of
from tests.refusing import all_refused, refused

RULE = jaxdp.clip(1.0)
PARAMS = {"w": jnp.full((3,), 0.1)}
ROWS = jax.random.normal(jax.random.key(0), (16, 3))
STRETCH = jnp.asarray([[1.0, 2.0, 3.0], [0.0, 1.0, 0.5]])
TRACED = "loss_fn must not capture a traced array"
HOLDS = "loss_fn must not capture what was computed from the records"


def plain(params, x):
    return jnp.vdot(params["w"], x)


def centred(mean, params, x):
    return jnp.vdot(params["w"], x - mean)


def total(loss_fn, rows=ROWS, params=PARAMS, **options):
    return jaxdp.clipped_grad(loss_fn, RULE, **options)(params, rows, "all").value


def by_custom_vjp(v, mean):
    scaled = jax.custom_vjp(lambda v: v)
    scaled.defvjp(lambda v: (v, None), lambda _, g: (g * mean(),))
    return scaled(v)


def by_custom_jvp(v, mean):
    scaled = jax.custom_jvp(lambda v: v)
    scaled.defjvp(lambda v, t: (scaled(*v), t[0] * mean()))
    return scaled(v)


# Every way in which a loss of one example can be made of an array around it.
WAYS = {
    "outright": lambda v, mean: v * mean(),
    "scan": lambda v, mean: jax.lax.scan(lambda c, _: (c + mean(), None), v, None, length=2)[0],
    "cond": lambda v, mean: jax.lax.cond(v > 0, lambda v: v * mean(), lambda v: v, v),
    "while": lambda v, mean: (
        v * jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, mean()), (0, 0.0))[1]
    ),
    "jit": lambda v, mean: jax.jit(lambda v: v * mean())(v),
    "checkpoint": lambda v, mean: jax.checkpoint(lambda v: v * mean())(v),
    "custom_vjp": by_custom_vjp,
    "custom_jvp": by_custom_jvp,
}


def made_of(outer, way):
    return lambda params, x: WAYS[way](plain(params, x), outer.mean)


TRACES = {
    "jit": lambda f: jax.jit(f)(ROWS),
    "vmap": lambda f: jax.vmap(f)(ROWS[None]),
    "grad": lambda f: jax.grad(lambda rows: jnp.sum(f(rows)["w"]))(ROWS),
    "scan": lambda f: jax.lax.scan(lambda c, rows: (c, f(rows)), 0, ROWS[None]),
}


def centred_under(trace):
    step = lambda rows: total(functools.partial(centred, rows.mean(0)), rows)  # noqa: E731
    TRACES[trace](step)


def traced_over(way):
    jax.jit(lambda rows: total(made_of(rows, way), rows))(ROWS)


def test_a_captured_tracer_is_refused_however_it_is_used_and_under_every_transformation():
    ways, traces = rf"{TRACED}, got float32 \[16, 3\].*trainable=", rf"{TRACED}, got float32 \[3\]"
    all_refused((ways, functools.partial(traced_over, way), way) for way in WAYS)
    all_refused((traces, functools.partial(centred_under, trace), trace) for trace in TRACES)


def test_a_loss_over_the_whole_concrete_batch_is_refused_until_declared():
    words, rows = rf"{HOLDS}, got: a constant \[N, 3\].*a leaf of it", []
    for way in WAYS:
        loss_fn = made_of(ROWS, way)
        rows.append((words, functools.partial(total, loss_fn), way))
        plan = jaxdp.clipped_grad(loss_fn, RULE).plan
        rows.append((HOLDS, functools.partial(plan, PARAMS, ROWS), way))
        if way != "while":  # of which JAX takes no gradient
            total(loss_fn, constants={"table": ROWS})
    all_refused(rows)


def times(array):
    return lambda p, x: plain(p, x) * jnp.sum(array)


DATA = jax.random.normal(jax.random.key(7), (40, 3))
DRAW = Draw(np.zeros((1, 8), np.int32), np.ones((1, 8), bool), 0, 40)


def test_a_coincidence_of_lengths_is_listed_and_not_refused():
    """As many rows as a microbatch, a physical batch or the data set have; before: refused."""
    arrays = [jax.random.uniform(jax.random.key(8), (size, 2)) for size in (4, 8, 16, 40)]
    loss_fn = lambda p, x: plain(p, x) * sum(map(jnp.sum, arrays))  # noqa: E731
    grad_fn = jaxdp.clipped_grad(loss_fn, RULE, microbatch_size=4)
    grad_fn(PARAMS, DATA, DRAW)
    _, info = grad_fn.with_info(PARAMS, DATA[:8], "all")
    said = [f"a captured array float32 [{size}, 2]" for size in (4, 8, 16, 40)]
    assert sorted(row.assumed for row in info.plan if row.assumed) == sorted(said)
    assert info.plan == grad_fn.plan(PARAMS, DATA[:8])


def test_records_and_their_statistics_are_refused_without_their_number():
    # The number of records is private: no error may tell it.
    more = jnp.concatenate([jnp.zeros((9, 3)), DATA[:5]])
    for array in (DATA, DATA.T, more, DATA.mean(0), DATA.std(0), DATA[7:9]):
        with pytest.raises(ValueError, match=HOLDS) as error:
            jaxdp.clipped_grad(times(array), RULE)(PARAMS, DATA, DRAW)
        assert "40" not in str(error.value)
        jaxdp.clipped_grad(times(array), RULE, constants=array)(PARAMS, DATA, DRAW)


def test_of_a_batch_inside_jit_nothing_is_known_and_the_array_is_listed():
    grad_fn = jaxdp.clipped_grad(times(ROWS), RULE)
    info = jax.jit(lambda rows: grad_fn.with_info(PARAMS, rows, "all")[1])(ROWS)
    assert info.plan[-1].assumed == "a captured array float32 [16, 3]"


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
        assert grad_fn.with_info(PARAMS, ROWS, "all")[1].plan == found
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


def test_arrays_that_are_not_concrete_are_refused():
    def with_memory():
        memory = jax.new_ref(jnp.zeros(3))
        total(lambda params, x: jnp.vdot(params["w"], x - memory[...]))

    traced = lambda rows: total(plain, rows, constants=rows)  # noqa: E731
    declared = functools.partial(jaxdp.clipped_grad, plain, RULE)
    rows = [("constants must be .* got a traced array", lambda: jax.jit(traced)(ROWS))]
    rows.append((r"mutable array \(jax.Ref\), got one of float32 \[3\]", with_memory))
    for bad in ("table", {"a": plain}, 10**400):
        words = "constants must be a pytree of concrete arrays"
        rows.append((words, functools.partial(declared, constants=bad)))
    all_refused(rows)


def test_a_number_is_declared_by_its_value():
    """Before: a float was refused, and a scalar was not recognised where the loss wrote it."""
    scale = float(np.asarray(ROWS, np.float64).std())
    loss_fn = lambda p, x: plain(p, x / scale)  # noqa: E731
    half = lambda p, x: plain(p, x.astype(jnp.bfloat16) / scale)  # noqa: E731
    for dtype in (float, np.float32, np.float64, np.array, jnp.float32):
        for loss in (loss_fn, half):
            jaxdp.clipped_grad(loss, RULE, constants={"scale": dtype(scale)}).plan(PARAMS, ROWS)
    said = "a number is the records' standard deviation"
    all_refused(
        [(said, lambda: total(loss_fn)), (said, lambda: total(loss_fn, constants=scale + 1e-3))]
    )


def test_equal_declarations_compile_once():
    for value in (1.5, [STRETCH]):
        one, other = (jaxdp.clipped_grad(plain, RULE, constants=value) for _ in range(2))
        assert one == other
        assert hash(one) == hash(other)
    assert one != jaxdp.clipped_grad(plain, RULE, constants=[STRETCH + 1.0])


def test_frozen_statistics_are_named_and_told_to_the_ledger(tmp_path):
    data = jax.random.normal(jax.random.key(2), (50, 3))
    params = {"w": jnp.zeros(3), "mean": data.mean(0)}

    def loss_fn(params, x):
        return jnp.vdot(params["w"], (x - params["mean"]) * STRETCH[0]) * jnp.sum(STRETCH[1])

    mech, path = sgd_of(1.0, 1.0, 10, 50), tmp_path / "ledger.jsonl"
    grad_fn = mech.clipped_grad(loss_fn, trainable={"w": True, "mean": False})
    ledger = jaxdp.Ledger(path)
    sampler = mech.sampler(50, ledger=ledger)
    assert ledger.unverified() == []
    for _ in range(3):
        grad_fn(params, data, sampler.draw())
    words = "assumed to be public, or made from what this ledger released: "
    named = ["a captured array float32 [2, 3]", "the frozen parameter ['mean']"]
    said = [words + name for name in named]
    unseen, *assumed = ledger.unverified()
    assert unseen.startswith("3 of 3 steps: drawn, but that jaxdp added their noise")
    assert assumed == said
    assert sum(b"assumed" in line for line in path.read_bytes().splitlines()) == 2
    draw = sampler.draw()
    ledger.close()
    again = jaxdp.Ledger(path)
    assert again.unverified()[-2:] == said
    assert again.steps == 4
    assert jaxdp.Ledger.from_json(again.to_json()).unverified()[-2:] == said
    # Of the plain call, whose ledger jaxdp does not know, the plan says the same.
    plan = grad_fn.plan(params, data[:7])
    assert sorted(row.assumed for row in plan if row.assumed) == named
    # It is on disk before the sum is handed on.
    other = mech.clipped_grad(times(STRETCH.T))
    refused("ledger must be open", other, PARAMS, data, draw)


def test_what_was_declared_is_not_told_to_the_ledger():
    mech, ledger = sgd_of(1.0, 1.0, 10, 50), jaxdp.Ledger()
    loss_fn = lambda p, x: plain(p, x) * jnp.sum(STRETCH)  # noqa: E731
    grad_fn = mech.clipped_grad(loss_fn, constants=STRETCH)
    grad_fn(PARAMS, jnp.ones((50, 3)), mech.sampler(50, ledger=ledger).draw())
    assert not any("assumed" in line for line in ledger.unverified())


def test_losses_of_jaxdp_declare_what_they_capture_themselves():
    from jaxdp.audit.algorithms import tiny_worlds
    from jaxdp.audit.canaries import dirac_canaries

    params = {"w": jnp.zeros((4, 3))}
    rows = ((jnp.ones((4, 3)), jnp.arange(4)), -jnp.ones(4, jnp.int32))  # records and their places
    labelled = lambda p, example: jnp.sum(p["w"] @ example[0])  # noqa: E731
    entered = dirac_canaries(4, params).loss(labelled)  # an array of 4 places, for a batch of 4
    _, both = tiny_worlds(jaxdp.optimizers.sgd(sgd_of(1.0, 1.0, 4, 4), 0.1))
    for loss_fn, start, records in (
        (jaxdp.augmented(entered, lambda x, key: x, 2), params, rows),
        (both.loss_fn, both.params, both.records),
    ):
        plan = jaxdp.clipped_grad(loss_fn, RULE).plan(start, records)
        captured = [row for row in plan if row.engine == "constant"]
        assert captured
        assert [row.assumed for row in plan] == [""] * len(plan)


# It may not communicate, nor hand the batch to code of its own. ------------------------------------

COLLECTIVES = {
    **{f.__name__: lambda x, f=f: f(x, "i") for f in (lax.pmean, lax.psum, lax.pmax, lax.pmin)},
    "all_gather": lambda x: jnp.sum(jax.lax.all_gather(x, "i"), 0),
    "ppermute": lambda x: jax.lax.ppermute(x, "i", [(0, 1), (1, 0)]),
    "all_to_all": lambda x: jnp.sum(lax.all_to_all(jnp.stack([x, x]), "i", 0, 0), 0),
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


@custom_vmap
def of_all(x):
    return x


of_all.def_vmap(lambda size, batched, rows: (rows - rows.mean(0), True))


def batched_by_hand(params, x):
    return jnp.vdot(params["w"], of_all(x))


SEEING_ALL = {
    "pure_callback": lambda x: jax.pure_callback(
        lambda v: v - v.mean(0), ROW, x, vmap_method="expand_dims"
    ),
    "io_callback": lambda x: io_callback(lambda v: v, ROW, x),
    "custom_vmap": of_all,
    "ffi": lambda x: jax.ffi.ffi_call("none", ROW, vmap_method="broadcast_all")(x),
}


def test_code_that_may_see_the_whole_batch_is_refused():
    rows = []
    for name, seen in SEEING_ALL.items():
        loss_fn = lambda p, x, seen=seen: jnp.vdot(p["w"], seen(x))  # noqa: E731
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


def test_a_private_energy_that_closes_over_the_records_is_refused():
    from jaxdp.optimizers.energy import PrivateEnergy, energy_mechanism

    mech, data = energy_mechanism(1.0, 1.0, 10, 50), jax.random.normal(jax.random.key(3), (50, 3))

    def prepared(loss_fn):
        sampler = mech.sampler(50, physical_batch_size=16)
        return PrivateEnergy(loss_fn, data, mech, sampler).prepare().spent()

    refused(HOLDS, prepared(functools.partial(centred, data.mean(0))).clipped_sum, PARAMS, PARAMS)
    refused("must not use custom_vmap", prepared(batched_by_hand).clipped_sum, PARAMS, PARAMS)
    assert prepared(plain).clipped_sum(PARAMS, PARAMS) == 0.0


def test_dropout_works_whatever_generator_jax_takes_by_default():
    """Before: the loss was looked at with a key of that generator, and refused."""

    def loss_fn(params, x, rng):
        return jnp.vdot(params["w"], jnp.where(jax.random.bernoulli(rng, 0.5, x.shape), x, 0.0))

    found = []
    for generator in ("threefry2x32", "rbg"):
        with jax.default_prng_impl(generator):
            mechanism = sgd_of(1.0, 1.0, 8, 16)
            trainer = jaxdp.Trainer(
                loss_fn, mechanism, optax.sgd(0.1), ROWS, secret=jaxdp.Secret.from_seed(1)
            )
            found.append(trained(trainer, params=PARAMS).params["w"])
    np.testing.assert_array_equal(*found)
