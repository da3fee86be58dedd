"""The greedy choice: the first of the largest logits, and none of broken rows."""

import os

import pytest
import torch

from deepseek_attn.kernels.sampling import INVALID_TOKEN, reference
from tests.kernels.compiled_launches import compiled_launches, on_gpus

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.sampling import argmax

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def gpu(device):
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton kernels need a GPU, or TRITON_INTERPRET=1")
    return device


def cases(device):
    """(name, logits): many widths, ties within and between parts, broken values anywhere."""
    for rows, vocab in ((1, 1), (3, 7), (2, 1024), (5, 1025), (33, 4096), (2, 129280)):
        logits = torch.randn(rows, vocab, device=device)
        yield f"random {rows} x {vocab}", logits
        yield f"ties {rows} x {vocab}", (logits * 2).round()
        yield f"equal {rows} x {vocab}", torch.full_like(logits, -3.5)
        for value in (NAN, INF, -INF):
            for place in (0, vocab // 2, vocab - 1):
                broken = logits.clone()
                broken[rows // 2, place] = value
                yield f"{value} at {place} of {rows} x {vocab}", broken
        nothing = logits.clone()
        nothing[-1] = -INF
        yield f"nothing {rows} x {vocab}", nothing
    yield "rows of a wider tensor", torch.randn(4, 3000, device=device)[:, 100:2300]
    yield "a transposed tensor", torch.randn(1500, 4, device=device).t()


def test_equals_plain_torch(gpu):
    for name, logits in cases(gpu):
        expected = reference.greedy_tokens(logits)
        found = argmax.greedy_tokens(logits)
        assert found.dtype == expected.dtype == torch.int64
        assert torch.equal(found, expected), name


def test_plain_torch():
    logits = torch.tensor([[0, 3, 3, 1], [-INF, -2, -INF, -INF], [0, NAN, 9, 0], [0, INF, 0, 0], [-INF] * 4])
    assert reference.greedy_tokens(logits).tolist() == [1, 1, INVALID_TOKEN, INVALID_TOKEN, INVALID_TOKEN]
    assert reference.greedy_tokens(torch.empty(0, 5)).tolist() == []


def test_refuses_what_is_no_logits():
    with pytest.raises(ValueError, match="float32"):
        argmax.greedy_tokens(torch.zeros(3, 4, dtype=torch.bfloat16))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter compiles nothing")
@pytest.mark.parametrize("arch", on_gpus())
def test_compiles(arch, monkeypatch):
    logits = torch.empty(32, 129280, device="meta")
    found = compiled_launches(monkeypatch, [argmax], arch, lambda: argmax.greedy_tokens(logits))
    assert set(found) == {"block_kernel", "row_kernel"}
