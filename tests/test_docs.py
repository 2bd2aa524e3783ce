"""The pages of the documentation: their code runs, their links lead somewhere, all are in the menu."""

import contextlib
import io
import pydoc
import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
HOW_TO = sorted((DOCS / "howto").glob("*.md"))


def code(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def executed(page, namespace):
    """Runs the page's code as in a reader's session, where types and ranks are promoted."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for block in code(page):
            exec(compile(block, page.name, "exec"), namespace)


@pytest.fixture(scope="module")
def tutorial():
    namespace = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        executed(DOCS / "tutorial.md", namespace)
    return namespace, said.getvalue()


def test_the_tutorial_ends_in_a_private_model(tutorial):
    namespace, said = tutorial
    accuracy, epsilon = re.search(r"accuracy ([\d.]+)% at epsilon ([\d.]+)", said).groups()
    assert float(accuracy) > 60
    assert 2.9 < float(epsilon) <= 3.0
    assert "nothing was taken on trust" in said
    assert (namespace["run"].path / "report.html").exists()


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_after_the_tutorial(tutorial, page):
    executed(page, dict(tutorial[0]))


def test_the_code_of_correlated_noise_runs():
    executed(DOCS / "correlated_noise.md", {})


def test_the_code_of_linear_models_runs():
    executed(DOCS / "tabular.md", {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = {DOCS / name for name in re.findall(r"([\w/]+\.md)", menu)}
    results = set((DOCS / "results").glob("*.md"))  # reached from their own table
    assert set(PAGES) - results == listed - results
    assert listed <= set(PAGES)


NAMED = re.compile(
    r"(?<![\w./-])(jaxdp|acc|auditing|optimizers|sources|clipping)((?:\.[A-Za-z_]\w*)+)"
)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_page_names_is_there(path):
    words = re.sub(r"\]\([^)]*\)", "]", path.read_text(encoding="utf-8"))  # without links
    for room, names in NAMED.findall(words):
        home = {"jaxdp": "jaxdp", "acc": "jaxdp.accounting"}.get(room, f"jaxdp.{room}")
        assert pydoc.locate(home + names) is not None, f"{room}{names}"
