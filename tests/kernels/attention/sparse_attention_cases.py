"""Hostile inputs for the GPU tests of sparse attention: memory that must not be read is NaN; and comparisons."""

from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from deepseek_attn.cache.records import Fp8DsMlaRecord
from deepseek_attn.cache.records_v41 import Fp4V41Record, Fp8V41Record
from deepseek_attn.kernels.attention import PagedKeys, plan
from deepseek_attn.kernels.common.plans import Choice

V4 = Fp8DsMlaRecord(448, 64)
TINY = Fp8DsMlaRecord(64, 64)
V41 = {dim: (Fp8V41Record(dim), Fp4V41Record(dim)) for dim in (96, 512)}
NAN, INF, HUGE = float("nan"), float("inf"), 2**31 - 1
LIMIT = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 2e-5}


class Launch(NamedTuple):
    """A launch in place of the planned one: tiles as in `AttendTiles`, splits, and whether by a kernel for Hopper."""

    heads: int
    keys: int
    warps: int
    stages: int
    piece: int = 64
    splits: int = 1
    hopper: bool = False


@contextmanager
def forced(launch):
    """Attention in this context is launched as ``launch`` says; as planned if it is None."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    from deepseek_attn.kernels.attention import launch as attend

    def plan_attend(problem, gpu):
        on_hopper = {64: "attend_hopper_kernel", 128: "attend_v32_hopper_kernel"}
        kernel = on_hopper[problem.group] if launch.hopper else "attend_kernel"
        choice = Choice(kernel, plan.AttendTiles(*launch[:5]), "forced", "")
        return plan.attend_plan(problem, gpu, choice, launch.splits)

    with mock.patch.object(attend, "plan_attend", plan.plan_attend if launch is None else plan_attend):
        yield


def skip_unless_it_runs(launch):
    if launch.hopper and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


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
    """Indices into ``live`` with holes; past a row's length, ``dead`` and huge ones that must not be read."""
    indices = live[torch.randint(len(live), (T, K))].int()
    indices[:, -1] = live[-1]
    indices[:, 2::5] = torch.tensor([-1, -2, HUGE, -HUGE]).int()[torch.arange(len(range(2, K, 5))) % 4]
    lens = torch.randint(0, K + 1, (T,)).int()
    lens[0], lens[T // 2], lens[-1] = 0, 1, K
    past = torch.arange(K) >= lens[:, None]
    return torch.where(past, torch.tensor([dead, HUGE, -HUGE]).int()[torch.arange(K) % 3], indices), lens


def make_pool(record, T, K, n, pages, stride=1):
    """Live entries at odd slots of a pool that is NaN (0xFF) elsewhere."""
    size = record.page_bytes(n)
    pool = torch.full((pages, size * stride), 0xFF, dtype=torch.uint8)[:, :size]
    live = torch.randint(pages * n // 2, (2 * T + 300,)).unique() * 2 + 1
    live = torch.cat([live[live < pages * n - 1], torch.tensor([pages * n - 1 - pages * n % 2])])
    record.insert(pool, n, live, torch.randn(len(live), record.dim) * 2)
    return PagedKeys(record, pool, n, *hostile(T, K, live, 0))
