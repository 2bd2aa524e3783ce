"""Follows every parameter to the places where it meets data, and chooses how to clip it there."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.clipping import rounding
from jaxdp.clipping.ghost import sites
from jaxdp.clipping.ghost.program import (
    COND,
    SCAN,
    Node,
    Program,
    Traced,
    all_nodes,
    depends,
    reached_in_body,
)
from jaxdp.clipping.ghost.sites import Joined, Site, View

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

Known = View | Joined | str | None
Used = tuple[Node, Site]
# Writing a per-example gradient and reading it twice costs as much as this many multiplications an
# entry, in the CPU's cache and out of it; measured on two CPU cores with convolutions of
# 1,000 to 600,000 weights, and with tables of 256 to 4,000 rows.
_IN_CACHE, _IN_MEMORY = 8.0, 30.0
_CACHE_BYTES = 8 * 2**20
# Where per-example gradients are larger than the factors, the ghost norm may cost this share of
# the parameter's part of an ordinary step before they are held for speed.
_SHARE = 0.1
# Of a loss with checkpoints: from so many bytes on (on an accelerator, from what ``_HELD`` says)
# rows are worked on in microbatches, which take this multiple of an ordinary gradient's memory and
# have at least so many positions: with fewer the products are small, and adding up the sums of
# microbatches counts. Measured on two CPU cores (four blocks of width 256: 128 positions took 1.14
# times the time of 256, which took that of all); for accelerators it is an estimate.
_MANY_BYTES, _OF_ORDINARY = 16 * 2**20, 1.25
_POSITIONS, _POSITIONS_ON_ACCELERATOR = 256, 4096
# On an accelerator: the same in its memory; and of a sum from factors, whose products are of full
# float32, what a multiplication costs beside one of the user's precision, and of eight blocks of
# rows at a time what adding them costs an entry, and what starting the programs for it costs. Of an
# H100: 3 TB/s, 2e13 multiplications of float32 a second and 1.2e14 of tf32, 12 microseconds.
_WRITTEN, _FULL, _ADDED, _STARTED = 64.0, 0.8, 120.0, 2.4e8
# Of an accelerator's memory, what per-example gradients and factors may take.
_HELD = 0.4


@dataclasses.dataclass(eq=False)
class Uses:
    """The uses of every parameter in a traced loss."""

    # For each leaf, the nodes that use it, and their sites.
    of_leaf: dict[int, list[Used]] = dataclasses.field(default_factory=dict)
    # For each leaf that is used otherwise as well, how, and how to write it; or "".
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
        found: dict[frozenset[sites.Sliced], list[Used]] = {}
        for node, site in self.of_leaf.get(leaf, ()):
            found.setdefault(site.view.slices, []).append((node, site))
        disjoint = all(sites.are_disjoint(*pair) for pair in itertools.combinations(found, 2))
        return list(found.values()) if disjoint else []


def find_uses(traced: Traced, shapes: Sequence[tuple[int, ...]]) -> Uses:
    """The uses of every parameter leaf (their shapes are given) in a traced loss.

    The operations are gone through in order. Of every value it is kept which parameter is seen in
    it (a view, as long as no entries were added up), or that it depends on the example. Where the
    two meet in an operation whose weight gradient is a sum of outer products, that is a use. All
    other ways of using a parameter are refused: its gradient is then taken by ``vmap`` as a whole.
    """
    uses = Uses()
    program = traced.program
    known: dict[int, Known] = {}
    for leaf, shape in enumerate(shapes):
        known[program.ins[leaf]] = sites.parameter_view(leaf, shape)
    for number in program.ins[traced.num_params :]:
        known[number] = _DATA
    _follow(program, known, uses)
    for result in program.outs:
        what = known.get(result) if isinstance(result, int) else None
        if isinstance(what, View | Joined):
            uses.refuse(what, "returned")
    return uses


def _follow(program: Program, known: dict[int, Known], uses: Uses) -> None:
    """Fills ``known``: for each value the parameter followed in it, or what it is known for."""
    for node in program.nodes:
        ins = [known.get(ref) if isinstance(ref, int) else None for ref in node.ins]

        # Programs inside: of a loop the site is one of all its iterations, of a checkpoint it is
        # one like any. Of branches every one may have sites, as one of them counts for an example;
        # those that do not count see zeros.
        if node.name == SCAN:
            known.update(zip(node.outs, _follow_scan(node, ins, uses), strict=True))
            continue
        if node.bodies and node.name != COND:
            (body,) = node.bodies
            known.update(zip(node.outs, _follow_body(body, node.name, ins, uses), strict=True))
            continue
        if node.bodies and ins[0] == _DATA:
            for branch in node.bodies:
                _, found_there = _follow_nested(branch, COND, ins[1:], uses)
                for use in found_there:
                    uses.add(*use)
            known.update(dict.fromkeys(node.outs, _DATA))
            continue

        # One operation: a result depends on the example if an operand does. Results that are made
        # of parameters are classified by ``_follow_operation``.
        kind = _DATA if _DATA in [what for what in ins if isinstance(what, str)] else None
        if kind is None and node.name == "broadcast_in_dim" and math.prod(node.shape_of(0)) == 1:
            kind = _ONE_NUMBER
        outcome: list[Known] = [kind] * len(node.outs)
        if found := [(at, what) for at, what in enumerate(ins) if isinstance(what, View | Joined)]:
            outcome = _follow_operation(node, found, ins, uses) or outcome
        known.update(zip(node.outs, outcome, strict=True))


def _follow_body(body: Program, name: str, ins: list[Known], uses: Uses) -> list[Known]:
    """The kinds of the results of a body of an operation ``name``; none is followed further."""
    known = dict(zip(body.ins, ins, strict=True))
    _follow(body, known, uses)
    results = [known.get(ref) if isinstance(ref, int) else None for ref in body.outs]
    for at, what in enumerate(results):
        if isinstance(what, View | Joined):
            # Outside, its operations would have to be run a second time.
            uses.refuse(what, f"leaves a {name}")
        if what != _DATA:
            results[at] = None
    return results


def _follow_nested(
    body: Program, name: str, ins: list[Known], uses: Uses
) -> tuple[list[Known], list[Used]]:
    """As ``_follow_body``, and the uses there, which are not added; refusals are, with the name."""
    within = Uses()
    results = _follow_body(body, name, ins, within)
    for leaf, (how, write) in within.refused.items():
        uses.refused.setdefault(leaf, (f"{how} in a {name}", write))
    return results, list(itertools.chain(*within.of_leaf.values()))


def _follow_scan(node: Node, ins: list[Known], uses: Uses) -> list[Known]:
    """As ``_follow_body``, of a ``scan``: its iterations are positions or groups of one site."""
    (body,), carried = node.bodies, node.carried
    data = reached_in_body(node, [what == _DATA for what in ins])
    entering: list[Known] = []
    for at, (what, number) in enumerate(zip(ins, body.ins, strict=True)):
        if what != _DATA and at >= carried.start:
            # A slice is followed; what is carried is another value in every iteration.
            taken = None
            if isinstance(what, View | Joined):
                taken = sites.scan_slice(what) if at >= carried.stop else None
                if taken is None:
                    uses.refuse(what, SCAN)
            what = taken
        entering.append(_DATA if number in data else what)
    results, found_there = _follow_nested(body, SCAN, entering, uses)
    stacks = [what.stack for what in entering[carried.stop :] if isinstance(what, View)]
    for inner, site in found_there:
        looped = sites.site_of_scan(site, node.eqn.params["length"], stacks)
        if looped is None:
            how = "gather of a slice in a scan, or by a scan without an iteration"
            uses.refuse(site.view, "add in a scan" if site.adds else how)
        else:
            uses.add(inner, looped)
    # All that depends on data in any iteration does so in every one.
    outs = [ref if isinstance(ref, int) else None for ref in body.outs]  # literals have no hash
    return [_DATA if ref in data else what for ref, what in zip(outs, results, strict=True)]


def _follow_operation(
    node: Node, found: list[tuple[int, View | Joined]], ins: list[Known], uses: Uses
) -> list[Known] | None:
    """Classifies the results of an operation on parameters, and notes the use that it may be."""
    # Parameters alone: joined, or rearranged and sliced, without adding entries up.
    at, what = found[0]
    plain = all(isinstance(each, View) and not each.multiples for each in ins)
    if node.name == "concatenate" and plain:
        return [Joined(tuple(ins), node.eqn.params["dimension"])]
    if len(found) == 1 and (made := sites.rearrange(node, what)) is not None:
        return [*made]

    # One parameter and data: a site, if the weight gradient is a sum of outer products there.
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

    # A parameter times one number, another parameter perhaps, which then is refused.
    for at, what in () if with_data else found:
        others = [i for i in range(len(ins)) if i != at]
        numbers = all(ins[i] == _ONE_NUMBER or math.prod(node.shape_of(i)) == 1 for i in others)
        if numbers and isinstance(what, View) and (times := sites.multiply_view(node, at, what)):
            for i, other in found:
                if i != at:
                    uses.refuse(other, node.name)
            return [times]

    # Any other use is refused, with words on how to write it where there are some.
    write = ""
    if not with_data and len(node.out_shape()) > 1:
        sizes = [math.prod(node.shape_of(i)) for i in range(len(ins))]
        gain = 1 < min(sizes) < max(sizes)  # as long as one side of the weight
        write = _WRITE.get(node.name, "") if gain or node.name not in ("mul", "div") else ""
    for _, each in found:
        uses.refuse(each, node.name, write)
    return None


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """The engine that clips one parameter's gradients, and the reason."""

    path: str  # where it stands in the tree, as ``jax.tree_util.keystr`` writes it
    # "vmap": per-example gradients by automatic differentiation; "layer": per-example gradients of
    # this layer alone, as products of its inputs and cotangents; "ghost": norms without per-example
    # gradients; "frozen": not trained, nothing is computed; "constant": no parameter but an array
    # that the loss captured.
    engine: str
    reason: str  # why, in a few words
    assumed: str = ""  # what is assumed to be public, in words for a ledger; "" if nothing is
    bytes: int = 0  # of every example, what is held for this parameter until the sum is taken
    # Of every example, multiplications beyond those of an ordinary gradient.
    operations: float = 0.0
    whole: bool = False  # True of a layer whose gradients are taken as those of "vmap" are


