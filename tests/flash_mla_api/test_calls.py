"""What the functions take and return: awkward sizes, the arguments of every flavour, schedules, refusals."""

from __future__ import annotations

import inspect
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_attn import flash_mla_api
from deepseek_attn.config.numerics import PRESETS
from deepseek_attn.flash_mla_api import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from deepseek_attn.impls import flash_mla
from deepseek_attn.impls.reference import DeepseekV4ReferenceSparseImpl
from deepseek_attn.kernels.common import dispatch
from deepseek_attn.models.block import attention_layers
from tests.flash_mla_api.cases import Decode, Dense, Prefill
from tests.support import fake_flash_mla
from tests.support.oracle_flash_mla import Shape, random_pool
from tests.support.small_models import prompt, small_config, small_runner
from tests.support.tiers import tiered

INF = float("inf")
INT, BF16 = torch.int32, torch.bfloat16
LENGTHS = {"topk_length": True}

QUICK = [
    Decode(3, 4, 16, 512, Shape(100, 33, gap=24, **LENGTHS), Shape(70, 65, 1, gap=8, **LENGTHS)),
    Decode(1, 1, 5, 512, Shape(65, 127, 61), Shape(9, 1, 256, **LENGTHS)),
    Decode(2, 3, 100, 576, Shape(129, 63, 53, gap=4, **LENGTHS)),
    Decode(2, 2, 16, 576, Shape(60, 65, **LENGTHS), Shape(30, 7, 2, gap=12, zero_seqlen_k=True)),
    Decode(1, 1, 128, 576, Shape(64, 64, is_varlen=False), None, False),
    Prefill(3, 50, 7, 16, 576, True, True),
    Prefill(1, 9, 1, 1, 512, True, True),
    Prefill(5, 70, 129, 100, 512, False, False, lonely=True),
    Dense(3, 4, 63, 16, 2, True, True, True, 512, 5, torch.float16),
    Dense(1, 1, 129, 128, 1, d_qk=512, block_size=256),
    Dense(2, 3, 3, 6, 3, True, True, block_size=1),
]
MORE = [
    Decode(b, s_q, h_q, d_qk, Shape(s_k, topk, n, gap=gap, **LENGTHS), Shape(topk, s_k, 67 - n, topk_length=s_q == 2))
    for b, s_q, (h_q, d_qk), (s_k, topk), n, gap in zip(
        (1, 2, 3, 5) * 6,
        (1, 2, 3, 4) * 6,
        ((16, 512), (64, 576), (128, 512), (48, 576), (1, 512), (96, 576)) * 4,
        ((1, 1), (63, 127), (129, 65)) * 8,
        (1, 2, 64, 3, 61, 33, 66, 17) * 3,
        (0, 8, 584, 1000) * 6,
        strict=True,
    )
]


@pytest.mark.parametrize("case", tiered(QUICK + MORE, QUICK), ids=lambda case: str(case)[:60])
def test_awkward_sizes(report, device, case):
    case.run(flash_mla_api, device, report)


SMALL = Decode(2, 2, 3, 512, Shape(20, 21, 7, **LENGTHS), Shape(9, 5, 2, **LENGTHS))


