"""Experts outside the device's memory: where stacks are, what is refused, and what loading them takes."""

import gc
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource, SafetensorsSource
from deepseek_attn.checkpoint.loader import load_slots
from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.layers.expert_memory import ExpertMemory
from deepseek_attn.layers.weights import Shard, checkpoint_slots
from deepseek_attn.models.moe import Experts
from deepseek_attn.utils import device as device_module
from deepseek_attn.utils.device import available_memory, pinned_empty
from tests.support.small_models import small_config, small_runner
from tests.support.tiers import exhaustive_on_cpu
from tests.support.typed import required

MIB = 2**20


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("ram", None, "expert_memory='ram': supported are gpu, host"),
        ("host", 0, "expert_cache_bytes=0: must be a positive integer"),
        ("host", 1.5, "expert_cache_bytes=1.5: must be an? (positive )?integer"),
        ("gpu", 10**9, "with expert_memory='gpu' all experts are on the device"),
    ],
)
def test_wrong_settings(kind, size, message):
    with pytest.raises(ValueError, match=message):
        ExpertMemory(kind, size)
    with pytest.raises(ValueError, match=message):
        small_runner(small_config([0, 4]), expert_memory=kind, expert_cache_bytes=size)


@pytest.fixture
def driver(monkeypatch):
    """CUDA's locking of pages, recorded; its result can be set."""
    calls = SimpleNamespace(locked={}, error=0)

    class Driver:
        def cudaHostRegister(self, address, nbytes, flags):
            if not calls.error:
                calls.locked[address] = nbytes
            return calls.error

        def cudaHostUnregister(self, address):
            del calls.locked[address]

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    return calls


def test_pinned_memory_is_exact_and_released(driver):
    tensor = pinned_empty((3, 5), torch.float32)
    tensor.copy_(torch.arange(15.0).view(3, 5))
    rows = tensor[1:]
    del tensor
    gc.collect()
    assert rows.flatten().tolist() == list(range(5, 15))
    assert list(driver.locked.values()) == [60]
    del rows
    gc.collect()
    assert not driver.locked


def test_pages_that_cuda_does_not_lock(driver):
    driver.error = 2
    with pytest.raises(
        ValueError, match=r"cannot lock 4,096 bytes of host memory \(error 2\): raise the limit.*'disk'"
    ):
        pinned_empty((1024,), torch.float32)
    gc.collect()
    assert not driver.locked


@pytest.mark.parametrize("numerics", ["exact", "official"])
@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8", "bf16"])
def test_host_stacks_hold_the_same_bits(numerics, expert_dtype, driver):
    """The stacks of a GPU's experts are on the host, locked, and as large as needed; those of a CPU are not locked."""
    config = small_config([0, 4], expert_dtype=None if expert_dtype == "bf16" else expert_dtype)
    source, prefix = RandomSource(config, 1, expert_dtype), "layers.1.ffn.experts."
    names = [name for name in source.entries() if name.startswith(prefix)]
    part: Any = SimpleNamespace(entries=lambda: {name: source.entries()[name] for name in names}, read=source.read)
    loaded = {}
    for device, kind in (("cpu", "gpu"), ("cpu", "host"), ("cuda", "host")):
        experts = Experts(config, get_numerics(numerics), torch.bfloat16, device, memory=ExpertMemory(kind))
        slots = {prefix + name: slot for name, slot in checkpoint_slots(experts).items()}
        load_slots(slots, part, progress=False, memory=10**9, host_memory=10**9)
        loaded[device, kind] = [(w.weight, w.scale, w.exponent) for w in (experts.w1, experts.w3, experts.w2)]
        assert bool(driver.locked) == (device == "cuda")
    parts = [part for stack in loaded["cuda", "host"] for part in stack if part is not None]
    assert sorted(driver.locked.values()) == sorted(part.nbytes for part in parts)
    for other in (("cpu", "host"), ("cuda", "host")):
        for expected, stack in zip(loaded["cpu", "gpu"], loaded[other], strict=True):
            for left, right in zip(expected, stack, strict=True):
                assert (left is None) == (right is None)
                assert left is None or torch.equal(left.view(torch.uint8), right.view(torch.uint8))
                assert right is None or right.device.type == "cpu"


