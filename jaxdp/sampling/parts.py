"""Parts of the records by a public rule: what is released on each composes in parallel."""

import dataclasses
import hashlib
import re
import secrets
from collections.abc import Callable, Sequence

import jax
import jax.extend
import numpy as np
from jax.typing import ArrayLike

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.devices import processes
from jaxdp.sampling.rules import Identities
from jaxdp.sampling.source import ArraySource, Source, as_source, chosen
from jaxdp.sampling.users import UserExamples
from jaxdp.types import PyTree

_AT_ONCE = 4096  # units that are read together
_assigned: dict[str, bytes] = {}  # by partition with a name: a hash of who is in which part


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a partition of the privacy units, as events know it. Public.

    Attributes:
        rule: names the partition; two of one name are one and the same.
        name: of the part.
        within: the part that was parted; None where all units were.
        kept: True where the partition has a name, under which it may be made again.
    """

    rule: str
    name: str
    within: "Part | None" = None
    kept: bool = False

    def event(self, event: acc.Event) -> acc.Event:
        """The event of a release on this part alone."""
        on_part = acc.Parallel(acc.Composed(()), {self.name: event}, self.rule)
        return on_part if self.within is None else self.within.event(on_part)

    def trusted(self) -> list[str]:
        """Sentences on what could not be verified of the partitions."""
        said = [] if self.within is None else self.within.trusted()
        return said + self.kept * [
            f"the partition {self.rule!r} has a name, under which it may be made again: that every "
            "unit was in the same part each time, as where no value changes, was not verified"
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class PartOfSource:
    """A source of the units of one part; ``parts`` makes it."""

    source: Source = dataclasses.field(repr=False)  # of all units. Sensitive
    rows: np.ndarray = dataclasses.field(repr=False)  # int64 [n], of those in the part. Sensitive
    part: Part
    # False: rows are gathered on the host.
    on_device: bool = dataclasses.field(default=False, init=False, repr=False)

    @property
    def example(self) -> PyTree:
        """Shape and dtype of one unit."""
        return self.source.example

    @property
    def records_per_user(self) -> int | None:
        """The most records of a unit that is a user; None where units are records."""
        return getattr(self.source, "records_per_user", None)

    @property
    def identities(self) -> Identities | None:
        """Those of the part, where the source has any."""
        known = getattr(self.source, "identities", None)
        return None if known is None else [known[row] for row in self.rows]

    def __len__(self) -> int:
        """The number of units in the part. Sensitive."""
        return len(self.rows)

    def gather(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """The units at ``indices``; see ``Source.gather``."""
        places, kept = chosen(indices, mask, len(self))
        rows = np.zeros(len(mask), np.int64)
        rows[places] = self.rows[kept]
        return self.source.gather(rows, mask)


def parts(
    data: PyTree,
    rule: Callable[[PyTree], ArrayLike],
    names: Sequence[str],
    *,
    partition: str | None = None,
) -> dict[str, Source]:
    """Returns the parts of the records by a public rule, a source for each name.

    A ``Trainer`` or ``Run`` on a part charges its ledger with releases on that part alone: they
    compose in parallel with those on the other parts, and add up with all else. Where a record is
    follows from that record, so that without it every other part is the same. Of a split by
    position that is not true: without record 0 all parts differ. Releases may depend on one
    another, also across parts (docs/proofs/accounting.md, "Parts").

    Formal guarantee: ``rule`` is compiled once, for one unit, and applied to one at a time; it is
    refused where it captures an array or calls back into Python. So the part is a function of the
    unit alone, as long as the numbers in the rule are public.

    Args:
        data: the records, as for ``as_source``, or users (``jaxdp.sampling.users``); or a part,
            which is parted further.
        rule: from one unit, as the loss gets it, to a bool or a whole number: the place of its
            part in ``names``. Whoever has another number is in no part. In terms of jax.numpy.
        names: of the parts; public.
        partition: a name under which another process may make the same parts again, to go on with
            a ledger: the rule, its numbers and ``names`` are compared, and the ledger notes that
            the units' values were not. None makes a partition of its own: parts of another call
            add up with these.

    Returns:
        Sources by name, disjoint. Arrays in memory are copied, once; how many units are in a part
        is sensitive, so that ``dataset_size`` of its mechanism must be declared.

    Raises:
        ValueError: the rule is none of the above; names repeat; a partition of this name was made
            in this process, and some unit was in another part.

    Example:
        >>> x = np.linspace(-1, 1, 10, dtype=np.float32)[:, None]
        >>> halves = jaxdp.sampling.parts(x, lambda row: row[0] > 0, ["below", "above"])
        >>> sorted(halves)
        ['above', 'below']
    """
    source = as_source(data)
    if isinstance(source, UserExamples):
        raise ValueError(
            "data must be users, jaxdp.sampling.users, for parts of users, got their records one "
            "by one (jaxdp.sampling.user_examples): a rule of a record may part a user"
        )
    if isinstance(names, str) or len(set(names)) != len(names) or not len(names):
        raise ValueError(f"names must be a list of distinct names, got {names!r}")
    for key, said in [("names", each) for each in names] + [("partition", partition)]:
        if said is not None and not (isinstance(said, str) and said):
            raise ValueError(f"{key} must be text, got {said!r}")
    if not callable(rule):
        raise ValueError(
            "rule must be a function of one record, such as lambda record: record['x'][0] > 0, got "
            f"{arguments.described(rule)}: positions and lists of indices make no parts, for "
            "without record 0 every later one moves, and all parts differ"
        )

    # The rule sees one unit and nothing else; it is traced once, and what was looked at is what
    # is applied.
    traced = jax.jit(lambda unit: rule(unit)).trace(source.example)
    closed, lowered = traced.jaxpr, traced.lower().as_text()
    given = closed.out_avals
    if len(given) != 1 or given[0].shape or given[0].dtype.kind not in "biu":
        raise ValueError(f"rule must give one bool or whole number for a record, got {given}")
    if closed.consts or closed.effects or re.search(r"callback|dense<[\"\[]|dense_", lowered):
        raise ValueError(
            "rule must be a function of one record alone, got one that captures an array or calls "
            "back into Python: by either it may tell records by their places, or by one another. "
            "Write public numbers into the rule as Python numbers"
        )

    # One unit at a time, by one program: how a unit is rounded does not depend on its place.
    of_one = jax.extend.core.jaxpr_as_fun(closed)
    each = jax.jit(lambda units: jax.lax.map(lambda leaves: of_one(*leaves)[0], units))
    count, found = len(source), np.zeros(len(source), np.int64)
    for start in range(0, count, _AT_ONCE):
        mask = np.arange(start, start + _AT_ONCE) < count
        indices = np.where(mask, np.arange(start, start + _AT_ONCE), 0)
        units = jax.tree.leaves(source.gather(indices, mask))
        found[start : start + _AT_ONCE] = np.asarray(each(units))[mask]

    # A name of its own, or of all that makes two partitions the same.
    within = getattr(source, "part", None)
    token = processes.from_process_0(lambda: secrets.token_hex(8))
    if partition is not None:
        text = f"{lowered}|{list(names)}|{within}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        token = f"{partition} {digest}"
        held = hashlib.blake2b(found.tobytes(), digest_size=16).digest()
        if _assigned.setdefault(token, held) != held:
            raise ValueError(
                f"partition must be the name of one partition, got {partition!r}, by which this "
                "process has parted other records, or the same with other values: a unit could be "
                "in two parts. Give another name, whose releases add up with those before"
            )
    made: dict[str, Source] = {}
    for number, name in enumerate(names):
        rows = np.flatnonzero(found == number)
        made[name] = one = PartOfSource(source, rows, Part(token, name, within, bool(partition)))
        arrays = source.arrays if isinstance(source, ArraySource) else None
        leaves = jax.tree.leaves(arrays)
        in_memory = all(isinstance(x, jax.Array) or type(x) is np.ndarray for x in leaves)
        if leaves and in_memory and len(rows):  # of no rows there are no arrays that a step reads
            taken = ArraySource.of(jax.tree.map(lambda leaf, at=rows: leaf[at], arrays))
            made[name] = dataclasses.replace(taken, identities=one.identities, part=one.part)
    return made