@pytest.mark.triton
def test_in_triton_under_its_interpreter(monkeypatch, report, device):
    """V4's pages, whose products are float16; the interpreter computes those of bfloat16 wrongly."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1; on a GPU test_awkward_sizes runs in Triton")
    used = []
    monkeypatch.setattr(dispatch, "runs_triton", lambda tensor: used.append(tensor) or True)
    SMALL.run(flash_mla_api, device, report)
    assert used


class Call:
    """Arguments of a small call of each kind; ``sparse(q=...)`` calls with some of them changed."""

    def __init__(self, device):
        def randn(*sizes):
            return torch.randn(sizes).to(device, BF16)

        self.device, main = device, random_pool(2, 3, 512, Shape(40, 20, **LENGTHS), device)
        extra = random_pool(2, 3, 512, Shape(9, 5, 2, **LENGTHS), device)
        self.sparse_arguments = {
            "q": randn(2, 3, 8, 512), "k_cache": main.k_cache, "block_table": None, "cache_seqlens": None,
            "head_dim_v": 512, "tile_scheduler_metadata": None, "num_splits": None, "softmax_scale": 0.1,
            "is_fp8_kvcache": True, "indices": main.indices, "attn_sink": torch.randn(8).to(device),
            "extra_k_cache": extra.k_cache, "extra_indices_in_kvcache": extra.indices,
            "topk_length": main.topk_length, "extra_topk_length": extra.topk_length,
        }  # fmt: skip
        self.dense_arguments = {
            "q": randn(2, 3, 8, 576), "k_cache": randn(9, 16, 2, 576), "head_dim_v": 512,
            "block_table": torch.arange(8, dtype=INT, device=device).view(2, 4),
            "cache_seqlens": torch.tensor([50, 7], dtype=INT, device=device), "tile_scheduler_metadata": None,
        }  # fmt: skip
        self.prefill_arguments = {
            "q": randn(5, 8, 576), "kv": randn(30, 1, 576), "sm_scale": 0.1,
            "indices": torch.randint(-1, 31, (5, 1, 9)).to(device, INT),
            "attn_sink": torch.randn(8).to(device), "topk_length": torch.arange(5, dtype=INT, device=device),
        }  # fmt: skip

    def _decode(self, arguments, changes):
        arguments = arguments | changes
        if arguments["tile_scheduler_metadata"] is None:
            arguments["tile_scheduler_metadata"] = get_mla_metadata()[0]
        return flash_mla_with_kvcache(**arguments)

    def sparse(self, **changes):
        return self._decode(self.sparse_arguments, changes)

    def dense(self, **changes):
        return self._decode(self.dense_arguments, changes)

    def prefill(self, **changes):
        return flash_mla_sparse_fwd(**(self.prefill_arguments | changes))


@pytest.fixture
def call(device):
    return Call(device)


def same(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a, b)


@pytest.mark.parametrize(("kind", "heads"), [("sparse", (2, 3, 8)), ("dense", (2, 3, 8)), ("prefill", (5, 8))])
def test_shapes_dtypes_and_out(call, kind, heads):
    function = getattr(call, kind)
    expected = function()
    lse_shape = (5, 8) if kind == "prefill" else (2, 8, 3)
    assert (expected[0].shape, expected[0].dtype) == ((*heads, 512), BF16)
    assert {(part.shape, part.dtype) for part in expected[1:]} == {(torch.Size(lse_shape), torch.float32)}
    out = torch.full((*heads, 512), float("nan"), dtype=BF16, device=call.device)
    got = function(out=out)
    assert got[0] is out
    same(got, expected)


def test_prefill_of_some_heads_writes_to_those_of_a_wider_output(call):
    """vLLM's V4.1 layers: queries and output are leading heads of padded ones."""
    expected = call.prefill()
    q, out = (torch.full((5, 11, d), 7.0, dtype=BF16, device=call.device) for d in (576, 512))
    q[:, :8] = call.prefill_arguments["q"]
    got = call.prefill(q=q[:, :8], out=out[:, :8])
    same(got, expected)
    assert got[0].data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :8], expected[0])
    assert bool((out[:, 8:] == 7).all())


def test_the_bytes_of_a_cache_may_have_any_dtype_and_its_last_page_no_padding(call):
    expected = call.sparse()
    k_cache = call.sparse_arguments["k_cache"]
    for dtype in (torch.int8, torch.float8_e4m3fn):
        same(call.sparse(k_cache=k_cache.view(dtype)), expected)
    pages, n = k_cache.shape[:2]
    storage = torch.empty(pages * n * 584 + 16, dtype=torch.uint8, device=call.device)
    exact = storage[16:].view(pages, n, 1, 584)
    exact.view(pages, -1).copy_(k_cache.as_strided((pages, n * 584), (k_cache.stride(0), 1)))
    same(call.sparse(k_cache=exact), expected)


def test_a_dense_cache_may_have_any_strides(call):
    expected, k_cache = call.dense(), call.dense_arguments["k_cache"]
    pages, n, h_k, d = k_cache.shape
    for order, pads in (((0, 1, 2), (1, 3, 10)), ((2, 0, 1), (0, 0, 1)), ((1, 2, 0), (5, 0, 3))):
        sizes = [(pages, n, h_k)[i] + pad for i, pad in zip(order, pads, strict=True)]
        memory = torch.full((*sizes, d + 7), float("nan"), dtype=BF16, device=call.device)
        back = [order.index(i) for i in range(3)]
        view = memory.permute(*back, 3)[:pages, :n, :h_k, :d]
        same(call.dense(k_cache=view.copy_(k_cache)), expected)


