"""``jaxdp.check``: runs the user's own loss and pipeline on neighbouring data."""

import functools
import hashlib
import itertools
import math
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxdp.audit.bounds import binomial_pmf
from jaxdp.audit.broken import find_broken
from jaxdp.audit.copies import check_preprocess, find_copies
from jaxdp.audit.examined import Examined, require_program, sample
from jaxdp.audit.findings import Checked, Finding, certain_first
from jaxdp.clipping import ClippedGrad, losses, statistics
from jaxdp.clipping.ghost import program
from jaxdp.clipping.options import trained_flags
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sampling import FixedSize, Poisson, Source, as_source
from jaxdp.sampling import neighbours as near
from jaxdp.sampling.source import ArraySource
from jaxdp.training import start
from jaxdp.training.lines import line_of_error, line_of_function, line_of_use
from jaxdp.types import PyTree

# What a function makes of records: a loss, or (loss, parameters).
Built = Callable[..., jax.Array] | tuple[Callable[..., jax.Array], PyTree]
_RECORDS = 256  # of neighbouring data sets
_ROWS = 6  # of a batch in which an example is looked at beside other records
_ROUNDING = 1e-3  # of the clip bound; a record that sees others is off by far more
_MANY = 16  # records, from which on numbers that are all unlike name them
_EPOCHS, _UNLIKELY = 3, 1e-6  # of a loader; the chance below which it cannot draw as charged


