"""Pages of AdaDp's Table I and Figure 4 (a, b), PIGDO's Figure 7, SA-DPSGD's Figure 3, short rows."""

import pytest

from jaxdp.papers import adadp_rows, claims, order, pigdo_sweeps, tables
from jaxdp.papers.rows import CIFAR_SHORT, ROWS
from jaxdp.papers.tables import adadp, figure3, left, rows, short
from tests.papers.tables.test_pages import RESULTS, line, results


def text_of(name, found):
    return tables.to_markdown(tables.TARGETS[name].page(found))


def test_the_rows_have_the_papers_settings():
    for algorithm in adadp_rows.TABLE_1:
        config = ROWS[adadp_rows.table_1_name(algorithm)].config()
        assert (config.noise_multiplier, config.pca_noise_multiplier) == (3.0, 6.0)
        assert (config.delta, config.batch_size, config.eval_every) == (1e-4, 600, 100)
    rates = {a: ROWS[adadp_rows.ablation_name(a)].config() for a in adadp_rows.ABLATIONS}
    assert {a: c.learning_rate for a, c in rates.items()} == adadp_rows.ABLATIONS
    for config in rates.values():
        assert (config.noise_multiplier, config.pca_noise_multiplier) == (8.0, 16.0)
        assert (config.steps, config.l2_clip_norm) == (3_000, 4.0)


def test_table_1_tells_the_first_epoch_that_reached_an_accuracy(tmp_path):
    curve = [[100, 0.2, 0.9], [200, 0.3, 0.925], [300, 0.4, 0.92]]
    name = adadp_rows.table_1_name("dp-sgd")
    found = results(tmp_path, line(name, curve=curve, steps=300))
    claimed = claims.adadp_theorem_1(0.01, 3.0, 200, 1e-4).value
    assert adadp.MNIST.theorem_1(200) == claimed
    lines = [x for x in text_of("adadp", found).splitlines() if f"`{name}`" in x]
    assert "| 92 % | DP-SGD | 1.10 |" in lines[0]
    assert f"| step 200 of 300 | 98.77 % | {rows.shown_epsilon(claimed)} | 0.300 |" in lines[0]
    assert "not reached" in lines[1]
    drawn = tables.TARGETS["adadp"].figures["adadp.png"](found).axes[0]
    assert any(list(mark.get_ydata()) == [claimed] for mark in drawn.lines)


def test_figure_7_moves_one_parameter_at_a_time():
    assert len(pigdo_sweeps.ROWS) == 3 * (1 + 3 + 3 + 2 + 2)
    for row in pigdo_sweeps.ROWS:
        moved = [key for key, value in pigdo_sweeps.BASE.items() if row.given[key] != value]
        assert len(moved) == (0 if row.name.endswith("figure-7") else 1)
        seen = row.given["steps"] * row.given["batch_size"]
        assert seen == pigdo_sweeps.EPOCHS * 60_000
        assert ROWS[row.name] is row


def test_figure_3_draws_losses_where_a_run_kept_them_and_falls_back_on_a_short_one(tmp_path):
    curve = [[1, 0.5, 0.8], [2, "inf", 0.9], [3, 1.0, 0.95]]
    long = line("mnist-dp-sgd-tanh", curve=curve)
    brief = line("mnist-dp-sgd-tanh-short", curve=curve, test_losses=[2.0, 1.5, None])
    found = results(tmp_path, long, brief)
    assert figure3.drawn(found, "mnist-dp-sgd-tanh", figure3.accuracies) == (
        [(0.5, 80.0), (1.0, 95.0)],
        False,
    )
    assert figure3.drawn(found, "mnist-dp-sgd-tanh", figure3.losses) == ([(0.5, 2.0)], True)
    assert figure3.drawn(found, "mnist-auto-s", figure3.losses) is None
    panels = figure3.figure(found).axes
    assert (len(panels[0].lines), len(panels[3].lines), len(panels[1].lines)) == (1, 1, 0)


def test_short_rows_are_single_until_they_are_several(tmp_path):
    name = "mnist-auto-s-short"
    runs = [line(name, test_accuracy=x, run=i) for i, x in enumerate((0.9, 0.92, 0.94), 1)]
    one = text_of("short", results(tmp_path, runs[0]))
    assert f"| AUTO-S | `{name}` | 90.00 % | single |  |  | 2.500 |" in one
    three = text_of("short", results(tmp_path, *runs))
    assert f"| AUTO-S | `{name}` | 92.00 ± 2.00 % | 3 | 90.00 % | 94.00 % | 2.500 |" in three
    assert tables.TARGETS["short"].runs == 3
    # Of both data sets; with momentum MNIST has one, which was run, and Fashion-MNIST none.
    assert len(short.NAMES) == 25


def test_cifars_short_rows_differ_in_their_steps_alone():
    for name in CIFAR_SHORT:
        brief, whole = (ROWS[f"cifar10-{name}{end}"].config() for end in ("-short", ""))
        assert (brief.steps, whole.steps, brief.epsilon) == (150, 1_465, 3.0)
        assert (brief.learning_rate, brief.settings) == (whole.learning_rate, whole.settings)


def test_what_is_left_is_every_row_without_its_runs(tmp_path):
    groups = left.grouped()
    assert sorted(row.name for of in groups.values() for row in of) == sorted(ROWS)
    text = text_of("left", RESULTS)
    missing = [name for name in order.ordered() if len(RESULTS.runs(name)) < left.wanted(name)]
    assert [x.split("`")[1] for x in text.splitlines() if "| `" in x] == missing
    assert {name for name in ROWS if not RESULTS.runs(name)} <= set(missing)
    none = text_of("left", results(tmp_path))
    assert f"| all | {len(ROWS)} | 0 | 0 | {len(ROWS)} |" in none


@pytest.mark.parametrize("name", ["adadp", "pigdo", "short", "left", "not_private"])
def test_pages_name_their_command(name):
    assert f"`jaxdp reproduce {name}`" in text_of(name, RESULTS)


@pytest.mark.parametrize(
    ("algorithm", "rate", "momentum"), [("dp-sgd", 0.1, 0.0), ("piadam", 0.001, None)]
)
def test_pigdos_baselines_see_all_pixels(algorithm, rate, momentum):
    given = ROWS[f"mnist-mlp-{algorithm}-noise-4"].given
    assert given["learning_rate"] == rate
    assert given.get("momentum") == momentum
    assert "pca_dimensions" not in given
    assert (given["steps"], given["batch_size"], given["noise_multiplier"]) == (10_000, 600, 4.0)
