"""Sources of checkpoint tensors: the source protocol, and safetensors directories."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from deepseek_attn.kernels.common.quant import decode_e8m0, encode_e8m0
from deepseek_attn.kernels.linear import FP4_GROUP, FP8_BLOCK, dequantize_weight
from deepseek_attn.layers.weights import Shard

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors library


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

    Raises:
        ValueError: the directory, the index, a shard or a tensor that the index names is missing, broken or truncated.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._files: dict[Path, safe_open] = {}
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

    def close(self) -> None:
        """Unmaps the shards; reading again maps them again."""
        self._files.clear()

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
            return _read_index(self.path / INDEX_FILE)
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
                f"{INDEX_FILE} puts {absent[0]} in {shard}, but it is not there"
                + (f" (nor are {len(absent) - 1} others)" if len(absent) > 1 else "")
                + ": index and shards are not of one checkpoint"
            )
        unlisted = sorted(tensors.keys() - listed) if listed is not None else []
        if unlisted:
            raise ValueError(
                f"{shard} holds {len(unlisted)} tensors that {INDEX_FILE} does not put there, such as {unlisted[0]}: "
                "index and shards are not of one checkpoint"
            )
        self._entries |= tensors
        self._shard_of |= dict.fromkeys(tensors, shard)


def _read_index(index: Path) -> dict[Path, set[str]]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            shards.setdefault(index.parent / file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"broken index {index}: expected JSON with a 'weight_map' of tensor -> file ({error!r})"
        ) from None
    if not shards:
        raise ValueError(f"broken index {index}: its weight_map is empty")
    for shard in sorted(shards):
        if shard.parent != index.parent:
            raise ValueError(f"broken index {index}: it names {shard}, which lies outside the checkpoint directory")
        if not shard.is_file():
            raise ValueError(f"shard {shard} is missing: {INDEX_FILE} puts {len(shards[shard])} tensors in it")
    return dict(sorted(shards.items()))


def read_header(shard: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, in the order of their bytes.

    Raises:
        ValueError: the header cannot be read or names a tensor twice; the file is shorter or longer than the header
            says; or tensors overlap, leave gaps, or have another size than their dtype and shape.
    """
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
        header = file.read(length)
    try:
        fields = json.loads(header, object_pairs_hook=_without_duplicates)
        ends = {name: tensor["data_offsets"][1] for name, tensor in fields.items() if name != "__metadata__"}
        tensors = {name: _tensor_info(name, fields[name]) for name in sorted(ends, key=lambda name: ends[name])}
        expected = 8 + length + max(ends.values(), default=0)
        if found == expected:
            safe_open(shard, framework="pt")  # checks that the tensors follow one another without gaps or overlaps
    except SafetensorError as error:
        raise ValueError(
            f"broken header of shard {shard}: {error}; tensors must follow one another without gaps or overlaps"
        ) from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"broken header of shard {shard}: {error!r}") from None
    if found != expected:
        what = "truncated shard" if found < expected else "bytes after the last tensor of shard"
        raise ValueError(f"{what} {shard}: expected {expected} bytes by its header, found {found}; fetch it again")
    return tensors


def _tensor_info(name: str, fields: dict[str, Any]) -> TensorInfo:
    dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    if dtype in DTYPES and TensorInfo.of(dtype, shape).nbytes != end - begin:
        raise ValueError(f"{name}: {end - begin} bytes for {dtype} {list(shape)}")
    return TensorInfo(dtype, shape, end - begin)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return found


def scale_name(name: str) -> str | None:
    """Name of the scale that would belong to the tensor ``name``; None if it is not a ``.weight``."""
    return name[: -len("weight")] + "scale" if name.endswith(".weight") else None


class StoredShards(NamedTuple):
    """A part of a logical weight, in places of the stored weight and of its stored scale."""

    weight: Shard
    scale: Shard


def stored_shards(info: TensorInfo, shard: Shard) -> StoredShards:
    """Where the part ``shard`` of a logical weight lies in the stored tensors; without a scale, ``scale`` is unused.

    Raises:
        ValueError: the part splits an FP8 block, an FP4 group or a byte.
    """
    per_weight = per_scale = 1  # logical values, along the dimension, that one stored value stands for
    if info.dtype in FP4_DTYPES and shard.dim == 1:
        per_weight, per_scale = 2, FP4_GROUP
    elif info.dtype == "F8_E4M3":
        per_scale = FP8_BLOCK[shard.dim]
    if any(value % unit for value in (shard.start, shard.size) for unit in (per_weight, per_scale)):
        raise ValueError(
            f"{shard.size} rows or columns from {shard.start} on of a {info.dtype} weight: a part must consist of "
            f"whole blocks of {max(per_weight, per_scale)}; use fewer ranks"
        )
    return StoredShards(*(Shard(shard.dim, shard.start // n, shard.size // n) for n in (per_weight, per_scale)))


def read_weight(
    source: CheckpointSource, name: str, shard: Shard | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tensor of published name with its scale, as a ``WeightSlot`` loads them; or a part of both.

    Returns:
        (tensor, None) when there is no scale; (``float8_e4m3fn``, float32 block grid); or (packed FP4 ``uint8``, e8m0
        ``uint8`` bytes).

    Raises:
        ValueError: an FP4 scale stored as numbers is not a power of two.
    """
    entries = source.entries()
    scale = scale_name(name)
    if shard is None:
        tensor = source.read(name)
        stored = source.read(scale) if scale in entries else None
    else:
        places = stored_shards(entries[name], shard)
        tensor = source.read_shard(name, places.weight)
        stored = source.read_shard(scale, places.scale) if scale in entries else None
    if stored is None:
        return tensor, None
    if entries[name].dtype not in FP4_DTYPES:
        return tensor, decode_e8m0(stored)
    return tensor, stored if stored.dtype == torch.uint8 else encode_e8m0(stored)


def read_float32(source: CheckpointSource, name: str) -> torch.Tensor:
    """The values of a stored tensor of published name, dequantised to float32 (``.weight`` with its ``.scale``).

    Raises:
        ValueError: the tensor holds integers.
    """
    weight, scale = read_weight(source, name)
    if scale is None and not weight.dtype.is_floating_point:
        raise ValueError(f"{name} is stored as {source.entries()[name].dtype} without a scale: it has no float values")
    return dequantize_weight(weight, scale)
