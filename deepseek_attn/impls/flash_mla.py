"""The adapter to FlashMLA: the installed flavour, whether it runs here, and calls of its kernels.

Three flavours install the import name ``flash_mla``:

* ``sgl-flash-mla`` (PyPI): the kernels of SM90 and of the V3.2 and V4 caches are behind ``use_legacy=True``.
* upstream (git): lacks these kernels since its 2026.09.30 release, which supports only V4.1 caches on SM100.
* vLLM's fork (git): the kernels write into ``out=``.

Nothing is imported before `supported` is called for a CUDA device. Shapes below: ``T`` queries, ``H`` heads, ``d`` 512
(V4) or 576 (V3.2). Values are the first 512 channels of a key.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.impls.base import AttentionSpec
from deepseek_attn.kernels.attention import PagedKeys
from deepseek_attn.kernels.common.device import compute_capability, gpu, launches_nothing

HEADS = (64, 128)  # head counts that the kernels are compiled for
ENTRY_BYTES = {512: 584, 576: 656}  # cache bytes per entry, by head_dim
ROW_BYTES = {512: 576, 576: 656}  # on SM100 the page stride must be a multiple of this
VALUE_DIM = 512
DECODE_WIDTH, PREFILL_WIDTH = 64, 128  # index rows are multiples of these
INSTALL = "pip install --no-deps sgl-flash-mla==1.0.0"  # --no-deps: its metadata requires a newer torch than it needs


@dataclass(frozen=True)
class Flavour:
    """The installed package ``flash_mla``.

    Attributes:
        name: ``sgl-flash-mla``, ``upstream`` or ``vllm``.
        version: the package's version.
        use_legacy: kernels are called with ``use_legacy=True``.
        supports_out: kernels write into ``out=``.
        problem: why it does not support V3.2 and V4 caches; empty if it does.
    """

    name: str = "none"
    version: str = "unknown"
    use_legacy: bool = False
    supports_out: bool = False
    problem: str = ""

    def options(self, out: Tensor | None) -> dict[str, Any]:
        """Keyword arguments of a kernel call that only some flavours have."""
        options: dict[str, Any] = {"use_legacy": True} if self.use_legacy else {}
        return options | ({"out": out} if self.supports_out else {})


def _module() -> Any:
    return importlib.import_module("flash_mla")


class _Shapes:
    """Stands in for FlashMLA's kernels without launches: allocates their scratch memory and returns empty results."""

    @staticmethod
    def flash_mla_with_kvcache(q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        batch, queries, heads, _ = q.shape
        splits = batch + max(gpu(q.device).multiprocessors // (queries * max(heads // 64, 1)), 1)
        _partials = q.new_empty(splits, queries, heads, VALUE_DIM + 1, dtype=torch.float32)
        out = q.new_empty(batch, queries, heads, VALUE_DIM)
        return out, q.new_empty(batch, heads, queries, dtype=torch.float32)

    @staticmethod
    def flash_mla_sparse_fwd(q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        return q.new_empty(*q.shape[:2], VALUE_DIM), lse, torch.empty_like(lse)


def _kernels(q: Tensor) -> Any:
    return _Shapes if launches_nothing(q) else _module()


@lru_cache(maxsize=1)
def flavour() -> Flavour:
    """The installed flavour, imported once. Never raises: see ``problem``."""
    try:
        module = _module()
    except ModuleNotFoundError as error:
        if error.name != "flash_mla":
            return Flavour(problem=f"importing flash_mla fails ({error}); {INSTALL}")
        return Flavour(problem=f"the package flash_mla is not installed: {INSTALL}")
    except Exception as error:  # a shared library that does not load can raise anything
        return Flavour(problem=f"importing flash_mla fails ({type(error).__name__}: {error}); reinstall it: {INSTALL}")
    version = str(getattr(module, "__version__", "unknown"))
    decode = getattr(module, "flash_mla_with_kvcache", None)
    arguments = inspect.signature(decode).parameters if decode else {}
    if "use_legacy" in arguments:
        problem = "" if module.has_legacy() else f"this build of sgl-flash-mla {version} lacks the SM90 / V4 kernels"
        return Flavour("sgl-flash-mla", version, True, "out" in arguments, problem and f"{problem}: {INSTALL}")
    name, problem = ("vllm" if "out" in arguments else "upstream"), ""
    if "extra_k_cache" not in arguments or not hasattr(module, "flash_mla_sparse_fwd"):
        problem = f"flash_mla {version} is too old: it cannot attend to two caches with sinks; {INSTALL}"
    elif name == "upstream" and "enable_batch_invariant" in arguments:
        problem = (
            f"flash_mla {version} is upstream's 2026.09.30 release or later, which dropped SM90 and the V3.2 and V4 "
            f"caches; sgl-flash-mla still has them: {INSTALL}"
        )
    return Flavour(name, version, False, name == "vllm", problem)


def supported(device: torch.device | str, spec: AttentionSpec | None = None) -> tuple[bool, str]:
    """Whether the kernels run on ``device``, for heads as in ``spec`` if it is given; and the reason if not."""
    device = torch.device(device)
    if device.type != "meta" and (device.type != "cuda" or not torch.cuda.is_available()):
        return False, f"FlashMLA needs an NVIDIA GPU; the device is {device}"
    major, minor = compute_capability(device)
    if (major, minor) != (9, 0) and major != 10:
        return False, f"FlashMLA has kernels for compute capability 9.0 and 10.x; this GPU has {major}.{minor}"
    kernels = flavour()
    if kernels.problem:
        return False, kernels.problem
    problem = _shape_problem(spec) if spec is not None else ""
    if problem:
        return False, problem
    return True, f"{kernels.name} {kernels.version} on compute capability {major}.{minor}"


def _shape_problem(spec: AttentionSpec) -> str:
    if spec.head_dim not in ENTRY_BYTES or spec.rope_dim != 64:
        return (
            f"its kernels take 512 or 576 channels per head, 64 of them rotated; this model has {spec.head_dim} with "
            f"{spec.rope_dim}"
        )
    if spec.num_heads > max(HEADS):
        return f"its kernels take up to {max(HEADS)} heads; this model has {spec.num_heads}"
    if spec.dtype != torch.bfloat16:
        return f"its kernels take bfloat16 queries, not {spec.dtype}: use dtype='bfloat16'"
    return ""


def padded_heads(num_heads: int) -> int:
    """The smallest head count the kernels are compiled for: 64 or 128.

    Raises:
        ValueError: fewer than 1 or more than 128 heads.
    """
    if not 1 <= num_heads <= max(HEADS):
        raise ValueError(f"FlashMLA takes 1 to {max(HEADS)} heads, got {num_heads}")
    return next(heads for heads in HEADS if num_heads <= heads)


def new_schedule() -> Any:
    """An empty schedule. The first `sparse_decode` call that gets it fills it; later calls reuse it.

    Notes:
        Reuse it only while shapes *and the values of all lengths* stay the same: the kernel does not check the values,
        and a stale schedule gives wrong results.
    """
    return _module().get_mla_metadata()[0]


def sparse_decode(
    q: Tensor,
    keys: Sequence[PagedKeys],
    scale: float,
    sink: Tensor | None = None,
    schedule: Any = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over keys in one or two FP8 pools, under one softmax.

    Args:
        q: bfloat16 ``[T, H, d]``; or ``[b, s, H, d]``, with indices ``[b, s, K]`` and lengths ``[b]``.
        keys: one pool of ``fp8_v32`` records for V3.2 (``d`` 576), one or two of ``fp8_v4`` for V4 (512); int32
            indices and lens, -1 for no key.
        scale: factor of the logits.
        sink: float32 ``[H]``, or ``[H']`` with ``H' < H`` if the last heads are padding; a logit per head
            that joins the denominator only.
        schedule: from `new_schedule`; None makes one for this call alone.
        out: bfloat16 ``[T, H, 512]`` to write to.

    Returns:
        ``(out, lse)``: ``[T, H, 512]`` and float32 ``[T, H]``. A query without a key gets 0 and +inf.

    Raises:
        ValueError: shapes, dtypes or strides that the kernel does not support.

    Notes:
        Slots must lie in the pool: the kernel does not check them. Lengths are per row of the batch
        (``b``) and columns past them are ignored; V3.2's kernel has no lengths: these columns become -1.
    """
    flat = q.dim() == 3
    q4 = q.unsqueeze(1) if flat else q
    _check_query(q4, sink, out, q.shape[:-1])
    if not 1 <= len(keys) <= (2 if q.shape[-1] == 512 else 1):
        raise ValueError(f"head_dim {q.shape[-1]} reads {'one or two pools' if flat else 'one pool'}, got {len(keys)}")
    if q.numel() == 0:
        return _result(_empty(q, out), q.new_empty(q.shape[:-1], dtype=torch.float32), out)
    batch, queries, heads, dim = q4.shape
    width = padded_heads(heads)
    first, *extra = [_pool_arguments(part, batch, queries, dim, q.device, flat) for part in keys]
    kernels = flavour()
    options: dict[str, Any] = {}
    if extra:
        options = {"extra_k_cache": extra[0].cache, "extra_indices_in_kvcache": extra[0].indices}
        if extra[0].lens is not None:
            options["extra_topk_length"] = extra[0].lens
    direct = _direct_out(kernels, out, heads, width)
    result, lse = _kernels(q).flash_mla_with_kvcache(
        _pad_heads(q4, width),
        first.cache,
        block_table=None,
        cache_seqlens=None,
        head_dim_v=VALUE_DIM,
        tile_scheduler_metadata=new_schedule() if schedule is None else schedule,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=first.indices,
        topk_length=first.lens,
        attn_sink=_pad_sink(sink, width),
        **options,
        **kernels.options(None if direct is None else direct.view(batch, queries, heads, VALUE_DIM)),
    )
    result, lse = result[:, :, :heads], lse.transpose(1, 2)[:, :, :heads]
    if flat:
        result, lse = result.squeeze(1), lse.squeeze(1)
    return _result(result, lse, out, written=direct is not None)


def sparse_prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    sink: Tensor | None = None,
    lens: Tensor | None = None,
    out: Tensor | None = None,
    masked_tails: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over rows of a bfloat16 workspace (requests lie flat; indices are offset by request).

    Args:
        q: bfloat16 ``[T, H, d]``.
        kv: bfloat16 ``[N, d]``.
        indices: int32 ``[T, K]`` rows of ``kv``; negative or ``>= N`` for none.
        scale, sink, out: as in `sparse_decode`.
        lens: int32 ``[T]`` number of valid columns, or None for all. Columns past them may name any row, even of NaN.
        masked_tails: indices past the lengths are already -1.

    Returns:
        ``(out, lse)`` as in `sparse_decode`.

    Raises:
        ValueError: shapes, dtypes or strides that the kernel does not support.
    """
    if q.dim() != 3:
        raise ValueError(f"q must be [T, H, d], got {tuple(q.shape)}")
    _check_query(q.unsqueeze(1), sink, out, q.shape[:-1])
    tokens, heads, dim = q.shape
    if kv.dim() != 2 or kv.shape[1] != dim or kv.dtype != torch.bfloat16 or kv.stride(1) != 1:
        raise ValueError(f"kv must be bfloat16 [N, {dim}] with contiguous rows, got {tuple(kv.shape)} {kv.dtype}")
    _check_indices(indices, (tokens,), lens, tokens)
    if tokens == 0 or kv.shape[0] == 0:
        lse = q.new_full((tokens, heads), float("inf"), dtype=torch.float32)
        return _result(_empty(q, out).zero_(), lse, out)
    width, kernels = padded_heads(heads), flavour()
    direct = _direct_out(kernels, out, heads, width)
    # a valid index past the lengths whose row holds NaN can (rarely) affect the output
    indices = _pad_width(indices if masked_tails else _without_tail(indices, lens), PREFILL_WIDTH)
    result, _, lse = _kernels(q).flash_mla_sparse_fwd(
        _pad_heads(q, width),
        kv.unsqueeze(1),
        indices.unsqueeze(1),
        scale,
        d_v=VALUE_DIM,
        attn_sink=_pad_sink(sink, width),
        topk_length=_contiguous(lens),
        **kernels.options(direct),
    )
    return _result(result[:, :heads], lse[:, :heads], out, written=direct is not None)


def _check_query(q: Tensor, sink: Tensor | None, out: Tensor | None, rows: torch.Size) -> None:
    if q.dim() != 4 or q.dtype != torch.bfloat16 or q.shape[-1] not in ENTRY_BYTES or q.stride(-1) != 1:
        raise ValueError(
            f"q must be bfloat16 with 512 or 576 contiguous channels per head, got {tuple(q.shape)} {q.dtype}"
        )
    padded_heads(q.shape[2])
    if sink is not None and (sink.dim() != 1 or sink.shape[0] > q.shape[2] or sink.dtype != torch.float32):
        raise ValueError(f"sink must be float32 [{q.shape[2]}], got {tuple(sink.shape)} {sink.dtype}")
    if out is not None and (out.shape != (*rows, VALUE_DIM) or out.dtype != q.dtype):
        raise ValueError(f"out must be bfloat16 {(*rows, VALUE_DIM)}, got {tuple(out.shape)} {out.dtype}")


def _check_indices(indices: Tensor, rows: tuple[int, ...], lens: Tensor | None, batch: int) -> None:
    if indices.dtype != torch.int32 or indices.dim() != len(rows) + 1 or indices.shape[:-1] != rows:
        wanted = ", ".join(map(str, rows))
        raise ValueError(f"indices must be int32 [{wanted}, K], got {tuple(indices.shape)} {indices.dtype}")
    if lens is not None and (lens.dtype != torch.int32 or lens.shape != (batch,)):
        raise ValueError(f"lens must be int32 [{batch}], got {tuple(lens.shape)} {lens.dtype}")


class _PoolArguments(NamedTuple):
    """Decode kernel arguments of one pool: ``cache [pages, n, 1, bytes]``, ``indices [b, s, K]``, ``lens [b]``."""

    cache: Tensor
    indices: Tensor
    lens: Tensor | None


def _pool_arguments(
    keys: PagedKeys, batch: int, queries: int, dim: int, device: torch.device, flat: bool
) -> _PoolArguments:
    """Checked and padded arguments; V3.2's kernel has no lengths: indices past them become -1."""
    cache = _cache_view(keys, dim, device)
    _check_indices(keys.indices, (batch,) if flat else (batch, queries), keys.lens, batch)
    indices = keys.indices.unsqueeze(1) if flat else keys.indices
    if dim == 576:
        return _PoolArguments(cache, _pad_width(_without_tail(indices, keys.lens), DECODE_WIDTH), None)
    return _PoolArguments(cache, _pad_width(indices, DECODE_WIDTH), _contiguous(keys.lens))


def _cache_view(keys: PagedKeys, dim: int, device: torch.device) -> Tensor:
    """The pool as ``[pages, n, 1, bytes]``; for V4 the kernel only recognises the format by the row stride."""
    pool, row = keys.pool, ENTRY_BYTES[dim]
    stride = pool.stride(0)
    if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.stride(1) != 1 or pool.shape[1] < keys.entries * row:
        raise ValueError(
            f"a pool must be uint8 [pages, at least {keys.entries} x {row} bytes], got {tuple(pool.shape)} {pool.dtype}"
        )
    on_blackwell = device.type == "cuda" and compute_capability(device)[0] == 10
    if on_blackwell and (stride % ROW_BYTES[dim] or pool.data_ptr() % 16):
        raise ValueError(
            f"on this GPU pages must be a multiple of {ROW_BYTES[dim]} bytes apart and start at 16-byte aligned "
            f"addresses: got a page stride of {stride} bytes"
        )
    return pool.as_strided((pool.shape[0], keys.entries, 1, row), (stride, row, row, 1))


def _without_tail(indices: Tensor, lens: Tensor | None) -> Tensor:
    """Indices with -1 past the length of their row."""
    if lens is None:
        return indices
    column = torch.arange(indices.shape[-1], dtype=torch.int32, device=indices.device)
    return indices.masked_fill(column >= lens.view(-1, *[1] * (indices.dim() - 1)), -1)


def _pad_width(indices: Tensor, multiple: int) -> Tensor:
    """Contiguous rows, filled with -1 up to a positive multiple."""
    missing = max(multiple, -(-indices.shape[-1] // multiple) * multiple) - indices.shape[-1]
    return F.pad(indices, (0, missing), value=-1) if missing else indices.contiguous()


def _pad_heads(q: Tensor, heads: int) -> Tensor:
    return F.pad(q, (0, 0, 0, heads - q.shape[-2])) if heads > q.shape[-2] else q


def _pad_sink(sink: Tensor | None, heads: int) -> Tensor | None:
    if sink is None:
        return None
    return F.pad(sink, (0, heads - sink.shape[0])) if heads > sink.shape[0] else sink.contiguous()


def _contiguous(lens: Tensor | None) -> Tensor | None:
    return None if lens is None else lens.contiguous()


def _direct_out(kernels: Flavour, out: Tensor | None, heads: int, padded: int) -> Tensor | None:
    """``out`` itself if the kernel can write to it."""
    return out if kernels.supports_out and out is not None and heads == padded and out.is_contiguous() else None


def _empty(q: Tensor, out: Tensor | None) -> Tensor:
    return q.new_empty(*q.shape[:-1], VALUE_DIM) if out is None else out


def _result(result: Tensor, lse: Tensor, out: Tensor | None, written: bool = False) -> tuple[Tensor, Tensor]:
    if out is None:
        return result, lse
    if not written and result is not out:
        out.copy_(result)
    return out, lse
