"""The clipped-gradient function: per-example gradients, clipped and summed."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdp import _placement, arguments
from jaxdp.clipping import captured, forms, options
from jaxdp.clipping.engine import ClippedGrad
from jaxdp.clipping.rules import Rule
from jaxdp.types import PyTree


def clipped_grad(
    loss_fn: Callable[..., Any],
    rule: Rule,
    engine: str = "auto",
    microbatch_size: int | None = None,
    trainable: Any = None,
    constants: PyTree = None,
    most_records: int = 2**14,
    rng_name: str | tuple[str, ...] | None = forms.KEY_NAMES,
    mesh: jax.sharding.Mesh | None = None,
    data_axes: Sequence[str] | None = None,
) -> ClippedGrad:
    """A function that computes the sum of ``loss_fn``'s clipped per-example gradients.

    ================================  ===========================================================
    form of the loss                  what it is handed of one example
    ================================  ===========================================================
    ``(params, example)``             the example whole, whatever pytree it is
    ``(params, x, y)``, and so on     a tuple or list example of that length, taken apart; a dict
                                      with exactly these keys, by name
    ``(params, *, x, y)``             a dict with exactly these keys
    ``(params, x, train=True)``       optional arguments are left alone
    ``(params, batch=None)``          the first one takes the example where nothing is required
    ``(params, x, rng)``, ``key``,    by that name, wherever it stands, the key of the example;
    ``(params, x, *, rng=None)``      ``rng_name="dropout_key"`` for another name, None for no key
    ``(params, *args, **kwargs)``     the example whole as one argument; a key only by ``rng_name``
    ``functools.partial``             as what is left of it; a key that it has already stays
    bound methods, callable objects   as their signature without ``self``; Equinox modules too
    ``jax.jit(loss)``                 as the function inside
    no signature                      as ``(params, example)``
    ================================  ===========================================================

    Args:
        loss_fn: a scalar for **one** example, so that no layer can couple a batch, in one of the
            forms above; the key feeds dropout and augmentation. It may return ``(scalar, aux)``;
            aux is per example and as sensitive as the example.
        rule: the clipping rule, such as ``jaxdp.clip(0.1)``.
        engine: how gradient norms are computed, the same to rounding. "vmap": from per-example
            gradients by automatic differentiation, the reference. "ghost": without them, wherever
            the parameter is used in a way that allows it. "auto": whatever costs least, for every
            parameter by itself; ``ClippedGrad.plan`` says what that is.
        microbatch_size: rows worked on at a time inside one call, to bound the memory; None: all.
        trainable: what to train: a tree of bool (a prefix of the parameters) or a function of a
            leaf's path. Other leaves are frozen: no gradient, no norm, None in the sum. None trains
            everything. Frozen leaves are **assumed public**, computed from no record.
        constants: pytree of arrays and numbers that ``loss_fn`` captures, declared **public**
            (JAX's by identity, NumPy's by content, numbers by value). Others are assumed public,
            and named so by the plan and the ledger; one that holds the batch's rows, or a statistic
            of them, is refused.
        most_records: the largest number of records of one draw, public: the rounding of the sum is
            bounded for so many, and counts in ``Summed.l2``. A Mechanism gives its own.
        rng_name: the argument that takes a key, or names to look for; None for none.
        mesh: its devices share the rows of every batch: each clips its own, and the sums are added.
            None: where ``sum`` is given arrays that lie on a mesh, that one.
        data_axes: the axes of the mesh that rows are cut over; None takes "data", else the first.

    Returns:
        ``(params, batch, mask, rng=None) -> (Summed, ClipInfo)``, the mask only where the batch is
        no ``Batch``; see ``ClippedGrad``.

    Raises:
        ValueError: an argument is not what it should be, named with its value.

    Example:
        >>> loss_fn = lambda w, x, y: (x @ w - y) ** 2
        >>> grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.1))
        >>> batch = (jnp.ones((8, 3)), jnp.ones(8))
        >>> summed, info = grad_fn(jnp.zeros(3), batch, mask="all")
        >>> print(f"{summed.l2:.3f}")  # the clip norm, and a share of it for rounding
        0.104
        >>> info.norms.shape
        (8,)
    """
    microbatch_size = _checked(loss_fn, rule, engine, microbatch_size)
    most = arguments.integer("most_records", most_records, least=1)
    chosen = options.trainable(trainable)
    form, public = forms.form_of(loss_fn, rng_name), captured.declared(constants, loss_fn)
    loss_fn = forms.hashable(loss_fn)
    found = None if mesh is None else _placement.placement(mesh, data_axes)
    return ClippedGrad(loss_fn, rule, engine, microbatch_size, chosen, form, public, most, found)


def _checked(loss_fn: Any, rule: Any, engine: Any, microbatch_size: Any) -> int | None:
    """The microbatch size, where all are what they should be."""
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn must be a function (params, example), got {arguments.described(loss_fn)}"
        )
    if not callable(getattr(rule, "factors", None)) or not callable(getattr(rule, "l2", None)):
        raise ValueError(f"rule must be a clipping rule such as jaxdp.clip(0.1), got {rule!r}")
    arguments.one_of("engine", engine, ("auto", "ghost", "vmap"))
    if microbatch_size is None:
        return None
    return arguments.integer("microbatch_size", microbatch_size, least=1)
