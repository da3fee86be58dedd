"""Routed FP4 experts beside FlashInfer's and Humming's on Hopper: the same weights and routing.

    python scripts/bench_flashinfer.py --module fused_moe_90.so --model v4_flash --tokens 1,8,32,128,512,4096,8192

``--module`` is the library that FlashInfer 0.7.2 compiles for its CUTLASS experts on compute capability 9.0 (its JIT
module ``fused_moe_90``), loaded by apache-tvm-ffi. Its product of FP4 weights and FP8 inputs is called as
``flashinfer.fused_moe.cutlass_fused_moe(use_wfp4afp8_humming=True)`` does: bfloat16 inputs, one FP8 scale for each row,
the finalising sum in the second product where that is faster. FlashInfer chooses among its tactics by their times; so
does this script, for each number of tokens: the first product's fastest, then the second's. Humming is called as
``bench_humming.py`` does, where it is installed.

Each call is a CUDA graph, and the replays of all alternate in one process. Before that, the outputs of the first and
the last token are compared with float32, nothing quantised. The last line on standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from bench_humming import DEVICE, LARGEST_ERROR, HummingExperts, output_error, report_rows
from compare_checkouts import replay_times
from torch import Tensor

from deepseek_attn import ModelConfig
from deepseek_attn.cli.options import numbers
from deepseek_attn.lab.bench.cases.moe import experts_case
from deepseek_attn.lab.bench.timing import captured

SWIGLU = 3  # FlashInfer's ActivationType
WIDEST_RANGE = 11  # exponents of an expert's scales that fit FP8 beside FP4 values
COMPENSATION = 2.0**6  # of the conversion from FP4 to FP8 before the product


class FlashInferExperts:
    """Both products of a layer's routed experts.

    Args:
        module: path of the compiled library.
        w31: packed FP4 ``[E, 2 * inner, D / 2]``, up before gate, and its e8m0 scales.
        w2: ``[E, D, inner / 2]`` and its scales.
        limit: of SwiGLU.
    """

    def __init__(self, module: Path, w31: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor], limit: float):
        import tvm_ffi  # pyright: ignore[reportMissingImports]  # pip install apache-tvm-ffi

        self.ffi, self.library = tvm_ffi, tvm_ffi.load_module(str(module))
        types = torch.bfloat16, torch.uint8, torch.bfloat16  # of inputs, weights, outputs
        # FP8 by blocks, groups of weights, MXFP8 inputs, packed weights, sum in the second product, FP4 x FP8
        self.runner = self.library["init"](*types, False, True, False, False, True, True)
        (self.w31, scales31, residual31), (self.w2, scales2, residual2) = map(self.prepared, (w31, w2))
        device = self.w2.device
        one = torch.ones((), dtype=torch.float32, device=device)
        self.scales = [scales31, residual31, one, scales2, residual2]
        self.limit = torch.full((len(self.w2),), limit, dtype=torch.float32, device=device)
        self.first, self.second = (self.runner[f"get_gemm{number}_tactic_count"]() for number in (1, 2))
        self.default = self.usable()
        self.tactics: dict[int, list[int]] = {}

    def prepared(self, stack: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and scales in the order that the products read, and the float32 factor of each expert."""
        weight, scale = (part.view(torch.uint8).contiguous() for part in stack)
        flat = scale.flatten(1)
        least = flat.min(1).values
        if int((flat.max(1).values - least).max()) > WIDEST_RANGE:
            raise SystemExit(
                f"an expert's scales span more than 2^{WIDEST_RANGE}: its weights would have to be rewritten"
            )
        residual = torch.exp2(least.float() - 127) * 0.5 * COMPENSATION
        offsets = scale - least[:, None, None] + 1
        experts, rows, groups = offsets.shape  # blocks of 64 rows by 128 channels, four scales each
        folded = offsets.reshape(experts, rows // 64, 4, 16, groups // 4, 4).permute(0, 1, 4, 3, 2, 5).contiguous()
        codes = torch.empty_like(weight)
        for number, values in enumerate(weight):  # without negative zeros
            low, high = values & 15, values >> 4
            codes[number] = torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4
        ordered = torch.empty_like(weight)
        self.library["interleave_moe_weights_for_sm90_mixed_gemm"](codes, ordered, 2)
        torch.cuda.synchronize()
        return ordered, folded.reshape(experts, rows // 64, groups // 4, 16, 16).view(torch.int32), residual

    def usable(self) -> int:
        """The first tactic of the first product that was compiled."""
        for tactic in range(self.first):
            with suppress(RuntimeError):
                if self.runner["get_tactic_occupancy"](tactic):
                    return tactic
        raise SystemExit(f"none of the {self.first} tactics was compiled for this GPU")

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, tactics: list[int] | None = None) -> Tensor:
        """Of tokens ``x [T, D]``, their experts int64 ``[T, k]`` and float32 weights."""
        out, (tokens, k), (_, hidden, half) = torch.empty_like(x), experts.shape, self.w2.shape
        sizes = tokens, hidden, 2 * half, len(self.w2), k, 1, 0, 1, 0, False, SWIGLU
        workspace = torch.empty(self.runner["get_workspace_size"](*sizes), dtype=torch.uint8, device=x.device)
        products = self.w31, None, self.w2, None, self.scales, None
        swiglu = None, None, self.limit, None, None, None
        ranks = 1, 0, 1, 0, 1, 0
        with self.ffi.use_torch_stream():
            self.runner["run_moe"](
                out, x, experts.int(), weights, *products, *swiglu, True, *ranks, False, False,
                tactics or self.tactics[tokens], True, SWIGLU, workspace,
            )  # fmt: skip
        return out

    def tune(self, *inputs: Tensor) -> None:
        """Chooses the tactics for ``inputs``: the first product's with the second's default, then the second's."""
        chosen = [self.default, self.first + self.default]
        for place, tactics in enumerate((range(self.first), range(self.first, self.first + self.second))):
            times = {}
            for tactic in tactics:
                trial = [tactic if i == place else chosen[i] for i in range(2)]
                try:
                    if not self.runner["get_tactic_occupancy"](tactic):
                        continue
                    graph = captured([partial(self, *inputs, trial)])
                except RuntimeError:  # not for this shape, or not compiled
                    torch.cuda.synchronize()
                    continue
                times[tactic] = statistics.median(replay_times([graph], 5)[0])
            if not times:
                raise SystemExit(f"none of {len(tactics)} tactics computes {len(inputs[0])} tokens")
            chosen[place] = min(times, key=lambda tactic: times[tactic])
        self.tactics[len(inputs[0])] = chosen


class Comparison:
    """The experts of one layer of a model on all sides."""

    def __init__(self, model: str, module: Path):
        self.model, self.config = model, ModelConfig.from_preset(model)
        limit = self.config.swiglu_limit
        *_, self.w1, self.w3, self.w2 = experts_case(model, 1, self.config, "fp4").make(DEVICE, 0)
        (codes1, scales1), (codes3, scales3) = self.w1[:2], self.w3[:2]
        w31 = torch.cat([codes3, codes1], 1), torch.cat([scales3, scales1], 1)
        self.flashinfer = FlashInferExperts(module, w31, self.w2[:2], limit)
        self.sides: dict[str, Callable[..., Tensor]] = {"flashinfer": self.flashinfer}
        if importlib.util.find_spec("humming") is not None:
            w13 = torch.cat([codes1, codes3], 1), torch.cat([scales1, scales3], 1)
            self.sides["humming"] = HummingExperts(w13, self.w2[:2], limit)

    def point(self, tokens: int, rounds: int) -> dict:
        """One number of tokens: medians of all sides, each over several routings."""
        case = experts_case(self.model, tokens, self.config, "fp4")
        inputs = [case.make(DEVICE, seed) for seed in range(3 if tokens <= 128 else 2 if tokens <= 512 else 1)]
        self.flashinfer.tune(*inputs[0][:3])
        row: dict = {"model": self.model, "tokens": tokens}
        calls = [
            {"ours": partial(case.run["triton"], *one)} | {n: partial(s, *one[:3]) for n, s in self.sides.items()}
            for one in inputs
        ]
        stacks = self.w1, self.w3, self.w2
        errors = {
            name: output_error(call(), inputs[0][:3], stacks, self.config.swiglu_limit)
            for name, call in calls[0].items()
        }
        row |= {f"{name}_error": error for name, error in errors.items()}
        wrong = {name for name, error in errors.items() if not error < LARGEST_ERROR}
        if wrong:
            row["wrong"] = sorted(wrong)
        times: dict[str, list[float]] = {name: [] for name in calls[0]}
        for ways in calls:
            graphs = [captured([call]) for call in ways.values()]
            for name, found in zip(ways, replay_times(graphs, rounds), strict=True):
                times[name].append(statistics.median(found))
        row |= {f"{name}_us": round(statistics.mean(found), 1) for name, found in times.items()}
        for name in self.sides:
            row[f"ratio_{name}"] = round(
                statistics.mean(a / b for a, b in zip(times["ours"], times[name], strict=True)), 3
            )
        return row | {"tactics": self.flashinfer.tactics[tokens]}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=(__doc__ or "").split("\n")[0],
        epilog="Needs a GPU of compute capability 9.0 and apache-tvm-ffi; humming-kernels 0.1.19 for the third side.",
    )
    parser.add_argument("--module", type=Path, required=True, help="FlashInfer's compiled fused_moe_90.so")
    parser.add_argument("--model", choices=("v4_flash", "v4_pro"), default="v4_flash", help="preset")
    parser.add_argument("--tokens", type=numbers, default=[1, 8, 32, 128, 512, 4096, 8192], help="comma-separated")
    parser.add_argument("--rounds", type=int, default=21, help="replays of each graph; the median counts")
    parser.add_argument("--out", type=Path, help="keep the JSON document here, after each number of tokens")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU: all sides' kernels are for NVIDIA GPUs")
    if importlib.util.find_spec("tvm_ffi") is None:
        parser.error("apache-tvm-ffi is not installed: pip install apache-tvm-ffi")
    torch.manual_seed(0)
    comparison = Comparison(args.model, args.module)
    report_rows("flashinfer", (comparison.point(tokens, args.rounds) for tokens in args.tokens), args.out)


if __name__ == "__main__":
    main()
