"""SIGKILL at random moments of ``jaxdp.Run``, of a ``Trainer``, and of a bare ledger's tickets.

``python -m benchmarks.killed [--kills 100] [--kinds run run-epochs ...]`` trains a model without a
gradient, so that what moves the parameters is the noise, in a child process; kills the child after
a random time (every second one uniform over a whole life, start and imports included, the others
uniform over what follows the imports) and starts it again, until so many kills of each kind were
done and every run was finished. It asserts, and prints as JSON (``results/killed.json``): no
two noises that anybody could have seen are correlated; the ledger on disk held, before each release
was seen, at least the releases seen by then; a finished ``Run`` has the epsilon of one that was
never interrupted, and everything that it ever showed is in it, bit for bit; kills alone begin no
new stream and set no checkpoint aside; one of a bare ledger costs no more than a reservation.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

WIDTH, N, BATCH, STEPS, DELTA = 2_000, 60, 20, 24, 1e-5
AHEAD = 3  # steps that a trainer, or a bare issuer, reserves at a time
KINDS = ["run", "run-epochs", "run-correlated", "run-grid", "trainer", "bare"]
SIGMAS = 7  # of a correlation of independent noises: passed by one of 4e11 pairs
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": "cpu"}


def mechanism(kind="run"):
    import jaxdp

    if kind == "run-correlated":
        made = {"steps": STEPS, "strategy": "banded", "bands": 3}
        return jaxdp.dp_mf(
            noise_multiplier=2.0,
            l2_clip_norm=1.0,
            batch_size=BATCH,
            dataset_size=N,
            sampling="fixed_order",
            **made,
        )
    rule = "allocation" if kind == "run-epochs" else "poisson"
    noise = "grid" if kind == "run-grid" else "gaussian"
    return jaxdp.dp_sgd(
        noise_multiplier=2.0,
        l2_clip_norm=1.0,
        batch_size=BATCH,
        dataset_size=N,
        sampling=rule,
        noise=noise,
    )


def epsilon(kind, ledger=None):
    """That of a ledger, or of a whole run."""
    from jaxdp.accounting import Relation

    ordered = kind == "run-correlated"
    relation = Relation.REPLACE_SPECIAL if ordered else Relation.ADD_OR_REMOVE_ONE
    if ledger is not None:
        return ledger.epsilon(DELTA, relation).upper
    return mechanism(kind).epsilon(STEPS, DELTA, relation).upper


def problem():
    """(loss without a gradient, optimizer, records, parameters): a step moves by its noise."""
    import jax.numpy as jnp
    import optax

    loss = lambda params, x: 0.0 * jnp.sum(params["w"]) * x  # noqa: E731
    return loss, optax.sgd(1.0), np.zeros(N, np.float32), {"w": np.zeros(WIDTH, np.float32)}


def note(path, ledger, step, values):
    """Appends what is seen now, with the size of the ledger on disk before it was."""
    size = ledger.stat().st_size
    row = np.concatenate([[step, size], np.ravel(values)]).astype(np.float32)
    with path.open("ab", buffering=0) as file:  # one write: there or not, or cut short
        file.write(row.tobytes())


def live_run(folder, kind):
    """One life of a ``Run``; the evaluation publishes the parameters, the progress its rows."""
    import jaxdp
    from jaxdp.accounting import Relation
    from jaxdp.training.trainer import Trainer

    whole, every = Trainer.step_with_info, json.loads((folder / "every").read_text())
    ledger = folder / "run" / "ledger.jsonl"

    def spied(self, state, batch, return_info=True):
        before = np.array(state.params["w"])
        out = whole(self, state, batch, return_info)
        note(folder / "taken", ledger, out[0].step, np.array(out[0].params["w"]) - before)
        return out

    def shown(step, row):
        if row is not None:
            with (folder / "rows").open("a") as file:
                file.write(json.dumps(row) + "\n")

    def evaluate(params):
        note(folder / "seen", ledger, 0, params["w"])
        return {"first": float(params["w"][0])}

    Trainer.step_with_info = spied
    loss, optimizer, data, params = problem()
    run = jaxdp.Run(
        folder / "run",
        loss,
        mechanism(kind),
        optimizer,
        data,
        relation=Relation.REPLACE_SPECIAL if kind == "run-correlated" else None,
        params=params,
        evaluate=evaluate,
        every=every,
        progress=shown,
    )
    run.fit(STEPS)
    (folder / "final").write_text(json.dumps(run.history))


def live_trainer(folder, _):
    """One life of a user's own loop: everything printed at once, a checkpoint now and then."""
    import jax

    import jaxdp

    loss, optimizer, data, params = problem()
    ledger, kept = folder / "ledger.jsonl", folder / "state.npz"
    every = json.loads((folder / "every").read_text())
    trainer = jaxdp.Trainer(loss, mechanism(), optimizer, data, ledger=ledger, reserve=AHEAD)
    state = trainer.init(params)
    leaves, structure = jax.tree.flatten(state)
    if kept.exists():
        with np.load(kept) as saved:
            leaves = [saved[f"arr_{i}"] for i in range(len(leaves))]
        state = jax.tree.unflatten(structure, leaves)._replace(step=int(leaves[-2]))
    left = max(0, STEPS - state.step)
    for batch in trainer.batches(left, state=state):
        before = np.array(state.params["w"])
        state, _ = trainer.step(state, batch)
        note(folder / "seen", ledger, state.step, np.array(state.params["w"]) - before)
        time.sleep(0.05)  # a model that takes a while: so that kills fall between the steps
        if state.step % every == 0:
            np.savez(folder / "next.npz", *jax.tree.leaves(jax.device_get(state)))
            (folder / "next.npz").replace(kept)
    trainer.close()


