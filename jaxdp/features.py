"""Fixed features of images: scattering, random and pre-trained convolutions, group normalisation.

Nothing here is fitted to anybody's data: an image's features are a function of that image and of
public constants. So computing them is preprocessing record by record, which releases nothing and
costs no privacy; training on them has the guarantee of training on the images (Tramèr and Boneh
2021, "Differentially private learning needs better features (or much more data)",
arXiv:2011.11660).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import _images, _pretrained, arguments

# Copies of the grid, on each side, over which a filter is wrapped: more change no digit.
_WRAPS = 3
# Tramèr and Boneh's for the linear model on Fashion-MNIST: 3 of a channel's 81 paths to a group.
_SCALES, _ORIENTATIONS, _GROUPS = 2, 8, 27

# Of the random filters: side, how many, cells that they are pooled to; the seed is public.
_SIDE, _FILTERS, _CELLS, _SEED, _RANDOM_GROUPS = 5, 40, 7, 0, 16


@dataclasses.dataclass(frozen=True)
class FeatureEntry:
    """A registry entry: how features are computed, and of which images.

    Attributes:
        compute: from images [n, height, width, channels] to their features.
        shape: from an image's (height, width, channels) to the shape of its features.
        least: the smallest height and width that are taken.
    """

    compute: Callable[[np.ndarray], np.ndarray]
    shape: Callable[[int, int, int], tuple[int, int, int]]
    least: int


def by_name(name: str, images: np.ndarray) -> np.ndarray:
    """The features ``name`` of each image, as ``jaxdp train --features`` computes them.

    "scattering" is ``scattering`` of two scales and eight orientations, then ``group_normalised``
    in 27 groups. "random_convolutions" is ``random_convolutions`` of 40 filters of 5 × 5, averaged
    to 7 × 7 cells, with seed 0, then ``group_normalised`` in 16 groups. "pretrained" is
    ``pretrained``, "pretrained_mirrored" the same with ``mirrored``, then ``group_normalised`` in
    16 groups.

    Args:
        name: one of ``NAMES``.
        images: [n, height, width, channels].

    Returns:
        float32 [n, *shape_of(name, (height, width, channels))].

    Raises:
        ValueError: an unknown name, or images that it does not take.
    """
    images = _images.checked(images)
    shape = shape_of(name, images.shape[1:])
    rows = _images.rows_at_once(shape, 1, 1) * 8
    found = np.empty((len(images), *shape), np.float32)
    for start in range(0, len(images), rows):  # both in turn, lest all be held twice
        part = images[start : start + rows]
        found[start : start + rows] = FEATURES[name].compute(part)
    return found


def shape_of(name: str, example_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one example's features, (height, width, channels).

    Args:
        name: one of ``NAMES``.
        example_shape: of one image, (height, width, channels).

    Raises:
        ValueError: an unknown name, or an example that is not an image that it takes: too small,
            or for "pretrained" and its like one of neither 1 nor 3 channels.
    """
    arguments.one_of("features", name, NAMES)
    least = FEATURES[name].least
    if len(example_shape) != 3 or min(example_shape[:2]) < least:
        raise ValueError(
            f"features {name} must be given images (height, width, channels) of at least "
            f"{least} by {least}, got examples {tuple(example_shape)}"
        )
    return FEATURES[name].shape(*example_shape)


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
    enters. It costs nothing. Within a compiled batch images are computed one after the other.

    Args:
        images: [n, height, width, channels], finite numbers; [0, 1] is usual.
        scales: J, at least 1; 2^J at most height and width.
        orientations: L, at least 1.

    Returns:
        float32 [n, ⌈height/2^J⌉, ⌈width/2^J⌉, channels · paths] on the host, where paths is
        ``number_of_paths(J, L)``. All paths of a channel lie together: the mean, then order 1 by
        (j, θ), then order 2 by (j, j', θ, θ').

    Raises:
        ValueError: an argument is out of its range.
    """
    images = _images.checked(images)
    arguments.integer("orientations", orientations, least=1)
    if 2 ** arguments.integer("scales", scales, least=1) > min(images.shape[1:3]):
        raise ValueError(
            "scales must be at most log2 of height and width, of images "
            f"{images.shape[1]} by {images.shape[2]}; got {scales}"
        )
    rows = _images.rows_at_once(images.shape[1:], orientations**2, 3 * 2**scales)
    return _images.mapped(
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
    images = _images.checked(images)
    for name, value in (("filters", filters), ("side", side), ("cells", cells)):
        arguments.integer(name, value, least=1)
    if max(side, cells) > min(images.shape[1:3]):
        raise ValueError(
            f"side and cells must be at most height and width, of images {images.shape[1]} by "
            f"{images.shape[2]}; got {side} and {cells}"
        )
    arguments.integer("seed", seed, least=0)
    drawn = random_filters(filters, side, images.shape[3], seed)
    rows = _images.rows_at_once((*images.shape[1:3], filters), 2, 0)
    return _images.mapped(
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
    recipe lies beside them in jaxdp/weights, with a digest that is checked.

    Privacy: the filters are public constants, made without any data; the features of an image are a
    function of that image alone, in float32, computed one image after the other. It costs nothing.

    Args:
        images: [n, height, width, channels], finite numbers in [0, 1], at least 4 × 4, of 1 or 3
            channels.
        mirrored: whether the mean with the features of the mirrored image is taken, so that left
            and right are alike: right for scenes and things, wrong for letters and digits.

    Returns:
        float32 [n, ⌊height/4⌋, ⌊width/4⌋, 128 or 256] on the host, the positive parts first.

    Raises:
        ValueError: images of another kind, or weights that are not those of their recipe.
    """
    images = _images.checked(images)
    _check_channels(images.shape[3])
    if min(images.shape[1:3]) < _pretrained.CELL:
        raise ValueError(
            f"images must be at least {_pretrained.CELL} by {_pretrained.CELL} for pretrained, got "
            f"{images.shape[1]} by {images.shape[2]}"
        )
    kept = jax.tree.map(jnp.asarray, _pretrained.weights(images.shape[3]))
    function = functools.partial(_pretrained.features, kept, mirrored=bool(mirrored))
    rows = _images.rows_at_once((*images.shape[1:3], 1), 1, 0)
    return _images.mapped(function, images, rows)


