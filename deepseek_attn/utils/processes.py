"""Processes that start others, and the network between them."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, NoReturn, TextIO

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_TIMEOUT_SECONDS = 7 * 86400


def end_with_parent() -> None:
    """Has the kernel (Linux) kill this process as soon as the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def check_interface(name: str | None) -> list[str]:
    """Names of this machine's network interfaces; ValueError if ``name`` is none of them."""
    known = [interface for _, interface in socket.if_nameindex()]
    if name is not None and name not in known:
        raise ValueError(f"no network interface {name!r}: this machine has {', '.join(known)}")
    return known


def check_timeout(seconds: float) -> float:
    """A time that processes wait for each other; ValueError if it is out of range."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 1 <= seconds <= MAX_TIMEOUT_SECONDS:
        raise ValueError(f"a timeout of {seconds!r} s: supported are 1 to {MAX_TIMEOUT_SECONDS}")
    return seconds


class Fork:
    """A fork of this process that runs a function, as `subprocess.Popen` runs a program. It must not use a GPU.

    It has what this process has imported. Of this process' threads it has the calling one alone, so locks that others
    hold stay locked in it: fork a process with one thread of Python (`possible`). Idle threads of OpenMP hold none.
    The fork is killed when nothing refers to this object any more.

    Args:
        main: called with a file that has what is written to `stdin`, and one that is read from `stdout`.

    Raises:
        OSError: there is no memory for another process, or there are too many.
    """

    def __init__(self, main: Callable[[BinaryIO, TextIO], None]):
        self.returncode: int | None = None
        self._reaping = threading.Lock()
        (get, stdin), (stdout, put) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        with os.fdopen(get, "rb") as requests, os.fdopen(put, "w") as told, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads that are not Python's
            self._pid = os.fork()
            if self._pid == 0:
                _run_forked(main, requests, told)

    @staticmethod
    def possible() -> bool:
        """Whether this process can be forked: on Linux, while it has one thread of Python."""
        return sys.platform == "linux" and threading.active_count() == 1

    def wait(self) -> int:
        """The exit code, once the fork has ended; that of a fork that others have waited for is taken for 0."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)  # keeps the number, which `kill` may still use
        with self._reaping:
            if self.returncode is None:
                self.returncode = 0
                with suppress(ChildProcessError):
                    self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        with self._reaping, suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self._pid, signal.SIGKILL)

    def __del__(self) -> None:
        if hasattr(self, "_pid"):
            self.kill()
            self.wait()
            self.stdin.close()
            self.stdout.close()


def _run_forked(main: Callable[[BinaryIO, TextIO], None], requests: BinaryIO, told: TextIO) -> NoReturn:
    """What a fork does. It holds two of the files that were open; the others become /dev/null.

    They are not closed: a file opened later would get the number of one that an object still writes to, as a log does.
    """
    code = 1
    try:
        os.setsid()  # a session of its own gets no Ctrl-C
        gc.disable()  # a collection would write, and so copy, the pages of all objects
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        kept, null = (requests.fileno(), told.fileno()), os.open(os.devnull, os.O_RDWR)
        for number in {0, 1, 2, *map(int, os.listdir("/proc/self/fd"))}.difference(kept):
            os.dup2(null, number)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        main(requests, told)
        told.flush()
        code = 0
    finally:
        os._exit(code)
