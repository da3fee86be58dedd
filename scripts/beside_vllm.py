"""One attention layer beside vLLM 0.33's on Hopper: their outputs compared, then their times.

    python scripts/beside_vllm.py check
    python scripts/beside_vllm.py decode --batches 1,8,32,128 --contexts 8192,131072 --out decode.json
    python scripts/beside_vllm.py prefill --chunks 4096:8192,4096:131072 --out prefill.json

vLLM's class ``DeepseekV4FlashMLAAttention`` runs with its own config, metadata builders, streams and kernels. This
script makes what a server provides: weights, caches, block tables, lengths and the forward context. Both layers have
the weights of one random checkpoint and the same inputs.

``decode`` replays two CUDA graphs in turn, each with the forwards of ``--copies`` layers that have weights and caches
of their own. The step's metadata and FlashMLA's plan are in neither graph. ``prefill`` calls the layers in turn, with
the host ahead of the GPU. ``warm`` calls vLLM's layers once at each point, which fills the caches of its JIT compilers.

vLLM's wheel is needed, and flashinfer-python, apache-tvm-ffi, nvidia-cutlass-dsl[cu13], quack-kernels, pydantic,
msgspec, openai, oss-harmony and compressed-tensors. Stand-ins take the place of packages that a layer does not call.
The last line on standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from bench_humming import DEVICE, report_rows
from compare_checkouts import RATIOS, replay_times
from stand_ins import StandIns
from torch import Tensor
from vllm_reads import start_ranks

from deepseek_attn import ModelConfig, ModelRunner
from deepseek_attn.checkpoint.random import RandomSource, RepeatingSource
from deepseek_attn.checkpoint.source import CheckpointSource
from deepseek_attn.cli.options import numbers
from deepseek_attn.lab.bench.layer import fill_caches, past, static_metadata
from deepseek_attn.lab.bench.timing import captured
from deepseek_attn.models.block import attention_layers
from deepseek_attn.runner.step import step_input

STAND_INS = {
    "aiohttp", "anthropic", "av", "blake3", "cbor2", "cloudpickle", "cpuinfo", "cv2", "depyf", "diskcache", "fastapi",
    "fastsafetensors", "gguf", "humming", "ijson", "instanttensor", "lark", "llguidance", "lmformatenforcer", "mcp",
    "mistral_common", "model_hosting_container_standards", "numba", "nvtx", "opentelemetry", "orjson", "outlines_core",
    "partial_json_parser", "prometheus_client", "prometheus_fastapi_instrumentator", "pybase64", "pythonjsonlogger",
    "setproctitle", "soundfile", "starlette", "tilelang", "tokenspeed_mla", "uvicorn", "uvloop", "watchfiles",
    "xgrammar", "zmq", "vllm.vllm_flash_attn._vllm_fa2_C",
}  # fmt: skip
JOINED = {  # linears of vLLM that are several of the checkpoint's
    "fused_wqa_wkv": ("wq_a", "wkv"),
    "compressor.fused_wkv_wgate": ("compressor.wkv", "compressor.wgate"),
    "indexer.compressor.fused_wkv_wgate": ("indexer.compressor.wkv", "indexer.compressor.wgate"),
}
BATCHED_TOKENS = 8192
BLOCK = 256  # tokens in a block of vLLM's compressed entries
KEY_BYTES, SCALE_BYTES = 576, 8  # of an entry; the scales follow the keys of a page
INDEX_BYTES = 128  # of an index key; its float32 scale follows the keys of a page
CHECKED = ([[700, 1300, 260], [1, 1, 77], [1, 1, 1]], [[127, 128, 129], [1, 1, 1]], [[4090], [1], [1]])


def prepare() -> None:
    """Puts stand-ins in the place of packages that are not installed, and selects vLLM's newer runner."""
    StandIns.of(STAND_INS).install()
    defaults = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
    os.environ.update(defaults | dict(os.environ) | {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    registry = resolve_name("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()  # a subprocess would have no stand-ins


def load(layer: torch.nn.Module, source: CheckpointSource, prefix: str) -> None:
    """Fills a layer of vLLM with the checkpoint's tensors, then has vLLM convert them as after loading."""
    for name, parameter in list(layer.named_parameters()):
        module, _, kind = name.rpartition(".")
        kind = {"weight_scale_inv": "scale"}.get(kind, kind)
        parts = [".".join(filter(None, (prefix, part, kind))) for part in JOINED.get(module, (module,))]
        value, target = torch.cat([source.read(part) for part in parts]), parameter.data
        if target.dtype == torch.float8_e8m0fnu:
            target = target.view(torch.uint8)
        if name == "attn_sink":  # padded heads have none
            target = target.narrow(0, 0, len(value))
        if target.shape != value.shape or (value.dtype == torch.uint8) != (target.dtype == torch.uint8):
            raise ValueError(f"{prefix}.{name}: {value.dtype} {tuple(value.shape)} for vLLM's {tuple(target.shape)}")
        target.copy_(value)
    for module in layer.modules():
        convert = getattr(getattr(module, "quant_method", None), "process_weights_after_loading", None)
        if convert is not None:
            convert(module)


class Peer:
    """vLLM's attention layers of ``config`` with the weights of ``source``, in an engine for so many sequences."""

    def __init__(self, config: ModelConfig, source: CheckpointSource, sequences: int):
        folder = Path(tempfile.mkdtemp(prefix="beside_vllm_"))
        (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
        arguments = resolve_name("vllm.engine.arg_utils:EngineArgs")(
            model=str(folder), dtype="bfloat16", kv_cache_dtype="fp8", block_size=BLOCK, enforce_eager=True,
            max_num_batched_tokens=BATCHED_TOKENS, max_num_seqs=sequences, skip_tokenizer_init=True,
            generation_config="vllm",
        )  # fmt: skip
        self.config = arguments.create_engine_config()
        resolve_name("vllm.v1.worker.workspace:init_workspace_manager")(DEVICE)
        attention = resolve_name("vllm.models.deepseek_v4.nvidia.flashmla:DeepseekV4FlashMLAAttention")
        default = torch.get_default_dtype()
        with self.active(), torch.device(DEVICE):
            start_ranks()  # and bfloat16 as the default dtype
            selected = torch.empty(BATCHED_TOKENS, config.index_topk, dtype=torch.int32, device=DEVICE)
            streams = [torch.cuda.Stream() for _ in range(3)]
            self.layers = []
            for index in range(config.num_hidden_layers):
                self.layers.append(attention(self.config, f"model.layers.{index}.attn", selected, streams))
                load(self.layers[-1], source, f"layers.{index}.attn")
            torch.set_default_dtype(default)

    def active(self) -> Any:
        """The context in which vLLM's classes find their config."""
        return resolve_name("vllm.config:set_current_vllm_config")(self.config)


def holders(layer: Any) -> dict[str, Any]:
    """The modules of a layer that have a cache."""
    found = {"window": layer.swa_cache_layer}
    if layer.compressor is not None:
        found |= {"compressed": layer, "state": layer.compressor.state_cache}
    if layer.indexer is not None:
        found |= {"index": layer.indexer.k_cache, "index_state": layer.indexer.compressor.state_cache}
    return found


class Pages:
    """The block table of one cache: pages of all requests in random order, behind a null block.

    Args:
        spec: vLLM's spec of the cache.
        lengths, new: tokens of each request after the step, and those that the step computes.
    """

    def __init__(self, spec: Any, lengths: list[int], new: list[int]):
        self.size, window = spec.block_size, getattr(spec, "sliding_window", None)
        kept = [length if window is None else min(length, n + window) for length, n in zip(lengths, new, strict=True)]
        spans = [((length - k) // self.size, -(-length // self.size)) for length, k in zip(lengths, kept, strict=True)]
        self.blocks, place = 1 + sum(end - start for start, end in spans), 0
        order = torch.randperm(self.blocks - 1, device=DEVICE).int() + 1
        width = -(-max(end for _, end in spans) // 32) * 32
        self.table = torch.zeros(len(lengths), width, dtype=torch.int32, device=DEVICE)
        for row, (start, end) in enumerate(spans):
            self.table[row, start:end] = order[place : place + end - start]
            place += end - start

    def slots(self, positions: list[Tensor]) -> Tensor:
        """int64 slots of the tokens at these positions of each request."""
        places = [
            row[p // self.size].long() * self.size + p % self.size for row, p in zip(self.table, positions, strict=True)
        ]
        return torch.cat(places)


def filled_cache(spec: Any, name: str, blocks: int) -> Tensor:
    """A cache ``[blocks, 1, states, bytes or values]`` as ``bind_kv_cache`` takes it, with finite random entries."""
    page, states, content = spec.page_size_bytes, spec.num_states, spec.state_content_size_bytes
    raw = torch.randint(0, 256, (blocks, page), dtype=torch.uint8, device=DEVICE)
    raw.bitwise_and_(0x9F).bitwise_or_(0x20)  # moderate values, as FP8 and as bfloat16
    if name in ("state", "index_state"):
        raw.view(torch.float32).normal_()
    elif name == "index":
        scales = torch.full((states,), 0.02, dtype=torch.float32, device=DEVICE).view(torch.uint8)
        raw[:, states * INDEX_BYTES : states * INDEX_BYTES + len(scales)] = scales
    else:
        raw[:, states * KEY_BYTES : states * (KEY_BYTES + SCALE_BYTES)].random_(125, 128)
    return raw.as_strided((blocks, 1, states, content), (page, page, content, 1)).view(spec.dtype)


class PeerStep:
    """A step of layers of vLLM of one kind, with caches of their own.

    Args:
        lengths, new: see `Pages`.
        before: an earlier step of the same requests, whose caches and block tables are kept.
    """

    def __init__(
        self, peer: Peer, layers: list[Any], lengths: list[int], new: list[int], before: PeerStep | None = None
    ):
        self.peer, self.layers, self.pages, self.metadata = peer, layers, before.pages if before else {}, {}
        starts = torch.tensor([0, *new], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        sizes = torch.tensor(lengths, dtype=torch.int32, device="cpu")
        spans = zip(lengths, new, strict=True)
        positions = [torch.arange(length - n, length, dtype=torch.int64, device=DEVICE) for length, n in spans]
        self.positions = torch.cat(positions)
        with peer.active():
            for name, holder in holders(layers[0]).items():
                spec = holder.get_kv_cache_spec(peer.config)
                if before is None:
                    self.pages[name] = Pages(spec, lengths, new)
                pages = self.pages[name]
                common = resolve_name("vllm.v1.attention.backend:CommonAttentionMetadata")(
                    query_start_loc=starts.to(DEVICE), query_start_loc_cpu=starts, seq_lens=sizes.to(DEVICE),
                    seq_lens_cpu_upper_bound=sizes, num_reqs=len(new), num_actual_tokens=sum(new),
                    max_query_len=max(new), max_seq_len=max(lengths), block_table_tensor=pages.table,
                    slot_mapping=pages.slots(positions), positions=self.positions,
                )  # fmt: skip
                builder = holder.get_attn_backend().get_builder_cls()
                width = {"block_table_width": pages.table.shape[1]} if name == "index" else {}
                built = builder(spec, [holder.prefix], peer.config, DEVICE, **width).build(0, common)
                for own in (holders(layer)[name] for layer in layers):
                    self.metadata[own.prefix] = built
                    if before is None:
                        own.bind_kv_cache(filled_cache(spec, name, pages.blocks))

    @contextmanager
    def context(self) -> Iterator[None]:
        """Where vLLM's layers find the step's metadata."""
        create, override = map(
            resolve_name, (f"vllm.forward_context:{name}_forward_context" for name in ("create", "override"))
        )
        with override(create(self.metadata, self.peer.config)), torch.inference_mode():
            yield

    def free(self) -> None:
        for holder in (holder for layer in self.layers for holder in holders(layer).values()):
            holder.kv_cache = torch.empty(0, dtype=torch.uint8, device=DEVICE)
        torch.cuda.empty_cache()


class Comparison:
    """``copies`` layers of each of ``kinds``, of both libraries.

    Args:
        limits: ``max_model_len`` and ``max_num_seqs``.
    """

    def __init__(self, model: str, kinds: list[str], copies: int, limits: dict[str, int]):
        self.model, self.kinds, self.copies, self.limits = model, kinds, copies, limits
        ratios = [RATIOS[kind] for kind in kinds for _ in range(copies)]
        self.config = ModelConfig.from_preset(model).replace(
            num_hidden_layers=len(ratios), compress_ratios=ratios, num_nextn_predict_layers=0, num_hash_layers=0
        )
        self.source = (RepeatingSource if copies > 1 else RandomSource)(self.config)
        self.peer = Peer(self.config, self.source, limits["max_num_seqs"])

    def own_runner(self, **options: Any) -> ModelRunner:
        return ModelRunner.from_source(
            self.config, self.source, device="cuda", attention_only=True, progress=False,
            max_num_batched_tokens=BATCHED_TOKENS, **self.limits, **options,
        )  # fmt: skip

    def of_kind(self, kind: str, layers: list[Any]) -> list[Any]:
        start = self.kinds.index(kind) * self.copies
        return layers[start : start + self.copies]

    def inputs(self, tokens: int) -> Tensor:
        return torch.randn(self.copies, tokens, self.config.hidden_size, device=DEVICE, dtype=torch.bfloat16)

    def times(self, points: list[tuple[list[int], list[int]]], repeats: int) -> Iterator[dict[str, Any]]:
        """Microseconds of a layer of each side, at each point and for each kind."""
        runner = self.own_runner(numerics="serving", dtype="bfloat16")
        fill_caches(runner)
        for lengths, new in points:
            caches = [past(runner, length - n) for length, n in zip(lengths, new, strict=True)]
            runner.manager.reserve(list(zip(caches, new, strict=True)))
            decode, x = max(new) == 1, self.inputs(sum(new))
            step = static_metadata(runner, caches) if decode else own_metadata(runner, caches, new)
            for kind in self.kinds:
                peer = PeerStep(self.peer, self.of_kind(kind, self.peer.layers), lengths, new)
                ours = self.of_kind(kind, attention_layers(runner.model.layers))
                sides: list[list[Callable[[], object]]] = [
                    [partial(layer, peer.positions, x[i]) for i, layer in enumerate(peer.layers)],
                    [partial(layer, x[i], step.positions, step) for i, layer in enumerate(ours)],
                ]
                with peer.context(), runner.op_settings():
                    found = (
                        replay_times([*map(captured, sides)], repeats) if decode else call_times(sides, repeats // 3)
                    )
                peer.free()
                row = {
                    "model": self.model.removeprefix("v4_"), "phase": "decode" if decode else "prefill", "kind": kind,
                    "batch": len(new), "tokens": new[0], "context": max(lengths), "copies": self.copies,
                }  # fmt: skip
                for side, total in zip(("vllm", "ours"), found, strict=True):
                    each = [round(us / self.copies, 2) for us in total]
                    row |= {f"{side}_us": round(statistics.median(each), 2), f"{side}_spread": [min(each), max(each)]}
                yield row
            for cache in caches:
                runner.manager.free(cache)

    def warm(self, points: list[tuple[list[int], list[int]]]) -> Iterator[dict[str, Any]]:
        """Calls a layer of vLLM of each kind once at each point."""
        for lengths, new in points:
            for kind in self.kinds:
                start = time.perf_counter()
                peer = PeerStep(self.peer, self.of_kind(kind, self.peer.layers), lengths, new)
                with peer.context():
                    finite = bool(peer.layers[0](peer.positions, self.inputs(sum(new))[0]).isfinite().all())
                peer.free()
                seconds = round(time.perf_counter() - start, 1)
                yield {
                    "kind": kind,
                    "new": new[0],
                    "batch": len(new),
                    "context": max(lengths),
                    "finite": finite,
                    "s": seconds,
                }

    def check(self, steps: list[list[int]], runners: list[ModelRunner]) -> Iterator[dict[str, Any]]:
        """Relative differences of outputs after each step.

        Args:
            steps: new tokens of each request in each step; caches are empty before the first.
            runners: this library's as timed, and one that computes in float32.
        """
        caches = [[runner.manager.create() for _ in steps[0]] for runner in runners]
        total = [sum(each) for each in zip(*steps, strict=True)]
        whole = {kind: PeerStep(self.peer, self.of_kind(kind, self.peer.layers), total, total) for kind in self.kinds}
        done = [0] * len(total)
        for new in steps:
            done = [a + b for a, b in zip(done, new, strict=True)]
            x = self.inputs(sum(new))[0]
            for runner, held in zip(runners, caches, strict=True):
                runner.manager.reserve(list(zip(held, new, strict=True)))
            own_steps = [own_metadata(runner, held, new) for runner, held in zip(runners, caches, strict=True)]
            for kind in self.kinds:
                peer = PeerStep(self.peer, whole[kind].layers, done, new, whole[kind])
                outputs = []
                for runner, step in zip(runners, own_steps, strict=True):
                    layer = self.of_kind(kind, attention_layers(runner.model.layers))[0]
                    with torch.inference_mode(), runner.op_settings():
                        outputs.append(layer(x.to(runner.dtype), step.positions, step))
                with peer.context():
                    theirs = peer.layers[0](peer.positions, x)
                ours, exact = outputs
                pairs = {
                    "ours_to_vllm": (ours, theirs),
                    "ours_to_float32": (ours, exact),
                    "vllm_to_float32": (theirs, exact),
                }
                yield {"kind": kind, "new": new, "lengths": done} | {
                    name: difference(*pair) for name, pair in pairs.items()
                }
            for runner, held in zip(runners, caches, strict=True):
                for cache, n in zip(held, new, strict=True):
                    runner.manager.commit(cache, n)
        for runner, held in zip(runners, caches, strict=True):
            for cache in held:
                runner.manager.free(cache)


def own_metadata(runner: ModelRunner, caches: list[Any], new: list[int]) -> Any:
    return runner.builder.build(step_input(runner.manager, caches, new, runner.decode_query_len))


def difference(a: Tensor, b: Tensor) -> float:
    return round(float((a.float() - b.float()).norm() / b.float().norm()), 4)


def call_times(sides: list[list[Callable[[], object]]], repeats: int) -> list[list[float]]:
    """Microseconds of all calls of each side, in turn; the GPU waits until the host has launched them."""
    times: list[list[float]] = [[] for _ in sides]
    for index in range(max(repeats, 4) + 2):
        for calls, found in zip(sides, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(40_000_000)
            start.record()
            for call in calls:
                call()
            end.record()
            torch.cuda.synchronize()
            if index >= 2:
                found.append(start.elapsed_time(end) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=(__doc__ or "").split("\n")[0],
        epilog="Needs a GPU of compute capability 9.0 and vLLM 0.33.0.",
    )
    parser.add_argument("phase", choices=("check", "decode", "prefill", "warm"))
    parser.add_argument("--model", choices=("v4_flash", "v4_pro"), default="v4_flash", help="preset")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(RATIOS), help="comma-separated")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 128], help="decode; comma-separated")
    parser.add_argument("--contexts", type=numbers, default=[8192, 131072], help="decode; comma-separated")
    parser.add_argument("--chunks", default="4096:8192,4096:131072", help="prefill; tokens:length after them")
    parser.add_argument("--copies", type=int, default=4, help="layers of a kind, each with its own weights and caches")
    parser.add_argument("--repeats", type=int, default=30, help="replays of each graph; the median counts")
    parser.add_argument("--out", type=Path, help="keep the JSON document here, after each point")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU: both sides' kernels are for NVIDIA GPUs")
    if find_spec("vllm") is None:
        parser.error("vLLM is not installed: pip install --no-deps vllm==0.33.0, and see the head of this script")
    prepare()
    torch.manual_seed(0)
    decode = [([context - i for i in range(batch)], [1] * batch) for context in args.contexts for batch in args.batches]
    chunks = [[int(part) for part in chunk.split(":")] for chunk in args.chunks.split(",") if chunk]
    prefill = [([length], [tokens]) for tokens, length in chunks]
    points = {"decode": decode, "prefill": prefill, "warm": decode + prefill, "check": []}[args.phase]
    lengths = [max(lengths) for lengths, _ in points] or [max(map(sum, zip(*steps, strict=True))) for steps in CHECKED]
    limits = {"max_model_len": max(lengths), "max_num_seqs": max([len(new) for _, new in points], default=3)}
    with torch.inference_mode():
        both = Comparison(args.model, args.kinds, args.copies if args.phase in ("decode", "prefill") else 1, limits)
        if args.phase == "check":
            served = both.own_runner(numerics="serving", dtype="bfloat16")
            runners = [served, both.own_runner(numerics="exact", dtype="float32", backend="reference")]
            rows = (row for steps in CHECKED for row in both.check(steps, runners))
        else:
            rows = both.warm(points) if args.phase == "warm" else both.times(points, args.repeats)
        linear = type(both.peer.layers[0].wq_b.quant_method.fp8_linear).__name__
        report_rows("vllm", rows, args.out, vllm=resolve_name("vllm:__version__"), linear=linear)


if __name__ == "__main__":
    main()
