"""ModelRunner: a scheduled batch in, logits out."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Unpack

import torch
from torch import nn

from deepseek_attn.cache.files import make_fingerprint
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.checkpoint.hub import PretrainedSource
from deepseek_attn.checkpoint.random import RandomSource
from deepseek_attn.checkpoint.source import CheckpointSource
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.options import as_list
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.impls.step_batch import StepBatch
from deepseek_attn.layers.experts import ExpertLinear
from deepseek_attn.layers.parallel import StepNeeds
from deepseek_attn.models.block import layer_specs
from deepseek_attn.runner.build import build_runner
from deepseek_attn.runner.drafting import BlockDrafter, DraftRows, check_drafts
from deepseek_attn.runner.graphs import DecodeRun, DraftTokens
from deepseek_attn.runner.logprobs import TokenLogprobs, check_top
from deepseek_attn.runner.options import RunnerOptions, check_runner_options, lists_options, open_pretrained
from deepseek_attn.runner.prompts import TokenIds, each_prompt, token_list
from deepseek_attn.runner.record_store import RecordStore
from deepseek_attn.runner.replay import Replay, Replayed
from deepseek_attn.runner.scoring import score_logprobs, score_prompts
from deepseek_attn.runner.sequence import Sequence
from deepseek_attn.runner.step import (
    Batch,
    StepOptions,
    StepOutput,
    check_batch,
    check_decode_query_len,
    check_options,
    check_query_lens,
)
from deepseek_attn.runner.step_runner import StepRunner
from deepseek_attn.runner.token_records import RecordOptions, TokenRecords, record_path
from deepseek_attn.runner.warm_up import WarmUp
from deepseek_attn.utils.files import appearing
from deepseek_attn.utils.tracing import traced
from deepseek_attn.utils.turns import in_turn

logger = logging.getLogger(__name__)

DEFAULT_OPTIONS = StepOptions()


class ModelRunner(StepRunner):
    """A loaded model that computes steps of sequences. Make one with `from_pretrained` or `from_config`.

    Several threads can use one runner: calls wait for each other, each step and each `score` as a whole.
    """

    @classmethod
    @lists_options()
    def from_pretrained(cls, model: str | Path, **options: Unpack[RunnerOptions]) -> ModelRunner:
        """Loads a checkpoint in the published format (or with transformers' tensor names).

        Args:
            model: a directory that holds ``config.json`` and safetensors shards; or a hub id, ``org/name`` or
                ``org/name@revision``: the copy in the local cache of huggingface_hub. Without a copy, the files that
                ``layers`` need are downloaded into that cache.

        Raises:
            ValueError: the directory, the config, the tensors or the options are wrong; nothing is allocated.
        """
        check_runner_options("from_pretrained", options)
        with open_pretrained(model, options) as source:
            return cls.from_source(source.config, source, **options)

    @classmethod
    @lists_options()
    def from_config(
        cls, config: AnyConfig | str | Path, *, seed: int = 0, **options: Unpack[RunnerOptions]
    ) -> ModelRunner:
        """Random weights for a config: the same tensors that ``make-checkpoint`` would write for this seed."""
        check_runner_options("from_config", options | {"seed": seed}, "seed")
        if isinstance(config, (str, Path)):
            config = ModelConfig.from_pretrained(config)
        if not isinstance(config, AnyConfig):
            raise ValueError(
                f"config is a {type(config).__name__}: pass a preset's name, a path or a ModelConfig "
                "(ModelConfig.from_dict makes one)"
            )
        options.setdefault("progress", False)
        return cls.from_source(config, RandomSource(config, seed), **options)

    @classmethod
    @lists_options()
    def from_source(cls, config: AnyConfig, source: CheckpointSource, **options: Unpack[RunnerOptions]) -> ModelRunner:
        """A model of this config with the weights of any `CheckpointSource`.

        Of a `PretrainedSource`, the runner takes the folder and the sampling defaults too.
        """
        check_runner_options("from_source", options)
        if not isinstance(config, AnyConfig) or not isinstance(source, CheckpointSource):
            raise ValueError(
                f"from_source takes a ModelConfig and a CheckpointSource, got a {type(config).__name__} and a "
                f"{type(source).__name__}"
            )
        if not isinstance(source, PretrainedSource):
            return build_runner(cls, config, source, **options)
        generation = source.generation  # a wrong one is refused before weights are read
        runner = build_runner(cls, config, source, **options)
        runner.directory, runner.generation = source.directory, generation
        logger.info("loaded %s: %s, %s", runner.directory, runner, runner.report)
        return runner

    @property
    def backbone_layers(self) -> tuple:
        """Specs of the loaded layers, without MTP layers."""
        return tuple(spec for spec in layer_specs(self.model) if not spec.is_mtp)

    @property
    def mtp_layers(self) -> tuple:
        """Specs of the MTP layers that are loaded."""
        return tuple(spec for spec in layer_specs(self.model) if spec.is_mtp)

    @property
    def next_step_launched(self) -> bool:
        """Whether a decode step was launched before it was requested."""
        return self.graphs is not None and self.graphs.prelaunched is not None

    @property
    def has_mtp(self) -> bool:
        return self.drafter is not None

    @in_turn
    def expect_drafts(self, num_drafts: int) -> None:
        """From now on a verification, ``1 + num_drafts`` new tokens of a request, is a decode.

        Raises:
            ValueError: no MTP layer, or more drafts than a step can compute or `Sequence.truncate` take back.
        """
        check_drafts(num_drafts, len(self.mtp_layers), self.config, self.layout)
        self.decode_query_len = max(self.decode_query_len, 1 + num_drafts)

    @in_turn
    def warm_up(self, progress: bool = False) -> None:
        """Runs steps of every size on null pages: later ones then compile and load no kernel, and capture no graph.

        For a server, before its first request; sequences and caches stay as they are. On a CPU it does nothing.

        Args:
            progress: show a bar over kernels that are still being compiled, on a terminal.
        """
        self.whole_model()
        if self.device.type == "cpu":
            return
        if self.compilation is not None:
            self.compilation.wait(progress=progress)
        for _ in WarmUp(self, self.decode_query_len - 1).steps():
            pass
        torch.cuda.synchronize(self.device)

    def sequence(self, token_ids: TokenIds, cache: SequenceCache | None = None) -> Sequence:
        """A new sequence; nothing is computed yet, or the first tokens are, and ``cache`` holds their pages.

        Raises:
            ValueError: no tokens, a token outside the vocabulary, or more than ``max_model_len``.
        """
        return Sequence.create(token_ids, self.manager, self.limits, self.fingerprint, cache)

    @in_turn
    def load_sequence(self, path: str | Path) -> Sequence:
        """A sequence that `Sequence.save` wrote, with its caches: nothing is computed again.

        Raises:
            ValueError: not a saved sequence, or a damaged or contradictory file, another model, numerics, layout or
                rank, or more than ``max_model_len`` tokens; the message names the field.
            OutOfPages: too few free pages. Either way nothing was changed.
        """
        return Sequence.load(path, self.manager, self.limits, self.fingerprint)

    def fingerprint(self) -> dict[str, str]:
        """Digests of all that cached bytes depend on: ``model``, ``numerics`` and ``layout``, and the ``rank``."""
        approximate = self.trailing is not None and self.trailing.approximate
        facts = self.config, self.numerics, self.dtype, self.layout, _sampled_weights(self.model)
        digests = make_fingerprint(*facts, self.deterministic, approximate)
        return digests | {"rank": f"{self.parallel.rank} of {self.parallel.world}"}

    @in_turn
    @traced("model")
    @torch.no_grad()
    def step(self, batch: Batch, options: StepOptions = DEFAULT_OPTIONS) -> StepOutput:
        """Computes the next ``n`` pending tokens of each sequence.

        Args:
            batch: (sequence, n) with 1 <= n <= its pending tokens; each sequence at most once; any order.
            options: results to return; default: logits of the last new token of each sequence.

        Raises:
            ValueError: a batch that cannot be computed; OutOfPages: too few free pages. Either way nothing was changed.
            After any other exception, `KeyboardInterrupt` included, no token of the step counts as computed; sequences
            that were to compute more than ``max_rollback`` tokens are computed again from their first one.
        """
        model = self.whole_model()
        check_batch(batch, self.layout)
        check_options(batch, options)
        if options.mtp:
            self._need_drafter()
        order = sorted(range(len(batch)), key=lambda i: batch[i][1] > self.decode_query_len)  # stable
        rows, lengths = [batch[i] for i in order], [batch[i][1] for i in order]
        plans = self._row_plans(rows, order, options)
        if options.drafts and not self._replays(lengths, options, 1 + options.drafts):
            raise ValueError("StepOptions.drafts: this step does not run over persistent tensors; call draft after it")
        if any(options.allowed) and (options.drafts or options.last != 1 or options.all_logits):
            raise ValueError("StepOptions.allowed: restricted are steps with last=1 and without drafts and all_logits")
        caches = [(sequence.cache, n) for sequence, n in rows]
        self.manager.reserve(caches)
        with self.manager.all_or_nothing(caches):
            eager, size = bool(plans) or not self._replays(lengths, options), None
            if self.parallel.dp_attention:
                longest = max(cache.num_tokens + n for cache, n in caches)
                needs = self.parallel.agree(StepNeeds(sum(lengths), longest, eager), self.device)
                eager, size = needs.eager, self._common_size(needs)
            with self.op_settings(sum(lengths)):
                # inference mode takes 14 % off a single-token step on a CPU; its results are ordinary tensors
                with torch.inference_mode():
                    recorder = self._recorder(model, rows, order, options)
                    with nullcontext() if recorder is None else recorder.watching():
                        results = self._compute(model, rows, options, eager, size, recorder, plans)
                output = self._output(results, rows, order, options)
                if recorder is not None and options.record:
                    records = dict(zip(order, recorder.records(), strict=True))
                    output.records = [records[place] for place in range(len(order))]
            for place, (cache, n) in enumerate(caches):
                self.manager.commit(cache, n, plans[place].exact_from if plans else None)
            if options.greedy and isinstance(results, DecodeRun):
                self._launch_next_step(results, [(sequence.cache, most) for sequence, most in options.next_step])
        return output

    @in_turn
    @traced("mtp")
    @torch.no_grad()
    def draft(self, batch: list[DraftRows], num_drafts: int = 1) -> DraftTokens:
        """Runs the MTP layer over tokens whose next token is known by now, and drafts the tokens after them.

        Writes these tokens' rows of the draft layers' caches, and `Drafter.rows_past_end` more.

        Args:
            batch: there must be pages for these positions and those past them, and rows of all earlier positions.
            num_drafts: draft tokens per sequence.
        """
        with self.op_settings(sum(len(rows.next_ids) for rows in batch)):
            return self._need_drafter().draft(batch, num_drafts, self.decode_query_len, self.graphs)

    def step_metadata(
        self,
        caches: list[SequenceCache],
        query_lens: list[int],
        token_valid: torch.Tensor | None = None,
        decode_query_len: int | None = None,
    ) -> StepMetadata:
        """Metadata for the next ``query_lens`` tokens of sequences: to drive layers by hand; see `LayerSession`.

        Each step is ``manager.reserve``, this call, one call of each layer, ``manager.commit``. Layers take the
        metadata once, before its sequences change. Without the commit, the next call raises.

        Args:
            query_lens: new tokens of each sequence. Decodes come first.
            token_valid: bool ``[T]`` on the CPU; rows that are padding write nothing and see nothing.
            decode_query_len: a sequence of at most this many new tokens is a decode; default: the runner's, which is 1
                unless drafts are expected.

        Raises:
            ValueError: the lengths exceed a step of this runner, or a prompt comes before a decode.
            RuntimeError: pages are not reserved, or the previous step was not committed.
        """
        check_decode_query_len(decode_query_len)
        check_query_lens(caches, query_lens, self.layout)
        self.manager.check_reserved(list(zip(caches, query_lens, strict=True)))
        total, counts = sum(query_lens), list(query_lens)
        if token_valid is not None:
            if token_valid.shape != (total,) or token_valid.dtype != torch.bool or token_valid.is_cuda:
                raise ValueError(
                    f"token_valid is {list(token_valid.shape)} in {token_valid.dtype} on {token_valid.device}: it is "
                    f"bool [{total}] on the CPU, one value per new token"
                )
            counts = [int(valid.sum()) for valid in token_valid.split(counts)]
        decode_query_len = self.decode_query_len if decode_query_len is None else decode_query_len
        step = self._metadata(caches, query_lens, decode_query_len, token_valid)
        x_shape = (total, self.config.hidden_size)
        step.batch = StepBatch(self.pools, list(caches), counts, x_shape, self.dtype, step.positions)
        return step

    def record_options(
        self, routes: bool = False, selections: bool = False, hidden_states: Iterable[int] = ()
    ) -> RecordOptions:
        """Checked options for `StepOptions.record` and `record_store`.

        Args:
            routes: experts and their weights; selections: entries of indexers, and V4.1's candidates.
            hidden_states: numbers of the layers after which hidden states are recorded.

        Raises:
            ValueError: a model without experts or without an indexer, no such layers, or nothing to record.
        """
        found = self._recorded_layers()
        options = RecordOptions.create(found, routes, selections, hidden_states)
        if options is None:
            raise ValueError("nothing to record: choose routes, selections or hidden_states=[layers]")
        return options

    def record_store(self, options: RecordOptions, path: Path | None = None) -> RecordStore:
        """A store of the records of one sequence. With a ``path``, the first of the ranks that share it writes."""
        template = options.template(self._recorded_layers())
        return RecordStore(options, template, path, discard=path is not None and self._leaves_files)

    @property
    def _leaves_files(self) -> bool:
        """Whether another rank writes the files of records."""
        return self.parallel.token_ranks > 1 and self.parallel.rank > 0

    def make_replay(self, records: Replayed, token_ids: TokenIds) -> Replay:
        """A replay for `StepOptions.replay`: records, or their file, checked for this model and a prompt.

        Raises:
            ValueError: see `Replay.create`; or routes with data-parallel attention, whose routers see the tokens of all
                ranks.
        """
        found = self._recorded_layers()
        replay = Replay.create(records, found, token_list(token_ids))
        if self.parallel.dp_attention and replay.experts is not None:
            raise ValueError("replay: experts cannot be replayed with data-parallel attention, only selections")
        return replay

    def score(
        self,
        prompts: Iterable[TokenIds],
        chunk_size: int | None = None,
        *,
        replay: Iterable[Replayed | None] | None = None,
        progress: bool = False,
    ) -> list[torch.Tensor]:
        """Teacher-forced logits through the caches.

        Args:
            prompts: token-id lists, of any lengths.
            chunk_size: new tokens per sequence and step; default: as many as ``max_num_batched_tokens`` allows.
                1: token by token, through the decode path.
            replay: for each prompt the records to compute it with, or None; see `TokenRecords`.

        Returns:
            For each prompt float32 ``[len, vocab_size]`` on the CPU.
        """
        listed = list(each_prompt(prompts))
        return self._score(listed, chunk_size, replays=self._replays_of(listed, replay), progress=progress)[0]

    def score_records(
        self,
        prompts: Iterable[TokenIds],
        record: RecordOptions,
        chunk_size: int | None = None,
        *,
        directory: str | Path | None = None,
        replay: Iterable[Replayed | None] | None = None,
        progress: bool = False,
    ) -> tuple[list[torch.Tensor], list[TokenRecords | None]]:
        """Like `score`, with the records of each prompt's tokens as a second list.

        Args:
            record: of `record_options`.
            directory: write the records of prompt ``i`` to ``i.safetensors`` in this folder, so that memory does not
                limit them. All files appear together, at the end.

        Raises:
            ValueError: as `score`; or a file cannot be written.
        """
        listed = list(each_prompt(prompts))
        names = [str(number) for number in range(len(listed))]
        paths: list[Path | None] = [None if directory is None else record_path(directory, name) for name in names]
        replays = self._replays_of(listed, replay)
        with ExitStack() as stack:
            if directory is not None and not self._leaves_files:
                folder = stack.enter_context(appearing(Path(directory), directory=True, into=True))
                paths = [folder / path.name for path in paths if path is not None]
            stores = [stack.enter_context(closing(self.record_store(record, path))) for path in paths]
            logits, _ = self._score(listed, chunk_size, replays=replays, stores=stores, progress=progress)
            return logits, [store.records for store in stores]

    def _replays_of(
        self, prompts: list[TokenIds], replay: Iterable[Replayed | None] | None
    ) -> list[Replay | None] | None:
        if replay is None:
            return None
        given = as_list(replay, "replay: records for each prompt")
        if len(given) != len(prompts):
            raise ValueError(f"replay: records for {len(given)} prompts, and there are {len(prompts)}: None for some")
        pairs = zip(given, prompts, strict=True)
        return [None if records is None else self.make_replay(records, prompt) for records, prompt in pairs]

    @in_turn
    def score_logprobs(
        self,
        prompts: Iterable[TokenIds],
        top: int = 0,
        chunk_size: int | None = None,
        *,
        replay: Iterable[Replayed | None] | None = None,
        progress: bool = False,
    ) -> list[TokenLogprobs]:
        """Log-probabilities of all tokens of each prompt but its first, which follows on nothing.

        They follow from the logits of `score`, computed in blocks of rows.

        Args:
            prompts, chunk_size, replay: as in `score`.
            top: number of most likely tokens that are listed for each place.
        """
        check_top(top, "top")
        listed = list(each_prompt(prompts))
        replays = self._replays_of(listed, replay)
        return score_logprobs(self, listed, top, chunk_size, replays=replays, progress=progress)

    def score_mtp(
        self, prompts: Iterable[TokenIds], chunk_size: int | None = None, *, progress: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Like `score`, with the MTP layer's logits as a second list of float32 ``[len - 1, vocab_size]``.

        Row t pairs the hidden states of position t with the embedding of token t + 1, and predicts token t + 2.

        Raises:
            ValueError: no MTP layer; a DSpark drafter has no logits of single tokens.
        """
        if isinstance(self.drafter, BlockDrafter):
            raise ValueError("the drafter is DSpark, which drafts blocks: it has no logits of the tokens of a prompt")
        return self._score(list(each_prompt(prompts)), chunk_size, mtp=True, progress=progress)

    @in_turn  # as a whole: calls that take turns by steps would need the pages of all their prompts together
    def _score(
        self,
        prompts: list[TokenIds],
        chunk_size: int | None,
        *,
        progress: bool,
        mtp: bool = False,
        replays: list[Replay | None] | None = None,
        stores: list[RecordStore] | None = None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return score_prompts(self, prompts, chunk_size, mtp=mtp, replays=replays, stores=stores, progress=progress)


def _sampled_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights, with only the first of the routed experts: the others may be in the checkpoint's files."""
    weights = dict(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, ExpertLinear):
            weights.pop(f"{path}.scale", None)
            weights[f"{path}.weight"] = module.read_expert(0)
    return weights
