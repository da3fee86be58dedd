"""Small attention layers of every kind, as `deepseek_attn.testing` drives them, and steps of hand-made metadata."""

from __future__ import annotations

import torch

from deepseek_attn.attention.builder import StepInput
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.runner.step import step_input
from deepseek_attn.testing import LayerRequest, RandomLayer, poison_scratch

KINDS = ["SWA", "C4A", "C128A", "C8A", "C16A_overlap"]
WINDOW, TOPK, ROLLBACK = 13, 5, 5


def small_config():
    """Sizes that share no factor by accident; layer i is ``KINDS[i]``."""
    return ModelConfig.from_preset("tiny").replace(
        num_hidden_layers=5, compress_ratios=[0, 4, 128, 8, 16], compress_overlap={"16": True}, num_hash_layers=0,
        num_nextn_predict_layers=0, quantization_config=None, hidden_size=48, num_attention_heads=6, head_dim=32,
        qk_rope_head_dim=8, q_lora_rank=24, o_groups=3, o_lora_rank=10, sliding_window=WINDOW, index_n_heads=8,
        index_head_dim=16, index_topk=TOPK,
    )  # fmt: skip


class Layer(RandomLayer):
    """The layer of a kind; its linears, norms and indexer run in Triton where that runs."""

    def __init__(self, kind="SWA", device="cpu", config=None, **options):
        options = {"max_model_len": 420, "max_num_batched_tokens": 300, "max_rollback": ROLLBACK, **options}
        super().__init__(
            config or small_config(), KINDS.index(kind), device=device, dtype="float32", backend="reference",
            **{"numerics": "exact", **options},
        )  # fmt: skip
        self.runner.reference_only = False
        self.kind, self.attn = kind, self.attention

    def step_input(self, work: list[tuple[LayerRequest, int]]) -> StepInput:
        """Input of the metadata builder for (request, new tokens), whose pages it reserves."""
        batch = [(request.sequence.cache, n) for request, n in work]
        self.runner.manager.reserve(batch)
        caches, lengths = [cache for cache, _ in batch], [n for _, n in batch]
        return step_input(self.runner.manager, caches, lengths, 1)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, step_input: StepInput) -> torch.Tensor:
        """The layer on a hand-made step, which nothing checks and nothing commits."""
        poison_scratch(self.runner)
        step = self.runner.builder.build(step_input)
        return self.attn(x, step.positions, step)
