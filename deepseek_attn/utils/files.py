"""Output files and directories that are written whole or not at all, and files that grow by whole lines.

Both are checked alike before anything is computed. A symbolic link is followed. A device or a pipe is written to. A new
file has the mode that the umask leaves, an older one keeps its mode.

Whole or not at all (`appearing`), the rule for every output but one: a regular file is replaced. An output that is not
complete is in a folder beside its final place, locked by the process that writes it. The folder of a process that was
killed is removed when the next output is written beside it.

By whole lines (`appending`), for results that cost hours and are worth keeping one by one: each line is in the file as
soon as it is written, whatever ends the process. What a killed process has left of a last line is dropped by the next
one that goes on. A file that has something in it is refused unless it is to go on, and locked by the process that
appends to it.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # not a POSIX system: what a killed process leaves stays there
    flock = None

UNFINISHED = ".deepseek-attn-partial"  # end of the names of folders with outputs that are not complete
LOCK = ".deepseek-attn-lock"


def check_output(path: str | Path, name: str) -> None:
    """Raises ValueError, before anything is computed, if no file can be written at ``path``.

    Args:
        name: begins the message, for instance an option of the command line.
    """
    try:
        _find_target(Path(path))
    except OSError as error:
        raise ValueError(f"{name} {path}: {error.strerror}; name a file in an existing, writable folder") from error


@contextmanager
def appearing(path: Path, directory: bool = False) -> Iterator[Path]:
    """A path to write to, of the same name in another folder: it becomes ``path`` when the block succeeds.

    Nothing is left when the block fails.

    Args:
        directory: make a directory there, and the missing folders above ``path``. An empty directory is replaced.

    Raises:
        ValueError: nothing can be written there, with the reason; also for an OSError of a write in the block.
    """
    path = Path(path)
    place = Path(os.path.realpath(path))
    made = [parent for parent in place.parents if directory and not parent.exists()]
    folder = lock = None
    whole = False
    try:
        if directory:
            place.parent.mkdir(parents=True, exist_ok=True)
        target = place if directory else _find_target(path)
        beside = Path(tempfile.gettempdir()) if target is None else place.parent
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
            elif not directory:  # a native writer may have chosen a mode of its own
                partial.chmod(stat.S_IMODE((folder / LOCK).stat().st_mode))
            os.replace(partial, target)
        whole = True
    except OSError as error:
        if folder is None or _is_about(error, path, folder):
            reason = error.strerror or error
            raise ValueError(f"{str(path)!r} cannot be written: {reason}") from error
        raise
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.close()
        for parent in [] if whole else made:
            with suppress(OSError):
                parent.rmdir()


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text; ValueError if it cannot be written there, with the reason."""
    with appearing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file, with ``metadata`` in its header.

    Raises:
        ValueError: it cannot be written there, with the reason.
    """
    with appearing(path) as partial:
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def _find_target(path: Path) -> Path | None:
    """The regular file to make or replace, behind symbolic links; None for a device or pipe, which is written to.

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
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"the folder {str(path.parent)!r} does not exist")
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(errno.EACCES, f"the folder {str(target.parent)!r} cannot be written to")
    return target


def _make_locked(folder: Path) -> io.TextIOWrapper:
    """Makes the folder with a locked file in it, which it returns."""
    while True:
        folder.mkdir(0o700, exist_ok=True)
        try:
            lock = (folder / LOCK).open("w")
        except FileNotFoundError:  # another process has removed the folder, which had no lock yet
            continue
        if flock is not None:
            with suppress(OSError):  # a file system without locks
                flock(lock, LOCK_EX)
        if (folder / LOCK).exists():
            return lock
        lock.close()


