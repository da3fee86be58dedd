"""DeepSeek-V4 by brute force: for each query the explicit list of what it may see, in float64, without any cache.

Written from the model's definition as loops over layers, windows and queries. From the library it takes the config's
values and the stored weights, nothing else. Covers what transformers cannot: any compress ratio, overlap and indexer
independent of it, and the MTP layer.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from deepseek_attn.checkpoint import CheckpointSource, read_float32
from deepseek_attn.config.model import LayerSpec, ModelConfig
from tests.support.oracle_output import OracleOutput


class DenseOracle:
    """One checkpoint; calling it computes one prompt."""

    def __init__(self, config: ModelConfig, source: CheckpointSource):
        self.config, self.source = config, source
        self.weights: dict[str, torch.Tensor] = {}

    def __call__(self, tokens: list[int]) -> OracleOutput:
        config, output = self.config, OracleOutput()
        ids = torch.tensor(tokens)
        streams = self["embed.weight"][ids].unsqueeze(1).repeat(1, config.hc_mult, 1)
        for spec in config.layers:
            streams = self.block(spec, streams, ids, output)
        output.logits = self.head("", streams)
        if config.mtp_layers and len(tokens) > 1:
            output.mtp_logits = self.mtp(config.mtp_layers[0], streams, ids, output)
        return output

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.weights:
            is_table = name.endswith("tid2eid")
            self.weights[name] = self.source.read(name) if is_table else read_float32(self.source, name).double()
        return self.weights[name]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self[f"{name}.weight"].T

    def norm(self, x: torch.Tensor, name: str | None = None) -> torch.Tensor:
        y = x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        return y if name is None else y * self[f"{name}.weight"]

    # residual streams

    def mix(self, prefix: str, streams: torch.Tensor) -> torch.Tensor:
        """``[T, rows]``: the flattened streams, normed, times ``fn``."""
        return self.norm(streams.flatten(1)) @ self[f"{prefix}fn"].T

    def sublayer(self, prefix: str, streams: torch.Tensor, function) -> torch.Tensor:
        """Streams after one sublayer: collapse, ``function``, spread its output and mix the streams."""
        m, eps = self.config.hc_mult, self.config.hc_eps
        mix, base, scale = self.mix(prefix, streams), self[f"{prefix}base"], self[f"{prefix}scale"]
        pre = torch.sigmoid(mix[:, :m] * scale[0] + base[:m]) + eps
        post = 2 * torch.sigmoid(mix[:, m : 2 * m] * scale[1] + base[m : 2 * m])
        comb = (mix[:, 2 * m :] * scale[2] + base[2 * m :]).view(-1, m, m).softmax(2) + eps
        for iteration in range(self.config.hc_sinkhorn_iters):
            if iteration:
                comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        y = function(torch.einsum("tj,tjd->td", pre, streams))
        return post.unsqueeze(2) * y.unsqueeze(1) + torch.einsum("tjk,tjd->tkd", comb, streams)

    def head(self, prefix: str, streams: torch.Tensor) -> torch.Tensor:
        mix = self.mix(f"{prefix}hc_head_", streams)
        pre = torch.sigmoid(mix * self[f"{prefix}hc_head_scale"] + self[f"{prefix}hc_head_base"]) + self.config.hc_eps
        x = torch.einsum("tj,tjd->td", pre, streams)
        return self.norm(x, f"{prefix}norm") @ self["head.weight"].T

    def block(self, spec: LayerSpec, streams: torch.Tensor, ids: torch.Tensor, output: OracleOutput) -> torch.Tensor:
        name = spec.name

        def attention(x: torch.Tensor) -> torch.Tensor:
            return self.attention(spec, self.norm(x, f"{name}.attn_norm"), output)

        def moe(x: torch.Tensor) -> torch.Tensor:
            return self.moe(spec, self.norm(x, f"{name}.ffn_norm"), ids, output)

        streams = self.sublayer(f"{name}.hc_attn_", streams, attention)
        return self.sublayer(f"{name}.hc_ffn_", streams, moe)

    def mtp(self, spec: LayerSpec, streams: torch.Tensor, ids: torch.Tensor, output: OracleOutput) -> torch.Tensor:
        """Logits ``[T - 1, vocab]``: the streams of position t with the embedding of token t + 1."""
        name, following = spec.name, ids[1:]
        e = self.linear(f"{name}.e_proj", self.norm(self["embed.weight"][following], f"{name}.enorm"))
        h = self.linear(f"{name}.h_proj", self.norm(streams[:-1], f"{name}.hnorm"))
        return self.head(f"{name}.", self.block(spec, e.unsqueeze(1) + h, following, output))

    # attention

    def rotate(self, spec: LayerSpec, x: torch.Tensor, position: int, sign: int = 1) -> torch.Tensor:
        """Rotates the last ``qk_rope_head_dim`` channels, pairs of neighbours, at one position."""
        dim = self.config.qk_rope_head_dim
        angles = torch.tensor([sign * position * f for f in self.frequencies(spec.ratio)], dtype=torch.float64)
        a, b = x[..., -dim::2], x[..., -dim + 1 :: 2]
        y = x.clone()
        y[..., -dim::2] = a * angles.cos() - b * angles.sin()
        y[..., -dim + 1 :: 2] = a * angles.sin() + b * angles.cos()
        return y

    def frequencies(self, ratio: int) -> list[float]:
        config, dim = self.config, self.config.qk_rope_head_dim
        theta = config.compress_rope_theta if ratio else config.rope_theta
        plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
        yarn = config.rope_scaling
        if not ratio or yarn is None or yarn["factor"] == 1:
            return plain
        length = yarn["original_max_position_embeddings"]

        def index(turns: float) -> float:
            return dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

        low = max(math.floor(index(yarn["beta_fast"])), 0)
        high = min(math.ceil(index(yarn["beta_slow"])), dim - 1)
        ramp = [min(max((i - low) / (high - low or 0.001), 0), 1) for i in range(dim // 2)]
        return [f * (r / yarn["factor"] + 1 - r) for f, r in zip(plain, ramp, strict=True)]

    def attention(self, spec: LayerSpec, x: torch.Tensor, output: OracleOutput) -> torch.Tensor:
        config, name, count = self.config, f"{spec.name}.attn", len(x)
        latent = self.norm(self.linear(f"{name}.wq_a", x), f"{name}.q_norm")
        queries = self.norm(self.linear(f"{name}.wq_b", latent).view(count, config.num_attention_heads, -1))
        keys = self.norm(self.linear(f"{name}.wkv", x), f"{name}.kv_norm")
        keys = [self.rotate(spec, key, t) for t, key in enumerate(keys)]
        entries = self.compress(spec, f"{name}.compressor", x) if spec.ratio else []
        chosen = self.select(spec, x, latent, output) if spec.has_indexer else None
        per_group = config.num_attention_heads // config.o_groups
        wo_a = self[f"{name}.wo_a.weight"].view(config.o_groups, config.o_lora_rank, -1)
        rows = []
        for t in range(count):
            seen = [keys[i] for i in range(t + 1) if t - i < config.sliding_window]
            for w, entry in enumerate(entries):
                closed = (w + 1) * spec.ratio <= t + 1
                if closed and (chosen is None or chosen[t, w]):
                    seen.append(entry)
            q = self.rotate(spec, queries[t], t)
            out = self.rotate(spec, self.softmax_sum(q, torch.stack(seen), self[f"{name}.attn_sink"]), t, sign=-1)
            groups = out.view(config.o_groups, per_group * config.head_dim)
            rows.append(torch.cat([wo_a[g] @ groups[g] for g in range(config.o_groups)]))
        return self.linear(f"{name}.wo_b", torch.stack(rows))

    def softmax_sum(self, q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        """``[H, d]``: keys, which are the values too, weighted by a softmax that the sink takes its share of."""
        logits = torch.cat([q @ keys.T / math.sqrt(self.config.head_dim), sink.unsqueeze(1)], dim=1)
        return logits.softmax(1)[:, :-1] @ keys

    def compress(self, spec: LayerSpec, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        """One entry per closed window, each pooled channel by channel over its tokens."""
        values, scores = self.linear(f"{name}.wkv", x), self.linear(f"{name}.wgate", x)
        scores = scores + torch.stack([self[f"{name}.ape"][t % spec.ratio] for t in range(len(x))])
        dim = len(self[f"{name}.norm.weight"])
        entries = []
        for first in range(0, len(x) - spec.ratio + 1, spec.ratio):
            own = slice(first, first + spec.ratio)
            value, score = values[own, -dim:], scores[own, -dim:]
            if spec.overlap and first:
                before = slice(first - spec.ratio, first)
                value = torch.cat([values[before, :dim], value])
                score = torch.cat([scores[before, :dim], score])
            entry = self.norm((score.softmax(0) * value).sum(0), f"{name}.norm")
            entries.append(self.rotate(spec, entry, first))
        return entries

    def select(self, spec: LayerSpec, x: torch.Tensor, latent: torch.Tensor, output: OracleOutput) -> torch.Tensor:
        """Bool ``[T, entries]``: which entries a query reads."""
        config, name = self.config, f"{spec.name}.attn.indexer"
        keys = self.compress(spec, f"{name}.compressor", x)
        visible = (torch.arange(len(x)) + 1) // spec.ratio
        keys = torch.stack(keys) if keys else torch.empty(0, config.index_head_dim, dtype=torch.float64)
        queries = self.linear(f"{name}.wq_b", latent).view(len(x), config.index_n_heads, -1)
        queries = torch.stack([self.rotate(spec, q, t) for t, q in enumerate(queries)])
        weights = self.linear(f"{name}.weights_proj", x) / math.sqrt(config.index_head_dim * config.index_n_heads)
        scores = torch.einsum("th,thn->tn", weights, (queries @ keys.T).clamp(min=0))
        output.choose_entries(spec.index, scores, visible, config.index_topk)
        return output.entries[spec.index]

    # experts

    def moe(self, spec: LayerSpec, x: torch.Tensor, ids: torch.Tensor, output: OracleOutput) -> torch.Tensor:
        config, name = self.config, f"{spec.name}.ffn"
        logits = self.linear(f"{name}.gate", x)
        scores = {"sqrtsoftplus": F.softplus(logits).sqrt(), "sigmoid": logits.sigmoid(), "softmax": logits.softmax(1)}
        scores = scores[config.scoring_func]
        layer = -1 - spec.index if spec.is_mtp else spec.index
        if spec.hash_routing:
            output.experts[layer] = self[f"{name}.gate.tid2eid"][ids].sort(-1).values
        else:
            output.choose_experts(layer, scores + self[f"{name}.gate.bias"], config.num_experts_per_tok)
        rows = []
        for t, experts in enumerate(output.experts[layer].tolist()):
            weights = scores[t, experts]
            if config.norm_topk_prob:
                weights = weights / weights.sum()
            y = self.expert(f"{name}.shared_experts", x[t])
            for expert, weight in zip(experts, weights, strict=True):
                y = y + config.routed_scaling_factor * weight * self.expert(f"{name}.experts.{expert}", x[t])
            rows.append(y)
        return torch.stack(rows)

    def expert(self, name: str, x: torch.Tensor) -> torch.Tensor:
        limit = self.config.swiglu_limit
        gate, up = self.linear(f"{name}.w1", x), self.linear(f"{name}.w3", x)
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return self.linear(f"{name}.w2", gate * torch.sigmoid(gate) * up)
