"""The object of report.json that holds an audit."""

import dataclasses
from typing import ClassVar

from jaxdp._written import Written

THIS_RUN = "this very run, once"
TINY = "the same mechanism on a tiny network"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditRow(Written):
    """An audit: claimed, proven and empirical epsilon side by side. Also the content of audit.json.

    Attributes:
        algorithm: audited; of a ``jaxdp.Run`` the name of its folder.
        what: was attacked: the run itself, or its mechanism on a tiny network.
        steps: of each attacked run.
        runs: number of attacked runs.
        canaries: candidates of an audit of the run itself.
        delta: of every epsilon here.
        confidence: of each lower bound, by itself.
        claimed: epsilon by the paper's formula; null without one.
        claim: name of that formula.
        proven: certified upper bound on epsilon for the steps attacked.
        audited: lower bound on epsilon (empirical epsilon) that assumes nothing.
        audited_profile: lower bound that holds provided that ``profile_assumes``.
        profile_assumes: the assumption, in words.
        audited_family: lower bound from one run that holds provided that ``family_assumes``.
        family_assumes: the assumption, in words.
        audited_last: lower bound that assumes nothing, from the sum of the noisy gradients alone,
            which with plain SGD is the last iterate.
        last_of: what ``audited_last`` was computed from, in words.
        reachable: about the bound that ideal scores of what was charged would give.
        all_right: the bound of an audit in which every canary is guessed right.
        points: (false-positive rate, its low and high end, true-positive rate, its low and high
            end) of the attack at a few thresholds, each interval at the confidence.
        p_value: of the test of the charged event; null where there was none.
        broken: whether the proven guarantee is refuted at the confidence.
        claim_refuted: whether ``audited`` exceeds ``claimed``.
        adversary: of the attack, in words.
        verdict: in words.
        noise: verdict on the noise that was added, in words.
        noise_p_value: smallest of its tests.
        noise_refuted: whether the noise is not what was charged.
    """

    LEFT_OUT: ClassVar = (
        "algorithm",
        "canaries",
        "delta",
        "noise",
        "noise_p_value",
        "noise_refuted",
        "audited_family",
        "family_assumes",
        "audited_last",
        "last_of",
        "reachable",
        "all_right",
        "points",
    )

    algorithm: str | None = None
    what: str = TINY
    steps: int
    runs: int
    canaries: int | None = None
    delta: float | None = None
    confidence: float
    claimed: float | None = None
    claim: str | None = None
    proven: float
    audited: float
    audited_profile: float | None = None
    profile_assumes: str | None = None
    audited_family: float | None = None
    family_assumes: str | None = None
    audited_last: float | None = None
    last_of: str | None = None
    reachable: float | None = None
    all_right: float | None = None
    points: tuple[tuple[float, float, float, float, float, float], ...] | None = None
    p_value: float | None = None
    broken: bool = False
    claim_refuted: bool = False
    adversary: str
    verdict: str
    noise: str | None = None
    noise_p_value: float | None = None
    noise_refuted: bool | None = None
