"""Smaller checkpoints of some layers and experts: kept tensors byte for byte, a config that fits, the tokenizer."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepseek_attn.checkpoint.crop_config import crop_config
from deepseek_attn.checkpoint.crop_plan import CropPlan
from deepseek_attn.checkpoint.headers import check_headers
from deepseek_attn.checkpoint.hub import PretrainedSource
from deepseek_attn.checkpoint.names import PACKED, CanonicalSource
from deepseek_attn.checkpoint.published import canonical_names
from deepseek_attn.checkpoint.source import CheckpointSource, TensorInfo
from deepseek_attn.checkpoint.write import (
    SHARD_BYTES,
    check_new_directory,
    plan_shards,
    write_config_file,
    write_shards,
)
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.v4 import DeepseekV4Base
from deepseek_attn.utils.files import appearing
from deepseek_attn.utils.hub import CONFIG_FILE
from deepseek_attn.utils.json_files import read_json
from deepseek_attn.utils.version import __version__

RECORD_FILE = "crop.json"
# Files beside config and weights. With fewer tokens, only the last are copied: tokenizers name all tokens.
TEXT_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*"),
    *("preprocessor_config.json", "processor_config.json", "configuration_*.py", "modeling_*.py"),
)
OTHER_FILES = ("generation_config.json", "LICENSE*")
TABLE_RULE = (
    "an entry of a hash table that names a dropped expert e names expert e % n of the n kept ones instead, or the next "
    "one (after the last, the first) that no other entry of the token names"
)
TABLE_ROWS = 4096  # tokens of a hash table that are remapped at a time
_LAYER = re.compile(r"(?P<before>(?:model\.)?layers\.)(?P<number>\d+)(?=\.)")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_ROUTER = re.compile(r"(.+\.)?ffn\.gate\.(weight|bias|bias_vl)")
_TOKENS = re.compile(r"(embed|head)\.weight|mtp\.\d+\.(.*emb.*|(.+\.)?head|markov_head\..+)\.weight")


@dataclass(frozen=True)
class Crop:
    """The outcome of a crop.

    Attributes:
        path: the new checkpoint.
        plan: the kept layers, experts and tokens.
        tensors, nbytes: number of tensors and their bytes.
    """

    path: Path
    plan: CropPlan
    tensors: int
    nbytes: int


def crop_checkpoint(
    model: str | Path,
    out: str | Path,
    *,
    layers: Iterable[int] | None = None,
    experts: int | None = None,
    vocab_size: int | None = None,
    without: Iterable[str] = (),
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Crop:
    """Writes a checkpoint of some layers and routed experts of another one, in the same format.

    Kept tensors have the same bytes. Their names change only in the numbers of layers and experts, which count from 0
    again. Routers and packed experts keep the rows of the kept experts; entries of hash tables that name dropped
    experts are replaced (`TABLE_RULE`). If fewer experts are kept than a token has, it gets fewer. The crop computes
    the same as the whole model with only these layers (``layers=[...]``) and a router that never chooses a dropped
    expert. ``crop.json`` in the new folder lists the kept layers, experts and tokens.

    One tensor at a time is read from the mapped files. The folder appears complete or not at all.

    Args:
        model: checkpoint folder or hub id. Shards without a kept tensor may be missing, and are not downloaded.
        out: the new folder; absent or empty.
        layers: numbers of the backbone layers to keep; None: all. MTP layers are kept beside them; a DSpark drafter
            only if all layers that it reads are.
        experts: number of routed experts to keep in each layer: the first; for V3 the first of each group.
        vocab_size: number of tokens to keep, the first ones. The crop then has no tokenizer.
        without: parts to leave out: ``mtp``, ``engram``, ``vision``.
        overwrite: replace a folder that an earlier crop wrote.
        shard_bytes: size aimed at per shard.

    Raises:
        ValueError: arguments that do not fit the model, layers whose sources are left out, a folder that holds
            something, a broken checkpoint, or an output that cannot be written. Nothing is left behind.
    """
    out = Path(out)
    replaces = overwrite and (out / RECORD_FILE).is_file()
    if not replaces:
        try:
            check_new_directory(out)
        except ValueError as error:
            hint = ""
            if out.is_dir():
                hint = "; only what `deepseek-attn crop` wrote is overwritten" if overwrite else f", or {OVERWRITE}"
            raise ValueError(f"{error}{hint}") from None
    with PretrainedSource(model) as source:
        plan = CropPlan.make(source.config, layers, experts, vocab_size, without)
        canonical = canonical_names(source.config)
        source.needed = lambda name: plan.keeps(canonical(name))
        cropped = CropSource(source, plan)
        raw = read_json(source.directory / CONFIG_FILE, f"invalid config ({source.directory / CONFIG_FILE})")
        config = crop_config(raw, plan)
        new = ModelConfig.from_dict(config, "the crop's config")
        check_headers(new, CanonicalSource(cropped, canonical_names(new)))
        entries = cropped.entries()
        nbytes = sum(info.nbytes for info in entries.values())
        shards = plan_shards(entries, num_shards=min(len(entries), max(1, -(-nbytes // shard_bytes))))
        with appearing(out, directory=True, replace=replaces) as folder:
            write_config_file(folder / CONFIG_FILE, config)
            write_config_file(folder / RECORD_FILE, crop_record(model, plan))
            whole = plan.vocab_size == plan.config.vocab_size
            for pattern in (*TEXT_FILES, *OTHER_FILES) if whole else OTHER_FILES:
                for file in source.directory.glob(pattern):
                    if file.is_file():
                        shutil.copyfile(file, folder / file.name)
            write_shards(folder, cropped, shards)
    return Crop(out, plan, len(entries), nbytes)


OVERWRITE = "replace an earlier crop by --overwrite (overwrite=True)"


def crop_record(model: str | Path, plan: CropPlan) -> dict[str, Any]:
    """Content of ``crop.json``: the model's numbers of the crop's layers, experts and tokens."""
    out: dict[str, Any] = {
        "made_by": f"deepseek-attn {__version__}",
        "model": str(model),
        "layers": list(plan.layers),
        "experts": list(plan.experts),
        "vocab_size": plan.vocab_size,
        "without": sorted(plan.without),
    }
    if plan.draft_experts != plan.experts:
        out["draft_experts"] = list(plan.draft_experts)
    if getattr(plan.config, "num_hash_layers", 0) and len(plan.experts) < plan.config.n_routed_experts:
        out["hash_tables"] = TABLE_RULE
    return out


Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CroppedTensor:
    """A tensor of a crop: the model's tensor ``name``, or with ``part`` a part of it."""

    name: str
    info: TensorInfo
    part: Part | None = None


