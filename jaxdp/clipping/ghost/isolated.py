"""Convolutions whose examples stay separate, also where one of them is not finite.

Under ``vmap`` the gradient of a kernel, and a kernel made from the example, become one convolution
in groups of one example each. XLA may run it as a dense one in which zeros stand between the
groups (its CPU backend does), and 0 · inf is NaN: one broken example then breaks all of its batch,
and a single record decides whether the others count. Products of patches keep them apart.

A convolution that is cropped on one side and padded on the other reads memory that is not its own
on XLA's CPU backend, other examples' included. So what is not ordinary padding is done beforehand.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxdp.clipping.ghost import sites, views
from jaxdp.clipping.ghost.factors import Use
from jaxdp.clipping.ghost.program import (
    Node,
    Program,
    Traced,
    apply_node,
    inner_jaxprs,
    reached,
    trace,
)
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


class Apart:
    """Runs the convolutions of a traced loss so that ``vmap`` keeps its examples separate."""

    def __init__(self, traced: Traced) -> None:
        self._of_examples = reached(traced.program, traced.program.ins[traced.num_params :])

    def apply(self, node: Node, operands: Sequence[Any]) -> list[Any] | None:
        """The results of a convolution of one example; None for other operations."""
        if node.name != CONVOLUTION:
            return None
        if (site := _site(node)) is None:
            return [convolved(node, *operands)]
        kernel = node.ins[1]
        if isinstance(kernel, int) and kernel in self._of_examples:
            return [_by_patches(site, *operands)]
        return [_with_apart_gradients(site, *operands)]


def mixes(one: Callable[[PyTree, PyTree], PyTree], params: PyTree, example: PyTree) -> bool:
    """True if ``vmap`` of ``one`` over examples could mix them in a convolution.

    Looked for in what is really run, gradients and custom rules included: a kernel that depends on
    the example, or any convolution inside another operation, such as ``cond``.

    Raises:
        ValueError: a convolution there would read memory that is not its own.
    """
    traced = trace(one, params, example, differentiated=True)
    for node in _nodes(traced.program):
        _refuse_crossed(node.eqn)
    of_example = reached(traced.program, traced.program.ins[traced.num_params :])
    return any(_mixes(node, of_example) for node in _nodes(traced.program))


def may_mix(traced: Traced) -> bool:
    """True if the loss itself convolves, or has rules of its own, which might."""
    return any(
        node.name == CONVOLUTION or node.name.startswith("custom_") or _hides(node)
        for node in _nodes(traced.program)
    )


def _mixes(node: Node, of_example: Collection[int]) -> bool:
    if node.name == CONVOLUTION:
        kernel = node.ins[1]
        return isinstance(kernel, int) and kernel in of_example
    return _hides(node)


def _hides(node: Node) -> bool:
    return any(_convolves(inner) for inner in inner_jaxprs(node.eqn))


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


def _by_patches(site: sites.Convolution, data: jax.Array, kernel: jax.Array) -> jax.Array:
    weights = site.of_view(kernel.astype(jnp.float32))
    outs = exact("gtp,gpq->gtq", site.inputs(data[None])[0].astype(jnp.float32), weights)
    return site.result(outs).astype(site.node.out_dtype())


def _with_apart_gradients(site: sites.Convolution, data: jax.Array, kernel: jax.Array) -> jax.Array:
    def plain(data: jax.Array, kernel: jax.Array) -> jax.Array:
        return convolved(site.node, data, kernel)

    def backward(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> Any:
        data, kernel = residuals
        (of_data,) = jax.vjp(lambda x: plain(x, kernel), data)[1](cotangent)
        grads = Use(site, data[None], cotangent[None]).gradients()[0]
        return of_data, site.to_view(grads).astype(kernel.dtype)

    convolve = jax.custom_vjp(plain)
    convolve.defvjp(lambda data, kernel: (plain(data, kernel), (data, kernel)), backward)
    return convolve(data, kernel)


def _site(node: Node) -> sites.Convolution | None:
    view = views.of_parameter(-1, node.shape_of(1))
    site = sites.site(node, view, 1, node.shape_of(0))
    return site if isinstance(site, sites.Convolution) else None


def _nodes(program: Program) -> Iterator[Node]:
    for node in program.nodes:
        yield from (node,) if node.body is None else _nodes(node.body)


def _convolves(jaxpr: core.Jaxpr) -> bool:
    return any(
        eqn.primitive.name == CONVOLUTION or any(map(_convolves, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )
