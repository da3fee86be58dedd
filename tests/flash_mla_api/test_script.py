"""``scripts/flash_mla_tests.py`` on a checkout made here, whose tests are ours: what it runs, counts and returns."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "flash_mla_tests.py"

PREFILL = """
import dataclasses, sys, torch, flash_mla

@dataclasses.dataclass
class TestParam:
    s_q: int
    topk: int
    h_q: int = 3
    num_runs: int = 10
    seed: int = -1

calls = 0

def run_test(p):
    global calls
    calls += 1
    assert p.num_runs == 0 and p.seed >= 0, p
    torch.manual_seed(p.seed)
    q, kv = torch.randn(p.s_q, p.h_q, 512).cuda(), torch.randn(20, 1, 512).cuda()
    assert q.dtype == torch.bfloat16
    indices = torch.stack([torch.randperm(20)[: p.topk] for _ in range(p.s_q)]).int()[:, None]
    out, _, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05)
    keys = kv[indices[:, 0].long(), 0].float()
    logits = q.float() @ keys.mT * 0.05
    print("the output of seed", p.seed)
    differences = out.float() - logits.softmax(-1) @ keys, lse - logits.logsumexp(-1)
    return all(difference.abs().max() < 2e-2 for difference in differences)

if __name__ == "__main__":
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda:0")
    torch.cuda.set_device(torch.device("cuda:0"))
    for case in [TestParam(1, 7), TestParam(5, 20), TestParam(4096, 2048, 128)]:
        if not run_test(case):
            sys.exit(1)
    assert calls == 0  # noted, not run
"""
DECODING = """
import dataclasses, torch, rich.table, flash_mla

@dataclasses.dataclass
class TestParam:
    s_q: int
    topk: int
    h_q: int = 64
    num_runs: int = 0
    seed: int = -1

@dataclasses.dataclass
class Result:
    is_correct: bool
    time: float

def test_flash_mla(p):
    if p.topk == 65:
        raise torch.OutOfMemoryError("no memory")
    metadata, _ = flash_mla.get_mla_metadata()
    return Result(p.topk != 63, 1.0)

def main():
    results = [test_flash_mla(TestParam(1, topk)) for topk in (64, 65)]
    assert all(result.is_correct for result in results)
    rich.table.Table().add_row(*(f"{result.time:3.0f}" for result in results))

if __name__ == "__main__":
    main()
"""
DENSE = """
import dataclasses, flash_mla

@dataclasses.dataclass
class TestParam:
    b: int
    s_q: int
    s_k: int
    h_q: int = 2
    test_performance: bool = True

def test_flash_mla(p):
    assert not p.test_performance
    assert p.b != 3, "b is 3"

def main():
    for b in (1, 3):
        test_flash_mla(TestParam(b, 1, 20))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    files = {"sparse_prefill": PREFILL, "sparse_decoding": DECODING, "dense_decoding": DENSE}
    (tmp_path / "tests").mkdir()
    for name, text in files.items():
        (tmp_path / "tests" / f"test_flash_mla_{name}.py").write_text(text)
    return tmp_path


def run(checkout: Path, *options: str) -> tuple[int, list[str], dict]:
    command = [sys.executable, str(SCRIPT), str(checkout), "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    return done.returncode, lines, json.loads(lines[-1])


@pytest.mark.exhaustive
def test_a_wrong_case_is_shown(checkout):
    """Every sixth case: the first, and the only wrong one."""
    status, lines, last = run(checkout, "--slice", "0/6")
    assert status == 1
    assert [last[key] for key in ("cases", "passed", "wrong", "out of memory")] == [7, 1, 1, 0]
    assert "AssertionError: b is 3" in lines
    assert [case["number"] for case in last["wrong_cases"]] == [6]


@pytest.mark.exhaustive
def test_every_outcome_is_counted(checkout):
    status, lines, last = run(checkout)
    assert status == 1
    assert [last[key] for key in ("cases", "passed", "wrong", "out of memory", "skipped")] == [7, 4, 1, 1, 1]
    assert last["files"] == {
        "test_flash_mla_sparse_decoding.py": {"passed": 1, "out of memory": 1},
        "test_flash_mla_sparse_prefill.py": {"passed": 2, "skipped": 1},
        "test_flash_mla_dense_decoding.py": {"passed": 1, "wrong": 1},
    }
    assert "wrong: case 6, TestParam(b=3, s_q=1, s_k=20, h_q=2, test_performance=False)" in lines
    assert "AssertionError: b is 3" in lines
    assert [case["number"] for case in last["wrong_cases"]] == [6]


@pytest.mark.exhaustive
def test_a_slice_without_a_wrong_case(checkout):
    status, _, last = run(checkout, "--slice", "2/3")
    assert status == 0
    assert (last["cases"], last["passed"], last["wrong"], last["skipped"]) == (7, 2, 0, 0)


class Half:
    """A worker whose cases above 4 need the memory of two processes, and whose case 2 ends it."""

    started: ClassVar[list[int]] = []

    def __init__(self, tests: Path, device: str, processes: int):
        self.processes = processes
        self.started.append(processes)

    def run(self, number: int) -> dict[str, str]:
        outcome = "out of memory" if number > 4 and self.processes > 1 else "wrong" if number == 2 else "passed"
        return {"outcome": outcome, "case": "", "printed": ""}

    def end(self) -> str:
        return ""


def test_out_of_memory_and_a_worker_that_ended(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script = importlib.import_module("flash_mla_tests")
    monkeypatch.setattr(script, "Worker", Half)
    monkeypatch.setattr(Half, "started", [])
    run = script.Run(Path(), "cpu", float("inf"), [])
    run.phase(list(range(8)), 2)
    assert [run.outcomes[n] for n in range(8)] == ["passed"] * 2 + ["wrong"] + ["passed"] * 2 + ["out of memory"] * 3
    run.phase([5, 6, 7], 1)
    assert [run.outcomes[n] for n in (5, 6, 7)] == ["passed"] * 3
    assert Half.started[-1] == 1
    late = script.Run(Path(), "cpu", 0.0, [])
    late.phase([0, 1], 1)
    assert late.outcomes == {}


def test_a_folder_that_is_no_checkout(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script = importlib.import_module("flash_mla_tests")
    for arguments, message in (
        ([str(tmp_path)], "give a checkout of"),
        ([str(tmp_path), "--slice", "3/3"], "must be i/n with i below n"),
    ):
        monkeypatch.setattr(sys, "argv", ["flash_mla_tests.py", *arguments])
        with pytest.raises(SystemExit) as end:
            script.main()
        assert end.value.code == 2
        assert message in capsys.readouterr().err
