"""Worker processes that share a queue of units."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import RLock, Thread

from tqdm.auto import tqdm

from deepseek_attn.lab.experiments.define.units import Group, ReportProgress, Unit
from deepseek_attn.utils.clock import seconds_since

PROGRESS_S = 0.5  # between two messages about a unit's progress

Work = Unit | Group
Task = Callable[[Work, ReportProgress], object]


@dataclass(frozen=True)
class Running:
    """A worker's message: its unit has been running for ``seconds``, and ``part`` of it is done, in [0, 1]."""

    part: float
    seconds: float


@dataclass(frozen=True)
class Finished:
    """A worker's message: its unit ended after ``seconds``; ``error``: the reason if it failed.

    ``reasons``: of a group, why each of the units that failed did, by name.
    """

    seconds: float
    error: str | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)


class WorkerPool:
    """Runs ``task(unit, report)`` for each unit in ``jobs`` processes, or by itself if the unit is ``alone``.

    Args:
        task: pickled once per process, so a module's function or a partial of one.
        logs: folder for the output of the processes.
        running: called with a unit and its progress.
        finished: called with a unit and how it ended: done, failed with an error, or lost with its process.
        limit_s: a unit that takes longer has failed, and its process is killed; None waits for ever.
        until: time of the monotonic clock after which no unit begins; None: all of them do.
        environments: variables of the processes, which take turns; one set for each GPU.
    """

    def __init__(
        self,
        task: Task,
        logs: Path,
        jobs: int,
        running: Callable[[Work, Running], None],
        finished: Callable[[Work, Finished], None],
        limit_s: float | None = None,
        until: float | None = None,
        environments: Sequence[Mapping[str, str]] = ({},),
    ):
        self.environments = environments
        self.task, self.logs, self.jobs, self.limit_s, self.until = task, logs, jobs, limit_s, until
        self.running, self.finished = running, finished
        self.workers: list[Worker] = []

    def run(self, units: Sequence[Work]) -> list[Work]:
        """Returns when every unit is done or has failed; ends the processes whatever happens.

        Returns:
            The units that have not begun because of ``until``.

        Raises:
            RuntimeError: a process ended before it could do anything.
        """
        queue = deque(units)
        try:
            while self._assign(queue):
                ready = wait([worker.connection for worker in self.workers], timeout=1.0)
                for worker in [worker for worker in self.workers if worker.connection in ready]:
                    self._receive(worker)
                for worker in self.workers:
                    if self._is_late(worker):
                        worker.process.kill()  # the end of its connection reports the unit
        finally:
            while self.workers:
                self.workers.pop().stop()
        return [*queue]

    def _assign(self, queue: deque[Work]) -> bool:
        """Starts units up to the limit of parallel ones, and processes as needed; False once no unit is left."""
        while True:
            busy = [worker.unit for worker in self.workers if worker.unit is not None]
            if not queue or (self.until is not None and time.monotonic() >= self.until):
                return bool(busy)
            limit = 1 if any(unit.alone for unit in (queue[0], *busy)) else self.jobs
            if len(busy) >= limit:
                return True
            idle = next((worker for worker in self.workers if worker.unit is None), None) or self._start()
            idle.give(queue.popleft())

    def _start(self) -> Worker:
        used = {worker.number for worker in self.workers}
        number = next(number for number in range(self.jobs) if number not in used)
        environment = self.environments[number % len(self.environments)]
        worker = Worker(self.task, number, self.logs / f"worker{number}.txt", environment)
        self.workers.append(worker)
        return worker

    def _receive(self, worker: Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._lose(worker)
            return
        unit, worker.started = worker.unit, True
        assert unit is not None  # an idle worker sends nothing
        if isinstance(message, Running):
            worker.began = worker.began or time.perf_counter()
            self.running(unit, message)
        else:
            worker.unit = worker.began = None
            self.finished(unit, message)

    def _is_late(self, worker: Worker) -> bool:
        return self.limit_s is not None and worker.seconds > self.limit_s

    def _lose(self, worker: Worker) -> None:
        """Reports the unit of a process that has ended as failed; another process takes its place if there is work."""
        self.workers.remove(worker)
        late, seconds = self._is_late(worker), worker.seconds
        worker.process.join(timeout=10)
        code = worker.stop()
        if not worker.started:
            raise RuntimeError(f"a worker process ended with code {code} before it began; see {worker.log}")
        if worker.unit is not None:
            why = f"not done after {self.limit_s} s" if late else f"the worker process ended with code {code}"
            self.finished(worker.unit, Finished(seconds, f"{why}; see {worker.log}"))


@contextmanager
def variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process's environment, and sets them back."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Worker:
    """The pool's side of one process.

    Attributes:
        number: among the pool's processes.
        unit: the running unit; None while it is idle.
        began: monotonic time at which the process reported the unit as running, after its imports.
        started: the process has sent a message.
    """

    def __init__(self, task: Task, number: int, log: Path, environment: Mapping[str, str]):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.number, self.log, self.started = number, log, False
        self.unit: Work | None = None
        self.began: float | None = None
        context = get_context("spawn")  # a forked process could not use CUDA
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, log), daemon=True)
        with variables(environment):  # a spawned process has the environment of its start
            self.process.start()
        theirs.close()  # the process has the only one, so that its end closes the connection
        self._send(task)

    @property
    def seconds(self) -> float:
        """How long the unit has been running."""
        return 0.0 if self.began is None else seconds_since(self.began)

    def give(self, unit: Work) -> None:
        self.unit = unit
        self._send(unit)

    def _send(self, value: object) -> None:
        with suppress(OSError):  # the process has died, which the end of its connection reports
            self.connection.send(value)

    def stop(self) -> int | None:
        """Ends the process if it still runs; returns its exit code."""
        self.process.terminate()
        self.process.join()
        self.connection.close()
        return self.process.exitcode


def work(connection: Connection, log: Path) -> None:
    """Main function of a worker process: receives the task, then does units until the connection closes.

    Its imports, and those of the task, come after this function has redirected the output to ``log``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the pool ends this one
    file = log.open("a", buffering=1, encoding="utf-8")
    for descriptor in (1, 2):  # of native code
        os.dup2(file.fileno(), descriptor)
    sys.stdout = sys.stderr = file
    tqdm.set_lock(RLock())  # its default is a semaphore, which outlives a process that is killed
    Thread(target=_end_with_pool, daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the pool is gone
        task: Task = connection.recv()
        while True:
            _do(task, connection.recv(), connection)


def _end_with_pool() -> None:
    """Ends this process when the pool's is gone, whatever the unit does, even if that process was killed."""
    pool = parent_process()
    assert pool is not None
    wait([pool.sentinel])
    os._exit(1)


def _do(task: Task, unit: Work, connection: Connection) -> None:
    start = last = time.perf_counter()

    def report(part: float) -> None:
        nonlocal last
        if seconds_since(last) >= PROGRESS_S:
            last = time.perf_counter()
            connection.send(Running(part, last - start))

    error, reasons = None, {}
    connection.send(Running(0.0, 0.0))
    try:
        task(unit, report)
    except Exception as problem:
        traceback.print_exc()
        error, reasons = f"{type(problem).__name__}: {problem}", getattr(problem, "reasons", {})
    connection.send(Finished(seconds_since(start), error, reasons))
