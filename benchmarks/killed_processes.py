"""SIGKILL at random moments of a ``jaxdp.Run`` in several processes: of one, or of all.

``python -m benchmarks.killed_processes [--two 200] [--four 50]`` is ``benchmarks.killed`` with two
and with four processes of ``jax.distributed`` on this machine, one device each, that train one
model. Who is killed is process 0, another one, or all; survivors go on for up to half a second, and
are killed too. It asserts, and prints as JSON (``results/killed_processes.json``): no two noises
that any process made, seen or not, are correlated, but those of one step in all, which are equal;
the ledger on disk held, before any process saw a release, at least the releases seen by then; a
finished run has the epsilon of one that was never interrupted.
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


def live(folder, index, port, count):
    """One life of one of so many processes."""
    import jax

    import jaxdp
    from jaxdp.training.trainer import Trainer

    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    (folder / f"up{index}").touch()
    whole, ledger = Trainer.step_with_info, folder / "run" / "ledger.jsonl"

    def spied(self, state, batch, return_info=True):
        before = np.array(state.params["w"])
        out = whole(self, state, batch, return_info)
        moved = np.array(out[0].params["w"]) - before
        note(folder / f"taken{index}", ledger, out[0].step, moved)
        return out

    def evaluate(params):
        values = np.array(params["w"])
        note(folder / f"seen{index}", ledger, 0, values)
        return {"first": float(values[0])}

    Trainer.step_with_info = spied
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
        mesh=jax.make_mesh((count,), ("data",)),
        report=False,
    )
    run.fit(STEPS)
    if index == 0:
        (folder / "final").write_text(json.dumps(run.history))


def one_life(folder, rng, after, count):
    """Starts all; kills some after so many seconds, or none. Returns who was killed, or died."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    for index in range(count):
        (folder / f"up{index}").unlink(missing_ok=True)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"), **CACHE}
    code = [sys.executable, "-m", "benchmarks.killed_processes", "--child", str(folder)]
    with (folder / "said").open("w") as said:
        started = [
            subprocess.Popen(
                [*code, str(index), str(port), str(count)],
                env={**os.environ, **cache},
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            for index in range(count)
        ]
    while not (folder / "up0").exists() and all(p.poll() is None for p in started):
        time.sleep(0.002)
    until = time.monotonic() + (600 if after is None else after)
    while time.monotonic() < until and any(p.poll() is None for p in started):
        if any(p.poll() not in (None, 0) for p in started):
            break
        time.sleep(0.002)
    who = rng.choice(([0], [rng.randrange(1, count)], list(range(count))))
    left = [number for number in who if started[number].poll() is None]
    if after is not None:
        for number in left:
            started[number].send_signal(signal.SIGKILL)
        if left and len(who) == 1:
            time.sleep(rng.uniform(0.0, 0.5))
    for process in started:
        process.kill()
    codes = [process.wait() for process in started]
    if after is None and any(codes) or any(c > 0 for c in codes) and not left:
        raise SystemExit(f"a restart failed in {folder}:\n{(folder / 'said').read_text()[-3000:]}")
    return who if any(codes) else []


def check(folder, count):
    """Asserts what a finished run promises; all noises, and how many the process with most made."""
    path, history = folder / "run" / "ledger.jsonl", json.loads((folder / "final").read_text())
    firsts = {row["first"]: row["step"] for row in history}
    for index in range(count):
        _, sizes, seen = noted(folder / f"seen{index}")
        for size, values in zip(sizes, seen, strict=True):
            step = firsts[float(values[0])]  # KeyError: seen, and done again
            assert charged(path, size).steps >= step, "seen before it was charged"
    assert charged(path).epsilon(DELTA).upper == mechanism().epsilon(STEPS, DELTA).upper
    # Equal noises are those of one step in all processes.
    each = [noted(folder / f"taken{index}")[2] for index in range(count)]
    for noises in each:
        assert len(np.unique(noises[:, :4], axis=0)) == len(noises), "a noise was used twice"
    return np.unique(np.concatenate(each), axis=0), max(len(noises) for noises in each)


def killed(kills, base, rng, count):
    """What was found of so many processes, once so many kills were done and the last run ended."""
    one_life(made(base / "warm", 3), rng, None, count)  # compiles
    began = time.monotonic()
    one_life(made(base / "whole", 3), rng, None, count)
    whole = time.monotonic() - began
    noises, lives, done, runs, again = [], 0, {"process 0": 0, "another": 0, "all": 0}, 0, 0
    while sum(done.values()) < kills:
        folder = made(base / f"run-{runs}", rng.choice([1, 3]))
        dead = True
        while dead:
            after = None if sum(done.values()) >= kills else rng.uniform(0.0, whole)
            dead = one_life(folder, rng, after, count)
            lives += 1
            if dead:
                done["all" if len(dead) > 1 else "another" if dead[0] else "process 0"] += 1
        found, most = check(folder, count)
        noises.append(found)
        again += most - STEPS
        runs += 1
        print(f"{count} processes: {done}, {runs} runs", file=sys.stderr, flush=True)
    every, limit = np.concatenate(noises), SIGMAS / np.sqrt(WIDTH)
    assert largest(every) < limit, "a noise was used twice"
    return {
        "kills": sum(done.values()),
        "of them of": done,
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
    parser.add_argument("--two", type=int, default=200, help="kills of two processes")
    parser.add_argument("--four", type=int, default=50, help="kills of four processes")
    parser.add_argument("--seed", type=int, default=1, help="of the moments, not of the noise")
    parser.add_argument("--child", nargs=4)
    given = parser.parse_args()
    if given.child:
        folder, *numbers = given.child
        live(Path(folder), *map(int, numbers))
        return
    rng, kept = random.Random(given.seed), Path(__file__).with_name("results")
    kept = kept / "killed_processes.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}  # of a number with 0 kills now
    for name, count, kills in (("two", 2, given.two), ("four", 4, given.four)):
        if kills:
            with tempfile.TemporaryDirectory() as base:
                found[name] = killed(kills, Path(base), rng, count)
            kept.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
