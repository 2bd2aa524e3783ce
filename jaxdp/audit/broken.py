"""Mistakes in a program by which records add nothing, or parameters learn nothing."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from jaxdp.audit.advice import find_delta
from jaxdp.audit.examined import Examined
from jaxdp.audit.findings import Finding
from jaxdp.clipping.ghost import program
from jaxdp.clipping.ghost.program import Node, Program, Ref, Traced
from jaxdp.clipping.rules import Clip
from jaxdp.sampling import neighbours as near
from jaxdp.training.lines import line_of_operation
from jaxdp.types import PyTree

_NEARLY = 0.9  # of the records, from which on zero gradients are told
_MOST_UNITS = 2 / 3  # of a layer may be off; half are, where the inputs' mean outweighs the rest
_LARGE = 30.0  # root of the mean square of a feature; bytes have about 100
_SCALED = 128.0  # a constant factor of the loss from which on it is a loss scale
_STEPS = 20  # of the optimizer, before a leaf that has not moved is looked at in mid-run
_UNROLLED = 5_000  # operations of a loop that are run one by one, for the line
_INSIDE = "let labels lie in [0, classes), tokens in [0, vocabulary)"
# Operations that hand their first operand on, value by value.
_MOVING = {
    *("broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "rev"),
    *("squeeze", "stop_gradient", "transpose"),
}
_TAKING = {"dynamic_slice", "gather", "slice"}  # and a part of it
# Operations of floating-point numbers through which no derivative passes.
_FLAT = {"ceil", "floor", "round", "sign", "stop_gradient"}


def find_broken(e: Examined) -> list[Finding]:
    """Mistakes by which records add nothing, or parameters learn nothing; worst first.

    Nothing in their words is computed from the records but their ``count``; [] says that none of
    these tests found anything.

    Args:
        e: the program and the records.
    """
    unfit = [name for name, leaf in zip(e.names, e.trained(), strict=True) if not _is_finite(leaf)]
    if unfit:
        words = f"the first values of {_listed(unfit)} are not finite"
        do = "begin with finite numbers; a run that became NaN begins anew"
        return [Finding("nonfinite", words, "", do=do, weight=1.0)]

    key = e.keys(np.arange(1))[0]
    loss = program.trace(e.loss, e.trained(), near.record(e.records, 0), key, differentiated=True)
    here = _gradients_at(e, e.trained())
    nearby = functools.cache(lambda: _gradients_at(e, _perturbed(e.trained())))
    units = list(_find_units(e, loss, here))
    found = [
        *_find_nonfinite(e, here),
        *_find_zero(e, loss, here, nearby, bool(units)),
        *_find_dead(e, loss, here, nearby, bool(units)),
        *units,
        *_find_softmax(loss),
        *_find_loss_scale(e, loss, here),
        *_find_inputs(e, loss),
        *_find_in_optimizer(e),
        *find_delta(e.mechanism),
    ]
    if not any(finding.kind == "labels" for finding in found):
        found += _find_indices(e, loss)
    return sorted(found, key=lambda finding: (not finding.certain, -finding.weight))


# Gradients of the records ---------------------------------------------------------------------


class _Gradients(NamedTuple):
    """Signs of the per-example gradients of m records."""

    finite: np.ndarray  # bool [m]; the loss is, too: XLA may make a gradient 0 that is NaN
    moved: np.ndarray  # bool [m]; finite, and not exactly zero
    norms: np.ndarray  # float32 [m]
    losses: np.ndarray  # [m]
    touched: list[np.ndarray]  # bool, as each trained leaf: not zero in some finite gradient


@jax.jit
def _signs(
    losses: jax.Array, grads: list[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    """The ``_Gradients`` of a batch of losses [b] and gradients [b, ...]."""
    flat = [jnp.reshape(leaf.astype(jnp.float32), (len(leaf), -1)) for leaf in grads]
    each = [jnp.all(jnp.isfinite(v), axis=1) for v in flat]
    finite = functools.reduce(jnp.logical_and, each, jnp.isfinite(losses))
    some = [(leaf != 0) & jnp.expand_dims(finite, range(1, leaf.ndim)) for leaf in grads]
    moved = [jnp.any(jnp.reshape(leaf, (len(leaf), -1)), axis=1) for leaf in some]
    squares = functools.reduce(jnp.add, [jnp.sum(jnp.square(v), axis=1) for v in flat])
    touched = [jnp.any(leaf, axis=0) for leaf in some]
    return finite, functools.reduce(jnp.logical_or, moved), jnp.sqrt(squares), losses, touched


def _gradients_at(e: Examined, trained: list[jax.Array]) -> _Gradients:
    """The signs of all records' gradients at some parameters."""
    parts = [jax.device_get(_signs(part.losses, part.grads)) for part in e.gradients(trained)]
    finite, moved, norms, losses = (np.concatenate([part[i] for part in parts]) for i in range(4))
    leaves = zip(*(part[4] for part in parts), strict=True)
    touched = [functools.reduce(np.logical_or, each) for each in leaves]
    return _Gradients(finite, moved, norms, losses, touched)


