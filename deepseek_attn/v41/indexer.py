"""DeepSeek-V4.1's indexer: keys of the layer that owns the entries, candidates of another one."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.attention.indexer import LightningIndexer
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v41 import DeepseekV41Config, V41LayerSpec
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.indexer import CandidateBlocks
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.layers.weights import RMSNorm


class SharedKeyIndexer(LightningIndexer):
    """Queries of this layer over the index keys of ``spec.kv_source``, which that layer's indexer makes of latents."""

    def __init__(
        self,
        config: DeepseekV41Config,
        spec: V41LayerSpec,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        super().__init__(config, rope, numerics, dtype, device)
        self.spec, self.ratio = spec, spec.ratio
        self.num_blocks, self.block_size = config.candidate_topk_blocks or 0, config.candidate_block_size or 0
        if spec.owns_entries:
            self.wk = Linear(config.head_dim, self.head_dim, numerics, dtype, device)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, device)

    def keys(self, latents: Tensor) -> Tensor:
        """Index keys ``[T, head_dim]`` before RoPE, of latents that are neither rotated nor quantised."""
        return self.k_norm(self.wk(latents))

    def candidates(self, step: StepMetadata, tokens: slice) -> CandidateBlocks | None:
        """Blocks of entries to keep or to select from; None if all entries fit in the blocks that are kept."""
        source = self.spec.candidate_source
        if source is None or self.table_entries(step) <= self.num_blocks * self.block_size:
            return None
        if step.results.candidate_blocks is None:
            shape = (len(step.positions), self.num_blocks)
            step.results.candidate_blocks = torch.full(shape, -1, dtype=torch.int32, device=step.positions.device)
        return CandidateBlocks(self.block_size, step.results.candidate_blocks[tokens], fill=source == self.spec.index)
