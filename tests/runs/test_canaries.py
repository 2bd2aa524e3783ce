"""A run with audit canaries: its coins are a secret, and nothing public depends on them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import runs
from jaxdp.cli import main
from jaxdp.clipping import ClippedGrad
from jaxdp.ledger import Ledger
from jaxdp.noise import gaussian
from jaxdp.report import to_html, to_markdown
from jaxdp.runs import RunDirectory, canaries
from jaxdp.runs.audit import audit_run
from jaxdp.runs.described import report as build
from jaxdp.runs.export import export_params
from jaxdp.seeds import Secret
from tests.runs import small
from tests.runs.test_resume import Stop, crash_at

M = 300


def config(**changes):
    return small.config(**{"canaries": M, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return small.go(folder, config()), RunDirectory(folder)


def everything(result, directory):
    return small.outcome(result), directory.canary_gradients.read_bytes()


def test_coins_are_fair_secret_and_named(whole):
    result, directory = whole
    coins = canaries.coins_of(directory, M)
    assert abs(coins.sum() - M / 2) < 5 * np.sqrt(M) / 2
    assert directory.coins.stat().st_mode & 0o077 == 0
    assert directory.coins.parent == directory.secret
    words = "300 audit canaries, of which a random half took part"
    assert result.ledger.notes() == [words]
    assert Ledger(directory.ledger).notes() == [words]
    report = build(result)
    assert words in to_markdown(report)
    assert words in to_html(report, directory.path)
    assert canaries.released(directory).shape == (12, M)


def test_nothing_public_depends_on_the_coins(tmp_path, monkeypatch):
    """With equal releases (a clipped sum replaced by zero), other coins must change no figure."""
    original = ClippedGrad.one_pass

    def blind(self, *args, **options):
        clipped, info = original(self, *args, **options)
        return clipped._replace(total=jax.tree.map(jnp.zeros_like, clipped.total)), info

    monkeypatch.setattr(ClippedGrad, "one_pass", blind)
    found, philox = [], Secret.philox
    for turn in range(2):

        def turned(self, name, counter, turn=turn):
            return philox(self, name, counter + (turn if name == "canary coins" else 0))

        monkeypatch.setattr(Secret, "philox", turned)
        result = small.go(tmp_path / str(turn), config())
        directory = RunDirectory(tmp_path / str(turn))
        report = build(result)
        found.append((everything(result, directory), report, canaries.coins_of(directory, M)))
    assert found[0][:2] == found[1][:2]
    assert not np.array_equal(found[0][2], found[1][2])


def test_canaries_take_part_and_cost_nothing_more(whole, tmp_path):
    result, _ = whole
    without = small.go(tmp_path / "r", small.config())
    assert result.ledger.event == without.ledger.event
    assert result.config.dataset_size == without.config.dataset_size
    moved = jax.tree.map(jnp.subtract, result.params, without.params)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(moved)) > 0


def test_a_crash_changes_neither_the_coins_nor_what_was_shown(tmp_path, whole):
    directory = RunDirectory(tmp_path / "r")
    with pytest.raises(Stop):
        small.go(tmp_path / "r", config(), crash_at(8))
    before, shown = directory.coins.read_bytes(), canaries.released(directory)
    assert len(shown) in (3, 6)  # of the durable blocks alone
    result = small.go(tmp_path / "r", config())
    assert directory.coins.read_bytes() == before
    np.testing.assert_array_equal(canaries.released(directory)[: len(shown)], shown)
    assert canaries.released(directory).shape == (12, M)
    assert result.ledger.event == whole[0].ledger.event


def test_changed_or_lost_coins_are_refused(tmp_path):
    directory = RunDirectory(tmp_path / "r")
    with pytest.raises(Stop):
        small.go(tmp_path / "r", config(), crash_at(5))
    row = json.loads(directory.coins.read_text())
    row["included"][0] = 1 - row["included"][0]
    directory.coins.write_text(json.dumps(row))
    with pytest.raises(ValueError, match="it was changed: the canaries of a run cannot be"):
        small.go(tmp_path / "r", config())
    directory.coins.write_text("{}")
    with pytest.raises(ValueError, match="must hold coins"):
        small.go(tmp_path / "r", config())
    directory.coins.unlink()
    with pytest.raises(ValueError, match="must hold its canaries' coins, but"):
        small.go(tmp_path / "r", config())


def test_coins_are_never_tossed_again(tmp_path):
    directory = RunDirectory(tmp_path / "r")
    directory.create()
    canaries.placed(directory, canaries.tossed(M, Secret.from_seed(1)))
    before = directory.coins.read_bytes()
    canaries.placed(directory, canaries.tossed(M, Secret.from_seed(2)))
    with pytest.raises(ValueError, match="what is left of an audit"):
        small.go(tmp_path / "r", config())
    assert directory.coins.read_bytes() == before


def test_a_start_that_was_killed_before_its_coins_were_written_goes_on(tmp_path, monkeypatch):
    def killed(*args):
        raise Stop

    monkeypatch.setattr(canaries, "placed", killed)
    with pytest.raises(Stop):
        small.go(tmp_path / "r", config())
    monkeypatch.undo()
    small.go(tmp_path / "r", config())
    assert canaries.released(RunDirectory(tmp_path / "r")).shape == (12, M)


def test_lost_rows_of_earlier_steps_are_refused(tmp_path):
    directory = RunDirectory(tmp_path / "r")
    with pytest.raises(Stop):
        small.go(tmp_path / "r", config(), crash_at(8))
    kept = directory.secret / directory.canary_gradients.name
    np.save(kept, np.load(kept)[:4])
    with pytest.raises(ValueError, match="must hold the 6 steps before, got 4"):
        small.go(tmp_path / "r", config())


def test_other_canaries_are_another_configuration(tmp_path):
    with pytest.raises(Stop):
        small.go(tmp_path / "r", config(), crash_at(4))
    with pytest.raises(ValueError, match="changed: canaries"):
        small.go(tmp_path / "r", config(canaries=M + 1))


def test_parameters_are_exported(whole, tmp_path):
    _, directory = whole
    assert export_params(directory, tmp_path / "model") == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"canaries": -1}, "canaries must be a whole number of at least 0, got -1"),
        ({"canaries": 2.5}, "canaries must be a whole number"),
        ({"canaries": 641}, "canaries must be at most the 640 coordinates"),
        ({"relation": "replace_special"}, "canaries must be 0 but under add_or_remove_one"),
        ({"sampling": "fixed_size", "relation": "replace_one"}, "canaries must be 0 but under"),
        ({"algorithm": "adadp"}, "clips every coordinate by itself"),
        ({"sensitive": True}, "sensitive must be False with canaries"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def finished(folder, cfg):
    result = small.go(folder, cfg)
    (folder / "report.json").write_text(json.dumps(build(result).to_dict()))
    return RunDirectory(folder)


def test_a_right_run_is_audited_and_a_broken_one_caught(tmp_path, monkeypatch):
    quiet = {"canaries": 600, "noise_multiplier": 2.0, "steps": 30, "eval_every": 30}
    found = audit_run(finished(tmp_path / "right", config(**quiet)))
    assert not found.broken
    assert found.proven == pytest.approx(
        Ledger(tmp_path / "right/ledger.jsonl").epsilon(1e-5).upper
    )
    added = gaussian.noised
    monkeypatch.setattr(gaussian, "noised", lambda tree, std, *key: added(tree, std / 50, *key))
    charged = {**quiet, "noise_multiplier": 20.0}
    broken = audit_run(finished(tmp_path / "broken", config(**charged)))
    assert broken.proven < 1.5
    assert broken.broken


def test_the_audit_reads_releases_and_the_coins_alone(tmp_path):
    directory = finished(tmp_path / "r", config())
    for path in list(directory.secret.iterdir()):
        if path != directory.coins:
            path.rename(tmp_path / path.name)
    assert audit_run(directory).canaries == M
    # Without its ledger nothing would be proven of the run, and any bound above 0 would accuse it.
    directory.ledger.unlink()
    with pytest.raises(ValueError, match=r"releases of report\.json, got 0"):
        audit_run(directory)


def test_two_starts_in_one_folder_are_one_run(tmp_path, monkeypatch):
    chosen = small.config(steps=2, eval_every=2)
    small.go(tmp_path / "r", chosen)
    monkeypatch.setattr(RunDirectory, "create", lambda self: None)  # looked before the other began
    again = RunDirectory(tmp_path / "r")
    with pytest.raises(ValueError, match="a run began there"):
        runs.start(chosen, again, small.dataset(), Secret.from_seed(6), small.ignore)


def run_cli(capsys, *arguments):
    try:
        main(list(arguments))
        status = 0
    except SystemExit as stop:
        status = stop.code
    return status or 0, capsys.readouterr()


def test_train_and_audit_on_the_command_line(tmp_path, capsys):
    folder = tmp_path / "r"
    status, _ = run_cli(
        capsys,
        "train",
        "--dataset",
        "digits",
        "--model",
        "logistic",
        "--noise-multiplier",
        "0.6",
        "--steps",
        "20",
        "--batch-size",
        "64",
        "--canaries",
        "500",
        "--out",
        str(folder),
    )
    assert status == 0
    status, shown = run_cli(capsys, "audit", str(folder), "--json")
    row = json.loads(shown.out)
    assert (status, row["canaries"], row["runs"], row["what"]) == (0, 500, 1, "this very run, once")
    assert 0 <= row["audited"] < row["proven"]
    report = json.loads((folder / "report.json").read_text())
    assert report["audited"] == row
    page = (folder / "report.html").read_text()
    assert "this very run, once" in page
    assert "500 audit canaries" in page
    assert "Audited: this very run" in (folder / "report.md").read_text()
    assert (folder / "roc.png").stat().st_size > 10_000
    for arguments, message in (
        (("--runs", "10"), "runs must not be given with a run that has canaries"),
        (("--delta", "2"), "delta must be above 0 and below 1"),
    ):
        status, shown = run_cli(capsys, "audit", str(folder), *arguments)
        assert status == 2
        assert message in shown.err
    (folder / "canary_gradients.npy").write_bytes(b"")
    status, shown = run_cli(capsys, "audit", str(folder))
    assert status == 2
    assert "cannot be read" in shown.err


def test_an_audit_needs_a_finished_run_with_canaries(tmp_path):
    with pytest.raises(ValueError, match=r"no report\.json"):
        audit_run(RunDirectory(tmp_path))
    directory = finished(tmp_path / "r", small.config())
    with pytest.raises(ValueError, match="must have audit canaries"):
        audit_run(directory)
    assert runs.RunConfig(**{**small.config().to_dict()}).candidates() is None
