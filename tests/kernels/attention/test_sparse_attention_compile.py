"""Every kernel of sparse attention compiles for every GPU generation, on any machine; launch configurations."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from deepseek_attn.cache.records import Fp8DsMlaRecord
from deepseek_attn.kernels.attention import PagedKeys, attend, launch
from deepseek_attn.kernels.attention.attend_hopper import attend_hopper_kernel
from deepseek_attn.kernels.attention.attend_rows_hopper import attend_rows_hopper_kernel
from deepseek_attn.kernels.attention.attend_triton import attend_kernel, combine_kernel
from deepseek_attn.kernels.attention.launch_config import choose_config, dot_dtype, pieces, supports_rows_hopper
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.heads import QueryHeads
from tests.kernels.compiled_launches import (
    CAPABILITIES,
    SHARED,
    compiled_launches,
    on_gpus,
    pass_for_gpu,
    ptxas_report,
)
from tests.support.tiers import tiered

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def compiled(kernel, pointers, constants, capability, warps, stages=1):
    """Assembly of ``kernel`` for a GPU, with pointers of the given element types, and int32 for the rest."""
    kinds = pointers | {"scale_log2": "fp32"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if ("stride" in name or "ptr" in name) and name not in constants
    }
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    return triton.compile(
        source, target=target, options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    )


def compiled_attention(capability, T, H, q, keys, fp8, pools, dim=512, hopper=False, max_logits=False, v41=False):
    group, group1 = (32, 16) if v41 else (64 * fp8, 64 * fp8)
    dtype, nope = dot_dtype(q, keys, group), dim - 64 if fp8 and not v41 else dim
    config = choose_config(T, H, dim, 640, dtype, hopper, GPU(capability, 132))
    split = config.splits > 1
    out = dtype if split and dtype == torch.float16 else torch.float32 if split else q
    pool = "*u8" if fp8 else f"*{NAMES[keys]}"
    pointers = dict.fromkeys(("indices0_ptr", "indices1_ptr", "lens0_ptr", "lens1_ptr"), "*i32")
    pointers |= {"q_ptr": f"*{NAMES[q]}", "pool0_ptr": pool, "pool1_ptr": pool, "out_ptr": f"*{NAMES[out]}"}
    pointers |= {"sink_ptr": "*fp32", "lse_ptr": "*fp32"}
    constants = {
        "NOPE": nope,
        "N0": 64,
        "N1": 2 if fp8 and not v41 else 64,
        "POOLS": pools,
        "SPLIT": split,
        "HAS_SINK": True,
    }
    constants |= {"HAS_LENS0": True, "HAS_LENS1": True, "projected": None, "PROJECTED": None}
    if config.hopper:
        assert not max_logits
        return compiled(attend_hopper_kernel, pointers, constants, capability, 8)
    pointers, constants = with_max_logits(max_logits, pointers, constants)
    starts, widths = pieces(nope, dim, config.piece)
    constants |= {"DIM": dim, "D_V": dim, "STARTS": starts, "WIDTHS": widths, "V_PIECES": len(starts)}
    row, row1 = (dim, dim // 2) if v41 else 2 * [nope + 128 if fp8 else dim]
    constants |= {"ROW": row, "ROPE": nope, "FP8": fp8, "GROUP": group, "ROW1": row1, "GROUP1": group1}
    constants |= {"NATIVE_FP8": capability >= (8, 9)}
    constants |= {
        "DTYPE": triton.language.dtype(NAMES[dtype]),
        "PRECISION": "tf32x3" if dtype == torch.float32 else None,
    }
    constants |= {"BLOCK_H": config.heads, "BLOCK_N": config.keys, "STAGES": config.stages}
    constants["PDL"] = split and capability[0] >= 9
    return compiled(attend_kernel, pointers, constants, capability, config.warps, config.stages)


def with_max_logits(wanted, pointers, constants):
    return (pointers | {"max_ptr": "*fp32"}, constants) if wanted else (pointers, constants | {"max_ptr": None})


SHAPES = {
    "fp8 pages, 8 heads": {"T": 1, "H": 8, "q": torch.bfloat16, "keys": torch.uint8, "fp8": True, "pools": 2},
    "fp8 pages, 64 heads": {"T": 256, "H": 64, "q": torch.bfloat16, "keys": torch.uint8, "fp8": True, "pools": 2},
    "bf16 rows, 64 heads": {"T": 256, "H": 64, "q": torch.bfloat16, "keys": torch.bfloat16, "fp8": False, "pools": 1},
    "float32 rows": {"T": 9, "H": 64, "q": torch.float32, "keys": torch.float32, "fp8": False, "pools": 1},
}
SHAPES |= {f"V4.1, {H} heads": SHAPES["fp8 pages, 64 heads"] | {"H": H, "v41": True} for H in (8, 64)}
SHAPES["bf16 rows, max_logits"] = SHAPES["bf16 rows, 64 heads"] | {"max_logits": True}
SHAPES["float32 rows, max_logits"] = SHAPES["float32 rows"] | {"max_logits": True}


@pytest.mark.parametrize(("arch", "shape"), on_gpus(SHAPES, ["fp8 pages, 64 heads"]))
def test_attention_compiles(arch, shape):
    kernel = compiled_attention(CAPABILITIES[arch], **SHAPES[shape])
    assert "kWidth = 8" not in kernel.asm["ttgir"]  # see `decode_e2m1`
    assert kernel.metadata.shared <= SHARED[arch] * 1024
    assert kernel.asm["cubin"]
    native = "e4m3" in kernel.asm["ptx"]
    assert native == (SHAPES[shape]["fp8"] and arch != "sm80")


def compiled_heads(monkeypatch, arch, T, H, widths, groups=8):
    """The launches of `attend_heads` over fp8_v4 pages, by the name of the kernel."""
    monkeypatch.setattr(attend, "on_gpu", lambda q: True)
    monkeypatch.setattr(attend, "has_native_fp8", lambda device: CAPABILITIES[arch] >= (8, 9))
    monkeypatch.setattr(launch, "has_native_fp8", lambda device: CAPABILITIES[arch] >= (8, 9))
    monkeypatch.setattr(launch, "supports_pdl", lambda device: CAPABILITIES[arch] >= (9, 0))
    pass_for_gpu(monkeypatch, CAPABILITIES[arch], attend)
    record, lens = Fp8DsMlaRecord(448, 64), torch.ones(T, dtype=torch.int32)
    pool = torch.empty(2, record.page_bytes(64), dtype=torch.uint8)
    keys = [PagedKeys(record, pool, 64, torch.empty(T, width, dtype=torch.int32), lens) for width in widths]
    q, positions = torch.empty(T, H * 512, dtype=torch.bfloat16), torch.empty(T, dtype=torch.int64)
    heads = QueryHeads(q, H, 1e-6, torch.empty(99, 64), positions, H)
    return compiled_launches(
        monkeypatch, [launch], arch, lambda: attend.attend_heads(heads, keys, 0.1, torch.empty(H), groups)
    )


HEADS = {"1 query": (1, 8, (128,)), "32 of 64 heads": (32, 64, (128, 512)), "48 queries": (48, 64, (128,))}


@pytest.mark.parametrize(("arch", "shape"), on_gpus([*HEADS, "many splits"], ["32 of 64 heads"]))
def test_projected_heads_compile(monkeypatch, arch, shape):
    found = compiled_heads(monkeypatch, arch, *(HEADS | {"many splits": (1, 64, (128, 8192))})[shape])
    last = found.get("combine_kernel", found.get("attend_hopper_kernel"))[0]
    assert ("e4m3x2" in last.asm["ptx"]) == (arch != "sm80")


def test_projected_heads_on_hopper(monkeypatch, tmp_path):
    """One launch where keys are not split, and products still overlap."""
    found = compiled_heads(monkeypatch, "sm90", 48, 64, (128,))
    assert [name for name, kernels in found.items() for _ in kernels] == ["attend_hopper_kernel"]
    said = ptxas_report(found["attend_hopper_kernel"][0], tmp_path)
    assert "serialized" not in said
    assert int(re.search(r"(\d+) bytes spill stores", said)[1]) < 200


@pytest.mark.parametrize("dim", tiered([128, 512], [512]))
def test_the_hopper_kernel_compiles(dim):
    shape = SHAPES["fp8 pages, 64 heads"] | {"hopper": True, "dim": dim}
    kernel = compiled_attention((9, 0), **shape)
    assert "wgmma" in kernel.asm["ptx"]
    assert "setmaxnreg" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED["sm90"] * 1024


def test_products_of_the_hopper_kernel_overlap(tmp_path):
    """With fewer registers for some warps ptxas would wait for every product, and say so."""
    kernel = compiled_attention((9, 0), **SHAPES["fp8 pages, 64 heads"] | {"hopper": True})
    said = ptxas_report(kernel, tmp_path)
    assert "serialized" not in said
    spilled = int(re.search(r"(\d+) bytes spill stores", said)[1])
    assert spilled < 200  # per thread; far more if keys in flight are spilled


@pytest.mark.parametrize(
    ("dim", "dtype", "max_logits"),
    tiered(
        [(128, "bf16", False), (256, "fp16", True), (512, "bf16", False), (512, "bf16", True)], [(512, "bf16", True)]
    ),
)
def test_the_hopper_kernel_of_rows_compiles(dim, dtype, max_logits):
    pointers = dict.fromkeys(("q_ptr", "kv_ptr", "out_ptr"), f"*{dtype}") | {"indices_ptr": "*i32", "lens_ptr": "*i32"}
    constants = {"DIM": dim, "HAS_LENS": True, "HAS_SINK": True}
    pointers |= {"sink_ptr": "*fp32", "lse_ptr": "*fp32"}
    pointers, constants = with_max_logits(max_logits, pointers, constants)
    kernel = compiled(attend_rows_hopper_kernel, pointers, constants, (9, 0), 8)
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED["sm90"] * 1024
    assert "wgmma" in ptx
    assert "cp.async.cg.shared.global" in ptx  # 16 bytes at a time
    assert "setmaxnreg" in ptx


def test_which_rows_the_hopper_kernel_takes():
    def fits(T=100, H=64, dim=512, kv_dim=512, d_v=512, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, width=640,
             capability=(9, 0), rows=200):  # fmt: skip
        q, kv = torch.empty(T, H, dim, dtype=dtype), torch.empty(rows, kv_dim, dtype=kv_dtype)
        return supports_rows_hopper(q, kv[:, :dim], torch.empty(T, width, dtype=torch.int32), d_v, GPU(capability, 132))

    assert fits()
    assert fits(dtype=torch.float16, kv_dtype=torch.float16)
    assert fits(H=100, T=33)
    assert fits(kv_dim=528)
    others = [{"capability": (10, 0)}, {"T": 65}, {"H": 16}, {"dim": 576, "kv_dim": 576}, {"d_v": 448}]
    others += [{"dtype": torch.float32, "kv_dtype": torch.float32}, {"kv_dtype": torch.float16}, {"width": 0}]
    others += [{"rows": 0}, {"kv_dim": 520}, {"T": 0}]
    assert not any(fits(**other) for other in others)


@pytest.mark.parametrize("arch", on_gpus())
def test_the_combine_kernel_compiles(arch):
    pointers = {"partials_ptr": "*fp16", "partial_lse_ptr": "*fp32", "sink_ptr": "*fp32", "out_ptr": "*bf16"}
    pdl = CAPABILITIES[arch][0] >= 9
    constants = {"D_V": 512, "HAS_SINK": True, "BLOCK_S": 16, "BLOCK_D": 512, "PDL": pdl}
    constants |= {"projected": None, "PROJECTED": None}
    kernel = compiled(combine_kernel, pointers | {"lse_ptr": "*fp32"}, constants, CAPABILITIES[arch], 4)
    assert ("griddepcontrol" in kernel.asm["ptx"]) == pdl


def test_pieces_cover_both_parts():
    assert pieces(448, 512, 64) == (tuple(range(0, 512, 64)), (64,) * 8)
    assert pieces(448, 512, 128) == ((0, 128, 256, 384, 448), (128, 128, 128, 64, 64))
    assert pieces(40, 40, 64) == ((0, 32), (32, 16))


@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=CAPABILITIES)
def test_splits_fill_the_gpu_and_leave_no_program_without_keys(capability):
    for T in (1, 3, 8, 100, 5000):
        for H in (1, 16, 64, 128):
            for width in (1, 128, 640, 8320):
                config = choose_config(T, H, 512, width, torch.float16, capability[0] == 9, GPU(capability, 132))
                blocks = -(-width // config.keys)
                share = -(-blocks // config.splits)
                assert 1 <= config.splits <= blocks
                assert share * (config.splits - 1) < blocks
                assert T * -(-H // config.heads) * config.splits <= max(2 * 132, T * -(-H // config.heads))


@pytest.mark.parametrize(
    ("T", "H", "width", "splits", "from_heads"),
    [(16, 64, 128, 2, 2), (22, 64, 128, 1, 2), (24, 64, 192, 1, 3), (43, 64, 128, 1, 2), (44, 64, 128, 1, 1),
     (32, 64, 256, 4, 4), (32, 64, 640, 4, 4), (8, 128, 192, 3, 3), (16, 128, 192, 1, 3), (32, 128, 192, 1, 2),
     (33, 128, 192, 1, 1), (32, 128, 256, 1, 2), (200, 64, 640, 1, 1)],
)  # fmt: skip
def test_few_keys_of_many_queries_are_not_split(T, H, width, splits, from_heads):
    """On Hopper, as measured in whole layers: from 22 blocks of 64 heads on, at most two more tiles of keys each."""
    for heads, expected in ((False, splits), (True, from_heads)):
        config = choose_config(T, H, 512, width, torch.float16, True, GPU((9, 0), 132), heads)
        assert config.hopper
        assert config.splits == expected
