"""The page that the person who signs needs, report.json behind it, and the audit in both.

Every fact, every warning, and no request elsewhere; report.json has the form that its schema says,
and older forms are read or refused in words. What is shown is never better than what is proven:
neither numbers nor the curve of an attack.
"""

import base64
import dataclasses
import hashlib
import html.parser
import json
import math
import re
import typing
import xml.etree.ElementTree
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting.curves import false_negative_rates, profile
from jaxdp.audit.algorithms import audit_algorithm
from jaxdp.cli.train import parse_settings, train
from jaxdp.optimizers import registry
from jaxdp.runs import described
from jaxdp.runs.config import RunConfig, resolve
from jaxdp.runs.described import report as build
from jaxdp.runs.recipes import recipe
from jaxdp.runs.report import audited, save_plots, schema, to_html, to_markdown
from jaxdp.runs.report.build import limit_attacks
from jaxdp.runs.report.plots import save_roc
from jaxdp.runs.report.schema import VERSION, AuditRow, Report, load
from jaxdp.runs.report.words import show_audited, show_delta, show_epsilon, show_factor, show_rate
from tests.cli.calling import ran
from tests.refusing import refused
from tests.runs import small

VOID = {"meta", "br", "hr", "img", "link", "input", "col"}
PUBLISHED = Path(__file__).parents[3] / "docs" / "reference" / "report.schema.json"
SCHEMA = json.loads(PUBLISHED.read_text(encoding="utf-8"))
VALID = jsonschema.Draft202012Validator(SCHEMA)


class Page(html.parser.HTMLParser):
    """Text, tags and attributes of a page; refuses one whose tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "run"
    options = "--dataset digits --model logistic --steps 3 --eval-every 1 --seed 987654321 --out"
    said = ran("train", *options.split(), folder)
    return folder, Page((folder / "report.html").read_text()), said


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of runs: one with a guarantee, one judged by public records, one of which nothing is proven."""
    folder = tmp_path_factory.mktemp("small")
    names = ("dp-sgd", "sa-dpsgd-as-published", "adadp-as-published")
    configs = [small.config(algorithm=name, steps=2, eval_every=1) for name in names]
    return [small.go(folder / cfg.algorithm, cfg) for cfg in configs]


@pytest.fixture(scope="module")
def reports(results):
    return list(map(build, results))


def test_every_fact_is_on_the_page_and_in_the_markdown(run):
    folder, page, output = run
    assert f"report: {folder / 'report.html'}\n" in output
    ledger = hashlib.sha256((folder / "ledger.jsonl").read_bytes()).hexdigest()
    facts = (
        "1,437, declared and public|one training record|one record added or removed|"
        "256 of 1,437 records expected a step, each with probability 0.178|"
        "longer than 0.5 is shortened|SGD, learning rate 0.3, momentum 0.9|3 (0.534 epochs|"
        "Parameters 650|jaxdp train --dataset digits --model logistic --steps 3|"
        "Guessing a class at random is right for 10.00%|commonest class, for 10.28%|"
        "Equivalent Gaussian (GDP), approximate: mu"
    ).split("|")
    text = (folder / "report.json").read_text()
    report = json.loads(text)
    facts += [f"{report['date']} (UTC", f"{report['config']['noise_multiplier']:.4g}: the noise's"]
    facts += [ledger, *(f"{name} {version}" for name, version in report["versions"].items())]
    written = (folder / "report.md").read_text()
    markdown = " ".join(written.split()).replace("| ", "")
    assert [fact for fact in facts if fact not in page.text or fact not in markdown] == []
    assert {"jaxdp", "jax", "numpy", "python"} <= set(report["versions"])
    assert report["ledger_sha256"] == ledger
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", report["date"])
    # Neither the seed, nor a folder of this machine, nor a duration is told.
    public = text + written + (folder / "report.html").read_text()
    seconds = re.search(r"([\d.]+) s for 3 steps", output)[1]
    for told in ("987654321", str(folder.parent), "seconds", f"{seconds} s"):
        assert told not in public, told
    assert "No guarantee against whoever knows the seed" in public


