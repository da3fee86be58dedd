"""Named profiler ranges around the stages of a step; switched off, a range costs about 0.1 us.

Of an engine's step: ``schedule``, ``model``, ``mtp`` and ``sample``. Of the model: ``metadata``, ``attention``,
``hc_pre``, ``hc_post_pre``, ``hc_post``, ``moe``, ``hc_head``, ``head``. Of an attention layer: ``project``, ``insert``
(norms, window and compressed entries: one op), ``select``, ``attend``, ``output``. Norm and RoPE of queries belong to
``attend``, or to ``project`` where index queries are computed in the same launch. A decode step that is replayed as a
CUDA graph runs none of this Python: its kernels appear in ``model`` only.
"""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch.autograd.profiler import profile as autograd_profile

from deepseek_attn.utils.files import appearing, check_output

P = ParamSpec("P")
R = TypeVar("R")
VARIABLE = "DEEPSEEK_ATTN_TRACE"  # "1" switches ranges on at import, for instance under Nsight Systems


class _Range:
    """A ``record_function`` range and, with a GPU, the NVTX range of the same name."""

    def __init__(self, name: str):
        self.name, self._record = name, torch.profiler.record_function(name)

    def __enter__(self) -> None:
        self._record.__enter__()
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_push(self.name)

    def __exit__(self, *error) -> None:
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_pop()
        self._record.__exit__(*error)


_NO_RANGE = nullcontext()
_on = os.environ.get(VARIABLE) == "1"


def stage(name: str) -> AbstractContextManager:
    """Context of one profiler range called ``name``; does nothing while ranges are off."""
    return _Range(name) if _on else _NO_RANGE


def traced(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that makes every call of a function a `stage`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _on:
                return function(*args, **kwargs)
            with _Range(name):
                return function(*args, **kwargs)

        return run

    return decorate


@contextmanager
def ranges() -> Iterator[None]:
    """Context in which ranges are on."""
    global _on
    before, _on = _on, True
    try:
        yield
    finally:
        _on = before


@contextmanager
def profile(path: str | Path) -> Iterator[None]:
    """Writes a Chrome trace of the block, ranges included, for Perfetto or ``chrome://tracing``.

    Raises:
        ValueError: nothing can be written to ``path``; nothing has run yet.
    """
    check_output(path, "no trace can be written to")
    # Before torch 2.13 `torch.profiler.profile` warns unless it accumulates events, which would parse the whole trace.
    profiler = autograd_profile(use_device="cuda" if torch.cuda.is_available() else None)
    try:
        with ranges(), profiler:
            yield
    finally:  # the trace should also show a block that raised
        with appearing(Path(path)) as partial:
            _export(profiler, partial)


def _export(profiler: autograd_profile, path: Path) -> None:
    """Writes the trace, compressed if the name ends in ``.gz``; OSError if not all of it can be written.

    The profiler's own compression hides write errors. Its export hides them too, except that the file is missing.
    """
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    profiler.export_chrome_trace(str(plain))
    if not plain.exists():
        raise OSError("the profiler could not write all of the trace; is there space for it?")
    if plain != path:
        with plain.open("rb") as data, gzip.open(path, "wb") as file:
            shutil.copyfileobj(data, file)
