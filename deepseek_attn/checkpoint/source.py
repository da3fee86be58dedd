"""Sources of checkpoint tensors: the source protocol, and safetensors directories."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from deepseek_attn.kernels.common.quant import decode_e8m0, encode_e8m0
from deepseek_attn.kernels.engram import TableRows
from deepseek_attn.kernels.linear import FP4_GROUP, dequantize_weight
from deepseek_attn.layers.weights import Shard, check_finite
from deepseek_attn.text.token_numbers import read_token_numbers
from deepseek_attn.utils.json_files import parse_json, read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors library
SIZE_PROBLEMS = ("incomplete metadata", "invalid shape")  # in its errors where nothing but sizes is wrong


class StoredDtype(NamedTuple):
    """A dtype of safetensors files.

    Attributes:
        torch: dtype of the tensor that `CheckpointSource.read` returns.
        bits: bits of one value.
    """

    torch: torch.dtype
    bits: int


# By the name that a header has for it. Scale bytes and packed nibbles stay bytes: converting them as numbers would turn
# an exponent byte of 120 into 120.0 instead of 2**-7.
DTYPES = {
    "F64": StoredDtype(torch.float64, 64),
    "F32": StoredDtype(torch.float32, 32),
    "F16": StoredDtype(torch.float16, 16),
    "BF16": StoredDtype(torch.bfloat16, 16),
    "F8_E4M3": StoredDtype(torch.float8_e4m3fn, 8),
    "F8_E8M0": StoredDtype(torch.uint8, 8),
    "F4": StoredDtype(torch.uint8, 4),
    "I64": StoredDtype(torch.int64, 64),
    "I32": StoredDtype(torch.int32, 32),
    "I16": StoredDtype(torch.int16, 16),
    "I8": StoredDtype(torch.uint8, 8),
    "U8": StoredDtype(torch.uint8, 8),
    "BOOL": StoredDtype(torch.bool, 8),
}
FP4_DTYPES = ("I8", "U8", "F4")


@dataclass(frozen=True)
class TensorInfo:
    """Entry of one tensor in the header of a checkpoint.

    Attributes:
        dtype: dtype as the safetensors header spells it, such as ``"F8_E4M3"``.
        shape: shape in the header. Packed FP4 counts bytes when stored as I8 or U8, values when stored as F4.
        nbytes: bytes of its data.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        """The header of a contiguous tensor; ``dtype`` is one of `DTYPES`."""
        return cls(dtype, tuple(shape), math.prod(shape) * DTYPES[dtype].bits // 8)


class CheckpointSource(ABC):
    """Named tensors with their headers, read one at a time."""

    @abstractmethod
    def entries(self) -> dict[str, TensorInfo]:
        """All tensors in the order in which they are cheapest to read."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU. F8_E8M0, I8 and U8 come as ``uint8``, F4 as ``uint8[..., n/2]``, others as are."""

    def view(self, name: str) -> torch.Tensor:
        """The same tensor for a short look: it may share memory with the source, so it must not be changed or kept."""
        return self.read(name)

    def read_part(self, name: str, index: int, count: int) -> torch.Tensor:
        """The ``index``-th of ``count`` equal contiguous parts of a tensor, its first two dimensions merged."""
        tensor = self.view(name).flatten(0, 1)
        size = tensor.shape[0] // count
        return tensor.narrow(0, index * size, size).clone()

    def read_rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor by number, int64 ``[n]``; the others are not read where the source can avoid it."""
        tensor = self.view(name)
        return tensor.view(torch.uint8)[rows].view(tensor.dtype) if tensor.element_size() == 1 else tensor[rows]

    def token_numbers(self, count: int, vocab_size: int) -> Sequence[int]:
        """``count`` different numbers for the tokens of a vocabulary: what Engram hashes in place of token ids.

        Raises:
            ValueError: the source has no tokenizer, or one that does not give as many.
        """
        raise ValueError(f"a {type(self).__name__} has no tokenizer, and Engram hashes the texts of tokens")

    def read_shard(self, name: str, shard: Shard) -> torch.Tensor:
        """A part of a tensor, in places of the tensor that `read` returns."""
        part = self.view(name).narrow(shard.dim, shard.start, shard.size)
        return part.clone(memory_format=torch.contiguous_format)


class SafetensorsSource(CheckpointSource):
    """A directory with ``model.safetensors.index.json`` and its shards, or with a single ``model.safetensors``.

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
        """Shard -> the names that the index puts there (None: there is no index)."""
        if not self.path.exists():
            raise ValueError(f"checkpoint directory {self.path} does not exist")
        if not self.path.is_dir():
            raise ValueError(
                f"{self.path} is not a directory: give the directory that holds config.json and the shards"
            )
        if (self.path / INDEX_FILE).is_file():
            shards = read_index(self.path / INDEX_FILE, self._needed)
            return {shard: listed for shard, listed in shards.items() if shard.is_file()}
        if (self.path / SINGLE_FILE).is_file():
            return {self.path / SINGLE_FILE: None}
        others = len(list(self.path.glob("*.safetensors")))
        hint = f"; it has {others} other .safetensors files, whose index is missing" if others else ""
        raise ValueError(f"no safetensors checkpoint in {self.path}: neither {INDEX_FILE} nor {SINGLE_FILE}{hint}")

    def _add_shard(self, shard: Path, listed: set[str] | None) -> None:
        tensors = read_header(shard)
        absent = sorted((listed or set()) - tensors.keys())
        if absent:
            raise ValueError(
                f"{INDEX_FILE} puts {_cut(absent[0])} in {shard}, but it is not there"
                + (f" (nor are {len(absent) - 1} others)" if len(absent) > 1 else "")
                + ": index and shards are not of one checkpoint"
            )
        unlisted = sorted(tensors.keys() - listed) if listed is not None else []
        if unlisted:
            raise ValueError(
                f"{shard} holds {len(unlisted)} tensors that {INDEX_FILE} does not put there, such as "
                f"{_cut(unlisted[0])}: index and shards are not of one checkpoint"
            )
        self._entries |= tensors
        self._shard_of |= dict.fromkeys(tensors, shard)


def expect_random_reads(mapped: torch.Tensor) -> None:
    """Tells the system that rows of a mapped tensor are read in no order: it then reads their pages alone.

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
            raise ValueError(f"{what}: it names {_cut(str(shard))}, which lies outside the checkpoint directory")
        # unlike `Path.is_file`, False for a name that no file can have
        if not os.path.isfile(shard) and any(map(needed, shards[shard])):
            raise ValueError(
                f"shard {_cut(str(shard))} is missing: {INDEX_FILE} puts {len(shards[shard])} tensors in it"
            )
    return dict(sorted(shards.items()))


def read_header(shard: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, in the order of their bytes.

    The safetensors library checks it: types, sizes, and that tensors follow one another from the first byte to the
    last. It keeps one of two entries of the same name, which is therefore looked for here.

    Raises:
        ValueError: the header cannot be read or names a tensor twice; the file is shorter or longer than the header
            says; or tensors overlap, leave gaps, or have another size than their dtype and shape.
    """
    header, found = _header_bytes(shard)
    what, problem = f"broken header of shard {shard}", ""
    try:
        safe_open(shard, framework="pt")
    except SafetensorError as error:
        problem = _cut(str(error))
        if not any(kind in problem for kind in SIZE_PROBLEMS):
            raise ValueError(f"{what}: {problem}; tensors must follow one another without gaps or overlaps") from None
    fields = parse_json(header, what)  # of the right types, otherwise safe_open would have said so
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
        raise ValueError(_cut(f"{what}: {end - begin} bytes for {dtype} {list(shape)}"))
    return TensorInfo(dtype, shape, end - begin)


def _header_bytes(shard: Path) -> tuple[bytes, int]:
    """The header of a shard, not decoded, and the size of the file."""
    found = shard.stat().st_size
    with open(shard, "rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(f"truncated shard {shard}: expected at least 8 bytes, found {found}")
        if start == b"version ":
            raise ValueError(f"{shard} is a Git LFS pointer, not the shard itself: fetch it with `git lfs pull`")
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"broken shard {shard}: its header would be {length} bytes; is it a safetensors file?")
        if found < 8 + length:
            raise ValueError(f"truncated shard {shard}: expected at least {8 + length} bytes, found {found}")
        return file.read(length), found


def _cut(text: str) -> str:
    """The beginning of a text that a message quotes."""
    return text if len(text) <= 300 else f"{text[:300]}..."


def scale_name(name: str) -> str | None:
    """Name of the scale that would belong to the tensor ``name``; None if it is not a ``.weight``."""
    return name[: -len("weight")] + "scale" if name.endswith(".weight") else None


class StoredShards(NamedTuple):
    """A part of a logical weight, in places of the stored weight and of its stored scale."""

    weight: Shard
    scale: Shard


def stored_shards(info: TensorInfo, shard: Shard, block: int = 128) -> StoredShards:
    """Where the part ``shard`` of a logical weight lies in the stored tensors; without a scale, ``scale`` is unused.

    Args:
        block: rows and columns of an FP8 block.

    Raises:
        ValueError: the part splits an FP8 block, an FP4 group or a byte.
    """
    per_weight = per_scale = 1  # logical values, along the dimension, that one stored value stands for
    if info.dtype in FP4_DTYPES and shard.dim == 1:
        per_weight, per_scale = 2, FP4_GROUP
    elif info.dtype == "F8_E4M3":
        per_scale = block
    if any(value % unit for value in (shard.start, shard.size) for unit in (per_weight, per_scale)):
        raise ValueError(
            f"{shard.size} rows or columns from {shard.start} on of a {info.dtype} weight: a part must consist of "
            f"whole blocks of {max(per_weight, per_scale)}; use fewer ranks"
        )
    return StoredShards(*(Shard(shard.dim, shard.start // n, shard.size // n) for n in (per_weight, per_scale)))


def read_weight(
    source: CheckpointSource, name: str, shard: Shard | None = None, block: int = 128
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tensor of published name with its scale, as a ``WeightSlot`` loads them; or a part of both.

    Args:
        block: rows and columns of an FP8 block.

    Returns:
        (tensor, None) when there is no scale; (``float8_e4m3fn``, float32 block grid); or (packed FP4 ``uint8``, e8m0
        ``uint8`` bytes).

    Raises:
        ValueError: a scale is not finite, or an FP4 scale stored as numbers is not a power of two.
    """
    entries = source.entries()
    scale = scale_name(name)
    if shard is None:
        tensor = source.read(name)
        stored = source.read(scale) if scale in entries else None
    else:
        places = stored_shards(entries[name], shard, block)
        tensor = source.read_shard(name, places.weight)
        stored = source.read_shard(scale, places.scale) if scale in entries else None
    if stored is None:
        return tensor, None
    try:
        _check_scales(stored)
    except ValueError as error:
        raise ValueError(f"{scale}: {error}") from None
    if entries[name].dtype not in FP4_DTYPES:
        return tensor, stored.float() if stored.is_meta else decode_e8m0(stored)
    return tensor, stored if stored.dtype == torch.uint8 else encode_e8m0(stored)


def _check_scales(stored: torch.Tensor) -> None:
    """ValueError for scales that are not finite; e8m0 bytes have one such value, which is the largest."""
    if stored.is_meta:
        return
    if stored.dtype != torch.uint8:
        check_finite(stored)
    elif stored.numel() and stored.amax() == 255:
        raise ValueError("it holds the e8m0 byte 255, which is NaN")


def holds_nan(tensor: torch.Tensor) -> bool:
    """Whether a weight as `read_weight` returns it holds a NaN: a pass over its bytes, without temporary tensors."""
    if not tensor.numel() or tensor.is_meta:
        return False
    if tensor.dtype == torch.float8_e4m3fn:  # bytes 0x7F and 0xFF
        return bool(tensor.view(torch.int8).amax() == 0x7F) or bool(tensor.view(torch.uint8).amax() == 0xFF)
    # infinities of both signs add up to NaN too
    return tensor.is_floating_point() and bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def read_table_rows(source: CheckpointSource, name: str, rows: torch.Tensor) -> TableRows:
    """Rows of a table of published name with their scales, which are per row.

    Raises:
        ValueError: a scale is not finite.
    """
    scale = scale_name(name) or ""
    scales = source.read_rows(scale, rows)
    try:
        _check_scales(scales)
    except ValueError as error:
        raise ValueError(f"{scale}: {error}") from None
    return TableRows(source.read_rows(name, rows), scales)


def read_float32(source: CheckpointSource, name: str) -> torch.Tensor:
    """The values of a stored tensor of published name, dequantised to float32 (``.weight`` with its ``.scale``).

    Raises:
        ValueError: the tensor holds integers.
    """
    weight, scale = read_weight(source, name)
    if scale is None and not weight.dtype.is_floating_point:
        raise ValueError(f"{name} is stored as {source.entries()[name].dtype} without a scale: it has no float values")
    return dequantize_weight(weight, scale)
