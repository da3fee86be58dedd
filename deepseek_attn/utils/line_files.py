"""Output files that grow by whole lines, for results that cost hours and are worth keeping one by one.

Each line is in the file as soon as it is written, whatever ends the process. A process that continues the file drops
the partial last line of a killed process. A file with contents is refused unless the caller continues it. The appending
process holds a lock on the file. Links, devices, pipes and modes are handled as in `files`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deepseek_attn.utils.files import find_target, lock_file


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
    """A file to append lines to. If the call created the file and wrote nothing, the file is removed.

    Args:
        go_on: keep the lines that the file has; else a file with anything in it is refused.
        beginning: of every line; a file that begins otherwise is refused.

    Raises:
        ValueError: nothing can be written there, with the reason; it is not empty, or of another kind; ``go_on`` with a
            device or a pipe; another process appends to it.
    """
    path = Path(path)
    file, target, new = None, None, False
    try:
        try:
            target = find_target(path)
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
        if new and target is not None:
            _remove_empty(target)


def _remove_empty(target: Path) -> None:
    """Removes an empty file, unless another process appends to it."""
    with suppress(OSError), target.open("rb") as file:
        lock_file(file)
        if not file.read(1):
            target.unlink()


def _lock_for_appending(path: Path, file: io.FileIO) -> None:
    try:
        lock_file(file)
    except BlockingIOError:
        raise ValueError(f"{str(path)!r}: another process is appending to it") from None
    except OSError:  # a file system without locks
        pass


def _check_lines(path: Path, file: io.FileIO, go_on: bool, beginning: bytes) -> int:
    """Bytes of a file up to the end of its last whole line; for the errors, see `appending`."""
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
