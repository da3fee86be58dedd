"""The keyword arguments of LLM and of the constructors of ModelRunner: one list, which each of them takes and shows."""

from __future__ import annotations

import inspect
import re
from typing import get_type_hints

import pytest

from deepseek_attn import LLM, ModelConfig, ModelRunner
from deepseek_attn.checkpoint import RandomSource, SafetensorsSource, write_checkpoint
from deepseek_attn.runner import StepOptions
from deepseek_attn.runner.build import build_runner
from deepseek_attn.runner.options import TYPES, RunnerOptions
from tests.support.typed import untyped

PARAMETERS = {
    name: parameter
    for name, parameter in inspect.signature(build_runner).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def test_names_and_types_are_those_of_build_runner():
    hints = get_type_hints(build_runner)
    assert get_type_hints(RunnerOptions) == {name: hints[name] for name in PARAMETERS}


@pytest.mark.parametrize(
    ("function", "own"),
    [
        (LLM, ["model", "speculate", "before_load"]),
        (ModelRunner.from_pretrained, ["model"]),
        (ModelRunner.from_config, ["config", "seed"]),
        (ModelRunner.from_source, ["config", "source"]),
    ],
)
def test_help_lists_them_with_their_defaults(function, own):
    found = inspect.signature(function).parameters
    assert list(found) == [*own, *PARAMETERS]
    assert {name: found[name].default for name in PARAMETERS} == {n: p.default for n, p in PARAMETERS.items()}


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda **options: LLM("absent", **options), "LLM"),
        (lambda **options: ModelRunner.from_pretrained("absent", **options), "from_pretrained"),
        (lambda **options: ModelRunner.from_config("absent", **options), "from_config"),
        (
            lambda **options: ModelRunner.from_source(ModelConfig.from_preset("tiny"), untyped(None), **options),
            "from_source",
        ),
    ],
    ids=["LLM", "from_pretrained", "from_config", "from_source"],
)
def test_unknown_options_are_named_before_anything_is_read(make, where):
    names = ".*attention_only, backend, .*max_num_seqs, .*progress"
    with pytest.raises(ValueError, match=f"^{where}: no such options: max_seqs, temperature; there are {names}"):
        make(max_seqs=3, temperature=0, device="cpu")


def test_known_options_arrive():
    config = ModelConfig.from_preset("tiny")
    given = {"layers": [1], "attention_only": True, "max_num_seqs": 3, "device": "cpu", "progress": False}
    for runner in (
        ModelRunner.from_config(config, seed=4, **given),
        ModelRunner.from_source(config, RandomSource(config, 4), **given),
    ):
        assert [spec.name for spec in runner.backbone_layers] == ["layers.1"]
        assert runner.layout.max_num_seqs == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_only": "no"}, "attention_only='no': must be True or False"),
        ({"deterministic": 1}, "deterministic=1: must be True or False"),
        ({"progress": None}, "progress=None: must be True or False"),
        ({"cuda_graphs": "no"}, "cuda_graphs='no': must be True, False or None"),
        ({"backend": None}, "backend=None: must be the name of an impl"),
        ({"decode_backend": 5}, "decode_backend=5: must be the name of an impl"),
        ({"expected_drafts": -1}, "expected_drafts=-1: must be an integer of at least 0"),
        ({"parallel": 5}, "parallel=5: must be of `parallel.launched`"),
        ({"device": 0}, "device=0: must be cpu, cuda or cuda:N as text, a torch.device, or None"),
        ({"dtype": 5}, "dtype=5: must be the name of a dtype, a torch.dtype, or None"),
        ({"numerics": 5}, "numerics=5: must be the name of a preset, a Numerics, or None"),
        (
            {"expert_memory": None, "index_keys": 8},
            "expert_memory=None: must be a name\n.*index_keys=8: ",
        ),
        ({"layers": "0,1"}, "layers='0,1': must be a list of numbers of layers, or None"),
        ({"layers": [0, "1"]}, r"layers=\[0, '1'\]: must be a list"),
        ({"layers": 5}, "layers=5: must be a list"),
        (
            {"max_num_seqs": None, "max_model_len": 1.5},
            "max_num_seqs=None: must be an integer\n.*max_model_len=1.5",
        ),
        ({"kv_cache_bytes": "1G"}, "kv_cache_bytes='1G': must be an integer, or None"),
        ({"seed": None}, "seed=None: must be an integer"),
        ({"seed": 1.5, "compile_ahead": 0}, "compile_ahead=0.*seed=1.5"),
    ],
    ids=str,
)
def test_values_of_another_type_are_refused_before_anything_is_read(options, message):
    with pytest.raises(ValueError, match=f"(?s)^invalid options:.*{message}"):
        ModelRunner.from_config("absent", **options)


