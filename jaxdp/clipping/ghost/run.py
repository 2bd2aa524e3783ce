"""One forward and one backward pass that yield every parameter's per-example gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.clipping.ghost.factors import Use
from jaxdp.clipping.ghost.isolated import CONVOLUTION, Apart, convolved, may_mix, mixes
from jaxdp.clipping.ghost.leaves import Arrays, Factors, Leaf
from jaxdp.clipping.ghost.plan import LeafPlan
from jaxdp.clipping.ghost.program import Node, Program, Traced, apply_node, evaluate
from jaxdp.clipping.ghost.uses import Uses
from jaxdp.types import PyTree


def gradients(
    traced: Traced,
    uses: Uses,
    plan: Sequence[LeafPlan],
    params: Sequence[jax.Array],
    batch: Sequence[jax.Array],
) -> tuple[jax.Array, PyTree, list[Leaf | None]]:
    """Losses [m], what else the loss returned, and each leaf's gradients (None where frozen).

    Args:
        traced: the loss of one example; ``uses`` and ``plan`` belong to it.
        uses: where the parameters meet data.
        plan: how each leaf is done.
        params: the leaves of the parameters.
        batch: the other arguments' leaves, each [m, ...].
    """
    taps = {
        node: _Tap(str(number), site.operand)
        for number, (node, site) in enumerate(uses.sites.items())
        if plan[site.view.leaf].engine in ("ghost", "layer")
    }
    apart = Apart(traced)

    def one(params: Sequence[jax.Array], example: Sequence[jax.Array]) -> Any:
        whole = {str(i): leaf for i, leaf in enumerate(params) if plan[i].engine == "vmap"}

        def loss(whole: Mapping[str, jax.Array], zeros: Mapping[str, jax.Array]) -> Any:
            leaves = [whole.get(str(i), leaf) for i, leaf in enumerate(params)]
            args = [*leaves, *example]
            (first, *rest), seen = _tapped(traced.program, args, taps, zeros, apart)
            return first, (rest, seen)

        zeros = {tap.key: _zeros(node) for node, tap in taps.items()}
        value, pull, (rest, seen) = jax.vjp(loss, whole, zeros, has_aux=True)
        return value, rest, seen, *pull(jnp.ones_like(value))

    losses, rest, *parts = _of_all(one, traced, params, batch)
    # Norms and sums must see the same numbers. XLA may compute a value twice, with other roundings,
    # and drop a rounding to bfloat16 for one reader alone (2e-4 off, found by a test).
    seen, of_leaves, cotangents = jax.lax.optimization_barrier(parts)
    found: list[Leaf | None] = [None] * len(params)
    for key, grads in of_leaves.items():
        found[int(key)] = Arrays(grads)
    for leaf, nodes in uses.of_leaf.items():
        if plan[leaf].engine in ("ghost", "layer"):
            keys = [taps[node].key for node in nodes]
            sites = [uses.sites[node] for node in nodes]
            factors = Factors(
                [
                    Use(site, seen[key], cotangents[key])
                    for site, key in zip(sites, keys, strict=True)
                ]
            )
            found[leaf] = factors if plan[leaf].engine == "ghost" else factors.layer()
    return losses, rest, found


def _of_all(
    one: Callable[[Any, Any], Any],
    traced: Traced,
    params: Sequence[jax.Array],
    batch: Sequence[jax.Array],
) -> Any:
    """``one`` of every example: together, or one after the other where they could meet."""
    if may_mix(traced):
        shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # noqa: E731
        shapes = [shape(jnp.asarray(leaf)) for leaf in params]
        rows = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in batch]
        if mixes(one, shapes, rows):
            return jax.lax.map(lambda example: one(params, example), list(batch))
    return jax.vmap(one, (None, 0))(list(params), list(batch))


class _Tap(NamedTuple):
    key: str
    operand: int


def _tapped(
    program: Program,
    args: Sequence[Any],
    taps: Mapping[Node, _Tap],
    zeros: Mapping[str, jax.Array],
    apart: Apart,
) -> tuple[list[Any], dict[str, jax.Array]]:
    """The program with a zero added at every tap, whose gradient is the cotangent there.

    Also returns what entered each tap.
    """
    seen: dict[str, jax.Array] = {}

    def on_node(node: Node, operands: list[Any]) -> list[Any]:
        if node.body is not None and _taken_apart(node.body, taps):
            results, entered = _rematerialised(node, operands, taps, zeros, apart)
            seen.update(entered)
            return results
        if node not in taps and (found := apart.apply(node, operands)) is not None:
            return found
        if node.name == CONVOLUTION:
            results = [convolved(node, *operands)]
        else:
            results = apply_node(node, operands)
        if node in taps:
            tap = taps[node]
            seen[tap.key] = operands[tap.operand]
            return [results[0] + zeros[tap.key]]
        return results

    return evaluate(program, args, on_node), seen


def _rematerialised(
    node: Node,
    operands: list[Any],
    taps: Mapping[Node, _Tap],
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


def _taken_apart(body: Program, taps: Mapping[Node, _Tap]) -> bool:
    return any(
        node in taps
        or node.name == CONVOLUTION
        or (node.body is not None and _taken_apart(node.body, taps))
        for node in body.nodes
    )


def _zeros(node: Node) -> jax.Array:
    return jnp.zeros(node.out_shape(), node.out_dtype())
