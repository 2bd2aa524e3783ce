"""Correctness, speed and memory on whatever device JAX finds: `python -m benchmarks.gpu`.

Pieces in the order of what they tell. Every figure is written as it comes, every piece printed, and
the command ends within ``--minutes`` (8); run again, it does what is left. A piece that fails, runs
out of memory, or of time though it had half of the minutes, says so in its place; ``--again`` tries
those once more. jax_privacy and Opacus take part where they are installed. On a CPU the networks
are tiny, which checks the program. ``--page`` writes docs/gpu.md from what is stored.

    step X       a whole step of network X by `jaxdp.Trainer` beside an optax loop
    gradient X   its clipped gradient beside the ordinary one, the vmap engine's and jax_privacy's:
                 time, temporary memory as XLA plans it, seconds to trace and to compile
    opacus X     ordinary and clipped gradients of the network in torch
    peak X       the most memory that was in use during ordinary and clipped gradient
    noise        the law of both noises, and whether the CPU makes the same for a key
    bound        can one record add more than it may? Each record's clipped gradient, float64 norm
    exact X      clipped sum and norms of network X against the vmap engine in float32
    largest X    the largest batch of one gradient, and its speed
    precision X  gradients in float32 and bfloat16, where the others are as the device likes it
"""

import argparse
import importlib
import json
import os
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NETWORKS = ("cnn", "gpt2", "wrn", "vit", "gpt2-lora", "smollm2-lora")
KINDS = ("step", "gradient", "opacus", "peak", None, "exact", "largest", "precision")
PIECES = tuple(
    piece
    for kind in KINDS
    for piece in ([f"{kind} {name}" for name in NETWORKS] if kind else ["noise", "bound"])
)
CUT = "cut off by the end: run it again"
LATE = "not done in its time"


def process_of(piece: str) -> str:
    """Pieces with the same answer share a process: two frameworks would share a device's memory."""
    kind = piece.split()[0]
    return "torch" if kind == "opacus" else piece if kind == "peak" else "jax"


