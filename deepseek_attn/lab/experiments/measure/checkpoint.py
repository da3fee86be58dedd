"""Quality of a loaded checkpoint under its own schedule and under others."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from deepseek_attn.checkpoint.random import RandomSource
from deepseek_attn.checkpoint.safetensors_source import SafetensorsSource
from deepseek_attn.checkpoint.source import CheckpointSource
from deepseek_attn.config.model import ModelConfig, preset_names
from deepseek_attn.config.numerics import Numerics, get_numerics
from deepseek_attn.lab.experiments.define.files import read_text_file
from deepseek_attn.lab.experiments.define.results import CheckpointResult, RecallRow
from deepseek_attn.lab.experiments.define.settings import CheckpointSettings
from deepseek_attn.lab.experiments.define.variant import ModelVariant
from deepseek_attn.lab.experiments.measure.quality import compare
from deepseek_attn.lab.experiments.measure.recall import RecallObserver
from deepseek_attn.lab.experiments.measure.reschedule import RescheduledSource, gained_indexers
from deepseek_attn.lab.training import sample_text
from deepseek_attn.lab.training.text import TEST_SHARE
from deepseek_attn.models.deepseek_v4 import DeepseekV4
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.text.tokenizer import Tokenizer
from deepseek_attn.utils.files import write_tensors

RECALL = "recall"  # key of the metadata that holds the rows of `RecallObserver`
LOGIT_ROWS = 1024  # tokens whose logits are computed at a time
SEED = 0  # of the weights of a preset


def open_source(settings: CheckpointSettings) -> tuple[ModelConfig, CheckpointSource]:
    """Config without MTP layers, and the tensors of a checkpoint directory, or random ones for a preset.

    Raises:
        ValueError: the model is neither a directory nor a preset, or no DeepSeek-V4.
    """
    directory = Path(settings.model)
    if not directory.is_dir() and settings.model not in preset_names():
        raise ValueError(
            f"checkpoint.model: {settings.model!r} is neither a directory nor a preset ({', '.join(preset_names())})"
        )
    config = ModelConfig.from_pretrained(settings.model)
    if not isinstance(config, ModelConfig):
        raise ValueError(f"checkpoint.model: {settings.model} is {config.model_type}; schedules are DeepSeek-V4's")
    source = SafetensorsSource(directory) if directory.is_dir() else RandomSource(config, SEED)
    ratios = [spec.ratio for spec in config.layers]
    return config.replace(num_nextn_predict_layers=0, compress_ratios=ratios), source


def read_prompts(settings: CheckpointSettings, config: ModelConfig) -> list[list[int]]:
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
    states = None
    for group in range(len(own.groups)):
        states = own.compute(group, states)
        metadata = {RECALL: json.dumps(own.recall)}
        write_tensors(folder / _after(group), {str(i): rows for i, rows in enumerate(states)}, metadata)
    found = compare(states or [], states or [], prompts)
    schedule = [spec.ratio for spec in config.layers]
    return {"schedule": schedule, "tokens": sum(map(len, prompts)), **found, "layers": own.recall}


def measure_variant(
    variant: ModelVariant, settings: CheckpointSettings, device: torch.device, folder: Path
) -> CheckpointResult:
    """Quality of the checkpoint under ``variant``, against what `measure_own` left in ``folder``.

    Groups of layers before the first that the variant changes are not computed again.

    Returns:
        As `measure_own`; or only a ``reason``, where the variant needs weights that cannot be derived.
    """
    base, source = open_source(settings)
    config = variant.v4_config(base)
    if gained := gained_indexers(base, config):
        return {"reason": f"layers {gained} have no trained indexer in this checkpoint"}
    prompts = read_prompts(settings, base)
    numerics = None
    if variant.numerics or variant.kv_record:
        numerics = variant.numerics_from(get_numerics("serving" if device.type == "cuda" else "exact"))
    other = LayerGroups(config, RescheduledSource(source, base, config), device, prompts, settings, numerics)
    first = 0 if numerics else next((i for i, group in enumerate(other.groups) if _differ(base, config, group)), None)
    if first is None:  # the checkpoint's own schedule
        first = len(other.groups) - 1
    states = None
    if first:
        states, other.recall = _read(folder / _after(first - 1))
    for group in range(first, len(other.groups)):
        states = other.compute(group, states)
    expected, _ = _read(folder / _after(len(other.groups) - 1))
    schedule = [spec.ratio for spec in config.layers]
    return {"schedule": schedule, **compare(expected, states or [], prompts), "layers": other.recall}


def _after(group: int) -> str:
    """File of the hidden states after a group of layers, by prompt; of the logits after the last one."""
    return f"own_after_{group}.safetensors"


def _read(path: Path) -> tuple[list[torch.Tensor], list[RecallRow]]:
    """What `measure_own` wrote: tensors by prompt, and rows of the layers up to them."""
    with safe_open(path, "pt") as file:
        return [file.get_tensor(str(i)) for i in range(len(file.keys()))], json.loads(file.metadata()[RECALL])


def _differ(base: ModelConfig, config: ModelConfig, group: list[int]) -> bool:
    """Whether layers of ``group`` attend differently under the two configs."""
    shared = base.index_topk == config.index_topk and base.sliding_window == config.sliding_window
    return not shared or any(base.layers[i] != config.layers[i] for i in group)


class LayerGroups:
    """A model whose layers are loaded and computed some at a time, over all prompts, in the memory of one card.

    Args:
        numerics: of all layers; None: the runner's default.

    Attributes:
        groups: numbers of the layers that are in memory together; recall: rows of the layers computed so far.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: CheckpointSource,
        device: torch.device,
        prompts: list[list[int]],
        settings: CheckpointSettings,
        numerics: Numerics | None = None,
    ):
        self.config, self.source, self.device, self.prompts, self.numerics = config, source, device, prompts, numerics
        count, size = settings.layers or config.num_hidden_layers, settings.layers_at_once or config.num_hidden_layers
        self.groups = [list(range(i, min(i + size, count))) for i in range(0, count, size)]
        self.recall: list[RecallRow] = []

    def compute(self, group: int, states: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """States after a group by prompt, ``[len, hc_mult, hidden_size]``, from those before it; None: the embedding.

        After the last group, the logits ``[len, vocab]``. All of them are on the CPU.
        """
        length = max(map(len, self.prompts))
        runner = ModelRunner.from_source(
            self.config, self.source, device=self.device, progress=False, max_model_len=length, max_num_seqs=1,
            max_num_batched_tokens=length, layers=self.groups[group], numerics=self.numerics,
        )  # fmt: skip
        observer, last, found = RecallObserver(runner), group == len(self.groups) - 1, []
        for i, prompt in enumerate(self.prompts):
            found.append(_compute(runner, prompt, None if states is None else states[i], observer, last))
        self.recall += observer.rows()
        runner.close()
        return found


@torch.inference_mode()
def _compute(
    runner: ModelRunner, prompt: list[int], states: torch.Tensor | None, observer: RecallObserver, last: bool
) -> torch.Tensor:
    """States of one prompt after the runner's layers, or logits, as `LayerGroups.compute`."""
    model, count = runner.whole_model(), len(prompt)
    if not isinstance(model, DeepseekV4):
        raise ValueError(f"layers of a {type(model).__name__} cannot be computed apart: only DeepSeek-V4's can")
    cache = runner.manager.create()
    ids = torch.tensor(prompt, device=runner.device, dtype=torch.int64)
    runner.manager.reserve([(cache, count)])
    with runner.op_settings(count):
        step = runner.step_metadata([cache], [count])
        step.observer = observer
        before = model.first_streams(ids) if states is None else states.to(runner.device)
        after = model.run_layers(before, ids, step.positions, step)
        runner.manager.commit(cache, count)
        runner.manager.free(cache)
        if last:
            return torch.cat([model.logits(rows).cpu() for rows in after.split(LOGIT_ROWS)])
    return after.cpu()
