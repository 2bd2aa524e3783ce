"""A loss sees one example: arrays around it that may hold others are refused, or named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.types import Draw
from tests.refusing import all_refused

RULE = jaxdp.clip(1.0)
PARAMS = {"w": jnp.full((3,), 0.1)}
ROWS = jax.random.normal(jax.random.key(0), (16, 3))
STRETCH = jnp.asarray([[1.0, 2.0, 3.0], [0.0, 1.0, 0.5]])
TRACED = "loss_fn must not capture a traced array"
HOLDS = "loss_fn must not capture what was computed from the records"


def plain(params, x):
    return jnp.vdot(params["w"], x)


def centred(mean, x, params):
    return jnp.vdot(params["w"], x - mean)


def total(loss_fn, rows=ROWS, params=PARAMS, **options):
    return jaxdp.clipped_grad(loss_fn, RULE, **options)(params, rows, "all")[0].value


def by_custom_vjp(v, mean):
    scaled = jax.custom_vjp(lambda v: v)
    scaled.defvjp(lambda v: (v, None), lambda _, g: (g * mean(),))
    return scaled(v)


def by_custom_jvp(v, mean):
    scaled = jax.custom_jvp(lambda v: v)
    scaled.defjvp(lambda v, t: (scaled(*v), t[0] * mean()))
    return scaled(v)


def by_while(v, mean):
    return v * jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, mean()), (0, 0.0))[1]


# Every way in which a loss of one example can be made of an array around it.
WAYS = {
    "outright": lambda v, mean: v * mean(),
    "scan": lambda v, mean: jax.lax.scan(lambda c, _: (c + mean(), None), v, None, length=2)[0],
    "cond": lambda v, mean: jax.lax.cond(v > 0, lambda v: v * mean(), lambda v: v, v),
    "while": by_while,
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


def traced_over(way):
    jax.jit(lambda rows: total(made_of(rows, way), rows))(ROWS)


def centred_under(trace):
    def step(rows):
        mean = rows.mean(0)
        return total(lambda p, x: centred(mean, x, p), rows)

    TRACES[trace](step)


def test_a_captured_tracer_is_refused_however_it_is_used_and_under_every_transformation():
    ways = rf"{TRACED}, got float32 \[16, 3\].*trainable="
    traces = rf"{TRACED}, got float32 \[3\]"
    all_refused(
        [
            *((ways, functools.partial(traced_over, way), way) for way in WAYS),
            *((traces, functools.partial(centred_under, trace), trace) for trace in TRACES),
        ]
    )


def test_a_loss_over_the_whole_concrete_batch_is_refused_until_declared():
    words, rows = rf"{HOLDS}, got: a constant \[N, 3\].*constants=", []
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
    grad_fn = jaxdp.clipped_grad(
        lambda p, x: plain(p, x) * sum(map(jnp.sum, arrays)), RULE, microbatch_size=4
    )
    grad_fn.sum(PARAMS, DATA, DRAW)
    _, info = grad_fn(PARAMS, DATA[:8], "all")
    said = [f"a captured array float32 [{size}, 2]" for size in (4, 8, 16, 40)]
    assert sorted(row.assumed for row in info.plan if row.assumed) == sorted(said)
    assert info.plan == grad_fn.plan(PARAMS, DATA[:8])


def test_records_and_their_statistics_are_refused_without_their_number():
    # The number of records is private: no error may tell it.
    more = jnp.concatenate([jnp.zeros((9, 3)), DATA[:5]])
    for array in (DATA, DATA.T, more, DATA.mean(0), DATA.std(0), DATA[7:9]):
        with pytest.raises(ValueError, match=HOLDS) as error:
            jaxdp.clipped_grad(times(array), RULE).sum(PARAMS, DATA, DRAW)
        assert "40" not in str(error.value)
        jaxdp.clipped_grad(times(array), RULE, constants=array).sum(PARAMS, DATA, DRAW)


def test_of_a_batch_inside_jit_nothing_is_known_and_the_array_is_listed():
    grad_fn = jaxdp.clipped_grad(times(ROWS), RULE)

    @jax.jit
    def step(rows):
        return grad_fn(PARAMS, rows, "all")[1]

    assert step(ROWS).plan[-1].assumed == "a captured array float32 [16, 3]"


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


def test_arrays_that_are_not_concrete_are_refused():
    def with_memory():
        memory = jax.new_ref(jnp.zeros(3))
        total(lambda params, x: jnp.vdot(params["w"], x - memory[...]))

    declared = functools.partial(jaxdp.clipped_grad, plain, RULE)
    no_arrays = "constants must be a pytree of concrete arrays"
    all_refused(
        [
            *(
                (no_arrays, lambda c=c: declared(constants=c))
                for c in ("table", {"a": plain}, 10**400)
            ),
            (
                "constants must be .* got a traced array",
                lambda: jax.jit(lambda rows: total(plain, rows, constants=rows))(ROWS),
            ),
            (r"mutable array \(jax.Ref\), got one of float32 \[3\]", with_memory),
        ]
    )


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
    one, other = (jaxdp.clipped_grad(plain, RULE, constants=scale) for _ in range(2))
    assert one == other


def test_equal_declarations_compile_once():
    one, other = (jaxdp.clipped_grad(plain, RULE, constants=[STRETCH]) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != jaxdp.clipped_grad(plain, RULE, constants=[STRETCH + 1.0])


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
