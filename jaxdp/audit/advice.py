"""Advice from public numbers alone: what the noise of a mechanism allows, and what would change it.

No record is read. The noise is compared with the longest signal that there can be: the mean of
clipped gradients is at most one clip norm long, and as long only where all records agree.
"""

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

from jaxdp import arguments
from jaxdp.audit.findings import Finding
from jaxdp.mechanism import Mechanism, dp_mf, dp_sgd, expected_error
from jaxdp.noise import identity
from jaxdp.noise.errors import ERRORS, PREFIX_SUMS, Workload
from jaxdp.sampling.rules import names
from jaxdp.schedules import NoiseSchedule

_MANY = 1_000  # epochs, which nobody takes but in large batches
_FEW, _EPOCHS = 100, 0.25  # so few steps, of so few epochs together, may be meant as epochs
# Noise of a run over its longest signal, in length and in one direction: where both are larger,
# digits were learned poorly (docs/howto/does_not_learn.md); what is aimed at.
_LENGTH, _DIRECTION, _GOOD = 0.25, 0.005, 0.1
_WORTH = 0.8  # of the noise, that twice the batch must not leave to be worth its time


class Outlook(NamedTuple):
    """The noise of some settings, beside the longest signal that there can be.

    Attributes:
        change: how they differ from the settings that were asked about, in words.
        noise_multiplier: of the mechanism.
        of_a_step: the noise's length in the mean of a step's clipped gradients, in clip norms;
            None with correlated noise, most of which later steps take back.
        of_the_run: the noise's length in the sum of all steps over the longest signal's.
        in_a_direction: the same for the noise in one direction, however many parameters there are.
    """

    change: str
    noise_multiplier: float
    of_a_step: float | None
    of_the_run: float
    in_a_direction: float


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
    if not isinstance(noise, NoiseSchedule):
        return noise
    levels = noise.levels_between(0, steps)
    return math.sqrt(sum(count * level**2 for level, _, count in levels) / steps)


def outlook(change: str, mechanism: Mechanism, parameters: int, steps: int) -> Outlook:
    """The noise of a mechanism over so many steps, in so many trained parameters."""
    noise, length = _multiplier(mechanism, steps), math.sqrt(parameters)
    one = noise_of_sums(mechanism, steps)[1] / (mechanism.batch_size * steps)
    of_a_step = None if mechanism.strategy else noise * length / mechanism.batch_size
    return Outlook(change, noise, of_a_step, length * one, one)


def with_budget(
    mechanism: Mechanism,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
) -> Mechanism:
    """A mechanism of the same budget with another batch, number of steps or epsilon.

    Its noise is independent over the steps and calibrated anew; draws are by the same rule where
    that has a name, else Poisson samples.

    Args:
        mechanism: one that was calibrated to a budget.
        batch_size: another, or None.
        steps: another number, or None.
        epsilon: another, or None.

    Raises:
        ValueError: the mechanism has no budget; the budget cannot be met.
    """
    if mechanism.steps is None or mechanism.delta is None:
        raise ValueError("mechanism must be made for a budget (epsilon=, delta=, steps=)")
    if epsilon is None:
        epsilon = mechanism.epsilon(mechanism.steps, mechanism.delta).upper
    rule = mechanism.sampling.name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of whole epochs
        return dp_sgd(
            epsilon=epsilon,
            delta=mechanism.delta,
            steps=steps or mechanism.steps,
            batch_size=batch_size or mechanism.batch_size,
            dataset_size=mechanism.dataset_size,
            rule=mechanism.rule,
            records_per_user=mechanism.records_per_user,
            sampling=rule if rule in names() else "poisson",
            noise=mechanism.noise,
        )


