"""The dominating pairs of a run's steps, direction by direction, for a certificate."""

import math
from dataclasses import replace

from jaxdp.accounting import fixed_size
from jaxdp.accounting.base import Pair
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.canonical import Run, Step
from jaxdp.accounting.certificate import Direction
from jaxdp.accounting.pairs import gaussian_pairs
from jaxdp.accounting.plan import Kinds

# Kinds of steps that are told apart: each costs the time of a transform and more.
_KINDS, _FEW = 100, 24


def directions(
    run: Run, relation: Relation, log_delta: float, tolerance: float, both: bool = True
) -> list[Direction]:
    """The run's dominating pairs, direction by direction, for a certificate at about a delta.

    Args:
        run: the flat composition.
        relation: which data sets are neighbours.
        log_delta: about where.
        tolerance: relative, of the width that is aimed at.
        both: prepare a lower end too.
    """
    groups, spread = _alike(run.steps, _KINDS)
    ends: list[list[tuple[tuple[Pair, ...], int]] | None] = []
    for upper in (True, False) if both else (True,):
        found = [(_step_pairs(group[not upper], relation, upper), n) for group, n in groups]
        found += [(part.pairs(relation, upper), n) for part, n in run.parts]
        ends.append(found if all(pairs for pairs, _ in found) else None)
    high, low = ends[0], ends[-1] if both else None
    assert high is not None
    count = max(len(pairs) for found in ends if found for pairs, _ in found)
    goal = max(tolerance, 3 * spread)

    def kinds(found: list[tuple[tuple[Pair, ...], int]], i: int) -> Kinds:
        return tuple((pairs[min(i, len(pairs) - 1)], n) for pairs, n in found)

    return [
        Direction(kinds(high, i), None if low is None else kinds(low, i), log_delta, goal)
        for i in range(count)
    ]


def fewer(run: Run) -> Run:
    """A run of few kinds of steps that is no more private: similar steps have the least noise."""
    groups, _ = _alike(run.steps, _FEW)
    return replace(run, steps=tuple((least, n) for (least, _), n in groups))


def _alike(
    steps: tuple[tuple[Step, int], ...], most: int
) -> tuple[list[tuple[tuple[Step, Step], int]], float]:
    """(steps with the least and the most noise of those taken together and their number, spread).

    Noise is post-processing, so that less of it gives an upper end and more a lower one. Of the
    steps that differ in their noise alone about ``most`` groups are made; the spread is that of the
    noise in a group, relative.
    """
    if len(steps) <= most:
        return [((step, step), n) for step, n in steps], 0.0
    alike: dict[tuple[str, float], list[tuple[Step, int]]] = {}
    for step, n in sorted(steps, key=lambda entry: entry[0].noise_multiplier):
        alike.setdefault((step.sampling, step.sampling_prob), []).append((step, n))
    reach = sum(
        math.log(s[-1][0].noise_multiplier / s[0][0].noise_multiplier) for s in alike.values()
    )
    groups: list[tuple[tuple[Step, Step], int]] = []
    for members in alike.values():
        least, last, count = members[0][0], members[0][0], 0
        for step, n in members:
            if step.noise_multiplier > least.noise_multiplier * math.exp(reach / most):
                groups.append(((least, last), count))
                least, count = step, 0
            last, count = step, count + n
        groups.append(((least, last), count))
    return groups, reach / most


def _step_pairs(step: Step, relation: Relation, upper: bool) -> tuple[Pair, ...]:
    if step.sampling == "poisson":
        return gaussian_pairs(step, relation)
    return fixed_size.pairs(step.noise_multiplier, step.sampling_prob, relation, upper)
