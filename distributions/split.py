"""Writes the sources of the two distributions, a folder each: `python distributions/split.py TO`.

TO/accounting is jaxdp-accounting: `ACCOUNTING` below, which needs NumPy and SciPy. TO/privacy is
jaxdp-privacy: the rest of jaxdp, which requires jaxdp-accounting of the same version. No file is in
both. A checkout needs no split: `pip install .` there installs all of jaxdp as jaxdp-privacy.
"""

import re
import runpy
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
REPOSITORY = "github.com/jaxdp/jaxdp"
ACCOUNTING = ("__init__.py", "_version.py", "py.typed", "arguments.py", "accounting")


def split(to: Path) -> str:
    """Writes TO/accounting and TO/privacy anew; returns the version that both have."""
    version = runpy.run_path(str(ROOT / "jaxdp" / "_version.py"))["__version__"]
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    before, needs, after = project.partition("\ndependencies = [\n")
    project = f'{before}{needs}    "jaxdp-accounting=={version}",\n{after}'
    shutil.rmtree(to, ignore_errors=True)
    for name, given in (
        ("accounting", (ROOT / "distributions" / "accounting.toml").read_text("utf-8")),
        ("privacy", project),
    ):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "jaxdp", to / name / "jaxdp", ignore=left_out)
        (to / name / "pyproject.toml").write_text(given, "utf-8")
        shutil.copy(ROOT / "LICENSE", to / name)
        for path in (to / name / "jaxdp").iterdir():
            if (path.name in ACCOUNTING) != (name == "accounting"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copy(ROOT / "distributions" / "accounting.md", to / "accounting" / "README.md")
    text = (ROOT / "README.md").read_text("utf-8")
    (to / "privacy" / "README.md").write_text(of_the_repository(text), "utf-8")
    return version


def of_the_repository(readme: str) -> str:
    """The README with links and pictures of the repository, as the package index needs them."""
    linked = re.sub(r"\]\((?!https:|#)", f"](https://{REPOSITORY}/blob/main/", readme)
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
    return re.sub(r'(src(?:set)?=")(?!https:)', rf"\1https://{raw}/main/", linked)


if __name__ == "__main__":
    split(Path(sys.argv[1]))
