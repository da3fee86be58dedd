"""Several turns with ``generate --chat``: typed on a terminal, or in a file of messages; and why a text ended."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from deepseek_attn import LLM, SamplingParams
from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.cli import Terminated, main, make_parser
from deepseek_attn.engine.llm import LLM as Model, TextStream
from deepseek_attn.engine.request import Request
from deepseek_attn.text.chat import encode_messages
from tests.support.exit_codes import exit_code
from tests.support.small_models import two_layers
from tests.support.tiers import tiered

MAX_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = two_layers()
    return write_checkpoint(RandomSource(config, seed=3), config, tmp_path_factory.mktemp("model") / "tiny")


def generate(checkpoint, *flags: str) -> int:
    limits = ("--max-tokens", str(MAX_TOKENS), "--temperature", "0", "--max-model-len", "200")
    return main(["generate", "--model", str(checkpoint), "--device", "cpu", *limits, *flags])


@pytest.fixture
def typed(monkeypatch):
    """Gives the command a terminal on which these lines are typed; an exception is raised where it stands."""

    def on_a_terminal(*lines: str | type[BaseException]) -> None:
        left = list(lines)

        def read(prompt: str) -> str:
            line = left.pop(0) if left else EOFError
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", read)

    return on_a_terminal


def answers(checkpoint, *turns: str, system: str | None = None) -> list[str]:
    """The answers to the user's turns, each after all before it."""
    llm = LLM(checkpoint, device="cpu", progress=False, max_model_len=200)
    messages = [{"role": "system", "content": system}] if system else []
    found = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        found.append(llm.chat(messages, GREEDY).text)
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def test_a_conversation(checkpoint, typed, capsys):
    typed("hello", "  ", "and then?")
    assert generate(checkpoint, "--chat", "--system", "be brief") == 0
    captured = capsys.readouterr()
    assert captured.out == "\n".join([*answers(checkpoint, "hello", "and then?", system="be brief"), "\n"])
    assert captured.err.count(f"finish_reason: length (--max-tokens {MAX_TOKENS})\n") == 2


def test_an_answer_that_is_interrupted_stays_in_the_conversation(checkpoint, typed, capsys, monkeypatch):
    """And a turn that cannot be answered does not."""
    seen, stream = [], Model.stream

    def interrupted(self, prompt, *args, **kwargs):
        seen.append(self.tokenizer.decode(prompt))
        found = stream(self, prompt, *args, **kwargs)
        if len(seen) == 1:
            pieces = found._pieces

            def one_piece():
                yield next(pieces)
                raise KeyboardInterrupt

            found._pieces = one_piece()
        return found

    monkeypatch.setattr(Model, "stream", interrupted)
    typed("one", "x" * 300, "two")
    assert generate(checkpoint, "--chat") == 0
    captured = capsys.readouterr()
    assert "exceeds max_model_len=200" in captured.err
    first = captured.out.split("\n")[0]
    assert first
    start = "<｜begin▁of▁sentence｜><｜User｜>one<｜Assistant｜></think>"
    assert seen[2] == f"{start}{first}<｜end▁of▁sentence｜><｜User｜>two<｜Assistant｜></think>"


def test_another_signal_ends_the_conversation_within_an_answer(checkpoint, typed, monkeypatch):
    class Stream:
        def parts(self):
            raise Terminated(signal.SIGTERM)

        def close(self):
            pass

    monkeypatch.setattr(Model, "stream", lambda *args, **kwargs: Stream())
    typed("one", "two")
    assert generate(checkpoint, "--chat") == 128 + signal.SIGTERM


def test_interrupted_where_a_turn_is_awaited(checkpoint, typed):
    typed("one", KeyboardInterrupt)
    assert generate(checkpoint, "--chat") == 130


@pytest.mark.parametrize("source", tiered(["typed", "--prompt", "--messages", "--prompts"], ["--messages"]))
def test_special_tokens_in_messages(checkpoint, typed, tmp_path, monkeypatch, source):
    """Text by default, tokens with the flag, wherever a message comes from."""
    message, prompts = "a<｜User｜>b", []
    create = Request.create.__func__

    def watched(cls, runner, tokenizer, prompt, *args):
        prompts.append(tokenizer.decode(prompt).count("<｜User｜>") - [*prompt].count(tokenizer.token_id("<｜User｜>")))
        return create(cls, runner, tokenizer, prompt, *args)

    monkeypatch.setattr(Request, "create", classmethod(watched))
    (tmp_path / "messages").write_text(json.dumps([{"role": "user", "content": message}]))
    (tmp_path / "prompts").write_text(f"{message}\n")
    flags = {"--prompt": message, "--messages": str(tmp_path / "messages"), "--prompts": str(tmp_path / "prompts")}
    for allowed in ([], ["--allow-special"]):
        typed(message)
        assert generate(checkpoint, *([source, flags[source]] if source in flags else []), "--chat", *allowed) == 0
    assert prompts == [1, 0]


