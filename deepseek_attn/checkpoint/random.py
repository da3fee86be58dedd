"""Random checkpoints in exactly the published format, any tensor of which can be made alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from deepseek_attn.checkpoint.source import DTYPES, CheckpointSource, TensorInfo
from deepseek_attn.config import LayerSpec, ModelConfig
from deepseek_attn.kernels.reference.quant import encode_e8m0, quantize_fp4_weight, quantize_fp8_block
from deepseek_attn.linear import FP4_GROUP, FP8_BLOCK

EXPERT_DTYPES = ("fp4", "fp8", "bf16")
CLAMPED_GAIN = 4.0  # w1, w3 of every second expert: |w x| then passes the clamp at 10 about once in a hundred


@dataclass(frozen=True)
class Recipe:
    """How a tensor is drawn.

    Attributes:
        kind: key of ``DRAW``, which says the distribution and the dtype of what is not quantised.
        shape: logical shape.
        gain: factor on a linear weight.
    """

    kind: str
    shape: tuple[int, ...]
    gain: float = 1.0


def _normal(mean: float, std: float) -> Callable:
    return lambda recipe, generator, config: torch.randn(recipe.shape, generator=generator).mul_(std).add_(mean)


def _linear(recipe: Recipe, generator: torch.Generator, config: ModelConfig) -> torch.Tensor:
    std = max(0.02, recipe.shape[-1] ** -0.5) * recipe.gain
    return torch.randn(recipe.shape, generator=generator).mul_(std)


def _uniform(recipe: Recipe, generator: torch.Generator, config: ModelConfig) -> torch.Tensor:
    return torch.rand(recipe.shape, generator=generator).add_(0.5)


def _expert_table(recipe: Recipe, generator: torch.Generator, config: ModelConfig) -> torch.Tensor:
    vocab, chosen = recipe.shape
    return torch.rand(vocab, config.n_routed_experts, generator=generator).topk(chosen, dim=-1).indices


# kind -> (header dtype, draw). Biases, sinks and bases are far from zero, so that a wrong order of rows shows.
DRAW = {
    "quantized": ("BF16", _linear),
    "expert": ("BF16", _linear),
    "linear": ("BF16", _linear),
    "embed": ("BF16", _normal(0.0, 1.0)),
    "norm": ("BF16", _normal(1.0, 0.1)),
    "ape": ("F32", _normal(0.0, 0.1)),
    "sink": ("F32", _normal(0.0, 1.0)),
    "hc_fn": ("F32", _normal(0.0, 0.02)),
    "hc_base": ("F32", _normal(0.0, 0.5)),
    "hc_scale": ("F32", _uniform),
    "bias": ("F32", _normal(0.0, 0.1)),
    "table": ("I64", _expert_table),
}


class RandomSource(CheckpointSource):
    """A random checkpoint for ``config``: names, dtypes and shapes of a published one.

    Each tensor is drawn from a generator seeded by ``(seed, name)``, so it does not depend on what was read before.
    Linears are FP8 in 128 x 128 blocks and experts FP4; without a ``config.quantization_config`` all weights are BF16.

    Args:
        config: the model; ``self.config`` is the same with ``expert_dtype`` as given.
        seed: any integer.
        expert_dtype: ``"fp4"``, ``"fp8"`` or ``"bf16"``; None takes it from the config.

    Raises:
        ValueError: an unsupported ``expert_dtype``, or FP4 experts whose width 32 does not divide.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, expert_dtype: str | None = None):
        quantized = config.quantization_config is not None
        expert_dtype = expert_dtype or (config.expert_dtype or "fp4" if quantized else "bf16")
        if expert_dtype not in EXPERT_DTYPES or (expert_dtype != "bf16" and not quantized):
            allowed = EXPERT_DTYPES if quantized else "bf16 (the config has no quantization_config)"
            raise ValueError(f"expert_dtype is {expert_dtype!r}: supported is {allowed}")
        if expert_dtype in ("fp4", "fp8") and expert_dtype != config.expert_dtype:
            config = config.replace(expert_dtype=expert_dtype)
        self.config, self.seed = config, seed
        self._formats = {"quantized": "fp8" if quantized else "bf16", "expert": expert_dtype}
        self._recipes = dict(published_tensors(config))
        self._entries: dict[str, TensorInfo] = {}
        for name, recipe in self._recipes.items():
            self._entries.update(self._infos(name, recipe))
        self._last: tuple[str, torch.Tensor, torch.Tensor | None] | None = None

    def entries(self) -> dict[str, TensorInfo]:
        return self._entries

    def read(self, name: str) -> torch.Tensor:
        if name not in self._entries:
            raise ValueError(f"no tensor {name} in a checkpoint of this config")
        is_scale = name.endswith(".scale")
        base = name.removesuffix("scale") + "weight" if is_scale else name
        if self._last is None or self._last[0] != base:
            self._last = None  # the old pair is freed before the new one is made
            self._last = (base, *self._make(base))
        return self._last[2 if is_scale else 1]

    def _infos(self, name: str, recipe: Recipe) -> Iterator[tuple[str, TensorInfo]]:
        form = self._formats.get(recipe.kind)
        if form == "fp8":
            grid = tuple(-(-size // block) for size, block in zip(recipe.shape, FP8_BLOCK, strict=True))
            stored, scale = _info("F8_E4M3", recipe.shape), _info("F8_E8M0", grid)
        elif form == "fp4":
            rows, columns = recipe.shape
            if columns % FP4_GROUP:
                raise ValueError(
                    f"{name} has {columns} input features: FP4 experts need a multiple of {FP4_GROUP}; change "
                    "hidden_size or moe_intermediate_size, or use expert_dtype='fp8'"
                )
            stored, scale = _info("I8", (rows, columns // 2)), _info("F8_E8M0", (rows, columns // FP4_GROUP))
        else:
            stored, scale = _info(DRAW[recipe.kind][0], recipe.shape), None
        yield name, stored
        if scale is not None:
            yield name.removesuffix("weight") + "scale", scale

    def _make(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        recipe = self._recipes[name]
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        master = DRAW[recipe.kind][1](recipe, generator, self.config)
        form = self._formats.get(recipe.kind)
        if form in ("fp8", "fp4"):
            weight, scale = (quantize_fp8_block if form == "fp8" else quantize_fp4_weight)(master)
            return weight, encode_e8m0(scale)
        return master.to(DTYPES[DRAW[recipe.kind][0]][0]), None


def _info(dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(dtype, tuple(shape), math.prod(shape) * DTYPES[dtype][1] // 8)


def published_tensors(config: ModelConfig) -> Iterator[tuple[str, Recipe]]:
    """Name and recipe of every tensor of a published checkpoint, scales excepted, from first to last layer."""
    vocab, hidden = config.vocab_size, config.hidden_size
    yield "embed.weight", Recipe("embed", (vocab, hidden))
    for layer in config.layers:
        yield from _prefixed(layer.name, _block(config, layer))
    yield from _hc_head(config)
    yield "norm.weight", Recipe("norm", (hidden,))
    yield "head.weight", Recipe("linear", (vocab, hidden))
    for layer in config.mtp_layers:
        yield from _prefixed(layer.name, _mtp(config, layer))


def _prefixed(prefix: str, tensors: Iterator[tuple[str, Recipe]]) -> Iterator[tuple[str, Recipe]]:
    for name, recipe in tensors:
        yield f"{prefix}.{name}", recipe


def _block(config: ModelConfig, layer: LayerSpec) -> Iterator[tuple[str, Recipe]]:
    m, hidden = config.hc_mult, config.hidden_size
    for part in ("attn", "ffn"):
        yield f"hc_{part}_fn", Recipe("hc_fn", ((2 + m) * m, m * hidden))
        yield f"hc_{part}_base", Recipe("hc_base", ((2 + m) * m,))
        yield f"hc_{part}_scale", Recipe("hc_scale", (3,))
        yield f"{part}_norm.weight", Recipe("norm", (hidden,))
    yield from _prefixed("attn", _attention(config, layer))
    yield from _prefixed("ffn", _moe(config, layer))


def _attention(config: ModelConfig, layer: LayerSpec) -> Iterator[tuple[str, Recipe]]:
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    yield "wq_a.weight", Recipe("quantized", (config.q_lora_rank, hidden))
    yield "q_norm.weight", Recipe("norm", (config.q_lora_rank,))
    yield "wq_b.weight", Recipe("quantized", (width, config.q_lora_rank))
    yield "wkv.weight", Recipe("quantized", (config.head_dim, hidden))
    yield "kv_norm.weight", Recipe("norm", (config.head_dim,))
    yield "wo_a.weight", Recipe("quantized", (config.o_groups * config.o_lora_rank, width // config.o_groups))
    yield "wo_b.weight", Recipe("quantized", (hidden, config.o_groups * config.o_lora_rank))
    yield "attn_sink", Recipe("sink", (config.num_attention_heads,))
    if layer.ratio:
        yield from _prefixed("compressor", _compressor(config, layer, config.head_dim))
    if layer.has_indexer:
        rows = config.index_n_heads * config.index_head_dim
        yield "indexer.wq_b.weight", Recipe("quantized", (rows, config.q_lora_rank))
        yield "indexer.weights_proj.weight", Recipe("linear", (config.index_n_heads, hidden))
        yield from _prefixed("indexer.compressor", _compressor(config, layer, config.index_head_dim))


def _compressor(config: ModelConfig, layer: LayerSpec, dim: int) -> Iterator[tuple[str, Recipe]]:
    width = layer.coff * dim
    yield "ape", Recipe("ape", (layer.ratio, width))
    yield "wkv.weight", Recipe("linear", (width, config.hidden_size))
    yield "wgate.weight", Recipe("linear", (width, config.hidden_size))
    yield "norm.weight", Recipe("norm", (dim,))


def _moe(config: ModelConfig, layer: LayerSpec) -> Iterator[tuple[str, Recipe]]:
    experts, hidden = config.n_routed_experts, config.hidden_size
    yield "gate.weight", Recipe("linear", (experts, hidden))
    if layer.hash_routing:
        yield "gate.tid2eid", Recipe("table", (config.vocab_size, config.num_experts_per_tok))
    else:
        yield "gate.bias", Recipe("bias", (experts,))
    for index in range(experts):
        gain = CLAMPED_GAIN if index % 2 else 1.0
        yield from _prefixed(f"experts.{index}", _expert(config, "expert", gain))
    yield from _prefixed("shared_experts", _expert(config, "quantized", CLAMPED_GAIN))


def _expert(config: ModelConfig, kind: str, gain: float) -> Iterator[tuple[str, Recipe]]:
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    yield "w1.weight", Recipe(kind, (inner, hidden), gain)
    yield "w2.weight", Recipe(kind, (hidden, inner), gain**-2)
    yield "w3.weight", Recipe(kind, (inner, hidden), gain)


def _hc_head(config: ModelConfig) -> Iterator[tuple[str, Recipe]]:
    m = config.hc_mult
    yield "hc_head_fn", Recipe("hc_fn", (m, m * config.hidden_size))
    yield "hc_head_base", Recipe("hc_base", (m,))
    yield "hc_head_scale", Recipe("hc_scale", (1,))


def _mtp(config: ModelConfig, layer: LayerSpec) -> Iterator[tuple[str, Recipe]]:
    hidden = config.hidden_size
    yield from _block(config, layer)
    yield "e_proj.weight", Recipe("quantized", (hidden, hidden))
    yield "h_proj.weight", Recipe("quantized", (hidden, hidden))
    for name in ("enorm", "hnorm", "norm"):
        yield f"{name}.weight", Recipe("norm", (hidden,))
    yield from _hc_head(config)
