"""Variants compiled by processes that need no GPU, into Triton's cache."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Literal, Protocol

from deepseek_attn.utils.processes import end_with_parent

if TYPE_CHECKING:
    from deepseek_attn.runner.ahead.recording import Variant


class Tell(Protocol):
    """Takes events: kernels by their `Variant.key`, and errors, each of which names its kernel."""

    def __call__(self, **event: object) -> None: ...


def compile_variants(
    lists: Iterable[Sequence[Variant]],
    workers: int,
    tell: Tell,
    requests: Connection | None = None,
    kernels_of: Callable[[Any], list[Variant]] = lambda step: [],
    seconds: int = 0,
    method: Literal["fork", "forkserver"] = "fork",
) -> None:
    """Compiles variants while more are being listed, each in a process of its own, ``workers`` of them at a time.

    Variants of requested steps are compiled first, all others in the order of the list. By default this process is
    forked, so it must have no other threads, and `prepare_keys` must have ended: its results are inherited.

    Args:
        requests: receives the shapes of steps that a runner computes meanwhile; ``kernels_of``: lists their kernels.
        seconds: a variant that takes longer fails; 0: no limit.
    """
    waiting: dict[str, Variant] = {}
    context: Any = multiprocessing.get_context(method)
    running: dict[Connection, tuple[BaseProcess, Variant]] = {}
    started: set[str] = set()
    listed = 0

    def start(variant: Variant) -> None:
        receive, send = multiprocessing.Pipe(duplex=False)
        process = context.Process(target=_compile, args=(variant, send, seconds, {**os.environ}), daemon=True)
        process.start()
        send.close()
        running[receive] = process, variant
        started.add(variant.key)
        tell(running=[variant.key])

    def finish(receive: Connection) -> None:
        process, variant = running.pop(receive)
        try:
            error = receive.recv()
        except EOFError:
            process.join()
            error = f"its compiler ended with exit code {process.exitcode}"
        process.join()
        receive.close()
        tell(done=[variant.key], failed=[f"{variant.name}: {error}"] if error else [])

    def fresh(variants: Sequence[Variant]) -> dict[str, Variant]:
        return {variant.key: variant for variant in variants if variant.key not in started}

    def advance(timeout: float | None) -> None:
        """Waits for an event, handles ended compilations and requests, and gives waiting variants to idle workers."""
        nonlocal requests, waiting, listed
        ready = wait([*running] if requests is None else [*running, requests], timeout)
        for receive in [one for one in running if one in ready]:
            finish(receive)
        if requests is not None and requests in ready:
            try:
                step = requests.recv()
            except EOFError:  # the runner is gone
                requests = None
            else:
                variants, listed = kernels_of(step), listed + 1
                waiting = fresh(variants) | waiting  # in the order of the first
                tell(found=[variant.key for variant in variants], listed=listed)
        while waiting and len(running) < workers:
            start(waiting.pop(next(iter(waiting))))

    for variants in lists:
        tell(found=[variant.key for variant in variants])
        waiting |= fresh(variants)
        advance(0)
    while waiting or running:
        advance(None)


def compile_all(variants: Sequence[Variant], workers: int, tell: Tell, seconds: int = 0) -> None:
    """As `compile_variants`, from any process, such as one with threads and a CUDA context, which no fork keeps intact.

    Another process is forked instead.
    """
    if not variants:
        return
    for kind in {type(variant.source.fn) for variant in variants}:
        ForkingPickler.register(kind, lambda function: (_function, (function.__module__, function.__name__)))
    multiprocessing.set_forkserver_preload(["deepseek_attn.runner.ahead.prepared"])
    compile_variants([variants], workers, tell, seconds=seconds, method="forkserver")


def _function(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


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
