"""Turns JSON into the classes of models."""

from __future__ import annotations

import dataclasses
import functools
import keyword
import re
import types
import typing
from datetime import datetime
from typing import Any, TypeVar

from .errors import internal

T = TypeVar("T")


def decode(kind: type[T], value: Any) -> T:
    """Returns a value of a class. Fields that the class does not have are ignored: a newer service may send more."""
    try:
        return typing.cast(T, _decode(kind, value))
    except (TypeError, ValueError, KeyError, AttributeError) as e:
        raise internal(f"the service answers something else than a {kind.__name__}: {e}") from e


def _decode(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin is types.UnionType:  # X | None
        return None if value is None else _decode(typing.get_args(kind)[0], value)
    if origin is list:
        return [_decode(typing.get_args(kind)[0], v) for v in value or []]
    if origin is dict:
        return {k: _decode(typing.get_args(kind)[1], v) for k, v in (value or {}).items()}
    if kind is datetime:
        return parse_time(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind(**{name: _decode(hint, value[key]) for name, key, hint in _fields(kind) if key in value})
    if kind is Any:
        return value
    if kind is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value


@functools.cache
def _fields(kind: type) -> list[tuple[str, str, Any]]:
    """Returns the fields of a model: their names, those in JSON, and their types."""
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    return [(n, n[:-1] if n.endswith("_") and keyword.iskeyword(n[:-1]) else n, hints[n]) for n in names]


# Python before 3.11 reads neither Z nor nanoseconds.
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,6})\d*)?(Z|[+-]\d\d:\d\d)")


def parse_time(text: str) -> datetime:
    """Returns a time of RFC 3339, to the microsecond."""
    m = _TIME.fullmatch(text)
    if m is None:
        raise ValueError(f"{text!r} is not a time")
    zone = "+00:00" if m[3] == "Z" else m[3]
    return datetime.fromisoformat(f"{m[1]}.{(m[2] or ''):0<6}{zone}")
