"""Byte layouts of cache entries: offsets by hand, bytes by hand, and pools of every legal shape."""

import struct
from itertools import product

import pytest
import torch

from deepseek_attn.cache.records import (
    Fp8DsMlaRecord,
    IndexFp4Record,
    IndexFp8Record,
    PlainRecord,
    make_index_record,
    make_kv_record,
)
from deepseek_attn.cache.records_v41 import Fp4V41Record, Fp8V41Record
from deepseek_attn.kernels.common.quant import dequantize_nvfp4, fake_quant_fp8, quantize_nvfp4
from tests.support.rounded import fake_quant_fp4

RECORDS = [
    PlainRecord(24, torch.float32),
    PlainRecord(37, torch.bfloat16),
    PlainRecord(16, torch.float16),
    Fp8DsMlaRecord(448, 64),
    Fp8DsMlaRecord(64, 64),
    Fp8DsMlaRecord(576, 3),
    IndexFp8Record(128),
    IndexFp8Record(20),
    IndexFp4Record(128),
    IndexFp4Record(32),
    Fp8V41Record(512),
    Fp8V41Record(96),
    Fp4V41Record(512),
    Fp4V41Record(48),
]
POISON = 0xFF  # NaN as e4m3, e8m0, bf16, fp16 and float32


@pytest.fixture(params=RECORDS, ids=lambda r: f"{r.name}-{r.dim}")
def record(request):
    return request.param


