"""A rehearsal: trains some seconds on the records at hand, as the program says and otherwise.

What keeps a private model from learning shows where one thing is changed and all else stays: the
noise left out, the clipping, updates of another size. Every variant is scored on
records that it was not trained on. No epsilon covers the answer: the records must be public, or
their owner looks at them on purpose.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from jaxdp.audit.examined import QUICK, Examined
from jaxdp.audit.findings import Finding
from jaxdp.clipping import ClippedGrad
from jaxdp.clipping.ghost import program
from jaxdp.clipping.rules import Clip
from jaxdp.mechanism import Mechanism
from jaxdp.sampling import neighbours as near
from jaxdp.training.lines import line_of_function
from jaxdp.types import PyTree, Summed

_FEWEST, _MOST_HELD_OUT = 48, 128  # records to rehearse with; records of the held-out part
_POINTS = 8  # of a training, at which it is scored
_SEEDS = 3  # of a training with noise
_OF_ONE = 0.8  # seconds that one training may take, as estimated before it
_LARGEST = 3_000_000  # trained numbers; with more a step of this machine tells nothing in seconds
_USUAL = 300  # steps, where the mechanism does not say how many; the least without privacy
_NO_CLIP = 1e8  # a clip norm that no gradient reaches

# Shares of what can be learned: a program that gets so much is well, and needs no advice; by how
# much another must be better to be named; a program that gets less learns next to nothing.
_WELL, _BETTER, _NOTHING = 0.6, 0.25, 0.25
_SEES, _ENOUGH = 4.0, 200  # standard errors; records from which on nothing seen is nothing there
_FAR = 50.0  # times 1, or of it, beyond which the size of targets is no usual one


class Variant(NamedTuple):
    """One way to train, relative to the program; all at their defaults: as it is.

    Attributes:
        rate: every update is multiplied by it, after the optimizer.
        noise: False for none.
        clip: False for neither clipping nor noise, by Adam, which suits gradients of any size.
        constant: every record has the first one's input, so that one prediction for all is best.
        everything: frozen parameters are trained, too.
    """

    rate: float = 1.0
    noise: bool = True
    clip: bool = True
    constant: bool = False
    everything: bool = False


_FREE = Variant(noise=False, clip=False)


class Outcome(NamedTuple):
    """The losses of one training. **Sensitive**.

    Attributes:
        first: float32 [h], the losses of the held-out records before it.
        last: float32 [h], after it.
        best: float32 [h], where their mean was least.
        fitted: float32 [points + 1], the mean loss of records that are trained on.
    """

    first: np.ndarray
    last: np.ndarray
    best: np.ndarray
    fitted: np.ndarray


@dataclasses.dataclass(eq=False)
class Rehearsal:
    """Trainings on the records at hand, each with one thing changed. **Sensitive**.

    Attributes:
        left_out: why nothing was rehearsed; "" where it was.
        steps: how many were taken.
        of: how many the program takes; None where the mechanism does not say.
        group: int [h], of the held-out records; None where there is none.
        sizes: group -> number of records that are trained on.
        outcomes: of every variant; one for each seed where there is noise.
        target: the size of the targets, where they are numbers; else 1.
        linear: how many standard errors a linear model of the records, without privacy, is better
            than a constant on the held-out ones; None where labels are not known.
        where: the line of the loss.
    """

    left_out: str = ""
    steps: int = 0
    of: int | None = None
    group: np.ndarray | None = None
    sizes: dict[int, int] = dataclasses.field(default_factory=dict)
    outcomes: dict[Variant, list[Outcome]] = dataclasses.field(default_factory=dict)
    target: float = 1.0
    linear: float | None = None
    where: str = ""

    @property
    def rest(self) -> float:
        """The steps of the program over those that were rehearsed; inf where not known."""
        return math.inf if self.of is None else self.of / max(self.steps, 1)

    @property
    def constant(self) -> np.ndarray:
        """The held-out losses float32 [h] of the best constant prediction, or of the start."""
        known = [v for v in self.outcomes if v.constant]
        first = next(iter(self.outcomes.values()))[0].first
        return min([first, *(self.outcomes[v][0].best for v in known)], key=_mean)

    def best(self, **fields: object) -> Variant:
        """The variant with these fields that learned most; of rate 0 where none was rehearsed."""
        found = [
            v
            for v in self.outcomes
            if not v.constant and all(getattr(v, k) == x for k, x in fields.items())
        ]
        return max(found, key=self.share, default=Variant(rate=0.0))

    @property
    def top(self) -> Outcome:
        """The best training without noise, of any kind."""
        found = [o[0] for v, o in self.outcomes.items() if not v.noise and not v.constant]
        return min(found, key=lambda outcome: _mean(outcome.best))

    def shares(self, variant: Variant) -> list[float]:
        """Per seed the share learned of what the best training without noise learned; 0: nothing.

        The larger of two: of the mean loss; and of the mean in which no record counts for more than
        it is improved by on average, so that a few that are wrong and sure of it do not hide that
        the others are right.
        """
        constant, top = _finite(self.constant), _finite(self.top.best)
        unit = max(float(np.mean(np.abs(constant - top))), 1e-12)

        def learned(losses: np.ndarray) -> np.ndarray:
            gain = constant - _finite(losses)
            return np.array([np.mean(gain), np.mean(np.clip(gain / unit, -1, 1))])

        outcomes, whole = self.outcomes[variant], learned(top)
        ways = whole > [0.02 * unit, 0.02]  # in which the best one learned anything
        if not ways.any():
            return [0.0] * len(outcomes)
        found = [learned(o.last if variant.noise else o.best) / whole for o in outcomes]
        return [float(np.clip(np.max(share[ways]), -1, 1)) for share in found]

    def share(self, variant: Variant) -> float:
        """The mean of ``shares``; 0 of a variant that was not rehearsed."""
        return float(np.mean(self.shares(variant))) if variant in self.outcomes else 0.0

    @property
    def is_well(self) -> bool:
        """True if the program learns most of what can be learned, as it is.

        One whose mean loss is worse than a constant prediction's must be right more often.
        """
        share = self.share(Variant())
        return share >= _WELL and (self.loss(Variant()) < _mean(self.constant) or share >= 0.8)

    def loss(self, variant: Variant) -> float:
        """The mean held-out loss, over the seeds."""
        outcomes = self.outcomes[variant]
        return float(np.mean([_mean(o.last if variant.noise else o.best) for o in outcomes]))

    def learns(self, held_out: bool = False, **fields: object) -> bool:
        """True if training without noise, with these fields, does better than a constant.

        On the records held out, or unless ``held_out`` is asked for on those that it was fitted to:
        with few records a sound program may do no better on others.
        """
        constant = self.constant
        fitted = [o[0].fitted for v, o in self.outcomes.items() if v.constant]
        for variant, (outcome, *_) in self.outcomes.items():
            if variant.noise or variant.constant:
                continue
            if any(getattr(variant, name) != value for name, value in fields.items()):
                continue
            gain = _finite(constant) - _finite(outcome.best)
            error = float(np.std(gain)) / math.sqrt(len(gain))
            if np.mean(gain) > max(3 * error, 0.01 * abs(_mean(constant))):
                return True
            least = min([outcome.fitted[0], *(np.nanmin(f) for f in fitted)])
            if not held_out and np.nanmin(outcome.fitted) < least - 0.02 * abs(least):
                return True
        return False

    def __str__(self) -> str:
        if self.left_out:
            return f"no rehearsal: {self.left_out}"
        of = "" if self.of is None else f" of {self.of:,}"
        lines = [f"rehearsal of {self.steps:,}{of} steps: held-out loss, and the share learned"]
        lines.append(f"  {_mean(self.constant):9.4g}        the best constant prediction")
        changes = lambda v: sum(a != b for a, b in zip(v, Variant(), strict=True))  # noqa: E731
        for variant in sorted(self.outcomes, key=lambda v: (changes(v), v)):
            if not variant.constant:
                share = f"{100 * self.share(variant):4.0f} %"
                lines.append(f"  {self.loss(variant):9.4g} {share} {_words(variant)}")
        return "\n".join(lines)


def _words(variant: Variant) -> str:
    """A variant in words."""
    said = {
        f"updates {_times(variant.rate)}": variant.rate != 1,
        "without noise": not variant.noise,
        "without clipping": not variant.clip,
        "all with one input": variant.constant,
        "all parameters trained": variant.everything,
    }
    return ", ".join(words for words, holds in said.items() if holds) or "as it is"


def _times(factor: float) -> str:
    return f"{factor:g} times larger" if factor >= 1 else f"{1 / factor:g} times smaller"


def _finite(losses: np.ndarray) -> np.ndarray:
    """Losses float64 [h]; one that is not finite counts as very large."""
    return np.nan_to_num(np.asarray(losses, np.float64), nan=1e30, posinf=1e30, neginf=1e30)


def _mean(losses: np.ndarray) -> float:
    return float(np.mean(_finite(losses)))


# To train --------------------------------------------------------------------------------------


def rehearse(e: Examined, seconds: float = 12.0) -> Rehearsal:
    """Trains on the records of ``e``, as the program says and with one thing changed.

    To be called where the records are public, or their owner looks at them on purpose. Nothing is
    charged. A program that learns well is trained a few times; one that does not is trained with
    other rates and inputs, until ``seconds`` of CPU time are over.
    """
    began = time.process_time()
    size = sum(leaf.size for leaf in e.trained())
    left_out = ""
    if e.optimizer is None:
        left_out = "the optimizer is not known"
    elif type(e.grad_fn) is not ClippedGrad:
        left_out = "the algorithm has a sum of its own"
    elif len(e) < _FEWEST:
        left_out = f"it needs at least {_FEWEST} records"
    elif size > _LARGEST:
        left_out = f"{size:,} parameters are too many to train some seconds"
    if left_out or e.optimizer is None:
        return Rehearsal(left_out)

    # Such as of an algorithm, whose steps are given more.
    trained = e.grad_fn.trained(e.params)
    try:
        optimizer = optax.with_extra_args_support(e.optimizer)
        state = jax.eval_shape(optimizer.init, trained)
        with jax.numpy_dtype_promotion("standard"):
            jax.eval_shape(optimizer.update, trained, state, trained)
    except Exception as error:  # a link may raise anything
        return Rehearsal(f"the optimizer takes no updates alone ({type(error).__name__})")

    # Records without a finite loss have no part in it, and some of the others are held out. Labels,
    # where one can tell them from the input: what is the group, or the smallest leaf of a record.
    losses = np.concatenate([np.asarray(found.losses) for found in e.gradients()])
    sound = np.flatnonzero(np.isfinite(losses))
    if len(sound) < _FEWEST:
        return Rehearsal(f"it needs at least {_FEWEST} records with a finite loss")
    group = None if e.group is None else np.asarray(e.group)[sound]
    e = dataclasses.replace(e, records=near.take(e.records, sound), group=group)
    order = np.random.default_rng(0).permutation(len(e))
    held = order[: min(len(e) // 4, _MOST_HELD_OUT)]
    kept = order[len(held) :]
    label, (leaves, structure) = _label(e), jax.tree.flatten(e.records)
    alone = label is not None and not _predicts_more(e, label)
    kinds = {False: e.records}
    if label is not None and alone:
        same = [np.repeat(leaf[:1], len(e), 0) for leaf in leaves]
        same[label] = leaves[label]
        kinds[True] = jax.tree.unflatten(structure, same)
    split = {kind: (near.take(rows, kept), near.take(rows, held)) for kind, rows in kinds.items()}

    plan = _Plan.of(e, len(kept))
    if plan is None:
        return Rehearsal("its steps are too few, or take too long, to train some seconds")
    found = Rehearsal(
        "", plan.steps, _steps(e.mechanism), where=line_of_function(e.grad_fn.loss_fn)
    )
    if label is not None:
        target = np.asarray(leaves[label])
        if np.issubdtype(target.dtype, np.floating):
            found.target = float(np.sqrt(np.nanmean(np.square(target, dtype=np.float64))))
        inputs = [leaf for i, leaf in enumerate(leaves) if i != label]
        found.linear = _linear_gain(inputs, target, kept, held) if alone else None
    if group is not None:
        found.group = group[held]
        groups, counts = np.unique(group[kept], return_counts=True)
        found.sizes = dict(zip(groups.tolist(), counts.tolist(), strict=True))
    programs: dict[tuple[bool, bool], _Training | None] = {}

    def run(*variants: Variant) -> None:
        """Trains in these ways, those that are new, as long as there is time."""
        for variant in variants:
            late = time.process_time() - began > seconds and len(found.outcomes) > 1
            if variant in found.outcomes or late or variant.constant not in split:
                continue
            # A clip norm is an argument of a program, another rule or other parameters are not.
            other_rule = not variant.clip and not isinstance(e.grad_fn.rule, Clip)
            key = (variant.everything, other_rule)
            if key not in programs:
                programs[key] = _trainer(e, len(kept), *key)
            if program := programs[key]:
                seeds = range(_SEEDS if variant.noise else 1)
                found.outcomes[variant] = [
                    program(variant, *split[variant.constant], seed) for seed in seeds
                ]

    # Without privacy, at three rates: one that suits clipped gradients may not suit others. And
    # with the same input for all, the best constant prediction.
    rates = (1.0, 8.0, 1 / 8)
    run(*(_FREE._replace(rate=rate) for rate in rates))
    run(_FREE._replace(rate=8.0, constant=True))

    # As it is, or with frozen parameters trained, too. One that learns well is left alone.
    learns = found.learns()
    if learns:
        run(Variant())
        if found.is_well:
            return found
    if not all(e.flags):
        run(*(_FREE._replace(rate=rate, everything=True) for rate in rates))
    if not learns:
        return found

    # At other rates, further out where the best is the last.
    run(*(Variant(rate=rate) for rate in (1 / 8, 8.0, 1 / 2, 2.0)))
    for factor in (8.0, 1 / 8):
        edge = factor
        while (best := found.best(noise=True)) == Variant(rate=edge) and 1e-3 < edge < 1e3:
            edge *= factor
            run(Variant(rate=edge))
            if Variant(rate=edge) not in found.outcomes:
                break
    best = found.best(noise=True)

    # Clipped, without noise: what noise takes, and what clipping does.
    factors = (1.0, 1 / best.rate, 8.0, 1 / 8)
    run(*(Variant(rate=best.rate * factor, noise=False) for factor in factors))
    return found


def _label(e: Examined) -> int | None:
    """The number of the leaf of a record that is its label; None where it cannot be told."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(e.records)]
    if e.group is not None:
        same = [i for i, leaf in enumerate(leaves) if np.array_equal(leaf, e.group)]
        if same and len(leaves) > 1:
            return same[0]
    sizes = [leaf[0].size for leaf in leaves]
    smallest = [i for i, size in enumerate(sizes) if size == min(sizes)]
    return smallest[0] if len(leaves) > 1 and len(smallest) == 1 else None


