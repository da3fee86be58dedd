"""Worker processes that share a queue of units."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import RLock, Thread

from tqdm.auto import tqdm

from deepseek_attn.lab.experiments.define.units import Group, ReportProgress, Unit
from deepseek_attn.utils.clock import seconds_since

PROGRESS_S = 0.5  # between two messages about a unit's progress, and between two looks at them

Work = Unit | Group
Task = Callable[[Work, ReportProgress], object]


@dataclass(frozen=True)
class Running:
    """A worker's message: its unit has been running for ``seconds``, and ``part`` of it is done, in [0, 1]."""

    part: float
    seconds: float


@dataclass(frozen=True)
class Finished:
    """The end of a unit after ``seconds``; ``error``: the reason if it failed.

    ``reasons``: of a group, why each of the units that failed did, by name.
    """

    seconds: float
    error: str | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)


class WorkerPool:
    """Runs ``task(unit, report)`` for each unit in ``jobs`` processes, or by itself if the unit is ``alone``.

    Args:
        task: pickled with each unit, so a module's function or a partial of one.
        logs: folder for the output of the processes.
        running: called with a unit and its progress.
        finished: called with a unit and its end: done, failed with an error, or lost with its process.
        limit_s: seconds after which a unit has failed and its process is killed; None: no limit.
        until: time of the monotonic clock after which no unit begins; None: all of them do.
        environments: environment variables of the processes, assigned in turn; one set for each GPU.
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
                futures = [worker.future for worker in self.workers if worker.future is not None]
                wait_for(futures, timeout=PROGRESS_S, return_when=FIRST_COMPLETED)
                for worker in [*self.workers]:
                    self._look(worker)
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
            idle = next((worker for worker in self.workers if worker.unit is None), None) or self._add()
            idle.give(self.task, queue.popleft())

    def _add(self) -> Worker:
        used = {worker.number for worker in self.workers}
        number = next(number for number in range(self.jobs) if number not in used)
        environment = self.environments[number % len(self.environments)]
        self.workers.append(Worker(number, self.logs / f"worker{number}.txt", environment))
        return self.workers[-1]

    def _look(self, worker: Worker) -> None:
        """Reports a worker's progress and the end of its unit; kills the process of a unit that is late."""
        unit, future = worker.unit, worker.future
        if unit is None or future is None:
            return
        ended = future.done()  # read before the messages: a unit's last message comes before its end
        for message in worker.messages():
            self.running(unit, message)
        if not ended:
            if self._is_late(worker) and worker.process is not None:
                worker.process.kill()  # which ends the future
        elif isinstance(future.exception(), BrokenProcessPool):
            self._lose(worker, unit)
        else:
            worker.unit = worker.future = worker.began = None
            self.finished(unit, future.result())

    def _is_late(self, worker: Worker) -> bool:
        return self.limit_s is not None and worker.seconds > self.limit_s

    def _lose(self, worker: Worker, unit: Work) -> None:
        """Reports the unit of a process that has ended as failed; another process takes its place if there is work."""
        self.workers.remove(worker)
        late, seconds = self._is_late(worker), worker.seconds
        code = worker.stop()
        if not worker.started:
            raise RuntimeError(f"a worker process ended with code {code} before it began; see {worker.log}")
        why = f"not done after {self.limit_s} s" if late else f"the worker process ended with code {code}"
        self.finished(unit, Finished(seconds, f"{why}; see {worker.log}"))


class Worker:
    """The pool's side of one process, which an executor of its own starts and feeds.

    Attributes:
        number: among the pool's processes.
        unit: the running unit, and ``future`` its end; None while the worker is idle.
        process: None before the first unit.
        began: monotonic time at which the process reported the unit as running, after its imports.
        started: the process has sent a message.
    """

    def __init__(self, number: int, log: Path, environment: Mapping[str, str]):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.number, self.log, self.started = number, log, False
        self.unit: Work | None = None
        self.future: Future[Finished] | None = None
        self.process: BaseProcess | None = None
        self.began: float | None = None
        context = get_context("spawn")  # a forked process could not use CUDA
        self._connection, self._theirs = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(1, context, prepare, (self._theirs, log, environment))

    @property
    def seconds(self) -> float:
        """How long the unit has been running."""
        return 0.0 if self.began is None else seconds_since(self.began)

    def give(self, task: Task, unit: Work) -> None:
        """Starts a unit, and the process with the first."""
        others = {*active_children()}
        self.unit, self.future = unit, self._executor.submit(do, task, unit)
        if self.process is None:  # the executor starts it in ``submit``, and has no public name for it
            [self.process] = {*active_children()} - others
            self._theirs.close()  # the process has the only one, so that its end closes the connection

    def messages(self) -> Iterator[Running]:
        """The messages that have come since the last call."""
        with suppress(EOFError, OSError):  # the process has ended, which its future reports
            while self._connection.poll():
                message = self._connection.recv()
                self.started, self.began = True, self.began or time.perf_counter()
                yield message

    def stop(self) -> int | None:
        """Ends the process if it still runs; returns its exit code."""
        if self.process is not None:
            self.process.terminate()
        self._executor.shutdown(cancel_futures=True)
        self._connection.close()
        return None if self.process is None else self.process.exitcode


_pool: list[Connection] = []  # in a worker process: the connection to its pool


def prepare(connection: Connection, log: Path, environment: Mapping[str, str]) -> None:
    """Prepares a worker process before the task is imported: sets its variables, sends its output to ``log``."""
    os.environ.update(environment)  # CUDA reads them when it is first used
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the pool ends this one
    file = log.open("a", buffering=1, encoding="utf-8")
    for descriptor in (1, 2):  # of native code
        os.dup2(file.fileno(), descriptor)
    sys.stdout = sys.stderr = file
    tqdm.set_lock(RLock())  # its default is a semaphore, which outlives a process that is killed
    Thread(target=_end_with_pool, daemon=True).start()
    _pool.append(connection)


def _end_with_pool() -> None:
    """Ends this process when the pool's is gone, whatever the unit does, even if that process was killed."""
    pool = parent_process()
    assert pool is not None
    wait([pool.sentinel])
    os._exit(1)


def do(task: Task, unit: Work) -> Finished:
    """Does a unit in a worker process, and reports its progress."""
    start = last = time.perf_counter()

    def report(part: float) -> None:
        nonlocal last
        if seconds_since(last) >= PROGRESS_S:
            last = time.perf_counter()
            _pool[0].send(Running(part, last - start))

    error, reasons = None, {}
    _pool[0].send(Running(0.0, 0.0))
    try:
        task(unit, report)
    except Exception as problem:
        with suppress(OSError):  # a full disk must not hide the reason
            traceback.print_exc()
        error, reasons = f"{type(problem).__name__}: {problem}", getattr(problem, "reasons", {})
    return Finished(seconds_since(start), error, reasons)
