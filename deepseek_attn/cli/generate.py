"""``deepseek-attn generate``: generates text with a checkpoint."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_attn.cli.conversation import converse, show_answer, show_completions
from deepseek_attn.cli.load_report import add_report_option, show_report
from deepseek_attn.cli.observe import add_observe_options, observed
from deepseek_attn.cli.options import HUB_ID, add_runner_options, numbers, read_text, runner_options
from deepseek_attn.cli.prompts import conversation_of, read_messages, read_tools
from deepseek_attn.cli.ranks import add_ranks_option, joined_ranks
from deepseek_attn.cli.records import add_record_options, check_records, record_arguments, replay_file, say_recorded
from deepseek_attn.cli.terminal import say
from deepseek_attn.config.defaults import DEFAULT_MAX_TOKENS
from deepseek_attn.data import SMALL_CHECKPOINT
from deepseek_attn.utils.json_files import parse_json

if TYPE_CHECKING:
    from deepseek_attn.engine.prompts import Prompts
    from deepseek_attn.engine.sampling import SamplingParams
    from deepseek_attn.layers.parallel import Parallel
    from deepseek_attn.text.conversation import Chat

DEFAULT_PROMPT = "Once upon a time"
CONVERSATION_SNAPSHOTS = 2  # for the earlier turns, and for the beginning that every turn shares


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Complete a prompt, streaming."
    add_options(parser)
    add_ranks_option(parser)
    add_observe_options(parser)
    add_report_option(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options for prompts and sampling, shared with ``scripts/ray_generate.py``."""
    parser.add_argument(
        "--model", metavar="DIR|ID", help=f"checkpoint directory or {HUB_ID} (default: the small one in the package)"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", type=str, help="text; `-`, or no prompt with piped input, reads standard input")
    source.add_argument("--token-ids", type=numbers, metavar="IDS", help="comma-separated token ids instead of text")
    source.add_argument(
        "--prompts",
        metavar="FILE",
        help="one prompt per line (text, or JSON: a string, a list of token ids or messages, or an object with a "
        "prompt, an id and sampling parameters of its own; `-` reads standard input); prints a JSON line for each as "
        "soon as it is done, with its index",
    )
    source.add_argument(
        "--messages",
        metavar="FILE",
        help='answer a conversation: JSON, such as [{"role": "user", "content": "hi"}], or an object with messages, '
        "tools, reasoning_effort and so on; `-` reads standard input",
    )
    parser.add_argument("--out", metavar="FILE", help="append the lines of --prompts to this file instead")
    parser.add_argument(
        "--resume", action="store_true", help="keep --out, and run only the prompts that have no line in it"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="send the prompt as a user message in the chat format; with no prompt, on a terminal: a conversation",
    )
    parser.add_argument("--system", type=str, help="system message (with --chat)")
    parser.add_argument("--thinking", action="store_true", help="thinking mode: reason before answering (with --chat)")
    parser.add_argument(
        "--reasoning-effort",
        metavar="LEVEL",
        type=effort,
        help="thinking mode with this effort: low, high, max, or 1 to 100 for V4.1; none: no thinking (with --chat)",
    )
    parser.add_argument(
        "--tools",
        metavar="FILE",
        help="functions that the model may call: a JSON list in OpenAI's format; each call is one line of JSON "
        "(with --chat)",
    )
    parser.add_argument(
        "--allow-special",
        action="store_true",
        help="encode special tokens written in messages as such; by default they stay text (with --chat)",
    )
    sampling = parser.add_argument_group(
        "sampling", "The checkpoint's generation_config.json, where there is one, has other defaults."
    )
    sampling.add_argument(
        "--max-tokens",
        type=int,
        help=f"maximum number of new tokens (default: {DEFAULT_MAX_TOKENS})",
    )
    sampling.add_argument("--temperature", type=float, help="0 is greedy (default: 1)")
    sampling.add_argument("--top-k", type=int, help="sample from the K most likely tokens (default: all)")
    sampling.add_argument(
        "--top-p",
        type=float,
        help="sample from the most likely tokens up to this probability mass (default: 1)",
    )
    sampling.add_argument(
        "--min-p", type=float, help="drop tokens less likely than this share of the most likely one's (default: 0)"
    )
    sampling.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="above 1: tokens of the prompt and the output become less likely (default: 1)",
    )
    sampling.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="subtracted from the logits of tokens that occur in the output (default: 0)",
    )
    sampling.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="subtracted from a token's logit per occurrence in the output (default: 0)",
    )
    sampling.add_argument(
        "--logit-bias",
        type=bias,
        action="append",
        default=[],
        metavar="ID=X",
        help="added to the logit of this token; repeatable",
    )
    sampling.add_argument(
        "--allowed-token-ids", type=numbers, metavar="IDS", help="comma-separated ids of the only allowed tokens"
    )
    sampling.add_argument(
        "--bad-word", type=str, action="append", default=[], metavar="TEXT", help="never complete this word; repeatable"
    )
    sampling.add_argument("--seed", type=int, help="makes sampling reproducible")
    sampling.add_argument(
        "--n", type=int, default=1, help="completions of each prompt, with different random numbers (default: 1)"
    )
    sampling.add_argument(
        "--min-tokens", type=int, default=0, metavar="N", help="minimum number of new tokens (default: 0)"
    )
    sampling.add_argument(
        "--stop", type=str, action="append", default=[], metavar="TEXT", help="stop before this text; repeatable"
    )
    sampling.add_argument(
        "--stop-token-id", action="append", type=int, default=[], metavar="ID", help="stop after this token; repeatable"
    )
    structure = sampling.add_mutually_exclusive_group()
    structure.add_argument("--json-schema", metavar="FILE|JSON", help="the text is JSON of this schema")
    structure.add_argument("--regex", type=str, help="the whole text matches this regular expression")
    structure.add_argument("--choices", type=str, nargs="+", metavar="TEXT", help="the text is one of these")
    structure.add_argument("--grammar", metavar="FILE", help="the text matches this grammar, Lark or GBNF")
    sampling.add_argument("--ignore-eos", action="store_true", help="continue after the end-of-sequence token")
    sampling.add_argument("--include-stop-str-in-output", action="store_true", help="keep the stop string in the text")
    sampling.add_argument("--keep-special-tokens", action="store_true", help="keep special tokens in the text")
    sampling.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help="log-probability and rank of each new token, and the K most likely tokens, before sampling options",
    )
    sampling.add_argument("--prompt-logprobs", type=int, metavar="K", help="the same for the tokens of the prompt")
    parser.add_argument(
        "--speculate",
        type=int,
        default=0,
        metavar="N",
        help="speculative decoding: N draft tokens per step by the MTP layer or the DSpark drafter, same output",
    )
    add_record_options(parser)
    add_runner_options(parser)


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    with joined_ranks(args) as ranks:
        return complete(args, ranks)


