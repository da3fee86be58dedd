"""Scores of the lightning indexer over paged keys in Triton, for decodes and for chunks of a prefill alike.

The device code is in `index_scores_kernels`; this file checks arguments and decides how a launch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, gpu
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.indexer.index_scores_hopper import BLOCK, DIM, HEADS, TOKENS, index_scores_hopper_kernel
from deepseek_attn.kernels.indexer.index_scores_triton import index_scores_kernel

_KINDS = {"index_fp8": "fp8", "index_fp4": "fp4", "plain": "plain"}


@dataclass(frozen=True)
class Tiles:
    """How a launch is cut.

    Attributes:
        tokens: of one program; keys: of one step of it; stages: steps whose keys are on their way.
        parts: programs that share the keys of a request.
        warps: of a program.
    """

    tokens: int
    keys: int
    stages: int
    parts: int
    warps: int = 4


def paged_index_scores(
    q: Tensor,
    weights: Tensor,
    record: Any,
    pool: Tensor,
    page_entries: int,
    block_table: Tensor,
    token_to_req: Tensor,
    visible: Tensor,
    width: int | None = None,
    skip: int = 0,
    out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Same as `reference.paged_index_scores`, on a GPU, for records ``index_fp8``, ``index_fp4`` and plain.

    Args:
        tiles: how to cut the launch; by default chosen from shapes alone.

    Notes:
        Columns from ``visible[t]`` on, and all columns of rows that see ``skip`` entries or fewer, are not written. A
        key is read once for up to four neighbouring tokens of a request.
    """
    width = block_table.shape[1] * page_entries if width is None else width
    kind, out = _checked(q, weights, record, pool, page_entries, block_table, token_to_req, visible, width, out)
    T, H, dim = q.shape
    if out.numel() == 0 or block_table.numel() == 0:
        return out
    capability, processors = gpu(q.device)
    native = capability >= (8, 9)
    if kind == "plain":
        pool = pool.view(record.dtype)
        same = q.dtype == record.dtype
        dtype = TRITON_DTYPES[q.dtype if same else torch.float32]
    else:
        dtype = tl.float8e4nv if native else tl.float16
        if kind == "fp8" and native:
            pool = pool.view(torch.float8_e4m3fn)
        q = q if native else q.view(torch.uint8)
    tensors = (q, weights, pool, block_table, token_to_req, visible, out)
    arguments = (*tensors, T, width, skip, pool.stride(0), block_table.stride(0), out.stride(0))
    if tiles is None and fits_hopper(kind, q, pool, block_table.shape[0], width, capability, processors):
        index_scores_hopper_kernel[(triton.cdiv(T, TOKENS.value), hopper_parts(T, width, processors))](
            *arguments,
            PAGE=page_entries,
            num_warps=4,
        )
        return out
    if tiles is None:
        tiles = choose_tiles(T, block_table.shape[0], width, dtype == tl.float32, capability, processors)
    index_scores_kernel[(triton.cdiv(T, tiles.tokens), tiles.parts)](
        *arguments,
        H=H,
        DIM=dim,
        PAGE=page_entries,
        RECORD=kind,
        NATIVE_FP8=native,
        DTYPE=dtype,
        PRECISION="tf32x3" if dtype == tl.float32 else None,
        TOKENS=tiles.tokens,
        BLOCK_T=triton.next_power_of_2(tiles.tokens),
        BLOCK_H=max(16, triton.next_power_of_2(H)),
        BLOCK_D=max(32, triton.next_power_of_2(dim)),
        BLOCK_N=tiles.keys,
        STAGES=tiles.stages,
        PDL=capability >= (9, 0),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=capability >= (9, 0),
    )
    return out


