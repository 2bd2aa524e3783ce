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

from jaxdp.audit.advice import DROWNED, WEAK, outlook, outlooks
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
    limit_of,
)
from jaxdp.mechanism import Mechanism
from jaxdp.types import PyTree

# Multiples of the clip norm that are tried.
_NAMES = {0.25: "clip norm / 4", 0.5: "clip norm / 2", 1.0: "", 2.0: "clip norm x 2"}
_NAMES |= {4.0: "clip norm x 4"}
_LARGE = 2**24  # parameters from which on the mechanism's own clip norm alone is tried
_RANK, _NARROW = 4, 16  # of LoRA, and the least width of a matrix that it would be used for
_STEPS = 100  # for which the optimizer is asked how far it goes

_FAR = 4.0  # times as long as nearly all gradients a clip norm is far too long
_SHORT, _CLIPPED = 0.2, 5.0  # of the loss, that all steps take away; median norm over clip norm
_DEFEATED = 3.0  # times as hard a group pulls before clipping as after it

Part = Callable[[list[jax.Array]], list[jax.Array]]  # from gradients to those of a part


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
    ) -> "Mean":
        """The mean from a sum of clipped gradients, with the error of the noise in it.

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
        """
        pairs = records**2 if pairs is None else pairs
        signal = total - own - parameters * noise**2
        # |s + e|^2 of noise e of deviation s in d coordinates: variance 2 d s^4 + 4 s^2 |s|^2.
        variance = 2 * parameters * noise**4 + 4 * noise**2 * max(signal + own, 0.0)
        scale = pairs * clip_norm**2
        rms = math.sqrt(max(own, 0.0) / records) / clip_norm
        return cls(signal / scale, math.sqrt(variance) / scale, rms, clip_norm, parameters)

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

    def signal(self, noise: float) -> float:
        """The signal in a record's loss over the noise there (``jaxdp.audit.advice`` derives it).

        Args:
            noise: standard deviation of the noise in each coordinate of the run's mean, in clip
                norms.
        """
        return max(self.square, 0.0) / (noise * max(self.rms, 1e-30)) if noise else math.inf


