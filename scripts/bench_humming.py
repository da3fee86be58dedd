"""Routed FP4 experts beside Humming's, which vLLM 0.33 takes first on Hopper: the same weights and routing.

    pip install humming-kernels==0.1.19
    python scripts/bench_humming.py --model v4_flash --tokens 1,8,32,128,512,4096,8192 --out FILE

A call goes from tokens and their routing to the weighted sums of their experts: pairs sorted, inputs quantised to FP8,
both products, swiglu and the sum. Humming is called as vLLM's ``HummingIndexedExperts`` does, with the launch
configurations that it chooses for the device; Triton kernels stand for vLLM's of sorting and summing. Each call is a
CUDA graph, and the replays of both alternate in one process. Before that, the outputs of the first and the last token
are compared with float32, nothing quantised.

The last line on standard output is one JSON document; ``--out`` keeps it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from compare_checkouts import replay_times
from torch import Tensor

from deepseek_attn import ModelConfig
from deepseek_attn.cli.info import environment
from deepseek_attn.cli.options import numbers
from deepseek_attn.kernels.moe import reference
from deepseek_attn.kernels.moe.types import ExpertsCall, ExpertStack
from deepseek_attn.lab.bench.cases.case import OpCase
from deepseek_attn.lab.bench.cases.moe import experts_case
from deepseek_attn.lab.bench.timing import captured
from deepseek_attn.utils.files import write_text

if TYPE_CHECKING:
    from humming_pairs import SortedPairs

DEVICE = torch.device("cuda")
LARGEST_ERROR = 0.065  # of the norm: FP8 inputs of both products make 0.043 to 0.050
SWIGLU = """[](float a, float b) {{
    const float gate = fminf(a, {limit}f);
    const float up = fmaxf(fminf(b, {limit}f), -{limit}f);
    return gate / (1.f + expf(-gate)) * up;
}}(a, b)"""


class HummingExperts:
    """Both products of a layer's routed experts, through FP8 inputs.

    Args:
        w13: packed FP4 ``[E, 2 * inner, D / 2]`` and its e8m0 scales; w2: ``[E, D, inner / 2]`` and its.
    """

    def __init__(self, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor], limit: float):
        from humming import dtypes  # pyright: ignore[reportMissingImports]  # pip install humming-kernels
        from humming.schema import HummingInputSchema  # pyright: ignore[reportMissingImports]  # pip install humming-kernels
        from humming.schema.mxfp4 import Mxfp4WeightSchema  # pyright: ignore[reportMissingImports]  # pip install humming-kernels
        from humming.transform import prepare_layer_config, transform_humming_tensors  # pyright: ignore[reportMissingImports]  # pip install humming-kernels
        from humming.tune import get_heuristics_config  # pyright: ignore[reportMissingImports]  # pip install humming-kernels

        self.inner, self.swiglu = w13[0].shape[1] // 2, SWIGLU.format(limit=limit)
        self.locks = torch.zeros(1 << 12, dtype=torch.int32, device=w13[0].device)
        self.layers, self.tensors, self.choices = [], [], []
        for weight, scale in (w13, w2):
            layer = prepare_layer_config(
                shape_n=weight.shape[1],
                shape_k=weight.shape[2] * 2,
                weight_schema=Mxfp4WeightSchema().to_humming_schema(torch.bfloat16),
                input_schema=HummingInputSchema(a_dtype=dtypes.float8e4m3, input_scale_group_size=128),
                num_experts=weight.shape[0],
                pad_n_to_multiple=256,
                pad_k_to_multiple=128,
                torch_dtype=torch.bfloat16,
            )
            packed = {"weight": weight.clone().view(torch.int32), "weight_scale": scale.clone()}
            packed["weight_scale"] = packed["weight_scale"].view(torch.float8_e8m0fnu)
            self.layers.append(layer)
            self.tensors.append(transform_humming_tensors(layer, packed))
            self.choices.append(get_heuristics_config(layer, use_batch_invariant=False, gemm_type="indexed"))

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Of tokens ``x [T, D]``, their experts int64 ``[T, k]`` and float32 weights."""
        from humming.forward import may_process_input  # pyright: ignore[reportMissingImports]  # pip install humming-kernels
        from humming_pairs import weighted_sum

        (tokens, k), hidden, (w13, w2) = experts.shape, x.shape[1], self.layers
        pairs = tokens * k
        first, second = (self.sorted_for(number, experts) for number in range(2))
        empty = partial(torch.empty, device=x.device)
        values, scale, _ = may_process_input(w13, inputs=x, outputs=empty(tokens, hidden, dtype=torch.float8_e4m3fn))
        gate_up = self.product(0, values, scale, empty(pairs, 2 * self.inner, dtype=x.dtype), first, k)
        values, scale, _ = may_process_input(
            w2,
            inputs=gate_up,
            outputs=empty(pairs, self.inner, dtype=torch.float8_e4m3fn),
            activation_type="binary_split",
            activation_impl=self.swiglu,
        )
        outputs = self.product(1, values, scale, empty(pairs, hidden, dtype=x.dtype), second, 1)
        return weighted_sum(outputs, weights)

    def choice(self, number: int, pairs: int) -> dict:
        """The launch configuration of product ``number`` for so many pairs."""
        return next(config for above, most, config in self.choices[number] if above < pairs <= most)

    def sorted_for(self, number: int, experts: Tensor) -> SortedPairs:
        from humming_pairs import sort_pairs

        block = self.choice(number, experts.numel())["block_shape"][0]
        return sort_pairs(experts.int(), len(self.tensors[number]["weight"]), block)

    def product(self, number: int, x: Tensor, scale: Tensor, out: Tensor, rows: SortedPairs, k: int) -> Tensor:
        from humming.forward import humming_forward  # pyright: ignore[reportMissingImports]  # pip install humming-kernels

        tensors, pairs = self.tensors[number], len(out)
        return humming_forward(
            self.layers[number],
            inputs=x,
            weight=tensors["weight"],
            weight_scale=tensors["weight_scale"],
            weight_scale_2=tensors.get("weight_scale_2"),
            outputs=out,
            input_scale=scale,
            locks=self.locks,
            sorted_ids=rows.ids,
            expert_ids=rows.experts,
            num_tokens_padded=rows.num_rows,
            top_k=k,
            valid_shape_m=pairs,
            compute_config=json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}),
            # one configuration for any number: Humming's launcher also looks one up for a single row
            tuning_config=json.dumps([[0, 1 << 30, self.choice(number, pairs)]]),
        )


