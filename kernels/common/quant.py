"""Quantisers of DeepSeek-V4: FP8 (e4m3) and FP4 (e2m1) values under power-of-two (e8m0) scales.

Source: DeepSeek-V4 ``inference/kernel.py`` (``act_quant``, ``fp4_act_quant``) and the OCP microscaling formats.

Notes:
    * All arithmetic is float32; inputs may be float32, bfloat16 or float16.
    * Values are rounded to nearest, ties to the even code, and saturate at +-448 (e4m3) or +-6 (e2m1).
    * Negative zero is kept: a negative value that rounds to zero, and -0.0 itself, is stored as e4m3 byte 0x80 or
      e2m1 nibble 8 (``sign << 3 | code``) and decodes to -0.0.
    * A group that holds a NaN or an infinity decodes to NaN (its e8m0 byte is 255), so that it cannot pass unseen.
    * Scales always multiply: ``value = float(q) * scale``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepseek_attn.kernels.common.device import FLOATS

FP8_MAX = 448.0
FP4_MAX = 6.0
FP8_FLOOR = 1e-4  # smallest amax of an FP8 group: an all-zero group has scale 2**-22, byte 105
FP4_FLOOR = 6.0 * 2.0**-126  # smallest amax of an FP4 group: scale 2**-126, byte 1
NVFP4_FLOOR = 6.0 * 2.0**-9  # the same under an e4m3 scale, of which 2**-9 is the smallest

FP4_GROUP, NVFP4_GROUP = 32, 16  # values of an FP4 group, by kind of its scale: e8m0 or e4m3

ROW_SPAN = 11  # e4m3 holds e2m1 under 12 successive powers of two
ROW_SMALLEST = 7  # of the largest scale of a row as e8m0 byte: 2**6 below it is a normal float32

ROW_MULTIPLE = 16  # of rows with their scales: cuBLAS needs 4, and with 16 all strides are aligned alike

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_MANTISSA = 0x007FFFFF
_SMALLEST = 0x00400000  # float32 bits of 2**-127, e8m0 byte 0


class InputFormat(NamedTuple):
    """How products with quantised weights read their input.

    Attributes:
        fp8: quantise the input to FP8 before the product; products with plain weights ignore it.
        pow2_scales: round the scales of an FP8 input up to powers of two ("ue8m0"), as V4 does; otherwise
            ``amax / 448``.
        group: channels of an FP8 input that share a scale; also the rows and columns of an FP8 weight's block.
    """

    fp8: bool = False
    pow2_scales: bool = True
    group: int = 128


class QuantizedRows(NamedTuple):
    """Rows quantised to FP8 per token and 128 or 32 channels: the input of FP8 linears.

    Attributes:
        values: float8_e4m3fn ``[M, K]``, rows contiguous; by group ``[groups, M, K / groups]``.
        scale: float32 ``[M, K / 128]`` or ``[M, K / 32]`` with stride 1 along the rows, as cuBLAS reads it.
        pow2_scales: the scales are powers of two.
    """

    values: Tensor
    scale: Tensor
    pow2_scales: bool = True

    @property
    def group(self) -> int:
        """Channels that share a scale."""
        channels = self.values.shape[-1] * (self.values.shape[0] if self.values.dim() == 3 else 1)
        return channels // max(1, self.scale.shape[1])

    def take(self, rows: Tensor) -> QuantizedRows:
        """A copy of some rows, int64 ``[n]``, of values ``[M, K]``."""
        values, scale = self.values.view(torch.uint8).index_select(0, rows), self.scale.index_select(0, rows)
        channels = self.values.shape[1]
        taken = empty_quantized_rows(len(rows), channels, rows.device, self.pow2_scales, group=self.group)
        taken.values.view(torch.uint8).copy_(values)
        taken.scale.copy_(scale)
        return taken


def empty_quantized_rows(
    M: int, channels: int, device: torch.device, pow2_scales: bool = True, groups: int | None = None, group: int = 128
) -> QuantizedRows:
    """Allocates values ``[M, channels]``, or ``[groups, M, channels / groups]``, and scales ``[M, channels / group]``.

    The memory has rows up to a multiple of ``ROW_MULTIPLE``, for `linear.cublas.padded_rows`.
    """
    rows = -(-M // ROW_MULTIPLE) * ROW_MULTIPLE
    shape = (rows, channels) if groups is None else (groups, rows, channels // groups)
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)[..., :M, :]
    scale = torch.empty(channels // group, rows, dtype=torch.float32, device=device)[:, :M].t()
    return QuantizedRows(values, scale, pow2_scales)


def pow2ceil(v: Tensor) -> Tensor:
    """Smallest power of two that is >= ``v``, computed on the bits of the float32.

    Args:
        v: float32, any shape, not negative. Zero and values below 2**-127 (the smallest e8m0 scale) give 2**-127;
            values above 2**127 give inf; NaN stays NaN.
    """
    if v.dtype != torch.float32:
        raise ValueError(f"pow2ceil works on the bits of float32, got {v.dtype}: convert with .float()")
    bits = v.contiguous().view(torch.int32)
    power = (bits.clamp(0, 0x7F800000) + _MANTISSA) & ~_MANTISSA
    power = torch.where(bits <= _SMALLEST, _SMALLEST, power)
    return torch.where(v.isnan(), v, power.view(torch.float32))


def encode_e8m0(scale: Tensor) -> Tensor:
    """Bytes ``log2(scale) + 127`` of float32 powers of two; inf and NaN give 255.

    Raises:
        ValueError: not float32 or, checked on the CPU only, not powers of two (``pow2ceil`` makes them).
    """
    if scale.dtype != torch.float32:
        raise ValueError(f"e8m0 bytes are made from float32 powers of two, got {scale.dtype}")
    encoded = scale.to(torch.float8_e8m0fnu)
    if scale.device.type == "cpu":
        wrong = scale[(encoded.float() != scale) & scale.isfinite()]
        if len(wrong):
            bad = wrong[0].item()
            raise ValueError(f"e8m0 holds powers of two from 2**-127 to 2**127, got {bad}: round with pow2ceil first")
    return encoded.view(torch.uint8)


def decode_e8m0(byte: Tensor) -> Tensor:
    """Scales as float32, whichever way they are held.

    A uint8 or float8_e8m0fnu tensor holds exponents: byte 120 is 2**-7, never the number 120. Byte 255 is NaN. A
    float32 or bfloat16 tensor already holds scales and is only widened.

    Raises:
        ValueError: any other dtype, because guessing would scale weights by a wrong power of two.
    """
    if byte.dtype == torch.uint8:
        byte = byte.view(torch.float8_e8m0fnu)
    if byte.dtype not in (torch.float8_e8m0fnu, torch.float32, torch.bfloat16):
        supported = "uint8 or float8_e8m0fnu (exponent bytes), float32 or bfloat16 (scales)"
        raise ValueError(f"scales of dtype {byte.dtype} are not understood: supported are {supported}")
    return byte.float()


def quantize_fp8(x: Tensor, group: int, floor: float = FP8_FLOOR, pow2: bool = True) -> tuple[Tensor, Tensor]:
    """Rounds groups of the last dimension to e4m3 with one scale per group.

    Args:
        x: ``[..., n]``, n a multiple of ``group``.
        group: values per scale: 64 for KV entries, 128 for inputs of linears, the whole key for FP8 index keys.
        floor: lower clamp on the largest magnitude of a group (not on the scale).
        pow2: scale ``pow2ceil(amax / 448)``, the "ue8m0" rule of V4; otherwise ``amax / 448`` as it is.

    Returns:
        ``(q, scale)``: float8_e4m3fn ``[..., n]`` and float32 ``[..., n / group]``.
    """
    groups = _grouped(x, group)
    amax = groups.abs().amax(dim=-1).clamp_min(floor)
    scale = pow2ceil(amax * (1.0 / FP8_MAX)) if pow2 else amax / torch.full_like(amax, FP8_MAX)
    return _to_e4m3(groups / scale.unsqueeze(-1)).flatten(-2), scale


def dequantize_fp8(q: Tensor, scale: Tensor, group: int) -> Tensor:
    """Float32 values of ``quantize_fp8`` output; ``scale`` may be anything that ``decode_e8m0`` reads."""
    if q.dtype != torch.float8_e4m3fn:
        raise ValueError(f"FP8 values must be float8_e4m3fn, got {q.dtype}: view raw bytes as float8_e4m3fn")
    return _rescaled(q.float(), scale, group)


def quantize_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds groups of 32 in the last dimension to e2m1, two values per byte, with one power-of-two scale per group.

    Args:
        x: ``[..., n]``, n a multiple of 32.

    Returns:
        ``(packed, scale)``: uint8 ``[..., n / 2]`` whose low nibble is the even index, and float32 ``[..., n / 32]``,
        ``pow2ceil(max(amax, 6 * 2**-126) / 6)``.
    """
    groups = _grouped(x, FP4_GROUP)
    amax = groups.abs().amax(dim=-1).clamp_min(FP4_FLOOR)
    scale = pow2ceil(amax * (1.0 / FP4_MAX))
    return _packed_e2m1(groups / scale.unsqueeze(-1)), scale


