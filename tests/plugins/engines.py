"""Stand-ins of vLLM and SGLang: packages whose FlashMLA functions have the engines' names, places and parameters."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

VLLM = "0.33.0"
SGLANG = "0.5.23"

DECODE = """
q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
topk_length=None, extra_topk_length=None, out=None, enable_batch_invariant=False
"""
SGLANG_DECODE = """
q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
causal=False, descale_q=None, descale_k=None, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None,
extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, kv_format=None, *, use_legacy=True
"""
PREFILL = "q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None"


def functions(metadata: str, decode: str, prefill: str) -> str:
    """The three functions, which must not be called."""
    parameters = {"get_mla_metadata": metadata, "flash_mla_with_kvcache": decode, "flash_mla_sparse_fwd": prefill}
    return "".join(
        f"def {name}(\n{indent(names.strip(), '    ')}\n):\n    raise AssertionError('{name} of the engine runs')\n"
        for name, names in parameters.items()
    )


VLLM_FILES = {
    "vllm/envs.py": "VLLM_BATCH_INVARIANT = False\n",
    "vllm/v1/attention/ops/flashmla.py": functions("*args, **kwargs", DECODE, f"{PREFILL}, out=None"),
    "vllm/v1/attention/backends/mla/sparse_swa.py": """
        from vllm.v1.attention.ops.flashmla import get_mla_metadata

        def build():
            return get_mla_metadata()[0]
        """,
    "vllm/models/deepseek_v4/nvidia/flashmla.py": """
        from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd, flash_mla_with_kvcache

        def forward_decode(q, swa, compressed, schedule, scale, sink, output):
            return flash_mla_with_kvcache(
                q=q.unsqueeze(1), k_cache=swa.k_cache, block_table=None, head_dim_v=512,
                tile_scheduler_metadata=schedule, cache_seqlens=None, is_fp8_kvcache=True, indices=swa.indices,
                topk_length=swa.topk_length, softmax_scale=scale, attn_sink=sink,
                extra_k_cache=compressed.k_cache, extra_indices_in_kvcache=compressed.indices,
                extra_topk_length=compressed.topk_length, out=output.unsqueeze(1),
            )

        def forward_prefill(q, kv, indices, scale, sink, lens, output):
            flash_mla_sparse_fwd(
                q=q, kv=kv, indices=indices.unsqueeze(1), sm_scale=scale, attn_sink=sink, topk_length=lens, out=output
            )
        """,
}

SGLANG_FILES = {
    "sglang/kernels/ops/attention/flash_mla_interface.py": functions(
        "cache_seqlens=None, num_q_tokens_per_head_k=None, num_heads_k=None, num_heads_q=None, is_fp8_kvcache=False,\n"
        "topk=None",
        SGLANG_DECODE,
        f"{PREFILL}, *, use_legacy=True",
    ),
    "sglang/srt/plugins/hook_registry.py": """
        import enum
        import pkgutil

        class HookType(enum.Enum):
            REPLACE = "replace"

        class HookRegistry:
            hooks = {}

            @classmethod
            def register(cls, target, hook, hook_type):
                assert hook_type is HookType.REPLACE
                cls.hooks[target] = hook

            @classmethod
            def apply_hooks(cls):
                for target, hook in cls.hooks.items():
                    place, name = target.rsplit(".", 1)
                    setattr(pkgutil.resolve_name(place), name, hook)
        """,
    "sglang/srt/layers/attention/dsa_backend.py": """
        import torch
        from sglang.kernels.ops.attention import flash_mla_interface

        def metadata(cache_seqlens, heads):
            return flash_mla_interface.get_mla_metadata(
                cache_seqlens=cache_seqlens, num_q_tokens_per_head_k=heads, num_heads_k=1, num_heads_q=heads,
                is_fp8_kvcache=True, topk=2048,
            )

        def forward_flashmla_kv(q, pool, cache_seqlens, schedule, num_splits, scale):
            return flash_mla_interface.flash_mla_with_kvcache(
                q=q, k_cache=pool.k_cache, cache_seqlens=cache_seqlens, head_dim_v=512,
                tile_scheduler_metadata=schedule, num_splits=num_splits, softmax_scale=scale, indices=pool.indices,
                block_table=torch.empty((q.shape[0], 0), dtype=torch.int32), is_fp8_kvcache=True, kv_format=None,
            )

        def forward_flashmla_sparse(q, kv, indices, scale, lens):
            return flash_mla_interface.flash_mla_sparse_fwd(
                q=q, kv=kv, indices=indices.unsqueeze(1), sm_scale=scale, d_v=512, attn_sink=None, topk_length=lens
            )
        """,
    "sglang/srt/layers/attention/deepseek_v4_backend.py": """
        import functools
        from sglang.kernels.ops.attention import flash_mla_interface

        def forward(q, swa, compressed, scale, sink):
            decode = functools.partial(flash_mla_interface.flash_mla_with_kvcache, use_legacy=True)
            return decode(
                q=q, k_cache=swa.k_cache, head_dim_v=512, block_table=None, cache_seqlens=None,
                tile_scheduler_metadata=flash_mla_interface.get_mla_metadata()[0], softmax_scale=scale,
                is_fp8_kvcache=True, indices=swa.indices, topk_length=swa.topk_length, attn_sink=sink,
                extra_k_cache=compressed.k_cache, extra_indices_in_kvcache=compressed.indices,
                extra_topk_length=compressed.topk_length,
            )
        """,
}


def write_engine(folder: Path, package: str, version: str, files: dict[str, str]) -> None:
    """Writes a package and the metadata of its version into a folder of the import path."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text), encoding="utf-8")
        for parent in file.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n", encoding="utf-8")
