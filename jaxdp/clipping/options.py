"""Checks of all that the clipping engine is given, from shapes alone (so also inside ``jit``)."""

import reprlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxdp import arguments
from jaxdp.ledger.returned import find_past, past_of_bound
from jaxdp.ledger.tickets import Ticket
from jaxdp.types import Batch, PyTree, check_mask, count_rows

# Further out, squares in float32 underflow or overflow and a norm could not be trusted.
LEAST_BOUND, LARGEST_BOUND = 1e-10, 1e10


# A hashable choice of trained parameters: a function of a leaf's path, or the leaves and structure
# of a prefix of the parameters' tree; None trains all.
Trainable = Callable[[str], bool] | tuple[tuple[bool, ...], jax.tree_util.PyTreeDef] | None


class ClippingOptions(TypedDict, total=False):
    """Further options of ``jaxdp.clipped_grad``, which describes them, for a trainer or a run."""

    engine: str
    microbatch_size: int | None
    rng_name: str | Sequence[str] | None


def check_option_names(of: str, given: ClippingOptions) -> None:
    """Raises TypeError for an argument that neither ``of`` nor its clipped gradient takes."""
    names = sorted(ClippingOptions.__optional_keys__)
    for name in given:
        if name not in names:
            raise TypeError(
                f"{of} takes no argument {name!r}: there are those of its signature, and of "
                f"jaxdp.clipped_grad {', '.join(names)}"
            )


def checked_trainable(choice: PyTree | Callable[[str], bool] | None) -> Trainable:
    """The caller's choice of trained parameters, in a form that ``jit`` can compare."""
    if isinstance(choice, type):  # a filter of nnx's: called with a path it would be true of all
        raise ValueError(
            "trainable must be a tree of bool, a function from a path to bool, or None, got the "
            f"class {choice.__name__}. {SPLIT_NNX}: "
            'trainable={"lora": True, "base": False}'
        )
    if choice is None or callable(choice):
        return choice
    flags, structure = jax.tree.flatten(choice)
    if not flags or not all(isinstance(flag, bool) for flag in flags):
        raise ValueError(
            "trainable must be a tree of bool (a prefix of the parameters), a function from a "
            f"path to bool, or None; got {choice!r}"
        )
    return tuple(flags), structure


def trained_flags(choice: Trainable, params: PyTree) -> list[bool]:
    """For every leaf of the parameters, True if it is trained."""
    if choice is None:
        return [True] * len(jax.tree.leaves(params))
    if callable(choice):
        return [bool(choice(path)) for path in paths(params)]
    flags, structure = choice
    try:
        groups = structure.flatten_up_to(params)
    except ValueError as error:
        raise ValueError(
            f"trainable must be a prefix of the parameters' tree, got {structure}: {error}"
        ) from None
    each = zip(flags, groups, strict=True)
    return [flag for flag, group in each for _ in jax.tree.leaves(group)]


def paths(params: PyTree) -> list[str]:
    """The path of every leaf."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def describe_frozen(params: PyTree, flags: Sequence[bool]) -> list[str]:
    """For every leaf that is not trained, words for it and those in its subtree; "" for others.

    A subtree begins at the first key in which the leaves' paths differ; where that gives more than
    a page takes, all are one.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    keys = [[jax.tree_util.keystr((key,)) for key in path] for path, _ in leaves]
    first, groups = len(_shared(keys)), dict[str, list[int]]()
    for at, flag in enumerate(flags):
        if not flag:
            groups.setdefault("".join(keys[at][: first + 1]), []).append(at)
    if len(groups) > 8:
        groups = {"": [at for at, flag in enumerate(flags) if not flag]}
    words = [""] * len(leaves)
    for group in groups.values():
        where = "".join(_shared([keys[at] for at in group]))
        numbers = sum(int(np.size(leaves[at][1])) for at in group)
        said = f"the frozen parameter {where}"
        if len(group) > 1:
            under = f" under {where}" if where else ""
            said = f"the frozen parameters{under} ({len(group)} arrays, {numbers:,} numbers)"
        for at in group:
            words[at] = said
    return words


