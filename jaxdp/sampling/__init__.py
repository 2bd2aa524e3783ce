"""Records in, draws out: sources of records, and exact draws in fixed shapes, charged before.

A draw is made on the host with NumPy's 64-bit Philox generator: a binomial count, then a subset of
that size in random order, O(batch) memory; an epoch at once where it is one event, O(n log n) work.
No floating-point number decides who takes part (docs/proofs/draws.md has the proofs). float32
uniforms on the device would bias small rates (``uniform < 1e-7`` is true 1.2 times too often).

One index of a source is one **privacy unit**: the guarantee hides the presence of what
``source[i]`` holds, and of nothing larger. A person who is in the source twice is hidden only half
as well as the report says; ``users`` makes a source in which one index is a person, and
``user_examples`` one whose indices are records of persons with a public number of them at most.
"""

from jaxdp.sampling.files import load
from jaxdp.sampling.hashes import fingerprint
from jaxdp.sampling.parts import Part, parts
from jaxdp.sampling.prefetching import prefetch
from jaxdp.sampling.rules import (
    CyclicAllocation,
    CyclicPoisson,
    EpochSampling,
    ExampleLevel,
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
    WeightedPoisson,
    by_name,
    names,
    relations,
)
from jaxdp.sampling.sampler import Sampler, pad
from jaxdp.sampling.source import Source, as_source
from jaxdp.sampling.text import bucketed_text, padded_text
from jaxdp.sampling.users import User, user_examples, users

__all__ = [
    "CyclicAllocation",
    "CyclicPoisson",
    "EpochSampling",
    "ExampleLevel",
    "FixedOrder",
    "FixedSize",
    "FullBatch",
    "Part",
    "Poisson",
    "RandomAllocation",
    "RunSampling",
    "Sampler",
    "Sampling",
    "Shuffled",
    "Source",
    "StepSampling",
    "TruncatedPoisson",
    "User",
    "WeightedPoisson",
    "as_source",
    "bucketed_text",
    "by_name",
    "fingerprint",
    "load",
    "names",
    "pad",
    "padded_text",
    "parts",
    "prefetch",
    "relations",
    "user_examples",
    "users",
]
