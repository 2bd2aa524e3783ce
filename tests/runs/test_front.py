"""``jaxdp.Run``: an own model on own data, from Python; its report, its canaries, its folder."""

import dataclasses
import errno
import functools
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
import orbax.checkpoint as ocp
import pytest

import jaxdp
from jaxdp.accounting import Relation
from jaxdp.devices.shards import hashed
from jaxdp.ledger.durable import StorageError
from jaxdp.runs import RunDirectory, canaries
from jaxdp.runs.files import seal
from jaxdp.runs.starts import MOVED
from tests.cli import calling
from tests.mechanisms import sgd_of
from tests.refusing import refused
from tests.runs.own import MECHANISM, PLAIN, SIZES, X, Y, again, loss_fn, run
from tests.runs.small import Stop, crash_at, stopping_before, undrawn

WHOLE = sgd_of(2.0, 1.0, 200, 200, "full_batch")


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def pages(folder):
    """The report in Markdown, and as a page."""
    return (folder / "report.md").read_text(), (folder / "report.html").read_text()


def called(*arguments):
    """What the command line says to it."""
    done = calling.called(*arguments)
    return done.output + str(done.exception)


def test_a_run_from_python_goes_on_and_costs_what_was_asked_for(tmp_path):
    """And a step is durable and written down as shown before anybody looks at it."""
    found = []

    def evaluate(params):
        directory = RunDirectory(tmp_path / "r")
        newest, kept = max(directory.checkpoints.iterdir(), key=by_number), directory.load_state()
        ledger = jaxdp.Ledger(directory.ledger)  # as it is on disk
        shown = ledger.shown(kept.secret.restored().stream("run").hex())
        found.append((int(newest.name), kept.shown, shown.step))
        return {"length": np.linalg.norm(params["w"])}

    by_number = lambda path: int(path.name)  # noqa: E731
    with pytest.raises(Stop):
        run(tmp_path / "r", progress=crash_at(8), evaluate=evaluate).fit()
    assert found == [(3, 3, 3), (6, 6, 6)]
    shown = json.loads((tmp_path / "r/history.json").read_text())
    data, other = (X[:-1], Y[:-1]), jaxdp.dp_sgd(noise_multiplier=2.5, **SIZES)
    refused("source must hold the records that the run", run(tmp_path / "r", data).fit)
    refused("mechanism must stay that of the run", run(tmp_path / "r", mechanism=other).fit, 12)
    one = run(tmp_path / "r", evaluate=evaluate)
    params = one.fit()
    assert [row["step"] for row in one.history] == [3, 6, 9, 12]
    assert one.history[: len(shown)] == shown
    np.testing.assert_allclose(one.history[-1]["length"], np.linalg.norm(params["w"]), rtol=1e-6)
    assert one.epsilon().upper == MECHANISM.epsilon(12, 1e-3).upper <= 3.0
    assert found[2:] == [(step, step, step) for step in (6, 9, 12)]
    finished = run(tmp_path / "r").fit()
    np.testing.assert_array_equal(finished["w"], params["w"])


