"""Chat messages -> prompt, and completion -> (reasoning, answer), in DeepSeek-V4's own encoding.

DeepSeek-V4 checkpoints ship Python encoders (``encoding/``) rather than a Jinja chat template. Code that comes with a
checkpoint is never executed here: plain system / user / assistant turns are encoded by `encode_messages`, and a Jinja
template, where a checkpoint has one, is rendered by transformers.

A special token written out inside a message's content becomes that special token, as with DeepSeek's own encoder: the
format is a string. Screen untrusted content before it gets here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepseek_attn.text.tokenizer import Tokenizer

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"

ROLES = ("system", "user", "assistant")
REMEDY_ENCODER = (
    "encode such a conversation with the encoder shipped with the checkpoint (its encoding/ folder) and pass the "
    "resulting string or token ids as a plain prompt"
)


def encode_messages(messages: list[dict], thinking: bool = False) -> str:
    """Render plain chat turns as the string that DeepSeek-V4 expects, BOS included.

    An optional ``system`` message comes first (its content enters raw), then ``user`` and ``assistant`` turns
    alternate. After a last ``user`` message the string ends with ``<｜Assistant｜>`` and ``<think>`` (thinking) or
    ``</think>`` (chat), which is where generation starts. A last ``assistant`` message is rendered as a finished turn
    up to its EOS: good for scoring a whole conversation, while `build_prompt` refuses it.

    Args:
        messages: dicts with ``role`` and ``content`` (strings), and for assistant turns optionally
            ``reasoning_content``. Other keys must be ``None`` or empty.
        thinking: thinking mode. Only the turn after the last user message is a thinking turn and keeps its
            reasoning; earlier turns are rendered as chat turns. In chat mode no reasoning is rendered.

    Raises:
        ValueError: tools, tool results, response formats, other roles or keys, content that is not a string, turns
            that do not alternate. All problems are listed at once.

    Source: DeepSeek-V4 ``encoding/encoding_dsv4.py`` (without a reasoning-effort prefix, which differs between its
    revisions). Tokenize the result with ``add_special_tokens=False``.
    """
    problems = _problems(messages)
    if problems:
        raise ValueError("these messages cannot be encoded:\n  - " + "\n  - ".join(problems))
    last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
    parts = [BOS]
    for i, message in enumerate(messages):
        opens_thinking = thinking and i >= last_user
        if message["role"] == "system":
            parts.append(message["content"])
        elif message["role"] == "user":
            parts += [USER, message["content"], ASSISTANT, THINK if opens_thinking else END_THINK]
        else:
            reasoning = (message.get("reasoning_content") or "") + END_THINK if opens_thinking else ""
            parts += [reasoning, message["content"], EOS]
    return "".join(parts)


def parse_completion(text: str, thinking: bool) -> tuple[str, str]:
    """Split a completion into ``(reasoning, answer)``; text from the first EOS on is dropped.

    In thinking mode the completion is ``reasoning</think>answer``. Without ``</think>`` the model was cut off while
    thinking: all of it is reasoning and the answer is empty. In chat mode all of it is the answer. Tool calls are
    not parsed; their markup stays in the answer.
    """
    text = text.partition(EOS)[0]
    if not thinking:
        return "", text
    reasoning, _, answer = text.partition(END_THINK)
    return reasoning, answer


def describe_chat_format(directory: str | Path) -> tuple[str, str]:
    """Say which encoding chat messages get for the checkpoint in ``directory``, and why.

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
        explanation = f"chat template in {template}, rendered by transformers"
        return "jinja", f"{explanation}; {not_run}" if has_encoder else explanation
    reason = not_run if has_encoder else "the checkpoint has no chat template"
    return "builtin", f"built-in DeepSeek-V4 encoding of system, user and assistant turns; {reason}"


