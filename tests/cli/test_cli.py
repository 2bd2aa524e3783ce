"""The commands: what each says and leaves, of which nothing tells more than it may."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import flax.serialization
import numpy as np
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp import data
from jaxdp.cli import main, options
from jaxdp.cli.plan import _best, _Budget, _makers
from jaxdp.cli.tune import law_of
from jaxdp.ledger import Ledger
from jaxdp.optimizers import registry
from jaxdp.runs import RunDirectory
from jaxdp.runs import run as run_module
from jaxdp.runs import starts as start_module
from jaxdp.runs.audit import into_report
from jaxdp.runs.report.schema import AuditRow
from tests.cli.calling import called, ran
from tests.runs.small import undrawn

SMALL = "train --model logistic --steps 6 --epsilon 2 --batch-size 200 --eval-every 2".split()


def refused(capsys, *args):
    """What is said of the command, which ends with status 2."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, args)])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    return folder, ran(*SMALL, "--out", folder)


def public(folder):
    """What is published of a run, without figures of test examples, as the accuracy beside it."""
    parts = [p.read_text() for p in folder.iterdir() if p.suffix in (".json", ".md", ".jsonl")]
    return "".join(parts).replace("test_loss", "")


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def test_a_run_leaves_its_report_of_nothing_that_is_computed_from_unnoised_training_data(
    run, tmp_path
):
    folder, output = run
    report, page = report_of(folder), (folder / "report.md").read_text()
    guarantee = report["guarantee"]
    assert 0 < guarantee["epsilon"] <= 2
    assert (guarantee["relation"], guarantee["releases"]) == ("add_or_remove_one", 6)
    assert report["label"] is None
    assert [row["step"] for row in report["history"]] == [2, 4, 6]
    for name in ("accuracy_and_epsilon.png", "update_norm.png"):
        assert (folder / name).read_bytes()[:4] == b"\x89PNG"
    for part in ("one record added or removed", "6 times a sum", "Outside the guarantee"):
        assert part in page
    for part in ("test accuracy", "step 6/6"):
        assert part in output
    for word in ("loss", "gradient_norm", "clipped_fraction", "entropy", "SENSITIVE"):
        assert word not in public(folder)
    names = {"step", "update_norm", "test_accuracy", "test_loss", "epsilon"}
    assert set(report["history"][0]) == names
    # An export holds parameters and nothing else.
    ran("export", folder, "--to", tmp_path / "params.msgpack")
    exported = flax.serialization.msgpack_restore((tmp_path / "params.msgpack").read_bytes())
    assert set(exported) == {"params"}
    assert exported["params"]["Dense_0"]["kernel"].shape == (64, 10)
    assert all(np.isfinite(leaf).all() for leaf in exported["params"]["Dense_0"].values())


def test_published_files_are_the_same_bytes_however_long_the_run_took(tmp_path, monkeypatch):
    """A step takes as long as its draw is large: time would tell of the private data.

    Of two runs of one seed; but for the bits of its own that a start writes down.
    """
    published, said = [], []
    # By which two starts of one seed can be told apart in their ledgers.
    monkeypatch.setattr(start_module.secrets, "token_hex", lambda size: 2 * size * "0")
    for number, tick in enumerate((1.0, 12_345.6)):
        clock = SimpleNamespace(perf_counter=itertools.count(0.0, tick).__next__)
        monkeypatch.setattr(run_module, "time", clock)
        folder = tmp_path / str(number)
        said.append(ran(*SMALL, "--seed", "987654321", "--sensitive", "--out", folder))
        files = [p for p in folder.rglob("*") if p.is_file() and "secret" not in p.parts]
        published.append({path.name: path.read_bytes() for path in files})
    assert {"report.json", "report.md", "report.html", "ledger.jsonl"} < set(published[0])
    assert published[0] == published[1]
    assert "12345.6 s for 6 steps (said here only" in said[1]
    # A chosen seed is labelled, and not reported.
    assert "No guarantee against whoever knows the seed" in report_of(folder)["label"]
    assert "987654321" not in public(folder) + said[1] + (folder / "report.html").read_text()
    assert "no guarantee" in (folder / "SENSITIVE.json").read_text()


