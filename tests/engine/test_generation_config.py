"""A checkpoint's own ``generation_config.json``: the defaults of every request, and the tokens that end a text."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import GenerationConfig as TheirConfig

from deepseek_attn import LLM, ModelRunner, SamplingParams
from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.cli import main
from deepseek_attn.config.generation import GENERATION_FILE, GenerationConfig
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.engine.engine import Engine
from tests.support.small_models import two_layers
from tests.support.tiers import tiered
from tests.support.typed import required

OPTIONS = {"device": "cpu", "max_model_len": 100, "max_num_seqs": 1, "progress": False}
PROMPT = [*range(5, 65)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = two_layers()
    return write_checkpoint(RandomSource(config, seed=3), config, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def folder(checkpoint, tmp_path):
    """The same checkpoint, and a function that replaces its generation_config.json by a value or a text."""

    def write(content):
        folder = shutil.copytree(checkpoint, tmp_path / "model", copy_function=shutil.copy, dirs_exist_ok=True)
        (folder / GENERATION_FILE).unlink()
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / GENERATION_FILE).write_text(text)
        return folder

    return write


def tokens(llm, **params):
    [completion] = llm.generate([PROMPT], SamplingParams(**{"seed": 7, "ignore_eos": True} | params))
    return completion.token_ids


def test_defaults_are_those_of_the_file_and_flags_override(folder, capsys):
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 7}
    asked |= {"min_p": 0.25, "repetition_penalty": 1.5}
    model = folder(asked)
    with LLM(model, **OPTIONS) as llm:
        full = {
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.9,
            "max_tokens": 7,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
        }
        params = llm.stream(PROMPT).params
        assert params == SamplingParams(**full, seed=params.seed)
        expected = tokens(llm, **full)
        assert len(expected) == 7
        assert tokens(llm) == expected
        assert tokens(llm, max_tokens=3) == expected[:3]
        assert tokens(llm, temperature=0) == tokens(llm, **full | {"temperature": 0}) != expected
        for name, value in (("min_p", 0.0), ("repetition_penalty", 1.0)):
            assert tokens(llm, **{name: value}) != expected
        plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_tokens": 7, "min_p": 0.0, "repetition_penalty": 1.0}
        other = tokens(llm, **plain)
        assert other != expected, "explicit values are not the file's, though they are the library's defaults"
    ids = ",".join(map(str, PROMPT))
    start = ["generate", "--model", str(model), "--device", "cpu", "--token-ids", ids, "--seed", "7", "--ignore-eos"]
    texts = []
    all_flags = [text for name, value in plain.items() for text in ("--" + name.replace("_", "-"), str(value))]
    for flags in ([], None, ["--max-tokens", "2"]):
        assert main([*start, "--max-model-len", "100", *(all_flags if flags is None else flags)]) == 0
        printed = capsys.readouterr()
        texts.append((printed.out, printed.err.splitlines()[-1]))
    decode = required(LLM(model, **OPTIONS).tokenizer).decode
    assert texts[0] == (decode(expected) + "\n", "finish_reason: length (--max-tokens 7)")
    assert texts[1] == (decode(other) + "\n", "finish_reason: length (--max-tokens 7)")
    assert texts[2][1] == "finish_reason: length (--max-tokens 2)"


@pytest.mark.parametrize(
    "content", tiered([None, {}, {"temperature": None, "eos_token_id": None, "do_sample": None}], [{}])
)
def test_without_values_the_defaults_are_the_librarys(folder, content):
    with LLM(folder(content), **OPTIONS) as llm:
        request = llm.engine.add_request(PROMPT)
        library = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, max_tokens=256)
        assert request.params == library
        assert llm.runner.eos_token_ids == llm.runner.config.eos_token_ids
        llm.engine.cancel(request)
    assert SamplingParams().resolved() == library
    assert ModelRunner.from_config(two_layers(), **OPTIONS).generation.sampling == {}


@pytest.mark.exhaustive
def test_do_sample_false_is_greedy(folder):
    with LLM(folder({"do_sample": False, "temperature": 0.7, "top_p": 0.5}), **OPTIONS) as llm:
        greedy = tokens(llm, temperature=0, top_p=1.0, max_tokens=9)
        assert tokens(llm, max_tokens=9, seed=1) == tokens(llm, max_tokens=9, seed=2) == greedy
        assert tokens(llm, max_tokens=9, temperature=1.0, top_p=1.0) != greedy


@pytest.mark.exhaustive
@pytest.mark.parametrize("many", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_eos_is_that_of_the_file(folder, many):
    """In place of the config's, as transformers takes it."""
    with LLM(folder(None), **OPTIONS) as llm:
        path = tokens(llm, temperature=0, max_tokens=12)
    place = next(i for i in range(3, 12) if path[i] not in path[:i])
    eos = [511, path[place]] if many else path[place]
    assert TheirConfig(eos_token_id=eos).eos_token_id == eos
    model = folder({"eos_token_id": eos})
    with LLM(model, **OPTIONS) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=12)
        [completion] = llm.generate([PROMPT], greedy)
        assert completion.token_ids == path[: place + 1]
        assert completion.finish_reason == "stop"
        assert llm.runner.config.eos_token_ids == (1,)
        assert 1 not in llm.runner.eos_token_ids
        engine = Engine(llm.runner)  # without an LLM too
        request = engine.add_request(PROMPT, greedy)
        while engine.has_unfinished:
            engine.step()
        assert request.generated() == completion.token_ids
        assert tokens(llm, temperature=0, max_tokens=12) == path, "ignore_eos"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot': expected a positive number"),
        ({"temperature": -1}, "temperature is -1: expected a positive number"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": 1.5}, "top_p is 1.5: expected a number in"),
        ({"top_p": 0}, "top_p is 0: expected a positive number"),
        ({"min_p": 1.5}, "min_p is 1.5: expected a number in"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0: expected a positive number"),
        ({"repetition_penalty": 1e-5}, r"repetition_penalty is 1e-05: expected a number in \[0.001, 1000\]"),
        ({"top_k": -1}, "top_k is -1: expected an integer >= 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0: expected a positive integer"),
        ({"do_sample": "yes"}, "do_sample is 'yes': expected true or false"),
        ({"eos_token_id": 512}, "eos_token_id 512 is outside the vocabulary of vocab_size 512"),
        ({"eos_token_id": [1, "2"]}, r"eos_token_id\[1\] is '2'"),
        ({"eos_token_id": []}, r"eos_token_id is \[\]: expected an integer or a list"),
        ({"top_p": 2, "top_k": "all", "max_new_tokens": []}, "3 problems"),
        ([], "expected a JSON object, got list"),
        ("{", "not valid JSON at line 1"),
    ],
    ids=str,
)
def test_wrong_values_are_one_message_before_weights_are_read(folder, monkeypatch, capsys, content, message):
    model = folder(content)
    monkeypatch.setattr("deepseek_attn.runner.build.load_model", lambda *args: pytest.fail("weights are read"))
    with pytest.raises(ValueError, match=rf"invalid config \(.*{GENERATION_FILE}\)") as found:
        LLM(model, **OPTIONS)
    found.match(message)
    assert main(["generate", "--model", str(model), "--device", "cpu", "--token-ids", "5"]) == 2
    assert GENERATION_FILE in capsys.readouterr().err


