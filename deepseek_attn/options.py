"""Where and how large a runner is: defaults, and one error for everything that is wrong with what was asked."""

from __future__ import annotations

import torch

from deepseek_attn.config import AnyConfig

DEFAULT_MAX_MODEL_LEN = 32768


def pick_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}: torch {torch.__version__} finds no CUDA GPU here; use device='cpu'")
    return device


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = DTYPES.get(dtype, dtype)
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype {dtype!r}: supported are {', '.join(DTYPES)}")
    return dtype


def check_sizes(
    config: AnyConfig,
    layers: list[int] | None,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_rollback: int,
    max_snapshots: int = 0,
) -> None:
    """One ValueError with everything that is wrong with the sizes of a runner."""
    problems = []
    for name, value, least in (
        ("max_model_len", max_model_len, 1),
        ("max_num_seqs", max_num_seqs, 1),
        ("max_num_batched_tokens", max_num_batched_tokens, 1),
        ("max_rollback", max_rollback, 0),
        ("max_snapshots", max_snapshots, 0),
    ):
        if value < least:
            problems.append(f"{name}={value}: must be at least {least}")
    if max_model_len > config.max_position_embeddings:
        problems.append(f"max_model_len={max_model_len} exceeds the model's {config.max_position_embeddings} positions")
    count = config.num_hidden_layers
    if layers is not None and (not layers or len(set(layers)) < len(layers)):
        problems.append(f"layers={layers}: name at least one layer, each once")
    outside = [layer for layer in layers or [] if not 0 <= layer < count]
    if outside:
        problems.append(f"layers {outside} do not exist: the model has layers 0 to {count - 1}")
    if problems:
        raise ValueError("invalid options:\n  - " + "\n  - ".join(problems))
