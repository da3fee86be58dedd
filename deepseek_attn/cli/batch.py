"""``deepseek-attn generate --prompts FILE``: runs the prompts of a file; writes a JSON line for each when it is done.

A line is ``{"index": 3, "request": "4f0c...", "text": ..., "token_ids": ..., "finish_reason": ...}``. If a prompt
has an ``id``, it follows the index. The line of a failed prompt has an ``error``. Lines are in the order of completion;
``index`` numbers the prompts of the input from 0. With ``n`` completions per prompt, ``others`` holds the second and
later ones. A reply that calls functions has ``tool_calls``, dicts of ``name``, ``arguments`` (JSON text) and
``problem``. ``request`` is a digest of the prompt, its id, and the settings of chat and sampling: ``--resume`` compares
it to recognise lines of the same request.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_attn.cli.prompts import PromptLine, PromptLines, chat_options, conversation_of
from deepseek_attn.cli.records import SUFFIX, record_arguments, record_file, replay_file
from deepseek_attn.cli.terminal import say, show, write_above_bars
from deepseek_attn.engine.completion import Completion
from deepseek_attn.engine.llm import LLM, IndexedPrompt, Prompt
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.text.conversation import Chat
from deepseek_attn.utils.json_files import parse_json
from deepseek_attn.utils.line_files import LineFile, appending

if TYPE_CHECKING:
    from deepseek_attn.layers.parallel import Parallel

BEGINNING = b'{"index": '  # of every line
CHECKED_AHEAD = 1024  # prompts of a stream
DEFAULTS = asdict(SamplingParams())


@contextmanager
def open_batch(args: argparse.Namespace, params: SamplingParams) -> Iterator[PromptBatch]:
    """Opens the prompts and the output, and checks both before a model is loaded.

    Raises:
        ValueError: either file cannot be used; with ``--resume``, a line of the output belongs to another prompt.
    """
    with PromptLines(args.prompts, params, args.system) as prompts:
        if args.out is None:
            yield PromptBatch(args, params, prompts)
            return
        with appending(args.out, args.resume, BEGINNING) as out:
            yield PromptBatch(args, params, prompts, out)


class PromptBatch(Iterator[IndexedPrompt | None]):
    """Iterator over the prompts without an output line, and the output. Yields None while a stream has no next prompt.

    Attributes:
        lines: number of lines in the output or printed; errors: number of lines with an ``error``.
        uses_flags: whether some prompt read so far is sampled by the flags, without parameters of its own.
    """

    def __init__(
        self, args: argparse.Namespace, params: SamplingParams, prompts: PromptLines, out: LineFile | None = None
    ):
        self._args, self._out = args, out
        self.lines = self.errors = 0
        self._failed: set[int] = set()  # prompts whose line has an error
        self._done = self._read_done()
        self._left: int | None = None
        self._pending_prompts = self._pending(prompts, self._done)
        if prompts.regular:
            with PromptLines(args.prompts, params, args.system) as again:
                pending = filter(None, self._pending(again, dict(self._done)))
                known = [(prompt.params, prompt.replay) for prompt, _ in pending]  # their text is not kept
            self._left = len(known)
        else:
            known = [(prompt.params, prompt.replay) for prompt, _ in self._arrived()]
        self.uses_flags = any(own is params for own, _ in known)
        files = [file for _, file in known if isinstance(file, Path)]
        if files and not any(map(Path.is_file, files)):
            raise ValueError(f"--replay {args.replay}: it has no i{SUFFIX} of a prompt i: name the folder of --records")
        self._heads: dict[int, dict[str, Any]] = {}  # first fields of the lines of prompts in flight, by their index

    def __length_hint__(self) -> int:
        return self._left or 0

    def _arrived(self) -> list[tuple[IndexedPrompt, dict[str, Any]]]:
        """The prompts of a stream that have arrived, which are checked before a model is loaded."""
        arrived = []
        for found in self._pending_prompts:
            if found is None:
                break
            arrived.append(found)
            if len(arrived) == CHECKED_AHEAD:
                break
        else:
            self._left = len(arrived)
        self._pending_prompts = chain(arrived, self._pending_prompts)
        return arrived

    @property
    def is_complete(self) -> bool:
        """Whether every prompt has a line already, so no model is needed. False while a stream may bring more."""
        return self._left == 0

    def __next__(self) -> IndexedPrompt | None:
        found = next(self._pending_prompts)
        if found is None:
            return None
        prompt, head = found
        self._heads[prompt.index] = head
        return prompt

    def _read_done(self) -> dict[int, str]:
        """Digests of the requests that have a line, by index."""
        done: dict[int, str] = {}
        for number, line in enumerate(self._out.lines() if self._out else (), 1):
            where = f"--out {self._args.out}: line {number}"
            fields = parse_json(line, where)
            index, request = (fields.get("index"), fields.get("request")) if isinstance(fields, dict) else (None, None)
            if not isinstance(index, int) or not isinstance(request, str):
                raise ValueError(f"{where}: not a line of this command, with an index and a request: name another file")
            if index in done:
                raise ValueError(f"{where}: prompt {index} has another line already: remove one of them")
            done[index] = request
            self.lines, self.errors = self.lines + 1, self.errors + ("error" in fields)
            if "error" in fields:
                self._failed.add(index)
        return done

    def _pending(
        self, prompts: PromptLines, done: dict[int, str]
    ) -> Iterator[tuple[IndexedPrompt, dict[str, Any]] | None]:
        """Prompts without a line in the output, with their line's first fields; removes others from ``done``."""
        index = 0
        for line in prompts:
            if line is None:
                yield None
                continue
            request = self._digest(line)
            known = done.pop(index, None)
            if known is None:
                name = {} if line.id is None else {"id": line.id}
                replay = None if self._args.replay is None else replay_file(self._args.replay, index)
                head = {"index": index, **name, "request": request}
                yield IndexedPrompt(index, line.prompt, line.params, replay), head
            elif known != request:
                raise ValueError(
                    f"--resume: the line of prompt {index} in {self._args.out} is of another prompt, or was made with "
                    "other flags for chat, sampling or --replay: give the same ones, or name another --out"
                )
            elif self._args.records and not (index in self._failed or record_file(self._args.records, index).is_file()):
                raise ValueError(
                    f"--resume: {self._args.out} has a line of prompt {index}, and {self._args.records} has no records "
                    "of it: name the folder of that run, or another --out"
                )
            index += 1
        if done:
            raise ValueError(
                f"--resume: {self._args.out} has a line of prompt {min(done)}, and there are {index} prompts: give the "
                "same ones, or name another --out"
            )
        if not index:
            raise ValueError(f"--prompts {self._args.prompts}: no prompt; write one per line")

    def _digest(self, line: PromptLine) -> str:
        chat = [self._args.system, chat_options(self._args)] if self._args.chat else None
        # unset fields are left out of the digest, so that lines stay valid when fields are added
        given = {name: value for name, value in asdict(line.params).items() if value != DEFAULTS[name]}
        replay = [] if self._args.replay is None else [{"replay": self._args.replay}]
        asked = json.dumps([line.prompt, chat, given, line.id, *replay])
        return blake2b(asked.encode(), digest_size=8).hexdigest()

    def write(self, index: int, completion: Completion) -> None:
        """Writes the line of a prompt that is done."""
        fields = {**self._heads.pop(index), **result(completion)}
        if completion.others:
            fields["others"] = [result(other) for other in completion.others]
        self.errors += any(output.error is not None for output in completion.outputs)
        line = json.dumps(fields, ensure_ascii=False)
        if self._out is not None:
            self._out.append(line)
        else:
            write_above_bars(line, sys.stdout)
            sys.stdout.flush()
        self.lines += 1

    def finish(self) -> int:
        """Prints a summary of ``--out``; returns the exit status: 1 if a prompt failed, or was read but has no line."""
        if self._args.out is not None:
            show(f"{self.lines} prompts, {self.errors} failed -> {self._args.out}")
        if self._heads:
            say(f"{len(self._heads)} prompts have no line; --resume goes on with them")
        return int(self.errors > 0 or bool(self._heads))


