"""Variants compiled by processes that need no GPU, into Triton's cache."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Literal

from deepseek_attn.utils.processes import end_with_parent

if TYPE_CHECKING:
    from deepseek_attn.runner.ahead.recording import Variant


Tell = Callable[..., None]
"""Takes events by keyword: lists of kernels by their `Variant.key`, and of errors, each of which names its kernel."""


def compile_variants(
    lists: Iterable[Sequence[Variant]],
    workers: int,
    tell: Tell,
    seconds: int = 0,
    method: Literal["fork", "forkserver"] = "fork",
) -> None:
    """Compiles variants in the order of their lists, each in a process of its own, ``workers`` of them at a time.

    By default this process is forked, so it must have no other threads, and `prepare_keys` must have ended: its
    results are inherited.

    Args:
        lists: made while earlier variants are compiled; no variant is in them twice.
        seconds: a variant that takes longer fails; 0: no limit.
    """
    waiting: deque[Variant] = deque()
    context: Any = multiprocessing.get_context(method)
    running: dict[Connection, tuple[BaseProcess, Variant]] = {}

    def advance(timeout: float | None) -> None:
        """Waits for a compilation to end, and gives waiting variants to idle workers."""
        ready = wait([*running], timeout)
        for receive in [one for one in running if one in ready]:
            process, variant = running.pop(receive)
            process.join()
            try:
                error = receive.recv()
            except EOFError:
                error = f"its compiler ended with exit code {process.exitcode}"
            receive.close()
            tell(done=[variant.key], failed=[f"{variant.name}: {error}"] if error else [])
        while waiting and len(running) < workers:
            variant = waiting.popleft()
            receive, send = multiprocessing.Pipe(duplex=False)
            process = context.Process(target=_compile, args=(variant, send, seconds, {**os.environ}), daemon=True)
            process.start()
            send.close()
            running[receive] = process, variant
            tell(running=[variant.key])

    for variants in lists:
        waiting += variants
        tell(found=[variant.key for variant in variants])
        advance(0)
    while waiting or running:
        advance(None)


def compile_all(variants: Sequence[Variant], workers: int, tell: Tell, seconds: int = 0) -> None:
    """As `compile_variants`, from any process, such as one with threads and a CUDA context, which no fork keeps intact.

    Another process is forked instead.
    """
    for kind in {type(variant.source.fn) for variant in variants}:
        ForkingPickler.register(kind, lambda function: function.__name__)  # found again in its module
    multiprocessing.set_forkserver_preload(["deepseek_attn.runner.ahead.prepared"])
    compile_variants([variants], workers, tell, seconds=seconds, method="forkserver")


def _compile(variant: Variant, connection: Connection, seconds: int, environment: dict[str, str]) -> None:
    """Compiles a variant; sends why it failed, or "". The process ends without an answer after ``seconds``."""
    os.environ.update(environment)  # a forkserver still has the variables of its start, such as TRITON_CACHE_DIR
    end_with_parent()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the command's handler would end in a traceback
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal's process group; whoever started this one decides
    os.nice(5)  # the process that loads the model goes first
    try:
        variant.compile()
        connection.send("")
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}"[:1000])
