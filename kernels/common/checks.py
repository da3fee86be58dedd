"""Checks of an op's tensors: requirements are declared, and errors state the requirement and the given value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepseek_attn.kernels.common.quant import QuantizedRows

Shape = Sequence[int | str | None]
"""Sizes of a tensor; a word names a size that may be any number, None stands for all dimensions before the others."""

INTS = (torch.int32, torch.int64)


def check(
    name: str,
    tensor: Tensor | None,
    shape: Shape,
    dtypes: torch.dtype | Sequence[torch.dtype] = (),
    contiguous: bool = False,
    rows: bool = False,
) -> None:
    """Checks one argument; None, for an argument that was left out, passes.

    Args:
        dtypes: those supported; none: any.
        contiguous: the tensor must be contiguous; rows: its last dimension must be.

    Raises:
        ValueError: shape, dtype or strides differ.
    """
    if tensor is None:
        return
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    if (
        (tensor.shape != shape and not _fits(tensor.shape, shape))
        or (dtypes and tensor.dtype not in dtypes)
        or (contiguous and not tensor.is_contiguous())
        or (rows and tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel())
    ):
        words = ("contiguous " if contiguous else "") + f"{names(dtypes)} {described(shape)}".lstrip()
        raise ValueError(f"{name} must be {words}{' with contiguous rows' if rows else ''}, got {given(tensor)}")


def check_quantized(name: str, rows: QuantizedRows, shape: Sequence[int]) -> None:
    """Checks FP8 rows ``[M, K]`` with a scale per 128 or 32 channels; scales have stride 1 along the rows.

    Raises:
        ValueError: shape, dtype or strides differ.
    """
    (M, K), group = shape, 32 if rows.group == 32 else 128
    check(name, rows.values, shape, torch.float8_e4m3fn, rows=True)
    check(f"transposed scales of {name}", rows.scale.t(), (K // group, M), torch.float32, rows=True)


def contiguous_rows(x: Tensor) -> Tensor:
    """``x``, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def given(tensor: Tensor) -> str:
    """Dtype, shape and strides of a tensor, for messages."""
    strides = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
    return f"{names((tensor.dtype,))} {list(tensor.shape)}{strides}"


def names(dtypes: Sequence[torch.dtype]) -> str:
    """``float32, bfloat16 or float16``."""
    words = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def described(shape: Shape) -> str:
    """A shape as messages have it: ``[T, 128]``."""
    return f"[{', '.join('...' if size is None else str(size) for size in shape)}]"


def _fits(sizes: torch.Size, shape: Shape) -> bool:
    if shape and shape[0] is None:
        shape = shape[1:]
        sizes = sizes[len(sizes) - len(shape) :]
    if len(sizes) != len(shape):
        return False
    for size, wanted in zip(sizes, shape, strict=True):  # noqa: SIM110  # five times as fast as a generator
        if wanted != size and not isinstance(wanted, str):
            return False
    return True
