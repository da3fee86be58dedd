"""The kernels around the caches compile for every GPU generation, on any machine."""

import os

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

import torch
import triton
from triton.compiler import ASTSource

from deepseek_attn.cache.records import Fp8DsMlaRecord, IndexFp4Record, IndexFp8Record, PlainRecord
from deepseek_attn.cache.records_v41 import Fp4V41Record, Fp8V41Record
from deepseek_attn.kernels.common.quant import empty_quantized_rows
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
    RawQueries,
    TokenRows,
    compress_latents,
    insert_latents,
    insert_tokens,
    norm_rope_triton,
    query_norm_rope,
    rope_insert,
)
from deepseek_attn.kernels.insert.launch import compress_and_insert
from tests.kernels.compiled_launches import CAPABILITIES, compiled_ops, on_gpus, target_of
from tests.kernels.insert.test_insert_latents import LAYERS, called, make
from tests.support.typed import untyped

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter compiles nothing")


def compiled(kernel, kinds, constants, arch, warps=4):
    """Assembly of ``kernel``: arguments are constants, of the given kinds, or int32."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values)
    return triton.compile(source, target=target_of(arch), options={"num_warps": warps, "enable_fp_fusion": True}).asm


HEADS = untyped(norm_rope_triton.HeadArguments)("*bf16", "*fp32", "*i64", "*bf16", "fp32", *6 * ("i32",))
HEAD_SHAPE = norm_rope_triton.HeadShape(512, 64, 4)


def index_args(fmt):
    out = "*bf16" if fmt == "plain" else "*u8"
    return untyped(IndexQueryArgs)("*bf16", "*fp32", "*fp32", "*i64", out, "*fp32", "fp32", "i32", "i32", "i32")


def index_shape(fmt, native):
    return IndexQueryShape(64, 128, 64, False, fmt == "fp4", fmt, native, 16)


def of(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


RECORDS = {
    "plain": PlainRecord(512, torch.bfloat16), "fp8_v4": Fp8DsMlaRecord(448, 64), "index_fp8": IndexFp8Record(128),
    "index_fp4": IndexFp4Record(128), "fp8_v41": Fp8V41Record(512), "fp4_v41": Fp4V41Record(512),
}  # fmt: skip
SLOTS, TABLE = of(3, dtype=torch.int64), of(4096, 64)


def cache_rows(record):
    return CacheRows(record, of(9, record.page_bytes(64), dtype=torch.uint8), 64, SLOTS)


def token_rows(record, qr_fp8=None):
    """Three tokens of V4."""
    qr, kv = of(3, 1536, dtype=torch.bfloat16), of(3, record.dim, dtype=torch.bfloat16)
    return TokenRows(qr, kv, of(1536), of(record.dim), 1e-6, TABLE, SLOTS, cache_rows(record), qr_fp8)


def compressor(record, ratio, overlap=False, hadamard=False):
    width = record.dim * (1 + overlap)
    rows = ratio * (1 + overlap) + 16
    cache = cache_rows(record)
    return CompressPart(
        of(3, width), of(3, width), of(ratio, width), of(9, rows, 2 * width), of(record.dim), 1e-20, TABLE,
        record, cache.pool, 64, torch.bfloat16, hadamard,
    )  # fmt: skip


def batch_of(ratio, overlap=False, max_query_len=3):
    requests, starts, lens, pages = (of(n, dtype=torch.int32) for n in (3, 2, 1, 1))
    rows = ratio * (1 + overlap) + 16
    valid = of(3, dtype=torch.bool)
    return CompressBatch(ratio, overlap, rows, SLOTS, requests, starts, lens, pages, SLOTS, valid, max_query_len)


# ratio, record of index keys, prompts
COMPRESSED = {
    "C4A, fp8 keys": (4, "index_fp8", False),
    "C4A, plain keys": (4, "plain", False),
    "C4A, fp4 keys": (4, "index_fp4", False),
    "C4A, prompts": (4, "index_fp8", True),
    "C128A": (128, None, False),
    "C128A, prompts": (128, None, True),
}


def compressed(layer):
    """Compressors and batch of a V4 layer."""
    ratio, keys, long = COMPRESSED[layer]
    parts = [compressor(RECORDS["fp8_v4"], ratio, keys is not None)]
    if keys is not None:
        record = PlainRecord(128, torch.bfloat16) if keys == "plain" else RECORDS[keys]
        parts.append(compressor(record, ratio, True, hadamard=True))
    return parts, batch_of(ratio, keys is not None, 500 if long else 3)


@pytest.mark.parametrize(("arch", "record"), on_gpus(RECORDS, ["fp8_v4"]))
def test_norm_rope_insert(arch, record):
    (kernel,) = compiled_ops(arch, lambda: insert_tokens(token_rows(RECORDS[record]), (), None))[
        "norm_rope_insert_kernel"
    ]
    quantised = record in ("fp8_v4", "index_fp8", "fp8_v41", "fp4_v41")
    assert ("e4m3" in kernel.asm["ptx"]) == (arch != "sm80" and quantised)


@pytest.mark.parametrize(("arch", "scales"), on_gpus(["pow2", "raw"], ["pow2"]))
def test_norm_rope_insert_with_a_quantised_latent(arch, scales):
    def call():
        fp8 = empty_quantized_rows(3, 1536, torch.device("meta"), pow2_scales=scales == "pow2")
        insert_tokens(token_rows(RECORDS["plain"], fp8), (), None)

    (kernel,) = compiled_ops(arch, call)["norm_rope_insert_kernel"]
    assert ("e4m3" in kernel.asm["ptx"]) == (arch != "sm80")


@pytest.mark.parametrize(("arch", "layer"), on_gpus(LAYERS, ["V3.2"]))
def test_insert_latents(arch, layer):
    def call():
        tokens = make(layer, torch.bfloat16, torch.device("meta"))
        if tokens.qr.shape[1] % 128 == 0:
            tokens = tokens._replace(qr_fp8=empty_quantized_rows(*tokens.qr.shape, torch.device("meta")))
        called(insert_latents, tokens)

    (kernel,) = compiled_ops(arch, call)["insert_latents_kernel"]
    assert ("e4m3" in kernel.asm["ptx"]) == (arch != "sm80" and layer not in ("plain", "odd"))


@pytest.mark.parametrize(("arch", "name"), on_gpus(RECORDS, ["fp4_v41"]))
def test_latents_and_rows_that_are_rotated(arch, name):
    """Those of V4.1: latents of pairs of tokens; entries and index keys made of them."""

    def call():
        rope_insert(of(3, RECORDS[name].dim, dtype=torch.bfloat16), SLOTS, TABLE, cache_rows(RECORDS[name]))
        compress_latents(compressor(PlainRecord(512, torch.bfloat16), 2), batch_of(2))

    assert set(compiled_ops(arch, call)) == {"rope_insert_kernel", "compress_kernel"}


@pytest.mark.parametrize(("arch", "norm"), on_gpus([True, False], [True]))
def test_query_norm_rope(arch, norm):
    heads = RawQueries(of(3, 64 * 512, dtype=torch.bfloat16), 64, 1e-6, TABLE, SLOTS, 64, norm=norm)
    (kernel,) = compiled_ops(arch, lambda: query_norm_rope(heads))["query_norm_rope_kernel"]
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (CAPABILITIES[arch] >= (9, 0))


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
    (kernel,) = compiled_ops(arch, lambda: compress_and_insert(*compressed(layer)))["compress_kernel"]
    assert ("e4m3" in kernel.asm["ptx"]) == (arch != "sm80")


@pytest.mark.parametrize(("arch", "layer"), on_gpus(["C4A, fp8 keys", "C128A"], ["C128A"]))
def test_insert_tokens(arch, layer):
    found = compiled_ops(arch, lambda: insert_tokens(token_rows(RECORDS["fp8_v4"]), *compressed(layer)))
    assert list(found) == ["insert_tokens_kernel"]