def random_rows(record, count, seed=0, dtype=torch.float32):
    scale = torch.logspace(-3, 2, record.dim)
    return (torch.randn(count, record.dim, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def expected_values(record, rows):
    """What reading the rows back must give, from the quantisers alone."""
    if isinstance(record, PlainRecord):
        return rows.to(record.dtype).float()
    x = rows.bfloat16()
    if isinstance(record, Fp8DsMlaRecord):
        nope = fake_quant_fp8(x[:, : record.nope_dim], 64)
        return torch.cat((nope, x[:, record.nope_dim :]), dim=1).float()
    if isinstance(record, Fp8V41Record):
        return fake_quant_fp8(x, 32).float()
    if isinstance(record, Fp4V41Record):
        return dequantize_nvfp4(*quantize_nvfp4(x)).bfloat16().float()
    if isinstance(record, IndexFp8Record):
        return fake_quant_fp8(x, record.dim).float()
    return fake_quant_fp4(x).float()


def poisoned(record, num_pages, n):
    return record.allocate(num_pages, n).fill_(POISON)


def same(a, b):
    """Bit-equality, so that NaN and negative zero count."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("kind", "n", "entry", "page"),
    [
        (Fp8DsMlaRecord(448, 64), 64, 584, 37440),
        (Fp8DsMlaRecord(448, 64), 2, 584, 1728),
        (Fp8DsMlaRecord(448, 64), 256, 584, 149760),
        (Fp8DsMlaRecord(64, 64), 3, 200, 768),
        (Fp8DsMlaRecord(576, 0), 2, 592, 1728),
        (IndexFp8Record(128), 64, 132, 8640),
        (IndexFp4Record(128), 64, 68, 4608),
        (Fp8V41Record(512), 64, 528, 33792),
        (Fp4V41Record(512), 64, 288, 18432),
        (Fp4V41Record(512), 128, 288, 36864),
        (PlainRecord(512), 64, 1024, 65536),
        (PlainRecord(512), 2, 1024, 2048),
        (PlainRecord(7, torch.float32), 3, 28, 84),
    ],
    ids=str,
)
def test_sizes(kind, n, entry, page):
    assert kind.entry_bytes == entry
    assert kind.page_bytes(n) == page
    pool = kind.allocate(3, n)
    assert pool.shape == (3, page)
    assert pool.dtype == torch.uint8
    assert not pool.any()
    assert f"{page} B" in kind.describe(n)
    assert kind.name in kind.describe()


def test_a_584_byte_entry_by_hand():
    row = torch.zeros(512)
    row[0], row[1], row[2], row[3] = 3.0, -3.0, 1.5, 0.001
    row[64] = 448.0  # group 1: scale 1
    row[128] = 449.0  # group 2: rounds to 448 in bf16 before anything else
    row[192] = 5e-5  # group 3: below the floor of amax
    row[320] = 450.0  # group 5: just above 448
    row[448], row[511] = 1.0, -2.00390625  # rope: the second is a tie in bf16, to even
    record, n = Fp8DsMlaRecord(448, 64), 64
    pool = record.allocate(2, n)
    record.insert(pool, n, torch.tensor([n + 5]), row[None])
    page = pool[1].tolist()
    data, scales = page[5 * 576 : 6 * 576], page[n * 576 + 5 * 8 : n * 576 + 6 * 8]
    assert scales == [120, 127, 127, 105, 105, 128, 105, 0]
    # 384 = 1.5 * 2**8 = 0 1111 100; 192 = 0 1110 100; 0.001 in bf16 is 0.00099945, * 128 = 0.1279 = 0 0100 000
    assert data[:4] == [0x7C, 0xFC, 0x74, 0x20]
    assert data[64] == data[128] == 0x7E
    assert data[192] == 0x75  # bf16 of 5e-5, times 2**22, is 209 -> 208 = 1.625 * 2**7 = 0 1110 101
    assert data[320] == 0x76  # 450 / 2 = 225 -> 224 = 1.75 * 2**7 = 0 1110 110
    assert data[448:450] == [0x80, 0x3F]
    assert data[574:576] == [0x00, 0xC0]
    written = {5 * 576 + i for i in range(576)} | {n * 576 + 5 * 8 + i for i in range(8)}
    assert not any(b for i, b in enumerate(page) if i not in written)
    assert not pool[0].any()


def test_index_fp8_entry_by_hand():
    record, n = IndexFp8Record(128), 64
    row = torch.zeros(2, 128)
    row[0, 0], row[0, 127], row[1, 1] = 3.0, -1.5, 1000.0
    pool = record.allocate(2, n)
    record.insert(pool, n, torch.tensor([n + 3, 63]), row)
    page = bytes(pool[1].tolist())
    assert page[3 * 128] == 0x7C
    assert page[3 * 128 + 127] == 0xF4
    assert page[n * 128 + 12 : n * 128 + 16] == struct.pack("<f", 2.0**-7)
    page = bytes(pool[0].tolist())
    assert page[63 * 128 + 1] == 0x78  # 1000 / 4 = 250 -> 256 = 0 1111 000
    assert page[n * 128 + 4 * 63 : n * 132] == struct.pack("<f", 4.0)


def test_index_fp4_entry_by_hand():
    record, n = IndexFp4Record(128), 64
    row = torch.zeros(1, 128)
    row[0, 0], row[0, 1], row[0, 33], row[0, 127] = 3.0, -0.25, 6.0, -100.0
    pool = record.allocate(2, n)
    record.insert(pool, n, torch.tensor([n + 2]), row)
    page = pool[1].tolist()
    assert page[2 * 64] == 7 | 9 << 4  # 3 / 2**-1 = 6; -0.25 / 2**-1 = -0.5
    assert page[2 * 64 + 16] == 7 << 4
    assert page[2 * 64 + 63] == (8 | 5) << 4  # -100 / 32 = -3.125 -> -3
    assert page[n * 64 + 8 : n * 64 + 12] == [126, 127, 1, 132]


def test_v41_entries_by_hand():
    """Of the values 1, -2, 0.5, 0, ...: all of a page's values, then all of its scales."""
    row, n = torch.zeros(1, 512), 64
    row[0, :3] = torch.tensor([1.0, -2.0, 0.5])
    window, entry = Fp8V41Record(512), Fp4V41Record(512)
    pool = window.allocate(2, n)
    window.insert(pool, n, torch.tensor([n + 5]), row)
    assert bytes(pool[1, 5 * 512 : 5 * 512 + 4].tolist()) == b"\x70\xf8\x68\x00"
    assert pool[1, n * 512 + 5 * 16 : n * 512 + 5 * 16 + 2].tolist() == [0x78, 105]  # 105: a group of zeros
    assert torch.equal(window.gather(pool, n, torch.tensor([n + 5]), torch.float32), row)
    pool = entry.allocate(2, n)
    entry.insert(pool, n, torch.tensor([n + 5]), row)
    assert bytes(pool[1, 5 * 256 : 5 * 256 + 2].tolist()) == b"\xf5\x03"
    assert pool[1, n * 256 + 5 * 32 : n * 256 + 5 * 32 + 2].tolist() == [0x2B, 1]  # 1: the smallest e4m3
    read = entry.gather(pool, n, torch.tensor([n + 5]), torch.float32)[0]
    assert read[:4].tolist() == [1.03125, -2.0625, 0.515625, 0.0]


def test_v41_entries_divide_by_the_scale():
    """Values on ties go to the even code; a product with the rounded reciprocal of the scale would move some."""
    scale = torch.tensor(0.34375)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * scale
    x = torch.cat([ties, -ties, torch.tensor([2.0, 0.0])])
    packed, found = quantize_nvfp4(x)
    assert float(found) == float(scale)
    codes = [byte >> shift & 15 for byte in packed.tolist() for shift in (0, 4)]
    assert codes[:7] == [0, 2, 2, 4, 4, 6, 6]
    assert codes[7:14] == [8, 10, 10, 12, 12, 14, 14]


def test_read_back_equals_the_quantisers(record):
    for n, dtype in product([1, 2, 7, 64], [torch.float32, torch.bfloat16, torch.float16]):
        count = 2 * n + 1
        rows = random_rows(record, count, dtype=dtype)
        pool = poisoned(record, 4, n)
        slots = torch.randperm(4 * n, generator=torch.Generator().manual_seed(n))[:count]
        record.insert(pool, n, slots, rows)
        expected = expected_values(record, rows)
        assert same(record.gather(pool, n, slots, torch.float32), expected), (n, dtype)
        assert same(record.gather(pool, n, slots.int().view(1, -1), dtype), expected.to(dtype)[None]), (n, dtype)


def test_insert_changes_only_the_bytes_of_its_entries(record):
    n = 5
    pool = poisoned(record, 3, n)
    before = pool.clone()
    record.insert(pool, n, torch.tensor([7, -1, 14]), random_rows(record, 3))
    free = torch.ones_like(pool, dtype=torch.bool)
    for slot in (7, 14):
        start = 0
        for width in record.row_bytes:
            begin = start + slot % n * width
            free[slot // n, begin : begin + width] = False
            start += n * width
    assert torch.equal(pool[free], before[free])
    assert record.gather(pool, n, torch.tensor([7, 14]), torch.float32).isfinite().all()


def test_scale_pad_bytes_are_written_zero():
    for record, groups in ((Fp8DsMlaRecord(448, 64), 7), (Fp8DsMlaRecord(576, 64), 9)):
        pool = poisoned(record, 1, 3)
        record.insert(pool, 3, torch.tensor([2]), random_rows(record, 1))
        data, scale = record.row_bytes
        row = pool[0, 3 * data + 2 * scale : 3 * data + 3 * scale]
        assert not row[groups:].any()
        assert row[:groups].all()


def test_negative_slots_write_nothing_and_read_zeros(record):
    for numbers in ([-1], [-1, -5, -1], [3, -1, 0, -2], [-1, 0, -(2**40)], [-1, -1, 5]):
        n, slots = 3, torch.tensor(numbers)
        rows = random_rows(record, len(slots))
        rows[slots < 0] = float("nan")
        pool, only_live = poisoned(record, 2, n), poisoned(record, 2, n)
        record.insert(pool, n, slots, rows)
        record.insert(only_live, n, slots[slots >= 0], rows[slots >= 0])
        assert torch.equal(pool, only_live), numbers
        got = record.gather(pool, n, slots, torch.float32)
        assert same(got[slots < 0], torch.zeros(int((slots < 0).sum()), record.dim)), numbers
        assert same(got[slots >= 0], expected_values(record, rows[slots >= 0])), numbers


def test_poison_elsewhere_does_not_leak(record):
    n = 4
    pool = poisoned(record, 3, n)
    rows = random_rows(record, 1)
    record.insert(pool, n, torch.tensor([6]), rows)
    got = record.gather(pool, n, torch.tensor([[6, -1], [-1, 6]]), torch.float32)
    assert got.isfinite().all()
    assert same(got[0, 0], expected_values(record, rows)[0])
    assert record.gather(pool, n, torch.tensor([5]), torch.float32).isnan().any(), "the poison must be visible"


def test_zero_rows_and_scalar_slots(record):
    n = 2
    pool = poisoned(record, 1, n)
    before = pool.clone()
    empty = torch.empty(0, dtype=torch.int64)
    record.insert(pool, n, empty, torch.empty(0, record.dim))
    assert torch.equal(pool, before)
    assert record.gather(pool, n, empty, torch.bfloat16).shape == (0, record.dim)
    assert record.gather(pool, n, torch.empty(3, 0, dtype=torch.int32), torch.float32).shape == (3, 0, record.dim)
    assert record.gather(pool, n, torch.tensor(-1), torch.float32).tolist() == [0.0] * record.dim
    assert torch.equal(pool, before)


def test_kernels_may_read_no_page(record):
    """A pool without pages passes the check of kernels, which then read none; references need a page."""
    none = torch.empty(0, record.page_bytes(6), dtype=torch.uint8)
    record.check_pool(none, 6, 2)
    with pytest.raises(ValueError, match="at least one page"):
        record.gather(none, 6, torch.tensor([-1]), torch.float32)


def test_strided_pool_equals_contiguous_pool(record):
    n, num_pages = 6, 4
    page = record.page_bytes(n)
    slots = torch.tensor([0, 23, 7, -1, 12])
    rows = random_rows(record, 5)
    pool = poisoned(record, num_pages, n)
    record.insert(pool, n, slots, rows)
    read = record.gather(pool, n, slots, torch.float32)
    for lead, gap in ((0, 0), (576, 1152), (8, 24), (3, 5), (2, 6), (1, 0)):
        block = torch.full((num_pages, lead + page + gap), POISON, dtype=torch.uint8)
        strided = block[:, lead : lead + page]
        record.insert(strided, n, slots, rows)
        assert torch.equal(strided, pool), (lead, gap)
        assert (block[:, :lead] == POISON).all(), (lead, gap)
        assert (block[:, lead + page :] == POISON).all(), (lead, gap)
        assert same(record.gather(strided, n, slots, torch.float32), read), (lead, gap)
        assert same(record.gather(block[:, lead:], n, slots, torch.float32), read), (lead, gap)


@pytest.mark.parametrize(
    "record", [Fp8DsMlaRecord(448, 64), IndexFp8Record(128), PlainRecord(512)], ids=lambda r: r.name
)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_pages_past_two_gib(record, slot_dtype):
    n, page = 64, record.page_bytes(64)
    stride = (2**31 // 2 // 576 + 9) * 576  # page 2 begins past 2**31 bytes
    buffer = torch.empty(2 * stride + page, dtype=torch.uint8)  # the system commits only the pages that are touched
    pool = buffer.as_strided((3, page), (stride, 1))
    slots = torch.tensor([2 * n + 63, 2 * n, 5], dtype=slot_dtype)
    rows = random_rows(record, 3)
    record.insert(pool, n, slots, rows)
    small = record.allocate(3, n)
    record.insert(small, n, slots, rows)
    width = record.row_bytes[0]
    assert torch.equal(buffer[2 * stride + 63 * width : 2 * stride + 64 * width], small[2, 63 * width : 64 * width])
    assert same(record.gather(pool, n, slots, torch.float32), expected_values(record, rows))


def test_slot_numbers_past_int32_bytes():
    record, n = Fp8DsMlaRecord(64, 0), 2
    pages = 2**31 // record.page_bytes(n) + 10
    pool = torch.empty(pages, record.page_bytes(n), dtype=torch.uint8)
    slots = torch.tensor([pages * n - 1, 1])
    rows = random_rows(record, 2)
    record.insert(pool, n, slots, rows)
    assert same(record.gather(pool, n, slots, torch.float32), expected_values(record, rows))


def test_entries_are_independent_of_the_batch(record):
    n = 4
    rows = random_rows(record, 9)
    slots = torch.arange(9)
    at_once, singly = record.allocate(3, n), record.allocate(3, n)
    record.insert(at_once, n, slots, rows)
    for i in reversed(range(9)):
        record.insert(singly, n, slots[i : i + 1], rows[i : i + 1])
    assert torch.equal(at_once, singly)


@pytest.mark.parametrize(
    "record", [record for record in RECORDS if not isinstance(record, PlainRecord)], ids=lambda r: f"{r.name}-{r.dim}"
)
def test_rows_are_rounded_to_bf16_before_they_are_quantised(record):
    n, rows = 8, random_rows(record, 8, seed=3)
    pools = [record.allocate(1, n) for _ in range(2)]
    record.insert(pools[0], n, torch.arange(8), rows)
    record.insert(pools[1], n, torch.arange(8), rows.bfloat16())
    assert torch.equal(*pools)


def test_factories():
    assert make_kv_record("plain", 448, 64, torch.float32) == PlainRecord(512, torch.float32)
    assert make_kv_record("fp8_ds_mla", 448, 64) == Fp8DsMlaRecord(448, 64)
    assert make_index_record("plain", 128) == PlainRecord(128, torch.bfloat16)
    assert make_index_record("fp8", 128) == IndexFp8Record(128)
    assert make_index_record("fp4", 128) == IndexFp4Record(128)
    with pytest.raises(ValueError, match=r"'fp8'.*plain, fp8_ds_mla"):
        make_kv_record("fp8", 448, 64)
    with pytest.raises(ValueError, match=r"'int8'.*plain, fp8, fp4"):
        make_index_record("int8", 128)


def test_errors_state_the_facts():
    record, n = Fp8DsMlaRecord(448, 64), 2
    pool, slots, rows = record.allocate(3, n), torch.tensor([0]), torch.zeros(1, 512)

    def insert(pool=pool, slots=slots, rows=rows):
        return lambda: record.insert(pool, n, slots, rows)

    cases = [
        (lambda: Fp8DsMlaRecord(100, 64), "multiple of 64.*nope_dim 100"),
        (lambda: IndexFp8Record(6), "multiple of 4, got 6"),
        (lambda: IndexFp4Record(48), "multiple of 32, got 48"),
        (lambda: PlainRecord(8, torch.int32), "torch.int32"),
        (lambda: record.allocate(0, n), "num_pages = 0"),
        (lambda: record.page_bytes(0), "n = 0"),
        (insert(rows=torch.zeros(1, 500)), r"\[T, 512\].*\[1, 500\]"),
        (insert(rows=torch.zeros(1, 512, dtype=torch.int32)), "torch.int32"),
        (insert(slots=torch.tensor([0, 1])), r"slots \[2\] for 1 rows"),
        (insert(slots=torch.tensor([0.0])), "int64 or int32, got torch.float32"),
        (insert(slots=torch.tensor([6])), "slot 6 .* 6 entries"),
        (insert(pool=pool.view(torch.int8)), "torch.int8"),
        (insert(pool=pool[0]), r"\[1728\]"),
        (insert(pool=pool[:, :1160]), r"1168 bytes, got \[3, 1160\]"),
        (insert(pool=pool[:0]), r"\[0, 1728\]"),
        (insert(pool=torch.zeros(1728, 3, dtype=torch.uint8).T), "contiguous"),
        (insert(pool=pool[:1].expand(3, -1)), "1168 bytes apart"),
        (lambda: record.gather(pool, n, torch.tensor([[0, 6]]), torch.float32), "slot 6 .* 6 entries"),
        (lambda: record.gather(pool, n, slots, torch.int8), "torch.int8"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
