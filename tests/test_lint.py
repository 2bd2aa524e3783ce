"""The linter of this house sees what it is for; `make lint` runs it on the package."""

from benchmarks import lint

FAULTS = {  # file, its text, and what is said of it
    "ledger.py": ("import jaxdp.training.trainer", "ledger imports training, which lies after it"),
    "types.py": (
        "from jaxdp import noise, __version__",
        "types imports noise, which lies after it",
    ),
    "papers/a.py": ("from jaxdp.cli import x", "papers imports cli, which lies after it"),
    "accounting/a.py": ("from jaxdp.types import x", "accounting imports types, which lies after"),
    "accounting/b.py": ("from jaxdp import _extras", "accounting stands alone, and imports _ext"),
    "other.py": (
        "from jaxdp import clipping",
        "other or clipping has no place in the order of rooms",
    ),
    "a.py": ('"""Whether it is."""', "a docstring begins with a question: Whether it is."),
    "b.py": ('"""Rows.\n\nOf riddles."""', "a docstring says 'riddles', which is no word of"),
    "c.py": ('def f():\n    """A.\n\n    Note:\n        B."""', "has the sections ['Note']"),
    "d.py": ('class A:\n    """A `b`."""', "a docstring has `b` in single backticks"),
    "e.py": ('"""A.\n\nArgs:\n  b: c\n"""', "a section of a docstring is not indented by four"),
    "f.py": ("path.read_text()", "path.read_text without encoding="),
    "g.py": ("fdopen(handle, 'w')", "fdopen without encoding="),
    "h.py": ("A = '/tmp/a'", "/tmp/a is a path of one system"),
    "durable.py": ("path.open(encoding='utf-8')", "path.open without newline='\\n', of text that"),
    "l.py": ("class Plain:\n    def a(self):\n        return 1", "Plain.a has no docstring, nor a"),
    "i/durable.py": ("", "no text is opened here; where is what is hashed written?"),
}
SOUND = {
    "cli/b.py": "def f():\n    '''Of `c`.'''\n    from jaxdp.papers import x",
    "training/a.py": "from jaxdp import __version__, ledger\nfrom jaxdp.training.trainer import x",
    "j.py": "path.open('rb')\npath.read_text(encoding='utf-8')\nImage.open(path)",
    "m.py": "class Base:\n    def b(self):\n        'B.'",
    "n.py": "class Other(m.Base[int]):\n    def b(self):\n        return 1",
    "k.py": '"""A.\n\nArgs:\n    b: ``c``, 6/tmp\n"""',
    "accounting/c.py": "import jax\nfrom jaxdp.accounting import events",
}


def test_every_fault_is_found_on_its_line_and_nothing_else(tmp_path):
    for name, text in {**{name: text for name, (text, _) in FAULTS.items()}, **SOUND}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = lint.breaches(tmp_path)
    for name, (_, words) in FAULTS.items():
        said = [line for line in found if line.startswith(f"{tmp_path / name}:1: ")]
        assert len(said) == 1, name
        assert words in said[0], name
    assert len(found) == len(FAULTS)
