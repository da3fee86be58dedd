"""What the pages tell a reader to type or to open exists: commands, flags, scripts, links, files, functions."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from deepseek_attn import __all__ as exported
from deepseek_attn.cli import make_parser
from deepseek_attn.cli.options import BOUNDS, integer, memory_size, numbers
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.utils.version import __version__
from tests.house.sources import ROOT, tree
from tests.house.test_imports import FLOORS
from tests.house.test_plans import TABLES, device_functions
from tests.support.typed import required

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [page.name for page in PAGES]


def commands(text: str, start: str) -> list[list[str]]:
    """Words of every command that begins with ``start``: lines of code, over ``\\`` at their ends, and inline code."""
    text = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(rf"^(?: {{4}}|\$ |)({start}.*)$", text, re.MULTILINE)
    inline = [found.replace("\n", " ") for found in re.findall(rf"`({start}[^`]*)`", text)]
    return [shlex.split(line.split(" #")[0]) for line in lines + inline]


@cache
def whole_parser() -> argparse.ArgumentParser:
    return make_parser()


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})


def check_flags(words: list[str]) -> str:
    """What is wrong with a command of ``deepseek-attn``, without its values."""
    parser, words = whole_parser(), words[1:]
    while words and subparsers(parser):
        names = words.pop(0).split("|")  # bench op|layer|model|engine
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


def test_every_sampling_option_is_in_the_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("### Sampling options") :].split("\n\n")[2]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {field.name for field in dataclasses.fields(SamplingParams)}


def test_commands_are_found():
    found = commands((ROOT / "README.md").read_text(encoding="utf-8"), "deepseek-attn ")
    assert len(found) >= 12
    assert any(words[1:3] == ["bench", "op|layer|model|engine|structured|memory"] for words in found)
    assert any("--max-model-len" in words for words in found), "inline code that goes over two lines"
    assert check_flags(["deepseek-attn", "generate", "--prompts", "FILE", "--nonsense"]) == "no flags ['--nonsense']"
    assert check_flags(["deepseek-attn", "serve"]) == "no command ['serve']"


def all_flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Flags of a parser and of its commands, by ``command flag``."""
    found = {flag: action for action in parser._actions for flag in action.option_strings if action.nargs != 0}
    for name, part in subparsers(parser).items():
        found |= {f"{name} {flag}": action for flag, action in all_flags(part).items()}
    return found


def test_every_number_has_bounds():
    """A flag of a number is one of `BOUNDS`, so that no command computes with a size of 0 or with NaN."""
    numeric = (int, float, integer, numbers, memory_size)
    flags = {name.split()[-1] for name, action in all_flags(whole_parser()).items() if action.type in numeric}
    assert len(flags) > 40
    assert flags - set(BOUNDS) == set()
    places = {name.split()[-1]: action.dest for name, action in all_flags(whole_parser()).items()}
    assert all(place == flag[2:].replace("-", "_") for flag, place in places.items() if flag in BOUNDS)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_scripts(page):
    """Flags of scripts are looked for in their text, and if a script has those of ``generate``, among these."""
    shared = subparsers(whole_parser())["generate"]._option_string_actions
    text = page.read_text(encoding="utf-8")
    for words in commands(text, "python scripts/") + commands(text, "torchrun .*scripts/"):
        place = next(i for i, word in enumerate(words) if word.startswith("scripts/"))
        source = (ROOT / words[place]).read_text(encoding="utf-8")
        known = set(re.findall(r'"(--[\w-]+)"', source)) | set(shared if "cli.generate" in source else ())
        unknown = [word for word in words[place:] if word.startswith("--") and word not in known]
        assert not unknown, words[place]


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))


def test_links():
    found = [(page, target) for page in PAGES for target in links(page)]
    assert len(found) > 100
    assert not [f"{page.name}: {target}" for page, target in found if not (page.parent / target).exists()]


