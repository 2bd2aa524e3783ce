"""A second attack on correlated noise, on what the first one had mended."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.noise import Dense, FixedOrder, Toeplitz, sensitivity
from jaxdp.runs.directory import RunDirectory
from jaxdp.types import Summed
from tests.test_attack_correlated import ZERO_OUT, N, amplified, in_order, released
from tests.test_attack_correlated_runs import WithIdentities, keep, put_back, run_of


@pytest.mark.parametrize(("scale", "clip"), [(1e38, 1.0), (1e-37, 0.01)])
def test_the_noise_of_a_strategy_of_any_scale_is_there(scale, clip):
    try:
        mechanism = jaxdp.dp_mf(
            1.0, clip, 30, N, "fixed_order", steps=4, strategy=Dense.of(np.eye(4) * scale)
        )
        rows = released(mechanism, [0.0] * 4, 1000)
    except ValueError:
        return  # refused
    assert abs(rows.std() / clip - 1) < 0.1  # 0, where epsilon is said to be 4.4


def test_members_of_a_vmap_over_the_sensitivity_do_not_share_their_noise():
    mechanism = in_order(strategy=Toeplitz((1.0, 0.5), 18))
    tx, params = mechanism.privatize(), jnp.zeros(3)
    key, state = mechanism.simulated_key(jax.random.key(0)), tx.init(params)
    value = jnp.asarray([0.25, -0.5, 0.125])

    def update(l2):
        return tx.update(Summed(value, l2), state, params, key=key)[0] * 10

    try:
        one, two = jax.vmap(update)(jnp.asarray([1.0, 2.0]))
    except ValueError:
        return  # refused, as jaxdp.privatize does
    assert abs(2 * one - two - value).max() > 1e-3  # else the sum is bare


def test_a_tail_that_is_made_again_in_another_branchs_stream_is_charged(tmp_path):
    matrix = np.eye(12) * 1e-3
    matrix[[3, 3, 8], [0, 3, 0]], matrix[8, 3] = 1.0, -1.0
    mechanism = jaxdp.dp_mf(1.0, 1.0, 40, N, "fixed_order", steps=12, strategy=Dense.of(matrix))
    folder = tmp_path / "run"
    run_of(folder, mechanism).fit(3)
    keep(folder, "kept 3")
    run_of(folder, mechanism).fit(6)
    shutil.copy(folder / "secret/run.json", tmp_path / "run.json")
    put_back(folder, "kept 3")
    run_of(folder, mechanism).fit(8)  # a branch, rows 3..7
    shutil.copytree(folder / "secret", tmp_path / "secret")
    try:
        # The branch's checkpoint with the main stream's run.json: rows 8..11 in that stream.
        shutil.copy(tmp_path / "run.json", folder / "secret/run.json")
        run_of(folder, mechanism).fit()
        # All of the branch's secret/: rows 8..11 once more, in the branch's stream.
        shutil.rmtree(folder / "secret")
        shutil.copytree(tmp_path / "secret", folder / "secret")
        run_of(folder, mechanism).fit()
    except ValueError:
        return  # refused
    first, second = np.zeros(12), np.zeros(12)
    first[[0, 3]], second[[0, 3]] = (1, 1), (1, -1)
    one, two = np.square(matrix @ first), np.square(matrix @ second)
    distance = np.sqrt(one[:6].sum() + two[3:].sum() + two[8:].sum()) / (
        sensitivity(mechanism.strategy, FixedOrder(3, 4)).value
    )
    said = RunDirectory(folder).checked_ledger().epsilon(1e-5, ZERO_OUT).upper
    truth = acc.epsilon(acc.Gaussian(1 / distance), 1e-5, ZERO_OUT).lower  # 8.39 against 6.57
    assert said >= truth


def test_a_run_takes_identities_that_are_an_array(tmp_path):
    run_of(tmp_path / "r", amplified(), WithIdentities(np.arange(N))).fit(1)


def test_a_state_alone_with_lanes_is_refused():
    mechanism = in_order(strategy=Toeplitz((1.0, 0.5), 18))
    tx, params = mechanism.privatize(), jnp.zeros(3)
    key, state = mechanism.simulated_key(jax.random.key(0)), tx.init(params)
    states = jax.tree.map(lambda x: jnp.stack([x, x]), state)

    def update(state):
        return tx.update(Summed(params, jnp.float32(1.0)), state, params, key=key)[0]

    with pytest.raises(ValueError, match="another one for every member"):
        jax.vmap(update)(states)
