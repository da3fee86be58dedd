"""What lies beyond the window is learned with compressed entries, and not without."""

from __future__ import annotations

import pytest

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.lab.training import make_task, train
from tests.support.tiers import EXHAUSTIVE

SMALL = {
    **{"num_nextn_predict_layers": 0, "num_hidden_layers": 2, "num_hash_layers": 0, "quantization_config": None},
    **{"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "qk_rope_head_dim": 16},
    **{"q_lora_rank": 32, "o_groups": 1, "o_lora_rank": 32, "sliding_window": 4, "index_n_heads": 4},
    **{"index_head_dim": 32, "index_topk": 4, "n_routed_experts": 2, "num_experts_per_tok": 1},
    **{"moe_intermediate_size": 32, "hc_mult": 2, "hc_sinkhorn_iters": 3},
}
GAP = 12  # tokens; two layers of window 4 reach back 6


@EXHAUSTIVE
@pytest.mark.parametrize(("ratios", "learned"), [([0, 4], True), ([0, 0], False)], ids=["entries", "window"])
def test_a_needle_beyond_the_windows(ratios, learned):
    config = ModelConfig.from_preset("tiny").replace(compress_ratios=ratios, **SMALL)
    task = make_task("needle", 64, gap=GAP)
    result = train(config, task, steps=140, batch=32, seq_len=24, lr=5e-3, device="cpu")
    if learned:
        assert result.metrics["accuracy"] > 0.95
    else:  # 7 values to guess from
        assert result.metrics["accuracy"] < 0.3


@EXHAUSTIVE
def test_the_window_alone_sees_a_needle_inside_it():
    """So that the failure above is the distance's and not the model's."""
    config = ModelConfig.from_preset("tiny").replace(compress_ratios=[0, 0], **SMALL | {"sliding_window": 24})
    result = train(config, make_task("needle", 64, gap=GAP), steps=140, batch=32, seq_len=24, lr=5e-3, device="cpu")
    assert result.metrics["accuracy"] > 0.95
