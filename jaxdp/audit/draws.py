"""Findings on batches, of a loader or a loop, that the mechanism's sampling cannot draw."""

import math
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from scipy import special

from jaxdp.audit.findings import Finding, line_in
from jaxdp.audit.influence import Influence
from jaxdp.audit.residuals import SURE, divergence
from jaxdp.audit.runs import Runs
from jaxdp.mechanism import Mechanism
from jaxdp.sampling import FixedSize, Poisson
from jaxdp.types import PyTree

_CERTAIN, _ODD = 1e-6, 1e-3  # probabilities of whole epochs, and of whole runs
_EPOCHS = 3
_DRAWS = (
    r"shuffle|permutation|choice|DataLoader|range\(0,|\.batch\(|randint|split\(|sampler"
    r"|random\(|bernoulli|binomial|while |poisson"
)


def of_loader(
    loader: Callable[[int], Iterable[PyTree]], mechanism: Mechanism, columns: Sequence[np.ndarray]
) -> Finding | None:
    """Draws a few epochs, and asks how probable they are under the mechanism's sampling.

    Args:
        loader: from a seed to the batches of one epoch: integer positions [k], or records.
        mechanism: names the sampling.
        columns: the records, one array [n, ...] for every leaf.
    """
    rate, records = mechanism.batch_size / mechanism.dataset_size, len(columns[0])
    steps = max(1, math.ceil(1 / rate)) if rate else 1

    def key(leaves: Sequence[np.ndarray], at: int) -> bytes:
        return b"".join(np.ascontiguousarray(leaf[at]).tobytes() for leaf in leaves)

    known = {key(columns, at): at for at in range(records)}

    def positions(batch: PyTree) -> np.ndarray:
        """The positions in a batch: itself where it is integers [k], else by the records' bytes."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
        if len(leaves) == 1 and leaves[0].ndim == 1 and leaves[0].dtype.kind in "iu":
            return leaves[0].astype(np.int64)
        if len(leaves) != len(columns):
            raise ValueError(
                "loader must give integer positions [k], or records like the source's "
                f"({len(columns)} arrays), got {len(leaves)} arrays"
            )
        cast = [leaf.astype(c.dtype) for leaf, c in zip(leaves, columns, strict=True)]
        # Padding, and records that were changed on the way, are none of them.
        places = (known.get(key(cast, i)) for i in range(len(cast[0])))
        return np.asarray([place for place in places if place is not None], np.int64)

    epochs = [
        [positions(batch) for _, batch in zip(range(steps), loader(seed), strict=False)]
        for seed in range(_EPOCHS)
    ]
    sizes = [len(batch) for epoch in epochs for batch in epoch]
    if not isinstance(mechanism.sampling, Poisson | FixedSize) or not sizes:
        return None
    chance, words = 1.0, []
    if isinstance(mechanism.sampling, Poisson):
        most = max(sizes.count(size) for size in set(sizes))
        if most >= len(sizes) - len(epochs):  # all alike, but for the end of an epoch
            chance *= _binomial(records, rate)[round(rate * records)] ** most
            words.append(f"{most} of {len(sizes)} batches have one size")
    seen = [np.concatenate([np.zeros(0, np.int64), *epoch]) for epoch in epochs]
    least = min(map(len, epochs))
    if all(len(np.unique(epoch)) == len(epoch) for epoch in seen) and least > 1:
        once = (1 - rate) ** least + least * rate * (1 - rate) ** (least - 1)
        chance *= once ** (records * len(seen))
        words.append("no record comes twice in an epoch")
    if chance > _ODD or not words:
        return None
    return _other(" and ".join(words), chance, mechanism, loader, chance < _CERTAIN)


def of_runs(runs: Runs, found: list[list[Influence]], alike: bool) -> Finding | None:
    """Finds draws that are improbable under the sampling that is charged.

    In whole runs: more records change a release, none of them before, than can have been drawn; or
    all within 1 / rate steps, perhaps equally many in each; or equally many in the first step of
    every run. In S first releases on copies: never below b and never above b have each the
    probability P^S. SURE is shared: an eighth each for b = 1 and 2, a quarter for all other b, a
    quarter for one number in all runs, a quarter for a rate above the one charged (Chernoff:
    exp(-S n KL)).

    Args:
        runs: of the loop.
        found: its influences.
        alike: True if the first release moves by one and the same, or not at all, in all runs.
    """
    mechanism, count = runs.mechanism, len(runs.changed[0])
    rule, rate = mechanism.sampling, mechanism.batch_size / mechanism.dataset_size
    if not isinstance(rule, Poisson | FixedSize) or rate >= 1:
        return None
    firsts = [each.step for seed in found for each in seed]
    for step in range(max(firsts) + 1):
        # Those that changed nothing before: each is drawn now with the same probability.
        trials = sum(1 for first in firsts if first == -1 or first >= step)
        taken = firsts.count(step)
        chance = float(_binomial(trials, rate)[taken:].sum()) * (max(firsts) + 1)
        # Batches that exclude each other take all that are left, but never more than a batch.
        if taken > 1.5 * rate * len(firsts) and chance <= _CERTAIN:
            return Finding(
                "company",
                f"{taken} of {trials} replaced records changed release {step} and none before, "
                f"where {rate * trials:.0f} were to be drawn",
                "records that were not drawn have influence (statistics of the whole data "
                "set?), so sampling amplifies nothing, and no clipping bounds it",
                line_in(runs.loop, r"\.(mean|std|var|median|quantile|max|min|fit)\w*\("),
                "use public constants for preprocessing, clip bounds and noise, or charge for "
                "the statistic (jaxdp.preprocess)",
            )

    # First takings of part: all within 1 / rate steps; of one number in the first step of all runs,
    # whichever of 0, ..., count that is.
    steps, seeds = max(1, round(1 / rate)), len(found)
    whole = steps > 1 and all(0 <= first < steps for first in firsts)
    each = [[sum(one.step == step for one in seed) for step in range(steps)] for seed in found]
    alike_first, poisson = {row[0] for row in each}, isinstance(rule, Poisson)
    odd = [(1.0, "")]
    if whole:
        words = f"every record took part within {steps} steps, in {seeds} runs"
        odd.append(((1 - (1 - rate) ** steps) ** len(firsts), words))
        if poisson and len({number for row in each for number in row}) == 1:
            size = each[0][0]
            left = range(count, 0, -size)
            log = seeds * sum(math.log(_binomial(most, rate)[size]) for most in left)
            words += f" and {size} of them for the first time in each"
            odd.append((math.exp(log), words))
    if poisson and seeds > 1 and len(alike_first) == 1:
        (size,) = alike_first
        words = f"{size} records took part in the first step of every run"
        odd.append(((count + 1) * float(_binomial(count, rate)[size]) ** seeds, words))
    chance, words = min(odd)
    suspected = _other(words, chance, mechanism, runs.loop, chance < _CERTAIN)
    if chance < _CERTAIN or not poisson:
        return suspected if chance <= _ODD else None

    # How many copies were drawn first, run by run.
    law, drawn, trials = _binomial(count, rate), runs.noise.drawn, len(runs.noise.rows)
    tests = [(math.inf, "")]
    if len(drawn):
        low, high, mean = int(drawn.min()), int(drawn.max()), float(drawn.mean()) / count
        share = 8 if low in (1, 2) else 8 * count
        words = f"{low} or more records were drawn in each of {trials} first steps"
        tests.append((share * float(law[low:].sum()) ** trials, words))
        words = f"at most {high} records were drawn in each of {trials} first steps"
        tests.append((8 * count * float(law[: high + 1].sum()) ** trials, words))
        if rate < mean <= 1:
            words = f"{mean:.1%} of the records were drawn in {trials} first steps"
            tests.append((4 * math.exp(-trials * count * divergence(mean, rate)), words))
    elif alike:
        words = f"as many records, or none, were drawn in each of {trials} first steps"
        tests.append((4 * float(law[0] + law[1:].max()) ** trials, words))
    sure, words = min(tests)
    if sure <= SURE:
        return _other(words, sure, mechanism, runs.loop, True)
    return suspected if chance <= _ODD else None


def _binomial(count: int, rate: float) -> np.ndarray:
    """The probabilities of 0, 1, ..., ``count`` hits in as many draws."""
    hits = np.arange(count + 1)
    logs = (
        special.gammaln(count + 1) - special.gammaln(hits + 1) - special.gammaln(count - hits + 1)
    )
    return np.exp(logs + special.xlogy(hits, rate) + special.xlog1py(count - hits, -rate))


def _other(
    words: str, chance: float, mechanism: Mechanism, function: Callable[..., PyTree], certain: bool
) -> Finding:
    name = type(mechanism.sampling).__name__
    return Finding(
        "sampling",
        f"{words}, which {name} sampling does with probability {chance:.1g}",
        f"epsilon is computed for {name} sampling; batches that exclude each other have a larger "
        "one (Chua et al. 2024, arXiv:2403.17673)",
        line_in(function, _DRAWS),
        "draw with mechanism.sampler(...) or trainer.batches(); or charge what is drawn: "
        'sampling="allocation", "shuffle" or "fixed_size"',
        certain,
    )
