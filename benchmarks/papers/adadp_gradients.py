"""AdaDp's Figures 4 (c) and (d) as published, on public records.

Un-noised gradients, what it estimates them by, and the noise that follows. The figures show what
training records alone decide. Here those are MNIST's test examples, which are public, trained on
as if they were not: nothing that the figures show is anybody's secret.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import jax
import numpy as np

from benchmarks.papers import adadp_noise
from benchmarks.papers.rows import ROWS
from benchmarks.papers.tables import style
from jaxdp import __version__, data
from jaxdp._extras import needed
from jaxdp.data import models
from jaxdp.ledger import Ledger
from jaxdp.ledger.durable import write_atomically
from jaxdp.ledger.seeds import Secret
from jaxdp.optimizers.adadp import AdaDpState
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.papers.raw_gradient import RawGradient
from jaxdp.runs import assemble
from jaxdp.runs.config import RunConfig
from jaxdp.training.trainer import Trainer, TrainState
from jaxdp.types import LossFn

with needed("benchmarks.papers.adadp_gradients", "papers", "matplotlib"):
    from matplotlib.figure import Figure

FILE = "adadp_gradients.json"
ROW = "mnist-mlp-pca-adadp-as-published-noise-8"
STEPS = (100, 1_000)
# Of log10, for both histograms.
_RANGE, _BINS = (-8.0, 1.0), 54
_KEEP = 0.9  # γ′


class At(TypedDict):
    """The two distributions at a step, and that of the σ_i; see ``compared``."""

    step: int
    gradient: list[int]
    estimate: list[int]
    median_gradient: float
    median_estimate: float
    within_factor_2: float
    zero: float
    correlation_of_logs: float
    noise: adadp_noise.Histogram


def work(results: Path, data_dir: Path | None) -> None:
    """Trains the row of Figure 2 (a) on public records and writes what was found.

    Args:
        results: a JSON file.
        data_dir: where MNIST is.
    """
    # Of its sums of gradients: 128 at once were three times as fast as the row's 16 here.
    config = dataclasses.replace(ROWS[ROW].config(), physical_batch_size=128)
    line = run(config, data.load(config.dataset, data_dir), STEPS)
    write_atomically(results, json.dumps({"row": ROW, **line}) + "\n")


def run(config: RunConfig, dataset: data.Dataset, steps: tuple[int, ...]) -> dict[str, Any]:
    """Histograms of |g_t|, √E′[g²]_{t−1} and σ_i over the coordinates, at each of the named steps.

    |g_t| is the root of the lot's mean squared gradient, which E′ averages.

    No guarantee: un-noised gradients are shown. The records are ``dataset``'s test examples.

    Args:
        config: resolved, of AdaDp as published.
        dataset: whose test examples, assumed public, are trained on.
        steps: rising numbers of steps.
    """
    public = dataclasses.replace(dataset, train_x=dataset.test_x, train_y=dataset.test_y)
    config = dataclasses.replace(config, dataset_size=len(public.train_x))
    secret = Secret.new()
    public, _ = assemble.projected(config, public, secret, None)
    loss, algorithm = (
        models.cross_entropy(assemble.model_of(config)),
        config.private_algorithm(secret),
    )
    trainer = Trainer(
        loss,
        algorithm,
        source=(public.train_x, public.train_y),
        secret=secret,
        ledger=Ledger(),
        physical_batch_size=config.physical_batch_size,
    )
    multiplier = config.noise_multiplier
    assert isinstance(multiplier, float)
    state = trainer.init(assemble.fresh_params(config, secret))
    found = []
    for number, batch in enumerate(trainer.batches(steps[-1]), 1):
        before = _moment(state) if number in steps else None
        state, _ = trainer.step(state, batch)
        if before is not None:
            squared = (_moment(state) - _KEEP * before) / (1 - _KEEP)
            line = {"step": number, **compared(np.maximum(squared, 0.0), before)}
            found.append(
                {**line, "noise": adadp_noise.histogram(_stds(multiplier, algorithm, loss, before))}
            )
    return {
        "at": found,
        "records": len(public.train_x),
        "machine": f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}",
        "jaxdp": __version__,
    }


def _stds(multiplier: float, algorithm: Algorithm, loss: LossFn, moment: np.ndarray) -> np.ndarray:
    """σ_i = σ √m s_i of the sum over a lot, float [m], s_i by the moments before its step."""
    gradient = algorithm.clipped_grad(loss)
    assert isinstance(gradient, RawGradient)
    assert gradient.unscale is not None
    return multiplier * math.sqrt(moment.size) * np.asarray(gradient.unscale(moment))


def _moment(state: TrainState) -> np.ndarray:
    """E′[g²] of every coordinate, float64 [m]."""
    kind = lambda node: isinstance(node, AdaDpState)  # noqa: E731
    (found,) = (x for x in jax.tree.leaves(state.opt_state, is_leaf=kind) if kind(x))
    leaves = jax.tree.leaves(found.moment)
    return np.concatenate([np.ravel(leaf) for leaf in leaves]).astype(np.float64)


def compared(squared: np.ndarray, estimate: np.ndarray) -> dict[str, Any]:
    """Histograms and medians of the roots of two arrays [m], and the correlation of their logs."""
    sizes, roots = np.sqrt(squared), np.sqrt(estimate)
    both = (sizes > 0) & (roots > 0)
    logs = [np.log10(np.maximum(x, 10 ** _RANGE[0])) for x in (sizes, roots)]
    counts = [np.histogram(x, bins=_BINS, range=_RANGE)[0].tolist() for x in logs]
    return {
        "gradient": counts[0],
        "estimate": counts[1],
        "median_gradient": float(np.median(sizes)),
        "median_estimate": float(np.median(roots)),
        "within_factor_2": float(np.mean(np.abs(logs[0] - logs[1])[both] < np.log10(2))),
        "zero": float(np.mean(~both)),
        "correlation_of_logs": float(np.corrcoef(logs[0][both], logs[1][both])[0, 1]),
    }


def figure(kept: Mapping[str, list[At]]) -> tuple[Figure, str]:
    """The two distributions at each step.

    Args:
        kept: what ``work`` wrote.
    """
    made, axes = style.panels(len(kept["at"]), 1, (8.5, 6.4), sharex=True, sharey=True)
    edges, sentences = np.linspace(*_RANGE, _BINS + 1), []
    for panel, at in zip(axes, kept["at"], strict=True):
        panel.stairs(at["gradient"], edges, color=style.BLACK, linewidth=2, label="|g|")
        panel.stairs(
            at["estimate"], edges, color=style.GREEN, linestyle="--", linewidth=2, label="√E′[g²]"
        )
        panel.set_ylabel("coordinates (thousands)")
        panel.yaxis.set_major_formatter(lambda count, _: f"{count / 1_000:g}")
        panel.set_ylim(bottom=0)
        style.title(panel, f"step {at['step']:,}")
        sentences.append(
            f"step {at['step']:,}: medians {at['median_gradient']:.2g} and "
            f"{at['median_estimate']:.2g}, {at['within_factor_2']:.0%} within a factor of 2, "
            f"correlation of the logarithms {at['correlation_of_logs']:.2f}, σ_i under 10, to 20, "
            f"above {', '.join(f'{x:.1f}' for x in adadp_noise.shares(at['noise']))} %"
        )
    ticks = range(-8, 2, 2)
    axes[-1].set_xticks(ticks, ["0 to\n1e-8", *(f"1e{at}" if at else "1" for at in ticks[1:])])
    axes[-1].set_xlabel("size of one coordinate (log scale)")
    axes[0].legend(loc="upper center", fontsize=12)
    return made, "; ".join(sentences)
