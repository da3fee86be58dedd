"""The Triton index builders: the same integers as their plain-torch versions, on every kind of batch."""

import os
import random

import pytest
import torch

from deepseek_attn.kernels.indices import EntryGroup, reference

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.indices import launch
from deepseek_attn.kernels.indices.plan import INDICES
from tests.kernels.compiled_launches import compiled_ops, on_gpus

HUGE = 2**31 - 1


@pytest.fixture
def gpu(triton_device):
    return triton_device


def same(got, expected):
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    for mine, other in zip(got, expected, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


def tokens_of(seed, requests, device):
    """Positions of every residue, some of them of padding, and their requests; a few lie outside of every table."""
    rng = random.Random(seed)
    positions, owners = [], []
    for r in range(requests):
        first = rng.choice([0, 1, 63, 64, 126, 127, 255, 500, 1000])
        for p in range(first, first + rng.choice([0, 1, 1, 2, 3, 5, 131])):
            positions.append(p)
            owners.append(r)
    positions += [-1, 5, 10**6, 127]
    owners += [0, requests, 0, -1]
    valid = [rng.random() < 0.8 for _ in positions]
    return (
        torch.tensor(positions, device=device),
        torch.tensor(owners, dtype=torch.int32, device=device),
        torch.tensor(valid, device=device),
    )


def table_of(seed, requests, pages, device):
    """A strided table of pages up to the largest id, some of them null or missing."""
    rng = random.Random(seed)
    table = torch.tensor([[rng.choice([0, 1, -1, rng.randrange(60_000)]) for _ in range(3 * pages)]
                          for _ in range(requests)], dtype=torch.int32, device=device)  # fmt: skip
    return table[:, ::3]


@pytest.mark.parametrize("n", [1, 2, 64])
def test_slots_of_tokens(n):
    """Padding has none, nor has a token beyond the tables; an entry is written by the last of its tokens."""
    positions, owners, valid = tokens_of(n, 6, "cpu")
    table = table_of(n, 6, 1200 // n, "cpu")
    slots = reference.slot_mapping_from_positions(positions, owners, table, n)
    own = torch.where(valid, slots, -1)
    same(reference.slot_mapping_from_positions(positions, owners, table, n, valid), own)
    for ratio in (1, 3, 4, 128):
        entries = reference.get_compressed_slot_mapping(positions, own, owners, table, n, ratio)
        written = (own >= 0) & ((positions + 1) % ratio == 0)
        assert entries[~written].eq(-1).all()
        page = table[owners[written].long(), positions[written] // ratio // n].long()
        expected = torch.where(page >= 0, page * n + positions[written] // ratio % n, -1)
        assert torch.equal(entries[written], expected)


def test_rows_of_decode_steps():
    """Two rows a request: all valid, one, none; a request launched past its limit; one beyond the tables."""
    starts, ends = torch.tensor([5, 9, 0, 40, 126]), torch.tensor([7, 10, 0, 38, 128])
    rows = reference.decode_rows(starts, ends, 2, 127)
    assert rows.positions.tolist() == [5, 6, 9, 10, 0, 1, 40, 41, 126, 126]
    assert rows.is_valid.tolist() == [True, True, True, False, False, False, False, False, True, True]
    assert (rows.prefix_lens.tolist(), rows.seq_lens.tolist()) == ([5, 9, 0, 40, 126], [7, 11, 2, 42, 127])
    later = reference.decode_rows(starts, ends, 1, 127, offset=1)
    assert (later.positions.tolist(), later.is_valid.tolist()) == ([6, 10, 1, 41, 126], [True] + 3 * [False] + [True])


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("requests", [1, 3, 130])
def test_rows_of_decode_steps_in_triton(gpu, requests, rows):
    starts = torch.randint(0, 3000, (requests,), device=gpu)
    ends = starts + torch.randint(-2, rows + 2, (requests,), device=gpu)
    for offset in (0, 3):
        arguments = starts, ends, rows, 2900, offset
        same(launch.decode_rows(*arguments), reference.decode_rows(*arguments))


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_counts_of_entries(gpu, ratio):
    positions, _, valid = tokens_of(ratio, 5, gpu)
    for topk in (1, 16, 512):
        arguments = positions, valid, ratio, topk
        same(launch.entry_counts(*arguments), reference.entry_counts(*arguments))
    counts = reference.entry_counts(torch.tensor([6, 7, 7]), torch.tensor([True, True, False]), 4, 1)
    assert (counts.visible.tolist(), counts.selected.tolist()) == ([1, 2, 0], [1, 1, 0])


@pytest.mark.parametrize("K", [1, 7, 512, 1300])
def test_chosen_entries(gpu, K):
    rng = random.Random(K)
    _, owners, valid = tokens_of(K, 4, gpu)
    table = table_of(K, 4, 20, gpu)
    choice = [-1, HUGE, -HUGE, *range(1300)]
    topk = torch.tensor([[rng.choice(choice) for _ in range(K)] for _ in owners], dtype=torch.int32, device=gpu)
    wide = torch.cat([topk, topk], 1)
    for entries, mask in ((topk, valid), (topk, None), (wide[:, K:], valid)):
        arguments = entries, owners, table, 64, mask
        same(
            launch.compute_global_topk_indices_and_lens(*arguments),
            reference.compute_global_topk_indices_and_lens(*arguments),
        )


@pytest.mark.parametrize("requests", [1, 5, 150])
@pytest.mark.parametrize(
    ("window", "ratio", "topk"), [(4, 4, 2), (128, 4, 512), (7, 16, 1), (128, 128, 1500), (128, 0, 0), (1, 3, 7)]
)
def test_entries_and_window_together(gpu, window, ratio, topk, requests):
    rng = random.Random(topk + requests)
    queries = [rng.choice([0, 1, 3, 9]) for _ in range(requests)]
    lengths = [q + rng.choice([0, 1, 127, 128, 900]) for q in queries]
    gathers = [q + min(n - q, window - 1) for n, q in zip(lengths, queries, strict=True)]
    T = sum(queries) + 2  # two rows after the last query
    rows = [[rng.choice([-1, rng.randrange(1000)]) for _ in range(topk + 1)] for _ in range(T)]
    topk_rows = torch.tensor(rows, dtype=torch.int32, device=gpu)
    for base in (0, 17):
        starts = torch.tensor([base, *queries], dtype=torch.int32, device=gpu).cumsum(0).int()
        seq, gather = (torch.tensor(x, dtype=torch.int32, device=gpu) for x in (lengths, gathers))
        for valid in (None, torch.tensor([rng.random() < 0.7 for _ in range(T)], device=gpu)):
            arguments = topk_rows, starts, seq, gather, window, ratio, topk, 3000, 1000, valid
            same(launch.combine_topk_swa_indices(*arguments), reference.combine_topk_swa_indices(*arguments))


def same_steps(got, expected):
    same(got.slot_mapping, expected.slot_mapping)
    assert (got.swa is None) == (expected.swa is None)
    if got.swa is not None:
        same(got.swa, expected.swa)
    for mine, other in (
        (got.compressed_slots, expected.compressed_slots),
        (got.entries, expected.entries),
        (got.prefill_entries, expected.prefill_entries),
    ):
        assert mine.keys() == other.keys()
        for ratio, rows in other.items():
            same(mine[ratio], rows)


@pytest.mark.parametrize("kind", ["decode", "mixed", "prefill", "no padding"])
@pytest.mark.parametrize("window", [0, 1, 7, 128])
@pytest.mark.parametrize(
    "groups", [(), ((1, 0),), ((4, 0),), ((4, 0), (16, 300), (128, 2176)), ((3, 1), (1, 100), (2, 1025))], ids=str
)
def test_a_step_at_once(gpu, groups, window, kind):
    """All tokens of decode requests, some, or none; rows of widths that no tile divides."""
    positions, owners, valid = tokens_of(len(groups), 7, gpu)
    positions[::7] *= 150
    decodes = {"decode": None, "mixed": len(positions) // 3, "prefill": 0, "no padding": 1}[kind]
    groups = [EntryGroup(ratio, table_of(ratio, 7, 1200 // ratio, gpu), 32, width) for ratio, width in groups]
    mask = None if kind == "no padding" else valid
    for n in (1, 5, 64):
        arguments = positions, owners, mask, table_of(n, 7, 1200 // n, gpu), n, window, groups, decodes
        same_steps(launch.step_indices(*arguments), reference.step_indices(*arguments))


def test_no_tokens_and_no_pages(gpu):
    for tokens, requests, pages in ((0, 3, 2), (0, 0, 2), (3, 2, 0), (3, 0, 2)):
        positions = torch.zeros(tokens, dtype=torch.int64, device=gpu)
        owners, valid = positions.int(), positions.bool()
        table = torch.zeros(requests, pages, dtype=torch.int32, device=gpu)
        groups = [EntryGroup(4, table, 64, 128)]
        for ops in (launch, reference):
            step = ops.step_indices(positions, owners, valid, table, 64, 9, groups)
            assert step.slot_mapping.eq(-1).all()
            assert step.swa.indices.shape == (tokens, 9)
            assert step.swa.indices.eq(-1).all()
            assert step.entries[4].indices.shape == (tokens, 128)
        topk = torch.zeros(tokens, 7, dtype=torch.int32, device=gpu)
        same(
            launch.compute_global_topk_indices_and_lens(topk, owners, table, 64, valid),
            reference.compute_global_topk_indices_and_lens(topk, owners, table, 64, valid),
        )


def test_slots_are_computed_in_int64(gpu):
    table = torch.tensor([[40_000_000]], dtype=torch.int32, device=gpu)
    position, owner = torch.tensor([63], device=gpu), torch.tensor([0], dtype=torch.int32, device=gpu)
    step = launch.step_indices(position, owner, None, table, 64, 0, [])
    assert step.slot_mapping.tolist() == [40_000_000 * 64 + 63]


def test_refuses(gpu):
    none = torch.zeros(2, dtype=torch.int64, device=gpu)
    table = torch.zeros(1, 1, dtype=torch.int32, device=gpu)
    for words, arguments in {
        "one request per row": (none, none[:1], None, table, 64, 5, []),
        "2-D block table": (none, none, None, table[0], 64, 5, []),
        "window must be 0 or more": (none, none, None, table, 64, -1, []),
        "ratio must be at least 1": (none, none, None, table, 64, 5, [EntryGroup(0, table, 64, 4)]),
        "block_size 0": (none, none, None, table, 64, 5, [EntryGroup(4, table, 0, 4)]),
    }.items():
        for ops in (launch, reference):
            with pytest.raises(ValueError, match=words):
                ops.step_indices(*arguments)
    with pytest.raises(ValueError, match="token_to_req is needed"):
        reference.build_c128a_topk_indices(none, 4, None, table, 1, None, 4)
    with pytest.raises(ValueError, match="pad the rows with -1"):
        launch.combine_topk_swa_indices(none[:, None], none, none[:1], none[:1], 4, 4, 2, 8, 4)


@pytest.mark.gpu
def test_in_a_graph(gpu):
    positions, owners, valid = tokens_of(3, 7, gpu)
    groups = [EntryGroup(4, table_of(4, 7, 300, gpu), 64, 0), EntryGroup(128, table_of(8, 7, 10, gpu), 32, 256)]
    arguments = positions, owners, valid, table_of(0, 7, 20, gpu), 64, 128, groups
    launch.step_indices(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = launch.step_indices(*arguments)
    for _ in range(3):
        positions.add_(1)
        valid.copy_(~valid)
        groups[1].block_table.copy_(groups[1].block_table.flip(0))
        graph.replay()
        same_steps(got, reference.step_indices(*arguments))


def of(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def all_ops(tokens, requests):
    """Every op, as V4-Flash's steps call them; with and without padding."""
    positions, owners, valid = of(tokens, dtype=torch.int64), of(tokens), of(tokens, dtype=torch.bool)
    lens, topk = of(requests), of(tokens, 512)
    tables = of(requests, 20), of(requests, 1), of(requests, 16)
    groups = [EntryGroup(4, tables[1], 64, 0), EntryGroup(128, tables[2], 32, 8192)]
    launch.decode_rows(of(requests, dtype=torch.int64), of(requests, dtype=torch.int64), 2, 4096)
    launch.entry_counts(positions, valid, 4, 512)
    for mask in (valid, None):
        launch.step_indices(positions, owners, mask, tables[0], 64, 128, groups, tokens // 2)
        launch.compute_global_topk_indices_and_lens(topk, owners, tables[0], 64, mask)
        launch.combine_topk_swa_indices(topk, of(requests + 1), lens, lens, 128, 4, 512, 4096, 1024, mask)


@pytest.mark.parametrize("arch", on_gpus())
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter compiles nothing")
def test_compiles(arch):
    """One kernel per op, with padding or without, for every size of batches and tables."""
    small = compiled_ops(arch, lambda: all_ops(5, 3), alike=True)
    assert set(small) == set(INDICES.kernels)
    large = compiled_ops(arch, lambda: all_ops(64, 16), alike=True)
    for name in set(large) - {"workspace_indices_kernel"}:  # whose tile holds all requests
        assert {kernel.hash for kernel in large[name]} == {kernel.hash for kernel in small[name]}
