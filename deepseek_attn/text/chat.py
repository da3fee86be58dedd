"""Chat messages -> prompt, and completion -> (reasoning, answer), in DeepSeek's own encodings.

DeepSeek-V4 checkpoints ship Python encoders (``encoding/``) rather than a Jinja chat template. Code that comes with a
checkpoint is never executed here: plain system / user / assistant turns are encoded by `encode_messages`, and a Jinja
template, where a checkpoint has one, is rendered in a sandbox, in a process with little memory and CPU time.

Message contents are text: a special token that is written out in one is tokenized like any other word, as
DeepSeek's own renderer does, unless ``allow_special`` is given.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import TemplateError

from deepseek_attn.text.contents import encode_marked, mark_messages
from deepseek_attn.text.reply import END_THINK, THINK, split_reply
from deepseek_attn.text.template import plain_messages, render, with_reasoning
from deepseek_attn.text.tokenizer import BOS, CONFIG_FILE, EOS, TEMPLATE_FILE, Tokenizer, read_settings
from deepseek_attn.utils.json_files import read_json

USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
SYSTEM = "<｜System｜>"  # V4.1 only
DEFAULT_EFFORT = 75  # of 100: V4.1's default in thinking mode


def encode_messages(messages: list[dict], thinking: bool = False, v41: bool = False, v32: bool = False) -> str:
    """Render plain chat turns as the string that DeepSeek-V4 expects, BOS included.

    Each turn is its marker and its content; system messages are put together in front and have no marker. User messages
    in a row are one turn. In front of the answer to come stands ``<｜Assistant｜>`` and ``<think>`` (thinking) or
    ``</think>`` (chat). A last ``assistant`` message is rendered as a finished turn up to its EOS: good for scoring a
    whole conversation, while `build_prompt` refuses it.

    Args:
        messages: dicts with ``role`` (system, user or assistant) and ``content`` (a string, or text parts, which are
            joined by a blank line), and for assistant turns optionally ``reasoning_content`` or ``reasoning``. ``name``
            is not rendered. Other keys must be ``None`` or empty.
        thinking: thinking mode. Only a last ``assistant`` message is a thinking turn and keeps its reasoning; earlier
            turns are rendered as chat turns. In chat mode no reasoning is rendered.
        v41: the encoding of DeepSeek-V4.1, which marks system messages and leaves them where they are, and begins
            thinking mode with a line about the reasoning effort, of which it has its default.
        v32: the encoding of DeepSeek-V3.2: the same where turns alternate. System messages stay where they are, each
            user message is followed by ``<｜Assistant｜>``, and a system message cannot be the last.

    Raises:
        ValueError: tools, tool results, response formats, images, other roles or keys. All problems are listed at once.

    Source: DeepSeek-V4 ``encoding/encoding_dsv4.py`` (without a reasoning-effort prefix, which differs between its
    revisions). Tokenize the result with ``add_special_tokens=False``.
    """
    try:
        names = {
            "bos_token": BOS,
            "eos_token": EOS,
            "thinking": thinking,
            "v41": v41,
            "v32": v32,
            "effort": DEFAULT_EFFORT,
        }
        return render(_template(), [with_reasoning(message) for message in plain_messages(messages)], **names)
    except TemplateError as error:
        raise ValueError(str(error)) from None


@cache
def _template() -> str:
    return resources.files("deepseek_attn.text").joinpath("deepseek_v4.jinja").read_text(encoding="utf-8")


def parse_completion(text: str, thinking: bool) -> tuple[str, str]:
    """Split the text of a completion into ``(reasoning, answer)``; text from the first EOS on is dropped.

    In thinking mode the completion is ``reasoning</think>answer``. Without ``</think>`` the model was cut off while
    thinking: all of it is reasoning and the answer is empty. In chat mode all of it is the answer. Newlines around the
    reasoning and before the answer are dropped. Tool calls are not parsed; their markup stays in the answer.

    A text does not say which ``</think>`` are tokens: here all are. `Completion.reasoning` and `Completion.answer` are
    split at tokens alone.
    """
    text = text.partition(EOS)[0]
    return split_reply(text, thinking, [match.start() for match in re.finditer(END_THINK, text)])


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
        explanation = f"chat template in {template}, rendered in a sandbox"
        return "jinja", f"{explanation}; {not_run}" if has_encoder else explanation
    reason = not_run if has_encoder else "the checkpoint has no chat template"
    turns = "encoding of system, user and assistant turns"
    version = {"deepseek_v41": "V4.1", "deepseek_v32": "V3.2"}.get(_model_type(directory), "V4")
    return "builtin", f"built-in DeepSeek-{version} {turns}; {reason}"


def build_prompt(
    tokenizer: Tokenizer,
    directory: str | Path,
    messages: list[dict],
    thinking: bool = False,
    allow_special: bool = False,
    max_tokens: int | None = None,
) -> tuple[list[int], str]:
    """Encode messages for generation, in the format that `describe_chat_format` names.

    A Jinja template gets ``thinking`` and ``enable_thinking`` (templates differ in the name they read) and judges
    roles and keys itself.

    Args:
        allow_special: a special token that is written out in a message becomes that token; otherwise it stays text.
        max_tokens: longest prompt, see `Tokenizer.encode`.

    Returns:
        (token ids, explanation of the encoding used).

    Raises:
        ValueError: the last message is an assistant turn (nothing is left to generate), the messages do not fit the
            encoding, they spell special tokens that a Jinja template looks for, or the tokenizer lacks the special
            tokens of the built-in encoding.
    """
    kind, explanation = describe_chat_format(directory)
    messages = plain_messages(messages)
    if messages[-1].get("role") == "assistant":
        raise ValueError(
            "the last message is an assistant turn, so there is nothing to answer: end with a user message; to "
            "continue a partial answer, pass encode_messages(messages[:-1]) plus that text as a plain prompt"
        )
    marked, mark = (messages, None) if allow_special else mark_messages(tokenizer, messages, max_tokens)
    if kind == "jinja":
        text = tokenizer.apply_chat_template(marked, thinking)
        if mark and text.replace(mark, "") != tokenizer.apply_chat_template(messages, thinking):
            raise ValueError(
                f"a message spells out a special token, which the chat template of {directory} looks for, so that it "
                "cannot be kept text: pass reasoning as reasoning_content, or allow special tokens "
                "(allow_special=True, --allow-special)"
            )
    else:
        model_type = _model_type(Path(directory))
        text = encode_messages(marked, thinking, v41=model_type == "deepseek_v41", v32=model_type == "deepseek_v32")
        needed = (BOS, USER, ASSISTANT, THINK, END_THINK, *([SYSTEM] if SYSTEM in text else []))
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


def _model_type(directory: Path) -> str | None:
    file = directory / "config.json"
    config = read_json(file, str(file)) if file.is_file() else {}
    return str(config.get("model_type")) if isinstance(config, dict) else None


def _template_location(directory: Path) -> str | None:
    if (directory / TEMPLATE_FILE).is_file():
        return TEMPLATE_FILE
    return CONFIG_FILE if read_settings(directory).get("chat_template") else None
