"""Files that appear complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A place beside ``path`` for a file that takes its name when the block succeeds and is removed otherwise."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text; OSError if it cannot be written."""
    with appearing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file, with ``metadata`` in its header.

    Raises:
        ValueError: it cannot be written there, with the reason.
    """
    try:
        with appearing(path) as partial:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{str(path)!r} cannot be written: {error}") from error
