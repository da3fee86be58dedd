"""Options that several commands share."""

from __future__ import annotations

import argparse
import os
import re
import reprlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from deepseek_attn.config.defaults import MAX_COMPLETIONS, MAX_SNAPSHOTS, REPETITION_PENALTIES
from deepseek_attn.utils.terminal import visible

if TYPE_CHECKING:
    from deepseek_attn.impls.options import AttentionOptions
    from deepseek_attn.kernels.common.device import GPU

HUB_ID = "hub id (org/name or org/name@revision)"  # in the help of --model


def add_runner_options(parser: argparse.ArgumentParser) -> None:
    """Adds options for loading and running a model; `runner_options` reads them back."""
    group = parser.add_argument_group("running")
    group.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    add_numerics_options(group)
    add_attention_options(group)
    add_deterministic_option(group)
    add_expert_options(group)
    add_trailing_option(group)
    add_limits(group)


EXPERTS = ("expert_memory", "expert_cache_bytes")
SWITCHES = ("deterministic", "approximate_prefill")
ATTENTION = ("backend", "decode_backend", "prefill_backend", "fp8_mode", "prefill_workspace_rows")


def add_attention_options(parser: argparse._ActionsContainer) -> None:
    """Adds options for `AttentionOptions`; ``deepseek-attn info`` explains their defaults."""
    parser.add_argument(
        "--backend", default="auto", help="attention impl: auto, a name that `info` lists, or module:Class"
    )
    for phase in ("decode", "prefill"):
        parser.add_argument(f"--{phase}-backend", metavar="BACKEND", help=f"impl of {phase} (default: --backend)")
    add_prefill_options(parser)


def add_deterministic_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="logits whose bits do not depend on batch, chunks, preemption, prefix reuse or drafts; slower",
    )


def add_expert_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--expert-memory",
        choices=("gpu", "host", "disk"),
        default="gpu",
        help="keep routed experts on the device, in pinned host memory, or in the checkpoint's files (default: gpu)",
    )
    parser.add_argument(
        "--expert-cache-bytes",
        type=memory_size,
        metavar="BYTES",
        help="experts cached on the GPU, or in RAM for a CPU, if all are kept elsewhere (default: by free memory)",
    )


def add_trailing_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--approximate-prefill",
        action="store_true",
        help="V4.1: layers above the last one that makes entries compute one window of a prompt (docs/v41.md)",
    )


def add_prefill_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--fp8-mode",
        choices=("auto", "mixed", "separate"),
        default="auto",
        help="prefill reads cache pages in place (mixed) or gathers them to rows first (separate); default: auto",
    )
    parser.add_argument(
        "--prefill-workspace-rows",
        type=int,
        metavar="N",
        help="rows that keys of prefill requests are gathered to (default: 4 requests of full length)",
    )


def attention_options(args: argparse.Namespace) -> AttentionOptions:
    """The flags of `add_prefill_options`, for commands without a backend."""
    from deepseek_attn.impls.options import AttentionOptions

    return AttentionOptions(fp8_mode=args.fp8_mode, prefill_workspace_rows=args.prefill_workspace_rows)


def add_numerics_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--numerics", choices=("exact", "official", "serving"), help="default: exact on a CPU, serving on a GPU"
    )
    parser.add_argument(
        "--index-keys",
        choices=("fp8", "fp4"),
        help="format of the indexer's keys; fp4 (V4, V4.1) halves the bytes of a selection (default: the numerics')",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU")


LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_snapshots", "kv_cache_bytes")


def add_limits(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="maximum sequence length (default: the model's, up to 32768)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=8, metavar="N", help="sequences per batch (default: 8)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, metavar="N", help="new tokens per step (default: 2048)"
    )
    parser.add_argument(
        "--max-snapshots",
        type=int,
        default=0,
        metavar="N",
        help="snapshots in the prefix cache (default: 0, no prefix cache)",
    )
    parser.add_argument(
        "--kv-cache-bytes",
        type=memory_size,
        metavar="BYTES",
        help="memory of all KV caches, for instance 20GB (default: every sequence at its maximum length)",
    )


def runner_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `ModelRunner.from_pretrained`; ValueError for a device that is not there.

    Call it before files are read.
    """
    if args.device is not None:
        from deepseek_attn.config.options import pick_device

        pick_device(args.device)
    names = ("device", "numerics", "index_keys", "dtype", *ATTENTION, *EXPERTS, "parallel", *LIMITS)
    options = {name: getattr(args, name, None) for name in names}
    chosen = {"fp8_mode": options["fp8_mode"] or "auto", "expert_memory": options["expert_memory"] or "gpu"}
    return options | chosen | {name: bool(getattr(args, name, False)) for name in SWITCHES}


def integer(text: str) -> int:
    """Type of a flag: a signed 64-bit integer."""
    try:
        value = int(text)
        if abs(value) < 2**64:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a 64-bit integer")


def numbers(text: str) -> list[int]:
    """Type of a flag: integers separated by commas."""
    try:
        return [integer(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)}: write integers with commas between them") from None


def fractions(text: str) -> list[float]:
    """Type of a flag: real numbers separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)}: write numbers with commas between them") from None


