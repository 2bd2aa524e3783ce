"""``jaxdp.Run`` on an own model: its report, its canaries, and a file on the command line."""

import dataclasses
import errno
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner

import jaxdp
from jaxdp._durable import StorageError
from jaxdp.cli import app
from jaxdp.runs import RunDirectory, canaries
from jaxdp.runs.run import MOVED
from tests.runs.test_resume import Stop, crash_at

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 3)).astype(np.float32)
Y = RNG.normal(size=200).astype(np.float32)
MECHANISM = jaxdp.dp_sgd(
    epsilon=3.0, delta=1e-3, steps=12, l2_clip_norm=1.0, batch_size=40, dataset_size=200
)


def loss_fn(params, x, y):
    return jnp.square(jnp.vdot(params["w"][0], x) - y)


def run(folder, data=(X, Y), mechanism=MECHANISM, **options):
    options = {"params": {"w": jnp.zeros((20, 3))}, "every": 3, **options}
    return jaxdp.Run(folder, loss_fn, mechanism, optax.sgd(0.1), data, **options)


def test_a_run_leaves_a_report_to_sign(tmp_path):
    one = run(
        tmp_path / "trial",
        evaluate=lambda params: {"accuracy": 0.25, "loss": 3.0},
        about={"Title": "A trial of mine", "Optimizer": "SGD, 0.1", "Data": "made up"},
    )
    one.fit()
    report = json.loads((tmp_path / "trial/report.json").read_text())
    assert report["guarantee"]["epsilon"] == one.epsilon().upper
    assert (report["accuracy"], report["parameters"], report["guarantee"]["releases"]) == (
        0.25,
        60,
        12,
    )
    markdown = (tmp_path / "trial/report.md").read_text()
    page = (tmp_path / "trial/report.html").read_text()
    for fact in (
        "A trial of mine",
        "Accuracy",
        "25.00%",
        "SGD, 0.1 (in the caller's words)",
        "made up",
        "200, declared and public",
        "40 of 200 records expected a step",
        "12 (2.4 epochs",
        "accuracy 0.25, loss 3",
    ):
        assert fact in page.replace("&#39;", "'"), fact
        assert fact in markdown, fact
    assert "the caller's own" in markdown
    assert str(tmp_path) not in page + markdown
    assert (tmp_path / "trial/accuracy_and_epsilon.png").stat().st_size > 1_000


def test_without_an_evaluation_the_report_is_of_epsilon(tmp_path):
    run(tmp_path / "r").fit()
    assert (tmp_path / "r/report.md").read_text().startswith("# Run r\n\nProven: **(epsilon 3.000")
    assert "Test accuracy" not in (tmp_path / "r/report.html").read_text()


def test_a_report_can_be_left_out_and_made_later(tmp_path):
    run(tmp_path / "r", report=False).fit()
    assert not (tmp_path / "r/report.html").exists()
    assert run(tmp_path / "r").report() == tmp_path / "r/report.html"
    with pytest.raises(ValueError, match="run must have shown a row to report"):
        run(tmp_path / "new").report()
    plain = run(tmp_path / "p", mechanism=jaxdp.dp_sgd(2.0, 1.0, 40, 200))
    plain.fit(3)
    with pytest.raises(ValueError, match="delta must be given for a report"):
        plain.report()
    run(tmp_path / "q", mechanism=jaxdp.dp_sgd(2.0, 1.0, 40, 200), delta=1e-4).fit(3)
    assert "at delta 0.0001" in (tmp_path / "q/report.html").read_text()


def test_a_run_is_audited_by_its_canaries(tmp_path):
    one = run(tmp_path / "r", canaries=40)
    one.fit()
    found = one.audit()
    assert (found.canaries, found.steps, found.broken) == (40, 12, False)
    assert found.proven == one.epsilon().upper <= 3.0
    assert json.loads((tmp_path / "r/report.json").read_text())["audited"]["canaries"] == 40
    assert "40 audit canaries" in (tmp_path / "r/report.md").read_text()
    assert "this very run, once" in (tmp_path / "r/report.html").read_text()
    assert (tmp_path / "r/secret/canaries.json").stat().st_mode & 0o077 == 0
    with pytest.raises(ValueError, match="canaries must be given for an audit"):
        run(tmp_path / "none").audit()
    done = CliRunner().invoke(app, ["audit", str(tmp_path / "r")])
    assert "model and data are in a program: call run.audit() there" in str(done.exception)


