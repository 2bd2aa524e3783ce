"""Losses of single layers, in linen and nnx: every type that Opacus supports, and a few more.

``make`` gives (params, loss of one example, batch), ``exact`` the same layer's gradients in float64.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxdp
from tests.clipping.architectures import opened
from tests.clipping.references import Reference, gap


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


class NnxBag(nnx.Module):
    """``Bag`` in nnx."""

    def __init__(self, words, width, **options):
        self.embed = nnx.Embed(words, width, **options)

    def __call__(self, ids):
        return self.embed(ids).mean(-2)


class NnxSequenceBias(nnx.Module):
    """``SequenceBias`` in nnx."""

    def __init__(self, width, param_dtype, rngs):
        self.token = nnx.Param(jax.random.normal(rngs.params(), (width,), param_dtype))

    def __call__(self, x):
        token = jnp.broadcast_to(self.token[...], (*x.shape[:-2], 1, x.shape[-1]))
        return jnp.concatenate([x, token], -2)


def _convolutions(s):
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
    convolutions = {
        name: (shape, nn.Conv(s.width, (3,) * rank, **options, **o))
        for name, (shape, options, rank) in _convolutions(s).items()
    }
    both_ways = (nn.RNN(nn.OptimizedLSTMCell(s.width, **o)) for _ in range(2))
    return convolutions | {
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


def _nnx(s, dtype):
    """Name -> (shape of an example, a function that makes the layer)."""
    o = {"param_dtype": dtype, "rngs": nnx.Rngs(0)}
    line, plane = (s.length, s.width), (s.side, s.side, s.width)
    w, both = s.width, (s.width, s.width)

    def recurrent(cell):
        # Some of them are of float32 unless told otherwise.
        return line, lambda: nnx.RNN(cell(*both, dtype=dtype, **o))

    def convolution(shape, options, rank):
        return shape, lambda: nnx.Conv(*both, (3,) * rank, **options, **o)

    def two_axes():
        return nnx.LinearGeneral(line, (2, w // 2), axis=(-2, -1), **o)

    return {name: convolution(*row) for name, row in _convolutions(s).items()} | {
        "linear": ((w,), lambda: nnx.Linear(*both, **o)),
        "linear, positions": (line, lambda: nnx.Linear(*both, **o)),
        "linear, two axes": (line, two_axes),
        "einsum": (line, lambda: nnx.Einsum("...td,hdk->...thk", (2, w, w), **o)),
        "conv transposed": (plane, lambda: nnx.ConvTranspose(*both, (3, 3), strides=(2, 2), **o)),
        "embedding": (None, lambda: nnx.Embed(s.words, w, **o)),
        "embedding bag": (None, lambda: NnxBag(s.words, w, **o)),
        "layer norm": (line, lambda: nnx.LayerNorm(w, **o)),
        "rms norm": (line, lambda: nnx.RMSNorm(w, **o)),
        "group norm": (plane, lambda: nnx.GroupNorm(w, 2, **o)),
        "instance norm": (plane, lambda: nnx.InstanceNorm(w, **o)),
        "rnn": recurrent(nnx.SimpleCell),
        "gru": recurrent(nnx.GRUCell),
        "lstm": recurrent(nnx.LSTMCell),
        "lstm, optimized": recurrent(nnx.OptimizedLSTMCell),
        "attention": (line, lambda: nnx.MultiHeadAttention(2, w, decode=False, **o)),
        "sequence bias": (line, lambda: NnxSequenceBias(w, **o)),
    }


_OF = {"linen": linen, "nnx": _nnx}
NAMES = {framework: tuple(of(Sizes(), jnp.float32)) for framework, of in _OF.items()}


def make(framework, name, sizes):
    """Parameters, the loss of one example, and a batch."""
    params, loss_fn, batch = made(framework, name, sizes, jnp.float32)
    if framework == "linen":
        _, layer = linen(sizes, jnp.float32)[name]
        params = jax.jit(layer.init)(jax.random.key(0), batch[:1])
    return params, loss_fn, batch


def made(framework, name, sizes, dtype):
    shape, layer = _OF[framework](sizes, dtype)[name]
    key, params = jax.random.key(1), None
    if shape is None:
        batch = jax.random.randint(key, (sizes.rows, sizes.length), 0, sizes.words, jnp.int32)
    else:
        batch = jax.random.normal(key, (sizes.rows, *shape), jnp.float32).astype(dtype)
    if framework == "linen":
        apply = layer.apply
    else:
        graph, params, rest = nnx.split(layer(), nnx.Param, ...)
        apply = lambda params, x: nnx.merge(graph, params, rest, copy=True)(x)  # noqa: E731

    def loss_fn(params, example):
        return jnp.sum(jnp.sin(2.0 * apply(params, example[None]) + 0.3))

    return params, loss_fn, batch


def exact(framework, name, sizes, params):
    """Norms [m] and the reference in float64, at the parameters that ``make`` gave."""
    # Flax asks for the common type of float64 and float32.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        _, loss_fn, batch = made(framework, name, sizes, jnp.float64)
        found = Reference(jax.tree.map(lambda x: x.astype(jnp.float64), params), loss_fn, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(found.grads)} == {np.dtype(np.float64)}
    return found.norms(), found


def errors(grad_fn, params, batch, norms, reference):
    """The largest relative error of norms, and that of the sum clipped to the median norm."""
    bound = np.float32(np.median(norms))
    value, info = opened(grad_fn)(params, batch, bound=bound)
    wanted = reference.clipped(jaxdp.clip(1.0), bound=float(bound))
    off = np.max(np.abs(np.asarray(info.norms, np.float64) / norms - 1.0))
    return float(off), float(gap(value, wanted))
