"""DeepSeek-V3.2 and V3 in quantised numerics: quantised where the numerics say, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.kernels.common.quant import dequantize_fp8_block
from deepseek_attn.kernels.latent.reference import dequantize_weight
from deepseek_attn.v32 import attention
from tests.support.oracle_v32 import NaiveOracle, Tensors, float32_weights
from tests.support.small_models import assert_close, prompt
from tests.support.tiers import tiered
from tests.support.typed import required, untyped
from tests.support.v32_cases import make_runner, recorded, small


@pytest.fixture(params=tiered(["deepseek_v32", "deepseek_v3"], ["deepseek_v32"]))
def model_type(request) -> str:
    return request.param


def test_fp8_weights_are_dequantised_exactly():
    """A quantised checkpoint and its float32 values stored plainly give the same logits."""
    config = small(num_nextn_predict_layers=1)
    source = RandomSource(config, 0)
    plain = Tensors(float32_weights(source))
    tokens = prompt(config, 60)
    for a, b in zip(
        make_runner(config, source).score_mtp([tokens]),
        make_runner(config.replace(quantization_config=None), plain).score_mtp([tokens]),
        strict=True,
    ):
        assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("numerics", tiered(["official", "serving"], ["official"]))
def test_quantised_numerics_round_where_they_say(model_type, numerics):
    """Against formulas with the same roundings: far nearer than to the exact ones, and V3 (no choices left) equal.

    One group, all of whose experts are chosen, and a selection that does not bind: a rounding can flip no choice.
    """
    changes = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1}
    if model_type == "deepseek_v32":
        changes["index_topk"] = 128
    config = small(model_type, **changes)
    source, tokens = RandomSource(config, 0), prompt(config, 100)
    exact, rounded = (NaiveOracle(config, source, numerics=name)(tokens) for name in ("exact", numerics))
    logits, drafts = make_runner(config, source, numerics=numerics).score_mtp([tokens])
    assert distance(logits[0], required(exact.logits)) > 0.05
    assert distance(logits[0], required(rounded.logits)) < 0.002
    assert distance(drafts[0], required(rounded.mtp_logits)) < 0.02


@pytest.mark.parametrize("dtype", tiered(["float32", "bfloat16"], ["bfloat16"]))
@pytest.mark.parametrize("widths", [(128, 128, 128), (128, 256, 256), (64, 128, 128)])
def test_absorbed_weights_stay_fp8_where_kernels_read_it(monkeypatch, widths, dtype):
    """Equal to the bit to what dequantised ones give; blocks that lie in keys and values alike are dequantised."""
    names = ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
    config = small(index_topk=128, num_attention_heads=3, **dict(zip(names, widths, strict=True)))
    source, tokens = RandomSource(config, 0), prompt(config, 30)
    logits, kept = [], []
    for runs in (False, True):
        monkeypatch.setattr(attention, "runs_triton", lambda tensor, runs=runs: runs)
        runner = make_runner(config, source, numerics="official", dtype=dtype)
        logits.append(runner.score([tokens])[0])
        layers = [m for m in runner.model.modules() if isinstance(m, attention.DeepseekV32MLAAttention)]
        kept.append({half.scale is not None for layer in layers for half in (layer.W_UK, layer.W_UV)})
    assert kept == [{False}, {widths[0] == 128}]
    assert torch.equal(*logits)


def test_halves_of_a_quantised_weight_keep_their_scales():
    config = small(qk_nope_head_dim=128, v_head_dim=256, kv_lora_rank=256, num_attention_heads=3, index_topk=128)
    layer = next(m for m in make_runner(config).model.modules() if isinstance(m, attention.DeepseekV32MLAAttention))
    weight, scale = torch.randn(3 * 384, 256).to(torch.float8_e4m3fn), torch.rand(9, 2)
    expected = dequantize_fp8_block(weight, scale).view(3, 384, 256).split([128, 256], 1)
    for half, plain in zip(layer.halves(weight, scale), expected, strict=True):
        assert half.rows.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        assert torch.equal(dequantize_weight(half, torch.float32), plain)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("numerics", tiered(["official", "serving"], ["serving"]))
def test_quantised_selection(numerics):
    """The first layer's selection of tokens with the same quantisation: equal except for a few near-ties."""
    config = small()
    source, tokens = RandomSource(config, 0), prompt(config, 200)
    exact, rounded = (NaiveOracle(config, source, numerics=name)(tokens).entries[0] for name in ("exact", numerics))
    entries = {}
    runner = make_runner(config, source, numerics=numerics)
    with recorded(runner, {}, entries):
        runner.score([tokens])
    chosen = entries["layers.0"]
    assert (chosen & rounded).sum() / rounded.sum() > 0.998
    assert (chosen & exact).sum() / exact.sum() < 0.995


