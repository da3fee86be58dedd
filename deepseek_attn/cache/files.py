"""A sequence's caches in a safetensors file, with a fingerprint of everything that their bytes depend on.

Tensors: ``token_ids`` int64 ``[n]``, and for each pool ``layers.N/kind`` with the pages that the sequence needs, in
order: uint8 ``[pages, page_bytes]``, or float32 ``[pages, entries, width]`` for states. The header's metadata are
strings: how many tokens are computed (``num_tokens``), how far `CacheManager.truncate` can go back (``low_water``),
``exact_from`` of `SequenceCache` unless it is 0, the fingerprint, and a digest of all of it. Which pages there are
follows from the first two numbers.

A file is input: before a page is allocated, all its fields are compared with the fields that this model's caches would
have. The digest shows damage. A malicious file can hold any values, just as any prompt can.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.cache.manager import CacheManager, SequenceCache
from deepseek_attn.cache.pages import NULL_PAGE
from deepseek_attn.cache.pools import Pool
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.utils.files import STORED_NAMES, write_tensors
from deepseek_attn.utils.hub import check_path

FORMAT = "deepseek-attn sequence 3"
FIELDS = ("format", "num_tokens", "low_water", "digest")  # of the metadata, beside the fingerprint
EXACT_FROM = "exact_from"  # a field that may be absent
SAMPLES = 256  # bytes of each weight that go into the fingerprint: reading all of a large model would be minutes


@dataclass(frozen=True)
class StoredTensor:
    """Dtype and shape of one tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]

    @classmethod
    def of(cls, file: safe_open, name: str) -> StoredTensor:
        part = file.get_slice(name)
        return cls(part.get_dtype(), part.get_shape())

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True)
class SavedSequence:
    """Contents of a file beside the pages, checked."""

    token_ids: list[int]
    num_tokens: int
    low_water: int
    exact_from: int


def make_fingerprint(
    config: AnyConfig,
    numerics: Numerics,
    dtype: torch.dtype,
    layout: CacheLayout,
    weights: Mapping[str, torch.Tensor],
    deterministic: bool = False,
    approximate: bool = False,
) -> dict[str, str]:
    """Digests by their subject: ``model`` (config and samples of weights), ``numerics``, ``layout``.

    Args:
        weights: the model's tensors by name.
        deterministic: bytes follow from the tokens alone; approximate: bytes of prompts are not exact. Either counts
            as another ``numerics``.
    """
    samples = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode())
    for name, tensor in sorted(weights.items()):
        flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        index = torch.linspace(
            0, max(len(flat) - 1, 0), min(SAMPLES, len(flat)), dtype=torch.float64, device="cpu"
        ).long()
        samples.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        samples.update(flat[index.to(flat.device)].cpu().numpy().tobytes())
    pools = [(p.layer, p.kind, p.group, p.entries, p.page_bytes, p.width, str(p.record)) for p in layout.pools]
    return {
        "model": samples.hexdigest(),
        "numerics": _digest(
            [asdict(numerics), str(dtype), *["deterministic"] * deterministic, *["approximate prefill"] * approximate]
        ),
        "layout": _digest([pools, layout.window, layout.max_rollback]),
    }


def save_cache(
    path: str | Path, manager: CacheManager, cache: SequenceCache, token_ids: list[int], fingerprint: dict[str, str]
) -> None:
    """Writes the file completely or not at all; ValueError if the path cannot be written."""
    tensors = {"token_ids": torch.tensor(token_ids, dtype=torch.int64, device="cpu")}
    live = manager.live_pages(cache.num_tokens, cache.low_water)
    for pool in manager.pools:
        group = pool.spec.group
        index = _page_index([cache.tables[group][page] for page in live[group]], pool)
        tensors[_name(pool)] = pool.tensor[index].cpu()
    metadata = {"format": FORMAT, "num_tokens": str(cache.num_tokens), "low_water": str(cache.low_water)} | fingerprint
    metadata |= {EXACT_FROM: str(cache.exact_from)} if cache.exact_from else {}
    write_tensors(Path(path), tensors, metadata | {"digest": make_digest(metadata, sorted(tensors.items()))})


