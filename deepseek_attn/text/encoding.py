"""Conversations as DeepSeek-V3.2, V4 and V4.1 expect them: one renderer, and the differences between the versions.

Sources: the encoders that the checkpoints ship (``encoding/``) and deepseek-recipe 0.2.0, DeepSeek's own renderer of V4
and V4.1 chats. Where the two differ the recipe is followed:

* V4 has all system messages in front, joined by blank lines, and leaves empty user messages out; a call without
  arguments has no empty line. V4.1 leaves empty system messages out. The shipped encoders do none of this.
* Before a new answer, the reasoning of all earlier answers is dropped. The shipped encoders keep the reasoning of
  answers after the last user message.
* ``<｜Assistant｜>`` stands before an answer, after any reminder. The shipped encoders write it after the user message
  and put the reminder behind it; before an assistant message that begins a conversation they write no token.

Where the recipe has no such conversation the shipped encoders are followed: developer messages, tasks, tools and
response formats of single messages, V4.1's efforts of 1 to 100, image placeholders, a finished answer at the end.
Function definitions are written as they are given; the recipe, which reads API requests, first adds absent fields. Of
reminders in a row all are written; the recipe has the first alone in V4.1. A run of tool results begins a new round, as
in both; vLLM 0.33 does not count one without a user message in V4.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepseek_attn.text.messages import Turn
from deepseek_attn.text.reply import DSML, END_THINK, THINK
from deepseek_attn.text.tokenizer import BOS, EOS

USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
SYSTEM = "<｜System｜>"  # V4.1 only
REMINDER = "<｜latest_reminder｜>"
RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

THOROUGH = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
EXHAUSTIVE = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
BUDGET = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

V4_TOOLS = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{DSML}{{calls}}>" block like the following:

<{DSML}{{calls}}>
<{DSML}{{space}}invoke name="$TOOL_NAME">
<{DSML}{{space}}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}{{space}}parameter>
...
</{DSML}{{space}}invoke>
<{DSML}{{space}}invoke name="$TOOL_NAME2">
...
</{DSML}{{space}}invoke>
</{DSML}{{calls}}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

{{schemas}}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""  # noqa: E501 the lines that the models were trained with

V32_TOOLS = f"""## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}{{calls}}>" block like the following as part of your reply to the user:
<{DSML}{{calls}}>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}{{calls}}>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:
<{DSML}{{calls}}>
...
</{DSML}{{calls}}>
<function_results>
...
</function_results>
{THINK}...thinking about results{END_THINK}
Here are the functions available in JSONSchema format:
<functions>
{{schemas}}
</functions>
"""  # noqa: E501 as above


@dataclass(frozen=True)
class Encoding:
    """The differences between the encodings.

    Attributes:
        name: of the model.
        tools: text in front of function definitions.
        calls: name of the block of calls; space: in front of the names of other tags.
        supported: roles, and ``"task"``.
        efforts: text of each named reasoning effort in thinking mode.
        budget: text of a numeric reasoning effort.
        default_effort: text where no effort is given.
        system_token: token before each system message; empty in V3.2 and V4. V4 moves all system messages to the front.
        json_object: text of the response format ``json_object``.
        v4_layout: user messages and tool results in a row are one turn, the assistant's token stands before answers,
            and all reasoning is kept where there are tools. False: V3.2's layout, without all three.
        skips_empty: empty user messages are left out.
        blank_line: a call without arguments has an empty line.
        images: there is a placeholder for images.
    """

    name: str
    calls: str
    supported: tuple[str, ...]
    tools: str = V4_TOOLS
    space: str = ""
    efforts: Mapping[str, str] = field(default_factory=dict)
    budget: str | None = None
    default_effort: str = ""
    system_token: str = ""
    json_object: str = RESPONSE_FORMAT + '{"type": "json_object"}'
    v4_layout: bool = True
    skips_empty: bool = False
    blank_line: bool = True
    images: bool = True


V32_ROLES = ("system", "developer", "user", "assistant", "tool")
V4_EFFORTS = {"minimal": "", "low": "", "medium": THOROUGH, "high": THOROUGH, "xhigh": THOROUGH, "max": EXHAUSTIVE}
BUDGETS = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100}
V32 = Encoding(
    name="DeepSeek-V3.2",
    calls="function_calls",
    supported=V32_ROLES,
    tools=V32_TOOLS,
    v4_layout=False,
    images=False,
)
V4 = Encoding(
    name="DeepSeek-V4",
    calls="tool_calls",
    supported=(*V32_ROLES, "latest_reminder", "task"),
    efforts=V4_EFFORTS,
    json_object="You are a helpful assistant designed to output JSON.\n## Response Format:\n\n"
    "Reply with JSON object ONLY.",
    skips_empty=True,
    blank_line=False,
)
# The encoder of V4's first checkpoints has one text, for the effort "max".
V4_FIRST = replace(V4, efforts=dict.fromkeys(V4_EFFORTS, "") | {"max": THOROUGH})
V41 = Encoding(
    name="DeepSeek-V4.1",
    calls=" calls",
    space=" ",
    supported=V4.supported,
    efforts={name: BUDGET.format(budget) for name, budget in BUDGETS.items()},
    budget=BUDGET,
    default_effort=BUDGET.format(75),
    system_token=SYSTEM,
)


def effort_text(encoding: Encoding, effort: str | int | None) -> str:
    """The text of a reasoning effort. ValueError for an effort that the encoding does not have."""
    if effort is None:
        return encoding.default_effort
    if encoding.budget and isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return encoding.budget.format(effort)
    if isinstance(effort, str) and effort in encoding.efforts:
        return encoding.efforts[effort]
    numbers = ", or an integer from 1 to 100" if encoding.budget else ""
    known = f"there are none, {', '.join(encoding.efforts)}{numbers}" if encoding.efforts else "it has no efforts"
    raise ValueError(f"reasoning_effort={effort!r:.80} is not supported by {encoding.name}: {known}")


def response_format_text(encoding: Encoding, given: dict[str, Any]) -> str:
    """The text of a response format in OpenAI's form; empty for ``text``. ValueError for another form."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return encoding.json_object
    described = given.get("json_schema") if kind == "json_schema" else None
    if not isinstance(described, dict) or "schema" not in described:
        raise ValueError(
            f"response_format={given!r:.80}: expected {{'type': 'text'}}, {{'type': 'json_object'}} or "
            "{'type': 'json_schema', 'json_schema': {'schema': {...}}}"
        )
    return RESPONSE_FORMAT + _json(described["schema"])


