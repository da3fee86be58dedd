"""Hostile batches, on every implementation of sparse attention that takes them, against a loop over queries.

Whatever no query may read is NaN: entries that are not live, the null page, the bytes between pages. Rows of indices
have holes, and past their length indices of NaN. A case with ``requests`` of several query tokens has them in rows of
one length, as FlashMLA takes them; the others see as many rows of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deepseek_attn.cache.record import Record
from deepseek_attn.cache.records import Fp8DsMlaRecord, PlainRecord
from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record
from deepseek_attn.impls import flash_mla
from deepseek_attn.kernels.attention import PagedKeys, reference
from deepseek_attn.kernels.common.dispatch import problem_on
from tests.kernels.attention.sparse_attention_cases import Launch, forced
from tests.support import fake_flash_mla
from tests.support.report import INF, Report, on_cpu_too
from tests.support.tiers import tiered
from tests.support.typed import required

V4, V32 = Fp8DsMlaRecord(448, 64), Fp8DsMlaV32Record(scale_rule="pow2")
HUGE = 2**31 - 1
SINKS = (INF, -INF, 40.0)
Result = tuple[Tensor, Tensor]


class Pool(NamedTuple):
    """``width`` index columns into ``pages`` pages of ``entries``, ``stride`` page sizes apart."""

    width: int
    entries: int = 64
    pages: int = 97
    stride: int = 1


class Batch(NamedTuple):
    """``requests`` with ``queries`` tokens each, of ``heads``; ``empty``: no query sees any key."""

    heads: int
    requests: int
    queries: int
    pools: tuple[Pool, ...]
    empty: bool = False


class Inputs(NamedTuple):
    """``q [requests * queries, heads, d]``; ``keys`` with indices ``[T, K]`` and lengths ``[T]``."""

    q: Tensor
    keys: list[PagedKeys]
    sink: Tensor | None
    queries: int = 1

    @property
    def rows(self) -> Tensor:
        """The only pool, plain rows ``[N, d]``."""
        return self.keys[0].pool.view(torch.bfloat16)


def make(batch: Batch, record: Record, wild: bool, device: torch.device) -> Inputs:
    """Random inputs; with ``wild``, invalid indices are any numbers, otherwise -1 and, past the length, dead slots."""
    T, keys = batch.requests * batch.queries, []
    for pool in batch.pools:
        size, limit = record.page_bytes(pool.entries), pool.pages * pool.entries
        memory = torch.full((pool.pages, size * pool.stride), 0xFF, dtype=torch.uint8, device=device)[:, :size]
        live = torch.randint(pool.entries, limit, (3 * T + 200,), device=device) // 2 * 2 + 1  # odd, not in page 0
        live = torch.cat([live[live < limit - 1], torch.tensor([limit - 1], device=device)]).unique()
        record.insert(memory, pool.entries, live, torch.randn(len(live), record.dim, device=device) * 2)

        def some_of(slots: Tensor, width: int = pool.width) -> Tensor:
            return slots[torch.randint(len(slots), (T, width), device=device)]

        columns = torch.arange(pool.width, device=device)
        holes = torch.tensor([-1, -2, limit, HUGE, -HUGE] if wild else [-1], device=device)
        indices = torch.where(columns % 5 == 2, holes[columns // 5 % len(holes)], some_of(live))
        indices[:, -1] = limit - 1  # the very last entry of the pool
        indices[0] = -1  # a row without a valid key, although its length is not 0
        lens = torch.randint(1, pool.width + 1, (batch.requests,), device=device)
        lens[batch.requests // 2], lens[-1] = 0, pool.width
        if batch.empty:
            indices[:], lens = -1, lens.clamp(min=1)
        lens = lens.repeat_interleave(batch.queries)
        dead = some_of(live) - 1
        past = torch.where(columns % 2 == 0, dead, HUGE) if wild else dead
        indices = torch.where(columns < lens[:, None], indices, past)
        keys.append(PagedKeys(record, memory, pool.entries, indices.int(), lens.int()))
    q = torch.randn(T, batch.heads, record.dim, device=device).bfloat16()
    if record.dim != 512:
        return Inputs(q, keys, None, batch.queries)
    sink, limits = torch.randn(batch.heads, device=device), SINKS[: batch.heads // 2]
    sink[: len(limits)] = torch.tensor(limits, device=device)
    return Inputs(q, keys, sink, batch.queries)


SCALE = 0.02  # logits of about 1: every key counts


def expected(inputs: Inputs) -> Result:
    """One query at a time, in float64, over the list of its keys."""
    T, heads, _ = inputs.q.shape
    out = torch.zeros(T, heads, 512, dtype=torch.float64, device=inputs.q.device)
    lse = torch.full((T, heads), INF, dtype=torch.float64, device=inputs.q.device)
    rows = [(part, part.indices.tolist(), required(part.lens).tolist()) for part in inputs.keys]
    for t in range(T):
        found = []
        for part, indices, lens in rows:
            limit = part.pool.shape[0] * part.entries
            slots = torch.tensor([i for i in indices[t][: lens[t]] if 0 <= i < limit], dtype=torch.int64)
            found.append(part.record.gather(part.pool, part.entries, slots.to(inputs.q.device), torch.float32))
        keys = torch.cat(found).double()
        if len(keys):
            logits = inputs.q[t].double() @ keys.T * SCALE
            lse[t] = logits.logsumexp(1)
            total = lse[t] if inputs.sink is None else torch.logaddexp(lse[t], inputs.sink.double())
            out[t] = (logits - total[:, None]).exp() @ keys[:, :512]
    return out, lse


# implementations


class Implementation(NamedTuple):
    """``run(inputs)`` where ``problem(device)`` is empty; ``wild``: it takes any number as an invalid index."""

    run: Callable[[Inputs], Result]
    problem: Callable[[torch.device], str]
    wild: bool = True


def in_triton(*config) -> Implementation:
    """The launch that the shapes choose, or this `Launch`."""

    def run(inputs: Inputs) -> Result:
        from deepseek_attn.kernels.attention.launch import sparse_attention_paged

        with forced(Launch(*config) if config else None):
            return sparse_attention_paged(inputs.q, inputs.keys, SCALE, inputs.sink, 512)

    def problem(device: torch.device) -> str:
        if not problem_on(device) and config[-1:] == (True,) and torch.cuda.get_device_capability(device) != (9, 0):
            return "the Gluon kernel is for compute capability 9.0"
        return problem_on(device)

    return Implementation(run, problem)


def on_flashmla(inputs: Inputs) -> Result:
    q, n = inputs.q, inputs.queries
    if n == 1:
        return flash_mla.sparse_decode(q, inputs.keys, SCALE, inputs.sink)
    keys = [
        k._replace(indices=k.indices.unflatten(0, (-1, n)), lens=required(k.lens)[::n].contiguous())
        for k in inputs.keys
    ]
    out, lse = flash_mla.sparse_decode(q.unflatten(0, (-1, n)), keys, SCALE, inputs.sink)
    return out.flatten(0, 1), lse.flatten(0, 1)


def in_torch(inputs: Inputs) -> Result:
    return reference.sparse_attention_paged(inputs.q, inputs.keys, SCALE, inputs.sink, 512)


def why_not_flashmla(device: torch.device) -> str:
    usable, reason = flash_mla.supported(device)
    return "" if usable else reason


HOPPER = (64, 64, 8, 1, 64)
EVERY = {
    "reference": Implementation(in_torch, lambda device: ""),
    "triton": in_triton(),
    "portable": in_triton(16, 32, 4, 2),
    "portable, split": in_triton(32, 32, 8, 2, 64, 7),
    "flashmla": Implementation(on_flashmla, why_not_flashmla, wild=False),
}
OF_V4 = EVERY | {"hopper": in_triton(*HOPPER, 1, True), "hopper, split": in_triton(*HOPPER, 5, True)}


# cases

ABOVE_2_GIB = {V4: 61_000, V32: 54_000}  # pages of 64 entries
BATCHES = {
    f"{heads} heads, {queries} tokens, top-{width}": Batch(heads, 7, queries, (Pool(width, entries, pages),))
    for (heads, queries, width), (entries, pages) in zip(
        [(1, 1, 1), (8, 2, 33), (16, 3, 127), (32, 4, 513), (64, 4, 1023), (100, 2, 65), (128, 4, 511), (128, 1, 2047)],
        [(64, 97), (32, 211), (2, 1999), (64, 97), (64, 301), (1, 3001), (64, 199), (64, 401)],
        strict=True,
    )
}
BATCHES |= {
    "64 heads, strided pools": Batch(64, 7, 2, (Pool(321, stride=5),)),
    "8 heads, strided pools": Batch(8, 5, 4, (Pool(99, 2, 999, stride=3),)),
    "128 heads, no query sees a key": Batch(128, 5, 2, (Pool(129),), empty=True),
    "8 heads, no query sees a key": Batch(8, 3, 1, (Pool(7),), empty=True),
    "128 heads, 150 requests": Batch(128, 150, 2, (Pool(577, pages=301),)),
    "16 heads, pools above 2 GiB": Batch(16, 5, 3, (Pool(193, pages=0),)),
    "128 heads, pools above 2 GiB": Batch(128, 9, 4, (Pool(193, pages=0),)),
}
SMALL = ["8 heads, 2 tokens, top-33", "8 heads, strided pools", "8 heads, no query sees a key"]
CASES = [
    (record, name, case)
    for record, implementations in (("V4", OF_V4), ("V3.2", EVERY))
    for name in implementations
    for case in (SMALL if name == "reference" else BATCHES)
]
ON_CPU = [case for case in CASES if case[1] in ("reference", "flashmla") and case[2] in SMALL]


@pytest.fixture
def place(
    device: torch.device, gpu_or_stand_in, name: str, request: pytest.FixtureRequest, monkeypatch
) -> Iterator[torch.device]:
    """The device of the tests if implementation ``name`` runs there; for small cases, a CPU with a stand-in."""
    reason = (OF_V4 | OF_ROWS)[name].problem(device)
    if reason and request.node.get_closest_marker("on_cpu") is None:
        pytest.skip(reason)
    if reason:
        device = torch.device("cpu")
        fake_flash_mla.install(monkeypatch)
    flash_mla.flavour.cache_clear()
    yield device
    monkeypatch.undo()
    flash_mla.flavour.cache_clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def batch_of(case: str, record: Record) -> Batch:
    """V4 reads a window beside the entries."""
    batch = BATCHES[case]
    (pool,) = batch.pools
    pool = pool if pool.pages else pool._replace(pages=ABOVE_2_GIB[record])
    return batch._replace(pools=(Pool(128, stride=pool.stride), pool) if record is V4 else (pool,))


@pytest.mark.parametrize(("record", "name", "case"), on_cpu_too(CASES, ON_CPU))
def test_pages(report: Report, place, record, name, case):
    kind, implementation = (V4, OF_V4[name]) if record == "V4" else (V32, EVERY[name])
    inputs = make(batch_of(case, kind), kind, implementation.wild, place)
    assert "2 GiB" not in case or inputs.keys[-1].pool.numel() > 2**31
    report.compare(f"hostile {record} pages, {name}", case, implementation.run(inputs), expected(inputs))
    assert not report.failed


# rows of a workspace, and of a plain cache: pools of one entry per page


def rows_in_torch(inputs: Inputs) -> Result:
    (keys,) = inputs.keys
    return reference.sparse_attention(inputs.q, inputs.rows, keys.indices, SCALE, inputs.sink, keys.lens, 512)


def rows_in_triton(*config) -> Implementation:
    def run(inputs: Inputs) -> Result:
        from deepseek_attn.kernels.attention.launch import sparse_attention

        (keys,) = inputs.keys
        with forced(Launch(*config) if config else None):
            return sparse_attention(inputs.q, inputs.rows, keys.indices, SCALE, inputs.sink, keys.lens, 512)

    return Implementation(run, problem_on)


def rows_on_flashmla(inputs: Inputs) -> Result:
    (keys,) = inputs.keys
    return flash_mla.sparse_prefill(inputs.q, inputs.rows, keys.indices, SCALE, inputs.sink, keys.lens)


OF_ROWS = {
    "reference": Implementation(rows_in_torch, lambda device: ""),
    "triton": rows_in_triton(),  # on Hopper, from 17 heads and 66 blocks of heads on, the Gluon kernel
    "portable": rows_in_triton(16, 32, 4, 2),
    "portable, split": rows_in_triton(32, 32, 8, 2, 64, 7),
    "flashmla": Implementation(rows_on_flashmla, why_not_flashmla, wild=False),
}
BATCHES_OF_ROWS = {
    f"{heads} heads, {tokens} tokens, top-{width}": Batch(heads, tokens, 1, (Pool(width, 1, 9001),))
    for heads, tokens, width in [(1, 3, 1), (8, 9, 33), (16, 70, 127), (32, 150, 513), (64, 150, 1023), (128, 90, 255)]
}
BATCHES_OF_ROWS |= {
    "64 heads, no query sees a key": Batch(64, 140, 1, (Pool(129, 1, 999),), empty=True),
    "64 heads, more than 2 ** 31 values": Batch(64, 140, 1, (Pool(193, 1, 4_300_000),)),
    "8 heads, more than 2 ** 31 values": Batch(8, 9, 1, (Pool(193, 1, 4_300_000),)),
}
SMALL_ROWS = ["1 heads, 3 tokens, top-1", "8 heads, 9 tokens, top-33"]
CASES_OF_ROWS = [
    (dim, name, case)
    for dim in (512, 576)
    for name in OF_ROWS
    for case in (SMALL_ROWS if name == "reference" else BATCHES_OF_ROWS)
]
ROWS_ON_CPU = [case for case in CASES_OF_ROWS if case[1] in ("reference", "flashmla") and case[2] in SMALL_ROWS]


@pytest.mark.gpu_memory(5)
@pytest.mark.parametrize(("dim", "name", "case"), on_cpu_too(CASES_OF_ROWS, ROWS_ON_CPU))
def test_rows(report: Report, place, dim, name, case):
    record, implementation = PlainRecord(dim), OF_ROWS[name]
    inputs = make(BATCHES_OF_ROWS[case], record, implementation.wild, place)
    report.compare(f"hostile rows of {dim}, {name}", case, implementation.run(inputs), expected(inputs))
    assert not report.failed


# one thing wrong at a time: each must be found


def mistakes(inputs: Inputs) -> dict[str, Inputs]:
    """Inputs of which one query reads something else."""
    keys, last = inputs.keys[-1], inputs.q.shape[0] - 1
    valid = [i for i in keys.indices[last, : int(required(keys.lens)[last])].tolist() if i >= 0]

    def with_(**changes) -> Inputs:
        return inputs._replace(keys=[*inputs.keys[:-1], keys._replace(**changes)])

    other, shorter, longer = keys.indices.clone(), required(keys.lens).clone(), required(keys.lens).clone()
    other[last, keys.indices[last].tolist().index(valid[0])] = valid[1]
    shorter[last] -= 1
    empty = int((keys.lens == 0).nonzero()[0])
    longer[empty] = 1
    return {
        "another key": with_(indices=other),
        "a row that is too short": with_(lens=shorter),
        "a dead key": with_(lens=longer),
        "a sink": inputs._replace(sink=None if inputs.sink is None else inputs.sink.flip(0)),
    }


MISTAKEN = ["8 heads, 2 tokens, top-33", "128 heads, 1 tokens, top-2047"]


@pytest.mark.parametrize("case", tiered(MISTAKEN, MISTAKEN[:1], quick_on_gpu=MISTAKEN[1:]))
@pytest.mark.parametrize("record", [V4, V32], ids=["V4", "V3.2"])
def test_mistakes_are_found(record, case):
    inputs = make(batch_of(case, record), record, False, torch.device("cpu"))
    right = expected(inputs)
    for name, wrong in mistakes(inputs).items():
        if name == "a sink" and inputs.sink is None:
            continue
        found = Report()
        found.compare("", name, in_torch(wrong), right)
        assert not found[0].passed, name  # the output alone, without the log-sum-exp
        assert found[1].passed == (name == "a sink")
