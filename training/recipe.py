"""LayerSkip's recipe (arXiv 2404.16710, section 4.1): layer dropout, the early-exit loss and its
curriculum, and what an ordinary loop needs beside them.

Begin with ``dropout_rates`` and ``exit_weights``, which are the paper's equations. One option is
not in the paper: the last layer can teach the exits (``recipe_loss``).
"""

import argparse
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import Decoder
from model.layers import layer_positions
from training.text import Rows

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CURRICULA = ("rotational", "gradual", "none")
LAST_RATE = 0.1  # share of the peak learning rate at the end
HELD_OUT_BATCHES, HELD_OUT_ROWS = 8, 8


def dropout_rates(options: argparse.Namespace, layers: int, step: int) -> list[float]:
    """Probabilities p(l, t) = S(t)·D(l)·p_max that a sample skips layer l (section 4.1.1, equations
    1 and 2).

    D(l) = exp(l·ln 2 / (L-1)) - 1 grows from 0 at the first layer to 1 at the last. S(t) is 1 when
    training continues from a checkpoint; from scratch it grows over the steps likewise, exp(t·ln 2
    / (T-1)) - 1.
    """
    growth = 1.0 if options.start_from else 2 ** (step / max(1, options.steps - 1)) - 1
    return [
        growth * (2 ** (layer / max(1, layers - 1)) - 1) * options.layer_dropout
        for layer in range(layers)
    ]


def exit_weights(options: argparse.Namespace, layers: int, step: int) -> list[float]:
    """Weights ẽ(t, l) of the exits' losses in step t (section 4.1.2, equations 4 to 6).

    e(l) = scale·s(l) below the last layer, s(l) = 0 + 1 + ... + l, and L-1 + scale·s(L-2) at the
    last; ẽ are these divided by their sum. Curriculum ``rotational`` turns on every R-th exit,
    shifted by one each step; ``gradual`` turns on one exit after another from the last to the
    first, all by half of the steps; ``none`` leaves them off. The last layer's loss is always on.
    An exit after a quarter of the layers gets a sixteenth of the last one's weight, too little for
    a short run: a ``power`` below the paper's 1 flattens the sums, s(l)^power · s(L-2)^(1-power).
    """
    layer, last, power = np.arange(layers - 1), layers - 1, options.exit_power
    largest = last * (last - 1) / 2
    rotational = (layer - step) % options.rotation == 0
    gradual = step >= (layers - layer) * options.steps / (2 * layers)
    on = dict(zip(CURRICULA, (rotational, gradual, 0), strict=True))[options.curriculum]
    early = on * options.exit_scale * (layer * (layer + 1) / 2) ** power * largest ** (1 - power)
    weights = np.append(early, max(last, 1) + options.exit_scale * largest)
    return (weights / weights.sum()).tolist()


def layer_outputs(model: Decoder, tokens: Tensor, kept: Tensor | None = None) -> Iterator[Tensor]:
    """Hidden states ``[batch, T, hidden]`` after each layer, for token ids ``[batch, T]``.

    ``kept`` (bool ``[layers, batch]``) selects the samples of each layer. The others skip the
    layer, without rescaling: it is computed for them in vain, which costs little at the usual
    rates.
    """
    x = model.embed(tokens)
    positions = layer_positions(model.config, 0, tokens.shape[1], x)
    for layer, block in enumerate(model.layers):
        passed = block(x, positions[layer], None, attention=True, mlp=True)
        x = passed if kept is None else torch.where(kept[layer, :, None, None], passed, x)
        yield x


def recipe_loss(
    model: Decoder, tokens: Tensor, kept: Tensor | None, weights: list[float], taught: float = 0.0
) -> Tensor:
    """Loss J = Σ_l ẽ(t, l)·CE(head(norm(h_{l+1})), next tokens).

    An early exit is trained towards a mixture: the last layer's probabilities with the share
    ``taught``, and the next token with the rest. The model verifies drafts, not the text. The
    paper's share is 0 (else see arXiv 1905.08094).
    """
    hidden = {
        layer: h
        for layer, h in enumerate(layer_outputs(model, tokens[:, :-1], kept))
        if weights[layer]
    }
    following, total, lesson = tokens[:, 1:].flatten(), torch.zeros((), device=tokens.device), None
    for layer in sorted(hidden, reverse=True):  # the last layer first: it teaches the others
        log_probs = torch.log_softmax(model.logits(hidden[layer]).float(), -1).flatten(0, 1)
        if lesson is None:
            loss = F.nll_loss(log_probs, following)
        else:
            loss = -torch.dot(lesson.flatten(), log_probs.flatten()) / len(following)
        total = total + weights[layer] * loss
        if taught and lesson is None:
            share = torch.full_like(following, 1 - taught, dtype=log_probs.dtype)[:, None]
            lesson = (taught * log_probs.detach().exp()).scatter_add_(1, following[:, None], share)
    return total


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
    decay = {True: WEIGHT_DECAY, False: 0.0}  # of matrices, of vectors
    groups = [
        {"params": [p for p in rest if (p.dim() > 1) == key], "weight_decay": decay[key]}
        for key in decay
    ]
    adamw = torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)
    return (
        [adamw, torch.optim.Muon(list(muon), lr=muon_rate, weight_decay=WEIGHT_DECAY)]
        if muon
        else [adamw]
    )


def backward(
    model: Decoder, rows: Rows, options: argparse.Namespace, step: int, micro_batches: Sequence[int]
) -> Tensor:
    """Mean loss of these micro-batches of a step, whose gradients are added to the parameters'
    gradients.
    """
    layers, mean = model.num_layers, torch.zeros((), device=model.device)
    rates, weights = dropout_rates(options, layers, step), exit_weights(options, layers, step)
    for micro in micro_batches:
        seed = np.random.SeedSequence((options.seed, step, micro)).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed))
        tokens = rows.pick(options.batch, generator).to(model.device, non_blocking=True)
        kept = (
            torch.rand(layers, options.batch, generator=generator) >= torch.tensor(rates)[:, None]
        ).to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=options.autocast):
            loss = recipe_loss(model, tokens, kept, weights, options.exit_teaching) / len(
                micro_batches
            )
        loss.backward()
        mean += loss.detach()
    return mean


@torch.no_grad()
def evaluate(model: Decoder, held_out: Rows, autocast: bool) -> dict[str, list[float]]:
    """Held-out loss of every exit and its greedy agreement with the full model, each a list by
    layer.
    """
    generator, sums = (
        torch.Generator().manual_seed(0),
        torch.zeros(2, model.num_layers, dtype=torch.float64),
    )
    for _ in range(HELD_OUT_BATCHES):
        tokens = held_out.pick(HELD_OUT_ROWS, generator).to(model.device)
        losses, guesses = [], []
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
            for hidden in layer_outputs(model, tokens[:, :-1]):  # one exit's logits at a time
                logits = model.logits(hidden).float().flatten(0, 1)
                losses.append(F.cross_entropy(logits, tokens[:, 1:].flatten()))
                guesses.append(logits.argmax(-1))
        sums += torch.tensor([losses, [(guess == guesses[-1]).float().mean() for guess in guesses]])
    return dict(
        zip(
            ("held_out_loss", "agreement"),
            (sums / HELD_OUT_BATCHES).numpy().round(4).tolist(),
            strict=True,
        )
    )