class Augmenting:
    """Records that are others each time that they are read, as torchvision's data sets do it."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + np.random.default_rng().normal(size=3).astype(np.float32), Y[index]


def test_bad_options_are_refused_before_there_is_a_folder(tmp_path):
    for options, steps, words in (
        ({}, 13, "steps must be at most 12, which the noise was calibrated"),
        ({"mechanism": PLAIN}, None, "steps must be given"),
        ({"canaries": 61}, 3, "canaries must be at most the 60 coordinates"),
        ({"canaries": 4, "relation": "replace_one"}, 3, "canaries must be 0 but under add_or_rem"),
        ({"delta": 2.0}, 3, "delta must be"),
        ({"engine": "ghots"}, 3, "engine must be"),
        ({"trainable": {"v": True}}, 3, "trainable must be a prefix"),
        ({"canaries": (X[:, :2], Y)}, 3, "canaries must be records like"),
        # Before: the run trained, and refused at its resume: "got others".
        ({"data": Augmenting()}, 12, r"same record each time.*jaxdp\.augmented.*Nothing was"),
    ):
        refused(words, lambda o=options, s=steps: run(tmp_path / "r", **o).fit(s))
    refused("folder must name a folder", run, "")
    refused("folder must be a path, got <function loss_fn", run, loss_fn)  # it was forgotten
    # A model that was not split, as a Trainer says it.
    refused("eqx.partition", run, tmp_path / "r", params={"w": jnp.zeros(3), "of": jnp.tanh})
    refused("nnx.split", run, tmp_path / "r", params={"w": jnp.zeros(3), "rng": jax.random.key(0)})
    words = "jaxdp.Run takes no argument 'detla'.*engine, microbatch_size, rng_name"
    refused(words, run, tmp_path / "r", detla=1e-5, error=TypeError)
    # Nor a search of records that read differently each time.
    make = lambda given: (MECHANISM, optax.sgd(given["rate"]))  # noqa: E731
    options = {"params": {"w": jnp.zeros((20, 3))}, "space": {"rate": [0.1, 0.2]}, "delta": 1e-3}
    options |= {"score": lambda params: 0.0, "tries": jaxdp.accounting.Geometric(0.5)}
    given = (tmp_path / "t", loss_fn, make, Augmenting())
    refused("same record each time", jaxdp.tune, *given, **options)
    assert not list(tmp_path.iterdir())


# Numbers of a user, who may name them as the report names what it uses itself.
NUMBERS = {"numbers": 0.5, "audited": 0.25, "model": 2.0, "dataset": 4.0, "mse": 8.0}


def test_a_run_leaves_a_report_to_sign(tmp_path):
    one = run(
        tmp_path / "trial",
        evaluate=lambda params: {"accuracy": 0.25, "loss": 3.0, **NUMBERS},
        about={"Title": "A trial of mine", "Optimizer": "SGD, 0.1", "Data": "made up"},
        report=True,
    )
    one.fit()
    report = report_of(tmp_path / "trial")
    assert report["guarantee"]["epsilon"] == one.epsilon().upper
    told = (report["accuracy"], report["parameters"], report["guarantee"]["releases"])
    assert told == (0.25, 60, 12)
    markdown, page = pages(tmp_path / "trial")
    facts = (
        "A trial of mine|Accuracy|25.00%|SGD, 0.1 (in the caller's words)|made up|"
        "200, declared and public|40 of 200 records expected a step|12 (2.4 epochs|"
        "accuracy 0.25, loss 3"
    )
    for fact in facts.split("|"):
        assert fact in page.replace("&#39;", "'"), fact
        assert fact in markdown, fact
    assert "the caller's own" in markdown
    assert str(tmp_path) not in page + markdown
    assert (tmp_path / "trial/accuracy_and_epsilon.png").stat().st_size > 1_000
    one.report()  # it reads what the first wrote
    assert report_of(tmp_path / "trial")["history"][-1].items() >= NUMBERS.items()


@undrawn()
def test_a_report_can_be_left_out_and_made_later(tmp_path):
    run(tmp_path / "r").fit()
    assert not (tmp_path / "r/report.html").exists()
    assert run(tmp_path / "r").report() == tmp_path / "r/report.html"
    markdown, page = pages(tmp_path / "r")
    assert markdown.startswith("# Run r\n\nProven: **(epsilon 3.000")
    assert "Test accuracy" not in page
    refused("run must have shown a row to report", run(tmp_path / "new").report)
    plain = run(tmp_path / "p", mechanism=PLAIN)
    plain.fit(3)
    refused("delta must be given for a report", plain.report)
    run(tmp_path / "q", mechanism=PLAIN, delta=1e-4, report=True).fit(3)
    assert "at delta 0.0001" in pages(tmp_path / "q")[1]


HOSTILE = "<script>alert(1)</script> [x](http://example.org) $a^{$"


def test_words_of_a_caller_are_shown_as_they_are(tmp_path):
    """Before: "$" in a metric's name ended every fit with an error; a title was raw HTML."""
    about = {"Title": HOSTILE, HOSTILE: f"`{HOSTILE}`\n# heading", "half": "\ud800"}
    about |= {"Steps": "1", "Model": "a | b\n| c |"}
    numbers = {HOSTILE + "\x01\ud800": 0.25, 7: 1.0}
    folder = tmp_path / HOSTILE.replace("/", " ")
    run(folder, evaluate=lambda params: numbers, about=about, report=True).fit(3)
    for text in pages(folder):
        assert "<script" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    markdown = pages(folder)[0]
    assert not re.findall(r"(?<!\\)\[(?:[^\]\\]|\\.)*\]\(http", markdown)
    headings = [line for line in markdown.splitlines() if line.startswith("# ")]
    assert headings == [markdown.splitlines()[0]]
    assert json.loads((folder / "history.json").read_text())[-1]["7"] == 1.0
    assert "3 (0.6 epochs" in markdown  # the steps are not the caller's words
    assert "| Model | a \\| b \\| c \\| (in the caller's words) |" in markdown


