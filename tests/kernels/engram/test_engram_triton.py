"""The Engram ops in Triton: compiled for every GPU generation, and against plain torch."""

import os

import pytest
import torch

from deepseek_attn.kernels.engram import TableRows, reference

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.engram import launch as engram
from tests.kernels.compiled_launches import compiled_ops, on_gpus, ptxas_report

NAN = float("nan")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def make(T, m, dim, dtype, device=None):
    streams, kv = (
        torch.randn(T, m, dim, device=device).to(dtype),
        torch.randn(T, (m + 1) * dim, device=device).to(dtype),
    )
    return streams, kv, torch.randn(m, dim, device=device), torch.randn(m, dim, device=device)


def all_rows(tokens, n, columns, device=None):
    """Rows that hold every e4m3 byte, with every scale under which they are numbers of float32."""
    values = torch.arange(tokens * n * columns, device=device).to(torch.uint8).view(tokens, n, columns)
    scales = torch.arange(tokens * n * (columns // 32), device=device).add(1).remainder(250).to(torch.uint8)
    return TableRows(values.view(torch.float8_e4m3fn), scales.view(tokens, n, columns // 32))


@pytest.mark.usefixtures("triton_device")
@pytest.mark.parametrize("shape", [(5, 3, 96), (1, 24, 256), (11, 2, 32)], ids=str)
def test_rows_are_dequantised(device, shape: tuple[int, int, int]):
    rows = all_rows(*shape, device)
    got = engram.dequantize_rows(rows, torch.float32)
    assert torch.equal(got.nan_to_num(7e9), reference.dequantize_rows(rows, torch.float32).nan_to_num(7e9))
    if not INTERPRETED:
        got = engram.dequantize_rows(rows, torch.bfloat16)
        assert torch.equal(got.nan_to_num(7), reference.dequantize_rows(rows, torch.bfloat16).nan_to_num(7))


@pytest.mark.usefixtures("triton_device")
@pytest.mark.parametrize("shape", [(65, 3, 72), (1, 4, 5120), (9, 1, 64)], ids=str)
def test_the_gate(device, shape: tuple[int, int, int]):
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    streams, kv, q, k = make(*shape, dtype, device)
    kv[0, : shape[2]] = 0
    streams[-1, 0] *= 1e-9
    got = engram.gate_streams(streams, kv, q, k, 1e-20)
    expected = reference.gate_streams(streams, kv, q, k, 1e-20)
    assert got.dtype == dtype
    assert (got.double() - expected.double()).abs().max() <= (1e-5 if INTERPRETED else 2e-2)
    for _ in range(0 if INTERPRETED else 50):
        assert torch.equal(engram.gate_streams(streams, kv, q, k, 1e-20), got)
    if shape[0] > 2:
        streams[1], kv[1] = NAN, NAN
        after = engram.gate_streams(streams, kv, q, k, 1e-20)
        assert after[1].isnan().all()
        kept = torch.arange(shape[0], device=device) != 1
        assert torch.equal(after[kept], got[kept])


@pytest.mark.usefixtures("triton_device")
def test_the_sign_of_a_small_product_opens_the_gate(device):
    streams, kv = torch.ones(2, 1, 4, device=device), torch.zeros(2, 8, device=device)
    kv[:, 4:], kv[1, :4] = 1.0, -1e-30
    found = engram.gate_streams(streams, kv, torch.ones(1, 4, device=device), torch.ones(1, 4, device=device), 1e-20)
    gates = torch.sigmoid(torch.tensor([1e-3, -1e-3], device=device))
    assert torch.allclose(found[:, 0, 0], 1 + gates, atol=1e-7)


@pytest.mark.parametrize("arch", on_gpus())
@pytest.mark.skipif(INTERPRETED, reason="an interpreter compiles nothing")
def test_they_compile(tmp_path, arch):
    def call():
        engram.dequantize_rows(all_rows(3, 24, 256, "meta"), torch.bfloat16)
        engram.gate_streams(*make(3, 4, 5120, torch.bfloat16, "meta"), 1e-20)

    found = compiled_ops(arch, call)
    assert set(found) == {"engram_dequantize_kernel", "engram_gate_kernel"}
    if arch == "sm90":
        for (kernel,) in found.values():
            assert " 0 bytes spill stores" in ptxas_report(kernel, tmp_path)


def test_no_tokens_and_bad_arguments():
    streams, kv, q, k = make(2, 3, 8, torch.float32)
    assert engram.gate_streams(streams[:0], kv[:0], q, k, 1e-20).shape == (0, 3, 8)
    rows = all_rows(2, 3, 64)
    assert engram.dequantize_rows(TableRows(*(part[:0] for part in rows)), torch.float32).shape == (0, 192)
    with pytest.raises(ValueError, match=r"kv must be float32 \[2, 32\]"):
        engram.gate_streams(streams, kv[:, 8:], q, k, 1e-20)
    with pytest.raises(ValueError, match=r"scales must be uint8 \[2, 3, 2\]"):
        engram.dequantize_rows(rows._replace(scales=rows.scales[..., :1]), torch.float32)
    with pytest.raises(ValueError, match=r"must be float8_e4m3fn, got torch\.uint8"):
        engram.dequantize_rows(rows._replace(values=rows.values.view(torch.uint8)), torch.float32)
