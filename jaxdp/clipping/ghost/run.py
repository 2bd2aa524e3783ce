"""One forward and one backward pass that yield every parameter's per-example gradients.

Convolutions are run so that examples stay separate, also where one of them is not finite. Under
``vmap`` the gradient of a kernel, and a kernel made from the example, become one convolution in
groups of one example each. XLA may run it as a dense one in which zeros stand between the groups
(its CPU backend does), and 0 · inf is NaN: one broken example then breaks all of its batch, and a
single record decides whether the others count. Products of patches keep them separate.

A convolution that is cropped on one side and padded on the other reads memory that is not its own
on XLA's CPU backend, other examples' included. So what is not ordinary padding is done beforehand.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxdp.clipping import rounding
from jaxdp.clipping.ghost import sites
from jaxdp.clipping.ghost.leaves import Arrays, Factors, LeafGradients, ShardedAxis, Slices, Use
from jaxdp.clipping.ghost.plan import LeafPlan, Uses
from jaxdp.clipping.ghost.program import (
    COND,
    SCAN,
    Node,
    Program,
    Ref,
    Traced,
    all_nodes,
    apply_node,
    depends,
    inner_jaxprs,
    is_rewritten,
    trace,
)
from jaxdp.clipping.ghost.sites import Site
from jaxdp.clipping.ghost.stacks import Shard, Stack, is_shard, whole
from jaxdp.types import PyTree

_CONVOLUTION = "conv_general_dilated"
_OPTIONS = (
    "window_strides",
    "rhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "batch_group_count",
    "precision",
    "preferred_element_type",
)


def per_example_gradients(
    traced: Traced,
    uses: Uses,
    plan: Sequence[LeafPlan],
    params: Sequence[jax.Array | Shard],
    batch: Sequence[jax.Array],
    cuts: Mapping[int, ShardedAxis] = MappingProxyType({}),
) -> tuple[jax.Array, PyTree, list[LeafGradients | None]]:
    """Losses [m], what else the loss returned, and each leaf's gradients (None where frozen).

    A zero is added to the result of every use of a parameter. The loss's gradient by that zero is
    the cotangent at the result; with the data that entered it is a factor of the weight's gradient,
    which is never formed (Goodfellow 2015, arXiv:1510.01799; book-keeping, Bu et al. 2022,
    arXiv:2210.00038). Leaves of the engine "vmap" are differentiated as they are.

    Args:
        traced: the loss of one example; ``uses`` and ``plan`` belong to it.
        uses: where the parameters meet data.
        plan: how each leaf is done.
        params: the leaves of the parameters; of stacks of layers that are gathered one by one, and
            whose sum is this device's part of it, the parts.
        batch: the other arguments' leaves, each [m, ...].
        cuts: of the leaves that are sharded over devices, the axis.
    """
    # A tap for every use that is to be factored.
    differentiated = [each.engine == "vmap" or each.whole for each in plan]
    chosen = [
        leaf
        for leaf in uses.of_leaf
        if plan[leaf].engine in ("ghost", "layer") and not differentiated[leaf]
    ]
    factored = {leaf: uses.by_slice(leaf) for leaf in chosen}
    each_use = itertools.chain(*itertools.chain(*factored.values()))
    taps = {node: _Tap(str(number), site, node) for number, (node, site) in enumerate(each_use)}

    # One example: the loss by its whole leaves and by the zeros, and what entered each tap.
    def one(params: Sequence[Any], example: Sequence[jax.Array]) -> PyTree:
        whole = {str(i): leaf for i, leaf in enumerate(params) if differentiated[i]}

        def loss(whole: Mapping[str, jax.Array], zeros: Mapping[str, jax.Array]) -> PyTree:
            leaves = [whole.get(str(i), leaf) for i, leaf in enumerate(params)]
            tapped = _TappedLoss(taps, zeros, traced.of_example, {})
            (first, *rest), seen = tapped.run(traced.program, [*leaves, *example])
            return first, (rest, seen)

        zeros = {
            tap.key: jnp.zeros((*tap.site.iterations, *node.out_shape()), node.out_dtype())
            for node, tap in taps.items()
        }
        value, pull, (rest, seen) = jax.vjp(loss, whole, zeros, has_aux=True)
        return value, rest, seen, *pull(jnp.ones_like(value))

    # All examples. Of a loop the rows come after its iterations, as it stacks them: moved, they
    # would be copied.
    data_axes = {tap.data_key: len(tap.site.iterations) for tap in taps.values()}
    axes = (0, 0, data_axes, 0, {tap.key: len(tap.site.iterations) for tap in taps.values()})
    leaves, rows = list(params), list(batch)
    shapes = [jax.eval_shape(whole, leaf) for leaf in leaves]
    example = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in rows]
    if _could_mix(traced, one, shapes, example):
        # Under vmap they could meet, so one comes after the other; layers are gathered once.
        gathered = [whole(leaf) for leaf in leaves]
        each = jax.lax.map(lambda example: one(gathered, example), rows)
        losses, rest, *parts = jax.vmap(lambda each: each, 0, axes)(each)
    else:
        losses, rest, *parts = jax.vmap(one, (None, 0), axes)(leaves, rows)
    # Norms and sums must see the same numbers. XLA may compute a value twice, with other roundings,
    # and drop a rounding to bfloat16 for one reader alone (2e-4 off, found by a test).
    seen, of_leaves, cotangents = rounding.materialized(parts)

    # Each leaf in the form that its plan says.
    def use(node: Node, site: Site) -> Use:
        tap, axis = taps[node], len(site.iterations)
        precision = node.eqn.params.get("precision", jax.lax.Precision.HIGHEST)
        return Use(site, (seen[tap.data_key], cotangents[tap.key]), axis, precision)

    found_of: list[LeafGradients | None] = [None] * len(params)
    for key, grads in of_leaves.items():
        found_of[int(key)] = Arrays(grads, cuts.get(int(key)))
    for leaf, slices in factored.items():
        each = [Factors([use(*one) for one in used], cuts.get(leaf)) for used in slices]
        forms = each if plan[leaf].engine == "ghost" else [factors.layer() for factors in each]
        found = forms[0] if len(forms) == 1 else Slices(forms)
        held = params[leaf]
        found_of[leaf] = Stack(found, held) if isinstance(held, Shard) else found
    return losses, rest, found_of


class _Tap(NamedTuple):
    """A place where a parameter meets data: its own key, the site and the operation."""

    key: str
    site: Site
    node: Node

    @property
    def data_key(self) -> str:
        """The key of the data, which may meet others as well: it is kept once.

        Of an added parameter it is the number one.
        Of a value it is the number, which one place in one loop has. A literal is no value of any
        loop: each of its taps keeps its own.
        """
        if self.site.adds:
            return f"one {self.key}"
        ref = self.node.ins[self.site.operand]
        return f"data {ref}" if isinstance(ref, int) else f"literal {self.key}"


_Outcome = tuple[list[jax.Array], dict[str, jax.Array]]  # results, and what entered each tap


class _TappedLoss(NamedTuple):
    """Runs the loss with a zero added at every tap, whose gradient is the cotangent there."""

    taps: Mapping[Node, _Tap]  # where parameters meet data
    zeros: Mapping[str, jax.Array]  # for each tap, one of every iteration of the loops around it
    of_example: set[int]  # the values that depend on the example
    # Those that parameters were multiplied with, filled while the loss runs.
    numbers: dict[Node, jax.Array]
    # True where a checkpoint is around the operations, so that nothing gathered is kept.
    checkpointed: bool = False

    def run(self, program: Program, args: Sequence[jax.Array]) -> _Outcome:
        """The program's results, and what entered each tap."""
        seen: dict[str, jax.Array] = {}
        multiples = {m.node: m for tap in self.taps.values() for m in tap.site.view.multiples}
        values = {**program.consts, **dict(zip(program.ins, args, strict=True))}

        def read(refs: Sequence[Ref]) -> list[Any]:
            return [ref.val if isinstance(ref, core.Literal) else values[ref] for ref in refs]

        held: dict[int, jax.Array] = {}  # what is gathered under a checkpoint, once
        for node in program.nodes:
            operands, tap = read(node.ins), self.taps.get(node)
            if node in multiples:
                self.numbers[node] = multiples[node].factor([*map(whole, operands)])
            parts = any(map(is_shard, operands))
            if parts and node.name == SCAN:  # of layers of its own no more is gathered than one
                ends = node.carried.stop
                operands = [*map(whole, operands[:ends]), *map(_sliceable, operands[ends:])]
                parts = any(map(is_shard, operands))
            elif parts and node.name == COND:
                operands, parts = [*map(whole, operands)], False
            if node.bodies and (parts or self._has_taps(node)):
                # What holds taps is run operation by operation, in a loop or checkpoint like it.
                known = {SCAN: self.run_scan, COND: self.run_cond}
                results, entered = known.get(node.name, self.run_checkpoint)(node, operands)
                seen.update(entered)
            elif parts and sum(isinstance(ref, int) for ref in node.ins) == 1:
                (part,) = filter(is_shard, operands)
                results = part.then(node)
            else:
                # Gathered again for the backward pass, which would keep it otherwise.
                apply = functools.partial(self._apply, tap is not None, node)
                if parts and not self.checkpointed:
                    results = jax.checkpoint(apply, prevent_cse=False)(operands)
                else:
                    results = apply(operands, held)
            if tap is not None:
                data = operands[tap.site.operand]
                seen[tap.data_key] = jnp.ones([], data.dtype) if tap.site.adds else data
                zero = self.zeros[tap.key]
                # The cotangent of c·W is that of W times c.
                for each in tap.site.view.multiples:
                    zero = zero * self.numbers[each.node].astype(zero.dtype)
                results = [results[0] + zero]
            values.update(zip(node.outs, results, strict=True))
        return [whole(x) for x in read(program.outs)], seen

    def _apply(
        self,
        tapped: bool,
        node: Node,
        operands: Sequence[Any],
        held: dict[int, jax.Array] | None = None,
    ) -> list[jax.Array]:
        """The operation; ``held`` has the parameters that were gathered, by their parts."""
        operands = [whole(x, held) for x in operands]
        if tapped and node.name == _CONVOLUTION:
            return [_convolve(node, *operands)]
        return _apply_separately(node, operands, self.of_example)

    def run_checkpoint(self, node: Node, operands: list[jax.Array]) -> _Outcome:
        """A checkpointed part with taps, checkpointed again."""
        (body,), params = node.bodies, node.eqn.params
        inside = self._replace(checkpointed=params["policy"] is None)
        run = jax.checkpoint(
            lambda operands, zeros: inside._replace(zeros=zeros).run(body, operands),
            policy=params["policy"],
            prevent_cse=params["prevent_cse"],
        )
        return run(operands, self.zeros)

    def run_scan(self, node: Node, operands: list[jax.Array]) -> _Outcome:
        """A loop with taps, run again; of every iteration the zeros are its own."""
        (body,), params, carried = node.bodies, node.eqn.params, node.carried
        inside = {key: self.zeros[key] for key in self._keys(body)}

        def iterate(carry: list[jax.Array], each: PyTree) -> PyTree:
            slices, zeros = each
            args = [*operands[: carried.start], *carry, *slices]
            outs, seen = self._replace(zeros=zeros, checkpointed=False).run(body, args)
            carries = carried.stop - carried.start
            return outs[:carries], (outs[carries:], seen)

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        sliced = operands[carried.stop :], inside
        last, (rest, seen) = jax.lax.scan(iterate, operands[carried], sliced, **options)
        return [*last, *rest], seen

    def run_cond(self, node: Node, operands: list[jax.Array]) -> _Outcome:
        """A ``cond`` with taps, run again; in the branches that do not count the data are zeros."""
        index, *rest = operands
        inside = {key: self.zeros[key] for body in node.bodies for key in self._keys(body)}
        runs = [
            lambda operands, zeros, body=body: self._replace(zeros=zeros).run(body, operands)
            for body in node.bodies
        ]
        blank: dict[str, jax.Array] = {}
        for run in runs:
            blank |= jax.eval_shape(run, rest, inside)[1]

        def filled(run: Callable[..., _Outcome], rest: list[jax.Array], zeros: PyTree) -> _Outcome:
            outs, seen = run(rest, zeros)
            return outs, {key: jnp.zeros(x.shape, x.dtype) for key, x in blank.items()} | seen

        branches = [functools.partial(filled, run) for run in runs]
        outs, seen = jax.lax.switch(index, branches, rest, inside)
        return outs, seen

    def _keys(self, body: Program) -> list[str]:
        """The keys of all taps in a body, and in bodies in it."""
        return [self.taps[node].key for node in all_nodes(body) if node in self.taps]

    def _has_taps(self, node: Node) -> bool:
        """True if what is in the body must be run operation by operation."""
        if is_rewritten(node):
            return True
        convolutions = node.name not in (SCAN, COND)
        return any(
            inner in self.taps
            or (convolutions and inner.name == _CONVOLUTION)
            or (bool(inner.bodies) and self._has_taps(inner))
            for body in node.bodies
            for inner in body.nodes
        )


