"""The options of train.py: what may be given, what is refused, and which of them make a run another one."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from model import InputError, ModelConfig
from weights.cli.command_line import OneLineParser
from weights.names import model_folder

# Options that do not make a run another one: files by their names (their contents count), and those without effect.
FILES = ("out", "data", "config", "tokenizer")
WITHOUT_EFFECT = ("device", "evaluate_every", "save_every", "vocab_size", "accumulate")
COUNTS = ("steps", "batch", "accumulate", "context", "rotation", "evaluate_every", "save_every", "vocab_size")


def parser() -> OneLineParser:
    """Every option and its default; values are judged by ``check_options``."""
    parser = OneLineParser(
        prog="train.py",
        description="Train a Llama or Gemma-2 whose early layers can draft: the LayerSkip recipe "
        "(arXiv 2404.16710, section 4.1).",
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE", help=".txt or .jsonl files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="model folder; a run in it is continued")
    parser.add_argument("--config", type=Path, metavar="FILE", help="config.json of a model to train from scratch")
    parser.add_argument("--start-from", metavar="DIR", help="a checkpoint to continue from, with its tokenizer")
    parser.add_argument("--tokenizer", metavar="DIR", help="a model folder whose tokenizer to use (default: learn one)")
    parser.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="of the tokenizer to be learnt")
    recipe = parser.add_argument_group("the recipe (0, 0 and none: ordinary training)")
    recipe.add_argument("--layer-dropout", type=float, default=0.1, metavar="P", help="p_max, of the last layer")
    recipe.add_argument("--exit-scale", type=float, default=1.0, metavar="E", help="e_scale, of early exits' losses")
    recipe.add_argument("--exit-power", type=float, default=1.0, metavar="A", help="below 1: stronger first exits")
    recipe.add_argument("--exit-teaching", type=float, default=0.0, metavar="A", help="the last layer teaches exits")
    recipe.add_argument(
        "--curriculum", choices=["rotational", "gradual", "none"], default="rotational", help="which exits are on when"
    )
    recipe.add_argument("--rotation", type=int, default=8, metavar="R", help="every R-th layer's exit is on in a step")
    loop = parser.add_argument_group("the loop")
    loop.add_argument("--steps", type=int, default=2000, metavar="N", help="updates of the weights")
    loop.add_argument("--batch", type=int, default=16, metavar="N", help="rows a micro-batch")
    loop.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches a step and process")
    loop.add_argument("--context", type=int, default=256, metavar="N", help="tokens a row")
    loop.add_argument("--learning-rate", type=float, default=2e-3, metavar="R", help="at its peak")
    loop.add_argument("--muon-rate", type=float, metavar="R", help="train the blocks' matrices by Muon at this peak")
    loop.add_argument("--warm-up", type=int, default=100, metavar="N", help="steps")
    loop.add_argument("--seed", type=int, default=0, help="of every random choice")
    loop.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=True, help="compute in bf16")
    loop.add_argument("--evaluate-every", type=int, default=100, metavar="N", help="steps")
    loop.add_argument("--save-every", type=int, default=100, metavar="N", help="steps")
    loop.add_argument("--device", help="cpu, cuda ... (default: cuda if there is one)")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raises InputError for a value out of range, and for options that exclude each other."""
    o = options
    ranges = {
        "from 0 to below 1": {"layer_dropout": 0 <= o.layer_dropout < 1},
        "from 0 to 1": {"exit_power": 0 <= o.exit_power <= 1, "exit_teaching": 0 <= o.exit_teaching <= 1},
        "at least 0": {"exit_scale": 0 <= o.exit_scale < math.inf, "warm_up": o.warm_up >= 0},
        "above 0": {
            "learning_rate": 0 < o.learning_rate < math.inf,
            "muon_rate": o.muon_rate is None or 0 < o.muon_rate < math.inf,
        },
        "from 0 to 2^63 - 1": {"seed": 0 <= o.seed < 2**63},
        "at least 1": {name: getattr(o, name) >= 1 for name in COUNTS},
    }
    for words, holds in ranges.items():
        for name, inside in holds.items():
            if not inside:
                raise InputError(f"--{name.replace('_', '-')} must be {words}, found {getattr(options, name)}")
    if options.start_from and options.tokenizer:
        raise InputError("--start-from DIR brings its tokenizer: leave out --tokenizer")
    if (options.config is None) == (options.start_from is None):
        raise InputError("give either a model's shape, --config FILE, or a checkpoint to continue, --start-from DIR")


def settings_of(options: argparse.Namespace, processes: int, config: ModelConfig, text: str) -> dict[str, Any]:
    """Every option that the losses depend on, the model's shape and the text's fingerprint, by name."""
    chosen = {
        "--" + name.replace("_", "-"): value
        for name, value in vars(options).items()
        if name not in FILES + WITHOUT_EFFECT
    }
    if options.start_from:
        chosen["--start-from"] = str(model_folder(options.start_from).resolve())
    rows = processes * options.accumulate * options.batch
    return {**chosen, "model": repr(config), "rows a step": rows, "text": text}
