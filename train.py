"""Train a Llama or Gemma-2 whose early layers can draft: the LayerSkip recipe (arXiv 2404.16710, section 4.1).

Two ideas, ``dropout_rates`` and ``exit_weights`` below, on top of an ordinary training loop, and one that the paper
does not have: in ``recipe_loss`` the last layer may teach the exits. Every random choice of a step follows from
(seed, step, micro-batch) alone, so a run that was killed continues as if it had not been, and several processes
(``torchrun``) share a batch exactly as accumulation on one would.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import Decoder, InputError
from model.layers import place
from weights.cli.command_line import run_command
from weights.cli.device import keep_freed_memory, pick_device
from weights.training.corpus import Rows
from weights.training.optimiser import Optimiser
from weights.training.options import check_options, parser, settings_of
from weights.training.prepare import prepare, take_back, tokenizer_source
from weights.training.processes import Group, end
from weights.training.report import LOG, PICTURE, Bar, append_log, plot_losses, trim_log
from weights.training.state import restore_run, save_run

MAX_NORM = 1.0
LAST_RATE = 0.1  # of the peak learning rate, where the cosine ends
HELD_OUT_ROWS = 64


def dropout_rates(num_layers: int, step: int, steps: int, largest: float, from_scratch: bool) -> list[float]:
    """p(l, t) = S(t)·D(l)·p_max: the chance that a sample skips layer l (section 4.1.1, equations 1 and 2).

    D(l) = exp(l·ln 2 / (L-1)) - 1 grows from 0 at the first layer to 1 at the last. S(t) is 1 when training
    continues from a checkpoint; from scratch it grows over the run likewise, exp(t·ln 2 / (T-1)) - 1.
    """
    grown = 2 ** (step / max(1, steps - 1)) - 1 if from_scratch else 1.0
    return [grown * (2 ** (layer / max(1, num_layers - 1)) - 1) * largest for layer in range(num_layers)]


def exit_weights(
    num_layers: int, step: int, steps: int, *, scale: float, power: float, curriculum: str, rotation: int
) -> list[float]:
    """ẽ(t, l): the share of leaving after layer l in the loss of step t (section 4.1.2, equations 4 to 6).

    e(l) = scale·s(l) below the last layer, s(l) = 0 + 1 + ... + l, and L-1 + scale·s(L-2) at the last; ẽ are these
    made to sum to 1. ``rotational`` turns every R-th exit on, shifted by one each step; ``gradual`` one after
    another from the last to the first, all by half of the run; ``none`` leaves them off. The last layer's loss is
    always on. The paper's sums leave an exit after a quarter of the layers a sixteenth of the last one's
    weight, too little for a short run: a ``power`` below 1 (the paper's) flattens them, s(l)^power · s(L-2)^(1-power).
    """
    last = num_layers - 1
    largest = last * (last - 1) / 2
    weights = []
    for layer in range(last):
        on = {
            "none": False,
            "rotational": (layer - step) % rotation == 0,
            "gradual": step >= (num_layers - layer) * steps / (2 * num_layers),
        }[curriculum]
        weights.append(on * scale * (layer * (layer + 1) / 2) ** power * largest ** (1 - power))
    weights.append(last + scale * largest)
    total = sum(weights)
    return [weight / total for weight in weights] if total else [1.0]


def layer_outputs(model: Decoder, tokens: Tensor, kept: Tensor | None = None) -> Iterator[Tensor]:
    """The hidden states after each layer, ``[batch, T, hidden]``, for ``[batch, T]`` ids.

    ``kept`` bool ``[layers, batch]``: samples that pass a layer; the others skip it whole, without rescaling.
    """
    x = model.embed(tokens)
    positions = place(model.config, 0, tokens.shape[1], x)
    for layer, block in enumerate(model.layers):
        rows = None if kept is None or kept[layer].all() else kept[layer].nonzero()[:, 0]
        if rows is None:
            x = block(x, positions, None, attention=True, mlp=True)
        elif len(rows):
            rows = rows.to(x.device, non_blocking=True)
            passed = block(x[rows], positions, None, attention=True, mlp=True)
            x = x.index_copy(0, rows, passed.to(x.dtype))
        yield x


def recipe_loss(
    model: Decoder, tokens: Tensor, kept: Tensor | None, weights: list[float], taught: float = 0.0
) -> tuple[Tensor, Tensor]:
    """J = Σ_l ẽ(t, l)·CE(head(norm(h_{l+1})), next tokens), and each exit's loss ``[layers]`` (NaN: weight 0).

    The target of an early exit is the token that follows, and to the share ``taught`` what the last layer makes of
    it, its probabilities: drafts are judged by the model, not by the text. 0 is the paper's (for self-distillation
    see arXiv 1905.08094).
    """
    hidden = {layer: h for layer, h in enumerate(layer_outputs(model, tokens[:, :-1], kept)) if weights[layer]}
    following, last = tokens[:, 1:].flatten(), len(weights) - 1
    total = torch.zeros((), device=tokens.device)
    losses = torch.full((len(weights),), math.nan, device=tokens.device)
    for layer in sorted(hidden, reverse=True):  # the last layer first: it teaches the others
        log_probs = torch.log_softmax(model.logits(hidden[layer]).float(), -1).flatten(0, 1)
        loss = F.nll_loss(log_probs, following)
        losses[layer] = loss.detach()
        if taught and layer == last:
            share = torch.full_like(following, 1 - taught, dtype=log_probs.dtype)[:, None]
            lesson = (taught * log_probs.detach().exp()).scatter_add_(1, following[:, None], share)
        elif taught:
            loss = -torch.dot(lesson.flatten(), log_probs.flatten()) / len(following)
        total = total + weights[layer] * loss
    return total, losses


def learning_rate(step: int, steps: int, warm_up: int) -> float:
    """The share of the peak: linear warm-up to it, then a cosine down to a tenth."""
    if step < warm_up:
        return (step + 1) / warm_up
    turned = (step - warm_up) / max(1, steps - warm_up)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * turned))


def generator_of(*numbers: int) -> torch.Generator:
    """A stream of random numbers that these numbers name."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))


