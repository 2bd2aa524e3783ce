"""``jaxdp train``."""

import dataclasses
import itertools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxdp._extras import imports_kept
from jaxdp.cli.failures import explain_failures
from jaxdp.cli.options import (
    BLOCK_ALGORITHMS,
    CANARY_KINDS,
    FEATURES,
    RELATIONS,
    STRATEGIES,
    Filled,
    NumberOr,
    papers,
)
from jaxdp.data.specs import SPECS

if TYPE_CHECKING:
    from jaxdp.data import Dataset
    from jaxdp.runs.directory import RunDirectory


@click.command()
@click.option(
    "--dataset",
    type=click.Choice(list(SPECS)),
    default="digits",
    show_default=True,
    help="digits is embedded; the others are prepared by `jaxdp data prepare` or fetched.",
)
@click.option(
    "--data",
    "data_file",
    type=Filled(dir_okay=False),
    help="A .npz file of your own instead: x, y, and perhaps public x_test, y_test.",
)
@click.option("--classes", type=int, help="Number of classes of --data, public.")
@click.option(
    "--dataset-size",
    type=int,
    help="Declared number of records of --data, public [default: that of the file].",
)
@click.option(
    "--recipe",
    "named_recipe",
    type=click.Choice(["usual", "best"]),
    default="usual",
    help="Where options that are not given come from; best says its source, and whether it was "
    "tuned on this data set.",
)
@click.option(
    "--model",
    type=click.Choice(["mnist-cnn", "cifar-cnn", "mlp", "logistic"]),
    help="Network [default: the papers' for the data set].",
)
@click.option(
    "--activation",
    type=click.Choice(["tanh", "relu", "tempered_sigmoid"]),
    help="Of the hidden layers [default: tanh].",
)
@click.option("--algorithm", help="Private one, see `jaxdp algorithms` [default: dp-sgd].")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A further setting of the algorithm, such as temperature=5; may be repeated.",
)
@click.option(
    "--noise-schedule",
    metavar="KIND:NUMBER:EVERY",
    help="How the noise multiplier moves from its first value, such as exponential:0.01:117.",
)
@click.option("--hidden", type=int, help="Width of an MLP's hidden layer [default: 64].")
@click.option(
    "--features",
    type=FEATURES,
    help="Train on fixed features of each image, which cost no privacy, or on those of an encoder "
    "of your own, which is taken as public: package.module:function or file.py:function "
    "[default: none].",
)
@click.option("--whiten-noise-multiplier", type=float, help="Centre and whiten them privately.")
@click.option("--pca-dimensions", type=int, help="Project privately first (DP-PCA).")
@click.option("--pca-noise-multiplier", type=float, help="Noise of that projection.")
@click.option("--epsilon", type=float, help="Budget [default: 3, unless --noise-multiplier].")
@click.option("--delta", type=float, help="Delta of the guarantee [default: 1e-5].")
@click.option("--noise-multiplier", type=float, help="Noise standard deviation / clip norm.")
@click.option(
    "--secure-noise",
    is_flag=True,
    default=None,
    help="Noise on an integer grid from ChaCha20: floating point and generator are then within the "
    "guarantee.",
)
@click.option("--steps", type=int, help="Number of steps (not epochs).")
@click.option("--batch-size", type=int, help="Expected batch size.")
@click.option("--l2-clip-norm", type=float, help="Per-example clipping norm.")
@click.option("--optimizer", type=click.Choice(["sgd", "adam"]), help="[default: sgd]")
@click.option("--learning-rate", type=float, help="Learning rate; with a schedule the greatest.")
@click.option(
    "--learning-rate-schedule",
    metavar="KIND[:WARMUP]",
    help="constant, cosine or linear, after WARMUP rising steps; or to:SHARE:STEPS, falling to a "
    "share of the rate and held [default: constant].",
)
@click.option(
    "--average",
    type=float,
    metavar="DECAY",
    help="Evaluate and release a moving average of the parameters, such as 0.99; costs nothing.",
)
@click.option("--momentum", type=float, help="Momentum of SGD [default: 0.9; 0 for sa-dpsgd].")
@click.option(
    "--sampling",
    metavar="NAME",
    help="How batches are drawn [default: poisson]: poisson, fixed_size, full_batch, allocation, "
    "shuffle (without amplification) or truncated_poisson; cyclic_poisson or fixed_order with "
    "--strategy.",
)
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    help="Correlate the noise over the steps (DP-MF) [default: independent noise]. banded and "
    "identity draw by cyclic_poisson, the others in a fixed_order, under replace_special.",
)
@click.option(
    "--bands",
    type=int,
    help="Of the strategy; of buffered its buffers [default: the best number for the budget].",
)
@click.option("--participations", type=int, help="Steps of an epoch with a record, allocation.")
@click.option("--cap", type=int, help="Largest batch, truncated_poisson [default: mean + 6 sd].")
@click.option(
    "--relation",
    type=click.Choice(RELATIONS),
    help="Which data sets are neighbours [default: add_or_remove_one; replace_special with "
    "fixed_order].",
)
@click.option("--canaries", type=int, help="Candidates of an audit, put in by coins [default: 0].")
@click.option(
    "--canary-kind",
    type=click.Choice(CANARY_KINDS),
    help="One coordinate's gradient, or inputs; see docs/auditing.md [default: gradient].",
)
@click.option("--eval-every", type=int, help="Steps between evaluations [default: steps / 20].")
@click.option(
    "--physical-batch-size",
    type=NumberOr("auto"),
    metavar="N|auto",
    help="Records of one compiled microbatch; auto for as many as the memory holds.",
)
@click.option(
    "--devices",
    type=NumberOr("all"),
    metavar="N|all",
    help="Devices that share the records of every step [default: 1; all in several processes].",
)
@click.option(
    "--distributed",
    metavar="auto|HOST:PORT,PROCESSES,INDEX",
    help="This is one of several processes, started with the same options but their INDEX.",
)
@click.option("--data-dir", type=Filled(), help="Where prepared data sets lie.")
@click.option("--out", type=Filled(), help="Folder of the run [default: runs/N].")
@click.option("--resume", is_flag=True, help="Continue the run in --out from its last checkpoint.")
@click.option(
    "--set-aside-unreadable",
    is_flag=True,
    help="With --resume: move a checkpoint that stays unreadable out of the way, and charge its "
    "steps anew.",
)
@click.option("--seed", type=int, help="For figures only: voids the guarantee for who knows it.")
@click.option("--sensitive", is_flag=True, default=None, help="Also write un-noised statistics.")
@click.option("--dry-run", is_flag=True, help="Say what it would cost, on random data; no run.")
@click.option("--json", "as_json", is_flag=True, help="The last line is one JSON object.")
def train(
    data_file: Path | None,
    classes: int | None,
    dataset_size: int | None,
    data_dir: Path | None,
    out: Path | None,
    resume: bool,
    set_aside_unreadable: bool,
    seed: int | None,
    dry_run: bool,
    as_json: bool,
    devices: int | str | None,
    distributed: str | None,
    named_recipe: str,
    **options: Any,
) -> None:
    """Train a private classifier and report what was proven.

    Give two of --epsilon, --noise-multiplier and --steps; the third follows. With none of them the
    budget is epsilon 3. Example:

    \b
      jaxdp train --dataset mnist --epsilon 3 --delta 1e-5 --batch-size 512 --steps 4700
      jaxdp train --data my.npz --classes 10 --epsilon 3 --delta 1e-6
    """
    # What needs no package is refused before JAX is imported, which takes seconds.
    if set_aside_unreadable and not resume:
        raise click.UsageError(
            "--set-aside-unreadable must come with --resume: a new run has no checkpoint"
        )
    if resume and out is None:
        raise click.UsageError("--out must name the run to resume")
    if resume and seed is not None:
        raise click.UsageError("--seed must not come with --resume: the run keeps its own secret")
    if resume and dry_run:
        raise click.UsageError("--dry-run must not come with --resume: it is for a new run")
    if resume and not Path(out or "", "secret", "run.json").exists():
        raise click.UsageError(f"out must hold a run to resume, got {out}")

    with imports_kept():
        from jaxdp import data
        from jaxdp.cli.devices import join_processes, mesh_of
        from jaxdp.cli.launch import dry, launch
        from jaxdp.devices import processes
        from jaxdp.ledger.seeds import Secret
        from jaxdp.runs import RunConfig, RunDirectory, recipe, resolve

        papers()

    # Processes and devices first: what follows has to be the same in all processes, so process 0
    # alone chooses the folder and the secret.
    join_processes(distributed)
    mesh = mesh_of(devices)
    options["settings"] = parse_settings(options["settings"]) or None
    name = options["dataset"] if data_file is None else data_file.stem
    free = (Path("runs") / f"{name}-{number}" for number in itertools.count(1))
    directory = RunDirectory(
        processes.from_process_0(
            lambda: str(out or next(path for path in free if not path.exists()))
        )
    )
    secret = Secret.of_all_processes(None if seed is None else Secret.from_seed(seed))
    own = _own_data(directory, data_file, classes, dataset_size, resume)
    stored = directory.load_state().config if resume else None
    given = {name: value for name, value in options.items() if _is_given(name)}
    asked = None if resume else _given_options()

    if (stored or options).get("algorithm") in BLOCK_ALGORITHMS:
        from jaxdp.cli.blocks import train_blocks

        params = click.get_current_context().params
        train_blocks(
            directory,
            own,
            options,
            {name: value for name, value in params.items() if _is_given(name)},
            stored,
            None if resume else secret,
            _data_dir(directory, data_dir, resume),
            as_json,
            asked,
            set_aside_unreadable,
        )
        return

    # The configuration: of a new run from the options and the recipe; of one that goes on its own,
    # with what is given now, which the run then compares.
    if named_recipe == "best" and not resume:
        options |= _best(options, own)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        if stored is not None:
            given = {name: value for name, value in given.items() if value is not None}
            config = dataclasses.replace(RunConfig.from_dict(stored), **given)
        elif resume:
            raise ValueError(
                f"--out must be a run of `jaxdp train` to resume, got {directory.path}, whose "
                "model is in a program: run that again"
            )
        elif directory.exists():
            raise ValueError(
                f"--out must be a new folder, got {directory.path}, which holds a run: pass "
                "--resume to continue it"
            )
        else:
            fields = options if own is None else {**options, "dataset": own.spec}
            config = resolve(recipe(**fields))
    of_values = [str(w.message) for w in caught if w.category is UserWarning]
    for warning in [*of_values, *config.warnings()]:
        click.echo(f"jaxdp: warning: {warning}", err=True)

    if dry_run:
        dry(config, as_json)
        return
    with explain_failures(directory):
        launch(
            config,
            directory,
            own or data.load(config.dataset, _data_dir(directory, data_dir, resume)),
            None if resume else secret,
            asked,
            as_json,
            mesh,
            set_aside_unreadable,
        )


