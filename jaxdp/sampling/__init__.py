"""Sampling of each step's records: exact draws in fixed shapes, charged before they are made.

A draw is made on the host with NumPy's 64-bit Philox generator: a binomial count, then a subset of
that size in random order, O(batch) memory; an epoch at once where it is one event, O(n log n) work.
No floating-point number decides who takes part (docs/draws.md has the proofs). float32 uniforms on
the device would bias small rates (``uniform < 1e-7`` is true 1.2 times too often).
"""

from jaxdp.sampling.named import NAMES, by_name, relations
from jaxdp.sampling.rules import (
    CyclicPoisson,
    EpochSampling,
    FixedOrder,
    FixedSize,
    FullBatch,
    Poisson,
    RandomAllocation,
    RunSampling,
    Sampling,
    Shuffled,
    StepSampling,
    TruncatedPoisson,
    steps_of_a_block,
)
from jaxdp.sampling.sampler import Sampler, pad

__all__ = [
    "NAMES",
    "CyclicPoisson",
    "EpochSampling",
    "FixedOrder",
    "FixedSize",
    "FullBatch",
    "Poisson",
    "RandomAllocation",
    "RunSampling",
    "Sampler",
    "Sampling",
    "Shuffled",
    "StepSampling",
    "TruncatedPoisson",
    "by_name",
    "pad",
    "relations",
    "steps_of_a_block",
]
