"""The code that is shown runs: README, pages, docstrings, examples and notebooks.

That pages name what is there, that links lead somewhere, that examples are short, and that what a
notebook stores was shown by its code, is checked by benchmarks/release.py.
"""

import ast
import base64
import contextlib
import doctest
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import optax
import pytest

import jaxdp
from benchmarks import site
from notebooks import execute
from tests.compiling import of_users
from tests.refusing import refused
from tests.runs.small import undrawn

ROOT = Path(__file__).parent.parent
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
KNOWN = {"jax": jax, "jaxdp": jaxdp, "jnp": jnp, "np": np, "optax": optax}
NNX_LORA = EXAMPLES / "language_model" / "nnx_lora.py"
MEMORY_MAP, PACKAGES = EXAMPLES / "06_memory_map.py", {"03_equinox": "equinox"}


@contextlib.contextmanager
def as_users():
    """JAX's own settings, where types and ranks are promoted; reports without their plots."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), undrawn():
        yield


def code(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def executed(page, namespace):
    """Runs the page's code."""
    for block in code(page):
        exec(compile(block, page.name, "exec"), namespace)


def test_the_readme_runs_from_top_to_bottom_and_prints_what_it_says(capsys):
    readme = ROOT / "README.md"
    quickstart, _ = code(readme)
    assert len(quickstart.splitlines()) <= 25
    with as_users():
        executed(readme, {})
    printed = r"accuracy (\d\d\.\d)% at epsilon 1\.00, delta 1e-6"
    accuracy, epsilon = re.fullmatch(
        rf"{printed}\n(\d\.\d{{4}})\d*\n", capsys.readouterr().out
    ).groups()
    text = readme.read_text(encoding="utf-8")
    assert float(accuracy) == pytest.approx(float(re.search(printed, text)[1]), abs=1.5)
    assert f"# {epsilon}..." in text


@pytest.fixture(scope="module")
def tutorial():
    namespace = {}
    with as_users():
        return namespace, execute.page(execute.TUTORIAL.read_text(encoding="utf-8"), namespace)


def test_the_tutorial_ends_in_a_private_model_and_shows_what_it_prints(tutorial):
    namespace, said = tutorial
    assert masked(said) == masked(execute.TUTORIAL.read_text(encoding="utf-8"))
    accuracy, epsilon = re.search(r"accuracy ([\d.]+)% at epsilon ([\d.]+)", said).groups()
    assert float(accuracy) > 60
    assert 2.9 < float(epsilon) <= 3.0
    assert "no assumption that jaxdp can notice" in said
    assert (namespace["run"].path / "report.html").exists()


def each_of(paths, is_slow=lambda name: False):
    """One a test, named by its file."""
    marks = {path: pytest.mark.slow if is_slow(path.stem) else () for path in sorted(paths)}
    return [pytest.param(path, id=path.stem, marks=mark) for path, mark in marks.items()]


# Slow: several runs each, of what tests/runs and tests/test_mesh.py show on smaller ones.
SLOW = ("tune", "accuracy", "resume", "train_longer", "devices", "audit")
SLOW += ("05_kill_and_resume", "09_accuracy_against_epsilon", "10_text_in_buckets")
SLOW += ("11_gan", "12_vae", "13_diffusion", "16_lstm", "19_recommender")
SLOW += ("20_class_imbalance", "22_sparse_noise", "does_not_learn")
PAGES = each_of(DOCS.glob("howto/*.md"), SLOW.__contains__)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_after_the_tutorial(tutorial, page):
    with as_users():
        executed(page, dict(tutorial[0]))


@pytest.mark.parametrize(
    "page", ["accounting.md", "correlated_noise.md", "hidden_state.md", "tabular.md"]
)
def test_the_code_of_a_page_of_its_own_runs(page):
    with as_users():
        executed(DOCS / page, {})


