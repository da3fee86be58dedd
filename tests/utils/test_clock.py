"""Clocks that stand still or jump: rates stay numbers."""

from __future__ import annotations

import itertools
import json
import re
import time

import pytest

from deepseek_attn.cli import main
from deepseek_attn.utils.clock import seconds_since
from tests.house.test_imports import MODULES
from tests.support.tiers import tiered

CLOCKS = {"still": itertools.repeat(7.0), "back": itertools.count(1e6, -1.0), "still, then on": [7.0] * 50}


@pytest.mark.parametrize("clock", tiered(CLOCKS, ["back"]))
def test_statistics(clock, monkeypatch, tmp_path, capsys):
    """Of one prompt and of several, whose speed is printed."""
    (tmp_path / "prompts").write_text("It is\nShe was\n")
    run = ["generate", "--device", "cpu", "--max-tokens", "2", "--stats", "--speculate", "1"]
    for source in (["--prompt", "x"], ["--prompts", str(tmp_path / "prompts")]):
        times = itertools.chain(CLOCKS[clock], itertools.count(8.0))
        monkeypatch.setattr(time, "perf_counter", lambda times=times: next(times))
        assert main([*run, *source]) == 0
    lines = capsys.readouterr()
    assert "tokens/s" in lines.err
    assert [json.loads(line)["index"] for line in lines.out.splitlines() if line.startswith("{")] == [0, 1]


def test_seconds_since(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    assert seconds_since(3.0) == 2.0
    assert seconds_since(5.0) == seconds_since(6.0) == 1e-9


def test_all_seconds_are_counted_by_this_function():
    pattern = re.compile(r"(perf_counter|monotonic|time)\(\) - ")
    text = {module: file.read_text(encoding="utf-8") for module, file in MODULES.items()}
    assert [module for module in text if pattern.search(text[module])] == ["deepseek_attn.utils.clock"]