@undrawn()
def test_a_run_is_audited_by_its_canaries(tmp_path):
    """The audit stays in the report, also one that contradicts the guarantee."""
    one = run(tmp_path / "r", canaries=40, report=True)
    one.fit(9)
    found = one.audit()
    assert (found.canaries, found.steps, found.broken) == (40, 9, False)
    assert found.proven == one.epsilon().upper <= 3.0
    audited = report_of(tmp_path / "r")["audited"]
    assert audited["canaries"] == 40
    one.fit()
    assert report_of(tmp_path / "r")["audited"] == audited
    markdown, page = pages(tmp_path / "r")
    assert "for the 9 steps attacked" in page
    assert "40 audit canaries" in markdown
    assert "this very run, once" in page
    assert canaries.released(one.directory).shape == (12, 40)
    refused("canaries must be given for an audit", run(tmp_path / "none").audit)
    refused("changed: 40 canaries then, no canaries now", run(tmp_path / "r").fit, 9)
    refused("changed: 40 canaries then, 41 canaries now", run(tmp_path / "r", canaries=41).fit, 9)
    refused("must hold a run that has begun", run(tmp_path / "none").unverified)
    words = "model and data are in a program: call run.audit() there"
    assert words in called("audit", tmp_path / "r")

    # With hardly any noise every coin is seen in what was released, also of records that are read
    # one by one.
    records = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    quiet = sgd_of(0.05, 1.0, 200, 200, "full_batch")
    still = lambda params, example: 0.0 * loss_fn(params, **example)  # noqa: E731
    one = run(tmp_path / "q", records, quiet, still, canaries=40, delta=1e-3)
    one.fit(3)
    seen = canaries.released(one.directory).mean(axis=0)
    np.testing.assert_array_equal(seen > 0.5, canaries.coins_of(one.directory, 40))


def test_rows_of_canaries_are_shown_once_it_is_written_that_they_are(tmp_path, monkeypatch):
    """A checkpoint that was durable and not shown is shown at the next start: first in words."""
    again(tmp_path / "r").fit(3)
    for _ in range(2):  # the checkpoint of step 6 is durable after the first
        with stopping_before(6, monkeypatch):
            again(tmp_path / "r").fit(6)
    assert len(np.load(tmp_path / "r/canary_gradients.npy")) == 3
    shutil.rmtree(tmp_path / "r/secret/checkpoints/6")
    again(tmp_path / "r").fit(6)
    assert again(tmp_path / "r").directory.checked_ledger().steps == 6


