"""Directories of safetensors files as a source: index, shards and their headers, checked before anything is read."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deepseek_attn.checkpoint.source import DTYPES, CheckpointSource, TensorInfo, shortened
from deepseek_attn.text.token_numbers import read_token_numbers
from deepseek_attn.utils.json_files import parse_json, read_json
from deepseek_attn.utils.other_formats import LFS_POINTER, SINGLE_RANK, contents, interrupted

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors library
SIZE_PROBLEMS = ("incomplete metadata", "invalid shape")  # in its errors where nothing but sizes is wrong


class SafetensorsSource(CheckpointSource):
    """A directory with ``model.safetensors.index.json`` and its shards, or with a single ``model.safetensors``.

    The ``model0-mp1.safetensors`` that DeepSeek's ``convert.py`` writes is a single file too.

    All headers are read and checked at once. Files are mapped into memory, so that reading a part of a tensor costs its
    own bytes only. Usable as a context manager.

    Args:
        path: checkpoint directory.
        needed: whether a tensor of that name will be read; shards without any such tensor may be missing.

    Raises:
        ValueError: the directory, the index, a shard or a tensor that the index names is missing, broken or truncated.
    """

    def __init__(self, path: str | Path, needed: Callable[[str], bool] = lambda name: True):
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
        self._read_by_row: set[str] = set()
        self._entries: dict[str, TensorInfo] = {}
        self._shard_of: dict[str, Path] = {}
        for shard, listed in self._shards().items():
            self._add_shard(shard, listed)

    def entries(self) -> dict[str, TensorInfo]:
        return self._entries

    def read(self, name: str) -> torch.Tensor:
        return self.view(name).clone()

    def view(self, name: str) -> torch.Tensor:
        if name not in self._entries:
            raise ValueError(f"no tensor {name} in {self.path}")
        dtype = self._entries[name].dtype
        if dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {dtype}: supported are {', '.join(DTYPES)}")
        shard = self._shard_of[name]
        if shard not in self._files:
            self._files[shard] = safe_open(shard, framework="pt")
        tensor = self._files[shard].get_tensor(name)
        return tensor.view(torch.uint8) if DTYPES[dtype].torch == torch.uint8 else tensor

    def read_rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        if name not in self._read_by_row:
            expect_random_reads(self.view(name))
            self._read_by_row.add(name)
        return super().read_rows(name, rows)

    def token_numbers(self, count: int, vocab_size: int) -> Sequence[int]:
        return read_token_numbers(self.path, count, vocab_size)

    def close(self) -> None:
        """Unmaps the shards; reading again maps them again."""
        self._files.clear()
        self._read_by_row.clear()

    def __enter__(self) -> SafetensorsSource:
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
        tensors = read_header(shard)
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
        self._shard_of |= dict.fromkeys(tensors, shard)


def expect_random_reads(mapped: torch.Tensor) -> None:
    """Advises the system of random access to a mapped tensor: it then reads only the pages of the requested rows.

    Otherwise it may read megabytes around each row.
    """
    if not hasattr(mmap, "MADV_RANDOM"):  # not a Unix system
        return
    start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = mapped.data_ptr() + mapped.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_RANDOM)


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


def read_header(shard: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, in the order of their bytes.

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
    return tensors


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
