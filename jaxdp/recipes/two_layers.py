"""Two layers of filters that are whitened patches of images of a random process; nobody's data.

The first layer is that of ``jaxdp.features.pretrained``; the second does the same with patches of
what the first gives. Such layers are not trained (Coates and Ng 2011, "The importance of encoding
versus training with sparse coding and vector quantization"; Mairal 2016, "End-to-end kernel
learning with supervised convolutional kernel networks", arXiv:1605.06265, stacks them). Their
filters, and the numbers that centre and whiten what they give, come from the process alone
(``python -m benchmarks.two_layers``).
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Of the first layer by the number of an image's channels, then of the second; their sides.
FILTERS = {1: (64, 512), 3: (128, 1024)}
SIDE, NEXT_SIDE = 6, 3
# What a response must exceed, on either side, and the groups in which a part is normalised.
THRESHOLD, GROUPS = 0.5, 16
# Cells on each side, by channels: of the second layer's responses, then of the first's.
CELLS = {1: (2, 7), 3: (2, 4)}
# Images are continued by their edges to whole tiles of the first layer's pooled responses.
_MULTIPLE = 4
_EXACT = jax.lax.Precision.HIGHEST
# Winograd's F(2 × 2, 3 × 3): 2 × 2 sums of 9 products from 4 × 4 numbers by 16 products (Lavin and
# Gray 2016, "Fast algorithms for convolutional neural networks", arXiv:1509.09308v2, Section 4.1).
_KERNEL = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)


class Layer(NamedTuple):
    """Responses of contrast-normalised patches.

    Attributes:
        kernel: [count, channels, side, side], the sum of each filter 0; see ``ready``.
        bias: [count], added to a response.
        contrast: added to a patch's deviation.
    """

    kernel: Any
    bias: Any
    contrast: Any


class Whitened(NamedTuple):
    """Public numbers that centre and whiten a part's channels, as ``dp_whitening`` does by data.

    Attributes:
        mean: [channels, places].
        directions: [channels, k], orthonormal: those of the largest variance.
        factors: [k + 1], by which these are multiplied, and last all others.
    """

    mean: jax.Array
    directions: jax.Array
    factors: jax.Array


class TwoLayers(NamedTuple):
    """Both layers and their whitening, as ``jaxdp/recipes/weights`` holds them.

    Attributes:
        layers: the first and the second.
        parts: the whitening of the second's cells, and of the first's.
    """

    layers: tuple[Layer, Layer]
    parts: tuple[Whitened, Whitened]


def stored(weights: TwoLayers) -> dict[str, np.ndarray]:
    """The arrays of a file: float16, but the second kernel, each filter in 8 bits by its scale."""
    named = dict(zip(("first", "second"), weights.layers, strict=True))
    parts = dict(zip(("second_cells", "first_cells"), weights.parts, strict=True))
    found = {
        f"{name}.{field}": np.asarray(value, np.float16)
        for name, one in (named | parts).items()
        for field, value in one._asdict().items()
    }
    kernel = weights.layers[1].kernel
    scale = np.abs(kernel).max((1, 2, 3)) / 127
    found["second.kernel"] = np.rint(kernel / scale[:, None, None, None]).astype(np.int8)
    return found | {"second.scale": scale.astype(np.float16)}


def of_stored(arrays: Mapping[str, np.ndarray]) -> TwoLayers:
    """The weights in float32 of the arrays of a file."""
    x = {name: array.astype(np.float32) for name, array in arrays.items()}
    kernel = x["second.kernel"] * x["second.scale"][:, None, None, None]
    x["second.kernel"] = kernel - kernel.mean((1, 2, 3), keepdims=True)

    def of(kind: type[Any], name: str) -> Any:
        return kind(*(jnp.asarray(x[f"{name}.{field}"]) for field in kind._fields))

    layers = of(Layer, "first"), of(Layer, "second")
    return TwoLayers(layers, (of(Whitened, "second_cells"), of(Whitened, "first_cells")))


def numbers_of(channels: int) -> int:
    """The numbers that an image of ``channels`` channels has: 12,288 in colour, 10,368 in grey."""
    (first, second), (coarse, fine) = FILTERS[channels], CELLS[channels]
    return 2 * (second * coarse**2 + first * fine**2)


@functools.partial(jax.jit, static_argnames="mirrored")
def encoded(weights: TwoLayers, images: jax.Array, mirrored: bool) -> jax.Array:
    """[n, numbers] of images [n, height, width, channels], one after the other.

    Args:
        weights: with layers of ``ready``.
        images: in [0, 1].
        mirrored: whether each part is the mean with the mirrored image's.
    """

    def one(image: jax.Array) -> jax.Array:
        parts = zip(cells(weights.layers, image, mirrored), weights.parts, strict=True)
        found = [whitened(normalised(x), numbers).reshape(-1) for x, numbers in parts]
        return jnp.concatenate(found)

    return jax.lax.map(one, images)


def ready(layers: tuple[Layer, Layer]) -> tuple[Layer, Layer]:
    """The layers with the second's kernel as ``cells`` takes it: 4 × 4 of [count, channels].

    They are arrays of their own: a slice of one array would be copied for every image.
    """
    first, second = layers
    both_ways = "ia,fcab,jb->ijfc", _KERNEL, second.kernel, _KERNEL
    kernel = jnp.einsum(*both_ways, precision=_EXACT)
    return first, second._replace(kernel=[list(row) for row in kernel])


def cells(layers: tuple[Layer, Layer], image: jax.Array, mirrored: bool) -> list[jax.Array]:
    """Means [2 count, places] over cells of the second layer's responses, and of the first's.

    Args:
        layers: of ``ready``.
        image: [height, width, channels].
        mirrored: whether they are the means with the mirrored image's.
    """
    coarse, fine = CELLS[image.shape[2]]
    sides = [(-side % _MULTIPLE) for side in image.shape[:2]]
    widths = [(0, 0), *((side // 2, side - side // 2) for side in sides)]
    x = jnp.pad(image.transpose(2, 0, 1), widths, mode="edge")
    views = [x, x[:, :, ::-1]] if mirrored else [x]
    low = [pooled(layers[0], view) for view in views]
    mean = functools.reduce(jnp.add, low) / len(low)
    return [_second(layers[1], low, coarse), _in_cells(mean, fine)]


def normalised(x: jax.Array) -> jax.Array:
    """[channels, places] with mean 0 and variance 1 in groups: ``features.group_normalised``."""
    grouped = x.reshape(GROUPS, -1)
    grouped = grouped - grouped.mean(1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.square(grouped).mean(1, keepdims=True) + 1e-5)
    return (grouped * scale).reshape(x.shape)


def whitened(x: jax.Array, numbers: Whitened) -> jax.Array:
    """[channels, places] of such: centred, and each direction by its factor."""
    x, last = x - numbers.mean, numbers.factors[-1]
    along = jnp.matmul(numbers.directions.T, x, precision=_EXACT)
    along = along * (numbers.factors[:-1] - last).reshape(-1, 1)
    found = jnp.matmul(numbers.directions, along, precision=_EXACT)
    return found + last * x


def pooled(layer: Layer, x: jax.Array) -> jax.Array:
    """[2 count, h / 2, w / 2] of x [channels, h, w]: responses, then means of 2 × 2 places.

    Patches are gathered by the parity of their place, so that slices are contiguous and the mean is
    one of four blocks.
    """
    channels, height, width = x.shape
    before, down, across = (SIDE - 1) // 2, height // 2, width // 2
    x = jnp.pad(x, [(0, 0), *[(before, SIDE - before)] * 2], mode="edge")
    by_parity = x.reshape(channels, x.shape[1] // 2, 2, x.shape[2] // 2, 2).transpose(2, 4, 0, 1, 3)

    def under(i: int, j: int) -> jax.Array:
        at = by_parity[i % 2, j % 2, :, i // 2 : i // 2 + down, j // 2 : j // 2 + across]
        return at.reshape(channels, -1)

    def patches(a: int, b: int) -> jax.Array:
        places = [under(a + i, b + j) for i in range(SIDE) for j in range(SIDE)]
        return jnp.stack(places, 1).reshape(channels * SIDE**2, -1)

    rows = jnp.concatenate([patches(a, b) for a in (0, 1) for b in (0, 1)], 1)
    mean, square = rows.mean(0), jnp.square(rows).mean(0)
    kernel = layer.kernel.reshape(len(layer.kernel), -1)
    y = jnp.matmul(kernel, rows, precision=_EXACT)
    both = _rectified(y, layer, _over_contrast(mean, square, layer))
    return jnp.concatenate(both).reshape(-1, 4, down, across).mean(1)


def _over_contrast(mean: jax.Array, square: jax.Array, layer: Layer) -> jax.Array:
    """1 / √(variance + contrast²) from moments; a filter of sum 0 needs no centred patch."""
    return jax.lax.rsqrt(jnp.maximum(square - mean**2, 0) + layer.contrast**2)


def _rectified(y: jax.Array, layer: Layer, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Products y [count, places], by contrast, above the threshold, and below minus it."""
    y = y * scale.reshape(1, -1) + layer.bias.reshape(-1, 1)
    return jax.nn.relu(y - THRESHOLD), jax.nn.relu(-y - THRESHOLD)


