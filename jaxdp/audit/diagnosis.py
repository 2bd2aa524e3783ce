"""``jaxdp.diagnose``: the mistakes and numbers that keep a private model from learning."""

import dataclasses
import importlib
import os
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
import optax

from jaxdp import arguments
from jaxdp.audit.examined import Examined
from jaxdp.audit.findings import Finding, certain_first
from jaxdp.clipping import ClippedGrad
from jaxdp.clipping.options import check_option_names
from jaxdp.ledger import Ledger
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sampling import Source, as_source
from jaxdp.sampling import neighbours as near
from jaxdp.types import PyTree

SENSITIVE = "SENSITIVE: for the owner of the records"
LOOKED = "hyper-parameters may have been chosen by looking at the records"
_MOST_GROUPS = 100  # that integers of records may be, where nobody says what they are


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis:
    """The answer of ``jaxdp.diagnose``; ``str`` gives it as one page. **Sensitive**.

    No epsilon covers what is broken: it was seen in the records themselves.

    Attributes:
        findings: the mistakes, then advice from numbers; each worst first.
        numbers: the numbers, as a table; "" where none were asked for.
        cost: where the numbers come from, and what they cost, one sentence.
        seconds: the time that it took.
    """

    findings: tuple[Finding, ...]
    numbers: str = ""
    cost: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True if nothing was found, neither a mistake nor advice."""
        return not self.findings

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The mistakes in the program or the records."""
        return tuple(f for f in self.findings if f.certain)

    def __str__(self) -> str:
        head = f"{len(self.broken)} broken" if self.broken else "nothing broken"
        advice = len(self.findings) - len(self.broken)
        head += f", {advice} to improve" if advice else ""
        lines = [f"{SENSITIVE}. {head} ({self.seconds:.1f} s)", *map(str, self.findings)]
        lines += [self.numbers] if self.numbers else []
        return "\n".join([*lines, self.cost])

    __repr__ = __str__  # what a notebook shows says that it is sensitive, too


