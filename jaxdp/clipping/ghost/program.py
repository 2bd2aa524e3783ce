"""The loss of one example as a flat list of operations, so that parameters can be followed."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
_REMAT = ("remat2", "checkpoint", "remat")
SCAN, COND = "scan", "cond"
_RAGGED = "ragged_dot_general"


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operation on numbered values.

    Attributes:
        eqn: the traced equation: its primitive and parameters.
        ins: numbers of the operands, or the literals themselves.
        outs: numbers of the results.
        debug_info: what names the traced function.
        body: for ``jax.checkpoint`` and ``scan``, the program inside; its values have numbers of
            their own.
        branches: for ``cond``, the programs of which one counts; they take the later operands.
    """

    eqn: core.JaxprEqn
    ins: tuple["int | core.Literal", ...]
    outs: tuple[int, ...]
    debug_info: Any
    body: "Program | None" = None
    branches: "tuple[Program, ...]" = ()

    @property
    def bodies(self) -> "tuple[Program, ...]":
        """All programs inside."""
        return self.branches if self.body is None else (self.body,)

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return str(self.eqn.primitive.name)

    @property
    def carried(self) -> slice:
        """The operands that a ``scan`` hands on from pass to pass; none of other operations."""
        if self.name != SCAN or self.body is None:
            return slice(0, 0)
        first = self.eqn.params["num_consts"]
        return slice(first, first + self.eqn.params["num_carry"])

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
    """A traced function with all inner ``jit`` calls written out.

    Attributes:
        nodes: the operations in order.
        ins: numbers of the arguments.
        outs: numbers of the results, or literals.
        consts: values of the captured constants, by number.
    """

    nodes: tuple[Node, ...]
    ins: tuple[int, ...]
    outs: tuple["int | core.Literal", ...]
    consts: Mapping[int, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A traced loss.

    Attributes:
        program: parameters' leaves first, then the example's, then the key's.
        num_params: how many of the arguments are parameters.
        out_tree: structure of what the loss returned.
        closed: the loss as JAX traced it, a ``ClosedJaxpr``.
    """

    program: Program
    num_params: int
    out_tree: Any
    closed: Any

    def ignores_example(self) -> bool:
        """True if no argument beyond the parameters reaches the first result, the loss."""
        result = self.program.outs[0]
        examples = self.program.ins[self.num_params :]
        return not (isinstance(result, int) and result in reached(self.program, examples))


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
    program = _Flattener(inlined, not differentiated).program(closed.jaxpr, closed.consts)
    return Traced(program, len(jax.tree.leaves(params)), jax.tree.structure(shapes), closed)


def reached(program: Program, sources: Iterable[int]) -> set[int]:
    """All values that depend on any of the values ``sources``, inside checkpoints too."""
    found = set(sources)
    for node in program.nodes:
        if node.body is not None:
            found |= inside(node, [isinstance(ref, int) and ref in found for ref in node.ins])
        for branch in node.branches:
            entering = zip(branch.ins, node.ins[1:], strict=True)
            known = [number for number, ref in entering if isinstance(ref, int) and ref in found]
            found |= reached(branch, known)
        if any(isinstance(ref, int) and ref in found for ref in node.ins):
            found.update(node.outs)
    return found


def inside(node: Node, known: Sequence[bool]) -> set[int]:
    """All values in the body of ``node`` that depend on the operands that are ``known``."""
    body = node.body
    assert body is not None
    sources = {number for number, flag in zip(body.ins, known, strict=True) if flag}
    carried = list(zip(body.ins[node.carried], body.outs, strict=False))
    while True:
        found = reached(body, sources)
        more = {number for number, out in carried if isinstance(out, int) and out in found}
        if more <= sources:
            return found
        sources |= more


def nodes(program: Program) -> Iterator[Node]:
    """All operations, those inside others too."""
    for node in program.nodes:
        yield node
        for body in node.bodies:
            yield from nodes(body)


def inner_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The programs inside an operation, as JAX has them."""
    for value in jax.tree.leaves(dict(eqn.params), is_leaf=lambda v: hasattr(v, "eqns")):
        jaxpr: Any = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns"):
            yield jaxpr


def rewritten(node: Node) -> bool:
    """True if the programs inside are not as JAX has them, so that they must be run from here."""
    return bool(node.bodies) and _holds_ragged(node.eqn)


def _holds_ragged(eqn: core.JaxprEqn) -> bool:
    inner = (each for jaxpr in inner_jaxprs(eqn) for each in jaxpr.eqns)
    return any(each.primitive.name == _RAGGED or _holds_ragged(each) for each in inner)


def evaluate(
    program: Program, args: Sequence[Any], on_node: Callable[[Node, list[Any]], list[Any]]
) -> list[Any]:
    """Runs the program; ``on_node`` computes each operation from its operands."""
    values = dict(program.consts)
    values.update(zip(program.ins, args, strict=True))

    def read(ref: "int | core.Literal") -> Any:
        return values[ref] if isinstance(ref, int) else ref.val

    for node in program.nodes:
        results = on_node(node, [read(ref) for ref in node.ins])
        values.update(zip(node.outs, results, strict=True))
    return [read(ref) for ref in program.outs]


def apply_node(node: Node, operands: Sequence[Any]) -> list[Any]:
    """The operation as JAX would have run it, custom derivatives included."""
    eqn = node.eqn
    given = {
        var: value
        for var, value in zip(eqn.invars, operands, strict=True)
        if not isinstance(var, core.Literal)
    }
    jaxpr = core.Jaxpr([], list(given), eqn.outvars, [eqn], debug_info=node.debug_info)
    return list(core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, []))(*given.values()))


