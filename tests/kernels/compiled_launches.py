"""Compiles what an op would launch, for any GPU: the launches are recorded on tensors without memory."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.runner.ahead.recording import recorded_launches
from tests.support.tiers import tiered

CAPABILITIES = {"sm80": (8, 0), "sm89": (8, 9), "sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0)}
SHARED = {"sm80": 163, "sm89": 99, "sm90": 227, "sm100": 227, "sm120": 99}  # KiB that a program may use
MAIN = ("sm90", "sm80")  # with and without FP8 conversions, tensor descriptors and early launches
ONE = ("sm90",)  # of kernels for which only early launches differ
# without the first three, or with FP8 conversions, but little shared memory; sm89 has as little, sm100 as much as sm90
UNLIKE = ("sm80", "sm120")


def on_gpus(variants=None, main=(), kinds=MAIN):
    """Cases ``(arch, variant)`` of a test that compiles, or ``arch`` alone where there are no variants.

    ``make test`` compiles the variants in ``main``, which together launch every kernel of the test, for 9.0. The rest
    is marked ``exhaustive`` and left to ``make test-all``: the variants in ``main`` for all GPUs, the others for 9.0
    and, but with ``kinds=ONE``, two of three for one in `UNLIKE`.
    """
    if variants is None:
        return tiered(CAPABILITIES, ["sm90"])
    assert main
    assert set(main) <= set(variants)
    pairs = []
    for at, variant in enumerate(variants):
        turn = (at + at // 3) % 3  # each beside either of two or three formats, too
        arches = ONE if kinds == ONE else ("sm90", *UNLIKE[turn : turn + 1])
        pairs += [(arch, variant) for arch in (CAPABILITIES if variant in main else arches)]
    return tiered(pairs, [("sm90", variant) for variant in main])


def compiled_ops(arch, call, alike=False):
    """``{kernel name: compiled kernels}``, one for each launch of ``call()`` on a GPU of this kind.

    Ops are called with tensors on the device "meta". Each kernel must fit into the shared memory of ``arch``.

    Args:
        alike: kernels are the same for every GPU, and must fit into the least shared memory.
    """
    with recorded_launches(GPU(CAPABILITIES[arch], 132)) as launches:
        call()
    found, known = {}, {}
    for variant in launches.latest:
        if variant.key not in known:
            known[variant.key] = triton.compile(variant.source, target=variant.target, options=variant.options)
        kernel = known[variant.key]
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= (min(SHARED.values()) if alike else SHARED[arch]) * 1024, variant.name
        found.setdefault(variant.name, []).append(kernel)
    return found


def target_of(arch):
    major, minor = CAPABILITIES[arch]
    return GPUTarget("cuda", 10 * major + minor, 32)


def ptxas_report(kernel, folder):
    """What ptxas says of a kernel compiled for sm90: registers, spills, and products that it would wait for."""
    (folder / "kernel.ptx").write_text(kernel.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(folder / "kernel.ptx"), "-o", str(folder / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "registers" in report
    return report


def loads_behind_release(kernel, folder):
    """Loads from shared memory (SASS of compute capability 9.0) that may be under way when their stage is given back.

    A warp that passes a barrier has begun its earlier loads, and has ended those that it waited for, or that precede a
    memory barrier. TMA may overwrite the stage as soon as one thread, behind the barrier, has arrived at an mbarrier.
    """
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", "-hex", str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    under_way, at_barrier, found, arrivals = {}, [], [], 0
    for line, control in pairwise(lines):
        instruction = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?;)", line)
        word = re.search(r"/\* 0x([0-9a-f]{16}) \*/\s*$", control)
        if instruction is None or word is None:
            continue
        text, bits = instruction[1], int(word[1], 16)  # the upper half of the instruction's 128 bits
        waits, written = bits >> 52 & 63, bits >> 46 & 7  # scoreboards it waits for, the one that its result releases
        under_way = {load: board for load, board in under_way.items() if not waits >> board & 1}
        if "MEMBAR" in text:
            under_way = {}
        elif text.startswith("LDS"):
            under_way[text] = written
        elif "BAR.SYNC" in text:
            at_barrier = list(under_way)
        elif "SYNCS.ARRIVE" in text and "A1T0" in text:
            found += at_barrier
            arrivals += 1
    assert arrivals, "no thread arrives at an mbarrier for its warpgroup"
    return found
