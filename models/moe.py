"""Mixture of experts with hash routing in the first layers and scored routing in the others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from deepseek_attn.config import LayerSpec, ModelConfig
from deepseek_attn.linear import CheckpointModule, ExpertLinear, Linear, WeightSlot
from deepseek_attn.numerics import Numerics

# CPU matrix products round a row differently when there are fewer rows than a tile. Padding to whole tiles makes a
# token's result independent of which other tokens chose the same expert.
ROW_TILE = 16

SCORES = {
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
}


class Gate(CheckpointModule):
    """Chooses the experts of each token and their weights.

    Scored layers take the highest ``score + bias``; the bias steers the choice only. Hash layers look the choice up by
    token id (``tid2eid``), and the gate still gives the weights.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec, device: torch.device | str = "cpu"):
        super().__init__(device)
        self.topk, self.factor = config.num_experts_per_tok, config.routed_scaling_factor
        self.normalize, self.score = config.norm_topk_prob, SCORES[config.scoring_func]
        self.hash = spec.hash_routing
        self.declare("weight", (config.n_routed_experts, config.hidden_size), torch.float32)
        if self.hash:
            self.declare("tid2eid", (config.vocab_size, self.topk), torch.int64, kind="int")
        else:
            self.declare("bias", (config.n_routed_experts,), torch.float32)

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x [T, hidden_size]``, ``token_ids [T]`` -> expert ids ``[T, k]`` and float32 weights ``[T, k]``."""
        scores = self.score(F.linear(x.float(), self.weight))
        if self.hash:
            experts = self.tid2eid[token_ids]
        else:
            experts = (scores + self.bias).topk(self.topk, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return experts, weights * self.factor


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(gate) * up`` in float32, clamped first: ``up`` on both sides, ``gate`` from above only."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


class SharedExpert(CheckpointModule):
    """The expert that every token goes through (checkpoint: ``ffn.shared_experts``)."""

    def __init__(self, config: ModelConfig, numerics: Numerics, dtype: torch.dtype, device="cpu"):
        super().__init__(device)
        hidden, inner = config.hidden_size, config.moe_intermediate_size * config.n_shared_experts
        self.limit = config.swiglu_limit
        self.w1 = Linear(hidden, inner, numerics, dtype, device)
        self.w3 = Linear(hidden, inner, numerics, dtype, device)
        self.w2 = Linear(inner, hidden, numerics, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class Experts(CheckpointModule):
    """The routed experts (checkpoint: ``ffn.experts.J.w1 / w2 / w3``), each projection stacked over the experts."""

    def __init__(self, config: ModelConfig, numerics: Numerics, dtype: torch.dtype, device="cpu"):
        super().__init__(device)
        self.count, self.limit = config.n_routed_experts, config.swiglu_limit
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.w1 = ExpertLinear(self.count, hidden, inner, numerics, dtype, device)
        self.w3 = ExpertLinear(self.count, hidden, inner, numerics, dtype, device)
        self.w2 = ExpertLinear(self.count, inner, hidden, numerics, dtype, device)

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        for index in range(self.count):
            for name in ("w1", "w2", "w3"):
                yield f"{index}.{name}.weight", getattr(self, name).expert_slot(index)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the chosen experts: ``x [T, D]``, ``experts``, ``weights [T, k]`` -> float32 ``[T, D]``.

        Experts add up in the order of their ids, so the sum does not depend on the batch.
        """
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.count).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            chosen = order[start : start + count]
            start += count
            tokens = chosen // experts.shape[1]
            rows = x[tokens] if len(x) == 1 else F.pad(x[tokens], (0, 0, 0, -count % ROW_TILE))
            hidden = swiglu(self.w1(rows, expert), self.w3(rows, expert), self.limit)
            hidden[:count] *= weights.flatten()[chosen].unsqueeze(1)
            out.index_add_(0, tokens, self.w2(hidden.to(x.dtype), expert)[:count].float())
        return out


class MoE(CheckpointModule):
    """Routed experts plus the shared one."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, dtype: torch.dtype, device="cpu"):
        super().__init__(device)
        self.gate = Gate(config, spec, device)
        self.experts = Experts(config, numerics, dtype, device)
        self.shared_experts = SharedExpert(config, numerics, dtype, device)

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden_size]``, ``token_ids [T]`` -> ``[T, hidden_size]``."""
        experts, weights = self.gate(x, token_ids)
        return (self.experts(x, experts, weights) + self.shared_experts(x)).to(x.dtype)
