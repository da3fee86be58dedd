"""Sizes of caches: what a layout promises is what is allocated."""

import random
from dataclasses import replace

import pytest
import torch

from deepseek_attn.cache.layout import (
    STATE,
    WINDOW,
    check_records,
    compressed_pages,
    entries_per_page,
    make_layout,
    ratio_group,
    state_rows,
    window_pages_per_sequence,
)
from deepseek_attn.cache.pools import CachePools
from deepseek_attn.config.model import ModelConfig, preset_names
from deepseek_attn.config.numerics import PRESETS, get_numerics
from tests.support.tiers import tiered
from tests.support.typed import required

LIMIT = 600 << 20  # bytes that a test may allocate


def tiny(**changes):
    return ModelConfig.from_preset("tiny").replace(**changes)


@pytest.mark.parametrize("preset", tiered(preset_names(), ["tiny", "tiny_v32", "tiny_v41"]))
def test_allocated_bytes_are_the_planned_bytes(preset):
    for numerics in PRESETS:
        layout = make_layout(ModelConfig.from_preset(preset), get_numerics(numerics), torch.bfloat16, 500, 2, 100)
        if layout.nbytes() > LIMIT:
            layout = replace(layout, pools=tuple({(p.kind, p.entries): p for p in layout.pools}.values()))
        pools = CachePools(layout)
        assert pools.nbytes() == layout.nbytes() > 0, numerics
        assert all(pool.tensor.eq(0).all() for pool in pools), numerics


@pytest.mark.parametrize("seed", tiered(range(12), range(3)))
def test_allocated_bytes_are_the_planned_bytes_for_random_configs(seed, device):
    rng = random.Random(seed)
    ratios = [rng.choice([0, 1, 2, 3, 4, 8, 16, 100, 128]) for _ in range(rng.randint(1, 4))]
    config = tiny(
        num_hidden_layers=len(ratios), compress_ratios=ratios, num_hash_layers=0,
        num_nextn_predict_layers=rng.choice([0, 1]) if ratios else 0,
        compress_overlap={str(r): True for r in ratios if r in (3, 16)},
        compress_indexer={str(r): True for r in ratios if r in (3, 16)},
        head_dim=rng.choice([64 + 16, 128 + 16]), qk_rope_head_dim=16, index_head_dim=rng.choice([32, 64]),
        sliding_window=rng.choice([1, 13, 64, 129]),
    )  # fmt: skip
    limits = (rng.choice([1, 63, 500, 2000]), rng.randint(1, 5), rng.choice([1, 64, 300]), rng.choice([0, 1, 16, 63]))
    for name in PRESETS:
        for dtype in (torch.float32, torch.bfloat16):
            layout = make_layout(config, get_numerics(name), dtype, *limits)
            assert CachePools(layout, device).nbytes() == layout.nbytes()


@pytest.mark.parametrize(
    ("ratio", "entries"), [(1, 256), (2, 128), (3, 85), (4, 64), (8, 32), (9, 32), (16, 32), (128, 32), (4096, 32)]
)
def test_entries_per_page(ratio, entries):
    """A page covers 256 tokens, but holds no fewer than 32 entries."""
    assert entries_per_page(ratio) == entries


@pytest.mark.parametrize(
    ("tokens", "ratio", "pages"),
    [(0, 4, 0), (3, 4, 0), (4, 4, 1), (256, 4, 1), (259, 4, 1), (260, 4, 2), (127, 128, 0), (4096, 128, 1),
     (4224, 128, 2)],
)  # fmt: skip
def test_compressed_pages(tokens, ratio, pages):
    assert compressed_pages(tokens, ratio) == pages


@pytest.mark.parametrize("rollback", [0, 1, 16])
@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (16, True), (16, False), (128, False)])
def test_state_rows_reach_back_to_the_oldest_token_of_a_reopened_window(ratio, overlap, rollback):
    """After ``L`` tokens and a rollback of ``r``, the next window to close may be at ``L - r`` itself."""
    config = tiny(
        num_hidden_layers=1, compress_ratios=[ratio], compress_overlap={str(ratio): overlap}, num_hash_layers=0
    )
    rows = state_rows(config.layers[0], rollback)
    for length in (1000, 1001, 1023, 1024):
        closes = length - rollback
        oldest = closes - (2 if overlap else 1) * ratio + 1
        assert oldest >= length - rows


