"""SIGKILL at random moments of a ``jaxdp.Run`` in two processes: of one, of the other, or of both.

``python -m benchmarks.killed_processes [--kills 200]`` is ``benchmarks.killed`` with two processes
of ``jax.distributed`` on this machine, one device each, that train one model; a survivor goes on
for up to half a second, and is killed too. It asserts, and prints as JSON
(``results/killed_processes.json``): no two noises that either process made, seen or not, are
correlated, but those of one step in both, which are equal; the ledger on disk held, before either
process saw a release, at least the releases seen by then; a finished run has the epsilon of one
that was never interrupted.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.killed import (
    CACHE,
    DELTA,
    SIGMAS,
    STEPS,
    WIDTH,
    charged,
    largest,
    made,
    mechanism,
    note,
    noted,
    problem,
)

WHO = ([0], [1], [0, 1])


def live(folder, index, port):
    """One life of one of the processes."""
    import jax

    import jaxdp
    from jaxdp.trainer import Trainer

    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    (folder / f"up{index}").touch()
    whole, ledger = Trainer.step_and_look, folder / "run" / "ledger.jsonl"

    def spied(self, state, batch, told=True):
        before = np.array(state.params["w"])
        out = whole(self, state, batch, told)
        moved = np.array(out[0].params["w"]) - before
        note(folder / f"taken{index}", ledger, out[0].step, moved)
        return out

    def evaluate(params):
        values = np.array(params["w"])
        note(folder / f"seen{index}", ledger, 0, values)
        return {"first": float(values[0])}

    Trainer.step_and_look = spied
    loss, optimizer, data, params = problem()
    run = jaxdp.Run(
        folder / "run",
        loss,
        mechanism(),
        optimizer,
        data,
        params=params,
        evaluate=evaluate,
        every=json.loads((folder / "every").read_text()),
        mesh=jax.make_mesh((2,), ("data",)),
        report=False,
    )
    run.fit(STEPS)
    if index == 0:
        (folder / "final").write_text(json.dumps(run.history))


def one_life(folder, rng, after):
    """Starts both; kills some after so many seconds, or none. True if any was killed."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    for index in range(2):
        (folder / f"up{index}").unlink(missing_ok=True)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"), **CACHE}
    code = [sys.executable, "-m", "benchmarks.killed_processes", "--child", str(folder)]
    with (folder / "said").open("w") as said:
        both = [
            subprocess.Popen(
                [*code, str(index), str(port)],
                env={**os.environ, **cache},
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            for index in range(2)
        ]
    while not (folder / "up0").exists() and all(p.poll() is None for p in both):
        time.sleep(0.002)
    until = time.monotonic() + (600 if after is None else after)
    while time.monotonic() < until and any(p.poll() is None for p in both):
        if any(p.poll() not in (None, 0) for p in both):
            break
        time.sleep(0.002)
    who = rng.choice(WHO)
    left = [number for number in who if both[number].poll() is None]
    if after is not None:
        for number in left:
            both[number].send_signal(signal.SIGKILL)
        if left and len(who) == 1:
            time.sleep(rng.uniform(0.0, 0.5))
    for process in both:
        process.kill()
    codes = [process.wait() for process in both]
    if after is None and codes != [0, 0] or any(c > 0 for c in codes) and not left:
        raise SystemExit(f"a restart failed in {folder}:\n{(folder / 'said').read_text()[-3000:]}")
    return codes != [0, 0]


def check(folder):
    """Asserts what a finished run promises; all noises that process 0 made, and other ones."""
    path, history = folder / "run" / "ledger.jsonl", json.loads((folder / "final").read_text())
    firsts = {row["first"]: row["step"] for row in history}
    for index in range(2):
        _, sizes, seen = noted(folder / f"seen{index}")
        for size, values in zip(sizes, seen, strict=True):
            step = firsts[float(values[0])]  # KeyError: seen, and done again
            assert charged(path, size).steps >= step, "seen before it was charged"
    assert charged(path).epsilon(DELTA).upper == mechanism().epsilon(STEPS, DELTA).upper
    # Equal noises are those of one step in both processes.
    each = [noted(folder / f"taken{index}")[2] for index in range(2)]
    for noises in each:
        assert len(np.unique(noises[:, :4], axis=0)) == len(noises), "a noise was used twice"
    return np.unique(np.concatenate(each), axis=0), max(len(noises) for noises in each)


def killed(kills, base, rng, kept):
    """Runs until so many kills were done and the last run is finished."""
    one_life(made(base / "warm", 3), rng, None)  # compiles
    began = time.monotonic()
    one_life(made(base / "whole", 3), rng, None)
    whole = time.monotonic() - began
    noises, lives, done, runs, again = [], 0, 0, 0, 0
    while done < kills:
        folder = made(base / f"run-{runs}", rng.choice([1, 3]))
        dead = True
        while dead:
            dead = one_life(folder, rng, None if done >= kills else rng.uniform(0.0, whole))
            lives, done = lives + 1, done + dead
        found, most = check(folder)
        noises.append(found)
        again += most - STEPS
        runs += 1
        every, limit = np.concatenate(noises), SIGMAS / np.sqrt(WIDTH)
        assert largest(every) < limit, "a noise was used twice"
        # After every run, so that a benchmark that is stopped has its figures.
        text = json.dumps(_told(done, runs, lives, whole, again, every, limit), indent=1)
        kept.write_text(text + "\n")
        print(f"{done} kills, {runs} runs", file=sys.stderr, flush=True)
    return text


def _told(done, runs, lives, whole, again, every, limit):
    return {
        "kills": done,
        "runs finished": runs,
        "lives": lives,
        "seconds of a whole life": round(whole, 1),
        "steps done again": again,
        "noises made, seen or not": len(every),
        "largest correlation of two": largest(every),
        "at most": limit,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the moments, not of the noise")
    parser.add_argument("--child", nargs=3)
    given = parser.parse_args()
    if given.child:
        folder, index, port = given.child
        live(Path(folder), int(index), int(port))
        return
    kept = Path(__file__).with_name("results") / "killed_processes.json"
    with tempfile.TemporaryDirectory() as name:
        print(killed(given.kills, Path(name), random.Random(given.seed), kept))


if __name__ == "__main__":
    main()
