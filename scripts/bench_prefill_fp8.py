"""Prefill attention over gathered rows beside FlashMLA's in bfloat16 and SGLang's in FP8, on Hopper.

    python scripts/bench_prefill_fp8.py --module sparse_mla_q8kv8_prefill_sm90.so --out FILE

``--module`` is SGLang 0.5.23's JIT kernel of that name, loaded by apache-tvm-ffi. It reads queries and keys in FP8
(e4m3), one scale for all of each, and multiplies in FP8; the casts are timed apart, because SGLang makes them before.
Queries of 512 channels with sinks over random rows; each call is a CUDA graph, and the replays of all alternate in one
process. Errors: of the first 16 queries against float32, as shares of the norm. The last line on standard output is one
JSON document.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from functools import partial
from itertools import product
from pathlib import Path

import torch
from bench_humming import report_rows
from compare_checkouts import replay_times
from torch import Tensor

from deepseek_attn.impls import flash_mla
from deepseek_attn.kernels.attention import reference, sparse_attention
from deepseek_attn.lab.bench.timing import captured

DEVICE, WIDTH, ROWS, CHECKED = torch.device("cuda"), 512, 16384, 16
QUERIES, HEADS, KEYS = (512, 4096), (64, 128), (128, 512, 640, 2048)


class FP8Prefill:
    """SGLang's kernel, with sinks and lengths."""

    def __init__(self, module: Path):
        import tvm_ffi  # pyright: ignore[reportMissingImports]  # pip install apache-tvm-ffi

        self.call = tvm_ffi.load_module(str(module))["dispatch_full"]
        self.one = torch.ones((), dtype=torch.float32, device=DEVICE)

    def __call__(self, q: Tensor, kv: Tensor, indices: Tensor, scale: float, sink: Tensor, lens: Tensor) -> Tensor:
        """Of ``q [T, H, 512]`` and ``kv [N, 512]`` in FP8, as bytes."""
        T, H, d = q.shape
        out = torch.empty(T, H, d, dtype=torch.bfloat16, device=q.device)
        logits, lse = (torch.empty(T, H, dtype=torch.float32, device=q.device) for _ in range(2))
        tensors = q, kv, indices, self.one, self.one, sink, lens, out, logits, lse
        stream = torch.cuda.current_stream().cuda_stream
        self.call(*tensors, T, len(kv), H, 1, d, d, indices.shape[1], scale, stream)
        return out


def cast(x: Tensor) -> Tensor:
    """``x`` in FP8, as bytes."""
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def point(fp8: FP8Prefill, queries: int, heads: int, keys: int, rounds: int) -> dict:
    """Medians and errors of all ways at one shape."""
    g = torch.Generator(DEVICE).manual_seed(queries + heads + keys)
    q, kv = (torch.randn(*n, WIDTH, device=DEVICE, generator=g).bfloat16() for n in ((queries, heads), (ROWS,)))
    indices = torch.randint(ROWS, (queries, keys), device=DEVICE, generator=g, dtype=torch.int32)
    sink = torch.randn(heads, device=DEVICE, generator=g)
    lens, scale = torch.full((queries,), keys, dtype=torch.int32, device=DEVICE), WIDTH**-0.5
    bytes_q, bytes_kv = cast(q), cast(kv)
    ways = {
        "ours": partial(sparse_attention, q, kv, indices, scale, sink, lens),
        "flash_mla": partial(flash_mla.sparse_prefill, q, kv, indices, scale, sink, lens),
        "sglang_fp8": partial(fp8, bytes_q, bytes_kv, indices, scale, sink, lens),
        "cast_queries": partial(cast, q),
        "cast_keys": partial(cast, kv),
    }
    row: dict = {"queries": queries, "heads": heads, "keys": keys}
    some = q[:CHECKED].float(), kv.float(), indices[:CHECKED], scale, sink, lens[:CHECKED]
    exact = reference.sparse_attention(*some)[0]
    for name in list(ways)[:3]:
        found = ways[name]()
        found = (found if isinstance(found, Tensor) else found[0])[:CHECKED].float()
        row[f"{name}_error"] = float((found - exact).norm() / exact.norm())
    graphs = [captured([call]) for call in ways.values()]
    for name, found in zip(ways, replay_times(graphs, rounds), strict=True):
        row[f"{name}_us"] = round(statistics.median(found), 1)
    return row | {"flash_mla_over_fp8": round(row["flash_mla_us"] / row["sglang_fp8_us"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--module", type=Path, required=True, help="SGLang's compiled kernel")
    parser.add_argument("--rounds", type=int, default=21, help="replays of each graph; the median counts")
    parser.add_argument("--out", type=Path, help="keep the JSON document here, after each shape")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU: all sides' kernels are for NVIDIA GPUs")
    if importlib.util.find_spec("tvm_ffi") is None:
        parser.error("apache-tvm-ffi is not installed: pip install apache-tvm-ffi")
    fp8 = FP8Prefill(args.module)
    shapes = product(HEADS, QUERIES, KEYS)
    report_rows(
        "prefill_fp8", (point(fp8, queries, heads, keys, args.rounds) for heads, queries, keys in shapes), args.out
    )


if __name__ == "__main__":
    main()
