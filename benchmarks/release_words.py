"""Checks of a release: pages, README, examples and notebooks say what is there.

No test of the product: what breaks here misleads a reader, and changes nothing that is computed.
Each check returns what is wrong, a line each; `benchmarks/release.py` runs them all.
"""

import ast
import inspect
import pydoc
import re
import shlex
import tomllib
from pathlib import Path

from benchmarks import site
from jaxdp import __version__

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
# What a private script holds of the library: its module, and what comes out of its calls.
OURS = {"jaxdp", "mechanism", "trainer", "state", "batch", "info", "run", "ledger"}
MOST = {"lines": 40, "private lines": 19, "names": 10}  # of an example
NAMED = re.compile(
    r"(?<![\w./-])(jaxdp|acc|audit(?!\.json)|optimizers|sampling|clipping)((?:\.[A-Za-z_]\w*)+)"
)
# What most programs call first.
FIRST = """
    Ledger Trainer accounting.calibrate_noise_multiplier accounting.epsilon audit.audit_scores
    clipped_grad compile_update dp_sgd optimizers.dp_adam privatize
""".split()
BADGE = "https://colab.research.google.com"
INSTALL = """# Installs jaxdp where it is missing (in Colab, for instance).
import importlib.util

if importlib.util.find_spec("jaxdp") is None:
    %pip install -q "{name}[all] @ git+{repository}"
"""


def _pages(*more: Path) -> dict[Path, str]:
    """The pages of the site, and more."""
    found = (*sorted(DOCS.rglob("*.md")), *more)
    return {path: path.read_text(encoding="utf-8") for path in found}


def links() -> list[str]:
    """Links and pictures of a page that lead nowhere."""
    wrong = []
    for page, text in _pages(*sorted(ROOT.glob("*.md"))).items():
        text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
        for target in re.findall(r"(?:\]\(|src(?:set)?=\")([^)#\s\"]+)", text):
            if not target.startswith(("http:", "https:")) and not (page.parent / target).exists():
                wrong.append(f"{page}: there is no {target}")
    return wrong


def menu() -> list[str]:
    """Pages that are not in the menu, and the reverse; results are reached from their own table."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = {DOCS / name for name in re.findall(r"([\w/]+\.md)", text)}
    results = set((DOCS / "results").glob("*.md"))
    there = set(_pages()) | {DOCS / name for name in site.names()}
    wrong = [f"{page}: is not in the menu" for page in there - listed - results]
    return wrong + [f"{page}: is in the menu, and not there" for page in listed - there]


def names() -> list[str]:
    """What a page names of the package, and is not there."""
    wrong = []
    for page, text in _pages().items():
        for room, rest in NAMED.findall(re.sub(r"\]\([^)]*\)", "]", text)):  # without links
            home = {"jaxdp": "jaxdp", "acc": "jaxdp.accounting"}.get(room, f"jaxdp.{room}")
            if pydoc.locate(home + rest) is None:
                wrong.append(f"{page}: there is no {room}{rest}")
    return wrong


def tiers() -> list[str]:
    """Public modules, by the reference or ``__all__``, that docs/stability.md puts in no tier."""
    public = set(re.findall(r"^::: (\S+)", "\n".join(_pages().values()), flags=re.MULTILINE))
    for path in (ROOT / "jaxdp").rglob("*.py"):
        if "\n__all__ = " in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            public.add(name.removesuffix(".__init__"))
    told = set(re.findall(r"`(jaxdp[\w.]*)`", (DOCS / "stability.md").read_text(encoding="utf-8")))
    absent = {name for name in public if ".".join(name.split(".")[:2]) not in told}
    return [f"docs/stability.md names no {name}" for name in sorted(absent)]


def first_calls() -> list[str]:
    """What programs call first, and has no example in its docstring."""
    found = {name: inspect.getdoc(pydoc.locate(f"jaxdp.{name}")) or "" for name in FIRST}
    missing = [name for name, text in found.items() if "Example:\n    >>>" not in text]
    return [f"jaxdp.{name} has no example" for name in missing]


def commands() -> list[str]:
    """Commands that a page shows and the program does not have; make's two, where README has none.

    Of the README those inside a line, too.
    """
    import click

    from jaxdp.cli import app

    readme, wrong = ROOT / "README.md", []
    for page, text in _pages(readme).items():
        blocks = re.findall(r"^```(.*?)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        plain = [block.strip() for language, block in blocks if not language]
        lines = [re.split("#|&&", line)[0] for block in plain for line in block.splitlines()]
        if page == readme:
            absent = {"make demo", "make test"} - set(plain)
            wrong += [f"README.md: names no {name}" for name in absent]
            lines += re.findall(r"`(jaxdp [^`\n]+)`", text)
        for line in (line for line in lines if line.startswith("jaxdp ")):
            command = app
            try:
                args = shlex.split(line)[1:]
                while isinstance(command, click.Group):
                    command, args = command.get_command(click.Context(app), args[0]), args[1:]
                command.make_context(command.name, args)
            except (click.ClickException, AttributeError, ValueError) as error:
                wrong.append(f"{page}: {line}: {error}")
    return wrong


def first_page() -> list[str]:
    """The site's first page tells the version."""
    told = re.findall(r"^Version (\S+):", (DOCS / "index.md").read_text("utf-8"), re.MULTILINE)
    return [] if told == [__version__] else [f"docs/index.md tells the version {told}"]


