"""Tokenizer wrapper and streaming decoder, on a byte-level tokenizer with DeepSeek's special strings."""

import json
import random
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from tokenizers import AddedToken, Tokenizer as RawTokenizer, decoders, models, pre_tokenizers, processors

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


def test_ids_outside_the_models_vocabulary(tokenizer):
    tokenizer.check_ids(FIRST_BYTE + 257)
    with pytest.raises(ValueError, match=rf"gives 'ab' the id {FIRST_BYTE + 256}, and the model's vocab_size is 262"):
        tokenizer.check_ids(FIRST_BYTE + 256)


@pytest.mark.parametrize("template", [1, 2.5, True, {"a": 1}, [1], [None], [{"name": "default"}], ["default"]])
def test_chat_templates_that_are_none(tmp_path, template):
    write_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(ValueError, match=r"config.json has chat_template=.*: supported are a string, and a list of"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("settings", ["null", "[]", '"x"', "1", "[" * 100_000])
def test_settings_that_are_no_object(tmp_path, settings):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(ValueError, match=r"tokenizer_config.json: (expected a JSON object|more than 64)"):
        Tokenizer(tmp_path)


def test_template_file_that_is_no_text(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"chat_template.jinja cannot be read: .* in position 2"):
        Tokenizer(tmp_path)


def test_lone_surrogates(tokenizer):
    with pytest.raises(ValueError, match="a lone surrogate"):
        tokenizer.encode("a\ud800b")


def test_no_bos_token(tmp_path):
    raw = RawTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    raw.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"has no token .*begin.*set bos_token"):
        Tokenizer(tmp_path)


def test_transformers_is_not_imported(tmp_path):
    write_tokenizer(tmp_path, chat_template="{{ messages[0].content }}")
    code = (
        "import sys\nfrom deepseek_attn.text.tokenizer import Tokenizer\n"
        f"from deepseek_attn.text.chat import build_prompt\ndirectory = {str(tmp_path)!r}\n"
        "build_prompt(Tokenizer(directory), directory, [{'role': 'user', 'content': 'hi'}])\n"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def transformers_tokenizer(directory):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)


ADDED = {"content": "<extra>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bos_token": {"__type": "AddedToken", **ADDED, "content": BOS}},
        {"pad_token": "ab", "eos_token": "<new>"},
        {"added_tokens_decoder": {"300": {**ADDED, "special": True}, "0": {**ADDED, "content": BOS, "special": True}}},
        {"added_tokens_decoder": {"300": {**ADDED, "special": False}}, "sep_token": "<extra>"},
    ],
    ids=["plain", "as-dict", "specials-not-listed", "listed", "listed-as-text"],
)
def test_added_tokens_as_in_transformers(tmp_path, config):
    write_tokenizer(tmp_path, **config)
    raw = RawTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.enable_truncation(2)
    raw.enable_padding(length=64, pad_token=EOS)
    raw.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = Tokenizer(tmp_path), transformers_tokenizer(tmp_path)
    text = f"{BOS}cab<extra>  <new>{EOS} é"
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text) == ids
    assert len(ours) == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip, clean_up_tokenization_spaces=False)


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
    assert "rendered in a sandbox" in explanation


def test_jinja_template_refuses(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.apply_chat_template([], False)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("VARIABLE", "thinking"))
    with pytest.raises(ValueError, match="cannot render these messages: no tools here"):
        build_prompt(Tokenizer(tmp_path), tmp_path, [{"role": "tool", "content": "4"}])


CONVERSATION = [
    {"role": "system", "content": "<b> & é", "name": None},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "tool_calls": None},
    {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [{"function": {"arguments": {"x": 1}}}]},
    {"role": "user", "content": "bye"},
]


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}",
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}",
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools }}{{ documents }}",
        "{{ messages[2].tool_calls[0].function.arguments | tojson(sort_keys=true, separators=(',', ':')) }}",
        "{{ strftime_now('%Y') }}{{ add_generation_prompt }}{{ thinking }}{{ enable_thinking }}",
        "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% set x = 1 %}{% generation %}{{ messages[3].content }}{% set x = 2 %}{% endgeneration %}{{ x }}",
        "{{ messages[2].reasoning_content }}{{ messages[2].thinking }}{{ messages[2].content is defined }}",
        "{{ dict(a=1) }}{% for k, v in messages[0].items() %}{{ k }}{{ v }}{% endfor %}{{ messages[1].content[0] }}",
    ],
)
@pytest.mark.parametrize("thinking", [False, True])
def test_templates_render_as_in_transformers(tmp_path, template, thinking):
    if version("transformers") < "5.23":
        pytest.skip("transformers before 5.23 hands absent values of messages to templates")
    write_tokenizer(tmp_path, chat_template=template, pad_token=EOS)
    expected = transformers_tokenizer(tmp_path).apply_chat_template(
        CONVERSATION, tokenize=False, add_generation_prompt=True, thinking=thinking, enable_thinking=thinking
    )
    assert Tokenizer(tmp_path).apply_chat_template(CONVERSATION, thinking) == expected


