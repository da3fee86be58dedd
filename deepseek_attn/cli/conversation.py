"""Answers as they stream, and ``deepseek-attn generate --chat`` on a terminal: a conversation."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from deepseek_attn.cli.prompts import chat_options
from deepseek_attn.cli.terminal import say, show
from deepseek_attn.text.reply import END_THINK

if TYPE_CHECKING:
    from deepseek_attn.engine.completion import Completion
    from deepseek_attn.engine.llm import LLM, Prompt, TextStream
    from deepseek_attn.engine.records import RecordArguments
    from deepseek_attn.engine.sampling import SamplingParams
    from deepseek_attn.runner.replay import Replayed


def show_answer(stream: TextStream, llm: LLM, chat: bool) -> Completion:
    """Prints a stream as it arrives. If the model did not end it, prints the reason on standard error.

    Args:
        chat: print ``</think>`` on a line of its own, and each tool call as a line of JSON.
    """
    if chat:
        show_parts(stream)
    else:
        for piece in stream:
            show(piece, end="")
        show()
    completion = stream.completion
    if completion.finish_reason == "length":
        limit = f"--max-tokens {stream.params.max_tokens}"
        most = stream.params.max_tokens
        if most is None or len(completion.token_ids) < most:
            limit = f"--max-model-len {llm.runner.layout.max_model_len}"
        say(f"finish_reason: length ({limit})")
    show_logprobs(completion, llm)
    return completion


def show_logprobs(completion: Completion, llm: LLM) -> None:
    """Prints a line per token: its log-probability and rank, and the most likely tokens with log-probabilities."""

    def text(token: int) -> str:
        return str(token) if llm.tokenizer is None else json.dumps(llm.tokenizer.decode([token]), ensure_ascii=False)

    for name, found in (("prompt_logprobs", completion.prompt_logprobs), ("logprobs", completion.logprobs)):
        for number, token in enumerate(found or []):
            if number == 0:
                show(f"{name}:")
            top = "  ".join(f"{text(other)} {logprob:.4f}" for other, logprob in token.top.items())
            show(f"{text(token.token_id)} {token.logprob:.4f}  rank {token.rank}  {top}".rstrip())


def show_completions(
    llm: LLM, prompt: Prompt, params: SamplingParams, replay: Replayed | None, record: RecordArguments
) -> Completion:
    """Prints the ``n`` completions of a prompt, each after its number on standard error; returns the first."""
    from deepseek_attn.engine.completion import RequestFailed

    [first] = llm.generate([prompt], params, progress=True, replay=replay, **record)
    for number, completion in enumerate(first.outputs, 1):
        if completion.error is not None:
            raise RequestFailed(completion.error)
        say(f"{number} of {params.n} ({completion.finish_reason}):")
        show(completion.text)
        show_logprobs(completion, llm)
    return first


def show_parts(stream: TextStream) -> None:
    part = None
    for name, piece in stream.parts():
        if part == "reasoning" and name == "answer":
            show(f"\n{END_THINK}")
        if name in ("reasoning", "answer"):
            show(piece, end="")
            part = name
    if part is not None or not stream.completion.tool_calls:
        show()
    for call in stream.completion.tool_calls:
        if call.problem is not None:
            say(f"tool call {call.name}({call.arguments}): {call.problem}")
        else:
            show(json.dumps({"tool_call": {"name": call.name, "arguments": call.values}}, ensure_ascii=False))


def results(message: dict) -> list[dict]:
    """Reads the results of a reply's tool calls, one line per call. EOFError: end of the terminal's input."""
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": typed(f"result of {call['function']['name']}> ")}
        for call in message.get("tool_calls", [])
    ]


def typed(label: str) -> str:
    """Prints the label and reads a line. EOFError: end of the terminal's input."""
    return input(label if sys.stdout.isatty() else "")


def converse(llm: LLM, params: SamplingParams, args: argparse.Namespace) -> int:
    """Reads the user's turns line by line and answers each, with all turns before it.

    Results of tool calls are typed too, and the model continues with them. Ctrl-C ends an answer, or the command if it
    waits for a turn; Ctrl-D ends the conversation. A turn that fails is forgotten.
    """
    from deepseek_attn.engine.completion import RequestFailed
    from deepseek_attn.text.chat import describe_chat_format

    with suppress(ImportError):
        import readline  # noqa: F401 input() edits lines with it
    say(f"chat: {describe_chat_format(llm.directory)[1]}")
    say("Ctrl-C ends an answer, Ctrl-D the conversation")
    turns = [{"role": "system", "content": args.system}] if args.system else []
    answered: list[dict] = []  # results of the calls of the last turn
    options = chat_options(args)
    while True:
        try:
            text = "" if answered else typed("> ")
        except EOFError:
            show()
            return 0
        if not text.strip() and not answered:
            continue
        asked = [*turns, *(answered or [{"role": "user", "content": text}])]
        answered = []
        try:
            stream = llm.chat(asked, params, stream=True, **options)
            try:
                completion = show_answer(stream, llm, chat=True)
            except KeyboardInterrupt as stop:
                stream.close()
                if type(stop) is not KeyboardInterrupt:  # of a signal other than SIGINT, which ends the command
                    raise
                completion = stream.completion
                show()
        except (ValueError, RequestFailed) as error:
            say(f"\ndeepseek-attn generate: {error}")
            continue
        message = completion.message
        if any(call.problem for call in completion.tool_calls):  # there is nothing to answer
            del message["tool_calls"]
        turns = [*asked, message]
        try:
            answered = results(message)
        except EOFError:
            show()
            return 0