def check(
    loss_fn: Callable[..., jax.Array] | None,
    params: PyTree,
    source: Source | PyTree,
    mechanism: Mechanism | Algorithm,
    *,
    gradients: Callable[[PyTree, PyTree], PyTree] | None = None,
    build: Callable[[PyTree], Built] | None = None,
    preprocess: Callable[[PyTree], PyTree] | None = None,
    raw: PyTree | None = None,
    public: Mapping[str, Callable[[PyTree], PyTree]] | None = None,
    loader: Callable[[int], Iterable[PyTree]] | None = None,
    collate: Callable[[list[PyTree]], PyTree] | None = None,
    same: Callable[[PyTree], Hashable] | None = None,
    **clipping: Any,
) -> Checked:
    """Runs a loss and its pipeline on neighbouring data; returns what breaks the guarantee.

    And what is broken in the program, so that records add nothing: gradients that are not finite,
    and the line where that begins, or zero; a loss that needs a batch.

    Nothing is charged and nothing released: what it prints is for the owner of the data. It finds
    breaches that its tests reach, each named in ``Checked.tested``; it proves nothing. The tests
    are differential (the same example beside other records; neighbouring data sets), as in Cebere
    et al. 2026 (Re:cord-play, arXiv:2602.17454v1).

    Args:
        loss_fn: the loss of one example, as for ``jaxdp.Trainer``; None with ``gradients``.
        params: pytree of the parameters.
        source: the records, as for ``jaxdp.Trainer``.
        mechanism: from ``jaxdp.dp_sgd``, or a ``jaxdp.Algorithm``.
        gradients: in place of a loss: your own ``(params, rows) -> per-example gradients``
            [m, ...], as ``jaxdp.clip_and_sum`` takes them.
        build: from records to a loss, or to (loss, parameters), where a function makes them.
        preprocess: from all records to all records, as it is applied before ``source``.
        raw: what ``preprocess``, ``build`` and ``public`` are given: a pytree of arrays [n, ...] or
            a list of records; None gives them those of ``source``. The first 256 are used.
        public: functions of the records whose results are used as public constants, by name: a
            clip bound, a schedule, a vocabulary.
        loader: from a seed to the batches of one epoch (positions [k], or records), where another
            loader than jaxdp's draws.
        collate: from a list of records to a batch, where one is used; it is given those of ``raw``
            or ``source``.
        same: from one record to a hashable key that near duplicates, or records of one person,
            share, such as a name or a rounded row.
        clipping: as for ``jaxdp.Trainer``: ``trainable``, ``constants``, ``rng_name``, ``engine``.

    Raises:
        ValueError: an argument is not what it should be; the loss cannot be used at all.

    Example:
        >>> data = {"x": jnp.ones((1_000, 3)), "y": jnp.ones(1_000)}
        >>> loss_fn = lambda w, example: (example["x"] @ w - example["y"]) ** 2
        >>> mechanism = jaxdp.dp_sgd(
        ...     noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=100, dataset_size=1_000
        ... )
        >>> jaxdp.check(loss_fn, jnp.zeros(3), data, mechanism).ok
        True
    """
    began = time.perf_counter()

    # Arguments, before anything of the user's runs.
    if (loss_fn is None) == (gradients is None):
        raise ValueError(f"give one of loss_fn and gradients, got {loss_fn!r} and {gradients!r}")
    if not isinstance(raw, list | NoneType):
        leaves = jax.tree.leaves(raw)
        if not leaves or not all(np.ndim(leaf) for leaf in leaves):
            raise ValueError(
                "raw must be a list of records, or a pytree of arrays [n, ...], got "
                f"{type(raw).__name__}"
            )
    if public is not None and not isinstance(public, Mapping):
        raise ValueError(
            f"public must be a mapping from names to functions of the records, got {public!r}"
        )
    functions: dict[str, Callable[..., PyTree] | None] = {
        **{"loss_fn": loss_fn, "gradients": gradients, "build": build, "preprocess": preprocess},
        **{f"public[{name!r}]": function for name, function in (public or {}).items()},
        **{"loader": loader, "collate": collate, "same": same},
    }
    inner, grad_fn = require_program("jaxdp.check", functions, mechanism, clipping)
    kind, source = type(source), as_source(source)
    inner.check_privacy_unit(source)

    # What a gradient is made of: the loss, the records as they are read, or gradients of one's own.
    found: list[Finding | None] = []
    assumed: list[str] = []
    if grad_fn is not None:
        of_loss, assumed = _check_loss(grad_fn, params, source)
        found += of_loss
        if not any(finding.kind in ("refused", "state") for finding in of_loss):
            chain = mechanism.after_noise if isinstance(mechanism, Algorithm) else None
            some = sample(source, _RECORDS)
            found += find_broken(Examined(grad_fn, params, inner, chain, some))
    found.append(_check_reading(source, kind))
    found += find_copies(source, same, inner)
    if gradients is not None:
        found.append(_check_gradients(gradients, params, near.records_of(source, _ROWS)))

    # Functions that are given many records, on neighbouring data sets.
    data = near.records_of(source, _RECORDS) if raw is None else raw
    data = near.take(data, np.arange(min(near.count(data), _RECORDS)))

    def compare_neighbours(
        kind: str,
        function: Callable[[PyTree], PyTree],
        differ: Callable[[PyTree, PyTree, near.Neighbour], str],
    ) -> Finding | None:
        """The first neighbour on which a result differs in a way that has words."""
        made = function(data)
        for pair in near.neighbours(data):
            if words := differ(made, function(pair.data), pair):
                return Finding(kind, f"{words} {pair.words}", line_of_function(function))
        return None

    if preprocess is not None:
        found += check_preprocess(preprocess, data, inner)
    if build is not None:

        def describe_other_loss(one: Built, two: Built, _: near.Neighbour) -> str:
            """Neither parameters nor the program of the loss may differ."""
            made = [each if isinstance(each, tuple) else (each, params) for each in (one, two)]
            if not near.same(made[0][1], made[1][1]):
                return "the parameters are others"
            traced = (
                _trace_loss(mechanism.clipped_grad(f, **clipping), p, source.example)
                for f, p in made
            )
            at = _first_difference(*traced)
            return "" if at is None else f"the loss is another{at and f', at {at},'}"

        found.append(compare_neighbours("captured", build, describe_other_loss))
    for name, function in (public or {}).items():

        def describe_other_value(
            one: PyTree, two: PyTree, _: near.Neighbour, name: str = name
        ) -> str:
            """A public value may not differ."""
            return "" if near.same(one, two) else f"{name} is another value"

        found.append(compare_neighbours("public", function, describe_other_value))
    if collate is not None:
        found.append(_check_collate(collate, near.each(data)))
    if loader is not None:
        found.append(_check_loader(loader, inner, source))
    tests = {
        "the loss: refusals, state, what it captured, first values of its parameters, its examples "
        "beside other records, gradients that are not finite or zero, units that are off": loss_fn,
        "reading: the same records beside other records, and again": source,
        "copies of records, and records that share a key": source,
        "per-example gradients: rows beside other records, in other places, and again": gradients,
        "preprocessing of neighbouring data sets": preprocess,
        "the loss made of neighbouring data sets": build,
        f"public values of neighbouring data sets: {', '.join(public or ())}": public or None,
        "collating a record with others": collate,
        "three epochs of the loader, beside the sampling that is charged": loader,
    }
    tested = tuple(words for words, given in tests.items() if given is not None)
    return Checked(certain_first(found), tested, tuple(assumed), time.perf_counter() - began)


