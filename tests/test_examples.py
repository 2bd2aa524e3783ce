"""The examples run as they stand; benchmarks/release.py checks that they are short."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parent.parent / "examples"
PACKAGES = {"03_equinox": "equinox"}


@pytest.fixture
def as_users_run_it(monkeypatch, tmp_path):
    """JAX's own settings and folders of the test: examples hold no strict types."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("MPLBACKEND", "agg")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def epsilons(text):
    return [float(number) for number in re.findall(r"epsilon (\d+\.\d+)", text)]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "path",
    [path for path in sorted(FOLDER.glob("*.py")) if "memory_map" not in path.stem],
    ids=lambda path: path.stem,
)
def test_an_example_runs(path, as_users_run_it, capsys):
    if package := PACKAGES.get(path.stem):
        pytest.importorskip(package)
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert epsilons(said)
    assert 2.9 <= max(epsilons(said)) <= (3.3 if "together" in said else 3.0)
    accuracy = re.findall(r"(?:accuracy|\d+:) (0\.\d+)", said)
    if accuracy:
        assert float(accuracy[-1]) > 0.6


@pytest.mark.slow
def test_a_memory_map_larger_than_the_peak_of_memory(as_users_run_it):
    """In a process of its own: the peak is a process's."""
    command = [sys.executable, str(FOLDER / "06_memory_map.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert epsilons(done.stdout)[0] <= 1.0
    if found := re.search(r"peak memory (\d+) MB", done.stdout):
        assert int(found[1]) < 600 < 1000 * float(re.match(r"(\S+) GB", done.stdout)[1])