def _check_channels(channels: int) -> None:
    if channels not in _pretrained.FILTERS:
        raise ValueError(f"images must have 1 or 3 channels for pretrained, got {channels}")


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
    return _images.mapped(
        functools.partial(_normalised, groups=groups), x, _images.rows_at_once(x.shape[1:], 1, 0)
    )


@functools.partial(jax.jit, static_argnames="cells")
def _responses(images: jax.Array, filters: jax.Array, cells: int) -> jax.Array:
    exact = jax.lax.Precision.HIGHEST
    found = jax.lax.conv_general_dilated(
        images, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=exact
    )
    both = jnp.concatenate([jax.nn.relu(found), jax.nn.relu(-found)], axis=-1)
    return jax.lax.map(lambda image: _images.in_cells(image, cells, cells), both)


# One image after the other: a computation of many at once may round an image by its place among
# the others (so does XLA's Fourier transform on a CPU), and with it by who else is there.
@functools.partial(jax.jit, static_argnames="groups")
def _normalised(x: jax.Array, groups: int) -> jax.Array:
    def one(image: jax.Array) -> jax.Array:
        grouped = image.reshape(-1, groups, image.shape[-1] // groups)
        centred = grouped - jnp.mean(grouped, axis=(0, 2), keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=(0, 2), keepdims=True)
        return (centred * jax.lax.rsqrt(variance + 1e-5)).reshape(image.shape)

    return jax.lax.map(one, x)


@functools.partial(jax.jit, static_argnames=("scales", "orientations"))
def _scattered(images: jax.Array, scales: int, orientations: int) -> jax.Array:
    one = functools.partial(_scattered_alone, scales=scales, orientations=orientations)
    return jax.lax.map(one, images)


def _scattered_alone(image: jax.Array, scales: int, orientations: int) -> jax.Array:
    height, width, _ = image.shape
    planes = image.transpose(2, 0, 1)
    # A cell of 2^J on each side, which is cut off again, and what completes the last one.
    cell = 2**scales
    sides = [(cell, cell + -side % cell) for side in (height, width)]
    padded = jnp.pad(planes, [(0, 0), *sides], mode="reflect")
    paths = jnp.concatenate(_orders(padded, scales, orientations), axis=1)
    return paths.transpose(2, 3, 0, 1).reshape(*paths.shape[2:], -1)


def _orders(padded: jax.Array, scales: int, orientations: int) -> list[jax.Array]:
    """Coefficients [m, paths, h, w] of padded planes [m, ...]: of order 0, then 1, then 2."""
    first = [_moduli(padded[:, None], j, orientations) for j in range(scales)]
    second = [
        _moduli(first[j], k - j, orientations) for j in range(scales) for k in range(j + 1, scales)
    ]
    return [_averaged(plane, padded.shape, scales) for plane in (padded[:, None], *first, *second)]


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


def _averaged(planes: jax.Array, padded: tuple[int, ...], scales: int) -> jax.Array:
    """x ⋆ φ [m, p, h, w] at every 2^J-th pixel of the image, without the cells around it."""
    down, across = (
        _low_pass(side, padded_side, scales)
        for side, padded_side in zip(planes.shape[2:], padded[1:], strict=True)
    )
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("ai,mpij,bj->mpab", down, planes, across, precision=exact)


@functools.lru_cache(maxsize=64)
def _wavelets(sides: tuple[int, int], scale: int, orientations: int) -> np.ndarray:
    """complex64 [L, h, w]: frequency responses of the Morlet wavelets of one scale."""
    angles = (max(0, orientations // 2 - 1) - np.arange(orientations)) * np.pi / orientations
    found = [
        _morlet(sides, 0.8 * 2**scale, 0.75 * np.pi / 2**scale, a, 4 / orientations) for a in angles
    ]
    return np.fft.fft2(np.stack(found)).astype(np.complex64)


def _morlet(
    sides: tuple[int, int], deviation: float, frequency: float, angle: float, slant: float
) -> np.ndarray:
    """complex128 [h, w]: a wave under a Gaussian, less as much of the Gaussian as makes the sum 0.

    Args:
        sides: of the grid, which is a torus.
        deviation: of the Gaussian along the wave; across it is that over the slant.
        frequency: of the wave, radians a pixel.
        angle: of the wave.
        slant: of the Gaussian.
    """
    height, width = sides
    wave, envelope = np.zeros(sides, np.complex128), np.zeros(sides)
    for i in range(-_WRAPS, _WRAPS + 1):
        for k in range(-_WRAPS, _WRAPS + 1):
            down = np.arange(height)[:, None] + i * height
            across = np.arange(width)[None, :] + k * width
            along = down * np.cos(angle) + across * np.sin(angle)
            aside = across * np.cos(angle) - down * np.sin(angle)
            bell = np.exp(-(along**2 + (slant * aside) ** 2) / (2 * deviation**2))
            envelope += bell
            wave += bell * np.exp(1j * frequency * along)
    morlet = wave - wave.sum() / envelope.sum() * envelope
    return morlet * slant / (2 * np.pi * deviation**2)


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
    around = np.arange(-_WRAPS * side, (_WRAPS + 1) * side)[None, :]
    weights = np.exp(-(((around - centres) / (0.4 * step)) ** 2) / 2)
    wrapped = weights.reshape(len(centres), -1, side).sum(1)
    return (wrapped / wrapped.sum(1, keepdims=True)).astype(np.float32)


def _pretrained_shape(height: int, width: int, channels: int) -> tuple[int, int, int]:
    _check_channels(channels)
    cell = _pretrained.CELL
    return height // cell, width // cell, 2 * _pretrained.FILTERS[channels]


FEATURES: dict[str, FeatureEntry] = {
    "scattering": FeatureEntry(
        lambda images: group_normalised(scattering(images, _SCALES, _ORIENTATIONS), _GROUPS),
        lambda height, width, channels: (
            -(-height // 2**_SCALES),
            -(-width // 2**_SCALES),
            channels * number_of_paths(_SCALES, _ORIENTATIONS),
        ),
        least=2**_SCALES,
    ),
    "random_convolutions": FeatureEntry(
        lambda images: group_normalised(
            random_convolutions(images, _FILTERS, _SIDE, _CELLS, _SEED), _RANDOM_GROUPS
        ),
        lambda height, width, channels: (_CELLS, _CELLS, 2 * _FILTERS),
        least=max(_SIDE, _CELLS),
    ),
    "pretrained": FeatureEntry(
        lambda images: group_normalised(pretrained(images), _RANDOM_GROUPS),
        _pretrained_shape,
        least=_pretrained.CELL,
    ),
    "pretrained_mirrored": FeatureEntry(
        lambda images: group_normalised(pretrained(images, mirrored=True), _RANDOM_GROUPS),
        _pretrained_shape,
        least=_pretrained.CELL,
    ),
}
NAMES = tuple(FEATURES)
