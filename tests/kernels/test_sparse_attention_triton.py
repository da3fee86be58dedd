"""The Triton kernels of sparse attention: compiled for every GPU generation, and on a GPU against float32 torch."""

import os

import pytest
import torch

from deepseek_attn.cache.records import Fp8DsMlaRecord, PlainRecord
from deepseek_attn.kernels.reference import sparse_attention as reference

pytest.importorskip("triton", reason="the package triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from deepseek_attn.kernels.sparse_attention import (
    Tiles,
    choose_tiles,
    dot_dtype,
    pieces,
    sparse_attention,
    sparse_attention_paged,
)
from deepseek_attn.kernels.sparse_attention_hopper import attend_hopper_kernel
from deepseek_attn.kernels.sparse_attention_kernels import attend_kernel, combine_kernel

V4 = Fp8DsMlaRecord(448, 64)
TINY = Fp8DsMlaRecord(64, 64)
NAN, INF, HUGE = float("nan"), float("inf"), 2**31 - 1
LIMIT = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 2e-5}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


# --- every kernel compiles for every generation, on any machine ---


def compiled(kernel, pointers, constants, capability, warps, stages=1):
    """Assembly of ``kernel`` for a GPU, with pointers of the given element types, and int32 for the rest."""
    kinds = pointers | {"scale_log2": "fp32"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if "stride" in name or "ptr" in name}
    source = GluonASTSource if kernel is attend_hopper_kernel else ASTSource
    source = source(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})


def compiled_attention(capability, T, H, q, keys, fp8, pools, dim=512, hopper=False):
    dtype, nope = dot_dtype(q, keys, fp8), dim - 64 if fp8 else dim
    tiles = choose_tiles(T, H, dim, 640, dtype, hopper, capability, 132)
    split = tiles.splits > 1
    out = dtype if split and dtype == torch.float16 else torch.float32 if split else q
    pool = "*u8" if fp8 else f"*{NAMES[keys]}"
    pointers = dict.fromkeys(("indices0_ptr", "indices1_ptr", "lens0_ptr", "lens1_ptr"), "*i32")
    pointers |= {"q_ptr": f"*{NAMES[q]}", "pool0_ptr": pool, "pool1_ptr": pool, "out_ptr": f"*{NAMES[out]}"}
    pointers |= {"sink_ptr": "*fp32", "lse_ptr": "*fp32"}
    constants = {"NOPE": nope, "N0": 64, "N1": 2 if fp8 else 64, "POOLS": pools, "SPLIT": split, "HAS_SINK": True}
    constants |= {"HAS_LENS0": True, "HAS_LENS1": True}
    if tiles.hopper:
        return compiled(attend_hopper_kernel, pointers, constants, capability, 8)
    starts, widths = pieces(nope, dim, tiles.piece)
    constants |= {"DIM": dim, "D_V": dim, "STARTS": starts, "WIDTHS": widths, "V_PIECES": len(starts)}
    constants |= {"ROW": nope + 128 if fp8 else dim, "FP8": fp8, "NATIVE_FP8": capability >= (8, 9)}
    constants |= {
        "DTYPE": triton.language.dtype(NAMES[dtype]),
        "PRECISION": "tf32x3" if dtype == torch.float32 else None,
    }
    constants |= {"BLOCK_H": tiles.heads, "BLOCK_N": tiles.keys, "STAGES": tiles.stages}
    constants["PDL"] = split and capability[0] >= 9
    return compiled(attend_kernel, pointers, constants, capability, tiles.warps, tiles.stages)


