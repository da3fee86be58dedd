"""SGLang's own config classes, model classes and weight loader over checkpoints, on a machine without a GPU.

    pip download --no-deps sglang==0.5.23 && unzip -q sglang-*.whl -d SGLANG
    pip install --no-deps --target SITE msgspec orjson pybase64 pillow pyzmq psutil fastapi setproctitle cloudpickle \
        dill einops partial-json-parser prometheus_client aiohttp compressed-tensors==0.17.0 pydantic pydantic-core \
        annotated-types annotated-doc typing-inspection starlette yarl multidict propcache aiosignal frozenlist attrs \
        aiohappyeyeballs
    PYTHONPATH=SGLANG:SITE python scripts/sglang_reads.py DIR

Reads the backbone. Packages that are not installed are stand-ins, tensors of a GPU are on the CPU, and no kernel is
called. As in ``vllm_reads.py`` it is an error if a row of a parameter is not written, or if the values of a tensor of
the checkpoint are in no parameter. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from stand_ins import StandIns
from torch.overrides import TorchFunctionMode
from vllm_reads import PATTERN, as_bytes, bytes_of, checkpoint_tensors, has_pattern

ABSENT = {
    "aiter", "habana_frameworks", "intel_extension_for_pytorch", "mlx", "torch_musa", "torch_npu", "torch_xla",
    "xgrammar",
}  # fmt: skip
CONSTANTS = (".k_scale", ".v_scale")  # of caches, which checkpoints do not have


class ImportedBySGLang:
    """Whether SGLang imports a package, or has imported it before; but not those of other hardware."""

    def __init__(self):
        self.names: set[str] = set()

    def __call__(self, module: str) -> bool:
        package, frame = module.partition(".")[0], sys._getframe(1)
        while frame is not None and not any(part in frame.f_code.co_filename for part in ("sglang/", "site-packages")):
            frame = frame.f_back
        by_sglang = frame is not None and "sglang/" in frame.f_code.co_filename
        if package in ABSENT | {"sglang"} or package.startswith("_") or not (by_sglang or package in self.names):
            return False
        self.names.add(package)
        return True


class OnCpu(TorchFunctionMode):
    """Makes tensors of GPUs on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def place(value: Any) -> Any:
            on_gpu = isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"
            return torch.device("cpu") if on_gpu else value

        if getattr(func, "__name__", "") in ("cuda", "pin_memory"):
            return args[0]
        kwargs = {name: place(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(place, args), **kwargs)


def prepare() -> None:
    """Lets SGLang find an H100, of which it uses no kernel."""
    import transformers  # noqa: F401  # pyright: ignore[reportMissingImports]  # before stand-ins: it looks for packages

    StandIns(ImportedBySGLang()).install()
    facts = {"name": "NVIDIA H100", "major": 9, "minor": 0, "multi_processor_count": 132}
    found = {
        "Event": MagicMock, "Stream": MagicMock, "current_stream": MagicMock(), "synchronize": MagicMock(),
        "set_device": MagicMock(), "empty_cache": MagicMock(), "current_device": lambda: 0, "device_count": lambda: 1,
        "is_available": lambda: True, "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: types.SimpleNamespace(**facts), "get_device_name": lambda *_: facts["name"],
    }  # fmt: skip
    for name, value in found.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = "13.0"
    torch.set_default_dtype(torch.bfloat16)


def read(directory: Path) -> dict[str, Any]:
    """Builds SGLang's model for a checkpoint, loads it, and compares.

    Raises:
        ValueError: parameters that were not written, or tensors that are in no parameter.
    """
    from sglang.srt import runtime_context  # pyright: ignore[reportMissingImports]  # not a dependency
    from sglang.srt.arg_groups import memory_hook  # pyright: ignore[reportMissingImports]  # not a dependency
    from sglang.srt.configs.load_config import LoadConfig  # pyright: ignore[reportMissingImports]  # not a dependency
    from sglang.srt.configs.model_config import ModelConfig  # pyright: ignore[reportMissingImports]  # not a dependency
    from sglang.srt.distributed import parallel_state  # pyright: ignore[reportMissingImports]  # not a dependency
    from sglang.srt.layers.dp_attention import initialize_dp_attention  # pyright: ignore[reportMissingImports]  # not a dependency
    from sglang.srt.model_loader import loader  # pyright: ignore[reportMissingImports]  # not a dependency
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]  # not a dependency
    from sglang.version import __version__ as version  # pyright: ignore[reportMissingImports]  # not a dependency

    memory_hook.get_device_memory_capacity = lambda *_: 80 * 1024
    args = ServerArgs(
        model_path=str(directory), device="cuda", dtype="bfloat16", load_format="safetensors", skip_tokenizer_init=True
    )
    ranks = runtime_context.SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0)
    runtime_context.publish(args, role="scheduler", ranks=ranks)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_dp_attention(args)
    config, options = ModelConfig.from_server_args(args), LoadConfig(load_format="safetensors")
    model = loader._initialize_model(config, options, loader._get_quantization_config(config, options))
    type(model)._prewarm_mhc_kernels = lambda self: None
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data.reshape(-1).view(torch.uint8).fill_(PATTERN)
    model.load_weights(loader.get_model_loader(options, config)._get_all_weights(config, model))
    given = json.loads((directory / "config.json").read_text())
    tensors = checkpoint_tensors(directory, False, given.get("text_config", given)["num_hidden_layers"])
    blobs = [as_bytes(parameter) for parameter in parameters.values()]
    lost = [
        name
        for name in tensors
        if not any(one in blob for one in [*bytes_of(name, tensors), *dequantized(name, tensors)] for blob in blobs)
        and not rearranged(name, tensors[name], parameters)
    ]
    unwritten = [name for name, found in parameters.items() if has_pattern(found) and not name.endswith(CONSTANTS)]
    if unwritten or lost:
        raise ValueError(f"parameters without weights: {unwritten[:9]}; tensors that nothing has read: {lost[:9]}")
    facts = {"sglang": version, "model": type(model).__name__, "parameters": len(parameters)}
    return facts | {"bytes": sum(map(len, blobs)), "tensors": len(tensors)}


def dequantized(name: str, tensors: dict[str, torch.Tensor]) -> list[bytes]:
    """V4's ``wo_a``, which SGLang holds in bfloat16, for the name of its weight or of its scales."""
    if not name.endswith((".wo_a.weight", ".wo_a.scale")):
        return []
    prefix = name.rpartition(".")[0]
    weight, scales = tensors[f"{prefix}.weight"], tensors[f"{prefix}.scale"].float()
    rows, columns = weight.shape
    block = 128 if -(-rows // 128) == len(scales) else 32  # of V4.1
    wide = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
    return [as_bytes((weight.float() * wide).bfloat16())]


def rearranged(name: str, tensor: torch.Tensor, parameters: dict[str, torch.nn.Parameter]) -> bool:
    """Whether a compressor's position embedding is in a parameter in another order, as overlapping windows have it."""
    if not name.endswith(".ape"):
        return False
    values = tensor.float().flatten().sort().values
    same = [found for key, found in parameters.items() if "ape" in key and found.numel() == tensor.numel()]
    return any(torch.equal(found.data.float().flatten().sort().values, values) for found in same)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, metavar="DIR", help="checkpoint folder")
    args = parser.parse_args()
    if find_spec("sglang") is None:
        parser.exit(2, f"{parser.prog}: error: SGLang is not installed; see the head of this script\n")
    prepare()
    with OnCpu():
        try:
            print(json.dumps(read(args.model)))
        except ValueError as error:
            print(f"{args.model}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
