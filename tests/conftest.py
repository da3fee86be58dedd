"""Fixtures of all tests: a device, a seed of its own for each test, and a report that a run on a GPU may write.

The name of a test that fails is printed when it fails: a run that is killed has no summary.
"""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import logging
import math
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.report import RESULTS, Case, Report
from tests.support.tiers import ON_GPU

if TYPE_CHECKING:  # the process that only hands out tests to others does not import torch
    import torch

gc.disable()  # until the tests are collected: a third of what their imports take

# Small products gain nothing from more threads, and test workers would fight over the cores; so would their children.
# One number of threads also means the same last bits in every process.
os.environ["OMP_NUM_THREADS"] = "1"
# No test downloads anything.
os.environ["HF_HUB_OFFLINE"] = "1"
# Kernels compile a fifth faster without the lines they come from.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
os.environ.setdefault(
    "DEEPSEEK_ATTN_COMPILE_AHEAD", "0"
)  # by processes beside the tests, which need few of the kernels


@pytest.fixture
def device() -> torch.device:
    """Where the tests that take it run: ``DEEPSEEK_ATTN_TEST_DEVICE`` (default: cpu)."""
    import torch

    return torch.device(os.environ.get("DEEPSEEK_ATTN_TEST_DEVICE", "cpu"))


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds torch from the test's id, so that each case can be repeated alone."""
    import torch

    value = int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:4], "little")
    if not ON_GPU:
        torch.default_generator.manual_seed(value)  # torch.manual_seed formats a stack trace for each kind of GPU
    else:
        torch.manual_seed(value)
    return value


@pytest.fixture
def needs_gpu() -> None:
    """Requested by fixtures that need a GPU, so that `deselected` knows the tests that use them."""


@pytest.fixture
def gpu_or_stand_in() -> None:
    """Requested by fixtures that need a GPU but for cases marked ``on_cpu``, for which stand-ins compute on a CPU."""


@pytest.fixture
def triton_device(device) -> torch.device:
    """A GPU, or a CPU whose tensors Triton's interpreter reads."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton kernels need a GPU, or TRITON_INTERPRET=1")
    return device


def deselected(item: pytest.Item) -> bool:
    """Whether the test would be skipped without a GPU. Triton's interpreter runs some of those that launch kernels."""
    fixtures = getattr(item, "fixturenames", ())
    if "needs_gpu" in fixtures or item.get_closest_marker("gpu") is not None:
        return True
    if "gpu_or_stand_in" in fixtures:
        return item.get_closest_marker("on_cpu") is None
    launches = "triton_device" in fixtures or item.get_closest_marker("triton") is not None
    return launches and os.environ.get("TRITON_INTERPRET") != "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, deselects the tests that need one, so that a test that is skipped shows something missing."""
    if not ON_GPU:
        config.hook.pytest_deselected(items=[item for item in items if deselected(item)])
        items[:] = [item for item in items if not deselected(item)]


FEW_OBJECTS = 15_000  # which a garbage collection looks through in 0.01 s; each closed runner causes one


def pytest_collection_finish() -> None:
    """Leaves modules and collected tests out of garbage collections, of which each closed runner causes one."""
    import torch

    from tests.support.random_weights import KeptWeights

    torch.set_num_threads(1)  # as the environment says, unless a plugin has imported torch before
    KeptWeights().install()
    # To each logger that does not propagate pytest adds a handler six times a test, and torch has 40 of them.
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000)  # objects made between two collections of young ones; Python's 700 cost a tenth of a run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Behind a file of tests, leaves out what it has imported too."""
    result = yield
    if nextitem is not None and nextitem.path != item.path and len(gc.get_objects(generation=2)) > FEW_OBJECTS:
        gc.collect()
        gc.freeze()
    return result


class FailedNames:
    """Plugin that prints each failure at once: the test, and the first line of what went wrong."""

    def __init__(self, config: pytest.Config):
        self.reporter: Any = config.pluginmanager.getplugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.reporter is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(crash.message if crash else report.longrepr).strip().partition("\n")[0]
            self.reporter.ensure_newline()
            self.reporter.write_line(f"FAILED {report.nodeid} ({report.when}) - {reason}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Prints failures in the process that shows them; shares the memory of a GPU between those that run tests."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        config.pluginmanager.register(FailedNames(config))
    elif "gpu_memory" in worker:
        if worker["gpu"]:
            os.environ["CUDA_VISIBLE_DEVICES"] = worker["gpu"]
        from tests.support.gpu_memory import GpuMemory  # fcntl, which only POSIX has

        config.pluginmanager.register(GpuMemory(Path(worker["gpu_memory"]), worker["gpu_workers"]))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Tells a worker its GPU, if ``CUDA_VISIBLE_DEVICES`` lists several, and where the budget of its memory is kept."""
    if ON_GPU:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        number = int(node.gateway.id.removeprefix("gw")) % len(gpus)
        node.workerinput["gpu"] = gpus[number] if len(gpus) > 1 else ""
        node.workerinput["gpu_memory"] = _budget_folder(number)
        node.workerinput["gpu_workers"] = math.ceil(node.workerinput["workercount"] / len(gpus))


@functools.cache
def _budget_folder(gpu: int) -> str:
    folder = tempfile.TemporaryDirectory(prefix=f"gpu_memory_{gpu}_")
    atexit.register(folder.cleanup)
    return folder.name


EVERYTHING = Report()  # what this process, and the workers that it started, have found


@pytest.fixture
def report() -> Iterator[Report]:
    """Collects the errors of a test, which ends with ``assert not report.failed``."""
    report = Report()
    yield report
    EVERYTHING.extend(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the errors of all tests to the file named by ``DEEPSEEK_ATTN_GPU_RESULTS``; a worker passes its on."""
    gc.freeze()  # pytest collects garbage twice from here on
    atexit.register(gc.unfreeze)  # else objects of Triton outlive it, which it reports
    worker = getattr(session.config, "workeroutput", None)
    if worker is not None:
        worker["report"] = [tuple(case) for case in EVERYTHING]
    elif RESULTS in os.environ:
        arguments = shlex.join(session.config.invocation_params.args)
        command = f"DEEPSEEK_ATTN_TEST_DEVICE={os.environ.get('DEEPSEEK_ATTN_TEST_DEVICE', 'cpu')} {RESULTS}=FILE"
        EVERYTHING.sort()
        EVERYTHING.write(Path(os.environ[RESULTS]), f"{command} pytest {arguments}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    EVERYTHING.extend(Case(*case) for case in getattr(node, "workeroutput", {}).get("report", []))
