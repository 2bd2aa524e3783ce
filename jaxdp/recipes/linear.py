"""Linear models: of small tables by one private release, and the rate of one trained by DP-SGD.

docs/tabular.md compares them with DP-SGD; docs/proofs/tabular.md holds the proofs.
"""

import math
import warnings

import numpy as np
from jax.typing import ArrayLike
from scipy import linalg, special

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.ledger import Ledger
from jaxdp.ledger.seeds import Secret
from jaxdp.ledger.tickets import released_once
from jaxdp.recipes.preprocess import bound, shortened

_ROWS = 4_096
_U = 2.0**-53
_STEPS = 200
# Standard deviation of the noise in a score at the end of training, see ``rate``.
SCORE_NOISE = 2.12
# Of the noise that hides how far the minimum that was found is from the exact one.
OUTPUT_NOISE_MULTIPLIER = 100.0


def rate(
    noise_multiplier: float,
    *,
    l2_clip_norm: float,
    batch_size: float,
    steps: int,
    numbers: int,
    momentum: float = 0.9,
) -> float:
    """The learning rate of DP-SGD for a softmax regression on so many numbers an example.

    A step adds noise of standard deviation η z C / B to every weight, momentum m makes 1 / (1 - m)
    of it, and T steps √T: a score, the product with an example of mean square 1, ends with noise of
    standard deviation s = η z C √(T d) / (B (1 - m)). The rate η has s = 2.12. Nobody's data enter.

    That number was chosen by looking: on 5,000 held-out training records of CIFAR-10, for 6,144 to
    20,480 numbers and epsilon 1, 3 and 8, the best of rates a factor of 2 apart had s from 1.4 to
    3, and its neighbours were mostly within a point.

    Args:
        noise_multiplier: z.
        l2_clip_norm: C.
        batch_size: B, expected.
        steps: T.
        numbers: d, of an example; their mean square is about 1.
        momentum: m.

    Raises:
        ValueError: a number that is not positive, or a momentum outside [0, 1).
    """
    for name, value in (
        ("noise_multiplier", noise_multiplier),
        ("l2_clip_norm", l2_clip_norm),
        ("batch_size", batch_size),
        ("steps", steps),
        ("numbers", numbers),
    ):
        arguments.positive(name, value)
    if arguments.non_negative("momentum", momentum) >= 1:
        raise ValueError(f"momentum must be at least 0 and below 1, got {momentum!r}")
    noise = noise_multiplier * l2_clip_norm / batch_size / (1 - momentum)
    return SCORE_NOISE / (noise * math.sqrt(steps * numbers))


def dp_least_squares(
    x: np.ndarray,
    y: np.ndarray,
    noise_multiplier: float,
    secret: Secret | None = None,
    *,
    row_norm: float = 1.0,
    label_bound: float = 1.0,
    ridge: float | None = None,
    ledger: Ledger | None = None,
) -> np.ndarray:
    """The ridge regression of a noisy XᵀX and a noisy Xᵀy (sufficient-statistics perturbation).

    Wang 2018, "Revisiting differentially private linear regression" (arXiv:1803.02596v2, Algorithm
    2, AdaSSP); its release of the least eigenvalue is not needed, for the noisy matrix has one.

    Formal guarantee: rows are shortened to norm R = ``row_norm`` and labels to |y| <= B =
    ``label_bound``, so that one record adds xxᵀ, of Frobenius norm R², and xy, of norm R B. Each
    gets Gaussian noise of standard deviation z √2 times that bound (in the basis of symmetric
    matrices in which the Frobenius norm is Euclidean), so that together they are one full-batch
    ``Gaussian(z)``, z = ``noise_multiplier``, under every relation. All else is post-processing.
    Rounding of float64 sums is outside (docs/threat_model.md).

    Args:
        x: [n, d] private records; one that is not finite, label included, adds 0. Give it a
            constant column for an intercept.
        y: [n] labels; -1 and 1 for two classes.
        noise_multiplier: z.
        secret: the randomness; None takes it from the operating system.
        row_norm: R, public.
        label_bound: B, public.
        ridge: added to the diagonal, public; None takes what lifts the noisy matrix's least
            eigenvalue to the typical norm of the noise.
        ledger: where the release is charged before it is made.

    Returns:
        float64 [d], the weights.

    Raises:
        ValueError: an argument is out of its range.
    """
    x, y = _table(x, y)
    noise_multiplier = arguments.positive("noise_multiplier", noise_multiplier)
    row_norm = bound("row_norm", row_norm)
    label_bound = bound("label_bound", label_bound)
    if ridge is not None:
        ridge = arguments.non_negative("ridge", ridge)
    width = x.shape[1]
    event = acc.Gaussian(noise_multiplier)
    name = f"least squares {width} {row_norm} {label_bound} {ridge}"
    rng = released_once(event, name, ledger, secret).philox("least squares", 0)
    second, first = _statistics(x, y, row_norm, label_bound)
    # 1/z² = 1/(z √2)² + 1/(z √2)², rounded up.
    std = noise_multiplier * math.sqrt(2) * (1 + 1e-12) * row_norm
    second += _symmetric_noise(rng, width) * std * row_norm
    first += rng.normal(size=width) * std * label_bound
    values, vectors = np.linalg.eigh(second)
    if ridge is None:
        ridge = max(0.0, std * row_norm * math.sqrt(2 * width) - float(values[0]))
    # Directions of which nothing but noise is known are left out.
    lifted = values + ridge
    weights = np.divide(vectors.T @ first, lifted, out=np.zeros(width), where=lifted > 0)
    found: np.ndarray = vectors @ weights
    return found


