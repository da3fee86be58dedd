"""Two oracles for DeepSeek-V3.2 and V3, both float32 over dequantised weights.

``TransformersV32Oracle`` is transformers' model, eager. ``NaiveOracle`` is written from the formulas: keys and values
expanded per head (nothing absorbed), one prompt at a time, no cache; it also has the MTP layer, knows what was chosen,
and can be given the mistakes that implementations have made.
"""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DeepseekV3ForCausalLM, DeepseekV32ForCausalLM

from deepseek_attn.checkpoint import CheckpointSource, TensorInfo
from deepseek_attn.config.v32 import DeepseekV32Config as Config
from deepseek_attn.testing.transformers_layer import hf_config
from tests.support.oracle_output import OracleOutput
from tests.support.typed import required

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "F8_E8M0"}


class Tensors(CheckpointSource):
    """A source over a dict of tensors; bytes are scales."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = tensors

    @classmethod
    def of(cls, source: CheckpointSource, without: str = "\0") -> Tensors:
        """A copy; tensors with ``without`` in their name are left out."""
        return cls({name: source.read(name) for name in source.entries() if without not in name})

    def entries(self) -> dict[str, TensorInfo]:
        return {n: TensorInfo(DTYPES[t.dtype], tuple(t.shape), t.nbytes) for n, t in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def float32_weights(source: CheckpointSource) -> dict[str, torch.Tensor]:
    """Published name -> float32 values, scales multiplied in."""
    weights = {}
    for name in source.entries():
        if name.endswith("_scale_inv"):
            continue
        value = source.read(name).float()
        if f"{name}_scale_inv" in source.entries():
            scale = source.read(f"{name}_scale_inv").repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = value * scale[: value.shape[0], : value.shape[1]]
        weights[name] = value
    return weights


class TransformersV32Oracle:
    """transformers' DeepseekV32ForCausalLM, or DeepseekV3ForCausalLM for a ``deepseek_v3`` config."""

    def __init__(self, config: Config, source: CheckpointSource):
        sparse = config.model_type == "deepseek_v32"
        model_class = DeepseekV32ForCausalLM if sparse else DeepseekV3ForCausalLM
        settings: Any = hf_config(config)  # its class goes with the model's
        self.model = model_class(settings).float().eval()
        state = pack_experts(float32_weights(source), config)
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        unexpected = [name for name in unexpected if sparse or ".indexer." not in name]
        if missing or unexpected:
            raise ValueError(f"transformers misses {missing} and does not know {unexpected}")

    @torch.no_grad()
    def __call__(self, tokens: list[int]) -> torch.Tensor:
        """Logits ``[T, vocab_size]`` of one forward over the whole prompt."""
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0]

    @torch.no_grad()
    def step_by_step(self, tokens: list[int]) -> torch.Tensor:
        """The same token by token, through transformers' own cache."""
        name = "cache" if "cache" in signature(self.model.forward).parameters else "past_key_values"  # before 5.24
        cache, rows = None, []
        for token in tokens:
            out = self.model(torch.tensor([[token]]), **{name: cache}, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0])
        return torch.cat(rows)


