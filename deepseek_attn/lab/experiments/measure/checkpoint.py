"""Quality of a loaded checkpoint under its own schedule and under others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from deepseek_attn.checkpoint.random import RandomSource
from deepseek_attn.checkpoint.safetensors_source import SafetensorsSource
from deepseek_attn.checkpoint.source import CheckpointSource
from deepseek_attn.config.model import AnyConfig, ModelConfig, preset_names
from deepseek_attn.config.numerics import Numerics, get_numerics, usual_preset
from deepseek_attn.lab.experiments.define.files import read_text_file
from deepseek_attn.lab.experiments.define.results import CheckpointResult, RecallRow
from deepseek_attn.lab.experiments.define.settings import CheckpointSettings
from deepseek_attn.lab.experiments.define.variant import ModelVariant
from deepseek_attn.lab.experiments.measure.layer_states import (
    States,
    attend,
    final_states,
    first_states,
    packed,
    run_layer,
    unpacked,
)
from deepseek_attn.lab.experiments.measure.quality import compare
from deepseek_attn.lab.experiments.measure.recall import RecallObserver
from deepseek_attn.lab.experiments.measure.reschedule import RescheduledSource, WithoutIndexers, gained_indexers
from deepseek_attn.lab.training import sample_text
from deepseek_attn.lab.training.text import TEST_SHARE
from deepseek_attn.layers.engram import Chunk
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.text.tokenizer import Tokenizer
from deepseek_attn.utils.files import write_tensors

RECALL = "recall"  # key of the metadata that holds the rows of `RecallObserver`
LOGIT_ROWS = 1024  # tokens whose logits are computed at a time
SEED = 0  # of the weights of a preset


def open_source(settings: CheckpointSettings) -> tuple[AnyConfig, CheckpointSource]:
    """Config without MTP layers, and the tensors of a checkpoint directory, or random ones for a preset."""
    config = settings.read_config()
    directory = Path(settings.model)
    source = SafetensorsSource(directory) if directory.is_dir() else RandomSource(config, SEED)
    changes = {"compress_ratios": [spec.ratio for spec in config.layers]} if isinstance(config, ModelConfig) else {}
    return config.replace(num_nextn_predict_layers=0, **changes), source


def read_prompts(settings: CheckpointSettings, config: AnyConfig) -> list[list[int]]:
    """The text as token sequences of ``seq_len``, each after a BOS token.

    A preset has no tokenizer: its tokens are the text's bytes.

    Raises:
        ValueError: no such file, or a text of less than two tokens.
    """
    text = _read_text(settings.text)
    if settings.model in preset_names():
        ids = [byte % config.vocab_size for byte in text.encode()[: settings.max_tokens]]
    else:
        # a token has at most some tens of characters: only the start of a book is encoded
        ids = Tokenizer(settings.model).encode(text[: 40 * settings.max_tokens])[: settings.max_tokens]
    size = settings.seq_len - 1
    prompts = [[config.bos_token_id, *ids[i : i + size]] for i in range(0, len(ids), size)]
    prompts = [prompt for prompt in prompts if len(prompt) > 2]
    if not prompts:
        raise ValueError(f"checkpoint.text has {len(ids)} tokens, at least 2 are needed")
    return prompts


def _read_text(path: str | None) -> str:
    if path is None:
        text = sample_text()
        return text[-int(len(text) * TEST_SHARE) :]
    return read_text_file(path, "checkpoint.text")


def measure_own(settings: CheckpointSettings, device: torch.device, folder: Path) -> CheckpointResult:
    """Quality of the checkpoint as it is; ``folder`` gets its logits and hidden states, which variants start from."""
    config, source = open_source(settings)
    prompts = read_prompts(settings, config)
    folder.mkdir(parents=True, exist_ok=True)
    own = LayerGroups(config, source, device, prompts, settings)
    for group in own.groups:
        own.compute(group)
        for layer in own.made_by(group):
            tensors = {f"{i}.{k}": part for i, state in enumerate(own.before[layer]) for k, part in enumerate(state)}
            write_tensors(folder / _before(layer), tensors, {RECALL: json.dumps(own.recall)})
    found = compare(own.logits, own.logits, prompts)
    schedule = [spec.ratio for spec in config.layers]
    return {"schedule": schedule, "tokens": sum(map(len, prompts)), **found, "layers": own.recall}


def measure_variant(
    variant: ModelVariant, settings: CheckpointSettings, device: torch.device, folder: Path
) -> CheckpointResult:
    """Quality of the checkpoint under ``variant``, against the states that `measure_own` left in ``folder``.

    Groups of layers before the first that the variant changes are not computed again.

    Returns:
        As `measure_own`; or only a ``reason``, where the variant needs weights that cannot be derived.
    """
    base, source = open_source(settings)
    config = variant.config(base)
    if isinstance(base, ModelConfig) and isinstance(config, ModelConfig):
        if gained := gained_indexers(base, config):
            return {"reason": f"layers {gained} have no trained indexer in this checkpoint"}
        source = RescheduledSource(source, base, config)
    elif config.model_type != base.model_type:
        source = WithoutIndexers(source)
    prompts = read_prompts(settings, base)
    numerics = None
    if variant.numerics or variant.kv_record:
        numerics = variant.numerics_from(get_numerics(usual_preset(device.type == "cuda")))
    other = LayerGroups(config, source, device, prompts, settings, numerics)
    changed = [group for group in other.groups if numerics or _differ(base, config, group)]
    first = (changed or other.groups[-1:])[0][0]  # the last group, where the variant is the checkpoint's own schedule
    if first:
        for layer in other.kept_before(first):
            other.before[layer], other.recall = _read(folder / _before(layer))
    for group in other.groups:
        if group[0] >= first:
            other.compute(group)
    expected = [state[0] for state in _read(folder / _before(other.count))[0]]
    schedule = [spec.ratio for spec in config.layers]
    return {"schedule": schedule, **compare(expected, other.logits, prompts), "layers": other.recall}


def _before(layer: int) -> str:
    """File of the hidden states before a layer, by prompt; of the logits behind the last one."""
    return f"own_before_{layer}.safetensors"


def _read(path: Path) -> tuple[list[States], list[RecallRow]]:
    """Output of `measure_own`: states by prompt, and rows of the layers up to them."""
    with safe_open(path, "pt") as file:
        found: dict[int, dict[int, torch.Tensor]] = {}
        for name in file.keys():  # noqa: SIM118 not a mapping
            prompt, part = name.split(".")
            found.setdefault(int(prompt), {})[int(part)] = file.get_tensor(name)
        recall = json.loads(file.metadata()[RECALL])
    return [tuple(parts[k] for k in sorted(parts)) for _, parts in sorted(found.items())], recall


def _differ(base: AnyConfig, config: AnyConfig, group: list[int]) -> bool:
    """Whether layers of ``group`` attend differently under the two configs."""
    shared = ("model_type", "index_topk", "sliding_window")
    if any(getattr(base, key, None) != getattr(config, key, None) for key in shared):
        return True
    return any(base.layers[i] != config.layers[i] for i in group)


class LayerGroups:
    """A model whose layers are loaded and computed a group at a time, over all prompts, in the memory of one card.

    A layer that reads entries, index keys or selections of another layer (V4.1) is loaded with it: the other
    layer's attention is computed again from the hidden states before it, which are kept.

    Args:
        numerics: of all layers; None: the runner's default.

    Attributes:
        count: computed layers of the model; groups: numbers of the layers that are computed together.
        before: hidden states by layer, then prompt, as far as later groups need them; by ``count``, the logits.
        recall: rows of the layers computed so far.
    """

    def __init__(
        self,
        config: AnyConfig,
        source: CheckpointSource,
        device: torch.device,
        prompts: list[list[int]],
        settings: CheckpointSettings,
        numerics: Numerics | None = None,
    ):
        self.config, self.source, self.device, self.prompts, self.numerics = config, source, device, prompts, numerics
        self.count = count = settings.layers or config.num_hidden_layers
        size = settings.layers_at_once or count
        self.groups = [list(range(i, min(i + size, count))) for i in range(0, count, size)]
        self.before: dict[int, list[States]] = {}
        self.recall: list[RecallRow] = []

    @property
    def logits(self) -> list[torch.Tensor]:
        """``[len, vocab]`` by prompt, on the CPU."""
        return [state[0] for state in self.before[self.count]]

    def kept_before(self, layer: int) -> list[int]:
        """Layers up to ``layer`` whose input the groups from there on start from, in order; the embedding is not one.

        ``layer`` is the first of a group, or ``count``.
        """
        later = [i for group in self.groups if group[0] >= layer for i in self.config.with_sources(group)]
        return sorted({i for i in later if 0 < i < layer} | ({layer} if layer else set()))

    def made_by(self, group: list[int]) -> list[int]:
        """Layers of `kept_before` whose input computing ``group`` gives."""
        return [i for i in self.kept_before(group[-1] + 1) if i > group[0]]

    def compute(self, group: list[int]) -> None:
        """Adds the states of `made_by` to ``before``, and drops states that no later group needs."""
        length = max(map(len, self.prompts))
        runner = ModelRunner.from_source(
            self.config, self.source, device=self.device, progress=False, max_model_len=length, max_num_seqs=1,
            max_num_batched_tokens=length, layers=self.config.with_sources(group), numerics=self.numerics,
        )  # fmt: skip
        observer, wanted = RecallObserver(runner), self.made_by(group)
        found: list[dict[int, States]] = []
        for i, prompt in enumerate(self.prompts):
            given = {layer: states[i] for layer, states in self.before.items()}
            found.append(self._compute(runner, prompt, group, given, observer))
        kept = self.kept_before(group[-1] + 1)
        self.before = {layer: states for layer, states in self.before.items() if layer in kept}
        self.before |= {layer: [states[layer] for states in found] for layer in wanted}
        self.recall += [row for row in observer.rows() if row["layer"] in group]
        runner.close()

    @torch.inference_mode()
    def _compute(
        self, runner: ModelRunner, prompt: list[int], group: list[int], given: Mapping[int, States],
        observer: RecallObserver,
    ) -> dict[int, States]:  # fmt: skip
        """States of one prompt by layer, of `made_by`, from those ``given``; on the CPU."""
        model, count, wanted, found = runner.whole_model(), len(prompt), self.made_by(group), {}
        cache = runner.manager.create()
        ids = torch.tensor(prompt, device=runner.device, dtype=torch.int64)
        runner.manager.reserve([(cache, count)])
        with runner.op_settings(count):
            step = runner.step_metadata([cache], [count])
            step.engram = {} if runner.tables is None else runner.tables.look_up([Chunk(prompt, 0, count)])
            output = None
            for number, block in model.layers.items():
                layer, mine = int(number), int(number) in group
                if output is None or not mine:
                    output = unpacked(model, given[layer], runner.device) if layer else first_states(model, ids)
                step.observer = observer if mine else None
                if not mine:
                    attend(block, output, step)
                    output = None
                    continue
                output = run_layer(block, output, ids, step)
                if layer + 1 in wanted and layer + 1 < self.count:
                    found[layer + 1] = packed(model, output)
            runner.manager.commit(cache, count)
            runner.manager.free(cache)
            if self.count in wanted:
                after = final_states(model, output)
                found[self.count] = (torch.cat([model.logits(rows).cpu() for rows in after.split(LOGIT_ROWS)]),)
        return found
