"""Layers and config keys that DeepSeek-V4 and V4.1 share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from deepseek_attn.config.base import ConfigBase, LayerBase
from deepseek_attn.config.common import IndexSizes, RopeSpec
from deepseek_attn.config.dspark import DSparkConfig


@dataclass(frozen=True)
class LayerSpec(LayerBase):
    """Configuration of one layer.

    Attributes:
        index: position among the backbone layers, or among the MTP layers when ``is_mtp``.
        ratio: tokens per compressed entry; 0 means sliding window only. 1 means one compressed entry per
            token (other ports of DeepSeek-V4 read 1 as "no compression"; no published V4 checkpoint has it).
        overlap: an entry also pools the window of ``ratio`` tokens before its own.
        has_indexer: queries read the ``index_topk`` entries that a lightning indexer selects, otherwise all entries.
        rope: the layer's rotary embedding.
        hash_routing: experts come from a table indexed by token id instead of the router's top-k.
        is_mtp: a multi-token-prediction layer; always window-only and never hash-routed.
    """

    index: int
    ratio: int
    overlap: bool
    has_indexer: bool
    rope: RopeSpec
    hash_routing: bool
    is_mtp: bool = False

    def unnumbered(self) -> Self:
        return replace(self, index=0)

    @property
    def coff(self) -> int:
        """Width factor of the compressor's projections and state: 2 with overlap, else 1."""
        return 2 if self.overlap else 1

    @property
    def swa_only(self) -> bool:
        return self.ratio == 0

    @property
    def owns_entries(self) -> bool:
        """The layer makes the entries that it reads."""
        return self.ratio > 0

    @property
    def compresses(self) -> bool:
        """The layer's entries come from a compressor with state."""
        return self.owns_entries

    @property
    def owns_index_keys(self) -> bool:
        """The layer makes the keys that its indexer scores."""
        return self.has_indexer

    @property
    def compresses_index_keys(self) -> bool:
        """Index keys come from a compressor of their own, with state."""
        return self.owns_index_keys

    @property
    def lists_entries(self) -> bool:
        """Index rows list every visible entry, because no indexer selects."""
        return self.ratio > 0 and not self.has_indexer

    @property
    def kind(self) -> str:
        """``"SWA"``, or ``"C4A"``, ``"C128A"``, ... after the ratio."""
        return "SWA" if self.ratio == 0 else f"C{self.ratio}A"


@dataclass(frozen=True)
class DeepseekV4Base(ConfigBase):
    """Config keys of models with a window and compressed entries in their layers, and hyper-connections.

    Attributes:
        dspark: the DSpark drafter; ``mtp_layers`` are then its stages. None without a drafter.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: dict[str, Any] | None = field(hash=False)
    max_position_embeddings: int
    num_nextn_predict_layers: int
    bos_token_id: int
    eos_token_id: int | tuple[int, ...]
    dtype: str
    expert_dtype: str | None
    quantization_config: dict[str, Any] | None = field(hash=False)
    dspark: DSparkConfig | None
    layers: tuple[LayerSpec, ...]
    mtp_layers: tuple[LayerSpec, ...]

    @property
    def nope_head_dim(self) -> int:
        return self.head_dim - self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """``head_dim ** -0.5``, over all channels and independent of YaRN."""
        return self.head_dim**-0.5

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        return self.layers + self.mtp_layers

    @property
    def index_sizes(self) -> IndexSizes:
        """Sizes of the indexers."""
        return IndexSizes(self.index_n_heads, self.index_head_dim, self.index_topk)

    @property
    def drafter(self) -> DSparkConfig:
        """The DSpark drafter.

        Raises:
            ValueError: the model lacks a drafter: ``dspark`` is absent.
        """
        if self.dspark is None:
            raise ValueError(f"this {self.model_type} config has no DSpark drafter: dspark_block_size is absent")
        return self.dspark

    @property
    def draft_stages(self) -> Self:
        """This config with the experts of the draft stages."""
        experts = self.dspark and self.dspark.dspark_n_routed_experts
        chosen = self.dspark and self.dspark.dspark_num_experts_per_tok
        return replace(
            self,
            n_routed_experts=experts or self.n_routed_experts,
            num_experts_per_tok=chosen or self.num_experts_per_tok,
        )

    @property
    def compress_ratios(self) -> tuple[int, ...]:
        """Compress ratio of each layer, MTP layers last, as ``replace(compress_ratios=...)`` takes them."""
        return tuple(layer.ratio for layer in self.all_layers)
