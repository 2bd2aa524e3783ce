"""Attacks on charges in trainers and runs: above a test what it did until mended, or "held"."""

import shutil

import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.schedules import step_decay
from tests.ledger.small import N, P, X, loss_fn, mechanism, trainer


def is_epsilon_of(train, steps):
    expected = mechanism().epsilon(steps, 1e-5).upper
    return train.epsilon(1e-5).upper == pytest.approx(expected)


# Before: the slower of two threads took the faster one's step out of epsilon.
def test_threads_that_take_batches_never_lower_epsilon():
    train = trainer(reserve=10)
    batches = train.batches(10)
    for _ in range(5):
        next(batches)
    train._sampler.issuer.handed_out(3)
    assert is_epsilon_of(train, 5)
    train.close()


# Held: what a report says inside the loop is what was handed out, not what was charged ahead; after
# a break the ledger has the rest back at the next call.
def test_epsilon_inside_the_loop_and_after_a_break_is_of_what_was_handed_out():
    train = trainer(reserve=7)
    for n, _ in enumerate(train.batches(10), 1):
        assert is_epsilon_of(train, n)
        if n == 5:
            break
    assert is_epsilon_of(train, 5)
    train.close()
    assert train.ledger.steps == 5


# Held: a schedule that ends charges nothing beyond, whatever ``beyond`` says.
def test_a_schedule_does_not_go_on_past_its_end():
    schedule = step_decay(2.0, 0.5, 2, 4)
    train = jaxdp.Trainer(loss_fn, jaxdp.dp_sgd(schedule, 1.0, 20, N), optax.sgd(1.0), X)
    state = train.init(P)
    with pytest.raises(ValueError, match="step"):
        next(train.batches(6, beyond=True))
    assert train.ledger.steps == state.step == 0
    for batch in train.batches(4):
        state, _ = train.step(state, batch)
    with pytest.raises(ValueError, match="step"):
        next(train.batches(1))
    assert train.ledger.steps == state.step == 4
    train.close()


def run(folder, lr=1.0, data=X, **options):
    return jaxdp.Run(
        folder, loss_fn, mechanism(), optax.sgd(lr), data, params=P, every=2, **options
    )


def put_back(kept, folder):
    shutil.rmtree(folder / "secret")
    shutil.copytree(kept, folder / "secret")


# Before: steps 3 to 6 were released twice, on other draws with other noise, and charged once.
def test_a_secret_folder_that_was_put_back_charges_what_is_done_again(tmp_path):
    folder, kept = tmp_path / "run", tmp_path / "kept"
    run(folder).fit(2)
    shutil.copytree(folder / "secret", kept)
    for total in (10, 18):  # every time anew
        run(folder).fit(6)
        put_back(kept, folder)
        run(folder).fit(6)
        assert jaxdp.Ledger(folder / "ledger.jsonl").steps == total
        put_back(kept, folder)
    run(folder).fit(6)
    assert jaxdp.Ledger(folder / "ledger.jsonl").steps == 22


# Before: "starts" alone counted, and with it put back a chosen seed gave one start's noise again.
def test_a_start_is_counted_in_the_ledger_too(tmp_path):
    folder, noise, silent = tmp_path / "run", [], np.zeros_like(X)
    run(folder, data=silent, secret=jaxdp.Secret.from_seed(1)).fit(2)
    shutil.copytree(folder / "secret", tmp_path / "kept")
    for lr in (1.0, 2.0):
        before = np.asarray(run(folder, lr, silent).fit(2)["w"])
        after = np.asarray(run(folder, lr, silent).fit(4)["w"])
        noise.append((after - before) / lr)
        put_back(tmp_path / "kept", folder)
    assert not np.allclose(noise[0], noise[1])


# Before: optimizer and loss did not go into the randomness: two learning rates with one seed in one
# folder (deleted in between, or on two machines) shared their noise.
def test_two_learning_rates_of_one_seed_share_no_noise_in_a_run(tmp_path):
    noise = []
    for lr in (1.0, 2.0):
        seed = jaxdp.Secret.from_seed(1)
        after = run(tmp_path / "run", lr, np.zeros_like(X), secret=seed).fit(2)["w"]
        noise.append(np.asarray(after) / lr)
        shutil.rmtree(tmp_path / "run")
    assert not np.allclose(noise[0], noise[1])
