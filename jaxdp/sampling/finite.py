"""Looks through the records for numbers that are not finite, once, before any is drawn.

Such a record adds nothing, and costs what all cost. Before the first step it can be refused; later
nothing may follow from it, for a stop at the step that drew it would tell that it is there.
"""

import functools
import math
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import arguments
from jaxdp.devices import processes
from jaxdp.sampling.source import ArraySource, Source, converted, named, unmapped
from jaxdp.sampling.users import Users

Kind = Literal["not finite", "infinite", "NaN"]
_TOGETHER = 2**20  # numbers that are tested at a time on the host, where they fit into its cache
_SMALL = 2**18  # numbers for which no program is compiled for a device
_SILENT = 2.0  # seconds until it says that it looks


def look_through(source: Source, missing_values: bool = False, everything: bool = False) -> None:
    """Raises ValueError where a record holds a number that is not finite.

    Arrays in memory, on devices and in memory maps are read, the latter in pieces; what can hold
    whole numbers only costs nothing. Numbers count as a step gets them: float64 as float32. In
    several processes each reads what it holds, and all raise where one does.

    Args:
        source: the records.
        missing_values: True lets NaN pass, and refuses infinity alone.
        everything: True reads other sources too, record by record, so that one that cannot be read
            is found as well.

    Raises:
        ValueError: no message tells a value, an index or a count.
    """
    arguments.boolean("missing_values", missing_values)
    kind: Kind = "infinite" if missing_values else "not finite"
    records = source.source if isinstance(source, Users) else source
    arrays = jax.tree.leaves(records.arrays) if isinstance(records, ArraySource) else [None]
    in_memory = all(isinstance(leaf, np.ndarray | jax.Array) for leaf in arrays)
    pieces = _from_arrays if in_memory or not everything else _one_by_one

    def found() -> str:
        began: float | None = time.monotonic()
        for name, piece in pieces(records):
            if jnp.issubdtype(piece.dtype, np.inexact) and _has(piece, kind):
                return name
            if began is not None and time.monotonic() - began > _SILENT:
                began = None
                print(
                    "jaxdp: looking through all records, once, before a first step", file=sys.stderr
                )
        return ""

    if where := processes.first_said(found):
        wanted, got = "finite numbers", "NaN or infinity"
        option = "where the loss expects NaN as missing values, say so: missing_values=True"
        if missing_values:
            wanted, got, option = "no infinite numbers", "one", "missing_values=True is for NaN"
        raise ValueError(
            f"source must hold {wanted}, got {got} in {where}: the gradient of such a record is "
            "not finite, so that it counts as zeros, and the model learns nothing from it. Mend "
            "what wrote it, fill it with a public constant, or leave the record out beforehand; "
            f"scale by a public constant what float32 cannot hold; {option}. Nothing was charged. "
            "That it was refused tells something of the records: it is for their owner, and not "
            "to be published"
        )


def holds_nan(array: np.ndarray | jax.Array) -> bool:
    """True if an array has NaN, in what this process holds of it."""
    is_float = jnp.issubdtype(array.dtype, np.inexact)
    return is_float and any(_has(piece, "NaN") for piece in _pieces(array))


Pieces = Iterator[tuple[str, np.ndarray | jax.Array]]


def _from_arrays(source: Source) -> Pieces:
    """Yields the name of a leaf and a part of it, of arrays that lie here and may hold such."""
    if not isinstance(source, ArraySource):
        return
    likes = jax.tree_util.tree_leaves_with_path(source.example)
    for (path, like), leaf in zip(likes, jax.tree.leaves(source.arrays), strict=True):
        # Whole numbers that stay what they are cannot be wrong. Others are looked at as converted,
        # which raises in words where they do not fit.
        same = leaf.dtype == like.dtype
        if not isinstance(leaf, np.ndarray | jax.Array) or (same and like.dtype.kind in "biu"):
            continue
        for piece in _pieces(leaf):
            if isinstance(piece, np.ndarray):
                piece = converted(piece, like.dtype, named(path))
            yield named(path), piece


def _one_by_one(source: Source) -> Pieces:
    """Yields the name of a leaf and some records' part of it; each process reads its share."""
    first, end = (len(source) * (processes.index() + i) // processes.count() for i in (0, 1))
    size = sum(math.prod(like.shape) for like in jax.tree.leaves(source.example))
    together = max(1, _TOGETHER // max(1, size))
    for start in range(first, end, together):
        rows = np.arange(start, min(end, start + together))
        read = source.gather(rows, np.ones(len(rows), bool))
        for path, leaf in jax.tree_util.tree_leaves_with_path(read):
            yield named(path), leaf


def _pieces(array: np.ndarray | jax.Array) -> Iterator[np.ndarray | jax.Array]:
    """Yields parts of what this process holds: on the device a shard, else some rows."""
    shards = [array]
    if isinstance(array, jax.Array):  # replicas of a shard are one
        shards = list({str(each.index): each.data for each in array.addressable_shards}.values())
    for shard in shards:
        far = isinstance(shard, jax.Array) and any(on.platform != "cpu" for on in shard.devices())
        if far and shard.size > _SMALL:
            yield shard
            continue
        whole = shard if isinstance(shard, np.ndarray) else np.asarray(shard)
        whole = np.atleast_1d(whole)
        rows = max(1, _TOGETHER // max(1, math.prod(whole.shape[1:])))
        for start in range(0, len(whole), rows):
            yield whole[start : start + rows]
            unmapped(whole)


def _has(piece: np.ndarray | jax.Array, kind: Kind) -> bool:
    far = isinstance(piece, jax.Array)
    return bool(_on_device(piece, kind) if far else _has_one(np, piece, kind))


def _has_one(module: ModuleType, piece: np.ndarray | jax.Array, kind: Kind) -> jax.Array:
    if kind == "not finite":
        found: jax.Array = ~module.isfinite(piece).all()
    elif kind == "infinite":
        found = module.isinf(piece).any()
    else:
        found = module.isnan(piece).any()
    return found


_on_device = jax.jit(functools.partial(_has_one, jnp), static_argnames="kind")
