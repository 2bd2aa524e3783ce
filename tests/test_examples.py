"""The examples run as they stand, are short, and their table tells how short."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
# What a private script holds of the library: its module, and what comes out of its calls.
OURS = {"jaxdp", "mechanism", "trainer", "state", "batch", "info", "run", "ledger"}
PACKAGES = {"03_equinox": "equinox"}


@pytest.fixture
def as_users_run_it(monkeypatch, tmp_path):
    """JAX's own settings and folders of the test: examples hold no strict types."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("MPLBACKEND", "agg")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def epsilons(text):
    return [float(number) for number in re.findall(r"epsilon (\d+\.\d+)", text)]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "path", [p for p in EXAMPLES if "memory_map" not in p.stem], ids=lambda p: p.stem
)
def test_an_example_runs(path, as_users_run_it, capsys):
    if package := PACKAGES.get(path.stem):
        pytest.importorskip(package)
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert epsilons(said)
    assert 2.9 <= max(epsilons(said)) <= (3.3 if "together" in said else 3.0)
    accuracy = re.findall(r"(?:accuracy|\d+:) (0\.\d+)", said)
    if accuracy:
        assert float(accuracy[-1]) > 0.6


def test_a_memory_map_larger_than_the_peak_of_memory(as_users_run_it):
    """In a process of its own: the peak is a process's."""
    command = [sys.executable, str(FOLDER / "06_memory_map.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert epsilons(done.stdout)[0] <= 1.0
    if found := re.search(r"peak memory (\d+) MB", done.stdout):
        assert int(found[1]) < 600 < 1000 * float(re.match(r"(\S+) GB", done.stdout)[1])


def names(tree):
    """Attributes of what is jaxdp's, and arguments are not counted."""
    found = {"Bound.upper"} if "upper" in ast.dump(tree) else set()
    for node in ast.walk(tree):
        owner = getattr(getattr(node, "value", None), "id", "")
        if isinstance(node, ast.Attribute) and owner in OURS:
            found.add(f"{owner}.{node.attr}")
    return found


def private_lines(tree):
    """Lines of the outermost statements' parts that name anything of jaxdp's."""
    lines = set()
    for node in ast.walk(tree):
        inside = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if isinstance(node, ast.Import) and any(a.name == "jaxdp" for a in node.names):
            lines |= {node.lineno}
        elif isinstance(node, ast.stmt) and not hasattr(node, "body") and inside & OURS:
            lines |= set(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, (ast.For, ast.If)) and inside & OURS:
            lines |= {node.lineno}
    return lines


def counts(path):
    """(lines, private lines, names) of an example."""
    text = path.read_text()
    tree = ast.parse(text)
    return len(text.splitlines()), len(private_lines(tree)), len(names(tree))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_short(path):
    lines, private, used = counts(path)
    assert lines <= 40
    assert private <= 19
    assert used <= 10


def test_the_table_tells_the_counts():
    table = (FOLDER / "README.md").read_text()
    rows = dict(re.findall(r"\| \[(\w+)\.py\]\(\1\.py\) \|(.*)\|", table))
    assert set(rows) == {path.stem for path in EXAMPLES}
    for path in EXAMPLES:
        told = tuple(int(cell) for cell in rows[path.stem].split("|")[1:])
        assert told == counts(path), path.stem


def test_the_first_loop_takes_little():
    tree = ast.parse((FOLDER / "03_equinox.py").read_text())
    of_module = {name for name in names(tree) if name.startswith("jaxdp.")}
    assert len(of_module) <= 5
    loss = next(node for node in tree.body if getattr(node, "name", "") == "loss_fn")
    after = [line for line in private_lines(tree) if line > loss.end_lineno]
    assert len(after) <= 12
