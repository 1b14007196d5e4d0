"""Train a Llama or Gemma-2 whose early layers can speak: the LayerSkip recipe (arXiv 2404.16710, section 4.1).

Two ideas, ``dropout_rates`` and ``exit_weights`` below, on top of an ordinary training loop, and one that the paper
does not have: in ``recipe_loss`` the last layer may teach the exits. Every random choice of a step follows from
(seed, step, micro-batch) alone, so a run that was killed goes on as if it had not been, and several processes
(``torchrun``) share a batch exactly as accumulation on one would.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from model import Decoder, InputError, ModelConfig, build, parse_config
from model.layers import place
from weights.command_line import OneLineParser
from weights.device import keep_freed_memory, matmul_rate, pick_device
from weights.files import read_json
from weights.load import load_model
from weights.names import model_folder
from weights.save import copy_tokenizer, save_model
from weights.tokenizer import Tokenizer
from weights.training.corpus import Tokens, pick_rows, read_documents, tokenized, train_tokenizer
from weights.training.files import check_folder, plot_losses, read_state, save_state, trim_log
from weights.training.processes import Group

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0
LAST_RATE = 0.1  # of the peak learning rate, where the cosine ends
HELD_OUT_ROWS = 64
# Options that do not make a run another one: files by their names (their contents count), and those without effect.
FILES = ("out", "data", "config", "tokenizer")
WITHOUT_EFFECT = ("device", "evaluate_every", "save_every", "vocab_size", "accumulate")


def dropout_rates(num_layers: int, step: int, steps: int, largest: float, from_scratch: bool) -> list[float]:
    """p(l, t) = S(t)·D(l)·p_max: the chance that a sample skips layer l (section 4.1.1, equations 1 and 2).

    D(l) = exp(l·ln 2 / (L-1)) - 1 grows from 0 at the first layer to 1 at the last. S(t) is 1 when training
    goes on from a checkpoint; from scratch it grows over the run likewise, exp(t·ln 2 / (T-1)) - 1.
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
        rows = None if kept is None or kept[layer].all() else kept[layer].nonzero()[:, 0].to(x.device)
        if rows is None:
            x = block(x, positions, None, attention=True, mlp=True)
        elif len(rows):
            passed = block(x[rows], positions, None, attention=True, mlp=True)
            x = x.index_copy(0, rows, passed.to(x.dtype))
        yield x


def recipe_loss(
    model: Decoder, tokens: Tensor, kept: Tensor | None, weights: list[float], taught: float = 0.0
) -> tuple[Tensor, list[float]]:
    """J = Σ_l ẽ(t, l)·CE(head(norm(h_{l+1})), next tokens), and each exit's loss (NaN where its weight is 0).

    The target of an early exit is the token that follows, and to the share ``taught`` what the last layer makes of
    it, its probabilities: drafts are judged by the model, not by the text. 0 is the paper's (for self-distillation
    see arXiv 1905.08094).
    """
    hidden = {layer: h for layer, h in enumerate(layer_outputs(model, tokens[:, :-1], kept)) if weights[layer]}
    following, last = tokens[:, 1:].flatten(), len(weights) - 1
    total = torch.zeros((), device=tokens.device)
    losses, teacher = [math.nan] * len(weights), None
    for layer in sorted(hidden, reverse=True):  # the last layer first: it teaches the others
        log_probs = torch.log_softmax(model.logits(hidden[layer]).float(), -1).flatten(0, 1)
        loss = F.nll_loss(log_probs, following)
        losses[layer] = loss.item()
        if taught and layer == last:
            teacher = log_probs.detach().exp()
        elif taught:
            loss = (1 - taught) * loss - taught * (teacher * log_probs).sum(-1).mean()
        total = total + weights[layer] * loss
    return total, losses


def learning_rate(step: int, steps: int, warm_up: int, peak: float) -> float:
    """Linear warm-up to the peak, then a cosine down to a tenth of it."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    turned = (step - warm_up) / max(1, steps - warm_up)
    return peak * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * turned)))


def generator_of(*numbers: int) -> torch.Generator:
    """A stream of random numbers that these numbers name."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))


