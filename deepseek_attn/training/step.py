"""One optimizer step, captured as a CUDA graph on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from deepseek_attn.models.moe import Gate
from deepseek_attn.training.forward import DenseModel
from deepseek_attn.training.save import TrainedSource
from deepseek_attn.training.task import Batch

BETAS = (0.9, 0.95)
MAX_NORM = 1.0
BALANCE = 1e-3  # change of the router's bias per step, against an uneven load
EAGER_STEPS = 3  # before a graph is captured: they allocate the memory that it replays with


class TrainingStep:
    """Loss, gradients, update and expert balance of one batch.

    Args:
        source: how the model's weights are stored, for the stage in which they are quantised.
        batch, seq_len: the size of every batch.
        weight_decay: AdamW's, of the matrices.
    """

    def __init__(
        self,
        dense: DenseModel,
        source: TrainedSource,
        batch: int,
        seq_len: int,
        weight_decay: float,
        device: torch.device,
    ):
        self.dense, self.source, self.device = dense, source, device
        self.tokens = torch.zeros(batch, seq_len + 1, dtype=torch.int64, device=device)
        self.mask = torch.zeros(batch, seq_len + 1, dtype=torch.bool, device=device)
        self.gates = [module for module in dense.modules() if isinstance(module, Gate)]
        self.parameters = [p for p in dense.parameters() if p.requires_grad]
        captured = device.type == "cuda"
        rate = torch.zeros((), device=device) if captured else 0.0
        self.optimizer = torch.optim.AdamW(
            parameter_groups(dense, weight_decay), lr=rate, betas=BETAS, fused=captured, capturable=captured
        )
        self.served: bool | None = None
        self.loss = torch.zeros((), device=device)

    def set_stage(self, served: bool) -> None:
        """``served``: entries are selected and weights quantised, as when the model is served."""
        if served != self.served:
            self.served, self.graph, self.eager = served, None, 0

    def run(self, batch: Batch, rate: float) -> torch.Tensor:
        """Trains on one batch and returns its loss, a scalar on the device that the next step overwrites."""
        self.tokens.copy_(batch.tokens, non_blocking=True)
        self.mask.copy_(batch.mask, non_blocking=True)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.device.type != "cuda":
            self.work()
        elif self.eager < EAGER_STEPS:
            self.eager += 1
            self.on_side_stream()
        else:
            if self.graph is None:
                self.capture()
            self.graph.replay()
        return self.loss

    def work(self) -> None:
        """Forward, backward, optimizer update and expert balance, on the batch in ``tokens`` and ``mask``."""
        self.optimizer.zero_grad(set_to_none=True)
        weights = {f"model.{k}": v for k, v in self.source.rounded_parameters().items()} if self.served else {}
        result = torch.func.functional_call(self.dense, weights, (self.tokens[:, :-1], self.served))
        targets, counted = self.tokens[:, 1:].flatten(), self.mask[:, 1:].flatten()
        losses = F.cross_entropy(result.logits.flatten(0, 1), targets, reduction="none")
        loss = (losses * counted).sum() / counted.sum()
        (loss + result.index_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        self.balance(result.loads)
        self.loss.copy_(loss.detach())

    def on_side_stream(self) -> None:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.work()
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def capture(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.work()

    @torch.no_grad()
    def balance(self, loads: torch.Tensor) -> None:
        """Moves each router's bias towards experts that got less than their share (DeepSeek-V3, section 2.1.2)."""
        for gate, load in zip(self.gates, loads, strict=True):
            if not gate.hash:
                gate.bias += BALANCE * torch.sign(load.mean() - load)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict]:
    """AdamW groups: matrices decay; embeddings, norms, sinks and hyper-connections do not."""
    decay, keep = [], []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            mixes = "hc_" in name or name.endswith((".ape", "embed.weight"))
            (decay if parameter.dim() > 1 and not mixes else keep).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]
