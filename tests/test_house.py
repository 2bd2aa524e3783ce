"""The measure of the house: circles, imports and what counts as worse."""

import ast

from benchmarks import house


def test_circles_and_imports_are_found(tmp_path):
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e2"}, "e2": {"e"}}
    assert sorted(map(sorted, house.circles(graph))) == [["a", "b", "c"], ["e", "e2"]]
    text = """
from jaxdp.training import trainer
from . import step
if TYPE_CHECKING:
    import jaxdp.ledger
def late():
    from jaxdp.noise.grid import distance
"""
    names = {
        f"jaxdp.{name}" for name in ("training.trainer", "training.step", "ledger", "noise.grid")
    }
    found = house._imports("jaxdp.training.seeds", tmp_path / "seeds.py", ast.parse(text), names)
    assert found == {"jaxdp.training.trainer", "jaxdp.training.step", "jaxdp.noise.grid"}


def test_a_figure_that_grew_is_worse_unless_a_thread_can_have_added_it():
    assert house.worse("rooms", 56, 55)
    assert not house.worse("rooms", 55, 55)
    assert not house.worse("step, vmap, warm: functions", 58, 56)
    assert house.worse("step, vmap, warm: functions", 59, 56)
    assert house.worse("dp_sgd: functions", 214, 213)


def test_a_walk_counts_what_is_entered_and_how_deep():
    from jaxdp import schedules

    with house.Walk() as walk:
        schedules.from_multipliers([1.0, 2.0])
    assert {name for _, name in walk.entered} >= {"from_multipliers", "NoiseSchedule.__post_init__"}
    assert len({file for file, _ in walk.entered}) == 2
    assert walk.depth >= 3