def load_cache(
    path: str | Path, manager: CacheManager, fingerprint: dict[str, str], vocab_size: int
) -> tuple[list[int], SequenceCache]:
    """Token ids, and a new cache with the pages read from the file.

    Raises:
        ValueError: the file is missing, damaged or not a saved sequence; another model, numerics, layout or rank wrote
            it; or a field or tensor is impossible. The message names the field, its value and the expected value.
        OutOfPages: too few free pages. After either error nothing has changed.
    """
    check_path(path, "a saved sequence is named by its file")
    try:
        if not Path(path).is_file():
            raise ValueError(f"no saved sequence at {str(path)!r}")
        with safe_open(path, framework="pt") as file:
            try:
                saved = _check(file, manager, fingerprint, vocab_size)
            except ValueError as error:
                raise ValueError(f"{str(path)!r} cannot be loaded: {error}") from None
            cache = manager.allocate_sequence(saved.num_tokens, saved.low_water)
            cache.exact_from = saved.exact_from
            try:
                for pool in manager.pools:
                    pages = [page for page in cache.tables[pool.spec.group] if page != NULL_PAGE]
                    pool.tensor[_page_index(pages, pool)] = file.get_tensor(_name(pool)).to(pool.tensor.device)
            except BaseException:
                manager.free(cache)
                raise
            return saved.token_ids, cache
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as safetensors: {error}") from error


def make_digest(metadata: dict[str, str], tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 of the metadata and of tensors in the order of their names."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


def _check(file: safe_open, manager: CacheManager, fingerprint: dict[str, str], vocab_size: int) -> SavedSequence:
    """The contents of a file whose header, sizes, token ids and digest are right; ValueError for the first wrong one.

    Sizes come first: nothing is read whose size is not known to be right.
    """
    metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"it is not a saved sequence: its format is {metadata.get('format')!r:.80}, expected {FORMAT!r}"
        )
    _check_names("metadata", set(metadata) - {EXACT_FROM}, {*FIELDS, *fingerprint})
    other = [subject for subject, digest in fingerprint.items() if metadata[subject] != digest]
    if other:
        raise ValueError(
            f"it was saved with another {' and another '.join(other)}: its bytes would be read wrongly; load it with "
            "the same one, or compute the sequence again from its tokens"
        )
    layout, names = manager.layout, set(file.keys())
    _check_names("tensors", names, {"token_ids", *map(_name, manager.pools)})
    stored = {name: StoredTensor.of(file, name) for name in names}
    ids = stored["token_ids"]
    if ids.dtype != "I64" or len(ids.shape) != 1:
        raise ValueError(f"token_ids is {ids}, expected I64 [n]")
    [count] = ids.shape
    if count > layout.max_model_len:
        raise ValueError(f"token_ids: {count} tokens exceed max_model_len={layout.max_model_len}; raise max_model_len")
    num_tokens = _number(metadata, "num_tokens", 0, count)
    oldest = 0 if layout.keeps_all_tokens else num_tokens
    low_water = _number(metadata, "low_water", max(0, oldest - layout.max_rollback), oldest)
    exact_from = _number(metadata, EXACT_FROM, 0, count) if EXACT_FROM in metadata else 0
    live = manager.live_pages(num_tokens, low_water)
    for pool in manager.pools:
        shape = [len(live[pool.spec.group]), *pool.tensor.shape[1:]]
        expected, given = StoredTensor(STORED_NAMES[pool.tensor.dtype], shape), stored[_name(pool)]
        if given != expected:
            raise ValueError(f"{_name(pool)} is {given}, expected {expected} for num_tokens={num_tokens}")
    written = metadata.pop("digest")
    digest = make_digest(metadata, ((name, file.get_tensor(name)) for name in sorted(names)))
    if written != digest:
        raise ValueError(f"it is damaged: its digest is {written!r:.80}, that of its contents {digest!r}")
    token_ids = file.get_tensor("token_ids").tolist()
    wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token_ids holds {wrong}, expected ids in [0, {vocab_size})")
    return SavedSequence(token_ids, num_tokens, low_water, exact_from)


def _check_names(what: str, given: set[str], expected: set[str]) -> None:
    problems = [
        f"{problem} {', '.join(map(repr, sorted(names)[:5]))}"
        for problem, names in (("missing", expected - given), ("unknown", given - expected))
        if names
    ]
    if problems:
        raise ValueError(f"its {what} do not fit this model: {'; '.join(problems):.400}")


def _number(metadata: dict[str, str], name: str, least: int, most: int) -> int:
    text = metadata[name]
    if not re.fullmatch("[0-9]{1,15}", text) or not least <= int(text) <= most:
        raise ValueError(f"{name} is {text!r:.80}, expected a whole number from {least} to {most}")
    return int(text)


def _name(pool: Pool) -> str:
    return f"{pool.spec.layer}/{pool.spec.kind}"


def _page_index(pages: list[int], pool: Pool) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int64, device=pool.tensor.device)


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