def test_slots_and_pages_outside_the_cache_name_no_key(call):
    indices, slots = call.sparse_arguments["indices"], call.sparse_arguments["k_cache"].shape[0] * 64
    holes = torch.arange(20, device=call.device) % 3 == 1
    expected = call.sparse(indices=indices.masked_fill(holes, -1))
    for outside in (slots, 2**31 - 1, -2):
        same(call.sparse(indices=indices.masked_fill(holes, outside)), expected)
    pages_last = call.dense_arguments["k_cache"].permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)

    def attend(table, length):
        table = torch.tensor(table, dtype=INT, device=call.device)
        return call.dense(k_cache=pages_last, block_table=table, cache_seqlens=torch.full_like(table[:, 0], length))

    expected = attend([[1, 2], [3, 0]], 32)
    for outside in (9, -1, 2**31 - 1):
        torch.testing.assert_close(
            attend([[1, outside, 2], [3, 0, outside]], 48), expected, rtol=1e-2, atol=2e-3, check_stride=False
        )  # on a GPU, keys of another number of pages are added up in another order: 1.03e-3 was seen


def test_defaults(call):
    same(call.sparse(softmax_scale=None), call.sparse(softmax_scale=512**-0.5))
    same(call.dense(), call.dense(softmax_scale=576**-0.5, causal=False, is_fp8_kvcache=False))
    for value in (None, True):
        same(call.sparse(is_fp8_kvcache=value), call.sparse())
    tables = {"block_table": torch.zeros(1, 1), "cache_seqlens": torch.zeros(7)}
    same(call.sparse(**tables), call.sparse())  # not used
    assert not torch.equal(call.dense(causal=True)[0], call.dense()[0])


def test_log_sum_exps_to_base_2_or_none(call):
    out, max_logits, lse = call.prefill()
    assert [part is None for part in call.prefill(return_log2_lse=False)] == [False, True, True]
    got = call.prefill(return_log2_lse=True)
    assert torch.equal(got[0], out)
    assert bool((lse[0] == INF).all())
    assert bool((max_logits[0] == -INF).all())
    for natural, base_2 in ((max_logits, got[1]), (lse, got[2])):
        torch.testing.assert_close(base_2[1:].exp2(), natural[1:].exp())
        assert torch.equal(base_2[0], natural[0])


def test_empty_batches_and_caches(call):
    no_rows = {name: call.sparse_arguments[name][:0] for name in ("q", "indices", "topk_length")}
    no_rows |= {name: call.sparse_arguments[name][:0] for name in ("extra_indices_in_kvcache", "extra_topk_length")}
    for got in (call.sparse(**no_rows), call.dense(**{
        name: call.dense_arguments[name][:0] for name in ("q", "block_table", "cache_seqlens")
    })):  # fmt: skip
        assert [list(part.shape) for part in got] == [[0, 3, 8, 512], [0, 8, 3]]
    arguments = {name: call.prefill_arguments[name][:0] for name in ("q", "indices", "topk_length")}
    assert [list(part.shape) for part in call.prefill(**arguments)] == [[0, 8, 512], [0, 8], [0, 8]]
    none = call.sparse_arguments["indices"][:, :, :0]
    lonely = [
        call.sparse(k_cache=call.sparse_arguments["k_cache"][:0], extra_indices_in_kvcache=none),
        call.sparse(indices=none, extra_indices_in_kvcache=none),
        call.dense(k_cache=call.dense_arguments["k_cache"][:0]),
        call.dense(block_table=call.dense_arguments["block_table"][:, :0]),
        call.dense(cache_seqlens=torch.zeros(2, dtype=INT, device=call.device)),
    ]
    out, max_logits, lse = call.prefill(kv=call.prefill_arguments["kv"][:0])
    assert bool((max_logits == -INF).all())
    for out, lse in [*lonely, (out, lse)]:  # noqa: B020
        assert bool((out == 0).all())
        assert bool((lse == INF).all())


# schedules


