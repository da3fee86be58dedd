"""What an attention impl is: classmethods that turn queries and caches into attention output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from deepseek_attn.attention import DeepseekV4MLAAttention


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
    def supported(cls, device: torch.device) -> tuple[bool, str]:
        """Whether the impl can run on ``device``, and the reason."""

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
        output: torch.Tensor,
    ) -> None:
        """Attention of ``q`` over the caches of ``layer``, into ``output``.

        Args:
            q: ``[T, padded_heads, head_dim]``, rotated; decode rows before prefill rows (``layer.step.swa``).
            kv: ``[T, head_dim]`` of the same tokens; already in ``layer.swa_cache``.
            output: like ``q``. Rows of padding tokens become zero.
        """
