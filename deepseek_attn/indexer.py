"""The lightning indexer: which cached entries a query reads."""

from __future__ import annotations

from itertools import pairwise

import torch

from deepseek_attn.cache.pools import Pool
from deepseek_attn.compressor import Compressor
from deepseek_attn.config import AnyConfig, LayerSpec, ModelConfig
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


class LightningIndexer(CheckpointModule):
    """Scores cached keys with small heads of its own and keeps the best ``index_topk`` of them per query.

    ``score[t, e] = sum_h weight[t, h] * relu(q[t, h] . key[e])``, over the entries that query ``t`` may see. All
    attention heads share the selection; the scores serve for nothing else. What a key is and how vectors are rotated is
    up to the model.
    """

    def __init__(
        self,
        config: AnyConfig,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        super().__init__(device)
        self.rope, self.numerics = rope, numerics
        self.heads, self.head_dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.head_dim, numerics, dtype, device)
        self.weights_proj = Linear(config.hidden_size, self.heads, numerics, dtype, device, out_float32=True)
        self.scale = self.head_dim**-0.5 * self.heads**-0.5

    def quantized(self, q: torch.Tensor) -> torch.Tensor:
        """Queries ``[T, heads, head_dim]`` after the Hadamard rotation and rounding that the numerics ask for."""
        if self.numerics.index_hadamard:
            q = hadamard(q)
        if self.numerics.index_record == "fp4":
            return fake_quant_fp4(q)
        if self.numerics.index_record == "fp8":
            return fake_quant_fp8(q, self.head_dim)
        return q

    def select(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        visible: torch.Tensor,
        starts: list[int],
        counts: list[int],
        pool: Pool,
        block_table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Scores request by request, in blocks of queries, and writes the selection to ``out``.

        Args:
            q: ``[T, heads, head_dim]``; weights: float32 ``[T, heads]``; visible: ``[T]`` entries a query may see.
            starts: first row of each request, and the end; counts: entries in the cache, by request.
            pool, block_table: the keys.
            out: int32 ``[T, index_topk]``: entries local to the request, ascending, then -1.
        """
        for request, (start, end) in enumerate(pairwise(starts)):
            keys = request_entries(pool, block_table[request], counts[request], q.dtype)
            block = logits_rows(len(keys))
            for first in range(start, end, block):
                rows = slice(first, min(first + block, end))
                scores = index_scores(q[rows], keys, weights[rows])
                out[rows] = topk_indices(scores, visible[rows], self.topk)


def select_everything(visible: torch.Tensor, out: torch.Tensor) -> None:
    """Selects the first ``visible [T]`` entries of each query into ``out [T, index_topk]``: all that there are."""
    column = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
    out.copy_(torch.where(column < visible.unsqueeze(1), column, -1))


def request_entries(pool: Pool, pages: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The first ``count`` entries ``[count, dim]`` of the request with these pages."""
    entries = torch.arange(count, device=pages.device)
    slots = pages.long()[entries // pool.entries] * pool.entries + entries % pool.entries
    return pool.gather(slots, dtype)


class Indexer(LightningIndexer):
    """DeepSeek-V4's: keys are compressed entries, made by a compressor of the indexer's own."""

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        super().__init__(config, rope, numerics, dtype, device)
        self.spec = spec
        self.compressor = Compressor(
            config, spec, self.head_dim, rope, numerics, dtype, device, rotate=numerics.index_hadamard
        )

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
        counts = (meta.seq_lens_cpu // self.spec.ratio).tolist()
        if max(counts) <= self.topk:
            select_everything(visible, out)
            return
        q = self.queries(qr, step.turns_of(self.rope))
        weights = self.weights_proj(x) * self.scale
        starts = step.swa.query_start_loc_cpu.tolist()
        self.select(q, weights, visible, starts, counts, self.compressor.pool, meta.block_table, out)

    def queries(self, qr: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Rotated (and, by the numerics, quantised) indexer queries ``[T, heads, head_dim]``."""
        return self.quantized(apply_rope(self.wq_b(qr).unflatten(-1, (self.heads, self.head_dim)), turns))
