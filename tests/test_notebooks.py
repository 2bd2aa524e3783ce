"""The notebooks run from top to bottom, and show what is stored in them.

That what is stored was shown by this code is checked by benchmarks/release.py.
"""

import base64
import re
from pathlib import Path

import nbformat
import pytest

from notebooks import execute
from tests.compiling import of_users

# One in every run; test_gpt2.py, test_docs.py and test_examples.py show what the others do.
QUICK = "03_claimed_and_proven"
EACH = [
    pytest.param(path, id=path.stem, marks=() if path.stem == QUICK else pytest.mark.slow)
    for path in execute.paths()
]


def shown(cell):
    """The text under a cell with # for each number, which follows draws and noise."""
    text = "".join(execute.text_of(output) for output in cell.outputs)
    return re.sub(r"-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?", "#", re.sub(r"\s", "", text))


def pictures(cell):
    found = [output.get("data", {}).get("image/png") for output in cell.outputs]
    return [base64.b64decode(picture) for picture in found if picture]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", EACH)
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


def test_of_a_progress_bar_the_end_is_stored_without_times():
    for told, end in (("", ""), (", epsilon=3.00, accuracy=0.9", " [epsilon=3.00, accuracy=0.9]")):
        notebook = with_output("stderr", "a warning\n" + BAR.format(told))
        (kept,) = execute.tidied(notebook).cells[0].outputs
        assert kept.text == f"100%|█████| 60/60{end}\n"


def test_what_belongs_to_one_machine_is_not_stored():
    root = str(Path(__file__).parent.parent)
    for text in (root, "<object at 0x7f3e5c0a1b20>", "2026-01-02 10:11"):
        with pytest.raises(ValueError, match="same on every machine"):
            execute.tidied(with_output("stdout", text))


def test_the_hash_follows_the_code_alone():
    cells = [nbformat.v4.new_markdown_cell("a"), nbformat.v4.new_code_cell("b")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    before = execute.hash_of_code(notebook)
    cells[0].source = "c"
    assert execute.hash_of_code(notebook) == before
    cells[1].source = "c"
    assert execute.hash_of_code(notebook) != before
