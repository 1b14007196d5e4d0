"""LayerSkip's recipe (arXiv 2404.16710, section 4.1): layer dropout, the early-exit loss and its
curriculum.

Begin with ``dropout_rates`` and ``exit_weights``, which are the paper's equations. Two options
are not in the paper: ``exit_power``, and the last layer as a teacher of the exits
(``recipe_loss``).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import Decoder
from model.layers import layer_positions

CURRICULA = ("rotational", "gradual", "none")


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
    """Loss J = Σ_l ẽ(t, l)·CE(head(norm(h_{l+1})), next tokens), with the ``weights`` ẽ by layer.

    An early exit is trained towards a mixture: the last layer's probabilities with the share
    ``taught``, and the next token with the rest. The model verifies drafts, not the text. The
    paper's share is 0 (else see arXiv 1905.08094).
    """
    states = list(layer_outputs(model, tokens[:, :-1], kept))
    following = tokens[:, 1:].flatten()
    teacher = log_probabilities(model, states[-1])
    total = weights[-1] * F.nll_loss(teacher, following)
    for weight, hidden in zip(weights[:-1], states[:-1], strict=True):
        if weight == 0:  # off in this step
            continue
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