def test_canaries_of_records_that_are_read_one_by_one_are_seen(tmp_path):
    """With hardly any noise every coin is seen in what was released."""
    records = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    quiet = jaxdp.dp_sgd(0.05, 1.0, 200, 200, "full_batch")
    one = jaxdp.Run(
        tmp_path / "r",
        lambda params, example: 0.0 * loss_fn(params, **example),
        quiet,
        optax.sgd(0.1),
        records,
        params={"w": jnp.zeros((20, 3))},
        canaries=40,
        report=False,
        delta=1e-3,
    )
    one.fit(3)
    seen = canaries.released(one.directory).mean(axis=0)
    np.testing.assert_array_equal(seen > 0.5, canaries.coins_of(one.directory, 40))


def test_a_run_with_canaries_goes_on_with_the_same_coins(tmp_path):
    with pytest.raises(Stop):
        run(tmp_path / "r", canaries=40, progress=crash_at(8)).fit()
    before = (tmp_path / "r/secret/canaries.json").read_bytes()
    with pytest.raises(ValueError, match="mechanism must stay that of the run"):
        run(tmp_path / "r").fit()
    run(tmp_path / "r", canaries=40).fit()
    assert (tmp_path / "r/secret/canaries.json").read_bytes() == before
    assert canaries.released(run(tmp_path / "r").directory).shape == (12, 40)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"canaries": 61}, "canaries must be at most the 60 coordinates"),
        (
            {"canaries": 4, "relation": "replace_one"},
            "canaries must be 0 but under add_or_remove_one",
        ),
        ({"delta": 2.0}, "delta must be"),
    ],
)
def test_bad_options_are_refused_before_there_is_a_folder(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "r", **options)
    assert not (tmp_path / "r").exists()


def saved(path, **changes):
    x = RNG.integers(0, 256, (120, 4, 4)).astype(np.uint8)
    y = RNG.integers(0, 3, 120)
    arrays = {"x": x[:100], "y": y[:100], "x_test": x[100:], "y_test": y[100:], **changes}
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return str(path)


def train(*arguments):
    return CliRunner().invoke(app, ["train", *arguments])


def test_a_file_is_trained_on_reported_and_resumed(tmp_path):
    path, out = saved(tmp_path / "mine.npz"), str(tmp_path / "run")
    done = train("--data", path, "--classes", "3", "--steps", "5", "--out", out)
    assert done.exit_code == 0, done.output
    assert "the number of records, 100, is taken from the file and will be published" in done.output
    declared = train(
        "--data", path, "--classes", "3", "--dataset-size", "90", "--dry-run", "--steps", "5"
    )
    assert "taken from the file" not in declared.output
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert (report["title"], report["levels"]["chance"]) == ("DP-SGD on mine", 1 / 3)
    assert report["command"] == "jaxdp train --data mine.npz --classes 3 --steps 5"
    assert report["config"]["own"] == {"example_shape": [4, 4], "num_classes": 3, "test_size": 20}
    again = train("--resume", "--out", out)
    assert again.exit_code == 0, again.output
    exported = CliRunner().invoke(app, ["export", out])
    assert exported.exit_code == 0
    saved(tmp_path / "mine.npz", x=np.zeros((100, 4, 4), np.uint8))
    assert "the training data changed" in str(train("--resume", "--out", out).exception)


