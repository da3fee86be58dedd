"""Measured times: one attention layer at any context that fits, and whole steps of a model."""

from __future__ import annotations

import gc
import os
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from deepseek_attn.cache.layout import make_layout
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.options import pick_dtype
from deepseek_attn.lab.bench.layer import fill_caches, past, time_layer
from deepseek_attn.lab.bench.model import time_model as time_decode
from deepseek_attn.lab.bench.timing import Timing, time_until_done
from deepseek_attn.lab.experiments.define.results import TimesResult
from deepseek_attn.lab.experiments.define.settings import CostSettings, ModelTimeSettings
from deepseek_attn.lab.experiments.define.units import ReportProgress
from deepseek_attn.models.block import attention_layers
from deepseek_attn.runner import ModelRunner
from deepseek_attn.runner.planner import index_logits_bytes, workspace_bytes
from deepseek_attn.utils.device import total_memory

SLOW = 0.2  # seconds of a step: one measurement is enough
MODES = ("decode", "prefill")
SHARE = 0.6  # share of the free memory for caches and workspace; weights and intermediate results get the remainder


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on ``device`` now, after freeing the memory of earlier measurements."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    if "SC_AVPHYS_PAGES" not in getattr(os, "sysconf_names", ()):  # macOS, Windows
        return total_memory(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def time_layer_kind(
    config: ModelConfig,
    numerics: Numerics,
    layer: int,
    settings: CostSettings,
    device: torch.device,
    progress: ReportProgress,
) -> TimesResult:
    """Times one attention layer with random weights at every context: decode of ``batch`` sequences, prefill of one.

    Contexts whose caches do not fit in memory, or beyond ``time_up_to``, have a ``reason`` instead of times.
    """
    timed = _TimedLayer(config, numerics, layer, settings, device)
    fitting = [c for c in settings.timed if timed.bytes_needed(c) <= SHARE * free_memory(device)]
    rows: list[Any] = []
    for context in settings.contexts:
        row: dict[str, Any] = {
            "context": context,
            **{f"{mode}_{part}": None for mode in MODES for part in ("ms", "low", "high")},
        }
        if context not in fitting:
            wanted = context in settings.timed
            row["reason"] = "does not fit in memory" if wanted else f"past {settings.time_up_to} tokens"
        rows.append(row)
    steps = [(row, mode) for row in rows if row["context"] in fitting for mode in MODES]
    if not fitting:
        return {"times": rows, "backend": None, "device": _device_name(device)}
    runner = timed.make_runner(max(fitting))
    for done, (row, mode) in enumerate(steps):
        try:
            row.update(timed.time(runner, mode, row["context"]))
        except torch.OutOfMemoryError:  # of intermediate results, which `bytes_needed` does not count
            row["reason"] = f"{mode} does not fit in memory"
            torch.cuda.empty_cache()
        progress((done + 1) / len(steps))
    backend = attention_layers(runner.model)[0].backend_name
    return {"times": rows, "backend": backend, "device": _device_name(device)}


@dataclass(frozen=True)
class _TimedLayer:
    """Layer ``layer`` of a model, and how it is timed."""

    config: ModelConfig
    numerics: Numerics
    layer: int
    settings: CostSettings
    device: torch.device

    @property
    def tokens_per_step(self) -> int:
        return max(self.settings.batch, self.settings.prefill, 256)

    def bytes_needed(self, context: int) -> int:
        """Bytes that the runner of this layer allocates, with the indexer's scores."""
        config, numerics, dtype = self.config, self.numerics, pick_dtype(None, self.device)
        sizes, specs = (context, self.settings.batch, self.tokens_per_step), (config.layers[self.layer],)
        layout = make_layout(config, numerics, dtype, *sizes, layers=specs)
        scratch = workspace_bytes(config, numerics, dtype, layout) + index_logits_bytes(config, layout)
        return layout.nbytes() + scratch + 2 * 4 * context * config.qk_rope_head_dim

    def make_runner(self, longest: int) -> ModelRunner:
        """A runner of this layer alone, its caches filled."""
        runner = ModelRunner.from_config(
            self.config, layers=[self.layer], attention_only=True, device=self.device, numerics=self.numerics,
            max_model_len=longest, max_num_seqs=self.settings.batch, max_num_batched_tokens=self.tokens_per_step,
        )  # fmt: skip
        fill_caches(runner)
        return runner

    def time(self, runner: ModelRunner, mode: str, context: int) -> dict[str, float]:
        decode = mode == "decode"
        sequences, tokens = (self.settings.batch, 1) if decode else (1, min(self.settings.prefill, context))
        graph = decode and not runner.graph_problem
        timing = time_layer(runner, self.layer, sequences, tokens, context, 1, warmup=1, graph=graph)
        if timing.microseconds < SLOW * 1e6:
            timing = time_layer(runner, self.layer, sequences, tokens, context, self.settings.repeats, graph=graph)
        return _milliseconds(mode, timing)


def _milliseconds(mode: str, timing: Timing) -> dict[str, float]:
    return {f"{mode}_ms": timing.microseconds / 1e3, f"{mode}_low": timing.low / 1e3, f"{mode}_high": timing.high / 1e3}


def time_model(
    config: ModelConfig, numerics: Numerics, settings: ModelTimeSettings, device: torch.device, progress: ReportProgress
) -> TimesResult:
    """Times whole steps of a model with random weights: decode of ``batch`` sequences, prefill of one.

    Decodes are replays of a CUDA graph where the model allows it. Prefills are timed by the clock, from token ids to
    logits: the time that a caller of `ModelRunner.step` waits.
    """
    rows: list[Any] = []
    longest = max(settings.contexts)
    config = config.replace(max_position_embeddings=max(longest, config.max_position_embeddings))
    tokens = max(settings.batch, settings.prefill, 256)
    runner = ModelRunner.from_config(
        config, device=device, numerics=numerics, max_model_len=longest, max_num_seqs=settings.batch,
        max_num_batched_tokens=tokens,
    )  # fmt: skip
    fill_caches(runner)
    graph = not runner.graph_problem
    for done, context in enumerate(settings.contexts):
        decode = time_decode(runner, settings.batch, context, settings.repeats, graph=graph)
        new = min(settings.prefill, context)
        times = [_time_prefill(runner, new, context) for _ in range(settings.repeats + 2)][2:]
        rows.append({"context": context, **_milliseconds("decode", decode), "prefill_ms": statistics.median(times)})
        progress((done + 1) / len(settings.contexts))
    return {"times": rows, "graph": graph, "device": _device_name(device)}


def _time_prefill(runner: ModelRunner, new: int, context: int) -> float:
    """Milliseconds of a step of the last ``new`` of ``context`` tokens."""
    ids = [index % runner.config.vocab_size for index in range(context)]
    sequence = runner.sequence(ids, past(runner, context - new))
    microseconds = time_until_done(lambda: runner.step([(sequence, new)]), runner.device)
    sequence.free()
    return microseconds / 1e3


def _device_name(device: torch.device) -> str:
    """The GPU's name, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
