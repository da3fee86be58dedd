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


PARTS = {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}
FULL = {"role": "assistant", "content": "hello", "reasoning": "greet back", "name": "bot"}
A, E = "<｜Assistant｜>", EOS


@pytest.mark.parametrize(
    ("messages", "v4", "v41"),
    [
        ([SYSTEM, SYSTEM, HI], "Be brief.\n\nBe brief.<｜User｜>hi", "{S}Be brief.<｜System｜>Be brief.<｜User｜>hi"),
        ([HI, BYE, HI], "<｜User｜>hi\n\nbye\n\nhi", "{M}<｜User｜>hi\n\nbye\n\nhi"),
        ([PARTS], "<｜User｜>x\n\ny", "{M}<｜User｜>x\n\ny"),
        ([{**SYSTEM, "name": "boss"}, {**HI, "name": "bob"}], "Be brief.<｜User｜>hi", "{S}Be brief.<｜User｜>hi"),
        (
            [HI, FULL, BYE],
            f"<｜User｜>hi{A}</think>hello{E}<｜User｜>bye",
            f"{{M}}<｜User｜>hi{A}</think>hello{E}<｜User｜>bye",
        ),
        (
            [HI, HELLO, HELLO, SYSTEM, BYE],
            f"Be brief.<｜User｜>hi{A}</think>hello{E}{A}</think>hello{E}<｜User｜>bye",
            f"{{M}}<｜User｜>hi{A}</think>hello{E}{A}</think>hello{E}<｜System｜>Be brief.<｜User｜>bye",
        ),
        ([HELLO, SYSTEM], f"Be brief.{A}</think>hello{E}", f"{{M}}{A}</think>hello{E}<｜System｜>Be brief."),
        ([SYSTEM], "Be brief.", "{S}Be brief."),
        (
            [{**HI, "content": ""}, HI, {**HI, "content": ""}, BYE],
            "<｜User｜>hi\n\nbye",
            "{M}<｜User｜>\n\nhi\n\n\n\nbye",
        ),
    ],
    ids=["systems", "users", "parts", "name", "reasoning", "assistants", "assistant-first", "system-alone", "empty"],
)
@pytest.mark.parametrize("thinking", [False, True])
def test_as_deepseek_recipe_renders(messages, v4, v41, thinking):
    """Strings of deepseek-recipe 0.2.0: in thinking mode its line about the effort stands where the system text is."""
    end = f"{A}<think>" if thinking else f"{A}</think>"
    assert encode_messages(messages, thinking) == BOS + v4 + end
    first = {"S": EFFORT if thinking else "<｜System｜>", "M": EFFORT if thinking else ""}
    assert encode_messages(messages, thinking, v41=True) == BOS + v41.format_map(first) + end


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
    ("thinking", "messages", "expected"),
    [
        (False, [SYSTEM, HI], f"Be brief.<｜User｜>hi{A}</think>"),
        (True, [SYSTEM, SYSTEM, HI], f"Be brief.Be brief.<｜User｜>hi{A}<think>"),
        (False, [HI, BYE], f"<｜User｜>hi{A}</think><｜User｜>bye{A}</think>"),
        (True, [HI, BYE], f"<｜User｜>hi{A}</think><｜User｜>bye{A}<think>"),
        (True, [HI, HELLO, BYE], f"<｜User｜>hi{A}</think>hello{E}<｜User｜>bye{A}<think>"),
        (True, [HI, SYSTEM, BYE], f"<｜User｜>hi{A}</think>Be brief.<｜User｜>bye{A}<think>"),
        (False, [HI, HELLO, HELLO, BYE], f"<｜User｜>hi{A}</think>hello{E}hello{E}<｜User｜>bye{A}</think>"),
        (True, [HI, HELLO], f"<｜User｜>hi{A}<think>greet back</think>hello{E}"),
    ],
)
def test_encode_v32(thinking, messages, expected):
    """Strings of mlx-lm 0.32.2's port of the encoder that V3.2 ships."""
    assert encode_messages(messages, thinking, v32=True) == BOS + expected


@pytest.mark.parametrize("last", [[SYSTEM], [HI, SYSTEM]])
def test_v32_answers_a_user(last):
    with pytest.raises(ValueError, match="the last message is a system message"):
        encode_messages(last, v32=True)


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
        ([{"role": "user", "content": None}], "content must be a string or a list of text parts, got NoneType"),
        ([{"role": "user", "content": ["x"]}], 'content part 0 must be {"type": "text", "text": "..."}, got str'),
        ([{"role": "user", "content": [{"type": "text"}]}], "content part 0 must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "without images"),
        ([{**SYSTEM, "tools": [{"name": "f"}]}, HI], r"tools not supported.*encoding/ folder"),
        ([{**HI, "response_format": {"type": "json"}}], "response_format not supported"),
        ([HI, {**HELLO, "tool_calls": [{}]}, BYE], "message 1: tool_calls not supported"),
        ([{**HI, "reasoning_content": "x"}], "belongs to assistant"),
        ([HI, {**HELLO, "reasoning_content": 3}], "reasoning_content must be a string"),
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
        ("a</think>b</think>c", True, ("a", "bc")),
        ("cut off while think\n", True, ("cut off while think\n", "")),
        (f"</think>because{EOS}junk", True, ("", "because")),
        (f"because{EOS}", False, ("", "because")),
        ("</think>def", False, ("", "def")),
        ("\n\na\n</think>\n\nb\n", True, ("a", "b\n")),
        ("\n b", False, ("", " b")),
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
    (tmp_path / "v32").mkdir()
    (tmp_path / "v32" / "config.json").write_text(json.dumps({"model_type": "deepseek_v32"}))
    assert "DeepSeek-V3.2" in describe_chat_format(tmp_path / "v32")[1]
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

    def find_added(self, text, max_tokens=None):
        return []

    def encode(self, text, max_tokens=None):
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