def test_a_file_without_test_records_has_no_accuracy(tmp_path):
    path = saved(tmp_path / "mine.npz", x_test=None, y_test=None)
    done = train("--data", path, "--classes", "3", "--steps", "3", "--out", str(tmp_path / "run"))
    assert "no test records   proven epsilon" in done.output
    assert "Test accuracy" not in (tmp_path / "run/report.html").read_text()
    judged = train(
        "--data", path, "--classes", "3", "--algorithm", "sa-dpsgd", "--out", str(tmp_path / "j")
    )
    assert "must come with test records, which judge its candidates" in str(judged.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--classes", "3", "--dataset", "digits"), "--data must not come with --dataset"),
        ((), "--classes must come with --data"),
        (("--classes", "2"), "y must be at least 0 and below 2"),
        (
            ("--classes", "3", "--model", "mnist-cnn"),
            "must be given examples (28, 28, 1), got (4, 4)",
        ),
    ],
)
def test_bad_arguments_with_a_file(tmp_path, arguments, words):
    done = train("--data", saved(tmp_path / "mine.npz"), *arguments, "--out", str(tmp_path / "run"))
    assert words in done.output + str(done.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": None}, "data must hold x"),
        ({"y_test": None}, "data must hold x"),
        ({"y": np.zeros(99, int)}, "x and y must have one row for each record"),
        ({"x": np.full((100, 4), np.nan)}, "x must be finite"),
        ({"x": np.zeros(100)}, r"x must be numbers \[n, ...\]"),
        ({"x": np.zeros((100, 5))}, "x_test must have rows of shape"),
        ({"y": np.zeros(100)}, r"y must be whole numbers \[n\]"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        jaxdp.data.from_file(saved(tmp_path / "mine.npz", **changes), 3)
    with pytest.raises(ValueError, match=r"data must be a \.npz file with x"):
        jaxdp.data.from_file(tmp_path / "mine.csv", 3)
    (tmp_path / "no.npz").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"data must be a \.npz file to be read"):
        jaxdp.data.from_file(tmp_path / "no.npz", 3)


def test_a_checkpoint_that_was_not_shown_is_not_exported(tmp_path):
    """After a crash it may be found damaged, and its steps are done again within their charge."""
    with pytest.raises(Stop):
        run(tmp_path / "r", progress=crash_at(8), report=False).fit()
    state = json.loads((tmp_path / "r/secret/run.json").read_text())
    for shown, words in ((3, "parameters after 3 steps"), (0, "checkpoint that was shown")):
        (tmp_path / "r/secret/run.json").write_text(json.dumps({**state, "shown": shown}))
        done = CliRunner().invoke(app, ["export", str(tmp_path / "r")])
        assert words in done.output + str(done.exception)


def test_parameters_of_any_shape_are_exported(tmp_path):
    params = [jnp.ones((20, 3)), (jnp.zeros(2),)]
    one = jaxdp.Run(
        tmp_path / "r",
        lambda p, x, y: jnp.square(jnp.vdot(p[0][0], x) - y) + 0.0 * p[1][0][0],
        MECHANISM,
        optax.sgd(0.1),
        (X, Y),
        params=params,
        report=False,
    )
    one.fit(3)
    one.export(tmp_path / "a.msgpack")
    done = CliRunner().invoke(
        app, ["export", str(tmp_path / "r"), "--to", str(tmp_path / "b.msgpack")]
    )
    assert "parameters after 3 steps" in done.output
    assert (tmp_path / "b.msgpack").stat().st_size > 240
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.leaves(one.params), jax.tree.leaves(one.params)
    )


HOSTILE = "<script>alert(1)</script> [x](http://example.org) $a^{$"


def test_words_of_a_caller_are_shown_as_they_are(tmp_path):
    """Before: "$" in a metric's name ended every fit with an error; a title was raw HTML."""
    one = run(
        tmp_path / HOSTILE.replace("/", " "),
        evaluate=lambda params: {HOSTILE + "\x01\ud800": 0.25, 7: 1.0},
        about={"Title": HOSTILE, HOSTILE: f"`{HOSTILE}`\n# heading", "half": "\ud800"},
    )
    one.fit(3)
    folder = one.path
    markdown, page = (folder / "report.md").read_text(), (folder / "report.html").read_text()
    for text in (markdown, page):
        assert "<script" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert not re.findall(r"(?<!\\)\[(?:[^\]\\]|\\.)*\]\(http", markdown)
    assert [line for line in markdown.splitlines() if line.startswith("# ")] == [
        markdown.splitlines()[0]
    ]
    assert json.loads((folder / "history.json").read_text())[-1]["7"] == 1.0


def test_a_damaged_history_stops_no_run(tmp_path):
    one = run(tmp_path / "r", report=False)
    for steps, text in enumerate(("[" * 100_000, "{", '[{"no": "step"}]', "[3]", "\xff"), 1):
        one.fit(steps)
        one.directory.history.write_bytes(text.encode("latin-1"))
        assert one.directory.load_history() == []
    one.fit()
    assert [row["step"] for row in one.directory.load_history()] == [1, 2, 3, 4, 5, 6, 9, 12]


def test_other_files_that_hold_no_json_of_ours_are_named(tmp_path):
    run(tmp_path / "r", canaries=10).fit(3)
    directory, deep = RunDirectory(tmp_path / "r"), "[" * 100_000
    for path, words in (
        (tmp_path / "r" / "report.json", "must be a report that jaxdp wrote"),
        (directory.coins, "must hold coins"),
        (directory.state_file, "it is damaged"),
    ):
        path.write_text(deep)
        with pytest.raises(ValueError, match=words):
            run(tmp_path / "r", canaries=10).fit(3)


