"""What the site shows besides docs/: the notebooks, and texts of the repository's root.

A hook of MkDocs, named in mkdocs.yml. Nothing is executed: a notebook shows the outputs that it
stores. Links are checked like those of every other page.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Pages of the site that are files of the root.
ROOTED = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
ROOTED |= {"security.md": "SECURITY.md"}


def names() -> set[str]:
    """Pages that the menu may name, and docs/ does not hold."""
    notebooks = (ROOT / "notebooks").glob("*.ipynb")
    return {*ROOTED, *(f"notebooks/{path.stem}.md" for path in notebooks)}


def rooted(text: str, repository: str) -> str:
    """A file of the root as a page: links into docs/ lead to pages, others to the repository."""
    pages = {source: page for page, source in ROOTED.items()}

    def link(found: re.Match[str]) -> str:
        target = found[1]
        if target.startswith("docs/"):
            return f"]({target.removeprefix('docs/')})"
        return f"]({pages.get(target) or f'{repository}/blob/main/{target}'})"

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", link, text)


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page of Markdown, and its pictures by their names."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            # Badges are pictures of other places, which this site asks for none.
            source = re.sub(r"\[!\[([^]]*)\]\([^)]*\)\]", r"[\1]", source)
            parts.append(re.sub(r"\]\((\w+)\.ipynb", r"](\1.md", source))
            continue
        parts.append(f"````python\n{source}\n````")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![What this cell draws]({name})")
            elif "text/markdown" in data:
                parts.append("".join(data["text/markdown"]))
            else:
                text = "".join(output.get("text") or data["text/plain"])
                parts.append(f"````output\n{text.rstrip()}\n````")
    return "\n\n".join(parts) + "\n", pictures


def on_config(config: Any) -> Any:
    """The version, for the header."""
    found = re.search(r'"(.*)"$', (ROOT / "jaxdp" / "_version.py").read_text(encoding="utf-8"))
    config.extra["version_of_jaxdp"] = found and found[1]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages and pictures that docs/ does not hold."""
    from mkdocs.structure.files import File

    made: dict[str, str | bytes] = {}
    for page, source in ROOTED.items():
        made[page] = rooted((ROOT / source).read_text(encoding="utf-8"), config.repo_url)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = notebook(path)
        made |= {f"notebooks/{path.stem}.md": text}
        made |= {f"notebooks/{name}": picture for name, picture in pictures.items()}
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files
