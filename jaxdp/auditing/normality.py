"""P-values of the ways in which numbers can fail to be independent standard normals.

Every p-value is exact or an upper bound. Most rest on one fact: the inner product of fresh standard
normals with a unit vector that was known before they were drawn is standard normal itself, whatever
the vector depends on, and independent from draw to draw.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy import special, stats

_FAR = 3.0  # standard deviations
_NOTHING = 1e-4  # of full noise, this share of the blocks has a norm as small
_CELLS = 2**16  # 128 values of the float32 generator in each: its own grid is not seen
_CELLS_OF_A_PAIR = 2**13
_LAGS = (1, 2, 3)
_SHARDS = (2, 3, 4, 8)
_COLUMNS = 512
_NEIGHBOURS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Residuals:
    """Numbers that should be independent standard normals.

    Attributes:
        values: float64 [runs, steps, coordinates], finite.
        sizes: coordinates of each leaf, in their order.
    """

    values: np.ndarray
    sizes: tuple[int, ...]

    def leaves(self) -> list[np.ndarray]:
        """[runs, steps, size] of each leaf."""
        return np.split(self.values, np.cumsum(self.sizes)[:-1], axis=-1)


def law(r: Residuals) -> dict[str, float]:
    """P-values of the distribution of single numbers, norms and blocks."""
    x, squares = r.values, np.square(r.values)
    runs, steps, coordinates = x.shape
    norms = stats.chi2.cdf(squares.sum(2), coordinates).ravel()
    each = x.sum(0) / np.sqrt(runs)
    return {
        "the noise's standard deviation": float(size(squares.sum(), x.size)),
        "its standard deviation in a coordinate": least(size(squares.sum((0, 1)), runs * steps)),
        "its standard deviation in a step": least(size(squares.sum((0, 2)), runs * coordinates)),
        "its standard deviation in a run": least(size(squares.sum((1, 2)), steps * coordinates)),
        "its mean": float(mean(x.sum() / np.sqrt(x.size))),
        "its mean in a coordinate and step": least(mean(each)),
        "its distribution": float(stats.kstest(x.ravel(), "norm").pvalue),
        "its tails": _tails(x),
        "its largest number": _largest(x),
        "the norms of the steps": float(stats.kstest(norms, "uniform").pvalue),
        "steps or leaves without noise": _missing(r, norms),
        "a coarse grid of values": _coarse(x),
        "noise that is used twice": _repeated(r),
    }


def independence(r: Residuals) -> dict[str, float]:
    """P-values of the independence of coordinates, steps, leaves, shards and runs."""
    x, leaves = r.values, r.leaves()
    flat = x.reshape(len(x), -1)
    apart = [lag for lag in {*_LAGS, len(x) // 2} if 0 < lag < len(x)]
    return {
        "noise of two coordinates or steps": _pairs(flat),
        "noise of a step and of an earlier one": least(
            [dependence(x[:, lag:], x[:, :-lag]) for lag in _LAGS if lag < x.shape[1]]
        ),
        "noise of two leaves": least([dependence(*pair) for pair in _neighbours(leaves)]),
        "noise of two shards of a leaf": least([dependence(*pair) for pair in _shards(leaves)]),
        "noise of two runs": least([dependence(flat[lag:], flat[:-lag]) for lag in apart]),
    }


def dependence(values: np.ndarray, known: np.ndarray) -> float:
    """P-value of mean and size of ``values`` [..., d] along vectors known before them [..., d]."""
    along = np.sum(values * unit(known), axis=-1).ravel()
    if not along.size:
        return 1.0
    return least(
        [mean(along.sum() / np.sqrt(along.size)), size(np.square(along).sum(), along.size)]
    )


def by_record(r: Residuals, drawn: np.ndarray) -> float:
    """P-value of means and sizes in the steps that a record took part in; bool [runs, steps, n]."""
    count = drawn.sum((0, 1)).astype(float)
    here = drawn[..., count > 0].astype(float)
    if not here.shape[-1]:
        return 1.0
    sums = np.einsum("rtn,rtd->nd", here, r.values) / np.sqrt(count[count > 0])[:, None]
    squares = np.einsum("rtn,rt->n", here, np.square(r.values).sum(2))
    sizes = size(squares, count[count > 0] * r.values.shape[2])
    return least([least(mean(sums)), least(sizes)])


def unit(known: np.ndarray) -> np.ndarray:
    """The vectors [..., d] at norm 1; where nothing is known, equal in every coordinate."""
    finite = np.nan_to_num(known, nan=0.0, posinf=0.0, neginf=0.0)
    largest = np.max(np.abs(finite), axis=-1, keepdims=True, initial=0.0)
    scaled = np.where(largest > 0, finite / np.where(largest > 0, largest, 1.0), 1.0)
    return scaled / np.linalg.norm(scaled, axis=-1, keepdims=True)


def mean(z: np.ndarray) -> np.ndarray:
    """Two-sided p-values of standard normals."""
    return 2 * stats.norm.sf(np.abs(z))


def size(total: np.ndarray, degrees: np.ndarray | int) -> np.ndarray:
    """Two-sided p-values of sums of squares, chi-square of ``degrees``."""
    tails = np.minimum(stats.chi2.cdf(total, degrees), stats.chi2.sf(total, degrees))
    return np.minimum(1.0, 2 * tails)


def least(p_values: np.ndarray | Sequence[Any]) -> float:
    """The least of several p-values, times their number (Bonferroni); 1 of none."""
    found = np.asarray(p_values, float)
    return float(min(1.0, found.size * np.min(found))) if found.size else 1.0


def _tails(x: np.ndarray) -> float:
    far = int(np.sum(np.abs(x) > _FAR))
    return float(stats.binomtest(far, x.size, 2 * stats.norm.sf(_FAR)).pvalue)


def _largest(x: np.ndarray) -> float:
    beyond = 2 * stats.norm.sf(np.max(np.abs(x)))
    return float(-np.expm1(x.size * np.log1p(-beyond)))


def _missing(r: Residuals, norms: np.ndarray) -> float:
    """P-value of leaves or steps with next to no noise."""
    blocks = [stats.chi2.cdf(np.square(leaf).sum(2), leaf.shape[2]) for leaf in r.leaves()]
    every = np.concatenate([np.ravel(block) for block in blocks])
    return least(
        [
            stats.binom.sf(np.sum(part < _NOTHING) - 1, part.size, _NOTHING)
            for part in (every, norms)
        ]
    )


def _coarse(x: np.ndarray) -> float:
    cells = np.minimum(special.ndtr(x.ravel()) * _CELLS, _CELLS - 1).astype(np.int64)
    return collisions(cells, _CELLS)


def _repeated(r: Residuals) -> float:
    """P-value of pairs of neighbouring numbers that occur twice, anywhere, with either sign."""
    pairs = [leaf[..., : leaf.shape[-1] // 2 * 2].reshape(-1, 2) for leaf in r.leaves()]
    uniform = special.erf(np.abs(np.concatenate(pairs)) / np.sqrt(2))
    cells = np.minimum(uniform * _CELLS_OF_A_PAIR, _CELLS_OF_A_PAIR - 1).astype(np.int64)
    return collisions(cells[:, 0] * _CELLS_OF_A_PAIR + cells[:, 1], _CELLS_OF_A_PAIR**2)


def collisions(cells: np.ndarray, count: int) -> float:
    """P-value of too few different cells among draws from ``count`` equally likely ones.

    The number of occupied cells is a sum of independent indicators (Vatutin and Mikhailov 1982);
    so, up to a constant, are the collisions, whose upper tail is below that of a Poisson variable
    of their mean from one above the mean on (Hoeffding 1956; Anderson and Samuels 1967).
    """
    draws = len(cells)
    if not draws:
        return 1.0
    sure = max(0, draws - count)
    expected = draws + count * np.expm1(draws * np.log1p(-1.0 / count)) - sure
    found = draws - 1 - np.count_nonzero(np.diff(np.sort(cells))) - sure
    return float(stats.poisson.sf(found - 1, expected)) if found >= expected + 1 else 1.0


def _pairs(flat: np.ndarray) -> float:
    """P-values of products of two columns of [runs, k]: given one, their sum is normal."""
    at = np.unique(np.linspace(0, flat.shape[1] - 1, _COLUMNS).astype(int))
    columns = flat[:, at]
    lengths = np.linalg.norm(columns, axis=0)
    products = columns.T @ columns / np.where(lengths > 0, lengths, np.inf)
    return least(mean(products[np.triu_indices(len(at), 1)]))


def _neighbours(leaves: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for i, later in enumerate(leaves):
        for earlier in leaves[max(0, i - _NEIGHBOURS) : i]:
            shared = min(later.shape[-1], earlier.shape[-1])
            yield later[..., :shared], earlier[..., :shared]


def _shards(leaves: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for leaf in leaves:
        for parts in _SHARDS:
            width = leaf.shape[-1] // parts
            if width:
                cut = leaf[..., : parts * width].reshape(*leaf.shape[:2], parts, width)
                yield cut[:, :, 1:], cut[:, :, :-1]
