"""Drives attention layers by hand through hostile caches, and compares every step with the float32 oracle.

Every byte that no step has written is NaN: pools (the null page included), scratch memory, and the hidden states of
padding rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deepseek_attn.attention.builder import StepInput
from deepseek_attn.cache.layout import STATE, TOKENS, WINDOW
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.cache.record import Record
from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import PRESETS, Numerics
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.testing import poison_caches, poison_scratch, relative_error
from deepseek_attn.testing.random_layer import NAN_BYTE
from tests.support.oracle_layer import Tokens, V4LayerOracle, V32LayerOracle
from tests.support.report import INF, LIMIT, Report

MOST_PADDING = 2  # requests of a step that only fill up its batch
PLAIN_LINEARS = replace(PRESETS["exact"], kv_record="fp8_ds_mla", index_record="fp8")


class Step(NamedTuple):
    """New tokens of each request; requests of up to ``threshold`` come first, as decodes.

    ``padding``: rows of requests that only fill up the batch, with null pages.
    """

    name: str
    lens: list[int]
    threshold: int = 1
    padding: tuple[int, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Of the worst row.

    Attributes:
        layer: output of a whole layer; keys: rows that it writes, values rounded to e4m3: 2.7e-2.
        selected: loss by selecting with index queries that are rounded to e4m3; see `selection_regret`.
        attention: attention alone, on the same queries.
    """

    layer: float
    keys: float = 5e-2
    selected: float = 4e-2
    attention: float = LIMIT


@dataclass(frozen=True)
class Layers:
    """Layers of a model, and the steps that they run.

    Attributes:
        steps: of as many sequences as the first one has; far: steps by the context at which they start.
        spread: bytes that each pool spans, its pages far apart; 0: pages are adjacent.
    """

    section: str
    config: AnyConfig
    layers: list[int]
    steps: list[Step]
    numerics: str | Numerics
    limits: Limits
    max_model_len: int
    max_num_batched_tokens: int = 1200
    far: dict[int, list[Step]] = field(default_factory=dict)
    spread: int = 0
    source: type[RandomSource] = RandomSource


def decodes(*lens: int, **options) -> Step:
    """One step of decodes with this many query tokens per request."""
    return Step(f"decode of {' '.join(map(str, lens))}", list(lens), threshold=max(lens), **options)


# steps of every kind, small enough for a CPU, and one far into the sequences
SHORT = [
    Step("prefill", [150, 30, 3]), Step("mixed", [1, 1, 20]), decodes(1, 1, 1), decodes(2, 4, 3, padding=(1, 3)),
    Step("drafts beside a prompt", [2, 70, 1], threshold=4),
]  # fmt: skip
SHORT_FAR = {1001: [Step("mixed", [3, 17, 1], threshold=4)]}