# The loss -------------------------------------------------------------------------------------


def _check_loss(
    grad_fn: ClippedGrad, params: PyTree, source: Source
) -> tuple[list[Finding], list[str]]:
    """(findings on a loss, what it captured and is taken to be public)."""
    here, example, plan = line_of_function(grad_fn.loss_fn), source.example, None

    # What jaxdp refuses itself; and state, if it fails when it is traced again, or already where it
    # kept a value of an earlier call.
    shape = lambda leaf: jax.ShapeDtypeStruct((_ROWS, *leaf.shape), leaf.dtype)  # noqa: E731
    try:
        plan = grad_fn.plan(params, jax.tree.map(shape, example))
        first, second = (_trace_loss(grad_fn, params, example) for _ in range(2))
    except Exception as error:
        words = str(error)
        if isinstance(error, ValueError) and words.startswith("loss_fn must not"):
            where = _line_of_refusal(words, grad_fn, params, example)
            return [Finding("refused", words, where or here)], []
        if plan is None and "racer" not in type(error).__name__:
            raise  # it is the user's own
        words = "the loss fails when it is called again: " + words.partition("\n")[0]
        return [Finding("state", words, line_of_error(error) or here)], []

    # State that shows as a value of an earlier call, or as another program.
    for part in (*losses.traced_functions(first), *losses.traced_functions(second)):
        for var, value in zip(part.jaxpr.constvars, part.consts, strict=False):
            if isinstance(value, jax.core.Tracer):
                words = f"the loss uses a value {list(value.shape)} of an earlier call"
                return [Finding("state", words, line_of_use(part.jaxpr, var))], []
    if (at := _first_difference(first, second)) is not None:
        words = "the loss is another function each time it is called"
        return [Finding("state", words, at or here)], []

    # Arrays and first values that are statistics of the records, and keys for all examples.
    known = start.records_in_memory(source) or start.sample_records(source, 512)
    made_of = functools.partial(statistics.match_statistic, records=known)
    found = []
    for one in losses.captured_from_records(first, made_of):
        where, words = (
            line_of_use(one.function.jaxpr, one.at),
            losses.describe_captured(one, len(source)),
        )
        do = losses.OF_RECORDS if one.match.whole else ""
        found.append(Finding("captured", words, where, one.match.certain, do))
    for name, made in start.compare_parameters(grad_fn, params, made_of, len(source)):
        do = losses.OF_RECORDS if made.whole else ""
        found.append(Finding("captured", f"{name} is {made.words}", here, made.certain, do))
    if not found:
        found += _find_lookups(grad_fn, params, source)
    found += _find_shared_keys(first)

    # Numbers: the same example beside other records; the loss was compared with all records above.
    if not found and len(source) > 1:
        with losses.inspecting(lambda traced, public, loss: None):
            coupled = _check_independence(grad_fn, params, near.records_of(source, _ROWS))
        found += [coupled] if coupled else []
    return found, list(dict.fromkeys(entry.assumed for entry in plan if entry.assumed))