class Trainer:
    """The model, its optimiser, the text, and the step they have come to."""

    def __init__(self, options: argparse.Namespace, group: Group) -> None:
        self.options, self.group, self.step = options, group, 0
        self.state_file = options.out / "training" / "state.safetensors"
        self.device = group.place(pick_device(options.device))
        self.tokens, config = prepare(options, group)
        if options.start_from is None:
            self.model = build(config)
            self.model.initialise(
                std=0.5 * config.hidden_size**-0.5, generator=torch.Generator().manual_seed(options.seed)
            )
        else:
            self.model = load_model(model_folder(options.start_from), torch.float32)
        self.model.to(self.device).train().requires_grad_()
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=options.learning_rate, betas=BETAS, fused=True)
        state = read_state(self.state_file, self.settings())
        if state is not None:
            state.restore(self.model, self.optimiser)
            self.step = state.step

    def take_step(self) -> dict[str, Any]:
        """One update of the weights, over batch × accumulate × processes rows. Raises InputError for a NaN loss."""
        options, layers = self.options, self.model.num_layers
        rates = dropout_rates(layers, self.step, options.steps, options.layer_dropout, options.start_from is None)
        weights = exit_weights(
            layers,
            self.step,
            options.steps,
            scale=options.exit_scale,
            power=options.exit_power,
            curriculum=options.curriculum,
            rotation=options.rotation,
        )
        sums = np.zeros(layers + 1)  # of every exit's loss, and of the whole
        for micro in range(self.group.rank, options.accumulate * self.group.size, self.group.size):
            generator = generator_of(options.seed, self.step, micro)
            rows = pick_rows(self.tokens.train, options.batch, options.context + 1, generator).to(self.device)
            kept = torch.rand(layers, options.batch, generator=generator) >= torch.tensor(rates)[:, None]
            with torch.autocast(self.device.type, torch.bfloat16, enabled=options.autocast):
                loss, losses = recipe_loss(self.model, rows, kept, weights, options.exit_teaching)
            (loss / options.accumulate).backward()
            sums += np.array([*losses, loss.item()]) / options.accumulate
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
        rate = learning_rate(self.step, options.steps, options.warm_up, options.learning_rate)
        for part in self.optimiser.param_groups:
            part["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1
        spoke = {str(layer + 1): round(value, 4) for layer, value in enumerate(exits) if not math.isnan(value)}
        return {"step": self.step, "loss": total, "exit_losses": spoke, "norm": norm, "learning_rate": rate}

    @torch.no_grad()
    def judge(self) -> dict[str, Any]:
        """Held-out loss of every exit, and how often its greedy token is the full model's (both by layer, 1 to L)."""
        generator = torch.Generator().manual_seed(0)
        losses, agreement, parts = 0.0, 0.0, HELD_OUT_ROWS // 8
        for _ in range(parts):
            rows = pick_rows(self.tokens.held_out, 8, self.options.context + 1, generator).to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.autocast):
                means, guesses = [], []
                for hidden in layer_outputs(self.model, rows[:, :-1]):  # one exit's logits at a time
                    logits = self.model.logits(hidden).float().flatten(0, 1)
                    means.append(F.cross_entropy(logits, rows[:, 1:].flatten()).item())
                    guesses.append(logits.argmax(-1))
            losses += np.array(means)
            agreement += np.array([(guess == guesses[-1]).float().mean().item() for guess in guesses])
        return {
            "step": self.step,
            "held_out_loss": np.round(losses / parts, 4).tolist(),
            "agreement": np.round(agreement / parts, 4).tolist(),
        }

    def save(self) -> None:
        """Write the state to go on from, and the model as an ordinary bf16 folder. Each file is replaced as a whole."""
        published = build(self.model.config).to(torch.bfloat16)
        published.load_state_dict(self.model.state_dict())
        save_model(published, self.options.out, tokenizer_from=tokenizer_source(self.options) or self.options.out)
        # Last: a run that is killed before this makes the model of its last steps again.
        save_state(self.state_file, self.model, self.optimiser, self.step, self.settings())

    def settings(self) -> dict[str, Any]:
        """Every option that the losses depend on, the model's shape and the text, by name."""
        options = vars(self.options).items()
        chosen = {"--" + name.replace("_", "-"): value for name, value in options if name not in FILES + WITHOUT_EFFECT}
        rows = self.group.size * self.options.accumulate * self.options.batch
        if start := self.options.start_from:
            chosen["--start-from"] = str(model_folder(start).resolve())
        return {**chosen, "model": repr(self.model.config), "rows a step": rows, "text": self.tokens.fingerprint}