def _perturbed(trained: list[jax.Array]) -> list[jax.Array]:
    """Parameters nearby: where a factor begins at zero, as in LoRA, what it multiplies moves."""
    rng = np.random.default_rng(0)

    def one(leaf: jax.Array) -> jax.Array:
        value = np.asarray(leaf, np.float32)
        size = 0.05 * (0.1 + math.sqrt(np.mean(np.square(value)))) if value.size else 0.0
        return jnp.asarray(value + size * rng.normal(size=value.shape)).astype(leaf.dtype)

    return [one(leaf) for leaf in trained]


# Gradients that are not finite ----------------------------------------------------------------


def _find_nonfinite(e: Examined, here: _Gradients) -> Iterator[Finding]:
    """Gradients that are not finite, and where in the loss, or in the record, that begins."""
    wrong, size = ~here.finite, len(e)
    own = np.zeros(size, bool)  # records that are not finite themselves
    for leaf in jax.tree.leaves(e.records):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            own |= ~np.isfinite(leaf.reshape(size, -1).astype(np.float32)).all(axis=1)
    for mask in (wrong & own, wrong & ~own):
        if not mask.any():
            continue
        kind, words, where, do = _origin(e, int(np.argmax(mask)))
        count = (int(mask.sum()), size)
        yield Finding(kind, words, where, do=do, count=count, weight=max(0.5, count[0] / size))


class _Begin(NamedTuple):
    """The operation in which a number that is not finite begins, or the argument that holds it."""

    node: Node | None
    # Of an argument its place among all, and the operation that takes it.
    argument: int
    operands: Sequence[PyTree]
    made: Mapping[int, Node]
    values: Mapping[int, PyTree]


def _origin(e: Examined, row: int) -> tuple[str, str, str, str]:
    """(kind, words, line, remedy) of what makes the gradient of one record not finite."""
    record = jax.tree.map(jnp.asarray, near.record(e.records, row))
    args = (e.trained(), record, e.keys(np.array([row]))[0])
    traced = program.trace(jax.value_and_grad(e.loss), *args, differentiated=True)
    leaves = jax.tree.leaves(args)
    begin = _follow(traced.program, leaves)
    if begin is None:  # finite where it is computed operation by operation
        return "nonfinite", "the gradient is not finite", "", ""
    if begin.node is None or begin.argument >= 0:
        names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(record)]
        at = begin.argument - len(args[0])
        name = names[at] if 0 <= at < len(names) else ""
        words = f"the records hold NaN or infinity{name and f', in {name}'}, and the loss takes it"
        do = (
            "leave such records out by a rule that looks at one record alone, or put a number in "
            "its place before it is used: y = jnp.where(jnp.isnan(y), 0.0, y), and a mask after "
            "(jnp.where on the result leaves the gradient NaN)"
        )
        return "nonfinite", words, _line(begin.node), do
    kind, words, do = _reason(begin)
    return kind, words, _line(begin.node), do