def _symmetric_noise(rng: np.random.Generator, width: int) -> np.ndarray:
    """Standard normal in the basis of symmetric matrices in which Frobenius is Euclidean."""
    drawn = rng.normal(size=(width, width))
    upper = np.triu(drawn, 1) / math.sqrt(2)
    return np.asarray(upper + upper.T + np.diag(np.diag(drawn)))


def logistic_event(noise_multiplier: float, ridge: float, row_norm: float = 1.0) -> acc.Event:
    """The event of ``dp_logistic``, to calibrate its noise; arguments as there.

    Example:
        >>> from jaxdp import accounting as acc
        >>> from jaxdp import linear
        >>> event = lambda z: linear.logistic_event(z, ridge=2.5)
        >>> noise = acc.calibrate(event, epsilon=1.0, delta=1e-5)
        >>> acc.epsilon(event(noise), delta=1e-5).upper <= 1.0
        True
    """
    curvature = arguments.positive("row_norm", row_norm) ** 2 / 4
    curvature /= arguments.positive("ridge", ridge)
    return acc.Composed(
        (
            acc.ObjectivePerturbation(noise_multiplier, curvature * (1 + 1e-12)),
            acc.Gaussian(OUTPUT_NOISE_MULTIPLIER),
        )
    )


def dp_logistic(
    x: np.ndarray,
    y: np.ndarray,
    noise_multiplier: float,
    secret: Secret | None = None,
    *,
    ridge: float,
    row_norm: float = 1.0,
    gradient_tolerance: float | None = None,
    ledger: Ledger | None = None,
) -> np.ndarray:
    """The minimum of the logistic loss plus a random linear term (objective perturbation).

    Kifer, Smith and Thakurta 2012; Redberg, Koskela and Wang 2023 (arXiv:2401.00583). What is
    computed is no exact minimum, so a little noise is added to it (approximate minima perturbation,
    Iyengar et al. 2019).

    Formal guarantee: rows are shortened to norm R = ``row_norm``. With w* the exact minimum of sum
    log(1 + e^(-y x.w)) + λ|w|²/2 + b.w, b ~ N(0, (z R)² I), releasing w* is one
    ``acc.ObjectivePerturbation(z, R²/4λ)``. The weights found have a gradient of at most τ =
    ``gradient_tolerance``, its rounding error included, so they are within τ/λ of w*: between two
    data sets the difference moves by 2τ/λ, and noise of 100 times that hides it, one
    ``Gaussian(100)`` composed with the first. Both are ``logistic_event``, under add-or-remove and
    zero-out. Weights whose gradient does not get that small are refused: that it was refused says
    something of the data (docs/threat_model.md).

    Args:
        x: [n, d] private records; one that is not finite counts as zeros. Give it a constant column
            for an intercept.
        y: [n] of -1 and 1; a record with another label counts as zeros.
        noise_multiplier: z.
        secret: the randomness; None takes it from the operating system.
        ridge: λ, public. The larger, the less of epsilon goes into log(1 + R²/4λ).
        row_norm: R, public.
        gradient_tolerance: τ, public; None takes 1e-5 R.
        ledger: where the release is charged before it is made.

    Returns:
        float64 [d], the weights.

    Raises:
        ValueError: an argument is out of its range; the minimum was not found, which is charged.
    """
    x, y = _table(x, y)
    row_norm, ridge = bound("row_norm", row_norm), arguments.positive("ridge", ridge)
    tolerance = arguments.positive(
        "gradient_tolerance", 1e-5 * row_norm if gradient_tolerance is None else gradient_tolerance
    )
    event = logistic_event(noise_multiplier, ridge, row_norm)
    name = f"logistic {x.shape[1]} {row_norm} {ridge} {tolerance}"
    rng = released_once(event, name, ledger, secret).philox("logistic", 0)
    rows = shortened(x, row_norm)
    known = (y == 1) | (y == -1)
    rows = np.where(known[:, None], rows, 0.0) * np.where(known, y, 0.0)[:, None]
    linear = np.asarray(rng.normal(size=x.shape[1]) * noise_multiplier * row_norm * (1 + 1e-12))
    weights = _minimum(rows, linear, ridge, tolerance, row_norm)
    std = OUTPUT_NOISE_MULTIPLIER * 2 * tolerance / ridge * (1 + 1e-12)
    return np.asarray(weights + std * rng.normal(size=x.shape[1]))


