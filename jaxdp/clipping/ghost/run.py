"""One forward and one backward pass that yield every parameter's per-example gradients."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.clipping import rounding
from jaxdp.clipping.ghost.factors import Use
from jaxdp.clipping.ghost.isolated import CONVOLUTION, Apart, convolved, may_mix, mixes
from jaxdp.clipping.ghost.leaves import Arrays, Cut, Factors, Leaf, Slices
from jaxdp.clipping.ghost.plan import LeafPlan
from jaxdp.clipping.ghost.program import (
    COND,
    SCAN,
    Node,
    Program,
    Traced,
    apply_node,
    evaluate,
    nodes,
    rewritten,
)
from jaxdp.clipping.ghost.sites import Site, lengths
from jaxdp.clipping.ghost.uses import Uses
from jaxdp.clipping.ghost.views import Multiple
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
        leaf: uses.by_slice(leaf)
        for leaf in uses.of_leaf
        if plan[leaf].engine in ("ghost", "layer")
    }
    taps = {
        node: _Tap(
            f"{number}",
            _entered(node.ins[site.operand], number),
            site.operand,
            lengths(site),
            site.view.multiples,
        )
        for number, (node, site) in enumerate(itertools.chain(*itertools.chain(*factored.values())))
    }
    apart = Apart(traced)

    def one(params: Sequence[jax.Array], example: Sequence[jax.Array]) -> Any:
        whole = {str(i): leaf for i, leaf in enumerate(params) if plan[i].engine == "vmap"}

        def loss(whole: Mapping[str, jax.Array], zeros: Mapping[str, jax.Array]) -> Any:
            leaves = [whole.get(str(i), leaf) for i, leaf in enumerate(params)]
            run = _Run(taps, zeros, apart, {})
            (first, *rest), seen = run.tapped(traced.program, [*leaves, *example])
            return first, (rest, seen)

        zeros = {
            tap.key: jnp.zeros((*tap.passes, *node.out_shape()), node.out_dtype())
            for node, tap in taps.items()
        }
        value, pull, (rest, seen) = jax.vjp(loss, whole, zeros, has_aux=True)
        return value, rest, seen, *pull(jnp.ones_like(value))

    # Of a loop the rows come after its passes, as it stacks them: moved, they would be copied.
    entered = {tap.entered: len(tap.passes) for tap in taps.values()}
    axes = {tap.key: len(tap.passes) for tap in taps.values()}
    losses, rest, *parts = _of_all(one, traced, params, batch, (0, 0, entered, 0, axes))
    # Norms and sums must see the same numbers. XLA may compute a value twice, with other roundings,
    # and drop a rounding to bfloat16 for one reader alone (2e-4 off, found by a test).
    seen, of_leaves, cotangents = rounding.written(parts)

    def use(node: Node, site: Site) -> Use:
        tap = taps[node]
        axis, pair = len(tap.passes), (seen[tap.entered], cotangents[tap.key])
        data, cotangent = (jnp.moveaxis(x, axis, 0) for x in pair)
        return Use(site, data, cotangent, (*pair, axis) if axis else None)

    leaves: list[Leaf | None] = [None] * len(params)
    for key, grads in of_leaves.items():
        leaves[int(key)] = Arrays(grads, cuts.get(int(key)))
    for leaf, slices in factored.items():
        each = [Factors([use(*one) for one in used], cuts.get(leaf)) for used in slices]
        forms = each if plan[leaf].engine == "ghost" else [factors.layer() for factors in each]
        leaves[leaf] = forms[0] if len(forms) == 1 else Slices(forms)
    return losses, rest, leaves


def _of_all(
    one: Callable[[Any, Any], Any],
    traced: Traced,
    params: Sequence[jax.Array],
    batch: Sequence[jax.Array],
    axes: Any,
) -> Any:
    """``one`` of every example: together, or one after the other where they could meet.

    Args:
        one: of the parameters and one example.
        traced: the loss.
        params: the leaves of the parameters.
        batch: leaves [m, ...].
        axes: where the rows stand in each result.
    """
    if may_mix(traced):
        shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # noqa: E731
        shapes = [shape(jnp.asarray(leaf)) for leaf in params]
        rows = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in batch]
        if mixes(one, shapes, rows):
            found = jax.lax.map(lambda example: one(params, example), list(batch))
            return jax.vmap(lambda each: each, 0, axes)(found)
    return jax.vmap(one, (None, 0), axes)(list(params), list(batch))


def _entered(ref: Any, tap: int) -> str:
    """The key of what enters a tap: of a value its number, which one place in one loop has.

    A literal is no value of any loop: each of its taps keeps its own.
    """
    return f"data {ref}" if isinstance(ref, int) else f"literal {tap}"


class _Tap(NamedTuple):
    """A place where a parameter meets data.

    Attributes:
        key: its own.
        entered: the key of the data, which may meet others as well: it is kept once.
        operand: which one is the data.
        passes: of the loops around it.
        multiples: what the parameter is multiplied with before.
    """

    key: str
    entered: str
    operand: int
    passes: tuple[int, ...]
    multiples: tuple[Multiple, ...]


class _Run(NamedTuple):
    """Runs the loss with a zero added at every tap, whose gradient is the cotangent there.

    Attributes:
        taps: where parameters meet data.
        zeros: for each tap, one of every pass of the loops around it.
        apart: runs convolutions.
        numbers: those that parameters were multiplied with, filled while the loss runs.
    """

    taps: Mapping[Node, _Tap]
    zeros: Mapping[str, jax.Array]
    apart: Apart
    numbers: dict[Node, jax.Array]

    def tapped(
        self, program: Program, args: Sequence[Any]
    ) -> tuple[list[Any], dict[str, jax.Array]]:
        """The program's results, and what entered each tap."""
        seen: dict[str, jax.Array] = {}
        multiples = {each.node: each for tap in self.taps.values() for each in tap.multiples}

        def on_node(node: Node, operands: list[Any]) -> list[Any]:
            if node in multiples:
                self.numbers[node] = multiples[node].factor(operands)
            if node.bodies and self._has_taps(node):
                again = {SCAN: self._looped, COND: self._branched}.get(
                    node.name, self._rematerialised
                )
                results, entered = again(node, operands)
                seen.update(entered)
                return results
            tap = self.taps.get(node)
            if tap is None and (found := self.apart.apply(node, operands)) is not None:
                return found
            if node.name == CONVOLUTION:
                results = [convolved(node, *operands)]
            else:
                results = apply_node(node, operands)
            if tap is not None:
                seen[tap.entered] = operands[tap.operand]
                zero = self.zeros[tap.key]
                # The cotangent of c·W is that of W times c.
                for each in tap.multiples:
                    zero = zero * self.numbers[each.node].astype(zero.dtype)
                return [results[0] + zero]
            return results

        return evaluate(program, args, on_node), seen

    def _rematerialised(
        self, node: Node, operands: list[Any]
    ) -> tuple[list[Any], dict[str, jax.Array]]:
        """A checkpointed part with taps, checkpointed again."""
        body = node.body
        assert body is not None
        params = node.eqn.params
        run = jax.checkpoint(
            lambda operands, zeros: self._replace(zeros=zeros).tapped(body, operands),
            policy=params["policy"],
            prevent_cse=params["prevent_cse"],
        )
        return run(operands, self.zeros)

    def _looped(self, node: Node, operands: list[Any]) -> tuple[list[Any], dict[str, jax.Array]]:
        """A loop with taps, run again; of every pass the zeros are its own."""
        body, params, carried = node.body, node.eqn.params, node.carried
        assert body is not None
        inside = {key: self.zeros[key] for key in self._keys(body)}

        def one_pass(carry: list[Any], each: Any) -> Any:
            slices, zeros = each
            args = [*operands[: carried.start], *carry, *slices]
            outs, seen = self._replace(zeros=zeros).tapped(body, args)
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

    def _branched(self, node: Node, operands: list[Any]) -> tuple[list[Any], dict[str, jax.Array]]:
        """A ``cond`` with taps, run again; nothing was seen in the branches that do not count."""
        index, *rest = operands
        inside = {key: self.zeros[key] for body in node.branches for key in self._keys(body)}
        runs = [
            lambda operands, zeros, body=body: self._replace(zeros=zeros).tapped(body, operands)
            for body in node.branches
        ]
        blank: dict[str, Any] = {}
        for run in runs:
            blank |= jax.eval_shape(run, rest, inside)[1]

        def filled(run: Callable[..., Any], rest: list[Any], zeros: Mapping[str, jax.Array]) -> Any:
            outs, seen = run(rest, zeros)
            return outs, {key: jnp.zeros(x.shape, x.dtype) for key, x in blank.items()} | seen

        branches = [functools.partial(filled, run) for run in runs]
        outs, seen = jax.lax.switch(index, branches, rest, inside)
        return outs, seen

    def _keys(self, body: Program) -> list[str]:
        """The keys of all taps in a body, and in bodies in it."""
        return [self.taps[node].key for node in nodes(body) if node in self.taps]

    def _has_taps(self, node: Node) -> bool:
        """True if what is in the body must be run operation by operation."""
        if rewritten(node):
            return True
        convolutions = node.name not in (SCAN, COND)
        return any(
            inner in self.taps
            or (convolutions and inner.name == CONVOLUTION)
            or (bool(inner.bodies) and self._has_taps(inner))
            for body in node.bodies
            for inner in body.nodes
        )
