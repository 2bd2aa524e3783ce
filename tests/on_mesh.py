"""One step on meshes of eight devices: run by test_mesh.py, which forces so many.

`python -m tests.on_mesh [check ...]` prints which of the checks passed.
"""

import functools
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from benchmarks.collectives import collectives, summary
from jaxdp import clipping
from jaxdp.sampling import as_source
from jaxdp.training.trainer import look_through
from tests import eight_devices, refusing
from tests.compiling import lower_quickly
from tests.mechanisms import mf_of, sgd_of
from tests.refusing import all_refused

assert jax.device_count() == 8
ROWS, RNG = 256, np.random.default_rng(0)
X, Y = RNG.standard_normal((ROWS, 16)).astype(np.float32), np.arange(ROWS, dtype=np.int32) % 4
MECHANISM = jaxdp.dp_sgd(noise_multiplier=1.0, l2_clip_norm=0.5, batch_size=64, dataset_size=ROWS)


ONE = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
TWO = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
THREE = jax.make_mesh((2, 2, 2), ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
WHOLE = P()
EXPLICIT = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))


def fresh(width=32):
    keys, sizes = jax.random.split(jax.random.key(0), 2), (16, width, 4)
    return [
        {"w": jax.random.normal(key, (rows, columns)) / rows**0.5, "b": jnp.zeros(columns)}
        for key, rows, columns in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def loss_fn(params, x, y):
    first, last = params
    logits = jnp.tanh(x @ first["w"] + first["b"]) @ last["w"] + last["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def whole(mesh, params):
    return jax.device_put(params, NamedSharding(mesh, P()))


def fully_sharded(mesh, params):
    cut = lambda leaf: P("data" if leaf.shape[0] % mesh.shape["data"] == 0 else None)  # noqa: E731
    return jax.device_put(params, jax.tree.map(lambda a: NamedSharding(mesh, cut(a)), params))


def by_tensors(mesh, params, rows=None):
    """Columns of the first layer and rows of the next are on other devices."""
    columns = {"w": NamedSharding(mesh, P(None, "model")), "b": NamedSharding(mesh, P("model"))}
    inputs = {"w": NamedSharding(mesh, P("model", rows)), "b": NamedSharding(mesh, P())}
    return jax.device_put(params, [columns, inputs])


by_both = functools.partial(by_tensors, rows="fsdp")
SHARDED, TENSORS = "8x1, fully sharded", "4x2, tensor parallel"
BOTH, EXPLICITLY = "2x2x2, fully sharded and tensor parallel", "8x1, explicit axes"
# mesh, its axes of rows, where the parameters lie
PLACES = {
    "8x1": (ONE, None, whole),
    SHARDED: (ONE, None, fully_sharded),
    TENSORS: (TWO, None, by_tensors),
    "4x2, rows over both": (TWO, ("data", "model"), whole),
    BOTH: (THREE, ("data", "fsdp"), by_both),
    EXPLICITLY: (EXPLICIT, None, fully_sharded),
}


def trained(params, mesh=None, axes=None, steps=2, **options):
    """The trainer, its state after some steps, and the records of each."""
    given = {"loss_fn": loss_fn, "mechanism": MECHANISM, "optimizer": optax.adam(1e-2)}
    given |= {"source": (X, Y), "secret": jaxdp.Secret.from_seed(7), **options}
    trainer = jaxdp.Trainer(mesh=mesh, data_axes=axes, **given)
    state, drawn = trainer.init(params), []
    for batch in trainer.batches(steps):
        drawn.append(sorted(batch.draw.indices[batch.draw.mask].tolist()))
        state, _ = trainer.step(state, batch)
    return trainer, state, drawn


def compiled(trainer, state):
    """The step of one physical batch."""
    batch = next(trainer.batches(1))
    draw, rows = batch.draw, batch.rows
    data = trainer._data if rows is None else rows[0]
    given = (data, draw.indices[0], draw.mask[0], None), draw.ticket.blank(), {}, None
    options = {"gathered": rows is not None, "return_info": False}
    return trainer._step.compiled.jitted.lower(*state[:2], *given, **options).compile()


def ordinary(params, rows, axes, mesh):
    """The same step without privacy: the gradient of the mean loss, and Adam."""
    tx, at = optax.adam(1e-2), jax.tree.map(lambda leaf: leaf.sharding, params)
    batch = jax.device_put((X[:rows], Y[:rows]), NamedSharding(mesh, P(axes)))

    def step(params, opt_state, batch):
        mean = lambda p: jnp.mean(jax.vmap(loss_fn, (None, 0, 0))(p, *batch))  # noqa: E731
        updates, opt_state = tx.update(jax.grad(mean)(params), opt_state, params)
        moved = jax.lax.with_sharding_constraint(optax.apply_updates(params, updates), at)
        return moved, opt_state, optax.tree.norm(updates)

    return jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), batch).compile()


