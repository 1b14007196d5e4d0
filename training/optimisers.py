"""Optimisers and learning rate of an ordinary training loop."""

import math

import torch

from model import Decoder

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
LAST_RATE = 0.1  # share of the peak learning rate at the end


def learning_rate(step: int, steps: int, warm_up: int) -> float:
    """Share of the peak learning rate: linear warm-up to 1, then a cosine down to a tenth."""
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def optimisers_of(model: Decoder, rate: float, muon_rate: float) -> list[torch.optim.Optimizer]:
    """AdamW; above a ``muon_rate`` of 0, Muon for the matrices of the blocks and AdamW for the
    other parameters.

    Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers") makes the singular values of a
    matrix's update alike. The deep, narrow models here learn much more from their first tokens with
    it than with AdamW.
    """
    muon = dict.fromkeys(
        parameter for parameter in model.layers.parameters() if muon_rate and parameter.dim() > 1
    )
    rest = [parameter for parameter in model.parameters() if parameter not in muon]
    groups = [
        {"params": [each for each in rest if each.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in rest if each.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)
    if not muon:
        return [adamw]
    return [adamw, torch.optim.Muon(list(muon), lr=muon_rate, weight_decay=WEIGHT_DECAY)]