def _own_data(
    directory: "RunDirectory",
    path: Path | None,
    classes: int | None,
    size: int | None,
    resume: bool,
) -> Any:
    """The data set in a file, or None for a built-in one; a resumed run remembers which it is."""
    from jaxdp import data

    def read(path: Path, classes: int, size: int | None) -> "Dataset":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            found = data.from_file(path, classes, size)
        for each in caught:
            click.echo(f"jaxdp: warning: {each.message}", err=True)
        return found

    if resume:
        state = directory.load_state()
        config = state.config or {}
        if (own := config.get("own")) is None:
            return None
        kept = path or Path(state.data_file or "")
        return read(kept, own["num_classes"], config["dataset_size"])
    if path is None:
        given = [name for name, value in (("classes", classes), ("dataset-size", size)) if value]
        if given:
            raise click.UsageError(f"--{given[0]} must come with --data")
        return None
    if _is_given("dataset"):
        raise click.UsageError("--data must not come with --dataset: give one of them")
    if classes is None:
        raise click.UsageError(
            "--classes must come with --data: the number of classes is public, and is not read off "
            "the private labels"
        )
    directory.remembered["data_file"] = str(path.expanduser().absolute())
    found = read(path, classes, size)
    if size is None:
        click.echo(
            f"jaxdp: warning: the number of records, {found.spec.dataset_size:,}, is taken from "
            "the file and will be published; --dataset-size declares a public one instead",
            err=True,
        )
    return found