def test_parameters_of_any_shape_are_exported_and_only_those_that_were_shown(tmp_path, monkeypatch):
    def loss(params, x, y):
        return jnp.square(jnp.vdot(params[0][0], x) - y) + 0.0 * params[1][0][0]

    one = run(tmp_path / "r", loss=loss, params=[jnp.ones((20, 3)), (jnp.zeros(2),)])
    one.fit(3)
    one.export(tmp_path / "a.msgpack")
    said = called("export", tmp_path / "r", "--to", tmp_path / "b.msgpack")
    assert "parameters after 3 steps" in said
    assert (tmp_path / "b.msgpack").stat().st_size > 240
    assert (tmp_path / "a.msgpack").read_bytes() == (tmp_path / "b.msgpack").read_bytes()
    # After a crash a checkpoint that was not shown may be found damaged, and its steps are done
    # again within their charge: then it is another one of that step.
    checkpoints, exported = one.directory.checkpoints, functools.partial(called, "export")
    with stopping_before(6, monkeypatch):
        one.fit(6)
    assert "parameters after 3 steps" in exported(tmp_path / "r")
    shutil.move(checkpoints / "6", tmp_path / "unseen")
    one.fit(6)
    assert "parameters after 6 steps" in exported(tmp_path / "r")
    shutil.rmtree(checkpoints / "6")
    shutil.copytree(tmp_path / "unseen", checkpoints / "6")
    assert "does not name as shown" in exported(tmp_path / "r")
    one.fit(6)  # nor is it the finished run's: its steps are done again, and charged anew
    assert one.directory.checked_ledger().steps == 6 + 3
    with stopping_before(0, monkeypatch):
        run(tmp_path / "q").fit(3)
    assert "checkpoint that was shown" in exported(tmp_path / "q")


PARTS = {"base": {"w": jnp.ones((20, 3)), "v": jnp.arange(3.0)}, "lora": jnp.zeros(3)}


def adapted(folder, **options):
    """A run of three adapters, whose 63 other numbers are frozen; its loss names its key itself."""

    def loss(params, x, y, *, dropout_key):
        kept = params["base"]["w"][0] * 0.1 + params["base"]["v"]
        return jnp.square(x @ (kept + params["lora"]) - y) * jax.random.uniform(dropout_key)

    given = {"params": PARTS, "trainable": {"base": False, "lora": True}, "canaries": 2}
    given |= {"rng_name": "dropout_key", "engine": "vmap", "microbatch_size": 8, "report": True}
    return run(folder, loss=loss, optimizer=optax.sgd(0.1, 0.9), **{**given, **options})


@undrawn()
def test_a_run_that_trains_a_part_goes_on_leaves_the_rest_to_the_program(tmp_path):
    folder, path = tmp_path / "r", re.escape("under ['base'] (2 arrays, 63 numbers)")
    with pytest.raises(Stop):
        adapted(folder, progress=crash_at(8), average=0.5).fit()
    other = {"base": {"w": jnp.ones((20, 3)), "v": jnp.ones(3)}, "lora": jnp.zeros(3)}
    for words, changed in (
        (rf"trainable must freeze .*{path}; got nothing", {"trainable": None}),
        (
            rf"trainable must freeze .*{path}; got the frozen",
            {"trainable": lambda at: "w" not in at},
        ),
        (rf"params must have, where they are frozen, .*{path}", {"params": other}),
    ):
        refused(words, adapted(folder, average=0.5, **changed).fit)
    one = adapted(folder, average=0.5)
    params = one.fit()
    assert np.abs(params["lora"]).min() > 0
    jax.tree.map(np.testing.assert_array_equal, params["base"], PARTS["base"])
    assert one.epsilon().upper == MECHANISM.epsilon(12, 1e-3).upper
    assert one.audit().canaries == 2
    assert [said for said in one.unverified() if re.search(path, said)]
    assert report_of(folder)["parameters"] == 3
    assert "Not trained | the frozen parameters under" in pages(folder)[0]

    # What is frozen is not in the folder: who has the model puts what was trained into it.
    kept = json.loads((folder / "secret/checkpoints/12/state/_METADATA").read_text())
    kinds = {at: each["value_metadata"]["value_type"] for at, each in kept["tree_metadata"].items()}
    assert [kinds[f"('params', 'base', '{name}')"] for name in "vw"] == ["None", "None"]
    assert not (folder / "secret/frozen").exists()
    opened = jaxdp.Run.open(folder)
    assert opened.params["base"] == {"v": None, "w": None}
    np.testing.assert_array_equal(opened.params["lora"], params["lora"])
    refused('only must be "trained" .* is not in a run', opened.export, tmp_path / "p.msgpack")
    assert 'only must be "trained"' in called("export", folder)
    one.export(tmp_path / "a.msgpack")
    adapted(folder, average=0.5).export(tmp_path / "b.msgpack")
    assert (tmp_path / "a.msgpack").read_bytes() == (tmp_path / "b.msgpack").read_bytes()
    refused(
        rf"params must have, .*{path}",
        adapted(folder, average=0.5, params=other).export,
        tmp_path / "c",
    )