class Point(NamedTuple):
    """One number of tokens: medians of both, each over several routings.

    Attributes:
        ratio: our time divided by Humming's, within a routing.
        ours_error, humming_error: errors against float32, as shares of the norm.
    """

    model: str
    tokens: int
    ours_us: float
    humming_us: float
    ratio: float
    ours_error: float
    humming_error: float


class Comparison:
    """The experts of one layer of a model on both sides."""

    def __init__(self, model: str):
        self.model, self.config = model, ModelConfig.from_preset(model)
        *_, w1, w3, self.w2 = self.case(1).make(DEVICE, 0)
        self.w1, self.w3 = w1, w3
        weight, scale = (torch.cat(pair, 1) for pair in zip(w1[:2], w3[:2], strict=True))
        self.humming = HummingExperts((weight, scale), self.w2[:2], self.config.swiglu_limit)

    def case(self, tokens: int) -> OpCase:
        """Ours, with the weights of all cases of this model."""
        return experts_case(self.model, tokens, self.config, "fp4")

    def point(self, tokens: int, rounds: int) -> Point:
        case, seeds = self.case(tokens), range(3 if tokens <= 128 else 2 if tokens <= 512 else 1)
        inputs = [case.make(DEVICE, seed) for seed in seeds]
        sides = [[partial(case.run["triton"], *one), partial(self.humming, *one[:3])] for one in inputs]
        stacks, limit = (self.w1, self.w3, self.w2), self.config.swiglu_limit
        errors = [output_error(side(), inputs[0][:3], stacks, limit) for side in sides[0]]
        if not max(errors) < LARGEST_ERROR:
            raise SystemExit(f"{self.model}, {tokens} tokens: outputs differ from float32 by {errors} of the norm")
        times = []
        for calls in sides:
            graphs = [captured([call]) for call in calls]
            times.append([statistics.median(found) for found in replay_times(graphs, rounds)])
        ours, humming = (statistics.mean(column) for column in zip(*times, strict=True))
        ratio = statistics.mean(a / b for a, b in times)
        return Point(self.model, tokens, round(ours, 1), round(humming, 1), round(ratio, 3), *errors)


def output_error(
    outputs: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    stacks: tuple[ExpertStack, ExpertStack, ExpertStack],
    limit: float,
) -> float:
    """Error of the first and the last token's output against float32, as a share of the norm.

    Args:
        inputs: tokens, their experts and weights; stacks: ``w1``, ``w3`` and ``w2``.
    """
    x, experts, weights = inputs
    some = [0, -1] if len(x) > 1 else [0]
    rows = zip(x[some].float().split(1), experts[some].split(1), weights[some].split(1), strict=True)
    exact = torch.cat([reference.moe_experts(ExpertsCall(*row, *stacks, limit)) for row in rows])
    return round(float((outputs[some].float() - exact).norm() / exact.norm()), 5)


def report_rows(benchmark: str, rows: Iterable[dict], out: Path | None, **facts: str) -> None:
    """Prints each row as it is measured, and the JSON document of all; ``out`` keeps the rows that there are."""
    report: dict = {"benchmark": benchmark, "rows": [], **facts, "environment": environment()}
    for row in rows:
        report["rows"].append(row)
        print(row, file=sys.stderr)
        if out:
            write_text(out, json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=(__doc__ or "").split("\n")[0],
        epilog="Needs a GPU of compute capability 9.0 and humming-kernels 0.1.19.",
    )
    parser.add_argument("--model", choices=("v4_flash", "v4_pro"), default="v4_flash", help="preset")
    parser.add_argument("--tokens", type=numbers, default=[1, 8, 32, 128, 512, 4096], help="comma-separated")
    parser.add_argument("--rounds", type=int, default=21, help="replays of each graph; the median counts")
    parser.add_argument("--out", type=Path, help="keep the JSON document here, after each number of tokens")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU: both sides' kernels are for NVIDIA GPUs")
    if importlib.util.find_spec("humming") is None:
        parser.error("Humming is not installed: pip install humming-kernels==0.1.19")
    torch.manual_seed(0)
    comparison = Comparison(args.model)
    points = (comparison.point(tokens, args.rounds)._asdict() for tokens in args.tokens)
    report_rows("humming", points, args.out, humming=importlib.metadata.version("humming-kernels"))


if __name__ == "__main__":
    main()
