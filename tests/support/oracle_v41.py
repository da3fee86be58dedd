"""DeepSeek-V4.1 by brute force: float64, one query at a time, no caches, and none of the library's code.

Written from the formulas of the published program alone. `V41Oracle` reads a ``config.json`` as decoded JSON and
float64 values of tensors by their published name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.typed import required

F64 = torch.float64


class V41Oracle:
    """Logits of one prompt at a time.

    Args:
        config: the nested JSON object.
        tensor: float64 values of a tensor, scales multiplied in.
        compressed_ids: the Engram number of each token id; needed with ``engram_layer_ids``.
        quantized: whether a weight of this name is stored quantised; given, everything is rounded that the published
            program rounds to FP8 or FP4, and nothing else.

    Attributes:
        gaps: by ``layers.N``, for each query the distance in score from the last selected entry to the first rejected
            one, relative to the largest; infinite where everything is selected. With ``.experts``: absolute, of the
            router's biased scores. With ``.candidates``: of blocks of entries.
        chosen: by layer name, the entries that each query reads.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensor: Callable[[str], Tensor],
        compressed_ids: Sequence[int] | None = None,
        quantized: Callable[[str], bool] | None = None,
    ):
        self.c, self.tensor, self.ids, self.quantized = config["text_config"], tensor, compressed_ids, quantized
        self.gaps: dict[str, list[float]] = {}
        self.chosen: dict[str, list[list[int]]] = {}

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        c, self.tokens = self.c, list(tokens)
        self.entries: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        self.selection: list[list[int]] = []
        self.kept_blocks: list[set[int]] = []
        embedding = self.tensor("embed.weight")[self.tokens]
        streams = embedding.unsqueeze(1).repeat(1, c["hc_mult"], 1)
        weights = torch.zeros(len(self.tokens), c["hc_mult"], dtype=F64)
        weights[:, 0] = 1
        for layer in range(c["num_hidden_layers"]):
            if layer in c.get("engram_layer_ids", []):
                streams = self.engram(layer, streams)
            for part in ("attn", "ffn"):
                pre, post, comb = self.mixes(layer, part, streams)
                x = (weights.unsqueeze(-1) * streams).sum(1)
                x = self.norm(x, f"layers.{layer}.{part}_norm.weight")
                y = self.attention(layer, x) if part == "attn" else self.moe(layer, x)
                mixed = torch.einsum("tjk,tjd->tkd", comb, streams)
                streams, weights = post.unsqueeze(-1) * y.unsqueeze(1) + mixed, pre
        x = self.norm((weights.unsqueeze(-1) * streams).sum(1), "norm.weight")
        return x @ self.tensor("head.weight").T

    def norm(self, x: Tensor, weight: str | None = None) -> Tensor:
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c["rms_norm_eps"])
        return y if weight is None else y * self.tensor(weight)

    def linear(self, x: Tensor, name: str) -> Tensor:
        if self.quantized is not None and self.quantized(f"{name}.weight"):
            x = fp8(x)
        return x @ self.tensor(f"{name}.weight").T

    def rounded(self, x: Tensor, rule: Callable[[Tensor], Tensor]) -> Tensor:
        """A cached row as it is read."""
        return x if self.quantized is None or not len(x) else rule(x.float().bfloat16().double())

    # rotary embedding

    def rope(self, x: Tensor, position: int, ratio: int, sign: int = 1) -> Tensor:
        """Rotates the last channels of ``x [..., d]``, in pairs (2i, 2i + 1)."""
        start = x.shape[-1] - self.c["qk_rope_head_dim"]
        angles = position * torch.tensor(frequencies(self.c, ratio), dtype=F64)
        cos, sin = angles.cos(), angles.sin() * sign
        a, b = x[..., start::2], x[..., start + 1 :: 2]
        rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        return torch.cat([x[..., :start], rotated], -1)

    def rotate_rows(self, rows: Tensor, positions: Sequence[int], ratio: int, sign: int = 1) -> Tensor:
        rotated = [self.rope(row, p, ratio, sign) for row, p in zip(rows, positions, strict=True)]
        return torch.stack(rotated) if rotated else rows

    # attention

    def attention(self, layer: int, x: Tensor) -> Tensor:
        c, name = self.c, f"layers.{layer}.attn"
        ratio, heads, dim = c["compress_ratios"][layer], c["num_attention_heads"], c["head_dim"]
        everywhere = range(len(x))
        qr = self.norm(self.linear(x, f"{name}.wq_a"), f"{name}.q_norm.weight")
        q = self.rotate_rows(self.linear(qr, f"{name}.wq_b").view(len(x), heads, dim), everywhere, ratio)
        kv = self.norm(self.linear(x, f"{name}.wkv"), f"{name}.kv_norm.weight")
        kv = self.rounded(self.rotate_rows(kv, everywhere, ratio), fp8)
        if ratio:
            source = max(i for i in c["kv_source_layer_ids"] if i <= layer)
            if source == layer:
                self.compress(layer, x, ratio)
            if layer in c["index_source_layer_ids"]:
                self.selection = self.select(layer, source, x, qr, ratio)
                self.chosen[f"layers.{layer}"] = self.selection
        outputs, sinks = [], self.tensor(f"{name}.attn_sink")
        for t in everywhere:
            keys = kv[max(0, t - c["sliding_window"] + 1) : t + 1]
            if ratio:
                keys = torch.cat([keys, self.entries[source][self.selection[t]]])
            logits = q[t] @ keys.T * dim**-0.5
            top = torch.maximum(logits.amax(1), sinks)
            weights = torch.exp(logits - top.unsqueeze(1))
            total = weights.sum(1) + torch.exp(sinks - top)
            outputs.append(self.rope(weights @ keys / total.unsqueeze(1), t, ratio, -1))
        groups = c["o_groups"]
        o = torch.stack(outputs).view(len(x), groups, -1)
        wo_a = self.tensor(f"{name}.wo_a.weight").view(groups, c["o_lora_rank"], -1)
        return self.linear(torch.einsum("tgi,goi->tgo", o, wo_a).flatten(1), f"{name}.wo_b")

    def compress(self, layer: int, x: Tensor, ratio: int) -> None:
        """Compressed entries and index keys of a source layer."""
        name = f"layers.{layer}.attn"
        values = self.linear(x, f"{name}.compressor.wkv")
        latents = []
        for w in range(len(x) // ratio):
            pooled = values[w * ratio]
            if ratio > 1:
                gate = self.linear(x[w * ratio : (w + 1) * ratio], f"{name}.compressor.wgate")
                share = torch.exp(gate - gate.amax(0)) / torch.exp(gate - gate.amax(0)).sum(0)
                pooled = (share * values[w * ratio : (w + 1) * ratio]).sum(0)
            latents.append(self.norm(pooled, f"{name}.compressor.norm.weight"))
        latent = torch.stack(latents) if latents else x.new_zeros(0, self.c["head_dim"])
        starts = [w * ratio for w in range(len(latent))]
        self.entries[layer] = self.rounded(self.rotate_rows(latent, starts, ratio), nvfp4)
        keys = self.norm(self.linear(latent, f"{name}.indexer.wk"), f"{name}.indexer.k_norm.weight")
        self.index_keys[layer] = self.rounded(self.rotate_rows(keys, starts, ratio), mxfp4)

    def select(self, layer: int, source: int, x: Tensor, qr: Tensor, ratio: int) -> list[list[int]]:
        """Entries that each query reads."""
        c, name = self.c, f"layers.{layer}.attn.indexer"
        heads, dim, topk = c["index_n_heads"], c["index_head_dim"], c["index_topk"]
        q = self.rotate_rows(self.linear(qr, f"{name}.wq_b").view(len(x), heads, dim), range(len(x)), ratio)
        q = q if self.quantized is None else mxfp4(q)
        weights = self.linear(x, f"{name}.weights_proj") * dim**-0.5 * heads**-0.5
        gaps = self.gaps.setdefault(f"layers.{layer}", [])
        candidate_source = c.get("candidate_source_layer_id")
        if layer == candidate_source:
            self.kept_blocks = []
        selected = []
        for t in range(len(x)):
            visible = (t + 1) // ratio
            scores = [float((weights[t] * torch.relu(q[t] @ key)).sum()) for key in self.index_keys[source][:visible]]
            allowed = list(range(visible))
            if layer == candidate_source:
                self.kept_blocks.append(self.blocks(layer, scores))
            elif candidate_source is not None and layer > candidate_source:
                allowed = [e for e in allowed if e // c["candidate_block_size"] in self.kept_blocks[t]]
            order = sorted(allowed, key=lambda e: (-scores[e], e))
            gaps.append(gap_after([scores[e] for e in order], topk))
            selected.append(sorted(order[:topk]))
        return selected

    def blocks(self, layer: int, scores: list[float]) -> set[int]:
        """Blocks of entries that later index sources may select from."""
        size, count = self.c["candidate_block_size"], self.c["candidate_topk_blocks"]
        if not scores:
            return set()
        newest, total = (len(scores) - 1) // size, -(-len(scores) // size)
        best = [max(scores[b * size : (b + 1) * size]) for b in range(total)]
        order = sorted(range(total), key=lambda b: (b != newest, -best[b], b))
        gap = gap_after([best[b] for b in order[1:]], count - 1)  # the newest block is kept anyway
        self.gaps.setdefault(f"layers.{layer}.candidates", []).append(gap)
        return set(order[:count])

    # hyper-connections

    def mixes(self, layer: int, part: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, m = self.c, self.c["hc_mult"]
        fn, base, scale = (self.tensor(f"layers.{layer}.hc_{part}_{what}") for what in ("fn", "base", "scale"))
        mix = self.norm(streams.flatten(1)) @ fn.T
        pre = torch.sigmoid(mix[:, :m] * scale[0] + base[:m]) + c["hc_eps"]
        post = 2 * torch.sigmoid(mix[:, m : 2 * m] * scale[1] + base[m : 2 * m])
        comb = (mix[:, 2 * m :] * scale[2] + base[2 * m :]).view(-1, m, m).softmax(-1) + c["hc_eps"]
        comb = comb / (comb.sum(1, keepdim=True) + c["hc_eps"])
        for _ in range(c["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + c["hc_eps"])
            comb = comb / (comb.sum(1, keepdim=True) + c["hc_eps"])
        return pre, post, comb

    # experts

    def expert(self, x: Tensor, name: str, weight: float = 1.0) -> Tensor:
        limit = self.c["swiglu_limit"]
        gate = self.linear(x, f"{name}.w1").clamp(max=limit)
        up = self.linear(x, f"{name}.w3").clamp(-limit, limit)
        return self.linear(gate * torch.sigmoid(gate) * up * weight, f"{name}.w2")

    def moe(self, layer: int, x: Tensor) -> Tensor:
        c, name = self.c, f"layers.{layer}.ffn"
        logits = self.linear(x, f"{name}.gate")
        scores = {
            "sqrtsoftplus": torch.sqrt(torch.nn.functional.softplus(logits)),
            "sigmoid": torch.sigmoid(logits),
            "softmax": torch.softmax(logits, -1),
        }[c["scoring_func"]]
        biased, chosen = scores + self.tensor(f"{name}.gate.bias"), c["num_experts_per_tok"]
        outputs, gaps = [], self.gaps.setdefault(f"layers.{layer}.experts", [])
        for t in range(len(x)):
            order = biased[t].argsort(descending=True).tolist()
            gaps.append(float(biased[t, order[chosen - 1]] - biased[t, order[chosen]]))
            total = scores[t, order[:chosen]].sum() + 1e-20 if c["norm_topk_prob"] and chosen > 1 else 1.0
            y = self.expert(x[t], f"{name}.shared_experts")
            for e in order[:chosen]:
                weight = float(scores[t, e] / total * c["routed_scaling_factor"])
                y = y + self.expert(x[t], f"{name}.experts.{e}", weight)
            outputs.append(y)
        return torch.stack(outputs)

    # Engram

    def engram(self, layer: int, streams: Tensor) -> Tensor:
        c, name, m = self.c, f"layers.{layer}.engram", self.c["hc_mult"]
        table, size = self.tensor(f"{name}.embed.weight"), streams.shape[-1]
        rows = [engram_rows(c, layer, required(self.ids), self.tokens, t) for t in range(len(self.tokens))]
        values = torch.stack([table[row].flatten() for row in rows])
        kv = self.linear(values, f"{name}.wkv")
        key, value = kv[:, : m * size].view(-1, m, size), kv[:, m * size :]
        product = streams * self.tensor(f"{name}.q_weight") * self.tensor(f"{name}.k_weight") * key
        eps = c["rms_norm_eps"]
        dot = product.sum(-1) / torch.sqrt((streams**2).mean(-1) + eps) / torch.sqrt((key**2).mean(-1) + eps)
        dot = dot * size**-0.5
        gate = torch.sigmoid(torch.where(dot < 0, -1.0, 1.0) * torch.sqrt(dot.abs().clamp(min=1e-6)))
        return streams + gate.unsqueeze(-1) * value.unsqueeze(1)


# quantisers: values after a round trip

E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nearest(x: Tensor, levels: Sequence[float]) -> Tensor:
    """The nearest of +-levels, which start at 0; a tie goes to the level with an even place; larger values saturate."""
    values = torch.tensor(levels, dtype=F64)
    middles = (values[1:] + values[:-1]) / 2
    below = torch.searchsorted(middles, x.abs().contiguous())
    tie = torch.searchsorted(middles, x.abs().contiguous(), right=True) != below
    place = torch.where(tie & (below % 2 == 1), below + 1, below)
    return values[place] * x.sign()


def power_above(x: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(x)))


def fp8(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 32))
    scale = power_above(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)
    return (nearest(groups / scale, E4M3) * scale).flatten(-2)


def mxfp4(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 32))
    scale = power_above(groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6)
    return (nearest(groups / scale, E2M1) * scale).flatten(-2)


def nvfp4(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 16))
    scale = nearest(groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9) / 6, E4M3)
    return (nearest(groups / scale, E2M1) * scale).float().bfloat16().double().flatten(-2)


