"""The papers' figures, drawn with the algorithms themselves; settings not stated there are ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import clipping
from jaxdp._extras import needed
from jaxdp.mechanism import with_rule
from jaxdp.optimizers.adadp import adadp
from jaxdp.optimizers.adaptive import sgd
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.annealing import sa_dpsgd
from jaxdp.optimizers.energy import PublicEnergy
from jaxdp.papers.adadp import adadp_as_published
from jaxdp.types import PyTree

with needed("jaxdp.papers.figures", "papers", "matplotlib"):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

# Okabe & Ito's colours; line styles differ as well.
_STYLES = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"))
_SEEDS = 200
# Figure 1 of AdaDp: start, rates and noise are not stated there; these are ours.
_START, _MINIMUM, _NOISE, _BOUND = (1.0, 1.5), (3.0, 0.5), 0.5, 2.0


def save_all(folder: Path) -> list[tuple[Path, str]]:
    """Draws every figure; returns each path with a sentence of what was found."""
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[], tuple[Figure, str]]] = {
        "beale.png": beale,
        "cosines.png": cosines,
        "annealing.png": annealing_in_a_plane,
    }
    found = []
    for name, make in makers.items():
        figure, sentence = make()
        FigureCanvasAgg(figure).print_png(folder / name)
        found.append((folder / name, sentence))
    return found


def beale() -> tuple[Figure, str]:
    """Trajectories of AdaDp and DP-SGD on the Beale function, AdaDp's Figure 1.

    (1.5 − x + xy)² + (2.25 − x + xy²)² + (2.625 − x + xy³)²; the paper prints a cube on the last
    bracket, which has no minimum. γ 0.1, γ′ 0.9, β 1.5, G 1e-6 are the paper's.
    """
    noise, bound = _NOISE, _BOUND
    flat = with_rule(clipping.clip(bound), noise, 1, 1, "full_batch")
    box = with_rule(clipping.coordinate_box(1.0), noise, 1, 1, "full_batch")
    algorithms = {
        "DP-SGD": sgd(flat, 0.02),
        "AdaDp, repaired": adadp(box, 0.05, bound=bound, beta=1.5),
        "AdaDp, as published": adadp_as_published(
            noise, 1, 1, 0.05, bound=bound, beta=1.5, sampling="full_batch"
        ),
    }
    start = jnp.asarray(_START)
    figure, axes = _plane("Beale function: 150 steps, minimum at the star")
    _contours(axes, lambda x, y: np.log10(1e-3 + _beale(x, y)), (-0.5, 4.2), (-1.0, 2.0))
    found = []
    for (name, algorithm), style in zip(algorithms.items(), _STYLES, strict=False):
        paths = trajectories(algorithm, lambda w, e: e * _beale(w[0], w[1]), start, 150)
        _draw(axes, paths[0], name, style)
        ends = np.linalg.norm(paths[:, -1] - np.asarray(_MINIMUM), axis=1)
        found.append(f"{name} {np.nanmedian(ends):.3f}")
    axes.plot(*_MINIMUM, "k*", markersize=12)
    axes.legend(loc="upper right")
    return figure, (
        f"median distance to the minimum over {_SEEDS} seeds, from {_START} with noise "
        f"multiplier {noise}, C {bound}, rates 0.02 and 0.05: " + ", ".join(found)
    )


def cosines() -> tuple[Figure, str]:
    """Lemma 1's experiment: mean cosine between the query (10, 5) and its noisy answer."""
    stds = {(17.0, 8.5): 0.52, (13.5, 13.5): 0.36, (12.4, 24.8): 0.28}
    ours = [cosine(std) for std in stds]
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    place = np.arange(len(stds))
    axes.bar(place - 0.2, list(stds.values()), 0.4, label="printed", color="#0072B2", hatch="//")
    axes.bar(place + 0.2, ours, 0.4, label="found, 2 million draws", color="#D55E00")
    axes.set_xticks(place, [f"σ = {std}" for std in stds])
    axes.set_ylabel("mean cosine similarity")
    axes.set_title("AdaDp, the experiment after Lemma 1", loc="left", fontweight="bold")
    axes.legend()
    pairs = zip(stds.values(), ours, strict=True)
    return figure, "printed / found: " + ", ".join(f"{a:.2f} / {b:.3f}" for a, b in pairs)


