"""LayerSkip's recipe (arXiv 2404.16710, section 4.1): layer dropout, the early-exit loss and its
curriculum; and the evaluation of every exit.

Begin with ``dropout_rates`` and ``exit_weights``, which are the paper's equations. Layers count
from 0 to L-1, steps from 0 to T-1. Two parameters are not in the paper: ``power``, and the last
layer as a teacher of the exits (``recipe_loss``).
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model.decoder import Decoder
from model.layers import layer_positions
from training.text import Rows

HELD_OUT_BATCHES = 8  # of an evaluation
HELD_OUT_ROWS = 8  # per batch


def dropout_rates(layers: int, p_max: float, growth: float) -> list[float]:
    """Return the probabilities p(l, t) = S(t)·D(l)·p_max that a sample skips layer l (section
    4.1.1, equations 1 and 2).

    D(l) = exp(l·ln 2 / (L-1)) - 1 grows from 0 at the first layer to 1 at the last. ``growth`` is
    S(t): 1 when training continues from a checkpoint, else ``growth_from_scratch``.
    """
    return [growth * (2 ** (layer / max(1, layers - 1)) - 1) * p_max for layer in range(layers)]


def growth_from_scratch(step: int, steps: int) -> float:
    """Return S(t) = exp(t·ln 2 / (T-1)) - 1, which grows from 0 at the first step to 1."""
    return 2 ** (step / max(1, steps - 1)) - 1


def exit_weights(on: np.ndarray, scale: float, power: float) -> list[float]:
    """Return the weights ẽ(t, l) of the losses of all exits (section 4.1.2, equations 4 to 6).

    ``on`` (bool ``[L-1]``) selects the early exits of the step; the last layer's loss is always on.
    e(l) = scale·s(l) below the last layer, s(l) = 0 + 1 + ... + l, and L-1 + scale·s(L-2) at the
    last; ẽ are these divided by their sum.

    A ``power`` below 1, which is not the paper's, flattens the sums to s(l)^power ·
    s(L-2)^(1-power). Without it an exit after a quarter of the layers has a sixteenth of the last
    one's weight, too little for a short run. At 0 all early exits weigh the same: the first too,
    whose sum is 0 (0⁰ = 1), but which weighs nothing at any power above. In a model of two layers
    that is the only early exit, and s(L-2) counts as 1.
    """
    last = len(on)
    layer = np.arange(last)
    sums = layer * (layer + 1) / 2
    largest = max(1, last * (last - 1) / 2)
    early = on * scale * sums**power * largest ** (1 - power)
    weights = np.append(early, max(last, 1) + scale * largest)
    return (weights / weights.sum()).tolist()


def rotational(layers: int, step: int, steps: int, rotation: int) -> np.ndarray:
    """Return whether each early exit's loss is on in a step, bool ``[layers - 1]``: every R-th is,
    with R the ``rotation``, and they shift by one each step.
    """
    return (np.arange(layers - 1) - step) % rotation == 0


def gradual(layers: int, step: int, steps: int, rotation: int) -> np.ndarray:
    """Return whether each early exit's loss is on in a step, bool ``[layers - 1]``: one after
    another is turned on, from the last to the first, all by half of the ``steps``.
    """
    return step >= (layers - np.arange(layers - 1)) * steps / (2 * layers)


CURRICULA = {curriculum.__name__: curriculum for curriculum in (rotational, gradual)}


def layer_outputs(model: Decoder, tokens: Tensor, kept: Tensor | None = None) -> Iterator[Tensor]:
    """Yield the hidden states ``[batch, T, hidden]`` after each layer, for token ids
    ``[batch, T]``.

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
    model: Decoder, tokens: Tensor, kept: Tensor, weights: list[float], taught: float
) -> Tensor:
    """Return the loss J = Σ_l ẽ(t, l)·CE(head(norm(h_{l+1})), next tokens), with the ``weights`` ẽ
    by layer.

    An early exit is trained towards a mixture: the last layer's probabilities with the share
    ``taught``, and the next token with the rest. The model verifies drafts, not the text. The
    paper's share is 0 (else see arXiv 1905.08094).
    """
    states = list(layer_outputs(model, tokens[:, :-1], kept))
    following = tokens[:, 1:].flatten()
    teacher = log_probabilities(model, states[-1])
    total = weights[-1] * F.nll_loss(teacher, following)
    taught_probs = teacher.detach().exp() if taught else None
    for weight, hidden in zip(weights[:-1], states[:-1], strict=True):
        if weight == 0:  # off in this step
            continue
        log_probs = log_probabilities(model, hidden)
        loss = (1 - taught) * F.nll_loss(log_probs, following)
        if taught:
            loss -= taught * (taught_probs * log_probs).sum() / len(following)
        total += weight * loss
    return total


def log_probabilities(model: Decoder, hidden: Tensor) -> Tensor:
    """Return the log-probabilities ``[batch · T, vocab]`` of the next tokens after a layer's output
    ``[batch, T, hidden]``.
    """
    return model.logits(hidden).float().flatten(0, 1).log_softmax(-1)


@torch.no_grad()
def evaluate(model: Decoder, held_out: Rows, autocast: bool) -> dict[str, list[float]]:
    """Return the loss of every exit on held-out text and its greedy agreement with the full model,
    each a list by layer.
    """
    generator = torch.Generator().manual_seed(0)
    sums = np.zeros((2, model.num_layers))  # of losses, and of agreement
    for _ in range(HELD_OUT_BATCHES):
        tokens = held_out.pick(HELD_OUT_ROWS, generator).to(model.device)
        losses = []
        guesses = []
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
            for hidden in layer_outputs(model, tokens[:, :-1]):  # one exit's logits at a time
                logits = model.logits(hidden).float().flatten(0, 1)
                losses.append(F.cross_entropy(logits, tokens[:, 1:].flatten()).item())
                guesses.append(logits.argmax(-1))
        agreement = [(each == guesses[-1]).float().mean().item() for each in guesses]
        sums += np.array([losses, agreement])
    held_out_loss, agreement = (sums / HELD_OUT_BATCHES).round(4).tolist()
    return {"held_out_loss": held_out_loss, "agreement": agreement}
