"""The kernels around the caches compile for every GPU generation, on any machine."""

import os
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource

from deepseek_attn.cache.records import Fp8DsMlaRecord, IndexFp4Record, IndexFp8Record, PlainRecord
from deepseek_attn.cache.records_v41 import Fp4V41Record, Fp8V41Record
from deepseek_attn.kernels.attention import gather_triton
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.indexer.query_triton import (
    IndexQueryArgs,
    IndexQueryShape,
    index_query_kernel,
    queries_kernel,
)
from deepseek_attn.kernels.insert import (
    CacheRows,
    CompressBatch,
    CompressPart,
    compress,
    compress_triton,
    entries,
    insert,
    latents,
    norm_rope_triton,
)
from tests.kernels.compiled_launches import CAPABILITIES, compiled_launches, on_gpus, pass_for_gpu, target_of
from tests.kernels.insert.test_insert_latents import LAYERS, make

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter compiles nothing")

RECORDS = {"plain": (0, tl.bfloat16), "fp8_v4": (1, tl.bfloat16), "index_fp8": (2, tl.bfloat16),
           "index_fp4": (3, tl.bfloat16), "fp8_v41": (4, tl.bfloat16)}  # fmt: skip


def compiled(kernel, kinds, constants, arch, warps=4):
    """Assembly of ``kernel``: arguments are constants, of the given kinds, or int32."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values)
    return triton.compile(source, target=target_of(arch), options={"num_warps": warps, "enable_fp_fusion": True}).asm


def pointers(kernel, **kinds):
    """Element types of a kernel's pointers; float32 where nothing else is said."""
    return {name: "*fp32" for name in kernel.arg_names if name.endswith("_ptr")} | kinds


ROW = norm_rope_triton.TokenArguments(
    "*bf16", "i32", "*fp32", "*bf16", "i32", "*bf16", "i32", "*fp32", "*bf16", "i32", "*i64", "*fp32", "i32", "*i64",
    "fp32", "*u8", "i64", *4 * ("constexpr",),
)  # fmt: skip
PART = compress_triton.PartArguments(
    "*fp32", "*fp32", "*fp32", "*fp32", "i32", "i32", "i64", "*fp32", "*fp32", "i32", "*u8", "i64", "fp32"
)
BATCH = compress_triton.BatchArguments("*i64", "*i32", "*i32", "*i32", "*i32", "*i64", "*i1", "i32")


HEADS = norm_rope_triton.HeadArguments("*bf16", "*fp32", "*i64", "*bf16", "fp32", *6 * ("i32",))
HEAD_SHAPE = norm_rope_triton.HeadShape(512, 64, 512, 4, tl.bfloat16)


def index_args(fmt):
    out = "*bf16" if fmt == "plain" else "*u8"
    return IndexQueryArgs("*bf16", "*fp32", "*fp32", "*i64", out, "*fp32", "fp32", "i32", "i32", "i32")


def index_shape(fmt, native):
    return IndexQueryShape(64, 128, 64, False, fmt == "fp4", 7, fmt, native, 16)


def row_shape(record):
    number, plain = RECORDS[record]
    dim = 128 if record.startswith("index") else 512
    nope = dim if record == "fp8_v41" else dim - 64
    return norm_rope_triton.TokenShape(
        dim, nope, 64, dim, 64, number, plain, tl.bfloat16, 1536, 2048, tl.bfloat16, False, False
    )


SCRATCH = compress_triton.Scratch("*fp32", "*i32", "i32")


# ratio, number of the record of index keys, prompts
COMPRESSED = {
    "C4A, fp8 keys": (4, 2, False),
    "C4A, plain keys": (4, 0, False),
    "C4A, fp4 keys": (4, 3, False),
    "C4A, prompts": (4, 2, True),
    "C128A": (128, None, False),
    "C128A, prompts": (128, None, True),
}