def _shared(paths: Sequence[Sequence[str]]) -> list[str]:
    """The keys that all paths begin with."""
    found = []
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        found.append(level[0])
    return found


def describe_shapes(example: PyTree) -> str:
    """The dtypes and shapes of one example, for an error message."""
    words = jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", example)
    return str(words).replace("'", "")


def check_arrays(params: PyTree) -> None:
    """Raises ValueError, with the remedy, if a leaf is no array, or one whose memory is gone."""
    if is_donated(params):
        raise ValueError(
            "params must be those that the last update returned, got some whose memory it has "
            "reused: write params, opt_state, info = update(params, opt_state, "
            "summed). To keep some for later copy them first, jax.tree.map(jnp.copy, params)"
        )
    for at, leaf in enumerate(jax.tree.leaves(params)):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise ValueError(
                f"params must be a pytree of arrays, got a {type(leaf).__name__} at "
                f"{paths(params)[at]} of a {type(params).__name__}. Split a module such as "
                "Equinox's, params, static = eqx.partition(model, eqx.is_inexact_array), and put "
                "it together in the loss: model = eqx.combine(params, static)"
            )


# Of an nnx model.
SPLIT_NNX = (
    "Split the model, graphdef, params, rest = nnx.split(model, nnx.Param, ...), train params, and "
    "put it together in the loss: model = nnx.merge(graphdef, params, rest, copy=True). With LoRA "
    "it is graphdef, lora, base, rest = nnx.split(model, nnx.LoRAParam, nnx.Param, ...), lora "
    "trained, base frozen, and rest captured by the loss"
)

# Of an array that a program was compiled with.
REUSED = (
    "loss_fn and optimizer must capture arrays that are there, got one whose memory a step has "
    "reused: a step reuses the state that it is given. Capture a copy, jnp.copy(array), or make "
    "what changes between steps a frozen parameter (trainable=), and replace it in the state: "
    "state._replace(params={**state.params, name: value})"
)


def is_donated(tree: PyTree) -> bool:
    """True if an array was donated to an earlier step, so that its memory is gone."""
    for leaf in jax.tree.leaves(tree):
        # At every step: isinstance(leaf, jax.Array) would take longer than the question itself.
        deleted = getattr(leaf, "is_deleted", None)
        if deleted is not None and not isinstance(leaf, jax.core.Tracer) and deleted():
            return True
    return False


def check_params(params: PyTree, flags: list[bool]) -> None:
    """Raises ValueError unless something is trained, and all of that may move by noise.

    Raises:
        ValueError: with the remedy, where params hold an nnx module, or trained leaves are no
            floating-point numbers, nnx state that is no ``nnx.Param``, or batch statistics.
    """
    names = paths(params)
    if not flags:
        raise ValueError(f"params must hold at least one array, got {reprlib.repr(params)}")
    if not any(flags):
        more = ", ..." if len(names) > 8 else ""
        raise ValueError(
            "trainable must let at least one parameter through, got none of "
            f"{', '.join(names[:8])}{more}"
        )
    # Flax is asked only where the process has loaded it already.
    nnx: Any = sys.modules.get("flax.nnx")
    if hasattr(nnx, "Variable"):
        for node in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, nnx.Module)):
            if isinstance(node, nnx.Module):  # its leaves would count a shared weight twice
                raise ValueError(
                    f"params must be what nnx.split returns, got a module, {type(node).__name__}. "
                    + SPLIT_NNX
                )
        each = iter(flags)
        kinds = jax.tree_util.tree_leaves_with_path(
            params, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
        for path, kind in kinds:
            trained = [next(each) for _ in jax.tree.leaves(kind)]
            if isinstance(kind, nnx.Variable) and not isinstance(kind, nnx.Param) and any(trained):
                raise ValueError(
                    f"params must be nnx.Param where they are trained, got {type(kind).__name__} "
                    f"at {jax.tree_util.keystr(path)}. {SPLIT_NNX}"
                )
    for name, leaf, flag in zip(names, jax.tree.leaves(params), flags, strict=True):
        if flag and "batch_stats" in name:
            raise ValueError(
                f"params must not hold batch statistics where they are trained, got {name}: they "
                'would move by noise. Freeze them, trainable=lambda path: "batch_stats" not in '
                'path, or hand over variables["params"] alone'
            )
        if flag and not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"params must be floating-point arrays where they are trained, got "
                f"{jnp.result_type(leaf)} at {name}"
            )


