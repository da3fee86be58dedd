"""A scheduled batch, the input of the V3.2 metadata builders, and where its prefills start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_attn.kernels.indices import slot_mapping_from_positions
from deepseek_attn.utils.device import to_device


@dataclass
class StepInput:
    """One step's batch. Decodes come before prefills; token rows of a request are consecutive.

    Every length exists on the CPU too, so that building metadata never waits for the device.

    Attributes:
        query_start_loc: int32 ``[B + 1]`` first row of each request's new tokens, also on the CPU.
        seq_lens: int32 ``[B]`` context and new tokens of each request, also on the CPU.
        block_table: int32 ``[B, pages]`` page ids.
        slot_mapping: int64 ``[rows]`` slot that each row's entry is written to; -1 marks padding.
        num_reqs: ``B``, with the empty requests that pad a graph's batch.
        num_actual_tokens: rows that are tokens, ``query_start_loc_cpu[-1]``.
        num_padded_tokens: rows, with the padding at their end.
        max_query_len, max_seq_len: largest of the batch.
        is_prefilling: bool ``[B]`` on the CPU, requests whose prompt is not finished; None if unknown.
    """

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_reqs: int
    num_actual_tokens: int
    num_padded_tokens: int
    max_query_len: int
    max_seq_len: int
    is_prefilling: Tensor | None = None

    @classmethod
    def from_lens(
        cls,
        query_lens: list[int] | Tensor,
        seq_lens: list[int] | Tensor,
        block_table: Tensor,
        block_size: int = 64,
        device: torch.device | str = "cpu",
        num_padded_tokens: int | None = None,
        is_prefilling: Tensor | None = None,
    ) -> StepInput:
        """Builds a step from lengths on the CPU.

        Args:
            query_lens, seq_lens: ``[B]`` new tokens, and context + new tokens, of each request.
            block_table: int32 ``[B, pages]`` on the CPU.
            num_padded_tokens: rows of the batch; the rows after the last token are padding. None for no padding.

        Raises:
            ValueError: lengths that disagree with each other, the block table or the padding.
        """
        query_lens = torch.as_tensor(query_lens, dtype=torch.int64)
        seq_lens = torch.as_tensor(seq_lens, dtype=torch.int64)
        _check_lengths(query_lens, seq_lens, block_table, block_size)
        tokens = int(query_lens.sum())
        rows = tokens if num_padded_tokens is None else num_padded_tokens
        if rows < tokens:
            raise ValueError(f"{tokens} tokens do not fit in {rows} rows")
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)])
        requests = torch.repeat_interleave(torch.arange(len(query_lens)), query_lens)
        positions = torch.arange(tokens) - starts[requests] + (seq_lens - query_lens)[requests]
        slots = torch.full((rows,), -1, dtype=torch.int64)
        slots[:tokens] = slot_mapping_from_positions(positions, requests, block_table, block_size)
        device = torch.device(device)
        return cls(
            query_start_loc=to_device(starts.int(), device),
            query_start_loc_cpu=starts.int(),
            seq_lens=to_device(seq_lens.int(), device),
            seq_lens_cpu=seq_lens.int(),
            block_table=to_device(block_table.int(), device),
            slot_mapping=to_device(slots, device),
            num_reqs=len(query_lens),
            num_actual_tokens=tokens,
            num_padded_tokens=rows,
            max_query_len=int(query_lens.max()) if len(query_lens) else 0,
            max_seq_len=int(seq_lens.max()) if len(seq_lens) else 0,
            is_prefilling=is_prefilling,
        )

    @property
    def query_lens_cpu(self) -> Tensor:
        """int32 ``[B]`` new tokens of each request."""
        return self.query_start_loc_cpu.diff()


def split_decodes_and_prefills(
    common_attn_metadata: StepInput,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> tuple[int, int, int, int]:
    """Counts the decodes and prefills of a batch.

    The batch must be ordered: decodes, short extends, long extends, prefills. The first request that is no decode, and
    all after it, are prefills.

    Args:
        common_attn_metadata: the step.
        decode_threshold: most new tokens of a decode.
        require_uniform: decodes must all have as many new tokens as the first request. Requests without new tokens
            (they pad a graph's batch) end the decodes only where another length already has.
        treat_short_extends_as_decodes: whether a short chunk of an unfinished prompt (``is_prefilling``) is a decode.

    Returns:
        ``(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens)``; tokens exclude padding rows.

    Raises:
        ValueError: short extends are to be told apart and the step does not say which requests are prefilling.
    """
    step, prefilling = common_attn_metadata, common_attn_metadata.is_prefilling
    if not treat_short_extends_as_decodes and prefilling is None:
        raise ValueError("treat_short_extends_as_decodes=False needs StepInput.is_prefilling")
    query_lens = step.query_lens_cpu
    if step.num_reqs == 0:
        return 0, 0, 0, 0
    first = int(query_lens[0])
    if first > decode_threshold:
        return 0, step.num_reqs, 0, step.num_actual_tokens
    if require_uniform:
        is_prefill = (query_lens != first) & (query_lens != 0)
    else:
        is_prefill = query_lens > decode_threshold
    if not treat_short_extends_as_decodes and prefilling is not None:
        is_prefill = is_prefill | prefilling
    if not bool(is_prefill.any()):
        return step.num_reqs, 0, step.num_actual_tokens, 0
    num_decodes = int(is_prefill.int().argmax())
    decode_tokens = int(step.query_start_loc_cpu[num_decodes])
    return num_decodes, step.num_reqs - num_decodes, decode_tokens, step.num_actual_tokens - decode_tokens


def reshape_query_for_spec_decode(query: Tensor, batch_size: int) -> Tensor:
    """Reshapes queries ``[N, heads, dim]`` of ``B`` requests of equal length to ``[B, N / B, heads, dim]``."""
    if batch_size < 1 or query.dim() != 3 or query.shape[0] % batch_size:
        raise ValueError(f"cannot share {list(query.shape)} query rows equally among {batch_size} requests")
    return query.unflatten(0, (batch_size, query.shape[0] // batch_size))


def reshape_attn_output_for_spec_decode(attn_output: Tensor) -> Tensor:
    """Reshapes ``[B, S, heads, dim]`` to ``[B * S, heads, dim]``; a tensor of three dimensions is returned as it is."""
    if attn_output.dim() == 3:
        return attn_output
    if attn_output.dim() != 4:
        raise ValueError(f"attention output has 3 or 4 dimensions, got {list(attn_output.shape)}")
    return attn_output.flatten(0, 1)


def _check_lengths(query_lens: Tensor, seq_lens: Tensor, block_table: Tensor, block_size: int) -> None:
    if query_lens.shape != seq_lens.shape or block_table.dim() != 2 or block_table.shape[0] != len(query_lens):
        raise ValueError(
            f"one entry per request: got {len(query_lens)} query_lens, {len(seq_lens)} seq_lens, "
            f"block_table {list(block_table.shape)}"
        )
    if bool((query_lens < 0).any()) or bool((seq_lens < query_lens).any()):
        raise ValueError(f"0 <= query_lens <= seq_lens is needed, got {query_lens.tolist()} and {seq_lens.tolist()}")
    if bool((seq_lens[query_lens > 0] > block_table.shape[1] * block_size).any()):
        raise ValueError(
            f"seq_lens {seq_lens.tolist()} do not fit in {block_table.shape[1]} pages of {block_size} tokens"
        )
