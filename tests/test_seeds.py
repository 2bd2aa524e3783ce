"""Secrets: new ones are hidden, chosen ones are told, and no two uses share words."""

import functools
import operator

import jax
import numpy as np

from jaxdp import Secret
from tests.refusing import refused


def test_a_new_secret_has_128_hidden_bits_and_a_chosen_seed_says_so_as_do_their_children():
    found = [Secret.new().entropy for _ in range(8)]
    # All of the highest eight bits are 0 in all eight: once in 2**64.
    assert functools.reduce(operator.or_, found) >> 120
    assert max(found) < 2**128
    new, chosen = Secret.new(), Secret.from_seed(7)
    assert str(new.entropy) not in repr(new)
    assert f"{new.entropy:x}" not in repr(new)
    for secret, told in ((new, False), (chosen, True)):
        assert secret.reproducible == secret.child("energy").reproducible == told
    for seed in (-1, 1.5, "7", True, 2**128):
        refused("seed must be", Secret.from_seed, seed)


def test_streams_of_one_secret_differ_and_a_key_keeps_64_bits():
    names = ["noise", "sampling", "init", "data hash"]
    names += ["noise of the encoder A", "noise of the encoder B"]
    assert len({Secret.from_seed(7).stream(name) for name in names}) == len(names)
    assert Secret.from_seed(7).stream("noise") == Secret.from_seed(7).stream("noise")
    words = [jax.random.key_data(Secret.from_seed(s).jax_key("noise")) for s in range(200)]
    assert len({int(w) for pair in words for w in pair}) == 400


def test_philox_is_a_function_of_the_position():
    secret = Secret.from_seed(1)
    draws = [secret.philox("sampling", t).integers(0, 2**63, 100) for t in range(50)]
    assert len(np.unique(np.concatenate(draws))) == 5000
    again = secret.philox("sampling", 7).integers(0, 2**63, 100)
    np.testing.assert_array_equal(again, draws[7])
