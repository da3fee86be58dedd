"""What oracles return: what they computed, and how close their discrete choices came to a tie.

Two float32 programs may decide a near-tie differently, and are then both right.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class OracleOutput:
    """What an oracle says about one prompt of ``T`` tokens.

    Attributes:
        logits: ``[T, vocab_size]``.
        experts: by layer, int64 ``[T, k]``, ascending.
        entries: by layer with an indexer, bool ``[T, T // ratio]``: which compressed entries a query reads.
        router_gap: smallest distance of ``score + bias`` between the last expert chosen and the first rejected.
        index_gap: the same between entries, relative to the largest visible \\|score\\| of the query.
        mtp_logits: ``[T - 1, vocab_size]`` where there is an MTP layer.
    """

    logits: torch.Tensor | None = None
    experts: dict[int, torch.Tensor] = field(default_factory=dict)
    entries: dict[int, torch.Tensor] = field(default_factory=dict)
    router_gap: float = float("inf")
    index_gap: float = float("inf")
    mtp_logits: torch.Tensor | None = None

    def choose_experts(self, layer: int, biased: torch.Tensor, k: int) -> None:
        """Records the experts of a scored layer from ``score + bias [T, E]``."""
        self.experts[layer] = biased.topk(k, dim=-1).indices.sort(-1).values
        if k < biased.shape[1]:
            best = biased.sort(-1, descending=True).values
            self.router_gap = min(self.router_gap, float((best[:, k - 1] - best[:, k]).min()))

    def choose_entries(self, layer: int, scores: torch.Tensor, visible: torch.Tensor, k: int) -> None:
        """Records the entries of a layer from ``scores [T, N]``, of which query t sees the first ``visible[t]``."""
        chosen = torch.zeros(scores.shape, dtype=torch.bool)
        for t, count in enumerate(visible.tolist()):
            row = scores[t, :count]
            chosen[t, row.topk(min(k, count)).indices] = True
            if count > k:
                best = row.sort(descending=True).values
                self.index_gap = min(self.index_gap, float(best[k - 1] - best[k]) / (float(row.abs().max()) or 1.0))
        self.entries[layer] = chosen
