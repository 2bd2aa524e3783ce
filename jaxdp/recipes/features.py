"""Fixed features of images: scattering, random and pre-made convolutions, group normalisation.

Nothing here is fitted to anybody's data: an image's features are a function of that image and of
public constants. So computing them is preprocessing record by record, which releases nothing and
costs no privacy; training on them has the guarantee of training on the images (Tramèr and Boneh
2021, "Differentially private learning needs better features (or much more data)",
arXiv:2011.11660).

Images are computed one after the other, but for convolutions: a computation of many at once may
round an image by its place among the others (so does XLA's Fourier transform on a CPU), and with it
by who else is there.
"""

import functools
import hashlib
import importlib.resources
import io
import itertools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import arguments
from jaxdp.recipes import two_layers as layered

# Copies of the grid, on each side, over which a filter is wrapped: more change no digit.
_WRAPS = 3
# Of a batch, as if the second order of all its images were held at once.
_NUMBERS_AT_ONCE = 1 << 23
_LAYERED_AT_ONCE = 32
_EXACT = jax.lax.Precision.HIGHEST

# Pre-trained filters by the number of an image's channels; side of a filter, and of a cell.
FILTERS = {1: 64, 3: 128}
SIDE, CELL = 6, 4
# Added to a patch's deviation, of pixels in [0, 1]: smaller ones count as noise (Coates and Ng).
CONTRAST = 10 / 255


class Weights(NamedTuple):
    """Pre-trained filters: a convolution after contrast normalisation.

    Attributes:
        filters: [side, side, channels, count]; the sum of each is 0.
        thresholds: [count], what a response must exceed, on either side.
    """

    filters: np.ndarray | jax.Array
    thresholds: np.ndarray | jax.Array


def by_name(name: str, images: np.ndarray) -> np.ndarray:
    """The features ``name`` of each image, as ``jaxdp train --features`` computes them.

    "scattering" is ``scattering`` of two scales and eight orientations, then ``group_normalised``
    in 27 groups. "random_convolutions" is ``random_convolutions`` of 40 filters of 5 × 5, averaged
    to 7 × 7 cells, with seed 0, then ``group_normalised`` in 16 groups. "pretrained" is
    ``pretrained``, "pretrained_mirrored" the same with ``mirrored``, then ``group_normalised`` in
    16 groups. "two_layers" is ``two_layers``, "two_layers_mirrored" the same with ``mirrored``.

    Args:
        name: one of ``NAMES``.
        images: [n, height, width, channels].

    Returns:
        float32 [n, *shape_of(name, (height, width, channels))].

    Raises:
        ValueError: an unknown name, or images that it does not take.
    """
    images = _checked(images)
    shape = shape_of(name, images.shape[1:])
    compute, groups = _NAMED[name]
    rows = _rows_at_once(shape, 1, 1) * 8
    found = np.empty((len(images), *shape), np.float32)
    for start in range(0, len(images), rows):  # both in turn, so that no image is in memory twice
        part = images[start : start + rows]
        made = compute(part)
        found[start : start + rows] = made if groups is None else group_normalised(made, groups)
    return found


