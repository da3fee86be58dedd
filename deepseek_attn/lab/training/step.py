"""One optimizer step, captured as a CUDA graph on a GPU."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from deepseek_attn.lab.training.drafts import DraftModel, draft_losses
from deepseek_attn.lab.training.forward import DenseModel
from deepseek_attn.lab.training.save import MTP, TrainedSource
from deepseek_attn.lab.training.task import Batch
from deepseek_attn.models.block import Backbone
from deepseek_attn.models.moe import Gate

BETAS = (0.9, 0.95)
MAX_NORM = 1.0
BALANCE = 1e-3  # change of the router's bias per step, against an uneven load
EAGER_STEPS = 3  # before a graph is captured: they allocate the memory that it replays with
logger = logging.getLogger(__name__)


class Objective(NamedTuple):
    """Losses of a batch.

    Attributes:
        minimised: scalar whose gradients are taken.
        reported: the loss in reports, a scalar; of several seeds ``[seeds]``.
        loads: float32 ``[layers, experts]``, of several seeds ``[seeds, layers, experts]``: the share of tokens that
            each expert got.
    """

    minimised: torch.Tensor
    reported: torch.Tensor
    loads: torch.Tensor


class TrainingStep(ABC):
    """Loss, gradients, update and expert balance of one batch.

    Args:
        model: whose weights these are; where several seeds are trained together, the first of them.
        named: trained parameters by name; groups: the same as AdamW takes them.
        shape: of the token tensor, ``[B, S + 1]``; of several seeds ``[seeds, B, S + 1]``.
    """

    def __init__(self, model: Backbone, named: Mapping[str, nn.Parameter], groups: list[dict], shape: tuple[int, ...]):
        self.device = device = model.embed.weight.device
        self.source = TrainedSource(model, model.config)  # how the weights are stored
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.targets = torch.zeros_like(self.tokens)
        self.mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.parameters = list(named.values())
        captured = device.type == "cuda"
        rate = torch.zeros((), device=device, dtype=torch.float32) if captured else 0.0
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=captured, capturable=captured)
        self.stream = torch.cuda.Stream(device) if captured else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager, self.captures = 0, True
        self.loss = torch.zeros(shape[:-2], device=device, dtype=torch.float32)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All weights, as `load` takes them."""
        return self.source.model.state_dict()

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.source.model.load_state_dict(tensors)

    @abstractmethod
    def objective(self) -> Objective:
        """Of the batch in ``tokens``, ``targets`` and ``mask``. On a GPU it must not wait for the device."""

    def run(self, batch: Batch, rate: float) -> torch.Tensor:
        """Trains on one batch and returns its loss, of each seed, on the device; the next step overwrites it.

        On a GPU the work is done on a stream of this step's own, and the caller's stream waits for it.
        """
        if self.stream is None:
            return self.on_this_stream(batch, rate)
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            loss = self.on_this_stream(batch, rate)
        current.wait_stream(self.stream)
        return loss

    def on_this_stream(self, batch: Batch, rate: float) -> torch.Tensor:
        for mine, drawn in zip((self.tokens, self.mask, self.targets), batch[:3], strict=True):
            # from pageable memory the host would wait for the step before
            mine.copy_(drawn if self.stream is None else drawn.pin_memory(), non_blocking=True)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.stream is None:
            self.work()
        elif self.eager < EAGER_STEPS or not self.captures:
            self.eager += 1
            self.work()
        else:
            if self.graph is None:
                try:
                    self.graph = self.capture()
                except RuntimeError as error:
                    logger.warning(f"the steps of this training are not captured as a CUDA graph: {error}")
                    self.captures = False
                    self.work()
                    return self.loss
            self.graph.replay()
        return self.loss

    def work(self) -> None:
        """Forward, backward, optimizer update and expert balance, on the batch that `run` has copied."""
        self.optimizer.zero_grad(set_to_none=True)
        minimised, reported, loads = self.objective()
        minimised.backward()
        self.clip()
        self.optimizer.step()
        self.balance(loads)
        self.loss.copy_(reported.detach())

    def capture(self) -> torch.cuda.CUDAGraph:
        """The graph of `work`, captured on the stream that replays it.

        cuBLAS has a workspace per stream: graphs that run at the same time must not be captured on one stream, which
        `torch.cuda.graph` would do by default.
        """
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.work()
        return graph

    def clip(self) -> None:
        """Scales gradients whose norm exceeds `MAX_NORM`."""
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)

    @abstractmethod
    def balance(self, loads: torch.Tensor) -> None:
        """Moves each router's bias towards experts that got less than their share (DeepSeek-V3, section 2.1.2)."""


