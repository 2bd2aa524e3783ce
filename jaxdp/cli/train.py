"""``jaxdp train``."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from jaxdp.cli.progress import progress_bar
from jaxdp.data.specs import SPECS

_RELATIONS = ("add_or_remove_one", "replace_one", "replace_special")


@click.command()
@click.option(
    "--dataset", type=click.Choice(list(SPECS)), default="digits", show_default=True,
    help="digits is embedded; the others are prepared by `jaxdp data prepare` or fetched.",
)
@click.option(
    "--model", type=click.Choice(["mnist-cnn", "cifar-cnn", "mlp", "logistic"]),
    help="Network [default: the papers' for the data set].",
)
@click.option(
    "--activation", type=click.Choice(["tanh", "relu", "tempered_sigmoid"]),
    help="Of the hidden layers [default: tanh].",
)
@click.option(
    "--method", help="Private method, see `jaxdp methods` [default: dp-sgd].",
)
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE",
    help="A further setting of the method, such as temperature=5; may be repeated.",
)
@click.option(
    "--noise-schedule", metavar="KIND:NUMBER:EVERY",
    help="How the noise multiplier moves from its first value, such as exponential:0.01:117.",
)
@click.option("--hidden", type=int, help="Width of an MLP's hidden layer [default: 64].")
@click.option("--pca-dimensions", type=int, help="Project privately first (DP-PCA).")
@click.option("--pca-noise-multiplier", type=float, help="Noise of that projection.")
@click.option("--epsilon", type=float, help="Budget [default: 3, unless --noise-multiplier].")
@click.option("--delta", type=float, help="Delta of the guarantee [default: 1e-5].")
@click.option("--noise-multiplier", type=float, help="Noise standard deviation / clip norm.")
@click.option("--steps", type=int, help="Number of steps (not epochs).")
@click.option("--batch-size", type=int, help="Expected batch size.")
@click.option("--l2-clip-norm", type=float, help="Per-example clipping norm.")
@click.option("--optimizer", type=click.Choice(["sgd", "adam"]), help="[default: sgd]")
@click.option("--learning-rate", type=float, help="Constant learning rate.")
@click.option("--momentum", type=float, help="Momentum of SGD [default: 0.9].")
@click.option(
    "--sampling", type=click.Choice(["poisson", "fixed_size", "full_batch"]),
    help="How batches are drawn [default: poisson].",
)
@click.option(
    "--relation", type=click.Choice(_RELATIONS),
    help="Which data sets are neighbours [default: add_or_remove_one].",
)
@click.option(
    "--canaries", type=int,
    help="Candidates of an audit: each is a record more with probability 1/2 [default: 0].",
)
@click.option("--eval-every", type=int, help="Steps between evaluations [default: steps / 20].")
@click.option("--physical-batch-size", type=int, help="Rows of one compiled pass.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where prepared data sets lie.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the run [default: runs/N].")
@click.option("--resume", is_flag=True, help="Continue the run in --out from its last checkpoint.")
@click.option("--fork", is_flag=True, help="With --resume: go on although data or machine changed.")
@click.option("--seed", type=int, help="For figures only: voids the guarantee for who knows it.")
@click.option("--sensitive", is_flag=True, default=None, help="Also write un-noised statistics.")
def train(
    data_dir: Path | None, out: Path | None, resume: bool, fork: bool, seed: int | None,
    **options: Any,
) -> None:
    """Train a private classifier and report what was proven.

    Give two of --epsilon, --noise-multiplier and --steps; the third follows. With none of them the
    budget is epsilon 3. Example:

    \b
      jaxdp train --dataset mnist --epsilon 3 --delta 1e-5 --batch-size 512 --steps 4700
    """
    from jaxdp.runs import RunDirectory
    from jaxdp.seeds import Secret

    if (resume or fork) and out is None:
        raise click.UsageError("--out must name the run to resume")
    if fork and not resume:
        raise click.UsageError("--fork must come with --resume")
    if resume and seed is not None:
        raise click.UsageError("--seed must not come with --resume: the run keeps its own secret")
    options["settings"] = parse_settings(options["settings"]) or None
    directory = RunDirectory(out or _free_folder(options["dataset"]))
    secret = Secret.new() if seed is None else Secret.from_seed(seed)
    config = (_stored_config if resume else _new_config)(directory, options)
    _run(config, directory, data_dir, secret, resume, fork)


def parse_settings(given: tuple[str, ...]) -> dict[str, float | int]:
    """NAME=VALUE pairs as numbers."""
    found: dict[str, float | int] = {}
    for text in given:
        name, sign, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            sign = ""
        if not sign:
            raise ValueError(f"--set must be NAME=VALUE with a number, got {text!r}")
        found[name] = int(number) if value.lstrip("+-").isdigit() else number
    return found


def _run(config: Any, directory: Any, data_dir: Path | None, secret: Any, again: bool, fork: bool
         ) -> None:
    from jaxdp import data, runs
    from jaxdp._durable import write_atomically
    from jaxdp.report import build, save_plots, to_html, to_markdown

    dataset = data.load(config.dataset, data_dir)
    with progress_bar(config) as progress:
        if again:
            result = runs.resume(config, directory, dataset, progress, fork=fork)
        else:
            result = runs.start(config, directory, dataset, secret, progress)
    report = build(result)
    write_atomically(directory.path / "report.json", json.dumps(report, indent=1))
    write_atomically(directory.path / "report.md", to_markdown(report))
    save_plots(report, directory.path)
    write_atomically(directory.path / "report.html", to_html(report, directory.path))
    _print_summary(report, directory)


def _new_config(directory: Any, options: dict[str, Any]) -> Any:
    from jaxdp.runs import recipe, resolve

    if directory.exists():
        raise ValueError(
            f"--out must be a new folder, got {directory.path}, which holds a run: pass --resume "
            "to continue it"
        )
    return resolve(recipe(**options))


def _stored_config(directory: Any, options: dict[str, Any]) -> Any:
    """The run's own configuration, which the options given now must not contradict."""
    from jaxdp.runs import RunConfig

    stored = RunConfig(**directory.load_state()["config"])
    source = click.get_current_context().get_parameter_source
    given = {
        name: value for name, value in options.items()
        if value is not None and getattr(source(name), "name", "") == "COMMANDLINE"
    }
    return dataclasses.replace(stored, **given)


def _free_folder(dataset: str) -> Path:
    number = 1
    while (folder := Path("runs") / f"{dataset}-{number}").exists():
        number += 1
    return folder


def _print_summary(report: dict[str, Any], directory: Any) -> None:
    from jaxdp.report.words import show_delta, show_epsilon

    guarantee = report["guarantee"]
    click.echo(
        f"test accuracy {report['test_accuracy']:.2%}   proven epsilon "
        f"{show_epsilon(guarantee['epsilon'])} at delta {show_delta(guarantee['delta'])} "
        f"({guarantee['relation']}, {guarantee['sampling']} sampling, "
        f"{guarantee['releases']:,} releases)"
    )
    if report["claim"]:
        claim = report["claim"]
        click.echo(f"claimed by the paper: epsilon {show_epsilon(claim['epsilon'])}, "
                   f"{claim['verdict']}")
    if report["counts"]:
        counts = report["counts"]
        click.echo(f"{counts['proposals']:,} candidates charged, {counts['accepted']:,} accepted, "
                   f"{counts['forced']:,} of them by force")
    if report["judged_by"]:
        click.echo(report["judged_by"])
    if report["label"]:
        click.echo(report["label"])
    click.echo(f"report: {directory.path / 'report.md'}")
    click.echo(f"secret, not to be published: {directory.secret}")
