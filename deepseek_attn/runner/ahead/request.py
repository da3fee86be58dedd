"""Everything that the launches of a runner depend on."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.checkpoint.representatives import layer_of, representatives
from deepseek_attn.checkpoint.source import TensorInfo
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.dispatch import need_triton
from deepseek_attn.layers.expert_memory import RESIDENT, ExpertMemory
from deepseek_attn.layers.parallel import Parallel

PACKAGES = ("deepseek_attn", "deepseek_attn.kernels", "deepseek_attn.models")  # their code chooses kernels


class RunnerSizes(NamedTuple):
    """Limits of a runner, as `RunnerOptions` has them."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_rollback: int

    @classmethod
    def of(cls, layout: CacheLayout) -> RunnerSizes:
        """The limits that caches of this layout were made for."""
        return cls(*(getattr(layout, name) for name in cls._fields))


@dataclass(frozen=True)
class RunnerRequest:
    """Everything that the launches of a runner depend on; it can be pickled.

    Attributes:
        config: of the model, reduced to one layer of each kind and the layers that these read.
        headers: tensors of those layers and tensors outside layers, under their published names.
        gpu: the GPU that kernels are for.
        num_drafts: tokens that the MTP layer drafts per step; 0 without speculation.
        parallel: the rank; its collectives are left out.
        experts: where routed experts are kept.
    """

    config: AnyConfig
    headers: dict[str, TensorInfo]
    numerics: Numerics
    dtype: torch.dtype
    attention: AttentionOptions
    sizes: RunnerSizes
    gpu: GPU
    cuda_graphs: bool | None = None
    num_drafts: int = 0
    parallel: Parallel = dataclasses.field(default_factory=Parallel.single)
    experts: ExpertMemory = RESIDENT

    @classmethod
    def of(
        cls, config: AnyConfig, headers: dict[str, TensorInfo], layers: list[int] | None = None, **facts: Any
    ) -> RunnerRequest:
        """The request of a runner of this config.

        Args:
            headers: of all tensors, under their published names; layers: the loaded layers, None for all.
            facts: all other attributes.
        """
        if layers is not None:
            present = tuple(layer for layer in config.layers if layer.index in layers)
            config = dataclasses.replace(config, layers=present, mtp_layers=())
        kept = representatives(config, headers)
        config = dataclasses.replace(config, layers=tuple(layer for layer in config.layers if layer.index in kept))
        if (ranks := facts.get("parallel")) is not None:
            facts["parallel"] = Parallel(ranks.rank, ranks.world, ranks.dp_attention)  # other processes lack its memory
        headers = {name: info for name, info in headers.items() if (layer_of(name) in kept or layer_of(name) is None)}
        return cls(config, headers, **facts)

    def marker(self) -> Path:
        """A file in Triton's cache that exists once all kernels of this request are compiled.

        Raises:
            ValueError: Triton is not installed.
        """
        need_triton("compiling kernels")
        import triton

        from deepseek_attn.runner.ahead.recording import compile_settings

        digest = hashlib.sha256(f"{self!r} {compile_settings(self.gpu)} {torch.__version__}".encode())
        for package in PACKAGES:
            for folder in importlib.import_module(package).__path__:
                for path in sorted(Path(folder).rglob("*.py")):
                    digest.update(path.read_bytes())
        return Path(triton.knobs.cache.dir) / f"deepseek-attn-{digest.hexdigest()[:32]}"
