"""The law of a sum of many losses on a grid, by a tilted FFT whose rounding is bounded."""

import math
from collections.abc import Sequence

import numpy as np

from jaxdp.accounting.base import Array, Unresolved
from jaxdp.accounting.discretise import Atoms

_U = 2.0**-53
Counted = Sequence[tuple[Atoms, int]]


def grown(rate: float) -> float:
    """e^rate - 1; infinite, an error that leaves nothing known, where that is beyond floats."""
    return math.expm1(rate) if rate < 700 else math.inf


def log_moments(atoms: Counted, width: float, orders: Array) -> Array:
    """log E[exp(order * sum)] of the sums of atoms, [k]; -inf where there is no atom."""
    total: Array = np.zeros(orders.size)
    for atom, n in atoms:
        with np.errstate(divide="ignore"):
            log_mass = np.log(atom.mass)
        exponent = orders[:, None] * (width * atom.index) + log_mass
        peak = exponent.max(axis=1)
        total += n * (orders * atom.offset + peak)
        total += n * np.log(np.exp(exponent - peak[:, None]).sum(axis=1))
    return total


class Law:
    """The law of a sum of losses, tilted by exp(c loss), on ``size`` points of a grid.

    Attributes:
        loss: [size] increasing.
        width: of their grid.
        weight: [size] the tilted probability of each loss, over exp(log_scale - c reference).
        c: the tilt.
        log_scale: log E[exp(c sum)], the sum without the tilt.
        error: bound on the l2 norm of the error of ``weight`` by rounding.
        relative: bound on a relative error of all weights together.
        alias: bound on the tilted probability outside the window, which is wrapped into it.
        above: bound on the part of that which lies above the window.
    """

    def __init__(
        self,
        atoms: Counted,
        width: float,
        first: float,
        size: int,
        c: float,
        outside: tuple[float, float],
    ) -> None:
        """Convolves the atoms.

        Args:
            atoms: (losses of a step, number of such steps).
            width: of the grid.
            first: about the smallest loss of the window.
            size: number of points, a power of two.
            c: the tilt.
            outside: bounds on the tilted probability below and above the window.

        Raises:
            Unresolved: a step has no loss on so coarse a grid, or one beyond all digits.
        """
        self.c, self.alias, self.above = c, outside[0] + outside[1], outside[1]
        self.width = width
        offset = math.fsum(n * a.offset for a, n in atoms)
        start = math.floor((first - offset) / width)
        self.loss: Array = offset + width * (start + np.arange(size, dtype=np.float64))
        reach = abs(float(self.loss[0])) + abs(float(self.loss[-1]))
        reach += sum(n * abs(a.offset) for a, n in atoms)
        self.reach = reach
        self.log_scale, self.relative = c * offset, 16 * _U * (1 + c * reach)
        transform = _transform_error(size)
        # Only frequencies at which the product is not negligible are kept.
        live = np.arange(size // 2 + 1)
        logs, turned = np.zeros(live.size, dtype=complex), np.zeros(live.size)
        lines: list[tuple[int, Array, float, float]] = []
        for atom, n in atoms:
            if n == 0:
                continue
            law, log_total, largest = tilt(atom, c * width)
            self.log_scale += n * log_total
            self.relative += n * 4 * _U * (largest + abs(log_total) + 8)
            # Without the mass at 0, whose transform is 1: what is left may be tiny.
            index, values = np.append(atom.index % size, 0), np.append(law, -1.0)
            line = np.bincount(index, values, size)
            moved = np.fft.rfft(line)[live]
            square = 2 * moved.real + moved.real**2 + moved.imag**2
            kept = n * square / 2 + logs.real > -70
            live, moved, square = live[kept], moved[kept], square[kept]
            modulus = np.log(np.maximum(np.abs(1 + moved), 1e-300))
            real = np.where(square > -0.5, 0.5 * np.log1p(np.maximum(square, -0.5)), modulus)
            imag = np.arctan2(moved.imag, 1 + moved.real)
            logs = logs[kept] + n * (real + 1j * imag)
            turned = turned[kept] + n * (np.abs(real) + np.abs(imag))
            lines = [(m, r[kept], l2, l1) for m, r, l2, l1 in lines]
            self.relative += (
                n * _U * int(np.bincount(atom.index % size).max()) + 1e-30 * n * law.size
            )
            lines.append((n, real, math.sqrt(float(line @ line)), float(np.abs(line).sum())))
        self.relative = grown(self.relative + 4 * _U * abs(self.log_scale))
        values = np.exp(logs)
        spectrum = np.zeros(size // 2 + 1, dtype=complex)
        spectrum[live] = values
        both = np.where((live == 0) | (live == size // 2), 1.0, 2.0)
        norm = math.sqrt(float(both @ np.abs(values) ** 2) / size)
        off = math.sqrt(float(both @ (np.abs(values) * (16 + 16 * turned)) ** 2) / size) * _U
        weight = np.fft.irfft(spectrum, size)
        self.error = off + 2 * transform * norm + 1e-28
        for n, real, l2, l1 in lines:
            # One factor of the product less, and a modulus above 1 by rounding grows with n.
            rest = np.exp(np.minimum(logs.real - real, 0.0))
            others = math.sqrt(float(both @ (rest * rest)) / size)
            growth = 1 + grown(2 * n * transform * min(l1, l2 * math.sqrt(size)))
            self.error += n * transform * min(l2, l1 * others) * growth
        self.weight = np.maximum(np.roll(weight, -(start % size)), 0.0)

    def profile(self, reference: float) -> "Profile":
        """delta(epsilon) as a function, for epsilons about ``reference``."""
        return Profile(self, reference)

    def mean(self, weight: Array, payoff: Array) -> tuple[float, float]:
        """(sum of weights times payoffs, its rounding error) of an untilted law."""
        value = float(weight @ payoff)
        error = self.error * math.sqrt(float(payoff @ payoff))
        scale = math.exp(self.log_scale)
        return value * scale, (error + (self.relative + 4 * _U * 20) * value) * scale


class Profile:
    """delta(epsilon) = E[(1 - e^(epsilon - sum))+], from sums over the tail of a tilted law."""

    def __init__(self, law: Law, reference: float) -> None:
        self._law, self._reference = law, reference
        # Only about the reference, where e^(-c x) is tame.
        self._least = reference - min(max(0.4 * reference, 1e-6), 300.0 / law.c)
        self._first = int(np.searchsorted(law.loss, self._least))
        self._loss = law.loss[self._first :]
        self._damped = law.weight[self._first :] * np.exp(-law.c * (self._loss - reference))
        self._mass = _tail_sums(self._damped)
        # Of the second law at once, where e^(reference - loss) is tame too.
        below = (1 + law.c) * (reference - self._least)
        tame = max(float(law.loss[-1]) - self._least, below) < 600
        second = np.exp(reference - self._loss) * self._damped if tame else np.empty(0)
        self._second = _tail_sums(second)
        self._log_scale = law.log_scale - law.c * reference
        self._slack = 2 * _U * (self._loss.size + 300)

    def __call__(self, epsilon: float, log_unit: float) -> tuple[float, float]:
        """(delta, bound on its error) over exp(log_unit)."""
        law, c = self._law, self._law.c
        first, far = np.searchsorted(self._loss, [epsilon, epsilon + 45.0], side="right")
        # Beyond that scale the weights that decide are less than the smallest numbers.
        if epsilon < self._least or self._log_scale - log_unit > 650:
            return 0.0, math.inf
        ratio = epsilon - self._reference
        mass = float(self._mass[first]) if first < self._mass.size else 0.0
        # Beyond 45 nats the second law has less than e^-45 of the first.
        if first < self._second.size:
            moved = math.exp(ratio) * float(self._second[first])
        else:
            moved = float(self._damped[first:far] @ np.exp(epsilon - self._loss[first:far]))
        value = max(mass - moved, 0.0)
        # The rounding of losses, epsilon and the unit, as of a relative error.
        inexact = 4 * _U * ((1 + c) * law.reach + abs(log_unit))
        error = (self._slack + inexact + 3e-20) * (mass + moved) + law.relative * value
        # max_x e^(-cx) (1 - e^-x), and the l2 norm of e^(-cx) (1 - e^-x) over the grid's x > 0.
        peak = math.exp(c * math.log(c) - (1 + c) * math.log1p(c))
        norm = math.sqrt(1 / (2 * c * (2 * c + 1) * (c + 1) * law.width) + peak * peak)
        late = math.exp(-c * max(float(law.loss[-1]) - epsilon, 0.0))
        outside = law.alias * peak + law.above * late
        there = math.exp(min(-c * ratio, 700.0))
        error += (law.error * norm + outside) * there + 1e-310 * (self._loss.size + norm)
        scale = math.exp(self._log_scale - log_unit)
        return value * scale, error * scale


def tilt(atom: Atoms, rate: float) -> tuple[Array, float, float]:
    """(law tilted by exp(rate * index), log of its total before, largest number in an exponent)."""
    with np.errstate(divide="ignore"):
        log_mass = np.log(atom.mass)
    exponent = log_mass + rate * atom.index
    peak = float(exponent.max(initial=-math.inf))
    if not math.isfinite(peak):
        raise Unresolved("no loss on the grid, or one beyond all digits")
    law = np.exp(exponent - peak)
    total = math.fsum(law)
    heavy = exponent >= peak - 50
    largest = float((np.abs(log_mass) + rate * np.abs(atom.index))[heavy].max())
    return law / total, peak + math.log(total), largest


def _tail_sums(values: Array) -> Array:
    return np.cumsum(values[::-1])[::-1]


def _transform_error(size: int) -> float:
    """Error of an FFT of a power of two, over the input's norm: l2 of l2, or largest of l1.

    Higham 2002, "Accuracy and Stability of Numerical Algorithms", Theorem 24.2, with twiddle
    factors good to an ulp; each output is a sum over paths of log2(size) factors, hence also by l1.
    """
    return math.log2(size) * 8 * _U
