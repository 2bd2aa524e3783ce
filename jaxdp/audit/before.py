"""``jaxdp.check``: the user's own loss and pipeline, run on neighbouring data."""

import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxdp.audit import draws, independence, loss, pipeline, start
from jaxdp.audit import neighbours as near
from jaxdp.audit.findings import Checked, Finding, in_order, line_in
from jaxdp.clipping import clipped_grad
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sampling import Source, as_source
from jaxdp.types import PyTree

# Of ``jaxdp.clipped_grad``, but for the loss and the rule, which the mechanism gives.
_CLIPPING = tuple(inspect.signature(clipped_grad).parameters)[2:]


def check(
    loss_fn: Callable[..., jax.Array] | None,
    params: PyTree,
    source: Source | PyTree,
    mechanism: Mechanism | Algorithm,
    *,
    gradients: Callable[[PyTree, PyTree], PyTree] | None = None,
    build: Callable[[PyTree], pipeline.Built] | None = None,
    preprocess: Callable[[PyTree], PyTree] | None = None,
    raw: PyTree | None = None,
    public: Mapping[str, Callable[[PyTree], PyTree]] | None = None,
    loader: Callable[[int], Iterable[PyTree]] | None = None,
    collate: Callable[[list[PyTree]], PyTree] | None = None,
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
    if (loss_fn is None) == (gradients is None):
        named = [None if f is None else line_in(f) or repr(f) for f in (loss_fn, gradients)]
        raise ValueError(f"give one of loss_fn and gradients, got {named[0]} and {named[1]}")
    functions: dict[str, Callable[..., PyTree] | None] = {
        "loss_fn": loss_fn,
        "gradients": gradients,
        "build": build,
        "preprocess": preprocess,
        "loader": loader,
        "collate": collate,
    }
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
    if public is not None and not isinstance(public, Mapping):
        raise ValueError(
            "public must be a mapping from names to functions of the records, got "
            f"{type(public).__name__}"
        )
    functions |= {f"public[{name!r}]": value for name, value in (public or {}).items()}
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ValueError(f"{name} must be a function or None, got {function!r}")
    if unknown := sorted(set(clipping) - set(_CLIPPING)):
        raise ValueError(
            f"{unknown[0]} must be an argument of jaxdp.check or one of {', '.join(_CLIPPING)}, "
            f"got {clipping[unknown[0]]!r}"
        )
    kind, source = type(source), as_source(source)
    inner = mechanism.mechanism if isinstance(mechanism, Algorithm) else mechanism
    inner.check_unit(source)

    # What a gradient is made of: the loss, the records as they are read, or gradients of one's own.
    found: list[Finding | None] = []
    tested: list[str] = []
    assumed: list[str] = []
    if loss_fn is not None:
        of_loss, assumed = loss.of_loss(loss_fn, params, source, mechanism, clipping)
        found += of_loss
        tested += [
            "the loss: refusals, state, what it captured, first values of its parameters, its "
            "examples in other company"
        ]
    found.append(pipeline.reading(source, 6, kind))
    tested += ["reading: the same records in other company, and again"]
    if gradients is not None:
        found.append(independence.of_gradients(gradients, params, near.records_of(source, 6)))
        tested += ["per-example gradients: rows in other company, in other places, and again"]

    # Functions that are given many records, on neighbouring data sets.
    data = near.records_of(source, pipeline.RECORDS) if raw is None else raw
    data = near.take(data, np.arange(min(near.count(data), pipeline.RECORDS)))

    def differ(one: pipeline.Built, two: pipeline.Built) -> str:
        """Words on how two results of ``build`` differ: parameters, or the program; "" if not."""
        made = [each if isinstance(each, tuple) else (each, params) for each in (one, two)]
        if not near.same(made[0][1], made[1][1]):
            return "the parameters differ"
        traced = [
            loss.trace(mechanism.clipped_grad(f, **clipping), p, source.example) for f, p in made
        ]
        return loss.difference(*traced)

    if preprocess is not None:
        found.append(pipeline.preprocessing(preprocess, data))
        tested += ["preprocessing of neighbouring data sets"]
    if build is not None:
        found.append(pipeline.builds(build, data, differ))
        tested += ["the loss made of neighbouring data sets"]
    if public:
        found += [pipeline.public_value(name, function, data) for name, function in public.items()]
        tested += [f"public values of neighbouring data sets: {', '.join(public)}"]
    if collate is not None:
        records = [near.record(data, i) for i in range(near.count(data))]
        found.append(pipeline.collating(collate, records))
        tested += ["collating a record with others"]
    if loader is not None:
        found.append(draws.of_loader(loader, inner, start.columns(source)))
        tested += ["three epochs of the loader, beside the sampling that is charged"]
    return Checked(in_order(found), tuple(tested), tuple(assumed), time.perf_counter() - began)