def diagnose(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    data: Source | PyTree,
    mechanism: Mechanism | Algorithm,
    optimizer: optax.GradientTransformation | None = None,
    *,
    public: Source | PyTree | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    look: bool = False,
    group: Callable[[PyTree], int] | None = None,
    groups: int | None = None,
    same: Callable[[PyTree], Hashable] | None = None,
    records: int = 512,
    epsilon: float = 0.1,
    **clipping: Any,
) -> Diagnosis:
    """Finds what keeps a private model from learning: mistakes, and numbers where they are asked.

    A mistake (a gradient that is not finite, and its line; a loss that needs a batch; a record that
    stands twice) is told without numbers. Numbers (norms, shares, signal to noise) set
    hyper-parameters, which then depend on the records they were computed from: they are computed
    from ``public`` records; or from private ones, released with noise and charged to ``ledger``; or
    with ``look`` from private ones without noise, which the ledger then says for good.

    Args:
        loss_fn: the loss of one example, as for ``jaxdp.Trainer``.
        params: pytree of the parameters.
        data: the private records, as for ``jaxdp.Trainer``.
        mechanism: from ``jaxdp.dp_sgd``, or a ``jaxdp.Algorithm``.
        optimizer: what the noisy gradient goes into; None for an ``Algorithm``, or not known.
        public: public, or synthetic, records of the same form, from which numbers are computed.
        ledger: a ``jaxdp.Ledger`` or its path, which is charged for the numbers; with ``look`` it
            says that they were looked at.
        look: True computes numbers from the private records, without noise.
        group: from one record to the number of its group, such as its class, in [0, groups). None
            takes the one integer scalar of a record, if there is one.
        groups: their **public** number; without it a charged release has one group.
        same: from one record to a hashable key that near duplicates share.
        records: the number of records that are looked at; the expected number, where charged.
        epsilon: of the charged release alone, at the mechanism's ``delta``.
        clipping: as for ``jaxdp.Trainer``: ``trainable``, ``constants``, ``rng_name``, ``engine``.

    Raises:
        ValueError: an argument is not what it should be; nothing is charged then.

    Example:
        >>> data = {"x": jnp.ones((1_000, 3)), "y": jnp.ones(1_000)}
        >>> loss_fn = lambda w, example: jnp.log(example["x"] @ w - example["y"])
        >>> mechanism = jaxdp.dp_sgd(
        ...     noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=100, dataset_size=1_000
        ... )
        >>> isinstance(jaxdp.diagnose(loss_fn, jnp.zeros(3), data, mechanism).broken, tuple)
        True
    """
    began = time.perf_counter()

    # Arguments, before anything of the user's runs.
    if not callable(loss_fn):
        raise ValueError(f"loss_fn must be a function, got {arguments.described(loss_fn)}")
    if not isinstance(mechanism, Mechanism | Algorithm):
        raise ValueError(
            f"mechanism must come from jaxdp.dp_sgd, or be a jaxdp.Algorithm, got {mechanism!r}"
        )
    if not isinstance(look, bool):
        raise ValueError(f"look must be True or False, got {arguments.described(look)}")
    if look and ledger is None:
        raise ValueError(
            "ledger must be given with look=True, got none: there would be nowhere to say that "
            f"{LOOKED}"
        )
    if public is not None and (look or ledger is not None):
        raise ValueError(
            "public must be given without ledger= and look=True, got both: numbers from public "
            "records cost nothing, and nothing is to be said of them"
        )
    for name, function in (("group", group), ("same", same)):
        if function is not None and not callable(function):
            raise ValueError(
                f"{name} must be a function of one record, got {arguments.described(function)}"
            )
    groups = None if groups is None else arguments.integer("groups", groups, least=1)
    records = arguments.integer("records", records, least=2)
    arguments.positive("epsilon", epsilon)
    check_option_names("jaxdp.diagnose", clipping)
    inner = mechanism.mechanism if isinstance(mechanism, Algorithm) else mechanism
    grad_fn = mechanism.clipped_grad(loss_fn, **clipping)
    if not isinstance(grad_fn, ClippedGrad):
        raise ValueError(
            "mechanism must clip the gradients of one loss to be diagnosed, got one whose "
            f"clipped_grad is a {type(grad_fn).__name__}"
        )

    def examined(source: Source) -> Examined:
        """The program, with some of a source's records."""
        some = near.records_of(source, records)
        return Examined(grad_fn, params, inner, optimizer, some, _group_of(some, group, groups))

    # Mistakes, seen in the private records; told without numbers.
    source = as_source(data)
    inner.check_privacy_unit(source)
    private = examined(source)
    found: list[Finding] = [
        *_part("broken", "find_broken")(private),
        *_part("copies", "find_copies")(source, same),
    ]

    # Numbers, from records that may be looked at.
    numbers, cost = "", "No numbers: public=, ledger= or look=True computes them."
    if not look:
        found = [dataclasses.replace(each, count=None) for each in found]
    if public is not None:
        shown = examined(as_source(public))
        cost = "Numbers of public records: they cost nothing."
    elif look:
        book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        book.trust(LOOKED)
        shown = private
        cost = f"Numbers of the private records: the ledger says that {LOOKED}."
    if public is not None or look:
        measured = _part("gradient_numbers", "measure")(shown)
        found += _part("gradient_numbers", "find_in_numbers")(measured, inner)
        found += _part("rehearsal", "find_in_rehearsal")(_part("rehearsal", "rehearse")(shown))
        numbers = str(measured or "")
    size = sum(leaf.size for leaf in private.trained())
    found += _part("advice", "find_without_data")(inner, size)
    return Diagnosis(certain_first(found), numbers, cost, time.perf_counter() - began)


def _part(module: str, name: str) -> Callable[..., Any]:
    """A function of a module of this room, or one that finds nothing."""
    try:
        return getattr(importlib.import_module(f"jaxdp.audit.{module}"), name)
    except ModuleNotFoundError:
        return lambda *args: []


def _group_of(
    records: PyTree, group: Callable[[PyTree], int] | None, groups: int | None
) -> np.ndarray | None:
    """The group of each record, int [m]; None where they have none."""
    if group is not None:
        each = (group(near.record(records, i)) for i in range(near.count(records)))
        return np.array([int(found) for found in each], np.int64)
    whole = [
        leaf for leaf in map(np.asarray, jax.tree.leaves(records))
        if leaf.ndim == 1 and leaf.dtype.kind in "biu"
    ]  # fmt: skip
    if len(whole) != 1:
        return None
    values = whole[0].astype(np.int64)
    few = len(np.unique(values)) <= min(_MOST_GROUPS, len(values) // 2) and values.min() >= 0
    return values if few or groups is not None else None
