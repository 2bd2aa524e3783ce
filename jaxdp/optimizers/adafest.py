"""DP-AdaFEST: noise enters the few rows of a table that a private choice names, and no other."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp import arguments
from jaxdp.clipping import ClippedGrad, options, per_layer
from jaxdp.clipping.ghost.plan import LeafPlan, Plan
from jaxdp.clipping.losses import Form
from jaxdp.clipping.rules import Clip, Rule
from jaxdp.ledger import links
from jaxdp.ledger.tickets import NoiseKey
from jaxdp.mechanism import Mechanism
from jaxdp.noise.gaussian import PrivatizeState, check_update, noise_key
from jaxdp.noise.normals import add_normals
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.types import LossFn, PyTree, Summed


class Counted(NamedTuple):
    """The parameters, and one number for each row of the table; of a sum, gradient and counts."""

    at: PyTree  # the parameters
    touched: Any  # float32 [rows], 0: its gradient is the map of the rows that a record touches


def _of_both(name: str) -> Any:
    """The method of that name of ``ClippedGrad``, on the parameters and the map together."""

    def method(self: "CountedGrad", params: PyTree, *args: Any, **given: Any) -> Any:
        plain = getattr(super(CountedGrad, self._counting(params)), name)
        return plain(self._counted(params), *args, **given)

    return method


@dataclasses.dataclass(frozen=True)
class CountedGrad(ClippedGrad):
    """Sums clipped gradients together with clipped maps of the rows that each record touches.

    It is ``ClippedGrad`` of a loss with one parameter more for each row, clipped in two groups: the
    guarantee, rounding included, is that of ``jaxdp.clipping.per_layer``.

    ``ClipInfo.norms`` are those of both together, a row that is touched counting as C z_g / (z_c
    count_clip_norm) (see ``dp_adafest``), and ``ClipInfo.clipped`` is True where either was.

    Attributes:
        table: a part of the path that the table's alone has.
        groups: the rule of both; ``rule`` is that of the gradient, where it alone is asked of.
    """

    table: str = ""
    groups: Rule = dataclasses.field(default_factory=lambda: Clip(1.0))  # always given

    with_info, sum_draw = _of_both("with_info"), _of_both("sum_draw")
    clip_physical_batch, plan = _of_both("clip_physical_batch"), _of_both("plan")

    def _counted(self, params: PyTree) -> Counted:
        """The parameters with a zero for each row."""
        if isinstance(params, Counted):
            return params
        table = jax.tree.leaves(params)[table_leaf(self.table, params)]
        return Counted(params, jnp.zeros(jnp.shape(table)[0], jnp.float32))

    def _counting(self, params: PyTree) -> "CountedGrad":
        """The same for ``Counted``, all of whose rows are trained."""
        if isinstance(params, Counted):
            return self
        place = self.placement
        if place is not None and place.leaves is not None:
            place = dataclasses.replace(place, leaves=(*place.leaves, jax.sharding.PartitionSpec()))
        flags = options.trained_flags(self.trainable, params)
        chosen = jax.tree.unflatten(jax.tree.structure(params), flags)
        both = options.checked_trainable(Counted(chosen, True))
        return dataclasses.replace(self, rule=self.groups, trainable=both, placement=place)

    def _planned(self, params: PyTree, rows: PyTree, size: int) -> tuple[Any, Any, Plan]:
        """As of ``ClippedGrad``, with the paths of the caller's parameters."""
        traced, uses, plan = super()._planned(params, rows, size)
        assert isinstance(params, Counted)
        count = len(jax.tree.leaves(params.at))
        flags = options.trained_flags(self.trainable, params)[:count]
        words = options.describe_frozen(params.at, flags)
        own: list[LeafPlan] = [
            dataclasses.replace(leaf, path=path, assumed=said)
            for leaf, path, said in zip(plan, options.paths(params.at), words, strict=False)
        ]
        return traced, uses, Plan((*own, *plan[count:]), plan.together, plan.why)


def table_leaf(table: str, params: PyTree) -> int:
    """The number of the one leaf whose path has ``table`` in it; ValueError for none or several."""
    found = [n for n, path in enumerate(options.paths(params)) if table in path]
    if len(found) != 1 or jnp.ndim(jax.tree.leaves(params)[found[0]]) == 0:
        raise ValueError(
            "table must be a part of the path of one trained array [rows, ...] and of no other, "
            f"got {table!r} for {options.paths(params)}"
        )
    return found[0]


