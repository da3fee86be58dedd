"""Norms, rotation and cache insertion of a step's tokens, and of its queries."""

import os

import pytest
import torch

from deepseek_attn.cache.records import Fp8DsMlaRecord, IndexFp4Record, IndexFp8Record, PlainRecord
from deepseek_attn.cache.records_v41 import Fp4V41Record, Fp8V41Record
from deepseek_attn.kernels.common.quant import QuantizedRows, quantize_fp8
from deepseek_attn.kernels.insert import CacheRows, CompressBatch, CompressPart, RawQueries, TokenRows, reference

EPS, POSITIONS = 1e-6, 300
RECORDS = {
    "V4": (Fp8DsMlaRecord(448, 64), 64),
    "tiny": (Fp8DsMlaRecord(64, 64), 64),
    "odd_sizes": (Fp8DsMlaRecord(640, 32), 32),
    "no_rope": (Fp8DsMlaRecord(128, 0), 0),
    "bf16": (PlainRecord(512, torch.bfloat16), 64),
    "fp32": (PlainRecord(24, torch.float32), 8),
    "index_fp8": (IndexFp8Record(128), 64),
    "index_fp4": (IndexFp4Record(160), 64),
    "fp8_v41": (Fp8V41Record(512), 64),
    "fp8_v41, narrow": (Fp8V41Record(96), 32),
    "fp4_v41": (Fp4V41Record(512), 64),
    "fp4_v41, narrow": (Fp4V41Record(48), 16),
}
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def runs_triton(device):
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.triton)])
def triton(request):
    if request.param == "triton":
        pytest.importorskip("triton", reason="the package triton is not installed")
    return request.param == "triton"


def keys_alone(insert_tokens):
    """The op without compressors."""
    return lambda tokens: insert_tokens(tokens, (), None)


@pytest.fixture
def insert(triton):
    if triton:
        from deepseek_attn.kernels.insert.launch import insert_tokens

        return keys_alone(insert_tokens)
    return keys_alone(reference.insert_tokens)


@pytest.fixture
def queries(triton):
    if triton:
        from deepseek_attn.kernels.insert.launch import query_norm_rope

        return query_norm_rope
    return reference.query_norm_rope


def rotary_table(rope, device):
    angles = torch.outer(
        torch.arange(POSITIONS).double(), 10000.0 ** -(torch.arange(0, rope, 2).double() / max(rope, 1))
    )
    return torch.cat([angles.cos(), angles.sin()], 1).float().to(device)


def expected_row(x, weight, table, position, dtype, norm=True):
    """One row in float64: norm if there is one, one rounding, rotation, one rounding."""
    x, table, position = x.double().cpu(), table.cpu(), int(position)
    y = x * (x.square().mean() + EPS).rsqrt() * (1 if weight is None else weight.double().cpu()) if norm else x
    y = y.to(dtype).double()
    pairs = table.shape[1] // 2
    for i in range(pairs):
        a, b = y[len(y) - 2 * pairs + 2 * i : len(y) - 2 * pairs + 2 * i + 2].tolist()
        cos, sin = float(table[position, i]), float(table[position, pairs + i])
        y[len(y) - 2 * pairs + 2 * i] = a * cos - b * sin
        y[len(y) - 2 * pairs + 2 * i + 1] = a * sin + b * cos
    return y.to(dtype)


def close(got, expected):
    """Equal but for the last place, which the order of sums may change, of the larger value of a pair."""
    got, expected = got.cpu(), expected.cpu()
    size = expected.double().abs().unflatten(0, (-1, 2)).amax(1, keepdim=True).expand(-1, 2).flatten()
    assert ((got.double() - expected.double()).abs() <= LIMIT[got.dtype] * size).all()


