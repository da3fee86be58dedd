"""The scripts: each says how it is called, and wrong input is a message."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
COMMANDS = sorted(path.name for path in SCRIPTS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.fixture
def run(monkeypatch):
    """Runs a script in this process with these arguments; the status it exits with."""
    monkeypatch.syspath_prepend(SCRIPTS)

    def run(name: str, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        return end.value.code

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_each_says_how_it_is_called(run, capsys, name):
    if name == "bench_attention.py":
        pytest.importorskip("triton")
    assert run(name, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}")


def test_a_report_that_is_none(run, capsys, tmp_path):
    assert run("study_pictures.py", str(tmp_path / "report.json"), str(tmp_path / "out")) == 2
    assert "No such file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
