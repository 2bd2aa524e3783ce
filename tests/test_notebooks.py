"""The notebooks run from top to bottom, and what is stored in them is what today's code shows."""

import base64
import re
import tomllib
from pathlib import Path

import nbformat
import pytest

from notebooks import execute
from tests.compiling import of_users

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
COLAB = "https://colab.research.google.com"
INSTALL = f"""# Installs jaxdp where it is missing (in Colab, for instance).
import importlib.util

if importlib.util.find_spec("jaxdp") is None:
    %pip install -q "{PROJECT["name"]}[all] @ git+{REPOSITORY}"
"""
each = pytest.mark.parametrize("path", execute.paths(), ids=lambda path: path.stem)


def shown(cell):
    """The text under a cell with # for each number, which follows draws and noise."""
    text = "".join(execute.text_of(output) for output in cell.outputs)
    return re.sub(r"-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?", "#", re.sub(r"\s", "", text))


def pictures(cell):
    found = [output.get("data", {}).get("image/png") for output in cell.outputs]
    return [base64.b64decode(picture) for picture in found if picture]


def test_there_are_notebooks():
    assert len(execute.paths()) == 6


@each
def test_what_is_stored_was_shown_by_this_code(path):
    notebook = nbformat.read(path, as_version=4)
    cells = execute.code_cells(notebook)
    assert notebook.metadata["jaxdp"]["executed"] == execute.hash_of_code(notebook), (
        f"{path.name} was changed after it was executed: make notebooks"
    )
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert "error" not in [output.output_type for output in outputs]
    found = [picture for cell in cells for picture in pictures(cell)]
    assert found
    assert all(picture.startswith(b"\x89PNG") for picture in found)
    assert path.stat().st_size < 300_000


@each
def test_what_is_stored_is_tidy(path):
    notebook = nbformat.read(path, as_version=4)
    before = nbformat.writes(notebook)
    assert nbformat.writes(execute.tidied(notebook)) == before


@each
def test_it_opens_in_colab_and_installs_from_the_repository(path):
    notebook = nbformat.read(path, as_version=4)
    first, install = notebook.cells[:2]
    address = f"{REPOSITORY.removeprefix('https://')}/blob/main/notebooks/{path.name}"
    badge = f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({COLAB}/{address})"
    badge = badge.replace("com/github.com/", "com/github/")
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert badge in first.source.splitlines()
    assert install.source == INSTALL.rstrip()


# Minutes; that the same network learns at a proven epsilon, tests/test_gpt2.py shows every time.
SLOW = "06_fine_tune_a_language_model"
marked = [
    pytest.param(p, marks=pytest.mark.slow if p.stem == SLOW else ()) for p in execute.paths()
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", marked, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored(path):
    stored = nbformat.read(path, as_version=4)
    ran = execute.tidied(execute.execute(stored, of_users()))
    for cell, today in zip(*map(execute.code_cells, (stored, ran)), strict=True):
        assert len(pictures(today)) == len(pictures(cell))
        if "varies" not in cell.metadata.get("tags", []):
            assert shown(today) == shown(cell)


BAR = "\r  0%|     | 0/60 [00:00<?, ?it/s]\r100%|█████| 60/60 [00:03<00:00, 17.10it/s{}]\n"


@pytest.mark.parametrize("told", ["", ", epsilon=3.00, accuracy=0.9"])
def test_of_a_progress_bar_the_end_is_stored_without_times(told):
    output = nbformat.v4.new_output("stream", name="stderr", text="a warning\n" + BAR.format(told))
    cell = nbformat.v4.new_code_cell("", outputs=[output])
    (kept,) = execute.tidied(nbformat.v4.new_notebook(cells=[cell])).cells[0].outputs
    end = f" [{told.removeprefix(', ')}]" if told else ""
    assert kept.text == f"100%|█████| 60/60{end}\n"


@pytest.mark.parametrize("text", [str(ROOT), "<object at 0x7f3e5c0a1b20>", "2026-01-02 10:11"])
def test_what_belongs_to_one_machine_is_not_stored(text):
    output = nbformat.v4.new_output("stream", name="stdout", text=text)
    cell = nbformat.v4.new_code_cell("", outputs=[output])
    with pytest.raises(ValueError, match="same on every machine"):
        execute.tidied(nbformat.v4.new_notebook(cells=[cell]))


def test_the_hash_follows_the_code_alone():
    cells = [nbformat.v4.new_markdown_cell("a"), nbformat.v4.new_code_cell("b")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    before = execute.hash_of_code(notebook)
    cells[0].source = "c"
    assert execute.hash_of_code(notebook) == before
    cells[1].source = "c"
    assert execute.hash_of_code(notebook) != before