class Case:
    def __init__(self, name, dtype, device, T=9, n=4):
        self.record, rope = RECORDS[name]
        self.n, self.table = n, rotary_table(rope, device)
        scale = torch.logspace(-6, 4, T)[:, None]
        self.qr = (torch.randn(T, 96) * scale).to(device, dtype)
        self.kv = (torch.randn(T, self.record.dim) * scale).to(device, dtype)
        self.kv[0] = 0
        self.kv[1, ::3] *= 1e-3
        # magnitudes over many binades: subnormal codes, saturation and every scale
        self.kv_weight = (torch.randn(self.record.dim) * torch.logspace(-6, 3, self.record.dim)).to(device)
        self.q_weight = torch.randn(96).to(device)
        self.positions = torch.randint(POSITIONS, (T,)).to(device)
        self.slots = torch.randperm(3 * T)[:T].to(device)
        self.slots[2::4] = -1
        self.size = self.record.page_bytes(n)
        pages = -(-3 * T // n)
        self.pool = torch.full((pages, 2 * self.size + 64), 0xAB, dtype=torch.uint8, device=device)[:, : self.size]

    def tokens(self, **out):
        weights = (self.q_weight, self.kv_weight)
        cache = CacheRows(self.record, self.pool, self.n, self.slots)
        return TokenRows(self.qr, self.kv, *weights, EPS, self.table, self.positions, cache, **out)

    def run(self, op, **out):
        return op(self.tokens(**out))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", RECORDS)
def test_rows_and_stored_bytes(insert, device, name, dtype):
    case = Case(name, dtype, device)
    expected_pool = case.pool.clone()
    qr, kv = case.run(insert)
    for t in range(len(kv)):
        close(qr[t], expected_row(case.qr[t], case.q_weight, case.table[:, :0], 0, dtype))
        close(kv[t], expected_row(case.kv[t], case.kv_weight, case.table, case.positions[t], dtype))
    case.record.insert(expected_pool, case.n, case.slots, kv)
    assert torch.equal(case.pool, expected_pool)


@pytest.mark.parametrize("name", ["V4", "index_fp8", "index_fp4", "fp8_v41", "fp4_v41"])
def test_values_that_are_not_finite_stay_visible(insert, device, name):
    case = Case(name, torch.bfloat16, device)
    case.kv[3, 5], case.kv[4, 9] = float("nan"), float("inf")
    _, kv = case.run(insert)
    stored = case.record.gather(case.pool, case.n, case.slots, torch.float32)
    live = case.slots >= 0
    finite = kv.isfinite().all(1)
    assert not finite[3]
    assert not finite[4]
    assert stored[live & finite].isfinite().all()
    assert stored[live & ~finite].isnan().any(1).all()


def test_strided_rows(insert, device):
    case = Case("V4", torch.bfloat16, device)
    expected = case.run(insert)
    rows = torch.randn(9, 96 + 512 + 8, device=device).bfloat16()
    rows[:, :96], rows[:, 96:608] = case.qr, case.kv
    case.qr, case.kv = rows[:, :96], rows[:, 96:608]
    for mine, wanted in zip(case.run(insert), expected, strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("pow2", [True, False], ids=["pow2", "raw"])
@pytest.mark.parametrize("lora", [128, 1536])
def test_the_latent_is_also_quantised_for_fp8_linears(insert, device, lora, pow2):
    """Equal to the bit to quantising the output, in rows of a larger tensor."""
    case = Case("V4", torch.bfloat16, device, T=13)
    case.qr = (torch.randn(13, lora) * torch.logspace(-9, 4, 13)[:, None]).to(device).bfloat16()
    case.qr[3], case.qr[5, 7], case.qr[6, 20] = 0, float("nan"), float("inf")
    case.q_weight = (torch.randn(lora) * torch.logspace(-6, 3, lora)).to(device)
    q = torch.full((13, lora + 16), 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.full((lora // 128, 16), float("nan"), device=device)
    expected = case.run(insert)[0]
    got, _ = case.run(insert, qr_fp8=QuantizedRows(q[:, :lora], scales[:, :13].t(), pow2))
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    q_expected, scale_expected = quantize_fp8(expected, 128, pow2=pow2)
    finite = expected.isfinite().all(1)
    assert torch.equal(q[:, :lora].view(torch.uint8)[finite], q_expected.view(torch.uint8)[finite])
    assert torch.equal(scales[:, :13].t()[finite], scale_expected[finite])
    assert not (q[:, :lora].float() * scales[:, :13].t().repeat_interleave(128, 1))[~finite].isfinite().all(1).any()
    assert (q[:, lora:].view(torch.uint8) == 0x7F).all()
    assert scales[:, 13:].isnan().all()


def test_rows_do_not_depend_on_the_batch(insert, device):
    case = Case("V4", torch.bfloat16, device, T=40)
    whole = case.run(insert)
    stored = case.pool.clone()
    case.pool.fill_(0xAB)
    rows = [
        (case.qr[i : i + 1], case.kv[i : i + 1], case.positions[i : i + 1], case.slots[i : i + 1]) for i in range(40)
    ]
    for i, (case.qr, case.kv, case.positions, case.slots) in enumerate(rows):
        alone = case.run(insert)
        assert torch.equal(alone[0][0], whole[0][i])
        assert torch.equal(alone[1][0], whole[1][i])
    assert torch.equal(case.pool, stored)


def test_no_tokens(insert, device):
    case = Case("V4", torch.bfloat16, device)
    for name in ("qr", "kv", "positions", "slots"):
        setattr(case, name, getattr(case, name)[:0])
    qr, kv = case.run(insert)
    assert (qr.shape, kv.shape) == ((0, 96), (0, 512))
    assert case.pool.eq(0xAB).all()


@pytest.mark.gpu
def test_pool_over_two_gib(insert, device):
    case = Case("V4", torch.bfloat16, device, n=64)
    case.pool = torch.full((61_000, case.size), 0xAB, dtype=torch.uint8, device=device)
    assert case.pool.numel() > 2**31
    case.slots = torch.arange(9, device=device) + 60_999 * 64
    _, kv = case.run(insert)
    assert torch.equal(case.pool[60_999, : 9 * 576].view(9, 576), case.record.encode(kv)[0])
    assert case.pool[:60_999:1000].eq(0xAB).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "padded", "norm"), [(1, 1, True), (6, 6, True), (6, 64, False), (5, 9, True)])
def test_queries(queries, device, heads, padded, norm, dtype):
    table = rotary_table(64, device)
    wide = torch.randn(7, heads * 128 + 16, device=device).to(dtype) * 5
    q, positions = wide[:, : heads * 128], torch.randint(POSITIONS, (7,), device=device)
    q[3] = 0
    got = queries(RawQueries(q, heads, EPS, table, positions, padded, norm=norm))
    assert got.shape == (7, padded, 128)
    assert got[:, heads:].eq(0).all()
    for t in range(7):
        for h in range(heads):
            close(got[t, h], expected_row(q[t, h * 128 : h * 128 + 128], None, table, positions[t], dtype, norm))


@pytest.fixture
def rotate_and_insert(triton):
    if triton:
        from deepseek_attn.kernels.insert.launch import rope_insert

        return rope_insert
    return reference.rope_insert


@pytest.mark.parametrize("name", RECORDS)
def test_rows_that_are_rotated_and_stored(rotate_and_insert, device, name):
    """Bytes of the reference's rows; rows without a slot, and what lies between entries, stay as they were."""
    record, rope = RECORDS[name]
    dtype = record.dtype if isinstance(record, PlainRecord) else torch.bfloat16
    table, positions = rotary_table(rope, device), torch.randint(POSITIONS, (9,), device=device)
    rows = torch.randn(9, record.dim + 16, device=device).to(dtype)[:, : record.dim]
    pool = torch.full((5, record.page_bytes(4)), 0xAB, dtype=torch.uint8, device=device)
    slots = torch.tensor([5, -1, 17, 2, 3, -1, 19, 0, 8], device=device)
    rotate_and_insert(rows, positions, table, CacheRows(record, pool, 4, slots))
    expected = torch.full_like(pool, 0xAB)
    ones = torch.stack(
        [expected_row(row, None, table, at, dtype, norm=False) for row, at in zip(rows, positions, strict=True)]
    )
    record.insert(expected, 4, slots, ones.to(device))
    stored = record.gather(pool, 4, slots[slots >= 0], torch.float32)
    torch.testing.assert_close(stored, record.gather(expected, 4, slots[slots >= 0], torch.float32), rtol=0.1, atol=0.1)
    assert ((pool != expected).sum() <= 8) or dtype == torch.float32
    untouched = torch.tensor([s for s in range(20) if s not in slots.tolist()], device=device)
    for area in record._views(pool, 4):
        assert area.flatten(0, 1)[untouched].eq(0xAB).all()


def test_ties_of_fp4_entries(rotate_and_insert, device):
    """Values halfway between two of e2m1's, under every e4m3 scale: multiplied by its reciprocal, some would move."""
    record = Fp4V41Record(48)
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    rows = (scales[:, None] * torch.cat([middle, -middle])).view(42, 48).to(device, torch.bfloat16)
    expected = torch.full((1, record.page_bytes(42)), 0xAB, dtype=torch.uint8, device=device)
    pool, slots = expected.clone(), torch.arange(42, device=device)
    rotate_and_insert(rows, slots, rotary_table(0, device), CacheRows(record, pool, 42, slots))
    record.insert(expected, 42, slots, rows)
    assert torch.equal(pool, expected)
    assert torch.equal(pool[0, 42 * 24 :].cpu(), scales.to(torch.float8_e4m3fn).view(torch.uint8))


def test_no_queries(queries, device):
    table = rotary_table(8, device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert queries(RawQueries(torch.empty(0, 48, device=device), 3, EPS, table, none, 4)).shape == (0, 4, 16)


def test_refuses(device):
    pytest.importorskip("triton", reason="the package triton is not installed")
    from deepseek_attn.kernels.insert.launch import insert_tokens, query_norm_rope

    wrong = {
        "the weight of qr must be .96.": {"q_weight": torch.ones(95)},
        "float32, bfloat16 or float16": {"kv": torch.zeros(9, 512, dtype=torch.int32)},
        "slots of kv must be .9.": {"slots": torch.zeros(8, dtype=torch.int64)},
        "a record of 512 values": {"record": Fp8DsMlaRecord(64, 64)},
        "64 entries per page needs": {"n": 64},
        "both must be even": {"table": torch.zeros(POSITIONS, 63)},
    }
    for message, change in wrong.items():
        case = Case("V4", torch.bfloat16, torch.device("cpu"))
        for name, value in change.items():
            setattr(case, name, value)
        with pytest.raises(ValueError, match=message):
            case.run(keys_alone(insert_tokens))
    table, none = torch.zeros(POSITIONS, 8), torch.zeros(2, dtype=torch.int64)
    for message, arguments in {
        "padded_heads >= heads": (torch.zeros(2, 48), 3, EPS, table, none, 2),
        "got .2, 48., 5 heads": (torch.zeros(2, 48), 5, EPS, table, none, 5),
        "contiguous rows": (torch.zeros(48, 2).T, 3, EPS, table, none, 3),
        "both must be even": (torch.zeros(2, 45), 3, EPS, table, none, 3),
    }.items():
        with pytest.raises(ValueError, match=message):
            query_norm_rope(RawQueries(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["V4", "index_fp4", "fp8_v41", "fp4_v41"])
def test_fifty_launches_are_bit_identical(device, name):
    from deepseek_attn.kernels.insert.launch import insert_tokens

    case = Case(name, torch.bfloat16, device, T=300)
    first, stored = case.run(keys_alone(insert_tokens)), None
    for _ in range(50):
        again = case.run(keys_alone(insert_tokens))
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
        assert stored is None or torch.equal(case.pool, stored)
        stored = case.pool.clone()


@pytest.mark.parametrize("new", [1, 3, 9], ids=["decode", "speculative", "prefill"])
def test_with_the_compressors_of_the_layer(triton, device, new):
    """One launch or several: the same rows, entries and rings as from the separate ops."""
    if triton:
        from deepseek_attn.kernels.insert.launch import insert_tokens
    else:
        from deepseek_attn.kernels.insert.reference import insert_tokens
    requests, ratio, rows = 5, 4, 11
    tokens = requests * new
    case = Case("tiny", torch.bfloat16, device, T=tokens)
    prefix = torch.tensor([0, 3, 7, 17, 30], dtype=torch.int32, device=device)
    positions = (prefix.long()[:, None] + torch.arange(new, device=device)).flatten()
    slots = torch.where((positions + 1) % ratio == 0, torch.arange(tokens, device=device), -1)
    owners = torch.arange(tokens, dtype=torch.int32, device=device) // new
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * new
    rings = torch.arange(requests, dtype=torch.int32, device=device)
    valid = torch.ones(tokens, dtype=torch.bool, device=device)
    batch = CompressBatch(ratio, True, rows, positions, owners, starts, prefix, rings, slots, valid, new)
    found = []
    for op in (insert_tokens, None):
        torch.manual_seed(1)
        case.pool.fill_(0xAB)
        parts = []
        for record in (case.record, IndexFp8Record(128)):
            kv, score = torch.randn(2, tokens, 256, device=device)
            state = torch.randn(requests, rows, 512, device=device)
            pool = torch.full((tokens, record.page_bytes(1)), 0xAB, dtype=torch.uint8, device=device)
            fixed = (torch.randn(ratio, 256, device=device), state, torch.ones(128, device=device), EPS, case.table)
            parts.append(CompressPart(kv, score, *fixed, record, pool, 1, torch.bfloat16))
        if op is None:
            outs = reference.insert_tokens(case.tokens(), parts, batch)
        else:
            outs = op(case.tokens(), parts, batch)
        entries = [part.record.gather(part.pool, 1, slots, torch.float32) for part in parts]
        found.append((*outs, *entries, *(part.state for part in parts), case.pool))
    for got, expected in zip(*found, strict=True):
        if got.dtype == torch.uint8:
            assert (got != expected).float().mean() < 0.01
        else:
            assert (got.float() - expected.float()).abs().max() <= 0.07 * expected.float().abs().max()
    assert all(torch.equal(got, expected) for got, expected in zip(found[0][4:6], found[1][4:6], strict=True))


def test_window_only_layers_have_no_compressors(triton, device):
    if triton:
        from deepseek_attn.kernels.insert.launch import insert_tokens
    else:
        from deepseek_attn.kernels.insert.reference import insert_tokens
    case = Case("V4", torch.bfloat16, device)
    outs = insert_tokens(case.tokens(), [], None)
    case.pool = case.pool.clone()
    expected = case.run(keys_alone(reference.insert_tokens))
    close(outs.kv.flatten(), expected.kv.flatten())
    close(outs.qr.flatten(), expected.qr.flatten())
