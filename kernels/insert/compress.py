"""Launch of `kernels.insert.compress_and_insert` in Triton: closed windows are pooled and stored, open ones kept.

Programs that pool find the windows that close from the lengths of the requests, so that no program is started per
token. Short windows are pooled by one program, in float32 and channel by channel. Of long ones every program pools a
few channels, and the last of them to arrive stores the entry: the norm needs all of its channels. The other programs
store a token's row in the ring of its request. In steps of more than ``rows - coff * ratio + 1`` tokens of a request
such a row may still hold a token that is pooled; then the program that pools it stores the new row afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.cache.records import PlainRecord
from deepseek_attn.kernels.common.counters import COUNTERS, counters_of
from deepseek_attn.kernels.common.device import has_native_fp8, supports_pdl
from deepseek_attn.kernels.common.row_ops import begin, entry_constants, row_block
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.insert.compress_triton import (
    BatchArguments,
    PartArguments,
    PartShape,
    PoolingConfig,
    Scratch,
    pool_windows,
    store_state_row,
)
from deepseek_attn.kernels.insert.reference import check_part
from deepseek_attn.kernels.insert.types import CompressBatch, CompressPart

POOL_PROGRAMS = 1056  # programs that pool at most: eight for each multiprocessor of an H200


class LaunchConfig(NamedTuple):
    """Launch configuration of pooling.

    Attributes:
        warps: of a program; lanes: tokens that are summed side by side, and combined at the end; reads: tokens that a
            lane loads at once; channels: of a program, 0 for all. With ``lanes`` of 1 a program pools all channels.
        chunks: blocks of ``channels`` that a program pools at most.
        values: channels of a program that pools whole windows, several narrow ones at once.
    """

    warps: int
    lanes: int
    reads: int
    channels: int = 0
    chunks: int = 1
    values: int = 512


def launch_config(pooled_tokens: int) -> LaunchConfig:
    """The fastest on an H200. Depends on nothing else: the order of a window's sum must be the same in every step."""
    if pooled_tokens <= 16:
        return LaunchConfig(4, 1, triton.next_power_of_2(pooled_tokens))
    return LaunchConfig(4, 16, 4, 32)


