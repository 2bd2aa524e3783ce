"""The trainer's own look at what a loss captured, before anything is charged."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from benchmarks.planted_pipelines import MECHANISM, PARAMS, X, Y, loss_fn


def started(array, data=(X, Y), **options):
    def loss(params, x, y):
        return loss_fn(params, x - array, y)

    trainer = jaxdp.Trainer(loss, MECHANISM, optax.sgd(0.1), data, **options)
    try:
        trainer.init(PARAMS)
        assert not trainer.ledger.entries
    finally:
        trainer.close()


@pytest.mark.parametrize("data", [(X, Y), (jnp.asarray(X), jnp.asarray(Y))], ids=["host", "device"])
def test_a_statistic_of_the_records_is_refused_at_its_line(data):
    words = r"computed from the records, got: .* the records' mean \(checks/test_start.py:\d+\)"
    with pytest.raises(ValueError, match=words):
        started(jnp.asarray(X).mean(0), data)


def test_a_record_is_refused():
    with pytest.raises(ValueError, match="is one of the records"):
        started(X[17].copy())


def test_what_is_declared_public_is_not_looked_at():
    mean = jnp.asarray(X).mean(0)
    started(mean, constants=mean)


@pytest.mark.parametrize("array", [np.full(6, 3.0, np.float32), np.arange(6, dtype=np.float32)])
def test_public_constants_are_left_alone(array):
    started(array)


class Lazy:
    """Records that count how often they are read."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.read += 1
        return X[index], Y[index]


def test_records_that_are_read_one_by_one_are_not_read_for_it():
    lazy = Lazy()
    started(X.mean(0), lazy)
    assert lazy.read <= 1  # the example
