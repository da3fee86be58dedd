#!/usr/bin/env python3
"""Writes the table of ops in docs/structure.md: each op with its kernels, its launch tables and a test.

    python scripts/op_table.py docs/structure.md

Read from the source, between two markers of the page. An op is a function of a family's contract
(``kernels/<family>/__init__.py``). From the function that launches it, names are followed through host code to launch
tables and kernels; device code is not entered.
"""

from __future__ import annotations

import argparse
import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from deepseek_attn.utils.files import write_text

ROOT = Path(__file__).parents[1]
KERNELS, TESTS = ROOT / "kernels", ROOT / "tests" / "kernels"
PACKAGE = "deepseek_attn.kernels."
BEGIN, END = "<!-- ops: written by scripts/op_table.py -->\n", "<!-- end of ops -->"
DEVICE = re.compile(r"_(triton|hopper\w*)$")


class Name(NamedTuple):
    """A module-level name."""

    module: str
    name: str


class Op(NamedTuple):
    """A row: kernels by device file, launch tables by the name that plans show, the test file that names it most."""

    family: str
    name: str
    kernels: dict[str, list[str]]
    tables: list[str]
    test: str


def file_of(module: str) -> Path:
    """The file of a module below `PACKAGE`."""
    path = KERNELS.joinpath(*module.removeprefix(PACKAGE).split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def definitions(module: str) -> dict[str, ast.AST]:
    """Functions, classes and assigned names of a module."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(file_of(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {
                name.id: node.value for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }
    return found


def imports(tree: ast.AST) -> list[tuple[str, Name]]:
    """Names that a tree imports from kernels, as it calls them; ``Name(module, "")`` for a whole module."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE[:-1]):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole.startswith(PACKAGE) and file_of(whole).exists()
                name = Name(whole, "") if is_module else Name(node.module, alias.name)
                found.append((alias.asname or alias.name, name))
    return found


@cache
def imported(module: str) -> dict[str, Name]:
    """`imports` of a module's top level, those for type checkers included."""
    body = ast.parse(file_of(module).read_text(encoding="utf-8")).body
    return dict(imports(ast.Module([node for node in body if isinstance(node, ast.ImportFrom | ast.If)], [])))


def used(at: Name) -> list[Name]:
    """Names that the definition of a name refers to, its own imports first."""
    tree = definitions(at.module).get(at.name)
    if tree is None:
        other = imported(at.module).get(at.name)
        return [other] if other else []
    known = imported(at.module) | {name: Name(at.module, name) for name in definitions(at.module)} | dict(imports(tree))
    found = [name for _, name in imports(tree)]
    if isinstance(tree, ast.FunctionDef):  # its parameters hide names of the module
        known = {name: target for name, target in known.items() if name not in {arg.arg for arg in tree.args.args}}
    nodes = list(ast.walk(tree))
    found += [known[node.id] for node in nodes if isinstance(node, ast.Name) and node.id in known]
    modules = {name.module for name in found if not name.name}
    for node in nodes:
        if isinstance(node, ast.Attribute):  # perhaps of one of several modules between which an op chooses
            found += [Name(module, node.attr) for module in modules if node.attr in definitions(module)]
    return [name for name in found if name.name]


def is_device(module: str) -> bool:
    """Device code, by the name of its file; files of Hopper's launches are host code."""
    return bool(DEVICE.search(module)) and not module.rpartition(".")[2].startswith("launch")


def is_kernel(at: Name) -> bool:
    return at.name.endswith("_kernel") and is_device(at.module)


@cache
def table_name(at: Name) -> str:
    """The name of a launch table, the first argument of the call that makes it; empty for anything else."""
    value = definitions(at.module).get(at.name)
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") in ("Table", "one_kernel", "given_kernels"):
        return ast.literal_eval(value.args[0])
    return ""


def reached(start: Name) -> list[Name]:
    """All names that host code reaches from one; not through references and device code."""
    seen, waiting = {start}, [start]
    while waiting:
        for name in used(waiting.pop()):
            inside = name.module.startswith(PACKAGE) and name.module.rpartition(".")[2] != "reference"
            if inside and name not in seen:
                seen.add(name)
                if not is_device(name.module):
                    waiting.append(name)
    return sorted(seen)


@cache
def words(file: Path) -> list[str]:
    return re.findall(r"\w+", file.read_text(encoding="utf-8"))


def test_of(family: str, op: str) -> str:
    """The test file of the family that names the op most often."""
    files = sorted((TESTS / family).glob("test_*.py"))
    return max(files, key=lambda file: words(file).count(op)).name if any(op in words(f) for f in files) else ""


def ops(family: str) -> list[Op]:
    """The ops of a family that have kernels: functions whose body chooses an implementation."""
    contract = PACKAGE + family
    found = []
    for name, node in definitions(contract).items():
        if not isinstance(node, ast.FunctionDef) or name.startswith("_"):
            continue
        names = reached(Name(contract, name))
        kernels: dict[str, list[str]] = {}
        for kernel in filter(is_kernel, names):
            kernels.setdefault(kernel.module.removeprefix(f"{contract}.").removeprefix(PACKAGE), []).append(kernel.name)
        tables = sorted({table for at in names if (table := table_name(at))})
        if kernels:
            found.append(Op(family, name, kernels, tables, test_of(family, name)))
    return found


def families() -> list[str]:
    return sorted(file.parent.name for file in KERNELS.glob("*/plan.py"))


@cache
def all_ops() -> list[Op]:
    return [op for family in families() for op in ops(family)]


def table() -> str:
    """The table as Markdown. A kernel of Gluon is in a file of Hopper."""
    lines = ["| family | op | kernels | launch tables | test |", "|---|---|---|---|---|"]
    family = ""
    for op in all_ops():
        kernels = "; ".join(
            f"`{module.replace('.', '/')}.py`: " + ", ".join(f"`{name}`" for name in names)
            for module, names in op.kernels.items()
        )
        tables = ", ".join(f"`{name}`" for name in op.tables)
        test = f"`{op.test}`" if op.test else ""
        lines.append(f"| {op.family if op.family != family else ''} | `{op.name}` | {kernels} | {tables} | {test} |")
        family = op.family
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with the table between its markers."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="docs/structure.md")
    page = parser.parse_args().page
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        parser.error(str(error))
    write_text(page, with_table(text))


if __name__ == "__main__":
    main()
