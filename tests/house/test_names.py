"""Kernels and public classes have names of their own: profiles and searches tell them apart."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.house.test_imports import MODULES, nodes_of


def kernels(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names of launched kernels: compiled functions, in Triton or Gluon, that are called so."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
            yield node.name


def public_classes(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def repeated(names_in) -> dict[str, list[str]]:
    """Names that stand in the library more than once, and the modules that hold them."""
    modules = defaultdict(list)
    for module in MODULES:
        for name in names_in(nodes_of(module)):
            modules[name].append(module)
    return {name: holders for name, holders in modules.items() if len(holders) > 1}


def test_every_kernel_has_a_name_of_its_own():
    assert sum(len(list(kernels(nodes_of(module)))) for module in MODULES) > 40
    assert not repeated(kernels)


def test_every_public_class_has_a_name_of_its_own():
    assert not repeated(public_classes)


def test_names_are_found():
    source = "@jit\ndef a_kernel(x): ...\ndef b_kernel(x): ...\nclass A:\n    class B: ...\n    class _C: ..."
    nodes = list(ast.walk(ast.parse(source)))
    assert (list(kernels(nodes)), list(public_classes(nodes))) == (["a_kernel"], ["A", "B"])
