"""Positions to slots and workspace rows: worked examples, a loop as oracle, and Triton against torch."""

import os

import pytest
import torch

from deepseek_attn.kernels.indices.reference import compact_valid, convert_req_index
from deepseek_attn.v32.backends import triton_convert_req_index_to_global_index as convert

HUGE = 2**31 - 1


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


TABLE = i32([7, 3], [5, 9])
TOKENS = i32([0, 65, -1, 130])


def test_worked_example_decode():
    out, counts = convert(i32(1), TABLE, TOKENS, 64, 4, return_valid_counts=True)
    assert out.tolist() == [[320, 577, -1, -1]]  # 130 // 64 = 2 is beyond the table
    assert counts.tolist() == [2]
    assert (out.dtype, counts.dtype) == (torch.int32, torch.int32)


def test_worked_example_prefill():
    workspace = {"prefill_workspace_request_ids": i32(0), "prefill_workspace_starts": i32(10)}
    out = convert(i32(1), TABLE, TOKENS, 64, 4, HAS_PREFILL_WORKSPACE=True, **workspace)
    assert out.tolist() == [[10, 75, -1, -1]]


def oracle(req, table, tokens, block_size, request_ids=None, starts=None, slots=None):
    out = torch.full(tokens.shape, -1, dtype=torch.int32)
    for t, row in enumerate(tokens.tolist()):
        for k, token in enumerate(row):
            if token < 0 or token // block_size >= table.shape[1] or (slots is not None and slots[t] < 0):
                continue
            if request_ids is not None and request_ids[t] >= 0:
                out[t, k] = starts[request_ids[t]] + token
            elif table[req[t], token // block_size] >= 0:
                out[t, k] = table[req[t], token // block_size] * block_size + token % block_size
    return out


def random_case(rows, topk, block_size, requests=3, pages=5):
    tokens = torch.randint(-30, block_size * (pages + 1), (rows, topk), dtype=torch.int32)
    tokens[torch.rand(rows, topk) < 0.1] = HUGE
    tokens[torch.rand(rows, topk) < 0.1] = -HUGE
    table = torch.randint(0, 900, (requests, pages), dtype=torch.int32)
    table[1, 2] = -1
    req = torch.randint(0, requests, (rows,), dtype=torch.int32)
    request_ids = torch.randint(-1, 2, (rows,), dtype=torch.int32)
    slots = torch.randint(-1, 4, (rows,))
    return req, table, tokens, request_ids, i32(0, 77), slots


SHAPES = [(1, 1, 64), (7, 100, 64), (5, 128, 1), (33, 513, 64), (3, 64, 256), (2, 192, 2), (0, 8, 64)]


@pytest.mark.parametrize("counts", [False, True], ids=["in_place", "counted"])
@pytest.mark.parametrize("padding", [False, True], ids=["all_rows", "padding_rows"])
@pytest.mark.parametrize("workspace", [False, True], ids=["slots", "workspace"])
@pytest.mark.parametrize(("rows", "topk", "block_size"), SHAPES)
def test_against_a_loop(rows, topk, block_size, workspace, padding, counts):
    req, table, tokens, request_ids, starts, slots = random_case(rows, topk, block_size)
    kwargs = {"slot_mapping": slots} if padding else {}
    if workspace:
        kwargs |= {"prefill_workspace_request_ids": request_ids, "prefill_workspace_starts": starts}
    got = convert(
        req, table, tokens, block_size, topk, HAS_PREFILL_WORKSPACE=workspace, return_valid_counts=counts, **kwargs
    )
    expected = oracle(
        req, table, tokens, block_size, request_ids if workspace else None, starts, slots if padding else None
    )
    if not counts:
        assert torch.equal(got, expected)
        return
    out, valid = got
    for t, row in enumerate(expected.tolist()):
        kept = [index for index in row if index >= 0]
        assert out[t].tolist() == kept + [-1] * (topk - len(kept))
        assert valid[t] == len(kept)


def test_large_page_ids_do_not_wrap():
    table = i32([(2**31 - 64) // 64])
    assert convert(i32(0), table, i32([63]), 64, 1).tolist() == [[2**31 - 64 + 63]]


def test_a_step_without_requests_or_pages():
    for table in (torch.zeros(0, 4, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32)):
        assert convert(i32(0), table, i32([0, 1]), 64, 2).tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"req_id": torch.zeros(1, dtype=torch.int64)}, "req_id must be int32, got torch.int64"),
        ({"token_indices": i32([0, 1])}, "NUM_TOPK_TOKENS = 4"),
        ({"token_indices": torch.zeros(4, 2, dtype=torch.int32).t()}, r"strides \(1, 2\)"),
        ({"block_table": i32(1, 2)}, "2-D block_table"),
        ({"BLOCK_N": 100}, "power of two, got 100"),
        ({"slot_mapping": torch.zeros(3)}, r"slot_mapping must be \[1\]"),
        ({"HAS_PREFILL_WORKSPACE": True}, "needs prefill_workspace_request_ids"),
        (
            {"HAS_PREFILL_WORKSPACE": True, "prefill_workspace_request_ids": i32(0, 0),
             "prefill_workspace_starts": i32(0)},
            r"prefill_workspace_request_ids must be \[1\]",
        ),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)  # fmt: skip
def test_wrong_arguments(change, message):
    arguments = {"req_id": i32(1), "block_table": TABLE, "token_indices": TOKENS, "NUM_TOPK_TOKENS": 4} | change
    with pytest.raises(ValueError, match=message):
        convert(**arguments)


@pytest.mark.parametrize("block_n", [16, 128])
@pytest.mark.parametrize("workspace", [False, True], ids=["slots", "workspace"])
@pytest.mark.parametrize(("rows", "topk", "block_size"), SHAPES)
def test_triton_equals_torch(rows, topk, block_size, workspace, block_n, device):
    pytest.importorskip("triton", reason="Triton is not installed")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton kernels need a GPU, or TRITON_INTERPRET=1")
    from deepseek_attn.kernels.indices import convert as triton_ops

    req, table, tokens, request_ids, starts, slots = (x.to(device) for x in random_case(rows, topk, block_size))
    extra = (request_ids, starts) if workspace else (None, None)
    for padding in (None, slots):
        expected = convert_req_index(req, table, tokens, block_size, *extra, padding)
        arguments = req, table, tokens, block_size, *extra, padding, block_n
        assert torch.equal(triton_ops.convert_req_index(*arguments), expected)
        got = triton_ops.convert_req_index_and_compact(*arguments)
        for mine, other in zip(got, compact_valid(expected), strict=True):
            assert torch.equal(mine, other)