def _run(body: Program, args: Sequence[PyTree], only: set[int] | None = None) -> dict[int, PyTree]:
    """The value of every number of a program, or of those that ``only`` names."""
    values: dict[int, PyTree] = {**body.consts, **dict(zip(body.ins, args, strict=True))}
    for node in body.nodes:
        if only is None or not only.isdisjoint(node.outs):
            operands = [_value(ref, values) for ref in node.ins]
            values.update(zip(node.outs, program.apply_node(node, operands), strict=True))
    return values


def _value(ref: Ref, values: Mapping[int, PyTree]) -> PyTree:
    return ref.val if isinstance(ref, core.Literal) else values[ref]


def _follow(body: Program, args: Sequence[PyTree]) -> _Begin | None:
    """Runs a program, and follows a result that is not finite to where that begins."""
    values = _run(body, args)
    made = {number: node for node in body.nodes for number in node.outs}

    def worst(refs: Sequence[Ref]) -> int | None:
        """The one of some values that is NaN, else one that is infinite; None if all are finite."""
        wrong = [ref for ref in refs if isinstance(ref, int) and not _is_finite(values[ref])]
        return min(wrong, key=lambda ref: not bool(jnp.any(jnp.isnan(values[ref]))), default=None)

    at, taker = worst([ref for ref in body.outs if isinstance(ref, int)]), None
    while at is not None:
        node = made.get(at)
        if node is None:
            place = body.ins.index(at) if at in body.ins else -1
            return _Begin(taker, place, (), made, values)
        operands = [_value(ref, values) for ref in node.ins]
        source = worst(node.ins)
        if source is None:
            return _inside(node, operands) or _Begin(node, -1, operands, made, values)
        at, taker = source, node
    return None


def _inside(node: Node, operands: Sequence[PyTree]) -> _Begin | None:
    """The operation inside a loop, or a checkpoint; None where it cannot be told."""
    if len(node.bodies) != 1:
        return None
    body, carried = node.bodies[0], node.carried
    if node.name != program.SCAN:
        return _follow(body, operands)
    length = int(node.eqn.params["length"])
    if length * len(body.nodes) > _UNROLLED:
        return None
    steps = range(length)[::-1] if node.eqn.params["reverse"] else range(length)
    consts, carry = list(operands[: carried.start]), list(operands[carried])
    for step in steps:
        args = [*consts, *carry, *(leaf[step] for leaf in operands[carried.stop :])]
        if (begin := _follow(body, args)) is not None:
            return begin
        values = _run(body, args)
        carry = [_value(ref, values) for ref in body.outs[: len(carry)]]
    return None


def _reason(begin: _Begin) -> tuple[str, str, str]:
    """(kind, words, remedy) of an operation whose result is not finite, of finite operands."""
    node, operands, made = begin.node, begin.operands, begin.made
    assert node is not None
    name, sizes = node.name, [jnp.asarray(value) for value in operands if not _is_key(value)]

    def has_zero(at: int) -> bool:
        return at < len(sizes) and bool(jnp.any(sizes[at] == 0))

    # The forward operation whose derivative divides.
    source = _source(node.ins[-1], made) if node.ins else None
    of_log = any(
        n.name == "log" and node.ins and n.ins[0] == node.ins[-1] for n in set(made.values())
    )
    if node.out_dtype() in (jnp.float16, jnp.bfloat16):
        words = f"the loss overflows in {node.out_dtype()} ({name})"
        return "precision", words, ""
    if name == "gather":
        words = "an index, such as a label or a token, lies outside of what it indexes"
        return "labels", words, _INSIDE
    if name in ("log", "log1p") or (name == "div" and of_log):
        words = "the logarithm of 0, or of a negative number"
        do = "compute it from logits (jax.nn.log_softmax, log_sigmoid), or jnp.log(x + 1e-6)"
        return "nonfinite", words, do
    rooted = source is not None and source.name in ("sqrt", "rsqrt", "pow")
    if name in ("sqrt", "rsqrt", "cbrt", "pow") or (name == "div" and rooted and has_zero(1)):
        words, more = "a square root (a norm, a standard deviation) at 0", ""
        one = [n for n in set(made.values()) if _is_over_one(n) and _line(n) == _line(node)]
        if one:
            words += ", here of one entry"
            more = "; if that is the axis of the batch: the loss needs a batch, and gets one record"
        do = f"put a small number inside of it: jnp.sqrt(jnp.sum(x**2) + 1e-12){more}"
        return "nonfinite", words, do
    if (name in ("div", "rem") and has_zero(1)) or (name == "integer_pow" and has_zero(0)):
        do = "divide by jnp.maximum(count, 1): a mean over nothing is then 0"
        return "nonfinite", "a division by 0", do
    if name in ("exp", "exp2", "expm1", "sinh", "cosh"):
        do = "subtract the maximum first (jax.nn.softmax, logsumexp), or bound the exponent"
        return "nonfinite", "an exponential overflows", do
    if any(isinstance(ref, core.Literal) and not _is_finite(ref.val) for ref in node.ins):
        words = "an infinity that masks entries masks all of them"
        return "nonfinite", words, "mask by a large number, such as -1e9, or leave one entry"
    return "nonfinite", f"the first value that is not finite comes from {name}", ""


