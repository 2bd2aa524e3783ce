"""The accountants behind one face: each is asked about a flat `Run` and answers with a `Bound`."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxdp.accounting import gaussian, rdp
from jaxdp.accounting.bounds import Bound, Relation, UnsupportedEventError
from jaxdp.accounting.canonical import Run
from jaxdp.accounting.loss import separation


@dataclass(frozen=True)
class Method:
    """One accountant.

    Attributes:
      epsilon: (run, relation, delta) -> Bound.
      delta: (run, relation, epsilon) -> Bound.
      refuses: (run, relation) -> reason, or "" when it can answer.
    """

    epsilon: Callable[[Run, Relation, float], Bound]
    delta: Callable[[Run, Relation, float], Bound]
    refuses: Callable[[Run, Relation], str]


def _only_poisson(run: Run, relation: Relation) -> str:
    del relation
    bad = [s for s, _ in run.steps if s.sampling != "poisson"]
    return f"{bad[0].sampling} sampling is not covered by this method" if bad else ""


def _only_full_batch(run: Run, relation: Relation) -> str:
    del relation
    bad = [s for s, _ in run.steps if s.sampling_prob < 1]
    return f"sampling with q={bad[0].sampling_prob:g} has no exact GDP curve" if bad else ""


def _mu(run: Run, relation: Relation) -> float:
    return separation(relation) / run.steps[0][0].noise_multiplier


def _gdp_epsilon(run: Run, relation: Relation, delta: float) -> Bound:
    lower, upper = gaussian.gaussian_epsilon(_mu(run, relation), delta)
    note = "delta(0) is already below the target" if upper == 0 else ""
    return Bound(lower * (1 - 1e-11), 0.5 * (lower + upper), upper * (1 + 1e-11), "gdp", note)


def _gdp_delta(run: Run, relation: Relation, epsilon: float) -> Bound:
    value = gaussian.gaussian_delta(_mu(run, relation), epsilon)
    return Bound(value * (1 - 1e-10), value, min(1.0, value * (1 + 1e-10) + 1e-300), "gdp")


def _rdp_epsilon(run: Run, relation: Relation, delta: float) -> Bound:
    upper, _ = rdp.rdp_to_epsilon(rdp.run_rdp(run, relation), delta)
    return Bound(0.0, upper, upper, "rdp")


def _rdp_delta(run: Run, relation: Relation, epsilon: float) -> Bound:
    upper = rdp.rdp_to_delta(rdp.run_rdp(run, relation), epsilon)
    return Bound(0.0, upper, upper, "rdp")


METHODS: dict[str, Method] = {
    "gdp": Method(_gdp_epsilon, _gdp_delta, _only_full_batch),
    "rdp": Method(_rdp_epsilon, _rdp_delta, _only_poisson),
}
_AUTO = ("gdp", "rdp")


def choose(run: Run, relation: Relation, method: str) -> tuple[str, Method]:
    """The accountant to ask: the one named, or for "auto" the tightest that covers the run.

    Raises:
      ValueError: for an unknown name.
      UnsupportedEventError: when the named accountant, or every one, refuses the run.
    """
    if method != "auto" and method not in METHODS:
        raise ValueError(f"method={method!r}: expected 'auto' or one of {sorted(METHODS)}")
    names = _AUTO if method == "auto" else (method,)
    reason = ""
    for name in names:
        reason = METHODS[name].refuses(run, relation)
        if not reason:
            return name, METHODS[name]
    raise UnsupportedEventError(f"{run.steps[0][0]} under {relation.value} by {method}: {reason}")


def trivial(run: Run) -> Bound | None:
    """The answer to runs that need no accountant: nothing released, or nothing guaranteed."""
    if run.infinite:
        return Bound(math.inf, math.inf, math.inf, "none", f"no guarantee: {run.infinite}")
    if not run.steps:
        return Bound(0.0, 0.0, 0.0, "none", "nothing that depends on the data was released")
    return None
