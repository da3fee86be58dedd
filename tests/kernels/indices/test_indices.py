"""Index tensors against worked examples and against plain loops over requests and tokens."""

import random

import pytest
import torch

from deepseek_attn.kernels.indices.reference import (
    build_c128a_topk_indices,
    combine_topk_swa_indices,
    compute_global_topk_indices_and_lens,
    compute_swa_indices_and_lens,
    get_compressed_slot_mapping,
    slot_mapping_from_positions,
)

HUGE = 2**31 - 1


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def padded(row, width):
    return row + [-1] * (width - len(row))


def random_batch(seed, requests=5):
    """Ragged (seq_len, query_len) pairs, a block table of distinct pages, and the tokens' positions and requests."""
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 7, 63, 64, 65, 130, 300]) for _ in range(requests)]
    queries = [rng.choice([0, 1, 3, n]) if n > 3 else rng.randint(0, n) for n in lengths]
    positions = [n - q + j for n, q in zip(lengths, queries, strict=True) for j in range(q)]
    owners = [r for r, q in enumerate(queries) for _ in range(q)]
    return lengths, queries, positions, owners


def table_for(requests, pages, seed=0):
    order = list(range(1, requests * pages + 1))
    random.Random(seed).shuffle(order)
    return ints(order).view(requests, pages)


# combine_topk_swa_indices


