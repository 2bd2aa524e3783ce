"""Flattens nested events to distinct steps with counts, which accountants read."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxdp.accounting import hidden_state
from jaxdp.accounting.bounds import Relation, UnsupportedEventError
from jaxdp.accounting.chains import Array, NoisyChain
from jaxdp.accounting.events import (
    Composed,
    Event,
    FixedSizeSampled,
    Gaussian,
    HiddenState,
    NonPrivate,
    PoissonSampled,
    Repeated,
    ShuffledBatches,
)


@dataclass(frozen=True, order=True)
class Step:
    """One release: a Gaussian mechanism on a sampled batch.

    Attributes:
        noise_multiplier: z > 0, relative to one record's largest contribution.
        sampling_prob: q in (0, 1]; 1 is the full batch.
        sampling: "poisson" (also the full batch) or "fixed_size" (without replacement, q = b/n).
    """

    noise_multiplier: float
    sampling_prob: float = 1.0
    sampling: str = "poisson"


@dataclass(frozen=True)
class Run:
    """A composition in flat form.

    Attributes:
        steps: (step, count) pairs, distinct and sorted; full-batch Gaussians are merged into one.
            Hidden-state events are among them as Gaussians that are no better: an accountant that
            knows nothing else stays above the truth (but has no lower bound).
        infinite: why nothing can be guaranteed, or "" when something can.
        hidden: (event, count) of the hidden-state events.
        others: the steps without the hidden-state events; None when there are none of these.
    """

    steps: tuple[tuple[Step, int], ...]
    infinite: str = ""
    hidden: tuple[tuple[HiddenState, int], ...] = ()
    others: tuple[tuple[Step, int], ...] | None = None


def flatten(event: Event, relation: Relation) -> Run:
    """The flat run of ``event``, equal steps merged: the cost does not depend on their order.

    Full-batch Gaussians compose exactly to one with z = (sum n_i z_i^-2)^-1/2 (Dong, Roth and Su
    2022, "Gaussian differential privacy", Corollary 3.3). Gaussians inside one ``PoissonSampled``
    or ``FixedSizeSampled`` saw one draw of records, hence are one Gaussian too
    (``joint_gaussian``).

    Raises:
        ValueError: when ``relation`` is not a ``Relation``.
        UnsupportedEventError: when the event, or the event under this relation, has no bound here.
    """
    if not isinstance(relation, Relation):
        raise ValueError(f"relation={relation!r}: expected one of {[str(r) for r in Relation]}")
    counts: dict[Step, int] = {}
    reasons: list[str] = []
    hidden: dict[HiddenState, int] = {}
    _collect(event, 1, relation, counts, reasons, hidden)
    others = _merged(counts)
    for chains, n in hidden.items():
        _add_hidden(chains, n, counts, reasons)
    infinite = "; ".join(dict.fromkeys(reasons))
    if not hidden:
        return Run(others, infinite)
    return Run(_merged(counts), infinite, tuple(hidden.items()), others)


def _merged(counts: dict[Step, int]) -> tuple[tuple[Step, int], ...]:
    """The steps sorted, with all full-batch Gaussians merged into one."""
    full = [(s, n) for s, n in counts.items() if s.sampling_prob == 1]
    sampled = {s: n for s, n in counts.items() if s.sampling_prob < 1}
    if full:
        precision = 0.0
        for step, n in full:
            precision += n * step.noise_multiplier**-2
        z = full[0][0].noise_multiplier if sum(n for _, n in full) == 1 else precision**-0.5
        sampled[Step(z)] = 1
    return tuple(sorted(sampled.items()))


def _add_hidden(
    event: HiddenState, times: int, counts: dict[Step, int], reasons: list[str]
) -> None:
    """Adds the event as a Gaussian that is no better than its worst batch."""
    mu = math.sqrt(2 * float(batch_values(event).max()))
    if not math.isfinite(mu):
        reasons.append("inner iterates left a loop whose start is not the same for all records")
    elif mu > 0:
        # Under replace-one a Gaussian of multiplier z is 2/z-GDP.
        _add(Step(min(2 / mu, 1e30)), times, counts, reasons)


def batch_values(event: HiddenState) -> Array:
    """S of each batch that may hold the record, [batches], summed over the blocks."""
    bound = hidden_state.composed if event.exposed else hidden_state.shifted
    return _over_blocks(event, bound)


def log_sobolev_values(event: HiddenState) -> Array:
    """The same as ``batch_values``, by the corrected log-Sobolev recursion."""
    return _over_blocks(event, hidden_state.composed if event.exposed else hidden_state.log_sobolev)


def _over_blocks(event: HiddenState, bound: Callable[[NoisyChain], Array]) -> Array:
    values = np.zeros(event.blocks[0].batches)
    for chain, n in Counter(event.blocks).items():
        values = values + n * bound(chain)
    return values


def _collect(
    event: Event,
    times: int,
    relation: Relation,
    counts: dict[Step, int],
    reasons: list[str],
    hidden: dict[HiddenState, int],
) -> None:
    """Adds ``times`` occurrences of ``event`` to ``counts``, what is infinite to ``reasons``."""
    if times == 0:
        return
    match event:
        case Repeated(inner, n):
            _collect(inner, times * n, relation, counts, reasons, hidden)
        case Composed(events):
            for inner in events:
                _collect(inner, times, relation, counts, reasons, hidden)
        case NonPrivate(reason):
            reasons.append(reason)
        case Gaussian(z):
            _add(Step(z) if z > 0 else None, times, counts, reasons)
        case PoissonSampled(inner, q):
            _sampled(event, inner, q, "poisson", times, relation, counts, reasons)
        case FixedSizeSampled(inner, n, b):
            if relation is not Relation.REPLACE_ONE and 0 < b < n:
                raise UnsupportedEventError(
                    f"FixedSizeSampled under {relation.value}: batches of a fixed size only have "
                    "neighbours of equal size; ask with relation replace_one"
                )
            _sampled(event, inner, b / n, "fixed_size", times, relation, counts, reasons)
        case HiddenState():
            if relation is not Relation.REPLACE_ONE:
                raise UnsupportedEventError(
                    f"HiddenState under {relation.value}: records are put into batches of public "
                    "sizes, so that neighbours have equal size; ask with relation replace_one"
                )
            hidden[event] = hidden.get(event, 0) + times
        case ShuffledBatches():
            raise UnsupportedEventError(
                "ShuffledBatches: batches of one shuffled pass exclude each other; accounting them "
                "as Poisson can be too low (arXiv:2403.17673) and no bound is implemented"
            )
        case _:
            raise ValueError(f"event={event!r}: expected an event of jaxdp.accounting")


def _sampled(
    event: Event,
    inner: Event,
    q: float,
    sampling: str,
    times: int,
    relation: Relation,
    counts: dict[Step, int],
    reasons: list[str],
) -> None:
    """Add a sampled event: everything inside saw one draw, so it is one joint Gaussian."""
    if q == 0 and not isinstance(inner, NonPrivate):
        return
    run = flatten(inner, relation)
    if run.hidden:
        raise UnsupportedEventError(
            f"{type(event).__name__} of a HiddenState event: its partition is of all records, not "
            "of a draw, and no bound is known"
        )
    if run.infinite:
        reasons.append(run.infinite)
    for step, _ in run.steps:
        if step.sampling_prob < 1:
            raise UnsupportedEventError(
                f"{type(event).__name__} of a sampled event: nested sampling has no bound here"
            )
        sampled = Step(step.noise_multiplier, q, sampling if q < 1 else "poisson")
        _add(sampled, times, counts, reasons)


def _add(step: Step | None, times: int, counts: dict[Step, int], reasons: list[str]) -> None:
    if step is None:
        reasons.append("a release has no noise (noise multiplier 0)")
    elif step.noise_multiplier < 1e-30:
        reasons.append(f"noise multiplier {step.noise_multiplier:g} is too small to be any noise")
    else:
        counts[step] = counts.get(step, 0) + times
