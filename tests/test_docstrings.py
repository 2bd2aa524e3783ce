"""Docstrings: the first line says what is returned or done, in the field's words, in one dialect."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxdp"
FILES = sorted(PACKAGE.rglob("*.py"))
QUESTION = re.compile(r"(What|Whether|How|Where|When|Which|Who|Why)\b")
# Words of this house, and words that mean another thing in the field; see docs/glossary.md.
BANNED = re.compile(
    r"\b(forced out|clumps?|riddles?|members? of the data|rows? of the data|front doors?)\b"
)
SECTIONS = {"Args", "Attributes", "Example", "Raises", "Returns", "Yields"}
HEADING = re.compile(r"^([A-Z]\w+):$", re.MULTILINE)
SINGLE_TICKS = re.compile(r"(?<![`:\w])`[^`\n]+`(?!`)")


def docstrings(path):
    """(name, text) of every docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        documented = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        if documented and (text := ast.get_docstring(node)):
            yield getattr(node, "name", path.name), text


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_docstrings_say_what_is_returned_in_words_of_the_field(path):
    for name, text in docstrings(path):
        first = text.split("\n")[0]
        assert not QUESTION.match(first), f"{name}: {first}"
        assert not (found := BANNED.search(text)), f"{name}: {found and found[0]}"


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if "cli" not in path.parts],  # click shows those as they are
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_docstrings_are_in_one_dialect(path):
    for name, text in docstrings(path):
        assert set(HEADING.findall(text)) <= SECTIONS, f"{name}: {HEADING.findall(text)}"
        assert not (found := SINGLE_TICKS.search(text)), f"{name}: {found and found[0]}"
        for section in HEADING.split(text)[2::2]:
            indent = re.match(r"\n( *)", section)
            assert indent, name
            assert len(indent[1]) == 4, f"{name}: sections are indented by four spaces"
