"""Chat messages -> prompt, and completion -> reasoning, answer and tool calls, in DeepSeek's own encodings.

DeepSeek-V3.2, V4 and V4.1 checkpoints ship Python encoders (``encoding/``) rather than a Jinja chat template. Code that
comes with a checkpoint is never executed here: `encoding` renders the same strings, and a Jinja template, where a
checkpoint has one, is rendered in a sandbox, in a process with little memory and CPU time.

Contents of messages, arguments and results of calls, and definitions of tools are text: a special token that is written
out in one is tokenized like any other word, as DeepSeek's own renderer does, unless ``allow_special`` is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypedDict

from deepseek_attn.text import encoding
from deepseek_attn.text.call_grammar import call_grammar
from deepseek_attn.text.contents import encode_marked, mark_messages
from deepseek_attn.text.encoding import ASSISTANT, REMINDER, SYSTEM, USER, Encoding, effort_text, encode_turns
from deepseek_attn.text.messages import TASKS, MessageProblems, Turn, function_definitions, read_turns
from deepseek_attn.text.reply import DSML, END_THINK, SYMBOLS, THINK, Reply, ReplyStart, parse_reply, spelled_marks
from deepseek_attn.text.template import plain_messages, plain_value
from deepseek_attn.text.tokenizer import BOS, CONFIG_FILE, EOS, TEMPLATE_FILE, Tokenizer, read_settings
from deepseek_attn.utils.json_files import read_json

Version = Literal["V3.2", "V4", "V4-first", "V4.1"]
ENCODINGS = {"V3.2": encoding.V32, "V4": encoding.V4, "V4-first": encoding.V4_FIRST, "V4.1": encoding.V41}
VERSIONS: dict[str, Version] = {"deepseek_v32": "V3.2", "deepseek_v41": "V4.1"}  # by model_type; all others are V4
ALWAYS = (BOS, USER, ASSISTANT, THINK, END_THINK)
CONTROLS = (EOS, SYSTEM, REMINDER, *(f"<｜{task}｜>" for task in TASKS))  # where the conversation has them
MODES = "thinking=True needs a reasoning effort other than 'none', and thinking=False none or 'none'"


class ChatOptions(TypedDict, total=False):
    """Options of a conversation's encoding, in addition to its messages.

    Attributes:
        thinking: thinking mode. Default: whether a ``reasoning_effort`` other than ``"none"`` is given.
        reasoning_effort: in thinking mode, ``"low"``, ``"high"`` or ``"max"`` (``"minimal"`` is ``"low"``, ``"medium"``
            and ``"xhigh"`` are ``"high"``), for V4.1 also 1 to 100; ``"none"``: chat mode. Default: the default of
            the shipped encoders, for V4 no text about it and for V4.1 ``"high"`` (75). V3.2 has no efforts.
        tools: functions that the model may call, ``{"type": "function", "function": {"name": ..., "description": ...,
            "parameters": {JSON schema}}}`` each, or the function alone.
        tool_choice: ``"auto"``; ``"none"``: as if no tools; ``"required"``: the answer is calls; ``{"type": "function",
            "function": {"name": ...}}``: one call of that function. In chat mode the prompt begins the calls;
            `LLM.chat` restricts the tokens to calls with arguments of their schemas, behind reasoning too.
        response_format: OpenAI's ``{"type": "json_object"}`` or ``{"type": "json_schema", "json_schema": {"schema":
            ...}}``: the prompt requests that format. `LLM.chat` also restricts the tokens to it, see
            `with_response_format`.
        documents: for Jinja templates that have a place for them.
        continue_final_message: the last message is the beginning of an answer, which is continued. So does
            ``"prefix": True`` in that message.
        allow_special: a special token that is written out in a message becomes that token.
    """

    thinking: bool | None
    reasoning_effort: str | int | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any]
    response_format: dict[str, Any] | None
    documents: list[dict[str, Any]] | None
    continue_final_message: bool
    allow_special: bool


def encode_messages(
    messages: list[dict],
    thinking: bool | None = None,
    version: Version = "V4",
    *,
    reasoning_effort: str | int | None = None,
    tools: list[dict[str, Any]] | None = None,
    tool_choice: str | dict[str, Any] = "auto",
    response_format: dict[str, Any] | None = None,
    continue_final_message: bool = False,
) -> str:
    """Render a conversation as the string that a DeepSeek model expects, BOS included, up to where the answer begins.

    A last assistant message is rendered as a finished turn up to its EOS: good for scoring a whole conversation, while
    `build_prompt` refuses it unless it is continued.

    Args:
        messages: dicts with ``role`` (system, developer, user, assistant, tool; for V4 and V4.1 latest_reminder) and
            ``content`` (a string, or text parts, which are joined by a blank line). Assistant messages may have
            ``reasoning_content`` or ``reasoning``, and ``tool_calls`` in OpenAI's form, whose arguments are a dict or
            its JSON; each is answered by a tool message, by ``tool_call_id`` or in order. System and developer messages
            may have ``tools`` and ``response_format`` (a schema), as in the shipped encoders; V4's and V4.1's
            messages a ``task``. ``name`` is not rendered.
        thinking: thinking mode. Only answers after the last user message keep their reasoning, or all of them where
            there are tools (V4, V4.1). In chat mode no reasoning is rendered.
        version: of the encoding; ``"V4-first"``: of V4's first checkpoints, which differ in the reasoning effort.

    The other arguments are those of `ChatOptions`. Tokenize the result with ``add_special_tokens=False``.

    Raises:
        ValueError: roles, keys or options that the encoding does not have. All problems are listed at once.
    """
    turns, settings = _conversation(
        plain_messages(messages), ENCODINGS[version], thinking, reasoning_effort, tools, tool_choice, response_format,
        continue_final_message,
    )  # fmt: skip
    return encode_turns(turns, ENCODINGS[version], **settings)


def _conversation(
    messages: list[dict[str, Any]],
    style: Encoding,
    thinking: bool | None,
    effort: str | int | None,
    tools: list[dict[str, Any]] | None,
    tool_choice: str | dict[str, Any],
    response_format: dict[str, Any] | None,
    continued: bool,
) -> tuple[list[Turn], dict[str, Any]]:
    """The checked arguments of `encode_turns`."""
    thinking = thinks(thinking, effort)
    check_switches(continue_final_message=continued)
    turns = read_turns(messages, continued, style.supported, style.images)
    problems = MessageProblems()
    chosen = _chosen(tools, tool_choice)
    functions = function_definitions(chosen, problems) if chosen else []
    if style.name == encoding.V32.name and turns[-1].role == "system":
        problems.add(
            f"message {len(turns) - 1}",
            "the last message is a system message, after which DeepSeek-V3.2's encoding has no answer: put it before "
            "the last user message",
        )
    required = requires_call(tool_choice)
    if required and (turns[-1].role == "assistant" or not functions):
        problems.add("tool_choice", "a call needs tools, and a last message that is not the assistant's")
    problems.check()
    if required:
        required_functions(functions, tool_choice)  # checks the name
    text = effort_text(style, None if effort == "none" else effort)
    asked = "" if response_format is None else encoding.response_format_text(style, response_format)
    return turns, {
        "thinking": thinking,
        "tools": functions,
        "response_format": asked,
        "effort": text,
        "call_required": required and not thinking,
    }


def thinks(thinking: bool | None, effort: str | int | None) -> bool:
    """Whether the answer begins with reasoning; ValueError for another type, or options that contradict each other."""
    if thinking is None:
        return effort not in (None, "none")
    if effort is not None and thinking == (effort == "none"):
        raise ValueError(f"thinking={thinking} beside reasoning_effort={effort!r:.80}: {MODES}")
    check_switches(thinking=thinking)
    return thinking


def check_switches(**switches: object) -> None:
    """ValueError for a value that is neither True nor False: text such as "no" would switch an option on."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r:.80}: must be True or False")


