"""Worker processes that share a list of units; see `worker` for their side."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deepseek_attn.experiments.define.units import Unit
from deepseek_attn.experiments.run.clock import Clock


class Pool:
    """Runs units in ``clock.jobs`` processes.

    Args:
        arguments: of each worker; logs: folder for what they print.
        finished: called with each unit, its seconds and, if it failed, why.
        limit_s: a unit that takes longer has failed, and its process is ended; None lets it take its time.
    """

    def __init__(
        self,
        arguments: tuple[str, ...],
        logs: Path,
        clock: Clock,
        finished: Callable[[Unit, float, str | None], None],
        limit_s: float | None = None,
    ):
        self.command = [sys.executable, "-m", "deepseek_attn.experiments.run.worker", *arguments]
        self.logs, self.clock, self.finished, self.limit_s = logs, clock, finished, limit_s
        self.selector = selectors.DefaultSelector()
        self.workers: list[Worker] = []

    def run(self, units: list[Unit]) -> None:
        """Returns when every unit is done or has failed; stops the workers whatever happens.

        Raises:
            RuntimeError: a process ended before it could do anything.
        """
        queue = list(units)
        try:
            for number in range(self.clock.jobs):
                self._start(self.logs / f"worker{number}.txt")
            while self.workers:
                for key, _ in self.selector.select(timeout=1.0):
                    self._serve(key.data, queue)
                self._end_late_ones()
                self.clock.show()
        finally:
            for worker in self.workers:
                worker.stop()
            self.selector.close()

    def _start(self, log: Path) -> None:
        worker = Worker(self.command, log, self.clock.jobs)
        self.workers.append(worker)
        self.selector.register(worker.process.stdout, selectors.EVENT_READ, worker)

    def _serve(self, worker: Worker, queue: list[Unit]) -> None:
        for message in worker.read():
            if "progress" in message:
                self.clock.progress(worker.unit, message["progress"])
                continue
            worker.idle = True
            if worker.unit is not None:
                self._finish(worker, message.get("error"))
        if worker.ended:
            self._lost(worker)
            if queue:
                self._start(worker.log)
        elif worker.idle:
            unit = queue.pop(0) if queue else None
            if unit is not None:
                self.clock.started(unit)
            worker.give(unit)

    def _end_late_ones(self) -> None:
        for worker in self.workers:
            if worker.unit is not None and self.limit_s and time.monotonic() - worker.start > self.limit_s:
                worker.process.kill()

    def _finish(self, worker: Worker, error: str | None) -> None:
        unit, worker.unit = worker.unit, None
        self.finished(unit, time.monotonic() - worker.start, error)

    def _lost(self, worker: Worker) -> None:
        """A worker's output has ended: expected once it has nothing to do, else its unit has failed."""
        self.selector.unregister(worker.process.stdout)
        self.workers.remove(worker)
        code = worker.stop()
        if worker.unit is not None:
            late = self.limit_s is not None and time.monotonic() - worker.start > self.limit_s
            why = f"not done after {self.limit_s} s" if late else f"the worker process ended with code {code}"
            self._finish(worker, f"{why}; see {worker.log}")
        elif not worker.started:
            raise RuntimeError(f"a worker process ended with code {code} before it began; see {worker.log}")


class Worker:
    """One worker process; see `worker` for what it reads and writes."""

    def __init__(self, command: list[str], log: Path, jobs: int):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.unit, self.start = log, None, 0.0
        self.idle = self.started = self.ended = False
        self._rest = b""
        threads = str(max(1, (os.cpu_count() or 1) // jobs))
        environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
            )
        os.set_blocking(self.process.stdout.fileno(), False)

    def give(self, unit: Unit | None) -> None:
        """The next unit, or none: then the process ends by itself."""
        self.idle, self.started = False, True
        if unit is None:
            self.process.stdin.close()
            return
        self.unit, self.start = unit, time.monotonic()
        with suppress(BrokenPipeError):  # if it has just died, the end of its output says so
            self.process.stdin.write(f"{unit.path}\n".encode())
            self.process.stdin.flush()

    def read(self) -> list[dict]:
        """The messages that have come; notes when there will be no more."""
        data = self.process.stdout.read()
        self.ended = data == b""
        *lines, self._rest = (self._rest + (data or b"")).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def stop(self) -> int:
        """Ends the process if it still runs; returns its exit code."""
        if self.process.poll() is None and not self.ended:
            self.process.terminate()
        code = self.process.wait()
        self.process.stdout.close()
        return code
