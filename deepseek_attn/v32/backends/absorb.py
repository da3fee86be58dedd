"""Absorption: each half of ``kv_b_proj`` moves to the query or the output, so that all heads share one latent key.

Notation: ``N`` heads, ``P`` values per head without rotation, ``V`` values per head, ``L`` latent values. Row ``n`` of
``kv_b_proj.weight`` viewed as ``[N, P + V, L]`` holds ``W_UK[n]`` (rows ``0 .. P - 1``) and ``W_UV[n]`` (the rest).
Source: DeepSeek-V3.2 inference/model.py (``MLA.forward``), checkpoint field ``kv_b_proj``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WEIGHT_NAMES = ("weight", "qweight", "weight_packed")


class MLAAbsorption:
    """Mixin of classes that own ``W_UK`` and ``W_UV``.

    Attributes:
        kv_b_proj: a linear ``[N * (P + V), L]``, or None if all queries are latent already.
        W_UK: ``[L, N, P]``; W_UV: ``[L, N, V]``; both None before `process_weights_after_loading`.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    kv_b_proj: nn.Module | None
    W_UK: Tensor | None = None
    W_UV: Tensor | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Extracts ``W_UK`` and ``W_UV`` from ``kv_b_proj``, dequantised, in ``act_dtype``.

        Raises:
            AttributeError: ``kv_b_proj`` has none of the known weight attributes.
            ValueError: it is missing, or its weight has another shape.
        """
        if self.kv_b_proj is None:
            raise ValueError("the impl was made without kv_b_proj, which W_UK and W_UV come from")
        weight = dequantized_weight(self.kv_b_proj, self.kv_lora_rank)
        per_head = self.qk_nope_head_dim + self.v_head_dim
        expected = (self.num_heads * per_head, self.kv_lora_rank)
        if weight.shape != expected:
            raise ValueError(
                f"kv_b_proj must be {list(expected)} for {self.num_heads} heads of {self.qk_nope_head_dim} + "
                f"{self.v_head_dim}, got {list(weight.shape)}"
            )
        both = weight.t().to(act_dtype).view(self.kv_lora_rank, self.num_heads, per_head)
        self.W_UK = both[..., : self.qk_nope_head_dim].contiguous()
        self.W_UV = both[..., self.qk_nope_head_dim :].contiguous()

    def _k_up_proj(self, q_nope: Tensor) -> Tensor:
        """Latent queries, ``[B, N, P]`` -> ``[B, N, L]``: ``sum_p q[b, n, p] W_UK[l, n, p]``."""
        W_UK = self._absorbed(self.W_UK, q_nope, self.qk_nope_head_dim)
        return torch.bmm(q_nope.transpose(0, 1), W_UK.permute(1, 2, 0)).transpose(0, 1)

    def _v_up_proj(self, x: Tensor) -> Tensor:
        """Values of attended latents, ``[B, N, L]`` -> ``[B, N, V]``: ``sum_l x[b, n, l] W_UV[l, n, v]``."""
        W_UV = self._absorbed(self.W_UV, x, self.kv_lora_rank)
        return torch.bmm(x.transpose(0, 1), W_UV.transpose(0, 1)).transpose(0, 1)

    def _absorbed(self, weight: Tensor | None, x: Tensor, dim: int) -> Tensor:
        """The weight, if it has been extracted and fits ``x [B, N, dim]``."""
        if weight is None:
            raise RuntimeError("W_UK and W_UV are not there yet: call process_weights_after_loading first")
        if x.dim() != 3 or x.shape[1:] != (self.num_heads, dim):
            raise ValueError(f"expected [B, {self.num_heads}, {dim}], got {list(x.shape)}")
        return weight


def dequantized_weight(layer: nn.Module, in_features: int) -> Tensor:
    """The weight ``[out, in]`` of a linear in any format.

    A float weight is returned as it is. A quantised one is the layer's result for the identity matrix, so that only the
    layer needs to know its format; FP8 quantisation of inputs keeps rows of the identity exactly.

    Raises:
        AttributeError: the layer has no ``weight``, ``qweight`` or ``weight_packed``.
    """
    for name in WEIGHT_NAMES:
        weight = getattr(layer, name, None)
        if weight is not None:
            break
    else:
        raise AttributeError(f"{type(layer).__name__} has none of the weight attributes {', '.join(WEIGHT_NAMES)}")
    if name == "weight" and weight.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return weight.detach()
    identity = torch.eye(in_features, dtype=torch.float32, device=weight.device)
    with torch.no_grad():
        columns = layer(identity)
    return columns[0].t() if isinstance(columns, tuple) else columns.t()


def dynamic_per_batched_tensor_quant(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Quantises a whole tensor, all batches together, with one scale.

    Returns:
        ``(q, scale)``: contiguous ``dtype`` like ``x``, and a float32 scalar with ``x ~ q * scale``; ``scale`` is
        ``max(amax, 1e-10) / MAX``, not rounded to a power of two.
    """
    limit = torch.finfo(dtype).max
    amax = x.float().abs().amax().clamp_min(1e-10)
    scale = limit / amax
    q = (x.float() * scale).clamp(-limit, limit).to(dtype)
    return q.contiguous(), scale.reciprocal()
