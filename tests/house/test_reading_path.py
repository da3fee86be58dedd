"""A reader follows one token through one layer, from `attention.forward` to the contracts of its ops, in 320 lines.

Counted are the lines of code, not of prose, of every function of the library that a call passes. The reader stops at a
function of ``kernels/``: its contract is the function of that name in the family's ``__init__.py``, and nothing below
it has to be read.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from deepseek_attn import ModelRunner
from deepseek_attn.runner.step import step_input
from deepseek_attn.utils.torch_state import own_torch_state
from tests.support.typed import required

ROOT = Path(__file__).parents[2]
LINES = 320  # of code


def contract_of(code: CodeType) -> object:
    """The public function of the family that an op's code belongs to; where a reader stops."""
    family = Path(code.co_filename).relative_to(ROOT / "kernels").parts[0]
    return getattr(import_module(f"deepseek_attn.kernels.{family}"), code.co_name, code)


def lines_of_code(lines: list[str]) -> int:
    """Lines of a function that hold code: not its docstrings, comments and empty lines."""
    source = textwrap.dedent("".join(lines))
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {n for token in tokens if token.type not in ignored for n in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            code -= set(range(node.body[0].lineno, required(node.body[0].end_lineno) + 1))
    return len(code)


def functions_passed(call: Callable[[], object]) -> dict[str, int]:
    """Lines of code of each function of the library that ``call`` enters, and of the contracts of its ops."""
    found: dict[object, CodeType] = {}
    below = 0  # calls inside an op

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal below
        code = frame.f_code
        if event == "return" and below:
            below -= 1
        elif event == "call" and below:
            below += 1
        elif event == "call" and code.co_filename.startswith(str(ROOT / "kernels")):
            found[contract_of(code)] = code
            below = 1
        elif event == "call" and code.co_filename.startswith((str(ROOT / "deepseek_attn"), str(ROOT / "models"))):
            found[code] = code

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    passed = {}
    source: Any
    for source, code in found.items():
        if "<locals>" not in code.co_qualname or code.co_name == "run":  # inner functions are lines of the outer one
            path, lines = Path(code.co_filename).relative_to(ROOT), inspect.getsourcelines(source)[0]
            passed[f"{path} {code.co_qualname}"] = lines_of_code(lines)
    return passed


@cache
def make_runner() -> ModelRunner:
    return ModelRunner.from_config(
        "tiny", max_model_len=256, max_num_seqs=1, device="cpu", layers=[0, 1, 2], attention_only=True
    )


@pytest.mark.parametrize("kind", ["SWA", "C4A", "C128A"])
@pytest.mark.parametrize(("computed", "new"), [(200, 1), (64, 40)], ids=["decode", "prefill"])
def test_from_forward_to_the_contracts_of_ops(kind, computed, new):
    runner = make_runner()
    layer = next(block.attn for block in runner.model.layers.values() if block.attn.spec.kind == kind)
    cache = runner.manager.create()
    runner.manager.reserve([(cache, computed)])
    runner.manager.commit(cache, computed)
    runner.manager.reserve([(cache, new)])
    step = runner.builder.build(step_input(runner.manager, [cache], [new], 1))
    x = torch.randn(new, runner.config.hidden_size)
    with torch.inference_mode():
        layer(x, step.positions, step)  # imports what is imported at the first call
        with own_torch_state():  # entered by a step, before its layers
            passed = functions_passed(lambda: layer(x, step.positions, step))
    runner.manager.free(cache)
    assert any("attention/layer.py" in name and "forward" in name for name in passed)
    assert {"insert_tokens", "multi_linear", "grouped_linear"} <= {name.split()[-1] for name in passed}
    total = sum(lines for name, lines in passed.items() if not name.startswith("kernels"))
    assert total <= LINES, "\n".join([f"{total} lines", *(f"{n:4d} {name}" for name, n in passed.items())])
