"""Breaks the package in one place at a time and runs the tests that should notice.

`python -m benchmarks.mutations [--room clipping] [--only NAME] [--jobs 2]`. The mutants are listed
in `benchmarks/mutants/`, one file for each part of the package. Each names a file, a piece of its
text, what takes its place, why that would matter, and the tests that should fail then. The working
tree is never touched: the package and its tests are copied to a temporary directory.

The tests run once on the package as it is, and must pass; then once for every mutant. What is found
is printed and kept in `benchmarks/results/mutations.json`.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from multiprocessing import connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LISTS = Path(__file__).parent / "mutants"
RESULTS = Path(__file__).parent / "results" / "mutations.json"
COPIED = ("jaxdp", "tests", "benchmarks")
SETTINGS = ("setup.cfg", "pyproject.toml")
# What pytest's exit status means for a mutant; any other means that the tests could not be run.
OUTCOMES = {0: "survived", 1: "killed"}
NOT_RUN = 99
# What takes long to import; never the package itself, nor what starts threads.
IMPORTED = ("jax", "jax.numpy", "optax", "scipy.stats", "scipy.special", "hypothesis", "pytest")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of the package that its tests must notice.

    Attributes:
        name: unique, in words joined by hyphens.
        room: the part of the package, the name of the list that it is in.
        file: that is changed, from the root of the repository.
        old: text that occurs exactly once in the file.
        new: what takes its place.
        why: what would go wrong if nobody noticed.
        tests: files or single tests, as pytest takes them.
    """

    name: str
    room: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    def problem(self, root: Path = ROOT) -> str:
        """What is wrong with the entry, in words; "" where it can be applied."""
        if self.old == self.new:
            return "changes nothing"
        count = (root / self.file).read_text().count(self.old)
        if count != 1:
            return f"its old text must occur exactly once in {self.file}, it occurs {count} times"
        for test in self.tests:
            path, _, function = test.partition("::")
            text = (root / path).read_text() if (root / path).is_file() else ""
            if f"def {function.partition('[')[0]}(" not in text and (function or not text):
                return f"there is no test {test}"
        return "" if self.tests else "names no test"

    def apply(self, root: Path) -> None:
        """Writes the mutant into a copy of the package."""
        path = root / self.file
        _write(path, path.read_text().replace(self.old, self.new))

    def undo(self, root: Path) -> None:
        """Writes the original back."""
        _write(root / self.file, (ROOT / self.file).read_text())


def mutants() -> list[Mutant]:
    """All mutants of all lists."""
    found = []
    for path in sorted(LISTS.glob("*.toml")):
        for row in tomllib.loads(path.read_text())["mutant"]:
            found.append(Mutant(room=path.stem, **{**row, "tests": tuple(row["tests"])}))
    return found


def copy_to(root: Path) -> Path:
    """Copies the package, the tests and their settings; returns the new root."""
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SETTINGS:
        shutil.copy(ROOT / name, root / name)
    return root


def pytest_here(root: Path, tests: tuple[str, ...], cache: Path, output: Path) -> None:
    """Runs pytest on a copy and ends the process with its status; for a process of its own."""
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.chdir(root)
    # One cache of compiled programs for all runs: most are the same in every mutant.
    os.environ |= {"PYTHONPATH": str(root), "JAXDP_TESTS": str(cache)}
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    sys.path[:] = [str(root), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in COPIED]:
        del sys.modules[name]
    import pytest

    import jaxdp

    if not Path(jaxdp.__file__).is_relative_to(root):
        print(f"the tests would not see the copy, but {jaxdp.__file__}")
        os._exit(NOT_RUN)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is imported already
    status = int(pytest.main([*options, *tests]))
    sys.stdout.flush()
    os._exit(status)


@dataclasses.dataclass
class Trial:
    """A run of tests that is under way: of a mutant, or of the package as it is (None)."""

    mutant: Mutant | None
    root: Path
    process: Any
    output: Path
    start: float

    def finish(self, in_time: bool = True) -> dict:
        """What the tests said, ready for JSON; the copy is the original again."""
        if not in_time:
            self.process.kill()
        self.process.join()
        if self.mutant is None:
            return {"outcome": OUTCOMES.get(self.process.exitcode, "error")}
        self.mutant.undo(self.root)
        # A test that takes the process with it has noticed as well; of a slow one nobody knows.
        outcome = "killed" if self.process.exitcode < 0 else "error"
        outcome = OUTCOMES.get(self.process.exitcode, outcome)
        text = self.output.read_text(errors="replace")
        by = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        if self.process.exitcode == 1 and not by:  # pytest itself, or what starts it, failed
            outcome = "error"
        if outcome == "error":
            print(text[-2_000:], file=sys.stderr)
        return {
            "name": self.mutant.name,
            "room": self.mutant.room,
            "file": self.mutant.file,
            "why": self.mutant.why,
            "outcome": outcome if in_time else "out of time",
            "by": by.group(1) if by else None,
            "seconds": round(time.perf_counter() - self.start, 1),
        }


