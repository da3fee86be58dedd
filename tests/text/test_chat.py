"""Chat encoding: exact strings, the choice of encoder, and errors that say what to do."""

import importlib
import json
from pathlib import Path

import pytest

from deepseek_attn.data import SMALL_CHECKPOINT
from deepseek_attn.text.chat import build_prompt, describe_chat_format, encode_messages, parse_completion
from deepseek_attn.text.tokenizer import Tokenizer
from tests.support.typed import untyped

SCRIPTS = Path(__file__).parents[2] / "scripts"
THINK = "<think>"

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
    assert encode_messages(messages, thinking, "V4.1") == BOS + v41.format_map(first) + end


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
    assert encode_messages(messages, thinking, "V4.1") == BOS + expected


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
    assert encode_messages(messages, thinking, "V3.2") == BOS + expected


@pytest.mark.parametrize("last", [[SYSTEM], [HI, SYSTEM]])
def test_v32_answers_a_user(last):
    with pytest.raises(ValueError, match="the last message is a system message"):
        encode_messages(last, version="V3.2")


def test_empty_values_of_other_keys_are_ignored():
    dumped = {"role": "user", "content": "hi", "tool_calls": None, "tools": [], "name": None, "reasoning_content": None}
    assert encode_messages([dumped]) == encode_messages([HI])


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        (["hi"], "message 0: expected a dict"),
        (
            [{"role": "function", "content": "4"}],
            r"role 'function' is not supported \(supported: system, developer, user",
        ),
        ([{"content": "x"}], "role None"),
        ([{"role": "user", "content": None}], "content must be a string or a list of text parts, got NoneType"),
        ([{"role": "user", "content": ["x"]}], 'content part 0 must be {"type": "text", "text": "..."}, got str'),
        ([{"role": "user", "content": [{"type": "text"}]}], "content part 0 must be"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "of content parts only text is supported, not 'audio'"),
        ([{**HI, "tools": [TOOL]}], "tools belong to a system or developer message, or are given for the whole"),
        ([{**HI, "response_format": {"type": "json"}}], "response_format belong to a system or developer message"),
        ([{**SYSTEM, "tools": [{"type": "retrieval"}]}], r'message 0: tools\[0\]: expected \{"type": "function"'),
        ([{**SYSTEM, "tools": "f"}], "message 0: tools: expected a list of tools, got str"),
        ([{**HI, "tool_calls": [CALL]}], "tool_calls belong to assistant messages, not to role 'user'"),
        ([HI, {**HELLO, "tool_calls": [{}]}, BYE], r"message 1: tool_calls\[0\]: expected"),
        ([HI, {**HELLO, "tool_calls": 3}, BYE], "message 1: tool_calls must be a list, got int"),
        ([HI, ASKS, HI], "message 1: 0 tool messages follow its 1 calls: one must for each"),
        ([HI, ASKS, {**RESULT, "tool_call_id": "b"}], r"message 2: a tool message answers .*'b' is none of \['a'\]"),
        ([HI, ASKS, RESULT, RESULT], "message 3: a tool message answers a call of the message before it"),
        ([HI, {**ASKS, "tool_calls": [CALL, {**CALL, "id": "b"}]}, RESULT], "1 tool messages follow its 2 calls"),
        ([HI, {**ASKS, "tool_calls": [CALL, {**CALL, "id": "b"}]}, RESULT, RESULT], "have one tool_call_id"),
        ([RESULT], "message 0: a tool message answers a call"),
        ([{**HI, "tool_call_id": "a"}], "tool_call_id belongs to a tool message"),
        ([{**HI, "task": "sing"}], "task 'sing' is none of action, query, authority, domain, title, read_url"),
        ([{**HI, "prefix": True}], "prefix belongs to the last message, an assistant's"),
        ([HI, {**HELLO, "prefix": True}, BYE], "message 1: prefix belongs to the last message"),
        ([{**HI, "reasoning_content": "x"}], "belongs to assistant"),
        ([HI, {**HELLO, "reasoning_content": 3}], "reasoning_content must be a string"),
        ([{**HI, "audio": "x"}], "audio not supported by the built-in encoding; remove them"),
    ],
)
def test_refuses(messages, message):
    with pytest.raises(ValueError, match=message):
        encode_messages(messages)


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        ("V4", {"thinking": True, "reasoning_effort": "none"}, "thinking=True beside reasoning_effort='none'"),
        ("V4", {"thinking": False, "reasoning_effort": "low"}, "thinking=False beside reasoning_effort='low'"),
        (
            "V4",
            {"reasoning_effort": 50},
            "reasoning_effort=50 is not supported by DeepSeek-V4: there are none, minimal",
        ),
        ("V4.1", {"reasoning_effort": 101}, "max, or an integer from 1 to 100"),
        ("V4.1", {"reasoning_effort": True}, "reasoning_effort=True is not supported by DeepSeek-V4.1"),
        ("V3.2", {"reasoning_effort": "low"}, "is not supported by DeepSeek-V3.2: it has no efforts"),
        ("V4", {"tools": [3]}, r"tools\[0\]: expected"),
        ("V4", {"tools": [{**TOOL, "namespace": "a::b"}]}, "namespace 'a::b' must be a name without '::'"),
        ("V4", {"tools": [{"name": "b::f", "namespace": "a"}]}, "'b::f' is of the namespace 'b', and 'a' is given"),
        ("V4", {"tool_choice": "f"}, "tool_choice='f': supported are 'auto', 'none', 'required' and {"),
        ("V4", {"tool_choice": "required"}, "tool_choice: a call needs tools, and a last message"),
        ("V4", {"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice={.*: supported are 'auto'"),
        ("V4", {"tool_choice": {"type": "custom", "function": {"name": "f"}}}, "tool_choice={.*: supported are 'auto'"),
        (
            "V4",
            {"tools": [TOOL, {"name": "g"}], "tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice: there is no function 'h' among tools: 'f', 'g'",
        ),
        ("V4", {"response_format": {"type": "xml"}}, "response_format={'type': 'xml'}: expected"),
        ("V4", {"response_format": {"type": "json_schema"}}, "'json_schema': {'schema'"),
        ("V4", {"continue_final_message": True}, "message 0: only an assistant message can be continued"),
        ("V4", {"continue_final_message": "no"}, "continue_final_message='no': must be True or False"),
        ("V4", {"thinking": "no"}, "thinking='no': must be True or False"),
    ],
)
def test_refuses_options(version, options, message):
    with pytest.raises(ValueError, match=message):
        encode_messages([HI], version=version, **options)