class Worker:
    """A process that imports at once, and measures pieces one after another as they are asked."""

    def __init__(self, kind: str, cache: str):
        environment = {
            # A user's default is 75 % of the memory; the largest batch is that of the device.
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
            # Programs of earlier pieces; what is timed is compiled for the first time.
            "JAX_COMPILATION_CACHE_DIR": cache,
            **os.environ,
            "PYTHONUNBUFFERED": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu", "--work", kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip
        self.told: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.told.put(line)
        self.told.put(None)

    def figures(self, piece: str, end: float) -> Iterator[dict[str, Any]]:
        """The figures of a piece as they come: {"found": ...}, at last {"done": why it failed}."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(f"{piece}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # its end is told below
        while True:
            try:
                line = self.told.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                self.close()
                yield {"done": LATE}
                return
            if line is None:
                yield {"done": f"the process ended with {self.process.wait()}"}
                return
            if line.startswith("{"):
                yield (found := json.loads(line))
                if "done" in found:
                    return

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def work(kind: str) -> None:
    """What a worker does: a line of JSON for every figure, and one for the end of each piece."""
    torch = kind == "torch"
    importlib.import_module("benchmarks.networks_torch" if torch else "benchmarks.networks_gpu")
    for line in sys.stdin:  # the imports above touch no device, what follows does
        module = importlib.import_module(
            "benchmarks.gpu_torch" if torch else "benchmarks.gpu_pieces"
        )
        why = None
        try:
            for found in module.figures(line.strip()):
                print(json.dumps({"found": found}), flush=True)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            why = f"{type(error).__name__}: {first}"[:300]
        print(json.dumps({"done": why}), flush=True)


class Workers:
    """The process of each piece, and one that imports meanwhile for the piece after it."""

    def __init__(self) -> None:
        self.cache = tempfile.mkdtemp()
        self.now: tuple[str, Worker] | None = None
        self.next: tuple[str, Worker] | None = None

    def of(self, piece: str, later: list[str]) -> Worker:
        """The worker of a piece; what follows it may need another one."""
        wanted = process_of(piece)
        if not self.now or self.now[0] != wanted or self.now[1].process.poll() is not None:
            self._close(self.now)  # before another one takes the device's memory
            kind = "torch" if wanted == "torch" else "jax"
            ready, self.next = self.next, None
            if not ready or ready[0] != kind:
                self._close(ready)
                ready = kind, Worker(kind, self.cache)
            self.now = wanted, ready[1]
        others = [process_of(after) for after in later if process_of(after) != wanted]
        if others and not self.next:
            kind = "torch" if others[0] == "torch" else "jax"
            self.next = kind, Worker(kind, self.cache)
        return self.now[1]

    def close(self) -> None:
        self._close(self.now)
        self._close(self.next)
        shutil.rmtree(self.cache, ignore_errors=True)

    def _close(self, worker: tuple[str, Worker] | None) -> None:
        if worker:
            worker[1].close()


def measured(
    pieces: list[str], rows: dict[str, Any], out: Path, workers: Workers, until: float, most: float
) -> None:
    """Adds the figures of these pieces to ``rows`` and to the file, one by one as they come.

    Args:
        pieces: in order.
        rows: what is known.
        out: the file.
        workers: who measures.
        until: when all ends, by the monotonic clock.
        most: seconds of a piece.
    """
    for number, piece in enumerate(pieces):
        began = time.monotonic()
        if until - began < 5:
            print(f"left: {', '.join(pieces[number:])}: run it again", flush=True)
            return
        worker = workers.of(piece, pieces[number + 1 :])
        known = rows.pop(piece, {})
        for line in worker.figures(piece, min(until, began + most)):
            if "found" in line:
                known = line["found"] | {"unfinished": CUT}
            else:
                known.pop("unfinished", None)
                if why := line["done"]:
                    cut = why == LATE and began + most > until
                    known["unfinished"] = CUT if cut else why
                known["seconds"] = round(time.monotonic() - began, 1)
            rows[piece] = known
            if "done" in line:
                print(f"{piece}: {json.dumps(known)}", flush=True)
            partial = out.with_suffix(".partial")  # never half a file
            partial.write_text(json.dumps(rows, indent=1) + "\n")
            partial.replace(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", help="these alone, done already or not")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--again", action="store_true", help="try unfinished pieces once more")
    parser.add_argument("--out", type=Path, help="results/gpu_DEVICE.json where it is not given")
    parser.add_argument("--page", action="store_true", help="write docs/gpu.md; measure nothing")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work(given.work)
    if given.page:
        from benchmarks import gpu_page

        return gpu_page.write()
    if unknown := [piece for piece in given.pieces if piece not in PIECES]:
        parser.error(f"pieces must be among {', '.join(PIECES)}, got {unknown[0]!r}")
    began, workers = time.monotonic(), Workers()
    try:
        run(given, parser, workers, began + 60 * given.minutes)
    finally:
        workers.close()


def run(
    given: argparse.Namespace, parser: argparse.ArgumentParser, workers: Workers, until: float
) -> None:
    """Measures what is asked for, or what is left."""
    told = list(workers.of("device", []).figures("device", until))
    if why := told[-1]["done"]:
        parser.error(f"no device: {why}")
    machine = told[0]["found"] | {"processor": platform.machine()}
    slug = "".join(c if c.isalnum() else "_" for c in machine["device"].lower())
    out = given.out or RESULTS / f"gpu_{slug}.json"
    rows = json.loads(out.read_text()) if out.exists() else {}
    if rows.get("machine", machine) != machine:
        parser.error(
            f"{out} has figures of {rows['machine']}, this is {machine}: give another --out"
        )
    rows["machine"] = machine
    print(f"machine: {json.dumps(machine)}", flush=True)
    absent = [name for name in ("jax_privacy", "opacus") if name not in machine]
    for name in absent:
        print(f"{name} is left out: it is not installed", flush=True)

    def left(piece: str) -> bool:
        why = rows.get(piece, {"unfinished": CUT}).get("unfinished")
        return why == CUT or bool(why and given.again)

    pieces = [piece for piece in PIECES if (piece in given.pieces if given.pieces else left(piece))]
    if "opacus" in absent:
        pieces = [piece for piece in pieces if process_of(piece) != "torch"]
    measured(pieces, rows, out, workers, until, max(30.0, 30 * given.minutes))


if __name__ == "__main__":
    main()
