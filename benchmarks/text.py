"""A private classifier of text: which package a paragraph of documentation comes from.

python -m benchmarks.text [--runs 3] [--epsilons 1 3 8] [--not-private] [--choose]

Nothing is downloaded: the paragraphs are docstrings of packages that jaxdp[all] installs. They are
open, and play notes that people gave in confidence. docs/text.md says what is proven.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp

RESULTS = Path(__file__).parent / "results" / "text.json"
PACKAGES = ("jax", "matplotlib", "numpy", "orbax", "scipy", "sklearn", "tensorflow_datasets")
# For choosing the constants below: other texts, other classes. None is Python's own library.
OTHERS = ("flax", "fontTools", "IPython", "optax", "pip", "pygments", None)
# Words that would give a package away are taken out of every text.
NAMES = re.compile(
    r"\b(?:jax\w*|jnp|lax|xla|matplotlib|mpl\w*|pyplot|plt|numpy|np|ndarray|orbax|ocp|scipy|sp|"
    r"sklearn|scikit|tensorflow\w*|tfds|tf|flax|fonttools|ipython|optax|pip|pygments|python)\b",
    re.IGNORECASE,
)
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "testing", "externals", "_vendor"}
DELTA, EPSILONS = 1e-5, (1.0, 3.0, 8.0)
# n-grams of so many characters, each at COPIES of WIDTH places with a random sign; public seed.
GRAMS, WIDTH, COPIES, SEED = (2, 3, 4, 5), 2_048, 4, 2021
CLIP = 1.0


def paragraphs(folder: Path) -> Iterator[tuple[str, str]]:
    """(file, paragraph) of every docstring: prose of 30 to 400 characters."""
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder)
        if SKIPPED & {*name.parts}:
            continue
        for text in re.findall('"""(.*?)"""', file.read_text("utf-8", "ignore"), re.DOTALL):
            for part in re.split(r"\n\s*\n", text):
                words = " ".join(part.split())
                if re.fullmatch(r"[A-Z][ -~]{28,398}\.", words) and not re.search(">>>|--", words):
                    yield name.as_posix(), words


def collected(folders: dict[str, Path]) -> list[tuple[str, int, bool]]:
    """(text, class, held out) of every paragraph, each once; one of two packages is left out.

    A fifth of the files, by a hash of their names, is held out with all that is in it.
    """
    found: dict[str, tuple[int, bool] | None] = {}
    for label, (name, folder) in enumerate(folders.items()):
        for file, words in paragraphs(folder):
            text = " ".join(NAMES.sub(" ", words).split())
            held_out = hashlib.sha256(f"{name}/{file}".encode()).digest()[0] % 5 == 0
            first = found.setdefault(text, (label, held_out))
            if first is not None and first[0] != label:
                found[text] = None
    return [(text, *kept) for text, kept in sorted(found.items()) if kept is not None]


def folders(names: tuple[str | None, ...]) -> dict[str, Path]:
    """Where packages lie; None is Python's own library."""
    found = {}
    for name in names:
        spec = importlib.util.find_spec(name) if name else None
        places = spec.submodule_search_locations if spec else [str(Path(os.__file__).parent)]
        found[name or "python"] = Path(next(iter(places or [])))
    return found


def mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's last steps: 64 bits of which each depends on all of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def embedded(text: str) -> np.ndarray:
    """float32 [WIDTH] of norm 1: a sparse random projection of the counts of n-grams.

    Kane and Nelson 2014, "Sparser Johnson-Lindenstrauss transforms": every n-gram adds ±1 at COPIES
    places that a hash chooses (here all from one hash; each n-gram counts by its square root). A
    function of the text and public constants.
    """
    letters = np.frombuffer(f" {text.lower()} ".encode(), np.uint8).astype(np.uint64)
    total = np.zeros(WIDTH)
    for length in GRAMS:
        if len(letters) < length:
            continue
        code = np.full(len(letters) - length + 1, SEED * 8 + length, np.uint64)
        for i in range(length):
            code = code * np.uint64(257) + letters[i : len(letters) - length + 1 + i]
        code, often = np.unique(code, return_counts=True)
        for copy in range(COPIES):
            drawn = mixed(code + np.uint64(copy * 0x9E3779B97F4A7C15 % 2**64))
            sign = np.where(drawn >> np.uint64(63), 1.0, -1.0) * np.sqrt(often)
            place = (drawn % np.uint64(WIDTH)).astype(np.int64)
            total += np.bincount(place, sign, WIDTH)
    return (total / max(float(np.linalg.norm(total)), 1e-12)).astype(np.float32)


