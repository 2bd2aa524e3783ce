"""The hidden-state accountant: figures, and the plot of docs/hidden_state.md.

python -m benchmarks.hidden_state [--out docs/images]
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg

from benchmarks.papers.tables import style
from jaxdp import accounting as acc
from jaxdp.papers import claims
from jaxdp.papers import hidden_state as hs

RESULTS = Path(__file__).parent / "results" / "hidden_state.json"
DELTA, BATCHES, Z = 1e-5, 32, 4.0
REPLACE = acc.Relation.REPLACE_ONE


def exact(chain: hs.NoisyChain, position: int) -> float:
    """S of the one-dimensional linear-Gaussian chain, whose mean and variance are known."""
    c, p, v, s = (
        chain.table(n).ravel() for n in ("contractions", "proximal", "variances", "contributions")
    )
    mean = variance = 0.0
    for k in range(chain.steps):
        moved = 2 * s[k] if k % chain.batches == position else 0.0
        mean, variance = p[k] * (c[k] * mean + moved), p[k] ** 2 * (c[k] ** 2 * variance + v[k])
    return mean**2 / (2 * variance)


def random_chains(count: int) -> dict:
    """Bound over exact value on random linear-Gaussian chains; below 1 is a violation."""
    rng, found = np.random.default_rng(0), {"shifted": [], "log_sobolev": [], "published": []}
    for _ in range(count):
        batches, epochs = rng.integers(1, 6, 2)
        kinds = (1, epochs, batches * epochs)

        def draw(low: float, high: float, kinds: tuple = kinds) -> tuple[float, ...]:
            return tuple(rng.uniform(low, high, rng.choice(kinds)))

        chain = hs.NoisyChain(
            batches, epochs, draw(0.05, 0.5), draw(0.3, 2.0), draw(0.05, 1.0), draw(0.3, 1.0)
        )
        position = rng.integers(batches)
        truth = exact(chain, position)
        found["shifted"].append(hs.shifted(chain)[position] / truth)
        found["log_sobolev"].append(hs.log_sobolev(chain)[position] / truth)
        found["published"].append(hs.log_sobolev(chain, published=True)[position] / truth)
    return {
        name: {
            "min": float(np.min(ratios)), "median": float(np.median(ratios)),
            "below_exact": int(np.sum(np.array(ratios) < 1 - 1e-9)),
        }
        for name, ratios in found.items()
    }  # fmt: skip


def million_steps() -> dict[str, float]:
    """Seconds for a million steps."""
    slow = tuple(np.linspace(2, 1, 10**6))
    chains = {
        "1 batch, 1e6 epochs": hs.NoisyChain(1, 10**6, 0.5, 1.0, 0.9999),
        "1,000 batches, 1,000 epochs": hs.NoisyChain(1000, 1000, 0.5, 1.0),
        "a million different noises": hs.NoisyChain(1, 10**6, 0.5, slow, 0.9999),
        "with a diameter": hs.NoisyChain(1, 10**6, 0.5, slow, diameter=50.0),
    }
    seconds = {}
    for name, chain in chains.items():
        started = time.perf_counter()
        hs.shifted(chain)
        seconds[name] = round(time.perf_counter() - started, 3)
    return seconds


def chain(epochs: int, proximal: float, diameter: float | None = None) -> hs.NoisyChain:
    """A released-noise multiplier of 4 over 32 batches; one record contributes 1."""
    return hs.NoisyChain(BATCHES, epochs, 1.0, Z**2, 1.0, proximal, diameter=diameter)


def curves(epochs: list[int], proximal: float) -> dict[str, list[float]]:
    """Epsilon after so many epochs, by every way of accounting."""

    def ask(event: acc.Event, algorithm: str = "auto") -> float:
        return acc.epsilon(event, DELTA, REPLACE, algorithm).upper

    lines: dict[str, list[float]] = {}
    for e in epochs:
        one = hs.HiddenState([chain(e, proximal)])
        poisson = acc.Repeated(acc.PoissonSampled(acc.Gaussian(Z), 1 / BATCHES), BATCHES * e)
        values = {
            "fixed batches, every iterate released": ask(hs.HiddenState(one.blocks, exposed="x")),
            "Poisson batches, every iterate released": ask(poisson),
            "hidden, log-Sobolev (corrected)": ask(one, "log_sobolev"),
            "hidden, shifted bound": ask(one),
            "hidden, shifted bound, averaged": ask(hs.HiddenState(one.blocks, average=True)),
            "claim: Theorem 4.6 as published": claims.dp_sbcd_theorem_4_6(one.blocks, DELTA).value,
        }
        for name, value in values.items():
            lines.setdefault(name, []).append(value)
    return lines


def plot(path: Path, epochs: list[int]) -> dict:
    """Privacy against epochs, without and with weight decay."""
    figure, panels = style.panels(1, 2, (12, 6), sharey=True)
    shown = {}
    for axes, (proximal, title) in zip(
        panels, ((1.0, "no weight decay"), (0.99, "weight decay, L_P = 0.99")), strict=True
    ):
        lines = curves(epochs, proximal)
        shown[title] = {name: [round(v, 4) for v in values] for name, values in lines.items()}
        for i, (name, values) in enumerate(lines.items()):
            look = {"color": style.COLOURS[i], "linestyle": style.DASHES[i], "linewidth": 2}
            axes.plot(epochs, values, label=name, marker=style.MARKERS[i], markevery=3, **look)
        axes.set(xscale="log", yscale="log", xlabel="epochs (log scale)")
        axes.set_xticks([1, 10, 100], ["1", "10", "100"])
        axes.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
        style.title(axes, title[0].upper() + title[1:])
    panels[0].set_ylabel("epsilon at delta 1e-5, replace one (log scale)")
    style.legend(figure, panels, 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)
    return {"epochs": epochs, **shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="docs/images")
    out = Path(parser.parse_args().out)
    epochs = [1, 2, 3, 5, 8, 13, 20, 30, 50, 80, 130, 200]
    results = {
        "random_chains": random_chains(4000),
        "seconds": million_steps(),
        "plot": plot(out / "hidden_state.png", epochs),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