def test_every_option_has_a_type():
    assert {name for names in TYPES for name in names} == {*RunnerOptions.__annotations__, "seed"}


@pytest.mark.parametrize("before_load", [5, "f", [print]])
def test_a_hook_that_is_no_function_is_named_before_anything_is_read(before_load):
    with pytest.raises(ValueError, match=rf"before_load={re.escape(repr(before_load))}: must be a function"):
        LLM("absent", before_load=untyped(before_load))


@pytest.mark.parametrize("path", [None, 5, b"tiny", {}])
def test_a_place_that_is_not_a_path_is_named(path):
    kind = type(path).__name__
    for call, needed in (
        (LLM if path is not None else ModelRunner.from_pretrained, "a model is named by its folder"),
        (ModelRunner.from_pretrained, "a model is named by its folder"),
        (ModelConfig.from_pretrained, "a config is named by its folder"),
    ):
        with pytest.raises(ValueError, match=f"{needed}.* of type {kind}"):
            untyped(call)(path)


@pytest.mark.parametrize("speculate", [-1, 1.5, "2", True, None])
def test_a_wrong_number_of_drafts_is_named_before_anything_is_read(speculate):
    with pytest.raises(ValueError, match=f"speculate={speculate!r}: must be an integer of at least 0"):
        LLM("absent", speculate=speculate)


def test_wrong_options_of_a_step_change_nothing():
    """Nor do a wrong length of `Sequence.truncate` and a wrong cache; the same calls made right follow."""
    runner = ModelRunner.from_config("tiny", layers=[0], max_model_len=64, max_num_seqs=2, device="cpu")
    free, expected = runner.manager.available_pages(), runner.score([[2, 3, 4, 5]])[0]
    a, b = runner.sequence([2, 3, 4, 5]), runner.sequence([6, 7])
    for options, message in (
        (None, "a step takes StepOptions, got None"),
        ({"last": 1}, "a step takes StepOptions, got {'last': 1}"),
        (StepOptions(last=-1), "StepOptions.last: -1"),
        (StepOptions(last=untyped("x")), "StepOptions.last: 'x'"),
        (StepOptions(greedy=True, logprobs=(1,)), "StepOptions.logprobs: 1 values for a batch of 2 sequences"),
        (StepOptions(scored=(None,) * 3), "StepOptions.scored: 3 values"),
        (StepOptions(ends=(4,)), "StepOptions.ends: 1 values"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.step([(a, 4), (b, 2)], untyped(options))
    logits = runner.step([(a, 4), (b, 2)], StepOptions(all_logits=True)).rows[0]
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    for length in (2.5, None, "1", True, -1, 5):
        with pytest.raises(ValueError, match="of a sequence of 4 tokens: an integer from 0 to 4"):
            a.truncate(untyped(length))
    assert (a.num_computed, a.token_ids) == (4, [2, 3, 4, 5])
    with pytest.raises(ValueError, match="cache is 5: pass the SequenceCache of a sequence"):
        runner.sequence([1], cache=untyped(5))
    with pytest.raises(ValueError, match="a saved sequence is named by its file, got None"):
        runner.load_sequence(untyped(None))
    a.free()
    b.free()
    assert runner.manager.available_pages() == free


def test_sources_of_other_types_are_named():
    config = ModelConfig.from_preset("tiny")
    source = RandomSource(config, 0)
    for call, message in (
        (lambda: RandomSource(untyped(None), 0), "config is a NoneType: pass a ModelConfig"),
        (lambda: ModelRunner.from_source(config, untyped(None)), "got a ModelConfig and a NoneType"),
        (lambda: ModelRunner.from_source(untyped(source), untyped(config)), "got a RandomSource and a "),
        (lambda: SafetensorsSource(untyped(None)), "a checkpoint is named by its folder, got None"),
        (lambda: write_checkpoint(source, config, untyped(5)), "a checkpoint is named by its folder, got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