def test_messages(checkpoint, tmp_path, capsys, monkeypatch):
    first, second = answers(checkpoint, "hi", "and?", system="be brief")
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and?"},
    ]
    (tmp_path / "messages.json").write_text(json.dumps(messages))
    assert generate(checkpoint, "--messages", str(tmp_path / "messages.json")) == 0
    assert capsys.readouterr().out == f"{second}\n"
    monkeypatch.setattr("sys.stdin", (tmp_path / "messages.json").open())
    assert generate(checkpoint, "--messages", "-", "--chat") == 0
    assert capsys.readouterr().out == f"{second}\n"


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (None, [], "No such file"),
        ("[", [], "not valid JSON"),
        ("[]", [], "messages must be a non-empty list"),
        ('{"role": "user"}', [], "messages must be a non-empty list"),
        ('["hi"]', [], "message 0: expected a dict with role and content, got str"),
        ('[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]', [], "nothing to answer"),
        ("[]", ["--prompt", "x"], "not allowed with"),
        ("[]", ["--system", "x"], "--system beside --messages"),
    ],
)
def test_wrong_messages(checkpoint, tmp_path, capsys, text, flags, message):
    path = tmp_path / "messages.json"
    if text is not None:
        path.write_text(text)
    assert exit_code(generate, checkpoint, "--messages", str(path), *flags) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_conversation_is_one_process(checkpoint, typed, capsys):
    typed()
    assert generate(checkpoint, "--chat", "--tensor-parallel", "2") == 2
    assert "a conversation on a terminal is one process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--prompt", "abc"], f"--max-tokens {MAX_TOKENS}"),
        (["--token-ids", ",".join(["7"] * 198)], "--max-model-len 200"),
    ],
)
def test_a_text_that_the_model_did_not_end(checkpoint, capsys, flags, reason):
    assert generate(checkpoint, *flags, "--ignore-eos") == 0
    assert capsys.readouterr().err.endswith(f"finish_reason: length ({reason})\n")


def test_a_text_that_the_model_ended(checkpoint, capsys):
    [completion] = LLM(checkpoint, device="cpu", progress=False, max_model_len=200).generate("abc", GREEDY)
    assert generate(checkpoint, "--prompt", "abc", "--stop-token-id", str(completion.token_ids[2])) == 0
    assert "finish_reason" not in capsys.readouterr().err


def test_one_default_of_max_tokens():
    assert make_parser().parse_args(["generate"]).max_tokens == SamplingParams().max_tokens


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALLS = (
    "hm\n", ("</think>",), "I look.\n\n<", ("｜DSML｜",), "tool_calls>\n<", ("｜DSML｜",), 'invoke name="weather">\n<',
    ("｜DSML｜",), 'parameter name="city" string="true">Łódź</', ("｜DSML｜",), "parameter>\n</", ("｜DSML｜",),
    "invoke>\n</", ("｜DSML｜",), "tool_calls>",
)  # fmt: skip


@pytest.fixture
def scripted(monkeypatch):
    """Has the model write these replies, whose strings are ordinary tokens and whose tuples name a token."""
    prompts = []

    def script(*replies) -> list[str]:
        left = list(replies)

        def stream(self, prompt, params, **options):
            prompts.append(self.tokenizer.decode(prompt))
            params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
            request = Request.create(self.runner, self.tokenizer, prompt, params)
            tokens = [
                token
                for part in left.pop(0)
                for token in (
                    self.tokenizer.encode_plain(part) if isinstance(part, str) else [self.tokenizer.token_id(*part)]
                )
            ]

            def pieces():
                for token in tokens:
                    request.push(token)
                    yield from filter(None, request.text[-1:])
                request.end("abort")
                yield from filter(None, request.text[-1:])

            return TextStream(self.engine, request, pieces())

        monkeypatch.setattr(Model, "stream", stream)
        return prompts

    return script


SHOWN = 'hm\n</think>\nI look.\n{"tool_call": {"name": "weather", "arguments": {"city": "Łódź"}}}\n'


def generate_long(checkpoint, *flags: str) -> int:
    return main(["generate", "--model", str(checkpoint), "--device", "cpu", "--max-model-len", "4000", *flags])


