"""Processes that start others, and the network between them."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, NamedTuple

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_TIMEOUT_SECONDS = 7 * 86400


def end_with_parent() -> None:
    """Makes the kernel (Linux) kill this process as soon as its parent process is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def output_to_stderr() -> Iterator[None]:
    """Redirects the standard output of C++ libraries to standard error inside this context."""
    try:
        saved = os.dup(1)
    except OSError:  # standard output is closed
        yield
        return
    try:
        with suppress(OSError):  # standard error is closed
            os.dup2(2, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


class Pipes(NamedTuple):
    """Standard input and output of another process."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    @classmethod
    def of(cls, process: subprocess.Popen[bytes]) -> Pipes:
        """The pipes of a process that was started with both."""
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process was started without pipes: pass stdin=PIPE and stdout=PIPE")
        return cls(process.stdin, process.stdout)


def check_interface(name: str | None) -> list[str]:
    """Names of this machine's network interfaces; ValueError if ``name`` is not among them."""
    known = [interface for _, interface in socket.if_nameindex()]
    if name is not None and name not in known:
        raise ValueError(f"no network interface {name!r}: this machine has {', '.join(known)}")
    return known


def check_timeout(seconds: float) -> float:
    """A time that processes wait for each other; ValueError if it is out of range."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 1 <= seconds <= MAX_TIMEOUT_SECONDS:
        raise ValueError(f"a timeout of {seconds!r} s: supported are 1 to {MAX_TIMEOUT_SECONDS}")
    return seconds
