"""Whatever a tokenizer.json asks for ends in short texts or in one message, in bounded time and memory."""

from __future__ import annotations

import json

import pytest
from tokenizers.decoders import DecodeStream

from deepseek_attn.text import template_process, tokenizer as tokenizer_module
from deepseek_attn.text.chat import build_prompt
from deepseek_attn.text.token_numbers import number_tokens
from deepseek_attn.text.tokenizer import IncrementalDecoder, Tokenizer
from deepseek_attn.text.tokenizer_bounds import KNOWN_PATTERNS
from deepseek_attn.text.tokenizer_files import write_tokenizer
from tests.support.tiers import tiered

LONG = "x" * 10_000


def replace(content: str, **pattern: str) -> dict:
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


def sequence(kind: str, *steps: dict) -> dict:
    return {"type": "Sequence", kind: list(steps)}


def split(**pattern: str) -> dict:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def write(directory, settings=None, **parts) -> None:
    write_tokenizer(directory, 300, 1000)
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"] |= parts.pop("model", {})
    data["added_tokens"] += parts.pop("added", [])
    path.write_text(json.dumps(data | parts))
    if settings:
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))


DOUBLE = [replace("aa") for _ in range(27)]  # 134 million characters of one
GROWING = "can make a text [0-9]+ times longer, at most 16 is supported"
TOKEN = {"id": 299, "content": LONG, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
REFUSED = {
    "normalizer-replace": ({"normalizer": replace(LONG)}, f"normalizer {GROWING}"),
    "normalizer-regex": ({"normalizer": replace(LONG, Regex="a*")}, f"normalizer {GROWING}"),
    "normalizer-doubles": ({"normalizer": sequence("normalizers", *DOUBLE)}, f"normalizer {GROWING}"),
    "normalizer-nested": (
        {"normalizer": sequence("normalizers", *[sequence("normalizers", *DOUBLE[:4])] * 2)},
        f"normalizer {GROWING}",
    ),
    "normalizer-prepend": ({"normalizer": {"type": "Prepend", "prepend": LONG}}, f"normalizer {GROWING}"),
    "normalizer-precompiled": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "a normalizer of type 'Precompiled' is not supported, only .*NFC",
    ),
    "normalizer-empty": ({"normalizer": replace("b", String="")}, "normalizer Replace has an empty pattern"),
    "normalizer-empty-regex": ({"normalizer": replace("b", Regex="")}, "normalizer Replace has an empty pattern"),
    "decoder-replace": ({"decoder": replace(LONG)}, f"decoder {GROWING}"),
    "decoder-doubles": ({"decoder": sequence("decoders", *DOUBLE)}, f"decoder {GROWING}"),
    "decoder-empty": ({"decoder": replace("b", String="")}, "decoder Replace has an empty pattern"),
    "decoder-regex": ({"decoder": replace("", Regex="a+")}, "decoder Replace has a regular expression"),
    "decoder-strip": ({"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 0}}, "strips 5 and 0"),
    "decoder-prefix": ({"decoder": {"type": "WordPiece", "prefix": LONG, "cleanup": True}}, "text of its decoder Word"),
    "decoder-kind": ({"decoder": {"type": "Repeat"}}, "a decoder of type 'Repeat' is not supported"),
    "split-empty": ({"pre_tokenizer": split(String="")}, "pre_tokenizer Split has an empty pattern"),
    "split-empty-regex": (
        {"pre_tokenizer": sequence("pretokenizers", split(Regex=""))},
        "pre_tokenizer Split has an empty pattern",
    ),
    "model-prefix": ({"model": {"continuing_subword_prefix": LONG}}, "continuing_subword_prefix has 10000 char"),
    "model-suffix": ({"model": {"end_of_word_suffix": LONG}}, "end_of_word_suffix has 10000 char"),
    "model-word": ({"model": {"max_input_chars_per_word": 10**9}}, "max_input_chars_per_word is more than 1000"),
    "token": ({"model": {"vocab": {LONG: 299}}}, "token 'x+'... has 10000 characters, at most 1024"),
    "added": ({"added": [TOKEN]}, "token 'x+'... has 10000 characters, at most 1024"),
    "listed": ({"settings": {"added_tokens_decoder": {"299": TOKEN}}}, "token 'x+'... has 10000 characters"),
    "part": ({"decoder": []}, "cannot read the tokenizer in .*tokenizer.json"),
    "step": ({"normalizer": {"type": "Replace"}}, "cannot read the tokenizer in .*tokenizer.json"),
    "model": ({"model": {"vocab": 5}}, "cannot read the tokenizer in .*tokenizer.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_texts_that_would_explode(tmp_path, name):
    parts, message = REFUSED[name]
    write(tmp_path, **parts)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer(tmp_path)
    assert "tokenizer.json" in str(caught.value)


def test_components_of_published_tokenizers(tmp_path):
    """DeepSeek's own, and those of Llama's and Gemma's kind."""
    digits, words = split(Regex=r"\p{N}{1,3}"), split(Regex=r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    fallback, fuse = {"type": "ByteFallback"}, {"type": "Fuse"}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    prepend = {"type": "Prepend", "prepend": "▁"}
    for parts in (
        {"normalizer": sequence("normalizers"), "pre_tokenizer": sequence("pretokenizers", digits, words, level)},
        {"normalizer": sequence("normalizers", prepend, replace("▁", String=" ")), "pre_tokenizer": None},
        {
            "normalizer": {"type": "NFC"},
            "decoder": sequence("decoders", replace(" ", String="▁"), fallback, fuse, strip),
        },
    ):
        write(tmp_path, **parts)
        assert Tokenizer(tmp_path).encode("a b")


def test_a_file_that_is_too_large(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr(tokenizer_module, "MAX_TOKENIZER_BYTES", 1000)
    with pytest.raises(ValueError, match=r"tokenizer.json: [0-9]+ bytes, at most 1000 are read"):
        Tokenizer(tmp_path)


def test_assertions_of_the_library_are_errors(tmp_path):
    """A regular expression beyond its steps, and a decoder that strips a token twice."""
    write(tmp_path, pre_tokenizer=split(Regex="(q+)+$"))
    tokenizer = Tokenizer(tmp_path)
    for encode in (tokenizer.encode, tokenizer.encode_plain):
        with pytest.raises(ValueError, match=r"the tokenizer in .* fails on a text: .*retry-limit"):
            encode("q" * 40 + "!")
    assert tokenizer.encode("hi")
    write(tmp_path, decoder={"type": "Strip", "content": "q", "start": 1, "stop": 1})
    tokenizer = Tokenizer(tmp_path)
    token = tokenizer.encode("q")
    failed = "the tokenizer in .* fails on token ids"
    with pytest.raises(ValueError, match=failed):
        tokenizer.decode(token)
    with pytest.raises(ValueError, match=failed):
        tokenizer.step(DecodeStream(skip_special_tokens=True), token[0])
    with pytest.raises(ValueError, match=failed):
        IncrementalDecoder(tokenizer).push(token[0])
    with pytest.raises(ValueError, match="the tokenizer fails"):
        number_tokens(tokenizer.backend)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", tiered(["pre_tokenizer", "normalizer"], ["pre_tokenizer"]))
def test_regular_expressions_that_take_too_long(tmp_path, monkeypatch, part):
    """The time is the CPU's; DeepSeek's own expressions are not tried before."""
    slow = {"pre_tokenizer": split(Regex="q*$"), "normalizer": replace("", Regex="q*$")}
    write(tmp_path, **{part: slow[part]})
    tokenizer = Tokenizer(tmp_path)
    monkeypatch.setattr(template_process, "MAX_CPU_SECONDS", 0.2)
    text = "q" * 10**6 + "!"
    for use in (tokenizer.encode, tokenizer.encode_plain, lambda text: tokenizer.find_added(f"{text}<｜User｜>")):
        with pytest.raises(ValueError, match=r"fails on a text: it takes more than 0\.2 seconds of CPU time"):
            use(text)
    assert tokenizer.encode("hi!") == tokenizer.encode_plain("hi!")
    known = [split(Regex=pattern) for pattern in sorted(KNOWN_PATTERNS)]
    write(tmp_path, pre_tokenizer=sequence("pretokenizers", *known))
    monkeypatch.setattr(tokenizer_module, "try_tokenizer", None)
    assert Tokenizer(tmp_path).encode("a 1")


def test_a_template_that_repeats_the_text(tmp_path):
    """A post-processor is not run: it could repeat what it is given."""
    steps = [{"Sequence": {"id": "A", "type_id": 0}}] * 3
    write(tmp_path, post_processor={"type": "TemplateProcessing", "single": steps, "pair": steps, "special_tokens": {}})
    assert len(Tokenizer(tmp_path).encode("a")) == 1


def test_a_chat_template_of_many_words(tmp_path):
    write(tmp_path, settings={"chat_template": "{{ 'a ' * 2**22 }}"})
    with pytest.raises(ValueError, match=r"a prompt of at least [0-9]+ tokens exceeds max_model_len=100"):
        build_prompt(Tokenizer(tmp_path), tmp_path, [{"role": "user", "content": "hi"}], max_tokens=100)
