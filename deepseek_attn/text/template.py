"""Chat templates: Jinja in a sandbox, with the names that published templates use.

A template comes with a checkpoint and is not trusted. It sees plain JSON values in Jinja's sandbox, changes nothing,
and renders what `transformers.apply_chat_template` renders. The sandbox does not bound time and memory: a template
that is not this package's own is rendered by `template_process.render_untrusted`.
"""

from __future__ import annotations

import json
import reprlib
import traceback
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_BYTES = 1 << 20  # of a template file
MAX_CHARACTERS = 1 << 24  # of a rendered prompt: several times what a model with a million positions reads
MAX_MESSAGE = 2000  # characters of an error message: a template can raise any text
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning


class GenerationBlocks(Extension):
    """``{% generation %} ... {% endgeneration %}``, which marks words for training: rendered as plain text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def render(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """Renders the messages that `plain_messages` returned, up to where generation starts.

    Args:
        variables: further names that the template reads, such as ``bos_token``, ``thinking`` and ``tools``.

    Raises:
        jinja2.TemplateError: the template is wrong, fails, refuses the messages or makes more than `MAX_CHARACTERS`.
    """
    pieces, characters = [], 0
    try:
        names = {"tools": None, "documents": None, "add_generation_prompt": True} | variables
        for piece in _compiled(template).generate(messages=messages, **names):
            characters += len(piece)
            if characters > MAX_CHARACTERS:
                raise TemplateError(f"it makes more than {MAX_CHARACTERS:,} characters")
            pieces.append(piece)
    except Exception as error:  # operators, filters and methods of the sandbox raise whatever Python raises
        raise TemplateError(_explain(error)) from error
    return "".join(pieces)


def read_template(path: Path) -> str:
    """The text of a template file; ValueError if it is too large, or not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(content) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"it has more than {MAX_TEMPLATE_BYTES:,} bytes")
        return content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"the chat template {path} cannot be read: {error}; fetch the file again") from error


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of chat messages for a template to look at, without keys whose value is None.

    Raises:
        ValueError: anything but a non-empty list of dicts of JSON values, or values nested too deeply to be copied.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            'messages must be a non-empty list such as [{"role": "user", "content": "hi"}], got '
            + reprlib.repr(messages)
        )
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {i}: expected a dict with role and content, got {type(message).__name__}")
    try:
        return [
            {str(key): _plain(f"message {i}", value) for key, value in message.items() if value is not None}
            for i, message in enumerate(messages)
        ]
    except RecursionError:
        raise ValueError("messages hold lists or dicts that are nested too deeply, or in themselves") from None


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning, if any, under both names that published templates read."""
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def plain_value(value: Any, name: str) -> Any:
    """A copy of a JSON value such as a list of tools. ValueError: it holds, or nests, something else."""
    try:
        return _plain(name, value)
    except RecursionError:
        raise ValueError(f"{name}: lists or dicts are nested too deeply, or in themselves") from None


def _plain(origin: str, value: Any) -> Any:
    """A copy of a JSON value; ``origin`` begins the message of an error."""
    if isinstance(value, dict):
        return {str(key): _plain(origin, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(origin, item) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(f"{origin}: a {type(value).__name__} cannot be encoded, only strings and other JSON values")


@lru_cache
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters |= {"tojson": _to_json}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(template)


def _explain(error: Exception) -> str:
    """One short message: the kind of error where it is not Jinja's own, its text, and the line of the template."""
    if isinstance(error, MemoryError):
        text = "it needs too much memory"
    elif isinstance(error, RecursionError):
        text = "it calls itself, or nests, too deeply"
    elif isinstance(error, TemplateError):
        text = error.message or type(error).__name__
    else:
        text = f"{type(error).__name__}: {error}"
    if len(text) > MAX_MESSAGE:
        text = f"{text[:MAX_MESSAGE]}... ({len(text):,} characters)"
    if type(error) is TemplateError:  # raised on purpose
        return text
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    line = error.lineno if isinstance(error, TemplateSyntaxError) else lines[-1] if lines else None
    return text if line is None else f"{text} (line {line} of the template)"


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which prompts must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
