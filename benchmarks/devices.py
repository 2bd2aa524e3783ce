"""What eight devices exchange and how long a step takes, beside ordinary training.

``python -m benchmarks.devices large`` compiles a transformer of 124 million parameters from its
shapes; ``small`` compiles and times small networks; ``stack`` compiles a stack of layers that is
fully sharded, by ``Trainer`` and in a ``jit`` of one's own, beside ordinary training that gathers
layers by hand and what XLA makes of annotations. They write to ``benchmarks/results``.
``stack tpu`` compiles that for four chips and ``llama`` a Llama of 7 billion parameters for 32
chips of a TPU v5p, where libtpu is installed: printed, as nothing of it runs.
"""

import functools
import inspect
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from benchmarks import networks_large
from benchmarks.collectives import summary
from jaxdp.clipping.across import with_mesh
from jaxdp.devices import placement
from jaxdp.training.step import PrivateStep

RESULTS = Path(__file__).parent / "results"
DATA, MODEL = (8,), (4, 2)
OPTIMIZER = optax.adam(1e-3)
# Columns of one product and rows of the next: one exchange for every two products.
TENSORS = {"qkv": (2, 1), "out": (1, None), "up": (2, 1), "down": (1, None)}


def mesh_of(kind):
    """Eight devices: rows over all, or tensors over two and rows over four."""
    shape = MODEL if kind == "tensor parallel" else DATA
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def cut(kind, mesh, params):
    """The parameters' shapes or arrays, placed on the mesh."""

    def spec_of(path, leaf):
        names = [getattr(key, "key", None) for key in path]
        if kind == "fully sharded":
            even = [axis for axis, size in enumerate(leaf.shape) if size % mesh.size == 0]
            at = max(even, key=lambda axis: leaf.shape[axis], default=None)
            return P(*("data" if axis == at else None for axis in range(leaf.ndim)))
        if kind == "tensor parallel" and len(names) == 3 and names[1] in TENSORS:
            at = TENSORS[names[1]][names[2] == "b"]
            return P(*("model" if axis == at else None for axis in range(leaf.ndim)))
        return P()

    def one(path, leaf):
        sharding = NamedSharding(mesh, spec_of(path, leaf))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree_util.tree_map_with_path(one, params)


def at(shape, sharding):
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def private(loss_fn, params, batch, mesh, microbatch=None):
    """The compiled private step of Trainer, and a function from nothing to its arguments."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    mechanism = jaxdp.dp_sgd(
        noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=rows // 2, dataset_size=100 * rows
    )
    place = None if mesh is None else placement.resolve_placement(placement.placement(mesh), params)
    grad_fn = mechanism.clipped_grad(loss_fn, microbatch_size=microbatch)
    step = PrivateStep(
        grad_fn if place is None else with_mesh(grad_fn, place), mechanism.privatize(), OPTIMIZER
    )
    state = jax.eval_shape(step.init, params)
    if place is not None:
        step = step.sharded_as(params, place)
        state = jax.tree.map(at, state, step.shardings[1])
        batch = jax.tree.map(lambda leaf: at(leaf, place.row_sharding), batch)
    key = mechanism.simulated_key(jax.random.key(0))
    places = np.arange(rows, dtype=np.int32), np.ones(rows, bool)
    args = (state, (batch, *places, None), key, {}, None)
    lowered = step.compiled.jitted.lower(params, *args, gathered=True, return_info=False)
    return lowered.compile(), step, args


def own(loss_fn, params, batch, mesh, microbatch=None):
    """The compiled step of a user's own under ``jit``."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    mechanism = jaxdp.dp_sgd(
        noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=rows // 2, dataset_size=100 * rows
    )
    grad_fn = mechanism.clipped_grad(loss_fn, mesh=mesh, microbatch_size=microbatch)
    grad_fn = grad_fn.sharded_as(params)
    tx, place = optax.chain(mechanism.privatize(), OPTIMIZER), grad_fn.placement
    state = jax.eval_shape(tx.init, params)
    held = place.shardings_like(params, params), place.shardings_like(params, state)
    state = jax.tree.map(at, state, held[1])
    batch = jax.tree.map(lambda leaf: at(leaf, place.row_sharding), batch)
    key = mechanism.simulated_key(jax.random.key(0))
    key = jax.tree.map(lambda leaf: at(leaf, NamedSharding(mesh, P())), key)

    def step(params, state, batch, key):
        updates, state = tx.update(grad_fn(params, batch, "all"), state, params, key=key)
        return jax.lax.with_sharding_constraint((optax.apply_updates(params, updates), state), held)

    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch, key).compile()


