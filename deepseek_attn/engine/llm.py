"""LLM: prompts in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.request import Completion, Request, RequestFailed
from deepseek_attn.engine.sampling import SamplingParams, checked_params
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner import ModelRunner
from deepseek_attn.text.chat import build_prompt
from deepseek_attn.text.tokenizer import TOKENIZER_FILE, Tokenizer

Prompt = str | Iterable[int]


class LLM:
    """A checkpoint ready to generate.

    Args:
        directory: a checkpoint with ``config.json``, safetensors shards and, for text prompts, ``tokenizer.json``.
        speculate: tokens that the MTP layer drafts per step; the text is the same, in fewer steps.
        options: those of `ModelRunner.from_pretrained`. With ``parallel``, every rank makes an LLM and the same calls;
            with data-parallel attention, the calls of each rank have different prompts.

    Raises:
        ValueError: the checkpoint or the options are wrong, the tokenizer has ids beyond the model's vocabulary, or
            there is no MTP layer to speculate with.

    Attributes:
        engine: runs the requests and keeps statistics; prefixes are kept from one call to the next.
        runner: the loaded model; tokenizer: None when the checkpoint has no ``tokenizer.json`` (token ids only).
    """

    def __init__(self, directory: str | Path, *, speculate: int = 0, **options):
        self.directory = Path(directory)
        self.tokenizer: Tokenizer | None = None
        if (self.directory / TOKENIZER_FILE).is_file():
            self.tokenizer = Tokenizer(self.directory)
            self.tokenizer.check_ids(ModelConfig.from_pretrained(self.directory).vocab_size)
        self.runner = ModelRunner.from_pretrained(directory, **options)
        decoder = MTPSpeculation(self.runner, speculate) if speculate else None
        self.engine = Engine(self.runner, self.tokenizer, decoder)

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        progress: bool = False,
        finished: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Completes one prompt or many, batched as the caches allow. One that fails does so alone.

        Args:
            prompts: text (BOS is put in front) or token ids (used unchanged); or a list of these.
            params: one for all prompts, or one each.
            progress: show a bar over prompt and generated tokens, on a terminal.
            finished: called with the place and the completion of each prompt as soon as it is done.

        Raises:
            ValueError: a prompt cannot be run; it is named by its place, and nothing has been generated.
        """
        prompts = as_list(prompts)
        params = params if isinstance(params, list) else [params] * len(prompts)
        params = [checked_params(p, "SamplingParams, or a list of them") for p in params]
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(params)} sampling parameters for {len(prompts)} prompts: pass one, or one per prompt"
            )
        requests = [
            self._request(prompt, p, index) for index, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]
        places = {request: place for place, request in enumerate(requests)}
        total = sum(request.prompt_length + request.params.max_tokens - 1 for request in requests)
        with tqdm(total=total, unit="tok", disable=None if progress else True) as bar:
            for outputs in self.engine.run(requests):
                bar.update(sum(output.computed for output in outputs))
                for request in [output.request for output in outputs if output.request.finished]:
                    place = places.pop(request, None)
                    if finished is not None and place is not None:
                        finished(place, request.completion())
        self.runner.wait_for_ranks()
        return [request.completion() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, progress: bool = False) -> Iterator[str]:
        """Completes one prompt and yields its text piece by piece, each as soon as it is certain.

        Args:
            progress: while a prompt of several steps is read, show a bar on the terminal; it is gone before the text.

        Raises:
            ValueError: the prompt cannot be run. RequestFailed: the request failed while it ran.
        """
        request = self._request(prompt, checked_params(params), 0)
        several = request.prompt_length > self.runner.layout.max_num_batched_tokens
        with tqdm(
            total=request.prompt_length,
            unit="tok",
            desc="reading the prompt",
            leave=False,
            disable=None if progress and several else True,
        ) as bar:
            given = 0
            for _ in self.engine.run([request]):
                bar.update(request.sequence.num_computed - bar.n)
                if request.text:
                    bar.close()
                # another stream's step may have computed several tokens of this one
                given, fresh = len(request.text), request.text[given:]
                yield from filter(None, fresh)
            yield from filter(None, request.text[given:])
        self.runner.wait_for_ranks()
        if request.error is not None:
            raise RequestFailed(request.error)

    def chat(
        self,
        messages: list[dict],
        params: SamplingParams | None = None,
        *,
        thinking: bool = False,
    ) -> Completion:
        """Answers a conversation of system, user and assistant turns; `parse_completion` splits off the reasoning."""
        return self.generate([self.chat_prompt(messages, thinking)[0]], params)[0]

    def chat_prompt(self, messages: list[dict], thinking: bool = False) -> tuple[list[int], str]:
        """Token ids of a conversation, and which chat encoding made them."""
        return build_prompt(self._need_tokenizer(), self.directory, messages, thinking)

    def _request(self, prompt: Prompt, params: SamplingParams, index: int) -> Request:
        try:
            if prompt == "":
                raise ValueError("empty prompt: write some text, or pass token ids")
            ids = self._need_tokenizer().encode_prompt(prompt) if isinstance(prompt, str) else prompt
            if params.seed is None:
                params = replace(params, seed=self.runner.parallel.fresh_seed())
            return Request.create(self.runner, self.tokenizer, ids, params, index)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.directory} has no tokenizer.json, so only token ids can be prompts")
        return self.tokenizer


def as_list(prompts: Prompt | list[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one or several were given; ValueError for any other value."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        prompts = list(prompts)
    except TypeError:
        raise ValueError(f"a prompt is text or a list of token ids, got {prompts!r}") from None
    return prompts if not prompts or not isinstance(prompts[0], int) else [prompts]
