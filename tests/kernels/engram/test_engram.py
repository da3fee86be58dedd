"""Engram ops: the published test vectors of the hash, and both ops against arithmetic written out."""

import pytest
import torch

from deepseek_attn.config.engram import EngramConfig
from deepseek_attn.kernels.engram import TableRows, dequantize_rows, gate_streams, hash_rows
from tests.config.engram_cases import PUBLISHED

VECTORS = {
    1: {0: 13176822, 8: 138863141, 16: 270881916, 23: 376308748},
    14: {0: 12296247, 8: 134824779, 16: 267438965, 23: 382399531},
}


@pytest.mark.parametrize("layer", VECTORS)
def test_the_hash_gives_the_published_rows(layer):
    numbers = EngramConfig(**PUBLISHED).hash_of(layer)
    rows = hash_rows(
        torch.tensor([[0, 0, 0, 0], [11, 9, 7, 5]]), torch.tensor(numbers.multipliers), torch.tensor(numbers.primes)
    )
    assert {column: int(rows[1, column]) for column in VECTORS[layer]} == VECTORS[layer]
    starts = [sum(sum(numbers.primes, ())[:i]) for i in range(24)]
    assert rows[0].tolist() == starts


@pytest.mark.parametrize(("longest", "heads"), [(2, 1), (3, 5)])
def test_the_hash_is_that_of_unbounded_integers(longest, heads):
    multipliers = [2**40 + 2 * i + 1 for i in range(longest)]
    primes = [[101 + 2 * (n * heads + head) for head in range(heads)] for n in range(longest - 1)]
    ngrams = torch.randint(0, 2**22, (65, longest))
    rows = hash_rows(ngrams, torch.tensor(multipliers), torch.tensor(primes))
    for tokens, found in zip(ngrams.tolist(), rows.tolist(), strict=True):
        expected, mixed, start = [], tokens[0] * multipliers[0], 0
        for n in range(1, longest):
            mixed ^= tokens[n] * multipliers[n]
            for prime in primes[n - 1]:
                expected.append(mixed % prime + start)
                start += prime
        assert found == expected


def test_rows_are_dequantised_side_by_side():
    values = torch.randn(3, 2, 64).to(torch.float8_e4m3fn)
    scales = torch.randint(110, 130, (3, 2, 2), dtype=torch.uint8)
    expected = values.float() * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    assert torch.equal(dequantize_rows(TableRows(values, scales), torch.float32), expected.flatten(1))
    assert dequantize_rows(TableRows(values, scales), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_the_gate_is_that_of_float64(dtype):
    T, m, dim, eps = 65, 3, 72, 1e-20
    streams, kv = torch.randn(T, m, dim).to(dtype), torch.randn(T, (m + 1) * dim).to(dtype)
    q, k = torch.randn(m, dim), torch.randn(m, dim)
    x, key, value = streams.double(), kv[:, : m * dim].unflatten(1, (m, dim)).double(), kv[:, m * dim :].double()
    normed_x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * q
    normed_key = key * (key.square().mean(-1, keepdim=True) + eps).rsqrt() * k
    dot = (normed_x * normed_key).sum(-1) * dim**-0.5
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
    expected = x + gate.unsqueeze(-1) * value.unsqueeze(1)
    found = gate_streams(streams, kv, q, k, eps)
    assert found.dtype == dtype
    assert float((found.double() - expected).abs().max()) < (1e-5 if dtype == torch.float32 else 0.02)


def test_a_small_product_opens_the_gate_by_its_sign():
    streams, kv = torch.ones(2, 1, 4), torch.zeros(2, 8)
    kv[:, 4:] = 1.0
    kv[1, :4] = -1e-30
    found = gate_streams(streams, kv, torch.ones(1, 4), torch.ones(1, 4), 1e-20)
    gates = torch.sigmoid(torch.tensor([1e-3, -1e-3]))
    assert torch.allclose(found[:, 0, 0], 1 + gates, atol=1e-7)
    assert found[1, 0, 0] < 1.5 < found[0, 0, 0]


def test_shapes_and_dtypes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"must have one N, got \[3\], \[2, 4\] and \[2, 1\]"):
        hash_rows(torch.zeros(2, 4, dtype=torch.int64), torch.ones(3).long(), torch.ones(2, 1).long())
    with pytest.raises(ValueError, match=r"must be int64, got torch\.int32"):
        hash_rows(torch.zeros(2, 2, dtype=torch.int32), torch.ones(2).long(), torch.ones(1, 1).long())
    streams, weight = torch.zeros(2, 3, 8), torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"kv must be float32 \[2, 32\]"):
        gate_streams(streams, torch.zeros(2, 24), weight, weight, 1e-20)
    with pytest.raises(ValueError, match=r"must be float32 \[3, 8\], got bfloat16 \[3, 8\]"):
        gate_streams(streams, torch.zeros(2, 32), weight.bfloat16(), weight, 1e-20)
