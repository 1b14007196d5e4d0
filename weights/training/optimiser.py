"""The optimiser of a training run: AdamW, or Muon for the matrices of the blocks and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from model import Decoder

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MOMENTS = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), torch.optim.Muon: ("momentum_buffer",)}


class Optimiser:
    """One step of one optimiser, or of two, each with its own peak learning rate.

    Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers") makes the singular values of a matrix's update
    alike. The deep, narrow models here learn much more from their first tokens with it than with AdamW.
    """

    def __init__(self, model: Decoder, rate: float, muon_rate: float | None) -> None:
        """``muon_rate`` None: AdamW for everything."""
        inner = {id(parameter) for parameter in model.layers.parameters() if parameter.dim() > 1}
        muon = [parameter for parameter in model.parameters() if muon_rate and id(parameter) in inner]
        rest = [parameter for parameter in model.parameters() if not muon_rate or id(parameter) not in inner]
        groups = [
            {"params": [parameter for parameter in rest if parameter.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [parameter for parameter in rest if parameter.dim() <= 1], "weight_decay": 0.0},
        ]
        self.parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)]
        self.peaks = [rate]
        if muon:
            self.parts.append(torch.optim.Muon(muon, lr=muon_rate, weight_decay=WEIGHT_DECAY))
            self.peaks.append(muon_rate)

    def step(self, share: float) -> None:
        """Update the weights at ``share`` of the peak learning rates, and forget the gradients."""
        for part, peak in zip(self.parts, self.peaks, strict=True):
            for group in part.param_groups:
                group["lr"] = peak * share
            part.step()
            part.zero_grad()

    def state(self, model: Decoder) -> Iterator[tuple[str, Tensor]]:
        """What the optimiser remembers of each parameter, by ``moment.parameter``."""
        for name, parameter, part in self._owned(model):
            for moment in MOMENTS[type(part)]:
                yield f"{moment}.{name}", part.state[parameter][moment].contiguous()

    def restore(self, model: Decoder, state: dict[str, Tensor], step: int) -> None:
        """Remember what ``state`` gave after so many steps."""
        for name, parameter, part in self._owned(model):
            moments = {moment: state[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS[type(part)]}
            part.state[parameter] = {"step": torch.tensor(float(step), device=parameter.device), **moments}

    def _owned(self, model: Decoder) -> Iterator[tuple[str, nn.Parameter, torch.optim.Optimizer]]:
        owner = {id(p): part for part in self.parts for group in part.param_groups for p in group["params"]}
        for name, parameter in model.named_parameters():
            yield name, parameter, owner[id(parameter)]