def test_special_tokens_are_allowed_by_true_alone(tmp_path):
    with pytest.raises(ValueError, match="allow_special='no': must be True or False"):
        build_prompt(Tokenizer(SMALL_CHECKPOINT), tmp_path, [HI], allow_special=untyped("no"))


@pytest.mark.parametrize(
    "messages", [[{**HI, "task": "query"}], [{"role": "latest_reminder", "content": "x"}, HI]], ids=["task", "reminder"]
)
def test_v32_has_neither_tasks_nor_reminders(messages):
    with pytest.raises(ValueError, match=r"this encoding has no tasks|role 'latest_reminder' is not supported"):
        encode_messages(messages, version="V3.2")


def test_all_problems_at_once():
    with pytest.raises(ValueError, match=r"(?s)message 0: content.*message 1: role 'function'"):
        encode_messages([{"role": "user", "content": 1}, {"role": "function", "content": "x"}])


GOLDEN = json.loads((Path(__file__).parent / "chat_prompts.json").read_text(encoding="utf-8"))
ANSWERED = [case for case in GOLDEN["cases"] if any(turn["role"] == "assistant" for turn in case["messages"])]


def golden_id(case):
    return f"{case['name']}-{case['version']}-{'thinking' if case['thinking'] else 'chat'}"


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=golden_id)
def test_prompts_of_other_programs(case):
    """Strings of deepseek-recipe, and of the shipped encoders in vLLM and SGLang for what it does not have."""
    prompt = encode_messages(case["messages"], case["thinking"], case["version"], **case["options"])
    assert prompt.replace(GOLDEN["tools"][case["version"]], "TOOLS") == case["prompt"]


