"""Networks people also train privately: makers of (params, loss of one example, batch)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks import networks


class Residual(nn.Module):
    """A residual block of a diffusion U-Net, with the time step."""

    width: int

    @nn.compact
    def __call__(self, x, time):
        h = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
        h = h + nn.Dense(self.width)(nn.silu(time))
        h = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(8)(h)))
        return h + (x if x.shape[-1] == self.width else nn.Conv(self.width, (1, 1))(x))


class UNet(nn.Module):
    """Two levels down and up, attention in the middle: it tells the noise of a noisy image."""

    width: int = 32

    @nn.compact
    def __call__(self, x, time):
        waves = time * jnp.exp(-jnp.arange(16.0))
        time = nn.silu(nn.Dense(4 * self.width)(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)])))
        x, kept = nn.Conv(self.width, (3, 3))(x), []
        for level in (1, 2):
            x = Residual(level * self.width)(x, time)
            kept.append(x)
            x = nn.Conv(level * self.width, (3, 3), (2, 2))(x)
        x = Residual(2 * self.width)(x, time)
        flat = nn.GroupNorm(8)(x).reshape(*x.shape[:-3], -1, x.shape[-1])
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(flat).reshape(x.shape)
        for level in (2, 1):
            shape = *x.shape[:-3], 2 * x.shape[-3], 2 * x.shape[-2], x.shape[-1]
            x = nn.Conv(level * self.width, (3, 3))(jax.image.resize(x, shape, "nearest"))
            x = Residual(level * self.width)(jnp.concatenate([x, kept.pop()], -1), time)
        return nn.Conv(1, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))


def unet(batch=16, side=28):
    """A small U-Net with the loss of a diffusion model."""
    module = UNet()
    keys = jax.random.split(jax.random.key(0), 3)

    def loss_fn(params, example):
        image, time, noise = example
        noisy = jnp.cos(time) * image + jnp.sin(time) * noise
        return jnp.square(module.apply(params, noisy[None], time)[0] - noise).mean()

    images, noise = (jax.random.normal(key, (batch, side, side, 1)) for key in keys[:2])
    params = jax.jit(module.init)(keys[2], images[:1], jnp.float32(0.5))
    return params, loss_fn, (images, jax.random.uniform(keys[2], (batch,)), noise)


class ViT(nn.Module):
    """ViT-tiny: patches of 4 by 4, the mean of 64 positions."""

    layers: int = 6
    width: int = 192

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.width, (4, 4), (4, 4))(x).reshape(*x.shape[:-3], 64, self.width)
        x = x + nn.Embed(64, self.width)(jnp.arange(64))
        for _ in range(self.layers):
            x = networks.Block(self.width, 3)(x)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(-2))


class Mixer(nn.Module):
    """An MLP mixer over 64 patches."""

    layers: int = 4
    width: int = 128

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.width, (4, 4), (4, 4))(x).reshape(*x.shape[:-3], 64, self.width)
        for _ in range(self.layers):
            h = nn.LayerNorm()(x).swapaxes(-1, -2)
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(64)(h))).swapaxes(-1, -2)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(10)(nn.LayerNorm()(x).mean(-2))


def of_images(module, batch=32):
    """A classifier of images of CIFAR-10's shape."""
    return networks._classifier(module, jax.random.normal(jax.random.key(0), (batch, 32, 32, 3)))


def tabular(batch=256, columns=20, words=1000, width=16):
    """A table: columns of categories, looked up each in its own table, and numbers."""

    class Table(nn.Module):
        @nn.compact
        def __call__(self, x):
            numbers, ids = x[..., :8], x[..., 8:].astype(jnp.int32)
            found = [nn.Embed(words, width)(ids[..., i]) for i in range(columns)]
            x = jnp.concatenate([numbers, *found], -1)
            for size in (256, 128):
                x = nn.relu(nn.Dense(size)(x))
            return nn.Dense(2)(x)

    keys = jax.random.split(jax.random.key(0))
    ids = jax.random.randint(keys[0], (batch, columns), 0, words)
    x = jnp.concatenate([jax.random.normal(keys[1], (batch, 8)), ids.astype(jnp.float32)], 1)
    return networks._classifier(Table(), x, classes=2)


def scanned_cnn(batch=32, layers=6, width=32):
    """Stacked convolutions under ``scan``."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "in": 0.1 * jax.random.normal(keys[0], (3, 3, 3, width)),
        "stack": 0.05 * jax.random.normal(keys[1], (layers, 3, 3, width, width)),
        "out": 0.1 * jax.random.normal(keys[2], (width, 10)),
    }

    def convolve(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)

    def loss_fn(params, example):
        x = convolve(example[0][None], params["in"])
        x, _ = jax.lax.scan(lambda x, k: (x + nn.relu(convolve(x, k)), None), x, params["stack"])
        logits = x[0].mean((0, 1)) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, example[1])

    x = jax.random.normal(keys[3], (batch, 16, 16, 3))
    return params, loss_fn, (x, jnp.arange(batch, dtype=jnp.int32) % 10)