def close(one, other, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


@functools.cache
def taken(name=None):
    """Two steps at one of the places, or on one device: trainer, state, and records of each."""
    if name is None:
        return trained(fresh())
    mesh, axes, lay = PLACES[name]
    return trained(lay(mesh, fresh()), None if "explicit" in name else mesh, axes)


def is_cut(leaf, mesh, *spec):
    return leaf.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), leaf.ndim)


def steps():
    """Draws, sums and parameters are those of one device, wherever the parameters lie."""
    _, alone, drawn = taken()
    for name, (mesh, _, lay) in PLACES.items():
        params = lay(mesh, fresh())
        trainer, state, found = taken(name)
        assert found == drawn, name
        close(alone.params, state.params)
        assert trainer.clipped_grad.placement.devices in (4, 8), name
        for leaf in jax.tree.leaves((state.params, state.opt_state)):
            assert len(leaf.sharding.device_set) == 8, name
        if "fully sharded" in name:  # as a checkpoint holds it
            plain = jax.tree.map(np.asarray, state)
            (batch,) = trainer.batches(1)
            state = trainer.step(plain, batch)[0]
        moments = [state.opt_state[1][0].mu, state.opt_state[1][0].nu]
        for like in (state.params, *moments):
            for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(like), strict=True):
                assert is_cut(b, trainer.clipped_grad.placement.mesh, *a.sharding.spec), name


def exchanged():
    """The devices exchange what they do in ordinary training, and nothing of an example."""
    for name, (mesh, axes, lay) in PLACES.items():
        if name.startswith("2x2x2") or "explicit" in name:
            continue
        trainer, state, _ = taken(name)
        ours = summary(compiled(trainer, state))
        rows = trainer.physical_batch_size
        theirs = summary(ordinary(lay(mesh, fresh()), rows, axes or ("data",), mesh))
        print(name, ours, theirs)
        # Numbers of every row: norms, where parameters are cut over other axes than rows.
        of_rows = 4 * 4 * 8 * rows if "tensor" in name else 0
        assert ours["all"]["bytes"] <= 1.05 * theirs["all"]["bytes"] + of_rows, name
        assert set(ours) <= set(theirs) | {"reduce-scatter"}, name
        if name == "8x1":
            assert ours["all"]["count"] == 1
        if name == SHARDED:
            size = sum(4 * leaf.size for leaf in jax.tree.leaves(state.params))
            assert ours["all"]["bytes"] <= 2 * size + 64


def noise_is_that_of_one_device(mechanism, names, steps=2, partitionable=lambda name: True):
    """To the last bit, and of one value one noise; noise and buffers are cut as parameters are."""

    def nothing(params, x, y):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)) * 0.0 * x[0]

    options = {"loss_fn": nothing, "optimizer": optax.sgd(1.0), "steps": steps}
    options["mechanism"] = mechanism
    alone = jax.tree.leaves(trained(fresh(), **options)[1].params)
    for name in names:
        mesh, axes, lay = PLACES[name]
        begun = lay(mesh, fresh())
        with jax.threefry_partitionable(partitionable(name)):
            state = trained(begun, None if "explicit" in name else mesh, axes, **options)[1]
        buffers = jax.tree.leaves(getattr(state.opt_state[0], "buffers", ())) or [None] * len(alone)
        leaves = map(jax.tree.leaves, (begun, state.params))
        for one, before, leaf, kept in zip(alone, *leaves, buffers, strict=True):
            assert np.max(np.abs(np.asarray(leaf) - np.asarray(before))) > 0.001, name
            np.testing.assert_array_equal(one, leaf, err_msg=name)
            assert is_cut(leaf, leaf.sharding.mesh, *before.sharding.spec), name
            if kept is not None and kept.size:
                assert is_cut(kept, leaf.sharding.mesh, None, *before.sharding.spec), name
            copies = {}
            for shard in leaf.addressable_shards:
                copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
            for same in copies.values():
                assert all((copy == same[0]).all() for copy in same), name