def _sliceable(value: jax.Array | Shard) -> jax.Array | Shard:
    """A stack that a loop takes apart as it is; the whole, where its layers are on one device."""
    if not isinstance(value, Shard):
        return value
    first = any(axis + value.part.ndim == 0 for axis, _ in value.cut)
    return whole(value) if first or value.steps else value


def _apply_separately(
    node: Node, operands: Sequence[jax.Array], of_example: Collection[int]
) -> list[jax.Array]:
    """Applies an operation to one example in a way in which ``vmap`` keeps examples separate.

    Args:
        node: the operation.
        operands: of one example.
        of_example: the values that depend on the example.
    """
    if node.name != _CONVOLUTION:
        return apply_node(node, operands)
    site = sites.site(node, sites.parameter_view(-1, node.shape_of(1)), 1, node.shape_of(0))
    if site is None:
        return [_convolve(node, *operands)]
    data, kernel = operands
    if not depends(node.ins[1], of_example):
        return [_convolve_separately(node, site, data, kernel)]

    # The kernel is of the example: products of patches, from [g, t, q] to the result.
    weights = site.of_view(kernel.astype(jnp.float32))
    patches = site.inputs(data[None])[0].astype(jnp.float32)
    outs = rounding.exact_einsum("gtp,gpq->gtq", patches, weights)
    images, features, *space = node.eqn.params["dimension_numbers"].out_spec
    order, shape = (images, *space, features), node.out_shape()
    flat = jnp.moveaxis(outs, 0, 1).reshape([shape[axis] for axis in order])
    found = jnp.transpose(flat, [order.index(axis) for axis in range(len(order))])
    return [found.astype(node.out_dtype())]


