"""The benchmark's networks in torch, and Opacus's ways to clip their gradients."""

import warnings

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from torch import nn

torch.set_num_threads(2)
CLIP = 0.1


class Shift(nn.Module):
    """The MNIST network of the papers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 8, 2, padding=2),
            nn.Tanh(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, 2),
            nn.Tanh(),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
            nn.Linear(512, 32),
            nn.Tanh(),
            nn.Linear(32, 10),
        )

    def forward(self, x):
        return self.layers(x)


class Attention(nn.Module):
    """Self-attention from dense layers, which every mode of Opacus supports."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        rows, length, width = x.shape
        split = lambda y: y.view(rows, length, self.heads, -1).transpose(1, 2)  # noqa: E731
        q, k, v = (split(part(x)) for part in self.parts[:3])
        weights = torch.softmax(q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5, -1)
        return self.parts[3]((weights @ v).transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, 4)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary=1000, width=128, length=64):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def rows():
    """name -> (make model, inputs, targets)."""
    images = torch.rand(512, 1, 28, 28), torch.arange(512) % 10
    flat = torch.randn(600, 784), torch.arange(600) % 10
    tokens = torch.randint(0, 1000, (32, 65))
    mlp = lambda: nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))  # noqa: E731
    return {
        "cnn": (Shift, *images),
        "mlp": (mlp, *flat),
        "transformer": (Transformer, tokens[:, :-1], tokens[:, 1:]),
    }


def losses(logits, targets):
    """One loss for every example."""
    if logits.dim() == 3:
        each = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return each.mean(1)
    return nn.functional.cross_entropy(logits, targets, reduction="none")


def contenders(name):
    """How torch and Opacus compute the row: label -> function that runs it once."""
    make, x, y = rows()[name]
    found = {"torch, ordinary": _ordinary(make(), x, y)}
    for mode in ("hooks", "ew", "ghost"):
        try:
            run = (_ghost if mode == "ghost" else _per_example)(make(), x, y, mode)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run()
        except Exception as error:
            print(f"opacus {mode} cannot do {name}: {type(error).__name__}: {str(error)[:120]}")
            continue
        found[f"opacus, {mode}"] = run
    return found


def _ordinary(model, x, y):
    def run():
        model.zero_grad()
        losses(model(x), y).mean().backward()

    return run


def _per_example(model, x, y, mode):
    wrapped = GradSampleModule(model, loss_reduction="sum") if mode == "hooks" else _ew(model)

    def run():
        wrapped.zero_grad()
        losses(wrapped(x), y).sum().backward()
        params = [p for p in wrapped.parameters() if p.requires_grad]
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in params]).norm(dim=0)
        factor = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        for p in params:
            p.grad = torch.einsum("i,i...->...", factor, p.grad_sample)
            p.grad_sample = None

    return run


def _ew(model):
    from opacus.grad_sample import GradSampleModuleExpandedWeights

    return GradSampleModuleExpandedWeights(model, loss_reduction="sum")


def _ghost(model, x, y, mode):
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
