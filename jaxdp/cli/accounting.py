"""`jaxdp epsilon` and `jaxdp calibrate`: the accountant on the command line. Never imports jax."""

import dataclasses
import decimal
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from jaxdp.cli.options import ACCOUNTANTS, RELATIONS

if TYPE_CHECKING:
    from jaxdp.accounting import Event, Gaussian

_relation = click.option(
    "--relation",
    type=click.Choice(RELATIONS),
    default=RELATIONS[0],
    show_default=True,
    help="Which two data sets count as neighbours.",
)
_accountant = click.option(
    "--accountant",
    type=click.Choice(ACCOUNTANTS),
    default="auto",
    show_default=True,
    help="Which accountant to ask.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


# The numbers of each sampling, beside noise and steps: options that must come with it.
_NEEDED = {
    "poisson": ("sampling_prob",),
    "fixed_size": ("batch_size", "dataset_size"),
    "full_batch": (),
    "allocation": ("steps_per_epoch",),
    "shuffle": ("steps_per_epoch",),
    "truncated_poisson": ("sampling_prob", "cap", "dataset_size"),
    "cyclic_poisson": ("sampling_prob", "bands"),
    "fixed_order": (),
}


@click.command()
@click.option(
    "--sampling",
    type=click.Choice(tuple(_NEEDED)),
    default="poisson",
    show_default=True,
    help="How batches are drawn. The last two have noise that is correlated over the steps: "
    "cyclic_poisson draws from one of --bands groups in turn (banded matrices), fixed_order takes "
    "records in a public order (not under add_or_remove_one).",
)
@click.option(
    "--sampling-prob",
    type=float,
    help="Poisson sampling probability: expected batch size / data set size (1: all); of "
    "cyclic_poisson bands times that.",
)
@click.option("--bands", type=int, help="Of cyclic_poisson: bands of the strategy, and groups.")
@click.option("--steps-per-epoch", type=int, help="Of allocation and shuffle.")
@click.option("--participations", type=int, help="Steps of an epoch that a record is in [1].")
@click.option("--batch-size", type=int, help="Of fixed_size.")
@click.option("--dataset-size", type=int, help="Of fixed_size and truncated_poisson, exact.")
@click.option("--cap", type=int, help="Largest batch of truncated_poisson.")
@click.option(
    "--noise-multiplier",
    type=float,
    required=True,
    help="Noise standard deviation / clip norm. Of cyclic_poisson and fixed_order: standard "
    "deviation of the noise before it is correlated / (clip norm * sensitivity of the strategy, "
    "which is its largest column norm and what one record moves over the whole run).",
)
@click.option("--steps", type=int, required=True, help="Number of steps (not epochs).")
@click.option("--delta", type=float, required=True, help="Delta, strictly between 0 and 1.")
@_relation
@_accountant
@click.option("--claims", is_flag=True, help="Also print what papers' own formulas claim.")
@_json
def epsilon(
    sampling: str,
    noise_multiplier: float,
    steps: int,
    delta: float,
    relation: str,
    accountant: str,
    claims: bool,
    as_json: bool,
    **numbers: Any,
) -> None:
    """Epsilon of a DP-SGD run: `steps` Gaussian releases on sampled batches.

    Epochs of allocation and shuffle count whole. Report the upper value. Example (batches of 512
    from 60,000):

    \b
      jaxdp epsilon --sampling-prob 0.0085333333 --noise-multiplier 1.23 \\
                    --steps 5000 --delta 1e-5
      jaxdp epsilon --sampling allocation --steps-per-epoch 118 --noise-multiplier 1.23 \\
                    --steps 5000 --delta 1e-5
      jaxdp epsilon --sampling cyclic_poisson --sampling-prob 0.08 --bands 8 \\
                    --noise-multiplier 2.71 --steps 2000 --delta 1e-5
    """
    if claims and sampling != "poisson":
        raise click.UsageError("--claims must come with --sampling poisson: papers assume it")
    given = {name: value for name, value in numbers.items() if value is not None}
    from jaxdp import accounting as acc

    event = _sampled(sampling, acc.Gaussian(noise_multiplier), steps, given)
    bound = acc.epsilon(event, delta, acc.Relation(relation), accountant)
    answer: dict[str, Any] = {
        "epsilon": bound.upper,
        **dataclasses.asdict(bound),
        "relation": relation,
        "delta": delta,
        "sampling": sampling,
    }
    if claims:
        from jaxdp.papers.claims import all_claims

        found = all_claims(given["sampling_prob"], noise_multiplier, steps, delta)
        # The papers' formulas are about adding or removing a record, whatever was asked above.
        truth = acc.epsilon(event, delta)
        answer["claims"] = [
            {"name": c.name, "value": c.value, "source": c.source, "verdict": c.verdict(truth)}
            for c in found
        ]
    _show(answer, as_json, "Epsilon (report the upper value)")


@click.command()
@click.option("--epsilon", type=float, required=True, help="Target epsilon.")
@click.option("--delta", type=float, required=True, help="Delta, strictly between 0 and 1.")
@click.option("--sampling-prob", type=float, help="Poisson sampling probability.")
@click.option("--steps", type=int, help="Number of steps.")
@click.option("--noise-multiplier", type=float, help="Noise standard deviation / clip norm.")
@_relation
@_accountant
@_json
def calibrate(
    epsilon: float,
    delta: float,
    sampling_prob: float | None,
    steps: int | None,
    noise_multiplier: float | None,
    relation: str,
    accountant: str,
    as_json: bool,
) -> None:
    """Fit a DP-SGD run to a privacy budget.

    Give two of --sampling-prob, --steps and --noise-multiplier; the third is found: the smallest
    noise, the most steps, or the largest sampling probability within the budget. Example:

    \b
      jaxdp calibrate --epsilon 3 --delta 1e-5 --sampling-prob 0.0085333333 --steps 5000
    """
    given = {"sampling_prob": sampling_prob, "steps": steps, "noise_multiplier": noise_multiplier}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1:
        raise click.UsageError(
            "give exactly two of --sampling-prob, --steps and --noise-multiplier"
        )
    from jaxdp import accounting as acc

    kind = acc.Relation(relation)
    known: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    find: Any = {
        "noise_multiplier": acc.calibrate_noise_multiplier,
        "steps": acc.calibrate_steps,
        "sampling_prob": acc.calibrate_sampling_prob,
    }[missing[0]]
    found = find(epsilon=epsilon, delta=delta, relation=kind, accountant=accountant, **known)
    known[missing[0]] = found
    event = acc.Repeated(
        acc.PoissonSampled(acc.Gaussian(known["noise_multiplier"]), known["sampling_prob"]),
        known["steps"],
    )
    bound = acc.epsilon(event, delta, kind, accountant)
    answer = {
        missing[0]: found,
        "epsilon": bound.upper,
        "accountant": bound.accountant,
        "relation": relation,
        "delta": delta,
        **known,
    }
    _show(answer, as_json, f"Calibrated {missing[0].replace('_', ' ')}")


def _sampled(
    sampling: str, released: "Gaussian", steps: int, given: Mapping[str, float]
) -> "Event":
    """The event of `steps` steps with the numbers of their sampling, and no others."""
    options = {name: f"--{name.replace('_', '-')}" for name in given}
    optional = ("participations",) if sampling == "allocation" else ()
    for name in _NEEDED[sampling]:
        if name not in given:
            raise click.UsageError(
                f"--{name.replace('_', '-')} must come with --sampling {sampling}"
            )
    for name, option in options.items():
        if name not in (*_NEEDED[sampling], *optional):
            raise click.UsageError(f"{option} must not come with --sampling {sampling}")
    from jaxdp import accounting as acc

    makes: dict[str, Any] = {
        "poisson": acc.PoissonSampled,
        "fixed_size": acc.FixedSizeSampled,
        "full_batch": lambda event: event,
        "allocation": lambda event, steps_per_epoch, participations=1: acc.RandomAllocation(
            event, steps_per_epoch, participations
        ),
        "shuffle": lambda event, steps_per_epoch: acc.ShuffledEpoch(event, steps_per_epoch),
        "truncated_poisson": acc.TruncatedPoisson,
        "cyclic_poisson": lambda event, **known: acc.CyclicPoisson(event, steps=steps, **known),
        "fixed_order": lambda event: acc.CorrelatedNoise(event, steps),
    }
    event = makes[sampling](released, **given)
    return acc.Repeated(event, -(-steps // event.block))


def _show(answer: dict[str, Any], as_json: bool, title: str) -> None:
    """Print a flat answer as JSON (infinity as the string "inf") or as a two-column table."""
    if as_json:
        click.echo(json.dumps(_plain(answer), allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    claims = answer.pop("claims", [])
    for key, value in answer.items():
        if value != "":
            shown = _rounded(key, value) if isinstance(value, float) else str(value)
            table.add_row(key.replace("_", " "), shown)
    console = Console()
    console.print(table)
    for claim in claims:
        console.print(f"{claim['name']} claims {claim['value']:.5g}: {claim['verdict']}")


def _rounded(key: str, value: float) -> str:
    """Seven digits, rounded so that what is shown promises no more than what was proven."""
    safe = {
        "epsilon": decimal.ROUND_CEILING,
        "upper": decimal.ROUND_CEILING,
        "noise_multiplier": decimal.ROUND_CEILING,
        "sampling_prob": decimal.ROUND_FLOOR,
        "lower": decimal.ROUND_FLOOR,
    }
    context = decimal.Context(prec=7, rounding=safe.get(key, decimal.ROUND_HALF_EVEN))
    return f"{float(context.create_decimal(value)):.7g}"


def _plain(value: Any) -> Any:
    """The same value for strict JSON: infinity becomes the string "inf"."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
