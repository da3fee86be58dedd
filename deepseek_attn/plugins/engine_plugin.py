"""Checks that the plugins of all engines make before they replace functions."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FUNCTIONS = ("get_mla_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd")
"""What is replaced, by FlashMLA's names."""


@dataclass(frozen=True)
class EnginePlugin:
    """An engine whose FlashMLA functions are replaced if an environment variable is set.

    Attributes:
        engine: name of the engine.
        package: name of its package, which is also the import name.
        variable: the environment variable; 1 enables the plugin.
        series: supported versions by their first numbers: ``("0.32", "0.33")``.
    """

    engine: str
    package: str
    variable: str
    series: tuple[str, ...]

    def asked_for(self) -> bool:
        """Whether the environment variable enables the plugin.

        Raises:
            RuntimeError: the variable is neither 1 nor 0.
        """
        value = os.environ.get(self.variable, "")
        if value not in ("", "0", "1"):
            raise RuntimeError(f"{self.variable} is {value!r}: 1 asks for deepseek_attn's attention, 0 does not")
        return value == "1"

    def error(self, reason: str) -> RuntimeError:
        """The reason why the enabled plugin cannot run."""
        return RuntimeError(
            f"{self.variable}=1 asks for deepseek_attn's attention, but {reason}. "
            f"Unset {self.variable} to run {self.engine} with its own"
        )

    def check_version(self) -> str:
        """The version of the engine that is installed.

        Raises:
            RuntimeError: the plugin was not made for it.
        """
        try:
            version = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError as error:
            raise self.error(f"no package {self.package} is installed") from error
        if not any(version == series or version.startswith(f"{series}.") for series in self.series):
            known = " and ".join(f"{series}.*" for series in self.series)
            raise self.error(f"it replaces functions of {self.engine} {known}, and {version} is installed")
        return version

    def find(self, module: str, name: str) -> Any:
        """An attribute of one of the engine's modules.

        Raises:
            RuntimeError: the module cannot be imported, or lacks the attribute.
        """
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise self.error(f"{self.engine} has no {module}.{name} ({error})") from error

    def check_signature(self, module: str, name: str, ours: Callable[..., Any]) -> None:
        """Checks that our function takes whatever the engine passes to its own.

        Required parameters must be the same in the same order; others must be known by name.

        Raises:
            RuntimeError: they are not, or the engine has no such function.
        """
        theirs, mine = (inspect.signature(f).parameters for f in (self.find(module, name), ours))
        taken = {parameter.kind for parameter in mine.values()}
        unknown = [
            parameter.name
            for parameter in theirs.values()
            if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            if parameter.name not in mine and inspect.Parameter.VAR_KEYWORD not in taken
        ]
        required = [
            [p.name for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
            for parameters in (theirs, mine)
        ]
        if unknown or required[0] != required[1][: len(required[0])]:
            raise self.error(f"{self.engine}'s {name}({', '.join(theirs)}) is not the one that it replaces")

    def announce(self, version: str) -> None:
        """Writes to the engine's own log that its functions are replaced."""
        logger = logging.getLogger(f"{self.package}.deepseek_attn")
        logger.warning(
            "%s %s: %s are deepseek_attn's (%s=1)", self.engine, version, ", ".join(FUNCTIONS), self.variable
        )
