"""Compares chat prompts and parsed replies with those of other programs, on random conversations.

* deepseek-recipe (``pip install deepseek-recipe``), DeepSeek's own renderer and parser of V4 and V4.1 chats: prompts,
  and parts of replies in random pieces, of which many are malformed.
* Encoders of the form that checkpoints ship, ``--encoder V3.2=FILE``: a module with ``encode_messages``, and prompts
  are compared; with ``parse_message_from_completion_text`` the parts of replies too. vLLM has such modules in
  ``vllm/tokenizers/deepseek_v*_encoding.py``. THE FILE IS EXECUTED.
* Conversations with their strings, ``--goldens V4=DIR``: ``test_input_1.json`` and ``test_output_1.txt`` and so on, as
  checkpoints ship them in ``encoding/tests``.

`deepseek_attn.text.encoding` lists the differences between the programs; such conversations are not drawn, or
counted as explained. Exits with 1 if any other differs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from deepseek_attn.data import SMALL_CHECKPOINT
from deepseek_attn.text.chat import ENCODINGS, Version, build_prompt, encode_messages, parse_completion
from deepseek_attn.text.encoding import EOS
from deepseek_attn.text.reply import ANSWER, DSML, SYMBOLS, Reply, ReplyStart, spelled_marks
from deepseek_attn.text.tokenizer import TOKENIZER_FILE, Tokenizer

Message = dict[str, Any]
TEXTS = (
    "hi",
    "\n x ",
    'é"\\<b>',
    'json {"a": 1}',
    "<｜User｜> </think>",
    "多 字",
    "a\n\nb",
    "e\u0301 🙂",
    "</｜DSML｜",
)
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FORMATS = (
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
)


@dataclass
class Conversation:
    """Messages and the options of `encode_messages`."""

    messages: list[Message]
    thinking: bool
    options: dict[str, Any] = field(default_factory=dict)

    def prompt(self, version: Version) -> str:
        return encode_messages(self.messages, self.thinking, version, **self.options)


@dataclass
class Count:
    """Results of a comparison."""

    judge: str
    compared: int = 0
    refused: int = 0
    explained: int = 0
    different: int = 0

    def add(self, same: bool, shown: Callable[[], str], explained: bool = False) -> None:
        self.compared += 1
        if same or explained:
            self.explained += not same
            return
        self.different += 1
        if self.different <= 3:
            print(f"{self.judge} differs:\n{shown()}", file=sys.stderr)


class Drawing:
    """Random conversations."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def text(self, empty: float = 0.0) -> str:
        return "" if self.chance(empty) else self.random.choice(TEXTS)

    def value(self, depth: int = 0) -> Any:
        kind = self.random.randrange(8 if depth < 2 else 6)
        if kind == 6:
            return [self.value(depth + 1) for _ in range(self.random.randrange(3))]
        if kind == 7:
            return {self.text(): self.value(depth + 1)}
        return (self.text(0.2), 3, -1.5, True, None, 0)[kind]

    def tools(self) -> list[Message]:
        names = ("w", "get_x")[: self.random.randrange(1, 3)]
        return [
            {"type": "function", "function": {"name": name, "description": self.text(), "parameters": SCHEMA}}
            for name in names
        ]

    def calls(self, fewest_arguments: int) -> list[Message]:
        calls = []
        for i in range(self.random.randrange(1, 4)):
            count = self.random.randrange(fewest_arguments, 3)
            arguments = {f"{self.random.choice('abc')}{j}": self.value() for j in range(count)}
            written = json.dumps(arguments, ensure_ascii=self.chance(0.5)) if self.chance(0.7) else arguments
            function = {"name": self.random.choice(("w", "get_x")), "arguments": written}
            calls.append({"id": f"c{i}", "type": "function", "function": function})
        return calls

    def results(self, calls: list[Message], shuffled: bool = True) -> list[Message]:
        results = [{"role": "tool", "tool_call_id": call["id"], "content": self.content()} for call in calls]
        if shuffled:
            self.random.shuffle(results)
        return results

    def content(self, empty: float = 0.1) -> str | list[Message]:
        if self.chance(0.8):
            return self.text(empty)
        return [{"type": "text", "text": self.text(empty)} for _ in range(self.random.randrange(1, 3))]

    def for_recipe(self) -> Conversation:
        """Roles in any order, as the recipe takes them, up to a question or a continued answer."""
        messages: list[Message] = []
        for _ in range(self.random.randrange(1, 7)):
            role = self.random.choices(("user", "system", "latest_reminder", "assistant"), (35, 15, 10, 40))[0]
            if role == "assistant":
                message: Message = {"role": role, "content": self.text(0.1)}
                if self.chance(0.5):
                    message["reasoning_content"] = self.text(0.1)
                messages.append(message)
                if self.chance(0.5):
                    message["tool_calls"] = self.calls(0)
                    messages += self.results(message["tool_calls"])
            else:
                text = self.text(0.1) if role == "latest_reminder" else self.content()
                messages.append({"role": role, "content": text})
        options: dict[str, Any] = {"tools": self.tools()} if self.chance(0.4) else {}
        if self.chance(0.2):
            options["response_format"] = self.random.choice(FORMATS)
        if not options.get("tools") and self.chance(0.15):
            last = {"role": "assistant", "content": self.text(0.4), "reasoning_content": self.text(0.1), "prefix": True}
            messages.append(last)
        elif messages[-1]["role"] == "assistant":
            messages.append({"role": "user", "content": self.text(0.1)})
        thinking = self.chance(0.5)
        if thinking:
            options["reasoning_effort"] = self.random.choice(EFFORTS)
        return Conversation(messages, thinking, options)

    def for_encoder(self, version: str) -> Conversation:
        """Rounds of a question and its answers with developer messages, tasks and tools, up to a question or an answer.

        There are no conversations on which the shipped encoders and the recipe differ.
        """
        v32, messages = version == "V3.2", []
        has_tools = self.chance(0.6)
        if has_tools or self.chance(0.5):
            messages.append({"role": "system", "content": self.text()})
            messages[0] |= {"tools": self.tools()} if has_tools else {}
            messages[0] |= {"response_format": {"x": self.value()}} if self.chance(0.3) else {}
        rounds = self.random.randrange(1, 5)
        for number in range(rounds):
            if self.chance(0.2) and not v32:
                messages.append({"role": "latest_reminder", "content": self.text()})
            if self.chance(0.2) and (v32 or has_tools or number == rounds - 1):
                messages.append({"role": "developer", "content": self.text()})
                messages[-1] |= {"tools": self.tools()} if self.chance(0.4) and has_tools else {}
                messages[-1] |= {"response_format": {"x": self.value()}} if self.chance(0.3) else {}
            else:
                messages.append({"role": "user", "content": self.text()})
            if self.chance(0.2) and not v32:
                messages[-1]["task"] = self.random.choice(("action", "query", "authority", "domain", "read_url"))
            if number == rounds - 1 and self.chance(0.4):
                break
            messages += self.answers(v32, has_tools or v32, "task" in messages[-1])
        thinking, options = self.chance(0.5), {}
        if thinking and not v32:
            known = [None, "low", "high", "max", *([42] if version == "V4.1" else [])]
            known.remove("low") if version == "V4-first" else None
            options["reasoning_effort"] = self.random.choice(known)
        return Conversation(messages, thinking, options)

    def answers(self, v32: bool, may_call: bool, is_task: bool) -> Iterator[Message]:
        while may_call and not is_task and self.chance(0.5):
            calls = self.calls(1)
            message = {"role": "assistant", "content": self.text(0.3), "reasoning_content": self.text()}
            yield message | {"tool_calls": calls}
            for result in self.results(calls, shuffled=not v32):
                yield result | ({"content": self.text()})
        last = {"role": "assistant", "content": self.text(), "reasoning_content": self.text()}
        yield last | ({"task": "title"} if self.chance(0.1) and not v32 else {})

    def reply(self, version: Version) -> tuple[str, bool, Reply]:
        """The text of a well-formed reply, whether it begins with reasoning, and its parts."""
        thinking = self.chance(0.5)
        message: dict[str, Any] = {
            "role": "assistant", "content": self.text().strip("\n"), "reasoning_content": "",
        }  # fmt: skip
        message |= {"tool_calls": self.calls(0)} if self.chance(0.7) else {}
        message |= {"reasoning_content": self.text().strip("\n")} if thinking else {}
        calls = []
        for call in message.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            calls.append((call["function"]["name"], json.loads(arguments) if isinstance(arguments, str) else arguments))
        written = json.dumps([message["content"], message["reasoning_content"], calls], ensure_ascii=False)
        if any(token in written for token in (*SYMBOLS, "<think>")):
            return self.reply(version)  # of a text all are tokens
        question = [{"role": "user", "content": "q"}]
        start = encode_messages(question, thinking, version)
        text = encode_messages([*question, message], thinking, version).removeprefix(start)
        return text, thinking, Reply(message["reasoning_content"], message["content"], tuple(calls))

    def broken_reply(self) -> str:
        """Pieces of markup, of text and of replies in any order."""
        tags = [
            f"<{DSML}",
            f"</{DSML}",
            "tool_calls>\n",
            " calls>\n",
            'invoke name="',
            'w"',
            '">\n',
            'parameter name="',
        ]
        tags += ['c" string="true">', '" string="false">', f"</{DSML}parameter>\n", f"</{DSML}invoke>\n"]
        tags += [f"</{DSML}tool_calls>", f"</{DSML} calls>", "</think>", DSML, "<", "3", '{"a": 1}']
        found = []
        for _ in range(self.random.randrange(1, 20)):
            whole = self.reply(self.random.choice(("V4", "V4.1")))[0].removesuffix(EOS)
            part = whole[self.random.randrange(len(whole) + 1) :] if self.chance(0.5) else whole
            tag, text = self.random.choice(tags), self.random.choice(TEXTS)
            found.append(self.random.choices((tag, text, "\n", part), (6, 2, 1, 1))[0])
        return "".join(found)

    def pieces(self, text: str) -> list[str]:
        cuts = sorted(self.random.choices(range(len(text) + 1), k=self.random.randrange(7)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [piece for piece in pieces if piece]


class Recipe:
    """deepseek-recipe."""

    MODELS: ClassVar[dict[Version, str]] = {"V4": "DeepSeek-V4-Pro", "V4.1": "DeepSeek-V4.1-Flash"}

    def __init__(self, module: ModuleType):
        self.module = module
        self.name = f"deepseek-recipe {module.__version__}"

    def prompt(self, conversation: Conversation, version: Version) -> str | None:
        """None: it refuses the conversation."""
        converted = self.converted(conversation, version)
        return None if converted is None else self.encoding(version).render_conversation(converted).prompt

    def ids(self, conversation: Conversation, tokenizer: Path) -> list[int] | None:
        """Token ids of V4's prompt by a ``tokenizer.json``."""
        converted = self.converted(conversation, "V4")
        encoding = self.encoding("V4").with_tokenizer(self.module.Tokenizer.from_file(str(tokenizer)))
        return None if converted is None else encoding.encode(converted)

    def encoding(self, version: str) -> Any:
        return self.module.DeepseekV4Encoding() if version == "V4" else self.module.DeepseekV41Encoding()

    def converted(self, conversation: Conversation, version: Version) -> Any:
        """The conversation in the recipe's form; None: it is refused."""
        request = {
            "model": self.MODELS[version],
            "messages": [written(message) for message in conversation.messages],
            "thinking": {"type": "enabled" if conversation.thinking else "disabled"},
            **conversation.options,
        }
        try:
            request = self.module.ChatCompletionRequest(request)
            return request.convert(self.module.ConversionOptions()).conversation
        except (self.module.ConversionError, ValueError):
            return None

    def parts(self, pieces: list[str], start: ReplyStart) -> tuple[str, str, list[tuple[str, str]]]:
        """Reasoning, answer and calls of a reply."""
        module, stages = self.module, self.module.ThinkingInitialStage
        stage = (stages.ReasoningContinuation if start.before else stages.ReasoningStart) if start.thinking else None
        options = module.ParsingOptions(thinking_initial_stage=stage)
        request = module.ConversationRequest(module.Conversation(), module.ModelVersion.DeepseekV41Flash)
        processor = module.StreamProcessor(
            module.ChatCompletionRequest.chunk_generator(request, "", "m"), options, None
        )
        chunks = [chunk for piece in pieces for chunk in processor.push(module.InferenceChunk.text(piece))]
        chunks += processor.push(module.InferenceChunk.finish(module.InferenceFinishReason.Stop))
        texts, calls = {"reasoning_content": "", "content": ""}, []
        for delta in (json.loads(chunk.to_json())["choices"][0]["delta"] for chunk in chunks):
            for key in texts:
                texts[key] += delta.get(key) or ""
            for call in delta.get("tool_calls") or []:
                calls += [[call["function"]["name"], ""]] if "name" in call["function"] else []
                calls[-1][1] += call["function"]["arguments"]
        return texts["reasoning_content"], texts["content"], [(name, arguments) for name, arguments in calls]


def written(message: Message) -> Message:
    """The message with the JSON of its calls' arguments."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        if isinstance(call["function"]["arguments"], dict)
        else call
        for call in message.get("tool_calls", [])
    ]
    return message | ({"tool_calls": calls} if calls else {})


def is_explained(messages: list[Message], version: str) -> bool:
    """Conversations that the recipe renders without some of their messages, or of a part without the others."""
    roles = [message["role"] for message in messages if message["role"] != "system" or "".join(texts(message))]
    reminders = any(first == second == "latest_reminder" for first, second in pairwise(roles))
    return version == "V4.1" and (reminders or not roles or (len(roles) == 1 and roles[0] == "assistant"))


def texts(message: Message) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def compare_recipe(module: ModuleType, count: int, seed: int = 0) -> list[Count]:
    """Prompts of V4 and V4.1, token ids, and the parts of replies."""
    recipe, drawing = Recipe(module), Drawing(seed)
    counts: dict[Version, Count] = {version: Count(f"{recipe.name}, prompts of {version}") for version in Recipe.MODELS}
    for _ in range(count):
        conversation = drawing.for_recipe()
        for version, found in counts.items():
            expected = recipe.prompt(conversation, version)
            if expected is None:
                found.refused += 1
                continue
            got = conversation.prompt(version)
            found.add(
                got == expected,
                lambda got=got, expected=expected, conversation=conversation: f"{conversation}\n{got}\n{expected}",
                is_explained(conversation.messages, version),
            )
    # special tokens that contents spell stay text; the small tokenizer has no <｜System｜> token
    ids, tokenizer = Count(f"{recipe.name}, token ids of V4"), Tokenizer(SMALL_CHECKPOINT)
    for _ in range(count // 4):
        conversation = drawing.for_recipe()
        expected = recipe.ids(conversation, SMALL_CHECKPOINT / TOKENIZER_FILE)
        if expected is None:
            ids.refused += 1
            continue
        options = {"thinking": conversation.thinking, **conversation.options}
        got, _ = build_prompt(tokenizer, SMALL_CHECKPOINT, conversation.messages, **options)
        ids.add(got == expected, lambda *a, e=(conversation, got, expected): "\n".join(map(str, e)))
    replies = Count(f"{recipe.name}, replies")
    for _ in range(count):
        text = drawing.broken_reply() if drawing.chance(0.7) else drawing.reply("V4.1")[0].removesuffix(EOS)
        pieces = drawing.pieces(text)
        for start in (ANSWER, ReplyStart(thinking=True), ReplyStart(True, "x")):
            got, expected = parts(pieces, start), recipe.parts(pieces, start)
            # it loses newlines behind a "<" that begins no tag, and does not escape names of parameters
            loses = re.search(rf"<[/{DSML}]*\n", text) or any(name_needs_escape(call) for call in expected[2])
            replies.add(got == expected, lambda *a, e=(text, got, expected): "\n".join(map(repr, e)), bool(loses))
    return [*counts.values(), ids, replies]


def name_needs_escape(call: tuple[str, str]) -> bool:
    """Whether a reply ended within the name of a parameter, or the JSON of the arguments is broken by a name."""
    try:
        json.loads(call[1])
    except ValueError:
        return True
    return False


def parts(pieces: list[str], start: ReplyStart) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, answer and calls of a reply that comes in pieces."""
    parser, marks, seen, found = start.parser(), spelled_marks("".join(pieces)), 0, {"reasoning": "", "answer": ""}
    events = []
    for piece in pieces:
        seen += len(piece)
        events += parser.push(piece, [mark for mark in marks if mark.offset < seen])
    for part, piece in events + parser.flush():
        if part in found:
            found[part] += piece
    return found["reasoning"], found["answer"], [(call.name, call.arguments) for call in parser.tool_calls]


def compare_encoder(module: ModuleType, version: Version, count: int, seed: int = 0, name: str = "") -> list[Count]:
    """Prompts of an encoder of the form that checkpoints ship, and the replies that it parses."""
    drawing, prompts = Drawing(seed), Count(f"{name or module.__file__}, prompts of {version}")
    # vLLM's have another name for the reasoning
    source = Path(module.__file__ or "").read_text(encoding="utf-8")
    key = "reasoning_content" if 'get("reasoning_content")' in source else "reasoning"
    for _ in range(count):
        conversation = drawing.for_encoder(version)
        given = [
            {key if name == "reasoning_content" else name: value for name, value in written(message).items()}
            for message in conversation.messages
        ]
        mode = "thinking" if conversation.thinking else "chat"
        try:
            expected = module.encode_messages(given, mode, **conversation.options)
        except Exception:  # V3.2's fails where it drops developer messages
            prompts.refused += 1
            continue
        got = conversation.prompt(version)
        prompts.add(got == expected, lambda *a, e=(conversation, got, expected): "\n".join(map(str, e)))
    if not hasattr(module, "parse_message_from_completion_text"):
        return [prompts]
    replies = Count(f"{name or module.__file__}, replies of {version}")
    for _ in range(count):
        text, thinking, _ = drawing.reply(version)
        found = module.parse_message_from_completion_text(text, "thinking" if thinking else "chat")
        functions = [call["function"] for call in found["tool_calls"]]
        calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
        expected = (found["reasoning_content"], found["content"], calls)
        reasoning, answer, calls = parse_completion(text, thinking)
        got = (reasoning, answer, [(call.name, call.values) for call in calls])
        # the shipped parser keeps newlines at the beginning and the end of a part
        replies.add(got == expected, lambda *a, e=(text, got, expected): "\n".join(map(repr, e)))
    return [prompts, replies]


def compare_goldens(folder: Path, version: Version) -> Count:
    """Conversations with the strings that were published for them."""
    found = Count(f"{folder}, prompts of {version}")
    for path in sorted(folder.glob("test_input_*.json")):
        expected = (folder / path.name.replace("input", "output").replace(".json", ".txt")).read_text(encoding="utf-8")
        case = json.loads(path.read_text(encoding="utf-8"))
        case = case if isinstance(case, dict) else {"messages": case}
        modes = {"thinking": True, "chat": False}
        asked = [modes[case["thinking_mode"]]] if "thinking_mode" in case else [True, False]
        options = {key: case[key] for key in ("tools", "reasoning_effort") if key in case}
        got = [encode_messages(case["messages"], thinking, version, **options) for thinking in asked]
        found.add(expected in got, lambda *a, e=(path, got[0], expected): "\n".join(map(str, e)))
    return found


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"encoder_{abs(hash(path))}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def versioned(text: str) -> tuple[str, str]:
    version, equals, path = text.partition("=")
    if not equals or version not in ENCODINGS or not Path(path).exists():
        raise argparse.ArgumentTypeError(f"{text!r}: VERSION=PATH, with one of {', '.join(ENCODINGS)}")
    return version, path


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Compare chat prompts and replies with those of other programs."
    )
    parser.add_argument("--count", type=int, default=1000, help="conversations for each program (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--encoder", metavar="VERSION=FILE", type=versioned, action="append", default=[],
        help="an encoder as checkpoints ship it; it is executed",
    )  # fmt: skip
    parser.add_argument(
        "--goldens", metavar="VERSION=DIR", type=versioned, action="append", default=[],
        help="a folder with test_input_*.json and test_output_*.txt",
    )  # fmt: skip
    args = parser.parse_args()
    counts: list[Count] = []
    if importlib.util.find_spec("deepseek_recipe"):
        counts += compare_recipe(importlib.import_module("deepseek_recipe"), args.count, args.seed)
    else:
        print("deepseek-recipe is not installed: pip install deepseek-recipe", file=sys.stderr)
    for version, path in args.encoder:
        counts += compare_encoder(load(path), version, args.count, args.seed)
    counts += [compare_goldens(Path(path), version) for version, path in args.goldens]
    for count in counts:
        print(
            f"{count.judge}: {count.compared} compared, {count.different} different, {count.explained} explained, "
            f"{count.refused} refused by it"
        )
    return int(any(count.different for count in counts))


if __name__ == "__main__":
    sys.exit(main())
