"""The loss of one example as a flat list of operations, so that parameters can be followed."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxdp.types import PyTree

# Calls that only group operations; their bodies are written out in place.
_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
# What remains of them where the gradient is already taken: their rules are used up.
_RULED = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
REMAT = ("remat2", "checkpoint", "remat")
SCAN, COND = "scan", "cond"
_RAGGED = "ragged_dot_general"


# The number of a value, or a literal itself.
Ref = int | core.Literal


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operation on numbered values."""

    eqn: core.JaxprEqn  # the traced equation: its primitive and parameters
    name: str  # of the primitive
    ins: tuple[Ref, ...]  # the operands
    outs: tuple[int, ...]  # numbers of the results
    debug_info: Any  # what names the traced function
    # Of ``jax.checkpoint`` and ``scan`` the one program inside; of ``cond`` the programs of which
    # one counts, which take the later operands. Their values have other numbers.
    bodies: "tuple[Program, ...]" = ()
    # The calls that it was written out of, outermost first: a library's operation has no line of
    # the user's, its call has.
    calls: tuple[core.JaxprEqn, ...] = ()

    @property
    def carried(self) -> slice:
        """The operands that a ``scan`` hands on from iteration to iteration; none elsewhere."""
        return carried_by(self.eqn) if self.name == SCAN else slice(0, 0)

    def shape_of(self, operand: int) -> tuple[int, ...]:
        """Shape of an operand."""
        aval: Any = self.eqn.invars[operand].aval
        return tuple(aval.shape)

    def out_shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        aval: Any = self.eqn.outvars[0].aval
        return tuple(aval.shape)

    def out_dtype(self) -> Any:
        """Type of the first result."""
        aval: Any = self.eqn.outvars[0].aval
        return aval.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function with all inner ``jit`` calls written out."""

    nodes: tuple[Node, ...]  # the operations in order
    ins: tuple[int, ...]  # numbers of the arguments
    outs: tuple[Ref, ...]  # numbers of the results, or literals
    consts: Mapping[int, jax.Array]  # values of the captured constants, by number


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A traced loss."""

    program: Program  # parameters' leaves first, then the example's, then the key's
    num_params: int  # how many of the arguments are parameters
    of_example: set[int]  # all values that depend on the example or its key
    out_tree: jax.tree_util.PyTreeDef  # structure of what the loss returned
    closed: core.ClosedJaxpr  # the loss as JAX traced it


