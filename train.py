"""LayerSkip training (arXiv 2404.16710, section 4.1) of a model whose early layers can draft.

The recipe is in ``training/recipe.py``; ``train`` is an ordinary training loop. Every random
choice of a step follows from (seed, step, micro-batch) alone. So a killed run continues to the same
weights, and several processes (``torchrun``) compute the same gradients as accumulation in one
process, up to the order of sums.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.start import start

    start()

import argparse
import copy
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from app.command_line import run_command
from app.device import keep_freed_memory, pick_device
from app.files import atomic_path, explaining, read_json, write_text
from model import Decoder, InputError, build, parse_config
from training.options import parse_options
from training.recipe import (
    dropout_rates,
    evaluate,
    exit_weights,
    exits_on,
    growth_from_scratch,
    recipe_loss,
)
from training.text import Rows, read_documents, rows_of, train_tokenizer
from weights.load import load_model
from weights.save import save_model
from weights.tokenizer import Tokenizer

MAX_NORM = 1.0  # of a step's gradient
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
LAST_RATE = 0.1  # share of the peak learning rate at the end
STATE = "training/state.pt"
LOG = "training/log.jsonl"


def train(options: argparse.Namespace) -> None:
    """Training loop; rank 0 also evaluates and saves. With ``torchrun``, a process per GPU, or all
    on the CPU.
    """
    keep_freed_memory()
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    device = options.device
    if size > 1:
        dist.init_process_group()
        on_gpu = device != "cpu" and torch.cuda.is_available()
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu"
    model, rows, held_out = prepare(options)
    model.to(pick_device(device)).train().requires_grad_()
    optimisers = optimisers_of(model, options.learning_rate, options.muon_rate)
    state = load_state(options)
    # no parts in a new run
    for part, saved in zip((model, *optimisers), state.pop("parts"), strict=False):
        part.load_state_dict(saved)
    with Progress(console=Console(stderr=True), disable=rank > 0) as progress:
        bar = progress.add_task("training", total=options.steps, completed=state["step"])
        for step in range(state["step"], options.steps):
            micro_batches = range(rank, options.accumulate * size, size)
            mean = backward(model, rows, options, step, micro_batches)
            if size > 1:
                for tensor in (*(parameter.grad for parameter in model.parameters()), mean):
                    dist.all_reduce(tensor.div_(size))
            loss = mean.item()
            norm = clip_grad_norm_(model.parameters(), MAX_NORM).item()
            if not math.isfinite(loss + norm):
                raise InputError(
                    f"the loss or its gradient is non-finite in step {step + 1}: the last saved"
                    " state is kept; start again with a lower --learning-rate and another --out"
                )
            share = learning_rate(step, options.steps, options.warm_up)
            for optimiser in optimisers:
                for group in optimiser.param_groups:
                    group["lr"] = optimiser.defaults["lr"] * share
                optimiser.step()
                optimiser.zero_grad()
            if rank > 0:
                continue
            done = step + 1
            state["records"].append({"step": done, "loss": loss, "norm": norm, "rate": share})
            progress.update(bar, completed=done, description=f"loss {loss:.3f}")
            if done == options.steps or done % options.save_every == 0:
                state["records"].append(
                    {"step": done, **evaluate(model, held_out, options.autocast)}
                )
                parts = [part.state_dict() for part in (model, *optimisers)]
                save_run(options, model, {**state, "step": done, "parts": parts})
    if size > 1:
        dist.destroy_process_group()


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


def backward(
    model: Decoder, rows: Rows, options: argparse.Namespace, step: int, micro_batches: Sequence[int]
) -> Tensor:
    """Mean loss of these micro-batches of a step, whose gradients are added to the parameters'
    gradients.
    """
    layers = model.num_layers
    growth = 1.0 if options.start_from else growth_from_scratch(step, options.steps)
    rates = torch.tensor(dropout_rates(layers, options.layer_dropout, growth))[:, None]
    on = exits_on(options.curriculum, layers, step, options.steps, options.rotation)
    weights = exit_weights(on, options.exit_scale, options.exit_power)
    mean = torch.zeros((), device=model.device)
    for micro in micro_batches:
        seed = np.random.SeedSequence((options.seed, step, micro)).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed))
        tokens = rows.pick(options.batch, generator).to(model.device, non_blocking=True)
        kept = torch.rand(layers, options.batch, generator=generator) >= rates
        with torch.autocast(model.device.type, torch.bfloat16, enabled=options.autocast):
            loss = recipe_loss(model, tokens, kept.to(model.device), weights, options.exit_teaching)
        share = loss / len(micro_batches)
        share.backward()
        mean += share.detach()
    return mean


def prepare(options: argparse.Namespace) -> tuple[Decoder, Rows, Rows]:
    """Initial model in float32, training rows, and held-out rows; a new tokenizer is written into
    ``--out``.

    Raises InputError for a wrong model, text or folder.
    """
    out = options.out
    start = options.start_from
    config = parse_config(read_json(start / "config.json" if start else options.config))
    if options.context > config.max_positions:
        raise InputError(
            f"--context {options.context} is more than the config's {config.max_positions}"
            " positions"
        )
    if (out / "config.json").exists() and not (out / STATE).parent.exists():
        raise InputError(f"{out} holds a model that train.py did not make: give another --out")
    documents = read_documents(options.data)
    if not options.tokenizer and not (out / STATE).exists():
        (out / STATE).parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer(documents, options.vocab_size, out)
    tokenizer = Tokenizer(options.tokenizer or out)
    own = Tokenizer(start) if start else tokenizer
    if (own.pieces, own.special) != (tokenizer.pieces, tokenizer.special):
        raise InputError(
            f"{options.tokenizer} has another vocabulary than {start}: leave out --tokenizer"
        )
    rows = rows_of(documents, tokenizer, options.context)
    if start:
        return load_model(start, torch.float32), *rows
    model = build(replace(config, vocab_size=len(tokenizer.pieces)))
    model.initialise(
        std=0.5 * config.hidden_size**-0.5, generator=torch.Generator().manual_seed(options.seed)
    )
    return model, *rows


def save_run(options: argparse.Namespace, model: Decoder, state: dict[str, Any]) -> None:
    """Write ``model`` as an ordinary bf16 folder, the log, and the ``state`` to continue from, each
    file atomically.

    The state holds the ``records`` of the log. A run that is killed before the state is written
    repeats the last steps. Raises InputError when ``--out`` cannot be written.
    """
    save_model(
        copy.deepcopy(model).bfloat16(),
        options.out,
        tokenizer_from=options.tokenizer or options.out,
    )
    with explaining(
        f"{options.out / STATE} cannot be written, the last saved state is kept; free some space"
        " and run again",
        (OSError, RuntimeError),
    ):
        write_text(options.out / LOG, "".join(f"{json.dumps(each)}\n" for each in state["records"]))
        with atomic_path(options.out / STATE) as temporary:
            torch.save(state, temporary)


def load_state(options: argparse.Namespace) -> dict[str, Any]:
    """State saved in ``--out``, that of step 0 where there is none. Raises InputError for a run
    with other options.
    """
    given = {
        name: str(value)
        for name, value in vars(options).items()
        if name not in ("out", "device", "save_every")
    }
    if not (options.out / STATE).exists():
        return {"options": given, "step": 0, "records": [], "parts": []}
    with explaining(f"{options.out / STATE} is damaged: give another --out", (Exception,)):
        state = dict(torch.load(options.out / STATE, map_location="cpu", weights_only=True))
    for name, saved in state["options"].items():
        if given.get(name) != saved:
            raise InputError(
                f"{options.out} holds a run with {name} {saved}: give the same, or another --out"
            )
    return state


def main(arguments: list[str] | None = None) -> int:
    return run_command(
        lambda: train(parse_options(arguments, __doc__.splitlines()[0])),
        "stopped: the same command continues from the last saved state in its --out folder",
    )


if __name__ == "__main__":
    sys.exit(main())
