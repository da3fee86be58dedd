"""The cases of FlashMLA's own tests, on our functions and, on a GPU that has them, on FlashMLA's.

    DEEPSEEK_ATTN_TEST_DEVICE=cuda pytest -m "" tests/flash_mla_api

They are thousands, with the sizes of FlashMLA's: a sample runs, and on a CPU the smaller ones of that.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from functools import partial
from itertools import product

import pytest
import torch

from deepseek_attn import flash_mla_api
from deepseek_attn.impls import flash_mla
from tests.flash_mla_api.cases import Case, Decode, Dense, Functions, Prefill
from tests.support.oracle_flash_mla import Shape
from tests.support.report import Report
from tests.support.tiers import tiered
from tests.support.typed import untyped

CPU_GFLOP = 3

DECODE_SHAPES = ((512, 64, 2), (512, 64, 64), (512, 64, 69), (1024, 576, 2), (1024, 576, 61), (2046, 2048, 2),
                 (2046, 2048, 64), (2046, 2048, 576))  # fmt: skip
CORNER_SHAPES = ((512, 64, 61), (650, 576, 53))


def decode_cases() -> Iterator[Decode]:
    for h_q, lens, extra_lens in product((64, 128), (False, True), (False, True)):
        for shapes, b in product((DECODE_SHAPES, CORNER_SHAPES), (4, 74, 321)):
            corner = shapes is CORNER_SHAPES
            for main, extra in product(shapes, (None, *shapes)):
                for s_q, varlen in product((3,) if corner else (1, 3), (True, False)):
                    if not varlen and (b != 74 or lens or extra_lens):
                        continue
                    for invalid, zero, sink in product((True, False), repeat=3) if corner else ((False, False, True),):
                        if not (invalid or zero or sink):
                            continue
                        shape = partial(Shape, is_varlen=varlen, zero_seqlen_k=zero, all_invalid=invalid)
                        first = shape(*main, topk_length=lens)
                        if extra is not None:
                            second = shape(*extra, topk_length=extra_lens)
                            yield Decode(b, s_q, h_q, 512, first, second, sink)
                        elif not extra_lens:
                            yield Decode(b, s_q, h_q, 512, first, None, sink)
                            if not lens:
                                yield Decode(b, s_q, h_q, 576, first, None, sink)


def prefill_cases() -> Iterator[Prefill]:
    odd = ((592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128), (153, 256), (114, 384))
    for d_qk, h_q in product((512, 576), (128, 64)):
        for (s_kv, topk), s_q in product(((128, 128), (256, 256), (512, 512), *odd), (1, 62, 213)):
            yield Prefill(s_q, s_kv, topk, h_q, d_qk)
        for (s_kv, topk), s_q, sink, lens in product(odd, (62, 213), (False, True), (False, True)):
            yield Prefill(s_q, s_kv, topk, h_q, d_qk, sink, lens)
        for s_q, s_kv, topk in ((1, 128, 128), (1, 256, 256), (1234, 4321, 4096), (4096, 2048, 2048)):
            yield Prefill(s_q, s_kv, topk, h_q, d_qk, True, True, lonely=True)
        for (s_kv, topk), s_q in product(((32, 2048), (64, 8192)), (1, 1024)):
            yield Prefill(s_q, s_kv, topk, h_q, d_qk, True, True)
        yield Prefill(70_000, 256, 256, h_q, d_qk, True, True)


def dense_cases() -> Iterator[Dense]:
    heads = [(h_q, h_k) for h_q, h_k in product((1, 3, 9, 63, 64, 126, 128), (1, 2, 3, 8)) if h_q % h_k == 0]
    for (h_q, h_k), causal in product(heads, (False, True)):
        for b, s_q, s_k, varlen in product((1, 2, 6, 64), (1, 2, 4), (20, 140, 4096), (False, True)):
            yield Dense(b, s_q, s_k, h_q, h_k, causal, varlen)
        yield Dense(128, 2, 4096, h_q, h_k, causal, True, zero_seqlen_k=True)


QUICK = [
    Decode(4, 3, 64, 512, Shape(512, 64, 69, topk_length=True), Shape(512, 64, 2)),
    Decode(4, 1, 128, 576, Shape(512, 64, 2)),
    Decode(4, 3, 64, 512, Shape(512, 64, 61, all_invalid=True, zero_seqlen_k=True), None, False),
    Prefill(62, 153, 256, 64, 512, True, True),
    Prefill(1, 128, 128, 64, 576, True, True, lonely=True),
    Dense(2, 4, 20, 9, 3, True, True),
    Dense(6, 2, 140, 3, 1),
]


def sample() -> list[Case]:
    """Of each function's cases, those that are quick, a random choice and, for prefill, the large corner cases."""
    chosen: list[Case] = list(QUICK)
    for cases, count in ((decode_cases(), 150), (prefill_cases(), 60), (dense_cases(), 60)):
        every: list[Case] = list(dict.fromkeys(cases))
        assert not [case for case in QUICK if type(case) is type(every[0]) and case not in every]
        chosen += random.Random(0).sample(every, count)
        chosen += [case for case in every if isinstance(case, Prefill) and (case.lonely or case.s_q > 1000)]
    return list(dict.fromkeys(chosen))


def run(case: Case, functions: Functions, device: torch.device, report: Report, tame: bool = False, **options) -> None:
    case.run(functions, device, report, tame, **options)


def name(case: Case) -> str:
    """``Decode-4-3-64-512-512x64x69...``: the fields in order."""
    parts = ["x".join(map(short, field)) if isinstance(field, tuple) else short(field) for field in vars(case).values()]
    return "-".join([type(case).__name__, *parts])


def short(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value).removeprefix("torch.")


LARGE = [case for case in sample() if case.gflop > CPU_GFLOP]


@pytest.mark.parametrize("case", tiered(sample(), QUICK, gpu=LARGE), ids=name)
def test_our_functions(report, device, case):
    run(case, flash_mla_api, device, report)


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", sample(), ids=name)
def test_flash_mla_itself(report, device, case):
    """What we compare with is what FlashMLA computes: its conventions, not ours."""
    usable, reason = flash_mla.supported(device)
    if not usable:
        pytest.skip(reason)
    if isinstance(case, Dense) and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("its dense decoding is for compute capability 9.0")
    run(
        case,
        untyped(importlib.import_module("flash_mla")),
        device,
        report,
        tame=True,
        **flash_mla.flavour().options(None),
    )
