"""Triton's names of torch dtypes, and constants that device code shares."""

from __future__ import annotations

import torch
import triton.language as tl

from deepseek_attn.kernels.common import device

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
}
LOG2E = tl.constexpr(device.LOG2E)
