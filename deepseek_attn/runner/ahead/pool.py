"""Variants compiled by processes that need no GPU, into Triton's cache."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Protocol

from deepseek_attn.runner.ahead.recording import Variant, prepare_keys
from deepseek_attn.utils.processes import end_with_parent

SLOWEST = ("experts_hopper", "compress", "insert_tokens", "linear_hopper", "topk", "collapse", "attend", "multi_linear")
"""Kernels that take longest to compile, the slowest first; they begin first, so that nothing waits for the last one."""
FIRST = 3
"""Lists of variants that are compiled before the others: those of a first prompt and its first decode steps."""


class Tell(Protocol):
    """Takes events: kernels by their `Variant.key`, and errors, each of which names its kernel."""

    def __call__(self, **event: object) -> None: ...


def compile_variants(lists: Iterable[list[Variant]], workers: int, tell: Tell) -> None:
    """Compiles variants while more are being listed, each in a forked process, ``workers`` of them at a time.

    Variants of the `FIRST` lists come before others, and within these the slowest.
    """
    waiting: list[tuple[int, int, Variant]] = []
    running: dict[Connection, tuple[BaseProcess, Variant]] = {}

    def advance(timeout: float | None) -> None:
        while waiting and len(running) < workers:
            *_, variant = waiting.pop(0)
            receive, send = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(target=_compile, args=(variant, send), daemon=True)
            process.start()
            send.close()
            running[receive] = process, variant
            tell(running=[variant.key])
        for receive in wait(list(running), timeout):
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
        for variant in fresh:
            ranks = [rank for rank, kernel in enumerate(SLOWEST) if variant.name.startswith(kernel)]
            waiting.append((min(number, FIRST), min(ranks, default=len(SLOWEST)), variant))
        waiting.sort(key=lambda job: job[:2])
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
