"""Weights with their scales, read from any source: whole, a rank's part of them, or some rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepseek_attn.checkpoint.source import FP4_DTYPES, CheckpointSource, TensorInfo
from deepseek_attn.kernels.common.quant import FP4_GROUP, decode_e8m0, encode_e8m0
from deepseek_attn.kernels.engram import TableRows
from deepseek_attn.kernels.linear.formats import dequantize_weight
from deepseek_attn.layers.weights import Shard, check_finite


def scale_name(name: str) -> str | None:
    """Name of the scale that would belong to the tensor ``name``; None if it is not a ``.weight``."""
    return name[: -len("weight")] + "scale" if name.endswith(".weight") else None


class StoredShards(NamedTuple):
    """A part of a logical weight, in places of the stored weight and of its stored scale."""

    weight: Shard
    scale: Shard


def stored_shards(info: TensorInfo, shard: Shard, block: int = 128) -> StoredShards:
    """Places of the part ``shard`` of a logical weight in the stored tensors; without a scale, ``scale`` is unused.

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
        (tensor, None) without a scale; (``float8_e4m3fn``, float32 block grid); or (packed FP4 ``uint8``, e8m0
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