def test_the_prompts_are_of_all_versions_and_roles():
    found = {(case["version"], message["role"]) for case in GOLDEN["cases"] for message in case["messages"]}
    assert found >= {(version, role) for version in ("V3.2", "V4", "V4.1") for role in ("system", "developer", "tool")}
    assert len(GOLDEN["cases"]) > 90


@pytest.mark.parametrize("case", ANSWERED, ids=golden_id)
def test_each_answer_is_parsed_back(case):
    """Reasoning, text and typed arguments of every finished assistant message, out of the prompt up to its EOS."""
    for i, turn in enumerate(case["messages"]):
        if turn["role"] != "assistant" or turn.get("prefix"):
            continue
        prompts = [
            encode_messages(case["messages"][:end], case["thinking"], case["version"], **case["options"])
            for end in (i, i + 1)
        ]
        reply = parse_completion(prompts[1].removeprefix(prompts[0]), prompts[0].endswith(THINK))
        assert prompts[1].startswith(prompts[0])
        assert reply.answer == turn["content"]
        assert reply.reasoning == (turn.get("reasoning_content", "") if prompts[0].endswith(THINK) else "")
        functions = [call["function"] for call in turn.get("tool_calls", [])]
        expected = [(function["name"], json.loads(function["arguments"])) for function in functions]
        if case["name"] != "special-tokens":  # of a text all are tokens
            assert [(call.name, call.values) for call in reply.tool_calls] == expected


@pytest.mark.parametrize("version", ["V3.2", "V4", "V4.1"])
def test_random_conversations_are_parsed_back(monkeypatch, version):
    """Rendered replies, parsed whole, give reasoning, answer and the calls with the types of their arguments."""
    monkeypatch.syspath_prepend(SCRIPTS)
    drawing = importlib.import_module("compare_chat").Drawing(version)
    for _ in range(200):
        text, thinking, expected = drawing.reply(version)
        reply = parse_completion(text, thinking)
        assert (reply.reasoning, reply.answer) == (expected.reasoning, expected.answer)
        assert [(call.name, call.values) for call in reply.tool_calls] == list(expected.tool_calls)


def test_deepseek_recipe_has_the_same_prompts_and_replies(monkeypatch, capsys):
    recipe = pytest.importorskip("deepseek_recipe", reason="needs deepseek-recipe: pip install deepseek-recipe")
    monkeypatch.syspath_prepend(SCRIPTS)
    counts = importlib.import_module("compare_chat").compare_recipe(recipe, 100)
    assert [count.different for count in counts] == [0, 0, 0, 0], capsys.readouterr().err
    assert min(count.compared - count.explained for count in counts) > 20


EFFORT_BEGINS = {"low": "", "high": "Reasoning Effort: Absolute maximum", "max": "Reasoning Effort: Beyond maximum"}


def test_reasoning_efforts():
    """``"none"`` is chat mode, any other thinking mode; V4's first checkpoints know one text."""
    assert encode_messages([HI], reasoning_effort="none") == encode_messages([HI], False)
    for effort, begins in EFFORT_BEGINS.items():
        prompt = encode_messages([HI], reasoning_effort=effort)
        assert prompt.startswith(BOS + (begins or "<｜User｜>"))
        assert prompt.endswith(THINK)
    for alias, effort in (("minimal", "low"), ("medium", "high"), ("xhigh", "high")):
        for version in ("V4", "V4.1"):
            assert encode_messages([HI], None, version, reasoning_effort=alias) == encode_messages(
                [HI], None, version, reasoning_effort=effort
            )
    assert encode_messages([HI], True) == encode_messages([HI], reasoning_effort="low")
    first = [encode_messages([HI], None, "V4-first", reasoning_effort=effort) for effort in EFFORT_BEGINS]
    assert first == [encode_messages([HI], reasoning_effort=effort) for effort in ("low", "low", "high")]
    assert encode_messages([HI], True, "V4.1") == encode_messages([HI], None, "V4.1", reasoning_effort="high")


