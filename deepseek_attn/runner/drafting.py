"""What the MTP layer is asked for: logits of a step's own tokens, and guesses of what comes after them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepseek_attn.attention.builder import StepInput
from deepseek_attn.runner.graphs import Guesses
from deepseek_attn.runner.sequence import Sequence
from deepseek_attn.utils.tracing import traced

if TYPE_CHECKING:
    from deepseek_attn.runner.model_runner import ModelRunner

Rows = list[tuple[Sequence, int, torch.Tensor, list[int]]]


@traced("mtp")
def draft_logits(runner: ModelRunner, rows: list[tuple[Sequence, int]], streams: torch.Tensor) -> list[torch.Tensor]:
    """MTP logits of a step's tokens that have a next token; the others take part as padding."""
    following, known = [], []
    for sequence, n in rows:
        start = sequence.num_computed + 1
        tokens = sequence.token_ids[start : start + n]
        following += tokens + [0] * (n - len(tokens))
        known += [True] * len(tokens) + [False] * (n - len(tokens))
    valid, lengths = torch.tensor(known), [n for _, n in rows]
    meta = runner.mtp_builder.build(runner.step_input([sequence.cache for sequence, _ in rows], lengths, valid))
    next_ids = torch.tensor(following, device=runner.device)
    logits = runner.model.draft_logits(runner.model.draft_hidden_states(streams, next_ids, meta.positions, meta))
    return [part[mask.to(part.device)] for part, mask in zip(logits.split(lengths), valid.split(lengths), strict=True)]


def draft_tokens(runner: ModelRunner, batch: Rows, drafts: int) -> Guesses:
    """`ModelRunner.draft`: over persistent tensors where it can be, eagerly elsewhere."""
    counts = [len(following) for *_, following in batch]
    if runner.graphs is None or not runner.graphs.takes_drafts(counts):
        return _draft_eagerly(runner, batch, drafts)
    with torch.inference_mode():
        caches, starts = [sequence.cache for sequence, *_ in batch], [start for _, start, _, _ in batch]
        streams = torch.cat([streams for _, _, streams, _ in batch])
        return runner.graphs.draft(caches, starts, streams, [following for *_, following in batch], drafts)


def _draft_eagerly(runner: ModelRunner, batch: Rows, drafts: int) -> Guesses:
    order = sorted(range(len(batch)), key=lambda i: len(batch[i][3]) > 1)  # decodes first; stable
    rows = [batch[i] for i in order]
    caches = [sequence.cache for sequence, *_ in rows]
    lengths = torch.tensor([len(following) for *_, following in rows])
    starts = torch.tensor([start for _, start, _, _ in rows])
    next_ids = torch.tensor([token for *_, following in rows for token in following], device=runner.device)
    states, found, first = torch.cat([streams for _, _, streams, _ in rows]), [], None
    while len(found) < drafts:
        step = StepInput(lengths, starts + lengths, runner.block_tables(caches), decode_threshold=int(lengths.max()))
        meta = runner.mtp_builder.build(step)
        states = runner.model.draft_hidden_states(states, next_ids, meta.positions, meta)
        if not found:
            states = states[(lengths.cumsum(0) - 1).to(runner.device)]
        logits = runner.model.draft_logits(states)
        first, next_ids = logits if first is None else first, logits.argmax(-1)
        found.append(next_ids)
        starts, lengths = starts + lengths, torch.ones_like(lengths)
    back = torch.tensor(order).argsort().to(runner.device)
    return Guesses(torch.stack(found, dim=1)[back], first[back])