def counts(path: Path) -> tuple[int, int, int]:
    """(lines, private lines, names) of an example."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    return len(text.splitlines()), len(private_lines(tree)), len(used(tree))


def used(tree: ast.AST) -> set[str]:
    """Attributes of what is jaxdp's; arguments are not counted."""
    found = {"Bound.upper"} if "upper" in ast.dump(tree) else set()
    for node in ast.walk(tree):
        owner = getattr(getattr(node, "value", None), "id", "")
        if isinstance(node, ast.Attribute) and owner in OURS:
            found.add(f"{owner}.{node.attr}")
    return found


def private_lines(tree: ast.AST) -> set[int]:
    """Lines of the outermost statements' parts that name anything of jaxdp's."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        inside = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if isinstance(node, ast.Import) and any(a.name == "jaxdp" for a in node.names):
            lines |= {node.lineno}
        elif isinstance(node, ast.stmt) and not hasattr(node, "body") and inside & OURS:
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, (ast.For, ast.If)) and inside & OURS:
            lines |= {node.lineno}
    return lines


def examples() -> list[str]:
    """Examples that are long, or of which the table tells other numbers."""
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"\| \[(\w+)\.py\]\(\1\.py\) \|(.*)\|", table))
    paths = {path.stem: path for path in EXAMPLES.glob("*.py")}
    wrong = [f"{name}: in the table and there, or neither" for name in rows.keys() ^ paths.keys()]
    for name in sorted(rows.keys() & paths.keys()):
        found = counts(paths[name])
        if (told := tuple(int(cell) for cell in rows[name].split("|")[1:])) != found:
            wrong.append(f"{name}: the table tells {told}, and it has {found}")
        for (what, most), count in zip(MOST.items(), found, strict=True):
            if count > most:
                wrong.append(f"{name}: {count} {what}, and at most {most} are short")
    tree = ast.parse((EXAMPLES / "03_equinox.py").read_text(encoding="utf-8"))
    loss = next(node for node in tree.body if getattr(node, "name", "") == "loss_fn")
    after = [line for line in private_lines(tree) if line > loss.end_lineno]
    of_module = [name for name in used(tree) if name.startswith("jaxdp.")]
    if len(of_module) > 5 or len(after) > 12:
        wrong.append(f"03_equinox: the first loop takes {len(after)} lines and {of_module}")
    return wrong


def notebooks() -> list[str]:
    """Notebooks that other code was executed for, or that do not begin as they must."""
    import nbformat

    from notebooks import execute

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"]
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    install = INSTALL.format(name=project["name"], repository=repository).rstrip()
    wrong = []
    for path in execute.paths():
        notebook = nbformat.read(path, as_version=4)
        cells, before = execute.code_cells(notebook), nbformat.writes(notebook)
        outputs = [output for cell in cells for output in cell.outputs]
        pictures = [output for output in outputs if "image/png" in output.get("data", {})]
        address = f"{repository.removeprefix('https://')}/blob/main/notebooks/{path.name}"
        address = address.replace("github.com/", "github/")
        badge = f"[![Open in Colab]({BADGE}/assets/colab-badge.svg)]({BADGE}/{address})"
        first = notebook.cells[0]
        said = {
            "was changed after it was executed: make notebooks": (
                notebook.metadata["jaxdp"]["executed"] == execute.hash_of_code(notebook)
                and [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
            ),
            "shows an error": "error" not in [output.output_type for output in outputs],
            "shows no picture": len(pictures) > 0,
            "takes 300 kB or more": path.stat().st_size < 300_000,
            "begins without a title and a badge": (
                first.cell_type == "markdown"
                and first.source.startswith("# ")
                and badge in first.source.splitlines()
            ),
            "does not install from the repository": notebook.cells[1].source == install,
            "opens in Colab from no line of docs/index.md": f"({BADGE}/{address})" in index,
            "is not tidy": nbformat.writes(execute.tidied(notebook)) == before,
        }
        wrong += [f"{path.name}: {words}" for words, holds in said.items() if not holds]
    return wrong


CHECKS = (links, menu, names, tiers, first_calls, commands, first_page, examples, notebooks)
