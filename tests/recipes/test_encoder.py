"""What the encoder was trained on is nobody's: a batch is made again from a seed and a step."""

import hashlib
import subprocess
import sys

import numpy as np

from benchmarks.encoder import forward, scenes, views

STEP, SIZE = 1_234, 3
BATCH = f"""
import sys
from benchmarks.encoder import scenes, views
found = views.batch(lambda i: scenes.images(7, i), views.known({STEP}), 7, {STEP}, {SIZE})
sys.stdout.buffer.write(found.tobytes())
"""


def test_a_batch_is_the_same_in_another_process():
    here = views.batch(lambda i: scenes.images(7, i), views.known(STEP), 7, STEP, SIZE)
    there = subprocess.run([sys.executable, "-c", BATCH], check=True, capture_output=True).stdout
    assert hashlib.sha256(there).digest() == hashlib.sha256(here.tobytes()).digest()
    assert here.shape == (2 * SIZE, views.SIDE, views.SIDE, 3)
    assert here.dtype == np.float32
    assert here.std() > 0.1
    other = views.batch(lambda i: scenes.images(7, i), views.known(STEP), 7, STEP + 1, SIZE)
    assert np.abs(other - here).max() > 0.1


def test_an_image_of_the_process_depends_on_its_number_alone_however_it_is_drawn(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(scenes, "_KEPT", 64)
    kept = scenes.kept(tmp_path, 7, 100)
    part = scenes.images(7, np.array([99, 3]))
    np.testing.assert_array_equal(part, kept[[99, 3]])
    assert part.std() > 5
    assert (scenes.images(8, np.array([3])) != part[1]).any()
    # A file that was cut short is completed, its last piece drawn again.
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    np.testing.assert_array_equal(scenes.kept(tmp_path, 7, 128)[99], part[0])


def test_folded_weights_are_the_convolution_and_its_normalisation():
    rng = np.random.default_rng(0)
    state = {}
    for name, before, after in (("stem", 3, 4), ("down.0", 4, 5), ("block.0.one", 5, 5)):
        state[f"{name}.0.weight"] = rng.normal(size=(after, before, 3, 3))
        for part in ("weight", "bias", "running_mean", "running_var"):
            state[f"{name}.1.{part}"] = rng.random(after) + 0.5
    found = forward.folded(state)
    x = rng.normal(size=(3, 3, 3))  # one place, by sums
    plain = np.einsum("ijc,ocij->o", x, state["stem.0.weight"])
    scaled = (plain - state["stem.1.running_mean"]) / np.sqrt(state["stem.1.running_var"] + 1e-5)
    wanted = scaled * state["stem.1.weight"] + state["stem.1.bias"]
    got = np.einsum("ijc,ijco->o", x, found["stem.kernel"].astype(float)) + found["stem.bias"]
    np.testing.assert_allclose(got, wanted, atol=2e-2)
