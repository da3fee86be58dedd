"""Sparse attention over V3.2's FP8 entries in Triton: compiled for every generation, and on a GPU against torch."""

import re
from dataclasses import replace

import pytest
import torch

from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record
from deepseek_attn.kernels.attention import PagedKeys, reference
from tests.kernels.attention.sparse_attention_cases import LIMIT, Launch, check, forced, make_pool, skip_unless_it_runs

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.attention.launch import sparse_attention_paged
from deepseek_attn.kernels.attention.plan import AttendProblem, AttendTiles, plan_attend
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import recorded_plans
from deepseek_attn.runner.ahead.recording import recorded_launches
from tests.kernels.compiled_launches import CAPABILITIES, compiled_ops, on_gpus, ptxas_report
from tests.support.tiers import tiered
from tests.support.typed import required

RECORD = Fp8DsMlaV32Record()
SCALE = 576**-0.5
PORTABLE = {
    "128 heads": (64, 128, True),
    "one query": (1, 16, False),
}  # queries, heads; a sink, which Hopper's kernel lacks


def attend_v32(T, H, record=RECORD, sink=None, width=2048, shift=0, d_v=None, pools=1, dtype=torch.bfloat16):
    """An op call on tensors without memory."""
    size = record.page_bytes(64)
    pool = torch.empty(3, size + 16, dtype=torch.uint8, device="meta")[:, shift : shift + size]
    lens, indices = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((T,), (T, width)))
    keys = [PagedKeys(record, pool, 64, indices, lens)] * pools
    q = torch.empty(T, H, record.dim, dtype=dtype, device="meta")
    return sparse_attention_paged(q, keys, SCALE, sink, record.nope_dim if d_v is None else d_v)


@pytest.mark.parametrize(("arch", "shape"), on_gpus(PORTABLE, ["128 heads"]))
def test_v32_entries_compile(arch, shape):
    T, H, with_sink = PORTABLE[shape]
    sink = torch.empty(H, device="meta") if with_sink else None
    (kernel, *_) = compiled_ops(arch, lambda: attend_v32(T, H, sink=sink))["attend_kernel"]
    assert ("e4m3" in kernel.asm["ptx"]) == (arch != "sm80")


V32 = AttendProblem(1, 576, heads=16, d_v=512, width=2048, nope=512, group=128)
H200 = GPU((9, 0), 132)


@pytest.mark.parametrize(
    ("T", "H", "splits"),
    [(2, 16, 32), (8, 16, 16), (32, 16, 4), (128, 16, 1), (1, 64, 32), (8, 64, 16), (1, 128, 32), (4, 128, 16),
     (8, 128, 8), (32, 128, 2), (128, 128, 1), (5000, 128, 1)],
)  # fmt: skip
def test_how_hopper_attends(T, H, splits):
    """As measured on an H200: the warp-specialised kernel, in as many splits as multiprocessors run at once."""
    plan = plan_attend(replace(V32, rows=T, heads=H), H200)
    assert plan.attend.kernel == "attend_v32_hopper_kernel"
    assert plan.splits == splits
    assert T * -(-H // 64) * splits <= max(132, T * -(-H // 64))


def test_one_query_of_few_heads_stays_portable():
    plan = plan_attend(V32, H200)
    assert (plan.attend.kernel, plan.attend.config, plan.splits) == (
        "attend_kernel",
        AttendTiles(16, 32, 4, 2, 128),
        64,
    )


@pytest.mark.parametrize("arch", [arch for arch in CAPABILITIES if arch != "sm90"])
def test_other_gpus_stay_portable(arch):
    assert plan_attend(replace(V32, rows=8), GPU(CAPABILITIES[arch], 132)).attend.kernel == "attend_kernel"


@pytest.mark.parametrize(("nope", "split"), tiered([(512, True), (512, False), (256, True)], [(512, True)]))
def test_the_hopper_kernel_of_v32_entries_compiles(nope, split, tmp_path):
    queries = 8 if split else 150
    found = compiled_ops("sm90", lambda: attend_v32(queries, 64, Fp8DsMlaV32Record(nope, 64)))
    assert ("attention_combine_kernel" in found) == split
    (kernel,) = found["attend_v32_hopper_kernel"]
    assert "wgmma" in kernel.asm["ptx"]
    assert "setmaxnreg" in kernel.asm["ptx"]
    report = ptxas_report(kernel, tmp_path)
    assert "serialized" not in report, "with fewer registers ptxas would wait for every product"
    assert int(required(re.search(r"(\d+) bytes spill stores", report))[1]) < 320


@pytest.mark.parametrize(("change", "fits"), [
    ({}, True), ({"record": Fp8DsMlaV32Record(256, 64)}, True), ({"dtype": torch.float32}, False),
    ({"sink": torch.empty(64, device="meta")}, False), ({"d_v": 576}, False), ({"pools": 2}, False),
    ({"record": Fp8DsMlaV32Record(512, 32)}, False), ({"record": Fp8DsMlaV32Record(128, 64)}, False),
    ({"shift": 4}, False),
], ids=str)  # fmt: skip
def test_which_v32_entries_the_hopper_kernel_takes(change, fits):
    with recorded_launches(H200), recorded_plans() as plans:
        attend_v32(150, 64, **change)
    ((_, _, plan),) = plans
    assert (plan.attend.kernel == "attend_v32_hopper_kernel") == fits


# --- on a GPU: DEEPSEEK_ATTN_TEST_DEVICE=cuda ---


HOPPER = [Launch(64, 64, 8, 1, splits=splits, hopper=True) for splits in (1, 2, 5)]


def run(q, pool, config=None, **options):
    with forced(config):
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
    [Launch(16, 32, 4, 2, 64, 3), Launch(64, 64, 8, 1, 128), Launch(32, 32, 8, 1, 64, 5), *HOPPER],
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
    reads = ((pool.indices == slot) & (torch.arange(700) < required(pool.lens)[:, None])).any(1)
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
