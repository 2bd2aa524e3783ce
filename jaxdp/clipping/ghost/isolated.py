"""Convolutions whose examples stay separate, also where one of them is not finite.

Under ``vmap`` the gradient of a kernel, and a kernel made from the example, become one convolution
in groups of one example each. XLA may run it as a dense one in which zeros stand between the
groups (its CPU backend does), and 0 · inf is NaN: one broken example then breaks all of its batch,
and a single record decides whether the others count. Products of patches keep them apart.

A convolution that is cropped on one side and padded on the other reads memory that is not its own
on XLA's CPU backend, other examples' included. So what is not ordinary padding is done beforehand.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxdp.clipping.ghost import sites, views
from jaxdp.clipping.ghost.factors import Use
from jaxdp.clipping.ghost.program import (
    COND,
    Node,
    Program,
    Traced,
    apply_node,
    depends,
    inner_jaxprs,
    reached,
    trace,
)
from jaxdp.clipping.ghost.sites import Site
from jaxdp.clipping.rounding import exact
from jaxdp.types import PyTree

CONVOLUTION = "conv_general_dilated"
_OPTIONS = (
    "window_strides",
    "rhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "batch_group_count",
    "precision",
    "preferred_element_type",
)


def applied(
    node: Node, operands: Sequence[jax.Array], of_examples: Collection[int]
) -> list[jax.Array]:
    """The results of an operation of one example, so that ``vmap`` keeps examples separate.

    Args:
        node: the operation.
        operands: of one example.
        of_examples: the values that depend on the example.
    """
    if node.name != CONVOLUTION:
        return apply_node(node, operands)
    site = sites.site(node, views.of_parameter(-1, node.shape_of(1)), 1, node.shape_of(0))
    if site is None:
        return [convolved(node, *operands)]
    data, kernel = operands
    if not depends(node.ins[1], of_examples):
        return [_with_apart_gradients(node, site, data, kernel)]

    # The kernel is of the example: products of patches, from [g, t, q] to the result.
    weights = site.of_view(kernel.astype(jnp.float32))
    outs = exact("gtp,gpq->gtq", site.inputs(data[None])[0].astype(jnp.float32), weights)
    images, features, *space = node.eqn.params["dimension_numbers"].out_spec
    order, shape = (images, *space, features), node.out_shape()
    flat = jnp.moveaxis(outs, 0, 1).reshape([shape[axis] for axis in order])
    found = jnp.transpose(flat, [order.index(axis) for axis in range(len(order))])
    return [found.astype(node.out_dtype())]


def mixes(
    traced: Traced, one: Callable[[PyTree, PyTree], PyTree], params: PyTree, example: PyTree
) -> bool:
    """True if ``vmap`` of ``one`` over examples could mix them in a convolution.

    Looked for in what is really run, gradients and custom rules included: a kernel that depends on
    the example, or any convolution inside another operation, such as ``cond``.

    Args:
        traced: the loss. Where it neither convolves nor has rules of its own, nothing mixes.
        one: what is run of one example.
        params: shapes of its first argument.
        example: shapes of its second.

    Raises:
        ValueError: a convolution there would read memory that is not its own.
    """

    def hidden(node: Node) -> bool:
        return node.name != CONVOLUTION and any(map(_convolves, inner_jaxprs(node.eqn)))

    names = [node.name for node in _nodes(traced.program)]
    rules = any(name == CONVOLUTION or name.startswith("custom_") for name in names)
    if not rules and not any(map(hidden, _nodes(traced.program))):
        return False
    run = trace(one, params, example, differentiated=True)
    for node in _nodes(run.program):
        _refuse_crossed(node.eqn)
    of_example = reached(run.program, run.program.ins[run.num_params :])
    return any(
        hidden(node) or (node.name == CONVOLUTION and depends(node.ins[1], of_example))
        for node in _nodes(run.program)
    )


def convolved(node: Node, data: jax.Array, kernel: jax.Array) -> jax.Array:
    """The convolution, with all padding but ordinary padding done before it.

    Ordinary is from 0 to the kernel's size less 1: then neither it nor its gradient is cropped.
    """
    params = node.eqn.params
    numbers = params["dimension_numbers"]
    sizes = [kernel.shape[axis] for axis in numbers.rhs_spec[2:]]
    reach = [(n - 1) * hole for n, hole in zip(sizes, params["rhs_dilation"], strict=True)]
    pairs = list(zip(params["padding"], reach, strict=True))
    if all(0 <= side <= most for pair, most in pairs for side in pair):
        return apply_node(node, [data, kernel])[0]
    edges = [(0, 0, 0)] * data.ndim
    for axis, pair, step in zip(
        numbers.lhs_spec[2:], params["padding"], params["lhs_dilation"], strict=True
    ):
        edges[axis] = (*pair, step - 1)
    options = {name: params[name] for name in _OPTIONS}
    data = jax.lax.pad(data, jnp.zeros([], data.dtype), edges)
    return jax.lax.conv_general_dilated(data, kernel, padding=[(0, 0)] * len(sizes), **options)


def _refuse_crossed(eqn: core.JaxprEqn) -> None:
    padding = eqn.params.get("padding", ()) if eqn.primitive.name == CONVOLUTION else ()
    if any(low < 0 < high for low, high in padding):
        raise ValueError(
            f"padding of a convolution must not crop one side and pad the other, got {padding} (in "
            "the loss or its gradient, inside a scan, cond, while or rule of its own): XLA's CPU "
            "backend then reads other examples. Crop or pad with jnp.pad before the convolution"
        )
    for jaxpr in inner_jaxprs(eqn):
        for inner in jaxpr.eqns:
            _refuse_crossed(inner)


def _with_apart_gradients(node: Node, site: Site, data: jax.Array, kernel: jax.Array) -> jax.Array:
    def plain(data: jax.Array, kernel: jax.Array) -> jax.Array:
        return convolved(node, data, kernel)

    def backward(
        residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        data, kernel = residuals
        (of_data,) = jax.vjp(lambda x: plain(x, kernel), data)[1](cotangent)
        grads = Use(site, data[None], cotangent[None]).gradients()[0]
        return of_data, site.to_view(grads).astype(kernel.dtype)

    convolve = jax.custom_vjp(plain)
    convolve.defvjp(lambda data, kernel: (plain(data, kernel), (data, kernel)), backward)
    return convolve(data, kernel)


def _nodes(program: Program) -> Iterator[Node]:
    """The operations, those of checkpoints and loops in their place."""
    for node in program.nodes:
        inside = node.bodies if node.name != COND else ()
        yield from itertools.chain(*map(_nodes, inside)) if inside else (node,)


def _convolves(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> bool:
    return any(
        eqn.primitive.name == CONVOLUTION or any(map(_convolves, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )
