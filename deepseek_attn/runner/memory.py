"""Bytes that a runner takes on its GPU, by part: counted on a `MetaRunner`, which allocates the same without memory.

Nothing is allocated and no GPU is needed. One layer of each kind stands for all of them, as in `runner.meta_runner`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.checkpoint.names import CanonicalSource
from deepseek_attn.checkpoint.published import canonical_names
from deepseek_attn.checkpoint.random import RandomSource
from deepseek_attn.checkpoint.representatives import representatives
from deepseek_attn.checkpoint.source import TensorInfo
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.kernels.common.counters import COUNTER_BYTES
from deepseek_attn.kernels.common.dispatch import need_triton
from deepseek_attn.models.block import attention_layers
from deepseek_attn.runner.ahead.request import RunnerRequest, RunnerSizes
from deepseek_attn.runner.graphs import length_bucket
from deepseek_attn.runner.meta_runner import MetaRunner
from deepseek_attn.runner.warm_up import WarmUp, powers
from deepseek_attn.utils.allocations import MIB, AllocationTrace, Event, held, rounded

CUBLAS_WORKSPACE = 32 * MIB  # of a stream that cuBLAS computes on, as torch chooses it for Hopper and later
CUBLAS_WORKSPACE_BEFORE_HOPPER = 8 * MIB + 128 * 1024
GAPS = 0.3
"""Memory that PyTorch's allocator reserves without an allocation, as a share of the largest step: 0.24 to 0.30
were measured in one run on an H200, 0.29 to 0.39 in another (docs/data/h200_memory.json)."""
SEGMENTS = {2 * MIB: range(1, MIB + 1), 20 * MIB: range(MIB + 1, 1 << 62)}
"""What PyTorch's allocator asks the driver for, by the sizes of the blocks that it cuts from it."""


@dataclass(frozen=True)
class RunnerMemory:
    """Bytes of a runner on its GPU at the peak of its steps, the CUDA context and loaded kernels left out.

    Attributes:
        weights: one rank's weights of all layers.
        caches: all pools.
        buffers: other memory of the runner's lifetime: workspace, selected entries, RoPE tables, counters of kernels.
        graphs: persistent tensors of decode steps: block tables, inputs, and the memory pool that captured steps share.
        step: the largest allocation of a step, and the part of it that stays until the next step.
        cublas: the workspace of cuBLAS.
        allocator: `GAPS` of the step: what PyTorch's allocator reserves without an allocation.
    """

    weights: int
    caches: int
    buffers: int
    graphs: int
    step: int
    cublas: int
    allocator: int

    def parts(self) -> dict[str, int]:
        """All parts by name; their sum is `total`."""
        return dict(vars(self))

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    @classmethod
    def of(
        cls, config: AnyConfig, layout: CacheLayout, headers: dict[str, TensorInfo] | None = None, **facts: Any
    ) -> RunnerMemory:
        """The memory of a runner of this config whose caches have this layout.

        Args:
            headers: of the checkpoint's tensors, under their published names; None: as a published checkpoint of this
                config has them.
            facts: all other attributes of `RunnerRequest` except its sizes.

        Raises:
            ValueError: a model that no runner with kernels computes, or Triton is not installed.
        """
        need_triton("predicting all memory of a GPU")
        from deepseek_attn.runner.ahead.recording import recorded_launches

        kept = representatives(config, headers or {})
        config = dataclasses.replace(config, layers=tuple(layer for layer in config.layers if layer.index in kept))
        if headers is None:
            headers = CanonicalSource(RandomSource(config), canonical_names(config)).entries()
        request = RunnerRequest.of(config, headers, sizes=RunnerSizes.of(layout), **facts)
        copies = {f"layers.{number}": count for number, count in kept.items()}
        with recorded_launches(request.gpu), AllocationTrace(torch.device("meta")) as trace:
            try:
                return _count(trace, request, copies, layout)
            except NotImplementedError as error:  # by torch, of ops whose results have sizes that depend on values
                raise ValueError(
                    "the memory of this model's steps is not known: some of their ops are plain torch, of widths that "
                    f"no kernel takes, and cannot be run on tensors without memory ({str(error).partition(':')[0]}); "
                    "plan its caches alone"
                ) from error


