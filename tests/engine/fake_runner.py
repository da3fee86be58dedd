"""A model without arithmetic: its caches hold one number per entry, and its logits are a hash of all that is visible.

It pages, closes windows, keeps state rings and reads them back as the real layers do, on a real `CacheManager`, so any
page or row that is wrong, stale or missing changes the next token. `oracle_token` computes the same from the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from deepseek_attn.cache.layout import STATE, TOKENS, WINDOW, CacheLayout, make_layout, ratio_group
from deepseek_attn.cache.manager import CacheManager
from deepseek_attn.cache.pools import CachePools
from deepseek_attn.cache.prefix import PrefixCache
from deepseek_attn.cache.records import PlainRecord
from deepseek_attn.config.generation import GenerationConfig
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.runner import Sequence, StepOptions, StepOutput
from deepseek_attn.runner.logprobs import TokenLogprobs, packed_logprobs
from deepseek_attn.runner.sequence import TokenLimits

PRIME = 65521  # numbers below it are exact in float32, and their products in int64
VOCAB = 512
BROKEN, NOT_FINITE = 500, 501  # tokens: the step that computes one fails, or its logits are NaN


def token_values(tokens: list[int], start: int) -> np.ndarray:
    """int64 ``[n]``: what tokens leave in the caches, by token and position."""
    positions = np.arange(start, start + len(tokens))
    return (np.array(tokens) * 48271 + positions * 16807 + 11) % PRIME


def digests(values: np.ndarray) -> np.ndarray:
    """A hash of each list of numbers ``[..., n]``, in order."""
    weights = (np.arange(values.shape[-1]) * 7919 + 13) % PRIME
    return (values * weights % PRIME).sum(-1) % PRIME


def digest(values: np.ndarray) -> int:
    return int(digests(values))


def next_token(window: np.ndarray, entries: list[np.ndarray]) -> int:
    return (digest(window) + sum(digest(part) * (i + 2) for i, part in enumerate(entries))) % (BROKEN - 2) + 2


def oracle_token(tokens: list[int], window: int, layers: list[tuple[int, int]]) -> int:
    """The token after ``tokens``; ``layers``: (ratio, windows of an entry). No window: it sees all."""
    values = token_values(tokens, 0)
    entries = []
    for ratio, coff in layers:
        width = coff * ratio
        first = [digest(values[:end]) for end in range(ratio, min(width, len(tokens) + 1), ratio)]
        parts = [np.array(first, dtype=np.int64)]
        if len(tokens) >= width:
            parts.append(digests(np.lib.stride_tricks.sliding_window_view(values, width)[::ratio]))
        entries.append(np.concatenate(parts))
    return next_token(values[-window:] if window else values, entries)


@dataclass
class FakeRunner:
    """What an engine needs of a `ModelRunner`.

    Attributes:
        max_tokens: a step of more runs out of memory.
    """

    config: ModelConfig
    layout: CacheLayout
    pools: CachePools
    manager: CacheManager
    layers: list[tuple[int, int]]
    prefixes: PrefixCache | None = None
    trailing: None = None
    max_tokens: int = 1 << 30
    graphs: None = None
    closed: bool = False
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    eos_token_ids = property(lambda self: self.config.eos_token_ids)
    next_step_launched: bool = False
    parallel: Parallel = field(default_factory=Parallel.single)

    @classmethod
    def create(cls, ratios=(4, 16), window=13, pages=None, max_rollback=5, **options) -> Any:
        """A fake V4 with one layer per ratio, or a fake V3.2 with ``ratios=None``; ``pages`` replaces pool sizes."""
        sizes: dict[str, Any] = {"max_model_len": 900, "max_num_seqs": 4, "max_num_batched_tokens": 150} | options
        if ratios is None:
            config = ModelConfig.from_preset("tiny_v32").replace(num_hidden_layers=1, num_nextn_predict_layers=0)
            config = config.replace(first_k_dense_replace=1)
        else:
            config = ModelConfig.from_preset("tiny").replace(
                num_hidden_layers=1 + len(ratios), num_hash_layers=0, compress_ratios=[0, *ratios],
                sliding_window=window, num_nextn_predict_layers=0,
            )  # fmt: skip
        numerics = numerics_for(config, "exact")
        layout = make_layout(config, numerics, torch.float32, max_rollback=max_rollback, **sizes)
        slim = tuple(
            replace(pool, record=PlainRecord(1, torch.float32)) if pool.record else replace(pool, width=1)
            for pool in layout.pools
        )
        layout = replace(layout, pools=slim, pages=layout.pages | (pages or {}))
        pools = CachePools(layout)
        for pool in pools:
            pool.tensor.view(torch.float32).fill_(float("nan"))
        layers = [] if ratios is None else [(spec.ratio, spec.coff) for spec in config.layers if not spec.swa_only]
        manager = CacheManager(pools)
        return cls(config, layout, pools, manager, layers, PrefixCache(manager) if layout.max_snapshots else None)

    limits = property(lambda self: TokenLimits.of(self.config, self.layout.max_model_len))

    def sequence(self, token_ids: Iterable[int]) -> Sequence:
        return Sequence.create(token_ids, self.manager, self.limits, dict)

    def oracle(self, tokens: list[int]) -> int:
        return oracle_token(tokens, self.layout.window, self.layers)

    def step(self, batch: list[tuple[Sequence, int]], options: StepOptions | None = None) -> StepOutput:
        assert sum(n for _, n in batch) <= self.layout.max_num_batched_tokens
        assert len(batch) <= self.layout.max_num_seqs
        assert len({id(sequence) for sequence, _ in batch}) == len(batch)
        caches = [(sequence.cache, n) for sequence, n in batch]
        self.manager.reserve(caches)
        with self.manager.all_or_nothing(caches):
            if sum(n for _, n in batch) > self.max_tokens:
                self._compute(*batch[-1])  # some had been written when memory ran out
                raise torch.OutOfMemoryError("fake memory is full")
            logits = [self._compute(sequence, n) for sequence, n in batch]
            scored = None if options is None or not any(options.scored) else self._scored(batch, options.scored)
            for cache, n in caches:
                self.manager.commit(cache, n)
        return StepOutput(logits, scored=scored)

    def _scored(self, batch, scored) -> list[TokenLogprobs | None]:
        """Log-probabilities from the oracle's tokens."""
        found: list[TokenLogprobs | None] = []
        for (sequence, n), wanted in zip(batch, scored, strict=True):
            if wanted is None:
                found.append(None)
                continue
            first = sequence.num_computed
            rows = range(max(first, wanted.first), min(first + n, wanted.end))
            targets = [sequence.token_ids[row + 1] for row in rows]
            logits = torch.zeros(len(rows), VOCAB)
            for i, row in enumerate(rows):
                logits[i, self.oracle(sequence.token_ids[: row + 1])] = 1
            packed = packed_logprobs(logits, torch.tensor(targets, dtype=torch.int64), wanted.top)
            found.append(TokenLogprobs.of(targets, packed.numpy(), wanted.top))
        return found

    def _compute(self, sequence: Sequence, n: int) -> torch.Tensor:
        start = sequence.num_computed
        end = start + n
        tokens = sequence.token_ids[start:end]
        values = token_values(tokens, start)
        main = TOKENS if TOKENS in self.layout.pages else WINDOW
        self._write(sequence, main, "latent" if main == TOKENS else "window", range(start, end), values)
        visible = []
        for layer, (ratio, coff) in enumerate(self.layers, 1):
            visible.append(self._compress(sequence, layer, ratio, coff, start, values))
        if BROKEN in tokens:
            raise RuntimeError("a broken token")
        first = max(0, end - self.layout.window) if main == WINDOW else 0
        kind = "latent" if main == TOKENS else "window"
        logits = torch.zeros(1, VOCAB)
        logits[0, next_token(self._read(sequence, main, kind, range(first, end)), visible)] = 1
        return logits.fill_(float("nan")) if tokens[-1] == NOT_FINITE else logits

    def _compress(self, sequence, layer: int, ratio: int, coff: int, start: int, values: np.ndarray) -> np.ndarray:
        """Stores the entries of windows that close, then the state rows; returns all entries so far."""
        pool, group, end = self.pools[f"layers.{layer}", "state"], ratio_group(ratio), start + len(values)
        ring = pool.tensor[sequence.cache.tables[STATE][0], :, 0].numpy()
        for closing in range((start // ratio + 1) * ratio, end + 1, ratio):
            wanted = range(max(0, closing - coff * ratio), closing)
            rows = [values[p - start] if p >= start else ring[p % len(ring)] for p in wanted]
            entry = [closing // ratio - 1]
            self._write(sequence, group, "compressed", entry, np.array([digest(np.array(rows))]), layer)
        for position in range(max(start, end - len(ring)), end):
            ring[position % len(ring)] = values[position - start]
        return self._read(sequence, group, "compressed", range(end // ratio), layer)

    def _slots(
        self, sequence, group: str, kind: str, entries, layer: int
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        pool = self.pools[f"layers.{layer}", kind]
        table, index = np.array(sequence.cache.tables[group]), np.array(entries, dtype=np.int64)
        pages = table[index // pool.entries] if len(index) else index
        assert (pages > 0).all(), f"{group}: a page that is needed is not there"
        rows = pool.tensor.view(torch.float32).view(len(pool.tensor), -1).numpy()
        return rows, (pages, index % pool.entries)

    def _write(self, sequence, group: str, kind: str, entries, values: np.ndarray, layer: int = 0) -> None:
        rows, where = self._slots(sequence, group, kind, entries, layer)
        rows[where] = values

    def _read(self, sequence, group: str, kind: str, entries, layer: int = 0) -> np.ndarray:
        rows, where = self._slots(sequence, group, kind, entries, layer)
        found = rows[where]
        assert np.isfinite(found).all(), f"{group}: an entry was read that nobody wrote"
        return found.astype(np.int64)
