"""LLM: prompts in, text out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import zip_longest
from operator import length_hint
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, Unpack, overload

from tqdm.auto import tqdm

from deepseek_attn.config.options import is_integer
from deepseek_attn.data import SMALL_CHECKPOINT
from deepseek_attn.engine.completion import Completion, RequestFailed, message_deltas
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.prompts import Prompt, Prompts
from deepseek_attn.engine.records import RecordArguments, Recording
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.sampling import SamplingParams, checked_params
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner import ModelRunner
from deepseek_attn.runner.options import RunnerOptions, check_runner_options, lists_options, open_pretrained
from deepseek_attn.runner.prompts import each_prompt, prompt_list
from deepseek_attn.runner.replay import Replayed
from deepseek_attn.text.chat import ChatOptions, check_switches
from deepseek_attn.text.conversation import Chat
from deepseek_attn.utils.clock import seconds_since

COMPILE_AHEAD = os.environ.get("DEEPSEEK_ATTN_COMPILE_AHEAD", "1") != "0"


class IndexedPrompt(NamedTuple):
    """A prompt with an index of its own, which `LLM.generate_iter` yields with the completion.

    Attributes:
        params: sampling parameters of this prompt; default: the parameters of the call.
        replay: records whose experts and entries it is computed with.
    """

    index: int
    prompt: Any
    params: SamplingParams | None = None
    replay: Replayed | None = None


class IndexedCompletion(NamedTuple):
    """A prompt's completion, and its index."""

    index: int
    completion: Completion


class TextStream(Iterator[str]):
    """The text of a request, piece by piece, each as soon as it is certain. `close` ends the request early.

    Any thread can go on with it, one at a time; any other can close it.
    """

    def __init__(self, engine: Engine, request: Request, pieces: Generator[str]):
        self._engine, self._request, self._pieces = engine, request, pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Cancels the request if it has not ended, and frees its pages."""
        try:
            self._pieces.close()
        except ValueError:  # another thread waits for the next piece: it gets no more
            self._engine.cancel(self._request)

    def parts(self) -> Iterator[tuple[str, str]]:
        """The text as pairs of a part's name and the next piece of it, without the markup between the parts.

        ``"reasoning"`` and ``"answer"``; ``"tool_call"``, the name of a function, begins a call, and the pieces of
        ``"arguments"`` up to the next one are the JSON text of its arguments.
        """
        parser = self._request.reply.parser()
        for piece in self:
            yield from parser.push(piece, self._request.marks)
        yield from parser.flush()

    def deltas(self) -> Iterator[dict[str, Any]]:
        """The reply as additions to a chat message, the deltas of OpenAI's streams; see `Completion.message`."""
        return message_deltas(self.completion, self.parts())

    @property
    def params(self) -> SamplingParams:
        """The request's parameters, with the checkpoint's defaults where none were given."""
        return self._request.params

    @property
    def completion(self) -> Completion:
        """Everything generated so far, and why it ended."""
        return self._request.completion()


