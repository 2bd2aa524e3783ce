"""``jaxdp.diagnose``: the mistakes and numbers that keep a private model from learning."""

import contextlib
import dataclasses
import operator
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
import optax

from jaxdp import arguments
from jaxdp.audit import charged
from jaxdp.audit.advice import find_without_data
from jaxdp.audit.broken import find_broken
from jaxdp.audit.copies import find_copies
from jaxdp.audit.examined import Examined, require_program, sample
from jaxdp.audit.findings import Finding
from jaxdp.audit.gradient_numbers import find_in_numbers, measure
from jaxdp.audit.rehearsal import find_in_rehearsal, rehearse
from jaxdp.clipping.options import check_params, trained_flags
from jaxdp.devices import processes
from jaxdp.ledger import Ledger
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sampling import Source, as_source
from jaxdp.sampling import neighbours as near
from jaxdp.types import PyTree

SENSITIVE = "SENSITIVE: for the owner of the records"
LOOKED = "hyper-parameters may have been chosen by looking at the records"
_SHOWN, _LINES = 6, 40  # findings and lines that a page has room for
_QUIET = 4.0  # seconds, from which on a diagnosis says what it is at
_MOST_GROUPS = 100  # that integers of records may be, where nobody says what they are
_MOST_TOLD = 1_000  # where somebody does


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
        lines = [f"{SENSITIVE}. {head} ({self.seconds:.1f} s)", *map(str, self.findings[:_SHOWN])]
        if rest := [finding.kind for finding in self.findings[_SHOWN:]]:
            lines.append(f"and less: {', '.join(rest)} (.findings has all)")
        table = self.numbers.splitlines()
        room = max(_LINES - 1 - sum(line.count("\n") + 1 for line in lines), _LINES // 4)
        if len(table) > room:
            table[room - 1 :] = ["... (.numbers has all)"]
        return "\n".join([*lines, *table, self.cost])

    __repr__ = __str__  # what a notebook shows says that it is sensitive, too


def diagnose(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    data: Source | PyTree,
    mechanism: Mechanism | Algorithm,
    optimizer: optax.GradientTransformation | None = None,
    *,
    public: Source | PyTree | None = None,
    ledger: "Ledger | KeepsLedger | str | os.PathLike[str] | None" = None,
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

    Formal guarantee: with ``ledger`` and without ``look`` numbers, and advice from them, satisfy
    ``epsilon`` at the mechanism's delta, under its relation (docs/proofs/releases.md, "A
    diagnosis"). What is broken was seen in the records, and no epsilon covers it. Where noise or
    steps are chosen by the numbers see docs/accounting.md, "Adaptive runs".

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
        group: from one record, and public constants, to the number of its group, such as its class,
            in [0, groups). None takes the one integer scalar of a record, if there is one.
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
    processes.require_single_process("a diagnosis")
    if loss_fn is None:
        raise ValueError("loss_fn must be a function, got None")
    functions = {"loss_fn": loss_fn, "group": group, "same": same}
    inner, grad_fn = require_program("jaxdp.diagnose", functions, mechanism, clipping)
    assert grad_fn is not None
    if optimizer is not None and not callable(getattr(optimizer, "update", None)):
        raise ValueError(
            "optimizer must be an optax optimizer such as optax.adam(1e-3), or None, got "
            f"{arguments.described(optimizer)}"
        )
    if not isinstance(look, bool):
        raise ValueError(f"look must be True or False, got {arguments.described(look)}")
    if ledger is not None and not isinstance(ledger, Ledger | KeepsLedger | str | os.PathLike):
        raise ValueError(
            f"ledger must be a jaxdp.Ledger or a path, got {arguments.described(ledger)}"
        )
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
    groups = None if groups is None else arguments.integer("groups", groups, least=1)
    if groups is not None and groups > _MOST_TOLD:
        raise ValueError(f"groups must be at most {_MOST_TOLD:,}, got {groups:,}")
    records = arguments.integer("records", records, least=2)
    epsilon = arguments.positive("epsilon", epsilon)
    if isinstance(mechanism, Algorithm) and optimizer is None:
        optimizer = mechanism.after_noise
    check_params(params, trained_flags(grad_fn.trainable, params))
    source = as_source(data)
    inner.check_privacy_unit(source)
    open_source = None if public is None else as_source(public)
    if open_source is not None and _form(open_source.example) != _form(source.example):
        raise ValueError(
            f"public must hold records like data's, {jax.tree.map(str, source.example)}, got "
            f"{jax.tree.map(str, open_source.example)}"
        )
    if open_source is not None and len(open_source) < 2:
        raise ValueError(f"public must hold at least 2 records, got {len(open_source)}")
    group = _group_function(source.example, group)

    def say(what: str) -> None:
        """Says on stderr what a diagnosis that takes long is at."""
        if time.perf_counter() - began > _QUIET:
            print(f"jaxdp: diagnosis: {what}", file=sys.stderr)

    def examined(source: Source) -> Examined:
        """The program, with some of a source's records."""
        some = sample(source, records)
        return Examined(grad_fn, params, inner, optimizer, some, _groups_of(some, group, groups))

    # That the records are looked at is said for good, and on the page, before a number is computed.
    if look:
        with _opened(ledger, charges=False) as book:
            book.trust(LOOKED)

    # Mistakes, seen in the private records; what they say of a program has no numbers of records.
    private = examined(source)
    found = [find_broken(private)]
    say("looking for copies among the records")
    found.append(find_copies(source, same, inner if look else None))
    unnamed = set() if look else {finding for part in found for finding in part}

    # Numbers: of public records, of private ones that are looked at, or of one noisy release.
    numbers: list[str] = []
    cost = "No numbers: public=, ledger= or look=True computes some."
    if look or open_source is not None:
        shown = private if open_source is None else examined(open_source)
        say("rehearsing the training")
        rehearsal = rehearse(shown)
        found.append(find_in_rehearsal(rehearsal))
        say("computing gradients")
        measured = measure(shown)
        found.append(find_in_numbers(measured))
        numbers = [str(measured), str(rehearsal)]
        cost = "Numbers of public records, which cost nothing."
        if look:
            cost = f"Numbers of the private records, without noise: the ledger says that {LOOKED}."
    elif ledger is not None:
        with _opened(ledger, charges=True) as book:
            release = charged.plan(inner, book, records, epsilon)
            say("computing gradients")
            measured = charged.measure_noisily(
                release, private, source, book, group if groups else None, groups or 1, clipping
            )
        found.append(find_in_numbers(measured))
        numbers, cost = [str(measured)], str(release)
    size = sum(leaf.size for leaf in private.trained())
    found.append(find_without_data(inner, size))

    # Of one kind what was found first, a line of the program before numbers of records, and these
    # before public numbers alone; it weighs what the heaviest does.
    first: dict[str, list[Finding]] = {}
    weights: dict[str, float] = {}
    for part in found:
        for each in part:
            first.setdefault(each.kind, part)
            weights[each.kind] = max(each.weight, weights.get(each.kind, 0.0))
    once = [each for part in found for each in part if first[each.kind] is part]
    # Un-noised and not to be looked at: before the numbers, for a place among them tells a weight.
    once.sort(key=lambda each: (not each.certain, each not in unnamed, -weights[each.kind]))
    worst = tuple(
        dataclasses.replace(each, count=None, weight=0.0) if each in unnamed else each
        for each in dict.fromkeys(once)
    )
    return Diagnosis(worst, "\n".join(numbers), cost, time.perf_counter() - began)


@runtime_checkable
class KeepsLedger(Protocol):
    """A ``jaxdp.Run``: its folder has the ledger, and a page that says what the ledger does."""

    def opened_ledger(self, charges: bool) -> contextlib.AbstractContextManager[Ledger]:
        """The ledger, open, to be charged or only to be noted in; then the page says what it does.

        Args:
            charges: True if it is to be charged.
        """


@contextlib.contextmanager
def _opened(
    ledger: "Ledger | KeepsLedger | str | os.PathLike[str] | None", charges: bool
) -> Iterator[Ledger]:
    """The ledger, to be written to; one that was given as an object stays as it is."""
    if isinstance(ledger, Ledger):
        yield ledger
    elif isinstance(ledger, KeepsLedger):
        with ledger.opened_ledger(charges) as book:
            yield book
    else:
        with contextlib.closing(Ledger(ledger)) as book:
            yield book


def _form(example: PyTree) -> tuple[Any, list[tuple[tuple[int, ...], bool]]]:
    """(structure, shapes of the leaves, and whether they are whole numbers) of one example."""
    leaves, structure = jax.tree.flatten(example)
    return structure, [(leaf.shape, np.dtype(leaf.dtype).kind in "biu") for leaf in leaves]


def _group_function(
    example: PyTree, group: Callable[[PyTree], int] | None
) -> Callable[[PyTree], int] | None:
    """The function from a record to its group: the one given, or the one integer scalar."""
    leaves = jax.tree.leaves(example)
    at = [i for i, leaf in enumerate(leaves) if leaf.shape == () and leaf.dtype.kind in "biu"]
    if group is not None or len(at) != 1:
        return group
    return lambda record: int(jax.tree.leaves(record)[at[0]])


def _groups_of(
    records: PyTree, group: Callable[[PyTree], int] | None, groups: int | None
) -> np.ndarray | None:
    """The group of each record, int [m], -1 for one beyond ``groups``; None where there are none.

    Raises:
        ValueError: the function fails, gives no integer, or another when it is asked again; no
            message holds what a record is.
    """
    if group is None:
        return None
    try:
        rows = [near.record(records, i) for i in range(near.count(records))]
        values, again = (
            np.array([operator.index(np.asarray(group(row)).item()) for row in order], np.int64)
            for order in (rows, rows[::-1])
        )
    except Exception as error:
        raise ValueError(
            f"group must return an integer for every record, got a {type(error).__name__}"
        ) from None
    # The sum of a charged release would move with a record that moves the groups of others.
    if (values != again[::-1]).any():
        raise ValueError(
            "group must give a record the same number whichever records it was asked before, got a "
            "function that does not: compute the number from that record and public constants"
        )
    if groups is not None:
        return np.where((values >= 0) & (values < groups), values, -1)
    # Without their number integers are groups where few of them stand for many records.
    most = min(_MOST_GROUPS, len(values) // 2)
    return values if values.min() >= 0 and values.max() < most else None
