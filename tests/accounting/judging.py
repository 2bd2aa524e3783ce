"""What tests of accounting share: runs, profiles of pairs, a plain convolution."""

import math

import numpy as np
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting import flat

ADD, REPLACE, SPECIAL = acc.Relation


def run(q, z, steps):
    """Steps of Gaussian noise on Poisson batches."""
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


def cost(event, relation=ADD, accountant="auto"):
    """The proven end of epsilon at delta 1e-5."""
    return acc.epsilon(event, 1e-5, relation, accountant).upper


def directions(event, relation, delta, tolerance=9e-5):
    """What the certificate composes, for either direction of an event."""
    return flat.directions(flat.flatten(event, relation), relation, math.log(delta), tolerance)


def slices(q, z, relation, reverse, count):
    """(masses, losses) of so many slices of the output of a step."""
    edges = np.linspace(-10 * z - 1, 1 + 10 * z, count + 1)
    x = (edges[1:] + edges[:-1]) / 2

    def ratio(at):
        return np.log1p(-q) + np.log1p(q / (1 - q) * np.exp((at - 0.5) / z**2))

    none, sampled = (np.diff(special.ndtr((edges - m) / z)) for m in (0, 1))
    loss = ratio(x) - (ratio(-x) if relation is REPLACE else 0)
    mass = none if reverse else (1 - q) * none + q * sampled
    return mass, -loss if reverse else loss


def plain(steps, relation, span, size=1 << 20, count=100_000):
    """delta, as a function of epsilon, by an untilted FFT on a grid of mean-preserving splits."""
    width, totals = span / size, []
    for reverse in (False,) if relation is REPLACE else (False, True):
        spectrum = np.ones(size // 2 + 1, dtype=complex)
        for q, z, n in steps:
            mass, loss = slices(q, z, relation, reverse, count)
            cell = np.floor(loss / width)
            up = np.expm1(cell * width - loss) / np.expm1(-width)
            index = cell.astype(int)
            law = np.bincount(index % size, mass * (1 - up), minlength=size)
            law += np.bincount((index + 1) % size, mass * up, minlength=size)
            spectrum *= np.fft.rfft(law) ** n
        totals.append(np.fft.irfft(spectrum, size))
    losses = np.fft.fftfreq(size, 1 / span)

    def delta(epsilon):
        gain = np.maximum(-np.expm1(np.minimum(epsilon - losses, 0)), 0)
        return max(float(total @ gain) for total in totals)

    return delta


def profile(pair, epsilons):
    """delta of a pair at each epsilon, from its tails."""
    p, q = pair.tails(np.atleast_1d(epsilons))
    return p - np.exp(epsilons) * q


def largest(pairs, epsilon):
    """delta of the worst of several pairs at one epsilon."""
    return max(float(profile(pair, epsilon)[0]) for pair in pairs)