def tokenizer_source(options: argparse.Namespace) -> Path | None:
    """The model folder whose tokenizer the run takes over; None where it learns its own."""
    named = options.start_from or options.tokenizer
    return model_folder(named) if named else None


def prepare(options: argparse.Namespace, group: Group) -> tuple[Tokens, ModelConfig]:
    """Tokenizer, token files and config in the run's folder; the first process makes them, the others wait."""
    folder, documents = options.out / "training", read_documents(options.data)
    start, source = options.start_from and model_folder(options.start_from), tokenizer_source(options)
    raw = read_json(start / "config.json" if start else options.config)
    if not start:
        raw = {**raw, "vocab_size": options.vocab_size} if isinstance(raw, dict) else raw
        parse_config(raw)  # refuse it before a tokenizer is learnt
    if group.rank == 0:
        check_folder(options.out, source, start)
        if (folder / "state.safetensors").exists():
            pass  # the run that goes on has its tokenizer
        elif source:
            options.out.mkdir(parents=True, exist_ok=True)
            copy_tokenizer(source, options.out)
        else:
            train_tokenizer(documents, options.vocab_size, options.out)
    group.wait()
    tokenizer = Tokenizer(source or options.out)
    if not start:
        raw["vocab_size"] = len(tokenizer.vocabulary.pieces)
    config = parse_config(raw)
    if options.context > config.max_positions:
        raise InputError(f"--context {options.context} is more than the config's {config.max_positions} positions")
    if group.rank == 0:
        tokenized(documents, tokenizer, config.vocab_size, folder)
    group.wait()
    tokens = tokenized(documents, tokenizer, config.vocab_size, folder)
    if min(len(tokens.train), len(tokens.held_out)) <= options.context:
        raise InputError(
            f"the data have {len(tokens.train)} tokens and {len(tokens.held_out)} held out: too few for "
            f"--context {options.context}"
        )
    return tokens, config


def run(options: argparse.Namespace, group: Group, console: Console) -> None:
    """Train to the last step, logging every step and judging and saving as often as asked."""
    trainer = Trainer(options, group)
    leads = group.rank == 0
    log = trainer.state_file.parent / "log.jsonl"
    if leads:
        trim_log(log, trainer.step)
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    tokens_a_step = options.batch * options.context * options.accumulate * group.size
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    began, first = time.perf_counter(), trainer.step
    with Progress(*columns, console=console, disable=not leads) as progress:
        bar = progress.add_task("", total=options.steps, completed=trainer.step)
        while trainer.step < options.steps:
            record = trainer.take_step()
            rate = (trainer.step - first) * tokens_a_step / (time.perf_counter() - began)
            progress.update(bar, completed=trainer.step, description=f"loss {record['loss']:.3f}, {rate:.0f} tokens/s")
            last = trainer.step == options.steps
            if not leads:
                continue
            records = [record]
            if last or trainer.step % options.evaluate_every == 0:
                records.append(trainer.judge())
            with log.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(each) + "\n" for each in records)
            if last or trainer.step % options.save_every == 0:
                trainer.save()
    if leads and trainer.step > first:
        used, most = 6 * size * rate, matmul_rate(trainer.device, torch.bfloat16 if options.autocast else torch.float32)
        console.print(
            f"{size / 1e6:.2f} M parameters, {rate:.0f} tokens/s: {used / 1e9:.0f} GFLOP/s at 6 a parameter and token, "
            f"{used / most / group.size:.0%} of this machine's matrix products ({most / 1e9:.0f} GFLOP/s)"
        )
    if leads:
        plot_losses(log, trainer.state_file.parent / "losses.svg")