def _is_given(name: str) -> bool:
    """True if an option, by its parameter's name, was given on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return getattr(source, "name", "") == "COMMANDLINE"


def _data_dir(directory: "RunDirectory", given: Path | None, resume: bool) -> Path | None:
    """The folder of the data; a resumed run remembers it."""
    if given is None and resume:
        kept = directory.load_state().data_dir
        return Path(kept) if kept else None
    if given is None:
        return None
    directory.remembered["data_dir"] = str(given.expanduser().absolute())
    return given


def parse_settings(given: tuple[str, ...]) -> dict[str, float | int]:
    """NAME=VALUE pairs as numbers."""
    found: dict[str, float | int] = {}
    for text in given:
        name, sign, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            sign = ""
        if not sign or name in found:
            wanted = f"name {name} once" if sign else "be NAME=VALUE with a number"
            raise ValueError(f"--set must {wanted}, got {text!r}")
        found[name] = int(number) if value.lstrip("+-").isdigit() else number
    return found


def _given_options() -> dict[str, Any]:
    """The options that were given on the command line, by their names there."""
    context = click.get_current_context()
    return {
        option.opts[0].removeprefix("--"): context.params[option.name]
        for option in context.command.params
        if option.name is not None and _is_given(option.name)
    }


def _best(options: dict[str, Any], own: "Dataset | None") -> dict[str, Any]:
    """The best recipe's fields where none were given; says where they come from.

    Raises:
        ValueError: options that make another model of it.
    """
    from jaxdp.runs.recipes import best

    fields, origin = best(options["dataset"] if own is None else own.spec)
    for name in ("model", "features", "algorithm", "learning_rate", "batch_size", "l2_clip_norm"):
        if options.get(name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} must not come with --recipe best, which has its own; "
                f"got {options[name]}"
            )
    for line in origin.lines():
        click.echo(line)
    return fields
