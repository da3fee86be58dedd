"""Sparse attention over V3.2's FP8 entries in Triton: compiled for every generation, and on a GPU against torch."""

import re

import pytest
import torch

from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record
from deepseek_attn.kernels.attention import PagedKeys, reference
from tests.kernels.attention.sparse_attention_cases import LIMIT, check, make_pool, skip_unless_it_runs

pytest.importorskip("triton", reason="the package triton is not installed")

import triton

from deepseek_attn.kernels.attention import attend
from deepseek_attn.kernels.attention.attend import sparse_attention_paged
from deepseek_attn.kernels.attention.attend_triton import attend_kernel
from deepseek_attn.kernels.attention.attend_v32_hopper import attend_v32_hopper_kernel
from deepseek_attn.kernels.attention.launch_config import LaunchConfig, choose_config, pieces
from deepseek_attn.kernels.common.device import GPU
from tests.kernels.attention.test_sparse_attention_compile import compiled
from tests.kernels.compiled_launches import CAPABILITIES, SHARED, on_gpus, ptxas_report
from tests.support.tiers import tiered

RECORD = Fp8DsMlaV32Record()
SCALE = 576**-0.5
PORTABLE = {"128 heads": (64, 128, False), "one query": (1, 16, True)}  # queries, heads; Hopper's kernel takes the keys


@pytest.mark.parametrize(("arch", "shape"), on_gpus(PORTABLE, PORTABLE))
def test_v32_entries_compile(arch, shape):
    T, H, hopper = PORTABLE[shape]
    config = choose_config(T, H, 576, 2048, torch.bfloat16, hopper, GPU(CAPABILITIES[arch], 132))
    starts, widths = pieces(512, 576, config.piece)
    pointers = {"q_ptr": "*bf16", "pool0_ptr": "*u8", "pool1_ptr": "*u8", "out_ptr": "*bf16", "lse_ptr": "*fp32"}
    pointers |= {"sink_ptr": "*fp32", "indices0_ptr": "*i32", "indices1_ptr": "*i32"}
    pointers |= {"lens0_ptr": "*i32", "lens1_ptr": "*i32"}
    constants = {"DIM": 576, "D_V": 512, "NOPE": 512, "STARTS": starts, "WIDTHS": widths, "ROW": 656, "ROPE": 528}
    constants |= {"V_PIECES": sum(start < 512 for start in starts), "N0": 64, "N1": 64, "POOLS": 1, "SPLIT": False}
    constants |= {"FP8": True, "GROUP": 128, "ROW1": 656, "GROUP1": 128, "PRECISION": None}
    constants |= {"DTYPE": triton.language.bfloat16, "HAS_SINK": False, "HAS_LENS0": False, "HAS_LENS1": False}
    constants |= {"BLOCK_H": config.heads, "BLOCK_N": config.keys, "STAGES": config.stages, "PDL": False}
    constants |= {"max_ptr": None, "projected": None, "PROJECTED": None, "NATIVE_FP8": CAPABILITIES[arch] >= (8, 9)}
    kernel = compiled(attend_kernel, pointers, constants, CAPABILITIES[arch], config.warps, config.stages)
    assert kernel.metadata.shared <= SHARED[arch] * 1024
    assert ("e4m3" in kernel.asm["ptx"]) == (arch != "sm80")


def v32_config(T, H, hopper=True):
    return choose_config(T, H, 576, 2048, torch.bfloat16, hopper, GPU((9, 0), 132))