def _trace_loss(grad_fn: ClippedGrad, params: PyTree, example: PyTree) -> core.ClosedJaxpr:
    """The loss of one example, traced anew."""
    called, *given = _called(grad_fn, params, example)
    return jax.make_jaxpr(lambda *args: called(*args))(*given)


def _called(grad_fn: ClippedGrad, params: PyTree, example: PyTree) -> tuple[Any, ...]:
    """(the loss of one example, what it is given: parameters, example, and its key if any)."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    called = functools.partial(losses.call, grad_fn.form, grad_fn.loss_fn)
    return called, params, example, *((key,) if grad_fn.takes_rng else ())


def _line_of_refusal(words: str, grad_fn: ClippedGrad, params: PyTree, example: PyTree) -> str:
    """The line of the operation that a refusal names, or of the loss's own error; else ""."""
    try:
        traced = _trace_loss(grad_fn, params, example)
    except Exception as error:
        return line_of_error(error)
    for part in losses.traced_functions(traced):
        for eqn in part.jaxpr.eqns:
            name = eqn.primitive.name.removesuffix("_call")
            if re.search(rf"(use|got) {name}\b", words):
                return line_of_use(part.jaxpr, eqn)
    return ""


def _first_difference(one: core.ClosedJaxpr, two: core.ClosedJaxpr) -> str | None:
    """The line of the first difference; "" for a captured array or another length; else None."""

    def number(value: PyTree) -> Hashable:
        """Shape, dtype and hash of a value: equal where the values are."""
        plain = np.asarray(jax.random.key_data(value) if losses.is_key(value) else value)
        return plain.shape, str(plain.dtype), hashlib.blake2b(plain.tobytes()).digest()

    def steps(traced: core.ClosedJaxpr) -> Iterator[tuple[Hashable, str]]:
        """(a description that is comparable between traces, its line) of every operation."""
        for part in losses.traced_functions(traced):
            for const in part.consts:
                yield number(const), ""
            for eqn in part.jaxpr.eqns:
                literals = tuple(number(a.val) for a in eqn.invars if isinstance(a, core.Literal))
                shapes = tuple(str(getattr(a, "aval", "")) for a in eqn.outvars)
                yield (eqn.primitive.name, literals, shapes), line_of_use(part.jaxpr, eqn)

    for left, right in itertools.zip_longest(steps(one), steps(two)):
        if left is None or right is None or left[0] != right[0]:
            return left[1] if left and right else ""
    return None


def _find_lookups(grad_fn: ClippedGrad, params: PyTree, source: Source) -> list[Finding]:
    """Suspicions for what a loss captured, or was given frozen, and looks up by a record's number.

    A number names its record where no two records have the same, and that is no chance of numbers
    drawn from as many as the array has rows. Token ids are other numbers.
    """
    traced = program.trace(*_called(grad_fn, params, source.example))
    whole, inputs = traced.program, traced.program.ins[traced.num_params :]
    flags = trained_flags(grad_fn.trainable, params)
    leaves = zip(whole.ins, jax.tree.leaves(params), flags, strict=False)
    frozen = [(at, leaf) for at, leaf, is_trained in leaves if not is_trained]
    tables = [
        (program.reached(whole, [at]), np.shape(table)[0], table)
        for at, table in (*frozen, *whole.consts.items())
        if np.ndim(table) and not grad_fn.constants.holds(table)
    ]
    columns = start.arrays_in_memory(source) or jax.tree.leaves(near.records_of(source, 512))
    for column, number in zip(columns, inputs, strict=False):
        flat, size = np.asarray(column).ravel(), len(column)
        names = flat.dtype.kind in "iu" and len(flat) == size >= _MANY
        if not tables or not names or len(np.unique(flat)) < size:
            continue
        consecutive = int(flat.max()) - int(flat.min()) == size - 1
        by_number = program.reached(whole, [number])
        for node in program.all_nodes(whole):
            by_it = any(program.depends(ref, by_number) for ref in node.ins[1:])
            if node.name not in ("gather", "dynamic_slice") or not by_it:
                continue
            for reached, rows, table in tables:
                likely = not consecutive and math.exp(-(size**2) / max(2 * rows, 1)) > _UNLIKELY
                if likely or rows not in node.shape_of(0):
                    continue
                if program.depends(node.ins[0], reached):
                    words = (
                        f"the loss captured an array {losses.describe_shape(table, len(source))}, "
                        "and looks it up by a number that is another one in each record: where its "
                        "rows are of persons, the loss of one reads others'"
                    )
                    where = line_of_use(traced.closed.jaxpr, node.eqn)
                    return [Finding("captured", words, where, False, losses.OF_RECORDS)]
    return []


