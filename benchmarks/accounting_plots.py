"""The two plots of docs/accounting.md.

python -m benchmarks.accounting_plots [--out docs/images]
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np

from jaxdp import accounting as acc

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Okabe & Ito's colours and a dash pattern for each line, told apart without colour vision.
plt.rcParams["axes.prop_cycle"] = plt.cycler(
    color=["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#000000"],
    linestyle=["-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1))],
)

Q, Z, DELTA = 512 / 60_000, 1.23, 1e-5


def event(q: float, z: float, steps: int) -> acc.Repeated:
    """A DP-SGD run."""
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


def accountants(path: Path) -> None:
    """Upper epsilon of every accountant along the SA-DPSGD MNIST run."""
    steps = np.unique(np.geomspace(100, 8_000, 40).astype(int))
    figure, axes = plt.subplots(figsize=(7, 4.5))
    one = acc.PoissonSampled(acc.Gaussian(Z), Q)
    full = [acc.epsilon(acc.Repeated(acc.Gaussian(Z), int(n)), DELTA).upper for n in steps]
    mironov = [acc.claims.sa_dpsgd_theorem_1(Q, Z, int(n), DELTA).value for n in steps]
    axes.plot(steps, mironov, label="RDP, integer orders, Mironov's conversion")
    axes.plot(steps, acc.epsilons_over_steps(one, steps.tolist(), DELTA, method="rdp"), label="rdp")
    axes.plot(
        steps,
        [acc.epsilon(event(Q, Z, int(n)), DELTA, method="clt").estimate for n in steps],
        ":",
        label="GDP by the central limit theorem (no bound)",
    )
    pld = acc.epsilons_over_steps(one, steps[::4].tolist(), DELTA, method="pld")
    axes.plot(steps[::4], pld, "o", ms=5, ls="none", zorder=3, label="pld (upper end)")
    axes.plot(steps, acc.epsilons_over_steps(one, steps.tolist(), DELTA), lw=2, label="exact")
    axes.axhline(3, color="grey", lw=0.8)
    axes.set(
        xlabel="steps",
        ylabel=f"epsilon at delta = {DELTA:g}",
        ylim=(0, 4),
        title=f"q = 512/60,000, noise multiplier {Z}, add or remove one",
    )
    axes.text(120, 3.75, f"without sampling: {full[0]:.0f} after {steps[0]} steps", fontsize=8)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def claimed(path: Path) -> None:
    """Claims divided by the proven epsilon, against the number of steps."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axes, (q, z) in zip(panels, ((0.01, 1.0), (0.01, 2.0)), strict=True):
        steps = np.unique(np.geomspace(2, 40_000, 30).astype(int))
        truth = [acc.epsilon(event(q, z, int(n)), DELTA).lower for n in steps]
        names: dict[str, list[float]] = {}
        for n, proven in zip(steps, truth, strict=True):
            for claim in acc.claims.all_claims(q, z, int(n), DELTA):
                ratio = claim.value / proven if proven > 0 else np.nan
                names.setdefault(claim.name, []).append(ratio)
        for name, ratios in names.items():
            if "printed" not in name:
                axes.plot(steps, ratios, label=name)
        axes.axhline(1, color="black", lw=1)
        axes.fill_between(steps, 0.05, 1, color="#D55E00", alpha=0.08)
        axes.set(
            xscale="log",
            yscale="log",
            ylim=(0.05, 20),
            xlabel="steps",
            title=f"q = {q}, noise multiplier {z:g}, delta = {DELTA:g}",
        )
    panels[0].set_ylabel("claimed epsilon / true epsilon (shaded: below the truth)")
    panels[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="docs/images")
    out = Path(parser.parse_args().out)
    out.mkdir(parents=True, exist_ok=True)
    accountants(out / "accountants.png")
    claimed(out / "claims.png")


if __name__ == "__main__":
    main()
