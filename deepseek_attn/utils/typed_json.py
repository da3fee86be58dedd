"""Decoded JSON checked against a ``TypedDict``, before anything relies on its keys and types."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

MAX_NUMBER = 1e30  # far above every measured number; sums, products and plots of smaller numbers are finite


def find_problem(value: Any, kind: Any, label: str) -> str | None:
    """The first place where ``value`` is not of type ``kind``, as a message that begins with its ``label``; else None.

    Keys that a ``TypedDict`` does not name are allowed.

    Args:
        kind: a ``TypedDict``, ``list``, fixed ``tuple`` (a JSON list), ``dict`` with text keys, union, ``Any``,
            ``None``, ``str``, ``bool``, ``int`` or ``float``. Numbers must be finite and at most `MAX_NUMBER`.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return None
    if origin in (typing.Union, types.UnionType):
        problems = [find_problem(value, option, label) for option in arguments]
        return None if None in problems else problems[0]
    if typing.is_typeddict(kind):
        return _find_in_object(value, kind, label)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            return _expected("an object", value, label)
        return _first((item, arguments[1], f"{label}.{key:.80}") for key, item in value.items())
    if origin in (list, tuple):
        if not isinstance(value, list) or (origin is tuple and len(value) != len(arguments)):
            return _expected("a list" if origin is list else f"a list of {len(arguments)}", value, label)
        kinds = arguments if origin is tuple else arguments * len(value)
        return _first((item, kinds[i], f"{label}[{i}]") for i, item in enumerate(value))
    return None if _is_plain(value, kind) else _expected(_NAMES[kind], value, label)


_NAMES = {str: "text", bool: "true or false", int: "an integer", float: "a number", type(None): "null"}


def _first(places: Iterable[tuple[Any, Any, str]]) -> str | None:
    """The first problem of (value, type, label)."""
    return next((problem for place in places if (problem := find_problem(*place))), None)


def _find_in_object(value: Any, kind: Any, label: str) -> str | None:
    if not isinstance(value, Mapping):
        return _expected("an object", value, label)
    for key, (item_kind, required) in _fields(kind).items():
        if key not in value:
            if required:
                return f"{label}.{key} is missing"
        elif problem := find_problem(value[key], item_kind, f"{label}.{key}"):
            return problem
    return None


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Types of a ``TypedDict``'s keys, and whether a key must be there."""
    found = {}
    for key, hint in typing.get_type_hints(kind, include_extras=True).items():
        optional = typing.get_origin(hint) is typing.NotRequired
        found[key] = (typing.get_args(hint)[0] if optional else hint, kind.__total__ and not optional)
    return found


def _is_plain(value: Any, kind: type) -> bool:
    if kind in (int, float):
        number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        return number and abs(value) <= MAX_NUMBER  # False for NaN
    return isinstance(value, kind)


def _expected(name: str, value: Any, label: str) -> str:
    return f"{label} is {value!r:.80}: expected {name}"
