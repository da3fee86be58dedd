"""Steps in which layers attend from projected heads to the input of the output projection: which, and their result."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepseek_attn.impls import DeepseekV4MixedSparseImpl, DeepseekV4ReferenceSparseImpl, DeepseekV4TritonSparseImpl
from deepseek_attn.kernels.common.invariance import batch_invariant_ops
from tests.support.small_models import small_config, small_runner

SIZES = {"head_dim": 128, "qk_rope_head_dim": 64, "hidden_size": 256, "q_lora_rank": 128, "o_lora_rank": 128}
CONFIG = small_config([0, 4, 128], num_attention_heads=4, o_groups=2, index_topk=8, **SIZES)
PROMPTS = [[token % 96 for token in range(5, 150)], [7, 9], list(range(90, 30, -1))]


class FromHeads(DeepseekV4ReferenceSparseImpl):
    """The reference impl, from projected heads wherever an impl for a GPU may do so."""

    calls: list = []  # noqa: RUF012

    @classmethod
    def pages_take_heads(cls, layer):
        return True

    @classmethod
    def forward_heads(cls, layer, heads, q):
        cls.calls.append((layer.prefix, q is not None))
        return super().forward_heads(layer, heads, q)


def scored(impl, numerics="serving", fp8_mode="mixed"):
    FromHeads.calls = []
    runner = small_runner(CONFIG, numerics=numerics, dtype="bfloat16", fp8_mode=fp8_mode)
    for block in runner.model.layers.values():
        block.attn.impl = impl
    return runner.score(PROMPTS, 50)


def test_the_same_logits():
    """From each kind of layer; those whose indexer selects have their queries normed and rotated with the indexer's."""
    expected = scored(DeepseekV4ReferenceSparseImpl)
    assert not FromHeads.calls
    got = scored(FromHeads)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert {("layers.0", False), ("layers.1", True), ("layers.2", False)} <= set(FromHeads.calls)
    assert not {("layers.0", True), ("layers.2", True)} & set(FromHeads.calls)


def test_not_in_other_steps():
    """Prompts, formats that the output projection does not read, and impls with a `forward_mqa` of their own."""
    assert len(scored(FromHeads, fp8_mode="separate")) == len(PROMPTS)
    assert not FromHeads.calls
    for numerics in ("official", "exact"):
        scored(FromHeads, numerics)
        assert not FromHeads.calls

    class Own(FromHeads):
        @classmethod
        def forward_mqa(cls, *args):
            return super().forward_mqa(*args)

    scored(Own)
    assert not FromHeads.calls


def test_an_observer_sees_queries_and_outputs():
    """Which are not there from heads on."""
    runner, seen = small_runner(CONFIG, numerics="serving", dtype="bfloat16"), []
    for block in runner.model.layers.values():
        block.attn.impl = FromHeads
    layer, FromHeads.calls = runner.model.layers["0"].attn, []
    step = SimpleNamespace(observer=seen.append, num_decode_tokens=1, num_prefill_tokens=0)
    layer.step = step
    assert not layer.attends_heads(step)
    step.observer = None
    assert layer.attends_heads(step)


@pytest.mark.parametrize(("impl", "record", "taken"), [
    (DeepseekV4TritonSparseImpl, "fp8_v4", True), (DeepseekV4TritonSparseImpl, "plain", False),
    (DeepseekV4MixedSparseImpl, "fp8_v4", True), (DeepseekV4ReferenceSparseImpl, "fp8_v4", False),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 500])
def test_which_impls_take_heads(impl, record, taken, tokens):
    """The mixed impl whatever the number of tokens or heads: also where its FlashMLA kernels would decode queries."""
    pool = SimpleNamespace(record=SimpleNamespace(name=record))
    step = SimpleNamespace(num_decode_tokens=tokens, num_prefill_tokens=0)
    layer = SimpleNamespace(swa_cache=pool, head_dim=512, step=step)
    assert impl.attends_heads(layer) == taken
    with batch_invariant_ops():
        assert not impl.attends_heads(layer)
    step.num_prefill_tokens = 1
    assert not impl.attends_heads(layer)