def dp_adafest(
    mechanism: Mechanism,
    optimizer: optax.GradientTransformation,
    *,
    table: str,
    rows: Callable[..., jax.Array],
    threshold: float,
    cap: int,
    count_noise_multiplier: float | None = None,
    count_clip_norm: float = 1.0,
) -> Algorithm:
    """DP-AdaFEST (Ghazi et al. 2023, arXiv:2311.08357, Algorithm 1): noise in chosen rows alone.

    Each step counts, of the records drawn, how many touch each row of a table of embeddings; adds
    noise to the counts; and updates the rows whose noisy count is at least ``threshold``, the
    ``cap`` largest at most, by their clipped gradient with noise. The other rows' update is 0, and
    no noise is made for them. Other parameters get what ``jaxdp.dp_sgd`` gives them.

    Formal guarantee: counts and gradient are computed from one draw, and a record moves them, each
    in units of its noise, by at most 1/z_c and 1/z_g: together they are one Gaussian mechanism of
    multiplier (z_c⁻² + z_g⁻²)^-½, the mechanism's ``noise_multiplier``, under every relation. What
    is released is computed from these two (docs/proofs/releases.md). Nothing rests on ``rows``.

    Args:
        mechanism: with ``jaxdp.clip``, and one noise multiplier: that of the whole step, which is
            charged. The gradient is clipped whole, rows that are not chosen included.
        optimizer: any optax chain. SGD and Adagrad leave a row whose update is 0 as it is; momentum
            and Adam move it on, by what they keep of earlier releases.
        table: a part of the path of the table [rows, ...], such as "items"; it must be trained.
        rows: of one example, as the loss is given it (without parameters and key), the integer
            positions of the rows that it touches, of any shape; those out of range count as none,
            so padding within a record must be -1. Of a ``User`` it gives those of all records:
            ``jaxdp.sampling.users`` pads by a record once more, which touches no other row; where a
            source of your own pads with something else, give -1 where ``present`` is False.
        threshold: of the noisy counts.
        cap: public; the most rows that a step updates, for which memory is planned.
        count_noise_multiplier: z_c, of each count, over ``count_clip_norm``; None takes five times
            the mechanism's, of which the gradient's noise is then 1.02 times.
        count_clip_norm: the Euclidean norm to which the map of a record, a 1 for each row that it
            touches, is clipped: of m rows each counts min(1, count_clip_norm / √m).

    Raises:
        ValueError: an argument is out of its range, or the mechanism has another rule, a schedule
            of noise or a count of its own; at a step, no or several arrays have that path.
    """
    if type(mechanism.rule) is not Clip or mechanism.count_noise_multiplier is not None:
        raise ValueError(
            "mechanism must have the rule jaxdp.clip and no count of its own, got "
            f"{mechanism.rule} and count_noise_multiplier={mechanism.count_noise_multiplier}"
        )
    if not callable(rows):
        raise ValueError(f"rows must be a function of an example, got {arguments.described(rows)}")
    if not isinstance(table, str):
        raise ValueError(f"table must be a string, got {arguments.described(table)}")
    most = arguments.integer("cap", cap, least=1)
    if not isinstance(threshold, int | float) or not math.isfinite(threshold):
        raise ValueError(f"threshold must be a finite number, got {threshold!r}")
    count_clip = arguments.positive("count_clip_norm", count_clip_norm)
    z = arguments.positive("noise_multiplier", mechanism.noise_multiplier)
    z_count = 5 * z if count_noise_multiplier is None else count_noise_multiplier
    made = dataclasses.replace(mechanism, count_noise_multiplier=z_count)
    z_gradient, inner = made.multipliers(0)["gradient"], made.privatize()

    # Counts are scaled so that the same noise is added to all numbers of the sum: it is then the
    # mechanism's own, of one vector and one sensitivity.
    bounds = Counted(
        mechanism.rule.l2_clip_norm, mechanism.rule.l2_clip_norm * z_gradient / z_count
    )
    scale, both = bounds.touched / count_clip, per_layer(bounds)
    shares = Counted(*(bound / both.l2(bounds) * (1 + 2.0**-20) for bound in bounds))  # rounded up

    def gradient(loss_fn: LossFn, **given: Any) -> CountedGrad:
        """The clipped gradients and maps of a loss; options as for ``clipped_grad``."""
        plain = made.clipped_grad(loss_fn, **given)
        _check_takes_an_example(rows, plain.form)
        fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}

        @functools.wraps(loss_fn)
        def counting(params: PyTree, *example: PyTree, **named: PyTree) -> PyTree:
            if not isinstance(params, Counted):  # who looks at the loss itself
                return loss_fn(params, *example, **named)
            result = loss_fn(params.at, *example, **named)
            by_place = zip(plain.form.names, example, strict=True)
            own = [value for name, value in by_place if name != plain.form.rng]
            # A one for each row, however often it is there.
            ids = jnp.sort(jnp.ravel(rows(*own)).astype(jnp.int32))
            each = jnp.where((ids >= 0) & (ids < params.touched.size), scale, 0.0)
            each = each.at[1:].multiply(jnp.where(ids[1:] != ids[:-1], 1.0, 0.0))
            touched = jnp.vdot(each, params.touched[jnp.maximum(ids, 0)])
            if isinstance(result, tuple):
                return result[0] + touched.astype(result[0].dtype), *result[1:]
            return result + touched.astype(result.dtype)

        return CountedGrad(**{**fields, "loss_fn": counting}, table=table, groups=both)

    def update(
        updates: Summed,
        state: PrivatizeState,
        params: PyTree | None = None,
        *,
        key: NoiseKey | None = None,
        **extra: PyTree,
    ) -> tuple[PyTree, PrivatizeState]:
        """The noisy gradient, shaped like the parameters; 0 in all rows that were not chosen."""
        check_update(updates, None, extra)
        if params is None or not isinstance(updates.value, Counted):
            raise ValueError(
                "updates must be the sum of the algorithm's own clipped_grad, and params be given"
            )
        total, number = updates.value, table_leaf(table, params)
        spent = dataclasses.replace(updates, value=total.at, l2=updates.l2 * shares.at)
        check_update(spent, params, {})

        # The noisy counts, and the rows that they choose.
        key = noise_key(updates, key, state, params)
        words, multiplier = key.part("votes")
        links.record_noise("votes", lambda step: z_count)
        fresh = jnp.where(jnp.all(jnp.asarray(key.tag) == state.last), jnp.nan, 1.0)
        std = multiplier * updates.l2 * shares.touched * fresh
        counts = add_normals(total.touched, std, words) / scale
        largest, chosen = jax.lax.top_k(counts, min(most, counts.shape[0]))
        is_chosen = largest >= threshold  # false of a NaN

        # Their gradient with noise, and that of the other parameters.
        leaves, structure = jax.tree.flatten(total.at)
        leaves[number] = leaves[number][chosen]
        spent = dataclasses.replace(spent, value=jax.tree.unflatten(structure, leaves))
        mean, after = inner.update(spent, state, key=key, **extra)
        noisy = jax.tree.leaves(mean)
        kept = is_chosen.reshape(-1, *[1] * (noisy[number].ndim - 1))
        none = jnp.zeros(jnp.shape(jax.tree.leaves(params)[number]), jnp.float32)
        noisy[number] = none.at[chosen].set(
            jnp.where(kept, noisy[number], 0.0), unique_indices=True
        )
        each = jax.tree.unflatten(structure, noisy)
        return jax.tree.map(lambda g, p: g.astype(p.dtype), each, params), after

    link = optax.GradientTransformationExtraArgs(inner.init, links.trusted_link(update))
    return Algorithm(made, optimizer, gradient=gradient, noise=link)


def _check_takes_an_example(rows: Callable[..., jax.Array], form: Form) -> None:
    """Raises ValueError where ``rows`` does not take an example as the loss does."""
    names = [name for name in form.names if name != form.rng]
    try:
        signature = inspect.signature(rows)
    except ValueError:  # some built-in functions tell none
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise ValueError(
            f"rows must take {', '.join(names)}, as the loss does beside parameters and key, got "
            f"rows{signature}"
        ) from error
