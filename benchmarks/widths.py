"""Every kind of event with the width of its answer: `python -m benchmarks.widths`, a minute.

One typical setting of each, at delta 1e-5. Writes benchmarks/results/widths.json and prints the
table of docs/proofs/accounting.md, "Widths".
"""

import json
import time
from pathlib import Path

from jaxdp import accounting as acc

RESULT = Path(__file__).parent / "results" / "widths.json"
ADD, REPLACE, ZERO = (
    acc.Relation.ADD_OR_REMOVE_ONE,
    acc.Relation.REPLACE_ONE,
    acc.Relation.REPLACE_SPECIAL,
)
ONE, SGD = acc.Gaussian(1.0), acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.0), 0.01), 500)
FIXED = acc.FixedSizeSampled(ONE, 10_000, 100)
BEST = acc.ExponentialMechanism(0.5, relation=ADD)
KINDS = (
    ("10 `Gaussian(5)`", ADD, acc.Repeated(acc.Gaussian(5.0), 10)),
    ("500 `PoissonSampled`, 0.01", ADD, SGD),
    ("the same", REPLACE, SGD),
    ("the same", ZERO, SGD),
    ("500 `FixedSizeSampled`, 100 of 10,000", REPLACE, acc.Repeated(FIXED, 500)),
    ("the same", ZERO, acc.Repeated(FIXED, 500)),
    ("500 `TruncatedPoissonSampled`, 0.01, cap 140", ZERO,
     acc.Repeated(acc.TruncatedPoissonSampled(ONE, 0.01, 140, 10_000), 500)),
    ("the same, cap 110", ZERO,
     acc.Repeated(acc.TruncatedPoissonSampled(ONE, 0.01, 110, 10_000), 500)),
    ("5 `RandomlyAllocated`, 1 of 100 steps", ADD,
     acc.Repeated(acc.RandomlyAllocated(ONE, 100), 5)),
    ("5 `RandomlyAllocated`, 4 of 100 steps", ADD,
     acc.Repeated(acc.RandomlyAllocated(ONE, 100, 4), 5)),
    ("5 `ShuffledEpoch`, 100 steps", ZERO, acc.Repeated(acc.ShuffledEpoch(ONE, 100), 5)),
    ("`CorrelatedNoise`, 500 steps", ZERO, acc.CorrelatedNoise(ONE, 500)),
    ("`CyclicPoissonSampled`, 0.1, 4 bands, 500 steps", ADD,
     acc.CyclicPoissonSampled(ONE, 0.1, 4, 500)),
    ("`CyclicAllocation`, 12 slots, 8 bands, 2,016 steps", ADD,
     acc.CyclicAllocation(ONE, 12, 8, 2_016)),
    ("`GridNoise` of 500 `PoissonSampled`, distance 1e-9", ADD, acc.GridNoise(SGD, 1e-9)),
    ("`PerUser` of 500 `PoissonSampled`", ADD, acc.PerUser(SGD, 3)),
    ("10 `Laplace(5)`", ADD, acc.Repeated(acc.Laplace(5.0), 10)),
    ("10 `DiscreteLaplace(5, 1)`", ADD, acc.Repeated(acc.DiscreteLaplace(5, 1), 10)),
    ("10 `DiscreteGaussian(5, 1)`", ADD, acc.Repeated(acc.DiscreteGaussian(5, 1), 10)),
    ("10 `RandomizedResponse(0.5, 10)`", REPLACE,
     acc.Repeated(acc.RandomizedResponse(0.5, 10), 10)),
    ("10 `MixtureOfGaussians(2, (0, 1, 2), (0.8, 0.1, 0.1))`", ADD,
     acc.Repeated(acc.MixtureOfGaussians(2.0, (0.0, 1.0, 2.0), (0.8, 0.1, 0.1)), 10)),
    ("`ExponentialMechanism(0.5)`", ADD, BEST),
    ("10 `ExponentialMechanism(0.5)`", ADD, acc.Repeated(BEST, 10)),
    ("`ObjectivePerturbation(2, 0.1)`", ADD, acc.ObjectivePerturbation(2.0, 0.1)),
    ("10 `EpsilonDelta(0.5, 1e-7)`", ADD,
     acc.Repeated(acc.EpsilonDelta(0.5, 1e-7, relation=ADD), 10)),
    ("`ZCDP(0.1)`", ADD, acc.ZCDP(0.1, relation=ADD)),
    ("`Composed`: 500 `PoissonSampled` and `EpsilonDelta(0.1)`", ADD,
     acc.Composed([SGD, acc.EpsilonDelta(0.1, relation=ADD)])),
    ("`Tuned`: the same SGD, `Geometric(0.1)`", ADD, acc.Tuned(SGD, acc.Geometric(0.1))),
)  # fmt: skip


def main():
    rows = []
    for kind, relation, event in KINDS:
        since = time.process_time()
        found = acc.epsilon(event, 1e-5, relation)
        spent = time.process_time() - since
        rows.append({"kind": kind, "relation": relation.value, "lower": found.lower,
                     "upper": found.upper, "seconds": round(spent, 2)})  # fmt: skip
        print(f"| {kind} | {relation.value} | {found.lower:.5g} | {found.upper:.5g} |", flush=True)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