def _count(trace: AllocationTrace, request: RunnerRequest, copies: dict[str, int], layout: CacheLayout) -> RunnerMemory:
    """Builds the runner without memory, runs its largest steps, and adds up their allocations."""
    runner = MetaRunner.build(request)
    pools = {trace.key(pool.tensor) for pool in runner.pools}
    owners = _owners(trace, runner.model, pools)
    drafted = runner.graphs.tables.tables.values() if runner.graphs else ()
    tables = {key for table in drafted if (key := trace.key(table)) is not None}
    loaded = dict(trace.living)
    weights, buffers = 0, COUNTER_BYTES
    for key, size in loaded.items():
        if key in owners:
            weights += copies.get(owners[key], 1) * size
        elif key not in pools and key not in tables:
            buffers += size
    cublas = CUBLAS_WORKSPACE if request.gpu.capability >= (9, 0) else CUBLAS_WORKSPACE_BEFORE_HOPPER
    warm_up = WarmUp(runner, request.num_drafts)
    with runner.op_settings(), torch.inference_mode():
        base = trace.nbytes
        trace.reset_peak()
        for rows in largest_steps(warm_up):
            warm_up.prefill(rows)
        step = trace.peak - base
        graphs = sum(loaded[key] for key in tables) + _graphs(trace, warm_up)
    return RunnerMemory(weights, layout.nbytes(), buffers, graphs, step, cublas, round(GAPS * step))


def largest_steps(warm_up: WarmUp) -> list[list[tuple[int, int]]]:
    """Steps with most new tokens (per mix of requests the shortest and the longest), and the largest eager decode."""
    sizes = warm_up.prefill_sizes()
    most = max(sum(new for new, _ in rows) for rows in sizes)
    mixes: dict[tuple[int, ...], list[list[tuple[int, int]]]] = {}
    for rows in sizes:
        if sum(new for new, _ in rows) == most:
            mixes.setdefault(tuple(new for new, _ in rows), []).append(rows)
    largest = [rows for mix in mixes.values() for rows in (mix[:1] + mix[-1:] if len(mix) > 1 else mix)]
    if decodes := warm_up.eager_decode_sizes():  # after which a drafter may compute more rows than a step has
        largest.append(max(decodes, key=lambda rows: (len(rows), rows)))
    return largest


def _graphs(trace: AllocationTrace, warm_up: WarmUp) -> int:
    """Bytes of the inputs of all decode steps, and of the pool that captured ones allocate from.

    Steps are run for the longest sequences, and for a batch size between two powers of two as for the next larger one
    that is run, with allocations in proportion.
    """
    runner, inputs = warm_up.runner, 0
    kept, peak = dict.fromkeys(SEGMENTS, 0.0), dict.fromkeys(SEGMENTS, 0.0)
    if runner.graphs is None:
        return 0
    limit = runner.layout.max_model_len
    lengths = len({length_bucket(n, limit) for n in powers(limit)})
    smaller: list[int] = []
    sizes = [size for size in warm_up.decode_sizes() if size.max_len == limit]
    for size, following in zip_longest(sizes, sizes[1:]):
        batch = size.requests
        if batch & (batch - 1) and following is not None and batch < following.requests:
            smaller.append(batch)
            continue
        start_bytes = trace.nbytes
        steps = warm_up.decode_steps(size)
        made = trace.nbytes - start_bytes
        runs = []
        for step in steps:
            begin = len(trace.events)
            step.forward()
            runs.append(trace.events[begin:])
        for requests in (*smaller, batch):
            share = requests / batch
            inputs += lengths * made * requests // batch
            for events in runs:
                scaled = [Event(key, math.ceil(nbytes * share)) for key, nbytes in events]
                for segment, limits in SEGMENTS.items():
                    run = held(event for event in scaled if not event.nbytes or event.nbytes in limits)
                    kept[segment] += lengths * run.kept
                    peak[segment] = max(peak[segment], run.peak - run.kept)
        smaller = []
    return inputs + sum(rounded(round(kept[segment] + peak[segment]), segment) for segment in SEGMENTS)


def _owners(trace: AllocationTrace, model: nn.Module, pools: set[int | None]) -> dict[int, str]:
    """The layer that each storage of the model's weights belongs to, "" outside layers.

    Weights are parameters, buffers and tensors that modules derived from them after loading; memory that layers share
    is not counted.
    """
    owners: dict[int, str] = {}
    shared = pools | {
        trace.key(layer.topk_indices_buffer)
        for layer in attention_layers(model)
        if layer.topk_indices_buffer is not None
    }
    for path, module in model.named_modules():
        layer = ".".join(path.split(".")[:2]) if path.startswith("layers.") else ""
        for tensor in _tensors(vars(module)):
            key = trace.key(tensor)
            if key is not None and key not in shared:
                owners[key] = layer
    return owners


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Tensors in containers and dataclasses, but not in modules."""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            yield value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module):
            yield from _tensors(vars(value))
