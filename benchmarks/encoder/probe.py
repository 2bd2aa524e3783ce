"""How much a linear model gets out of the encoder: ridge regression, no privacy.

python -m benchmarks.encoder.probe CHECKPOINT --data FILE.npz [--weights OUT.npz]

The file has uint8 images x and labels y to fit on, tx and ty to score on: of CIFAR-10's *training*
records both, so that nothing is chosen by its test set.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.encoder import forward
from benchmarks.encoder.train import Encoder

RIDGES = (3e-3, 1e-2, 3e-2, 0.1)
# Which of the encoder's three outputs, averaged to how many cells a side.
CHOICES = {"8x8 in 4x4": [(1, 4)], "last 2x2": [(2, 2)], "last 4x4": [(2, 4)]}


@torch.no_grad()
def features(encoder: Encoder, images: np.ndarray) -> dict[tuple[int, int], torch.Tensor]:
    """float32 [n, ..] by (output, cells), each the mean with that of the mirrored image."""
    wanted = sorted({one for chosen in CHOICES.values() for one in chosen})
    found: dict[tuple[int, int], list] = {one: [] for one in wanted}
    for start in range(0, len(images), 250):
        part = (images[start : start + 250].astype(np.float32) / 255 - 0.5) * 4
        x = torch.from_numpy(part).permute(0, 3, 1, 2)
        with torch.autocast("cpu", torch.bfloat16):
            both = encoder(x), encoder(x.flip(3))
        for layer, cells in wanted:
            mean = sum(F.adaptive_avg_pool2d(y[layer].float(), cells) for y in both) / 2
            found[layer, cells].append(mean.flatten(1))
    return {one: torch.cat(parts) for one, parts in found.items()}


def accuracy(x: torch.Tensor, y: np.ndarray, tx: torch.Tensor, ty: np.ndarray) -> float:
    """In percent, with the best of a few ridges: of standardised features, one against all."""
    mean, scale = x.mean(0), (x.std(0) + 1e-6) * x.shape[1] ** 0.5
    x, tx = (x - mean) / scale, (tx - mean) / scale
    targets = torch.eye(10)[torch.from_numpy(y).long()]
    targets = targets - targets.mean(0)
    n, dual = len(x), x.shape[1] > len(x)
    products, left = (x @ x.T, tx @ x.T) if dual else (x.T @ x, tx)
    right, found = targets if dual else x.T @ targets, []
    for ridge in RIDGES:
        lower = torch.linalg.cholesky(products + ridge * n / 100 * torch.eye(len(products)))
        guess = (left @ torch.cholesky_solve(right, lower)).argmax(1)
        found.append(100 * float((guess.numpy() == ty).mean()))
    return max(found)


def main() -> None:
    """Prints an accuracy for each choice; writes the folded weights where it is asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--weights", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    kept = torch.load(given.checkpoint, weights_only=True)
    encoder = Encoder().to(memory_format=torch.channels_last)
    encoder.load_state_dict(kept["average"])
    encoder.eval()
    if given.weights:
        state = {name: value.numpy() for name, value in encoder.state_dict().items()}
        np.savez(given.weights, **forward.folded(state))
    with np.load(given.data) as file:
        x, y = file["x"][: given.records], file["y"][: given.records]
        tx, ty = file["tx"], file["ty"]
    found, scored = features(encoder, x), features(encoder, tx)
    for name, chosen in CHOICES.items():
        one, other = (torch.cat([part[c] for c in chosen], 1) for part in (found, scored))
        print(
            f"step {kept['step']}, {name}, {one.shape[1]}: {accuracy(one, y, other, ty):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
