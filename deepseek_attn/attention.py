"""The V4 attention layer: projections, caches, impl, output projection."""

from __future__ import annotations

import torch

from deepseek_attn.cache.pools import CachePools, Pool
from deepseek_attn.compressor import Compressor
from deepseek_attn.config import LayerSpec, ModelConfig
from deepseek_attn.impls.base import DeepseekV4SparseMLAAttentionImpl
from deepseek_attn.indexer import Indexer
from deepseek_attn.linear import CheckpointModule, GroupedLinear, Linear, RMSNorm, rms_norm
from deepseek_attn.metadata import StepMetadata
from deepseek_attn.numerics import Numerics
from deepseek_attn.rope import RotaryTable, apply_rope
from deepseek_attn.workspace import Workspace


class DeepseekV4MLAAttention(CheckpointModule):
    """Multi-query attention with one shared key/value vector per token, over a window and compressed entries.

    The layer owns its caches: ``swa_cache`` (the last ``sliding_window`` tokens) and, for a compress ratio above 0,
    ``kv_cache`` (one entry per ``ratio`` tokens). It fills them, then hands the queries to ``impl.forward_mqa``.

    Attributes:
        prefix: the layer's name in the checkpoint, for instance ``layers.2``.
        compress_ratio: tokens per compressed entry; 0 for a layer that reads the window only.
        window_size: keys in the sliding window, the query's own included.
        scale: softmax scale, ``head_dim ** -0.5`` (YaRN does not change it).
        attn_sink: float32 ``[heads]``, a logit per head that joins the softmax denominator only.
        padded_heads: heads of the tensors handed to the impl.
        topk_indices_buffer: int32 ``[max_num_batched_tokens, index_topk]`` selected by the indexer; None without one.
        step: metadata of the running step; None while warming up.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str,
        impl: type[DeepseekV4SparseMLAAttentionImpl],
    ):
        super().__init__(device)
        self.spec, self.rope, self.impl = spec, rope, impl
        self.prefix, self.compress_ratio = spec.name, spec.ratio
        self.num_heads, self.head_dim, self.eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
        self.window_size, self.scale = config.sliding_window, config.softmax_scale
        self.padded_heads = impl.padded_heads(self.num_heads)
        self.o_groups, heads = config.o_groups, self.num_heads

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, numerics, dtype, device)

        self.wq_a = linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, self.eps, device)
        self.wq_b = linear(config.q_lora_rank, heads * self.head_dim)
        self.wkv = linear(config.hidden_size, self.head_dim)
        self.kv_norm = RMSNorm(self.head_dim, self.eps, device)
        self.wo_a = GroupedLinear(
            self.o_groups, heads * self.head_dim // self.o_groups, config.o_lora_rank, numerics, dtype, device
        )
        self.wo_b = linear(self.o_groups * config.o_lora_rank, config.hidden_size)
        self.declare("attn_sink", (heads,), torch.float32)
        self.compressor = None
        self.indexer = None
        if not spec.swa_only:
            self.compressor = Compressor(config, spec, self.head_dim, rope, numerics, dtype, device)
        if spec.has_indexer:
            self.indexer = Indexer(config, spec, rope, numerics, dtype, device)

        self.step: StepMetadata | None = None
        self.swa_cache: Pool | None = None
        self.kv_cache: Pool | None = None
        self.topk_indices_buffer: torch.Tensor | None = None
        self.workspace: Workspace | None = None
        self.max_model_len = self.max_num_batched_tokens = 0

    def bind_caches(self, pools: CachePools, workspace: Workspace, topk_indices_buffer: torch.Tensor | None) -> None:
        """Gives the layer its pools and the scratch memory it shares with other layers."""
        layout = pools.layout
        self.max_model_len, self.max_num_batched_tokens = layout.max_model_len, layout.max_num_batched_tokens
        self.workspace = workspace
        self.swa_cache = pools.get(self.prefix, "window")
        self.kv_cache = pools.get(self.prefix, "compressed")
        if self.compressor is not None:
            self.compressor.bind(self.kv_cache, pools.get(self.prefix, "state"))
        if self.indexer is not None:
            self.indexer.compressor.bind(pools.get(self.prefix, "index"), pools.get(self.prefix, "index_state"))
            self.topk_indices_buffer = topk_indices_buffer

    @property
    def backend_name(self) -> str:
        """The impl that attends."""
        return self.impl.name

    def workspace_rows(self) -> int:
        """Rows of gathered keys that one request of any length can need: its entries, its window and its new tokens."""
        entries = -(-self.max_model_len // self.compress_ratio) if self.compress_ratio else 0
        return entries + self.window_size + self.max_num_batched_tokens

    def forward(self, x: torch.Tensor, positions: torch.Tensor, step: StepMetadata | None) -> torch.Tensor:
        """Attention of new tokens over everything their requests have cached, themselves included.

        Args:
            x: ``[T, hidden_size]``, normed hidden states of all requests, one after the other.
            positions: int64 ``[T]``.
            step: metadata of the batch; None warms up: scratch is reserved and the result is zero.

        Returns:
            ``[T, hidden_size]`` in the dtype of ``x``.
        """
        self.step = step
        turns = self.rope.at(positions) if step is None else step.turns_of(self.rope)
        qr = self.q_norm(self.wq_a(x))
        q = self.queries(qr, turns)
        kv = apply_rope(self.kv_norm(self.wkv(x)), turns)
        if step is not None:
            self.update_caches(x, qr, kv)
        output = torch.empty_like(q)
        self.impl.forward_mqa(self, q, kv, positions, output)
        return self.project_output(output[:, : self.num_heads], turns)

    def queries(self, qr: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """``[T, padded_heads, head_dim]``: a weightless norm per head, then the rotation. Padding heads are zero."""
        q = rms_norm(self.wq_b(qr).unflatten(-1, (self.num_heads, self.head_dim)), self.eps)
        q = apply_rope(q, turns)
        if self.padded_heads == self.num_heads:
            return q
        return torch.nn.functional.pad(q, (0, 0, 0, self.padded_heads - self.num_heads))

    def update_caches(self, x: torch.Tensor, qr: torch.Tensor, kv: torch.Tensor) -> None:
        """Writes what this step's tokens add to the caches: it is all there before any query reads."""
        self.swa_cache.insert(self.step.swa.slot_mapping, kv)
        if self.compressor is not None:
            self.compressor(x, self.step.compressor[self.spec.ratio, self.spec.overlap])
        if self.indexer is not None:
            self.indexer(x, qr, self.step, self.topk_indices_buffer[: len(x)])

    def project_output(self, o: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Undoes the rotation that values carry (they are the keys), at the query's position, then mixes the heads."""
        o = apply_rope(o, turns, inverse=True)
        return self.wo_b(self.wo_a(o.reshape(len(o), self.o_groups, -1)).flatten(1))
