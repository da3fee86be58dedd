"""Ops have one signature: in the contract, in the kernels' module and in the reference."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"


@cache
def functions(file: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


def chosen(function: ast.FunctionDef) -> list[str] | None:
    """The arguments that a contract passes on to kernels or reference; None if it does not choose between them."""
    choices = [node for node in ast.walk(function) if isinstance(node, ast.IfExp)]
    call = function.body[-1].value if isinstance(function.body[-1], ast.Return | ast.Expr) else None
    if not isinstance(call, ast.Call) or [ast.unparse(choice.orelse) for choice in choices] != ["torch_ops"]:
        return None
    assert isinstance(call.func, ast.Attribute)
    assert call.func.attr == function.name, "a contract calls the function of its own name"
    assert ast.unparse(choices[0].body) == "triton_ops"
    return [ast.unparse(argument) for argument in call.args]


def kernels_of(file: Path) -> str:
    """The module that a family calls ``triton_ops``."""
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return next(alias.name for node in imports for alias in node.names if alias.asname == "triton_ops")


CONTRACTS = [
    (file.parent, name, kernels_of(file), found)
    for file in sorted(KERNELS.glob("*/__init__.py"))
    for name, function in functions(file).items()
    if (found := chosen(function)) is not None
]


@pytest.mark.parametrize(
    ("family", "name", "module", "passed"), CONTRACTS, ids=[f"{c[0].name}.{c[1]}" for c in CONTRACTS]
)
def test_signatures_agree(family, name, module, passed):
    """The reference may have further parameters, with defaults."""
    contract = parameters(functions(family / "__init__.py")[name])
    assert passed == contract
    assert parameters(functions(family / f"{module}.py")[name]) == contract
    reference = functions(family / "reference.py")[name]
    assert parameters(reference)[: len(contract)] == contract
    assert len(parameters(reference)) - len(contract) <= len(reference.args.defaults)


def test_contracts_are_found():
    assert len(CONTRACTS) > 35
