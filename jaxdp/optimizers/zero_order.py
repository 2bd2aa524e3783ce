"""DP-ZO: private training by forward passes alone, of which each step releases one noisy number."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxdp import arguments
from jaxdp.clipping import ClippedGrad, options
from jaxdp.clipping.ghost.plan import LeafPlan, Plan
from jaxdp.clipping.ghost.run import holds_convolution
from jaxdp.clipping.rules import CoordinateBox, PerLayer
from jaxdp.ledger import links
from jaxdp.ledger.tickets import NoiseKey
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.types import ClipInfo, LossFn, PyTree, Summed, filled


class LinePoint(NamedTuple):
    """A line through the parameters, of which the one coordinate along it is trained."""

    at: PyTree  # the parameters
    along: Any  # float32 scalar, 0: how far the point is along the line
    direction: Any  # uint32 [2], a threefry key that is public


class ZeroOrderState(NamedTuple):
    """State of the noise of ``dp_zo``."""

    privatize: PyTree  # state of the number's noise
    step: jax.Array  # int32 scalar; the steps that were taken


def direction_of(words: jax.Array, trained: PyTree) -> PyTree:
    """Independent float32 standard normals shaped like the trained parameters, None where frozen.

    Made again wherever they are needed, and never kept.

    Args:
        words: uint32 [2], the public key of the step's direction.
        trained: the parameters, with None where they are frozen.
    """
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    leaves, structure = jax.tree.flatten(trained)
    each = (
        jax.random.normal(jax.random.fold_in(key, n), jnp.shape(leaf), jnp.float32)
        for n, leaf in enumerate(leaves)
    )
    return jax.tree.unflatten(structure, each)


@dataclasses.dataclass(frozen=True)
class LineGrad(ClippedGrad):
    """Sums clipped differences of each record's loss along a line: forward passes alone.

    It clips what ``ClippedGrad`` clips, of a loss whose one trained parameter is
    ``LinePoint.along``: the guarantee, rounding included, is that of one number a record.

    Attributes:
        chosen: as ``trainable``, which is that of the line where lines are asked of.
    """

    chosen: options.Trainable = None

    def line(self, params: PyTree, direction: jax.Array | None = None) -> LinePoint:
        """The line through the parameters; None, of whose shapes alone are asked, is any."""
        if isinstance(params, LinePoint):
            return params
        words = jnp.zeros(2, jnp.uint32) if direction is None else direction
        return LinePoint(params, jnp.zeros([], jnp.float32), words)

    def with_info(self, params: PyTree, *args: Any, direction: Any = None, **given: Any) -> Any:
        """As of ``ClippedGrad``, along a ``direction``, uint32 [2]."""
        return super(LineGrad, self._of_line(params)).with_info(
            self.line(params, direction), *args, **given
        )

    def sum_draw(
        self, params: PyTree, *args: Any, direction: Any = None, **given: Any
    ) -> tuple[Summed, list[ClipInfo]]:
        """As of ``ClippedGrad``, along a ``direction``, uint32 [2]."""
        return super(LineGrad, self._of_line(params)).sum_draw(
            self.line(params, direction), *args, **given
        )

    def clip_physical_batch(
        self, params: PyTree, *args: Any, direction: Any = None, **given: Any
    ) -> tuple[Summed, ClipInfo]:
        """As of ``ClippedGrad``, along a ``direction``, uint32 [2]."""
        return super(LineGrad, self._of_line(params)).clip_physical_batch(
            self.line(params, direction), *args, **given
        )

    def plan(self, params: PyTree, batch: PyTree) -> Plan:
        """The plan of the parameters, none of which has a gradient."""
        return super(LineGrad, self._of_line(params)).plan(self.line(params), batch)

    def _of_line(self, params: PyTree) -> "LineGrad":
        """The same for lines: one number is trained, and on a mesh every device has it."""
        if isinstance(params, LinePoint):
            return self
        place = self.placement
        if place is not None and place.leaves is not None:
            place = dataclasses.replace(place, leaves=(*place.leaves, P(), P()))
        alone = options.checked_trainable(LinePoint(False, True, False))
        return dataclasses.replace(self, trainable=alone, placement=place)

    def _planned(self, params: PyTree, rows: PyTree, size: int) -> tuple[Any, Any, Plan]:
        """As of ``ClippedGrad``; public are assumed the caller's frozen parameters alone."""
        traced, uses, plan = super()._planned(params, rows, size)
        at, count = params.at, len(jax.tree.leaves(params.at))
        flags = options.trained_flags(self.chosen, at)
        words = [""] * count if all(flags) else options.describe_frozen(at, flags)
        own = [
            LeafPlan(path, "forward" if flag else "frozen", "no gradient of its own", said)
            for path, flag, said in zip(options.paths(at), flags, words, strict=True)
        ]
        along, key = plan[count], dataclasses.replace(plan[count + 1], assumed="")
        return traced, uses, Plan((*own, along, key, *plan[count + 2 :]), plan.together, plan.why)


