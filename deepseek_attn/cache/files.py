"""A sequence's caches in a safetensors file, with a fingerprint of everything that their bytes depend on.

Tensors: ``token_ids`` int64 ``[n]``, and for each pool ``layers.N/kind`` with the pages that the sequence holds, in
order: uint8 ``[pages, page_bytes]``, or float32 ``[pages, entries, width]`` for states. The header's metadata says
how many tokens are computed, which logical pages are held, and the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.cache.manager import NULL_PAGE, CacheManager, OutOfPages, SequenceCache
from deepseek_attn.cache.pools import CachePools
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.utils.files import write_tensors

FORMAT = "deepseek-attn sequence 1"
SAMPLES = 256  # bytes of each weight that go into the fingerprint: reading all of a large model would be minutes


def make_fingerprint(
    config: AnyConfig, numerics: Numerics, dtype: torch.dtype, layout: CacheLayout, model: nn.Module
) -> dict[str, str]:
    """Digests by their subject: ``model`` (config and samples of every weight), ``numerics``, ``layout``."""
    weights = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        index = torch.linspace(0, max(len(flat) - 1, 0), min(SAMPLES, len(flat)), dtype=torch.float64).long()
        weights.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        weights.update(flat[index.to(flat.device)].cpu().numpy().tobytes())
    pools = [(p.layer, p.kind, p.group, p.entries, p.page_bytes, p.width, str(p.record)) for p in layout.pools]
    return {
        "model": weights.hexdigest(),
        "numerics": _digest([asdict(numerics), str(dtype)]),
        "layout": _digest([pools, layout.window, layout.max_rollback]),
    }


def save_cache(
    path: str | Path, pools: CachePools, cache: SequenceCache, token_ids: list[int], fingerprint: dict[str, str]
) -> None:
    """Writes a file that is complete or not there at all; ValueError if it cannot be written there."""
    tensors = {"token_ids": torch.tensor(token_ids, dtype=torch.int64)}
    held = {group: [page != NULL_PAGE for page in table] for group, table in cache.tables.items()}
    for pool in pools:
        pages = [page for page in cache.tables[pool.spec.group] if page != NULL_PAGE]
        index = torch.tensor(pages, dtype=torch.int64, device=pool.tensor.device)
        tensors[f"{pool.spec.layer}/{pool.spec.kind}"] = pool.tensor[index].cpu()
    facts = {"num_tokens": cache.num_tokens, "low_water": cache.low_water, "held": held}
    metadata = {"format": FORMAT, "cache": json.dumps(facts)} | fingerprint
    write_tensors(Path(path), tensors, metadata)


def load_cache(path: str | Path, manager: CacheManager, fingerprint: dict[str, str]) -> tuple[list[int], SequenceCache]:
    """Token ids, and a new cache with the pages read from the file.

    Raises:
        ValueError: no such file, not a saved sequence, or made by another model, numerics or layout; which is named.
        OutOfPages: too few free pages. Either way nothing was changed.
    """
    if not Path(path).is_file():
        raise ValueError(f"no saved sequence at {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{str(path)!r} is no saved sequence: its format is {metadata.get('format')!r}")
            other = [name for name, digest in fingerprint.items() if metadata.get(name) != digest]
            if other:
                raise ValueError(
                    f"{str(path)!r} was saved with another {' and another '.join(other)}: its bytes would be read "
                    "wrongly; load it with what it was saved with, or compute the sequence again from its tokens"
                )
            facts = json.loads(metadata["cache"])
            cache = _pages_for(manager, facts)
            try:
                for pool in manager.pools:
                    pages = [page for page in cache.tables[pool.spec.group] if page != NULL_PAGE]
                    index = torch.tensor(pages, dtype=torch.int64, device=pool.tensor.device)
                    stored = file.get_tensor(f"{pool.spec.layer}/{pool.spec.kind}")
                    pool.tensor[index] = stored.to(pool.tensor.device)
                return file.get_tensor("token_ids").tolist(), cache
            except BaseException:
                manager.free(cache)
                raise
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} cannot be read as safetensors: {error}") from error


def _pages_for(manager: CacheManager, facts: dict) -> SequenceCache:
    free = manager.available_pages()
    for group, held in facts["held"].items():
        if sum(held) > free[group]:
            raise OutOfPages(
                f"the {group} pool has {free[group]} free pages and the saved sequence needs {sum(held)}; free other "
                "sequences first, or raise kv_cache_bytes"
            )
    cache = manager.create()
    for group, held in facts["held"].items():
        manager.allocate_table(cache, group, held)
    cache.num_tokens, cache.low_water = facts["num_tokens"], facts["low_water"]
    return cache


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
