"""``jaxdp.check``: the user's own loss and pipeline, run on neighbouring data."""

import functools
import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxdp.checks import company, drawing, loss, pipeline, records, where
from jaxdp.checks import neighbours as near
from jaxdp.checks.findings import Checked, Finding, in_order
from jaxdp.clipping import ClippedGrad, captured, clipped_grad, statistics
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sources import Source, as_source
from jaxdp.types import PyTree

_ROWS = 6  # of the test of gradients
# Of ``jaxdp.clipped_grad``, but for the loss and the rule, which the mechanism gives.
_CLIPPING = tuple(inspect.signature(clipped_grad).parameters)[2:]


def check(
    loss_fn: Callable[..., Any] | None,
    params: PyTree,
    source: Any,
    mechanism: Mechanism | Algorithm,
    *,
    gradients: Callable[..., Any] | None = None,
    build: Callable[[Any], Any] | None = None,
    preprocess: Callable[[Any], Any] | None = None,
    raw: Any = None,
    public: Mapping[str, Callable[[Any], Any]] | None = None,
    loader: Callable[[int], Iterable[Any]] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    **clipping: Any,
) -> Checked:
    """Runs a loss and its pipeline on neighbouring data, and tells what breaks the guarantee.

    Nothing is charged and nothing released: what it prints is for the owner of the data. It finds
    breaches that its tests reach, each named in ``Checked.tested``; it proves nothing. The tests
    are differential (the same example in other company; neighbouring data sets), as in Cebere et
    al. 2026 (Re:cord-play, arXiv:2602.17454v1).

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
        clipping: as for ``jaxdp.Trainer``: ``trainable``, ``constants``, ``rng_name``, ``engine``.

    Raises:
        ValueError: an argument is not what it should be; the loss cannot be used at all.

    Example:
        >>> data = {"x": jnp.ones((1_000, 3)), "y": jnp.ones(1_000)}
        >>> loss_fn = lambda w, example: (example["x"] @ w - example["y"]) ** 2
        >>> mechanism = jaxdp.dp_sgd(1.0, 1.0, 100, 1_000)
        >>> jaxdp.check(loss_fn, jnp.zeros(3), data, mechanism).ok
        True
    """
    began = time.perf_counter()
    _require_one(loss_fn, gradients)
    _require_functions(
        loss_fn=loss_fn, gradients=gradients, build=build, preprocess=preprocess, loader=loader,
        collate=collate,
    )  # fmt: skip
    _require_rest(mechanism, raw, public, clipping)
    given, source = source, as_source(source)
    inner = mechanism.mechanism if isinstance(mechanism, Algorithm) else mechanism
    inner.check_unit(source)
    found: list[Finding] = []
    tested: list[str] = []
    assumed: list[str] = []
    if loss_fn is not None:
        more, assumed = _of_loss(loss_fn, params, source, mechanism, clipping)
        found += more
        tested += [
            "the loss: refusals, state, what it captured, first values of its parameters, its "
            "examples in other company"
        ]
    found += pipeline.reading(source, 6, type(given))
    tested += ["reading: the same records in other company, and again"]
    if gradients is not None:
        found += company.per_example(gradients, params, near.records_of(source, _ROWS))
        tested += ["per-example gradients: rows in other company, in other places, and again"]
    data = near.records_of(source, pipeline.RECORDS) if raw is None else raw
    made = _Differ(source, mechanism, params, clipping)
    tests, more = _of_pipeline(data, preprocess, build, made, public, collate)
    found, tested = found + more, tested + tests
    if loader is not None:
        rule = mechanism.mechanism if isinstance(mechanism, Algorithm) else mechanism
        found += drawing.loader(loader, rule, records.columns(source))
        tested += ["three epochs of the loader, beside the sampling that is charged"]
    return Checked(in_order(found), tuple(tested), tuple(assumed), time.perf_counter() - began)


def _of_pipeline(
    data: Any,
    preprocess: Callable[[Any], Any] | None,
    build: Callable[[Any], Any] | None,
    differ: Callable[[Any, Any], str],
    public: Mapping[str, Callable[[Any], Any]] | None,
    collate: Callable[[list[Any]], Any] | None,
) -> tuple[list[str], list[Finding]]:
    """(names of the tests, findings) of the functions that are given many records."""
    found: list[Finding] = []
    tested = []
    if preprocess is not None:
        found += pipeline.preprocessing(preprocess, data)
        tested += ["preprocessing of neighbouring data sets"]
    if build is not None:
        found += pipeline.builds(build, data, differ)
        tested += ["the loss made of neighbouring data sets"]
    if public:
        found += pipeline.public_values(public, data)
        tested += [f"public values of neighbouring data sets: {', '.join(public)}"]
    if collate is not None:
        found += pipeline.collating(collate, _listed(data))
        tested += ["collating a record with others"]
    return tested, found