def live_bare(folder, _):
    """One life of a loop without a trainer: tickets of a ledger, whose noise is seen at once."""
    import jaxdp
    from jaxdp.ledger.tickets import issuer_of

    path, seen = folder / "ledger.jsonl", folder / "seen"
    ledger = jaxdp.Ledger(path)
    issuer = issuer_of(mechanism(), ledger, reserve=AHEAD)
    for step in range(len(noted(seen)[0]), STEPS):
        words = issuer.take().key().words
        note(seen, path, step, np.random.default_rng(words.ravel()).normal(size=WIDTH))
        ledger.assume(f"the parameter {step}")
        time.sleep(0.005)
        if step % 5 == 4:
            issuer.close()  # and goes on
    issuer.close()
    ledger.close()


def noted(path):
    """(steps, sizes of the ledger, values) of a file of notes; a last one cut short is left out."""
    rows = np.fromfile(path, np.float32) if path.exists() else np.zeros(0, np.float32)
    rows = rows[: len(rows) // (WIDTH + 2) * (WIDTH + 2)].reshape(-1, WIDTH + 2)
    return rows[:, 0].astype(int), rows[:, 1].astype(int), rows[:, 2:]


def charged(path, size=None):
    """The ledger as the first ``size`` bytes of its file tell it."""
    import jaxdp

    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "ledger.jsonl"
        copy.write_bytes(path.read_bytes()[:size])
        return jaxdp.Ledger(copy)


def largest(noises):
    """The largest correlation of two of the noises [n, WIDTH], as an absolute value."""
    unit = noises / np.linalg.norm(noises, axis=1, keepdims=True)
    return float(np.abs(unit @ unit.T - np.eye(len(unit))).max()) if len(unit) > 1 else 0.0


def one_life(kind, folder, after, from_up=False):
    """Starts the child; kills it after so many seconds, or never. Seconds, and True if killed.

    With ``from_up`` the seconds count from the end of its imports.
    """
    up = folder / "up"
    up.unlink(missing_ok=True)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"), **CACHE}
    code = [sys.executable, "-m", "benchmarks.killed", "--child", kind, str(folder)]
    began = time.perf_counter()
    child = subprocess.Popen(code, env={**os.environ, **cache}, stderr=subprocess.PIPE)
    while from_up and not up.exists() and child.poll() is None:
        time.sleep(0.002)
    began_at = time.perf_counter()
    try:
        said = child.communicate(timeout=after)[1]
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
        said = child.communicate()[1]
    if child.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"a restart failed in {folder}:\n{said.decode()[-3000:]}")
    ended = time.perf_counter()
    return ended - began, ended - began_at, child.returncode != 0


def check_run(folder, rows_before, kind):
    """Asserts what a ``Run`` promises after a kill, and more at its end: the noises it showed."""
    path, secret = folder / "run" / "ledger.jsonl", folder / "run" / "secret"
    rows = [json.loads(line) for line in rows_before]
    history = json.loads((folder / "final").read_text())
    final = {row["step"]: row for row in history}
    assert all(row == {**final[row["step"]], **row} for row in rows), "a row was changed"
    firsts = {row["first"]: row["step"] for row in history}
    _, sizes, seen = noted(folder / "seen")
    steps = [firsts[float(values[0])] for values in seen]  # KeyError: seen, and done again
    for step, size in zip(steps, sizes, strict=True):
        assert charged(path, size).steps >= step, "seen before it was charged"
    chain = dict(zip(steps, seen, strict=True))
    assert all(np.array_equal(chain[s], v) for s, v in zip(steps, seen, strict=True))
    ledger = charged(path)
    assert epsilon(kind, ledger) == epsilon(kind)
    assert len({entry.stream for entry in ledger.entries}) == 1, "a crash began a new stream"
    assert not list(secret.glob("damaged-checkpoint-*")), "a crash set a checkpoint aside"
    if kind != "run-correlated":
        shown = np.stack([np.zeros(WIDTH), *(chain[s] for s in sorted(chain) if s)])
        return np.diff(shown, axis=0)
    # What was shown last is made of the last moves of each step; their noise is what C makes of
    # them.
    at, _, moves = noted(folder / "taken")
    last = np.stack([moves[at == step][-1] for step in range(1, STEPS + 1)]).astype(float)
    assert np.allclose(last.sum(axis=0), chain[STEPS], atol=1e-3)
    return mechanism(kind).strategy.matrix() @ last


