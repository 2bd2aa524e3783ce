"""Meshes of eight devices, where parameters lie on them, and steps of a trainer there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp

assert jax.device_count() == 8
AUTO = AxisType.Auto
ROWS, RNG = 256, np.random.default_rng(0)
X, Y = RNG.standard_normal((ROWS, 16)).astype(np.float32), np.arange(ROWS, dtype=np.int32) % 4
MECHANISM = jaxdp.dp_sgd(1.0, 0.5, batch_size=64, dataset_size=ROWS)


def mesh_of(shape, names, kind=AUTO):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


ONE = mesh_of((8,), ("data",))
TWO = mesh_of((4, 2), ("data", "model"))
THREE = mesh_of((2, 2, 2), ("data", "fsdp", "model"))
EXPLICIT = mesh_of((8,), ("data",), AxisType.Explicit)


def fresh(width=32):
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = ((16, width), (width, width), (width, 4))
    return [
        {"w": jax.random.normal(k, s) / s[0] ** 0.5, "b": jnp.zeros(s[1])}
        for k, s in zip(keys, sizes, strict=True)
    ]


def loss_fn(params, x, y):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    logits = x @ params[-1]["w"] + params[-1]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def whole(mesh, params):
    return jax.device_put(params, NamedSharding(mesh, P()))


def fully_sharded(mesh, params, axes="data"):
    def one(leaf):
        cut = axes if leaf.shape[0] % mesh.shape[axes] == 0 else None
        return jax.device_put(leaf, NamedSharding(mesh, P(cut)))

    return jax.tree.map(one, params)


def by_tensors(mesh, params, rows=None):
    """Columns of the first layer and rows of the next are on other devices, and so on."""
    found = []
    for n, layer in enumerate(params):
        specs = (P(None, "model"), P("model")) if n % 2 == 0 else (P("model", rows), P())
        put = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((layer["w"], layer["b"]), specs, strict=True)
        ]
        found.append({"w": put[0], "b": put[1]})
    return found


def both(mesh, params):
    return by_tensors(mesh, params, rows="fsdp")


# mesh, its axes of rows, where the parameters lie
PLACES = {
    "8x1": (ONE, None, whole),
    "8x1, fully sharded": (ONE, None, fully_sharded),
    "4x2, tensor parallel": (TWO, None, by_tensors),
    "4x2, rows over both": (TWO, ("data", "model"), whole),
    "2x2x2, fully sharded and tensor parallel": (THREE, ("data", "fsdp"), both),
    "8x1, explicit axes": (EXPLICIT, None, fully_sharded),
}


def trained(
    params,
    mesh=None,
    axes=None,
    source=(X, Y),
    loss=loss_fn,
    optimizer=None,
    mechanism=MECHANISM,
    steps=2,
    **options,
):
    """The trainer, its state after some steps, and the records of each."""
    trainer = jaxdp.Trainer(
        loss,
        mechanism,
        optimizer or optax.adam(1e-2),
        source,
        secret=jaxdp.Secret.from_seed(7),
        mesh=mesh,
        data_axes=axes,
        **options,
    )
    state, drawn = trainer.init(params), []
    for batch in trainer.batches(steps):
        drawn.append(sorted(batch.draw.indices[batch.draw.mask].tolist()))
        state, _ = trainer.step(state, batch)
    return trainer, state, drawn


def compiled(trainer, state):
    """The step of one physical batch."""
    batch = next(trainer.batches(1))
    draw, rows = batch.draw, batch.rows
    return trainer._step.whole.lower(
        state.params,
        state.opt_state,
        trainer._data if rows is None else rows[0],
        draw.indices[0],
        draw.mask[0],
        draw.ticket.blank(),
        None,
        {},
        gathered=rows is not None,
        told=False,
    ).compile()


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
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


@functools.cache
def taken(name):
    """Two steps at one of the places: the trainer, the state, and the records of each."""
    mesh, axes, lay = PLACES[name]
    return trained(lay(mesh, fresh()), None if "explicit" in name else mesh, axes)
