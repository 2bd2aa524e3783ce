"""The networks of the gradient benchmark: name -> (params, loss of one example, batch)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxdp.papers.networks  # noqa: F401  registers mnist-cnn
from jaxdp import models


def _keys():
    return jax.random.split(jax.random.key(0), 3)


def _classifier(module, x, classes=10):
    y = jnp.arange(x.shape[0], dtype=jnp.int32) % classes

    def loss_fn(params, example):
        logits = module.apply(params, example[0][None])[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, example[1])

    return jax.jit(module.init)(jax.random.key(1), x[:1]), loss_fn, (x, y)


def cnn(batch=512):
    """The MNIST network of the papers, 26,010 parameters."""
    model = models.build("mnist-cnn", num_classes=10, example_shape=(28, 28, 1))
    params = models.init(model, jax.random.key(0), (28, 28, 1))
    x = jax.random.uniform(_keys()[0], (batch, 28, 28, 1))
    y = jnp.arange(batch, dtype=jnp.int32) % 10
    return params, models.cross_entropy(model), (x, y)


class MLP(nn.Module):
    """784-1000-10."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(1000)(x)))


def mlp(batch=600):
    """784-1000-10 with ReLU."""
    return _classifier(MLP(), jax.random.normal(_keys()[0], (batch, 784)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads)(h)
        h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h)


class LanguageModel(nn.Module):
    """Embedding, blocks, output (tied or not)."""

    vocabulary: int
    width: int
    layers: int
    tied: bool = False

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(self.vocabulary, self.width)
        places = self.param("places", nn.initializers.normal(0.02), (tokens.shape[-1], self.width))
        x = table(tokens) + places
        for _ in range(self.layers):
            x = Block(self.width, 4)(x)
        return table.attend(x) if self.tied else nn.Dense(self.vocabulary)(x)


def language_model(batch=32, length=64, vocabulary=1000, width=128, layers=2, tied=False):
    """A small transformer that predicts the next token."""
    module = LanguageModel(vocabulary, width, layers, tied)
    tokens = jax.random.randint(_keys()[0], (batch, length + 1), 0, vocabulary)

    def loss_fn(params, tokens):
        logits = module.apply(params, tokens[:-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()

    return jax.jit(module.init)(jax.random.key(1), tokens[0, :-1]), loss_fn, tokens


class WideResNet(nn.Module):
    """WRN-depth-width with GroupNorm (De et al. 2022, arXiv:2204.13650, without their extras)."""

    depth: int = 16
    widen: int = 4

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        for stage, width in enumerate((16, 32, 64)):
            for block in range((self.depth - 4) // 6):
                stride = 2 if stage and not block else 1
                x = self._block(x, width * self.widen, stride)
        x = nn.relu(nn.GroupNorm(num_groups=16)(x)).mean(axis=(1, 2))
        return nn.Dense(10)(x)

    def _block(self, x, width, stride):
        h = nn.relu(nn.GroupNorm(num_groups=16)(x))
        short = x
        if stride > 1 or x.shape[-1] != width:
            short = nn.Conv(width, (1, 1), (stride, stride), use_bias=False)(h)
        h = nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(h)
        h = nn.relu(nn.GroupNorm(num_groups=16)(h))
        return short + nn.Conv(width, (3, 3), use_bias=False)(h)


def wide_resnet(batch=16, depth=16, widen=4):
    """A wide residual network on images of CIFAR-10's shape."""
    x = jax.random.normal(_keys()[0], (batch, 32, 32, 3))
    return _classifier(WideResNet(depth, widen), x)
