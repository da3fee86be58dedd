"""The compressor of a layer, or of its indexer: pools windows of tokens into one compressed entry each."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.cache.pools import Pool
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v4 import DeepseekV4Base, LayerSpec
from deepseek_attn.kernels.insert import CompressPart
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.layers.weights import CheckpointModule, RMSNorm


class CompressorBase(CheckpointModule):
    """Pools a window of tokens by softmax gates.

    Attributes:
        ape: float32 ``[ratio, width]``, added to the gate scores by place in the window.
        norm: RMSNorm of the pooled vector.
        rope: rotation of the normed vector.
        rotate: multiply the entry by a Hadamard matrix before it is stored.
        pool, state: of entries, and of the projections of open windows; set by `bind`. Without a state nothing is
            pooled.
    """

    ape: Tensor
    norm: RMSNorm
    rope: RotaryTable
    dtype: torch.dtype
    rotate = False
    pool: Pool
    state: Pool | None

    def bind(self, pool: Pool, state: Pool | None) -> None:
        """Sets the pools."""
        self.pool, self.state = pool, state

    def part(self, kv: Tensor, score: Tensor) -> CompressPart:
        """This compressor with a step's values and gate scores ``wkv(x)`` and ``wgate(x)``, float32 ``[T, width]``."""
        if self.state is None:
            raise RuntimeError("a compressor without state pools no windows: bind it to a pool of kind state")
        return CompressPart(
            kv=kv,
            score=score,
            ape=self.ape,
            state=self.state.tensor,
            norm_weight=self.norm.weight,
            eps=self.norm.eps,
            cos_sin=self.rope.cos_sin,
            record=self.pool.record,
            pool=self.pool.tensor,
            page_entries=self.pool.entries,
            dtype=self.dtype,
            hadamard=self.rotate,
        )


class Compressor(CompressorBase):
    """Compresses tokens into entries of ``head_dim`` channels; see `kernels.insert.insert_tokens`.

    In the checkpoint: ``attn.compressor`` and ``attn.indexer.compressor``.

    Args:
        head_dim: channels of an entry: ``config.head_dim``, or ``config.index_head_dim`` for the indexer.
        rotate: see `CompressorBase`; so are indexer keys stored under official numerics, or in FP4.
    """

    def __init__(
        self,
        config: DeepseekV4Base,
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
