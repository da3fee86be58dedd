"""``help(LLM)`` and ``help(ModelRunner)``: every option with an explanation and the default that it has."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys

import pytest

from deepseek_attn import LLM, ModelRunner
from deepseek_attn.engine import llm as llm_module
from deepseek_attn.runner import build
from deepseek_attn.runner.options import RunnerOptions

FUNCTIONS = [LLM.__init__, ModelRunner.from_pretrained, ModelRunner.from_config, ModelRunner.from_source]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_every_option_is_explained(function):
    parameters, text = inspect.signature(function).parameters, pydoc.plain(pydoc.render_doc(function))
    assert set(RunnerOptions.__annotations__) <= set(parameters)
    for name in RunnerOptions.__annotations__:
        [line] = [line for line in text.splitlines() if line.strip().startswith(f"{name}=") and ": " in line]
        head, _, explanation = line.strip().partition(": ")
        assert head == f"{name}={parameters[name].default!r}"
        assert len(explanation) > 10


def test_the_defaults_are_those_that_a_runner_is_built_with(monkeypatch):
    given = {}

    class Stopped(Exception):
        pass

    def stop(config, source, **options):
        given.update(options)
        raise Stopped

    monkeypatch.setattr(llm_module.ModelRunner, "from_source", stop)
    with pytest.raises(Stopped):
        LLM()
    parameters = inspect.signature(build.build_runner).parameters
    real = {name: given.get(name, parameters[name].default) for name in RunnerOptions.__annotations__}
    shown = inspect.signature(LLM).parameters
    assert {name: shown[name].default for name in real} == real
    assert f"compile_ahead={llm_module.COMPILE_AHEAD}: " in pydoc.plain(pydoc.render_doc(LLM))


def test_without_docstrings():
    """``python -OO`` strips the docstrings that options are explained from."""
    subprocess.run([sys.executable, "-OO", "-c", "from deepseek_attn import LLM, ModelRunner"], check=True)