def _find_shared_keys(traced: core.ClosedJaxpr) -> list[Finding]:
    """Suspicions for keys that the loss captured, or made of a number, and uses."""
    words = "the loss draws random numbers from a key that it captured, in place of its own"
    found = []
    for part in losses.traced_functions(traced):
        consts = zip(part.jaxpr.constvars, part.consts, strict=False)
        keys = {var for var, value in consts if losses.is_key(value)}
        for eqn in part.jaxpr.eqns:
            made = eqn.primitive.name == "random_seed" and isinstance(eqn.invars[0], core.Literal)
            if made or any(not isinstance(a, core.Literal) and a in keys for a in eqn.invars):
                found.append(Finding("key", words, line_of_use(part.jaxpr, eqn), certain=False))
    return found[:1]


# An example beside other records --------------------------------------------------------------


def _check_independence(grad_fn: ClippedGrad, params: PyTree, rows: PyTree) -> Finding | None:
    """Reports a record whose clipped contribution depends on the rest of the batch, or exceeds l2.

    Args:
        grad_fn: the clipped gradient.
        params: the parameters.
        rows: pytree of NumPy arrays [m, ...], m >= 2.
    """
    # A clipped sum without its noise: of one record alone, of the same with other rows beside it
    # that do not take part, and of all others. The first two must be equal, and what the record
    # adds to the others must be the first again, within l2.
    size, line = near.count(rows), line_of_function(grad_fn.loss_fn)
    key = jax.random.key(0, impl="threefry2x32") if grad_fn.takes_rng else None

    @jax.jit
    def summed(rows: PyTree, mask: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """(the clipped sum of the masked rows, float32 [d]; its l2)."""
        found = grad_fn(params, rows, mask, key)
        leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(found.value)]
        return jnp.concatenate([leaf.astype(jnp.float32) for leaf in leaves]), jnp.asarray(found.l2)

    whole, l2 = (np.asarray(v, np.float64) for v in summed(rows, np.ones(size, bool)))
    for at in sorted({0, size // 2, size - 1}):
        alone = np.arange(size) == at
        one, again, without = (
            np.asarray(summed(data, mask)[0], np.float64)
            for data, mask in ((rows, alone), (_replace_others(rows, at), alone), (rows, ~alone))
        )
        if _differ(one, again, l2):
            return Finding(
                "independence", "what a record adds changes when the other rows change", line
            )
        if _differ(whole - without, one, l2):
            return Finding("independence", "what a record adds changes when others take part", line)
        if (moved := float(np.linalg.norm(whole - without))) > float(l2) * (1 + _ROUNDING):
            words = (
                f"one record moves the clipped sum by {moved:.4g}, its bound is {float(l2):.4g} "
            )
            words += "(report it: jaxdp's own clipping should not allow that)"
            return Finding("sensitivity", words, line)
    return None


def _check_gradients(
    function: Callable[[PyTree, PyTree], PyTree], params: PyTree, rows: PyTree
) -> Finding | None:
    """Reports a row of the user's own per-example gradients that depends on other rows.

    Args:
        function: ``(params, rows) -> gradients`` [m, ...].
        params: the parameters.
        rows: pytree of NumPy arrays [m, ...], m >= 2.
    """
    size, line = near.count(rows), line_of_function(function)

    def grads(rows: PyTree) -> np.ndarray:
        """[m, d]; [0, 0] where the gradients have no axis of examples."""
        leaves = jax.tree.leaves(function(params, jax.tree.map(jnp.asarray, rows)))
        count = near.count(rows)
        if {np.shape(leaf)[:1] for leaf in leaves} != {(count,)}:
            return np.zeros((0, 0))
        flat = [np.reshape(np.asarray(v, np.float64), (count, -1)) for v in leaves]
        return np.concatenate(flat, axis=1)

    # Once more, and with the other rows changed: a row must stay what it was.
    first, again = grads(rows), grads(rows)
    if not len(first) or not len(again):
        words = f"gradients have first axes that differ from {size}: not one row for each example"
        return Finding("independence", words, line)
    scale = max(float(np.max(np.linalg.norm(first, axis=1))), 1e-30)
    if _differ(first, again, scale):
        return Finding("state", "gradients change when they are computed a second time", line)
    for at in sorted({0, size - 1}):
        if _differ(first[at], grads(_replace_others(rows, at))[at], scale):
            words = "the gradient of a row changes when the other rows change"
            return Finding("independence", words, line)

    # Fewer rows: all may change in proportion, or some in another way.
    half = max(1, size // 2)
    fewer = grads(near.take(rows, range(half)))
    if _differ(first[:half], fewer, scale):
        before = float(np.linalg.norm(first[:half]))
        ratio = float(np.linalg.norm(fewer)) / max(before, 1e-30)
        if before < _ROUNDING * scale or _differ(ratio * first[:half], fewer, ratio * scale):
            words = "the gradient of a row changes when other rows are left out"
            return Finding("independence", words, line)
        words = f"gradients of {half} rows are {ratio:.3g} times those of the same among {size}"
        return Finding("divisor", words, line)
    order = np.roll(np.arange(size), 1)
    if _differ(first[order], grads(near.take(rows, order)), scale):
        return Finding("independence", "the gradient of a row changes with its place", line)
    return None


def _replace_others(rows: PyTree, at: int) -> PyTree:
    """The rows, all but one of them replaced by the next one's, numbers made 3 times larger."""
    others = near.take(rows, np.roll(np.arange(near.count(rows)), 1))
    return near.put(near.scaled(others, 3), at, near.record(rows, at))


def _differ(one: np.ndarray, two: np.ndarray, scale: float | np.ndarray) -> bool:
    """True if two vectors differ by more than rounding; what is not finite is not compared."""
    if not (np.all(np.isfinite(one)) and np.all(np.isfinite(two))):
        return False
    return bool(np.max(np.abs(one - two), initial=0.0) > _ROUNDING * float(scale))


# Records as they come -------------------------------------------------------------------------


def _check_reading(source: Source, kind: type) -> Finding | None:
    """Reports records that read differently beside others, in another order, or again.

    Args:
        source: the records.
        kind: the type of what the user gave, for the line.
    """
    if isinstance(source, ArraySource) or len(source) < 2:
        return None
    size = min(_ROWS, len(source))
    rows = np.arange(size)
    seen: dict[int, PyTree] = {}
    for order in (rows, rows, rows[::-1], np.roll(rows, 1), rows[: size // 2], rows[size // 2 :]):
        try:
            found = source.gather(order, np.ones(len(order), bool))
        except ValueError as error:
            words = f"it refuses records that it gave before: {error}"
            return Finding("source", words, line_of_error(error))
        for place, row in enumerate(order):
            record = near.record(found, place)
            if not near.same(seen.setdefault(int(row), record), record):
                words = "a record reads differently beside other records, or a second time"
                return Finding(
                    "source", words, line_of_function(getattr(kind, "__getitem__", None))
                )
    return None


def _check_collate(
    collate: Callable[[list[PyTree]], PyTree], records: list[PyTree]
) -> Finding | None:
    """Reports a record whose row, or a shape, depends on the others of its batch."""
    order = sorted(range(len(records)), key=lambda i: near.measure(records[i])[1])
    shortest, middle, longest = (records[order[i]] for i in (0, len(order) // 2, -1))
    made = [collate([shortest, other]) for other in (shortest, longest, middle)]
    for one, two in itertools.combinations(made, 2):
        words, shapes = "", (near.shapes(one), near.shapes(two))
        if shapes[0] != shapes[1]:
            words = f"two records become {shapes[0]}, and two others {shapes[1]}"
        elif not near.same(*(jax.tree.map(lambda leaf: leaf[0], batch) for batch in (one, two))):
            words = "a record becomes another row when the other record of its batch changes"
        if words:
            return Finding("collate", words, line_of_function(collate))
    return None


def _check_loader(
    loader: Callable[[int], Iterable[PyTree]], mechanism: Mechanism, source: Source
) -> Finding | None:
    """Reports epochs that are improbable under the mechanism's sampling.

    Args:
        loader: from a seed to the batches of one epoch: integer positions [k], or records.
        mechanism: names the sampling.
        source: the records.
    """
    arrays = start.arrays_in_memory(source) or jax.tree.leaves(near.records_of(source, 512))
    columns = [np.asarray(column) for column in arrays]
    rate, records = mechanism.batch_size / mechanism.dataset_size, len(columns[0])
    steps = max(1, math.ceil(1 / rate)) if rate else 1

    def key(leaves: Sequence[np.ndarray], at: int) -> bytes:
        """The bytes of the record in row ``at``."""
        return b"".join(np.ascontiguousarray(leaf[at]).tobytes() for leaf in leaves)

    known = {key(columns, at): at for at in range(records)}

    def positions(batch: PyTree) -> np.ndarray:
        """The positions in a batch: itself where it is integers [k], else by the records' bytes."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
        if len(leaves) == 1 and leaves[0].ndim == 1 and leaves[0].dtype.kind in "iu":
            return leaves[0].astype(np.int64)
        if len(leaves) != len(columns):
            raise ValueError(
                "loader must give integer positions [k], or records like the source's "
                f"({len(columns)} arrays), got {len(leaves)} arrays"
            )
        cast = [leaf.astype(c.dtype) for leaf, c in zip(leaves, columns, strict=True)]
        # Padding, and records that were changed on the way, are none of them.
        places = (known.get(key(cast, i)) for i in range(len(cast[0])))
        return np.asarray([place for place in places if place is not None], np.int64)

    # Two signs of a loader that shuffles: batches of one size, and no record twice in an epoch.
    # Under the sampling that is charged both have a known probability.
    epochs = [
        [positions(batch) for batch in itertools.islice(loader(seed), steps)]
        for seed in range(_EPOCHS)
    ]
    sizes = [len(batch) for epoch in epochs for batch in epoch]
    if not isinstance(mechanism.sampling, Poisson | FixedSize) or not sizes:
        return None
    chance, seen_so = 1.0, []
    if isinstance(mechanism.sampling, Poisson):
        most = max(sizes.count(size) for size in set(sizes))
        if most >= len(sizes) - len(epochs):  # all alike, but for the end of an epoch
            chance *= binomial_pmf(records, rate)[round(rate * records)] ** most
            seen_so.append(f"{most} of {len(sizes)} batches have one size")
    seen = [np.concatenate([np.zeros(0, np.int64), *epoch]) for epoch in epochs]
    least = min(map(len, epochs))
    if all(len(np.unique(epoch)) == len(epoch) for epoch in seen) and least > 1:
        once = (1 - rate) ** least + least * rate * (1 - rate) ** (least - 1)
        chance *= once ** (records * len(seen))
        seen_so.append("no record comes twice in an epoch")
    if chance > _UNLIKELY:
        return None
    words = f"{' and '.join(seen_so)}, a chance of {chance:.1g} under the sampling that is charged"
    return Finding("sampling", words, line_of_function(loader))
