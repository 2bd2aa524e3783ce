"""Estimates how long a run would take, from a few steps on random data."""

import dataclasses
import statistics
import time

import jax
import numpy as np

from jaxdp import data
from jaxdp.ledger import Ledger
from jaxdp.ledger.seeds import Secret
from jaxdp.mechanism import Mechanism
from jaxdp.runs import assemble
from jaxdp.runs.config import RunConfig
from jaxdp.sampling import Sampler
from jaxdp.training.trainer import Trainer

_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Times:
    """The times that were measured.

    Attributes:
        compile: seconds of the first step, which compiles.
        step: seconds of a step, the median of a few.
        grid: the integer grid of the noise in words; None for ordinary noise.
    """

    compile: float
    step: float
    grid: str | None = None


def rehearse(config: RunConfig) -> Times:
    """Times steps of a resolved configuration; no record is read, nothing is charged or written."""
    config = dataclasses.replace(config, canaries=0)  # they come with the real data
    dataset, secret, ledger = _random(config), Secret.new(), Ledger()
    train = jax.device_put((dataset.train_x, dataset.train_y))
    loss_fn = assemble.loss_of(config)

    def sampler(mechanism: Mechanism, num_records: int, rows: int) -> Sampler:
        return mechanism.sampler(num_records, ledger=ledger, physical_batch_size=rows)

    algorithm = config.private_algorithm(secret)
    trainer = Trainer(
        loss_fn,
        algorithm,
        source=train,
        ledger=ledger,
        energy=assemble.energy_of(
            config, (loss_fn, assemble.test_split(config, dataset)[0]), (loss_fn, train), sampler
        ),
        physical_batch_size=config.physical_batch_size,
    )
    state, times = trainer.init(assemble.fresh_params(config, secret)), []
    began = time.perf_counter()
    limit = 1 + _STEPS if config.strategy is None else config.steps  # a strategy ends there
    for batch in trainer.batches(min(1 + _STEPS, limit or 1)):
        state, _ = trainer.step(state, batch)
        jax.block_until_ready(state.params)
        now = time.perf_counter()
        times.append(now - began)
        began = now
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    grid = algorithm.mechanism.noise_description(count) or None
    return Times(times[0], statistics.median(times[1:] or times), grid)


def _random(config: RunConfig) -> data.Dataset:
    spec, rng = config.spec, np.random.default_rng(0)

    def records(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.random((count, *config.example_shape()), np.float32)
        return x, rng.integers(0, spec.num_classes, count).astype(np.int32)

    return data.Dataset(spec, *records(config.dataset_size), *records(spec.test_size))
