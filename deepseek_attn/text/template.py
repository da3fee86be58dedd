"""Chat templates: Jinja in a sandbox, with the names that published templates use.

A template is data that came with a checkpoint. It sees plain JSON values and Jinja's own sandbox, can change nothing,
and renders what `transformers.apply_chat_template` renders.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning


class GenerationBlocks(Extension):
    """``{% generation %} ... {% endgeneration %}``, which marks an assistant's words for training: only text here."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def render(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """Renders the messages that `plain_messages` returned, up to where generation starts.

    Args:
        variables: further names that the template reads, such as ``bos_token`` and ``thinking``.

    Raises:
        jinja2.TemplateError: the template is wrong, or refuses the messages.
    """
    return _compiled(template).render(
        messages=messages, tools=None, documents=None, add_generation_prompt=True, **variables
    )


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of chat messages for a template to look at, without keys whose value is None.

    Raises:
        ValueError: anything but a non-empty list of dicts of JSON values.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f'messages must be a non-empty list such as [{{"role": "user", "content": "hi"}}], got {messages!r:.80}'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {i}: expected a dict with role and content, got {type(message).__name__}")
    return [
        {str(key): _plain(i, value) for key, value in message.items() if value is not None}
        for i, message in enumerate(messages)
    ]


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning, if any, under both names that published templates read."""
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(index: int, value: Any) -> Any:
    """A copy of a value of message ``index``."""
    if isinstance(value, dict):
        return {str(key): _plain(index, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(index, item) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(f"message {index}: a {type(value).__name__} cannot be encoded, only strings and other JSON values")


@lru_cache
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters |= {"tojson": _to_json, "type_name": lambda value: type(value).__name__}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which prompts must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
