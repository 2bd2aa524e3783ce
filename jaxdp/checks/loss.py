"""Tests of a loss by its trace: what it refuses, what it remembers, what it captured."""

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxdp.checks import where
from jaxdp.checks.findings import Finding
from jaxdp.clipping import ClippedGrad, captured, coupling, frameworks, statistics
from jaxdp.types import PyTree


def trace(grad_fn: ClippedGrad, params: PyTree, example: PyTree) -> Any:
    """The loss of one example as a ``ClosedJaxpr``, traced anew."""
    key = (
        (jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")),)
        if grad_fn.takes_rng
        else ()
    )
    called = functools.partial(frameworks.called, grad_fn.form, grad_fn.loss_fn)
    return jax.make_jaxpr(lambda *args: called(*args))(params, example, *key)


def refused(error: ValueError, grad_fn: ClippedGrad, params: PyTree, example: PyTree) -> Finding:
    """The finding for a loss that jaxdp refuses; other errors are raised again."""
    words = str(error)
    if not words.startswith("loss_fn must not"):
        raise error
    return Finding(
        "refused",
        words.split(". ")[0].split(": it")[0],
        "an example's gradient could depend on other examples, or on records that it is not",
        _line_of(error, words, grad_fn, params, example),
        words.partition(". ")[2] or "compute the loss from its own example and public constants",
    )


def _line_of(
    error: ValueError, words: str, grad_fn: ClippedGrad, params: PyTree, example: PyTree
) -> str:
    """The line of the operation that the words name, else of the error, else of the loss."""
    try:
        traced = trace(grad_fn, params, example)
    except Exception as again:  # the loss's own errors stop it before it is traced
        return where.of_error(again) or where.of_function(grad_fn.loss_fn)
    for part in coupling.parts(traced):
        for eqn in part.jaxpr.eqns:
            name = eqn.primitive.name.removesuffix("_call")
            if f"use {name}," in words or f"got {name} over" in words:
                return where.of_operation(eqn)
    for var, value in zip(traced.jaxpr.constvars, traced.consts, strict=True):
        if f"{list(np.shape(value))}" in words or f"{len(np.shape(value))} axes" in words:
            return _use(traced, var)
    return where.of_error(error) or where.of_function(grad_fn.loss_fn)


def remembers(grad_fn: ClippedGrad, params: PyTree, example: PyTree, first: Any) -> list[Finding]:
    """Traces the loss once more: another program, or an error, shows state between calls."""
    try:
        second = trace(grad_fn, params, example)
    except Exception as error:  # whatever the loss raises the second time it did not the first
        return leaked(error, grad_fn)
    if kept := holds_tracers(first) or holds_tracers(second):
        return kept
    for one, two in zip(_steps(first), _steps(second), strict=False):
        if one[0] != two[0]:
            at = one[1] or where.of_function(grad_fn.loss_fn)
            return [_state("the loss is another function each time it is called", at)]
    if difference(first, second):
        at = where.of_function(grad_fn.loss_fn)
        return [_state("the loss is another function each time it is called", at)]
    return []


def holds_tracers(traced: Any) -> list[Finding]:
    """A finding for a loss that captured a value of an earlier call, or of what calls it."""
    for part in coupling.parts(traced):
        for var, value in zip(part.jaxpr.constvars, part.consts, strict=False):
            if isinstance(value, jax.core.Tracer):
                what = f"the loss uses a value {list(value.shape)} of an earlier call"
                return [_state(what, _use(part, var))]
    return []


def difference(one: Any, two: Any) -> str:
    """Words on how two traced losses differ; "" where they do not."""
    for left, right in zip(_steps(one), _steps(two), strict=False):
        if left[0] != right[0]:
            return f"an array or a number at {right[1]}" if right[1] else "a captured array"
    if sum(1 for _ in _steps(one)) != sum(1 for _ in _steps(two)):
        return "its operations"
    return ""


def leaked(error: Exception, grad_fn: ClippedGrad) -> list[Finding]:
    """The finding for a loss that raised although it was traced without an error before."""
    what = f"the loss fails when it is called again: {str(error).splitlines()[0]}"
    return [_state(what, where.of_error(error) or where.of_function(grad_fn.loss_fn))]


def _state(what: str, at: str) -> Finding:
    return Finding(
        "state",
        what,
        "it remembers something (a cache, a counter, a generator of NumPy), so that an example's "
        "gradient depends on what was computed before it",
        at,
        "compute the loss from (params, example) and its key alone; what changes with the step "
        "belongs into the optimizer's schedule",
    )


def _steps(traced: Any) -> Iterator[tuple[Any, str]]:
    """The meaning of each operation, comparable between traces, and the line that it comes from."""
    for part in coupling.parts(traced):
        for const in part.consts:
            yield _number(const), ""
        for eqn in part.jaxpr.eqns:
            literals = tuple(_number(a.val) for a in eqn.invars if isinstance(a, core.Literal))
            shapes = tuple(str(getattr(a, "aval", "")) for a in eqn.outvars)
            yield (eqn.primitive.name, literals, shapes), where.of_operation(eqn)


def _number(value: Any) -> Any:
    if captured.is_key(value):
        value = jax.random.key_data(value)
    plain = np.asarray(value)
    return plain.shape, str(plain.dtype), hashlib.blake2b(plain.tobytes()).digest()


def holds_records(
    traced: Any, made_of: Callable[..., statistics.Made | None], records: int
) -> list[Finding]:
    """Compares what the loss captured with the records, and with statistics of them.

    Args:
        traced: the loss.
        made_of: ``statistics.made_of``, of the records.
        records: their number.
    """
    return [
        _computed("captured", captured.named(found, records), line_of(found), found.made.certain)
        for found in captured.of_records(traced, made_of)
    ]


def parameters(
    grad_fn: ClippedGrad,
    params: PyTree,
    made_of: Callable[..., statistics.Made | None],
    records: int,
) -> Iterator[tuple[str, statistics.Made]]:
    """Compares parameters with the records, but for those that were declared public.

    Args:
        grad_fn: the clipped gradients.
        params: before the first step.
        made_of: ``statistics.made_of``, of the records.
        records: their number.

    Yields:
        (name, what of the records it is) of each that is no chance.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    # Of the parameters' own structure: where it has None itself, there is no leaf.
    structure: Any = jax.tree.structure(params)
    kept = structure.flatten_up_to(grad_fn.trained(params))
    for (path, leaf), trained in zip(leaves, kept, strict=True):
        if captured.is_key(leaf) or not captured.is_here(leaf):
            continue
        made = made_of(leaf)
        if made is not None and made.certain and not grad_fn.constants.holds_value(leaf):
            kind = "frozen parameter" if trained is None else "first value of the parameter"
            words = (kind, jax.tree_util.keystr(path), captured.shape_of(leaf, records))
            yield f"the {' '.join(filter(None, words))}", made


def begins_with_records(
    grad_fn: ClippedGrad,
    params: PyTree,
    made_of: Callable[..., statistics.Made | None],
    records: int,
) -> list[Finding]:
    """Compares the first values of the parameters, frozen or trained, with the records."""
    at = where.of_function(grad_fn.loss_fn)
    return [
        _computed("parameters", f"{name} is {made.words}", at, True)
        for name, made in parameters(grad_fn, params, made_of, records)
    ]


def _computed(kind: str, what: str, at: str, certain: bool) -> Finding:
    return Finding(
        kind,
        what,
        "every example's gradient then depends on the records it was computed from, which are "
        "neither clipped nor noised there",
        at,
        "use a public constant, or a charged release (jaxdp.preprocess)",
        certain,
    )


def line_of(found: captured.Found) -> str:
    """The line where a captured array enters an operation."""
    if hasattr(found.at, "primitive"):
        return where.of_operation(found.at)
    return _use(found.part, found.at)


def shared_keys(traced: Any, takes_rng: bool) -> list[Finding]:
    """A suspicion for a key that the loss captured, or made of a number, and uses."""
    for part in coupling.parts(traced):
        keys = {
            v for v, c in zip(part.jaxpr.constvars, part.consts, strict=False) if captured.is_key(c)
        }
        for eqn in part.jaxpr.eqns:
            made = eqn.primitive.name == "random_seed" and isinstance(eqn.invars[0], core.Literal)
            if made or any(not isinstance(a, core.Literal) and a in keys for a in eqn.invars):
                return [_shared(where.of_operation(eqn), takes_rng)]
    return []


def _shared(at: str, takes_rng: bool) -> Finding:
    have = "its argument for a key feeds something else" if takes_rng else "it takes no key"
    return Finding(
        "captured",
        f"the loss draws random numbers from a key that it captured ({have})",
        "all examples of all steps get the same numbers: no regularisation, and no guarantee if "
        "the key was made from records",
        at,
        "give the loss an argument rng (or key): each example then has a key of its own",
        certain=False,
    )


def _use(traced: Any, var: Any) -> str:
    """The line of the first operation that takes a captured array."""
    for eqn in getattr(traced, "jaxpr", traced).eqns:
        if any(atom is var for atom in eqn.invars):
            return where.of_operation(eqn)
    return ""