def gap_after(scores: list[float], kept: int) -> float:
    """Distance of the last of ``kept`` scores, in falling order, to the next one, relative to the largest.

    Infinite where nothing is rejected. A tie at 0 is a tie: products with keys that no head likes may be rounded to
    either side of 0.
    """
    if not 0 < kept < len(scores):
        return math.inf
    return (scores[kept - 1] - scores[kept]) / (max(map(abs, scores)) or 1.0)


def frequencies(c: Mapping[str, Any], ratio: int) -> list[float]:
    """Angular frequencies of a layer's RoPE, those of compressed layers scaled by YaRN."""
    dim, theta = c["qk_rope_head_dim"], c["compress_rope_theta"] if ratio else c["rope_theta"]
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    scaling = c.get("rope_scaling")
    if not ratio or scaling is None:
        return plain

    def correction(n: float) -> float:
        return dim * math.log(scaling["original_max_position_embeddings"] / (2 * math.pi * n)) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling["beta_fast"])), 0)
    high = min(math.ceil(correction(scaling["beta_slow"])), dim - 1)
    high = high + 0.001 if low == high else high
    ramps = [min(max((i - low) / (high - low), 0), 1) for i in range(dim // 2)]
    return [f / scaling["factor"] * r + f * (1 - r) for f, r in zip(plain, ramps, strict=True)]


def engram_rows(c: Mapping[str, Any], layer: int, ids: Sequence[int], tokens: Sequence[int], t: int) -> list[int]:
    """Table rows of the token at position ``t``, in the order of (n, head)."""
    longest, heads = c["engram_max_ngram_size"], c["engram_n_heads"]
    bound = max(1, ((2**63 - 1) // c["engram_compressed_vocab_size"]) // 2)
    multipliers = np.random.default_rng(10007 * layer).integers(0, bound, size=longest, dtype=np.int64) * 2 + 1
    before = c["engram_layer_ids"].index(layer) * (longest - 1) * heads
    primes = _primes(c["engram_vocab_size"], before + (longest - 1) * heads)[before:]
    pad = ids[c["engram_pad_token_id"]]
    mixed = [(ids[tokens[t - k]] if t >= k else pad) * int(multipliers[k]) for k in range(longest)]
    rows, start, hashed = [], 0, mixed[0]
    for n in range(2, longest + 1):
        hashed ^= mixed[n - 1]
        for head in range(heads):
            prime = primes[(n - 2) * heads + head]
            rows.append(hashed % prime + start)
            start += prime
    return rows


def _primes(start: int, count: int) -> list[int]:
    found, number = [], start
    while len(found) < count:
        if number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return found
