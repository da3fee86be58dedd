"""What an attention impl is: classmethods that turn queries and caches into attention output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from deepseek_attn.attention.layer import DeepseekV4MLAAttention
    from deepseek_attn.config.model import AnyConfig
    from deepseek_attn.config.numerics import Numerics


@dataclass(frozen=True)
class AttentionSpec:
    """What the attention layers of a model ask of an impl.

    Attributes:
        num_heads, head_dim: of the queries; rope_dim: rotated channels at the end of each head.
        kv_record: how K = V is stored: ``"plain"`` rows or ``"fp8_ds_mla"`` records.
        dtype: of queries and output.
    """

    num_heads: int
    head_dim: int
    rope_dim: int = 64
    kv_record: str = "fp8_ds_mla"
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, config: AnyConfig, numerics: Numerics, dtype: torch.dtype, ranks: int = 1) -> AttentionSpec:
        """The spec of every layer of a model whose heads ``ranks`` share."""
        return cls(
            config.num_attention_heads // ranks, config.head_dim, config.qk_rope_head_dim, numerics.kv_record, dtype
        )


class DeepseekV4SparseMLAAttentionImpl(ABC):
    """Abstract impl of V4 sparse attention. Impls hold no state: all of it is on the layer they are given.

    Attributes:
        name: the name users choose it by.
        PREFILL_CHUNK_SIZE: prefill requests whose keys share the workspace at once, at full length.
    """

    name: ClassVar[str]
    PREFILL_CHUNK_SIZE: ClassVar[int] = 4

    @classmethod
    @abstractmethod
    def supported(cls, device: torch.device, spec: AttentionSpec | None = None) -> tuple[bool, str]:
        """Whether the impl can run on ``device``, for layers like ``spec`` if one is given, and the reason."""

    @classmethod
    def padded_heads(cls, num_heads: int) -> int:
        """Heads that ``forward_mqa`` wants to be given for ``num_heads``."""
        return num_heads

    @classmethod
    @abstractmethod
    def forward_mqa(
        cls,
        layer: DeepseekV4MLAAttention,
        q: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``q`` over the caches of ``layer``.

        Args:
            q: ``[T, padded_heads, head_dim]``, rotated; decode rows before prefill rows (``layer.step.swa``).
            kv: ``[T, head_dim]`` of the same tokens; already in ``layer.swa_cache``.
            output: where to write, like ``q``. None leaves the place to the impl, which then need not copy what a
                kernel returns in a tensor of its own.

        Returns:
            ``output``, or without one a tensor of its shape and dtype with contiguous channels. Rows of padding tokens
            are zero.
        """