def result(completion: Completion) -> dict[str, Any]:
    """The fields of a line that come from the completion."""
    fields = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if completion.tool_calls:
        fields["tool_calls"] = [asdict(call) for call in completion.tool_calls]
    for name, found in (("logprobs", completion.logprobs), ("prompt_logprobs", completion.prompt_logprobs)):
        if found is not None:
            fields[name] = found.to_dict()
    return fields if completion.error is None else fields | {"error": completion.error}


def complete_all(
    llm: LLM, batch: PromptBatch | None, params: SamplingParams, args: argparse.Namespace, ranks: Parallel
) -> int:
    """Completes the prompts with a progress bar, and writes a line for each; returns 1 if any failed.

    Args:
        batch: None on all ranks but the first, which reads and writes.
    """
    prompts = batch if batch is not None and ranks.world == 1 else shared(batch, ranks)
    try:
        record = record_arguments(llm, args.records)
        for index, completion in llm.generate_iter(prompts, params, encode=encoder(args), progress=True, **record):
            if batch is not None:
                batch.write(index, completion)
    except KeyboardInterrupt:
        if batch is not None and args.out is not None:
            say(f"\n{args.out}: {batch.lines} lines; --resume goes on with the other prompts")
        raise
    return 0 if batch is None else batch.finish()


def encoder(args: argparse.Namespace) -> Callable[[Any], Prompt | Chat]:
    """Makes the conversation of chat messages, and with ``--chat`` of a user's message."""

    def encode(prompt: Any) -> Prompt | Chat:
        return conversation_of(args, prompt) if args.chat or isinstance(prompt, Chat) else prompt

    return encode


def shared(batch: PromptBatch | None, ranks: Parallel) -> Iterator[IndexedPrompt | None]:
    """The prompts of rank 0, on every rank, at the same steps of all."""
    end = False
    while not end:
        prompt = None
        if batch is not None:
            try:
                prompt = next(batch)
            except StopIteration:
                end = True
        end, prompt = ranks.share((end, prompt))
        if not end:
            yield prompt