def test_values_that_nothing_here_applies_are_a_warning(folder):
    model = folder({"typical_p": 0.9, "min_length": 0, "num_beams": 1, "stop_strings": ["x"]})
    with pytest.warns(UserWarning, match="typical_p 0.9, stop_strings .* not supported, and not applied"):
        ModelRunner.from_pretrained(model, **OPTIONS)


def test_config_and_defaults_are_read_once(folder, monkeypatch, capsys):
    model, read = folder({"max_new_tokens": 2, "typical_p": 0.9}), []
    for kind in (ModelConfig, GenerationConfig):
        original = kind.from_pretrained
        monkeypatch.setattr(kind, "from_pretrained", lambda *args, original=original: read.append(0) or original(*args))
    with pytest.warns(UserWarning, match="typical_p") as warned:
        assert main(["generate", "--model", str(model), "--device", "cpu", "--token-ids", "5"]) == 0
    assert (len(read), len(warned)) == (2, 1)
    with pytest.warns(UserWarning, match="typical_p"), LLM(model, **OPTIONS) as llm:
        assert (llm.runner.directory, llm.runner.generation.max_tokens) == (model, 2)


def test_rows_without_parameters_are_sampled_by_the_librarys():
    from deepseek_attn.engine.drawing import make_generator, sample

    logits = torch.randn(1, 50)
    drawn = [
        sample(logits, [p], [make_generator(SamplingParams(seed=3))])
        for p in (SamplingParams(), SamplingParams(temperature=1.0, top_k=0, top_p=1.0))
    ]
    assert drawn[0] == drawn[1]
