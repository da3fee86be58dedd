"""Chat encoding: exact strings, the choice of encoder, and errors that say what to do."""

import json

import pytest

from deepseek_attn.text.chat import build_prompt, describe_chat_format, encode_messages, parse_completion

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello", "reasoning_content": "greet back"}
BYE = {"role": "user", "content": "bye"}


@pytest.mark.parametrize(
    ("messages", "thinking", "expected"),
    [
        ([HI], False, "<｜User｜>hi<｜Assistant｜></think>"),
        ([HI], True, "<｜User｜>hi<｜Assistant｜><think>"),
        ([SYSTEM, HI], False, "Be brief.<｜User｜>hi<｜Assistant｜></think>"),
        ([SYSTEM, HI], True, "Be brief.<｜User｜>hi<｜Assistant｜><think>"),
        (
            [HI, HELLO, BYE],
            False,
            f"<｜User｜>hi<｜Assistant｜></think>hello{EOS}<｜User｜>bye<｜Assistant｜></think>",
        ),
        (
            [HI, HELLO, BYE],
            True,
            f"<｜User｜>hi<｜Assistant｜></think>hello{EOS}<｜User｜>bye<｜Assistant｜><think>",
        ),
        ([HI, HELLO], False, f"<｜User｜>hi<｜Assistant｜></think>hello{EOS}"),
        ([HI, HELLO], True, f"<｜User｜>hi<｜Assistant｜><think>greet back</think>hello{EOS}"),
        (
            [HI, {"role": "assistant", "content": "hello"}],
            True,
            f"<｜User｜>hi<｜Assistant｜><think></think>hello{EOS}",
        ),
        (
            [HI, HELLO, BYE, {"role": "assistant", "content": "ciao", "reasoning_content": "part"}],
            True,
            f"<｜User｜>hi<｜Assistant｜></think>hello{EOS}<｜User｜>bye<｜Assistant｜><think>part</think>ciao{EOS}",
        ),
    ],
    ids=[
        "chat",
        "thinking",
        "chat-system",
        "thinking-system",
        "chat-history",
        "thinking-history-drops-reasoning",
        "chat-finished-turn",
        "thinking-finished-turn-keeps-reasoning",
        "thinking-finished-turn-without-reasoning",
        "thinking-keeps-only-the-last-reasoning",
    ],
)
def test_encode(messages, thinking, expected):
    assert encode_messages(messages, thinking) == BOS + expected


EFFORT = "<｜System｜>Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
LATER = {"role": "system", "content": "Rhyme."}


@pytest.mark.parametrize(
    ("messages", "thinking", "expected"),
    [
        ([HI], False, "<｜User｜>hi<｜Assistant｜></think>"),
        ([HI], True, f"{EFFORT}<｜User｜>hi<｜Assistant｜><think>"),
        ([SYSTEM, HI], False, "<｜System｜>Be brief.<｜User｜>hi<｜Assistant｜></think>"),
        ([SYSTEM, HI], True, f"{EFFORT}Be brief.<｜User｜>hi<｜Assistant｜><think>"),
        (
            [SYSTEM, HI, HELLO, LATER],
            True,
            f"{EFFORT}Be brief.<｜User｜>hi<｜Assistant｜></think>hello{EOS}<｜System｜>Rhyme.<｜Assistant｜><think>",
        ),
        (
            [HI, HELLO, LATER, BYE, HELLO],
            True,
            f"{EFFORT}<｜User｜>hi<｜Assistant｜></think>hello{EOS}<｜System｜>Rhyme.<｜User｜>bye<｜Assistant｜><think>"
            f"greet back</think>hello{EOS}",
        ),
        (
            [HI, HELLO, BYE, LATER],
            False,
            f"<｜User｜>hi<｜Assistant｜></think>hello{EOS}<｜User｜>bye<｜System｜>Rhyme.<｜Assistant｜></think>",
        ),
    ],
    ids=["chat", "thinking", "system", "thinking-system", "later-system", "system-before-user", "system-after-user"],
)
def test_encode_v41(messages, thinking, expected):
    assert encode_messages(messages, thinking, v41=True) == BOS + expected


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([SYSTEM], "no user message"),
        ([SYSTEM, LATER, HI], "message 1: expected a turn of 'user', got 'system'"),
        ([HI, BYE], "message 1: expected a turn of 'assistant', got 'user'.*join"),
        ([HI, HELLO, HELLO], "message 2: expected a turn of 'user', got 'assistant'"),
        ([HELLO], "message 0: expected a turn of 'user'"),
        ([{**HI, "tools": [{}]}], "tools not supported"),
    ],
)
def test_refuses_v41(messages, message):
    with pytest.raises(ValueError, match=message):
        encode_messages(messages, v41=True)


