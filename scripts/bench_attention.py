"""Decode attention over 584-byte records on a GPU: the Triton kernels beside FlashMLA, in one run.

    python scripts/bench_attention.py --out h200_attention_decode.json

Each time is the median over replays of a CUDA graph that holds one launch per input set, divided by the number of
sets; the spread is the difference between the slowest and the fastest replay. Input sets together are larger than the
L2, and every set has queries, indices and random slots of its own. FlashMLA's plan is made before the graph is
captured, so it is not in its times. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from deepseek_attn.cache.records import Fp8DsMlaRecord
from deepseek_attn.impls import flash_mla
from deepseek_attn.kernels.attention import PagedKeys
from deepseek_attn.kernels.attention.reference import sparse_attention_paged as reference
from deepseek_attn.kernels.attention.sparse_attention import sparse_attention_paged

RECORD = Fp8DsMlaRecord(448, 64)
SCALE = 512**-0.5
ENTRIES, PAGES = 64, 4096
ROWS = {  # heads, keys of the window and of the compressed pool
    "SWA, Flash": (64, (128,)),
    "C4A, Flash": (64, (128, 512)),
    "C128A at 128K, Flash": (64, (128, 1024)),
    "C128A at 1M, Flash": (64, (128, 8192)),
    "SWA, Pro": (128, (128,)),
    "C4A, Pro": (128, (128, 1024)),
    "C128A at 1M, Pro": (128, (128, 8192)),
    "C4A, Flash, 8 of 64 heads": (8, (128, 512)),
    "C4A, Pro, 16 of 128 heads": (16, (128, 1024)),
}
BATCHES = (1, 8, 32, 128, 256)
CHECKED = 16  # queries of a set that are compared with float32


def make_pool() -> Tensor:
    """Every slot holds a random entry: no two input sets share what they read, but by chance."""
    pool = RECORD.allocate(PAGES, ENTRIES, "cuda")
    for slots in torch.arange(PAGES * ENTRIES, device="cuda").split(1 << 15):
        RECORD.insert(pool, ENTRIES, slots, torch.randn(len(slots), RECORD.dim, device="cuda"))
    return pool


def input_sets(pools: list[Tensor], batch: int, heads: int, keys: tuple[int, ...]) -> list[tuple]:
    """``(q, sources)`` of as many sets as exceed the L2 cache (50 MB) together, at least 4."""
    size = batch * (RECORD.entry_bytes * sum(keys) + 2 * 2 * heads * RECORD.dim)
    sets = []
    for _ in range(min(100, max(4, 1 + 100_000_000 // size))):
        q = torch.randn(batch, heads, RECORD.dim, device="cuda").bfloat16()
        sources = []
        for pool, width in zip(pools, keys, strict=False):
            indices = torch.randint(PAGES * ENTRIES, (batch, width), device="cuda", dtype=torch.int32)
            sources.append(PagedKeys(RECORD, pool, ENTRIES, indices, torch.full_like(indices[:, 0], width)))
        sets.append((q, sources))
    return sets


def pools_of(sources: list[PagedKeys], rows: slice = slice(None)) -> list[PagedKeys]:
    return [s._replace(indices=s.indices[rows], lens=s.lens[rows]) for s in sources]


def time_us(run: Callable[[tuple], object], sets: list[tuple], replays: int) -> tuple[float, float]:
    """Median and spread, in microseconds per launch."""
    run(sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in sets:
            run(inputs)
    times = []
    for replay in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(start.elapsed_time(end) * 1e3 / len(sets))
    return statistics.median(times), max(times) - min(times)


def measure(pools: list[Tensor], name: str, batch: int, replays: int) -> dict:
    heads, keys = ROWS[name]
    sets = input_sets(pools, batch, heads, keys)
    q, sources = sets[0]
    sink, schedule = torch.randn(heads, device="cuda"), flash_mla.new_schedule()
    runs = {
        "triton": lambda inputs: sparse_attention_paged(inputs[0], pools_of(inputs[1]), SCALE, sink),
        "flashmla": lambda inputs: flash_mla.sparse_decode(*inputs, SCALE, sink, schedule),
    }
    moved = batch * (RECORD.entry_bytes * sum(keys) + 2 * 2 * heads * RECORD.dim + 4 * sum(keys))
    flop = 4 * batch * heads * RECORD.dim * sum(keys)
    rows = slice(0, CHECKED)
    expected, _ = reference(q[rows].float(), pools_of(sources, rows), SCALE, sink)
    result = {"row": name, "heads": heads, "keys": list(keys), "batch": batch, "sets": len(sets)}
    for backend, run in runs.items():
        got = run(sets[0])[0][rows].double()
        median, spread = time_us(run, sets, replays)
        result[backend] = {
            "us": round(median, 2),
            "spread_us": round(spread, 2),
            "gb_per_s": round(moved / median / 1e3),
            "tflop_per_s": round(flop / median / 1e6, 1),
            "error": float((got - expected.double()).norm() / expected.double().norm()),
        }
    result["flashmla_over_triton"] = round(result["flashmla"]["us"] / result["triton"]["us"], 3)
    return result


def show(result: dict) -> None:
    ours, theirs = result["triton"], result["flashmla"]
    print(
        f"{result['row']:28} B {result['batch']:3}   triton {ours['us']:8.1f} us +-{ours['spread_us']:5.1f} "
        f"{ours['gb_per_s']:5} GB/s {ours['tflop_per_s']:6.1f} TFLOP/s {ours['error']:.1e}   "
        f"flashmla {theirs['us']:8.1f} us +-{theirs['spread_us']:5.1f} {theirs['error']:.1e}   "
        f"x{result['flashmla_over_triton']:.2f}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help=f"some of: {', '.join(ROWS)}")
    options = parser.parse_args(arguments)
    usable, reason = flash_mla.supported("cuda")
    if not usable:
        raise SystemExit(f"this benchmark runs FlashMLA beside the Triton kernels: {reason}")
    torch.manual_seed(0)
    pools = [make_pool(), make_pool()]
    results = []
    for name in options.rows:
        for batch in options.batches:
            results.append(measure(pools, name, batch, options.replays))
            show(results[-1])
    found = flash_mla.flavour()
    document = {
        "command": " ".join(["python", "scripts/bench_attention.py", *(arguments or sys.argv[1:])]),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "flash_mla": f"{found.name} {found.version}",
        "results": results,
    }
    if options.out:
        with open(options.out, "w") as file:
            lines = ",\n".join("  " + json.dumps(result) for result in results)
            head = json.dumps({key: value for key, value in document.items() if key != "results"})
            file.write(f'{head[:-1]},\n"results": [\n{lines}\n]}}\n')
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