@undrawn()
def test_an_audit_takes_the_time_out_of_an_older_report(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "older")
    path = folder / "report.json"
    report = {**report_of(folder), "seconds": 777.7, "steps_in_this_sitting": 6}
    path.write_text(json.dumps(report))
    audited = AuditRow(
        **{"what": "this very run, once", "steps": 6, "runs": 1, "confidence": 0.95},
        **{"proven": 2.0, "audited": 0.5, "adversary": "a canary", "verdict": "Nothing."},
    )
    into_report(RunDirectory(folder), audited)
    assert json.loads(path.read_text())["audited"] == audited.to_dict()
    for name in ("report.json", "report.md", "report.html"):
        text = (folder / name).read_text()
        assert "777.7" not in text
        assert "steps_in_this_sitting" not in text


@undrawn()
def test_resuming_a_finished_run_changes_nothing_and_other_options_are_refused(run, capsys):
    out = ["--out", str(run[0])]
    charged, before = Ledger(run[0] / "ledger.jsonl").entries, report_of(run[0])["history"]
    ran("train", *out, "--resume")
    assert Ledger(run[0] / "ledger.jsonl").entries == charged
    assert report_of(run[0])["history"] == before
    changed = refused(capsys, "train", "--resume", "--learning-rate", "0.9", *out)
    assert "learning_rate (0.3 then, 0.9 now)" in changed
    assert "pass --resume to continue it" in refused(capsys, *SMALL, *out)


