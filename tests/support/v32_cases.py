"""Small models of DeepSeek-V3.2 and V3, and what they choose."""

from __future__ import annotations

from typing import Any

import torch

from deepseek_attn.checkpoint import CheckpointSource
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.models.moe import GroupLimitedGate
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.v32.attention import DeepseekV32MLAAttention
from tests.support.small_models import small_runner
from tests.support.typed import required

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "index_topk": 12,
    "max_position_embeddings": 4096,
}


def small(model_type: str = "deepseek_v32", **changes: Any) -> DeepseekV32Config:
    changes = SMALL | {"num_nextn_predict_layers": 0} | changes
    if model_type == "deepseek_v3":
        del changes["index_topk"]
    return ModelConfig.from_preset("tiny_v32").replace(model_type=model_type, **changes)


def make_runner(config: AnyConfig, source: CheckpointSource | None = None, **options: Any) -> ModelRunner:
    return small_runner(config, source, **{"max_num_batched_tokens": 2400, **options})


class recorded:
    """Hooks that keep the experts and the tokens that a single prompt's step chooses, by layer."""

    def __init__(self, runner: ModelRunner, experts: dict, entries: dict):
        self.hooks = []
        for name, module in runner.model.named_modules():
            layer = ".".join(name.split(".")[:2])
            if isinstance(module, GroupLimitedGate):
                hook = lambda m, a, r, layer=layer: experts.update({layer: r[0].sort(-1).values})  # noqa: E731
            elif name.endswith(".attn") and module.indexer is not None:
                hook = lambda m, a, r, layer=layer: entries.update({layer: chosen(m, len(r))})  # noqa: E731
            else:
                continue
            self.hooks.append(module.register_forward_hook(hook))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()


def chosen(layer: DeepseekV32MLAAttention, tokens: int) -> torch.Tensor:
    """Bool ``[tokens, tokens]``: which tokens each token's query reads."""
    rows = required(layer.topk_indices_buffer)[:tokens]
    return (rows.unsqueeze(2) == torch.arange(len(rows))).any(1)
