"""Checkpoints: reading, naming, making up and writing them."""

from deepseek_attn.checkpoint.names import CanonicalSource, canonical_name, hf_name, hf_state_dict
from deepseek_attn.checkpoint.published import PublishedSource
from deepseek_attn.checkpoint.random import RandomSource
from deepseek_attn.checkpoint.safetensors_source import SafetensorsSource
from deepseek_attn.checkpoint.source import CheckpointSource, TensorInfo
from deepseek_attn.checkpoint.stored_weights import read_float32, read_weight
from deepseek_attn.checkpoint.write import write_checkpoint
from deepseek_attn.text.tokenizer_files import make_tokenizer, write_tokenizer

__all__ = [
    "CanonicalSource",
    "CheckpointSource",
    "PublishedSource",
    "RandomSource",
    "SafetensorsSource",
    "TensorInfo",
    "canonical_name",
    "hf_name",
    "hf_state_dict",
    "make_tokenizer",
    "read_float32",
    "read_weight",
    "write_checkpoint",
    "write_tokenizer",
]
