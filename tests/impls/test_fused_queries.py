"""Steps in which attention norms and rotates queries itself, and its output: which, and their result."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepseek_attn.impls import DeepseekV4MixedSparseImpl, DeepseekV4ReferenceSparseImpl, DeepseekV4TritonSparseImpl
from deepseek_attn.impls.queries import AttentionQueries
from deepseek_attn.kernels.common.invariance import batch_invariant_ops
from deepseek_attn.kernels.insert import RawQueries, query_norm_rope
from tests.support.small_models import small_config, small_runner
from tests.support.tiers import exhaustive_on_cpu

SIZES = {"head_dim": 128, "qk_rope_head_dim": 64, "hidden_size": 256, "q_lora_rank": 128, "o_lora_rank": 128}
CONFIG = small_config([0, 4, 128], num_attention_heads=4, o_groups=2, index_topk=8, **SIZES)
PROMPTS = [[token % 96 for token in range(5, 135)], [7, 9], list(range(50, 30, -1))]


class Fused(DeepseekV4ReferenceSparseImpl):
    """The reference impl, from projected queries wherever an impl for a GPU may do so."""

    calls: list = []  # noqa: RUF012
    fused_records = ("fp8_v4",)

    @classmethod
    def attend_raw(cls, layer: Any, queries):
        cls.calls.append((layer.prefix, queries.q is not None))
        return super().attend_raw(layer, queries)


def scored(impl, numerics="serving", fp8_mode="mixed"):
    Fused.calls = []
    runner = small_runner(CONFIG, numerics=numerics, dtype="bfloat16", fp8_mode=fp8_mode)
    for block in runner.model.layers.values():
        block.attn.impl = impl
    return runner.score(PROMPTS, 50)


@exhaustive_on_cpu
def test_the_same_logits():
    """From each kind of layer; those whose indexer selects have their queries normed and rotated with the indexer's."""
    expected = scored(DeepseekV4ReferenceSparseImpl)
    assert not Fused.calls
    got = scored(Fused)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert {("layers.0", False), ("layers.1", True), ("layers.2", False)} <= set(Fused.calls)
    assert not {("layers.0", True), ("layers.2", True)} & set(Fused.calls)


@pytest.mark.exhaustive
def test_not_in_other_steps():
    """Prompts, formats that the output projection does not read, and impls with a `forward_mqa` of their own."""
    assert len(scored(Fused, fp8_mode="separate")) == len(PROMPTS)
    assert not Fused.calls
    for numerics in ("official", "exact"):
        scored(Fused, numerics)
        assert not Fused.calls

    class Own(Fused):
        @classmethod
        def forward_mqa(cls, *args):
            return super().forward_mqa(*args)

    scored(Own)
    assert not Fused.calls


def test_not_where_an_observer_is_shown_queries_and_outputs():
    runner, seen = small_runner(CONFIG, numerics="serving", dtype="bfloat16"), []
    layer = runner.model.layers["0"].attn
    layer.step = step = SimpleNamespace(observer=seen.append, num_decode_tokens=1, positions=torch.zeros(1))
    assert not Fused.fuses_query_norm_rope(layer)
    step.observer = None
    assert Fused.fuses_query_norm_rope(layer)


def test_queries_are_normed_once_and_their_projections_freed():
    raw = RawQueries(torch.randn(3, 2 * 128), 2, 1e-6, torch.randn(9, 64), torch.arange(3), 4)
    queries, expected = AttentionQueries(raw), query_norm_rope(raw)
    freed = weakref.ref(raw.q)
    del raw
    q = queries.normed()
    assert torch.equal(q, expected)
    assert queries.normed() is q
    assert freed() is None


@pytest.mark.parametrize(("impl", "record", "fused"), [
    (DeepseekV4TritonSparseImpl, "fp8_v4", True), (DeepseekV4TritonSparseImpl, "plain", False),
    (DeepseekV4MixedSparseImpl, "fp8_v4", True), (DeepseekV4ReferenceSparseImpl, "fp8_v4", False),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 500])
def test_which_impls_fuse(impl, record, fused, tokens):
    """The mixed impl whatever the number of tokens or heads: also where its FlashMLA kernels would decode queries."""
    pool = SimpleNamespace(record=SimpleNamespace(name=record))
    step = SimpleNamespace(num_decode_tokens=tokens, positions=torch.zeros(tokens), observer=None)
    layer = SimpleNamespace(swa_cache=pool, step=step, takes_quantized_heads=True)
    assert impl.fuses_query_norm_rope(layer) == fused
    with batch_invariant_ops():
        assert not impl.fuses_query_norm_rope(layer)
    step.positions = torch.zeros(tokens + 1)
    assert not impl.fuses_query_norm_rope(layer)
    step.positions, layer.takes_quantized_heads = torch.zeros(tokens), False
    assert not impl.fuses_query_norm_rope(layer)
