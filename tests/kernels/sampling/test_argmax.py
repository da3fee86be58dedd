"""The greedy choice: the first of the largest logits, and none of broken rows. Drafts that it accepts."""

import os

import pytest
import torch

from deepseek_attn.kernels.sampling import INVALID_TOKEN, reference
from tests.kernels.compiled_launches import compiled_ops, on_gpus

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.sampling import launch as ops

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def gpu(triton_device):
    return triton_device


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
        found = ops.greedy_tokens(logits)
        assert found.dtype == expected.dtype == torch.int64
        assert torch.equal(found, expected), name
        assert torch.equal(ops.greedy_tokens(logits, invalid_token=0), expected.clamp(min=0)), name


def test_plain_torch():
    logits = torch.tensor([[0, 3, 3, 1], [-INF, -2, -INF, -INF], [0, NAN, 9, 0], [0, INF, 0, 0], [-INF] * 4])
    assert reference.greedy_tokens(logits).tolist() == [1, 1, INVALID_TOKEN, INVALID_TOKEN, INVALID_TOKEN]
    assert reference.greedy_tokens(torch.empty(0, 5)).tolist() == []


START = 7
VERIFIED = {  # a request's token and drafts, tokens chosen after each, rows that are no padding -> last right row
    "all right": ([9, 1, 2, 3], [1, 2, 3, 4], 4, 3),
    "fewer drafts than rows": ([9, 1, 2, 3], [1, 2, 3, 4], 3, 2),
    "the second is wrong": ([9, 1, 5, 3], [1, 2, 3, 4], 4, 1),
    "the first is wrong, later ones look right": ([9, 4, 2, 3], [1, 2, 3, 4], 4, 0),
    "broken logits": ([9, 0, 0, 0], [-1, 0, 0, 0], 4, 0),
    "padding": ([0, 0, 0, 0], [0, 0, 0, 0], 0, 0),
    "launched past its limit": ([9, 1, 2, 3], [1, 2, 3, 4], -2, 0),
}


def verification(device):
    token_ids, chosen, rows, last = zip(*VERIFIED.values(), strict=True)
    starts = START + torch.arange(len(last))
    tensors = torch.tensor(token_ids).flatten(), torch.tensor(chosen).flatten(), starts, starts + torch.tensor(rows)
    return [tensor.to(device) for tensor in tensors], torch.tensor(last), torch.tensor(rows)


@pytest.mark.parametrize("verify", [True, False])
def test_right_drafts(verify):
    inputs, last, rows = verification("cpu")
    last = last if verify else (rows - 1).clamp(min=0)
    found = reference.accept_drafts(*inputs, verify=verify)
    assert found.last_rows.tolist() == (4 * torch.arange(len(last)) + last).tolist()
    assert found.next_ids.tolist() == inputs[1][found.last_rows].clamp(min=0).tolist()
    assert found.next_starts.tolist() == (inputs[2] + last + 1).tolist()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_right_drafts_in_triton(gpu, rows, verify):
    """The cases above, and random ones: few tokens, so that many drafts are right."""
    starts = torch.randint(1000, (33,), device=gpu)
    random = torch.randint(2, (33 * rows,), device=gpu), torch.randint(-1, 2, (33 * rows,), device=gpu)
    batches = [verification(gpu)[0], [*random, starts, starts + torch.randint(-1, rows + 1, (33,), device=gpu)]]
    for inputs in batches:
        expected, found = (op.accept_drafts(*inputs, verify) for op in (reference, ops))
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype == torch.int64
            assert torch.equal(a, b)


def test_refuses_what_is_no_logits():
    with pytest.raises(ValueError, match="float32"):
        ops.greedy_tokens(torch.zeros(3, 4, dtype=torch.bfloat16))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter compiles nothing")
@pytest.mark.parametrize("arch", on_gpus())
def test_compiles(arch):
    logits = torch.empty(32, 129280, device="meta")
    rows, requests = (torch.empty(n, dtype=torch.int64, device="meta") for n in (96, 32))

    def launch():
        ops.greedy_tokens(logits)
        ops.accept_drafts(rows, rows, requests, requests, True)

    found = compiled_ops(arch, launch)
    assert set(found) == {"greedy_block_kernel", "greedy_row_kernel", "accept_drafts_kernel"}
