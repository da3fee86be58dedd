"""Measured times: one attention layer at any context that fits, and whole steps of a model."""

from __future__ import annotations

import gc
import os
import statistics
import time
from typing import Any

import torch

from deepseek_attn.bench.layer import Timing, fill_caches, past, time_layer
from deepseek_attn.bench.model import ModelTiming
from deepseek_attn.bench.model import time_model as time_decode
from deepseek_attn.cache.layout import make_layout
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.options import pick_dtype
from deepseek_attn.experiments.define.settings import CostSettings, ModelTimeSettings
from deepseek_attn.experiments.define.units import ReportProgress
from deepseek_attn.models.block import attention_layers
from deepseek_attn.runner.model_runner import ModelRunner, Sequence
from deepseek_attn.runner.planner import index_logits_bytes, workspace_bytes

SLOW = 0.2  # seconds of a step: one measurement is enough
MODES = ("decode", "prefill")
SHARE = 0.6  # of the free memory that a measurement may take: the rest is for weights and intermediate results


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on ``device`` now, after giving back what earlier measurements left behind."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def time_layer_kind(
    config: ModelConfig,
    numerics: Numerics,
    layer: int,
    settings: CostSettings,
    device: torch.device,
    progress: ReportProgress,
) -> dict[str, Any]:
    """Decode and prefill times of one attention layer with random weights, at every context.

    Returns:
        ``times``: per context ``decode_ms`` of ``batch`` sequences and ``prefill_ms`` of ``prefill`` new tokens of one,
        with ``_low`` and ``_high``, the 10th and 90th percentile. All are None, with a ``reason``, at a context that is
        not timed: the caches do not fit, or it is past ``time_up_to``.
    """
    dtype = pick_dtype(None, device)
    wanted = [context for context in settings.contexts if context <= settings.time_up_to]
    fitting = [c for c in wanted if _bytes_needed(config, numerics, dtype, layer, c, settings) <= _room(device)]
    rows = []
    for context in settings.contexts:
        row = {"context": context, **{f"{mode}_{part}": None for mode in MODES for part in ("ms", "low", "high")}}
        if context not in fitting:
            row["reason"] = "does not fit in memory" if context in wanted else f"past {settings.time_up_to} tokens"
        rows.append(row)
    steps = [(row, mode) for row in rows if row["context"] in fitting for mode in MODES]
    runner = _layer_runner(config, numerics, layer, settings, device, max(fitting)) if fitting else None
    for done, (row, mode) in enumerate(steps):
        try:
            row.update(_time_layer(runner, layer, settings, mode, row["context"]))
        except torch.OutOfMemoryError:  # intermediate results, which nobody counts in advance
            row["reason"] = f"{mode} does not fit in memory"
            torch.cuda.empty_cache()
        progress((done + 1) / len(steps))
    return {"times": rows, "backend": runner and attention_layers(runner.model)[0].backend_name, **_device(device)}


def _layer_runner(config, numerics, layer: int, settings: CostSettings, device, context: int) -> ModelRunner:
    runner = ModelRunner.from_config(
        config, layers=[layer], attention_only=True, device=device, numerics=numerics, max_model_len=context,
        max_num_seqs=settings.batch, max_num_batched_tokens=max(settings.batch, settings.prefill, 256),
    )  # fmt: skip
    fill_caches(runner)
    return runner


def _time_layer(runner: ModelRunner, layer: int, settings: CostSettings, mode: str, context: int) -> dict[str, float]:
    sequences, tokens = (settings.batch, 1) if mode == "decode" else (1, min(settings.prefill, context))
    graph = mode == "decode" and not runner.graph_problem
    timing = time_layer(runner, layer, sequences, tokens, context, 1, warmup=1, graph=graph)
    if timing.microseconds < SLOW * 1e6:
        timing = time_layer(runner, layer, sequences, tokens, context, settings.repeats, graph=graph)
    return _milliseconds(mode, timing)


def _milliseconds(mode: str, timing: Timing | ModelTiming) -> dict[str, float]:
    return {f"{mode}_ms": timing.microseconds / 1e3, f"{mode}_low": timing.low / 1e3, f"{mode}_high": timing.high / 1e3}


def _bytes_needed(config, numerics, dtype, layer: int, context: int, settings: CostSettings) -> int:
    """What a runner of one layer allocates, and the indexer's scores."""
    tokens, specs = max(settings.batch, settings.prefill, 256), (config.layers[layer],)
    layout = make_layout(config, numerics, dtype, context, settings.batch, tokens, layers=specs)
    rope = 2 * 4 * context * config.qk_rope_head_dim
    return (
        layout.nbytes() + workspace_bytes(config, numerics, dtype, layout) + index_logits_bytes(config, layout) + rope
    )


def _room(device: torch.device) -> float:
    """Bytes that a measurement may take."""
    return SHARE * free_memory(device)


def time_model(
    config: ModelConfig, numerics: Numerics, settings: ModelTimeSettings, device: torch.device, progress: ReportProgress
) -> dict[str, Any]:
    """Times of whole steps of a model with random weights: ``decode_ms`` of a batch, ``prefill_ms`` of one sequence.

    Decodes are replays of a CUDA graph where they can be. Prefills are timed by the clock, from token ids to logits:
    what a caller of `ModelRunner.step` waits for.
    """
    rows, longest = [], max(settings.contexts)
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
    return {"times": rows, **_device(device)}


def _time_prefill(runner: ModelRunner, new: int, context: int) -> float:
    ids = [index % runner.config.vocab_size for index in range(context)]
    sequence = Sequence(runner, ids, past(runner, context - new))
    _wait(runner.device)
    start = time.perf_counter()
    runner.step([(sequence, new)])
    _wait(runner.device)
    milliseconds = (time.perf_counter() - start) * 1e3
    sequence.free()
    return milliseconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device(device: torch.device) -> dict[str, str]:
    """Where times come from: the GPU's name, or ``cpu``."""
    return {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
