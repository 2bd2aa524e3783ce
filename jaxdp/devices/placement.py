"""Shardings of rows, records and parameters over a mesh, in one object: ``Placement``."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.devices import shards

PyTree = Any
# Of parameters and optimizer state, leaf by leaf.
Shardings = tuple[NamedSharding, ...]

# The mesh of the step that is being traced, and None outside.
_MESH: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)
# The axis that rows are sharded over, where a mesh has one of this name.
_USUAL = "data"


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and what is sharded over which of its axes; hashable, as ``jit`` needs it.

    Attributes:
        mesh: with automatic axes.
        rows: the axes that the rows of a physical batch are sharded over.
        leaves: the sharding of every parameter; None where that is not known.
        records: the axes that the records [N, ...] are sharded over; () where they are replicated.
        from_trainer: True where a trainer gathers the rows, so that full batches come before
            others, or rows are dealt to the devices one by one.
    """

    mesh: Mesh
    rows: tuple[str, ...]
    leaves: tuple[P, ...] | None = None
    records: tuple[str, ...] = ()
    from_trainer: bool = False

    @property
    def devices(self) -> int:
        """The number of shards of the rows."""
        return math.prod(self.mesh.shape[axis] for axis in self.rows)

    @property
    def manual_axes(self) -> frozenset[str]:
        """The manual axes of ``shard_map``: all, unless parameters may be sharded over others.

        Parameters that are sharded over an axis without rows are left to the compiler there.
        """
        specs = self.leaves or ()
        used = {axis for spec in specs for entry in spec for axis in axes_of(entry)}
        more = self.leaves is None or used - set(self.rows)
        return frozenset(self.rows if more else self.mesh.axis_names)

    def row_spec(self, leaf: int) -> P:
        """The sharding of parameter ``leaf`` over the axes of rows alone."""
        spec = self.leaves[leaf] if self.leaves else P()
        kept = (tuple(a for a in axes_of(entry) if a in self.rows) for entry in spec)
        return P(*(axes or None for axes in kept))

    def with_sharding(self, leaves: Sequence[Any]) -> list[Any]:
        """Arrays like the parameters (None at some), sharded as these are; inside ``jit``."""
        if self.leaves is None or jax.sharding.get_abstract_mesh().manual_axes:
            return list(leaves)
        each = zip(leaves, self.leaves, strict=True)
        constrain = jax.lax.with_sharding_constraint
        return [x if x is None else constrain(x, NamedSharding(self.mesh, s)) for x, s in each]

    def replicate(self, tree: PyTree) -> PyTree:
        """The arrays, replicated on every device."""
        return shards.put(tree, NamedSharding(self.mesh, P()))

    @property
    def row_sharding(self) -> NamedSharding:
        """The sharding of rows [m, ...]."""
        return NamedSharding(self.mesh, P(self.rows))

    def put_rows(self, rows: PyTree) -> PyTree:
        """Rows [m, ...] of a physical batch, sharded; m must be divisible by the devices."""
        return shards.put(rows, self.row_sharding)

    def round_up(self, rows: int) -> int:
        """The number of rows, rounded up to a multiple of the devices."""
        return -(-rows // self.devices) * self.devices

    def pad(self, indices: Any, mask: Any) -> list[np.ndarray]:
        """Positions of the records [m] and their mask, padded to a multiple of the devices."""
        more = self.round_up(len(mask)) - len(mask)
        return [np.pad(np.asarray(each), (0, more)) for each in (indices, mask)]

    def interleaved(self, rows: int) -> np.ndarray:
        """The order of rows [m] that gives each device every n-th of them."""
        return np.arange(rows).reshape(-1, self.devices).T.ravel()

    def put(self, tree: PyTree) -> PyTree:
        """The arrays on the mesh: those that are on it stay sharded, the others are replicated."""
        return shards.put(tree, jax.tree.map(self._sharding, tree))

    def is_home_of(self, tree: PyTree) -> bool:
        """True if every JAX array of the tree is placed on the mesh."""
        arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
        return all(getattr(array.sharding, "mesh", None) == self.mesh for array in arrays)

    def with_parameters(self, params: PyTree) -> "Placement":
        """The placement with the shardings of parameters that are on the mesh."""
        found = tuple(_spec(leaf) for leaf in jax.tree.leaves(params))
        return dataclasses.replace(self, leaves=found)

    def with_records(self, arrays: PyTree) -> "Placement":
        """The placement with the sharding of records that are on the mesh."""
        found = {_first_axes(leaf) for leaf in jax.tree.leaves(arrays)}
        records = found.pop() if len(found) == 1 else ()
        return dataclasses.replace(self, records=records)

    def shardings_like(self, params: PyTree, tree: PyTree) -> PyTree:
        """Shardings for a tree: the parameters' for subtrees like ``params``, else replicated.

        Subtrees of several copies of the parameters, [m, ...] each, are sharded like them as well.
        """
        structure: Any = jax.tree.structure(params)
        specs = [_spec(leaf) for leaf in jax.tree.leaves(params)]
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(params)]

        def is_like(node: Any) -> bool:
            return bool(jax.tree.structure(node) == structure)

        def one(node: Any) -> PyTree:
            leaves, own = jax.tree.flatten(node)
            found, built = [P()] * len(leaves), [np.shape(leaf) for leaf in leaves]
            if own == structure and built == shapes:
                found = specs
            elif own == structure and all(built) and [shape[1:] for shape in built] == shapes:
                found = [P(None, *spec) for spec in specs]
            return jax.tree.unflatten(own, [NamedSharding(self.mesh, spec) for spec in found])

        return jax.tree.map(one, tree, is_leaf=is_like)

    def _sharding(self, leaf: Any) -> NamedSharding:
        return NamedSharding(self.mesh, _spec(leaf) if _mesh_of(leaf) else P())


