"""Quality of a loaded checkpoint under its own schedule and under others."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from deepseek_attn.checkpoint.random import RandomSource
from deepseek_attn.checkpoint.safetensors_source import SafetensorsSource
from deepseek_attn.checkpoint.source import CheckpointSource
from deepseek_attn.config.model import ModelConfig, preset_names
from deepseek_attn.lab.experiments.define.files import read_text_file
from deepseek_attn.lab.experiments.define.results import CheckpointResult
from deepseek_attn.lab.experiments.define.settings import CheckpointSettings
from deepseek_attn.lab.experiments.define.variant import ModelVariant
from deepseek_attn.lab.experiments.measure.quality import compare
from deepseek_attn.lab.experiments.measure.recall import measure_recall
from deepseek_attn.lab.experiments.measure.reschedule import RescheduledSource, gained_indexers
from deepseek_attn.lab.training import sample_text
from deepseek_attn.lab.training.text import TEST_SHARE
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.text.tokenizer import Tokenizer
from deepseek_attn.utils.files import write_tensors

OWN_LOGITS = "own_logits.safetensors"
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


def make_runner(config: ModelConfig, source: CheckpointSource, device: torch.device, length: int) -> ModelRunner:
    """A runner whose steps take one whole prompt of ``length`` tokens."""
    return ModelRunner.from_source(
        config, source, device=device, progress=False, max_model_len=length, max_num_seqs=1,
        max_num_batched_tokens=length,
    )  # fmt: skip


def measure_own(settings: CheckpointSettings, device: torch.device, folder: Path) -> CheckpointResult:
    """Quality under the checkpoint's own schedule; writes its logits to ``folder`` for comparison with variants."""
    config, source = open_source(settings)
    prompts = read_prompts(settings, config)
    runner = make_runner(config, source, device, max(map(len, prompts)))
    logits = runner.score(prompts)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / OWN_LOGITS, {str(i): rows for i, rows in enumerate(logits)})
    found = compare(logits, logits, prompts)
    return {
        "schedule": [spec.ratio for spec in config.layers],
        "tokens": sum(map(len, prompts)),
        **found,
        "layers": measure_recall(runner, prompts),
    }


def measure_variant(
    variant: ModelVariant, settings: CheckpointSettings, device: torch.device, folder: Path
) -> CheckpointResult:
    """Quality of the checkpoint under ``variant``, against the logits that `measure_own` left in ``folder``.

    Returns:
        As `measure_own`; or only a ``reason``, where the variant needs weights that cannot be derived.
    """
    base, source = open_source(settings)
    config = variant.config(base)
    if gained := gained_indexers(base, config):
        return {"reason": f"layers {gained} have no trained indexer in this checkpoint"}
    prompts = read_prompts(settings, base)
    runner = make_runner(config, RescheduledSource(source, base, config), device, max(map(len, prompts)))
    reference = load_file(folder / OWN_LOGITS)
    expected = [reference[str(i)] for i in range(len(prompts))]
    return {
        "schedule": [spec.ratio for spec in config.layers],
        **compare(expected, runner.score(prompts), prompts),
        "layers": measure_recall(runner, prompts),
    }