class Trainer:
    """The model, its optimiser, the text, and the step they have come to."""

    def __init__(self, options: argparse.Namespace, group: Group) -> None:
        self.options, self.group = options, group
        self.device = group.place(pick_device(options.device))
        tokens, self.model = prepare(options, group)
        self.model.to(self.device).train().requires_grad_()
        self.optimiser = Optimiser(self.model, options.learning_rate, options.muon_rate)
        width = options.context + 1
        self.train, self.held_out = (Rows(ids, tokens.end, width) for ids in (tokens.train, tokens.held_out))
        self.settings = settings_of(options, group.size, self.model.config, tokens.fingerprint)
        self.step = restore_run(options.out, self.model, self.optimiser, self.settings)

    def take_step(self) -> dict[str, Any]:
        """One update of the weights, over batch × accumulate × processes rows. Raises InputError for a NaN loss."""
        options, layers = self.options, self.model.num_layers
        rates = dropout_rates(layers, self.step, options.steps, options.layer_dropout, options.start_from is None)
        shape = {"scale": options.exit_scale, "power": options.exit_power, "rotation": options.rotation}
        weights = exit_weights(layers, self.step, options.steps, curriculum=options.curriculum, **shape)
        # Of every exit's loss, and of the whole: read off the device once a step.
        sums = torch.zeros(layers + 1, dtype=torch.float64, device=self.device)
        for micro in range(self.group.rank, options.accumulate * self.group.size, self.group.size):
            generator = generator_of(options.seed, self.step, micro)
            rows = self.train.pick(options.batch, generator).to(self.device, non_blocking=True)
            kept = torch.rand(layers, options.batch, generator=generator) >= torch.tensor(rates)[:, None]
            with torch.autocast(self.device.type, torch.bfloat16, enabled=options.autocast):
                loss, losses = recipe_loss(self.model, rows, kept, weights, options.exit_teaching)
            (loss / options.accumulate).backward()
            sums += torch.cat((losses, loss.detach()[None])).double() / options.accumulate
        for parameter in self.model.parameters():  # a layer that every row skipped has no gradient yet
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = [parameter.grad for parameter in self.model.parameters()]
        *exits, total = self.group.average(gradients, sums.tolist())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM).item()
        if not math.isfinite(total) or not math.isfinite(norm):
            raise InputError(
                f"the loss or its gradient is no number in step {self.step + 1}: what was saved before is kept; "
                "start again with a lower --learning-rate and another --out"
            )
        share = learning_rate(self.step, options.steps, options.warm_up)
        self.optimiser.step(share)
        self.step += 1
        spoke = {str(layer + 1): round(value, 4) for layer, value in enumerate(exits) if not math.isnan(value)}
        return {"step": self.step, "loss": total, "exit_losses": spoke, "norm": norm, "learning_rate": share}

    @torch.no_grad()
    def judge(self) -> dict[str, Any]:
        """Held-out loss of every exit, and how often its greedy token is the full model's (both by layer, 1 to L)."""
        generator = torch.Generator().manual_seed(0)
        losses, agreement, parts = 0.0, 0.0, HELD_OUT_ROWS // 8
        for _ in range(parts):
            rows = self.held_out.pick(8, generator).to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.autocast):
                means, guesses = [], []
                for hidden in layer_outputs(self.model, rows[:, :-1]):  # one exit's logits at a time
                    logits = self.model.logits(hidden).float().flatten(0, 1)
                    means.append(F.cross_entropy(logits, rows[:, 1:].flatten()))
                    guesses.append(logits.argmax(-1))
            shares = [(guess == guesses[-1]).float().mean() for guess in guesses]
            read = torch.stack((torch.stack(means), torch.stack(shares))).tolist()
            losses, agreement = losses + np.array(read[0]), agreement + np.array(read[1])
        return {
            "step": self.step,
            "held_out_loss": np.round(losses / parts, 4).tolist(),
            "agreement": np.round(agreement / parts, 4).tolist(),
        }