def test_a_schedule_may_be_reused_for_the_same_shapes_with_other_lengths(call):
    schedule, none = get_mla_metadata(torch.zeros(2), 6, num_heads_k=1, topk=20)
    assert none is None
    assert schedule == FlashMLASchedMeta(False, None, None, None)
    lengths = call.sparse_arguments["topk_length"]
    for other in (lengths, (lengths - 1).clamp(min=0), lengths):
        same(call.sparse(tile_scheduler_metadata=schedule, topk_length=other), call.sparse(topk_length=other))
    assert schedule.have_initialized
    assert schedule.config == FlashMLASchedMeta.Config(2, 3, 8, 64, 1, False, True, 20, 2, 5)
    narrower = {"indices": call.sparse_arguments["indices"][:, :, :7]}
    with pytest.raises(ValueError, match=r"topk was 20 and is 7\): pass a new one"):
        call.sparse(tile_scheduler_metadata=schedule, **narrower)
    with pytest.raises(ValueError, match=r"page_block_size was 64 and is 16; h_k was 1 and is 2; is_fp8_kvcache was"):
        call.dense(tile_scheduler_metadata=schedule)
    assert call.sparse(**narrower)[0].shape == (2, 3, 8, 512)


def test_a_refused_call_leaves_its_schedule_and_out_as_they_were(call):
    schedule = get_mla_metadata()[0]
    out = torch.full((2, 3, 8, 512), 7.0, dtype=BF16, device=call.device)
    with pytest.raises(ValueError, match="attn_sink"):
        call.sparse(tile_scheduler_metadata=schedule, attn_sink=torch.zeros(9, device=call.device), out=out)
    assert schedule == FlashMLASchedMeta()
    assert bool((out == 7).all())


def test_the_two_tensors_of_older_releases_are_taken(call):
    older = {"tile_scheduler_metadata": torch.zeros(4, 8, dtype=INT), "num_splits": torch.zeros(3, dtype=INT)}
    same(call.sparse(**older), call.sparse())
    same(call.dense(**older), call.dense())


@pytest.mark.parametrize(
    "given", [(None, None), (torch.zeros(1), None), (FlashMLASchedMeta(), torch.zeros(1))], ids=str
)
def test_other_schedules_are_refused(call, given):
    arguments = call.dense_arguments | dict(zip(("tile_scheduler_metadata", "num_splits"), given, strict=True))
    with pytest.raises(ValueError, match=r"the result of deepseek_attn.flash_mla_api.get_mla_metadata\(\), .*got "):
        flash_mla_with_kvcache(**arguments)


# refusals

