"""Prompts as callers pass them: one check for all functions that take text or token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from numbers import Number
from typing import Any, TypeGuard

import numpy as np
import torch

TokenIds = Iterable[int] | np.ndarray | torch.Tensor
TOKEN_IDS = "token ids of a prompt are a list or a one-dimensional array of integers"
INTEGER_DTYPES = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
MAX_SHOWN = 80  # characters of a value in a message


def token_list(token_ids: TokenIds) -> list:
    """The values of a list or another iterable, a one-dimensional NumPy array, or a tensor on any device.

    Raises:
        ValueError: an array of another shape or dtype, an array without readable values, or another type, such as text,
            bytes, a dict or a set.
    """
    if _is_array(token_ids) and not _has_objects(token_ids):
        return _integers(token_ids, 1)
    if not _is_iterable(token_ids):
        hints = ((str, ": text goes to LLM, which has a tokenizer"), (Mapping, " (messages go to LLM.chat)"))
        hint = next((hint for kind, hint in hints if isinstance(token_ids, kind)), "")
        raise ValueError(f"{TOKEN_IDS}, got {shown(token_ids)}{hint}")
    return [_integers(value, 0) if _is_scalar(value) else value for value in token_ids]


def prompt_list(prompts: Any) -> list:
    """A list of prompts, from one prompt or several.

    Anything else counts as a single prompt, which `token_list` then refuses.
    """
    members = _members(prompts)
    if members is None:
        return [prompts]
    several = list(members)
    first = several[0] if several else None
    return [several] if isinstance(first, Number) or _is_scalar(first) else several


def each_prompt(prompts: Any) -> Iterable:
    """The prompts of an iterable, which is not read ahead; of a two-dimensional array each row is one.

    Raises:
        ValueError: a single prompt, or a value that cannot hold prompts.
    """
    members = _members(prompts)
    if members is None:
        problem = _problem(prompts) if _is_array(prompts) else None
        given = f"{problem or shown(prompts)}: put a single prompt into a list"
        raise ValueError(f"an iterable of prompts is needed, got {given}")
    return members


def shown(value: object) -> str:
    """A value for an error message: the beginning of its repr, or its type where that fails."""
    try:
        return repr(value)[:MAX_SHOWN].replace("\n", " ")
    except Exception:  # repr runs code of the value; Python refuses integers of thousands of digits
        return f"a value of type {type(value).__name__}"


def _members(prompts: Any) -> Iterable | None:
    """The members of an iterable that may be prompts; None for a single prompt and for all other values."""
    if not _is_iterable(prompts):
        return None
    if not _is_array(prompts):
        return prompts
    if _has_objects(prompts):
        return prompts.tolist()
    return list(prompts) if _problem(prompts) is None and prompts.ndim > 1 else None


def _is_iterable(value: object) -> bool:
    """Whether a value may hold token ids or prompts: text, bytes and unordered collections are iterable too."""
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping, Set)):
        return False
    return isinstance(value, Iterable) and not _is_scalar(value)


def _is_array(value: object) -> TypeGuard[np.ndarray | torch.Tensor]:
    return isinstance(value, (np.ndarray, torch.Tensor))


def _is_scalar(value: object) -> TypeGuard[np.ndarray | torch.Tensor]:
    """Whether a value is an array without dimensions."""
    # a nested tensor has `dim`, but its `ndim` raises
    return value.dim() == 0 if isinstance(value, torch.Tensor) else isinstance(value, np.ndarray) and value.ndim == 0


def _has_objects(array: np.ndarray | torch.Tensor) -> bool:
    """Whether an array holds Python objects or texts: it is then read as a list of them."""
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        return False
    return array.dtype.kind in "OU" and array.ndim > 0


def _integers(array: np.ndarray | torch.Tensor, ndim: int) -> Any:
    """The values of an array of ``ndim`` dimensions as Python integers; ValueError for any other array."""
    problem = _problem(array)
    if problem is None and array.ndim != ndim:
        problem = f"the shape {list(array.shape)}"
    if problem is None:
        try:
            return array.tolist()
        except Exception as error:  # of a tensor subclass without values, such as a fake tensor
            problem = f"a {type(array).__name__} whose values cannot be read ({error})"
    raise ValueError(f"{TOKEN_IDS}, got {problem}")


def _problem(array: np.ndarray | torch.Tensor) -> str | None:
    """A description of an array whose values are not readable integers; None for readable integers."""
    if isinstance(array, np.ndarray):
        if isinstance(array, np.ma.MaskedArray):
            return "a masked array: pass the tokens that are not masked (compressed())"
        return None if array.dtype.kind in "iu" else f"an array of {array.dtype}"
    if array.is_nested:
        return "a nested tensor: pass its rows one by one (unbind())"
    if array.device.type == "meta":
        return "a tensor on the meta device, which has no values"
    if array.layout != torch.strided:
        return f"a tensor with the layout {array.layout}: pass it dense (to_dense())"
    return None if array.dtype in INTEGER_DTYPES else f"a tensor of {array.dtype}"