def _table(x: np.ndarray, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    if getattr(x, "ndim", 0) != 2 or np.shape(y) != (len(x),) or not x.shape[1]:
        raise ValueError(
            f"x and y must be arrays [n, d] and [n], got shapes {np.shape(x)} and {np.shape(y)}"
        )
    return x, np.asarray(y, np.float64)


def _statistics(
    x: np.ndarray, y: np.ndarray, row_norm: float, label_bound: float
) -> tuple[np.ndarray, np.ndarray]:
    """The **un-noised** XᵀX and Xᵀy of shortened records. Sensitive."""
    second, first = np.zeros((x.shape[1], x.shape[1])), np.zeros(x.shape[1])
    for start in range(0, len(x), _ROWS):
        label = y[start : start + _ROWS]
        rows = shortened(x[start : start + _ROWS], row_norm)
        rows[~np.isfinite(label)] = 0.0
        label = np.clip(np.where(np.isfinite(label), label, 0.0), -label_bound, label_bound)
        second += rows.T @ rows
        first += rows.T @ label
    return second, first


def _minimum(
    rows: np.ndarray, linear: np.ndarray, ridge: float, tolerance: float, row_norm: float
) -> np.ndarray:
    """The weights at which the gradient, with its rounding error, is within ``tolerance``.

    Newton's method with halved steps, from 0: a function of the records and ``linear`` alone.

    Args:
        rows: [n, d] float64, each times its label, of norm ``row_norm`` at most.
        linear: [d], b.
        ridge: λ.
        tolerance: of the gradient's norm.
        row_norm: R.

    Raises:
        ValueError: no such weights were found.
    """
    weights = np.zeros(rows.shape[1])
    value, gradient, curvature = _at(rows, linear, ridge, weights)
    best = math.inf
    for _ in range(_STEPS):
        size = float(np.linalg.norm(gradient))
        if size + _rounding(rows, weights, linear, ridge, row_norm) <= tolerance and size >= best:
            return weights  # as exact as it gets
        best, kept = min(best, size), weights
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it would reveal a number of the un-noised curvature
            try:
                step = linalg.solve(curvature, gradient, assume_a="pos")
            except linalg.LinAlgError:  # its words are of the un-noised curvature too
                break
        slope, length = float(gradient @ step), 1.0
        blurred = 1e-12 * (abs(value) + float(ridge * kept @ kept + abs(linear @ kept)))
        while length > 1e-10:
            weights = kept - length * step
            tried, gradient, curvature = _at(rows, linear, ridge, weights)
            # Near the minimum the value is all rounding: there the gradient judges. Elsewhere it
            # must not: steps that lower it and raise the value can go round in circles.
            nearer = tried <= value + blurred and np.linalg.norm(gradient) < size
            if tried <= value - 1e-4 * length * slope or nearer:
                value = tried
                break
            length /= 2
        else:
            if size + _rounding(rows, kept, linear, ridge, row_norm) <= tolerance:
                return kept
            break
    raise ValueError(
        "gradient_tolerance must be reached by the minimum, whose guarantee rests on it, got "
        f"{tolerance} with ridge {ridge}, which was not: give more of either"
    )


def _at(
    rows: np.ndarray, linear: np.ndarray, ridge: float, weights: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Value, gradient and second derivatives of the perturbed objective."""
    value = float(0.5 * ridge * weights @ weights + linear @ weights)
    gradient = ridge * weights + linear
    curvature = ridge * np.eye(len(weights))
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        margin = part @ weights
        value += float(np.sum(np.logaddexp(0.0, -margin)))
        wrong = special.expit(-margin)
        gradient -= part.T @ wrong
        curvature += (part * (wrong * special.expit(margin))[:, None]).T @ part
    return value, gradient, curvature


def _rounding(
    rows: np.ndarray, weights: np.ndarray, linear: np.ndarray, ridge: float, row_norm: float
) -> float:
    """A bound on the norm of the gradient's rounding error.

    Inner products of k terms have error k u / (1 - k u) times the sum of absolute values (Higham
    2002, Section 3.1), in any order; the logistic function has slope 1/4 at most, and is good to
    some units in the last place; sums of a block's rows, then of the blocks.
    """
    count, width = rows.shape
    size = float(np.linalg.norm(weights))
    terms = min(count, _ROWS) + count // _ROWS + 8
    one = (width + 2) * row_norm * size / 4 + 16
    whole = count * row_norm * (one + terms) + (ridge * size + np.linalg.norm(linear)) * (
        count // _ROWS + 8
    )
    return float(1.01 * _U * whole)