def test_no_write_of_a_run_ends_in_a_bare_error(tmp_path, monkeypatch):
    """Fails each write in turn, at the start, on the way and at the end; nothing is lost."""
    replace, left = os.replace, [0]

    def full(source, target, **options):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return replace(source, target, **options)

    def fitted(folder):
        one = run(folder, every=2, report=False)
        one.fit(2)
        return one

    monkeypatch.setattr(os, "replace", full)
    said = []
    for write in itertools.count(1):
        left[0] = write
        try:
            fitted(tmp_path / str(write))
        except StorageError as error:
            said.append(str(error))
        else:
            left[0] = 0
            break
    assert all("a full disk" in each and "make room" in each.lower() for each in said)
    names = {each.split(" cannot be written")[0].rpartition("/")[2] for each in said}
    assert names >= {"run.json", "history.json"}
    assert fitted(tmp_path / "1").directory.checked_ledger().steps == 2
    directory = RunDirectory(tmp_path / "1")
    for write in (
        lambda: canaries.placed(directory, "{}"),
        lambda: canaries.keep(directory, 0, [np.zeros(3)]),
        lambda: canaries.publish(directory, 1),
    ):
        left[0] = 1
        with pytest.raises(StorageError, match="cannot be written: a full disk"):
            write()
        write()


def test_no_write_after_a_run_ends_in_a_bare_error(tmp_path):
    one = run(tmp_path / "r")
    one.fit(3)
    for name in ("update_norm.png", "report.md"):
        (tmp_path / "r" / name).unlink()
        (tmp_path / "r" / name).mkdir()
        with pytest.raises(StorageError, match=r"report\.\* cannot be written"):
            one.report()
        (tmp_path / "r" / name).rmdir()
    with pytest.raises(StorageError, match="nowhere/model cannot be written"):
        one.export(tmp_path / "nowhere" / "model")


@pytest.mark.parametrize("name", ["run.json", "lock"])
def test_the_first_write_of_a_resume_fails_in_words(tmp_path, name):
    run(tmp_path / "r", report=False).fit(3)
    path = tmp_path / "r" / "secret" / name
    path.unlink()
    path.mkdir()
    with pytest.raises(StorageError, match=rf"{name} cannot be (read|written)"):
        run(tmp_path / "r", report=False).fit(6)


def test_a_history_that_cannot_be_read_is_said(tmp_path):
    run(tmp_path / "r", report=False).fit(3)
    (tmp_path / "r" / "history.json").unlink()
    (tmp_path / "r" / "history.json").mkdir()
    with pytest.raises(StorageError, match=r"history\.json cannot be read"):
        run(tmp_path / "r", report=False).fit(6)


class Augmenting:
    """Records that are others each time that they are read, as torchvision's data sets do it."""

    def __init__(self):
        self.rng = np.random.default_rng()

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + self.rng.normal(size=3).astype(np.float32), Y[index]


def test_records_that_read_differently_each_time_are_refused_before_any_charge(tmp_path):
    """Before: the run trained, and refused at its resume: "got others"."""
    with pytest.raises(ValueError, match=r"same record each time.*jaxdp\.augmented.*Nothing was"):
        run(tmp_path / "r", data=Augmenting()).fit()
    assert not (tmp_path / "r").exists()
    with pytest.raises(ValueError, match="same record each time"):
        jaxdp.tune(
            tmp_path / "t",
            loss_fn,
            lambda given: (MECHANISM, optax.sgd(given["rate"])),
            Augmenting(),
            params={"w": jnp.zeros((20, 3))},
            space={"rate": [0.1, 0.2]},
            score=lambda params: 0.0,
            tries=jaxdp.accounting.Geometric(0.5),
            delta=1e-3,
        )
    assert not (tmp_path / "t").exists()