def encode_turns(
    turns: list[Turn], encoding: Encoding, thinking: bool, tools: list[dict[str, Any]], response_format: str,
    effort: str, call_required: bool,
) -> str:  # fmt: skip
    """Renders turns up to where the answer begins, or to the end of the last one, an assistant's.

    Args:
        turns: tool results stand in the order of their calls.
        tools: function definitions of the whole conversation.
        response_format, effort: texts; empty for none.
        call_required: the answer begins with a block of calls.
    """
    answered = turns[-1].role == "assistant"  # so that no other answer is to come
    complete = answered and turns[-1].finished
    keeps_reasoning = encoding.v4_layout and bool(tools or any(turn.tools for turn in turns))
    turns = _arranged(turns, encoding, tools, response_format)
    if thinking and not keeps_reasoning:
        last = _last_question(turns, encoding)
        turns = [turn for i, turn in enumerate(turns) if turn.role != "developer" or i >= last]
    last_question = -1 if keeps_reasoning else _last_question(turns, encoding)
    if encoding.v4_layout and not complete and not keeps_reasoning:
        last_question = len(turns) - 1 - answered
    pieces = [BOS]
    if thinking and effort:
        pieces += [encoding.system_token, effort]
    before: Turn | None = None
    for i, turn in enumerate([*turns, None]):
        thinks = thinking and i > last_question
        if before is not None and before.task and (turn is None or turn.role in ("assistant", "latest_reminder")):
            pieces.append(_task(before.task, thinking))
        elif encoding.v4_layout and (turn.role == "assistant" if turn else not answered):
            pieces.append(ASSISTANT + _mode(thinks))
        elif not encoding.v4_layout and before is not None:
            pieces.append(_header_after(before, thinks))
        if turn is not None:
            thinks = thinks and not (before is not None and before.task)
            first = i == 0 and thinking and bool(effort)  # its system token stands before the effort
            pieces.append(_body(turn, encoding, thinks, first))
        before = turn
    if call_required:
        pieces.append(f"\n\n<{DSML}{encoding.calls}>\n")
    return "".join(pieces)


def _arranged(turns: list[Turn], encoding: Encoding, tools: list[dict[str, Any]], response_format: str) -> list[Turn]:
    """The turns as they are rendered: systems where the encoding has them, and runs of user turns as one."""
    if encoding.v4_layout and not encoding.system_token:
        systems = [turn for turn in turns if turn.role == "system"]
        if systems:
            texts = [turn.text for turn in systems if turn.text]
            own = [function for turn in systems for function in turn.tools]
            formats = [turn.response_format for turn in systems if turn.response_format is not None]
            first = Turn("system", "\n\n".join(texts), tools=own, response_format=formats[-1] if formats else None)
            turns = [first, *(turn for turn in turns if turn.role != "system")]
    if encoding.v4_layout:
        turns = [turn for turn in turns if turn.role != "system" or turn.text or turn.tools or turn.response_format]
    if tools or response_format:
        first = turns[0] if turns and turns[0].role == "system" else Turn("system", "")
        sections = _sections(encoding, [*first.tools, *tools], first.response_format)
        text = "\n\n".join([first.text, *sections, *([response_format] if response_format else [])])
        turns = [Turn("system", text), *(turns[1:] if turns and turns[0].role == "system" else turns)]
    return _joined(turns, encoding) if encoding.v4_layout else _joined_results(turns)


