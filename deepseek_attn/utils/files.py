"""Files and directories that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


@contextmanager
def appearing(path: Path, directory: bool = False) -> Iterator[Path]:
    """A place beside ``path`` to write to: renamed to ``path`` when the block succeeds, removed when it fails.

    Args:
        directory: make a directory there, and the missing folders above it; they vanish too when the block fails.
    """
    path = path.absolute()
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    made = [parent for parent in path.parents if directory and not parent.exists()]
    try:
        if directory:
            partial.mkdir(parents=True)
        yield partial
        os.replace(partial, path)
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
        for parent in made:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()
        raise


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
