"""Modules of packages that are not installed, for scripts that read checkpoints with an engine on a CPU."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Collection
from typing import Any
from unittest.mock import MagicMock


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader of modules whose attributes are classes of mocks. It comes after all other finders.

    Args:
        wanted: whether a module of this name, which no other finder has found, gets a stand-in.
    """

    def __init__(self, wanted: Callable[[str], bool]):
        self.wanted = wanted

    @classmethod
    def of(cls, names: Collection[str]) -> StandIns:
        """Stand-ins of packages and of single modules."""
        return cls(lambda name: name in names or name.partition(".")[0] in names)

    def install(self) -> None:
        sys.meta_path.append(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not self.wanted(name):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class Module(types.ModuleType):
    """A module that has every attribute: a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Class(name, (MagicMock,), {})


class Class(type):
    """A class that has every attribute: a mock."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith(("__", "_mock", "_spec")):
            raise AttributeError(name)
        return MagicMock()