def _joined(turns: list[Turn], encoding: Encoding) -> list[Turn]:
    """User turns in a row as one turn, up to one with a task; and tool results with the user turn that follows them."""
    joined: list[Turn] = []
    texts: list[tuple[str, str]] = []  # of the last turn: role and text of its messages
    for turn in turns:
        text = f"<tool_result>{turn.text}</tool_result>" if turn.role == "tool" else turn.text
        if turn.role not in ("user", "tool"):
            joined.append(turn)
        elif not joined or joined[-1].role != "user" or joined[-1].task:
            joined.append(Turn("user", text, task=turn.task))
            texts = [(turn.role, text)]
        else:
            role, last = texts[-1]
            if encoding.skips_empty and role == turn.role == "user":
                texts[-1] = (role, "\n\n".join(filter(None, (last, text))))
            else:
                texts.append((turn.role, text))
            joined[-1] = Turn("user", "\n\n".join(text for _, text in texts), task=turn.task)
    return joined


def _joined_results(turns: list[Turn]) -> list[Turn]:
    """V3.2's tool results of one message as one turn."""
    joined: list[Turn] = []
    for turn in turns:
        if turn.role == "tool" and joined and joined[-1].role == "tool":
            joined[-1] = Turn("tool", f"{joined[-1].text}\n<result>{turn.text}</result>")
        else:
            joined.append(turn if turn.role != "tool" else Turn("tool", f"\n<result>{turn.text}</result>"))
    return joined


def _last_question(turns: list[Turn], encoding: Encoding) -> int:
    """Index of the last turn that begins a round, -1 without one; answers before it lose their reasoning."""
    asking = ("user", "developer", "system") if encoding.system_token else ("user", "developer")
    return max((i for i, turn in enumerate(turns) if turn.role in asking and (i or turn.role != "system")), default=-1)


def _mode(thinks: bool) -> str:
    return THINK if thinks else END_THINK


def _task(task: str, thinking: bool) -> str:
    """The text between a message with a task and the answer to it."""
    return f"{ASSISTANT}{_mode(thinking)}<｜action｜>" if task == "action" else f"<｜{task}｜>"


def _header_after(before: Turn, thinks: bool) -> str:
    """V3.2: the text after a question, and after the results of calls."""
    if before.role == "tool":
        return f"\n\n{_mode(thinks)}"
    return ASSISTANT + _mode(thinks) if before.role in ("user", "developer") else ""


def _body(turn: Turn, encoding: Encoding, thinks: bool, first: bool) -> str:
    sections = _sections(encoding, turn.tools, turn.response_format)
    if turn.role == "system":
        return ("" if first else encoding.system_token) + "\n\n".join([turn.text, *sections])
    if turn.role == "developer" and not encoding.v4_layout:
        return USER + "\n\n".join(["", *sections, f"# The user's message is: {turn.text}"])
    if turn.role in ("user", "developer"):
        return USER + "\n\n".join([turn.text, *sections])
    if turn.role == "latest_reminder":
        return REMINDER + turn.text
    if turn.role == "tool":
        return f"\n\n<function_results>{turn.text}\n</function_results>"
    open_reasoning = not turn.finished and not turn.text and not turn.calls
    reasoning = turn.reasoning + ("" if open_reasoning else END_THINK) if thinks else ""
    return reasoning + turn.text + _calls(turn.calls, encoding) + (EOS if turn.finished else "")


def _sections(encoding: Encoding, tools: list[dict[str, Any]], response_format: Any) -> list[str]:
    """The part of a system or developer message about tools and the response format."""
    sections = []
    if tools:
        schemas = "\n".join(map(_json, tools))
        sections.append(encoding.tools.format(calls=encoding.calls, space=encoding.space, schemas=schemas))
    if response_format is not None:
        sections.append(RESPONSE_FORMAT + _json(response_format))
    return sections


def _calls(calls: list[dict[str, Any]], encoding: Encoding) -> str:
    if not calls:
        return ""
    tag = f"{DSML}{encoding.space}"
    invokes = []
    for call in calls:
        lines = [
            f'<{tag}parameter name="{name}" string="{str(isinstance(value, str)).lower()}">'
            f"{value if isinstance(value, str) else _json(value)}</{tag}parameter>"
            for name, value in call["arguments"].items()
        ]
        lines = lines or ([""] if encoding.blank_line else [])
        invokes += [f'<{tag}invoke name="{call["name"]}">', *lines, f"</{tag}invoke>"]
    block = f"{DSML}{encoding.calls}"
    return "\n".join(["", "", f"<{block}>", *invokes, f"</{block}>"])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
