"""Runs with correlated noise: interrupted, gone on with, put back, and taken apart by somebody."""

import dataclasses
import functools
import itertools
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp import runs
from jaxdp.ledger.entries import event_counts
from jaxdp.ledger.tickets import Issuer, Ticket
from jaxdp.noise import Dense, FixedEpochOrder, sensitivity
from jaxdp.runs import RunDirectory
from jaxdp.runs.assemble import rehearse
from jaxdp.sampling import as_source
from tests.laws import are_uncorrelated, is_gaussian
from tests.mechanisms import mf_of
from tests.refusing import refused
from tests.runs import own, small
from tests.runs.small import Killed, Stop, crash_at
from tests.runs.test_config import with_strategy

N, BATCH, STEPS, WIDE = 60, 6, 12, 4000
DATA = {"x": np.arange(N, dtype=np.float32)}
ZERO_OUT = acc.Relation.REPLACE_SPECIAL
run = functools.partial(own.run, optimizer=optax.sgd(1.0))


def flat_loss(w, example):
    """The gradient is zero: what moves the parameters is noise."""
    return 0.0 * jnp.sum(w) + 0.0 * example["x"]


def mechanism(sampling="cyclic_poisson", **options):
    return mf_of(1.0, 1.0, BATCH, N, sampling, steps=STEPS, **options)


EVERY = {
    "amplified": mechanism(bands=3),
    "in order": mechanism("fixed_order", strategy="buffered", bands=2),
    "in order, made again": mechanism("fixed_order", strategy="lambda"),
    "amplified on the grid": mechanism(bands=3, noise="grid"),
    "in order on the grid": mechanism("fixed_order", strategy="banded", bands=2, noise="grid"),
    "alone": mechanism(bands=1),  # noise that looks back at no step
}
IN_ORDER = [name for name in EVERY if name.startswith("in order")]


def made(folder, mechanism, shown=None, **options):
    def evaluate(params):
        shown.append(np.asarray(params))
        return {}

    given = {"params": jnp.zeros(WIDE), "relation": ZERO_OUT, **options}
    given |= {} if shown is None else {"evaluate": evaluate, "every": 1}
    return run(folder, DATA, mechanism, flat_loss, **given)


def normals(mechanism, trajectory):
    """Z [n, parameters], from the parameters after every step."""
    moved = -np.diff(np.stack([np.zeros(WIDE), *trajectory]).astype(float), axis=0) * BATCH
    rows = mechanism.strategy.matrix()[: len(moved), : len(moved)] @ moved
    part = next(iter(mechanism.multipliers(0).values()))
    return rows / (part * mechanism.l2(jnp.zeros(3)))


def charges(folder):
    return event_counts(RunDirectory(folder).checked_ledger().entries)


def fitted(one, steps):
    """Fits to so many steps; what puts the checkpoints that it then has back."""
    one.fit(steps)
    return small.kept(one.directory.checkpoints)


@pytest.mark.parametrize("name", EVERY)
def test_a_run_goes_on_with_the_noise_that_it_had(tmp_path, name):
    """What the strategy makes of a run, also of one that stopped, is independent noise."""
    mechanism, shown = EVERY[name], []
    for step in (1, 8):
        with pytest.raises(Stop):
            made(tmp_path / "r", mechanism, shown, progress=crash_at(step)).fit()
        made(tmp_path / "r", mechanism, shown).fit(5 if step == 1 else None)
    # The last parameters are shown once more at the start: a crash may have come before.
    trajectory = [shown[0]] + [b for a, b in itertools.pairwise(shown) if (a != b).any()]
    assert len(trajectory) == STEPS
    found = normals(mechanism, trajectory)
    assert is_gaussian(found, 1.0)
    assert all(are_uncorrelated(*pair) for pair in itertools.combinations(found, 2))
    assert charges(tmp_path / "r") == {mechanism.event: 1}


@pytest.mark.parametrize("wrong", ["tag and key", "key alone", "unknown"])
def test_noise_is_made_again_of_the_start_that_released_it_alone(tmp_path, monkeypatch, wrong):
    """The wrong start's gives NaN; with the right one's tag rows that are not independent."""
    mechanism, shown, folder = EVERY["in order, made again"], [], tmp_path / "r"
    with pytest.raises(Stop):
        made(folder, mechanism, shown, progress=crash_at(5)).fit()
    if wrong == "unknown":  # an older run.json
        state = RunDirectory(folder).load_state()
        RunDirectory(folder).save_state(dataclasses.replace(state, starts=("other",)))
        refused("the run's starts must hold the one that took step", made(folder, mechanism).fit)
        return
    words = Issuer.words

    def mine(self, name, step, label):
        other = step < self.first and (name != "tag" or wrong == "tag and key")
        return words(self, name, step, self.label if other and self.before else label)

    monkeypatch.setattr(Issuer, "words", mine)
    made(folder, mechanism, shown).fit()
    trajectory = [shown[0]] + [b for a, b in itertools.pairwise(shown) if (a != b).any()]
    if wrong == "tag and key":
        assert np.isnan(trajectory[-1]).all()
        return
    found = normals(mechanism, trajectory)
    assert not is_gaussian(found, 1.0)


