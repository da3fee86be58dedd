"""A runner without memory, on the device "meta": its steps show what a runner would launch, allocate and choose.

It is built as every runner is, of one layer of each kind, from the headers of a checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch

from deepseek_attn.checkpoint.source import HeaderSource
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.runner.ahead.request import RunnerRequest
from deepseek_attn.runner.build import build_runner
from deepseek_attn.runner.loaded import LoadedModel

META = torch.device("meta")


class MetaRanks(Parallel):
    """A rank whose collectives exchange nothing."""

    def _exchange(self, collective: Any, *args: Any) -> None:
        pass


class MetaRunner(LoadedModel):
    """A runner on the device "meta"."""

    @classmethod
    def build(cls, request: RunnerRequest) -> MetaRunner:
        """The runner of a request."""
        ranks = request.parallel
        runner = build_runner(
            cls,
            request.config,
            HeaderSource(request.headers),
            device=META,
            dtype=request.dtype,
            numerics=request.numerics,
            **vars(request.attention),
            **request.sizes._asdict(),
            cuda_graphs=request.cuda_graphs,
            parallel=MetaRanks(ranks.rank, ranks.world, ranks.dp_attention),
            expert_memory=request.experts.kind,
            expert_cache_bytes=request.experts.cache_bytes,
            compile_ahead=False,
            progress=False,
        )
        runner.decode_query_len = 1 + request.num_drafts
        return runner
