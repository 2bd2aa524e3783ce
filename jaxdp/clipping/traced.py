"""A loss of one example, traced, with the engine of each parameter."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.clipping import captured, options
from jaxdp.clipping.ghost import program, uses
from jaxdp.clipping.ghost.plan import Plan, plan
from jaxdp.clipping.ghost.program import Traced
from jaxdp.clipping.ghost.uses import Uses
from jaxdp.types import PyTree


def decided(
    called: Callable[..., Any],
    params: PyTree,
    args: Sequence[PyTree],
    flags: list[bool],
    constants: captured.Declared,
    size: int,
    engine: str,
) -> tuple[Traced, Uses, Plan]:
    """The traced loss, its uses of parameters, and the engine of each.

    Args:
        called: the loss, (params, example) or (params, example, key).
        params: the parameters.
        args: shapes of the other arguments.
        flags: for each leaf of the parameters, True if it is trained.
        constants: captured arrays that are declared public.
        size: rows that are worked on together.
        engine: as for ``clipped_grad``.

    Raises:
        ValueError: the loss cannot be used with these arguments.
    """
    options.check_params(params, flags)

    def loss(params: PyTree, *args: PyTree) -> tuple[jax.Array, Any]:
        try:
            result = called(params, *args)
        except Exception as error:
            error.add_note(f"jaxdp handed the loss one example: {options.shapes(args[0])}")
            raise
        return options.checked_result(result)

    traced = program.trace(loss, params, *args)
    found = captured.found(traced.closed, constants, loss, flags, params, args)
    if traced.ignores_example():
        raise ValueError("loss_fn must depend on its example, but its result does not")
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
    used = uses.find(traced, shapes)
    each = plan(options.paths(params), shapes, flags, used, size, engine)
    return traced, used, Plan((*each, *found))