def _source(ref: Ref, made: Mapping[int, Node]) -> Node | None:
    """The operation that made a value, before it was moved, or multiplied by a constant."""
    node = made.get(ref) if isinstance(ref, int) else None
    while node is not None and (node.name in _MOVING or _constant(node) is not None):
        ints = [r for r in node.ins if isinstance(r, int)]
        node = made.get(ints[0]) if ints else None
    return node


def _constant(node: Node) -> float | None:
    """The number that an operation multiplies its only other operand by; None of other ones."""
    if node.name not in ("mul", "div") or len(node.ins) != 2:
        return None
    left, right = (
        float(ref.val) if isinstance(ref, core.Literal) and np.ndim(ref.val) == 0 else None
        for ref in node.ins
    )
    if node.name == "div":
        return 1 / right if right else None
    return left if left is not None else right


def _is_over_one(node: Node) -> bool:
    """True for a reduction over one entry."""
    if not node.name.startswith("reduce_") or not (axes := node.eqn.params.get("axes")):
        return False
    return math.prod(node.shape_of(0)[axis] for axis in axes) == 1


# Gradients that are zero ----------------------------------------------------------------------


def _find_zero(
    e: Examined,
    loss: Traced,
    here: _Gradients,
    nearby: Callable[[], _Gradients],
    explained: bool,
) -> Iterator[Finding]:
    """Gradients that are exactly zero, of all records or nearly all; or of some that are wrong."""
    finite, moved, nodes = int(here.finite.sum()), int(here.moved.sum()), loss.program.nodes
    if not finite or finite - moved < _NEARLY * finite:
        # A hinge's records of gradient zero are right, and have a smaller loss than others.
        still = here.finite & ~here.moved
        if moved and still.sum() >= 0.1 * finite:
            others = np.quantile(here.losses[here.moved], 0.25)
            if np.median(here.losses[still]) > others + 1e-3 * abs(others):
                words = "the gradient is exactly zero for records whose loss is not small"
                do = (
                    "let the output have a gradient wherever it can be wrong: no relu or bound at "
                    "its end, and not all units before it off"
                )
                count = int(still.sum()), len(e)
                yield Finding("zero", words, "", certain=False, do=do, count=count, weight=0.6)
        return
    found = functools.partial(Finding, "zero", count=(finite - moved, len(e)), weight=1.0)
    if moved:
        words = "the gradient is exactly zero for nearly all records"
        yield found(
            words, "", certain=False, do="look at whether a mask or a bound takes them away"
        )
        return
    exponentials = {number for node in nodes if node.name == "exp" for number in node.outs}
    ones = [node for node in nodes if _is_over_one(node)]
    softmax = [node for node in ones if program.depends(node.ins[0], exponentials)]
    cuts = [_cut(loss, at) for at in range(loss.num_params)]
    if softmax:
        words = (
            "every gradient is exactly zero: the loss takes a softmax over one entry, which is 1"
        )
        do = (
            "a loss that compares records needs a batch, and gets one record: let one example be "
            "what is compared (a pair, or several rows of one person); with one output take "
            "a sigmoid loss"
        )
        yield found(words, _line(softmax[0]), do=do)
    elif all(cuts):
        words, where = cuts[0] or ("", "")
        yield found(f"every gradient is exactly zero: {words}", where)
    elif nearby().moved.any():
        words = "every gradient is exactly zero at the first parameters, and not nearby"
        do = "begin one factor of each product with random numbers (LoRA: A random, B zero)"
        yield found(words, "", do=do)
    elif any(node.out_dtype() == jnp.float16 for node in nodes):
        words = "every gradient is exactly zero: in half precision it underflows"
        yield dataclasses.replace(found(words, ""), kind="precision")
    elif not explained:
        words = "every gradient is exactly zero, also at parameters nearby: the loss is constant"
        more = "if the axis of one entry there is the batch: the loss needs a batch, and gets one"
        yield found(words, _line(ones[0]) if ones else "", do=f"{more} record" if ones else "")


