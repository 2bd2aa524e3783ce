"""Clipped sums of random programs, judged by float64.

Of each engine are judged the norms and weights, by per-example gradients in float64; the sum, by those
gradients and the weights; and what each record adds, by its factors as they enter the contraction and
by the sum of it alone: at most the rule's bound, and nothing where its gradient is not finite.

A program may magnify rounding, and float32 then errs whatever clips it. No program is dropped for that:
the error allowed of a record is ``_FACTOR`` times the larger of what a plain gradient in float32 errs
and of how far three relative changes of inputs and parameters by float32's (bfloat16's) rounding move
the float64 gradient; and what rounding makes of sums of positions, by the lengths of their terms
(docs/proofs/clip_bound.md, Theorem 2). Records whose allowance is more than a tenth of their gradient are
counted as loosely judged.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from jaxdp.clipping.ghost import leaves
from jaxdp.clipping.rounding import CANCELLED, TOLERATED, gamma
from jaxdp.clipping.rules import CoordinateBox
from tests.clipping import programs, search
from tests.compiling import QUICK

_FACTOR = 16.0
# Below it squares underflow in float32; above it they overflow, and a record may be dropped.
_SMALLEST, _LARGEST = 1e-18, 1e36
# What squares below float32's range may hide in each entry, and a little more.
_HIDDEN = 2e-31


@dataclasses.dataclass(frozen=True)
class Options:
    """How a program is clipped."""

    rule: object
    scale: dict | None
    frozen: str | None
    microbatch_size: int | None
    chunk_bytes: int

    def keywords(self, rows=None):
        """The arguments of ``clipped_grad``."""
        trainable = None if self.frozen is None else lambda path: f"'{self.frozen}'" not in path
        return {"trainable": trainable, "microbatch_size": rows}


def options(seed, params):
    """The random options of this seed."""
    rng = np.random.default_rng([seed, 3])
    bound, names = 10.0 ** rng.uniform(-3, 1), sorted(params)
    rules = [jaxdp.clip, jaxdp.clip, jaxdp.normalize, jaxdp.auto_s, jaxdp.coordinate_box]
    kind = int(rng.integers(6))
    groups = {name: bound * (1 + i) for i, name in enumerate(names)}
    rule = jaxdp.per_layer(groups) if kind == 5 else rules[kind](bound)
    freeze = kind != 5 and len(names) > 2 and rng.random() < 0.15
    frozen = str(rng.choice(names)) if freeze else None
    scale = None
    if rng.random() < 0.25:
        exponents = {name: rng.uniform(-2, 1, leaf.shape) for name, leaf in params.items()}
        scale = {name: (10.0**e).astype(np.float32) for name, e in exponents.items()}
        scale = {name: None if name == frozen else leaf for name, leaf in scale.items()}
    rows = int(rng.choice([1, 2])) if rng.random() < 0.2 else None
    return Options(rule, scale, frozen, rows, 1 if rng.random() < 0.3 else 2**25)


@dataclasses.dataclass(frozen=True)
class Truth:
    """Per-example gradients divided by the scale: of each trained leaf, float64 [m, entries].

    ``error`` [m] is what float32 may be off, all leaves together; ``plain`` [m] is True where the
    gradient is finite in float64 and in plain float32.
    """

    exact: dict
    error: np.ndarray
    plain: np.ndarray

    @property
    def norms(self):
        """float64 [m]."""
        return _norms(self.exact)

    @property
    def rows(self):
        """m."""
        return len(self.error)


def truth(found, params, batch, scale, frozen):
    """The gradients, and how far float32 may be from them."""
    rng = np.random.default_rng(0)

    # One after another: under vmap a record that is not finite breaks others in XLA's convolutions.
    @functools.partial(jax.jit, compiler_options=QUICK)
    def gradients(params, batch):
        return jax.lax.map(lambda record: jax.grad(found.loss)(params, record), batch)

    def flat(grads):
        each = {n: np.asarray(g, np.float64) for n, g in grads.items() if n != frozen}
        if scale is not None:
            each = {n: g / scale[n].astype(np.float64) for n, g in each.items()}
        return {n: each[n].reshape(len(each[n]), -1) for n in sorted(each)}

    def moved(tree, size):
        def one(leaf):
            if leaf.dtype != np.float32:
                return leaf
            return leaf.astype(np.float64) * (1.0 + size * rng.uniform(-1, 1, leaf.shape))

        return jax.tree.map(one, tree)

    plain = flat(gradients(params, batch))
    size = 2.0**-22 if found.exact else 2.0**-8
    with jax.enable_x64(True):
        by = (0.0, size, size, size)
        exact, *near = [flat(gradients(moved(params, each), moved(batch, each))) for each in by]
    with np.errstate(all="ignore"):
        away = [_norms({n: x[n] - exact[n] for n in exact}) for x in (plain, *near)]
        error = _FACTOR * np.max(away, axis=0) + 1e-6 * _norms(exact) + _SMALLEST
        error = np.where(np.isnan(error), np.inf, error)
        return Truth(exact, error, np.isfinite(_norms(plain)) & np.isfinite(_norms(exact)))


def _norms(leaves):
    return np.sqrt(sum(np.sum(np.square(leaf), axis=1) for leaf in leaves.values()))


@dataclasses.dataclass(frozen=True)
class Terms:
    """Of one leaf, float64 [m] each: how far its squared norm may be off by rounding, what it is at
    least taken for, how far its sum may be off, and the largest number that squares meet."""

    square: np.ndarray
    least: np.ndarray
    length: np.ndarray
    largest: np.ndarray


def _terms(parts):
    """From what the engine multiplies and adds."""
    if "slices" in parts:
        each = [_terms(slice) for slice in parts["slices"]]
        square, least, length = (
            sum(getattr(x, n) for x in each) for n in ("square", "least", "length")
        )
        return Terms(square, least, length, np.max([x.largest for x in each], axis=0))
    if "rows" in parts:
        rows = np.asarray(parts["rows"], np.float64)
        square = np.sum(np.square(rows.reshape(len(rows), -1)), axis=1)
        error = gamma(rows[0].size + 8)
        return Terms(error * square, 0.0 * square, error * np.sqrt(square), square)
    length, largest, roundings, positions = 0.0, 0.0, 100, 0
    for a, b in parts.get("dense", []):
        sides = [np.asarray(x, np.float64) for x in (a, b)]
        of_a, of_b = (np.sum(np.square(x), -1) + x.shape[-1] * _HIDDEN for x in sides)
        length = length + np.sqrt(np.sum(np.square(np.sum(np.sqrt(of_a * of_b), 2)), axis=1))
        largest = np.maximum(largest, np.max(np.maximum(of_a, of_b), axis=(1, 2)))
        roundings += sum(a.shape[1:]) + sum(b.shape[1:]) + a.shape[2]
        positions += a.shape[2]
    if "lookups" in parts:
        grads = np.asarray(parts["lookups"][1], np.float64)
        square = np.sum(np.square(grads), axis=(1, 2)) + grads[0].size * _HIDDEN
        length, largest = length + np.sqrt(square), np.maximum(largest, square)
        roundings += sum(grads.shape[1:])
    square, error = np.square(length), gamma(roundings)
    alone = positions == 1 and "lookups" not in parts
    least = square if alone else square / CANCELLED**2
    return Terms(error * square, least, error * length, np.maximum(largest, square))


def judged(seed, flags=QUICK):
    """(text, what is wrong in words, counts) of the program of this seed, by "ghost" and "auto".

    ``flags`` are the compiler's. Optimisation changes how values round, not which are compared here:
    that norm and sum read one number is for the programs of search.py, compiled as users do.
    """
    found = programs.program(seed)
    params, batch = programs.parameters(found, seed), programs.batch(seed)
    chosen = options(seed, params)
    true = truth(found, params, batch, chosen.scale, chosen.frozen)
    wrong, counts, plans = [], {"records": true.rows}, set()
    for engine in ("ghost", "auto"):
        few = mock.patch.object(leaves, "_CHUNK_BYTES", chosen.chunk_bytes)
        with few, np.errstate(all="ignore"):
            grad_fn = jaxdp.clipped_grad(found.loss, chosen.rule, engine, **chosen.keywords())
            plan = tuple(row.engine for row in grad_fn.plan(params, batch))
            if plan in plans:
                continue
            plans.add(plan)
            for name in plan:
                counts[name] = counts.get(name, 0) + 1
            each, loose = _Judge(found, chosen, engine, params, batch, true, flags).verdict()
        wrong += [f"{engine}: {words}" for words in each]
        counts["loose"] = counts.get("loose", 0) + loose
    return found.text, wrong, counts


class _Judge:
    """One engine's clipped sum of one program."""

    def __init__(self, found, chosen, engine, params, batch, true, flags):
        self.found, self.chosen, self.engine = found, chosen, engine
        self.params, self.batch, self.true, self.flags = params, batch, true, flags
        self.names, self.everyone = list(true.exact), np.ones(true.rows, bool)
        self.bound = chosen.rule.l2({name: params[name] for name in self.names})
        run, _ = search.compiled(found.loss, chosen.rule, engine, flags, **chosen.keywords())
        self.run = lambda mask: run(params, batch, chosen.scale, mask)
        self.value, self.log, norms = self.run(self.everyone)
        self.seen = np.asarray(norms, np.float64)
        self.terms = [_terms(parts) for parts, _ in self.log]
        self.boxed, self.scaled = isinstance(chosen.rule, CoordinateBox), chosen.scale is not None
        least = min(np.min(chosen.scale[n]) for n in self.names) if self.scaled else 1.0
        # How far a sum of positions may be off by rounding, and a squared norm (a box's is taken
        # before the division by the scale).
        self.of_sum = 8.0 * sum(terms.length for terms in self.terms) / least
        self.of_square = sum(terms.square for terms in self.terms) / (
            1.0 if self.boxed else least**2
        )
        self.weights = {
            name: np.asarray(weight, np.float64)
            for name, (_, weight) in zip(self.names, self.log, strict=True)
        }
        self.most = np.max(list(self.weights.values()), axis=0)
        self.kept = np.isfinite(self.seen) & ((self.most > 0) | (self.seen < 1e-11))

    def verdict(self):
        """What is wrong, and how many records are judged loosely."""
        wrong = [*self._dropped(), *self._norms(), *self._weights(), *self._sum(), *self._alone()]
        if self.chosen.microbatch_size is not None:
            wrong += self._in_pieces()
        return wrong, int(np.sum(self.kept & ~(self.true.error < 0.1 * self.true.norms)))

    def _dropped(self):
        """Records are dropped where they are not finite, or float32's squares are not."""
        largest = np.max([self.true.norms**2, *(terms.largest for terms in self.terms)], axis=0)
        for i in np.flatnonzero(~self.kept & self.true.plain & (largest < _LARGEST)):
            yield f"record {i} is dropped, with a norm of {self.true.norms[i]:.3g}"
        for i in np.flatnonzero(self.kept & ~np.isfinite(self.true.norms)):
            yield f"record {i} counts, with a gradient that is not finite"

    def _norms(self):
        true, error = self.true.norms, self.true.error
        if self.boxed and self.scaled:
            scales = {name: self.chosen.scale[name].reshape(1, -1) for name in self.names}
            true = _norms({name: self.true.exact[name] * scales[name] for name in self.names})
            error = error * max(np.max(scale) for scale in scales.values())
        least, most = np.maximum(true - error, 0.0) ** 2, (true + error) ** 2
        if not self.scaled:  # of one position, lengths with what underflow may hide
            alone = [t.least for t in self.terms if not np.any(t.least < t.square)]
            most = np.maximum(most, sum(alone))
        square, rounding = self.seen**2, self.of_square
        off = (square < 0.999 * least - rounding) | (square > 1.001 * most + rounding)
        for i in np.flatnonzero(self.kept & off):
            yield f"the norm of record {i} is {self.seen[i]:.6g}, not {true[i]:.6g}"

    def _weights(self):
        """They lie between those of the longest and the shortest gradient that may be meant."""
        if self.boxed:
            return
        long, short = {}, {}
        for name, terms in zip(self.names, self.terms, strict=True):
            true, error = np.linalg.norm(self.true.exact[name], axis=1), self.true.error
            # With a scale, positions are multiplied out and nothing cancels.
            by = 0.0 if self.scaled else 1.0
            least = np.maximum(true - error, 0.0) ** 2 / (1 + 4 * TOLERATED)
            short[name] = np.maximum(least - by * terms.square, 0.0)
            most = (true + error) ** 2 + 2 * by * terms.square
            long[name] = 1.001 * np.maximum(most, by * terms.least)
        with jax.enable_x64(True):
            squares = [
                {n: jnp.asarray(np.where(self.kept, x[n], 1.0)) for n in x} for x in (long, short)
            ]
            narrow, wide = (self.chosen.rule.factors(x) for x in squares)
        for name, found in self.weights.items():
            low, high = 0.999 * np.asarray(narrow[name]), 1.001 * np.asarray(wide[name])
            high = np.where(high > 0, high, np.inf)  # nearly no gradient, which a rule may drop
            for i in np.flatnonzero(self.kept & (found > 0) & ~((found >= low) & (found <= high))):
                yield f"{name} of record {i} weighs {found[i]:.6g}, not {low[i]:.6g} to {high[i]:.6g}"

    def _sum(self):
        found = np.concatenate([np.asarray(self.value[n], np.float64).ravel() for n in self.names])
        exact = {n: np.where(self.kept[:, None], x, 0.0) for n, x in self.true.exact.items()}
        error = np.where(self.kept, self.true.error, 0.0)
        if self.boxed:
            limit = self.chosen.rule.bound
            boxed = {n: np.clip(exact[n], -limit, limit) for n in self.names}
            wanted = np.concatenate([boxed[n].sum(0) for n in self.names])
            allowed = np.where(self.kept, np.minimum(error + self.of_sum, 2 * self.bound), 0.0)
            allowed = np.sum(allowed + 1e-5 * _norms(boxed))
        else:
            wanted = np.concatenate([self.weights[n] @ exact[n] for n in self.names])
            each = error + self.of_sum + 1e-5 * _norms(exact)
            allowed = np.sum(np.where(self.most > 0, self.most * each, 0.0))
        off = np.linalg.norm(found - wanted)
        if not off <= allowed + _SMALLEST:
            length = np.linalg.norm(wanted)
            yield f"the sum is off by {off:.3g} of {length:.3g}, {allowed:.3g} allowed"

    def _alone(self):
        """What each record adds: the sum of it alone, and its weighted factors."""
        for i in range(self.true.rows):
            value = jax.tree.leaves(self.run(np.arange(self.true.rows) == i)[0])
            length = np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in value))
            if not length <= self.bound:
                yield f"record {i} alone sums to {length:.8g}, beyond {self.bound:.8g}"
            if length and not self.kept[i]:
                yield f"record {i} is dropped, but adds {length:.3g}"
        if not self.boxed and not self.scaled:
            each = [search.added_squares(parts, np.asarray(weight)) for parts, weight in self.log]
            most = np.max(np.sqrt(sum(each)))
            if not most <= self.bound:
                yield f"a record adds {most:.8g}, beyond {self.bound:.8g}"

    def _in_pieces(self):
        """A few rows at a time the sum differs by rounding."""
        rows = self.chosen.microbatch_size
        keywords = self.chosen.keywords(rows)
        grad_fn = jaxdp.clipped_grad(self.found.loss, self.chosen.rule, self.engine, **keywords)

        @functools.partial(jax.jit, compiler_options=self.flags)
        def run(params, batch):
            return grad_fn(params, batch, "all", scale=self.chosen.scale).value

        found = run(self.params, self.batch)
        gaps = [np.asarray(found[n], np.float64) - np.asarray(self.value[n]) for n in self.names]
        off = np.sqrt(sum(np.sum(np.square(gap)) for gap in gaps))
        share = (self.true.error + self.of_sum) / np.maximum(self.true.norms, _SMALLEST)
        share = np.where(np.isnan(share), 1.0, np.minimum(1.0, share))
        allowed = 2 * self.bound * np.sum(np.where(self.kept, share + 1e-3, 0.0))
        if not off <= allowed + _SMALLEST:
            yield f"{rows} rows at a time the sum differs by {off:.3g}, {allowed:.3g} allowed"
