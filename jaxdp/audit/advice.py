"""Advice from public numbers alone: what the noise of a mechanism allows, and what would change it.

No record is read. The noise is compared with the longest signal that there can be: the mean of
clipped gradients is at most one clip norm long, and as long only where all records agree.
"""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxdp.audit.findings import Finding
from jaxdp.mechanism import Mechanism, dp_mf, dp_sgd, expected_error
from jaxdp.noise import identity
from jaxdp.noise.errors import ERRORS, PREFIX_SUMS, Workload
from jaxdp.sampling import ExampleLevel, Sampling, WeightedPoisson
from jaxdp.sampling.rules import names

_MANY = 1_000  # epochs, which nobody takes but in large batches
_FEW, _EPOCHS = 100, 0.25  # so few steps, of so few epochs together, may be meant as epochs
_WORTH = 0.8  # of the noise, that twice the batch must not leave to be worth its time

# Signal over noise. T steps of the mean clipped gradient m change the loss of a record with the
# clipped gradient g by T m . g times the rate, which is |m|^2 in the mean over the records; noise
# of deviation z C / B in each coordinate changes it by sqrt(T) z C |g| / B. The ratio
#   sqrt(T) B |m|^2 / (z C rms|g|)
# depends neither on the rate nor on the number of parameters. Where it is below DROWNED, noise has
# changed what the model says of a record by more than what was learned; from WEAK on it costs less.
# Without data it is known only that |m| and |g| are at most C, so that it is at most 1 over the
# noise in one direction; on digits it is 1/40 of that. Of a model of few parameters, whose records
# agree more, the noise must be long, too, to be named. docs/howto/does_not_learn.md, "How much
# noise is too much", has the accuracy beside all of these (benchmarks/illnesses/noise.py).
DROWNED, WEAK = 1.0, 3.0
_LENGTH, _DIRECTION, _GOOD = 0.25, 0.005, 0.1  # the last: what is aimed at in length


class Outlook(NamedTuple):
    """The noise of some settings, beside the longest signal that there can be.

    Attributes:
        change: how they differ from the settings that were asked about, in words.
        noise_multiplier: of the mechanism.
        noise: in one direction (a coordinate), of the sum of all steps, over the longest sum of
            clipped gradients. Its length is sqrt(d) times that in d parameters.
    """

    change: str
    noise_multiplier: float
    noise: float


def noise_of_sums(
    mechanism: Mechanism, steps: int, workload: Workload = PREFIX_SUMS
) -> tuple[float, float]:
    """(RMS over the steps, largest) standard deviation of the noise in the sum up to a step.

    It is that of a coordinate of the sum of all clipped gradients (of what the workload makes of
    them), in clip norms.

    Args:
        mechanism: with noise that is independent or correlated over the steps.
        steps: how many; of correlated noise those of its strategy.
        workload: prefix sums by default.
    """
    if mechanism.strategy is not None:
        return expected_error(mechanism, workload), expected_error(mechanism, workload, "max")
    noise, alone = _multiplier(mechanism, steps), identity(steps)
    return noise * ERRORS["rms"](alone, workload), noise * ERRORS["max"](alone, workload)


def _multiplier(mechanism: Mechanism, steps: int) -> float:
    """The noise multiplier; of a schedule the root mean square over the steps."""
    noise = mechanism.noise_multiplier
    if isinstance(noise, int | float):
        return noise
    levels = noise.levels_between(0, steps)
    return math.sqrt(sum(count * level**2 for level, _, count in levels) / steps)


def outlook(mechanism: Mechanism, change: str = "as it is") -> Outlook:
    """The noise of a mechanism; of one step, where it was made for no number of steps."""
    steps = mechanism.steps or 1
    noise = noise_of_sums(mechanism, steps)[1] / (mechanism.batch_size * steps)
    return Outlook(change, _multiplier(mechanism, steps), noise)


def _budget(mechanism: Mechanism) -> dict[str, Any]:
    """The arguments of ``dp_sgd`` and ``dp_mf`` that calibrate to the mechanism's budget.

    Raises:
        ValueError: it has none.
    """
    steps, delta = mechanism.steps, mechanism.delta
    if steps is None or delta is None:
        raise ValueError("mechanism must be made for a budget (epsilon=, delta=, steps=)")
    epsilon = mechanism.epsilon(steps, delta).upper
    sizes = {"batch_size": mechanism.batch_size, "dataset_size": mechanism.dataset_size}
    return {"epsilon": epsilon, "delta": delta, "steps": steps, **sizes, "rule": mechanism.rule}


