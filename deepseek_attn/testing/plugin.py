"""A plugin for pytest that runs the layer suite on an impl or a cache record from outside the package.

    python -m pytest -p deepseek_attn.testing.plugin --deepseek-attn-impl mine:Impl
    python -m pytest -p deepseek_attn.testing.plugin --deepseek-attn-record mine:Record

Without paths these run `layer_suite`. A project's ``conftest.py`` loads the plugin by ``pytest_plugins =
["deepseek_attn.testing.plugin"]``. The plugin is not an entry point: pytest would load it, and rewrite the assertions
of the whole package, in every run on the machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("layer_suite.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("deepseek_attn")
    group.addoption("--deepseek-attn-impl", metavar="MODULE:CLASS", help="attention impl that the layer suite runs on")
    group.addoption(
        "--deepseek-attn-record", metavar="MODULE:CLASS", help="record of keys that the layer suite stores them in"
    )


def pytest_configure(config: pytest.Config) -> None:
    impl, record = chosen(config)
    if (impl or record) and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(SUITE)]


def chosen(config: pytest.Config) -> tuple[str | None, str | None]:
    """Impl and record named on the command line."""
    return config.getoption("--deepseek-attn-impl"), config.getoption("--deepseek-attn-record")