def _could_mix(
    traced: Traced, one: Callable[[PyTree, PyTree], PyTree], params: PyTree, example: PyTree
) -> bool:
    """True if ``vmap`` of ``one`` over examples could mix them in a convolution.

    That is a kernel that depends on the example, or any convolution inside another operation, such
    as ``cond``, in what is really run: gradients and custom rules included.

    Args:
        traced: the loss. Where it neither convolves nor has rules of its own, nothing mixes.
        one: what is run of one example.
        params: shapes of its first argument.
        example: shapes of its second.

    Raises:
        ValueError: a convolution there would read memory that is not its own.
    """

    def hidden(node: Node) -> bool:
        return node.name != _CONVOLUTION and any(map(holds_convolution, inner_jaxprs(node.eqn)))

    names = [node.name for node in _innermost(traced.program)]
    rules = any(name == _CONVOLUTION or name.startswith("custom_") for name in names)
    if not rules and not any(map(hidden, _innermost(traced.program))):
        return False
    run = trace(one, params, example, differentiated=True)
    nodes = list(_innermost(run.program))
    for node in nodes:
        _refuse_mixed_padding(node.eqn)
    kernels = (node.ins[1] for node in nodes if node.name == _CONVOLUTION)
    return any(map(hidden, nodes)) or any(depends(ref, run.of_example) for ref in kernels)


