"""Measures how much of the package a reader must open, and refuses what makes it more.

`python -m benchmarks.house` prints each figure beside the one on record (`results/house.json`) and
its bar, and ends with status 1 where a figure is worse than recorded. `--still` leaves out what
must run (the walks). `--record` writes what was measured; where a figure got worse it asks for
`--reason`, which is kept beside that figure.

Lines of the package are non-blank ones, docstrings included; those of the tests are all lines.
A walk counts the files and functions of the package that a call enters, with every module already
imported; what a reading thread enters ahead of the call counts too, and may differ by one or two
from run to run.
"""

import argparse
import ast
import collections
import contextlib
import functools
import importlib
import io
import json
import os
import pkgutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxdp"
RECORD = Path(__file__).parent / "results" / "house.json"
# What is outside training and accounting.
EDGE = "papers runs cli data audit recipes __main__".split()
THREADED = ("batches", "step", "train")  # walks that a reading thread takes part in
SLACK = 2
NO_BAR = float("inf")
_SETTLED = 0.5  # seconds

Figures = dict[str, tuple[float, float]]  # name: (value, bar); smaller is better in all of them


class Walk:
    """The functions of the package that are entered inside, and how deep its own frames go."""

    def __init__(self) -> None:
        self.root = f"{PACKAGE}{os.sep}"
        self.entered: set[tuple[str, str]] = set()
        self.depth = 0

    def _enter(self, frame: Any, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(self.root):
            return
        name = frame.f_code.co_qualname
        if name.split(".")[-1].startswith("<"):  # comprehensions, lambdas
            return
        self.entered.add((frame.f_code.co_filename, name))
        depth = 0
        while frame is not None:
            depth += frame.f_code.co_filename.startswith(self.root)
            frame = frame.f_back
        self.depth = max(self.depth, depth)

    def __enter__(self) -> "Walk":
        sys.setprofile(self._enter)
        threading.setprofile(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def walks() -> Figures:
    """Files and functions behind each call of a first loop, of accounting and of the program."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxdp

    for module in pkgutil.walk_packages(jaxdp.__path__, "jaxdp."):
        if "__main__" not in module.name:
            importlib.import_module(module.name)
    found: Figures = {}

    def walk(name: str, files: int, functions: int, call: Any) -> Any:
        with Walk() as entered:
            result = call()
            time.sleep(_SETTLED)  # until a reading thread is as far ahead as it gets
        found[f"{name}: files"] = (len({file for file, _ in entered.entered}), files)
        found[f"{name}: functions"] = (len(entered.entered), functions)
        found[f"{name}: depth"] = (entered.depth, NO_BAR)
        return result

    x = np.random.default_rng(0).normal(size=(1000, 8)).astype("float32")
    data = (x, (x[:, 0] > 0).astype("int32"))
    params = {"w": jnp.zeros((8, 2)), "b": jnp.zeros(2)}

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], y)

    def budgeted() -> Any:
        sizes = {"l2_clip_norm": 1.0, "batch_size": 100, "dataset_size": 1000}
        return jaxdp.dp_sgd(epsilon=3.0, delta=1e-5, steps=20, **sizes)

    mechanism = walk("dp_sgd", 16, 110, budgeted)

    def own_loop(engine: str, first: tuple[int, int], gradient: tuple[int, int]) -> Any:
        """Walks through a loop of the user's own; returns its sampler."""
        make = functools.partial(jaxdp.Trainer, loss_fn, mechanism, optax.sgd(0.1), data)
        trainer = walk(f"Trainer, {engine}", 20, 80, lambda: make(engine=engine))
        state = walk(f"init, {engine}", 18, 80, lambda: trainer.init(params))

        def first_batch() -> Any:
            batches = trainer.batches(20)
            return batches, next(batches)

        batches, batch = walk(f"batches and the first, {engine}", 14, 60, first_batch)
        state, _ = walk(f"step, {engine}, first", *first, lambda: trainer.step(state, batch))
        batch = next(batches)
        walk(f"step, {engine}, warm", 8, 25, lambda: trainer.step(state, batch))
        sampler = mechanism.sampler(1000)
        draw = walk(f"draw, {engine}", 8, 30, sampler.draw)
        grad_fn, rows = mechanism.clipped_grad(loss_fn, engine=engine), jax.device_put(data)
        name = f"gradient of a draw, {engine}, first"
        walk(name, *gradient, lambda: grad_fn(params, rows, draw))
        return sampler

    own_loop("vmap", (17, 80), (10, 50))
    sampler = own_loop("auto", (26, 150), (18, 125))
    acc = jaxdp.accounting
    run = acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.07), 0.0123), 4321)
    walk("epsilon of a run", 12, 80, lambda: acc.epsilon(run, 1e-5))
    walk("ledger.epsilon", 14, 80, lambda: sampler.ledger.epsilon(1e-5))

    def train() -> None:
        main = importlib.import_module("jaxdp.__main__").main
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            sys.argv = [*"jaxdp train --dataset digits --steps 20 --epsilon 3 --out".split()]
            sys.argv += [f"{folder}/run"]
            with contextlib.suppress(SystemExit):
                main()

    walk("jaxdp train", 70, 450, train)
    return found