def test_the_page_asks_for_nothing_and_is_accessible(run):
    folder, page, _ = run
    text = (folder / "report.html").read_text()
    for outside in ("http://", "https://", "@import"):
        assert outside not in text
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "svg", "iframe", "object")
        assert attributes.get("href", "#").startswith("#")
        assert attributes.get("src", "data:").startswith("data:")
    assert ("html", {"lang": "en"}) in page.tags
    plots = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(plots) == 3
    for each in plots:
        figure = base64.b64decode(each["src"].removeprefix("data:image/svg+xml;base64,")).decode()
        assert each["alt"]
        assert xml.etree.ElementTree.fromstring(figure).tag.endswith("svg")
        assert "fill: #ffffff" in figure  # readable in the dark, too
    assert all(each["scope"] in ("row", "col") for tag, each in page.tags if tag == "th")
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert "prefers-color-scheme: dark" in text
    # Letters have the contrast of AA in both modes.
    grounds = (("#ffffff", "#fff6ef", "#f6f8fa"), ("#0d1117", "#2b1d0e", "#161b22"))
    for name in ("ink", "soft", "blue", "orange"):
        colours = re.findall(rf"--{name}: (#\w+);", text)
        for colour, behind in zip(colours, grounds, strict=True):
            for ground in behind:
                low, high = sorted((_luminance(colour), _luminance(ground)))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)


