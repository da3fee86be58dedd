"""Measured rates of machines: the time of each stage of a step relative to its floor, and of exchanges between GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from deepseek_attn.config.model import AnySpec
from deepseek_attn.estimates.floors import EXPERTS, HEAD, NORMS, ROUTING, FloorWork
from deepseek_attn.kernels.common.device import GPU

FEW_ROWS = 256  # tokens of a step from which other kernels take over


@dataclass(frozen=True)
class StageCost:
    """Time of one call of a stage: ``launch_us`` and its floors of bytes and FLOPs, each times a ratio.

    Least squares of the relative error over measured calls. The ratios measure how far kernels are from the peak rates,
    and how far bytes and products overlap; ``launch_us`` is the time of the chain of launches alone.
    """

    launch_us: float
    bytes: float
    flops: float

    def microseconds(self, work: FloorWork, rates: Mapping[str, float]) -> float:
        floor = work.floor(rates)
        return self.launch_us + self.bytes * floor.bytes_us + self.flops * floor.flops_us


@dataclass(frozen=True)
class Exchange:
    """Time of a message between GPUs: ``latency_us``, ``hop_us`` per further GPU on the way, and bytes at a rate."""

    latency_us: float
    bytes_per_second: float
    hop_us: float = 0.0


@dataclass(frozen=True)
class Machine:
    """Hosts of GPUs of one kind.

    Attributes:
        gpu: kind of GPU that kernels are chosen for; memory: bytes of a GPU.
        context, modules, nccl_memory: bytes taken by CUDA's context, by loaded kernels and, with several ranks, by NCCL
            and torch's symmetric memory.
        rates: peak rates, as `FloorWork.floor` takes them; ``bus``: bytes/s from pinned host memory to a GPU, as the
            kernel that fetches experts reads it; ``copy_engine``: as the GPU's copy engine does.
        decode, prefill: costs of attention, by kind of V4's layers; see `attention`.
        few, many: costs of all other stages, up to `FEW_ROWS` tokens and beyond.
        step_us: once per step: embedding, metadata, greedy tokens.
        peers: sums that ranks exchange themselves; nccl: through NCCL, within a host; network: between hosts, per GPU.
        sources: where the figures are from.
    """

    name: str
    gpu: GPU
    memory: int
    context: int
    modules: int
    nccl_memory: int
    rates: Mapping[str, float]
    decode: Mapping[str, StageCost]
    prefill: Mapping[str, StageCost]
    few: Mapping[str, StageCost]
    many: Mapping[str, StageCost]
    step_us: float
    peers: Exchange
    nccl: Exchange
    network: Exchange
    sources: tuple[str, ...]

    def attention(self, spec: AnySpec, decode: bool) -> StageCost:
        """Cost of a layer's attention: one of V4's three kinds, by whether the layer reads entries and selects them."""
        kind = "C4A" if spec.has_indexer else "C128A" if spec.ratio else "SWA"
        return (self.decode if decode else self.prefill)[kind]


H200 = Machine(
    name="h200",
    gpu=GPU((9, 0), 132),
    memory=150_109_880_320,
    context=552_000_000,
    modules=250_000_000,
    nccl_memory=1_400_000_000,
    rates={"copy": 4.264e12, "bf16": 797e12, "fp8": 1465e12, "bus": 50.5e9, "copy_engine": 55.3e9},
    decode={
        "SWA": StageCost(25.2, 1.04, 0.89),
        "C128A": StageCost(25.2, 1.04, 0.89),
        "C4A": StageCost(39.8, 1.06, 0.99),
    },
    prefill={
        "SWA": StageCost(0.0, 6.88, 1.49),
        "C128A": StageCost(0.0, 6.88, 1.49),
        "C4A": StageCost(54.5, 0.0, 1.65),
    },
    few={
        EXPERTS: StageCost(20.0, 0.97, 0.0),
        NORMS: StageCost(12.0, 0.0, 100.0),
        ROUTING: StageCost(5.5, 0.0, 5.0),
        HEAD: StageCost(0.0, 0.99, 0.28),
    },
    many={
        EXPERTS: StageCost(26.0, 1.08, 1.9),
        NORMS: StageCost(14.6, 2.2, 0.0),
        ROUTING: StageCost(7.0, 0.0, 7.5),
        HEAD: StageCost(0.0, 1.04, 0.27),
    },
    step_us=60.0,
    peers=Exchange(2.0, 330e9),
    nccl=Exchange(7.0, 270e9, 0.6),
    network=Exchange(3.6, 45e9, 2.7),
    sources=(
        "attention: docs/data/h200_beside_vllm.json (decode; fits within 9 %) and h200_layers_prefill.json (15 %), "
        "V4-Flash and V4-Pro",
        "FP4 index keys: not fitted; they take as long as FP8 ones on an H200",
        "V3.2 and V4.1: not measured; as far from their floors as V4's layers with or without an indexer",
        "other stages: V4-Flash, 8 layers with 256 experts on one H200, batches 1 to 128 and 4096 and 8192 tokens "
        "(docs/data/h200_model.json); experts of up to 256 tokens: docs/data/h200_experts.json",
        "CUDA's context and kernels: read off one H200 with 186 kernels; NCCL: what two H200s took beyond",
        "small messages and NCCL on two H200s: docs/data/h200_ranks.json",
        "copies from host memory: 50.5 GB/s by a kernel on one H200 (docs/data/h200_host_experts.json), 48 to 50 on "
        "another (h200_host_80gb.json), and 55.3 by the copy engine; steps at batches 1 to 16 are as long as those of "
        "all experts resident and the copies, within 7 %, prompts as the longer of both, within 15 %",
        "more GPUs of a host, and hosts (400 Gb/s per GPU): not measured; latencies as in NCCL's src/graph/tuning.cc",
    ),
)
H100 = replace(
    H200,
    name="h100",
    memory=85_017_493_504,
    rates={"copy": 3.02e12, "bf16": 783e12, "fp8": 1419e12, "bus": 52.0e9, "copy_engine": 54.9e9},
    many={**H200.many, NORMS: StageCost(8.0, 1.63, 0.0), ROUTING: StageCost(4.0, 0.0, 2.4)},
    sources=(
        "memory, rates, hyper-connections and norms, and routing of many tokens: one H100 with 80 GB (SXM); copies "
        "from host memory: another one (docs/data/h100_host_model.json)",
        "other stages: ratios of an H200; steps of V4-Flash, 8 layers, on one H100, batches 1 to 128 and 4096 and 8192 "
        "tokens are predicted within 17 % (docs/data/h100_model.json)",
        "FP4 index keys: ratios of FP8 ones, which predict more saved in decode than was measured, and nothing of what "
        "they cost in prefill (docs/data/h100_beside_vllm.json)",
        "context, kernels and exchanges: as of H200s, not measured",
    ),
)


@dataclass(frozen=True)
class Processor:
    """One thread of a CPU, in values per second.

    Attributes:
        dequantized: FP4 and FP8 weights to float32; multiplied: float32 weights with one row.
        products: float32 weights with 16 rows, times the rows.
    """

    dequantized: float
    multiplied: float
    products: float


CPU = Processor(dequantized=420e6, multiplied=5.0e9, products=28e9)
"""A virtual core of 2.4 GHz: FP4 weights of 2048 x 4096 take 19 ms, FP8 ones 20 ms, their product 1.6 ms with one row,
4.7 ms with 16."""

MACHINES = {machine.name: machine for machine in (H200, H100)}
