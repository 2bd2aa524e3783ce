"""The audit's sentence says what its table says."""

import dataclasses
import json
import math
import re
import xml.etree.ElementTree

import numpy as np
import pytest

from jaxdp.auditing.audit import audit_algorithm
from jaxdp.optimizers import registry
from jaxdp.report import audited, svg, to_html, to_markdown
from jaxdp.report.roc import save_roc
from jaxdp.report.schema import AuditRow, Report
from jaxdp.runs.described import report as build
from tests.runs import small


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


def test_the_larger_of_two_bounds_is_not_told_alone():
    words = audited.verdict(ROW)
    assert shares(words) == ["25%", "75%"]
    assert "75% provided that it is Gaussian" in words
    assert [share for _, _, share in audited.table(ROW)] == ["", "25%", "75%"]
    alone = dataclasses.replace(ROW, audited_profile=None, verdict="V.")
    assert audited.verdict(alone) == "V."


def test_few_canaries_are_said_to_be_few_in_a_cell_that_fits_its_column():
    """The page does not break cells of numbers: long ones push the table over the plot."""
    point = (0.092, 0.043, 0.167, 0.235, 0.157, 0.33)
    few = dataclasses.replace(
        ROW, what=audited.THIS_RUN, runs=1, canaries=200, reachable=1.5, points=(point,)
    )
    table = {name: value for name, value, _ in audited.table(few)}
    assert max(map(len, table.values())) <= 25
    assert "needs over 2,000 canaries" in table.values()
    assert audited.advice(few).endswith("give the next run more canaries.")
    assert "canaries" not in audited.advice(dataclasses.replace(few, reachable=2.5))
    assert "canaries" not in audited.advice(dataclasses.replace(few, canaries=None))


def test_the_page_and_the_markdown_hold_the_table(tmp_path, found):
    told = AuditRow.from_dict(found.to_dict())
    table = {share for _, _, share in audited.table(told)}
    assert set(shares(audited.verdict(told))) <= table
    report = build(small.go(tmp_path / "r", small.config(steps=1)))
    save_roc(found, tmp_path / "roc.png", "Audit")
    for each in (told, dataclasses.replace(ROW, proven=math.inf, verdict="Nothing is proven.")):
        written = json.dumps(dataclasses.replace(report, audited=each).to_dict())
        full = Report.from_dict(json.loads(written))
        assert full.audited == each
        page, markdown = to_html(full, tmp_path), to_markdown(full)
        for name, value, _ in audited.table(each):
            assert f"{name}</th><td>{value}" in page
            assert f"| {name} | {value} |" in markdown
        assert audited.verdict(each) in markdown
        assert 'id="roc-axes_1"' in page
    bad = dataclasses.replace(ROW, noise_refuted=True, noise="noise: REFUTED: too small (p 1e-5)")
    page = to_html(dataclasses.replace(report, audited=bad), tmp_path)
    assert "Nothing contradicts" not in page
    assert "The audit refutes the noise that was charged (too small (p 1e-5))." in page


def test_the_plot_is_a_file_of_its_own_as_well(tmp_path, found):
    """Also in a folder that is named with a dollar, and of an attack that finds nobody."""
    save_roc(found, tmp_path / "roc.png", "Audit of $a^{$")
    assert (tmp_path / "roc.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "roc.svg").read_text()
    assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")
    assert "prefers-color-scheme" in text
    inner = svg.embedded(text)
    assert svg.standalone(inner) == text
    assert "<style" not in inner
    for nobody in (np.array([[1.0, 1.0], [0.0, 0.0]]), np.zeros((1, 2))):
        save_roc(dataclasses.replace(found, roc=nobody), tmp_path / "roc.png", "Audit")
