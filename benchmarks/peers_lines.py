"""Lines and names that a private script takes of its library: jaxdp's examples and its peers'.

``python -m benchmarks.peers_lines opacus FOLDER/examples/dcgan.py ...`` prints, for a script or a
notebook, its lines of code, those that name the library, and how many of its names they use.
"""

import ast
import json
import sys
from pathlib import Path


def code(path: Path) -> str:
    """The text of a script, or of the code cells of a notebook without its shell commands."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    lines = "\n".join("".join(source) for source in cells).splitlines()
    return "\n".join("" if line.lstrip().startswith(("!", "%")) else line for line in lines)


def owner(node: ast.AST) -> str:
    """The name that a chain of attributes and calls begins with; "" where it begins otherwise."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def counts(text: str, library: str) -> tuple[int, int, int]:
    """(lines of code, those that name the library, its names) of a script.

    A name is the library's where it is imported from it, or only ever holds what its calls
    returned and the script takes an attribute of it: an engine, a trainer, a state. What the
    library puts in the place of a name that was the user's (Opacus: model, optimizer) does not
    count, nor do arguments. Of a compound statement the first line counts.
    """
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    imported, ours = set(), set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library:
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found = [alias for alias in node.names if alias.name.split(".")[0] == library]
            ours |= {alias.asname or alias.name.split(".")[0] for alias in found}
    ours |= imported
    given: dict[str, list[str]] = {}
    for node in nodes:
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        source = node.iter if isinstance(node, ast.For) else getattr(node, "value", None)
        pairs = [(target, source) for target in targets if target and source]
        both = isinstance(node, ast.Assign) and isinstance(targets[0], ast.Tuple)
        if both and isinstance(source, ast.Tuple):
            pairs = list(zip(targets[0].elts, source.elts, strict=True))
        for target, value in pairs:
            for leaf in ast.walk(target):
                stored = isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store)
                if stored and not isinstance(value, ast.Constant):  # None is nobody's
                    given.setdefault(leaf.id, []).append(owner(value))
    taken = {
        node.value.id
        for node in nodes
        if owner(node) and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    while more := {n for n in taken & given.keys() - ours if {*given[n]} <= {*ours, n}}:
        ours |= more
    lines, names = set(), set(imported)
    for node in nodes:
        if isinstance(node, ast.Attribute) and owner(node) in ours:
            names.add(node.attr)
        header = isinstance(node, ast.stmt) and hasattr(node, "body")
        parts = [part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.stmt)]
        inside = [n for part in (parts if header else [node]) for n in ast.walk(part)]
        held = {n.id for n in inside if isinstance(n, ast.Name)}
        imports = isinstance(node, (ast.Import, ast.ImportFrom))
        named = ast.unparse(node).split()[1].startswith(library) if imports else held & ours
        if isinstance(node, ast.stmt) and named:
            lines |= {node.lineno} if header else set(range(node.lineno, node.end_lineno + 1))
    full = {n.lineno for n in nodes if isinstance(n, (ast.expr, ast.stmt))}
    full |= {n.end_lineno for n in nodes if isinstance(n, (ast.expr, ast.stmt))}
    return len(full), len(lines), len(names)


if __name__ == "__main__":
    for given in sys.argv[2:]:
        print(given, *counts(code(Path(given)), sys.argv[1]))
