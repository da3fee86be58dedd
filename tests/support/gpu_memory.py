"""The memory of a GPU, shared by test processes: each test takes what it needs from a budget, and waits for others.

A test needs `DEFAULT` GiB, or what ``@pytest.mark.gpu_memory(GiB)`` says. One that takes more fails with the number to
write there, so that no test can leave too little to the tests beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

DEFAULT = 2.5
PROCESS = 1.0  # GiB outside PyTorch's allocator: a process's context, its kernels and the workspace of cuBLAS
GIB = 2**30
LOST = 86  # exit status of a process that has lost its CUDA context


class Budget:
    """GiB of one GPU, dealt out to processes in the order of asking; a file holds who has and who waits for how much.

    A process that has died gives back what it had.
    """

    def __init__(self, path: Path, total: float):
        self.path, self.total = path, total

    @contextlib.contextmanager
    def _entries(self) -> Iterator[list[list]]:
        """``[process, GiB, whether it has them]`` in the order of asking; kept when the block ends."""
        with open(self.path, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            entries = [entry for entry in json.loads(file.read() or "[]") if _alive(entry[0])]
            yield entries
            file.truncate(0)
            file.write(json.dumps(entries))
            file.flush()

    def granted(self, need: float) -> bool:
        """Asks once for ``need`` GiB, at most the total: True if this process has them now."""
        need, process = min(need, self.total), os.getpid()
        with self._entries() as entries:
            own = next((entry for entry in entries if entry[0] == process), None)
            if own is None:
                own = [process, need, False]
                entries.append(own)
            taken = sum(entry[1] for entry in entries if entry[2])
            first = next((entry for entry in entries if not entry[2]), None)  # nobody overtakes a large test
            if not own[2] and own is first and taken + need <= self.total:
                own[2] = True
            return own[2]

    def give_back(self) -> None:
        """Ends what this process has or waits for."""
        with self._entries() as entries:
            entries[:] = [entry for entry in entries if entry[0] != os.getpid()]


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def over_budget(peak: float, need: float) -> str | None:
    """What is wrong with a test that says ``need`` GiB and has reserved ``peak`` at most; None if nothing is."""
    if peak <= need:
        return None
    return (
        f"the test took {peak:.1f} GiB of the GPU and says {need:g}: write @pytest.mark.gpu_memory({math.ceil(peak)})"
    )


def context_is_lost(synchronize: Callable[[], None]) -> bool:
    """Whether an illegal access or an assertion in a kernel has ended CUDA's context: every later call would fail."""
    try:
        synchronize()
    except RuntimeError:  # torch.AcceleratorError is one
        return True
    return False


class GpuMemory:
    """Plugin of a process that runs tests on a GPU beside other processes."""

    def __init__(self, directory: Path, processes: int):
        total = torch.cuda.get_device_properties(0).total_memory / GIB
        self.budget = Budget(directory / "gpu_memory.json", total - PROCESS * processes)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        marker = item.get_closest_marker("gpu_memory")
        self.need = marker.args[0] if marker else DEFAULT
        self._free()
        while not self.budget.granted(self.need):
            time.sleep(0.02)
        try:
            return (yield)
        finally:
            if context_is_lost(torch.cuda.synchronize):
                os._exit(LOST)  # xdist names the test, and another process goes on with those that were left
            self._free()
            self.budget.give_back()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(0)
        before = torch.cuda.memory_reserved(0)  # by fixtures of the module
        result = yield
        if problem := over_budget((torch.cuda.max_memory_reserved(0) - before) / GIB, self.need):
            pytest.fail(problem, pytrace=False)
        return result

    @staticmethod
    def _free() -> None:
        """Gives unused memory of the process back to the GPU, if it is much: the next test here may not have it."""
        if torch.cuda.memory_reserved(0) > DEFAULT * GIB / 2:
            gc.collect()  # tracebacks of failures hold models in cycles
            torch.cuda.empty_cache()
