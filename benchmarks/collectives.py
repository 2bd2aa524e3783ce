"""The data that devices exchange in a compiled program, read from its HLO text."""

import re
from collections import Counter

_KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_PASSES = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# What the counter of a loop is below, in its condition: a TPU's text says it there alone.
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_BELOW = re.compile(r"ROOT .* compare\(.*%([\w.\-]+)\), direction=LT")
_OP = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?)\s([a-z][\w\-]*)\((.*)$")


def collectives(compiled):
    """(kind, bytes) of every exchange of one call, those in loops as often as they run.

    Bytes are those of the whole array that a device ends with, or begins with where it ends with a
    part of it (reduce-scatter).
    """
    return _of_text(compiled if isinstance(compiled, str) else compiled.as_text())


def summary(compiled):
    """{kind: {"count", "bytes"}} of every exchange, and of all."""
    counts, sizes = Counter(), Counter()
    for kind, size, times in collectives(compiled):
        for name in (kind, "all"):
            counts[name] += times
            sizes[name] += times * size
    return {kind: {"count": counts[kind], "bytes": sizes[kind]} for kind in sorted(counts)}


def _of_text(text):
    bodies, entry, name = {}, None, None
    for line in text.splitlines():
        if (head := _HEAD.match(line)) and "=" not in line.split("(")[0]:
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name is not None:
            bodies[name].append(line)
    return list(_within(bodies, entry, 1))


def _within(bodies, name, times):
    for line in bodies.get(name, ()):
        op = _OP.match(line)
        if op is None:
            continue
        result, kind, rest = op.groups()
        kind = kind.removesuffix("-start")
        if kind in _KINDS:
            yield kind, _bytes(result, kind, rest), times
            continue
        passes = 1
        if kind == "while":
            found = _PASSES.search(line)
            passes = int(found[1]) if found else _below(bodies[_CONDITION.search(line)[1]])
        called = _CALLED.findall(line)
        for group in _BRANCHES.findall(line):
            called += [each.strip().lstrip("%") for each in group.split(",")]
        for each in called:
            yield from _within(bodies, each, times * passes)


def _below(condition):
    text = "\n".join(condition)
    limit, constants = _BELOW.search(text), dict(_CONSTANT.findall(text))
    return int(constants.get(limit[1], 1)) if limit else 1


def _bytes(result, kind, rest):
    size = sum(_size(*each) for each in _ARRAY.findall(result))
    if kind != "reduce-scatter":
        return size
    groups = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[(\d+),(\d+)\])", rest)
    return size * (len(groups[1].split(",")) if groups[1] else int(groups[3]))


def _size(dtype, shape):
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    count = 1
    for n in shape.split(","):
        count *= int(n) if n else 1
    return count * bits // 8
