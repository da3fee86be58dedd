"""Several turns with ``generate --chat``: typed on a terminal, or in a file of messages; and why a text ended."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from deepseek_attn import LLM, SamplingParams
from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.cli import Terminated, main, make_parser
from deepseek_attn.engine.llm import LLM as Model
from deepseek_attn.engine.request import Request
from tests.support.exit_codes import exit_code
from tests.support.small_models import three_layers

MAX_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = three_layers()
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

            def two_pieces():
                yield next(pieces)
                yield next(pieces)
                raise KeyboardInterrupt

            found._pieces = two_pieces()
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
        def __iter__(self):
            raise Terminated(signal.SIGTERM)

        def close(self):
            pass

    monkeypatch.setattr(Model, "stream", lambda *args, **kwargs: Stream())
    typed("one", "two")
    assert generate(checkpoint, "--chat") == 128 + signal.SIGTERM


def test_interrupted_where_a_turn_is_awaited(checkpoint, typed):
    typed("one", KeyboardInterrupt)
    assert generate(checkpoint, "--chat") == 130


@pytest.mark.parametrize("source", ["typed", "--prompt", "--messages", "--prompts"])
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
