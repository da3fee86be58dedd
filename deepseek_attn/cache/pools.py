"""The allocated pools: one tensor per layer and kind, addressed by page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepseek_attn.cache.layout import CacheLayout, PoolSpec
from deepseek_attn.cache.record import Record


@dataclass
class Pool:
    """Paged rows of one layer.

    Attributes:
        tensor: uint8 ``[pages, page_bytes]`` for pools with a record, float32 ``[pages, entries, width]`` for states.
        carried: float32 ``[max_snapshots, carry, width]``, the state rows that snapshots keep.
    """

    spec: PoolSpec
    tensor: torch.Tensor
    carried: torch.Tensor

    @property
    def entries(self) -> int:
        return self.spec.entries

    @property
    def record(self) -> Record:
        """Layout of an entry; not available for a pool of states."""
        record = self.spec.record
        assert record is not None, f"the {self.spec.kind} pool of {self.spec.layer} holds states, not records"
        return record

    def insert(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Stores ``rows [T, dim]`` at ``slots [T]`` (page * entries + offset); negative slots are skipped."""
        self.record.insert(self.tensor, self.entries, slots, rows)

    def gather(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Reads ``slots [...]`` as ``[..., dim]``; negative slots give zeros."""
        return self.record.gather(self.tensor, self.entries, slots, dtype)

    def gather_request(self, pages: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The first ``count`` rows ``[count, dim]`` of a request with these ``pages``."""
        entry = torch.arange(count, device=pages.device)
        return self.gather(pages.long()[entry // self.entries] * self.entries + entry % self.entries, dtype)


class CachePools:
    """Every pool of a layout, allocated on one device and zeroed."""

    def __init__(self, layout: CacheLayout, device: torch.device | str = "cpu"):
        self.layout = layout
        self._pools: dict[tuple[str, str], Pool] = {}
        for spec in layout.pools:
            pages = layout.pages[spec.group]
            if spec.record is not None:
                tensor = spec.record.allocate(pages, spec.entries, device)
            else:
                tensor = torch.zeros(pages, spec.entries, spec.width, device=device, dtype=torch.float32)
            carried = torch.zeros(layout.max_snapshots, spec.carry, spec.width, device=device, dtype=torch.float32)
            self._pools[spec.layer, spec.kind] = Pool(spec, tensor, carried)

    def get(self, layer: str, kind: str) -> Pool | None:
        """The pool of a layer (``layers.N`` or ``mtp.N``) and kind (`PoolSpec.kind`); None without such a pool."""
        return self._pools.get((layer, kind))

    def __getitem__(self, key: tuple[str, str]) -> Pool:
        """As `get`, but raises KeyError without such a pool."""
        return self._pools[key]

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def clear(self) -> None:
        """Drops the tensors; layers that are bound to some of them keep those."""
        self._pools.clear()

    def nbytes(self) -> int:
        """Bytes of the allocated storage."""
        return sum(part.untyped_storage().nbytes() for pool in self for part in (pool.tensor, pool.carried))

    def copy_page(self, group: str, source: int, target: int) -> None:
        """Copies one page in every pool of ``group``."""
        for pool in self:
            if pool.spec.group == group:
                pool.tensor[target].copy_(pool.tensor[source])
