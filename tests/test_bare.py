"""jaxdp with jax, optax, numpy and scipy alone, and the extras that pyproject.toml names."""

import ast
import importlib.metadata as metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxdp import _extras
from jaxdp.data.load import TFDS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]

# Run before the program: what is not of the four distributions cannot be found.
REFUSE = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError("not in a bare environment: " + name, name=name)
sys.meta_path.insert(0, Refuse())
runpy.run_path({program!r}, run_name="__main__")
"""


def required(names):
    """These distributions and all that they require."""
    found, left = set(), [canonicalize_name(name) for name in names]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            needs = [Requirement(text) for text in metadata.requires(name) or ()]
            left += [
                canonicalize_name(need.name)
                for need in needs
                if not need.marker or need.marker.evaluate({"extra": ""})
            ]
    return found


def brought_by(extra):
    """Names of the distributions that an extra lists, by way of other extras too."""
    found = set()
    for need in map(Requirement, EXTRAS[extra]):
        found |= (
            set.union(*map(brought_by, need.extras))
            if need.name == PROJECT["name"]
            else {canonicalize_name(need.name)}
        )
    return found


def test_the_core_needs_four_distributions():
    names = [Requirement(text).name for text in PROJECT["dependencies"]]
    assert names == ["jax", "optax", "numpy", "scipy"]


def test_a_bare_environment_trains_accounts_and_says_what_is_missing():
    bare = required(Requirement(text).name for text in PROJECT["dependencies"])
    refused = {
        module
        for module, homes in metadata.packages_distributions().items()
        if module != "jaxdp" and not bare & {canonicalize_name(home) for home in homes}
    }
    assert {"flax", "orbax", "click", "rich", "matplotlib", "sklearn", "chex"} <= refused
    code = REFUSE.format(refused=refused, program=str(ROOT / "tests" / "bare.py"))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "bare: all done" in done.stdout


def test_all_is_the_union():
    assert brought_by("all") == set.union(*map(brought_by, ("train", "cli", "data", "papers")))
    assert brought_by("all") <= brought_by("test") <= brought_by("dev")


STARRED = {"TFDS": TFDS, "RUN": _extras.RUN}


def asked_for():
    """(file, extra, module) of every call of ``needed`` in the package."""
    for path in (ROOT / "jaxdp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "needed":
                _, extra, *modules = node.args
                for module in modules:
                    starred = isinstance(module, ast.Starred)
                    names = STARRED[module.value.id] if starred else [module.value]
                    yield from [(path.name, extra.value, name) for name in names]


@pytest.mark.parametrize(("file", "extra", "module"), sorted(set(asked_for())))
def test_the_extra_that_is_named_brings_the_package(file, extra, module):
    distribution = _extras._DISTRIBUTIONS.get(module, module)
    assert canonicalize_name(distribution) in brought_by(extra)
