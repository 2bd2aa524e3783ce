"""Compares an event's epsilon with a target, by the quickest accountant that can decide."""

from jaxdp.accounting import accountants, single
from jaxdp.accounting.base import Event
from jaxdp.accounting.bounds import Bound, Relation
from jaxdp.accounting.canonical import Run, flatten
from jaxdp.accounting.queries import epsilon as epsilon_of

_PATIENCE = 4  # answers of the slow accountants, some seconds each, in one search


class Prover:
    """Compares events with a target epsilon; every answer is a proven bound.

    The single contour takes milliseconds and mostly decides; where it cannot, Rényi bounds may.
    What is left takes seconds for each event: it is asked a few times in one search, and then, or
    where delta is none that a budget has (below 1e-15 or above 0.1), Rényi bounds decide. A count,
    not a clock: an answer does not depend on the machine.

    Args:
        epsilon: the target.
        delta: of the guarantee.
        relation: which data sets are neighbours.
        accountant: as for ``jaxdp.accounting.epsilon``, which answers for all but "auto".
    """

    def __init__(self, epsilon: float, delta: float, relation: Relation, accountant: str = "auto"):
        self._epsilon, self._delta = epsilon, delta
        self._relation, self._accountant = relation, accountant
        self._left = _PATIENCE if 1e-15 <= delta <= 0.1 else 0

    @property
    def patient(self) -> bool:
        """True if a slow accountant may still be asked."""
        return self._left > 0

    def bound(self, event: Event) -> Bound:
        """A bound on epsilon, as tight as needed to compare it with the target."""
        run = flatten(event, self._relation)
        if self._accountant != "auto" or not _sampled(run):
            return epsilon_of(event, self._delta, self._relation, self._accountant)
        if single.total_variation(run, self._relation) <= self._delta:
            return Bound(0.0, 0.0, 0.0, "exact", "delta(0) is already below the target")
        quick = self._contour(run)
        if quick is not None and self._decides(quick):
            return quick
        loose = accountants.ACCOUNTANTS["rdp"].epsilon(run, self._relation, self._delta)
        if self._decides(loose) or not self.patient or _closed(run):
            return loose
        self._left -= 1
        return epsilon_of(event, self._delta, self._relation)

    def _decides(self, bound: Bound) -> bool:
        return bound.upper <= self._epsilon or bound.lower > self._epsilon

    def _contour(self, run: Run) -> Bound | None:
        if _closed(run):
            return accountants.ACCOUNTANTS["exact"].epsilon(run, self._relation, self._delta)
        return accountants.quick_epsilon(run, self._relation, self._delta)


def _closed(run: Run) -> bool:
    """True if the exact answer is a closed form."""
    return len(run.steps) == 1 and run.steps[0][1] == 1


def _sampled(run: Run) -> bool:
    """True if the run is of Gaussians on Poisson samples, not all of them of every record."""
    steps = [step for step, _ in run.steps]
    return (
        not (run.infinite or run.hidden)
        and any(s.sampling_prob < 1 for s in steps)
        and all(s.sampling == "poisson" for s in steps)
    )