def begin(mutant: Mutant | None, tests: tuple[str, ...], root: Path, cache: Path) -> Trial:
    """Starts the tests in a process that has imported JAX already: a fork of this one."""
    if mutant is not None:
        mutant.apply(root)
    output = root.with_suffix(".txt")
    arguments = (root, tests, cache, output)
    process = multiprocessing.get_context("fork").Process(target=pytest_here, args=arguments)
    process.start()
    return Trial(mutant, root, process, output, time.perf_counter())


def try_all(chosen: list[Mutant], jobs: int, seconds: float, original: bool) -> list[dict]:
    """Tries the mutants, ``jobs`` at a time, each in a copy of its own, and prints every result."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as place:
        cache = Path(place) / "cache"
        free = [copy_to(Path(place) / str(n)) for n in range(jobs)]
        if original:
            tests = tuple(sorted({test for mutant in chosen for test in mutant.tests}))
            trial = begin(None, tests, free[0], cache)
            if trial.finish()["outcome"] != "survived":
                raise SystemExit("without a mutant a test fails:\n" + trial.output.read_text())
        rows: list[dict] = []
        listed = {mutant.name for mutant in mutants()}
        waiting, going = list(chosen), list[Trial]()
        while waiting or going:
            while waiting and free:
                mutant = waiting.pop(0)
                going.append(begin(mutant, mutant.tests, free.pop(), cache))
            connection.wait([trial.process.sentinel for trial in going], timeout=1.0)
            for trial in list(going):
                in_time = time.perf_counter() - trial.start < seconds
                if trial.process.is_alive() and in_time:
                    continue
                going.remove(trial)
                rows.append(trial.finish(in_time))
                free.append(trial.root)
                print(line(rows[-1]), flush=True)
                keep(rows[-1:], listed)
        return rows


def line(row: dict) -> str:
    """One result in a line."""
    return f"{row['seconds']:6.1f} s  {row['outcome']:8}  {row['room']}  {row['name']}  {row['by']}"


def summary(rows: list[dict]) -> str:
    """The numbers of killed mutants by room, and the names of the others."""
    lines = []
    for room in sorted({row["room"] for row in rows}):
        here = [row for row in rows if row["room"] == room]
        killed = sum(row["outcome"] == "killed" for row in here)
        lines.append(f"{room}: {killed} of {len(here)} killed")
    others = [row for row in rows if row["outcome"] != "killed"]
    lines += [f"{row['outcome']}: {row['name']} ({row['why']})" for row in others]
    return "\n".join(lines)


def keep(rows: list[dict], listed: set[str]) -> None:
    """Writes the rows, in the place of earlier ones of the mutants that are listed."""
    earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    found = {row["name"]: row for row in (*earlier, *rows) if row["name"] in listed}
    ordered = sorted(found.values(), key=lambda row: (row["room"], row["name"]))
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--room", action="append", help="one list alone; may be given again")
    parser.add_argument("--only", action="append", help="one mutant alone; may be given again")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one mutant")
    parser.add_argument(
        "--not-the-original", action="store_true", help="skip the run without a mutant"
    )
    given = parser.parse_args()
    everything = mutants()
    if problems := [f"{m.name}: {m.problem()}" for m in everything if m.problem()]:
        raise SystemExit("\n".join(problems))
    chosen = [
        m
        for m in everything
        if (not given.room or m.room in given.room) and (not given.only or m.name in given.only)
    ]
    if not chosen:
        raise SystemExit(f"there is no such mutant; rooms: {sorted({m.room for m in everything})}")
    # Threads of several runs at once would wait for one another.
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    for name in IMPORTED:
        importlib.import_module(name)
    rows = try_all(chosen, given.jobs, given.timeout, not given.not_the_original)
    print(summary(rows))
    if any(row["outcome"] != "killed" for row in rows):
        raise SystemExit(1)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    # Python tells compiled code apart by second and size, which may both be those of before.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
