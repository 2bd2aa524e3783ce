"""One forward and one backward pass that yield every parameter's per-example gradients."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.clipping import rounding
from jaxdp.clipping.ghost.derived import steps_of
from jaxdp.clipping.ghost.factors import Use
from jaxdp.clipping.ghost.isolated import CONVOLUTION, Apart, convolved, may_mix, mixes
from jaxdp.clipping.ghost.leaves import Arrays, Factors, Leaf
from jaxdp.clipping.ghost.loops import lengths
from jaxdp.clipping.ghost.parted import Cut
from jaxdp.clipping.ghost.plan import LeafPlan
from jaxdp.clipping.ghost.program import (
    COND,
    SCAN,
    Node,
    Program,
    Traced,
    apply_node,
    evaluate,
    rewritten,
)
from jaxdp.clipping.ghost.steps import Step
from jaxdp.clipping.ghost.together import changed, parts_of
from jaxdp.clipping.ghost.uses import Uses
from jaxdp.types import PyTree


def gradients(
    traced: Traced,
    uses: Uses,
    plan: Sequence[LeafPlan],
    params: Sequence[jax.Array],
    batch: Sequence[jax.Array],
    cuts: Mapping[int, Cut] = MappingProxyType({}),
) -> tuple[jax.Array, PyTree, list[Leaf | None]]:
    """Losses [m], what else the loss returned, and each leaf's gradients (None where frozen).

    Args:
        traced: the loss of one example; ``uses`` and ``plan`` belong to it.
        uses: where the parameters meet data.
        plan: how each leaf is done.
        params: the leaves of the parameters.
        batch: the other arguments' leaves, each [m, ...].
        cuts: of the leaves that are cut over devices, how.
    """
    factored = {
        leaf: found
        for leaf, found in uses.of_leaf.items()
        if plan[leaf].engine in ("ghost", "layer")
    }
    every = itertools.chain(*factored.values())
    taps = _taps(traced.program, [part for use in every for part in parts_of(*use)])
    apart = Apart(traced)

    def one(params: Sequence[jax.Array], example: Sequence[jax.Array]) -> Any:
        whole = {str(i): leaf for i, leaf in enumerate(params) if plan[i].engine == "vmap"}

        def loss(whole: Mapping[str, jax.Array], zeros: Mapping[str, jax.Array]) -> Any:
            leaves = [whole.get(str(i), leaf) for i, leaf in enumerate(params)]
            args = [*leaves, *example]
            (first, *rest), seen = _tapped(traced.program, args, taps, zeros, apart)
            values = {key: seen.pop(key) for key in taps.depths}
            return first, (rest, seen, values)

        zeros = {tap.key: _zeros(node, tap.passes) for node, tap in taps.of_data.items()}
        value, pull, (rest, seen, values) = jax.vjp(loss, whole, zeros, has_aux=True)
        return values, (value, rest, seen, *pull(jnp.ones_like(value)))

    # Of a loop the rows come after its passes, as it stacks them: moved, they would be copied.
    tapped = taps.of_data.values()
    entered = {tap.entered: len(tap.passes) for tap in tapped}
    axes = {tap.key: len(tap.passes) for tap in tapped}
    values, (losses, rest, *parts) = _of_all(one, traced, params, batch, (0, 0, entered, 0, axes))
    # Norms and sums must see the same numbers. XLA may compute a value twice, with other roundings,
    # and drop a rounding to bfloat16 for one reader alone (2e-4 off, found by a test).
    seen, of_leaves, cotangents = rounding.written(parts)

    def value_of(step: Step) -> tuple[Any, int]:
        if step.operand is None:
            return None, 0
        key = taps.of_values[step.node][step.operand]
        return values[key], taps.depths[key]

    found: list[Leaf | None] = [None] * len(params)
    for key, grads in of_leaves.items():
        found[int(key)] = Arrays(grads, cuts.get(int(key)))

    def use(node: Node, site: Any) -> Use:
        met = [taps.of_data[each] for each, _ in parts_of(node, site)]
        pairs = [(seen[tap.entered], cotangents[tap.key]) for tap in met]
        return _use(taps.of_data[node], *changed(site, pairs, value_of))

    for leaf, used in factored.items():
        factors = Factors([use(node, site) for node, site in used], cuts.get(leaf))
        found[leaf] = factors if plan[leaf].engine == "ghost" else factors.layer()
    return losses, rest, found


def _use(tap: "_Tap", site: Any, data: jax.Array, cotangent: jax.Array) -> Use:
    axis = len(tap.passes)
    if axis == 0:
        return Use(site, data, cotangent)
    stacked = data, cotangent, axis
    return Use(site, jnp.moveaxis(data, axis, 0), jnp.moveaxis(cotangent, axis, 0), stacked)


def _of_all(
    one: Callable[[Any, Any], Any],
    traced: Traced,
    params: Sequence[jax.Array],
    batch: Sequence[jax.Array],
    axes: Any,
) -> Any:
    """``one`` of every example: together, or one after the other where they could meet.

    Args:
        one: of the parameters and one example: what depends on the parameters alone, and the rest.
        traced: the loss.
        params: the leaves of the parameters.
        batch: leaves [m, ...].
        axes: where the rows stand in each of the rest.
    """
    together = jax.vmap(one, (None, 0), (None, axes))
    if may_mix(traced):
        shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # noqa: E731
        shapes = [shape(jnp.asarray(leaf)) for leaf in params]
        rows = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in batch]
        if mixes(one, shapes, rows):
            # Refuses, without running it, a value of the parameters that depends on an example.
            jax.eval_shape(together, list(params), list(batch))
            values, found = jax.lax.map(lambda example: one(params, example), list(batch))
            first = jax.tree.map(lambda each: each[0], values)
            return first, jax.vmap(lambda each: each, 0, axes)(found)
    return together(list(params), list(batch))


class _Tap(NamedTuple):
    """A place where a parameter meets data.

    Attributes:
        key: its own.
        entered: the key of the data, which may meet others as well: it is kept once.
        operand: which one is the data.
        passes: of the loops around it.
    """

    key: str
    entered: str
    operand: int
    passes: tuple[int, ...]


class _Taps(NamedTuple):
    """The values to note while the loss runs.

    Attributes:
        of_data: where parameters meet data.
        of_values: for operations on parameters alone, the operands to note and their keys.
        depths: for those keys, the number of loops around the operation.
    """

    of_data: Mapping[Node, _Tap]
    of_values: Mapping[Node, Mapping[int, str]]
    depths: Mapping[str, int]


def _taps(program: Program, used: Sequence[tuple[Node, Any]]) -> _Taps:
    of_data = {
        node: _Tap(str(number), f"data {node.ins[site.operand]}", site.operand, lengths(site))
        for number, (node, site) in enumerate(used)
    }
    of_values: dict[Node, dict[int, str]] = {}
    depths: dict[str, int] = {}
    around = _depths(program)
    for step in itertools.chain(*(steps_of(site) for _, site in used)):
        if step.operand is not None:
            key = f"value {len(depths)}"
            noted = of_values.setdefault(step.node, {})
            depths[noted.setdefault(step.operand, key)] = around[step.node]
    return _Taps(of_data, of_values, depths)


def _depths(program: Program, depth: int = 0) -> dict[Node, int]:
    """The number of loops around every operation."""
    found = dict.fromkeys(program.nodes, depth)
    for node in program.nodes:
        for body in node.bodies:
            found |= _depths(body, depth + (node.name == SCAN))
    return found


def _tapped(
    program: Program,
    args: Sequence[Any],
    taps: _Taps,
    zeros: Mapping[str, jax.Array],
    apart: Apart,
) -> tuple[list[Any], dict[str, jax.Array]]:
    """The program with a zero added at every tap, whose gradient is the cotangent there.

    Also returns what entered each tap, and the values to note.
    """
    seen: dict[str, jax.Array] = {}

    def on_node(node: Node, operands: list[Any]) -> list[Any]:
        for operand, key in taps.of_values.get(node, {}).items():
            seen[key] = jnp.asarray(operands[operand])
        if node.bodies and _taken_apart(node, taps):
            again = {SCAN: _looped, COND: _branched}.get(node.name, _rematerialised)
            results, entered = again(node, operands, taps, zeros, apart)
            seen.update(entered)
            return results
        if node not in taps.of_data and (found := apart.apply(node, operands)) is not None:
            return found
        if node.name == CONVOLUTION:
            results = [convolved(node, *operands)]
        else:
            results = apply_node(node, operands)
        if node in taps.of_data:
            tap = taps.of_data[node]
            seen[tap.entered] = operands[tap.operand]
            return [results[0] + zeros[tap.key]]
        return results

    return evaluate(program, args, on_node), seen


def _rematerialised(
    node: Node,
    operands: list[Any],
    taps: _Taps,
    zeros: Mapping[str, jax.Array],
    apart: Apart,
) -> tuple[list[Any], dict[str, jax.Array]]:
    """A checkpointed part with taps, checkpointed again."""
    body = node.body
    assert body is not None
    params = node.eqn.params
    run = jax.checkpoint(
        lambda operands, zeros: _tapped(body, operands, taps, zeros, apart),
        policy=params["policy"],
        prevent_cse=params["prevent_cse"],
    )
    return run(operands, zeros)


def _looped(
    node: Node,
    operands: list[Any],
    taps: _Taps,
    zeros: Mapping[str, jax.Array],
    apart: Apart,
) -> tuple[list[Any], dict[str, jax.Array]]:
    """A loop with taps, run again; of every pass the zeros are its own."""
    body, params, carried = node.body, node.eqn.params, node.carried
    assert body is not None
    inside = {key: zeros[key] for key in _keys(body, taps)}

    def one_pass(carry: list[Any], each: Any) -> Any:
        slices, zeros = each
        args = [*operands[: carried.start], *carry, *slices]
        outs, seen = _tapped(body, args, taps, zeros, apart)
        carries = carried.stop - carried.start
        return outs[:carries], (outs[carries:], seen)

    last, (rest, seen) = jax.lax.scan(
        one_pass,
        operands[carried],
        (operands[carried.stop :], inside),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*last, *rest], seen


def _branched(
    node: Node,
    operands: list[Any],
    taps: _Taps,
    zeros: Mapping[str, jax.Array],
    apart: Apart,
) -> tuple[list[Any], dict[str, jax.Array]]:
    """A ``cond`` with taps, run again; nothing was seen in the branches that do not count."""
    index, *rest = operands
    inside = {key: zeros[key] for body in node.branches for key in _keys(body, taps)}
    runs = [functools.partial(_branch, body, taps, apart) for body in node.branches]
    blank: dict[str, Any] = {}
    for run in runs:
        blank |= jax.eval_shape(run, rest, inside)[1]

    def filled(run: Callable[..., Any], rest: list[Any], zeros: Any) -> Any:
        outs, seen = run(rest, zeros)
        return outs, {key: jnp.zeros(x.shape, x.dtype) for key, x in blank.items()} | seen

    branches = [functools.partial(filled, run) for run in runs]
    outs, seen = jax.lax.switch(index, branches, rest, inside)
    return outs, seen


def _branch(body: Program, taps: _Taps, apart: Apart, operands: list[Any], zeros: Any) -> Any:
    return _tapped(body, operands, taps, zeros, apart)


def _keys(body: Program, taps: _Taps) -> list[str]:
    """The keys of all taps in a body, and in bodies in it."""
    found = [taps.of_data[node].key for node in body.nodes if node in taps.of_data]
    inner = [each for node in body.nodes for each in node.bodies]
    return found + [key for each in inner for key in _keys(each, taps)]


def _taken_apart(node: Node, taps: _Taps) -> bool:
    """True if what is in the body must be run operation by operation."""
    if rewritten(node):
        return True
    convolutions = node.name not in (SCAN, COND)
    return any(
        inner in taps.of_data
        or inner in taps.of_values
        or (convolutions and inner.name == CONVOLUTION)
        or (bool(inner.bodies) and _taken_apart(inner, taps))
        for body in node.bodies
        for inner in body.nodes
    )


def _zeros(node: Node, passes: tuple[int, ...]) -> jax.Array:
    return jnp.zeros((*passes, *node.out_shape()), node.out_dtype())
