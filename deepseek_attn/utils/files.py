"""Atomic output files and directories: written completely or not at all. Files of lines are in `line_files`.

Paths are checked before anything is computed. Symbolic links are followed. Devices and pipes are written to directly;
regular files are replaced. A new file has the umask's mode, a replaced file keeps its mode.

An incomplete output is in a folder beside its final path, locked by the writing process. The folder of a killed
process is removed when the next output is written beside it.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

try:
    import fcntl
except ImportError:  # not a POSIX system: folders of killed processes are not removed
    fcntl = None

UNFINISHED = ".deepseek-attn-partial"  # suffix of the folders of incomplete outputs
MARKED_BYTES = 1024  # first bytes of a file, searched for the writer's mark
LOCK = ".deepseek-attn-lock"


def check_output(path: str | Path, name: str, parents: bool = False) -> None:
    """Raises ValueError, before anything is computed, if no file can be written at ``path``.

    Args:
        name: begins the message, for instance an option of the command line.
        parents: its folder need not exist.
    """
    try:
        find_target(Path(path), parents)
    except OSError as error:
        advice = "" if parents else "; name a file in an existing, writable folder"
        raise ValueError(f"{name} {path}: {error.strerror}{advice}") from error


def existing_folder(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))


def has_mark(path: Path, mark: str) -> bool:
    """Whether a file has ``mark`` in its first bytes, so that this library wrote it and may replace or remove it."""
    try:
        with path.open("rb") as file:
            return mark.encode() in file.read(MARKED_BYTES)
    except OSError:
        return False


def check_replaceable(path: Path, mark: str) -> None:
    """ValueError if ``path`` exists and this library did not write it (it lacks ``mark``)."""
    if os.path.lexists(path) and not has_mark(path, mark):
        raise ValueError(f"{str(path)!r} exists and was not written by `{mark}`: move it away, or write elsewhere")


@contextmanager
def appearing(
    path: Path, directory: bool = False, replace: bool = False, into: bool = False, parents: bool = False
) -> Iterator[Path]:
    """Yields a temporary path with the same file name; it is moved to ``path`` when the block succeeds.

    If the block fails, everything written is removed.

    Args:
        directory: make a directory there, and the missing parents of ``path``. An empty directory is replaced.
        replace: with ``directory``: also replace a directory that is not empty.
        into: with ``directory``: move its files into a directory that exists; they replace files of the same names.
        parents: make the missing parents of ``path``.

    Raises:
        ValueError: nothing can be written there, with the reason; also for an OSError of a write in the block.
    """
    path = Path(path)
    place = Path(os.path.realpath(path))
    merge, parents = into and place.is_dir(), parents or directory
    made = [parent for parent in place.parents if parents and not parent.exists()]
    folder = lock = None
    whole = False
    try:
        if parents:
            place.parent.mkdir(parents=True, exist_ok=True)
        target = place if directory else find_target(path)
        beside = Path(tempfile.gettempdir()) if target is None else place if merge else place.parent
        for unfinished in [] if target is None else beside.glob(f".*{UNFINISHED}"):
            _remove_unlocked(unfinished)
        # named before it is made: an interruption at any point leaves a name to remove
        folder = beside / f".{place.name[:40]}.{secrets.token_hex(8)}{UNFINISHED}"
        lock = _make_locked(folder)
        partial = folder / (place if directory else path).name
        if directory:
            partial.mkdir()
        yield partial
        if target is None:
            with partial.open("rb") as data, path.open("wb") as file:
                shutil.copyfileobj(data, file)
        else:
            if target.exists():
                partial.chmod(stat.S_IMODE(target.stat().st_mode))
            elif not directory:  # a native writer may have chosen another mode
                partial.chmod(stat.S_IMODE((folder / LOCK).stat().st_mode))
            if merge:
                for file in sorted(partial.iterdir()):
                    os.replace(file, os.path.realpath(target / file.name))
            elif replace and target.is_dir():
                _exchange(partial, target, folder / "before")
            else:
                os.replace(partial, target)
        whole = True
    except OSError as error:
        if folder is None or _is_about(error, path, folder):
            reason = error.strerror or error
            raise ValueError(f"{str(path)!r} cannot be written: {reason}") from error
        raise
    except ValueError as error:  # of an output within the directory: its final path is named
        if folder is None or str(folder) not in str(error):
            raise
        raise ValueError(str(error).replace(str(folder / place.name), str(path))) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.close()
        for parent in [] if whole else made:
            with suppress(OSError):
                parent.rmdir()


def _exchange(partial: Path, target: Path, before: Path) -> None:
    """Replaces the directory ``target`` by ``partial`` and moves the old one to ``before``; restores it on failure."""
    os.replace(target, before)
    try:
        os.replace(partial, target)
    except BaseException:
        os.replace(before, target)
        raise


def write_text(path: Path, text: str, *, parents: bool = False) -> None:
    """Writes UTF-8 text, with ``parents`` in folders that it makes; ValueError if it cannot be written there."""
    with appearing(path, parents=parents) as partial:
        partial.write_text(text, encoding="utf-8")


def write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None, *, parents: bool = False
) -> None:
    """Writes a safetensors file, with ``metadata`` in its header; with ``parents``, makes missing folders.

    Raises:
        ValueError: it cannot be written there, with the reason.
    """
    with appearing(path, parents=parents) as partial:
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error


class TensorBlocks(NamedTuple):
    """A tensor of a file, written in blocks: its safetensors dtype, its shape, and contiguous CPU tensors."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    blocks: Iterable[torch.Tensor]

    @classmethod
    def of(cls, like: torch.Tensor, blocks: Iterable[torch.Tensor]) -> Self:
        """A tensor of the dtype and shape of ``like``."""
        return cls(STORED_NAMES[like.dtype], tuple(like.shape), like.nbytes, blocks)


