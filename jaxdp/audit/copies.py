"""One person who is several records: copies among the records, and records that became many."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator

import jax
import numpy as np

from jaxdp import accounting as acc
from jaxdp.audit.findings import Finding
from jaxdp.mechanism import Mechanism
from jaxdp.sampling import Source
from jaxdp.sampling import neighbours as near
from jaxdp.sampling.source import ArraySource
from jaxdp.sampling.users import UserExamples
from jaxdp.training.lines import line_of_function
from jaxdp.types import PyTree

_WHOLE = 2**30  # bytes of arrays that are read whole
_WORDS = 2**20  # that are hashed at a time
_SPREAD = 360  # places in other sources: copies that stand n/2, n/3, ... apart are among them
_KEYED = 2**16  # records whose key is asked for
_BY_CHANCE = 0.01  # pairs of equal records that are expected, above which copies are nothing
_CONTENT = 8  # changes from number to number in a record of much content
_OFTEN, _SHARE = 3, 0.01  # times that a record stands, or share of such records, that are certain
_GROUP = 64  # records up to which a group's epsilon is computed: it takes two seconds


def find_copies(
    source: Source,
    same: Callable[[PyTree], Hashable] | None = None,
    mechanism: Mechanism | None = None,
) -> list[Finding]:
    """Finds records that stand several times, and those that share a key; [] where none do.

    All records of arrays are read, up to 1 GiB, some of other sources. Equal records are copies
    where that can be no chance. Records are cut into two halves of their numbers: were these
    independent, two records would be equal as often as their halves are, and how often the halves
    of **unlike** records are equal can be counted. So rows of few categories, of which any half is
    shared with other rows, are not accused, and records of little content (blank images, a word
    and padding) do not count. A hash of 64 bits stands for a half.

    Args:
        source: the records.
        same: from one record to a key that near duplicates, or records of one person, share.
        mechanism: where numbers of the records may be told: how often a record stands, and the
            epsilon of whoever is behind it.

    Raises:
        ValueError: ``same`` fails, or gives what is no key.
    """
    if isinstance(source, UserExamples):  # a user's own may be alike
        source = source.one_of_each()
    arrays = jax.tree.leaves(getattr(source, "arrays", ()))
    if any(isinstance(a, jax.Array) and not a.is_fully_addressable for a in arrays):
        return []  # other processes hold the rest
    found = []
    halves, changes, width = _hashed(source)
    rich = changes >= min(_CONTENT, width // 2)
    halves = halves[rich]
    whole = halves[:, 0] * np.uint64(3) + halves[:, 1]
    _, first, times = np.unique(whole, return_index=True, return_counts=True)
    unlike = math.comb(len(first), 2)
    if len(first) < len(whole) and unlike:
        expected = float(math.comb(len(whole), 2))
        for half in halves[first].T:
            _, alike = np.unique(half, return_counts=True)
            expected *= (1 + float(np.sum(alike * (alike - 1.0)) / 2)) / unlike
        if expected < _BY_CHANCE:
            words = "exact copies of a record stand among the records"
            found.append(_finding(words, times, len(rich), mechanism))
    if same is not None:
        keys = Counter[Hashable]()
        for records in _read(source, _KEYED, 256):
            try:
                keys.update(same(near.record(records, at)) for at in range(near.count(records)))
            except Exception as error:
                raise ValueError(
                    "same must return a key that can be hashed for every record, such as a "
                    f"number, a text or array.tobytes(), got a {type(error).__name__}"
                ) from None
        times = np.array(list(keys.values()))
        if times.max(initial=0) > 1:
            words = "several records have one and the same key of same="
            found.append(_finding(words, times, int(times.sum()), mechanism))
    return found


def _finding(words: str, times: np.ndarray, looked: int, mechanism: Mechanism | None) -> Finding:
    """The finding on records of which each stands so many ``times``."""
    often, several = int(times.max()), int(times[times > 1].sum())
    certain = often >= _OFTEN or several >= _SHARE * looked
    do = "" if mechanism is None else remedy(often, mechanism)
    return Finding("copies", words, "", certain, do, (several, looked), weight=0.2)


def remedy(records: int, mechanism: Mechanism) -> str:
    """The ways out for a person who is so many records, with the epsilon that is true of them."""
    words = f"{Finding('copies', '', '').remedy}(event, delta, records={records})"
    steps, delta, relation = mechanism.steps, mechanism.delta, mechanism.neighbours
    if steps is None or delta is None:
        return words
    event, group = mechanism.total(steps), min(records, _GROUP)
    one = acc.epsilon(event, delta, relation).upper
    upper = acc.group_epsilon(event, delta, group, relation).upper
    more = f", already for {group} of them" if group < records else ""
    return f"{words} is {upper:.3g}{more}, where {one:.3g} is told for one"


def _read(source: Source, most: int, at_once: int) -> Iterator[PyTree]:
    """Yields all records of arrays that are no more than ``most``, or some of them, in parts."""
    count, step = len(source), max(1, at_once)
    if isinstance(source, ArraySource) and count <= most:
        places = np.arange(count)
    else:  # spread over the source, with the next of each: where rows were repeated
        spread = np.arange(_SPREAD) * count // _SPREAD
        places = np.unique([spread, np.minimum(spread + 1, count - 1)]) if count else spread[:0]
    for begin in range(0, len(places), step):
        part = places[begin : begin + step]
        yield source.gather(part, np.ones(len(part), bool))


def _hashed(source: Source) -> tuple[np.ndarray, np.ndarray, int]:
    """(hashes of the halves of records, uint64 [m, 2]; changes in each, int [m]; its words)."""
    size = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(source.example))
    numbers = sum(math.prod(a.shape) for a in jax.tree.leaves(source.example))
    rng, width = np.random.default_rng(0), 0
    hashes, changes = [np.zeros((0, 2), np.uint64)], [np.zeros(0, np.int64)]
    for records in _read(source, _WHOLE // max(size, 1), _WORDS // max(numbers, 1)):
        words = np.concatenate(
            [_words(leaf, size >= 512) for leaf in jax.tree.leaves(records)], axis=1
        )
        if not width:
            width = words.shape[1]
            salt = rng.integers(2**64, size=width, dtype=np.uint64)
            half = rng.permutation(width) % 2 == 0
        mixed = np.multiply(words ^ salt, np.uint64(0x9E3779B97F4A7C15))
        mixed = np.multiply(mixed ^ (mixed >> np.uint64(32)), np.uint64(0xD6E8FEB86659FD93))
        hashes.append(np.stack([mixed[:, half].sum(1), mixed[:, ~half].sum(1)], axis=1))
        changes.append(np.count_nonzero(words[:, 1:] != words[:, :-1], axis=1))
    return np.concatenate(hashes), np.concatenate(changes), width


def _words(leaf: np.ndarray, wide: bool) -> np.ndarray:
    """A leaf's rows as uint64 [m, d]: one for each number, or for eight bytes where it is wide."""
    rows = np.ascontiguousarray(leaf).reshape(len(leaf), -1)
    size = rows.dtype.itemsize
    if not wide:
        return rows.view(f"u{min(size, 8)}").astype(np.uint64)
    plain = rows.view(np.uint8)
    return np.pad(plain, ((0, 0), (0, -plain.shape[1] % 8))).view(np.uint64)


