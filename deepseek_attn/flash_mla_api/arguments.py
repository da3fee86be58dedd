"""Checks of arguments that all functions of the interface share."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

KEY_DIMS = (512, 576)
VALUE_DIM = 512


def check_tensor(
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | str, ...],
    device: torch.device | None,
    hint: str = "",
) -> None:
    """Checks an argument's dtype, shape and device.

    Args:
        shape: the required sizes; a string names a free size.
        device: the required device, or None for any.
        hint: the end of the message.

    Raises:
        ValueError: a requirement is not met, or the value is not a tensor.
    """
    got = type(tensor).__name__
    if isinstance(tensor, Tensor):
        same = tensor.dim() == len(shape) and all(
            isinstance(size, str) or size == found for size, found in zip(shape, tensor.shape, strict=True)
        )
        if same and tensor.dtype in dtypes and device in (None, tensor.device):
            return
        got = f"{_name(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"
    wanted = f"{' or '.join(map(_name, dtypes))} [{', '.join(map(str, shape))}]"
    place = "" if device is None else f" on {device}"
    raise ValueError(f"{name} must be {wanted}{place}, got {got}{hint}")


def check_scalar(name: str, value: object, kind: type) -> None:
    """Checks a plain ``bool`` or a finite ``Real``; tensors would have to be waited for.

    Raises:
        ValueError: something else.
    """
    if not isinstance(value, kind) or (isinstance(value, Real) and not math.isfinite(value)):
        wanted = "True or False" if kind is bool else "a finite number"
        raise ValueError(f"{name} must be {wanted}, got {value!r} ({type(value).__name__})")


def check_query(q: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[str, ...], value_dim: int) -> None:
    """Checks queries ``[*shape, 512 or 576]``, and that values are the first 512 channels of keys.

    Raises:
        ValueError: other dtypes or sizes.
    """
    check_tensor("q", q, dtypes, (*shape, "512 or 576"), None)
    if q.shape[-1] not in KEY_DIMS:
        raise ValueError(f"q must have 512 (V4) or 576 (V3.2) channels per head, got {list(q.shape)}")
    if not isinstance(value_dim, int) or value_dim != VALUE_DIM:
        raise ValueError(f"values are the first {VALUE_DIM} channels of a key, got a value dim of {value_dim}")


def check_out(out: Tensor | None, q: Tensor) -> None:
    """Checks a result buffer: of the queries' dtype and shape, with 512 contiguous channels.

    Raises:
        ValueError: it is not.
    """
    if out is None:
        return
    check_tensor("out", out, (q.dtype,), (*q.shape[:-1], VALUE_DIM), q.device)
    if out.stride(-1) != 1:
        raise ValueError(f"channels of out must be contiguous, got strides {out.stride()}")


def check_row_lengths(name: str, lens: Tensor | None, rows: int, device: torch.device) -> None:
    """Checks int32 ``[rows]`` numbers of leading indices that count, or None."""
    if lens is not None:
        check_tensor(name, lens, (torch.int32,), (rows,), device)


def check_sink(attn_sink: Tensor | None, heads: int, device: torch.device) -> None:
    """Checks float32 ``[heads]`` logits that join the denominator, or None."""
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, (torch.float32,), (heads,), device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
