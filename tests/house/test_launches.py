"""Every launch of a kernel says whether products and sums may be fused: Triton's default depends on its version."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.test_imports import MODULES, syntax


def launches(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls ``kernel[grid](...)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            kernel = node.func.value
            name = kernel.attr if isinstance(kernel, ast.Attribute) else getattr(kernel, "id", "")
            if name.endswith("_kernel"):
                yield node


def states_fusion(launch: ast.Call) -> bool:
    return any(word.arg == "enable_fp_fusion" and ast.unparse(word.value) == "True" for word in launch.keywords)


def test_every_launch_states_fusion():
    """A rounding more between a product and a sum would change results, and cost instructions."""
    found = {module: list(launches(syntax(module))) for module in MODULES}
    assert sum(map(len, found.values())) > 40
    silent = [f"{m}:{launch.lineno}" for m, calls in found.items() for launch in calls if not states_fusion(launch)]
    assert not silent, "pass enable_fp_fusion=True to these launches"


def test_every_kernel_has_such_a_name():
    """Or its launches would not be found."""
    grids = [
        f"{module}:{node.lineno}"
        for module in MODULES
        if module.startswith("deepseek_attn.kernels.") and not module.endswith(".reference")
        for node in ast.walk(syntax(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and node not in list(launches(node))
    ]
    assert not grids


def test_a_launch_that_does_not_state_it_is_found():
    source = "f.a_kernel[(1,)](x, num_warps=4)\nb_kernel[grid](x, enable_fp_fusion=True)\ntable[name](x)"
    found = list(launches(ast.parse(source)))
    assert [states_fusion(launch) for launch in sorted(found, key=lambda launch: launch.lineno)] == [False, True]
