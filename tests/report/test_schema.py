"""report.json has the form that its schema says, and older forms are read or refused in words."""

import dataclasses
import json
import math
import typing
from pathlib import Path

import jsonschema
import pytest

from jaxdp.report import schema, to_markdown
from jaxdp.report.schema import VERSION, Report, load
from jaxdp.runs.config import RunConfig
from jaxdp.runs.described import report as build
from tests.runs import small
from tests.runs.small import refused

PUBLISHED = Path(__file__).parents[2] / "docs" / "reference" / "report.schema.json"
SCHEMA = json.loads(PUBLISHED.read_text(encoding="utf-8"))
VALID = jsonschema.Draft202012Validator(SCHEMA)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    def of(name):
        cfg = small.config(algorithm=name, steps=2, eval_every=1)
        return build(small.go(tmp_path_factory.mktemp("runs") / name, cfg))

    return [of(name) for name in ("dp-sgd", "sa-dpsgd-as-published", "adadp-as-published")]


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


def test_a_report_of_version_1_is_read(reports, tmp_path):
    report = reports[0]
    row = report.to_dict()
    del row["version"]
    row["method"] = row.pop("algorithm")
    row["guarantee"]["method"] = row["guarantee"].pop("accountant")
    row["config"]["method"] = row["config"].pop("algorithm")
    (tmp_path / "report.json").write_text(json.dumps(row))
    again = load(tmp_path / "report.json")
    assert again == dataclasses.replace(report, config=again.config)
    assert RunConfig.from_dict(again.config) == RunConfig.from_dict(report.config)
    assert to_markdown(again) == to_markdown(report)
    former = {**row, "method": "dp-adam", "config": {**row["config"], "method": "dpgdo"}}
    assert Report.from_dict(former).algorithm == "dp-adam-bc"
    assert RunConfig.from_dict(former["config"]).algorithm == "dp-adam"


def test_a_damaged_report_is_refused_in_words(reports, tmp_path):
    path = tmp_path / "report.json"
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


def test_an_evaluated_number_takes_no_field_of_the_report(reports):
    report = reports[0]
    measured = dataclasses.replace(report.measured, column="title")
    row = dataclasses.replace(report.history[-1], numbers={"title": 0.5})
    named = dataclasses.replace(report, measured=measured, history=(row,))
    assert named.value == 0.5
    assert named.to_dict()["title"] == report.title
    assert Report.from_dict(named.to_dict()) == named
