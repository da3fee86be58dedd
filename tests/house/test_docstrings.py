"""The names and paths that docstrings and comments of the library mention exist."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.sources import ROOT, nodes, text

FOLDERS = [ROOT / name for name in ("deepseek_attn", "kernels", "models", "scripts")]
NAME = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PATH = re.compile(r"(?<![\w./])((?:[a-z_0-9]+/)+[a-z_0-9]*\.(?:py|md|json|jinja|svg|ipynb))\b")
# Folders of DeepSeek's repositories, and results of experiments.
ELSEWHERE = ("inference/", "encoding/", "results/")


@cache
def files() -> list[Path]:
    return [file for folder in FOLDERS for file in sorted(folder.rglob("*.py"))]


# nodes that hold names, and their fields
NAMED = {
    kind: names
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
    if (names := [name for name in kind._fields if name in ("id", "attr", "arg", "name", "module")])
}


def identifiers(file: Path) -> set[str]:
    """Every name that a source defines or uses."""
    found = {
        value
        for node in nodes(file)
        if type(node) in NAMED
        for name in NAMED[type(node)]
        if isinstance(value := getattr(node, name), str)
    }
    return {part for name in found for part in name.split(".")}


@cache
def known() -> set[str]:
    found = {part for file in files() for part in (*file.relative_to(ROOT).parts, file.stem)}
    for file in files():
        found |= identifiers(file)
    return found


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring and comment."""
    for node in nodes(file):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                yield node.body[0].lineno, docstring
    if not re.search("#.*[`/]", text(file)):
        return  # no comment that names anything
    lines = iter(text(file).splitlines(keepends=True))
    for token in tokenize.generate_tokens(lambda: next(lines, "")):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def mistakes(words: str, folder: Path) -> list[str]:
    """Names in single backticks that no source has, and paths of files that do not exist."""
    names = [name for name in NAME.findall(words) if not set(re.sub(r"\(.*", "", name).split(".")) <= known()]
    bases = (ROOT, ROOT / "deepseek_attn", ROOT / "docs" / "data", folder, folder.parent)
    paths = [path for path in PATH.findall(words) if not path.startswith(ELSEWHERE)]
    return names + [path for path in paths if not any((base / path).exists() for base in bases)]


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_names_and_paths_exist(folder):
    found = [file for file in files() if file.is_relative_to(folder)]
    assert len(found) >= 10
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {mistake}"
        for file in found
        for line, words in prose(file)
        for mistake in mistakes(words, file.parent)
    ]
    assert not wrong, "\n".join(wrong)


def test_mistakes_are_found():
    words = "See `ModelRunner.step`, `ModelRunner.stepp`, ``kernels/linear/plan.py`` and ``kernels/ops/plan.py``."
    assert mistakes(words, ROOT) == ["ModelRunner.stepp", "kernels/ops/plan.py"]
