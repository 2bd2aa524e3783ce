"""Hidden state: what the last iterate of a chain of noisy contractions releases, and its event.

The accountant of DP-SBCD (docs/hidden_state.md). ``HiddenState`` is an event of
``jaxdp.accounting`` like any other once this module is imported; it needs no JAX.

Every function of a chain answers with S, one value for each batch in which the changed record may
be: the Renyi divergence of order alpha is at most alpha S for every alpha > 1 (so S is rho of
zCDP). For ``shifted`` and ``composed`` more holds: the release is sqrt(2 S)-GDP. The relation is
replace-one.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxdp import arguments as check
from jaxdp.accounting import gaussian, queries, rdp
from jaxdp.accounting.events import Array, Bound, Relation
from jaxdp.accounting.flat import DominatedEvent, FlatRun

Schedule = float | Iterable[float]
_FADED = -300.0  # log of a gain whose square is close to what float64 cannot hold
_ASSUMED = (
    "holds while the partition is secret and nothing but the last iterate of each block leaves it"
)


# Chains of noisy contractions on secret, fixed batches.


@dataclass(frozen=True)
class NoisyChain:
    """The chain w <- P_k(T_k(w) + N(0, v_k I)), ``epochs`` times through fixed batches.

    Step k = e * batches + j (both from 0) reads batch j in epoch e. The records were put into the
    batches once, uniformly at random, in secret and without looking at them; a record is in one
    batch, which it keeps. The start does not depend on the records.

    A schedule is one number (the same at every step), ``epochs`` numbers (one an epoch) or
    epochs * batches numbers (one a step); it is public and fixed before the first step.

    Attributes:
        batches: l >= 1, batches of the partition.
        epochs: E >= 1, passes; there are E * l steps.
        contributions: schedule >= 0; how far ONE record, against none in its place, can move T_k of
            the step that reads it: step size * clip norm / batch size. Replacing it moves it twice
            as far; the accountant sees to that.
        variances: schedule > 0; v_k, variance of the noise ADDED TO w in every coordinate.
        contractions: schedule > 0; an upper bound on the Lipschitz constant of T_k.
        proximal: schedule > 0; an upper bound on the Lipschitz constant of P_k.
        start_distance: largest distance of the two starts of two neighbours; 0 for a released
            start.
        diameter: of a bounded convex set onto which every P_k projects; None when there is none.

    Raises:
        ValueError: also for contractions whose product overflows.
    """

    batches: int
    epochs: int
    contributions: tuple[float, ...]
    variances: tuple[float, ...]
    contractions: tuple[float, ...] = (1.0,)
    proximal: tuple[float, ...] = (1.0,)
    start_distance: float = 0.0
    diameter: float | None = None

    def __post_init__(self) -> None:
        check.fields(self, batches=check.size, epochs=check.size, start_distance=check.non_negative)
        if self.steps > 10**8:
            raise ValueError(f"epochs={self.epochs!r}: expected at most 1e8 steps in one chain")
        if self.diameter is not None:
            check.fields(self, diameter=check.positive)
        for name in ("contributions", "variances", "contractions", "proximal"):
            values = self._schedule(name, getattr(self, name), positive=name != "contributions")
            object.__setattr__(self, name, values)
        if max(self.contractions) > 1 or max(self.proximal) > 1:
            log_gains(self)

    @property
    def steps(self) -> int:
        """The number of steps, epochs * batches."""
        return self.epochs * self.batches

    def table(self, name: str) -> Array:
        """The schedule ``name`` at every step, float64 [epochs, batches]."""
        return _spread(np.asarray(getattr(self, name)), self.epochs, self.batches)

    def _schedule(self, name: str, given: Schedule, positive: bool) -> tuple[float, ...]:
        try:
            values = np.atleast_1d(np.asarray(given, dtype=np.float64))
        except (TypeError, ValueError):
            raise ValueError(f"{name}={given!r}: expected numbers") from None
        _check_length(name, values, self.epochs, self.batches)
        bad = ~(np.isfinite(values) & (values <= 1e100))
        # Numbers below 1e-100 would vanish when squared.
        bad |= ~((values >= 1e-100) | ((values == 0) & (not positive)))
        if bad.any():
            least = "in [1e-100, 1e100]" + ("" if positive else " or 0")
            raise ValueError(f"{name}={float(values[bad][0])!r}: expected finite numbers {least}")
        return tuple(values.tolist())


def clipped_gradient_chain(
    *,
    epochs: int,
    dataset_size: int,
    batch_size: int,
    step_sizes: Schedule,
    noise_multipliers: Schedule,
    l2_clip_norm: float,
    smoothness: float,
    weight_decay: float = 0.0,
    diameter: float | None = None,
) -> NoisyChain:
    """The chain of proximal gradient descent on a convex loss, clipped record by record.

    w <- P(w - (eta/b) (sum_n clip(g_n(w)) + N(0, (z C)^2 I))). Clipping a Huber-type loss record by
    record keeps it convex and smooth, so that the map is 1-Lipschitz for eta <= 2/smoothness; never
    less than 1, because a clipped gradient is flat far out. A last batch with fewer records changes
    nothing: the divisor is b for all.

    Args:
        epochs: passes over the data.
        dataset_size: n, public.
        batch_size: b <= n; there are ceil(n / b) batches.
        step_sizes: eta_k in (0, 2 / beta], a schedule.
        noise_multipliers: z_k > 0, a schedule; noise on the SUM, over the clip norm.
        l2_clip_norm: C.
        smoothness: beta, a bound on the smoothness of EVERY record's loss that holds by
            construction.
        weight_decay: lambda of P(w) = w / (1 + eta lambda); 0 for none.
            (Soft thresholding and projections on convex sets are 1-Lipschitz and need no number.)
        diameter: as in ``NoisyChain``.

    Raises:
        ValueError: for an argument out of its range.
    """
    n = check.size("dataset_size", dataset_size)
    b = check.size("batch_size", batch_size)
    if b > n:
        raise ValueError(f"batch_size={b}: expected at most dataset_size={n}")
    clip = check.positive("l2_clip_norm", l2_clip_norm)
    largest = 2 / check.positive("smoothness", smoothness)
    decay = check.non_negative("weight_decay", weight_decay)
    batches, epochs = -(-n // b), check.size("epochs", epochs)
    eta = _public_schedule("step_sizes", step_sizes, epochs, batches)
    z = _public_schedule("noise_multipliers", noise_multipliers, epochs, batches)
    if eta.max() > largest * (1 + 1e-12):
        raise ValueError(
            f"step_sizes={float(eta.max())!r}: expected at most 2/smoothness = {largest:g}, beyond "
            "which a step expands distances"
        )
    moved = eta * (clip / b)
    noise, prox = _compact((z * moved) ** 2), _compact(1 / (1 + eta * decay))
    return NoisyChain(batches, epochs, _compact(moved), noise, proximal=prox, diameter=diameter)


def _public_schedule(name: str, given: Schedule, epochs: int, batches: int) -> Array:
    values = (given,) if isinstance(given, int | float) else tuple(given)
    for i, value in enumerate(values):
        check.positive(f"{name}[{i}]" if len(values) > 1 else name, value)
    numbers = np.asarray(values, dtype=np.float64)
    _check_length(name, numbers, epochs, batches)
    return _spread(numbers, epochs, batches)


def _check_length(name: str, values: Array, epochs: int, batches: int) -> None:
    if values.ndim != 1 or values.size not in (1, epochs, epochs * batches):
        raise ValueError(
            f"{name} has shape {values.shape}: expected 1, {epochs} (one an epoch) or "
            f"{epochs * batches} (one a step) numbers"
        )


def _spread(values: Array, epochs: int, batches: int) -> Array:
    """A schedule at every step, [epochs, batches]."""
    if values.size == epochs * batches:
        return values.reshape(epochs, batches)
    column = values.reshape(-1, 1) if values.size == epochs else values.reshape(1, 1)
    return np.broadcast_to(column, (epochs, batches))


def _compact(table: Array) -> tuple[float, ...]:
    """The shortest form of a schedule."""
    if (table == table[0, 0]).all():
        return (float(table[0, 0]),)
    if (table == table[:, :1]).all():
        return tuple(table[:, 0].tolist())
    return tuple(table.ravel().tolist())


def log_gains(chain: NoisyChain) -> Array:
    """log G_k, float64 [steps]: how much of a distance after step k's noise is left at the end.

    G_K = 1 and G_k = G_{k+1} p_k c_{k+1}.

    Raises:
        ValueError: the gains overflow.
    """
    c, p = (chain.table(name).ravel() for name in ("contractions", "proximal"))
    factors = np.log(p[:-1]) + np.log(c[1:])
    gains = np.concatenate([np.cumsum(factors[::-1])[::-1], [0.0]])
    if gains.max() > 300:
        raise ValueError(
            f"contractions={float(c.max())!r}: expected steps that together expand distances by at "
            "most e^300"
        )
    return gains


# Bounds for the last iterate of a chain, where nothing else is released.


def shifted(chain: NoisyChain) -> Array:
    """S of the last iterate, [batches], by shifted interpolation; the sharpest bound here.

    A process interpolates between the two runs; at each step it gives up part of their distance,
    which the step's noise hides at the price of a Gaussian mechanism (Feldman, Mironov, Talwar and
    Thakurta 2018, arXiv:1808.06651, Theorem 22, for Renyi divergences; Bok, Su and Altschuler 2024,
    arXiv:2403.00278, for Gaussian DP). docs/proofs/hidden_state.md derives both, and the cheapest
    way to give up everything by the end: the greatest convex minorant of (0, 0), (tau_k, M_k),
    where tau_k = sum_{j<=k} G_j^2 v_j, M_k = sum_{j<=k} G_j s_j and G is of ``log_gains``.

    With a diameter the process may also start late, at that distance: the best of a few starts.
    """
    gains = log_gains(chain).reshape(chain.epochs, chain.batches)
    variances, shifts = chain.table("variances"), 2 * chain.table("contributions")
    c = chain.table("contractions")[:, 0]
    best = _minorants(gains, variances, shifts, chain.start_distance * float(c[0]))
    if chain.diameter is not None:
        left = 1
        while left < chain.epochs:
            start = chain.diameter * float(c[-left])
            late = _minorants(gains[-left:], variances[-left:], shifts[-left:], start)
            best = np.minimum(best, late)
            left = max(left + 1, int(1.4 * left))
    return _upwards(best, chain)


def composed(chain: NoisyChain) -> Array:
    """S of ALL iterates together, [batches]: each epoch's one step that reads the record adds up.

    A Gaussian mechanism for each (GDP composes by sums of squares); contraction plays no part, for
    every start is released.
    """
    distances = 2 * chain.table("contributions")
    value: Array = (distances**2 / (2 * chain.table("variances"))).sum(axis=0)
    if chain.start_distance > 0:
        value = np.full(chain.batches, np.inf)
    return _upwards(value, chain)


def log_sobolev(chain: NoisyChain, published: bool = False) -> Array:
    """S of the last iterate, [batches], by log-Sobolev inequalities; never below ``shifted``.

    V_k, the constant of the iterate's law in the units of a variance: V <- p^2 (c^2 V + v). A step
    that reads the record adds s^2/(2 v); another divides S by 1 + v/(c^2 V) (Ye and Shokri 2022,
    arXiv:2203.05363, Lemma 3.2, in the form of DP-SBCD's Theorem 4.6 and Lemma 4.7).

    Args:
        chain: the steps; it must start at the same place under both neighbours.
        published: raise the divisor to 1/p^2, as DP-SBCD's Corollary 4.5 does. WRONG for p < 1:
            weight decay is a bijection, so it cannot change a divergence. For claims only.

    Raises:
        ValueError: when the starts may differ.
    """
    if chain.start_distance > 0:
        raise ValueError(
            f"start_distance={chain.start_distance!r}: expected 0, the log-Sobolev recursion needs "
            "equal starts"
        )
    c, v, p = (chain.table(name) for name in ("contractions", "variances", "proximal"))
    kept, variance = np.empty(chain.steps), 0.0  # c^2 V of the law before; V
    steps = zip((c**2).ravel().tolist(), (p**2).ravel().tolist(), v.ravel().tolist(), strict=True)
    for k, (c2, p2, added) in enumerate(steps):
        kept[k] = c2 * variance
        variance = p2 * (kept[k] + added)
    with np.errstate(divide="ignore"):
        decay = -np.log1p(v / kept.reshape(v.shape))
    # Nothing is left to decay where the law was a point: no record has been read before.
    decay[0, 0] = 0.0
    if published:
        decay = decay / p**2
    _, between = _around(decay)
    later = np.cumsum(between[::-1], axis=0)[::-1]
    s = 2 * chain.table("contributions")
    return _upwards((s**2 / (2 * v) * np.exp(later)).sum(axis=0), chain)


def averaged_renyi(values: Array, orders: Array) -> Array:
    """Renyi divergences [k] when the record's batch is uniform and secret, from S [batches].

    log(mean_j exp((alpha - 1) alpha S_j))/(alpha - 1), by joint convexity (DP-SBCD, the outer step
    of Theorem 4.6). To be taken ONCE over everything that shares the partition: the S of several
    blocks are added batch by batch before.
    """
    exponents = (orders - 1)[:, None] * orders[:, None] * values[None, :]
    largest = exponents.max(axis=1)
    mean = np.exp(exponents - largest[:, None]).mean(axis=1)
    result: Array = (largest + np.log(mean)) / (orders - 1)
    return result


def _minorants(gains: Array, variances: Array, shifts: Array, start: float) -> Array:
    """S [batches] of steps [epochs, batches], from starts at distance ``start``, times c."""
    gain = np.exp(gains)
    noise = gain**2 * variances
    # The noise of faded steps is not used; what they moved is carried on, as if by the next ones.
    faded = np.flatnonzero(gains.ravel() < _FADED)
    if faded.size:
        noise.ravel()[: faded[-1] + 1] = 0.0
    moved = gain * shifts
    start = start * float(gain[0, 0])
    before, weights = _around(noise)
    weights = noise + weights
    if start == 0 and len(noise) == 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(moved[0] == 0, 0.0, 0.5 * moved[0] ** 2 / weights[0])
    return np.array(
        [
            _minorant(np.append(start, moved[:, j]), np.append(before[j], weights[:, j]))
            for j in range(gains.shape[1])
        ]
    )


def _minorant(moved: Array, weights: Array) -> float:
    """Half the squared length of the taut string under the staircase of (weights, moved)."""
    # scipy.optimize is slow to import, and only this function needs it.
    from scipy.optimize import isotonic_regression

    if not moved.any():
        return 0.0
    # A jump without any noise after it, before the next one, is taken together with the next.
    blocks = np.concatenate([[0], np.cumsum(weights[:-1] > 0)])
    jumps, widths = np.bincount(blocks, moved), np.bincount(blocks, weights)
    if widths[-1] == 0:
        return float("inf")
    # The slopes of the greatest convex minorant are the weighted isotonic regression of the slopes.
    with np.errstate(over="ignore"):
        slopes = isotonic_regression(jumps / widths, weights=widths).x
        return 0.5 * float(np.sum(widths * slopes**2))


def _around(table: Array) -> tuple[Array, Array]:
    """Sums of a table [epochs, batches] over steps before (0, j), [batches], and between two.

    Those are strictly between (e, j) and (e + 1, j), or the end, [epochs, batches]. Sums of equal
    signs only: nothing cancels.
    """
    left = np.zeros_like(table)
    left[:, 1:] = np.cumsum(table[:, :-1], axis=1)
    right = np.zeros_like(table)
    right[:, :-1] = np.cumsum(table[:, :0:-1], axis=1)[:, ::-1]
    between = right.copy()
    between[:-1] += left[1:]
    return left[0], between


def _upwards(values: Array, chain: NoisyChain) -> Array:
    """Above the rounding of sums and products over all steps."""
    return values * (1 + 4e-15 * (chain.steps + 100))


# The event, and runs that hold it: averaged over the batches, or by log-Sobolev inequalities.


@dataclass(frozen=True)
class HiddenState(DominatedEvent):
    """The last iterates of one or more chains over ONE secret partition, and nothing else of them.

    The chains run one after the other; each starts from public constants and what was released
    before it, and nothing computed from its inner iterates is logged, evaluated, exported or used
    elsewhere. Bounded under REPLACE_ONE only: another number of records is another partition.
    docs/proofs/hidden_state.md derives the bound.

    Attributes:
        blocks: chains with the same number of batches (any iterable is made a tuple,
            and a mapping, as a ledger has it, a chain).
        average: the batch of a record is uniform: all batches have the same size. Then the loss is
            averaged over the batches, once over all blocks; otherwise the worst batch counts.
        exposed: "" while the inner iterates stay hidden. Otherwise one sentence that names
            what left a loop: the hidden-state bound is then lost and every step is charged.
    """

    blocks: tuple[NoisyChain, ...]
    average: bool = False
    exposed: str = ""

    def __post_init__(self) -> None:
        given = self.blocks if isinstance(self.blocks, Iterable) else ()
        blocks = tuple(NoisyChain(**b) if isinstance(b, Mapping) else b for b in given)
        if not blocks or not all(isinstance(block, NoisyChain) for block in blocks):
            raise ValueError(f"blocks={self.blocks!r}: expected at least one NoisyChain")
        if len({block.batches for block in blocks}) > 1:
            raise ValueError(
                f"blocks have {sorted({b.batches for b in blocks})} batches: expected the same "
                "number, for they share one partition"
            )
        if not isinstance(self.average, bool):
            raise ValueError(f"average={self.average!r}: expected True or False")
        if not isinstance(self.exposed, str):
            raise ValueError(f"exposed={self.exposed!r}: expected a sentence")
        object.__setattr__(self, "blocks", blocks)

    def refuses(self, relation: Relation) -> str:
        if relation is Relation.REPLACE_ONE:
            return ""
        return (
            "records are put into batches of public sizes, so that neighbours have equal size; ask "
            "with relation replace_one"
        )

    def values(self, bound: Callable[[NoisyChain], Array] = shifted) -> Array:
        """S of each batch that may hold the record, [batches], summed over the blocks."""
        bound = composed if self.exposed else bound
        values = np.zeros(self.blocks[0].batches)
        for chain, n in Counter(self.blocks).items():
            values = values + n * bound(chain)
        return values

    def mu(self) -> float:
        """As ``DominatedEvent.mu``: of the worst batch."""
        return math.sqrt(2 * float(self.values().max()))

    def describe(self) -> str:
        steps = sum(block.steps for block in self.blocks)
        chains = "a chain" if len(self.blocks) == 1 else f"each of {len(self.blocks)} chains"
        if self.exposed:
            return (
                f"every iterate of {chains} of noisy steps over one fixed partition "
                f"({steps:,} steps); the hidden-state number is lost: {self.exposed}"
            )
        return (
            f"the last iterate of {chains} of noisy steps over one fixed, secret partition "
            f"({steps:,} steps, the others hidden)"
        )

    @classmethod
    def refine(
        cls, bound: Bound, of: str, run: FlatRun, relation: Relation, value: float, accountant: str
    ) -> Bound:
        """As ``DominatedEvent.refine``: averaged over the batches where that is allowed."""
        hidden = _hidden(run)
        if accountant == "auto" and any(event.average for event, _ in hidden):
            bound = min(bound, _averaged(of, run, relation, value), key=lambda b: b.upper)
        lost = [event.exposed for event, _ in hidden if event.exposed]
        if lost:
            reasons = "; ".join(dict.fromkeys(lost))
            assumed = f"the hidden-state number is lost ({reasons}): every step is charged"
        else:
            even = any(event.average for event, _ in hidden)
            assumed = _ASSUMED + ("; averaged, so all batches must have one size" if even else "")
        name = accountant if accountant == "log_sobolev" else f"shifted, {bound.accountant}"
        note = "; ".join(part for part in (bound.note, assumed) if part)
        return replace(bound, accountant=name, note=note)


def _hidden(run: FlatRun) -> list[tuple[HiddenState, int]]:
    return [(event, n) for event, n in run.dominated if isinstance(event, HiddenState)]


def _averaged(of: str, run: FlatRun, relation: Relation, value: float) -> Bound:
    """Epsilon at a delta, or delta at an epsilon, where a hidden-state event is averaged.

    Given the record's batch j, the whole run is a mu_j-GDP mechanism, where every other release is
    a full-batch Gaussian too. Revealing j gives a pair that dominates the run (joint convexity of
    the hockey-stick divergence), whose delta is the mean of the deltas. Where no such closed form
    exists the Renyi divergences are averaged.
    """
    averaged = [(event, n) for event, n in _hidden(run) if event.average]
    others = run.steps_beside(HiddenState, relation)
    sampled = any(s.sampling_prob < 1 for s, _ in others)
    if run.parts or sampled or [n for _, n in averaged] != [1]:
        return _by_renyi(of, run, relation, value, shifted)
    squares = 2 * averaged[0][0].values()
    squares = squares + math.fsum(n * (2 / s.noise_multiplier) ** 2 for s, n in others)
    for event, n in _hidden(run):
        if not event.average:
            squares = squares + 2 * n * float(event.values().max())
    mus, counts = np.unique(np.sqrt(squares), return_counts=True)
    laws = list(zip(mus.tolist(), (counts / counts.sum()).tolist(), strict=True))

    def delta(epsilon: float) -> float:
        return math.fsum(w * gaussian.gaussian_delta(mu, epsilon) for mu, w in laws)

    if of == "delta":
        return Bound(0.0, None, min(1.0, delta(value) * (1 + 1e-9) + 1e-300), "gdp")
    if delta(0.0) <= value:
        return Bound(0.0, 0.0, 0.0, "gdp", "delta(0) is already below the target")
    largest = float(mus.max())
    margin = min(gaussian.PROFILE_ERROR + 4e-15 * largest, 0.5)
    _, upper = gaussian.solve_epsilon(delta, value, max(largest, largest**2), margin)
    return Bound(0.0, None, upper, "gdp")


def _by_renyi(
    of: str, run: FlatRun, relation: Relation, value: float, bound: Callable[[NoisyChain], Array]
) -> Bound:
    """As ``_averaged``, from Renyi divergences with S of each chain by ``bound``."""
    orders = np.asarray(rdp.DEFAULT_ORDERS)
    total = replace(run, steps=run.steps_beside(HiddenState, relation)).renyi(relation)
    for event, n in _hidden(run):
        s = event.values(bound)
        total += n * (averaged_renyi(s, orders) if event.average else orders * float(s.max()))
    return Bound(0.0, None, rdp.best_conversion(of, total, value), "rdp")


def _log_sobolev(question: queries.Question) -> Bound:
    return _by_renyi(question.of, question.run, question.relation, question.at, log_sobolev)


def _refuses_log_sobolev(run: FlatRun, relation: Relation) -> str:
    """The reason why the log-Sobolev bound does not cover the run, or ""."""
    if not _hidden(run):
        return "it has no hidden-state event"
    if any(block.start_distance > 0 for event, _ in _hidden(run) for block in event.blocks):
        return "the log-Sobolev recursion needs equal starts"
    return ""


queries.ACCOUNTANTS["log_sobolev"] = (_log_sobolev, _refuses_log_sobolev)
