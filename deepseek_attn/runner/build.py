"""Building a runner: checks, the model with its weights, caches, scratch memory, and CUDA graphs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from threading import Thread
from typing import TypeVar

import torch
from torch import nn

from deepseek_attn.cache.layout import CacheLayout, make_layout
from deepseek_attn.cache.manager import CacheManager
from deepseek_attn.cache.pools import CachePools
from deepseek_attn.cache.prefix import PrefixCache
from deepseek_attn.checkpoint.headers import check_headers
from deepseek_attn.checkpoint.loader import load_model
from deepseek_attn.checkpoint.source import CheckpointSource
from deepseek_attn.config.defaults import DEFAULT_MAX_ROLLBACK
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import Numerics, numerics_for, usual_preset
from deepseek_attn.config.options import (
    as_list,
    check_sizes,
    explain_out_of_memory,
    pick_device,
    pick_dtype,
)
from deepseek_attn.config.trailing import TrailingPart
from deepseek_attn.config.v41 import DeepseekV41Config
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.dispatch import problem_on
from deepseek_attn.layers.engram import Engram, EngramTables
from deepseek_attn.layers.expert_memory import DISK, GPU, ExpertMemory
from deepseek_attn.layers.launch import environment
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.models.block import AttentionStack, layer_specs
from deepseek_attn.models.families import Family, get_family
from deepseek_attn.runner.ahead.compilation import compiling_ahead
from deepseek_attn.runner.ahead.request import RunnerRequest, RunnerSizes
from deepseek_attn.runner.cpu_threads import CpuThreads
from deepseek_attn.runner.drafting import BlockDrafter, Drafter, MTPDrafter, check_drafts
from deepseek_attn.runner.expert_files import ExpertFiles, check_cache
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.host_experts import hold_experts
from deepseek_attn.runner.loaded import LoadedModel, Model
from deepseek_attn.runner.sequence import TokenLimits
from deepseek_attn.runner.tapes import DecodeTapes
from deepseek_attn.runner.trailing import TrailingRows
from deepseek_attn.utils.device import available_memory, total_memory
from deepseek_attn.utils.torch_state import in_own_torch_state
from deepseek_attn.utils.workspace import Workspace

Runner = TypeVar("Runner", bound=LoadedModel)
COMPILE_AHEAD = os.environ.get("DEEPSEEK_ATTN_COMPILE_AHEAD", "0") != "0"


@torch.inference_mode(False)  # caches are written outside of inference mode too
@in_own_torch_state
def build_runner(
    cls: type[Runner],
    config: AnyConfig,
    source: CheckpointSource,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    numerics: str | Numerics | None = None,
    index_keys: str | None = None,
    backend: str = "auto",
    decode_backend: str | None = None,
    prefill_backend: str | None = None,
    fp8_mode: str = "auto",
    prefill_workspace_rows: int | None = None,
    layers: Iterable[int] | None = None,
    attention_only: bool = False,
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 2048,
    max_rollback: int = DEFAULT_MAX_ROLLBACK,
    max_snapshots: int = 0,
    kv_cache_bytes: int | None = None,
    expert_memory: str = GPU,
    expert_cache_bytes: int | None = None,
    cuda_graphs: bool | None = None,
    deterministic: bool = False,
    parallel: Parallel | None = None,
    expected_drafts: int = 0,
    approximate_prefill: bool = False,
    compile_ahead: bool = COMPILE_AHEAD,
    progress: bool = True,
) -> Runner:
    """Builds the model, loads it tensor by tensor, allocates the caches and reserves scratch memory.

    The keyword arguments are those of `RunnerOptions`.

    Raises:
        ValueError: lists every problem of the options, or of the tensors of ``source``.
    """
    device = pick_device(device)
    dtype = pick_dtype(dtype, device)
    numerics = numerics_for(config, numerics or usual_preset(device.type == "cuda"), index_keys)
    parallel = parallel or Parallel.single()
    attention = AttentionOptions(
        backend, decode_backend, prefill_backend, fp8_mode, prefill_workspace_rows, deterministic
    )
    keys = None if attention.reference_only or problem_on(device) else _prepare_keys()
    experts = ExpertMemory(expert_memory, expert_cache_bytes)
    family = get_family(config, numerics, dtype, device, attention, parallel, experts)
    limits = TokenLimits.of(config, max_model_len)
    max_model_len = limits.max_model_len
    layers = None if layers is None else as_list(layers, "layers: numbers of layers")
    sizes = (max_model_len, max_num_seqs, max_num_batched_tokens, max_rollback)
    check_sizes(config, layers, *sizes, max_snapshots, kv_cache_bytes)

    def layout_of(model: nn.Module) -> CacheLayout:
        return make_layout(config, family.numerics, dtype, *sizes, layer_specs(model), max_snapshots, kv_cache_bytes)

    canonical = family.canonical(source)
    check_headers(config, canonical, layers, attention_only)
    request = None
    if compile_ahead and _compiles_kernels(family, attention_only):
        request = RunnerRequest.of(
            config,
            canonical.entries(),
            layers,
            numerics=family.numerics,
            dtype=dtype,
            attention=attention,
            sizes=RunnerSizes(*sizes),
            gpu=gpu(device),
            cuda_graphs=cuda_graphs,
            num_drafts=expected_drafts,
            parallel=parallel,
            experts=experts,
        )
    with compiling_ahead(request) as compilation:
        model = family.build(layers, attention_only, max_model_len)
        layout = layout_of(model)
        workspace_rows = family.workspace_rows(model, layout)  # refuses options before weights are loaded
        _trailing_parts(family, model, approximate_prefill)
        if expected_drafts:
            stored = any(name.startswith("mtp.") for name in canonical.entries())
            stages = 0 if isinstance(model, AttentionStack) or not stored else len(model.mtp)
            check_drafts(expected_drafts, stages, config, layout)
        check_cache(model, canonical.entries(), experts)
        for explained, needed in (
            (_explained(layout), layout.nbytes()),
            (_explained_scratch(layout, workspace_rows), workspace_rows * family.spec.head_dim * dtype.itemsize),
        ):
            with explained:
                if needed > total_memory(device):
                    raise MemoryError  # before weights are loaded
        memory, host_memory = load_memory(device, parallel)
        report = load_model(model, canonical, layers, attention_only, progress, memory, host_memory)
        if not isinstance(model, AttentionStack) and not report.mtp_loaded and len(model.mtp):
            model.mtp.clear()
            layout = layout_of(model)
        model.eval()
        with _explained(layout):
            pools = CachePools(layout, device)
        manager = CacheManager(pools)
        with _explained_scratch(layout, workspace_rows):
            workspace = _bind_layers(family, model, pools)
        tables = _engram_tables(config, canonical, model, device)
        expert_files = ExpertFiles.open(model, experts, device, max_num_batched_tokens, local_ranks(parallel))
        expert_rows = hold_experts(model, config, experts, device, max_num_batched_tokens)
        runner = cls(
            config=config,
            numerics=family.numerics,
            dtype=dtype,
            device=device,
            model=model,
            report=report,
            layout=layout,
            pools=pools,
            workspace=workspace,
            manager=manager,
            limits=limits,
            builder=family.metadata_builder(model, pools, mtp=False),
            drafter=_drafter(family, model, pools, manager),
            prefixes=PrefixCache(manager) if max_snapshots else None,
            graphs=_decode_graphs(cuda_graphs, family, model, layout, tables),
            tapes=_decode_tapes(cuda_graphs, family, model, layout, tables),
            tables=tables,
            expert_files=expert_files,
            expert_rows=expert_rows,
            reference_only=family.reference_only,
            graph_problem=family.graph_problem(),
            deterministic=deterministic,
            trailing=_trailing_rows(family, model, pools, approximate_prefill),
            parallel=parallel,
            cpu_threads=CpuThreads(model, config, deterministic),
            compilation=compilation,
        )
    if compilation is not None:
        weakref.finalize(runner, compilation.close)
    if keys is not None:
        keys.join()  # a launch before its end would compute the same again
    return runner


def load_memory(device: torch.device, parallel: Parallel) -> tuple[int, int]:
    """Bytes of memory for weights on the device, and for weights in host memory, of one of the ranks of a host.

    Rank 0 measures for all ranks, before any of them loads. The device "meta" counts as large enough for any model.
    """
    if device.type == "meta":
        return total_memory(device), total_memory(device)
    host = parallel.share(available_memory()) // local_ranks(parallel)
    return (host if device.type == "cpu" else total_memory(device)), host


def local_ranks(parallel: Parallel) -> int:
    """Ranks on this host."""
    return environment("LOCAL_WORLD_SIZE", parallel.world)


def _prepare_keys() -> Thread:
    """See `prepare_keys`."""
    from deepseek_attn.runner.ahead.recording import prepare_keys

    return prepare_keys()


def _compiles_kernels(family: Family, attention_only: bool) -> bool:
    """Whether the kernels of a runner's steps can be compiled ahead: on a GPU, by the first rank of each machine."""
    first, device = environment("LOCAL_RANK", family.parallel.rank) == 0, family.device
    on_gpu = device.type == "cuda" and not problem_on(device)
    return on_gpu and first and not attention_only and not family.reference_only


def _engram_tables(
    config: AnyConfig, source: CheckpointSource, model: Model, device: torch.device
) -> EngramTables | None:
    layers = {module.layer: module for module in model.modules() if isinstance(module, Engram)}
    if not layers or not isinstance(config, DeepseekV41Config):
        return None
    numbers = source.token_numbers(config.memory.engram_compressed_vocab_size, config.vocab_size)
    return EngramTables(config.memory, layers, numbers, device)


def _explained(layout: CacheLayout) -> AbstractContextManager[None]:
    """Context that explains a lack of memory for the caches."""
    sizes = (
        f"{layout.nbytes():,} bytes of caches for max_num_seqs={layout.max_num_seqs}, "
        f"max_model_len={layout.max_model_len}, max_num_batched_tokens={layout.max_num_batched_tokens} and "
        f"max_snapshots={layout.max_snapshots}"
    )
    return explain_out_of_memory(
        sizes, "lower these, or set a smaller kv_cache_bytes; `deepseek-attn plan` adds up their sizes"
    )


def _explained_scratch(layout: CacheLayout, workspace_rows: int) -> AbstractContextManager[None]:
    """Context that explains a lack of memory for the largest scratch memory of a step."""
    steps = f"scratch memory of steps of max_num_batched_tokens={layout.max_num_batched_tokens}"
    if not workspace_rows:
        return explain_out_of_memory(steps, "lower it")
    return explain_out_of_memory(f"{steps} and prefill_workspace_rows={workspace_rows}", "lower these")