def put_back_after_six(folder, mechanism):
    """A run of 6 steps whose checkpoint after the third was put back; puts back the last."""
    third, last = (fitted(made(folder, mechanism), steps) for steps in (3, 6))
    third()
    return last


@pytest.mark.parametrize("name", IN_ORDER)
def test_steps_that_were_shown_and_are_repeated_cost_the_whole_event_again(
    tmp_path, monkeypatch, name
):
    """And keep the order of the records."""
    mechanism, seen, step_with_info = EVERY[name], [], jaxdp.Trainer.step_with_info

    def stepping(self, state, batch, return_info=True):
        seen.append((batch.step, frozenset(batch.draw.indices[batch.draw.mask].tolist())))
        return step_with_info(self, state, batch, return_info)

    monkeypatch.setattr(jaxdp.Trainer, "step_with_info", stepping)
    put_back_after_six(tmp_path / "r", mechanism)
    made(tmp_path / "r", mechanism).fit()
    assert charges(tmp_path / "r") == {mechanism.event: 2}
    assert len(seen) == 6 + 9
    for step, records in seen:
        assert {other for at, other in seen if at % 10 == step % 10} == {records}


@pytest.mark.parametrize("name", ["amplified", "amplified on the grid"])
def test_repeated_steps_of_amplified_noise_are_refused(tmp_path, name):
    """And the words say how to go on."""
    mechanism, folder = EVERY[name], tmp_path / "r"
    put_back = put_back_after_six(folder, mechanism)
    for words in ("checkpoint must hold all steps that were shown", "Put back the last checkpoint"):
        refused(words, made(folder, mechanism).fit)
    assert charges(folder) == {mechanism.event: 1}
    put_back()
    made(folder, mechanism).fit()
    assert charges(folder) == {mechanism.event: 1}


# Strategies by name.
@pytest.mark.parametrize("name", ["banded", "buffered"])
def test_a_configured_run_that_was_interrupted_goes_on_as_it_began(tmp_path, name):
    config = with_strategy(name, eval_every=3)
    small.crash(tmp_path / "r", config, 7)
    kept = runs.RunConfig.from_dict(RunDirectory(tmp_path / "r").load_state().config)
    assert kept == config
    if name == "banded":
        numbers = {**config.strategy_numbers, "coefficients": [1.0, 0.25]}
        other = dataclasses.replace(config, strategy_numbers=numbers)
        refused("changed: strategy_numbers", small.go, tmp_path / "r", other)
    result = small.go(tmp_path / "r", kept)
    relation = acc.Relation(config.relation)
    once = config.mechanism().epsilon(12, 1e-5, relation).upper
    assert result.ledger.epsilon(1e-5, relation).upper == once
    told = [(row["step"], row["epsilon"]) for row in result.history]
    assert told == [(step, once) for step in (3, 6, 9, 12)]


def test_projections_are_made_in_order_and_a_rehearsal_ends_where_the_strategy_does(tmp_path):
    config = with_strategy("buffered", pca_dimensions=4, pca_noise_multiplier=9.0)
    result = small.go(tmp_path / "r", config)
    assert result.ledger.epsilon(1e-5, ZERO_OUT).upper <= 3.0
    config = dataclasses.replace(with_strategy(steps=1), physical_batch_size=16)
    assert rehearse(config).step > 0


# Taken apart: tails made again, groups, relations, kills.
AMPLIFIED = mf_of(1.0, 1.0, 10, 120, steps=18, bands=3)
ROWS = {"x": np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32)}


def run_of(folder, mechanism, data=ROWS, **options):
    given = {"params": jnp.zeros(3), "every": 1, "relation": ZERO_OUT, **options}
    return run(folder, data, mechanism, lambda w, example: w @ example["x"], **given)


def tails(entries):
    """A mechanism of 12 steps, 3 a pass, whose C has these entries, and else next to nothing."""
    matrix = np.eye(12) * 1e-3
    for place, value in entries.items():
        matrix[place] = value
    dense = Dense.of(matrix)
    return mf_of(1.0, 1.0, 40, 120, "fixed_order", steps=12, strategy=dense), matrix


