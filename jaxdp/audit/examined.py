"""A program and some records, as a diagnosis looks at them: their per-example gradients."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import arguments
from jaxdp.clipping import ClippedGrad, clipped_grad, losses, options
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sampling import Source
from jaxdp.sampling import neighbours as near
from jaxdp.types import PyTree

# Most of a diagnosis is compilation, and its programs run a few times each.
QUICK: Final = {"xla_backend_optimization_level": 1}
_TOGETHER = 2**25  # numbers of the per-example gradients that are computed at a time


def require_program(
    door: str,
    functions: Mapping[str, Callable[..., PyTree] | None],
    mechanism: Mechanism | Algorithm,
    clipping: Mapping[str, PyTree],
) -> tuple[Mechanism, ClippedGrad | None]:
    """Requires what a program is made of; returns the mechanism, and the loss's clipped gradient.

    Args:
        door: the name of the function that was called.
        functions: its arguments that are functions, by name; "loss_fn" among them.
        mechanism: of the user.
        clipping: options of ``jaxdp.clipped_grad``.

    Raises:
        ValueError: one is not what it should be.
    """
    if not isinstance(mechanism, Mechanism | Algorithm):
        raise ValueError(
            f"mechanism must come from jaxdp.dp_sgd, or be a jaxdp.Algorithm, got {mechanism!r}"
        )
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ValueError(
                f"{name} must be a function or None, got {arguments.described(function)}"
            )
    known = tuple(inspect.signature(clipped_grad).parameters)[2:]  # but for loss and rule
    if unknown := sorted(set(clipping) - set(known)):
        raise ValueError(
            f"{unknown[0]} must be an argument of {door} or one of {', '.join(known)}, got "
            f"{arguments.described(clipping[unknown[0]])}"
        )
    inner = mechanism.mechanism if isinstance(mechanism, Algorithm) else mechanism
    if functions["loss_fn"] is None:
        return inner, None
    grad_fn = mechanism.clipped_grad(functions["loss_fn"], **clipping)
    if not isinstance(grad_fn, ClippedGrad):
        raise ValueError(
            f"mechanism must clip the gradients of one loss for {door}, got one whose clipped_grad "
            f"is a {type(grad_fn).__name__}"
        )
    return inner, grad_fn


def sample(source: Source, most: int) -> PyTree:
    """At most ``most`` records, drawn with a fixed seed: pytree of NumPy arrays [m, ...]."""
    size = len(source)
    rows = np.sort(np.random.default_rng(0).choice(size, min(most, size), replace=False))
    return source.gather(rows, np.ones(len(rows), bool))


class ExampleGradients(NamedTuple):
    """Gradients of some of the records, one after another. **Sensitive**.

    Attributes:
        rows: int [b]; the places of the records in ``Examined.records``.
        losses: float32 [b].
        grads: the trained leaves' gradients, float32 [b, ...] each, in their order.
    """

    rows: np.ndarray
    losses: jax.Array
    grads: list[jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Examined:
    """A loss, its parameters, and the records on which it is looked at.

    Attributes:
        grad_fn: the mechanism's clipped gradient of the loss.
        params: the parameters, trained and frozen.
        mechanism: sampling, clipping and noise.
        optimizer: what the noisy gradient goes into; None where it is not known.
        records: pytree of NumPy arrays [m, ...]. **Sensitive**, unless they are public.
        group: int [m], the class or group of each record; None where there is none.
    """

    grad_fn: ClippedGrad
    params: PyTree
    mechanism: Mechanism
    optimizer: optax.GradientTransformation | None
    records: PyTree
    group: np.ndarray | None = None

    def __len__(self) -> int:
        """The number of records that are looked at."""
        return near.count(self.records)

    @property
    def flags(self) -> list[bool]:
        """True for each leaf of the parameters that is trained."""
        return options.trained_flags(self.grad_fn.trainable, self.params)

    @property
    def names(self) -> list[str]:
        """The path of each trained leaf."""
        of_all = options.paths(self.params)
        return [name for name, flag in zip(of_all, self.flags, strict=True) if flag]

    def trained(self, params: PyTree = None) -> list[jax.Array]:
        """The trained leaves; of ``self.params`` where none are given."""
        leaves = jax.tree.leaves(self.params if params is None else params)
        return [leaf for leaf, flag in zip(leaves, self.flags, strict=True) if flag]

    def with_trained(self, trained: list[jax.Array]) -> PyTree:
        """The parameters with other trained leaves; to be called inside ``jit``, too."""
        leaves, structure = jax.tree.flatten(self.params)
        new = iter(trained)
        mixed = [next(new) if flag else leaf for leaf, flag in zip(leaves, self.flags, strict=True)]
        return jax.tree.unflatten(structure, mixed)

    def loss(self, trained: list[jax.Array], example: PyTree, key: jax.Array) -> jax.Array:
        """The loss of one example, a scalar; ``key`` is used where the loss takes one."""
        keys = (key,) if self.grad_fn.takes_rng else ()
        given = self.with_trained(trained), example, *keys
        found = losses.call(self.grad_fn.form, self.grad_fn.loss_fn, *given)
        return options.checked_result(found)[0]

    def gradients(self, trained: list[jax.Array] | None = None) -> Iterator[ExampleGradients]:
        """Yields the per-example gradients of all records, as many at a time as memory allows."""
        trained = self.trained() if trained is None else trained
        size = sum(leaf.size for leaf in trained)
        most = int(np.clip(_TOGETHER // max(size, 1), 1, 256))
        for begin in range(0, len(self), most):
            rows = np.arange(begin, min(begin + most, len(self)))
            batch = jax.tree.map(jnp.asarray, near.take(self.records, rows))
            yield ExampleGradients(rows, *self._of_batch(trained, batch, self.keys(rows)))

    def keys(self, rows: np.ndarray) -> jax.Array:
        """The keys of some records, [b]: the same whenever they are asked for."""
        return jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.key(0, impl="threefry2x32"), jnp.asarray(rows)
        )

    @functools.cached_property
    def _of_batch(self):  # type: ignore[no-untyped-def]
        each = jax.vmap(jax.value_and_grad(self.loss), (None, 0, 0))
        return jax.jit(each, compiler_options=QUICK)