class ModelStep(TrainingStep):
    """A step of one model.

    Args:
        dense: holds the model; mtp: train only its MTP layer, otherwise everything else.
        batch, seq_len: the size of every batch.
        weight_decay: AdamW's, of the matrices.
    """

    def __init__(self, dense: DenseModel, mtp: bool, batch: int, seq_len: int, weight_decay: float):
        model = dense.model
        self.gates = [module for module in (model.mtp if mtp else model.layers).modules() if isinstance(module, Gate)]
        named = {name: p for name, p in model.named_parameters() if p.requires_grad and name.startswith(MTP) == mtp}
        super().__init__(model, named, parameter_groups(named, weight_decay), (batch, seq_len + 1))

    @torch.no_grad()
    def balance(self, loads: torch.Tensor) -> None:
        for gate, load in zip(self.gates, loads, strict=True):
            if not gate.hash:
                gate.bias += BALANCE * torch.sign(load.mean() - load)


class StagedStep(TrainingStep):
    """A step of backbones, whose training has two stages; see `deepseek_attn.lab.training.loop.train`."""

    served: bool | None = None

    def set_stage(self, served: bool) -> None:
        """``served``: entries are selected and weights quantised, as when the model is served."""
        if served != self.served:
            if self.stream is not None:
                self.stream.synchronize()  # the last replay of the graph that goes
            self.served, self.graph, self.eager = served, None, 0


class BackboneStep(ModelStep, StagedStep):
    """A step of the backbone on the next token, beside which its indexers learn."""

    def __init__(self, dense: DenseModel, batch: int, seq_len: int, weight_decay: float):
        super().__init__(dense, False, batch, seq_len, weight_decay)
        self.dense = dense

    def objective(self) -> Objective:
        weights = self.source.rounded_parameters(mtp=False) if self.served else {}
        names = {f"model.{name}": value for name, value in weights.items()}
        result = torch.func.functional_call(self.dense, names, (self.tokens[:, :-1], self.served))
        loss = mean_loss(result.logits, self.targets, self.mask)
        return Objective(loss + result.index_loss, loss, result.loads)


def mean_loss(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of ``logits [B, S, vocab_size]`` over the tokens of ``mask``; the others ``[B, S + 1]``."""
    counted = mask[:, 1:].flatten()
    losses = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="none")
    return (losses * counted).sum() / counted.sum()


class MtpStep(ModelStep):
    """A step of the MTP layer behind a backbone that is finished, whose weights are rounded once: both as served.

    Args:
        depth: drafts that are trained; greedy_share: see `draft_losses`.
    """

    def __init__(
        self, dense: DenseModel, batch: int, seq_len: int, weight_decay: float, depth: int, greedy_share: float
    ):
        super().__init__(dense, True, batch, seq_len, weight_decay)
        self.drafting, self.depth, self.greedy_share = DraftModel(dense), depth, greedy_share
        with torch.no_grad():
            self.backbone = self.source.rounded_parameters(mtp=False)

    def objective(self) -> Objective:
        weights = self.backbone | self.source.rounded_parameters(backbone=False)
        names = {f"dense.model.{name}": value for name, value in weights.items()}
        drafts = torch.func.functional_call(self.drafting, names, (self.tokens[:, :-1], self.depth))
        minimised, reported = draft_losses(drafts, self.mask[:, 2:], self.greedy_share)
        return Objective(minimised, reported, drafts.loads)


def parameter_groups(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict]:
    """AdamW groups of parameters by name: matrices decay; embeddings, norms, sinks and hyper-connections do not."""
    decay, keep = [], []
    for name, parameter in parameters.items():
        (decay if decays(name, parameter) else keep).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]


def decays(name: str, parameter: nn.Parameter) -> bool:
    mixes = "hc_" in name or name.endswith((".ape", "embed.weight"))
    return parameter.dim() > 1 and not mixes