def test_a_folder_that_holds_what_is_frozen_is_read_as_before(tmp_path):
    params = adapted(folder := tmp_path / "r").fit(3)
    frozen = {"params": {"base": PARTS["base"], "lora": None}}
    with ocp.StandardCheckpointer() as writer:
        writer.save((folder / "secret/frozen").absolute(), frozen)
    seal(folder / "secret/frozen", "digests.json", ("_CHECKPOINT_METADATA", "commit_success.txt"))
    jax.tree.map(np.testing.assert_array_equal, jaxdp.Run.open(folder).params, params)
    called("export", folder, "--to", tmp_path / "a.msgpack")
    kept = next(each for each in (folder / "secret/frozen").rglob("*") if each.stat().st_size > 240)
    kept.write_bytes(kept.read_bytes()[:-1])
    assert "frozen is damaged" in called("export", folder, "--to", tmp_path / "c.msgpack")


def test_a_further_stage_trains_what_the_first_froze(tmp_path):
    given = {"canaries": 0, "mechanism": PLAIN}
    first = adapted(folder := tmp_path / "r", **given).fit(3)
    other = {"base": {"w": jnp.ones((20, 3)), "v": jnp.ones(3)}, "lora": jnp.zeros(3)}
    more = given | {"extend": "more", "trainable": {"base": {"v": True, "w": False}, "lora": False}}
    refused("params must have, where they are frozen", adapted(folder, params=other, **more).fit, 3)
    second = adapted(folder, **more).fit(3)
    np.testing.assert_array_equal(second["lora"], first["lora"])
    assert np.abs(second["base"]["v"] - PARTS["base"]["v"]).min() > 0
    opened = jaxdp.Run.open(folder).params
    assert opened["base"]["w"] is None
    np.testing.assert_array_equal(opened["base"]["v"], second["base"]["v"])
    np.testing.assert_array_equal(opened["lora"], second["lora"])
    # What any stage has trained is written, by the program and without it.
    adapted(folder, **more).export(tmp_path / "a.msgpack", only="trained")
    jaxdp.Run.open(folder).export(tmp_path / "b.msgpack", only="trained")
    assert (tmp_path / "a.msgpack").read_bytes() == (tmp_path / "b.msgpack").read_bytes()
    loaded = jaxdp.load(tmp_path / "a.msgpack", like=PARTS, partial=True)
    jax.tree.map(np.testing.assert_array_equal, loaded, second)
    last = given | {"extend": "last"}
    third = adapted(folder, **last).fit(3)
    np.testing.assert_array_equal(third["base"]["v"], second["base"]["v"])


# Files that are damaged, lost, or cannot be written.
def test_a_damaged_or_lost_history_stops_no_run_and_other_files_are_named(six):
    directory, one = RunDirectory(six), again(six)
    history = directory.history
    for text in ("[" * 100_000, "{", '[{"no": "step"}]', "[3]", "\xff"):
        history.write_bytes(text.encode("latin-1"))
        assert directory.load_history() == []
    one.fit(7)
    history.unlink()
    one.fit(9)
    assert [row["step"] for row in json.loads(history.read_text())] == [3, 6, 7, 9]
    for path, words, steps in (
        (six / "report.json", "must be a report that jaxdp wrote", 10),
        (directory.coins, "must hold coins", 12),
        (directory.state_file, "it is damaged", 12),
    ):
        path.write_text("[" * 100_000)
        refused(words, again(six, report=True).fit, steps)


