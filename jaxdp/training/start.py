"""Compares what enters a loss with the records; a ``Trainer`` does so before its first step."""

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxdp.clipping import ClippedGrad, losses, statistics
from jaxdp.clipping.ghost.plan import Plan
from jaxdp.clipping.options import REUSED, is_donated
from jaxdp.clipping.rules import check_rule
from jaxdp.devices import processes
from jaxdp.ledger import Ledger
from jaxdp.ledger.returned import find_past
from jaxdp.sampling import Source
from jaxdp.sampling import neighbours as near
from jaxdp.sampling.source import ArraySource, holds, named
from jaxdp.sampling.users import UserExamples, Users
from jaxdp.training.lines import line_of_use
from jaxdp.training.physical_batch import Work, numbers_of, operations_of, started_of
from jaxdp.types import PyTree

MadeOf = Callable[[PyTree], statistics.Match | None]
_IN_MEMORY = 2**26  # numbers that are copied at most


def inspect_loss(
    grad_fn: Callable[..., PyTree],
    params: PyTree,
    source: Source,
    rows: int,
    first: bool = False,
    ledger: Ledger | None = None,
) -> tuple[Plan | tuple[()], Work, "Guard"]:
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
        ValueError: the loss or the clipping rule cannot be used; the loss captured records or a
            statistic of them, not declared public; the parameters hold some, or begin with NaN.
    """
    trained = getattr(grad_fn, "trained", lambda given: given)(params) if first else None
    begin = jax.tree_util.tree_leaves_with_path(trained)
    unfit = (named(path) for path, leaf in begin if holds(leaf, "NaN"))
    if where := processes.first_said(lambda: ", ".join(unfit)):
        raise ValueError(
            f"params must hold numbers to begin with where they are trained, got NaN in {where}: "
            "every gradient would be NaN and count as zeros, so that training would add noise to "
            "it and nothing else. See what they were computed or loaded from; a model that has "
            "diverged begins anew, with a smaller learning rate"
        )
    guard = Guard(source, ledger)
    if not isinstance(grad_fn, ClippedGrad):
        return (), Work(), guard
    check_rule(grad_fn.rule, grad_fn.trained(params))
    made_of, work = guard.comparison(), Work()

    def look(traced: core.ClosedJaxpr, public: losses.Constants, loss: core.ClosedJaxpr) -> None:
        nonlocal work
        # The parameters stand before the example; what is made of them alone, all rows share.
        own = len(jax.tree.leaves(params))
        varies = [at >= own for at in range(len(loss.jaxpr.invars))]
        numbers = sum(numbers_of(loss, varies))
        work = Work(operations_of(loss, varies), numbers, started_of(loss, varies))
        guard.look(traced, public, made_of)

    shape = lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype)  # noqa: E731
    with losses.inspecting(look):
        plan = grad_fn.plan(params, jax.tree.map(shape, source.example))
    compare = compare_parameters(grad_fn, params, made_of, len(source)) if first else ()
    for name, made in compare:
        way_out = (
            "begin with public numbers, or with a charged release of this ledger; if they are "
            "public all the same, or NumPy's copy of a release (jaxdp.preprocess), declare them: "
            "constants=array"
        )
        raise ValueError(
            f"params must not hold what was computed from the records, got: {name} is "
            f"{made.words}. Whatever is released of the model then depends on these records, which "
            f"are neither clipped nor noised there: {losses.OF_RECORDS if made.whole else way_out}"
        )
    return plan, work, guard


class Guard:
    """Refuses a loss that captured what was computed from records, whenever it is traced.

    Args:
        source: the records.
        ledger: whose releases are not compared.
    """

    def __init__(self, source: Source, ledger: Ledger | None = None) -> None:
        self._source, self._ledger = source, ledger
        # Held, so that no other array can have their ``id``.
        self._passed: dict[Hashable, PyTree] = {}

    def look(
        self,
        traced: core.ClosedJaxpr,
        public: losses.Constants,
        compared: MadeOf | None = None,  # of ``comparison``, with records looked up once
    ) -> None:
        """Compares what a traced loss captured since it was traced before; ValueError."""
        new: dict[Hashable, PyTree] = {}
        compared = compared or self.comparison()

        def made_of(value: PyTree) -> statistics.Match | None:
            if is_donated(value):
                raise ValueError(REUSED)
            # Arrays of JAX are told apart as objects, numbers and NumPy's arrays by content.
            key: Hashable = id(value)
            if not (isinstance(value, jax.Array) and value.shape):
                plain = np.asarray(value)
                key = plain.shape, str(plain.dtype), hashlib.blake2b(plain.tobytes()).digest()
            if key in self._passed:
                return None
            new[key] = value
            return compared(value)

        for found in losses.captured_from_records(traced, made_of, public):
            if found.match.certain:
                where = line_of_use(found.function.jaxpr, found.at)
                raise losses.captured_error(found, len(self._source), where)
        self._passed |= new

    def comparison(self) -> MadeOf:
        """A function that compares an array with the records, looked up when it is called.

        Releases that the ledger holds are computed from the records, and paid for.
        """
        source, ledger, size = self._source, self._ledger, len(self._source)
        arrays = jax.tree.leaves(getattr(source, "arrays", ()))
        every = functools.cache(lambda: records_in_memory(source))
        few = functools.cache(lambda: sample_records(source, 64))
        # Records that lie on devices of other processes are not read.
        here = all(not isinstance(v, jax.Array) or losses.is_readable(v) for v in arrays)

        def made_of(value: PyTree) -> statistics.Match | None:
            if ledger is not None and ledger.holds(find_past(value) or b""):
                return None
            if (records := every()) is not None:
                return statistics.match_statistic(value, records)
            if size and size in np.shape(value) and here:
                return statistics.match_statistic(value, few())
            return None

        return made_of


def compare_parameters(
    grad_fn: ClippedGrad, params: PyTree, made_of: MadeOf, records: int
) -> Iterator[tuple[str, statistics.Match]]:
    """Compares parameters with the records, but for those that were declared public.

    Args:
        grad_fn: the clipped gradients.
        params: before the first step.
        made_of: ``statistics.match_statistic``, of the records.
        records: their number.

    Yields:
        (name, what of the records it is) of each that is no chance.
    """
    # Leaves of the parameters' own structure: where it has None itself, there is none.
    structure: Any = jax.tree.structure(params)
    trained = structure.flatten_up_to(grad_fn.trained(params))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), is_trained in zip(leaves, trained, strict=True):
        if losses.is_key(leaf) or not losses.is_readable(leaf):
            continue
        made = made_of(leaf)
        if made is not None and made.certain and not grad_fn.constants.holds_value(leaf):
            kind = "frozen parameter" if is_trained is None else "first value of the parameter"
            words = (kind, jax.tree_util.keystr(path), losses.describe_shape(leaf, records))
            yield f"the {' '.join(filter(None, words))}", made


def records_in_memory(source: Source) -> statistics.KnownRecords | None:
    """All records, where they lie in this process's memory; nothing is read otherwise."""
    leaves = arrays_in_memory(source.source if isinstance(source, Users | UserExamples) else source)
    on_host = all(
        isinstance(leaf, np.ndarray) or all(on.platform == "cpu" for on in leaf.devices())
        for leaf in leaves
    )
    if not leaves or not (on_host or sum(leaf.size for leaf in leaves) <= _IN_MEMORY):
        return None
    return statistics.KnownRecords(leaves)


def sample_records(source: Source, most: int) -> statistics.KnownRecords:
    """A few records, evenly spaced, of a source that is read one by one."""
    return statistics.KnownRecords(jax.tree.leaves(near.records_of(source, most)))


def arrays_in_memory(source: Source) -> list[jax.Array | np.ndarray]:
    """The arrays of a source whose records lie in this process's memory; [] of another."""
    if not isinstance(source, ArraySource) or not len(source):
        return []
    leaves = jax.tree.leaves(source.arrays)
    # A memory map is a file.
    here = (
        isinstance(x, jax.Array) and losses.is_readable(x) or type(x) is np.ndarray for x in leaves
    )
    return leaves if all(here) else []
