"""Writing the cache and reading chunks of it, against loops."""

import pytest
import torch

from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record, kv_cache_view
from deepseek_attn.kernels.common import blocks
from deepseek_attn.v32.backends import concat_and_cache_mla, cp_gather_and_upconvert_fp8_kv_cache
from tests.v32.backends.oracle import HUGE, NAN, entry_bytes, seen


def fp8_cache(pages, n, latent=512):
    width = Fp8DsMlaV32Record(latent).entry_bytes
    return torch.full((pages, n, width), 255, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_rows_are_written_as_specified(dtype):
    cache = fp8_cache(3, 4)
    rows = (torch.randn(5, 576) * 3).to(dtype)
    slots = torch.tensor([9, -1, 0, 11])  # one slot less than rows: the last row is padding
    concat_and_cache_mla(rows[:, :512], rows[:, 512:], cache, slots, "fp8_ds_mla", torch.tensor(1.0))
    for slot in range(12):
        if slot in slots:
            row = rows[slots.tolist().index(slot)].float().tolist()
            assert bytes(cache[slot // 4, slot % 4].tolist()) == entry_bytes(row, 512, "raw")
        else:
            assert (cache[slot // 4, slot % 4] == 255).all()


@pytest.mark.parametrize(
    ("kind", "dtype"), [("auto", torch.float32), ("auto", torch.bfloat16), ("bfloat16", torch.bfloat16)], ids=str
)
def test_plain_rows(kind, dtype):
    cache = torch.full((2, 3, 192), NAN, dtype=dtype)
    rows = torch.randn(3, 192)
    concat_and_cache_mla(rows[:, :128], rows[:, 128:], cache, torch.tensor([5, -1, 2]), kind)
    expected = torch.full((6, 192), NAN, dtype=dtype)
    expected[5], expected[2] = rows[0].to(dtype), rows[2].to(dtype)
    assert torch.equal(cache.view(6, 192).nan_to_num(777), expected.nan_to_num(777))


def test_zero_rows():
    cache = fp8_cache(1, 4)
    concat_and_cache_mla(
        torch.zeros(0, 512), torch.zeros(0, 64), cache, torch.zeros(0, dtype=torch.int64), "fp8_ds_mla"
    )
    assert (cache == 255).all()


@pytest.mark.parametrize(
    ("kind", "message"), [("fp8", "unknown kv_cache_dtype 'fp8'"), ("auto", "'auto' does not fit a torch.uint8 cache")]
)
def test_cache_of_another_dtype(kind, message):
    with pytest.raises(ValueError, match=message):
        concat_and_cache_mla(torch.zeros(1, 512), torch.zeros(1, 64), fp8_cache(1, 4), torch.tensor([0]), kind)


def test_latent_and_rope_must_fit_the_slots():
    with pytest.raises(ValueError, match=r"\[1, 512\], \[1, 64\], \[2\]"):
        concat_and_cache_mla(
            torch.zeros(1, 512), torch.zeros(1, 64), fp8_cache(1, 4), torch.tensor([0, 1]), "fp8_ds_mla"
        )


@pytest.mark.parametrize("scratch", [1 << 26, 5000], ids=["one_block", "small_blocks"])
@pytest.mark.parametrize("seq_lens", [[5], [3, 0, 13, 1], [0, 4, 0], [8, 8], [0]], ids=str)
def test_gather_against_a_loop(seq_lens, scratch, monkeypatch):
    monkeypatch.setattr(blocks.rows_per_block, "__defaults__", (scratch,))
    latent, n, requests = 128, 4, len(seq_lens)
    pages = [-(-length // n) for length in seq_lens]
    ids = torch.randperm(sum(pages) + 2).tolist()
    cache = fp8_cache(sum(pages) + 2, n, latent)
    table = torch.full((requests, max(pages) + 2), HUGE, dtype=torch.int32)
    gaps = torch.randint(0, 3, (requests,))
    starts, row, expected = [], 0, torch.full((sum(seq_lens) + int(gaps.sum()) + 2, latent + 64), NAN)
    for r, length in enumerate(seq_lens):
        table[r, : pages[r]] = torch.tensor([ids.pop() for _ in range(pages[r])], dtype=torch.int32)
        rows = torch.randn(length, latent + 64)
        slots = table[r].long().repeat_interleave(n)[:length] * n + torch.arange(length) % n
        concat_and_cache_mla(rows[:, :latent], rows[:, latent:], cache, slots, "fp8_ds_mla")
        starts.append(row)
        expected[row : row + length] = seen(rows, latent, "fp8_ds_mla")
        row += length + int(gaps[r])
    out = torch.full(expected.shape, NAN, dtype=torch.bfloat16)
    lens, starts = (torch.tensor(x, dtype=torch.int32) for x in (seq_lens, starts))
    cp_gather_and_upconvert_fp8_kv_cache(cache, out, table, lens, starts, requests)
    assert torch.equal(out.float().nan_to_num(777), expected.nan_to_num(777))


def test_gather_of_nothing():
    empty = torch.zeros(0, dtype=torch.int32)
    out = torch.full((2, 576), NAN, dtype=torch.bfloat16)
    cp_gather_and_upconvert_fp8_kv_cache(fp8_cache(1, 4), out, torch.zeros(0, 3, dtype=torch.int32), empty, empty, 0)
    assert out.isnan().all()
    one = torch.zeros(1, dtype=torch.int32)
    cp_gather_and_upconvert_fp8_kv_cache(fp8_cache(1, 4), out[:0], one[:, None], one, one, 1)


def test_gather_from_strided_pages():
    record = Fp8DsMlaV32Record()
    pool = torch.zeros(3, 4 * record.page_bytes(2), dtype=torch.uint8)
    cache = kv_cache_view(record, pool, 2)
    row = torch.randn(1, 576)
    concat_and_cache_mla(row[:, :512], row[:, 512:], cache, torch.tensor([5]), "fp8_ds_mla")
    out = torch.empty(2, 576, dtype=torch.bfloat16)
    table, starts = torch.tensor([[2]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    cp_gather_and_upconvert_fp8_kv_cache(cache, out, table, starts + 2, starts, 1)
    assert torch.equal(out[1].float(), seen(row, 512, "fp8_ds_mla")[0])


@pytest.mark.parametrize("wrong", ["batch", "cache"])
def test_gather_refuses(wrong):
    lens = torch.zeros(2, dtype=torch.int32)
    cache = fp8_cache(1, 4) if wrong == "batch" else torch.zeros(1, 4, 576, dtype=torch.bfloat16)
    message = "need dst" if wrong == "batch" else "must hold FP8 entries"
    with pytest.raises(ValueError, match=message):
        cp_gather_and_upconvert_fp8_kv_cache(
            cache, torch.zeros(4, 576), lens[:, None], lens, lens, 3 if wrong == "batch" else 2
        )
