"""Where checkpoint tensors come from: the source protocol, and safetensors directories.

A safetensors file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte offsets) and the
bytes of all tensors. It is read here directly, so that a dtype which torch lacks is no obstacle and a part of a tensor
costs only its own bytes.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepseek_attn.kernels.common.quant import decode_e8m0, encode_e8m0
from deepseek_attn.kernels.linear import FP4_GROUP, FP8_BLOCK, dequantize_weight
from deepseek_attn.layers.weights import Shard

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors library

# Header dtype -> (dtype of the tensor that `read` returns, bits per element). Scale bytes and packed nibbles stay
# bytes: converting them as numbers would turn an exponent byte of 120 into 120.0 instead of 2**-7.
DTYPES = {
    "F64": (torch.float64, 64),
    "F32": (torch.float32, 32),
    "F16": (torch.float16, 16),
    "BF16": (torch.bfloat16, 16),
    "F8_E4M3": (torch.float8_e4m3fn, 8),
    "F8_E8M0": (torch.uint8, 8),
    "F4": (torch.uint8, 4),
    "I64": (torch.int64, 64),
    "I32": (torch.int32, 32),
    "I16": (torch.int16, 16),
    "I8": (torch.uint8, 8),
    "U8": (torch.uint8, 8),
    "BOOL": (torch.bool, 8),
}
FP4_DTYPES = ("I8", "U8", "F4")


@dataclass(frozen=True)
class TensorInfo:
    """What the header of a checkpoint says about one tensor.

    Attributes:
        dtype: dtype as the safetensors header spells it, such as ``"F8_E4M3"``.
        shape: shape in the header. Packed FP4 counts bytes when stored as I8 or U8, values when stored as F4.
        nbytes: bytes of its data.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class CheckpointSource(ABC):
    """Named tensors with their headers, read one at a time."""

    @abstractmethod
    def entries(self) -> dict[str, TensorInfo]:
        """All tensors in the order in which they are cheapest to read."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU. F8_E8M0, I8 and U8 come as ``uint8``, F4 as ``uint8[..., n/2]``, others as are."""

    def read_part(self, name: str, index: int, count: int) -> torch.Tensor:
        """The ``index``-th of ``count`` equal contiguous parts of a tensor, its first two dimensions merged."""
        tensor = self.read(name).flatten(0, 1)
        rows = tensor.shape[0] // count
        return tensor[index * rows : (index + 1) * rows].clone()

    def read_shard(self, name: str, shard: Shard) -> torch.Tensor:
        """A part of a tensor, in places of the tensor that `read` returns."""
        return self.read(name).narrow(shard.dim, shard.start, shard.size).clone()


