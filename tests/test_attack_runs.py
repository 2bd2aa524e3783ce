"""Programs that tried to make a run's folder say less than it released; each is kept."""

import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.data.own import from_file
from jaxdp.runs.run import Started
from jaxdp.seeds import Secret
from tests.runs.test_resume import Stop

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 3)).astype(np.float32)
Y = RNG.normal(size=200).astype(np.float32)
MECHANISM = jaxdp.dp_sgd(
    epsilon=3.0, delta=1e-3, steps=12, l2_clip_norm=1.0, batch_size=40, dataset_size=200
)
WHOLE = jaxdp.dp_sgd(2.0, 1.0, 200, 200, "full_batch")


def loss_fn(params, x, y):
    return jnp.square(jnp.vdot(params["w"][0], x) - y)


def run(folder, mechanism=MECHANISM, loss=loss_fn, **options):
    options = {
        "params": {"w": jnp.zeros((20, 3))},
        "every": 3,
        "report": False,
        "progress": lambda *_: None,
        **options,
    }
    return jaxdp.Run(folder, loss, mechanism, optax.sgd(0.1), (X, Y), **options)


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("canaries", [0, 10])
def test_a_loss_that_captures_the_records_is_refused_with_canaries_too(tmp_path, canaries):
    """Its shape, and with it the number of records, would have stood in the ledger."""
    table = jnp.asarray(X)

    def loss(params, x, y):
        return loss_fn(params, x, y) + 0.0 * jnp.sum(table @ params["w"][0])

    with pytest.raises(ValueError, match=r"\[N, 3\] in the loss is several of the rec") as error:
        run(tmp_path / "r", loss=loss, canaries=canaries).fit(3)
    assert "200" not in str(error.value)


@pytest.mark.parametrize("name", ["epsilon", "step", "sensitive"])
def test_an_evaluation_takes_the_place_of_nothing_in_a_row(tmp_path, name):
    one = run(tmp_path / "r", evaluate=lambda params: {name: 0.01})
    with pytest.raises(ValueError, match=f"evaluate must name no number '{name}'"):
        one.fit(6)
    assert not (tmp_path / "r/history.json").exists()


@pytest.mark.parametrize(
    "changes",
    [{"delta": 0.4}, {"relation": jaxdp.accounting.Relation.REPLACE_ONE}],
    ids=["delta", "relation"],
)
def test_the_rows_of_a_run_have_one_delta_and_one_relation(tmp_path, changes):
    given = {"mechanism": WHOLE, "delta": 1e-3}
    one = run(tmp_path / "r", **given)
    one.fit(3)
    other = run(tmp_path / "r", **{**given, **changes})
    name = next(iter(changes))
    for use in (lambda: other.fit(6), other.report):
        with pytest.raises(ValueError, match=f"{name} must stay that of the run"):
            use()
    assert (other.epsilon().upper < one.epsilon().upper) == (name == "delta")


def unchained(text):
    rows = [json.loads(line) for line in text.splitlines()]
    kept = [{k: v for k, v in row.items() if k != "chain"} for row in rows if "ledger" not in row]
    return "".join(json.dumps(row) + "\n" for row in kept)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda text: re.sub(r'"noise_multiplier": [0-9.]+', '"noise_multiplier": 50.0', text),
            "was edited, inserted",
        ),
        (lambda text: "".join(text.splitlines(True)[:3]), "must hold the 6 steps that were shown"),
        (lambda text: "", "must hold the 6 steps that were shown"),
        (unchained, "must follow the first line"),
    ],
    ids=["edited", "cut", "empty", "unchained"],
)
def test_a_ledger_that_says_less_is_not_reported_from(tmp_path, edit, words):
    one = run(tmp_path / "r", canaries=5)
    one.fit(6)
    one.report()
    (tmp_path / "r/ledger.jsonl").write_text(edit((tmp_path / "r/ledger.jsonl").read_text()))
    for use in (one.epsilon, one.unverified, one.report, one.audit):
        with pytest.raises(ValueError, match=words):
            use()
    with pytest.raises(ValueError, match="ledger"):
        one.fit(9)


