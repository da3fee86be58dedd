"""Several seeds of one model, trained as one: each operation of a step computes all of them.

A step of a small model is thousands of launches, each of a few microseconds of which little is work. With the seeds as
a leading dimension of every tensor (`torch.func.vmap`), a step of all of them has as many launches as a step of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepseek_attn.lab.training.forward import DenseModel
from deepseek_attn.lab.training.step import BALANCE, MAX_NORM, Objective, StagedStep, decays, mean_loss
from deepseek_attn.models.moe import Gate

ALIGNED = 64  # weights of a multiple of so many elements come first, so that each begins at an aligned address
FIXED = "fixed."


class SeedRows(NamedTuple):
    """Trained weights of all seeds, one row each: ``[seeds, elements]``, and the place of each weight in a row."""

    values: nn.Parameter
    shapes: dict[str, torch.Size]

    def weights(self) -> dict[str, Tensor]:
        """The weights by name, ``[seeds, ...]``; the gradient of the row is one concatenation of theirs."""
        parts = self.values.split([shape.numel() for shape in self.shapes.values()], 1)
        return {name: part.unflatten(1, shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


class SeedsStep(StagedStep):
    """`BackboneStep` of several models that differ in their seed.

    Results are those of separate steps up to rounding: matrix products of a batch round otherwise than single ones.

    Args:
        members: one model a seed, of one config and selection.
        batch, seq_len: the size of every batch; weight_decay: AdamW's, of the matrices.
    """

    def __init__(self, members: Sequence[DenseModel], batch: int, seq_len: int, weight_decay: float):
        self.dense, self.models = members[0], [member.model for member in members]
        model, device = self.models[0], self.models[0].embed.weight.device
        named = [dict(each.named_parameters()) for each in self.models]
        self.rows: dict[str, SeedRows] = {}
        groups = []
        for label, decay in (("decayed", weight_decay), ("kept", 0.0)):
            chosen = {n: p for n, p in named[0].items() if p.requires_grad and decays(n, p) == (label == "decayed")}
            shapes = {n: chosen[n].shape for n in sorted(chosen, key=lambda n: chosen[n].numel() % ALIGNED != 0)}
            values = [torch.cat([own[name].detach().flatten() for name in shapes]) for own in named]
            self.rows[label] = SeedRows(nn.Parameter(torch.stack(values)), shapes)
            groups.append({"params": [self.rows[label].values], "weight_decay": decay})
        rest = [name for name, parameter in named[0].items() if not parameter.requires_grad]
        self.fixed = {name: torch.stack([own[name].detach() for own in named]) for name in rest}
        self.gates = {name: gate for name, gate in model.layers.named_modules() if isinstance(gate, Gate)}
        self.seeds = torch.tensor([member.seed for member in members], dtype=torch.int64, device=device)
        trained = {label: row.values for label, row in self.rows.items()}
        super().__init__(model, trained, groups, (len(members), batch, seq_len + 1))

    def weights(self) -> dict[str, Tensor]:
        """All weights by name, ``[seeds, ...]``."""
        return {name: value for row in self.rows.values() for name, value in row.weights().items()} | self.fixed

    def objective(self) -> Objective:
        weights = self.weights()
        if self.served:
            weights |= self.source.rounded_parameters(mtp=False, weights=weights)
        losses, index_losses, loads = torch.func.vmap(self.member)(
            weights, self.tokens, self.targets, self.mask, self.seeds
        )
        return Objective((losses + index_losses).sum(), losses, loads)

    def member(
        self, weights: dict[str, Tensor], tokens: Tensor, targets: Tensor, mask: Tensor, seed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, index loss and expert loads of one seed."""
        names = {f"model.{name}": value for name, value in weights.items()}
        result = torch.func.functional_call(self.dense, names, (tokens[:, :-1], self.served), {"seed": seed})
        return mean_loss(result.logits, targets, mask), result.index_loss, result.loads

    @torch.no_grad()
    def clip(self) -> None:
        grads = [row.values.grad for row in self.rows.values() if row.values.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(grad, dim=1) for grad in grads]).norm(dim=0)
        scale = (MAX_NORM / (norms + 1e-6)).clamp(max=1.0).unsqueeze(1)
        for grad in grads:
            grad.mul_(scale)

    @torch.no_grad()
    def balance(self, loads: Tensor) -> None:
        for (name, gate), load in zip(self.gates.items(), loads.unbind(1), strict=True):
            if not gate.hash:
                self.fixed[f"layers.{name}.bias"] += BALANCE * torch.sign(load.mean(1, keepdim=True) - load)

    def tensors(self) -> dict[str, Tensor]:
        rows = {label: row.values.detach() for label, row in self.rows.items()}
        return rows | {f"{FIXED}{name}": value for name, value in self.fixed.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in self.tensors().items():
            value.copy_(tensors[name])

    @torch.no_grad()
    def write_models(self) -> None:
        """Copies the weights into the models."""
        weights = self.weights()
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name][number])