def _predicts_more(e: Examined, label: int) -> bool:
    """True if the loss compares predictions with another leaf than the label, such as the image.

    Where that leaf is the same in all records, no one prediction is the best for the real ones.
    """

    def loss_of(params: PyTree, example: PyTree, key: jax.Array) -> jax.Array:
        whole = dataclasses.replace(e, params=params)
        return whole.loss(whole.trained(), example, key)

    record, key = near.record(e.records, 0), e.keys(np.arange(1))[0]
    loss = program.trace(loss_of, e.params, record, key, differentiated=True)
    body, size = loss.program, loss.num_params
    of_params = program.reached(body, body.ins[:size])
    predicted = of_params & loss.of_example
    kinds = [np.asarray(leaf).dtype.kind for leaf in jax.tree.leaves(record)]
    others = {body.ins[size + at] for at, kind in enumerate(kinds) if at != label and kind != "b"}
    for node in body.nodes:
        if not others.intersection(ref for ref in node.ins if not isinstance(ref, core.Literal)):
            continue
        if any(program.depends(ref, predicted) for ref in node.ins):
            return True
        # A comparison makes a mask, as of padding, and no answer.
        if not jnp.issubdtype(node.out_dtype(), jnp.bool_):
            others.update(set(node.outs) - of_params)
    return False