@pytest.mark.parametrize(("numerics", "itemsize"), [("exact", 4), ("official", 1)])
def test_host_memory_is_checked_before_anything_is_read(numerics, itemsize):
    """Bytes as the experts will be held: dequantised in ``exact``."""
    config = small_config([0, 4])
    source = RandomSource(config, 1, "fp8")
    experts = Experts(config, get_numerics(numerics), torch.float32, "cuda", memory=ExpertMemory("host"))
    prefix = "layers.1.ffn.experts."
    slots = {prefix + name: slot for name, slot in checkpoint_slots(experts).items()}
    headers = {name: info for name, info in source.entries().items() if name.startswith(prefix)}
    part: Any = SimpleNamespace(entries=lambda: headers, read=lambda name: pytest.fail("a tensor was read"))
    needed = 3 * config.n_routed_experts * config.hidden_size * config.moe_intermediate_size * itemsize
    if itemsize == 1:
        needed = sum(info.nbytes for info in headers.values())
    with pytest.raises(ValueError, match=f"routed experts have {needed:,} bytes, and {needed - 1:,} bytes of host"):
        load_slots(slots, part, progress=False, memory=0, host_memory=needed - 1)


def test_weights_of_a_cpu_are_counted_as_they_are_held(monkeypatch):
    """`exact` dequantises: a checkpoint that fits as it is stored is refused if its float32 weights do not."""
    config = small_config([0, 4])
    stored = sum(info.nbytes for info in RandomSource(config).entries().values())
    monkeypatch.setattr("deepseek_attn.runner.build.available_memory", lambda: 2 * stored)
    small_runner(config, numerics="official")
    with pytest.raises(ValueError, match=r"the weights have [\d,]+ bytes.*expert_memory='disk'"):
        small_runner(config, numerics="exact")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max", 3000 * 1024), (str(2_000_000), 2_000_000 - 1_500_000 + 600_000), (str(10**15), 3000 * 1024)],
)
def test_available_memory(tmp_path, monkeypatch, limit, expected):
    """The least of the machine's and the control group's; file caches of the group can be given up."""
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  3000 kB\n")
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("1500000\n")
    (tmp_path / "memory.stat").write_text("anon 900000\ninactive_file 400000\nactive_file 200000\n")
    monkeypatch.setattr(device_module, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device_module, "CGROUP_LIMIT", tmp_path / "memory.max")
    assert available_memory() == expected
    monkeypatch.setattr(device_module, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr(device_module, "CGROUP_LIMIT", tmp_path / "none")
    assert available_memory() == 1 << 62


def file_pages() -> int:
    """Bytes of files in the memory of this process."""
    return int(required(re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text()))[1]) * 1024


@exhaustive_on_cpu
def test_loading_keeps_no_pages_of_the_files(tmp_path):
    """Whole tensors, parts of packed ones, and shards of both dimensions."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    header = {}
    for index in range(4):
        offsets = [index * 32 * MIB, (index + 1) * 32 * MIB]
        header[f"t{index}"] = {"dtype": "F8_E4M3", "shape": [8, 2048, 2048], "data_offsets": offsets}
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 128 * MIB)
    source = SafetensorsSource(tmp_path)
    before = file_pages()
    for name in source.entries():
        assert source.read(name).nbytes == 32 * MIB
        for index in range(8):
            source.read_part(name, index, 8)
        for dim in (0, 1):
            source.read_shard(name, Shard(dim, 2, 4))
        assert file_pages() - before < 16 * MIB
    assert source.view("t0").sum(dtype=torch.float32) == 0
    assert file_pages() - before > 16 * MIB  # the bound sees a mapping that is read
