"""The papers' figures, drawn with the algorithms themselves; settings not stated there are ours."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import clipping
from jaxdp._extras import needed
from jaxdp.mechanism import with_rule
from jaxdp.optimizers.adaptive import sgd
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.annealing import sa_dpsgd
from jaxdp.optimizers.energy import PublicEnergy

with needed("benchmarks.papers.figures", "papers", "matplotlib"):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from benchmarks.papers import adadp_gradients, adadp_noise, beale, curves, plane
    from benchmarks.papers.tables import style


# The noises of AdaDp's experiment after Lemma 1, and the cosines that it prints.
LEMMA_1 = {(17.0, 8.5): 0.52, (13.5, 13.5): 0.36, (12.4, 24.8): 0.28}


def save_all(folder: Path, results: Path) -> list[tuple[Path, str]]:
    """Draws every figure; returns each path with a sentence of what was found.

    Args:
        folder: of the figures.
        results: folder of the stored rows: AdaDp's noise and gradients are drawn if they are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[], tuple[Figure, str]]] = {
        "beale.png": beale.figure,
        "cosines.png": cosines,
        "annealing.png": annealing_in_a_plane,
        "moments.png": curves.moments,
        "block_coordinate.png": curves.block_coordinate,
    }
    for made in (adadp_noise, adadp_gradients):
        if (stored := results / made.FILE).exists():
            kept = json.loads(stored.read_text(encoding="utf-8"))
            makers[f"{stored.stem}.png"] = functools.partial(made.figure, kept)
    found = []
    for name, make in makers.items():
        figure, sentence = make()
        FigureCanvasAgg(figure).print_png(folder / name)
        found.append((folder / name, sentence))
    return found


def cosines() -> tuple[Figure, str]:
    """Lemma 1's experiment: mean cosine between the query (10, 5) and its noisy answer."""
    stds = LEMMA_1
    ours = [cosine(std) for std in stds]
    figure, (axes,) = style.panels(1, 1, (8.5, 5))
    place = np.arange(len(stds))
    colour = style.look("adadp")["color"]
    for shift, label, heights, filled in (
        (-0.2, "printed", list(stds.values()), False),
        (0.2, "found, 2 million draws", ours, True),
    ):
        look = {"edgecolor": colour, "facecolor": colour if filled else "white", "linewidth": 2}
        bars = axes.bar(place + shift, heights, 0.36, label=label, **look)
        axes.bar_label(bars, fmt="%.2f", fontsize=12, padding=2)
    axes.set_xticks(place, [f"σ = {std}" for std in stds])
    axes.set_ylabel("mean cosine similarity")
    axes.margins(y=0.1)
    style.title(axes, "AdaDp, the experiment after Lemma 1")
    style.legend(figure, (axes,), 2)
    pairs = zip(stds.values(), ours, strict=True)
    return figure, "printed / found: " + ", ".join(f"{a:.2f} / {b:.3f}" for a, b in pairs)


def cosine(
    std: tuple[float, float],
    draws: int = 2_000_000,
    seed: int = 0,
    query: tuple[float, float] = (10.0, 5.0),
) -> float:
    """Mean cosine of a query and that query + N(0, diag(std²))."""
    noise = np.random.default_rng(seed).normal(size=(draws, 2)) * np.asarray(std)
    noisy, truth = np.asarray(query) + noise, np.asarray(query)
    return float(np.mean(noisy @ truth / np.linalg.norm(noisy, axis=1) / np.linalg.norm(truth)))


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
    figure, panels = style.panels(1, 2, (11, 5.2))
    sides = (((-0.3, 2.0), (-1.6, 0.4)), ((1.1, 1.8), (-1.3, -0.6)))
    for axes, (across, up) in zip(panels, sides, strict=True):
        plane.contours(
            axes, lambda a, b: np.square(a - truth[0]) + np.square(b - truth[1]), across, up
        )
    style.title(panels[0], "Linear regression: 60 candidates")
    style.title(panels[1], "its end, enlarged")
    found = []
    algorithms: dict[str, tuple[Algorithm, PublicEnergy | None]] = {
        "DP-SGD": (sgd(mechanism, 0.5), None),
        "SA-DPSGD, every candidate charged": (sa_dpsgd(mechanism, 0.5, key), energy),
    }
    for name, (algorithm, judge) in algorithms.items():
        paths = plane.trajectories(algorithm, _regression, jnp.zeros(2), 60, records[:100], judge)
        dashes = {"linestyle": "-" if judge is None else "--"}  # their beginnings are one
        for axes in panels:
            plane.draw(axes, paths[0], name, style.look(name.lower()) | dashes)
        ends = np.linalg.norm(paths[:, -1] - truth, axis=1)
        found.append(f"{name} {np.median(ends):.3f}")
    for axes in panels:
        axes.plot(*truth, "k*", markersize=14, label="least squares", zorder=3)
    panels[1].set_ylabel("")
    style.legend(figure, panels, 3)
    return figure, (
        f"median distance to the truth over {plane.SEEDS} seeds after 60 charged candidates of the "
        "same event: " + ", ".join(found)
    )


def _regression(weights: jax.Array, record: jax.Array) -> jax.Array:
    return 0.5 * jnp.square(jnp.vdot(weights, record[:2]) - record[2])