@dataclass
class Drive:
    """A runner of attention layers, and sequences whose caches are all it knows.

    Attributes:
        section, name: under which errors are reported.
    """

    runner: ModelRunner
    source: RandomSource
    report: Report
    section: str
    name: str
    limits: Limits
    caches: list[SequenceCache] = field(default_factory=list)

    def __post_init__(self):
        family = V32LayerOracle if isinstance(self.runner.config, DeepseekV32Config) else V4LayerOracle
        self.oracles = {i: family(self.runner, int(i), self.source) for i in self.runner.model.layers}
        poison_caches(self.runner)

    @classmethod
    def of(cls, case: Layers, name: str, backend: str, device: torch.device, report: Report) -> Drive:
        """The layers of ``case`` on a backend."""
        source = case.source(case.config)
        runner = ModelRunner.from_source(
            case.config, source, layers=case.layers, attention_only=True, device=device, dtype="bfloat16",
            numerics=case.numerics, backend=backend, max_num_seqs=len(case.steps[0].lens) + MOST_PADDING,
            max_rollback=4, max_model_len=case.max_model_len, max_num_batched_tokens=case.max_num_batched_tokens,
            progress=False,
        )  # fmt: skip
        assert {block.attn.backend_name for block in runner.model.layers.values()} == {backend}
        return cls(runner, source, report, f"{case.section} {backend}", name, case.limits)

    def start(self, count: int, length: int = 0) -> None:
        """New sequences in place of the old ones, as if ``length`` tokens had been computed."""
        manager, chunk = self.runner.manager, self.runner.layout.max_num_batched_tokens
        for cache in self.caches:
            manager.free(cache)
        self.caches = [manager.create() for _ in range(count)]
        for cache in self.caches:
            while left := length - cache.num_tokens:
                n = min(left, chunk)
                manager.reserve([(cache, n)])
                manager.commit(cache, n)
            if length:
                self.fill(cache, length)

    def fill(self, cache: SequenceCache, length: int) -> None:
        """Random content for what a later token may read of ``length`` tokens, and for nothing else."""
        layout, device = self.runner.layout, self.runner.device
        for pool in self.runner.pools:
            group = pool.spec.group
            pages = torch.tensor(cache.tables[group], device=device)
            if group == STATE:
                pool.tensor[pages[0]].normal_()
                continue
            first = max(0, length - layout.window) if group == WINDOW else 0
            last = length if group in (WINDOW, TOKENS) else length // layout.spans[group].ratio
            for entries in torch.arange(first, last, device=device).split(1 << 17):
                slots = pages[entries // pool.entries] * pool.entries + entries % pool.entries
                pool.insert(slots, torch.randn(len(entries), pool.record.dim, device=device))

    @torch.no_grad()
    def step(self, step: Step) -> None:
        """All layers on random hidden states of one step; the caches advance."""
        runner, manager = self.runner, self.runner.manager
        own = sorted(zip(self.caches, step.lens, strict=True), key=lambda row: row[1] > step.threshold)
        rows = [*own[:1], *((None, n) for n in step.padding), *own[1:]]
        manager.reserve(own)
        lens = torch.tensor([n for _, n in rows])
        prefix = torch.tensor([0 if cache is None else cache.num_tokens for cache, _ in rows])
        tables = {}
        for group in runner.layout.pages:
            table = manager.block_table([cache for cache, _ in own], group)
            tables[group] = table.new_zeros(len(rows), table.shape[1])
            tables[group][torch.tensor([cache is not None for cache, _ in rows])] = table
        requests = torch.arange(len(rows)).repeat_interleave(lens)
        positions = torch.cat([p + torch.arange(n) for p, n in zip(prefix.tolist(), lens.tolist(), strict=True)])
        valid = torch.tensor([cache is not None for cache, _ in rows])[requests]
        on_device = {group: table.to(runner.device).long() for group, table in tables.items()}
        at, of, live = (part.to(runner.device) for part in (positions, requests, valid))
        tokens = Tokens(at, of, live, on_device)
        token_valid = valid if step.padding else None
        batch = StepInput(lens, prefix + lens, tables, token_valid, decode_threshold=step.threshold)
        meta = runner.builder.build(batch)
        decodes = lens if runner.builder.mixed else lens[lens <= step.threshold]
        assert meta.num_decode_tokens == int(decodes.sum())
        for index, block in runner.model.layers.items():
            x = torch.randn(len(valid), runner.config.hidden_size, device=runner.device).to(runner.dtype)
            x[~tokens.valid] = float("nan")
            poison_scratch(runner)
            self.check(block, self.oracles[index], x, meta, tokens, step.name)
        for cache, n in own:
            manager.commit(cache, n)

    def check(self, block, oracle, x: Tensor, meta, tokens: Tokens, step: str) -> None:
        label = f"{self.name}, {getattr(oracle.spec, 'kind', 'V3.2')}, {step}"
        attn, watched = block.attn, None
        if isinstance(oracle, V4LayerOracle):
            watched = attn.impl = Watched(attn.impl, oracle, tokens)
        out = block.attn(x, meta.positions, meta)
        selected = selected_by(attn, len(x))
        if watched is not None:
            attn.impl = watched.impl
            self.report.add(self.section, f"{label}: attention", watched.error, self.limits.attention)
        self.report.add(
            f"{self.section} layer", label, relative_error(out, oracle(x, tokens, selected)), self.limits.layer
        )
        if watched is not None and watched.impl.fuses_query_norm_rope(attn):
            attended = block.attn(x, meta.positions, meta)  # once more, unwatched: from projected queries
            self.report.add(
                f"{self.section} heads", label, relative_error(attended, oracle(x, tokens, selected)), self.limits.layer
            )
        x = x.float().masked_fill(~tokens.valid[:, None], 0)
        for what, error in oracle.written(x, tokens).items():
            self.report.add(f"{self.section} written", f"{label}: {what}", error, self.limits.keys)
        if selected is not None:
            self.report.add(f"{self.section} selected", label, oracle.regret(x, tokens, selected), self.limits.selected)


class Watched:
    """An impl whose calls are compared with the oracle, on the same queries and caches."""

    def __init__(self, impl: type, oracle: V4LayerOracle, tokens: Tokens):
        self.impl, self.oracle, self.tokens, self.error = impl, oracle, tokens, INF

    def attend(self, layer, queries, kv: Tensor, positions: Tensor) -> Tensor:
        q = queries.normed()
        output = self.impl.forward_mqa(layer, q, kv, positions, torch.full_like(q, float("nan")))
        own = self.impl.forward_mqa(layer, q, kv, positions)
        if not torch.equal(own.nan_to_num(-7), output.nan_to_num(-7)):
            raise AssertionError(f"{self.impl.name}: the result depends on where it is written")
        heads = slice(layer.num_heads)
        expected = self.oracle.attend(q[:, heads], self.tokens, selected_by(layer, len(q)))
        self.error = relative_error(output[:, heads], expected)
        return own[:, heads]


def selected_by(attn, tokens: int) -> Tensor | None:
    """What the layer's indexer selected for the tokens of a step; None without an indexer."""
    buffer = attn.topk_indices_buffer
    return None if buffer is None else buffer[:tokens].clone()


def spread_pools(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Pools that are allocated from now on have their pages far apart: each spans at least ``nbytes``."""

    def allocate(self: Record, num_pages: int, n: int, device="cpu") -> Tensor:
        size = self.page_bytes(n)
        unit = 576 * 16  # what every kernel's addresses are a multiple of
        stride = max(2 * unit, -(-max(size + 1, nbytes // max(1, num_pages - 1)) // unit) * unit)
        return torch.full((num_pages, stride), NAN_BYTE, dtype=torch.uint8, device=device)[:, :size]

    monkeypatch.setattr(Record, "allocate", allocate)


def run_layers(case: Layers, name: str, backend: str, device: torch.device, report: Report, monkeypatch) -> None:
    """All steps of ``case``."""
    if case.spread:
        spread_pools(monkeypatch, case.spread)
    drive, count = Drive.of(case, name, backend, device, report), len(case.steps[0].lens)
    for pool in drive.runner.pools:
        assert pool.spec.record is None or pool.tensor.stride(0) * pool.tensor.shape[0] >= case.spread
    drive.start(count)
    for step in case.steps:
        drive.step(step)
    for length, steps in case.far.items():
        drive.start(count, length)
        for step in steps:
            drive.step(step._replace(name=f"{step.name} at {length}"))
