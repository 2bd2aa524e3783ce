"""The page that the person who signs needs: every fact, every warning, and no request elsewhere."""

import dataclasses
import hashlib
import html.parser
import json
import math
import re

import numpy as np
import pytest
from click.testing import CliRunner

from jaxdp import accounting as acc
from jaxdp.cli import app
from jaxdp.report import save_plots, svg, to_html, to_markdown
from jaxdp.report.schema import Report
from jaxdp.runs import described
from jaxdp.runs.config import RunConfig, resolve
from jaxdp.runs.described import report as build
from jaxdp.runs.recipes import recipe
from tests.runs import small

VOID = {"meta", "br", "hr", "img", "link", "input", "col"}


class Page(html.parser.HTMLParser):
    """Text, tags and attributes of a page; refuses one whose tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

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

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "run"
    options = "--dataset digits --model logistic --steps 3 --eval-every 1 --seed 987654321 --out"
    args = ["train", *options.split(), str(folder)]
    done = CliRunner().invoke(app, args, catch_exceptions=False)
    assert done.exit_code == 0
    return folder, Page((folder / "report.html").read_text()), done.output


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return small.go(tmp_path_factory.mktemp("small") / "r", small.config(steps=2))


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
        assert tag not in ("script", "link", "img", "iframe", "object")
        assert attributes.get("href", "#").startswith("#")
        assert "src" not in attributes
    assert ("html", {"lang": "en"}) in page.tags
    plots = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(plots) == 3
    assert all(each["role"] == "img" and each["aria-label"] for each in plots)
    assert all(each["scope"] in ("row", "col") for tag, each in page.tags if tag == "th")
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:url\(|href=\")#([\w-]+)", text)) <= set(ids)
    assert "prefers-color-scheme: dark" in text
    # What does not follow the page is black on black in the dark.
    for plot in re.findall(r"<svg.*?</svg>", text, flags=re.S):
        assert not re.findall(r"#[0-9a-fA-F]{6}\b", plot)


def _luminance(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return np.dot([0.2126, 0.7152, 0.0722], linear)


def test_letters_have_the_contrast_of_aa_in_both_modes():
    grounds = (("#ffffff", "#fff6ef", "#f6f8fa"), ("#0d1117", "#2b1d0e", "#161b22"))
    for name in ("ink", "soft", "blue", "orange"):
        for colour, behind in zip(svg.COLOURS[name], grounds, strict=True):
            for ground in behind:
                low, high = sorted((_luminance(colour), _luminance(ground)))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)


def test_warnings_appear_exactly_when_they_should(result, tmp_path):
    for about, changes in (
        ([], {"delta": 0.99 / 300}),
        (["delta"], {"delta": 1 / 300}),
        (["epsilon"], {"noise_multiplier": 0.3}),
        (["epsilon", "delta"], {"noise_multiplier": 0.05, "delta": 0.1}),
        (["epsilon"], {"algorithm": "adadp-as-published"}),
    ):
        report = build(_other(result, **{"noise_multiplier": 2.0, **changes}))
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
    config = dataclasses.replace(
        result.config, dataset_size=300, batch_size=30, epsilon=None, **changes
    )
    ledger = type(result.ledger)()
    for event, first, count in config.private_algorithm().events(0, 2)[""]:
        ledger.charge(event, count, stream="run", first_step=first, source="mechanism")
    bound = acc.epsilon(ledger.event, config.delta).upper
    history = [{**row, "epsilon": bound} for row in result.history]
    return dataclasses.replace(
        result, config=config, ledger=ledger, history=history, reproducible=False
    )


def test_one_step_no_movement_and_reports_of_older_versions_still_make_a_page(result, tmp_path):
    config = dataclasses.replace(result.config, steps=1)
    for norm in (0.0, math.nan, math.inf):
        history = [{**result.history[0], "update_norm": norm}]
        report = build(dataclasses.replace(result, config=config, history=history))
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
    from jaxdp.cli.train import parse_settings, train

    for dataset, given in (
        ("digits", {}),
        ("mnist", {"algorithm": "dp-adam-bc"}),
        ("pums", {"model": "logistic"}),
        ("digits", {"algorithm": "sa-dpsgd", "settings": {"temperature": 5.0}}),
        ("digits", {"optimizer": "adam", "learning_rate": 0.01}),
        ("digits", {"noise_schedule": "exponential:0.01:10", "steps": 20}),
    ):
        config = resolve(recipe(dataset, **given))
        words = described.command_of(config).split()[2:]
        context = train.make_context("train", words)
        options = {k: v for k, v in context.params.items() if k in RunConfig.__dataclass_fields__}
        options["settings"] = parse_settings(options["settings"]) or None
        found = resolve(recipe(**options))
        assert dataclasses.replace(found, epsilon=config.epsilon) == config, given
    own = {"example_shape": [64], "num_classes": 2, "test_size": 9}
    command = described.command_of(dataclasses.replace(config, dataset="mine", own=own))
    assert "--data mine.npz" in command
    assert "--classes 2" in command
    assert "--dataset " not in command