def test_an_audit_stays_in_the_report(tmp_path):
    """Also one that contradicts the guarantee."""
    one = run(tmp_path / "r", canaries=20, report=True)
    one.fit(6)
    one.audit()
    found = report_of(tmp_path / "r")["audited"]
    one.report()
    assert report_of(tmp_path / "r")["audited"] == found
    one.fit(9)
    assert report_of(tmp_path / "r")["audited"] == found
    assert "for the 6 steps attacked" in (tmp_path / "r/report.html").read_text()


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_text("[{")])
def test_a_history_that_was_deleted_or_damaged_is_whole_again(tmp_path, change):
    run(tmp_path / "r").fit(6)
    change(tmp_path / "r/history.json")
    run(tmp_path / "r").fit(9)
    assert [row["step"] for row in json.loads((tmp_path / "r/history.json").read_text())] == [
        3,
        6,
        9,
    ]


def test_a_report_of_fewer_steps_than_were_shown_is_refused(tmp_path):
    run(tmp_path / "r").fit(6)
    path = tmp_path / "r/history.json"
    path.write_text(json.dumps(json.loads(path.read_text())[:1]))
    with pytest.raises(ValueError, match="must tell of the 6 steps that were shown"):
        run(tmp_path / "r").report()


def test_a_report_tells_of_what_another_process_trained_since(tmp_path):
    one = run(tmp_path / "r")
    one.fit(6)
    run(tmp_path / "r").fit(9)
    one.report()
    assert report_of(tmp_path / "r")["history"][-1]["step"] == 9


def test_the_steps_of_a_report_are_not_the_callers_words(tmp_path):
    run(tmp_path / "r", report=True, about={"Steps": "1"}).fit(3)
    assert "3 (0.6 epochs" in (tmp_path / "r/report.md").read_text()


def test_words_of_the_caller_stay_in_their_cell(tmp_path):
    run(tmp_path / "r", report=True, about={"Model": "a | b\n| c |"}).fit(3)
    assert (
        "| Model | a \\| b \\| c \\| (in the caller's words) |"
        in (tmp_path / "r/report.md").read_text()
    )


def test_rows_of_canaries_are_shown_once_it_is_written_that_they_are(tmp_path, monkeypatch):
    """A checkpoint that was durable and not shown is shown at the next start: first in words."""

    def stop(self, step):
        raise Stop

    run(tmp_path / "r", canaries=5).fit(3)
    shows = Started.shows
    monkeypatch.setattr(
        Started, "shows", lambda self, step: shows(self, step) if step <= 3 else stop(self, step)
    )
    with pytest.raises(Stop):  # the checkpoint of step 6 is durable by then
        run(tmp_path / "r", canaries=5).fit(6)
    with pytest.raises(Stop):
        run(tmp_path / "r", canaries=5).fit(6)
    assert len(np.load(tmp_path / "r/canary_gradients.npy")) == 3
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "r/secret/checkpoints/6")
    run(tmp_path / "r", canaries=5).fit(6)
    assert run(tmp_path / "r", canaries=5).directory.checked_ledger().steps == 6


def test_two_runs_of_one_seed_share_no_noise_whatever_tells_them_apart(tmp_path):
    """Also a learning rate in the optimizer's state, other first parameters, another constant."""

    def moved(rate=0.1, start=0.0, constant=1.0):
        shutil.rmtree(tmp_path / "r", ignore_errors=True)
        captured = jnp.full(3, constant)
        one = jaxdp.Run(
            tmp_path / "r",
            lambda params, x, y: 0.0 * jnp.vdot(params["w"][0], x * captured),
            MECHANISM,
            optax.inject_hyperparams(optax.sgd)(rate),
            (X, Y),
            params={"w": jnp.full((20, 3), start)},
            every=3,
            report=False,
            progress=lambda *_: None,
            secret=Secret.from_seed(3),
        )
        return np.ravel(one.fit(3)["w"]) - start

    first = moved()
    np.testing.assert_array_equal(moved(), first)
    for other in (moved(rate=0.2), moved(start=1.0), moved(constant=2.0)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.7


def test_a_file_that_was_damaged_is_refused_in_words(tmp_path):
    np.savez(tmp_path / "m.npz", x=X, y=np.zeros(200, int))
    whole = bytearray((tmp_path / "m.npz").read_bytes())
    whole[400] ^= 0xFF
    (tmp_path / "m.npz").write_bytes(whole)
    with pytest.raises(ValueError, match="file to be read, got"):
        from_file(tmp_path / "m.npz", 3)
