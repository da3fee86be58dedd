"""The lightning indexer: which compressed entries a query reads."""

from __future__ import annotations

from itertools import pairwise

import torch

from deepseek_attn.cache.pools import Pool
from deepseek_attn.compressor import Compressor
from deepseek_attn.config import LayerSpec, ModelConfig
from deepseek_attn.kernels.reference.index_scores import index_scores
from deepseek_attn.kernels.reference.quant import fake_quant_fp4, fake_quant_fp8, hadamard
from deepseek_attn.kernels.reference.topk import topk_indices
from deepseek_attn.linear import CheckpointModule, Linear
from deepseek_attn.metadata import StepMetadata
from deepseek_attn.numerics import Numerics
from deepseek_attn.rope import RotaryTable, apply_rope

LOGITS_BYTES = 64 << 20  # scores of one block of queries; the rest of a chunk waits its turn


def logits_rows(entries: int) -> int:
    """Queries scored at once against ``entries`` keys, so that their float32 scores stay within ``LOGITS_BYTES``."""
    return max(1, LOGITS_BYTES // (4 * max(entries, 1)))


class Indexer(CheckpointModule):
    """Scores compressed entries with small heads of its own and keeps the best ``index_topk`` of them per query.

    ``score[t, e] = sum_h weight[t, h] * relu(q[t, h] . key[e])``, over the entries that query ``t`` may see. All
    attention heads share the selection; the scores serve for nothing else.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        super().__init__(device)
        self.spec, self.rope, self.numerics = spec, rope, numerics
        self.heads, self.head_dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.head_dim, numerics, dtype, device)
        self.weights_proj = Linear(config.hidden_size, self.heads, numerics, dtype, device, out_float32=True)
        self.compressor = Compressor(
            config, spec, self.head_dim, rope, numerics, dtype, device, rotate=numerics.index_hadamard
        )
        self.scale = self.head_dim**-0.5 * self.heads**-0.5

    def forward(self, x: torch.Tensor, qr: torch.Tensor, step: StepMetadata, out: torch.Tensor) -> None:
        """Stores new index keys, then writes the selected entries of each query to ``out``.

        Args:
            x: ``[T, hidden_size]``, the attention input; qr: ``[T, q_lora_rank]``, the normed query latent.
            out: int32 ``[T, index_topk]``: entries local to the request, ascending, then -1.
        """
        self.compressor(x, step.compressor[self.spec.ratio, self.spec.overlap])
        meta = step.sparse[self.spec.ratio]
        visible = (step.positions + 1) // self.spec.ratio
        visible = torch.where(step.swa.is_valid_token, visible, 0)
        if int(meta.seq_lens_cpu.max()) // self.spec.ratio <= self.topk:
            everything = torch.arange(self.topk, dtype=torch.int32, device=out.device).expand(len(out), -1)
            out.copy_(torch.where(everything < visible.unsqueeze(1), everything, -1))
            return
        q = self.queries(qr, step.turns_of(self.rope))
        weights = self.weights_proj(x) * self.scale
        starts = step.swa.query_start_loc_cpu.tolist()
        for request, (start, end) in enumerate(pairwise(starts)):
            keys = self.keys(meta.block_table[request], int(meta.seq_lens_cpu[request]) // self.spec.ratio, q.dtype)
            block = logits_rows(len(keys))
            for first in range(start, end, block):
                rows = slice(first, min(first + block, end))
                scores = index_scores(q[rows], keys, weights[rows])
                out[rows] = topk_indices(scores, visible[rows], self.topk)

    def queries(self, qr: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Rotated (and, by the numerics, quantised) indexer queries ``[T, heads, head_dim]``."""
        q = apply_rope(self.wq_b(qr).unflatten(-1, (self.heads, self.head_dim)), turns)
        if self.numerics.index_hadamard:
            q = hadamard(q)
        if self.numerics.index_record == "fp4":
            return fake_quant_fp4(q)
        if self.numerics.index_record == "fp8":
            return fake_quant_fp8(q, self.head_dim)
        return q

    def keys(self, pages: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The first ``count`` index keys of a request, ``[count, head_dim]``."""
        pool: Pool = self.compressor.pool
        entries = torch.arange(count, device=pages.device)
        slots = pages.long()[entries // pool.entries] * pool.entries + entries % pool.entries
        return pool.gather(slots, dtype)