def noise():
    """The very noise of one device: of one value one noise, of a shard the global one's slice."""
    names = ("8x1", SHARDED, TENSORS, BOTH)
    noise_is_that_of_one_device(MECHANISM, names, 2, lambda name: name.startswith("8x1"))
    drawn = "cyclic_poisson"
    for strategy, bands, sampling, name in (
        ("banded", 3, drawn, BOTH),
        ("identity", None, drawn, SHARDED),
        ("lambda", None, "fixed_order", BOTH),
    ):
        correlated = mf_of(1.0, 0.5, 64, ROWS, sampling, steps=6, strategy=strategy, bands=bands)
        noise_is_that_of_one_device(correlated, (name,), steps=4)


def grid():
    """Integers on the grid are those of one device, made between the devices, correlated or not."""
    numbers = {"batch_size": 64, "dataset_size": ROWS, "noise": "grid"}
    noise_is_that_of_one_device(
        jaxdp.dp_sgd(noise_multiplier=1.0, l2_clip_norm=0.5, **numbers), (SHARDED,)
    )
    banded = jaxdp.dp_mf(noise_multiplier=1.0, l2_clip_norm=0.5, steps=4, bands=3, **numbers)
    noise_is_that_of_one_device(banded, (BOTH, EXPLICITLY), steps=4)


def sources():
    """Records on the mesh, on the host, in files and in buckets; microbatches; keys."""
    alone = taken()[1].params
    cut = jax.device_put((X, Y), NamedSharding(ONE, P("data")))
    trainer, state, _ = trained(fresh(), source=cut)
    assert trainer.clipped_grad.placement.records == ("data",)
    close(alone, state.params)
    hosted = as_source([(x, y) for x, y in zip(X, Y, strict=True)])
    trainer, state, _ = trained(fresh(), ONE, source=hosted, physical_batch_size=100)
    assert trainer.physical_batch_size == 104
    close(alone, state.params)
    close(alone, trained(fresh(), ONE, microbatch_size=24, physical_batch_size=48)[1].params)

    def noisy(params, x, y, rng):
        return loss_fn(params, x + jax.random.normal(rng, x.shape), y)

    close(*(trained(fresh(), mesh, loss_fn=noisy)[1].params for mesh in (None, ONE)))


def broken():
    """A record that is not finite counts nowhere, and keeps no device waiting for another."""
    x = X.copy()
    x[200, 5] = 3e38  # of which the loss makes infinity
    for spec in (P("data"), P()):
        fine = jax.device_put(x, NamedSharding(ONE, spec))
        look_through(as_source(fine))
        x[250] = np.nan
        cut = jax.device_put(x, NamedSharding(ONE, spec))
        refusing.refused("source must hold finite", look_through, as_source(cut))
        x[250] = 0
    x[3] = np.nan
    mechanism = sgd_of(1.0, 0.5, ROWS, ROWS, sampling="full_batch")
    found = []
    for name in (None, "8x1", TENSORS):
        mesh, _, lay = PLACES[name] if name else (None, None, lambda mesh, params: params)
        options = {"source": (x, Y), "mechanism": mechanism, "optimizer": optax.sgd(0.1)}
        # Gradients so large that rows are dropped in a loop.
        options |= {"steps": 1, "engine": "vmap", "physical_batch_size": ROWS}
        options |= {"missing_values": True}
        found.append(trained(lay(mesh, fresh(1_024)), mesh, **options)[1].params)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found[-1]))
        close(found[0], found[-1])


