"""Chat messages as OpenAI and DeepSeek write them -> turns in one form, checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deepseek_attn.text.template import REASONING_KEYS
from deepseek_attn.text.tokenizer import IMAGE

TASKS = ("action", "query", "authority", "domain", "title", "read_url")  # DeepSeek's quick instructions
ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
KNOWN_KEYS = {
    *("role", "content", "name", "mask", "prefix", "wo_eos", "task", "tools", "response_format"),
    *("tool_calls", "tool_call_id", *REASONING_KEYS),
}
TEXT_PARTS = ("text", "input_text", "output_text")
SEPARATOR = "::"  # of a tool's namespace and its name


@dataclass
class Turn:
    """One message.

    Attributes:
        text: its content; an image is its placeholder.
        calls: of an assistant: dicts with ``name``, ``arguments`` (a dict) and ``id``.
        call_id: of a tool's result.
        tools: function definitions.
        task: the quick instruction that follows the message.
        finished: an assistant turn ends with EOS.
    """

    role: str
    text: str
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    response_format: Any = None
    task: str | None = None
    finished: bool = True


class MessageProblems:
    """What is wrong with messages; ``at`` names the place."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, at: str, problem: str) -> None:
        self.found.append(f"\n  - {at}: {problem}")

    def check(self) -> None:
        """ValueError with all problems, if there are any."""
        if self.found:
            raise ValueError("these messages cannot be encoded:" + "".join(self.found))


def read_turns(messages: list[dict[str, Any]], continued: bool, supported: Sequence[str], images: bool) -> list[Turn]:
    """The turns of the messages that `plain_messages` returned.

    Args:
        continued: the last message, an assistant's, is continued.
        supported: the encoding's roles, of `ROLES`, and ``"task"``.
        images: the encoding has a placeholder for images.

    Raises:
        ValueError: with all problems of the messages.
    """
    problems, turns = MessageProblems(), []
    for i, message in enumerate(messages):
        last = i == len(messages) - 1
        turns.append(_turn(message, f"message {i}", last, continued and last, supported, images, problems))
    if continued and messages[-1].get("role") != "assistant":
        problems.add(
            f"message {len(messages) - 1}", "only an assistant message can be continued (continue_final_message=True)"
        )
    problems.check()
    _check_results(turns, problems)
    problems.check()
    return turns


def function_definitions(tools: object, problems: MessageProblems, at: str = "tools") -> list[dict[str, Any]]:
    """The function of each tool: ``{"type": "function", "function": {"name": ...}}``, or the function alone."""
    if not isinstance(tools, list):
        problems.add(at, f"expected a list of tools, got {type(tools).__name__}")
        return []
    functions = []
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else tool
        typed = isinstance(tool, dict) and tool.get("type", "function") == "function"
        if not typed or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            problems.add(
                f"{at}[{i}]",
                'expected {"type": "function", "function": {"name": ..., "description": ..., "parameters": {JSON '
                f"schema}}}}}}, got {tool!r:.80}",
            )
            continue
        functions.append(_with_namespace(function, tool.get("namespace"), f"{at}[{i}]", problems))
    return functions


def _with_namespace(function: dict[str, Any], outer: Any, at: str, problems: MessageProblems) -> dict[str, Any]:
    """A function definition whose name has its namespace in front, whose description it begins with."""
    namespace = outer if outer is not None else function.get("namespace")
    plain = {key: value for key, value in function.items() if key != "namespace"}
    if namespace is None:
        return plain
    about = namespace if isinstance(namespace, dict) else {"name": namespace}
    plain["name"] = _qualified(plain["name"], about.get("name"), at, problems)
    if about.get("description"):
        plain["description"] = "\n".join(filter(None, (about["description"], plain.get("description"))))
    return plain


def _qualified(name: str, namespace: Any, at: str, problems: MessageProblems) -> str:
    if namespace is None:
        return name
    own, separator, short = name.rpartition(SEPARATOR)
    if not isinstance(namespace, str) or not namespace or SEPARATOR in namespace:
        problems.add(at, f"namespace {namespace!r:.80} must be a name without {SEPARATOR!r}")
    elif separator and own != namespace:
        problems.add(at, f"{name!r} is of the namespace {own!r}, and {namespace!r} is given beside it")
    return f"{namespace}{SEPARATOR}{short}"