def pack_experts(weights: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
    """transformers' state dict: experts stacked, no MTP layer."""
    layers = config.num_hidden_layers
    state = {n: w for n, w in weights.items() if ".experts." not in n and not n.startswith(f"model.layers.{layers}.")}
    for layer in range(config.first_k_dense_replace, layers):
        prefix = f"model.layers.{layer}.mlp.experts"

        def stack(projection, prefix=prefix):
            return torch.stack([weights[f"{prefix}.{e}.{projection}.weight"] for e in range(config.n_routed_experts)])

        state[f"{prefix}.gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], dim=1)
        state[f"{prefix}.down_proj"] = stack("down_proj")
    return state


def rounded_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Groups of 128 under the smallest power of two that brings them within +-448."""
    groups = x.unflatten(-1, (-1, 128))
    scale = torch.exp2(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448).ceil())
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


class NaiveOracle:
    """DeepSeek-V3.2 from its formulas.

    Args:
        mistake: None, or a known one: ``"interleaved indexer rope"``, ``"last channels"`` (rotates the indexer's last
            channels), ``"half-split mla rope"``, ``"rms index norm"``, ``"no mscale"``, ``"group max"``,
            ``"zero masked groups"``, ``"biased weights"``, ``"relu after weight"``, ``"embedding half last"``.
        numerics: ``"official"`` and ``"serving"`` round the inputs of linears with FP8 weights to FP8, cached latents
            to bf16 and then to FP8, cached k_pe to bf16, indexer queries and keys to FP8 (after a Hadamard rotation in
            "official").
            (kv_b_proj's input is not rounded again: absorbed, there is no such product.)
    """

    def __init__(self, config: Config, source: CheckpointSource, mistake: str | None = None, numerics: str = "exact"):
        self.config, self.weights, self.mistake, self.numerics = config, float32_weights(source), mistake, numerics
        self.fp8 = {name.removesuffix(".weight_scale_inv") for name in source.entries() if numerics != "exact"}

    @torch.no_grad()
    def __call__(self, tokens: list[int]) -> OracleOutput:
        config, out = self.config, OracleOutput()
        ids = torch.tensor(tokens)
        embed = self.weights["model.embed_tokens.weight"]
        x = embed[ids]
        for layer in range(config.num_hidden_layers):
            x = self.block(x, layer, layer >= config.first_k_dense_replace, out)
        states = self.norm(x, "model.norm")
        head = self.weights["lm_head.weight"]
        out.logits = states @ head.T
        if config.num_nextn_predict_layers and len(tokens) > 1:
            layer = config.num_hidden_layers
            prefix = f"model.layers.{layer}"
            halves = [self.norm(embed[ids[1:]], f"{prefix}.enorm"), self.norm(states[:-1], f"{prefix}.hnorm")]
            if self.mistake == "embedding half last":
                halves.reverse()
            z = torch.cat(halves, dim=-1) @ self.weights[f"{prefix}.eh_proj.weight"].T
            y = self.block(z, layer, True, out)
            out.mtp_logits = self.norm(y, f"{prefix}.shared_head.norm") @ head.T
        return out

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if name in self.fp8 and not name.endswith(".kv_b_proj"):
            x = rounded_to_fp8(x)
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x: torch.Tensor, name: str, eps: float | None = None) -> torch.Tensor:
        eps = self.config.rms_norm_eps if eps is None else eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.weights[f"{name}.weight"]

    def block(self, x: torch.Tensor, layer: int, experts: bool, out: OracleOutput) -> torch.Tensor:
        prefix = f"model.layers.{layer}"
        x = x + self.attention(self.norm(x, f"{prefix}.input_layernorm"), layer, out)
        h = self.norm(x, f"{prefix}.post_attention_layernorm")
        return x + (self.moe(h, layer, out) if experts else self.mlp(h, f"{prefix}.mlp"))

    # attention

    def angles(self, count: int) -> torch.Tensor:
        """``[count, dim / 2]``: position times frequency, slow frequencies interpolated by YaRN."""
        config, rows = self.config, []
        dim, scaling = config.qk_rope_head_dim, config.rope_scaling
        for i in range(dim // 2):
            frequency = config.rope_theta ** (-2 * i / dim)
            if scaling is not None and scaling["factor"] != 1:

                def channel(rotations, dim=dim, scaling=scaling):
                    wave = scaling["original_max_position_embeddings"] / (2 * math.pi * rotations)
                    return dim * math.log(wave) / (2 * math.log(config.rope_theta))

                low = max(math.floor(channel(scaling["beta_fast"])), 0)
                high = min(math.ceil(channel(scaling["beta_slow"])), dim - 1)
                slow = min(max((i - low) / max(high - low, 0.001), 0), 1)
                frequency = frequency * (1 - slow) + frequency / scaling["factor"] * slow
            rows.append(frequency)
        # float32 products, as every implementation has them
        return torch.arange(count).float()[:, None] * torch.tensor(rows, dtype=torch.float32)

    def rotate(self, x: torch.Tensor, half_split: bool) -> torch.Tensor:
        """All channels of ``x [T, ..., dim]``."""
        angles = self.angles(len(x))
        angles = angles.view(len(x), *(1,) * (x.dim() - 2), -1)
        a, b = x.chunk(2, -1) if half_split else (x[..., 0::2], x[..., 1::2])
        a, b = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
        return torch.cat([a, b], -1) if half_split else torch.stack([a, b], -1).flatten(-2)

    def scale(self) -> float:
        scaling, scale = self.config.rope_scaling, (self.config.qk_nope_head_dim + self.config.qk_rope_head_dim) ** -0.5
        if scaling is None or self.mistake == "no mscale":
            return scale
        return scale * (1 + 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"])) ** 2

    def attention(self, x: torch.Tensor, layer: int, out: OracleOutput) -> torch.Tensor:
        config, prefix = self.config, f"model.layers.{layer}.self_attn"
        heads, nope, rope, rank = (
            config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        )  # fmt: skip
        qr = self.norm(self.linear(x, f"{prefix}.q_a_proj"), f"{prefix}.q_a_layernorm", 1e-6)
        q = self.linear(qr, f"{prefix}.q_b_proj").view(len(x), heads, nope + rope)
        kv = self.linear(x, f"{prefix}.kv_a_proj_with_mqa")
        latent = self.norm(kv[:, :rank], f"{prefix}.kv_a_layernorm", 1e-6)
        half_split = self.mistake == "half-split mla rope"
        q_pe, k_pe = self.rotate(q[..., nope:], half_split), self.rotate(kv[:, rank:], half_split)
        if self.numerics != "exact":
            latent, k_pe = rounded_to_fp8(latent.bfloat16().float()), k_pe.bfloat16().float()
        expanded = self.linear(latent, f"{prefix}.kv_b_proj").view(len(x), heads, nope + config.v_head_dim)
        keys = torch.cat([expanded[..., :nope], k_pe[:, None].expand(-1, heads, -1)], -1)
        queries = torch.cat([q[..., :nope], q_pe], -1)
        logits = torch.einsum("thd,shd->hts", queries, keys) * self.scale()
        seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        if config.index_topk is not None:
            seen = self.selected(x, qr, layer, out)
        o = torch.einsum("hts,shd->thd", logits.masked_fill(~seen, -math.inf).softmax(-1), expanded[..., nope:])
        return self.linear(o.flatten(1), f"{prefix}.o_proj")

    def selected(self, x: torch.Tensor, qr: torch.Tensor, layer: int, out: OracleOutput) -> torch.Tensor:
        """Bool ``[T, T]``: which tokens a query reads."""
        config, prefix = self.config, f"model.layers.{layer}.self_attn.indexer"
        heads, dim, topk = (required(size) for size in (config.index_n_heads, config.index_head_dim, config.index_topk))
        rope = config.qk_rope_head_dim
        q = self.linear(qr, f"{prefix}.wq_b").view(len(x), heads, dim)
        k = self.linear(x, f"{prefix}.wk")
        norm_weight, norm_bias = (self.weights[f"{prefix}.k_norm.{part}"] for part in ("weight", "bias"))
        if self.mistake == "rms index norm":
            k = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight + norm_bias
        else:
            centred = k - k.mean(-1, keepdim=True)
            k = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight + norm_bias
        half_split = self.mistake != "interleaved indexer rope"
        if self.mistake == "last channels":
            q, k = (torch.cat([v[..., :-rope], self.rotate(v[..., -rope:], half_split)], -1) for v in (q, k))
        else:
            q, k = (torch.cat([self.rotate(v[..., :rope], half_split), v[..., rope:]], -1) for v in (q, k))
        if self.numerics == "official":
            matrix = torch.ones(1, 1)
            while len(matrix) < dim:
                matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
            q, k = q @ matrix * dim**-0.5, k @ matrix * dim**-0.5
        if self.numerics != "exact":
            q, k = rounded_to_fp8(q), rounded_to_fp8(k.bfloat16().float())
        weights = self.linear(x, f"{prefix}.weights_proj") * heads**-0.5 * dim**-0.5
        products = torch.einsum("thd,sd->ths", q, k)
        if self.mistake == "relu after weight":
            scores = (products * weights[..., None]).relu().sum(1)
        else:
            scores = torch.einsum("ths,th->ts", products.relu(), weights)
        out.choose_entries(layer, scores, torch.arange(len(x)) + 1, topk)
        return out.entries[layer]

    # feed-forward

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(gate * torch.sigmoid(gate) * up, f"{name}.down_proj")

    def moe(self, x: torch.Tensor, layer: int, out: OracleOutput) -> torch.Tensor:
        config, prefix = self.config, f"model.layers.{layer}.mlp"
        scores = torch.sigmoid(self.linear(x, f"{prefix}.gate"))
        biased = scores + self.weights[f"{prefix}.gate.e_score_correction_bias"]
        size = config.n_routed_experts // config.n_group
        best = biased.view(len(x), config.n_group, size).sort(-1, descending=True).values
        groups = best[..., 0] if self.mistake == "group max" else best[..., :2].sum(-1)
        if config.topk_group < config.n_group:
            ranked = groups.sort(-1, descending=True).values
            gap = (ranked[:, config.topk_group - 1] - ranked[:, config.topk_group]).min()
            out.router_gap = min(out.router_gap, float(gap))
        kept = F.one_hot(groups.topk(config.topk_group).indices, config.n_group).sum(1).bool()
        fill = 0.0 if self.mistake == "zero masked groups" else -math.inf
        allowed = torch.where(kept.repeat_interleave(size, 1), biased, torch.tensor(fill))
        out.choose_experts(layer, allowed, config.num_experts_per_tok)
        chosen = out.experts[layer]
        weights = (biased if self.mistake == "biased weights" else scores).gather(1, chosen)
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * config.routed_scaling_factor
        y = self.mlp(x, f"{prefix}.shared_experts")
        for token in range(len(x)):
            for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
                y[token] += weight * self.mlp(x[token], f"{prefix}.experts.{expert}")
        return y
