"""Collectives through shared memory: compiled for every GPU generation, and on a GPU between streams."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.kernels.collectives import PeerBuffers
from deepseek_attn.kernels.collectives.types import buffer_bytes, initial_state

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.collectives import launch as ops
from tests.kernels.compiled_launches import CAPABILITIES, ONE, compiled_ops, on_gpus

CAPACITY = 1 << 15
OPS = {"all_reduce": ops.all_reduce, "reduce_scatter": ops.reduce_scatter, "all_gather": ops.all_gather}


def ranks_of(
    world: int, device: torch.device | str = "cpu", timeout_ms: int = 60_000
) -> tuple[list[PeerBuffers], list[torch.Tensor]]:
    """Ranks that share one device, and their buffers, which they know by address only."""
    buffers = [torch.zeros(buffer_bytes(world, CAPACITY) // 8, dtype=torch.int64, device=device) for _ in range(world)]
    found = []
    for rank in range(world):
        missing = torch.zeros(1, dtype=torch.int32, device=device)
        places = torch.tensor([*(buffer.data_ptr() for buffer in buffers), missing.data_ptr()], device=device)
        state = initial_state(torch.device(device))
        found.append(PeerBuffers(rank, world, CAPACITY, places, state, missing, timeout_ms))
    return found, buffers


def expected(op: str, parts: list[torch.Tensor], rank: int) -> torch.Tensor:
    if op == "all_gather":
        return torch.cat(parts)
    total = torch.stack(parts).double().sum(0).to(parts[0].dtype)
    return total if op == "all_reduce" else total.chunk(len(parts))[rank]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_ranks_on_streams(gpu, op, world, dtype):
    """Each rank is a stream. Numbers of earlier exchanges lie about where sizes change. Sums of integers are exact."""
    ranks, _buffers = ranks_of(world, gpu)
    streams = [torch.cuda.Stream() for _ in range(world)]
    for size in (8, 2056, 8, 40_000, 24, 2056, 8):
        parts = [torch.randint(-8, 8, (size, 2)).to(dtype) for _ in ranks]
        torch.cuda.synchronize()
        found = []
        for peers, stream, part in zip(ranks, streams, parts, strict=True):
            with torch.cuda.stream(stream):
                found.append(OPS[op](part, peers) if size * 2 * dtype.itemsize <= 4 * CAPACITY else None)
        torch.cuda.synchronize()
        for rank, got in enumerate(found):
            if got is not None:
                assert torch.equal(got, expected(op, parts, rank))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda peers: ops.all_reduce(torch.zeros(2 * CAPACITY + 2, dtype=torch.bfloat16), peers), "up to 32768 whole"),
        (lambda peers: ops.all_reduce(torch.zeros(3, dtype=torch.bfloat16), peers), "whole words"),
        (lambda peers: ops.all_reduce(torch.zeros(4, 4).t()[:2], peers), "contiguous"),
        (lambda peers: ops.reduce_scatter(torch.zeros(4, dtype=torch.int32), peers), "got torch.int32"),
        (lambda peers: ops.reduce_scatter(torch.zeros(3, 2), peers), "3 rows cannot be shared out among 2 ranks"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call(ranks_of(2)[0][0])


VARIANTS = {f"{world} ranks of {rows} rows": (world, rows) for world in (2, 8) for rows in (8, 64)}


@pytest.mark.parametrize(("arch", "variant"), on_gpus(VARIANTS, ["2 ranks of 8 rows"], ONE))
def test_they_compile(arch, variant):
    """A word and its number are one access of 64 bits, which the system sees whole."""
    world, rows = VARIANTS[variant]
    addresses, state, missing = (
        torch.zeros(n, dtype=dtype, device="meta")
        for n, dtype in ((world + 1, torch.int64), (1, torch.int64), (1, torch.int32))
    )
    peers = PeerBuffers(1, world, CAPACITY, addresses, state, missing, 60_000)
    x = torch.zeros(rows, 512, dtype=torch.bfloat16, device="meta")
    found = compiled_ops(arch, lambda: [op(x, peers) for op in OPS.values()], alike=True)
    assert set(found) == {"exchange_kernel"}
    assert len(found["exchange_kernel"]) == 3
    for kernel in found["exchange_kernel"]:
        ptx = kernel.asm["ptx"]
        assert "st.relaxed.sys.global.b64" in ptx
        assert "ld.relaxed.sys.global.b64" in ptx
        assert "trap;" in ptx
        assert ("griddepcontrol.wait" in ptx) == (CAPABILITIES[arch] >= (9, 0))