@pytest.mark.parametrize(
    ("T", "H", "splits"),
    [(2, 16, 32), (8, 16, 16), (32, 16, 4), (128, 16, 1), (1, 64, 32), (8, 64, 16), (1, 128, 32), (4, 128, 16),
     (8, 128, 8), (32, 128, 2), (128, 128, 1), (5000, 128, 1)],
)  # fmt: skip
def test_how_hopper_attends(T, H, splits):
    """As measured on an H200: the warp-specialised kernel, in as many splits as multiprocessors run at once."""
    config = v32_config(T, H)
    assert config.hopper
    assert config.splits == splits
    assert T * -(-H // 64) * splits <= max(132, T * -(-H // 64))


def test_one_query_of_few_heads_and_other_keys_stay_portable():
    assert v32_config(1, 16) == LaunchConfig(16, 32, 4, 2, 128, 64)
    assert not any(v32_config(T, H, hopper=False).hopper for T in (1, 8, 128) for H in (16, 128))


@pytest.mark.parametrize(("nope", "split"), tiered([(512, True), (512, False), (256, True)], [(512, True)]))
def test_the_hopper_kernel_of_v32_entries_compiles(nope, split, tmp_path):
    pointers = dict.fromkeys(("indices_ptr", "lens_ptr"), "*i32") | {"q_ptr": "*bf16", "pool_ptr": "*u8"}
    pointers |= {"out_ptr": "*fp32" if split else "*bf16", "lse_ptr": "*fp32"}
    constants = {"NOPE": nope, "N": 64, "HAS_LENS": True, "SPLIT": split}
    kernel = compiled(attend_v32_hopper_kernel, pointers, constants, (9, 0), 8)
    assert kernel.metadata.shared <= SHARED["sm90"] * 1024
    assert "wgmma" in kernel.asm["ptx"]
    assert "setmaxnreg" in kernel.asm["ptx"]
    report = ptxas_report(kernel, tmp_path)
    assert "serialized" not in report, "with fewer registers ptxas would wait for every product"
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) < 320


def test_which_v32_entries_the_hopper_kernel_takes():
    def fits(record=RECORD, dtype=torch.bfloat16, sink=None, d_v=512, pools=1, stride=1, shift=0):
        size = record.page_bytes(64)
        pool = torch.zeros(3, stride * size + 16, dtype=torch.uint8)[:, shift : shift + size]
        indices = torch.zeros(5, 64, dtype=torch.int32)
        keys = [attend._checked_keys(PagedKeys(record, pool, 64, indices))] * pools
        return attend._fits_hopper(keys, dtype, sink, record.dim, d_v)

    assert fits()
    assert fits(Fp8DsMlaV32Record(256, 64), d_v=256)
    assert not any((fits(dtype=torch.float32), fits(sink=torch.zeros(5)), fits(d_v=576), fits(pools=2)))
    assert not any((fits(Fp8DsMlaV32Record(512, 32)), fits(Fp8DsMlaV32Record(128, 64), d_v=128), fits(shift=4)))


# --- on a GPU: DEEPSEEK_ATTN_TEST_DEVICE=cuda ---


HOPPER = [LaunchConfig(64, 64, 8, 1, splits=splits, hopper=True) for splits in (1, 2, 5)]


def run(q, pool, **options):
    return sparse_attention_paged(q, [pool], SCALE, d_v=options.pop("d_v", 512), **options)


def expected_of(q, pool, d_v=512):
    return reference.sparse_attention_paged(q.float(), [pool], SCALE, d_v=d_v)


