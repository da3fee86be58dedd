"""V3.2's backends: every kernel set, mode and batch gives one result; impls driven from outside; what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from deepseek_attn.attention.builder import StepInput
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.impls import AttentionSpec, get_impl
from deepseek_attn.models.block import attention_layers
from deepseek_attn.testing import poison_caches
from deepseek_attn.v32.backends import (
    SPARSE_MLA_IMPLS,
    FlashInferMLASparseBackend,
    FlashInferMLASparseImpl,
    FlashMLASparseBackend,
    FlashMLASparseImpl,
    FlashMLASparseMetadataBuilder,
)
from deepseek_attn.v32.backends.flashinfer_adapter import trtllm_decode
from tests.support.oracle_v32 import NaiveOracle
from tests.support.small_models import assert_close, assert_same_codes, prompt
from tests.support.tiers import tiered
from tests.support.typed import required
from tests.support.v32_cases import make_runner, small

SPEC = AttentionSpec(128, 576, 64, "fp8_v32", torch.bfloat16, qk_nope_head_dim=128)
NUMERICS = {"plain": get_numerics("exact"), "fp8_v32": replace(get_numerics("exact"), kv_record="fp8_ds_mla")}


def compute(runner, tokens, chunks, threshold=1):
    """Logits of every token, in steps of these sizes; up to ``threshold`` new tokens go through the decode path."""
    caches, rows = [runner.manager.create() for _ in tokens], [[] for _ in tokens]
    steps, done = [], [0] * len(tokens)
    while any(d < len(t) for d, t in zip(done, tokens, strict=True)):
        size = chunks[min(len(steps), len(chunks) - 1)]
        lens = [min(n, len(t) - d) for n, t, d in zip(size, tokens, done, strict=True)]
        order = sorted((i for i, n in enumerate(lens) if n), key=lambda i: lens[i] > threshold)
        runner.manager.reserve([(caches[i], lens[i]) for i in order])
        seq_lens = torch.tensor([done[i] + lens[i] for i in order])
        tables = {"tokens": runner.manager.block_table([caches[i] for i in order], "tokens")}
        batch = StepInput(torch.tensor([lens[i] for i in order]), seq_lens, tables, None, threshold)
        step = runner.builder.build(batch)
        steps.append(step)
        ids = torch.tensor([token for i in order for token in tokens[i][done[i] : done[i] + lens[i]]])
        everything = runner.workspace.get(((runner.workspace.nbytes(),), torch.uint8))[0]
        everything.fill_(0xFF)
        required(attention_layers(runner.model)[0].topk_indices_buffer).fill_(2**31 - 1)
        parts = runner.model.logits(runner.model(ids, step.positions, step)).split([lens[i] for i in order])
        for i, part in zip(order, parts, strict=True):
            rows[i].append(part)
            runner.manager.commit(caches[i], lens[i])
            done[i] += lens[i]
    return [torch.cat(part) for part in rows], steps


WAYS = list(product(NUMERICS, ["mixed", "separate"], [1, 3]))


@pytest.mark.parametrize(
    ("kv_record", "fp8_mode", "threshold"),
    tiered(WAYS, [("fp8_v32", "mixed", 1)], quick_on_gpu=[("plain", "separate", 3)]),
)
@torch.no_grad()
def test_modes_thresholds_and_chunks_give_one_result(kv_record, fp8_mode, threshold):
    """Decodes of 1 to 3 tokens beside prompt chunks, over pages and over a workspace of barely one request."""
    config, tokens = small(), [prompt(small(), n, seed) for seed, n in enumerate((90, 33, 70))]
    options = {"numerics": NUMERICS[kv_record], "max_model_len": 96, "prefill_workspace_rows": 100}
    runner = make_runner(config, fp8_mode=fp8_mode, **options)
    poison_caches(runner)
    chunks = [(40, 17, 5), (1, 1, 31), (3, 2, 3), (1, 3, 20), (2, 3, 3), (3, 1, 1)]
    logits, steps = compute(runner, tokens, chunks, threshold)
    whole = make_runner(config, fp8_mode="mixed", numerics=NUMERICS[kv_record])
    for row, ids in zip(logits, tokens, strict=True):
        assert_same_codes(row, whole.score([ids])[0], largest=1e-4 if kv_record == "plain" else 0.01)
        if kv_record == "plain":
            assert_close(row, required(NaiveOracle(config, runner_source(config))(ids).logits))
    decodes = [(step.num_decodes, step.num_prefills) for step in steps]
    assert decodes[1] == ((3, 0) if fp8_mode == "mixed" else (2, 1))
    assert decodes[2] == ((3, 0) if fp8_mode == "mixed" or threshold == 3 else (0, 3))


def runner_source(config):
    from deepseek_attn.checkpoint import RandomSource

    return RandomSource(config, 0)


@pytest.mark.parametrize("numerics", ["exact", "official"])
@torch.no_grad()
def test_decode_and_prefill_paths_agree(numerics):
    """A verification of 4 tokens, ragged beside one of 2, as decodes and as prefills: FP8 entries are the same bits."""
    tokens = [prompt(small(), n, n) for n in (64, 50)]
    chunks = [(60, 48), (4, 2)]
    results = []
    for threshold in (1, 4):
        runner = make_runner(small(), numerics=numerics, fp8_mode="separate")
        logits, steps = compute(runner, tokens, chunks, threshold)
        assert (steps[-1].num_decodes, steps[-1].num_decode_tokens) == ((2, 6) if threshold == 4 else (0, 0))
        results.append(logits)
    for as_prefill, as_decode in zip(*results, strict=True):
        if numerics == "official":
            assert torch.equal(as_prefill, as_decode)
        torch.testing.assert_close(as_prefill, as_decode, rtol=0, atol=1e-5)


# impls driven from outside


@pytest.fixture
def layer():
    runner = make_runner(small(qk_nope_head_dim=128), attention_only=True, layers=[0], max_num_seqs=2)
    poison_caches(runner)
    (layer,) = attention_layers(runner.model)
    return runner, layer


def projected(layer, x, positions):
    """What the layer computes from its input, by its own modules: q, normed latent, rotated k_pe."""
    qr = layer.q_norm(layer.wq_a(x))
    latent, k_pe = layer.wkv_a(x).split([layer.value_dim, layer.qk_rope_head_dim], dim=-1)
    q = layer.wq_b(qr).unflatten(-1, (layer.num_heads, -1))
    return q, layer.kv_norm(latent), layer.rope.rotate(k_pe, positions)


@pytest.mark.parametrize("given", [False, True], ids=["output=None", "output"])
@torch.no_grad()
def test_forward_is_the_layer_between_its_projections(layer, given):
    runner, layer = layer
    cache = runner.manager.create()
    runner.manager.reserve([(cache, 40)])
    x, step = torch.randn(40, runner.config.hidden_size), runner.step_metadata([cache], [40])
    expected = layer(x, step.positions, step)
    layer.kv_cache.tensor.fill_(0xFF)  # `forward` writes the entries itself
    q, latent, k_pe = projected(layer, x, step.positions)
    output = torch.full((40, layer.num_heads * layer.v_head_dim), float("nan")) if given else None
    values = layer.impl.forward(layer, q, latent, k_pe, step, output)
    assert torch.equal(layer.wo(values), expected)
    assert (values is output) == given


@pytest.mark.parametrize("scale", ["output_scale", "output_block_scale"])
def test_scales_of_a_quantised_output_are_refused(layer, scale):
    x, impl = torch.zeros(1, 1), layer[1].impl
    with pytest.raises(NotImplementedError, match="ask for a quantised output"):
        impl.forward(layer[1], x, x, x, None, None, **{scale: torch.ones(1)})


@pytest.mark.parametrize("impl", [FlashInferMLASparseImpl, get_impl("reference", "cpu", None, SPARSE_MLA_IMPLS)])
@torch.no_grad()
def test_a_selection_written_by_hand(layer, impl):
    """Any positions in ``topk_indices_buffer``, and rows of padding; attention per query, by loops."""
    runner, layer = layer
    caches = [runner.manager.create() for _ in range(2)]
    runner.manager.reserve([(cache, 70) for cache in caches])
    valid = torch.tensor([True] * 139 + [False])
    step = runner.step_metadata(caches, [70, 70], valid)
    rows = torch.randn(140, layer.head_dim)
    layer.kv_cache.insert(step.sparse[1].slot_mapping, rows)
    buffer, topk = layer.topk_indices_buffer, layer.index_topk
    buffer.fill_(2**31 - 1)
    for t, position in enumerate(step.positions.tolist()):
        count = min(topk, position + 1)
        buffer[t, :count] = torch.randperm(position + 1)[:count].int()
        buffer[t, count:] = -1
    layer.step, layer.decode_topk_slots = step, None
    q = torch.randn(140, layer.num_heads, layer.head_dim)
    out = impl.forward_mqa(layer, q, rows, step.positions)
    for t in range(139):
        chosen = buffer[t][buffer[t] >= 0].long() + (70 if t >= 70 else 0)
        weights = (q[t].double() @ rows[chosen].double().T * layer.scale).softmax(-1)
        expected = weights @ rows[chosen, : layer.value_dim].double()
        torch.testing.assert_close(out[t].double(), expected, rtol=1e-4, atol=1e-5)
    assert out[139].eq(0).all()


# registry and refusals


def test_the_reference_is_the_default_without_a_gpu():
    assert [impl.name for impl in SPARSE_MLA_IMPLS] == ["mixed", "flashmla", "triton", "reference", "flashinfer"]
    assert get_impl("auto", "cpu", SPEC, SPARSE_MLA_IMPLS).name == "reference"
    assert {impl.backend_cls for impl in SPARSE_MLA_IMPLS} == {FlashMLASparseBackend, FlashInferMLASparseBackend}
    for backend in (FlashMLASparseBackend, FlashInferMLASparseBackend):
        assert backend.get_impl_cls().backend_cls is backend
        assert backend.get_builder_cls() is FlashMLASparseMetadataBuilder
    assert FlashMLASparseBackend.get_impl_cls() is FlashMLASparseImpl


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_record": "fp8_v4"}, "it reads plain and fp8_v32 records"),
        ({"qk_nope_head_dim": None}, "this model is DeepSeek-V4"),
        ({"sparse": False}, "this model has none"),
    ],
)
def test_the_backend_says_what_it_does_not_serve(change, reason):
    assert FlashMLASparseBackend.problem(SPEC) == ""
    assert reason in FlashMLASparseBackend.problem(replace(SPEC, **change))
    with pytest.raises(ValueError, match="backend 'reference' cannot run on cpu"):
        get_impl("reference", "cpu", replace(SPEC, **change), SPARSE_MLA_IMPLS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"kv_record": "fp8_v32"}, "reads plain latents"), ({"qk_nope_head_dim": 64}, "needs qk_nope_head_dim 128")],
)
def test_flashinfer_asks_for_its_head_sizes_and_records(change, reason):
    assert FlashInferMLASparseBackend.problem(replace(SPEC, kv_record="plain")) == ""
    assert reason in FlashInferMLASparseBackend.problem(replace(SPEC, **({"kv_record": "plain"} | change)))


def test_flashinfer_is_refused_where_a_model_is_built():
    with pytest.raises(ValueError, match="needs qk_nope_head_dim 128, the model has 64"):
        make_runner(small(qk_nope_head_dim=64), backend="flashinfer")


def test_flashinfer_arguments_are_checked():
    q, cache, slots = torch.zeros(2, 1, 3, 6), torch.zeros(1, 1, 4, 6), torch.zeros(2, 1, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"block_tables \[T, 1, 4\]"):
        trtllm_decode(q, cache, q, 128, 4, 2, slots, torch.ones(2), 8, 4)


def test_workspace_rows_are_checked_before_anything_is_loaded():
    with pytest.raises(ValueError, match="prefill_workspace_rows=95: one request of max_model_len=96 needs 96; raise"):
        make_runner(small(), max_model_len=96, prefill_workspace_rows=95, fp8_mode="separate")
    with pytest.raises(ValueError, match="fp8_mode='both': supported are auto, mixed, separate"):
        make_runner(small(), fp8_mode="both")
    runner = make_runner(small(), max_model_len=96, prefill_workspace_rows=96, fp8_mode="separate")
    assert runner.workspace.nbytes() == 96 * runner.config.head_dim * 4
    assert make_runner(small(), fp8_mode="mixed").workspace.nbytes() == 0


def test_auto_reads_pages_where_gathering_would_not_pay():
    """Plain caches always; FP8 ones with fewer than 32 heads."""
    assert make_runner(small(num_attention_heads=32), numerics=NUMERICS["plain"]).builder.mixed
    assert make_runner(small(), numerics=NUMERICS["fp8_v32"]).builder.mixed
    assert not make_runner(small(num_attention_heads=32), numerics=NUMERICS["fp8_v32"]).builder.mixed
    assert ModelConfig.from_preset("v32").num_attention_heads == 128
