"""MTP drafting: draft logits for a step's own tokens, and draft tokens after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepseek_attn.attention.builder import MetadataBuilder, StepInput
from deepseek_attn.cache.manager import CacheManager
from deepseek_attn.models.deepseek_v4 import DeepseekV4
from deepseek_attn.models.deepseek_v32 import DeepseekV32
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
class Drafter:
    """The MTP layer of a model that has one.

    Attributes:
        builder: builds the metadata of the MTP layer's own caches.
    """

    model: DeepseekV4 | DeepseekV32
    builder: MetadataBuilder
    manager: CacheManager
    device: torch.device

    @traced("mtp")
    def step_logits(self, rows: Batch, hidden_states: torch.Tensor, decode_query_len: int) -> list[torch.Tensor]:
        """MTP logits of a step's tokens that have a next token, by request; the others take part as padding.

        Args:
            rows: the step's batch, not committed yet; hidden_states: of all its tokens, one request after the other.
        """
        next_ids, known = [], []
        for sequence, n in rows:
            start = sequence.num_computed + 1
            tokens = sequence.token_ids[start : start + n]
            next_ids += tokens + [0] * (n - len(tokens))
            known += [True] * len(tokens) + [False] * (n - len(tokens))
        valid, lengths = torch.tensor(known), [n for _, n in rows]
        caches = [sequence.cache for sequence, _ in rows]
        meta = self.builder.build(step_input(self.manager, caches, lengths, decode_query_len, valid))
        ids = torch.tensor(next_ids, device=self.device)
        logits = self.model.draft_logits(self.model.draft_hidden_states(hidden_states, ids, meta.positions, meta))
        masks = valid.split(lengths)
        return [part[mask.to(part.device)] for part, mask in zip(logits.split(lengths), masks, strict=True)]

    def draft(
        self, batch: list[DraftRows], num_drafts: int, decode_query_len: int, graphs: DecodeGraphs | None
    ) -> DraftTokens:
        """`ModelRunner.draft`: over persistent tensors where they hold it, eagerly elsewhere."""
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

    def _draft_eagerly(self, batch: list[DraftRows], num_drafts: int, decode_query_len: int) -> DraftTokens:
        order = sorted(range(len(batch)), key=lambda i: len(batch[i].next_ids) > decode_query_len)
        ordered = [batch[i] for i in order]
        caches = [rows.sequence.cache for rows in ordered]
        lengths = torch.tensor([len(rows.next_ids) for rows in ordered])
        starts = torch.tensor([rows.start for rows in ordered])
        next_ids = torch.tensor([token for rows in ordered for token in rows.next_ids], device=self.device)
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
        back = torch.tensor(order).argsort().to(self.device)
        return DraftTokens(torch.stack(drafts, dim=1)[back], first_logits[back])
