"""Ops have one signature: in the contract, in the kernels' module and in the reference."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.support.typed import required

KERNELS = Path(__file__).parents[2] / "kernels"


@cache
def functions(file: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


def chosen(function: ast.FunctionDef) -> tuple[str, str] | None:
    """The op that a contract calls in another module, and the module of its kernels; None if it calls none."""
    for call in function.decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "contract":
            return function.name, ast.literal_eval(call.args[0]) if call.args else "launch"
    for node in ast.walk(function):
        if isinstance(node, ast.If) and node.orelse:
            kernels, reference = node.body[0], node.orelse[0]
            if isinstance(kernels, ast.ImportFrom) and isinstance(reference, ast.ImportFrom):
                assert reference.module == required(kernels.module).rpartition(".")[0] + ".reference"
                assert [alias.name for alias in kernels.names] == [alias.name for alias in reference.names]
                return kernels.names[0].name, required(kernels.module).rpartition(".")[2]
    return None


CONTRACTS = [
    (file.parent, name, *found)
    for file in sorted(KERNELS.glob("*/__init__.py"))
    for name, function in functions(file).items()
    if (found := chosen(function)) is not None
]


@pytest.mark.parametrize(("family", "name", "op", "module"), CONTRACTS, ids=[f"{c[0].name}.{c[1]}" for c in CONTRACTS])
def test_signatures_agree(family, name, op, module):
    """The reference may have further parameters, with defaults."""
    assert op == name, "a contract takes the function of its own name"
    contract = parameters(functions(family / "__init__.py")[name])
    assert parameters(functions(family / f"{module}.py")[name]) == contract
    reference = functions(family / "reference.py")[name]
    assert parameters(reference)[: len(contract)] == contract
    assert len(parameters(reference)) - len(contract) <= len(reference.args.defaults)


def test_contracts_are_found():
    assert len(CONTRACTS) > 35