class Travel(NamedTuple):
    """By how much the optimizer's steps can lower the mean loss, at the slope that it starts with.

    Attributes:
        loss: the mean of the losses' absolute values.
        fall: the slope times the way of all steps, if each has the mean clipped gradient.
        tenfold: the same with ten times the mean clipped gradient.
    """

    loss: float
    fall: float
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
        below = np.cumsum(some) / max(some.sum(), 1e-30)
        if not some.sum() or q <= below[0]:
            return 0.0 if some.sum() else math.nan
        # Within a column norms are taken to be spread evenly, by their logarithms.
        ends = np.log([self.edges[0] / 2, *self.edges, self.edges[-1] * 2])
        return float(np.exp(np.interp(q, below, ends)))

    def pull(self) -> np.ndarray:
        """float64 [2, groups]: each group's share of the norms' sum, before and after clipping."""
        sums = self.lengths @ self.certain.T
        return np.asarray(sums / np.maximum(sums.sum(1, keepdims=True), 1e-30))

    @functools.cached_property
    def noise(self) -> float:
        """Standard deviation of the noise in each coordinate of the run's mean, in clip norms."""
        return outlook(self.mechanism).noise

    @functools.cached_property
    def choices(self) -> dict[str, tuple[float, float]]:
        """By name, (norm of the mean clipped gradient over the noise's, signal) of the run.

        As it is; with other public numbers at the same epsilon; with what was measured besides. Of
        a mean that is not certain it is the most that they may be.
        """
        found = {"as it is": (self.mean, self.noise)}
        if self.mechanism.steps is not None and self.mechanism.delta is not None:
            found |= {row.change: (self.mean, row.noise) for row in outlooks(self.mechanism)}
        found |= {name: (mean, self.noise) for name, mean in self.others.items()}
        ratios = {}
        for name, (mean, noise) in found.items():
            mean = mean if mean.certain else mean.most
            length = mean.norm / (noise * math.sqrt(mean.parameters)) if noise else math.inf
            ratios[name] = length, mean.signal(noise)
        return ratios

    def __str__(self) -> str:
        about = "about " if self.count_error else ""
        lines = [
            f"gradients of {about}{self.by_group.sum():.0f} records, clip norm "
            f"{self.mean.clip_norm:.3g}",
            f"{'group':>8}{'records':>9}{'not finite':>12}{'zero':>7}{'clipped':>9}"
            f"{'10 %':>9}{'median':>9}{'90 %':>9}  of the norms' sum, before and after clipping",
        ]
        groups, pull = len(self.counts), self.pull()
        rows: list[slice | int] = [slice(None), *range(groups if groups > 1 else 0)]
        for at in rows:
            name, own = at if isinstance(at, int) else "all", np.sum(self.by_group[at])
            if not own:
                lines.append(f"{name:>8}{'?':>9}")
                continue
            bad, zero, clipped = (f"{self.share(c, at):.0%}" for c in (0, 1, self.clipped))
            norms = "".join(f"{self.quantile(q, at):>9.3g}" for q in (0.1, 0.5, 0.9))
            pulls = "" if name == "all" else "  {:6.1%} {:6.1%}".format(*pull[:, at])
            lines.append(f"{name:>8}{own:>9.0f}{bad:>12}{zero:>7}{clipped:>9}{norms}{pulls}")

        sign = "" if self.mean.certain else "<"
        shown = self.mean if self.mean.certain else self.mean.most
        lines.append(f"the mean clipped gradient is {sign}{shown.norm:.3g} clip norms long")
        of = "the whole run" if self.mechanism.steps else "one step, for no number of them is known"
        lines.append(f"{f'signal over noise, of {of}':44}{'length':>9}{'in a loss':>11}")
        usual = self.choices["as it is"][1]
        for name, (length, signal) in self.choices.items():
            if name in _NAMES.values() and math.isclose(signal, usual, rel_tol=0.05):
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
    trained, records, rule = e.grad_fn.trained(e.params), len(e), e.mechanism.rule
    leaves, structure = jax.tree.flatten(trained)
    size, limit = sum(leaf.size for leaf in leaves), float(limit_of(rule, trained))
    tried = tuple(_NAMES) if size <= _LARGE else (1.0,)
    edges = norm_edges(limit)
    group = np.zeros(records, np.int64) if e.group is None else e.group
    counts = np.zeros((max(int(group.max(initial=0)), 0) + 1, len(edges) + 3))

    # What is trained, clipped by the rule to several norms; and parts of it, each clipped to the
    # norm that shortens as many of its gradients.
    whole, parts, loss = _Sums(rule, structure, limit, tried), _parts(e, leaves), 0.0
    of_parts: dict[str, _Sums] = {}
    for rows, losses, grads in e.gradients():
        norms = whole.add(grads)
        places = group[rows], np.asarray(norm_bins(norms, edges))
        np.add.at(counts, places, group[rows] >= 0)
        loss += float(jnp.nansum(jnp.abs(losses))) / records
        for name, (part, _) in parts.items():
            some = part(grads)
            if name not in of_parts:
                ratio = float(jnp.nanmedian(_norms(some) / norms))
                within = limit * ratio if 1e-6 < ratio < 1e6 else limit
                of_parts[name] = _Sums(Clip(within), jax.tree.structure(some), within)
            of_parts[name].add(some)

    own = tried.index(1.0)
    others = {_NAMES[f]: whole.mean(at, size) for at, f in enumerate(tried) if f != 1}
    others |= {name: sums.mean(0, parts[name][1]) for name, sums in of_parts.items()}
    numbers = GradientNumbers(e.mechanism, edges, counts, whole.mean(own, size), others=others)

    # As if gradients were as much longer without clipping as the median one is.
    slope = numbers.mean.norm * max(limit, numbers.quantile(0.5))
    way = _way(e, [leaf[own] / records for leaf in whole.totals])
    travel = None if way is None else Travel(loss, slope * way[0], slope * way[1])
    return dataclasses.replace(numbers, travel=travel)


