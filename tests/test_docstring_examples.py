"""Every ``Example:`` in a docstring of jaxdp runs, and prints what it says."""

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp

PACKAGE = Path(__file__).parent.parent / "jaxdp"
KNOWN = {"jax": jax, "jaxdp": jaxdp, "jnp": jnp, "np": np, "optax": optax}
# What most programs call first.
FIRST = (
    "jaxdp.Ledger",
    "jaxdp.Trainer",
    "jaxdp.accounting.calibrate_noise_multiplier",
    "jaxdp.accounting.epsilon",
    "jaxdp.auditing.audit_scores",
    "jaxdp.clipped_grad",
    "jaxdp.compile_update",
    "jaxdp.dp_sgd",
    "jaxdp.optimizers.dp_adam",
    "jaxdp.privatize",
)


def _examples():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if "Example:\n    >>>" in text:
                    name = getattr(node, "name", "module")
                    yield pytest.param(text, id=f"{path.relative_to(PACKAGE)}:{name}")


@pytest.mark.parametrize("text", list(_examples()))
def test_an_example_runs(text):
    test = doctest.DocTestParser().get_doctest(text, dict(KNOWN), "example", None, None)
    said = []
    with jax.numpy_dtype_promotion("standard"):  # as a user has it
        doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("name", FIRST)
def test_what_programs_call_first_has_an_example(name):
    module, attribute = name.rsplit(".", 1)
    found = getattr(importlib.import_module(module), attribute)
    assert "Example:\n    >>>" in (inspect.getdoc(found) or "")
