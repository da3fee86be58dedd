"""Compiles what an op would launch, for any GPU: the launches are recorded on tensors without memory."""

from __future__ import annotations

import subprocess

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepseek_attn.kernels.common import device as device_facts
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.runner.ahead.recording import recorded_launches
from tests.support.tiers import tiered

CAPABILITIES = {"sm80": (8, 0), "sm89": (8, 9), "sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0)}
SHARED = {"sm80": 163, "sm89": 99, "sm90": 227, "sm100": 227, "sm120": 99}  # KiB that a program may use
NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8", torch.bool: "i1", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
MAIN = ("sm90", "sm80")  # with and without FP8 conversions, tensor descriptors and early launches
ONE = ("sm90",)  # of kernels for which only early launches differ
# without the first three, or with FP8 conversions, but little shared memory; sm89 has as little, sm100 as much as sm90
UNLIKE = ("sm80", "sm120")


def on_gpus(variants=None, main=(), quick=MAIN):
    """Cases ``(arch, variant)`` of a test that compiles, or ``arch`` alone where there are no variants.

    ``make test`` compiles the variants in ``main``, which together launch every kernel of the test, for the GPUs in
    ``quick``; a test without variants for one. The rest is marked ``exhaustive`` and left to ``make test-all``: the
    variants in ``main`` for all GPUs, the others for 9.0 and, but with ``quick=ONE``, two of three for one in `UNLIKE`.
    """
    if variants is None:
        return tiered(CAPABILITIES, ["sm90"])
    assert main
    assert set(main) <= set(variants)
    pairs = []
    for at, variant in enumerate(variants):
        turn = (at + at // 3) % 3  # each beside either of two or three formats, too
        arches = ONE if quick == ONE else ("sm90", *UNLIKE[turn : turn + 1])
        pairs += [(arch, variant) for arch in (CAPABILITIES if variant in main else arches)]
    return tiered(pairs, [(arch, variant) for variant in main for arch in quick])


def pass_for_gpu(monkeypatch, capability, *modules):
    """Makes every device a GPU of this capability: for `kernels.common.device`, and ``modules`` that import `gpu`."""
    for module in (device_facts, *modules):
        monkeypatch.setattr(module, "gpu", lambda device: GPU(capability, 132))


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


class Recorder:
    """Takes the place of a kernel and notes its launches."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        assert all(size > 0 for size in grid)
        return lambda *args, **keywords: self.launches.append((self.kernel, args, keywords))


def compiled_launches(monkeypatch, modules, arch, call, alike=False):
    """``{kernel name: compiled kernels}`` of all launches that ``call()`` makes by the kernels of ``modules``.

    Each must fit into the shared memory of ``arch``.

    Args:
        alike: they are the same for every GPU, and must fit into the least shared memory.
    """
    launches, found = [], {}
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    call()
    for kernel, args, keywords in launches:
        result = compiled(kernel, args, keywords, arch)
        assert result.asm["cubin"]
        assert result.metadata.shared <= (min(SHARED.values()) if alike else SHARED[arch]) * 1024, kernel.fn.__name__
        found.setdefault(kernel.fn.__name__, []).append(result)
    return found


def compiled(kernel, args, keywords, arch):
    """The kernel, of Triton or Gluon, as a launch with these arguments compiles it."""
    options = {name: keywords[name] for name in ("num_warps", "enable_fp_fusion")}
    options |= {"num_stages": keywords.get("num_stages", 3)}
    options |= {"maxnreg": keywords["maxnreg"]} if "maxnreg" in keywords else {}
    constants = {name: value for name, value in keywords.items() if name in kernel.arg_names}
    given = list(zip(kernel.params, args, strict=False))
    constants |= {parameter.name: value for parameter, value in given if is_constant(value, parameter)}
    signature = dict(zip(kernel.arg_names, map(type_name, args), strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = {}
    for i, (parameter, value) in enumerate(given):
        if isinstance(value, tuple):
            aligned |= {(i, j): [["tt.divisibility", 16]] for j, part in enumerate(value) if is_aligned(part)}
        elif parameter.name not in constants and is_aligned(value) and not parameter.do_not_specialize:
            aligned[i,] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(source(kernel, signature, places, aligned), target=target_of(arch), options=options)


def is_constant(value, parameter):
    """Triton compiles None into a kernel and, unless it is told not to, 1."""
    return value is None or (type(value) is int and value == 1 and not parameter.do_not_specialize)


def is_aligned(value):
    return isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)


def type_name(value):
    if isinstance(value, tuple):
        parts = [type_name(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{NAMES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, torch.Tensor):
        return "*" + NAMES[value.dtype]
    if value is None:
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"