def find_in_numbers(numbers: GradientNumbers) -> list[Finding]:
    """Advice from the numbers, worst first; none where a program is well.

    Args:
        numbers: of ``measure``, or of a release.
    """
    mechanism, mean, travel = numbers.mechanism, numbers.mean, numbers.travel
    limit, signal = mean.clip_norm, mean.most.signal(numbers.noise)
    known = mechanism.steps is not None and bool(numbers.by_group.sum())
    found: list[Finding] = []

    def advise(kind: str, what: str, do: str, weight: float) -> None:
        found.append(Finding(kind, what, "", certain=False, do=do, weight=weight))

    # A clip norm far above all gradients, where the noise that it makes matters.
    longest = numbers.quantile(0.95)
    if isinstance(mechanism.rule, Clip) and known and 0 < _FAR * longest < limit and signal < WEAK:
        what = (
            f"95 % of the gradients are shorter than {longest:.3g}, and the clip norm is "
            f"{limit:.3g}: {_told(limit / longest)} times as much noise as they need"
        )
        do = (
            f"clip at {longest:.2g}: signal over noise {signal:.2g} becomes about "
            f"{_told(signal * limit / longest)}, at the same epsilon"
        )
        advise("clip", what, do, 1 / (1 + signal) ** 0.5)

    # A clip norm so low that the optimizer's steps lead nowhere; not where it scales them itself.
    times = numbers.quantile(0.5) / limit
    short = travel and travel.fall < _SHORT * travel.loss and travel.tenfold > 3 * travel.fall
    if travel and short and times > _CLIPPED:
        what = (
            f"clipped at {limit:.3g}, where the median gradient is {_told(times * limit)}, all "
            f"{mechanism.steps:,} steps together lower a loss of {travel.loss:.3g} by no more than "
            f"about {travel.fall:.2g}"
        )
        do = (
            f"multiply the learning rate by {_told(times)}, or raise the clip norm to "
            f"{_told(times * limit)}: the noise is in proportion, epsilon the same"
        )
        advise("clip", what, do, 0.9)

    # Groups that add nothing, where others do.
    groups, size = len(numbers.counts), numbers.by_group
    dead = [numbers.share(slice(0, 2), at) for at in range(groups)]
    for at, share in enumerate(dead):
        if min(dead) < 0.5 and share >= 0.9 and size[at] >= 5:
            do = "look at their labels and inputs, and at what the loss makes of them"
            advise("groups", f"{share:.0%} of the records of group {at} add nothing", do, 0.8)

    # Rare groups whose weight clipping takes away: how much harder a record of one pulls than
    # another record, before and after.
    before, after = numbers.pull()
    shares = size / max(size.sum(), 1.0)
    for at, share in enumerate(shares):
        odds = [p / max(1 - p, 1e-30) for p in (share, before[at], after[at])]
        hard, left = (each / max(odds[0], 1e-30) for each in odds[1:])
        rare = size[at] >= 5 and share <= 0.5 / groups
        if rare and hard > _DEFEATED and hard > _DEFEATED * left:
            own = numbers.quantile(0.75, at)
            what = (
                f"a record of group {at} ({share:.1%} of the records) pulls {hard:.2g} times as "
                f"hard as another before clipping, and {left:.2g} times after it: of "
                f"{before[at]:.0%} of the gradients' length {after[at]:.0%} are left"
            )
            do = (
                f"clip at {own:.2g}, which leaves three quarters of its gradients as they are "
                f"(with {_told(own / limit)} times the noise); or give no weight, and move the "
                "threshold of the decision on public records"
            )
            advise("groups", what, do, 0.8 * (1 - float(after[at] / before[at])))

    # Noise that drowns what the records have in common.
    if known and signal < DROWNED:
        what = (
            f"after {mechanism.steps:,} steps what was learned of a record's loss is "
            f"{mean.signal(numbers.noise):.2g} times what the noise did to it"
        )
        better = sorted(
            (value, name)
            for name, (_, value) in numbers.choices.items()
            if value > 1.3 * signal and "epsilon" not in name
        )
        do = "; ".join(f"{name}: {value:.2g}" for value, name in better[::-1][:4])
        advise("signal", what, do, 1 - signal / 2)
    return sorted(found, key=lambda finding: -finding.weight)