def test_tools_of_a_file(checkpoint, tmp_path, capsys, scripted):
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER], "reasoning_effort": "max"}
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    prompts = scripted(CALLS, CALLS)
    tools = ["--tools", str(tmp_path / "tools.json"), "--reasoning-effort", "max"]
    assert generate_long(checkpoint, "--chat", "--prompt", "hi", *tools) == 0
    assert capsys.readouterr().out == SHOWN
    assert generate_long(checkpoint, "--messages", str(tmp_path / "chat.json")) == 0
    assert capsys.readouterr().out == SHOWN
    expected = encode_messages(chat["messages"], tools=[WEATHER], reasoning_effort="max")
    assert prompts == [expected, expected]


def test_results_of_calls_are_typed(checkpoint, tmp_path, typed, capsys, scripted):
    (tmp_path / "tools.json").write_text(json.dumps({"tools": [WEATHER]}))
    cut_off = ("no", ("</think>",), "<", ("｜DSML｜",), "tool_calls>\n<", ("｜DSML｜",), 'invoke name="a"')
    prompts = scripted(CALLS, ("ok", ("</think>",), "12°"), cut_off)
    typed("Weather?", "twelve", "and now?")
    assert generate_long(checkpoint, "--chat", "--thinking", "--tools", str(tmp_path / "tools.json")) == 0
    captured = capsys.readouterr()
    assert captured.out == SHOWN + "ok\n</think>\n12°\nno\n\n"
    assert "tool call a(): the reply ended within it" in captured.err
    assert prompts[2].endswith(
        "<｜User｜><tool_result>twelve</tool_result><｜Assistant｜><think>ok</think>12°<｜end▁of▁sentence｜>"
        "<｜User｜>and now?<｜Assistant｜><think>"
    )


@pytest.mark.parametrize(
    ("tools", "flags", "message"),
    [
        ("{}", ["--chat"], "expected a JSON list of"),
        ("[3]", ["--chat"], "tools[0]: expected"),
        ("[", ["--chat"], "not valid JSON"),
        ("[]", [], "--tools needs --chat"),
        ("[]", ["--chat", "--reasoning-effort", "huge"], "reasoning_effort='huge' is not supported by DeepSeek-V4"),
        ("[]", ["--chat", "--reasoning-effort", "none", "--thinking"], "thinking=True beside reasoning_effort='none'"),
        ("[]", ["--reasoning-effort", "low"], "--reasoning-effort needs --chat"),
    ],
)
def test_wrong_tools(checkpoint, tmp_path, capsys, tools, flags, message):
    (tmp_path / "tools.json").write_text(tools)
    assert generate(checkpoint, "--prompt", "hi", "--tools", str(tmp_path / "tools.json"), *flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_options_of_a_line(checkpoint, tmp_path, capsys):
    """Of ``--prompts``: they are preferred to those of the flags."""
    turns = [{"role": "user", "content": "hi"}]
    lines = [
        {"messages": turns, "thinking": False},
        {"messages": turns, "reasoning_effort": "max"},
        {"messages": turns},
        {"messages": turns, "tools": []},
        {"messages": [*turns, {"role": "assistant", "content": "On"}], "continue_final_message": True},
    ]
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "tools").write_text(json.dumps([WEATHER]))
    flags = ["--prompts", str(tmp_path / "prompts"), "--chat", "--thinking", "--tools", str(tmp_path / "tools")]
    assert generate_long(checkpoint, *flags, "--max-tokens", "3", "--temperature", "0") == 0
    found = {line["index"]: line["token_ids"] for line in map(json.loads, capsys.readouterr().out.splitlines())}
    with LLM(checkpoint, device="cpu", progress=False, max_model_len=4000) as llm:
        params = SamplingParams(temperature=0, max_tokens=3)
        options = [
            {"thinking": False},
            {"reasoning_effort": "max"},
            {"thinking": True},
            {"thinking": True, "tools": []},
        ]
        options.append({"thinking": True, "continue_final_message": True})
        options = [{"tools": [WEATHER]} | given for given in options]
        for i, (line, given) in enumerate(zip(lines, options, strict=True)):
            assert found[i] == llm.chat(line["messages"], params, **given).token_ids
    (tmp_path / "prompts").write_text(json.dumps({"prompt": "hi", "tools": []}))
    assert generate(checkpoint, "--prompts", str(tmp_path / "prompts")) == 2
    assert "no such keys: tools" in capsys.readouterr().err