V41 = torch.zeros(9, 64, 1, 528, dtype=torch.uint8)
REFUSED = {
    "sparse": [
        ({"q": torch.zeros(2, 3, 8, 256, dtype=BF16)}, r"512 \(V4\) or 576 \(V3.2\) channels .* got \[2, 3, 8, 256\]"),
        (
            {"q": torch.zeros(2, 3, 8, 512)},
            r"q must be bfloat16 \[b, s_q, h_q, 512 or 576\], got float32 \[2, 3, 8, 512\] on cpu",
        ),
        ({"q": torch.zeros(3, 8, 512, dtype=BF16)}, r"\[b, s_q, h_q, 512 or 576\], got bfloat16 \[3, 8, 512\]"),
        ({"q": [[0.0]]}, "q must be .* got list"),
        ({"head_dim_v": 128}, "first 512 channels of a key, got a value dim of 128"),
        ({"k_cache": V41}, r"page_block_size, 1, 584\] on cpu, got uint8 \[9, 64, 1, 528\].*V4's entries of 584 bytes"),
        ({"q": torch.zeros(2, 3, 8, 576, dtype=BF16)}, r"1, 656\] on cpu, got .* V3.2's of 656; q has 576"),
        ({"k_cache": torch.zeros(9, 64, 1, 584, dtype=BF16)}, "uint8 or int8 or float8_e4m3fn .* got bfloat16"),
        ({"k_cache": torch.zeros(9, 65, 1, 600, dtype=torch.uint8)[:, ::5, :, :584]}, "584 bytes apart, got strides"),
        ({"indices": torch.zeros(2, 3, 20, dtype=torch.int64)}, r"indices must be int32 \[2, 3, topk\] .* got int64"),
        ({"indices": torch.zeros(3, 3, 20, dtype=INT)}, r"indices must be int32 \[2, 3, topk\]"),
        ({"topk_length": torch.zeros(6, dtype=INT)}, r"topk_length must be int32 \[2\] on cpu, got int32 \[6\]"),
        ({"extra_topk_length": torch.zeros(3, dtype=INT)}, r"extra_topk_length must be int32 \[2\]"),
        ({"extra_indices_in_kvcache": None}, "go together"),
        ({"extra_k_cache": None}, "go together"),
        ({"extra_k_cache": None, "extra_indices_in_kvcache": None}, "extra_topk_length only with both"),
        ({"extra_k_cache": V41}, r"extra_k_cache must be .* 584\]"),
        ({"attn_sink": torch.zeros(8, dtype=BF16)}, r"attn_sink must be float32 \[8\] on cpu, got bfloat16 \[8\]"),
        ({"attn_sink": torch.zeros(8, device="meta")}, r"on cpu, got float32 \[8\] on meta"),
        ({"causal": True}, "causal=True is for dense decoding"),
        ({"is_fp8_kvcache": False}, "call flash_mla_sparse_fwd with its rows"),
        ({"causal": "x"}, "causal must be True or False, got 'x' \\(str\\)"),
        ({"is_fp8_kvcache": torch.zeros(2)}, "is_fp8_kvcache must be True or False, got tensor"),
        ({"softmax_scale": torch.zeros(2)}, "softmax_scale must be a finite number, got tensor"),
        ({"softmax_scale": INF}, "softmax_scale must be a finite number, got inf"),
        ({"enable_batch_invariant": True}, "enable_batch_invariant=True is not supported.* one request at a time"),
        ({"out": torch.zeros(2, 3, 8, 512)}, r"out must be bfloat16 \[2, 3, 8, 512\] on cpu, got float32"),
        ({"out": torch.zeros(2, 8, 3, 512, dtype=BF16).transpose(1, 2)}, "out must be contiguous, got strides"),
    ],
    "dense": [
        ({"k_cache": torch.zeros(9, 16, 3, 576, dtype=BF16)}, "key heads must divide query heads, got 3 and 8"),
        ({"k_cache": torch.zeros(9, 16, 2, 576, dtype=torch.float16)}, r"k_cache must be bfloat16 .* got float16"),
        ({"k_cache": torch.zeros(9, 16, 2, 512, dtype=BF16)}, r"h_k, 576\]"),
        ({"k_cache": torch.zeros(9, 16, 2, 1152, dtype=BF16)[..., ::2]}, "channels of k_cache must be contiguous"),
        ({"block_table": None}, "needs block_table and cache_seqlens"),
        ({"block_table": torch.zeros(2, 4)}, r"block_table must be int32 \[2, blocks\]"),
        ({"cache_seqlens": torch.zeros(3, dtype=INT)}, r"cache_seqlens must be int32 \[2\]"),
        ({"is_fp8_kvcache": True}, "dense decoding over FP8 caches .* is not supported: .* indices that name every"),
        ({"descale_q": torch.ones(1)}, "dense decoding over FP8 caches .* is not supported"),
        ({"attn_sink": torch.zeros(8), "topk_length": torch.zeros(2)}, "attn_sink, topk_length: only with indices"),
    ],
    "prefill": [
        ({"sm_scale": None}, "sm_scale must be a finite number, got None"),
        ({"d_v": torch.zeros(2)}, "got a value dim of tensor"),
        ({"d_v": 256}, "got a value dim of 256"),
        ({"kv": torch.zeros(30, 2, 576, dtype=BF16)}, r"kv must be bfloat16 \[s_kv, 1, 576\]"),
        ({"kv": torch.zeros(30, 1, 512, dtype=BF16)}, r"kv must be bfloat16 \[s_kv, 1, 576\]"),
        ({"indices": torch.zeros(5, 9, dtype=INT)}, r"indices must be int32 \[5, 1, topk\]"),
        ({"topk_length": torch.zeros(4, dtype=INT)}, r"topk_length must be int32 \[5\]"),
        ({"attn_sink": torch.zeros(5)}, r"attn_sink must be float32 \[8\]"),
        ({"out": torch.zeros(5, 8, 576, dtype=BF16)}, r"out must be bfloat16 \[5, 8, 512\]"),
        ({"out": torch.zeros(5, 8, 1024, dtype=BF16)[..., ::2]}, "channels of out must be contiguous, got strides"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [(kind, *case) for kind, cases in REFUSED.items() for case in cases],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value if value in REFUSED else "",
)
def test_refusals_say_what_was_given(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        getattr(Call(torch.device("cpu")), kind)(**changes)


# flavours

POSITIONAL = {
    "flash_mla_with_kvcache": {
        "q": ..., "k_cache": ..., "block_table": ..., "cache_seqlens": ..., "head_dim_v": ...,
        "tile_scheduler_metadata": ..., "num_splits": None, "softmax_scale": None, "causal": False,
        "is_fp8_kvcache": None, "indices": None, "attn_sink": None, "extra_k_cache": None,
        "extra_indices_in_kvcache": None, "topk_length": None, "extra_topk_length": None,
    },
    "flash_mla_sparse_fwd": {
        "q": ..., "kv": ..., "indices": ..., "sm_scale": ..., "d_v": 512, "attn_sink": None, "topk_length": None,
    },
}  # fmt: skip
"""Upstream's arguments and defaults, in order; its ``is_fp8_kvcache`` was False and is True since 2026.09.30."""


@pytest.mark.parametrize("function", POSITIONAL)
def test_arguments_are_upstreams_and_those_of_its_forks_by_name(function):
    parameters = inspect.signature(getattr(flash_mla_api, function)).parameters
    by_place = {p.name: p.default for p in parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD}
    expected = {
        name: inspect.Parameter.empty if value is ... else value for name, value in POSITIONAL[function].items()
    }
    assert list(by_place.items()) == list(expected.items())
    assert {"out", "use_legacy"} < set(parameters)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [*POSITIONAL, "get_mla_metadata"])
def test_the_installed_package_has_no_other_arguments(function, device):
    usable, reason = flash_mla.supported(device)
    if not usable:
        pytest.skip(reason)
    theirs = inspect.signature(getattr(flash_mla._module(), function)).parameters
    ours = inspect.signature(getattr(flash_mla_api, function)).parameters
    assert set(theirs) <= set(ours)


@pytest.mark.parametrize("flavour", fake_flash_mla.FLAVOURS)
def test_calls_of_every_flavour(call, flavour):
    """As `impls.flash_mla` makes them: by name, with the options that the flavour has."""
    options = {"sgl": {"use_legacy": True}, "vllm": {"out": None}, "upstream": {}}[flavour]
    same(call.sparse(**options), call.sparse())
    same(call.prefill(**options), call.prefill())


def test_the_example_of_the_readme():
    """Its keys are zero, so each of the 128 has the same weight."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "flash_mla_api" in block]
    space = {}
    exec(example, space)
    assert bool((space["out"] == 0).all())
    assert space["lse"].shape == (2, 64, 1)
    torch.testing.assert_close(space["lse"], torch.full_like(space["lse"], math.log(128)))


# the same as a layer


class OnTheInterface(DeepseekV4ReferenceSparseImpl):
    """The reference impl through FlashMLA's interface, as an engine's layer calls it."""

    calls = 0

    @classmethod
    def attend_pages(cls, layer, q, keys, output):
        cls.calls += 1
        caches = [
            key.pool.as_strided((len(key.pool), key.entries, 1, 584), (key.pool.stride(0), 584, 584, 1)) for key in keys
        ]
        more: dict[str, Any] = {}
        if len(keys) == 2:
            more: dict[str, Any] = {
                "extra_k_cache": caches[1],
                "extra_indices_in_kvcache": keys[1].indices[:, None].int(),
            }
            more["extra_topk_length"] = None if keys[1].lens is None else keys[1].lens.int()
        out, _ = flash_mla_with_kvcache(
            q[:, None], caches[0], None, None, 512, get_mla_metadata()[0], softmax_scale=layer.scale,
            is_fp8_kvcache=True, indices=keys[0].indices[:, None].int(), attn_sink=layer.attn_sink,
            topk_length=None if keys[0].lens is None else keys[0].lens.int(), **more,
            out=None if output is None else output[:, None],
        )  # fmt: skip
        return out[:, 0]

    @classmethod
    def attend_rows(cls, layer, q, kv, indices, lens, output):
        cls.calls += 1
        return flash_mla_sparse_fwd(
            q, kv[:, None], indices[:, None].int(), layer.scale, attn_sink=layer.attn_sink, topk_length=lens, out=output
        )[0]


@pytest.mark.exhaustive
def test_a_model_on_the_interface_computes_the_same_bits():
    sizes = {"head_dim": 512, "qk_rope_head_dim": 64, "num_attention_heads": 4}
    config = small_config([0, 4, 16], **sizes)
    runner = small_runner(config, backend="reference", dtype="bfloat16", numerics=PRESETS["serving"])
    prompts = [prompt(config, n, seed) for seed, n in enumerate((70, 1, 33))]
    expected = runner.score(prompts, 11)
    for layer in attention_layers(runner.model):
        layer.impl = OnTheInterface
    got = runner.score(prompts, 11)
    assert OnTheInterface.calls > 10
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
