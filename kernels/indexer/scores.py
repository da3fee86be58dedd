"""Launches of `paged_index_scores` in Triton and, on Hopper, in Gluon: checks, and how a launch is tiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, gpu
from deepseek_attn.kernels.common.invariance import batch_invariant
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.indexer.scores_few_hopper import index_scores_few_hopper_kernel
from deepseek_attn.kernels.indexer.scores_hopper import BLOCK, DIM, HEADS, TOKENS, index_scores_hopper_kernel
from deepseek_attn.kernels.indexer.scores_triton import index_scores_kernel
from deepseek_attn.kernels.indexer.types import IndexQueries, PagedIndexKeys

_MANY_KEYS = 1 << 18  # of all requests
_KEY_FORMATS = {"index_fp8": "fp8", "index_fp4": "fp4", "plain": "plain"}  # by name of the record


@dataclass(frozen=True)
class ScoresLaunchConfig:
    """Tiling of `index_scores_kernel`.

    Attributes:
        tokens: of one program; keys: of one tile; num_stages: tiles that are in flight.
        splits: programs that share the keys of a request.
    """

    tokens: int
    keys: int
    num_stages: int
    splits: int


def paged_index_scores(
    queries: IndexQueries,
    keys: PagedIndexKeys,
    num_visible: Tensor,
    width: int | None = None,
    skip: int = 0,
    out: Tensor | None = None,
    config: ScoresLaunchConfig | None = None,
) -> Tensor:
    """`kernels.indexer.paged_index_scores` in Triton; ``config``: by default chosen from shapes alone."""
    block_table = keys.block_table
    width = block_table.shape[1] * keys.entries if width is None else width
    key_format = check_scores(queries, keys, num_visible)
    out = _checked_result(queries, keys, width, out)
    T = len(queries.q)
    if out.numel() == 0 or block_table.numel() == 0:
        return out
    capability, processors = gpu(queries.q.device)
    q, pool, dtype = key_operand_types(queries.q, keys, key_format, capability)
    arguments = (
        q,
        queries.weights,
        pool,
        block_table,
        keys.token_to_req,
        num_visible,
        out,
        T,
        width,
        skip,
        pool.stride(0),
        block_table.stride(0),
        out.stride(0),
    )
    pdl = capability >= (9, 0)
    hopper = config is None and queries.score_dtype == torch.float32  # the Hopper kernels do not round scores
    if hopper and fits_hopper(key_format, q, pool, block_table.shape[0], width, capability, processors):
        index_scores_hopper_kernel[(triton.cdiv(T, TOKENS.value), hopper_splits(T, width, processors))](
            *arguments, PAGE=keys.entries, enable_fp_fusion=True, num_warps=4
        )
        return out
    if hopper and fits_few_hopper(key_format, q, pool, block_table.shape[0], width, capability):
        fp4 = key_format == "fp4"
        tokens, splits = few_hopper_tiling(T, block_table.shape[0], width, processors, fp4)
        index_scores_few_hopper_kernel[(triton.cdiv(T, tokens), splits)](
            *arguments, PAGE=keys.entries, TOKENS=tokens, FP4=fp4, enable_fp_fusion=True, num_warps=4, launch_pdl=True
        )
        return out
    if config is None:
        config = choose_config(T, block_table.shape[0], width, dtype == tl.float32, capability, processors)
    index_scores_kernel[(triton.cdiv(T, config.tokens), config.splits)](
        *arguments,
        **score_constants(queries, keys, key_format, dtype, capability, config),
        TOKENS=config.tokens,
        BLOCK_T=triton.next_power_of_2(config.tokens),
        PDL=pdl,
        enable_fp_fusion=True,
        num_warps=4,
        num_stages=config.num_stages,
        launch_pdl=pdl,
    )
    return out


def choose_config(
    T: int, B: int, width: int, exact: bool, capability: tuple[int, int], processors: int
) -> ScoresLaunchConfig:
    """Tiling for ``T`` queries of ``B`` requests over up to ``width`` keys, measured on an H200.

    Args:
        exact: products are float32; capability, processors: of the GPU.
    """
    if exact:
        return ScoresLaunchConfig(1, 32, 1, max(1, min(8 * processors // T, triton.cdiv(width, 64))))
    tokens = 4 if batch_invariant() else min(4, triton.cdiv(T, B))
    keys = 64 if capability[0] != 9 else 128
    # as many programs as run at a time, or twice as many: a last wave of few would take as long as a full one
    resident = (4, 3, 3, 4)[tokens - 1] * processors
    splits = max(1, min(resident // triton.cdiv(T, tokens), triton.cdiv(width, 2 * keys)))
    return ScoresLaunchConfig(tokens, keys, 3, splits)


def fits_hopper(
    key_format: str, q: Tensor, pool: Tensor, B: int, width: int, capability: tuple[int, int], processors: int
) -> bool:
    """Whether the Hopper kernel supports these arguments of `paged_index_scores` and is faster.

    It computes eight neighbouring tokens at a time, so requests should have as many, and enough work for the GPU.
    """
    T, H, dim = q.shape
    work = triton.cdiv(T, TOKENS.value) * triton.cdiv(width, BLOCK.value)
    return (
        capability == (9, 0)
        and key_format == "fp8"
        and (H, dim) == (HEADS.value, DIM.value)
        and TOKENS.value * B <= T
        and work >= 96 * processors
        and not batch_invariant()
        and _aligned(q, pool)
    )


def fits_few_hopper(key_format: str, q: Tensor, pool: Tensor, B: int, width: int, capability: tuple[int, int]) -> bool:
    """Whether `index_scores_few_hopper_kernel` supports these arguments of `paged_index_scores` and is faster.

    With fewer FP8 keys it is faster alone, but layers of 1, 8 and 32 requests with 2048 keys took up to 3 % longer.
    """
    if capability != (9, 0) or q.shape[1:] != (HEADS.value, DIM.value) or not _aligned(q, pool):
        return False
    return key_format == "fp4" or (key_format == "fp8" and B * width >= _MANY_KEYS and not batch_invariant())


def _aligned(*rows: Tensor) -> bool:
    """Whether rows can be copied 16 bytes at a time."""
    return all(tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 16 == 0 for tensor in rows)


def few_hopper_tiling(T: int, B: int, width: int, processors: int, fp4: bool) -> tuple[int, int]:
    """Tokens of a program of `index_scores_few_hopper_kernel`, and programs that share the keys of a request."""
    tokens = 4 if batch_invariant() else min(4, triton.next_power_of_2(triton.cdiv(T, B)))
    resident = ((5, 4, 3) if fp4 else (6, 4, 2))[tokens // 2] * processors
    return tokens, max(1, min(resident // triton.cdiv(T, tokens), triton.cdiv(width, 4 * BLOCK.value)))


@cache
def hopper_splits(T: int, width: int, processors: int) -> int:
    """Programs that share the keys of a request, so that all multiprocessors are busy to the end.

    A multiprocessor runs one program; starting one takes as long as eight of its tiles of 64 keys.
    """
    groups, tiles = triton.cdiv(T, TOKENS.value), triton.cdiv(width, BLOCK.value)
    choices = range(1, 1 + min(processors, max(1, tiles // 8)))
    return min(choices, key=lambda n: triton.cdiv(groups * n, processors) * (triton.cdiv(tiles, n) + 8))


def score_constants(
    queries: IndexQueries,
    keys: PagedIndexKeys,
    key_format: str,
    dtype: tl.dtype,
    capability: tuple[int, int],
    config: ScoresLaunchConfig,
) -> dict[str, Any]:
    """Constants of a launch that multiplies queries and keys in ``dtype``, as `key_operand_types` has it."""
    _, H, dim = queries.q.shape
    return {
        "H": H,
        "DIM": dim,
        "PAGE": keys.entries,
        "KEY_FORMAT": key_format,
        "NATIVE_FP8": native_fp8(capability),
        "DTYPE": dtype,
        "PRECISION": "tf32x3" if dtype == tl.float32 else None,
        "SCORE_DTYPE": TRITON_DTYPES[queries.score_dtype],
        "BLOCK_H": max(16, triton.next_power_of_2(H)),
        "BLOCK_D": max(32, triton.next_power_of_2(dim)),
        "BLOCK_N": config.keys,
        "STAGES": config.num_stages,
    }


def native_fp8(capability: tuple[int, int]) -> bool:
    """Whether a GPU converts FP8."""
    return capability >= (8, 9)


def key_operand_types(
    q: Tensor, keys: PagedIndexKeys, key_format: str, capability: tuple[int, int]
) -> tuple[Tensor, Tensor, tl.dtype]:
    """Queries and pool as a kernel reads them, and the dtype in which it multiplies them."""
    pool = keys.pool
    if key_format == "plain":
        pool = pool.view(keys.record.dtype)
        same = q.dtype == keys.record.dtype
        return q, pool, TRITON_DTYPES[q.dtype if same else torch.float32]
    if not native_fp8(capability):
        return q.view(torch.uint8), pool, tl.float16
    return q, pool.view(torch.float8_e4m3fn) if key_format == "fp8" else pool, tl.float8e4nv


def check_scores(queries: IndexQueries, keys: PagedIndexKeys, num_visible: Tensor) -> str:
    """The format of the keys; ValueError for arguments that the kernels of scores do not take."""
    q, weights = queries.q, queries.weights
    record, pool, page_entries, block_table, token_to_req = keys
    key_format = _KEY_FORMATS.get(record.name)
    if key_format is None:
        raise ValueError(f"index keys are records {', '.join(_KEY_FORMATS)}, got {record.name}")
    dtypes = FLOATS if key_format == "plain" else (torch.float8_e4m3fn,)
    if q.dim() != 3 or q.dtype not in dtypes or not q.is_contiguous() or q.shape[2] != record.dim:
        raise ValueError(
            f"{record.name} keys need contiguous q [T, H, {record.dim}] of {' or '.join(map(str, dtypes))}, as "
            f"index_query makes them, got {tuple(q.shape)} {q.dtype}, strides {q.stride()}"
        )
    if key_format == "fp4" and record.dim != 128:
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
    if block_table.dim() != 2 or block_table.stride(1) != 1:
        raise ValueError(
            f"block_table must be [B, P] with contiguous rows, got {tuple(block_table.shape)}, strides "
            f"{block_table.stride()}"
        )
    if token_to_req.shape != (T,) or num_visible.shape != (T,):
        raise ValueError(
            f"token_to_req and num_visible must be [{T}], got {tuple(token_to_req.shape)}, {tuple(num_visible.shape)}"
        )
    return key_format


def _checked_result(queries: IndexQueries, keys: PagedIndexKeys, width: int, out: Tensor | None) -> Tensor:
    """The result to write to."""
    T, pages = len(queries.q), keys.block_table.shape[1]
    if not 0 <= width <= pages * keys.entries:
        raise ValueError(f"width must be in 0 .. {pages} * {keys.entries}, the entries of a block table, got {width}")
    if out is None:
        out = torch.empty(T, width, dtype=torch.float32, device=queries.q.device)
    if out.shape != (T, width) or out.dtype != torch.float32 or (width > 1 and out.stride(1) != 1):
        raise ValueError(
            f"out must be float32 [{T}, {width}] with contiguous rows, got {tuple(out.shape)} {out.dtype}, strides "
            f"{out.stride()}"
        )
    return out
