"""Head counts that FlashMLA's sparse kernels are compiled for."""

from __future__ import annotations


def compute_fp8_decode_padded_heads(num_heads: int) -> int:
    """Heads that the FP8 kernel runs for ``num_heads``: 64 or 128, which is its limit."""
    return 64 if num_heads <= 64 else 128


def compute_prefill_padded_heads(num_heads: int, prefill_padding: int) -> int:
    """Heads that the BF16 kernel runs for ``num_heads``: ``prefill_padding`` (64, on SM100 128), or 128 if more."""
    return prefill_padding if num_heads <= prefill_padding else 128


def max_num_sm_parts(sm_count: int, padded_heads: int, capability_major: int) -> int:
    """Most parts that a schedule of the FP8 kernel can have on a GPU with ``sm_count`` multiprocessors."""
    return sm_count if capability_major == 10 else sm_count // max(1, padded_heads // 64)
