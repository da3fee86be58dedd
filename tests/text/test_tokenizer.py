"""Tokenizer wrapper and streaming decoder, on a byte-level tokenizer with DeepSeek's special strings."""

import json
import subprocess
import sys

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from deepseek_attn.text.chat import build_prompt, encode_messages
from deepseek_attn.text.tokenizer import IncrementalDecoder, Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SPECIALS = [BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]
FIRST_BYTE = len(SPECIALS)
TEXTS = ["", "plain", " two  spaces \n", "naïve 中文 🙂👩‍👩‍👧 end", f"a{EOS}b", "\ufffd literal \ufffd"]


def bytes_to_unicode():
    """GPT-2's printable stand-in of each byte, as in every byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(hidden)}}


def write_tokenizer(directory, **config):
    """Byte b is id FIRST_BYTE + b; one merge ("a" + "b"), so that ids are not bytes only."""
    alphabet = bytes_to_unicode()
    vocab = {token: i for i, token in enumerate(SPECIALS)}
    vocab |= {alphabet[b]: FIRST_BYTE + b for b in range(256)}
    vocab["ab"] = len(vocab)
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    raw.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def tokenizer(tmp_path):
    write_tokenizer(tmp_path)
    return Tokenizer(tmp_path)


def byte_ids(data: bytes):
    return [FIRST_BYTE + b for b in data]


def test_ids(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert len(tokenizer) == FIRST_BYTE + 257
    assert tokenizer.encode("é<think>ab") == [*byte_ids("é".encode()), 4, FIRST_BYTE + 256]
    assert tokenizer.token_id("<think>") == 4
    assert tokenizer.token_id("<nothing>") is None


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bos_exactly_once(tokenizer):
    ids = tokenizer.encode("hi")
    assert 0 not in ids
    assert tokenizer.encode_prompt("hi") == [0, *ids]
    assert tokenizer.encode_prompt(BOS + "hi") == [0, *ids]
    assert tokenizer.encode_prompt("") == [0]


def test_a_tokenizer_that_adds_special_tokens_itself_does_not_double_them(tmp_path):
    write_tokenizer(tmp_path, add_bos_token=True, add_eos_token=True)
    raw = RawTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing(f"{BOS} $A {EOS}", special_tokens=[(BOS, 0), (EOS, 1)])
    raw.save(str(tmp_path / "tokenizer.json"))
    assert raw.encode("x").ids[0] == 0
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("x") == byte_ids(b"x")
    assert tokenizer.encode_prompt("x") == [0, *byte_ids(b"x")]


def test_llama_class_in_the_config_changes_nothing(tmp_path, tokenizer):
    text = " two  spaces\n中"
    expected = tokenizer.encode(text)
    write_tokenizer(tmp_path, tokenizer_class="LlamaTokenizerFast", legacy=True)
    other = Tokenizer(tmp_path)
    assert other.encode(text) == expected
    assert other.decode(expected) == text


def test_bos_of_deepseek_without_a_config(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer(tmp_path).bos_token_id == 0


def test_decode_skips_special_tokens_on_request(tokenizer):
    ids = tokenizer.encode(f"a{EOS}")
    assert tokenizer.decode(ids) == f"a{EOS}"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"
    assert tokenizer.decode(byte_ids(b" ,")) == " ,", "spaces before punctuation stay"
    with pytest.raises(ValueError, match="negative"):
        tokenizer.decode([5, -1])


def test_errors(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json in .*copy tokenizer\.json"):
        Tokenizer(tmp_path)
    write_tokenizer(tmp_path, bos_token="[NOT IN VOCAB]")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        Tokenizer(tmp_path)


def test_no_bos_token(tmp_path):
    raw = RawTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    raw.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"has no token .*begin.*set bos_token"):
        Tokenizer(tmp_path)


def test_module_import_is_light():
    code = "import sys, deepseek_attn.text.tokenizer, deepseek_attn.text.chat; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("thinking", [False, True])
def test_builtin_chat_prompt_through_the_real_tokenizer(tmp_path, tokenizer, thinking):
    ids, _ = build_prompt(tokenizer, tmp_path, [{"role": "user", "content": "hi"}], thinking)
    assert ids == [0, 2, *byte_ids(b"hi"), 3, 4 if thinking else 5]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<｜User｜>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if VARIABLE else '</think>' }}{% endif %}"
)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("variable", ["thinking", "enable_thinking"])
@pytest.mark.parametrize("place", ["file", "config"])
def test_jinja_template_is_rendered(tmp_path, place, variable, thinking):
    template = TEMPLATE.replace("VARIABLE", variable)
    write_tokenizer(tmp_path, **({"chat_template": template} if place == "config" else {}))
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "hi"}]
    ids, explanation = build_prompt(Tokenizer(tmp_path), tmp_path, messages, thinking)
    assert ids == Tokenizer(tmp_path).encode(encode_messages(messages, thinking))
    assert "rendered by transformers" in explanation


def test_jinja_template_refuses(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.apply_chat_template([], False)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("VARIABLE", "thinking"))
    with pytest.raises(ValueError, match="refused the messages: no tools here"):
        build_prompt(Tokenizer(tmp_path), tmp_path, [{"role": "tool", "content": "4"}])


@pytest.mark.parametrize("text", TEXTS)
def test_stream_equals_whole_text_and_holds_back_partial_characters(tokenizer, text):
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(i) for i in tokenizer.encode(text)]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) == text, "complete text needs no flush"
    assert "".join(pieces) + decoder.flush() == text


def test_each_character_comes_out_with_its_last_byte(tokenizer):
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(i) for i in byte_ids("a🙂中".encode())] == ["a", "", "", "", "🙂", "", "", "中"]
    assert decoder.flush() == ""


def test_flush_releases_an_incomplete_character_and_starts_afresh(tokenizer):
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.push(byte_ids(b"\xe4")[0]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(byte_ids(b"x")[0]) == "x"


@pytest.mark.parametrize(
    "data",
    [
        b"\x80" * 100,
        b"\xff\xfe" * 60 + b"ok",
        b"\xf0\x9f\x98" * 40,
        b"\xe4\xb8" * 50 + "中".encode(),
        b"x" + b"\xf0\x9f\x99\x82\xf0" * 30,
        bytes((i * 89 + 7) % 256 for i in range(700)),
    ],
    ids=["continuations", "invalid", "truncated4", "truncated3", "emoji-and-lead", "noise"],
)
def test_invalid_bytes_stream_like_the_whole(tokenizer, data):
    """Random weights produce such streams for pages: the text must match, and the window must stay short."""
    decoder = IncrementalDecoder(tokenizer)
    pieces, longest = [], 0
    for i in byte_ids(data):
        pieces.append(decoder.push(i))
        longest = max(longest, len(decoder._window))
    assert "".join(pieces) + decoder.flush() == data.decode("utf-8", errors="replace")
    assert longest <= 2 * IncrementalDecoder.MAX_WINDOW


def test_cost_is_linear(tokenizer, monkeypatch):
    decoded = []
    original = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, skip=False: (decoded.append(len(ids)), original(ids, skip))[1])
    decoder = IncrementalDecoder(tokenizer)
    for i in byte_ids("word 中 ".encode() * 100):
        decoder.push(i)
    assert sum(decoded) < 12 * 900


def test_stream_can_skip_special_tokens(tokenizer):
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    assert "".join(decoder.push(i) for i in tokenizer.encode(f"a<think>b{EOS}")) == "ab"