def layer_numbers(text: str) -> list[int]:
    """Type of a flag: layer numbers separated by commas; a range ``5-7`` includes both ends."""

    def whole(ends: re.Match) -> str:
        first, last = int(ends[1]), int(ends[2])
        if first > last:
            raise argparse.ArgumentTypeError(f"{ends[0]}: a range goes from its smaller number on")
        return ",".join(map(str, range(first, last + 1)))

    return numbers(re.sub(r"(?<![\w-])(\d{1,5})-(\d{1,5})(?![\w-])", whole, text) if len(text) < 10_000 else text)


GPUS = {
    "a100": ((8, 0), 108), "l40s": ((8, 9), 142), "h100": ((9, 0), 132), "h200": ((9, 0), 132), "b200": ((10, 0), 148),
    "rtx5090": ((12, 0), 170),
}  # fmt: skip
"""GPUs by name: compute capability and multiprocessors. The H100 is the SXM one."""
GPU_NAMES = ", ".join(GPUS)


def gpu_facts(text: str) -> GPU:
    """Type of a flag: a name in `GPUS`, or compute capability and multiprocessors, ``9.0:132``."""
    from deepseek_attn.kernels.common.device import GPU
    from deepseek_attn.kernels.common.dispatch import MIN_CAPABILITY

    if text in GPUS:
        return GPU(*GPUS[text])
    match = re.fullmatch(r"(\d{1,3})\.(\d):(\d{1,6})", text)
    if match is None or not int(match[3]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a known GPU: choose from {GPU_NAMES}, or write for instance 9.0:132"
        )
    capability = int(match[1]), int(match[2])
    if capability < MIN_CAPABILITY:
        raise argparse.ArgumentTypeError(
            f"{text!r}: kernels need compute capability {'.'.join(map(str, MIN_CAPABILITY))} or later; older GPUs run "
            "plain torch"
        )
    return GPU(capability, int(match[3]))


def names(text: str) -> list[str]:
    """Type of a flag: texts separated by commas."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: write names with commas between them")
    return found


def nonempty(text: str) -> str:
    """Type of a flag that names something: a file, a preset, a device."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give a value, or leave the flag out")
    return text


MOST = 2**63 - 1  # of a size
MOST_DRAFTS = 15
PEBIBYTE = 2**50
BOUNDS: dict[str, tuple[float, float]] = {
    "--batch": (1, MOST),
    "--context": (1, MOST),
    "--prefill": (1, MOST),
    "--query-tokens": (1, MOST),
    "--prompt": (2, MOST),  # of ``bench engine``, as the next one
    "--tokens": (2, MOST),
    "--vocab": (1, 2**22),
    "--drafts": (0, MOST_DRAFTS),
    "--acceptance": (0, 1),
    "--speculate": (0, MOST_DRAFTS),
    "--instances": (1, MOST),
    "--nearest": (1, MOST),
    "--minutes": (0.1, MOST),
    "--repeats": (1, MOST),
    "--layers": (0, MOST),
    "--experts": (1, MOST),
    "--vocab-size": (1, MOST),
    "--max-tokens": (1, MOST),
    "--max-model-len": (1, MOST),
    "--max-num-seqs": (1, MOST),
    "--max-num-batched-tokens": (1, MOST),
    "--max-snapshots": (0, MAX_SNAPSHOTS),
    "--prefill-workspace-rows": (1, MOST),
    "--chunk-size": (1, MOST),
    "--top": (1, MOST),
    "--kv-cache-bytes": (1, PEBIBYTE),
    "--expert-cache-bytes": (1, PEBIBYTE),
    "--host-memory": (1, PEBIBYTE),
    "--disk-rate": (1, PEBIBYTE),
    "--memory": (1, PEBIBYTE),
    "--temperature": (0, MOST),
    "--top-k": (0, MOST),
    "--top-p": (0, 1),
    "--min-p": (0, 1),
    "--repetition-penalty": REPETITION_PENALTIES,
    "--presence-penalty": (-2, 2),
    "--frequency-penalty": (-2, 2),
    "--allowed-token-ids": (0, MOST),
    "--min-tokens": (0, MOST),
    "--n": (1, MAX_COMPLETIONS),
    "--logprobs": (0, 1024),
    "--prompt-logprobs": (0, 1024),
    "--seed": (0, 2**64 - 1),
    "--stop-token-id": (0, MOST),
    "--token-ids": (0, MOST),
    "--tensor-parallel": (1, 2**16),
    "--rank-timeout": (1, 7 * 24 * 3600),
    "--ranks": (1, 2**16),
    "--gpus-per-host": (1, 2**16),
    "--jobs": (1, 2**16),
    "--stats": (0, 1e9),
    "--shards": (1, MOST),
    "--gap": (0, MOST),
    "--steps": (1, MOST),
    "--seq-len": (1, MOST),
    "--lr": (0, 1e6),
    "--weight-decay": (0, 1e6),
    "--mtp-steps": (1, MOST),
    "--mtp-lr": (0, 1e6),
    "--mtp-depth": (1, MOST),
    "--budget": (0.001, 1e9),
    "--port": (0, 65535),
    "--actors": (1, 2**16),
    "--gpus": (0, 2**16),
    "--cpus": (0, 2**16),
}
"""Least and greatest value of every flag that takes a number, or several. What depends on a model, or on another flag,
is checked where that is known."""


