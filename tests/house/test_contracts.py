"""Ops have one signature: in the contract, in the kernels' module and in the reference, which the contract names."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from deepseek_attn.kernels.common.dispatch import implementation

KERNELS = Path(__file__).parents[2] / "kernels"


@cache
def functions(file: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


def chosen(function: ast.FunctionDef) -> tuple[str, str] | None:
    """The op that a contract takes from another module, and the module of its kernels; None if it takes none."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "implementation":
            op, _, *module = map(ast.unparse, node.args)
            return op, ast.literal_eval(module[0]) if module else "launch"
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


def test_a_contract_without_kernels_here_takes_its_reference():
    from deepseek_attn.kernels.norm import reference, rms_norm

    assert implementation(rms_norm, False) is reference.rms_norm