def _find_dead(
    e: Examined,
    loss: Traced,
    here: _Gradients,
    nearby: Callable[[], _Gradients],
    explained: bool,
) -> Iterator[Finding]:
    """Trained leaves whose gradient is exactly zero for every record, here and nearby."""
    still = [at for at, touched in enumerate(here.touched) if touched.size and not touched.any()]
    if not here.moved.any() or not still:
        return
    still = [at for at in still if not nearby().touched[at].any()]
    groups: dict[tuple[str, str] | None, list[str]] = {}
    for at in still:
        groups.setdefault(_cut(loss, at), []).append(e.names[at])
    for cut, names in groups.items():
        words, where = cut or ("here and at parameters nearby", "")
        words = f"{_listed(names)}: the gradient is exactly zero for every record, {words}"
        if cut or not explained:
            share = len(names) / max(1, len(e.names))
            unused = "does not use" in words
            yield Finding(
                "dead", words, where, certain=bool(cut), weight=0.2 if unused else 0.5 + share / 2
            )


def _cut(loss: Traced, at: int) -> tuple[str, str] | None:
    """(words, line) of what keeps a leaf from the loss's derivative; None where one may pass."""
    body = loss.program
    used = program.reached(body, [body.ins[at]])
    smooth, cuts = {body.ins[at]}, []
    for node in body.nodes:
        if not any(program.depends(ref, smooth) for ref in node.ins):
            continue
        passes = jnp.issubdtype(node.out_dtype(), jnp.floating) and node.name not in _FLAT
        if passes:
            smooth.update(node.outs)
        else:
            cuts.append(node)
    if any(program.depends(ref, smooth) for ref in body.outs):
        return None
    if not any(program.depends(ref, used) for ref in body.outs) or not cuts:
        return "the loss does not use it", ""
    # Of several the last one that it reaches the loss by.
    leads = [node for node in cuts if program.reached(body, node.outs) & {*body.outs}]
    node = (leads or cuts)[-1]
    return f"{node.name} lets no derivative through", _line(node)


# Units that are off ---------------------------------------------------------------------------


def _find_units(e: Examined, loss: Traced, here: _Gradients) -> Iterator[Finding]:
    """Layers most of whose units are off, or at their bound, for every record."""
    # A unit that is off leaves zeros in the gradient, for all records: nothing else is computed
    # where there are few.
    of_params = program.reached(loss.program, loss.program.ins[: loss.num_params])
    layers = []
    for node in loss.program.nodes:
        zero = any(isinstance(ref, core.Literal) and np.all(ref.val == 0) for ref in node.ins)
        bounded = node.name in ("tanh", "logistic") or (node.name == "max" and zero)
        wide = len(node.out_shape()) and node.out_shape()[-1] >= 4
        if bounded and wide and any(program.depends(ref, of_params) for ref in node.ins):
            layers.append(node)
    if not layers or all(touched.mean() > 0.5 for touched in here.touched if touched.size):
        return
    results = _values_of(e, loss, [node.outs[0] for node in layers])
    for node, value in zip(layers, results, strict=True):
        low = {"tanh": -1.0}.get(node.name, 0.0)
        off = (value == low) | ((value == 1.0) & (node.name != "max"))
        off = off.all(axis=0)
        # Of an image a unit is a channel, whichever axis that is.
        axes = range(off.ndim)
        per = [off.all(axis=tuple(a for a in axes if a != unit)) for unit in {0, off.ndim - 1}]
        if (share := min(float(units.mean()) for units in per)) > _MOST_UNITS:
            words = "most units of a layer are off, or at their bound, for every record"
            yield Finding("units", words, _line(node), weight=0.3 + 0.6 * share)


