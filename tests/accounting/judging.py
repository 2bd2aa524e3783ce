"""What tests of accounting share: runs by three numbers, profiles of pairs, tables of refusals."""

import math
import re

import numpy as np

from jaxdp import accounting as acc
from jaxdp.accounting import kinds
from jaxdp.accounting.canonical import flatten

ADD, REPLACE, SPECIAL = acc.Relation


def run(q, z, steps):
    """Steps of Gaussian noise on Poisson batches."""
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


def directions(event, relation, delta, tolerance=9e-5):
    """What the certificate composes, for either direction of an event."""
    return kinds.directions(flatten(event, relation), relation, math.log(delta), tolerance)


def profile(pair, epsilons):
    """delta of a pair at each epsilon, from its tails."""
    p, q = pair.tails(np.atleast_1d(epsilons))
    return p - np.exp(epsilons) * q


def largest(pairs, epsilon):
    """delta of the worst of several pairs at one epsilon."""
    return max(float(profile(pair, epsilon)[0]) for pair in pairs)


def refusals(kind, rows):
    """Each of ``rows``, (words, call), is refused by ``kind`` in these words."""
    failed = []
    for words, call in rows:
        try:
            failed.append(f"{words}: not refused, {call()}")
        except kind as refusal:
            if not re.search(words, str(refusal)):
                failed.append(f"{words}: {refusal}")
    assert not failed, "\n".join(failed)
