import jax
import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp import runs
from jaxdp.ledger import Ledger
from jaxdp.noise import PrivatizeState
from jaxdp.runs import assemble, fingerprint, loop
from jaxdp.runs.directory import RunDirectory
from jaxdp.sampling import Sampler
from jaxdp.seeds import Secret
from tests.runs import small


class Stop(Exception):
    """A crash at a chosen step."""


def crash_at(step):
    def progress(now, row):
        if now == step:
            raise Stop

    return progress


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return small.outcome(small.go(folder, small.config()), folder)


@pytest.mark.parametrize("step", [0, 1, 3, 5, 9, 12])
def test_a_crash_changes_nothing(tmp_path, whole, step):
    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(), crash_at(step))
    result = small.go(tmp_path / "r", small.config())
    assert small.outcome(result, tmp_path / "r") == whole


def test_the_ledger_is_ahead_of_every_step(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path / "r")

    draw = Sampler.draw

    def watched(self):
        charged = {s for e in Ledger(directory.ledger).entries for s in range(e.first_step, e.end)}
        assert self.step in charged
        return draw(self)

    monkeypatch.setattr(Sampler, "draw", watched)
    small.go(tmp_path / "r", small.config())


def test_changed_data_is_refused_and_a_fork_is_charged_anew(tmp_path):
    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(), crash_at(8))
    changed = small.dataset(seed=1)
    with pytest.raises(ValueError, match=r"these changed: data\. With --fork"):
        small.go(tmp_path / "r", small.config(), rows=changed)
    result = small.go(tmp_path / "r", small.config(), rows=changed, fork=True)
    # Charged: 9 steps of the first stream (three blocks), and 6 again from the checkpoint at 6.
    assert result.ledger.steps == 9 + 6
    assert len({entry.stream for entry in result.ledger.entries}) == 2
    assert result.reproducible  # part of the noise came from the chosen seed


def test_a_fork_never_reuses_noise(tmp_path, monkeypatch):
    updates = []
    original = loop.Trainer.step

    def spy(self, state, data):
        before = jax.tree.map(np.asarray, state.params)
        out = original(self, state, data)
        after = jax.tree.map(np.asarray, out[0].params)
        updates.append((state.step, jax.tree.leaves(after)[1] - jax.tree.leaves(before)[1]))
        return out

    monkeypatch.setattr(loop.Trainer, "step", spy)
    quiet = small.config(noise_multiplier=100.0, momentum=0.0)
    with pytest.raises(Stop):
        small.go(tmp_path / "r", quiet, crash_at(8))
    small.go(tmp_path / "r", quiet, rows=small.dataset(seed=1), fork=True)
    seven = [change for step, change in updates if step == 6]
    assert len(seven) == 2
    assert not np.allclose(seven[0], seven[1])
    correlation = np.corrcoef(seven[0].ravel(), seven[1].ravel())[0, 1]
    assert abs(correlation) < 0.4


def test_a_fork_draws_other_records(tmp_path, monkeypatch):
    draws, draw = [], Sampler.draw
    monkeypatch.setattr(Sampler, "draw", lambda self: draws.append(draw(self)) or draws[-1])
    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(), crash_at(8))
    small.go(tmp_path / "r", small.config(), rows=small.dataset(seed=1), fork=True)
    one, two = (d.indices[d.mask] for d in draws if d.step == 6)
    assert not np.array_equal(np.sort(one), np.sort(two))


def test_a_lost_or_shortened_ledger_is_refused(tmp_path):
    small.go(tmp_path / "r", small.config())
    ledger = RunDirectory(tmp_path / "r").ledger
    lines = ledger.read_text().splitlines(keepends=True)
    for left in ("", "".join(lines[1:]), "".join(lines[:-1])):
        ledger.write_text(left)
        with pytest.raises(ValueError, match="must hold every charge of the last checkpoint"):
            small.go(tmp_path / "r", small.config())
    ledger.unlink()
    with pytest.raises(ValueError, match="must hold every charge"):
        small.go(tmp_path / "r", small.config())