class _Sums:
    """Sums of gradients that a rule clips to several multiples of its norm.

    Args:
        rule: what clips them.
        structure: of the gradients, as the rule sees them.
        limit: the most that one record adds.
        tried: the multiples.
    """

    def __init__(
        self,
        rule: Rule,
        structure: jax.tree_util.PyTreeDef,
        limit: float,
        tried: tuple[float, ...] = (1.0,),
    ) -> None:
        self.totals: list[jax.Array] = []  # [tried, ...] of each leaf
        self._limit, self._tried, self._records = limit, tried, 0
        self._own: list[jax.Array] = []  # float32 [tried, m]: squared norms, clipped
        self._along: list[jax.Array] = []  # [tried, m]: along the mean of the others so far

        def clip(multiple: jax.Array, grads: list[jax.Array]) -> list[jax.Array]:
            if isinstance(rule, CoordinateBox):
                most = rule.bound * multiple
                return [jnp.clip(leaf, -most, most) for leaf in grads]
            # Clipping g to f C is what clipping g / f to C is; to a rule that normalises a rate.
            seen = jax.tree.unflatten(structure, [_squares(leaf / multiple) for leaf in grads])
            proven = isinstance(rule, PROVEN)
            found = rule.factors(seen) if proven else bounded_factors(rule, seen, limit)
            pairs = zip(jax.tree.leaves(found), grads, strict=True)
            return [_along_rows(factor, leaf) * leaf for factor, leaf in pairs]

        def added(
            grads: list[jax.Array], totals: list[jax.Array], others: float
        ) -> tuple[jax.Array, tuple[list[jax.Array], jax.Array, jax.Array]]:
            norms = _norms(grads)
            finite = jnp.isfinite(norms)
            each = [jnp.where(_along_rows(finite, g), g.astype(jnp.float32), 0.0) for g in grads]

            def one(given: tuple[jax.Array, list[jax.Array]]):  # type: ignore[no-untyped-def]
                kept = clip(given[0], each)
                sums = [a + jnp.sum(b, 0) for a, b in zip(given[1], kept, strict=True)]
                own = sum(map(_squares, kept))
                pairs = zip(kept, sums, strict=True)
                along = sum(jnp.einsum("m...,...->m", leaf, total) for leaf, total in pairs) - own
                return sums, own, along / others

            return norms, jax.lax.map(one, (jnp.asarray(tried, jnp.float32), totals))

        self._added = jax.jit(added, compiler_options=QUICK)

    def add(self, grads: list[jax.Array]) -> jax.Array:
        """Adds gradients [m, ...]; returns their norms [m] before clipping."""
        shapes = [(len(self._tried), *leaf.shape[1:]) for leaf in grads]
        before = self.totals or [jnp.zeros(shape, jnp.float32) for shape in shapes]
        self._records += len(grads[0])
        norms, sums = self._added(grads, before, float(max(self._records - 1, 1)))
        self.totals, own, along = sums
        self._own.append(own)
        self._along.append(along)
        return norms

    def mean(self, at: int, parameters: int) -> Mean:
        """The mean at the multiple ``tried[at]``, of so many parameters."""
        limit, records = self._limit * self._tried[at], self._records
        total = sum(float(jnp.sum(leaf[at] ** 2)) for leaf in self.totals)
        own = float(sum(jnp.sum(each[at]) for each in self._own))
        # Hajek's projection of the mean over pairs: each record's product with the others' mean.
        along = np.concatenate([np.asarray(each[at]) for each in self._along])
        error = 2 * float(along.std()) / math.sqrt(records) / limit**2
        mean = Mean.of_sum(total, own, records, limit, parameters, pairs=records * (records - 1))
        return mean._replace(square_error=error)