def dequantize_fp4(packed: Tensor, scale: Tensor, group: int = FP4_GROUP) -> Tensor:
    """Float32 ``[..., n]`` from ``[..., n / 2]`` packed bytes (uint8, or int8 as checkpoints store them)."""
    if packed.dtype not in (torch.uint8, torch.int8):
        raise ValueError(f"packed FP4 values must be uint8 or int8 bytes, got {packed.dtype}")
    # a pair of float32 is looked up as one int64: 3.5 times as fast on a CPU as rows of two values
    table = _e2m1_pairs(packed.device).view(torch.int64).flatten()
    index = packed.reshape(-1).view(torch.uint8).int()
    # index_select takes 0.4 of the time, but does not use several threads of a CPU
    pairs = table[index] if torch.get_num_threads() > 2 else table.index_select(0, index)
    return _rescaled(pairs.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1]), scale, group)


def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds groups of 16 in the last dimension to e2m1, two values per byte, with one e4m3 scale per group.

    Args:
        x: ``[..., n]``, n a multiple of 16.

    Returns:
        ``(packed, scale)``: uint8 ``[..., n / 2]`` whose low nibble is the even index, and float8_e4m3fn
        ``[..., n / 16]``, ``max(amax, 6 * 2**-9) / 6`` rounded to nearest.

    Notes:
        Values are divided by the scale exactly: multiplying by its reciprocal would move ties. The scale of a group
        that holds a NaN or an infinity is NaN.
    """
    groups = _grouped(x, NVFP4_GROUP)
    amax = groups.abs().amax(dim=-1).clamp_min(NVFP4_FLOOR)
    scale = torch.where(amax.isfinite(), (amax / FP4_MAX).clamp_max(FP8_MAX), torch.nan).to(torch.float8_e4m3fn)
    return _packed_e2m1(groups / scale.float().unsqueeze(-1)), scale


def dequantize_nvfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Float32 ``[..., n]`` from ``quantize_nvfp4`` output."""
    if scale.dtype != torch.float8_e4m3fn:
        raise ValueError(f"scales must be float8_e4m3fn, got {scale.dtype}: view raw bytes as float8_e4m3fn")
    return dequantize_fp4(packed, scale.float(), NVFP4_GROUP)


