"""Training small V4 models: the same modules and parameter names that run, driven without caches so that they have
gradients.

`forward` is the differentiable path, `tasks` and `text` say what is learned, `loop.train` learns it, and `save` writes
the result as a published checkpoint.
"""

from deepseek_attn.training.loop import TrainResult, evaluate, train
from deepseek_attn.training.save import TrainedSource, save_checkpoint
from deepseek_attn.training.tasks import AssociativeRecall, Batch, CopyAcross, Needle, Task, make_task
from deepseek_attn.training.text import TextTask, sample_text

__all__ = [
    "AssociativeRecall",
    "Batch",
    "CopyAcross",
    "Needle",
    "Task",
    "TextTask",
    "TrainResult",
    "TrainedSource",
    "evaluate",
    "make_task",
    "sample_text",
    "save_checkpoint",
    "train",
]
