"""Drafting: the draft layers' part of a step, and draft tokens after the newest tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from deepseek_attn.attention.builder import INDEX_ALIGN, MetadataBuilder, StepInput
from deepseek_attn.cache.layout import WINDOW, WINDOW_PAGE, CacheLayout
from deepseek_attn.cache.manager import CacheManager
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.options import is_integer
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.indices import step_indices
from deepseek_attn.models.block import Backbone
from deepseek_attn.models.dspark import DraftsBlocks
from deepseek_attn.runner.graphs import DecodeGraphs, DraftTokens
from deepseek_attn.runner.sequence import Sequence
from deepseek_attn.runner.step import Batch, block_tables, step_input
from deepseek_attn.utils.tracing import traced


class DraftRows(NamedTuple):
    """Consecutive tokens of a sequence whose next tokens are known by now.

    Attributes:
        start: position of the first one.
        hidden_states: ``[n, ...]`` of the backbone, as a step with `StepOptions.hidden_states` returned them.
        next_ids: the token after each, ``n`` of them.
    """

    sequence: Sequence
    start: int
    hidden_states: torch.Tensor
    next_ids: list[int]


@dataclass(frozen=True)
class Drafter(ABC):
    """The draft layers of a model that has some.

    Attributes:
        builder: builds the metadata of the draft layers' own caches.
        drafts_in_graphs: `DecodeGraphs` draft within a decode step, too.
    """

    model: Backbone
    builder: MetadataBuilder
    manager: CacheManager
    device: torch.device
    drafts_in_graphs: ClassVar[bool]

    @abstractmethod
    def rows_past_end(self, num_drafts: int) -> int:
        """Rows past the last computed token that `draft` writes."""

    @abstractmethod
    def step_logits(
        self, rows: Batch, lengths: list[int], hidden_states: torch.Tensor, decode_query_len: int
    ) -> list[torch.Tensor] | None:
        """Fills the draft layers' caches with a step's tokens; returns their logits by request, if there are any.

        Args:
            rows: the step's batch, not committed yet.
            lengths: of each request, the number of its last new tokens that have hidden states: all but with DSpark.
            hidden_states: of these tokens, concatenated by request.
        """

    @abstractmethod
    def draft(
        self, batch: list[DraftRows], num_drafts: int, decode_query_len: int, graphs: DecodeGraphs | None
    ) -> DraftTokens:
        """`ModelRunner.draft`."""

    @abstractmethod
    def warm_up(self, batch: StepInput, hidden_states: torch.Tensor, token_ids: torch.Tensor, num_drafts: int) -> None:
        """Launches the draft kernels of an eager step, on pages that nothing reads.

        Args:
            batch: of the step; hidden_states, token_ids: of all its tokens.
        """


def check_drafts(num_drafts: int, num_layers: int, config: AnyConfig, layout: CacheLayout) -> None:
    """Raises ValueError for a number of drafts per step that a model does not make.

    Args:
        num_layers: MTP layers, or DSpark stages, that have weights.
    """
    # a step that failed can be repeated in place if it had at most max_rollback tokens of a request
    limit = min(layout.max_rollback, layout.max_num_batched_tokens) - 1
    if not num_layers:
        raise ValueError(
            "drafts need an MTP layer or a DSpark drafter, and this model has none "
            "(num_nextn_predict_layers is 0, or only some layers were loaded); leave them out"
        )
    most = None if config.dspark is None else config.dspark.dspark_block_size
    if most is not None and is_integer(num_drafts) and num_drafts > most:
        raise ValueError(f"{num_drafts} drafts per step: dspark_block_size {most} is the most that DSpark drafts")
    if not is_integer(num_drafts) or not 1 <= num_drafts <= limit:
        raise ValueError(
            f"{num_drafts!r} drafts per step: supported are 1 to {limit}, one less than "
            f"max_rollback={layout.max_rollback} and max_num_batched_tokens={layout.max_num_batched_tokens} allow"
        )


class MTPDrafter(Drafter):
    """The MTP layer: drafts after the first come from its own hidden states."""

    drafts_in_graphs = True

    def rows_past_end(self, num_drafts: int) -> int:
        return num_drafts - 1

    @traced("mtp")
    def step_logits(
        self, rows: Batch, lengths: list[int], hidden_states: torch.Tensor, decode_query_len: int
    ) -> list[torch.Tensor]:
        """Logits of the tokens that have a next token; other rows take part as padding."""
        next_ids, known = [], []
        for sequence, n in rows:
            start = sequence.num_computed + 1
            tokens = sequence.token_ids[start : start + n]
            next_ids += tokens + [0] * (n - len(tokens))
            known += [True] * len(tokens) + [False] * (n - len(tokens))
        valid = torch.tensor(known, dtype=torch.bool, device="cpu")
        caches = [sequence.cache for sequence, _ in rows]
        meta = self.builder.build(step_input(self.manager, caches, lengths, decode_query_len, valid))
        ids = torch.tensor(next_ids, device=self.device, dtype=torch.int64)
        logits = self.model.draft_logits(self.model.draft_hidden_states(hidden_states, ids, meta.positions, meta))
        masks = valid.split(lengths)
        return [part[mask.to(part.device)] for part, mask in zip(logits.split(lengths), masks, strict=True)]

    def draft(
        self, batch: list[DraftRows], num_drafts: int, decode_query_len: int, graphs: DecodeGraphs | None
    ) -> DraftTokens:
        """Over persistent tensors where they hold it, eagerly elsewhere."""
        if graphs is None or not graphs.supports([len(rows.next_ids) for rows in batch], decode_query_len):
            return self._draft_eagerly(batch, num_drafts, decode_query_len)
        with torch.inference_mode():
            return graphs.draft(
                [rows.sequence.cache for rows in batch],
                [rows.start for rows in batch],
                torch.cat([rows.hidden_states for rows in batch]),
                [rows.next_ids for rows in batch],
                num_drafts,
                decode_query_len,
            )

    def warm_up(self, batch: StepInput, hidden_states: torch.Tensor, token_ids: torch.Tensor, num_drafts: int) -> None:
        meta = self.builder.build(batch)
        states = self.model.draft_hidden_states(hidden_states, token_ids, meta.positions, meta)
        self.model.draft_logits(states[: len(batch.query_lens)])

    def _draft_eagerly(self, batch: list[DraftRows], num_drafts: int, decode_query_len: int) -> DraftTokens:
        """`draft` without persistent tensors, requests with prompts last."""
        order = sorted(range(len(batch)), key=lambda i: len(batch[i].next_ids) > decode_query_len)
        ordered = [batch[i] for i in order]
        caches = [rows.sequence.cache for rows in ordered]
        lengths = torch.tensor([len(rows.next_ids) for rows in ordered], dtype=torch.int64, device="cpu")
        starts = torch.tensor([rows.start for rows in ordered], dtype=torch.int64, device="cpu")
        next_ids = torch.tensor(
            [token for rows in ordered for token in rows.next_ids], device=self.device, dtype=torch.int64
        )
        states = torch.cat([rows.hidden_states for rows in ordered])
        drafts: list[torch.Tensor] = []
        first_logits = None
        while len(drafts) < num_drafts:
            tables = block_tables(self.manager, caches)
            step = StepInput(lengths, starts + lengths, tables, decode_threshold=decode_query_len)
            meta = self.builder.build(step)
            states = self.model.draft_hidden_states(states, next_ids, meta.positions, meta)
            if first_logits is None:
                states = states[(lengths.cumsum(0) - 1).to(self.device)]
            logits = self.model.draft_logits(states)
            first_logits, next_ids = logits if first_logits is None else first_logits, logits.argmax(-1)
            drafts.append(next_ids)
            starts, lengths = starts + lengths, torch.ones_like(lengths)
        if first_logits is None:
            raise ValueError(f"num_drafts is {num_drafts}: a step that drafts has at least 1")
        back = torch.tensor(order, dtype=torch.int64, device="cpu").argsort().to(self.device)
        return DraftTokens(torch.stack(drafts, dim=1)[back], first_logits[back])


class BlockDrafter(Drafter):
    """The DSpark stages: one pass drafts a block of up to ``dspark_block_size`` tokens.

    Rows of a block are written behind the sequence, and written again before anything else reads them.
    """

    model: DraftsBlocks
    drafts_in_graphs = False

    @property
    def max_drafts(self) -> int:
        return self.model.config.drafter.dspark_block_size

    def rows_past_end(self, num_drafts: int) -> int:
        return self.max_drafts

    @traced("dspark")
    def step_logits(self, rows: Batch, lengths: list[int], hidden_states: torch.Tensor, decode_query_len: int) -> None:
        """Returns None: drafts come from blocks, so there are no logits by token."""
        kept = [(sequence, n, count) for (sequence, n), count in zip(rows, lengths, strict=True) if count]
        if not kept:
            return
        tables = block_tables(self.manager, [sequence.cache for sequence, _, _ in kept])
        ends = torch.tensor([sequence.num_computed + n for sequence, n, _ in kept], dtype=torch.int64, device="cpu")
        counts = torch.tensor([count for _, _, count in kept], dtype=torch.int64, device="cpu")
        self._write_context(StepInput(counts, ends, tables), hidden_states)

    @traced("dspark")
    def draft(
        self, batch: list[DraftRows], num_drafts: int, decode_query_len: int, graphs: DecodeGraphs | None
    ) -> DraftTokens:
        """With ``num_drafts`` 0 the keys of the rows are written and nothing is drafted."""
        tables = block_tables(self.manager, [rows.sequence.cache for rows in batch])
        lengths = torch.tensor([len(rows.next_ids) for rows in batch], dtype=torch.int64, device="cpu")
        ends = torch.tensor([rows.start for rows in batch], dtype=torch.int64, device="cpu") + lengths
        self._write_context(StepInput(lengths, ends, tables), torch.cat([rows.hidden_states for rows in batch]))
        newest = torch.tensor([rows.next_ids[-1] for rows in batch], device=self.device, dtype=torch.int64)
        if not num_drafts:
            empty = newest.new_empty(len(batch), 0)
            return DraftTokens(empty, empty.float())
        return self._draft_blocks(newest, ends, tables, num_drafts)

    def warm_up(self, batch: StepInput, hidden_states: torch.Tensor, token_ids: torch.Tensor, num_drafts: int) -> None:
        self._write_context(batch, hidden_states)
        ends = batch.seq_lens - self.max_drafts  # blocks that end where the tables do
        if int(ends.min()) >= 0:
            self._draft_blocks(token_ids[: len(ends)], ends, batch.block_tables, num_drafts)

    def _write_context(self, batch: StepInput, hidden_states: torch.Tensor) -> None:
        """Writes the keys of a step's tokens; rows of one kind, since none of them reads."""
        step = self.builder.build(replace(batch, decode_threshold=int(batch.query_lens.max())))
        self.model.write_context(hidden_states, step)

    def _draft_blocks(
        self, newest: torch.Tensor, ends: torch.Tensor, tables: dict[str, torch.Tensor], num_drafts: int
    ) -> DraftTokens:
        """Drafts after the ``newest [B]`` tokens of sequences that have computed ``ends [B]`` tokens before them."""
        size, requests = self.max_drafts, len(newest)
        lengths = torch.full_like(ends, size)
        step = self.builder.build(StepInput(lengths, ends + size, tables, decode_threshold=size))
        self._read_whole_blocks(step, size)
        noise = self.model.config.drafter.dspark_noise_token_id
        ids = torch.full((requests, size), noise, device=self.device, dtype=torch.int64)
        ids[:, 0] = newest
        states = self.model.draft_block(ids.flatten(), step).unflatten(0, (requests, size))
        return DraftTokens(*self.model.draft_tokens(states[:, :num_drafts], newest))

    def _read_whole_blocks(self, step: StepMetadata, size: int) -> None:
        """Makes each row read its block and the window before it, instead of the window that ends in the row."""
        last = step.positions.unflatten(0, (-1, size))[:, -1:].expand(-1, size).flatten()
        table, window = step.block_tables[WINDOW], self.builder.layout.window + size
        rows = step_indices(last, step.token_to_req_indices, None, table, WINDOW_PAGE, window, []).swa
        if rows is None:
            raise RuntimeError("blocks of drafts need a window in their layers")
        indices = F.pad(rows.indices, (0, -window % INDEX_ALIGN), value=-1)
        step.window.decode_swa_indices, step.window.decode_swa_lens = indices.unsqueeze(1), rows.lens
