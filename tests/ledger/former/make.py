"""Makes the files of format 2 that later code must open: ``python -m tests.ledger.former.make FOLDER``.

Those of this folder were made once, by the code of the time when charges were given back, and are
not made again: ``expected.json`` tells what that code answered about each. A ledger is one file; a
run is a zip of its folder, ``secret/`` too, without pictures and pages. Who was killed died by
``os._exit``, as by a kill, in a process of its own.
"""

import json
import multiprocessing
import os
import shutil
import socket
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import accounting as acc
from jaxdp.clipping.rules import clip
from jaxdp.mechanism import Mechanism
from jaxdp.sampling import RandomAllocation

N, DELTA, KEY, KILLED = 60, 1e-5, b"k" * 32, 9
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
P = {"w": np.zeros(4, np.float32)}  # nothing of JAX: two processes join first
STEP = acc.PoissonSampled(acc.Gaussian(1.0), 0.01)
MECHANISM = jaxdp.dp_sgd(1.0, 1.0, 20, N)
STEPS = 12  # of a whole run
BUDGET = {"epsilon": 3.0, "delta": DELTA, "steps": STEPS, "l2_clip_norm": 1.0}
SIZES = {"batch_size": 20, "dataset_size": N}
EPOCHS = Mechanism(clip(1.0), 2.0, RandomAllocation(3), **SIZES)
MECHANISMS = {
    "poisson": jaxdp.dp_sgd(**BUDGET, **SIZES),
    "epochs": EPOCHS,
    "correlated": jaxdp.dp_mf(1.0, 1.0, **SIZES, steps=STEPS, bands=2),
    "grid": jaxdp.dp_sgd(**BUDGET, **SIZES, noise="grid"),
}


def loss_fn(params, x):
    return jnp.square(jnp.vdot(params["w"], x) - 1.0)


def run_of(folder, mechanism, progress=lambda step, row: None, **options):
    """A run with a row each three steps."""
    given = {"params": P, "every": 3, "report": False, "progress": progress, **options}
    return jaxdp.Run(folder, loss_fn, mechanism, optax.sgd(0.1), X, **given)


def charged_by_hand(path, key=None):
    ledger = jaxdp.Ledger(path, key=key)
    ledger.charge(STEP, 10, stream="a", source="mechanism", note="seen by an auditor")
    ledger.charge(acc.Gaussian(4.0), 2)
    ledger.charge(acc.GridNoise(acc.Gaussian(3.0), 1e-12), 5, stream="b", first_step=7)
    ledger.assume("the frozen parameter ['embedding']")
    ledger.trust("the data were public before.")
    ledger.show("a", 4)
    ledger.close()


def given_back(path):
    sampler = MECHANISM.sampler(N, ledger=jaxdp.Ledger(path), reserve=8)
    for _ in range(5):
        sampler.draw().key()
    sampler.draw()
    sampler.close(1)
    sampler.ledger.close()


def killed_ahead(path):
    sampler = MECHANISM.sampler(N, ledger=jaxdp.Ledger(path), reserve=8)
    for _ in range(5):
        sampler.draw()
    os._exit(KILLED)


def epochs(path, killed):
    for steps in (4, 2):  # an epoch has three: the second of a stream is begun and not ended
        sampler = EPOCHS.sampler(N, ledger=jaxdp.Ledger(path), reserve=2)
        for _ in range(steps):
            sampler.draw()
        if killed:
            os._exit(KILLED)
        sampler.close()
        sampler.ledger.close()


def correlated(path):
    MECHANISMS["correlated"].sampler(N, ledger=jaxdp.Ledger(path), identities=range(N)).draw()
    os._exit(KILLED)


def seeded(path):
    for _ in range(2):
        secret = jaxdp.Secret.from_seed(3)
        sampler = MECHANISM.sampler(N, ledger=jaxdp.Ledger(path), secret=secret)
        sampler.draw().key()
        sampler.ledger.close()