def test_values_that_are_not_json_do_not_reach_a_template(tmp_path):
    write_tokenizer(tmp_path, chat_template="{{ messages }}")
    with pytest.raises(ValueError, match="message 0: a Tokenizer cannot be encoded"):
        Tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": [Tokenizer(tmp_path)]}], False)


def test_several_templates(tmp_path):
    named = [{"name": "rag", "template": "1"}, {"name": "default", "template": "2"}]
    write_tokenizer(tmp_path, chat_template=named)
    assert Tokenizer(tmp_path).apply_chat_template(CONVERSATION, False) == "2"
    write_tokenizer(tmp_path, chat_template=named[:1])
    with pytest.raises(ValueError, match=r"chat templates \['rag'\] and none of them is the default"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("given", [5, ["x"], [{"name": "default"}], [{"name": "default", "template": 5}]])
def test_templates_that_are_no_text(tmp_path, given):
    write_tokenizer(tmp_path, chat_template=given)
    with pytest.raises(ValueError, match=r"tokenizer_config.json has chat_template=.*: supported are a string"):
        Tokenizer(tmp_path)


def test_template_files_that_cannot_be_read(tmp_path):
    write_tokenizer(tmp_path)
    for content, problem in ((b"\xff\xfe", "can't decode byte"), (b"a" * 2**21, "more than 1,048,576 bytes")):
        (tmp_path / "chat_template.jinja").write_bytes(content)
        with pytest.raises(ValueError, match=f"chat template .* cannot be read: .*{problem}"):
            Tokenizer(tmp_path)


def test_failing_templates_name_their_checkpoint(tmp_path):
    write_tokenizer(tmp_path, chat_template="{{ 1 / 0 }}")
    message = f"the chat template of {tmp_path} cannot render these messages: ZeroDivisionError: division by zero"
    with pytest.raises(ValueError, match=re.escape(message)):
        Tokenizer(tmp_path).apply_chat_template(CONVERSATION, False)


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
    """Random weights produce such streams for pages: the text must match, and little of it be held back."""
    decoder = IncrementalDecoder(tokenizer)
    pieces = [(decoder.push(i), len(decoder._held)) for i in byte_ids(data)]
    assert "".join(piece for piece, _ in pieces) + decoder.flush() == data.decode("utf-8", errors="replace")
    assert max(held for _, held in pieces) <= IncrementalDecoder.MAX_HELD


@pytest.mark.parametrize("skip", [False, True])
def test_cost_is_linear(tokenizer, skip):
    """Each push decodes what is held and the piece before it: neither may grow with the stream."""
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    held = []
    for i in byte_ids("word 中 ".encode() * 100) + [0] * 300 + byte_ids(b"\x80" * 300):
        decoder.push(i)
        held.append(len(decoder._held))
    assert sum(held[:900]) < 900
    assert max(held) <= IncrementalDecoder.MAX_HELD


@pytest.mark.parametrize("seed", range(20))
def test_streams_of_random_tokens_equal_the_whole(tokenizer, seed):
    draw = random.Random(seed)
    pieces = ["word", " 中", "🙂", "é", "\ufffd", BOS, EOS]
    ids = []
    for _ in range(200):
        data = draw.choice(pieces)
        ids += tokenizer.encode(data) if draw.random() < 0.5 else byte_ids(draw.randbytes(draw.randrange(5)))
    for skip in (False, True):
        decoder = IncrementalDecoder(tokenizer, skip)
        assert "".join(map(decoder.push, ids)) + decoder.flush() == tokenizer.decode(ids, skip)


def test_stream_can_skip_special_tokens(tokenizer):
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    text = f"a<｜User｜>b<think>c</think>d{EOS}"
    assert "".join(map(decoder.push, tokenizer.encode(text))) == "ab<think>c</think>d", "these are part of the reply"