def ordinary(loss_fn, params, batch, mesh, by_hand=False):
    """The compiled step of the same loss and optimizer without privacy.

    What is exchanged is up to XLA; ``by_hand``, it is what the loss gathers of its parts.
    """
    state = jax.eval_shape(OPTIMIZER.init, params)
    held = None
    if mesh is not None:
        place = placement.resolve_placement(placement.placement(mesh), params)
        held = place.shardings_like(params, params), place.shardings_like(params, state)
        state = jax.tree.map(at, state, held[1])
        batch = jax.tree.map(lambda leaf: at(leaf, place.row_sharding), batch)

    def of_one(params, example):
        apart = len(inspect.signature(loss_fn).parameters) > 2
        return loss_fn(params, *example) if apart else loss_fn(params, example)

    def gradient(params, batch):
        return jax.grad(lambda p: jnp.mean(jax.vmap(of_one, (None, 0))(p, batch)))(params)

    if by_hand:
        # A gathered array's gradient is a sum over devices, of which each keeps its part.
        own, size = jax.tree.map(lambda leaf: leaf.sharding.spec, params), mesh.size
        mean = lambda *part: jax.tree.map(lambda g: g / size, of_part(*part))  # noqa: E731
        where = {"mesh": mesh, "in_specs": (own, P("data")), "out_specs": own}
        of_part, gradient = gradient, jax.shard_map(mean, **where, check_vma=False)

    def step(params, state, batch):
        updates, state = OPTIMIZER.update(gradient(params, batch), state, params)
        after = optax.apply_updates(params, updates), state
        after = after if held is None else jax.lax.with_sharding_constraint(after, held)
        return *after, optax.tree.norm(updates)

    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()