def placement(mesh: Any, data_axes: Sequence[str] | None = None) -> Placement:
    """The placement of rows on a mesh.

    Args:
        mesh: a ``jax.sharding.Mesh``.
        data_axes: the axes that rows are sharded over; None takes the one called "data", else the
            first.

    Raises:
        ValueError: the mesh is none, is of several processes, or has no such axes.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh must be a jax.sharding.Mesh, such as jax.make_mesh((8,), ('data',)), got "
            f"{type(mesh).__name__}"
        )
    names = mesh.axis_names
    if data_axes is None:
        data_axes = (_USUAL if _USUAL in names else names[0],)
    data_axes = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    if not set(data_axes) <= set(names) or len(set(data_axes)) < len(data_axes):
        raise ValueError(f"data_axes must be axes of the mesh, {names}, got {data_axes}")
    return Placement(automatic(mesh), data_axes)


def resolve_placement(
    place: Placement | None, params: PyTree, *records: PyTree
) -> Placement | None:
    """The placement of a step, from what was asked for and from where the arrays are.

    Args:
        place: what was asked for; None takes the mesh that the arrays are on, if any, and for
            rows the axes that records are sharded over.
        params: the parameters; what is on no mesh is to be put on it.
        records: the records, where they are arrays.

    Raises:
        ValueError: the arrays are on several meshes, or on another than was asked for.
    """
    meshes = {mesh for leaf in jax.tree.leaves((params, records)) if (mesh := _mesh_of(leaf))}
    meshes |= set() if place is None else {place.mesh}
    if len(meshes) > 1:
        raise ValueError(
            "mesh must be the one that parameters and records lie on, got "
            f"{' and '.join(sorted(str(dict(mesh.shape)) for mesh in meshes))}: put all on one, "
            "with jax.device_put(x, NamedSharding(mesh, spec))"
        )
    if not meshes:
        return None
    if place is None:
        axes = {_first_axes(leaf) for leaf in jax.tree.leaves(records)} - {()}
        place = placement(meshes.pop(), axes.pop() if len(axes) == 1 else None)
    place = place.with_parameters(params)
    return place.with_records(records) if records else place


def sharded_like(total: PyTree, params: PyTree) -> PyTree:
    """A sum sharded as the parameters are, on their own mesh where its axes are explicit."""

    def one(leaf: Any, param: Any) -> Any:
        mesh = _mesh_of(param)
        if mesh is None or leaf is None or param.sharding.mesh == mesh:
            return leaf
        return jax.device_put(leaf, param.sharding)

    return jax.tree.map(one, total, params, is_leaf=lambda leaf: leaf is None)


def automatic(mesh: Mesh) -> Mesh:
    """The same devices with automatic axes: shardings follow from the step's arguments."""
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _first_axes(leaf: Any) -> tuple[str, ...]:
    return axes_of(next(iter(_spec(leaf)), None))


def _mesh_of(leaf: Any) -> Mesh | None:
    """The mesh that an array (or a shape) is on, its axes automatic; None for one device."""
    # At every step: isinstance(leaf, jax.Array) would take longer than all the rest.
    if isinstance(leaf, jax.core.Tracer):
        return None
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    mesh = automatic(sharding.mesh)
    # Arrays with an explicit axis of one device are not like those without.
    return mesh if mesh.size > 1 or mesh is not sharding.mesh else None


def _spec(leaf: Any) -> P:
    return leaf.sharding.spec if _mesh_of(leaf) is not None else P()