def test_files_and_folders_that_are_named():
    """In inline code, from the root of the repository."""
    rooms = "deepseek_attn|kernels|models|configs|scripts|tests|docs"
    found = [
        (page, name)
        for page in PAGES
        for name in re.findall(rf"`((?:{rooms})/[\w./-]*)`", page.read_text(encoding="utf-8"))
    ]
    assert len(found) > 100
    assert not [f"{page.name}: {name}" for page, name in found if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_targets_of_make(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = re.findall(r"(?:^|`)make\s([a-z][a-z-]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert not set(named) - set(targets)


STRUCTURE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")


def map_lines() -> dict[Path, int]:
    """Each file and folder in the tree of docs/structure.md, with the lines that stand beside it; 0 for none."""
    tree = STRUCTURE.split("```")[1]
    folder, found = ROOT, {}
    for line in tree.splitlines():
        head, _, rest = line.strip().partition("  ")
        if head:
            top = not line.startswith(" ")
            folder = ROOT / head if top else folder
            count = re.match(r" *([0-9,]+)  ", rest)
            found[folder if top else folder / head] = int(count[1].replace(",", "")) if count else 0
    return found


def test_the_map_names_files_that_exist():
    """Names in the tree of docs/structure.md, by their places in it; every room is there."""
    names = map_lines()
    assert not [str(name) for name in names if not name.exists()]
    folders = [
        path for folder in ("deepseek_attn", "deepseek_attn/lab", "kernels") for path in (ROOT / folder).iterdir()
    ]
    unlisted = [str(room) for room in folders if any(room.glob("*.py")) and room not in names]
    assert not unlisted, "write a line for each in the map of docs/structure.md"


def test_the_map_says_how_long_rooms_are():
    """Within a third, so that only a room that has changed a lot needs another number; the core has no laboratory."""
    laboratory = ROOT / "deepseek_attn" / "lab"
    wrong = []
    for place, said in map_lines().items():
        files = [
            path
            for path in place.rglob("*.py")
            if laboratory in (place, *place.parents) or laboratory not in path.parents
        ]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        if place.is_dir() and abs(lines - said) > max(lines / 3, 100):
            wrong.append(f"{place.relative_to(ROOT)}: {said} lines in docs/structure.md, {lines} in its files")
    assert not wrong


def test_the_table_of_ops_is_current(monkeypatch):
    """``python scripts/op_table.py docs/structure.md`` would change nothing."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    current = importlib.import_module("op_table").with_table(STRUCTURE)
    assert current == STRUCTURE, "run: python scripts/op_table.py docs/structure.md"


def test_the_table_of_ops_names_all_kernels_and_launch_tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    ops = importlib.import_module("op_table").all_ops()
    assert {(op.family, op.name) for op in ops} >= {
        ("norm", "rms_norm"),
        ("linear", "multi_linear"),
        ("moe", "moe_experts"),
    }
    assert not [op.name for op in ops if not op.test]
    launched = set(device_functions())
    assert len(launched) > 40
    assert launched - {kernel for op in ops for names in op.kernels.values() for kernel in names} == set()
    impls_choose = {"attention.library"}  # read by impls, which call FlashMLA or the op
    assert {table.name for table in TABLES} - {name for op in ops for name in op.tables} == impls_choose


def defined(file: Path) -> set[str]:
    """Functions, classes and their methods: ``f``, ``C``, ``C.f``."""
    found = set()
    for node in tree(file).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_every_stop_of_the_walk_is_there():
    stops = re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", STRUCTURE, re.MULTILINE)
    assert len(stops) >= 20
    assert not [(file, name) for file, name in stops if name not in defined(ROOT / file)]


def test_the_import_order_is_that_of_the_test():
    order = required(re.search(r"\*\*Imports go one way\*\*[^:]*: (.*?)\. No files", STRUCTURE, re.DOTALL))[1]
    order = re.sub(
        r"(\w+)/\{([^}]*)\}", lambda m: ", ".join(f"{m[1]}/{name}" for name in re.split(r",\s*", m[2])), order
    )
    floors = [set(re.split(r",\s*", floor.replace("/", "."))) for floor in " ".join(order.split()).split(" < ")]
    assert floors == [set(floor) - {"data"} for floor in FLOORS] + [{"scripts"}]


def test_markers_and_variables_that_are_named():
    """Environment variables of the pages are read somewhere."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    sources = [f for folder in ("deepseek_attn", "tests", "scripts") for f in (ROOT / folder).rglob("*.py")]
    code = "".join(file.read_text(encoding="utf-8") for file in sources if file != Path(__file__))
    assert not [name for name in set(re.findall(r"DEEPSEEK_ATTN_\w+", text)) if f'"{name}"' not in code]
    assert "exhaustive" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_one_version():
    """The package, the citation and the newest section of the changelog name one version."""
    citation = required(
        re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    )[1]
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    released = [name for name in sections if name != "Unreleased"]
    assert citation == released[0] == __version__


def test_the_site_lists_every_page(monkeypatch):
    """The navigation of mkdocs.yml: the pages of docs/ and those that the hooks add, each once."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    site = importlib.import_module("docs_site")
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = re.findall(r"([\w/-]+\.md)$", nav, re.MULTILINE)
    added = {*site.FROM_ROOT.values(), "api/library.md", "api/kernels.md", "tour.md"}
    assert sorted(listed) == sorted({page.name for page in (ROOT / "docs").glob("*.md")} | added)


def test_the_reference_of_the_site_names_what_is_there(monkeypatch):
    """Every exported name and every family of kernels has an entry; the build, ``make docs``, fails for wrong names."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    site = importlib.import_module("docs_site")
    names = [name.rpartition(".") for name in [*site.exported(), *site.OTHERS]]
    assert {name for _, _, name in names} >= set(exported) - {"__version__"}
    assert all(hasattr(importlib.import_module(module), name) for module, _, name in names)
    assert {path.parent.name for path in (ROOT / "kernels").glob("*/reference.py")} <= set(site.families())
