"""A run of block coordinate descent in a folder: durable ledger, checkpoints, resume, report."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import accounting as acc
from jaxdp import clipping, data
from jaxdp.ledger.seeds import Secret
from jaxdp.mechanism import with_rule
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.papers.block_coordinate.hidden import ChargedWhole, HiddenBlocks
from jaxdp.papers.block_coordinate.network import Network, Weights
from jaxdp.papers.block_coordinate.published import claimed_for
from jaxdp.papers.block_coordinate.released import Charged
from jaxdp.papers.block_coordinate.settings import (
    BlockConfig,
    Blocks,
    check_labels,
    prepared,
    records,
)
from jaxdp.papers.block_coordinate.training import (
    HiddenTrainer,
    SweepTrainer,
    named,
    unnamed,
)
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.report import build, levels, origin
from jaxdp.runs.report.schema import TEST_ACCURACY, Report
from jaxdp.runs.report.subject import Names, Subject, steps_in_words
from jaxdp.runs.report.words import HIDDEN
from jaxdp.runs.run import Parts, Prepared, Progress, Result, Row, Run, Stepper
from jaxdp.runs.starts import Start
from jaxdp.sampling import as_source
from jaxdp.training.trainer import TrainState
from jaxdp.types import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class BlockAlgorithm(Algorithm):
    """Block coordinate descent as an ``Algorithm``: its events, for reports and refusals.

    Its steps are taken by a trainer of its own; ``mechanism`` names the public numbers.

    Attributes:
        blocks: R1, or R2 and R3.
    """

    blocks: Blocks | None = None

    def total(self, steps: int) -> acc.Event:
        """Everything that is released: of so many sweeps of R1, or by a whole hidden run."""
        assert self.blocks is not None
        if isinstance(self.blocks, HiddenBlocks):
            event = self.blocks.event()
            return event if steps == 1 else acc.Repeated(event, steps)
        return self.blocks.events(steps)


def algorithm_of(config: BlockConfig) -> BlockAlgorithm:
    """The algorithm of a resolved configuration."""
    assert config.noise_multiplier is not None
    hidden, made = config.is_hidden, config.blocks()
    mechanism = with_rule(
        clipping.clip(max(made.l2_clip_norms)),
        config.noise_multiplier,
        config.batch_size,
        config.dataset_size,
        "fixed_size" if hidden else "poisson",
    )
    claim = None
    if config.relation == acc.Relation.REPLACE_ONE.value:  # the paper's, and none other
        claim = lambda rate, noise, steps, delta: claimed_for(made, steps, delta)  # noqa: E731
    return BlockAlgorithm(mechanism, optax.identity(), claim=claim, blocks=made)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockSubject(Subject):
    """The public facts of such a run; a hidden one draws no batches: they are fixed."""

    @property
    def sampling(self) -> str:
        """The name of the rule by which records come into batches."""
        blocks = getattr(self.algorithm, "blocks", None)
        return HIDDEN if isinstance(blocks, HiddenBlocks) else super().sampling

    @property
    def epochs(self) -> float:
        """The number of times that a record is used, on average."""
        blocks = getattr(self.algorithm, "blocks", None)
        if isinstance(blocks, HiddenBlocks):
            return float(blocks.inner_epochs * len(blocks.order))
        return super().epochs


def block_run(
    config: BlockConfig,
    directory: RunDirectory,
    dataset: data.Dataset,
    secret: Secret | None,
    progress: Progress,
    set_aside_unreadable: bool = False,
) -> Run:
    """Makes the run of ``jaxdp train --algorithm sbcd``, ``sbcd-hidden`` or ``sbcd-one-layer``.

    Formal guarantee: as for ``jaxdp.Run``. R1 releases every sweep. Of a hidden run nothing is
    shown, evaluated or written outside ``secret/`` before its end: no row, no accuracy, no
    checkpoint that ``jaxdp export`` would take.

    Args:
        config: resolved.
        directory: of the run.
        dataset: the data.
        secret: of a new run; None resumes the one in the directory.
        progress: called after every step.
        set_aside_unreadable: as for ``jaxdp.Run``.
    """
    check_labels(config, dataset)
    is_new, blocks = secret is not None, config.blocks()
    secret = secret or directory.load_state().secret.restored()

    def stepper(start: Start, state: TrainState) -> Stepper:
        data = jax.device_put(records(config, dataset))
        if isinstance(blocks, HiddenBlocks):
            issuer = start.issuer(ChargedWhole(blocks), state.step)
            return HiddenTrainer(blocks, data, start.ledger, issuer, directory.secret / _KEPT)
        issuer = start.issuer(Charged(blocks), state.step)
        return SweepTrainer(blocks, data, start.ledger, issuer)

    def test(params: dict[str, jax.Array]) -> Row:
        x = prepared(config, dataset.test_x)
        return accuracy(config.network, unnamed(params), x, dataset.test_y)

    train = as_source((dataset.train_x, dataset.train_y))
    return Run(
        directory,
        _no_loss,
        algorithm_of(config),
        source=train,
        params=named(blocks.init(secret.jax_key("init"))),
        every=config.eval_every,
        progress=progress,
        secret=secret,
        delta=config.delta,
        relation=acc.Relation(config.relation),
        report=False,
        set_aside_unreadable=set_aside_unreadable,
        _parts=Parts(
            config=config,
            is_new=is_new,
            fingerprint=lambda secret: dataset.fingerprint(secret.stream("data hash")),
            prepare=lambda *_: Prepared(train, test=test if config.spec.test_size else None),
            stepper=stepper,
        ),
    )


def train(run: Run, config: BlockConfig) -> Result:
    """Trains what is left of a run, and removes what a hidden one kept in secret on the way."""
    run.fit(config.steps)
    assert run.result is not None
    (run.directory.secret / _KEPT).unlink(missing_ok=True)
    return run.result


def report_of(
    config: BlockConfig,
    dataset: data.Dataset,
    result: Result,
    ledger: Path,
    date: str,
    command: str | None = None,
) -> Report:
    """The report of a finished run.

    Args:
        config: resolved.
        dataset: the data.
        result: of the run.
        ledger: its file.
        date: on which it began.
        command: that gives the run; None writes one with all public numbers.
    """
    found = build(
        subject_of(config, np.asarray(dataset.test_y), command),
        history=result.history,
        params=result.params,
        ledger=result.ledger,
        reproducible=result.reproducible,
        ledger_file=ledger,
        date=date,
    )
    blocks = config.blocks()
    if found.claim is None or not isinstance(blocks, HiddenBlocks):
        return found
    steps = sum(blocks.chain(block).steps for _, block in blocks.order)
    return dataclasses.replace(found, claim=dataclasses.replace(found.claim, steps=steps))


_KEPT = "blocks.json"


def _no_loss(params: PyTree, example: PyTree) -> jax.Array:
    """Stands where a ``Run`` wants a loss: sweeps have none."""
    del params, example
    return jnp.zeros(())


def accuracy(network: Network, weights: Weights, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """``test_accuracy`` of released weights on public examples, a thousand at a time."""
    predict = _predictor(network)
    found = [np.asarray(predict(weights, x[i : i + 1_000])) for i in range(0, len(x), 1_000)]
    return {"test_accuracy": float(np.mean(np.concatenate(found) == np.asarray(y)))}


@functools.cache
def _predictor(network: Network) -> Any:
    return jax.jit(lambda weights, x: jnp.argmax(network.apply(weights, x), axis=1))


def subject_of(
    config: BlockConfig, test_labels: np.ndarray | None, command: str | None
) -> BlockSubject:
    """The public facts of a resolved configuration; arguments as for ``report_of``."""
    spec, model = config.spec, "convolution" if config.chosen.channels else "mlp"
    model = "logistic" if config.algorithm == "sbcd-one-layer" else model
    return BlockSubject(
        f"{config.algorithm.upper()} on {spec.title}",
        algorithm_of(config),
        config.steps,
        config.delta,
        acc.Relation(config.relation),
        _training(config),
        command or command_of(config),
        TEST_ACCURACY if spec.test_size else None,
        levels.levels(config.dataset, model, spec.num_classes, test_labels),
        names=Names(config.algorithm, config.dataset, model, "relu"),
        config=config.to_dict(),
    )


def _training(config: BlockConfig) -> list[tuple[str, str]]:
    made, chosen = config.blocks(), config.chosen
    widths = "-".join(str(width) for width in made.network.widths)
    first = f", of which the first {made.network.patches}" if made.network.patches else ""
    if isinstance(made, HiddenBlocks):
        said = (
            f"1 release, of {made.inner_epochs:,} passes over the data for each of "
            f"{len(made.order)} trainings of a block; all states between are hidden"
        )
    else:
        epochs = config.steps * config.batch_size / config.dataset_size
        said = steps_in_words(config.steps, epochs) + ", each a sweep over all blocks"
    norms = ", ".join(f"{norm:.4g}" for norm in made.l2_clip_norms)
    return [
        ("Algorithm", config.algorithm),
        ("Optimizer", f"block coordinate descent, step size {config.learning_rate:.4g}"),
        ("Steps", said),
        ("Model", f"ReLU network {widths}{first}, loss {made.network.loss}"),
        ("Blocks", f"clipped each by itself, to {norms}; noise is added to each"),
        ("Settings", ", ".join(f"{k} {v:g}" for k, v in dataclasses.asdict(chosen).items())),
    ]


def command_of(config: BlockConfig) -> str:
    """The command with every public number of a resolved configuration written out."""
    names = ["dataset", "algorithm", "noise_multiplier", "delta", "batch_size", "l2_clip_norm"]
    names += ["learning_rate", "relation", "hidden"] + ([] if config.is_hidden else ["steps"])
    names = [name for name in names if name not in config.unread]
    options: dict[str, Any] = {name.replace("_", "-"): getattr(config, name) for name in names}
    if config.own is not None:
        del options["dataset"]
        options["data"] = f"{config.dataset}.npz"
        options |= {"classes": config.own["num_classes"], "dataset-size": config.dataset_size}
    if config.settings:
        options["set"] = [f"{name}={value}" for name, value in config.settings.items()]
    return origin.command(options)
