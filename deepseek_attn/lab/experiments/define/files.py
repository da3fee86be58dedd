"""Files that an experiment reads, by name and contents: results keep their meaning wherever the files lie."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

ENDS = 1 << 20  # bytes at either end of a weight file that stand for the whole


def name_of(path: str | None) -> str | None:
    """The last part of a path; None for the library's own files."""
    return None if path is None else Path(path).name


def digest_of(path: str) -> str | None:
    """SHA-256 of a text file, or of a checkpoint directory; None where neither is on this machine.

    Of a directory count its JSON files and, because weights may be hundreds of gigabytes, the name, the size and the
    first and last MiB of each safetensors file.
    """
    place, digest = Path(path), hashlib.sha256()
    if place.is_file():
        digest.update(place.read_bytes())
        return digest.hexdigest()
    if not place.is_dir():
        return None
    for file in sorted(place.iterdir()):
        if file.suffix == ".json":
            digest.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
        elif file.suffix == ".safetensors":
            size = file.stat().st_size
            with file.open("rb") as data:
                digest.update(f"{file.name} {size}\n".encode() + data.read(ENDS))
                data.seek(max(0, size - ENDS), os.SEEK_SET)
                digest.update(data.read(ENDS))
    return digest.hexdigest()


def read_text_file(path: str, key: str) -> str:
    """A UTF-8 text; ``key`` of the experiment names it in errors.

    Raises:
        ValueError: the file is missing, or has other contents.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise ValueError(f"{key}: {path!r} cannot be read ({reason}); name a UTF-8 text file") from error
