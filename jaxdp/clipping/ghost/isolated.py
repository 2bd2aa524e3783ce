"""Convolutions whose examples stay apart, also where one of them is not finite.

Under ``vmap`` the gradient of a kernel, and a kernel made from the example, become one convolution
in groups of one example each. XLA may run it as a dense one in which zeros stand between the
groups (its CPU backend does), and 0 · inf is NaN: one broken example then breaks all of its batch,
and a single record decides whether the others count. Products of patches keep them apart.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxdp.clipping.ghost import sites, views
from jaxdp.clipping.ghost.factors import Use, dot
from jaxdp.clipping.ghost.program import Node, Program, Traced, apply_node, reached

CONVOLUTION = "conv_general_dilated"


class Convolutions:
    """The convolutions of a traced loss.

    Attributes:
        hidden: whether there is one that cannot be taken apart, inside a ``scan`` for example;
            then examples must be run one after the other.
    """

    def __init__(self, traced: Traced) -> None:
        self._of_examples = reached(traced.program, traced.program.ins[traced.num_params :])
        self.hidden = any(map(_hides, _nodes(traced.program)))

    def apply(self, node: Node, operands: Sequence[Any]) -> list[Any] | None:
        """The results of a convolution of one example; None for other operations."""
        if node.name != CONVOLUTION or (site := _site(node)) is None:
            return None
        kernel = node.ins[1]
        if isinstance(kernel, int) and kernel in self._of_examples:
            return [_by_patches(site, *operands)]
        return [_with_apart_gradients(site, *operands)]


def _by_patches(site: sites.Convolution, data: Any, kernel: Any) -> jax.Array:
    outs = dot("gtp,gpq->gtq", site.inputs(data[None])[0], site.of_view(kernel.astype(jnp.float32)))
    return site.result(outs).astype(site.node.out_dtype())


def _with_apart_gradients(site: sites.Convolution, data: Any, kernel: Any) -> jax.Array:
    @jax.custom_vjp
    def convolve(data: Any, kernel: Any) -> Any:
        return apply_node(site.node, [data, kernel])[0]

    def backward(residuals: Any, cotangent: Any) -> Any:
        data, kernel = residuals
        (of_data,) = jax.vjp(lambda x: apply_node(site.node, [x, kernel])[0], data)[1](cotangent)
        grads = Use(site, data[None], cotangent[None]).gradients()[0]
        return of_data, site.to_view(grads).astype(kernel.dtype)

    convolve.defvjp(lambda data, kernel: (convolve(data, kernel), (data, kernel)), backward)
    return convolve(data, kernel)


def _site(node: Node) -> sites.Convolution | None:
    view = views.of_parameter(-1, node.shape_of(1))
    site = sites.site(node, view, 1, node.shape_of(0))
    return site if isinstance(site, sites.Convolution) else None


def _nodes(program: Program) -> Iterator[Node]:
    for node in program.nodes:
        yield from (node,) if node.body is None else _nodes(node.body)


def _hides(node: Node) -> bool:
    if node.name == CONVOLUTION:
        floats = jnp.issubdtype(node.out_dtype(), jnp.inexact)
        return _site(node) is None and floats and 0 not in node.out_shape()
    return any(_convolves(inner) for inner in _inner(node.eqn))


def _convolves(jaxpr: core.Jaxpr) -> bool:
    return any(
        eqn.primitive.name == CONVOLUTION or any(map(_convolves, _inner(eqn))) for eqn in jaxpr.eqns
    )


def _inner(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    for value in jax.tree.leaves(dict(eqn.params), is_leaf=lambda v: hasattr(v, "eqns")):
        jaxpr: Any = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns"):
            yield jaxpr
