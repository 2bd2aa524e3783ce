"""A small disk that is filled at random moments, under a ledger, its tickets and a whole ``Run``.

``python -m benchmarks.full_disk [--fillings 100] [--runs 100] [--mount FOLDER ...]`` mounts a tmpfs
and an ext4 with blocks of 4 KiB in a file (root alone may), or takes file systems of a few
megabytes that are mounted already and hold nothing. On each, another thread takes all room at a
random moment while steps are charged, until a charge fails. Then there is room again. Half of the
ledgers go on, the others are opened by a new object, and every one must hold exactly the steps that
``charge`` returned for. Where tickets are handed out the open ledger must count those alone, its
file what was reserved for them and no more, and once it was closed in order just as many. A ``Run``
is started again by the same program until it is finished, with another filling or two on its way:
its folder must then have the epsilon of a run that was never interrupted, to the bit, and its
ledger exactly the run's steps. Prints JSON, and keeps it in ``results/full_disk.json``.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import jaxdp
from jaxdp import accounting as acc
from jaxdp.ledger.tickets import issuer_of

MIB = 1 << 20
STEPS, DELTA, N, BATCH = 24, 1e-5, 60, 20
SMALL = 64 * MIB  # what is filled must be small, and nobody else's
RESULTS = Path(__file__).parent / "results" / "full_disk.json"


@contextlib.contextmanager
def mounted(folder, kind):
    """Mounts a small file system on a new folder, and takes it away again at the end."""
    at, image = folder / kind, folder / f"{kind}.img"
    at.mkdir()
    if kind == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "jaxdp", str(at)]
    else:
        with image.open("wb") as file:
            file.truncate(4 * MIB)
        make = ["mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", "-m", "0", str(image)]
        subprocess.run(make, check=True, capture_output=True)
        mount = ["mount", "-o", "loop", str(image), str(at)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)  # also with a file still open


class Filling:
    """Takes all room of a file system after some seconds, in another thread.

    Args:
        folder: on the file system.
        after: seconds.
        left: bytes that stay free, at most.
    """

    def __init__(self, folder, after, left=0):
        self._file, self._left = folder / "filler", left
        self._thread = threading.Timer(after, self._fill)
        self._thread.start()

    def _fill(self):
        block, found = b"x" * 4096, os.statvfs(self._file.parent)
        todo = found.f_bavail * found.f_frsize - self._left
        handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with contextlib.suppress(OSError):  # the disk is full
            while todo > 0 or not self._left:
                todo -= os.write(handle, block)
        os.close(handle)

    def end(self):
        """Makes room again."""
        self._thread.cancel()
        self._thread.join()
        self._file.unlink(missing_ok=True)


class Torn:
    """Counts the lines of which a part alone could be written, in this thread."""

    def __enter__(self):
        self.count, self._write, mine = 0, os.write, threading.get_ident()

        def write(handle, text):
            done = self._write(handle, text)
            self.count += done < len(text) and threading.get_ident() == mine
            return done

        os.write = write
        return self

    def __exit__(self, *error):
        os.write = self._write


def charging(ledger, first):
    """Charges steps of unlike events until one fails; (steps that were charged, error)."""
    step = first
    try:
        while True:
            event = acc.Gaussian(1.0 + step / 1000)  # no two lines merge, or are equally long
            ledger.charge(event, stream="s", first_step=step, note="n" * (step * 7 % 90))
            step += 1
    except ValueError as error:
        return step, str(error)


def fill_ledger(folder, rng):
    """Fills the disk under one ledger three times; the numbers of what happened."""
    told, step, path = collections.Counter(), 0, folder / "ledger.jsonl"
    ledger = jaxdp.Ledger(path)
    for number in range(3):
        filling = Filling(folder, rng.uniform(0.0, 0.02), rng.choice([0, rng.randrange(1, 9999)]))
        with Torn() as torn:
            step, said = charging(ledger, step)
        told["of them in the middle of a line"] += torn.count
        filling.end()
        assert "No space left" in said, said
        assert ledger.steps == step
        if rng.random() < 0.5 or number == 2:
            ledger.close()
            ledger = jaxdp.Ledger(path)
            told["opened by a new object"] += 1
        assert ledger.steps == jaxdp.Ledger(path).steps == step, "a step more or less"
        told["fillings"] += 1
    told["steps charged"] += step
    ledger.charge(acc.Gaussian(9.0), stream="at last")
    ledger.close()
    assert jaxdp.Ledger(path).steps == step + 1
    path.unlink()
    return told


def handing_out(issuer):
    """Hands out tickets until one fails; (how many, error)."""
    count = 0
    try:
        while True:
            issuer.take()
            count += 1
    except ValueError as error:
        return count, str(error)


def fill_tickets(folder, rng):
    """Fills the disk three times while tickets are handed out; the numbers of what happened."""
    told, path, most = collections.Counter(), folder / "ledger.jsonl", rng.randrange(1, 9)
    ledger = jaxdp.Ledger(path)
    issuer = issuer_of(mechanism(), ledger, reserve=most)
    for _ in range(3):
        filling = Filling(folder, rng.uniform(0.0, 0.02), rng.choice([0, rng.randrange(1, 9999)]))
        with Torn() as torn:
            count, said = handing_out(issuer)
            if rng.random() < 0.5:  # there is no room to say where it ended: all counts
                with contextlib.suppress(ValueError):
                    issuer.close()
        told["of them in the middle of a line"] += torn.count
        told["fillings"] += 1
        told["tickets"] += count
        assert "No space left" in said, said
        assert ledger.steps == issuer.next == told["tickets"], "a step more or less"
        filling.end()
        assert told["tickets"] <= jaxdp.Ledger(path).steps <= told["tickets"] + most
    issuer.take()
    issuer.close()
    ledger.close()
    assert jaxdp.Ledger(path).steps == told["tickets"] + 1
    path.unlink()
    return told


def mechanism():
    return jaxdp.dp_sgd(noise_multiplier=2.0, l2_clip_norm=1.0, batch_size=BATCH, dataset_size=N)


def program(folder, every=2):
    """The program of a ``Run``, as its user would start it again."""
    import jax.numpy as jnp
    import optax

    run = jaxdp.Run(
        folder,
        lambda params, x: jnp.sum((params["w"] - x) ** 2),
        mechanism(),
        optax.sgd(0.1),
        np.linspace(0.0, 1.0, N, dtype=np.float32),
        params={"w": np.zeros(2_000, np.float32)},
        every=every,
        progress=lambda step, row: None,
    )
    run.fit(STEPS)
    return run


def fill_run(folder, rng, whole):
    """Fills the disk under one ``Run`` until it is finished; the numbers of what happened."""
    told, home, done = collections.Counter(), folder / "run", None
    times, every = rng.choice([1, 2, 3]), rng.choice([2, STEPS])  # checkpoints, or lines alone
    while done is None:
        if told["fillings"] < times:
            filling = Filling(folder, rng.uniform(0.0, whole))
            try:
                done = program(home, every)
                told["ended before the disk was full"] += 1
            except Exception as error:  # of whatever kind, the run must go on
                told["fillings"] += 1
                told[f"told as {type(error).__name__}"] += 1
            filling.end()
        else:
            done = program(home, every)
        ledger = home / "ledger.jsonl"
        if ledger.exists():  # opens, whatever happened
            assert jaxdp.Ledger(ledger).steps <= STEPS
        if done is None and not (home / "secret" / "run.json").exists():
            assert not ledger.exists() or not jaxdp.Ledger(ledger).steps, "charged, and no run"
            told["had not begun"] += 1
            remove(home)
    assert jaxdp.Ledger(home / "ledger.jsonl").steps == STEPS, "a step more or less"
    proven = mechanism().epsilon(STEPS, DELTA).upper
    assert jaxdp.Ledger(home / "ledger.jsonl").epsilon(DELTA).upper == proven
    assert done.epsilon(DELTA).upper == proven
    told["finished runs"] += 1
    remove(home)
    return told


def remove(folder):
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.rmdir()


def fillings(folder, ledgers, runs, seed):
    """What happened in so many fillings of each kind on one small file system."""
    found = os.statvfs(folder)
    if found.f_blocks * found.f_frsize > SMALL:
        raise SystemExit(f"--mount must be a small file system, at most {SMALL} bytes: {folder}")
    if any(path.name != "lost+found" for path in folder.iterdir()):
        raise SystemExit(f"--mount must hold nothing, since it is filled: {folder}")
    told = {kind: collections.Counter() for kind in ("ledger", "tickets", "run")}
    rng = random.Random(seed)
    for kind, fill in (("ledger", fill_ledger), ("tickets", fill_tickets)):
        while told[kind]["fillings"] < ledgers:
            told[kind] += fill(folder, rng)
    if runs:
        for _ in range(2):  # the first compiles
            began = time.perf_counter()
            program(folder / "run")
            whole = time.perf_counter() - began
            remove(folder / "run")
    while told["run"]["fillings"] < runs:
        told["run"] += fill_run(folder, rng, whole)
        print(f"{folder.name}: {dict(told['run'])}", file=sys.stderr, flush=True)
    return {kind: dict(sorted(counts.items())) for kind, counts in told.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fillings", type=int, default=100, help="of a ledger, on each mount")
    parser.add_argument("--runs", type=int, default=50, help="fillings of a run, on each mount")
    parser.add_argument("--mount", action="append", type=Path, help="a small, empty one to use")
    parser.add_argument("--seed", type=int, default=0)
    given, found = parser.parse_args(), {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is mounted goes too
    with contextlib.ExitStack() as stack:
        places = given.mount or []
        if not places:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for kind in ("tmpfs", "ext4"):
                try:
                    places.append(stack.enter_context(mounted(folder, kind)))
                except (OSError, subprocess.CalledProcessError) as error:
                    said = getattr(error, "stderr", b"") or str(error).encode()
                    raise SystemExit(
                        f"cannot mount a small {kind} here ({said.decode().strip()}): run it as "
                        "root, or give small and empty file systems with --mount"
                    ) from None
        for place in places:
            found[place.name] = fillings(place, given.fillings, given.runs, given.seed)
    print(json.dumps(found, indent=1))
    if not given.mount:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
