"""Prompts and chat messages from files, and ``deepseek-attn generate --prompts FILE``: one JSON line per prompt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from deepseek_attn.cli.options import read_text
from deepseek_attn.utils.json_files import parse_json

if TYPE_CHECKING:
    from deepseek_attn.engine.llm import LLM
    from deepseek_attn.engine.request import Completion
    from deepseek_attn.engine.sampling import SamplingParams


def read_prompts(path: str) -> list[str | list[int]]:
    """One prompt per line that is not blank: a JSON string, a JSON list of token ids, or plain text as it stands.

    Args:
        path: ``-`` reads standard input.

    Raises:
        ValueError: the file is missing, is not UTF-8 text, or holds no prompt.
    """
    prompts = [parse_line(line) for line in read_text("--prompts", path).split("\n") if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts {path}: no prompt; write one per line")
    return prompts


def read_messages(path: str) -> list[dict]:
    """The chat messages of a JSON file; ``-`` reads standard input. ValueError if it is none, or not readable."""
    from deepseek_attn.text.template import plain_messages

    found = parse_json(read_text("--messages", path), f"--messages {path}")
    try:
        return plain_messages(found)
    except ValueError as error:
        raise ValueError(f"--messages {path}: {error}") from error


def parse_line(line: str) -> str | list[int]:
    line = line.removesuffix("\r")
    try:
        value = parse_json(line, "prompt")
    except ValueError:
        return line
    ids = isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    return value if ids or isinstance(value, str) else line


def complete_all(llm: LLM, prompts: list, params: SamplingParams, args: argparse.Namespace) -> int:
    """Completes the prompts with a progress bar and prints a JSON line for each; returns 1 if any failed.

    Lines are in order, each printed when its prompt and those before it are done. Where the run breaks off, those that
    are done behind an unfinished prompt follow.
    """
    if args.chat:
        prompts = [llm.chat_prompt(messages(args, prompt), args.thinking)[0] for prompt in prompts]
    done: dict[int, Completion] = {}
    printed = 0

    def show(index: int) -> None:
        line = json.dumps(record(index, done.pop(index)), ensure_ascii=False)
        tqdm.write(line, file=sys.stdout)  # above the bar
        sys.stdout.flush()

    def finished(index: int, completion: Completion) -> None:
        nonlocal printed
        done[index] = completion
        while printed in done:
            show(printed)
            printed += 1

    try:
        completions = llm.generate(prompts, [params] * len(prompts), progress=True, finished=finished)
    except KeyboardInterrupt:
        for index in sorted(done):
            show(index)
        raise
    return int(any(completion.error for completion in completions))


def record(index: int, completion: Completion) -> dict:
    fields = {
        "index": index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    return fields | ({"error": completion.error} if completion.error else {})


def messages(args: argparse.Namespace, prompt: Any) -> list[dict]:
    """The chat messages of a prompt: the system message, if there is one, and the user's; those of ``--messages``.

    Raises:
        ValueError: the prompt is token ids, which take no chat format.
    """
    if args.messages is not None:
        return prompt
    if not isinstance(prompt, str):
        raise ValueError("--chat takes text; token ids are run as they are")
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": prompt}]