def assert_charged(folder, mechanism, moved):
    """The ledger says at least what rows that a record moves by so much, squared, tell of it."""
    distance = np.sqrt(moved) / sensitivity(mechanism.strategy, FixedEpochOrder(3, 4))
    said = RunDirectory(folder).checked_ledger().epsilon(1e-5, ZERO_OUT).upper
    assert said >= acc.epsilon(acc.Gaussian(1 / distance), 1e-5, ZERO_OUT).lower


def test_every_tail_that_is_made_again_is_charged(tmp_path):
    # Rows 0..11, then rows 3, 4 from the checkpoint of 3, then rows 6..11 from the first run's of
    # 6: two tails. Under a C of both signs their distance is 1.73 noise, and 1.41 was charged.
    mechanism, matrix = tails({(3, 3): 1.0, (3, 0): 1.0, (6, 0): 1.0, (6, 3): -1.0})
    folder = tmp_path / "run"
    third, sixth = (fitted(run_of(folder, mechanism), steps) for steps in (3, 6))
    run_of(folder, mechanism).fit()
    for put_back, steps in ((third, 5), (sixth, 12)):
        put_back()
        run_of(folder, mechanism).fit(steps)
    one, two = (np.square(matrix[:, 0] + sign * matrix[:, 3]) for sign in (-1, 1))
    assert_charged(folder, mechanism, one.sum() + two[3:5].sum() + one[6:].sum())


def test_a_tail_that_is_made_again_in_another_branchs_stream_is_charged(tmp_path):
    mechanism, matrix = tails({(3, 0): 1.0, (3, 3): 1.0, (8, 0): 1.0, (8, 3): -1.0})
    folder = tmp_path / "run"
    put_back = fitted(run_of(folder, mechanism), 3)
    run_of(folder, mechanism).fit(6)
    shutil.copy(folder / "secret/run.json", tmp_path / "run.json")
    put_back()
    run_of(folder, mechanism).fit(8)  # a branch, rows 3..7
    shutil.copytree(folder / "secret", tmp_path / "secret")
    # The branch's checkpoint with the main stream's run.json: rows 8..11 in that stream.
    shutil.copy(tmp_path / "run.json", folder / "secret/run.json")
    run_of(folder, mechanism).fit()
    # All of the branch's secret/: rows 8..11 once more, in the branch's stream.
    shutil.rmtree(folder / "secret")
    shutil.copytree(tmp_path / "secret", folder / "secret")
    run_of(folder, mechanism).fit()
    one, two = (np.square(matrix[:, 0] + sign * matrix[:, 3]) for sign in (1, -1))
    assert_charged(folder, mechanism, one[:6].sum() + two[3:].sum() + two[8:].sum())


class WithIdentities:
    """A source with identities of its own."""

    on_device = False

    def __init__(self, names):
        self._inner, self.identities = as_source(ROWS), names
        self.example, self.gather = self._inner.example, self._inner.gather

    def __len__(self):
        return len(self._inner)


def test_a_run_keeps_the_groups_of_its_records(tmp_path):
    names = np.arange(120)
    run_of(tmp_path / "r", AMPLIFIED, WithIdentities(names)).fit(1)
    later = run_of(tmp_path / "r", AMPLIFIED, WithIdentities(names[::-1]))
    refused("source must hold the records that the run in", later.fit)
    # A relation without a bound is refused before a charge.
    in_order = mf_of(1.0, 1.0, 10, 120, "fixed_order", steps=18, strategy="identity")
    unbounded = (acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE)
    for mechanism, relation in zip((in_order, AMPLIFIED), unbounded, strict=True):
        folder = tmp_path / relation.value
        refused("under", run_of, folder, mechanism, delta=1e-5, relation=relation)
        ledger = folder / "ledger.jsonl"
        assert not ledger.exists() or '"event"' not in ledger.read_text(), relation


def test_no_key_of_a_run_that_is_killed_again_and_again_comes_twice(tmp_path, monkeypatch):
    keys, spend = [], Ticket.spend

    def spied(self, *args, **given):
        key = spend(self, *args, **given)
        keys.append((self.step, np.asarray(key.long).tobytes()))
        return key

    monkeypatch.setattr(Ticket, "spend", spied)
    mechanism = mf_of(1.0, 1.0, 40, 120, steps=6, bands=2, noise="grid")
    for last in (1, 3, 4):
        with pytest.raises(Killed):
            run_of(tmp_path / "r", mechanism, every=2, progress=crash_at(last, Killed)).fit()
    run_of(tmp_path / "r", mechanism, every=2).fit()
    assert {step for step, _ in keys} == set(range(6))
    assert len(keys) > 6
    assert len({key for _, key in keys}) == len(keys)
    assert charges(tmp_path / "r") == {mechanism.event: 1}
