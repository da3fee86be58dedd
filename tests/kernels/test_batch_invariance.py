"""Under `batch_invariant_ops` a launch is the same for any number of rows, so a row's sums are added in one order.

Launches are recorded on tensors without memory: kernel, constants and shapes of tiles may not depend on the rows, only
grids and strides. `tests/engine/test_deterministic.py` compares the bits, on a GPU too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import is_dataclass

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.cache.records import make_index_record, make_kv_record
from deepseek_attn.kernels.attention import PagedKeys, launch as attend
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.invariance import ROW_TILE, batch_invariant, batch_invariant_ops, in_row_tiles
from deepseek_attn.kernels.common.quant import InputFormat
from deepseek_attn.kernels.hyper_connection import launch as hyper_connection
from deepseek_attn.kernels.indexer import IndexQueries, IndexQueryRows, PagedIndexKeys, launch as indexer_launch
from deepseek_attn.kernels.latent import LatentQueries, LatentWeight, launch as latent
from deepseek_attn.kernels.linear import Segment, launch as linear
from deepseek_attn.kernels.moe import launch as moe
from deepseek_attn.kernels.moe.types import ExpertsCall, Router
from deepseek_attn.runner.ahead.recording import recorded_launches
from tests.kernels.compiled_launches import CAPABILITIES
from tests.kernels.hyper_connection.test_hyper_connection import make as make_streams
from tests.kernels.moe.moe_cases import make_case
from tests.support.tiers import tiered

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter launches nothing")

ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 65, 128, 129, 700, 4096)
FP8_INPUT = InputFormat(fp8=True)
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def of(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fp8_segment(N: int, K: int) -> Segment:
    return Segment(of(N, K, dtype=FP8), of(-(-N // 128), K // 128, dtype=F32), FP8_INPUT)


def positions(T: int) -> torch.Tensor:
    return of(T, dtype=torch.int64)


TABLE = (4096, 64)


def latent_weight(part: int) -> LatentWeight:
    scale = of(16, 2, 4, dtype=F32)[:, part : part + 1]
    return LatentWeight(of(16, 256, 512, dtype=FP8)[:, 128 * part : 128 * part + 128], scale)


def input_projections(T: int) -> None:
    plain = [Segment(of(N, 4096), out_dtype=F32) for N in (1024, 1024, 256, 256, 64)]
    linear.multi_linear(of(T, 4096), [fp8_segment(1024, 4096), fp8_segment(512, 4096), *plain])


def output_projection(T: int) -> None:
    weight, scale = of(8192, 4096, dtype=FP8), of(64, 32, dtype=F32)
    segment = Segment(weight, scale, FP8_INPUT)
    linear.grouped_linear(of(T, 64, 512), segment, 8, positions(T), of(*TABLE, dtype=F32))


def absorbed_queries(T: int) -> None:
    table, at = of(*TABLE, dtype=F32), positions(T)
    rows = LatentQueries(of(T, 16 * 192), latent_weight(0), table, at, 16)
    index = IndexQueryRows(of(T, 64 * 128), of(T, 64, dtype=F32), table, at, 0.1, "fp8", half_split=True)
    indexer_launch.latent_queries(rows, index)


def window_and_entries(T: int) -> None:
    record = make_kv_record("fp8_ds_mla", 448, 64)
    pool, lens = of(9, 64 * 584 + 128, dtype=torch.uint8), of(T, dtype=torch.int32)
    width = 128 << T.bit_length() // 2  # of the longest request of the batch
    keys = [PagedKeys(record, pool, 64, of(T, n, dtype=torch.int32), lens) for n in (128, width)]
    attend.sparse_attention_paged(of(T, 64, 512), keys, 0.1, of(64, dtype=F32))


def index_scores(T: int, key_format: str) -> None:
    record = make_index_record(key_format, 128)
    requests = -(-T // 3)
    pool, table = of(9, record.page_bytes(64), dtype=torch.uint8), of(requests, 1 + T % 512, dtype=torch.int32)
    keys = PagedIndexKeys(record, pool, 64, table, of(T, dtype=torch.int32))
    indexer_launch.paged_index_scores(IndexQueries(of(T, 64, 128, dtype=FP8), of(T, 64, dtype=F32)), keys, positions(T))


def streams(T: int) -> None:
    (y, rows, post, comb), pre = make_streams(T, 4, 4096, BF16, "meta")
    hyper_connection.hc_pre(rows, pre)
    hyper_connection.hc_post(y, rows, post, comb)
    hyper_connection.hc_post_pre(y, rows, post, comb, pre)
    hyper_connection.hc_delayed(rows, post, pre)


def routed_experts(T: int, weight_format: str) -> None:
    case = make_case(T, 512, 256, 32, 6, weight_format, BF16, "meta")
    moe.moe_experts(ExpertsCall(*case, 10.0, False, FP8_INPUT))


OPS: dict[str, Callable[[int], object]] = {
    "multi_linear": input_projections,
    "multi_linear, head": lambda T: linear.multi_linear(of(T, 4096), [Segment(of(129280, 4096), out_dtype=F32)]),
    "grouped_linear": output_projection,
    "latent_queries": absorbed_queries,
    "project_values": lambda T: latent.project_values(of(T, 16, 512), latent_weight(1)).values,
    "project_values quantised": lambda T: latent.project_values(of(T, 16, 512), latent_weight(1), True),
    "sparse_attention_paged": window_and_entries,
    "index_scores, fp8": lambda T: index_scores(T, "fp8"),
    "index_scores, fp4": lambda T: index_scores(T, "fp4"),
    "hyper_connection": streams,
    "moe_route": lambda T: moe.moe_route(of(T, 512), Router(of(64, 512, dtype=F32), 6, "sigmoid", 1.0, True)),
    "moe_experts, fp4": lambda T: routed_experts(T, "fp4"),
    "moe_experts, fp8": lambda T: routed_experts(T, "fp8"),
}
# Constants that order no sum: how pairs come to tiles, and columns of a program that works on each by itself.
FREE = {"count_pairs_kernel": None, "place_pairs_kernel": None, "prepare_inputs_kernel": {"BLOCK", "num_warps"}}
FREE |= {"grouped_product_kernel": {"SLOTS"}, "moe_combine_kernel": {"BLOCK", "num_warps"}}


def constants(variant) -> dict[str, object]:
    """Constants of a kernel by name, with the fields of dataclasses, and its warps and stages."""
    found: dict[str, object] = {name: variant.options[name] for name in ("num_warps", "num_stages")}
    for parameter in variant.source.fn.params:
        if parameter.is_constexpr:
            value = variant.source.constants[parameter.num,]
            found |= vars(value) if is_dataclass(value) else {parameter.name: value}
    return found


def launches_of(gpu: GPU, op: Callable[[int], object], T: int) -> list[tuple]:
    """Kernel, constants and tiles of each launch."""
    with recorded_launches(gpu) as launches:
        op(T)
    found = []
    for variant in launches.latest:
        free = FREE.get(variant.name, set())
        if free is not None:
            tiles = [kind for kind in variant.source.signature.values() if str(kind).startswith("tensordesc")]
            named = {name: value for name, value in constants(variant).items() if name not in free}
            found.append((variant.name, named, tiles))
    return found


@pytest.mark.parametrize("arch", tiered(["sm90", "sm80", "sm89", "sm100"], ["sm90"], quick_on_gpu=["sm80"]))
@pytest.mark.parametrize("op", OPS)
def test_launches_do_not_depend_on_the_number_of_rows(arch, op):
    gpu = GPU(CAPABILITIES[arch], 132)
    with batch_invariant_ops():
        first, *others = [launches_of(gpu, OPS[op], T) for T in ROWS]
    assert first
    for T, launches in zip(ROWS[1:], others, strict=True):
        assert launches == first, f"{T} rows: the plan has to heed batch_invariant"
    fastest = [launches_of(gpu, OPS[op], T) for T in (1, 129)]
    assert fastest[0] != fastest[1], "its launch never depends on the number of rows: it needs no case here"


def test_rows_in_tiles():
    """A library sees tiles of one shape, and rows come back in order."""
    seen = []

    def double(rows: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(rows.shape))
        return 2 * rows

    x = torch.randn(2 * ROW_TILE + 3, 5)
    assert torch.equal(in_row_tiles(double, x), 2 * x)
    assert seen == [tuple(x.shape)]
    with batch_invariant_ops():
        for T in (0, 1, ROW_TILE, ROW_TILE + 1, len(x)):
            seen.clear()
            assert torch.equal(in_row_tiles(double, x[:T]), 2 * x[:T])
            assert seen == [(ROW_TILE, 5)] * -(-T // ROW_TILE) or not T


def test_the_setting_ends_with_its_context_and_is_of_one_thread():
    with batch_invariant_ops():
        with batch_invariant_ops(False):
            assert not batch_invariant()
        assert batch_invariant()
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(batch_invariant).result()
    assert not batch_invariant()
