"""The content of report.json: one frozen dataclass for each of its objects.

A field whose type allows None is null where there is no value; those of a class's ``LEFT_OUT`` are
left out instead, those of its ``EMPTY`` are {}. ``docs/reference/report.schema.json`` says the same
as a JSON Schema.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from jaxdp.runs.written import Written, plain

# What version 1 called these algorithms.
_FORMER = {
    "dp-adam": "dp-adam-bc",
    "dpgdo": "dp-adam",
    "adan": "adadp-noise-only",
    "adal": "adadp-step-only",
}
VERSION = 2
THIS_RUN = "this very run, once"
TINY = "the same mechanism on a tiny network"
# A heading, and rows of name and value under it.
Facts = tuple[str, tuple[tuple[str, str], ...]]


@dataclasses.dataclass(frozen=True)
class Metric(Written):
    """The number that a run is judged by.

    Attributes:
        column: its name in the rows of the history.
        name: as people write it, such as "Test accuracy".
        share: True where it is a share of 1, to be shown in percent.
    """

    column: str
    name: str
    share: bool

    def shown(self, value: float) -> str:
        """The number as a page shows it."""
        return f"{value:.2%}" if self.share else f"{value:.4g}"


TEST_ACCURACY = Metric("test_accuracy", "Test accuracy", share=True)


@dataclasses.dataclass(frozen=True)
class NotPrivate(Written):
    """The same model trained without privacy.

    Attributes:
        accuracy: mean test accuracy, a share of 1.
        runs: over how many runs.
        source: page of this repository where they are written down.
    """

    accuracy: float
    runs: int
    source: str


@dataclasses.dataclass(frozen=True)
class Levels(Written):
    """Accuracies to compare the measured one with, as shares of 1.

    Attributes:
        chance: of guessing a class at random.
        majority: of always answering the commonest class of the public test labels.
        not_private: of the same model without privacy, where it was measured.
    """

    LEFT_OUT: ClassVar = ("chance", "majority", "not_private")

    chance: float | None = None
    majority: float | None = None
    not_private: NotPrivate | None = None


@dataclasses.dataclass(frozen=True)
class Guarantee(Written):
    """The proven guarantee of everything that the ledger was charged for.

    Attributes:
        relation: which data sets are neighbours: add_or_remove_one, replace_one or replace_special.
        delta: of (epsilon, delta).
        sampling: how records are drawn: a name of ``jaxdp.sampling.names()``,
            "cyclic_poisson" or "fixed_order" for correlated noise, "secret_partition" for a run
            whose last state alone is released, or a class's.
        sampling_prob: expected batch size over the declared number of records.
        noise_multiplier: noise standard deviation over what one record can add; of a schedule its
            first value; with cyclic_poisson and fixed_order, of fresh noise over the most by which
            a record moves the strategy's sums of a whole run, in one draw or in all steps.
        releases: number of charged releases.
        in_words: everything released, in words.
        epsilon: certified upper bound on epsilon; infinite where nothing is proven.
        epsilon_lower: certified lower bound on the accountant's epsilon; null without an
            accountant.
        epsilon_estimate: the accountant's estimate between the two; null where it has none.
        accountant: that proved the bound.
        provided: what epsilon takes as fixed beforehand, in words; not there where nothing was
            chosen by looking at releases.
    """

    LEFT_OUT: ClassVar = ("provided",)

    relation: str
    delta: float
    sampling: str
    sampling_prob: float
    noise_multiplier: float
    releases: int
    in_words: str
    epsilon: float
    epsilon_lower: float | None = None
    epsilon_estimate: float | None = None
    accountant: str = ""
    provided: str | None = None


@dataclasses.dataclass(frozen=True)
class ChargedPart(Written):
    """A part of what the ledger was charged for: a stage of the run, or what others released.

    Attributes:
        name: in words.
        releases: number of its charged releases.
        in_words: its mechanism and what it released, in words.
        epsilon: certified upper bound on epsilon of this part alone; infinite where nothing is
            proven.
        epsilon_after: of everything charged by its end, as its last row says; of a stage.
        steps: of the run up to its end; of a stage.
    """

    LEFT_OUT: ClassVar = ("epsilon_after", "steps")

    name: str
    releases: int
    in_words: str
    epsilon: float
    epsilon_after: float | None = None
    steps: int | None = None


@dataclasses.dataclass(frozen=True)
class Caution(Written):
    """A warning that the guarantee is weak, or larger than it needs to be.

    Attributes:
        about: "epsilon", "delta" or "sampling".
        text: the warning.
    """

    about: str
    text: str


@dataclasses.dataclass(frozen=True)
class Tradeoff(Written):
    """Upper bounds on the success of any membership-inference attack.

    Attributes:
        tpr_at_fpr: largest true-positive rate, by false-positive rate.
        mu: of the equivalent Gaussian mechanism (Gaussian differential privacy).
        mu_is: "exact", "approximate" (compared at some points of the curve, not proven) or "".
        curve: points (false-positive rate, largest true-positive rate).
    """

    tpr_at_fpr: dict[str, float]
    mu: float | None
    mu_is: str
    curve: tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class ClaimRow(Written):
    """The epsilon that a paper claims of such a run, by its own formula: no guarantee.

    Attributes:
        name: of the formula.
        epsilon: claimed.
        steps: that the formula counts.
        source: where it is printed.
        verdict: on the claim, beside what is proven.
    """

    name: str
    epsilon: float
    steps: int
    source: str
    verdict: str


@dataclasses.dataclass(frozen=True)
class CandidateCounts(Written):
    """The candidates of an annealed algorithm.

    Attributes:
        proposals: evaluated, and charged.
        accepted: of them.
        forced: of the accepted ones, after too many rejections in a row.
    """

    proposals: int
    accepted: int
    forced: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryRow(Written):
    """One block of steps, at its end; every further key is a number that was evaluated there.

    Attributes:
        step: number of steps taken.
        update_norm: Euclidean norm of the noisy update, mean over the block.
        proposals: as in ``CandidateCounts``, so far.
        accepted: as there.
        forced: as there.
        epsilon: proven for everything charged so far; not there without a delta.
        numbers: the evaluated numbers by name, such as test_accuracy; keys of this object.
    """

    LEFT_OUT: ClassVar = ("proposals", "accepted", "forced", "epsilon")

    step: int
    update_norm: float
    proposals: int | None = None
    accepted: int | None = None
    forced: int | None = None
    epsilon: float | None = None
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As ``Written.to_dict``, with the numbers beside the fields."""
        row = super().to_dict()
        numbers: dict[str, Any] = row.pop("numbers")
        return {**row, **numbers}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """The inverse of ``to_dict``."""
        names = {field.name for field in dataclasses.fields(cls)} - {"numbers"}
        numbers = {name: value for name, value in row.items() if name not in names}
        return super().from_dict({**row, "numbers": numbers})

    def value(self, column: str) -> float:
        """A number of the row by its key."""
        found = self.numbers.get(column, getattr(self, column, None))
        if found is None:
            raise ValueError(f"HistoryRow must hold {column!r}, got {self.to_dict()}")
        return float(found)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(Written):
    """The report of a run: public constants, noisy releases and public data only.

    Where ``measured`` is not null, its column is a key of this object as well, unless it is that of
    a field, with the value of the history's last row.

    Attributes:
        version: of this form; 1 where there is no such key.
        jaxdp: version of jaxdp that wrote the report.
        title: such as "DP-SGD on MNIST".
        algorithm: name of the private algorithm; of a run of ``jaxdp train``, as the next three.
        dataset: name of the data set.
        model: name of the model.
        activation: of its hidden layers.
        config: the public configuration (``jaxdp.runs.RunConfig``); null for a ``jaxdp.Run``.
        measured: the number that the run is judged by; null for none.
        levels: to compare that number with.
        privacy_unit: in words: who is protected.
        guarantee: what is proven.
        warnings: of a weak guarantee.
        tradeoff: bounds on attacks; null where nothing is proven.
        claim: of a paper; null where it has none.
        counts: of an annealed algorithm; {} for another.
        judged_by: what judged its candidates, in words.
        label: that a person chose the seed, in words; null otherwise.
        notes: of the ledger's entries.
        unverified: assumptions of the guarantee that were noticed, and could not be verified.
        assumed: assumptions of every run.
        outside_the_guarantee: what no run's guarantee covers.
        history: one row for each block of steps.
        parameters: number of parameters that are trained.
        epochs: number of times that a record is used, on average; null where there are ``parts``.
        date: UTC, on which training began or was resumed; no time of day.
        command: that gives the run.
        ledger_sha256: hexadecimal hash of ledger.jsonl.
        versions: of the libraries that the numbers depend on.
        machine: processor cores and device.
        facts: the public facts in words: (heading, rows of name and value).
        parts: of what was charged, where there is more than one stage of one run.
        audited: the last audit of the run.
    """

    EMPTY: ClassVar = ("counts",)
    LEFT_OUT: ClassVar = ("algorithm", "dataset", "model", "activation", "parts", "audited")

    version: int = VERSION
    jaxdp: str
    title: str = ""
    algorithm: str | None = None
    dataset: str | None = None
    model: str | None = None
    activation: str | None = None
    config: dict[str, Any] | None = None
    measured: Metric | None = None
    levels: Levels = dataclasses.field(default_factory=Levels)
    privacy_unit: str = ""
    guarantee: Guarantee
    warnings: tuple[Caution, ...] = ()
    tradeoff: Tradeoff | None = None
    claim: ClaimRow | None = None
    counts: CandidateCounts | None = None
    judged_by: str | None = None
    label: str | None = None
    notes: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    outside_the_guarantee: tuple[str, ...] = ()
    history: tuple[HistoryRow, ...]
    parameters: int | None = None
    epochs: float | None = None
    date: str | None = None
    command: str = ""
    ledger_sha256: str | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    machine: str = ""
    facts: tuple[Facts, ...] = ()
    parts: tuple[ChargedPart, ...] | None = None
    audited: AuditRow | None = None

    @property
    def value(self) -> float | None:
        """The measured number after the last step; None where nothing was measured."""
        return None if self.measured is None else self.history[-1].value(self.measured.column)

    def to_dict(self) -> dict[str, Any]:
        """The content of report.json."""
        row: dict[str, Any] = {}
        found, column = super().to_dict(), self.measured and self.measured.column
        own = {field.name for field in dataclasses.fields(self)}  # one that is left out here too
        for name, value in found.items():
            if name == "measured" and column and column not in own:
                row[column] = plain(self.value)
            row[name] = value
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """The report of a report.json of this version or an older one.

        Raises:
            ValueError: it is of a later version, or a field is missing or of another type.
        """
        version = row.get("version", 1)
        if version not in range(1, VERSION + 1):
            raise ValueError(
                f"version must be at most {VERSION}, got {version!r}: read it with the jaxdp that "
                f"wrote it, {row.get('jaxdp')}"
            )
        row = upgrade_version_1(row, TEST_ACCURACY.to_dict()) if version == 1 else row
        return super().from_dict({**row, "version": VERSION})