@pytest.mark.parametrize("rollback", [0, 1, 16, 63])
def test_window_pages_per_sequence(rollback):
    """Counts the pages of every length: tokens that can still be read, and one page that a chunk starts."""
    for window in (1, 2, 13, 64, 65, 66, 128, 129):
        most = 0
        for length in range(window + rollback, window + rollback + 130):
            first = max(length - rollback - window + 1, 0)
            most = max(most, len({p // 64 for p in range(first, length + 1)}))
        assert window_pages_per_sequence(window, rollback) >= most, window
        assert window_pages_per_sequence(window, rollback) <= most + 1, window


def test_pools_and_pages_of_a_mixed_model():
    config = tiny()  # layers: SWA, C4A, C128A, C4A, C128A, SWA and an MTP layer
    layout = make_layout(config, get_numerics("exact"), torch.float32, 1000, 3, 130, 5)
    kinds = {}
    for pool in layout.pools:
        kinds.setdefault(pool.layer, []).append((pool.kind, pool.group, pool.entries))
    window, c4, c128 = (WINDOW, WINDOW, 64), ratio_group(4), ratio_group(128)
    c4_pools = [window, ("compressed", c4, 64), ("state", STATE, 13), ("index", c4, 64), ("index_state", STATE, 13)]
    c128_pools = [window, ("compressed", c128, 32), ("state", STATE, 133)]
    assert kinds == {
        "layers.0": [window],
        "layers.1": c4_pools,
        "layers.2": c128_pools,
        "layers.3": c4_pools,
        "layers.4": c128_pools,
        "layers.5": [window],
        "mtp.0": [window],
    }
    # 20 tokens of window and rollback: up to 2 pages, and one more each; 130 new tokens: 2 pages
    assert layout.pages == {WINDOW: 1 + 3 * 3 + 2, c4: 1 + 3 * 4, c128: 1 + 3 * 1, STATE: 1 + 3}
    assert layout.ratios == (4, 128)
    widths = {pool.kind: pool.width for pool in layout.pools if pool.layer == "layers.1"}
    assert (widths["state"], widths["index_state"]) == (2 * 2 * 128, 2 * 2 * 128)
    assert next(p.width for p in layout.pools if p.layer == "layers.2" and p.kind == "state") == 2 * 128


def test_published_record_sizes():
    """Pages of 64 window tokens and 64 C4A entries: 37440 bytes; indexer keys: 132 or 68 bytes each."""
    config = ModelConfig.from_preset("v4_flash")
    sizes = {}
    for name in ("official", "serving"):
        layout = make_layout(config, get_numerics(name), torch.bfloat16, 4096, 1, 64, max_rollback=0)
        for pool in layout.pools:
            sizes[name, pool.layer, pool.kind] = pool.page_bytes
    for name in ("official", "serving"):
        assert sizes[name, "layers.2", "window"] == sizes[name, "layers.2", "compressed"] == 37440
        assert sizes[name, "layers.3", "compressed"] == 19008
        assert sizes[name, "layers.2", "state"] == 8 * 8192
        assert sizes[name, "layers.2", "index_state"] == 8 * 2048
        assert sizes[name, "layers.3", "state"] == 128 * 4096
    assert sizes["serving", "layers.2", "index"] == 8640
    assert sizes["official", "layers.2", "index"] == 4608


def test_only_the_layers_that_are_present_get_pools():
    config = tiny()
    layout = make_layout(config, get_numerics("exact"), torch.float32, 500, 1, 64, layers=(config.layers[2],))
    assert {pool.layer for pool in layout.pools} == {"layers.2"}
    assert layout.ratios == (128,)
    layout = make_layout(config, get_numerics("exact"), torch.float32, 500, 1, 64, layers=(config.layers[0],))
    assert list(layout.pages) == [WINDOW]


def test_pools_are_found_by_layer_and_kind():
    pools = CachePools(make_layout(tiny(), get_numerics("serving"), torch.bfloat16, 300, 1, 64))
    assert required(pools.get("layers.1", "index")).record.name == "index_fp8"
    assert required(pools.get("layers.1", "state")).tensor.dtype == torch.float32
    assert pools.get("layers.0", "compressed") is None
    assert pools.get("layers.2", "index") is None


@pytest.mark.parametrize("numerics", ["official", "serving"])
@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"head_dim": 96}, ["head_dim - qk_rope_head_dim is 32"]),
        ({"index_head_dim": 16, "qk_rope_head_dim": 16, "head_dim": 80}, ["index_head_dim is 16"]),
        ({"index_head_dim": 16, "qk_rope_head_dim": 16}, ["is 112", "index_head_dim is 16"]),
    ],
    ids=["k_groups", "index_groups", "both"],
)
def test_records_that_do_not_fit_are_refused_together(changes, messages, numerics):
    config = tiny(**changes)
    for refuse in (
        lambda: check_records(config, get_numerics(numerics)),
        lambda: make_layout(config, get_numerics(numerics), torch.bfloat16, 100, 1, 10),
    ):
        with pytest.raises(ValueError, match=f"numerics='{numerics}' does not fit this config") as error:
            refuse()
        for message in messages:
            assert message in str(error.value)
        assert "use 'exact'" in str(error.value)
    check_records(config, get_numerics("exact"))
