"""Every test runs under strict dtype and rank promotion; warnings are errors (setup.cfg).

Most of the suite's time is XLA compiling the same small programs again. What it compiled is kept in
build/compiled, for all workers and for later runs; a program that is a week old is compiled anew.
JAX names a file by all that the program depends on, so none can be stale. To empty it:
``rm -r build/compiled``, or ``make clean``.
"""

import atexit
import contextlib
import gc
import os
import shutil
import tempfile
import time
from pathlib import Path

# The workers have the cores: threads of LAPACK would wait for one, and burn the other's time.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

import jax
import pytest
from hypothesis import settings

from jaxdp.papers import algorithms, networks  # noqa: F401  (registers what tests name)
from tests.compiling import FLAGS, lower_quickly

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_GIVEN = os.environ.get("XLA_FLAGS", "").split()
os.environ["XLA_FLAGS"] = " ".join([*_GIVEN, *(flag for flag in FLAGS if flag not in _GIVEN)])

_KEPT = Path(__file__).parent.parent / "build" / "compiled"
_WEEK = 7 * 24 * 3600.0


def _folder_of_programs():
    """build/compiled, less what is older than a week; one of this run alone where it is read-only."""
    try:
        _KEPT.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=_KEPT).close()
    except OSError:
        made = tempfile.mkdtemp(prefix="jaxdp-tests-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        return made
    for file in _KEPT.iterdir():
        with contextlib.suppress(OSError):  # another run removes the same
            if file.stat().st_mtime < time.time() - _WEEK:
                file.unlink()
    return str(_KEPT)


if "JAXDP_TESTS" not in os.environ:  # set for all workers, and for the processes that tests start
    _PROGRAMS = _folder_of_programs()
    os.environ |= {
        "JAXDP_TESTS": _PROGRAMS,
        "JAX_COMPILATION_CACHE_DIR": _PROGRAMS,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
lower_quickly()
jax.config.update("jax_compilation_cache_dir", os.environ["JAXDP_TESTS"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

settings.register_profile("jaxdp", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("jaxdp")


def pytest_configure(config):
    """A file that another process is writing, removes, or was killed over is compiled once more."""
    config.addinivalue_line(
        "filterwarnings", "ignore:Error .*ing persistent compilation cache entry:UserWarning"
    )


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
