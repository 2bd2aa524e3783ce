"""One forward and one backward pass that yield every parameter's per-example gradients."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.clipping.ghost.factors import Use
from jaxdp.clipping.ghost.isolated import CONVOLUTION, Convolutions
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
    convolutions = Convolutions(traced)
    whole = {str(i): leaf for i, leaf in enumerate(params) if plan[i].engine == "vmap"}

    def one(example: Sequence[jax.Array]) -> Any:
        def loss(whole: Mapping[str, jax.Array], zeros: Mapping[str, jax.Array]) -> Any:
            leaves = [whole.get(str(i), leaf) for i, leaf in enumerate(params)]
            args = [*leaves, *example]
            (first, *rest), seen = _tapped(traced.program, args, taps, zeros, convolutions)
            return first, (rest, seen)

        zeros = {tap.key: _zeros(node) for node, tap in taps.items()}
        value, pull, (rest, seen) = jax.vjp(loss, whole, zeros, has_aux=True)
        return value, rest, seen, *pull(jnp.ones_like(value))

    if convolutions.hidden:
        losses, rest, *parts = jax.lax.map(one, list(batch))
    else:
        losses, rest, *parts = jax.vmap(one)(list(batch))
    seen, of_leaves, cotangents = _rounded_once(parts)
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


class _Tap(NamedTuple):
    key: str
    operand: int


def _tapped(
    program: Program,
    args: Sequence[Any],
    taps: Mapping[Node, _Tap],
    zeros: Mapping[str, jax.Array],
    convolutions: Convolutions,
) -> tuple[list[Any], dict[str, jax.Array]]:
    """The program with a zero added at every tap, whose gradient is the cotangent there.

    Also returns what entered each tap.
    """
    seen: dict[str, jax.Array] = {}

    def on_node(node: Node, operands: list[Any]) -> list[Any]:
        if node.body is not None and _taken_apart(node.body, taps):
            results, entered = _rematerialised(node, operands, taps, zeros, convolutions)
            seen.update(entered)
            return results
        if node not in taps and (apart := convolutions.apply(node, operands)) is not None:
            return apart
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
    convolutions: Convolutions,
) -> tuple[list[Any], dict[str, jax.Array]]:
    """A checkpointed part with taps, checkpointed again."""
    body = node.body
    assert body is not None
    params = node.eqn.params
    run = jax.checkpoint(
        lambda operands, zeros: _tapped(body, operands, taps, zeros, convolutions),
        policy=params["policy"],
        prevent_cse=params["prevent_cse"],
    )
    return run(operands, zeros)


def _rounded_once(parts: PyTree) -> PyTree:
    """Norms and sums must see the same low-precision numbers.

    XLA may drop a rounding to bfloat16 for one reader of a value and not for another; then a norm
    is not that of what is summed (2e-4 off, found by a test).
    """
    low = any(leaf.dtype in (jnp.bfloat16, jnp.float16) for leaf in jax.tree.leaves(parts))
    return jax.lax.optimization_barrier(parts) if low else parts


def _taken_apart(body: Program, taps: Mapping[Node, _Tap]) -> bool:
    return any(
        node in taps
        or node.name == CONVOLUTION
        or (node.body is not None and _taken_apart(node.body, taps))
        for node in body.nodes
    )


def _zeros(node: Node) -> jax.Array:
    return jnp.zeros(node.out_shape(), node.out_dtype())