def _bind_layers(family: Family, model: Model, pools: CachePools) -> Workspace:
    """Gives the layers their caches, and a workspace of the largest scratch memory any of them can need."""
    workspace = Workspace(family.device)
    family.bind(model, pools, workspace)
    workspace.lock()
    return workspace


def _drafter(family: Family, model: Model, pools: CachePools, manager: CacheManager) -> Drafter | None:
    """Drafter over the MTP layer or the DSpark stages of a model; None without any."""
    if isinstance(model, AttentionStack) or not len(model.mtp):
        return None
    drafter_class = MTPDrafter if family.config.dspark is None else BlockDrafter
    return drafter_class(model, family.metadata_builder(model, pools, mtp=True), manager, family.device)


def _trailing_parts(family: Family, model: Model, approximate: bool) -> tuple[TrailingPart, ...]:
    """`Family.trailing_parts`; ValueError if the model has none and prefill is to be approximate."""
    parts = () if isinstance(model, AttentionStack) else family.trailing_parts(model, approximate)
    if approximate and not parts:
        raise ValueError(
            "approximate_prefill=True is for DeepSeek-V4.1, whose upper layers make no entries, without data-parallel "
            "attention; leave it out"
        )
    if approximate and family.options.deterministic:
        raise ValueError(
            "approximate_prefill=True with deterministic=True: its logits depend on where a prompt ends; leave out one"
        )
    return parts


def _trailing_rows(family: Family, model: Model, pools: CachePools, approximate: bool) -> TrailingRows | None:
    """Which rows of prompts upper layers compute; None for a model whose layers compute all rows."""
    parts = _trailing_parts(family, model, approximate)
    if not parts:
        return None
    builder, layout = family.metadata_builder(model, pools, mtp=False), pools.layout
    return TrailingRows(parts, builder, layout.window, layout.max_rollback, approximate)


def _decode_graphs(
    wanted: bool | None, family: Family, model: Model, layout: CacheLayout, tables: EngramTables | None
) -> DecodeGraphs | None:
    """Decode steps as CUDA graphs, or None.

    ``wanted`` None: where they can be; True: ValueError where they cannot.
    """
    problem = family.graph_problem()
    if isinstance(model, AttentionStack):
        problem = "there are attention layers only (attention_only=True)"
    elif family.experts.kind == DISK:
        problem = "with expert_memory='disk' the host waits for the routing of each layer"
    if wanted and problem:
        raise ValueError(f"cuda_graphs=True: {problem}; leave it out to run every step eagerly")
    if problem or wanted is False or isinstance(model, AttentionStack):
        return None
    return DecodeGraphs(model, layout, family.device, engram=tables)


def _decode_tapes(
    wanted: bool | None, family: Family, model: Model, layout: CacheLayout, tables: EngramTables | None
) -> DecodeTapes | None:
    """Decode steps of one token on a CPU, as tapes; None where steps wait for other ranks, or read files."""
    if wanted is False or family.device.type != "cpu" or family.parallel.world > 1:
        return None
    if isinstance(model, AttentionStack) or family.experts.kind != GPU or tables is not None:
        return None
    return DecodeTapes(model, layout)
