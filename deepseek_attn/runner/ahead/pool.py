"""Variants compiled by processes that need no GPU, into Triton's cache."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from deepseek_attn.runner.ahead.recording import Variant, prepare_keys
from deepseek_attn.utils.processes import end_with_parent

SLOWEST = ("experts_hopper", "compress", "insert_tokens", "linear_hopper", "topk", "collapse", "attend", "multi_linear")
"""Kernels that take longest to compile, the slowest first; they begin first, so that nothing waits for the last one."""
FIRST = 3
"""Lists of variants that are compiled before the others: those of a first prompt and its first decode steps."""


class Tell(Protocol):
    """Takes events: kernels by their `Variant.key`, and errors, each of which names its kernel."""

    def __call__(self, **event: object) -> None: ...


@dataclass
class RequestedSteps:
    """Steps that the runner computes while its kernels are being compiled.

    Attributes:
        runner: receives their shapes; None once that process is gone. kernels: lists the kernels of a step.
    """

    runner: Connection | None
    kernels: Callable[[Any], list[Variant]]

    def next(self) -> list[Variant]:
        """The kernels of the step that `runner` has sent."""
        try:
            return [] if self.runner is None else self.kernels(self.runner.recv())
        except EOFError:
            self.runner = None
            return []


def compile_variants(
    lists: Iterable[list[Variant]], workers: int, tell: Tell, steps: RequestedSteps | None = None
) -> None:
    """Compiles variants while more are being listed, each in a forked process, ``workers`` of them at a time.

    The kernels of the latest of ``steps`` come first, then those of the `FIRST` lists; within these the slowest.
    """
    waiting: list[tuple[int, int, Variant]] = []
    running: dict[Connection, tuple[BaseProcess, Variant]] = {}
    known: set[str] = set()
    listed = 0

    def add(number: int, variants: list[Variant]) -> None:
        """Queues variants by the ``number`` of their list. With ``number`` < 0, queued variants move to the front."""
        queued = {variant.key for *_, variant in waiting} if number < 0 else set()
        fresh = [variant for variant in variants if variant.key not in known or variant.key in queued]
        known.update(variant.key for variant in fresh)
        moved = {variant.key for variant in fresh}
        waiting[:] = [job for job in waiting if job[2].key not in moved]
        for variant in fresh:
            ranks = [rank for rank, kernel in enumerate(SLOWEST) if variant.name.startswith(kernel)]
            waiting.append((min(number, FIRST), min(ranks, default=len(SLOWEST)), variant))
        waiting.sort(key=lambda job: job[:2])

    def take_steps(timeout: float | None) -> list[Any]:
        """Queues the kernels of steps that have arrived; returns the other ready file objects."""
        nonlocal listed
        source = None if steps is None else steps.runner
        ready = wait([*running] if source is None else [*running, source], timeout)
        if steps is not None and source in ready:
            ready.remove(source)
            variants = steps.next()
            if steps.runner is not None:
                listed += 1
                add(-listed, variants)
                tell(found=[variant.key for variant in variants], listed=listed)
        return ready

    def advance(timeout: float | None) -> None:
        ready = take_steps(0)
        while waiting and len(running) < workers:
            *_, variant = waiting.pop(0)
            receive, send = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(target=_compile, args=(variant, send), daemon=True)
            process.start()
            send.close()
            running[receive] = process, variant
            tell(running=[variant.key])
        for receive in ready or take_steps(timeout):
            process, variant = running.pop(receive)
            try:
                error = receive.recv()
            except EOFError:
                process.join()
                error = f"its compiler ended with exit code {process.exitcode}"
            process.join()
            receive.close()
            tell(done=[variant.key], failed=[f"{variant.name}: {error}"] if error else [])

    prepare_keys().join()  # forked processes inherit the digest of Triton's files
    for number, fresh in enumerate(lists):
        tell(found=[variant.key for variant in fresh])
        add(number, fresh)
        advance(0)
    tell(all_found=True)
    while waiting or running:
        advance(None)


def _compile(variant: Variant, connection: Connection) -> None:
    """Compiles a variant; sends why it failed, or ""."""
    end_with_parent()
    os.nice(5)  # the process that loads the model goes first
    try:
        variant.compile()
        connection.send("")
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}"[:1000])