@contextlib.contextmanager
def using_mesh(mesh: Mesh | AbstractMesh | None, *, override: bool = True) -> Iterator[None]:
    """Runs the body for this mesh: noise that is traced inside is made for its devices.

    Args:
        mesh: None for one device.
        override: False leaves another mesh that the user has set (``jax.set_mesh``): inside
            ``jit``, which allows no other, and for what is computed on the user's own arrays.
    """
    mesh = mesh if isinstance(mesh, Mesh) else None
    token, outer = _MESH.set(mesh), jax.sharding.get_abstract_mesh()
    with contextlib.ExitStack() as after:
        after.callback(_MESH.reset, token)
        if override and mesh is not None and not outer.empty and outer != mesh.abstract_mesh:
            after.enter_context(jax.set_mesh(mesh))
        yield


def current_mesh(*trees: PyTree) -> Mesh | None:
    """The mesh of ``using_mesh``, or that arrays outside ``jit`` are on; None for none."""
    if (mesh := _MESH.get()) is not None:
        return mesh
    meshes = {mesh for leaf in jax.tree.leaves(trees) if (mesh := _mesh_of(leaf)) is not None}
    return meshes.pop() if len(meshes) == 1 else None


def replicated(tree: PyTree) -> PyTree:
    """Values replicated on the mesh: every device computes them, XLA must not shard and gather."""
    mesh = _MESH.get()
    if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P()))


def generate_sharded(make: Callable[..., PyTree], numbers: jax.Array, *shared: Any) -> PyTree:
    """Computes ``make(numbers, *shared)`` in parallel over the devices of the mesh, and gathers it.

    On CPUs only: elsewhere generating is cheaper than communicating, so every device makes all.

    Args:
        make: row i [n, ...] of what it returns depends on number i and ``shared`` alone.
        numbers: [n].
        shared: arrays.
    """
    mesh, count = _MESH.get(), len(numbers)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if mesh is None or mesh.size == 1 or manual or count == 1 or not _is_cpu(mesh):
        return replicated(make(numbers, *shared))
    every = P(mesh.axis_names)
    # Every device gets as many numbers; the padding is made too, and dropped.
    padded = jnp.concatenate([numbers, jnp.zeros(-count % mesh.size, numbers.dtype)])
    own = (every, *(P() for _ in shared))
    part: Any = jax.shard_map(make, mesh=mesh, in_specs=own, out_specs=every)
    found = replicated(part(padded, *shared))
    return jax.tree.map(lambda rows: rows[:count], found)


def _is_cpu(mesh: Mesh) -> bool:
    return bool(mesh.devices.flat[0].platform == "cpu")


def place_on_mesh(
    params: PyTree, opt_state: PyTree, parts: dict[str, PyTree]
) -> tuple[PyTree, PyTree, dict[str, PyTree], Shardings | None]:
    """Places parameters, optimizer state and a sum's parts on the parameters' mesh.

    State that ``tx.init`` left on one device is sharded as the parameters that it is shaped like.

    Returns:
        (params, opt_state, parts, shardings of the first two); unchanged and None without a mesh.
    """
    place = resolve_placement(None, params)
    if place is None:
        return params, opt_state, parts, None
    if not place.is_home_of((params, opt_state, parts)):
        params, parts = place.put(params), place.put(parts)
        structure: Any = jax.tree.structure(params)
        each = zip(structure.flatten_up_to(parts["value"]), jax.tree.leaves(params), strict=True)
        trained = jax.tree.unflatten(structure, [None if v is None else p for v, p in each])
        at = place.shardings_like(trained, opt_state)
        own = lambda leaf, like: place._sharding(leaf) if _mesh_of(leaf) else like  # noqa: E731
        opt_state = jax.device_put(opt_state, jax.tree.map(own, opt_state, at))
    leaves = jax.tree.leaves((params, opt_state))
    return params, opt_state, parts, tuple(map(place._sharding, leaves))


def with_sharding(tree: PyTree, shardings: Shardings | None) -> PyTree:
    """The tree, constrained to these shardings; inside ``jit``."""
    leaves, structure = jax.tree.flatten(tree)
    if shardings is None or len(leaves) != len(shardings):
        return tree
    return jax.tree.unflatten(structure, jax.lax.with_sharding_constraint(leaves, list(shardings)))


def tracked_axes() -> set[str]:
    """The axes of an enclosing ``shard_map`` with ``check_vma=True``."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return set(axes) if axes and varying(jax.lax.axis_index(axes[0])) else set()


def varying(value: Any) -> set[str]:
    """The mesh axes over which ``shard_map`` knows the value to differ; none without its check."""
    kind: Any = jax.typeof(value)
    if hasattr(kind, "vma"):  # its name before jax 0.10.2
        return set(kind.vma)
    return set(kind.manual_axis_type.varying | kind.manual_axis_type.unreduced)
