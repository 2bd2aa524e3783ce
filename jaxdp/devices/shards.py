"""Arrays sharded over the devices of one or several processes; each makes its own shards."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxdp.devices import processes

PyTree = Any


def put(tree: PyTree, shardings: PyTree) -> PyTree:
    """The arrays placed by their shardings, a prefix of the tree.

    In several processes, arrays on the host must be the same in all; this is not checked here.
    """
    if processes.count() == 1:
        return jax.device_put(tree, shardings)

    def all_of(sharding: Any, part: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: _put(leaf, sharding), part)

    return jax.tree.map(all_of, shardings, tree)


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def gather_sharded(
    gather: Callable[[np.ndarray, np.ndarray], PyTree],
    indices: np.ndarray,
    mask: np.ndarray,
    sharding: NamedSharding,
) -> PyTree:
    """The rows [m, ...] of a physical batch; each process gathers those of its own devices.

    Args:
        gather: from positions and mask to rows.
        indices: [m] positions of the records.
        mask: bool [m].
        sharding: of rows.
    """
    size = len(mask)
    if processes.count() == 1:
        return jax.device_put(gather(indices, mask), sharding)
    # Devices of one process may share rows: each stretch of them is gathered once.
    parts: dict[tuple[int, int], list[Any]] = {}
    structure: Any = None
    for index in sharding.addressable_devices_indices_map((size,)).values():
        assert index is not None
        rows_here = index[0]
        start, stop, _step = rows_here.indices(size)
        if (start, stop) not in parts:
            found, structure = jax.tree.flatten(gather(indices[rows_here], mask[rows_here]))
            parts[start, stop] = [np.asarray(leaf) for leaf in found]

    def whole(number: int) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(size)
            rows: np.ndarray = parts[start, stop][number]
            return rows

        one = next(iter(parts.values()))[number]
        return jax.make_array_from_callback((size, *one.shape[1:]), sharding, part)

    return jax.tree.unflatten(structure, [whole(n) for n in range(structure.num_leaves)])


def on_host(tree: PyTree) -> PyTree:
    """The arrays; in several processes, where they are replicated, as NumPy arrays."""
    if processes.count() == 1 or not all(x.is_fully_replicated for x in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(np.asarray, tree)


def check_mesh(mesh: jax.sharding.Mesh | None) -> None:
    """Raises ValueError unless the mesh has devices of every process."""
    if processes.count() == 1:
        return
    found = set() if mesh is None else {device.process_index for device in mesh.devices.flat}
    if found != set(range(processes.count())):
        raise ValueError(
            f"mesh must hold devices of all {processes.count()} processes, such as "
            "jax.make_mesh((jax.device_count(),), ('data',)), got "
            f"{'none' if mesh is None else f'devices of {sorted(found)}'}: a process that trains "
            "by itself would release what the others release too"
        )


def check_shared(sums: PyTree) -> None:
    """Raises ValueError unless a sum is sharded or replicated over all processes."""
    if processes.count() == 1:
        return
    for leaf in jax.tree.leaves(sums):
        devices: Any = leaf.sharding.device_set if isinstance(leaf, jax.Array) else ()
        found = {device.process_index for device in devices}
        if found != set(range(processes.count())):
            raise ValueError(
                f"params must lie on a mesh of all {processes.count()} processes, got a sum of "
                f"process {processes.index()} alone: all add the same noise, which would subtract "
                "away from sums of other records. Put parameters on a mesh of all devices, with "
                "jax.device_put(x, NamedSharding(mesh, P())); then they share one sum"
            )


def hashed(arrays: PyTree) -> str:
    """A hash of the numbers, in hexadecimal; of shapes, where other processes have shards."""
    found = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            found.update(f"{leaf.shape} {leaf.dtype}".encode())
            for part in local_shards(leaf):
                found.update(np.asarray(part).tobytes())
            continue
        is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        found.update(np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes())
    return found.hexdigest()


def local_shards(leaf: jax.Array) -> list[jax.Array]:
    """An array's shards, in order, if this process has all of them; else []."""
    parts = {str(shard.index): shard.data for shard in leaf.addressable_shards}
    if sum(part.size for part in parts.values()) < leaf.size:
        return []
    return [parts[index] for index in sorted(parts)]


def described(mesh: jax.sharding.Mesh) -> str:
    """The devices of a mesh by their numbers, and its axes."""
    numbers = [device.id for device in mesh.devices.flat]
    return f"{dict(mesh.shape)} of devices {numbers}"


def ticket_tags(ticket: Any, arrays: PyTree) -> jax.Array | None:
    """Each device's current ticket tag, uint32 [devices, 2], to compare the processes' steps.

    Sharded over the mesh that the arrays are placed on, so that each process writes its own.
    None in one process, or where the arrays are on devices of this process alone.
    """
    if ticket is None or processes.count() == 1:
        return None
    far = (x.sharding for x in jax.tree.leaves(arrays) if not getattr(x, "is_fully_addressable", 1))
    mesh = next((each.mesh for each in far if isinstance(each, NamedSharding)), None)
    if mesh is None:
        return None
    rows = NamedSharding(mesh, jax.P(mesh.axis_names))
    return jax.make_array_from_callback((mesh.size, 2), rows, lambda index: ticket.tag[None])
