"""The compressor of a layer that owns entries: one latent per token or pair of tokens, and the entry made of it."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.attention.compressor import CompressorBase
from deepseek_attn.cache.pools import Pool
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v41 import DeepseekV41Config, V41LayerSpec
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.insert import CacheRows, compress_latents, rope_insert
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.layers.weights import RMSNorm


class LatentCompressor(CompressorBase):
    """Pools ``ratio`` tokens to a latent ``[head_dim]``: a softmax gate per channel, then a norm. Ratio 1 has no gate.

    The entry is the latent rotated at its first token's position. Index keys are made of the latent itself.

    Attributes:
        input_linears: projections of the layer's input, as `latents` takes their results.
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        spec: V41LayerSpec,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        super().__init__(device)
        self.spec, self.rope, self.dtype = spec, rope, dtype
        pools = spec.compresses
        sizes = (config.hidden_size, config.head_dim, numerics, dtype, device)
        self.wkv = Linear(*sizes, out_float32=pools)
        self.wgate = Linear(*sizes, out_float32=True) if pools else None
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps, device)
        self.input_linears = [self.wkv] if self.wgate is None else [self.wkv, self.wgate]
        self.ape = torch.zeros(spec.ratio, config.head_dim, device=device, dtype=torch.float32)

    def latents(self, projected: list[Tensor], step: StepMetadata) -> Tensor:
        """Latents ``[T, head_dim]`` of the entries that the tokens complete; other rows hold anything finite."""
        if self.state is None:
            return self.norm(projected[0])
        return compress_latents(self.part(*projected), step.compressor[self.spec.ratio, self.spec.overlap])

    def store(self, rows: Tensor, pool: Pool, step: StepMetadata) -> None:
        """Rotates ``rows [T, d]`` by the first position of their windows and stores the rows of completed windows."""
        spec = self.spec
        cache = CacheRows(pool.record, pool.tensor, pool.entries, step.sparse[spec.ratio].slot_mapping)
        starts = step.positions if spec.ratio == 1 else step.compressor[spec.ratio, spec.overlap].window_starts
        rope_insert(rows, starts, self.rope.cos_sin, cache)
