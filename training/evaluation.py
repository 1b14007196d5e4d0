"""Evaluation of every exit of a model on held-out text."""

import numpy as np
import torch
import torch.nn.functional as F

from model import Decoder
from training.recipe import layer_outputs
from training.text import Rows

HELD_OUT_BATCHES = 8
HELD_OUT_ROWS = 8


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
