"""``deepseek-attn warmup``: compiles the kernels of a model into Triton's cache before any process runs the model."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from deepseek_attn.cli.options import (
    GPU_NAMES,
    HUB_ID,
    add_limits,
    add_numerics_options,
    add_prefill_options,
    attention_options,
    gpu_facts,
)
from deepseek_attn.cli.terminal import show
from deepseek_attn.utils.clock import seconds_since

if TYPE_CHECKING:
    from deepseek_attn.checkpoint.source import TensorInfo
    from deepseek_attn.config.model import AnyConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compiles every kernel that a model can launch within the limits given, whatever batch sizes and "
        "lengths come, into Triton's cache (TRITON_CACHE_DIR). It needs no GPU and no weights. Processes with the same "
        "limits, on a GPU of the same kind, then compile nothing."
    )
    parser.add_argument(
        "--model", required=True, metavar="DIR|ID|NAME", help=f"checkpoint directory, {HUB_ID} or preset"
    )
    add_numerics_options(parser)
    add_limits(parser)
    add_prefill_options(parser)
    parser.add_argument("--speculate", type=int, default=0, metavar="N", help="drafts per step (default: 0)")
    parser.add_argument(
        "--gpu", type=gpu_facts, metavar="GPU",
        help=f"{GPU_NAMES}, or compute capability and multiprocessors, for instance 9.0:132 (default: this machine's)",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: processors less one)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from deepseek_attn.config.defaults import DEFAULT_MAX_MODEL_LEN
    from deepseek_attn.config.numerics import numerics_for
    from deepseek_attn.config.options import check_sizes, pick_dtype
    from deepseek_attn.kernels.common.device import gpu
    from deepseek_attn.kernels.common.dispatch import need_triton
    from deepseek_attn.runner.ahead.compilation import Compilation
    from deepseek_attn.runner.ahead.request import RunnerRequest, RunnerSizes

    need_triton("compiling kernels")
    (config, headers), cuda = read_headers(args.model), torch.device("cuda")
    if args.gpu is None and not torch.cuda.is_available():
        raise ValueError(f"there is no GPU here: name the kind to compile for with --gpu {GPU_NAMES} or 9.0:132")
    length = min(config.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    length = length if args.max_model_len is None else args.max_model_len
    check_sizes(config, None, length, args.max_num_seqs, args.max_num_batched_tokens, 16)
    check_drafts(config, args.speculate, args.max_num_batched_tokens)
    request = RunnerRequest.of(
        config,
        headers,
        numerics=numerics_for(config, args.numerics or "serving", args.index_keys),
        dtype=pick_dtype(args.dtype, cuda),
        attention=attention_options(args),
        sizes=RunnerSizes(length, args.max_num_seqs, args.max_num_batched_tokens, 16),
        gpu=args.gpu or gpu(cuda),
        num_drafts=args.speculate,
    )
    start, compilation = time.perf_counter(), Compilation(request, args.jobs)
    try:
        compilation.wait(progress=True)
    finally:
        compilation.close()
    if message := compilation.message():
        raise RuntimeError(message)
    capability, _ = request.gpu
    show(
        f"{len(compilation.done)} kernels for compute capability {capability[0]}.{capability[1]} are in "
        f"{request.marker().parent}, after {seconds_since(start):.0f} s"
    )
    return 0


def check_drafts(config: AnyConfig, drafts: int, max_num_batched_tokens: int) -> None:
    """Raises ValueError if a runner of this config cannot draft ``drafts`` tokens per step."""
    most = max_num_batched_tokens - 1
    if drafts > most:
        raise ValueError(f"--speculate {drafts}: supported are up to {most} drafts, fewer than tokens of a step")
    if drafts and not config.mtp_layers:
        raise ValueError(f"--speculate {drafts}: the model has no MTP layer")
    if config.dspark is not None and drafts > config.dspark.dspark_block_size:
        most = config.dspark.dspark_block_size
        raise ValueError(f"--speculate {drafts}: dspark_block_size {most} is the most that DSpark drafts")


def read_headers(model: str) -> tuple[AnyConfig, dict[str, TensorInfo]]:
    """The config and tensor headers of a checkpoint, or of the checkpoint that a preset or config would have."""
    from deepseek_attn.checkpoint.hub import PretrainedSource
    from deepseek_attn.checkpoint.names import CanonicalSource
    from deepseek_attn.checkpoint.published import canonical_names
    from deepseek_attn.checkpoint.random import RandomSource
    from deepseek_attn.config.model import ModelConfig, preset_names
    from deepseek_attn.utils.hub import HubModel

    if model in preset_names() and not Path(model).exists():
        source = RandomSource(ModelConfig.from_preset(model))
    elif Path(model).is_file() or not (Path(model).is_dir() or HubModel.parse(model)):
        source = RandomSource(ModelConfig.from_pretrained(model))
    else:
        source = PretrainedSource(model, None, False)
    return source.config, CanonicalSource(source, canonical_names(source.config)).entries()
