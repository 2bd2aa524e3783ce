"""The figures of an accelerator, on this machine and at a tiny size."""

import importlib.util
import json
import subprocess
import sys
import time

import jax
import pytest

from benchmarks import gpu, gpu_page, gpu_pieces

STORED = {
    "machine": {"device": "Chip", "count": 1, "jax": "1", "jax_privacy": "2"},
    "step cnn": {
        "milliseconds": {
            "optax": {"step": 2.0, "next batch": 0.1, "call": 0.2},
            "jaxdp.Trainer": {"step": 3.0, "next batch": 0.3, "call": 0.4},
        },
        "ratio": 1.5,
        "rows of a physical batch": 1_184,
        "seconds to the first step": {"optax": 4.0, "jaxdp.Trainer": 5.0},
    },
    "gradient cnn": {
        "programs": {"ordinary": {"trace, s": 1.0, "compile, s": 2.0, "plan, MB": 7.0}},
        "failed": {"jaxdp, vmap": "out of memory"},
        "milliseconds": {"ordinary": 1.0, "jaxdp": 1.25, "jax_privacy": 4.0},
    },
    "peak cnn": {"unfinished": gpu.CUT},
    "largest cnn": {"jaxdp": {"rows": 65_536, "records a second": 1e6}},
    "precision cnn": {"bfloat16": {"milliseconds": {"ordinary": 0.5, "jaxdp": 0.75}}},
    "exact cnn": {"reference": "vmap in float32, CPU", "auto, float32": {"sum": 1e-7, "norms": 2e-7}},
    "bound": {"norm over l2": {"cnn, auto": 0.96}, "held": True},
    "noise": {
        "integers": {
            "deviation": 1.0,
            "Kolmogorov distance, times the root of the number": 0.8,
            "equal to the CPU's": 1.0,
        }
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_users_have_it():
    """Networks are written as their authors write them, without this suite's strictness."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def test_the_page_shows_what_is_stored_and_names_what_is_not():
    page = gpu_page.page({"gpu_chip.json": STORED})
    for line in (
        "| MNIST CNN, 1,024 rows | 2 | 3 | 1.50 | 0.3 | 0.4 | 1,184 | 4.0 | 5.0 |",
        "| MNIST CNN, 1,024 rows | 1 | 1.25 (1.25) | fails | 4 (4.00) | – | – | – |",
        "| MNIST CNN, 1,024 rows | 7 | – | – | – | – | – | 3.0 | – |",
        "| MNIST CNN, 1,024 rows | – | 65,536 | – | 1,000,000 |",
        "| MNIST CNN, 1,024 rows | – | 1 → 1.25 (1.25) | 0.5 → 0.75 (1.50) |",
        "| MNIST CNN, 1,024 rows | CPU | 1.0e-07 | 2.0e-07 | – | – | – | – |",
        "- gradient cnn, jaxdp, vmap: out of memory",
        f"- peak cnn: {gpu.CUT}",
    ):
        assert line in page.splitlines()
    assert "at most 0.9600 of the bound" in page
    assert "all values are the CPU's bit for bit" in page
    assert "not measured: step gpt2, " in page


def test_the_steps_come_first_and_every_kind_of_piece_is_asked_for():
    assert [piece.split()[0] for piece in gpu.PIECES[:12]] == ["step"] * 6 + ["gradient"] * 6
    kinds = {piece.split()[0] for piece in gpu.PIECES}
    assert kinds == {*gpu_pieces.ALONE, *gpu_pieces.OF_NETWORKS, "opacus"} - {"device"}
    assert len({gpu.process_of(piece) for piece in gpu.PIECES}) == 2 + 6  # peaks by themselves


class Fake:
    """A worker that tells what it was given to tell."""

    def __init__(self, told):
        self.told = told

    def of(self, piece, later):
        return self

    def figures(self, piece, end):
        return iter(self.told[piece])


def test_every_figure_is_written_as_it_comes(tmp_path):
    out, rows = tmp_path / "rows.json", {"machine": {}}
    told = {
        "step cnn": [{"found": {"a": 1}}, {"found": {"a": 1, "b": 2}}, {"done": None}],
        "bound": [{"found": {"c": 3}}, {"done": "out of memory"}],
        "noise": [{"found": {"d": 4}}, {"done": gpu.LATE}],
    }
    now = time.monotonic()
    gpu.measured(list(told), rows, out, Fake(told), now + 60, 100)
    kept = json.loads(out.read_text())
    assert {piece: found.pop("seconds") >= 0 for piece, found in rows.items() if found}
    assert kept["step cnn"].keys() == {"a", "b", "seconds"}
    assert kept["bound"]["c"] == 3
    assert kept["bound"]["unfinished"] == "out of memory"
    assert kept["noise"]["unfinished"] == gpu.CUT  # the end came, not the piece's own limit
    gpu.measured(["noise"], rows, out, Fake(told), now + 1e6, 1)
    assert json.loads(out.read_text())["noise"]["unfinished"] == gpu.LATE
    gpu.measured(
        ["bound"], rows, out, Fake({}), now, 100
    )  # no time: asks nobody, keeps what it has
    assert json.loads(out.read_text())["bound"]["c"] == 3


def last(piece):
    *_, found = gpu_pieces.figures(piece)
    return found


def test_both_noises_have_their_law_and_integers_are_the_cpus():
    found = last("noise")
    for law in found.values():
        assert abs(law["deviation"] - 1) < 0.03
        assert law["Kolmogorov distance, times the root of the number"] < 1.63
    assert found["normals"]["largest difference, in the last place"] <= 4
    assert found["integers"]["equal to the CPU's"] == 1.0


@pytest.mark.slow  # compiles for a minute
@pytest.mark.parametrize("name", gpu.NETWORKS)
def test_a_clipped_gradient_of_each_network_is_exact_and_stands_beside_the_ordinary(name):
    found = last(f"exact {name}")
    assert max(found["auto, float32"].values()) < 1e-4
    found = last(f"gradient {name}")
    assert {"ordinary", "jaxdp", "jaxdp, vmap"} <= set(found["milliseconds"])
    assert not found["failed"]


@pytest.mark.slow  # compiles for a minute
def test_a_step_the_largest_batch_and_other_precisions():
    found = last("step gpt2-lora")
    assert found["milliseconds"].keys() == {"optax", "jaxdp.Trainer"}
    assert all(ms["step"] > 0 for ms in found["milliseconds"].values())
    assert last("largest cnn")["jaxdp"]["rows"] == gpu_pieces.MOST_ROWS
    assert last("precision wrn").keys() == {"float32", "bfloat16"}
    assert last("peak cnn")["peak, MB"] == {}  # a CPU does not tell


@pytest.mark.slow  # nine programs are compiled
def test_no_record_adds_more_than_it_may():
    found = last("bound")
    assert found["held"]
    assert min(found["norm over l2"].values()) > 0.9


@pytest.mark.slow  # the command, in processes of its own
def test_the_command_measures_writes_and_does_what_is_left(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", f"{out}", "--minutes", "2"]
    done = subprocess.run([*command, "noise", "peak cnn"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept = json.loads(out.read_text())
    assert kept.keys() == {"machine", "noise", "peak cnn"}
    assert not any("unfinished" in found for found in kept.values())


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("opacus"), reason="Opacus is not installed")
def test_opacus_clips_what_it_can():
    from benchmarks import gpu_torch

    (found,) = gpu_torch.figures("opacus gpt2-lora")
    assert found["milliseconds"].keys() == {"ordinary", "hooks", "ghost"}