def _parts(e: Examined, trained: list[jax.Array]) -> dict[str, tuple[Part, int]]:
    """By name: (from the trained leaves' gradients to those of a part, its parameters)."""
    found: dict[str, tuple[Part, int]] = {}

    # The matrix that the loss uses last, and what comes after it.
    example = jax.tree.map(lambda leaf: leaf[0], e.records)
    traced = program.trace(e.loss, trained, example, jax.random.key(0, impl="threefry2x32"))
    used = list(find_uses(traced, [leaf.shape for leaf in trained]).of_leaf)
    matrices = [at for at, leaf in enumerate(trained) if leaf.ndim > 1]
    if len(matrices) > 1 and set(matrices) <= set(used):
        last = used[max(map(used.index, matrices)) :]
        size = sum(trained[at].size for at in last)
        found["last layer alone"] = (lambda grads: [grads[at] for at in last]), size

    # LoRA, W + A B of a random A and B = 0: the gradient of B is A^T times that of W.
    wide = [at for at in matrices if trained[at].ndim == 2 and min(trained[at].shape) >= _NARROW]
    if wide:
        rng = np.random.default_rng(0)
        normal = {at: rng.normal(size=(trained[at].shape[0], _RANK)) for at in wide}
        down = {at: jnp.asarray(np.linalg.qr(a)[0], jnp.float32) for at, a in normal.items()}

        def lora(grads: list[jax.Array]) -> list[jax.Array]:
            each = ((down[at], grads[at].astype(jnp.float32)) for at in wide)
            return [jnp.einsum("ar,mab->mrb", *pair) for pair in each]

        size = sum(_RANK * sum(trained[at].shape) for at in wide)
        found[f"LoRA of rank {_RANK}"] = lora, size
    return found


def _way(e: Examined, gradient: list[jax.Array]) -> tuple[float, float] | None:
    """(length of the way that the optimizer goes in all steps, the same at ten times the gradient).

    As if the gradient stayed what it is at the start; None where there is no optimizer, or no
    number of steps, or it wants more than a gradient.
    """
    if e.optimizer is None or e.mechanism.steps is None:
        return None
    optimizer, params = optax.with_extra_args_support(e.optimizer), e.grad_fn.trained(e.params)
    leaves, structure = jax.tree.flatten(params)
    steps = min(e.mechanism.steps, _STEPS)

    @jax.jit
    def moved(scale: float) -> list[jax.Array]:
        """The sum of the updates, from parameters that stay where they are."""
        pairs = zip(gradient, leaves, strict=True)
        grads = jax.tree.unflatten(structure, [(scale * g).astype(p.dtype) for g, p in pairs])

        def step(carry: PyTree, _: None) -> tuple[PyTree, None]:
            state, total = carry
            update, state = optimizer.update(grads, state, params)
            return (state, jax.tree.map(jnp.add, total, update)), None

        start = optimizer.init(params), jax.tree.map(jnp.zeros_like, params)
        ends = jax.tree.leaves(jax.lax.scan(step, start, None, steps)[0][1])
        return [end.astype(jnp.float32) for end in ends]

    try:
        still, *ends = (moved(scale) for scale in (0.0, 1.0, 10.0))  # the first: weight decay alone
    except (KeyError, TypeError, ValueError):  # it wants more than a gradient
        return None
    ways = [float(optax.tree.norm(jax.tree.map(jnp.subtract, end, still))) for end in ends]
    return ways[0] * e.mechanism.steps / steps, ways[1] * e.mechanism.steps / steps


def _told(number: float) -> str:
    """A number for people, of two or three digits."""
    return f"{number:,.0f}" if 100 <= number < 1e6 else f"{number:.2g}"


def _squares(leaf: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(leaf.reshape(len(leaf), -1)), axis=1)


def _norms(grads: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(_squares(leaf.astype(jnp.float32)) for leaf in grads))


def _along_rows(mask: jax.Array, leaf: jax.Array) -> jax.Array:
    return mask.reshape(-1, *[1] * (leaf.ndim - 1))
