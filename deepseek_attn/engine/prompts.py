"""Prompts of one checkpoint: text and conversations to token ids, and checks that need no weights."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Unpack, cast

from deepseek_attn.checkpoint.hub import PretrainedSource
from deepseek_attn.engine.records import named
from deepseek_attn.engine.request import CheckedPrompt
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.structured import KINDS, with_response_format
from deepseek_attn.runner.prompts import TokenIds, token_list
from deepseek_attn.runner.replay import Replay, Replayed
from deepseek_attn.runner.sequence import TokenLimits
from deepseek_attn.runner.token_records import ChoosingLayers
from deepseek_attn.text.chat import ChatOptions, build_prompt, required_calls, thinks
from deepseek_attn.text.conversation import Chat
from deepseek_attn.text.tokenizer import TOKENIZER_FILE, Tokenizer

Prompt = str | TokenIds


class Prompts:
    """Makes and checks the prompts of one checkpoint, also before its weights are loaded.

    Args:
        source: the checkpoint.
        max_model_len: the option of the runner.

    Raises:
        ValueError: the tokenizer or the defaults cannot be read, or have ids beyond the model's vocabulary.

    Attributes:
        tokenizer: None when the checkpoint has no ``tokenizer.json`` (token ids only).
        generation: the checkpoint's sampling defaults; limits: of a runner with this option.
    """

    def __init__(self, source: PretrainedSource, max_model_len: int | None = None):
        self.directory, self.config, self.generation = source.directory, source.config, source.generation
        self.limits = TokenLimits.of(self.config, max_model_len)
        self.tokenizer: Tokenizer | None = None
        if (self.directory / TOKENIZER_FILE).is_file():
            self.tokenizer = Tokenizer(self.directory)
            self.tokenizer.check_ids(self.config.vocab_size)

    def token_ids(self, prompt: Prompt) -> TokenIds:
        """The token ids of text, with BOS in front; token ids as they are."""
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("empty prompt: write some text, or pass token ids")
            prompt = self._need_tokenizer().encode_prompt(prompt, self.limits.max_model_len)
        if self.tokenizer is None:
            return prompt
        ids = token_list(prompt)
        self.tokenizer.check_images(ids)
        return ids

    def chat(self, messages: list[dict], **options: Unpack[ChatOptions]) -> tuple[list[int], str]:
        """See `LLM.chat_prompt`."""
        if unknown := sorted(options.keys() - ChatOptions.__annotations__.keys()):
            supported = ", ".join(ChatOptions.__annotations__)
            given = ", ".join(map(named, unknown))
            raise ValueError(f"no such options of a chat: {given}; there are {supported}")
        limit = self.limits.max_model_len
        return build_prompt(self._need_tokenizer(), self.directory, messages, max_tokens=limit, **options)

    def of_chat(self, chat: Chat, params: SamplingParams | None) -> tuple[list[int], SamplingParams]:
        """Token ids of a conversation, and parameters that also restrict the answer, see `chat_params`."""
        ids, _ = self.chat(chat.messages, **cast(ChatOptions, chat.options))
        return ids, self.chat_params(chat, params)

    def chat_params(self, chat: Chat, params: SamplingParams | None) -> SamplingParams:
        """Parameters that also restrict the tokens to the calls or the format that the options of a chat require.

        Without llguidance, ``"required"`` is only in the prompt of chat mode, which begins the calls.

        Raises:
            ValueError: ``params`` has a structure or ``ignore_eos`` beside calls that are required, or a function's
                parameters have keywords that are not supported.
        """
        params, choice = params or SamplingParams(), chat.options.get("tool_choice")
        grammar = required_calls(self._need_tokenizer(), self.directory, chat.options)
        reasons = thinks(chat.options.get("thinking"), chat.options.get("reasoning_effort"))
        prompt_alone = choice == "required" and not reasons and find_spec("llguidance") is None
        if grammar is None or prompt_alone:
            return with_response_format(params, chat.messages, chat.options)
        if given := next((name for name in (*KINDS, "ignore_eos") if getattr(params, name) not in (None, False)), None):
            raise ValueError(f"tool_choice={choice!r:.80} beside {given}: the text is calls, which EOS ends")
        return replace(params, grammar=grammar)

    def check(self, prompt: Prompt, params: SamplingParams | None = None, replay: Replayed | None = None) -> None:
        """Raises ValueError where `LLM.generate` would, before anything is loaded."""
        checked = CheckedPrompt.of(self, self.tokenizer, self.token_ids(prompt), params)
        if replay is not None:
            Replay.create(replay, ChoosingLayers.of_config(self.config), checked.token_ids)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.directory} has no tokenizer.json, so only token ids can be prompts")
        return self.tokenizer
