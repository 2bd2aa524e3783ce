"""Images of a random process: a pile of leaves with bent outlines, filled with random textures.

As ``benchmarks.dead_leaves``, but a leaf is bent and filled with one of its image's few textures:
noise of a random oriented spectrum (Baradad et al. 2021, "Learning to see by looking at noise",
arXiv:2106.05963), or a random function of the place (as Stanley 2007, "Compositional pattern
producing networks"; Baradad et al. 2022, "Procedural image programs", arXiv:2211.16412). No data
of anybody's.
"""

import jax
import jax.numpy as jnp
import numpy as np

SIDE, LEAVES, LARGE, TEXTURES, WIDTH = 64, 28, 8, 4, 12
_AT_ONCE = 64


def images(seed: int, numbers: np.ndarray) -> np.ndarray:
    """uint8 [n, SIDE, SIDE, 3], each a function of the seed and its own number alone."""
    count = len(numbers)
    padded = np.pad(np.asarray(numbers, np.uint32), (0, -count % _AT_ONCE), mode="edge")
    parts = [
        np.asarray(_images(jax.random.key(seed), part)) for part in padded.reshape(-1, _AT_ONCE)
    ]
    return np.concatenate(parts)[:count]


@jax.jit
def _images(key: jax.Array, numbers: jax.Array) -> jax.Array:
    # One after the other: of many at once, the last digits may depend on an image's place.
    return jax.lax.map(lambda i: _image(jax.random.fold_in(key, i)), numbers)


