"""Tests of functions around the loss: preprocessing, public values, sources, collate functions."""

import itertools
from collections.abc import Callable

import jax
import numpy as np

from jaxdp.audit import neighbours as near
from jaxdp.audit.findings import Finding, line_in, line_of_error
from jaxdp.sampling import Source
from jaxdp.sampling.source import ArraySource
from jaxdp.types import PyTree

# What a function makes of records: a loss, or (loss, parameters).
Built = Callable[..., jax.Array] | tuple[Callable[..., jax.Array], PyTree]
RECORDS = 256
_FITTED = (
    r"\.(fit|mean|std|var|median|quantile|percentile|max|min|unique|svd|cov|norm|sum)\w*\("
    r"|\b(max|min|set|sorted)\("
)


def preprocessing(function: Callable[[PyTree], PyTree], data: PyTree) -> Finding | None:
    """Runs a function of all records on neighbours: no other record may come out changed."""
    at, out, again = line_in(function, _FITTED), function(data), function(data)
    if near.differing(out, again, np.arange(near.count(out))) != (0, 0):
        return Finding(
            "preprocess",
            "the function gives another result when it is called again on the same records",
            "what it takes from one record cannot be told from what it takes from chance",
            at,
            "give it a fixed seed for the check",
            certain=False,
        )
    for pair in near.neighbours(data):
        other = function(pair.data)
        shapes = _widths(out), _widths(other)
        if shapes[0] != shapes[1]:
            return Finding(
                "preprocess",
                f"records come out with shapes {shapes[0]}, and {shapes[1]} {pair.words}",
                "the shape of every record, which a run shows, depends on one record",
                at,
                "pad or cut to a public constant, chosen without looking at these records",
            )
        gone, new = near.differing(out, other, pair.rows)
        if gone + new > pair.changed:
            return Finding(
                "preprocess",
                f"{gone} of {near.count(out)} records do not come out as before {pair.words}, "
                f"and {new} others come, where one record may change",
                "it is fitted on the private records, so one record moves what all others add, "
                "and no event is charged for it",
                at,
                "use public constants or public data, or a charged release "
                "(jaxdp.preprocess.dp_pca)",
            )
    return None


def public_value(name: str, function: Callable[[PyTree], PyTree], data: PyTree) -> Finding | None:
    """Runs a function whose result is used as a public constant: it may see no record."""

    def shown(value: PyTree) -> str:
        if callable(value):
            return f"{shown(value(0))} at step 0"
        leaves = jax.tree.leaves(value)
        if len(leaves) != 1 or np.size(leaves[0]) != 1:
            return "one thing"
        plain = np.asarray(leaves[0])
        return f"{plain.item():.6g}" if plain.dtype.kind in "iuf" else repr(leaves[0])

    value = function(data)
    for pair in near.neighbours(data):
        other = function(pair.data)
        if not near.same(value, other):
            return Finding(
                "public",
                f"{name} is {shown(value)}, and {shown(other)} {pair.words}",
                f"{name} is used as a public constant and depends on a record: it is a release "
                "that no event is charged for",
                line_in(function, _FITTED),
                "choose it beforehand, from public data, or from noisy releases "
                "(jaxdp.optimizers.quantile for a clip bound)",
            )
    return None


def builds(
    build: Callable[[PyTree], Built], data: PyTree, differ: Callable[[Built, Built], str]
) -> Finding | None:
    """Makes the loss from neighbouring data: its program may not differ.

    Args:
        build: from records to a loss, or (loss, parameters).
        data: the records.
        differ: from two results to words on how they differ, "" where they do not.
    """
    made = build(data)
    for pair in near.neighbours(data):
        if words := differ(made, build(pair.data)):
            return Finding(
                "captured",
                f"the loss, or its first parameters, are others {pair.words}: {words}",
                "every example's gradient depends on that record, which is neither clipped "
                "nor noised there",
                line_in(build, _FITTED),
                "make loss and parameters from public constants alone",
            )
    return None


def reading(source: Source, records: int, kind: type) -> Finding | None:
    """Reads the same records in other company, another order, and again.

    Args:
        source: the records.
        records: the number of records that are read.
        kind: the type of what the user gave, for the line.
    """
    if isinstance(source, ArraySource) or len(source) < 2:
        return None
    size = min(records, len(source))
    rows = np.arange(size)
    seen: dict[int, PyTree] = {}
    for order in (rows, rows, rows[::-1], np.roll(rows, 1), rows[: size // 2], rows[size // 2 :]):
        words, at = "", ""
        try:
            found = source.gather(order, np.ones(len(order), bool))
        except ValueError as error:
            words = f"it refuses records that it gave before: {error}"
            at, order = line_of_error(error), rows[:0]
        for place, row in enumerate(order):
            record = jax.tree.map(lambda leaf, place=place: np.asarray(leaf)[place], found)
            if not near.same(seen.setdefault(int(row), record), record):
                words = "a record reads differently in other company, or a second time"
                at = line_in(vars(kind).get("__getitem__", kind))
        if words:
            return Finding(
                "source",
                words,
                "what a record adds then depends on the other records, or on how often it was read",
                at,
                "let [index] compute from that record and public constants alone; augment "
                "inside the loss, by the key of the example",
            )
    return None


def collating(collate: Callable[[list[PyTree]], PyTree], records: list[PyTree]) -> Finding | None:
    """Puts one record into batches with others: its row, and all shapes, must stay the same."""
    order = sorted(range(len(records)), key=lambda i: near.measure(records[i])[1])
    shortest, middle, longest = (records[order[i]] for i in (0, len(order) // 2, -1))
    made = [collate([shortest, other]) for other in (shortest, longest, middle)]
    at = line_in(collate, _FITTED)
    for one, two in itertools.combinations(made, 2):
        if _widths(one) != _widths(two):
            return Finding(
                "collate",
                f"two records become {_widths(one)}, and two others {_widths(two)}",
                "the shape of a batch tells the length of its longest record to whoever sees "
                "time or memory, and a new shape is compiled anew",
                at,
                "pad to a public length: jaxdp.sampling.padded_text or bucketed_text",
            )
        first = [jax.tree.map(lambda leaf: np.asarray(leaf)[0], batch) for batch in (one, two)]
        if not near.same(*first):
            return Finding(
                "collate",
                "a record becomes another row when the other record of its batch changes",
                "what it adds then depends on the other records, and one record moves them all",
                at,
                "compute each row from its own record and public constants",
            )
    return None


def _widths(data: PyTree) -> list[tuple[int, ...]]:
    """Shapes of a record, without the number of records; [] for a list of records."""
    if isinstance(data, list):
        shapes = {tuple(np.shape(leaf) for leaf in jax.tree.leaves(record)) for record in data}
        return list(next(iter(shapes))) if len(shapes) == 1 else []
    return [np.shape(leaf)[1:] for leaf in jax.tree.leaves(data)]
