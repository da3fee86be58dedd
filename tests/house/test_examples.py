"""Python examples of the pages run as printed, in order; other tests run those of README, porting and testing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from deepseek_attn import LLM, SamplingParams
from tests.house.sources import ROOT

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
SHORTER = {"training.md": ("steps=500, batch=32", "steps=2, batch=2")}
ELSEWHERE = {"porting.md", "testing.md"}


def examples(name: str) -> list[str]:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_pages_with_examples():
    pages = {page.name for page in (ROOT / "docs").glob("*.md") if examples(page.name)}
    assert pages == {"generation.md", "inspect.md", "records.md", "training.md"} | ELSEWHERE


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["generation.md", "inspect.md", "records.md", "training.md"])
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    if name == "generation.md":  # its first page is README's
        names = {"llm": LLM(device="cpu", progress=False), "SamplingParams": SamplingParams, "tools": [WEATHER]}
    for code in examples(name):
        long, short = SHORTER.get(name, ("", ""))
        assert long in code
        exec(code.replace(long, short) if long else code, names)
