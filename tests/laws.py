"""Statistical verdicts shared by the tests, each strict enough to fail at the wrong scale."""

import numpy as np
from scipy import stats

LEVEL = 1e-6  # how often a correct implementation may fail


def is_gaussian(samples, std):
    """Kolmogorov–Smirnov and chi-square: are these draws of N(0, std²)?"""
    samples = np.asarray(samples, dtype=np.float64).ravel()
    shape = stats.kstest(samples / std, "norm").pvalue
    square = float(np.sum((samples / std) ** 2))
    tail = stats.chi2.cdf(square, len(samples))
    return min(shape, 2 * tail, 2 * (1 - tail)) > LEVEL


def are_uncorrelated(a, b):
    """Is the sample correlation of two independent draws within its range?"""
    a, b = np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64)
    return bool(stats.pearsonr(a, b).pvalue > LEVEL)


def is_binomial(count, trials, probability):
    """Could ``count`` successes in ``trials`` have this probability?"""
    return bool(stats.binomtest(int(count), int(trials), probability).pvalue > LEVEL)


def is_uniform(counts):
    """Could these counts be of equally likely cells?"""
    return bool(stats.chisquare(counts).pvalue > LEVEL)