def run(options: argparse.Namespace, group: Group) -> None:
    """Train to the last step, logging every step and judging and saving as often as asked."""
    with take_back(options.out, group) as keep:
        trainer, log, source = Trainer(options, group), options.out / LOG, tokenizer_source(options)
        if group.leads:
            trim_log(log, trainer.step)
        with Bar(options, group, trainer.step) as bar:
            while trainer.step < options.steps:
                record = trainer.take_step()
                keep()
                bar.show(record)
                if not group.leads:
                    continue
                append_log(log, record)
                last = trainer.step == options.steps
                if last or trainer.step % options.evaluate_every == 0:
                    append_log(log, trainer.judge())
                if last or trainer.step % options.save_every == 0:
                    save_run(options.out, trainer.model, trainer.optimiser, trainer.settings, trainer.step, source)
    if group.leads:
        bar.print_speed(trainer.model, trainer.device)
        plot_losses(log, options.out / PICTURE)


def train(options: argparse.Namespace) -> None:
    """Everything after the arguments are parsed."""
    check_options(options)
    keep_freed_memory()
    group = Group.join(options.device)
    try:
        run(options, group)
    except torch.OutOfMemoryError:
        raise InputError("out of memory: lower --batch and raise --accumulate") from None


def main(arguments: list[str] | None = None) -> int:
    stopped = "stopped: the same command continues from what was last saved in its --out folder"
    return run_command(lambda: train(parser().parse_args(arguments)), stopped)


if __name__ == "__main__":
    end(main())