def _image(key: jax.Array) -> jax.Array:
    """uint8 [SIDE, SIDE, 3]."""
    keys = iter(jax.random.split(key, 8))
    colours = _colours(next(keys))
    textures = _textures(next(keys), next(keys))
    filled = jax.vmap(_coloured)(textures, colours)
    leaves = _leaves(next(keys))

    def laid(canvas: jax.Array, leaf: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        own = jnp.roll(filled[leaf["texture"]], leaf["shift"], (0, 1))
        colour = (
            leaf["flat"] * leaf["colour"].reshape(1, 1, -1)
            + (1 - leaf["flat"]) * own
            + leaf["tint"]
        )
        cover, shade = _outlined(leaf)
        return canvas + (colour + shade - canvas) * cover, None

    canvas = jax.lax.scan(laid, filled[0], leaves)[0]
    # Of the whole: light from a side, contrast, brightness.
    slope, last = 0.3 / SIDE * jax.random.normal(next(keys), (2,)), next(keys)
    down, across = _grid()
    contrast, light = jax.random.uniform(
        last, (2,), minval=jnp.asarray([0.6, -0.15]), maxval=jnp.asarray([1.3, 0.15])
    )
    canvas = (canvas + (slope[0] * down + slope[1] * across)[..., None] - 0.5) * contrast
    return jnp.round(255 * jnp.clip(canvas + 0.5 + light, 0, 1)).astype(jnp.uint8)


def _grid() -> tuple[jax.Array, jax.Array]:
    middle = jnp.arange(SIDE, dtype=jnp.float32) + 0.5 - SIDE / 2
    return middle[:, None], middle[None, :]


def _colours(key: jax.Array) -> jax.Array:
    """[TEXTURES, 3 points of a curve, 3]: of one light and tint, each with its own about them."""
    keys = iter(jax.random.split(key, 5))
    light = jax.random.uniform(next(keys), (1, 1, 1), minval=0.25, maxval=0.75)
    light = light + 0.22 * jax.random.normal(next(keys), (TEXTURES, 3, 1))
    tint = 0.1 * jax.random.normal(next(keys), (1, 1, 3))
    tint = tint + 0.1 * jax.random.normal(next(keys), (TEXTURES, 1, 3))
    return light + tint + 0.06 * jax.random.normal(next(keys), (TEXTURES, 3, 3))


def _coloured(texture: jax.Array, colours: jax.Array) -> jax.Array:
    """[SIDE, SIDE, 3]: the curve through three colours at a texture's values in [0, 1]."""
    t, colours = texture[..., None], colours[:, None, None]
    return colours[0] * (1 - t) ** 2 + colours[1] * 2 * t * (1 - t) + colours[2] * t**2


def _textures(noise: jax.Array, places: jax.Array) -> jax.Array:
    """[TEXTURES, SIDE, SIDE] in [0, 1]: half of them noise, half functions of the place."""
    half = TEXTURES // 2
    both = jax.vmap(_noise)(jax.random.split(noise, half))
    both = jnp.concatenate([both, jax.vmap(_pattern)(jax.random.split(places, half))])
    return jax.nn.sigmoid(1.5 * both)


def _standard(x: jax.Array) -> jax.Array:
    return (x - jnp.mean(x)) / (jnp.std(x) + 1e-3)


def _noise(key: jax.Array) -> jax.Array:
    """Noise with amplitude f⁻ᵅ along two axes of their own scales, at times folded or waved."""
    keys = iter(jax.random.split(key, 4))
    white = jax.random.normal(next(keys), (SIDE, SIDE))
    power, angle, slant, fold = jax.random.uniform(next(keys), (4,))
    kind = jax.random.randint(next(keys), (), 0, 4)
    down, across = jnp.fft.fftfreq(SIDE)[:, None], jnp.fft.rfftfreq(SIDE)[None, :]
    cos, sin = jnp.cos(np.pi * angle), jnp.sin(np.pi * angle)
    along, aside = cos * across + sin * down, cos * down - sin * across
    stretch = jnp.exp(1.5 * slant)
    rate = jnp.sqrt((along * stretch) ** 2 + (aside / stretch) ** 2) + 0.5 / SIDE
    amplitude = (rate ** (-0.4 - 1.8 * power)).astype(jnp.complex64)
    found = _standard(jnp.fft.irfft2(jnp.fft.rfft2(white) * amplitude, (SIDE, SIDE)))
    folded = [
        found,
        _standard(jnp.abs(found)),
        jnp.sin((1 + 5 * fold) * found),
        jnp.tanh(4 * found),
    ]
    return jnp.select([kind == i for i in range(4)], folded)


def _pattern(key: jax.Array) -> jax.Array:
    """A network of three layers of waves, of the place, with random weights."""
    keys = iter(jax.random.split(key, 8))
    down, across = _grid()
    x = jnp.stack(jnp.broadcast_arrays(down, across), -1) * (2 * np.pi / SIDE)
    rate = jnp.exp(jax.random.uniform(next(keys), (), minval=-0.7, maxval=2.0))
    x = jnp.sin(
        x @ (rate * jax.random.normal(next(keys), (2, WIDTH)))
        + 6 * jax.random.uniform(next(keys), (1, 1, WIDTH))
    )
    for _ in range(2):
        gain = jnp.exp(jax.random.uniform(next(keys), (), minval=-0.5, maxval=1.0))
        x = jnp.sin(
            x @ (gain * jax.random.normal(next(keys), (WIDTH, WIDTH)) / np.sqrt(WIDTH) * 1.4)
        )
    return _standard(x @ jax.random.normal(next(keys), (WIDTH,)))


def _leaves(key: jax.Array) -> dict[str, jax.Array]:
    """The leaves from the lowest on: large ones, then radii with density r⁻³."""
    keys = iter(jax.random.split(key, 20))

    def uniform(*shape: int, least: float = 0.0, most: float = 1.0) -> jax.Array:
        return jax.random.uniform(next(keys), shape, minval=least, maxval=most)

    small = jnp.minimum(0.05 * SIDE / jnp.sqrt(uniform(LEAVES) + 1e-3), 0.5 * SIDE)
    large = uniform(LEAVES, least=0.15 * SIDE, most=0.5 * SIDE)
    light = uniform() + 0.3 * jax.random.normal(next(keys), (LEAVES, 1))
    # An image shows so many of them, the first of either kind.
    shown_large = uniform(least=1, most=LARGE + 1)
    shown_small = (LEAVES - LARGE) * uniform() ** 1.5
    order = jnp.arange(LEAVES, dtype=jnp.float32)
    return {
        "shown": jnp.where(order < LARGE, order < shown_large, order - LARGE < shown_small),
        "radius": jnp.where(jnp.arange(LEAVES, dtype=jnp.float32) < LARGE, large, small),
        "aspect": jnp.exp(uniform(LEAVES, least=-0.8, most=0.8)),
        "angle": uniform(LEAVES, most=np.pi),
        "power": jnp.exp(uniform(LEAVES, least=0.0, most=2.0)),
        "bends": 0.25
        * jax.random.normal(next(keys), (LEAVES, 4, 2))
        / jnp.arange(1.0, 5.0)[None, :, None] ** 0.5,
        "bent": uniform(LEAVES),
        "soft": jnp.exp(uniform(LEAVES, least=-0.7, most=1.2)),
        "centre": SIDE * (uniform(LEAVES, 2) - 0.5),
        "texture": jax.random.randint(next(keys), (LEAVES,), 0, TEXTURES),
        "shift": jax.random.randint(next(keys), (LEAVES, 2), 0, SIDE),
        "flat": jnp.maximum(0.0, uniform(LEAVES, least=-1.0, most=1.0)),
        "colour": jnp.clip(light, 0, 1) + 0.14 * jax.random.normal(next(keys), (LEAVES, 3)),
        "tint": 0.1 * jax.random.normal(next(keys), (LEAVES,)),
        "slope": 0.5 / SIDE * jax.random.normal(next(keys), (LEAVES, 2)),
    }


def _outlined(leaf: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(cover in [0, 1], shade), each [SIDE, SIDE, 1], of one leaf."""
    down, across = _grid()
    down, across = down - leaf["centre"][0], across - leaf["centre"][1]
    cos, sin = jnp.cos(leaf["angle"]), jnp.sin(leaf["angle"])
    along = (cos * across + sin * down) / (leaf["radius"] * leaf["aspect"])
    aside = (cos * down - sin * across) / leaf["radius"] * leaf["aspect"]
    # Between a diamond and a box, then bent by waves around it: cos and sin of k times the angle.
    p = leaf["power"]
    far = (jnp.abs(along) ** p + jnp.abs(aside) ** p + 1e-6) ** (1 / p)
    norm = jax.lax.rsqrt(along**2 + aside**2 + 1e-6)
    c1, s1 = along * norm, aside * norm
    c, s, bend = c1, s1, jnp.zeros_like(far)
    for k in range(4):
        c, s = c * c1 - s * s1, s * c1 + c * s1
        bend = bend + leaf["bends"][k, 0] * c + leaf["bends"][k, 1] * s
    far = far * (1 + leaf["bent"] * jnp.clip(bend, -0.8, 2.0))
    cover = jnp.clip((1 - far) * leaf["radius"] / leaf["soft"] + 0.5, 0, 1)
    shade = leaf["slope"][0] * down + leaf["slope"][1] * across
    return jnp.where(leaf["shown"], cover, 0.0)[..., None], shade[..., None]
