"""One request: its sequence, its sampling parameters, and the text generated so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from weakref import ref

from deepseek_attn.cache.prefix import BlockKeys
from deepseek_attn.config.generation import GenerationConfig
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.options import is_integer
from deepseek_attn.engine.completion import Completion
from deepseek_attn.engine.drawing import CounterGenerator, make_generator
from deepseek_attn.engine.logits import LogitsRow, LogitsRules, bad_word_ids
from deepseek_attn.engine.request_logprobs import RequestLogprobs
from deepseek_attn.engine.sampling import ResolvedParams, SamplingParams, checked_params
from deepseek_attn.engine.stopping import StopChecker, with_stop_tokens
from deepseek_attn.engine.structured import GrammarState, compiled_grammar
from deepseek_attn.runner import ModelRunner, Sequence
from deepseek_attn.runner.prompts import TokenIds, shown, token_list
from deepseek_attn.runner.record_store import RecordStore
from deepseek_attn.runner.replay import Replay
from deepseek_attn.runner.sequence import TokenLimits
from deepseek_attn.runner.token_records import TokenRecords
from deepseek_attn.text.chat import control_tokens, reply_start
from deepseek_attn.text.reply import ANSWER, DSML, END_THINK, ControlMark, ReplyStart, parse_reply
from deepseek_attn.text.tokenizer import IncrementalDecoder, Tokenizer

ENDED_FROM_OUTSIDE = ("abort", "error")


class ModelFacts(Protocol):
    """The facts of a model that prompts and parameters are checked by; a runner has them, and `Prompts` reads them."""

    @property
    def config(self) -> AnyConfig: ...

    @property
    def generation(self) -> GenerationConfig: ...

    @property
    def limits(self) -> TokenLimits: ...


class CheckedPrompt(NamedTuple):
    """A prompt that a model can run with its parameters; it has no caches, and needs no weights.

    Attributes:
        reply: in which part of a reply the prompt ends.
        new_stop, new_rules: make the state of one of its completions.
    """

    token_ids: list[int]
    params: ResolvedParams
    reply: ReplyStart
    new_stop: Callable[[], StopChecker]
    new_rules: Callable[[], LogitsRules]

    @classmethod
    def of(
        cls, model: ModelFacts, tokenizer: Tokenizer | None, prompt: TokenIds, params: SamplingParams | None
    ) -> CheckedPrompt:
        """Checks a prompt. ValueError: see `Request.create`."""
        params = checked_params(params).resolved(model.generation.sampling)
        vocab_size, eos = model.config.vocab_size, model.generation.eos_of(model.config)
        unknown = [token for token in params.stop_token_ids if token >= vocab_size]
        if unknown:
            raise ValueError(f"stop_token_ids {unknown}: the vocabulary has {vocab_size} tokens")

        stop_params = params if tokenizer is None else with_stop_tokens(params, tokenizer)
        controls = {} if tokenizer is None else control_tokens(tokenizer)
        words = bad_word_ids(params.bad_words, tokenizer)
        compiled = compiled_grammar(params, tokenizer, vocab_size, eos)
        ids = model.limits.checked(prompt)
        reply = ANSWER if tokenizer is None else reply_start(tokenizer, ids)
        begins_after = tokenizer.token_id(END_THINK) if tokenizer is not None and reply.thinking else None
        begins_calls = tuple(token for token, text in controls.items() if text == DSML)

        def new_stop() -> StopChecker:
            decoder = IncrementalDecoder(tokenizer, params.skip_special_tokens) if tokenizer else None
            return StopChecker(stop_params, eos, decoder, controls)

        def new_rules() -> LogitsRules:
            grammar = None if compiled is None else GrammarState(compiled, begins_after, begins_calls)
            return LogitsRules(params, words, {*stop_params.stop_token_ids, *eos}, vocab_size, grammar)

        new_rules()  # checks token ids, and functions
        return cls(ids, params, reply, new_stop, new_rules)


@dataclass
class Unreported:
    """The part of a request that is still to be reported: tokens from number ``start`` on, and those ``computed``."""

    start: int
    computed: int = 0


@dataclass(eq=False)
class Caller:
    """A receiver of outputs: an `Engine.run`, or all callers of `Engine.step` together.

    Attributes:
        thread: of an `Engine.run`, the thread that began it.
        unreported: by request, the part whose outputs it has not received.
    """

    thread: int | None = None
    unreported: dict[Request, Unreported] = field(default_factory=dict)


@dataclass(eq=False)
class Request:
    """A request, from its prompt to its end.

    Its tokens up to ``confirmed_length`` and its ``finish_reason`` are its state. Caches, drafts, random numbers and
    text follow from them, so `restore` can derive them again after an interruption at any point.

    Attributes:
        prompt_token_ids: as given when it was refused, so that its completion can show them.
        reply: in which part of a reply the prompt ends.
        rules: how its logits are processed.
        text: a piece for each generated token, and one more if it was ended from outside.
        keys: names of its prefixes in the prefix cache.
        shared: number of its leading tokens that other requests had too; a step stops there once to leave a snapshot.
        kept_blocks: blocks of tokens that have been offered to the prefix cache.
        cached_tokens: tokens that came from the prefix cache, or from ``first``, when it first started.
        preemptions: number of times it was preempted.
        others: the requests of the prompt's other completions; their `first` is this request.
        logprobs: log-probabilities of its tokens, if its parameters request them.
        store: collects its records; at the end they become ``records``. None: no records.
        store_failure: why its records could not be stored.
        replay: experts and entries that it is computed with.
    """

    _sequence: Sequence | None
    prompt_token_ids: list[int]
    params: ResolvedParams
    generator: CounterGenerator
    _stop: StopChecker | None
    _new_stop: Callable[[], StopChecker] | None = None
    reply: ReplyStart = ANSWER
    rules: LogitsRules | None = None
    keys: BlockKeys | None = None
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    shared: int = 0
    kept_blocks: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    others: list[Request] = field(default_factory=list)
    _first: ref[Request] | None = None
    store: RecordStore | None = None
    store_failure: str | None = None
    records: TokenRecords | None = None
    replay: Replay | None = None
    logprobs: RequestLogprobs = field(init=False)

    def __post_init__(self):
        params = self.params
        self.logprobs = RequestLogprobs(params.logprobs, params.prompt_logprobs, max(0, self.prompt_length - 1))

    @classmethod
    def create(
        cls,
        runner: ModelRunner,
        tokenizer: Tokenizer | None,
        prompt: TokenIds,
        params: SamplingParams | None,
        index: int = 0,
    ) -> Request:
        """Checks the prompt and starts a sequence, and one for each of its other completions; nothing is computed yet.

        Raises:
            ValueError: the prompt cannot be run, parameters of another type or with unknown token ids, or stop strings
                without a tokenizer.
        """
        if not is_integer(index):
            raise ValueError(f"index={shown(index)}: must be an integer, which random numbers depend on")
        checked = CheckedPrompt.of(runner, tokenizer, prompt, params)
        first, *others = [
            cls(
                runner.sequence(checked.token_ids),
                checked.token_ids,
                checked.params,
                make_generator(checked.params, index, completion),
                checked.new_stop(),
                checked.new_stop,
                checked.reply,
                checked.new_rules(),
            )
            for completion in range(checked.params.n)
        ]
        first.others = list(others)
        for other in others:
            other._first = ref(first)
        return first

    @classmethod
    def refused(cls, prompt: TokenIds, error: str) -> Request:
        """A request that ended before it began."""
        try:
            prompt = token_list(prompt)
        except ValueError:
            prompt = []
        params = SamplingParams().resolved()
        return cls(None, prompt, params, make_generator(params), None, finish_reason="error", error=error)

    @property
    def first(self) -> Request | None:
        """The request of its prompt's first completion, while something else refers to it; of the first: None."""
        return None if self._first is None else self._first()

    @property
    def group(self) -> tuple[Request, ...]:
        """The requests of all completions of a prompt, if this is the first of them, else only this one."""
        return (self, *self.others)

    @property
    def waits_for_prompt(self) -> bool:
        """Whether the first request of its prompt has yet to compute the prompt, which this one will share."""
        first = self.first
        return (
            first is not None
            and self.takes_computed
            and not (self.sequence.num_computed or first.num_generated or first.finished)
        )

    @property
    def takes_computed(self) -> bool:
        """Whether it may begin with tokens that others have computed: not where choices are recorded or replayed."""
        return self.store is None and self.replay is None

    def keep_records(self, records: TokenRecords) -> None:
        """Stores the records of the tokens that a step has just computed."""
        if self.store is not None:
            try:
                self.store.put(self.sequence.num_computed - len(records), records)
            except ValueError as error:
                self.store_failure = str(error)

    def finish_records(self) -> None:
        """Completes the records of an ended request; if its file cannot be written, the request ends with an error.

        A request that was cancelled leaves no file.
        """
        if self.store is None or self.records is not None:
            return
        try:
            if self.store_failure is None and (self.finish_reason != "abort" or self.store.path is None):
                self.records = self.store.finish(self.confirmed_length - (self.num_generated > 0))
        except ValueError as error:
            self.store_failure = str(error)
            self.finish_reason, self.error = "error", self.store_failure
        finally:
            self.store.close()

    def share_prompt(self) -> None:
        """Shares its caches with the prompt's other completions, except for the last token, whose logits they need.

        They have its log-probabilities too.
        """
        for other in self.others if self.prompt_length > 1 and self.takes_computed else ():
            if not (other.finished or other.num_generated or other.sequence.num_computed):
                other.logprobs.prompt = self.logprobs.prompt.copy()
                sequence = other.sequence
                sequence.cache = sequence.manager.fork(self.sequence.cache)
                sequence.manager.truncate(sequence.cache, self.prompt_length - 1)

    @property
    def sequence(self) -> Sequence:
        """Tokens and caches; tokens stay when a preemption frees the caches. RuntimeError for a refused request."""
        if self._sequence is None:
            raise RuntimeError("a request that was refused has no sequence")
        return self._sequence

    @property
    def stop(self) -> StopChecker:
        """When it ends, and its number of tokens. RuntimeError for a refused request."""
        if self._stop is None:
            raise RuntimeError("a request that was refused generates nothing")
        return self._stop

    def prefix_keys(self, length: int) -> list[bytes]:
        """Keys of the prefixes of its first ``length`` tokens. RuntimeError without a prefix cache."""
        if self.keys is None:
            raise RuntimeError("the request was submitted to an engine without a prefix cache")
        return self.keys.upto(self.sequence.token_ids, length)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return 0 if self._stop is None else self._stop.count

    def generated(self, start: int = 0) -> list[int]:
        """The generated tokens from number ``start`` on."""
        first = self.prompt_length + start
        return self.sequence.token_ids[first : self.confirmed_length] if self.num_generated else []

    @property
    def confirmed_length(self) -> int:
        """Number of prompt and sampled tokens: beyond them, ``token_ids`` holds drafts."""
        return self.prompt_length + self.num_generated

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still generate."""
        within_limit = self.sequence.limits.max_model_len - self.confirmed_length
        return min(self.params.max_tokens - self.stop.count, within_limit)

    @property
    def max_computed(self) -> int:
        """Upper bound of computed tokens: the last generated token is never computed."""
        return self.confirmed_length + self.tokens_left - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def random_numbers(self, ahead: int = 0) -> CounterGenerator:
        """Random numbers, one per generated token, from the token ``ahead`` places after the next one on."""
        generator = CounterGenerator(self.generator.key)
        generator.position = self.num_generated + ahead
        return generator

    @property
    def processes_logits(self) -> bool:
        """Whether its next token is not chosen from the model's logits as they are."""
        return self.rules is not None and self.rules.apply_to(self.num_generated)

    def logits_row(self, ahead: int = 0) -> LogitsRow:
        """The row after its confirmed tokens and ``ahead`` drafts."""
        rules = self.rules if self.processes_logits else None
        confirmed = self.confirmed_length
        return LogitsRow(rules, self.sequence.token_ids, self.prompt_length, confirmed, confirmed + ahead)

    def allowed_tokens(self) -> bytes | None:
        """The tokens that structured output allows next, see `LogitsRules.allowed`."""
        return None if self.rules is None else self.rules.allowed(self.generated())

    def push(self, token_id: int) -> None:
        """Appends one sampled token; call it without pending drafts. If the token ends the request, the caches stay."""
        self.sequence.token_ids.append(token_id)
        self.text.append(self._push_stop(self.stop, token_id))
        self.finish_reason = self.stop.reason

    def _push_stop(self, stop: StopChecker, token_id: int) -> str:
        """The text that is certain after one more token, which from then on counts as generated."""
        last = self.prompt_length + stop.count + 1 >= self.sequence.limits.max_model_len
        return stop.push(token_id, last).text

    def end(self, reason: str, error: str | None = None) -> None:
        """Ends it from outside: emits text that was held back for a stop string, and frees the caches."""
        self.finish_reason, self.error = reason, error
        self.text.append(self.stop.abort())
        self.release()

    def restore(self) -> None:
        """After an interruption: brings caches and text in line with the generated tokens, and drops drafts."""
        from_outside = self.finish_reason in ENDED_FROM_OUTSIDE
        if len(self.text) != self.num_generated + from_outside:
            if self._new_stop is None:
                raise RuntimeError("a request that was refused generates nothing")
            stop = self._new_stop()
            text = [self._push_stop(stop, token) for token in self.generated()]
            text += [stop.abort()] if from_outside else []
            self.text, self._stop = text, stop
        self.finish_reason = self.finish_reason or self.stop.reason
        sequence = self.sequence
        if self.finished:
            self._free()
        else:  # the last token at least is computed again, for its logits; of a step that broke off, all are
            length = min(sequence.num_computed, self.confirmed_length - 1)
            if (missing := self.logprobs.missing) is not None:
                length = min(length, missing.first)
            if self.store is not None:
                length = min(length, self.store.length)
            sequence.manager.truncate(sequence.cache, length)
        self.drop_drafts()

    def release(self) -> None:
        """Frees the caches and removes drafts; prompt and sampled tokens stay."""
        self._free()
        self.drop_drafts()

    def _free(self) -> None:
        self.sequence.free()
        if self.rules is not None:
            self.rules.forget()

    def drop_drafts(self) -> None:
        """Removes drafts that no step has verified."""
        del self.sequence.token_ids[self.confirmed_length :]

    @property
    def marks(self) -> list[ControlMark]:
        """The tokens that divide the reply, in its text."""
        return [] if self._stop is None else self._stop.marks

    def completion(self) -> Completion:
        text = "".join(self.text)
        return Completion(
            self.prompt_token_ids,
            self.generated(),
            text,
            self.finish_reason or "abort",
            self.error,
            self.cached_tokens,
            *parse_reply(text, self.marks, self.reply),
            [other.completion() for other in self.others],
            logprobs=self.logprobs.of_generated(0, self.num_generated),
            prompt_logprobs=self.logprobs.of_prompt(),
            records=self.records,
        )
