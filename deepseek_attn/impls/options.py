"""Attention options of a runner: the backend, optionally by phase, and how prefill reads the caches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.config.options import is_integer
from deepseek_attn.impls.base import AttentionSpec, SparseMLAAttentionImpl
from deepseek_attn.impls.prefill import prefill_reads_pages, workspace_rows_per_request

FP8_MODES = ("auto", "mixed", "separate")


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a runner's attention.

    Attributes:
        backend: ``auto``, the name of an impl that ``deepseek-attn info`` lists, the name of a registered one
            (`impls.register_impl`), or ``module:Class``.
        decode_backend, prefill_backend: the same for one phase; None: ``backend``.
        fp8_mode: ``mixed``: prefill queries read cache pages in place, as decode queries do. ``separate``: the keys of
            prefill requests are first gathered to rows of the model's dtype. ``auto``: see `prefill_reads_pages`.
        prefill_workspace_rows: rows of gathered keys, shared by the requests of a step in turn; None: four requests of
            full length, fewer if fewer run at once.
        deterministic: logits do not depend on the batch, so every query reads pages.
    """

    backend: str = "auto"
    decode_backend: str | None = None
    prefill_backend: str | None = None
    fp8_mode: str = "auto"
    prefill_workspace_rows: int | None = None
    deterministic: bool = False

    @property
    def phases(self) -> tuple[str, str]:
        """Names of the impls of decode and of prefill."""
        return self.decode_backend or self.backend, self.prefill_backend or self.backend

    @property
    def reference_only(self) -> bool:
        """Every op runs in plain torch."""
        return self.phases == ("reference", "reference")

    def prefill_reads_pages(self, spec: AttentionSpec) -> bool:
        """Whether prefill queries read cache pages in place, as decode queries do, instead of gathered rows."""
        return prefill_reads_pages("mixed" if self.deterministic else self.fp8_mode, spec)

    def workspace_rows(self, spec: AttentionSpec, ratios: Iterable[int], layout: CacheLayout) -> int:
        """Rows of the prefill workspace; 0 where prefill reads pages.

        Args:
            ratios: of the layers.

        Raises:
            ValueError: options that no impl supports; the message lists all problems.
        """
        ratios, rows, problems, least = list(ratios), self.prefill_workspace_rows, [], 0
        if self.fp8_mode not in FP8_MODES:
            problems.append(f"fp8_mode={self.fp8_mode!r}: supported are {', '.join(FP8_MODES)}")
        elif spec.sparse and not self.prefill_reads_pages(spec):
            least = workspace_rows_per_request(ratios, layout)
        if rows is not None and not is_integer(rows):
            problems.append(f"prefill_workspace_rows={rows!r}: must be an integer")
        elif rows is not None and rows < least:
            problems.append(
                f"prefill_workspace_rows={rows}: one request of max_model_len={layout.max_model_len} needs {least}; "
                "raise it, lower max_model_len or max_num_batched_tokens, or take fp8_mode='mixed'"
            )
        if problems:
            raise ValueError("invalid options:\n  - " + "\n  - ".join(problems))
        if not least:
            return 0
        return min(SparseMLAAttentionImpl.PREFILL_CHUNK_SIZE, layout.max_num_seqs) * least if rows is None else rows
