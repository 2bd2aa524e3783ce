"""jaxdp where packages are missing, its two distributions, their extras, and what can be reached."""

import ast
import importlib.metadata as metadata
import os
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jaxdp
from jaxdp import _extras
from jaxdp.data.specs import TFDS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
HIDDEN = {"arguments", "cli", "devices"}  # the command line, and what is not for users

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
            for need in map(Requirement, metadata.requires(name) or ()):
                if not need.marker or need.marker.evaluate({"extra": ""}):
                    left.append(canonicalize_name(need.name))
    return found


def brought_by(extra):
    """Names of the distributions that an extra lists, by way of other extras too."""
    found = set()
    for need in map(Requirement, EXTRAS[extra]):
        ours = need.name == PROJECT["name"]
        found |= (
            set().union(*map(brought_by, need.extras)) if ours else {canonicalize_name(need.name)}
        )
    return found


def test_a_bare_environment_of_four_distributions_trains_accounts_and_says_what_is_missing():
    core = [Requirement(text).name for text in PROJECT["dependencies"]]
    assert core == ["jax", "optax", "numpy", "scipy"]
    bare = required(core)
    refused = {
        module
        for module, homes in metadata.packages_distributions().items()
        if module != "jaxdp" and not bare & {canonicalize_name(home) for home in homes}
    }
    assert {"flax", "orbax", "click", "rich", "matplotlib", "sklearn", "chex"} <= refused
    code = REFUSE.format(refused=refused, program=str(ROOT / "tests" / "bare.py"))
    assert "bare: all done" in in_a_new_process(code)


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


def test_the_extra_that_is_named_brings_the_package_and_all_brings_what_the_others_do():
    assert brought_by("all") == set.union(
        *map(brought_by, ("train", "safetensors", "language-models", "cli", "data", "papers"))
    )
    assert brought_by("all") <= brought_by("test") <= brought_by("dev")
    asked = set(asked_for())
    assert len(asked) > 10
    for file, extra, module in asked:
        distribution = _extras._DISTRIBUTIONS.get(module, module)
        assert canonicalize_name(distribution) in brought_by(extra), (file, extra, module)


def in_a_new_process(code, *missing):
    """What a program prints where some modules cannot be imported."""
    block = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in missing)
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", block + code], **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_submodule_is_reachable_without_importing_it_and_the_core_needs_no_papers():
    names = {module.name for module in pkgutil.iter_modules(jaxdp.__path__)}
    assert {name for name in names if name[0] != "_"} - HIDDEN <= set(dir(jaxdp))
    reached = [f"jaxdp.{name}" for name in dir(jaxdp) if name != "papers"]
    core = [
        "import jaxdp.runs.assemble, jaxdp.cli.train",
        "assert 'jaxdp.papers' not in sys.modules",
    ]
    in_a_new_process("\n".join(["import jaxdp", *reached, *core, "jaxdp.papers"]))


def test_accounting_and_its_commands_work_without_jax():
    in_a_new_process(
        "from jaxdp import accounting as acc\n"
        "assert acc.epsilon(acc.Gaussian(1.0), 1e-5).upper > 1\n"
        "from jaxdp.cli import main\n"
        "main('epsilon --sampling-prob 0.01 --noise-multiplier 1 --steps 10'\n"
        "     ' --delta 1e-5 --json'.split())\n",
        *("jax", "jaxlib", "flax", "optax", "tensorflow_datasets", "sklearn"),
    )


