"""The scripts: each says how it is called, and wrong input is a message."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
COMMANDS = sorted(path.name for path in SCRIPTS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.fixture
def run(monkeypatch):
    """Runs a script in this process with these arguments; the status it exits with."""
    monkeypatch.syspath_prepend(SCRIPTS)

    def run(name: str, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        return int(end.value.code or 0)

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_each_says_how_it_is_called(run, capsys, name):
    assert run(name, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}")
    assert run(name, "--hel") == 2, "flags are written out"


def test_a_report_that_is_none(run, capsys, tmp_path):
    assert run("pictures.py", "study", str(tmp_path / "report.json"), str(tmp_path / "out")) == 2
    assert "No such file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("results.py", ["{0}"], "{0}/data/"),
        ("op_table.py", ["{0}/page.md"], "No such file"),
        ("timelines.py", ["{0}/new"], "{0}/new is not a folder"),
        ("bench_fastllm.py", ["--model", "{0}"], "--model {0}: there is no config.json"),
        ("bench_fastllm.py", ["--python", "{0}/python"], "--python {0}/python: there is no such program"),
    ],
)
def test_a_path_that_is_none(run, capsys, tmp_path, name, arguments, message):
    assert run(name, *(argument.format(tmp_path) for argument in arguments)) == 2
    assert message.format(tmp_path) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_picture_of_decode_times_is_that_of_the_measurements(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(SCRIPTS)
    pictures = importlib.import_module("pictures")
    data = ROOT / "docs" / "data"
    picture = pictures.standalone(pictures.decode_picture(data))
    words = re.compile(r"theirs \d+|batch \d+")
    assert len(words.findall(picture)) == 48
    assert words.findall(picture) == words.findall((data / "decode.svg").read_text(encoding="utf-8"))


def test_the_timelines_are_those_that_the_script_draws(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    timelines = importlib.import_module("timelines").TIMELINES
    folder = ROOT / "docs" / "pictures"
    assert {path.stem for path in folder.glob("*.svg")} == set(timelines)
    for name, make in timelines.items():
        picture = make()
        assert len(picture.boxes) > 8
        assert picture.svg() == (folder / f"{name}.svg").read_text(encoding="utf-8")


def test_the_results_are_those_of_the_data(monkeypatch):
    """``python scripts/results.py docs`` would change nothing, and no data file is left out."""
    monkeypatch.syspath_prepend(SCRIPTS)
    results = importlib.import_module("results")
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert text == results.page(ROOT / "docs" / "data")
    assert len(text.splitlines()) <= 250
    unnamed = {file.name for file in (ROOT / "docs" / "data").glob("*.json") if f"(data/{file.name})" not in text}
    assert not unnamed, f"add to a table of scripts/results.py: {unnamed}"
    assert len(results.SUBJECTS) == text.count("\n## ") > 12
