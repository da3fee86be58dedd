"""Every kernel of sparse attention compiles for every GPU generation, on any machine; launch plans."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.cache.records import Fp8DsMlaRecord, PlainRecord
from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record
from deepseek_attn.cache.records_v41 import Fp4V41Record, Fp8V41Record
from deepseek_attn.kernels.attention import PagedKeys, RequestEntries, launch as attend
from deepseek_attn.kernels.attention.attend_triton import pieces
from deepseek_attn.kernels.attention.plan import AttendProblem, plan_attend
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import recorded_plans
from deepseek_attn.kernels.common.raw_queries import RawQueries
from deepseek_attn.runner.ahead.recording import recorded_launches
from tests.kernels.compiled_launches import CAPABILITIES, compiled_ops, on_gpus, ptxas_report
from tests.support.tiers import tiered
from tests.support.typed import required

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
V4 = Fp8DsMlaRecord(448, 64)
V41 = Fp8V41Record(512), Fp4V41Record(512)
H200 = GPU((9, 0), 132)


def of(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def pools(T, records, widths):
    """Keys of the records' pools, with lengths; pages of 64 entries, and of 2 or 128 in the second pool."""
    n = (64, 2 if records[0] is V4 else 128)
    return [
        PagedKeys(record, of(9, record.page_bytes(entries), dtype=torch.uint8), entries, of(T, width), of(T))
        for record, width, entries in zip(records, widths, n, strict=False)
    ]


def attend_pages(T, H, records=(V4, V4), dtype=BF16, widths=(128, 512)):
    q = of(T, H, records[0].dim, dtype=dtype)
    return attend.sparse_attention_paged(q, pools(T, records, widths), 0.1, of(H, dtype=F32))


def attend_rows(T, H, dim=512, dtype=BF16, width=640, max_logits=False, kv_dtype=None, kv_dim=None, d_v=None, rows=900):
    kv = of(rows, kv_dim or dim, dtype=kv_dtype or dtype)[:, :dim]
    largest = of(T, H, dtype=F32) if max_logits else None
    q, indices, sink = of(T, H, dim, dtype=dtype), of(T, width), of(H, dtype=F32)
    return attend.sparse_attention(q, kv, indices, 0.1, sink, of(T), d_v, None, largest)


def attend_raw(T, H, widths, groups=8):
    heads = RawQueries(of(T, H * 512, dtype=BF16), H, 1e-6, of(99, 64, dtype=F32), of(T, dtype=torch.int64), H)
    return attend.attend_raw_q(heads, pools(T, (V4, V4), widths), 0.1, of(H, dtype=F32), groups, None)


PORTABLE = {
    "fp8 pages, 8 heads": lambda: attend_pages(1, 8, dtype=F32) and attend_pages(1, 8),
    "fp8 pages, 64 heads": lambda: attend_pages(2, 64, dtype=F32) and attend_pages(3, 20),
    "bf16 pages, 64 heads": lambda: attend_pages(256, 64, (PlainRecord(512, BF16),)),
    "float32 rows": lambda: attend_rows(9, 64, dtype=F32),
    "V4.1, 8 heads": lambda: attend_pages(256, 8, V41),
    "V4.1, 64 heads": lambda: attend_pages(256, 64, V41),
    "bf16 rows, max_logits": lambda: attend_rows(256, 16, max_logits=True),
    "float32 rows, max_logits": lambda: attend_rows(9, 64, dtype=F32, max_logits=True),
}


@pytest.mark.parametrize(("arch", "case"), on_gpus(PORTABLE, ["fp8 pages, 64 heads"]))
def test_attention_compiles(arch, case):
    found = compiled_ops(arch, PORTABLE[case])
    assert found["attend_kernel"]
    for kernel in found["attend_kernel"]:
        assert "kWidth = 8" not in kernel.asm["ttgir"]  # see `decode_e2m1`
        assert ("e4m3" in kernel.asm["ptx"]) == ("rows" not in case and "bf16" not in case and arch != "sm80")
    for kernel in found.get("attention_combine_kernel", []):
        assert ("griddepcontrol" in kernel.asm["ptx"]) == (CAPABILITIES[arch] >= (9, 0))


RAW_Q = {"1 query": (1, 8, (128,)), "32 of 64 heads": (32, 64, (128, 512)), "48 queries": (48, 64, (128,))}
RAW_Q["many splits"] = (1, 64, (128, 8192))


@pytest.mark.parametrize(("arch", "shape"), on_gpus(RAW_Q, ["32 of 64 heads"]))
def test_attention_of_raw_q_compiles(arch, shape):
    found = compiled_ops(arch, lambda: attend_raw(*RAW_Q[shape]))
    last = required(found.get("attention_combine_kernel", found.get("attend_hopper_kernel")))[0]
    assert ("e4m3x2" in last.asm["ptx"]) == (arch != "sm80")


def products_overlap(kernel, folder):
    """With fewer registers for some warps ptxas would wait for every product, and say so; or spill keys in flight."""
    said = ptxas_report(kernel, folder)
    assert "serialized" not in said
    assert int(required(re.search(r"(\d+) bytes spill stores", said))[1]) < 200  # per thread


def test_raw_q_on_hopper(tmp_path):
    """One launch where keys are not split, and products still overlap."""
    found = compiled_ops("sm90", lambda: attend_raw(48, 64, (128,)))
    assert [name for name, kernels in found.items() for _ in kernels] == ["attend_hopper_kernel"]
    products_overlap(found["attend_hopper_kernel"][0], tmp_path)