class CropSource(CheckpointSource):
    """The tensors of a crop, under the names of its files, read from the model's checkpoint.

    Args:
        source: the model's tensors, under any spelling of their names.

    Raises:
        ValueError: nothing is left, or a table has a form that cannot be cropped.
    """

    def __init__(self, source: CheckpointSource, plan: CropPlan):
        self.source, self.plan = source, plan
        self._canonical = canonical_names(plan.config)
        self._tensors: dict[str, CroppedTensor] = {}
        for name, info in source.entries().items():
            canonical = self._canonical(name)
            if plan.keeps(canonical):
                self._tensors[self._new_name(name, canonical)] = self._crop(name, canonical, info)
        if not self._tensors:
            raise ValueError("no tensor of the checkpoint is left in the crop")

    def entries(self) -> dict[str, TensorInfo]:
        return {name: tensor.info for name, tensor in self._tensors.items()}

    def view(self, name: str) -> Tensor:
        found = self._tensors[name]
        tensor = self.source.view(found.name)
        if found.part is None:
            return tensor
        try:
            return found.part(tensor)
        except ValueError as error:
            raise ValueError(f"cannot crop {found.name}: {error}") from error

    def read(self, name: str) -> Tensor:
        return self.view(name).clone()

    def _new_name(self, name: str, canonical: str) -> str:
        """The name in the crop, in the model's spelling."""
        backbone, kept = self.plan.config.num_hidden_layers, self.plan.new_layer
        experts = self.plan.experts_of(canonical)

        def renumber(match: re.Match) -> str:
            number = int(match["number"])  # V3 counts its MTP layers on
            return match["before"] + str(kept[number] if number < backbone else len(kept) + number - backbone)

        renamed = _EXPERT.sub(lambda match: str(experts[int(match[0])]), name)
        match = _LAYER.match(renamed)
        return renumber(match) + renamed[match.end() :] if match else renamed

    def _crop(self, name: str, canonical: str, info: TensorInfo) -> CroppedTensor:
        config, experts = self.plan.config, self.plan.experts_of(canonical)
        tokens = self.plan.vocab_size
        if canonical.endswith("ffn.gate.tid2eid"):
            return self._crop_table(name, info, experts)
        if _ROUTER.fullmatch(canonical) or PACKED.fullmatch(canonical):
            total = config.n_routed_experts
            if isinstance(config, DeepseekV4Base) and canonical.startswith("mtp."):
                total = config.draft_stages.n_routed_experts
            return _rows(name, info, list(experts), total)
        if tokens < config.vocab_size and _TOKENS.fullmatch(canonical):
            return _rows(name, info, list(range(tokens)), config.vocab_size)
        return CroppedTensor(name, info)

    def _crop_table(self, name: str, info: TensorInfo, experts: dict[int, int]) -> CroppedTensor:
        config, per_token, rows = self.plan.config, self.plan.experts_per_token, self.plan.vocab_size
        if info.shape != (config.vocab_size, config.num_experts_per_tok):
            raise ValueError(
                f"{name} is {list(info.shape)}, expected {[config.vocab_size, config.num_experts_per_tok]}: a row of "
                "experts for each token"
            )

        def part(table: Tensor) -> Tensor:
            if len(experts) == config.n_routed_experts:
                return table[:rows]
            return crop_table(table[:rows], list(experts), config.n_routed_experts, per_token)

        size = info.nbytes // max(1, info.shape[0] * info.shape[1])
        return CroppedTensor(name, TensorInfo(info.dtype, (rows, per_token), rows * per_token * size), part)


