"""The lightning indexer: which cached entries a query reads."""

from __future__ import annotations

from itertools import pairwise

import torch

from deepseek_attn.attention.compressor import Compressor
from deepseek_attn.cache.pools import Pool
from deepseek_attn.config.model import AnyConfig, LayerSpec, ModelConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.common.dispatch import op_for, runs_triton
from deepseek_attn.kernels.common.quant import fake_quant_fp4, fake_quant_fp8, hadamard
from deepseek_attn.kernels.indexer.reference import index_scores, topk_indices
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.rope import RotaryTable, apply_rope
from deepseek_attn.layers.weights import CheckpointModule

FUSED_HEAD_DIM = 128  # channels of the heads that the Triton kernels take
LOGITS_BYTES = 64 << 20  # scores of one block of queries; the rest of a chunk waits its turn


def logits_rows(entries: int) -> int:
    """Queries scored at once against ``entries`` keys, so that their float32 scores stay within ``LOGITS_BYTES``."""
    return max(1, LOGITS_BYTES // (4 * max(entries, 1)))


class LightningIndexer(CheckpointModule):
    """Scores cached keys with small heads of its own and keeps the best ``index_topk`` of them per query.

    ``score[t, e] = sum_h weight[t, h] * relu(q[t, h] . key[e])``, over the entries that query ``t`` may see. All
    attention heads share the selection; the scores serve for nothing else. What a key is and how vectors are rotated is
    up to the model.

    Attributes:
        half_split: rotary pairs are ``(i, i + n)`` of the first channels, not ``(2 i, 2 i + 1)`` of the last ones.
    """

    half_split = False

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

    def fused(self, index_q: torch.Tensor) -> bool:
        """Whether Triton kernels take it from the projected queries on."""
        return runs_triton(index_q) and self.head_dim == FUSED_HEAD_DIM

    def query_arguments(self, index_q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor) -> tuple:
        """Arguments of the op `index_query`: projected ``index_q [T, heads * head_dim]`` and ``weights [T, heads]``."""
        formats = self.numerics.index_record, self.numerics.index_hadamard, self.half_split
        return (index_q, weights, self.rope.cos_sin, positions, self.scale, *formats)

    def select_fused(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        visible: torch.Tensor,
        pool: Pool,
        block_table: torch.Tensor,
        token_to_req: torch.Tensor,
        width: int,
        out: torch.Tensor,
        out_slots: torch.Tensor | None = None,
    ) -> None:
        """From queries to the selection on a GPU: no sync, launches that depend on shapes alone.

        Args:
            q, weights: what `index_query` returns.
            width: no query sees more entries. The others are those of `index_select`.
        """
        from deepseek_attn.kernels.indexer.index_select import index_select

        keys = pool.record, pool.tensor, pool.entries, block_table, token_to_req
        index_select(q, weights, *keys, visible, self.topk, width, out, out_slots)

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

    def has_choice(self, step: StepMetadata) -> bool:
        """Whether a query may see more entries than are selected."""
        return max(self.entries(step)) > self.topk

    def entries(self, step: StepMetadata) -> list[int]:
        """Entries that each request has at most: on a GPU all that its pages have room for, which needs no CPU side."""
        meta = step.sparse[self.spec.ratio]
        if self.fused(step.positions):
            return [meta.block_table.shape[1] * meta.block_size]
        return (meta.seq_lens_cpu // meta.ratio).tolist()

    def select_entries(
        self,
        index_q: torch.Tensor,
        weights: torch.Tensor,
        step: StepMetadata,
        out: torch.Tensor,
        out_slots: torch.Tensor | None = None,
        queries: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Writes the selected entries of each query to ``out``. New keys must be stored by then.

        Args:
            index_q: ``[T, heads * head_dim]``, projected by ``wq_b``; weights: float32 ``[T, heads]``, projected.
            out: int32 ``[T, index_topk]``: entries local to the request, ascending, then -1.
            out_slots: int32 ``[Dt, index_topk]``, on a GPU: the slots of what decode rows selected.
            queries: what the op `index_query` makes of the first two, where the caller has it.
        """
        meta, swa, pool = step.sparse[self.spec.ratio], step.swa, self.compressor.pool
        visible = step.visible_of(self.spec.ratio)
        if not self.fused(index_q):
            q = self.rotated(index_q, step.freqs_cis_of(self.rope))
            starts, counts = swa.query_start_loc_cpu.tolist(), self.entries(step)
            self.select(q, weights * self.scale, visible, starts, counts, pool, meta.block_table, out)
            return
        q, weights = queries or op_for(index_q, "index_query")(*self.query_arguments(index_q, weights, step.positions))
        decodes = slice(0, swa.num_decode_tokens), meta.block_table[: swa.num_decodes], max(self.entries(step))
        longest = int(swa.prefill_seq_lens_cpu.max()) // meta.ratio if swa.num_prefills else 0
        prefills = slice(swa.num_decode_tokens, len(index_q)), meta.block_table, longest
        for (rows, table, width), slots in ((decodes, out_slots), (prefills, None)):
            if rows.start < rows.stop:
                keys = pool, table, swa.token_to_req_indices[rows], width
                self.select_fused(q[rows], weights[rows], visible[rows], *keys, out[rows], slots)

    def rotated(self, index_q: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        return self.quantized(apply_rope(index_q.unflatten(-1, (self.heads, self.head_dim)), freqs_cis))
