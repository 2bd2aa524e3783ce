"""The first line of a docstring says what is returned or done."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxdp"
QUESTION = re.compile(r"(What|Whether|How|Where|When|Who|Why)\b")


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_no_docstring_opens_with_a_question(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            first = (ast.get_docstring(node) or "").split("\n")[0]
            assert not QUESTION.match(first), f"{getattr(node, 'name', path.name)}: {first}"