@pytest.mark.parametrize("numerics", tiered(["official", "serving"], ["serving"]))
def test_quantised_bfloat16_models_stay_near_exact_ones(model_type, numerics):
    config = small(model_type, n_group=1, topk_group=1, num_experts_per_tok=8)
    source, tokens = RandomSource(config, 0), prompt(config, 12)
    exact = make_runner(config, source).score([tokens])[0]
    assert distance(make_runner(config, source, numerics=numerics, dtype="bfloat16").score([tokens])[0], exact) < 0.15


@pytest.mark.parametrize("chunk", tiered([1, 9, 64], [9]))
def test_quantised_chunks(model_type, chunk):
    """Decodes read FP8 entries, prefills what they decode to: the same values, whatever the chunks."""
    config = small(model_type, index_topk=64) if model_type == "deepseek_v32" else small(model_type)
    runner = make_runner(config, numerics="official")
    tokens = prompt(config, 60)
    assert_close(runner.score([tokens], chunk)[0], runner.score([tokens])[0], tolerance=2e-2)


def test_quantised_caches_hold_fp8_entries():
    runner = make_runner(small(), numerics="official")
    pools = {(pool.spec.layer, pool.spec.kind): pool.record for pool in runner.pools}
    assert {record.name for record in pools.values()} == {"fp8_v32", "index_fp8"}
    assert untyped(pools["layers.0", "latent"]).scale_rule == "official"


def test_real_sizes():
    """656 + 132 bytes per token and layer (61 and the MTP layer), or 1152 + 132 with a bf16 latent."""
    from deepseek_attn.cache.layout import make_layout

    config = ModelConfig.from_preset("v32")
    for kv_record, per_token in (("fp8_ds_mla", 656 + 135), ("plain", 1152 + 135)):
        numerics = replace(get_numerics("serving"), kv_record=kv_record)
        layout = make_layout(config, numerics, torch.bfloat16, 6400, 1, 64)
        assert layout.pages == {"tokens": 101}
        # pages of 64 index keys are padded from 8448 to 8640 bytes: 135 per key
        assert layout.nbytes() == 101 * 64 * 62 * per_token


def test_official_means_fp8_index_keys_and_the_models_own_scales():
    """V4's official numerics have FP4 index keys; V3's activations have raw scales, V3.1's powers of two."""
    v32 = make_runner(small(), numerics="official")
    assert (v32.numerics.index_record, v32.numerics.index_hadamard) == ("fp8", True)
    assert v32.numerics.pow2_activation_scales
    raw = {k: v for k, v in required(small().quantization_config).items() if k != "scale_fmt"}
    config = small("deepseek_v3", quantization_config=raw)
    v3 = make_runner(config, numerics="official")
    assert not v3.numerics.pow2_activation_scales
    tokens = prompt(config, 40)
    power = make_runner(config, numerics=replace(v3.numerics, pow2_activation_scales=True))
    assert not torch.equal(v3.score([tokens])[0], power.score([tokens])[0])


@pytest.mark.parametrize("kv_record", ["plain", "fp8_ds_mla"])
def test_backends_agree(kv_record):
    """FlashInfer's impl in plain torch, beside FlashMLA's."""
    config = small(qk_nope_head_dim=128)
    numerics = replace(get_numerics("exact"), kv_record=kv_record)
    tokens = prompt(config, 90)
    runs = {}
    for backend in ("auto", "reference", "flashinfer"):
        if (backend, kv_record) == ("flashinfer", "fp8_ds_mla"):
            with pytest.raises(ValueError, match="'flashinfer' cannot run on cpu: it reads plain latents"):
                make_runner(config, backend=backend, numerics=numerics)
            continue
        runs[backend] = make_runner(config, backend=backend, numerics=numerics).score([tokens], chunk_size=31)[0]
        assert_close(runs[backend], runs["auto"])


@pytest.mark.parametrize("fill", [0.25, 1.0])
def test_a_bfloat16_model_runs(model_type, fill):
    config = small(model_type)
    runner = make_runner(config, dtype="bfloat16")
    tokens = prompt(config, int(150 * fill))
    assert_close(runner.score([tokens], 40)[0], runner.score([tokens])[0], tolerance=0.5)
    assert required(runner.pools.get("layers.0", "latent")).record.dtype == torch.bfloat16
