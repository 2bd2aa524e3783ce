"""Rules of this house that ruff and mypy do not have: `python -m benchmarks.lint`, in `make lint`.

Prints `file:line: what is wrong` for every breach in the package, and ends with 1 where there is
one. Rooms import only those before them; docstrings say what is returned, in the field's words and
in one dialect; files of text have an encoding, and nothing leans on one operating system.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "jaxdp"

# Each room may import those before it.
FLOW = """
    _version _extras arguments accounting devices ledger types
    sampling clipping schedules noise mechanism optimizers training audit
    recipes data runs papers cli
""".split()
NO_ROOM = ("__init__", "__main__")

QUESTION = re.compile(r"(What|Whether|How|Where|When|Which|Who|Why)\b")
# Words of this house, and words that mean another thing in the field; see docs/glossary.md.
BANNED = re.compile(
    r"\b(forced out|clumps?|riddles?|members? of the data|rows? of the data|front doors?)\b"
)
SECTIONS = {"Args", "Attributes", "Example", "Raises", "Returns", "Yields"}
HEADING = re.compile(r"^([A-Z]\w+):$", re.MULTILINE)
SINGLE_TICKS = re.compile(r"(?<![`:\w])`[^`\n]+`(?!`)")

TEXT = {"read_text", "write_text", "open", "fdopen"}
# Those that have an encoding of their own.
NO_FILES = {
    "os.open",
    "Image.open",
    "self._book.open",
    "self._own.open",
    "self._rows.open",
    "zipped.open",
}
POSIX = re.compile(r"/(tmp|proc|dev|usr|etc|var|home)\b")
HASHED = "durable.py"  # writes what is hashed: the same bytes on every system

Found = Iterator[tuple[int, str]]  # line, what is wrong there


def imports(where: Path, tree: ast.Module) -> Found:
    """Imports of a room that lies after their own."""
    here = where.parts[0].removesuffix(".py")
    for node in ast.walk(tree):
        if here in NO_ROOM or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for room in _rooms(node):
            if room == "__version__":
                continue
            if here not in FLOW or room not in FLOW:
                yield node.lineno, f"{here} or {room} has no place in the order of rooms"
            elif FLOW.index(room) > FLOW.index(here):
                yield node.lineno, f"{here} imports {room}, which lies after it"
            elif here == "accounting" and room not in ("accounting", "arguments"):
                yield node.lineno, f"accounting stands alone, and imports {room}"


def _rooms(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The rooms that a statement imports from."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("jaxdp.")]
    parts = (node.module or "").split(".")
    if parts[0] != "jaxdp":
        return []
    return parts[1:2] or [alias.name for alias in node.names]


def docstrings(where: Path, tree: ast.Module) -> Found:
    """A docstring that begins with a question, is in another dialect, or has banned words."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            continue
        text, line = ast.get_docstring(node) or "", getattr(node, "lineno", 1)
        if QUESTION.match(text):
            yield line, f"a docstring begins with a question: {text.splitlines()[0]}"
        if banned := BANNED.search(text):
            yield line, f"a docstring says {banned[0]!r}, which is no word of the field"
        if "cli" in where.parts:  # click shows those as they are
            continue
        if others := set(HEADING.findall(text)) - SECTIONS:
            yield line, f"a docstring has the sections {sorted(others)}"
        if ticks := SINGLE_TICKS.search(text):
            yield line, f"a docstring has {ticks[0]} in single backticks"
        for section in HEADING.split(text)[2::2]:
            if not re.match(r"\n {4}(?! )", section):
                yield line, "a section of a docstring is not indented by four spaces"


def systems(where: Path, tree: ast.Module) -> Found:
    """A text file without an encoding, a path of one system, hashed text with its line ends."""
    texts = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and POSIX.match(str(node.value)):
            yield node.lineno, f"{node.value} is a path of one system"
        if not isinstance(node, ast.Call) or _is_binary(node):
            continue
        name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name.rpartition(".")[2] in TEXT and name not in NO_FILES and "encoding" not in given:
            yield node.lineno, f"{name} without encoding="
        if where.name == HASHED and name in ("path.open", "os.fdopen"):
            texts += 1
            if given.get("newline") != repr("\n"):
                yield node.lineno, f"{name} without newline='\\n', of text that is hashed"
    if where.name == HASHED and not texts:
        yield 1, "no text is opened here; where is what is hashed written?"


def _is_binary(call: ast.Call) -> bool:
    return any(
        isinstance(arg, ast.Constant) and re.fullmatch(r"[rwaxb+]*b[rwaxb+]*", str(arg.value))
        for arg in call.args
    )


RULES = (imports, docstrings, systems)


def undocumented(trees: list[tuple[Path, ast.Module]]) -> Iterator[tuple[Path, int, str]]:
    """Public methods without a docstring, of their own or of a base class's: ``help`` shows that.

    Ruff's D102 asks for one on every override too, where it can only repeat the base class's.
    """
    nodes = ((path, node) for path, tree in trees for node in ast.walk(tree))
    classes = {node.name: (path, node) for path, node in nodes if isinstance(node, ast.ClassDef)}

    def documented(cls: ast.ClassDef, name: str) -> bool:
        """True if a method has a docstring in the class or in one that it is made of."""
        own = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == name]
        if any(map(ast.get_docstring, own)):
            return True
        bases = (re.match(r"(?:\w+\.)*(\w+)", ast.unparse(base)) for base in cls.bases)
        known = (classes[base[1]][1] for base in bases if base and base[1] in classes)
        return any(documented(base, name) for base in known)

    for path, cls in classes.values():
        for name in [n.name for n in cls.body if isinstance(n, ast.FunctionDef)]:
            public = not cls.name.startswith("_") and not name.startswith("_")
            if public and not documented(cls, name):
                yield path, cls.lineno, f"{cls.name}.{name} has no docstring, nor a base class's"


def breaches(package: Path) -> list[str]:
    """All of a package, as ``file:line: what is wrong``."""
    found, trees = [], []
    for path in sorted(package.rglob("*.py")):
        tree, where = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(package)
        trees.append((path, tree))
        for rule in RULES:
            found += [f"{path}:{line}: {words}" for line, words in rule(where, tree)]
    return found + [f"{path}:{line}: {words}" for path, line, words in undocumented(trees)]


if __name__ == "__main__":
    print("\n".join(found := breaches(PACKAGE)), end="\n" if found else "")
    sys.exit(bool(found))
