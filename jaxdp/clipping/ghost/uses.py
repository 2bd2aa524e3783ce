"""Follows every parameter through a traced loss to the places where it meets data."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jaxdp.clipping.ghost import linear, loops, parts, views
from jaxdp.clipping.ghost.derived import steps_of
from jaxdp.clipping.ghost.linear import Followed, Sum, Term
from jaxdp.clipping.ghost.program import SCAN, Node, Program, Traced, inside, nodes
from jaxdp.clipping.ghost.together import together
from jaxdp.clipping.ghost.views import Joined, View


@dataclasses.dataclass(eq=False)
class Uses:
    """The uses of every parameter in a traced loss.

    Attributes:
        of_leaf: for each leaf, the nodes that use it, and their sites.
        refused: for each leaf that is used otherwise as well, how.
    """

    of_leaf: dict[int, list[tuple[Node, Any]]] = dataclasses.field(default_factory=dict)
    refused: dict[int, str] = dataclasses.field(default_factory=dict)

    def add(self, node: Node, site: Any) -> None:
        """Notes a use."""
        self.of_leaf.setdefault(site.view.leaf, []).append((node, site))

    def refuse(self, what: Followed, how: str) -> None:
        """The leaves must be differentiated as a whole."""
        for view in linear.parameters(what):
            self.refused.setdefault(view.leaf, how)


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
        if isinstance(what, Followed):
            uses.refuse(what, "returned")
    return Uses({leaf: together(used) for leaf, used in uses.of_leaf.items()}, uses.refused)


_DATA = "data"


def _walk(program: Program, known: dict[int, Any], uses: Uses) -> None:
    """Fills ``known``: for each value what is followed in it, data, or a constant's axes."""
    for node in program.nodes:
        ins = [known.get(ref) if isinstance(ref, int) else None for ref in node.ins]
        if node.body is not None:
            within = _looped if node.name == SCAN else _inside
            known.update(zip(node.outs, within(node, ins, uses), strict=True))
            continue
        if node.branches and ins[0] == _DATA:
            _branched(node, ins, uses)
            known.update(dict.fromkeys(node.outs, _DATA))
            continue
        of_data = _DATA if _DATA in [what for what in ins if isinstance(what, str)] else None
        outcome = [of_data or linear.spread(node)] * len(node.outs)
        if found := [(at, what) for at, what in enumerate(ins) if isinstance(what, Followed)]:
            outcome = _meet(node, found, ins, uses) or [of_data] * len(node.outs)
        known.update(zip(node.outs, outcome, strict=True))


def _inside(node: Node, ins: list[Any], uses: Uses) -> list[Any]:
    """The kinds of a body's results, which are no views."""
    assert node.body is not None
    return _within(node.body, node.name, ins, uses)


def _branched(node: Node, ins: list[Any], uses: Uses) -> None:
    """The uses in the branches of a ``cond``, of which one counts for each example."""
    for branch in node.branches:
        within, inner = Uses(), set(nodes(branch))
        _within(branch, node.name, ins[1:], within)
        for leaf, how in within.refused.items():
            uses.refused.setdefault(leaf, f"{how} in a cond")
        for inside_node, site in itertools.chain(*within.of_leaf.values()):
            if any(step.operand is not None and step.node in inner for step in steps_of(site)):
                # What parameters are multiplied with there is noted for no example.
                uses.refuse(site.view, "a product in a cond")
            else:
                uses.add(inside_node, site)


def _within(body: Program, name: str, ins: list[Any], uses: Uses) -> list[Any]:
    known = {number: what for number, what in zip(body.ins, ins, strict=True) if what is not None}
    _walk(body, known, uses)
    results = [known.get(ref) if isinstance(ref, int) else None for ref in body.outs]
    for at, what in enumerate(results):
        if isinstance(what, Followed):
            # Outside, its operations would have to be run a second time.
            uses.refuse(what, f"leaves a {name}")
        if what != _DATA:
            results[at] = None
    return results


def _looped(node: Node, ins: list[Any], uses: Uses) -> list[Any]:
    """As ``_inside``, of a ``scan``: its passes are more positions, or more groups, of one site."""
    body, carried = node.body, node.carried
    assert body is not None
    data = inside(node, [what == _DATA for what in ins])
    entering: list[Any] = []
    for at, (what, number) in enumerate(zip(ins, body.ins, strict=True)):
        if what != _DATA and at >= carried.start:
            what = _taken(what, at >= carried.stop, uses)
        entering.append(_DATA if number in data else what)
    within = Uses()
    results = _inside(node, entering, within)
    for leaf, how in within.refused.items():
        uses.refused.setdefault(leaf, f"{how} in a scan")
    each = [linear.parameters(w) for w in entering[carried.stop :] if isinstance(w, Followed)]
    stacks = [view.stack for view in itertools.chain(*each)]
    for inner, site in itertools.chain(*within.of_leaf.values()):
        looped = loops.looped(site, node.eqn.params["length"], stacks)
        if looped is None:
            uses.refuse(site.view, "gather of a slice in a scan, or by a scan without a pass")
        else:
            uses.add(inner, looped)
    # All that depends on data at any pass does so at every pass.
    outs = [ref if isinstance(ref, int) else None for ref in body.outs]  # literals have no hash
    return [_DATA if ref in data else what for ref, what in zip(outs, results, strict=True)]


def _taken(what: Any, slices: bool, uses: Uses) -> Followed | None:
    """The parameters followed in an operand that a ``scan`` slices, or carries."""
    if not isinstance(what, Followed):
        return None
    kept = []
    for each in what.terms if isinstance(what, Sum) else (what,):
        found = linear.sliced(each) if slices else None
        if found is None:
            uses.refuse(each, SCAN)
        else:
            kept.append(found)
    return linear.total(kept)


def _meet(node: Node, found: list[tuple[int, Any]], ins: list[Any], uses: Uses) -> list[Any] | None:
    """The kinds of results of an operation on parameters; sites, where it is one."""
    at, what = found[0]
    if node.name == "concatenate" and all(isinstance(each, View | Term | Sum) for each in ins):
        return [Joined(tuple(ins), node.eqn.params["dimension"])]
    if len(found) == 1:
        onward = linear.through(node, what)
        if onward is not None:
            return [onward]
        others = [
            i for i in range(len(ins)) if i != at and (ins[i] == _DATA or node.name == "gather")
        ]
        if len(others) == 1 and (len(ins) == 2 or node.name == "dynamic_slice"):
            sites = parts.sites_of(node, what, at, node.shape_of(others[0]))
            for view, site in sites:
                if site is None:
                    uses.refuse(view, node.name)
                else:
                    uses.add(node, site)
            # Also of what is refused, the result depends on data.
            return [_DATA]
    if _DATA not in [kind for kind in ins if isinstance(kind, str)]:
        fixed = linear.multipliers(node, dict(found))
        for i in fixed:
            uses.refuse(ins[i], node.name)
        made = linear.onward(node, [None if i in fixed else kind for i, kind in enumerate(ins)])
        if made is not None:
            return list(made)
    for _, each in found:
        uses.refuse(each, node.name)
    return None