def _linear_gain(
    inputs: list[np.ndarray], target: np.ndarray, kept: np.ndarray, held: np.ndarray
) -> float | None:
    """Standard errors by which ridge regression beats a constant on held-out records.

    Args:
        inputs: arrays [m, ...]; integers are taken as categories, several in a row as a text.
        target: [m], numbers or classes.
        kept: the rows to fit.
        held: the rows to test.
    """
    columns = []
    for leaf in inputs:
        rows = np.asarray(leaf).reshape(len(leaf), -1)
        if rows.dtype.kind in "iu" and rows.dtype != np.uint8:  # tokens, in 512 buckets by hash
            counts = np.zeros((len(rows), 512))
            np.add.at(counts, (np.arange(len(rows))[:, None], rows.astype(np.int64) % 509), 1)
            rows = counts
        rows = np.nan_to_num(rows.astype(np.float64), posinf=0, neginf=0)
        columns.append((rows - rows.mean(0)) / np.maximum(rows.std(0), 1e-3))
    if not columns or target.ndim != 1:
        return None
    known, at = np.unique(target, return_inverse=True)
    classes = target.dtype.kind in "biu" and 4 * len(known) < len(target)  # not prices
    wanted = np.eye(len(known))[at] if classes else target[:, None].astype(np.float64)
    wanted = wanted - wanted[kept].mean(0)
    # By the kernel, for there are more columns than records.
    x = np.concatenate(columns, axis=1)
    kernel = x @ x.T / x.shape[1]
    weights = np.linalg.solve(kernel[np.ix_(kept, kept)] + np.eye(len(kept)), wanted[kept])
    predicted = kernel[np.ix_(held, kept)] @ weights
    agree = np.sum((predicted - predicted.mean(0)) * wanted[held], axis=1)
    return float(agree.mean() / max(agree.std() / math.sqrt(len(agree)), 1e-12))