def checked_result(result: PyTree) -> tuple[jax.Array, PyTree]:
    """The scalar loss and its auxiliary output (or None)."""
    loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not hasattr(loss, "shape") or loss.shape != ():
        found = f"shape {loss.shape}" if hasattr(loss, "shape") else f"a {type(loss).__name__}"
        raise ValueError(
            "loss_fn must return a scalar for one example, got "
            + ("None: a return is missing" if loss is None else f"{found}: ")
            + ("" if loss is None else "it sees one example without a batch axis")
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(f"loss_fn must return a floating-point scalar, got {loss.dtype}")
    if any("batch_stats" in path for path in paths(aux)):
        raise ValueError(
            "loss_fn must not return updated batch statistics: they mix the examples. Use "
            "LayerNorm or GroupNorm, or keep the statistics fixed (use_running_average=True)"
        )
    return loss, aux


def check_bound(name: str, value: float) -> None:
    """Raises ValueError unless float32 can hold the square of the bound, with room to spare."""
    if not LEAST_BOUND <= arguments.positive(name, value) <= LARGEST_BOUND:
        raise ValueError(f"{name} must be in [1e-10, 1e10], got {value!r}")


def checked_bound(bound: float | jax.Array | None) -> jax.Array | None:
    """The bound of this step as a float32 scalar; NaN and values out of range are made safe."""
    if bound is None:
        return None
    if not isinstance(bound, jax.Array):
        check_bound("bound", bound)
    bound = jnp.asarray(bound)
    if bound.shape != () or not jnp.issubdtype(bound.dtype, jnp.floating):
        found = f"{bound.dtype} {list(bound.shape)}"
        raise ValueError(f"bound must be a floating-point scalar, got {found}")
    bound = bound.astype(jnp.float32)
    return jnp.where(bound >= LEAST_BOUND, jnp.minimum(bound, LARGEST_BOUND), LEAST_BOUND)


def checked_scale(scale: PyTree | None) -> PyTree | None:
    """The scale in float32, moved into [1e-10, 1e10]: further out, quotients and sums overflow."""

    def one(leaf: ArrayLike) -> jax.Array:
        kind = getattr(leaf, "dtype", type(leaf))
        if not any(jnp.issubdtype(kind, real) for real in (np.floating, np.integer, np.bool_)):
            raise ValueError(
                "scale must be a pytree of positive numbers, shaped like the trained parameters, "
                f"got {arguments.described(leaf)} in it"
            )
        leaf = jnp.asarray(leaf).astype(jnp.float32)
        return jnp.where(leaf >= LEAST_BOUND, jnp.minimum(leaf, LARGEST_BOUND), LEAST_BOUND)

    return jax.tree.map(one, scale)


def rows_and_mask(data: PyTree, mask: ArrayLike | str | None) -> tuple[PyTree, jax.Array]:
    """The rows of a physical batch [m, ...] and its mask, bool [m].

    Args:
        data: a ``Batch``, or a pytree of arrays [m, ...].
        mask: of a pytree: bool [m] or "all"; None for a ``Batch``, which holds its own.

    Raises:
        ValueError: the mask is missing, given with a ``Batch``, or of another kind, shape or dtype;
            the data are not arrays [m, ...], or a pytree that holds a ``Batch``.
    """
    if isinstance(data, Batch):
        if mask is not None:
            raise ValueError("mask must not be given with a Batch, which holds its own; got both")
        check_mask(data.mask, count_rows("batch", data.data))
        return data.data, jnp.asarray(data.mask)
    require_no_batch(data)
    if not isinstance(mask, str | list | tuple) and not hasattr(mask, "dtype"):
        shape = next((getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(data)), ())
        size, found = shape[0] if shape else "m", type(mask).__name__
        if mask is None:
            found = "None: padding would count as records"
        raise ValueError(
            "draw must be a Draw where data are all records, a mask where they are the rows of one "
            f'physical batch (bool [{size}], or "all" where no row is padding), or left out where '
            f"data is a jaxdp.Batch (draw.batches(data) makes them), got {found}"
        )
    return data, checked_mask(mask, count_rows("batch", data))


def require_no_batch(data: PyTree) -> None:
    """Raises ValueError for a ``Batch`` in the data, whose mask would be ignored."""
    leaves = jax.tree.leaves(data, is_leaf=lambda leaf: isinstance(leaf, Batch))
    if any(isinstance(leaf, Batch) for leaf in leaves):
        raise ValueError(
            "data must be all records, with a Draw, or the rows of one physical batch, with a "
            "mask, or one Batch alone; got a Batch among them, whose mask would be ignored"
        )


def checked_mask(mask: ArrayLike | str | None, size: int) -> jax.Array:
    """The mask as bool [size]; "all" is a mask of True."""
    if mask is None:
        raise ValueError(
            "mask must say which rows are records, got None: padding would count as records. Hand "
            "over a jaxdp.Batch (draw.batches(data) makes them), or give mask=: bool "
            f'[{size}], or "all" where no row is padding'
        )
    if isinstance(mask, str):
        if mask != "all":
            raise ValueError(f'mask must be bool [{size}] or "all", got {mask!r}')
        return jnp.ones(size, dtype=bool)
    mask = jnp.asarray(mask)
    check_mask(mask, size)
    return mask


def example_shapes(rows: PyTree) -> PyTree:
    """The shapes of one row of a batch of leaves [m, ...], also where m is 0."""
    shapes = jax.eval_shape(lambda tree: tree, rows)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), shapes)


