"""Options of a runner: the keyword arguments that `LLM` and the constructors of `ModelRunner` share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch

from deepseek_attn.checkpoint.hub import PretrainedSource
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.options import is_integer
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.runner.build import build_runner
from deepseek_attn.runner.prompts import shown


class RunnerOptions(TypedDict, total=False):
    """Keyword arguments of `LLM`, `ModelRunner.from_pretrained`, `from_config` and `from_source`; each may be left out.

    The defaults are the defaults of `build_runner`; `help(LLM)` shows them.

    Attributes:
        device: default: the first GPU if there is one, else the CPU.
        dtype: default: float32 on a CPU, bfloat16 on a GPU.
        numerics: ``exact``, ``official`` or ``serving``; default: exact on a CPU, serving on a GPU.
        index_keys: ``fp8``, or ``fp4`` of V4 and V4.1: 68 bytes an entry instead of 132, as DeepSeek's own code keeps
            them; default: the format of the numerics. docs/support.md has the savings and the costs.
        backend, decode_backend, prefill_backend, fp8_mode, prefill_workspace_rows: see `AttentionOptions`.
        layers: backbone layers to load; all other layers (and the MTP layer) are left out of the model.
        attention_only: load attention layers and their norms, nothing else.
        max_model_len: longest sequence; default: the model's, at most 32768.
        max_num_seqs: sequences with pages at the same time, each up to ``max_model_len``.
        max_num_batched_tokens: new tokens of one step, over all sequences.
        max_rollback: tokens that ``truncate`` rolls back without recomputing.
        max_snapshots: prefixes that an engine keeps for later requests; 0 disables prefix reuse.
        kv_cache_bytes: bytes of all caches; default: enough for ``max_num_seqs`` sequences of ``max_model_len``.
        expert_memory: where routed experts are kept: ``gpu``, all on the device; ``host``, in pinned host memory; or
            ``disk``, in the checkpoint's files. With the last two the device keeps a part of them, and results have the
            same bits. docs/expert_memory.md has the costs.
        expert_cache_bytes: bytes of experts that the GPU (of a CPU: RAM) keeps with ``host`` and ``disk``; default: by
            the memory that is free.
        cuda_graphs: replay decode steps as CUDA graphs, captured when a size is first met; default: where every op
            of the step has a kernel, but for DeepSeek-V4.1, whose graphs wait until all Engram rows have been read.
            On a CPU: False also computes every step as it is; by default, later decode steps of one token (with
            ``deterministic`` all later tokens) repeat the recorded operations of an earlier one, with the same bits.
        deterministic: a row's logits (the bits) do not depend on its batch, chunks of its prompt, preemption, prefix
            reuse, drafts, or whether a step is a CUDA graph; refused where that cannot be kept. docs/reliability.md
            has the cost.
        parallel: the ranks that share the model (`parallel.launched`); all of them must make the same calls;
            default: none.
        expected_drafts: tokens that the MTP layer will draft per step; `LLM` sets it. Kernels of such steps are
            compiled ahead too.
        approximate_prefill: of DeepSeek-V4.1: layers above the last one that makes entries compute one window of a
            prompt's rows, as other engines do, instead of all the rows that exact results need. docs/v41.md has the
            error and the gain.
        compile_ahead: on a GPU, compile the kernels of all steps within these limits while weights are loaded, in
            processes of their own. Default: `LLM` does, unless ``DEEPSEEK_ATTN_COMPILE_AHEAD=0``; a `ModelRunner`
            does with ``DEEPSEEK_ATTN_COMPILE_AHEAD=1``.
        progress: show bars with the bytes of the weights that are loaded, and with kernels that a launch waits for, on
            a terminal.
    """

    device: torch.device | str | None
    dtype: torch.dtype | str | None
    numerics: str | Numerics | None
    index_keys: str | None
    backend: str
    decode_backend: str | None
    prefill_backend: str | None
    fp8_mode: str
    prefill_workspace_rows: int | None
    layers: Iterable[int] | None
    attention_only: bool
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_rollback: int
    max_snapshots: int
    kv_cache_bytes: int | None
    expert_memory: str
    expert_cache_bytes: int | None
    cuda_graphs: bool | None
    deterministic: bool
    parallel: Parallel | None
    expected_drafts: int
    approximate_prefill: bool
    compile_ahead: bool
    progress: bool


F = TypeVar("F", bound=Callable[..., Any])


def lists_options(**defaults: object) -> Callable[[F], F]:
    """Decorator by which ``help`` and notebooks list and explain a runner's options in place of ``**options``.

    Args:
        defaults: default values of this function that differ from `build_runner`'s.
    """

    def listed(function: F) -> F:
        signature = inspect.signature(function)
        shared = [p for p in inspect.signature(build_runner).parameters.values() if p.kind is p.KEYWORD_ONLY]
        shared = [p.replace(default=defaults.get(p.name, p.default)) for p in shared]
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*parameters, *shared])  # pyright: ignore[reportAttributeAccessIssue]  # read by inspect.signature
        texts = explanations()
        lines = [f"    {p.name}={p.default!r}: {texts.get(p.name, '')}" for p in shared]  # none with python -OO
        function.__doc__ = "\n".join(
            [inspect.getdoc(function) or "", "", "Options, with their defaults:", *lines]
        ).strip()
        return function

    return listed


@cache
def explanations() -> dict[str, str]:
    """The explanation of each option, from the docstrings of `AttentionOptions` and `RunnerOptions`."""
    texts: dict[str, str] = {}
    for options in (RunnerOptions, AttentionOptions):
        attributes = (inspect.getdoc(options) or "").partition("Attributes:\n")[2]
        for names, text in re.findall(r"^    ([\w, ]+): (.*?)(?=^    \w|\Z)", attributes, re.MULTILINE | re.DOTALL):
            if not text.startswith("see `AttentionOptions`"):
                for name in names.split(", "):
                    texts.setdefault(name, text.rstrip())
    return texts


def is_a(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def are_integers(values: Any) -> bool:
    """Whether the values are integers, as far as can be seen without reading an iterator."""
    if not isinstance(values, Collection):
        return isinstance(values, Iterable)
    return not isinstance(values, str) and all(map(is_integer, values))


NONE = type(None)
SWITCHES = ("attention_only", "deterministic", "approximate_prefill", "compile_ahead", "progress")
SIZES = ("max_num_seqs", "max_num_batched_tokens", "max_rollback", "max_snapshots", "seed")
OPTIONAL_SIZES = ("max_model_len", "kv_cache_bytes", "prefill_workspace_rows", "expert_cache_bytes")
IMPL = "the name of an impl, which `info` lists"
TYPES: dict[tuple[str, ...], tuple[Callable[[Any], bool], str]] = {
    SWITCHES: (is_a(bool), "True or False"),
    ("cuda_graphs",): (is_a(bool, NONE), "True, False or None"),
    ("parallel",): (is_a(Parallel, NONE), "of `parallel.launched`, or None"),
    ("device",): (is_a(str, torch.device, NONE), "cpu, cuda or cuda:N as text, a torch.device, or None"),
    ("dtype",): (is_a(str, torch.dtype, NONE), "the name of a dtype, a torch.dtype, or None"),
    ("numerics",): (is_a(str, Numerics, NONE), "the name of a preset, a Numerics, or None"),
    ("backend",): (is_a(str), IMPL),
    ("decode_backend", "prefill_backend"): (is_a(str, NONE), IMPL),
    ("fp8_mode", "expert_memory"): (is_a(str), "a name"),
    ("index_keys",): (is_a(str, NONE), "a name, or None"),
    ("layers",): (lambda value: value is None or are_integers(value), "a list of numbers of layers, or None"),
    SIZES: (is_integer, "an integer"),
    OPTIONAL_SIZES: (lambda value: value is None or is_integer(value), "an integer, or None"),
    ("expected_drafts",): (lambda value: is_integer(value) and value >= 0, "an integer of at least 0"),
}


def check_runner_options(where: str, options: Mapping[str, object], *others: str) -> None:
    """Raises ValueError for names that are not options of a runner, and for values of another type.

    Ranges of sizes, and names of devices, formats and impls, are checked where they are used.

    Args:
        where: the function that was given ``options``, for the message; others: its own keyword arguments.
    """
    known = {*RunnerOptions.__annotations__, *others}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"{where}: no such options: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    problems = [
        f"{name}={shown(options[name])}: must be {expected}"
        for names, (fits, expected) in TYPES.items()
        for name in names
        if name in options and not fits(options[name])
    ]
    if problems:
        raise ValueError("invalid options:\n  - " + "\n  - ".join(problems))


def open_pretrained(model: str | Path, options: RunnerOptions) -> PretrainedSource:
    """The tensors of a checkpoint that these options need. ``layers`` of the options becomes a list, read once."""
    source = PretrainedSource(model, options.get("layers"), options.get("attention_only", False))
    options["layers"] = source.layers
    return source