def fake_quant_fp8(x: Tensor, group: int, pow2: bool = True) -> Tensor:
    """``x`` after a round trip through ``quantize_fp8``, in the dtype of ``x``."""
    return dequantize_fp8(*quantize_fp8(x, group, pow2=pow2), group).to(x.dtype)


def quantize_fp8_block(w: Tensor, block: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """Rounds a weight to e4m3 with one power-of-two scale per block; blocks at the edges may be partial.

    Args:
        w: ``[out, in]``.

    Returns:
        ``(q, scale)``: float8_e4m3fn ``[out, in]`` and float32 ``[ceil(out / block[0]), ceil(in / block[1])]``.
    """
    _check_float(w)
    rows, cols = _grid(w, block)
    padded = F.pad(w.float(), (0, cols * block[1] - w.shape[1], 0, rows * block[0] - w.shape[0]))
    tiles = padded.reshape(rows, block[0], cols, block[1])
    amax = tiles.abs().amax(dim=(1, 3)).clamp_min(FP8_FLOOR)
    scale = pow2ceil(amax * (1.0 / FP8_MAX))
    q = _to_e4m3(tiles / scale[:, None, :, None]).reshape(padded.shape)
    return q[: w.shape[0], : w.shape[1]].contiguous(), scale


def dequantize_fp8_block(q: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """Float32 ``[out, in]`` of an FP8 block weight: checkpoint fields ``.weight`` and ``.scale`` (HF: ``_scale_inv``).

    ``scale`` has one entry per block, in any form that ``decode_e8m0`` reads.
    """
    if q.dtype != torch.float8_e4m3fn:
        raise ValueError(f"FP8 weights must be float8_e4m3fn, got {q.dtype}: view raw bytes as float8_e4m3fn")
    grid = _grid(q, block)
    if tuple(scale.shape) != grid:
        expected = f"{list(grid)} in blocks of {block[0]} x {block[1]}"
        raise ValueError(f"scale {list(scale.shape)} does not fit weight {list(q.shape)}: expected {expected}")
    values, scale = q.float(), decode_e8m0(scale)
    if q.shape == (grid[0] * block[0], grid[1] * block[1]):
        values.view(grid[0], block[0], grid[1], block[1]).mul_(scale[:, None, :, None])
        return values
    rows = scale.repeat_interleave(block[0], dim=0)[: q.shape[0]]
    return values.mul_(rows.repeat_interleave(block[1], dim=1)[:, : q.shape[1]])


def merge_fp8_blocks(q: Tensor, scale: Tensor, factor: int, block: int) -> tuple[Tensor, Tensor]:
    """An FP8 block weight in blocks ``factor`` times as large in both dimensions: their largest scale, and its values.

    Args:
        q: float8_e4m3fn ``[out, in]``; scale: float32 powers of two, one per ``block x block`` values.

    Returns:
        ``(q, scale)`` of blocks of ``factor * block``.

    Notes:
        Values stay as they are where they are normal numbers under the larger scale. Smaller ones are rounded to
        multiples of 2**-9 of it, 2**18 times below the largest value that it allows.
    """
    merged = F.max_pool2d(scale[None], factor, ceil_mode=True)[0]
    spread = merged.repeat_interleave(factor, 0).repeat_interleave(factor, 1)
    ratio = scale / spread[: scale.shape[0], : scale.shape[1]]
    ratio = ratio.repeat_interleave(block, 0)[: q.shape[0]].repeat_interleave(block, 1)[:, : q.shape[1]]
    return _to_e4m3(q.float() * ratio), merged


def hadamard(x: Tensor) -> Tensor:
    """``x @ H * n**-0.5`` over the last dimension with Sylvester's H (natural order): orthogonal and symmetric.

    Summed pairwise in float32 (log2 n butterflies) and rounded once to the dtype of ``x``. n is a power of two.
    """
    _check_float(x)
    n = x.shape[-1] if x.dim() else 0
    if n < 1 or n & (n - 1):
        raise ValueError(f"a Hadamard transform needs a power-of-two last dimension, got shape {list(x.shape)}")
    y, half = x.float(), 1
    while half < n:
        a, b = y.unflatten(-1, (n // (2 * half), 2, half)).unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return (y * n**-0.5).to(x.dtype)


def _to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _packed_e2m1(groups: Tensor) -> Tensor:
    """Bytes of two nibbles ``sign << 3 | code``; at a tie a comparison includes the bound if the upper code is even."""
    x = groups.flatten(-2)
    a = x.abs()
    code = (x.signbit().to(torch.uint8) << 3) + (a > 0.25)
    for above in (a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0):
        code += above
    return code[..., 0::2] | (code[..., 1::2] << 4)


@lru_cache(maxsize=16)
def _e2m1_pairs(device: torch.device) -> Tensor:
    """``[256, 2]``: the two values of every packed byte, low nibble first."""
    values = torch.tensor(E2M1, dtype=torch.float32, device="cpu")
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1).to(device)


def _rescaled(values: Tensor, scale: Tensor, group: int) -> Tensor:
    """Float32 values times the scale of their group, in place."""
    groups = _grouped(values, group)
    if scale.shape != groups.shape[:-1]:
        shape, expected = list(values.shape), f"{list(groups.shape[:-1])}, one per group of {group}"
        raise ValueError(f"scale {list(scale.shape)} does not fit values {shape}: expected {expected}")
    return groups.mul_(decode_e8m0(scale).unsqueeze(-1)).flatten(-2)


def _grouped(x: Tensor, group: int) -> Tensor:
    """Float32 ``[..., n / group, group]``."""
    _check_float(x)
    if group < 1 or x.dim() < 1 or x.shape[-1] % group:
        raise ValueError(f"the last dimension of shape {list(x.shape)} is not a multiple of the group size {group}")
    return x.float().unflatten(-1, (x.shape[-1] // group, group))


def _grid(w: Tensor, block: tuple[int, int]) -> tuple[int, int]:
    if w.dim() != 2 or len(block) != 2 or min(block) < 1:
        raise ValueError(f"block scales need a weight [out, in] and two block sizes, got {list(w.shape)} and {block}")
    return -(-w.shape[0] // block[0]), -(-w.shape[1] // block[1])


def _check_float(x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise ValueError(f"expected float32, bfloat16 or float16 values, got {x.dtype}")


def row_exponents(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor] | None:
    """The largest scale of each row, and scales that lie within 12 successive powers of two.

    Args:
        weight: packed FP4, uint8 ``[..., out, in / 2]``; scale: e8m0 bytes ``[..., out, in / 32]``.

    Returns:
        (e8m0 bytes ``[..., out]``, scales that give the same values), or None if no such scales exist. Scales of groups
        of zeros may change.
    """
    largest = scale.amax(-1)
    if scale.is_meta:
        return largest, scale
    if ((largest - scale.amin(-1)) > ROW_SPAN).any():
        zero = ((weight & 0x77).unflatten(-1, (-1, 16)) == 0).all(-1)
        largest = scale.masked_fill(zero & (scale < 255), 0).amax(-1)
        scale = torch.where(zero & (scale < 255), largest.unsqueeze(-1), scale)
    largest = largest.clamp(min=ROW_SMALLEST)
    if (largest == 255).any() or ((largest.unsqueeze(-1).int() - scale.int()) > ROW_SPAN).any():
        return None
    return largest, scale