def _convolve(node: Node, data: jax.Array, kernel: jax.Array) -> jax.Array:
    """The convolution, as XLA's CPU backend keeps examples separate.

    All padding but ordinary padding is done before it. Ordinary is from 0 to the kernel's size less
    1: then neither it nor its gradient is cropped. The result has its axes in the order of the
    data's: of some other orders it reads other examples in a loop (kernels of 1 × 1, jax 0.10).
    """
    params = node.eqn.params
    numbers = params["dimension_numbers"]
    padding, holes = params["padding"], params["lhs_dilation"]
    sizes = [kernel.shape[axis] for axis in numbers.rhs_spec[2:]]
    reach = [(n - 1) * hole for n, hole in zip(sizes, params["rhs_dilation"], strict=True)]
    pairs = list(zip(padding, reach, strict=True))
    if not all(0 <= side <= most for pair, most in pairs for side in pair):
        edges = [(0, 0, 0)] * data.ndim
        for axis, pair, step in zip(numbers.lhs_spec[2:], padding, holes, strict=True):
            edges[axis] = (*pair, step - 1)
        data = jax.lax.pad(data, jnp.zeros([], data.dtype), edges)
        padding, holes = [(0, 0)] * len(sizes), [1] * len(sizes)
    options = {name: params[name] for name in _OPTIONS}
    options["dimension_numbers"] = numbers._replace(out_spec=numbers.lhs_spec)
    found = jax.lax.conv_general_dilated(
        data, kernel, padding=padding, lhs_dilation=holes, **options
    )
    return jnp.transpose(
        found, [numbers.lhs_spec[numbers.out_spec.index(axis)] for axis in range(data.ndim)]
    )