def rooms() -> Figures:
    """Sizes of the package and the tests, names used twice, and how rooms depend on each other."""
    lines: dict[str, int] = collections.Counter()
    classes: dict[str, int] = collections.Counter()
    loose, arguments, untyped = 0, 0, 0
    trees: dict[str, tuple[Path, ast.Module]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        text = path.read_text(encoding="utf8")
        loose += len(parts) == 1 and parts[0] not in ("__init__.py", "__main__.py")
        lines[parts[0].removesuffix(".py")] += sum(bool(line.strip()) for line in text.splitlines())
        module = ".".join(("jaxdp", *parts)).removesuffix(".py").removesuffix(".__init__")
        tree = ast.parse(text)
        trees[module] = path, tree
        classes.update(n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
        for annotation in _annotations(tree):
            arguments += 1
            untyped += "Any" in annotation or annotation == "object"

    graph = {module: _imports(module, *trees[module], set(trees)) for module in trees}
    arrows: dict[str, set[str]] = collections.defaultdict(set)
    for module, others in graph.items():
        for other in others:
            here, there = (m.split(".")[1] if "." in m else "" for m in (module, other))
            if here and there and here != there:
                arrows[here].add(there)

    tests = [p.read_text(encoding="utf8") for p in sorted((ROOT / "tests").rglob("*.py"))]
    return {
        "core, lines": (sum(n for room, n in lines.items() if room not in EDGE), 16_500),
        "audit and checks, lines": (lines["audit"], 3_000),
        "jaxdp/, lines": (sum(lines.values()), 31_000),
        "tests/, lines": (sum(len(text.splitlines()) for text in tests), 28_000),
        "loose modules": (loose, 8),
        "rooms": (len(lines), 23),
        "class names used twice": (sum(n > 1 for n in classes.values()), 0),
        "Any or object, % of arguments": (round(100 * untyped / arguments, 1), 4),
        "circles of modules": (len(circles(graph)), 0),
        "circles of rooms": (len(circles(arrows)), 0),
        "arrows between rooms": (sum(map(len, arrows.values())), 75),
    }


def _annotations(tree: ast.Module) -> list[str]:
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    arguments = (
        a for f in functions for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)
    )
    return [ast.unparse(a.annotation) for a in arguments if a.annotation is not None]


def _imports(module: str, path: Path, tree: ast.Module, names: set[str]) -> set[str]:
    """Modules of the package that one imports, inside functions too, but not for types alone."""
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            # The module itself where one is imported, not the package that it lies in.
            inner = (f"{base}.{alias.name}" for alias in node.names)
            found |= {name if name in names else base for name in inner}
    return (found & names) - {module}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan 1972, "Depth-first search")."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []
    sys.setrecursionlimit(10_000)

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            place = stack.index(node)
            if len(stack) - place > 1:
                found.append(stack[place:])
            del stack[place:]

    for node in list(graph):
        if node not in index:
            visit(node)
    return found


def readme() -> Figures:
    """Lines and characters of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf8")
    return {
        "README, lines": (len(text.splitlines()), 130),
        "README, characters": (len(text), 8_000),
    }


def worse(name: str, value: float, recorded: float) -> bool:
    """True where a figure exceeds the one on record by more than a reading thread can make it."""
    walk, colon, _ = name.partition(":")
    threaded = bool(colon) and any(word in walk for word in THREADED)
    return value > recorded + SLACK * threaded


def main() -> None:
    """Prints every figure; records them, or ends with status 1 where one is worse than recorded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--still", action="store_true", help="leaves out what must run")
    parser.add_argument("--record", action="store_true", help="writes what was measured")
    parser.add_argument("--reason", default="", help="why a figure got worse")
    options = parser.parse_args()
    if options.record and options.still:
        parser.error("--record writes every figure; leave --still out")

    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    figures = {**rooms(), **readme(), **({} if options.still else walks())}
    grown = [n for n, (v, _) in figures.items() if n in record and worse(n, v, record[n]["value"])]
    print(f"{'':44}{'now':>9}{'recorded':>10}{'bar':>8}")
    for name, (value, bar) in figures.items():
        before = record[name]["value"] if name in record else "none"
        mark = "  WORSE" if name in grown else ""
        print(f"{name:44}{value:>9}{before:>10}{'' if bar == NO_BAR else bar:>8}{mark}")
    short = sum(value > bar for value, bar in figures.values())
    print(f"{short} of {len(figures)} are above their bar; {len(grown)} are worse than recorded")

    if not options.record:
        sys.exit(bool(grown))
    if grown and not options.reason:
        parser.error(f"worse than recorded: {', '.join(grown)}; --reason says why")
    written = {}
    for name, (value, _) in figures.items():
        if name in grown:
            written[name] = {"value": value, "reason": options.reason}
        elif name in record and value >= record[name]["value"]:
            written[name] = record[name]  # what a thread adds is no news
        else:
            written[name] = {"value": value}
    RECORD.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
