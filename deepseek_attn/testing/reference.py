"""One attention layer by brute force, in float64 and without caches: each query has a list of visible keys.

Written from the model's definition. It shares only the config's values and the stored weights with the library.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.checkpoint import CanonicalSource, CheckpointSource, read_float32
from deepseek_attn.checkpoint.names_v32 import canonical_name_v32
from deepseek_attn.config.model import AnyConfig, LayerSpec, ModelConfig
from deepseek_attn.config.v32 import DeepseekV32Config, V32LayerSpec

LATENT_NORM_EPS = 1e-6  # for DeepSeek-V3's latents the config's value is ignored


class LayerReference(ABC):
    """One layer of a checkpoint; calling it computes one whole sequence. See `layer_reference`.

    Weights are looked up by the name below ``layers.N.attn``, dequantised to float64.
    """

    def __init__(self, config: AnyConfig, source: CheckpointSource, spec: LayerSpec | V32LayerSpec):
        self.config, self.source, self.spec = config, source, spec
        self.weights: dict[str, Tensor] = {}

    @abstractmethod
    def attend(self, x: Tensor, reads: Sequence[set[int]] | None) -> Tensor:
        """Attended values of each head ``[T, heads, d]`` for float64 ``x``, before V4 rotates them back.

        Args:
            reads: entries of each query, None for all visible ones.
        """

    def rotated_back(self, heads: Tensor) -> Tensor:
        """Attended values after the inverse rotation at their query's position; of V4's layers."""
        raise NotImplementedError(f"{type(self).__name__}: values are not rotated")

    @abstractmethod
    def output(self, heads: Tensor) -> Tensor:
        """The layer's output ``[T, hidden_size]`` for the result of `attend`."""

    @abstractmethod
    def head_values(self, attended: Tensor) -> Tensor:
        """The result of `attend` for an impl's output: the output itself, or the projected values of its latents."""

    @abstractmethod
    def keys_of(self, t: int, selected: Sequence[int] | None) -> str:
        """Description of the keys that query ``t`` reads."""

    @abstractmethod
    def index_scores(self, x: Tensor) -> Tensor:
        """The indexer's scores of all entries for float64 ``x``, ``[T, entries]``, invisible ones included."""

    def __call__(self, x: Tensor, selected: Tensor | None = None) -> Tensor:
        """The layer's output, float64 ``[T, hidden_size]`` on the CPU.

        Args:
            x: ``[T, hidden_size]``, normed hidden states of a sequence from its first token on.
            selected: int ``[T, K]``, entries that each query reads, -1 for none, as `LayerSession.selected` has them;
                default: the best by the indexer's scores; near ties may be ordered differently elsewhere.
        """
        return self.output(self.heads(x, selected))

    def heads(self, x: Tensor, selected: Tensor | None = None) -> Tensor:
        """The result of `attend` for the arguments of `__call__`."""
        x = x.detach().cpu().double()
        if not self.spec.has_indexer:
            return self.attend(x, None)
        rows = self.best(self.index_scores(x)) if selected is None else selected.tolist()
        return self.attend(x, [{entry for entry in row if entry >= 0} for row in rows])

    def visible(self, t: int) -> int:
        """Number of entries that query ``t`` sees."""
        return (t + 1) // self.spec.ratio

    def best(self, scores: Tensor) -> list[list[int]]:
        """The ``index_topk`` best visible entries of each query."""
        visible = [row[: self.visible(t)] for t, row in enumerate(scores)]
        return [row.topk(min(self.config.index_sizes.topk, len(row))).indices.tolist() for row in visible]

    def selection_errors(self, x: Tensor, selected: Tensor) -> list[float]:
        """Error of the indexer's selection, one value per query.

        The error is the distance between the lowest selected score and the lowest score in the correct top-k, relative
        to the largest score. It is infinite unless the row of ``selected`` holds distinct visible entries: all of them,
        or one per column.
        """
        errors, scores = [], self.index_scores(x.detach().cpu().double())
        for t, row in enumerate(selected.tolist()):
            chosen, count = [entry for entry in row if entry >= 0], self.visible(t)
            wrong_number = len(set(chosen)) < len(chosen) or len(chosen) != min(self.config.index_sizes.topk, count)
            if wrong_number or any(entry >= count for entry in chosen):
                errors.append(math.inf)
            elif chosen:
                best = scores[t, :count].topk(len(chosen)).values
                missing = best.min() - scores[t, chosen].min()
                errors.append(float(missing / scores[t, :count].abs().max().clamp(min=1e-30)))
            else:
                errors.append(0.0)
        return errors

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.weights:
            self.weights[name] = read_float32(self.source, f"{self.spec.name}.attn.{name}").double()
        return self.weights[name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self[f"{name}.weight"].T

    def norm(self, x: Tensor, name: str | None = None, eps: float | None = None) -> Tensor:
        y = x / (x.square().mean(-1, keepdim=True) + (self.config.rms_norm_eps if eps is None else eps)).sqrt()
        return y if name is None else y * self[f"{name}.weight"]

    def angles(self, positions: Tensor) -> Tensor:
        """Position times frequency, ``[..., dim / 2]``; rounded to float32 as in every implementation."""
        rope = self.spec.rope
        frequencies = 1 / rope.theta ** (torch.arange(0, rope.dim, 2, device="cpu").float() / rope.dim)
        if rope.yarn:

            def pair(rotations: float) -> float:
                wave = rope.original_max_position_embeddings / (2 * math.pi * rotations)
                return rope.dim * math.log(wave) / (2 * math.log(rope.theta))

            low, high = max(math.floor(pair(rope.beta_fast)), 0), min(math.ceil(pair(rope.beta_slow)), rope.dim - 1)
            ramp = ((torch.arange(rope.dim // 2, device="cpu").float() - low) / (high - low or 0.001)).clamp(0, 1)
            frequencies = frequencies / rope.factor * ramp + frequencies * (1 - ramp)
        return (positions.float()[..., None] * frequencies).double()

    def rotate(self, x: Tensor, positions: Tensor, sign: int = 1) -> Tensor:
        """Rotates the last channels of ``x [T, ..., d]``, pairs of neighbours, at ``positions [T]``."""
        angles = self.angles(positions)
        angles = sign * angles.view(len(x), *[1] * (x.dim() - 2), -1)
        a, b = x[..., -self.spec.rope.dim :: 2], x[..., 1 - self.spec.rope.dim :: 2]
        y = x.clone()
        y[..., -self.spec.rope.dim :: 2] = a * angles.cos() - b * angles.sin()
        y[..., 1 - self.spec.rope.dim :: 2] = a * angles.sin() + b * angles.cos()
        return y


class V4LayerReference(LayerReference):
    """A layer of DeepSeek-V4, of any ratio, overlap and indexer."""

    config: ModelConfig
    spec: LayerSpec

    def __init__(self, config: ModelConfig, source: CheckpointSource, spec: LayerSpec):
        super().__init__(config, CanonicalSource(source), spec)

    def latent(self, x: Tensor) -> Tensor:
        return self.norm(self.linear("wq_a", x), "q_norm")

    def attend(self, x: Tensor, reads: Sequence[set[int]] | None) -> Tensor:
        config, positions = self.config, torch.arange(len(x), device="cpu")
        queries = self.norm(self.linear("wq_b", self.latent(x)).unflatten(1, (config.num_attention_heads, -1)))
        queries = self.rotate(queries, positions)
        keys = self.rotate(self.norm(self.linear("wkv", x), "kv_norm"), positions)
        entries = self.compress("compressor", x) if self.spec.ratio else keys[:0]
        rows = []
        for t in range(len(x)):
            closed = [w for w in range(len(entries)) if (w + 1) * self.spec.ratio <= t + 1]
            read = [w for w in closed if reads is None or w in reads[t]]
            seen = torch.cat([keys[max(0, t + 1 - config.sliding_window) : t + 1], entries[read]])
            rows.append(self.weights_of(queries[t], seen) @ seen)
        return torch.stack(rows)

    def output(self, heads: Tensor) -> Tensor:
        config, out = self.config, self.rotated_back(heads).reshape(len(heads), self.config.o_groups, -1)
        wo_a = self["wo_a.weight"].view(config.o_groups, config.o_lora_rank, -1)
        return self.linear("wo_b", torch.einsum("tgi,goi->tgo", out, wo_a).flatten(1))

    def rotated_back(self, heads: Tensor) -> Tensor:
        """Attended values after the inverse rotation at their query's position."""
        return self.rotate(heads, torch.arange(len(heads), device="cpu"), sign=-1)

    def head_values(self, attended: Tensor) -> Tensor:
        return attended

    def keys_of(self, t: int, selected: Sequence[int] | None) -> str:
        words, visible = f"window positions {max(0, t + 1 - self.config.sliding_window)} to {t}", 0
        if self.spec.ratio:
            visible = self.visible(t)
            words += f", {entries_in_words(range(visible) if selected is None else selected, visible)}"
        return words

    def weights_of(self, q: Tensor, keys: Tensor) -> Tensor:
        """``[H, K]``: softmax weights with the attention sink in the denominator; keys are also values."""
        logits = torch.cat([q @ keys.T / math.sqrt(self.config.head_dim), self["attn_sink"].unsqueeze(1)], dim=1)
        return logits.softmax(1)[:, :-1]

    def compress(self, name: str, x: Tensor) -> Tensor:
        """One entry per closed window, each pooled channel by channel over its tokens: ``[entries, d]``."""
        ratio, dim = self.spec.ratio, len(self[f"{name}.norm.weight"])
        values, scores = self.linear(f"{name}.wkv", x), self.linear(f"{name}.wgate", x)
        scores = scores + self[f"{name}.ape"][torch.arange(len(x), device="cpu") % ratio]
        entries = []
        for first in range(0, len(x) - ratio + 1, ratio):
            own = slice(first, first + ratio)
            value, score = values[own, -dim:], scores[own, -dim:]
            if self.spec.overlap and first:
                before = slice(first - ratio, first)
                value = torch.cat([values[before, :dim], value])
                score = torch.cat([scores[before, :dim], score])
            entries.append((score.softmax(0) * value).sum(0))
        if not entries:
            return x.new_empty(0, dim)
        return self.rotate(
            self.norm(torch.stack(entries), f"{name}.norm"), torch.arange(len(entries), device="cpu") * ratio
        )

    def index_scores(self, x: Tensor) -> Tensor:
        config, keys = self.config, self.compress("indexer.compressor", x)
        queries = self.linear("indexer.wq_b", self.latent(x)).unflatten(1, (config.index_n_heads, -1))
        queries = self.rotate(queries, torch.arange(len(x), device="cpu"))
        weights = self.linear("indexer.weights_proj", x) / math.sqrt(config.index_head_dim * config.index_n_heads)
        return torch.einsum("th,thn->tn", weights, (queries @ keys.T).clamp(min=0))


class V32LayerReference(LayerReference):
    """A layer of DeepSeek-V3.2 or V3: keys and values are projected per head, nothing is absorbed."""

    config: DeepseekV32Config
    spec: V32LayerSpec

    def __init__(self, config: DeepseekV32Config, source: CheckpointSource, spec: V32LayerSpec):
        layers = config.num_hidden_layers
        super().__init__(config, CanonicalSource(source, lambda name: canonical_name_v32(name, layers)), spec)

    def latent(self, x: Tensor) -> Tensor:
        return self.norm(self.linear("wq_a", x), "q_norm", LATENT_NORM_EPS)

    def attend(self, x: Tensor, reads: Sequence[set[int]] | None) -> Tensor:
        config, positions = self.config, torch.arange(len(x), device="cpu")
        nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        queries = self.linear("wq_b", self.latent(x)).unflatten(1, (config.num_attention_heads, nope + rope))
        queries = self.rotate(queries, positions)
        latent, k_pe = self.rotate(self.linear("wkv_a", x), positions).split([rank, rope], 1)
        expanded = self.linear("wkv_b", self.norm(latent, "kv_norm", LATENT_NORM_EPS))
        keys, values = expanded.unflatten(1, (config.num_attention_heads, -1)).split([nope, config.v_head_dim], 2)
        keys = torch.cat([keys, k_pe[:, None].expand(-1, config.num_attention_heads, -1)], 2)
        rows = []
        for t in range(len(x)):
            seen = [i for i in range(t + 1) if reads is None or i in reads[t]]
            rows.append(torch.einsum("hs,shd->hd", self.weights_of(queries[t], keys[seen]), values[seen]))
        return torch.stack(rows)

    def output(self, heads: Tensor) -> Tensor:
        return self.linear("wo", heads.flatten(1))

    def head_values(self, attended: Tensor) -> Tensor:
        weight = self["wkv_b.weight"].unflatten(0, (self.config.num_attention_heads, -1))
        return torch.einsum("thr,hdr->thd", attended, weight[:, self.config.qk_nope_head_dim :])

    def keys_of(self, t: int, selected: Sequence[int] | None) -> str:
        return entries_in_words(range(t + 1) if selected is None else selected, t + 1)

    def weights_of(self, q: Tensor, keys: Tensor) -> Tensor:
        """``[H, K]``: softmax weights of ``keys [K, H, d]``."""
        return (torch.einsum("hd,shd->hs", q, keys) * self.softmax_scale()).softmax(1)

    def softmax_scale(self) -> float:
        """``qk_head_dim ** -0.5``, times YaRN's mscale squared."""
        scale, scaling = (self.config.qk_nope_head_dim + self.config.qk_rope_head_dim) ** -0.5, self.config.rope_scaling
        if scaling is None or scaling["factor"] <= 1:
            return scale
        return scale * (1 + 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"])) ** 2

    def index_scores(self, x: Tensor) -> Tensor:
        sizes, positions = self.config.index_sizes, torch.arange(len(x), device="cpu")
        queries = self.linear("indexer.wq_b", self.latent(x)).unflatten(1, (sizes.n_heads, -1))
        keys = self.linear("indexer.wk", x)
        keys = F.layer_norm(keys, keys.shape[1:], self["indexer.k_norm.weight"], self["indexer.k_norm.bias"], 1e-6)
        queries, keys = self.rotate_first(queries, positions), self.rotate_first(keys, positions)
        weights = self.linear("indexer.weights_proj", x) / math.sqrt(sizes.head_dim * sizes.n_heads)
        return torch.einsum("th,thn->tn", weights, (queries @ keys.T).clamp(min=0))

    def rotate_first(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates the first channels, pairs ``(i, i + n)``."""
        angles = self.angles(positions)
        angles = angles.view(len(x), *[1] * (x.dim() - 2), -1)
        a, b = x[..., : self.spec.rope.dim].chunk(2, -1)
        rotated = [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()]
        return torch.cat([*rotated, x[..., self.spec.rope.dim :]], -1)


def entries_in_words(entries: Sequence[int], visible: int) -> str:
    """Names the first entries and their number."""
    shown = ", ".join(map(str, entries[:12])) + (", ..." if len(entries) > 12 else "")
    return f"{len(entries)} of {visible} entries" + (f": {shown}" if entries else "")


def layer_reference(config: AnyConfig, source: CheckpointSource, layer: int) -> LayerReference:
    """The reference of a backbone layer, from any checkpoint of the model.

    Raises:
        ValueError: no such layer, a missing tensor, or a model whose layers read other layers' results.
    """
    if not 0 <= layer < config.num_hidden_layers:
        raise ValueError(f"layer {layer} does not exist: the model has layers 0 to {config.num_hidden_layers - 1}")
    if isinstance(config, DeepseekV32Config):
        return V32LayerReference(config, source, config.layers[layer])
    if not isinstance(config, ModelConfig):
        raise ValueError(
            f"there is no reference of one layer of a {config.model_type}, which reads the results of other layers"
        )
    return V4LayerReference(config, source, config.layers[layer])
