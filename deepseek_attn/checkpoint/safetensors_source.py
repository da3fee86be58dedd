"""Directories of safetensors files as a source: index, shards and their headers, checked before anything is read."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open

from deepseek_attn.checkpoint.source import DTYPES, CheckpointSource, TensorInfo, shortened
from deepseek_attn.layers.weights import Shard
from deepseek_attn.text.token_numbers import read_token_numbers
from deepseek_attn.utils.hub import check_path
from deepseek_attn.utils.json_files import parse_json, read_json
from deepseek_attn.utils.other_formats import LFS_POINTER, SINGLE_RANK, contents, interrupted

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors library
SIZE_PROBLEMS = ("incomplete metadata", "invalid shape")  # in its errors where nothing but sizes is wrong


class SafetensorsSource(CheckpointSource):
    """A directory with ``model.safetensors.index.json`` and its shards, or with a single ``model.safetensors``.

    The ``model0-mp1.safetensors`` that DeepSeek's ``convert.py`` writes is a single file too.

    All headers are read and checked at once. Whole tensors and contiguous parts of them are read by file, by any number
    of threads: no page of the file stays in the memory of this process. `view`, rows and other parts are read through a
    mapping. Usable as a context manager.

    Args:
        path: checkpoint directory.
        needed: whether a tensor of that name will be read; shards without any such tensor may be missing.

    Raises:
        ValueError: the directory, the index, a shard or a tensor that the index names is missing, broken or truncated.
    """

    def __init__(self, path: str | Path, needed: Callable[[str], bool] = lambda name: True):
        check_path(path, "a checkpoint is named by its folder")
        self.path = Path(path)
        try:
            str(self.path.resolve()).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{str(self.path)!r}: the name of the folder is not UTF-8, which the package safetensors needs: "
                "rename it"
            ) from None
        self._needed = needed
        self._files: dict[Path, safe_open] = {}
        self._opened: dict[Path, ShardFile] = {}
        self._opening = threading.Lock()
        self._found: dict[Path, os.stat_result] = {}
        self._read_by_row: set[str] = set()
        self._entries: dict[str, TensorInfo] = {}
        self._places: dict[str, ShardPlace] = {}
        for shard, listed in self._shards().items():
            self._add_shard(shard, listed)

    def entries(self) -> dict[str, TensorInfo]:
        return self._entries

    @property
    def reads_in_threads(self) -> bool:
        return True

    def read(self, name: str) -> torch.Tensor:
        return self._read(name, self._stored_shape(name))

    def read_part(self, name: str, index: int, count: int) -> torch.Tensor:
        first, second, *rest = self._stored_shape(name)
        rows = first * second // count
        return self._read(name, (rows, *rest), index * rows)

    def read_shard(self, name: str, shard: Shard) -> torch.Tensor:
        shape = self._stored_shape(name)
        if shard.dim == 0:
            return self._read(name, shard.of(shape), shard.start)
        mapped = self.view(name)
        part = mapped.narrow(shard.dim, shard.start, shard.size).clone(memory_format=torch.contiguous_format)
        advise(mapped, "MADV_DONTNEED")
        return part

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor that `read` returns."""
        if name not in self._entries:
            raise ValueError(f"no tensor {name} in {self.path}")
        info = self._entries[name]
        if info.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {info.dtype}: supported are {', '.join(DTYPES)}")
        return (*info.shape[:-1], info.shape[-1] // 2) if DTYPES[info.dtype].bits == 4 else info.shape

    def _read(self, name: str, shape: tuple[int, ...], skipped: int = 0) -> torch.Tensor:
        """Values of this shape from a tensor, behind ``skipped`` rows as wide as the shape's."""
        tensor = torch.empty(shape, dtype=DTYPES[self._entries[name].dtype].torch, device="cpu")
        place = self._places[name]
        with self._opening:
            if place.shard not in self._opened:
                self._opened[place.shard] = ShardFile(place.shard, self._found[place.shard])
            file = self._opened[place.shard]
        file.read_into(tensor, place.start + skipped * prod(shape[1:]) * tensor.itemsize)
        return tensor

    def view(self, name: str) -> torch.Tensor:
        self._stored_shape(name)
        shard = self._places[name].shard
        if shard not in self._files:
            self._files[shard] = safe_open(shard, framework="pt")
        tensor = self._files[shard].get_tensor(name)
        return tensor.view(torch.uint8) if DTYPES[self._entries[name].dtype].torch == torch.uint8 else tensor

    def read_rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        if name not in self._read_by_row:
            # otherwise the system may read megabytes around each row
            advise(self.view(name), "MADV_RANDOM")
            self._read_by_row.add(name)
        return super().read_rows(name, rows)

    def token_numbers(self, count: int, vocab_size: int) -> Sequence[int]:
        return read_token_numbers(self.path, count, vocab_size)

    def close(self) -> None:
        """Unmaps and closes the shards; reading again opens them again."""
        self._files.clear()
        with self._opening:
            self._opened.clear()
        self._read_by_row.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _shards(self) -> Mapping[Path, set[str] | None]:
        """Shard -> tensor names by the index (None: no index file)."""
        if not self.path.exists():
            raise ValueError(f"checkpoint directory {self.path} does not exist")
        if not self.path.is_dir():
            raise ValueError(
                f"{self.path} is not a directory: give the directory that holds config.json and the shards"
            )
        if (self.path / INDEX_FILE).is_file():
            shards = read_index(self.path / INDEX_FILE, self._needed)
            return {shard: listed for shard, listed in shards.items() if shard.is_file()}
        for single in (SINGLE_FILE, SINGLE_RANK):
            if (self.path / single).is_file():
                return {self.path / single: None}
        hint = contents(self.path)
        others = len(list(self.path.glob("*.safetensors")))
        if others and not hint:
            hint = f"; it has {others} other .safetensors files, whose index is missing"
        raise ValueError(f"no safetensors checkpoint in {self.path}: neither {INDEX_FILE} nor {SINGLE_FILE}{hint}")

    def _add_shard(self, shard: Path, listed: set[str] | None) -> None:
        self._found[shard] = shard.stat()
        tensors, starts = read_header(shard)
        absent = sorted((listed or set()) - tensors.keys())
        if absent:
            raise ValueError(
                f"{INDEX_FILE} puts {shortened(absent[0])} in {shard}, but it is not there"
                + (f" (nor are {len(absent) - 1} others)" if len(absent) > 1 else "")
                + ": index and shards are not of one checkpoint"
            )
        unlisted = sorted(tensors.keys() - listed) if listed is not None else []
        if unlisted:
            raise ValueError(
                f"{shard} holds {len(unlisted)} tensors that {INDEX_FILE} does not put there, such as "
                f"{shortened(unlisted[0])}: index and shards are not of one checkpoint"
            )
        self._entries |= tensors
        self._places |= {name: ShardPlace(shard, start) for name, start in starts.items()}


class ShardPlace(NamedTuple):
    """Where a tensor's bytes begin."""

    shard: Path
    start: int


class ShardFile:
    """An open shard that several threads read. The file is closed when the object is freed.

    Args:
        found: of the file when its header was read.

    Raises:
        ValueError: the file was removed or replaced.
    """

    def __init__(self, path: Path, found: os.stat_result):
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"shard {path} cannot be read: {error.strerror}") from error
        weakref.finalize(self, self._file.close)
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
            raise ValueError(f"shard {path} was changed after its header was read: load the checkpoint again")
        self._seeking = threading.Lock()

    def read_into(self, tensor: torch.Tensor, start: int) -> None:
        """Fills a contiguous tensor with the file's bytes from ``start`` on.

        Raises:
            ValueError: the file cannot be read, or has become shorter.
        """
        values = tensor.reshape(-1).view(torch.uint8).numpy().data
        while values:
            try:
                count = self._read_some(values, start)
            except OSError as error:
                raise ValueError(f"shard {self.path} cannot be read: {error.strerror}") from error
            if not count:
                raise ValueError(f"shard {self.path} has become shorter since its header was read: fetch it again")
            values, start = values[count:], start + count

    def _read_some(self, values: memoryview, start: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [values], start)
        with self._seeking:  # not a Unix system
            self._file.seek(start)
            return self._file.readinto(values) or 0


