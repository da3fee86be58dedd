"""Compiles what the linear ops would launch, for any GPU: the launches are recorded on tensors without memory."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepseek_attn.kernels import linear_hopper, linear_launch

CAPABILITIES = {"sm80": (8, 0), "sm89": (8, 9), "sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0)}
SHARED = {"sm80": 163, "sm89": 99, "sm90": 227, "sm100": 227, "sm120": 99}  # KiB that a program may use
NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


class Recorder:
    """Takes the place of a kernel; ``launches`` holds (arguments, keywords)."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid):
        assert all(size > 0 for size in grid)
        return lambda *args, **keywords: self.launches.append((args, keywords))


def compiled_launches(monkeypatch, capability, call):
    """Compiles for ``capability`` every launch that ``call()`` makes, in order of the kernels."""
    kernels = (linear_launch, "multi_linear_kernel"), (linear_hopper, "linear_hopper_kernel")
    recorders = []
    for module, name in (*kernels, (linear_launch, "quantize_input_kernel")):
        recorders.append(Recorder(getattr(module, name)))
        monkeypatch.setattr(module, "gpu", lambda device: (capability, 132))
        monkeypatch.setattr(module, name, recorders[-1])
    call()
    return [compiled(recorder.kernel, *launch, capability) for recorder in recorders for launch in recorder.launches]


def compiled(kernel, args, keywords, capability):
    options = {"num_warps": keywords["num_warps"], "num_stages": keywords.get("num_stages", 3)}
    options |= {"maxnreg": keywords["maxnreg"]} if "maxnreg" in keywords else {}
    constants = {name: value for name, value in keywords.items() if name in kernel.arg_names}
    constants |= {name: None for name, value in zip(kernel.arg_names, args, strict=False) if value is None}
    signature = dict(zip(kernel.arg_names, map(type_name, args), strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if name in constants or isinstance(value, TensorDescriptor):
            continue
        if isinstance(value, tuple):
            aligned |= {(i, j): [["tt.divisibility", 16]] for j in range(len(value))}
        elif name != "M" and (isinstance(value, torch.Tensor) or value % 16 == 0):
            aligned[i,] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(source(kernel, signature, places, aligned), target=target, options=options)


def type_name(value):
    if isinstance(value, tuple):
        return tuple(type_name(item) for item in value)
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{NAMES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
    return "*" + NAMES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