def _luminance(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return np.dot([0.2126, 0.7152, 0.0722], linear)


def test_warnings_appear_exactly_when_they_should(results, tmp_path):
    for about, changes in (
        ([], {"delta": 0.99 / 300}),
        (["delta"], {"delta": 1 / 300}),
        (["epsilon"], {"noise_multiplier": 0.3}),
        (["epsilon", "delta"], {"noise_multiplier": 0.05, "delta": 0.1}),
        (["epsilon"], {"algorithm": "adadp-as-published"}),
    ):
        report = build(_other(results[0], **{"noise_multiplier": 2.0, **changes}))
        found = report.warnings
        assert [row.about for row in found] == about, changes
        epsilon = report.guarantee.epsilon
        if "epsilon" not in about:
            assert epsilon <= 10
        elif math.isinf(epsilon):
            assert "Nothing is proven" in found[0].text
        else:
            little = "no meaningful protection" if epsilon > 50 else "gives little protection"
            assert little in found[0].text
        with small.undrawn():
            page, markdown = to_html(report, tmp_path), to_markdown(report)
        assert page.count("<strong>Warning.</strong>") == len(found), changes
        assert markdown.count("**Warning.**") == len(found), changes
        for row in found:
            assert row.text in Page(page).text
            assert row.text in markdown
        json.dumps(report.to_dict(), allow_nan=False)
    save_plots(report, tmp_path)  # also where nothing is proven


def _other(result, **changes):
    """The same run as if it had been charged otherwise; nothing is trained."""
    given = {"dataset_size": 300, "batch_size": 30, "epsilon": None, **changes}
    config = dataclasses.replace(result.config, **given)
    ledger = type(result.ledger)()
    for event, first, count in config.private_algorithm().events(0, 2)[""]:
        ledger.charge(event, count, stream="run", first_step=first, source="mechanism")
    bound = acc.epsilon(ledger.event, config.delta).upper
    history = [{**row, "epsilon": bound} for row in result.history]
    changes = {"config": config, "ledger": ledger, "history": history, "reproducible": False}
    return dataclasses.replace(result, **changes)


def test_one_step_no_movement_and_reports_of_older_versions_still_make_a_page(results, tmp_path):
    result = results[0]
    config = dataclasses.replace(result.config, steps=1)
    for norm in (0.0, math.nan, math.inf):
        history = [{**result.history[0], "update_norm": norm}]
        report = build(dataclasses.replace(result, config=config, history=history))
        if math.isnan(norm):
            Page(to_html(report, tmp_path))
        assert "1 (" in to_markdown(report)
        assert all(path.stat().st_size > 1_000 for path in save_plots(report, tmp_path))
    row = build(result).to_dict()
    later = "version levels warnings tradeoff versions parameters epochs date command ledger_sha256"
    for name in (*later.split(), "privacy_unit", "facts", "title", "measured"):
        del row[name]
    report = Report.from_dict(row)
    assert "What is promised" in Page(to_html(report, tmp_path)).text
    assert to_markdown(report).startswith("# ")
    # A majority is of the test labels alone.
    assert build(result, test_labels=np.array([3, 3, 1, 0])).levels.majority == 0.5
    assert build(result).levels.majority is None


def test_the_written_out_command_gives_the_same_run():
    for dataset, changes in (
        ("digits", {}),
        ("mnist", {"algorithm": "dp-adam-bc"}),
        ("pums", {"model": "logistic"}),
        ("digits", {"algorithm": "sa-dpsgd", "settings": {"temperature": 5.0}}),
        ("digits", {"optimizer": "adam", "learning_rate": 0.01}),
        ("digits", {"noise_schedule": "exponential:0.01:10", "steps": 20}),
    ):
        config = resolve(recipe(dataset, **changes))
        words = described.command_of(config).split()[2:]
        context = train.make_context("train", words)
        options = {k: v for k, v in context.params.items() if k in RunConfig.__dataclass_fields__}
        options["settings"] = parse_settings(options["settings"]) or None
        found = resolve(recipe(**options))
        assert dataclasses.replace(found, epsilon=config.epsilon) == config, changes
    own = {"example_shape": [64], "num_classes": 2, "test_size": 9}
    command = described.command_of(dataclasses.replace(config, dataset="mine", own=own))
    assert "--data mine.npz" in command
    assert "--classes 2" in command
    assert "--dataset " not in command


def test_the_published_schema_has_every_field_and_says_which_may_be_missing():
    published = {"Report": SCHEMA, **SCHEMA["$defs"]}
    del published["Number"]
    for name, part in published.items():
        cls = getattr(schema, name)
        fields = {field.name for field in dataclasses.fields(cls)}
        if name == "HistoryRow":  # the evaluated numbers stand beside the others
            fields.remove("numbers")
        assert set(part["properties"]) == fields, name
        assert set(part["required"]) == fields - set(cls.LEFT_OUT), name
        kinds, never = typing.get_type_hints(cls), (*cls.LEFT_OUT, *cls.EMPTY)
        for field in fields:  # of the page docs/reference/files.md, too
            assert f" {field}: " in cls.__doc__, (name, field)
            null = {"type": "null"} in part["properties"][field].get("anyOf", ())
            optional = type(None) in typing.get_args(kinds[field])
            assert null == (optional and field not in never), (name, field)
    assert int(SCHEMA["title"].split()[-1]) == VERSION


def test_real_reports_are_valid_and_read_back_as_they_were(reports):
    for report in reports:
        row = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        VALID.validate(row)
        again = Report.from_dict(row)
        assert again == report
        assert again.to_dict() == row
    assert [math.isinf(report.guarantee.epsilon) for report in reports] == [False, False, True]
    assert [report.counts is None for report in reports] == [True, False, True]
    for broken in ({"title": 3}, {"guarantee": {}}, {"history": [{"step": 1.5}]}, {"extra": "x"}):
        assert not VALID.is_valid({**row, **broken}), broken
    # An evaluated number takes no field of the report.
    report = reports[0]
    measured = dataclasses.replace(report.measured, column="title")
    row = dataclasses.replace(report.history[-1], numbers={"title": 0.5})
    named = dataclasses.replace(report, measured=measured, history=(row,))
    assert named.value == 0.5
    assert named.to_dict()["title"] == report.title
    assert Report.from_dict(named.to_dict()) == named


def test_a_report_of_version_1_is_read_and_a_damaged_one_refused_in_words(reports, tmp_path):
    report, path = reports[0], tmp_path / "report.json"
    row = report.to_dict()
    del row["version"]
    row["method"] = row.pop("algorithm")
    row["guarantee"]["method"] = row["guarantee"].pop("accountant")
    row["config"]["method"] = row["config"].pop("algorithm")
    path.write_text(json.dumps(row))
    again = load(path)
    assert again == dataclasses.replace(report, config=again.config)
    assert RunConfig.from_dict(again.config) == RunConfig.from_dict(report.config)
    assert to_markdown(again) == to_markdown(report)
    former = {**row, "method": "dp-adam", "config": {**row["config"], "method": "dpgdo"}}
    assert Report.from_dict(former).algorithm == "dp-adam-bc"
    assert RunConfig.from_dict(former["config"]).algorithm == "dp-adam"
    for change, words in (
        ({"version": VERSION + 1}, f"version must be at most {VERSION}, got {VERSION + 1}"),
        ({"guarantee": None}, "Guarantee must be an object, got None"),
        ({"history": [{}]}, "HistoryRow must hold 'step', got none"),
        ({"title": 3}, "Report.title must be of type str, got 3"),
        ({"parameters": True}, "Report.parameters must be of type int, got True"),
        ({"facts": [["a"]]}, r"Report.facts must have 2 entries, got 1"),
        ({"notes": "a"}, "Report.notes must be an array"),
        ({"versions": []}, "Report.versions must be an object"),
    ):
        path.write_text(json.dumps({**reports[0].to_dict(), **change}))
        refused(f"report.json must be a report that jaxdp wrote: .*{words}", load, path)
    older = {**reports[0].config, "unheard_of": 1}
    refused("config must have the fields of RunConfig", RunConfig.from_dict, older)


@pytest.fixture(scope="module")
def found():
    algorithm = registry.build("dp-sgd", registry.Numbers(1.0, 1.0, 1, 4, 0.1))
    return audit_algorithm(algorithm, 2, 1e-5, runs=200, seed=1, residuals=False)


ROW = AuditRow(
    **{"what": "the same mechanism on a tiny network", "steps": 10, "runs": 400},
    **{"delta": 1e-5, "confidence": 0.95, "proven": 4.0, "audited": 1.0},
    **{"audited_profile": 3.0, "profile_assumes": "it is Gaussian", "adversary": "a canary"},
    verdict="Nothing contradicts the proven guarantee; the attack reaches 75% of it.",
)


def shares(text):
    return re.findall(r"\d+%", text)


def test_the_larger_of_two_bounds_is_not_told_alone_nor_are_few_canaries():
    words = audited.verdict(ROW)
    assert shares(words) == ["25%", "75%"]
    assert "75% provided that it is Gaussian" in words
    assert [share for _, _, share in audited.table(ROW)] == ["", "25%", "75%"]
    alone = dataclasses.replace(ROW, audited_profile=None, verdict="V.")
    assert audited.verdict(alone) == "V."
    # Few canaries are said to be few. The page does not break cells of numbers: long ones push the
    # table over the plot.
    point = (0.092, 0.043, 0.167, 0.235, 0.157, 0.33)
    changes = {"runs": 1, "canaries": 200, "reachable": 1.5, "points": (point,)}
    few = dataclasses.replace(ROW, what=audited.THIS_RUN, **changes)
    table = {name: value for name, value, _ in audited.table(few)}
    assert max(map(len, table.values())) <= 25
    assert "needs over 2,000 canaries" in table.values()
    assert audited.advice(few).endswith("give the next run more canaries.")
    assert "canaries" not in audited.advice(dataclasses.replace(few, reachable=2.5))
    assert "canaries" not in audited.advice(dataclasses.replace(few, canaries=None))


def test_the_page_and_the_markdown_hold_the_table(tmp_path, found, reports):
    told = AuditRow.from_dict(found.to_dict())
    table = {share for _, _, share in audited.table(told)}
    assert set(shares(audited.verdict(told))) <= table
    report = reports[0]
    save_roc(found, tmp_path / "roc.png", "Audit of $a^{$")
    for each in (told, dataclasses.replace(ROW, proven=math.inf, verdict="Nothing is proven.")):
        written = json.dumps(dataclasses.replace(report, audited=each).to_dict())
        full = Report.from_dict(json.loads(written))
        assert full.audited == each
        with small.undrawn():
            page, markdown = to_html(full, tmp_path), to_markdown(full)
        for name, value, _ in audited.table(each):
            assert f"{name}</th><td>{value}" in page
            assert f"| {name} | {value} |" in markdown
        assert audited.verdict(each) in markdown
        assert base64.b64encode((tmp_path / "roc.svg").read_bytes()).decode() in page
    bad = dataclasses.replace(ROW, noise_refuted=True, noise="noise: REFUTED: too small (p 1e-5)")
    with small.undrawn():
        page = to_html(dataclasses.replace(report, audited=bad), tmp_path)
    assert "Nothing contradicts" not in page
    assert "The audit refutes the noise that was charged (too small (p 1e-5))." in page
    # The plot is a file of its own as well: also in a folder that is named with a dollar, and of an
    # attack that finds nobody.
    assert (tmp_path / "roc.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "roc.svg").read_text()
    assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")
    for nobody in (np.array([[1.0, 1.0], [0.0, 0.0]]), np.zeros((1, 2))):
        save_roc(dataclasses.replace(found, roc=nobody), tmp_path / "roc.png", "Audit")


# Numbers and curves.
ADD = acc.Relation.ADD_OR_REMOVE_ONE
NEARLY = 1 - 1e-15  # up to the rounding of epsilon * 1000 itself, and the like


@given(st.floats(1e-12, 0.9), st.floats(0.0, 1e6), st.floats(0.0, 15.9), st.floats(0.0, 1.0))
def test_shown_numbers_are_never_better_than_the_proven_ones(delta, epsilon, small, rate):
    assert delta <= float(show_delta(delta)) <= delta * (1 + 1.1e-5)
    assert float(show_epsilon(epsilon)) >= epsilon * NEARLY
    assert float(show_audited(epsilon)) <= epsilon * (2 - NEARLY)  # a lower bound that was found
    assert float(show_factor(small).replace(",", "")) >= math.exp(small) * NEARLY
    assert float(show_rate(rate).removesuffix("%")) >= 100 * rate * NEARLY


def test_very_large_factors_are_powers_of_ten_and_round_deltas_stay_as_they_are():
    assert (show_factor(3.0), show_factor(50.0), show_factor(1e4)) == ("21", "10²²", "10⁴³⁴³")
    for delta, shown in ((1e-5, "1e-5"), (0.1, "0.1"), (1.2345644e-5, "1.23457e-5")):
        assert show_delta(delta) == shown
    assert show_delta(1e-12) == "1e-12"


def sampled(noise, rate, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(noise), rate), steps)


def test_of_a_gaussian_and_of_one_sampled_step_it_is_above_the_known_curve():
    for noise in (0.3, 1.0, 4.0):
        found = limit_attacks(acc.Gaussian(noise), ADD, 1e-5)
        assert found.mu_is == "exact"
        assert found.mu == pytest.approx(1 / noise, rel=1e-5)
        rates, hits = np.array(found.curve).T
        true = special.ndtr(special.ndtri(rates) + 1 / noise)
        assert (hits >= true * (1 - 1e-6)).all(), noise
        assert (hits <= 1.15 * true + 1e-8).all(), noise
        at_one_percent = special.ndtr(special.ndtri(0.01) + 1 / noise)
        assert found.tpr_at_fpr["0.01"] == pytest.approx(at_one_percent, rel=0.03)
    # Of one draw, the best test is by the size of the noisy value: its rates are known.
    noise, rate = 1.0, 0.1
    points = profile(sampled(noise, rate, 1), ADD, 1e-5)
    cuts = np.linspace(-2.0, 5.0, 50)
    alarms = special.ndtr(-cuts / noise)
    hits = (1 - rate) * alarms + rate * special.ndtr((1 - cuts) / noise)
    most = 1 - false_negative_rates(points, alarms)
    assert (most >= hits).all()
    assert (most <= 1.1 * hits + 1e-8).all()


def test_mu_is_twice_as_large_under_replacement_and_else_that_of_the_epsilon_or_larger():
    found = limit_attacks(acc.Repeated(acc.Gaussian(4.0), 4), acc.Relation.REPLACE_ONE, 1e-5)
    assert found.mu == pytest.approx(1.0, rel=1e-5)
    event = sampled(3.2, 0.178, 150)
    found = limit_attacks(event, ADD, 1e-5)
    assert found.mu_is == "approximate"
    gaussian = acc.epsilon(acc.Gaussian(1 / found.mu), 1e-5).lower
    assert gaussian >= acc.epsilon(event, 1e-5).upper * (1 - 1e-4)
    # Where nothing is proven there is no curve, and next to no noise has no mu.
    nothing = acc.NonPrivate("no noise"), acc.Repeated(acc.Gaussian(0.0), 3)
    for event in (*nothing, acc.FixedSizeSampled(acc.Gaussian(1.0), 100, 10)):
        assert limit_attacks(event, ADD, 1e-5) is None, event
    for event in (sampled(1e-9, 0.125, 1), sampled(1e-3, 0.125, 2)):
        found = limit_attacks(event, ADD, 1e-5)
        assert found is None or (found.mu is None and found.mu_is == "")


def test_absurd_runs_have_rates_between_guessing_and_certainty():
    for event, delta in (
        (sampled(2.0, 0.1, 1), 0.5),
        (sampled(0.05, 0.5, 500), 1e-5),
        (acc.Gaussian(1e-4), 1e-5),
        (acc.Gaussian(1e6), 0.9),
        (sampled(1.0, 0.01, 10), 1e-30),
    ):
        found = limit_attacks(event, ADD, delta)
        for rate, hits in [*found.curve, *((float(k), v) for k, v in found.tpr_at_fpr.items())]:
            assert rate * (1 - 1e-5) <= hits <= 1, (event, delta)
        assert found.mu is None or (found.mu >= 0 and math.isfinite(found.mu))