class Plan(tuple[LeafPlan, ...]):
    """The rows of a plan; printed, a table.

    Attributes:
        together: the number of examples that are worked on together.
        why: why these are fewer than there are; "" if they are all.
    """

    together: int
    why: str

    def __new__(cls, rows: Iterable[LeafPlan], together: int = 0, why: str = "") -> "Plan":
        plan = super().__new__(cls, rows)
        plan.together, plan.why = together, why
        return plan

    def __str__(self) -> str:
        rows = [("parameter", "engine", "bytes", "operations", "reason")]
        rows += [(r.path, r.engine, f"{r.bytes:,}", f"{r.operations:.2g}", r.reason) for r in self]
        held = sum(row.bytes for row in self)
        rows.append(("all", "", f"{held:,}", f"{sum(row.operations for row in self):.2g}", ""))
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(n) for cell, n in zip(r, wide, strict=True)) for r in rows]
        few = f", {self.together} of which are worked on together ({self.why})" if self.why else ""
        return f"Of every example{few}:\n" + "\n".join(line.rstrip() for line in lines)


def plan_leaves(
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    frozen: Sequence[str],
    uses: Uses,
    batch_size: int,
    engine: str,
) -> tuple[LeafPlan, ...]:
    """The engine of every leaf.

    Args:
        paths: where every leaf stands in the tree.
        shapes: of every leaf.
        frozen: for every leaf, what its freezing assumes, in words; "" if it is trained.
        uses: the uses of every leaf.
        batch_size: rows m of the physical batch.
        engine: "auto" weighs the costs; "ghost" takes the ghost norm wherever there is one; "vmap"
            never does.
    """
    found = []
    held = sum(4 * math.prod(shape) for shape, why in zip(shapes, frozen, strict=True) if not why)
    written = batch_size * held <= room_for_gradients()
    for leaf, (path, shape, assumed) in enumerate(zip(paths, shapes, frozen, strict=True)):
        if assumed:
            found.append(LeafPlan(path, "frozen", "not trained", assumed))
            continue
        if why := _reason_for_vmap(leaf, uses, engine):
            size = math.prod(shape)
            found.append(LeafPlan(path, "vmap", why, bytes=4 * size, operations=float(size)))
            continue

        # Operations of an example beyond those of an ordinary gradient, for the ghost norm and for
        # the layer's gradient; those of an ordinary step; the bytes of inputs and cotangents, and
        # of the layer's gradients. The ghost norm costs T²(p + q) (Bu et al. 2022,
        # arXiv:2205.10683, table 2), of which a lookup needs T²q only, since its inputs are
        # compared and not multiplied. The gradient of the layer costs its size;
        # an accelerator writes it faster than it multiplies in full float32, where it has room.
        ghost = layer = ordinary = 0.0
        factors = gradients = 0
        alone = True  # in the loops around it every iteration has a slice of its own
        for used in uses.by_slice(leaf):
            groups, _, p, q = used[0][1].sizes
            dense = sum(site.sizes[1] for _, site in used if not site.looks_up)
            looked_up = sum(site.sizes[1] for _, site in used if site.looks_up)
            if dense + looked_up > 1:
                of_lookups = looked_up * (_IN_CACHE + 2 * dense) * q
                ghost += float(groups) * (dense * dense * (p + q) + of_lookups)
            else:
                ghost += float(groups) * (p + q)
            entries = float(groups) * p * q
            cached = 4 * entries * batch_size <= _CACHE_BYTES
            layer += entries * (_WRITTEN if written else _IN_CACHE if cached else _IN_MEMORY)
            if written and dense > 1:
                eight = 8 * rounding.rows_of_block(dense)
                ghost += entries * (_FULL * dense + _ADDED / eight) + _STARTED / eight
            for node, site in used:
                ordinary += 3.0 * groups * site.sizes[1] * p * q
                data = 1 if site.adds else math.prod(node.shape_of(site.operand))
                sizes = data, math.prod(node.out_shape())
                factors += math.prod(site.iterations) * sum(sizes) * node.out_dtype().itemsize
                alone &= _is_alone(node, site)
            gradients += 4 * groups * p * q

        # The ghost norm where it costs no more; or not much more, and less memory.
        costs = f"{ghost:.2g} against {layer:.2g} operations"
        chosen = "ghost" if engine == "ghost" or ghost <= layer else "layer"
        spared = not written and gradients > factors and ghost <= _SHARE * ordinary
        if chosen == "layer" and spared:
            chosen = "ghost"
            costs += f", but {factors:,} against {gradients + factors:,} bytes"
        reason = "as asked" if engine == "ghost" else costs
        # The same products, taken where the loop's backward pass is, need not hold the factors.
        if chosen == "layer" and alone and gradients < factors:
            less = f"a loop's, {gradients:,} against {gradients + factors:,} bytes"
            found.append(LeafPlan(path, chosen, less, "", gradients, layer, whole=True))
        elif chosen == "ghost":
            found.append(LeafPlan(path, chosen, reason, "", factors, ghost))
        else:
            found.append(LeafPlan(path, chosen, reason, "", factors + gradients, layer))
    return tuple(found)


