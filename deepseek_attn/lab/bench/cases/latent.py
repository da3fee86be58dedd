"""V3.2's projections into and out of the latent space, and its cache writes."""

from __future__ import annotations

import torch

from deepseek_attn.cache.records import IndexFp8Record
from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record
from deepseek_attn.kernels.insert import CacheRows, TokenRows, insert_latents, reference as insert_reference
from deepseek_attn.kernels.insert.types import IndexKeyRows
from deepseek_attn.kernels.latent import LatentQueries, LatentWeight, absorb_queries, project_values, reference
from deepseek_attn.kernels.latent.types import WEIGHT_BLOCK
from deepseek_attn.lab.bench.cases.case import OpCase

HEADS, NOPE, ROPE, RANK, VALUES = 128, 128, 64, 512, 128  # of DeepSeek-V3.2
Q_LORA, INDEX_DIM = 1536, 128
TOKENS = (1, 8, 32, 128, 4096)
PAGE, POSITIONS, EPS = 64, 1 << 17, 1e-6
KV, INDEX = Fp8DsMlaV32Record(RANK, ROPE), IndexFp8Record(INDEX_DIM)


def cases(device: torch.device) -> list[OpCase]:
    """The benchmark rows, for a device that runs the Triton kernels."""
    return [make_case(T) for make_case in (_absorb, _project, _insert) for T in TOKENS]


def _weight(outputs: int, device: torch.device, g: torch.Generator) -> LatentWeight:
    """One half (keys or values) of ``kv_b_proj`` in the checkpoint's FP8 layout: the two halves alternate by head."""
    both = torch.randn(HEADS, NOPE + VALUES, RANK, device=device, generator=g).to(torch.float8_e4m3fn)
    grid = (HEADS, (NOPE + VALUES) // WEIGHT_BLOCK, RANK // WEIGHT_BLOCK)
    scale = torch.rand(grid, device=device, generator=g) * RANK**-0.5
    return LatentWeight(both[:, :outputs], scale[:, : outputs // WEIGHT_BLOCK])


def _table(device: torch.device, g: torch.Generator) -> torch.Tensor:
    return torch.randn(POSITIONS, ROPE, device=device, generator=g)


def _absorb(T: int) -> OpCase:
    def make(device: torch.device, seed: int) -> tuple[LatentQueries]:
        g = torch.Generator(device).manual_seed(seed)
        q = torch.randn(T, HEADS * (NOPE + ROPE), device=device, generator=g).bfloat16()
        positions = torch.randint(POSITIONS, (T,), device=device, generator=g)
        return (LatentQueries(q, _weight(NOPE, device, g), _table(device, g), positions, HEADS),)

    size = HEADS * (NOPE * RANK + 2 * T * (NOPE + ROPE + RANK + ROPE)) + T * (4 * ROPE + 8)
    run = {"triton": absorb_queries, "torch": reference.absorb_queries}
    return OpCase("absorb_queries", f"V3.2 T={T}", make, run, size, 2 * T * HEADS * NOPE * RANK)


def _project(T: int) -> OpCase:
    def make(device: torch.device, seed: int) -> tuple[torch.Tensor, LatentWeight]:
        g = torch.Generator(device).manual_seed(seed)
        latents = torch.randn(T, HEADS, RANK, device=device, generator=g).bfloat16()
        return latents, _weight(VALUES, device, g)

    size = HEADS * (VALUES * RANK + 2 * T * (RANK + VALUES))
    run = {
        "triton": lambda *inputs: project_values(*inputs).values,
        "torch": lambda *inputs: reference.project_values(*inputs).values,
    }
    return OpCase("project_values", f"V3.2 T={T}", make, run, size, 2 * T * HEADS * VALUES * RANK)


def _insert(T: int) -> OpCase:
    def make(device: torch.device, seed: int) -> tuple[TokenRows, IndexKeyRows]:
        g = torch.Generator(device).manual_seed(seed)
        sizes = [Q_LORA, RANK + ROPE, INDEX_DIM]
        qr, kv, k = torch.randn(T, sum(sizes), device=device, generator=g).bfloat16().split(sizes, dim=1)
        ones = {n: torch.ones(n, device=device) for n in (Q_LORA, RANK, INDEX_DIM)}
        slots = torch.randperm(T + PAGE, device=device, generator=g)[:T]
        pools = [CacheRows(record, record.allocate(T // PAGE + 2, PAGE, device), PAGE, slots) for record in (KV, INDEX)]
        index = IndexKeyRows(k, ones[INDEX_DIM], torch.zeros(INDEX_DIM, device=device), EPS, False, pools[1])
        positions = torch.randint(POSITIONS, (T,), device=device, generator=g)
        table = _table(device, g)
        return TokenRows(qr, kv, ones[Q_LORA], ones[RANK], EPS, table, positions, pools[0]), index

    read = 2 * (Q_LORA + RANK + ROPE + INDEX_DIM) + 4 * ROPE + 8 + 2 * 8  # position and two slots
    size = T * (read + 2 * Q_LORA + KV.entry_bytes + INDEX.entry_bytes)
    run = {"triton": insert_latents, "torch": insert_reference.insert_latents}
    return OpCase("insert_latents", f"V3.2 T={T}", make, run, size)