def check_bounds(args: argparse.Namespace) -> None:
    """Raises ValueError for a number outside of `BOUNDS`."""
    for flag, (least, most) in BOUNDS.items():
        value = getattr(args, flag[2:].replace("-", "_"), None)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, (int, float)) and not least <= number <= most:  # NaN is outside, too
                finite = " and finite" * isinstance(number, float)
                supported = f"at least {least}{finite}" if most == MOST else f"{least:g} to {int(most)}"
                raise ValueError(f"{flag} {number}: must be {supported}")


WRITTEN = ("out", "json", "records", "profile", "plot", "write")
READ = ("model", "config", "prompts", "messages", "tools", "json_schema", "grammar", "token_ids")
READ += ("replay", "text", "outputs")


def check_files(args: argparse.Namespace) -> None:
    """Raises ValueError if one flag would replace a file or folder that another flag reads."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    for output in (name for name in WRITTEN if isinstance(given.get(name), str) and os.path.exists(given[name])):
        for name in READ:
            for path in given[name] if isinstance(given.get(name), list) else [given.get(name)]:
                if isinstance(path, str) and os.path.exists(path) and os.path.samefile(path, given[output]):
                    raise ValueError(
                        f"--{output} {given[output]} would replace a file that --{name.replace('_', '-')} reads: name "
                        "another place"
                    )


class Parser(argparse.ArgumentParser):
    """Parser of the command line and of each command.

    Text flags must be `nonempty` unless they have ``type=str``; integer flags must fit 64 bits (`integer`). Flags are
    written out. An unknown argument is an error that shows the usage of its command and the nearest flag.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)
        self._given: Sequence[str] = ()
        self.register("type", None, nonempty)
        self.register("type", int, integer)

    def parse_known_args(self, args=None, namespace=None, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        self._given = sys.argv[1:] if args is None else args
        parsed, unknown = super().parse_known_args(args, namespace, **kwargs)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        super().error(visible("; ".join([message, *self._nearest()])))

    def _nearest(self) -> list[str]:
        """For each given flag that does not exist, the flags that it begins, or the most similar one."""
        known, found = self._option_string_actions, []
        for flag in (word.partition("=")[0] for word in takewhile(lambda word: word != "--", self._given)):
            if flag.startswith("--") and flag not in known:
                near = [name for name in known if name.startswith(flag)] or get_close_matches(
                    flag.replace("_", "-"), known, n=1, cutoff=0.7
                )
                found += [f"did you mean {' or '.join(near)} instead of {flag}?"] if near else []
        return found

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        """Writes help or an error; unlike argparse's, raises OSError if standard output cannot take the help."""
        if file is not None and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def add_subparsers(self, **kwargs: Any) -> argparse._SubParsersAction:
        action = super().add_subparsers(**kwargs)
        action.type = str  # for all arguments after the command's name
        return action


def read_text(flag: str, path: str) -> str:
    """The UTF-8 text of a file that a flag names; ``-`` reads standard input.

    Raises:
        ValueError: it cannot be read, or is not UTF-8 text.
    """
    try:
        if path != "-":
            return Path(path).read_text(encoding="utf-8")
        if sys.stdin is None:
            raise ValueError(f"{flag} {path}: standard input is closed")
        return sys.stdin.read()
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path}: not UTF-8 text ({error})") from error


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """``80GB``, ``141e9``, ``24GiB`` -> bytes."""
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*(?:e[0-9]{1,2})?)\s*([kmgt]i?)?b?\s*", text.lower())
    size = float(match[1]) * UNITS[match[2] or ""] if match else 0.0
    if not 1 <= size < 2**63:
        raise ValueError(f"{reprlib.repr(text)} is not an amount of memory: write for instance 80GB or 24GiB")
    return int(size)


def memory_size(text: str) -> int:
    """`parse_bytes` as the type of a flag."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
