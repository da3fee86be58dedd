"""Mixture of experts: hash routing in V4's first layers, scored routing in the others, group-limited in V3."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from deepseek_attn.config import AnyConfig, LayerSpec
from deepseek_attn.config_v32 import DeepseekV32Config, V32LayerSpec
from deepseek_attn.linear import CheckpointModule, ExpertLinear, Linear, WeightSlot
from deepseek_attn.numerics import Numerics

AnySpec = LayerSpec | V32LayerSpec
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

    def __init__(self, config: AnyConfig, spec: AnySpec, device: torch.device | str = "cpu"):
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
            experts = self.choose(scores + self.bias)
        weights = scores.gather(1, experts)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return experts, weights * self.factor

    def choose(self, biased: torch.Tensor) -> torch.Tensor:
        """Expert ids ``[T, k]`` by ``score + bias [T, E]``."""
        return biased.topk(self.topk, dim=-1).indices


class GroupLimitedGate(Gate):
    """A gate of DeepSeek-V3: experts come from the best ``topk_group`` of ``n_group`` groups of consecutive experts.

    A group counts as much as its two best experts together, bias included.
    """

    def __init__(self, config: DeepseekV32Config, spec: V32LayerSpec, device: torch.device | str = "cpu"):
        super().__init__(config, spec, device)
        self.groups, self.topk_groups = config.n_group, config.topk_group

    def choose(self, biased: torch.Tensor) -> torch.Tensor:
        grouped = biased.unflatten(-1, (self.groups, -1))
        kept = grouped.topk(2, dim=-1).values.sum(-1).topk(self.topk_groups, dim=-1).indices
        left_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=biased.device).scatter_(1, kept, False)
        # -inf and not 0: a biased score may be negative
        return super().choose(grouped.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(1))


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(gate) * up`` in float32, clamped first: ``up`` on both sides, ``gate`` from above only."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


class MLP(CheckpointModule):
    """``w2(swiglu(w1 x, w3 x))``: the expert that every token goes through, or a layer without experts.

    Args:
        inner: width between the projections.
        limit: clamp of ``swiglu``.
    """

    def __init__(self, hidden: int, inner: int, limit: float, numerics: Numerics, dtype: torch.dtype, device="cpu"):
        super().__init__(device)
        self.limit = limit
        self.w1 = Linear(hidden, inner, numerics, dtype, device)
        self.w3 = Linear(hidden, inner, numerics, dtype, device)
        self.w2 = Linear(inner, hidden, numerics, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class Experts(CheckpointModule):
    """The routed experts (checkpoint: ``ffn.experts.J.w1 / w2 / w3``), each projection stacked over the experts.

    Args:
        weigh_output: an expert's weight multiplies its output (DeepSeek-V3) instead of the input of ``w2`` (V4). The
            two differ by rounding.
    """

    def __init__(
        self, config: AnyConfig, numerics: Numerics, dtype: torch.dtype, device="cpu", weigh_output: bool = False
    ):
        super().__init__(device)
        self.weigh_output = weigh_output
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

        Rows are sorted by expert, each expert's rows padded to whole tiles. Experts add up in the order of their ids,
        so the sum does not depend on the batch.
        """
        if not len(x):
            return x.float()
        if len(x) == 1:  # nothing to sort or to pad
            order = experts[0].argsort()
            segments = [(expert, i, i + 1) for i, expert in enumerate(experts[0, order].tolist())]
            return self.run(x.expand(len(segments), -1), segments, weights[0, order, None]).sum(0, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        tokens = order // experts.shape[1]
        place, segments = self.lay_out(experts.flatten()[order], ROW_TILE)
        rows = x.new_zeros(segments[-1][2], x.shape[1])
        rows[place] = x[tokens]
        weight = weights.new_zeros(len(rows), 1)
        weight[place] = weights.flatten()[order].unsqueeze(1)
        out = self.run(rows, segments, weight)[place]
        return torch.zeros(x.shape, device=x.device).index_add_(0, tokens, out)

    def run(self, rows: torch.Tensor, segments: list[tuple[int, int, int]], weight: torch.Tensor) -> torch.Tensor:
        """Weighted outputs, float32 ``[R, D]``, of ``rows [R, D]``: rows start to end of each segment by its expert."""
        gate = torch.cat([self.w1(rows[start:end], expert) for expert, start, end in segments])
        up = torch.cat([self.w3(rows[start:end], expert) for expert, start, end in segments])
        hidden = swiglu(gate, up, self.limit)
        if not self.weigh_output:
            hidden *= weight
        hidden = hidden.to(rows.dtype)
        out = torch.cat([self.w2(hidden[start:end], expert) for expert, start, end in segments]).float()
        return out * weight if self.weigh_output else out

    def lay_out(self, expert_of_row: torch.Tensor, tile: int) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
        """Where sorted rows go: their places, and (expert, start, end) of each expert that has rows."""
        counts = torch.bincount(expert_of_row, minlength=self.count)
        padded = (counts + tile - 1) // tile * tile
        ends = padded.cumsum(0)
        shift = (ends - padded) - (counts.cumsum(0) - counts)
        place = torch.arange(len(expert_of_row), device=expert_of_row.device) + shift[expert_of_row]
        sizes = zip(padded.tolist(), ends.tolist(), strict=True)
        return place, [(expert, end - size, end) for expert, (size, end) in enumerate(sizes) if size]


class MoE(CheckpointModule):
    """Routed experts plus the shared one."""

    def __init__(self, config: AnyConfig, spec: AnySpec, numerics: Numerics, dtype: torch.dtype, device="cpu"):
        super().__init__(device)
        grouped = isinstance(config, DeepseekV32Config)
        self.gate = (GroupLimitedGate if grouped else Gate)(config, spec, device)
        self.experts = Experts(config, numerics, dtype, device, weigh_output=grouped)
        inner = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = MLP(config.hidden_size, inner, config.swiglu_limit, numerics, dtype, device)

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden_size]``, ``token_ids [T]`` -> ``[T, hidden_size]``."""
        experts, weights = self.gate(x, token_ids)
        return (self.experts(x, experts, weights) + self.shared_experts(x)).to(x.dtype)
