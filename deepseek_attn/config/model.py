"""Model configuration: the values of ``config.json`` and one ``LayerSpec`` per layer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from deepseek_attn.config.common import RopeSpec
from deepseek_attn.config.dspark import DSparkConfig, drop_dspark
from deepseek_attn.config.keys import V4
from deepseek_attn.config.schedule import published_branch
from deepseek_attn.config.v4 import DeepseekV4Base, LayerSpec
from deepseek_attn.config.v4_reader import read_v4
from deepseek_attn.config.v32 import DeepseekV32Config, V32LayerSpec
from deepseek_attn.config.v41 import DeepseekV41Config, is_inference_config
from deepseek_attn.utils.hub import CONFIG_FILE, HubModel, check_path
from deepseek_attn.utils.json_files import parse_json, read_json
from deepseek_attn.utils.other_formats import SUPPORTED, contents, quantiser, weight_format
from deepseek_attn.utils.registry import load_extensions


@dataclass(frozen=True)
class ModelConfig(DeepseekV4Base):
    """A checked DeepSeek-V4 configuration; fields have the names of the published ``config.json``.

    Make one with ``from_dict``, ``from_pretrained`` or ``from_preset``, and variants with ``replace``. These read the
    published spelling and transformers' spelling, and return a ``DeepseekV32Config`` or ``DeepseekV41Config`` for such
    a ``model_type``. Absent keys default to ``num_nextn_predict_layers`` 0,
    ``hc_sinkhorn_iters`` 20, ``hc_eps`` and ``rms_norm_eps`` 1e-6, ``scoring_func`` sqrtsoftplus, ``bos_token_id`` 0,
    ``eos_token_id`` 1, ``torch_dtype`` bfloat16, no rope scaling and ``expert_dtype`` "fp4" when there is a
    ``quantization_config``, else None. All others are required. `config.keys.V4` lists all keys; a warning names those
    that are not in it.

    ``replace``: overrides by ratio stay in force for a new schedule, those by layer must fit it; a smaller
    ``num_hidden_layers`` alone keeps the first layers; ``quantization_config=None`` also drops ``expert_dtype``.

    The schedule is any list of ratios >= 0 in ``compress_ratios``, backbone layers first. As in DeepSeek's
    inference/model.py, ratio 4 means overlapping windows and an indexer, every other ratio neither. Two keys of our own
    override that: ``compress_overlap`` and ``compress_indexer``, each a list with one bool per backbone layer or an
    object from ratios of the schedule to bool, such as ``{"16": true}``; ratios it does not name keep the rule. In
    transformers' ``layer_types`` the name decides: ``compressed_sparse_attention`` has both whatever its rate, and
    ``heavily_compressed_attention`` neither.
    """

    OPTIONAL: ClassVar = (
        *("compress_overlap", "compress_indexer", "rope_scaling", "quantization_config", "expert_dtype"),
        *DSparkConfig.__dataclass_fields__,
    )

    num_hash_layers: int

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], origin: str = "dict") -> AnyConfig:
        """Builds a config from decoded JSON in either spelling.

        Raises:
            ValueError: one error that lists every problem with the offending values; ``origin`` names the config in it.
        """
        if not isinstance(raw, Mapping):
            raise ValueError(f"invalid config ({origin}): expected a JSON object, got {type(raw).__name__}")
        model_type = "deepseek_v41" if is_inference_config(raw) else raw.get("model_type")
        if isinstance(model_type, str) and model_type not in MODEL_TYPES:
            load_extensions()
        if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
            if model_type is None and {"dim", "n_layers"} <= raw.keys():
                raise ValueError(
                    f"invalid config ({origin}): no model_type; it looks like the config of DeepSeek's inference code: "
                    "take config.json of the original checkpoint"
                )
            supported = ", ".join(f"{name!r} ({MODELS[name]})" for name in MODEL_TYPES)
            raise ValueError(
                f"invalid config ({origin}): model_type is {repr(model_type)[:100]} with architectures "
                f"{repr(raw.get('architectures'))[:100]}, supported is {supported}"
            )
        return MODEL_TYPES[model_type](raw, origin)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> AnyConfig:
        """Reads a checkpoint directory (its ``config.json``), a JSON file, or a preset by name such as ``"tiny"``.

        Of a hub id (``org/name``, ``org/name@revision``) it reads the copy in the local cache of huggingface_hub, where
        only ``config.json`` is downloaded to.

        Raises:
            ValueError: nothing of the kind exists, the JSON is broken (with its line), or the config is invalid.
        """
        check_path(path, "a config is named by its folder, its file, a preset or a hub id (org/name)")
        file = Path(path)
        if (file / CONFIG_FILE).is_file():
            file = file / CONFIG_FILE
        elif str(path) in preset_names() and not file.is_file():
            return cls.from_preset(str(path))
        elif file.is_dir():
            raise ValueError(f"no config.json in directory {str(path)!r}{contents(file)}")
        elif repo := HubModel.parse(path):
            file = (repo.local_folder() or repo.download([CONFIG_FILE])) / CONFIG_FILE
        elif not file.is_file():
            raise ValueError(
                f"{str(path)!r} is not a directory, JSON file or preset ({', '.join(preset_names())}), nor a hub id "
                "(org/name)"
            )
        if kind := weight_format(file):
            hint = "give the folder that holds it and config.json" if kind == "safetensors" else SUPPORTED
            raise ValueError(f"{str(path)!r} is a weight file in the format {kind}, not a checkpoint folder; {hint}")
        if file.name == CONFIG_FILE and (found := quantiser(file.parent)):
            raise ValueError(f"the weights in {str(file.parent)!r} are quantised by {found}; {SUPPORTED}")
        return cls.from_dict(read_json(file, f"invalid config ({file})"), origin=str(file))

    @classmethod
    def from_preset(cls, name: str) -> AnyConfig:
        """Reads a config of the library's presets; ``preset_names()`` lists them."""
        if name not in preset_names():
            raise ValueError(f"unknown preset {name!r}: available are {', '.join(preset_names())}")
        text = resources.files("deepseek_attn.configs").joinpath(f"{name}.json").read_bytes()
        return cls.from_dict(parse_json(text, f"preset {name}"), origin=f"preset {name}")

    def constants(self) -> dict[str, Any]:
        return {"architectures": ["DeepseekV4ForCausalLM"], **V4.constants()}

    def schedule(self) -> dict[str, Any]:
        rule = [published_branch(layer.ratio) for layer in self.layers]
        return {
            "compress_ratios": list(self.compress_ratios),
            "compress_overlap": self._override([x.overlap for x in self.layers], [b.overlap for b in rule]),
            "compress_indexer": self._override([x.has_indexer for x in self.layers], [b.has_indexer for b in rule]),
            **(self.dspark.to_dict() if self.dspark else {}),
        }

    def _override(self, values: list[bool], rule: list[bool]) -> dict[str, bool] | list[bool] | None:
        """The shortest override: None if the rule holds, by ratio if layers of one ratio agree, else by layer."""
        if values == rule:
            return None
        by_ratio: dict[str, bool] = {}
        for layer, value in zip(self.layers, values, strict=True):
            if by_ratio.setdefault(str(layer.ratio), value) != value:
                return values
        return {ratio: value for ratio, value in by_ratio.items() if value != (ratio == "4")}

    def adapt(self, raw: dict[str, Any], changes: Mapping[str, Any]) -> None:
        if "num_hidden_layers" in changes and "compress_ratios" not in changes:
            self._shorten(raw, changes["num_hidden_layers"])
        for key in ("compress_overlap", "compress_indexer"):
            left = changes.get("compress_ratios", raw["compress_ratios"])
            if isinstance(by_ratio := raw.get(key), dict) and isinstance(left, (list, tuple)):
                raw[key] = {ratio: value for ratio, value in by_ratio.items() if int(ratio) in left}
        if changes.get("quantization_config", raw) is None:
            raw.pop("expert_dtype", None)
        if self.dspark is not None:
            drop_dspark(raw, changes)

    def _shorten(self, raw: dict[str, Any], num_layers: Any) -> None:
        keep = num_layers if type(num_layers) is int and num_layers > 0 else self.num_hidden_layers
        raw["compress_ratios"] = raw["compress_ratios"][: self.num_hidden_layers][:keep]
        if self.dspark is not None:
            raw["compress_ratios"] += [0] * len(self.mtp_layers)
        for key in ("compress_overlap", "compress_indexer"):
            if isinstance(raw.get(key), list):
                raw[key] = raw[key][:keep]
        raw["num_hash_layers"] = min(raw["num_hash_layers"], keep)