def test_no_write_of_a_run_ends_in_a_bare_error(tmp_path, monkeypatch):
    """Fails each write in turn, at the start, on the way and at the end; nothing is lost."""
    replace, left = os.replace, [0]

    def full(source, target, **options):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return replace(source, target, **options)

    def fitted(folder):
        one = run(folder, every=2)
        one.fit(2)
        return one

    monkeypatch.setattr(os, "replace", full)
    said = []
    for write in itertools.count(1):
        left[0] = write
        try:
            fitted(tmp_path / str(write))
            break
        except StorageError as error:
            said.append(str(error))
    left[0] = 0
    assert all("a full disk" in each and "make room" in each.lower() for each in said)
    names = {each.split(" cannot be written")[0].rpartition("/")[2] for each in said}
    assert names >= {"run.json", "history.json"}
    directory = fitted(tmp_path / "1").directory
    assert directory.checked_ledger().steps == 2
    kept = hashed(np.zeros((1, 3)))
    for write, *given in (
        (canaries.write_coins, "{}"),
        (canaries.keep, 0, [np.zeros(3)]),
        (canaries.publish, {"step": 1, canaries.HASH: kept}),
    ):
        left[0] = 1
        refused("be written: a full disk", write, directory, *given, error=StorageError)
        write(directory, *given)


def test_no_write_after_a_run_and_no_first_one_of_a_resume_ends_in_a_bare_error(six):
    one = again(six)
    one.fit(6)
    one.report()

    def in_words(path, words, call, *args):
        kept = path.read_bytes()
        path.unlink()
        path.mkdir()
        refused(words, call, *args, error=StorageError)
        path.rmdir()
        path.write_bytes(kept)

    for name in ("update_norm.png", "report.md"):
        in_words(six / name, r"report\.\* cannot be written", one.report)
    for name in ("run.json", "lock"):
        in_words(six / "secret" / name, f"{name} cannot be (read|written)", again(six).fit, 6)
    in_words(six / "history.json", r"history\.json cannot be read", again(six).fit, 6)
    nowhere = six / "nowhere" / "model"
    refused("nowhere/model cannot be written", one.export, nowhere, error=StorageError)


@undrawn()
def test_a_ledger_that_says_less_is_not_reported_from(six):
    one, ledger = again(six), six / "ledger.jsonl"
    one.report()
    whole = ledger.read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    rows = [{k: v for k, v in row.items() if k != "chain"} for row in rows if "ledger" not in row]
    for text, words in (
        (re.sub(r'"noise_multiplier": [0-9.]+', '"noise_multiplier": 50.0', whole), "was edited,"),
        ("".join(whole.splitlines(True)[:3]), "must hold the 6 steps that were shown"),
        ("", "must hold the 6 steps that were shown"),
        ("".join(json.dumps(row) + "\n" for row in rows), "must follow the first line"),
    ):
        ledger.write_text(text)
        for use in (one.epsilon, one.unverified, one.report, one.audit):
            refused(words, use)
        refused("ledger", one.fit, 9)
    # A report tells of all that was shown, also of what another process trained since.
    ledger.write_text(whole)
    path = six / "history.json"
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole)[:1]))
    refused("must tell of the 6 steps that were shown", again(six).report)
    path.write_text(whole)
    one = again(six)
    one.fit(6)
    again(six).fit(9)
    one.report()
    assert report_of(six)["history"][-1]["step"] == 9


# What a run's folder must not say less of than it released.


def test_the_rows_of_a_run_have_one_delta_and_one_relation_and_their_own_numbers(tmp_path):
    for name in ("epsilon", "step", "sensitive"):
        one = run(tmp_path / "p", evaluate=lambda params, name=name: {name: 0.01})
        refused(f"evaluate must name no number '{name}'", one.fit, 6)
        assert not (tmp_path / "p/history.json").exists()
    given = {"mechanism": WHOLE, "delta": 1e-3}
    one = run(tmp_path / "r", **given)
    one.fit(3)
    for name, value in (("delta", 0.4), ("relation", Relation.REPLACE_ONE)):
        other = run(tmp_path / "r", **{**given, name: value})
        for use in (lambda other=other: other.fit(6), other.report):
            refused(f"{name} must stay that of the run", use)
        assert (other.epsilon().upper < one.epsilon().upper) == (name == "delta")
    # A loss that captures the records is refused, with canaries too: its shape, and with it the
    # number of records, would have stood in the ledger.
    table = jnp.asarray(X)

    def loss(params, x, y):
        return loss_fn(params, x, y) + 0.0 * jnp.sum(table @ params["w"][0])

    for count in (0, 10):
        with pytest.raises(ValueError, match=r"\[N, 3\] in the loss is several of the re") as error:
            run(tmp_path / str(count), loss=loss, canaries=count).fit(3)
        assert "200" not in str(error.value)