def docstrings():
    """(place, text) of every docstring of the package with an example."""
    for path in sorted((ROOT / "jaxdp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if "Example:\n    >>>" in text:
                    yield f"{path.name}:{getattr(node, 'name', 'module')}", text


def test_examples_of_docstrings_print_what_they_say():
    said, run = [], 0
    with jax.numpy_dtype_promotion("standard"):  # as a user has it
        for place, text in docstrings():
            test = doctest.DocTestParser().get_doctest(text, dict(KNOWN), place, None, None)
            run += doctest.DocTestRunner().run(test, out=said.append).attempted
    assert run > 50
    assert not said, "".join(said)  # each names its place


@pytest.fixture
def in_a_folder(monkeypatch, tmp_path):
    """With folders of the test, and no windows."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("MPLBACKEND", "agg")


def epsilons(text):
    return [float(number) for number in re.findall(r"epsilon (\d+\.\d+)", text)]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "path", each_of({*EXAMPLES.glob("*.py"), NNX_LORA} - {MEMORY_MAP}, SLOW.__contains__)
)
def test_an_example_runs(path, in_a_folder, capsys):
    if package := PACKAGES.get(path.stem):
        pytest.importorskip(package)
    with as_users():
        runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert epsilons(said)
    assert 2.9 <= max(epsilons(said)) <= (3.3 if "together" in said else 3.0)
    accuracy = re.findall(r"(?:accuracy|\d+:) (0\.\d+)", said)
    if accuracy:
        assert float(accuracy[-1]) > 0.6
    # The same program without privacy, and with.
    if plain := re.findall(r"(\d+\.\d+)\b.* at epsilon inf", said):
        private = re.findall(r"(\d+\.\d+)\b.* at epsilon \d", said)
        assert float(private[-1]) == pytest.approx(float(plain[0]), rel=0.1)


@pytest.mark.slow
def test_a_memory_map_larger_than_the_peak_of_memory(in_a_folder):
    """In a process of its own: the peak is a process's."""
    command = [sys.executable, str(MEMORY_MAP)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert epsilons(done.stdout)[0] <= 1.0
    if found := re.search(r"peak memory (\d+) MB", done.stdout):
        assert int(found[1]) < 600 < 1000 * float(re.match(r"(\S+) GB", done.stdout)[1])


def masked(text):
    """Without white space, and with # for each number, which follows draws and noise."""
    return re.sub(r"-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?", "#", re.sub(r"\s", "", text))


def shown(cell):
    return masked("".join(execute.text_of(output) for output in cell.outputs))


def pictures(cell):
    found = [output.get("data", {}).get("image/png") for output in cell.outputs]
    return [base64.b64decode(picture) for picture in found if picture]


# One in every run. The last one fetches a language model, and runs by `make notebooks` alone.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", each_of(execute.paths()[:-1], "03_claimed_and_proven".__ne__))
def test_a_notebook_runs_and_shows_what_is_stored(path):
    stored = nbformat.read(path, as_version=4)
    ran = execute.tidied(execute.execute(stored, of_users()))
    for cell, today in zip(*map(execute.code_cells, (stored, ran)), strict=True):
        assert [p[:4] for p in pictures(today)] == [b"\x89PNG"] * len(pictures(cell))
        if "varies" not in cell.metadata.get("tags", []):
            assert shown(today) == shown(cell)


def with_output(name, text):
    output = nbformat.v4.new_output("stream", name=name, text=text)
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[output])])


BAR = "\r  0%|     | 0/60 [00:00<?, ?it/s]\r100%|█████| 60/60 [00:03<00:00, 17.10it/s{}]\n"


def test_of_a_notebook_nothing_of_one_machine_is_stored_and_the_hash_follows_the_code():
    """Of a progress bar the end, without times."""
    for told, end in (("", ""), (", epsilon=3.00, accuracy=0.9", " [epsilon=3.00, accuracy=0.9]")):
        notebook = with_output("stderr", "a warning\n" + BAR.format(told))
        (kept,) = execute.tidied(notebook).cells[0].outputs
        assert kept.text == f"100%|█████| 60/60{end}\n"
    for text in (str(ROOT), "<object at 0x7f3e5c0a1b20>", "2026-01-02 10:11"):
        refused("same on every machine", execute.tidied, with_output("stdout", text))
    # The hash of a notebook follows the code alone.
    cells = [nbformat.v4.new_markdown_cell("a"), nbformat.v4.new_code_cell("b")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    before = execute.hash_of_code(notebook)
    cells[0].source = "c"
    assert execute.hash_of_code(notebook) == before
    cells[1].source = "c"
    assert execute.hash_of_code(notebook) != before


def test_the_site_shows_notebooks_with_their_outputs_and_texts_of_the_root():
    for path in execute.paths():
        page, drawn = site.notebook(path)
        for cell in execute.code_cells(nbformat.read(path, as_version=4)):
            for picture in pictures(cell):
                assert picture in drawn.values()
            for output in cell.outputs:
                text = output.get("data", {}).get("text/markdown") or execute.text_of(output)
                assert text.rstrip() in page or "image/png" in output.data
    text = "[a](docs/tutorial.md#x), [b](SECURITY.md), [c](examples), [d](https://a.b)"
    found = "[a](tutorial.md#x), [b](security.md), [c](at/blob/main/examples), [d](https://a.b)"
    assert site.rooted(text, "at") == found