def chains():
    """``sum`` and ``compile_update`` follow arrays that lie on a mesh, frozen ones too."""
    whole = MECHANISM.clipped_grad(loss_fn)
    part = MECHANISM.clipped_grad(loss_fn, trainable=lambda path: path.startswith("[0]"))
    tx = optax.chain(MECHANISM.privatize(), optax.adam(1e-2))

    def after(params, data, donate=False, grad_fn=whole):
        sampler = MECHANISM.sampler(ROWS, secret=jaxdp.Secret.from_seed(3), physical_batch_size=30)
        update = jaxdp.compile_update(tx, donate=donate)
        opt_state = tx.init(grad_fn.trained(params))
        for _ in range(2):
            summed = grad_fn(params, data, sampler.draw())
            params, opt_state, _ = update(params, opt_state, summed)
        return summed, params, opt_state

    data = jax.device_put((X, Y))
    first, alone, _ = after(fresh(), data)
    for name, records in ((SHARDED, P("data")), (SHARDED, P()), (EXPLICITLY, P("data"))):
        mesh, _, lay = PLACES[name]
        rows = jax.device_put(data, NamedSharding(mesh, records))
        summed, found, opt_state = after(lay(mesh, fresh()), rows, donate=records == P())
        close(alone, found)
        assert float(summed.l2) == float(first.l2)
        for leaf in jax.tree.leaves((found, opt_state)):
            assert len(leaf.sharding.device_set) == 8, name
        assert opt_state[1][0].mu[0]["w"].sharding.spec == P("data")
    mesh, _, lay = PLACES[SHARDED]
    close(after(fresh(), data, grad_fn=part)[1], after(lay(mesh, fresh()), data, grad_fn=part)[1])


