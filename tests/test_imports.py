"""The rooms of the design: who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxdp"

# Each room may import those above it.
FLOW = [
    "_version",
    "_extras",
    "_validate",
    "_written",
    "_interrupts",
    "_durable",
    "_processes",
    "accounting",
    "_rows",
    "_shards",
    "_placement",
    "_links",
    "seeds",
    "tickets",
    "types",
    "normals",
    "_ledger_file",
    "_entries",
    "_ledger_shared",
    "ledger",
    "_issuer",
    "sampling",
    "sources",
    "clipping",
    "schedules",
    "_agreement",
    "_arithmetic",
    "noise",
    "_noises",
    "mechanism",
    "correlated",
    "_passes",
    "batches",
    "_frozen",
    "optimizers",
    "step",
    "checks",
    "_memory",
    "_state",
    "trainer",
    "auditing",
    "preprocess",
    "linear",
    "_images",
    "_pretrained",
    "features",
    "whitening",
    "models",
    "data",
    "report",
    "runs",
    "cli",
    "papers",
]


# Imported when it is called, not before: a convenience that leads back up.
LATE = {("optimizers", "step"), ("cli", "papers")}


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxdp"):
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from [a.name.split(".")[1] for a in node.names if a.name.startswith("jaxdp.")]


FILES = [p for p in PACKAGE.rglob("*.py") if room(p) not in ("__init__", "__main__")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_what_lies_before_it(path):
    here = FLOW.index(room(path))
    for other in imported_rooms(path):
        if other == "__version__" or (room(path), other) in LATE:
            continue
        assert FLOW.index(other) <= here, f"{path.name} imports {other}"


def test_late_imports_are_late():
    for path in FILES:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        top = [n.module for n in body if isinstance(n, ast.ImportFrom)]
        assert not [name for here, name in LATE if room(path) == here and f"jaxdp.{name}" in top]


def test_the_core_runs_without_the_papers():
    blocked("import jaxdp.runs.loop, jaxdp.cli.train\nassert 'jaxdp.papers' not in sys.modules\n")


def test_accounting_imports_nothing_of_the_rest():
    for path in (PACKAGE / "accounting").rglob("*.py"):
        assert set(imported_rooms(path)) <= {"accounting"}


def blocked(code, *names):
    block = "import sys\n" + "".join(f"sys.modules[{n!r}] = None\n" for n in names)
    subprocess.run([sys.executable, "-c", block + code], check=True, timeout=60)


def test_accounting_works_without_jax():
    blocked(
        "from jaxdp import accounting as acc\n"
        "assert acc.epsilon(acc.Gaussian(1.0), 1e-5).upper > 1\n",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "tensorflow_datasets",
        "sklearn",
    )


def test_accounting_commands_work_without_jax():
    blocked(
        "from jaxdp.cli import main\n"
        "main(['epsilon', '--sampling-prob', '0.01', '--noise-multiplier', '1', '--steps', '10',"
        " '--delta', '1e-5', '--json'])\n",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "tensorflow_datasets",
        "sklearn",
    )