def test_tool_choice():
    chosen = encode_messages([HI], tools=[TOOL], tool_choice="required")
    assert chosen == encode_messages([HI], tools=[TOOL]) + "\n\n<｜DSML｜tool_calls>\n"
    named = {"type": "function", "function": {"name": TOOL["function"]["name"]}}
    assert encode_messages([HI], tools=[TOOL], tool_choice=named) == chosen
    thinking = encode_messages([HI], True, tools=[TOOL])
    for choice in ("required", named):  # the calls come behind the reasoning, of which nothing is in the prompt
        assert encode_messages([HI], True, tools=[TOOL], tool_choice=choice) == thinking
    assert encode_messages([HI], tools=[TOOL], tool_choice="none") == encode_messages([HI])
    assert encode_messages([HI], tools=[]) == encode_messages([HI])
    assert encode_messages([HI], tools=[TOOL["function"]]) == encode_messages([HI], tools=[TOOL])


@pytest.mark.parametrize("given", ["notjson", "[1]", "3", ""])
def test_arguments_that_are_no_object(given):
    """As deepseek-recipe writes them: one parameter with the text."""
    call = {**CALL, "function": {"name": "f", "arguments": given}}
    prompt = encode_messages([HI, {**ASKS, "tool_calls": [call]}, RESULT])
    assert f'<｜DSML｜parameter name="arguments" string="true">{given}</｜DSML｜parameter>' in prompt


def test_namespaces():
    """As V4.1's shipped encoder writes them: in front of the name, and the description of the namespace too."""
    tool = {
        **TOOL,
        "function": {"name": "f", "description": "Finds."},
        "namespace": {"name": "s", "description": "Search."},
    }
    prompt = encode_messages([HI], False, "V4.1", tools=[tool])
    assert '{"name": "s::f", "description": "Search.\\nFinds."}' in prompt
    for call in ({**CALL, "namespace": "s"}, {**CALL, "function": {"name": "s::f", "arguments": {}}}):
        prompt = encode_messages([HI, {**ASKS, "tool_calls": [call]}], False, "V4.1")
        assert '<｜DSML｜ invoke name="s::f">' in prompt


def test_continued_answers():
    partial = [HI, {**HELLO, "content": "hel"}]
    for thinking, end in ((False, "</think>hel"), (True, "<think>greet back</think>hel")):
        prompt = encode_messages(partial, thinking, continue_final_message=True)
        assert prompt.endswith(f"<｜Assistant｜>{end}")
        assert prompt == encode_messages([HI, {**partial[1], "prefix": True}], thinking)
    assert encode_messages([HI, {**HELLO, "content": None, "prefix": True}], True).endswith("<think>greet back")


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
    assert parse_completion(text, thinking) == (*expected, ())


@pytest.mark.parametrize("thinking", [False, True])
def test_a_parsed_completion_goes_back_into_the_prompt_unchanged(thinking):
    start = encode_messages([HI], thinking)
    completion = f"r</think>a{EOS}" if thinking else f"a{EOS}"
    reasoning, answer, _ = parse_completion(completion, thinking)
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
    tokenizer = untyped(SpecialsOnly)([BOS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"])
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
    ids, explanation = build_prompt(untyped(SpecialsOnly(SPECIALS)), tmp_path, [HI], thinking=True)
    assert ids == [0, 1, ord("h") + 100, ord("i") + 100, 2, 3]
    assert "not run" in explanation


def test_build_prompt_refuses_another_models_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"no token for <think>, </think>"):
        build_prompt(untyped(SpecialsOnly(SPECIALS[:3])), tmp_path, [HI])


@pytest.mark.parametrize("template", ["file", None], ids=["jinja", "builtin"])
def test_build_prompt_refuses_a_finished_conversation(tmp_path, template):
    write_template(tmp_path, template)
    with pytest.raises(ValueError, match="end with a user message"):
        build_prompt(untyped(SpecialsOnly(SPECIALS)), tmp_path, [HI, HELLO])
    with pytest.raises(ValueError, match="non-empty list"):
        build_prompt(untyped(SpecialsOnly(SPECIALS)), tmp_path, [])
