"""Token embedding and output head."""

from __future__ import annotations

import torch

from deepseek_attn.kernels.linear import Segment, multi_linear
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.weights import CheckpointModule
from deepseek_attn.utils.tracing import traced


class Embedding(CheckpointModule):
    """Embedding of token ids. Tensor-parallel ranks hold a shard of the rows each; outputs are summed over ranks."""

    weight: torch.Tensor

    def __init__(
        self,
        vocab: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Parallel | None = None,
    ):
        super().__init__(device)
        self.parallel = parallel or Parallel.single()
        self.shard = self.parallel.token_shard(0, vocab)
        self.declare("weight", (vocab, dim), dtype, shard=self.shard)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[T]`` -> ``[T, dim]``."""
        if self.shard is None:
            return self.weight.index_select(0, token_ids)
        row = token_ids - self.shard.start
        in_shard = (row >= 0) & (row < self.shard.size)
        found = self.weight[row.clamp(0, self.shard.size - 1)]
        return self.parallel.sum(found.masked_fill(~in_shard.unsqueeze(-1), 0))


class Head(CheckpointModule):
    """Output projection with float32 results, whatever the model dtype. Tensor-parallel ranks split the vocabulary."""

    weight: torch.Tensor

    def __init__(
        self,
        vocab: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Parallel | None = None,
    ):
        super().__init__(device)
        self.parallel = parallel or Parallel.single()
        self.declare("weight", (vocab, dim), dtype, shard=self.parallel.token_shard(0, vocab))

    @traced("head")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, dim]`` -> float32 ``[T, vocab]``."""
        return self.parallel.gather_columns(self.project(x))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's shard of the vocabulary, float32 ``[T, shard]``."""
        return multi_linear(x, [Segment(self.weight, out_dtype=torch.float32)])[0]