def complete(args: argparse.Namespace, ranks: Parallel) -> int:
    """Runs the command on every rank; rank 0 reads the prompts and shares them."""
    from deepseek_attn.cli.batch import complete_all, open_batch
    from deepseek_attn.engine.completion import RequestFailed
    from deepseek_attn.engine.llm import LLM
    from deepseek_attn.runner.token_records import TokenRecords
    from deepseek_attn.utils.files import check_output

    params = sampling_params(args)
    conversation, prompt, batch, options = is_conversation(args), None, None, runner_options(args)
    with ExitStack() as stack:
        if ranks.rank == 0:
            check_records(args, single=args.prompts is None and args.n == 1)
            if args.profile is not None:
                check_output(args.profile, "no trace can be written to")
        if conversation:
            options["max_snapshots"] = args.max_snapshots or CONVERSATION_SNAPSHOTS
        elif ranks.rank == 0 and args.prompts:
            batch = stack.enter_context(open_batch(args, params))
        elif ranks.rank == 0:
            prompt = read_input(args)
        is_complete, plain = (False, True) if batch is None else (batch.is_complete, batch.uses_flags)
        prompt, is_complete, plain = ranks.share((prompt, is_complete, plain))
        if is_complete:
            return 0 if batch is None else batch.finish()

        replay = None if args.replay is None or args.prompts else TokenRecords.load(replay_file(args.replay))

        def before_load(prompts: Prompts) -> None:
            nonlocal prompt, params
            if args.chat and prompt is not None:
                chat = conversation_of(args, prompt)
                prompt, explanation = prompts.chat(chat.messages, **chat.options)
                params = prompts.chat_params(chat, params)
                say(f"chat: {explanation}")
            if plain:
                checked: Any = [0] if prompt is None else prompt  # a conversation has become token ids
                prompts.check(checked, params, replay)

        model = args.model or default_checkpoint()
        llm = LLM(model, speculate=args.speculate, before_load=before_load, **options)
        if ranks.rank == 0:
            show_report(llm.runner, args)
        stack.enter_context(observed(llm.engine, args))
        if args.prompts:
            return complete_all(llm, batch, params, args, ranks)
        if conversation:
            return converse(llm, params, args)
        record = record_arguments(llm, args.records)
        try:
            if params.n > 1:
                completion = show_completions(llm, prompt, params, replay, record)
            else:
                stream = llm.stream(prompt, params, progress=True, replay=replay, **record)
                completion = show_answer(stream, llm, args.chat)
            say_recorded(completion, args.records)
        except RequestFailed as error:
            say(f"\ndeepseek-attn generate: the request failed: {error}")
            return 1
    return 0


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    from deepseek_attn.engine.sampling import SamplingParams

    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        seed=args.seed,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_id),
        ignore_eos=args.ignore_eos,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=dict(args.logit_bias),
        allowed_token_ids=args.allowed_token_ids,
        bad_words=args.bad_word,
        json_schema=schema(args.json_schema),
        regex=args.regex,
        choices=args.choices,
        grammar=None if args.grammar is None else read_text("--grammar", args.grammar),
        min_tokens=args.min_tokens,
        n=args.n,
        include_stop_str_in_output=args.include_stop_str_in_output,
        skip_special_tokens=not args.keep_special_tokens,
        logprobs=args.logprobs,
        prompt_logprobs=args.prompt_logprobs,
    )