def compress_constants(layer, arch):
    """Of the shapes of V4: an entry, and for C4A an index key."""
    ratio, keys, long = COMPRESSED[layer]
    config, jobs = compress.launch_config(128 if ratio == 128 else 8), 4 if ratio == 4 else 16
    common = {"ROPE": 64, "DTYPE": tl.bfloat16, "PLAIN": tl.bfloat16, "N": 64}
    shapes = [compress_triton.PartShape(512, 512, STAGES=0, NOPE=448, RECORD=1, JOBS=jobs, **common)]
    if keys is not None:
        key = compress_triton.PartShape(128, 128, STAGES=7, NOPE=128, RECORD=keys, JOBS=1, **common)
        shapes, jobs = [*shapes, key], jobs + 1
    pooled, group = (8, 4) if ratio == 4 else (128, 1)
    tiling = (config.lanes, config.reads, config.channels, config.chunks)
    pooling = compress_triton.PoolingConfig(ratio, pooled, pooled + 16, *tiling, group, jobs, long, 128)
    return {
        "SHAPES": tuple(shapes),
        "CONFIG": pooling,
        "NATIVE_FP8": arch != "sm80",
        "PDL": CAPABILITIES[arch] >= (9, 0),
    }


@pytest.mark.parametrize(("arch", "record"), on_gpus(RECORDS, ["fp8_v4"]))
def test_norm_rope_insert(arch, record):
    constants = {"SHAPE": row_shape(record), "NATIVE_FP8": arch != "sm80", "PDL": CAPABILITIES[arch] >= (9, 0)}
    asm = compiled(norm_rope_triton.norm_rope_insert_kernel, {"rows": ROW}, constants, arch)
    assert asm["cubin"]
    assert ("e4m3" in asm["ptx"]) == (arch != "sm80" and record in ("fp8_v4", "index_fp8", "fp8_v41"))


@pytest.mark.parametrize(("arch", "scales"), on_gpus(["pow2", "raw"], ["pow2"]))
def test_norm_rope_insert_with_a_quantised_latent(arch, scales):
    shape = replace(row_shape("plain"), QUANTIZE=True, POW2=scales == "pow2")
    constants = {"SHAPE": shape, "NATIVE_FP8": arch != "sm80", "PDL": False}
    fp8 = "*u8" if arch == "sm80" else "*fp8e4nv"
    rows = ROW._replace(fp8=fp8, fp8_stride="i32", fp8_scale="*fp32", fp8_scale_stride="i32")
    asm = compiled(norm_rope_triton.norm_rope_insert_kernel, {"rows": rows}, constants, arch)
    assert asm["cubin"]
    assert ("e4m3" in asm["ptx"]) == (arch != "sm80")


