"""Writing a checkpoint directory: shards, index, config and tokenizer."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from deepseek_attn.checkpoint.safetensors_source import INDEX_FILE
from deepseek_attn.checkpoint.source import CheckpointSource, TensorInfo
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.text.tokenizer_files import write_tokenizer
from deepseek_attn.utils.files import TensorBlocks, appearing, store_tensors
from deepseek_attn.utils.hub import check_path
from deepseek_attn.utils.sizes import show_bytes

SHARD_BYTES = 5 * 10**9


def write_checkpoint(
    source: CheckpointSource,
    config: AnyConfig,
    directory: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    num_shards: int | None = None,
    tokenizer: Tokenizer | None = None,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Writes ``source`` as a checkpoint directory, one tensor in memory at a time.

    The directory appears complete or not at all: it is built beside its final place and renamed at the end.

    Args:
        source: tensors; their names are kept.
        config: written as ``config.json``.
        directory: must be absent or empty.
        shard_bytes: size aimed at per shard; there are at least two shards.
        num_shards: exact number of shards, of about equal size, instead.
        tokenizer: written as ``tokenizer.json``; None for a byte-level one.
        texts: text of more files, by name.

    Returns:
        The directory.

    Raises:
        ValueError: the directory holds something, the number of shards is impossible, or the tokenizer does not fit the
            config (``vocab_size`` too small, BOS and EOS not 0 and 1).
        OSError: the disk lacks the space.
    """
    check_path(directory, "a checkpoint is named by its folder")
    entries = source.entries()
    shards = plan_shards(entries, shard_bytes, num_shards)
    _check_token_ids(config)
    check_new_directory(directory)
    with appearing(Path(directory), directory=True) as folder:
        write_tokenizer(folder, config.vocab_size, config.max_position_embeddings, tokenizer)
        write_config_file(folder / "config.json", config.to_dict())
        write_config_file(folder / "generation_config.json", _generation_config(config))
        write_shards(folder, source, shards)
        for name, text in (texts or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
    return Path(directory)


def write_shards(folder: Path, source: CheckpointSource, shards: list[list[str]]) -> None:
    """Writes the tensors of each shard to a file, and their index. OSError, before any: the disk lacks the space."""
    entries, weight_map = source.entries(), {}
    total, disk = sum(info.nbytes for info in entries.values()), shutil.disk_usage(folder)
    if disk.free < total and disk.total:  # some network file systems name no sizes
        reason = f"it takes {show_bytes(total)}, and {show_bytes(disk.free)} are free"
        raise OSError(errno.ENOSPC, reason, str(folder))
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, source, {name: entries[name] for name in names})
        weight_map.update(dict.fromkeys(names, file))
    write_config_file(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def plan_shards(
    entries: dict[str, TensorInfo], shard_bytes: int = SHARD_BYTES, num_shards: int | None = None
) -> list[list[str]]:
    """Splits the tensors, in order, into shards of about equal bytes."""
    total = sum(info.nbytes for info in entries.values())
    if num_shards is None:
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes is {shard_bytes}: it must be at least 1")
        num_shards = min(max(2, -(-total // shard_bytes)), len(entries))
    if not 1 <= num_shards <= len(entries):
        raise ValueError(f"num_shards is {num_shards}: {len(entries)} tensors make between 1 and {len(entries)} shards")
    shards: list[list[str]] = [[]]
    done = 0
    for position, (name, info) in enumerate(entries.items()):
        missing, left = num_shards - len(shards), len(entries) - position
        full = done + info.nbytes / 2 > total * len(shards) / num_shards
        if shards[-1] and missing and (full or left == missing):
            shards.append([])
        shards[-1].append(name)
        done += info.nbytes
    return shards


def _write_shard(path: Path, source: CheckpointSource, entries: dict[str, TensorInfo]) -> None:
    tensors = {
        name: TensorBlocks(info.dtype, info.shape, info.nbytes, map(source.view, [name]))
        for name, info in entries.items()
    }
    with path.open("wb") as file:
        store_tensors(file, tensors, {"format": "pt"})


def check_new_directory(directory: str | Path) -> None:
    """ValueError unless the directory is empty, or absent where it can be made."""
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not an empty directory: choose another one, or remove it")
    place = next(parent for parent in directory.absolute().parents if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        what = "cannot be written to" if place.is_dir() else "is a file"
        raise ValueError(f"{directory} cannot be made: {place} {what}; choose another place")
    if os.path.ismount(directory):
        raise ValueError(f"{directory} is a mount point, which cannot appear as a whole: name a new folder in it")


def _check_token_ids(config: AnyConfig) -> None:
    if config.bos_token_id != 0 or config.eos_token_ids[:1] != (1,):
        raise ValueError(
            f"bos_token_id is {config.bos_token_id} and eos_token_id {config.eos_token_id}: the tokenizer that is "
            "written with a checkpoint has 0 and 1"
        )


def _generation_config(config: AnyConfig) -> dict:
    eos = [*config.eos_token_ids]
    return {
        "bos_token_id": config.bos_token_id,
        "do_sample": True,
        "eos_token_id": eos if len(eos) > 1 else eos[0],
        "temperature": 1.0,
        "top_p": 1.0,
    }


def write_config_file(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
