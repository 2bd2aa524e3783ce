import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxdp import Secret


def test_a_new_secret_is_new_and_hidden():
    a, b = Secret.new(), Secret.new()
    assert a.entropy != b.entropy
    assert not a.reproducible
    assert str(a.entropy) not in repr(a)
    assert f"{a.entropy:x}" not in repr(a)


def test_seed_is_reproducible_and_says_so():
    assert Secret.from_seed(7).reproducible
    assert Secret.from_seed(7).stream("noise") == Secret.from_seed(7).stream("noise")


def test_streams_of_one_secret_differ():
    secret = Secret.from_seed(7)
    names = [
        "noise",
        "sampling",
        "init",
        "data hash",
        "noise of the encoder A",
        "noise of the encoder B",
    ]
    assert len({secret.stream(name) for name in names}) == len(names)


def test_key_keeps_64_bits():
    words = [jax.random.key_data(Secret.from_seed(s).jax_key("noise")) for s in range(200)]
    assert len({int(w[0]) for w in words}) == 200
    assert len({int(w[1]) for w in words}) == 200
    assert len({int(w) for pair in words for w in pair}) == 400


def test_philox_is_a_function_of_the_position():
    secret = Secret.from_seed(1)
    draws = [secret.philox("sampling", t).integers(0, 2**63, 100) for t in range(50)]
    assert len(np.unique(np.concatenate(draws))) == 5000
    again = secret.philox("sampling", 7).integers(0, 2**63, 100)
    np.testing.assert_array_equal(again, draws[7])


def test_bad_seed(subtests):
    for seed in (-1, 1.5, "7", True, 2**128):
        with subtests.test(seed=seed), pytest.raises(ValueError, match="seed must be"):
            Secret.from_seed(seed)


def test_a_ledger_name_of_a_chosen_seed_cannot_be_searched_for():
    code = "from jaxdp import Secret; print(Secret.from_seed(5).identifier())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Secret.from_seed(5).identifier() == Secret.from_seed(5).identifier()
    assert other.stdout.strip() != Secret.from_seed(5).identifier()
    secret = Secret.new()
    assert secret.identifier() != Secret.new().identifier()


def test_a_new_secret_has_128_bits_and_a_child_the_label_of_its_parent():
    found = [Secret.new().entropy for _ in range(8)]
    together = 0
    for entropy in found:
        together |= entropy
    assert together >> 120  # all of the highest eight bits are 0 in all eight: once in 2**64
    assert max(found) < 2**128
    assert Secret.from_seed(1).child("energy").reproducible
    assert not Secret.new().child("energy").reproducible
