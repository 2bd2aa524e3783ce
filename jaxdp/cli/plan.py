"""``jaxdp plan``: the error of the noise by mechanism, for one budget."""

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from jaxdp import arguments

if TYPE_CHECKING:
    from jaxdp.mechanism import Mechanism
    from jaxdp.noise import Workload

_STRICT, _WEAK = "add_or_remove_one", "replace_special"


@dataclasses.dataclass(frozen=True)
class _Budget:
    """The numbers that every mechanism is calibrated for."""

    epsilon: float
    delta: float
    steps: int
    batch_size: int
    dataset_size: int


@dataclasses.dataclass(frozen=True)
class _Row:
    """A line of the table; errors are in clip norms."""

    name: str
    relation: str
    noise_multiplier: float
    rms_error: float
    max_error: float
    epsilon: float
    memory: int
    strategy: str | None
    bands: int | None
    charged_steps: int
    batch_size: int


@click.command()
@click.option("--epsilon", type=float, required=True, help="Of the budget.")
@click.option("--delta", type=float, required=True, help="Of the budget.")
@click.option("--steps", type=int, required=True, help="Number of steps (not epochs).")
@click.option("--batch-size", type=int, required=True, help="Expected batch size.")
@click.option("--dataset-size", type=int, required=True, help="Declared number of records.")
@click.option("--momentum", type=float, default=0.0, show_default=True, help="Of SGD.")
@click.option("--json", "as_json", is_flag=True, help="The last line is one JSON object.")
@click.option("--explain", is_flag=True, help="Say whether a model can learn, and what would help.")
@click.option("--parameters", type=int, help="Trained parameters, for --explain.")
@click.option("--linear", type=int, help="Numbers an example: say a linear model's learning rate.")
def plan(
    as_json: bool, explain: bool, parameters: int | None, linear: int | None, **numbers: Any
) -> None:
    """Compare the noise of DP-SGD and of correlated noise for one budget.

    The error is the standard deviation of the noise in the sum of all clipped gradients up to a
    step (with --momentum: in the parameters), in clip norms: root mean square over the steps, and
    the largest. It takes about ten seconds. Example:

    \b
      jaxdp plan --epsilon 2 --delta 1e-5 --steps 2000 --batch-size 500 --dataset-size 50000

    With --explain --parameters N it says instead how long the noise is beside the longest signal
    that N trained parameters can have, and which changes help: a larger batch, fewer steps or
    parameters, correlated noise. With --linear N it says the learning rate of DP-SGD for a linear
    model on N numbers an example whose mean square is about 1. Nobody's data are read.
    """
    _check(**numbers)
    if linear is not None:
        if as_json or explain:
            raise ValueError("linear must not be given with --json or --explain")
        _rate(arguments.integer("linear (--linear)", linear, least=1), **numbers)
        return
    if explain:
        if as_json:
            raise ValueError("json must not be given with --explain, which prints a page of words")
        _explain(arguments.integer("parameters (--parameters)", parameters, least=1), **numbers)
        return
    click.echo("jaxdp: calibrating six mechanisms: about ten seconds", err=True)
    rows, refused = [], {}
    momentum = numbers["momentum"]
    budget = _Budget(**{k: v for k, v in numbers.items() if k != "momentum"})
    for name, make in _makers(momentum, budget):
        try:
            rows.append(make())
        except ValueError as error:
            refused[name] = str(error)
    if not rows:
        raise ValueError(next(iter(refused.values())))
    best = _best(rows, _STRICT)
    if as_json:
        found = [dataclasses.asdict(row) for row in rows]
        answer = {**numbers, "rows": found, "refused": refused, "best": best and best.name}
        click.echo(json.dumps(answer, allow_nan=False))
        return
    _show(rows, refused)
    _advise(rows, best, budget)


def _check(
    epsilon: float, delta: float, steps: int, batch_size: int, dataset_size: int, momentum: float
) -> None:
    arguments.positive("epsilon", epsilon)
    arguments.fraction("delta", delta)
    arguments.integer("steps", steps, least=1)
    arguments.integer("dataset_size", dataset_size, least=1)
    if arguments.integer("batch_size", batch_size, least=1) > dataset_size:
        raise ValueError(
            f"batch_size must be at most dataset_size ({dataset_size}), got {batch_size}"
        )
    if arguments.non_negative("momentum", momentum) >= 1:
        raise ValueError(f"momentum must be at least 0 and below 1, got {momentum!r}")


def _explain(parameters: int, momentum: float, **budget: Any) -> None:
    """Prints what public numbers say of DP-SGD with this budget."""
    from jaxdp.audit.advice import explain
    from jaxdp.mechanism import dp_sgd

    if momentum:
        raise ValueError(f"momentum must be 0 with --explain, got {momentum}")
    click.echo("jaxdp: calibrating: some seconds", err=True)
    click.echo(explain(dp_sgd(l2_clip_norm=1.0, **budget), parameters))


def _rate(count: int, momentum: float, **budget: Any) -> None:
    """Prints the learning rate of a linear model on so many numbers an example."""
    from jaxdp.mechanism import dp_sgd
    from jaxdp.recipes import linear

    noise = dp_sgd(l2_clip_norm=1.0, **budget).noise_multiplier
    assert isinstance(noise, float)
    of_run = {"steps": budget["steps"], "batch_size": budget["batch_size"], "momentum": momentum}
    rate = linear.rate(noise, l2_clip_norm=0.1, numbers=count, **of_run)
    click.echo(
        f"noise multiplier {noise:.4g}\nlearning rate {rate:.3g} at clipping norm 0.1 (inversely "
        f"for others), SGD with momentum {momentum:g}: noise of standard deviation "
        f"{linear.SCORE_NOISE} in a score"
    )


