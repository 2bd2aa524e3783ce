"""AdaDp's Figure 1: private trajectories on the Beale function beside those without noise."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.papers import plane
from benchmarks.papers.tables import style
from jaxdp import clipping
from jaxdp._extras import needed
from jaxdp.mechanism import with_rule
from jaxdp.optimizers.adadp import adadp
from jaxdp.optimizers.adaptive import sgd
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.papers.adadp import adadp_as_published

with needed("benchmarks.papers.beale", "papers", "matplotlib"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Start, rates, clipping and noise are not stated in the paper; these are ours.
START, MINIMUM, NOISE, BOUND, STEPS = (1.0, 1.5), (3.0, 0.5), 0.5, 2.0, 150
RATES = (0.02, 0.05)
PRINTED = {"DP-SGD": 0.90, "AdaDp, as published": 0.21}


Coordinate = float | np.ndarray | jax.Array


def beale(x: Coordinate, y: Coordinate) -> Coordinate:
    """(1.5 − x + xy)² + (2.25 − x + xy²)² + (2.625 − x + xy³)²; minimum 0 at (3, 0.5).

    The paper prints a cube on the last bracket, which has no minimum.
    """
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


def algorithms(noise: float, rates: tuple[float, float] = RATES) -> dict[str, Algorithm]:
    """The three that are drawn; γ 0.1, γ′ 0.9, β 1.5 and G 1e-6 are the paper's.

    Args:
        noise: multiplier; 0 gives the form without noise, whose clipping stays.
        rates: of DP-SGD, and of AdaDp.
    """
    flat = with_rule(clipping.clip(BOUND), noise, 1, 1, "full_batch")
    box = with_rule(clipping.coordinate_box(1.0), noise, 1, 1, "full_batch")
    return {
        "DP-SGD": sgd(flat, rates[0]),
        "AdaDp, repaired": adadp(box, rates[1], bound=BOUND, beta=1.5),
        "AdaDp, as published": adadp_as_published(
            noise, 1, 1, rates[1], bound=BOUND, beta=1.5, sampling="full_batch"
        ),
    }


def path(algorithm: Algorithm, seeds: int) -> np.ndarray:
    """float32 [seeds, 151, 2]: trajectories from ``START``."""
    return plane.trajectories(algorithm, _loss, jnp.asarray(START), STEPS, seeds=seeds)


def distance(private: np.ndarray, noiseless: np.ndarray) -> np.ndarray:
    """D(P, Q) of each private trajectory [seeds, n + 1, 2]: the mean distance step by step."""
    far = np.linalg.norm(private[:, 1:] - noiseless[:, 1:], axis=2)
    return np.asarray(far.mean(axis=1))


def figure(seeds: int = plane.SEEDS) -> tuple[Figure, str]:
    """A panel an algorithm: one private trajectory, and the one without noise.

    Args:
        seeds: trajectories over which the medians are taken.
    """
    without, found = algorithms(0.0), []
    drawn, panels = style.panels(1, 3, (12, 5.4), sharey=True)
    for axes, (name, algorithm) in zip(panels, algorithms(NOISE).items(), strict=True):
        private, noiseless = path(algorithm, seeds), path(without[name], 1)
        far = float(np.nanmedian(distance(private, noiseless)))
        ends = np.linalg.norm(private[:, -1] - np.asarray(MINIMUM), axis=1)
        style.title(axes, f"{name}\nD(P, Q) {far:.3f},\nto the minimum {np.nanmedian(ends):.3f}")
        _background(axes)
        look = style.look(name.lower().replace(", as ", "-as-"))
        plane.draw(axes, private[0], "", look)
        without_noise = {"color": "0.35", "linestyle": ":", "marker": "o"}
        plane.draw(axes, noiseless[0], "the same without noise", without_noise)
        axes.plot(*MINIMUM, "*", color="black", markersize=14, label="the minimum", zorder=3)
        found.append(f"{name} {far:.3f} and {np.nanmedian(ends):.3f}")
    panels[0].plot([], [], color="0.35", label="private, in the algorithm's colour")
    for axes in panels[1:]:
        axes.set_ylabel("")
    style.legend(drawn, panels, 3)
    return drawn, (
        "median mean distance D(P, Q) to the trajectory without noise, and distance of the end to "
        f"the minimum, over {seeds} seeds, from {START} with noise multiplier {NOISE}, C {BOUND}, "
        f"rates {RATES[0]} and {RATES[1]}: " + ", ".join(found)
    )


def _loss(weights: jax.Array, scale: jax.Array) -> jax.Array:
    # The one record is 1; a loss must depend on it.
    value: jax.Array = scale * beale(weights[0], weights[1])
    return value


def _background(axes: Axes) -> None:
    plane.contours(axes, lambda x, y: np.log10(1e-3 + beale(x, y)), (-0.5, 4.2), (-1.0, 2.0))