def shape_of(name: str, example_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one example's features: (height, width, channels), or (numbers,) of two layers.

    Args:
        name: one of ``NAMES``.
        example_shape: of one image, (height, width, channels).

    Raises:
        ValueError: an unknown name, or an example that is not an image that it takes: too small,
            or for "pretrained" and "two_layers" one of neither 1 nor 3 channels.
    """
    arguments.one_of("features", name, NAMES)
    least = _LEAST.get(name.removesuffix("_mirrored"), 4)
    if len(example_shape) != 3 or min(example_shape[:2]) < least:
        raise ValueError(
            f"features {name} must be given images (height, width, channels) of at least "
            f"{least} by {least}, got examples {tuple(example_shape)}"
        )
    height, width, channels = example_shape
    if name == "scattering":
        return -(-height // 4), -(-width // 4), channels * number_of_paths()
    if name == "random_convolutions":
        return 7, 7, 80
    _check_channels(channels)
    if name.startswith("two_layers"):
        return (layered.numbers_of(channels),)
    return height // CELL, width // CELL, 2 * FILTERS[channels]


def number_of_paths(scales: int = 2, orientations: int = 8) -> int:
    """1 + J L + L² J (J - 1) / 2: scattering coefficients of one channel at one place.

    Args:
        scales: J.
        orientations: L.
    """
    return 1 + scales * orientations + orientations**2 * scales * (scales - 1) // 2


def scattering(images: np.ndarray, scales: int = 2, orientations: int = 8) -> np.ndarray:
    """The scattering transform of order 2 of each image, with Morlet wavelets.

    Bruna and Mallat 2013, "Invariant scattering convolution networks": with wavelets ψ of scale 2^j
    and angle θ and a Gaussian φ of width 2^J, the coefficients are x ⋆ φ, |x ⋆ ψ| ⋆ φ and
    ||x ⋆ ψ| ⋆ ψ'| ⋆ φ for scales j < j', at every 2^J-th pixel. The wavelets' numbers are those of
    Andreux et al. 2020, "Kymatio": standard deviation 0.8 · 2^j, frequency 3π/4 / 2^j, slant 4/L;
    images are continued by reflection. The modulus of scale j is kept at every 2^j-th pixel, and
    filters there are sampled anew; φ sums to 1, each ψ to 0.

    Privacy: a fixed function of each image alone, to the last digit; no statistic of other images
    enters. It costs nothing.

    Args:
        images: [n, height, width, channels], finite numbers; [0, 1] is usual.
        scales: J, at least 1; 2^J at most height and width.
        orientations: L, at least 1.

    Returns:
        float32 [n, ⌈height/2^J⌉, ⌈width/2^J⌉, channels · paths] on the host, where paths is
        ``number_of_paths(J, L)``. All paths of a channel are together: the mean, then order 1 by
        (j, θ), then order 2 by (j, j', θ, θ').

    Raises:
        ValueError: an argument is out of its range.
    """
    images = _checked(images)
    arguments.integer("orientations", orientations, least=1)
    if 2 ** arguments.integer("scales", scales, least=1) > min(images.shape[1:3]):
        raise ValueError(
            "scales must be at most log2 of height and width, of images "
            f"{images.shape[1]} by {images.shape[2]}; got {scales}"
        )
    rows = _rows_at_once(images.shape[1:], orientations**2, 3 * 2**scales)
    return mapped(
        functools.partial(_scattered, scales=scales, orientations=orientations), images, rows
    )


def random_convolutions(
    images: np.ndarray, filters: int = 40, side: int = 5, cells: int = 7, seed: int = 0
) -> np.ndarray:
    """Responses of each image to fixed random filters, rectified on both sides and averaged.

    Filters of ``side`` × ``side`` over all channels, their numbers normal, brought to mean 0 and
    norm 1, from NumPy's Philox generator with ``seed``; each response r gives max(r, 0) and max(-r,
    0), averaged over a grid of cells (Coates, Lee and Ng 2011, "An analysis of single-layer
    networks in unsupervised feature learning", with random filters in place of learnt ones).

    Privacy: filters are public constants, drawn without any data; the features of an image are a
    function of that image alone, in float32. It costs nothing.

    Args:
        images: [n, height, width, channels], finite numbers; [0, 1] is usual.
        filters: how many.
        side: of a filter, at most height and width.
        cells: of the grid on each side, at most height and width.
        seed: public; another one has other filters.

    Returns:
        float32 [n, cells, cells, 2 · filters] on the host, the positive parts first.

    Raises:
        ValueError: an argument is out of its range.
    """
    images = _checked(images)
    for name, value in (("filters", filters), ("side", side), ("cells", cells)):
        arguments.integer(name, value, least=1)
    if max(side, cells) > min(images.shape[1:3]):
        raise ValueError(
            f"side and cells must be at most height and width, of images {images.shape[1]} by "
            f"{images.shape[2]}; got {side} and {cells}"
        )
    arguments.integer("seed", seed, least=0)
    drawn = random_filters(filters, side, images.shape[3], seed)
    rows = _rows_at_once((*images.shape[1:3], filters), 2, 0)
    return mapped(
        functools.partial(_responses, filters=jnp.asarray(drawn), cells=cells), images, rows
    )


def pretrained(images: np.ndarray, mirrored: bool = False) -> np.ndarray:
    """Responses of each image to filters that were learnt from dead leaves, not from data.

    Filters of 6 × 6, 64 for grey images and 128 for colour: after contrast normalisation each is
    the product with a whitened patch. Responses are rectified above and below a threshold, then
    averaged over cells of 4 × 4 pixels (Coates and Ng 2011, "The importance of encoding versus
    training with sparse coding and vector quantization"). The patches come from images of a random
    process, opaque leaves one on another, with a public seed (Baradad et al. 2021, "Learning to see
    by looking at noise", arXiv:2106.05963): ``python -m benchmarks.pretrain`` makes them. The
    recipe is beside them in jaxdp/recipes/weights, with a digest that is checked.

    Privacy: the filters are public constants, made without any data; the features of an image are a
    function of that image alone, in float32, computed one image after the other. It costs nothing.

    Args:
        images: [n, height, width, channels], finite numbers in [0, 1], at least 4 × 4, of 1 or 3
            channels.
        mirrored: True takes the mean with the features of the mirrored image, so that left
            and right are alike: right for scenes and things, wrong for letters and digits.

    Returns:
        float32 [n, ⌊height/4⌋, ⌊width/4⌋, 128 or 256] on the host, the positive parts first.

    Raises:
        ValueError: images of another kind, or weights that are not those of their recipe.
    """
    images = _checked(images)
    _check_channels(images.shape[3])
    if min(images.shape[1:3]) < CELL:
        raise ValueError(
            f"images must be at least {CELL} by {CELL} for pretrained, got {images.shape[1]} by "
            f"{images.shape[2]}"
        )
    kept = jax.tree.map(jnp.asarray, weights(images.shape[3]))
    function = functools.partial(_rectified, kept, mirrored=bool(mirrored))
    rows = _rows_at_once((*images.shape[1:3], 1), 1, 0)
    return mapped(function, images, rows)


def two_layers(images: np.ndarray, mirrored: bool = False) -> np.ndarray:
    """Responses of two layers of filters made from a random process, centred and whitened.

    Filters of 6 × 6, 64 for grey images and 128 for colour, as of ``pretrained``, then 512 or
    1,024 of 3 × 3 over what those give in 2 × 2 means. Responses of the second layer are averaged
    over 2 × 2 cells, of the first over 7 × 7 (grey) or 4 × 4; either part is normalised in 16
    groups, centred and whitened by numbers of the process (``dp_whitening`` takes them from the
    records, which is a release). The process is a pile of bent, textured leaves: ``python -m
    benchmarks.two_layers`` makes the weights; their recipe lies beside them, with a digest that is
    checked.

    Privacy: all constants are public, made without any data; the features of an image are a
    function of that image alone, in float32, computed one image after the other. It costs nothing.

    Args:
        images: [n, height, width, channels], finite numbers in [0, 1], at least 16 × 16, of 1 or
            3 channels; made for 28 × 28 to 64 × 64.
        mirrored: as of ``pretrained``.

    Returns:
        float32 [n, 10368], or [n, 12288] in colour, on the host: the second layer's channel by
        channel, then the first's; a record's mean square is about 1.

    Raises:
        ValueError: images of another kind, or weights that are not those of their recipe.
    """
    images = _checked(images)
    shape_of("two_layers", images.shape[1:])
    kept = _two_layers(images.shape[3])
    function = functools.partial(layered.encoded, kept, mirrored=bool(mirrored))
    return mapped(function, images, _LAYERED_AT_ONCE)


def _check_channels(channels: int) -> None:
    if channels not in FILTERS:
        raise ValueError(f"images must have 1 or 3 channels for pre-made filters, got {channels}")


def random_filters(filters: int, side: int, channels: int, seed: int) -> np.ndarray:
    """float32 [side, side, channels, filters]: normal numbers, each filter of mean 0 and norm 1."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    drawn = rng.normal(size=(side * side * channels, filters))
    drawn -= drawn.mean(axis=0)
    drawn /= np.maximum(np.linalg.norm(drawn, axis=0), 1e-12)
    return drawn.reshape(side, side, channels, filters).astype(np.float32)


def group_normalised(x: np.ndarray, groups: int) -> np.ndarray:
    """Each image's features with mean 0 and variance 1 in every group of neighbouring channels.

    Wu and He 2018, "Group normalization", without learned scale and shift; mean and variance are
    taken over the places and channels of a group in one image. Tramèr and Boneh use it where
    statistics of all records would be a release. A group that is constant becomes 0.

    Privacy: a fixed function of each image alone, in float32. It costs nothing.

    Args:
        x: [n, ..., channels], features.
        groups: a divisor of the channels.

    Returns:
        float32, of the shape of ``x``, on the host.

    Raises:
        ValueError: groups that the channels cannot be divided into, or an array without channels.
    """
    if getattr(x, "ndim", 0) < 2:
        raise ValueError(f"x must be an array [n, ..., channels], got shape {np.shape(x)}")
    if x.shape[-1] % arguments.integer("groups", groups, least=1):
        raise ValueError(f"groups must divide the {x.shape[-1]} channels, got {groups}")
    return mapped(
        functools.partial(_normalised, groups=groups), x, _rows_at_once(x.shape[1:], 1, 0)
    )


@functools.partial(jax.jit, static_argnames=("scales", "orientations"))
def _scattered(images: jax.Array, scales: int, orientations: int) -> jax.Array:
    """Scattering coefficients [n, h, w, channels · paths] of images [n, ...]."""

    def scattered(image: jax.Array) -> jax.Array:
        # A cell of 2^J on each side, which is cut off again, and what completes the last one.
        cell = 2**scales
        sides = [(cell, cell + -side % cell) for side in image.shape[:2]]
        padded = jnp.pad(image.transpose(2, 0, 1), [(0, 0), *sides], mode="reflect")[:, None]
        # Planes [channels, paths, h, w] of order 0, then 1 by scale, then 2 by both scales.
        first = [_moduli(padded, j, orientations) for j in range(scales)]
        second = [
            _moduli(first[j], k - j, orientations)
            for j in range(scales)
            for k in range(j + 1, scales)
        ]
        averaged = []
        for planes in (padded, *first, *second):
            down, across = (
                _low_pass(side, whole, scales)
                for side, whole in zip(planes.shape[2:], padded.shape[2:], strict=True)
            )
            averaged.append(jnp.einsum("ai,mpij,bj->mpab", down, planes, across, precision=_EXACT))
        paths = jnp.concatenate(averaged, axis=1)
        return paths.transpose(2, 3, 0, 1).reshape(*paths.shape[2:], -1)

    return jax.lax.map(scattered, images)


def _moduli(planes: jax.Array, scale: int, orientations: int) -> jax.Array:
    """|x ⋆ ψ| [m, p L, h/2^j, w/2^j] at every 2^j-th pixel of planes [m, p, h, w]."""
    count, paths, height, width = planes.shape
    filters = _wavelets((height, width), scale, orientations)
    product = jnp.fft.fft2(planes)[:, :, None] * filters[None, None]
    step = 2**scale
    # Every 2^j-th pixel of a signal has the mean of the frequencies that fall together.
    folded = product.reshape(
        count, paths * orientations, step, height // step, step, width // step
    ).mean((2, 4))
    return jnp.abs(jnp.fft.ifft2(folded))


@functools.lru_cache(maxsize=64)
def _wavelets(sides: tuple[int, int], scale: int, orientations: int) -> np.ndarray:
    """complex64 [L, h, w]: frequency responses of the Morlet wavelets of one scale, on a torus.

    Each is a wave under a Gaussian, less as much of the Gaussian as makes the sum 0.
    """
    deviation, frequency = (
        0.8 * 2**scale,
        0.75 * np.pi / 2**scale,
    )  # along the wave; radians a pixel
    slant = 4 / orientations  # the deviation across the wave is that over the slant
    (height, width), found = sides, []
    for angle in (max(0, orientations // 2 - 1) - np.arange(orientations)) * np.pi / orientations:
        wave, envelope = np.zeros(sides, np.complex128), np.zeros(sides)
        for i, k in itertools.product(range(-_WRAPS, _WRAPS + 1), repeat=2):
            down = np.arange(height)[:, None] + i * height
            across = np.arange(width)[None, :] + k * width
            along = down * np.cos(angle) + across * np.sin(angle)
            aside = across * np.cos(angle) - down * np.sin(angle)
            bell = np.exp(-(along**2 + (slant * aside) ** 2) / (2 * deviation**2))
            envelope += bell
            wave += bell * np.exp(1j * frequency * along)
        morlet = wave - wave.sum() / envelope.sum() * envelope
        found.append(morlet * slant / (2 * np.pi * deviation**2))
    return np.fft.fft2(np.stack(found)).astype(np.complex64)


@functools.lru_cache(maxsize=64)
def _low_pass(side: int, padded: int, scales: int) -> np.ndarray:
    """float32 [cells, side]: weights of the Gaussian φ around every cell inside the padding.

    Args:
        side: pixels of the plane.
        padded: pixels at full resolution, of which the plane has every (padded / side)-th.
        scales: J.
    """
    step = 2**scales * side // padded  # from one cell to the next
    centres = np.arange(step, side - step, step)[:, None]
    places = np.arange(-_WRAPS * side, (_WRAPS + 1) * side)[None, :]
    weights = np.exp(-(((places - centres) / (0.4 * step)) ** 2) / 2)
    wrapped = weights.reshape(len(centres), -1, side).sum(1)
    return (wrapped / wrapped.sum(1, keepdims=True)).astype(np.float32)


@functools.partial(jax.jit, static_argnames="cells")
def _responses(images: jax.Array, filters: jax.Array, cells: int) -> jax.Array:
    found = jax.lax.conv_general_dilated(
        images,
        filters,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=_EXACT,
    )
    both = jnp.concatenate([jax.nn.relu(found), jax.nn.relu(-found)], axis=-1)
    return jax.lax.map(lambda image: _in_cells(image, cells, cells), both)


@functools.partial(jax.jit, static_argnames="groups")
def _normalised(x: jax.Array, groups: int) -> jax.Array:
    def one(image: jax.Array) -> jax.Array:
        grouped = image.reshape(-1, groups, image.shape[-1] // groups)
        centred = grouped - jnp.mean(grouped, axis=(0, 2), keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=(0, 2), keepdims=True)
        return (centred * jax.lax.rsqrt(variance + 1e-5)).reshape(image.shape)

    return jax.lax.map(one, x)


def recipe(name: str) -> dict[str, Any]:
    """The recipe of a file of weights: command, seed, and the digest of the arrays."""
    text = _WEIGHTS.joinpath(f"{name}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def arrays_of(name: str) -> dict[str, np.ndarray]:
    """The arrays of a file of weights, as "dead_leaves_3".

    Raises:
        ValueError: the arrays are not those of the recipe.
    """
    content = _WEIGHTS.joinpath(f"{name}.npz").read_bytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = {field: file[field] for field in file.files}
    wanted = recipe(name)["sha256"]
    if (found := digest(arrays)) != wanted:
        raise ValueError(
            f"weights must be those of their recipe, digest {wanted}, got {found}: install jaxdp "
            "again"
        )
    return arrays


@functools.lru_cache(maxsize=2)
def weights(channels: int) -> Weights:
    """float32 weights of the network for images of ``channels`` channels.

    Raises:
        ValueError: the arrays are not those of the recipe.
    """
    arrays = arrays_of(f"dead_leaves_{channels}")
    return Weights(**{name: array.astype(np.float32) for name, array in arrays.items()})


@functools.lru_cache(maxsize=2)
def _two_layers(channels: int) -> layered.TwoLayers:
    found = layered.of_stored(arrays_of(f"scenes_{channels}"))
    return found._replace(layers=layered.ready(found.layers))


def digest(arrays: dict[str, np.ndarray]) -> str:
    """SHA-256 of arrays with their names, shapes and types, in the order of the names."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name]).astype(arrays[name].dtype.newbyteorder("<"))
        found.update(repr((name, array.shape, array.dtype.str)).encode())
        found.update(array.tobytes())
    return found.hexdigest()


@functools.partial(jax.jit, static_argnames="mirrored")
def _rectified(kept: Weights, images: jax.Array, mirrored: bool) -> jax.Array:
    """Pre-trained features [n, h, w, 2 · count]: responses above the thresholds, then below.

    A patch is brought to mean 0 and divided by √(variance + ``CONTRAST``²) before its product with
    a filter (Coates, Lee and Ng 2011, Section 3.2.1); the image goes on as its edges are.
    """
    before, places = (SIDE - 1) // 2, [(i, j) for i in range(SIDE) for j in range(SIDE)]

    def responses(image: jax.Array) -> jax.Array:
        height, width, _ = image.shape
        padded = jnp.pad(image, (*((before, SIDE - 1 - before),) * 2, (0, 0)), mode="edge")
        under = [padded[i : i + height, j : j + width] for i, j in places]
        patches = jnp.concatenate(under, axis=-1)
        patches = patches - jnp.mean(patches, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(patches), axis=-1, keepdims=True)
        patches = patches * jax.lax.rsqrt(variance + CONTRAST**2)
        filters = kept.filters.reshape(patches.shape[-1], -1)
        found = jnp.matmul(patches, filters, precision=_EXACT)
        both = [jax.nn.relu(x - kept.thresholds.reshape(1, 1, -1)) for x in (found, -found)]
        return _in_cells(jnp.concatenate(both, axis=-1), height // CELL, width // CELL)

    def one(image: jax.Array) -> jax.Array:
        found = responses(image)
        return (found + responses(image[:, ::-1])) / 2 if mirrored else found

    return jax.lax.map(one, images)


def _checked(images: np.ndarray) -> np.ndarray:
    if getattr(images, "ndim", 0) != 4 or not all(images.shape[1:]):
        raise ValueError(
            f"images must be an array [n, height, width, channels], got shape {np.shape(images)}"
        )
    return images


def _rows_at_once(shape: tuple[int, ...], paths: int, margin: int) -> int:
    """Images of a batch, a function of public shapes alone."""
    sides = [side + margin for side in shape[:-1]]
    return max(1, min(1024, _NUMBERS_AT_ONCE // (math.prod(sides) * shape[-1] * paths)))


def mapped(function: Callable[[jax.Array], jax.Array], x: np.ndarray, rows: int) -> np.ndarray:
    """The function of all images, computed ``rows`` at a time."""
    shape = jax.eval_shape(function, jax.ShapeDtypeStruct((rows, *x.shape[1:]), jnp.float32)).shape
    found = np.empty((len(x), *shape[1:]), np.float32)
    for start in range(0, len(x), rows):
        part = np.asarray(x[start : start + rows], np.float32)
        missing = [(0, rows - len(part))] + [(0, 0)] * (x.ndim - 1)
        found[start : start + rows] = np.asarray(function(jnp.pad(part, missing)))[: len(part)]
    return found


def _in_cells(x: jax.Array, down: int, across: int) -> jax.Array:
    """Means [down, across, k] of [h, w, k] over the cells of a grid."""
    rows, columns = (
        jnp.asarray(_cells(side, n)) for side, n in zip(x.shape, (down, across), strict=False)
    )
    by_rows = jnp.einsum("ai,ijc->ajc", rows, x, precision=_EXACT)
    return jnp.einsum("bj,ajc->abc", columns, by_rows, precision=_EXACT)


@functools.lru_cache(maxsize=64)
def _cells(side: int, cells: int) -> np.ndarray:
    """float32 [cells, side]: weights of the mean over each cell; sizes differ by 1 at most."""
    edges = np.arange(cells + 1) * side // cells
    place = np.arange(side)
    inside = (place >= edges[:-1, None]) & (place < edges[1:, None])
    return (inside / inside.sum(1, keepdims=True)).astype(np.float32)


_WEIGHTS = importlib.resources.files("jaxdp").joinpath("recipes", "weights")
# How features are computed by name, and the groups in which they are normalised: of scattering 3 of
# a channel's 81 paths to a group, Tramèr and Boneh's for the linear model on Fashion-MNIST; None
# where features come normalised.
_NAMED: dict[str, tuple[Callable[[np.ndarray], np.ndarray], int | None]] = {
    "scattering": (scattering, 27),
    "random_convolutions": (random_convolutions, 16),
    "pretrained": (pretrained, 16),
    "pretrained_mirrored": (functools.partial(pretrained, mirrored=True), 16),
    "two_layers": (two_layers, None),
    "two_layers_mirrored": (functools.partial(two_layers, mirrored=True), None),
}
NAMES = tuple(_NAMED)
# Sides of the smallest images that have every cell; 4 where nothing is said.
_LEAST = {"random_convolutions": 7, "two_layers": 16}