def test_the_wheel_holds_its_files_and_no_experiment_and_says_where_those_are(tmp_path):
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    assert hatch["build"]["targets"]["wheel"] == {"packages": ["jaxdp"]}
    files = {path for path in (ROOT / "jaxdp").rglob("*") if path.is_file()}
    listed = {path for path in files if path.suffix in (".py", ".pyc", ".jinja")}
    listed |= {ROOT / "jaxdp" / "py.typed", *(ROOT / "jaxdp" / "recipes" / "weights").iterdir()}
    assert files == listed

    def ask(root, module, *arguments):
        environment = {**os.environ, "PYTHONPATH": str(root)}
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, env=environment, **options)

    # Of a checkout, from any folder.
    done = ask(ROOT, "benchmarks.papers", "status")
    assert done.returncode == 0, done.stderr
    assert "mnist-dp-sgd-tanh " in done.stdout
    # Of the wheel alone.
    shutil.copytree(ROOT / "jaxdp", tmp_path / "wheel" / "jaxdp")
    for arguments in (("table1", "--render-only"), ("--help",)):
        done = ask(tmp_path / "wheel", "jaxdp", "reproduce", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert "experiments in benchmarks/papers of the repository" in line
    done = ask(tmp_path / "wheel", "jaxdp", "--help")
    assert done.returncode == 0, done.stderr
    assert "reproduce   Make the papers' tables and figures" in done.stdout


def python(folder, *arguments):
    """What a program prints, and its status, where a folder holds jaxdp and no checkout is seen."""
    options = {"capture_output": True, "text": True, "timeout": 300, "cwd": folder}
    packages = [str(folder), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}
    done = subprocess.run([sys.executable, "-S", *map(str, arguments)], env=environment, **options)
    return done.stdout + done.stderr, done.returncode


def test_the_accountant_is_a_distribution_of_its_own_that_the_rest_requires(tmp_path):
    version = runpy.run_path(str(ROOT / "distributions" / "split.py"))["split"](tmp_path)
    held, projects = {}, {}
    for name in ("accounting", "privacy"):
        paths = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        names = {str(path.relative_to(tmp_path / name)) for path in paths}
        held[name] = {path for path in names if path.startswith("jaxdp")}
        projects[name] = tomllib.loads((tmp_path / name / "pyproject.toml").read_text("utf-8"))
    files = {path for path in (ROOT / "jaxdp").rglob("*") if path.is_file()}
    files = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}
    assert held["accounting"] | held["privacy"] == files
    assert not held["accounting"] & held["privacy"]
    assert version == jaxdp.__version__ == _extras.VERSION

    # The rest is what pyproject.toml says, and requires the accountant.
    pinned = {**PROJECT, "dependencies": [f"jaxdp-accounting=={version}", *PROJECT["dependencies"]]}
    assert projects["privacy"]["project"] == pinned
    needs = projects["accounting"]["project"]["dependencies"]
    assert needs == [need for need in PROJECT["dependencies"] if need[:5] in ("numpy", "scipy")]
    for same in ("license", "requires-python", "urls"):
        assert projects["accounting"]["project"][same] == PROJECT[same]

    # The index shows the README with links and pictures of the repository.
    text = (tmp_path / "privacy" / "README.md").read_text("utf-8")
    assert "](https://github.com/jaxdp/jaxdp/blob/main/docs/tutorial.md)" in text
    pictures = re.findall(r'src(?:set)?="([^"]+)"', text)
    assert len(pictures) == 2
    folder = "https://raw.githubusercontent.com/jaxdp/jaxdp/main/docs/images/accuracy"
    for target in (*pictures, *re.findall(r"\]\(([^)]+)", text)):
        assert target.startswith(folder if target in pictures else "https://"), target

    said, status = python(tmp_path / "accounting", ROOT / "tests" / "alone.py")
    assert status == 0, said
    said, status = python(tmp_path / "privacy", "-m", "jaxdp")
    assert (status, "jaxdp-accounting not installed; install" in said) == (1, True), said
    # Beside the rest of another version, it refuses.
    package = tmp_path / "accounting" / "jaxdp"
    shutil.copy(tmp_path / "privacy" / "jaxdp" / "_extras.py", package)
    assert python(tmp_path / "accounting", "-c", "import jaxdp.accounting") == ("", 0)
    (package / "_version.py").write_text('__version__ = "9.9.9"', encoding="utf-8")
    said, status = python(tmp_path / "accounting", "-c", "import jaxdp.accounting")
    words = (
        f"jaxdp-privacy is {version} and jaxdp-accounting 9.9.9; install the same version of both"
    )
    assert (status, words in said) == (1, True), said
