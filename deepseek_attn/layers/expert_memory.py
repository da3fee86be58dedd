"""Where the routed experts of a model are kept: on its device, in host memory, or in the checkpoint's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from deepseek_attn.config.options import is_integer

GPU, HOST, DISK = "gpu", "host", "disk"
EXPERT_MEMORY = {
    GPU: "on the device of the model",
    HOST: "in pinned host memory; the GPU keeps a part of them (on a CPU the same as gpu)",
    DISK: "in the checkpoint's files; the device keeps a part of them",
}
"""Values of ``expert_memory``."""


@dataclass(frozen=True)
class ExpertMemory:
    """Where routed experts are kept.

    Attributes:
        kind: a key of `EXPERT_MEMORY`.
        cache_bytes: bytes of experts on the device (of a CPU: in RAM) for ``host`` and ``disk``; None: chosen by the
            memory that is free once everything else is allocated.

    Raises:
        ValueError: an unknown kind, or bytes for ``gpu``, where all experts are resident.
    """

    kind: str = GPU
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in EXPERT_MEMORY:
            raise ValueError(f"expert_memory={self.kind!r}: supported are {', '.join(EXPERT_MEMORY)}")
        size = self.cache_bytes
        if size is None:
            return
        if not is_integer(size) or size < 1:
            raise ValueError(f"expert_cache_bytes={size!r}: must be a positive integer")
        if self.kind == GPU:
            raise ValueError(
                f"expert_cache_bytes={size}: with expert_memory='gpu' all experts are on the device; choose 'host' or "
                "'disk', or leave it out"
            )


RESIDENT = ExpertMemory()


@dataclass
class ExpertStats:
    """Uses of experts by the steps of a model: an expert counts once per layer and step that needs it.

    Attributes:
        hits: uses of experts that were on the device; misses: uses of experts that had to be read.
        bytes_read: bytes of weights and scales that misses read.
        ahead: misses whose copies were begun before their routing was known, by prediction; dropped: predicted copies
            of experts that no token needed, ended once the routing was known; their bytes do not count.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    ahead: int = 0
    dropped: int = 0

    def count(self, hits: int, uses: int) -> None:
        """Counts the uses of one layer in one step."""
        self.hits, self.misses = self.hits + hits, self.misses + uses - hits

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class UnreadWeight(Protocol):
    """A weight that stays in the checkpoint, with its scale. Calling it reads both, as a `WeightSlot` loads them.

    Attributes:
        nbytes: bytes that a read takes.
        dtype: of the stored weight, as the header spells it.
        in_threads: several threads may read at the same time.
    """

    nbytes: int
    dtype: str
    in_threads: bool

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def read_scale(self) -> torch.Tensor:
        """The scale of an FP4 weight alone: e8m0 bytes."""
        ...

    def template(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result of a call without its values, on the device "meta"."""
        ...