# names of dtypes in safetensors
STORED_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.uint8: "U8",
}  # fmt: skip


def write_tensor_blocks(
    path: Path, tensors: Mapping[str, TensorBlocks], metadata: Mapping[str, str], *, parents: bool = False
) -> None:
    """Writes a safetensors file of tensors that need not be in memory as a whole; ``parents``: makes missing folders.

    Raises:
        ValueError: it cannot be written there, with the reason.
    """
    with appearing(path, parents=parents) as partial, partial.open("wb") as file:
        store_tensors(file, tensors, metadata)


def store_tensors(file: IO[bytes], tensors: Mapping[str, TensorBlocks], metadata: Mapping[str, str]) -> None:
    """Writes the header and the tensors of a safetensors file.

    Raises:
        ValueError: the blocks of a tensor have more or fewer bytes than the tensor.
    """
    # wide elements first, as the safetensors library does: then every tensor is aligned for its dtype
    ordered = sorted(tensors.items(), key=lambda item: -8 * item[1].nbytes // max(1, math.prod(item[1].shape)))
    header: dict[str, dict] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in ordered:
        offsets = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, tensor in ordered:
        written = 0
        for block in tensor.blocks:
            data = block.contiguous().reshape(-1).view(torch.uint8)
            written += file.write(data.numpy().data)
        if written != tensor.nbytes:
            raise ValueError(f"{name} has {written} bytes, its source announced {tensor.nbytes}")


def find_target(path: Path, parents: bool = False) -> Path | None:
    """The regular file to make or replace, behind symbolic links; None for a device or pipe, which is written to.

    Args:
        parents: missing folders can be made.

    Raises:
        OSError: no file can be written there.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    if mode is not None and stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if mode is not None and stat.S_ISSOCK(mode):
        raise OSError(errno.ENXIO, "it is a socket")
    if mode is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it cannot be written to")
    if mode is not None and not stat.S_ISREG(mode):
        return None
    target = Path(os.path.realpath(path))
    folder = existing_folder(target.parent) if parents else target.parent
    if parents and not folder.is_dir():
        reason = os.strerror(errno.EEXIST if folder == target.parent else errno.ENOTDIR)
        raise NotADirectoryError(errno.ENOTDIR, f"the folder {str(path.parent)!r} cannot be made: {reason}")
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"the folder {str(path.parent)!r} does not exist")
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, f"the folder {str(folder)!r} cannot be written to")
    return target


def _make_locked(folder: Path) -> io.TextIOWrapper:
    """Makes the folder with a locked file in it, which it returns."""
    while True:
        folder.mkdir(0o700, exist_ok=True)
        try:
            lock = (folder / LOCK).open("w")
        except FileNotFoundError:  # another process has removed the folder, which had no lock yet
            continue
        with suppress(OSError):  # a file system without locks
            lock_file(lock, wait=True)
        if (folder / LOCK).exists():
            return lock
        lock.close()


def lock_file(file: IO, wait: bool = False) -> None:
    """Locks a file as long as it is open, on systems that have locks.

    Raises:
        BlockingIOError: it is locked, unless ``wait``; OSError: its file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_unlocked(folder: Path) -> None:
    """Removes folders of killed processes: empty folders, and folders whose lock nobody holds."""
    with suppress(OSError):
        folder.rmdir()
    with suppress(OSError), (folder / LOCK).open("r+") as lock:
        if fcntl is not None:
            lock_file(lock)
            shutil.rmtree(folder, ignore_errors=True)


def _is_about(error: OSError, path: Path, folder: Path) -> bool:
    """Whether an OSError concerns the output rather than a file read for it."""
    name = error.filename
    return name is None or str(name) == str(path) or str(name).startswith(str(folder))
