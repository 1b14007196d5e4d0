"""Options of train.py: ranges, defaults, and the settings that a continued run must keep."""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model import InputError, ModelConfig
from weights.cli.command_line import OneLineParser
from weights.training.corpus import Rows

# A continued run may change these: files are compared by their contents, --accumulate by the rows per step.
CHANGEABLE = ("data", "out", "config", "vocab_size", "accumulate", "device", "evaluate_every", "save_every")


def within(kind: Callable[[str], float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Argparse type of a number from ``least`` to ``most``."""

    def number(text: str) -> float:
        if least <= (value := kind(text)) <= most:
            return value
        limits = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"must be {limits}, found {text}")

    return number


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parsed options of a command line. Raises InputError for options that exclude each other."""
    count, share, rate = within(int, 1), within(float, 0, 1), within(float, 0)
    parser = OneLineParser(
        prog="train.py",
        description="Train a Llama or Gemma-2 whose early layers can draft: the LayerSkip recipe "
        "(arXiv 2404.16710, section 4.1).",
    )
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, metavar="FILE", help=".txt or .jsonl files")
    add("--out", type=Path, required=True, metavar="DIR", help="model folder; a run in it is continued")
    add("--config", type=Path, metavar="FILE", help="config.json of a model to train from scratch")
    add("--start-from", metavar="DIR", help="a checkpoint to continue from, with its tokenizer")
    add("--tokenizer", metavar="DIR", help="a model folder whose tokenizer to use (default: train one)")
    add("--vocab-size", type=count, default=4096, metavar="N", help="most tokens of a new tokenizer")
    add = parser.add_argument_group("the recipe (0, 0 and none: ordinary training)").add_argument
    add("--layer-dropout", type=share, default=0.1, metavar="P", help="p_max, of the last layer")
    add("--exit-scale", type=rate, default=1.0, metavar="E", help="e_scale, of early exits' losses")
    add("--exit-power", type=share, default=1.0, metavar="A", help="below 1: stronger first exits")
    add("--exit-teaching", type=share, default=0.0, metavar="A", help="the last layer teaches exits")
    curricula = ("rotational", "gradual", "none")
    add("--curriculum", choices=curricula, default="rotational", help="which exits are on in a step")
    add("--rotation", type=count, default=8, metavar="R", help="every R-th layer's exit is on in a step")
    add = parser.add_argument_group("the loop").add_argument
    add("--steps", type=count, default=2000, metavar="N", help="updates of the weights")
    add("--batch", type=count, default=16, metavar="N", help="rows per micro-batch")
    add("--accumulate", type=count, default=1, metavar="N", help="micro-batches per step and process")
    add("--context", type=count, default=256, metavar="N", help="tokens per row")
    add("--learning-rate", type=rate, default=2e-3, metavar="R", help="at its peak")
    add("--muon-rate", type=rate, default=0.0, metavar="R", help="peak of Muon for matrices; 0: AdamW only")
    add("--warm-up", type=within(int, 0), default=100, metavar="N", help="steps")
    add("--seed", type=within(int, 0, 2**63 - 1), default=0, metavar="S", help="of every random choice")
    add("--autocast", action=argparse.BooleanOptionalAction, default=True, help="compute in bf16")
    add("--evaluate-every", type=count, default=100, metavar="N", help="steps")
    add("--save-every", type=count, default=100, metavar="N", help="steps")
    add("--device", help="cpu, cuda ... (default: cuda if there is one)")
    options = parser.parse_args(arguments)
    if options.start_from and options.tokenizer:
        raise InputError("--start-from DIR brings its tokenizer: leave out --tokenizer")
    options.tokenizer = options.tokenizer or options.start_from
    if (options.config is None) == (options.start_from is None):
        raise InputError("give either a model's shape, --config FILE, or a checkpoint to continue, --start-from DIR")
    return options


def settings_of(options: argparse.Namespace, processes: int, config: ModelConfig, *texts: Rows) -> dict[str, Any]:
    """Settings that the losses depend on, by name: options, the model's shape, rows per step, token ids."""
    chosen = {"--" + name.replace("_", "-"): value for name, value in vars(options).items() if name not in CHANGEABLE}
    rows = processes * options.accumulate * options.batch
    ids = hashlib.sha256(b"".join(rows.tokens.tobytes() for rows in texts)).hexdigest()
    return {**chosen, "model": repr(config), "rows per step": rows, "text": ids}
