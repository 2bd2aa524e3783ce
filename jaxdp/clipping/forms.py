"""The signature of a loss: the arguments that an example fills, and the one for the key."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import jax

from jaxdp.types import PyTree

# An argument of one of these names takes the key of its example.
KEY_NAMES = ("rng", "key")
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_FORMS = (
    "(params, example), or (params, x, y) for examples that are tuples, with the key in an "
    "argument called rng or key"
)


@dataclass(frozen=True)
class Form:
    """The way to call a loss with one example; made by ``form_of``.

    Attributes:
        names: the positional arguments after the parameters, in order, up to the last that is
            given; among them perhaps the key's.
        data: those that the example fills.
        only: keyword-only arguments that the example fills.
        rng: the argument that takes the key, or None.
        keywords: True if the arguments of ``data`` can be given by name.
    """

    names: tuple[str, ...] = ("example",)
    data: tuple[str, ...] = ("example",)
    only: tuple[str, ...] = ()
    rng: str | None = None
    keywords: bool = False

    def __call__(
        self,
        loss_fn: Callable[..., Any],
        params: PyTree,
        example: PyTree,
        key: jax.Array | None = None,
    ) -> Any:
        """The result of the loss for one example; ``key`` only where ``rng`` is not None."""
        by_name = {} if self.rng is None else {self.rng: key}
        if self._takes_names(example):
            return loss_fn(params, **example, **by_name)
        values = dict(zip(self.data, self._parts(example), strict=True)) | by_name
        args = [values.pop(name) for name in self.names]
        return loss_fn(params, *args, **values)

    def _parts(self, example: PyTree) -> tuple[Any, ...]:
        count = len(self.data)
        if count == 1 and not self.only:
            return (example,)
        if not self.only and isinstance(example, (tuple, list)) and len(example) == count:
            return tuple(example)
        raise ValueError(
            f"loss_fn takes {_listed(self.data + self.only)} besides the parameters"
            f"{self._key_words()}, so an example must be {self._wanted()}; got {_found(example)}. "
            "Let the loss take (params, example) and open the example inside, or rearrange the data"
        )

    def _takes_names(self, example: PyTree) -> bool:
        wanted = self.data + self.only
        one = len(wanted) == 1 and not self.only
        if one or not isinstance(example, dict) or not (self.keywords or not self.data):
            return False
        return set(example) == set(wanted)

    def _wanted(self) -> str:
        named = f"a dict with the keys {_listed(self.data + self.only)}"
        if self.only:
            return named
        several = f"a tuple or list of {len(self.data)}"
        return f"{several}, or {named}" if self.keywords else several

    def _key_words(self) -> str:
        return "" if self.rng is None else f" (and the key as {self.rng!r}; see rng_name=)"


def form_of(
    loss_fn: Callable[..., Any], rng_name: str | tuple[str, ...] | None = KEY_NAMES
) -> Form:
    """The form of a loss by its signature; ``(params, example)`` where it has none.

    Args:
        loss_fn: the loss.
        rng_name: the argument that takes the key: its name, names to look for, or None for none.

    Raises:
        ValueError: the arguments are not those of a loss, named as they were found.
    """  # noqa: DOC501
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        signature = inspect.signature(lambda params, example, **others: None)
    given = list(signature.parameters.values())
    rng = _key_of(given, rng_name, _by_partial(loss_fn))
    positional = [p for p in given if p.kind in _POSITIONAL]
    required = [p.name for p in positional[1:] if p.default is Parameter.empty and p.name != rng]
    only = tuple(
        p.name
        for p in given
        if p.kind is Parameter.KEYWORD_ONLY and p.default is Parameter.empty and p.name != rng
    )
    rest = any(p.kind is Parameter.VAR_POSITIONAL for p in given)
    if (not positional and not rest) or (positional and positional[0].name == rng):
        raise _refused(signature)
    if not required and not only:
        required = _lone(positional, rng, rest, signature)
    return _arranged(positional, required, only, rng)


class ByIdentity:
    """A hashable stand-in for a callable that is not, such as a module with arrays."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self._loss_fn = loss_fn

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self._loss_fn is other._loss_fn

    def __hash__(self) -> int:
        return id(self._loss_fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the callable."""
        return self._loss_fn(*args, **kwargs)


def hashable(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The loss, or a hashable stand-in for it."""
    try:
        hash(loss_fn)
    except TypeError:
        return ByIdentity(loss_fn)
    return loss_fn


def _arranged(
    positional: list[Parameter], required: list[str], only: tuple[str, ...], rng: str | None
) -> Form:
    """The form with the positions up to the example's last argument, the key's among them."""
    after = [p.name for p in positional[1:]]
    last = max((after.index(name) for name in required if name in after), default=-1)
    names = [n for n in after[: last + 1] if n in required or n == rng]
    if last + 1 < len(after) and after[last + 1] == rng:
        names.append(after[last + 1])  # next in line: wrappers may take positions alone
    names = names or list(required)
    by_name = [p for p in positional if p.name == rng and p.name not in names]
    if any(p.kind is Parameter.POSITIONAL_ONLY for p in by_name):
        raise ValueError(
            f"loss_fn must let {rng} be given by its name, or have it next to the example, got the "
            f"arguments ({', '.join(p.name for p in positional)})"
        )
    keywords = all(p.kind is not Parameter.POSITIONAL_ONLY for p in positional[1:])
    return Form(tuple(names), tuple(required), only, rng, keywords)


def _key_of(
    given: list[Parameter], rng_name: str | tuple[str, ...] | None, given_already: frozenset[str]
) -> str | None:
    """The argument that takes the key, or None."""
    fixed = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    names = [p.name for p in given if p.kind not in fixed]
    if isinstance(rng_name, str):
        others = any(p.kind is Parameter.VAR_KEYWORD for p in given)
        if rng_name not in names and not others:
            raise ValueError(
                f"rng_name must be an argument of loss_fn, got {rng_name!r} for the arguments "
                f"({', '.join(names)})"
            )
        return rng_name
    if rng_name is not None and not all(isinstance(name, str) for name in rng_name):
        raise ValueError(f"rng_name must be the name of an argument, got {rng_name!r}")
    found = [name for name in names if name in (rng_name or ()) and name not in given_already]
    if len(found) > 1:
        raise ValueError(
            f"rng_name must say which of {_listed(tuple(found))} takes the key, as in "
            f"rng_name={found[0]!r}: loss_fn has the arguments ({', '.join(names)})"
        )
    return found[0] if found else None


def _lone(
    positional: list[Parameter], rng: str | None, rest: bool, signature: inspect.Signature
) -> list[str]:
    """The one argument that takes the example where none is required."""
    optional = [p.name for p in positional[1:] if p.name != rng]
    if rest and not optional:
        return ["example"]
    if not optional:
        raise _refused(signature)
    return optional[:1]


def _by_partial(loss_fn: Any) -> frozenset[str]:
    """The arguments that a ``functools.partial`` has given already."""
    names: set[str] = set()
    while loss_fn is not None:
        if isinstance(loss_fn, functools.partial):
            names |= set(loss_fn.keywords)
            loss_fn = loss_fn.func
        else:
            loss_fn = getattr(loss_fn, "__wrapped__", None)
    return frozenset(names)


def _refused(signature: inspect.Signature) -> ValueError:
    return ValueError(f"loss_fn must take {_FORMS}; got the arguments {signature}")


def _listed(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)})"


def _found(example: PyTree) -> str:
    if isinstance(example, dict):
        return f"a dict with the keys ({', '.join(map(str, example))})"
    if isinstance(example, (tuple, list)):
        return f"a {type(example).__name__} of {len(example)}"
    shapes = [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(example)]
    return f"a {type(example).__name__} with arrays of shapes {shapes}"
