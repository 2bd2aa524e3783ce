"""Layerwise block descent for ordinary optax training: one group of parameters a step, by turns."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp import _validate
from jaxdp.clipping import ClippedGrad, Rule, clipped_grad
from jaxdp.clipping.captured import declaring
from jaxdp.clipping.forms import form_of
from jaxdp.mechanism import Mechanism
from jaxdp.noise import privatize
from jaxdp.optimizers.method import Method
from jaxdp.schedules import NoiseSchedule
from jaxdp.types import ClipInfo, Draw, PyTree, Summed

Groups = PyTree


def by_top_level(params: PyTree) -> Groups:
    """A group for every entry of the outermost mapping or sequence, in order, as one integer a leaf.

    Flax wraps everything in {"params": ...}; such a single outer entry is looked through.
    """  # noqa: E501
    outer = params
    while isinstance(outer, dict) and len(outer) == 1:
        outer = next(iter(outer.values()))
    parts = jax.tree.flatten(outer, is_leaf=lambda node: node is not outer)[0]
    leaves = [i for i, part in enumerate(parts) for _ in jax.tree.leaves(part)]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


@dataclasses.dataclass(frozen=True)
class LayerwiseGrad:
    """Clipped gradients of the group whose turn it is; the other groups' are exactly zero.

    Takes the place of a ``ClippedGrad``. Formal guarantee: one record changes the sum by at most
    ``rule.l2``; the clip norm is spent on the active group alone.

    Attributes:
        loss_fn: in one of the forms of ``clipped_grad``.
        rule: the clipping rule, applied to the active group's gradient.
        groups: pytree shaped like the parameters, an integer from 0 for each leaf.
    """

    loss_fn: Callable[..., jax.Array]
    rule: Rule
    groups: Groups

    def __post_init__(self) -> None:
        count = num_groups(self.groups)
        parts = tuple(clipped_grad(self._only(i), self.rule) for i in range(count))
        object.__setattr__(self, "_parts", parts)

    def of_step(self, step: int) -> ClippedGrad:
        """The clipped gradient function of a step's group."""
        parts: tuple[ClippedGrad, ...] = self._parts  # type: ignore[attr-defined]
        return parts[step % len(parts)]

    def trained(self, params: PyTree) -> PyTree:
        """All parameters: each has its turn."""
        return params

    def sum(
        self, params: PyTree, data: PyTree, draw: Draw, rng: jax.Array | None = None
    ) -> tuple[Summed, list[ClipInfo]]:
        """The clipped sum over one draw, for the group of ``draw.step``."""
        return self.of_step(draw.step).sum(params, data, draw, rng)

    def sum_passes(
        self, params: PyTree, passes: Any, draw: Draw, rng: jax.Array | None = None, **options: Any
    ) -> tuple[Summed, list[ClipInfo]]:
        """As ``ClippedGrad.sum_passes``, for the group of ``draw.step``."""
        return self.of_step(draw.step).sum_passes(params, passes, draw, rng, **options)

    def _only(self, group: int) -> Callable[..., jax.Array]:
        def held(params: PyTree) -> PyTree:
            return jax.tree.map(
                lambda leaf, i: leaf if i == group else jax.lax.stop_gradient(leaf),
                params,
                self.groups,
            )

        def of_two(params: PyTree, example: PyTree) -> jax.Array:
            return form(self.loss_fn, held(params), example)

        def of_three(params: PyTree, example: PyTree, rng: jax.Array) -> jax.Array:
            return form(self.loss_fn, held(params), example, rng)

        form = form_of(self.loss_fn)
        return declaring(of_two if form.rng is None else of_three, inner=self.loss_fn)


class LayerwiseState(NamedTuple):
    """State of :func:`layerwise`.

    Attributes:
        step: int32 scalar, updates so far.
        noise: state of ``privatize``.
        inner: the optimizer's state for each group, untouched while the group waits.
    """

    step: jax.Array
    noise: PyTree
    inner: tuple[PyTree, ...]


