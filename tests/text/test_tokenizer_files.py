"""The byte-level tokenizer of made-up checkpoints."""

import json
import random

import pytest

from deepseek_attn.checkpoint import RandomSource, make_tokenizer, write_checkpoint, write_tokenizer
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.text.chat import build_prompt
from deepseek_attn.text.tokenizer import Tokenizer
from deepseek_attn.text.tokenizer_files import BOS, CONTROL_TOKENS, EOS, MIN_VOCAB, TEXT_TOKENS, V41_TOKEN
from tests.checkpoint.fabricate import tiny

TEXTS = ["", " ", "a  b\n\n\tc", "naïve 中文 🙂 ‮", "\x00\x01\x7f\u0080\u00ad\u0100\u0143", "a" * 1000, " ｜DSM ▁"]


@pytest.mark.parametrize("text", TEXTS, ids=[f"text{i}" for i in range(len(TEXTS))])
def test_round_trip(text):
    tokenizer = make_tokenizer(512)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_round_trip_of_random_unicode():
    tokenizer, rng = make_tokenizer(MIN_VOCAB), random.Random(0)
    for _ in range(50):
        points = [
            rng.choice((rng.randrange(0x80), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000))) for _ in "x" * 40
        ]
        text = "".join(map(chr, points))
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_each_byte_is_one_token_in_order():
    tokenizer = make_tokenizer(512)
    ids = [tokenizer.encode(chr(byte), add_special_tokens=False).ids for byte in range(0x80)]
    assert ids == [[MIN_VOCAB - 256 + byte] for byte in range(0x80)]
    assert tokenizer.get_vocab_size() == MIN_VOCAB + 1


def test_special_strings_are_one_token():
    tokenizer = make_tokenizer(512)
    assert (tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)) == (0, 1)
    for token in (*CONTROL_TOKENS, *TEXT_TOKENS, V41_TOKEN):
        ids = tokenizer.encode(f"x{token}y", add_special_tokens=False).ids
        assert ids[1:-1] == [tokenizer.token_to_id(token)], token
    ids = tokenizer.encode(f"{BOS}<｜User｜>hi<｜Assistant｜><think>no</think>yes{EOS}").ids
    assert tokenizer.decode(ids) == "hi<think>no</think>yes"


def test_vocabulary_too_small():
    with pytest.raises(ValueError, match=f"vocab_size is {MIN_VOCAB - 1}: .* at least {MIN_VOCAB}"):
        make_tokenizer(MIN_VOCAB - 1)


@pytest.mark.parametrize("loader", ["PreTrainedTokenizerFast", "AutoTokenizer"])
def test_transformers_loads_it(tmp_path, loader):
    transformers = pytest.importorskip("transformers")
    path = write_checkpoint(RandomSource(tiny()), tiny(), tmp_path / "ckpt")
    tokenizer = getattr(transformers, loader).from_pretrained(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    text = f"{BOS}héllo  <think>中</think>\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == 0
    assert tokenizer.decode(ids) == text
    assert tokenizer.model_max_length == 4096


def test_written_files_are_readable_text(tmp_path):
    write_tokenizer(tmp_path, 512, 4096)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))["bos_token"] == BOS


@pytest.mark.parametrize("preset", ["tiny", "tiny_v32", "tiny_v41"])
def test_each_family_can_chat(tmp_path, preset):
    config = ModelConfig.from_preset(preset)
    write_tokenizer(tmp_path, config.vocab_size, 64)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    ids, _ = build_prompt(Tokenizer(tmp_path), tmp_path, messages)
    assert make_tokenizer(config.vocab_size).decode(ids).startswith("Be kind.")
