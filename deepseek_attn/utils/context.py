"""Settings of a thread or task, and of what it calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar, value: T) -> Iterator[T]:
    """Context in which a variable has this value; other threads and tasks keep theirs."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
