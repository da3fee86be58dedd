"""Launch of `kernels.insert.rope_insert` in Triton."""

from __future__ import annotations

from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, has_native_fp8, supports_pdl
from deepseek_attn.kernels.common.row_ops import entry_constants, row_block
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.insert.norm_rope_triton import EntryArguments, EntryShape, rope_insert_kernel
from deepseek_attn.kernels.insert.types import CacheRows


def rope_insert(rows: Tensor, positions: Tensor, cos_sin: Tensor, cache: CacheRows) -> None:
    """See `kernels.insert.rope_insert`."""
    T, dim = rows.shape
    if rows.dtype not in FLOATS or rows.stride(1) != 1 or cache.record.dim != dim:
        raise ValueError(
            f"rows must be float32, bfloat16 or float16 [T, {cache.record.dim}] with contiguous rows, got "
            f"{list(rows.shape)} {rows.dtype}, strides {rows.stride()}"
        )
    if positions.shape != (T,) or cache.slots.shape != (T,):
        raise ValueError(f"need {T} positions and slots, got {list(positions.shape)} and {list(cache.slots.shape)}")
    shape = EntryShape(
        D=dim,
        ROPE=cos_sin.shape[1],
        BLOCK=row_block(dim, cos_sin),
        DTYPE=TRITON_DTYPES[rows.dtype],
        **entry_constants(cache.record, cache.pool, cache.page_entries),
    )
    arguments = EntryArguments(
        rows, rows.stride(0), positions, cos_sin, len(cos_sin), cache.slots, cache.pool, cache.pool.stride(0)
    )
    early = supports_pdl(rows.device)
    if T:
        rope_insert_kernel[(T,)](
            arguments,
            SHAPE=shape,
            NATIVE_FP8=has_native_fp8(rows.device),
            PDL=early,
            enable_fp_fusion=True,
            num_warps=1,
            launch_pdl=early,
        )
