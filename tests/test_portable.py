"""Nothing in the package leans on one system; `make lint` type-checks it for three."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxdp"
FILES = sorted(PACKAGE.rglob("*.py"))
TEXT = {"read_text", "write_text", "open", "fdopen"}
# Those that have an encoding of their own.
NO_FILES = {"os.open", "Image.open", "self._book.open", "self._own.open", "archive.open"}
POSIX = re.compile(r"/(tmp|proc|dev|usr|etc|var|home)\b")


def nodes(path, kind):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def is_binary(call):
    return any(
        isinstance(arg, ast.Constant) and re.fullmatch(r"[rwaxb+]*b[rwaxb+]*", str(arg.value))
        for arg in call.args
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_text_files_have_an_encoding_and_paths_are_of_no_system(path):
    for call in nodes(path, ast.Call):
        name = ast.unparse(call.func)
        if name.rpartition(".")[2] in TEXT and name not in NO_FILES and not is_binary(call):
            given = {keyword.arg for keyword in call.keywords}
            assert "encoding" in given, f"{path.name}:{call.lineno}: {name} without encoding="
    for node in nodes(path, ast.Constant):
        assert not POSIX.match(str(node.value)), f"{path.name}:{node.lineno}: {node.value}"


def test_what_is_hashed_has_the_same_bytes_on_every_system():
    opened = [call for call in nodes(PACKAGE / "_durable.py", ast.Call) if not is_binary(call)]
    text = [call for call in opened if ast.unparse(call.func) in ("path.open", "os.fdopen")]
    assert len(text) == 2
    for call in text:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given["newline"] == repr("\n")
