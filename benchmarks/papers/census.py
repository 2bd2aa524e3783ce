"""Unemployment from the census columns of PUMS: private runs beside the same without privacy.

What is measured is measured on test records, which are assumed public, group by group.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.papers import queue
from jaxdp import __version__, clipping, data
from jaxdp._extras import needed
from jaxdp.data import models
from jaxdp.data.sources import PUMS_COLUMNS
from jaxdp.ledger import Ledger
from jaxdp.ledger.seeds import Secret
from jaxdp.mechanism import with_rule
from jaxdp.optimizers import sgd
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.runs import assemble
from jaxdp.runs.config import RunConfig, resolve
from jaxdp.runs.recipes import recipe
from jaxdp.training.trainer import Trainer

with needed("benchmarks.papers.census", "papers", "sklearn"):
    from sklearn.metrics import roc_auc_score

BINS = 10
# The two logits' gradient is (p - y) times the ten inputs: no longer than sqrt(2 * 10) = 4.47.
_CLIPPING = {"logistic": 4.5, "mlp": 6.0}
# With `blackfemale` there are eleven: sqrt(2 * 11) = 4.69.
_CLIPPING_OF_ELEVEN = 4.7
_RATE = 0.1
# The recipe's: clipping that nearly every gradient feels, and rates that make up for it.
_TIGHT, _TIGHT_RATES = 0.5, {"logistic": 1.0, "mlp": 3.0}
# Never reached: what is not private is not clipped.
_NO_CLIPPING = 1e6


@dataclasses.dataclass(frozen=True)
class CensusRow:
    """One run on the census columns.

    Attributes:
        model: "logistic" or "mlp".
        epsilon: the proven budget; None trains without noise and clipping, hence without privacy.
        tight: whether gradients are clipped to 0.5, as in the recipe of ``jaxdp train``.
        blackfemale: whether the slides' last column is a feature, the product of two that are.
    """

    model: str
    epsilon: float | None
    tight: bool = False
    blackfemale: bool = False

    @property
    def name(self) -> str:
        """As in the file of results."""
        budget = "not-private" if self.epsilon is None else f"epsilon-{self.epsilon:g}"
        feature = "-blackfemale" if self.blackfemale else ""
        return f"pums-{self.model}{feature}-{budget}" + ("-tight" if self.tight else "")

    def config(self) -> RunConfig:
        """The resolved configuration; of what is not private, the one of epsilon 3."""
        return resolve(
            recipe(
                "pums",
                model=self.model,
                epsilon=self.epsilon or 3.0,
                physical_batch_size=1_152,
                learning_rate=_TIGHT_RATES[self.model] if self.tight else _RATE,
                l2_clip_norm=self._clipping(),
            )
        )

    def _clipping(self) -> float:
        if self.tight:
            return _TIGHT
        return _CLIPPING_OF_ELEVEN if self.blackfemale else _CLIPPING[self.model]

    def features(self, x: np.ndarray) -> np.ndarray:
        """The inputs of the model, [n, 9] or [n, 10], each -1 or 1, of the columns x [n, 9]."""
        return with_blackfemale(x) if self.blackfemale else x


_EPSILONS = (0.5, 1.0, 3.0, None)
ROWS = {
    row.name: row
    for row in (
        *(
            row
            for model in _CLIPPING
            for row in (
                *(CensusRow(model, epsilon) for epsilon in _EPSILONS),
                CensusRow(model, 1.0, tight=True),
            )
        ),
        *(CensusRow("logistic", epsilon, blackfemale=True) for epsilon in _EPSILONS),
    )
}


def work(
    results: Path, folder: Path, data_dir: Path | None, runs: int, shown: Callable[[int], None]
) -> None:
    """Runs every row ``runs`` times, but those that ``results`` has; shows how many are done."""
    dataset = data.load("pums", data_dir)
    queue.work_through(
        ROWS,
        folder,
        results,
        lambda row, _: run(row, dataset, Secret.new()),
        runs,
        indent=None,
        shown=shown,
    )


def run(row: CensusRow, dataset: data.Dataset, secret: Secret) -> dict[str, Any]:
    """Trains once and measures on the test records; a line of the results.

    A private run satisfies the (``epsilon``, 1e-5) of its line under add-or-remove-one with Poisson
    sampling, for what it releases: its last parameters.
    """
    config, ledger = row.config(), Ledger()
    assert config.steps is not None
    algorithm = config.private_algorithm(secret) if row.epsilon else _not_private(config)
    model = assemble.model_of(config)
    train_x, test_x = row.features(dataset.train_x), row.features(dataset.test_x)
    trainer = Trainer(
        models.cross_entropy(model),
        algorithm,
        source=(train_x, dataset.train_y),
        secret=secret,
        ledger=ledger,
        physical_batch_size=config.physical_batch_size,
    )
    state = trainer.init(models.init(model, secret.jax_key("init"), train_x.shape[1:]))
    began = time.perf_counter()
    for batch in trainer.batches(config.steps):
        state, _ = trainer.step(state, batch)
    jax.block_until_ready(state.params)
    seconds = time.perf_counter() - began
    logits = model.apply(state.params, jnp.asarray(test_x))
    chance = np.asarray(jax.nn.softmax(jnp.asarray(logits))[:, 1], np.float64)
    return {
        "name": row.name,
        "dataset": "pums",
        "model": row.model,
        "algorithm": config.algorithm if row.epsilon else "sgd",
        **measure(chance, dataset.test_x, dataset.test_y),
        "proven_epsilon": ledger.epsilon(config.delta).upper if row.epsilon else "inf",
        "delta": config.delta,
        "claimed_epsilon": None,
        "private": row.epsilon is not None,
        "l2_clip_norm": config.l2_clip_norm if row.epsilon else None,
        "noise_multiplier": algorithm.mechanism.noise_multiplier,
        "steps": config.steps,
        "learning_rate": config.learning_rate,
        "batch_size": config.batch_size,
        "seconds": round(seconds, 2),
        "steps_timed": config.steps,
        "machine": f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}",
        "jaxdp": __version__,
    }


def with_blackfemale(x: np.ndarray) -> np.ndarray:
    """The columns of ``PUMS_COLUMNS`` [n, 9] and one more, 1 for Black women and -1 for others.

    A logistic regression cannot form it: it is a product of two columns.
    """
    both = (x[:, PUMS_COLUMNS.index("black")] > 0) & (x[:, PUMS_COLUMNS.index("sex")] > 0)
    return np.concatenate([x, np.where(both, 1, -1).astype(x.dtype)[:, None]], axis=1)


def _not_private(config: RunConfig) -> Algorithm:
    """The same draws and steps, without noise and without clipping."""
    mechanism = with_rule(
        clipping.clip(_NO_CLIPPING), 0.0, config.batch_size, config.dataset_size, config.sampling
    )
    return sgd(mechanism, config.learning_rate, config.momentum)


def measure(chance: np.ndarray, x: np.ndarray, label: np.ndarray) -> dict[str, Any]:
    """Accuracy, AUC, calibration and errors by group.

    Args:
        chance: float64 [n], the predicted probability of unemployment.
        x: [n, 9], the columns of ``PUMS_COLUMNS``, above 0 where they hold.
        label: int [n], 1 where unemployed.
    """
    wrong = (chance >= 0.5) != (label == 1)
    bins = reliability(chance, label)
    return {
        "test_accuracy": float(1 - wrong.mean()),
        "auc": float(roc_auc_score(label, chance)),
        "calibration_error": calibration_error(bins),
        "reliability": bins,
        "groups": [
            {
                "group": name,
                "size": int(member.sum()),
                "unemployed": int((label[member] == 1).sum()),
                "errors": int(wrong[member].sum()),
                "missed": int((wrong & (label == 1))[member].sum()),
            }
            for name, member in groups(x).items()
        ],
    }


def reliability(chance: np.ndarray, label: np.ndarray, bins: int = BINS) -> list[dict[str, Any]]:
    """Equal bins of the predicted probability that hold anyone: size, mean prediction, share found.

    The calibration curve of scikit-learn leaves out how many a bin holds.
    """
    place = np.minimum((chance * bins).astype(int), bins - 1)
    return [
        {
            "size": int((place == i).sum()),
            "predicted": float(chance[place == i].mean()),
            "found": float(label[place == i].mean()),
        }
        for i in range(bins)
        if (place == i).any()
    ]


def calibration_error(bins: list[dict[str, float]]) -> float:
    """Expected calibration error: mean |share found − mean prediction| over bins, by their sizes.

    Naeini, Cooper and Hauskrecht 2015, "Obtaining well calibrated probabilities using Bayesian
    binning" (AAAI 29), Measures.
    """
    total = sum(row["size"] for row in bins)
    errors = (row["size"] * abs(row["found"] - row["predicted"]) for row in bins)
    return float(sum(errors) / total)


def groups(x: np.ndarray) -> dict[str, np.ndarray]:
    """Membership in each group: bool [n] by name.

    The columns call nobody by name: sex 1 is women (4 % did military service, of sex 0 23 %). A few
    people are both Black and Asian; they count in both groups.
    """
    column = {name: x[:, i] > 0 for i, name in enumerate(PUMS_COLUMNS)}
    women, black, asian = column["sex"], column["black"], column["asian"]
    race = {"Black": black, "Asian": asian, "neither": ~black & ~asian}
    return {
        "all": np.ones(len(x), bool),
        "men": ~women,
        "women": women,
        **race,
        **{
            f"{name}, {who}": member & (women if who == "women" else ~women)
            for name, member in race.items()
            for who in ("men", "women")
        },
    }
