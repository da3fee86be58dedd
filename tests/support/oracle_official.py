"""Sublayers of V4 and V3.2 in DeepSeek's quantised numerics: float64, one query at a time, nothing cached.

Rounded is what the published programs round, by the rules of their description, and nothing else: inputs of linears
whose weight is stored quantised (not of V4's ``wo_a``, nor of V3.2's absorbed ``wkv_b``), window keys, entries and
latents, the indexer's queries and keys. Quantisers are those of `oracle_v41`, written from tables of values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepseek_attn.checkpoint import CanonicalSource, CheckpointSource, read_float32
from deepseek_attn.testing.reference import LayerReference, V4LayerReference, V32LayerReference
from tests.support.oracle_v41 import E2M1, E4M3, nearest, power_above


def fp8(x: Tensor, group: int, power_of_two: bool = True) -> Tensor:
    groups = x.unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    scale = power_above(scale) if power_of_two else scale.float().double()
    return (nearest(groups / scale, E4M3) * scale).flatten(-2)


def fp4(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 32))
    scale = power_above(groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6)
    return (nearest(groups / scale, E2M1) * scale).flatten(-2)


def hadamard(x: Tensor) -> Tensor:
    """Times the Sylvester matrix of +1 and -1, over the root of its size."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return x @ matrix / math.sqrt(len(matrix))


def bfloat16(x: Tensor) -> Tensor:
    """What the program has before it rounds to a cache's format."""
    return x.float().bfloat16().double()


class QuantizedLinears:
    """Linears of weights by canonical name."""

    def __init__(self, config, source: CheckpointSource, name=None):
        self.config, self.source = config, CanonicalSource(source, name) if name else CanonicalSource(source)
        self.stored = {entry.removesuffix(".scale") for entry in self.source.entries() if entry.endswith(".scale")}
        self.power_of_two = getattr(config, "power_of_two_scales", True)

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight = read_float32(self.source, f"{name}.weight").double()
        return (fp8(x, 128, self.power_of_two) if name in self.stored else x) @ weight.T

    def expert(self, name: str, x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """Weighted before the second linear, whose input is rounded."""
        gate, up, limit = (
            self.linear(f"{name}.w1", x),
            self.linear(f"{name}.w3", x),
            getattr(self.config, "swiglu_limit", 0),
        )
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return self.linear(f"{name}.w2", gate * torch.sigmoid(gate) * up * weight)

    def experts(self, name: str, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """The shared expert and the chosen ones, with the router's scores ``[T, experts]`` of them as weights.

        V4's program weighs the input of the second linear, V3.2's its output.
        """
        inside = not hasattr(self.config, "kv_lora_rank")
        rows = []
        for row, experts, score in zip(x, chosen.tolist(), scores, strict=True):
            weights = score[experts] / score[experts].sum() * self.config.routed_scaling_factor
            y = self.expert(f"{name}.shared_experts", row)
            for expert, weight in zip(experts, weights, strict=True):
                given = self.expert(f"{name}.experts.{expert}", row, weight if inside else 1.0)
                y = y + (given if inside else weight * given)
            rows.append(y)
        return torch.stack(rows)


class _Official(LayerReference):
    """Rounds the inputs of linears; ``plain``: names of those whose inputs are not."""

    plain: tuple[str, ...] = ()
    power_of_two = True

    def linear(self, name: str, x: Tensor) -> Tensor:
        stored = f"{self.spec.name}.attn.{name}.scale" in self.source.entries()
        rounded = fp8(x, 128, self.power_of_two) if stored and name not in self.plain else x
        return rounded @ self[f"{name}.weight"].T


class OfficialV4Layer(_Official, V4LayerReference):
    def attend(self, x, reads):
        heads, ratio = self.config.num_attention_heads, self.spec.ratio
        queries = self.norm(self.linear("wq_b", self.latent(x)).unflatten(1, (heads, -1)))
        queries, keys = self.rotate(queries, torch.arange(len(x))), self.window_keys(x)
        entries = self.compress("compressor", x) if ratio else keys[:0]
        rows = []
        for t in range(len(x)):
            read = [w for w in range(len(entries)) if (w + 1) * ratio <= t + 1 and (reads is None or w in reads[t])]
            seen = torch.cat([keys[max(0, t + 1 - self.config.sliding_window) : t + 1], entries[read]])
            rows.append(self.weights_of(queries[t], seen) @ seen)
        return torch.stack(rows)

    def window_keys(self, x: Tensor) -> Tensor:
        return self.cached(self.rotate(self.norm(self.linear("wkv", x), "kv_norm"), torch.arange(len(x))))

    def cached(self, rows: Tensor) -> Tensor:
        """Groups of 64 channels, but for the rotated ones."""
        rows, rotated = bfloat16(rows), self.spec.rope.dim
        return torch.cat([fp8(rows[:, :-rotated], 64), rows[:, -rotated:]], 1) if len(rows) else rows

    def compress(self, name, x):
        entries = super().compress(name, x)
        if not len(entries):
            return entries
        return self.cached(entries) if name == "compressor" else fp4(bfloat16(hadamard(entries)))

    def index_scores(self, x):
        config, keys = self.config, self.compress("indexer.compressor", x)
        queries = self.linear("indexer.wq_b", self.latent(x)).unflatten(1, (config.index_n_heads, -1))
        queries = fp4(hadamard(self.rotate(queries, torch.arange(len(x)))))
        weights = self.linear("indexer.weights_proj", x) / math.sqrt(config.index_head_dim * config.index_n_heads)
        return torch.einsum("th,thn->tn", weights, (queries @ keys.T).clamp(min=0))


class OfficialV32Layer(_Official, V32LayerReference):
    plain = ("wkv_b",)

    def __init__(self, config, source, spec):
        super().__init__(config, source, spec)
        self.power_of_two = config.power_of_two_scales

    def latents(self, x: Tensor) -> Tensor:
        """What is cached of each token."""
        latent, rotated = self.rotate(self.linear("wkv_a", x), torch.arange(len(x))).split(
            [self.config.kv_lora_rank, self.config.qk_rope_head_dim], 1
        )
        return torch.cat([self.norm(latent, "kv_norm", 1e-6), rotated], 1)

    def norm(self, x, name=None, eps=None):
        y = super().norm(x, name, eps)
        return fp8(bfloat16(y), 128) if name == "kv_norm" else y

    def rotate(self, x, positions, sign=1):
        """A latent's rotated channels are cached in bfloat16."""
        y, dim = super().rotate(x, positions, sign), self.spec.rope.dim
        return torch.cat([y[:, :-dim], bfloat16(y[:, -dim:])], 1) if x.dim() == 2 else y

    def index_keys(self, x: Tensor) -> Tensor:
        keys = self.linear("indexer.wk", x)
        weight, bias = self["indexer.k_norm.weight"], self["indexer.k_norm.bias"]
        keys = torch.nn.functional.layer_norm(keys, keys.shape[1:], weight, bias, 1e-6)
        return self.rotate_first(keys, torch.arange(len(x)))

    def rotate_first(self, x, positions):
        """Queries and keys of the indexer, one scale for each vector."""
        return fp8(bfloat16(hadamard(super().rotate_first(x, positions))), 128)