def _turn(
    message: dict[str, Any], at: str, last: bool, continued: bool, supported: Sequence[str], images: bool,
    problems: MessageProblems,
) -> Turn:  # fmt: skip
    role = message.get("role")
    if role not in supported or role == "task":
        known = ", ".join(name for name in ROLES if name in supported)
        problems.add(at, f"role {role!r} is not supported (supported: {known})")
    assistant = role == "assistant"
    turn = Turn(role=str(role), text="")
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), "")
    turn.reasoning = reasoning if isinstance(reasoning, str) else ""
    if reasoning and not assistant:
        problems.add(at, f"reasoning_content belongs to assistant messages, not to role {role!r}; remove it")
    elif not isinstance(reasoning, str):
        problems.add(at, f"reasoning_content must be a string, got {type(reasoning).__name__}")
    turn.calls = _calls(message, at, assistant, problems)
    may_be_empty = (assistant and (turn.calls or turn.reasoning)) or (role == "system" and message.get("tools"))
    if "content" in message or not may_be_empty:
        turn.text = _text(message.get("content"), at, images, problems)
    for key, belongs in (("tools", ("system", "developer")), ("response_format", ("system", "developer"))):
        if message.get(key) and role not in belongs:
            problems.add(at, f"{key} belong to a system or developer message, or are given for the whole conversation")
    if message.get("tools"):
        turn.tools = function_definitions(message["tools"], problems, f"{at}: tools")
    turn.response_format = message.get("response_format") or None
    if message.get("tool_call_id") is not None:
        turn.call_id = str(message["tool_call_id"])
        if role != "tool":
            problems.add(at, f"tool_call_id belongs to a tool message, not to role {role!r}")
    turn.task = message.get("task")
    if turn.task is not None and "task" not in supported:
        problems.add(at, "this encoding has no tasks")
    elif turn.task is not None and turn.task not in TASKS:
        problems.add(at, f"task {turn.task!r:.80} is none of {', '.join(TASKS)}")
    if message.get("prefix") and not (assistant and last):
        problems.add(at, "prefix belongs to the last message, an assistant's")
    turn.finished = not (continued or message.get("prefix") or message.get("wo_eos"))
    others = ", ".join(str(key) for key, value in message.items() if value and key not in KNOWN_KEYS)
    if others:
        problems.add(at, f"{others} not supported by the built-in encoding; remove them")
    return turn


def _text(content: Any, at: str, images: bool, problems: MessageProblems) -> str:
    """Content as one string: text parts, and placeholders of images, joined by a blank line."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        problems.add(at, f"content must be a string or a list of text parts, got {type(content).__name__}")
        return ""
    texts = []
    for i, part in enumerate(content):
        kind, text = (part.get("type", "text"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind in TEXT_PARTS and isinstance(text, str):
            texts.append(text)
        elif kind in ("image", "image_url") and images:
            texts.append(IMAGE)
        elif kind is None or kind in TEXT_PARTS:
            expected = '{"type": "text", "text": "..."}'
            problems.add(at, f"content part {i} must be {expected}, got {type(part).__name__}")
        else:
            without = ": of models with vision the text part runs, without images" if "image" in str(kind) else ""
            problems.add(at, f"of content parts only text is supported, not {kind!r}{without}")
    return "\n\n".join(texts)


def _calls(message: dict[str, Any], at: str, assistant: bool, problems: MessageProblems) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    if not calls:
        return []
    if not assistant:
        problems.add(at, f"tool_calls belong to assistant messages, not to role {message.get('role')!r}")
    if not isinstance(calls, list):
        problems.add(at, f"tool_calls must be a list, got {type(calls).__name__}")
        return []
    found = []
    for i, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            problems.add(
                at,
                f'tool_calls[{i}]: expected {{"id": ..., "type": "function", "function": {{"name": ..., "arguments": '
                f"...}}}}, got {call!r:.80}",
            )
            continue
        namespace = call.get("namespace") if call.get("namespace") is not None else function.get("namespace")
        name = _qualified(function["name"], namespace, f"{at}: tool_calls[{i}]", problems)
        found.append({"name": name, "arguments": _arguments(function.get("arguments")), "id": call.get("id")})
    return found


def _arguments(given: Any) -> dict[str, Any]:
    """Arguments by name. Text that is not a JSON object becomes a parameter ``arguments``, as in DeepSeek's encoder."""
    if given is None:
        return {}
    if isinstance(given, dict):
        return given
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            value = None
    return value if isinstance(value, dict) else {"arguments": given}


def _check_results(turns: list[Turn], problems: MessageProblems) -> None:
    """Orders tool messages as their calls. Each call is answered once, right behind it and before anything else."""
    i = 0
    while i < len(turns):
        first = i + (turns[i].role != "tool")  # tool messages may stand first, which is wrong
        end = next((j for j in range(first, len(turns)) if turns[j].role != "tool"), len(turns))
        calls, results = turns[i].calls if first > i else [], turns[first:end]
        ids, answered = [call["id"] for call in calls], [result.call_id for result in results]
        by_id = any(ids) and any(answered)
        unknown = [j for j, name in enumerate(answered) if j >= len(ids) or (by_id and name not in ids)]
        if unknown:
            which = f", and {answered[unknown[0]]!r} is none of {ids}" if by_id else ""
            problems.add(
                f"message {first + unknown[0]}", f"a tool message answers a call of the message before it{which}"
            )
        elif by_id and len(set(answered)) < len(answered):
            problems.add(f"message {first}", f"two of the tool messages that follow have one tool_call_id: {answered}")
        elif len(results) < len(ids) and (results or end < len(turns)):
            problems.add(f"message {i}", f"{len(results)} tool messages follow its {len(ids)} calls: one must for each")
        elif by_id:
            turns[first:end] = sorted(results, key=lambda result, ids=ids: ids.index(result.call_id))
        i = end