class SafetensorsSource(CheckpointSource):
    """A directory with ``model.safetensors.index.json`` and its shards, or with a single ``model.safetensors``.

    All headers are read and checked at once; tensor data only when asked for. Usable as a context manager.

    Args:
        path: checkpoint directory.

    Raises:
        ValueError: the directory, the index, a shard or a tensor that the index names is missing, broken or truncated.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._files = {}
        self._entries: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        for shard, listed in self._shards().items():
            self._add_shard(shard, listed)

    def entries(self) -> dict[str, TensorInfo]:
        return self._entries

    def read(self, name: str) -> torch.Tensor:
        info = self._entry(name)
        return self._read(name, info.shape, 0, info.nbytes)

    def read_part(self, name: str, index: int, count: int) -> torch.Tensor:
        info = self._entry(name)
        shape = (info.shape[0] * info.shape[1] // count, *info.shape[2:])
        return self._read(name, shape, index * (info.nbytes // count), info.nbytes // count)

    def read_shard(self, name: str, shard: Shard) -> torch.Tensor:
        info = self._entry(name)
        if len(info.shape) > 2 or info.dtype == "F4":
            return super().read_shard(name, shard)
        if shard.dim == 0:
            row = info.nbytes // info.shape[0]
            return self._read(name, shard.of(info.shape), shard.start * row, shard.size * row)
        rows, columns = info.shape
        item = info.nbytes // (rows * columns)
        places = [((row * columns + shard.start) * item, shard.size * item) for row in range(rows)]
        return self._read(name, shard.of(info.shape), *zip(*places, strict=True))

    def close(self) -> None:
        """Closes the open shards; reading again opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _shards(self) -> dict[Path, set[str] | None]:
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
        for name, (info, offset) in sorted(tensors.items(), key=lambda item: item[1][1]):
            self._entries[name] = info
            self._places[name] = (shard, offset)

    def _entry(self, name: str) -> TensorInfo:
        if name not in self._entries:
            raise ValueError(f"no tensor {name} in {self.path}")
        return self._entries[name]

    def _read(
        self, name: str, shape: tuple[int, ...], start: int | Sequence[int], nbytes: int | Sequence[int]
    ) -> torch.Tensor:
        """Bytes of the tensor from ``start`` on, or several stretches of them one after the other."""
        dtype = self._entries[name].dtype
        if dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {dtype}: supported are {', '.join(DTYPES)}")
        shard, offset = self._places[name]
        starts, sizes = ([start], [nbytes]) if isinstance(start, int) else (start, nbytes)
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        buffer = memoryview(data.numpy())
        for first, size in zip(starts, sizes, strict=True):
            self._fill(shard, offset + first, buffer[:size])
            buffer = buffer[size:]
        if dtype == "F4":
            shape = (*shape[:-1], shape[-1] // 2)
        return data.view(DTYPES[dtype][0]).reshape(shape)

    def _fill(self, shard: Path, offset: int, buffer: memoryview) -> None:
        if shard not in self._files:
            self._files[shard] = open(shard, "rb", buffering=0)  # noqa: SIM115 (kept open until close)
        file = self._files[shard]
        file.seek(offset)
        while buffer:
            count = file.readinto(buffer)
            if not count:
                raise ValueError(f"truncated shard {shard}: it shrank while it was read")
            buffer = buffer[count:]


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


def read_header(shard: Path) -> dict[str, tuple[TensorInfo, int]]:
    """The tensors of one safetensors file: name -> (info, byte offset in the file).

    Raises:
        ValueError: the header cannot be read, or the file is shorter or longer than the header says.
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
    tensors = _parse_header(shard, header)
    expected = max((offset + info.nbytes for info, offset in tensors.values()), default=8 + length)
    if found != expected:
        what = "truncated shard" if found < expected else "bytes after the last tensor of shard"
        raise ValueError(f"{what} {shard}: expected {expected} bytes by its header, found {found}; fetch it again")
    return tensors


def _parse_header(shard: Path, header: bytes) -> dict[str, tuple[TensorInfo, int]]:
    tensors = {}
    try:
        for name, fields in json.loads(header).items():
            if name == "__metadata__":
                continue
            begin, end = fields["data_offsets"]
            info = TensorInfo(fields["dtype"], tuple(fields["shape"]), end - begin)
            if info.dtype in DTYPES and info.nbytes * 8 != math.prod(info.shape) * DTYPES[info.dtype][1]:
                raise ValueError(f"{name}: {info.nbytes} bytes for {info.dtype} {list(info.shape)}")
            tensors[name] = (info, 8 + len(header) + begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"broken header of shard {shard}: {error!r}") from None
    return tensors


def scale_name(name: str) -> str | None:
    """Name of the scale that would belong to the tensor ``name``; None if it is not a ``.weight``."""
    return name[: -len("weight")] + "scale" if name.endswith(".weight") else None


def stored_shards(info: TensorInfo, shard: Shard) -> tuple[Shard, Shard]:
    """Where a part of a logical weight lies in what is stored of it: in the weight, and in its scale if it has one.

    Raises:
        ValueError: the part cuts an FP8 block, an FP4 group or a byte in two.
    """
    if info.dtype in FP4_DTYPES:
        units = ((1, 1), (2, FP4_GROUP))[shard.dim]
    elif info.dtype == "F8_E4M3":
        units = (1, FP8_BLOCK[shard.dim])
    else:
        units = (1, 1)
    if any(value % unit for value in (shard.start, shard.size) for unit in units):
        raise ValueError(
            f"{shard.size} rows or columns from {shard.start} on of a {info.dtype} weight: a part must consist of "
            f"whole blocks of {max(units)}; use fewer ranks"
        )
    return tuple(Shard(shard.dim, shard.start // unit, shard.size // unit) for unit in units)


def read_weight(
    source: CheckpointSource, name: str, shard: Shard | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tensor of published name with its scale, as a ``WeightSlot`` takes them; or a part of both.

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
        tensor = source.read_shard(name, places[0])
        stored = source.read_shard(scale, places[1]) if scale in entries else None
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
