"""The compressor of a layer, or of its indexer: windows of tokens become one compressed entry each."""

from __future__ import annotations

import torch

from deepseek_attn.cache.pools import Pool
from deepseek_attn.config.model import LayerSpec, ModelConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.kernels.insert.compress_reference import CompressPart
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.layers.weights import CheckpointModule, RMSNorm


class Compressor(CheckpointModule):
    """Compresses tokens into entries of ``head_dim`` channels; see `kernels.insert.compress_reference` for how.

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

    def part(self, kv: torch.Tensor, score: torch.Tensor) -> CompressPart:
        """This compressor over the projections ``wkv(x)`` and ``wgate(x)``, float32 ``[T, coff * head_dim]``."""
        return CompressPart(
            kv,
            score,
            self.ape,
            self.state.tensor,
            self.norm.weight,
            self.norm.eps,
            self.rope.cos_sin,
            self.pool.record,
            self.pool.tensor,
            self.pool.entries,
            self.dtype,
            self.rotate,
        )
