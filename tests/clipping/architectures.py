"""Small networks of every kind: name -> (params, loss of one example, batch of 5)."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxdp import models
from tests.compiling import QUICK

ROWS = 5

# These tests are about numbers, and half of their time would be LLVM's.
jit = functools.partial(jax.jit, compiler_options=QUICK)


def opened(grad_fn):
    """The function compiled, with the sum's value in place of the sum."""

    @jit
    def run(params, batch, mask=None, rng=None, scale=None, bound=None):
        keep = "all" if mask is None else mask
        summed, info = grad_fn.with_info(params, batch, keep, rng, scale=scale, bound=bound)
        return summed.value, info

    return run


def _classifier(module, shape, classes=4):
    def make():
        x = jax.random.normal(jax.random.key(1), (ROWS, *shape))
        y = jnp.arange(ROWS, dtype=jnp.int32) % classes
        params = jax.jit(module.init)(jax.random.key(0), x[:1])

        def loss_fn(params, example):
            image, label = example
            logits = module.apply(params, image[None])[0]
            return optax.softmax_cross_entropy_with_integer_labels(logits, label)

        return params, loss_fn, (x, y)

    return make


def _papers_cnn(name, shape):
    def make():
        model = models.build(name, num_classes=10, example_shape=shape)
        params = models.init(model, jax.random.key(0), shape)
        x = jax.random.uniform(jax.random.key(1), (ROWS, *shape))
        return params, models.cross_entropy(model), (x, jnp.arange(ROWS, dtype=jnp.int32))

    return make


class Convolutions(nn.Module):
    """Grouped, dilated, strided and transposed, with uneven padding."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(6, (3, 3), feature_group_count=3, padding=((1, 0), (0, 2)))(x))
        x = jnp.tanh(nn.Conv(4, (3, 2), kernel_dilation=2, padding="SAME")(x))
        x = nn.gelu(nn.ConvTranspose(5, (3, 3), strides=(2, 2))(x))
        x = jnp.tanh(nn.Conv(4, (3, 3), strides=(3, 2), padding="VALID")(x))
        return nn.Dense(4)(x.reshape(x.shape[0], -1))


class Normalised(nn.Module):
    """LayerNorm, GroupNorm and RMSNorm."""

    @nn.compact
    def __call__(self, x):
        x = nn.GroupNorm(num_groups=2)(nn.Conv(4, (3, 3))(x))
        x = nn.LayerNorm()(nn.Dense(8)(nn.relu(x).reshape(x.shape[0], -1)))
        return nn.Dense(4)(nn.RMSNorm()(x))


class Residual(nn.Module):
    """Two pre-activation blocks of a wide residual network."""

    @nn.compact
    def __call__(self, x):
        for width, stride in ((8, 1), (12, 2)):
            h = nn.relu(nn.GroupNorm(num_groups=4)(nn.Conv(8, (1, 1))(x)))
            short = nn.Conv(width, (1, 1), (stride, stride), use_bias=False)(h)
            h = nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(h)
            h = nn.relu(nn.GroupNorm(num_groups=4)(h))
            x = short + nn.Conv(width, (3, 3), use_bias=False)(h)
        return nn.Dense(4)(x.mean(axis=(1, 2)))


class Recurrent(nn.Module):
    """A recurrent cell by scan."""

    cell: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.RNN(self.cell)(x)[:, -1])


class Block(nn.Module):
    """A transformer block."""

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h)
        return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))


def _language_model(tied, remat=False):
    class LanguageModel(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            table = nn.Embed(11, 8)
            x = table(tokens) + self.param("places", nn.initializers.normal(), (6, 8))
            x = (nn.remat(Block) if remat else Block)(name="block")(x)
            return table.attend(x) if tied else nn.Dense(11, use_bias=False)(x)

    def make():
        module = LanguageModel()
        tokens = jax.random.randint(jax.random.key(1), (ROWS, 7), 0, 11)
        params = jax.jit(module.init)(jax.random.key(0), tokens[0, :-1])

        def loss_fn(params, tokens):
            logits = module.apply(params, tokens[:-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).sum()

        return params, loss_fn, tokens

    return make


def _of_two(loss_of):
    """Two weights [3, 5] and [5, 2, 2], and records [4, 3]."""

    def make():
        keys = jax.random.split(jax.random.key(0), 3)
        params = [jax.random.normal(keys[0], (3, 5)), jax.random.normal(keys[1], (5, 2, 2))]
        loss_fn = lambda params, x: jnp.sum(loss_of(*params, x))  # noqa: E731
        return params, loss_fn, jax.random.normal(keys[2], (ROWS, 4, 3))

    return make


def _plain(first, second, x):
    hidden = jnp.sin(jnp.einsum("ti,ij->tj", x, first))
    return jnp.square(jnp.einsum("kjl,tj->tkl", second.transpose(1, 0, 2), hidden))


def _used_twice(first, second, x):
    hidden = jnp.tanh(x @ first)
    back = hidden @ first.T  # the same weight the other way round
    return jnp.square(jnp.tanh(back) @ first) + jnp.sin(hidden) + jnp.sum(second) / hidden.size


def _non_linear(first, second, x):
    unit = first / jnp.sqrt(jnp.sum(jnp.square(first)))
    return jnp.square(x @ unit) + jnp.sum(second**3) * jnp.sum(x) / (4 * 5)


def _heads():
    """A weight with a batch axis of its own, and a matrix of positions by positions."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "heads": jax.random.normal(keys[0], (2, 3, 4)),
        "mix": jax.random.normal(keys[1], (5, 5)),
        "unused": jnp.ones(3),
    }

    def loss_fn(params, x):
        mixed = jnp.einsum("ts,shi->thi", params["mix"], x)
        return jnp.sum(jnp.tanh(jnp.einsum("hij,thi->thj", params["heads"], mixed)))

    return params, loss_fn, jax.random.normal(keys[2], (ROWS, 5, 2, 3))


