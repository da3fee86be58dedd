"""Answers as they stream, and ``deepseek-attn generate --chat`` on a terminal: a conversation."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from deepseek_attn.cli.terminal import say, show

if TYPE_CHECKING:
    from deepseek_attn.engine.llm import LLM, Prompt, TextStream
    from deepseek_attn.engine.request import Completion
    from deepseek_attn.engine.sampling import SamplingParams


def show_answer(stream: TextStream, llm: LLM) -> Completion:
    """Prints a stream as it comes, and on standard error why it ended if the model did not end it."""
    for piece in stream:
        show(piece, end="")
    show()
    completion = stream.completion
    if completion.finish_reason == "length":
        limit = f"--max-tokens {stream.params.max_tokens}"
        if len(completion.token_ids) < stream.params.max_tokens:
            limit = f"--max-model-len {llm.runner.layout.max_model_len}"
        say(f"finish_reason: length ({limit})")
    return completion


def show_completions(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Prints the ``n`` completions of a prompt, each after its number on standard error."""
    from deepseek_attn.engine.request import RequestFailed

    [first] = llm.generate([prompt], params, progress=True)
    for number, completion in enumerate(first.outputs, 1):
        if completion.error is not None:
            raise RequestFailed(completion.error)
        say(f"{number} of {params.n} ({completion.finish_reason}):")
        show(completion.text)


def converse(llm: LLM, params: SamplingParams, args: argparse.Namespace) -> int:
    """Reads the user's turns line by line and answers each, with all turns before it.

    Ctrl-C ends an answer, and the command where a turn is awaited; Ctrl-D ends the conversation. A turn that fails is
    forgotten.
    """
    from deepseek_attn.engine.request import RequestFailed
    from deepseek_attn.text.chat import describe_chat_format

    with suppress(ImportError):
        import readline  # noqa: F401 input() edits lines with it
    say(f"chat: {describe_chat_format(llm.directory)[1]}")
    say("Ctrl-C ends an answer, Ctrl-D the conversation")
    turns = [{"role": "system", "content": args.system}] if args.system else []
    while True:
        try:
            text = input("> " if sys.stdout.isatty() else "")
        except EOFError:
            show()
            return 0
        if not text.strip():
            continue
        asked = [*turns, {"role": "user", "content": text}]
        try:
            stream = llm.chat(asked, params, thinking=args.thinking, allow_special=args.allow_special, stream=True)
            try:
                completion = show_answer(stream, llm)
            except KeyboardInterrupt as stop:
                stream.close()
                if type(stop) is not KeyboardInterrupt:  # of another signal, which ends the command
                    raise
                completion = stream.completion
                show()
        except (ValueError, RequestFailed) as error:
            say(f"\ndeepseek-attn generate: {error}")
            continue
        answer = {"content": completion.answer, "reasoning_content": completion.reasoning}
        turns = [*asked, {"role": "assistant", **answer}]
