"""Parameters after linear operations: products with others, sums, multiples and slices of them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxdp.clipping.ghost import views
from jaxdp.clipping.ghost.program import Node
from jaxdp.clipping.ghost.steps import Cut, Name, Product, Step
from jaxdp.clipping.ghost.views import Joined, View

# A product of sums has as many terms as the product of their numbers.
_MOST_TERMS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Term:
    """A parameter after a step, rearranged.

    Attributes:
        inner: the parameter, or another term.
        step: the operation.
        outer: its result as later operations see it, as if it were a parameter.
    """

    inner: "View | Term"
    step: Step
    outer: View

    @property
    def leaf(self) -> int:
        """Number of the parameter's leaf."""
        return self.inner.leaf

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.outer.shape


@dataclasses.dataclass(frozen=True, eq=False)
class Sum:
    """A sum of terms."""

    terms: tuple[View | Term, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.terms[0].shape


Followed = View | Term | Sum | Joined


def parameters(what: Followed) -> list[View]:
    """The parameters in it."""
    if isinstance(what, View):
        return [what]
    if isinstance(what, Term):
        return parameters(what.inner)
    members = what.views if isinstance(what, Joined) else what.terms
    return [view for each in members for view in parameters(each)]


def through(node: Node, what: Followed) -> Followed | None:
    """``what`` after one more operation; None if that does more than rearrange it."""
    if isinstance(what, View | Joined):
        return views.through(node, what)
    if isinstance(what, Term):
        outer = views.through(node, what.outer)
        return dataclasses.replace(what, outer=outer) if isinstance(outer, View) else None
    return total([through(node, term) for term in what.terms])


def sliced(what: Followed) -> Followed | None:
    """The slice that a ``scan`` takes in every pass; None where that cannot be followed."""
    if isinstance(what, View):
        return views.sliced(what)
    if isinstance(what, Sum):
        return total([sliced(term) for term in what.terms])
    if isinstance(what, Joined) or what.outer.labels[0] != (0,):
        return None
    inner, step = sliced(what.inner), what.step.of_slice()
    if inner is None or step is None:
        return None
    outer = what.outer
    labels = tuple(tuple(map(_lowered, label)) for label in outer.labels[1:])
    outer = View(outer.leaf, outer.leaf_shape[1:], outer.shape[1:], labels)
    return Term(inner, step, outer)  # type: ignore[arg-type]


def onward(node: Node, ins: Sequence[Any]) -> list[Followed] | None:
    """The results of an operation on parameters and constants; None if it is not linear in them.

    Args:
        node: the operation.
        ins: for each operand what is followed in it, or which of its axes it is constant along
            (``Spread``), or None.
    """
    maker = _MAKERS.get(node.name)
    found = {at: what for at, what in enumerate(ins) if isinstance(what, View | Term | Sum)}
    joined = any(isinstance(what, Joined) for what in ins)
    if maker is None or joined or not jnp.issubdtype(node.out_dtype(), jnp.floating):
        return None
    made = maker(node, found, ins)
    return None if made is None or any(each is None for each in made) else made


def multipliers(node: Node, found: Mapping[int, Followed]) -> set[int]:
    """The operands that count as constants, since another is multiplied with them: the smaller."""
    if node.name not in ("mul", "div") or len(found) < 2:
        return set()
    whole = [at for at in found if node.shape_of(at) == node.out_shape()]
    followed = len(whole) == 1 and (whole == [0] or node.name == "mul")
    return set(found) - set(whole) if followed else set()


@dataclasses.dataclass(frozen=True)
class Spread:
    """A constant that differs along some of its axes only."""

    axes: tuple[int, ...]


def spread(node: Node) -> Spread | None:
    """The axes of a broadcast constant; None of other operations."""
    if node.name != "broadcast_in_dim":
        return None
    sizes = zip(node.eqn.params["broadcast_dimensions"], node.shape_of(0), strict=True)
    return Spread(tuple(axis for axis, size in sizes if size > 1))


def total(parts: Sequence[Any]) -> Any:
    """The sum of what is followed; None if there is nothing, None among it, or too many terms."""
    if any(part is None for part in parts):
        return None
    flat = [each for part in parts for each in terms(part)]
    if not 0 < len(flat) <= _MOST_TERMS:
        return None
    return flat[0] if len(flat) == 1 else Sum(tuple(flat))


def terms(what: View | Term | Sum) -> tuple[View | Term, ...]:
    """Its terms."""
    return what.terms if isinstance(what, Sum) else (what,)


def _after(what: View | Term, step: Step, shape: Sequence[int]) -> Term:
    return Term(what, step, views.of_parameter(what.leaf, shape))


def _times(node: Node, what: View | Term | Sum, **options: Any) -> Any:
    """A multiple: of one number, of the parameters themselves, where products come last."""

    def one(term: View | Term) -> Term:
        if isinstance(term, Term) and not any(axis is not None for axis in options["axes"]):
            return dataclasses.replace(term, inner=one(term.inner))
        kept = {axis: axis for axis in range(len(term.shape))}
        step = Product(node, term.shape, kept, (), (), **options)
        return _after(term, step, term.shape)

    return total([one(term) for term in terms(what)])


def _added(node: Node, found: Mapping[int, Any], _: Sequence[Any]) -> list[Any] | None:
    if any(what.shape != node.out_shape() for what in found.values()):
        return None
    if node.name == "sub" and 1 in found:
        found = {**found, 1: _times(node, found[1], operand=None, axes=(), sign=-1.0)}
    return [total(list(found.values()))]


def _negated(node: Node, found: Mapping[int, Any], _: Sequence[Any]) -> list[Any]:
    return [_times(node, found[0], operand=None, axes=(), sign=-1.0)]


def _multiplied(node: Node, found: Mapping[int, Any], ins: Sequence[Any]) -> list[Any] | None:
    ((at, what), *more) = found.items()
    divides = node.name == "div"
    if more or what.shape != node.out_shape() or (divides and at != 0):
        return None
    shape, kind = node.shape_of(1 - at), ins[1 - at]
    varies = kind.axes if isinstance(kind, Spread) else range(len(shape))
    axes = tuple(axis if axis in varies and shape[axis] > 1 else None for axis in range(len(shape)))
    return [_times(node, what, operand=1 - at, axes=axes, divides=divides)]


def _product(node: Node, found: Mapping[int, Any], _: Sequence[Any]) -> list[Any]:
    each = [(at, term) for at, what in found.items() for term in terms(what)]
    steps = [_of_product(node, at, term.shape) for at, term in each]
    shape = node.out_shape()
    return [total([_after(term, step, shape) for (_, term), step in zip(each, steps, strict=True)])]


def _of_product(node: Node, at: int, shape: tuple[int, ...]) -> Product:
    contract, batch = node.eqn.params["dimension_numbers"]
    free, others = (
        [a for a in range(len(node.shape_of(i))) if a not in (*contract[i], *batch[i])]
        for i in (at, 1 - at)
    )
    first = len(batch[at])  # axes of the result: batch, then the first operand's, the second's
    mine, theirs = (first, first + len(free)) if at == 0 else (first + len(others), first)
    kept = {**dict(enumerate(batch[at])), **{mine + i: axis for i, axis in enumerate(free)}}
    axes: dict[int, Any] = {axis: i for i, axis in enumerate(batch[1 - at])}
    axes |= {axis: theirs + i for i, axis in enumerate(others)}
    axes |= {there: ("v", a) for a, there in zip(contract[at], contract[1 - at], strict=True)}
    new = tuple(theirs + i for i in range(len(others)))
    ordered = tuple(axes[axis] for axis in range(len(axes)))
    return Product(node, shape, kept, new, tuple(contract[at]), 1 - at, axes=ordered)


def _cut(node: Node, found: Mapping[int, Any], _: Sequence[Any]) -> list[Any] | None:
    if list(found) != [0]:
        return None
    starts: Sequence[int | None] = [None] * len(found[0].shape)
    strides: Sequence[int] | None = None
    if node.name == "slice":
        starts, strides = node.eqn.params["start_indices"], node.eqn.params["strides"]
    strides = strides or [1] * len(starts)
    return [total([_sliced(node, t, node.out_shape(), starts, strides) for t in terms(found[0])])]


def _split(node: Node, found: Mapping[int, Any], _: Sequence[Any]) -> list[Any]:
    axis, made, start = node.eqn.params["axis"], [], 0
    for size in map(int, node.eqn.params["sizes"]):
        each = []
        for term in terms(found[0]):
            shape = (*term.shape[:axis], size, *term.shape[axis + 1 :])
            starts = [start if i == axis else 0 for i in range(len(shape))]
            each.append(_sliced(node, term, shape, starts, [1] * len(shape)))
        made.append(total(each))
        start += size
    return made


def _sliced(
    node: Node,
    what: View | Term,
    shape: Sequence[int],
    starts: Sequence[int | None],
    strides: Sequence[int],
) -> View | Term:
    """The slice, one axis after the other; a start of None is the value of an operand."""
    rank = len(shape)
    for axis, (start, stride) in enumerate(zip(starts, strides, strict=True)):
        if shape[axis] == what.shape[axis]:
            continue
        kept = {i: i for i in range(rank) if i != axis}
        operand = 1 + axis if start is None else None
        now = (*what.shape[:axis], shape[axis], *what.shape[axis + 1 :])
        step = Cut(
            node, what.shape, kept, (axis,), (axis,), operand, start=start or 0, stride=stride
        )
        what = _after(what, step, now)
    return what


def _lowered(atom: Name) -> Name:
    if isinstance(atom, int):
        return atom - 1
    split, label, *which = atom
    return (split, tuple(map(_lowered, label)), *which)


_MAKERS: Mapping[str, Callable[..., list[Any] | None]] = {
    **dict.fromkeys(("add", "add_any", "sub"), _added),
    **dict.fromkeys(("mul", "div"), _multiplied),
    **dict.fromkeys(("slice", "dynamic_slice"), _cut),
    "neg": _negated,
    "dot_general": _product,
    "split": _split,
}
