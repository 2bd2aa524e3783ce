"""The two layers of ``patches`` image by image, as shipped: products of unfolded patches.

Positions are innermost, and a layer's patches are gathered by the parity of their place, so that
every slice is contiguous and the mean of 2 × 2 places is one of four blocks.
"""

import jax
import jax.numpy as jnp

from benchmarks.encoder.patches import THRESHOLD, Layer


def encoded(first: Layer, second: Layer, images: jax.Array, step: int = 2) -> jax.Array:
    """[n, 8 · second + 32 · first filters] of images [n, 32, 32, 3], one after the other.

    The second layer's responses (at every ``step``-th place) in 2 × 2 cells, then the first's in
    4 × 4, channels outermost: the means with those of the mirrored image.
    """

    def one(image: jax.Array) -> jax.Array:
        x = image.transpose(2, 0, 1)
        low = [_pooled(first, view) for view in (x, x[:, :, ::-1])]
        places = [_unfolded(y, 3, step, [(0, 0)]) for y in low]
        high = _responses(second, jnp.concatenate(places, 1))
        side = low[0].shape[1] // step
        high = high.reshape(-1, 2, side, side).mean(1)
        return jnp.concatenate([_cells(high, 2), _cells((low[0] + low[1]) / 2, 4)])

    return jax.lax.map(one, images)


def _pooled(layer: Layer, x: jax.Array) -> jax.Array:
    """[2 count, h / 2, w / 2]: means of 2 × 2 places of the responses to x [c, h, w]."""
    parities = [(a, b) for a in (0, 1) for b in (0, 1)]
    y = _responses(layer, _unfolded(x, layer.kernel.shape[0], 2, parities))
    return y.reshape(-1, 4, x.shape[1] // 2, x.shape[2] // 2).mean(1)


def _unfolded(x: jax.Array, side: int, step: int, starts: list[tuple[int, int]]) -> jax.Array:
    """[c · side², places]: patches of x [c, n, n], at every ``step``-th place from each start."""
    channels, n, _ = x.shape
    before, count = (side - 1) // 2, n // step
    x = jnp.pad(x, [(0, 0), *[(before, side // 2)] * 2], mode="edge")
    x = jnp.pad(x, [(0, 0), *[(0, -x.shape[1] % step)] * 2])
    grid = x.reshape(channels, -1, step, x.shape[2] // step, step).transpose(2, 4, 0, 1, 3)

    def under(a: int, b: int) -> jax.Array:
        rows, columns = slice(a // step, a // step + count), slice(b // step, b // step + count)
        return grid[a % step, b % step, :, rows, columns].reshape(channels, -1)

    offsets = [(i, j) for i in range(side) for j in range(side)]
    found = [jnp.stack([under(a + i, b + j) for i, j in offsets], 1) for a, b in starts]
    return jnp.concatenate([part.reshape(channels * side**2, -1) for part in found], 1)


def _responses(layer: Layer, patches: jax.Array) -> jax.Array:
    """[2 count, places]: above the threshold, then below minus it."""
    filters = jnp.asarray(layer.kernel, jnp.float32).transpose(3, 2, 0, 1)
    y = jnp.matmul(filters.reshape(len(filters), -1), patches)
    mean = patches.mean(0, keepdims=True)
    variance = jnp.maximum(jnp.square(patches).mean(0, keepdims=True) - mean**2, 0)
    y = y * jax.lax.rsqrt(variance + layer.contrast**2)
    y = y + jnp.asarray(layer.bias, jnp.float32)[:, None]
    return jnp.concatenate([jax.nn.relu(y - THRESHOLD), jax.nn.relu(-y - THRESHOLD)])


def _cells(x: jax.Array, cells: int) -> jax.Array:
    """[c · cells²]: means of x [c, n, n] over a grid of cells."""
    side = x.shape[1] // cells
    return x.reshape(-1, cells, side, cells, side).mean((2, 4)).reshape(-1)
