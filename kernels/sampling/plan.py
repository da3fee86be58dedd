"""Plan of greedy tokens: a launch over blocks of the logits, and one over the maxima of the blocks."""

from __future__ import annotations

from deepseek_attn.kernels.common.plans import ANY, LaunchBlock, one_kernel

GREEDY = one_kernel("sampling.greedy_tokens", "greedy_block_kernel", (ANY, LaunchBlock(1024)))
