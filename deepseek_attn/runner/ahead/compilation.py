"""Kernels of a runner compiled while its weights are loaded, or before it is made (``deepseek-attn warmup``)."""

from __future__ import annotations

import json
import os
import pickle
import select
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING

from tqdm.auto import tqdm

from deepseek_attn.runner.ahead.request import RunnerRequest
from deepseek_attn.utils.processes import Pipes

if TYPE_CHECKING:
    from deepseek_attn.runner.ahead.recording import Variant

LISTER = "deepseek_attn.runner.kernel_list"
"""Main module of the process of a `Compilation`; it builds a runner, so it is imported in that process alone."""
# without garbage collection: it takes a tenth of the process' short life, and forks copy the pages that it writes
START = f"import gc, sys; gc.disable(); sys.path[:] = sys.argv[1:]; import {LISTER} as lister; lister.main()"
SHOWN = 3
"""Failed kernels that a message names."""
PATIENCE = 10.0
"""Seconds until a `Compilation` whose kernels are mostly cached begins by itself."""
SILENT_SECONDS = 120
"""A process without events for so long is taken to hang; one kernel takes less than 10 s."""


def default_workers() -> int:
    """Processes that compile kernels: one less than the processors that this process may use, and at least one."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, processors - 1)


class Compilation:
    """Kernels that another process lists and compiles; it needs no GPU.

    Attributes:
        found: keys (`Variant.key`) of the kernels listed so far.
        running: keys of the kernels that are being compiled.
        done: keys of the kernels that are compiled or have failed.
        failed: errors of kernels that could not be compiled; each begins with a kernel's name.
        problem: why kernels could not be listed; empty otherwise.
        ended: no further kernel will be compiled.
        step: shape of the step that the runner is computing; its kernels are compiled before others if one is missing.
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
        self._request, self._marker = pickle.dumps((request, workers or default_workers())), request.marker()
        self.begun = self._marker.with_suffix(".begun")
        self._process: subprocess.Popen[bytes] | None = None
        self.step: list[tuple[int, int]] | None = None
        self._wanted: list[tuple[int, int]] | None = None
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._asked = self._listed = 0  # steps whose kernels were requested, and were listed
        self._of_step: set[str] = set()  # keys of the kernels of the step listed last
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
            self._process = process = subprocess.Popen(
                [sys.executable, "-c", START, *path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, start_new_session=True,  # a session of its own gets no Ctrl-C
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._messages.put(self._request)
        threading.Thread(target=self._write, args=(Pipes.of(process).stdin,), daemon=True).start()
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def before_launch(self, variant: Variant) -> None:
        """Blocks until this kernel and the other kernels of its `step` are compiled, if the process lists it there.

        A launch outside of steps waits while its kernel is being compiled. Any other kernel is compiled by the launch.
        """
        if self.ended or variant.is_cached():  # an earlier process may have ended before all kernels were compiled
            return
        self.begin()
        if self.step is not None and self.step != self._wanted:
            self._wanted, self._asked = self.step, self._asked + 1
            self._messages.put(pickle.dumps(self.step))
        asked = 0 if self.step is None else self._asked

        def settled() -> bool:
            waiting = variant.key in self.running or (asked and variant.key in self._of_step - self.done)
            return self.ended or (self._listed >= asked and not waiting)

        with self._changed:
            self._changed.wait_for(settled)

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

    def _write(self, stdin: IO[bytes]) -> None:
        """Sends messages in their order; the process may read the first one late."""
        with (
            suppress(OSError),
            stdin as pipe,
            Connection(os.dup(pipe.fileno()), readable=False) as process,
        ):
            while (message := self._messages.get()) is not None:
                process.send_bytes(message)

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
                if "listed" in event:
                    self._listed, self._of_step = event["listed"], set(event["found"])
                self.problem = event.get("problem", "")
                self._changed.notify_all()
        self._messages.put(None)
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
        with Pipes.of(process).stdout as pipe:
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

    Gives None without a request, and where all kernels are in Triton's cache.
    """
    if request is None or request.marker().exists():
        yield None
        return
    compilation = Compilation(request, patient=True)
    try:
        with launching(compilation):
            yield compilation
    except BaseException:
        compilation.close()
        raise