def memory(compiled):
    """Bytes that a device needs besides arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def compared(name, kind, network):
    """A row: what devices exchange in a step, ours and ordinary."""
    params, loss_fn, batch = network
    mesh = mesh_of(kind)
    params = cut(kind, mesh, params)
    began = time.perf_counter()
    one, other = private(loss_fn, params, batch, mesh)[0], ordinary(loss_fn, params, batch, mesh)
    ours, theirs = summary(one), summary(other)
    row = {
        "network": name,
        "mesh": kind,
        "parameters": sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)),
        "rows": jax.tree.leaves(batch)[0].shape[0],
        "ours": ours,
        "ordinary": theirs,
        "ratio of bytes": ours["all"]["bytes"] / theirs["all"]["bytes"],
        "temporary bytes of a device": {"ours": memory(one), "ordinary": memory(other)},
        "seconds to compile both": time.perf_counter() - began,
    }
    print(json.dumps(row), flush=True)
    return row


def timed(name, network, repeats=7):
    """A row: seconds of a step on eight devices and on one, private and ordinary."""
    params, loss_fn, batch = network
    calls = {}
    for devices in (1, 8):
        mesh = mesh_of("data parallel") if devices == 8 else None
        own = cut("data parallel", mesh, params) if mesh else params
        rows = NamedSharding(mesh, P("data")) if mesh else jax.devices()[0]
        there = jax.device_put(batch, rows)
        compiled, step, args = private(loss_fn, own, batch, mesh)
        state = step.init(own)
        if mesh:
            state = jax.device_put(state, step.shardings[1])
        key = args[4]
        calls["private", devices] = (
            compiled,
            [own, state],
            (there, args[2], args[3], key, None, {}),
        )
        compiled, state = ordinary(loss_fn, own, batch, mesh), OPTIMIZER.init(own)
        if mesh:
            place = placement.resolve_placement(placement.placement(mesh), own)
            state = jax.device_put(state, place.shardings_like(own, state))
        calls["ordinary", devices] = (compiled, [own, state], (there,))
    seconds = {key: [] for key in calls}
    for turn in range(repeats + 1):
        for key, (compiled, state, rest) in calls.items():
            own = jax.block_until_ready(jax.tree.map(jnp.copy, state))
            began = time.perf_counter()
            jax.block_until_ready(compiled(*own, *rest))
            if turn:
                seconds[key].append(time.perf_counter() - began)
    middle = {f"{kind} on {n}": statistics.median(each) for (kind, n), each in seconds.items()}
    ratios = [middle[f"private on {n}"] / middle[f"ordinary on {n}"] for n in (1, 8)]
    row = {"network": name, **middle, "ratio of ratios": ratios[1] / ratios[0]}
    print(json.dumps(row), flush=True)
    return row


def mlp(batch=256, width=512):
    """Three layers on flat images."""
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = ((784, width), (width, width), (width, 10))
    params = [
        {"w": jax.random.normal(k, s) / s[0] ** 0.5, "b": jnp.zeros(s[1])}
        for k, s in zip(keys, sizes, strict=False)
    ]

    def loss_fn(params, x, label):
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        logits = x @ params[-1]["w"] + params[-1]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    return params, loss_fn, (jax.random.normal(keys[3], (batch, 784)), jnp.arange(batch) % 10)


def small_gpt():
    """Two blocks of width 128."""
    return networks_large.gpt(batch=32, length=32, vocabulary=512, width=128, layers=2, heads=4)


SMALL = {"MLP": mlp, "CNN": lambda: networks_large.small_cnn(64), "transformer": small_gpt}
KINDS = ("data parallel", "fully sharded", "tensor parallel")


def gathering(params):
    """What gathers a part of the parameters, or one layer of it, for ``networks_large.gpt``."""

    def whole(name, part):
        def one(leaf, like):
            assert "data" in like.sharding.spec, "each device would add its own gradient alone"
            axis = like.sharding.spec.index("data") + leaf.ndim - like.ndim
            return jax.lax.all_gather(leaf, "data", axis=axis, tiled=True)

        return jax.tree.map(one, part, params[name])

    return whole


def not_gathered(primitive, *_, **__):
    """What is kept for the backward pass where nothing else is computed twice."""
    return primitive.name != "all_gather"


def stacked(mesh=None, rows=(1, 8)):
    """Rows: bytes exchanged and temporary bytes of a device, of a stack of 12 layers."""
    found = []
    mesh = mesh or mesh_of("fully sharded")
    for each, remat in itertools.product(rows, (True, False)):
        make = functools.partial(
            networks_large.gpt, mesh.size * each, 32, 512, 512, 12, 8, shapes=True
        )
        params, loss_fn, batch = make(remat=remat)
        params = cut("fully sharded", mesh, params)
        given = params, batch, mesh
        gathered = make(remat=remat or not_gathered, whole=gathering(params))[1]
        steps = {
            "ordinary by hand": ordinary(gathered, *given, by_hand=True),
            "ordinary by XLA": ordinary(loss_fn, *given),
            "Trainer": private(loss_fn, *given)[0],
            "own": own(loss_fn, *given),
        }
        row = {"network": "GPT, 12 layers of width 512", "rows a device": each, "remat": remat}
        row |= {"parameters": sum(leaf.size for leaf in jax.tree.leaves(params))}
        for name, compiled in steps.items():
            row[name] = {"exchanged": summary(compiled), "temporary bytes": memory(compiled)}
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def chips(name):
    """A mesh of the chips of a TPU that is not there."""
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    return jax.sharding.Mesh(np.array(topology.devices), ("data",))


def llama(length=128):
    """Prints the bytes that a chip needs for a step on a text a chip of a Llama of 7 billion."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples/language_model"))
    import llama as network

    config = network.Config(32_000, 4_096, 11_008, 32, 32, 32, 128, tie_word_embeddings=False)
    mesh = chips("v5p:2x4x4")
    params = jax.eval_shape(lambda: network.init(jax.random.key(0), config))
    batch = jax.ShapeDtypeStruct((mesh.size, length), jnp.int32)

    def loss_fn(params, tokens):
        return network.losses(params, tokens, config).mean()

    given = loss_fn, cut("fully sharded", mesh, params), batch, mesh
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{count:,} parameters, {mesh.size} chips, {length} tokens a chip", flush=True)
    for name, make in (("ordinary", ordinary), ("private", lambda *given: private(*given)[0])):
        compiled = make(*given)
        found = compiled.memory_analysis()
        print(
            f"{name}: {found.argument_size_in_bytes:,} bytes of arguments, "
            f"{found.temp_size_in_bytes:,} temporary, exchanged {summary(compiled)}",
            flush=True,
        )


def main(which, where=None):
    """Writes ``devices_<which>.json``, but for TPUs."""
    if which == "llama" or where == "tpu":
        llama() if which == "llama" else stacked(chips("v5p:2x2x1"), rows=(1,))
        return
    rows = []
    if which == "stack":
        rows = stacked()
    elif which == "large":
        for kind in KINDS:
            rows.append(compared("GPT-2 small", kind, networks_large.gpt(64, shapes=True)))
    else:
        for name, make in SMALL.items():
            for kind in KINDS if name == "transformer" else KINDS[:2]:
                rows.append(compared(name, kind, make()))
        rows += [timed(name, make()) for name, make in SMALL.items()]
    path = RESULTS / f"devices_{which}.json"
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["small"])
