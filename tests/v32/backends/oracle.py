"""Independent results: bytes of a 656-byte entry by scalar arithmetic, and dense attention by loops in float64."""

import math
import struct
from dataclasses import dataclass

import torch

from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record
from deepseek_attn.v32.backends import StepInput, concat_and_cache_mla

NAN, HUGE = float("nan"), 2**31 - 1
PAGE = 64


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


@dataclass
class Case:
    """A ragged batch with its cache filled, and the keys that it holds."""

    step: StepInput
    cache: torch.Tensor  # [pages, 64, width]
    keys: list  # per request float64 [seq_len, latent + rope], as a reader of the cache sees them
    topk: torch.Tensor  # int32 [rows + spare, K], the indexer's buffer
    q: torch.Tensor  # [rows, heads, latent + rope]
    latent: int


def make_case(query_lens, seq_lens, heads, kv_cache_dtype, topk=24, latent=128, rope=64, pad=0, seed=0, q_dtype=None):
    """Pages in random order; unwritten entries are NaN; top-k rows have holes or are empty, padding rows are junk."""
    g = torch.Generator().manual_seed(seed)
    dtype = torch.uint8 if kv_cache_dtype == "fp8_ds_mla" else torch.bfloat16
    dtype = torch.float32 if kv_cache_dtype == "auto" else dtype
    width = Fp8DsMlaV32Record(latent, rope).entry_bytes if dtype == torch.uint8 else latent + rope
    pages_of = [-(-n // PAGE) for n in seq_lens]
    order = (torch.randperm(sum(pages_of) + 3, generator=g) + 2).tolist()
    table = torch.full((len(seq_lens), max([*pages_of, 1]) + 1), 1 << 24, dtype=torch.int32)
    for r, pages in enumerate(pages_of):
        table[r, :pages] = torch.tensor([order.pop() for _ in range(pages)], dtype=torch.int32)
    step = StepInput.from_lens(query_lens, seq_lens, table, num_padded_tokens=sum(query_lens) + pad)
    cache = torch.full((sum(pages_of) + 5, PAGE, width * dtype.itemsize), 255, dtype=torch.uint8).view(dtype)
    keys = []
    for r, n in enumerate(seq_lens):
        rows = torch.randn(n, latent + rope, generator=g) * torch.logspace(-2, 1, latent + rope)
        slots = table[r].long().repeat_interleave(PAGE)[:n] * PAGE + torch.arange(n) % PAGE
        concat_and_cache_mla(rows[:, :latent], rows[:, latent:], cache, slots, kv_cache_dtype)
        keys.append(seen(rows, latent, kv_cache_dtype).double())
    rows = step.num_padded_tokens
    buffer = torch.randint(0, max([*seq_lens, 1]), (rows + 7, topk), generator=g, dtype=torch.int32)
    t = 0
    for length, n in zip(query_lens, seq_lens, strict=True):
        for j in range(length):
            visible = torch.randperm(n - length + j + 1, generator=g)[:topk].int()
            buffer[t] = -1
            columns = torch.randperm(topk, generator=g)[: len(visible)]
            buffer[t, columns] = visible
            buffer[t, torch.rand(topk, generator=g) < 0.2] = -1
            if t % 11 == 7:
                buffer[t] = -1  # sees nothing
            t += 1
    q = torch.randn(rows, heads, latent + rope, generator=g).to(q_dtype or torch.float32)
    return Case(step, cache, keys, buffer, q, latent)


def seen(rows, latent, kv_cache_dtype):
    """The values that a reader of the cache gets for ``rows``."""
    if kv_cache_dtype == "auto":
        return rows
    rows = rows.bfloat16()
    if kv_cache_dtype == "bfloat16":
        return rows.float()
    groups = rows[:, :latent].float().unflatten(1, (latent // 128, 128))
    scale = groups.abs().amax(2, keepdim=True) / torch.tensor(448.0)
    fp8 = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return torch.cat([fp8.flatten(1).bfloat16(), rows[:, latent:]], dim=1).float()


def dense_answer(case, scale):
    """float64 ``[rows, heads, latent]``: every query over its own keys, one at a time."""
    rows, heads, _ = case.q.shape
    out = torch.zeros(rows, heads, case.latent, dtype=torch.float64)
    starts = case.step.query_start_loc_cpu.tolist()
    for r, keys in enumerate(case.keys):
        for t in range(starts[r], starts[r + 1]):
            chosen = [i for i in case.topk[t].tolist() if i >= 0]
            if chosen:
                weights = (case.q[t].double() @ keys[chosen].t() * scale).softmax(1)
                out[t] = weights @ keys[chosen, : case.latent]
    return out
