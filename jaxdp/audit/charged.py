"""Numbers of a diagnosis from one noisy release, which a ledger is charged for before it is made.

One Poisson-sampled step of DP-SGD, by the functions that train: each record's vector is its clipped
gradient beside a one in the place of its group and norm, and the sum of the vectors is released.
docs/proofs/releases.md, "A diagnosis", has the argument.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.accounting.events import of_users
from jaxdp.audit.examined import Examined
from jaxdp.audit.gradient_numbers import GradientNumbers, Mean, norm_bins, norm_edges
from jaxdp.clipping.rules import CoordinateBox, limit_of
from jaxdp.ledger import Ledger
from jaxdp.ledger.tickets import issuer_of
from jaxdp.mechanism import Mechanism, default_physical_batch_size, dp_sgd
from jaxdp.sampling import ExampleLevel, Sampler, Sampling, Source
from jaxdp.sampling import neighbours as near
from jaxdp.training import start
from jaxdp.types import PyTree

# A record's vector is clipped to 1. Its halves are shorter by as much as clipping leaves alone.
_CLIP_NORM, _HALF = 1.0, 0.7
_DOUBLINGS = 8  # from the clip norm to either end of the norms that are told apart
_TOGETHER = 2**24  # numbers of the vectors that are computed at a time
NOTE = "a diagnosis: norms by group and the mean clipped gradient (jaxdp.diagnose)"


@dataclasses.dataclass(frozen=True)
class Release:
    """A release that is not made yet.

    Attributes:
        mechanism: of the one step.
        epsilon: that it costs alone, at the mechanism's delta.
        before: the epsilon of the ledger, or of the steps that are planned, without it; 0 where
            nothing is charged or planned.
        after: the same with it.
    """

    mechanism: Mechanism
    epsilon: float
    before: float
    after: float

    def __str__(self) -> str:
        alone = f"epsilon {self.epsilon:.3g} alone, at delta {self.mechanism.delta:.3g}"
        total = f"{self.before:.3f} becomes {self.after:.3f}" if self.before else "nothing before"
        return f"One noisy release, charged as one Poisson-sampled step: {alone}; in all {total}."


def plan(mechanism: Mechanism, ledger: Ledger, records: int, epsilon: float) -> Release:
    """The release, with noise for ``epsilon`` under the mechanism's relation; nothing is charged.

    Args:
        mechanism: that is diagnosed.
        ledger: to be charged.
        records: the expected number that is drawn.
        epsilon: of the release alone.

    Raises:
        ValueError: the mechanism has no delta, its relation no proof for Poisson sampling, or the
            ledger holds releases of another privacy unit.
        BudgetExceededError: the ledger's budget does not admit it.
    """
    if mechanism.delta is None:
        raise ValueError(
            "delta must be known to charge a diagnosis, got a mechanism without one: make it from "
            "a budget, jaxdp.dp_sgd(epsilon=..., delta=..., steps=...), or give it one, "
            "dataclasses.replace(mechanism, delta=1e-6)"
        )
    rule, size = mechanism.sampling, min(records, mechanism.dataset_size)
    sampling: str | Sampling = "poisson"
    if isinstance(rule, ExampleLevel):  # records of users: the event is of a user
        sampling = dataclasses.replace(rule, sampling_prob=size / mechanism.dataset_size)
    one = dp_sgd(
        epsilon=arguments.positive("epsilon", epsilon),
        delta=mechanism.delta,
        steps=1,
        l2_clip_norm=_CLIP_NORM,
        batch_size=size,
        dataset_size=mechanism.dataset_size,
        sampling=sampling,
        records_per_user=mechanism.records_per_user,
        relation=mechanism.neighbours,
        noise=mechanism.noise,
    )
    event, delta, relation = one.event_at(0), mechanism.delta, mechanism.neighbours
    if ledger.has_budget and not ledger.left(event).steps:
        raise acc.BudgetExceededError(
            f"epsilon must be what the ledger's budget has room for, got {epsilon}: nothing was "
            "charged, and no record was drawn. Ask for less, or compute numbers of public records "
            "(public=)"
        )

    charged = [event, *(entry.event for entry in ledger.reserved)]
    if len({of_users(each) for each in charged if not isinstance(each, acc.NonPrivate)}) > 1:
        raise ValueError(
            "ledger must hold releases of the mechanism's privacy unit, got one with records beside"
            " users: what a release of records says of a user is not known. Give the ledger of the "
            "mechanism's own run, or another one"
        )

    # What is charged already; of a fresh ledger what is planned, which comes.
    held, known = ledger.event, bool(ledger.entries)
    if not known and mechanism.steps is not None:
        held, known = mechanism.total(mechanism.steps), True
    alone, both = (acc.epsilon(each, delta, relation).upper
                   for each in (event, acc.Composed((held, event))))  # fmt: skip
    return Release(one, alone, acc.epsilon(held, delta, relation).upper if known else 0.0, both)


def measure_noisily(
    release: Release,
    e: Examined,
    source: Source,
    ledger: Ledger,
    group: Callable[[PyTree], int] | None,
    groups: int,
    clipping: Mapping[str, PyTree],
) -> GradientNumbers:
    """Charges the ledger, draws, and computes the numbers from the noisy sum alone.

    Formal guarantee: what is returned is computed from one release, which satisfies
    ``release.epsilon`` at the mechanism's delta, under its relation, and from public constants.

    Args:
        release: of ``plan``.
        e: the program; its records are not used.
        source: the private records.
        ledger: as for ``plan``.
        group: from one record to its group; None where there is one group. A group outside
            [0, groups) counts for none.
        groups: how many there are; public.
        clipping: options of ``jaxdp.clipped_grad``, as the program's.

    Raises:
        ValueError: the loss cannot be used; nothing is charged then.
    """
    one, rule, trained = release.mechanism, e.mechanism.rule, e.grad_fn.trained(e.params)
    limit = float(limit_of(rule, trained))
    edges = norm_edges(limit, _DOUBLINGS, 1)
    bins = len(edges) + 3
    of_group = _WithGroup(source, group, groups) if group is not None else None

    def clipped(grads: list[jax.Array], squares: list[jax.Array]) -> list[jax.Array]:
        """The gradient of one example, as the program's own rule clips it."""
        if isinstance(rule, CoordinateBox):
            return [jnp.clip(leaf, -rule.bound, rule.bound) for leaf in grads]
        factors = rule.factors(jax.tree.unflatten(jax.tree.structure(trained), squares))
        each = zip(grads, jax.tree.leaves(factors), strict=True)
        return [leaf * factor for leaf, factor in each]

    def linear(own: PyTree, example: PyTree, *, rng: jax.Array | None = None) -> jax.Array:
        """A loss whose gradient is the record's vector: linear in ``own``, the record's factors."""
        example, at = (example, 0) if of_group is None else example
        program = dataclasses.replace(e, params=jax.lax.stop_gradient(own["params"]))
        key = jax.random.key(0, impl="threefry2x32") if rng is None else rng
        made = jax.grad(program.loss)(program.trained(), example, key)
        grads = [leaf.astype(jnp.float32) for leaf in made]
        squares = [jnp.sum(leaf**2) for leaf in grads]
        norm = jnp.sqrt(jnp.sum(jnp.stack(squares)))

        # A gradient that is not finite counts in its place of the histogram, and else as zero.
        place = jnp.where((at >= 0) & (at < groups), at * bins + norm_bins(norm, edges), -1)
        scale = jnp.where(jnp.isfinite(norm), _HALF / limit, 0.0)
        parts = zip(e.trained(own["params"]), clipped(grads, squares), strict=True)
        dot = sum(jnp.sum(p * jnp.where(scale > 0, scale * g, 0.0)) for p, g in parts)
        return dot + _HALF * jnp.sum(own["counts"] * jax.nn.one_hot(place, groups * bins))

    # Refused before anything is charged: what the loss captured, and what a trainer refuses.
    vectors = {"params": e.params, "counts": jnp.zeros(groups * bins, jnp.float32)}
    flags = iter([True, *e.flags])  # in the order of the leaves: counts, then params
    trainable = jax.tree.map(lambda _: next(flags), vectors)
    options = {k: v for k, v in clipping.items() if k not in ("trainable", "rng_name")}
    options["constants"] = [edges.astype(np.float32), options.get("constants")]
    with_key = linear if e.grad_fn.takes_rng else lambda own, example: linear(own, example)
    grad_fn = one.clipped_grad(with_key, trainable=trainable, **options)
    records = source if of_group is None else of_group
    size = sum(leaf.size for leaf in jax.tree.leaves(trained)) + groups * bins
    rows = max(1, min(default_physical_batch_size(one.batch_size), _TOGETHER // size))
    one.check_source(source)
    start.inspect_loss(e.grad_fn, e.params, source, rows, first=True, ledger=ledger)
    start.inspect_loss(grad_fn, vectors, records, rows, ledger=ledger)

    # Charged, drawn, clipped, summed, noised.
    issuer = issuer_of(one, ledger, note=NOTE)
    sampler = Sampler(one.sampling, len(source), rows, issuer, source=source)
    draw = sampler.draw()
    assert draw.ticket is not None
    keys = (draw.ticket.rng("examples"),) if grad_fn.takes_rng else ()
    summed = grad_fn(vectors, records, draw, *keys)
    tx, own = one.privatize(), grad_fn.trained(vectors)
    noisy, _ = tx.update(summed, tx.init(own), own)
    sampler.close()

    # From here on nothing but the noisy mean, and public numbers.
    expected = one.batch_size
    std = float(one.noise_std(own)) * expected / _HALF  # of a count; times the limit: of the sum
    counts = np.asarray(noisy["counts"], np.float64).reshape(groups, bins) * expected / _HALF
    total = sum(float(jnp.sum((leaf * (expected * limit / _HALF)) ** 2))
                for leaf in jax.tree.leaves(noisy["params"]))  # fmt: skip
    numbers = GradientNumbers(e.mechanism, edges, counts, Mean(0, 0, 0, limit, 0), std)
    own = float(np.sum(np.maximum(counts.sum(0), 0.0) * numbers.lengths[1] ** 2))
    parameters = size - groups * bins
    mean = Mean.of_sum(total, own, expected, limit, parameters, noise=std * limit)
    return dataclasses.replace(numbers, mean=mean)


@dataclasses.dataclass(frozen=True, eq=False)
class _WithGroup:
    """Pairs (record, group): a group that cannot be computed is -1, and stops nothing."""

    source: Source = dataclasses.field(repr=False)
    group: Callable[[PyTree], int]
    groups: int
    on_device: bool = dataclasses.field(default=False, init=False)

    @property
    def example(self) -> PyTree:
        """Shape and dtype of one pair."""
        return self.source.example, jax.ShapeDtypeStruct((), np.int32)

    def __len__(self) -> int:
        """The number of records. Sensitive under add-or-remove-one."""
        return len(self.source)

    def gather(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """The records at ``indices``, each with its group; see ``Source.gather``."""
        rows = self.source.gather(indices, mask)
        found = np.full(len(mask), -1, np.int32)
        for at in np.flatnonzero(mask):
            try:
                value = int(self.group(near.record(rows, int(at))))
            except Exception:
                continue  # a step that was charged does not stop for what a record is
            found[at] = value if 0 <= value < self.groups else -1
        return rows, found
