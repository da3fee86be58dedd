"""What a preset means for a model, and the format of index keys chosen beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import PRESETS, numerics_for


@pytest.mark.parametrize(
    ("preset", "name", "index_keys", "record", "hadamard"),
    [
        ("v4_flash", "serving", None, "fp8", False),
        ("v4_flash", "serving", "fp4", "fp4", True),
        ("v4_flash", "exact", "fp4", "fp4", True),
        ("v4_flash", "official", "fp8", "fp8", False),
        ("v41_flash", "serving", "fp4", "fp4", False),
        ("v41_flash", "official", "fp8", "fp8", False),
        ("v32", "exact", "fp8", "fp8", False),
        ("v32", "official", "fp8", "fp8", True),
    ],
)
def test_index_keys(preset, name, index_keys, record, hadamard):
    """The format, and the matrix that DeepSeek puts before it; everything else stays the preset's."""
    config = ModelConfig.from_preset(preset)
    numerics, unchosen = numerics_for(config, name, index_keys), numerics_for(config, name)
    assert (numerics.index_record, numerics.index_hadamard) == (record, hadamard)
    assert replace(numerics, name=name, index_record="", index_hadamard=False) == replace(
        unchosen, index_record="", index_hadamard=False
    )


def test_the_name_says_what_is_not_the_presets():
    config = ModelConfig.from_preset("v4_pro")
    assert numerics_for(config, "serving", "fp4").name == "serving (fp4 index keys)"
    assert numerics_for(config, "serving", "fp8") == PRESETS["serving"]
    assert numerics_for(config, "official", "fp4") == PRESETS["official"]
    mine = replace(PRESETS["serving"], name="mine")
    assert numerics_for(config, mine, "fp4").name == "mine (fp4 index keys)"
    assert numerics_for(config, mine, "fp8") == mine
    named = numerics_for(config, replace(mine, name="mine (new)"), "fp4")
    assert named.name == "mine (new) (fp4 index keys)"
    assert numerics_for(config, named, "fp8").name == "mine (new) (fp8 index keys)"


def test_a_choice_can_be_taken_back():
    config = ModelConfig.from_preset("v4_pro")
    chosen = numerics_for(config, "serving", "fp4")
    assert numerics_for(config, chosen) == numerics_for(config, chosen, "fp4") == chosen
    assert numerics_for(config, chosen, "fp8") == PRESETS["serving"]


@pytest.mark.parametrize(
    ("preset", "changes", "index_keys", "message"),
    [
        ("v4_flash", {}, "int8", "unknown index_keys 'int8': supported are fp8, fp4; or leave it out"),
        ("v32", {}, "fp4", "index_keys='fp4': deepseek_v32 has no FP4 index keys; give 'fp8', or leave it out"),
        (
            "tiny",
            {"num_hidden_layers": 2, "compress_ratios": [0, 128], "num_nextn_predict_layers": 0},
            "fp4",
            "index_keys='fp4': no layer of this model has an indexer; leave it out",
        ),
    ],
)
def test_index_keys_that_a_model_does_not_have(preset, changes, index_keys, message):
    config = ModelConfig.from_preset(preset).replace(**changes)
    with pytest.raises(ValueError, match=message):
        numerics_for(config, "serving", index_keys)
