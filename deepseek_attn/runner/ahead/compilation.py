"""Kernels of a runner compiled while its weights are loaded, or before it is made (``deepseek-attn warmup``)."""

from __future__ import annotations

import json
import os
import pickle
import select
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import torch
from tqdm.auto import tqdm

from deepseek_attn.layers.launch import environment
from deepseek_attn.runner.ahead.request import RunnerRequest
from deepseek_attn.utils.torch_state import torch_threads

if TYPE_CHECKING:
    from deepseek_attn.runner.ahead.recording import Variant

# without garbage collection: it takes a tenth of the process' short life, and forks copy the pages that it writes
START = """import gc, sys; gc.disable(); sys.path[:] = sys.argv[1:]
from deepseek_attn.runner.kernel_list import main; main()"""
SHOWN = 3
"""Failed kernels that a message names."""
PATIENCE = 10.0
"""Seconds until a `Compilation` whose kernels are mostly cached begins by itself."""
LOADING_THREADS = 3
"""Threads of torch that load weights beside compilers. With one for each of 16 processors, a parallel loop always waits
for a thread that a compiler has displaced: loading takes 14 s instead of 5, and kernels take twice as long."""
SILENT_SECONDS = 120
"""A process without events for so long is taken to hang; one kernel takes less than 10 s."""


def default_workers() -> int:
    """Processes that compile kernels: one less than this rank's share of the processors, and at least one."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, processors // max(1, environment("LOCAL_WORLD_SIZE", 1)) - 1)


class Compilation:
    """Kernels that another process lists and compiles; it needs no GPU.

    Attributes:
        found: keys (`Variant.key`) of the kernels listed so far.
        running: keys of the kernels that are being compiled.
        done: keys of the kernels that are compiled or have failed.
        failed: errors of kernels that could not be compiled; each begins with a kernel's name.
        problem: why kernels could not be listed; empty otherwise.
        ended: no further kernel will be compiled.
        begun: a file in Triton's cache that exists once a process has begun to compile the kernels of this request.
    """

    def __init__(self, request: RunnerRequest, workers: int | None = None, patient: bool = False):
        """Begins at once; with ``patient`` later, if an earlier process has begun: see `begun`.

        Most kernels are then in the cache, and a process that answers one short prompt should not share its processors
        with a search for the rest. So it begins when a kernel is missing, or after `PATIENCE`.
        """
        self.found: set[str] = set()
        self.running: set[str] = set()
        self.done: set[str] = set()
        self.failed: list[str] = []
        self.problem, self.ended, self._closed, self._changed = "", False, False, threading.Condition()
        self._request, self._marker = (request, workers or default_workers()), request.marker()
        self.begun = self._marker.with_suffix(".begun")
        self._process: subprocess.Popen[bytes] | None = None
        self._timer = threading.Timer(PATIENCE, self.begin)
        self._timer.daemon = True
        if patient and self.begun.exists():
            self._timer.start()
        else:
            self.begin()

    def begin(self) -> None:
        """Starts the process, unless it was started or this compilation was closed."""
        self._timer.cancel()
        with self._changed:
            if self._process is not None or self.ended:
                return
            self.begun.parent.mkdir(parents=True, exist_ok=True)
            self.begun.touch()
            path = [*sys.path, str(Path(__file__).parents[3])]  # an editable installation may be on no path
            with tempfile.TemporaryFile() as request:  # a pipe would have to be written while the process starts
                pickle.dump(self._request, request)
                request.seek(0)
                self._process = process = subprocess.Popen(
                    [sys.executable, "-c", START, *path], stdin=request, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, start_new_session=True,  # a session of its own gets no Ctrl-C
                    env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                )  # fmt: skip
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def before_launch(self, variant: Variant) -> None:
        """Blocks while a process compiles this kernel. The launch compiles a kernel that no process has begun."""
        if self.ended or variant.is_cached():  # an earlier process may have ended before all kernels were compiled
            return
        self.begin()
        with self._changed:
            self._changed.wait_for(lambda: self.ended or variant.key not in self.running)

    def wait(self, progress: bool = False) -> None:
        """Blocks until nothing more will be compiled; with ``progress``, shows a bar on a terminal."""
        self.begin()
        with (
            tqdm(desc="compiling kernels", unit="", delay=0.5, leave=False, disable=None if progress else True) as bar,
            self._changed,
        ):
            while not self.ended:
                self._changed.wait()
                bar.total = len(self.found)
                bar.update(len(self.done) - bar.n)

    def close(self) -> None:
        """Ends the process and its workers, if they still run."""
        self._timer.cancel()
        with self._changed:
            self._closed = True
            if self._process is None:
                self.ended = True
                self._changed.notify_all()
            else:
                self._process.kill()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Takes in the events of the process, to its end."""
        for line in self._lines(process):
            event = json.loads(line)
            with self._changed:
                self.found.update(event.get("found", ()))
                self.running.update(event.get("running", ()))
                self.done.update(event.get("done", ()))
                self.running -= self.done
                self.failed += event.get("failed", ())
                self.problem = event.get("problem", "")
                self._changed.notify_all()
        code = process.wait()
        complete = not code and self.found <= self.done
        if not (complete or self._closed or self.problem):
            self.problem = f"the process that lists them has ended with exit code {code}"
        try:
            if message := self.message():
                warnings.warn(message, stacklevel=1)
            elif complete:
                self._marker.touch()
        finally:  # a warning may be an error, and a cache read-only: nobody waits for more
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    def _lines(self, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
        """Lines that the process writes, until it ends; a process that hangs is killed."""
        rest = b""
        with cast("IO[bytes]", process.stdout) as pipe:
            while select.select([pipe], [], [], SILENT_SECONDS)[0]:
                if not (data := os.read(pipe.fileno(), 1 << 16)):
                    return
                *lines, rest = (rest + data).split(b"\n")
                yield from lines
        self.problem = f"the process that lists them has written nothing for {SILENT_SECONDS} s"
        process.kill()

    def message(self) -> str:
        """One message about kernels that could not be compiled; empty if all were."""
        if self.problem:
            return f"kernels are compiled as they are launched, because they could not be listed before: {self.problem}"
        if not self.failed:
            return ""
        more = f"; and {len(self.failed) - SHOWN} more" if len(self.failed) > SHOWN else ""
        return f"{len(self.failed)} of {len(self.found)} kernels do not compile: {'; '.join(self.failed[:SHOWN])}{more}"


@contextmanager
def launching(compilation: Compilation | None) -> Iterator[None]:
    """In this context launches wait for a kernel that is being compiled ahead."""
    if compilation is None or compilation.ended:
        yield
        return
    from deepseek_attn.runner.ahead.recording import before_compiling

    with before_compiling(compilation.before_launch):
        yield


@contextmanager
def compiling_ahead(request: RunnerRequest | None) -> Iterator[Compilation | None]:
    """Starts to compile the kernels of a runner that is built in this context; an exception ends that.

    Gives None without a request, and where all kernels are in Triton's cache. Otherwise torch uses few threads here.
    """
    if request is None or request.marker().exists():
        yield None
        return
    compilation = Compilation(request, patient=True)
    try:
        with torch_threads(min(torch.get_num_threads(), LOADING_THREADS)), launching(compilation):
            yield compilation
    except BaseException:
        compilation.close()
        raise
