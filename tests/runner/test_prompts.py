"""Values that callers may pass as prompts: each is read, or refused by one ValueError."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepseek_attn import ModelRunner
from deepseek_attn.runner.prompts import each_prompt, prompt_list, token_list
from deepseek_attn.runner.sequence import TokenLimits

IDS = torch.tensor([5, 6, 7])
LIMITS = TokenLimits(vocab_size=512, max_model_len=64, max_position_embeddings=64)


class WithoutRepr:
    def __repr__(self):
        raise RuntimeError("repr")


def fake_tensor():
    with FakeTensorMode():
        return torch.empty(3, dtype=torch.int64)


with warnings.catch_warnings(action="ignore"):  # of torch: kinds of tensors that are new or deprecated
    UNREADABLE = {  # arrays -> what the message calls them
        "meta": (IDS.to("meta"), "a tensor on the meta device, which has no values"),
        "meta, no rows": (torch.empty(0, 3, device="meta"), "a tensor on the meta device"),
        "nested": (torch.nested.nested_tensor([IDS, IDS]), "a nested tensor: pass its rows one by one"),
        "jagged": (torch.nested.nested_tensor([IDS, IDS], layout=torch.jagged), "a nested tensor"),
        "sparse": (IDS.to_sparse(), "layout torch.sparse_coo: pass it dense"),
        "sparse rows": (IDS[None].to_sparse_csr(), "layout torch.sparse_csr"),
        "quantised": (torch._empty_affine_quantized([3], scale=1.0, zero_point=0, dtype=torch.qint8), "torch.qint8"),
        "float": (IDS.float(), "a tensor of torch.float32"),
        "float8": (IDS.float().to(torch.float8_e4m3fn), "a tensor of torch.float8_e4m3fn"),
        "gradient": (IDS.float().requires_grad_(), "a tensor of torch.float32"),
        "complex": (IDS.to(torch.complex64), "a tensor of torch.complex64"),
        "bool": (IDS > 5, "a tensor of torch.bool"),
        "numpy float": (np.array([5.0, np.nan]), "an array of float64"),
        "numpy bool": (np.array([True]), "an array of bool"),
        "numpy dates": (np.array(["2020-01-01"], dtype="datetime64"), "an array of datetime64"),
        "numpy fields": (np.zeros(2, dtype=[("a", int)]), "an array of"),
        "numpy bytes": (np.array([b"abc"]), "an array of |S3"),
        "masked": (np.ma.array([5, 6], mask=[False, True]), "a masked array: pass the tokens that are not masked"),
        "masked objects": (np.ma.array([5, 6], mask=[False, True], dtype=object), "a masked array"),
        "fake": (fake_tensor(), "a FakeTensor whose values cannot be read"),
    }


@pytest.mark.parametrize(("array", "name"), UNREADABLE.values(), ids=UNREADABLE)
def test_arrays_without_readable_integers(array, name):
    (single,) = prompt_list(array)
    assert single is array
    with pytest.raises(ValueError, match=f"one-dimensional array of integers, got .*{re.escape(name)}"):
        token_list(single)
    with pytest.raises(ValueError, match="an iterable of prompts is needed, got"):
        each_prompt(array)


@pytest.mark.parametrize(
    "value",
    [None, 5, "text", b"ab", memoryview(b"ab"), {5: 6}, {5}, object(), WithoutRepr(), IDS[0], IDS[None]],
    ids=type,
)
def test_values_that_are_no_token_ids(value):
    with pytest.raises(ValueError, match="token ids of a prompt are a list or"):
        token_list(value)


@pytest.mark.parametrize(
    "ids",
    [
        [IDS[0].to("meta")], [5, IDS[0].to("meta")], [torch.tensor(5.0)], [np.array(5.0)], [[5]], [IDS], [None],
        [WithoutRepr()], [10**5000], [-1], [2**63], np.array([2**64 - 1], dtype=np.uint64), np.array([5, None]), [True],
        ["5"], [torch.nested.nested_tensor([IDS])], [IDS.to("meta")],
    ],
    ids=lambda ids: type(ids[0]).__name__,
)  # fmt: skip
def test_members_that_are_no_tokens(ids):
    with pytest.raises(ValueError, match="token id"):
        list(map(LIMITS.check_token, token_list(ids)))


@pytest.mark.parametrize(
    "ids",
    [
        (5, 6, 7), range(5, 8), iter([5, 6, 7]), IDS, list(IDS), IDS.to(torch.uint8), IDS.to(torch.uint64),
        IDS.numpy(), list(IDS.numpy()), IDS.numpy().astype(np.uint64), np.array([5, 6, 7], dtype=object),
        torch.nn.Parameter(IDS, requires_grad=False), [torch.tensor(5), np.array(6), np.int16(7)],
    ],
    ids=type,
)  # fmt: skip
def test_values_that_are_token_ids(ids):
    assert [LIMITS.check_token(token) for token in token_list(ids)] == [5, 6, 7]


def test_one_prompt_or_several():
    matrix = torch.stack([IDS, IDS + 1])
    for several in (matrix, matrix.numpy(), list(matrix), [[5, 6, 7], (6, 7, 8)]):
        assert [token_list(ids) for ids in prompt_list(several)] == [[5, 6, 7], [6, 7, 8]]
        assert [token_list(ids) for ids in each_prompt(several)] == [[5, 6, 7], [6, 7, 8]]
    for one in (IDS, list(IDS), IDS.numpy(), (5, 6, 7), np.array([5, 6, 7], dtype=object)):
        assert [token_list(ids) for ids in prompt_list(one)] == [[5, 6, 7]]
    assert prompt_list(np.array(["a", "b"])) == prompt_list(("a", "b")) == ["a", "b"]
    assert prompt_list("a") == ["a"]
    assert prompt_list([]) == prompt_list(torch.empty(0, 3, dtype=torch.int64)) == []
    endless = iter(lambda: "a", None)
    assert each_prompt(endless) is endless


@pytest.fixture(scope="module")
def runner():
    options = {"layers": [1], "max_model_len": 64, "max_num_seqs": 2, "device": "cpu"}
    return ModelRunner.from_config("tiny", **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda s: None, lambda s: [], lambda s: 5, lambda s: "x", lambda s: IDS, lambda s: IDS.to("meta"),
        lambda s: iter([(s, 1)]), lambda s: {s: 1}, lambda s: [s], lambda s: [(s,)], lambda s: [(s, 1, 1)],
        lambda s: [(s, "1")], lambda s: [(s, 1.0)], lambda s: [(s, True)], lambda s: [(s, IDS[0].to("meta"))],
        lambda s: [(None, 1)], lambda s: [([1, 2], 1)], lambda s: [(s, 1), IDS],
    ],
)  # fmt: skip
def test_batches_that_are_no_pairs(runner, make):
    sequence = runner.sequence([1, 2, 3])
    with pytest.raises(ValueError, match=r"a step takes a list of \(sequence, new tokens\) pairs, got"):
        runner.step(make(sequence))
    for count in (0, -1, 4, 10**5000):
        with pytest.raises(ValueError, match="3 pending tokens"):
            runner.step([(sequence, count)])
    assert sequence.num_computed == 0
    runner.step([(sequence, np.int64(3))])
    sequence.free()