def trace(
    fn: Callable[..., PyTree], params: PyTree, *args: PyTree, differentiated: bool = False
) -> Traced:
    """Traces ``fn`` at the shapes of its arguments, without computing anything.

    Args:
        fn: the function.
        params: its first argument.
        args: the others.
        differentiated: True if the gradient is taken inside, so that functions with custom rules
            are like any other; branches are left as they are.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(params, *args)
    inlined = {**_INLINED, **(_RULED if differentiated else {})}
    fresh = itertools.count(1)  # every value gets a number of its own

    def program_of(jaxpr: core.Jaxpr, consts: Sequence[jax.Array]) -> Program:
        numbers = {var: next(fresh) for var in (*jaxpr.constvars, *jaxpr.invars)}
        captured = {numbers[v]: const for v, const in zip(jaxpr.constvars, consts, strict=True)}
        nodes: list[Node] = []
        outs = write_out(jaxpr, numbers, nodes, captured)
        ins = tuple(numbers[var] for var in jaxpr.invars)
        return Program(tuple(nodes), ins, tuple(outs), captured)

    def write_out(
        jaxpr: core.Jaxpr,
        numbers: dict[Any, Any],
        nodes: list[Node],
        captured: dict[int, jax.Array],
        calls: tuple[core.JaxprEqn, ...] = (),
    ) -> list[Ref]:
        """The results of ``jaxpr``, whose operations are added to ``nodes``."""

        def refs(atoms: Sequence[Any]) -> list[Ref]:
            return [a if isinstance(a, core.Literal) else numbers[a] for a in atoms]

        for eqn in jaxpr.eqns:
            name, ins = eqn.primitive.name, refs(eqn.invars)

            # A call is written out in place, and a ragged product as a dense one.
            inner: Any = eqn.params[inlined[name]] if name in inlined else None
            if name == _RAGGED and (written := _ragged_as_dense(eqn)) is not None:
                inner = jax.make_jaxpr(written)(*(var.aval for var in eqn.invars))
            if inner is not None:
                body = getattr(inner, "jaxpr", inner)
                within: dict[Any, Any] = dict(zip(body.invars, ins, strict=True))
                for var, const in zip(body.constvars, getattr(inner, "consts", ()), strict=True):
                    within[var] = next(fresh)
                    captured[within[var]] = const
                results = write_out(body, within, nodes, captured, (*calls, eqn))
                numbers.update(zip(eqn.outvars, results, strict=True))
                continue

            numbers.update({var: next(fresh) for var in eqn.outvars})
            # Programs inside stay so: of a checkpoint or a loop, and the branches of a cond.
            bodies: list[Any] = [eqn.params["jaxpr"]] if name in (*REMAT, SCAN) else []
            if name == COND and not differentiated:
                bodies = list(eqn.params["branches"])
            each = [program_of(getattr(b, "jaxpr", b), getattr(b, "consts", ())) for b in bodies]
            outs = tuple(numbers[var] for var in eqn.outvars)
            nodes.append(Node(eqn, name, tuple(ins), outs, jaxpr.debug_info, tuple(each), calls))
        return refs(jaxpr.outvars)

    program = program_of(closed.jaxpr, closed.consts)
    count = len(jax.tree.leaves(params))
    of_example = reached(program, program.ins[count:])
    return Traced(program, count, of_example, jax.tree.structure(shapes), closed)


def depends(ref: Ref, values: Collection[int]) -> bool:
    """True if an operand is one of the values; a literal, which has no hash, is none."""
    return isinstance(ref, int) and ref in values


def reached(program: Program, sources: Iterable[int]) -> set[int]:
    """All values that depend on any of the values ``sources``, inside checkpoints too."""
    found = set(sources)
    for node in program.nodes:
        flags = [depends(ref, found) for ref in node.ins]
        if node.name == COND:
            for branch in node.bodies:
                entering = zip(branch.ins, flags[1:], strict=True)
                found |= reached(branch, [number for number, flag in entering if flag])
        elif node.bodies:
            found |= reached_in_body(node, flags)
        if any(flags):
            found.update(node.outs)
    return found


def reached_in_body(node: Node, known: Sequence[bool]) -> set[int]:
    """All values in the body of a checkpoint or loop that depend on the operands ``known``."""
    (body,) = node.bodies
    sources = {number for number, flag in zip(body.ins, known, strict=True) if flag}
    carried = list(zip(body.ins[node.carried], body.outs, strict=False))
    while True:
        found = reached(body, sources)
        more = {number for number, out in carried if depends(out, found)}
        if more <= sources:
            return found
        sources |= more


def all_nodes(program: Program) -> Iterator[Node]:
    """All operations, those inside others too."""
    for node in program.nodes:
        yield node
        for body in node.bodies:
            yield from all_nodes(body)


def carried_by(scan: core.JaxprEqn) -> slice:
    """The operands that a ``scan`` hands on from iteration to iteration."""
    params = scan.params
    if "ft_in" in params:  # from JAX 0.11 on
        first, count = (len(part) for part in params["ft_in"].unpack()[:2])
    else:
        first, count = params["num_consts"], params["num_carry"]
    return slice(first, first + count)


def inner_jaxprs(eqn: core.JaxprEqn) -> list[core.ClosedJaxpr | core.Jaxpr]:
    """The programs inside an operation, as JAX has them."""
    leaves = jax.tree.leaves(dict(eqn.params), is_leaf=lambda value: hasattr(value, "eqns"))
    return [value for value in leaves if hasattr(value, "eqns")]


def is_rewritten(node: Node) -> bool:
    """True if the programs inside are not as JAX has them, so that they must be run from here."""
    return bool(node.bodies) and _holds_ragged(node.eqn)


def _holds_ragged(eqn: core.JaxprEqn) -> bool:
    inner = (each for jaxpr in inner_jaxprs(eqn) for each in jaxpr.eqns)
    return any(each.primitive.name == _RAGGED or _holds_ragged(each) for each in inner)


def apply_node(node: Node, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The operation as JAX would have run it, custom derivatives included."""
    eqn = node.eqn
    each = zip(eqn.invars, operands, strict=True)
    given = {var: value for var, value in each if not isinstance(var, core.Literal)}
    jaxpr = core.Jaxpr([], list(given), eqn.outvars, [eqn], debug_info=node.debug_info)
    return list(core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, []))(*given.values()))


def _ragged_as_dense(eqn: core.JaxprEqn) -> Callable[..., jax.Array] | None:
    """The operation written with ``dot_general``; None where it is not ``jax.lax.ragged_dot``.

    Position t of expert e is row (t, e) of positions by experts, whose other rows are zero: what
    JAX computes, too, where there is no kernel for it (jax 0.10).
    """
    params = eqn.params
    numbers = params["ragged_dot_dimension_numbers"]
    basic = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    sizes: Any = eqn.invars[2].aval
    if numbers != basic or len(eqn.invars) != 3 or len(sizes.shape) != 1:
        return None

    def product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        ends = jnp.cumsum(sizes)[None]
        at = lax.broadcasted_iota(ends.dtype, (lhs.shape[0], 1), 0)
        mine = (at >= ends - sizes[None]) & (at < ends)
        rows = jnp.where(mine[:, :, None], lhs[:, None, :], jnp.zeros([], lhs.dtype))
        options = {name: params[name] for name in ("precision", "preferred_element_type")}
        return lax.dot_general(rows, rhs, (((1, 2), (0, 1)), ((), ())), **options)

    return product