def test_a_dry_run_says_what_it_costs_prints_the_grid_and_leaves_nothing(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("jaxdp.data.load", lambda *a: pytest.fail("the data were read"))
    main([*SMALL, "--dry-run", "--json", "--out", str(tmp_path / "r")])
    row = json.loads(capsys.readouterr().out)
    assert 0 < row["epsilon"] <= 2
    assert row["steps"] == 6
    assert row["seconds"] > row["seconds_to_compile"] > 0
    assert not list(tmp_path.iterdir())
    # The grid, and its inequality.
    main([*SMALL, "--secure-noise", "--dry-run"])
    told = capsys.readouterr().out
    found = re.search(
        r"s = ([\d,]+) from ChaCha20.* gamma = (\S+) clip.* z = (\S+) and d = ([\d,]+),", told
    )
    s, cell, z, d = (float(number.replace(",", "")) for number in found.groups())
    assert 0.998 * s <= z * (1 / cell + d**0.5) <= s * (1 + 1e-2)  # printed with three digits
    main([*SMALL, "--dry-run"])
    assert "gamma" not in capsys.readouterr().out


@undrawn()
def test_a_resumed_run_remembers_where_its_data_lie(tmp_path, monkeypatch, capsys):
    """Its last line is its result, and a large delta gets a warning."""
    asked, load = [], data.load
    monkeypatch.setattr(data, "load", lambda name, where: asked.append(where) or load(name))
    out = ["--out", str(tmp_path / "r")]
    main([*SMALL, *out, "--delta", "0.01", "--json", "--data-dir", str(tmp_path / "sets")])
    shown, report = capsys.readouterr(), report_of(tmp_path / "r")
    row = json.loads(shown.out.splitlines()[-1])
    assert row["epsilon"] == report["guarantee"]["epsilon"]
    assert row["test_accuracy"] == report["test_accuracy"]
    assert "seconds" not in row
    assert "jaxdp: warning: delta 0.01 is at least 1/1437" in shown.err
    main(["train", *out, "--resume"])
    main(["train", *out, "--resume", "--data-dir", str(tmp_path / "moved")])
    assert asked == [tmp_path / "sets", tmp_path / "sets", tmp_path / "moved"]


@undrawn()
def test_a_file_is_trained_on_reported_and_resumed(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.integers(0, 256, (100, 4, 4)).astype(np.uint8), "y": rng.integers(0, 3, 100)}
    tests = {"x_test": arrays["x"][:20], "y_test": arrays["y"][:20]}
    path, out = tmp_path / "mine.npz", tmp_path / "run"
    own = ("train", "--data", path, "--classes", "3", "--steps", "3")
    np.savez(path, **arrays, weights=np.ones(100))
    done = ran(*own, "--out", tmp_path / "no tests")
    assert "mine.npz holds 'weights', which is not read" in done
    assert "no test records   proven epsilon" in done
    assert "Test accuracy" not in (tmp_path / "no tests/report.html").read_text()
    np.savez(path, **arrays, **tests)
    done = ran(*own, "--out", out)
    assert "the number of records, 100, is taken from the file and will be published" in done
    assert "taken from the file" not in ran(*own, "--dataset-size", "90", "--dry-run")
    report = report_of(out)
    assert (report["title"], report["levels"]["chance"]) == ("DP-SGD on mine", 1 / 3)
    assert report["command"] == "jaxdp train --data mine.npz --classes 3 --steps 3"
    assert report["config"]["own"] == {"example_shape": [4, 4], "num_classes": 3, "test_size": 20}
    np.savez(path, **{**arrays, **tests, "x": np.zeros((100, 4, 4), np.uint8)})
    assert "the training data changed" in str(called("train", "--resume", "--out", out).exception)


PROGRAM = """
import runpy, sys, jaxdp.runs, jaxdp.cli.train, jaxdp.cli.launch
from jaxdp import data
data.load("digits")
slow = ("sklearn", "scipy.stats", "matplotlib", "jaxdp.runs.report")
print([name for name in slow if name in sys.modules])
sys.argv = ["jaxdp", "--version"]
runpy.run_module("jaxdp", run_name="__main__")
"""


def test_training_imports_nothing_slow_that_it_does_not_need():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[]\njaxdp, version")


def test_help_shows_an_example_and_data_and_algorithms_and_rows_of_the_queue_are_listed():
    for command in ("", "train", "epsilon", "calibrate", "data", "export"):
        assert "jaxdp " in ran(*command.split(), "--help"), command

    def listed(*command):
        return {line.split()[0]: line for line in ran(*command).splitlines() if line}

    assert "60,000 training" in ran("data", "list")
    assert "digits" in listed("data", "list")
    printed = listed("algorithms")
    for name in registry.ALGORITHMS:
        assert all(setting in printed[name] for setting in registry.settings_of(name)), name
    printed = listed("reproduce", "list")
    assert "mnist-sa-dpsgd" in printed
    assert printed["mnist-sa-dpsgd-as-published"].endswith("98.35 % (SA-DPSGD, Table 1)")
    assert re.search(r" [0-9.]+ h × 5  59.34 % \(SA-DPSGD, Table 1\)$", printed["cifar10-auto-s"])
    assert printed["mnist-sa-dpsgd-as-published-batch-256"].endswith("98.89 % (SA-DPSGD, Table 1)")


def test_an_interrupt_before_a_run_and_an_audit_under_other_relations_end_in_words(
    monkeypatch, capsys, tmp_path
):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxdp.cli.launch.launch", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["train", "--out", str(tmp_path / "r")])
    assert end.value.code == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing was charged" in line
    # An audit of a run of a sampling with other relations, a shuffled one, say, is refused.
    config = SimpleNamespace(relation="replace_special", canaries=0, sampling="shuffle")
    monkeypatch.setattr("jaxdp.runs.audit.config_of", lambda run: config)
    monkeypatch.setattr("jaxdp.runs.audit.report_of", lambda run: SimpleNamespace(config={}))
    words = "under add_or_remove_one to be audited, got replace_special"
    assert words in refused(capsys, "audit", str(tmp_path))


# jaxdp audit.
def test_an_audit_prints_three_numbers_and_writes_its_files(tmp_path):
    options = "--algorithm dp-sgd --sampling full_batch --steps 2 --runs 200 --seed 1 --json"
    row = json.loads(ran("audit", *options.split(), "--out", tmp_path / "a").splitlines()[-1])
    assert row["audited"] < row["proven"]
    assert row["claimed"] is None
    assert row["noise"].startswith("noise: as charged (26 tests, smallest p ")
    assert not row["noise_refuted"]
    assert json.loads((tmp_path / "a" / "audit.json").read_text()) == row
    assert (tmp_path / "a" / "roc.png").stat().st_size > 10_000
    # Random allocation is audited.
    options = "--steps 4 --noise-multiplier 0.5 --delta 0.01 --seed 1 --runs 150 --json"
    said = ran("audit", "--sampling", "allocation", *options.split())
    row = json.loads(said.splitlines()[-1])
    assert row["proven"] == acc.epsilon(acc.RandomAllocation(acc.Gaussian(0.5), 4), 0.01).upper
    assert 0 < row["audited"] < row["proven"]
    assert not row["broken"]


# jaxdp tune.
def test_a_tuning_says_no_more_with_two_tries_than_with_one(tmp_path, monkeypatch, capsys):
    given = "tune --model logistic --steps 3 --search learning_rate=0.03:3 --out".split()
    lines = []
    for count in (1, 2):
        monkeypatch.setattr(acc.Geometric, "sample", lambda self, rng, k=count: k)
        main([*given, str(tmp_path / str(count)), "--json"])
        out = capsys.readouterr()
        assert out.err == ""
        first, row = out.out.splitlines()
        found = json.loads(row)
        assert found["epsilon"] <= 3.0
        assert 0.03 <= found["candidate"]["learning_rate"] <= 3
        assert 0 < found["test_accuracy"] <= 1
        lines.append((first, sorted(found), found["epsilon"], found["noise_multiplier"]))
    assert lines[0] == lines[1]
    again = ran(*given, tmp_path / "2")  # finished: the same result
    assert "proven epsilon 3.000" in again
    assert "test records that chose" in again
    # Laws by name.
    assert law_of("geometric:0.1") == acc.Geometric(0.1)
    assert law_of("logarithmic:0.1") == acc.Logarithmic(0.1)
    assert law_of("negative_binomial:0.5:0.1") == acc.NegativeBinomial(0.5, 0.1)
    assert law_of("poisson:10") == acc.PoissonTries(10.0)


# jaxdp plan.
REFERENCE = {"epsilon": 2.0, "delta": 1e-5, "steps": 2_000, "batch_size": 500}
BUDGET = {"epsilon": 2.0, "delta": 1e-5, "steps": 30, "batch_size": 20, "dataset_size": 200}


def planned(numbers, *args):
    given = [part for name, v in numbers.items() for part in (f"--{name.replace('_', '-')}", v)]
    return called("plan", *given, *args)


def test_the_reference_has_its_numbers():
    makers = dict(_makers(0.0, _Budget(**REFERENCE, dataset_size=50_000)))
    plain, banded, buffered = (makers[name]() for name in ("DP-SGD", "BandMF", "BLT"))
    assert (banded.bands, banded.memory) == (8, 7)
    assert banded.noise_multiplier == pytest.approx(2.70808, rel=2e-4)
    assert banded.rms_error == pytest.approx(31.3595, rel=2e-4)
    assert plain.rms_error == pytest.approx(36.35, rel=2e-4)
    assert plain.memory == 0
    assert (buffered.relation, buffered.memory) == ("replace_special", 4)
    assert _best([plain, banded, buffered], "add_or_remove_one") is banded
    assert all(1.999 < row.epsilon <= 2 for row in (plain, banded, buffered))


def test_json_and_table_have_every_mechanism_its_errors_and_the_best(monkeypatch):
    answer = json.loads(planned(BUDGET, "--json").stdout.splitlines()[-1])
    names = "DP-SGD, Poisson sampling|DP-SGD, random allocation|BandMF, cyclic Poisson"
    names += "|BLT, fixed order|λCGD, fixed order|banded, fixed order"
    assert [row["name"] for row in answer["rows"]] == names.split("|")
    strict = [row for row in answer["rows"] if row["relation"] == "add_or_remove_one"]
    assert answer["best"] == min(strict, key=lambda row: row["rms_error"])["name"]
    assert answer["refused"] == {}
    assert {name: answer[name] for name in BUDGET} == BUDGET
    assert all(row["epsilon"] <= 2 and row["max_error"] >= row["rms_error"] for row in strict)
    found, mechanism = answer["rows"][2], jaxdp.dp_mf(l2_clip_norm=1.0, **BUDGET)
    assert found["rms_error"] == jaxdp.mechanism.expected_error(mechanism)
    assert found["max_error"] == jaxdp.mechanism.expected_error(mechanism, error="max")
    assert found["noise_multiplier"] == mechanism.noise_multiplier
    # The table says which to take, and what the weaker promise is.
    found = planned({**BUDGET, "batch_size": 19, "momentum": 0.9})
    assert found.exit_code == 0
    assert "Least error under add_or_remove_one: take " in found.stdout
    assert "another, weaker promise" in " ".join(found.stdout.split())
    assert "random allocation: whole epochs, 33 steps with 19 records each" in found.stdout
    assert "about ten seconds" in found.stderr
    table = found.stdout.splitlines()
    (start,) = (i for i, line in enumerate(table) if line.split()[:1] == ["relation"])
    assert all("  " in line for line in table[start + 1 : start + 6])
    # Momentum makes the errors those of the parameters.
    one, other = (dict(_makers(m, _Budget(**BUDGET)))["DP-SGD"]() for m in (0.0, 0.9))
    assert other.noise_multiplier == one.noise_multiplier
    assert other.rms_error > 3 * one.rms_error

    # A mechanism that cannot be had is named.
    def refuse(*args, **options):
        raise ValueError("no bound")

    monkeypatch.setattr(jaxdp.mechanism, "dp_mf", refuse)
    small = {**BUDGET, "steps": 10}
    found = planned(small)
    assert "BandMF: not possible: no bound" in found.stdout
    monkeypatch.setattr(jaxdp.mechanism, "dp_sgd", refuse)
    assert str(planned(small).exception) == "no bound"


def test_plan_explains_what_public_numbers_say():
    small = {**BUDGET, "delta": 0.01}
    lines = planned(small, "--explain", "--parameters", 10_000).stdout.splitlines()
    assert len(lines) <= 25
    assert lines[0] == "From public numbers alone, no record was read:"
    for part in (
        "as it is",
        "twice the batch: 40",
        "half the steps: 15",
        "Do: delta=0.01 is 2 times",
    ):
        assert any(line.startswith(part) for line in lines), part
    without = planned(BUDGET, "--explain")
    assert "parameters" in str(without.exception)


def test_plan_says_a_linear_models_rate():
    numbers = {"epsilon": 3, "delta": 1e-5, "steps": 366, "batch_size": 8_192, "momentum": 0.9}
    found = planned({**numbers, "dataset_size": 50_000}, "--linear", 12_288).stdout
    assert "noise multiplier 4.48\nlearning rate 1.83 at clipping norm 0.1" in found
    assert "linear must not be" in str(planned(BUDGET, "--linear", 5, "--json").exception)


def test_a_command_that_asks_for_nothing_heavy_imports_nothing_heavy():
    """Before: `jaxdp export nothere` and every misspelt option waited for JAX or SciPy."""
    program = (
        "import sys\nfrom jaxdp.cli import main\n"
        "for line in sys.stdin:\n"
        "    try: main(line.split())\n"
        "    except SystemExit: pass\n"
        "sys.exit(', '.join({'jax', 'scipy', 'flax', 'orbax'} & {*sys.modules}) or None)\n"
    )
    lines = (
        "--help;train --help;train --nonsense;train --dataset nope;train --resume --out nothere;"
        "tune --nonsense;audit nothere;export nothere;plan --epsilon x;epsilon --steps 10;"
        "calibrate --epsilon 3 --delta 1e-5 --steps 9;data --help"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="\n".join(lines.split(";")),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "folder must hold a run, with its secret/, got nothere" in done.stderr
    assert set(options.ACCOUNTANTS) == {*acc.queries.ACCOUNTANTS} - {"log_sobolev"}
    assert [relation.value for relation in acc.Relation] == [*options.RELATIONS]
