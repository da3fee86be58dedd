"""Device, dtype and sizes of a runner: defaults, and one error that lists all wrong options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import TypeGuard

import torch

from deepseek_attn.config.defaults import MAX_SNAPSHOTS
from deepseek_attn.config.model import AnyConfig


def parse_device(device: torch.device | str | None) -> torch.device:
    """The device called ``device``; None: a GPU if there is one, else the CPU.

    Raises:
        ValueError: neither a CPU nor a CUDA GPU.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda") or (found.type == "cpu" and found.index):
        raise ValueError(f"device {str(device)!r}: supported are cpu, cuda and cuda:N")
    return found


def pick_device(device: torch.device | str | None) -> torch.device:
    """Like `parse_device`, and checks that the device exists on this machine.

    Raises:
        ValueError: the device does not exist.
    """
    meta = torch.device("meta")
    if device == meta:  # of a runner that only plans (`runner.meta_runner`)
        return meta
    device = parse_device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"device {str(device)!r}: torch {torch.__version__} finds no CUDA GPU here; use device='cpu'"
            )
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(f"device {str(device)!r}: there are {count} GPUs here, cuda:0 to cuda:{count - 1}")
    return device


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, supported in DTYPES.items():
        if dtype in (name, supported):
            return supported
    raise ValueError(f"dtype {dtype!r}: supported are {', '.join(DTYPES)}")


def check_sizes(
    config: AnyConfig,
    layers: list[int] | None,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_rollback: int,
    max_snapshots: int = 0,
    kv_cache_bytes: int | None = None,
) -> None:
    """Raises one ValueError that lists all wrong sizes of a runner."""
    problems = []
    for name, value, least in (
        ("max_model_len", max_model_len, 1),
        ("max_num_seqs", max_num_seqs, 1),
        ("max_num_batched_tokens", max_num_batched_tokens, 1),
        ("max_rollback", max_rollback, 0),
        ("max_snapshots", max_snapshots, 0),
    ):
        if not is_integer(value):
            problems.append(f"{name}={value!r}: must be an integer")
        elif value < least:
            problems.append(f"{name}={value}: must be at least {least}")
    if is_integer(max_snapshots) and max_snapshots > MAX_SNAPSHOTS:
        problems.append(f"max_snapshots={max_snapshots}: must be at most {MAX_SNAPSHOTS}")
    if is_integer(max_model_len) and max_model_len > config.max_position_embeddings:
        problems.append(f"max_model_len={max_model_len} exceeds the model's {config.max_position_embeddings} positions")
    if kv_cache_bytes is not None and not is_integer(kv_cache_bytes):
        problems.append(f"kv_cache_bytes={kv_cache_bytes!r}: must be an integer")
    count = config.num_hidden_layers
    wrong = [layer for layer in layers or [] if not is_integer(layer)]
    if wrong:
        problems.append(f"layers={layers!s:.80}: {wrong[0]!r:.80} is not an integer")
        layers = None
    if layers is not None and (not layers or len(set(layers)) < len(layers)):
        problems.append(f"layers={layers!s:.80}: name at least one layer, each once")
    outside = [layer for layer in layers or [] if not 0 <= layer < count]
    if outside:
        problems.append(f"layers {outside!s:.80} do not exist: the model has layers 0 to {count - 1}")
    if problems:
        raise ValueError("invalid options:\n  - " + "\n  - ".join(problems))


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def as_list(values: Iterable, what: str) -> list:
    """The values as a list; ValueError for a single value. ``what`` is the argument's name in the message."""
    try:
        return list(values)
    except TypeError:
        raise ValueError(f"{what} in a list are needed, got {values!r}") from None


@contextmanager
def explain_out_of_memory(what: str, remedy: str) -> Iterator[None]:
    """Context that turns out-of-memory errors into a ValueError with the remedy."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(f"out of memory for {what}: {remedy}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, or the requested size exceeds any address space."""
    # messages of torch's allocator, of mapping a file, and of impossible sizes
    signs = (
        "can't allocate memory",
        "Cannot allocate memory",
        "Storage size calculation overflowed",
        "Overflow when unpacking long",
    )
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(sign in str(error) for sign in signs)