@triton.jit(do_not_specialize=["pool_programs", "requests"])
def compress_kernel(
    parts,
    batch,
    scratch,
    pool_programs,
    requests,
    SHAPES: tl.constexpr,
    CONFIG: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first programs store a token's ring row for one compressor each; the last ``pool_programs`` pool."""
    begin(PDL)
    PARTS: tl.constexpr = len(SHAPES)
    program = tl.program_id(0)
    store_programs = tl.num_programs(0) - pool_programs
    if program >= store_programs:
        pool_windows(program - store_programs, pool_programs, requests, parts, batch, scratch, SHAPES, CONFIG,
                     NATIVE_FP8)  # fmt: skip
    elif CONFIG.REUSES_RING:
        r = program // PARTS // CONFIG.ROWS
        t = tl.load(batch.query_start_loc + r + 1).to(tl.int64) - 1 - program // PARTS % CONFIG.ROWS
        if t >= tl.load(batch.query_start_loc + r):
            store_state_row(t, program % PARTS, parts, batch, SHAPES, CONFIG)
    else:
        store_state_row((program // PARTS).to(tl.int64), program % PARTS, parts, batch, SHAPES, CONFIG)


def compress_and_insert(compressors: Sequence[CompressPart], batch: CompressBatch) -> None:
    """See `kernels.insert.compress_and_insert`: one launch for all compressors."""
    tokens, requests = len(batch.positions), len(batch.prefix_lens)
    if tokens == 0 or not compressors:
        return
    launch = compress_launch(compressors, batch)
    stored = (requests * batch.rows if reuses_ring_rows(batch) else tokens) * len(compressors)
    compress_kernel[(stored + launch.pool_programs,)](
        *launch.arguments,
        **launch.constants,
        enable_fp_fusion=True,
        num_warps=launch.config.warps,
        launch_pdl=launch.constants["PDL"],
    )


def reuses_ring_rows(batch: CompressBatch) -> bool:
    """Whether a token may overwrite the ring row of a token that a window of the step pools."""
    return batch.max_query_len > batch.rows - batch.pooled_tokens + 1


def compress_latents(part: CompressPart, batch: CompressBatch) -> Tensor:
    """See `kernels.insert.compress_latents`: entries that are stored as they are, at the row of their token."""
    latents = torch.zeros(len(batch.positions), part.dim, dtype=part.dtype, device=part.kv.device)
    rows = PlainRecord(part.dim, part.dtype)
    none = part.cos_sin[:0]  # positions outside of a table are not rotated
    part = replace(part, record=rows, pool=latents.view(torch.uint8), page_entries=1, cos_sin=none, hadamard=False)
    compress_and_insert([part], replace(batch, slots=batch.latent_rows))
    return latents


class CompressLaunch(NamedTuple):
    """Arguments and constants that `compress_kernel` and `insert_tokens_kernel` share, and how they are launched."""

    arguments: tuple[tuple[PartArguments, ...], BatchArguments, Scratch, int, int]
    constants: dict[str, Any]
    pool_programs: int
    config: LaunchConfig


def compress_launch(compressors: Sequence[CompressPart], batch: CompressBatch) -> CompressLaunch:
    """Checks the compressors, allocates scratch memory and divides the windows among programs.

    Raises:
        ValueError: compressors that do not fit the batch or that the kernel does not support.
    """
    for part in compressors:
        check_part(part, batch)
        _check_strides(part)
    config, device = launch_config(batch.pooled_tokens), batch.positions.device
    tokens, requests = len(batch.positions), len(batch.prefix_lens)
    blocks = [row_block(part.dim, part.cos_sin) for part in compressors]
    group = max(max(config.values // block, 1) for block in blocks) if config.lanes == 1 else 1
    jobs = [group // max(config.values // block, 1) for block in blocks]
    if config.lanes > 1:
        jobs = [triton.cdiv(part.dim, config.channels) for part in compressors]
    groups = min(tokens, tokens // (batch.ratio * group) + requests)  # at most
    programs = min(groups * sum(jobs), POOL_PROGRAMS)
    step = BatchArguments(
        batch.positions, batch.token_to_req, batch.query_start_loc, batch.prefix_lens, batch.ring_pages, batch.slots,
        batch.valid, batch.ring_pages.stride(0),
    )  # fmt: skip
    scratch = Scratch(compressors[0].kv, batch.token_to_req, 0)  # not used
    if config.lanes > 1:
        scratch = empty_scratch(compressors, groups, device)
    pooling = PoolingConfig(
        RATIO=batch.ratio,
        POOLED=batch.pooled_tokens,
        ROWS=batch.rows,
        LANES=config.lanes,
        READS=config.reads,
        CHANNELS=config.channels,
        CHUNKS=config.chunks,
        GROUP=group,
        JOBS=sum(jobs),
        REUSES_RING=reuses_ring_rows(batch),
        REQUESTS=max(128, triton.next_power_of_2(requests)),
    )
    arguments = (tuple(map(_part_arguments, compressors)), step, scratch, programs, requests)
    constants = {
        "SHAPES": tuple(map(_part_shape, compressors, jobs)),
        "CONFIG": pooling,
        "NATIVE_FP8": has_native_fp8(device),
        "PDL": supports_pdl(device),
    }
    return CompressLaunch(arguments, constants, programs, config)


def empty_scratch(compressors: Sequence[CompressPart], groups: int, device: torch.device) -> Scratch:
    """A row of pooled channels and a counter for each window that programs share; counters are 0 between launches."""
    width = max(part.dim for part in compressors)
    rows = groups * len(compressors)
    arrived = counters_of(device) if rows <= COUNTERS else torch.zeros(rows, dtype=torch.int32, device=device)
    return Scratch(torch.empty(rows * width, dtype=torch.float32, device=device), arrived, width)


def _part_arguments(part: CompressPart) -> PartArguments:
    return PartArguments(
        part.kv,
        part.score,
        part.ape,
        part.state,
        part.kv.stride(0),
        part.score.stride(0),
        part.state.stride(0),
        part.norm_weight,
        part.cos_sin,
        part.cos_sin.shape[0],
        part.pool,
        part.pool.stride(0),
        part.eps,
    )


def _part_shape(part: CompressPart, jobs: int) -> PartShape:
    return PartShape(
        D=part.dim,
        BLOCK=row_block(part.dim, part.cos_sin),
        ROPE=part.cos_sin.shape[1],
        STAGES=part.dim.bit_length() - 1 if part.hadamard else 0,
        DTYPE=TRITON_DTYPES[part.dtype],
        JOBS=jobs,
        **entry_constants(part.record, part.pool, part.page_entries),
    )


def _check_strides(part: CompressPart) -> None:
    rows = {"kv": part.kv.stride(1), "score": part.score.stride(1), "state": part.state.stride(2)}
    if any(stride != 1 for stride in rows.values()) or part.state.stride(1) != part.state.shape[2]:
        raise ValueError(
            f"rows of kv, score and state must be contiguous, and the rows of a ring: got strides {part.kv.stride()}, "
            f"{part.score.stride()} and {part.state.stride()}"
        )
    if not part.ape.is_contiguous() or (part.hadamard and part.dim & (part.dim - 1)):
        raise ValueError(
            f"ape must be contiguous, and a Hadamard rotation needs a power of two of channels: got strides "
            f"{part.ape.stride()} and {part.dim} channels"
        )
