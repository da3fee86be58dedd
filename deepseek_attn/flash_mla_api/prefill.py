"""`flash_mla_sparse_fwd`: attention over rows of a bfloat16 buffer."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from deepseek_attn.flash_mla_api.arguments import (
    VALUE_DIM,
    check_out,
    check_query,
    check_row_lengths,
    check_scalar,
    check_sink,
    check_tensor,
)
from deepseek_attn.kernels.attention import sparse_attention
from deepseek_attn.kernels.common.device import LOG2E
from deepseek_attn.utils.torch_state import in_own_torch_state


@in_own_torch_state
def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = VALUE_DIM,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    *,
    out: Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention of each query over the rows of ``kv`` that its row of ``indices`` names.

    Args:
        q: bfloat16 ``[s_q, h_q, d_qk]``, ``d_qk`` 512 (V4) or 576 (V3.2).
        kv: bfloat16 ``[s_kv, 1, d_qk]``; the first 512 channels are the values.
        indices: int32 ``[s_q, 1, topk]`` rows of ``kv``; negative or ``>= s_kv`` for none.
        sm_scale: factor of the logits.
        d_v: 512.
        attn_sink: float32 ``[h_q]``, a logit per head that joins the denominator only; neither ``lse`` nor
            ``max_logits`` have it. +inf gives 0, -inf changes nothing.
        topk_length: int32 ``[s_q]``, number of leading indices that are valid, or None for all. Rows of later indices
            are not read.
        out: bfloat16 ``[s_q, h_q, 512]`` with contiguous channels to write to, as in vLLM's fork; heads of a wider
            tensor too.
        use_legacy: not used; ``sgl-flash-mla`` has kernels for V4 and V3.2 behind it.
        return_log2_lse: as in ``sgl-flash-mla``: True gives ``max_logits`` and ``lse`` to base 2, False neither, which
            saves writing the former.

    Returns:
        ``(out, max_logits, lse)``: bfloat16 ``[s_q, h_q, 512]``, float32 ``[s_q, h_q]`` twice: the largest scaled logit
        and the natural log-sum-exp. A query without a valid key gets 0, -inf and +inf.

    Raises:
        ValueError: arguments that disagree or are not supported.
    """
    check_query(q, (torch.bfloat16,), ("s_q", "h_q"), d_v)
    s_q, h_q, d_qk = q.shape
    check_tensor("kv", kv, (torch.bfloat16,), ("s_kv", 1, d_qk), q.device)
    check_tensor("indices", indices, (torch.int32,), (s_q, 1, "topk"), q.device)
    check_scalar("sm_scale", sm_scale, Real)
    check_sink(attn_sink, h_q, q.device)
    check_row_lengths("topk_length", topk_length, s_q, q.device)
    check_out(out, q)
    max_logits = None
    if return_log2_lse is not False:
        max_logits = torch.empty(s_q, h_q, dtype=torch.float32, device=q.device)
    rows, chosen = kv.squeeze(1), indices.squeeze(1)
    out, lse = sparse_attention(q, rows, chosen, sm_scale, attn_sink, topk_length, VALUE_DIM, out, max_logits)
    if max_logits is None:
        return out, None, None
    return (out, max_logits * LOG2E, lse * LOG2E) if return_log2_lse else (out, max_logits, lse)