def advise(mapped: torch.Tensor, name: str) -> None:
    """Advises the system about the pages of a mapped tensor; ``name``: of a constant of the module `mmap`."""
    if not hasattr(mmap, name):  # not a Unix system
        return
    start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = mapped.data_ptr() + mapped.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), getattr(mmap, name))


def read_index(index: Path, needed: Callable[[str], bool]) -> dict[Path, set[str]]:
    """The shards that an index names, there or not, with the tensors in each.

    Raises:
        ValueError: the index is broken, empty, or names a file outside its folder, or a shard with a needed tensor is
            missing.
    """
    what = f"broken index {index}"
    content = read_json(index, what, MAX_HEADER_BYTES)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{what}: expected a JSON object whose 'weight_map' is an object of tensor -> file")
    if not weight_map:
        raise ValueError(f"{what}: its weight_map is empty")
    shards: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        shards.setdefault(index.parent / file, set()).add(name)
    for shard in sorted(shards):
        if shard.parent != index.parent:
            raise ValueError(f"{what}: it names {shortened(str(shard))}, which lies outside the checkpoint directory")
        # unlike `Path.is_file`, False for a name that no file can have
        if not os.path.isfile(shard) and any(map(needed, shards[shard])):
            raise ValueError(
                f"shard {shortened(str(shard))} is missing: {INDEX_FILE} puts {len(shards[shard])} tensors in it"
                f"{interrupted(index.parent)}"
            )
    return dict(sorted(shards.items()))


