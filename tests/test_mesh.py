"""One process and eight devices: data parallel, fully sharded, tensor parallel, ``shard_map``."""

import subprocess
import sys

import pytest

from tests.compiling import with_flags

CHECKS = {
    "steps": "steps exchanged noise grid sources broken chains stacks own_steps summed_before refused",
    "links": "automatic shards replicas summed_over_devices pmapped members_on_devices correlated "
    "collectives",
}


@pytest.mark.parametrize("names", CHECKS.values(), ids=CHECKS)
def test_eight_devices_take_the_step_of_one(names):
    """One process for all checks: each compiles little alone."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.on_mesh", *names.split()],
        env={**with_flags("--xla_force_host_platform_device_count=8"), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert found.returncode == 0, found.stderr[-3_000:]
    missing = [name for name in names.split() if f"passed {name}\n" not in found.stdout]
    assert not missing, f"{missing}: {found.stdout[-4_000:]}"
