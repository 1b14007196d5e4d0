"""LayerSkip training (arXiv 2404.16710, section 4.1) of a model whose early layers can draft.

The recipe's equations are in ``training/recipe.py``; ``train`` is an ordinary training loop. Every
random choice of a step follows from (seed, step, micro-batch) alone, so a killed run continues to
the same weights. The files of a run are read and written by ``training/run.py``.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.common.command_line import start

    start()

import argparse
import math
import sys
from time import monotonic

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from app.common.command_line import say
from app.common.device import keep_freed_memory, pick_device
from app.common.parsers import script
from model.decoder import Decoder
from model.errors import InputError
from training.recipe import (
    CURRICULA,
    dropout_rates,
    evaluate,
    exit_weights,
    growth_from_scratch,
    recipe_loss,
)
from training.run import OPTIONS, load_run, prepare_run, save_run
from training.text import Rows

WEIGHT_DECAY = 0.1
LARGEST_NORM = 1.0  # of a step's gradient, to which a larger one is scaled down
BETAS = (0.9, 0.95)  # of AdamW's running means of gradients, and of their squares
LAST_RATE = 0.1  # share of the peak learning rate at the end
FIRST_SAVE = 30.0  # seconds after the start; later ones after twice the time of the one before
BETWEEN_NOTES = 10.0  # seconds


def train(options: argparse.Namespace) -> None:
    """Train a model, evaluate it and save it.

    Raises InputError for wrong input and for a non-finite loss.
    """
    say(f"reading {', '.join(map(str, options.data))}")
    keep_freed_memory()
    model, rows, held_out, checkpoint = prepare_run(options)
    model.to(pick_device(options.device)).train().requires_grad_()
    optimisers = optimisers_of(model, options.learning_rate, options.muon_rate)
    run = load_run(options, model, optimisers, (rows, held_out), checkpoint)
    if run.step == options.steps:  # it may have been killed before it wrote the model
        save_run(options.out, model, optimisers, run, checkpoint)
    began = monotonic()
    next_save = FIRST_SAVE  # seconds after ``began``; so is ``next_note``
    next_note = 0.0
    for step in range(run.step, options.steps):
        done = step + 1
        loss = backward(model, rows, options, step)
        norm = clip_grad_norm_(model.parameters(), max_norm=LARGEST_NORM).item()
        if not math.isfinite(loss + norm):
            raise InputError(
                f"the loss or its gradient is non-finite in step {done}: the last saved"
                " state is kept; start again with a lower --learning-rate and another --out"
            )
        rate = learning_rate(step, options.steps, options.warm_up)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = optimiser.defaults["lr"] * rate
            optimiser.step()
            optimiser.zero_grad()
        run.step = done
        run.records.append({"step": done, "loss": loss, "norm": norm, "rate": rate})
        is_milestone = done == options.steps or done % options.save_every == 0
        if is_milestone:
            judgement = evaluate(model, held_out, options.autocast)
            run.records.append({"step": done, **judgement})
            say(f"agreement of each exit with the last layer: {judgement['agreement']}")
        seconds = monotonic() - began
        if is_milestone or seconds > next_save:
            save_run(options.out, model, optimisers, run, checkpoint)
            next_save = 2 * seconds
        if is_milestone or seconds > next_note:
            say(f"step {done} of {options.steps}: loss {loss:.3f}")
            next_note = seconds + BETWEEN_NOTES
    say(f"all {options.steps} steps are done: the model is in {options.out}")


def learning_rate(step: int, steps: int, warm_up: int) -> float:
    """Return the rate of a step as a share of its peak: a line up to 1 in the steps of ``warm_up``,
    then a cosine down to ``LAST_RATE`` at the end of all ``steps``.
    """
    share_of_fall = max(0, step - warm_up) / max(1, steps - warm_up)
    cosine = LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * share_of_fall))
    return cosine * min(1.0, (step + 1) / max(1, warm_up))


def optimisers_of(model: Decoder, rate: float, muon_rate: float) -> list[torch.optim.Optimizer]:
    """Return AdamW; above a ``muon_rate`` of 0, AdamW and Muon, which has the matrices of the
    blocks.

    Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers") makes the singular values of a
    matrix's update alike. The deep, narrow models here learn much more from their first tokens with
    it than with AdamW.
    """
    muon = dict.fromkeys(  # "in" on a list would compare values
        parameter for parameter in model.layers.parameters() if muon_rate and parameter.dim() > 1
    )
    rest = [parameter for parameter in model.parameters() if parameter not in muon]
    groups = [
        {"params": [each for each in rest if each.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in rest if each.dim() <= 1], "weight_decay": 0.0},
    ]
    optimisers = [torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)]
    if muon:
        optimisers.append(torch.optim.Muon([*muon], lr=muon_rate, weight_decay=WEIGHT_DECAY))
    return optimisers


def backward(model: Decoder, rows: Rows, options: argparse.Namespace, step: int) -> float:
    """Return the mean loss of a step's micro-batches, and leave its gradient in the parameters."""
    growth = 1.0 if options.start_from else growth_from_scratch(step, options.steps)
    # [layers, 1]
    rates = torch.tensor(dropout_rates(model.num_layers, options.layer_dropout, growth))[:, None]
    on = CURRICULA[options.curriculum](model.num_layers, step, options.steps, options.rotation)
    weights = exit_weights(on, options.exit_scale, options.exit_power)
    mean = torch.zeros((), device=model.device)
    for micro in range(options.accumulate):
        seed = np.random.SeedSequence((options.seed, step, micro)).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed))
        # tokens: [batch, context + 1] int64, kept: [layers, batch] bool
        tokens = rows.pick(options.batch, generator).to(model.device, non_blocking=True)
        kept = torch.rand(len(rates), options.batch, generator=generator) >= rates
        with torch.autocast(model.device.type, torch.bfloat16, enabled=options.autocast):
            loss = recipe_loss(model, tokens, kept.to(model.device), weights, options.exit_teaching)
        (loss / options.accumulate).backward()
        mean += loss.detach() / options.accumulate
    return mean.item()


main = script(
    train,
    OPTIONS,
    "train.py",
    __doc__,
    "stopped: the same command continues from the last saved state in its --out folder",
)


if __name__ == "__main__":
    sys.exit(main())
