"""The model ``deepseek_attn`` of lm-evaluation-harness, over `LLM`.

Tokenisation, truncation and stop strings match the harness's model for transformers (``hf``), so that results compare.
"""

from __future__ import annotations

import logging
from typing import Any, Self

import numpy as np

from deepseek_attn.engine.llm import LLM
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.text.tokenizer import Tokenizer

try:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]  # the extra lm-eval
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]  # the extra lm-eval
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]  # the extra lm-eval
    from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]  # the extra lm-eval
        handle_stop_sequences,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]  # the extra lm-eval
        get_rolling_token_windows,
        make_disjoint_window,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: pip install 'deepseek-attn[lm-eval]'", name=error.name) from error

logger = logging.getLogger(__name__)
MAX_NEW_TOKENS = 256  # for tasks without a limit
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", *PENALTIES)
OF_THE_HARNESS = ("do_sample", "until", "max_gen_toks")
Scored = tuple[Any, list[int], list[int]]  # cache key, context, continuation


@register_model("deepseek_attn")
class DeepseekAttnLM(TemplateLM):
    """A checkpoint as a model of the harness.

    Args:
        pretrained: directory or hub id; default: the small checkpoint of the package.
        batch_size, max_batch_size: not used; ``max_num_seqs`` and ``max_num_batched_tokens`` bound a step.
        device: as in `LLM`; None: its default.
        add_bos_token: prepend the BOS token to texts that do not contain it.
        options: options of `LLM`, for instance ``max_model_len=4096``.

    Raises:
        ValueError: a checkpoint without ``tokenizer.json``, or options that `LLM` refuses.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        add_bos_token: bool = True,
        **options: Any,
    ):
        super().__init__()
        if device is not None:
            options["device"] = device
        self.llm = LLM(pretrained, **options)
        if self.llm.tokenizer is None:
            raise ValueError(f"{self.llm.directory} has no tokenizer.json: the harness needs texts")
        self.add_bos_token = add_bos_token

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """Like the harness's method, but ``--model_args`` may contain the harness's own options (``device``)."""
        others = {name: value for name, value in (additional_config or {}).items() if name not in arg_dict}
        return super().create_from_arg_obj(arg_dict, others)

    @property
    def texts(self) -> Tokenizer:
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None
        return tokenizer

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.directory)

    @property
    def eot_token_id(self) -> int:
        return self.llm.runner.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """BOS, the token before a text without a context."""
        return self.texts.bos_token_id

    @property
    def max_length(self) -> int:
        """The longest context: ``max_model_len`` less one position, for the last scored token."""
        return self.llm.runner.layout.max_model_len - 1

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; by default they begin with BOS, unless the text already contains it."""
        wanted = self.add_bos_token if add_special_tokens is None else add_special_tokens
        return self.texts.encode_prompt(string) if wanted else self.texts.encode(string)

    def _loglikelihood_tokens(self, requests: list[Scored], **kwargs: Any) -> list[tuple[float, bool]]:
        """Sum of the log-probabilities of each continuation, and whether greedy decoding gives it.

        Texts of more than ``max_length + 1`` tokens lose their beginning.
        """
        texts = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens: at most {self.max_length} fit behind a token of "
                    "context; raise max_model_len"
                )
            texts.append((context + continuation)[-(self.max_length + 1) :])
        truncated = sum(len(context) + len(rest) > self.max_length + 1 for _, context, rest in requests)
        if truncated:
            logger.warning("%d texts are longer than max_model_len: their beginnings are left out", truncated)
        scored = self.llm.runner.score_logprobs(texts, top=1, progress=not kwargs.get("disable_tqdm", False))
        results = []
        for (key, _, continuation), found in zip(requests, scored, strict=True):
            last = found[len(found) - len(continuation) :]
            greedy = bool(np.array_equal(last.top_ids[:, 0], last.token_ids))
            results.append((float(last.logprobs.sum()), greedy))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, results[-1])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text after BOS. Long texts are scored in windows; each token counts once.

        With ``add_bos_token=True``, `hf` scores a second BOS within the text; this method does not add one.
        """
        windows: list[Scored] = []
        counts = []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text, add_special_tokens=False)
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            own = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to the first stop string; all requests are one batch."""
        prompts, params, stops = [], [], []
        for context, options in (request.args for request in requests):
            known = normalize_gen_kwargs(options, MAX_NEW_TOKENS)
            until = handle_stop_sequences(known["until"], eos=self.texts.decode([self.eot_token_id]))
            max_tokens = int(known["max_gen_toks"])
            room = self.llm.runner.layout.max_model_len - max_tokens
            if room < 1:
                raise ValueError(f"max_gen_toks={max_tokens} leaves no context: raise max_model_len")
            ids = self.tok_encode(context)
            if len(ids) > room:
                logger.warning("a context of %d tokens: the first %d are left out", len(ids), len(ids) - room)
            prompts.append(ids[-room:])
            params.append(sampling_params(known, max_tokens, until))
            stops.append(until)
        completions = self.llm.generate(prompts, params, progress=not disable_tqdm) if prompts else []
        texts = []
        for request, completion, until in zip(requests, completions, stops, strict=True):
            if completion.error is not None:
                raise RuntimeError(completion.error)
            texts.append(postprocess_generated_text(completion.text, until, None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Name of the chat encoding, for the harness's records; None without one. `apply_chat_template` ignores it."""
        if chat_template is False or chat_template is None:
            return None
        return self.llm.chat_prompt([{"role": "user", "content": ""}])[1]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, including BOS and special tokens.

        Without ``add_generation_prompt`` the last message stays open, and the model continues it.
        """
        ids, _ = self.llm.chat_prompt(chat_history, continue_final_message=not add_generation_prompt)
        return self.texts.decode(ids)


def sampling_params(options: dict[str, Any], max_tokens: int, until: list[str]) -> SamplingParams:
    """Parameters of a task's generation options.

    Raises:
        ValueError: an unknown option; the message lists the supported options.
    """
    unknown = sorted(options.keys() - {*SAMPLING, *OF_THE_HARNESS})
    if unknown:
        raise ValueError(
            f"generation options {', '.join(unknown)}: supported are {', '.join([*SAMPLING, *OF_THE_HARNESS])}"
        )
    given = {name: options[name] for name in SAMPLING if options.get(name) is not None}
    if not options.get("do_sample"):
        given["temperature"] = 0.0
    return SamplingParams(**given, max_tokens=max_tokens, stop=tuple(until))
