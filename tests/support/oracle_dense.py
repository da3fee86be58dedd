"""DeepSeek-V4 by brute force: for each query the explicit list of what it may see, in float64, without any cache.

Written from the model's definition as loops over layers, windows and queries; its attention is that of
`deepseek_attn.testing.reference`. From the library's model it takes the config's values and the stored weights, nothing
else. Covers what transformers cannot: any compress ratio, overlap and indexer
independent of it, and the MTP layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from deepseek_attn.checkpoint import CheckpointSource, read_float32
from deepseek_attn.config.model import LayerSpec, ModelConfig
from deepseek_attn.testing.reference import V4LayerReference
from tests.support.oracle_output import OracleOutput


class DenseOracle:
    """One checkpoint; calling it computes one prompt."""

    def __init__(self, config: ModelConfig, source: CheckpointSource):
        self.config, self.source = config, source
        self.weights: dict[str, torch.Tensor] = {}
        self.layers: dict[str, V4LayerReference] = {}

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

    def attention(self, spec: LayerSpec, x: torch.Tensor, output: OracleOutput) -> torch.Tensor:
        layer = self.layers.setdefault(spec.name, V4LayerReference(self.config, self.source, spec))
        if not spec.has_indexer:
            return layer.output(layer.attend(x, None))
        visible = (torch.arange(len(x)) + 1) // spec.ratio
        output.choose_entries(spec.index, layer.index_scores(x), visible, self.config.index_topk)
        return layer.output(layer.attend(x, [set(row.nonzero()[:, 0].tolist()) for row in output.entries[spec.index]]))

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