def stack_loss(remat, dtype, params, x, y):
    """A stack of layers: split, multiplied by one number, turned and cast before products."""

    def layer(x, p):
        one, other = jnp.split(p["up"], 2, 1)
        inside = jnp.concatenate([jnp.tanh(x @ one), x @ (other * 0.5)])
        return x + (inside @ p["down"].T + p["b"]).astype(x.dtype), None

    taken = {name: params[name].astype(dtype) for name in ("up", "down", "b")}
    x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x.astype(dtype), taken)
    logits = x.astype(jnp.float32) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def stacks():
    """Layers are gathered one at a time, in a step of one's own too; noise and sum are the same."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (8, 16, 128), "down": (8, 16, 128), "out": (16, 4)}
    params = {
        name: jax.random.normal(key, shape) / 8
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    params["b"] = jnp.zeros((8, 16))
    batch = jax.device_put((X, Y), NamedSharding(ONE, P("data")))
    mask = np.arange(ROWS) % 3 != 0
    # The axis that stacks are cut along, rematerialised or not, of which type, microbatch.
    for axis, remat, dtype, micro in (
        (1, True, jnp.float32, None),
        (2, False, jnp.bfloat16, None),
        (2, False, jnp.float32, 64),
        (0, True, jnp.float32, None),
    ):
        loss = functools.partial(stack_loss, remat, dtype)
        spec = lambda a, axis=axis: P(*(None,) * axis, "data") if a.ndim == 3 else P()  # noqa: E731
        place = jax.tree.map(lambda a: NamedSharding(ONE, spec(a)), params)  # noqa: B023
        there = jax.device_put(params, place)
        options = {"engine": "ghost", "microbatch_size": micro}
        alone = jaxdp.clipped_grad(loss, clipping.clip(0.5), **options)
        spread = jaxdp.clipped_grad(loss, clipping.clip(0.5), mesh=ONE, **options)

        def total(grad_fn, params, batch):
            found, info = grad_fn.with_info(params, batch, mask)
            return found.value, info.norms

        one = jax.jit(total, static_argnums=0)(alone, params, (X, Y))
        step = jax.jit(total, static_argnums=0).lower(spread.sharded_as(there), there, batch)
        step = step.compile()
        found = step(there, batch)
        close(one, found, 2e-5 if dtype == jnp.float32 else 2e-3)
        assert found[0]["up"].sharding.is_equivalent_to(place["up"], 3)
        largest = max(size for kind, size, _ in collectives(step) if kind == "all-gather")
        assert largest <= 2 * 4 * 16 * 128, largest  # two arrays of one layer

    # Times a number of a layer that is not trained, and is in parts as well.
    def scaled(params, x, y):
        layer = lambda x, p: (x + jnp.tanh(x @ p["w"] * 2.0) @ (p["v"].T * p["f"].max()), None)  # noqa: E731
        x = jax.lax.scan(layer, x, {name: params[name] for name in "wvf"})[0]
        return optax.softmax_cross_entropy_with_integer_labels(x, y)

    each = dict(zip("wvf", (params["up"], params["down"], params["up"] + 1.0), strict=True))
    frozen = {"engine": "ghost", "trainable": {"w": True, "v": True, "f": False}}
    alone = jaxdp.clipped_grad(scaled, clipping.clip(0.5), **frozen)
    spread = jaxdp.clipped_grad(scaled, clipping.clip(0.5), mesh=ONE, **frozen)
    cut = jax.device_put(each, NamedSharding(ONE, P(None, "data")))
    one = jax.jit(total, static_argnums=0)(alone, each, (X, Y))
    close(one, jax.jit(total, static_argnums=0)(spread.sharded_as(cut), cut, batch))

    # A number without a type of its own takes the data's on a mesh as on one device.
    def typed(params, x, y):
        return jnp.sum(jnp.tanh(x.astype(jnp.bfloat16) * params["s"]), dtype=jnp.float32)

    weak = {"s": jnp.asarray(1.3)}
    alone, spread = (jaxdp.clipped_grad(typed, clipping.clip(0.5), mesh=m) for m in (None, ONE))
    one = jax.jit(total, static_argnums=0)(alone, weak, (X, Y))
    there_too = jax.device_put(weak, NamedSharding(ONE, P()))
    close(one, jax.jit(total, static_argnums=0)(spread, there_too, batch))

    # Of whole numbers no sum is rounded: what is gathered twice, forwards and backwards, has the
    # bits of one device, and so has the sum. Their noise, in a step of one's own and a trainer's.
    def whole(remat, params, x, y):
        layer = lambda x, p: (x + (x @ p["up"]) @ p["down"], None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params)[0].sum()

    def nothing(params, x, y):
        return 0.0 * stack_loss(True, jnp.float32, params, x, y)

    numbers = {"up": RNG.integers(-63, 64, (2, 16, 8)), "down": RNG.integers(-1, 2, (2, 8, 16))}
    numbers = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), numbers)
    kept = jax.device_put(numbers, NamedSharding(ONE, P(None, "data")))
    hot = np.eye(16, dtype=np.float32)[np.arange(ROWS) % 16], Y
    rule, tx = clipping.clip(1e9), MECHANISM.privatize()
    key = MECHANISM.simulated_key(jax.random.key(0))

    def own(noisy, grad_fn, params, batch):
        value = grad_fn(params, batch, "all").value
        if not noisy:
            return value
        return tx.update(jaxdp.Summed(value, 1.0), tx.init(params), params, key=key)[0]

    step = jax.jit(own, static_argnums=(0, 1))
    for noisy, loss, at_one, cut, rows in (
        (False, functools.partial(whole, True), numbers, kept, hot),
        (False, functools.partial(whole, False), numbers, kept, hot),
        (True, nothing, params, there, (X, Y)),
    ):
        options = {"rule": rule, "engine": "ghost"}
        one = step(noisy, jaxdp.clipped_grad(loss, **options), at_one, rows)
        spread = jaxdp.clipped_grad(loss, mesh=ONE, **options).sharded_as(cut)
        many = step(noisy, spread, cut, jax.device_put(rows, NamedSharding(ONE, P("data"))))
        for name, leaf in one.items():
            np.testing.assert_array_equal(leaf, many[name])
            assert 0.001 < np.max(np.abs(leaf)) < 2**24

    options = {"loss_fn": nothing, "optimizer": optax.sgd(1.0), "steps": 1}
    one, many = (trained(each, **options)[1].params for each in (params, there))
    for name, leaf in one.items():
        np.testing.assert_array_equal(leaf, many[name])
        assert np.max(np.abs(np.asarray(leaf) - np.asarray(params[name]))) > 0.001


def over_devices(tree):
    return jax.tree.map(lambda leaf: jax.lax.psum(leaf, "data"), tree)


def by_rows(part, out=WHOLE, **options):
    """A compiled ``shard_map`` of parameters, and of two arguments that are cut by rows."""
    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": out}
    return jax.jit(jax.shard_map(part, mesh=ONE, **specs, **options))


def own_steps():
    """Steps of one's own: a mesh by name, under ``jit``; ``shard_map`` with both ``check_vma``."""
    mask = np.arange(ROWS) % 3 != 0
    rows = NamedSharding(ONE, P("data"))
    batch, there = jax.device_put(((X, Y), mask), rows)
    params = fresh()
    for engine, rule, micro, bound, *checks in (
        ("auto", clipping.clip(0.5), None, 0.3, True, False),
        ("ghost", clipping.per_layer([0.1, 0.2]), 5, None, True),
        ("vmap", clipping.auto_s(), None, None, False),
    ):
        options = {"engine": engine, "microbatch_size": micro}
        alone = jaxdp.clipped_grad(loss_fn, rule, **options)
        named = jaxdp.clipped_grad(loss_fn, rule, mesh=ONE, **options)

        def total(grad_fn, params, batch, mask, bound=bound):
            found, info = grad_fn.with_info(params, batch, mask, bound=bound)
            return (found.value, found.votes), info.norms

        one, norms = jax.jit(total, static_argnums=0)(alone, params, (X, Y), mask)
        for each in (named, alone):
            close((one, norms), jax.jit(total, static_argnums=0)(each, params, batch, there))

        def part(params, batch, mask, alone=alone):
            found, norms = total(alone, params, batch, mask)
            return over_devices(found), norms

        for check in checks:
            mapped = by_rows(part, (P(), P("data")), check_vma=check)
            close((one, norms), mapped(params, batch, there))
    # Several models at once, their types tracked.
    grad_fn = jaxdp.clipped_grad(loss_fn, clipping.clip(0.5))
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), params)
    every = jax.vmap(lambda p, *rows: grad_fn(p, rows, "all").value, (0, None, None))
    one = jax.jit(every)(two, X, Y)
    close(one, by_rows(lambda *args: over_devices(every(*args)))(two, X, Y))


