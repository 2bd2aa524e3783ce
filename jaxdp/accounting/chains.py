"""Chains of noisy contractions on secret, fixed batches, for the hidden-state accountant."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxdp import arguments as check

Array = np.ndarray
Schedule = float | Iterable[float]


@dataclass(frozen=True)
class NoisyChain:
    """The chain w <- P_k(T_k(w) + N(0, v_k I)), ``epochs`` times through fixed batches.

    Step k = e * batches + j (both from 0) reads batch j in epoch e. The records were put into the
    batches once, uniformly at random, in secret and without looking at them; a record is in one
    batch, which it keeps. The start does not depend on the records.

    A schedule is one number (the same at every step), ``epochs`` numbers (one an epoch) or
    epochs * batches numbers (one a step); it is public and fixed before the first step.

    Attributes:
        batches: l >= 1, batches of the partition.
        epochs: E >= 1, passes; there are E * l steps.
        contributions: schedule >= 0; how far ONE record, against none in its place, can move T_k of
            the step that reads it: step size * clip norm / batch size. Replacing it moves it twice
            as far; the accountant sees to that.
        variances: schedule > 0; v_k, variance of the noise ADDED TO w in every coordinate.
        contractions: schedule > 0; an upper bound on the Lipschitz constant of T_k.
        proximal: schedule > 0; an upper bound on the Lipschitz constant of P_k.
        start_distance: largest distance of the two starts of two neighbours; 0 for a released
            start.
        diameter: of a bounded convex set onto which every P_k projects; None when there is none.

    Raises:
        ValueError: also for contractions whose product overflows.
    """

    batches: int
    epochs: int
    contributions: tuple[float, ...]
    variances: tuple[float, ...]
    contractions: tuple[float, ...] = (1.0,)
    proximal: tuple[float, ...] = (1.0,)
    start_distance: float = 0.0
    diameter: float | None = None

    def __post_init__(self) -> None:
        check.fields(self, batches=check.size, epochs=check.size, start_distance=check.non_negative)
        if self.steps > 10**8:
            raise ValueError(f"epochs={self.epochs!r}: expected at most 1e8 steps in one chain")
        if self.diameter is not None:
            check.fields(self, diameter=check.positive)
        for name in ("contributions", "variances", "contractions", "proximal"):
            values = self._schedule(name, getattr(self, name), positive=name != "contributions")
            object.__setattr__(self, name, values)
        if max(self.contractions) > 1 or max(self.proximal) > 1:
            log_gains(self)

    @property
    def steps(self) -> int:
        """The number of steps, epochs * batches."""
        return self.epochs * self.batches

    def table(self, name: str) -> Array:
        """The schedule ``name`` at every step, float64 [epochs, batches]."""
        return _spread(np.asarray(getattr(self, name)), self.epochs, self.batches)

    def _schedule(self, name: str, given: Schedule, positive: bool) -> tuple[float, ...]:
        try:
            values = np.atleast_1d(np.asarray(given, dtype=np.float64))
        except (TypeError, ValueError):
            raise ValueError(f"{name}={given!r}: expected numbers") from None
        _check_length(name, values, self.epochs, self.batches)
        bad = ~(np.isfinite(values) & (values <= 1e100))
        # Numbers below 1e-100 would vanish when squared.
        bad |= ~((values >= 1e-100) | ((values == 0) & (not positive)))
        if bad.any():
            least = "in [1e-100, 1e100]" + ("" if positive else " or 0")
            raise ValueError(f"{name}={float(values[bad][0])!r}: expected finite numbers {least}")
        return tuple(values.tolist())


def clipped_gradient_chain(
    *,
    epochs: int,
    dataset_size: int,
    batch_size: int,
    step_sizes: Schedule,
    noise_multipliers: Schedule,
    l2_clip_norm: float,
    smoothness: float,
    weight_decay: float = 0.0,
    diameter: float | None = None,
) -> NoisyChain:
    """The chain of proximal gradient descent on a convex loss, clipped record by record.

    w <- P(w - (eta/b) (sum_n clip(g_n(w)) + N(0, (z C)^2 I))). Clipping a Huber-type loss record by
    record keeps it convex and smooth, so that the map is 1-Lipschitz for eta <= 2/smoothness; never
    less than 1, because a clipped gradient is flat far out. A last batch with fewer records changes
    nothing: the divisor is b for all.

    Args:
        epochs: passes over the data.
        dataset_size: n, public.
        batch_size: b <= n; there are ceil(n / b) batches.
        step_sizes: eta_k in (0, 2 / beta], a schedule.
        noise_multipliers: z_k > 0, a schedule; noise on the SUM, over the clip norm.
        l2_clip_norm: C.
        smoothness: beta, a bound on the smoothness of EVERY record's loss that holds by
            construction.
        weight_decay: lambda of P(w) = w / (1 + eta lambda); 0 for none.
            (Soft thresholding and projections on convex sets are 1-Lipschitz and need no number.)
        diameter: as in ``NoisyChain``.

    Raises:
        ValueError: for an argument out of its range.
    """
    n = check.size("dataset_size", dataset_size)
    b = check.size("batch_size", batch_size)
    if b > n:
        raise ValueError(f"batch_size={b}: expected at most dataset_size={n}")
    clip = check.positive("l2_clip_norm", l2_clip_norm)
    largest = 2 / check.positive("smoothness", smoothness)
    decay = check.non_negative("weight_decay", weight_decay)
    batches, epochs = -(-n // b), check.size("epochs", epochs)
    eta = _public_schedule("step_sizes", step_sizes, epochs, batches)
    z = _public_schedule("noise_multipliers", noise_multipliers, epochs, batches)
    if eta.max() > largest * (1 + 1e-12):
        raise ValueError(
            f"step_sizes={float(eta.max())!r}: expected at most 2/smoothness = {largest:g}, beyond "
            "which a step expands distances"
        )
    moved = eta * (clip / b)
    noise, prox = _compact((z * moved) ** 2), _compact(1 / (1 + eta * decay))
    return NoisyChain(batches, epochs, _compact(moved), noise, proximal=prox, diameter=diameter)


def _public_schedule(name: str, given: Schedule, epochs: int, batches: int) -> Array:
    values = (given,) if isinstance(given, int | float) else tuple(given)
    for i, value in enumerate(values):
        check.positive(f"{name}[{i}]" if len(values) > 1 else name, value)
    numbers = np.asarray(values, dtype=np.float64)
    _check_length(name, numbers, epochs, batches)
    return _spread(numbers, epochs, batches)


def _check_length(name: str, values: Array, epochs: int, batches: int) -> None:
    if values.ndim != 1 or values.size not in (1, epochs, epochs * batches):
        raise ValueError(
            f"{name} has shape {values.shape}: expected 1, {epochs} (one an epoch) or "
            f"{epochs * batches} (one a step) numbers"
        )


def _spread(values: Array, epochs: int, batches: int) -> Array:
    """A schedule at every step, [epochs, batches]."""
    if values.size == epochs * batches:
        return values.reshape(epochs, batches)
    column = values.reshape(-1, 1) if values.size == epochs else values.reshape(1, 1)
    return np.broadcast_to(column, (epochs, batches))


def _compact(table: Array) -> tuple[float, ...]:
    """The shortest form of a schedule."""
    if (table == table[0, 0]).all():
        return (float(table[0, 0]),)
    if (table == table[:, :1]).all():
        return tuple(table[:, 0].tolist())
    return tuple(table.ravel().tolist())


def log_gains(chain: NoisyChain) -> Array:
    """log G_k, float64 [steps]: how much of a distance after step k's noise is left at the end.

    G_K = 1 and G_k = G_{k+1} p_k c_{k+1}.

    Raises:
        ValueError: the gains overflow.
    """
    c, p = (chain.table(name).ravel() for name in ("contractions", "proximal"))
    factors = np.log(p[:-1]) + np.log(c[1:])
    gains = np.concatenate([np.cumsum(factors[::-1])[::-1], [0.0]])
    if gains.max() > 300:
        raise ValueError(
            f"contractions={float(c.max())!r}: expected steps that together expand distances by at "
            "most e^300"
        )
    return gains
