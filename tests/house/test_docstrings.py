"""The names and paths that docstrings and comments of the library mention exist."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / name for name in ("deepseek_attn", "kernels", "models", "scripts")]
NAME = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PATH = re.compile(r"(?<![\w./])((?:[a-z_0-9]+/)+[a-z_0-9]*\.(?:py|md|json|jinja|svg|ipynb))\b")
# Folders of DeepSeek's repositories, and results of experiments.
ELSEWHERE = ("inference/", "encoding/", "results/")


@cache
def files() -> list[Path]:
    return [file for folder in FOLDERS for file in sorted(folder.rglob("*.py"))]


@cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def identifiers(source: str) -> set[str]:
    """Every name that a source defines or uses."""
    found = set()
    for node in nodes(source):
        for field in ("id", "attr", "arg", "name", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found |= set(value.split("."))
    return found


@cache
def known() -> set[str]:
    found = {part for file in files() for part in (*file.relative_to(ROOT).parts, file.stem)}
    for file in files():
        found |= identifiers(file.read_text(encoding="utf-8"))
    return found


def prose(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring and comment."""
    for node in nodes(source):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text
    lines = iter(source.splitlines(keepends=True))
    for token in tokenize.generate_tokens(lambda: next(lines, "")):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def mistakes(text: str, folder: Path) -> list[str]:
    """Names in single backticks that no source has, and paths of files that do not exist."""
    names = [name for name in NAME.findall(text) if not set(re.sub(r"\(.*", "", name).split(".")) <= known()]
    bases = (ROOT, ROOT / "deepseek_attn", ROOT / "docs" / "data", folder, folder.parent)
    paths = [path for path in PATH.findall(text) if not path.startswith(ELSEWHERE)]
    return names + [path for path in paths if not any((base / path).exists() for base in bases)]


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_names_and_paths_exist(folder):
    found = [file for file in files() if file.is_relative_to(folder)]
    assert len(found) >= 10
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {mistake}"
        for file in found
        for line, text in prose(file.read_text(encoding="utf-8"))
        for mistake in mistakes(text, file.parent)
    ]
    assert not wrong, "\n".join(wrong)


def test_mistakes_are_found():
    text = "See `ModelRunner.step`, `ModelRunner.stepp`, ``kernels/linear/plan.py`` and ``kernels/ops/plan.py``."
    assert mistakes(text, ROOT) == ["ModelRunner.stepp", "kernels/ops/plan.py"]
