"""Frozen dataclasses that are written to JSON files and read back, every value checked."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

Read = TypeVar("Read", bound="Written")
_TYPES: dict[type, tuple[type, ...]] = {
    float: (int, float),
    int: (int,),
    str: (str,),
    bool: (bool,),
}
# Strict JSON has no such numbers: they are written as these strings.
NOT_FINITE = ("inf", "-inf", "nan")


class Written:
    """A frozen dataclass that stands for one JSON object.

    Attributes:
        LEFT_OUT: names of fields that are not written where they are None.
        EMPTY: names of fields that are written as {} where they are None.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    LEFT_OUT: ClassVar[tuple[str, ...]] = ()
    EMPTY: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for strict JSON; ``from_dict`` is its inverse."""
        found = {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        found |= {name: {} for name in self.EMPTY if found[name] is None}
        left_out = {name for name in self.LEFT_OUT if found[name] is None}
        return {name: value for name, value in found.items() if name not in left_out}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """The object that ``to_dict`` wrote; keys that are no field are passed over.

        Raises:
            ValueError: a field is missing, or is of another type.
        """
        return _read_fields(cls, row)


def plain(value: Any) -> Any:
    """The same value for strict JSON: tuples as lists, numbers that are not finite as strings."""
    if isinstance(value, Written):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _read_fields(cls: type[Read], row: Mapping[str, Any]) -> Read:
    if not isinstance(row, Mapping):
        raise ValueError(f"{cls.__name__} must be an object, got {row!r}")
    found, kinds = {}, typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in row:
            where = f"{cls.__name__}.{field.name}"
            value = None if field.name in cls.EMPTY and not row[field.name] else row[field.name]
            found[field.name] = _read(kinds[field.name], value, where)
        elif (field.default, field.default_factory) == (dataclasses.MISSING, dataclasses.MISSING):
            raise ValueError(f"{cls.__name__} must hold {field.name!r}, got none")
    return cls(**found)


def _read(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if isinstance(kind, types.UnionType):  # X | None
        inner = next(each for each in typing.get_args(kind) if each is not types.NoneType)
        return None if value is None else _read(inner, value, where)
    if kind is Any:
        return value
    if origin is tuple:
        return _read_tuple(typing.get_args(kind), value, where)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, got {value!r}")
        part = typing.get_args(kind)[1]
        return {name: _read(part, each, f"{where}[{name!r}]") for name, each in value.items()}
    if issubclass(kind, Written):
        return kind.from_dict(value)
    if kind is float and value in NOT_FINITE:
        return float(value)
    if not isinstance(value, _TYPES[kind]) or isinstance(value, bool) is not (kind is bool):
        raise ValueError(f"{where} must be of type {kind.__name__}, got {value!r}")
    return value


def _read_tuple(parts: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} must be an array, got {value!r}")
    if parts[-1] is ...:
        parts = parts[:1] * len(value)
    if len(parts) != len(value):
        raise ValueError(f"{where} must have {len(parts)} entries, got {len(value)}")
    return tuple(_read(p, each, where) for p, each in zip(parts, value, strict=True))