CAPABILITIES = {"sm80": (8, 0), "sm89": (8, 9), "sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0)}
SHARED = {"sm80": 163, "sm89": 99, "sm90": 227, "sm100": 227, "sm120": 99}  # KiB that a program may use
SHAPES = {
    "fp8 pages, 8 heads": {"T": 1, "H": 8, "q": torch.bfloat16, "keys": torch.uint8, "fp8": True, "pools": 2},
    "fp8 pages, 64 heads": {"T": 256, "H": 64, "q": torch.bfloat16, "keys": torch.uint8, "fp8": True, "pools": 2},
    "bf16 rows, 64 heads": {"T": 256, "H": 64, "q": torch.bfloat16, "keys": torch.bfloat16, "fp8": False, "pools": 1},
    "float32 rows": {"T": 9, "H": 64, "q": torch.float32, "keys": torch.float32, "fp8": False, "pools": 1},
}
CASES = [(arch, shape) for arch in CAPABILITIES for shape in SHAPES if shape != "float32 rows" or arch == "sm80"]


@pytest.mark.parametrize(("arch", "shape"), CASES)
def test_attention_compiles(arch, shape):
    kernel = compiled_attention(CAPABILITIES[arch], **SHAPES[shape])
    assert kernel.metadata.shared <= SHARED[arch] * 1024
    assert kernel.asm["cubin"]
    native = "e4m3" in kernel.asm["ptx"]
    assert native == (SHAPES[shape]["fp8"] and arch != "sm80")


@pytest.mark.parametrize("dim", [128, 512])
def test_the_hopper_kernel_compiles(dim):
    shape = SHAPES["fp8 pages, 64 heads"] | {"hopper": True, "dim": dim}
    kernel = compiled_attention((9, 0), **shape)
    assert "wgmma" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED["sm90"] * 1024


@pytest.mark.parametrize("arch", CAPABILITIES)
def test_the_combine_kernel_compiles(arch):
    pointers = {"part_ptr": "*fp16", "part_lse_ptr": "*fp32", "sink_ptr": "*fp32", "out_ptr": "*bf16"}
    pdl = CAPABILITIES[arch][0] >= 9
    constants = {"D_V": 512, "HAS_SINK": True, "BLOCK_S": 16, "BLOCK_D": 512, "PDL": pdl}
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
                tiles = choose_tiles(T, H, 512, width, torch.float16, capability[0] == 9, capability, 132)
                blocks = -(-width // tiles.keys)
                share = -(-blocks // tiles.splits)
                assert 1 <= tiles.splits <= blocks
                assert share * (tiles.splits - 1) < blocks
                assert T * -(-H // tiles.heads) * tiles.splits <= max(2 * 132, T * -(-H // tiles.heads))


# --- on a GPU: DEEPSEEK_ATTN_TEST_DEVICE=cuda ---


@pytest.fixture
def gpu(device):
    if device.type != "cuda" or not torch.cuda.is_available():
        pytest.skip(f"needs an NVIDIA GPU; DEEPSEEK_ATTN_TEST_DEVICE is {os.environ.get('DEEPSEEK_ATTN_TEST_DEVICE')}")
    torch.set_default_device(device)
    yield device
    torch.set_default_device(None)


def relative(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def check(got, expected, limit):
    (out, lse), (expected_out, expected_lse) = got, expected
    assert relative(out, expected_out) <= limit  # false for NaN
    lonely = expected_lse.isinf()
    assert torch.equal(lse.isinf(), lonely)
    assert out[lonely].eq(0).all()
    torch.testing.assert_close(lse[~lonely], expected_lse[~lonely], rtol=1e-4, atol=1e-4)


def hostile(T, K, live, dead):
    """Indices into ``live`` with holes, and what a row must not look at past its length: ``dead`` and huge ones."""
    indices = live[torch.randint(len(live), (T, K))].int()
    indices[:, -1] = live[-1]
    indices[:, 2::5] = torch.tensor([-1, -2, HUGE, -HUGE]).int()[torch.arange(len(range(2, K, 5))) % 4]
    lens = torch.randint(0, K + 1, (T,)).int()
    lens[0], lens[T // 2], lens[-1] = 0, 1, K
    past = torch.arange(K) >= lens[:, None]
    return torch.where(past, torch.tensor([dead, HUGE, -HUGE]).int()[torch.arange(K) % 3], indices), lens


def make_pool(record, T, K, n, pages, stride=1):
    """``(record, pool, n, indices, lens)``: live entries at odd slots of a pool that is NaN (0xFF) elsewhere."""
    size = record.page_bytes(n)
    pool = torch.full((pages, size * stride), 0xFF, dtype=torch.uint8)[:, :size]
    live = torch.randint(pages * n // 2, (2 * T + 300,)).unique() * 2 + 1
    live = torch.cat([live[live < pages * n - 1], torch.tensor([pages * n - 1 - pages * n % 2])])
    record.insert(pool, n, live, torch.randn(len(live), record.dim) * 2)
    return record, pool, n, *hostile(T, K, live, 0)


def paged(q, pools, sink, **options):
    return sparse_attention_paged(q, pools, q.shape[2] ** -0.5, sink, **options)


def paged_reference(q, pools, sink):
    return reference.sparse_attention_paged(q.float(), pools, q.shape[2] ** -0.5, sink)


@pytest.mark.parametrize("K", [1, 7, 64, 100, 192, 512, 513, 1024])
@pytest.mark.parametrize("H", [1, 8, 16, 32, 64, 100, 128])
def test_two_fp8_pools(gpu, H, K):
    for T in (1, 9, 70):
        q, sink = torch.randn(T, H, 512).bfloat16(), torch.randn(H) * 2
        pools = [make_pool(V4, T, 128, 64, 31), make_pool(V4, T, K, 64, 99)]
        check(paged(q, pools, sink), paged_reference(q, pools, sink), LIMIT[q.dtype])


@pytest.mark.parametrize("n", [(64, 2), (1, 64), (53, 61), (256, 32)], ids=str)
@pytest.mark.parametrize("record", [V4, TINY, Fp8DsMlaRecord(128, 32)], ids=lambda r: str(r.dim))
def test_page_sizes_and_dims(gpu, record, n):
    q, sink = torch.randn(33, 40, record.dim).bfloat16(), torch.randn(40)
    pools = [make_pool(record, 33, 128, n[0], 999), make_pool(record, 33, 130, n[1], 999)]
    check(paged(q, pools, sink), paged_reference(q, pools, sink), LIMIT[q.dtype])
    check(paged(q, pools[:1], None), paged_reference(q, pools[:1], None), LIMIT[q.dtype])


EVERY_CUT = [
    Tiles(16, 32, 4, 2),
    Tiles(16, 64, 8, 2, 128, 3),
    Tiles(32, 32, 8, 2, 64, 7),
    Tiles(64, 64, 8, 2),
    Tiles(64, 64, 8, 2, 128, 5),
    Tiles(64, 64, 8, 1, 64, 1, True),
    Tiles(64, 64, 8, 1, 64, 4, True),
    Tiles(64, 64, 8, 1, 64, 130, True),
]


@pytest.mark.parametrize("tiles", EVERY_CUT, ids=lambda t: f"{t.heads}x{t.keys}x{t.splits}{'g' * t.hopper}")
def test_every_cut_gives_the_same(gpu, tiles):
    if tiles.hopper and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon kernel is for compute capability 9.0")
    q, sink = torch.randn(21, 100, 512).bfloat16(), torch.randn(100)
    pools = [make_pool(V4, 21, 128, 64, 31, stride=3), make_pool(V4, 21, 700, 2, 999, stride=2)]
    expected = paged_reference(q, pools, sink)
    for _ in range(5):
        check(paged(q, pools, sink, tiles=tiles), expected, LIMIT[q.dtype])
    without = [(*pool[:3], torch.where(torch.arange(pool[3].shape[1]) < pool[4][:, None], pool[3], -1), None)
               for pool in pools]  # fmt: skip
    check(paged(q, without, sink, tiles=tiles), expected, LIMIT[q.dtype])


@pytest.mark.parametrize("H", [8, 64])
@pytest.mark.parametrize(("q_dtype", "dtype"), [
    (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16),
], ids=str)  # fmt: skip
def test_plain_pools(gpu, q_dtype, dtype, H):
    for dim in (512, 80, 24):
        q, sink = torch.randn(17, H, dim).to(q_dtype), torch.randn(H)
        record = PlainRecord(dim, dtype)
        pools = [make_pool(record, 17, 128, 64, 31, 2), make_pool(record, 17, 99, 2, 500)]
        check(paged(q, pools, sink), paged_reference(q, pools, sink), LIMIT[q_dtype])


def test_float32_queries_read_fp8_in_float32(gpu):
    q, sink = torch.randn(5, 16, 512), torch.randn(16)
    pools = [make_pool(V4, 5, 128, 64, 31), make_pool(V4, 5, 130, 2, 999)]
    check(paged(q, pools, sink), paged_reference(q, pools, sink), LIMIT[q.dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("K", [1, 7, 64, 100, 192, 513, 1024])
@pytest.mark.parametrize("H", [1, 8, 32, 64, 128])
def test_workspace_rows(gpu, H, K, dtype):
    T = 130 if K < 600 else 40
    q, kv, sink = torch.randn(T, H, 512).to(dtype), torch.randn(2001, 512).to(dtype), torch.randn(H)
    kv[::2] = NAN
    indices, lens = hostile(T, K, torch.arange(1, 2000, 2), 0)
    got = sparse_attention(q, kv, indices, 512**-0.5, sink, lens)
    check(got, reference.sparse_attention(q.float(), kv, indices, 512**-0.5, sink, lens), LIMIT[dtype])


def test_keys_wider_than_values(gpu):
    q, kv = torch.randn(50, 20, 576).bfloat16(), torch.randn(999, 576).bfloat16()
    indices, lens = hostile(50, 300, torch.arange(999), 3)
    got = sparse_attention(q, kv, indices.long(), 0.07, None, lens.long(), 512)
    check(got, reference.sparse_attention(q.float(), kv, indices, 0.07, None, lens, 512), LIMIT[q.dtype])


def test_pool_over_two_gib(gpu):
    pages = 61_000
    pools = [make_pool(V4, 9, 128, 64, pages), make_pool(V4, 9, 512, 64, pages)]
    assert pools[0][1].numel() > 2**31
    assert int(pools[1][3][-1].clamp(max=pages * 64).amax()) // 64 > 57_000
    q, sink = torch.randn(9, 64, 512).bfloat16(), torch.randn(64)
    for tiles in (None, Tiles(16, 64, 8, 2, 128, 4)):
        check(paged(q, pools, sink, tiles=tiles), paged_reference(q, pools, sink), LIMIT[q.dtype])


def test_strided_queries_and_output(gpu):
    whole = torch.randn(9, 70, 512).bfloat16()
    pools = [make_pool(V4, 9, 128, 64, 31, stride=3), make_pool(V4, 9, 300, 64, 99, stride=5)]
    out = torch.full((9, 70, 512), NAN).bfloat16()
    got = paged(whole[:, 3:67], pools, None, out=out[:, 3:67])
    check(got, paged_reference(whole[:, 3:67], pools, None), LIMIT[whole.dtype])
    assert got[0].data_ptr() == out[:, 3:67].data_ptr()
    assert out[:, :3].isnan().all()
    assert out[:, 67:].isnan().all()


@pytest.mark.parametrize("T", [3, 200])
def test_sink_limits(gpu, T):
    q = torch.randn(T, 64, 512).bfloat16()
    pools = [make_pool(V4, T, 128, 64, 31), make_pool(V4, T, 300, 64, 99)]
    sink = torch.randn(64)
    sink[:4] = torch.tensor([INF, -INF, 1e30, -1e30])
    got, plain = paged(q, pools, sink), paged(q, pools, None)
    check(got, paged_reference(q, pools, sink), LIMIT[q.dtype])
    assert got[0][:, [0, 2]].eq(0).all()
    assert torch.equal(got[0][:, [1, 3]], plain[0][:, [1, 3]])
    assert torch.equal(got[1], plain[1])


@pytest.mark.parametrize("T", [1, 5, 200])
def test_nan_in_a_key_that_is_attended_is_not_hidden(gpu, T):
    q, record = torch.randn(T, 64, 512).bfloat16(), V4
    pool = record.allocate(9, 64, gpu)
    record.insert(pool, 64, torch.arange(576), torch.randn(576, 512))
    pool[2].fill_(0xFF)
    indices = torch.randint(128, (T, 200)).int()
    indices[0, 50] = 130
    out, _ = paged(q, [(record, pool, 64, indices, None)], None)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


@pytest.mark.parametrize(("T", "widths"), [(0, (128, 512)), (5, (0, 0)), (5, (0, 100)), (5, (100, 0))], ids=str)
def test_empty(gpu, T, widths):
    q = torch.randn(T, 8, 512).bfloat16()
    pool = V4.allocate(5, 64, gpu)
    V4.insert(pool, 64, torch.arange(320), torch.randn(320, 512))
    pools = [(V4, pool, 64, torch.randint(320, (T, K)).int(), None) for K in widths]
    out, lse = paged(q, pools, None)
    assert (out.shape, lse.shape) == ((T, 8, 512), (T, 8))
    check((out, lse), paged_reference(q, pools, None), LIMIT[q.dtype])
    empty = sparse_attention(q, torch.empty(0, 512).bfloat16(), torch.zeros(T, 4).int(), 1.0)
    assert empty[0].eq(0).all()
    assert empty[1].eq(INF).all()


@pytest.mark.parametrize(("T", "H"), [(1, 64), (8, 64), (33, 128), (300, 64), (9, 8)], ids=str)
def test_fifty_launches_are_bit_identical(gpu, T, H):
    q, sink = torch.randn(T, H, 512).bfloat16(), torch.randn(H)
    pools = [make_pool(V4, T, 128, 64, 31), make_pool(V4, T, 1024, 64, 99)]
    first = paged(q, pools, sink)
    for _ in range(50):
        again = paged(q, pools, sink)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize(("T", "H"), [(1, 64), (9, 64), (9, 8), (200, 64)], ids=str)
def test_graph_replays_with_other_lengths_indices_and_queries(gpu, T, H):
    q, sink = torch.randn(T, H, 512).bfloat16(), torch.randn(H)
    pools = [make_pool(V4, T, 128, 64, 31), make_pool(V4, T, 513, 2, 2999)]
    paged(q, pools, sink)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = paged(q, pools, sink)
    for round_ in range(4):
        for record, pool, n, indices, lens in pools:
            other = make_pool(record, T, indices.shape[1], n, pool.shape[0])
            pool.copy_(other[1])
            indices.copy_(other[3])
            lens.copy_(other[4] if round_ else torch.zeros_like(lens))
        q.normal_()
        graph.replay()
        check(got, paged_reference(q, pools, sink), LIMIT[q.dtype])


def test_refuses_what_it_cannot_read(gpu):
    q, pool = torch.randn(2, 4, 512).bfloat16(), V4.allocate(3, 64, gpu)
    indices = torch.zeros(2, 5).int()
    good = (V4, pool, 64, indices, None)
    other = (PlainRecord(512), PlainRecord(512).allocate(3, 64, gpu), 64, indices, None)
    wrong = {
        "one or two pools": [good] * 3,
        "same record": [good, other],
        "a pool of 65 entries": [(V4, pool, 65, indices, None)],
        "indices must be": [(V4, pool, 64, indices.float(), None)],
        "lens must be": [(V4, pool, 64, indices, torch.zeros(3).int())],
        "multiples of 8 bytes": [(V4, torch.empty(3, 37445, dtype=torch.uint8)[:, 5:], 64, indices, None)],
    }
    for words, pools in wrong.items():
        with pytest.raises(ValueError, match=words):
            paged(q, pools, None)
    with pytest.raises(ValueError, match="sink must be"):
        paged(q, [good], torch.zeros(3))
    with pytest.raises(ValueError, match="out must be"):
        paged(q, [good], None, out=torch.empty(2, 4, 512))
