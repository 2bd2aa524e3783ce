"""Trajectories of algorithms with two parameters, and how they are drawn."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp._extras import needed
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.energy import PublicEnergy
from jaxdp.training.step import PrivateStep
from jaxdp.types import PyTree

with needed("benchmarks.papers.plane", "papers", "matplotlib"):
    from matplotlib.axes import Axes

SEEDS = 200
_Range = tuple[float, float]


def trajectories(
    algorithm: Algorithm,
    loss_fn: Callable[..., jax.Array],
    start: jax.Array,
    steps: int,
    records: PyTree | None = None,
    energy: PublicEnergy | None = None,
    seeds: int = SEEDS,
) -> np.ndarray:
    """float32 [seeds, steps + 1, 2]: the parameters along full-batch runs of an algorithm."""
    batch = jnp.ones(1) if records is None else records
    links = PrivateStep.of(algorithm, loss_fn)
    extra: dict[str, Any] = {} if energy is None else {"energy": energy}

    def one(words: jax.Array) -> jax.Array:
        noise = jax.random.wrap_key_data(words, impl="threefry2x32")

        def body(carry: tuple[PyTree, PyTree], step: jax.Array) -> Any:
            params, state = carry
            summed = links.grad_fn(params, batch, "all", **links.clipped_by(state))
            key = algorithm.mechanism.simulated_key(jax.random.fold_in(noise, step), step)
            params, state, _, _ = links.release(params, state, summed, key, **extra)
            return (params, state), params

        begun = (start, links.init(start))
        _, path = jax.lax.scan(body, begun, jnp.arange(steps))
        return jnp.concatenate([start[None], path])

    keys = jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(1), seeds))
    return np.asarray(jax.jit(jax.vmap(one))(keys))


def contours(axes: Axes, f: Callable[..., np.ndarray], x: _Range, y: _Range) -> None:
    """Draws the level lines of ``f`` over a rectangle, and names its sides."""
    grid = np.meshgrid(np.linspace(x[0], x[1], 200), np.linspace(y[0], y[1], 200))
    axes.contour(*grid, f(*grid), levels=14, colors="0.75", linewidths=0.7)
    axes.grid(visible=False)
    axes.set(xlim=x, ylim=y, xlabel="first parameter", ylabel="second parameter")


def draw(axes: Axes, path: np.ndarray, name: str, look: dict[str, Any]) -> None:
    """Draws a trajectory [n, 2] with a mark at its end."""
    axes.plot(path[:, 0], path[:, 1], label=name, linewidth=1.6, markevery=[-1], **look)
