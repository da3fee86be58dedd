"""The scripts: each says how it is called, and the checks for a GPU run on a CPU and can fail."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest

from deepseek_attn.impls import flash_mla
from tests.support import fake_flash_mla

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


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla.make("sgl"))
    flash_mla.flavour.cache_clear()
    yield
    monkeypatch.undo()
    flash_mla.flavour.cache_clear()


@pytest.mark.parametrize("name", COMMANDS)
def test_each_says_how_it_is_called(run, capsys, name):
    if name == "bench_attention.py":
        pytest.importorskip("triton")
    assert run(name, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}")


@pytest.mark.parametrize("name", ["check_gpu.py", "check_gpu_v32.py"])
def test_checks_need_a_gpu_and_say_so(run, capsys, device, name):
    if device.type == "cuda":
        pytest.skip("there is a GPU")
    assert run(name) == 2
    assert "finds no CUDA GPU here" in capsys.readouterr().err


def test_the_check_of_layers(run, tmp_path):
    out = tmp_path / "found.json"
    assert run("check_gpu.py", "--device", "cpu", "--backend", "reference", "--quick", "--skip", "kernels",
               "--out", str(out)) == 0  # fmt: skip
    found = json.loads(out.read_text())
    assert found["summary"]["failed"] == []
    assert found["summary"]["cases"] == len(found["cases"])
    assert {case["section"] for case in found["cases"]} == {"tiny_gpu", "model"}


def test_a_wrong_kernel_is_found(run, capsys, monkeypatch, stand_in):
    """Prefill is one percent off; the other kernels pass."""
    right = flash_mla.sparse_prefill

    def wrong(*args, **keywords):
        out, lse = right(*args, **keywords)
        return out * 1.01, lse

    monkeypatch.setattr(flash_mla, "sparse_prefill", wrong)
    arguments = ("--device", "cpu", "--backend", "reference", "--quick", "--skip", "layers")
    assert run("check_gpu.py", *arguments) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {case.split(",")[0] for case in summary["failed"]} == {"prefill: sparse_fwd d 512", "v32: sparse_fwd d 576"}
    assert summary["worst_relative_error"]["decode"] < importlib.import_module("gpu_checks").LIMIT


def test_a_report_that_is_none(run, capsys, tmp_path):
    assert run("study_pictures.py", str(tmp_path / "report.json"), str(tmp_path / "out")) == 2
    assert "No such file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
