"""Installs, removes and upgrades the two wheels of dist/ in all orders, half a minute: `make bare`.

`python tests/orders.py PYTHON` takes the Python of an environment that has both and what they
need, and leaves it so. It fetches nothing: the next version of both is built from the sources.
"""

import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEXT = "9.9.9"
WHOLE = "import jaxdp; jaxdp.Trainer, jaxdp.accounting.epsilon; print(jaxdp.__version__)"


class Environment:
    """An environment, by its Python."""

    def __init__(self, python):
        self.python = Path(python).absolute()

    def run(self, *arguments):
        """What a program prints, and its status, from an empty folder."""
        command = [self.python, "-I", *map(str, arguments)]
        options = {"capture_output": True, "text": True, "cwd": self.python.parent}
        done = subprocess.run(command, **options)
        return done.stdout + done.stderr, done.returncode

    def pip(self, *arguments):
        """As ``run``, by pip without an index."""
        shown = (getattr(given, "name", given) for given in arguments)
        print("pip", *(given for given in shown if not given.startswith("--find-links")))
        if arguments[0] == "install":
            arguments = (*arguments, "--no-index", "--no-compile")
        return self.run("-m", "pip", "--disable-pip-version-check", *arguments)

    def does(self, *arguments):
        """pip, which must end well."""
        said, status = self.pip(*arguments)
        assert status == 0, said

    def is_whole(self, version):
        assert self.run("-c", WHOLE) == (f"{version}\n", 0), self.run("-c", WHOLE)
        assert self.pip("check")[1] == 0

    def is_alone(self):
        """The accountant works, the rest is asked for in words, and nothing is missing to pip."""
        said, status = self.run(ROOT / "tests" / "alone.py")
        assert status == 0, said
        assert self.pip("check")[1] == 0

    def is_headless(self, version):
        """Without its accountant: an empty package; the command and pip say what is missing."""
        said, status = self.run("-c", "import jaxdp; assert not jaxdp.__file__; jaxdp.Trainer")
        assert (status, "has no attribute 'Trainer'" in said) == (1, True), said
        said, status = self.run("-m", "jaxdp")
        assert status == 1
        assert f"jaxdp-privacy is {version} and jaxdp-accounting not installed" in said, said
        assert "requires jaxdp-accounting, which is not installed" in self.pip("check")[0]

    def is_empty(self):
        said, status = self.run("-c", "import jaxdp")
        assert (status, "No module named 'jaxdp'" in said) == (1, True), said


def built_next(to):
    """The folders of both wheels of the next version."""
    folders = {}
    old = runpy.run_path(str(ROOT / "distributions" / "split.py"))["split"](to)
    for name, files in (
        ("accounting", ["jaxdp/_version.py"]),
        ("privacy", ["jaxdp/_extras.py", "pyproject.toml"]),
    ):
        for path in (to / name / file for file in files):
            text = path.read_text(encoding="utf-8")
            assert old in text
            path.write_text(text.replace(old, NEXT), encoding="utf-8")
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
        subprocess.run(build, cwd=to / name, check=True, capture_output=True)
        folders[name] = to / name / "dist"
    return old, folders


def main(python):
    env = Environment(python)
    old, following = built_next(ROOT / "build" / "next")
    ((accounting,), (privacy,)) = (
        (ROOT / "dist").glob(f"jaxdp_{name}-*.whl") for name in following
    )
    links = [f"--find-links={folder}" for folder in (ROOT / "dist", *following.values())]
    old_links, *next_links = links
    env.is_whole(old)

    env.does("uninstall", "--yes", "jaxdp-privacy")
    env.is_alone()
    env.does("install", privacy)  # the accountant first, then the rest
    env.is_whole(old)
    env.does("uninstall", "--yes", "jaxdp-accounting")
    env.is_headless(old)
    env.does("install", accounting)  # the rest first, then the accountant
    env.is_whole(old)
    env.does("uninstall", "--yes", "jaxdp-accounting")
    env.does("install", f"jaxdp-privacy=={old}", old_links)  # what the words say
    env.is_whole(old)
    for first, second in (("accounting", "privacy"), ("privacy", "accounting")):
        env.does("uninstall", "--yes", f"jaxdp-{first}")
        env.does("uninstall", "--yes", f"jaxdp-{second}")
        env.is_empty()
        env.does("install", f"jaxdp-privacy=={old}", old_links)  # brings both
        env.is_whole(old)

    # One of them alone: pip refuses, or says so and jaxdp refuses.
    for wanted in (
        [f"jaxdp-privacy=={NEXT}", old_links, next_links[1]],
        [f"jaxdp-privacy=={old}", f"jaxdp-accounting=={NEXT}", *links],
    ):
        assert env.pip("install", *wanted)[1] != 0
        env.is_whole(old)
    said, _ = env.pip("install", f"jaxdp-accounting=={NEXT}", *links)
    assert f"requires jaxdp-accounting=={old}, but you have jaxdp-accounting {NEXT}" in said
    said, status = env.run("-c", "import jaxdp.accounting")
    words = f"jaxdp-privacy is {old} and jaxdp-accounting {NEXT}; install the same version of both"
    assert (status, words in said) == (1, True), said
    env.does("install", f"jaxdp-privacy=={NEXT}", *links)
    env.is_whole(NEXT)
    env.does("install", f"jaxdp-privacy=={old}", *links)  # and back, both by one name
    env.is_whole(old)
    print("orders: all done")


if __name__ == "__main__":
    main(sys.argv[1])