def check_options(options: argparse.Namespace) -> None:
    """Raises InputError for a value out of range."""
    for name in ("steps", "batch", "accumulate", "context", "rotation", "evaluate_every", "save_every", "vocab_size"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, found {getattr(options, name)}")
    if not 0 <= options.layer_dropout < 1:
        raise InputError(f"--layer-dropout must be from 0 to below 1, found {options.layer_dropout}")
    if not (0 <= options.exit_scale < math.inf and 0 <= options.exit_power <= 1):
        raise InputError("--exit-scale must be at least 0, and --exit-power from 0 to 1")
    if not 0 <= options.exit_teaching <= 1:
        raise InputError(f"--exit-teaching must be from 0 to 1, found {options.exit_teaching}")
    if not 0 < options.learning_rate < math.inf:
        raise InputError(f"--learning-rate must be above 0, found {options.learning_rate}")
    if not (0 <= options.seed < 2**63 and options.warm_up >= 0):
        raise InputError("--seed and --warm-up must be whole numbers of at least 0")
    if options.start_from and options.tokenizer:
        raise InputError("--start-from DIR brings its tokenizer: leave out --tokenizer")
    if (options.config is None) == (options.start_from is None):
        raise InputError(
            "give the model's shape with --config FILE, or a checkpoint to go on from with --start-from DIR"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog="train.py", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE", help=".txt or .jsonl files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="model folder; a run in it goes on")
    parser.add_argument("--config", type=Path, metavar="FILE", help="config.json of a model to train from scratch")
    parser.add_argument("--start-from", metavar="DIR", help="a checkpoint to go on from, with its tokenizer")
    parser.add_argument("--tokenizer", metavar="DIR", help="a model folder whose tokenizer to use (default: learn one)")
    parser.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="of the tokenizer to be learnt")
    recipe = parser.add_argument_group("the recipe (0, 0 and none: ordinary training)")
    recipe.add_argument("--layer-dropout", type=float, default=0.1, metavar="P", help="p_max, of the last layer")
    recipe.add_argument("--exit-scale", type=float, default=1.0, metavar="E", help="e_scale, of early exits' losses")
    recipe.add_argument("--exit-power", type=float, default=1.0, metavar="A", help="below 1: stronger first exits")
    recipe.add_argument("--exit-teaching", type=float, default=0.0, metavar="A", help="the last layer teaches exits")
    recipe.add_argument("--curriculum", choices=["rotational", "gradual", "none"], default="rotational")
    recipe.add_argument("--rotation", type=int, default=8, metavar="R", help="every R-th layer's exit is on in a step")
    loop = parser.add_argument_group("the loop")
    loop.add_argument("--steps", type=int, default=2000, metavar="N")
    loop.add_argument("--batch", type=int, default=16, metavar="N", help="rows a micro-batch")
    loop.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches a step and process")
    loop.add_argument("--context", type=int, default=256, metavar="N", help="tokens a row")
    loop.add_argument("--learning-rate", type=float, default=2e-3, metavar="R", help="at its peak")
    loop.add_argument("--warm-up", type=int, default=100, metavar="N", help="steps")
    loop.add_argument("--seed", type=int, default=0)
    loop.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=True, help="compute in bf16")
    loop.add_argument("--evaluate-every", type=int, default=100, metavar="N", help="steps")
    loop.add_argument("--save-every", type=int, default=100, metavar="N", help="steps")
    loop.add_argument("--device", help="cpu, cuda ... (default: cuda if there is one)")
    options = parser.parse_args(arguments)
    group = Group()
    try:
        check_options(options)
        keep_freed_memory()
        group = Group.join(options.device)
        run(options, group, Console(stderr=True))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError:
        print("error: out of memory: lower --batch and raise --accumulate", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or options.out} cannot be read or written: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped: the same command goes on from what was last saved in {options.out}", file=sys.stderr)
        return 130
    finally:
        group.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
