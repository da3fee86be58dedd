"""ModelRunner: a batch of sequences in, logits out."""

from deepseek_attn.runner.model_runner import ModelRunner

__all__ = ["ModelRunner"]