_BY_THE_CALLER = (
    "{} of a step was given by the caller: assumed public, or computed from noisy releases alone"
)


def note_given(
    ticket: Ticket | None,
    limit: Callable[[], float],
    scale: PyTree,
    bound: float | jax.Array | None,
) -> None:
    """Tells the ledger of a draw what its records were clipped by, where the caller gave it.

    Arrays that jaxdp itself returned are not named: what a trainer read from its state, and a
    bound that began at the rule's own (``limit``) and followed noisy counts. Nor is the rule's own.
    """
    if ticket is None:
        return
    own = bound is None or (not isinstance(bound, jax.Array) and float(bound) == limit())
    if not own and find_past(bound) not in (b"", past_of_bound(limit())):
        ticket.note("trusted", _BY_THE_CALLER.format("the clip bound (bound=)"))
    if any(find_past(leaf) != b"" for leaf in jax.tree.leaves(scale)):
        ticket.note("trusted", _BY_THE_CALLER.format("the scale (scale=)"))


def scale_leaves(scale: PyTree, trained: PyTree) -> list[jax.Array]:
    """The leaves of a checked scale, one for every trained parameter."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(trained)]
    found = jax.tree.leaves(scale)
    if [jnp.shape(leaf) for leaf in found] != shapes:
        raise ValueError(
            f"scale must be shaped like the trained parameters {shapes}, "
            f"got {[jnp.shape(leaf) for leaf in found]}"
        )
    return [jnp.asarray(leaf, jnp.float32) for leaf in found]


def check_rng(rng: jax.Array | None, name: str | None) -> None:
    """Raises ValueError unless a loss that takes a key, as ``name``, is given a threefry one."""
    if name is not None and rng is None:
        raise ValueError(f"rng must be a key, since loss_fn takes one as {name!r}; got None")
    if rng is None:
        return
    if name is None:
        raise ValueError(
            "rng must be None, since loss_fn takes no key: it has no argument called rng or key, "
            "and rng_name= names none; got a key"
        )
    # Under vmap keys of other kinds repeat the bits of one row.
    typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    kind = str(jax.random.key_impl(rng)) if typed else "raw"
    if "threefry2x32" not in kind and (typed or jnp.shape(rng)[-1:] != (2,)):
        raise ValueError(
            f"rng must be a threefry key, as jax.random.key(0, impl='threefry2x32') is, got {kind}"
            ": vmap gives every row the bits of the first row's key"
        )
