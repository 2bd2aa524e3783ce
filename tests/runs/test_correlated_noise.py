"""Runs with correlated noise that somebody takes apart: tails made again, groups, relations."""

import functools
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.noise import Dense, FixedOrder, sensitivity
from jaxdp.runs.directory import RunDirectory
from jaxdp.sources import as_source
from jaxdp.tickets import Ticket
from tests.noise.refusals import assert_refused

N = 120
DATA = {"x": np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)}
ZERO_OUT = acc.Relation.REPLACE_SPECIAL


def loss_fn(w, example):
    return w @ example["x"]


def amplified(**changed):
    numbers = {"batch_size": 10, "dataset_size": N, "steps": 18, **changed}
    return jaxdp.dp_mf(1.0, 1.0, bands=3, **numbers)


def tails(entries):
    """A mechanism of 12 steps, 3 a pass, whose C has these entries, and else next to nothing."""
    matrix = np.eye(12) * 1e-3
    for place, value in entries.items():
        matrix[place] = value
    dense = Dense.of(matrix)
    return jaxdp.dp_mf(1.0, 1.0, 40, N, "fixed_order", steps=12, strategy=dense), matrix


def run_of(folder, mechanism, data=DATA, every=1, progress=lambda step, row: None, **options):
    return jaxdp.Run(
        folder,
        loss_fn,
        mechanism,
        optax.sgd(1.0),
        data,
        params=jnp.zeros(3),
        every=every,
        progress=progress,
        report=False,
        **{"relation": ZERO_OUT, **options},
    )


def keep(folder, name):
    shutil.copytree(folder / "secret/checkpoints", folder / name)


def put_back(folder, name):
    shutil.rmtree(folder / "secret/checkpoints")
    shutil.copytree(folder / name, folder / "secret/checkpoints")


def assert_charged(folder, mechanism, moved):
    """The ledger says at least what rows that a record moves by so much, squared, tell of it."""
    distance = np.sqrt(moved) / sensitivity(mechanism.strategy, FixedOrder(3, 4)).value
    said = RunDirectory(folder).checked_ledger().epsilon(1e-5, ZERO_OUT).upper
    assert said >= acc.epsilon(acc.Gaussian(1 / distance), 1e-5, ZERO_OUT).lower


def test_every_tail_that_is_made_again_is_charged(tmp_path):
    # Rows 0..11, then rows 3, 4 from the checkpoint of 3, then rows 6..11 from the first run's of
    # 6: two tails. Under a C of both signs their distance is 1.73 noise, and 1.41 was charged.
    mechanism, matrix = tails({(3, 3): 1.0, (3, 0): 1.0, (6, 0): 1.0, (6, 3): -1.0})
    folder = tmp_path / "run"
    for steps in (3, 6):
        run_of(folder, mechanism).fit(steps)
        keep(folder, f"kept {steps}")
    run_of(folder, mechanism).fit()
    put_back(folder, "kept 3")
    run_of(folder, mechanism).fit(5)
    put_back(folder, "kept 6")
    run_of(folder, mechanism).fit()
    one, two = (np.square(matrix[:, 0] + sign * matrix[:, 3]) for sign in (-1, 1))
    assert_charged(folder, mechanism, one.sum() + two[3:5].sum() + one[6:].sum())


def test_a_tail_that_is_made_again_in_another_branchs_stream_is_charged(tmp_path):
    mechanism, matrix = tails({(3, 0): 1.0, (3, 3): 1.0, (8, 0): 1.0, (8, 3): -1.0})
    folder = tmp_path / "run"
    run_of(folder, mechanism).fit(3)
    keep(folder, "kept 3")
    run_of(folder, mechanism).fit(6)
    shutil.copy(folder / "secret/run.json", tmp_path / "run.json")
    put_back(folder, "kept 3")
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
        self._inner, self.identities = as_source(DATA), names
        self.example = self._inner.example

    def __len__(self):
        return N

    def gather(self, indices, mask):
        return self._inner.gather(indices, mask)


def test_a_run_keeps_the_groups_of_its_records(tmp_path):
    mechanism, folder = amplified(), tmp_path / "r"
    run_of(folder, mechanism, WithIdentities(np.arange(N))).fit(1)
    with pytest.raises(ValueError, match="source must hold the records that the run in"):
        run_of(folder, mechanism, WithIdentities(np.arange(N)[::-1])).fit()


def test_the_last_checkpoint_can_be_put_back_as_the_words_say(tmp_path):
    folder, mechanism = tmp_path / "r", amplified()
    for steps, name in ((1, "older"), (2, "last")):
        run_of(folder, mechanism).fit(steps)
        keep(folder, name)
    put_back(folder, "older")
    with pytest.raises(ValueError, match="Put back the last checkpoint"):
        run_of(folder, mechanism).fit()
    put_back(folder, "last")
    run_of(folder, mechanism).fit(3)


def test_a_relation_without_a_bound_is_refused_before_a_charge(tmp_path):
    in_order = jaxdp.dp_mf(1.0, 1.0, 10, N, "fixed_order", steps=18, strategy="identity")
    for mechanism, relation in (
        (in_order, acc.Relation.ADD_OR_REMOVE_ONE),
        (amplified(), acc.Relation.REPLACE_ONE),
    ):
        folder = tmp_path / relation.value

        def fit(made=mechanism, folder=folder, relation=relation):
            run_of(folder, made, every=9, delta=1e-5, relation=relation).fit()

        assert_refused([(fit, "under")])
        ledger = folder / "ledger.jsonl"
        assert not ledger.exists() or '"event"' not in ledger.read_text(), relation


class Killed(BaseException):
    """The process, from outside."""


def test_no_key_of_a_run_that_is_killed_again_and_again_comes_twice(tmp_path, monkeypatch):
    keys, long = [], Ticket._long

    def spied(self):
        keys.append((self.step, long(self).tobytes()))
        return long(self)

    def kill_at(last):
        def progress(step, row):
            if step == last:
                raise Killed

        return progress

    monkeypatch.setattr(Ticket, "_long", spied)
    mechanism = jaxdp.dp_mf(1.0, 1.0, 40, N, steps=6, bands=2, noise="grid")
    made = functools.partial(run_of, tmp_path / "r", mechanism, every=2)
    for last in (1, 3, 4):
        with pytest.raises(Killed):
            made(progress=kill_at(last)).fit()
    made().fit()
    assert {step for step, _ in keys} == set(range(6))
    assert len(keys) > 6
    assert len({key for _, key in keys}) == len(keys)
    entries = RunDirectory(tmp_path / "r").checked_ledger().entries
    assert [entry.event for entry in entries] == [mechanism.event]
