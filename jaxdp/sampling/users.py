"""Users with at most k records as the privacy unit, drawn whole or record by record."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxdp import arguments
from jaxdp.sampling.source import Source, as_source, chosen
from jaxdp.types import PyTree


class User(NamedTuple):
    """The records of one user, as a source of users gives them. **Sensitive**.

    Attributes:
        records: pytree [k, ...]; where the user has fewer, one of them again.
        present: bool [k]; False marks padding.
    """

    records: PyTree
    present: np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Users:
    """A source of users; ``users`` makes it."""

    source: Source = dataclasses.field(repr=False)  # the records. Sensitive
    # int64 [U, k]; each user's records. Sensitive.
    indices: np.ndarray = dataclasses.field(repr=False)
    # bool [U, k]; False marks padding. Sensitive.
    present: np.ndarray = dataclasses.field(repr=False)
    # False: rows are gathered on the host.
    on_device: bool = dataclasses.field(default=False, init=False, repr=False)

    @property
    def records_per_user(self) -> int:
        """The most records of one user that enter a step."""
        return int(self.present.shape[1])

    @property
    def example(self) -> User:
        """Shape and dtype of one user."""
        k, struct = self.records_per_user, jax.ShapeDtypeStruct
        one = self.source.example
        records = jax.tree.map(lambda leaf: struct((k, *leaf.shape), leaf.dtype), one)
        return User(records, jax.ShapeDtypeStruct((k,), np.bool_))  # type: ignore[arg-type]

    def __len__(self) -> int:
        """The number of users. Sensitive under add-or-remove-one."""
        return len(self.present)

    def gather(self, indices: np.ndarray, mask: np.ndarray) -> User:
        """The users at ``indices``; see ``Source.gather``."""
        places, kept = chosen(indices, mask, len(self))
        shape = len(mask), self.records_per_user
        flat, present = np.zeros(shape, np.int64), np.zeros(shape, bool)
        flat[places], present[places] = self.indices[kept], self.present[kept]
        rows = self.source.gather(flat.ravel(), np.repeat(mask, shape[1]))
        return User(jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), rows), present)


def users(
    data: PyTree,
    user_ids: ArrayLike | str,
    records_per_user: int,
    seed: int = 0,
    *,
    keep_ids: bool = False,
) -> Users:
    """Returns a source whose privacy unit is a user: samplers draw users, with all they have.

    Of a user with more than ``records_per_user`` records that many are kept, drawn by ``seed`` from
    the number of them and nothing else: other users' records never matter. Of one with fewer the
    row is padded, so that their number reaches no shape. Train with ``jaxdp.clipping.user_loss``,
    and with a mechanism that has the same ``records_per_user`` and the number of users as
    ``dataset_size``.

    Args:
        data: the records, as for ``as_source``.
        user_ids: integers or strings [N]; the user of each record: a record has one user. Of a dict
            of columns the name of the one that holds them, which then is no part of the records.
        records_per_user: k >= 1, public.
        seed: of the records that are kept; public, and the same whenever a run is resumed.
        keep_ids: True leaves the column that ``user_ids`` names, of integers, in the records.

    Raises:
        ValueError: ids of another kind or number; k out of its range.

    Example:
        >>> visits = {"patient": np.array(["b", "a", "b"]), "x": np.ones((3, 4), np.float32)}
        >>> patients = jaxdp.sampling.users(visits, "patient", records_per_user=4)
        >>> len(patients), list(patients.example.records)
        (2, ['x'])
    """
    source, order, starts, k = _kept(data, user_ids, records_per_user, seed, keep_ids)
    # The kept records of each user stand in the row; padding repeats the first, where none is read.
    counts = np.diff(starts, append=len(order))
    present = np.arange(k) < counts[:, None]
    indices = np.zeros(present.shape, np.int64) + order[starts, None]
    indices[present] = order
    return Users(source, indices, present)


@dataclasses.dataclass(frozen=True, eq=False)
class UserExamples:
    """A source of records of users, at most k of each; ``user_examples`` makes it."""

    source: Source = dataclasses.field(repr=False)  # all records. Sensitive
    # int64 [N]; the records that are kept, those of one user next to each other. Sensitive.
    indices: np.ndarray = dataclasses.field(repr=False)
    # int64 [U]; where those of each user begin. Sensitive.
    starts: np.ndarray = dataclasses.field(repr=False)
    # The most records of one user; public. Not ``records_per_user``, which says that an index is a
    # user: what wraps this source, and knows no better, is one of records.
    examples_per_user: int
    # False: rows are gathered on the host.
    on_device: bool = dataclasses.field(default=False, init=False, repr=False)

    @property
    def example(self) -> PyTree:
        """Shape and dtype of one record."""
        return self.source.example

    def __len__(self) -> int:
        """The number of records that are kept. Sensitive under add-or-remove-one."""
        return len(self.indices)

    def gather(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """The records at ``indices``; see ``Source.gather``."""
        places, kept = chosen(indices, mask, len(self))
        rows = np.zeros(len(mask), np.int64)
        rows[places] = self.indices[kept]
        return self.source.gather(rows, mask)

    def one_of_each(self) -> "UserExamples":
        """A source with the first record of every user alone."""
        indices = self.indices[self.starts]
        return UserExamples(self.source, indices, np.arange(len(indices)), 1)


def user_examples(
    data: PyTree,
    user_ids: ArrayLike | str,
    records_per_user: int,
    seed: int = 0,
    *,
    keep_ids: bool = False,
) -> UserExamples:
    """Returns a source whose index is a record, of users of whom each has at most so many.

    It is for ``ExampleLevel`` sampling, which draws and clips record by record, and yet has a
    guarantee for a user. Records are kept as ``users`` keeps them, by what their user has alone.
    The loss is one of a record, and ``dataset_size`` a declared number of the records kept.

    Args and errors as for ``users``.

    Example:
        >>> visits = {"patient": np.array(["b", "a", "b"]), "x": np.ones((3, 4), np.float32)}
        >>> source = jaxdp.sampling.user_examples(visits, "patient", records_per_user=4)
        >>> len(source), list(source.example)
        (3, ['x'])
    """
    return UserExamples(*_kept(data, user_ids, records_per_user, seed, keep_ids))


def _kept(
    data: PyTree, user_ids: ArrayLike | str, records_per_user: int, seed: int, keep_ids: bool
) -> tuple[Source, np.ndarray, np.ndarray, int]:
    """(source, records kept by user, where each user's begin, most of one); as for ``users``."""
    if isinstance(user_ids, str):
        if type(data) is not dict:
            as_source(data)  # which has words for a frame
        if type(data) is not dict or user_ids not in data:
            raise ValueError(
                "user_ids must be an array with the user of each record, or the name of a column "
                f"of data, a dict of columns; got {user_ids!r} for "
                f"{list(data) if isinstance(data, dict) else type(data).__name__}"
            )
        name, user_ids = user_ids, data[user_ids]
        data = data if keep_ids else {key: data[key] for key in data if key != name}
    source, k = as_source(data), arguments.integer("records_per_user", records_per_user, least=1)
    if np.ma.is_masked(user_ids):
        raise ValueError(
            "user_ids must name a user for each record, got a masked array with some missing: give "
            "each of these records a user of its own, or leave them out"
        )
    ids = np.asarray(user_ids)
    if ids.dtype.kind in "OT" and all(isinstance(one, str) for one in ids.ravel()):
        ids = np.array(ids.tolist(), str)  # text of pandas, and NumPy's of any length
    if ids.dtype.kind not in "iuSU" or ids.ndim != 1:
        raise ValueError(
            f"user_ids must be integers or strings [N], got {ids.dtype} with {ids.ndim} axes"
        )
    if len(ids) != len(source):
        raise ValueError("user_ids must name one user for each record, got another number of them")
    # owner[i] is the user of record i, and place[i] its number within the user, in random order.
    _, owner = np.unique(ids, return_inverse=True)
    counts = np.bincount(owner)
    place = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    # The n-th record of every user has one priority: a user's records alone decide which are kept.
    rng = np.random.Philox(key=arguments.integer("seed", seed, least=0))
    priority = rng.random_raw(int(counts.max(initial=0)))
    order = np.argsort(owner, kind="stable")
    order = order[np.lexsort((priority[place], owner[order]))]
    kept = np.minimum(counts, k)
    return source, order[place < k], np.cumsum(kept) - kept, k