@undrawn()
def test_a_run_and_its_report_tell_the_relation_of_the_budget(tmp_path):
    """Also where it goes on; a folder of another relation keeps its own."""
    weak, kept = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
    strict = jaxdp.dp_sgd(epsilon=3.0, delta=1e-3, steps=2, relation=kept.value, **SIZES)
    one = run(tmp_path / "r", mechanism=strict, report=True)
    one.fit()
    guarantee = report_of(tmp_path / "r")["guarantee"]
    assert guarantee["relation"] == kept.value
    assert 2.99 < guarantee["epsilon"] == one.epsilon().upper <= 3.0
    assert one.epsilon().relation is kept
    assert one.epsilon(relation=weak).upper < 2.9
    # As folders of older versions: the relation of the run is not that of the budget.
    run(tmp_path / "old", mechanism=strict, relation=weak).fit(1)
    later = run(tmp_path / "old", mechanism=strict)
    later.fit()
    assert later.epsilon().relation is weak
    other = run(tmp_path / "old", mechanism=strict, relation=strict.neighbours)
    refused("relation must stay that of the run", other.fit)


def test_two_runs_of_one_seed_share_no_noise_whatever_tells_them_apart(tmp_path):
    """Also a learning rate in the optimizer's state, other first parameters, another constant.

    Before: optimizer and loss did not go into the randomness.
    """

    def moved(rate=0.1, start=0.0, constant=1.0):
        shutil.rmtree(tmp_path / "r", ignore_errors=True)
        captured = jnp.full(3, constant)
        one = run(
            tmp_path / "r",
            loss=lambda params, x, y: 0.0 * jnp.vdot(params["w"][0], x * captured),
            optimizer=optax.inject_hyperparams(optax.sgd)(rate),
            params={"w": jnp.full((20, 3), start)},
            secret=jaxdp.Secret.from_seed(3),
        )
        return np.ravel(one.fit(3)["w"]) - start

    first = moved()
    np.testing.assert_array_equal(moved(), first)
    for other in (moved(rate=0.2), moved(start=1.0), moved(constant=2.0)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.7


def test_a_folder_that_was_copied_or_moved_goes_on_and_says_so(tmp_path):
    """Two copies that go on cost more together than either says, and only the copy can know."""
    mechanism = dataclasses.replace(sgd_of(2.0, 1.0, 20, 60), steps=9)
    records = (X[:60], Y[:60])

    def continued(name, steps):
        one = run(tmp_path / name, records, mechanism, delta=1e-5, every=4)
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
    moved = run(tmp_path / "third", records, mechanism, delta=1e-5)
    moved.fit(9)
    assert moved.unverified() == [MOVED]


def test_a_run_that_stays_where_it_is_says_nothing_of_that(tmp_path, monkeypatch):
    run(tmp_path / "r").fit(3)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "r")
    one = run("link")
    one.fit(4)
    state = one.directory.load_state()
    one.directory.save_state(dataclasses.replace(state, place=None))  # of an older version
    one = run("r")
    one.fit(5)
    assert one.unverified() == []
    # A copy that is put back at the old path. File systems use the number of a folder that was
    # removed again, for the next one.
    shutil.copytree(tmp_path / "r", tmp_path / "kept")
    number, stat = (tmp_path / "r").stat().st_ino, Path.stat
    shutil.rmtree(tmp_path / "r")
    (tmp_path / "kept").rename(tmp_path / "r")

    def same(self, **options):
        found = stat(self, **options)
        return os.stat_result((found[0], number, *found[2:])) if self.name == "r" else found

    monkeypatch.setattr(Path, "stat", same)
    one.fit(6)
    assert one.unverified() == [MOVED]
