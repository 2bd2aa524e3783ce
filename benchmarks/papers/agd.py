"""AGD (Lee and Kifer 2018, arXiv:1808.09501), which AdaDp's Figure 2 compares with, in lots.

A step takes a noisy gradient, then asks privately which of 20 step sizes along it, or none, has the
least loss. None: the direction is too noisy; it is averaged with another noisy gradient, and all
later ones get a larger budget. What AdaDp's paper leaves open is taken from the authors' program
(github.com/ppmlguy/DP-AGD at 025dde9), and named here.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.papers import queue, rows
from benchmarks.papers.agd_releases import Asked, moved
from benchmarks.papers.rows import MLP_SETTINGS
from jaxdp import __version__, data
from jaxdp import accounting as acc
from jaxdp.ledger.seeds import Secret
from jaxdp.runs import assemble
from jaxdp.runs.config import RunConfig
from jaxdp.types import PyTree

FILE = "agd.json"
# Of the authors' program: the number of step sizes, the largest, and how it follows those that were
# chosen in so many steps.
SIZES, LARGEST, GROWTH, EVERY = 20, 2.0, 1.1, 10
# The epsilon of a choice, before sampling, times the first noise multiplier. Equal: both releases
# have one rho at first. The program: the gradient's noise is classical for the choice's epsilon.
SPLITS = {"equal": 1.0, "program": math.sqrt(2 * math.log(1.25 / 1e-5))}
SHOWN_EVERY = 10  # steps
_ORDERS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


@dataclasses.dataclass(frozen=True)
class AgdRow:
    """One run of AGD.

    Attributes:
        noise: the first noise multiplier, one of AdaDp's three.
        split: of ``SPLITS``.
    """

    noise: float
    split: str

    @property
    def name(self) -> str:
        """As in the file of results."""
        return f"mnist-mlp-pca-agd-{self.split}-noise-{self.noise:g}"

    @property
    def beside(self) -> str:
        """The row of DP-SGD whose setting and proven epsilon it gets."""
        return f"mnist-mlp-pca-dp-sgd-noise-{self.noise:g}"


ROWS = {
    row.name: row
    for row in (AgdRow(noise, split) for noise, *_ in MLP_SETTINGS for split in SPLITS)
}


def work(
    results: Path, folder: Path, data_dir: Path | None, runs: int, shown: Callable[[int], None]
) -> None:
    """Runs every row ``runs`` times, but those that ``results`` has; shows how many are done."""

    def one(row: AgdRow, _: int) -> dict[str, Any]:
        config = rows.ROWS[row.beside].config()
        line = run(config, data.load(config.dataset, data_dir), SPLITS[row.split], Secret.new())
        return {"name": row.name, **line}

    queue.work_through(ROWS, folder, results, one, runs, shown=shown)


def run(config: RunConfig, dataset: data.Dataset, share: float, secret: Secret) -> dict[str, Any]:
    """One run within the epsilon that DP-SGD proves for ``config``; accuracies by steps.

    Args:
        config: resolved, of DP-SGD after DP-PCA; its noise multiplier is the first.
        dataset: as loaded.
        share: epsilon of a choice, before sampling, times the first noise multiplier.
        secret: of the run.
    """
    assert config.steps is not None
    assert isinstance(config.noise_multiplier, float)
    assert config.pca_noise_multiplier is not None
    epsilon = acc.epsilon(config.total(config.steps), config.delta).upper
    budget = acc.RenyiFilter(epsilon, config.delta, orders=_ORDERS)
    budget.charge(acc.Gaussian(config.pca_noise_multiplier))
    dataset, _ = assemble.projected(config, dataset, secret, None)
    asked = Asked(config, (dataset.train_x, dataset.train_y), share, secret, budget)
    evaluate = assemble.evaluator(assemble.model_of(config), dataset.test_x, dataset.test_y)
    steps = _steps(asked, assemble.fresh_params(config, secret), config.steps)
    step, curve = 0, []
    for step, params in enumerate(steps):
        if step % SHOWN_EVERY == 0:
            curve.append([step, evaluate(params)["test_accuracy"]])
    if curve[-1][0] != step:
        curve.append([step, evaluate(params)["test_accuracy"]])
    return {
        "test_accuracy": curve[-1][1],
        "curve": curve,
        "steps": step,
        "directions_refused": asked.refused,
        "last_noise_multiplier": asked.multiplier,
        "releases": asked.releases.made,
        "proven_epsilon": epsilon,
        "delta": config.delta,
        "machine": f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}",
        "jaxdp": __version__,
    }


def _steps(asked: Asked, params: PyTree, most: int) -> Iterator[PyTree]:
    """The parameters at first and after every step, while the budget has room for another."""
    largest = LARGEST
    chosen: list[float] = []
    yield params
    for done in range(1, most + 1):
        sizes = np.linspace(0.0, largest, SIZES + 1, dtype=np.float32)
        direction, best = _chosen(asked, params, sizes)
        if not best:
            return
        params = moved(params, direction, sizes[best])
        yield params
        chosen.append(float(sizes[best]))
        if done % EVERY == 0:
            largest, chosen = min(GROWTH * max(chosen), LARGEST), []


def _chosen(asked: Asked, params: PyTree, sizes: np.ndarray) -> tuple[PyTree, int | None]:
    """A direction along which some step was chosen, and its place among the sizes; else None."""
    direction = asked.direction(params)
    while direction is not None:
        best = asked.best(params, direction, sizes)
        if best != 0:
            return direction, best
        direction = asked.improved(params)
    return None, None
