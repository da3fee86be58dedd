"""Triton version of `reference.compress`: windows that close in a step are pooled and stored, open ones are kept.

Programs that pool look for the windows that close, from the lengths of the requests, so that none is started for each
of many tokens. Short windows are pooled by one program, in float32 and channel by channel. Of long ones every program
pools a few channels, and the last of them to arrive stores the entry: the norm takes all of its channels. The other
programs keep a token's row in the ring of its request. In steps of more than ``rows - coff * ratio + 1`` tokens of a
request such a row may be one that is pooled; then the program that pools it stores what comes in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.counters import COUNTERS, counters_of
from deepseek_attn.kernels.common.device import has_native_fp8, supports_pdl
from deepseek_attn.kernels.common.row_ops import begin, entry_constants, row_block
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.insert.compress_reference import CompressBatch, CompressPart, check_part
from deepseek_attn.kernels.insert.compress_triton import PartShape, Pooling, pool_windows, store_state_row

WORKERS = 528  # programs that pool at most: four for each multiprocessor of an H200


class Tiles(NamedTuple):
    """How a window is pooled.

    Attributes:
        warps: of a program; lanes: tokens that are summed side by side, and meet at the end; reads: tokens that a lane
            reads at once; channels: of a program, 0 for all. With ``lanes`` of 1 a program pools them all.
        values: channels of a program that pools whole windows, which takes several narrow ones.
    """

    warps: int
    lanes: int
    reads: int
    channels: int = 0
    chunks: int = 1
    values: int = 512
    registers: int | None = None


def choose_tiles(pooled_tokens: int) -> Tiles:
    """The fastest on an H200. A window must be summed alike in every step, so that it depends on nothing else."""
    if pooled_tokens <= 16:
        return Tiles(4, 1, triton.next_power_of_2(pooled_tokens))
    return Tiles(4, 16, 4, 32)


@triton.jit(do_not_specialize=["workers", "requests"])
def _compress_kernel(
    parts,
    batch,
    room,
    workers,
    requests,
    SHAPES: tl.constexpr,
    HOW: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first programs keep a token's row for one compressor each; the others are ``workers`` that pool."""
    begin(PDL)
    PARTS: tl.constexpr = len(SHAPES)
    program = tl.program_id(0)
    keepers = tl.num_programs(0) - workers
    if program >= keepers:
        pool_windows(program - keepers, workers, requests, parts, batch, room, SHAPES, HOW, NATIVE_FP8)
    elif HOW.LONG:
        r = program // PARTS // HOW.ROWS
        t = tl.load(batch[2] + r + 1).to(tl.int64) - 1 - program // PARTS % HOW.ROWS
        if t >= tl.load(batch[2] + r):
            store_state_row(t, program % PARTS, parts, batch, SHAPES, HOW)
    else:
        store_state_row((program // PARTS).to(tl.int64), program % PARTS, parts, batch, SHAPES, HOW)


def compress_and_insert(parts: Sequence[CompressPart], batch: CompressBatch) -> None:
    """Same as `reference.compress.compress_and_insert`, in one launch for all ``parts``."""
    tokens, requests = len(batch.positions), len(batch.prefix_lens)
    if tokens == 0 or not parts:
        return
    launch = compress_launch(parts, batch)
    kept = (requests * batch.rows if is_long(batch) else tokens) * len(parts)
    _compress_kernel[(kept + launch.workers,)](
        *launch.arguments,
        **launch.constants,
        num_warps=launch.warps,
        maxnreg=launch.registers,
        launch_pdl=launch.constants["PDL"],
    )


def is_long(batch: CompressBatch) -> bool:
    """Whether a token may take the ring row of one that a window of the step pools."""
    return batch.max_query_len > batch.rows - batch.pooled_tokens + 1


class Launch(NamedTuple):
    """Arguments and constants of `_compress_kernel`, its programs that pool, and the warps of each."""

    arguments: tuple
    constants: dict[str, Any]
    workers: int
    warps: int
    registers: int | None


def compress_launch(parts: Sequence[CompressPart], batch: CompressBatch) -> Launch:
    """What the kernels here, and `insert_tokens`, are launched with.

    Raises:
        ValueError: compressors that do not fit the batch or that the kernel does not support.
    """
    for part in parts:
        check_part(part, batch)
        _check_strides(part)
    tiles, device = choose_tiles(batch.pooled_tokens), batch.positions.device
    tokens, requests = len(batch.positions), len(batch.prefix_lens)
    blocks = [row_block(part.dim, part.cos_sin) for part in parts]
    group = max(max(tiles.values // block, 1) for block in blocks) if tiles.lanes == 1 else 1
    jobs = [group // max(tiles.values // block, 1) for block in blocks]
    if tiles.lanes > 1:
        jobs = [triton.cdiv(part.dim, tiles.channels) for part in parts]
    shapes = tuple(map(_part_shape, parts, jobs))
    step = (batch.positions, batch.token_to_req, batch.query_start_loc, batch.prefix_lens, batch.ring_pages)
    step = (*step, batch.slots, batch.valid, batch.ring_pages.stride(0))
    groups = min(tokens, tokens // (batch.ratio * group) + requests)  # at most
    room = _room(parts, groups, device) if tiles.lanes > 1 else (parts[0].kv, batch.token_to_req, 0)
    workers = min(groups * sum(jobs), WORKERS)
    how = Pooling(
        batch.ratio,
        batch.pooled_tokens,
        batch.rows,
        tiles.lanes,
        tiles.reads,
        tiles.channels,
        tiles.chunks,
        group,
        sum(jobs),
        is_long(batch),
        max(128, triton.next_power_of_2(requests)),
    )
    constants = {"SHAPES": shapes, "HOW": how, "NATIVE_FP8": has_native_fp8(device), "PDL": supports_pdl(device)}
    return Launch(
        (tuple(map(_part_arguments, parts)), step, room, workers, requests),
        constants,
        workers,
        tiles.warps,
        tiles.registers,
    )


def _room(parts: Sequence[CompressPart], groups: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Rows for what the programs of a window pool, counters of these programs, and the length of a row."""
    width = max(part.dim for part in parts)
    rows = groups * len(parts)
    counters = counters_of(device) if rows <= COUNTERS else torch.zeros(rows, dtype=torch.int32, device=device)
    return torch.empty(rows * width, dtype=torch.float32, device=device), counters, width


def _part_arguments(part: CompressPart) -> tuple:
    return (
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
