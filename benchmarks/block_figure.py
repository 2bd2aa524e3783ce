"""DP-SBCD's Figure 2 and Table 1 as plots: what the paper prints, and the stand-in's rows.

The stand-in is a generated five-class set (docs/block_coordinate.md): the paper's sizes, rates and
noise are lost, so that nothing here is its experiment again.
"""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg

from benchmarks.papers.tables import style
from jaxdp.papers import claims
from jaxdp.papers import hidden_state as hs

EPOCHS = (10, 20, 30, 40, 50)
# DP-SBCD, Table 1: privacy loss and accuracy in percent, "C"onstant and "D"ecreasing noise.
PRINTED = {
    "decreasing": ((0.040556, 20.13), (0.040648, 42.15), (0.040688, 92.10), (0.040704, 93.98),
                   (0.040708, 94.37)),
    "constant": ((0.041408, 20.03), (0.040652, 23.57), (0.040696, 53.35), (0.040712, 82.35),
                 (0.040716, 91.16)),
}  # fmt: skip
# Markers of the forms of the stand-in.
_FORMS = {"softmax": "D", "as published": "s", "R1": "v"}
DELTA, BATCHES, RATE, CLIP, SIZE = 1e-5, 33, 0.5, 0.05, 64
# Of the stand-in, whose noise falls linearly from 1.5 to 0.5 of its multiplier.
LEVELS = (1.5, 0.5)


def save_figure(results: dict[str, Any], path: Path) -> str:
    """Draws both panels from stored rows; returns the path with what was found."""
    figure, (left, right) = style.panels(1, 2, (12, 7))
    _accuracies(left, results)
    told = _losses(right, results)
    for panel in (left, right):
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), fontsize=11.5)
    FigureCanvasAgg(figure).print_png(path)
    return f"{path}: {told}"


def _accuracies(axes: Any, results: dict[str, Any]) -> None:
    """Figure 2: accuracy against epochs, with the standard deviation over the seeds."""
    for kind, rows in PRINTED.items():
        look = {"color": style.BLACK, "linestyle": style.DASHES[kind == "decreasing"]}
        axes.plot(EPOCHS, [accuracy for _, accuracy in rows], label=f"printed, {kind}", **look)
    for i, row in enumerate([*results["generated"], *results.get("softmax", [])]):
        if "settings" in row["algorithm"] or "no noise" in row["algorithm"]:
            continue
        values, spread = zip(*(row["accuracy"][str(e)] for e in EPOCHS), strict=True)
        shift = 0.35 * (i - 3)  # so that bars do not hide one another
        axes.errorbar(
            [e + shift for e in EPOCHS],
            [100 * v for v in values],
            [100 * s for s in spread],
            label=row["algorithm"],
            capsize=3,
            **_look(row["algorithm"]),
        )
    axes.set(xlabel="epochs", ylabel="test accuracy (%)", ylim=(0, 100))
    style.title(axes, "Figure 2: another data set")


def _look(algorithm: str) -> dict[str, Any]:
    """DP-SGD's own; of block coordinate descent the form's marker, dashed where the noise falls."""
    if algorithm == "DP-SGD":
        return style.look("dp-sgd")
    marker = next(marker for form, marker in _FORMS.items() if form in algorithm)
    dashes = style.DASHES["decreasing" in algorithm]
    return {**style.look("dp-sbcd"), "linestyle": dashes, "marker": marker}


def claimed(noise_multiplier: float, kind: str, epochs: int) -> float:
    """Theorem 4.6's Rényi divergence of order 2 for the stand-in's first epochs, four blocks."""
    first, last = LEVELS if kind == "decreasing" else (1.0, 1.0)
    whole = EPOCHS[-1]
    factors = [first + (last - first) * e / (whole - 1) for e in range(epochs)]
    std = noise_multiplier * CLIP * RATE / SIZE
    chain = hs.NoisyChain(
        batches=BATCHES,
        epochs=epochs,
        contributions=(RATE * CLIP / SIZE,),
        variances=tuple((std * f) ** 2 for f in factors),
    )
    return claims.dp_sbcd_theorem_4_6((chain,) * 4, DELTA, 2.0).value


def _losses(axes: Any, results: dict[str, Any]) -> str:
    """Table 1's privacy loss: as printed, and by its theorem with the stand-in's noise; proven."""
    told = []
    for kind, rows in PRINTED.items():
        look = {"linestyle": style.DASHES[kind == "decreasing"], "markersize": 7}
        row = next(r for r in results["generated"] if r["algorithm"] == f"R1, {kind} noise")
        values = [claimed(row["noise_multiplier"], kind, e) for e in EPOCHS]
        proven = [row["proven_add_or_remove"][str(e)] for e in EPOCHS]
        for what, losses, colour, marker in (
            ("printed divergence", [loss for loss, _ in rows], style.BLACK, "s"),
            ("divergence by Theorem 4.6", values, style.GREY, "^"),
            ("proven epsilon", proven, style.look("dp-sbcd")["color"], "v"),
        ):
            axes.plot(EPOCHS, losses, color=colour, marker=marker, label=f"{what}, {kind}", **look)
        told.append(f"{kind}: Theorem 4.6 {values[-1]:.1f}, proven epsilon {proven[-1]:.2f}")
    axes.set(yscale="log", xlabel="epochs", ylabel="order-2 divergence; epsilon at delta 1e-5")
    axes.set_xticks(EPOCHS)
    axes.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
    style.title(axes, "Table 1: privacy loss")
    return "after 50 epochs, " + "; ".join(told)
