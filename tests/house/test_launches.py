"""Every launch of a kernel takes the options that `launch_options` makes.

They say that products and sums are fused: Triton's default depends on its version.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from deepseek_attn.kernels.common.plans import Choice, LaunchBlock, launch_options, pdl_options
from tests.house.test_imports import MODULES, nodes_of

OPTIONS = re.compile(r"\b(launch_options|pdl_options|options)\b")


def launches(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """Calls ``kernel[grid](...)``."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            kernel = node.func.value
            name = kernel.attr if isinstance(kernel, ast.Attribute) else getattr(kernel, "id", "")
            if name.endswith("_kernel"):
                yield node


def takes_options(launch: ast.Call) -> bool:
    """A launch ends in ``**launch_options(...)``, ``**plan.options`` or a variable of such a name."""
    return any(word.arg is None and OPTIONS.search(ast.unparse(word.value)) for word in launch.keywords)


def test_options_state_fusion():
    """A rounding more between a product and a sum would change results, and cost instructions."""
    assert launch_options() == {"enable_fp_fusion": True, "num_warps": 4, "launch_pdl": False}
    assert pdl_options(8, True) == {"enable_fp_fusion": True, "num_warps": 8, "launch_pdl": True, "PDL": True}
    plan = Choice("a_kernel", LaunchBlock(64, 2), "any", "", native_fp8=True, pdl=True)
    assert plan.options == pdl_options(2, True)


def test_every_launch_takes_options():
    found = {module: list(launches(nodes_of(module))) for module in MODULES}
    assert sum(map(len, found.values())) > 40
    silent = [f"{m}:{launch.lineno}" for m, calls in found.items() for launch in calls if not takes_options(launch)]
    assert not silent, "pass **launch_options(warps, pdl) or **plan.options to these launches"


def test_every_kernel_has_such_a_name():
    """Or its launches would not be found."""
    grids = [
        f"{module}:{node.lineno}"
        for module in MODULES
        if module.startswith("deepseek_attn.kernels.") and not module.endswith(".reference")
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and not list(launches([node]))
    ]
    assert not grids


def test_a_launch_without_options_is_found():
    source = "f.a_kernel[(1,)](x, num_warps=4)\nb_kernel[grid](x, **plan.options)\ntable[name](x)"
    found = list(launches(ast.walk(ast.parse(source))))
    assert [takes_options(launch) for launch in sorted(found, key=lambda launch: launch.lineno)] == [False, True]
