"""Windows of tokens become one compressed entry each.

Every token contributes a value and a score per channel. When a window of ``ratio`` tokens closes, its values are
pooled with a softmax of the scores over the tokens, channel by channel. With overlap an entry pools two windows: the
first half of a token's channels feeds the *next* window's entry, the second half its own.
"""

from __future__ import annotations

import torch

from deepseek_attn.cache.pools import Pool
from deepseek_attn.config import LayerSpec, ModelConfig
from deepseek_attn.kernels.reference.quant import hadamard
from deepseek_attn.linear import CheckpointModule, Linear, RMSNorm
from deepseek_attn.metadata import CompressorMetadata
from deepseek_attn.numerics import Numerics
from deepseek_attn.rope import RotaryTable

POOL_BYTES = 64 << 20  # scratch bound while pooling: an 8K-token chunk would otherwise gather 134 MB per layer


class Compressor(CheckpointModule):
    """Compresses tokens into entries of ``head_dim`` channels.

    In the checkpoint: ``attn.compressor`` and ``attn.indexer.compressor``.

    Args:
        head_dim: channels of an entry: ``config.head_dim``, or ``config.index_head_dim`` for the indexer.
        rotate: apply a Hadamard rotation to the entry before it is stored (indexer keys under official numerics).
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        head_dim: int,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        rotate: bool = False,
    ):
        super().__init__(device)
        self.spec, self.head_dim, self.rope, self.rotate, self.dtype = spec, head_dim, rope, rotate, dtype
        width = spec.coff * head_dim
        self.wkv = Linear(config.hidden_size, width, numerics, dtype, device, out_float32=True)
        self.wgate = Linear(config.hidden_size, width, numerics, dtype, device, out_float32=True)
        self.declare("ape", (spec.ratio, width), torch.float32)
        self.norm = RMSNorm(head_dim, config.rms_norm_eps, device)
        self.pool: Pool | None = None
        self.state: Pool | None = None

    def bind(self, pool: Pool, state: Pool) -> None:
        """Sets where entries and the projections of open windows go."""
        self.pool, self.state = pool, state

    def forward(self, x: torch.Tensor, meta: CompressorMetadata) -> None:
        """Projects ``x [T, hidden_size]``, stores the entries of windows that close, keeps what open windows need."""
        kv = self.wkv(x)
        score = self.wgate(x) + self.ape[meta.phase]
        state = self.state.tensor.view(-1, 2, kv.shape[1])
        if len(meta.entry_slots):
            entries = self.finish(self.pooled(kv, score, state, meta), meta.entry_positions)
            self.pool.insert(meta.entry_slots, entries)
        # after pooling: a ring row may still hold a token that a window closing in this step reads
        state[meta.keep_rows] = torch.stack([kv[meta.keep], score[meta.keep]], dim=1)

    def pooled(
        self, kv: torch.Tensor, score: torch.Tensor, state: torch.Tensor, meta: CompressorMetadata
    ) -> torch.Tensor:
        """Softmax-weighted sums, float32 ``[E, head_dim]``, of the windows that close in this step."""
        windows, slots = meta.flight.shape
        block = max(1, POOL_BYTES // (slots * self.head_dim * 4 * 4))
        parts = []
        for start in range(0, windows, block):
            rows = slice(start, start + block)
            mine = (meta.from_state[:, 0] >= start) & (meta.from_state[:, 0] < start + block)
            window, slot = (meta.from_state[mine] - torch.tensor([start, 0], device=kv.device)).unbind(1)
            earlier = state[meta.state_source[mine]]
            values = self.gather_slots(kv, meta.flight[rows], window, slot, earlier[:, 0])
            scores = self.gather_slots(score, meta.flight[rows], window, slot, earlier[:, 1])
            absent = meta.absent[rows].unsqueeze(-1)
            weights = scores.masked_fill(absent, float("-inf")).softmax(dim=1)
            parts.append((weights * values.masked_fill(absent, 0.0)).sum(dim=1))
        return torch.cat(parts)

    def gather_slots(
        self, flight: torch.Tensor, index: torch.Tensor, window: torch.Tensor, slot: torch.Tensor, earlier: torch.Tensor
    ) -> torch.Tensor:
        """``[windows, slots, head_dim]``: rows of this step, patched with rows of earlier steps, each its own half."""
        dim = self.head_dim
        if self.spec.coff == 1:
            gathered = flight[index]
        else:
            older, newer = index.chunk(2, dim=1)
            gathered = torch.cat([flight[:, :dim][older], flight[:, dim:][newer]], dim=1)
            own = (slot >= self.spec.ratio).unsqueeze(-1)
            earlier = torch.where(own, earlier[:, dim:], earlier[:, :dim])
        gathered[window, slot] = earlier
        return gathered

    def finish(self, pooled: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Norm, rotation at the window's first position and, for indexer keys, the Hadamard rotation."""
        entry = self.rope.rotate(self.norm(pooled.to(self.dtype)), positions)
        return hadamard(entry) if self.rotate else entry
