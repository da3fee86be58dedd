"""Tensors are made with a dtype and a device of their own, whatever a caller's defaults are."""

import ast
from collections.abc import Iterable

import pytest

from tests.house.sources import ROOT, nodes

INFERRED = {"empty", "zeros", "ones", "full", "tensor", "as_tensor", "asarray", "scalar_tensor", "eye", "linspace"}
INFERRED |= {"logspace", "rand", "randn", "normal", "empty_strided", "empty_permuted"}
INTEGERS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}  # int64 whatever the default dtype


def missing(nodes: Iterable[ast.AST]) -> list[str]:
    """Factory calls of torch that leave their dtype or device to the process."""
    found = []
    for call in nodes:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        name = call.func.attr
        if name not in INFERRED | INTEGERS or ast.unparse(call.func.value) != "torch":
            continue
        # an arange of floats has the default dtype
        floats = name == "arange" and any(
            isinstance(arg, ast.Constant) and isinstance(arg.value, float) for arg in call.args
        )
        needed = {"device", "dtype"} if name in INFERRED or floats else {"device"}
        if absent := needed - {keyword.arg for keyword in call.keywords}:
            found.append(f"{call.lineno}: {ast.unparse(call)}: no {' and no '.join(sorted(absent))}")
    return found


def test_every_factory_call_names_its_dtype_and_device():
    files = [path for room in ("deepseek_attn", "kernels", "models") for path in (ROOT / room).rglob("*.py")]
    # benchmarks and README's example are processes of their own
    files = [path for path in files if "bench" not in path.relative_to(ROOT).parts and path.name != "__main__.py"]
    assert len(files) > 200
    assert not [f"{path.relative_to(ROOT)}:{line}" for path in files for line in missing(nodes(path))]


@pytest.mark.parametrize(
    "call", ["torch.zeros(3, dtype=d)", "torch.zeros(3, device=d)", "torch.arange(3)", "torch.arange(0., 3, device=d)"]
)
def test_a_call_without_them_is_found(call):
    assert missing(ast.walk(ast.parse(f"x = [{call}]")))


def test_a_call_with_them_is_not():
    calls = "torch.full((2,), 1.0, dtype=d, device=d), torch.arange(n, device=d), x.new_zeros(3), torch.zeros_like(x)"
    assert not missing(ast.walk(ast.parse(calls)))
