"""Where the prefills of a batch start, and the reshapes of speculative decoding."""

import pytest
import torch

from deepseek_attn.v32.backends import (
    StepInput,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
    split_decodes_and_prefills,
)

TABLE = torch.arange(24, dtype=torch.int32).view(8, 3)


def step(query_lens, pad=None, **kwargs):
    seq_lens = [n + 10 for n in query_lens]
    return StepInput.from_lens(query_lens, seq_lens, TABLE[: len(query_lens)], num_padded_tokens=pad, **kwargs)


@pytest.mark.parametrize(
    ("query_lens", "threshold", "uniform", "expected"),
    [
        ([1, 1, 1], 1, False, (3, 0, 3, 0)),
        ([1, 1, 5, 9], 1, False, (2, 2, 2, 14)),
        ([5, 9], 1, False, (0, 2, 0, 14)),
        ([5, 1], 1, True, (0, 2, 0, 6)),
        ([1, 3, 2, 9], 3, False, (3, 1, 6, 9)),
        ([1, 3, 2, 9], 3, True, (1, 3, 1, 14)),  # the second request is longer than the first
        ([3, 3, 2, 9], 3, True, (2, 2, 6, 11)),
        ([3, 3, 3], 3, True, (3, 0, 9, 0)),
        ([3, 3, 0], 3, True, (3, 0, 6, 0)),  # an empty request pads a graph
        ([3, 0, 3, 2], 3, True, (3, 1, 6, 2)),
        ([2, 3], 3, True, (1, 1, 2, 3)),  # short enough, but not uniform
        ([2, 3], 3, False, (2, 0, 5, 0)),
        ([0, 0], 1, True, (2, 0, 0, 0)),
        ([0, 4], 4, True, (1, 1, 0, 4)),
        ([4], 4, True, (1, 0, 4, 0)),
        ([5], 4, True, (0, 1, 0, 5)),
        ([], 1, True, (0, 0, 0, 0)),
        ([], 2, False, (0, 0, 0, 0)),
    ],
    ids=str,
)
def test_split(query_lens, threshold, uniform, expected):
    assert split_decodes_and_prefills(step(query_lens), threshold, require_uniform=uniform) == expected


def test_padding_rows_are_no_tokens():
    assert split_decodes_and_prefills(step([2, 2, 0], pad=6), 2, require_uniform=True) == (3, 0, 4, 0)
    assert split_decodes_and_prefills(step([1, 7], pad=16), 1) == (1, 1, 1, 7)


def test_short_extends_can_be_prefills():
    prefilling = torch.tensor([False, False, True, True])
    batch = step([1, 1, 1, 6], is_prefilling=prefilling)
    assert split_decodes_and_prefills(batch, 1) == (3, 1, 3, 6)
    assert split_decodes_and_prefills(batch, 1, treat_short_extends_as_decodes=False) == (2, 2, 2, 7)
    alone = step([1, 1], is_prefilling=torch.tensor([False, True]))
    assert split_decodes_and_prefills(alone, 1, treat_short_extends_as_decodes=False) == (1, 1, 1, 1)
    with pytest.raises(ValueError, match="is_prefilling"):
        split_decodes_and_prefills(step([1]), treat_short_extends_as_decodes=False)


def test_step_from_lengths():
    table = torch.tensor([[7, 3], [5, 9]], dtype=torch.int32)
    batch = StepInput.from_lens([2, 3], [65, 4], table, num_padded_tokens=7)
    assert batch.query_start_loc.tolist() == batch.query_start_loc_cpu.tolist() == [0, 2, 5]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [65, 4]
    # positions 63, 64 of the first request; 1, 2, 3 of the second
    assert batch.slot_mapping.tolist() == [7 * 64 + 63, 3 * 64, 5 * 64 + 1, 5 * 64 + 2, 5 * 64 + 3, -1, -1]
    assert (batch.num_reqs, batch.num_actual_tokens, batch.num_padded_tokens) == (2, 5, 7)
    assert (batch.max_query_len, batch.max_seq_len) == (3, 65)
    dtypes = {batch.query_start_loc.dtype, batch.seq_lens.dtype, batch.block_table.dtype}
    assert dtypes == {torch.int32}
    assert batch.slot_mapping.dtype == torch.int64


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "pad", "message"),
    [
        ([2], [1], None, "query_lens <= seq_lens"),
        ([-1], [1], None, "0 <= query_lens"),
        ([1, 1], [1], None, "one entry per request"),
        ([1], [193], None, "do not fit in 3 pages of 64"),
        ([4], [9], 3, "4 tokens do not fit in 3 rows"),
    ],
    ids=lambda v: str(v).replace(" ", "_"),
)
def test_a_step_that_cannot_be(query_lens, seq_lens, pad, message):
    with pytest.raises(ValueError, match=message):
        StepInput.from_lens(query_lens, seq_lens, TABLE[:1], num_padded_tokens=pad)


def test_spec_decode_reshapes():
    q = torch.arange(6 * 2 * 3.0).view(6, 2, 3)
    shaped = reshape_query_for_spec_decode(q, 2)
    assert shaped.shape == (2, 3, 2, 3)
    assert torch.equal(shaped[1, 0], q[3])
    assert torch.equal(reshape_attn_output_for_spec_decode(shaped), q)
    assert reshape_attn_output_for_spec_decode(q) is q
    for batch in (4, 0):
        with pytest.raises(ValueError, match=f"among {batch} requests"):
            reshape_query_for_spec_decode(q, batch)
    with pytest.raises(ValueError, match="3 or 4 dimensions"):
        reshape_attn_output_for_spec_decode(q[0])
