"""PIGDO as published: not private, for the paper's tables and for audits.

"Differentially Private Deep Learning with Iterative Gradient Descent Optimization" (PIGDO), Table 1
and Algorithm 2. Its claim is ``claims.modified_moments_accountant``; the repaired algorithms are
``jaxdp.optimizers.piadam`` and its kin.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp import arguments
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers import hyperparameters as hyper
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.papers import claims
from jaxdp.papers.raw_gradient import Contribution, RawGradient, ToTheLetter, flat_clip
from jaxdp.types import PyTree


class RawMoments(NamedTuple):
    """Shared moments of un-noised gradients. **Sensitive**.

    Attributes:
        step: int32 scalar.
        f: first moment, shaped like the parameters.
        s: second moment.
    """

    step: jax.Array
    f: PyTree
    s: PyTree


# Table 1: (f, s, g, step) of one coordinate -> f_t, s_t.
Rule = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def table_1(name: str, b1: float = 0.9, b2: float = 0.999) -> tuple[Rule, Rule]:
    """(f_t, s_t) of the optimizer ``name``, and the pair as it enters the step (debiased in Adam).

    Args:
        name: "adam", "rmsprop" or "adagrad".
        b1: of Adam.
        b2: of Adam and RMSprop.
    """
    b1, b2 = hyper.decay("b1", b1), hyper.decay("b2", b2)
    rules: dict[str, Rule] = {
        "adam": lambda f, s, g, t: (b1 * f + (1 - b1) * g, b2 * s + (1 - b2) * g * g),
        "rmsprop": lambda f, s, g, t: (g, b2 * s + (1 - b2) * g * g),
        "adagrad": lambda f, s, g, t: (g, s + g * g),
    }
    moved = rules[arguments.one_of("name", name, tuple(rules))]
    if name != "adam":
        return moved, moved

    def debiased(
        f: jax.Array, s: jax.Array, g: jax.Array, t: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # (f_t / (1 - b1^t), s_t / (1 - b2^t)), with factors that all examples share.
        count = (t + 1).astype(jnp.float32)
        first, second = 1 / (1 - b1**count), 1 / (1 - b2**count)
        f = f * (b1 * first) + g * ((1 - b1) * first)
        return f, s * (b2 * second) + g * g * ((1 - b2) * second)

    return moved, debiased


def pigdo_as_published(
    mechanism: Mechanism,
    learning_rate: optax.ScalarOrSchedule,
    name: str = "adam",
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> Algorithm:
    """Algorithm 2 as its text says: moments of **un-noised** gradients, shared. Not private.

    g′(x) = f_t/(√s_t + a) with f_t and s_t from the example's gradient and the shared moments of
    un-noised means, clipped to C, noised, applied. Whether the paper shares the moments is not
    stated; moments for each example would need N times the memory. The noise is on the sum (on the
    mean, as the text has it, it would be L times larger), σC with no margin for rounding, as the
    clip norm is C. docs/papers.md has the reasons. Charged as ``NonPrivate``.

    Args:
        mechanism: with flat clipping to C.
        learning_rate: a number or an optax schedule.
        name: "adam", "rmsprop" or "adagrad".
        b1: of Adam.
        b2: of Adam and RMSprop, which Table 1 writes alike; not stated.
        eps: a.
    """
    moved, entering = table_1(name, b1, b2)
    eps = hyper.positive("eps", eps)
    bound = mechanism.rule.l2(None)
    leaking = ToTheLetter.of(
        mechanism, "moments of un-noised gradients set every example's contribution"
    )

    def over(rule: Rule, state: RawMoments, grads: PyTree) -> tuple[PyTree, PyTree]:
        pairs = jax.tree.map(lambda f, s, g: rule(f, s, g, state.step), state.f, state.s, grads)
        return _unzip(pairs, grads)

    def contribution(state: RawMoments) -> Contribution:
        def of_one(grad: PyTree) -> tuple[PyTree, PyTree]:
            f, s = over(entering, state, grad)
            direction = jax.tree.map(lambda a, b: a / (jnp.sqrt(b) + eps), f, s)
            return flat_clip(direction, bound), grad

        return of_one

    def init(params: PyTree) -> RawMoments:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return RawMoments(jnp.zeros([], jnp.int32), zeros, zeros)

    def update(
        updates: PyTree,
        state: RawMoments,
        params: PyTree | None = None,
        *,
        leaked: PyTree,
        **extra: Any,
    ) -> tuple[PyTree, RawMoments]:
        del params, extra
        f, s = over(moved, state, leaked)
        return updates, RawMoments(optax.safe_increment(state.step), f, s)

    lr = optax.scale_by_learning_rate(hyper.learning_rate(learning_rate))
    tx = optax.chain(optax.GradientTransformationExtraArgs(init, update), lr)
    return Algorithm(
        leaking,
        tx,
        raw=lambda state: state[0],
        claim=claims.modified_moments_accountant,
        gradient=functools.partial(
            RawGradient,
            mechanism=leaking,
            contribution=contribution,
        ),
    )


def _unzip(pairs: PyTree, like: PyTree) -> tuple[PyTree, PyTree]:
    first, second = jax.tree.transpose(jax.tree.structure(like), jax.tree.structure((0, 0)), pairs)
    return first, second
