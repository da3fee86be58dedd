"""Gathering cached entries into a workspace."""

import pytest
import torch

from deepseek_attn.kernels.attention import reference
from deepseek_attn.kernels.attention.types import RequestEntries
from tests.support.typed import untyped


class Rows:
    """Plain rows: a pool is ``[pages, n, dim]``."""

    dim = 3

    def gather(self, pool, n, slots, dtype):
        assert (slots >= 0).all()
        return pool.flatten(0, 1)[slots].to(dtype)


ROWS, DIM = untyped(Rows()), Rows.dim


def gathered(op):
    """`dequantize_and_gather_k_cache` of an implementation, with the fields of `RequestEntries` among its arguments."""

    def gather(out, record, pool, seq_lens, gather_lens, table, entries, offset):
        op(out, RequestEntries(record, pool, entries, table, seq_lens, gather_lens), offset)

    return gather


gather = gathered(reference.dequantize_and_gather_k_cache)


def make_cache(lengths, block_size, seed=0):
    """A NaN pool in which only the live entries are written, its block table, and the entries per request."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-max(lengths) // block_size) + 1
    pool = torch.full((len(lengths) * pages + 1, block_size, DIM), float("nan"))
    table = torch.randperm(len(lengths) * pages, generator=generator).view(len(lengths), pages).int()
    entries = [torch.randn(n, DIM, generator=generator) for n in lengths]
    for r, n in enumerate(lengths):
        for p in range(n):
            pool[table[r, p // block_size], p % block_size] = entries[r][p]
        table[r, -(-n // block_size) :] = 2**31 - 1
    return pool, table, entries


@pytest.mark.parametrize("block_size", [1, 2, 53, 64])
@pytest.mark.parametrize("tail", [None, 1, 5], ids=["all", "last_1", "last_5"])
def test_gather_writes_the_last_entries_and_nothing_else(block_size, tail):
    lengths = [65, 0, 1, 130]
    pool, table, entries = make_cache(lengths, block_size)
    out = torch.full((4, 140, DIM), 7.0, dtype=torch.bfloat16)
    gather_lens = None if tail is None else torch.tensor([min(n, tail) for n in lengths])
    gather(out, ROWS, pool, torch.tensor(lengths), gather_lens, table, block_size, 6)
    for r, n in enumerate(lengths):
        g = n if tail is None else min(n, tail)
        assert torch.equal(out[r, 6 : 6 + g], entries[r][n - g :].bfloat16())
        assert out[r, :6].eq(7).all()
        assert out[r, 6 + g :].eq(7).all()


def test_gather_into_a_strided_workspace_with_a_sliced_table():
    pool, table, entries = make_cache([9, 4], 2)
    wide = torch.cat([table, table], 1)[:, : table.shape[1]]
    arena = torch.zeros(2, 12, 2 * DIM)
    gather(arena[:, :, :DIM], ROWS, pool, torch.tensor([9, 4]), None, wide, 2, 1)
    assert torch.equal(arena[0, 1:10, :DIM], entries[0])
    assert torch.equal(arena[1, 1:5, :DIM], entries[1])
    assert arena[:, :, DIM:].eq(0).all()


def test_gather_nothing():
    pool, table, _ = make_cache([3], 2)
    gather(torch.empty(0, 4, DIM), ROWS, pool, torch.tensor([]), None, table[:0], 2, 0)
    out = torch.ones(1, 4, DIM)
    gather(out, ROWS, pool, torch.tensor([3]), torch.tensor([0]), table, 2, 4)
    assert out.eq(1).all()


@pytest.mark.parametrize(
    ("seq_len", "length", "offset", "message"),
    [(3, 4, 0, "4 of 3"), (3, 3, 2, "do not fit"), (9, 1, 0, "block table covers 6"), (3, -1, 0, "-1 of 3")],
)
def test_gather_refuses(seq_len, length, offset, message):
    pool, table, _ = make_cache([3], 2)
    with pytest.raises(ValueError, match=message):
        gather(torch.zeros(1, 4, DIM), ROWS, pool, torch.tensor([seq_len]), torch.tensor([length]), table, 2, offset)