def rows_together(
    traced: Traced,
    uses: Uses,
    plan: Sequence[LeafPlan],
    shapes: Sequence[tuple[int, ...]],
    rows: int,
) -> tuple[int, str]:
    """The number of rows to work on together, and the reason where that is not all of them, or "".

    With ``jax.checkpoint`` an ordinary gradient holds what enters the parts that it is put around,
    and of one part at a time what is computed there. The clipped one holds the factors of all
    parts until the norms are known, so it takes microbatches. Nothing is computed twice for them,
    and norm and sum are made of the same factors. (A second backward pass with the weights known,
    Li et al. 2021, arXiv:2110.05679, holds less of one example, but runs every checkpoint again,
    three quarters of a step, and its cotangents are not those that the norms are of.)

    Args:
        traced: the loss; ``uses`` and ``plan`` belong to it.
        uses: where the parameters meet data.
        plan: the engine of each leaf.
        shapes: of each leaf.
        rows: that could be worked on together.
    """
    inside: set[Node] = set()  # the operations in checkpoints

    def held(program: Program) -> tuple[int, int]:
        """The bytes that an ordinary gradient holds of an example, and those of one part besides.

        That is what enters a checkpoint, and elsewhere the operands and results of products.
        """
        all_along = part = 0
        for node in program.nodes:
            known = zip(node.ins, node.eqn.invars, strict=True)
            entered = sum(_bytes(var) for ref, var in known if depends(ref, traced.of_example))
            within = [held(body) for body in node.bodies]
            if node.bodies and node.name not in (SCAN, COND):
                inside.update(itertools.chain(*map(all_nodes, node.bodies)))
                all_along += entered
                part = max(part, *map(sum, within))
            elif node.bodies:
                all_along += node.eqn.params.get("length", 1) * sum(each for each, _ in within)
                part = max(part, *(each for _, each in within))
            elif node.name in ("dot_general", "conv_general_dilated") and entered:
                all_along += entered + sum(map(_bytes, node.eqn.outvars))
        return all_along, part

    # The bytes of an example: what ordinary and clipped gradients hold. Outside of checkpoints both
    # hold factors, and the clipped one gradients where its engine forms them.
    ours = ordinary = sum(held(traced.program))
    products = [each for each in itertools.chain(*uses.of_leaf.values()) if each[0] in inside]
    factored = {site.view.leaf for _, site in products}
    for leaf, (row, shape) in enumerate(zip(plan, shapes, strict=True)):
        formed = 4 * math.prod(shape) if row.engine in ("layer", "vmap") else 0
        ours += row.bytes if leaf in factored else formed
    room = max(_MANY_BYTES, room_for_gradients())
    if rows * ours < max(room, _OF_ORDINARY * rows * ordinary) or not products:
        return rows, ""

    # As many as hold, with the running sum and what it lost, no more than an ordinary gradient of
    # all rows does.
    trained = zip(plan, shapes, strict=True)
    sums = sum(8 * math.prod(shape) for row, shape in trained if row.engine != "frozen")
    most = int((_OF_ORDINARY * rows * ordinary - sums) / ours)
    positions = max(math.prod(node.out_shape()) // site.sizes[3] for node, site in products)
    least = _POSITIONS if jax.default_backend() == "cpu" else _POSITIONS_ON_ACCELERATOR
    most = max(most, -(-least // max(1, positions)))
    together = rounding.even_size(rows, most)
    if most >= rows or 2 * (together * ours + sums) > rows * ours:
        return rows, ""  # less than half is saved
    held_by = f"{together * ours + sums:,} against {rows * ours:,} bytes"
    return together, f"checkpoints ask for memory, {held_by}"


def _bytes(var: Any) -> int:
    return int(math.prod(var.aval.shape) * var.aval.dtype.itemsize)


def room_for_gradients() -> float:
    """The bytes that per-example gradients may take to be fast on an accelerator; 0 on a CPU."""
    return 0.0 if jax.default_backend() == "cpu" else _HELD * (device_memory() or 0)


def device_memory() -> int | None:
    """The bytes of a device's own memory; None where it does not say, as a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def _is_alone(node: Node, site: Site) -> bool:
    """True for a dense product in a loop each of whose iterations has a weight of its own.

    By automatic differentiation its gradient is then what the factors' product is: of one
    iteration, added to nothing, and not rounded to fewer digits.
    """
    looped = site.view.stack is not None and len(site.iterations) == 1
    weight: Any = node.eqn.invars[1 - site.operand].aval
    return looped and node.name == "dot_general" and weight.dtype == jnp.float32


def _reason_for_vmap(leaf: int, uses: Uses, engine: str) -> str:
    """The reason why a leaf's gradients must be taken by automatic differentiation; or ""."""
    if engine == "vmap":
        return "as asked"
    if leaf in uses.refused:
        how, write = uses.refused[leaf]
        return f"used by {how}" + (f"; write {write}" if write else "")
    if leaf not in uses.of_leaf:
        return "not used"
    if not (slices := uses.by_slice(leaf)):
        return "used by slices that overlap"
    for used in slices:
        # Of biases most of the terms may cancel, as in a difference of two networks' results.
        if len(used) > 1 and any(site.adds for _, site in used):
            return "used by add"
        # Gradients of two sites may differ by exchanging p and q at most.
        first = used[0][1].key
        if any(site.key not in (first, (first[0], first[2], first[1])) for _, site in used):
            return "used in unlike ways"
        if len({site.key for _, site in used if site.looks_up}) > 1:
            # Their norms take every lookup for one of rows of the same kind.
            return "looked up by unlike axes"
    return ""
