"""The kernels of a model's steps with the reason for each: plans of launches by layer, without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from deepseek_attn.checkpoint.representatives import representatives
from deepseek_attn.checkpoint.source import TensorInfo
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.trailing import TrailingPart, trailing_parts
from deepseek_attn.kernels.common.plans import Choice, Planned, choices_of, recorded_plans
from deepseek_attn.runner.ahead.recording import Variant, recorded_launches
from deepseek_attn.runner.ahead.request import RunnerRequest, RunnerSizes
from deepseek_attn.runner.graph_steps import StepSize
from deepseek_attn.runner.meta_runner import MetaRunner
from deepseek_attn.runner.trailing import TrailingRows
from deepseek_attn.runner.warm_up import WarmUp

INPUTS, BETWEEN, HEAD = "inputs of a step", "between layers", "head"
"""Parts of a step outside its layers: metadata and embedding, what joins two layers, and logits with greedy tokens."""

LIBRARIES = ("cuBLAS", "FlashMLA", "torch")
"""Values of `Row.kernel` that are no kernels of this package."""


@dataclass(frozen=True)
class PlanLine:
    """A kernel that a plan chose.

    Attributes:
        op: ``family.op``; empty for a launch that no plan names.
        kernel: the device function, or the library that computes; config: tiles, warps and stages.
        derived: values that the plan computes beside its choices, such as splits.
        condition, source: of the chosen row; empty if no plan names the launch.
    """

    op: str
    kernel: str
    config: str
    derived: str = ""
    condition: str = ""
    source: str = ""


@dataclass
class StepPlans:
    """Lines of a model's steps.

    Attributes:
        steps: names of the steps, ``decode 8`` or ``prefill 512``; layers: names of the layers that stand for all.
        trailing: parts of the model that compute trailing rows of prompts alone (V4.1).
        counts: how often each line applies in a step and a part of it, by (part, line) and step; a part is a layer, or
            `INPUTS`, `BETWEEN` or `HEAD`.
    """

    steps: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    trailing: tuple[TrailingPart, ...] = ()
    counts: dict[tuple[str, PlanLine], Counter[str]] = field(default_factory=dict)

    def groups(self) -> dict[tuple[str, ...], list[tuple[PlanLine, Counter[str]]]]:
        """Lines by the parts of a step that share them, with their counts by step; in the order of a step."""
        parts: dict[tuple[PlanLine, tuple[tuple[str, int], ...]], list[str]] = {}
        for (part, line), steps in self.counts.items():
            parts.setdefault((line, tuple(steps.items())), []).append(part)
        order, groups = [INPUTS, *self.layers, BETWEEN, HEAD], {}
        for (line, steps), shared in parts.items():
            groups.setdefault(tuple(sorted(shared, key=order.index)), []).append((line, Counter(dict(steps))))
        ranked = sorted(groups.items(), key=lambda group: (order.index(group[0][0]), -len(group[0])))
        return dict(ranked)

    def as_json(self) -> list[dict[str, Any]]:
        """One object for each line and the parts that share it."""
        return [
            {"parts": list(parts), **asdict(line), "steps": dict(counts)}
            for parts, lines in self.groups().items()
            for line, counts in lines
        ]


def step_plans(
    config: AnyConfig,
    headers: dict[str, TensorInfo],
    batches: Sequence[int],
    context: int,
    prefills: Sequence[int] = (),
    **facts: Any,
) -> StepPlans:
    """The plans of decode steps of ``batches`` sequences of ``context`` tokens, and of prompts of ``prefills`` tokens.

    Prompts are computed for results at their end, which V4.1's upper layers need trailing rows alone for.
    Nothing else in the process may launch kernels meanwhile.

    Args:
        headers: of the checkpoint's tensors, under their published names; facts: attributes of `RunnerRequest`.
    """
    sizes = RunnerSizes(max(context, *prefills, 1), max(batches), max(*batches, *prefills, 256), 16)
    request = RunnerRequest.of(config, headers, sizes=sizes, **facts)
    with recorded_launches(request.gpu) as launches:
        runner = MetaRunner.build(request)
        steps = _Steps(runner, representatives(config, headers), launches.latest)
        trailing = _trailing_of_all_layers(runner, config)
        if trailing is not None and prefills:
            steps.found.trailing = trailing.parts
            loaded = tuple(part for part in trailing.parts if str(part.layer) in runner.model.layers)
            trailing = replace(trailing, parts=loaded)
        with runner.op_settings(), torch.inference_mode():
            warm_up = WarmUp(runner)
            for batch in batches:
                if runner.graphs is None:
                    steps.run(f"decode {batch}", lambda batch=batch: warm_up.prefill([(1, context)] * batch))
                else:
                    steps.run(f"decode {batch}", lambda batch=batch: warm_up.decode(StepSize(batch, 1, context)))
            for tokens in prefills:
                steps.run(f"prefill {tokens}", lambda tokens=tokens: warm_up.prefill([(tokens, tokens)], trailing))
    return steps.found


def _trailing_of_all_layers(runner: MetaRunner, config: AnyConfig) -> TrailingRows | None:
    """The trailing rows of the whole model, although the runner has only one layer of each kind."""
    if runner.trailing is None:
        return None
    return replace(
        runner.trailing, parts=trailing_parts(config.layers, runner.trailing.window, len(config.mtp_layers) > 0)
    )


class _Steps:
    """Runs steps and notes the plans and launches of each part of them."""

    def __init__(self, runner: MetaRunner, counts: dict[int, int], launches: list[Variant]):
        blocks = runner.model.layers
        self._names = {}
        for spec in runner.config.layers:
            same = counts.get(spec.index, 1)
            self._names[str(spec.index)] = f"{spec.kind}, layer {spec.index}" + (f" of {same} such" if same > 1 else "")
        self.found = StepPlans(layers=[self._names[index] for index in blocks])
        self._launches, self._plans, self._left = launches, [], 0
        self._part, self._begun = INPUTS, (0, 0)
        for index, block in blocks.items():
            block.register_forward_pre_hook(lambda *_, name=self._names[index]: self._enter(name))
            block.register_forward_hook(lambda *_: self._leave())

    def run(self, step: str, call: Callable[[], object]) -> None:
        self._launches.clear()
        self._step, self._part, self._begun, self._left = step, INPUTS, (0, 0), len(self._names)
        self.found.steps.append(step)
        with recorded_plans() as self._plans:
            call()
            self._enter("")

    def _leave(self) -> None:
        self._left -= 1
        self._enter(BETWEEN if self._left else HEAD)

    def _enter(self, part: str) -> None:
        """Records the plans and launches of the previous part of the model."""
        plans, launches = (self._plans[self._begun[0] :], self._launches[self._begun[1] :])
        for line in lines(plans, launches):
            self.found.counts.setdefault((self._part, line), Counter())[self._step] += 1
        self._part, self._begun = part, (len(self._plans), len(self._launches))


def lines(plans: Sequence[Planned], launches: Sequence[Variant]) -> list[PlanLine]:
    """A line for each choice of the plans, and one for each launch of a kernel that none of them names.

    A choice whose kernel was not launched is left out: a plan names kernels that prepare a weight once, for instance.
    """
    found = []
    launched = {variant.name for variant in launches}
    for planned in plans:
        derived = brief(derived_fields(planned.plan))
        for choice in choices_of(planned.plan):
            if choice.kernel in LIBRARIES or choice.kernel in launched:
                config = brief(choice.config)
                found.append(PlanLine(planned.op, choice.kernel, config, derived, choice.when, choice.source))
                derived = ""
    named = {line.kernel for line in found}
    for variant in launches:
        if variant.name not in named:
            found.append(PlanLine("", variant.name, f"warps={variant.options['num_warps']}"))
    return found


def derived_fields(plan: Any) -> dict[str, Any]:
    """Fields of a plan that hold no choice, by name."""
    if isinstance(plan, Choice) or not is_dataclass(plan):
        return {}
    return {name: value for name, value in vars(plan).items() if not choices_of(value)}


def brief(value: Any) -> str:
    """Fields by name, except None, False and empty ones: ``rows=128 stages=4 pdl``."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    elif isinstance(value, tuple) and (as_dict := getattr(value, "_asdict", None)) is not None:
        value = as_dict()
    if not isinstance(value, dict):
        return "" if value is None else str(value)
    words = []
    for name, part in value.items():
        if part is True:
            words.append(name)
        elif part is not None and part is not False and part != ():
            text = brief(part)
            words.append(f"{name}=({text})" if " " in text else f"{name}={text}")
    return " ".join(words)
