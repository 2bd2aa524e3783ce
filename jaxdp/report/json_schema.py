"""The JSON Schema of report.json and the tables of its fields, made from the dataclasses.

``python -m jaxdp.report.json_schema`` writes both into docs/reference.
"""

import dataclasses
import inspect
import json
import re
import textwrap
import typing
from pathlib import Path
from typing import Any

from jaxdp._written import NOT_FINITE, Written, fields, hints, optional
from jaxdp.report import schema
from jaxdp.report.schema import HistoryRow, Report

BEGIN, END = "<!-- made by jaxdp.report.json_schema -->\n", "<!-- end -->\n"
_NAMES: dict[Any, str] = {int: "integer", str: "string", bool: "boolean"}
_NUMBER = {"anyOf": [{"type": "number"}, {"enum": list(NOT_FINITE)}]}


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of report.json."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"report.json of jaxdp, version {schema.VERSION}",
        **_object(Report),
        "$defs": {
            "Number": {**_NUMBER, "description": "Strict JSON has no infinity and no NaN."},
            **{cls.__name__: _object(cls) for cls in classes() if cls is not Report},
        },
    }


def classes() -> list[type[Written]]:
    """The dataclasses of the schema, the report first."""
    found = [each for each in vars(schema).values() if _is_object(each) and each is not Written]
    return sorted(found, key=lambda cls: cls is not Report)


def described(cls: type) -> dict[str, str]:
    """The descriptions in a docstring's section "Attributes", by field."""
    text = inspect.getdoc(cls) or ""
    _, _, section = text.partition("Attributes:\n")
    rows = re.findall(r"^(\w+): (.*(?:\n +.*)*)", textwrap.dedent(section), flags=re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in rows}


def tables() -> str:
    """The fields of every object as tables of Markdown."""
    lines = []
    for cls in classes():
        words = (inspect.getdoc(cls) or "").split("\n\n")[0]
        lines += [f"### {cls.__name__}", "", words, "", "| field | type | meaning |"]
        lines += ["|---|---|---|"]
        lines += [f"| `{name}` | {kind} | {words} |" for name, kind, words in _rows(cls)]
        lines += [""]
    return "\n".join(lines)


def _rows(cls: type[Written]) -> list[tuple[str, str, str]]:
    words = described(cls)
    return [
        (
            field.name,
            _in_words(_kind(cls, field)) + (", may be missing" if _may_miss(cls, field) else ""),
            re.sub(r"``?([\w.]+)``", r"`\1`", words[field.name]).replace("``", "`"),
        )
        for field in fields(cls)
    ]


def _object(cls: type[Written]) -> dict[str, Any]:
    words = described(cls)
    named = [field for field in fields(cls) if not _spread(cls, field)]
    return {
        "description": (inspect.getdoc(cls) or "").split("\n")[0],
        "type": "object",
        "properties": {
            field.name: {**_property(cls, field), "description": words[field.name]}
            for field in named
        },
        "required": [field.name for field in named if not _may_miss(cls, field)],
        # An evaluated number stands under its own name.
        "additionalProperties": {"$ref": "#/$defs/Number"}
        if cls in (Report, HistoryRow)
        else False,
    }


def _spread(cls: type, field: dataclasses.Field[Any]) -> bool:
    return cls is HistoryRow and field.name == "numbers"


def _may_miss(cls: type[Written], field: dataclasses.Field[Any]) -> bool:
    return field.name in cls.LEFT_OUT


def _property(cls: type[Written], field: dataclasses.Field[Any]) -> dict[str, Any]:
    found = _schema(_kind(cls, field))
    if field.name in cls.EMPTY:
        return {"anyOf": [found, {"type": "object", "maxProperties": 0}]}
    return found


def _kind(cls: type[Written], field: dataclasses.Field[Any]) -> Any:
    """The type of a field as it is written: one that is left out or empty is never null."""
    kind = hints(cls)[field.name]
    return optional(kind) if field.name in (*cls.LEFT_OUT, *cls.EMPTY) else kind


def _schema(kind: Any) -> dict[str, Any]:
    inner, parts = optional(kind), typing.get_args(kind)
    if inner is not None:
        return {"anyOf": [_schema(inner), {"type": "null"}]}
    if kind is Any:
        return {}
    if kind is float:
        return {"$ref": "#/$defs/Number"}
    if kind in _NAMES:
        return {"type": _NAMES[kind]}
    if typing.get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": _schema(parts[1])}
    if typing.get_origin(kind) is tuple:
        return _array(parts)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _array(parts: tuple[Any, ...]) -> dict[str, Any]:
    if parts[-1] is ...:
        return {"type": "array", "items": _schema(parts[0])}
    return {"type": "array", "prefixItems": [_schema(part) for part in parts], "items": False}


def _in_words(kind: Any) -> str:
    inner, parts = optional(kind), typing.get_args(kind)
    if inner is not None:
        return f"{_in_words(inner)} or null"
    if typing.get_origin(kind) is dict:
        return f"object of {_in_words(parts[1])}"
    if typing.get_origin(kind) is tuple:
        if parts[-1] is ...:
            return f"array of {_in_words(parts[0])}"
        return f"[{', '.join(_in_words(part) for part in parts)}]"
    if kind is Any:
        return "any"
    name = _NAMES.get(kind, "number")
    return f"[{kind.__name__}](#{kind.__name__.lower()})" if _is_object(kind) else name


def _is_object(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, Written)


def written(folder: Path) -> dict[Path, str]:
    """The current text of the schema's file and of the page, by path."""
    page = folder / "files.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return {
        folder / "report.schema.json": json.dumps(json_schema(), indent=1) + "\n",
        page: before + BEGIN + "\n" + tables() + "\n" + END + after,
    }


if __name__ == "__main__":
    for path, text in written(Path("docs/reference")).items():
        path.write_text(text, encoding="utf-8")
