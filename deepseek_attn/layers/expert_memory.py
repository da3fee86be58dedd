"""Where the routed experts of a model are kept: on its device, in host memory, or in the checkpoint's files."""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_attn.config.options import is_integer

GPU, HOST, DISK = "gpu", "host", "disk"
EXPERT_MEMORY = {
    GPU: "on the device of the model",
    HOST: "in pinned host memory; the GPU keeps a part of them (on a CPU the same as gpu)",
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