def dp_zo(
    mechanism: Mechanism,
    learning_rate: float | optax.Schedule | optax.GradientTransformation,
    *,
    width: float = 1e-3,
    seed: int = 0,
) -> Algorithm:
    """DP-ZO (Tang et al. 2024, arXiv:2401.04343; DPZero, arXiv:2310.09639): no gradients at all.

    Each step takes a direction u of standard normals, and of each drawn record the difference d =
    (loss(params + width u) - loss(params - width u)) / (2 width), clipped to ±C, C the rule's norm.
    Their sum with noise, over the batch size, is the number g; the parameters move by what the
    optimizer makes of g u. Memory: a forward pass and about two copies of what is trained.

    Formal guarantee: a step is the mechanism's own on one number, which a record moves by at most C
    (2C where it is replaced; the accountant applies the relation), and the rest is post-processing:
    u is a function of ``seed`` and the number of the step, and so public; no noise key is computed
    from it, nor it from one (docs/proofs/releases.md). Differences that are not finite count as 0.

    Args:
        mechanism: with flat clipping. ``noise="laplace"`` makes the guarantee one at delta 0.
        learning_rate: of SGD along g u; or any optax chain in its place.
        width: half the distance of the two points, over one standard deviation of u.
        seed: of the directions, public.

    Raises:
        ValueError: a number is out of its range; a rule whose norm depends on the parameters.
    """
    if isinstance(mechanism.rule, PerLayer | CoordinateBox):
        raise ValueError(
            "mechanism must have a rule of one norm for DP-ZO, which clips one number: take "
            f"l2_clip_norm, got {mechanism.rule}"
        )
    width = arguments.positive("width", width)
    seed = arguments.integer("seed", seed, least=0, most=2**32 - 1)  # as JAX's keys tell apart
    inner = mechanism.privatize()

    def words_of(state: ZeroOrderState) -> jax.Array:
        """The public key of the next step's direction."""
        base = jax.random.key(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(base, state.step))

    def gradient(loss_fn: LossFn, **given: Any) -> LineGrad:
        """The clipped differences of a loss; options as for ``clipped_grad``."""
        plain = mechanism.clipped_grad(loss_fn, **given)
        fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}

        @functools.wraps(loss_fn)
        def along_line(line: LinePoint, *example: PyTree, **key: PyTree) -> PyTree:
            if not isinstance(line, LinePoint):  # who looks at the loss itself
                return loss_fn(line, *example, **key)
            trained = found.trained(line.at)
            u = direction_of(line.direction, trained)

            def loss_at(side: jax.Array) -> jax.Array:
                moved = jax.tree.map(
                    lambda p, u: (p + side * width * u).astype(p.dtype), trained, u
                )
                result = loss_fn(filled(moved, line.at), *example, **key)
                loss = result[0] if isinstance(result, tuple) else result
                return loss.astype(jnp.float32)

            # One after the other, so that one copy of the parameters is there: in a loop, but where
            # convolutions of many examples would then come one by one.
            sides, one = 1.0 - 2.0 * jnp.arange(2.0), jax.make_jaxpr(loss_at)(1.0)
            in_turn = map if holds_convolution(one.jaxpr) else jax.lax.map
            right, left = map(jax.lax.stop_gradient, in_turn(loss_at, sides))
            # Its value is the loss, and its derivative the difference.
            return line.along * ((right - left) / (2 * width)) + (right + left) / 2

        fields |= {"loss_fn": along_line, "engine": "vmap"}
        found = LineGrad(**fields, chosen=plain.trainable)
        return found

    def init(params: PyTree) -> ZeroOrderState:
        """The state before the first step."""
        return ZeroOrderState(inner.init(jnp.zeros([])), jnp.zeros([], jnp.int32))

    def update(
        updates: Summed,
        state: ZeroOrderState,
        params: PyTree | None = None,
        *,
        key: NoiseKey | None = None,
        **extra: PyTree,
    ) -> tuple[PyTree, ZeroOrderState]:
        """The noisy number times the direction, shaped like the parameters."""
        if params is None:
            raise ValueError("params must be given, whose shapes the direction has, got None")
        noisy, after = inner.update(updates, state.privatize, key=key, **extra)
        (number,), u = jax.tree.leaves(noisy), direction_of(words_of(state), params)
        moved = jax.tree.map(lambda p, u: (number * u).astype(p.dtype), params, u)
        return moved, ZeroOrderState(after, state.step + 1)

    chain = learning_rate
    if not callable(getattr(learning_rate, "update", None)):
        chain = optax.sgd(learning_rate)
    link = optax.GradientTransformationExtraArgs(init, links.trusted_link(update))
    return Algorithm(mechanism, chain, gradient=gradient, noise=link, direction=words_of)
