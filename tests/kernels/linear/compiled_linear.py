"""Compiles what the linear ops would launch, for any GPU."""

from __future__ import annotations

from deepseek_attn.kernels.linear import launch as linear_launch
from deepseek_attn.kernels.linear import launch_hopper as linear_hopper
from tests.kernels import compiled_launches as launches
from tests.kernels.compiled_launches import CAPABILITIES

KERNELS = ("multi_linear_kernel", "linear_hopper_kernel", "linear_few_hopper_kernel", "quantize_input_kernel")


def compiled_launches(monkeypatch, capability, call):
    """The compiled launches of ``call()`` on a GPU of that capability: products, then what quantises their input."""
    modules = (linear_launch, linear_hopper)
    launches.pass_for_gpu(monkeypatch, capability, *modules)
    arch = next(arch for arch, of_arch in CAPABILITIES.items() if of_arch == capability)
    found = launches.compiled_launches(monkeypatch, modules, arch, call)
    return [kernel for name in KERNELS for kernel in found.get(name, [])]
