"""How a runner attends: its backend, by phase if wanted, and how prefill reads the caches."""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_attn.config.options import is_integer

FP8_MODES = ("auto", "mixed", "separate")


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a runner's attention.

    Attributes:
        backend: ``auto``, or the name of an impl that ``deepseek-attn info`` lists.
        decode_backend, prefill_backend: the same for one phase; None: ``backend``.
        fp8_mode: ``mixed``: prefill queries read cache pages in place, as decode queries do. ``separate``: the keys of
            prefill requests are gathered to rows of the model's dtype first. ``auto``: see `prefill_reads_pages`.
        prefill_workspace_rows: rows of gathered keys, shared by the requests of a step in turn; None: four requests of
            full length, fewer if fewer run at once.
    """

    backend: str = "auto"
    decode_backend: str | None = None
    prefill_backend: str | None = None
    fp8_mode: str = "auto"
    prefill_workspace_rows: int | None = None

    @property
    def phases(self) -> tuple[str, str]:
        """Names of the impls of decode and of prefill."""
        return self.decode_backend or self.backend, self.prefill_backend or self.backend

    @property
    def reference_only(self) -> bool:
        """Every op runs in plain torch."""
        return self.phases == ("reference", "reference")

    def check(self, rows_per_request: int, max_model_len: int) -> None:
        """ValueError, with all problems, for options that no impl can follow.

        Args:
            rows_per_request: rows that one request of ``max_model_len`` tokens may need.
        """
        problems = []
        if self.fp8_mode not in FP8_MODES:
            problems.append(f"fp8_mode={self.fp8_mode!r}: supported are {', '.join(FP8_MODES)}")
        rows = self.prefill_workspace_rows
        if rows is not None and not is_integer(rows):
            problems.append(f"prefill_workspace_rows={rows!r}: must be an integer")
        elif rows is not None and rows < rows_per_request:
            problems.append(
                f"prefill_workspace_rows={rows}: one request of max_model_len={max_model_len} needs "
                f"{rows_per_request}; raise it, lower max_model_len or max_num_batched_tokens, or take fp8_mode='mixed'"
            )
        if problems:
            raise ValueError("invalid options:\n  - " + "\n  - ".join(problems))