def choose_tiles(T: int, B: int, width: int, exact: bool, capability: tuple[int, int], processors: int) -> Tiles:
    """How to cut ``T`` queries of ``B`` requests over up to ``width`` keys, measured on an H200. ``exact``: float32."""
    if exact:
        return Tiles(1, 32, 1, max(1, min(8 * processors // T, triton.cdiv(width, 64))))
    tokens = min(4, triton.cdiv(T, B))
    keys = 64 if capability[0] != 9 else 128
    # as many programs as run at a time, or twice as many: a last wave of few would take as long as a full one
    room = (4, 3, 3, 4)[tokens - 1] * processors
    parts = max(1, min(room // triton.cdiv(T, tokens), triton.cdiv(width, 2 * keys)))
    return Tiles(tokens, keys, 3, parts)


def fits_hopper(
    kind: str, q: Tensor, pool: Tensor, B: int, width: int, capability: tuple[int, int], processors: int
) -> bool:
    """Whether the kernel for Hopper takes these arguments of `paged_index_scores` and is the faster one.

    It computes eight neighbouring tokens at a time, so requests should have as many, and enough work for the GPU.
    """
    T, H, dim = q.shape
    aligned = all(tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 16 == 0 for tensor in (q, pool))
    work = triton.cdiv(T, TOKENS.value) * triton.cdiv(width, BLOCK.value)
    return (
        capability == (9, 0)
        and kind == "fp8"
        and (H, dim) == (HEADS.value, DIM.value)
        and TOKENS.value * B <= T
        and work >= 96 * processors
        and aligned
    )


@cache
def hopper_parts(T: int, width: int, processors: int) -> int:
    """How many programs share the keys of a request: as many as keep all multiprocessors busy to the end.

    A processor runs one program; to start one takes as long as eight of its tiles of 64 keys.
    """
    groups, tiles = triton.cdiv(T, TOKENS.value), triton.cdiv(width, BLOCK.value)
    choice = range(1, 1 + min(processors, max(1, tiles // 8)))
    return min(choice, key=lambda parts: triton.cdiv(groups * parts, processors) * (triton.cdiv(tiles, parts) + 8))


def _checked(
    q: Tensor,
    weights: Tensor,
    record: Any,
    pool: Tensor,
    page_entries: int,
    block_table: Tensor,
    token_to_req: Tensor,
    visible: Tensor,
    width: int,
    out: Tensor | None,
) -> tuple[str, Tensor]:
    kind = _KINDS.get(record.name)
    if kind is None:
        raise ValueError(f"index keys are records {', '.join(_KINDS)}, got {record.name}")
    dtypes = FLOATS if kind == "plain" else (torch.float8_e4m3fn,)
    if q.dim() != 3 or q.dtype not in dtypes or not q.is_contiguous() or q.shape[2] != record.dim:
        raise ValueError(
            f"{record.name} keys need contiguous q [T, H, {record.dim}] of {' or '.join(map(str, dtypes))}, as "
            f"index_query makes them, got {tuple(q.shape)} {q.dtype}, strides {q.stride()}"
        )
    if kind == "fp4" and record.dim != 128:
        raise ValueError(f"index_fp4 keys are scored for 128 channels, got {record.dim}: use reference.index_scores")
    T, H, _ = q.shape
    if weights.shape != (T, H) or weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(f"weights must be contiguous float32 [{T}, {H}], got {tuple(weights.shape)} {weights.dtype}")
    aligned = pool.data_ptr() % 4 == 0 and pool.stride(0) % 4 == 0
    if pool.dim() != 2 or pool.dtype != torch.uint8 or pool.stride(1) != 1 or not aligned:
        raise ValueError(
            f"a pool must be uint8 [pages, bytes] with contiguous pages at multiples of 4 bytes, got "
            f"{tuple(pool.shape)} {pool.dtype}, strides {pool.stride()}"
        )
    if pool.shape[1] < page_entries * record.entry_bytes:
        raise ValueError(
            f"{page_entries} {record.name} entries per page take {page_entries * record.entry_bytes} bytes, and pages "
            f"of the pool have {pool.shape[1]}"
        )
    if block_table.dim() != 2 or block_table.stride(1) != 1 or not 0 <= width <= block_table.shape[1] * page_entries:
        raise ValueError(
            f"block_table must be [B, P] with contiguous rows and width in 0 .. P * {page_entries}, got "
            f"{tuple(block_table.shape)} and {width}"
        )
    if token_to_req.shape != (T,) or visible.shape != (T,):
        raise ValueError(
            f"token_to_req and visible must be [{T}], got {tuple(token_to_req.shape)}, {tuple(visible.shape)}"
        )
    if out is None:
        out = torch.empty(T, width, dtype=torch.float32, device=q.device)
    if out.shape != (T, width) or out.dtype != torch.float32 or (width > 1 and out.stride(1) != 1):
        raise ValueError(
            f"out must be float32 [{T}, {width}] with contiguous rows, got {tuple(out.shape)} {out.dtype}, strides "
            f"{out.stride()}"
        )
    return kind, out
