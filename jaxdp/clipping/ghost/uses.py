"""Follows every parameter through a traced loss to the places where it meets data."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxdp.clipping.ghost import sites, views
from jaxdp.clipping.ghost.program import Node, Program, Traced
from jaxdp.clipping.ghost.views import View


@dataclasses.dataclass(eq=False)
class Uses:
    """The uses of every parameter in a traced loss.

    Attributes:
        sites: for each node that is one, its site.
        of_leaf: for each leaf, the nodes that use it.
        refused: for each leaf that is used otherwise as well, how.
    """

    sites: dict[Node, Any] = dataclasses.field(default_factory=dict)
    of_leaf: dict[int, list[Node]] = dataclasses.field(default_factory=dict)
    refused: dict[int, str] = dataclasses.field(default_factory=dict)

    def refuse(self, view: View, how: str) -> None:
        """The leaf must be differentiated as a whole."""
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
        if isinstance(result, int) and isinstance(known.get(result), View):
            uses.refuse(known[result], "returned")
    return uses


_DATA = "data"


def _walk(program: Program, known: dict[int, Any], uses: Uses) -> None:
    """Fills ``known``: for each value a View, data, or nothing (a constant, or of constants)."""
    for node in program.nodes:
        ins = [known.get(ref) if isinstance(ref, int) else None for ref in node.ins]
        if node.body is not None:
            known.update(zip(node.outs, _inside(node.body, ins, uses), strict=True))
            continue
        found = [(at, what) for at, what in enumerate(ins) if isinstance(what, View)]
        outcome = _DATA if _DATA in [w for w in ins if isinstance(w, str)] else None
        if found:
            outcome = _meet(node, found, ins, uses) or outcome
        if outcome is not None:
            known.update(dict.fromkeys(node.outs, outcome))


def _inside(body: Program, ins: list[Any], uses: Uses) -> list[Any]:
    known = {number: what for number, what in zip(body.ins, ins, strict=True) if what is not None}
    _walk(body, known, uses)
    results = [known.get(ref) if isinstance(ref, int) else None for ref in body.outs]
    for at, what in enumerate(results):
        if isinstance(what, View):
            # Outside, its operations would have to be run a second time.
            uses.refuse(what, "leaves a checkpoint")
            results[at] = None
    return results


def _meet(node: Node, found: list[tuple[int, View]], ins: list[Any], uses: Uses) -> Any:
    """The kind of result of an operation on parameters; a site, where it is one."""
    at, view = found[0]
    if len(found) == 1:
        onward = views.through(node, view)
        if onward is not None:
            return onward
        others = [i for i in range(len(ins)) if i != at]
        if len(others) == 1 and ins[others[0]] == _DATA:
            shape = node.shape_of(others[0])
            site = sites.site(node, view, at, shape)
            if site is not None:
                uses.sites[node] = site
                uses.of_leaf.setdefault(view.leaf, []).append(node)
                return _DATA
    for _, each in found:
        uses.refuse(each, node.name)
    return None
