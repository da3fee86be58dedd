"""The 656-byte entry against scalar arithmetic."""

import math
import struct

import pytest
import torch

from deepseek_attn.cache.records import PlainRecord
from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record, fp8_entry_bytes, make_v32_record

RULES = ["raw", "pow2", "official"]


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16_bytes(x):
    """Round to nearest even on the bits of the float32."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def bf16(x):
    return struct.unpack("<f", b"\0\0" + bf16_bytes(x))[0]


def e4m3_value(byte):
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    return 2.0**-9 * mantissa if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)


E4M3 = [e4m3_value(byte) for byte in range(0x7F)]  # the positive ones, NaN excluded


def e4m3_byte(x):
    """Nearest value, ties to the even byte, saturating; the sign of zero is kept."""
    magnitude = min(abs(x), 448.0)
    byte = min(range(0x7F), key=lambda b: (abs(E4M3[b] - magnitude), b & 1))
    return byte | (0x80 if math.copysign(1, x) < 0 else 0)


def pow2_at_least(x):
    mantissa, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def scale_of(amax, rule):
    if rule == "raw":
        return max(f32(amax / 448.0), 2.0**-126)
    if rule == "pow2":
        return pow2_at_least(max(f32(amax / 448.0), f32(1e-4)))
    return pow2_at_least(f32(max(amax, f32(1e-4)) / 448.0))


def entry_bytes(row, latent, rule):
    """The bytes of one entry, value by value."""
    row = [bf16(x) for x in row]
    values, scales = b"", b""
    for start in range(0, latent, 128):
        group = row[start : start + 128]
        scale = scale_of(max(map(abs, group)), rule)
        scales += struct.pack("<f", scale)
        values += bytes(e4m3_byte(f32(x / scale)) for x in group)
    return values + scales + b"".join(bf16_bytes(x) for x in row[latent:])


def hostile_rows(count, latent=512, rope=64):
    """Random rows of every magnitude, then zeros, tiny, subnormal, boundary and signed-zero groups."""
    scale = torch.logspace(-6, 4, latent + rope)[torch.randperm(latent + rope)]
    rows = (torch.randn(count, latent + rope) * scale).bfloat16().float()
    rows[0, :128] = 0.0
    rows[0, 128:256] = 1e-7
    rows[0, 256:384] = torch.linspace(-448, 448, 128)
    rows[0, 384:512] = 1e-38
    rows[1, :128] = -0.0
    rows[1, 128:256] = torch.linspace(-449, 449, 128)
    rows[1, 256:384] = 5e-5
    rows[1, 384] = 3.3e38
    return rows


@pytest.mark.parametrize("rule", RULES)
def test_entries_are_bit_exact(rule):
    record, n = Fp8DsMlaV32Record(scale_rule=rule), 4
    rows = hostile_rows(6)
    pool = record.allocate(3, n).fill_(0xAB)
    slots = torch.tensor([11, 0, -1, 5, 6, -7])
    record.insert(pool, n, slots, rows)
    untouched = torch.full((12, 656), 0xAB, dtype=torch.uint8)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            untouched[slot] = torch.tensor(list(entry_bytes(rows[t].tolist(), 512, rule)), dtype=torch.uint8)
    got = pool.view(12, 656)
    different = (got != untouched).nonzero()
    assert len(different) == 0, f"first different (slot, byte): {different[0].tolist()}"


def test_an_entry_by_hand():
    record = Fp8DsMlaV32Record()
    row = torch.zeros(1, 576)
    row[0, 0], row[0, 1], row[0, 2] = 448.0, -1.0, 0.3
    row[0, 128], row[0, 129] = 3.5, 1.75  # scale 2**-7: 448 and 224
    row[0, 512], row[0, 575] = 1.0, -2.0
    pool = record.allocate(1, 1)
    record.insert(pool, 1, torch.tensor([0]), row)
    entry = pool[0].tolist()
    # 0.3 in bf16 is 0.30078125 -> 0.3125 = 1.25 * 2**-2 = 0 0101 010
    assert entry[:3] == [0x7E, 0xB8, 0x2A]
    assert entry[128:130] == [0x7E, 0x76]
    assert entry[512:516] == [0, 0, 0x80, 0x3F]  # 1.0
    assert entry[516:520] == [0, 0, 0, 0x3C]  # 2**-7
    assert entry[520:528] == [0, 0, 0x80, 0] * 2  # FLT_MIN for groups of zeros
    assert entry[528:530] == [0x80, 0x3F]
    assert entry[654:656] == [0, 0xC0]


@pytest.mark.parametrize("reader", RULES)
@pytest.mark.parametrize("writer", RULES)
def test_every_reader_reads_every_writer(writer, reader):
    rows = torch.randn(5, 576) * 30
    pool = Fp8DsMlaV32Record().allocate(1, 8)
    Fp8DsMlaV32Record(scale_rule=writer).insert(pool, 8, torch.arange(5), rows)
    got = Fp8DsMlaV32Record(scale_rule=reader).gather(pool, 8, torch.tensor([4, -1, 0]), torch.float32)
    assert torch.equal(got[:, 512:], torch.stack([rows[4], torch.zeros(576), rows[0]])[:, 512:].bfloat16().float())
    torch.testing.assert_close(got[0], rows[4], rtol=2**-3.9, atol=2e-1)
    assert not got[1].any()


def test_reading_multiplies_by_the_stored_float32():
    pool = torch.zeros(1, 656, dtype=torch.uint8)
    pool[0, 0] = 0x39  # 1.125
    pool[0, 512:516] = torch.tensor([0.1], dtype=torch.float32).view(torch.uint8)
    value = Fp8DsMlaV32Record().gather(pool, 1, torch.tensor([0]), torch.float32)[0, 0]
    assert value.item() == (torch.tensor(1.125) * torch.tensor(0.1)).item()


def test_official_rule_survives_being_written_twice():
    record = Fp8DsMlaV32Record(scale_rule="official")
    rows = hostile_rows(5)[2:]
    pool = record.allocate(2, 3)
    record.insert(pool, 3, torch.arange(3), rows)
    once = record.gather(pool, 3, torch.arange(3), torch.bfloat16)
    record.insert(pool, 3, torch.arange(3, 6), once)
    assert torch.equal(record.gather(pool, 3, torch.arange(3, 6), torch.bfloat16), once)


def test_sizes_and_names():
    assert (fp8_entry_bytes(512, 64), fp8_entry_bytes(128, 64)) == (656, 260)
    record = make_v32_record("fp8_ds_mla")
    assert (record.dim, record.page_bytes(64)) == (576, 64 * 656)
    assert make_v32_record("bfloat16").page_bytes(64) == 64 * 1152
    assert make_v32_record("auto", 128, 64, torch.float32) == PlainRecord(192, torch.float32)
    with pytest.raises(ValueError, match="unknown kv_cache_dtype 'fp8'"):
        make_v32_record("fp8")
    with pytest.raises(ValueError, match="latent_dim 100"):
        Fp8DsMlaV32Record(100)
    with pytest.raises(ValueError, match="unknown scale rule 'e8m0'"):
        Fp8DsMlaV32Record(scale_rule="e8m0")


def test_a_slot_beyond_two_gigabytes():
    """Entries are addressed in int64; almost all of the pool's memory is never touched."""
    record, n = Fp8DsMlaV32Record(), 64
    stride = 656 * 64
    pool = torch.empty(70001 * stride, dtype=torch.uint8).view(70001, stride)
    row = torch.randn(1, 576)
    record.insert(pool, n, torch.tensor([70000 * n + 63]), row)
    assert bytes(pool[70000, 63 * 656 :].tolist()) == entry_bytes(row[0].tolist(), 512, "raw")