def _remove_unlocked(folder: Path) -> None:
    """Removes what a killed process has left: an empty folder, or one whose lock nobody holds."""
    with suppress(OSError):
        folder.rmdir()
    with suppress(OSError), (folder / LOCK).open("r+") as lock:
        if flock is not None:
            flock(lock, LOCK_EX | LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _is_about(error: OSError, path: Path, folder: Path) -> bool:
    """Whether an error of the system is about the output, and not about a file that was read for it."""
    name = error.filename
    return name is None or str(name) == str(path) or str(name).startswith(str(folder))


class LineFile:
    """A file that grows by whole lines, made by `appending`."""

    def __init__(self, path: Path, file: io.FileIO, whole: int | None):
        self._path, self._file = path, file
        self._whole = whole  # bytes of the lines that were there; None for a device or a pipe
        self._torn = whole is not None and file.seek(0, os.SEEK_END) > whole  # a killed process left part of a line

    def lines(self) -> Iterator[bytes]:
        """The whole lines that are there, without their ends."""
        if self._whole:
            with self._path.open("rb") as file:
                yield from (line[:-1] for line in file if line.endswith(b"\n"))

    def append(self, line: str) -> None:
        """Writes one line, which has no line end in it; ValueError if it cannot be written, with the reason."""
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        end = None
        try:
            if self._whole is not None:
                end = self._file.seek(0, os.SEEK_END)
                if self._torn:
                    end, self._torn = self._file.truncate(self._whole), False
            while data:
                data = data[os.write(self._file.fileno(), data) :]
        except OSError as error:
            if end is not None:
                with suppress(OSError):
                    self._file.truncate(end)
            raise ValueError(f"{str(self._path)!r} cannot be written: {error.strerror or error}") from error


@contextmanager
def appending(path: str | Path, go_on: bool, beginning: bytes) -> Iterator[LineFile]:
    """A file to append lines to. One that was not there is not left behind empty.

    Args:
        go_on: keep the lines that the file has; else a file with anything in it is refused.
        beginning: of every line; a file that begins otherwise is refused.

    Raises:
        ValueError: nothing can be written there, with the reason; it is not empty, or of another kind; ``go_on`` with a
            device or a pipe; another process appends to it.
    """
    path = Path(path)
    file, new = None, False
    try:
        try:
            target = _find_target(path)
            if target is None and go_on:
                raise ValueError(f"{str(path)!r} is a device or a pipe, which has no lines to go on from: name a file")
            new = target is not None and not target.exists()
            file = path.open("wb" if target is None else "ab+", buffering=0)
        except OSError as error:
            raise ValueError(f"{str(path)!r} cannot be written: {error.strerror}") from error
        whole = None
        if target is not None:
            _lock_for_appending(path, file)
            whole = _check_lines(path, file, go_on, beginning)
        yield LineFile(path, file, whole)
    finally:
        if file is not None:
            file.close()
        if new:
            _remove_empty(target)


def _remove_empty(target: Path) -> None:
    """Removes an empty file, unless another process appends to it."""
    with suppress(OSError), target.open("rb") as file:
        if flock is not None:
            flock(file, LOCK_EX | LOCK_NB)
        if not file.read(1):
            target.unlink()


def _lock_for_appending(path: Path, file: io.FileIO) -> None:
    try:
        if flock is not None:
            flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{str(path)!r}: another process is appending to it") from None
    except OSError:  # a file system without locks
        pass


def _check_lines(path: Path, file: io.FileIO, go_on: bool, beginning: bytes) -> int:
    """Bytes of a file up to the end of its last whole line; raises what `appending` says."""
    size = whole = file.seek(0, os.SEEK_END)
    if size and not go_on:
        raise ValueError(f"{str(path)!r} is not empty: go on from its lines (--resume), or name another file")
    while whole:
        start = max(0, whole - 2**16)
        file.seek(start)
        whole = start + file.read(whole - start).rfind(b"\n") + 1
        if whole > start:
            break
    for start in (0, whole):
        file.seek(start)
        if file.read(len(beginning)) != beginning[: size - start]:
            found = f"{str(path)!r} has a line that does not begin with {beginning.decode()!r}"
            raise ValueError(f"{found}: name another file")
    return whole
