"""The budget by which test processes share a GPU: nobody gets more than there is, in the order of asking."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import gpu_memory
from tests.support.gpu_memory import Budget, over_budget

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """``ask(process, GiB)`` of a budget of 10, and ``ask(process, None)`` to give back; all processes are alive."""
    budget = Budget(tmp_path / "budget.json", 10.0)
    monkeypatch.setattr(gpu_memory, "_alive", lambda process: True)

    def ask(process: int, need: float | None) -> bool | None:
        monkeypatch.setattr(os, "getpid", lambda: process)
        return budget.give_back() if need is None else budget.granted(need)

    return ask


def test_processes_get_what_is_left(ask):
    assert ask(1, 6.0)
    assert ask(2, 4.0)
    assert not ask(3, 0.5)
    ask(1, None)
    assert ask(3, 0.5)


def test_nobody_overtakes_a_large_request(ask):
    assert ask(1, 6.0)
    assert not ask(2, 8.0)
    assert not ask(3, 1.0)  # it would fit
    ask(1, None)
    assert not ask(3, 1.0)
    assert ask(2, 8.0)
    assert ask(3, 1.0)


def test_more_than_the_gpu_has_waits_for_all_of_it(ask):
    assert ask(1, 1.0)
    assert not ask(2, 99.0)
    ask(1, None)
    assert ask(2, 99.0)


@pytest.mark.exhaustive
def test_a_dead_process_gives_back_what_it_had(tmp_path):
    budget = Budget(tmp_path / "budget.json", 10.0)
    program = "import sys; from pathlib import Path; from tests.support.gpu_memory import Budget; "
    program += "assert Budget(Path(sys.argv[1]), 10.0).granted(9.0)"
    subprocess.run([sys.executable, "-c", program, str(budget.path)], check=True)
    assert budget.granted(9.0)


def test_a_test_that_takes_more_than_it_says_is_told_what_to_say():
    assert over_budget(2.0, 2.0) is None
    assert "took 3.2 GiB" in str(over_budget(3.2, 2.0))
    assert "gpu_memory(4)" in str(over_budget(3.2, 2.0))


@pytest.mark.exhaustive
def test_a_process_that_lost_its_context_takes_no_other_test_with_it(tmp_path):
    """Of seven tests, the third ends the context: the four behind it pass in another process."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "-q", str(tmp_path)]
    found = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert "6 passed" in found.stdout, found.stdout
    assert "test_kernel[2]" in found.stdout
    assert "illegal" in found.stdout
    assert "test_kernel[3]" not in found.stdout


CONFTEST = """
import pathlib
from tests.support import gpu_memory

class Lost(gpu_memory.GpuMemory):
    lost = False
    def __init__(self):
        self.budget = gpu_memory.Budget(pathlib.Path(__file__).parent / "budget.json", 10.0)
    def _free(self): pass
    def pytest_runtest_call(self, item): return None

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Lost())

def synchronize():
    if Lost.lost:
        raise RuntimeError("illegal memory access")

gpu_memory.torch.cuda.synchronize = synchronize
"""
TESTS = """
import pytest, conftest

@pytest.mark.parametrize("n", range(7))
def test_kernel(n):
    conftest.Lost.lost |= n == 2
    conftest.synchronize()
"""
