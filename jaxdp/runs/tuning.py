"""``jaxdp.tune``: random search with random stopping; the chosen run alone is released, at a cost.

Papernot and Steinke 2022, "Hyperparameter tuning with Rényi differential privacy"
(arXiv:2110.03620v2). docs/proofs/accounting.md ("Tuning") holds the proofs of what is charged.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import optax

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.accounting.tuned import Tries
from jaxdp.devices import processes
from jaxdp.devices.shards import on_host
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm, as_algorithm
from jaxdp.optimizers.registry import Setting
from jaxdp.recipes import encoders
from jaxdp.runs import space as spaces
from jaxdp.runs.failures import in_words
from jaxdp.runs.run import Parts, Run, steps_within
from jaxdp.runs.space import Candidate, Law, LogUniform, Uniform
from jaxdp.runs.starts import INTERRUPTED, MOVED
from jaxdp.runs.tries import CHARGED_SCORE, SCORED, Chosen, Search, TuneDirectory, searched
from jaxdp.sampling import as_source, fingerprint
from jaxdp.sampling.hashes import check_repeatable
from jaxdp.training.trainer import look_through
from jaxdp.types import LossFn, PyTree

__all__ = ["Candidate", "Chosen", "Law", "LogUniform", "Uniform", "tune"]

Made = Algorithm | tuple[Mechanism, optax.GradientTransformation]
# Laws whose cost is proven. A law of one's own, such as one of these with a cap, is another.
_LAWS = (acc.Geometric, acc.Logarithmic, acc.NegativeBinomial, acc.PoissonTries)


def tune(
    folder: str | os.PathLike[str],
    loss_fn: LossFn,
    make: Callable[[Candidate], Made],
    source: PyTree,
    *,
    params: PyTree,
    space: Mapping[str, Law | Sequence[Setting]],
    score: Callable[..., float],
    tries: Tries,
    delta: float,
    steps: int | None = None,
    score_event: acc.Event | None = None,
    relation: acc.Relation = acc.Relation.ADD_OR_REMOVE_ONE,
    physical_batch_size: int | None = None,
    about: Mapping[str, Setting] | None = None,
    features: encoders.Encoder | str | None = None,
    missing_values: bool = False,
) -> Chosen:
    """Trains a secret, random number of candidates and releases the one with the best score.

    The number of tries K is drawn once from ``tries``. Every try draws a candidate from ``space``,
    trains it from ``params`` on its own randomness and scores it. While the search runs, nothing
    outside ``secret/`` changes and nothing is said. There is no way to end it early, nor to cap it:
    a cap changes the law of K. A search that was interrupted goes on with the same call: K and the
    tries that ended stay.

    Formal guarantee: what is returned, and the folder without ``secret/``, satisfy
    ``Chosen.bound`` at ``delta``, charged as one ``acc.Tuned`` before the first try (Theorems 2 and
    6 of the paper; the profile bound is in docs/proofs/accounting.md). Taken on trust: ``score``
    reads public data (or ``score_event`` says what it costs), ``make`` and ``space`` were fixed
    without the private data, no try fails by what a record holds (an error, not a bad score), and
    nobody saw how long the search took or when it was interrupted; ``unverified()`` says so.

    Args:
        folder: of the search; made if it is not there.
        loss_fn: the loss of one example, as for ``jaxdp.Trainer``.
        make: from a candidate to (mechanism, optimizer) or an ``Algorithm``. All candidates must
            release the same event: clip norm, rate and momentum may differ, noise, batch and steps
            may not.
        source: the records, as for ``jaxdp.Trainer``.
        params: the parameters before the first step of every try, computed from no record.
        space: hyper-parameters by name: a ``LogUniform``, a ``Uniform`` or a list of choices.
        score: from the parameters to a number, the larger the better, computed on **public** data;
            with ``score_event`` from (parameters, NumPy generator). Not finite is the worst.
        tries: law of K: ``acc.Geometric``, ``Logarithmic``, ``NegativeBinomial``, ``PoissonTries``.
        delta: of the guarantee, of the whole search.
        steps: of every try; None takes those that the noise was calibrated for.
        score_event: release of a noisy score on private records, added to each try's event.
        relation: which data sets are neighbours.
        physical_batch_size: as for ``jaxdp.Run``.
        about: further public words, kept with the result.
        features: as for ``jaxdp.Run``.
        missing_values: as for ``jaxdp.Run``; records are looked through before the search is
            charged.

    Returns:
        The best try; its candidate is None if none gave a score (also where K = 0).

    Raises:
        ValueError: an argument is not what it should be, candidates release different events, or no
            bound is proven for the event; nothing is charged by then. The folder holds another
            tuning, or one on other data.
    """
    arguments.fraction("delta", delta)
    encoders.require_used(features)
    relation, params = acc.Relation(relation), jax.tree.map(np.asarray, params)
    if type(tries) not in _LAWS:
        names = [law.__name__ for law in _LAWS]
        raise ValueError(
            f"tries must be one of {names}, whose cost is proven (one with a cap is another law), "
            f"got {tries!r}"
        )
    if processes.count() > 1:
        raise ValueError(f"processes must be one to tune, got {processes.count()}")
    laws, records = spaces.checked(space), as_source(source)
    trained_event, steps = _event_of_all(make, laws, steps)

    # What one try costs, its score included.
    event = trained_event
    if score_event is not None:
        event = acc.Composed((trained_event, score_event))
    else:  # tried once, on parameters that no record has moved
        try:
            float(score(params))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"score must return one number for the parameters given, got an error: {error}"
            ) from error

    _made(make, next(spaces.corners(laws))).mechanism.check_source(records)
    check_repeatable(records)
    about = dict(about or {})
    try:
        json.dumps(about)
    except (TypeError, ValueError) as error:
        raise ValueError(f"about must be words and numbers, got {about!r}: {error}") from error

    def trial(place: Path, candidate: Candidate) -> tuple[PyTree, float, list[str]]:
        """One try: what it trained, its score, and what it took on trust."""
        algorithm = _made(make, candidate)
        if algorithm.total(steps) != trained_event:
            raise ValueError("a candidate of another event is the worst try")
        run = Run(
            place,
            loss_fn,
            algorithm,
            source=records,
            params=params,
            # Shows nothing: how many steps were taken tells how many tries.
            progress=lambda step, row: None,
            physical_batch_size=physical_batch_size,
            report=False,
            _parts=Parts(looked_through=True),
        )
        trained = on_host(run.fit(steps))
        # Interruptions are spoken of from the beginning: a line now would tell of one.
        trusted = [said for said in run.unverified() if said not in (INTERRUPTED, MOVED)]
        # Fresh randomness for the noise that a charged score adds.
        fresh = () if score_event is None else (np.random.default_rng(),)
        return trained, float(score(trained, *fresh)), trusted

    search = Search(
        event,
        tries,
        laws,
        delta,
        relation,
        trial,
        lambda secret: fingerprint(records, secret),
        params,
        about,
        (
            SCORED if score_event is None else CHARGED_SCORE,
            *(() if features is None else (encoders.public(features),)),
        ),
    )
    directory = TuneDirectory(folder)
    if not directory.exists():  # a try that is refused would be one that failed
        look_through(records, missing_values)
    return in_words(directory.path, lambda: searched(directory, search))


def _made(make: Callable[[Candidate], Made], candidate: Candidate) -> Algorithm:
    made = make(dict(candidate))
    if isinstance(made, Algorithm):
        return made
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(
            "make must return an Algorithm or (mechanism, optimizer), got "
            f"{arguments.described(made)}"
        )
    return as_algorithm(*made)


def _event_of_all(
    make: Callable[[Candidate], Made], laws: Mapping[str, Law], steps: int | None
) -> tuple[acc.Event, int]:
    """The event that every candidate releases, and its steps.

    Raises:
        ValueError: two candidates release different ones, or one leaks un-noised statistics.
    """
    first: tuple[Candidate, acc.Event, int] | None = None
    for candidate in spaces.corners(laws):
        algorithm = _made(make, candidate)
        if algorithm.mechanism.leak:
            raise ValueError(
                f"make must return a private mechanism, got one with {algorithm.mechanism.leak}"
            )
        count = steps_within(algorithm.mechanism.steps, steps)
        event = algorithm.total(count)
        if first is None:
            first = candidate, event, count
        if event != first[1]:
            raise ValueError(
                "make must return the same noise, sampling and steps for every candidate, so that "
                f"one curve bounds them all; {first[0]} and {candidate} release {first[1]} and "
                f"{event}"
            )
    assert first is not None
    return first[1], first[2]
