"""ModelRunner: a batch of sequences in, logits out."""

from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.sequence import Sequence
from deepseek_attn.runner.step import StepOptions, StepOutput
from deepseek_attn.runner.token_records import TokenRecords

__all__ = ["ModelRunner", "Sequence", "StepOptions", "StepOutput", "TokenRecords"]