def test_what_is_left_of_a_run_is_no_place_for_another(tmp_path):
    small.go(tmp_path / "r", small.config())
    RunDirectory(tmp_path / "r").state_file.unlink()
    with pytest.raises(ValueError, match="holds a ledger or checkpoints but not the secret state"):
        small.go(tmp_path / "r", small.config())


def test_a_fork_that_crashes_keeps_its_new_noise(tmp_path):
    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(), crash_at(4))
    other = small.dataset(seed=1)
    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(), crash_at(5), rows=other, fork=True)
    result = small.go(tmp_path / "r", small.config(), rows=other)
    streams = RunDirectory(tmp_path / "r").load_state()["streams"]
    assert len(streams) == 2
    key = Secret(int(streams[1]["secret"]["entropy"], 16), False).jax_key("noise")
    state = loop.Checkpoints(RunDirectory(tmp_path / "r").checkpoints)
    trainer = assemble.trainer_of(small.config(), small.dataset(), Secret.new())
    restored, _, _ = state.restore(assemble.fresh_state(trainer, small.config(), Secret.new()))
    state.close()
    found = [s for s in restored.opt_state if isinstance(s, PrivatizeState)]
    np.testing.assert_array_equal(found[0].key, jax.random.key_data(key))
    assert result.ledger.steps == 6 + 9


@pytest.mark.parametrize(
    ("part", "name"), [("versions", "jax"), ("device", "kind"), ("device", "cores")]
)
def test_changed_versions_and_devices_are_named(tmp_path, monkeypatch, part, name):
    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(), crash_at(4))
    real = fingerprint.fingerprint

    def other(dataset, secret):
        found = real(dataset, secret)
        return {**found, part: {**found[part], name: "another"}}

    monkeypatch.setattr(loop, "fingerprint", other)
    with pytest.raises(ValueError, match=rf"{part}\.{name} \(.* then, 'another' now\)"):
        small.go(tmp_path / "r", small.config())


def test_a_changed_configuration_is_refused(tmp_path):
    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(), crash_at(4))
    with pytest.raises(ValueError, match=r"changed: learning_rate \(0.3 then, 0.7 now\)"):
        small.go(tmp_path / "r", small.config(learning_rate=0.7), fork=True)


def test_one_process_at_a_time(tmp_path):
    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(), crash_at(4))
    first = RunDirectory(tmp_path / "r")
    first.lock()
    with pytest.raises(ValueError, match="in use by another process"):
        small.go(tmp_path / "r", small.config())
    first.unlock()
    assert small.go(tmp_path / "r", small.config()).steps_run > 0


def test_a_folder_holds_one_run(tmp_path):
    small.go(tmp_path / "r", small.config())
    directory = RunDirectory(tmp_path / "r")
    with pytest.raises(ValueError, match="pass --resume"):
        runs.start(small.config(), directory, small.dataset(), Secret.new(), small.ignore)
    with pytest.raises(ValueError, match="must hold a run to resume"):
        runs.resume(
            small.config(), RunDirectory(tmp_path / "x"), small.dataset(), small.ignore
        )


def test_secrets_lie_in_the_secret_folder_alone(tmp_path):
    small.go(tmp_path / "r", small.config())
    directory = RunDirectory(tmp_path / "r")
    assert directory.secret.stat().st_mode & 0o077 == 0
    assert directory.state_file.stat().st_mode & 0o077 == 0
    state = directory.load_state()["streams"][0]
    ledger = directory.ledger.read_text()
    assert state["secret"]["entropy"] not in ledger
    assert state["fingerprint"]["data"] not in ledger
    assert {entry.stream for entry in Ledger(directory.ledger).entries} == {"run-0"}


def test_epsilon_is_the_accountants_for_the_steps_taken(tmp_path):
    result = small.go(tmp_path / "r", small.config())
    step = acc.PoissonSampled(acc.Gaussian(1.0), 0.2)
    for row in result.history:
        expected = acc.epsilon(acc.Repeated(step, row["step"]), 1e-5).upper
        assert row["epsilon"] == pytest.approx(expected, rel=1e-9)