@pytest.mark.parametrize("K", [1, 100, 512, 2048])
@pytest.mark.parametrize("H", [1, 16, 64, 128])
@pytest.mark.parametrize("rule", ["raw", "pow2"])
def test_v32_entries(gpu, rule, H, K):
    record = Fp8DsMlaV32Record(scale_rule=rule)
    for T in (1, 9):
        q, pool = torch.randn(T, H, 576).bfloat16(), make_pool(record, T, K, 64, 99, stride=1 + T % 2)
        check(run(q, pool), expected_of(q, pool), LIMIT[q.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_queries_of_other_dtypes(gpu, dtype):
    q, pool = torch.randn(5, 16, 576).to(dtype), make_pool(RECORD, 5, 130, 64, 99)
    check(run(q, pool), expected_of(q, pool), LIMIT[dtype])


def test_small_dims_values_of_all_channels_and_odd_pages(gpu):
    record = Fp8DsMlaV32Record(128, 32)
    q, pool = torch.randn(7, 5, 160).bfloat16(), make_pool(record, 7, 70, 3, 333)
    check(run(q, pool, d_v=160), expected_of(q, pool, 160), LIMIT[q.dtype])


@pytest.mark.parametrize(
    "config",
    [LaunchConfig(16, 32, 4, 2, 64, 3), LaunchConfig(64, 64, 8, 1, 128), LaunchConfig(32, 32, 8, 1, 64, 5), *HOPPER],
)
def test_every_configuration_of_v32_entries(gpu, config):
    skip_unless_it_runs(config)
    q, pool = torch.randn(21, 100, 576).bfloat16(), make_pool(RECORD, 21, 700, 64, 99, stride=3)
    for _ in range(3):
        check(run(q, pool, config=config), expected_of(q, pool), LIMIT[q.dtype])


def test_v32_pool_over_two_gib(gpu):
    pages = 60_000
    pool = make_pool(RECORD, 9, 512, 64, pages)
    assert pool.pool.numel() > 2**31
    assert int(pool.indices[-1].clamp(max=pages * 64 - 1).amax()) // 64 > 57_000
    q = torch.randn(9, 64, 576).bfloat16()
    check(run(q, pool), expected_of(q, pool), LIMIT[q.dtype])


@pytest.mark.parametrize(
    ("config", "H"), tiered([(c, H) for c in HOPPER for H in (1, 70, 128)], [(HOPPER[0], 70), (HOPPER[2], 128)])
)
def test_the_hopper_kernel_of_other_sizes(gpu, config, H):
    """Heads and columns that fill no tile, one column, smaller latents, odd pages, rows that are parts of others."""
    skip_unless_it_runs(config)
    for latent, T, K, n in ((512, 3, 1, 64), (256, 17, 130, 5), (512, 150, 2048, 64)):
        record = Fp8DsMlaV32Record(latent, 64)
        wide = torch.randn(T, H + 1, latent + 80).bfloat16()
        q, pool = wide[:, :H, : latent + 64], make_pool(record, T, K, n, 99, stride=3)
        out = torch.full((T, H + 1, latent), torch.nan).bfloat16()
        got = run(q, pool, d_v=latent, config=config, out=out[:, :H])
        check(got, expected_of(q, pool, latent), LIMIT[q.dtype])
        assert out[:, H:].isnan().all()


@pytest.mark.parametrize("config", HOPPER)
def test_the_hopper_kernel_shows_nan_and_repeats_itself(gpu, config):
    skip_unless_it_runs(config)
    q, pool = torch.randn(40, 64, 576).bfloat16(), make_pool(RECORD, 40, 700, 64, 99)
    first = run(q, pool, config=config)
    for _ in range(20):
        again = run(q, pool, config=config)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
    rows = torch.randn(1, 576)
    rows[0, 500] = torch.nan
    slot = int(pool.indices[-1, 300].clamp(0, 99 * 64 - 1))
    RECORD.insert(pool.pool, 64, torch.tensor([slot]), rows)
    pool.indices[-1, 300] = slot
    hurt, _ = run(q, pool, config=config)
    assert hurt[-1].isnan().any()
    reads = ((pool.indices == slot) & (torch.arange(700) < pool.lens[:, None])).any(1)
    assert hurt[~reads].isfinite().all()


@pytest.mark.parametrize("config", [None, HOPPER[0]], ids=["chosen", "hopper"])
def test_the_ends_of_e4m3_and_of_the_scales(gpu, config):
    if config is not None:
        skip_unless_it_runs(config)
    pool = RECORD.allocate(2, 64, gpu)
    rows = torch.randn(128, 576) * torch.logspace(-30, 4, 128)[:, None]
    RECORD.insert(pool, 64, torch.arange(128), rows)
    byte = torch.arange(512) % 256
    pool[0, :512] = byte.where(byte % 128 != 127, 0).to(torch.uint8)  # every e4m3 but NaN
    indices = torch.arange(128).int().view(-1, 1)  # one key each: the output is the value
    out, _ = run(torch.zeros(128, 4, 576).bfloat16(), PagedKeys(RECORD, pool, 64, indices), config=config)
    values = RECORD.gather(pool, 64, torch.arange(128), torch.bfloat16)[:, :512]
    torch.testing.assert_close(out, values.unsqueeze(1).expand(-1, 4, -1), rtol=0, atol=0, equal_nan=True)
