"""Opacus's ways to clip the gradients of the benchmark's networks.

`python -m benchmarks.gradients_torch ROW ROUNDS` prints medians in milliseconds as JSON.
"""

import json
import statistics
import sys
import time
import warnings

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from torch import nn

from benchmarks.networks_torch import rows

CLIP = 0.1


def losses(logits, targets):
    """One loss for every example."""
    if logits.dim() == 3:
        each = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return each.mean(1)
    return nn.functional.cross_entropy(logits, targets, reduction="none")


def contenders(name):
    """How torch and Opacus compute the row: label -> function that runs it once."""
    make, x, y = rows()[name]
    warnings.simplefilter("ignore")
    found = {"torch, ordinary": ordinary(make(), x, y)}
    for mode in ("hooks", "ew", "ghost"):
        try:
            run = clipped(make(), x, y, mode)
            run()
        except Exception as error:
            print(f"opacus {mode} cannot do {name}: {type(error).__name__}: {str(error)[:120]}")
            continue
        found[f"opacus, {mode}"] = run
    return found


def clipped(model, x, y, mode, views=1):
    """A function that leaves the clipped sum in the model's gradients.

    A record may have several ``views``, which follow one another: its gradient is their mean.
    """
    if mode != "ghost":
        return _per_example(model, x, y, mode, views)
    if views > 1:
        raise ValueError("ghost clipping knows the norms of views, not of their mean")
    return _ghost(model, x, y)


def ordinary(model, x, y):
    def run():
        model.zero_grad()
        losses(model(x), y).mean().backward()

    return run


def _per_example(model, x, y, mode, views):
    wrapped = GradSampleModule(model, loss_reduction="sum") if mode == "hooks" else _ew(model)

    def run():
        wrapped.zero_grad()
        losses(wrapped(x), y).sum().backward()
        params = [p for p in wrapped.parameters() if p.requires_grad]
        for p in params if views > 1 else ():
            p.grad_sample = p.grad_sample.unflatten(0, (-1, views)).mean(1)
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in params]).norm(dim=0)
        factor = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        for p in params:
            p.grad = torch.einsum("i,i...->...", factor, p.grad_sample)
            p.grad_sample = None

    return run


def _ew(model):
    from opacus.grad_sample import GradSampleModuleExpandedWeights

    return GradSampleModuleExpandedWeights(model, loss_reduction="sum")


def _ghost(model, x, y):
    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=CLIP, use_ghost_clipping=True, loss_reduction="sum"
    )

    def run():
        wrapped.zero_grad()
        each = losses(wrapped(x), y)
        each.sum().backward(retain_graph=True)
        factor = wrapped.get_clipping_coef().detach()
        wrapped.zero_grad()
        wrapped.disable_hooks()
        (factor * each).sum().backward()
        wrapped.enable_hooks()

    return run


def main() -> None:
    torch.set_num_threads(2)
    name, rounds = sys.argv[1], int(sys.argv[2])
    found = contenders(name)
    seconds = {label: [] for label in found}
    for _ in range(rounds):
        for label, run in found.items():
            began = time.perf_counter()
            run()
            seconds[label].append(time.perf_counter() - began)
    print(json.dumps({k: round(1e3 * statistics.median(v), 2) for k, v in seconds.items()}))


if __name__ == "__main__":
    main()
