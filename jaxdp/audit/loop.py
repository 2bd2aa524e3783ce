"""``jaxdp.check_loop``: a training loop of one's own, run on neighbouring data."""

import time

import numpy as np

from jaxdp import arguments
from jaxdp.audit import draws, influence, noise
from jaxdp.audit import neighbours as near
from jaxdp.audit.findings import Checked, Finding, in_order, line_in
from jaxdp.audit.runs import LEAST, Loop, all_runs, other_seeds, releases_of, replaced
from jaxdp.mechanism import Mechanism
from jaxdp.types import PyTree

_MOST = 64  # records
_OF = ("gradients", "parameters")
_AGAIN = 40  # runs of a restart


def check_loop(
    loop: Loop,
    data: PyTree,
    mechanism: Mechanism,
    *,
    steps: int | None = None,
    restart: Loop | None = None,
    of: str = "gradients",
    seeds: int = 3,
    first: int = 288,
) -> Checked:
    """Runs a whole training loop on neighbouring data, and tells what it charges too little for.

    The loop may be written with any library. It is run about ``seeds`` · n + 80 times, and its
    first release is computed 2 · ``first`` + 150 times (a generator is stopped there), so give it
    few records and few steps, and compile what it calls outside of it.

    Noise cancels in the difference of two runs of one seed, which leaves the influence of the
    records in which they differ, exactly. The noise of the first release is measured in every
    coordinate, on copies of one record: see ``jaxdp.audit.runs``. A charge holds for a change d
    and noise of covariance V only if w·d <= 2 (w·V w)^1/2 / multiplier for all directions w. Looked
    at are w = d / diag(V), single coordinates, pairs of them, and combinations of 96. Whatever
    comes after the noise moves d and V alike, as long as it is linear.

    Formal guarantee: a loop that draws as its mechanism says, and releases clipped sums plus
    independent Gaussian noise, or their momentum, is accused with a probability of at most 1e-6 by
    the tests of the noise, of the influence and of the number drawn: each of ten has 1e-7. Those of
    the sampling over whole runs have 1e-6 each. A suspicion has no such bound.

    A breach smaller than a factor of two in the noise multiplier may not be seen (``jaxdp audit``
    is for that). The idea of replaying a mechanism on neighbours with one randomness is that of
    Cebere et al. 2026 (arXiv:2602.17454v1); dividing by the realised batch size is the breach of
    arXiv:2605.15648v1.

    Args:
        loop: from (data, seed) to the releases, one pytree of arrays for **every** update; a
            generator will do. All its randomness must follow from ``seed``.
        data: 4 to 64 records: a pytree of arrays [n, ...], or a list of records.
        mechanism: what the loop charges for: noise, sampling, batch size, n as dataset size.
        steps: the number of updates that its epsilon counts; None takes ``mechanism.steps``.
        restart: the same loop, interrupted and taken up again in its middle: all releases of both
            of its lives.
        of: "gradients": the releases are noisy gradients, as the noise leaves them or after a
            linear filter such as momentum, in whatever scale, by leaf or coordinate;
            "parameters": the parameters after each update of plain SGD, with momentum or without.
            Of other optimizers (Adam) give the gradients that go into them: what is no sum plus
            noise is tested in part, and the answer says so (``untested``). So it is where dropout
            makes the sums random.
        seeds: runs of each neighbour: more make a verdict on the sampling surer.
        first: runs of which the first release is computed in each of two worlds: more show smaller
            faults of the noise, and rarer ones of the draw.

    Raises:
        ValueError: an argument is out of its range, ``data`` is no data set of the mechanism's
            size, the loop releases nothing, or none of the records moves a release.
    """
    began = time.perf_counter()
    arguments.one_of("of", of, _OF)
    arguments.integer("seeds", seeds, least=1)
    arguments.integer("first", first, least=48)
    for name, function in (("loop", loop), ("restart", restart)):
        if not callable(function) and not (name == "restart" and function is None):
            raise ValueError(f"{name} must be a function of (data, seed), got {function!r}")
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f"mechanism must come from jaxdp.dp_sgd, got {mechanism!r}")
    count = near.count(data)
    if not LEAST <= count <= _MOST:
        raise ValueError(
            f"data must hold {LEAST} to {_MOST} records, for the loop is run for each, got "
            f"{count}: give some of them, and a mechanism for so many"
        )
    if mechanism.dataset_size != count:
        raise ValueError(
            f"mechanism must be one for a data set of {count} records, as data has, got "
            f"dataset_size {mechanism.dataset_size}: keep noise, clip norm and steps, and take a "
            "small batch"
        )

    # The number of releases, and whether a seed decides them.
    once, again = (releases_of(loop, data, 0, of) for _ in range(2))
    charged = mechanism.steps if steps is None else arguments.integer("steps", steps, least=1)
    found: list[Finding | None] = []
    tested = ["the number of releases, beside the steps that are charged"]
    untested: list[str] = []
    if charged is not None and len(once) > charged:
        words = ""
        if mechanism.delta is not None and mechanism.strategy is None:
            told, true = (mechanism.epsilon(n, mechanism.delta).upper for n in (charged, len(once)))
            words = f": epsilon is {true:.2f}, not {told:.2f}"
        found.append(
            Finding(
                "steps",
                f"{len(once)} updates were released and {charged} are charged{words}",
                "every update is a release of its own; an epoch has many",
                line_in(loop, r"epsilon|compute_|accountant|epochs?\b"),
                "count updates: steps = epochs * dataset_size / batch_size; a jaxdp.Ledger counts "
                "them",
            )
        )

    def answer() -> Checked:
        spent = time.perf_counter() - began
        return Checked(in_order(found), tuple(tested), (), spent, tuple(untested))

    if once.shape != again.shape or not np.allclose(once, again, rtol=1e-5, atol=1e-7):
        found.append(
            Finding(
                "state",
                "two runs of one seed on the same data release different numbers",
                "what comes from a record cannot be told from what comes from chance",
                line_in(loop, noise.SEEDED),
                "let all randomness follow from the seed, for the check "
                "(jaxdp: secret=jaxdp.Secret.from_seed(seed))",
                certain=False,
            )
        )
        return answer()

    # Every record replaced, with every seed: as many releases, of which some must move.
    base = [releases_of(loop, data, seed, of) for seed in range(seeds)]
    changed = [
        [releases_of(loop, replaced(data, at), seed, of) for at in range(count)]
        for seed in range(seeds)
    ]
    both = [
        (run, at, other)
        for run, others in zip(base, changed, strict=True)
        for at, other in enumerate(others)
    ]
    for run, at, other in both:
        if other.shape != run.shape:
            found.append(
                Finding(
                    "steps",
                    f"{len(run)} releases, and {len(other)} with another record {at}",
                    "when it stops, or what it skips, depends on a record, and no event is charged "
                    "for that",
                    line_in(loop, r"\bbreak\b|\breturn\b|while |continue"),
                    "stop after a public number of steps, or by noisy releases",
                )
            )
            return answer()
    if all(np.array_equal(run, other, equal_nan=True) for run, _, other in both):
        raise ValueError(
            f"loop must train on the data that it is given, but none of its {count} records "
            f"moved a release in {seeds} runs, so nothing can be checked: it may read records from "
            "elsewhere, or draw none in so few steps"
        )

    # The noise, beside what each record moves; who takes part; noise or influence that comes back.
    runs, few, untested = all_runs(loop, mechanism, data, of, base, changed, first)
    shared = noise.of_shared(runs)
    found += [noise.of_bare(runs), shared, None if shared else noise.of_law(runs)]
    found += [noise.of_empty(runs), influence.of_memory(runs)]
    if not shared:
        found.append(noise.of_repeats(runs, runs.few[0], base, loop))
    moved = influence.influences(runs)
    large = influence.of_size(runs, moved)
    alike = bool(len(runs.noise.taken)) and not len(runs.noise.drawn) and not large
    divided = influence.of_divisor(runs, moved, certain=alike)
    found += [large, draws.of_runs(runs, moved, alike and not divided), divided]
    tested += [
        "the noise over seeds, in every coordinate, beside the influence of each record",
        "which records take part in which step, beside the sampling that is charged",
        "the same noise in two updates, or in two coordinates",
    ]
    if restart is not None:
        copies = [releases_of(restart, few, seed, of) for seed in other_seeds(seeds, _AGAIN)]
        real = [releases_of(restart, data, seed, of) for seed in other_seeds(seeds, 2)]
        found.append(noise.of_repeats(runs, copies, real, restart))
        tested.append("the same noise in two updates, across a restart")
    return answer()