def test_a_folder_that_was_copied_or_moved_goes_on_and_says_so(tmp_path):
    """Two copies that go on cost more together than either says, and only the copy can know."""
    mechanism, records = jaxdp.dp_sgd(2.0, 1.0, 20, 60), (X[:60], Y[:60])

    def continued(name, steps):
        one = run(tmp_path / name, records, mechanism, delta=1e-5, every=4, report=False)
        one.fit(steps)
        return one

    continued("first", 4)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    first, second = continued("first", 8), continued("second", 8)
    assert first.unverified() == []
    assert second.unverified() == [MOVED]
    assert first.epsilon().upper == second.epsilon().upper == mechanism.epsilon(8, 1e-5).upper
    # The figures of docs/threat_model.md: the four steps that both share count once.
    assert first.epsilon().upper == pytest.approx(2.414, abs=5e-4)
    assert mechanism.epsilon(4 + 4 + 4, 1e-5).upper == pytest.approx(2.923, abs=5e-4)
    shutil.move(tmp_path / "first", tmp_path / "third")
    assert continued("third", 12).unverified() == [MOVED]


def test_a_run_that_stays_where_it_is_says_nothing_of_that(tmp_path, monkeypatch):
    run(tmp_path / "r", report=False).fit(3)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "r")
    one = run("link", report=False)
    one.fit(6)
    state = one.directory.load_state()
    one.directory.save_state(dataclasses.replace(state, place=None))  # of an older version
    one = run("r", report=False)
    one.fit(9)
    assert one.unverified() == []
    shutil.copytree(tmp_path / "r", tmp_path / "kept")  # a copy that is put back at the old path
    shutil.rmtree(tmp_path / "r")
    (tmp_path / "kept").rename(tmp_path / "r")
    one.fit(12)
    assert one.unverified() == [MOVED]


def test_a_copy_with_the_number_of_the_folder_that_was_there_says_so(tmp_path, monkeypatch):
    """File systems use the number of a folder that was removed again, for the next one."""
    run(tmp_path / "r", report=False).fit(3)
    shutil.copytree(tmp_path / "r", tmp_path / "kept")
    number = (tmp_path / "r").stat().st_ino
    shutil.rmtree(tmp_path / "r")
    (tmp_path / "kept").rename(tmp_path / "r")
    stat = Path.stat

    def same(self, **options):
        found = stat(self, **options)
        if self.name != "r":
            return found
        return os.stat_result((found[0], number, *found[2:]))

    monkeypatch.setattr(Path, "stat", same)
    one = run(tmp_path / "r", report=False)
    one.fit(6)
    assert one.unverified() == [MOVED]


def test_a_step_is_written_down_as_shown_before_anybody_looks_at_it(tmp_path):
    found = []

    def evaluate(params):
        directory = RunDirectory(tmp_path / "r")
        kept = directory.load_state()
        ledger = jaxdp.Ledger(directory.ledger)  # as it is on disk
        found.append((kept.shown, ledger.shown(kept.secret.restored().stream("run").hex())))
        return {"a": 1.0}

    run(tmp_path / "r", evaluate=evaluate, report=False).fit(6)
    assert found == [(3, 3), (6, 6)]
    run(tmp_path / "r", evaluate=evaluate, report=False).fit(9)
    assert found == [(3, 3), (6, 6), (6, 6), (9, 9)]


def test_a_run_and_its_report_tell_the_relation_of_the_budget(tmp_path):
    """Also where it goes on; a folder of another relation keeps its own."""
    strict = jaxdp.dp_sgd(
        epsilon=3.0,
        delta=1e-3,
        steps=2,
        l2_clip_norm=1.0,
        batch_size=40,
        dataset_size=200,
        relation="replace_one",
    )
    one = run(tmp_path / "r", mechanism=strict)
    one.fit()
    report = json.loads((tmp_path / "r/report.json").read_text())
    assert report["guarantee"]["relation"] == "replace_one"
    assert 2.99 < report["guarantee"]["epsilon"] == one.epsilon().upper <= 3.0
    assert one.epsilon().relation is jaxdp.accounting.Relation.REPLACE_ONE
    assert one.epsilon(relation=jaxdp.accounting.Relation.ADD_OR_REMOVE_ONE).upper < 2.9

    # As folders of older versions: the relation of the run is not that of the budget.
    weak = jaxdp.accounting.Relation.ADD_OR_REMOVE_ONE
    run(tmp_path / "old", mechanism=strict, relation=weak).fit(1)
    again = run(tmp_path / "old", mechanism=strict)
    again.fit()
    assert again.epsilon().relation is weak
    with pytest.raises(ValueError, match="relation must stay that of the run"):
        run(tmp_path / "old", mechanism=strict, relation=strict.neighbours).fit()
