"""AdaDp's Figure 4 (d): the noise of every coordinate, early in training and late.

The σ_i of repaired AdaDp are functions of noisy gradients and public constants: nothing else is
released by showing them. (Those of AdaDp as published follow un-noised gradients:
``benchmarks.papers.adadp_gradients`` shows them of public records.)
"""

import json
import math
import os
from pathlib import Path
from typing import Any, TypedDict

import jax
import numpy as np

from benchmarks.papers.adadp_phase import stds_of_noise_alone
from benchmarks.papers.rows import ROWS
from benchmarks.papers.tables import style
from jaxdp import __version__, data
from jaxdp import accounting as acc
from jaxdp._extras import needed
from jaxdp.data import models
from jaxdp.ledger import Ledger
from jaxdp.ledger.durable import write_atomically
from jaxdp.ledger.seeds import Secret
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.runs import assemble
from jaxdp.runs.config import RunConfig
from jaxdp.training.trainer import Trainer, TrainState

with needed("benchmarks.papers.adadp_noise", "papers", "matplotlib"):
    from matplotlib.figure import Figure

FILE = "adadp_noise.json"
ROW = "mnist-mlp-pca-adadp-noise-8"
STEPS = (100, 1_000)
_BINS = 60
_LOOKS: dict[str, dict[str, Any]] = {
    "trained": {"color": style.GREEN},
    "gradients of zero": {"color": "0.7", "hatch": "//"},
}


class Histogram(TypedDict, total=False):
    """The distribution of the σ_i after a step; see ``histogram``."""

    step: int
    top: float
    counts: list[int]
    quantiles: dict[str, float]
    under_10: float
    from_10_to_20: float


class Kept(TypedDict, total=False):
    """The content of the file that ``work`` writes."""

    row: str
    histograms: list[Histogram]
    noise_multiplier: float
    l2_clip_norm: float
    proven_epsilon: float
    delta: float
    machine: str
    jaxdp: str


def work(results: Path, data_dir: Path | None) -> None:
    """Trains the row of Figure 2 (a) for 1,000 steps and writes its σ_i into ``results``.

    Args:
        results: a JSON file.
        data_dir: where MNIST is.
    """
    config = ROWS[ROW].config()
    line = run(config, data.load(config.dataset, data_dir), Secret.new(), STEPS)
    write_atomically(results, json.dumps({"row": ROW, **line}) + "\n")


def run(config: RunConfig, dataset: data.Dataset, secret: Secret, steps: tuple[int, ...]) -> Kept:
    """The distribution of σ_i after each of the named steps, and epsilon of all until the last.

    The release is everything up to the last of ``steps``: the components of the private analysis
    and its noisy gradients. The σ_i are computed from those.

    Args:
        config: resolved, of an algorithm that clips each coordinate by a scale of its own.
        dataset: as loaded.
        secret: of the run.
        steps: rising numbers of steps.
    """
    algorithm = config.private_algorithm(secret)
    assert algorithm.scale is not None
    assert isinstance(config.noise_multiplier, float)
    dataset, _ = assemble.projected(config, dataset, secret, None)
    trainer = Trainer(
        models.cross_entropy(assemble.model_of(config)),
        algorithm,
        source=(dataset.train_x, dataset.train_y),
        secret=secret,
        ledger=Ledger(),
        physical_batch_size=config.physical_batch_size,
    )
    state = trainer.init(assemble.fresh_params(config, secret))
    found: list[Histogram] = []
    for number, batch in enumerate(trainer.batches(steps[-1]), 1):
        state, _ = trainer.step(state, batch)
        if number in steps:
            found.append({"step": number, **histogram(_stds(config, algorithm, state))})
    return {
        "histograms": found,
        "noise_multiplier": config.noise_multiplier,
        "l2_clip_norm": config.l2_clip_norm,
        "proven_epsilon": acc.epsilon(config.total(steps[-1]), config.delta).upper,
        "delta": config.delta,
        "machine": f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}",
        "jaxdp": __version__,
    }


def _stds(config: RunConfig, algorithm: Algorithm, state: TrainState) -> np.ndarray:
    """σ_i = σ √m s_i of the sum over a lot, float [m]: the paper's, whose mean divides it by L."""
    sides = jax.tree.leaves(algorithm.context(state.opt_state)["scale"])
    flat = np.concatenate([np.ravel(leaf) for leaf in sides])
    assert isinstance(config.noise_multiplier, float)
    return np.asarray(config.noise_multiplier * math.sqrt(flat.size) * flat)


def histogram(stds: np.ndarray) -> Histogram:
    """Counts in equal bins from 0 to the greatest, and quantiles, of positive numbers [m]."""
    top = float(stds.max())
    counts, _ = np.histogram(stds, bins=_BINS, range=(0.0, top))
    shares = (0.05, 0.25, 0.5, 0.75, 0.95)
    return {
        "top": top,
        "counts": counts.tolist(),
        "quantiles": dict(zip(map(str, shares), np.quantile(stds, shares).tolist(), strict=True)),
        "under_10": float(np.mean(stds < 10)),
        "from_10_to_20": float(np.mean((stds >= 10) & (stds < 20))),
    }


def noise_alone(size: int, steps: int, seed: int = 0) -> np.ndarray:
    """σ_i, float [size], after so many steps of the row's algorithm on gradients that are zero.

    Args:
        size: number of parameters.
        steps: their number.
        seed: of the noise.
    """
    return stds_of_noise_alone(ROWS[ROW].config(), size, steps, seed)


def figure(kept: Kept) -> tuple[Figure, str]:
    """The shares of coordinates by σ_i for each step, and the same where all gradients are zero.

    Args:
        kept: what ``work`` wrote.
    """
    drawn, axes = style.panels(len(kept["histograms"]), 1, (8.5, 6.8), sharex=True, sharey=True)
    even, sentences = kept["noise_multiplier"] * kept["l2_clip_norm"], []
    for panel, at in zip(axes, kept["histograms"], strict=True):
        size = sum(at["counts"])
        shown = {"trained": at, "gradients of zero": histogram(noise_alone(size, at["step"]))}
        for i, (name, found) in enumerate(shown.items()):
            bars = panel.bar(
                np.arange(3) + 0.4 * i - 0.2, shares(found), 0.38, **_LOOKS[name], label=name
            )
            panel.bar_label(bars, fmt="%.1f", fontsize=12, padding=2)
        panel.set_xticks(range(3), ["under 10", "10 to 20", f"20 to {even:g}"])
        panel.set_ylabel("coordinates (%)")
        panel.set_ylim(0, 108)
        style.title(panel, f"after {at['step']:,} steps")
        texts = [", ".join(f"{x:.1f}" for x in shares(found)) for found in shown.values()]
        sentences.append(f"{at['step']:,} steps: {texts[0]} % (gradients of zero: {texts[1]} %)")
    axes[-1].set_xlabel("σ_i, noise of a coordinate of the sum")
    axes[0].legend(loc="upper right", fontsize=12)
    return drawn, "under 10, to 20, above, after " + "; ".join(sentences)


def shares(found: Histogram) -> list[float]:
    """Percent of coordinates under 10, from 10 to 20, and from there on."""
    low, middle = 100 * found["under_10"], 100 * found["from_10_to_20"]
    return [low, middle, 100 - low - middle]
