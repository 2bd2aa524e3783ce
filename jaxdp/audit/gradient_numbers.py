"""Norms of gradients beside the clip norm, their mean beside the noise; and advice from both."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.audit.advice import outlook, outlooks
from jaxdp.audit.examined import QUICK, Examined
from jaxdp.audit.findings import Finding
from jaxdp.clipping.ghost import program
from jaxdp.clipping.ghost.plan import find_uses
from jaxdp.clipping.rules import (
    PROVEN,
    AutoS,
    Clip,
    CoordinateBox,
    Normalize,
    Rule,
    bounded_factors,
)
from jaxdp.mechanism import Mechanism
from jaxdp.types import PyTree

# Multiples of the clip norm that are tried.
_NAMES = {0.25: "clip norm / 4", 0.5: "clip norm / 2", 1.0: "", 2.0: "clip norm x 2"}
_NAMES |= {4.0: "clip norm x 4"}
_LARGE = 2**24  # parameters from which on the mechanism's own clip norm alone is tried
_RANK, _NARROW = 4, 16  # of LoRA, and the least width of a matrix that it would be used for
_GROUPS = 1_000  # a record of a group beyond counts for none
_STEPS = 100  # for which the optimizer is asked how far it goes

# Of the signal over the noise in a record's loss (``GradientNumbers.signal``). On digits and MNIST,
# with 650 to 101,770 parameters and the best of six rates, accuracy was, where 0.88 was reached
# without much noise: 0.19 to 0.24 at 0.3 to 0.5; 0.30 to 0.63 at 1.1 to 1.3; 0.57 to 0.79 at 2.3 to
# 2.9; 0.67 to 0.84 at 4 to 5; 0.75 to 0.87 at 10. The noise's length alone told nothing like it.
_DROWNED, _WEAK = 1.0, 3.0
_FAR = 4.0  # times as long as nearly all gradients a clip norm is far too long
# Of the loss, by which it falls at most in a run whose steps are too short: by SGD a network on
# digits had an accuracy of 0.08 at 0.04, 0.12 at 0.12, 0.35 at 0.4, 0.76 at 1.2, 0.92 at 4.
_SHORT = 0.2
_DEFEATED = 3.0  # times as hard a group pulls before clipping as after it
_SCALED = 1_000.0  # a loss, and norms over the clip norm, of a loss that was scaled up


class Mean(NamedTuple):
    """The mean of clipped gradients, of all parameters or of a part.

    Attributes:
        square: an unbiased estimate of the squared norm of the mean over the clip norm squared; it
            may be negative.
        square_error: the standard error of ``square``.
        rms: the root mean square of the clipped gradients' norms, over the clip norm.
        clip_norm: the most that one record adds.
        parameters: how many numbers get noise.
    """

    square: float
    square_error: float
    rms: float
    clip_norm: float
    parameters: int

    @classmethod
    def of_sum(
        cls,
        total: float,
        own: float,
        records: float,
        clip_norm: float,
        parameters: int,
        *,
        pairs: float | None = None,
        noise: float = 0.0,
        sampling_error: float = 0.0,
    ) -> "Mean":
        """The mean from a sum of clipped gradients, which may have noise.

        The squared norm of a sum holds each record's own square, and that of the noise in every
        coordinate: both are taken off.

        Args:
            total: the squared norm of the sum.
            own: the sum of the clipped gradients' squared norms.
            records: how many were summed, or their expected number.
            clip_norm: the most that one record adds.
            parameters: d.
            pairs: the number of ordered pairs of records, n (n - 1) for n that were summed; None
                for records drawn by Poisson sampling: their expected number squared.
            noise: standard deviation of the noise in each coordinate of the sum.
            sampling_error: the standard error of ``square`` without noise.
        """
        pairs = records**2 if pairs is None else pairs
        signal = total - own - parameters * noise**2
        # |s + e|^2 of noise e of deviation s in d coordinates: variance 2 d s^4 + 4 s^2 |s|^2.
        variance = 2 * parameters * noise**4 + 4 * noise**2 * max(signal + own, 0.0)
        scale = pairs * clip_norm**2
        error = math.hypot(math.sqrt(variance) / scale, sampling_error)
        rms = math.sqrt(max(own, 0.0) / records) / clip_norm
        return cls(signal / scale, error, rms, clip_norm, parameters)

    @property
    def norm(self) -> float:
        """The norm of the mean over the clip norm."""
        return math.sqrt(max(self.square, 0.0))

    @property
    def certain(self) -> bool:
        """True if it is more than two standard errors above 0."""
        return self.square > 2 * self.square_error

    @property
    def most(self) -> "Mean":
        """The largest that it may be, two standard errors up."""
        return self._replace(square=self.square + 2 * self.square_error)


class Travel(NamedTuple):
    """By how much the optimizer's steps can lower the mean loss, at the slope that it starts with.

    Attributes:
        loss: the mean of the losses' absolute values.
        fall: the slope times the way of all steps, if each has the mean clipped gradient.
        unclipped: the same with the mean gradient as it is.
        tenfold: the same with ten times the mean clipped gradient.
    """

    loss: float
    fall: float
    unclipped: float
    tenfold: float


@dataclasses.dataclass(frozen=True, eq=False)
class GradientNumbers:
    """Norms of per-example gradients by group, and their mean. **Sensitive**, unless released.

    ``str`` gives a table. What the noise of a release hides is left out of it.

    Attributes:
        mechanism: what clips and noises.
        edges: float64 [k], rising; between the norms that are counted together.
        counts: float64 [groups, k + 3]; how many records of each group have a gradient that is not
            finite, exactly zero, shorter than ``edges[0]``, ..., at least ``edges[-1]`` long.
        mean: of the clipped gradients.
        count_error: the standard error of each count; 0 where no noise was added.
        others: the mean under other choices, by their names.
        travel: None where it was not measured.
    """

    mechanism: Mechanism
    edges: np.ndarray
    counts: np.ndarray
    mean: Mean
    count_error: float = 0.0
    others: Mapping[str, Mean] = dataclasses.field(default_factory=dict)
    travel: Travel | None = None

    @functools.cached_property
    def certain(self) -> np.ndarray:
        """float64 [groups, k + 3]: the counts, but for those that may be noise alone: 0."""
        return np.where(self.counts > 3 * self.count_error, self.counts, 0.0)

    @property
    def by_group(self) -> np.ndarray:
        """float64 [groups]: the records of each group."""
        return np.asarray(self.certain.sum(1))

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """float64 [2, k + 3]: the norms in each column, before and after clipping."""
        middles = np.sqrt(self.edges[1:] * self.edges[:-1])
        norms = np.array([0.0, 0.0, self.edges[0], *middles, self.edges[-1]])
        rule, limit = self.mechanism.rule, self.mean.clip_norm
        after = np.minimum(norms, limit)
        if isinstance(rule, AutoS | Normalize):
            gamma = rule.stability if isinstance(rule, AutoS) else 0.0
            after = limit * norms / np.maximum(norms + gamma, 1e-30)
        return np.stack([norms, after])

    def share(self, columns: slice | int, groups: slice | int = slice(None)) -> float:
        """The share of the records of some groups that is counted in some columns."""
        some = np.atleast_2d(self.certain[groups])
        return float(some[:, columns].sum() / max(some.sum(), 1e-30))

    @property
    def clipped(self) -> slice:
        """The columns of the gradients that are longer than the clip norm."""
        return slice(int(np.searchsorted(self.edges, self.mean.clip_norm * 0.999)) + 3, None)

    def quantile(self, q: float, groups: slice | int = slice(None)) -> float:
        """The norm that a share ``q`` of the finite gradients stays below."""
        some = np.atleast_2d(self.certain[groups])[:, 1:].sum(0)
        if not some.sum():
            return math.nan
        # Within a column norms are taken to be spread evenly, by their logarithms.
        below = np.concatenate([[0.0], np.cumsum(some)]) / some.sum()
        at = min(int(np.searchsorted(below, q, side="left")), len(some)) - 1
        at = max(at, 0)
        if at == 0:
            return 0.0
        ends = np.array([self.edges[0] / 2, *self.edges, self.edges[-1] * 2])
        inside = (q - below[at]) / (below[at + 1] - below[at])
        return float(ends[at - 1] * (ends[at] / ends[at - 1]) ** inside)

    def pull(self) -> np.ndarray:
        """float64 [2, groups]: each group's share of the norms' sum, before and after clipping."""
        sums = self.lengths @ self.certain.T
        return np.asarray(sums / np.maximum(sums.sum(1, keepdims=True), 1e-30))

    def signal(self, mean: Mean | None = None, noise: float | None = None) -> float:
        """The signal in a record's loss over the noise there, after all steps.

        Steps of the mean clipped gradient m change the loss of a record with gradient g, for small
        steps, by their number times m . g; the noise changes it by a normal of deviation
        s |g|, with s the deviation of the noise in each coordinate of the sum. Over records m . g
        has the mean |m|^2, if g is clipped, too. The ratio does not depend on the rate, nor on the
        number of parameters, and grows with the square root of the steps. Below 1 the noise has
        changed what the model says of a record by more than what was learned has.

        Args:
            mean: of the clipped gradients, in their clip norms; None for the mechanism's.
            noise: standard deviation of the noise in each coordinate of the run's mean, in clip
                norms; None for the mechanism's.
        """
        mean = self.mean if mean is None else mean
        noise = self.noise if noise is None else noise
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.float64(max(mean.square, 0.0)) / (noise * max(mean.rms, 1e-30)))

    @functools.cached_property
    def noise(self) -> float:
        """Standard deviation of the noise in each coordinate of the run's mean, in clip norms.

        Of one step, where the mechanism was made for no number of steps.
        """
        return outlook("", self.mechanism, 1, self.mechanism.steps or 1).in_a_direction

    @functools.cached_property
    def choices(self) -> dict[str, tuple[float, float]]:
        """By name, (norm of the mean clipped gradient over the noise's, signal) of the run.

        As it is; with other public numbers at the same epsilon; with what was measured besides. Of
        a mean that is not certain it is the most that they may be.
        """
        found = {"as it is": (self.mean, self.noise)}
        if self.mechanism.steps is not None and self.mechanism.delta is not None:
            for row in outlooks(self.mechanism, 1)[1:]:
                if "parameters" not in row.change:
                    found[row.change] = self.mean, row.in_a_direction
        found |= {name: (mean, self.noise) for name, mean in self.others.items()}

        def ratios(mean: Mean, noise: float) -> tuple[float, float]:
            if not noise:
                return math.inf, math.inf
            mean = mean if mean.certain else mean.most
            return mean.norm / (noise * math.sqrt(mean.parameters)), self.signal(mean, noise)

        return {name: ratios(*row) for name, row in found.items()}

    def __str__(self) -> str:
        records, groups = self.by_group.sum(), len(self.counts)
        about = "about " if self.count_error else ""
        lines = [
            f"gradients of {about}{records:.0f} records, clip norm {self.mean.clip_norm:.3g}",
            f"{'group':>8}{'records':>9}{'not finite':>12}{'zero':>7}{'clipped':>9}"
            f"{'10 %':>9}{'median':>9}{'90 %':>9}  of the norms' sum, before and after clipping",
        ]
        pull = self.pull()
        everyone = slice(None)
        rows: list[tuple[str, slice | int]] = [("all", everyone)]
        rows += [(str(at), at) for at in range(groups if groups > 1 else 0)]
        for name, at in rows:
            own = float(np.sum(self.by_group[at]))
            if not own:
                lines.append(f"{name:>8}{'?':>9}")
                continue
            cells = [f"{self.share(c, at):.0%}" for c in (0, 1, self.clipped)]
            norms = "".join(f"{self.quantile(q, at):>9.3g}" for q in (0.1, 0.5, 0.9))
            text = f"{name:>8}{own:>9.0f}{cells[0]:>12}{cells[1]:>7}{cells[2]:>9}{norms}"
            before, after = pull[:, at]
            lines.append(text if at == everyone else f"{text}  {before:6.1%} {after:6.1%}")

        sign = "" if self.mean.certain else "<"
        shown = self.mean if self.mean.certain else self.mean.most
        lines.append(f"the mean clipped gradient is {sign}{shown.norm:.3g} clip norms long")
        of = "the whole run" if self.mechanism.steps else "one step, for no number of them is known"
        lines.append(f"{f'signal over noise, of {of}':44}{'length':>9}{'in a loss':>11}")
        first = next(iter(self.choices.values()))
        for name, (length, signal) in self.choices.items():
            if name in _NAMES.values() and math.isclose(signal, first[1], rel_tol=0.05):
                continue  # where all gradients are clipped, the clip norm is a rate
            lines.append(f"{name:44}{sign + _told(length):>9}{sign + _told(signal):>11}")
        lines.append(
            "length: of the summed mean gradients over the summed noise; in a loss: of what the "
            "two do to a record's loss.\nThe second decides: below 1 the noise undoes what is "
            "learned; from 10 on it costs little. Of small groups it tells nothing."
        )
        return "\n".join(lines)


def norm_edges(clip_norm: float, doublings: int = 16, per_doubling: int = 4) -> np.ndarray:
    """float64 [2 · doublings · per_doubling + 1]: public edges between norms; one is the clip norm.

    Args:
        clip_norm: the most that one record adds.
        doublings: from the clip norm to either end.
        per_doubling: edges for every factor of 2.
    """
    steps = np.arange(-doublings * per_doubling, doublings * per_doubling + 1)
    return np.asarray(clip_norm * 2.0 ** (steps / per_doubling))


def norm_bins(norms: jax.Array, edges: np.ndarray) -> jax.Array:
    """int32 [m], in [0, k + 3): the column of ``GradientNumbers.counts`` of each norm [m]."""
    # A norm that was clipped to C is counted among those of C and more.
    found = jnp.searchsorted(jnp.asarray(edges, jnp.float32), norms, side="right") + 2
    return jnp.where(jnp.isfinite(norms), jnp.where(norms == 0, 1, found), 0).astype(jnp.int32)


def measure(e: Examined) -> GradientNumbers:
    """Computes the numbers from the records of ``e``, without noise.

    The gradients are gone through once, some at a time; what is kept is a sum for each choice.
    """
    trained, records = e.trained(), len(e)
    structure = jax.tree.structure(e.grad_fn.trained(e.params))
    rule, size = e.mechanism.rule, sum(leaf.size for leaf in trained)
    limit = float(rule.l2(jax.tree.unflatten(structure, trained)))
    tried = tuple(_NAMES) if size <= _LARGE and type(rule) is not CoordinateBox else (1.0,)
    edges = norm_edges(limit)
    group = np.zeros(records, np.int64) if e.group is None else e.group
    counted = (group >= 0) & (group < _GROUPS)
    group = np.where(counted, group, 0)
    counts = np.zeros((int(group.max(initial=0)) + 1, len(edges) + 3))

    # What is trained, clipped by the rule to several norms, and not at all; and parts of it, each
    # clipped to the norm that shortens as many of its gradients.
    whole = _Sums(rule, structure, limit, tried)
    free = _Sums(None, structure, limit, (1.0,))
    parts, of_parts, loss = _parts(e, trained), {}, 0.0
    for rows, losses, grads in e.gradients():
        norms = whole.add(grads)
        free.add(grads)
        places = group[rows], np.asarray(norm_bins(norms, edges))
        np.add.at(counts, places, counted[rows])
        loss += float(jnp.nansum(jnp.abs(losses)))
        for name, (part, numbers) in parts.items():
            some = part(grads)
            if name not in of_parts:
                ratio = float(jnp.nanmedian(_norms(some) / norms))
                within = limit * ratio if 1e-6 < ratio < 1e6 else limit
                flat = jax.tree.structure(some)
                of_parts[name] = _Sums(Clip(within), flat, within, (1.0,)), numbers
            of_parts[name][0].add(some)

    own = tried.index(1.0)
    others = {_NAMES[f]: whole.mean(at, size) for at, f in enumerate(tried) if f != 1}
    others |= {name: sums.mean(0, numbers) for name, (sums, numbers) in of_parts.items()}
    clipped = [leaf[own] / records for leaf in whole.totals]
    travel = _travel(e, structure, clipped, [leaf[0] / records for leaf in free.totals], loss)
    return GradientNumbers(
        e.mechanism, edges, counts, whole.mean(own, size), others=others, travel=travel
    )


def find_in_numbers(numbers: GradientNumbers) -> list[Finding]:
    """Advice from the numbers, worst first; none where a program is well.

    Args:
        numbers: of ``measure``, or of a release.
    """
    mechanism, mean, travel = numbers.mechanism, numbers.mean, numbers.travel
    limit, signal = mean.clip_norm, numbers.signal(mean.most)
    flat = isinstance(mechanism.rule, Clip)
    known = mechanism.steps is not None and bool(numbers.by_group.sum())
    found: list[Finding] = []

    # A loss that was scaled up, as mixed precision does.
    shortest = numbers.quantile(0.05)
    if flat and travel and travel.loss > _SCALED and shortest > _SCALED * limit:
        what = (
            f"a loss is {travel.loss:.3g} on average, and nearly all gradients are more than "
            f"{shortest / limit:.2g} times as long as the clip norm"
        )
        found.append(Finding("loss scale", what, "", False, weight=0.4))

    # A clip norm far above all gradients, where the noise that it makes matters.
    longest = numbers.quantile(0.95)
    if flat and known and 0 < _FAR * longest < limit and signal < _WEAK:
        what = (
            f"95 % of the gradients are shorter than {longest:.3g}, and the clip norm is "
            f"{limit:.3g}: {_told(limit / longest)} times as much noise as they need"
        )
        do = f"clip at {longest:.2g}: signal over noise {signal:.2g} becomes about "
        do += f"{_told(signal * limit / longest)}, at the same epsilon"
        found.append(Finding("clip", what, "", False, do=do, weight=1 / (1 + signal) ** 0.5))

    # A clip norm so low that the optimizer's steps lead nowhere; not where it scales them itself.
    short = travel and travel.fall < _SHORT * travel.loss and travel.tenfold > 3 * travel.fall
    if travel and short and travel.unclipped > 5 * travel.fall:
        times = numbers.quantile(0.5) / limit
        what = (
            f"clipped at {limit:.3g}, where the median gradient is {_told(times * limit)}, all "
            f"{mechanism.steps:,} steps together lower a loss of {travel.loss:.3g} by at most "
            f"{travel.fall:.2g}"
        )
        do = f"multiply the learning rate by {_told(times)}, or raise the clip norm to "
        do += f"{_told(times * limit)}: the noise is in proportion, epsilon the same"
        found.append(Finding("clip", what, "", False, do=do, weight=0.9))

    # Groups that add nothing, and groups whose weight clipping takes away.
    groups, size = len(numbers.counts), numbers.by_group
    dead = [numbers.share(slice(0, 2), at) for at in range(groups)]
    for at in range(groups if min(dead) < 0.5 else 0):
        if dead[at] < 0.9 or size[at] < 5:
            continue
        what = f"{dead[at]:.0%} of the records of group {at} add nothing"
        do = "look at their labels and inputs, and at what the loss makes of them"
        found.append(Finding("groups", what, "", False, do=do, weight=0.8))
    before, after = numbers.pull()
    share = size / max(size.sum(), 1.0)
    for at in range(groups if groups > 1 else 0):
        # How much harder a record of the group pulls than one of the others.
        odds = share[at] / max(1 - share[at], 1e-30)
        hard, left = (p[at] / max(1 - p[at], 1e-30) / max(odds, 1e-30) for p in (before, after))
        rare = size[at] >= 5 and share[at] <= 0.5 / groups
        if rare and hard > _DEFEATED and hard > _DEFEATED * left:
            own = numbers.quantile(0.75, at)
            what = (
                f"a record of group {at} ({share[at]:.1%} of the records) pulls {hard:.2g} times "
                f"as hard as another before clipping, and {left:.2g} times after it: of "
                f"{before[at]:.0%} of the gradients' length {after[at]:.0%} are left"
            )
            do = (
                f"clip at {own:.2g}, which leaves three quarters of its gradients as they are "
                f"(with {_told(own / limit)} times the noise); or give no weight, and move the "
                "threshold of the decision on public records"
            )
            weight = 0.8 * (1 - float(after[at] / before[at]))
            found.append(Finding("groups", what, "", False, do=do, weight=weight))

    # Noise that drowns what the records have in common.
    if known and signal < _DROWNED:
        what = (
            f"after {mechanism.steps:,} steps what was learned of a record's loss is "
            f"{numbers.signal():.2g} times what the noise did to it"
        )
        better = sorted(
            (value, name)
            for name, (_, value) in numbers.choices.items()
            if value > 1.3 * signal and "epsilon" not in name
        )
        do = "; ".join(f"{name}: {value:.2g}" for value, name in better[::-1][:4])
        found.append(Finding("signal", what, "", False, do=do, weight=1 - signal / 2))
    return sorted(found, key=lambda finding: -finding.weight)


class _Sums:
    """Sums of gradients that a rule clips, at several multiples of its norm.

    Args:
        rule: None clips nothing.
        structure: of the gradients, as the rule sees them.
        limit: the most that one record adds.
        tried: the multiples.
    """

    def __init__(
        self,
        rule: Rule | None,
        structure: jax.tree_util.PyTreeDef,
        limit: float,
        tried: tuple[float, ...],
    ) -> None:
        self.totals: list[jax.Array] = []  # [tried, ...] of each leaf
        self._limit, self._tried, self._records = limit, tried, 0
        self._own: list[jax.Array] = []  # float32 [tried, m]: squared norms, clipped
        self._along: list[jax.Array] = []  # [tried, m]: along the mean of those before

        def clipped(grads: list[jax.Array], before: list[jax.Array]):  # type: ignore[no-untyped-def]
            norms = _norms(grads)
            counts = jnp.isfinite(norms)
            grads = [jnp.where(_along_rows(counts, leaf), leaf, 0.0) for leaf in grads]
            if isinstance(rule, CoordinateBox):
                grads = [jnp.clip(leaf, -rule.bound, rule.bound) for leaf in grads]
            squares = [_squares(leaf) for leaf in grads]
            factors = []  # of each multiple, of each leaf: [m]
            for factor in tried:
                if rule is None or isinstance(rule, CoordinateBox):
                    factors.append([jnp.ones(len(norms), jnp.float32) for _ in grads])
                    continue
                # Clipping g to f C is what clipping g / f to C is.
                seen = jax.tree.unflatten(structure, [square / factor**2 for square in squares])
                proven = isinstance(rule, PROVEN)
                found = rule.factors(seen) if proven else bounded_factors(rule, seen, limit)
                # Of a rule that normalises, f C is another rate and nothing else.
                factors.append(jax.tree.leaves(found))
            each = [jnp.stack(of_leaf) for of_leaf in zip(*factors, strict=True)]
            own = sum(f**2 * square[None] for f, square in zip(each, squares, strict=True))
            pairs = list(zip(each, grads, strict=True))
            sums = [jnp.einsum("fm,m...->f...", f, leaf) for f, leaf in pairs]
            along = sum(
                f * jnp.einsum("m...,f...->fm", leaf, total)
                for (f, leaf), total in zip(pairs, before, strict=True)
            )
            return norms, own, along, [a + b for a, b in zip(before, sums, strict=True)]

        self._clipped = jax.jit(clipped, compiler_options=QUICK)

    def add(self, grads: list[jax.Array]) -> jax.Array:
        """Adds gradients [m, ...]; returns their norms [m] before clipping."""
        norms = []
        for rows in np.array_split(np.arange(len(grads[0])), 2):  # the second half meets the first
            if not len(rows):
                continue
            some = [leaf[rows[0] : rows[-1] + 1].astype(jnp.float32) for leaf in grads]
            shapes = [(len(self._tried), *leaf.shape[1:]) for leaf in some]
            before = self.totals or [jnp.zeros(shape, jnp.float32) for shape in shapes]
            found, own, along, self.totals = self._clipped(some, before)
            if self._records:
                self._along.append(along / self._records)
            self._own.append(own)
            self._records += len(rows)
            norms.append(found)
        return jnp.concatenate(norms)

    def mean(self, at: int, parameters: int) -> Mean:
        """The mean at the multiple ``tried[at]``, of so many parameters."""
        limit = self._limit * self._tried[at]
        total = sum(float(jnp.sum(leaf[at] ** 2)) for leaf in self.totals)
        own = float(sum(jnp.sum(each[at]) for each in self._own))
        pairs = self._records * (self._records - 1)
        # Hajek's projection of the mean over pairs: each record's product with the others' mean.
        along = np.concatenate([np.zeros(0), *(np.asarray(each[at]) for each in self._along)])
        error = 2 * along.std() / math.sqrt(self._records) / limit**2 if len(along) else math.inf
        return Mean.of_sum(
            total, own, self._records, limit, parameters, pairs=pairs, sampling_error=error
        )


def _parts(
    e: Examined, trained: list[jax.Array]
) -> dict[str, tuple[Callable[[list[jax.Array]], list[jax.Array]], int]]:
    """By name: (from the trained leaves' gradients to those of a part, its parameters)."""
    found: dict[str, tuple[Callable[[list[jax.Array]], list[jax.Array]], int]] = {}

    # The matrix that the loss uses last, and what comes after it.
    example = jax.tree.map(lambda leaf: leaf[0], e.records)
    traced = program.trace(e.loss, trained, example, jax.random.key(0, impl="threefry2x32"))
    used = list(find_uses(traced, [leaf.shape for leaf in trained]).of_leaf)
    matrices = [at for at, leaf in enumerate(trained) if leaf.ndim > 1]
    if len(matrices) > 1 and set(matrices) <= set(used):
        last = used[max(map(used.index, matrices)) :]
        numbers = sum(trained[at].size for at in last)
        found["last layer alone"] = (lambda grads: [grads[at] for at in last]), numbers

    # LoRA, W + A B of a random A and B = 0: the gradient of B is A^T times that of W.
    wide = [at for at in matrices if trained[at].ndim == 2 and min(trained[at].shape) >= _NARROW]
    if wide:
        rng = np.random.default_rng(0)
        shapes = {at: trained[at].shape for at in wide}
        down = {
            at: jnp.asarray(np.linalg.qr(rng.normal(size=(a, _RANK)))[0], jnp.float32)
            for at, (a, _) in shapes.items()
        }
        numbers = sum(_RANK * (a + b) for a, b in shapes.values())
        found[f"LoRA of rank {_RANK}"] = (
            (
                lambda grads: [
                    jnp.einsum("ar,mab->mrb", down[at], grads[at].astype(jnp.float32))
                    for at in wide
                ]
            ),
            numbers,
        )
    return found


def _travel(
    e: Examined,
    structure: jax.tree_util.PyTreeDef,
    clipped: list[jax.Array],
    unclipped: list[jax.Array],
    loss: float,
) -> Travel | None:
    """Follows the optimizer for some steps, as if the gradient stayed what it is at the start."""
    if e.optimizer is None or e.mechanism.steps is None:
        return None
    optimizer = optax.with_extra_args_support(e.optimizer)
    params, all_steps = e.grad_fn.trained(e.params), e.mechanism.steps
    steps = min(all_steps, _STEPS)

    @jax.jit
    def moved(grads: PyTree) -> PyTree:
        """The sum of the updates, from parameters that stay where they are."""

        def step(carry: PyTree, _: None) -> tuple[PyTree, None]:
            state, total = carry
            update, state = optimizer.update(grads, state, params)
            return (state, jax.tree.map(jnp.add, total, update)), None

        start = optimizer.init(params), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(step, start, None, steps)[0][1]

    try:
        still = jax.tree.leaves(moved(jax.tree.map(jnp.zeros_like, params)))  # weight decay alone
    except (KeyError, TypeError, ValueError):  # it wants more than a gradient
        return None
    slope = float(optax.tree.norm(unclipped))

    def fall(grads: list[jax.Array], scale: float = 1.0) -> float:
        """The slope times the way that gradients make the optimizer go."""
        leaves = zip(grads, e.trained(), strict=True)
        given = [(scale * grad).astype(leaf.dtype) for grad, leaf in leaves]
        ends = jax.tree.leaves(moved(jax.tree.unflatten(structure, given)))
        way = [(a - b).astype(jnp.float32) for a, b in zip(ends, still, strict=True)]
        return float(optax.tree.norm(way)) * slope * all_steps / steps

    return Travel(loss / len(e), fall(clipped), fall(unclipped), fall(clipped, 10.0))


def _told(number: float) -> str:
    """A number for people, of two or three digits."""
    return f"{number:,.0f}" if 100 <= number < 1e6 else f"{number:.2g}"


def _squares(leaf: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(leaf.reshape(len(leaf), -1)), axis=1)


def _norms(grads: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(_squares(leaf.astype(jnp.float32)) for leaf in grads))


def _along_rows(mask: jax.Array, leaf: jax.Array) -> jax.Array:
    return mask.reshape(-1, *[1] * (leaf.ndim - 1))
