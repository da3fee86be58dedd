"""Which prefill requests share the workspace, and where in it they start."""

import pytest
import torch

from deepseek_attn.v32.backends import SparseMLAConfig, get_prefill_workspace_size, split_prefill_chunks
from deepseek_attn.v32.backends.builder import chunk_workspace_starts


@pytest.mark.parametrize(
    ("seq_lens", "rows", "chunks", "starts"),
    [
        ([10, 15, 20, 5], 30, [(0, 2), (2, 4)], [0, 10, 0, 20]),
        ([30], 30, [(0, 1)], [0]),
        ([30, 1], 30, [(0, 1), (1, 2)], [0, 0]),
        ([10, 10, 10], 30, [(0, 3)], [0, 10, 20]),
        ([30, 0, 30], 30, [(0, 2), (2, 3)], [0, 30, 0]),
        ([0, 0], 5, [(0, 2)], [0, 0]),
        ([], 30, [], []),
    ],
    ids=str,
)
def test_chunks_and_their_starts(seq_lens, rows, chunks, starts):
    seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
    assert split_prefill_chunks(seq_lens, rows) == chunks
    got = chunk_workspace_starts(seq_lens, chunks)
    assert got.tolist() == starts
    assert got.dtype == torch.int32


def test_offset_counts_requests_before_the_first():
    assert split_prefill_chunks(torch.tensor([10, 15, 20, 5]), 30, 7) == [(7, 9), (9, 11)]


def test_random_chunks_fit_and_cannot_be_longer():
    for _ in range(50):
        seq_lens = torch.randint(0, 40, (int(torch.randint(1, 20, ())),))
        chunks = split_prefill_chunks(seq_lens, 64)
        assert [i for first, last in chunks for i in range(first, last)] == list(range(len(seq_lens)))
        for first, last in chunks:
            assert seq_lens[first:last].sum() <= 64
            if last < len(seq_lens):
                assert seq_lens[first : last + 1].sum() > 64


def test_a_request_longer_than_the_workspace():
    with pytest.raises(ValueError, match="request 1 has 31 tokens and the prefill workspace 30 rows"):
        split_prefill_chunks(torch.tensor([3, 31]), 30)


def test_workspace_size():
    assert get_prefill_workspace_size(163840) == 819200
    assert SparseMLAConfig(128).workspace_rows == 819200
    assert SparseMLAConfig(128, max_num_seqs=2).workspace_rows == 2 * 163840
    assert SparseMLAConfig(128, prefill_workspace_rows=163840).workspace_rows == 163840
    with pytest.raises(ValueError, match="must hold one request of max_model_len 163840"):
        SparseMLAConfig(128, prefill_workspace_rows=163839)
