"""transformers' DeepseekV4ForCausalLM as an oracle: float32, eager attention, dequantised weights.

It knows ratio 4 (overlapping, with indexer) and one other ratio without either, and has no MTP layer; the other
oracle, ``tests.support.oracle_dense``, has no such limits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HashRouter,
    DeepseekV4Indexer,
    DeepseekV4IndexerScorer,
    DeepseekV4TopKRouter,
)

from deepseek_attn.checkpoint import CheckpointSource, hf_state_dict
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.testing.transformers_layer import hf_config
from tests.support.oracle_output import OracleOutput


class TransformersOracle:
    """One checkpoint, loaded once.

    Args:
        config: a schedule that transformers can express (see ``hf_config``).
        source: the weights, in any published format.
    """

    def __init__(self, config: ModelConfig, source: CheckpointSource):
        self.config = config
        settings = hf_config(config)
        assert isinstance(settings, DeepseekV4Config)
        self.model = DeepseekV4ForCausalLM(settings).float().eval()
        state = hf_state_dict(source)
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        if missing or unexpected:
            raise ValueError(f"transformers misses {missing} and does not know {unexpected}")

    @torch.no_grad()
    def __call__(self, tokens: list[int]) -> OracleOutput:
        """One forward over the whole prompt, without a cache."""
        output = OracleOutput()
        hooks = []
        for index, layer in enumerate(self.model.model.layers):
            for module in layer.modules():
                watch = WATCHERS.get(type(module))
                if watch is not None:
                    hooks.append(module.register_forward_hook(watch(output, index, self.config)))
        try:
            output.logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return output


def _watch_router(output: OracleOutput, layer: int, config: ModelConfig):
    def hook(module, args, result):
        scores = module.score_fn(result[0]) + module.e_score_correction_bias
        output.choose_experts(layer, scores, config.num_experts_per_tok)
        if not torch.equal(output.experts[layer], result[2].sort(-1).values):
            raise AssertionError("the hook does not see transformers' own choice of experts")

    return hook


def _watch_hash_router(output: OracleOutput, layer: int, config: ModelConfig):
    def hook(module, args, result):
        output.experts[layer] = result[2].sort(-1).values

    return hook


def _watch_scorer(output: OracleOutput, layer: int, config: ModelConfig):
    def hook(module, args, result):
        visible = (torch.arange(result.shape[1]) + 1) // config.layers[layer].ratio
        output.choose_entries(layer, result[0], visible, config.index_topk)

    return hook


def _watch_indexer(output: OracleOutput, layer: int, config: ModelConfig):
    def hook(module, args, result):
        chosen = F.one_hot(result[0] + 1, output.entries[layer].shape[1] + 1).sum(1)[:, 1:].bool()
        if not torch.equal(chosen, output.entries[layer]):
            raise AssertionError("the hook does not see transformers' own choice of entries")

    return hook


WATCHERS = {
    DeepseekV4TopKRouter: _watch_router,
    DeepseekV4HashRouter: _watch_hash_router,
    DeepseekV4IndexerScorer: _watch_scorer,
    DeepseekV4Indexer: _watch_indexer,
}