AnyConfig = DeepseekV4Base | DeepseekV32Config
AnySpec = LayerSpec | V32LayerSpec


def _make_v4(raw: Mapping[str, Any], origin: str) -> ModelConfig:
    """The checked config with the specs of its layers."""
    fields, branches = read_v4(raw, origin)
    _warn_of_ratio_1([i for i, branch in enumerate(branches) if branch.ratio == 1], origin)
    dim, scaling = fields["qk_rope_head_dim"], fields["rope_scaling"]
    plain, compressed = (
        RopeSpec(fields["rope_theta"], dim),
        RopeSpec.scaled(fields["compress_rope_theta"], dim, scaling),
    )
    layers = tuple(
        LayerSpec(
            index=i,
            ratio=branch.ratio,
            overlap=branch.overlap,
            has_indexer=branch.has_indexer,
            rope=compressed if branch.ratio else plain,
            hash_routing=i < fields["num_hash_layers"],
        )
        for i, branch in enumerate(branches)
    )
    stages = fields["num_nextn_predict_layers"]
    if fields["dspark"] is not None:  # configs of V4 with three stages hold 1, but a ratio for each stage
        stages = max(stages, len(raw.get("compress_ratios") or ()) - len(layers))
    mtp_layers = tuple(
        LayerSpec(i, ratio=0, overlap=False, has_indexer=False, rope=plain, hash_routing=False, is_mtp=True)
        for i in range(stages)
    )
    return ModelConfig(**copy.deepcopy(fields), layers=layers, mtp_layers=mtp_layers)


