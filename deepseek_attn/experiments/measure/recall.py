"""Fraction of dense attention that a layer retains: mass on its window and entries, and recall of its indexer.

Computed from a layer's own queries, keys and cached entries, in float32 and in blocks of queries, while a runner
computes a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepseek_attn.attention.layer import DeepseekV4MLAAttention
from deepseek_attn.experiments.define.results import RecallRow
from deepseek_attn.kernels.insert import query_norm_rope
from deepseek_attn.layers.rope import apply_rope
from deepseek_attn.models.block import attention_layers
from deepseek_attn.runner.model_runner import ModelRunner

BLOCK_BYTES = 64 << 20  # of one block of scores


@dataclass
class LayerRecall:
    """Values of one layer per query, as parts ``[queries]`` in [0, 1].

    Attributes:
        token_mass: part of dense attention over all earlier tokens that falls on tokens the layer sees: those in its
            window, and those that the entries it reads were compressed from.
        entry_mass: part of the layer's attention over all visible entries that falls on the selected ones.
        found: part of the ``index_topk`` entries with the largest attention that the indexer selects; chance: the
            same for a random selection. These three are over queries with more visible entries than ``index_topk``.
    """

    token_mass: list[torch.Tensor] = field(default_factory=list)
    entry_mass: list[torch.Tensor] = field(default_factory=list)
    found: list[torch.Tensor] = field(default_factory=list)
    chance: list[torch.Tensor] = field(default_factory=list)

    def means(self) -> dict[str, float | None]:
        """Means over queries; None where no query needs a top-k."""
        values = {"token_mass": self.token_mass, "entry_mass": self.entry_mass}
        values |= {"index_recall": self.found, "index_recall_of_chance": self.chance}
        joined = {name: torch.cat(parts) if parts else torch.empty(0) for name, parts in values.items()}
        return {name: float(value.double().mean()) if len(value) else None for name, value in joined.items()}


@torch.no_grad()
def measure_recall(runner: ModelRunner, prompts: list[list[int]]) -> list[RecallRow]:
    """Recall of every layer over ``prompts``, each computed in one step.

    Returns:
        One row per layer, with the means of `LayerRecall` over all queries.

    Raises:
        ValueError: a prompt longer than a step of the runner.
    """
    limit = runner.layout.max_num_batched_tokens
    longest = max(map(len, prompts), default=0)
    if longest > limit:
        raise ValueError(f"prompts of up to {longest} tokens: a step of this runner takes {limit}")
    layers = attention_layers(runner.model)
    totals = {layer.prefix: LayerRecall() for layer in layers}

    def hook(layer: DeepseekV4MLAAttention, args: tuple, _output: torch.Tensor) -> None:
        add_queries(totals[layer.prefix], layer, args[0])

    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        for prompt in prompts:
            sequence = runner.sequence(prompt)
            try:
                runner.step([(sequence, len(prompt))])
            finally:
                sequence.free()
    finally:
        for handle in handles:
            handle.remove()
    return [{"layer": layer.spec.index, "kind": layer.spec.kind, **totals[layer.prefix].means()} for layer in layers]


def add_queries(total: LayerRecall, layer: DeepseekV4MLAAttention, x: torch.Tensor) -> None:
    """Adds the queries of ``x [T, hidden_size]``: the input of ``layer``, which has just computed one new sequence."""
    step, spec, count = layer.step, layer.spec, len(x)
    assert step is not None
    freqs_cis = layer.rope.at(step.positions)
    q = query_norm_rope(layer.query_heads(layer.wq_b(layer.q_norm(layer.wq_a(x))), step.positions))
    q = q[:, : layer.num_heads].float()
    keys = apply_rope(layer.kv_norm(layer.wkv(x)), freqs_cis).float()
    ratio, entries = spec.ratio, keys[:0]
    if ratio:
        assert layer.kv_cache is not None
        entries = layer.kv_cache.gather_request(step.sparse[ratio].block_table[0], count // ratio, x.dtype).float()
    selected = layer.topk_indices_buffer[:count] if layer.indexer is not None else None
    sink, position = layer.attn_sink.float(), torch.arange(count, device=x.device)
    block = max(1, BLOCK_BYTES // (4 * layer.num_heads * (count + len(entries))))
    for start in range(0, count, block):
        rows = slice(start, min(start + block, count))
        at = position[rows].unsqueeze(1)
        visible = torch.arange(len(entries), device=x.device) < (at + 1) // max(ratio, 1)
        reads = visible if selected is None else visible & _chosen(selected[rows], len(entries))
        near = at - position < layer.window_size
        dense = _mass(q[rows], keys, position <= at, sink, layer.scale)
        seen = near | _covered(reads, spec.ratio, spec.overlap, count)
        total.token_mass.append(((dense * seen).sum(1) / dense.sum(1)).cpu())
        needs_topk = visible.sum(1) > selected.shape[1] if selected is not None else None
        if needs_topk is not None and needs_topk.any():
            both = torch.cat([entries, keys])
            allowed = torch.cat([visible, (position <= at) & near], dim=1)
            mass = _mass(q[rows], both, allowed, sink, layer.scale)[:, : len(entries)]
            _add_topk(total, mass[needs_topk], reads[needs_topk], visible[needs_topk], selected.shape[1])


def _mass(q: torch.Tensor, keys: torch.Tensor, allowed: torch.Tensor, sink: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention weights ``[rows, keys]`` of ``q [rows, heads, d]``, summed over the heads, with attention sinks."""
    scores = torch.einsum("thd,kd->thk", q, keys) * scale
    scores = scores.masked_fill(~allowed.unsqueeze(1), float("-inf"))
    sinks = sink[:, None].expand(len(q), -1, 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1].sum(1)


def _chosen(selected: torch.Tensor, count: int) -> torch.Tensor:
    """Bool ``[rows, count]`` of the entries in ``selected [rows, k]``; negative entries are padding."""
    chosen = torch.zeros(len(selected), count + 1, dtype=torch.bool, device=selected.device)
    chosen.scatter_(1, torch.where(selected < 0, count, selected).long(), True)
    return chosen[:, :count]


def _covered(reads: torch.Tensor, ratio: int, overlap: bool, tokens: int) -> torch.Tensor:
    """Bool ``[rows, tokens]``: tokens that the entries of ``reads [rows, entries]`` were compressed from."""
    if not reads.shape[1]:
        return torch.zeros(len(reads), tokens, dtype=torch.bool, device=reads.device)
    if overlap:
        reads = reads | torch.nn.functional.pad(reads[:, 1:], (0, 1))
    spread = reads.repeat_interleave(ratio, dim=1)
    return torch.nn.functional.pad(spread, (0, tokens - spread.shape[1]))


def _add_topk(total: LayerRecall, mass: torch.Tensor, reads: torch.Tensor, visible: torch.Tensor, topk: int) -> None:
    """Adds queries with more than ``topk`` visible entries: ``mass [rows, entries]`` is 0 where not visible."""
    best = torch.zeros_like(reads).scatter_(1, mass.masked_fill(~visible, -1.0).topk(topk, dim=1).indices, True)
    total.entry_mass.append(((mass * reads).sum(1) / mass.sum(1).clamp(min=1e-30)).cpu())
    total.found.append(((best & reads).sum(1) / topk).cpu())
    total.chance.append((topk / visible.sum(1)).cpu())