def _second(layer: Layer, views: list[jax.Array], cells: int) -> jax.Array:
    """[2 count, cells²]: means over cells and views [channels, h, w] of the responses."""
    channels, height, width = views[0].shape
    down, across = height // 2, width // 2
    padded = [jnp.pad(x, [(0, 0), (1, 1), (1, 1)], mode="edge") for x in views]

    # Tiles of 4 × 4 at every second place: their numbers at (i, j), [channels, tiles of all views].
    def tiles(x: jax.Array) -> list[list[jax.Array]]:
        shape = channels, down + 1, 2, across + 1, 2
        parities = x.reshape(shape).transpose(2, 4, 0, 1, 3)
        at = [(i // 2, i % 2) for i in range(4)]
        return [
            [parities[a, b, :, i : i + down, j : j + across].reshape(channels, -1) for j, b in at]
            for i, a in at
        ]

    every = [tiles(x) for x in padded]
    data = [[jnp.concatenate([t[i][j] for t in every], 1) for j in range(4)] for i in range(4)]
    data = _both_ways(data, lambda t: [t[0] - t[2], t[1] + t[2], t[2] - t[1], t[1] - t[3]])
    y = [
        [jnp.matmul(layer.kernel[i][j], data[i][j], precision=_EXACT) for j in range(4)]
        for i in range(4)
    ]
    y = _both_ways(y, lambda t: [t[0] + t[1] + t[2], t[1] - t[2] - t[3]])

    # Of the 2 × 2 places of each tile: contrast, thresholds, means over views and cells.
    def over_contrast(x: jax.Array) -> jax.Array:
        by_place = jnp.stack([x.mean(0), jnp.square(x).mean(0)])
        steps = [(i, j) for i in range(NEXT_SIDE) for j in range(NEXT_SIDE)]
        window = [by_place[:, i : i + height, j : j + width] for i, j in steps]
        mean, square = functools.reduce(jnp.add, window) / NEXT_SIDE**2
        return _over_contrast(mean, square, layer)

    scales = [over_contrast(x) for x in padded]
    above, below = [], []
    for i in (0, 1):
        for j in (0, 1):
            scale = jnp.concatenate([s[i::2, j::2].reshape(-1) for s in scales])
            over, under = _rectified(y[i][j], layer, scale)
            above.append(over)
            below.append(under)

    def of_views(x: jax.Array, *sides: int) -> jax.Array:
        return x.reshape(-1, len(views), *sides).mean(1)

    if down % cells == across % cells == 0:  # whole tiles to a cell: a quarter of the time
        both = jnp.concatenate([functools.reduce(jnp.add, x) for x in (above, below)])
        return _in_cells(of_views(both, down, across) / 4, cells)
    both = jnp.concatenate([jnp.stack(x, -1) for x in (above, below)])
    by_place = of_views(both, down, across, 2, 2).transpose(0, 1, 3, 2, 4)
    return _in_cells(by_place.reshape(-1, height, width), cells)


def _both_ways(
    grid: list[list[jax.Array]], sums: Callable[[list[jax.Array]], list[jax.Array]]
) -> list[list[jax.Array]]:
    """Sums of the columns of a grid of arrays, then of its rows."""
    rows = [sums(row) for row in grid]
    return [
        list(row) for row in zip(*(sums(list(c)) for c in zip(*rows, strict=True)), strict=True)
    ]


def _in_cells(x: jax.Array, cells: int) -> jax.Array:
    """[channels, cells²]: means of x [channels, h, w] over a grid of cells, as equal as may be."""
    channels, height, width = x.shape
    if height % cells == width % cells == 0:
        shape = channels, cells, height // cells, cells, width // cells
        return x.reshape(shape).mean((2, 4)).reshape(channels, -1)
    down, across = ([side * i // cells for i in range(cells + 1)] for side in (height, width))
    rows = [x[:, a:b].mean(1) for a, b in itertools.pairwise(down)]
    found = [row[:, a:b].mean(1) for row in rows for a, b in itertools.pairwise(across)]
    return jnp.stack(found, 1)