def layerwise(
    optimizer: optax.GradientTransformation,
    groups: Groups,
    noise_multiplier: float,
    expected_batch_size: float,
) -> optax.GradientTransformationExtraArgs:
    """Noises and updates one group of parameters a step, by turns; the others do not move.

    Formal guarantee: one update releases a Gaussian mechanism with multiplier ``noise_multiplier``
    on the active group's part of the sum, under every relation, and nothing else: the other parts
    are dropped, not released. One event a step, as for ``jaxdp.privatize``; the draws decide about
    amplification. Whatever group the gradient was meant for, only the group of this transformation's
    own counter is released, with its noise.

    Args:
        optimizer: any optax optimizer; each group has its own state of it, which rests with it.
        groups: pytree shaped like the parameters, an integer from 0 for each leaf
            (:func:`by_top_level` makes one). Group g has its turn at steps g, g + n, g + 2n, ...
        noise_multiplier: as for ``privatize``.
        expected_batch_size: as for ``privatize``.

    Raises:
        ValueError: as ``privatize``; groups that do not count from 0 or do not fit the parameters.
    """  # noqa: E501
    count = num_groups(groups)
    noise = privatize(noise_multiplier, expected_batch_size)
    optimizer = optax.with_extra_args_support(optimizer)

    def mask(group: int, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, g: leaf if g == group else None, tree, groups)

    def init(params: PyTree) -> LayerwiseState:
        shapes: list[Any] = [jax.tree.structure(tree) for tree in (params, groups)]
        if shapes[0] != shapes[1]:
            raise ValueError("groups must be a tree shaped like the parameters")
        inner = tuple(optimizer.init(mask(i, params)) for i in range(count))
        return LayerwiseState(jnp.zeros([], jnp.int32), noise.init(params), inner)

    def update(
        updates: Summed, state: LayerwiseState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, LayerwiseState]:
        turn = state.step % count
        noisy, after = noise.update(updates, state.noise, params, **extra)
        parts, inner = [], []
        for i in range(count):
            here = turn == i
            part = None if params is None else mask(i, params)
            moved, new = optimizer.update(mask(i, noisy), state.inner[i], part)
            # Other groups' sums are zero or un-noised leftovers; none of them may get through.
            parts.append(jax.tree.map(lambda u, h=here: jnp.where(h, u, jnp.zeros_like(u)), moved))
            inner.append(jax.tree.map(lambda a, b, h=here: jnp.where(h, a, b), new, state.inner[i]))
        leaves = [iter(jax.tree.leaves(part)) for part in parts]
        order = [next(leaves[g]) for g in jax.tree.leaves(groups)]
        return (
            jax.tree.unflatten(jax.tree.structure(groups), order),
            LayerwiseState(optax.safe_increment(state.step), after, tuple(inner)),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def layerwise_method(
    mechanism: Mechanism, optimizer: optax.GradientTransformation, groups: Groups
) -> Method:
    """Layerwise block descent as a ``Method``, for ``jaxdp.Trainer``.

    Args:
        mechanism: sampling, clipping (of the active group) and noise, one number.
        optimizer: as for :func:`layerwise`.
        groups: likewise.
    """
    if isinstance(mechanism.noise_multiplier, NoiseSchedule):
        raise ValueError(
            "noise_multiplier must be one number for layerwise descent, got a schedule"
        )
    link = layerwise(optimizer, groups, mechanism.noise_multiplier, mechanism.batch_size)
    return Method(
        mechanism,
        optax.identity(),
        noise=link,
        gradient=lambda loss_fn: LayerwiseGrad(loss_fn, mechanism.rule, groups),
    )


def num_groups(groups: Groups) -> int:
    """The number of groups; they must be numbered from 0 without a gap."""
    numbers = {_validate.integer("groups", g, least=0) for g in jax.tree.leaves(groups)}
    if numbers != set(range(len(numbers))) or not numbers:
        raise ValueError(f"groups must be numbered from 0 without a gap, got {sorted(numbers)}")
    return len(numbers)
