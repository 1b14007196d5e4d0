"""LayerSkip's recipe (arXiv 2404.16710, section 4.1): layer dropout, the early-exit loss and its
curriculum, and the optimisers, learning rate and evaluation of an ordinary loop.

Begin with ``dropout_rates`` and ``exit_weights``, which are the paper's equations. Two options
are not in the paper: ``exit_power``, and the last layer as a teacher of the exits
(``recipe_loss``).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

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
HELD_OUT_BATCHES = 8
HELD_OUT_ROWS = 8


@dataclass(frozen=True)
class Recipe:
    """Parameters of the recipe for a run of ``steps`` updates.

    ``from_scratch``   whether the weights were random at first
    ``layer_dropout``  p_max, the dropout of the last layer
    ``exit_scale``     e_scale, the weight of the early exits' losses
    ``exit_power``     1 in the paper; below it the first exits weigh more
    ``exit_teaching``  0 in the paper; the share of the exits' loss that the last layer teaches
    ``curriculum``     the exits that are on in a step: a name in ``CURRICULA``
    ``rotation``       R: under "rotational" every R-th exit is on
    """

    steps: int
    from_scratch: bool = True
    layer_dropout: float = 0.1
    exit_scale: float = 1.0
    exit_power: float = 1.0
    exit_teaching: float = 0.0
    curriculum: str = "rotational"
    rotation: int = 8


def dropout_rates(recipe: Recipe, layers: int, step: int) -> list[float]:
    """Probabilities p(l, t) = S(t)·D(l)·p_max that a sample skips layer l (section 4.1.1, equations
    1 and 2).

    D(l) = exp(l·ln 2 / (L-1)) - 1 grows from 0 at the first layer to 1 at the last. S(t) is 1 when
    training continues from a checkpoint; from scratch it grows over the steps likewise, exp(t·ln 2
    / (T-1)) - 1.
    """
    growth = 2 ** (step / max(1, recipe.steps - 1)) - 1 if recipe.from_scratch else 1.0
    return [
        growth * (2 ** (layer / max(1, layers - 1)) - 1) * recipe.layer_dropout
        for layer in range(layers)
    ]


def exit_weights(recipe: Recipe, layers: int, step: int) -> list[float]:
    """Weights ẽ(t, l) of the exits' losses in step t (section 4.1.2, equations 4 to 6).

    e(l) = scale·s(l) below the last layer, s(l) = 0 + 1 + ... + l, and L-1 + scale·s(L-2) at the
    last; ẽ are these divided by their sum. The last layer's loss is always on, an early exit's by
    the curriculum. An exit after a quarter of the layers gets a sixteenth of the last one's weight,
    too little for a short run: an ``exit_power`` below the paper's 1 flattens the sums, s(l)^power
    · s(L-2)^(1-power).
    """
    last = layers - 1
    layer = np.arange(last)
    sums = layer * (layer + 1) / 2
    largest = last * (last - 1) / 2
    early = recipe.exit_scale * sums**recipe.exit_power * largest ** (1 - recipe.exit_power)
    early *= exits_on(recipe, layers, step)
    weights = np.append(early, max(last, 1) + recipe.exit_scale * largest)
    return (weights / weights.sum()).tolist()


def exits_on(recipe: Recipe, layers: int, step: int) -> np.ndarray:
    """Whether each early exit's loss is on in a step: bool ``[layers - 1]``.

    Curriculum ``rotational`` turns on every R-th exit, shifted by one each step; ``gradual`` turns
    on one exit after another from the last to the first, all by half of the steps; ``none`` leaves
    them off.
    """
    layer = np.arange(layers - 1)
    if recipe.curriculum == "rotational":
        return (layer - step) % recipe.rotation == 0
    if recipe.curriculum == "gradual":
        return step >= (layers - layer) * recipe.steps / (2 * layers)
    return np.zeros(layers - 1, dtype=bool)


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
    outputs = enumerate(layer_outputs(model, tokens[:, :-1], kept))
    *early, last = [hidden for layer, hidden in outputs if weights[layer]]
    *early_weights, last_weight = filter(None, weights)
    following = tokens[:, 1:].flatten()
    teacher = log_probabilities(model, last)
    total = last_weight * F.nll_loss(teacher, following)
    for weight, hidden in zip(early_weights, early, strict=True):
        log_probs = log_probabilities(model, hidden)
        loss = (1 - taught) * F.nll_loss(log_probs, following)
        if taught:
            lesson = teacher.detach().exp()
            loss -= taught * (lesson * log_probs).sum() / len(following)
        total += weight * loss
    return total


def log_probabilities(model: Decoder, hidden: Tensor) -> Tensor:
    """Log-probabilities ``[batch · T, vocab]`` of the next tokens after a layer's output ``[batch,
    T, hidden]``.
    """
    return model.logits(hidden).float().flatten(0, 1).log_softmax(-1)


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


@torch.no_grad()
def evaluate(model: Decoder, held_out: Rows, autocast: bool) -> dict[str, list[float]]:
    """Held-out loss of every exit and its greedy agreement with the full model, each a list by
    layer.
    """
    generator = torch.Generator().manual_seed(0)
    sums = np.zeros((2, model.num_layers))
    for _ in range(HELD_OUT_BATCHES):
        tokens = held_out.pick(HELD_OUT_ROWS, generator).to(model.device)
        losses = []
        guesses = []
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
            for hidden in layer_outputs(model, tokens[:, :-1]):  # one exit's logits at a time
                logits = model.logits(hidden).float().flatten(0, 1)
                losses.append(F.cross_entropy(logits, tokens[:, 1:].flatten()).item())
                guesses.append(logits.argmax(-1))
        sums += losses, [(guess == guesses[-1]).float().mean().item() for guess in guesses]
    held_out_loss, agreement = (sums / HELD_OUT_BATCHES).round(4).tolist()
    return {"held_out_loss": held_out_loss, "agreement": agreement}