def combine_oracle(topk_rows, lengths, queries, gathers, window, ratio, topk, M, N):
    width = (topk + window + 127) // 128 * 128
    rows, lens, t = [], [], 0
    for b, (n, q, g) in enumerate(zip(lengths, queries, gathers, strict=True)):
        for j in range(q):
            pos = n - q + j
            n_c = min((pos + 1) // ratio, topk) if ratio else 0
            row = [b * M + e for e in topk_rows[t][:n_c]]
            row += [b * M + N + p - (n - g) for p in range(max(pos - window + 1, 0), pos + 1)]
            rows.append(padded(row, width))
            lens.append(len(row))
            t += 1
    return rows, lens


def test_combine_worked_example():
    idx, lens = combine_topk_swa_indices(
        ints([[1, 0]] * 3), ints([0, 0, 3]), ints([1, 10]), ints([1, 6]), 4, 4, 2, M=8, N=2
    )
    expected = [[9, 8, 10, 11, 12, 13], [9, 8, 11, 12, 13, 14], [9, 8, 12, 13, 14, 15]]
    assert idx.tolist() == [padded(row, 128) for row in expected]
    assert lens.tolist() == [6, 6, 6]
    assert idx.dtype == lens.dtype == torch.int32


def test_combine_worked_example_early_position():
    idx, lens = combine_topk_swa_indices(ints([[HUGE, HUGE]]), ints([0, 1]), ints([3]), ints([3]), 4, 4, 2, M=8, N=2)
    assert idx.tolist() == [padded([2, 3, 4], 128)]
    assert lens.tolist() == [3]


@pytest.mark.parametrize("base", [0, 17], ids=["rebased", "absolute_slice"])
@pytest.mark.parametrize(
    ("window", "ratio", "topk"),
    [(4, 4, 2), (128, 4, 513), (7, 16, 1), (128, 128, 64), (128, 0, 0), (5, 4, 0), (1, 3, 7)],
)
def test_combine_random(window, ratio, topk, base):
    for seed in range(4):
        lengths, queries, _, _ = random_batch(seed)
        gathers = [q + min(n - q, window - 1) for n, q in zip(lengths, queries, strict=True)]
        rng = random.Random(seed)
        rows = []
        for n, q in zip(lengths, queries, strict=True):
            for pos in range(n - q, n):
                closed = (pos + 1) // ratio if ratio else 0
                picked = rng.sample(range(closed), min(closed, topk))
                rows.append(picked + [HUGE] * (topk + 1 - len(picked)))  # one column more than topk, poisoned
        N = max(lengths)
        M = N + max(gathers)
        starts = torch.tensor([base] + queries).cumsum(0).int()
        got = combine_topk_swa_indices(
            ints(rows).reshape(sum(queries), topk + 1), starts, ints(lengths), ints(gathers), window, ratio, topk, M, N
        )
        idx, lens = combine_oracle(rows, lengths, queries, gathers, window, ratio, topk, M, N)
        assert got[0].tolist() == idx, seed
        assert got[1].tolist() == lens, seed


def test_combine_rows_past_the_last_query_are_empty():
    idx, lens = combine_topk_swa_indices(ints([[0], [0]]), ints([5, 6]), ints([9]), ints([4]), 4, 4, 1, M=20, N=3)
    assert lens.tolist() == [5, 0]
    assert idx[1].eq(-1).all()


def test_combine_rows_of_padding_are_empty():
    idx, lens = combine_topk_swa_indices(
        ints([[0], [1]]), ints([0, 2]), ints([9]), ints([5]), 4, 4, 1, 20, 3, is_valid=torch.tensor([False, True])
    )
    assert lens.tolist() == [0, 5]
    assert idx[0].eq(-1).all()
    assert idx[1].tolist() == padded([1, 4, 5, 6, 7], 128)


def test_combine_hole_stays_a_hole_in_its_own_request():
    idx, lens = combine_topk_swa_indices(
        ints([[0, -1], [1, -1]]), ints([0, 1, 2]), ints([8, 8]), ints([2, 2]), 2, 4, 2, M=9, N=4
    )
    assert idx[:, :4].tolist() == [[0, -1, 4, 5], [10, -1, 13, 14]]
    assert lens.tolist() == [4, 4]


@pytest.mark.parametrize("requests", [0, 2])
def test_combine_no_rows(requests):
    zeros = torch.zeros(requests, dtype=torch.int32)
    idx, lens = combine_topk_swa_indices(
        torch.empty(0, 7, dtype=torch.int32), torch.zeros(requests + 1), zeros, zeros, 128, 4, 7, 10, 2
    )
    assert idx.shape == (0, 256)
    assert lens.shape == (0,)


def test_combine_refuses_what_does_not_fit():
    args = (ints([[0]] * 2), ints([0, 1, 2]), ints([4, 4]), ints([4, 4]))
    with pytest.raises(ValueError, match="int32"):
        combine_topk_swa_indices(*args, 4, 4, 1, M=2**30, N=1)
    with pytest.raises(ValueError, match="1 columns"):
        combine_topk_swa_indices(*args, 4, 4, 2, M=8, N=1)


# compute_global_topk_indices_and_lens


def test_global_topk_worked_example():
    local = ints([[0, 70, 3, -1]] * 2)
    idx, lens = compute_global_topk_indices_and_lens(
        local, ints([0, 0]), ints([[4, 11]]), 64, torch.tensor([True, False])
    )
    assert idx.tolist() == [[256, 710, 259, -1]] * 2
    assert lens.tolist() == [3, 0]


@pytest.mark.parametrize(("block_size", "K"), [(2, 7), (64, 1), (64, 513), (1, 64)])
def test_global_topk_random(block_size, K):
    rng = random.Random(K)
    pages, table = 6, table_for(4, 6, seed=K)
    owners = [rng.randrange(4) for _ in range(9)]
    local = [[rng.choice([-1, rng.randrange(pages * block_size), HUGE, -HUGE]) for _ in range(K)] for _ in owners]
    idx, lens = compute_global_topk_indices_and_lens(ints(local), ints(owners), table, block_size, None)
    for t, row in enumerate(local):
        expected = [
            int(table[owners[t], e // block_size]) * block_size + e % block_size if 0 <= e < pages * block_size else -1
            for e in row
        ]
        assert idx[t].tolist() == expected
        assert lens[t] == sum(e >= 0 for e in expected)


# compute_swa_indices_and_lens


def test_swa_worked_example():
    idx, lens = compute_swa_indices_and_lens(ints([5, 1, 5]), ints([0, 0, 0]), ints([[5, 8, 2]]), 2, 4, ints([1, 1, 0]))
    assert idx.tolist() == [[16, 17, 4, 5], [10, 11, -1, -1], [-1] * 4]
    assert lens.tolist() == [4, 2, 0]


@pytest.mark.parametrize(("block_size", "window"), [(64, 128), (2, 5), (64, 1), (7, 63)])
@pytest.mark.parametrize("seed", range(3))
def test_swa_random(seed, block_size, window):
    lengths, _, positions, owners = random_batch(seed)
    table = table_for(len(lengths), -(-300 // block_size), seed)
    valid = [(t * 7 + seed) % 5 != 0 for t in range(len(positions))]
    dead = table.clone()  # pages before every window are gone: they must not matter
    for r, n in enumerate(lengths):
        first = min((p for p, o in zip(positions, owners, strict=True) if o == r), default=n)
        dead[r, : max(first - window + 1, 0) // block_size] = HUGE
    idx, lens = compute_swa_indices_and_lens(
        ints(positions, torch.int64), ints(owners), dead, block_size, window, torch.tensor(valid, dtype=torch.bool)
    )
    for t, (pos, r) in enumerate(zip(positions, owners, strict=True)):
        seen = range(max(pos - window + 1, 0), pos + 1) if valid[t] else []
        expected = [int(table[r, p // block_size]) * block_size + p % block_size for p in seen]
        assert idx[t].tolist() == padded(expected, window)
        assert lens[t] == len(expected)


# build_c128a_topk_indices


def test_c128a_worked_examples():
    positions, owners = ints([300, 511, 126, 300], torch.int64), ints([0, 0, 0, 0])
    idx, lens = build_c128a_topk_indices(positions, 128, owners, ints([[6, 9]]), 2, ints([1, 1, 1, 0]), 128)
    assert [row[:n] for row, n in zip(idx.tolist(), [2, 4, 0, 0], strict=True)] == [[12, 13], [12, 13, 18, 19], [], []]
    assert (idx >= 0).sum(1).tolist() == lens.tolist() == [2, 4, 0, 0]
    local, lens = build_c128a_topk_indices(positions, 128, None, None, 2, None, 128)
    assert local[1].tolist() == padded([0, 1, 2, 3], 128)
    assert lens.tolist() == [2, 4, 0, 2]


@pytest.mark.parametrize("ratio", [1, 3, 16, 128])
@pytest.mark.parametrize("width", [1, 64, 100])
def test_c128a_random(ratio, width):
    lengths, _, positions, owners = random_batch(ratio + width)
    table = table_for(len(lengths), 150)
    idx, lens = build_c128a_topk_indices(
        ints(positions, torch.int64), ratio, ints(owners), table, 2, torch.ones(len(positions), dtype=torch.bool), width
    )
    for t, (pos, r) in enumerate(zip(positions, owners, strict=True)):
        n = min(sum((e + 1) * ratio <= pos + 1 for e in range(pos + 1)), width)
        assert idx[t].tolist() == padded([int(table[r, e // 2]) * 2 + e % 2 for e in range(n)], width)
        assert lens[t] == n


def test_c128a_refuses_ratio_zero():
    with pytest.raises(ValueError, match="ratio"):
        build_c128a_topk_indices(ints([1]), 0, None, None, 1, None, 4)


# get_compressed_slot_mapping, slot_mapping_from_positions


def test_compressed_slot_worked_example():
    positions = ints([2, 3, 255, 259, 3], torch.int64)
    own = ints([2, 3, 255, 259, -1], torch.int64)
    got = get_compressed_slot_mapping(positions, own, ints([0] * 5), ints([[3, 9]]), 64, 4)
    assert got.tolist() == [-1, 192, 255, 576, -1]
    assert got.dtype == torch.int64


@pytest.mark.parametrize(("ratio", "entries"), [(1, 1), (4, 64), (5, 3), (128, 2)])
def test_each_compressed_entry_is_written_by_the_last_token_of_its_group(ratio, entries):
    length = 3 * ratio * entries + 2
    table = table_for(1, 8)
    positions = torch.arange(length)
    got = get_compressed_slot_mapping(positions, positions, ints([0] * length), table, entries, ratio)
    expected = [-1] * length
    for e in range(length // ratio):
        expected[(e + 1) * ratio - 1] = int(table[0, e // entries]) * entries + e % entries
    assert got.tolist() == expected


def test_slot_mapping():
    got = slot_mapping_from_positions(
        ints([0, 63, 64, 130, -1, 128]), ints([1, 1, 1, 1, 0, 0]), ints([[5, 9], [7, 3]]), 64
    )
    assert got.tolist() == [448, 511, 192, -1, -1, -1]


def test_slots_are_computed_in_int64():
    assert slot_mapping_from_positions(ints([63]), ints([0]), ints([[40_000_000]]), 64).tolist() == [
        40_000_000 * 64 + 63
    ]


@pytest.mark.parametrize("requests", [0, 3])
def test_zero_tokens(requests):
    none, table = torch.empty(0, dtype=torch.int64), torch.zeros(requests, 2, dtype=torch.int32)
    valid = torch.empty(0, dtype=torch.bool)
    assert compute_global_topk_indices_and_lens(none.view(0, 7), none, table, 64, valid)[0].shape == (0, 7)
    assert compute_swa_indices_and_lens(none, none, table, 64, 9, valid)[0].shape == (0, 9)
    assert build_c128a_topk_indices(none, 128, none, table, 2, valid, 5)[0].shape == (0, 5)
    assert get_compressed_slot_mapping(none, none, none, table, 64, 4).shape == (0,)
    assert slot_mapping_from_positions(none, none, table, 64).shape == (0,)


def test_padding_tokens_of_an_empty_batch():
    positions, owners = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    idx, lens = compute_swa_indices_and_lens(
        positions, owners, torch.zeros(0, 2, dtype=torch.int32), 64, 4, torch.zeros(3, dtype=torch.bool)
    )
    assert idx.eq(-1).all()
    assert lens.eq(0).all()