class LLM:
    """A checkpoint ready to generate; a context manager that closes it.

    Fields of `SamplingParams` that are None take the checkpoint's value, from ``generation_config.json``. Several
    threads can call it at the same time: their prompts are batched together, and each call returns its own.

    Args:
        model: a directory with ``config.json``, safetensors shards and, for text prompts, ``tokenizer.json``; or a
            hub id, see `ModelRunner.from_pretrained`; default: the small trained checkpoint that comes along.
        speculate: tokens that the MTP layer, or a DSpark drafter, drafts per step; the text is the same, in fewer
            steps.
        before_load: called before weights are read, with the checkpoint's `Prompts`, which check prompts and sampling
            parameters; its exceptions pass.
        options: listed below. With ``parallel``, every rank makes an LLM and the same calls; with data-parallel
            attention, the calls of each rank have different prompts.

    Raises:
        ValueError: the checkpoint or the options are wrong, the tokenizer has ids beyond the model's vocabulary, or
            there is neither an MTP layer nor a DSpark drafter to speculate with.

    Attributes:
        directory: the checkpoint's folder.
        prompts: makes token ids of prompts, and checks them.
        engine: runs the requests and keeps statistics; prefixes are kept from one call to the next.
        runner: the loaded model; tokenizer: None when the checkpoint has no ``tokenizer.json`` (token ids only).
    """

    @lists_options(compile_ahead=COMPILE_AHEAD)
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        speculate: int = 0,
        before_load: Callable[[Prompts], object] | None = None,
        **options: Unpack[RunnerOptions],
    ):
        check_runner_options("LLM", options, "speculate", "before_load")
        if not is_integer(speculate) or speculate < 0:
            raise ValueError(f"speculate={speculate!r:.80}: must be an integer of at least 0 (0: no drafts)")
        if before_load is not None and not callable(before_load):
            raise ValueError(f"before_load={before_load!r:.80}: must be a function of the `Prompts`, or None")
        source = open_pretrained(SMALL_CHECKPOINT if model is None else model, options)  # looks at no shard
        self.directory = source.directory
        self.prompts = Prompts(source, options.get("max_model_len"))
        self.tokenizer = self.prompts.tokenizer
        if before_load is not None:
            try:
                before_load(self.prompts)
            except ValueError:
                source.check_shards()  # what is wrong with the checkpoint comes first
                raise
        defaults = RunnerOptions(expected_drafts=speculate, compile_ahead=COMPILE_AHEAD)
        with source:
            self.runner = ModelRunner.from_source(source.config, source, **defaults | options)
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
        replay: Replayed | list[Replayed | None] | None = None,
        progress: bool = False,
        **record: Unpack[RecordArguments],
    ) -> list[Completion]:
        """Completes one prompt or many, batched as the caches allow. A prompt that fails does so alone.

        Args:
            prompts: text (BOS is put in front) or token ids (used unchanged, in a list, a NumPy array or a tensor); or
                a list of these. Of a two-dimensional array each row is a prompt, whole: nothing is taken for padding.
            params: one for all prompts, or one each; default: the checkpoint's ``generation_config.json``. With ``n``
                above 1 a prompt's completion is its first, whose ``outputs`` are all of them.
            replay: records, or their files, whose experts and entries the prompts are computed with: a list with one
                for each prompt, or None. Each has rows for its whole prompt at least (docs/records.md).
            record: the records to return; see `RecordArguments`. A recorded prompt does not use the prefix cache.
            progress: show a bar over prompt and generated tokens, on a terminal.

        Raises:
            ValueError: a prompt cannot be run; it is named by its place, and nothing has been generated.
        """
        listed = prompt_list(prompts)
        given: list[SamplingParams | None] = [*params] if isinstance(params, list) else [params] * len(listed)
        checked = [checked_params(p, "SamplingParams, or a list of them") for p in given]
        if len(checked) != len(listed):
            raise ValueError(
                f"{len(checked)} sampling parameters for {len(listed)} prompts: pass one, or one per prompt"
            )
        replays = replay if isinstance(replay, list) else [replay] * min(len(listed), 1)
        if replay is not None and len(replays) != len(listed):
            raise ValueError(
                f"replay of {len(replays)} prompts, and there are {len(listed)}: pass a list, None for some"
            )
        recording = Recording.create(self.runner, **record)
        jobs = zip_longest(listed, checked, replays)
        requests = [self._request(prompt, p, index, recording, r) for index, (prompt, p, r) in enumerate(jobs)]
        total = sum(r.params.n * (r.prompt_length + r.params.max_tokens - 1) for r in requests)
        with tqdm(total=total, unit="tok", disable=None if progress else True) as bar:
            for outputs in self.engine.run(requests):
                bar.update(sum(output.computed for output in outputs))
        self.runner.wait_for_ranks()
        return [request.completion() for request in requests]

    def generate_iter(
        self,
        prompts: Iterable[Prompt | IndexedPrompt | None],
        params: SamplingParams | None = None,
        *,
        encode: Callable[[Any], Prompt | Chat] | None = None,
        max_in_flight: int | None = None,
        progress: bool = False,
        **record: Unpack[RecordArguments],
    ) -> Generator[IndexedCompletion]:
        """Completes any number of prompts and yields ``(index, completion)`` of each as soon as it is done: all ``n``.

        A prompt is taken when there is room for it, and nothing of a finished prompt is kept, so the requests in flight
        bound the memory. An invalid or failing prompt has an ``error``; all other prompts continue. Closing the
        generator cancels the requests in flight.

        Args:
            prompts: as `generate` takes them. They count from 0 on, or have an index and parameters of their own
                (`IndexedPrompt`).
                None instead of a prompt means "not there yet": running prompts continue; `next` is called again later.
            params: for prompts without parameters of their own. With a seed, the tokens of a prompt depend on its
                index, not on other prompts.
            encode: makes the prompt of an item, or its conversation (`Chat`); a ValueError is that prompt's error.
            max_in_flight: default: ``max_num_seqs``, the number of requests that can run at the same time.
            progress: show a bar over prompts with tokens per second, on a terminal.
            record: as in `generate`.

        Raises:
            ValueError: a single prompt, or wrong parameters; nothing has been generated.
        """
        prompts = each_prompt(prompts)
        if max_in_flight is None:
            max_in_flight = self.runner.layout.max_num_seqs
        if not is_integer(max_in_flight) or max_in_flight < 1:
            raise ValueError(f"max_in_flight={max_in_flight!r:.80}: must be an integer of at least 1, or None")
        if encode is not None and not callable(encode):
            raise ValueError(f"encode={encode!r:.80}: must be a function that makes a prompt of an item, or None")
        recording = Recording.create(self.runner, **record)
        return self._completions(prompts, checked_params(params), encode, max_in_flight, progress, recording)

    def _completions(
        self,
        prompts: Iterable[Prompt | IndexedPrompt | None],
        params: SamplingParams,
        encode: Callable[[Any], Prompt | Chat] | None,
        max_in_flight: int,
        progress: bool,
        recording: Recording,
    ) -> Generator[IndexedCompletion]:
        """`generate_iter`, its arguments checked."""
        in_flight: dict[Request, int] = {}

        def requests() -> Iterator[Request | None]:
            place = 0
            for item in prompts:
                if item is None:
                    yield None
                    continue
                index, prompt, own, replay = item if isinstance(item, IndexedPrompt) else IndexedPrompt(place, item)
                place += 1
                try:
                    prompt = encode(prompt) if encode else prompt
                    own = params if own is None else checked_params(own)
                    if isinstance(prompt, Chat):
                        prompt, own = self.prompts.of_chat(prompt, own)
                    request = self._make_request(prompt, own, index, recording, replay)
                except ValueError as error:
                    request = Request.refused([], str(error))
                in_flight[request] = index
                yield request

        bar = tqdm(total=length_hint(prompts) or None, unit="prompt", miniters=0, disable=None if progress else True)
        with bar, closing(self.engine.run(requests(), max_in_flight)) as steps:
            tokens, started = 0, time.perf_counter()
            for outputs in steps:
                tokens += sum(len(output.token_ids) for output in outputs)
                ended = dict.fromkeys(output.request.first or output.request for output in outputs if output.finished)
                done = [request for request in ended if all(each.finished for each in request.group)]
                bar.set_postfix_str(f"{tokens / seconds_since(started):.0f} tok/s", refresh=False)
                bar.update(len(done))
                for request in done:
                    yield IndexedCompletion(in_flight.pop(request), request.completion())
        self.runner.wait_for_ranks()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        replay: Replayed | None = None,
        progress: bool = False,
        **record: Unpack[RecordArguments],
    ) -> TextStream:
        """Completes one prompt and yields its text piece by piece, each as soon as it is certain.

        Args:
            progress: while a prompt of several steps is read, show a bar on the terminal; it is gone before the text.
            replay, record: as in `generate`; `TextStream.completion` has the records once the stream has ended.

        Raises:
            ValueError: the prompt cannot be run, or ``n`` is above 1. RequestFailed, from the stream: the request
                failed while it ran.
        """
        recording = Recording.create(self.runner, **record)
        request = self._request(prompt, checked_params(params), 0, recording, replay)
        if request.others:
            raise ValueError(f"n={request.params.n}: a stream is one text; use generate, or one stream per seed")
        return TextStream(self.engine, request, self._pieces(request, progress))

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
                fresh = request.text[given:]  # of several tokens where there are drafts, or another stream's steps
                given += len(fresh)
                yield from filter(None, fresh)
            yield from filter(None, request.text[given:])
        self.runner.wait_for_ranks()
        if request.error is not None:
            raise RequestFailed(request.error)

    @overload
    def chat(
        self, messages: list[dict], params: SamplingParams | None = None, *, stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Completion: ...  # fmt: skip

    @overload
    def chat(
        self, messages: list[dict], params: SamplingParams | None = None, *, stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> TextStream: ...  # fmt: skip

    def chat(
        self,
        messages: list[dict],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Completion | TextStream:
        """Answers a conversation; the completion has ``reasoning``, ``answer`` and ``tool_calls``.

        Args:
            messages: as `encode_messages` takes them, or as the checkpoint's own template does.
            stream: return the answer piece by piece, as `stream` does; `TextStream.parts` divides it.
            options: ``thinking``, ``reasoning_effort``, ``tools``, ``tool_choice``, ``response_format``, ``documents``,
                ``continue_final_message``, ``allow_special``; see `ChatOptions`.
        """
        check_switches(stream=stream)
        prompt, params = self.prompts.of_chat(Chat(messages, {**options}), params)
        return self.stream(prompt, params) if stream else self.generate([prompt], params)[0]

    def chat_prompt(self, messages: list[dict], **options: Unpack[ChatOptions]) -> tuple[list[int], str]:
        """Token ids of a conversation, and which chat encoding made them."""
        return self.prompts.chat(messages, **options)

    def _request(
        self, prompt: Prompt, params: SamplingParams, index: int, recording: Recording, replay: Replayed | None
    ) -> Request:
        try:
            return self._make_request(prompt, params, index, recording, replay)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error

    def _make_request(
        self, prompt: Prompt, params: SamplingParams, index: int, recording: Recording, replay: Replayed | None
    ) -> Request:
        ids = self.prompts.token_ids(prompt)
        if params.seed is None:
            params = replace(params, seed=self.runner.parallel.fresh_seed())
        return recording.watch(Request.create(self.runner, self.tokenizer, ids, params, index), index, replay)
