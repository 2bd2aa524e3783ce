"""The code that documentation shows runs: README, pages, and the examples of docstrings.

That pages name what is there, and that links lead somewhere, is checked by benchmarks/release.py.
"""

import ast
import contextlib
import doctest
import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
KNOWN = {"jax": jax, "jaxdp": jaxdp, "jnp": jnp, "np": np, "optax": optax}


def code(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def executed(page, namespace):
    """Runs the page's code as in a reader's session, where types and ranks are promoted."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for block in code(page):
            exec(compile(block, page.name, "exec"), namespace)


def test_the_readme_runs_from_top_to_bottom(capsys):
    namespace, readme = {}, ROOT / "README.md"
    assert len(code(readme)) >= 3
    for block in code(readme):  # under strict types, too
        exec(compile(block, readme.name, "exec"), namespace)
    epsilon = float(re.search(r"epsilon (\d\.\d+) at", capsys.readouterr().out).group(1))
    assert epsilon == pytest.approx(namespace["mechanism"].epsilon(150, 1e-4).upper, abs=1e-3)


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


# Several runs each, of what tests/runs shows on smaller ones.
SLOW = ("tune", "accuracy", "resume")
PAGES = [
    pytest.param(page, id=page.stem, marks=pytest.mark.slow if page.stem in SLOW else ())
    for page in sorted((DOCS / "howto").glob("*.md"))
]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_after_the_tutorial(tutorial, page):
    executed(page, dict(tutorial[0]))


@pytest.mark.parametrize("page", ["correlated_noise.md", "hidden_state.md", "tabular.md"])
def test_the_code_of_a_page_of_its_own_runs(page):
    executed(DOCS / page, {})


def docstrings():
    """(place, text) of every docstring of the package with an example."""
    for path in sorted((ROOT / "jaxdp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if "Example:\n    >>>" in text:
                    yield f"{path.name}:{getattr(node, 'name', 'module')}", text


def test_examples_of_docstrings_print_what_they_say():
    said, run = [], 0
    with jax.numpy_dtype_promotion("standard"):  # as a user has it
        for place, text in docstrings():
            test = doctest.DocTestParser().get_doctest(text, dict(KNOWN), place, None, None)
            run += doctest.DocTestRunner().run(test, out=said.append).attempted
    assert run > 50
    assert not said, "".join(said)  # each names its place
