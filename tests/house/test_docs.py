"""What README.md and docs/ tell a reader to type exists: commands and their flags, scripts, links, files."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from deepseek_attn.cli import make_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [page.name for page in PAGES]


def commands(text: str, start: str) -> list[list[str]]:
    """Words of every command that begins with ``start``: lines of code, over ``\\`` at their ends, and inline code."""
    text = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(rf"^(?: {{4}}|\$ |)({start}.*)$", text, re.MULTILINE)
    inline = [found.replace("\n", " ") for found in re.findall(rf"`({start}[^`]*)`", text)]
    return [shlex.split(line.split(" #")[0]) for line in lines + inline]


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})


def check_flags(words: list[str]) -> str:
    """What is wrong with a command of ``deepseek-attn``, without its values."""
    parser, words = make_parser(), words[1:]
    while words and subparsers(parser):
        names = words.pop(0).split("|")  # bench op|layer|model
        unknown = [name for name in names if name not in subparsers(parser)]
        if unknown:
            return f"no command {unknown}"
        parser = subparsers(parser)[names[0]]
    options = {flag for action in parser._actions for flag in action.option_strings}
    unknown = [word for word in words if word.startswith("--") and word not in options]
    return f"no flags {unknown}" if unknown else ""


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands(page):
    found = commands(page.read_text(encoding="utf-8"), "deepseek-attn ")
    assert not [(" ".join(words), problem) for words in found if (problem := check_flags(words))]


def test_commands_are_found():
    found = commands((ROOT / "README.md").read_text(encoding="utf-8"), "deepseek-attn ")
    assert len(found) >= 12
    assert any(words[1:3] == ["bench", "op|layer|model"] for words in found)
    assert any("--max-model-len" in words for words in found), "inline code that goes over two lines"
    assert check_flags(["deepseek-attn", "generate", "--prompts", "FILE", "--nonsense"]) == "no flags ['--nonsense']"
    assert check_flags(["deepseek-attn", "serve"]) == "no command ['serve']"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_scripts(page):
    """Flags of scripts are looked for in their text: they do not share a parser."""
    text = page.read_text(encoding="utf-8")
    for words in commands(text, "python scripts/") + commands(text, "torchrun .*scripts/"):
        place = next(i for i, word in enumerate(words) if word.startswith("scripts/"))
        source = (ROOT / words[place]).read_text(encoding="utf-8")
        unknown = [word for word in words[place:] if word.startswith("--") and f'"{word}"' not in source]
        assert not unknown, words[place]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links(page):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_the_map_names_files_that_exist():
    """Names in the tree of docs/structure.md, by their places in it."""
    tree = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8").split("```")[1]
    folder, names = ROOT, []
    for line in tree.splitlines():
        indent = len(line) - len(line.lstrip())
        head = line.strip().split("  ")[0]
        if indent == 0 and head:
            folder = ROOT / head
            names.append(folder)
        elif indent == 2:
            names += [folder / name for name in head.split(", ")]
    assert len(names) > 30
    assert not [str(name) for name in names if not list(name.parent.glob(name.name))]