def _values_of(e: Examined, loss: Traced, wanted: Sequence[Ref]) -> list[np.ndarray]:
    """Values inside the loss, [m, ...] each, for as many records as are computed together."""
    needed = {ref for ref in wanted if isinstance(ref, int)}
    for node in reversed(loss.program.nodes):
        if not needed.isdisjoint(node.outs):
            needed.update(ref for ref in node.ins if isinstance(ref, int))

    @jax.jit
    def values(trained: list[jax.Array], records: PyTree, keys: jax.Array) -> list[jax.Array]:
        def one(record: PyTree, key: jax.Array) -> list[jax.Array]:
            found = _run(loss.program, jax.tree.leaves((trained, record, key)), needed)
            return [_value(ref, found) for ref in wanted]

        return jax.vmap(one)(records, keys)

    rows = np.arange(min(len(e), 256))
    some = jax.tree.map(jnp.asarray, near.take(e.records, rows))
    return jax.device_get(values(e.trained(), some, e.keys(rows)))


# A softmax before a softmax -------------------------------------------------------------------


def _find_softmax(loss: Traced) -> Iterator[Finding]:
    """A softmax or a sigmoid whose result enters the softmax or sigmoid of a cross-entropy."""
    of_params = program.reached(loss.program, loss.program.ins[: loss.num_params])
    first: dict[int, Node] = {}  # probabilities, and what is left of them when they are shifted
    second: dict[int, Node] = {}  # a softmax or sigmoid of those, or its denominator
    powers: dict[int, int] = {}  # exponentials, by the operation
    sums: dict[int, int] = {}  # of which exponentials a value is the sum
    marks: tuple[dict[int, Any], ...] = (first, second, powers, sums)
    peaks: set[int] = set()  # maxima, which a softmax subtracts
    for node in loss.program.nodes:
        refs = [ref for ref in node.ins if isinstance(ref, int)]
        if not refs:
            continue
        name, out, ref = node.name, node.outs[0], refs[0]
        shifted = name == "sub" and (len(refs) == 1 or refs[-1] in peaks)
        bounded = name in ("max", "min") and len(refs) == 1
        if name in _MOVING | _TAKING or name in ("abs", "neg") or shifted or bounded:
            for known in marks:
                if ref in known:
                    known[out] = known[ref]
        if name == "reduce_max" or (name in _MOVING | {"max", "select_n"} and peaks & {*refs}):
            peaks.add(out)
        if name == "exp":
            powers[out] = out
            if ref in first:
                second[out] = first[ref]
        elif name == "reduce_sum" and ref in powers:
            sums[out] = powers[ref]
            if ref in second:
                second[out] = second[ref]
        elif name == "div" and len(refs) == 2 and sums.get(refs[1], 0) == powers.get(ref, -1):
            if ref in of_params:
                first[out] = node
            if ref in second:
                second[out] = second[ref]
        elif name == "logistic" and ref in of_params:
            if ref in first:
                second[out] = first[ref]
            first[out] = node
        elif name in ("log", "log1p") and ref in second:
            before = second[ref]
            said = "a sigmoid" if before.name == "logistic" else "a softmax"
            words = f"the cross-entropy is given the result of {said}, and applies its own"
            yield Finding("softmax", words, _line(before), weight=0.6)
            return


# Scales, labels, inputs -----------------------------------------------------------------------