def outlooks(mechanism: Mechanism, parameters: int) -> list[Outlook]:
    """The outlook as it is, then with one change each; epsilon is the same but where it changes.

    Args:
        mechanism: one that was calibrated to a budget.
        parameters: how many are trained.

    Raises:
        ValueError: the mechanism has no budget.
    """
    if mechanism.steps is None or mechanism.delta is None:
        raise ValueError("mechanism must be made for a budget (epsilon=, delta=, steps=)")
    batch, steps = mechanism.batch_size, mechanism.steps
    epsilon = mechanism.epsilon(steps, mechanism.delta).upper
    found = [outlook("as it is", mechanism, parameters, steps)]
    half = max(1, steps // 2)
    others: dict[str, Callable[[], Mechanism]] = {
        f"twice the batch: {2 * batch:,}": lambda: with_budget(mechanism, batch_size=2 * batch),
        f"half the steps: {half:,}": lambda: with_budget(mechanism, steps=half),
        f"twice epsilon: {2 * epsilon:.3g}": lambda: with_budget(mechanism, epsilon=2 * epsilon),
        "correlated noise (jaxdp.dp_mf)": lambda: dp_mf(
            epsilon=epsilon,
            delta=mechanism.delta,
            steps=steps,
            batch_size=batch,
            dataset_size=mechanism.dataset_size,
            rule=mechanism.rule,
        ),
    }
    if mechanism.strategy is not None:
        others = {}
    for change, make in others.items():
        with contextlib.suppress(ValueError):  # the budget cannot be met so
            made = make()
            found.append(outlook(change, made, parameters, made.steps or steps))
    for share, words in ((10, "a tenth"), (100, "a hundredth")):
        few = max(1, parameters // share)
        words = f"{words} of the parameters: {few:,}"
        found.append(outlook(words, mechanism, few, steps))
    return found


def worthwhile_batch(mechanism: Mechanism) -> Mechanism:
    """The mechanism with the largest batch whose doubling still took a fifth off the noise.

    The noise in the mean halves with twice the batch until the noise multiplier has to grow as
    fast (Ponomareva et al. 2023, arXiv:2303.00654, section 5.3).

    Args:
        mechanism: one that was calibrated to a budget.
    """
    best = mechanism
    while 2 * best.batch_size <= best.dataset_size:
        other = with_budget(mechanism, batch_size=2 * best.batch_size)
        noise = [_multiplier(m, mechanism.steps or 1) / m.batch_size for m in (best, other)]
        if noise[1] > _WORTH * noise[0]:
            break
        best = other
    return best


def find_without_data(mechanism: Mechanism, parameters: int) -> list[Finding]:
    """Findings that public numbers alone give; none on healthy settings.

    Args:
        mechanism: sampling, clipping and noise.
        parameters: how many are trained.
    """
    parameters = arguments.integer("parameters", parameters, least=1)
    size, batch = mechanism.dataset_size, mechanism.batch_size
    steps, delta = mechanism.steps, mechanism.delta
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
    now = outlook("", mechanism, parameters, steps)
    if now.of_the_run > _LENGTH and now.in_a_direction > _DIRECTION:
        what = (
            f"the noise in {parameters:,} parameters over {steps:,} steps is {now.of_the_run:.3g} "
            "times as long as the longest sum of gradients that there can be"
        )
        do = f"train at most about {_few(now, parameters):,} parameters (the last layer, LoRA)"
        if mechanism.strategy is None and delta is not None:
            larger = worthwhile_batch(mechanism)
            then = outlook("", larger, parameters, steps).of_the_run
            if larger.batch_size > batch:
                do = f"batch_size={larger.batch_size:,} makes that {then:.3g}; or {do}"
        weight = min(1.0, now.in_a_direction / (4 * _DIRECTION))
        found.append(Finding("signal", what, "", False, do=do, weight=weight))
    return sorted(found, key=lambda finding: (not finding.certain, -finding.weight))


def find_delta(mechanism: Mechanism) -> list[Finding]:
    """A delta by which a release may publish a record; [] for a smaller one, or none."""
    size, delta = mechanism.dataset_size, mechanism.delta
    if delta is None or delta * size < 1:
        return []
    what = f"delta={delta:.3g} is {delta * size:.3g} times 1 / {size:,}, the number of records"
    do = f"take one well below that: delta={10.0 ** -(math.ceil(math.log10(size)) + 1):g}"
    return [Finding("delta", what, "", do=do, weight=0.1)]


def _few(now: Outlook, parameters: int) -> int:
    """The number of parameters in which the noise of the run is a tenth of the longest signal."""
    return max(1, int(parameters * (_GOOD / now.of_the_run) ** 2))


def explain(mechanism: Mechanism, parameters: int) -> str:
    """A page of what public numbers say of a budget, and of what would change it.

    Args:
        mechanism: one that was calibrated to a budget.
        parameters: how many are trained.

    Raises:
        ValueError: the mechanism has no budget.
    """
    rows = outlooks(mechanism, parameters)
    size, batch = mechanism.dataset_size, mechanism.batch_size
    steps, delta, now = mechanism.steps or 0, mechanism.delta or 0.0, rows[0]
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
        "The noise's length over that of the longest signal possible; for the run also in one",
        "direction, which is the same however many parameters are trained.",
        f"{'':40}{'noise':>10}{'a step':>10}{'the run':>10}{'direction':>11}",
    ]
    for row in rows:
        of_step = "" if row.of_a_step is None else f"{row.of_a_step:.3g}"
        cells = f"{row.noise_multiplier:>10.4g}{of_step:>10}{row.of_the_run:>10.3g}"
        lines.append(f"{row.change:40}{cells}{row.in_a_direction:>11.2g}")
    lines.append("")

    # What to do: mistakes, then what is worth most.
    findings = find_without_data(mechanism, parameters)
    advice = [f"{finding.what}: {finding.remedy}" for finding in findings]
    larger = worthwhile_batch(mechanism) if mechanism.strategy is None else mechanism
    if larger.batch_size > batch and "signal" not in {finding.kind for finding in findings}:
        then = outlook("", larger, parameters, steps)
        advice.append(
            f"batch_size={larger.batch_size:,}, if you can afford it: {then.of_a_step:.3g} a step, "
            f"{then.of_the_run:.3g} the run; a larger one gains little"
        )
    correlated = [row for row in rows if row.change.startswith("correlated")]
    if correlated and correlated[0].of_the_run < _WORTH * now.of_the_run:
        advice.append("correlated noise: `jaxdp plan` without --explain compares its strategies")
    lines += [f"Do: {line}" for line in advice] or ["Nothing here keeps a model from learning."]
    lines.append("How much your records agree, and more: jaxdp.diagnose(public=...).")
    return "\n".join(lines)