def cosine(std: tuple[float, float], draws: int = 2_000_000, seed: int = 0) -> float:
    """Mean cosine of (10, 5) and (10, 5) + N(0, diag(std²))."""
    query = np.array([10.0, 5.0])
    noisy = query + np.random.default_rng(seed).normal(size=(draws, 2)) * np.asarray(std)
    return float(np.mean(noisy @ query / np.linalg.norm(noisy, axis=1) / np.linalg.norm(query)))


def annealing_in_a_plane() -> tuple[Figure, str]:
    """SA-DPSGD's Figure 1: linear regression with two weights, with and without annealing."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(200, 2)).astype(np.float32)
    truth = np.array([1.5, -1.0], np.float32)
    y = (x @ truth + 0.3 * rng.normal(size=200)).astype(np.float32)
    records = jnp.concatenate([jnp.asarray(x), jnp.asarray(y)[:, None]], axis=1)
    mechanism = with_rule(clipping.clip(0.5), 25.0, 100, 100, "full_batch")
    key = jax.random.key(0)
    energy = PublicEnergy(_regression, records[100:])
    figure, axes = _plane("Linear regression: 60 candidates, least squares at the star")
    _contours(
        axes,
        lambda a, b: np.square(a - truth[0]) + np.square(b - truth[1]),
        (-0.6, 2.2),
        (-1.8, 0.6),
    )
    found = []
    algorithms: dict[str, tuple[Algorithm, PublicEnergy | None]] = {
        "DP-SGD": (sgd(mechanism, 0.5), None),
        "SA-DPSGD, every candidate charged": (sa_dpsgd(mechanism, 0.5, key), energy),
    }
    for (name, (algorithm, judge)), style in zip(algorithms.items(), _STYLES, strict=False):
        paths = trajectories(algorithm, _regression, jnp.zeros(2), 60, records[:100], judge)
        _draw(axes, paths[0], name, style)
        ends = np.linalg.norm(paths[:, -1] - truth, axis=1)
        found.append(f"{name} {np.median(ends):.3f}")
    axes.plot(*truth, "k*", markersize=12)
    axes.legend(loc="lower left")
    return figure, (
        f"median distance to the truth over {_SEEDS} seeds after 60 charged candidates of the same "
        "event: " + ", ".join(found)
    )


def trajectories(
    algorithm: Algorithm,
    loss_fn: Callable[..., jax.Array],
    start: jax.Array,
    steps: int,
    records: PyTree | None = None,
    energy: PublicEnergy | None = None,
    seeds: int = _SEEDS,
) -> np.ndarray:
    """float32 [seeds, steps + 1, 2]: the parameters along full-batch runs of an algorithm."""
    batch = jnp.ones(1) if records is None else records
    links = algorithm.step(loss_fn)
    extra: dict[str, Any] = {} if energy is None else {"energy": energy}

    def one(words: jax.Array) -> jax.Array:
        noise = jax.random.wrap_key_data(words, impl="threefry2x32")

        def body(carry: Any, step: jax.Array) -> Any:
            params, state = carry
            summed, _ = links.grad_fn(params, batch, "all", **links.clipped_by(state))
            key = algorithm.mechanism.simulated_key(jax.random.fold_in(noise, step), step)
            params, state, _, _ = links.release(params, state, summed, key, **extra)
            return (params, state), params

        begun = (start, links.init(start))
        _, path = jax.lax.scan(body, begun, jnp.arange(steps))
        return jnp.concatenate([start[None], path])

    keys = jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(1), seeds))
    return np.asarray(jax.jit(jax.vmap(one))(keys))


def _beale(x: Any, y: Any) -> Any:
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


def _regression(weights: jax.Array, record: jax.Array) -> jax.Array:
    return 0.5 * jnp.square(jnp.vdot(weights, record[:2]) - record[2])


def _plane(title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold", fontsize=10)
    axes.set_xlabel("first parameter")
    axes.set_ylabel("second parameter")
    return figure, axes


_Range = tuple[float, float]


def _contours(axes: Any, f: Callable[..., np.ndarray], x: _Range, y: _Range) -> None:
    grid = np.meshgrid(np.linspace(x[0], x[1], 200), np.linspace(y[0], y[1], 200))
    axes.contour(*grid, f(*grid), levels=14, colors="0.75", linewidths=0.7)
    axes.set_xlim(*x)
    axes.set_ylim(*y)


def _draw(axes: Any, path: np.ndarray, name: str, style: tuple[str, str]) -> None:
    axes.plot(path[:, 0], path[:, 1], style[1], color=style[0], label=name, linewidth=1.3)
    axes.plot(*path[-1], "o", color=style[0])