def _find_loss_scale(e: Examined, loss: Traced, here: _Gradients) -> Iterator[Finding]:
    """A constant factor of the loss by which every gradient is longer than the clip norm."""
    made = {number: node for node in loss.program.nodes for number in node.outs}
    ref, factor, where = loss.program.outs[0], 1.0, ""
    while isinstance(ref, int) and (node := made.get(ref)) is not None:
        constant = _constant(node)
        if constant is None and node.name == "mul":  # by a captured number
            held = [r for r in node.ins if isinstance(r, int) and r in loss.program.consts]
            numbers = [np.asarray(loss.program.consts[r]) for r in held]
            constant = float(numbers[0]) if numbers and numbers[0].ndim == 0 else None
        if constant is None and node.name not in _MOVING:
            break
        factor, where = factor * (constant or 1.0), _line(node) if constant else where
        others = [r for r in node.ins if isinstance(r, int) and r not in loss.program.consts]
        ref = others[0] if others else node.ins[0]
    rule, norms = e.mechanism.rule, here.norms[here.moved]
    if not isinstance(rule, Clip) or abs(factor) < _SCALED or not len(norms):
        return
    # What is clipped with and without it is not the factor's doing.
    if np.quantile(norms, 0.05) > rule.l2_clip_norm > np.median(norms) / abs(factor):
        words = f"the loss is multiplied by {abs(factor):g}, and so nearly every gradient clipped"
        yield Finding("loss scale", words, where, weight=0.6)


def _find_indices(e: Examined, loss: Traced) -> Iterator[Finding]:
    """Labels or tokens that are larger than what they index, which JAX moves inside, unsaid."""
    body = loss.program
    of_params = program.reached(body, body.ins[: loss.num_params])
    made = {number: node for node in body.nodes for number in node.outs}
    alone = lambda ref: program.depends(ref, loss.of_example - of_params)  # noqa: E731
    places: list[tuple[Node, Ref, int]] = []  # an operation, an index, the largest it may be
    for node in body.nodes:
        if node.name == "dynamic_slice":
            room = np.subtract(node.shape_of(0), node.eqn.params["slice_sizes"])
            each = zip(node.ins[1:], room, strict=False)
            places += [(node, ref, int(most)) for ref, most in each if alone(ref)]
        elif node.name == "gather" and alone(node.ins[1]):
            dims = node.eqn.params["dimension_numbers"].start_index_map
            room = np.subtract(node.shape_of(0), node.eqn.params["slice_sizes"])
            if len(dims) == 1 and node.eqn.params["mode"] != jax.lax.GatherScatterMode.CLIP:
                places.append((node, node.ins[1], int(room[dims[0]])))
        elif node.name == "eq":  # a one-hot vector
            for ref, other in (node.ins, node.ins[::-1]):
                if alone(ref) and (by := _source(other, made)) and by.name == "iota":
                    places.append((node, ref, by.out_shape()[by.eqn.params["dimension"]] - 1))
    if not places:
        return
    values = _values_of(e, loss, [ref for _, ref, _ in places])
    for (node, _, most), value in zip(places, values, strict=True):
        beyond = (value > most).reshape(len(value), -1).any(axis=1)
        if beyond.any():
            words = "a label or a token is larger than what it indexes: JAX takes another, unsaid"
            count = (int(beyond.sum()), len(value))
            yield Finding("labels", words, _line(node), do=_INSIDE, count=count, weight=0.7)
            return


def _find_inputs(e: Examined, loss: Traced) -> Iterator[Finding]:
    """Features that enter the first product with parameters far from 1 in size."""
    body = loss.program
    of_params = program.reached(body, body.ins[: loss.num_params])
    for node in body.nodes:
        if node.name not in ("dot_general", "conv_general_dilated"):
            continue
        own = [ref for ref in node.ins if program.depends(ref, loss.of_example - of_params)]
        if not own or len(own) == len(node.ins):
            continue
        (value,) = _values_of(e, loss, own[:1])
        columns = np.asarray(value, np.float64).reshape(-1, value.shape[-1])
        columns = np.where(np.isfinite(columns), columns, 0.0)
        if np.any(np.mean(np.square(columns), axis=0) > _LARGE**2):
            words = "features of a size far above 1 enter the first product with parameters"
            yield Finding("inputs", words, _line(node), certain=False, weight=0.6)
        return


# Public parts: the optimizer, delta -----------------------------------------------------------


