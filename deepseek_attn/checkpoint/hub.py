"""Checkpoints by path or hub id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import torch

from deepseek_attn.checkpoint.safetensors_source import INDEX_FILE, SINGLE_FILE, SafetensorsSource, read_index
from deepseek_attn.checkpoint.selection import needed_tensors
from deepseek_attn.checkpoint.source import CheckpointSource, TensorInfo
from deepseek_attn.config.generation import GENERATION_FILE, GenerationConfig
from deepseek_attn.config.model import AnyConfig, ModelConfig, preset_names
from deepseek_attn.config.options import as_list
from deepseek_attn.layers.weights import Shard
from deepseek_attn.utils.hub import CONFIG_FILE, HubModel

SMALL_FILES = (INDEX_FILE, GENERATION_FILE, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class PretrainedSource(CheckpointSource):
    """The tensors of a checkpoint by path or hub id. A context manager that unmaps its files.

    ``org/name`` or ``org/name@revision`` is the local copy of a repository of the hub. A complete copy is used without
    the network. Missing files are downloaded: first the small files and the index; the shards only when their tensors
    are requested, so that wrong options are found before.

    Args:
        layers, attention_only: of which tensors will be read. Shards without such tensors may be missing, and are not
            downloaded.

    Attributes:
        needed: whether a tensor of this stored name will be read, set before the first read; None: by the arguments.

    Raises:
        ValueError: from all methods: files are missing, broken, or cannot be downloaded.
    """

    def __init__(self, model: str | Path, layers: Iterable[int] | None = None, attention_only: bool = False):
        self.layers = None if layers is None else as_list(layers, "layers: numbers of layers")
        self.attention_only, self._repo = attention_only, HubModel.parse(model)
        self._whole = layers is None and not attention_only
        self.needed: Callable[[str], bool] | None = None
        if self._repo is None:
            if not Path(model).exists() and str(model) in preset_names():
                raise ValueError(
                    f"{str(model)!r} is a preset, a config without weights: `deepseek-attn make-checkpoint --config "
                    f"{model}` writes random weights, ModelRunner.from_config makes them in memory"
                )
            if not Path(model).exists():
                raise ValueError(
                    f"no checkpoint at {str(model)!r}: the directory does not exist, and a hub id is org/name"
                )
            if not Path(model).is_dir():
                raise ValueError(f"{str(model)!r} is a file; a checkpoint is a directory with config.json and shards")
        self.directory = Path(model) if self._repo is None else self._small_files(self._repo)

    @cached_property
    def config(self) -> AnyConfig:
        return ModelConfig.from_pretrained(self.directory)

    @cached_property
    def generation(self) -> GenerationConfig:
        """The checkpoint's sampling defaults."""
        return GenerationConfig.from_pretrained(self.directory, self.config)

    def check_shards(self) -> None:
        """Raises ValueError for broken or missing shards of a directory; shards of a hub id are not looked at."""
        if self._repo is None:
            with self:
                self.entries()

    def _small_files(self, repo: HubModel) -> Path:
        """The folder of the local copy, with its config and index."""
        folder = repo.local_folder()
        if folder is None or not any((folder / file).is_file() for file in (INDEX_FILE, SINGLE_FILE)):
            folder = repo.download([CONFIG_FILE], SMALL_FILES, self._whole)
        return folder

    @cached_property
    def _opened(self) -> SafetensorsSource:
        needed = self.needed or needed_tensors(self.config, self.layers, self.attention_only)
        if self._repo:
            index, shards = self.directory / INDEX_FILE, [SINGLE_FILE]
            if index.is_file():
                listed = read_index(index, needed=lambda name: False)  # downloads the missing shards
                shards = [shard.name for shard, names in listed.items() if any(map(needed, names))]
            absent = [shard for shard in shards if not (self.directory / shard).is_file()]
            if absent:
                self._repo.download(absent, whole=not index.is_file())
        return SafetensorsSource(self.directory, needed)

    @property
    def reads_in_threads(self) -> bool:
        return self._opened.reads_in_threads

    def entries(self) -> dict[str, TensorInfo]:
        return self._opened.entries()

    def read(self, name: str) -> torch.Tensor:
        return self._opened.read(name)

    def read_part(self, name: str, index: int, count: int) -> torch.Tensor:
        return self._opened.read_part(name, index, count)

    def read_shard(self, name: str, shard: Shard) -> torch.Tensor:
        return self._opened.read_shard(name, shard)

    def view(self, name: str) -> torch.Tensor:
        return self._opened.view(name)

    def read_rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self._opened.read_rows(name, rows)

    def token_numbers(self, count: int, vocab_size: int) -> Sequence[int]:
        return self._opened.token_numbers(count, vocab_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if "_opened" in vars(self):
            self._opened.close()
