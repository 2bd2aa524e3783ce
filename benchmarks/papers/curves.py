"""Figures that need no training: PIGDO's Figure 4, and DP-SBCD's Figure 1."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.papers.tables import style
from jaxdp import accounting as acc
from jaxdp._extras import needed
from jaxdp.papers import claims
from jaxdp.papers import hidden_state as hs

with needed("benchmarks.papers.curves", "papers", "matplotlib"):
    from matplotlib.figure import Figure

# PIGDO, Figure 4: as stated there.
Q, NOISE, DELTA = 0.01, 2.0, 1e-5
_FORMULAS: dict[str, tuple[Callable[..., acc.Claim], str]] = {
    "moments accountant, closed form": (claims.moments_closed_form, "moments closed form"),
    "zCDP": (claims.zcdp, "zCDP"),
    # Of the two readings of its RDP, only the second is below the MMA, as the text says.
    "RDP, AdaDp's Theorem 1": (claims.adadp_theorem_1, "AdaDp Theorem 1"),
    "RDP, Poisson, integer orders": (claims.sa_dpsgd_theorem_1, "SA-DPSGD Theorem 1"),
    "MMA (PIGDO)": (claims.modified_moments_accountant, "PIGDO MMA"),
}
# DP-SBCD's numbers are lost; these are ours, those of docs/hidden_state.md with weight decay.
BATCHES, MULTIPLIER, DECAY, EPOCHS = 32, 4.0, 0.99, 60


def moments() -> tuple[Figure, str]:
    """The four curves of PIGDO's Figure 4, and the truth."""
    epochs = np.unique(np.geomspace(5, 400, 24).astype(int))
    drawn, (axes,) = style.panels(1, 1, (8.5, 5.4))
    for name, (formula, look) in _FORMULAS.items():
        values = [formula(Q, NOISE, round(e / Q), DELTA).value for e in epochs]
        axes.plot(epochs, values, label=name, linewidth=2.2, **style.FORMULAS[look])
    truth = [_exact(round(e / Q)) for e in epochs]
    axes.plot(epochs, truth, label="exact", linewidth=2.2, **style.FORMULAS["exact"])
    axes.set(xlabel="epochs", ylabel="epsilon at delta 1e-5", xlim=(0, 400), ylim=(0, None))
    style.title(axes, f"q = {Q:g}, σ = {NOISE:g}")
    axes.legend(fontsize=12)
    ends = {n: f(Q, NOISE, 40_000, DELTA).value for n, (f, _) in _FORMULAS.items()}
    sentences = ", ".join(f"{name} {value:.2f}" for name, value in ends.items())
    return drawn, f"epsilon after 400 epochs: {sentences}, exact {truth[-1]:.2f}"


def _exact(steps: int) -> float:
    run = acc.Repeated(acc.PoissonSampled(acc.Gaussian(NOISE), Q), steps)
    return float(acc.epsilon(run, DELTA).upper)


def schedules() -> dict[str, np.ndarray]:
    """Factors of the noise, one an epoch: the four settings of DP-SBCD's Section 4.3."""
    falling = np.linspace(2.0, 0.5, EPOCHS)
    return {
        "constant": np.ones(EPOCHS),
        "decreasing, then constant": np.maximum(np.linspace(2.0, -1.0, EPOCHS), 1.0),
        "decreasing to the end": falling,
        "constant, then increasing": np.maximum(np.linspace(0.0, 2.0, EPOCHS), 1.0),
    }


def chain(factors: np.ndarray) -> hs.NoisyChain:
    """One convex block over so many epochs; a record contributes 1 to its batch's sum."""
    variances = tuple(np.square(MULTIPLIER * factors).tolist())
    return hs.NoisyChain(BATCHES, len(factors), (1.0,), variances, (1.0,), (DECAY,))


def by_iteration(place: int, epochs: int) -> np.ndarray:
    """S, the loss over its order, after every iteration: DP-SBCD's recursion with exponent 1.

    Constant noise; the record that differs is in batch ``place`` of every epoch, from 1.
    """
    noise, kept, loss, found = MULTIPLIER**2, 0.0, 0.0, []
    for step in range(epochs * BATCHES):
        if step % BATCHES == place - 1:
            loss += 2.0**2 / (2 * noise)
        else:
            loss *= kept / (kept + noise)
        kept = DECAY**2 * (kept + noise)
        found.append(loss)
    return np.array(found)


def block_coordinate() -> tuple[Figure, str]:
    """DP-SBCD's Figure 1: the loss by the place j0 of the record's batch, and by schedule."""
    drawn, (left, right) = style.panels(1, 2, (12, 5.6))
    for i, place in enumerate((1, BATCHES // 2, BATCHES)):
        look = {"color": style.COLOURS[i], "linestyle": style.DASHES[i], "linewidth": 2}
        values = by_iteration(place, 8)
        steps = np.arange(1, len(values) + 1) / BATCHES
        left.plot(steps[values > 0], values[values > 0], label=f"j0 = {place}", **look)
    left.set(yscale="log", xlabel="epochs", ylabel="Rényi divergence over its order (log scale)")
    style.title(left, "Constant noise, the record in batch j0")
    left.legend(loc="lower right", fontsize=12)
    sentences = []
    for i, (name, factors) in enumerate(schedules().items()):
        every = range(1, EPOCHS + 1)
        worst = {
            bound: [float(bound(chain(factors[:e])).max()) for e in every]
            for bound in (hs.log_sobolev, hs.shifted)
        }
        # Curves lie upon one another in part: their markers do not.
        marked: dict[str, Any] = {"color": style.COLOURS[i], "marker": style.MARKERS[i]}
        marked |= {"markersize": 7, "markevery": (2 + 4 * i, 16)}
        right.plot(every, worst[hs.log_sobolev], "-", label=name, **marked)
        right.plot(every, worst[hs.shifted], "--", **marked)
        sentences.append(f"{name} {worst[hs.log_sobolev][-1]:.3f} and {worst[hs.shifted][-1]:.3f}")
    right.set(yscale="log", xlabel="epochs", ylabel=left.get_ylabel())
    right.plot([], [], "-", color="0.35", label="by log-Sobolev inequalities")
    right.plot([], [], "--", color="0.35", label="by the shifted bound")
    style.title(right, "Four schedules of the noise, worst batch")
    right.set_ylim(top=6)
    right.legend(loc="upper left", fontsize=12)
    for panel, ticks in ((left, (0.003, 0.01, 0.03, 0.1, 0.3)), (right, (0.03, 0.1, 0.3, 1))):
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
    return drawn, (
        f"divergence over its order after {EPOCHS} epochs, by log-Sobolev inequalities and by the "
        "shifted bound: " + ", ".join(sentences)
    )