@pytest.mark.parametrize(("arch", "layer"), on_gpus(LAYERS, ["V3.2"]))
def test_insert_latents(monkeypatch, arch, layer):
    pass_for_gpu(monkeypatch, CAPABILITIES[arch])
    tokens = make(layer, torch.bfloat16, torch.device("cpu"))
    if tokens.qr.shape[1] % 128 == 0:
        values, scale = torch.empty(tokens.qr.shape, dtype=torch.uint8), torch.empty(tokens.qr.shape[1] // 128, 9).t()
        tokens = tokens._replace(qr_fp8=QuantizedRows(values.view(torch.float8_e4m3fn), scale))
    found = compiled_launches(monkeypatch, [latents], arch, lambda: latents.insert_latents(tokens))
    (kernel,) = found["insert_latents_kernel"]
    assert ("e4m3" in kernel.asm["ptx"]) == (arch != "sm80" and layer not in ("plain", "odd"))


V41_RECORDS = {
    "fp8_v4": Fp8DsMlaRecord(448, 64), "index_fp8": IndexFp8Record(128), "index_fp4": IndexFp4Record(128),
    "plain": PlainRecord(512, torch.bfloat16), "fp8_v41": Fp8V41Record(512), "fp4_v41": Fp4V41Record(512),
}  # fmt: skip


@pytest.mark.parametrize(("arch", "name"), on_gpus(V41_RECORDS, ["fp4_v41"]))
def test_latents_and_rows_that_are_rotated(monkeypatch, arch, name):
    """Those of V4.1: latents of pairs of tokens; entries and index keys made of them."""
    pass_for_gpu(monkeypatch, CAPABILITIES[arch])

    def of(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    record, table = V41_RECORDS[name], of(4096, 64)
    pool, slots = of(9, record.page_bytes(64), dtype=torch.uint8), of(3, dtype=torch.int64)

    def call():
        entries.rope_insert(of(3, record.dim).bfloat16(), slots, table, CacheRows(record, pool, 64, slots))
        projected = (of(3, 512), of(3, 512), of(2, 512), of(9, 18, 1024), of(512), 1e-20, table)
        part = CompressPart(*projected, record, pool, 64, torch.bfloat16)
        int32 = [of(n, dtype=torch.int32) for n in (3, 2, 1, 1)]
        batch = CompressBatch(2, False, 18, slots, *int32, slots, of(3, dtype=torch.bool), 3)
        compress.compress_latents(part, batch)

    found = compiled_launches(monkeypatch, [entries, compress], arch, call)
    assert set(found) == {"rope_insert_kernel", "compress_kernel"}


@pytest.mark.parametrize(("arch", "norm"), on_gpus([True, False], [True]))
def test_query_norm_rope(arch, norm):
    constants = {"SHAPE": replace(HEAD_SHAPE, NORM=norm), "PDL": CAPABILITIES[arch] >= (9, 0)}
    asm = compiled(norm_rope_triton.query_norm_rope_kernel, {"rows": HEADS}, constants, arch)
    assert asm["cubin"]
    assert ("griddepcontrol.wait" in asm["ptx"]) == (CAPABILITIES[arch] >= (9, 0))


@pytest.mark.parametrize(("arch", "fmt"), on_gpus(["plain", "fp8", "fp4"], ["fp8"]))
def test_index_query(arch, fmt):
    native = arch != "sm80"
    constants = {"SHAPE": index_shape(fmt, native), "PDL": CAPABILITIES[arch] >= (9, 0)}
    asm = compiled(index_query_kernel, {"args": index_args(fmt)}, constants, arch)
    assert asm["cubin"]
    assert ("e4m3x2" in asm["ptx"]) == (native and fmt != "plain")


@pytest.mark.parametrize("arch", on_gpus())
def test_queries(arch):
    native = arch != "sm80"
    constants = {"SHAPE": HEAD_SHAPE, "INDEX_SHAPE": index_shape("fp8", native), "PDL": CAPABILITIES[arch] >= (9, 0)}
    kinds = {"args": HEADS, "index_args": index_args("fp8")}
    assert compiled(queries_kernel, kinds, constants, arch)["cubin"]


@pytest.mark.parametrize(("arch", "layer"), on_gpus(COMPRESSED, ["C128A"]))
def test_compress(arch, layer):
    constants = compress_constants(layer, arch)
    kinds = {"parts": (PART,) * len(constants["SHAPES"]), "batch": BATCH, "scratch": SCRATCH}
    asm = compiled(compress.compress_kernel, kinds, constants, arch)
    assert asm["cubin"]
    assert ("e4m3" in asm["ptx"]) == (arch != "sm80")


@pytest.mark.parametrize(("arch", "layer"), on_gpus(["C4A, fp8 keys", "C128A"], ["C128A"]))
def test_insert_tokens(arch, layer):
    constants = compress_constants(layer, arch) | {"SHAPE": row_shape("fp8_v4")}
    kinds = {"rows": ROW, "parts": (PART,) * len(constants["SHAPES"]), "batch": BATCH, "scratch": SCRATCH}
    assert compiled(insert.insert_tokens_kernel, kinds, constants, arch)["cubin"]


# entry bytes, then of its coded part: values, values per scale; then where raw values begin, and how many
ENTRIES = {"plain": (1024, 0, 64, 0, 512), "V4": (576, 448, 64, 448, 64), "V3.2": (656, 512, 128, 528, 64)}
ENTRIES |= {"V4.1": (512, 512, 32, 0, 0), "V4.1 FP4": (256, 512, 16, 0, 0)}


@pytest.mark.parametrize(("arch", "record"), on_gpus(list(ENTRIES), ["V4"]), ids=str)
def test_gather(arch, record):
    kernel = gather_triton.gather_kernel
    block = ENTRIES[record][-1] if record in ("plain", "V3.2") else 0
    shape = gather_triton.EntryShape(64, *ENTRIES[record], tl.bfloat16, tl.bfloat16, 512, block, arch != "sm80")
    constants = {"SHAPE": shape, "ROWS": 8}
    kinds = pointers(kernel, out_ptr="*bf16", pool_ptr="*u8", table_ptr="*i32")
    kinds |= dict.fromkeys(("seq_lens_ptr", "gather_lens_ptr"), "*i32")
    assert compiled(kernel, kinds, constants, arch)["cubin"]
