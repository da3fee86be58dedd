"""Names of unsupported formats of folders and files, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

SUPPORTED = (
    "supported are safetensors checkpoints as DeepSeek publishes them, BF16 copies of them and what transformers saves "
    "of them: load the original checkpoint"
)
# By the end of a file's name.
WEIGHT_FILES = {
    ".gguf": "GGUF (llama.cpp)",
    ".onnx": "ONNX",
    ".bin": "PyTorch pickle",
    ".pt": "PyTorch pickle",
    ".pth": "PyTorch pickle",
    ".ckpt": "PyTorch pickle",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
    ".npz": "NumPy",
}
# Files beside the weights that describe their quantisation.
QUANTISERS = {
    "hf_quant_config.json": "NVIDIA ModelOpt, such as NVFP4",
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
}
LFS_POINTER = b"version https://git-lfs"
SINGLE_RANK = "model0-mp1.safetensors"  # DeepSeek's convert.py names its files model{rank}-mp{ranks}
_RANK = re.compile(r"model\d+-mp(\d+)\.safetensors")


def weight_format(file: Path) -> str | None:
    """Format of a file of weights, by its suffix; None for other files."""
    return "safetensors" if file.suffix == ".safetensors" else WEIGHT_FILES.get(file.suffix)


def quantiser(folder: Path) -> str | None:
    """(quantisation file beside the weights, name of the library that writes such files); None without such a file."""
    return next((f"{file} ({name})" for file, name in QUANTISERS.items() if (folder / file).is_file()), None)


def contents(folder: Path) -> str:
    """Formats found in a folder that lacks ``config.json`` or weights, with the remedy of each; may be empty."""
    return "".join(f"; {found}" for found in _contents(folder))


def interrupted(folder: Path) -> str:
    """A hint at an interrupted download; empty if no partial file is found."""
    parts = [*folder.glob("*.incomplete"), *folder.glob(".cache/huggingface/download/**/*.incomplete")]
    parts += [*folder.glob("../../blobs/*.incomplete"), *folder.glob("*.aria2"), *folder.glob("*.part")]
    return f"; a download was interrupted ({len(parts)} unfinished files): run it again" if parts else ""


def _contents(folder: Path) -> Iterator[str]:
    names = sorted(entry.name for entry in folder.iterdir())
    ranks = {int(match[1]) for match in map(_RANK.fullmatch, names) if match}
    if ranks == {1}:
        yield f"{SINGLE_RANK} is output of DeepSeek's convert.py: copy config.json of the original checkpoint here"
    elif ranks:
        yield (
            f"its model*-mp{max(ranks)}.safetensors are output of DeepSeek's convert.py, split for {max(ranks)} ranks: "
            "load the original checkpoint, or run convert.py on it with --model-parallel 1"
        )
    for end, name in WEIGHT_FILES.items():
        found = [file for file in names if file.endswith(end)]
        if found:
            yield f"its {found[0]} is in another format, {name}; {SUPPORTED}"
            break
    if "adapter_config.json" in names:
        yield "it holds a LoRA adapter, which is not supported"
    elif "tokenizer.json" in names and not any(map(weight_format, map(Path, names))):
        yield "it holds a tokenizer and no weights"
    if hint := interrupted(folder):
        yield hint.removeprefix("; ")
