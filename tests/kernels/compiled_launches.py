"""Compiles what an op would launch, for any GPU: the launches are recorded on tensors without memory."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = {"sm80": (8, 0), "sm89": (8, 9), "sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0)}
SHARED = {"sm80": 163, "sm89": 99, "sm90": 227, "sm100": 227, "sm120": 99}  # KiB that a program may use
NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


class Recorder:
    """Takes the place of a kernel and notes its launches."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        assert all(size > 0 for size in grid)
        return lambda *args, **keywords: self.launches.append((self.kernel, args, keywords))


def compiled_launches(monkeypatch, modules, arch, call):
    """``{kernel name: compiled kernels}`` of all launches that ``call()`` makes by the kernels of ``modules``."""
    launches, found = [], {}
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    call()
    for kernel, args, keywords in launches:
        result = compiled(kernel, args, keywords, CAPABILITIES[arch])
        assert result.metadata.shared <= SHARED[arch] * 1024, kernel.fn.__name__
        found.setdefault(kernel.fn.__name__, []).append(result)
    return found


def compiled(kernel, args, keywords, capability):
    options = {"num_warps": keywords["num_warps"], "num_stages": keywords.get("num_stages", 3)}
    constants = {name: value for name, value in keywords.items() if name in kernel.arg_names}
    signature = dict(zip(kernel.arg_names, map(type_name, args), strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False))
        if isinstance(value, torch.Tensor) or (name.endswith("stride") and value % 16 == 0)
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    return triton.compile(ASTSource(kernel, signature, places, aligned), target=target, options=options)


def type_name(value):
    if isinstance(value, torch.Tensor):
        return "*" + NAMES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"