def _find_in_optimizer(e: Examined) -> Iterator[Finding]:
    """Trained leaves that the optimizer leaves as they are, or moves uphill."""
    if e.optimizer is None:
        return
    optimizer, params = e.optimizer, e.grad_fn.trained(e.params)
    rng = np.random.default_rng(0)
    noise = [
        jnp.asarray(0.01 * rng.normal(size=leaf.shape)).astype(leaf.dtype)
        for leaf in jax.tree.leaves(params)
    ]
    grads = jax.tree.unflatten(jax.tree.structure(params), noise)

    @jax.jit
    def step(state: PyTree) -> tuple[PyTree, jax.Array, jax.Array, jax.Array]:
        """(state; of each leaf: if it moves, the share rounded to itself, if it goes uphill)."""
        updates, state = optax.with_extra_args_support(optimizer).update(grads, state, params)
        each = jax.tree.leaves(updates)
        moves = jnp.stack([jnp.any(leaf != 0) for leaf in each])
        after = jax.tree.leaves(optax.apply_updates(params, updates))
        pairs = zip(after, jax.tree.leaves(params), strict=True)
        same = jnp.stack([jnp.mean(new == old) for new, old in pairs])
        inner = [optax.tree.vdot(u, g) for u, g in zip(each, noise, strict=True)]
        sizes = [optax.tree.norm(u) * optax.tree.norm(g) for u, g in zip(each, noise, strict=True)]
        up = jnp.stack([i > 0.7 * s for i, s in zip(inner, sizes, strict=True)])
        return state, moves, same, up

    def later(leaf: jax.Array) -> jax.Array:
        """A count of steps in mid-run; anything else as it is."""
        counts = jnp.issubdtype(leaf.dtype, jnp.integer) and not leaf.shape
        return jnp.full_like(leaf, (e.mechanism.steps or 1_000) // 2) if counts else leaf

    try:
        state = optimizer.init(params)
        moved = np.zeros(len(noise), bool)
        # A schedule may begin at 0, and updates be added up over several steps.
        for count in range(_STEPS + 2):
            state, moves, same, up = step(state)
            moved |= np.asarray(moves)
            if moved.all():
                break
            if count >= _STEPS:
                state = jax.tree.map(later, state)
    except (KeyError, TypeError, ValueError):  # it wants more than a gradient
        return
    names = [name for name, found in zip(e.names, moved, strict=True) if not found]
    each = zip(e.names, noise, np.asarray(up), strict=True)
    climbs = [name for name, leaf, found in each if found and leaf.size >= 8]
    if names:
        of = "any parameter" if not moved.any() else _listed(names)
        do = (
            "freeze what is not to move (trainable=): its gradient then is no part of what is "
            "clipped; else look at the rate and the mask"
        )
        yield Finding("dead", f"the optimizer never changes {of}", "", do=do, weight=0.9)
    elif climbs:
        words = f"the optimizer adds the gradient to {_listed(climbs)}, in place of subtracting it"
        do = (
            "end the chain with optax.scale_by_learning_rate(rate); optax.masked passes on "
            "what its mask leaves out: take optax.partition with optax.set_to_zero()"
        )
        yield Finding("rate", words, "", do=do, weight=1.0)
    else:
        half = [
            name for name, leaf, share in zip(e.names, e.trained(), np.asarray(same), strict=True)
            if leaf.dtype in (jnp.float16, jnp.bfloat16) and share > 0.5
        ]  # fmt: skip
        if half:
            words = f"updates of {_listed(half)} are rounded away: most numbers stay as they are"
            do = "keep the parameters in float32, and cast them inside of the loss"
            yield Finding("precision", words, "", do=do, weight=0.7)


# Words ----------------------------------------------------------------------------------------


def _line(node: Node | None) -> str:
    """The user's line of an operation: its own, or that of the call it is part of."""
    eqns = () if node is None else (node.eqn, *reversed(node.calls))
    return next(filter(None, (line_of_operation(eqn) for eqn in eqns)), "")


def _listed(names: Sequence[str]) -> str:
    """At most four names."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _is_key(value: PyTree) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key)


def _is_finite(value: PyTree) -> bool:
    """True of numbers that are all finite, and of what is no floating-point number."""
    kind = jnp.result_type(value)
    return not jnp.issubdtype(kind, jnp.floating) or bool(jnp.all(jnp.isfinite(value)))