@pytest.mark.parametrize("dim", tiered([128, 512], [512]))
def test_the_hopper_kernel_of_pages_compiles(dim, tmp_path):
    record = Fp8DsMlaRecord(dim - 64, 64)
    (kernel,) = compiled_ops("sm90", lambda: attend_pages(256, 64, (record, record)))["attend_hopper_kernel"]
    assert "wgmma" in kernel.asm["ptx"]
    assert "setmaxnreg" in kernel.asm["ptx"]
    products_overlap(kernel, tmp_path)


@pytest.mark.parametrize(
    ("dim", "dtype", "max_logits"),
    tiered([(128, BF16, False), (256, F16, True), (512, BF16, False), (512, BF16, True)], [(512, BF16, True)]),
)
def test_the_hopper_kernel_of_rows_compiles(dim, dtype, max_logits):
    found = compiled_ops("sm90", lambda: attend_rows(256, 64, dim, dtype, max_logits=max_logits))
    (kernel,) = found["attend_rows_hopper_kernel"]
    assert "wgmma" in kernel.asm["ptx"]
    assert "cp.async.cg.shared.global" in kernel.asm["ptx"]  # 16 bytes at a time
    assert "setmaxnreg" in kernel.asm["ptx"]


GATHERED = {"plain": PlainRecord(512, BF16), "V4": V4, "V3.2": Fp8DsMlaV32Record(), "V4.1": V41[0], "V4.1 FP4": V41[1]}


@pytest.mark.parametrize(("arch", "name"), on_gpus(list(GATHERED), ["V4"]), ids=str)
def test_gather_compiles(arch, name):
    record = GATHERED[name]
    out, pool = of(3, 99, record.dim, dtype=BF16), of(9, record.page_bytes(64), dtype=torch.uint8)
    for lens in (of(3), None):
        call = out, RequestEntries(record, pool, 64, of(3, 4), of(3), lens), 5
        (kernel,) = compiled_ops(arch, lambda call=call: attend.dequantize_and_gather_k_cache(*call))["gather_kernel"]
        assert ("e4m3" in kernel.asm["ptx"]) == (name != "plain" and arch != "sm80")


def kernel_of(call, gpu=H200):
    with recorded_launches(gpu), recorded_plans() as plans:
        call()
    return plans[0].plan.attend.kernel if plans else ""


def test_which_rows_the_hopper_kernel_takes():
    def fits(T=100, H=64, gpu=H200, **options):
        return kernel_of(lambda: attend_rows(T, H, **options), gpu) == "attend_rows_hopper_kernel"

    assert fits()
    assert fits(dtype=F16)
    assert fits(H=100, T=33)
    assert fits(kv_dim=528)
    others = [{"gpu": GPU((10, 0), 132)}, {"T": 65}, {"H": 16}, {"dim": 576}, {"d_v": 448}, {"dtype": F32}]
    others += [{"kv_dtype": F16}, {"width": 0}, {"rows": 0}, {"kv_dim": 520}, {"T": 0}]
    assert not any(fits(**other) for other in others)


def test_values_that_are_a_part_of_v4_keys_stay_portable():
    """`attend_hopper_kernel` writes all channels."""
    q, keys = of(256, 64, 512, dtype=BF16), pools(256, (V4,), (128,))
    assert kernel_of(lambda: attend.sparse_attention_paged(q, keys, 0.1)) == "attend_hopper_kernel"
    assert kernel_of(lambda: attend.sparse_attention_paged(q, keys, 0.1, d_v=448)) == "attend_kernel"


def test_pieces_cover_both_parts():
    assert pieces(448, 512, 64) == (tuple(range(0, 512, 64)), (64,) * 8)
    assert pieces(448, 512, 128) == ((0, 128, 256, 384, 448), (128, 128, 128, 64, 64))
    assert pieces(40, 40, 64) == ((0, 32), (32, 16))


V4_PAGES = AttendProblem(1, 512, heads=64, d_v=512, width=128, nope=448, group=64)


@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=CAPABILITIES)
def test_splits_fill_the_gpu_and_leave_no_program_without_keys(capability):
    for T in (1, 3, 8, 100, 5000):
        for H in (1, 16, 64, 128):
            for width in (1, 128, 640, 8320):
                problem = replace(V4_PAGES, rows=T, heads=H, width=width)
                plan = plan_attend(problem, GPU(capability, 132))
                blocks, tiles = -(-width // plan.attend.config.keys), T * -(-H // plan.attend.config.heads)
                share = -(-blocks // plan.splits)
                assert 1 <= plan.splits <= blocks
                assert share * (plan.splits - 1) < blocks
                assert tiles * plan.splits <= max(2 * 132, tiles)


@pytest.mark.parametrize(
    ("T", "H", "width", "splits", "of_raw_q"),
    [(16, 64, 128, 2, 2), (22, 64, 128, 1, 2), (24, 64, 192, 1, 3), (43, 64, 128, 1, 2), (44, 64, 128, 1, 1),
     (32, 64, 256, 4, 4), (32, 64, 640, 4, 4), (8, 128, 192, 3, 3), (16, 128, 192, 1, 3), (32, 128, 192, 1, 2),
     (33, 128, 192, 1, 1), (32, 128, 256, 1, 2), (200, 64, 640, 1, 1)],
)  # fmt: skip
def test_few_keys_of_many_queries_are_not_split(T, H, width, splits, of_raw_q):
    """On Hopper, as measured in whole layers: from 22 blocks of 64 heads on, at most two more tiles of keys each."""
    for raw_q, expected in ((False, splits), (True, of_raw_q)):
        plan = plan_attend(replace(V4_PAGES, rows=T, heads=H, width=width, raw_q=raw_q), H200)
        assert plan.attend.kernel == "attend_hopper_kernel"
        assert plan.splits == expected