def _makers(momentum: float, budget: _Budget) -> Iterator[tuple[str, Callable[[], _Row]]]:
    """(name, what makes the row), one for each mechanism."""
    from jaxdp.mechanism import dp_mf, dp_sgd
    from jaxdp.noise import Workload

    workload = Workload(momentum)
    given = {"l2_clip_norm": 1.0, **vars(budget)}

    def independent(name: str, sampling: str) -> _Row:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of whole epochs, said below
            mechanism = dp_sgd(sampling=sampling, **given)
        return _row(name, mechanism, _STRICT, workload, budget)

    def correlated(name: str, sampling: str, strategy: str) -> _Row:
        mechanism = dp_mf(sampling=sampling, strategy=strategy, workload=workload, **given)
        relation = _STRICT if sampling == "cyclic_poisson" else _WEAK
        return _row(name, mechanism, relation, workload, budget, strategy)

    yield "DP-SGD", lambda: independent("DP-SGD, Poisson sampling", "poisson")
    yield "allocation", lambda: independent("DP-SGD, random allocation", "allocation")
    yield "BandMF", lambda: correlated("BandMF, cyclic Poisson", "cyclic_poisson", "banded")
    yield "BLT", lambda: correlated("BLT, fixed order", "fixed_order", "buffered")
    yield "lambda", lambda: correlated("λCGD, fixed order", "fixed_order", "lambda")
    yield "banded", lambda: correlated("banded, fixed order", "fixed_order", "banded")


def _row(
    name: str,
    mechanism: "Mechanism",
    relation: str,
    workload: "Workload",
    budget: _Budget,
    kind: str | None = None,
) -> _Row:
    from jaxdp import accounting as acc
    from jaxdp.audit.advice import noise_of_sums
    from jaxdp.noise.correlated import recurrence

    strategy = mechanism.strategy
    memory = 0 if strategy is None else recurrence(strategy).size
    # A buffered strategy is named by its buffers.
    named = kind not in (None, "lambda")
    bands = memory if kind == "buffered" else strategy.bands if named and strategy else None
    steps = mechanism.steps or budget.steps
    # An allocation may make smaller batches, whose sums are smaller too.
    share = budget.batch_size / mechanism.batch_size
    rms, largest = (share * error for error in noise_of_sums(mechanism, budget.steps, workload))
    assert isinstance(mechanism.noise_multiplier, float)
    return _Row(
        name,
        relation,
        mechanism.noise_multiplier,
        rms,
        largest,
        mechanism.epsilon(steps, budget.delta, acc.Relation(relation)).upper,
        memory,
        kind,
        bands,
        steps,
        mechanism.batch_size,
    )


def _best(rows: list[_Row], relation: str) -> _Row | None:
    candidates = [row for row in rows if row.relation == relation]
    return min(candidates, key=lambda row: row.rms_error, default=None)


_LINE = "{:34}{:19}{:>10}{:>11}{:>11}{:>9}{:>8}"


def _show(rows: list[_Row], refused: dict[str, str]) -> None:
    heads = ("", "relation", "noise", "RMS error", "max error", "epsilon", "memory")
    click.echo(_LINE.format(*heads))
    for row in rows:
        click.echo(
            _LINE.format(
                _named(row),
                row.relation,
                f"{row.noise_multiplier:.5f}",
                f"{row.rms_error:.4f}",
                f"{row.max_error:.4f}",
                f"{row.epsilon:.4f}",
                str(row.memory),
            )
        )
    for name, reason in refused.items():
        click.echo(f"{name}: not possible: {reason}")
    click.echo(
        "noise: of independent noise over the clip norm, of correlated noise over the strategy's "
        "sensitivity;\nnot to be compared with each other. Errors in clip norms; memory in copies "
        "of the parameters."
    )


def _named(row: _Row) -> str:
    if row.bands is None:
        return row.name
    head, tail = row.name.split(", ")
    number = "buffer" if row.strategy == "buffered" else "band"
    return f"{head}, {row.bands} {number}{'s' * (row.bands != 1)}, {tail}"


def _advise(rows: list[_Row], best: _Row | None, budget: _Budget) -> None:
    for row in rows:
        if (row.charged_steps, row.batch_size) != (budget.steps, budget.batch_size):
            click.echo(
                f"{row.name}: whole epochs, {row.charged_steps:,} steps with {row.batch_size:,} "
                f"records each; the error is for the {budget.batch_size:,} asked for."
            )
    if best is not None:
        click.echo(f"Least error under {_STRICT}: take {_named(best)}, {_train(best)}.")
    other = _best(rows, _WEAK)
    if other is not None:
        click.echo(
            f"Under {_WEAK} the least is {other.rms_error:.4f}, of {_named(other)}: another, "
            "weaker promise,\nwhere the number of records is public and a record is replaced by a "
            "null record, not removed."
        )


def _train(row: _Row) -> str:
    """The options of `jaxdp train` for a row."""
    if row.strategy is not None:
        bands = "" if row.bands is None else f" --bands {row.bands}"
        return f"`jaxdp train --strategy {row.strategy}{bands}`"
    sampling = "allocation" if "allocation" in row.name else "poisson"
    return f"`jaxdp train --sampling {sampling}`"
