"""The networks of the gradient benchmarks in torch, of layers that Opacus knows."""

import itertools

import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import nn


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

    def __init__(self, width, heads, causal=False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        rows, length, width = x.shape
        split = lambda y: y.view(rows, length, self.heads, -1).transpose(1, 2)  # noqa: E731
        q, k, v = (split(part(x)) for part in self.parts[:3])
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        if self.causal:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        weights = torch.softmax(scores, -1)
        return self.parts[3]((weights @ v).transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width, heads=4, causal=False):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, causal)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary=1000, width=128, length=64, layers=2, heads=4, causal=False):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal) for _ in range(layers))
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class SmallCNN(nn.Module):
    """Five convolutions of 32 channels."""

    def __init__(self):
        super().__init__()
        inputs = (3, 32, 32, 32, 32)
        self.layers = nn.ModuleList(nn.Conv2d(n, 32, 3, padding=1) for n in inputs)
        self.out = nn.Linear(32, 10)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.out(x.mean((2, 3)))


class Residual(nn.Module):
    """Two convolutions with GroupNorm after each, and the input or a projection of it."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.one = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.two = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(16, width) for _ in range(2))
        self.short = nn.Identity()
        if stride > 1 or inputs != width:
            across = nn.Conv2d(inputs, width, 1, stride, bias=False)
            self.short = nn.Sequential(across, nn.GroupNorm(16, width))

    def forward(self, x):
        h = torch.relu(self.norms[0](self.one(x)))
        return torch.relu(self.short(x) + self.norms[1](self.two(h)))


class ResNet18(nn.Module):
    """ResNet-18 with GroupNorm, for small images."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(16, 64)
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        pairs = itertools.pairwise(widths)
        self.blocks = nn.ModuleList(
            Residual(a, b, 2 if n and n % 2 == 0 else 1) for n, (a, b) in enumerate(pairs)
        )
        self.out = nn.Linear(512, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean((2, 3)))


class WideBlock(nn.Module):
    """GroupNorm before each of two convolutions, and the input or a projection of it."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(16, n) for n in (inputs, width))
        self.one = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.two = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.short = None
        if stride > 1 or inputs != width:
            self.short = nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x):
        h = torch.relu(self.norms[0](x))
        short = x if self.short is None else self.short(h)
        return short + self.two(torch.relu(self.norms[1](self.one(h))))


class WideResNet(nn.Module):
    """WRN-depth-widen with GroupNorm."""

    def __init__(self, depth=16, widen=4):
        super().__init__()
        self.first, width, blocks = nn.Conv2d(3, 16, 3, padding=1, bias=False), 16, []
        for stage, base in enumerate((16, 32, 64)):
            for block in range((depth - 4) // 6):
                blocks.append(WideBlock(width, base * widen, 2 if stage and not block else 1))
                width = base * widen
        self.blocks, self.norm = nn.Sequential(*blocks), nn.GroupNorm(16, width)
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.blocks(self.first(x)))).mean((2, 3)))


class VisionTransformer(nn.Module):
    """ViT-B/16; what is added to the input comes from embeddings, which Opacus knows."""

    def __init__(self, size=224, patch=16, width=768, layers=12, heads=12, classes=1000):
        super().__init__()
        self.patch, places = nn.Conv2d(3, width, patch, patch), (size // patch) ** 2 + 1
        self.first, self.places = nn.Embedding(1, width), nn.Embedding(places, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        one = torch.zeros(len(x), 1, dtype=torch.long, device=x.device)
        x = torch.cat([self.first(one), x], 1)
        x = x + self.places(torch.arange(x.shape[1], device=x.device).repeat(len(x), 1))
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x)[:, 0])


class Adapted(nn.Module):
    """A frozen dense layer with a float32 adapter beside it (LoRA)."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x.float())).to(x.dtype)


def with_lora(model, rank, adapted):
    """The model, frozen but for adapters of the dense layers with these names."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and name in adapted:
                setattr(parent, name, Adapted(layer, rank))
    return model


class Recurrent(nn.Module):
    """An embedding, a recurrent layer of Opacus's own and a classifier."""

    def __init__(self, layer, width=128):
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.layer, self.out = layer(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, tokens):
        return self.out(self.layer(self.tokens(tokens))[0][:, -1])


def rows():
    """name -> (make model, inputs, targets)."""
    images = torch.rand(512, 1, 28, 28), torch.arange(512) % 10
    flat = torch.randn(600, 784), torch.arange(600) % 10
    tokens = torch.randint(0, 1000, (32, 65))
    colours = torch.randn(32, 3, 32, 32), torch.arange(32) % 10
    text = tokens[:, 1:].contiguous(), torch.arange(32) % 10
    long = torch.randint(0, 1000, (8, 129))
    long = long[:, :-1].contiguous(), long[:, 1:].contiguous()
    mlp = lambda: nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))  # noqa: E731
    return {
        "cnn": (Shift, *images),
        "mlp": (mlp, *flat),
        "transformer": (Transformer, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        "small CNN, 32 rows": (SmallCNN, *colours),
        "ResNet-18, 8 rows": (ResNet18, *(part[:8] for part in colours)),
        "LSTM text, 32 rows of 64": (lambda: Recurrent(DPLSTM), *text),
        "GRU text, 32 rows of 64": (lambda: Recurrent(DPGRU), *text),
        "RNN text, 32 rows of 64": (lambda: Recurrent(DPRNN), *text),
        "GPT 3.4 M, written out, 8 rows of 128": (
            lambda: Transformer(1000, 256, 128, 4),
            *long,
        ),
    }
