"""DeepSeek-V3's latent attention in absorbed form, sparse behind an indexer (V3.2) or dense (V3, V3.1)."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.attention.indexer import select_all
from deepseek_attn.cache.pools import CachePools, Pool
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v32 import DeepseekV32Config, V32LayerSpec
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.attention import causal_attention
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.layers.weights import CheckpointModule, RMSNorm
from deepseek_attn.utils.tracing import stage, traced
from deepseek_attn.utils.workspace import Workspace
from deepseek_attn.v32.backends import SparseMLAImpl
from deepseek_attn.v32.indexer import TokenIndexer

LATENT_NORM_EPS = 1e-6  # both latents' norms in DeepSeek's own code ignore the config's rms_norm_eps


class DeepseekV32MLAAttention(CheckpointModule):
    """Multi-head attention whose keys and values are projected from one latent per token, in absorbed form.

    Per head, a key is ``[W_UK latent ; k_pe]`` and a value ``W_UV latent``. Absorbed, ``W_UK`` is applied to the query
    and ``W_UV`` to the output, so that all heads share the cached row ``[latent ; k_pe]`` as their key. The layer is
    driven by ``impl`` as V4's is (`impls.base.AttentionLayer`): one entry per token, no window, no sinks.

    Attributes:
        prefix: the layer's name, for instance ``layers.2``.
        num_heads: heads of this rank; padded_heads: of the tensors handed to the impl.
        scale: softmax scale, YaRN's mscale included.
        W_UK: ``[kv_lora_rank, heads, qk_nope_head_dim]``, W_UV: ``[kv_lora_rank, heads, v_head_dim]``: the halves of
            ``wkv_b``, set by `process_weights_after_loading`.
        kv_cache: the layer's rows, set by `bind_caches`.
        indexer, impl: None for a dense layer, which runs in plain torch.
        topk_indices_buffer: int32 ``[max_num_batched_tokens, index_topk]``, shared by all layers.
        step, decode_topk_slots: set by each call, as in V4's layer.
    """

    attn_sink: None = None
    swa_cache: None = None
    window_size = 0
    compress_ratio = 1
    W_UK: Tensor
    W_UV: Tensor
    kv_cache: Pool  # with the workspace, set by `bind_caches`
    workspace: Workspace

    def __init__(
        self,
        config: DeepseekV32Config,
        spec: V32LayerSpec,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str,
        impl: type[SparseMLAImpl] | None,
        parallel: Parallel | None = None,
    ):
        super().__init__(device)
        self.parallel = parallel = parallel or Parallel.single()
        self.spec, self.rope, self.prefix, self.scale = spec, rope, spec.name, config.softmax_scale
        heads = config.num_attention_heads
        self.num_heads, self.head_dim, self.value_dim = (
            heads // parallel.token_ranks,
            config.head_dim,
            config.kv_lora_rank,
        )
        self.qk_rope_head_dim, self.qk_nope_head_dim = config.qk_rope_head_dim, config.qk_nope_head_dim
        self.v_head_dim = config.v_head_dim
        self.impl = impl if spec.has_indexer else None
        self.padded_heads = self.num_heads if self.impl is None else self.impl.padded_heads(self.num_heads)

        def linear(inputs: int, outputs: int, split: int | None = None) -> Linear:
            shard = None if split is None else parallel.token_shard(split, (outputs, inputs)[split])
            return Linear(inputs, outputs, numerics, dtype, device, shard=shard)

        self.wq_a = linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS, device)
        self.wq_b = linear(config.q_lora_rank, heads * config.qk_head_dim, split=0)
        self.wkv_a = linear(config.hidden_size, self.head_dim)
        self.kv_norm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS, device)
        self.wkv_b = linear(config.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim), split=0)
        self.wo = linear(heads * self.v_head_dim, config.hidden_size, split=1)
        self.indexer = TokenIndexer(config, rope, numerics, dtype, device) if spec.has_indexer else None
        self.index_topk = None if self.indexer is None else self.indexer.topk
        self.step: StepMetadata | None = None
        self.topk_indices_buffer: Tensor | None = None
        self.decode_topk_slots: Tensor | None = None
        self.prefill_workspace_rows = 0

    @property
    def backend_name(self) -> str:
        """Name of the impl; dense layers (no indexer) run in plain torch only."""
        return "reference" if self.impl is None else self.impl.name

    def process_weights_after_loading(self) -> None:
        """Extracts ``W_UK`` and ``W_UV`` from ``wkv_b`` and frees it: nothing else needs it.

        A quantised weight is dequantised as the layer's result for the identity matrix, whose rows FP8 keeps exactly.
        """
        wkv_b = self.wkv_b
        weight = wkv_b.weight
        if wkv_b.scale is not None:
            with torch.no_grad():
                weight = wkv_b(torch.eye(wkv_b.in_features, dtype=torch.float32, device=weight.device)).t()
        both = weight.detach().t().to(wkv_b.dtype).unflatten(1, (self.num_heads, -1))
        self.W_UK = both[..., : self.qk_nope_head_dim].contiguous()
        self.W_UV = both[..., self.qk_nope_head_dim :].contiguous()
        wkv_b.weight = wkv_b.scale = None

    def bind_caches(
        self,
        pools: CachePools,
        workspace: Workspace,
        topk_indices_buffer: Tensor | None,
        prefill_workspace_rows: int,
    ) -> None:
        """Gives the layer its pools and the scratch memory it shares with other layers."""
        self.workspace, self.prefill_workspace_rows = workspace, prefill_workspace_rows
        self.kv_cache = pools.get(self.prefix, "latent")
        if self.indexer is not None:
            self.indexer.bind(pools.get(self.prefix, "index"))
            self.topk_indices_buffer = topk_indices_buffer

    @traced("attention")
    def forward(self, x: Tensor, positions: Tensor, step: StepMetadata) -> Tensor:
        """Attention of new tokens over all cached tokens of their requests, the new ones included.

        Args:
            x: ``[T, hidden_size]``, normed hidden states of all requests, one after the other.
            positions: int64 ``[T]``; step: metadata of the batch.

        Returns:
            ``[T, hidden_size]`` in the dtype of ``x``.
        """
        self.step = step
        with stage("project"):
            qr = self.q_norm(self.wq_a(x))
            latent, k_pe = self.wkv_a(x).split([self.value_dim, self.qk_rope_head_dim], dim=-1)
        with stage("insert"):
            rows = torch.cat([self.kv_norm(latent), self.rope.rotate(k_pe, positions)], dim=-1)
            self.kv_cache.insert(step.sparse[1].slot_mapping, rows)
            if self.indexer is not None:
                self.indexer.insert(x, positions, step)
        with stage("project"):
            query = self.absorb(self.wq_b(qr), positions)
        if self.indexer is not None:
            self.select(self.indexer, x, qr, step)
        with stage("attend"):
            if self.impl is None:
                latents = self.attend_to_all(query, step)
            else:
                latents = self.impl.forward_mqa(self, query, rows, positions)
        with stage("output"):
            return self.parallel.sum(self.wo(self.project_values(latents)))

    def absorb(self, q: Tensor, positions: Tensor) -> Tensor:
        """Absorbed queries ``[W_UK q_nope ; rotated q_pe]``, ``[T, padded_heads, head_dim]``.

        Args:
            q: ``[T, num_heads * (qk_nope_head_dim + qk_rope_head_dim)]``, as projected.
        """
        q_nope, q_pe = q.unflatten(-1, (self.num_heads, -1)).split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latents = torch.bmm(q_nope.transpose(0, 1), self.W_UK.permute(1, 2, 0)).transpose(0, 1)
        query = torch.cat([latents, self.rope.rotate(q_pe, positions)], dim=-1)
        return F.pad(query, (0, 0, 0, self.padded_heads - self.num_heads))

    def project_values(self, latents: Tensor) -> Tensor:
        """Values ``[T, num_heads * v_head_dim]`` of attended latents ``[T, padded_heads, kv_lora_rank]``."""
        latents = latents[:, : self.num_heads]
        return torch.bmm(latents.transpose(0, 1), self.W_UV.transpose(0, 1)).transpose(0, 1).flatten(1)

    @traced("select")
    def select(self, indexer: TokenIndexer, x: Tensor, qr: Tensor, step: StepMetadata) -> None:
        """Writes the tokens that each query reads to ``topk_indices_buffer``, and their slots for decode tokens.

        Args:
            x, qr: inputs of the indexer's projections.
        """
        out = self.topk_indices_buffer[: len(x)]
        if indexer.needs_topk(step):
            self.decode_topk_slots = indexer.select_topk(indexer.queries(x, qr, step), step, out)
        else:
            self.decode_topk_slots = None
            select_all(step.visible_of(1), out)

    def attend_to_all(self, query: Tensor, step: StepMetadata) -> Tensor:
        """Attention over every token up to the query's own (V3): ``[T, heads, kv_lora_rank]``.

        Padding rows are at the end of their request.
        """
        outputs, table = [], step.sparse[1].block_table
        lengths, tokens = step.seq_lens_cpu.tolist(), step.is_valid_token.cpu()
        for request, (start, end) in enumerate(pairwise(step.query_start_loc_cpu.tolist())):
            padding = int((~tokens[start:end]).sum())
            keys = self.kv_cache.gather_request(table[request], lengths[request] - padding, query.dtype)
            keys = F.pad(keys, (0, 0, 0, padding))
            outputs.append(causal_attention(query[start:end], keys, self.scale, self.value_dim))
        return torch.cat(outputs)
