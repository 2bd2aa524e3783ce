"""Follows every parameter through a traced loss to the places where it meets data."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from jaxdp.clipping.ghost import sites, views
from jaxdp.clipping.ghost.program import COND, SCAN, Node, Program, Traced, inside
from jaxdp.clipping.ghost.sites import Site
from jaxdp.clipping.ghost.views import Joined, View

# What a value is known for, besides parameters that are followed in it.
_DATA, _ONE_NUMBER = "data", "one number"
# How to write it, where parameters are changed before they meet data.
_WRITE = {
    "add": "x @ (W + V) as x @ W + x @ V",
    "dot_general": "x @ (a @ b) as (x @ a) @ b",
    "mul": "x @ (W * g) as (x @ W) * g",
    "dynamic_slice": "W[i] at a computed place as a scan over W",
}
_WRITE |= {"sub": _WRITE["add"], "div": _WRITE["mul"]}

Used = tuple[Node, Site]


@dataclasses.dataclass(eq=False)
class Uses:
    """The uses of every parameter in a traced loss.

    Attributes:
        of_leaf: for each leaf, the nodes that use it, and their sites.
        refused: for each leaf that is used otherwise as well, how, and how to write it; or "".
    """

    of_leaf: dict[int, list[Used]] = dataclasses.field(default_factory=dict)
    refused: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def add(self, node: Node, site: Site) -> None:
        """Notes a use."""
        self.of_leaf.setdefault(site.view.leaf, []).append((node, site))

    def refuse(self, what: View | Joined, how: str, write: str = "") -> None:
        """The leaves must be differentiated as a whole."""
        for view in what.views if isinstance(what, Joined) else (what,):
            self.refused.setdefault(view.leaf, (how, write))

    def by_slice(self, leaf: int) -> list[list[Used]]:
        """The uses of a leaf, those of the same entries together; [] if some entries overlap."""
        found: dict[frozenset[views.Sliced], list[Used]] = {}
        for node, site in self.of_leaf.get(leaf, ()):
            found.setdefault(site.view.slices, []).append((node, site))
        apart = all(views.are_apart(*pair) for pair in itertools.combinations(found, 2))
        return list(found.values()) if apart else []


def find(traced: Traced, shapes: Sequence[tuple[int, ...]]) -> Uses:
    """The uses of every parameter leaf (their shapes are given) in a traced loss."""
    uses = Uses()
    program = traced.program
    known: dict[int, Any] = {}
    for leaf, shape in enumerate(shapes):
        known[program.ins[leaf]] = views.of_parameter(leaf, shape)
    for number in program.ins[traced.num_params :]:
        known[number] = _DATA
    _walk(program, known, uses)
    for result in program.outs:
        what = known.get(result) if isinstance(result, int) else None
        if isinstance(what, View | Joined):
            uses.refuse(what, "returned")
    return uses


def _walk(program: Program, known: dict[int, Any], uses: Uses) -> None:
    """Fills ``known``: for each value the parameter followed in it, or what it is known for."""
    for node in program.nodes:
        ins = [known.get(ref) if isinstance(ref, int) else None for ref in node.ins]
        if node.name == SCAN:
            known.update(zip(node.outs, _looped(node, ins, uses), strict=True))
            continue
        if node.bodies and node.name != COND:
            (body,) = node.bodies
            known.update(zip(node.outs, _inside(body, node.name, ins, uses), strict=True))
            continue
        if node.bodies and ins[0] == _DATA:
            _branched(node, ins, uses)
            known.update(dict.fromkeys(node.outs, _DATA))
            continue
        kind = _DATA if _DATA in [what for what in ins if isinstance(what, str)] else None
        if kind is None and node.name == "broadcast_in_dim" and math.prod(node.shape_of(0)) == 1:
            kind = _ONE_NUMBER
        outcome = [kind] * len(node.outs)
        if found := [(at, what) for at, what in enumerate(ins) if isinstance(what, View | Joined)]:
            outcome = _meet(node, found, ins, uses) or outcome
        known.update(zip(node.outs, outcome, strict=True))


def _branched(node: Node, ins: list[Any], uses: Uses) -> None:
    """The uses in the branches of a ``cond``, of which one counts for each example."""
    for branch in node.bodies:
        within = Uses()
        _inside(branch, node.name, ins[1:], within)
        for leaf, (how, write) in within.refused.items():
            uses.refused.setdefault(leaf, (f"{how} in a cond", write))
        for use in itertools.chain(*within.of_leaf.values()):
            uses.add(*use)


def _inside(body: Program, name: str, ins: list[Any], uses: Uses) -> list[Any]:
    """The kinds of the results of a body of an operation ``name``; none is followed further."""
    known = {number: what for number, what in zip(body.ins, ins, strict=True) if what is not None}
    _walk(body, known, uses)
    results = [known.get(ref) if isinstance(ref, int) else None for ref in body.outs]
    for at, what in enumerate(results):
        if isinstance(what, View | Joined):
            # Outside, its operations would have to be run a second time.
            uses.refuse(what, f"leaves a {name}")
        if what != _DATA:
            results[at] = None
    return results


def _looped(node: Node, ins: list[Any], uses: Uses) -> list[Any]:
    """As ``_inside``, of a ``scan``: its passes are more positions, or more groups, of one site."""
    (body,), carried = node.bodies, node.carried
    data = inside(node, [what == _DATA for what in ins])
    entering: list[Any] = []
    for at, (what, number) in enumerate(zip(ins, body.ins, strict=True)):
        if what != _DATA and at >= carried.start:
            # A slice is followed; what is carried is another value in every pass.
            followed = isinstance(what, View | Joined)
            taken = views.of_passes(what) if followed and at >= carried.stop else None
            if followed and taken is None:
                uses.refuse(what, SCAN)
            what = taken
        entering.append(_DATA if number in data else what)
    within = Uses()
    results = _inside(body, SCAN, entering, within)
    for leaf, (how, write) in within.refused.items():
        uses.refused.setdefault(leaf, (f"{how} in a scan", write))
    stacks = [what.stack for what in entering[carried.stop :] if isinstance(what, View)]
    for inner, site in itertools.chain(*within.of_leaf.values()):
        looped = sites.looped(site, node.eqn.params["length"], stacks)
        if looped is None:
            uses.refuse(site.view, "gather of a slice in a scan, or by a scan without a pass")
        else:
            uses.add(inner, looped)
    # All that depends on data at any pass does so at every pass.
    outs = [ref if isinstance(ref, int) else None for ref in body.outs]  # literals have no hash
    return [_DATA if ref in data else what for ref, what in zip(outs, results, strict=True)]


def _meet(
    node: Node, found: list[tuple[int, View | Joined]], ins: list[Any], uses: Uses
) -> list[Any] | None:
    """The kinds of results of an operation on parameters; sites, where it is one."""
    at, what = found[0]
    if node.name == "concatenate" and all(
        isinstance(each, View) and not each.multiples for each in ins
    ):
        return [Joined(tuple(ins), node.eqn.params["dimension"])]
    if len(found) == 1 and (made := views.through(node, what)) is not None:
        return made
    with_data = _DATA in [kind for kind in ins if isinstance(kind, str)]
    others = [i for i in range(len(ins)) if i != at and (ins[i] == _DATA or node.name == "gather")]
    if len(found) == len(others) == 1 and (len(ins) == 2 or node.name == "dynamic_slice"):
        for view, site in sites.sites_of(node, what, at, node.shape_of(others[0])):
            if site is None:
                uses.refuse(view, node.name)
            else:
                uses.add(node, site)
        # Also of what is refused, the result depends on data.
        return [_DATA]
    for at, what in () if with_data else found:
        others = [i for i in range(len(ins)) if i != at]
        numbers = all(ins[i] == _ONE_NUMBER or math.prod(node.shape_of(i)) == 1 for i in others)
        if numbers and isinstance(what, View) and (times := views.multiplied(node, at, what)):
            for i, other in found:
                if i != at:
                    uses.refuse(other, node.name)
            return [times]
    write = ""
    if not with_data and len(node.out_shape()) > 1:
        sizes = [math.prod(node.shape_of(i)) for i in range(len(ins))]
        gain = 1 < min(sizes) < max(sizes)  # as long as one side of the weight
        write = _WRITE.get(node.name, "") if gain or node.name not in ("mul", "div") else ""
    for _, each in found:
        uses.refuse(each, node.name, write)
    return None
