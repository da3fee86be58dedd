"""Plan of the collectives: one launch of programs that each exchange a block of words with every rank."""

from __future__ import annotations

from deepseek_attn.kernels.common.plans import ANY, LaunchBlock, one_kernel

# words to each rank; larger blocks are slower. `PeerBuffers.capacity` is a multiple of the block.
EXCHANGES = one_kernel("collectives.exchange", "exchange_kernel", (ANY, LaunchBlock(128)))
