"""What pyright checks, and what is kept from it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
IGNORE = re.compile(r"#\s*(?:type|pyright):\s*ignore(.*)")
REASONED = re.compile(r"\[[a-zA-Z, -]+\]  # \S.*")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_every_ignored_finding_has_its_rule_and_its_reason():
    found = {
        f"{path.relative_to(ROOT)}:{number}": match[1]
        for path in sources("deepseek_attn", "kernels", "models", "scripts", "tests")
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := IGNORE.search(line))
    }
    unexplained = [place for place, rest in found.items() if not REASONED.fullmatch(rest)]
    assert not unexplained, "expected `# pyright: ignore[rule]  # reason`: " + ", ".join(unexplained)


def test_only_device_code_is_kept_from_pyright():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert all((ROOT / name).exists() for name in [*options["include"], *options["ignore"]])
    for name in options["ignore"]:
        assert re.search(r"^@(triton|gluon)\.jit", (ROOT / name).read_text(), re.M), name
