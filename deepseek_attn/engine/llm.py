"""LLM: prompts in, text out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from numbers import Number
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

import numpy as np
import torch
from tqdm import tqdm

from deepseek_attn.checkpoint.hub import PretrainedSource
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.request import Completion, Request, RequestFailed
from deepseek_attn.engine.sampling import SamplingParams, checked_params
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner import ModelRunner
from deepseek_attn.runner.options import RunnerOptions, check_options, lists_options
from deepseek_attn.runner.sequence import TokenIds
from deepseek_attn.text.chat import build_prompt
from deepseek_attn.text.tokenizer import TOKENIZER_FILE, Tokenizer

Prompt = str | TokenIds


class TextStream(Iterator[str]):
    """The text of a request, piece by piece, each as soon as it is certain. `close` ends the request early."""

    def __init__(self, request: Request, pieces: Generator[str]):
        self._request, self._pieces = request, pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Cancels the request if it has not ended, and frees what it holds."""
        self._pieces.close()

    @property
    def completion(self) -> Completion:
        """Everything generated so far, and why it ended."""
        return self._request.completion()


class LLM:
    """A checkpoint ready to generate; a context manager that closes it.

    Args:
        model: a directory with ``config.json``, safetensors shards and, for text prompts, ``tokenizer.json``; or a
            hub id, see `ModelRunner.from_pretrained`.
        speculate: tokens that the MTP layer drafts per step; the text is the same, in fewer steps.
        options: see `RunnerOptions`. With ``parallel``, every rank makes an LLM and the same calls; with data-parallel
            attention, the calls of each rank have different prompts.

    Raises:
        ValueError: the checkpoint or the options are wrong, the tokenizer has ids beyond the model's vocabulary, or
            there is no MTP layer to speculate with.

    Attributes:
        directory: the checkpoint's folder.
        engine: runs the requests and keeps statistics; prefixes are kept from one call to the next.
        runner: the loaded model; tokenizer: None when the checkpoint has no ``tokenizer.json`` (token ids only).
    """

    @lists_options
    def __init__(self, model: str | Path, *, speculate: int = 0, **options: Unpack[RunnerOptions]):
        check_options("LLM", options, "speculate")
        # shards are not looked at here
        source = PretrainedSource(model, options.get("layers"), options.get("attention_only", False))
        self.directory = source.directory
        self.tokenizer: Tokenizer | None = None
        if (self.directory / TOKENIZER_FILE).is_file():
            self.tokenizer = Tokenizer(self.directory)
            self.tokenizer.check_ids(source.config.vocab_size)
        self.runner = ModelRunner.from_pretrained(model, **options)
        decoder = MTPSpeculation(self.runner, speculate) if speculate else None
        self.engine = Engine(self.runner, self.tokenizer, decoder)

    def __repr__(self) -> str:
        return f"LLM({str(self.directory)!r}, {self.runner!r}, {self.tokenizer or 'no tokenizer'})"

    def close(self) -> None:
        """Frees the model, its caches and CUDA graphs (`ModelRunner.close`); later calls raise RuntimeError."""
        self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        progress: bool = False,
        finished: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Completes one prompt or many, batched as the caches allow. One that fails does so alone.

        Args:
            prompts: text (BOS is put in front) or token ids (used unchanged, in a list, a NumPy array or a tensor); or
                a list of these. Of a two-dimensional array each row is a prompt, whole: nothing is taken for padding.
            params: one for all prompts, or one each.
            progress: show a bar over prompt and generated tokens, on a terminal.
            finished: called with the place and the completion of each prompt as soon as it is done.

        Raises:
            ValueError: a prompt cannot be run; it is named by its place, and nothing has been generated.
        """
        listed = as_prompts(prompts)
        params = params if isinstance(params, list) else [params] * len(listed)
        params = [checked_params(p, "SamplingParams, or a list of them") for p in params]
        if len(params) != len(listed):
            raise ValueError(
                f"{len(params)} sampling parameters for {len(listed)} prompts: pass one, or one per prompt"
            )
        requests = [
            self._request(prompt, p, index) for index, (prompt, p) in enumerate(zip(listed, params, strict=True))
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

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, progress: bool = False) -> TextStream:
        """Completes one prompt and yields its text piece by piece, each as soon as it is certain.

        Args:
            progress: while a prompt of several steps is read, show a bar on the terminal; it is gone before the text.

        Raises:
            ValueError: the prompt cannot be run. RequestFailed, from the stream: the request failed while it ran.
        """
        request = self._request(prompt, checked_params(params), 0)
        return TextStream(request, self._pieces(request, progress))

    def _pieces(self, request: Request, progress: bool) -> Generator[str]:
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

    @overload
    def chat(
        self, messages: list[dict], params: SamplingParams | None = None, *, thinking: bool = False,
        stream: Literal[False] = False,
    ) -> Completion: ...  # fmt: skip

    @overload
    def chat(
        self, messages: list[dict], params: SamplingParams | None = None, *, thinking: bool = False,
        stream: Literal[True],
    ) -> TextStream: ...  # fmt: skip

    def chat(
        self,
        messages: list[dict],
        params: SamplingParams | None = None,
        *,
        thinking: bool = False,
        stream: bool = False,
    ) -> Completion | TextStream:
        """Answers a conversation of system, user and assistant turns; `parse_completion` splits off the reasoning.

        Args:
            stream: return the answer piece by piece, as `stream` does.
        """
        prompt, _ = self.chat_prompt(messages, thinking)
        return self.stream(prompt, params) if stream else self.generate([prompt], params)[0]

    def chat_prompt(self, messages: list[dict], thinking: bool = False) -> tuple[list[int], str]:
        """Token ids of a conversation, and which chat encoding made them."""
        return build_prompt(self._need_tokenizer(), self.directory, messages, thinking)

    def _request(self, prompt: Prompt, params: SamplingParams, index: int) -> Request:
        try:
            if isinstance(prompt, str) and not prompt:
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


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one or several were given; what can be neither is taken for one."""
    single: Any = prompts
    if isinstance(prompts, (str, bytes, bytearray, Mapping, Set)) or not isinstance(prompts, Iterable):
        return [single]
    if isinstance(prompts, (np.ndarray, torch.Tensor)):
        texts = isinstance(prompts, np.ndarray) and prompts.dtype.kind in "OU"
        if prompts.ndim == 0 or (prompts.ndim == 1 and not texts):
            return [single]
    several: list[Any] = list(prompts)
    first = several[0] if several else None
    is_token = isinstance(first, Number) or (isinstance(first, torch.Tensor) and not first.ndim)
    return [several] if is_token else several