def _require_one(loss_fn: Any, gradients: Any) -> None:
    if (loss_fn is None) == (gradients is None):
        raise ValueError(
            f"give one of loss_fn and gradients, got {_named(loss_fn)} and {_named(gradients)}"
        )


def _require_functions(**given: Any) -> None:
    for name, function in given.items():
        if function is not None and not callable(function):
            raise ValueError(f"{name} must be a function or None, got {function!r}")


def _require_rest(mechanism: Any, raw: Any, public: Any, clipping: dict[str, Any]) -> None:
    if not isinstance(mechanism, Mechanism | Algorithm):
        raise ValueError(
            f"mechanism must come from jaxdp.dp_sgd, or be a jaxdp.Algorithm, got {mechanism!r}"
        )
    if raw is not None and not isinstance(raw, list):
        leaves = jax.tree.leaves(raw)
        if not leaves or not all(np.ndim(leaf) for leaf in leaves):
            raise ValueError(
                "raw must be a list of records, or a pytree of arrays [n, ...], got "
                f"{type(raw).__name__}"
            )
    if public is not None:
        if not isinstance(public, Mapping):
            raise ValueError(
                "public must be a mapping from names to functions of the records, got "
                f"{type(public).__name__}"
            )
        _require_functions(**{f"public[{name!r}]": value for name, value in public.items()})
    if unknown := sorted(set(clipping) - set(_CLIPPING)):
        raise ValueError(
            f"{unknown[0]} must be an argument of jaxdp.check or one of {', '.join(_CLIPPING)}, "
            f"got {clipping[unknown[0]]!r}"
        )


def _of_loss(
    loss_fn: Callable[..., Any],
    params: PyTree,
    source: Source,
    mechanism: Mechanism | Algorithm,
    clipping: dict[str, Any],
) -> tuple[list[Finding], list[str]]:
    grad_fn = mechanism.clipped_grad(loss_fn, **clipping)
    if not isinstance(grad_fn, ClippedGrad):
        raise ValueError(
            "mechanism must clip the gradients of one loss to be checked, got one whose "
            f"clipped_grad is a {type(grad_fn).__name__}"
        )
    example = source.example
    try:
        plan = grad_fn.plan(params, _shapes(example, _ROWS))
    except ValueError as error:
        return [loss.refused(error, grad_fn, params, example)], []
    except Exception as error:
        if "racer" not in type(error).__name__:
            raise
        return loss.leaked(error, grad_fn), []
    first = _traced_again(grad_fn, params, example)
    if isinstance(first, list):
        return first, []
    if found := loss.remembers(grad_fn, params, example, first):
        return found, []
    known = records.known(source) or records.sampled(source, 512)
    made_of = functools.partial(statistics.made_of, records=known)
    found = loss.holds_records(first, made_of, len(source))
    found += loss.begins_with_records(grad_fn, params, made_of, len(source))
    found += loss.shared_keys(first, grad_fn.takes_rng)
    if not found and len(source) > 1:
        with captured.compared_before():
            found += company.clipped(grad_fn, params, near.records_of(source, _ROWS))
    return found, [entry.assumed for entry in plan if entry.assumed]


def _traced_again(grad_fn: ClippedGrad, params: PyTree, example: PyTree) -> Any:
    try:
        return loss.trace(grad_fn, params, example)
    except Exception as error:  # it was traced before, for the plan
        return loss.leaked(error, grad_fn)


class _Differ:
    """Tells how two results of ``build`` differ: parameters, captured arrays, operations."""

    def __init__(
        self, source: Source, mechanism: Any, params: PyTree, clipping: dict[str, Any]
    ) -> None:
        self._example, self._mechanism = source.example, mechanism
        self._params, self._clipping = params, clipping

    def __call__(self, one: Any, two: Any) -> str:
        """Words on how they differ; "" where they do not."""
        losses, starts = zip(*(self._parts(made) for made in (one, two)), strict=True)
        if not near.same(*starts):
            return "the parameters differ"
        traced = [
            loss.trace(self._mechanism.clipped_grad(f, **self._clipping), p, self._example)
            for f, p in zip(losses, starts, strict=True)
        ]
        return loss.difference(*traced)

    def _parts(self, made: Any) -> tuple[Any, PyTree]:
        return made if isinstance(made, tuple) else (made, self._params)


def _shapes(example: PyTree, rows: int) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype), example)


def _listed(data: Any) -> list[Any]:
    return (
        data if isinstance(data, list) else [near.record(data, i) for i in range(near.count(data))]
    )


def _named(function: Any) -> str:
    return "None" if function is None else where.of_function(function) or repr(function)
