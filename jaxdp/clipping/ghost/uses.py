"""Follows every parameter through a traced loss to the places where it meets data."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jaxdp.clipping.ghost import loops, parts, views
from jaxdp.clipping.ghost.program import SCAN, Node, Program, Traced, inside
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

    def refuse(self, what: View | Joined, how: str) -> None:
        """The leaves must be differentiated as a whole."""
        for view in what.views if isinstance(what, Joined) else (what,):
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
        if isinstance(what, View | Joined):
            uses.refuse(what, "returned")
    return uses


_DATA = "data"


def _walk(program: Program, known: dict[int, Any], uses: Uses) -> None:
    """Fills ``known``: for each value a view, data, or nothing (a constant, or of constants)."""
    for node in program.nodes:
        ins = [known.get(ref) if isinstance(ref, int) else None for ref in node.ins]
        if node.body is not None:
            within = _looped if node.name == SCAN else _inside
            known.update(zip(node.outs, within(node, ins, uses), strict=True))
            continue
        found = [(at, what) for at, what in enumerate(ins) if isinstance(what, View | Joined)]
        outcome = _DATA if _DATA in [w for w in ins if isinstance(w, str)] else None
        if found:
            outcome = _meet(node, found, ins, uses) or outcome
        if outcome is not None:
            known.update(dict.fromkeys(node.outs, outcome))


def _inside(node: Node, ins: list[Any], uses: Uses) -> list[Any]:
    """The kinds of a body's results, which are no views."""
    body = node.body
    assert body is not None
    known = {number: what for number, what in zip(body.ins, ins, strict=True) if what is not None}
    _walk(body, known, uses)
    results = [known.get(ref) if isinstance(ref, int) else None for ref in body.outs]
    for at, what in enumerate(results):
        if isinstance(what, View | Joined):
            # Outside, its operations would have to be run a second time.
            uses.refuse(what, f"leaves a {node.name}")
            results[at] = None
    return results


def _looped(node: Node, ins: list[Any], uses: Uses) -> list[Any]:
    """As ``_inside``, of a ``scan``: its passes are more positions, or more groups, of one site."""
    body, carried = node.body, node.carried
    assert body is not None
    data = inside(node, [what == _DATA for what in ins])
    entering: list[Any] = []
    for at, (what, number) in enumerate(zip(ins, body.ins, strict=True)):
        view = what
        if isinstance(what, View | Joined) and at >= carried.start:
            view = None
            if at >= carried.stop and isinstance(what, View):
                view = views.sliced(what)
            if view is None:
                uses.refuse(what, SCAN)
        entering.append(_DATA if number in data else view)
    within = Uses()
    results = _inside(node, entering, within)
    for leaf, how in within.refused.items():
        uses.refused.setdefault(leaf, f"{how} in a scan")
    stacks = [view.stack for view in entering[carried.stop :] if isinstance(view, View)]
    for inner, site in itertools.chain(*within.of_leaf.values()):
        looped = loops.looped(site, node.eqn.params["length"], stacks)
        if looped is None:
            uses.refuse(site.view, "gather in a scan, or by a scan without a pass")
        else:
            uses.add(inner, looped)
    # All that depends on data at any pass does so at every pass.
    outs = [ref if isinstance(ref, int) else None for ref in body.outs]  # literals have no hash
    return [_DATA if ref in data else what for ref, what in zip(outs, results, strict=True)]


def _meet(node: Node, found: list[tuple[int, Any]], ins: list[Any], uses: Uses) -> Any:
    """The kind of result of an operation on parameters; a site, where it is one."""
    at, what = found[0]
    if len(found) == len(ins) and node.name == "concatenate":
        joined = views.joined(node, [each for _, each in found])
        if joined is not None:
            return joined
    if len(found) == 1:
        onward = views.through(node, what)
        if onward is not None:
            return onward
        others = [i for i in range(len(ins)) if i != at]
        if len(others) == 1 and ins[others[0]] == _DATA:
            found_sites = parts.sites_of(node, what, at, node.shape_of(others[0]))
            for site in found_sites:
                uses.add(node, site)
            if found_sites:
                return _DATA
    for _, each in found:
        uses.refuse(each, node.name)
    return None
