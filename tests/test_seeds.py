"""Secrets: new ones are hidden, chosen ones are told, and no two uses share words."""

import functools
import operator
import subprocess
import sys

import jax
import numpy as np

from jaxdp import Secret
from tests.refusing import refused


def test_a_new_secret_is_hidden_and_a_chosen_seed_says_so():
    a, b = Secret.new(), Secret.new()
    assert a.entropy != b.entropy
    assert not a.reproducible
    assert str(a.entropy) not in repr(a)
    assert f"{a.entropy:x}" not in repr(a)
    assert Secret.from_seed(7).reproducible
    for seed in (-1, 1.5, "7", True, 2**128):
        refused("seed must be", Secret.from_seed, seed)


def test_streams_of_one_secret_differ():
    secret = Secret.from_seed(7)
    names = ["noise", "sampling", "init", "data hash"]
    names += ["noise of the encoder A", "noise of the encoder B"]
    assert len({secret.stream(name) for name in names}) == len(names)
    assert Secret.from_seed(7).stream("noise") == secret.stream("noise")


def test_key_keeps_64_bits():
    words = [jax.random.key_data(Secret.from_seed(s).jax_key("noise")) for s in range(200)]
    assert len({int(w) for pair in words for w in pair}) == 400


def test_philox_is_a_function_of_the_position():
    secret = Secret.from_seed(1)
    draws = [secret.philox("sampling", t).integers(0, 2**63, 100) for t in range(50)]
    assert len(np.unique(np.concatenate(draws))) == 5000
    again = secret.philox("sampling", 7).integers(0, 2**63, 100)
    np.testing.assert_array_equal(again, draws[7])


def test_a_ledger_name_of_a_chosen_seed_cannot_be_searched_for():
    code = "from jaxdp import Secret; print(Secret.from_seed(5).identifier())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Secret.from_seed(5).identifier() == Secret.from_seed(5).identifier()
    assert other.stdout.strip() != Secret.from_seed(5).identifier()
    assert Secret.new().identifier() != Secret.new().identifier()


def test_a_new_secret_has_128_bits_and_a_child_the_label_of_its_parent():
    found = [Secret.new().entropy for _ in range(8)]
    # All of the highest eight bits are 0 in all eight: once in 2**64.
    assert functools.reduce(operator.or_, found) >> 120
    assert max(found) < 2**128
    assert Secret.from_seed(1).child("energy").reproducible
    assert not Secret.new().child("energy").reproducible