def _chosen(tools: Any, choice: Any) -> Any:
    """The tools that the prompt describes."""
    if choice not in ("auto", "none", "required") and _named(choice) is None:
        raise ValueError(
            f"tool_choice={choice!r:.80}: supported are 'auto', 'none', 'required' and "
            "{'type': 'function', 'function': {'name': ...}}"
        )
    return [] if choice == "none" or tools is None else tools


def _named(choice: Any) -> str | None:
    """The function that ``tool_choice`` names."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def requires_call(choice: Any) -> bool:
    """Whether ``tool_choice``, which is a supported one, requires a call."""
    return choice not in ("auto", "none")


def required_functions(functions: list[dict[str, Any]], choice: Any) -> list[dict[str, Any]]:
    """Functions that a reply may call if ``tool_choice`` requires a call: all of them, or the named one.

    Raises:
        ValueError: the choice names a function that is not among them.
    """
    name = _named(choice)
    found = [function for function in functions if name in (None, function["name"])]
    if not found:
        given = ", ".join(repr(function["name"]) for function in functions)
        raise ValueError(f"tool_choice: there is no function {name!r:.80} among tools: {given[:400]}")
    return found


def required_calls(tokenizer: Tokenizer, directory: str | Path, options: Mapping[str, Any]) -> str | None:
    """The grammar of the calls that ``tool_choice`` of a chat requires, see `call_grammar`; None if it requires none.

    Args:
        options: of `build_prompt`, which has checked them.
    """
    choice = options.get("tool_choice", "auto")
    if not requires_call(choice):
        return None
    functions = function_definitions(plain_value(options.get("tools"), "tools"), MessageProblems())
    return call_grammar(
        ENCODINGS[_version(Path(directory))],
        required_functions(functions, choice),
        begun=not thinks(options.get("thinking"), options.get("reasoning_effort")),
        several=choice == "required",
        spelled=tokenizer.token_id(DSML) is None,
    )


def parse_completion(text: str, thinking: bool) -> Reply:
    """Split the text of a completion into reasoning, answer and tool calls; text from the first EOS on is dropped.

    In thinking mode the completion is ``reasoning</think>answer``. Without ``</think>`` the model was cut off while
    thinking: all of it is reasoning and the answer is empty. In chat mode all of it is the answer. A block of tool
    calls ends either, see `ReplyParser`.

    In a text, ``</think>`` and ``｜DSML｜`` look like the tokens of the same spelling: all count as tokens
    here. `Completion.reasoning`, ``answer`` and ``tool_calls`` are divided at tokens alone.
    """
    text = text.partition(EOS)[0]
    return parse_reply(text, spelled_marks(text), ReplyStart(thinking))


def control_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Texts of the tokens that divide a reply, by their ids."""
    ids = {tokenizer.token_id(token): token for token in SYMBOLS}
    return {i: token for i, token in ids.items() if i is not None}


