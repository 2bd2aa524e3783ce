"""Attacks on runs with correlated noise: tails made again, other identities, no bound."""

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
from tests.test_attack_correlated import (
    DATA,
    ZERO_OUT,
    N,
    amplified,
    in_order,
    loss_fn,
    steps_apart,
)


def run_of(folder, mechanism, data=None, every=1, **options):
    return jaxdp.Run(
        folder,
        loss_fn,
        mechanism,
        optax.sgd(1.0),
        DATA if data is None else data,
        params=jnp.zeros(3),
        every=every,
        progress=lambda step, row: None,
        report=False,
        **{"relation": ZERO_OUT, **options},
    )


def keep(folder, name):
    shutil.copytree(folder / "secret/checkpoints", folder / name)


def put_back(folder, name):
    shutil.rmtree(folder / "secret/checkpoints")
    shutil.copytree(folder / name, folder / "secret/checkpoints")


def test_every_tail_that_is_made_again_is_charged(tmp_path):
    # Rows 0..11, then rows 3, 4 from the checkpoint of 3, then rows 6..11 from the first run's of
    # 6: two tails. Under a C of both signs their distance is 1.73 noise, and 1.41 is charged.
    matrix = np.eye(12) * 1e-3
    matrix[[3, 3, 6], [3, 0, 0]], matrix[6, 3] = 1.0, -1.0
    mechanism = jaxdp.dp_mf(
        1.0, 1.0, 40, N, "fixed_order", steps=12, strategy=Dense.of(matrix)
    )  # a pass is 3 steps
    folder = tmp_path / "run"
    for steps in (3, 6):
        run_of(folder, mechanism).fit(steps)
        keep(folder, f"kept {steps}")
    run_of(folder, mechanism).fit()
    put_back(folder, "kept 3")
    run_of(folder, mechanism).fit(5)
    put_back(folder, "kept 6")
    try:
        run_of(folder, mechanism).fit()
    except ValueError:
        return  # refused
    first, second = np.zeros(12), np.zeros(12)
    first[[0, 3]], second[[0, 3]] = (1, -1), (1, 1)
    one, two = np.square(matrix @ first), np.square(matrix @ second)
    distance = np.sqrt(one.sum() + two[3:5].sum() + one[6:].sum()) / (
        sensitivity(mechanism.strategy, FixedOrder(3, 4)).value
    )
    said = RunDirectory(folder).checked_ledger().epsilon(1e-5, ZERO_OUT).upper
    truth = acc.epsilon(acc.Gaussian(1 / distance), 1e-5, ZERO_OUT).lower  # 8.38 against 6.57
    assert said >= truth


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


def test_a_run_keeps_the_groups_of_its_records(tmp_path, monkeypatch):
    seen, step_and_look = [], jaxdp.Trainer.step_and_look

    def stepping(self, state, batch, told=True):
        seen.append(batch.draw.indices[batch.draw.mask])
        return step_and_look(self, state, batch, told)

    monkeypatch.setattr(jaxdp.Trainer, "step_and_look", stepping)
    mechanism = amplified(batch_size=40)  # every record of a group in each of its steps
    try:
        run_of(tmp_path / "r", mechanism, WithIdentities([f"a{i}" for i in range(N)])).fit(4)
        run_of(tmp_path / "r", mechanism, WithIdentities([f"b{i}" for i in range(N)])).fit()
    except ValueError:
        return  # refused
    assert steps_apart(seen) >= 3


def test_the_last_checkpoint_can_be_put_back_as_the_words_say(tmp_path):
    folder, mechanism = tmp_path / "r", amplified()
    run_of(folder, mechanism).fit(3)
    keep(folder, "older")
    run_of(folder, mechanism).fit(6)
    keep(folder, "last")
    put_back(folder, "older")
    with pytest.raises(ValueError, match="Put back the last checkpoint"):
        run_of(folder, mechanism).fit()
    put_back(folder, "last")
    run_of(folder, mechanism).fit()


@pytest.mark.parametrize(
    ("make", "relation"),
    [(in_order, acc.Relation.ADD_OR_REMOVE_ONE), (amplified, acc.Relation.REPLACE_ONE)],
    ids=["in order", "amplified"],
)
def test_a_relation_without_a_bound_is_refused_before_a_charge(tmp_path, make, relation):
    with pytest.raises(ValueError, match="under"):
        run_of(tmp_path / "r", make(), every=9, delta=1e-5, relation=relation).fit()
    ledger = tmp_path / "r" / "ledger.jsonl"
    assert not ledger.exists() or '"event"' not in ledger.read_text()
