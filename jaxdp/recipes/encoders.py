"""Features by an encoder of your own, taken as public: a torch, Flax or ONNX network, any function.

Where a record's features are a function of that record and of public constants, computing them is
preprocessing record by record: it releases nothing and costs no privacy, as ``jaxdp.features`` has
it. Two things are then for the user to see to. That the function takes records one by one is tried
on a few of them. That its weights are public, learnt without the private records and without
anybody's who was promised protection, nobody can check from here: reports and ``unverified`` say so
with the encoder's name and the digest of its weights.
"""

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdp import arguments
from jaxdp.recipes import features

# Records that are computed alone and beside others first, and the share of the largest feature by
# which rounding, of 32 bits, may change one, and of its own: batch statistics change it by tenths.
_TRIED, _ROUNDING, _OF_OWN = 4, 1e-3, 3e-2
# What counts as a feature's own size at least, of the largest one's: rounding is of what it was
# made of.
_SMALL = 1e-2
# Of public probes: the key that they are drawn with, numbers that are kept of their features, and
# the share by which another machine may change those (other weights change them by tenths).
_PROBES, _KEPT, _ALIKE = 49, 8, 1e-2
_QUIET = 30.0  # seconds, beyond which a computation says how long it takes


@dataclasses.dataclass(frozen=True, eq=False)
class Encoder:
    """An encoder that is taken as public: called on records, it returns their features.

    Privacy: the features of a record must be a function of that record alone. With ``rows`` 1 each
    is computed by itself, and no other record can have a part in its last digit, unless ``encode``
    remembers. With more, an encoder that takes them one by one may still round a record by its
    neighbours, which the words of the report say. Before the rest a few records are computed
    alone, beside others, in another order and twice, and once more after all: other numbers, beyond
    rounding, are refused. What is said then names no record and no number of one.

    Attributes:
        encode: from records [k, ...], k = ``rows``, to their features [k, ...], numbers of NumPy,
            JAX, torch or lists, at least one axis a record. It is given copies, and the last
            records filled up with copies of the last one to ``rows``.
        name: public words for the report, such as "efficientnet-lite0, trained on ImageNet".
        rows: records of one call.
        weights: None, or the encoder's: a file, or a pytree of arrays. The report names its digest.

    Raises:
        ValueError: an argument is not what it should be; when it is called, features that are not
            finite numbers of one shape, or that mix records.

    Example:
        >>> mean_of = jaxdp.encoders.Encoder(lambda x: x.mean(axis=2), "means of rows")
        >>> mean_of(np.ones((100, 28, 28))).shape
        (100, 28)
    """

    encode: Callable[[Any], Any]
    name: str
    rows: int = 1
    weights: Any = None
    _calls: list[None] = dataclasses.field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.encode):
            raise ValueError(
                "encode must be a function from records to numbers, got "
                f"{arguments.described(self.encode)}"
            )
        if not isinstance(self.name, str) or len(self.name.splitlines()) != 1:
            raise ValueError(f"name must be a line of words for the report, got {self.name!r}")
        arguments.integer("rows", self.rows, least=1)

    def __call__(self, records: Any) -> np.ndarray:
        """The features of each record, float32 [n, ...] on the host.

        Args:
            records: anything with ``len`` and slices: an array or memory map [n, ...], or a list;
                at least one.

        Raises:
            ValueError: no records, or features that are not as they must be.
        """
        count, rows = len(records), self.rows
        if not count:
            raise ValueError("records must be at least one, got none")
        places = np.unique(np.linspace(0, count - 1, min(_TRIED, count), dtype=int))
        few = [records[i : i + 1] for i in places]
        shape = self._tried(few, records)
        found = np.empty((count, *shape), np.float32)
        began, said = time.monotonic(), False
        for start in range(0, count, rows):
            part = records[start : start + rows]
            found[start : start + len(part)] = self._computed(part, shape)
            spent = time.monotonic() - began
            if not said and spent > 1:
                said, whole = True, spent * count / (start + rows)
                if whole > _QUIET:
                    words = f"jaxdp: features by {self.name} take about {whole / 60:.0f} min"
                    print(words, file=sys.stderr)
        after = np.concatenate([self._computed(each, shape) for each in few])
        self._require_same(after, found[places], "after all others")
        self._calls[:] = [None]
        return found

    def __str__(self) -> str:
        """Public words: the name, the digest of the weights, how records are computed."""
        kept = "" if self.weights is None else f" (weights sha256 {digest(self.weights)[:16]})"
        if self.rows == 1:
            return f"{self.name}{kept}, one record at a time"
        return (
            f"{self.name}{kept}, {self.rows} records at a time, which may round the last digits of "
            "one by its neighbours"
        )

    def _tried(self, few: list[Any], records: Any) -> tuple[int, ...]:
        """The shape of a record's features; refuses an encoder that mixes these few with others.

        They are from everywhere: the first ones may all be alike.
        """
        # Of one at a time, others beside it are for usefulness alone: an encoder may take no more.
        many = self if self.rows > 1 else dataclasses.replace(self, rows=_TRIED)
        few = few[: many.rows]
        beside = _joined([*few, records[: many.rows - len(few)]])
        shape = self._computed(few[0]).shape[1:]
        alone = np.concatenate([self._computed(each, shape) for each in few])
        again = np.concatenate([self._computed(each, shape) for each in few[::-1]])[::-1]
        self._require_same(alone, again, "the second time")
        try:
            together = [many._computed(beside, shape), many._computed(beside[::-1], shape)[::-1]]
        except Exception:
            if self.rows > 1:
                raise
            return shape
        for other in together:
            self._require_same(alone, other[: len(few)], "beside other records")
        if self.rows > 1 and not isinstance(beside, list) and beside.dtype.kind == "f":
            # In whole numbers by a batch's largest one, as of networks in 8 bits, neighbours of its
            # own size do not show.
            faint = (0.01 * np.asarray(few[0])).astype(beside.dtype)
            pair = self._computed(_joined([faint, beside[: self.rows - 1]]), shape)
            self._require_same(self._computed(faint, shape), pair[:1], "beside larger ones")
        return shape

    def _require_same(self, alone: np.ndarray, other: np.ndarray, when: str) -> None:
        """Raises ValueError for features that differ by more than rounding; names no number."""
        change = np.abs(other - alone).max(0).ravel()
        own = np.abs(np.concatenate([alone, other])).max(0).ravel()  # alone, all may be centred
        least = min(_SMALL * own.max(), np.quantile(own[own > 0], 0.25) if own.any() else 0)
        by_own = (change <= _OF_OWN * np.maximum(own, least)).all()
        if by_own and change.max() <= _ROUNDING * own.max():
            return
        raise ValueError(
            f"encode must give a record the same features alone, beside others and twice, got "
            f"others {when} from {self.name}: it would mix records, and the guarantee of each be "
            "lost. Usual causes: a torch model in training, with batch normalisation or dropout "
            "(call model.eval()), Flax without use_running_average=True and deterministic=True, "
            "numbers standardised over a batch, or 8 or 16 bits and several rows (rows=1 is exact)"
        )

    def _computed(self, part: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """The features of at most ``rows`` records; refused where they are not of one shape."""
        count, filled = len(part), _copied(part)
        if missing := self.rows - count:
            filled = _joined([filled, *[filled[-1:]] * missing])
        try:
            found = np.asarray(_on_host(self.encode(filled)))
        except Exception as error:
            error.add_note(f"raised by the encoder {self.name}, given {_kind(filled)}")
            raise
        wanted = f"[{self.rows}, ...]" if shape is None else str([self.rows, *shape])
        if found.ndim < 2 or len(found) != self.rows or shape not in (None, found.shape[1:]):
            raise ValueError(
                f"encode must return numbers {wanted}, a row for each of {self.rows} records, got "
                f"shape {list(found.shape)} from {self.name}, given {_kind(filled)}"
            )
        if found.dtype.kind not in "fiubV":  # V: bfloat16 and its like
            raise ValueError(f"encode must return numbers, got {found.dtype} from {self.name}")
        with np.errstate(over="ignore"):
            numbers = found[:count].astype(np.float32)
        if not np.isfinite(numbers).all():  # without the record: it is private
            raise ValueError(
                f"encode must return finite numbers, got one that is not from {self.name}"
            )
        return numbers


def public(encoder: Encoder | str) -> str:
    """The sentence for ``unverified`` and reports: what the encoder is taken for.

    ``trainer.ledger.trust(jaxdp.encoders.public(encoder))`` says it of a loop of your own;
    ``jaxdp.Run(..., features=encoder)`` of a run.

    Args:
        encoder: or public words for one.

    Raises:
        ValueError: anything else.
    """
    words = str(encoder)
    if not isinstance(encoder, Encoder | str) or len(words.splitlines()) != 1:
        raise ValueError(
            "features must be an Encoder or a line of words for one, got "
            f"{arguments.described(encoder)}"
        )
    return (
        f"records are features of an encoder that was taken as public: {words}; nothing here can "
        "check what it learnt from"
    )


def require_used(encoder: Encoder | str | None) -> None:
    """Raises ValueError for an encoder that no records were given to: a run does not do it."""
    if isinstance(encoder, Encoder) and not encoder._calls:
        raise ValueError(
            f"features must be an Encoder that made the records' numbers, source=(encoder(x), y), "
            f"or words where they were made before; got {encoder.name}, which was never called"
        )


def in_words(encoder: Encoder | str) -> str:
    """The report's line on features of an encoder; arguments as for ``public``."""
    return f"{encoder}; taken as public, and computed before training, at no cost in privacy"


def digest(weights: Any) -> str:
    """SHA-256, in hexadecimal digits, of a file, or of a pytree of arrays: names, kinds, numbers.

    Args:
        weights: a path, or a pytree of arrays that lie on the host.

    Raises:
        ValueError: a leaf that is no array, such as a torch module.
    """
    if isinstance(weights, str | os.PathLike):
        with Path(weights).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    found = hashlib.sha256()
    for keys, leaf in jax.tree_util.tree_leaves_with_path(weights):
        array = np.asarray(_on_host(leaf))
        if array.dtype.kind == "O":  # whose bytes are where it lies in memory
            raise ValueError(
                "weights must be a file or a pytree of arrays, such as model.state_dict(), got "
                f"a {type(leaf).__name__}"
            )
        found.update(f"{jax.tree_util.keystr(keys)} {array.dtype} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


# Features by name, as a configuration has them.


def by_name(name: str, images: np.ndarray, known: Mapping[str, Any] | None = None) -> np.ndarray:
    """The features ``name`` of each record: ``jaxdp.features.by_name``, or an encoder of one's own.

    Args:
        name: one of ``jaxdp.features.NAMES``, or as for ``named``.
        images: [n, ...].
        known: of an encoder of one's own what ``probed`` returned when the run was begun.

    Raises:
        ValueError: as theirs; an encoder whose features of public probes are others than then.
    """
    if known is None:
        return features.by_name(name, images)
    encoder, now = named(name), probed(name, images.shape[1:])
    then = np.array(known["numbers"])
    same = now["shape"] == list(known["shape"])
    if not same or np.abs(now["numbers"] - then).max() > _ALIKE * np.abs(then).max():
        raise ValueError(
            f"features must be those that the run was begun with, {known['words']}; got others "
            f"from {name}, now {now['words']}"
        )
    # Test records there may be none of.
    return encoder(images) if len(images) else np.zeros((0, *now["shape"]), np.float32)


def shape_of(
    name: str, example_shape: tuple[int, ...], known: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """The shape of one record's features; arguments as for ``by_name``."""
    if known is not None:
        return tuple(known["shape"])
    if ":" in name:
        return tuple(probed(name, example_shape)["shape"])
    return features.shape_of(name, example_shape)


def named(name: str) -> Encoder:
    """The encoder that "package.module:function" or "file.py:function" names.

    A file is executed once in a process, as long as it is the same; the name is looked up anew.

    Args:
        name: of a function from records to features, or of an ``Encoder``.

    Raises:
        ValueError: there is none.
    """
    place, _, attribute = name.rpartition(":")
    try:
        if place.endswith(".py"):
            path = Path(place).absolute()  # in the folder of now, which an error then names
            module = _of_file(str(path), path.read_bytes())
        else:
            module = importlib.import_module(place)
        found = functools.reduce(getattr, attribute.split("."), module)
    except (OSError, ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise ValueError(
            "features must name a function or an Encoder, package.module:function or "
            f"file.py:function, got {name!r}: {error}"
        ) from error
    return found if isinstance(found, Encoder) else Encoder(found, name)


@functools.lru_cache(maxsize=2)
def _of_file(path: str, content: bytes) -> Any:
    """The module in a file of this content, under a name that no other file and no import has."""
    name = f"{Path(path).stem}_{hashlib.sha256(path.encode() + content).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as dataclasses in it ask
    try:
        # Not by its loader, which may take code that was compiled of an earlier content.
        exec(compile(content, path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def probed(name: str, example_shape: tuple[int, ...]) -> dict[str, Any]:
    """Public constants of an encoder, for a configuration: words, shape, numbers of public probes.

    The probes are random numbers in [0, 1] of the records' shape; the numbers are a few sums of
    their features with random signs, by which other weights are told from another machine's digits.

    Args:
        name: as for ``named``.
        example_shape: of one record.
    """
    encoder, rng = named(name), np.random.Generator(np.random.Philox(key=_PROBES))
    found = encoder(rng.random((_TRIED, *example_shape), np.float32)).astype(np.float64)
    signs = rng.choice([-1.0, 1.0], (found.size, _KEPT))
    numbers = found.ravel() @ signs / found.size**0.5
    return {"words": str(encoder), "shape": list(found.shape[1:]), "numbers": numbers.tolist()}


def _copied(records: Any) -> Any:
    """A copy that the encoder may write to, as torch does in place; a list stays a list."""
    return list(records) if isinstance(records, list | tuple) else np.array(records)


def _joined(parts: list[Any]) -> Any:
    """Records of several slices in one list or array."""
    if isinstance(parts[0], list | tuple):
        return [record for part in parts for record in part]
    return np.concatenate([np.asarray(part) for part in parts])


def _on_host(value: Any) -> Any:
    """Numbers that NumPy reads: a torch tensor without its gradient, off its device, as float32."""
    if hasattr(value, "detach"):
        return value.detach().cpu().float().numpy()
    if isinstance(value, list | tuple) and any(hasattr(each, "detach") for each in value):
        return [_on_host(each) for each in value]
    return value


def _kind(records: Any) -> str:
    if isinstance(records, list):
        return f"a list of {len(records)}"
    return f"an array {records.dtype} {list(records.shape)}"