def reply_start(tokenizer: Tokenizer, ids: list[int]) -> ReplyStart:
    """The part of a reply in which a prompt ends: the part that its last ``<think>`` or ``</think>`` began.

    A task, or a new turn, behind that begins an answer.
    """
    controls = control_tokens(tokenizer)
    modes = {tokenizer.token_id(THINK), tokenizer.token_id(END_THINK)} - {None}
    spelled = tokenizer.token_id(DSML) is None
    place = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in modes), None)
    if place is None:
        return ReplyStart(spelled=spelled)
    rest = ids[place + 1 :]
    if any(i in tokenizer.added_ids and i not in controls for i in rest):
        return ReplyStart(spelled=spelled)
    pieces: list[str] = []
    for is_control, run in groupby(rest, key=controls.__contains__):
        found = list(run)
        pieces += [SYMBOLS[controls[i]] for i in found] if is_control else [tokenizer.decode(found)]
    return ReplyStart(controls.get(ids[place]) != END_THINK, "".join(pieces).lstrip("\n"), spelled)


def describe_chat_format(directory: str | Path) -> tuple[str, str]:
    """Name the encoding of chat messages for the checkpoint in ``directory``, and the reason.

    Returns:
        ``("jinja", explanation)`` if the checkpoint has a chat template (``chat_template.jinja`` or ``chat_template``
        in ``tokenizer_config.json``), else ``("builtin", explanation)`` for `encode_messages`.

    Raises:
        ValueError: ``directory`` is not a directory, or its ``tokenizer_config.json`` is not valid JSON.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; pass the folder of a checkpoint")
    has_encoder = any((directory / "encoding").glob("*.py"))
    not_run = "the checkpoint's encoding/ module is not run, since it is code that came with the checkpoint"
    template = _template_location(directory)
    if template:
        explanation = f"chat template in {template}, rendered in a sandbox"
        return "jinja", f"{explanation}; {not_run}" if has_encoder else explanation
    reason = not_run if has_encoder else "the checkpoint has no chat template"
    return "builtin", f"built-in encoding of {ENCODINGS[_version(directory)].name}; {reason}"


def build_prompt(
    tokenizer: Tokenizer,
    directory: str | Path,
    messages: list[dict],
    thinking: bool | None = None,
    *,
    reasoning_effort: str | int | None = None,
    tools: list[dict[str, Any]] | None = None,
    tool_choice: str | dict[str, Any] = "auto",
    response_format: dict[str, Any] | None = None,
    documents: list[dict[str, Any]] | None = None,
    continue_final_message: bool = False,
    allow_special: bool = False,
    max_tokens: int | None = None,
) -> tuple[list[int], str]:
    """Encode messages for generation, in the format that `describe_chat_format` names.

    A Jinja template judges roles and keys itself. It gets ``tools`` and ``documents`` as transformers passes them,
    ``thinking`` and ``enable_thinking`` (templates differ in the name they read), and ``reasoning_effort`` and
    ``response_format`` where they are given.

    Args:
        max_tokens: longest prompt, see `Tokenizer.encode`.

    The other arguments are those of `ChatOptions`.

    Returns:
        (token ids, explanation of the encoding used).

    Raises:
        ValueError: the last message is an assistant turn that is not continued, the messages do not fit the encoding,
            they spell special tokens that a Jinja template looks for, or the tokenizer lacks the special tokens of the
            built-in encoding.
    """
    check_switches(continue_final_message=continue_final_message, allow_special=allow_special)
    kind, explanation = describe_chat_format(directory)
    messages = plain_messages(messages)
    tools = plain_value(tools, "tools")
    continued = continue_final_message or any(messages[-1].get(key) for key in ("prefix", "wo_eos"))
    if messages[-1].get("role") == "assistant" and not (continued or messages[-1].get("task")):
        raise ValueError(
            "the last message is an assistant turn, so there is nothing to answer: end with a user message; to "
            "continue a partial answer, pass continue_final_message=True"
        )
    if kind == "jinja":
        text, mark = _render_template(
            tokenizer, directory, messages, thinks(thinking, reasoning_effort), continued, allow_special, max_tokens,
            tools=_chosen(tools, tool_choice) or None, documents=plain_value(documents, "documents"),
            reasoning_effort=reasoning_effort, response_format=plain_value(response_format, "response_format"),
        )  # fmt: skip
        if requires_call(tool_choice):
            raise ValueError(
                f"tool_choice={tool_choice!r:.80} needs the built-in encoding, and {directory} has a chat template"
            )
    else:
        if documents:
            raise ValueError("the built-in encoding has no place for documents: write them into a message")
        style = replace(ENCODINGS[_version(Path(directory))], images=False)
        turns, settings = _conversation(
            messages, style, thinking, reasoning_effort, tools, tool_choice, response_format, continue_final_message
        )
        given = [asdict(turn) for turn in turns], settings["tools"], settings["response_format"]
        marked, mark = (list(given), None) if allow_special else mark_messages(tokenizer, list(given), max_tokens)
        settings["tools"], settings["response_format"] = marked[1:]
        text = encode_turns([Turn(**fields) for fields in marked[0]], style, **settings)
        needed = [*ALWAYS, *(token for token in CONTROLS if token in text)]
        missing = [token for token in needed if tokenizer.token_id(token) is None]
        if missing:
            raise ValueError(
                f"the tokenizer in {directory} has no token for {', '.join(missing)}, which the built-in chat "
                "encoding needs: this is another model's tokenizer; add its chat_template.jinja to the folder, or pass "
                "a plain prompt"
            )
    if mark is None:
        return tokenizer.encode(text, max_tokens), explanation
    return encode_marked(tokenizer, text, mark, max_tokens), explanation


def _render_template(
    tokenizer: Tokenizer,
    directory: str | Path,
    messages: list[dict[str, Any]],
    thinking: bool,
    continued: bool,
    allow_special: bool,
    max_tokens: int | None,
    **variables: Any,
) -> tuple[str, str | None]:
    """The text of the checkpoint's own template, and the mark in it."""

    def rendered(given: list[Any]) -> str:
        messages, names = given
        text = tokenizer.apply_chat_template(messages, thinking, add_generation_prompt=not continued, **names)
        return _cut_behind(text, messages[-1].get("content"), directory) if continued else text

    given = [messages, {name: value for name, value in variables.items() if value is not None}]
    marked, mark = (given, None) if allow_special else mark_messages(tokenizer, given, max_tokens)
    text = rendered(marked)
    if mark and text.replace(mark, "") != rendered(given):
        raise ValueError(
            f"a message spells out a special token, which the chat template of {directory} looks for, so that it "
            "cannot be kept text: pass reasoning as reasoning_content, or allow special tokens "
            "(allow_special=True, --allow-special)"
        )
    return text, mark