def summed_before():
    """Gradients of one's own that ``shard_map`` has summed before they clip are refused."""
    clip = jaxdp.clip_and_sum(clipping.clip(0.5))

    def step(cast, own, params, batch, mask):
        params = jax.lax.pcast(params, ("data",), to="varying") if cast else params
        grads = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, *batch)
        mask = jnp.ones(ROWS // 8, bool) if own else mask
        return over_devices(clip.update(grads, None, params, mask=mask)[0].value)

    def mapped(cast, own=False):
        part = by_rows(functools.partial(step, cast, own))
        return part(fresh(), (X, Y), np.ones(ROWS, bool))

    all_refused(("has summed over", lambda own=own: mapped(False, own)) for own in (False, True))
    grads = jax.jit(jax.vmap(jax.grad(loss_fn), (None, 0, 0)))(fresh(), X, Y)
    own = jax.jit(lambda grads: clip.update(grads, None, fresh(), mask="all")[0].value)
    close(own(grads), mapped(True))


def refused():
    """What cannot be meant is refused in words."""
    grad_fn = jaxdp.clipped_grad(loss_fn, clipping.clip(0.5), mesh=ONE)
    all_refused(
        [
            ("mesh must be a jax.sharding.Mesh", lambda: trained(fresh(), mesh=8)),
            ("data_axes must be axes of the mesh", lambda: trained(fresh(), ONE, ("rows",))),
            ("mesh must be the one that", lambda: trained(by_tensors(TWO, fresh()), ONE)),
            ("a multiple of 8 rows", lambda: grad_fn(fresh(), (X[:12], Y[:12]), "all")),
        ]
    )


CHECKS = (
    steps, exchanged, noise, grid, sources, broken, chains, stacks, own_steps, summed_before, refused,
    *eight_devices.CHECKS,
)  # fmt: skip
if __name__ == "__main__":
    lower_quickly()
    for check in CHECKS:
        if sys.argv[1:] and check.__name__ not in sys.argv:
            continue
        try:
            check()
            print("passed", check.__name__, flush=True)
        except Exception:
            print("failed", check.__name__, traceback.format_exc()[-1_500:], flush=True)
