"""Classes from outside the package that the library uses by name: registered, or named as ``module:Class``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import entry_points
from typing import Generic, TypeVar

T = TypeVar("T")
ENTRY_POINTS = "deepseek_attn.extensions"
"""Modules of installed packages that register their classes when they are imported."""


@cache
def load_extensions() -> None:
    """Imports the modules of the entry points in `ENTRY_POINTS`, once: when a name is not known without them."""
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()


class Registry(Generic[T]):
    """Classes of one kind by their attribute ``name``.

    Args:
        what: the kind of class, for messages.
        base: class that registered classes derive from.
        taken: names of the package's classes, which cannot be registered.
        find_problems: lists further problems of a class that derives from ``base`` and has all its methods.
    """

    def __init__(
        self, what: str, base: type[T], taken: Iterable[str], find_problems: Callable[[type[T]], Iterable[str]]
    ):
        self.what, self.base, self.taken, self.find_problems = what, base, frozenset(taken), find_problems
        self.classes: dict[str, type[T]] = {}

    def register(self, cls: type[T]) -> type[T]:
        """Registers a class under its ``name``; also works as a decorator.

        Raises:
            ValueError: the class lacks something (the message lists everything), or its name is taken.
        """
        place = f"{getattr(cls, '__module__', '?')}:{getattr(cls, '__qualname__', cls)}"
        self.check(cls, place)
        name: str = getattr(cls, "name", "")
        known = self.classes.get(name)
        again = known is not None and (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
        if name in self.taken or ":" in name or (known is not None and not again):
            others = ", ".join(sorted(self.taken | set(self.classes)))
            raise ValueError(f"{place}: its name {name!r} is taken or has a colon; give it another than {others}")
        self.classes[name] = cls
        return cls

    def find(self, name: str) -> type[T] | None:
        """The class that is registered as ``name``, or that it names as ``module:Class``; None for any other name.

        Raises:
            ValueError: the module or class does not exist, or the class lacks something; the message names it.
        """
        if name in self.taken:
            return None
        if ":" in name:
            return self.check(imported(name, self.what), name)
        if name not in self.classes:
            load_extensions()
        return self.classes.get(name)

    def check(self, cls: object, place: str) -> type[T]:
        """Returns the class, or raises ValueError with everything that it lacks."""
        problems = class_problems(cls, self.base)
        if not isinstance(cls, type) or not issubclass(cls, self.base):
            raise problems_error(place, self.what, problems)
        if not problems:
            name = getattr(cls, "name", None)
            if not isinstance(name, str) or not name:
                problems.append("lacks name, a string")
            problems += self.find_problems(cls)
        if problems:
            raise problems_error(place, self.what, problems)
        return cls


def problems_error(place: str, what: str, problems: list[str]) -> ValueError:
    """The error that lists the problems of a class."""
    return ValueError(f"{place} cannot serve as {what}:\n  - " + "\n  - ".join(problems))


def class_problems(cls: object, *bases: type) -> list[str]:
    """Problems of an object that must be a class derived from any of ``bases`` and define all abstract methods."""
    names = " or ".join(f"{base.__module__}.{base.__name__}" for base in bases)
    if not isinstance(cls, type):
        return [f"is {type(cls).__name__} {cls!r:.80}, and must be a class derived from {names}"]
    if not issubclass(cls, bases):
        return [f"does not derive from {names}"]
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    return [f"lacks {', '.join(missing)}"] if missing else []


def imported(name: str, what: str) -> object:
    """The object that ``module:Class`` names.

    Raises:
        ValueError: a module that cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{name!r} must name {what} as module:Class")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{name!r}: module {module_name!r} cannot be imported ({error}); install its package or add its folder to "
            "PYTHONPATH"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name!r}: module {module_name!r} has no {attribute!r}")
        found = getattr(found, part)
    return found
