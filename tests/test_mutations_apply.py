"""The lists of mutants fit the package; `python -m benchmarks.mutations` tries them."""

from collections import Counter

from benchmarks.mutations import Mutant, mutants

ALL = mutants()
ROOMS = {"clipping", "noise", "sampling", "ledger", "trainer", "accounting", "audit"}
ROOMS |= {"correlated", "grid", "optimizers", "papers", "runs", "tuning"}


def test_every_mutant_can_be_applied_and_names_tests_that_are_there():
    assert [f"{m.name}: {m.problem()}" for m in ALL if m.problem()] == []
    assert [name for name, count in Counter(m.name for m in ALL).items() if count > 1] == []
    assert all(m.why for m in ALL)


def test_every_part_of_the_package_has_mutants():
    assert {m.room for m in ALL} == ROOMS
    assert all(m.file.startswith(("jaxdp/", "benchmarks/papers/")) for m in ALL)


def test_an_entry_that_does_not_fit_is_named():
    for changes, words in (
        ({"old": "no such text"}, "it occurs 0 times"),
        ({"old": "import"}, "must occur exactly once"),
        ({"new": ALL[0].old}, "changes nothing"),
        ({"tests": ()}, "names no test"),
        ({"tests": ("tests/test_nothing.py",)}, "there is no test"),
        ({"tests": ("tests/ledger/test_once.py::test_nothing",)}, "there is no test"),
    ):
        assert words in Mutant(**{**vars(ALL[0]), **changes}).problem(), changes
