"""Values whose types a test narrows."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def required(value: T | None) -> T:
    """``value``, which the test needs: AssertionError for None."""
    assert value is not None
    return value


def of_type(value: object, kind: type[T]) -> T:
    """``value``, which must be a ``kind``: the config of one family, for example."""
    assert isinstance(value, kind)
    return value


def untyped(value: object) -> Any:
    """``value`` without its type: a stand-in for some object, or an argument that the call must refuse."""
    return value