# Records that became many ---------------------------------------------------------------------


def check_preprocess(
    preprocess: Callable[[PyTree], PyTree],
    data: PyTree,
    mechanism: Mechanism,
) -> list[Finding]:
    """Finds what makes several records of one, and what makes a record of several.

    Without one record, what was made of it alone is gone: at most one record where each is made
    by itself, and k where one became k (repeated, cut into windows or parts, augmented); no other
    record comes. What was drawn with replacement is nothing but records of the data, some of them
    more often. Where others come as well, what a record becomes depends on the others.

    Args:
        preprocess: from all records to all records.
        data: a list of records, or a pytree of arrays [n, ...].
        mechanism: for the epsilon of whoever became several records; its privacy unit.
    """
    where, found = line_of_function(preprocess), []
    made, again = preprocess(data), preprocess(data)
    before, after, later = (Counter(map(near.content, near.each(d))) for d in (data, made, again))
    repeats = after == later or near.same(made, again)
    if not repeats:
        words = "the function gives another result when it is called again on the same records"
        found.append(Finding("preprocess", words, where, certain=False))
    chosen = after.keys() <= before.keys()
    many = max([1, *(-(-after[key] // before[key]) for key in after)] if chosen else [1])

    others = ""
    for pair in near.neighbours(data):
        other = preprocess(pair.data)
        if not repeats:  # only their number says something
            if pair.changed == 1 and near.count(made) == near.count(again):
                many = max(many, near.count(made) - near.count(other))
            continue
        if near.shapes(made) != near.shapes(other):
            others = f"records come out with shapes {near.shapes(made)}, and {near.shapes(other)}"
        else:
            gone, new = near.differing(made, other)
            if pair.changed == 1 and not new:
                many = max(many, gone)
            elif gone + new > pair.changed and not (many > 1 and (chosen or gone <= many)):
                others = (
                    f"{gone} of {near.count(made)} records do not come out as before, and {new} "
                    "others come, where one record may change,"
                )
        if others:
            found.append(Finding("preprocess", f"{others} {pair.words}", where))
            break
    if many > 1 and mechanism.records_per_user is None:
        do = remedy(many, mechanism)
        words = f"one record becomes up to {many} records"
        found.append(Finding("copies", words, where, do=do, weight=0.2))
    return found