def _refuse_mixed_padding(eqn: core.JaxprEqn) -> None:
    padding = eqn.params.get("padding", ()) if eqn.primitive.name == _CONVOLUTION else ()
    if any(low < 0 < high for low, high in padding):
        raise ValueError(
            f"padding of a convolution must not crop one side and pad the other, got {padding} (in "
            "the loss or its gradient, inside a scan, cond, while or rule of its own): XLA's CPU "
            "backend then reads other examples. Crop or pad with jnp.pad before the convolution"
        )
    for jaxpr in inner_jaxprs(eqn):
        for inner in jaxpr.eqns:
            _refuse_mixed_padding(inner)


def _convolve_separately(node: Node, site: Site, data: jax.Array, kernel: jax.Array) -> jax.Array:
    def plain(data: jax.Array, kernel: jax.Array) -> jax.Array:
        return _convolve(node, data, kernel)

    def backward(both: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> PyTree:
        data, kernel = both
        (of_data,) = jax.vjp(lambda x: plain(x, kernel), data)[1](cotangent)
        grads = Use(site, (data[None], cotangent[None])).gradients()[0]
        return of_data, site.to_view(grads).astype(kernel.dtype)

    convolve = jax.custom_vjp(plain)
    convolve.defvjp(lambda data, kernel: (plain(data, kernel), (data, kernel)), backward)
    return convolve(data, kernel)


def _innermost(program: Program) -> Iterator[Node]:
    """Yields the operations, those of checkpoints and loops in place of these."""
    for node in program.nodes:
        inside = node.bodies if node.name != COND else ()
        yield from itertools.chain(*map(_innermost, inside)) if inside else (node,)


def holds_convolution(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> bool:
    """True if there is a convolution in it, or in what it calls."""
    here = any(eqn.primitive.name == _CONVOLUTION for eqn in jaxpr.eqns)
    return here or any(holds_convolution(each) for e in jaxpr.eqns for each in inner_jaxprs(e))
