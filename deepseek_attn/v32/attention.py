"""DeepSeek-V3's latent attention in absorbed form, sparse behind an indexer (V3.2) or dense (V3, V3.1)."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.cache.pools import CachePools, Pool
from deepseek_attn.cache.records_v32 import kv_cache_view
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v32 import DeepseekV32Config, V32LayerSpec
from deepseek_attn.kernels.attention import causal_attention
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.rope import RotaryTable, apply_rope
from deepseek_attn.layers.weights import CheckpointModule, RMSNorm
from deepseek_attn.utils.tracing import stage, traced
from deepseek_attn.utils.workspace import Workspace
from deepseek_attn.v32.backends.absorb import MLAAbsorption
from deepseek_attn.v32.backends.backend import SparseMLABackend
from deepseek_attn.v32.backends.config import SparseMLAConfig
from deepseek_attn.v32.backends.impl import SparseMLAImpl
from deepseek_attn.v32.indexer import TokenIndexer
from deepseek_attn.v32.step_metadata import TokenStepMetadata

LATENT_NORM_EPS = 1e-6  # both latents' norms in DeepSeek's own code ignore the config's rms_norm_eps


class DeepseekV32MLAAttention(CheckpointModule, MLAAbsorption):
    """Multi-head attention whose keys and values are projected from one latent per token, in absorbed form.

    Per head, a key is ``[W_UK latent ; k_pe]`` and a value ``W_UV latent``. Absorbed, ``W_UK`` is applied to the query
    and ``W_UV`` to the output, so that all heads share the cached row ``[latent ; k_pe]`` as their key.

    Attributes:
        prefix: the layer's name, for instance ``layers.2``.
        num_heads: heads of this rank.
        scale: softmax scale, YaRN's mscale included.
        indexer: None for a dense layer; its ``topk_indices_buffer`` is int32 ``[max_num_batched_tokens, index_topk]``.
        latent_cache: the layer's rows; kv_cache: the same memory as the backend's tensor ``[pages, 64, width]``.
            Both are set by `bind_caches`.
        impl: the sparse backend's impl; None for a dense layer, and before `bind_caches`.
    """

    latent_cache: Pool
    kv_cache: torch.Tensor

    def __init__(
        self,
        config: DeepseekV32Config,
        spec: V32LayerSpec,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Parallel | None = None,
    ):
        super().__init__(device)
        self.parallel = parallel = parallel or Parallel.single()
        self.spec, self.rope, self.prefix, self.scale = spec, rope, spec.name, config.softmax_scale
        heads = config.num_attention_heads
        self.num_heads, self.head_size = heads // parallel.token_ranks, config.head_dim
        self.kv_lora_rank, self.qk_rope_head_dim = config.kv_lora_rank, config.qk_rope_head_dim
        self.qk_nope_head_dim, self.v_head_dim = config.qk_nope_head_dim, config.v_head_dim

        def linear(inputs: int, outputs: int, split: int | None = None) -> Linear:
            shard = None if split is None else parallel.token_shard(split, (outputs, inputs)[split])
            return Linear(inputs, outputs, numerics, dtype, device, shard=shard)

        self.wq_a = linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS, device)
        self.wq_b = linear(config.q_lora_rank, heads * config.qk_head_dim, split=0)
        self.wkv_a = linear(config.hidden_size, self.head_size)
        self.kv_norm = RMSNorm(self.kv_lora_rank, LATENT_NORM_EPS, device)
        self.wkv_b = linear(self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim), split=0)
        self.wo = linear(heads * self.v_head_dim, config.hidden_size, split=1)
        self.indexer = TokenIndexer(config, rope, numerics, dtype, device) if spec.has_indexer else None
        self.impl: SparseMLAImpl | None = None

    @property
    def backend_name(self) -> str:
        """Name of the attention kernels; dense layers (no indexer) run in plain torch only."""
        return "reference" if self.impl is None else self.impl.kernel_name

    @property
    def kv_b_proj(self) -> Linear:
        """``wkv_b`` under the name that `MLAAbsorption` reads."""
        return self.wkv_b

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Extracts ``W_UK`` and ``W_UV`` from ``wkv_b`` and frees it: nothing else needs it."""
        super().process_weights_after_loading(act_dtype)
        self.wkv_b.weight = self.wkv_b.scale = None

    def bind_caches(
        self,
        pools: CachePools,
        workspace: Workspace,
        topk_indices_buffer: torch.Tensor | None,
        backend: type[SparseMLABackend],
        config: SparseMLAConfig | None,
    ) -> None:
        """Sets the layer's pools and, in a sparse layer, makes its impl, which reserves its part of the workspace."""
        pool = self.latent_cache = pools.get(self.prefix, "latent")
        self.kv_cache = kv_cache_view(pool.record, pool.tensor, pool.entries)
        if self.indexer is None:
            return
        self.indexer.bind(pools.get(self.prefix, "index"), topk_indices_buffer)
        self.impl = backend.get_impl_cls()(
            self.num_heads,
            self.head_size,
            self.scale,
            1,
            kv_cache_dtype=config.kv_cache_dtype,
            indexer=self.indexer,
            config=config,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            workspace=workspace,
        )

    @traced("attention")
    def forward(self, x: torch.Tensor, step: TokenStepMetadata) -> torch.Tensor:
        """Attention of new tokens over all cached tokens of their requests, the new ones included.

        Args:
            x: ``[T, hidden_size]``, normed hidden states of all requests, one after the other.

        Returns:
            ``[T, hidden_size]`` in the dtype of ``x``.
        """
        freqs_cis = step.freqs_cis_of(self.rope)
        with stage("project"):
            qr = self.q_norm(self.wq_a(x))
            q = self.wq_b(qr).unflatten(-1, (self.num_heads, -1))
            q_nope, q_pe = apply_rope(q, freqs_cis).split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
            latent, k_pe = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
            query = torch.cat([self._k_up_proj(q_nope), q_pe], dim=-1)
        with stage("insert"):
            rows = torch.cat([self.kv_norm(latent), apply_rope(k_pe, freqs_cis)], dim=-1)
            self.latent_cache.insert(step.slot_mapping, rows)
        attended = self.attend_to_all(query, step) if self.impl is None else self.attend_to_selected(query, x, qr, step)
        with stage("output"):
            return self.parallel.sum(self.wo(self._v_up_proj(attended).flatten(1)))

    def attend_to_selected(
        self, query: torch.Tensor, x: torch.Tensor, qr: torch.Tensor, step: TokenStepMetadata
    ) -> torch.Tensor:
        """Attention over the tokens that the indexer selects (V3.2): latents ``[T, heads, kv_lora_rank]``.

        Args:
            query: ``[T, heads, head_size]``, absorbed; x, qr: inputs of the indexer.
        """
        with stage("select"):
            self.indexer(x, qr, step, self.indexer.topk_indices_buffer[: len(x)])
        with stage("attend"):
            return self.impl.forward_mqa(query, self.kv_cache, step.attention, self)[0]

    @traced("attend")
    def attend_to_all(self, query: torch.Tensor, step: TokenStepMetadata) -> torch.Tensor:
        """Attention over every token up to the query's own (V3); shapes are those of `attend_to_selected`."""
        outputs = []
        lengths, cached = step.seq_lens_cpu.tolist(), step.cached_lens_cpu.tolist()
        for request, (start, end) in enumerate(pairwise(step.query_start_loc_cpu.tolist())):
            keys = self.latent_cache.gather_request(step.block_table[request], cached[request], query.dtype)
            keys = F.pad(keys, (0, 0, 0, lengths[request] - cached[request]))
            outputs.append(causal_attention(query[start:end], keys, self.scale, self.kv_lora_rank))
        return torch.cat(outputs)


def sparse_config(
    config: DeepseekV32Config,
    numerics: Numerics,
    dtype: torch.dtype,
    layout: CacheLayout,
    kernels: str = "auto",
    ranks: int = 1,
) -> SparseMLAConfig | None:
    """Configuration of the sparse backend; None for a model without an indexer.

    Args:
        kernels: the backend's kernels, ``auto`` or a name; ranks: among which the heads are split.
    """
    if not config.has_indexer:
        return None
    return SparseMLAConfig(
        num_heads=config.num_attention_heads // ranks,
        topk_tokens=config.index_topk,
        max_model_len=layout.max_model_len,
        max_num_seqs=layout.max_num_seqs,
        max_num_batched_tokens=layout.max_num_batched_tokens,
        kv_cache_dtype="auto" if numerics.kv_record == "plain" else numerics.kv_record,
        kernels=kernels,
        dtype=dtype,
    )
