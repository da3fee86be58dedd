"""DeepSeek-V4.1's published program for one prompt, rounding by rounding: bfloat16 tensors, and none of its kernels.

`V41Oracle` has the same formulas without roundings to bfloat16. Written from the model's specification.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.checkpoint import CheckpointSource, read_float32
from deepseek_attn.config.v41 import DeepseekV41Config
from tests.support.oracle_v41 import V41Oracle, fp8, frequencies, mxfp4, nvfp4

BF16 = torch.bfloat16
ROUNDINGS = ("latents", "head weights", "scores", "softmax weights")
"""Roundings that `V41Program` can leave out, to show that a comparison with it notices each."""


class V41Program:
    """Logits of one prompt at a time, float32 ``[T, vocab]``; without Engram and drafts.

    Attributes:
        selected: by index source, bool ``[T, entries]``, the entries that each query reads.
    """

    def __init__(self, config: DeepseekV41Config, source: CheckpointSource, left_out: Collection[str] = ()):
        assert set(left_out) <= set(ROUNDINGS)
        self.c = config.to_dict()["text_config"]
        self.source, self.left_out = source, left_out
        self.stored = {name.replace(".scale", ".weight") for name in source.entries() if name.endswith(".scale")}
        self.weights: dict[str, Tensor] = {}
        self.selected: dict[int, Tensor] = {}

    def weight(self, name: str) -> Tensor:
        if name not in self.weights:
            self.weights[name] = read_float32(self.source, name).float()
        return self.weights[name]

    def rounded(self, x: Tensor, rounding: str) -> Tensor:
        return x if rounding in self.left_out else x.to(BF16)

    def linear(self, x: Tensor, name: str, rounded: bool = True) -> Tensor:
        """A product with float32 sums; inputs of quantised weights are rounded to FP8 in groups of 32."""
        if f"{name}.weight" in self.stored:
            x = quantised(fp8, x)
        y = x.float() @ self.weight(f"{name}.weight").T
        return y.to(BF16) if rounded else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.c["rms_norm_eps"])
        return (self.weight(name) * y).to(BF16)

    def rope(self, x: Tensor, positions: Tensor, ratio: int, inverse: bool = False) -> Tensor:
        angles = positions[:, None].double() * torch.tensor(frequencies(self.c, ratio), dtype=torch.float64)
        turn = torch.polar(torch.ones_like(angles), -angles if inverse else angles).to(torch.complex64)
        turn = turn.unsqueeze(1) if x.dim() == 3 else turn
        plain, last = x.tensor_split([x.shape[-1] - self.c["qk_rope_head_dim"]], -1)
        pairs = torch.view_as_complex(last.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.cat([plain, torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)], -1)

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        c = self.c
        self.entries: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        streams = self.weight("embed.weight")[list(tokens)].to(BF16).unsqueeze(1).repeat(1, c["hc_mult"], 1)
        pre = torch.zeros(streams.shape[:2])
        pre[:, 0] = 1
        for layer in range(c["num_hidden_layers"]):
            for part, sublayer in (("attn", self.attention), ("ffn", self.moe)):
                mixes = Float32(self).mixes(layer, part, streams.float())
                x = (pre.unsqueeze(-1) * streams.float()).sum(1).to(BF16)
                y = sublayer(layer, self.norm(x, f"layers.{layer}.{part}_norm.weight")).float()
                pre, post, comb = mixes
                mixed = torch.einsum("tjk,tjd->tkd", comb, streams.float())
                streams = (post.unsqueeze(-1) * y.unsqueeze(1) + mixed).to(BF16)
        x = self.norm((pre.unsqueeze(-1) * streams.float()).sum(1).to(BF16), "norm.weight")
        return x.float() @ self.weight("head.weight").T

    def attention(self, layer: int, x: Tensor) -> Tensor:
        c, name = self.c, f"layers.{layer}.attn"
        ratio, heads, dim, groups = c["compress_ratios"][layer], c["num_attention_heads"], c["head_dim"], c["o_groups"]
        t = torch.arange(len(x))
        latent = self.norm(self.linear(x, f"{name}.wq_a"), f"{name}.q_norm.weight")
        q = self.rope(self.linear(latent, f"{name}.wq_b").view(len(x), heads, dim), t, ratio)
        kv = self.norm(self.linear(x, f"{name}.wkv"), f"{name}.kv_norm.weight")
        keys = quantised(fp8, self.rope(kv, t, ratio))
        read = (t <= t[:, None]) & (t > t[:, None] - c["sliding_window"])
        if ratio:
            source = max(i for i in c["kv_source_layer_ids"] if i <= layer)
            if source == layer:
                self.compress(layer, x, ratio)
            if layer in c["index_source_layer_ids"]:
                self.selection = self.selected[layer] = self.select(layer, source, x, latent, ratio)
            keys, read = torch.cat([keys, self.entries[source]]), torch.cat([read, self.selection], 1)
        logits = torch.einsum("thd,nd->thn", q.float(), keys.float()) * dim**-0.5
        logits = logits.masked_fill(~read.unsqueeze(1), -math.inf)
        largest, sinks = logits.amax(-1, keepdim=True), self.weight(f"{name}.attn_sink").view(-1, 1)
        weights = torch.exp(logits - largest)
        total = weights.sum(-1, keepdim=True) + torch.exp(sinks - largest)
        out = torch.einsum("thn,nd->thd", self.rounded(weights, "softmax weights").float(), keys.float()) / total
        out = self.rope(out.to(BF16), t, ratio, inverse=True).view(len(x), groups, -1).float()
        wo_a = self.weight(f"{name}.wo_a.weight").view(groups, c["o_lora_rank"], -1)
        return self.linear(torch.einsum("tgi,goi->tgo", out, wo_a).to(BF16).flatten(1), f"{name}.wo_b")

    def compress(self, layer: int, x: Tensor, ratio: int) -> None:
        name = f"layers.{layer}.attn"
        if ratio == 1:
            values = self.rounded(self.linear(x, f"{name}.compressor.wkv", rounded=False), "latents")
        else:
            whole = x[: len(x) // ratio * ratio]
            values, gate = (
                self.linear(whole, f"{name}.compressor.{part}", rounded=False).unflatten(0, (-1, ratio))
                for part in ("wkv", "wgate")
            )
            values = (values * gate.softmax(1)).sum(1).to(BF16)
        latent, starts = self.norm(values, f"{name}.compressor.norm.weight"), torch.arange(len(values)) * ratio
        self.entries[layer] = quantised(nvfp4, self.rope(latent, starts, ratio))
        keys = self.norm(self.linear(latent, f"{name}.indexer.wk"), f"{name}.indexer.k_norm.weight")
        self.index_keys[layer] = quantised(mxfp4, self.rope(keys, starts, ratio))

    def select(self, layer: int, source: int, x: Tensor, latent: Tensor, ratio: int) -> Tensor:
        c, name = self.c, f"layers.{layer}.attn.indexer"
        heads, dim, keys = c["index_n_heads"], c["index_head_dim"], self.index_keys[source]
        t, count = torch.arange(len(x)), len(keys)
        q = quantised(mxfp4, self.rope(self.linear(latent, f"{name}.wq_b").view(len(x), heads, dim), t, ratio))
        exact = "head weights" in self.left_out
        weights = self.linear(x, f"{name}.weights_proj", rounded=not exact) * (dim**-0.5 * heads**-0.5)
        scores = self.rounded(torch.einsum("thd,nd->thn", q.float(), keys.float()), "scores").relu()
        scores = self.rounded((scores * weights.unsqueeze(-1)).float().sum(1), "scores").float()
        visible = (t + 1) // ratio
        scores = scores.masked_fill(torch.arange(count) >= visible[:, None], -math.inf)
        size, limited_by = c.get("candidate_block_size"), c.get("candidate_source_layer_id")
        unlimited = scores
        if limited_by is not None and layer > limited_by:
            scores = scores.masked_fill(~self.kept.repeat_interleave(size, 1)[:, :count], -math.inf)
        if layer == limited_by:
            best = F.pad(unlimited, (0, -count % size), value=-math.inf).unflatten(1, (-1, size)).amax(-1)
            newest = torch.arange(best.shape[1]) == ((visible - 1) // size)[:, None]
            self.kept = top(best.masked_fill(newest, math.inf), c["candidate_topk_blocks"])
        return top(scores, c["index_topk"])

    def expert(self, x: Tensor, name: str, weight: Tensor | None = None) -> Tensor:
        limit = self.c["swiglu_limit"]
        gate = self.linear(x, f"{name}.w1").float().clamp(max=limit)
        hidden = F.silu(gate) * self.linear(x, f"{name}.w3").float().clamp(-limit, limit)
        return self.linear((hidden if weight is None else hidden * weight).to(BF16), f"{name}.w2").float()

    def moe(self, layer: int, x: Tensor) -> Tensor:
        c, name = self.c, f"layers.{layer}.ffn"
        scores = F.softplus(x.float() @ self.weight(f"{name}.gate.weight").T).sqrt()
        chosen = (scores + self.weight(f"{name}.gate.bias")).topk(c["num_experts_per_tok"], -1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]
        out = torch.zeros(x.shape)
        for e in range(c["n_routed_experts"]):
            token, place = torch.where(chosen == e)
            if len(token):
                out[token] += self.expert(x[token], f"{name}.experts.{e}", weights[token, place, None])
        return (out + self.expert(x, f"{name}.shared_experts")).to(BF16)


class Float32(V41Oracle):
    """The weights of a program for `V41Oracle.mixes`, in float32."""

    def __init__(self, program: V41Program):
        self.c, self.tensor = program.c, program.weight

    def norm(self, x: Tensor, weight: str | None = None) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"])


def quantised(rule, x: Tensor) -> Tensor:
    """Values after a round trip through a format, in bfloat16."""
    return rule(x.double()).to(BF16)


def top(scores: Tensor, k: int) -> Tensor:
    """Bool mask of the ``k`` highest scores of each row above -inf."""
    best = scores.topk(min(k, scores.shape[1]), 1)
    return torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, best.indices, best.values > -math.inf)