def _nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Conv(2, 3, (3, 3), rngs=rngs)
            self.norm = nnx.LayerNorm(3, rngs=rngs)
            self.last = nnx.Linear(3 * 6 * 6, 4, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.norm(self.first(x))).reshape(-1))

    graph, params = nnx.split(Net(nnx.Rngs(0)))

    def loss_fn(params, example):
        logits = nnx.merge(graph, params)(example)
        return jax.nn.logsumexp(logits) - logits[0]

    return params, loss_fn, jax.random.normal(jax.random.key(1), (ROWS, 6, 6, 2))


def _low_rank():
    """A frozen weight with a trained low-rank update, written as a product of activations."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"frozen": (6, 5), "down": (6, 2), "up": (2, 5)}
    params = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=False)}

    def loss_fn(params, x):
        y = x @ params["frozen"] + x @ params["down"] @ params["up"]
        return jnp.sum(jnp.tanh(y))

    return params, loss_fn, jax.random.normal(keys[3], (ROWS, 3, 6))


def _scanned():
    """Rematerialised transformer blocks by a scan over their stacked parameters."""
    block, width, depth = Block(), 8, 3
    x = jax.random.normal(jax.random.key(1), (ROWS, 5, width))
    keys = jax.random.split(jax.random.key(0), depth)
    params = {"blocks": jax.vmap(lambda key: block.init(key, x[0]))(keys), "scale": jnp.ones(width)}

    def loss_fn(params, x):
        layer = jax.checkpoint(lambda h, p: (block.apply(p, h), None))
        h, _ = jax.lax.scan(layer, x, params["blocks"])
        return jax.nn.logsumexp(h @ params["scale"])

    return params, loss_fn, x


class MLP(nn.Module):
    """Three dense layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(jnp.tanh(nn.Dense(9)(nn.relu(nn.Dense(12)(x)))))


_MAKERS = {
    "mlp": _classifier(MLP(), (10,)), "mnist_cnn": _papers_cnn("mnist-cnn", (28, 28, 1)),
    "cifar_cnn": _papers_cnn("cifar-cnn", (32, 32, 3)),
    "convolutions": _classifier(Convolutions(), (9, 8, 3)),
    "normalised": _classifier(Normalised(), (5, 5, 3)),
    "residual": _classifier(Residual(), (8, 8, 3)),
    "gru": _classifier(Recurrent(nn.GRUCell(7)), (6, 3)),
    "lstm": _classifier(Recurrent(nn.OptimizedLSTMCell(5)), (6, 3)), "scanned": _scanned,
    "tied": _language_model(tied=True), "untied": _language_model(tied=False),
    "rematerialised": _language_model(tied=True, remat=True),
    "plain": _of_two(_plain), "used_twice": _of_two(_used_twice),
    "non_linear": _of_two(_non_linear), "heads": _heads, "nnx": _nnx, "low_rank": _low_rank,
}  # fmt: skip
# Each is made once: initialising a network costs more than a test of it.
ARCHITECTURES = {name: functools.cache(make) for name, make in _MAKERS.items()}
