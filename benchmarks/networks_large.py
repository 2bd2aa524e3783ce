"""Networks of the size people fine-tune: makers of (params, loss of one example, batch).

``shapes=True`` gives shapes in place of arrays, to compile without holding them.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks import networks
from jaxdp import clipping


def _normal(key, *shape):
    return 0.02 * jax.random.normal(key, shape)


def _gpt_params(key, vocabulary, length, width, layers):
    keys = iter(jax.random.split(key, 8))
    stack = lambda *shape: _normal(next(keys), layers, *shape)  # noqa: E731
    ones, zeros = jnp.ones((layers, width)), jnp.zeros((layers, width))
    blocks = {
        "ln_1": {"scale": ones, "bias": zeros},
        "ln_2": {"scale": ones, "bias": zeros},
        "qkv": {"w": stack(width, 3 * width), "b": jnp.zeros((layers, 3 * width))},
        "out": {"w": stack(width, width), "b": zeros},
        "up": {"w": stack(width, 4 * width), "b": jnp.zeros((layers, 4 * width))},
        "down": {"w": stack(4 * width, width), "b": zeros},
    }
    tables = {
        "wte": _normal(next(keys), vocabulary, width),
        "wpe": _normal(next(keys), length, width),
    }
    return {**tables, "blocks": blocks, "ln": {"scale": ones[0], "bias": zeros[0]}}


def _layer_norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def _affine(p, x):
    out = x @ p["w"] + p["b"]
    return out + (x @ p["lora_a"]) @ p["lora_b"] if "lora_a" in p else out


def _block(heads, x, p, causal=True):
    length, width = x.shape
    qkv = _affine(p["qkv"], _layer_norm(p["ln_1"], x)).reshape(length, 3, heads, width // heads)
    mixed = jax.nn.dot_product_attention(*(qkv[None, :, i] for i in range(3)), is_causal=causal)[0]
    x = x + _affine(p["out"], mixed.reshape(length, width))
    return x + _affine(p["down"], jax.nn.gelu(_affine(p["up"], _layer_norm(p["ln_2"], x))))


def gpt(
    batch=64, length=128, vocabulary=50_257, width=768, layers=12, heads=12,
    scanned=True, remat=True, dtype=jnp.float32, shapes=False, rank=0, whole=None,
):  # fmt: skip
    """GPT-2 (small, as it stands): stacked blocks under ``scan`` or written out, tied head.

    With a ``rank`` queries, keys and values have adapters of it (LoRA). ``remat`` may be a policy.
    ``whole``, of a name and that part of the parameters, or one layer of them, is called where they
    are used.
    """

    def make():
        params = _gpt_params(jax.random.key(0), vocabulary, length, width, layers)
        if rank:
            one, other = jax.random.split(jax.random.key(2))
            params["blocks"]["qkv"] |= {
                "lora_a": _normal(one, layers, width, rank),
                "lora_b": _normal(other, layers, rank, 3 * width),
            }
        tokens = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, vocabulary)
        return jax.tree.map(lambda p: p.astype(dtype), params), tokens

    def loss_fn(params, tokens):
        block = functools.partial(_block, heads)
        if whole is not None:
            block = lambda x, p: _block(heads, x, whole("blocks", p))  # noqa: E731
            tables = {name: whole(name, p) for name, p in params.items() if name != "blocks"}
            params = params | tables
        x = params["wte"][tokens[:-1]] + params["wpe"]
        block = jax.checkpoint(block, policy=remat if callable(remat) else None) if remat else block
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["blocks"])
        else:
            for i in range(layers):
                x = block(x, jax.tree.map(lambda p, i=i: p[i], params["blocks"]))
        logits = _layer_norm(params["ln"], x) @ params["wte"].T
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()

    params, tokens = jax.eval_shape(make) if shapes else make()
    return params, loss_fn, tokens


class SmallCNN(nn.Module):
    """Five convolutions of 32 channels."""

    @nn.compact
    def __call__(self, x):
        for _ in range(5):
            x = nn.relu(nn.Conv(32, (3, 3))(x))
        return nn.Dense(10)(x.mean((1, 2)))


def small_cnn(batch=32):
    """Five convolutions of 32 channels on images of CIFAR-10's shape."""
    x = jax.random.normal(jax.random.key(0), (batch, 32, 32, 3))
    return networks._classifier(SmallCNN(), x)


