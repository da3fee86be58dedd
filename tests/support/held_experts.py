"""Experts of a runner on a CPU in rows, as a GPU holds those of host memory."""

from __future__ import annotations

from contextlib import contextmanager

from deepseek_attn.models.expert_rows import HOST_AREAS, expert_formats
from deepseek_attn.models.host_rows import ExpertRows
from deepseek_attn.models.moe import Experts, MoE
from deepseek_attn.runner import ModelRunner
from deepseek_attn.runner.host_experts import give_rows, predict_experts


def experts_of(runner: ModelRunner) -> list[Experts]:
    return [module for module in runner.model.modules() if isinstance(module, Experts)]


def budget_of(runner: ModelRunner, cached: int) -> int:
    """Bytes of rows for ``cached`` experts of each layer."""
    return bytes_of([layer.stacks() for layer in experts_of(runner)], cached)


def bytes_of(stacks, cached: int) -> int:
    """Bytes of rows for ``cached`` experts of each layer."""
    return sum(form.held(cached) for form, _ in expert_formats(stacks, HOST_AREAS))


@contextmanager
def held(runner: ModelRunner, cached: int):
    """In this context the runner's layers read experts by rows, as with ``expert_memory="host"`` on a GPU.

    Args:
        cached: experts of each layer; more if their rows take as many bytes.
    """
    layers, budget, model = experts_of(runner), budget_of(runner, cached), runner.whole_model()
    in_turn, drafting = (
        [module for module in part.modules() if isinstance(module, MoE)] for part in (model.layers, model.mtp)
    )
    rows = ExpertRows.of([layer.stacks() for layer in layers], runner.device, budget, len(in_turn))
    assert rows.cached >= cached
    assert rows.nbytes <= budget
    give_rows(in_turn, drafting, rows)
    predict_experts(model, 0.5)
    hooks = rows.watch(runner.model, runner.config.num_experts_per_tok)
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            del layer.rows
