"""Gaussian noise on a clipped sum, as the first transformation of an optax chain."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp import _validate
from jaxdp.schedules import NoiseSchedule
from jaxdp.seeds import Secret
from jaxdp.types import PyTree, Summed


class PrivatizeState(NamedTuple):
    """State of :func:`privatize`. **Secret**: whoever holds it can subtract the noise.

    Attributes:
        key: uint32 [2], the threefry key of the whole run.
        step: int32 scalar, the number of updates so far; it advances on every update, so that no
            noise is used twice.
    """

    key: jax.Array
    step: jax.Array

    def __repr__(self) -> str:
        return f"PrivatizeState(key=<secret>, step={self.step})"


def privatize(
    noise_multiplier: float | NoiseSchedule,
    expected_batch_size: float,
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adds N(0, (noise_multiplier · l2)²) to a ``Summed`` and divides by the expected batch size.

    Formal guarantee: one update releases a Gaussian mechanism with multiplier ``noise_multiplier``
    relative to the largest contribution ``l2`` of one record (Abadi et al. 2016, arXiv:1607.00133,
    Algorithm 1), under every relation. The divisor is a public constant, so dividing is
    post-processing; a realised batch size would not be. Noise is float32 whatever the dtype of the
    parameters, independent in every coordinate, leaf and update, also when the batch is empty.

    Args:
        noise_multiplier: standard deviation of the noise over ``l2``; 0 adds none (epsilon is then
            infinite). A ``NoiseSchedule`` gives each step its own; past its end an update is
            NaN, which releases nothing.
        expected_batch_size: the public divisor, sampling_prob · dataset_size.
        key: a key with all of its bits secret, never used for another run. None takes a fresh one
            from the operating system at every ``init``, so that two runs never share noise.

    Returns:
        A transformation whose ``update`` takes a ``Summed`` and returns a plain pytree with the
        parameters' dtypes. Put it first in a chain.

    Raises:
        ValueError: a negative multiplier or a non-positive batch size; a key that is not one; at
            ``init`` under ``jit`` or ``vmap``, a key of None (it would be compiled in and shared).
        TypeError: at update, when handed anything but a ``Summed``.
        ValueError: at update, when the sum and the parameters differ in shape, or when the chain is
            handed ``value``, ``grad`` or ``value_fn``: what a line search or a plateau schedule
            asks for is computed from data, and releasing it is another event.
    """
    _refuse_injected(noise_multiplier=noise_multiplier, expected_batch_size=expected_batch_size)
    multiplier_at = _multipliers(noise_multiplier)
    divisor = _validate.positive("expected_batch_size", expected_batch_size)
    given = None if key is None else key_words(key)

    def init(params: PyTree) -> PrivatizeState:
        _check_floating(params)
        words = _fresh_words(params) if given is None else given
        check_one_key_a_member(params, words)
        return PrivatizeState(key=words, step=jnp.zeros([], jnp.int32))

    def update(
        updates: Summed, state: PrivatizeState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PrivatizeState]:
        _check_update(updates, state, params, extra)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key, impl=IMPL), state.step)
        noisy = add_gaussian(updates.value, multiplier_at(state.step) * updates.l2, key)
        mean = jax.tree.map(lambda leaf: leaf / divisor, noisy)
        if updates.unscale is not None:
            mean = jax.tree.map(jnp.multiply, mean, updates.unscale)
        like = updates.value if params is None else params
        mean = jax.tree.map(lambda leaf, param: leaf.astype(param.dtype), mean, like)
        return mean, PrivatizeState(state.key, optax.safe_increment(state.step))

    return optax.GradientTransformationExtraArgs(init, update)


def add_gaussian(tree: PyTree, std: float | jax.Array, key: jax.Array) -> PyTree:
    """Adds independent float32 Gaussian noise of standard deviation ``std`` to every coordinate."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        leaf.astype(jnp.float32) + std * jax.random.normal(k, leaf.shape, jnp.float32)
        for leaf, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, noisy)


def _multipliers(given: float | NoiseSchedule) -> Callable[[jax.Array], float | jax.Array]:
    if not isinstance(given, NoiseSchedule):
        constant = _validate.non_negative("noise_multiplier", given)
        return lambda step: constant
    table = given.table()

    def multiplier_at(step: jax.Array) -> jax.Array:
        return jnp.take(table, step, mode="fill", fill_value=jnp.nan)

    return multiplier_at


# Pinned, so that a change of JAX's default generator cannot change what a resumed run replays.
IMPL = "threefry2x32"


def _fresh_words(params: PyTree) -> jax.Array:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)):
        raise ValueError(
            "key must be given to privatize when init runs under jit or vmap, got None: one from "
            "the operating system would be compiled in. Give every call and member another one"
        )
    return jax.random.key_data(Secret.new().jax_key("noise"))


def key_words(key: Any) -> jax.Array:
    """uint32 [2]: the words of a threefry key; ValueError for anything else."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if not hasattr(key, "shape") or key.shape != (2,) or key.dtype != jnp.uint32:
        raise ValueError(
            "key must be a threefry key, such as jaxdp.Secret.new().jax_key('noise') or "
            f"jax.random.key(0) for a figure, or None for a fresh one; got {type(key).__name__}"
        )
    return jnp.asarray(key)


def _check_update(updates: Any, state: PrivatizeState, params: Any, extra: dict[str, Any]) -> None:
    if not isinstance(updates, Summed):
        raise TypeError(
            "privatize must come first in the chain and take the Summed that clipping returns, "
            f"got {type(updates).__name__}"
        )
    for name in ("value", "grad", "value_fn"):
        if extra.get(name) is not None:
            raise ValueError(
                f"{name} must not be passed to a private chain: it is computed from data without "
                "noise, and no event is charged for it"
            )
    if params is not None:
        found, wanted = (jax.tree.map(jnp.shape, tree) for tree in (updates.value, params))
        if found != wanted:
            raise ValueError(f"the sum must have the parameters' shapes {wanted}, got {found}")
    check_one_key_a_member(updates.value, state.key)


def check_one_key_a_member(tree: PyTree, words: jax.Array) -> None:
    """Refuses members of a vmap that share a key: they share their noise, which subtracts away."""
    if any(_is_mapped(leaf) for leaf in jax.tree.leaves(tree)) and not _is_mapped(words):
        raise ValueError("key must be another one for every member of a vmap, got one for all")


def _is_mapped(leaf: Any) -> bool:
    return type(leaf).__name__ == "BatchTracer"


def _refuse_injected(**numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, jax.Array):
            raise ValueError(
                f"{name} must be a Python number, public and fixed, got a jax array: it is not "
                "injectable, for the ledger could not follow it"
            )


def _check_floating(params: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"params must be floating-point arrays, got {jnp.result_type(leaf)} at {name}"
            )