def schema(given: str | None) -> str | None:
    """The JSON text of ``--json-schema``, given directly or as a file. ValueError: not readable, or not JSON."""
    if given is None:
        return None
    inline = given.lstrip().startswith("{")
    text = given if inline else read_text("--json-schema", given)
    parse_json(text, "--json-schema" if inline else f"--json-schema {given}")
    return text


def bias(text: str) -> tuple[int, float]:
    """The token id and the number of ``ID=X``."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a token id and a number, such as 42=-1.5") from None


def is_conversation(args: argparse.Namespace) -> bool:
    """Whether turns are typed on this terminal: ``--chat`` without a prompt."""
    given = (args.prompt, args.token_ids, args.prompts, args.messages)
    return args.chat and all(source is None for source in given) and sys.stdin is not None and sys.stdin.isatty()


def check_flags(args: argparse.Namespace) -> None:
    problems = []
    args.chat = args.chat or args.messages is not None
    if not args.chat:
        problems += [
            f"{flag} needs --chat"
            for flag, on in (
                ("--system", args.system is not None),
                ("--thinking", args.thinking),
                ("--reasoning-effort", args.reasoning_effort is not None),
                ("--tools", args.tools is not None),
                ("--allow-special", args.allow_special),
            )
            if on
        ]
    elif args.token_ids is not None:
        problems.append("--chat takes text; --token-ids are run as they are")
    if args.messages is not None and args.system:
        problems.append("--system beside --messages: write the system message into the file, as its first")
    if args.out is not None and args.prompts is None:
        problems.append("--out is for the lines of --prompts")
    if args.resume and args.out is None:
        problems.append("--resume goes on from the lines of --out: name that file")
    if (args.records or args.replay) and is_conversation(args):
        problems.append("--records and --replay are of prompts, not of a conversation: use --prompt or --messages")
    if args.n > 1 and is_conversation(args):
        problems.append("--n: an answer in a conversation is one: use --prompt or --messages")
    if args.tensor_parallel > 1 and is_conversation(args):
        problems.append(
            "a conversation on a terminal is one process: with --tensor-parallel, use --prompt or --messages"
        )
    if problems:
        raise ValueError("; ".join(problems))
    if isinstance(args.tools, str):
        args.tools = read_tools(args.tools)


def effort(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def read_input(args: argparse.Namespace) -> str | list | Chat:
    """The conversation of ``--messages``, or one prompt."""
    return read_prompt(args) if args.messages is None else read_messages(args.messages)


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt of ``--prompt`` or ``--token-ids``, from standard input, or the default one."""
    if args.token_ids is not None:
        return args.token_ids
    prompt = args.prompt
    piped_in = sys.stdin is not None and not sys.stdin.isatty()
    if prompt == "-" or (prompt is None and piped_in):
        piped = read_text("--prompt", "-")
        # without --prompt, an empty standard input (a script, a service) does not mean an empty prompt
        prompt = piped if piped or prompt == "-" else None
    if prompt is None:
        prompt = DEFAULT_PROMPT
        say(f"prompt: {prompt}")
    if not prompt:
        raise ValueError("empty prompt: write some text after --prompt, or pipe it in")
    return prompt


def default_checkpoint() -> Path:
    """The trained checkpoint in the package, used when no model is named (docs/training.md)."""
    say(f"model: {SMALL_CHECKPOINT} (a small DeepSeek-V4 that has read Jane Austen's novels: sentences, little sense)")
    return SMALL_CHECKPOINT