class Task:
    """Embedded paragraphs with their classes.

    Attributes:
        train: (x float32 [n, WIDTH], y int32 [n]).
        test: the same of held-out files.
        digest: of all texts with their classes: another version of a package gives another one.
    """

    def __init__(self, folders: dict[str, Path]):
        rows = collected(folders)
        x = np.stack([embedded(text) for text, _, _ in rows])
        y = np.asarray([label for _, label, _ in rows], np.int32)
        held = np.asarray([held_out for _, _, held_out in rows])
        self.train, self.test = (x[~held], y[~held]), (x[held], y[held])
        self.classes = len(folders)
        self.digest = hashlib.sha256(repr(rows).encode()).hexdigest()

    def params(self) -> dict[str, jax.Array]:
        return {"w": jnp.zeros((WIDTH, self.classes)), "b": jnp.zeros(self.classes)}

    def accuracy(self, params: dict[str, jax.Array]) -> float:
        found = np.argmax(self.test[0] @ np.asarray(params["w"]) + np.asarray(params["b"]), axis=1)
        return float(np.mean(found == self.test[1]))


def loss_fn(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Cross-entropy of one record."""
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def private(task: Task, epsilon: float, steps: int, rate: float) -> tuple[dict, float, float]:
    """(parameters, proven epsilon, noise multiplier) of DP-SGD in batches of an eighth."""
    count = len(task.train[1])
    mechanism = jaxdp.dp_sgd(
        epsilon=epsilon,
        delta=DELTA,
        steps=steps,
        l2_clip_norm=CLIP,
        batch_size=count // 8,
        dataset_size=count,
    )
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(rate, momentum=0.9), task.train)
    state = trainer.init(task.params())
    for batch in trainer.batches():
        state, _ = trainer.step(state, batch)
    return state.params, trainer.epsilon().upper, mechanism.noise_multiplier


def not_private(task: Task, steps: int, rate: float) -> dict:
    """The same model by gradient descent on all records, without clipping or noise."""
    x, y = map(jnp.asarray, task.train)
    optimizer = optax.sgd(rate, momentum=0.9)
    params, state = task.params(), optimizer.init(task.params())
    gradient: Callable = jax.jit(
        jax.grad(lambda p: jnp.mean(jax.vmap(loss_fn, (None, 0, 0))(p, x, y)))
    )
    for _ in range(steps):
        updates, state = optimizer.update(gradient(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def chosen() -> None:
    """Prints accuracies on the other packages, by which STEPS and RATE were chosen."""
    task = Task(folders(OTHERS))
    sizes = [len(part[1]) for part in (task.train, task.test)]
    common = np.bincount(task.test[1]).max() / sizes[1]
    print(f"{sizes} paragraphs, most frequent class {common:.4f}", flush=True)
    for steps in (50, 100):
        for rate in (2.0, 4.0, 8.0):
            params, _, noise = private(task, 3.0, steps, rate)
            print(steps, rate, round(task.accuracy(params), 4), round(noise, 3), flush=True)


# The best of the six that ``--choose`` prints, of the other packages at epsilon 3.
STEPS, RATE = 100, 4.0


def main() -> None:
    """Writes the accuracies of all runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epsilons", nargs="*", type=float, default=EPSILONS)
    parser.add_argument("--not-private", action="store_true")
    parser.add_argument("--choose", action="store_true")
    given = parser.parse_args()
    if given.choose:
        chosen()
        return
    began = time.perf_counter()
    task = Task(folders(PACKAGES))
    about = {
        "versions": {n: metadata.version(n) for n in ("jax", "matplotlib", "numpy", "scipy")}
        | {"sklearn": metadata.version("scikit-learn")}
        | {"orbax": metadata.version("orbax-checkpoint")}
        | {"tensorflow_datasets": metadata.version("tensorflow-datasets")},
        "sha256": task.digest,
        "train": np.bincount(task.train[1]).tolist(),
        "test": np.bincount(task.test[1]).tolist(),
        "embedding_seconds": round(time.perf_counter() - began, 1),
    }
    print(about, flush=True)
    constants = {"delta": DELTA, "steps": STEPS, "rate": RATE, "clip": CLIP, "width": WIDTH}
    for epsilon in given.epsilons:
        keep(about, constants, measured(task, epsilon, given.runs))
    if given.not_private:
        accuracy = task.accuracy(not_private(task, 200, 20.0))
        keep(about, constants, {"epsilon": None, "accuracy": [round(accuracy, 5)]})


def keep(about: dict, constants: dict, row: dict) -> None:
    """Writes a row; others of the same texts and constants stay."""
    print(row, flush=True)
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": []}
    same = kept.get("constants") == constants and kept["task"]["sha256"] == about["sha256"]
    rows = [r for r in kept["rows"] if r["epsilon"] != row["epsilon"]] if same else []
    kept = {"task": about, "constants": constants, "rows": [*rows, row]}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def measured(task: Task, epsilon: float, runs: int) -> dict:
    accuracies, seconds = [], []
    for _ in range(runs):
        began = time.perf_counter()
        params, proven, noise = private(task, epsilon, STEPS, RATE)
        accuracies.append(round(task.accuracy(params), 5))
        seconds.append(round(time.perf_counter() - began, 1))
    row = {"epsilon": epsilon, "accuracy": accuracies, "proven_epsilon": proven}
    return row | {"noise_multiplier": noise, "seconds": seconds}


if __name__ == "__main__":
    main()