def _steps(mechanism: Mechanism) -> int | None:
    """The number of steps of a mechanism; None where it does not say."""
    noise = mechanism.noise_multiplier
    return mechanism.steps or (None if isinstance(noise, int | float) else noise.steps)


class _Plan(NamedTuple):
    """A training's size: gradients of ``rows`` records, ``each`` updates by each of them.

    Updates share a gradient where there is no time for one each; every update has its own noise.
    """

    rows: int
    each: int
    private: int  # gradients, as the program says
    free: int  # without privacy

    @property
    def steps(self) -> int:
        return self.private * self.each

    @classmethod
    def of(cls, e: Examined, kept: int) -> "_Plan | None":
        """By an estimate of the time, never the clock: the same program is rehearsed alike."""
        size = sum(leaf.size for leaf in e.trained())
        steps = _steps(e.mechanism) or _USUAL
        wanted, update = max(steps, _USUAL), 2e-5 + 2e-8 * size
        most = min(e.mechanism.batch_size, kept, 256, max(1, 2**25 // size))

        # All updates, several of them by one gradient; else as many as there is time for.
        for rows in (most, min(most, 64)):
            gradient = 1e-4 + _flops(e, rows) / 3e10
            fits = [n for n in (1, 2, 4, 8) if wanted * (gradient / n + update) < _OF_ONE]
            if fits:
                break
        each = fits[0] if fits else 8
        one = gradient + each * update
        few = min(int(_OF_ONE / one), -(-wanted // each))
        if few < 3 * _POINTS and 3 * _POINTS * one < 2 * _OF_ONE:
            few = 3 * _POINTS
        free, private = (n // _POINTS * _POINTS for n in (few, min(few, steps // each)))
        return cls(rows, each, private, free) if private else None


def _flops(e: Examined, rows: int) -> float:
    """Floating-point operations of the gradients of ``rows`` records, as XLA counts them."""
    batch = near.take(e.records, np.arange(rows))
    mean = jax.grad(lambda trained, key: jnp.mean(_losses(e, trained, batch, key)))
    cost = jax.jit(mean).lower(e.trained(), jax.random.key(0, impl="threefry2x32")).cost_analysis()
    found = cost[0] if isinstance(cost, list) else cost
    return 2 * float((found or {}).get("flops", 0.0))


def _losses(e: Examined, trained: list[jax.Array], rows: PyTree, key: jax.Array) -> jax.Array:
    """The losses float32 [m] of rows [m, ...]."""
    keys = jax.random.split(key, near.count(rows))
    losses = jax.vmap(e.loss, (None, 0, 0))(trained, jax.tree.map(jnp.asarray, rows), keys)
    return losses.astype(jnp.float32)


# (the variant, training records, held-out records, seed) -> its outcome.
_Training = Callable[[Variant, PyTree, PyTree, int], Outcome]


def _trainer(e: Examined, kept: int, everything: bool, other_rule: bool) -> _Training | None:
    """Compiles a training, with and without privacy in one; None where a step takes too long.

    Args:
        e: the program.
        kept: the number of records to train on.
        everything: True if nothing is frozen.
        other_rule: True to clip to a norm, whatever the rule.
    """
    grad_fn, mechanism = dataclasses.replace(e.grad_fn, placement=None), e.mechanism
    if other_rule:
        grad_fn = dataclasses.replace(grad_fn, rule=Clip(1.0))
    if everything:
        floating = [
            bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))
            for leaf in jax.tree.leaves(e.params)
        ]
        chosen = tuple(floating), jax.tree.structure(e.params)
        grad_fn = dataclasses.replace(grad_fn, trainable=chosen)
    if mechanism.noise == "grid":  # its integers take long; as Gaussian noise it is the same
        mechanism = dataclasses.replace(mechanism, noise="gaussian")
    e = dataclasses.replace(e, grad_fn=grad_fn, mechanism=mechanism)
    plan = _Plan.of(e, kept)
    if plan is None or e.optimizer is None:
        return None
    noise, optimizer = mechanism.privatize(), optax.with_extra_args_support(e.optimizer)
    plain, clip_norm = optax.adam(3e-3), getattr(grad_fn.rule, "l2_clip_norm", None)

    def train(
        records: PyTree, held: PyTree, key: jax.Array, rate: float, noised: bool, free: bool
    ) -> tuple[jax.Array, jax.Array]:
        """(losses of held-out records [points + 1, h], mean loss of some others [points + 1])."""
        records, held = jax.tree.map(jnp.asarray, (records, held))
        count, tested = near.count(records), near.count(held)
        scored = jax.tree.map(lambda a, b: jnp.concatenate([a, b[:_MOST_HELD_OUT]]), held, records)

        def update(carry: PyTree, key: jax.Array, summed: Summed) -> PyTree:
            """One update, as a step takes it, or without privacy by the mean gradient."""
            step, trained, first, last, without, before = carry
            mean = jax.tree.map(
                lambda leaf, like: (leaf / mechanism.batch_size).astype(like.dtype),
                summed.value,
                trained,
            )

            def private() -> tuple[PyTree, ...]:
                spent = mechanism.simulated_key(key, step, before)
                noisy, after = noise.update(summed, first, trained, key=spent)
                given = jax.tree.map(
                    lambda a, b: jnp.where(noised, b.astype(a.dtype), a), mean, noisy
                )
                updates, state = optimizer.update(given, last, trained)
                return updates, after, state, without

            def unclipped() -> tuple[PyTree, ...]:
                updates, state = plain.update(mean, without, trained)
                return updates, first, last, state

            with jax.numpy_dtype_promotion("standard"):  # optax's Adam needs it
                updates, *states = jax.lax.cond(free, unclipped, private)
            updates = jax.tree.map(lambda leaf: (rate * leaf).astype(leaf.dtype), updates)
            return step + 1, optax.apply_updates(trained, updates), *states, key

        def gradient(carry: PyTree, key: jax.Array) -> PyTree:
            """The clipped sum of some records in place of the expected batch, and its updates."""
            drawn, own, noises = jax.random.split(key, 3)
            rows = jnp.arange(count)
            if plan.rows < count:
                rows = jax.random.randint(drawn, (plan.rows,), 0, count)
            batch = jax.tree.map(lambda leaf: leaf[rows], records)
            params = e.with_trained(jax.tree.leaves(carry[1]))
            rng = own if grad_fn.takes_rng else None
            bound = None if clip_norm is None else jnp.where(free, _NO_CLIP, clip_norm)
            summed = grad_fn(params, batch, "all", rng, bound=bound)
            more = mechanism.batch_size / len(rows)
            summed = Summed(jax.tree.map(lambda leaf: more * leaf, summed.value), summed.l2)
            keys = jax.random.split(noises, plan.each)
            return jax.lax.scan(lambda c, key: (update(c, key, summed), None), carry, keys)[0]

        def point(carry: PyTree, at: jax.Array) -> tuple[PyTree, tuple[jax.Array, jax.Array]]:
            """The losses, and the gradients up to the next point; after the last there are none."""
            losses = _losses(e, jax.tree.leaves(carry[1]), scored, key)
            some = jnp.where(free, plan.free, plan.private) // _POINTS
            some = jnp.where(at < _POINTS, some, 0)
            here = jax.random.fold_in(key, at)
            carry = jax.lax.fori_loop(
                0, some, lambda i, carry: gradient(carry, jax.random.fold_in(here, i)), carry
            )
            return carry, (losses[:tested], jnp.mean(losses[tested:]))

        trained = grad_fn.trained(e.params)
        start = jnp.int32(0), trained, noise.init(trained), optimizer.init(trained)
        points = jnp.arange(_POINTS + 1)
        return jax.lax.scan(point, (*start, plain.init(trained), key), points)[1]

    compiled = jax.jit(train, compiler_options=QUICK)

    def outcome(variant: Variant, records: PyTree, held: PyTree, seed: int) -> Outcome:
        key = jax.random.key(seed, impl="threefry2x32")
        rate = jnp.float32(variant.rate)
        found, fitted = compiled(records, held, key, rate, variant.noise, not variant.clip)
        losses = np.asarray(found)
        best = losses[min(range(len(losses)), key=lambda i: _mean(losses[i]))]
        return Outcome(losses[0], losses[-1], best, np.asarray(fitted))

    return outcome


# To compare ------------------------------------------------------------------------------------


def find_in_rehearsal(r: Rehearsal) -> list[Finding]:
    """The advice that the trainings give, the largest share of the trouble first.

    A variant is named where it is better by a margin with every seed. Where fewer steps were
    rehearsed than the program takes, nothing is said that more of them could mend.
    """
    if r.left_out or not r.outcomes:
        return []
    said = f"in a rehearsal of {r.steps:,} steps"
    start, constant = next(iter(r.outcomes.values()))[0].first, _mean(r.constant)

    def told(*variants: Variant) -> str:
        """The held-out losses of some variants, in words."""
        each = (f"{r.loss(variant):.3g} {_words(variant)}" for variant in variants)
        return f"{said} the held-out loss went from {_mean(start):.3g} to {', '.join(each)}"

    def advice(kind: str, what: str, do: str, weight: float, where: str = "") -> Finding:
        weight = float(np.clip(weight, 0, 1))
        return Finding(kind, what, where, certain=False, do=do, weight=weight)

    # Without privacy nothing is learned, either: with all parameters trained?
    free = r.best(noise=False, everything=False)
    whole = r.best(noise=False, everything=True)
    if not r.learns(everything=False):
        if r.learns(everything=True):
            return [advice("frozen", told(free, whole), _TRAIN_MORE, 1)]
        if not 1 / _FAR < r.target < _FAR:
            what = f"{said} nothing is learned of targets of size {r.target:.3g}, without privacy"
            return [advice("inputs", what, _TARGETS, 1)]
        what = (
            f"{said} the loss of records that are trained on does not fall below that of one "
            f"prediction for all ({constant:.3g}), without noise and clipping, at no rate"
        )
        return [advice("model", what, _MODEL, 1, r.where)]
    # It learns its records by heart and nothing of others: is there anything to be learned?
    alike = [r.loss(v) for v in r.outcomes if v.constant]
    begins = not alike or _mean(start) > 0.98 * min(alike)  # it knows nothing yet
    if r.linear is not None and begins and not r.learns(held_out=True):
        if r.linear > _SEES:
            what = (
                f"{said}, without noise and clipping, nothing is learned that holds for other "
                f"records, at no rate; a linear model of the same records does learn"
            )
            return [advice("model", what, _BLIND, 1, r.where)]
        if len(r.sizes) > 2 and sum(r.sizes.values()) >= _ENOUGH and r.linear < _SEES / 2:
            what = (
                f"{said}, without noise and clipping, nothing is learned that holds for other "
                "records, and by no linear model of them"
            )
            return [advice("labels", what, _APART, 0.9)]
    found = _wrong_labels(r, said)
    if Variant() not in r.outcomes or r.is_well:
        return found

    # What keeps it from learning without privacy, too.
    own, best = Variant(), r.best(noise=True)
    share, quiet = r.share(own), r.best(noise=False, clip=True)
    if whole in r.outcomes and r.share(whole) > 3 * max(r.share(free), 0):
        found.append(advice("frozen", told(free, whole), _TRAIN_MORE, 1 - r.share(free)))
    defeats = quiet in r.outcomes and r.share(quiet) < 0.5 * r.share(free) and r.rest < 1.5
    if defeats:
        found.append(advice("clip", told(quiet, free), _CLIP, 1 - r.share(quiet)))

    # Another rate. A smaller one is worse off in a short rehearsal, so that it is better for good;
    # a larger one may only be faster, unless even the whole run would be too short.
    late = (max(share, 0) + 0.02) * (r.rest if r.of else 20) > 0.5 * r.share(best)
    certain = r.rest < 1.5 or (share < 0.1 if best.rate < 1 else not late)
    least = min(r.shares(best))  # whatever the seed
    if certain and least > max(share, 0) + _BETTER and share < (1 - _BETTER) * least:
        do = f"a learning rate about {_times(best.rate)}"
        found.append(advice("rate", told(own, best), do, r.share(best) - share + 0.2))

    # Noise leaves little, at any rate.
    if r.share(best) < _NOTHING and r.share(quiet) > 2 * _NOTHING and r.rest < 1.5:
        found.append(advice("signal", told(best, quiet), "", 1 - r.share(best)))
    elif not found and share < _NOTHING and r.learns(held_out=True) and r.rest < 1.5:
        found.append(advice("rate", told(own, free), _OTHER_RATES, 0.5 - share))
    return sorted(found, key=lambda finding: -finding.weight)


_TRAIN_MORE = "train more of the parameters (trainable=)"
_TARGETS = (
    "scale the targets by public constants to about 1, and predictions back: a clipped gradient "
    "moves the parameters by little more than the learning rate a step"
)
_CLIP = (
    "a larger clip norm, with a smaller learning rate: it is the clipping, not the noise, that "
    "keeps records from being learned"
)
_BLIND = (
    "look at how the input enters the model: its scale, a mask the wrong way round, an axis, a "
    "layer that passes nothing on. Privacy is not what keeps it from learning"
)
_APART = (
    "look whether each label stands at its own record: rows left out of one of two arrays, another "
    "order, a join by the wrong column"
)
_OTHER_RATES = "look at the rate, its schedule and the clip norm: Adam without privacy learns"
_MODEL = (
    "look at the loss, the labels and the model first: privacy is not what keeps it from learning. "
    "Train it without (noise_multiplier=0 and a clip norm that no gradient reaches) until it learns"
)


def _wrong_labels(r: Rehearsal, said: str) -> list[Finding]:
    """Groups that are not learned without privacy, while the others are."""
    if r.group is None or len(r.sizes) < 2:
        return []
    # One number that no record has, and another that many have: one group labelled as another.
    missing = sorted(set(range(max(r.sizes))) - set(r.sizes))
    largest, usual = max(r.sizes, key=lambda g: r.sizes[g]), np.median(list(r.sizes.values()))
    if len(missing) == 1 and len(r.sizes) >= 4 and r.sizes[largest] > 1.6 * usual > 16:
        what = (
            f"no record is of group {missing[0]}, and {r.sizes[largest]} of "
            f"{sum(r.sizes.values())} are of group {largest}: one may be labelled as the other"
        )
        do = f"look at the labels of group {largest}"
        return [Finding("labels", what, "", certain=False, do=do, weight=0.4)]
    shares: dict[int, float] = {}
    top, constant = _finite(r.top.best), _finite(r.constant)
    for group, size in r.sizes.items():
        own = r.group == group
        if np.sum(own) >= 6 and size >= 0.5 * usual:
            gain = (constant - top)[own] / np.mean(np.abs(constant[own]))
            shares[group] = float(np.mean(np.clip(gain, -1, 1)))
    bad = sorted(group for group, share in shares.items() if share <= 0)
    others = [share for group, share in shares.items() if group not in bad]
    if not bad or len(others) < max(1, len(bad)) or np.median(others) < 0.4:
        return []
    names = ", ".join(map(str, bad))
    what = (
        f"{said}, without noise and clipping, all groups are learned but {names}: its labels look "
        "wrong"
    )
    weight = len(bad) / len(shares)
    do = f"look at the labels of group {names}"
    return [Finding("labels", what, "", certain=False, do=do, weight=max(weight, 0.4))]
