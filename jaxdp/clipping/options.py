"""What a caller of the engine may choose, checked before anything is computed."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp import _validate
from jaxdp.types import PyTree

# Further out, squares in float32 underflow or overflow and a norm could not be trusted.
LEAST_BOUND, LARGEST_BOUND = 1e-10, 1e10


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prefix of the parameters' tree with True at what is trained; hashable."""

    flags: tuple[bool, ...]
    structure: Any

    def __call__(self, params: PyTree) -> list[bool]:
        """One flag for every leaf."""
        try:
            groups = self.structure.flatten_up_to(params)
        except ValueError as error:
            raise ValueError(
                f"trainable must be a prefix of the parameters' tree, got {self.structure}: {error}"
            ) from None
        each = zip(self.flags, groups, strict=True)
        return [flag for flag, group in each for _ in jax.tree.leaves(group)]


@dataclasses.dataclass(frozen=True)
class ByPath:
    """A function from a leaf's path, such as "['dense']['kernel']", to whether it is trained."""

    fn: Callable[[str], bool]

    def __call__(self, params: PyTree) -> list[bool]:
        """One flag for every leaf."""
        return [bool(self.fn(path)) for path in paths(params)]


def trainable(choice: Any) -> Prefix | ByPath | None:
    """The caller's choice of what to train, in a form that ``jit`` can compare."""
    if choice is None:
        return None
    if callable(choice):
        return ByPath(choice)
    flags, structure = jax.tree.flatten(choice)
    if not flags or not all(isinstance(flag, bool) for flag in flags):
        raise ValueError(
            "trainable must be a tree of bool (a prefix of the parameters), a function from a "
            f"path to bool, or None; got {choice!r}"
        )
    return Prefix(tuple(flags), structure)


def paths(params: PyTree) -> list[str]:
    """The path of every leaf."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def check_params(params: PyTree, flags: list[bool]) -> None:
    """Everything trained must be floating-point, and something must be."""
    if not any(flags):
        raise ValueError("trainable must let at least one parameter through, got none")
    for path, leaf, flag in zip(paths(params), jax.tree.leaves(params), flags, strict=True):
        if flag and not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"params must be floating-point arrays where they are trained, got "
                f"{jnp.result_type(leaf)} at {path}"
            )


def called(loss_fn: Callable[..., Any], *args: Any) -> Any:
    """What the loss returns; changing batch statistics inside is refused in words."""
    try:
        return loss_fn(*args)
    except Exception as error:
        if type(error).__name__ in ("ModifyScopeVariableError", "TraceContextError"):
            raise ValueError(
                "loss_fn must not change state such as batch statistics: it mixes the examples. "
                f"Use LayerNorm or GroupNorm, or keep the state fixed ({error})"
            ) from error
        raise


def checked_result(result: Any) -> tuple[jax.Array, Any]:
    """The scalar loss and its auxiliary output (or None)."""
    loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not hasattr(loss, "shape") or loss.shape != ():
        shape = getattr(loss, "shape", type(loss).__name__)
        raise ValueError(
            f"loss_fn must return a scalar for one example, got shape {shape}: "
            "it sees one example without a batch axis"
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(f"loss_fn must return a floating-point scalar, got {loss.dtype}")
    if any("batch_stats" in path for path in paths(aux)):
        raise ValueError(
            "loss_fn must not return updated batch statistics: they mix the examples. Use "
            "LayerNorm or GroupNorm, or keep the statistics fixed (use_running_average=True)"
        )
    return loss, aux


def check_bound(name: str, value: float) -> None:
    """A bound must be a number whose square float32 can hold with room to spare."""
    if not LEAST_BOUND <= _validate.positive(name, value) <= LARGEST_BOUND:
        raise ValueError(f"{name} must be in [1e-10, 1e10], got {value!r}")


def checked_bound(bound: Any) -> jax.Array | None:
    """The bound of this step as a float32 scalar, NaN and what is out of range made safe."""
    if bound is None:
        return None
    if not isinstance(bound, jax.Array):
        check_bound("bound", bound)
    bound = jnp.asarray(bound)
    if bound.shape != () or not jnp.issubdtype(bound.dtype, jnp.floating):
        found = f"{bound.dtype} {list(bound.shape)}"
        raise ValueError(f"bound must be a floating-point scalar, got {found}")
    bound = bound.astype(jnp.float32)
    return jnp.where(bound >= LEAST_BOUND, jnp.minimum(bound, LARGEST_BOUND), LEAST_BOUND)


def takes_rng(loss_fn: Callable[..., Any]) -> bool:
    """Whether the loss takes a key as its third argument."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in kinds]
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    if len(required) > 3 or len(positional) < 2:
        raise ValueError(
            "loss_fn must take (params, example) or (params, example, rng), "
            f"got the arguments ({', '.join(p.name for p in positional)})"
        )
    return len(positional) >= 3
