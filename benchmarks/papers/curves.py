"""Figures that need no training: PIGDO's Figure 4, and DP-SBCD's Figure 1."""

from collections.abc import Callable

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
_FORMULAS: dict[str, Callable[..., acc.Claim]] = {
    "moments accountant, closed form": claims.moments_closed_form,
    "zCDP": claims.zcdp,
    # Of the two readings of its RDP, only the second is below the MMA, as the text says.
    "RDP, AdaDp's Theorem 1": claims.adadp_theorem_1,
    "RDP, Poisson, integer orders": claims.sa_dpsgd_theorem_1,
    "MMA (PIGDO)": claims.modified_moments_accountant,
}
# DP-SBCD's numbers are lost; these are ours, those of docs/hidden_state.md with weight decay.
BATCHES, MULTIPLIER, DECAY, EPOCHS = 32, 4.0, 0.99, 60


def moments() -> tuple[Figure, str]:
    """The four curves of PIGDO's Figure 4, and the truth."""
    epochs = np.unique(np.geomspace(5, 400, 24).astype(int))
    drawn, (axes,) = style.panels(1, 1, (8.5, 5.4))
    for i, (name, formula) in enumerate(_FORMULAS.items()):
        values = [formula(Q, NOISE, round(e / Q), DELTA).value for e in epochs]
        look = {"color": style.COLOURS[i], "linestyle": style.DASHES[i], "linewidth": 2.2}
        axes.plot(epochs, values, label=name, **look)
    truth = [_exact(round(e / Q)) for e in epochs]
    axes.plot(epochs, truth, label="exact", color="black", linewidth=1.2)
    axes.set(xlabel="epochs", ylabel="epsilon at delta 1e-5", xlim=(0, 400), ylim=(0, None))
    style.title(axes, f"q = {Q:g}, σ = {NOISE:g}")
    axes.legend()
    ends = {n: f(Q, NOISE, 40_000, DELTA).value for n, f in _FORMULAS.items()}
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
    drawn, (left, right) = style.panels(1, 2, (13, 5.4))
    for i, place in enumerate((1, BATCHES // 2, BATCHES)):
        look = {"color": style.COLOURS[i], "linestyle": style.DASHES[i], "linewidth": 2}
        values = by_iteration(place, 8)
        steps = np.arange(1, len(values) + 1) / BATCHES
        left.plot(steps[values > 0], values[values > 0], label=f"j0 = {place}", **look)
    left.set(yscale="log", xlabel="epochs", ylabel="Rényi divergence over its order")
    style.title(left, "Constant noise, batch j0 holds the record")
    left.legend(loc="lower right")
    sentences = []
    for i, (name, factors) in enumerate(schedules().items()):
        every = range(1, EPOCHS + 1)
        worst = {
            bound: [float(bound(chain(factors[:e])).max()) for e in every]
            for bound in (hs.log_sobolev, hs.shifted)
        }
        # The constant's lies under others in part.
        width = 5 if i == 0 else 1.6
        right.plot(
            every, worst[hs.log_sobolev], "-", color=style.COLOURS[i], label=name, linewidth=width
        )
        right.plot(every, worst[hs.shifted], "--", color=style.COLOURS[i])
        sentences.append(f"{name} {worst[hs.log_sobolev][-1]:.3f} and {worst[hs.shifted][-1]:.3f}")
    right.set(yscale="log", xlabel="epochs")
    style.title(right, "Four schedules of the noise, worst batch")
    right.legend(loc="upper left", title="solid: log-Sobolev; dashed: shifted")
    return drawn, (
        f"divergence over its order after {EPOCHS} epochs, by log-Sobolev inequalities and by the "
        "shifted bound: " + ", ".join(sentences)
    )