def load(path: Path) -> Report:
    """The report in a file; ValueError where it is damaged or of a later version."""
    try:
        return Report.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} must be a report that jaxdp wrote: {error}. Put back a copy, or delete it: it "
            "is written anew, without the audit that it held"
        ) from error


def former_algorithm(row: Mapping[str, Any]) -> dict[str, Any]:
    """An object whose key was "method", with "algorithm" and its name of today instead."""
    if "method" not in row:
        return dict(row)
    name = row["method"]
    kept = {key: value for key, value in row.items() if key != "method"}
    return {**kept, "algorithm": _FORMER.get(name, name)}


def upgrade_version_1(row: Mapping[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """A report of version 1 with the keys of version 2.

    Args:
        row: the report.
        measured: the number that it is judged by, where it does not say.
    """
    row = former_algorithm(row)
    proven = dict(row["guarantee"])
    proven["accountant"] = proven.pop("method", None) or proven.pop("algorithm", "")
    for name in ("config", "audited"):
        if row.get(name):
            row[name] = former_algorithm(row[name])
    if "measured" not in row and "test_accuracy" in row:
        row["measured"] = measured
    if not row.get("title"):
        row["title"] = f"{str(row['algorithm']).upper()} on {row['dataset']}"
    return {**row, "guarantee": proven}
