"""Records beyond 2^31: positions of 64 bits on the host, rows alone on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Secret
from jaxdp.sampling import FixedSize, FullBatch, Poisson, RandomAllocation, Shuffled, as_source, pad
from jaxdp.types import Draw, positions_for_device, record_keys
from tests.ledger.small import trained
from tests.mechanisms import sgd_of
from tests.refusing import all_refused, refused

HUGE = 10**10
RATE = 500 / HUGE
MECHANISM = sgd_of(1.0, 1.0, 500, HUGE)


class Virtual:
    """An array-like [n] whose record p is p modulo a prime; nothing is stored."""

    dtype = np.dtype(np.float32)

    def __init__(self, n=HUGE):
        self.shape = (n,)

    def __getitem__(self, indices):
        return (np.asarray(indices) % 1_000_003).astype(np.float32)


class Read(Virtual):
    """The same, one record at a time."""

    def __init__(self, n=HUGE):
        self.n = n

    def __len__(self):
        return self.n


def loss_fn(params, x, rng):
    """Its gradient tells the record's own randomness, and the record."""
    return params["a"] * jax.random.uniform(rng) / 2 + params["b"] * x / 2e6


def sampler():
    return MECHANISM.sampler(HUGE, secret=Secret.from_seed(1), physical_batch_size=64)


def zeros():
    return {"a": jnp.zeros(()), "b": jnp.zeros(())}


def test_positions_reach_every_record():
    draws = [sampler().draw() for _ in range(2)]
    np.testing.assert_array_equal(draws[0].indices, draws[1].indices)
    drawn = draws[0].indices[draws[0].mask]
    assert drawn.dtype == np.int64
    assert len(np.unique(drawn)) == len(drawn)
    assert drawn.max() > 2**33
    assert np.median(drawn) > 2**32
    assert 300 < len(drawn) < 700
    assert pad(drawn, 64, 0, 2**31 - 1).indices.dtype == np.int32


def test_records_have_randomness_of_their_own_beyond_32_bits():
    key = jax.random.key(3)
    positions = np.array([[0, 5, 2**31 - 1, 2**32, 5 + 2**32, 5 + 2**33]])
    draw = Draw(positions, np.ones((1, 6), bool), 0, HUGE)
    halves = positions_for_device(draw.indices, draw.num_records, True)
    assert (halves.shape, halves.dtype) == ((1, 6, 2), np.uint32)
    np.testing.assert_array_equal(halves @ np.array([1, 2**32]), positions)
    keys = jax.random.key_data(record_keys(key, jnp.asarray(halves[0])))
    assert len({tuple(words) for words in keys.tolist()}) == 6
    # What records below 2^31 had before stays theirs.
    small = jax.random.key_data(record_keys(key, jnp.asarray(positions[0, :3], jnp.int32)))
    np.testing.assert_array_equal(keys[:3], small)
    one_by_one = [jax.random.key_data(jax.random.fold_in(key, i)) for i in (0, 5, 2**31 - 1)]
    np.testing.assert_array_equal(small, one_by_one)


@pytest.mark.parametrize(("data", "rows"), [(Virtual(), 64), (Virtual(), 1_024), (Read(), 64)])
def test_a_sum_is_that_of_the_records_drawn(data, rows):
    source = as_source(data)
    made = MECHANISM.sampler(HUGE, secret=Secret.from_seed(2), physical_batch_size=rows)
    draw, key = made.draw(), jax.random.key(0)
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(10.0), most_records=2_000)
    summed = grad_fn(zeros(), source, draw, key)
    drawn = draw.indices[draw.mask]
    halves = positions_for_device(drawn, HUGE, True)
    own = record_keys(key, jnp.asarray(halves))
    expected = np.sum(jax.vmap(jax.random.uniform)(own)) / 2
    np.testing.assert_allclose(summed.value["a"], expected, rtol=1e-5)
    np.testing.assert_allclose(summed.value["b"], np.sum(drawn % 1_000_003 / 2e6), rtol=1e-5)


def test_a_trainer_runs_on_more_records_than_32_bits_count():
    options = {"secret": Secret.from_seed(1), "physical_batch_size": 64}
    trainer = jaxdp.Trainer(loss_fn, MECHANISM, optax.sgd(0.1), Virtual(), **options)
    state = trained(trainer, 3, params=zeros())
    assert np.isfinite(float(state.params["b"]))
    assert len(trainer.unverified()) == 1  # the chosen seed
    assert 0 < trainer.epsilon(1e-11).upper < 1


def test_what_lies_on_the_device_is_refused_beyond_32_bits():
    flat, draw = jnp.zeros((2**31, 0)), sampler().draw()
    refused("fewer than 2**31 records, got more: keep them on the", as_source, flat)
    refused("fewer than 2**31", positions_for_device, draw.indices, HUGE, False)
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))
    huge = np.broadcast_to(np.zeros(1, np.float32), HUGE)
    refused("fewer than 2**31", grad_fn, zeros(), huge, draw, jax.random.key(0))
    assert next(draw.batches(huge)).data.shape == (64,)
    # Nor are draws that memory or floating point does not hold, by public numbers.
    words = "dataset_size must be one that can be drawn.*Poisson sampling at a small rate"
    for rule, batch in (
        (RandomAllocation(10), 10**14),
        (Shuffled(10**6), 10**6),
        (FullBatch(), 10**15),
        (FixedSize(10**14), 10**14),
        (Poisson(0.1), 10**14),
    ):
        mechanism = jaxdp.Mechanism(jaxdp.clip(1.0), 1.0, rule, batch, 10**15)
        all_refused([(words, lambda made=mechanism: made.sampler(10**15), f"{rule}")])
    mechanism = jaxdp.Mechanism(jaxdp.clip(1.0), 1.0, Poisson(1e-16), 1, 10**16)
    refused("num_records must be at most 2**53, got more", mechanism.sampler, 10**16)
    refused("at most 2**53 records", as_source, Read(2**53 + 1))
    assert len(as_source(Read(2**53))) == 2**53