def with_budget(mechanism: Mechanism, **changed: float) -> Mechanism:
    """A mechanism of the same budget with another ``batch_size``, ``steps`` or ``epsilon``.

    Its noise is independent over the steps and calibrated anew; draws are by the same rule where
    that has a name, else Poisson samples.

    Raises:
        ValueError: the mechanism has no budget; the budget cannot be met.
    """
    rule, sizes = mechanism.sampling, _budget(mechanism) | changed
    sampling: str | Sampling = rule.name if rule.name in names() else "poisson"
    if isinstance(rule, ExampleLevel):
        rate = min(1.0, sizes["batch_size"] / sizes["dataset_size"])
        sampling = dataclasses.replace(rule, sampling_prob=rate)
    if isinstance(rule, WeightedPoisson):  # every probability grows with the batch
        share = sizes["batch_size"] / mechanism.batch_size
        sampling = dataclasses.replace(rule, largest=min(1.0, share * rule.largest))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of whole epochs
        return dp_sgd(
            **sizes,
            records_per_user=mechanism.records_per_user,
            sampling=sampling,
            noise=mechanism.noise,
        )


def outlooks(mechanism: Mechanism) -> list[Outlook]:
    """The outlook as it is, then with one change each; epsilon is the same but where it changes.

    Raises:
        ValueError: the mechanism has no budget.
    """
    budget, changed = _budget(mechanism), functools.partial(with_budget, mechanism)
    batch, half = 2 * budget["batch_size"], max(1, budget["steps"] // 2)
    epsilon = 2 * budget["epsilon"]
    others: dict[str, Callable[[], Mechanism]] = {
        f"twice the batch: {batch:,}": functools.partial(changed, batch_size=batch),
        f"half the steps: {half:,}": functools.partial(changed, steps=half),
        f"twice epsilon: {epsilon:.3g}": functools.partial(changed, epsilon=epsilon),
        "correlated noise (jaxdp.dp_mf)": functools.partial(dp_mf, **budget),
    }
    if mechanism.records_per_user is not None:  # which ``dp_mf`` does not take
        del others["correlated noise (jaxdp.dp_mf)"]
    found = [outlook(mechanism)]
    for change, make in others.items() if mechanism.strategy is None else ():
        with contextlib.suppress(ValueError):  # the budget cannot be met so
            found.append(outlook(make(), change))
    return found


def worthwhile_batch(mechanism: Mechanism) -> Mechanism:
    """The mechanism with the largest batch whose doubling still took a fifth off the noise.

    The noise in the mean halves with twice the batch until the noise multiplier has to grow as
    fast (Ponomareva et al. 2023, arXiv:2303.00654, section 5.3). Correlated noise stays as it is.

    Args:
        mechanism: one that was calibrated to a budget.
    """
    best = mechanism
    while mechanism.strategy is None and 2 * best.batch_size <= best.dataset_size:
        other = with_budget(mechanism, batch_size=2 * best.batch_size)
        if outlook(other).noise > _WORTH * outlook(best).noise:
            break
        best = other
    return best


def find_delta(mechanism: Mechanism) -> list[Finding]:
    """A delta by which a release may publish a record; [] for a smaller one, or none."""
    size, delta = mechanism.dataset_size, mechanism.delta
    if delta is None or delta * size < 1:
        return []
    what = f"delta={delta:.3g} is {delta * size:.3g} times 1 / {size:,}, the number of records"
    do = f"take one well below that: delta={10.0 ** -(math.ceil(math.log10(size)) + 1):g}"
    return [Finding("delta", what, "", do=do, weight=0.1)]


def find_without_data(mechanism: Mechanism, parameters: int) -> list[Finding]:
    """Findings that public numbers alone give; none on healthy settings.

    Args:
        mechanism: sampling, clipping and noise.
        parameters: how many are trained.
    """
    size, batch, steps = mechanism.dataset_size, mechanism.batch_size, mechanism.steps
    found = find_delta(mechanism)
    if steps is None:
        return found

    # Epochs in place of steps: the data are hardly seen, and the number is that of epochs.
    epochs = steps * batch / size
    if steps < _FEW and epochs < _EPOCHS:
        what = f"{steps} steps of {batch:,} records are {epochs:.2g} epochs of the {size:,} records"
        do = (
            f"steps count updates: {steps} epochs are steps={round(steps * size / batch):,}; make "
            "the budget for those, or take larger batches"
        )
        found.append(Finding("epochs", what, "", False, do=do, weight=1 - epochs))
    if epochs > _MANY and 4 * batch <= size:
        what = f"the noise is for {steps:,} steps of {batch:,} records, {epochs:,.0f} epochs"
        do = "make the budget for the steps that are taken; fewer and larger ones have less noise"
        found.append(Finding("epochs", what, "", False, do=do, weight=0.5))

    # Noise as long as the signal can be, and large in every direction.
    noise, root = outlook(mechanism).noise, math.sqrt(parameters)
    if root * noise > _LENGTH and noise > _DIRECTION:
        what = (
            f"the noise in {parameters:,} parameters over {steps:,} steps is {root * noise:.3g} "
            "times as long as the longest sum of gradients that there can be"
        )
        do = f"train at most about {max(1, int((_GOOD / noise) ** 2)):,} parameters "
        do += "(the last layer, LoRA)"
        larger = mechanism if mechanism.delta is None else worthwhile_batch(mechanism)
        if larger.batch_size > batch:
            then = root * outlook(larger).noise
            do = f"batch_size={larger.batch_size:,} makes that {then:.3g}; or {do}"
        weight = min(1.0, noise / (4 * _DIRECTION))
        found.append(Finding("signal", what, "", False, do=do, weight=weight))
    return sorted(found, key=lambda finding: (not finding.certain, -finding.weight))


def explain(mechanism: Mechanism, parameters: int) -> str:
    """A page of what public numbers say of a budget, and of what would change it.

    Args:
        mechanism: one that was calibrated to a budget.
        parameters: how many are trained.

    Raises:
        ValueError: the mechanism has no budget.
    """
    _, delta, steps, batch, size, _ = _budget(mechanism).values()
    rows = [(row, parameters) for row in outlooks(mechanism)]
    now, correlated = rows[0][0], [row for row, _ in rows if row.change.startswith("correlated")]
    for share, words in ((10, "a tenth"), (100, "a hundredth")):
        few = max(1, parameters // share)
        rows.append((now._replace(change=f"{words} of the parameters: {few:,}"), few))
    lines = [
        "From public numbers alone, no record was read:",
        f"  delta  {delta:g} is {delta * size:.2g} / {size:,}; take well below 1 / {size:,}, where "
        "publishing one random record would do",
        f"  draws  {batch:,} of {size:,} records a step are expected; {steps:,} steps are "
        f"{steps * batch / size:.3g} epochs",
        f"  noise  {now.noise_multiplier:.4g} clip norms in each coordinate of the sum of "
        f"gradients, of {parameters:,} parameters",
        "  signal at most one clip norm in the mean of the clipped gradients, as long only where "
        "all records agree",
        "",
        "The noise of the run over the longest signal possible: in one direction, which is the",
        "same however many parameters are trained, and in length.",
        f"{'':40}{'noise':>10}{'direction':>11}{'length':>10}",
    ]
    for row, trained in rows:
        cells = f"{row.noise_multiplier:>10.4g}{row.noise:>11.2g}"
        lines.append(f"{row.change:40}{cells}{math.sqrt(trained) * row.noise:>10.3g}")
    lines.append("")

    # What to do: mistakes, then what is worth most.
    findings = find_without_data(mechanism, parameters)
    advice = [f"{finding.what}: {finding.remedy}" for finding in findings]
    larger = worthwhile_batch(mechanism)
    if larger.batch_size > batch and "signal" not in {finding.kind for finding in findings}:
        then = math.sqrt(parameters) * outlook(larger).noise
        advice.append(
            f"batch_size={larger.batch_size:,}, if you can afford it, makes the length {then:.3g}; "
            "a larger one gains little"
        )
    if correlated and correlated[0].noise < _WORTH * now.noise:
        advice.append("correlated noise: `jaxdp plan` without --explain compares its strategies")
    lines += [f"Do: {line}" for line in advice] or ["Nothing here keeps a model from learning."]
    lines.append("How much your records agree, and more: jaxdp.diagnose(public=...).")
    return "\n".join(lines)