def build_prompt(
    tokenizer: Tokenizer, directory: str | Path, messages: list[dict], thinking: bool = False
) -> tuple[list[int], str]:
    """Encode messages for generation with what `describe_chat_format` chooses.

    A Jinja template gets ``thinking`` and ``enable_thinking`` (templates differ in the name they read) and judges
    roles and keys itself.

    Returns:
        (token ids, explanation of the encoding used).

    Raises:
        ValueError: the last message is an assistant turn (nothing is left to generate), the messages do not fit the
            encoding, or the tokenizer lacks the special tokens of the built-in encoding.
    """
    kind, explanation = describe_chat_format(directory)
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        _require_open_turn(messages[-1])
    if kind == "jinja":
        _require_message_dicts(messages)
        return tokenizer.encode(tokenizer.apply_chat_template(messages, thinking)), explanation
    text = encode_messages(messages, thinking)
    missing = [token for token in (BOS, USER, ASSISTANT, THINK, END_THINK) if tokenizer.token_id(token) is None]
    if missing:
        raise ValueError(
            f"the tokenizer in {directory} has no token for {', '.join(missing)}, which the built-in DeepSeek-V4 chat "
            "encoding needs: this is another model's tokenizer; add its chat_template.jinja to the folder, or pass a "
            "plain prompt"
        )
    return tokenizer.encode(text), explanation


def _require_open_turn(last: dict) -> None:
    if last.get("role") == "assistant":
        raise ValueError(
            "the last message is an assistant turn, so there is nothing to answer: end with a user message; to "
            "continue a partial answer, pass encode_messages(messages[:-1]) plus that text as a plain prompt"
        )


def _require_message_dicts(messages: object) -> None:
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"messages must be a non-empty list of dicts with role and content, got {messages!r:.200}")


def _problems(messages: object) -> list[str]:
    """Everything that keeps ``messages`` from being encoded, each with its remedy."""
    if not isinstance(messages, list) or not messages:
        return [
            f'messages must be a non-empty list such as [{{"role": "user", "content": "hi"}}], got {messages!r:.80}'
        ]
    problems = []
    for i, message in enumerate(messages):
        if isinstance(message, dict):
            problems += [f"message {i}: {problem}" for problem in _message_problems(message)]
        else:
            problems.append(f"message {i}: expected a dict with role and content, got {type(message).__name__}")
    return problems or _order_problems([message["role"] for message in messages])


def _message_problems(message: dict) -> list[str]:
    problems = []
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        problems.append(f"role {role!r} is not supported (supported: {', '.join(ROLES)}); {REMEDY_ENCODER}")
    if not isinstance(content, str):
        problems.append(f"content must be a string, got {type(content).__name__}; join text parts into one string")
    reasoning = message.get("reasoning_content")
    if reasoning and role != "assistant":
        problems.append(f"reasoning_content belongs to assistant messages, not to role {role!r}; remove it")
    elif reasoning and not isinstance(reasoning, str):
        problems.append(f"reasoning_content must be a string, got {type(reasoning).__name__}")
    extra = [key for key, value in message.items() if key not in ("role", "content", "reasoning_content") and value]
    if extra:
        problems.append(f"{', '.join(map(str, extra))} not supported by the built-in encoding; {REMEDY_ENCODER}")
    return problems


def _order_problems(roles: list[str]) -> list[str]:
    """Problems of the order of turns: [system] user (assistant user)* [assistant]."""
    problems = []
    start = 1 if roles[0] == "system" else 0
    for i, role in enumerate(roles[start:], start):
        expected = "user" if (i - start) % 2 == 0 else "assistant"
        if role == "system":
            return [f"message {i}: a system message must be the first message; move its text there"]
        if role != expected:
            return [
                f"message {i}: expected a turn of {expected!r}, got {role!r}: user and assistant turns alternate, "
                "starting with user; join consecutive messages of one role into one"
            ]
    if "user" not in roles:
        problems.append("there is no user message; add one")
    return problems


def _template_location(directory: Path) -> str | None:
    if (directory / "chat_template.jinja").is_file():
        return "chat_template.jinja"
    config = directory / "tokenizer_config.json"
    if not config.is_file():
        return None
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config} is not valid JSON ({error}); fetch the file again") from error
    return "tokenizer_config.json" if isinstance(content, dict) and content.get("chat_template") else None