def read_header(shard: Path) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """The tensors of one safetensors file in the order of their bytes, and where in the file each begins.

    The safetensors library checks types, sizes, and that tensors cover the file without gaps. It keeps one of two
    entries with the same name, so duplicates are searched here.

    Raises:
        ValueError: the header cannot be read or names a tensor twice; the file is shorter or longer than the header
            requires; or tensors overlap, leave gaps, or have another size than their dtype and shape.
    """
    header, found = _header_bytes(shard)
    what, problem = f"broken header of shard {shard}", ""
    try:
        safe_open(shard, framework="pt")
    except SafetensorError as error:
        problem = shortened(str(error))
        if not any(kind in problem for kind in SIZE_PROBLEMS):
            raise ValueError(f"{what}: {problem}; tensors must follow one another without gaps or overlaps") from None
    fields = parse_json(header, what)  # the types are right: safe_open has checked them
    fields.pop("__metadata__", None)
    entries = sorted(fields.items(), key=lambda item: item[1]["data_offsets"][1])
    tensors = {name: _tensor_info(f"{what}: {name}", entry) for name, entry in entries}
    if problem:
        expected = 8 + len(header) + max((entry["data_offsets"][1] for _, entry in entries), default=0)
        what = "truncated shard" if found < expected else "bytes after the last tensor of shard"
        raise ValueError(f"{what} {shard}: expected {expected} bytes by its header, found {found}; fetch it again")
    return tensors, {name: 8 + len(header) + entry["data_offsets"][0] for name, entry in entries}


def _tensor_info(what: str, fields: dict[str, Any]) -> TensorInfo:
    dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    if dtype in DTYPES and TensorInfo.of(dtype, shape).nbytes != end - begin:
        raise ValueError(shortened(f"{what}: {end - begin} bytes for {dtype} {list(shape)}"))
    return TensorInfo(dtype, shape, end - begin)


def _header_bytes(shard: Path) -> tuple[bytes, int]:
    """The header of a shard, not decoded, and the size of the file."""
    found = shard.stat().st_size
    with open(shard, "rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(f"truncated shard {shard}: expected at least 8 bytes, found {found}")
        if LFS_POINTER.startswith(start):
            raise ValueError(f"{shard} is a Git LFS pointer, not the shard itself: fetch it with `git lfs pull`")
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"broken shard {shard}: its header would be {length} bytes; is it a safetensors file?")
        if found < 8 + length:
            raise ValueError(f"truncated shard {shard}: expected at least {8 + length} bytes, found {found}")
        return file.read(length), found