def trainers(path, killed):
    for _ in range(2):
        trainer = jaxdp.Trainer(loss_fn, MECHANISM, optax.sgd(0.1), X, ledger=path, reserve=4)
        state = trainer.init(P)
        for batch in trainer.batches(3):
            state, _ = trainer.step(state, batch)
        if killed:
            os._exit(KILLED)
        trainer.close()


def of_two(path, index, address):
    """One of two processes: six steps of two blocks of four."""
    jax.distributed.initialize(address, 2, index)
    sampler = MECHANISM.sampler(N, ledger=jaxdp.Ledger(path), reserve=4)
    for _ in range(6):
        sampler.draw().key()
    sampler.close()
    sampler.ledger.close()


def processes(path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    begin = multiprocessing.get_context("spawn").Process
    both = [begin(target=of_two, args=(path, index, address)) for index in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0


LEDGERS = {
    "by_hand": (charged_by_hand,),
    "keyed": (charged_by_hand, KEY),
    "given_back": (given_back,),
    "killed_ahead": (killed_ahead,),
    "epochs": (epochs, False),
    "epochs_killed": (epochs, True),
    "correlated_killed": (correlated,),
    "seeded": (seeded,),
    "trainers": (trainers, False),
    "trainer_killed": (trainers, True),
    "processes": (processes,),
}


def ended(folder, name):
    """A run that ended after all of its steps."""
    run_of(folder, MECHANISMS[name]).fit(STEPS)


def killed(folder, name):
    """A run killed once a row was shown, that of step 6; it has begun steps after it."""

    def progress(step, row):
        if row is not None and row["step"] == 6:
            os._exit(KILLED)

    run_of(folder, MECHANISMS[name], progress).fit(STEPS)


def set_aside(folder, name):
    """Killed, its last checkpoint gone: steps that were shown are done again, charged anew."""
    apart(killed, folder, name)
    (gone,) = (folder / "secret" / "checkpoints").glob("6")
    shutil.rmtree(gone)
    run_of(folder, MECHANISMS[name], set_aside_unreadable=True).fit(STEPS)


RUNS = {
    "poisson": (ended, "poisson"),
    **{f"{name}_killed": (killed, name) for name in MECHANISMS},
    "poisson_set_aside": (set_aside, "poisson"),
}


def apart(deed, *args):
    """Does it in a process of its own, which may die of it."""
    process = multiprocessing.get_context("spawn").Process(target=deed, args=args)
    process.start()
    process.join()
    assert process.exitcode in (0, KILLED), deed


def answers(ledger):
    """What is told of a ledger."""
    return {
        "epsilon": ledger.epsilon(DELTA).upper,
        "steps": ledger.steps,
        "begun": len(ledger.begun),
        "unverified": ledger.unverified(),
        "shown to": max(getattr(ledger.shown(str(e.stream)), "step", 0) for e in ledger.entries),
    }


def went_on(folder, name):
    """What is told of a run that is opened and goes on to its end."""
    run = run_of(folder, MECHANISMS[name])
    before = run.epsilon(DELTA).upper
    run.fit(STEPS)
    return {
        "epsilon before": before,
        "epsilon": run.epsilon(DELTA).upper,
        "unverified": run.unverified(),
        "rows": [row["step"] for row in run.history],
    }


def main(folder):
    folder.mkdir(parents=True)
    expected = {}
    for name, (deed, *args) in LEDGERS.items():
        path = folder / f"{name}.jsonl"
        apart(deed, path, *args)
        expected[path.name] = answers(jaxdp.Ledger(path, key=KEY if KEY in args else None))
    for name, (deed, mechanism) in RUNS.items():
        path = folder / name
        apart(deed, path, mechanism)
        with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as packed:
            for each in sorted(path.rglob("*")):
                if each.suffix not in (".png", ".html", ".md"):
                    packed.write(each, each.relative_to(path))
        expected[f"{name}.zip"] = went_on(path, mechanism)
        shutil.rmtree(path)
    text = json.dumps(expected, indent=1, sort_keys=True)
    (folder / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