def test_empty_values_of_other_keys_are_ignored():
    dumped = {"role": "user", "content": "hi", "tool_calls": None, "tools": [], "name": None, "reasoning_content": None}
    assert encode_messages([dumped]) == encode_messages([HI])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        (["hi"], "message 0: expected a dict"),
        ([{"role": "tool", "content": "4"}], r"role 'tool' is not supported .*encoding/ folder"),
        ([{"role": "developer", "content": "x"}], "role 'developer'"),
        ([{"content": "x"}], "role None"),
        ([{"role": "user", "content": None}], "content must be a string, got NoneType"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "got list; join text parts"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "without images"),
        ([{**SYSTEM, "tools": [{"name": "f"}]}, HI], r"tools not supported.*encoding/ folder"),
        ([{**HI, "response_format": {"type": "json"}}], "response_format not supported"),
        ([HI, {**HELLO, "tool_calls": [{}]}, BYE], "message 1: tool_calls not supported"),
        ([{**HI, "reasoning_content": "x"}], "belongs to assistant"),
        ([HI, {**HELLO, "reasoning_content": 3}], "reasoning_content must be a string"),
        ([SYSTEM], "no user message"),
        ([HELLO, HI], "message 0: expected a turn of 'user'"),
        ([HI, BYE], "message 1: expected a turn of 'assistant', got 'user'.*join"),
        ([HI, HELLO, SYSTEM], "message 2: a system message must be the first"),
    ],
)
def test_refuses(messages, message):
    with pytest.raises(ValueError, match=message):
        encode_messages(messages)


def test_all_problems_at_once():
    with pytest.raises(ValueError, match=r"(?s)message 0: content.*message 1: role 'tool'"):
        encode_messages([{"role": "user", "content": 1}, {"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        (f"why</think>because{EOS}", True, ("why", "because")),
        ("why</think>a</think>b", True, ("why", "a</think>b")),
        ("cut off while think", True, ("cut off while think", "")),
        (f"</think>because{EOS}junk", True, ("", "because")),
        (f"because{EOS}", False, ("", "because")),
        ("say </think> twice", False, ("", "say </think> twice")),
        ("", True, ("", "")),
    ],
)
def test_parse_completion(text, thinking, expected):
    assert parse_completion(text, thinking) == expected


@pytest.mark.parametrize("thinking", [False, True])
def test_a_parsed_completion_goes_back_into_the_prompt_unchanged(thinking):
    start = encode_messages([HI], thinking)
    completion = f"r</think>a{EOS}" if thinking else f"a{EOS}"
    reasoning, answer = parse_completion(completion, thinking)
    turn = {"role": "assistant", "content": answer, "reasoning_content": reasoning}
    assert encode_messages([HI, turn], thinking) == start + completion


def write_template(directory, kind):
    if kind == "file":
        (directory / "chat_template.jinja").write_text("x")
    elif kind == "config":
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    elif kind == "null":
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": None}))


def write_encoder(directory):
    (directory / "encoding").mkdir()
    (directory / "encoding" / "encoding_dsv4.py").write_text("raise SystemExit('executed code of the checkpoint')")


@pytest.mark.parametrize("encoder", [False, True], ids=["no-encoder", "encoder"])
@pytest.mark.parametrize(
    ("template", "kind", "says"),
    [
        ("file", "jinja", "chat_template.jinja"),
        ("config", "jinja", "tokenizer_config.json"),
        ("null", "builtin", "built-in"),
        (None, "builtin", "built-in"),
    ],
)
def test_choice_of_encoder(tmp_path, template, kind, says, encoder):
    write_template(tmp_path, template)
    if encoder:
        write_encoder(tmp_path)
    got, explanation = describe_chat_format(tmp_path)
    assert got == kind
    assert says in explanation
    assert ("encoding/ module is not run" in explanation) == encoder


def test_the_encoding_of_a_v41_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v41"}))
    explanation = describe_chat_format(tmp_path)[1]
    assert "DeepSeek-V4.1" in explanation
    assert "not verified" in explanation
    tokenizer = SpecialsOnly([BOS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"])
    assert build_prompt(tokenizer, tmp_path, [HI])[0] == tokenizer.encode(encode_messages([HI]))
    with pytest.raises(ValueError, match=r"has no token for <｜System｜>"):
        build_prompt(tokenizer, tmp_path, [HI], thinking=True)


def test_choice_refuses_what_it_cannot_read(tmp_path):
    with pytest.raises(ValueError, match="not a directory"):
        describe_chat_format(tmp_path / "absent")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        describe_chat_format(tmp_path)


class SpecialsOnly:
    """A tokenizer of characters whose special tokens are one id each."""

    def __init__(self, specials):
        self.specials = specials

    def token_id(self, token):
        return self.specials.index(token) if token in self.specials else None

    def encode(self, text):
        for i, token in enumerate(self.specials):
            text = text.replace(token, chr(0xE000 + i))
        return [ord(c) - 0xE000 if ord(c) >= 0xE000 else ord(c) + 100 for c in text]


SPECIALS = [BOS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]


def test_build_prompt_builtin_never_runs_the_encoder_of_the_checkpoint(tmp_path):
    write_encoder(tmp_path)
    ids, explanation = build_prompt(SpecialsOnly(SPECIALS), tmp_path, [HI], thinking=True)
    assert ids == [0, 1, ord("h") + 100, ord("i") + 100, 2, 3]
    assert "not run" in explanation


def test_build_prompt_refuses_another_models_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"no token for <think>, </think>"):
        build_prompt(SpecialsOnly(SPECIALS[:3]), tmp_path, [HI])


@pytest.mark.parametrize("template", ["file", None], ids=["jinja", "builtin"])
def test_build_prompt_refuses_a_finished_conversation(tmp_path, template):
    write_template(tmp_path, template)
    with pytest.raises(ValueError, match="end with a user message"):
        build_prompt(SpecialsOnly(SPECIALS), tmp_path, [HI, HELLO])
    with pytest.raises(ValueError, match="non-empty list"):
        build_prompt(SpecialsOnly(SPECIALS), tmp_path, [])
