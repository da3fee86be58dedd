"""Pools of a given size in bytes: what grows with the tokens gets what the fixed groups leave."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepseek_attn.cache.layout import CacheLayout


def fit_pages(layout: CacheLayout, kv_cache_bytes: int) -> CacheLayout:
    """The layout with as many pages in the groups that grow with the tokens as ``kv_cache_bytes`` hold.

    The same number of tokens fits into each of these groups, with one page more per sequence and snapshot, which its
    last tokens fill only in part. Sequences then compete for pages: together they can be longer than what fits.

    Raises:
        ValueError: not even one sequence of ``max_model_len`` tokens fits beside the fixed groups.
    """
    growing = layout.growing
    page_bytes = {group: sum(p.page_bytes for p in layout.pools if p.group == group) for group in growing}
    fixed = layout.nbytes() - sum(layout.pages[group] * size for group, size in page_bytes.items())

    def pages_for(tokens: int) -> dict[str, int]:
        part_full = layout.max_num_seqs + layout.max_snapshots
        return {group: 1 + part_full + tokens // span for group, span in growing.items()}

    def cost(tokens: int) -> int:
        return fixed + sum(pages * page_bytes[group] for group, pages in pages_for(tokens).items())

    least = cost(layout.max_model_len)
    if kv_cache_bytes < least:
        raise ValueError(
            f"kv_cache_bytes={kv_cache_bytes} is too little: one sequence of max_model_len={layout.max_model_len} "
            f"tokens, and what max_num_seqs={layout.max_num_seqs} sequences hold whatever their length, take {least} "
            "bytes; raise kv_cache_bytes, or lower max_model_len, max_num_seqs or max_snapshots"
        )
    low, high = layout.max_model_len, layout.max_model_len + kv_cache_bytes if growing else 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= kv_cache_bytes else (low, middle - 1)
    return replace(layout, pages=layout.pages | pages_for(low))
