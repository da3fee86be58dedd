"""Which rows of a prompt each layer needs, beside what follows from reading the layers' keys one by one."""

from __future__ import annotations

import random

import pytest

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.trailing import TrailingPart, layer_reach, trailing_parts
from deepseek_attn.config.v41 import DeepseekV41Config
from tests.support.tiers import tiered
from tests.support.typed import of_type
from tests.support.v41_cases import random_schedule, tiny


def needed_rows(specs, window: int, last: int) -> dict[int, set[int]]:
    """Rows of each layer's input that the result of row ``last`` follows from, layer by layer and row by row."""
    place = {spec.index: i for i, spec in enumerate(specs)}
    needed, left = {i: set() for i in range(len(specs))}, [(len(specs) - 1, last)]
    while left:
        layer, row = left.pop()  # the output of a layer
        spec, reads = specs[layer], [(layer, r) for r in range(max(0, row - window + 1), row + 1)]
        if spec.ratio:
            entries = range((row + 1) // spec.ratio * spec.ratio)
            reads += [(place[spec.kv_source], r) for r in entries]
            reads += [
                (place[source], row) for source in (spec.index_source, spec.candidate_source) if source is not None
            ]
        for below, r in reads:
            if r not in needed[below]:
                needed[below].add(r)
                if below:
                    left.append((below - 1, r))
    return needed


@pytest.mark.parametrize("seed", tiered(range(60), range(12)))
def test_reach_is_what_keys_and_entries_read(seed):
    config = tiny(**random_schedule(random.Random(seed)), dspark_target_layer_ids=None, num_nextn_predict_layers=0)
    specs, window = config.layers, config.sliding_window
    length = 3 + 2 * len(specs) * window
    needed = needed_rows(specs, window, length - 1)
    # an entry that the row itself would complete is not read: of rows before it all are
    found = [None if 0 in rows else length - 1 - min(rows) for rows in needed.values()]
    assert list(layer_reach(specs, window)) == found


@pytest.mark.parametrize("name", ["v4_flash", "v4_pro", "tiny", "tiny_v32", "v32"])
def test_other_families_need_all_rows(name):
    config = ModelConfig.from_preset(name)
    assert trailing_parts(config.layers, getattr(config, "sliding_window", 0)) == ()
    if name in ("tiny_v32", "v32"):
        assert set(layer_reach(config.layers, 0)) == {None}


def test_rows_of_the_published_model():
    """2,414 rows of layer 21 for one row of results; each layer that selects anew needs fewer."""
    config = of_type(ModelConfig.from_preset("v41_flash"), DeepseekV41Config)
    reach = layer_reach(config.layers, config.sliding_window)
    assert reach[:21] == (None,) * 21
    assert [1 + rows for rows in reach[21:] if rows is not None] == [128 + 127 * above for above in range(18, -1, -1)]
    parts = trailing_parts(config.layers, config.sliding_window, drafts=True)
    assert [(part.layer, part.reach + 1) for part in parts] == [
        (20, 2414), (21, 2414), (24, 2033), (28, 1525), (32, 1017), (36, 509),
    ]  # fmt: skip
    assert [part.queries_only for part in parts] == [True] + [False] * 5
    assert {part.reach + 1 for part in trailing_parts(config.layers, 128, approximate=True)} == {128}


def test_parts_without_layers_above_or_below():
    only, last = tiny().layers[:1], tiny().layers[:5]
    assert trailing_parts(only, 8) == (TrailingPart(0, 7),)
    assert trailing_parts(last, 8) == (TrailingPart(4, 0, queries_only=True),)
    assert trailing_parts(last, 8, drafts=True) == (TrailingPart(4, 7, queries_only=True),)
    assert trailing_parts((), 8) == ()
