"""Every test runs under strict dtype and rank promotion; warnings are errors (setup.cfg)."""

import atexit
import gc
import os
import shutil
import tempfile

import jax
import pytest
from hypothesis import settings

from jaxdp.papers import algorithms, networks  # noqa: F401  (registers what tests name)
from tests.compiling import FLAGS

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_GIVEN = os.environ.get("XLA_FLAGS", "").split()
os.environ["XLA_FLAGS"] = " ".join([*_GIVEN, *(flag for flag in FLAGS if flag not in _GIVEN)])

# Most of the suite's time is XLA compiling the same small programs again, run after run. One cache
# serves all workers, and the processes that tests start.
if "JAXDP_TESTS" not in os.environ:
    _CACHE = tempfile.mkdtemp(prefix="jaxdp-tests-")
    atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
    os.environ |= {
        "JAXDP_TESTS": _CACHE,
        "JAX_COMPILATION_CACHE_DIR": _CACHE,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
jax.config.update("jax_compilation_cache_dir", os.environ["JAXDP_TESTS"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

settings.register_profile("jaxdp", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("jaxdp")


def pytest_collection_finish():
    """What was imported stays: tracing allocates much, and each collection went through all of it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def linear():
    """Parameters, data and a loss whose per-example gradient is the example itself."""
    params = {"w": jax.numpy.zeros((3, 2)), "b": jax.numpy.zeros((2,))}

    def loss_fn(params, example):
        return sum(
            jax.numpy.vdot(leaf, value)
            for leaf, value in zip(jax.tree.leaves(params), jax.tree.leaves(example), strict=True)
        )

    def batch(rows, seed=0, scale=1.0):
        keys = jax.random.split(jax.random.key(seed), 2)
        return {
            "w": scale * jax.random.normal(keys[0], (rows, 3, 2)),
            "b": scale * jax.random.normal(keys[1], (rows, 2)),
        }

    return params, batch, loss_fn
