"""vLLM's own config classes, model classes and weight loader over checkpoints, on a machine without a GPU.

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-*.whl -d VLLM
    pip install --target SITE cachetools psutil blake3 py-cpuinfo 'fastapi<0.137' aiohttp msgspec pyzmq cloudpickle \
        cbor2 pybase64 setproctitle prometheus_client prometheus-fastapi-instrumentator einops pillow \
        partial-json-parser python-json-logger watchfiles six ijson orjson regex protobuf sentencepiece tiktoken \
        lark diskcache oss-harmony
    pip install --no-deps --target SITE compressed-tensors==0.17.0 depyf==0.20.0 loguru gguf dill astor frozendict
    PYTHONPATH=VLLM:SITE python scripts/vllm_reads.py DIR [DIR ...]

Of each checkpoint the MTP layer is read, too, if it has one. Stand-ins take the place of vLLM's kernels, which a CPU
does not have, and of packages that loading does not call. Parameters, their loaders, the mapping of names and the
configs are vLLM's. Before loading, parameters are filled with a pattern. It is an error if a row keeps it, or if the
values of a tensor of the checkpoint are in no parameter. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import types
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors import safe_open
from stand_ins import StandIns

ABSENT = {
    "cuda", "cv2", "flashinfer", "humming", "mistral_common", "numba", "nvtx", "pynvml", "tilelang", "torchaudio",
    "uvloop", "xgrammar",
}  # fmt: skip
NVIDIA = (
    ("deepseek_v4", "model", "DeepseekV4ForCausalLM"),
    ("deepseek_v4", "mtp", "DeepSeekV4MTP"),
    ("deepseek_v32", "model", "DeepseekV32ForCausalLM"),
    ("deepseek_v32", "mtp", "DeepseekV32MTP"),
)
PATTERN = 0xA5
MTP = re.compile(r"^(mtp\.|model\.layers\.(?P<layer>\d+)\.)")
OF_TARGET = (r"embed_tokens\.weight$", r"head\.weight$")  # which an MTP layer shares with the model
VISION = (r"^vision\.", r"^aligner\.", r"^image_")  # of V4.1's model, in a checkpoint of its text part alone


def prepare() -> None:
    """Selects vLLM's classes for NVIDIA GPUs, and puts stand-ins in the place of kernels and CUDA streams."""
    StandIns.of(ABSENT).install()
    for name in ("Event", "Stream"):  # made, not used, while a model is built
        setattr(torch.cuda, name, MagicMock)
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(multi_processor_count=132)
    empty = torch.empty
    torch.empty = lambda *shape, pin_memory=False, **options: empty(*shape, **options)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # which V4.1's drafter needs
    import vllm.platforms  # pyright: ignore[reportMissingImports]  # not a dependency
    from vllm.platforms.cpu import CpuPlatform  # pyright: ignore[reportMissingImports]  # not a dependency
    from vllm.platforms.interface import DeviceCapability  # pyright: ignore[reportMissingImports]  # not a dependency

    class Platform(CpuPlatform):
        """Parameters are on the CPU; everything else is as on an H100."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_attn_backend_cls(cls, *args: Any, **options: Any) -> str:
            return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"

    vllm.platforms._current_platform = Platform()
    from vllm.model_executor.layers.quantization import fp8, modelopt, mxfp4  # pyright: ignore[reportMissingImports]  # not a dependency
    from vllm.model_executor.models import registry  # pyright: ignore[reportMissingImports]  # not a dependency
    from vllm.v1.worker.workspace import init_workspace_manager  # pyright: ignore[reportMissingImports]  # not a dependency

    fp8.init_fp8_linear_kernel = modelopt.init_mxfp8_linear_kernel = lambda *args, **options: MagicMock()
    mxfp4.select_deepseek_v4_mxfp4_moe_backend = lambda moe: (mxfp4.Mxfp4MoeBackend.DEEPGEMM_MXFP4, MagicMock())
    registry._run_in_subprocess = lambda function: function()  # a subprocess would have no stand-ins
    init_workspace_manager(torch.device("cpu"))
    for package, module, name in NVIDIA:
        made = getattr(import_module(f"vllm.models.{package}.nvidia.{module}"), name)
        setattr(import_module(f"vllm.models.{package}"), name, made)
    configs = import_module("vllm.models.deepseek_v41"), import_module("vllm.models.deepseek_v4")
    setattr(configs[1], "DeepseekV4FP8Config", configs[0].DeepseekV4FP8Config)  # noqa: B010 as on a GPU


def read(directory: Path, mtp: bool) -> dict[str, Any]:
    """Builds vLLM's model, or its MTP layer, for a checkpoint, loads it, and compares.

    Raises:
        ValueError: parameters that were not written, or tensors that are in no parameter.
    """
    from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]  # not a dependency
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]  # not a dependency
    from vllm.model_executor.model_loader import get_model_loader  # pyright: ignore[reportMissingImports]  # not a dependency
    from vllm.model_executor.model_loader.utils import initialize_model  # pyright: ignore[reportMissingImports]  # not a dependency

    method = "dspark" if "v41" in json.loads((directory / "config.json").read_text())["model_type"] else "mtp"
    draft = {"speculative_config": {"method": method, "num_speculative_tokens": 1}} if mtp else {}
    config = EngineArgs(
        model=str(directory), enforce_eager=True, dtype="bfloat16", max_model_len=256, load_format="safetensors",
        skip_tokenizer_init=True, **draft,
    ).create_engine_config()  # fmt: skip
    model_config = config.speculative_config.draft_model_config if mtp else config.model_config
    with set_current_vllm_config(config):
        start_ranks()
        model = initialize_model(vllm_config=config, model_config=model_config)
        for parameter in model.parameters():
            parameter.data.view(torch.uint8).fill_(PATTERN)
        get_model_loader(config.load_config).load_weights(model, model_config)
    parameters = dict(model.named_parameters())  # without parts that are optional, and not in the checkpoint
    tensors = checkpoint_tensors(directory, mtp, config.model_config.hf_config.num_hidden_layers)
    vision = any(name.startswith("vision.") for name in tensors)
    absent = [*(OF_TARGET if mtp else ()), *(() if vision else VISION)]
    unwritten = [
        name
        for name, parameter in parameters.items()
        if has_pattern(parameter) and not any(re.search(part, name) for part in absent)
    ]
    blobs = [as_bytes(parameter) for parameter in parameters.values()]
    lost = [name for name in tensors if not any(one in blob for one in bytes_of(name, tensors) for blob in blobs)]
    if unwritten or lost:
        raise ValueError(f"parameters without weights: {unwritten[:9]}; tensors that nothing has read: {lost[:9]}")
    return {
        "model": type(model).__name__,
        "config": type(model_config.hf_config).__name__,
        "parameters": len(parameters),
        "bytes": sum(map(len, blobs)),
        "tensors": len(tensors),
    }


def start_ranks() -> None:
    from vllm import distributed  # pyright: ignore[reportMissingImports]  # not a dependency

    if not torch.distributed.is_initialized():
        store = (Path(tempfile.mkdtemp(prefix="vllm_reads_")) / "store").as_uri()
        distributed.init_distributed_environment(1, 0, store, 0, "gloo")
        distributed.initialize_model_parallel(1)
    torch.set_default_dtype(torch.bfloat16)


def has_pattern(parameter: torch.Tensor) -> bool:
    """Whether a row has kept the pattern."""
    rows = parameter.data.reshape(-1, parameter.shape[-1]) if parameter.dim() else parameter.data.reshape(1, 1)
    return bool((rows.contiguous().view(torch.uint8) == PATTERN).all(dim=1).any())


def checkpoint_tensors(directory: Path, mtp: bool, layers: int) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint that belong to the backbone, or to the MTP layer."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                part = MTP.match(name)
                is_mtp = part is not None and (part["layer"] is None or int(part["layer"]) >= layers)
                if is_mtp == mtp:
                    found[name] = file.get_tensor(name)
    return found


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.data.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def bytes_of(name: str, tensors: dict[str, torch.Tensor]) -> list[bytes]:
    """The bytes of a tensor as it is, and in the forms that vLLM converts some to."""
    tensor = tensors[name]
    found = [as_bytes(tensor)]
    if tensor.dtype in (torch.bfloat16, torch.float32):
        found += [as_bytes(tensor.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    if not tensor.is_floating_point() and tensor.element_size() > 1:
        found += [as_bytes(tensor.to(dtype)) for dtype in (torch.int32, torch.int64)]
    if tensor.dtype == torch.float8_e8m0fnu:  # as float32, or a row for each of the 32 rows of a block
        found += [as_bytes(tensor.float()), as_bytes(tensor.view(torch.uint8).repeat_interleave(32, dim=0))]
    scale = tensors.get(f"{name}_scale_inv")
    if scale is not None and tensor.dtype == torch.float8_e4m3fn:  # V3.2's keys of the indexer, in bfloat16
        rows, columns = tensor.shape
        scales = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        found.append(as_bytes((tensor.float() * scales).bfloat16()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="DIR", help="checkpoint folder")
    args = parser.parse_args()
    if find_spec("vllm") is None:
        parser.exit(2, f"{parser.prog}: error: vLLM is not installed; see the head of this script\n")
    prepare()
    from vllm import __version__ as version  # pyright: ignore[reportMissingImports]  # not a dependency

    rows, status = [], 0
    for directory in args.models:
        given = json.loads((directory / "config.json").read_text())
        mtp_layers = given.get("text_config", given).get("num_nextn_predict_layers")
        for mtp in (False, True) if mtp_layers else (False,):
            row: dict[str, Any] = {"checkpoint": str(directory), "mtp": mtp}
            try:
                row |= read(directory, mtp)
                print(*(f"{key} {value}" for key, value in row.items()), sep="  ")
            except Exception as error:
                row, status = row | {"error": f"{type(error).__name__}: {error}"}, 1
                print(f"{directory}: {row['error']:.2000}", file=sys.stderr)
            rows.append(row)
    print(json.dumps({"vllm": version, "rows": rows}))
    return status


if __name__ == "__main__":
    sys.exit(main())
