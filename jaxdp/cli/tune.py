"""``jaxdp tune``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxdp.cli.failures import explain_failures
from jaxdp.cli.options import FEATURES, Filled, papers
from jaxdp.data.specs import SPECS

if TYPE_CHECKING:
    from jaxdp.runs.tuned import TunedConfig

_NO_CAP = (
    "must not be given: the number of tries is drawn from its law, and a cap on tries or on time "
    "would be another law, whose cost is not the one charged. Choose a law with fewer tries"
)
_TRIES = "geometric:0.1"


def _refuse_cap(ctx: click.Context, param: click.Parameter, value: float | None) -> None:
    if value is not None:
        raise click.UsageError(f"{param.opts[0]} {_NO_CAP}", ctx)


@click.command()
@click.option("--dataset", type=click.Choice(list(SPECS)), default="digits", show_default=True)
@click.option(
    "--data",
    "data_file",
    type=Filled(dir_okay=False),
    help="A .npz file of your own instead: x, y, and public x_test, y_test.",
)
@click.option("--classes", type=int, help="Number of classes of --data, public.")
@click.option("--dataset-size", type=int, help="Declared number of records of --data, public.")
@click.option(
    "--search",
    multiple=True,
    required=True,
    metavar="NAME=LOW:HIGH|A,B,...",
    help="A law to draw learning_rate, l2_clip_norm, momentum or optimizer from; may be repeated.",
)
@click.option(
    "--tries",
    default=_TRIES,
    show_default=True,
    metavar="LAW:NUMBER",
    help="Law of the secret number of tries: geometric:G, logarithmic:G, negative_binomial:ETA:G, "
    "poisson:MEAN.",
)
@click.option("--model", type=click.Choice(["mnist-cnn", "cifar-cnn", "mlp", "logistic"]))
@click.option(
    "--features",
    type=FEATURES,
    help="As for jaxdp train.",
)
@click.option("--algorithm", help="As for jaxdp train; one without an energy.")
@click.option("--hidden", type=int, help="Width of an MLP's hidden layer.")
@click.option("--epsilon", type=float, help="Budget of the whole tuning [default: 3].")
@click.option("--delta", type=float, help="Delta of the guarantee [default: 1e-5].")
@click.option("--noise-multiplier", type=float, help="Of every try, in place of --epsilon.")
@click.option("--steps", type=int, help="Of every try.")
@click.option("--batch-size", type=int, help="Expected batch size.")
@click.option("--l2-clip-norm", type=float, help="Where it is not searched.")
@click.option("--optimizer", type=click.Choice(["sgd", "adam"]), help="Where it is not searched.")
@click.option("--learning-rate", type=float, help="Where it is not searched.")
@click.option("--momentum", type=float, help="Where it is not searched.")
@click.option("--learning-rate-schedule", metavar="KIND[:WARMUP]", help="As for jaxdp train.")
@click.option("--average", type=float, metavar="DECAY", help="As for jaxdp train.")
@click.option("--data-dir", type=Filled(), help="Where prepared data sets lie.")
@click.option(
    "--out", type=Filled(), required=True, help="Folder; the same command again continues there."
)
@click.option("--max-trials", hidden=True, callback=_refuse_cap, expose_value=False)
@click.option("--timeout", hidden=True, callback=_refuse_cap, expose_value=False)
@click.option("--json", "as_json", is_flag=True, help="The last line is one JSON object.")
def tune(
    data_file: Path | None,
    classes: int | None,
    dataset_size: int | None,
    dataset: str,
    search: tuple[str, ...],
    tries: str,
    data_dir: Path | None,
    out: Path,
    as_json: bool,
    epsilon: float | None,
    noise_multiplier: float | None,
    **options: Any,
) -> None:
    """Search hyper-parameters privately: a secret number of runs, and only the best is released.

    The whole search is charged before it begins. It says nothing until it ends, for the number of
    tries must stay secret; it cannot be capped. Interrupted, it goes on with the same command.

    \b
      jaxdp tune --search learning_rate=0.03:3 --search l2_clip_norm=0.1:2 --out runs/tuned
    """
    from jaxdp import data
    from jaxdp.runs import space as spaces
    from jaxdp.runs.tries import TuneDirectory
    from jaxdp.runs.tuned import configured, tuned

    papers()
    if epsilon is None and noise_multiplier is None:
        epsilon = 3.0
    law, laws = law_of(tries), dict(spaces.parsed(text) for text in search)
    own = _own_data(data_file, classes, dataset_size)
    config = configured(
        dataset if own is None else own.spec,
        law,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        **options,
    )
    click.echo(
        "tuning: charged as a whole, before its first try. The number of tries is secret, so "
        "nothing is said until the end"
    )
    with explain_failures(TuneDirectory(out)):
        found = tuned(out, config, own or data.load(config.dataset, data_dir), laws, law)
    row = _row(found, out)
    click.echo(json.dumps(row, allow_nan=False) if as_json else _words(found, out))


def law_of(text: str) -> Any:
    """The law of the number of tries that "geometric:0.1" names.

    Raises:
        ValueError: a text of another form, or a number out of its range.
    """
    from jaxdp import accounting as acc

    makers: dict[str, Any] = {
        "geometric": acc.Geometric,
        "logarithmic": acc.Logarithmic,
        "negative_binomial": acc.NegativeBinomial,
        "poisson": acc.PoissonTries,
    }
    name, *numbers = text.split(":")
    try:
        return makers[name](*(float(number) for number in numbers))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "--tries must be geometric:G, logarithmic:G, negative_binomial:ETA:G or poisson:MEAN, "
            f"got {text!r}: {error}"
        ) from error


def _own_data(path: Path | None, classes: int | None, size: int | None) -> Any:
    """The data set in a file; None for a built-in one."""
    from jaxdp import data

    if path is None:
        if classes is not None or size is not None:
            raise click.UsageError("--classes and --dataset-size must come with --data")
        return None
    if classes is None:
        raise click.UsageError("--classes must come with --data: it is not read off the labels")
    return data.from_file(path, classes, size)


def _row(found: "TunedConfig", out: Path) -> dict[str, Any]:
    """The result for ``--json``."""
    return {
        "out": str(out),
        "dataset": found.config.dataset,
        "candidate": found.chosen.candidate,
        "score": found.chosen.score,
        "test_accuracy": found.accuracy,
        "epsilon": found.chosen.bound.upper,
        "delta": found.config.delta,
        "noise_multiplier": found.config.noise_multiplier,
        "steps": found.config.steps,
    }


def _words(found: "TunedConfig", out: Path) -> str:
    """The result in lines for a person."""
    from jaxdp.runs.report.words import show_delta, show_epsilon

    spent = (
        f"proven epsilon {show_epsilon(found.chosen.bound.upper)} at delta "
        f"{show_delta(found.config.delta)} for the whole tuning"
    )
    if found.chosen.candidate is None:
        return f"no try gave a score; {spent}"
    parts = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in found.chosen.candidate.items()
    ]
    return (
        f"chosen: {', '.join(parts)}\n"
        f"accuracy {found.chosen.score:.2%} on the test records that chose, {found.accuracy:.2%} "
        f"on the others\n{spent}\n"
        f"parameters: {out / 'params.msgpack'}\nsecret, not to be published: {out / 'secret'}"
    )