class ResNet18(nn.Module):
    """ResNet-18 with GroupNorm, for small images."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(16)(nn.Conv(64, (3, 3), use_bias=False)(x)))
        for stage, width in enumerate((64, 128, 256, 512)):
            for block in range(2):
                stride = 2 if stage and not block else 1
                h = nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(x)
                h = nn.relu(nn.GroupNorm(16)(h))
                h = nn.GroupNorm(16)(nn.Conv(width, (3, 3), use_bias=False)(h))
                if x.shape != h.shape:
                    x = nn.Conv(width, (1, 1), (stride, stride), use_bias=False)(x)
                    x = nn.GroupNorm(16)(x)
                x = nn.relu(x + h)
        return nn.Dense(10)(x.mean((1, 2)))


def resnet18(batch=8):
    """ResNet-18 with GroupNorm on images of CIFAR-10's shape."""
    x = jax.random.normal(jax.random.key(0), (batch, 32, 32, 3))
    return networks._classifier(ResNet18(), x)


class Recurrent(nn.Module):
    """An embedding, a recurrent layer and a classifier."""

    cell: type
    width: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(1000, self.width)(tokens)
        return nn.Dense(10)(nn.RNN(self.cell(self.width))(x)[:, -1])


def recurrent(cell=nn.OptimizedLSTMCell, batch=32, length=64, width=128):
    """A text classifier with recurrent cells."""
    tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, 1000)
    return networks._classifier(Recurrent(cell, width), tokens)


def vision_transformer(
    batch=64, size=224, patch=16, width=768, layers=12, heads=12, classes=1000, shapes=True
):
    """ViT-B/16 (as it stands): 86 million parameters, blocks written out."""
    places = (size // patch) ** 2 + 1

    def make():
        keys = iter(jax.random.split(jax.random.key(0), 4))
        params = _gpt_params(next(keys), 1, places, width, layers)
        blocks = params.pop("blocks")
        params["blocks"] = [jax.tree.map(lambda p, i=i: p[i], blocks) for i in range(layers)]
        params["patch"] = {"w": _normal(next(keys), patch, patch, 3, width), "b": jnp.zeros(width)}
        params["head"] = {"w": _normal(next(keys), width, classes), "b": jnp.zeros(classes)}
        images = jax.random.normal(next(keys), (batch, size, size, 3))
        return params, (images, jnp.arange(batch, dtype=jnp.int32) % classes)

    def loss_fn(params, example):
        image, label = example
        strides, kernel = (patch, patch), params["patch"]["w"]
        layout = ("NHWC", "HWIO", "NHWC")
        cut = jax.lax.conv_general_dilated(
            image[None], kernel, strides, "VALID", dimension_numbers=layout
        )
        x = cut.reshape(-1, width) + params["patch"]["b"]
        x = jnp.concatenate([params["wte"], x]) + params["wpe"]
        for block in params["blocks"]:
            x = _block(heads, x, block, causal=False)
        logits = _affine(params["head"], _layer_norm(params["ln"], x)[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    params, batch = jax.eval_shape(make) if shapes else make()
    return params, loss_fn, batch


def with_views(made, views=16):
    """A network for images whose every record is seen in so many random flips and shifts."""
    params, loss_fn, batch = made

    def augment(example, key):
        image, label = example
        flip, shift = jax.random.split(key)
        image = jnp.where(jax.random.bernoulli(flip), image[:, ::-1], image)
        y, x = jax.random.randint(shift, (2,), 0, 9)
        padded = jnp.pad(image, ((4, 4), (4, 4), (0, 0)))
        return jax.lax.dynamic_slice(padded, (y, x, 0), image.shape), label

    mean = clipping.augmented(loss_fn, augment, views)
    return params, lambda params, example: mean(params, example, jax.random.key(0)), batch
