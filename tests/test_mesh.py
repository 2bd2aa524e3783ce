"""One process and eight devices: data parallel, fully sharded, tensor parallel, ``shard_map``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling import with_flags

SCRIPT = Path(__file__).parent / "on_mesh.py"
CHECKS = (
    "steps",
    "exchanged",
    "noise",
    "correlated",
    "grid",
    "sources",
    "broken",
    "chains",
    "own_steps",
    "members",
    "summed_before",
    "refused",
)


@pytest.fixture(scope="module")
def said():
    """What the script prints; one process for all, for a test compiles little alone."""
    quick = "--xla_backend_optimization_level=0"
    env = with_flags("--xla_force_host_platform_device_count=8", quick)
    found = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**env, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert found.returncode == 0, found.stderr[-3_000:]
    return found.stdout


@pytest.mark.parametrize("check", CHECKS)
def test_eight_devices_take_the_step_of_one(said, check):
    assert f"passed {check}\n" in said, said[-4_000:]
