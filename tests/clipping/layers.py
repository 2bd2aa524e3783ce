"""Losses of single layers in linen: every type that Opacus supports, and a few more.

Those of nnx, and all of them one by one, are in benchmarks/layers.py.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Examples of a batch, features (a multiple of 4), positions, pixels along a side, rows."""

    rows: int = 4
    width: int = 4
    length: int = 5
    side: int = 5
    depth: int = 4
    words: int = 7


class Bag(nn.Module):
    """The mean of looked-up rows, as EmbeddingBag has it."""

    words: int
    width: int
    param_dtype: type = jnp.float32

    @nn.compact
    def __call__(self, ids):
        return nn.Embed(self.words, self.width, param_dtype=self.param_dtype)(ids).mean(-2)


class SequenceBias(nn.Module):
    """A learned token after the sequence."""

    param_dtype: type = jnp.float32

    @nn.compact
    def __call__(self, x):
        token = self.param("token", nn.initializers.normal(), x.shape[-1:], self.param_dtype)
        return jnp.concatenate([x, jnp.broadcast_to(token, (*x.shape[:-2], 1, x.shape[-1]))], -2)


def convolutions(s):
    """Name -> (the shape of an example, options of ``Conv`` beyond the kernel's shape, its rank)."""
    line, plane, volume = (s.length, s.width), (s.side, s.side, s.width), (*[s.depth] * 3, s.width)
    uneven, dilated = ((1, 0), (0, 2)), {"feature_group_count": 2, "kernel_dilation": 2}
    depthwise = {"feature_group_count": s.width, "padding": "CIRCULAR"}
    return {
        "conv1d, stride 2": (line, {"strides": 2, "padding": "VALID"}, 1),
        "conv1d, causal, dilated": (line, {"kernel_dilation": 2, "padding": "CAUSAL"}, 1),
        "conv2d": (plane, {}, 2),
        "conv2d, stride 2, uneven padding": (plane, {"strides": 2, "padding": uneven}, 2),
        "conv2d, groups, dilated": (plane, dilated, 2),
        "conv2d, depthwise, circular": (plane, depthwise, 2),
        "conv3d, stride (1, 2, 1)": (volume, {"strides": (1, 2, 1)}, 3),
    }


def linen(s, dtype):
    """Name -> (shape of an example, layer)."""
    o = {"param_dtype": dtype}
    line, plane = (s.length, s.width), (s.side, s.side, s.width)
    found = {
        name: (shape, nn.Conv(s.width, (3,) * rank, **options, **o))
        for name, (shape, options, rank) in convolutions(s).items()
    }
    both_ways = (nn.RNN(nn.OptimizedLSTMCell(s.width, **o)) for _ in range(2))
    return found | {
        "linear": ((s.width,), nn.Dense(s.width, **o)),
        "linear, positions": (line, nn.Dense(s.width, **o)),
        "linear, two axes": (line, nn.DenseGeneral((2, s.width // 2), axis=(-2, -1), **o)),
        "einsum": (line, nn.Einsum((2, s.width, s.width), "...td,hdk->...thk", **o)),
        "conv transposed": (plane, nn.ConvTranspose(s.width, (3, 3), strides=(2, 2), **o)),
        "embedding": (None, nn.Embed(s.words, s.width, **o)),
        "embedding bag": (None, Bag(s.words, s.width, **o)),
        "layer norm": (line, nn.LayerNorm(**o)),
        "rms norm": (line, nn.RMSNorm(**o)),
        "group norm": (plane, nn.GroupNorm(2, **o)),
        "instance norm": (plane, nn.InstanceNorm(**o)),
        "rnn": (line, nn.RNN(nn.SimpleCell(s.width, **o))),
        "gru": (line, nn.RNN(nn.GRUCell(s.width, **o))),
        "lstm": (line, nn.RNN(nn.LSTMCell(s.width, **o))),
        "lstm, optimized": (line, nn.RNN(nn.OptimizedLSTMCell(s.width, **o))),
        "lstm, both ways": (line, nn.Bidirectional(*both_ways)),
        "attention": (line, nn.MultiHeadDotProductAttention(num_heads=2, **o)),
        "sequence bias": (line, SequenceBias(**o)),
    }


def of_layer(apply, shape, sizes, dtype):
    """The loss of one example by a layer's ``apply``, and a batch."""
    key = jax.random.key(1)
    if shape is None:
        batch = jax.random.randint(key, (sizes.rows, sizes.length), 0, sizes.words, jnp.int32)
    else:
        batch = jax.random.normal(key, (sizes.rows, *shape), jnp.float32).astype(dtype)

    def loss_fn(params, example):
        return jnp.sum(jnp.sin(2.0 * apply(params, example[None]) + 0.3))

    return loss_fn, batch