def _cut_behind(text: str, content: Any, directory: str | Path) -> str:
    """The text up to the end of its last message; a template may drop blanks around contents."""
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        content = content[-1].get("text")
    for end in (content, content.strip()) if isinstance(content, str) else ():
        if end and (place := text.rfind(end)) >= 0:
            return text[: place + len(end)]
    raise ValueError(
        f"the last message cannot be continued: the chat template of {directory} does not write its content as it is"
    )


def _version(directory: Path) -> Version:
    """The encoding of a checkpoint. V4's first checkpoints have an encoder without the text of the highest effort."""
    version = VERSIONS.get(_model_type(directory) or "", "V4")
    shipped = directory / "encoding" / "encoding_dsv4.py"
    if version == "V4" and shipped.is_file():
        efforts = shipped.read_text(encoding="utf-8", errors="replace")
        if "REASONING_EFFORT_MAX" in efforts and encoding.EXHAUSTIVE[:30] not in efforts:
            return "V4-first"
    return version


def _model_type(directory: Path) -> str | None:
    file = directory / "config.json"
    config = read_json(file, str(file)) if file.is_file() else {}
    return str(config.get("model_type")) if isinstance(config, dict) else None


def _template_location(directory: Path) -> str | None:
    if (directory / TEMPLATE_FILE).is_file():
        return TEMPLATE_FILE
    return CONFIG_FILE if read_settings(directory).get("chat_template") else None
