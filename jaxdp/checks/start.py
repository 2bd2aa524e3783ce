"""The cheap form of the check, which a ``Trainer`` makes before its first step."""

import functools
import hashlib
from typing import Any

import jax
import numpy as np

from jaxdp._links import past_of
from jaxdp._passes import operations_of
from jaxdp.checks import loss, records
from jaxdp.clipping import ClippedGrad, captured, statistics
from jaxdp.clipping.ghost.plan import Plan
from jaxdp.ledger import Ledger
from jaxdp.sources import Source
from jaxdp.types import PyTree


def planned(
    grad_fn: Any,
    params: PyTree,
    source: Source,
    rows: int,
    first: bool = False,
    ledger: Ledger | None = None,
) -> tuple[Plan | tuple[()], float, "Guard"]:
    """The plan of the gradients, the operations of one example's loss, and the guard.

    Nothing is charged, and the loss is traced once.

    Args:
        grad_fn: the clipped gradients; () and 0 for any but jaxdp's own.
        params: the parameters.
        source: the records: compared with what enters the loss where they lie in memory; of others
            a few, where an array is as long as they are many.
        rows: of a physical batch.
        first: True where the parameters are those before the first step, and no releases.
        ledger: whose releases are not compared.

    Raises:
        ValueError: the loss cannot be used; it captured records or a statistic of them, not
            declared public, or the parameters hold some.
    """
    guard = Guard(source, ledger)
    if not isinstance(grad_fn, ClippedGrad):
        return (), 0.0, guard
    compared, operations = _Compared(source, ledger), 0.0

    def look(traced: Any, public: captured.Declared) -> None:
        nonlocal operations
        operations = operations_of(traced)
        guard.refuse(traced, public, compared)

    shape = lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype)  # noqa: E731
    with captured.looked_at(look):
        plan = grad_fn.plan(params, jax.tree.map(shape, source.example))
    compare = loss.parameters(grad_fn, params, compared.made_of, len(source)) if first else ()
    for name, made in compare:
        raise ValueError(
            f"params must not hold what was computed from the records, got: {name} is "
            f"{made.words}. Whatever is released of the model then depends on these records, which "
            "are neither clipped nor noised there. Begin with public numbers, or with a charged "
            "release of this ledger; if they are public all the same, or NumPy's copy of a release "
            "(jaxdp.preprocess), declare them: constants=array"
        )
    return plan, operations, guard


class Guard:
    """Refuses a loss that captured what was computed from records, whenever it is traced.

    Args:
        source: the records.
        ledger: whose releases are not compared.
    """

    def __init__(self, source: Source, ledger: Ledger | None = None) -> None:
        self._source, self._ledger = source, ledger
        self._passed: dict[Any, Any] = {}  # held, so that no other array can have their ``id``

    def look(self, traced: Any, public: captured.Declared) -> None:
        """Compares what a traced loss captured since it was traced before; ValueError."""
        self.refuse(traced, public, _Compared(self._source, self._ledger))

    def refuse(self, traced: Any, public: captured.Declared, compared: "_Compared") -> None:
        """As ``look``, with the records that were looked up."""
        new: dict[Any, Any] = {}

        def made_of(value: Any) -> statistics.Made | None:
            if (key := _key(value)) in self._passed:
                return None
            new[key] = value
            return compared.made_of(value)

        for found in captured.of_records(traced, made_of, public):
            if found.made.certain:
                raise captured.refusal(found, len(self._source), loss.line_of(found))
        self._passed |= new


def _key(value: Any) -> Any:
    """A key that tells arrays apart: numbers and NumPy's arrays by content."""
    if isinstance(value, jax.Array) and value.shape:
        return id(value)
    plain = np.asarray(value)
    return plain.shape, str(plain.dtype), hashlib.blake2b(plain.tobytes()).digest()


class _Compared:
    """Compares arrays with the records of a source, which are looked up when there is one.

    Releases that the ledger holds are computed from the records, and paid for.
    """

    def __init__(self, source: Source, ledger: Ledger | None) -> None:
        self._source, self._ledger = source, ledger

    @functools.cached_property
    def _known(self) -> statistics.KnownRecords | None:
        return records.known(self._source)

    @functools.cached_property
    def _sampled(self) -> statistics.KnownRecords:
        return records.sampled(self._source)

    def made_of(self, value: Any) -> statistics.Made | None:
        """Compares an array with the records; see ``statistics.made_of``."""
        if self._ledger is not None and self._ledger.holds(past_of(value) or b""):
            return None
        if self._known is not None:
            return statistics.made_of(value, self._known)
        size = len(self._source)
        if size and size in np.shape(value) and not _is_elsewhere(self._source):
            return statistics.made_of(value, self._sampled)
        return None


def _is_elsewhere(source: Source) -> bool:
    """True for records that lie on devices of other processes."""
    leaves = jax.tree.leaves(getattr(source, "arrays", ()))
    return any(isinstance(leaf, jax.Array) and not captured.is_here(leaf) for leaf in leaves)
