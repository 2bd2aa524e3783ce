"""Tests of a loss by its trace: what it refuses, what it remembers, what it captured."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxdp.audit import independence, start
from jaxdp.audit import neighbours as near
from jaxdp.audit.findings import Finding, line_in, line_of_error, line_of_operation
from jaxdp.clipping import ClippedGrad, captured, coupling, losses, statistics
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sampling import Source
from jaxdp.types import PyTree

_ROWS = 6  # of the test of gradients


def of_loss(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    source: Source,
    mechanism: Mechanism | Algorithm,
    clipping: Mapping[str, PyTree],
) -> tuple[list[Finding], list[str]]:
    """(findings on a loss, what it captured and is taken to be public).

    Args:
        loss_fn: the loss of one example.
        params: before the first step.
        source: the records.
        mechanism: clips its gradients.
        clipping: further arguments of ``jaxdp.clipped_grad``.

    Raises:
        ValueError: the loss cannot be used, or the mechanism clips no gradient of one loss.
    """
    grad_fn = mechanism.clipped_grad(loss_fn, **clipping)
    if not isinstance(grad_fn, ClippedGrad):
        raise ValueError(
            "mechanism must clip the gradients of one loss to be checked, got one whose "
            f"clipped_grad is a {type(grad_fn).__name__}"
        )
    here, example = line_in(loss_fn), source.example

    # What jaxdp refuses itself, or cannot trace because the loss kept a value of an earlier call.
    shape = lambda leaf: jax.ShapeDtypeStruct((_ROWS, *leaf.shape), leaf.dtype)  # noqa: E731
    try:
        plan = grad_fn.plan(params, jax.tree.map(shape, example))
    except ValueError as error:
        return [_refused(error, grad_fn, params, example)], []
    except Exception as error:
        if "racer" not in type(error).__name__:
            raise
        return [_leaked(error, here)], []

    # State: another program, an error, or a value of an earlier call, when it is traced again.
    try:
        first, second = (trace(grad_fn, params, example) for _ in range(2))
    except Exception as error:  # it was traced before, for the plan
        return [_leaked(error, here)], []
    for part in (*coupling.parts(first), *coupling.parts(second)):
        for var, value in zip(part.jaxpr.constvars, part.consts, strict=False):
            if isinstance(value, jax.core.Tracer):
                words = f"the loss uses a value {list(value.shape)} of an earlier call"
                return [_state(words, start.line_of_use(part.jaxpr, var))], []
    if (found := _first_difference(first, second)) is not None:
        return [_state("the loss is another function each time it is called", found or here)], []

    # Arrays and first values that are statistics of the records, and keys for all examples.
    known = start.known(source) or start.sampled(source, 512)
    made_of = functools.partial(statistics.made_of, records=known)
    seen = [
        _computed("captured", captured.named(one, len(source)), start.line_of(one), one.made)
        for one in captured.of_records(first, made_of)
    ]
    for name, made in start.parameters(grad_fn, params, made_of, len(source)):
        seen.append(_computed("parameters", f"{name} is {made.words}", here, made))
    if key := _shared_key(first, grad_fn.takes_rng):
        seen.append(key)

    # Numbers: the same example in other company.
    if not seen and len(source) > 1:
        with captured.compared_before():
            coupled = independence.of_clipped(grad_fn, params, near.records_of(source, _ROWS))
        seen += [coupled] if coupled else []
    return seen, [entry.assumed for entry in plan if entry.assumed]


def trace(grad_fn: ClippedGrad, params: PyTree, example: PyTree) -> core.ClosedJaxpr:
    """The loss of one example, traced anew."""
    key = (
        (jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")),)
        if grad_fn.takes_rng
        else ()
    )
    called = functools.partial(losses.called, grad_fn.form, grad_fn.loss_fn)
    return jax.make_jaxpr(lambda *args: called(*args))(params, example, *key)


def difference(one: core.ClosedJaxpr, two: core.ClosedJaxpr) -> str:
    """Words on how two traced losses differ; "" where they do not."""
    found = _first_difference(one, two)
    if found is None:
        return ""
    return f"an array or a number at {found}" if found else "a captured array, or its operations"


def _first_difference(one: core.ClosedJaxpr, two: core.ClosedJaxpr) -> str | None:
    """The line of the first difference, "" for a captured array or another length; or None."""
    first, second = list(_steps(one)), list(_steps(two))
    for (left, line), (right, _) in zip(first, second, strict=False):
        if left != right:
            return line
    return "" if len(first) != len(second) else None


def _steps(traced: core.ClosedJaxpr) -> Iterator[tuple[tuple[Any, ...], str]]:
    """The meaning of each operation, comparable between traces, and the line that it comes from."""

    def number(value: PyTree) -> tuple[tuple[int, ...], str, bytes]:
        plain = np.asarray(jax.random.key_data(value) if captured.is_key(value) else value)
        return plain.shape, str(plain.dtype), hashlib.blake2b(plain.tobytes()).digest()

    for part in coupling.parts(traced):
        for const in part.consts:
            yield number(const), ""
        for eqn in part.jaxpr.eqns:
            literals = tuple(number(a.val) for a in eqn.invars if isinstance(a, core.Literal))
            shapes = tuple(str(getattr(a, "aval", "")) for a in eqn.outvars)
            yield (eqn.primitive.name, literals, shapes), line_of_operation(eqn)


def _refused(error: ValueError, grad_fn: ClippedGrad, params: PyTree, example: PyTree) -> Finding:
    """The finding for a loss that jaxdp refuses; other errors are raised again."""
    words = str(error)
    if not words.startswith("loss_fn must not"):
        raise error

    def line() -> str:
        """Of the operation or the captured array that the words name, else of the error."""
        try:
            traced = trace(grad_fn, params, example)
        except Exception as again:  # the loss's own errors stop it before it is traced
            return line_of_error(again)
        for part in coupling.parts(traced):
            for eqn in part.jaxpr.eqns:
                name = eqn.primitive.name.removesuffix("_call")
                if f"use {name}," in words or f"got {name} over" in words:
                    return line_of_operation(eqn)
        for var, value in zip(traced.jaxpr.constvars, traced.consts, strict=True):
            if f"{list(np.shape(value))}" in words or f"{len(np.shape(value))} axes" in words:
                return start.line_of_use(traced.jaxpr, var)
        return line_of_error(error)

    return Finding(
        "refused",
        words.split(". ")[0].split(": it")[0],
        "an example's gradient could depend on other examples, or on records that it is not",
        line() or line_in(grad_fn.loss_fn),
        words.partition(". ")[2] or "compute the loss from its own example and public constants",
    )


def _leaked(error: Exception, at: str) -> Finding:
    """The finding for a loss that raised although it was traced without an error before."""
    what = f"the loss fails when it is called again: {str(error).splitlines()[0]}"
    return _state(what, line_of_error(error) or at)


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


def _computed(kind: str, what: str, at: str, made: statistics.Made) -> Finding:
    return Finding(
        kind,
        what,
        "every example's gradient then depends on the records it was computed from, which are "
        "neither clipped nor noised there",
        at,
        "use a public constant, or a charged release (jaxdp.preprocess)",
        made.certain,
    )


def _shared_key(traced: core.ClosedJaxpr, takes_rng: bool) -> Finding | None:
    """A suspicion for a key that the loss captured, or made of a number, and uses."""
    have = "its argument for a key feeds something else" if takes_rng else "it takes no key"
    for part in coupling.parts(traced):
        consts = zip(part.jaxpr.constvars, part.consts, strict=False)
        keys = {var for var, value in consts if captured.is_key(value)}
        for eqn in part.jaxpr.eqns:
            made = eqn.primitive.name == "random_seed" and isinstance(eqn.invars[0], core.Literal)
            if made or any(not isinstance(a, core.Literal) and a in keys for a in eqn.invars):
                return Finding(
                    "captured",
                    f"the loss draws random numbers from a key that it captured ({have})",
                    "all examples of all steps get the same numbers: no regularisation, and no "
                    "guarantee if the key was made from records",
                    line_of_operation(eqn),
                    "give the loss an argument rng (or key): each example then has a key of its "
                    "own",
                    certain=False,
                )
    return None
