"""Images of a random process: opaque leaves of random size, shape, colour, texture, in a pile.

Lee, Mumford and Huang 2001, "Occlusion models for natural images"; Baradad et al. 2021, "Learning
to see by looking at noise" (arXiv:2106.05963), pre-train networks on such images. No data of
anybody's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

LEAVES, LARGE = 72, 10
_AT_ONCE = 500


def images(seed: int, count: int, side: int, channels: int) -> np.ndarray:
    """float32 [count, side, side, channels] in [0, 1], a function of the arguments alone."""
    key = jax.random.key(seed)
    parts = [
        np.asarray(_images(jax.random.fold_in(key, i), _AT_ONCE, side, channels))
        for i in range(-(-count // _AT_ONCE))
    ]
    return np.concatenate(parts)[:count]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _images(key: jax.Array, count: int, side: int, channels: int) -> jax.Array:
    keys = jax.random.split(key, count)
    return jax.vmap(lambda k: _image(k, side, channels))(keys)


def _image(key: jax.Array, side: int, channels: int) -> jax.Array:
    leaves = _leaves(key, side, channels)

    def laid(canvas: jax.Array, leaf: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        inside, colour = _painted(leaf, side)
        return canvas + (colour - canvas) * inside, None

    ground = jnp.broadcast_to(leaves["colour"][-1], (side, side, channels))
    return jnp.clip(jax.lax.scan(laid, ground, leaves)[0], 0, 1)


def _leaves(key: jax.Array, side: int, channels: int) -> dict[str, jax.Array]:
    """The leaves from the lowest on: ten large ones, then radii with density r⁻³."""
    keys = iter(jax.random.split(key, 12))

    def uniform(*shape: int, least: float = 0.0, most: float = 1.0) -> jax.Array:
        return jax.random.uniform(next(keys), shape, minval=least, maxval=most)

    small = jnp.minimum(0.045 * side / jnp.sqrt(uniform(LEAVES) + 1e-3), 0.6 * side)
    large = uniform(LEAVES, least=0.15 * side, most=0.6 * side)
    light = uniform() + 0.3 * jax.random.normal(next(keys), (LEAVES, 1))
    tint = 0.12 * jax.random.normal(next(keys), (1, channels))
    tint = tint + 0.1 * jax.random.normal(next(keys), (LEAVES, channels))
    return {
        "radius": jnp.where(jnp.arange(LEAVES) < LARGE, large, small),
        "aspect": jnp.exp(uniform(LEAVES, least=-0.8, most=0.8)),
        "angle": uniform(LEAVES, most=np.pi),
        "shape": jax.random.randint(next(keys), (LEAVES,), 0, 4),
        "centre": side * uniform(LEAVES, 2),
        "colour": jnp.clip(light, 0, 1) + (tint if channels > 1 else 0.0),
        "wave": uniform(LEAVES, 4),
        "slope": 0.25 / side * jax.random.normal(next(keys), (LEAVES, 2)),
    }


def _painted(leaf: dict[str, jax.Array], side: int) -> tuple[jax.Array, jax.Array]:
    """(cover [side, side, 1] in [0, 1], colour [side, side, channels]) of one leaf."""
    middle = jnp.arange(side, dtype=jnp.float32) + 0.5
    down = (middle - leaf["centre"][0])[:, None]
    across = (middle - leaf["centre"][1])[None, :]
    cos, sin = jnp.cos(leaf["angle"]), jnp.sin(leaf["angle"])
    along = jnp.abs(cos * across + sin * down) / (leaf["radius"] * leaf["aspect"])
    aside = jnp.abs(cos * down - sin * across) / leaf["radius"] * leaf["aspect"]
    ellipse, diamond, box = along**2 + aside**2, along + aside, jnp.maximum(along, aside)
    far = jnp.where(leaf["shape"] < 2, ellipse, jnp.where(leaf["shape"] == 2, diamond, box))
    inside = jnp.clip((1 - far) * leaf["radius"] / 2 + 0.5, 0, 1)
    # Two leaves in five have stripes, of 4 to 20 pixels.
    strength, rate, turn, phase = leaf["wave"]
    turn, phase = np.pi * turn, 2 * np.pi * phase
    place = jnp.cos(turn) * across + jnp.sin(turn) * down
    stripes = jnp.maximum(strength - 0.6, 0) / 2 * jnp.sin((0.3 + 1.5 * rate) * place + phase)
    shade = leaf["slope"][0] * across + leaf["slope"][1] * down
    return inside[..., None], leaf["colour"].reshape(1, 1, -1) + (stripes + shade)[..., None]