def check_trainer(folder, *_):
    """Asserts that a ``Trainer``'s ledger never held less than was seen; the seen noises."""
    path, (_, sizes, seen) = folder / "ledger.jsonl", noted(folder / "seen")
    for count, size in enumerate(sizes, 1):
        ledger = charged(path, size)
        assert ledger.steps >= count, "seen before it was charged"
        if count % 10 == 0:
            proven = mechanism().epsilon(count, DELTA).upper
            assert ledger.epsilon(DELTA).upper >= proven
    return seen


def check_bare(folder, *_):
    """Asserts what ``check_trainer`` does, and that no kill has cost more than a reservation."""
    seen, kills = check_trainer(folder), len((folder / "killed").read_text())
    assert charged(folder / "ledger.jsonl").steps <= len(seen) + AHEAD * kills
    return seen


def killed(kind, kills, base, rng):
    """Runs of one kind until ``kills`` kills were done and the last run is finished."""
    check = {"trainer": check_trainer, "bare": check_bare}.get(kind, check_run)
    is_run = check is check_run
    noises, told, lives, done, runs, taken, extra = [], {0: [], 1: []}, 0, 0, 0, [], 0
    one_life(kind, made(base / f"{kind}-warm", 3), None)  # compiles
    whole, training, _ = one_life(kind, made(base / f"{kind}-whole", 3), None, from_up=True)
    while done < kills:
        folder = made(base / f"{kind}-{runs}", rng.choice([1, 3]))
        again = True
        while again:
            from_up = lives % 2 == 1
            after = rng.uniform(0.0, training if from_up else whole)
            _, seconds, again = one_life(kind, folder, None if done >= kills else after, from_up)
            lives, done = lives + 1, done + again
            told[from_up] += [seconds / (training if from_up else whole)] * again
            with (folder / "killed").open("a") as file:
                file.write("x" * again)
            before = noted(folder / "seen")[2]
            if not is_run and len(before):
                held = charged(folder / "ledger.jsonl").steps
                assert held >= len(before), "seen before it was charged"
        rows = folder / "rows"
        noises.append(check(folder, rows.read_text().splitlines() if rows.exists() else [], kind))
        taken.append(noted(folder / "taken")[2])
        extra += max(0, len(taken[-1]) - STEPS)
        runs += 1
        print(f"{kind}: {done} kills, {runs} runs", file=sys.stderr, flush=True)
    repeated = sum(len(n) - STEPS for n in noises) if not is_run else 0
    seen, most = np.concatenate(noises), SIGMAS / np.sqrt(WIDTH)
    found = {
        "kills": done,
        "runs finished": runs,
        "processes": lives,
        "seconds of a whole life": whole,
        "noises seen": len(seen),
        "of them repeated steps, charged anew": repeated,
        "largest correlation of two": largest(seen),
        "at most": most,
        "kills by tenths of a whole life": np.histogram(told[0], 10, (0, 1))[0].tolist(),
        "by tenths of what follows the imports": np.histogram(told[1], 10, (0, 1))[0].tolist(),
    }
    if is_run:
        every = np.concatenate(taken)
        found |= {"steps done again": extra, "noises made, seen or not": len(every)}
    if is_run and kind != "run-correlated":  # whose moves are correlated
        found["largest correlation of two of them"] = largest(every)
        assert largest(every) < most, "a noise was used twice"
    assert largest(seen) < most, "a noise was seen twice"
    return found


def made(folder, every):
    folder.mkdir()
    (folder / "every").write_text(json.dumps(every))
    return folder


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=1, help="of the moments, not of the noise")
    parser.add_argument("--child", nargs=2)
    given = parser.parse_args()
    if given.child:
        import jax  # noqa: F401

        import jaxdp

        kind, folder = given.child
        assert jaxdp.Run
        assert jaxdp.Trainer
        (Path(folder) / "up").touch()
        live = {"trainer": live_trainer, "bare": live_bare}.get(kind, live_run)
        live(Path(folder), kind)
        return
    rng, kept = random.Random(given.seed), Path(__file__).with_name("results") / "killed.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}  # of the other kinds
    with tempfile.TemporaryDirectory() as name:
        for kind in given.kinds:
            found[kind] = killed(kind, given.kills, Path(name), rng)
    text = json.dumps(found, indent=1)
    print(text)
    kept.write_text(text + "\n")


if __name__ == "__main__":
    main()
