"""Trains the encoder by contrast of two views; run again, it goes on from its checkpoint.

python -m benchmarks.encoder.train --out FOLDER --images FOLDER [--steps 100000] [--minutes M]

In PyTorch: on a CPU with bfloat16 products its convolutions train ten times as fast as XLA's.
Chen et al. 2020, "A simple framework for contrastive learning" (arXiv:2002.05709).
"""

import argparse
import copy
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.encoder import scenes
from benchmarks.encoder.views import batch, known

WIDTHS, TEMPERATURE = (32, 96, 192, 256), 0.2


class Block(nn.Module):
    """Two convolutions of 3 × 3, added to what they are given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = _convolution(width, width), _convolution(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu_(x + self.two(F.relu_(self.one(x))))


def _convolution(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after))


class Encoder(nn.Module):
    """Images of 32 × 32 to 16 × 16, 8 × 8 and 4 × 4 places; forward gives all three."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        self.stem = _convolution(3, widths[0])
        pairs = itertools.pairwise(widths)
        self.down = nn.ModuleList([_convolution(a, b, 2) for a, b in pairs])
        self.block = nn.ModuleList([Block(b) for b in widths[1:]])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x, found = F.relu_(self.stem(x)), []
        for down, block in zip(self.down, self.block, strict=True):
            x = block(F.relu_(down(x)))
            found.append(x)
        return found


class Head(nn.Module):
    """What is contrasted, on the sphere; it is thrown away."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 128)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.layers(x.mean((2, 3))).float(), dim=1)


def contrast(z: torch.Tensor, temperature: float) -> torch.Tensor:
    """The mean of -log of the other view's share among all others of the batch."""
    n = len(z) // 2
    alike = z @ z.T / temperature - 1e9 * torch.eye(len(z))
    return F.cross_entropy(alike, torch.arange(len(z)).roll(n))


def rate(step: int, steps: int) -> float:
    """The share of the highest rate: rises over 500 steps, falls to 0 over the last fifth.

    In between it stays, so that a run may be given more steps while it is under way.
    """
    return min(1.0, (step + 1) / min(500, steps / 10), 5 * (1 - step / steps))


@torch.no_grad()
def averaged(average: nn.Module, model: nn.Module, step: int) -> None:
    """Moves the average, of the last thousand iterates or the last tenth, towards the newest."""
    kept, newest = average.state_dict(), model.state_dict()
    part = max(1e-3, 10 / (step + 10))
    for name, value in kept.items():
        if value.is_floating_point():
            value.lerp_(newest[name], part)
        else:
            value.copy_(newest[name])


def main() -> None:
    """Trains until the steps or the minutes are over; a checkpoint every ten minutes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True, help="folder in which they are kept")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    given.out.mkdir(parents=True, exist_ok=True)
    encoder, head = Encoder().to(memory_format=torch.channels_last), Head(WIDTHS[-1])
    model, average = nn.ModuleList([encoder, head]), copy.deepcopy(encoder)
    optimizer = torch.optim.AdamW(model.parameters(), given.rate, weight_decay=0.02)
    step, path, began = 0, given.out / "checkpoint.pt", time.monotonic()
    if path.exists():
        kept = torch.load(path, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        average.load_state_dict(kept["average"])
        step = kept["step"]
    images: np.ndarray | tuple = ()
    kept_at, spent, losses = time.monotonic(), time.process_time(), []
    while step < given.steps:
        for group in optimizer.param_groups:
            group["lr"] = given.rate * rate(step, given.steps)
        count = known(step)
        if len(images) < count:
            images = scenes.kept(given.images, given.seed, count)
        x = batch(images.__getitem__, count, given.seed, step, given.size)
        # [n, h, w, 3] seen as [n, 3, h, w] is channels last already.
        with torch.autocast("cpu", torch.bfloat16):
            z = head(encoder(torch.from_numpy(x).permute(0, 3, 1, 2))[-1])
        loss = contrast(z, given.temperature)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        averaged(average, encoder, step)
        step += 1
        losses.append(loss.item())
        over = time.monotonic() - began > 60 * given.minutes or step == given.steps
        if over or time.monotonic() - kept_at > 600:
            modules = {"model": model, "average": average, "optimizer": optimizer}
            state = {name: module.state_dict() for name, module in modules.items()}
            state["step"] = step
            torch.save(state, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
            seconds = round(time.process_time() - spent)
            row = {"step": step, "loss": float(np.mean(losses)), "processor_seconds": seconds}
            with (given.out / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)
            kept_at, spent, losses = time.monotonic(), time.process_time(), []
        if over:
            break


if __name__ == "__main__":
    main()