def _warn_of_ratio_1(layers: list[int], origin: str) -> None:
    if layers:
        warnings.warn(
            f"config ({origin}): the compress ratio of layers {layers} is 1. Here that is a compressor with one entry "
            "per token, whose weights the checkpoint must hold; other ports of DeepSeek-V4 write 1 for layers without "
            "compression, which is 0 here: write 0 for layers that read the window only",
            stacklevel=2,
        )


# Constructor of the config of each model_type, from (decoded JSON, origin). `register_family` adds more.
MODEL_TYPES: dict[str, Callable[[Mapping[str, Any], str], AnyConfig]] = {
    "deepseek_v4": _make_v4,
    "deepseek_v32": DeepseekV32Config.from_dict,
    "deepseek_v3": DeepseekV32Config.from_dict,
    "deepseek_v41": DeepseekV41Config.from_dict,
    "deepseek_v41_text": DeepseekV41Config.from_dict,
}

# Published models of each model_type.
MODELS = {
    "deepseek_v4": "V4-Flash, V4-Pro and their revisions",
    "deepseek_v32": "V3.2, V3.2-Exp, V3.2-Speciale",
    "deepseek_v3": "V3, V3.1, R1",
    "deepseek_v41": "V4.1-Flash",
    "deepseek_v41_text": "its text part alone",
}


def preset_names() -> list[str]:
    """Names that ``ModelConfig.from_preset`` accepts."""
    files = (entry.name for entry in resources.files("deepseek_attn.configs").iterdir())
    return sorted(name[: -len(".json")] for name in files if name.endswith(".json"))