class _Flattener:
    """Writes out calls; every value gets a number of its own."""

    def __init__(self, inlined: Mapping[str, str], branches: bool) -> None:
        self._inlined, self._branches = inlined, branches
        self._used = 0

    def program(self, jaxpr: core.Jaxpr, consts: Sequence[Any]) -> Program:
        numbers = {var: self._fresh() for var in (*jaxpr.constvars, *jaxpr.invars)}
        nodes: list[Node] = []
        captured: dict[int, Any] = {}
        self._write_out(jaxpr, numbers, nodes, captured)
        captured.update({numbers[v]: c for v, c in zip(jaxpr.constvars, consts, strict=True)})
        outs = tuple(_number(atom, numbers) for atom in jaxpr.outvars)
        return Program(tuple(nodes), tuple(numbers[v] for v in jaxpr.invars), outs, captured)

    def _write_out(
        self,
        jaxpr: core.Jaxpr,
        numbers: dict[Any, Any],
        nodes: list[Node],
        captured: dict[int, Any],
    ) -> None:
        for eqn in jaxpr.eqns:
            ins = tuple(_number(atom, numbers) for atom in eqn.invars)
            if (inner := self._inside(eqn)) is not None:
                body = getattr(inner, "jaxpr", inner)
                inside: dict[Any, Any] = dict(zip(body.invars, ins, strict=True))
                for var, const in zip(body.constvars, getattr(inner, "consts", ()), strict=True):
                    inside[var] = self._fresh()
                    captured[inside[var]] = const
                self._write_out(body, inside, nodes, captured)
                results = [_number(atom, inside) for atom in body.outvars]
                numbers.update(zip(eqn.outvars, results, strict=True))
                continue
            numbers.update({var: self._fresh() for var in eqn.outvars})
            body_program = None
            if eqn.primitive.name in _REMAT:
                body_program = self.program(eqn.params["jaxpr"], ())
            elif eqn.primitive.name == SCAN:
                closed = eqn.params["jaxpr"]
                body_program = self.program(closed.jaxpr, closed.consts)
            branches: tuple[Program, ...] = ()
            if eqn.primitive.name == COND and self._branches:
                each = eqn.params["branches"]
                branches = tuple(self.program(closed.jaxpr, closed.consts) for closed in each)
            outs = tuple(numbers[var] for var in eqn.outvars)
            nodes.append(Node(eqn, ins, outs, jaxpr.debug_info, body_program, branches))

    def _inside(self, eqn: core.JaxprEqn) -> Any:
        """The program written out in place of an operation; None for most."""
        if eqn.primitive.name in self._inlined:
            return eqn.params[self._inlined[eqn.primitive.name]]
        if eqn.primitive.name == _RAGGED and (written := _dense(eqn)) is not None:
            return jax.make_jaxpr(written)(*(var.aval for var in eqn.invars))
        return None

    def _fresh(self) -> int:
        self._used += 1
        return self._used


def _number(atom: Any, numbers: Mapping[Any, Any]) -> Any:
    return atom if isinstance(atom, core.Literal) else numbers[atom]


def _dense(eqn: core.JaxprEqn) -> Callable[..., jax.Array] | None:
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
        return lax.dot_general(
            rows,
            rhs,
            (((1, 2), (0, 1)), ((), ())),
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )

    return product