def _rows(name: str, info: TensorInfo, rows: list[int], total: int) -> CroppedTensor:
    """Rows of the first dimension, which must have ``total`` of them."""
    if not info.shape or info.shape[0] != total:
        raise ValueError(f"{name} is {list(info.shape)}: expected {total} in its first dimension")
    if len(rows) == total:
        return CroppedTensor(name, info)
    shape = (len(rows), *info.shape[1:])

    def part(tensor: Tensor) -> Tensor:
        if rows == list(range(len(rows))):
            return tensor[: len(rows)]
        chosen = torch.tensor(rows, dtype=torch.int64, device="cpu")
        return tensor.view(torch.uint8)[chosen].view(tensor.dtype) if tensor.element_size() == 1 else tensor[chosen]

    return CroppedTensor(name, TensorInfo(info.dtype, shape, info.nbytes // total * len(rows)), part)


def crop_table(table: Tensor, experts: list[int], total: int, per_token: int) -> Tensor:
    """A hash table over the kept experts, by `TABLE_RULE`: int ``[tokens, k]`` -> ``[tokens, per_token]``, its dtype.

    Experts of one token stay different. Where fewer experts are kept than a token has, each token has all of them: the
    experts of its row first, in the order of their entries.

    Args:
        experts: old numbers of the kept experts, in the order of the new ones.
        total: number of experts before.

    Raises:
        ValueError: the table names experts that do not exist.
    """
    new = torch.full((total,), -1, dtype=torch.int64, device="cpu")
    new[torch.tensor(experts, dtype=torch.int64, device="cpu")] = torch.arange(len(experts), device="cpu")
    if len(table):
        least, most = (int(end) for end in table.aminmax())
        if least < 0 or most >= total:
            raise ValueError(f"it names experts {least} to {most}, and there are 0 to {total - 1}")
    parts = [_crop_table_rows(rows.to(torch.int64), new, len(experts), per_token) for rows in table.split(TABLE_ROWS)]
    return torch.cat(parts).to(table.dtype)


def _crop_table_rows(old: Tensor, new: Tensor, count: int, per_token: int) -> Tensor:
    """`crop_table` of some rows; ``new``: new number of each expert, -1 for none; ``count``: kept experts."""
    rows = new[old]
    taken = torch.zeros(len(old), count + 1, dtype=torch.bool, device="cpu")
    taken.scatter_(1, torch.where(rows < 0, count, rows), True)
    taken = taken[:, :count]
    order = torch.arange(count, device="cpu")
    for column in range(old.shape[1] if count >= old.shape[1] else 0):
        candidates = (old[:, column, None] % count + order) % count
        free = ~taken.gather(1, candidates)
        choice = candidates.gather(1, free.int().argmax(1, keepdim=True))[:, 0]
        rows[:, column] = torch.where(rows[:, column] < 0, choice, rows[:, column])
        taken.scatter_(1, rows[:, column, None], True)  # replacements count from here on, kept entries from the start
    if count >= old.shape[1]:
        return rows
    # every token has all kept experts: by the first column that names them
    place = torch.full((len(old), count + 1), old.shape[1], dtype=torch.int64, device="cpu")
    columns = torch.arange(old.shape[1], device="cpu").expand_as(rows)
    place.scatter_reduce_(1, torch.where(rows < 0, count, rows), columns, "amin")
    return place[:, :count].argsort(dim=1, stable=True)[:, :per_token]
