"""The page of the papers: what it says of rows is so in the stored ones."""

import json
import re
from pathlib import Path

import pytest

from jaxdp.papers import tables
from jaxdp.papers.rows import ROWS
from jaxdp.papers.tables import accepted, adadp, pigdo, short, table1

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
BESIDE = TEXT[TEXT.index("## Printed beside ours") :]
STORED = {}
for _row in json.loads((ROOT / "benchmarks/results/papers.json").read_text(encoding="utf-8")):
    STORED.setdefault(_row["name"], []).append(_row)
FIGURES = re.findall(r"(\d\d\.\d\d) % `([\w.-]+)`", BESIDE)
NAMED = [
    name
    for names in re.findall(r"not run ((?:`[\w.-]+`(?:[;,] )?)+)", BESIDE)
    for name in re.findall(r"`([\w.-]+)`", names)
]


def test_there_are_figures_to_look_at():
    assert len(FIGURES) >= 15
    assert len(NAMED) >= 12


@pytest.mark.parametrize(("figure", "name"), FIGURES)
def test_our_figures_are_those_of_the_rows(figure, name):
    assert figure in [f"{100 * row['test_accuracy']:.2f}" for row in STORED[name]]


@pytest.mark.parametrize("name", NAMED)
def test_what_was_not_run_has_no_row(name):
    assert name in ROWS
    assert name not in STORED


def ran(names):
    return [name for name in names if name in STORED]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("33 rows under half an hour each, none of which has been run", pigdo.NAMES),
        ("94 % not within 26,000 steps; as published not run", adadp.NAMES[2:3]),
        ("under half an hour each, not run either", [n for n in table1.NAMES if "-short" in n]),
    ],
)
def test_pages_without_a_row_are_said_to_have_none(words, names):
    assert (words in TEXT) == (ran(names) == [])
    assert names


def test_what_it_says_of_the_rows_of_sa_dpsgd_is_so():
    assert "One of eight rows has run: Fashion-MNIST, as published but with momentum 0.9" in TEXT
    assert len(accepted.NAMES) == 8
    assert ran(accepted.NAMES) == ["fashion_mnist-sa-dpsgd-as-published-momentum-until-accepted"]
    assert "[Five epochs](results/short.md): the rows that ran have one run each" in TEXT
    assert {len(STORED[name]) for name in ran(short.NAMES)} == {1}
    assert "none has been run" in TEXT
    assert not (ROOT / "benchmarks" / "results" / tables.TARGETS["not_private"].file).exists()
