"""Training of small V4 models: the modules of `models`, run without caches so that everything has a gradient.

`forward`, `attention` and `drafts` are the differentiable path, `task`, `tasks` and `text` the data, `settings`, `loop`
and `step` the optimisation, `weights` the initial values, and `save` writes the result as a published checkpoint.
"""

from deepseek_attn.lab.training.loop import TrainResult, evaluate, train, train_mtp
from deepseek_attn.lab.training.save import TrainedSource, save_checkpoint
from deepseek_attn.lab.training.settings import MtpTraining
from deepseek_attn.lab.training.task import Batch, Task
from deepseek_attn.lab.training.tasks import AssociativeRecall, CopyAcross, Needle, make_task
from deepseek_attn.lab.training.text import TextTask, sample_text

__all__ = [
    "AssociativeRecall",
    "Batch",
    "CopyAcross",
    "MtpTraining",
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
    "train_mtp",
]
