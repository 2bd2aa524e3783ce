"""Tests of a loss by its trace: what it refuses, what it remembers, what it captured."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxdp.checks import statistics, where
from jaxdp.checks.findings import Finding
from jaxdp.clipping import ClippedGrad, captured, coupling, frameworks
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
    if _is_key(value):
        value = jax.random.key_data(value)
    plain = np.asarray(value)
    return plain.shape, str(plain.dtype), hashlib.blake2b(plain.tobytes()).digest()


def holds_records(
    traced: Any,
    columns: Sequence[np.ndarray],
    public: captured.Declared | None = None,
    scalars: bool = True,
) -> list[Finding]:
    """Compares what the loss captured with the records, and with statistics of them.

    Args:
        traced: the loss.
        columns: the records, one array [n, ...] for every leaf.
        public: arrays that are not looked at; None looks at all.
        scalars: False leaves single numbers out, which are never certain.
    """
    found = []
    for part in coupling.parts(traced):
        consts = dict(zip(part.jaxpr.constvars, part.consts, strict=True)) if part.consts else {}
        for var, value in consts.items():
            if public is None or not public.holds(value):
                found += _compared(value, columns, _use(part, var))
        for eqn in part.jaxpr.eqns:
            for atom in eqn.invars:
                if isinstance(atom, core.Literal) and (scalars or np.size(atom.val) > 1):
                    found += _compared(atom.val, columns, where.of_operation(eqn))
    return found


def _compared(value: Any, columns: Sequence[np.ndarray], at: str) -> list[Finding]:
    if _is_key(value):
        return []
    words, certain = statistics.equal_to(np.asarray(value), columns)
    if not words:
        return []
    shape = list(np.shape(value))
    return [
        Finding(
            "captured",
            f"a constant {shape} in the loss is {words}" if shape else f"a number is {words}",
            "every example's gradient then depends on the records it was computed from, which are "
            "neither clipped nor noised there",
            at,
            "use a public constant, or a charged release (jaxdp.preprocess)",
            certain,
        )
    ]


def shared_keys(traced: Any, takes_rng: bool) -> list[Finding]:
    """A suspicion for a key that the loss captured, or made of a number, and uses."""
    for part in coupling.parts(traced):
        keys = {v for v, c in zip(part.jaxpr.constvars, part.consts, strict=False) if _is_key(c)}
        for eqn in part.jaxpr.eqns:
            made = eqn.primitive.name == "random_seed" and isinstance(eqn.invars[0], core.Literal)
            if made or any(not isinstance(a, core.Literal) and a in keys for a in eqn.invars):
                return [_shared(where.of_operation(eqn), takes_rng)]
    return []


def _is_key(value: Any) -> bool:
    return bool(jax.numpy.issubdtype(jax.numpy.result_type(value), jax.dtypes.prng_key))


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
