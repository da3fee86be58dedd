"""A loaded model: weights, caches and all state that steps need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

import torch

from deepseek_attn.attention.builder import MetadataBuilder
from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.cache.manager import CacheManager
from deepseek_attn.cache.pools import CachePools
from deepseek_attn.cache.prefix import PrefixCache
from deepseek_attn.checkpoint.loader import LoadReport
from deepseek_attn.config.generation import GenerationConfig
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.kernels.common.dispatch import reference_ops
from deepseek_attn.kernels.common.invariance import batch_invariant_ops
from deepseek_attn.layers.engram import EngramTables
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.models.block import AttentionStack, Backbone, layer_specs
from deepseek_attn.models.host_rows import ExpertRows
from deepseek_attn.runner.ahead.compilation import Compilation, launching
from deepseek_attn.runner.cpu_threads import CpuThreads
from deepseek_attn.runner.drafting import Drafter
from deepseek_attn.runner.expert_files import ExpertFiles
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.sequence import TokenLimits
from deepseek_attn.runner.tapes import DecodeTapes
from deepseek_attn.runner.trailing import TrailingRows
from deepseek_attn.utils.sizes import show_bytes
from deepseek_attn.utils.torch_state import own_torch_state
from deepseek_attn.utils.turns import in_turn
from deepseek_attn.utils.workspace import Workspace

Model = Backbone | AttentionStack
FREED = (  # by `close`
    *("model", "pools", "workspace", "manager", "builder", "drafter", "prefixes", "graphs", "tables", "trailing"),
    *("expert_files", "expert_rows", "tapes"),
)


@dataclass(repr=False)
class LoadedModel:
    """A loaded model with its caches and all state that its steps need; a context manager that closes it.

    Attributes:
        report: tensors that were loaded, and ignored ones by rule.
        layout: pools and their sizes; `pools` are allocated from it.
        builder: builds the metadata of the backbone's steps.
        drafter: runs the MTP layer, or the DSpark stages; None without any.
        prefixes: prefixes that engines keep for later requests; None without ``max_snapshots``.
        trailing: which rows of prompts upper layers compute (V4.1); None: all layers compute all rows.
        graphs: decode steps over persistent tensors, captured as CUDA graphs; None: every step is eager.
        tapes: decode steps of one token on a CPU, recorded; None: every step is computed as it is.
        tables: looks rows of Engram tables up; None for a model without Engram layers.
        expert_files: caches of routed experts that stay in the checkpoint; None if the experts are elsewhere.
        expert_rows: rows on the GPU for experts in host memory; None if the experts are elsewhere.
        reference_only: every op runs in plain torch (``backend="reference"``).
        graph_problem: why decode steps cannot be captured; empty if they can.
        deterministic: a row's logits do not depend on the rest of the batch (`RunnerOptions`).
        parallel: the ranks that share the model; each has its runner.
        cpu_threads: chooses the threads of a step on a CPU.
        decode_query_len: a request of at most this many new tokens is a decode: it attends over pages in place, and its
            step may run over persistent tensors. 1, or 1 + drafts after `ModelRunner.expect_drafts`.
        directory: the checkpoint's folder; None for weights from elsewhere.
        generation: the checkpoint's sampling defaults; empty for weights from elsewhere.
        compilation: kernels being compiled ahead; None if all were cached, or if launches compile them.
        turns: of the threads that use the model.
    """

    config: AnyConfig
    numerics: Numerics
    dtype: torch.dtype
    device: torch.device
    model: Model
    report: LoadReport
    layout: CacheLayout
    pools: CachePools
    workspace: Workspace
    manager: CacheManager
    limits: TokenLimits
    builder: MetadataBuilder
    drafter: Drafter | None
    prefixes: PrefixCache | None
    graphs: DecodeGraphs | None
    tapes: DecodeTapes | None
    tables: EngramTables | None
    expert_files: ExpertFiles | None
    expert_rows: ExpertRows | None
    reference_only: bool
    graph_problem: str
    deterministic: bool
    trailing: TrailingRows | None
    parallel: Parallel
    cpu_threads: CpuThreads
    decode_query_len: int = 1
    directory: Path | None = None
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    compilation: Compilation | None = None

    def __post_init__(self) -> None:
        self.turns = self.manager.turns

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return self.generation.eos_of(self.config)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return "model" not in vars(self)

    @property
    def one_by_one(self) -> bool:
        """Each token of a step is computed by itself: deterministic where plain torch is part of a step.

        Its products and sums round by the number of rows, and its elementwise functions by the place of a row.
        """
        return self.deterministic and self.graph_problem != ""

    @contextmanager
    def op_settings(self, tokens: int | None = None) -> Iterator[None]:
        """Context that applies this runner's options to ops; steps and the graphs of steps are made in it.

        Args:
            tokens: new tokens of a step, for which threads of a CPU are chosen; None: the caller's threads.
        """
        threads = nullcontext() if tokens is None or self.device.type != "cpu" else self.cpu_threads.step(tokens)
        invariant = batch_invariant_ops(self.deterministic and self.device.type != "cpu")
        reference = reference_ops(self.reference_only)
        with own_torch_state(), threads, self.parallel.together(), reference, invariant, launching(self.compilation):
            yield

    @in_turn
    def close(self) -> None:
        """Frees weights, caches, scratch memory and CUDA graphs. Everything that needs them then raises RuntimeError.

        Layers and tensors that are still referenced elsewhere stay; a sequence keeps its tokens only. Closing again
        does nothing.
        """
        if self.closed:
            return
        if self.compilation is not None:
            self.compilation.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a prelaunched step may still run
        if self.expert_files is not None:
            self.expert_files.close()
        self.pools.clear()  # sequences and engines hold the manager, which holds the pools
        for name in FREED:
            del vars(self)[name]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        facts = [self.config.model_type]
        if self.closed:
            return f"{type(self).__name__}({facts[0]}, closed)"
        specs = layer_specs(self.model)
        num_mtp = sum(spec.is_mtp for spec in specs)
        facts.append(f"{len(specs) - num_mtp} of {self.config.num_hidden_layers} layers")
        if isinstance(self.model, AttentionStack):
            facts.append("attention only")
        facts.append(f"{num_mtp} MTP" if num_mtp else "no MTP")
        facts += [str(self.dtype).removeprefix("torch."), f"{self.numerics.name} numerics", str(self.device)]
        facts += ["deterministic"] if self.deterministic else []
        facts.append(f"{show_bytes(sum(p.nbytes for p in self.model.parameters()))} of weights")
        facts.append(f"{show_bytes(self.layout.nbytes())} of caches")
        if self.parallel.world > 1:
            facts.append(f"rank {self.parallel.rank} of {self.parallel.world}")
        return f"{type(self).__name__}({', '.join(facts)})"

    def whole_model(self) -> Backbone:
        """The model with its head; ValueError for attention layers alone."""
        if isinstance(self.model, AttentionStack):
            raise ValueError("this runner holds attention layers only (attention_only=True): load the model to run it")
        return self.model

    if not TYPE_CHECKING:  # type checkers know which attributes there are

        def __getattr__(self, name: str) -> NoReturn:
            if name in FREED:
                raise RuntimeError("this model was closed, and its weights and caches are freed: load it again")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
