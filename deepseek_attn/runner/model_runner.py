"""ModelRunner: a scheduled batch in, logits out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from deepseek_attn.attention.builder import StepInput
from deepseek_attn.cache.files import load_cache, make_fingerprint
from deepseek_attn.cache.layout import CacheLayout, make_layout
from deepseek_attn.cache.manager import CacheManager, OutOfPages, SequenceCache
from deepseek_attn.cache.pools import CachePools
from deepseek_attn.cache.prefix import PrefixCache
from deepseek_attn.checkpoint.loader import LoadReport, load_model
from deepseek_attn.checkpoint.random import RandomSource
from deepseek_attn.checkpoint.source import CheckpointSource, SafetensorsSource
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.options import (
    DEFAULT_MAX_MODEL_LEN,
    as_list,
    check_sizes,
    explain_out_of_memory,
    is_integer,
    pick_device,
    pick_dtype,
)
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.common.dispatch import reference_ops
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.models.block import AttentionStack, layer_specs
from deepseek_attn.models.deepseek_v4 import DeepseekV4
from deepseek_attn.models.deepseek_v32 import DeepseekV32
from deepseek_attn.models.families import Family, get_family
from deepseek_attn.models.moe import MoE
from deepseek_attn.runner.drafting import draft_logits, draft_tokens
from deepseek_attn.runner.graphs import DecodeGraphs, DecodeRun, Guesses
from deepseek_attn.runner.scoring import score_prompts
from deepseek_attn.runner.sequence import Sequence
from deepseek_attn.runner.step import Batch, EagerStep, StepOptions, StepOutput, check_batch
from deepseek_attn.utils.tracing import traced
from deepseek_attn.utils.workspace import Workspace
from deepseek_attn.v32.step_metadata import TokenStepMetadata

T = TypeVar("T")
DEFAULT_OPTIONS = StepOptions()


@dataclass
class ModelRunner:
    """A loaded model with its caches. Make one with `from_pretrained` or `from_config`.

    Attributes:
        layout: pools and their sizes; `pools` is what was allocated from it.
        report: what the loader read and what it ignored, by rule.
        prefixes: prefixes that engines keep for later requests; None without ``max_snapshots``.
        graphs: decode steps over persistent tensors, captured as CUDA graphs; None: every step is eager.
        reference_only: every op runs in plain torch (``backend="reference"``).
        graph_problem: why decode steps cannot be captured here; empty where they can.
        parallel: the ranks that share the model; each has a runner of its own.
    """

    config: AnyConfig
    numerics: Numerics
    dtype: torch.dtype
    device: torch.device
    model: DeepseekV4 | DeepseekV32 | AttentionStack
    report: LoadReport
    layout: CacheLayout
    pools: CachePools = field(repr=False)
    workspace: Workspace = field(repr=False)
    manager: CacheManager = field(repr=False)
    prefixes: PrefixCache | None = field(default=None, repr=False)
    graphs: DecodeGraphs | None = field(default=None, repr=False)
    reference_only: bool = False
    graph_problem: str = ""
    parallel: Parallel = field(default_factory=Parallel.single)

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, progress: bool = True, **options) -> ModelRunner:
        """Loads a checkpoint directory in the published format (or with transformers' tensor names).

        Args:
            directory: holds ``config.json`` and safetensors shards.
            progress: show a bar with the bytes read, on a terminal.
            options: those of `from_source`.

        Raises:
            ValueError: what is wrong with the directory, the config, the tensors or the options; nothing is allocated.
        """
        directory = Path(directory)
        if not directory.exists():
            raise ValueError(f"no checkpoint at {str(directory)!r}: the directory does not exist")
        if not directory.is_dir():
            raise ValueError(f"{str(directory)!r} is a file; a checkpoint is a directory with config.json and shards")
        config = ModelConfig.from_pretrained(directory)
        with SafetensorsSource(directory) as source:
            return cls.from_source(config, source, progress=progress, **options)

    @classmethod
    def from_config(cls, config: AnyConfig | str | Path, *, seed: int = 0, **options) -> ModelRunner:
        """Random weights for a config: the same tensors that ``make-checkpoint`` would write for this seed."""
        if isinstance(config, (str, Path)):
            config = ModelConfig.from_pretrained(config)
        if not isinstance(config, AnyConfig):
            raise ValueError(
                f"config is a {type(config).__name__}: pass a preset's name, a path or a ModelConfig "
                "(ModelConfig.from_dict makes one)"
            )
        return cls.from_source(config, RandomSource(config, seed), progress=False, **options)

    @classmethod
    def from_source(
        cls,
        config: AnyConfig,
        source: CheckpointSource,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        numerics: str | Numerics | None = None,
        backend: str = "auto",
        layers: Iterable[int] | None = None,
        attention_only: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 2048,
        max_rollback: int = 16,
        max_snapshots: int = 0,
        kv_cache_bytes: int | None = None,
        cuda_graphs: bool | None = None,
        parallel: Parallel | None = None,
        progress: bool = True,
    ) -> ModelRunner:
        """Builds the model, loads it tensor by tensor, allocates the caches and reserves scratch memory.

        Args:
            device: default: the first GPU if there is one, else the CPU.
            dtype: default: float32 on a CPU, bfloat16 on a GPU.
            numerics: ``exact``, ``official`` or ``serving``; default: exact on a CPU, serving on a GPU.
            backend: attention impl, ``auto`` or a name that ``deepseek-attn info`` lists.
            layers: backbone layers to load; the others (and the MTP layer) are left out of the model.
            attention_only: load attention layers and their norms, nothing else.
            max_model_len: longest sequence; default: the model's, at most 32768.
            max_num_seqs: sequences with pages at the same time, each up to ``max_model_len``.
            max_num_batched_tokens: new tokens of one step, over all sequences.
            max_rollback: tokens that ``truncate`` takes back without recomputing.
            max_snapshots: prefixes that an engine keeps for later requests; 0 turns prefix reuse off.
            kv_cache_bytes: bytes of all caches; default: what ``max_num_seqs`` sequences of ``max_model_len`` need.
            cuda_graphs: replay decode steps as CUDA graphs, captured when a size is first met; default: where every op
                of the step has a kernel.
            parallel: the ranks to share the model with (`parallel.launched`), all of which must do the same calls;
                default: none.

        Raises:
            ValueError: listing what is wrong with the options, or with the tensors of ``source``.
        """
        device = pick_device(device)
        dtype = pick_dtype(dtype, device)
        numerics = numerics or ("serving" if device.type == "cuda" else "exact")
        parallel = parallel or Parallel.single()
        family = get_family(config, numerics, dtype, device, backend, parallel)
        limit = config.max_position_embeddings
        max_model_len = min(limit, DEFAULT_MAX_MODEL_LEN) if max_model_len is None else max_model_len
        layers = None if layers is None else as_list(layers, "layers: numbers of layers")
        limits = (max_model_len, max_num_seqs, max_num_batched_tokens, max_rollback)
        check_sizes(config, layers, *limits, max_snapshots, kv_cache_bytes)

        model = family.build(layers, attention_only, max_model_len)

        def layout_of(model) -> CacheLayout:
            return make_layout(
                config, family.numerics, dtype, *limits, layer_specs(model), max_snapshots, kv_cache_bytes
            )

        layout = layout_of(model)
        report = load_model(
            model, family.canonical(source), layers=layers, attention_only=attention_only, progress=progress
        )
        if not attention_only and not report.mtp_loaded and len(model.mtp):
            model.mtp.clear()
            layout = layout_of(model)
        model.eval()
        sizes = f"{layout.nbytes():,} bytes of caches for max_num_seqs={max_num_seqs} and max_model_len={max_model_len}"
        with explain_out_of_memory(
            sizes, "lower these, or set kv_cache_bytes; `deepseek-attn plan` adds up what they take"
        ):
            pools = CachePools(layout, device)
        workspace = Workspace(device)
        runner = cls(
            config, family.numerics, dtype, device, model, report, layout, pools, workspace, CacheManager(pools)
        )
        runner.parallel = parallel
        runner.prefixes = PrefixCache(runner.manager) if max_snapshots else None
        runner._bind(family)
        if cuda_graphs is None:
            cuda_graphs = not attention_only and not runner.graph_problem
        if cuda_graphs:
            runner._use_graphs()
        return runner

    def _bind(self, family: Family) -> None:
        """Gives the layers their caches and reserves the largest scratch memory any of them can need."""
        tokens = f"scratch memory of steps of max_num_batched_tokens={self.layout.max_num_batched_tokens}"
        with explain_out_of_memory(tokens, "lower it"):
            family.bind(self.model, self.pools, self.workspace)
        self.workspace.lock()
        self.reference_only, self.graph_problem = family.plain, family.graph_problem()
        self._builder = family.metadata_builder(self.model, self.pools, mtp=False)
        self.mtp_builder = family.metadata_builder(self.model, self.pools, mtp=True)

    def _use_graphs(self) -> None:
        """Runs decode steps as CUDA graphs from now on."""
        problem = self.graph_problem
        if isinstance(self.model, AttentionStack):
            problem = "there are attention layers only (attention_only=True)"
        if problem:
            raise ValueError(f"cuda_graphs=True: {problem}; leave it out to run every step eagerly")
        sizes = self.model, self.backbone_layers, self.layout, self.device
        self.graphs = DecodeGraphs(*sizes, draft_layers=self.mtp_layers)

    @property
    def backbone_layers(self) -> tuple:
        """Specs of the layers that are here, the MTP layers left out."""
        return tuple(spec for spec in layer_specs(self.model) if not spec.is_mtp)

    @property
    def mtp_layers(self) -> tuple:
        """Specs of the MTP layers that are here."""
        return tuple(spec for spec in layer_specs(self.model) if spec.is_mtp)

    @property
    def is_ahead(self) -> bool:
        """Whether a step was started before it was asked for."""
        return self.graphs is not None and self.graphs.ahead is not None

    @property
    def has_mtp(self) -> bool:
        return bool(getattr(self.model, "mtp", None))

    def sequence(self, token_ids: Iterable[int]) -> Sequence:
        """A new sequence; nothing is computed yet.

        Raises:
            ValueError: no tokens, a token outside the vocabulary, or more than ``max_model_len``.
        """
        ids = [self.check_token(token) for token in as_list(token_ids, "a prompt: token ids")]
        if not ids:
            raise ValueError("empty prompt: at least one token is needed (a plain prompt begins with the BOS token)")
        self.check_length(len(ids))
        return Sequence(self, ids, self.manager.create())

    def load_sequence(self, path: str | Path) -> Sequence:
        """A sequence that `Sequence.save` wrote, with its caches: nothing is computed again.

        Raises:
            ValueError: not such a file, or one of another model, numerics or layout, or longer than ``max_model_len``.
            OutOfPages: no room. Either way nothing was changed.
        """
        token_ids, cache = load_cache(path, self.manager, self.fingerprint())
        try:
            self.check_length(len(token_ids))
        except ValueError:
            self.manager.free(cache)
            raise
        return Sequence(self, token_ids, cache)

    def fingerprint(self) -> dict[str, str]:
        """Digests of what cached bytes depend on: ``model``, ``numerics`` and ``layout``."""
        return make_fingerprint(self.config, self.numerics, self.dtype, self.layout, self.model)

    def check_token(self, token: int) -> int:
        if not is_integer(token) or not 0 <= token < self.config.vocab_size:
            raise ValueError(
                f"token id {token!r} is not in the vocabulary: ids are integers in [0, {self.config.vocab_size})"
            )
        return int(token)

    def check_length(self, length: int) -> None:
        if length > self.layout.max_model_len:
            raise ValueError(
                f"a sequence of {length} tokens exceeds max_model_len={self.layout.max_model_len}; raise max_model_len "
                f"(the model's limit is {self.config.max_position_embeddings})"
            )

    @traced("model")
    @torch.no_grad()
    def step(self, batch: Batch, options: StepOptions = DEFAULT_OPTIONS) -> StepOutput:
        """Computes the next ``n`` pending tokens of each sequence.

        Args:
            batch: (sequence, n) with 1 <= n <= its pending tokens; each sequence at most once; any order.
            options: what is returned; default: logits of the last new token of each sequence.

        Raises:
            ValueError: a batch that cannot be computed; OutOfPages: no room. Either way nothing was changed.
        """
        self._check_batch(batch, options)
        order = sorted(range(len(batch)), key=lambda i: batch[i][1] > 1)  # decodes first; stable
        rows, back = [batch[i] for i in order], sorted(range(len(order)), key=order.__getitem__)

        def in_batch_order(values: Iterable[T]) -> list[T]:
            values = list(values)
            return [values[i] for i in back]

        self.manager.reserve([(sequence.cache, n) for sequence, n in rows])
        if self.parallel.dp_attention:
            self.parallel.agree(sum(n for _, n in rows), self.device)
        lengths, output = [n for _, n in rows], StepOutput()
        counts = lengths if options.all_logits else [min(n, options.last) for n in lengths]
        with self.parallel.together(), reference_ops(self.reference_only):
            # inference mode takes 14 % off a single-token step on a CPU; what leaves this method are ordinary tensors
            with torch.inference_mode():
                results = self._compute(rows)
            if options.mtp:
                drafts = draft_logits(self, rows, results.hidden_states(lengths))
                output.mtp_logits = in_batch_order(drafts)
            if options.hidden_states:
                output.hidden_states = in_batch_order(results.hidden_states(counts).clone().split(counts))
            if options.greedy:
                wait = results.tokens(counts)
                output.tokens = lambda: in_batch_order(wait())
            else:
                output.logits = in_batch_order(results.logits(counts).split(counts))
        for sequence, n in rows:
            self.manager.commit(sequence.cache, n)
        if options.greedy and isinstance(results, DecodeRun):
            self._launch_next_step(results, [sequence.cache for sequence in options.next_step])
        return output

    def _compute(self, rows: Batch) -> EagerStep | DecodeRun:
        """The step over persistent tensors where they hold it, eagerly elsewhere."""
        caches, lengths = [sequence.cache for sequence, _ in rows], [n for _, n in rows]
        token_ids = [seq.token_ids[seq.num_computed : seq.num_computed + n] for seq, n in rows]
        if self.graphs is not None and self.graphs.takes(lengths):
            return self.graphs.run(caches, token_ids)
        if self.graphs is not None:
            self.graphs.ahead = None  # another step came than the one that was launched
        ids = torch.tensor([token for tokens in token_ids for token in tokens], device=self.device)
        meta = self.step_metadata(caches, lengths)
        return EagerStep(self.model, lengths, self.model(ids, meta.positions, meta))

    @torch.inference_mode()
    def _launch_next_step(self, run: DecodeRun, caches: list[SequenceCache]) -> None:
        """Launches the step after ``run`` for these sequences if there are pages for it."""
        if not caches:
            return
        try:
            self.manager.reserve([(cache, 1) for cache in caches])
        except OutOfPages:
            return
        with self.parallel.together():
            self.graphs.go_ahead(run, caches)

    @torch.inference_mode()
    def wait_for_ranks(self) -> None:
        """With data-parallel attention, takes part in the steps of other ranks until none has work left.

        Every rank must get here when its own work is done, also one that had none; `score` and `LLM` do it themselves.
        """
        if not self.parallel.dp_attention:
            return
        x = torch.zeros(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        ids = torch.zeros(0, dtype=torch.int64, device=self.device)
        while self.parallel.agree(0, self.device):
            with reference_ops(self.reference_only):
                for module in self.model.layers.modules():
                    if isinstance(module, MoE):
                        module(x, ids)

    @traced("mtp")
    @torch.no_grad()
    def draft(self, batch: list[tuple[Sequence, int, torch.Tensor, list[int]]], drafts: int = 1) -> Guesses:
        """Runs the MTP layer over tokens whose next one is known by now, and guesses the tokens after them.

        Writes these tokens' rows of the MTP layer's caches, and those of all guesses but the last.

        Args:
            batch: (sequence, first position, streams ``[n, ...]`` of ``n`` tokens from there, the tokens after each).
                There must be pages for these positions and for ``drafts - 1`` more, and rows of all earlier ones.
            drafts: tokens to guess for each sequence; after the first from the MTP layer's own streams.
        """
        with self.parallel.together(), reference_ops(self.reference_only):
            return draft_tokens(self, batch, drafts)

    @traced("metadata")
    def step_metadata(
        self, caches: list[SequenceCache], query_lens: list[int], token_valid: torch.Tensor | None = None
    ) -> StepMetadata | TokenStepMetadata:
        """Metadata for the next ``query_lens`` tokens of sequences with room for them: to drive layers by hand.

        Args:
            query_lens: new tokens of each sequence; single-token sequences come first.
            token_valid: bool ``[T]`` on the CPU; rows that are padding write nothing and see nothing.
        """
        return self._builder.build(self.step_input(caches, query_lens, token_valid))

    def step_input(
        self, caches: list[SequenceCache], query_lens: list[int], token_valid: torch.Tensor | None = None
    ) -> StepInput:
        lens = torch.tensor(query_lens)
        computed = torch.tensor([cache.num_tokens for cache in caches])
        return StepInput(lens, computed + lens, self.block_tables(caches), token_valid)

    def block_tables(self, caches: list[SequenceCache]) -> dict[str, torch.Tensor]:
        return {group: self.manager.block_table(caches, group) for group in self.layout.pages}

    def _check_batch(self, batch: Batch, options: StepOptions) -> None:
        if isinstance(self.model, AttentionStack):
            raise ValueError("this runner holds attention layers only (attention_only=True): load the model to run it")
        if options.mtp and not self.has_mtp:
            raise ValueError(
                "there is no MTP layer: the checkpoint has none, only some layers were loaded, or attention is "
                "data-parallel"
            )
        check_batch(batch, self.layout)

    def score(
        self, prompts: Iterable[Iterable[int]], chunk_size: int | None = None, *, progress: bool = False
    ) -> list[torch.Tensor]:
        """Teacher-forced logits through the caches.

        Args:
            prompts: token-id lists, of any lengths.
            chunk_size: new tokens per sequence and step; default: as many as ``max_num_batched_tokens`` allows.
                1 goes token by token, through the decode path.

        Returns:
            For each prompt float32 ``[len, vocab_size]`` on the CPU.
        """
        return score_prompts(self, prompts, chunk_size, progress=progress)[0]

    def score_mtp(
        self, prompts: Iterable[Iterable[int]], chunk_size: int | None = None, *, progress: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Like `score`, with the MTP layer's logits as a second list of float32 ``[len - 1, vocab_size]``.

        Row t pairs the streams of position t with the embedding of token t + 1, and predicts token t + 2.
        """
        return score_prompts(self, prompts, chunk_size, mtp=True, progress=progress)
