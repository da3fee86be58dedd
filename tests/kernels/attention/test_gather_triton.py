"""The Triton gathers against their plain-torch versions: the same bits, and nothing else written."""

import pytest
import torch

from deepseek_attn.cache.records import Fp8DsMlaRecord, IndexFp8Record, PlainRecord
from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record
from deepseek_attn.cache.records_v41 import Fp4V41Record, Fp8V41Record
from tests.kernels.attention.test_gather import gathered

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.attention import launch, reference

dequantize_and_gather_k_cache = gathered(reference.dequantize_and_gather_k_cache)
gather_on_gpu = gathered(launch.dequantize_and_gather_k_cache)

RECORDS = {
    "V4": Fp8DsMlaRecord(448, 64),
    "tiny": Fp8DsMlaRecord(64, 64),
    "wide": Fp8DsMlaRecord(640, 16),
    "V3.2": Fp8DsMlaV32Record(512, 64),
    "V4.1": Fp8V41Record(512),
    "V4.1 FP4": Fp4V41Record(512),
    "V4.1, narrow": Fp8V41Record(96),
    "V4.1 FP4, narrow": Fp4V41Record(48),
    "bf16": PlainRecord(512, torch.bfloat16),
    "fp32": PlainRecord(24, torch.float32),
}


@pytest.fixture
def gpu(triton_device):
    return triton_device


def make_cache(record, lengths, n, device, stride=2):
    """A pool of 0xFF bytes (NaN) with live entries only, strided pages, and the table; unused ids are huge."""
    pages = -(-max(lengths) // n) + 1
    size = -(-record.page_bytes(n) // 16) * 16
    pool = torch.full((len(lengths) * pages + 1, size * stride), 0xFF, dtype=torch.uint8, device=device)[:, :size]
    table = torch.randperm(len(lengths) * pages, device=device).view(len(lengths), pages).int()
    for r, length in enumerate(lengths):
        at = torch.arange(length, device=device)
        rows = torch.randn(length, record.dim, device=device) * torch.logspace(-5, 3, length, device=device)[:, None]
        record.insert(pool, n, table[r, at // n].long() * n + at % n, rows)
        table[r, -(-length // n) :] = 2**31 - 1
    return pool, table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("n", [1, 2, 53, 64])
@pytest.mark.parametrize("name", RECORDS)
def test_gather_is_the_same_bits(gpu, name, n, dtype):
    record, lengths = RECORDS[name], [65, 0, 1, 130]
    pool, table = make_cache(record, lengths, n, gpu)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=gpu)
    for tail in (None, 5):
        lens = None if tail is None else seq_lens.clamp(max=tail)
        wide = torch.full((2, 4, 150, record.dim + 8), 7.0, dtype=dtype, device=gpu)
        got, expected = wide[..., 8:] if name == "fp32" else wide[..., : record.dim]
        gather_on_gpu(got, record, pool, seq_lens, lens, table, n, 6)
        dequantize_and_gather_k_cache(expected, record, pool, seq_lens, lens, table, n, 6)
        assert torch.equal(wide[0], wide[1])
        assert got.isfinite().all()


def test_what_does_not_fit_is_left_out(gpu):
    """Lengths are on the GPU: a workspace or a table that is too short must do no harm."""
    record = RECORDS["tiny"]
    pool, table = make_cache(record, [40, 9], 4, gpu, stride=1)
    out = torch.full((3, 20, record.dim), 7.0, device=gpu)
    seq_lens = torch.tensor([40, 9], dtype=torch.int32, device=gpu)
    table[1, 1] = -1
    gather_on_gpu(out[:2, :16], record, pool, seq_lens, None, table, 4, 3)
    assert out[0, :3].eq(7).all()
    assert out[0, 3:16].ne(7).any(1).all()
    assert out[0, 16:].eq(7).all()
    assert out[1, 7:11].eq(0).all()
    assert out[1, 12:].eq(7).all()
    assert out[2].eq(7).all()
    out.fill_(7)
    gather_on_gpu(out[:2], record, pool, seq_lens, None, table[:, :2].contiguous(), 4, 0)
    assert out[0, 8:].eq(0).all()


def test_every_byte(gpu):
    """All 256 codes under scales from 2**-127 to NaN."""
    record = Fp8DsMlaRecord(256, 0)
    pool = record.allocate(1, 256, gpu)
    codes = torch.arange(256, dtype=torch.uint8, device=gpu)
    data, scales = record._views(pool, 256)
    data[0], scales[0] = codes, codes[:, None]
    out = torch.zeros(2, 1, 256, 256, device=gpu)
    lens, table = torch.tensor([256], device=gpu), torch.zeros(1, 1, dtype=torch.int32, device=gpu)
    gather_on_gpu(out[0], record, pool, lens, None, table, 256, 0)
    dequantize_and_gather_k_cache(out[1], record, pool, lens, None, table, 256, 0)
    assert torch.equal(out[0].isnan(), out[1].isnan())
    got, expected = (x.nan_to_num(123.0).view(torch.int32) for x in out)
    assert torch.equal(got, expected)


@pytest.mark.gpu
def test_pool_over_two_gib(gpu):
    record = RECORDS["V4"]
    pool = record.allocate(61_000, 64, gpu)
    assert pool.numel() > 2**31
    table = torch.tensor([[60_999, 58_001]], dtype=torch.int32, device=gpu)
    at = torch.arange(100, device=gpu)
    record.insert(pool, 64, table[0, at // 64].long() * 64 + at % 64, torch.randn(100, 512, device=gpu))
    out = torch.zeros(2, 1, 100, 512, dtype=torch.bfloat16, device=gpu)
    lens = torch.tensor([100], device=gpu)
    gather_on_gpu(out[0], record, pool, lens, None, table, 64, 0)
    dequantize_and_gather_k_cache(out[1], record, pool, lens, None, table, 64, 0)
    assert torch.equal(out[0], out[1])
    assert out[0].ne(0).any(-1).all()


def test_nothing_to_gather(gpu):
    record = RECORDS["tiny"]
    pool, table = make_cache(record, [3], 2, gpu)
    none = torch.zeros(1, dtype=torch.int32, device=gpu)
    out = torch.ones(1, 4, record.dim, device=gpu)
    gather_on_gpu(out[:0], record, pool, none[:0], None, table[:0], 2, 0)
    gather_on_gpu(out, record, pool, none + 3, none, table, 2, 0)
    gather_on_gpu(out, record, pool, none + 3, None, table, 2, 4)
    assert out.eq(1).all()


def test_refuses(gpu):
    record = RECORDS["tiny"]
    pool, table = make_cache(record, [3], 2, gpu)
    lens, out = torch.tensor([3], device=gpu), torch.ones(1, 4, record.dim, device=gpu)
    wrong = {
        "seq_lens must be": (out, record, pool, lens.repeat(2), None, table, 2, 0),
        "out must be .*, 128. with contiguous rows": (out[..., :-1], record, pool, lens, None, table, 2, 0),
        "64 entries per page needs": (out, record, pool, lens, None, table, 64, 0),
        "records that are read": (out, IndexFp8Record(128), pool, lens, None, table, 2, 0),
        "multiples of 2 bytes": (out, record, pool.flatten()[1:].unfold(0, 600, 600), lens, None, table, 2, 0),
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            gather_on_gpu(*arguments)
