"""Schedules by pattern, and variants of a config."""

import pytest

from deepseek_attn import ModelConfig
from deepseek_attn.lab.experiments.define.schedule import expand_schedule
from deepseek_attn.lab.experiments.define.variant import ModelVariant, default_name
from tests.support.typed import of_type


@pytest.mark.parametrize(
    ("pattern", "layers", "expected"),
    [
        ("0,0,(4,128)*", 7, [0, 0, 4, 128, 4, 128, 4]),
        ("0, ( 4 , 128 ) x2 ,0", 6, [0, 4, 128, 4, 128, 0]),
        ("(4,128)*,0", 4, [4, 128, 4, 0]),
        ("4x2,0*,8", 6, [4, 4, 0, 0, 0, 8]),
        ("1,2,(4,(8,16)x2)x1,0*", 7, [1, 2, 4, 8, 16, 8, 16]),
        ("0*", 3, [0, 0, 0]),
        ("0,256", 2, [0, 256]),
    ],
)
def test_patterns(pattern, layers, expected):
    assert expand_schedule(pattern, layers) == expected


def test_the_pattern_of_the_published_model():
    config = ModelConfig.from_preset("v4_flash")
    published = [spec.ratio for spec in config.layers]
    assert expand_schedule("0,0,(4,128)*", config.num_hidden_layers) == published


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("", "write ratios"),
        ("a", "write ratios"),
        ("4,,8", "a ratio is missing"),
        ("(4", "parenthesis is not closed"),
        ("4)", "nothing opens"),
        ("(4*)x2,0", "cannot be inside"),
        ("0*,4*", "only one item"),
        ("4x0", "repeated 0 times"),
        ("4x,0", "count after x is missing"),
        ("0,0,0,0", "names 4 layers, and the model has 3"),
        ("0", "names 1 layers, and the model has 3"),
    ],
)
def test_wrong_patterns_say_what_is_wrong(pattern, why):
    with pytest.raises(ValueError, match=why):
        expand_schedule(pattern, 3)


def test_a_variant_changes_what_it_names_and_nothing_else():
    base = of_type(ModelConfig.from_preset("tiny"), ModelConfig)
    config = ModelVariant("v", "0,(4,16)*", overlap={"16": True}, indexer=False, index_topk=3, sliding_window=9).config(
        base
    )
    assert [spec.ratio for spec in config.layers] == [0, 4, 16, 4, 16, 4]
    assert all(spec.overlap for spec in config.layers if spec.ratio)
    assert not any(spec.has_indexer for spec in config.layers)
    assert (config.index_topk, config.sliding_window) == (3, 9)
    assert not config.mtp_layers
    plain = ModelVariant("v", "0,4*").config(base)
    assert (plain.index_topk, plain.sliding_window) == (base.index_topk, base.sliding_window)
    assert all(spec.overlap and spec.has_indexer for spec in plain.layers[1:])


def test_default_names_say_what_differs():
    fields = {"schedule": "0,4*", "indexer": False, "overlap": {"4": True}}
    assert default_name(fields) == "0,4*, indexer off, overlap 4:on"
    assert ModelVariant("0,(4,128)* Indexer off", "0*").slug == "0-4-128-indexer-off"
